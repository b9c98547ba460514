"""Eqs. 4 and 5: log-probabilities of the student's tokens, under its prompt and the teachers'.

The reference is the definition in tests/plain.py: one row, the model's own logits over the full
vocabulary (Tab. 12), log_softmax. How a rollout's loss uses them is in test_step.py.
"""

import itertools

import pytest
import torch
from conftest import make_model
from plain import logprobs_of_ids
from torch.utils._python_dispatch import TorchDispatchMode

import scoring

PROMPTS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16]]
COMPLETIONS = [[20, 21, 22], [23, 24, 25, 26, 27, 28], [29]]
kinds = pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma2", "gemma3_text", "qwen3_5_text"])


def close(x, want, tol=2e-5):
    torch.testing.assert_close(x, want, atol=tol, rtol=tol)


def gradients(model, loss):
    return torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])


@kinds
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_eq5_rows_and_gradients_equal_the_definition(kind, temperature):
    """Gemma 2 caps its logits, so we take its own; the heads of the others run on slices."""
    model = make_model(kind)
    assert scoring.has_plain_head(model) == (kind != "gemma2")
    logp_BT = scoring.token_logprobs(
        model, PROMPTS, COMPLETIONS, grad=True, temperature=temperature
    )
    assert logp_BT.dtype == torch.float32 and logp_BT.shape == (3, 6)
    total = 0.0
    for logp_T, prompt, completion in zip(logp_BT, PROMPTS, COMPLETIONS):
        want_T = logprobs_of_ids(model, prompt, completion, temperature)
        close(logp_T[: len(completion)], want_T)
        assert not logp_T[len(completion) :].any()
        total = total + want_T.sum()
    for grad, want in zip(gradients(model, logp_BT.sum()), gradients(model, total)):
        close(grad, want, 1e-4)


def test_a_shift_by_one_is_seen():
    """The comparison above is sharp: log-probabilities read one place late are far off."""
    model, prompt, ids_T = make_model(), PROMPTS[0], COMPLETIONS[1]
    logp_T = scoring.token_logprobs(model, [prompt], [ids_T])[0]
    late_T = logprobs_of_ids(model, prompt + ids_T[:1], ids_T[1:])
    close(logp_T[1:], late_T)
    assert (logp_T[:-1] - late_T).abs().max() > 0.1


@kinds
@pytest.mark.parametrize("budget", [1, 30, 10_000])
def test_eq4_stacked_teachers_equal_one_by_one_whatever_the_budget(kind, budget):
    """And they carry no gradient."""
    model, ids_T = make_model(kind), [30, 31, 32, 33]
    logpT_KT = scoring.score_teachers(model, PROMPTS, ids_T, budget)
    want_KT = torch.stack([logprobs_of_ids(model, context, ids_T) for context in PROMPTS])
    close(logpT_KT, want_KT.detach())
    assert not logpT_KT.requires_grad and want_KT.requires_grad
    assert scoring.score_teachers(model, [], ids_T).shape == (0, 4)


@kinds
def test_the_null_teacher_has_no_gap(kind):
    """A teacher whose context is the student's prompt is the student: Delta = 0 (D6)."""
    model, ids_T = make_model(kind), [30, 31, 32, 33, 34]
    student_T = scoring.token_logprobs(model, [PROMPTS[1]], [ids_T], grad=True)[0]
    gap_KT = scoring.score_teachers(model, PROMPTS, ids_T) - student_T.detach()
    assert gap_KT[1].abs().max() < 1e-5
    assert gap_KT[::2].abs().max() > 1e-2


def test_packs_hold_their_budget_and_lose_no_row():
    lengths = [5, 100, 7, 30, 31, 2, 64]
    groups = scoring.packs(lengths, 64)
    assert sorted(itertools.chain(*groups)) == list(range(7))
    for group in groups:
        assert len(group) == 1 or max(lengths[i] for i in group) * len(group) <= 64


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation gives."""

    numel = 0

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_whole_logits_are_never_alive_and_slices_change_nothing():
    """900 positions over 40,000 tokens, forward and backward, and three stacked teachers."""
    model = make_model(vocab=40_000)
    ids_T = torch.randint(40_000, (900,), generator=torch.Generator().manual_seed(0)).tolist()
    with Largest() as largest:
        logp_T = scoring.token_logprobs(model, [PROMPTS[0]], [ids_T], grad=True)[0]
        grads = gradients(model, logp_T.sum())
        scoring.score_teachers(model, PROMPTS, ids_T[:300])
    assert largest.numel <= scoring.SLICE_LOGITS["cpu"] < 900 * 40_000
    want_T = logprobs_of_ids(model, PROMPTS[0], ids_T)
    close(logp_T, want_T)
    for grad, want in zip(grads, gradients(model, want_T.sum())):
        assert (grad - want).norm() <= 1e-5 * want.norm()


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NO_GPU)])
def test_a_bf16_head_is_exact(device):
    """Against its numbers in fp64; on CUDA the product is made in TF32 (S22)."""
    model = make_model(vocab=1000, hidden_size=128).bfloat16().to(device)
    x_ND = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    ids_N, matmul = torch.arange(64, device=device), torch.backends.cuda.matmul
    precision = matmul.fp32_precision
    logp_N = scoring.over_slices(model, [x_ND], ids_N, scoring.logprob_of)
    want_NV = (x_ND.double() @ model.lm_head.weight.double().T).log_softmax(-1)
    assert logp_N.dtype == torch.float32 and matmul.fp32_precision == precision
    assert (logp_N - want_NV[range(64), range(64)]).abs().max() < 1e-4
