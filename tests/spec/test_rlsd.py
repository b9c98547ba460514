"""RLSD (arXiv 2604.03128, iie-ycx/RLSD at 93e46f7): its advantages by hand, and a step."""

import math
from contextlib import nullcontext

import driver
import pytest
import torch
from conftest import same, t
from test_methods import Recorder, assert_gradients, perturb

import rollout
import scoring
import skills
from lib import model
from methods import grpo, rlsd, teachers

GAP_T = t([0.55, 0.5]).log() - t([0.5, 0.25]).log()  # log p_T - log p_S: ln 1.1, ln 2


@pytest.mark.parametrize(
    ("advantage", "lam", "want"),
    [
        # w = [1.1, 2 -> 1.2]; A (1 - lam + lam w) = .5 + .5 w
        (1.0, 0.5, [1.05, 1.1]),
        # a failure: w = [1 / 1.1 = .909091, 1/2 -> .8]; -(.5 + .5 w)
        (-1.0, 0.5, [-0.954545, -0.9]),
        (-1.0, 0.25, [-0.977273, -0.95]),  # -(.75 + .25 w)
        (-1.0, 0.0, [-1.0, -1.0]),  # GRPO
        (0.0, 0.5, [0.0, 0.0]),
    ],
)
def test_token_advantages_by_hand(advantage, lam, want):
    same(rlsd.token_advantages(GAP_T, advantage, lam), want, tol=1e-6)


def test_a_teacher_never_turns_an_advantage_round():
    gap_T = t([-100.0, -0.1, 0.0, 0.1, 100.0])
    for advantage in (2.0, -2.0):
        ratio_T = rlsd.token_advantages(gap_T, advantage, 1.0) / advantage
        assert ratio_T.min() == 0.8 and ratio_T.max() == 1.2


def test_the_weights_fade_within_their_steps():
    shares = [rlsd.weighting_share(step, 0.5, 60) for step in (1, 30, 60, 61)]
    assert shares == pytest.approx([0.5 * 59 / 60, 0.25, 0, 0])


# ---------------------------------------------------------------------------------- steps of a run

SMALL = {"generations": 3, "batch_size": 2, "max_new_tokens": 12, "audit_every": 1}
SMALL |= {"verifier": "test_methods:TwoOfThree", "grad_clip": 1e9, "evolve_every": 0}


def one_step(world_dir, out, kind=rlsd.RLSDConfig, step_fn=rlsd.train_step, **changes):
    with driver.opened(world_dir, out, kind, **(SMALL | changes)) as run:
        teachers.begin(run)  # B = 0: the base
        perturb(run)
        run.optimizer = Recorder(model.trained(run.lm).values())
        rows, _ = step_fn(run, 1)
    return run, rows


def logprobs(run, prompt, ids):
    """[T] at the sampling's temperature, from the model's whole logits."""
    logits_LV = run.lm(input_ids=torch.tensor([prompt + ids])).logits[0]
    logp_TV = (logits_LV[len(prompt) - 1 : -1] / run.cfg.temperature).log_softmax(-1)
    return logp_TV[range(len(ids)), ids]


def teachers_of(run, row):
    """The teachers' prompts and their weights."""
    bank, problem = run.cfg.bank, row["problem"]
    if not bank:
        text = skills.render_student(f"{problem}\n\nThe reference answer is {row['gold']}.")
        return [rollout.chat_ids(run.tokenizer, text, thinking="closed")], [1.0]
    pairs = run.bank.retrieve(problem, run.cfg.num_teachers, run.embed)
    weights = [math.exp((pair.s_g + pair.s_e) / 2) for pair in pairs]
    texts = [skills.render_teacher(pair, problem) for pair in pairs]
    prompts = [rollout.chat_ids(run.tokenizer, text, thinking="bare") for text in texts]
    return prompts, [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize("form", ["answer", "skills"])
def test_a_step_is_its_definition(form, world_dir, tmp_path):
    """Rows and gradients from whole logits. The teacher's copy is the base here; SGSD's teachers
    are the policy as it is now."""
    changes = {"bank": ""} if form == "answer" else {"teacher_prefix": "bare"}
    run, rows = one_step(world_dir, tmp_path / "run", weighting_steps=4, **changes)
    total = 0.0
    for row in rows:
        ids = row["completion_ids"]
        student = rollout.chat_ids(
            run.tokenizer, skills.render_student(row["problem"]), thinking="closed"
        )
        assert row["prompt_ids"] == student  # no skill, no answer
        # rewards -1, 1, 1: mean 1/3, sample deviation 2 / sqrt(3); eps 1e-6
        advantage = (row["r"] - 1 / 3) / (2 / math.sqrt(3) + 1e-6)
        assert row["advantage"] == pytest.approx(advantage, abs=1e-6)
        logpS_T, gap_T = logprobs(run, student, ids), 0.0
        for prompt, weight in zip(*teachers_of(run, row)):
            with torch.no_grad(), run.lm.disable_adapter() if form == "answer" else nullcontext():
                logpT_T = logprobs(run, prompt, ids)
            gap_T = gap_T + weight * (logpT_T - logpS_T.detach())
        w_T = torch.exp(math.copysign(1, advantage) * gap_T).clamp(0.8, 1.2)
        advantage_T = advantage * (1 - 0.375 + 0.375 * w_T)  # lam = .5 (1 - 1/4)
        assert row["tokens"]["advantage"] == pytest.approx(advantage_T.tolist(), abs=1e-5)
        assert row["loss"] == pytest.approx(-advantage_T.mean().item(), abs=1e-5)
        total = total - (advantage_T * logpS_T).mean() / 6
    assert_gradients(run.optimizer.gradients, run, total)


def test_without_weights_it_is_grpo_sampled_as_sgsd(world_dir, tmp_path):
    """The two differ in the advantage's epsilon, 1e-6 and 1e-4."""
    ours, rows = one_step(world_dir, tmp_path / "rlsd", bank="", weighting=0.0)
    short = grpo.SHORT | {"grad_clip": 1e9, "max_new_tokens": 12, "bank": ""}
    theirs, rows_of_grpo = one_step(
        world_dir, tmp_path / "grpo", grpo.GRPOConfig, grpo.train_step, **short
    )
    assert [x["completion_ids"] for x in rows] == [x["completion_ids"] for x in rows_of_grpo]
    for a, b in zip(ours.optimizer.gradients, theirs.optimizer.gradients):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=1e-6)


def test_the_teachers_copy_is_renewed_after_its_period(world_dir, tmp_path):
    changes = SMALL | {"bank": "", "learning_rate": 1e-2, "teacher_period": 2}
    with driver.opened(world_dir, tmp_path / "run", rlsd.RLSDConfig, **changes) as run:
        params = model.trained(run.lm)
        began = {name: p.detach().clone() for name, p in params.items()}
        for step, is_renewed in ((1, False), (2, True), (3, False)):
            if is_renewed:
                began = None
            rlsd.train_step(run, step)
            run.step = step
            began = began or {name: p.detach().clone() for name, p in params.items()}
            for name, weights in began.items():
                assert torch.equal(run.extra_tensors[f"{name}.teacher"], weights)
        assert any(not torch.equal(began[name], p) for name, p in params.items())


def test_without_a_share_of_the_weights_no_teacher_speaks(world_dir, tmp_path, monkeypatch):
    """From --weighting-steps on RLSD is GRPO, and every token has its solution's advantage."""
    asked = []
    score = scoring.score_teachers
    monkeypatch.setattr(scoring, "score_teachers", lambda *a: asked.append(1) or score(*a))
    changes = {"generations": 2, "max_new_tokens": 12, "audit_every": 1, "weighting_steps": 1}
    changes |= {"verifier": "driver:UnevenVerifier", "bank": ""}
    with driver.opened(world_dir, tmp_path / "run", rlsd.RLSDConfig, **changes) as run:
        of_step, _ = rlsd.train_step(run, 1)
    assert not asked and any(row["loss"] for row in of_step)
    for row in of_step:
        assert {*row["tokens"]["advantage"]} == {row["advantage"]}
