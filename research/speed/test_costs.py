"""The arithmetic of the cost sheet, by hand.

python -m pytest research/speed
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from research.speed import bench


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
    sampling, learning = bench.grpo_parts(c, 8, 1024)  # 32 * 8 / 8 rollouts, 16 at a time
    assert (sampling.flops, sampling.steps) == (32 * decoding, 2 * 1024)
    assert learning.flops == 32 * (forward + backward)


def test_the_cache_of_a_hybrid_by_hand():
    """Qwen3.5-9B: 8 layers keep K and V of 4 heads of 256 in bf16. 24 layers keep 32 fp32 states of
    128 x 128, and 4 places of 2 * 16 + 32 heads of 128 in bf16: 2,097,152 + 65,536 bytes each."""
    row = bench.CACHES["Qwen3.5-9B"]
    assert (row.token, row.states) == (8 * 2 * 4 * 256 * 2, 24 * 2_162_688)
    assert bench.CACHES["Qwen3-1.7B"].token == 114_688
