"""Log-probabilities of given token ids under a causal language model (Eqs. 4 and 5).

We join prompt and completion without padding, and pad rows on the right only (D6). The head runs
on slices of positions, in fp32, so that logits of shape [N, V] never exist as a whole; heads that
are more than a matrix product are the exception (`has_plain_head`). On a GPU cuDNN's attention must
be off: `distributed.init` turns it off (S25).

Dimension key: B rows, L places of a padded row, K teachers, T completion tokens, N completion
tokens of all rows, V vocabulary, D hidden size, n positions of one slice; x is D or V.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

SLICE_LOGITS = {"cpu": 1 << 25}  # fp32 numbers of a slice, see `over_slices`; 1 << 27 on a GPU


def causal_lm(model):
    """The transformers model inside a PEFT wrapper, adapters included; or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def token_logprobs(
    model,
    prompt_ids: list[list[int]],
    completion_ids: list[list[int]],
    *,
    grad: bool = False,
    temperature: float = 1.0,
) -> Tensor:
    """log pi(y_t | prompt, y_<t) of each row's completion tokens (Eqs. 4 and 5).

    grad: whether the result carries a gradient. temperature: divides the logits (S5).
    Returns [B, T_max] fp32 nats, zeros after each row's end.
    Raises ValueError unless each completion has a prompt, and no prompt is empty.
    """
    lengths = [len(completion) for completion in completion_ids]
    if not any(lengths):
        return torch.zeros(len(lengths), 0, device=causal_lm(model).device)
    with torch.set_grad_enabled(grad):
        states_Nx, ids_N = predictors(model, prompt_ids, completion_ids)
        logp_N = over_slices(model, [states_Nx], ids_N, logprob_of, temperature)
    return pad_sequence(logp_N.split(lengths), batch_first=True)


def score_student(
    model, prompt_ids: list[int], ids_T: list[int], temperature: float = 1.0
) -> Tensor:
    """log p_S(y_t) of the student's tokens under its own prompt (Eq. 5). [T] fp32 nats.

    With gradient. temperature: divides the logits. Raises ValueError on an empty prompt.
    """
    return token_logprobs(model, [prompt_ids], [ids_T], grad=True, temperature=temperature)[0]


def score_teachers(
    model,
    contexts_K: list[list[int]],
    ids_T: list[int],
    budget: int = 16384,
    temperature: float = 1.0,
) -> Tensor:
    """log p_T^(k)(y_t) of the student's tokens under each teacher's context c_k (Eq. 4).

    contexts_K: prompt ids of the K teachers. ids_T: the sampled completion.
    budget: most tokens in a padded forward pass; the K rows take as few passes as it allows.
    temperature: divides the logits.
    Returns [K, T] fp32 nats without gradient.
    """
    logpT_KT = torch.zeros(len(contexts_K), len(ids_T), device=causal_lm(model).device)
    lengths = [len(context) + len(ids_T) for context in contexts_K]
    for group in packs(lengths, budget):
        contexts = [contexts_K[k] for k in group]
        completions = [ids_T] * len(group)
        logpT_KT[group] = token_logprobs(model, contexts, completions, temperature=temperature)
    return logpT_KT


def logprob_of(ids_n: Tensor, logits_nV: Tensor) -> Tensor:
    """The log-probability of each position's id: [n] nats."""
    return -torch.nn.functional.cross_entropy(logits_nV, ids_n, reduction="none")


def predictors(
    model, prompt_ids: list[list[int]], completion_ids: list[list[int]]
) -> tuple[Tensor, Tensor]:
    """The vectors that predict each completion token, row after row, and the tokens' ids.

    Returns states_Nx and ids_N. The states are the last hidden ones [N, D], or the full logits
    [N, V] of a model whose head is more than a matrix product. Raises ValueError as
    `token_logprobs` does.
    """
    if len(prompt_ids) != len(completion_ids) or not all(prompt_ids):
        raise ValueError(
            "token_logprobs needs one non-empty prompt per completion, "
            f"got {len(prompt_ids)} and {len(completion_ids)}"
        )
    causal = causal_lm(model)
    rows = [torch.tensor([*p, *c]) for p, c in zip(prompt_ids, completion_ids)]
    ids_BL = pad_sequence(rows, batch_first=True).to(causal.device)
    if has_plain_head(model):
        # The model below its head, adapters included.
        out_BLx = causal.base_model(input_ids=ids_BL, use_cache=False).last_hidden_state
    else:
        out_BLx = causal(input_ids=ids_BL, use_cache=False).logits
    states = []
    ids = []
    for prompt, row, ids_L, out_Lx in zip(prompt_ids, rows, ids_BL, out_BLx):
        states.append(out_Lx[len(prompt) - 1 : len(row) - 1])  # place t - 1 predicts token t
        ids.append(ids_L[len(prompt) : len(row)])
    return torch.cat(states), torch.cat(ids)


def over_slices(
    model,
    states: Sequence[Tensor],
    ids_N: Tensor,
    f: Callable[..., Tensor],
    temperature: float = 1.0,
) -> Tensor:
    """Apply f(ids_n, logits_nV, ...) to slices of positions, and join the results.

    states: one or several [N, D] (or [N, V]), from `predictors`. f receives one fp32 tensor of
    logits / temperature for each of `states`, and returns one row per position.
    The backward pass recomputes a slice's logits, so it never holds the logits of all slices.
    """
    head_VD = causal_lm(model).get_output_embeddings().weight
    needs_head = has_plain_head(model)  # else `states` are logits already
    weight_VD = head_VD.float()

    def one_slice(ids_n: Tensor, *states_nx: Tensor) -> Tensor:
        logits = []
        with tf32_products() if head_VD.dtype == torch.bfloat16 else contextlib.nullcontext():
            for x in states_nx:
                logits_nV = x.float() @ weight_VD.T if needs_head else x.float()
                # A division by 1 would be one more pass over all logits.
                logits.append(logits_nV if temperature == 1 else logits_nV / temperature)
        return f(ids_n, *logits)

    # For each of `states`, memory holds a slice's logits. With a gradient it holds three more
    # tensors of that size: their log-softmax inside f, and the gradients of both.
    copies = len(states) * (4 if torch.is_grad_enabled() else 1)
    most = SLICE_LOGITS.get(weight_VD.device.type, 1 << 27)
    n = max(1, most // (weight_VD.shape[0] * copies))
    slices = [x.split(n) for x in (ids_N, *states)]
    results = []
    for parts in zip(*slices):
        results.append(checkpoint(one_slice, *parts, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(results)


@contextlib.contextmanager
def tf32_products() -> Iterator[None]:
    """Turn on TF32 for the head's product alone: TF32 holds its bf16 factors exactly (S22).

    Elsewhere TF32 would round positions above 2,048, which transformers multiplies in fp32 for
    rotary embeddings. Compile nothing here: torch.compile may read allow_tf32, and that raises.
    """
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def has_plain_head(model) -> bool:
    """Whether the model's logits are hidden @ head.T, so that the head may run on slices.

    We compare the two once per model, on eight ids. If a model caps or scales its logits (Gemma 2,
    Cohere, Granite), we score it by its own full logits, and memory grows with T times V.
    """
    causal = causal_lm(model)
    if not hasattr(causal, "has_plain_head"):
        head_VD = causal.get_output_embeddings().weight
        plain = causal.base_model is not causal  # else there is no module below the head
        ids_1L = (torch.arange(1, 9, device=causal.device) * 7919 % len(head_VD))[None]
        with torch.no_grad():
            if plain:
                hidden_1LD = causal.base_model(input_ids=ids_1L, use_cache=False).last_hidden_state
                logits_1LV = causal(input_ids=ids_1L, use_cache=False).logits.float()
                gap = (hidden_1LD.float() @ head_VD.float().T - logits_1LV).abs().max()
                plain = bool(gap <= torch.finfo(causal.dtype).eps * logits_1LV.abs().max())
        causal.has_plain_head = plain
    return causal.has_plain_head


def packs(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Group the indices of rows of similar length; a padded group has at most `budget` tokens.

    A row that is longer than the budget is a group of its own.
    """
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= budget:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups
