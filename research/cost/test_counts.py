"""The arithmetic of the costs, by hand, and the turns of a stream beside a real one.

python -m pytest research/cost
"""

import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests"))

from conftest import ROOT, watched
from driver import rows

import rollout
import skills
from lib import model
from research.cost import hours
from research.cost.counts import QWEN3


def test_a_step_of_qwen3_1_7b_by_hand():
    """A layer has 2*2048*2048 (q, o) + 2*2048*1024 (k, v) + 3*2048*6144 (MLP) = 50,331,648 weights,
    28 layers have 1,409,286,144. Adapters of rank 64: 28 * 64 * (2*4096 + 2*3072 + 3*8192) =
    69,730,304. Head: 151,936 * 2048 = 311,164,928. Read per step: 2 * (1,409,286,144 + 311,164,928)
    + 4 * 69,730,304 = 3,719,823,360 bytes. Cache: 4 * 28 * 1024 = 114,688 bytes per token."""
    c = QWEN3["Qwen3-1.7B"]
    assert (c.projections, c.adapters, c.weights) == (1_409_286_144, 69_730_304, 3_719_823_360)
    layers, head = 1_479_016_448, 311_164_928  # weights, the layers with their adapters
    looking_back = 2 * 28 * 2048  # FLOPs of attention, times the tokens squared
    seen = 200 * 1024 + 1024 * 1024 / 2  # by a row of 1,024 tokens behind a prompt of 200
    decoding = 2 * (layers + head) * 1024 + looking_back * (1224**2 - 200**2)
    moved = 1024 * 3_719_823_360 + 4 * 114_688 * seen
    assert c.decoding(200, 1024, rows=4, steps=1024) == (4 * decoding, moved)
    forward = 2 * layers * 1224 + looking_back * 1224**2 + 2 * head * 1024
    assert c.forward(1224, 1024) == forward
    backward = 2 * forward + looking_back * 1224**2 + 2 * 69_730_304 * 1224
    assert c.backward(1224, 1024) == backward


def test_the_assumed_lengths_have_their_mean_and_their_share_that_is_cut():
    lengths = hours.log_normal(10_000, 1_000_000)
    assert abs(statistics.mean(lengths) - 16_000) < 50
    assert sum(length > 38_912 for length in lengths) == 400


def test_the_turns_are_those_of_a_real_stream():
    """The tiny model's solutions, of 26 to 45 tokens. Four rows fit, three when they have grown."""
    lm, tokenizer = model.load_model(str(ROOT / "tiny/model"), "cpu")
    prompts = []
    for row in rows(ROOT / "tiny/test.jsonl")[:20]:
        text = skills.render_student(row["problem"])
        prompts.append(rollout.chat_ids(tokenizer, text, thinking="closed"))
    sampling = rollout.Sampling(max_new_tokens=96)
    completions = rollout.generate(lm, tokenizer, prompts, sampling, range(20))
    places = 4 * (max(map(len, prompts)) + 128 + 20)
    with watched(lm) as passes:
        jobs = [rollout.Job(i, prompt, key=i, limit=96) for i, prompt in enumerate(prompts)]
        for _ in rollout.stream(lm, tokenizer, jobs, sampling, 6, places):
            pass
    want = []
    lengths = [hours.Row(len(p), len(ids), 96) for p, ids in zip(prompts, completions)]
    turns = [*hours.turns(lengths, 6, places, turn=16)]
    for turn in turns:
        want += [*turn.packs, *[(turn.rows, 1)] * turn.steps]
    assert passes[1:] == want  # the first pass measures
    read = sum(count for turn in turns for count, _ in turn.packs)
    assert read > 20 and {turn.rows for turn in turns} >= {3, 4}
