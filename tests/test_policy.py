"""The policy: scored log-probabilities, masked ids, stop ids, and the chat template's date."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import make_model, make_tokenizer
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma3Config, GenerationConfig

import policy
import sgsd

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing")  # renamed in 5.20
PROMPTS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16]]
COMPLETIONS = [[20, 21, 22], [23, 24, 25, 26, 27, 28], [29]]


def close(got, want, tol=2e-5):
    torch.testing.assert_close(got, want, atol=tol, rtol=tol)


def by_hand(model, prompt, completion, temperature=1.0):
    """The definition: one row, the model's own full logits, log_softmax."""
    logits_LV = model(input_ids=torch.tensor([prompt + completion])).logits[0].float()
    logp_TV = (logits_LV[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    return logp_TV[range(len(completion)), completion]


def gradients(model, loss):
    return torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma2"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rows_and_gradients_equal_the_definition(kind, temperature):
    """Gemma 2 caps its logits, so that its own are taken; the others' head runs on slices."""
    model = make_model(kind)
    assert policy.head_is_sliced(model) == (kind != "gemma2")
    args = model, PROMPTS, COMPLETIONS
    got_BT = policy.token_logprobs(*args, grad=True, temperature=temperature)
    assert got_BT.dtype == torch.float32 and got_BT.shape == (3, 6)
    total = 0.0
    for got_T, prompt, completion in zip(got_BT, PROMPTS, COMPLETIONS):
        want_T = by_hand(model, prompt, completion, temperature)
        close(got_T[: len(completion)], want_T)
        assert not got_T[len(completion) :].any()
        total = total + want_T.sum()
    for got, want in zip(gradients(model, got_BT.sum()), gradients(model, total)):
        close(got, want, 1e-4)
    assert not policy.token_logprobs(*args).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_capped_head_is_noticed_in_either_dtype(dtype):
    """Logits near the cap, as a trained Gemma has them."""
    for kind in ("gemma2", "qwen3"):
        model = make_model(kind, initializer_range=0.6).to(dtype)
        assert policy.head_is_sliced(model) == (kind == "qwen3")


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation gives."""

    numel = 0

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_whole_logits_are_never_alive_and_slices_change_nothing():
    """1,300 positions over 40,000 tokens, forward and backward, and three stacked teachers."""
    model = make_model(vocab=40_000)
    ids_T = torch.randint(40_000, (1300,), generator=torch.Generator().manual_seed(0)).tolist()
    with Largest() as largest:
        got_T = policy.token_logprobs(model, [PROMPTS[0]], [ids_T], grad=True)[0]
        got = gradients(model, got_T.sum())
        policy.score_teachers(model, PROMPTS, ids_T[:600])
    assert largest.numel <= policy.SLICE_LOGITS["cpu"] < 1300 * 40_000 < 3 * 600 * 40_000
    want_T = by_hand(model, PROMPTS[0], ids_T)
    close(got_T, want_T)
    for a, b in zip(got, gradients(model, want_T.sum())):
        assert (a - b).norm() <= 1e-5 * b.norm()


@pytest.mark.parametrize("budget", [1, 30, 10_000])
def test_stacked_teachers_equal_one_by_one_whatever_the_budget(budget):
    model, ids_T = make_model(), [30, 31, 32, 33]
    logpT_KT = policy.score_teachers(model, PROMPTS, ids_T, budget)
    want_KT = torch.stack([by_hand(model, context, ids_T) for context in PROMPTS])
    close(logpT_KT, want_KT.detach())
    assert policy.score_teachers(model, [], ids_T).shape == (0, 4)


def test_packs_hold_their_budget_and_lose_no_row():
    lengths = [5, 100, 7, 30, 31, 2, 64]
    groups = policy.packs(lengths, 64)
    assert sorted(itertools.chain(*groups)) == list(range(7))
    for group in groups:
        assert len(group) == 1 or max(lengths[i] for i in group) * len(group) <= 64


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_the_null_teacher_has_no_gap(kind):
    """A teacher whose context is the student's prompt is the student: Delta = 0 (D6)."""
    model, ids_T = make_model(kind), [30, 31, 32, 33, 34]
    student_T = policy.token_logprobs(model, [PROMPTS[1]], [ids_T], grad=True)[0]
    gap_KT = sgsd.log_prob_gap(policy.score_teachers(model, PROMPTS, ids_T), student_T)
    assert gap_KT[1].abs().max() < 1e-5
    assert gap_KT[::2].abs().max() > 1e-2


def test_a_shift_by_one_is_seen():
    """The comparisons above are sharp: log-probabilities read one place late are far off."""
    model, prompt, ids_T = make_model(), PROMPTS[0], COMPLETIONS[1]
    got_T = policy.token_logprobs(model, [prompt], [ids_T])[0]
    late_T = by_hand(model, prompt + ids_T[:1], ids_T[1:])
    close(got_T[1:], late_T)
    assert (got_T[:-1] - late_T).abs().max() > 0.1


def test_checkpointed_layers_change_no_gradient_and_the_mode_is_put_back():
    model, found = make_model(), []
    for _ in range(2):
        logp_BT = policy.token_logprobs(model, PROMPTS, COMPLETIONS, grad=True)
        found.append(gradients(model, logp_BT.sum()))
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for plain, again in zip(*found):
        close(plain, again, 1e-5)
    assert not model.training


def test_bad_rows_are_refused_and_no_tokens_are_fine():
    model, rule = make_model(), "one non-empty prompt per completion"
    for prompts, completions in (([[1]], [[1], [2]]), ([[]], [[1]])):
        with pytest.raises(ValueError, match=rule):
            policy.token_logprobs(model, prompts, completions)
    assert policy.token_logprobs(model, [[1]], [[]]).shape == (1, 0)
    assert policy.token_logprobs(model, [], []).shape == (0, 0)


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NO_GPU)])
def test_a_bf16_head_is_exact(device):
    """Against its numbers in fp64; on CUDA the product is made in TF32 (S22)."""
    model = make_model(vocab=1000, hidden_size=128).bfloat16().to(device)
    x_ND = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    ids_N, before = torch.arange(64, device=device), torch.backends.cuda.matmul.allow_tf32
    got_N = policy.over_slices(model, [x_ND], ids_N, policy.logprob_of)
    want_NV = (x_ND.double() @ model.lm_head.weight.double().T).log_softmax(-1)
    assert got_N.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 == before
    assert (got_N - want_NV[range(64), range(64)]).abs().max() < 1e-4


def test_adapters_are_fp32_beside_a_bf16_base_and_without_them_it_is_the_base():
    base = make_model().bfloat16()
    want = policy.token_logprobs(base, PROMPTS, COMPLETIONS)
    model = policy.with_adapters(base, 4, 8)
    params = policy.trained(model)
    assert len(params) == 2 * 7 * 2  # A and B of seven projections in two layers
    assert {p.dtype for p in params.values()} == {torch.float32}
    close(policy.token_logprobs(model, PROMPTS, COMPLETIONS), want, 0)  # B is 0 at the start
    for p in params.values():
        torch.nn.init.normal_(p, std=0.2)
    assert not torch.equal(policy.token_logprobs(model, PROMPTS, COMPLETIONS), want)
    with model.disable_adapter():
        assert torch.equal(policy.token_logprobs(model, PROMPTS, COMPLETIONS), want)
    loss = policy.token_logprobs(model, PROMPTS, COMPLETIONS, grad=True).sum()
    for grad in gradients(model, loss):
        assert grad.dtype == torch.float32 and grad.any() and math.isfinite(grad.norm())


def test_which_ids_are_masked(tokenizer):
    ids = policy.masked_token_ids(tokenizer)
    special = "<|endoftext|> <|im_start|> <|im_end|> <think> </think>".split()
    assert {tokenizer.decode([i]) for i in ids} == {"\n", "\n\n", "\n\n\n\n", *special}
    markdown, digit = tokenizer.encode("#")[0], tokenizer.encode("5")[0]
    extra = policy.masked_token_ids(tokenizer, extra=True) - ids
    assert {markdown, *(tokenizer.encode(blank)[0] for blank in (" ", "\r"))} <= extra
    assert digit not in extra
    assert sgsd.token_mask([min(ids), digit], ids).tolist() == [0, 1]


def test_newlines_are_masked_where_the_tokenizer_puts_a_blank_first():
    """As SentencePiece's do: a text of newlines alone has one more id than newlines in a text."""
    from tokenizers import normalizers

    own = make_tokenizer()
    own.backend_tokenizer.normalizer = normalizers.Prepend("_")
    assert len(own.encode("\n")) == 2
    newline = own.encode("a\n")[-1]
    assert newline in policy.masked_token_ids(own) and own.decode([newline]) == "\n"


def test_a_template_that_shows_the_date_shows_the_same_one_every_day(tokenizer):
    template = tokenizer.chat_template
    tokenizer.chat_template = (
        "{% if date_string is not defined %}"
        "{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
        "{{ date_string }} {{ messages[0].content }}"
    )
    ids = policy.chat_ids(tokenizer, "x", thinking=None)
    tokenizer.chat_template = template
    assert tokenizer.decode(ids) == "26 Jul 2024 x"


def test_stop_ids_of_a_model_whose_text_config_alone_names_one(tokenizer):
    """Gemma 3 with images has none of its own."""
    text = {"eos_token_id": [1, 106], "num_hidden_layers": 1}
    own = Gemma3Config(text_config=text)
    model = SimpleNamespace(config=own, generation_config=GenerationConfig())
    assert policy.stop_ids(model, tokenizer) == [1, 106, 265]
