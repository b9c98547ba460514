"""RLSD (arXiv 2604.03128, iie-ycx/RLSD at 93e46f7): its advantages by hand, and a step."""

import math
from contextlib import nullcontext

import plain
import pytest
import small_run
import torch
from conftest import same, t
from method_steps import assert_gradients, one_step
from plain import logprobs_of_ids

import rollout
import skills
from lib import model
from methods import rlsd

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


def test_the_weights_fade_within_their_steps():
    shares = [rlsd.weighting_share(step, 0.5, 60) for step in (1, 30, 60, 61)]
    assert shares == pytest.approx([0.5 * 59 / 60, 0.25, 0, 0])


SMALL = {"generations": 3, "batch_size": 2, "verifier": "method_steps:TwoOfThree"}


def teachers_of(run, row):
    """The teachers' prompts and their weights."""
    problem = row["problem"]
    if not run.cfg.bank:
        hint = row["gold"] if run.cfg.teacher_field else f"The reference answer is {row['gold']}."
        text = skills.render_student(f"{problem}\n\n{hint}")
        return [rollout.chat_ids(run.tokenizer, text, thinking="closed")], [1.0]
    pairs = run.bank.retrieve(problem, run.cfg.num_teachers, run.embed)
    texts = [skills.render_teacher(pair, problem) for pair in pairs]
    prompts = [rollout.chat_ids(run.tokenizer, text, thinking="bare") for text in texts]
    return prompts, plain.eq6([pair.s_g for pair in pairs], [pair.s_e for pair in pairs])


@pytest.mark.parametrize("method, field", [("rlsd", ""), ("rlsd", "answer"), ("rlsd+skill", "")])
def test_a_step_is_its_definition(method, field, world_dir, tmp_path):
    """Rows and gradients from whole logits. The teacher's copy is the base here; SGSD's teachers
    are the policy as it is now."""
    changes = SMALL | {"weighting_steps": 4, "teacher_field": field}
    run, rows, got = one_step(world_dir, tmp_path / "run", method, **changes)
    is_base, total = method == "rlsd", 0.0
    for row in rows:
        ids = row["completion_ids"]
        student = rollout.chat_ids(
            run.tokenizer, skills.render_student(row["problem"]), thinking="closed"
        )
        assert row["prompt_ids"] == student  # no skill, no answer
        assert not {"a", "rho"} & {*row}  # a weight is no polarity
        # rewards -1, 1, 1: mean 1/3, sample deviation 2 / sqrt(3); eps 1e-6
        advantage = (row["r"] - 1 / 3) / (2 / math.sqrt(3) + 1e-6)
        assert row["advantage"] == pytest.approx(advantage, abs=1e-6) and row["mixed"] == 1
        logpS_T, gap_T = logprobs_of_ids(run.lm, student, ids, run.cfg.temperature), 0.0
        for prompt, weight in zip(*teachers_of(run, row)):
            with torch.no_grad(), run.lm.disable_adapter() if is_base else nullcontext():
                logpT_T = logprobs_of_ids(run.lm, prompt, ids, run.cfg.temperature)
            gap_T = gap_T + weight * (logpT_T - logpS_T.detach())
        w_T = torch.exp(math.copysign(1, advantage) * gap_T).clamp(0.8, 1.2)
        advantage_T = advantage * (1 - 0.375 + 0.375 * w_T)  # lam = .5 (1 - 1/4)
        assert row["tokens"]["advantage"] == pytest.approx(advantage_T.tolist(), abs=1e-5)
        assert row["loss"] == pytest.approx(-advantage_T.mean().item(), abs=1e-5)
        total = total - (advantage_T * logpS_T).mean() / 6
    assert_gradients(got, run, total)


def test_the_teachers_copy_is_renewed_after_its_period(world_dir, tmp_path):
    changes = SMALL | {"bank": "", "teacher_period": 2, "max_new_tokens": 12}
    with small_run.opened(world_dir, tmp_path / "run", rlsd.RLSDConfig, **changes) as run:
        params = model.trained(run.lm)
        want = {name: p.detach().clone() for name, p in params.items()}
        for step, is_renewed in ((1, False), (2, True), (3, False)):
            rlsd.train_step(run, step)
            if is_renewed:
                want = {name: p.detach().clone() for name, p in params.items()}
            for name, weights in want.items():
                assert torch.equal(run.extra_tensors[f"{name}.teacher"], weights)
        assert any(not torch.equal(want[name], p) for name, p in params.items())
