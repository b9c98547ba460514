"""Finished evaluations side by side: paired differences, best and last, what is not compared."""

import json
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from driver import completes, refused

from extras import compare
from lib import files

SETTINGS = {"the policy's files": "w", "the base's files": "w", "device": "cpu", "seed": 0}


def write(folder, settings=(), digest="1", k=4, **sets):
    """An evaluation of k samples whose problems have these counts of right ones, by set."""
    table = {}
    for name, right_P in sets.items():
        scores_P = np.array(right_P) / k
        row = dict.fromkeys(("pass", "maj", "boxed", "truncated", "tokens"), 0.5)
        row |= {"digest": digest, "problems": len(right_P), "samples": k * len(right_P)}
        row |= {"avg": float(scores_P.mean())}
        row["right"] = {f"p{i}": count for i, count in enumerate(right_P)}
        table[name] = row
    of_policy = {"the policy's files": folder.name} if folder.name.startswith("step_") else {}
    files.write_json(folder / "settings.json", SETTINGS | of_policy | dict(settings))
    files.write_json(folder / "results.json", table)
    return folder


def compared(*folders):
    """What the command writes: the tables by set, and the lines on what it does not compare."""
    completes(compare.main, folders)
    home = folders[0] / "eval" if (folders[0] / "eval").exists() else folders[0].parent
    written = json.loads((home / "comparison.json").read_text())
    return written["sets"], written["not_compared"]


def test_pairing_removes_what_policies_share(tmp_path):
    """One policy has a sample more right of every eighth problem: the difference is sure, and
    neither mean is."""
    shared = [0, 1, 2, 3] * 20
    more = [count + (i % 8 == 0) for i, count in enumerate(shared)]
    base = write(tmp_path / "eval/base", d=shared)
    last = write(tmp_path / "eval/step_000002", d=more)
    tables, others = compared(tmp_path)
    first, row = tables["d"]["results"].values()
    assert list(tables["d"]["results"]) == [str(base), str(last)] and not others
    assert "diff" not in first and row["avg_low"] < first["avg"] and row["to"] == str(base)
    # the gaps are .25 in an eighth of the problems, else 0: their deviation is .25 sqrt(7/64), so
    # 1.96 standard errors of 80 are .0181
    got = [row["diff"], row["diff_low"], row["diff_high"]]
    assert got == pytest.approx([0.03125, 0.0131, 0.0494], abs=4e-3)


def test_equal_gaps_have_no_interval(tmp_path):
    shared = [0, 1, 2, 3] * 10
    for gap in (0, 1):
        write(tmp_path / f"eval/step_00000{gap + 1}", d=[count + gap for count in shared])
    tables, _ = compared(tmp_path)
    _, row = tables["d"]["results"].values()
    assert row["diff"] == 0.25 and row["diff_low"] is row["diff_high"] is None


def test_a_mean_over_sets_weighs_them_alike(tmp_path, capsys):
    """4 of 4 samples of one problem, and none of three: a half, of 4 problems."""
    folder = write(tmp_path / "eval/base", d=[4], e=[0, 0, 0])
    tables, _ = compared(folder)
    mean = tables["mean of d, e"]["results"][str(folder)]
    assert (mean["avg"], mean["problems"], mean["samples"]) == (0.5, 4, 16)
    assert f"| {folder} | mean of d, e | 4 | 50.0% | none |" in capsys.readouterr().out


def test_the_best_checkpoint_by_set_and_by_mean_stands_beside_the_last(tmp_path, capsys):
    run, other = tmp_path / "run", tmp_path / "other"
    write(run / "eval/base", d=[4] * 4, e=[4] * 4)
    for step, (d, e) in enumerate(((1, 3), (2, 1), (1, 1)), 1):
        write(run / f"eval/step_00000{step}", d=[d] * 4, e=[e] * 4)
    write(other / "eval/step_000001", d=[4] * 4, e=[4] * 4)  # a single one is no choice
    tables, _ = compared(run, other)
    for name, best, gap in (("d", 2, 0.25), ("e", 1, 0.5), ("mean of d, e", 1, 0.25)):
        (choice,) = tables[name]["selections"]
        assert choice["checkpoints"] == 3 and choice["diff"] == gap
        for role, step in (("best", best), ("last", 3)):
            assert choice[role] == str(run / f"eval/step_00000{step}")
    assert "best" in capsys.readouterr().out


OTHER = [  # the second evaluation, and a word of the line about it
    ({"settings": {"seed": 1}, "d": [1, 2]}, "seed"),
    ({"settings": {"the base's files": "v"}, "d": [1, 2]}, "base"),
    ({"digest": "2", "d": [1, 2]}, "problems"),
    ({"k": 8, "d": [1, 2]}, "samples"),
    ({"e": [1, 2]}, "was not evaluated"),
]


@pytest.mark.parametrize("given, word", OTHER)
def test_an_evaluation_under_other_conditions_is_named_and_not_compared(
    given, word, tmp_path, capsys
):
    first = write(tmp_path / "first", d=[1, 2])
    other = write(tmp_path / "other", **given)
    tables, (line, *_) = compared(first, other)
    assert list(tables["d"]["results"]) == [str(first)]
    assert str(other) in line and word in line and line in capsys.readouterr().out


def test_mean_and_best_checkpoint_are_over_the_sets_that_all_have_and_cells_are_empty_elsewhere(
    tmp_path, capsys
):
    """The base alone has f, and the checkpoints alone g; by g the other checkpoint is the best."""
    base = write(tmp_path / "eval/base", d=[4] * 4, e=[4] * 4, f=[0] * 4)
    first = write(tmp_path / "eval/step_000001", d=[3] * 4, e=[1] * 4, g=[0] * 4)
    last = write(tmp_path / "eval/step_000002", d=[2] * 4, e=[1] * 4, g=[4] * 4)
    tables, lines = compared(tmp_path)
    assert [*tables] == ["d", "e", "f", "g", "mean of d, e"]
    means = {name: row["avg"] for name, row in tables["mean of d, e"]["results"].items()}
    assert means == {str(base): 1.0, str(first): 0.5, str(last): 0.375}
    (choice,) = tables["mean of d, e"]["selections"]
    assert (choice["best"], choice["last"]) == (str(first), str(last))
    assert [*tables["f"]["results"]] == [str(base)]
    assert [*tables["g"]["results"]] == [str(first), str(last)]
    assert not any("diff" in row for row in tables["g"]["results"].values())  # from which first?
    printed = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("|")] for line in printed if line[0] == "|"]
    assert {len(row) for row in cells} == {14}
    empty = [row[1:3] for row in cells if not any(row[3:])]
    assert empty == [[str(first), "f"], [str(last), "f"], [str(base), "g"]]
    for x, name in ((first, "f"), (last, "f"), (base, "g")):
        assert any(f"on {name}: {x};" in line for line in lines), (x, name)


def test_one_shared_set_picks_the_best_and_without_any_there_is_none(tmp_path, capsys):
    write(tmp_path / "eval/base", d=[4] * 4, e=[4] * 4)
    first = write(tmp_path / "eval/step_000001", d=[3] * 4, e=[0] * 4)
    write(tmp_path / "eval/step_000002", d=[2] * 4)
    tables, _ = compared(tmp_path)
    assert [*tables] == ["d", "e"] and tables["d"]["selections"][0]["best"] == str(first)
    assert f"best {first}" in capsys.readouterr().out
    write(tmp_path / "eval/step_000001", e=[3] * 4)
    tables, _ = compared(tmp_path)
    assert [*tables] == ["d", "e"] and "checkpoints: best" not in capsys.readouterr().out


def test_an_evaluation_given_twice_stands_once(tmp_path):
    first, other = write(tmp_path / "first", d=[1, 2]), write(tmp_path / "other", d=[1, 2])
    tables, _ = compared(first, other, tmp_path)
    assert list(tables["d"]["results"]) == [str(first), str(other)]


def test_skills_and_the_machine_may_differ(tmp_path):
    """Base+Skill is compared with Base, and an evaluation on a GPU with one on a CPU."""
    base = write(tmp_path / "eval/m", d=[1, 2])
    of_skills = {"num_skills": 8, "skills": "b", "encoder": "e", "device": "cuda"}
    skilled = write(tmp_path / "eval/m--skills", of_skills, d=[2, 2])
    tables, lines = compared(tmp_path)
    assert tables["d"]["results"][str(skilled)]["to"] == str(base) and not lines


def test_a_base_comes_before_adapters_and_checkpoints_of_a_run_on_trl_in_their_order(tmp_path):
    for name in ("checkpoint-10", "checkpoint-5", "an_adapter"):
        write(tmp_path / "eval" / name, {"the policy's files": name}, d=[1, 2, 3])
    write(tmp_path / "eval/base", d=[1, 1, 1])
    tables, others = compared(tmp_path)
    names = [folder.rpartition("/")[2] for folder in tables["d"]["results"]]
    assert names == ["base", "an_adapter", "checkpoint-5", "checkpoint-10"] and not others
    (selection,) = tables["d"]["selections"]
    assert selection["last"].endswith("checkpoint-10")


def test_a_model_whose_weights_were_all_trained_is_compared_with_its_base(tmp_path):
    """It is its own base. Adapters on two bases are not compared."""
    trained, other = (
        {name: "t" for name in SETTINGS if "files" in name},
        {"the base's files": "o"},
    )
    write(tmp_path / "eval/base", d=[1, 1, 1])
    write(tmp_path / "eval/full", trained, d=[1, 2, 3])
    write(tmp_path / "eval/step_000005", other, d=[1, 2, 3])
    tables, (line,) = compared(tmp_path)
    assert len(tables["d"]["results"]) == 2 and "step_000005" in line and "base's files" in line


def test_a_folder_without_results_or_with_those_of_an_older_program_is_refused(tmp_path, capsys):
    refused(capsys, compare.main, [tmp_path], str(tmp_path), "eval.py")
    files.write_json(tmp_path / "m/settings.json", {"seed": 0})
    files.write_json(tmp_path / "m/results.json", {"d": {"avg": 0.5}})
    refused(capsys, compare.main, [tmp_path], "results.json", "eval.py")


@pytest.mark.long  # two programs that import torch
@pytest.mark.parametrize("name", ["compare", "report"])
def test_the_programs_of_extras_start_by_their_path(name, tmp_path):
    """From any directory, as `python -m` from the project's."""
    command = [sys.executable, ROOT / f"extras/{name}.py", "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("sgsd"), done.stderr
