"""avg@k, pass@k and maj@k by hand; an evaluation that is killed goes on; two processes give one's samples."""

import json
import os
import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest
from conftest import ROOT

import eval as E


def test_avg_by_hand():
    assert E.avg_at_k(np.array([[1, 0, 0, 1], [0, 0, 0, 1]], dtype=bool)) == 3 / 8


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_pass_is_the_mean_over_all_subsets(k):
    correct = np.array([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]], dtype=bool)
    want = np.mean([np.mean([any(row[list(s)]) for s in combinations(range(5), k)]) for row in correct])
    assert E.pass_at_k(correct, k) == pytest.approx(want)


def test_maj_by_hand():
    def same(gold, pred):
        return pred is not None and float(gold) == float(pred)

    preds = [["1", "2.0", "2"], [None, None, "3"], ["5", "6", None], [None, None, None]]
    assert E.maj_at_k(preds, ["2", "3", "5", "7"], same) == 3 / 4  # 2 by two votes, 3 by one, 5 came first, nobody voted
    assert E.maj_at_k([["1", "2", "2"]], ["1"], same) == 0


def test_bad_metric_input():
    for bad in (np.zeros((0, 3)), np.zeros(3), np.zeros((2, 0))):
        with pytest.raises(ValueError, match="correct_PK must be"):
            E.avg_at_k(bad)
    with pytest.raises(ValueError, match=r"pass_at_k: got k = 4, must be in 1..3"):
        E.pass_at_k(np.ones((2, 3)), 4)
    with pytest.raises(ValueError, match="maj_at_k: got 1 rows"):
        E.maj_at_k([["1"]], ["1", "2"], lambda g, p: True)


def test_interval_covers_its_mean_and_narrows():
    rng = np.random.default_rng(1)
    scores = rng.random(200)
    low, high = E.bootstrap_interval(scores)
    assert low < scores.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * scores.std() / 200**0.5, rel=0.1)  # the normal interval


def args(world_dir, out, *more):
    return [str(world_dir / "model"), "--data", str(world_dir / "data.jsonl"), "--samples", "3", "--max-new-tokens", "8", "--rows", "5",
            "--out", str(out), "--device", "cpu", *more]  # fmt: skip


def samples(out):
    return sorted((json.loads(x) for x in open(out / "samples.jsonl")), key=lambda s: (s["id"], s["sample"]))


def test_a_killed_evaluation_goes_on(world_dir, tmp_path, capsys):
    assert E.main(args(world_dir, tmp_path / "a")) == 0
    assert "| data | 12 | 0.0% |" in capsys.readouterr().out
    whole = samples(tmp_path / "a")
    assert len(whole) == 36 and len({tuple(s["text"]) for s in whole}) > 30
    (tmp_path / "b").mkdir()
    lines = (tmp_path / "a/samples.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "b/samples.jsonl").write_text("".join(lines[:13]) + lines[13][:40])  # torn by a kill
    (tmp_path / "b/settings.json").write_text((tmp_path / "a/settings.json").read_text())
    assert E.main(args(world_dir, tmp_path / "b")) == 0
    assert samples(tmp_path / "b") == whole
    assert (tmp_path / "a/results.json").read_bytes() == (tmp_path / "b/results.json").read_bytes()
    assert E.main(args(world_dir, tmp_path / "b", "--temperature", "0.5")) == 2
    assert "other settings" in capsys.readouterr().err


def test_two_processes_give_the_samples_of_one(world_dir, tmp_path):
    assert E.main(args(world_dir, tmp_path / "1")) == 0
    run = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", ROOT / "eval.py",
                          *args(world_dir, tmp_path / "2")], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=150)  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    assert samples(tmp_path / "1") == samples(tmp_path / "2")
    assert (tmp_path / "1/results.json").read_bytes() == (tmp_path / "2/results.json").read_bytes()


def test_only_some_problems(world_dir, tmp_path):
    assert E.main(args(world_dir, tmp_path, "--limit", "2")) == 0
    assert len(samples(tmp_path)) == 6 and json.loads((tmp_path / "results.json").read_text())["results"]["data"]["problems"] == 2


def test_a_problem_that_changed_is_sampled_anew(world_dir, tmp_path):
    data = tmp_path / "d.jsonl"
    for answer in ("3", "4"):
        data.write_text(json.dumps({"problem": "What is 1 plus 2?", "answer": answer}) + "\n")
        assert E.main([str(world_dir / "model"), "--data", str(data), "--samples", "1", "--max-new-tokens", "4", "--out", str(tmp_path / "o")]) == 0
        assert [s["gold"] for s in samples(tmp_path / "o")] == [answer]
