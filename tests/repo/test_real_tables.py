"""What experiments/real_tables.py computes, by hand; and that its page shows what it prints."""

import json
import shutil
import sys

import pytest
import real_tables


def sample(id_, k, r, tokens=10, pred="1"):
    row = {"set": "test", "id": id_, "sample": k, "r": r, "pred": pred, "truncated": pred is None}
    return row | {"tokens": tokens, "gold": "1", "text": f"{id_} {k} {r}"}


def test_a_test_by_hand():
    rows = [
        sample("b", 1, 1),
        sample("a", 0, 1, 20),
        sample("b", 0, -1, 30, None),
        sample("a", 1, 1),
    ]
    rows.append(sample("a", 2, -1))  # of one problem alone: left out
    kept = real_tables.score(rows)
    assert kept == {"right": "1101", "samples": 2, "boxed": 0.75, "cut": 0.25, "tokens": 17.5}
    assert real_tables.share(kept).tolist() == [1.0, 0.5]


def rollout(step, r, a, rho, tokens=4):
    return {"step": step, "r": r, "a": a, "rho": rho, "truncated": False} | {
        "completion_ids": [1] * tokens,
        "credit_sq": 4.0 * bool(a),
        "credit_sq_with_verdict": 3.0 * bool(a),
    }


def test_blocks_of_a_run_by_hand():
    rolls = [
        rollout(1, 1, [0.25, -0.5], [1, -1]),
        rollout(2, -1, [-0.5, -0.25], [1, 0]),
        rollout(6, -1, [], [], 9),
    ]
    metrics = []
    for step in (1, 2, 6):
        metrics.append({"step": step} | {f"seconds.{part}": 2.0 for part in real_tables.PARTS})
    first, second = real_tables.training(rolls, metrics)
    assert first["success"] == {"mean": -0.125, "above": 1, "teachers": 2}
    assert first["failure"] == {"mean": -0.375, "above": 0, "teachers": 2}
    assert [first[fate] for fate in real_tables.FATES] == [2, 1, 1]
    assert (first["steps"], first["right"], first["tokens"], first["gen"]) == (2, 1, 8, 4.0)
    assert (first["credit_with_verdict"], second["credit_with_verdict"]) == (0.75, None)
    assert second["failure"] == {"mean": None, "above": 0, "teachers": 0}
    *_, row = real_tables.runs({"runs": {"sgsd": {"blocks": [first]}}})
    assert row.startswith(
        "| sgsd | 1 to 2 | 1 of 2 | 0 | 4 | -0.1250 | 1 of 2 | -0.3750 | 0 of 2 |"
    )
    assert row.endswith("| 2, 1, 1 | 0.75 | 2, 2, 2 |")


def test_differences_are_paired_and_only_of_like_steps():
    test = {"samples": 2, "boxed": 1.0, "cut": 0.0, "tokens": 10.0}
    kept = {
        "base": test | {"right": "0011"},
        "grpo, step 2": test | {"right": "1111"},
        "sgsd, step 2": test | {"right": "0111"},
        "sgsd, step 4": test | {"right": "0111"},
    }
    _head, _line, base, grpo, _half, last = real_tables.tests({"tests": kept})
    assert base == "| base | 50.0% (0.0% to 100.0%) |  |  | 100.0% | 0.0% | 10 |"
    assert "| +50.0% (+0.0% to +100.0%) | +25.0% (+0.0% to +50.0%) |" in grpo
    assert "| +25.0% (+0.0% to +50.0%) |  |" in last


def test_a_folder_is_taken_in_and_its_changes_are_shown(tmp_path, monkeypatch, make_folder):
    monkeypatch.setattr(real_tables, "KEPT", tmp_path / "kept.json")
    real_tables.add(make_folder)
    real_tables.add(make_folder)
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert set(kept["tests"]) == {"base", "grpo, step 20"} and set(kept["runs"]) == {"grpo"}
    assert "entries" not in kept["runs"]["grpo"]
    real_tables.picture(kept, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").exists()
    text = "\n".join(real_tables.solutions(make_folder, "grpo"))
    assert "grpo, won: b, answer 1" in text and "b 0 -1" in text and "b 0 1" in text
    assert "grpo, lost: a" in text


@pytest.fixture
def make_folder(tmp_path):
    """A folder of experiments/real_world.py, as far as the tables look at it."""
    outcomes = {"folder--model": {"a": 1, "b": -1}, "grpo_1e-4--step_000020": {"a": -1, "b": 1}}
    for name, problems in outcomes.items():
        place = tmp_path / "folder/eval" / name
        place.mkdir(parents=True)
        rows = [sample(id_, k, r) for id_, r in problems.items() for k in range(2)]
        (place / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (place / "results.json").touch()
    unfinished = tmp_path / "folder/eval/grpo_1e-4--step_000010"
    unfinished.mkdir()
    (unfinished / "samples.jsonl").write_text(json.dumps(sample("a", 0, 1)) + "\n")
    run = tmp_path / "folder/runs/grpo_1e-4"
    run.mkdir(parents=True)
    (run / "rollouts.jsonl").write_text(json.dumps(rollout(1, 1, [], [])) + "\n")
    seconds = {f"seconds.{part}": 1.0 for part in real_tables.PARTS}
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1} | seconds) + "\n")
    (run / "config.json").write_text(json.dumps({"settings": {"updates": 1}}))
    for name in ("sgsd", "consistent"):  # broken off in their second and in their first step
        broken_off = shutil.copytree(run, run.with_name(f"{name}_1e-4"))
        (broken_off / "config.json").write_text(json.dumps({"settings": {"updates": 2}}))
    (broken_off / "metrics.jsonl").unlink()
    return tmp_path / "folder"


def test_the_page_shows_what_the_command_prints(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["real_tables.py"])
    real_tables.main()
    page = (real_tables.ROOT / "results" / "real_learning.md").read_text()
    for table in capsys.readouterr().out.strip().split("\n\n"):
        assert table in page
