"""GRPO, OPSD and the ablations: each formula against plain float64 loops, each flag changes its own part and nothing else."""

import dataclasses
import json
import math

import pytest
import torch
from conftest import make_bank, make_model
from safetensors.torch import load_file
from test_distributed import command
from test_train import make_run, rows

import baselines as B
import distributed as D
import rollout as R
import sgsd
import skills as S

# ---------------------------------------------------------------------------------------------- formulas, by plain loops


def softmax(logits, temperature=1.0):
    exps = [math.exp(x / temperature) for x in logits]
    return [e / sum(exps) for e in exps]


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q))


def draws(*shape, seed=0):
    return (
        torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2
    )


@pytest.mark.parametrize(
    "rewards", [[1, -1, -1, 1], [1, -1, -1, -1, -1, -1, -1, -1], [0.0, 1.0, 0.5]]
)
def test_grpo_advantages(rewards):
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    got = B.grpo_advantages(torch.tensor(rewards, dtype=torch.float64))
    assert got.tolist() == pytest.approx([(r - mean) / (std + 1e-4) for r in rewards], abs=1e-12)


def test_grpo_groups_that_teach_nothing_and_groups_that_are_none():
    assert B.grpo_advantages(torch.tensor([-1.0] * 8)).tolist() == [0.0] * 8
    with pytest.raises(ValueError, match="G >= 2"):
        B.grpo_advantages(torch.ones(1))


@pytest.mark.parametrize("advantage", [1.7, -0.4])
def test_grpo_loss(advantage):
    """Ratios below, inside and above the clip; a clipped token has no gradient where clipping is the smaller term."""
    new = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.1, -1.0, -1.5, -3.0], dtype=torch.float64)
    want, grads = 0.0, []
    for n, o in zip(new.tolist(), old.tolist()):
        w = math.exp(n - o)
        clipped = min(max(w, 0.8), 1.2)
        want -= min(w * advantage, clipped * advantage) / 4
        grads.append(-w * advantage / 4 if w * advantage <= clipped * advantage else 0.0)
    loss = B.grpo_loss(new, old, advantage)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(
        want, abs=1e-12
    ) and new.grad.tolist() == pytest.approx(grads, abs=1e-12)
    assert 0.0 in grads


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 1.1])
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_generalized_jsd(beta, temperature, clip):
    s_TV, t_TV = draws(5, 7), draws(5, 7, seed=1)
    want = []
    for s, t in zip(s_TV.tolist(), t_TV.tolist()):
        total = 0.0
        for p_s, p_t in zip(softmax(s, temperature), softmax(t, temperature)):
            m = beta * p_t + (1 - beta) * p_s
            if beta in (0.0, 1.0):
                term = p_t * math.log(p_t / p_s) if beta == 0 else p_s * math.log(p_s / p_t)
            else:
                term = beta * p_t * math.log(p_t / m) + (1 - beta) * p_s * math.log(p_s / m)
            total += min(term, clip) if clip else term
        want.append(total)
    assert B.generalized_jsd(s_TV, t_TV, beta, temperature, clip).tolist() == pytest.approx(
        want, abs=1e-12
    )


def test_directions_of_the_divergences():
    """Forward is KL(teacher || student), reverse KL(student || teacher) (D10); the mixture at 1/2 is symmetric; equal sides have none."""
    s, t = draws(6), draws(6, seed=1)
    p_s, p_t = softmax(s.tolist()), softmax(t.tolist())
    assert B.generalized_jsd(s, t, B.JSD_BETA["forward_kl"]).item() == pytest.approx(kl(p_t, p_s))
    assert B.generalized_jsd(s, t, B.JSD_BETA["reverse_kl"]).item() == pytest.approx(kl(p_s, p_t))
    torch.testing.assert_close(B.generalized_jsd(s, t, 0.5), B.generalized_jsd(t, s, 0.5))
    for beta in (0.0, 0.5, 1.0):
        assert B.generalized_jsd(s, s + 3, beta).item() == pytest.approx(0, abs=1e-12)
    with pytest.raises(ValueError, match="beta 2"):
        B.generalized_jsd(s, t, 2)


@pytest.mark.parametrize("top_k", [1, 3, 9, 50])
def test_local_support(top_k):
    """The teacher's top k and the sampled token, once: sampled inside of it (row 0) and outside (row 1)."""
    s_nV, t_nV = draws(3, 9), draws(3, 9, seed=1)
    order = [sorted(range(9), key=lambda v, t=t: -t[v]) for t in t_nV.tolist()]
    ids = [order[0][0], order[1][-1], order[2][4]]
    kls, gaps = B.local_support(torch.tensor(ids), s_nV, t_nV, top_k)
    for i, y in enumerate(ids):
        support = sorted({*order[i][:top_k], y})
        p_s, p_t = (softmax([x[i, v].item() for v in support]) for x in (s_nV, t_nV))
        at = support.index(y)
        assert kls[i].item() == pytest.approx(kl(p_s, p_t), abs=1e-12)
        assert gaps[i].item() == pytest.approx(math.log(p_t[at] / p_s[at]), abs=1e-12)
    if top_k >= 9:
        torch.testing.assert_close(kls, B.generalized_jsd(s_nV, t_nV, 1.0))
        torch.testing.assert_close(gaps, B.sampled_gap(torch.tensor(ids), s_nV, t_nV))


SETTINGS = [dict(objective=o) for o in ("gate", "reverse_kl", "forward_kl", "jsd")] + [
    dict(support_top_k=3),
    dict(objective="forward_kl", objective_clip=0.05),
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_token_losses_have_the_gradient_of_their_values(settings):
    cfg, ids, t1, t2 = (
        sgsd.Config(**settings),
        torch.tensor([1, 4, 0]),
        draws(3, 6, seed=1),
        draws(3, 6, seed=2),
    )
    student = draws(3, 6).requires_grad_()
    assert B.token_losses(cfg, ids, student, t1, t2).shape == (3, 2, 2)
    assert torch.autograd.gradcheck(lambda s: B.token_losses(cfg, ids, s, t1, t2), student)
    if cfg.support_top_k:  # Eq. 14 of the divergence on the support
        for k, teacher in enumerate((t1, t2)):
            kls, _ = B.local_support(ids, student.detach(), teacher, 3)
            want = [math.log(2) - math.log(1 + math.exp(-(d**2) / 2)) for d in kls.tolist()]
            assert B.token_losses(cfg, ids, student, t1, t2)[:, k, 0].tolist() == pytest.approx(
                want, abs=1e-12
            )


@pytest.mark.parametrize("settings", SETTINGS)
def test_slices_equal_whole_logits_and_stay_small(settings, monkeypatch):
    """Values and gradients of 11 positions in slices of 2, against all logits at once; no slice holds more than its budget."""
    model, cfg, ids_T, seen = (
        make_model(),
        sgsd.Config(**settings),
        torch.randint(0, 272, (11,), generator=torch.Generator().manual_seed(1)),
        [],
    )
    monkeypatch.setitem(R.SLICE_LOGITS, "cpu", 2 * 272 * 4 * 3)
    states = [draws(11, 32, seed=i).float().requires_grad_() for i in range(3)]

    def f(ids_n, *logits):
        seen.append(sum(x.numel() for x in logits))
        return B.token_losses(cfg, ids_n, *logits)

    got = R.over_slices(model, states, ids_T, f, 1.1)
    grads = torch.autograd.grad(got[..., 0].sum(), states)
    assert len(seen) == 12 and max(seen) <= 3 * 2 * 272  # six slices, each computed twice
    want = B.token_losses(cfg, ids_T, *(model.lm_head(h) / 1.1 for h in states))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    for a, b in zip(grads, torch.autograd.grad(want[..., 0].sum(), states)):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-3)


def test_states_are_those_that_the_log_probabilities_come_from():
    model, prompts, completions = make_model(), [[1, 2, 3], [4, 5]], [[6, 7], [8, 9, 10]]
    logps = R.token_logprobs(model, prompts, completions)
    for row, states, ids in zip(
        logps, B.completion_states(model, prompts, completions), completions
    ):
        torch.testing.assert_close(
            model.lm_head(states).log_softmax(-1)[range(len(ids)), ids],
            row[: len(ids)],
            atol=1e-5,
            rtol=1e-5,
        )
    with pytest.raises(ValueError, match="caps or scales"):
        B.completion_states(make_model("gemma2"), prompts, completions)


def test_all_skills_in_one_prompt():
    bank = make_bank()
    pairs = [S.SkillPair(g, e, 1.0, 1.0) for g, e in zip(bank.general_skills, bank.common_mistakes)]
    pairs[1].skill["title"] = "{skill.principle} \\1"  # text is put in once
    assert S.render_skills([], "x") == S.render_student("x")
    assert S.render_skills(pairs[:1], "{problem}") == S.render_teacher(pairs[0], "{problem}")
    text = S.render_skills(pairs[:3], "What?")
    lines = text.split("\n")
    assert [x for x in lines if x.startswith("#")] == [
        "### General Principles",
        "### Mistakes to Avoid",
    ]
    assert [x.split("**")[1] for x in lines if x.startswith("- **") and "Don't" not in x] == [
        p.skill["title"] for p in pairs[:3]
    ]
    assert [x[13:] for x in lines if "Don't" in x] == [p.mistake["description"] for p in pairs[:3]]
    assert text.endswith("\n\n" + S.render_student("What?"))


# ------------------------------------------------------------------------------------------------- the ablations of SGSD


def perturbed(run):
    """An adapter as after some training: at the start B is 0, so that A has no gradient and every teacher policy is the same."""
    for name, p in run.params.items():
        torch.nn.init.normal_(
            p, std=0.1, generator=torch.Generator().manual_seed(sum(map(ord, name)))
        )
    return run


def one_update(world_dir, out, **changes):
    """Records and gradients of one update by the function that the configuration names."""
    run = perturbed(make_run(world_dir, out, **changes))
    cfg = run.cfg
    method = (
        sgsd.accumulate
        if cfg.method == "sgsd" and not cfg.whole_logits
        else sgsd.find_method(cfg.method)[0]
    )
    records, _ = method(run, 1)
    return run, records, {name: p.grad.clone() for name, p in run.params.items()}


def mean(values, mask):
    return sum(v for v, m in zip(values, mask) if m) / sum(mask)


JUDGED = {"a", "rho", "losses", "loss"}
ABLATIONS = {  # flag -> the fields of a rollout's record that may change with it
    "token_mask": (dict(token_mask=False), {*JUDGED, "unmasked", "clipped"}),
    "clip": (dict(clip=False), {"a", "rho", "loss", "clipped"}),
    "eps_a": (dict(eps_a=0.0), {"rho", "loss"}),
    "all three": (dict(token_mask=False, clip=False, eps_a=0.0), {*JUDGED, "unmasked", "clipped"}),
    "polarity": (dict(polarity=False), {"rho", "loss"}),
    "retrieval": (
        dict(retrieval="random"),
        {*JUDGED, "pairs", "s_g", "s_e", "alpha", "a_plain", "first_gap", "clipped"},
    ),
    "answer_pi": (dict(answer_pi=True), {*JUDGED, "a_plain", "first_gap", "clipped"}),
    "frozen": (dict(teacher="frozen"), {*JUDGED, "a_plain", "first_gap", "clipped"}),
    "reverse_kl": (dict(objective="reverse_kl"), {"losses", "loss"}),
    "forward_kl": (dict(objective="forward_kl"), {"losses", "loss"}),
    "jsd": (dict(objective="jsd"), {"losses", "loss"}),
    "whole support": (dict(support_top_k=10**6), {"losses", "loss"}),
    "top support": (dict(support_top_k=5), {*JUDGED, "a_plain", "first_gap", "clipped"}),
}
BITING = dict(
    c_delta=0.3, eps_a=0.17, audit_every=1
)  # so that clip and threshold have something to do on random gaps


@pytest.fixture(scope="module")
def plain(world_dir, tmp_path_factory):
    return one_update(world_dir, tmp_path_factory.mktemp("plain") / "run", **BITING)


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_changes_its_own_part_and_nothing_else(name, plain, world_dir, tmp_path):
    changes, may_differ = ABLATIONS[name]
    run, records, grads = one_update(world_dir, tmp_path / "run", **BITING | changes)
    changed = set()
    for was, now in zip(plain[1], records):
        assert was.keys() == now.keys()
        changed |= {
            k
            for k in was
            if k != "tokens"
            and now[k]
            != (
                pytest.approx(was[k], abs=1e-5)
                if isinstance(was[k], list | float) and k != "pairs"
                else was[k]
            )
        }
    assert changed <= may_differ and "loss" in changed, changed
    assert any(not torch.allclose(grads[k], plain[2][k], atol=1e-6) for k in grads)
    for rec in records:  # and what it changes is what its formula says
        delta, mask, cfg = rec["tokens"]["delta"], rec["tokens"]["mask"], run.cfg
        assert name != "retrieval" or rec["alpha"] == pytest.approx(
            [1 / len(delta)] * len(delta)
        )  # S20
        bound = cfg.c_delta if cfg.clip else math.inf
        assert sum(mask) == rec["unmasked"] and (
            cfg.token_mask or sum(mask) == len(rec["completion_ids"])
        )
        for k, gaps in enumerate(delta):
            a = mean([min(max(g, -bound), bound) for g in gaps], mask)
            assert rec["a"][k] == pytest.approx(a, abs=1e-5)
            rho = (
                (0 if abs(a) <= cfg.eps_a else rec["r"] * (1 if a > 0 else -1))
                if cfg.polarity
                else 1
            )
            assert rec["rho"][k] == rho
            tokens = rec["tokens"].get(
                "losses",
                [[math.log(2) - math.log(1 + math.exp(-g * g / 2)) for g in row] for row in delta],
            )
            assert rec["losses"][k] == pytest.approx(mean(tokens[k], mask), abs=1e-5)
        assert rec["loss"] == pytest.approx(
            sum(a * p * x for a, p, x in zip(rec["alpha"], rec["rho"], rec["losses"])), abs=1e-5
        )


def test_a_single_teacher_is_the_best_pair(plain, world_dir, tmp_path):
    _, records, _ = one_update(world_dir, tmp_path / "run", **BITING, num_teachers=1)
    for was, now in zip(plain[1], records):
        assert (
            now["pairs"] == was["pairs"][:1]
            and now["alpha"] == [1.0]
            and now["a"] == pytest.approx(was["a"][:1], abs=1e-5)
        )
        assert now["completion_ids"] == was["completion_ids"]
        gaps, mask = now["tokens"]["delta"][0], now["tokens"]["mask"]
        a = mean([min(max(g, -0.3), 0.3) for g in gaps], mask)
        rho = 0 if abs(a) <= 0.17 else now["r"] * (1 if a > 0 else -1)
        assert now["loss"] == pytest.approx(
            rho * mean([math.log(2) - math.log(1 + math.exp(-g * g / 2)) for g in gaps], mask),
            abs=1e-6,
        )


def by_definition(run, prompt, ids, temperature=1.0):
    """[T, V] log-probabilities of one row from the model's own full logits."""
    logits = run.model(input_ids=torch.tensor([prompt + ids])).logits[0]
    return (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)


@pytest.mark.parametrize(
    "changes",
    [dict(objective=o) for o in B.JSD_BETA] + [dict(support_top_k=4), dict(support_top_k=10**6)],
)
def test_gradient_of_an_objective_equals_whole_logits(changes, world_dir, tmp_path):
    run, records, grads = one_update(world_dir, tmp_path / "run", **BITING | changes)
    run.optimizer.zero_grad()
    total = 0.0
    for x, rec in zip([x for x, _ in sgsd.minibatch(run.problems, run.cfg, 1)], records):
        ids, mask = rec["completion_ids"], torch.tensor(rec["tokens"]["mask"])
        for k, pair in enumerate(run.bank.retrieve(x.problem, 3, run.embed)):
            s = by_definition(run, rec["prompt_ids"], ids)
            with torch.no_grad():
                t = by_definition(
                    run,
                    R.chat_ids(run.tokenizer, S.render_teacher(pair, x.problem), thinking=True),
                    ids,
                )
            if "support_top_k" in changes:
                keep = t >= t.topk(min(changes["support_top_k"], t.shape[1])).values[:, -1:]
                keep[range(len(ids)), ids] = True
                s, t = (y.masked_fill(~keep, -1e4).log_softmax(-1) for y in (s, t))
                ell = math.log(2) - torch.log(
                    1 + torch.exp(-((s.exp() * (s - t)).sum(-1) ** 2) / 2)
                )
            elif changes["objective"] == "jsd":
                m = ((s.exp() + t.exp()) / 2).log()
                ell = ((t.exp() * (t - m)).sum(-1) + (s.exp() * (s - m)).sum(-1)) / 2
            else:
                ell = (
                    (s.exp() * (s - t)).sum(-1)
                    if changes["objective"] == "reverse_kl"
                    else (t.exp() * (t - s)).sum(-1)
                )
            total = total + rec["alpha"][k] * rec["rho"][k] * (mask * ell).sum() / mask.sum() / 4
    total.backward()
    assert float(total.detach()) == pytest.approx(sum(r["loss"] for r in records) / 4, abs=1e-5)
    for name, p in run.params.items():
        torch.testing.assert_close(grads[name], p.grad, atol=3e-5, rtol=2e-3)


def test_the_gate_through_whole_logits_is_algorithm_1(plain, world_dir, tmp_path):
    run = perturbed(make_run(world_dir, tmp_path / "run", **BITING))
    records, _ = B.sgsd_whole(run, 1)
    for was, now in zip(plain[1], records):
        assert now["rho"] == was["rho"] and now["loss"] == pytest.approx(was["loss"], abs=1e-6)
    for name, p in run.params.items():
        torch.testing.assert_close(p.grad, plain[2][name], atol=1e-5, rtol=1e-3)


def test_random_pairs_are_drawn_anew_and_again_the_same(world_dir, tmp_path):
    run = make_run(world_dir, tmp_path / "run", retrieval="random", num_teachers=2)
    drawn = {
        (x.id, step): pairs
        for step in (1, 2, 3)
        for x, pairs in zip(run.problems, sgsd.retrieve(run, run.problems, step))
    }
    assert all(
        [drawn[x.id, step]] == sgsd.retrieve(run, [x], step)
        for x in run.problems
        for step in (1, 2, 3)
    )
    assert {p.skill["skill_id"] for pairs in drawn.values() for p in pairs} == {
        e["skill_id"] for e in run.bank.general_skills
    }
    assert all(
        len({p.skill["skill_id"] for p in pairs})
        == len({p.mistake["mistake_id"] for p in pairs})
        == 2
        for pairs in drawn.values()
    )
    assert len({tuple(p.skill["skill_id"] for p in pairs) for pairs in drawn.values()}) > 3
    run.bank = S.SkillBank(run.bank.general_skills, [])
    assert sgsd.retrieve(run, run.problems[:1], 1) == [[]]  # S8


def test_only_a_teacher_sees_the_answer(world_dir, tmp_path):
    run = make_run(world_dir, tmp_path / "run", answer_pi=True)
    x = dataclasses.replace(run.problems[0], answer="31415")
    (pairs,) = sgsd.retrieve(run, [x], 1)
    texts = [run.tokenizer.decode(ids) for ids in sgsd.contexts(run, x, pairs)]
    assert all(
        "The reference answer is 31415.\n\nPlease reason" in t and p.skill["title"] in t
        for t, p in zip(texts, pairs)
    )
    assert all(
        "31415" not in run.tokenizer.decode(ids)
        for ids in sgsd.contexts(make_run(world_dir, tmp_path / "other"), x, pairs)
    )


def test_gaps_with_the_answer(world_dir, tmp_path):
    run, records, _ = one_update(world_dir, tmp_path / "run", **BITING, answer_pi=True)
    for (x, _), rec in zip(sgsd.minibatch(run.problems, run.cfg, 1), records):
        ids, at = rec["completion_ids"], range(len(rec["completion_ids"]))
        (pairs,) = sgsd.retrieve(run, [x], 1)
        for pair, gaps in zip(pairs, rec["tokens"]["delta"]):
            text = f"{S.render_teacher(pair, x.problem)}".replace(
                x.problem, f"{x.problem}\n\nThe reference answer is {x.answer}."
            )
            teacher = R.chat_ids(run.tokenizer, text, thinking=True)
            with torch.no_grad():
                want = (
                    by_definition(run, teacher, ids)[at, ids]
                    - by_definition(run, rec["prompt_ids"], ids)[at, ids]
                )
            assert gaps == pytest.approx(want.tolist(), abs=1e-5)


def test_teacher_policies(world_dir, tmp_path):
    """Whose log-probabilities a teacher's are: the student's, the base's, those of its copy; the student's weights come back."""
    ids, prompt, seen = [30, 31, 32], [1, 2, 3, 4], {}
    for teacher in ("live", "frozen", "periodic", "ema"):
        run = perturbed(make_run(world_dir, tmp_path / teacher, teacher=teacher))
        before = {name: p.detach().clone() for name, p in run.params.items()}
        with sgsd.teacher_policy(run):
            seen[teacher] = R.token_logprobs(run.model, [prompt], [ids])
        assert all(
            torch.equal(p, before[name]) and p.requires_grad for name, p in run.params.items()
        )
        assert bool(run.teacher) == (teacher in ("periodic", "ema"))
    live, base = (
        R.token_logprobs(run.model, [prompt], [ids]),
        R.token_logprobs(R.load_model(run.cfg.model, torch.device("cpu"))[0], [prompt], [ids]),
    )
    assert (
        torch.equal(seen["live"], live)
        and torch.equal(seen["frozen"], base)
        and not torch.allclose(live, base, atol=1e-3)
    )
    for teacher in (
        "periodic",
        "ema",
    ):  # their copies are of the adapter at the start, whose B is 0
        assert torch.allclose(seen[teacher], base)


@pytest.mark.parametrize("teacher", ["periodic", "ema"])
def test_a_teacher_follows(teacher, world_dir, tmp_path, monkeypatch):
    """Periodic: the student's weights after every second update. Ema: d old + (1 - d) new after each, in float64 loops."""
    run = make_run(
        world_dir, tmp_path / "run", teacher=teacher, teacher_period=2, teacher_decay=0.9
    )
    want = {name: p.detach().double() for name, p in run.params.items()}
    for step in range(1, 5):
        sgsd.accumulate(run, step)
        sgsd.update(run, step)
        for name, p in run.params.items():
            if teacher == "ema":
                want[name] = 0.9 * want[name] + 0.1 * p.detach().double()
            elif step in (2, 4):
                want[name] = p.detach().double().clone()
            torch.testing.assert_close(
                run.teacher[name].double(),
                want[name],
                atol=1e-7 if teacher == "ema" else 0.0,
                rtol=0.0,
            )


def test_the_first_update_of_every_teacher_is_the_live_one_and_the_second_is_not(
    world_dir, tmp_path
):
    logs = {}
    for teacher in ("live", "frozen", "periodic", "ema"):
        run = make_run(
            world_dir, tmp_path / teacher, teacher=teacher, updates=2, eps_a=0.0, update_every=0
        )
        assert sgsd.train(run, False) == 0
        logs[teacher] = rows(tmp_path / teacher / "rollouts.jsonl")
    for teacher in ("frozen", "periodic", "ema"):
        assert logs[teacher][:4] == logs["live"][:4]
        for was, now in zip(logs["live"][4:], logs[teacher][4:]):
            assert (
                now["completion_ids"] == was["completion_ids"]
                and now["pairs"] == was["pairs"]
                and now["a"] != was["a"]
            )


# ------------------------------------------------------------------------------------------------------------ baselines


class Alternating(R.Verifier):
    """Two right of every three, whatever they say: a random model gives no group rewards that differ."""

    def verify_many(self, pairs):
        return [i % 3 > 0 for i in range(len(pairs))]


def settings_of(method, **changes):
    """The method's own defaults, as the command line takes them, cut to a test's size."""
    return {
        **B.METHOD_DEFAULTS[method],
        "method": method,
        "bank": "",
        "max_new_tokens": 12,
        "audit_every": 1,
        **changes,
    }


def skilled(world_dir, method):
    return dict(bank=str(world_dir / "bank.json")) if method.endswith("+skill") else {}


@pytest.mark.parametrize("method", ["grpo", "grpo+skill"])
def test_gradient_of_grpo_equals_plain_loops(method, world_dir, tmp_path):
    run = perturbed(
        make_run(
            world_dir,
            tmp_path / "run",
            **settings_of(method, generations=3, batch_size=2, **skilled(world_dir, method)),
        )
    )
    run.verifier = Alternating()
    records, _ = sgsd.find_method(method)[0](run, 1)
    got = {name: p.grad.clone() for name, p in run.params.items()}
    run.optimizer.zero_grad()
    assert len(records) == 6 and [r["r"] for r in records] == [-1, 1, 1] * 2
    assert (
        len({tuple(r["completion_ids"]) for r in records}) == 6
        and len({tuple(r["prompt_ids"]) for r in records}) == 2
    )
    total = 0.0
    for rec in records:  # rewards -1, 1, 1: mean 1/3, sample std 2/sqrt(3)
        advantage = (rec["r"] - 1 / 3) / (2 / math.sqrt(3) + 1e-4)
        assert rec["advantage"] == pytest.approx(advantage, abs=1e-6) and rec[
            "loss"
        ] == pytest.approx(-advantage, abs=1e-5)
        logp = by_definition(run, rec["prompt_ids"], rec["completion_ids"], 1.2)[
            range(len(rec["completion_ids"])), rec["completion_ids"]
        ]
        total = (
            total - advantage * logp.mean() / 6
        )  # at ratio 1 the clipped ratio's gradient is the policy gradient
        text = run.tokenizer.decode(rec["prompt_ids"])
        assert ("### General Principles" in text) == (method == "grpo+skill") == bool(rec["pairs"])
        assert text.count("- **Don't**") == (3 if method == "grpo+skill" else 0)
    total.backward()
    for name, p in run.params.items():
        torch.testing.assert_close(got[name], p.grad, atol=3e-5, rtol=2e-3)


@pytest.mark.parametrize("method", ["opsd", "opsd+skill"])
def test_gradient_of_opsd_equals_whole_logits(method, world_dir, tmp_path):
    """Forward KL at temperature 1.1 on both sides, terms cut at .05, the adapter off in the teacher, every token counts."""
    run, records, got = one_update(
        world_dir, tmp_path / "run", **settings_of(method, **skilled(world_dir, method))
    )
    run.optimizer.zero_grad()
    total = 0.0
    for x, rec in zip([x for x, _ in sgsd.minibatch(run.problems, run.cfg, 1)], records):
        ids, pairs = (
            rec["completion_ids"],
            run.bank.retrieve(x.problem, 3, run.embed) if run.bank else [],
        )
        shown = f"{x.problem}\n\nThe reference answer is {x.answer}."
        assert rec["prompt_ids"] == R.chat_ids(
            run.tokenizer, S.render_skills(pairs, x.problem), thinking=False
        )
        with torch.no_grad(), run.model.disable_adapter():
            t = by_definition(
                run,
                R.chat_ids(run.tokenizer, S.render_skills(pairs, shown), thinking=True),
                ids,
                1.1,
            )
        s = by_definition(run, rec["prompt_ids"], ids, 1.1)
        loss = (t.exp() * (t - s)).clamp(max=0.05).sum(-1).mean()
        assert (
            rec["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
            and rec["rho"] == [1]
            and rec["unmasked"] == len(ids)
        )
        total = total + loss / 4
    total.backward()
    for name, p in run.params.items():
        torch.testing.assert_close(got[name], p.grad, atol=3e-5, rtol=2e-3)


@pytest.mark.parametrize(
    "changes", [settings_of("opsd"), dict(objective="jsd", teacher="ema"), dict(teacher="ema")]
)
def test_packs_of_rows_change_no_gradient(changes, world_dir, tmp_path):
    """One row per forward: the teacher's weights come and go between backward passes."""
    whole, single = (
        one_update(world_dir, tmp_path / str(n), **changes, score_tokens=n)[2] for n in (10**6, 1)
    )
    for name in whole:
        torch.testing.assert_close(single[name], whole[name], atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize(
    "changes",
    [{}, settings_of("opsd"), settings_of("grpo", generations=2, student_prefix="closed")],
)
def test_truncated_rollouts_can_be_left_out(changes, world_dir, tmp_path):
    _, records, grads = one_update(world_dir, tmp_path / "run", **changes, drop_truncated=True)
    assert all(r["truncated"] and r["loss"] == 0 for r in records) and all(
        (g == 0).all() for g in grads.values()
    )


@pytest.mark.parametrize("changes", [{}, dict(objective="jsd")])
def test_rollouts_of_a_group_weigh_like_rollouts_of_problems(
    changes, world_dir, tmp_path, monkeypatch
):
    run, records, groups = one_update(
        world_dir, tmp_path / "a", **changes, batch_size=2, generations=2
    )
    batch = sgsd.minibatch(run.problems, run.cfg, 1)
    assert len({key for _, key in batch}) == 4 and [r["problem_id"] for r in records] == [
        x.id for x, _ in batch
    ]
    monkeypatch.setattr(sgsd, "minibatch", lambda *_: batch)
    _, again, problems = one_update(world_dir, tmp_path / "b", **changes, batch_size=4)
    assert again == records and all(torch.equal(groups[name], problems[name]) for name in groups)


def test_defaults_of_the_methods():
    """Tab. 11 and the released OPSD settings; a flag that is given wins; sgsd's own are the paper's."""

    def read(*argv):
        return sgsd.parse_config(argv)[0]

    for method in ("grpo", "grpo+skill"):
        cfg = read("--method", method)
        assert (
            cfg.max_new_tokens,
            cfg.max_prompt_tokens,
            cfg.temperature,
            cfg.top_p,
            cfg.top_k,
            cfg.generations,
        ) == (16000, 2048, 1.2, 1.0, 0, 8)
        assert cfg.loss_temperature == cfg.temperature
    for method in ("opsd", "opsd+skill"):
        cfg = read("--method", method)
        assert (
            cfg.max_new_tokens,
            cfg.max_prompt_tokens,
            cfg.temperature,
            cfg.top_p,
            cfg.top_k,
            cfg.generations,
        ) == (1024, 20000, 1.1, 0.95, 20, 1)
        assert (
            cfg.teacher,
            cfg.answer_pi,
            cfg.objective,
            cfg.objective_clip,
            cfg.loss_temperature,
        ) == ("frozen", True, "forward_kl", 0.05, 1.1)
    assert read("--method", "grpo", "--temperature", "0.7", "--top-k", "20").top_k == 20
    assert read("--method", "sgsd") == read() == sgsd.Config()
    cfg = read(
        "--no-token-mask",
        "--no-clip",
        "--no-polarity",
        "--answer-pi",
        "--teacher",
        "ema",
        "--objective",
        "jsd",
        "--retrieval",
        "random",
    )
    assert cfg == sgsd.Config(
        token_mask=False,
        clip=False,
        polarity=False,
        answer_pi=True,
        teacher="ema",
        objective="jsd",
        retrieval="random",
    )
    names = {f.name for f in dataclasses.fields(sgsd.Config)}
    assert B.METHOD_DEFAULTS.keys() < B.METHODS.keys() and all(
        own.keys() < names for own in B.METHOD_DEFAULTS.values()
    )


RUNS = {
    **{method: dict(settings_of(method)) for method in B.METHOD_DEFAULTS},
    "ema": dict(teacher="ema", teacher_decay=0.5),
    "periodic": dict(teacher="periodic", teacher_period=3),
    "frozen": dict(teacher="frozen"),
    "jsd": dict(objective="jsd"),
    "top support": dict(support_top_k=5),
    "random": dict(retrieval="random"),
    "answer": dict(answer_pi=True),
    "groups of sgsd": dict(generations=2),
    "plain": dict(token_mask=False, clip=False, eps_a=0.0, polarity=False),
}


@pytest.mark.parametrize("name", RUNS)
def test_stopped_and_resumed_equals_uninterrupted(name, world_dir, tmp_path, monkeypatch, capsys):
    """Every method and ablation on the whole loop: two updates and one more, bit for bit those of three in a row."""
    changes = {**RUNS[name], "updates": 3, "max_new_tokens": 8}
    if "method" in changes:
        changes |= skilled(world_dir, changes["method"])
    if "generations" in changes and changes.get("method", "").startswith("grpo"):
        changes["generations"] = 3

    def train(out, resume=False):
        run = make_run(world_dir, out, resume, **changes)
        run.verifier = Alternating()
        assert sgsd.train(run, resume) == 0
        return run

    run, keep = train(tmp_path / "whole"), sgsd.update
    monkeypatch.setattr(sgsd, "update", lambda run, s: setattr(run, "stop", s == 2) or keep(run, s))
    train(tmp_path / "parts")
    monkeypatch.setattr(sgsd, "update", keep)
    assert len(rows(tmp_path / "parts" / "metrics.jsonl")) == 2
    train(tmp_path / "parts", resume=True)
    for file in (
        "rollouts.jsonl",
        "tokens.jsonl",
        *(f"checkpoints/step_000003/{f}.safetensors" for f in ("adapter_model", "trainer")),
    ):
        assert (tmp_path / "whole" / file).read_bytes() == (
            tmp_path / "parts" / file
        ).read_bytes(), file
    saved = load_file(tmp_path / "whole/checkpoints/step_000003/trainer.safetensors")
    assert sum(k.endswith(".teacher") for k in saved) == len(run.teacher)
    metrics, config = (
        rows(tmp_path / "whole/metrics.jsonl"),
        json.loads((tmp_path / "whole/config.json").read_text())["settings"],
    )
    assert (
        all(m["grad_norm"] > 0 and math.isfinite(m["loss"]) for m in metrics)
        and ("bank_skills" in metrics[0]) == run.cfg.sees_skills
    )
    assert (
        config == dataclasses.asdict(run.cfg)
        and len(rows(tmp_path / "whole/rollouts.jsonl")) == 12 * run.cfg.generations
    )
    assert f"method {run.cfg.method}: " in capsys.readouterr().out


def test_groups_stay_together_over_ranks(world_dir, tmp_path):
    """Three problems of two rollouts on two ranks: one order of records, one update up to the order of a sum."""
    flags = ["--batch-size", "3", "--updates", "1", "--generations", "2", "--method", "opsd+skill"]
    for n in (1, 2):
        command(world_dir, tmp_path / str(n), n, *flags)
    logs = [rows(tmp_path / str(n) / "rollouts.jsonl") for n in (1, 2)]
    assert len(logs[0]) == 6 and [r["completion_ids"] for r in logs[0]] == [
        r["completion_ids"] for r in logs[1]
    ]
    assert [r["problem_id"] for r in logs[0][::2]] == [r["problem_id"] for r in logs[0][1::2]]
    moments = [
        load_file(tmp_path / str(n) / "checkpoints/step_000001/trainer.safetensors") for n in (1, 2)
    ]
    for name in moments[0]:
        torch.testing.assert_close(moments[0][name], moments[1][name], atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--method", "base"], ("--method base", "eval.py")),
        (["--method", "base+skill"], ("--method base+skill", "eval.py")),
        (["--method", "dpo"], ("--method dpo", "grpo, grpo+skill, opsd")),
        (["--method", "grpo", "--generations", "1"], ("--generations 1", "relative to a group")),
        (["--method", "opsd", "--bank", "b.json"], ("--bank b.json", "opsd+skill")),
        (["--objective", "jsd", "--support-top-k", "9"], ("--support-top-k 9", "--objective gate")),
        (["--teacher", "ema", "--teacher-decay", "1"], ("--teacher-decay 1.0", "< 1")),
        (["--teacher", "dead"], ("--teacher", "dead")),
    ],
)
def test_mistakes(argv, words, tmp_path, capsys):
    assert sgsd.main([*argv, "--out", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and all(w in err for w in words), err


def test_a_resumed_run_keeps_its_method_and_its_teacher(world_dir, tmp_path, capsys):
    run = make_run(world_dir, tmp_path / "run", updates=1)
    sgsd.train(run, False)
    assert sgsd.main(["--resume", str(tmp_path / "run"), "--method", "grpo"]) == 2
    assert "is a run of sgsd" in capsys.readouterr().err
    other = make_run(
        world_dir, tmp_path / "run", True, updates=1, teacher="ema"
    )  # a copy that begins on resume begins as the student
    assert sgsd.load_checkpoint(other) == 1 and all(
        torch.equal(own, other.params[name]) for name, own in other.teacher.items()
    )
    assert any(own.abs().sum() > 0 for name, own in other.teacher.items() if "lora_B" in name)


def test_a_capped_head_is_refused_where_whole_logits_are_needed(world_dir, tmp_path):
    from conftest import make_tokenizer

    make_model("gemma2").save_pretrained(tmp_path / "capped")
    make_tokenizer().save_pretrained(tmp_path / "capped")
    with pytest.raises(D.UserError, match="plain head"):
        make_run(
            world_dir,
            tmp_path / "run",
            model=str(tmp_path / "capped"),
            attn="eager",
            objective="jsd",
        )


@pytest.mark.parametrize(
    "name,changes",
    [("grpo_loss", settings_of("grpo", generations=2)), ("generalized_jsd", settings_of("opsd"))],
)
def test_an_infinite_loss_skips_the_update(name, changes, world_dir, tmp_path, monkeypatch):
    """Its gradient alone may well be finite: that of an added constant is."""
    keep = getattr(B, name)
    monkeypatch.setattr(B, name, lambda *args, **kw: keep(*args, **kw) + float("inf"))
    run, *_ = one_update(world_dir, tmp_path / "run", **changes)
    before = {n: p.detach().clone() for n, p in run.params.items()}
    assert not math.isfinite(sgsd.update(run, 1)) and all(
        torch.equal(before[n], p) for n, p in run.params.items()
    )
