"""A run's records: rows, supports, what a line tells, warnings, trackers."""

import sys
import types
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from conftest import one_line, t

import sgsd
from lib import runlog
from lib.config import Config
from methods.groups import MethodConfig

SECONDS = {"gen": 0.0, "score": 0.0, "bwd": 0.0, "opt": 0.0}


def row(r, a, rho, **changes):
    """A rollout's record with these supports and polarities."""
    record = {"index": 0, "r": r, "a": a, "rho": rho, "first_gap": a, "loss": 0.0, "pred": "5"}
    record |= {"truncated": False, "completion_ids": [1], "unmasked": 1, "clipped": 0}
    return record | changes


def summary(records):
    """A step's line of metrics.jsonl."""
    return runlog.summarize(1, records, 0.1, 1e-3, dict(SECONDS), 0.0)


@dataclass(frozen=True)
class Roll:
    problem_id: str
    completion_ids: list
    r: int


def test_a_row_counts_unmasked_tokens_and_clipped_gaps_and_has_each_tokens_text(tokenizer):
    """Two teachers and two tokens, of which the second is masked."""
    skill, mistake = {"skill_id": "gen_001"}, {"mistake_id": "err_002"}
    pair = types.SimpleNamespace(skill=skill, mistake=mistake, s_g=0.5, s_e=-0.25)
    ids = tokenizer.encode("\\boxed{5}", add_special_tokens=False)[:2]
    roll, delta_KT = Roll("p", ids, -1), t([[2.0, 3.0], [-0.5, 0.0]])
    numbers = {"a": t([0.5, -0.5]), "rho": torch.tensor([-1, 1])}
    token_numbers = {"mask": torch.tensor([1, 0]), "delta": delta_KT}
    result = sgsd.RolloutLoss(t(0.25), numbers, token_numbers, [pair, pair])
    line = runlog.rollout_row(7, 3, roll, -1, result, c_delta=1.0)
    assert (line["index"], line["step"], line["problem_id"], line["reward"]) == (3, 7, "p", -1)
    assert (line["pairs"], line["s_e"]) == ([["gen_001", "err_002"]] * 2, [-0.25, -0.25])
    assert (line["loss"], line["a"], line["rho"]) == (0.25, [0.5, -0.5], [-1, 1])
    assert (line["unmasked"], line["clipped"]) == (1, 1)  # of the first token's gaps, 2 and -0.5
    assert line["first_gap"] == [2.0, -0.5]
    tokens = runlog.token_row(7, 3, roll, result, tokenizer)
    assert (tokens["step"], tokens["index"]) == (7, 3)
    assert (tokens["text"], tokens["mask"]) == (["\\boxed", "{"], [1, 0])
    for name in ("reward", "clipped", "audit", "bank_skills"):  # a name that a row has, or might
        clash = sgsd.RolloutLoss(t(0.0), {name: t(1.0)}, {})
        one_line(lambda x=clash: runlog.rollout_row(7, 3, roll, -1, x, c_delta=1.0), f"'{name}'")
    alone = sgsd.RolloutLoss(t(0.0), {}, {"mask": torch.tensor([1, 0])})
    assert runlog.rollout_row(7, 3, roll, -1, alone, c_delta=1.0)["unmasked"] == 1


def test_a_steps_numbers_by_hand():
    """Of two successes and two failures. The gaps are 6 x 2 + 2 x 1 + 1 x 2 = 16, 7 of them
    clipped; the first ones are the supports."""
    one = row(1, [0.1, 0.3], [1, 0], completion_ids=[1] * 7, unmasked=6, clipped=6, loss=0.5)
    other = row(1, [-0.2], [-1], completion_ids=[1] * 3, unmasked=2, clipped=1, loss=-0.25)
    cut, bare = row(-1, [0.4, -0.2], [-1, 0], truncated=True), row(-1, [], [], pred=None)
    m = summary([one, other, cut, bare])
    wanted = {"success": 1 / 2, "truncated": 1 / 4, "no_answer": 1 / 4, "no_teachers": 1}
    wanted |= {"rho_distilled": 1, "rho_distilled_success": 1, "rho_distilled_failure": 0}
    wanted |= {"rho_reversed": 2, "rho_reversed_success": 1, "rho_reversed_failure": 1}
    wanted |= {"rho_ignored": 2, "rho_ignored_success": 1, "rho_ignored_failure": 1}
    wanted |= {"rho_distilled_truncated": 0, "rho_reversed_truncated": 1}
    wanted["rho_ignored_truncated"] = 1
    wanted |= {"mask_share": 10 / 12, "clip_share": 7 / 16, "completion_tokens": 12 / 4}
    wanted |= {"first_gap": 0.4 / 5, "loss": 0.25 / 4}
    wanted |= {"abs_a_p10": 0.14, "abs_a_p50": 0.2, "abs_a_p90": 0.36}
    wanted |= {"a_mean_success": 0.2 / 3, "a_positive_success": 2 / 3}
    wanted |= {"a_mean_failure": 0.1, "a_positive_failure": 0.5}
    assert {name: m[name] for name in wanted} == pytest.approx(wanted)
    assert not {"a_mean_failure", "a_positive_failure"} & {*summary([one])}  # 0 would mislead
    m = summary([row(-1, [0.0], [0], unmasked=0)])  # no reasoning token
    assert (m["mask_share"], m["clip_share"]) == (0, 0)
    one_line(lambda: summary([row(1, [], [], grad_norm=1.0)]), "'grad_norm'")  # a method's own


def test_grpo_logs_its_mixed_groups_and_neither_a_mask_nor_clipped_gaps():
    """Two groups of two: one has both verdicts, and teaches."""
    rollout = {"loss": 0.0, "pred": "5", "truncated": False, "completion_ids": [1]}
    shown = [(1, 1.0), (-1, 1.0), (-1, 0.0), (-1, 0.0)]
    m = summary([rollout | {"r": r, "mixed": mixed} for r, mixed in shown])
    assert m["mixed"] == 0.5
    assert not {"mask_share", "clip_share", "first_gap", "abs_a_p50"} & {*m}


USUAL = {"truncated": 0.0, "no_answer": 0.0, "abs_a_p50": 0.02, "rho_distilled": 1}
USUAL |= {"success": 0.0, "rho_reversed": 0, "rho_ignored": 3}


def warnings(cfg, **numbers):
    """What is said after the fifth of 20 steps with these numbers; nothing after the others."""
    steps, lines = [], {}
    for step in range(1, 21):
        steps.append({"step": step, **USUAL, **numbers})
        lines[step] = "\n".join(runlog.warnings_after(steps, cfg))
    after_five = lines.pop(5)
    assert not any(lines.values())
    return after_five


def test_after_five_steps_without_a_right_solution_one_line_names_the_flag():
    assert "--max-new-tokens" in warnings(Config(), truncated=1.0, no_answer=1.0)
    assert "--answer-field" in warnings(Config(), truncated=0.5, no_answer=0.9)


def test_after_five_steps_without_a_decided_teacher_one_line_names_the_threshold():
    """Not where one was reversed, nor in a method without teachers or without a threshold."""
    none = {"success": 0.5, "rho_distilled": 0, "rho_reversed": 0, "rho_ignored": 4}
    assert "0.02 nats, and --eps-a is 0.05" in warnings(Config(), **none)
    assert not warnings(Config(), **none | {"rho_reversed": 1})
    assert "no solution had a teacher" in warnings(Config(), **none | {"rho_ignored": 0})
    assert not warnings(MethodConfig(), **none)


def test_after_five_steps_without_a_group_of_both_verdicts_a_line_names_the_way_out():
    """Easier problems, harder ones, or larger groups, by what the groups were."""
    of_groups = MethodConfig()
    assert "take easier problems" in warnings(of_groups, mixed=0.0, success=0.0)
    assert "take harder problems" in warnings(of_groups, mixed=0.0, success=1.0)
    assert "more --generations" in warnings(of_groups, mixed=0.0, success=0.5)
    assert not warnings(of_groups, mixed=0.1, success=0.5)


def test_a_tracker_gets_a_steps_numbers_and_goes_on_with_a_run(tmp_path, monkeypatch):
    wandb = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    record = {"settings": {"report_to": "wandb"}, "id": "0a1b"}
    track = runlog.open_tracker(tmp_path / "run", record)
    track({"step": 4, "loss": 0.5})
    wandb.log.assert_called_once_with({"step": 4, "loss": 0.5}, step=4)
    given = wandb.init.call_args.kwargs
    assert (given["name"], given["resume"], given["id"]) == ("run", "allow", "0a1b")
