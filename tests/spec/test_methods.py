"""GRPO, OPSD and the ablations (§4.1, §4.5, App. F.1): their formulas, and what each one changes.

Formulas come first, by hand. Then a step of each is compared with its definition, which scores one
row at a time by the model's own full logits.
"""

import dataclasses
import math
import os
import signal
from contextlib import nullcontext

import driver
import plain
import pytest
import torch
from conftest import make_model, make_tokenizer, one_line, same, t
from driver import completes, flags, refused, rows, two
from safetensors.torch import load_file

import rollout
import scoring
import skills
from lib import config, model, verify
from methods import ablations, divergences, grpo, teachers
from methods.ablations import AblationConfig

# ------------------------------------------------------------------------------ formulas by hand


def test_grpo_advantages():
    # mean 0, std sqrt(4 / 3) = 1.1547: +-1 / (1.1547 + 0.0001)
    want = [x / (math.sqrt(4 / 3) + 1e-4) for x in (1, -1, -1, 1)]
    same(grpo.grpo_advantages(t([1.0, -1.0, -1.0, 1.0])), want)
    # mean 1/2, std sqrt((1/4 + 1/4 + 0) / 2) = 1/2; eps 1/2: -+1/2 and 0
    same(grpo.grpo_advantages(t([0.0, 1.0, 0.5]), eps=0.5), [-0.5, 0.5, 0.0])
    assert not grpo.grpo_advantages(t([-1.0] * 8)).any()  # a group that teaches nothing
    one_line(lambda: grpo.grpo_advantages(torch.ones(1)), "G >= 2", "(1,)")


@pytest.mark.parametrize(
    ("advantage", "loss", "slopes"),
    [
        # ratios 1, 2 and 1/2 are clipped to 1, 1.2 and 0.8; the smaller of both terms counts:
        # A = 2: 2, 2.4 and 1, a sum of 5.4; the second is the clipped one and has no slope
        (2.0, -5.4 / 3, [-2 / 3, 0.0, -1 / 3]),
        # A = -1: -1, -2 and -0.8, a sum of -3.8; the third is the clipped one
        (-1.0, 3.8 / 3, [1 / 3, 2 / 3, 0.0]),
    ],
)
def test_grpo_loss(advantage, loss, slopes):
    old_T = t([-1.0, -2.0, -0.5])
    new_T = (old_T + t([1.0, 2.0, 0.5]).log()).requires_grad_()
    got = grpo.grpo_loss(new_T, old_T, advantage)
    got.backward()
    same(got.detach(), loss)
    same(new_T.grad, slopes)


def test_generalized_jsd():
    """Forward is KL(T || S), reverse KL(S || T) (D10); jsd is symmetric; equal sides have none."""
    jsd, beta = divergences.generalized_jsd, divergences.JSD_BETA
    s_V, t_V = t([0.5, 0.5]).log(), t([0.75, 0.25]).log()
    forward = [0.75 * math.log(1.5), 0.25 * math.log(0.5)]  # entry by entry
    same(jsd(s_V, t_V, beta["forward_kl"]), sum(forward))
    same(jsd(s_V, t_V, beta["forward_kl"], clip=0.1), 0.1 + forward[1])  # S16: 0.304 is cut
    same(jsd(s_V, t_V, beta["reverse_kl"]), 0.5 * math.log(2 / 3) + 0.5 * math.log(2))
    # temperature 1/2 squares and renormalises: the teacher is (9/10, 1/10)
    same(jsd(s_V, t_V, 1.0, temperature=0.5), 0.5 * math.log(5 / 9) + 0.5 * math.log(5))
    # beta 1/4: M = (9/16, 7/16)
    of_teacher = 0.75 * math.log(12 / 9) + 0.25 * math.log(4 / 7)
    of_student = 0.5 * math.log(8 / 9) + 0.5 * math.log(8 / 7)
    same(jsd(s_V, t_V, 0.25), of_teacher / 4 + 3 * of_student / 4)
    same(jsd(s_V, t_V, beta["jsd"]), jsd(t_V, s_V, beta["jsd"]).item())
    for name in beta:
        same(jsd(s_V, s_V + 3, beta[name]), 0.0)
    one_line(lambda: jsd(s_V, t_V, 2), "got 2")


@pytest.mark.parametrize(
    ("top_k", "sampled", "student", "teacher"),
    [  # student (.4 .3 .2 .1), teacher (.1 .2 .3 .4): what is left, the sampled token first
        (1, 3, [1.0], [1.0]),  # the teacher's best is the sampled one, and counts once
        (1, 0, [0.8, 0.2], [0.2, 0.8]),  # tokens 0 and 3: .4 .1 and .1 .4
        (2, 2, [2 / 3, 1 / 3], [3 / 7, 4 / 7]),  # tokens 2 and 3: .2 .1 and .3 .4
        (2, 1, [3 / 6, 2 / 6, 1 / 6], [2 / 9, 3 / 9, 4 / 9]),
        (99, 0, [0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]),
    ],
)
def test_local_support(top_k, sampled, student, teacher):
    """KL(T || S) and the sampled gap on the teacher's top k and the sampled token (S19)."""
    ids_1 = torch.tensor([sampled])
    s_1V, t_1V = t([[0.4, 0.3, 0.2, 0.1]]).log(), t([[0.1, 0.2, 0.3, 0.4]]).log()
    kl_1, gap_1 = divergences.local_support(ids_1, s_1V, t_1V, top_k)
    same(kl_1, [sum(q * math.log(q / p) for p, q in zip(student, teacher))])
    same(gap_1, [math.log(teacher[0] / student[0])])


# ---------------------------------------------------------------------------------- steps of a run


class Recorder(torch.optim.SGD):
    """An optimizer that keeps the gradients and leaves the weights as they are."""

    def step(self, closure=None):
        self.gradients = [p.grad.clone() for p in self.param_groups[0]["params"]]


class TwoOfThree(verify.Judge):
    """The first of each three solutions is wrong."""

    def judge(self, cases):
        return [verify.Verdict(None, i % 3 > 0) for i in range(len(cases))]


def perturb(run):
    """Give the adapters weights as after some training: at first B = 0, and teachers are alike."""
    for name, p in model.trained(run.lm).items():
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        torch.nn.init.normal_(p, std=0.1, generator=generator)


def one_step(world_dir, out, method="ablations", **changes):
    """Run, rows and gradients of one step of a method; only with +skill the others have a bank.

    A row has its line of tokens.jsonl as "tokens".
    Clip and threshold bite on random gaps. A copied teacher is the base.
    """
    name, _, skilled = method.partition("+")
    kind, step_fn, _, variants = driver.METHODS[name]
    given = {"c_delta": 0.3, "eps_a": 0.17, "audit_every": 1, "grad_clip": 1e9}
    if name != "ablations":
        given |= {"max_new_tokens": 12, **(variants["bank"] if skilled else {"bank": ""})}
    with driver.opened(world_dir, out, kind, **(given | changes)) as run:
        teachers.begin(run)
        perturb(run)
        run.optimizer = Recorder(model.trained(run.lm).values())
        rows_of_step, _ = step_fn(run, 1)
    for row, tokens in zip(rows_of_step, run.audits, strict=True):
        row["tokens"] = tokens
    return run, rows_of_step, run.optimizer.gradients


def assert_gradients(got, run, total):
    want = torch.autograd.grad(total, list(model.trained(run.lm).values()))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, atol=3e-5, rtol=2e-3)


def test_with_default_settings_a_run_equals_sgsds_own_bit_for_bit(world_dir, tmp_path):
    outs = [tmp_path / "sgsd", tmp_path / "ablations"]
    for out in outs:
        argv = flags(world_dir, out, steps=3, audit_every=1, eps_a=0.4)
        completes(driver.main, [out.name, *argv])
    assert driver.state(outs[0]) == driver.state(outs[1])
    of_all = set()
    for row in rows(outs[0] / "rollouts.jsonl"):
        of_all |= {*row["rho"]}
    assert of_all == {-1, 0, 1}


# ------------------------------------------------- each ablation is its definition, on whole logits

CASES = {
    "no mask": {"token_mask": False},
    "no clip": {"clip": False},
    "no threshold": {"eps_a": 0.0},
    "none of the three": {"token_mask": False, "clip": False, "eps_a": 0.0},
    "no polarity": {"polarity": False},
    "one teacher": {"num_teachers": 1},
    "random pairs": {"retrieval": "random"},
    "answer": {"answer_pi": True, "loss_temperature": 1.3},
    "frozen, one row a forward pass": {"teacher": "frozen", "score_tokens": 1},
    "periodic": {"teacher": "periodic"},
    "ema": {"teacher": "ema"},
    "reverse KL": {"objective": "reverse_kl"},
    "forward KL": {"objective": "forward_kl"},
    "jsd, one row a forward pass": {"objective": "jsd", "score_tokens": 1},
    "top support": {"support_top_k": 5},
    "gemma2 jsd": {"objective": "jsd", "model": "gemma2"},
}


def logprobs_of(run, text, thinking, ids):
    """[T, V] log-probabilities at the loss's temperature, from the model's whole logits."""
    prompt = rollout.chat_ids(run.tokenizer, text, thinking=thinking)
    temperature = getattr(run.cfg, "score_temperature", run.cfg.temperature)
    return plain.logprobs(run.lm, prompt, ids, temperature)


def loss_and_gap(cfg, s_TV, t_TV, ids):
    """Token losses and gaps [T] of one teacher, from log-probabilities of both sides."""
    at = range(len(ids)), ids
    if cfg.support_top_k:
        keep = t_TV >= t_TV.topk(cfg.support_top_k).values[:, -1:]
        keep[at] = True
        s_TV, t_TV = (x.masked_fill(~keep, -1e4).log_softmax(-1) for x in (s_TV, t_TV))
    gap_T = (t_TV - s_TV)[at]
    forward = t_TV.exp() * (t_TV - s_TV)
    if cfg.objective == "gate":
        z_T = forward.sum(-1) if cfg.support_top_k else gap_T
        return math.log(2) - torch.log(1 + torch.exp(-(z_T**2) / 2)), gap_T
    m_TV = ((s_TV.exp() + t_TV.exp()) / 2).log()
    terms = {
        "forward_kl": forward,
        "reverse_kl": s_TV.exp() * (s_TV - t_TV),
        "jsd": (t_TV.exp() * (t_TV - m_TV) + s_TV.exp() * (s_TV - m_TV)) / 2,
    }
    return terms[cfg.objective].sum(-1), gap_T


def teacher_by_definition(cfg, row, k, m_T, s_TV, t_TV):
    """Teacher k's part of a rollout's loss, with gradient, after its numbers have been checked."""
    ids, tokens, count = row["completion_ids"], row["tokens"], m_T.sum().item()
    bound = cfg.c_delta if cfg.clip else math.inf

    def support(gap_T):
        return (m_T * gap_T.clamp(-bound, bound)).sum().item() / count

    ell_T, gap_T = loss_and_gap(cfg, s_TV, t_TV, ids)
    assert tokens["delta"][k] == pytest.approx(gap_T.tolist(), abs=2e-5)
    a = row["a"][k]
    assert a == pytest.approx(support(gap_T), abs=1e-5)
    rho = 0 if abs(a) <= cfg.eps_a else row["r"] * math.copysign(1, a)
    assert row["rho"][k] == (rho if cfg.polarity else 1)
    rho_T = m_T * row["rho"][k]
    if "credit" in tokens:  # Eq. 20
        slope_T = gap_T / (1 + torch.exp(gap_T**2 / 2))
        credit_T = row["alpha"][k] * rho_T * slope_T / count
        assert tokens["credit"][k] == pytest.approx(credit_T.tolist(), abs=2e-5)
    if cfg.support_top_k:  # S19: the whole vocabulary's gap beside the truncated one
        full_T = (t_TV - s_TV)[range(len(ids)), ids]
        assert tokens["delta_full"][k] == pytest.approx(full_T.tolist(), abs=2e-5)
        error = (m_T * (gap_T - full_T).abs()).sum().item() / count
        logged = row["a_full"][k], row["gap_error"][k]
        assert logged == pytest.approx((support(full_T), error), abs=1e-5)
        assert error > 0.1
    return row["alpha"][k] * (rho_T * ell_T).sum() / count


def rollout_by_definition(run, x, row):
    """A rollout's loss, with gradient, after its row has been checked."""
    cfg, shown, ids, tokens = run.cfg, x.problem, row["completion_ids"], row["tokens"]
    pairs = run.bank.retrieve(x.problem, cfg.num_teachers, run.embed)
    if cfg.retrieval == "random":
        pairs = ablations.retrieve(run, x, 1)
    if cfg.answer_pi:
        shown += f"\n\nThe reference answer is {x.answer}."
    masked = run.masked_ids if cfg.token_mask else ()
    m_T = torch.tensor([int(i not in masked) for i in ids])
    assert tokens["mask"] == m_T.tolist()
    weights = plain.eq6([pair.s_g for pair in pairs], [pair.s_e for pair in pairs])
    assert row["alpha"] == pytest.approx(weights)
    assert ("credit" in tokens) == (cfg.objective == "gate" and not cfg.support_top_k)
    total, s_TV = 0.0, logprobs_of(run, skills.render_student(x.problem), "closed", ids)
    for k, pair in enumerate(pairs):
        is_base = cfg.teacher != "live"
        with torch.no_grad(), run.lm.disable_adapter() if is_base else nullcontext():
            t_TV = logprobs_of(run, skills.render_teacher(pair, shown), "bare", ids)
        total = total + teacher_by_definition(cfg, row, k, m_T, s_TV, t_TV)
    return total


@pytest.mark.parametrize("name", CASES)
def test_a_changed_step_is_its_definition(name, world_dir, tmp_path):
    """Rows and gradients from whole logits; Gemma 2's are capped, so its head has no slices."""
    changes = CASES[name]
    if "model" in changes:
        changes = {**changes, "model": str(tmp_path / "model"), "attn": "eager"}
        make_model("gemma2").save_pretrained(tmp_path / "model")
        make_tokenizer().save_pretrained(tmp_path / "model")
    run, rows_of_step, got = one_step(world_dir, tmp_path / "run", **changes)
    problem_of = {x.id: x for x in run.problems}
    total = 0.0
    for row in rows_of_step:
        loss = rollout_by_definition(run, problem_of[row["problem_id"]], row)
        assert row["loss"] == pytest.approx(loss.item(), abs=1e-5)
        total = total + loss / 4
    assert len({tuple(row["completion_ids"]) for row in rows_of_step}) == 4 == len(rows_of_step)
    assert_gradients(got, run, total)


@pytest.mark.parametrize("method", ["opsd", "opsd+skill"])
def test_a_step_of_opsd_is_its_definition(method, world_dir, tmp_path):
    """KL(T || S) of the base that sees the answer, at most .05 of each entry; the verdict plays no
    part, and every token counts. With skills both roles see them (S17)."""
    run, rows_of_step, got = one_step(world_dir, tmp_path / "run", method)
    total = 0.0
    for row in rows_of_step:
        problem, ids, pairs = row["problem"], row["completion_ids"], []
        if method == "opsd+skill":
            pairs = run.bank.retrieve(problem, 3, run.embed)
        shown = f"{problem}\n\nThe reference answer is {row['gold']}."
        s_TV = logprobs_of(run, skills.render_skills(pairs, problem), "closed", ids)
        with torch.no_grad(), run.lm.disable_adapter():
            t_TV = logprobs_of(run, skills.render_skills(pairs, shown), "bare", ids)
        loss = (t_TV.exp() * (t_TV - s_TV)).clamp(max=0.05).sum(-1).mean()
        assert row["loss"] == pytest.approx(loss.item(), abs=1e-5)
        gaps = (t_TV - s_TV)[range(len(ids)), ids].tolist()
        assert row["tokens"]["delta"] == [pytest.approx(gaps, abs=2e-5)]
        total = total + loss / 4
    assert_gradients(got, run, total)


@pytest.mark.parametrize("method", ["grpo", "grpo+skill"])
def test_the_gradient_of_grpo_is_the_policy_gradient(method, world_dir, tmp_path):
    changes = {"generations": 3, "batch_size": 2, "verifier": "test_methods:TwoOfThree"}
    run, rows_of_step, got = one_step(world_dir, tmp_path / "run", method, **changes)
    assert [row["r"] for row in rows_of_step] == [-1, 1, 1] * 2
    assert len({tuple(row["completion_ids"]) for row in rows_of_step}) == 6
    assert len({tuple(row["prompt_ids"]) for row in rows_of_step}) == 2
    total = 0.0
    for row in rows_of_step:
        # rewards -1, 1, 1: mean 1/3, sample std 2 / sqrt(3)
        advantage = (row["r"] - 1 / 3) / (2 / math.sqrt(3) + 1e-4)
        assert (row["advantage"], row["loss"]) == pytest.approx((advantage, -advantage), abs=1e-5)
        pairs, ids = [], row["completion_ids"]
        if method == "grpo+skill":
            pairs = run.bank.retrieve(row["problem"], 3, run.embed)
        assert [names[0] for names in row["pairs"]] == [pair.skill["skill_id"] for pair in pairs]
        logp_TV = logprobs_of(run, skills.render_skills(pairs, row["problem"]), "bare", ids)
        # at ratio 1 the clipped ratio's gradient is the policy gradient
        total = total - advantage * logp_TV[range(len(ids)), ids].mean() / 6
    assert_gradients(got, run, total)


def test_random_pairs_are_drawn_anew_for_each_step_and_again_the_same(world_dir, tmp_path):
    changes = {"retrieval": "random", "num_teachers": 2}
    with driver.opened(world_dir, tmp_path / "run", AblationConfig, **changes) as run:
        for x in run.problems:
            chosen = [ablations.retrieve(run, x, step) for step in range(8)]
            assert chosen == [ablations.retrieve(run, x, step) for step in range(8)]
            names = set()
            for one, other in chosen:
                assert (one.s_g, one.s_e, other.s_g, other.s_e) == (0, 0, 0, 0)  # equal weights
                assert one.skill != other.skill and one.mistake != other.mistake
                names.add((one.skill["skill_id"], other.skill["skill_id"]))
            assert len(names) > 3  # of 12 ordered pairs of four skills
        run.bank = skills.SkillBank(run.bank.general_skills, [])
        assert ablations.retrieve(run, run.problems[0], 1) == []  # S8


def test_truncated_rollouts_can_be_left_out(world_dir, tmp_path):
    _, of_step, gradients = one_step(world_dir, tmp_path / "run", drop_truncated=True)
    assert {(row["truncated"], row["loss"]) for row in of_step} == {(True, 0.0)}
    for row in of_step:  # what does not act is not logged
        assert not torch.tensor(row["tokens"]["credit"]).any()
    assert not any(gradient.any() for gradient in gradients)


# ---------------------------------------------------------------------------------------- teachers


@pytest.mark.parametrize("teacher", ["periodic", "ema"])
def test_a_copied_teacher_follows_also_in_a_run_that_is_stopped_and_continued(
    teacher, world_dir, tmp_path
):
    """Periodic: the student after every third step. Ema: .9 old + .1 new after each."""
    changes = {"teacher": teacher, "teacher_period": 3, "teacher_decay": 0.9, "steps": 5}
    want = {}

    def step_fn(run, step):
        params = model.trained(run.lm)
        if step == 1:
            want.update({name: p.detach().double().clone() for name, p in params.items()})
        result = ablations.train_step(run, step)
        new = 0.1 if teacher == "ema" else float(step % 3 == 0)
        for name, p in params.items():
            want[name] = (1 - new) * want[name] + new * p.detach().double()
            copy = run.extra_tensors[f"{name}.teacher"].double()
            torch.testing.assert_close(copy, want[name], atol=1e-7, rtol=0.0)
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    for code in (130, 0):
        run = driver.train(world_dir, tmp_path / "run", step_fn, AblationConfig, **changes)
        assert run.code == code


# ------------------------------------------------------------------------------------- the command


LENGTHS = ("max_new_tokens", "max_prompt_tokens", "temperature", "top_p", "top_k")


def read(method, *argv):
    return driver.parsed(argv, method)


def test_a_methods_own_defaults_and_flags_that_win_over_them():
    """Tab. 11 and the released OPSD settings; sgsd's own are the paper's."""
    for argv in ([], ["--bank", "b.json"]):
        of_grpo, of_opsd = read("grpo", *argv), read("opsd", *argv)
        assert [getattr(of_grpo, name) for name in LENGTHS] == [16000, 2048, 1.2, 1.0, 0]
        assert (of_grpo.generations, of_grpo.student_prefix, of_grpo.grad_clip) == (8, "bare", 1.0)
        assert [getattr(of_opsd, name) for name in LENGTHS] == [1024, 20000, 1.1, 0.95, 20]
        assert of_opsd.objective_clip == 0.05
        for cfg in (of_grpo, of_opsd):
            assert cfg.uses_skill_bank == bool(argv)
            if argv:  # S17
                assert (cfg.num_teachers, cfg.evolve_every) == (3, 0)
    assert read("grpo", "--top-k", "20").top_k == 20
    ours = dataclasses.asdict(read("ablations"))
    assert dataclasses.asdict(config.Config(out="runs/ablation")).items() <= ours.items()
    outs = [read(name).out for name in driver.METHODS]
    assert len({*outs}) == len(outs)  # no method trains into another's folder


def test_the_short_grpo_is_sampled_and_clipped_as_sgsd():
    short, ours = read("grpo", "--short"), config.Config()
    for name in (*LENGTHS, "student_prefix", "grad_clip", "learning_rate", "batch_size"):
        assert getattr(short, name) == getattr(ours, name)
    assert (short.student_prefix, short.generations) == ("closed", 8)
    assert not short.uses_skill_bank
    assert read("grpo", "--short", "--max-new-tokens", "9").max_new_tokens == 9


def test_groups_stay_together_over_ranks(world_dir, tmp_path):
    """Three problems of two rollouts on two ranks: one order of rows, one step, and no bank."""
    changes = {"batch_size": 3, "steps": 1, "generations": 2, "max_new_tokens": 12, "bank": ""}
    changes["verifier"] = "driver:UnevenVerifier"
    completes(driver.main, ["grpo", *flags(world_dir, tmp_path / "1", **changes)])
    assert two(["grpo", *flags(world_dir, tmp_path / "2", **changes)], tmp_path) == [0, 0]
    moments, logs = [], []
    for n in "12":
        logs.append(rows(tmp_path / n / "rollouts.jsonl"))
        moments.append(load_file(tmp_path / n / "checkpoints/step_000001/trainer.safetensors"))
        assert not (tmp_path / n / "bank").exists()
    ids = [[row["completion_ids"] for row in log] for log in logs]
    names = [row["problem_id"] for row in logs[0]]
    assert ids[0] == ids[1] and len(ids[0]) == 6 and names[::2] == names[1::2]
    for name in moments[0]:
        torch.testing.assert_close(moments[0][name], moments[1][name], atol=1e-6, rtol=1e-3)


FLAGS = {
    "grpo --generations 1": ("--generations", ">= 2"),
    "grpo --temperature 0": ("--temperature 0",),
    "ablations --objective jsd --support-top-k 9": ("--support-top-k", "--objective"),
}


@pytest.mark.parametrize("given", FLAGS)
def test_a_wrong_flag_gives_one_clear_line(given, tmp_path, capsys):
    name, *argv = given.split()
    program = {"grpo": grpo, "ablations": ablations}[name].main
    refused(capsys, program, [*argv, f"--out={tmp_path / 'run'}"], *FLAGS[given])


def test_a_group_whose_rewards_are_equal_is_not_scored(world_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "token_logprobs", lambda *_, **__: pytest.fail("it is scored"))
    changes = {"generations": 3, "batch_size": 2, "verifier": "driver:Exact"}
    _, of_step, gradients = one_step(world_dir, tmp_path / "run", "grpo", **changes)
    assert {(row["r"], row["loss"]) for row in of_step} == {(-1, 0)}
    assert not any(gradient.any() for gradient in gradients)
