"""Each mode of bench.py runs at a minimal shape, and what it compares computes the same."""

import re

import bench
import pytest
import torch

MODES = {
    "cost": ["NOT a measured run", "| Qwen3-1.7B | decoding | ", "| Qwen3-8B | an evaluation | "],
    "score": ["| ours | ", "| replicated | ", "teacher forwards alone"],
    "rollout": ["generate, same draws", "| 12 of 12 |"],
    "eval": ["24 of 24", "ties: 0 of 24 samples"],
    "step": [
        "| rollout | ",
        "| verification | ",
        "| scoring | ",
        "| backward | ",
        "| a step | ",
    ],
    "memory": ["| 8 | ", "| 16384 | ", "Qwen3-8B", "fits one 80 GB card"],
    "scaling": ["| K | 1: ", "| T | ", "| bank entries | 100: ", "| ranks "],
}
LONG = {"scaling"}  # starts torchrun
PARAMS = [pytest.param(m, marks=pytest.mark.long) if m in LONG else m for m in MODES]


@pytest.mark.parametrize("mode", PARAMS)
def test_the_mode_prints_its_tables(mode, capsys):
    bench.main([mode, "--shape", "tiny", "--repeats", "1", "--one-process"])
    out = capsys.readouterr().out
    for part in ("torch", "commit", *MODES[mode]):
        assert part in out
    assert not re.search(r"same draws.* (\d+) of (?!\1)", out)  # the static batches draw as we do


def test_the_layouts_that_are_compared_have_the_same_loss():
    s, cpu = bench.SHAPES["tiny"], torch.device("cpu")
    model = bench.scoring_model(s, cpu)
    losses = [bench.score_once(model, layout, s.T) for layout in bench.LAYOUTS]
    assert losses[0] != 0 and losses == pytest.approx([losses[0]] * 3, rel=1e-4)


def test_a_mode_whose_package_is_missing_is_skipped(capsys):
    def wants_it(*_):
        __import__("no_such_package")

    bench.main(["verify"], {"verify": wants_it})
    assert capsys.readouterr().out.strip() == "verify: skipped, no_such_package is not installed"


def test_all_goes_on_after_a_failure_and_rows_are_out_before_it(capsys):
    def breaks(*_):
        bench.table("t", torch.device("cpu"), "a | b", ((n, 1 / n) for n in (1, 0)))

    def runs(*_):
        print("memory ran")

    with pytest.raises(SystemExit, match="1 of 2 modes failed"):
        bench.main(["all"], {"score": breaks, "memory": runs})
    out = capsys.readouterr().out
    places = [out.index(x) for x in ("| 1 | 1.0 |", "failed", "ZeroDivisionError", "memory ran")]
    assert places == sorted(places)
    with pytest.raises(ZeroDivisionError):
        bench.main(["score"], {"score": breaks})


def test_the_cost_sheet_by_hand():
    """Qwen3-1.7B. A layer has 2*2048*2048 (q, o) + 2*2048*1024 (k, v) + 3*2048*6144 (MLP) =
    50,331,648 weights, 28 layers have 1,409,286,144. Adapters of rank 64:
    28 * 64 * (2*4096 + 2*3072 + 3*8192) = 69,730,304. Head: 151,936 * 2048 = 311,164,928.
    Read per step: 2 * (1,409,286,144 + 311,164,928) + 4 * 69,730,304 = 3,719,823,360 bytes.
    Cache: 4 * 28 * 1024 = 114,688 bytes per token."""
    c = bench.QWEN3["Qwen3-1.7B"]
    assert (c.projections, c.adapters, c.weights) == (1_409_286_144, 69_730_304, 3_719_823_360)
    parts = bench.paper_costs(c)
    layers, head = 1_479_016_448, 311_164_928  # weights, the layers with their adapters
    looking_back = 2 * 28 * 2048  # FLOPs of attention, times the tokens squared
    seen = 200 * 1024 + 1024 * 1024 / 2  # by a row of 1,024 tokens behind a prompt of 200
    decoding = 2 * (layers + head) * 1024 + looking_back * (1224**2 - 200**2)
    assert parts["decoding"] == (4 * decoding, 1024 * 3_719_823_360 + 4 * 114_688 * seen)
    teacher = 2 * layers * 1424 + looking_back * 1424**2 + 2 * head * 1024
    assert parts["teachers"][0] == 4 * 8 * teacher
    forward = 2 * layers * 1224 + looking_back * 1224**2 + 2 * head * 1024
    assert parts["student, forward"][0] == 4 * forward
    backward = 2 * forward + looking_back * 1224**2 + 2 * 69_730_304 * 1224
    assert parts["student, backward"][0] == 4 * backward
    seen = 200 * 38_912 + 38_912**2 / 2
    read = 9 * 38_912 * 3_719_823_360  # 135 samples, 16 at a time: 9 rounds
    assert parts["an evaluation"][1] == read + 135 * 114_688 * seen


@pytest.mark.parametrize("name, met", [("1.7B", 1.72e9), ("4B", 4.02e9), ("8B", 7.57e9)])
def test_the_models_have_about_the_weights_that_their_names_say(name, met):
    """met: the weights that a token meets; without 8B's own embedding."""
    c = bench.QWEN3[f"Qwen3-{name}"]
    assert c.projections + c.vocab * c.width == pytest.approx(met, rel=0.01)
