"""The comparison of methods: its arithmetic by hand, and its command in small."""

import contextlib
import dataclasses
import json
import shutil

import compare
import pytest
from conftest import ROOT

import baselines
import sgsd

TINY = ROOT / "tiny"


def test_the_area_under_a_curve_and_its_value_between_two_points():
    points = {0: 0.0, 5: 0.5, 20: 1.0}
    # (0 + .5) / 2 * 5 = 1.25 and (.5 + 1) / 2 * 15 = 11.25, over 20 steps
    assert compare.area(points) == pytest.approx(12.5 / 20)
    assert compare.value_at([0, 5, 20], [0.0, 0.5, 1.0], 8) == pytest.approx(0.6)
    with pytest.raises(ValueError, match=r"21 is outside 0..20"):
        compare.value_at([0, 5, 20], [0.0, 0.5, 1.0], 21)


def test_intervals_are_over_seeds():
    # mean .5, standard deviation .1, three seeds: 4.30 * .1 / sqrt(3) = .248
    assert compare.with_interval([0.4, 0.5, 0.6], "+") == "+50.0% ± 24.8%"


def test_a_run_that_a_signal_stopped_is_not_done(tmp_path, monkeypatch):
    monkeypatch.setattr(sgsd, "main", lambda argv: 0)  # "stopped as asked" is no error
    job = compare.training("tiny", "sgsd-0", "sgsd", 1e-3, 0, points=True)
    with pytest.raises(RuntimeError, match="stopped by a signal"):
        compare.train(job, compare.WORLDS["tiny"], tmp_path / "bank.json", tmp_path / "run")
    assert not (tmp_path / "run/cost.json").exists()


@pytest.mark.parametrize("world", ["tiny", "lock"])
@pytest.mark.parametrize("name", compare.METHODS)
def test_a_bank_evolves_in_the_rows_of_sgsd_alone(name, world, tmp_path, monkeypatch):
    asked = []
    for program in (sgsd, baselines):
        monkeypatch.setattr(program, "main", asked.append)
    w, job = compare.WORLDS[world], compare.training(world, "x", name, 1e-3, 0, points=True)
    with contextlib.suppress(RuntimeError):  # nothing was trained
        compare.train(job, w, tmp_path / "bank.json", tmp_path / "run")
    cfg, _ = baselines.parse([str(word) for word in asked[0]])
    wanted = w.other if name == "sgsd, other bank" else w.evolve
    assert cfg.update_every == (wanted if cfg.method == "sgsd" else 0) or not cfg.sees_skills


def test_a_flag_that_would_be_ignored_is_refused():
    with pytest.raises(SystemExit):
        compare.main(["--sweep", "--world", "lock"])


@pytest.mark.long
def test_the_command_from_the_banks_to_the_table(tmp_path, capsys):
    """Two steps and two seeds, then once more."""
    folder = tmp_path / "world"
    shutil.copytree(TINY / "model", folder / "model")
    for name, count in (("train", 50), ("valid", 6), ("test", 10)):
        lines = (TINY / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (folder / f"{name}.jsonl").write_text("".join(lines[:count]))
    small = dataclasses.replace(
        compare.WORLDS["tiny"],
        folder=str(folder),
        flags="--preset tiny --eval-data= --cold-start 8 --num-teachers 2",
        points=(1, 2),
        trial=1,
        rates=(1e-3,),
        batch=8,
        grpo_batch=1,
        samples=1,
        skills=2,
    )
    names = ["no polarity", "grpo", "sgsd, other bank"]
    command = ["--seeds", "2", "--jobs", "1", "--work", f"{tmp_path}/work"]
    command += ["--out", f"{tmp_path}/table", "--methods", *names]
    compare.main(command, {"tiny": small})
    first = {path: path.stat().st_mtime_ns for path in (tmp_path / "work/done").iterdir()}
    out = capsys.readouterr().out
    for name in names:
        assert f"| {name} | 0.001 | " in out
    found = json.loads((tmp_path / "table.json").read_text())["results"]
    assert found["sgsd-0"]["generated_tokens"] > 0
    killed_run_goes_on(small, tmp_path)
    failed_job_costs_no_other(small, tmp_path / "other")
    compare.main(command, {"tiny": small})
    again = {path: path.stat().st_mtime_ns for path in (tmp_path / "work/done").iterdir()}
    assert again == first  # what is done is not made again


def killed_run_goes_on(w, tmp_path):
    """A run that lost its last step, and its costs with it, comes to the same figures."""
    job = compare.training("tiny", "sgsd-0", "sgsd", 1e-3, 0, points=True)
    bank, out = tmp_path / "work/bank_made_0.json", tmp_path / "killed"
    whole = compare.train(job, w, bank, out)
    shutil.rmtree(out / "checkpoints" / "step_000002")
    (out / "cost.json").unlink()
    again = compare.train(job, w, bank, out)
    assert again["generated_at"] == whole["generated_at"]
    assert again["forward_tokens"] == pytest.approx(whole["forward_tokens"], rel=0.2)


def failed_job_costs_no_other(w, work):
    jobs = []
    for name, split in (("base-1", "nosuch"), ("base-2", "test")):
        job = {"world": "tiny", "name": name, "kind": "base", "method": "base"}
        jobs.append({**job, "seed": 1, "split": split})
    with pytest.raises(RuntimeError, match="nosuch"):
        compare.do(jobs, w, work, 2, "two jobs")
    assert [file.name for file in (work / "done").iterdir()] == ["base-2.json"]
