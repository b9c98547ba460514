"""GRPO, OPSD and the ablations (§4.1, §4.5, App. F.1): their formulas, and what each one changes.

Formulas come first, by hand. Then a step of each is compared with its definition, which scores one
row at a time by the model's own full logits.
"""

import dataclasses
import math
import os
import signal
from contextlib import nullcontext
from types import SimpleNamespace

import driver
import pytest
import torch
from conftest import make_model, make_tokenizer, one_line, same, t
from driver import completes, flags, refused, rows, two
from safetensors.torch import load_file

import rollout
import scoring
import sgsd
import skills
from lib import config, model, problems, verify
from methods import ablations, divergences, grpo, opsd, teachers
from methods.ablations import AblationConfig
from methods.opsd import OPSDConfig


def by_length(names, long):
    """The names of cases, of which these are marked `long`."""
    return [pytest.param(name, marks=pytest.mark.long) if name in long else name for name in names]


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
    # both gaps are logged: the whole vocabulary's (Eq. 7) is off by the log of the masses' ratio
    cfg = AblationConfig(support_top_k=top_k)
    loss_1, local_1, full_1 = ablations.token_losses(cfg, ids_1, s_1V, [t_1V])[:, 0].T
    same(loss_1, [math.log(2) - math.log(1 + math.exp(-(kl_1.item() ** 2) / 2))])
    same(local_1, gap_1.tolist())
    same(full_1, [math.log((1 + sampled) / (4 - sampled))])


def test_a_reversed_forward_kl_grows_without_bound_and_jsd_and_gate_stay_below_log_2():
    """S26: a student that is driven away from its teacher's token by a logit of -x.

    The teacher gives it 1 - q with q = 1 / (1 + e^5) = .0067. Forward KL tends to (1 - q) x, JSD
    and the gate to log 2 at most.
    """
    teacher, student = t([5.0, 0.0]), t([-500.0, 0.0])
    forward = divergences.generalized_jsd(student, teacher, divergences.JSD_BETA["forward_kl"])
    assert float(forward) == pytest.approx(496.6, abs=0.1)
    assert divergences.generalized_jsd(student, teacher, divergences.JSD_BETA["jsd"]) < math.log(2)
    assert sgsd.gated_loss(t(500.0), 1.0) <= math.log(2)


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
    """Run, rows and gradients of one step; clip and threshold bite on random gaps."""
    changes = {"c_delta": 0.3, "eps_a": 0.17, "audit_every": 1, **changes, "grad_clip": 1e9}
    kind, step_fn, _ = driver.METHODS[method]
    with driver.opened(world_dir, out, kind, **changes) as run:
        perturb(run)
        run.optimizer = Recorder(model.trained(run.lm).values())
        rows_of_step, _ = step_fn(run, 1)
    return run, rows_of_step, run.optimizer.gradients


def settings_of(method, **changes):
    """A method with its own defaults, cut to a test's size; a bank only for +skill."""
    name, _, skilled = method.partition("+")
    kind, _, variants = driver.METHODS[name]
    own = {f.name: f.default for f in dataclasses.fields(kind) if f.name in PAPERS}
    own |= variants["bank"] if skilled else {"bank": ""}
    return {"method": name, **own, "max_new_tokens": 12, "audit_every": 1, **changes}


PAPERS = "student_prefix temperature top_p top_k max_prompt_tokens rollout_rows grad_clip".split()


def problems_of(run):
    """The problem of each rollout of the first step, in order."""
    cfg = run.cfg
    batch = problems.minibatch(run.problems, cfg.batch_size, 1, cfg.seed)
    return [x for x, _ in batch for _ in range(getattr(cfg, "generations", 1))]


def assert_gradients(got, run, total):
    want = torch.autograd.grad(total, list(model.trained(run.lm).values()))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, atol=3e-5, rtol=2e-3)


@pytest.mark.parametrize("processes", [1, 2])
def test_with_default_settings_a_run_equals_sgsds_own_bit_for_bit(processes, world_dir, tmp_path):
    """Five problems a step, so that two processes have uneven shares."""
    changes = {"steps": 3, "batch_size": 5, "audit_every": 1, "eps_a": 0.4}
    outs = [tmp_path / "sgsd", tmp_path / "ablations"]
    for out in outs:
        argv = [out.name, *flags(world_dir, out, **changes)]
        if processes == 1:
            completes(driver.main, argv)
        else:
            assert two(argv, tmp_path) == [0, 0]
    assert driver.state(outs[0]) == driver.state(outs[1])
    of_all = set()
    for row in rows(outs[0] / "rollouts.jsonl"):
        of_all |= {*row["rho"]}
    assert of_all == {-1, 0, 1}


# ------------------------------------------------- each ablation is its definition, on whole logits

JUDGED = {"a", "rho", "losses", "loss"}
SCORED = {*JUDGED, "a_plain", "first_gap", "clipped"}
CASES = {  # settings, and the fields of a row that may then differ from those of SGSD
    "sgsd": ({}, None),
    "no mask": ({"token_mask": False}, {*JUDGED, "unmasked", "clipped"}),
    "no clip": ({"clip": False}, {"a", "rho", "loss"}),
    "no threshold": ({"eps_a": 0.0}, {"rho", "loss"}),
    "none of the three": (
        {"token_mask": False, "clip": False, "eps_a": 0.0},
        {*JUDGED, "unmasked", "clipped"},
    ),
    "no polarity": ({"polarity": False}, {"rho", "loss"}),
    "one teacher": ({"num_teachers": 1}, None),  # rows with fewer numbers
    "random pairs": ({"retrieval": "random"}, {*SCORED, "pairs", "s_g", "s_e", "alpha"}),
    "answer": ({"answer_pi": True, "loss_temperature": 1.3}, SCORED),
    "frozen, one row a forward pass": ({"teacher": "frozen", "score_tokens": 1}, SCORED),
    "reverse KL": ({"objective": "reverse_kl"}, {"losses", "loss"}),
    "forward KL": ({"objective": "forward_kl"}, {"losses", "loss"}),
    "jsd, one row a forward pass": ({"objective": "jsd", "score_tokens": 1}, {"losses", "loss"}),
    "top support": ({"support_top_k": 5}, {*SCORED, "a_full", "gap_error"}),
    "whole support": ({"support_top_k": 10**6}, {"losses", "loss", "a_full", "gap_error"}),
    "opsd": (settings_of("opsd"), None),
    "opsd+skill": (settings_of("opsd+skill"), None),
    "gemma2 jsd": ({"objective": "jsd", "model": "gemma2"}, None),
    "gemma2 top support": ({"support_top_k": 4, "model": "gemma2"}, None),
    "gemma2 opsd": (settings_of("opsd", model="gemma2"), None),
}
LONG_CASES = ("random pairs", "reverse KL", "whole support", "opsd+skill", "gemma2 top support")
LONG_CASES += ("gemma2 opsd", "no threshold")


def logprobs_of(run, text, thinking, ids):
    """[T, V] log-probabilities at the loss's temperature, from the model's whole logits."""
    prompt = rollout.chat_ids(run.tokenizer, text, thinking=thinking)
    logits_LV = run.lm(input_ids=torch.tensor([prompt + ids])).logits[0]
    temperature = getattr(run.cfg, "score_temperature", run.cfg.temperature)
    return (logits_LV[len(prompt) - 1 : -1] / temperature).log_softmax(-1)


def loss_and_gap(cfg, s_TV, t_TV, ids):
    """Token losses and gaps [T] of one teacher, from log-probabilities of both sides."""
    bound = getattr(cfg, "objective_clip", 0)
    at = range(len(ids)), ids
    if cfg.support_top_k:
        keep = t_TV >= t_TV.topk(min(cfg.support_top_k, t_TV.shape[1])).values[:, -1:]
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
    return terms[cfg.objective].clamp(max=bound or math.inf).sum(-1), gap_T


AS_ABLATION = dict(  # what OPSD is, in the settings of an ablation
    objective="forward_kl", teacher="frozen", answer_pi=True, polarity=False, token_mask=False
)


def changed_parts(cfg):
    """The settings of an ablation, or OPSD as one."""
    if isinstance(cfg, AblationConfig):
        return cfg
    parts = AblationConfig(**AS_ABLATION)
    own = {"objective_clip": cfg.objective_clip, "c_delta": cfg.c_delta, "eps_a": cfg.eps_a}
    return SimpleNamespace(**{**vars(parts), **own})


def teacher_by_definition(cfg, row, k, m_T, s_TV, t_TV):
    """Teacher k's loss of a rollout, with gradient, after its part of the row has been checked."""
    ids, tokens, count = row["completion_ids"], row["tokens"], m_T.sum().item()
    bound = cfg.c_delta if cfg.clip else math.inf

    def support(gap_T):
        return (m_T * gap_T.clamp(-bound, bound)).sum().item() / count

    ell_T, gap_T = loss_and_gap(cfg, s_TV, t_TV, ids)
    assert tokens["delta"][k] == pytest.approx(gap_T.tolist(), abs=2e-5)
    assert row["a"][k] == pytest.approx(support(gap_T), abs=1e-5)
    a = row["a"][k]
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
        assert (error > 0.1) == (cfg.support_top_k < 10)
    return (rho_T * ell_T).sum() / count


def rollout_by_definition(run, x, row):
    """A rollout's loss, with gradient, after its row has been checked."""
    cfg, is_opsd, shown = changed_parts(run.cfg), isinstance(run.cfg, OPSDConfig), x.problem
    pairs = []
    if run.cfg.uses_skill_bank:
        pairs = run.bank.retrieve(x.problem, run.cfg.num_teachers, run.embed)
    if cfg.retrieval == "random":
        pairs = ablations.retrieve(run, x, 1)
    weights = [math.exp((pair.s_g + pair.s_e) / 2) for pair in pairs]
    if cfg.answer_pi:
        shown += f"\n\nThe reference answer is {x.answer}."
    student = skills.render_student(x.problem)
    teachers = [skills.render_teacher(pair, shown) for pair in pairs]
    if is_opsd:  # S17: with +skill both roles see the skills
        student = skills.render_skills(pairs, x.problem)
        teachers, weights = [skills.render_skills(pairs, shown)], [1.0]
    ids, tokens = row["completion_ids"], row["tokens"]
    masked = run.masked_ids if cfg.token_mask else ()
    m_T = torch.tensor([int(i not in masked) for i in ids])
    assert tokens["mask"] == m_T.tolist()
    assert row["alpha"] == pytest.approx([weight / sum(weights) for weight in weights])
    assert (row["problem_id"], row["r"]) == (x.id, 1 if int(x.answer) % 4 == 1 else -1)
    assert row["prompt_ids"] == rollout.chat_ids(run.tokenizer, student, thinking="closed")
    assert ("credit" in tokens) == (cfg.objective == "gate" and not cfg.support_top_k)
    total, s_TV = 0.0, logprobs_of(run, student, "closed", ids)
    for k, text in enumerate(teachers):
        frozen = cfg.teacher == "frozen"
        with torch.no_grad(), run.lm.disable_adapter() if frozen else nullcontext():
            t_TV = logprobs_of(run, text, "bare", ids)
        total = total + row["alpha"][k] * teacher_by_definition(cfg, row, k, m_T, s_TV, t_TV)
    return total


def changed_fields(before, now):
    """The fields in which rows differ, numbers by more than rounding; not those of the credit."""
    changed = set()
    for was, row in zip(before, now):
        for key, value in row.items():
            is_float = isinstance(value, float)
            is_float |= isinstance(value, list) and bool(value) and isinstance(value[0], float)
            if was.get(key) != (pytest.approx(value, abs=1e-5) if is_float else value):
                changed.add(key)
    return changed - {"tokens", "credit_sq", "credit_sq_with_verdict"}


@pytest.fixture(scope="module")
def plain(world_dir, tmp_path_factory):
    """The rows of SGSD's own step."""
    return one_step(world_dir, tmp_path_factory.mktemp("plain") / "run")[1]


@pytest.mark.parametrize("name", by_length(CASES, LONG_CASES))
def test_a_changed_step_is_its_definition_and_changes_its_own_part_alone(
    name, plain, world_dir, tmp_path
):
    """Rows and gradients from whole logits; Gemma 2's are capped, so its head has no slices."""
    changes, may_differ = CASES[name]
    if "model" in changes:
        changes = {**changes, "model": str(tmp_path / "model"), "attn": "eager"}
        make_model("gemma2").save_pretrained(tmp_path / "model")
        make_tokenizer().save_pretrained(tmp_path / "model")
    run, rows_of_step, got = one_step(world_dir, tmp_path / "run", **changes)
    if may_differ:
        changed = changed_fields(plain, rows_of_step)
        assert changed <= may_differ and "loss" in changed, changed
    total = 0.0
    for x, row in zip(problems_of(run), rows_of_step):
        loss = rollout_by_definition(run, x, row)
        assert row["loss"] == pytest.approx(loss.item(), abs=1e-5)
        total = total + loss / 4
    assert len({tuple(row["completion_ids"]) for row in rows_of_step}) == 4 == len(rows_of_step)
    assert_gradients(got, run, total)


@pytest.mark.parametrize("method", ["grpo", "grpo+skill"])
def test_the_gradient_of_grpo_is_the_policy_gradient(method, world_dir, tmp_path):
    changes = settings_of(method, generations=3, batch_size=2)
    changes["verifier"] = "test_methods:TwoOfThree"
    run, rows_of_step, got = one_step(world_dir, tmp_path / "run", **changes)
    assert [row["r"] for row in rows_of_step] == [-1, 1, 1] * 2
    assert len({tuple(row["completion_ids"]) for row in rows_of_step}) == 6
    assert len({tuple(row["prompt_ids"]) for row in rows_of_step}) == 2
    total = 0.0
    for x, row in zip(problems_of(run), rows_of_step):
        # rewards -1, 1, 1: mean 1/3, sample std 2 / sqrt(3)
        advantage = (row["r"] - 1 / 3) / (2 / math.sqrt(3) + 1e-4)
        assert (row["advantage"], row["loss"]) == pytest.approx((advantage, -advantage), abs=1e-5)
        pairs, ids = [], row["completion_ids"]
        if method == "grpo+skill":
            pairs = run.bank.retrieve(x.problem, 3, run.embed)
        assert [names[0] for names in row["pairs"]] == [pair.skill["skill_id"] for pair in pairs]
        logp_TV = logprobs_of(run, skills.render_skills(pairs, x.problem), "bare", ids)
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
    assert not any(row["credit_sq"] for row in of_step)  # what does not act is not logged
    assert not any(gradient.any() for gradient in gradients)


# ---------------------------------------------------------------------------------------- teachers


@pytest.mark.parametrize("kind", ["live", "frozen", "periodic", "ema"])
def test_whose_log_probabilities_a_teacher_gives(kind, world_dir, tmp_path):
    """The student's, the base's, or its copy's; then the student's own weights are back."""
    prompt, ids = [[1, 2, 3, 4]], [[30, 31, 32]]
    with driver.opened(world_dir, tmp_path / "run", AblationConfig, teacher=kind) as run:
        if kind in ("periodic", "ema"):
            teachers.begin(run)
        with ablations.teacher_policy(run):
            # A copy begins as the student, with B = 0.
            base = scoring.token_logprobs(run.lm, prompt, ids)
        perturb(run)
        params = model.trained(run.lm)
        before = {name: p.detach().clone() for name, p in params.items()}
        with ablations.teacher_policy(run):
            teacher = scoring.token_logprobs(run.lm, prompt, ids)
        for name, p in params.items():
            assert torch.equal(p, before[name]) and p.requires_grad
        assert bool(run.extra_tensors) == (kind in ("periodic", "ema"))
        student = scoring.token_logprobs(run.lm, prompt, ids)
    assert torch.equal(teacher, student if kind == "live" else base)
    assert not torch.allclose(student, base, atol=1e-3)


@pytest.mark.parametrize("teacher", by_length(("periodic", "ema"), ("periodic",)))
def test_a_copied_teacher_follows_and_goes_into_the_checkpoint(teacher, world_dir, tmp_path):
    """Periodic: the student after every second step. Ema: .9 old + .1 new after each."""
    changes = {"teacher": teacher, "teacher_period": 2, "teacher_decay": 0.9, "evolve_every": 0}
    want = {}

    def step_fn(run, step):
        params = model.trained(run.lm)
        if step == 1:
            want.update({name: p.detach().double().clone() for name, p in params.items()})
        result = ablations.train_step(run, step)
        new = 0.1 if teacher == "ema" else float(step % 2 == 0)
        for name, p in params.items():
            want[name] = (1 - new) * want[name] + new * p.detach().double()
            copy = run.extra_tensors[f"{name}.teacher"].double()
            torch.testing.assert_close(copy, want[name], atol=1e-7, rtol=0.0)
        return result

    run = driver.train(world_dir, tmp_path / "run", step_fn, AblationConfig, **changes)
    saved = load_file(tmp_path / "run/checkpoints/step_000004/trainer.safetensors")
    assert run.extra_tensors.keys() == {f"{name}.teacher" for name in want}
    for name, copy in run.extra_tensors.items():
        assert torch.equal(saved[name], copy)


# ------------------------------------------------------------------------------------- the command


LENGTHS = ("max_new_tokens", "max_prompt_tokens", "temperature", "top_p", "top_k")


def read(method, *argv):
    kind, _, variants = driver.METHODS[method]
    return config.parse(argv, "", kind, variants)


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


RUNS = {
    "grpo+skill": settings_of("grpo+skill", generations=3),
    "ema": {"teacher": "ema", "teacher_decay": 0.5, "objective": "jsd"},
    "periodic": {"teacher": "periodic", "teacher_period": 3, "retrieval": "random"},
}


@pytest.mark.parametrize("name", by_length(RUNS, ("grpo+skill", "periodic")))
def test_stopped_and_continued_equals_uninterrupted(name, world_dir, tmp_path):
    """Two steps and then one more leave the bytes of three in a row."""
    changes = {**RUNS[name], "steps": 3, "max_new_tokens": 8, "checkpoint_every": 3}
    kind, own_step, _ = driver.METHODS[changes.pop("method", "ablations")]
    changes["verifier"] = "test_methods:TwoOfThree"

    def stopped_in_step_2(run, step):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return own_step(run, step)

    def train(out, step_fn):
        return driver.train(world_dir, out, step_fn, kind, **changes)

    run = train(tmp_path / "whole", own_step)
    assert run.code == 0
    assert train(tmp_path / "parts", stopped_in_step_2).code == 130
    assert train(tmp_path / "parts", own_step).code == 0
    assert driver.state(tmp_path / "whole") == driver.state(tmp_path / "parts")
    for row in rows(tmp_path / "whole/metrics.jsonl"):
        assert row["grad_norm"] > 0 and math.isfinite(row["loss"])
        assert ("bank_skills" in row) == run.cfg.uses_skill_bank
    assert (tmp_path / "whole/bank").exists() == run.cfg.uses_skill_bank
    assert len(rows(tmp_path / "whole/rollouts.jsonl")) == 12 * changes.get("generations", 1)


def test_a_continued_run_keeps_its_method_and_its_teacher(world_dir, tmp_path, capsys):
    argv = flags(world_dir, tmp_path / "run", steps=1)
    completes(ablations.main, [*argv, "--teacher=frozen"])
    refused(capsys, opsd.main, argv, "methods.opsd", "methods.ablations")
    refused(capsys, ablations.main, [*argv, "--teacher=ema"], "--teacher 'ema'", "'frozen'")


@pytest.mark.long
def test_groups_stay_together_over_ranks(world_dir, tmp_path):
    """Three problems of two rollouts on two ranks: one order of rows, one step."""
    changes = {"batch_size": 3, "steps": 1, "generations": 2, "max_new_tokens": 12}
    changes["verifier"] = "driver:UnevenVerifier"
    completes(driver.main, ["grpo", *flags(world_dir, tmp_path / "1", **changes)])
    assert two(["grpo", *flags(world_dir, tmp_path / "2", **changes)], tmp_path) == [0, 0]
    moments, logs = [], []
    for n in "12":
        logs.append(rows(tmp_path / n / "rollouts.jsonl"))
        moments.append(load_file(tmp_path / n / "checkpoints/step_000001/trainer.safetensors"))
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


@pytest.mark.parametrize("verdicts", ["alike", "mixed"])
def test_what_has_no_gradient_costs_no_pass_and_changes_no_bit(
    verdicts, world_dir, tmp_path, monkeypatch
):
    """A group whose rewards are equal is not scored."""
    passes = []
    token_logprobs = scoring.token_logprobs
    monkeypatch.setattr(
        scoring, "token_logprobs", lambda *a, **k: passes.append(1) or token_logprobs(*a, **k)
    )
    changes = settings_of("grpo", generations=3, batch_size=2)
    changes["verifier"] = "driver:Exact" if verdicts == "alike" else "test_methods:TwoOfThree"
    _, of_step, gradients = one_step(world_dir, tmp_path / "run", **changes)
    assert len(passes) == (0 if verdicts == "alike" else 6)
    assert any(g.any() for g in gradients) == (verdicts == "mixed")
    assert [row["loss"] == 0 for row in of_step] == [verdicts == "alike"] * 6
