"""Each mode of bench.py runs at a minimal shape and says what it is for; what it holds us against is what it says."""

import contextlib
import io

import bench
import pytest
import torch

import rollout as R

MODES = {
    "score": ["| ours | ", "| replicated | ", "teacher forwards alone"],
    "rollout": ["generate, same draws", "12 of 12"],
    "eval": ["24 of 24", "ties: 0 of 24 samples"],
    "step": ["| rollout | ", "| scoring | ", "| backward | ", "| optimizer | ", "| verification | ", "| an update | "],
    "memory": ["| 1024 | ", "Qwen3-8B", "fits one 80 GB card"],
    "scaling": ["| K | 1: ", "| T | ", "| bank entries | 100: ", "| bank entries, 32 problems at once | 100: ", "| ranks "],
}


def in_process(*argv, ranks=1):
    """What `own_process` does, in a second less: one rank stands for two."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        bench.main([str(x) for x in argv])
    return out.getvalue()


@pytest.mark.parametrize("mode", MODES)
def test_the_mode_prints_its_tables(mode, monkeypatch, capsys):
    monkeypatch.setattr(bench, "own_process", in_process)
    bench.main([mode, "--shape", "tiny", "--repeats", "2"])
    out = capsys.readouterr().out
    assert "torch" in out and "commit" in out and "skipped" not in out
    assert not [part for part in MODES[mode] if part not in out], out


def test_the_static_baseline_makes_our_draws():
    s = bench.SHAPES["tiny"]
    model = bench.stop_after(bench.random_model(s, torch.device("cpu"), s.decode_vocab), s.mean)
    prompts, keys, sampling = [[5, 6, 7], [8], [9, 10]], [1, 2, 3], R.Sampling(max_new_tokens=20)
    ids = bench.static(model, prompts, keys, 2, sampling, True)
    assert ids == R.generate(model, bench.NoStops, prompts, sampling, keys)
    assert ids != R.generate(model, bench.NoStops, prompts, sampling, [4, 5, 6])
    assert len({len(x) for x in ids}) > 1 and all(x[-1] % s.mean == 0 or len(x) == 20 for x in ids)


def test_a_mode_whose_package_is_missing_is_skipped(monkeypatch, capsys):
    monkeypatch.setitem(bench.MODES, "verify", lambda *_: __import__("no_such_package"))
    bench.main(["verify"])
    assert capsys.readouterr().out.strip() == "verify: skipped, no_such_package is not installed"
