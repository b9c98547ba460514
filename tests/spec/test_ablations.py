"""The ablations (§4.4, §4.5, App. F.1): each changed step is its definition.

A definition scores one row at a time by the model's own full logits. Before that stand the
divergences (Fig. 3, OPSD) by hand: KL both ways, JSD, a local support.
"""

import math
import os
import signal
from contextlib import nullcontext

import driver
import plain
import pytest
import small_run
import torch
from conftest import make_bank, one_line, same, save_model, t
from driver import completes, rows
from method_steps import assert_gradients, logprobs_of, one_step, perturb
from small_run import flags

import rollout
import skills
from lib import model
from methods import ablations, divergences
from methods.ablations import AblationConfig


def test_with_default_settings_a_run_equals_sgsds_own_bit_for_bit(world_dir, tmp_path):
    """With the paper's K = 8: a sum of eight gradients in another order is another number."""
    make_bank(tmp_path / "bank.json", 8, 8)
    changes = {"bank": tmp_path / "bank.json", "num_teachers": 8, "eps_a": 0.4}
    outs = [tmp_path / "sgsd", tmp_path / "ablations"]
    for out in outs:
        argv = flags(world_dir, out, steps=3, audit_every=1, **changes)
        completes(small_run.main, [out.name, *argv])
    assert driver.state(outs[0]) == driver.state(outs[1])
    of_all = set()
    for row in rows(outs[0] / "rollouts.jsonl"):
        of_all |= {*row["rho"]}
    assert of_all == {-1, 0, 1}


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


CASES = {
    "no mask": {"token_mask": False},
    "no clip": {"clip": False},
    "no threshold": {"eps_a": 0.0},
    "none of the three": {"token_mask": False, "clip": False, "eps_a": 0.0},
    "no polarity": {"polarity": False},
    "one teacher": {"num_teachers": 1},
    "random pairs": {"retrieval": "random"},
    "donor": {"retrieval": "donor"},
    "shuffled words": {"skill_text": "shuffled"},
    "no text": {"skill_text": "none"},
    "answer": {"answer_pi": True, "loss_temperature": 1.3},
    "field": {"answer_pi": True, "teacher_field": "answer"},
    "frozen, one row a forward pass": {"teacher": "frozen", "score_tokens": 1},
    "periodic": {"teacher": "periodic"},
    "ema": {"teacher": "ema"},
    "reverse KL": {"objective": "reverse_kl"},
    "forward KL": {"objective": "forward_kl"},
    "jsd, one row a forward pass": {"objective": "jsd", "score_tokens": 1},
    "top support": {"support_top_k": 5},
    "gemma2 jsd": {"objective": "jsd", "model": "gemma2"},
}


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
    tokens, count, a = row["tokens"], m_T.sum().item(), row["a"][k]
    bound = cfg.c_delta if cfg.clip else math.inf
    ell_T, gap_T = loss_and_gap(cfg, s_TV, t_TV, row["completion_ids"])
    assert tokens["delta"][k] == pytest.approx(gap_T.tolist(), abs=2e-5)
    assert a == pytest.approx((m_T * gap_T.clamp(-bound, bound)).sum().item() / count, abs=1e-5)
    rho = 0 if abs(a) <= cfg.eps_a else row["r"] * math.copysign(1, a)
    assert row["rho"][k] == (rho if cfg.polarity else 1)
    rho_T = m_T * row["rho"][k]
    if "credit" in tokens:  # Eq. 20
        slope_T = gap_T / (1 + torch.exp(gap_T**2 / 2))
        credit_T = row["alpha"][k] * rho_T * slope_T / count
        assert tokens["credit"][k] == pytest.approx(credit_T.tolist(), abs=2e-5)
    return row["alpha"][k] * (rho_T * ell_T).sum() / count


def rollout_by_definition(run, x, row):
    """A rollout's loss, with gradient, after its row has been checked."""
    cfg, shown, ids, tokens = run.cfg, x.problem, row["completion_ids"], row["tokens"]
    pairs = run.bank.retrieve(x.problem, cfg.num_teachers, run.embed)
    if (cfg.retrieval, cfg.skill_text) != ("embedding", "whole"):
        pairs = ablations.retrieve(run, 1, x)
    if cfg.answer_pi:
        hint = x.answer if cfg.teacher_field else f"The reference answer is {x.answer}."
        shown += f"\n\n{hint}"
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
        model_path = save_model(tmp_path / "model", "gemma2")
        changes = {**changes, "model": str(model_path), "attn": "eager"}
    run, rows_of_step, got = one_step(world_dir, tmp_path / "run", **changes)
    problem_of = {x.id: x for x in run.problems}
    total = 0.0
    for row in rows_of_step:
        loss = rollout_by_definition(run, problem_of[row["problem_id"]], row)
        assert row["loss"] == pytest.approx(loss.item(), abs=1e-5)
        total = total + loss / 4
    assert len({tuple(row["completion_ids"]) for row in rows_of_step}) == 4 == len(rows_of_step)
    assert_gradients(got, run, total)


def test_random_pairs_are_drawn_anew_for_each_step_and_again_the_same(world_dir, tmp_path):
    changes = {"retrieval": "random", "num_teachers": 2}
    with small_run.opened(world_dir, tmp_path / "run", AblationConfig, **changes) as run:
        for x in run.problems:
            chosen = [ablations.retrieve(run, step, x) for step in range(8)]
            assert chosen == [ablations.retrieve(run, step, x) for step in range(8)]
            names = set()
            for one, other in chosen:
                assert (one.s_g, one.s_e, other.s_g, other.s_e) == (0, 0, 0, 0)  # equal weights
                assert one.skill != other.skill and one.mistake != other.mistake
                names.add((one.skill["skill_id"], other.skill["skill_id"]))
            assert len(names) > 3  # of 12 ordered pairs of four skills


def test_a_donor_is_another_problem_and_its_nearest_pairs_are_shown(world_dir, tmp_path):
    with small_run.opened(world_dir, tmp_path / "run", AblationConfig, retrieval="donor") as run:
        nearest = {x.id: run.bank.retrieve(x.problem, 3, run.embed) for x in run.problems}
        for x in run.problems:
            others = [pairs for id_, pairs in nearest.items() if id_ != x.id]
            chosen = [ablations.retrieve(run, step, x) for step in range(8)]
            assert chosen == [ablations.retrieve(run, step, x) for step in range(8)]
            assert all(pairs in others for pairs in chosen)
            assert any(pairs != chosen[0] for pairs in chosen)


LEFT = {"whole": 3, "title": 1, "none": 0}  # of an entry's three fields, the first ones


@pytest.mark.parametrize("skill_text", LEFT)
def test_a_teacher_reads_what_is_left_of_an_entry(skill_text, world_dir, tmp_path):
    """Weights and ids are those of the whole entries, and the bank stays as it is."""
    changes = {"skill_text": skill_text, "num_teachers": 4}
    with small_run.opened(world_dir, tmp_path / "run", AblationConfig, **changes) as run:
        x = run.problems[0]
        whole = run.bank.retrieve(x.problem, 4, run.embed)
        pairs = ablations.retrieve(run, 1, x)
        assert whole == run.bank.retrieve(x.problem, 4, run.embed)
    for pair, full in zip(pairs, whole, strict=True):
        assert (pair.s_g, pair.s_e) == (full.s_g, full.s_e)
        shown = (pair.skill, full.skill), (pair.mistake, full.mistake)
        for key, (entry, of_bank) in zip(skills.KINDS, shown):
            fields = skills.KINDS[key].fields
            assert entry == of_bank | dict.fromkeys(fields[LEFT[skill_text] :], "")


def test_words_are_shuffled_within_their_field_anew_for_each_step(world_dir, tmp_path):
    changes = {"skill_text": "shuffled", "num_teachers": 4}
    with small_run.opened(world_dir, tmp_path / "run", AblationConfig, **changes) as run:
        x, orders = run.problems[0], set()
        whole = run.bank.retrieve(x.problem, 4, run.embed)
        for step in range(8):
            pairs = ablations.retrieve(run, step, x)
            assert pairs == ablations.retrieve(run, step, x)
            for pair, full in zip(pairs, whole, strict=True):
                for entry, of_bank in ((pair.skill, full.skill), (pair.mistake, full.mistake)):
                    for name, text in of_bank.items():
                        assert sorted(entry[name].split()) == sorted(text.split())
            orders.add(pairs[0].skill["principle"])  # 24 orders of four words
        assert len(orders) > 3


def test_a_solution_that_was_cut_can_be_left_out_and_its_teachers_are_ignored(world_dir, tmp_path):
    """Not one that ended by itself (S4). Without polarity all others are distilled."""
    changes = {"drop_truncated": True, "polarity": False}
    with small_run.opened(world_dir, tmp_path / "run", AblationConfig, **changes) as run:
        perturb(run)
        x, ids = run.problems[0], run.tokenizer.encode("so 5")
        prompt = rollout.chat_ids(run.tokenizer, x.problem, thinking="closed")
        pairs_K = ablations.retrieve(run, 1, x)
        for is_cut in (True, False):
            roll = rollout.Rollout(x.id, x.problem, "5", prompt, ids, "so 5", None, -1, is_cut)
            ((loss, numbers, token_numbers, _),) = ablations.losses(run, 1, x, [roll], pairs_K)
            assert loss.requires_grad == bool(loss) == (not is_cut)
            assert numbers["rho"].tolist() == [int(not is_cut)] * 3
            assert token_numbers["credit"].any() == (not is_cut)


@pytest.mark.parametrize("teacher", ["periodic", "ema"])
def test_a_copied_teacher_follows_also_in_a_run_that_is_continued(teacher, world_dir, tmp_path):
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
        run = small_run.train(world_dir, tmp_path / "run", step_fn, AblationConfig, **changes)
        assert run.code == code
