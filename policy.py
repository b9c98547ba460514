"""The policy: a causal language model with adapters, its prompts, the log-probabilities of ids.

Dimension key: B rows, T completion tokens, N all completion tokens of all rows, V vocabulary,
D hidden size, n positions of one slice.
"""

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import is_flash_attn_2_available, logging

import inputs
from cli import UserError, brief
from files import encodable

# cuDNN's attention, which torch takes first on Hopper since 2.11, is planned anew for every length,
# so at each decoded token, and its backward pass under a mask gave NaN (pytorch issue 196678).
torch.backends.cuda.enable_cudnn_sdp(False)

Tokenizer = Any  # transformers' tokenizers and models are not typed usefully
Model = Any
Ids = list[int]
Tensors = dict[str, Tensor]
Embed = Callable[[Sequence[str]], np.ndarray]
THINK = ("<think>", "</think>")
PROJECTIONS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
SLICE_LOGITS = {"cpu": 1 << 25, "cuda": 1 << 27}  # fp32 numbers in the logits of one slice


def load_model(
    name: str, device: torch.device, dtype: str = "auto", attn: str = "sdpa", flag: str = "--model"
) -> tuple[Model, Tokenizer]:
    """A causal language model in eval mode on `device`, without dropout, and its tokenizer.

    name: a hub id or a directory. dtype: "auto" is bfloat16 on CUDA and float32 on CPU.
    Raises UserError when one of them cannot be loaded, or when they do not fit one another.
    """
    logging.disable_progress_bar()  # one bar is enough
    # PEFT asks a model by a name that transformers 5.20 has replaced.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    if attn == "flash_attention_2" and not is_flash_attn_2_available():
        raise UserError(f"--attn {attn}: flash-attn is not installed, or torch finds no GPU")
    source = _located(name, flag)
    try:  # without trust_remote_code=False a model may ask to run its own code
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        options = {"dtype": dtype, "attn_implementation": attn, "trust_remote_code": False}
        model: Model = AutoModelForCausalLM.from_pretrained(source, **options)
    except Exception as e:  # transformers raises many kinds: no such id, offline, no config
        hint = "; --attn eager suits every model" if "attention" in str(e) else ""
        raise UserError(f"{flag} {name}: not loaded ({brief(e)}){hint}") from None
    _check_tokenizer(tokenizer, model, f"{flag} {name}: its tokenizer")
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or [])
    other = kinds - {"full_attention", "sliding_attention", "chunked_attention"}
    other |= {"a recurrent state"} if getattr(model, "_is_stateful", False) else set()
    if other:  # `rollout.stream` could not join their caches
        raise UserError(f"{flag} {name}: {', '.join(sorted(other))}: not supported")
    if {"dynamic", "longrope"} & {str(vars(x).get("rope_type")) for x in model.modules()}:
        raise UserError(f"{flag} {name}: its positions depend on the longest row of a batch")
    _remove_dropout(model)
    model.get_output_embeddings().register_forward_pre_hook(_contiguous)
    return model.to(device).eval(), tokenizer


def load_outline(name: str, flag: str = "--model") -> tuple[Model, Tokenizer]:
    """A model without its weights, and its tokenizer: all that is wanted of one that a server has.

    The outline has the shapes, the settings and the stop ids; it computes nothing.
    """
    source = _located(name, flag)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        settings = AutoConfig.from_pretrained(source, trust_remote_code=False)
        with torch.device("meta"):
            model: Model = AutoModelForCausalLM.from_config(settings, trust_remote_code=False)
        with contextlib.suppress(OSError):  # a model may have none
            model.generation_config = GenerationConfig.from_pretrained(source)
    except Exception as e:  # as in `load_model`
        raise UserError(
            f"{flag} {name}: its tokenizer and settings not read ({brief(e)})"
        ) from None
    _check_tokenizer(tokenizer, model, f"{flag} {name}: its tokenizer")
    return model, tokenizer


def _located(name: str, flag: str) -> str:
    """A hub id, or a directory's whole path, by which an adapter finds its base from anywhere.

    UserError for a path that is not there, so that it is not looked for on the hub.
    """
    inputs.check_model(name, flag)
    return str(Path(name).absolute()) if Path(name).exists() else name


def _check_tokenizer(tokenizer: Tokenizer, model: Model, where: str) -> None:
    try:
        if "xyzzy" not in tokenizer.decode(chat_ids(tokenizer, "xyzzy", thinking=True)):
            raise ValueError("it drops what a user says")
    except Exception as e:  # no template, or one that raises anything
        fix = "use an instruct model, or mend the template"
        raise UserError(f"{where}'s chat template does not work ({brief(e)}); {fix}") from None
    if not stop_ids(model, tokenizer):
        fix = "name `eos_token_id` in its generation_config.json"
        raise UserError(f"{where} and the model have no id that ends a completion; {fix}")
    vocabulary = {i: token for token, i in tokenizer.get_vocab().items()}
    # The small Gemma 3 have a placeholder for images without a row; no text comes to hold it.
    vocabulary.pop(getattr(tokenizer, "image_token_id", None), None)
    last, rows = max(vocabulary), model.get_input_embeddings().weight.shape[0]
    if last >= rows:
        sizes = f"knows {last + 1} ids, the model has rows for {rows}"
        raise UserError(f"{where} {sizes} (the last is {vocabulary[last]!r}); use the model's own")


def _remove_dropout(model: Model) -> None:
    """Teacher and student must be the same function of their input, in train mode too."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if name.endswith("dropout") and isinstance(value, float):
                setattr(module, name, 0.0)


def _contiguous(head: torch.nn.Module, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What `generate` gives the head after a prompt: the last place of each row, in one piece.

    PyTorch copies the head's matrix for every row of a slice that is not. In bf16 on a CPU eight
    rows of a 0.5B model took 12.6 s, and take 0.04 s.
    """
    return tuple(x.contiguous() for x in states)


def causal_lm(model: Model) -> Model:
    """The transformers model inside a PEFT wrapper, adapters and all; or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def with_adapters(model: Model, rank: int, alpha: int, flag: str = "--model") -> Model:
    """The model with LoRA on all PROJECTIONS (S7) and gradient checkpointing, in train mode.

    No dropout, no biases. The adapters are fp32: a step of 5e-6 would be lost in bf16 (S22).
    Raises UserError where a projection is missing, or is one of many experts'.
    """
    from peft import LoraConfig, get_peft_model

    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    missing = [name for name in PROJECTIONS if name not in names]
    if missing or "experts" in names:
        why = f"has no {', '.join(missing)} to adapt" if missing else "is a mixture of experts"
        raise UserError(f"{flag}: {why} (S7); take another model")
    lora = LoraConfig(r=rank, lora_alpha=alpha, task_type="CAUSAL_LM", target_modules=PROJECTIONS)
    model = get_peft_model(model, lora)
    causal = causal_lm(model)
    if hasattr(causal, "activation_checkpointing_enable"):  # the name since transformers 5.20
        causal.activation_checkpointing_enable({"use_reentrant": False})
    else:
        causal.gradient_checkpointing_enable({"use_reentrant": False})
    causal.enable_input_require_grads()
    return model.train()


def trained(model: Model) -> dict[str, torch.nn.Parameter]:
    """The parameters that learn, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def load_encoder(name: str, device: str) -> Embed:
    """`embed` by a sentence-transformers model (hub id or directory): unit vectors in fp32."""
    inputs.check_encoder(name)
    source = _located(name, "--encoder")
    try:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.util import is_sentence_transformer_model

        encoder = SentenceTransformer(source, device=device).float()  # whatever its files are in
        plain = getattr(encoder[0], "auto_model", None)  # of transformers, with a mean over tokens
        kinds = (plain and plain.config.architectures) or []
        if "ForCausalLM" in "".join(kinds) and not is_sentence_transformer_model(source):
            raise ValueError("it is a causal model, and no encoder")
    except Exception as e:  # many kinds: no such id, offline, not an encoder
        raise UserError(f"--encoder {name}: not loaded ({brief(e)})") from None

    @functools.cache
    def embed_one(text: str) -> np.ndarray:  # in a batch, padding would change the last bits
        return encoder.encode(encodable(text), normalize_embeddings=True, show_progress_bar=False)

    return lambda texts: np.stack([embed_one(text) for text in texts])


def chat_ids(tokenizer: Tokenizer, text: str, *, thinking: bool | None) -> Ids:
    """Ids of one user turn and the generation prompt, by the model's own chat template.

    thinking: the template's `enable_thinking`, where not None. Qwen3 ends on the bare assistant
    header at True, on a closed, empty think block at False (S3). Control tokens in `text` are
    broken up, so that text written by a model cannot open or close a turn.
    """
    chat = [{"role": "user", "content": _neutral(text, tokenizer)}]
    settings: dict[str, Any] = {"add_generation_prompt": True, "return_dict": False}
    settings["date_string"] = "26 Jul 2024"  # Llama's shows the day, by default today (S24)
    if thinking is not None:
        settings["enable_thinking"] = thinking
    return list(tokenizer.apply_chat_template(chat, **settings))


def _neutral(text: str, tokenizer: Tokenizer) -> str:
    """`text` in which no control token can be read: "<|im_end|>" becomes "< |im_end|>"."""
    text = encodable(text)
    tokens = {*map(str, tokenizer.get_added_vocab()), *tokenizer.all_special_tokens}
    control = [token for token in tokens if re.fullmatch(r"\S{2,}", token)]
    if not control:
        return text
    pattern = "|".join(map(re.escape, sorted(control, key=len, reverse=True)))  # longest first
    return re.sub(pattern, lambda match: f"{match[0][0]} {match[0][1:]}", text)


def masked_token_ids(tokenizer: Tokenizer, extra: bool = False) -> set[int]:
    """Ids that the mask removes (§2.4, S2): special ids, <|...|>, think tags, 1 to 8 newlines.

    extra: also tokens that are nothing but white space, markdown (**, ##, ```, ---) or a tool tag.
    """
    ids = special_ids(tokenizer)
    control = re.compile(r"<\|.*\|>|</?think>")
    ids |= {i for token, i in tokenizer.get_vocab().items() if control.fullmatch(token)}
    letter = tokenizer.encode("a", add_special_tokens=False)  # with what a tokenizer puts first
    for n in range(1, 9):
        newlines = tokenizer.encode("a" + "\n" * n, add_special_tokens=False)[len(letter) :]
        if len(newlines) == 1:
            ids.update(newlines)
    if extra:
        formatting = re.compile(r"\s*(\*\*+|#+|`+|---+|___+|</?tool_\w+>)?\s*")
        ids.update(i for i in range(len(tokenizer)) if formatting.fullmatch(tokenizer.decode([i])))
    return ids


def special_ids(tokenizer: Tokenizer) -> set[int]:
    """Ids that the tokenizer calls special, with a role or without one."""
    ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return ids | {i for i in tokenizer.all_special_ids if i is not None}


def text_of(tokenizer: Tokenizer, ids: Ids) -> str:
    """The text of ids without special tokens; think tags stay, since an answer stands after one."""
    hidden = special_ids(tokenizer) - {tokenizer.added_tokens_encoder.get(tag) for tag in THINK}
    return tokenizer.decode([i for i in ids if i not in hidden])


def stop_ids(model: Model, tokenizer: Tokenizer) -> list[int]:
    """Every id that ends a completion: the tokenizer's and all of the model's (Qwen3 has two)."""
    settings_of_model, settings = causal_lm(model).config, causal_lm(model).generation_config
    stops: set[int | None] = set()
    for source in (tokenizer, settings_of_model, settings_of_model.get_text_config(), settings):
        ids = getattr(source, "eos_token_id", None)
        stops.update(ids if isinstance(ids, list | tuple) else [ids])
    return sorted(i for i in stops if i is not None)


def token_logprobs(
    model, prompt_ids: list[Ids], completion_ids: list[Ids], *, grad=False, temperature=1.0
) -> Tensor:
    """log pi(y_t | prompt, y_<t) of each row's completion tokens (Eqs. 4 and 5).

    Returns [B, T_max] fp32 nats, zeros after each row's end; with gradient where `grad` is set.
    Prompt and completion are joined without padding and padded only on the right (D6), where a
    causal model cannot look. Raises ValueError on row counts that differ or on an empty prompt.
    """
    lengths = [len(completion) for completion in completion_ids]
    if not any(lengths):
        return torch.zeros(len(lengths), 0, device=causal_lm(model).device)
    with torch.set_grad_enabled(grad):
        x_N, ids_N = predictors(model, prompt_ids, completion_ids)
        logp_N = over_slices(model, [x_N], ids_N, logprob_of, temperature)
    return pad_sequence(logp_N.split(lengths), batch_first=True)


def score_teachers(model: Model, contexts_K: list[Ids], ids_T: Ids, budget: int = 16384) -> Tensor:
    """log p_T^(k)(y_t) of the student's tokens under each context c_k (Eq. 4): [K, T] fp32.

    No gradient. The K rows are stacked into as few padded forward passes as the budget allows.
    """
    logpT_KT = torch.zeros(len(contexts_K), len(ids_T), device=causal_lm(model).device)
    for group in packs([len(context) + len(ids_T) for context in contexts_K], budget):
        contexts = [contexts_K[k] for k in group]
        logpT_KT[group] = token_logprobs(model, contexts, [ids_T] * len(group))
    return logpT_KT


def logprob_of(ids_n: Tensor, logits_nV: Tensor) -> Tensor:
    """The log-probability of each position's id: [n].

    On CPU four rows at a time, which stay in its cache and need no second copy of all logits.
    """
    rows = 4 if logits_nV.device.type == "cpu" else max(1, len(ids_n))
    logprobs = []
    for logits, ids in zip(logits_nV.split(rows), ids_n.split(rows)):
        logprobs.append(-torch.nn.functional.cross_entropy(logits, ids, reduction="none"))
    return torch.cat(logprobs)


def predictors(
    model: Model, prompt_ids: list[Ids], completion_ids: list[Ids]
) -> tuple[Tensor, Tensor]:
    """What predicts each completion token, row after row: x_N, and the token's id.

    x_N holds the last hidden states [N, D], or full logits [N, V] where the head is more than a
    matrix product. Raises ValueError as `token_logprobs` does.
    """
    if len(prompt_ids) != len(completion_ids) or not all(prompt_ids):
        got = f"got {len(prompt_ids)} and {len(completion_ids)}"
        raise ValueError(f"token_logprobs needs one non-empty prompt per completion, {got}")
    causal = causal_lm(model)
    rows = [torch.tensor(p + c) for p, c in zip(prompt_ids, completion_ids)]
    ids_BL = pad_sequence(rows, batch_first=True).to(causal.device)
    if head_is_sliced(model):
        out_BLx = causal.base_model(input_ids=ids_BL, use_cache=False).last_hidden_state
    else:
        out_BLx = causal(input_ids=ids_BL, use_cache=False).logits
    states, ids = [], []
    for prompt, row, row_L, out_Lx in zip(prompt_ids, rows, ids_BL, out_BLx):
        states.append(out_Lx[len(prompt) - 1 : len(row) - 1])  # before a token, what predicts it
        ids.append(row_L[len(prompt) : len(row)])
    return torch.cat(states), torch.cat(ids)


def over_slices(model, states: Sequence[Tensor], ids_N: Tensor, f, temperature=1.0) -> Tensor:
    """f(ids_n, logits_nV, ...) over slices of positions, put together again.

    states: one or several [N, D], from `predictors`; f gets the fp32 logits / temperature of each
    and returns one row per position. The backward pass computes a slice's logits again, so that
    whole [N, V] logits are never alive.
    """
    head_VD, sliced = causal_lm(model).get_output_embeddings().weight, head_is_sliced(model)
    weight_VD, matmul = head_VD.float(), torch.backends.cuda.matmul

    def one(ids_n: Tensor, *states_nD: Tensor) -> Tensor:
        logits, before = [], matmul.allow_tf32
        # TF32 is on for the head's product alone, whose bf16 numbers it holds exactly (S22). It
        # rounds positions above 2,048, which transformers multiplies in fp32 for rotary embeddings.
        matmul.allow_tf32 = before or head_VD.dtype == torch.bfloat16
        for x_nD in states_nD:
            logits_nV = x_nD.float() @ weight_VD.T if sliced else x_nD.float()
            # The division would be one more pass over all logits.
            logits.append(logits_nV if temperature == 1 else logits_nV / temperature)
        matmul.allow_tf32 = before
        return f(ids_n, *logits)

    # With a gradient, also what f makes of the logits and the gradients of both are alive.
    alive = len(states) * (4 if torch.is_grad_enabled() else 1)
    rows = max(1, SLICE_LOGITS[weight_VD.device.type] // (weight_VD.shape[0] * alive))
    results = []
    for parts in zip(*[x.split(rows) for x in (ids_N, *states)]):
        results.append(checkpoint(one, *parts, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(results)


def head_is_sliced(model: Model) -> bool:
    """Whether this model's logits are just `head(hidden)`, so that the head may run on slices.

    Compares both once per model, on a few ids. Capped or scaled logits (Gemma 2, Cohere, Granite)
    differ: such a model is scored by its own full logits, and memory grows with T times V.
    """
    causal = causal_lm(model)
    if not hasattr(causal, "head_is_sliced"):
        head, backbone = causal.get_output_embeddings(), causal.base_model
        vocabulary = causal.config.get_text_config().vocab_size
        ids = (torch.arange(1, 9, device=causal.device) * 7919 % vocabulary)[None]
        plain = type(head) is torch.nn.Linear and head.bias is None and backbone is not causal
        with torch.no_grad():
            full = causal(input_ids=ids, use_cache=False).logits.float()
            if plain:
                hidden = backbone(input_ids=ids, use_cache=False).last_hidden_state
                gap = (head(hidden).float() - full).abs().max()
                plain = bool(gap <= torch.finfo(causal.dtype).eps * full.abs().max())
        causal.head_is_sliced = plain
    return causal.head_is_sliced


def packs(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices in groups of similar length, each at most `budget` tokens when it is padded.

    A row that is longer than the budget goes alone.
    """
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= budget:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups
