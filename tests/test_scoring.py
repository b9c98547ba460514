"""Scored log-probabilities: stacked equals one by one, sliced equals full, padding never inside, the null teacher is zero."""

import pytest
import torch
from conftest import make_model
from peft import LoraConfig, get_peft_model

import rollout as R
import sgsd

PROMPTS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16]]
COMPLETIONS = [[20, 21, 22], [23, 24, 25, 26, 27, 28], [29]]


def by_hand(model, prompt, completion, temperature=1.0):
    """One row, full logits, log_softmax: the definition."""
    with torch.no_grad():
        logits = (
            model(input_ids=torch.tensor([prompt + completion])).logits[0].double() / temperature
        )
    logp = logits.log_softmax(-1)
    return torch.stack([logp[len(prompt) - 1 + t, y] for t, y in enumerate(completion)]).float()


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma2"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rows_equal_the_definition(kind, temperature):
    model = make_model(kind)
    got = R.token_logprobs(model, PROMPTS, COMPLETIONS, temperature=temperature)
    assert got.dtype == torch.float32 and got.shape == (3, 6)
    for row, p, c in zip(got, PROMPTS, COMPLETIONS):
        torch.testing.assert_close(
            row[: len(c)], by_hand(model, p, c, temperature), atol=2e-5, rtol=1e-5
        )
        assert (row[len(c) :] == 0).all()


def test_soft_capped_head_takes_the_plain_path():
    assert R.head_is_sliced(make_model("qwen3")) and R.head_is_sliced(make_model("llama"))
    assert not R.head_is_sliced(make_model("gemma2"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_soft_cap_is_noticed_in_bf16_too(dtype):
    """Logits near the cap, as a trained Gemma has them."""
    assert not R.head_is_sliced(make_model("gemma2", initializer_range=0.6).to(dtype))
    assert R.head_is_sliced(make_model("qwen3", initializer_range=0.6).to(dtype))


def test_slices_of_the_head_change_nothing(monkeypatch):
    model = make_model()
    whole = R.token_logprobs(model, PROMPTS, COMPLETIONS, grad=True)
    grad = torch.autograd.grad(whole.sum(), list(model.parameters()))
    monkeypatch.setitem(R.SLICE_LOGITS, "cpu", 3 * 272)  # three positions at a time
    sliced = R.token_logprobs(model, PROMPTS, COMPLETIONS, grad=True)
    torch.testing.assert_close(sliced, whole, atol=1e-6, rtol=1e-6)
    for a, b in zip(torch.autograd.grad(sliced.sum(), list(model.parameters())), grad):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_gradient_equals_full_logits():
    model = make_model()
    loss = R.token_logprobs(model, [PROMPTS[0]], [COMPLETIONS[0]], grad=True).sum()
    logits = model(input_ids=torch.tensor([PROMPTS[0] + COMPLETIONS[0]])).logits[0]
    want = logits[4:7].log_softmax(-1).gather(1, torch.tensor(COMPLETIONS[0])[:, None]).sum()
    for a, b in zip(
        torch.autograd.grad(loss, list(model.parameters())),
        torch.autograd.grad(want, list(model.parameters())),
    ):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("budget", [1, 30, 10_000])
def test_stacked_teachers_equal_one_by_one(budget):
    model, ids_T = make_model(), [30, 31, 32, 33]
    got = sgsd.score_teachers(model, PROMPTS, ids_T, budget)
    assert got.shape == (3, 4) and not got.requires_grad
    for k, context in enumerate(PROMPTS):
        torch.testing.assert_close(got[k], by_hand(model, context, ids_T), atol=2e-5, rtol=1e-5)
    assert sgsd.score_teachers(model, [], ids_T).shape == (0, 4)


def test_null_teacher_has_no_gap():
    """A teacher whose context is the student's prompt is the student: Delta = 0 (D6)."""
    model, ids_T = make_model(), [30, 31, 32, 33, 34]
    contexts = [
        PROMPTS[0],
        PROMPTS[2],
        PROMPTS[1],
    ]  # the student's prompt among longer and shorter ones
    student_T = R.token_logprobs(model, [PROMPTS[0]], [ids_T], grad=True)[0]
    gap_KT = sgsd.log_prob_gap(sgsd.score_teachers(model, contexts, ids_T), student_T)
    assert gap_KT[0].abs().max() < 1e-5 and gap_KT[1:].abs().max() > 1e-2


def test_a_shift_by_one_is_seen():
    """The comparison above is sharp: log-probabilities read one position late are far off."""
    model, p, c = make_model(), PROMPTS[0], COMPLETIONS[1]
    right, late = by_hand(model, p, c), by_hand(model, p + c[:1], c[1:])
    got = R.token_logprobs(model, [p], [c])[0]
    torch.testing.assert_close(got[1:], late, atol=2e-5, rtol=1e-5)
    assert (got[:-1] - late).abs().max() > 0.1 and (got - right).abs().max() < 1e-4


def test_padding_behind_is_inert():
    """No attention mask is passed: what stands behind a row cannot be seen by it."""
    model = make_model()
    alone = R.token_logprobs(model, PROMPTS[1:2], COMPLETIONS[2:3])
    beside = R.token_logprobs(model, [PROMPTS[1], [5] * 60], [COMPLETIONS[2], [6] * 40])
    torch.testing.assert_close(beside[0, :1], alone[0, :1], atol=1e-5, rtol=1e-5)


def test_checkpointing_changes_no_gradient():
    model = make_model()
    plain = torch.autograd.grad(
        R.token_logprobs(model, PROMPTS, COMPLETIONS, grad=True).sum(), list(model.parameters())
    )
    model._activation_checkpointing_enable({"use_reentrant": False}) if hasattr(
        model, "_activation_checkpointing_enable"
    ) else (model.gradient_checkpointing_enable({"use_reentrant": False}))
    again = torch.autograd.grad(
        R.token_logprobs(model, PROMPTS, COMPLETIONS, grad=True).sum(), list(model.parameters())
    )
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(plain, again))
    assert not model.training  # put back as it was


def test_bad_rows_are_refused():
    with pytest.raises(ValueError, match="one non-empty prompt per completion"):
        R.token_logprobs(make_model(), [[1]], [[1], [2]])
    with pytest.raises(ValueError, match="one non-empty prompt per completion"):
        R.token_logprobs(make_model(), [[]], [[1]])
    assert R.token_logprobs(make_model(), [[1]], [[]]).shape == (1, 0)


def test_packs_hold_their_budget_and_lose_no_row():
    lengths = [5, 100, 7, 30, 31, 2, 64]
    groups = R.packs(lengths, 64)
    assert sorted(i for g in groups for i in g) == list(range(7))
    assert all(len(g) == 1 or max(lengths[i] for i in g) * len(g) <= 64 for g in groups)


# ------------------------------------------------------------------------------------------------ beside a bf16 model


def head(device="cpu"):
    torch.manual_seed(0)
    return (
        torch.randn(64, 128, device=device).bfloat16(),
        torch.randn(1000, 128, device=device).bfloat16() / 4,
        torch.arange(64, device=device),
    )


def test_a_bf16_head_as_it_is(monkeypatch):
    """What CUDA does with bf16 states and weights: log-probabilities to the last bit those of fp32 copies, gradients rounded to bf16."""
    x_ND, weight_VD, ids_N = head()
    mm = torch.mm
    monkeypatch.setattr(
        torch,
        "mm",
        lambda a, b, out_dtype=None: (
            mm(a.to(out_dtype), b.to(out_dtype)) if out_dtype else mm(a, b)
        ),
    )
    monkeypatch.setitem(R.SLICE_LOGITS, "cpu", 7 * 1000)
    logps, grads = [], []
    for weight in (weight_VD, weight_VD.float()):
        logps.append(R._HeadLogprobs.apply(x := x_ND.clone().requires_grad_(), weight, ids_N, 0.7))
        grads.append(torch.autograd.grad(logps[-1].sum(), x)[0].double())
    assert logps[0].dtype == torch.float32 and torch.equal(*logps)
    assert (grads[0] - grads[1]).norm() < 0.005 * grads[1].norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_bf16_head_is_exact_on_cuda():
    x_ND, weight_VD, ids_N = head("cuda")
    want_N = (x_ND.double() @ weight_VD.double().t()).log_softmax(-1).diagonal()
    torch.testing.assert_close(
        R._HeadLogprobs.apply(x_ND, weight_VD, ids_N, 1.0).double(), want_N, atol=1e-4, rtol=1e-5
    )


def adapted(dtype):
    """A model with adapters that do something, and PEFT's own forward."""
    torch.manual_seed(0)
    model = get_peft_model(
        make_model().to(dtype), LoraConfig(r=4, lora_alpha=8, target_modules=list(sgsd.PROJECTIONS))
    )
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.2)
    return model.eval()


def scored(model):
    logp = R.token_logprobs(model, PROMPTS, COMPLETIONS, grad=True)
    return logp.detach().double(), [
        g.double()
        for g in torch.autograd.grad(logp.sum(), [p for p in model.parameters() if p.requires_grad])
    ]


def test_lean_adapters():
    """In bf16 no further from fp32 than PEFT's are, give or take; weights and gradients fp32; without adapters the base model; fp32 untouched."""
    exact, plain, lean = (
        adapted(torch.float32),
        adapted(torch.bfloat16),
        R.lean_adapters(adapted(torch.bfloat16)),
    )
    exact.load_state_dict(plain.state_dict())  # the bf16 weights, in fp32
    assert all(p.dtype == torch.float32 for p in lean.parameters() if p.requires_grad)
    (want, to_want), (peft, to_peft), (ours, to_ours) = map(scored, (exact, plain, lean))
    assert not torch.equal(ours, peft) and (ours - want).norm() < 1.5 * (peft - want).norm()
    far = [
        sum((a - b).norm() ** 2 for a, b in zip(found, to_want)) ** 0.5
        for found in (to_ours, to_peft)
    ]
    assert far[0] < 1.5 * far[1] < 0.1 * sum(a.norm() ** 2 for a in to_want) ** 0.5
    with lean.disable_adapter(), plain.disable_adapter():
        assert torch.equal(
            R.token_logprobs(lean, PROMPTS, COMPLETIONS),
            R.token_logprobs(plain, PROMPTS, COMPLETIONS),
        )
    assert "forward" not in vars(
        R.lean_adapters(exact).base_model.model.model.layers[0].mlp.up_proj
    )
