"""A rollout: problem -> prompt ids -> sampled ids -> text -> answer -> outcome r in {-1,+1}; and the log-probabilities of ids.

Two promises. The ids that were sampled are the ids that are scored: text never comes back as ids. And the draw for a
token is a pure function of (seed, step, problem, sample index, position): batch, rank and order reach it through the rounding
of the logits alone.

Dimension key: B rows, T completion tokens, N = all completion tokens of all rows, V vocabulary, D hidden size.
"""

import collections
import functools
import hashlib
import itertools
import json
import pathlib
import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer

from distributed import UserError, World, brief, gather
from verify import Verifier, extract_answer

__all__ = [
    "Problem",
    "Rollout",
    "Sampling",
    "Verifier",
    "chat_ids",
    "extract_answer",
    "generate",
    "load_model",
    "load_problems",
    "sample_key",
    "sample_rollouts",
    "token_logprobs",
]

Tokenizer = Any  # transformers' tokenizers and models are not typed usefully
Model = Any

# ------------------------------------------------------------------------------------------------ problems


@dataclass(frozen=True)
class Problem:
    id: str
    problem: str
    answer: str


DAPO_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem."
)
DAPO_SUFFIX = 'Remember to put your answer on its own line after "Answer:".'
CJK = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]")


def load_problems(
    source: str, *, split: str = "train", unique: bool = True
) -> tuple[list[Problem], dict[str, int]]:
    """Problems from a JSONL file, a parquet file, a directory of either, or a hub id; with the counts of what was dropped.

    Rows have `problem` and `answer` (strings, `id` optional), or are DAPO-Math's chats: `prompt` with boilerplate around
    the problem and the answer under `reward_model.ground_truth`. Of those the boilerplate is stripped and rows in
    Chinese, Japanese or Korean are dropped (D8). With `unique`, duplicate problems are dropped, and so is every problem
    whose copies disagree on the answer. Raises UserError, naming row and fields, on anything it can't read.
    """
    answers: dict[str, set[str]] = {}
    kept: dict[str, Problem] = {}
    counts = {"rows": 0, "not_english": 0, "duplicates": 0, "conflicting": 0}
    ids: set[str] = set()
    for where, row in _rows(source, split):
        counts["rows"] += 1
        p = _problem(row, where, counts["rows"] - 1)
        if "problem" not in row and CJK.search(p.problem):
            counts["not_english"] += 1
        elif unique and p.problem in kept:
            counts["duplicates"] += 1
            answers[p.problem].add(p.answer)
        else:
            key = p.problem if unique else f"{counts['rows']}"
            p = Problem(
                p.id if p.id not in ids else f"{p.id}#{counts['rows'] - 1}", p.problem, p.answer
            )
            ids.add(p.id)
            kept[key], answers[key] = p, {p.answer}
    problems = [p for key, p in kept.items() if len(answers[key]) == 1]
    counts["conflicting"], counts["kept"] = len(kept) - len(problems), len(problems)
    if not problems:
        raise UserError(
            f"{source}: no problem is left of {counts['rows']} rows ({counts}); is this the right file or split?"
        )
    return problems, counts


def _problem(row: dict, where: str, index: int) -> Problem:
    fields = ", ".join(map(str, row)) or "none"
    if "problem" in row and "answer" in row:
        problem, answer, ident = row["problem"], row["answer"], row.get("id", index)
    elif "prompt" in row and isinstance(row.get("reward_model"), dict):
        prompt, answer = row["prompt"], row["reward_model"].get("ground_truth")
        last, extra = (
            prompt[-1] if isinstance(prompt, list) and prompt else prompt,
            row.get("extra_info"),
        )
        problem = last.get("content") if isinstance(last, dict) else last
        ident = extra.get("index", index) if isinstance(extra, dict) else index
        if isinstance(problem, str):
            problem = problem.strip().removeprefix(DAPO_PREFIX).removesuffix(DAPO_SUFFIX)
    else:
        raise UserError(
            f"{where}: needs `problem` and `answer` (or DAPO's `prompt` and `reward_model`); fields found: {fields}"
        )
    for name, value in (("problem", problem), ("answer", answer)):
        if not isinstance(value, str):
            raise UserError(
                f"{where}: `{name}` must be a string, got {type(value).__name__} {str(value)[:40]!r}; quote it"
            )
        if not value.strip():
            raise UserError(f"{where}: `{name}` is empty; fields found: {fields}")
    return Problem(str(ident), problem.strip(), answer.strip())


def _rows(source: str, split: str) -> Iterator[tuple[str, dict]]:
    """(where, row) for each row of a file, a directory or a hub data set."""
    path = pathlib.Path(source)
    files = [path]
    if path.is_dir():
        files = sorted([*path.rglob("*.parquet"), *path.rglob("*.jsonl")])
        if not files:
            raise UserError(f"{source}: the directory holds no .parquet and no .jsonl file")
    elif not path.exists():
        if path.suffix in (".jsonl", ".json", ".parquet") or source.startswith((".", "/", "~")):
            raise UserError(f"{source}: no such file; check the path")
        rows = _hub_rows(source, split)
        yield from ((f"{source} row {i}", row) for i, row in enumerate(rows))
        return
    for file in files:
        if file.suffix == ".parquet":
            rows = _hub_rows("parquet", "train", data_files=str(file))
            yield from ((f"{file} row {i}", row) for i, row in enumerate(rows))
            continue
        try:
            lines = file.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(
                f"{file}: cannot be read as UTF-8 text ({e}); JSONL or parquet is wanted"
            ) from None
        for i, line in enumerate(lines, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except (
                    ValueError,
                    RecursionError,
                ) as e:  # broken; a number of 5,000 digits; a bottomless list
                    raise UserError(
                        f"{file}:{i}: not a JSON line ({e}); one object per line is wanted"
                    ) from None
                if not isinstance(row, dict):
                    raise UserError(
                        f"{file}:{i}: a JSON object is wanted, got {type(row).__name__}"
                    )
                yield f"{file}:{i}", row


def _hub_rows(name: str, split: str, **where: str) -> Iterator[dict]:
    import datasets  # only needed for hub ids and parquet

    datasets.disable_progress_bars()
    try:
        data = datasets.load_dataset(name, split=split, **where)
        for part in data.iter(
            batch_size=10_000
        ):  # whole columns at a time: DAPO has 1.8 million rows
            yield from (dict(zip(part, values)) for values in zip(*part.values()))
    except (
        Exception
    ) as e:  # the library raises many kinds: offline, no such id, no such split, broken file
        raise UserError(
            f"{where.get('data_files', name)}: not read ({brief(e)}); a local JSONL works offline"
        ) from None


def fingerprint(problem: str) -> str:
    """48 bits of a problem's letters and digits: layout, case and LaTeX spacing do not change it."""
    return hashlib.blake2b(
        re.sub(r"[\W_]", "", problem.lower()).encode("utf-8", "replace"), digest_size=6
    ).hexdigest()


def refuse_overlap(
    problems: Sequence[Problem], data: str, held_out: dict[str, list[Problem]]
) -> None:
    """UserError when a problem to learn from also stands in an evaluation set: the paper's three, known by the fingerprints in
    eval_sets.json, and those of `held_out`, by name."""
    known = json.loads((pathlib.Path(__file__).parent / "eval_sets.json").read_text())
    known |= {name: [fingerprint(x.problem) for x in own] for name, own in held_out.items()}
    where = {f: name for name, prints in known.items() for f in prints}
    found = [f"{x.id} ({where[f]})" for x in problems if (f := fingerprint(x.problem)) in where]
    if found:
        some = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
        raise UserError(
            f"--data {data}: {len(found)} of its problems stand in an evaluation set: {some}; drop them, or say --allow-eval-overlap"
        )


# ------------------------------------------------------------------------------------------------ model


def load_model(
    name: str,
    device: torch.device,
    *,
    dtype: str = "auto",
    attn: str = "auto",
    flag: str = "--model",
) -> tuple[Model, Tokenizer]:
    """A causal language model (hub id or directory, on `device`, no dropout, eval mode) and its tokenizer.

    dtype: "auto" is bfloat16 on CUDA and float32 on CPU. attn: "auto" is FlashAttention 2 where it is installed, else SDPA.
    Raises UserError when the model or tokenizer can't be loaded, or don't fit one another.
    """
    from transformers.utils import is_flash_attn_2_available, logging

    logging.disable_progress_bar()  # one bar is enough
    warnings.filterwarnings(
        "ignore", ".*gradient_checkpointing.*", FutureWarning
    )  # renamed in 5.20; both names last until 6
    warnings.filterwarnings(
        "ignore", "Synchronization debug mode", UserWarning
    )  # `_captured` looks for waits with it
    kind = {"auto": torch.bfloat16 if device.type == "cuda" else torch.float32}.get(
        dtype
    ) or getattr(torch, dtype)
    if attn == "auto":
        attn = (
            "flash_attention_2"
            if device.type == "cuda" and kind != torch.float32 and is_flash_attn_2_available()
            else "sdpa"
        )
    elif attn == "flash_attention_2" and not is_flash_attn_2_available():
        raise UserError(
            "--attn flash_attention_2: flash-attn is not installed, or torch finds no GPU; pip install flash-attn, or say --attn auto"
        )
    if not pathlib.Path(name).exists() and name.startswith((".", "/", "~")):
        raise UserError(
            f"{flag} {name}: no such directory; a hub id or a directory of a saved model is wanted"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, trust_remote_code=False
        )  # left out, a model with code of its own may ask on a terminal
        model: Model = AutoModelForCausalLM.from_pretrained(
            name, dtype=kind, attn_implementation=attn, trust_remote_code=False
        )
    except (
        Exception
    ) as e:  # transformers raises many kinds: no such id, offline, no config, wrong architecture
        raise UserError(f"{flag} {name}: not loaded ({brief(e)})") from None
    if tokenizer.chat_template is None:
        raise UserError(
            f"{flag} {name}: its tokenizer has no chat template; use an instruct model, or add chat_template.jinja"
        )
    placeholder = getattr(
        tokenizer, "image_token_id", None
    )  # the small Gemma 3 have it without a row; no text comes to hold it
    tokens = {i: token for token, i in tokenizer.get_vocab().items() if i != placeholder}
    if (last := max(tokens)) >= (rows := model.get_input_embeddings().weight.shape[0]):
        raise UserError(
            f"{flag} {name}: its tokenizer knows {last + 1} ids, the model has rows for {rows} (the last is {tokens[last]!r}); "
            "use the tokenizer that the model came with, or give it rows by resize_token_embeddings"
        )
    for module in model.modules():  # teacher and student must be the same function of their input
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if name.endswith("dropout") and isinstance(value, float):
                setattr(module, name, 0.0)
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(
            False
        )  # it plans anew for every shape, and here each batch has another
    return model.to(device).eval(), tokenizer


def lean_adapters(model: Model) -> Model:
    """The same PEFT model; its LoRA products in the dtype of what they are added to (S22). In fp32 it stays as it is.

    Beside a bf16 model PEFT casts the input of each module to fp32, adds in fp32 and casts back, which moves several times the
    bytes of the products. The adapters' weights stay fp32, for the optimizer's sake.
    """
    from peft.tuners.lora import Linear

    for layer in model.modules():
        plain = (
            isinstance(layer, Linear)
            and not layer.lora_variant
            and not any(layer.lora_bias.values())
        )  # no DoRA and the like
        if plain and layer.get_base_layer().weight.dtype != torch.float32:
            vars(layer)["forward"] = functools.partial(_lean_forward, layer)
    return model


def _lean_forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
    out = layer.base_layer(x)
    if layer.disable_adapters:
        return out
    (name,) = layer.active_adapters
    a_RD, b_OR = layer.lora_A[name].weight.to(x.dtype), layer.lora_B[name].weight.to(x.dtype)
    low = torch.nn.functional.linear(x, a_RD)
    return torch.addmm(
        out.flatten(0, -2), low.flatten(0, -2), b_OR.t(), alpha=layer.scaling[name]
    ).view_as(out)


def causal_lm(model: Model) -> Model:
    """The transformers model inside a PEFT wrapper (its adapters stay active), or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _neutral(text: str, tokenizer: Tokenizer) -> str:
    """`text` in which no control token of the tokenizer can be read: "<|im_end|>" becomes "< |im_end|>"."""
    text = text.encode("utf-8", "replace").decode()  # lone surrogates have no bytes
    added = {str(t) for t in tokenizer.get_added_vocab()} | set(tokenizer.all_special_tokens)
    control = sorted((t for t in added if re.fullmatch(r"\S{2,}", t)), key=len, reverse=True)
    return (
        re.sub("|".join(map(re.escape, control)), lambda m: f"{m[0][0]} {m[0][1:]}", text)
        if control
        else text
    )


def chat_ids(tokenizer: Tokenizer, text: str, *, thinking: bool | None) -> list[int]:
    """Ids of one user turn and the generation prompt, by the model's own chat template.

    thinking: passed to the template as `enable_thinking`; None leaves it out. On Qwen3 True ends on the bare assistant
    header and False on a closed, empty think block (S3). Control tokens in `text` are broken up: model-written text
    cannot open or close a turn.
    """
    extra = {} if thinking is None else {"enable_thinking": thinking}
    chat = [{"role": "user", "content": _neutral(text, tokenizer)}]
    return list(
        tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=False, **extra
        )
    )


# ------------------------------------------------------------------------------------------------ sampling


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_p 1 and top_k 0 are off."""

    temperature: float = 1.1
    top_p: float = 0.95
    top_k: int = 20
    max_new_tokens: int = 1024

    def __post_init__(self) -> None:
        if (
            self.temperature < 0
            or not 0 < self.top_p <= 1
            or self.top_k < 0
            or self.max_new_tokens < 1
        ):
            raise UserError(
                f"sampling needs temperature >= 0, 0 < top_p <= 1, top_k >= 0, max_new_tokens >= 1, got {self}"
            )


def sample_key(seed: int, step: int, problem_id: str, sample: int = 0) -> int:
    """64 bits that name one rollout; with a position they name one draw."""
    name = f"{seed}|{step}|{sample}|{problem_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")


def uniforms(keys_B: np.ndarray, position: int | np.ndarray) -> np.ndarray:
    """One float64 in [0, 1) per uint64 key: splitmix64 of key and position (one for all or [B]), its upper 52 bits."""
    with np.errstate(over="ignore"):
        z = keys_B + np.uint64(0x9E3779B97F4A7C15) * (np.asarray(position) + 1).astype(np.uint64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((z ^ (z >> np.uint64(31))) >> np.uint64(12)) * 2.0**-52


def select_tokens(logits_BV: torch.Tensor, u_B: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The token at quantile u of each row's temperature / top-k / top-p distribution, by inverse CDF in vocabulary order.

    Both filters keep by threshold, so equal logits are kept or dropped together and the order of a sort never matters.
    """
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    x_BV = (
        logits_BV.float().nan_to_num(0.0, 1e4, -1e4) / sampling.temperature
    )  # a broken model's loss is what stops it
    size = x_BV.shape[-1]
    if 0 < sampling.top_k < size:
        x_BV = x_BV.masked_fill(x_BV < x_BV.topk(sampling.top_k).values[:, -1:], -torch.inf)
    p_BV = x_BV.softmax(-1)
    kept_C = (
        (p_BV > 0).any(0).nonzero()[:, 0]
    )  # after top-k few columns of the vocabulary; zeros change no sum below
    p_BC = p_BV[:, kept_C]
    if sampling.top_p < 1:
        top = p_BC.topk(min(1024, len(kept_C))).values.double()
        if (
            len(kept_C) > top.shape[1] and (top.sum(-1) < sampling.top_p).any()
        ):  # rarely: the nucleus is wider than 1024 tokens
            top = p_BC.sort(descending=True).values.double()
        before = top.cumsum(-1) - top
        count_B1 = (before < sampling.top_p).sum(-1, keepdim=True)
        p_BC = p_BC.masked_fill(p_BC < top.gather(-1, count_B1 - 1).float(), 0)
    cdf_BC = p_BC.double().cumsum(-1)
    return kept_C[torch.searchsorted(cdf_BC, u_B[:, None] * cdf_BC[:, -1:], right=True)[:, 0]]


def stop_ids(model: Model, tokenizer: Tokenizer) -> list[int]:
    """Every id that ends a completion: the tokenizer's and all of the model's (Qwen3 has two)."""
    found: set[int] = set()
    for ids in (
        tokenizer.eos_token_id,
        causal_lm(model).config.eos_token_id,
        causal_lm(model).generation_config.eos_token_id,
    ):
        found |= set(ids) if isinstance(ids, list | tuple) else {ids}
    return sorted(i for i in found if i is not None)


TURN = {
    "cpu": 16,
    "cuda": 64,
}  # decoding steps between two looks at who has finished; a captured graph lives for one turn


@dataclass
class _Batch:
    """Rows that decode together, right-aligned: padding is on the left only, and masked."""

    which: list[int]  # the prompt of each row
    cache: Any
    mask_BL: torch.Tensor  # L is the cache's length
    logits_BV: torch.Tensor  # of the next token

    def step(self, causal: Model, ids_BL: torch.Tensor) -> None:
        positions = (self.mask_BL.cumsum(1) - 1).clamp(min=0)[
            :, -ids_BL.shape[1] :
        ]  # a row's own, whatever its padding
        out = causal(
            input_ids=ids_BL,
            attention_mask=self.mask_BL,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.logits_BV = out.logits[:, -1]

    def keep(self, rows: list[int]) -> None:
        """Only these rows, and no more padding than they need."""
        spare = self.mask_BL.shape[1] - int(self.mask_BL[rows].sum(1).max())
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys[rows, :, spare:], layer.values[rows, :, spare:]
        self.which, self.mask_BL, self.logits_BV = (
            [self.which[b] for b in rows],
            self.mask_BL[rows, spare:],
            self.logits_BV[rows],
        )

    def join(self, new: "_Batch") -> None:
        """The rows of both; the narrower side is padded on the left."""
        gaps = [
            max(0, b - a)
            for a, b in itertools.permutations((self.mask_BL.shape[1], new.mask_BL.shape[1]))
        ]
        pad = torch.nn.functional.pad
        for mine, other in zip(self.cache.layers, new.cache.layers):
            mine.keys, mine.values = (
                torch.cat([pad(x, (0, 0, gap, 0)) for x, gap in zip(both, gaps)])
                for both in ((mine.keys, other.keys), (mine.values, other.values))
            )
        self.mask_BL = torch.cat(
            [pad(x, (gap, 0)) for x, gap in zip((self.mask_BL, new.mask_BL), gaps)]
        )
        self.which, self.logits_BV = (
            self.which + new.which,
            torch.cat([self.logits_BV, new.logits_BV]),
        )


def _prefill(causal: Model, prompt_ids: list[list[int]], which: list[int]) -> _Batch:
    width = max(len(prompt_ids[i]) for i in which)
    ids_BL = torch.tensor(
        [[0] * (width - len(prompt_ids[i])) + prompt_ids[i] for i in which], device=causal.device
    )
    mask_BL = torch.tensor(
        [[0] * (width - len(prompt_ids[i])) + [1] * len(prompt_ids[i]) for i in which],
        device=causal.device,
    )
    batch = _Batch(which, DynamicCache(), mask_BL, torch.empty(0))
    batch.step(causal, ids_BL)
    return batch


class _InPlace(DynamicLayer):
    """A layer of the cache that has room for `steps` tokens more, and writes each at column `at`."""

    def __init__(self, layer: Any, steps: int, at: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = (
            torch.nn.functional.pad(x, (0, 0, 0, steps)) for x in (layer.keys, layer.values)
        )
        self.at, self.is_initialized = at, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.keys is not None and self.values is not None
        return self.keys.index_copy_(2, self.at, key_states), self.values.index_copy_(
            2, self.at, value_states
        )


_graphs: "weakref.WeakKeyDictionary[Model, bool]" = weakref.WeakKeyDictionary()


def _captured(causal: Model, forward: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """`forward` as a CUDA graph, which returns the same tensor each time, filled anew; or `forward` itself where that fails.

    forward: has run before; takes its input from tensors that stay where they are; run twice it does the same. What a model's first
    graph gives first must be what forward gives; if it is not, or nothing can be captured, that is said once and no other is tried.
    """

    def give_up(reason: str) -> Callable[[], torch.Tensor]:
        _graphs[causal] = False
        warnings.warn(
            f"no CUDA graph of a decoding step ({reason}): tokens are decoded without, slower",
            stacklevel=2,
        )
        return forward

    def replay() -> torch.Tensor:
        if not _graphs.get(causal, True):
            return forward()
        graph.replay()
        if causal not in _graphs:
            plain_BV = forward()
            gap, scale = (logits_BV - plain_BV).abs().max(), plain_BV.abs().max()
            _graphs[causal] = bool(gap <= 8 * torch.finfo(causal.dtype).eps * scale)
            return logits_BV if _graphs[causal] else give_up("it gives other logits")()
        return logits_BV

    if not _graphs.get(causal, True):
        return forward
    graph, mode = torch.cuda.CUDAGraph(), torch.cuda.get_sync_debug_mode()
    try:
        if (
            causal not in _graphs
        ):  # what waits for the device can't be captured, and a capture that fails can't be cleaned up after
            torch.cuda.set_sync_debug_mode("error")
            forward()
            torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # a graph has memory of its own
        with torch.cuda.stream(_side_stream()):
            graph.capture_begin(
                capture_error_mode="thread_local"
            )  # NCCL's watchdog is another thread
            try:
                logits_BV = forward()
            finally:
                graph.capture_end()
    except RuntimeError as e:
        return give_up(brief(e.__context__ or e))
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    return replay


@functools.cache
def _side_stream() -> Any:  # one, since each that multiplies matrices gets a workspace
    return torch.cuda.Stream()


def _turn(causal: Model, batch: _Batch, steps: int) -> Callable[[torch.Tensor], None]:
    """advance(token_B), to be called `steps` times: appends a token to each row, and sets the logits of the next.

    A growing cache is copied whole with every token. Here it is copied once a turn, with room for the turn, and every step has
    the same shapes at the same places: on CUDA the second and all later ones are replayed as one graph, launched at once.
    Attention in windows, with ALiBi, or by kernels that take no such mask keeps the growing cache.
    """
    device, config = causal.device, causal.config.get_text_config()
    windows = any(type(layer) is not DynamicLayer for layer in DynamicCache(config=config).layers)
    if (
        windows
        or getattr(config, "alibi", False)
        or config._attn_implementation not in ("sdpa", "eager")
    ):

        def grow(token_B: torch.Tensor) -> None:
            batch.mask_BL = torch.nn.functional.pad(batch.mask_BL, (0, 1), value=1)
            batch.step(causal, token_B[:, None])

        return grow
    at, position_B1 = (
        torch.tensor([batch.mask_BL.shape[1]], device=device),
        batch.mask_BL.sum(1, keepdim=True),
    )
    ids_B1, lowest = torch.zeros_like(position_B1), torch.finfo(causal.dtype).min
    closed_BL = torch.zeros(batch.mask_BL.shape, dtype=causal.dtype, device=device).masked_fill(
        batch.mask_BL == 0, lowest
    )
    mask_B11L = torch.nn.functional.pad(closed_BL, (0, steps), value=lowest)[:, None, None]
    batch.mask_BL = torch.nn.functional.pad(
        batch.mask_BL, (0, steps), value=1
    )  # as it is when the turn is over
    for i, layer in enumerate(
        batch.cache.layers
    ):  # one by one: the cache may be most of the memory
        batch.cache.layers[i] = _InPlace(layer, steps, at)

    def forward() -> torch.Tensor:
        mask_B11L.index_fill_(3, at, 0)
        out = causal(
            input_ids=ids_B1,
            attention_mask=mask_B11L,
            position_ids=position_B1,
            past_key_values=batch.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]

    step = forward

    def write(token_B: torch.Tensor) -> None:
        nonlocal step
        ids_B1.copy_(token_B[:, None])
        batch.logits_BV = step()
        if step is forward and device.type == "cuda":
            step = _captured(causal, forward)
        at.add_(1), position_B1.add_(1)

    return write


def stream(
    model: Model,
    tokenizer: Tokenizer,
    prompt_ids: list[list[int]],
    sampling: Sampling,
    keys: Sequence[int],
    rows: int,
) -> Iterator[list[tuple[int, list[int]]]]:
    """Completions as they finish: every turn a list, perhaps empty, of (index of the prompt, sampled ids with the stop id).

    keys: one `sample_key` per prompt. At most `rows` decode at a time: a finished row leaves the batch and the next prompt takes
    its place, so that none waits for the longest. The loop is written out, so the model's own generation_config has no say in it.
    Raises ValueError on another number of keys, an empty prompt or rows < 1.
    """
    if len(prompt_ids) != len(keys) or not all(prompt_ids) or rows < 1:
        raise ValueError(
            f"stream needs rows >= 1 and one key per non-empty prompt, got {rows}, {len(keys)} keys for {len(prompt_ids)} prompts"
        )
    causal, stops, training = causal_lm(model), set(stop_ids(model, tokenizer)), model.training
    waiting, found = collections.deque(range(len(prompt_ids))), [list[int]() for _ in prompt_ids]
    batch: _Batch | None = None
    config, attention = causal.config, causal.config._attn_implementation

    def over(i: int) -> bool:
        return len(found[i]) == sampling.max_new_tokens or (
            bool(found[i]) and found[i][-1] in stops
        )

    model.eval()
    if (
        attention == "flash_attention_2"
    ):  # in each layer of each step it would sort out a batch's padding anew
        config._attn_implementation = "sdpa"
    try:
        while waiting or batch:
            with torch.inference_mode():  # never across a yield
                if new := [
                    waiting.popleft()
                    for _ in range(min(len(waiting), rows - (len(batch.which) if batch else 0)))
                ]:
                    fresh = _prefill(causal, prompt_ids, new)
                    if batch:
                        batch.join(fresh)
                    else:
                        batch = fresh
                assert batch
                which, keys_B = (
                    batch.which,
                    np.array([keys[i] for i in batch.which], dtype=np.uint64),
                )
                advance = _turn(causal, batch, steps := TURN[causal.device.type])
                for _ in range(steps):
                    u_B = torch.from_numpy(
                        uniforms(keys_B, np.array([len(found[i]) for i in which]))
                    )
                    token_B = select_tokens(batch.logits_BV, u_B.to(causal.device), sampling)
                    for i, token in zip(which, token_B.tolist()):
                        if not over(i):
                            found[i].append(token)
                    if all(map(over, which)):
                        break
                    advance(token_B)
                del advance  # it holds the cache
                kept = [b for b, i in enumerate(which) if not over(i)]
                if not kept:
                    batch = None
                elif len(kept) < len(which):
                    batch.keep(kept)
            yield [(i, found[i]) for i in which if over(i)]
    finally:
        model.train(training)
        if attention == "flash_attention_2":
            config._attn_implementation = attention


def generate(
    model: Model,
    tokenizer: Tokenizer,
    prompt_ids: list[list[int]],
    sampling: Sampling,
    keys: Sequence[int],
    rows: int = 0,
) -> list[list[int]]:
    """One completion per prompt, in order, as sampled ids: the stop id included, nothing behind it.

    keys: one `sample_key` per prompt. rows: how many decode at a time; 0 is all.
    """
    turns = stream(model, tokenizer, prompt_ids, sampling, keys, rows or max(1, len(prompt_ids)))
    finished = dict(pair for turn in turns for pair in turn)
    return [finished[i] for i in range(len(prompt_ids))]


@dataclass(frozen=True)
class Rollout:
    """One sampled solution and its outcome (Eq. 1, §2). truncated: cut at the length limit, no stop id (S4)."""

    problem_id: str
    problem: str
    gold: str
    prompt_ids: list[int]
    completion_ids: list[int]
    text: str
    pred: str | None
    r: int
    truncated: bool


def sample_rollouts(
    model: Model,
    tokenizer: Tokenizer,
    problems: Sequence[Problem],
    prompt_ids: list[list[int]],
    sampling: Sampling,
    keys: Sequence[int],
    verifier: Verifier,
    rows: int = 0,
) -> list[Rollout]:
    """y ~ p_S(. | x) for each problem (Eq. 1), and the verifier's r. rows: how many decode at a time; 0 is all."""
    return judge(
        model,
        tokenizer,
        problems,
        prompt_ids,
        generate(model, tokenizer, prompt_ids, sampling, keys, rows),
        verifier,
    )


def judge(
    model: Model,
    tokenizer: Tokenizer,
    problems: Sequence[Problem],
    prompt_ids: Sequence[list[int]],
    completions: Sequence[list[int]],
    verifier: Verifier,
) -> list[Rollout]:
    """Sampled ids as rollouts: their text, its answer and the verifier's r."""
    stops = set(stop_ids(model, tokenizer))
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True) if completions else []
    think = tokenizer.encode(
        "<think>", add_special_tokens=False
    )  # some templates open the think block in the prompt
    opened = [
        len(think) == 1 and think[0] in ids[-2:] for ids in prompt_ids
    ]  # where it is no token of its own, none can be told
    preds = [extract_answer(("<think>" if was else "") + text) for was, text in zip(opened, texts)]
    right = verifier.verify_many([(x.answer, pred) for x, pred in zip(problems, preds)])
    return [
        Rollout(
            x.id,
            x.problem,
            x.answer,
            prompt,
            ids,
            text,
            pred,
            1 if ok else -1,
            not (ids and ids[-1] in stops),
        )
        for x, prompt, ids, text, pred, ok in zip(
            problems, prompt_ids, completions, texts, preds, right
        )
    ]


def make_complete(
    model: Model,
    tokenizer: Tokenizer,
    world: World,
    *,
    max_new_tokens: int,
    seed: int,
    rows: int = 32,
) -> Callable[[list[str]], list[str]]:
    """complete(prompts) -> replies for the skill bank, shared out over ranks: a collective, with the same prompts everywhere.

    Thinking off. A prompt is answered greedily; asked again in the very next call, by sampling at the training defaults (D4).
    """
    asked: dict[str, int] = {}  # of the last call alone: a resumed run knows no other

    def complete(prompts: list[str]) -> list[str]:
        nonlocal asked
        asked = {prompt: asked.get(prompt, -1) + 1 for prompt in prompts}
        jobs = [
            (
                asked[prompt] > 0,
                i,
                chat_ids(tokenizer, prompt, thinking=False),
                sample_key(seed, 0, prompt, asked[prompt]),
            )
            for i, prompt in enumerate(prompts)
        ]
        replies: dict[int, str] = {}
        for again in (False, True):
            todo = sorted((job for job in jobs if job[0] == again), key=lambda job: len(job[2]))[
                world.rank :: world.size
            ]
            sampling = (
                Sampling(max_new_tokens=max_new_tokens)
                if again
                else Sampling(0.0, 1.0, 0, max_new_tokens)
            )
            ids = generate(
                model, tokenizer, [job[2] for job in todo], sampling, [job[3] for job in todo], rows
            )
            replies.update(
                zip(
                    (job[1] for job in todo),
                    tokenizer.batch_decode(ids, skip_special_tokens=True) if ids else [],
                )
            )
        everyone = {
            int(i): reply
            for share in gather({str(i): reply for i, reply in replies.items()}, world)
            for i, reply in share.items()
        }
        return [everyone[i] for i in range(len(prompts))]

    return complete


# ------------------------------------------------------------------------------------------------ log-probabilities

SLICE_LOGITS = {
    "cpu": 1 << 25,
    "cuda": 1 << 27,
}  # fp32 logits alive at once in the head: 128 and 512 MiB
_sliced: "weakref.WeakKeyDictionary[Model, bool]" = weakref.WeakKeyDictionary()


class _HeadLogprobs(torch.autograd.Function):
    """log softmax(hidden W^T / temperature)[ids] in fp32, one slice of logits alive at a time, forward and backward.

    Backward computes a slice's logits again and turns them in place into its gradient, g * (onehot(ids) - softmax).
    weight_VD: fp32; or on CUDA bf16, as hidden is: products of bf16 numbers are exact in fp32, and tensor cores add them in fp32.
    Its logits' gradient is then rounded to bf16, as the hidden states' is.
    """

    @staticmethod
    def slices(hidden_ND, weight_VD, ids_N, temperature):
        rows = max(1, SLICE_LOGITS[weight_VD.device.type] // weight_VD.shape[0])
        for at in range(0, len(ids_N), rows):
            h = hidden_ND[at : at + rows].to(weight_VD.dtype)
            yield (  # with no name here, so that the caller can let go of the logits
                at,
                h,
                ids_N[at : at + rows, None],
                (
                    torch.mm(h, weight_VD.t())
                    if h.dtype == torch.float32
                    else torch.mm(h, weight_VD.t(), out_dtype=torch.float32)
                ).div_(temperature),
            )

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, ids_N, temperature):
        ctx.save_for_backward(hidden_ND, weight_VD, ids_N)
        ctx.temperature, logp_N = temperature, torch.empty(len(ids_N), device=hidden_ND.device)
        for at, h, i, x in _HeadLogprobs.slices(hidden_ND, weight_VD, ids_N, temperature):
            chosen = x.gather(1, i) - (top := x.amax(1, keepdim=True))
            logp_N[at : at + len(h)] = (chosen - x.sub_(top).exp_().sum(1, keepdim=True).log())[
                :, 0
            ]
            del x  # before the next slice is made
        return logp_N

    @staticmethod
    def backward(ctx, grad_N):
        hidden_ND, weight_VD, ids_N = ctx.saved_tensors
        to_hidden, to_weight = (
            torch.empty_like(hidden_ND),
            torch.zeros_like(weight_VD) if ctx.needs_input_grad[1] else None,
        )
        for at, h, i, x in _HeadLogprobs.slices(hidden_ND, weight_VD, ids_N, ctx.temperature):
            g = grad_N[at : at + len(h), None] / ctx.temperature
            z = x.sub_(x.amax(1, keepdim=True)).exp_().sum(1, keepdim=True)
            x.mul_(-g / z).scatter_add_(1, i, g)
            to_hidden[at : at + len(h)] = torch.mm(x.to(h.dtype), weight_VD)
            if to_weight is not None:
                to_weight.addmm_(x.t(), h)
            del x
        return to_hidden, to_weight, None, None


def head_is_sliced(model: Model) -> bool:
    """Whether this model's logits are just `head(hidden)`, so that the head may run on slices of positions.

    Compares both once per model, on a few ids. Soft-capped or scaled logits (Gemma 2, Cohere, Granite, ...) differ: such
    a model is scored by its own full logits, which costs memory in proportion to T*V.
    """
    causal = causal_lm(model)
    if causal not in _sliced:
        head, backbone = causal.get_output_embeddings(), causal.base_model
        ids = (
            torch.arange(1, 9, device=causal.device)
            * 7919
            % causal.config.get_text_config().vocab_size
        )[None]
        with torch.no_grad():
            full = causal(input_ids=ids, use_cache=False).logits.float()
            if type(head) is torch.nn.Linear and head.bias is None and backbone is not causal:
                ours = head(backbone(input_ids=ids, use_cache=False).last_hidden_state).float()
                _sliced[causal] = bool(
                    (ours - full).abs().max() <= torch.finfo(causal.dtype).eps * full.abs().max()
                )
            else:
                _sliced[causal] = False
    return _sliced[causal]


def token_logprobs(
    model: Model,
    prompt_ids: list[list[int]],
    completion_ids: list[list[int]],
    *,
    grad: bool = False,
    temperature: float = 1.0,
) -> torch.Tensor:
    """log pi(y_t | prompt, y_<t) of each row's completion tokens (Eqs. 4, 5): [B, T_max] fp32 nats, zeros behind a row's end.

    Prompt and completion are joined without padding and padded behind only (D6): a causal model can't look there, so no
    attention mask is needed. No logits over prompt positions, no [B, T, V] tensor. With grad, the model is put in train
    mode for the while (it has no dropout; gradient checkpointing wants it); without, in eval mode under no_grad.
    Raises ValueError on row counts that differ, and on an empty prompt.
    """
    out_BT = torch.zeros(
        len(completion_ids),
        max(map(len, completion_ids), default=0),
        device=causal_lm(model).device,
    )
    x_N, ids_N, row_N, t_N = predictors(model, prompt_ids, completion_ids, grad)
    if not len(ids_N):
        return out_BT
    with torch.set_grad_enabled(grad):
        if head_is_sliced(model):
            weight_VD = causal_lm(model).get_output_embeddings().weight
            as_it_is = (
                weight_VD.is_cuda
                and weight_VD.dtype == x_N.dtype == torch.bfloat16
                and not weight_VD.requires_grad
            )
            logp_N = _HeadLogprobs.apply(
                x_N, weight_VD if as_it_is else weight_VD.float(), ids_N, temperature
            )
        else:
            logp_N = -torch.nn.functional.cross_entropy(
                x_N.float() / temperature, ids_N, reduction="none"
            )
    return out_BT.index_put((row_N, t_N), logp_N)


def predictors(
    model: Model, prompt_ids: list[list[int]], completion_ids: list[list[int]], grad: bool
) -> tuple[torch.Tensor, ...]:
    """What predicts each completion token, row after row: x_N, and the token's id, row and place.

    x_N: last hidden states [N, D]; full logits [N, V] where the head is more than a matrix product.
    """
    if len(prompt_ids) != len(completion_ids) or not all(prompt_ids):
        raise ValueError(
            f"token_logprobs needs one non-empty prompt per completion, got {len(prompt_ids)} and {len(completion_ids)}"
        )
    causal = causal_lm(model)
    sliced = head_is_sliced(model)
    lengths = [len(c) for c in completion_ids]
    row_N = torch.tensor(
        [b for b, n in enumerate(lengths) for _ in range(n)], dtype=torch.long, device=causal.device
    )
    t_N = torch.tensor(
        [t for n in lengths for t in range(n)], dtype=torch.long, device=causal.device
    )
    if not sum(lengths):
        return torch.zeros(0, 1, device=causal.device), row_N, row_N, t_N
    width = max(len(p) + len(c) for p, c in zip(prompt_ids, completion_ids))
    ids = torch.tensor(
        [p + c + [0] * (width - len(p) - len(c)) for p, c in zip(prompt_ids, completion_ids)],
        device=causal.device,
    )
    at_N = (
        t_N + torch.tensor([len(p) for p in prompt_ids], device=causal.device)[row_N]
    )  # where y_t stands; t-1 predicts it
    training = model.training
    model.train(grad)
    with torch.set_grad_enabled(grad):
        out = (
            causal.base_model(input_ids=ids, use_cache=False).last_hidden_state
            if sliced
            else causal(input_ids=ids, use_cache=False).logits
        )
        x_N = out[row_N, at_N - 1]
    model.train(training)
    return x_N, ids[row_N, at_N], row_N, t_N


def over_slices(
    model: Model,
    states: Sequence[torch.Tensor],
    ids_T: torch.Tensor,
    f: Callable[..., torch.Tensor],
    temperature: float = 1.0,
) -> torch.Tensor:
    """f(ids_n, logits_nV, ...) with the fp32 logits / temperature of each of `states` [T, D], a slice of positions at a time.

    f returns one row per position; so does this. Backward computes a slice's logits again, so that whole [T, V] logits are
    never alive, whatever divergence f makes of them.
    """
    weight_VD = causal_lm(model).get_output_embeddings().weight.float()
    rows = max(
        1, SLICE_LOGITS[weight_VD.device.type] // (weight_VD.shape[0] * 4 * len(states))
    )  # f has its own temporaries

    def one(ids_n: torch.Tensor, *states_nD: torch.Tensor) -> torch.Tensor:
        return f(ids_n, *(torch.mm(h.float(), weight_VD.t()) / temperature for h in states_nD))

    return torch.cat(
        [
            checkpoint(
                one,
                ids_T[at : at + rows],
                *(h[at : at + rows] for h in states),
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for at in range(0, len(ids_T), rows)
        ]
    )


def packs(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices grouped by similar length, each group at most `budget` tokens when padded (a longer row goes alone)."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= budget:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups
