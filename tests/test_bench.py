"""Each mode of bench.py runs at a minimal shape and says what it is for; what it holds us against is what it says."""

import contextlib
import io

import bench
import pytest
import torch

import rollout as R

MODES = {
    "cost": [
        "NOT a measured run",
        "| Qwen3-1.7B | decoding | ",
        "| Qwen3-8B | an evaluation | ",
        "200 updates",
    ],
    "score": ["| ours | ", "| replicated | ", "teacher forwards alone"],
    "adapters": ["| lean_adapters | ", "| PEFT's own | ", "| fp32 | "],
    "rollout": ["generate, same draws", "12 of 12"],
    "eval": ["24 of 24", "ties: 0 of 24 samples"],
    "step": [
        "| rollout | ",
        "| scoring | ",
        "| backward | ",
        "| optimizer | ",
        "| verification | ",
        "| an update | ",
    ],
    "memory": ["| 1024 | ", "Qwen3-8B", "fits one 80 GB card"],
    "scaling": [
        "| K | 1: ",
        "| T | ",
        "| bank entries, 1 problem at a time | 100: ",
        "| bank entries, 32 problems at a time | 100: ",
        "| ranks ",
    ],
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
    monkeypatch.setattr(
        R, "SLICE_LOGITS", {**R.SLICE_LOGITS}
    )  # put back what a process of its own may set
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


def test_all_goes_on_after_a_failure_and_rows_are_out_before_it(monkeypatch, capsys):
    def breaks(*_):
        bench.table("t", torch.device("cpu"), "a | b", ((n, 1 / n) for n in (1, 0)))

    monkeypatch.setattr(bench, "MODES", {"score": breaks, "memory": lambda *_: print("memory ran")})
    with pytest.raises(SystemExit, match="1 of 2 modes failed"):
        bench.main(["all", "--shape", "tiny"])
    out = capsys.readouterr().out
    assert (
        out.index("| 1 | 1.0 |")
        < out.index("score: failed")
        < out.index("ZeroDivisionError")
        < out.index("memory ran")
    )
    with pytest.raises(ZeroDivisionError):
        bench.main(["score", "--shape", "tiny"])


def test_the_cost_sheet_by_hand():
    """Qwen3-1.7B: a layer has 2*2048*2048 (q, o) + 2*2048*1024 (k, v) + 3*2048*6144 (MLP) = 50,331,648 weights, 28 have
    1,409,286,144; adapters of rank 64: 28 * 64 * (2*4096 + 2*3072 + 3*8192) = 69,730,304; head 151,936 * 2048 = 311,164,928.
    Read per step: 2 * (1,409,286,144 + 311,164,928) + 4 * 69,730,304 = 3,719,823,360 bytes; cache: 4 * 28 * 1024 = 114,688 per token."""
    c = bench.QWEN3["Qwen3-1.7B"]
    assert (c.projections, c.adapters, c.weights) == (1_409_286_144, 69_730_304, 3_719_823_360)
    parts, N, H = (
        bench.paper_costs(c),
        1_479_016_448,
        311_164_928,
    )  # of the layers with adapters, of the head
    seen = (
        200 * 1024 + 1024 * 1024 / 2
    )  # cached tokens that a row of 1,024 reads behind a prompt of 200
    assert parts["decoding"] == (
        4 * (2 * (N + H) * 1024 + 2 * 28 * 2048 * (1224**2 - 200**2)),
        1024 * 3_719_823_360 + 4 * 114_688 * seen,
    )
    assert parts["teachers"][0] == 4 * 8 * (2 * N * 1424 + 2 * 28 * 2048 * 1424**2 + 2 * H * 1024)
    forward = 2 * N * 1224 + 2 * 28 * 2048 * 1224**2 + 2 * H * 1024
    assert parts["student, forward"][0] == 4 * forward
    assert parts["student, backward"][0] == 4 * (
        2 * forward + 2 * 28 * 2048 * 1224**2 + 2 * 69_730_304 * 1224
    )
    assert parts["an evaluation"][1] == 9 * 38_912 * 3_719_823_360 + 135 * 114_688 * (
        200 * 38_912 + 38_912**2 / 2
    )  # 135 samples, 16 at a time: 9 rounds
    real = {
        "Qwen3-1.7B": 1.72e9,
        "Qwen3-4B": 4.02e9,
        "Qwen3-8B": 7.57e9,
    }  # weights that a token meets: without 8B's own embedding
    assert all(
        bench.QWEN3[name].projections + bench.QWEN3[name].vocab * bench.QWEN3[name].width
        == pytest.approx(n, rel=0.01)
        for name, n in real.items()
    )
