"""Evaluations side by side: paired differences, best and last, what is left out and why.

`write_evaluation(folder, settings, d=[1, 2])` writes the results of an evaluation: on the set d of
two problems, of k = 4 samples each, 1 and 2 were right.
"""

import json

import pytest
from conftest import write_evaluation
from driver import completes

from extras import compare

WHOLE = {"the policy's files": "t", "the base's files": "t"}  # its own base


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
    tables, left_out, _ = compared(tmp_path)
    first, row = tables["d"]["results"].values()
    assert list(tables["d"]["results"]) == [str(base), str(last)] and not left_out
    assert "diff" not in first and row["avg_low"] < first["avg"] and row["to"] == str(base)
    # the gaps are .25 in an eighth of the problems, else 0: their deviation is .25 sqrt(7/64), so
    # 1.96 standard errors of 80 are .0181
    got = [row["diff"], row["diff_low"], row["diff_high"]]
    assert got == pytest.approx([0.03125, 0.0131, 0.0494], abs=4e-3)


def test_a_mean_over_sets_weighs_them_alike(tmp_path):
    """4 of 4 samples of one problem, and none of three: a half, of 4 problems."""
    folder = write_evaluation(tmp_path / "eval/base", d=[4], e=[0, 0, 0])
    tables, _, printed = compared(folder)
    mean = tables["mean of d, e"]["results"][str(folder)]
    assert (mean["avg"], mean["problems"], mean["samples"]) == (0.5, 4, 16)
    assert f"| {folder} | mean of d, e | 4 | 50.0% | none |" in printed


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
    assert f"best {first}" in printed


OTHERS = {  # a word of the line: the evaluation that it is about
    "seed": {"settings": {"seed": 1}, "d": [1, 2], "e": [1]},
    "base": {"settings": {"the base's files": "v"}, "d": [1, 2], "e": [1]},
    "problems": {"digest": "2", "d": [1, 2], "e": [1]},
    "samples": {"k": 8, "d": [1, 2], "e": [1]},
    "no figures": {"d": [1, 2], "f": [1, 2]},
}


@pytest.mark.parametrize("word", OTHERS)
def test_an_evaluation_under_other_conditions_is_left_out_by_name(word, tmp_path):
    first = write_evaluation(tmp_path / "first", d=[1, 2], e=[1])
    other = write_evaluation(tmp_path / "other", **OTHERS[word])
    third = write_evaluation(tmp_path / "third", d=[1, 2], e=[2])
    tables, (line, *_), printed = compared(first, other, third)
    assert [*tables] == ["d", "e", "mean of d, e"]
    assert all([*table["results"]] == [str(first), str(third)] for table in tables.values())
    assert str(other) in line and word in line and line in printed


def test_skills_the_machine_and_trained_weights_may_differ(tmp_path):
    """Base+Skill on another machine, and a model whose weights were all trained."""
    base = write_evaluation(tmp_path / "eval/m", d=[1, 2])
    write_evaluation(tmp_path / "eval/n", {"skills": "b", "device": "cuda"}, d=[2, 2])
    write_evaluation(tmp_path / "eval/o", WHOLE, d=[2, 2])
    tables, left_out, _ = compared(tmp_path)
    _, *others = tables["d"]["results"].values()
    assert [row["to"] for row in others] == [str(base)] * 2 and not left_out
