"""Evaluations side by side: paired differences, best and last, what is left out and why.

`write_evaluation(folder, settings, d=[1, 2])` writes the results of an evaluation: on the set d of
two problems, of k = 4 samples each, 1 and 2 were right.
"""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from conftest import write_evaluation
from driver import completes, refused

from extras import compare


def compared(*folders):
    """The command's tables by set, its lines on what it leaves out, and what it printed."""
    printed = completes(compare.main, folders)
    home = folders[0] / "eval" if (folders[0] / "eval").exists() else folders[0].parent
    written = json.loads((home / "comparison.json").read_text())
    return written["sets"], written["not_compared"], printed


def test_pairing_removes_what_policies_share(tmp_path):
    """One policy has a sample more right of every eighth problem: the difference is sure, and
    neither mean is."""
    shared = [0, 1, 2, 3] * 20
    more = [count + (i % 8 == 0) for i, count in enumerate(shared)]
    base = write_evaluation(tmp_path / "eval/base", d=shared)
    last = write_evaluation(tmp_path / "eval/step_000002", d=more)
    tables, left_out, printed = compared(tmp_path)
    first, row = tables["d"]["results"].values()
    assert list(tables["d"]["results"]) == [str(base), str(last)] and not left_out
    assert "diff" not in first and row["avg_low"] < first["avg"] and row["to"] == str(base)
    # the gaps are .25 in an eighth of the problems, else 0: their deviation is .25 sqrt(7/64), so
    # 1.96 standard errors of 80 are .0181
    got = [row["diff"], row["diff_low"], row["diff_high"]]
    assert got == pytest.approx([0.03125, 0.0131, 0.0494], abs=4e-3)
    assert row["won_lost_tied"] == [10, 0, 70]
    assert f"| +3.1 ({100 * got[1]:+.1f} to {100 * got[2]:+.1f}) | 10, 0, 70 |" in printed


def by_hand(values_P):
    """The middle 95% of the mean of problems that are drawn with replacement: all its chances."""
    chance_of = {0: 1.0}  # of each sum
    for _ in values_P:
        longer = Counter()
        for total, value in itertools.product(chance_of, values_P):
            longer[total + value] += chance_of[total] / len(values_P)
        chance_of = longer
    totals, sums_to = sorted(chance_of), np.cumsum([chance_of[x] for x in sorted(chance_of)])
    return [totals[int(np.searchsorted(sums_to, p))] / len(values_P) for p in (0.025, 0.975)]


def test_pass_at_k_has_the_interval_of_a_bootstrap_over_problems(tmp_path):
    """pass@4 asks whether a problem has a right sample. 8 of 16 problems have one, then 12: six of
    the others, and two of the 8 are lost.

    The mean of 16 problems, each of which has one with chance 3/4, is at most 7/16 with chance .7%,
    at most 8/16 with 2.7%, at most 14/16 with 93.7%, at most 15/16 with 99%: from .5 to .9375."""
    write_evaluation(tmp_path / "eval/base", d=[1, 3] * 4 + [0] * 8)
    write_evaluation(tmp_path / "eval/step_000002", d=[0] * 2 + [2] * 12 + [0] * 2)
    tables, _, printed = compared(tmp_path)
    first, row = tables["d"]["results"].values()
    assert (first["pass"], row["pass"], row["pass_diff"]) == (0.5, 0.75, 0.25)
    assert [row["pass_low"], row["pass_high"]] == by_hand([0] * 4 + [1] * 12) == [0.5, 0.9375]
    got = [row["pass_diff_low"], row["pass_diff_high"]]
    assert got == by_hand([-1] * 2 + [1] * 6 + [0] * 8)
    assert "| 75.0% (50.0% to 93.8%) | " in printed
    assert f"| +25.0 ({100 * got[0]:+.1f} to {100 * got[1]:+.1f}) | 50.0% |" in printed


def test_a_set_has_all_that_were_evaluated_on_it_and_the_mean_those_of_every_set(tmp_path):
    """The mean is of sets that one verifier judged."""
    first = write_evaluation(tmp_path / "run/eval/base", d=[1, 2], e=[1])
    part = write_evaluation(tmp_path / "run/eval/step_000001", d=[2, 2])
    last = write_evaluation(tmp_path / "run/eval/step_000002", d=[1, 1], e=[2])
    tables, (reason,), printed = compared(tmp_path / "run")
    folders = {name: [*table["results"]] for name, table in tables.items()}
    assert folders["d"] == [str(x) for x in (first, part, last)]
    assert folders["e"] == folders["mean of d, e"] == [str(first), str(last)]
    assert f"{part} was not evaluated on e" in reason and "d: of 2 checkpoints" in printed
    results = json.loads((last / "results.json").read_text())
    for name, folder in itertools.product("de", (first, part, last)):
        results = json.loads((folder / "results.json").read_text())
        if name in results:
            results[name]["settings"]["verifier"] = f"of {name}"
        (folder / "results.json").write_text(json.dumps(results))
    tables, reasons, _ = compared(tmp_path / "run")
    assert [*tables] == ["d", "e"] and "verifier" in reasons[-1]


def test_a_mean_over_sets_weighs_them_alike(tmp_path):
    """4 of 4 samples of one problem, and none of three: a half, of 4 problems."""
    folder = write_evaluation(tmp_path / "eval/base", d=[4], e=[0, 0, 0])
    tables, _, printed = compared(folder)
    mean = tables["mean of d, e"]["results"][str(folder)]
    assert (mean["avg"], mean["problems"], mean["samples"]) == (0.5, 4, 16)
    assert f"| {folder} | mean of d, e | 4 | 50.0% (none) |" in printed


def test_the_best_checkpoint_by_set_and_by_mean_stands_beside_the_last(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    write_evaluation(run / "eval/base", d=[4] * 4, e=[4] * 4)
    first = write_evaluation(run / "eval/step_000001", d=[1] * 4, e=[3] * 4)
    second = write_evaluation(run / "eval/step_000002", d=[2] * 4, e=[1] * 4)
    last = write_evaluation(run / "eval/step_000003", d=[1] * 4, e=[1] * 4)
    write_evaluation(other / "eval/step_000001", d=[4] * 4, e=[4] * 4)  # a single one is no choice
    tables, _, printed = compared(run, other)
    (of_d,), (of_e,), (of_mean,) = (table["selections"] for table in tables.values())
    common = {"checkpoints": 3, "last": str(last)}
    assert (common | {"best": str(second), "diff": 0.25}).items() <= of_d.items()
    assert (common | {"best": str(first), "diff": 0.5}).items() <= of_e.items()
    assert (common | {"best": str(first), "diff": 0.25}).items() <= of_mean.items()
    assert f"mean of d, e: of 3 checkpoints the best is {first}" in printed
    assert "+25.0 (none)" in printed


@pytest.mark.parametrize("text", ["{", "[]", '{"d": 5}', '{"d": {"avg": 1}}'])
def test_a_damaged_file_of_results_is_one_line(text, tmp_path):
    write_evaluation(tmp_path / "eval/base", d=[1])
    file = tmp_path / "eval/base/results.json"
    file.write_text(text)
    refused(compare.main, [tmp_path], file)


OTHERS = {  # a word of the line: the evaluation that it is about
    "seed": {"settings": {"seed": 1}, "d": [1, 2], "e": [1]},
    "base": {"settings": {"the base's files": "v"}, "d": [1, 2], "e": [1]},
    "problems": {"digest": "2", "d": [1, 2], "e": [1]},
    "samples": {"k": 8, "d": [1, 2], "e": [1]},
}


@pytest.mark.parametrize("word", OTHERS)
def test_an_evaluation_under_other_conditions_is_left_out_by_name(word, tmp_path):
    first = write_evaluation(tmp_path / "first", d=[1, 2], e=[1])
    other = write_evaluation(tmp_path / "other", **OTHERS[word])
    third = write_evaluation(tmp_path / "third", d=[1, 2], e=[2])
    tables, (line, *_), printed = compared(first, other, third)
    assert [*tables] == ["d", "e", "mean of d, e"]
    assert all([*table["results"]] == [str(first), str(third)] for table in tables.values())
    assert f"{other} has other values of {word}" in line.replace("the base's files", "base")
    assert line in printed


def test_skills_the_machine_and_trained_weights_may_differ(tmp_path):
    """Base+Skill on another machine, and a model whose weights were all trained."""
    base = write_evaluation(tmp_path / "eval/m", d=[1, 2])
    write_evaluation(tmp_path / "eval/n", {"skills": "b", "device": "cuda"}, d=[2, 2])
    own_base = {"the policy's files": "t", "the base's files": "t"}
    write_evaluation(tmp_path / "eval/o", own_base, d=[2, 2])
    tables, left_out, _ = compared(tmp_path)
    _, *others = tables["d"]["results"].values()
    assert [row["to"] for row in others] == [str(base)] * 2 and not left_out
