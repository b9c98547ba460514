"""SDPO (lasgroup/SDPO at 0e6d510): its divergence by hand, and a step by its definition."""

import os

import driver
import pytest
import small_run
import torch
from conftest import same, t
from method_steps import assert_gradients, one_step
from plain import logprobs
from safetensors.torch import load_file

import rollout
import skills
from lib import verify
from methods import sdpo

S, T = [[0.5, 0.3, 0.2], [0.6, 0.3, 0.1]], [[0.7, 0.1, 0.2], [0.2, 0.3, 0.5]]


@pytest.mark.parametrize(
    ("alpha", "k", "want"),
    [
        # All entries. M = [.6 .2 .2]: (.7 ln 7/6 + .1 ln 1/2) / 2 + (.5 ln 5/6 + .3 ln 3/2) / 2
        #   = (.107905 - .069315) / 2 + (-.091161 + .121640) / 2
        # M = [.4 .3 .3]: (.2 ln 1/2 + .5 ln 5/3) / 2 + (.6 ln 3/2 + .1 ln 1/3) / 2
        (0.5, 3, [0.034535, 0.125101]),
        # The best and the rest. [.5 .5], [.7 .3], M = [.6 .4]:
        #   (.7 ln 7/6 + .3 ln 3/4) / 2 + (.5 ln 5/6 + .5 ln 5/4) / 2
        # [.6 .4], [.2 .8], M = [.4 .6]: (.2 ln 1/2 + .8 ln 4/3) / 2 + (.6 ln 3/2 + .4 ln 2/3) / 2
        (0.5, 1, [0.021006, 0.086305]),
        # KL(S || T): .5 ln 5/7 + .5 ln 5/3; .6 ln 3 + .4 ln 1/2
        (1.0, 1, [0.087177, 0.381909]),
        # KL(T || S), all entries: .7 ln 7/5 + .1 ln 1/3; .2 ln 1/3 + .5 ln 5
        (0.0, 3, [0.125669, 0.584996]),
    ],
)
def test_the_divergence_by_hand(alpha, k, want):
    same(sdpo.sdpo_divergence(t(S).log(), t(T).log(), alpha, k), want, tol=1e-6)


def test_the_first_other_right_solution_is_shown():
    assert [sdpo.shown_sibling([-1, 1, -1, 1], i) for i in range(4)] == [1, 3, 1, 1]
    assert [sdpo.shown_sibling([-1, -1, 1], i) for i in range(3)] == [2, 2, None]  # a lone success
    assert [sdpo.shown_sibling([-1, -1], i) for i in range(2)] == [None, None]


class ByPlace(verify.Judge):
    """Of two groups of four the first has two successes, the second a lone one."""

    def judge(self, cases):
        right = (False, True, True, False, False, False, False, True)
        return [verify.Verdict(None, right[i % 8]) for i in range(len(cases))]


class RightInTheSecondStep(verify.Judge):
    """Every solution of rank 0's problems is wrong in the first step, all others are right."""

    step = 0

    def judge(self, cases):
        self.step += 1
        first = os.environ.get("RANK") == "0" and self.step == 1
        return [verify.Verdict(None, not first) for _ in cases]


def test_a_step_is_its_definition(world_dir, tmp_path):
    """Rows and gradients from whole logits, k + 1 entries by a loop over places."""
    changes = {"generations": 4, "batch_size": 2, "verifier": "test_sdpo:ByPlace"}
    changes |= {"temperature": 1.2, "divergence_top_k": 5, "divergence_alpha": 0.3}
    run, rows, got = one_step(world_dir, tmp_path / "run", "sdpo", **changes)
    shown_to = {0: 1, 1: 2, 2: 1, 3: 1, 4: 7, 5: 7, 6: 7}  # 7 is a lone success
    assert [bool(row.get("rho")) for row in rows] == [i in shown_to for i in range(8)]
    total = 0.0
    for i, j in shown_to.items():
        row, ids = rows[i], rows[i]["completion_ids"]
        text = f"{row['problem']}\n\nA correct solution:\n\n{rows[j]['text'].strip()}"
        text = skills.render_student(f"{text}\n\nNow solve the original problem.")
        context = rollout.chat_ids(run.tokenizer, text, thinking="closed")
        s_TV = logprobs(run.lm, row["prompt_ids"], ids, 1.2)
        with torch.no_grad(), run.lm.disable_adapter():
            t_TV = logprobs(run.lm, context, ids, 1.2)
        loss = 0.0
        for s_V, t_V in zip(s_TV.exp(), t_TV.exp()):
            likeliest = s_V.topk(5).indices
            s, q = ([*x_V[likeliest], 1 - x_V[likeliest].sum()] for x_V in (s_V, t_V))
            for a, b in zip(s, q):
                mix = 0.7 * a + 0.3 * b
                loss = loss + (0.3 * b * (b / mix).log() + 0.7 * a * (a / mix).log()) / len(ids)
        assert row["loss"] == pytest.approx(loss.item(), abs=1e-5)
        gaps = (t_TV - s_TV)[range(len(ids)), ids].tolist()
        assert row["tokens"]["delta"][0] == pytest.approx(gaps, abs=2e-5)
        total = total + loss / 8  # those without a teacher count
    assert rows[7]["loss"] == 0 and not rows[7]["pairs"]
    assert_gradients(got, run, total)


def test_a_siblings_thinking_is_not_shown():
    told = [sdpo.with_solution("1 + 1?", text) for text in ("<think>3</think>\n2", "2")]
    assert told[0] == told[1] and "1 + 1?" in told[0] and "2" in told[0]


def test_two_processes_have_one_teacher_though_one_of_them_needs_none_at_first(world_dir, tmp_path):
    """Rank 0, which saves the teacher, has no success in the first step."""
    argv = ["sdpo", *small_run.flags(world_dir, tmp_path / "run", bank="", steps=2)]
    argv += "--generations 2 --learning-rate 0.01 --teacher-decay 0.75".split()
    argv += "--verifier test_sdpo:RightInTheSecondStep --checkpoint-every 1".split()
    driver.run_two(argv)
    rows = driver.rows(tmp_path / "run" / "rollouts.jsonl")
    assert {bool(row.get("rho")) for row in rows if row["step"] == 1} == {True, False}
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000001"
    state = load_file(checkpoint / "trainer.safetensors")
    weights = load_file(checkpoint / "adapter_model.safetensors")
    # B begins at 0, so a copy that began before the step is a quarter of what B became.
    moved = [name for name in weights if "lora_B" in name and weights[name].any()]
    for name in moved:
        stem = name.removesuffix(".weight")
        (copy,) = [x for key, x in state.items() if stem in key and key.endswith(".teacher")]
        torch.testing.assert_close(copy, weights[name] / 4)
    assert moved
