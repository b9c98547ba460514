"""The GPU against the CPU, and padded rows against rows alone, on the CPU without a GPU."""

import pathlib
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from conftest import make_model

import distributed
import scoring
from lib.model import trained, with_adapters
from research.speed.bench import SHAPES, random_model
from research.speed.large import decoded, with_static_cache

DEVICE = distributed.init().device
ROWS = [list(range(1, 90)), list(range(100, 117)), [7, 8, 9, 3]]


def wide(dtype):
    """Heads as Qwen2.5-0.5B has them: 14, of which each 7 share their keys, 64 numbers each."""
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64}
    return make_model(initializer_range=0.1, hidden_size=128, **heads).to(dtype)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="compares a GPU with the CPU")
def test_log_probabilities_and_gradients_are_the_cpus():
    """With cuDNN's attention off, see distributed.py."""
    prompts, completions = [[*ROWS[0]] * 7 + [1] * 17, ROWS[1]], [[20] * 64, list(range(60))]
    by_device = []
    for device in ("cpu", DEVICE):
        model = with_adapters(wide(torch.float32).to(device), 4, 8)
        logp = scoring.token_logprobs(model, prompts, completions, grad=True)
        grads = torch.autograd.grad(logp.sum(), list(trained(model).values()))
        by_device.append([x.cpu() for x in (logp, *grads)])
    for ours, cpus in zip(*by_device, strict=True):
        torch.testing.assert_close(ours, cpus, atol=1e-3, rtol=1e-3)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_left_padded_row_has_the_logits_of_the_row_alone(dtype):
    model = wide(dtype).to(DEVICE)
    longest = max(map(len, ROWS))
    ids, mask = torch.zeros(2, len(ROWS), longest, dtype=torch.long, device=DEVICE)
    for i, row in enumerate(ROWS):
        ids[i, longest - len(row) :], mask[i, longest - len(row) :] = torch.tensor(row), 1
    places = (mask.cumsum(1) - 1).clamp(min=0)
    padded = model(input_ids=ids, attention_mask=mask, position_ids=places).logits[:, -1]
    for i, row in enumerate(ROWS):
        alone = model(input_ids=torch.tensor([row], device=DEVICE)).logits[0, -1]
        tol = 1e-3 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(padded[i], alone, atol=tol, rtol=tol)


def test_a_static_cache_samples_what_a_stream_samples():
    """On a GPU `generate` compiles for such a cache, and products in bf16 may round otherwise."""
    model = with_adapters(random_model(SHAPES["tiny"], DEVICE, vocab=1024).float(), 4, 8)
    decode = with_static_cache()
    _, ids = decoded(model, 24, 3, DEVICE)
    assert len({*map(tuple, ids)}) == 3  # each row has its own key
    for _ in range(2):  # the second call finds the first one's cache
        assert decoded(model, 24, 3, DEVICE, decode)[1] == ids
