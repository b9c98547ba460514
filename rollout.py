"""A rollout: problem -> prompt ids -> sampled ids -> text -> answer -> outcome r in {-1, +1}.

Two guarantees. The ids that we sample are the ids that we score: we never tokenize decoded text.
And a token's random number depends on (seed, step, problem, sample index, position) alone, so the
batch, the rank and the order of work change samples only through the rounding of the logits.

Dimension key: B rows of a batch, L places of a padded row, V vocabulary, C tokens with probability
> 0, M the most likely of these; in a cache H heads of D numbers.
"""

import collections
import hashlib
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, GenerationConfig, LogitsProcessor
from transformers.cache_utils import DynamicLayer
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer as HybridLayer

THINK = ("<think>", "</think>")
LONGEST_TURN = 64  # tokens per call of `generate`; then finished rows leave
TURN_TOKENS = {"cpu": 16}  # by kind of device; on all others LONGEST_TURN
FREE_PLACES = 64  # empty places for coming tokens, at the end of each new `RoomyLayer` buffer
# Most tokens of a prefill, padding included, as its mask grows with rows x longest^2. (A single row
# may have more.)
READ_TOKENS = 16384
# Share of a GPU's memory for weights and cache. The rest is for the prefill of one row of 38,912
# tokens (6 GB for an 8B model), the logits of 64 rows and a second copy of one layer's cache
# (estimated, not measured).
MEMORY_SHARE = 0.8
STATES = ("conv_states", "recurrent_states")  # a cache layer's dicts of states, whose size is fixed


def causal_lm(model):
    """The transformers model inside a PEFT wrapper, adapters included; or the model itself.

    scoring.py and lib/model.py repeat this function, so that each file can be copied alone.
    """
    return model.get_base_model() if hasattr(model, "get_base_model") else model


# --------------------------------------------------------------------------------- text and ids


def chat_ids(tokenizer, text: str, *, thinking: str) -> list[int]:
    """Ids of one user turn and the generation prompt, in the model's own chat template (S3).

    thinking: "closed" ends on an empty think block, so the model answers at once; "bare" ends on
    the assistant's header, where a thinking model opens a block by itself; "open" ends inside an
    open block. A template without `enable_thinking` makes closed and bare the same prompt.
    Control tokens in `text` are broken up: text that a model wrote cannot open or close a turn.
    ValueError for any other value of `thinking`.
    """
    if thinking not in ("closed", "bare", "open"):
        raise ValueError(f"chat_ids: thinking must be closed, bare or open, got {thinking!r}")
    chat = [{"role": "user", "content": _neutral(tokenizer, text)}]
    settings: dict[str, Any] = {"add_generation_prompt": True, "return_dict": False}
    settings["date_string"] = "26 Jul 2024"  # Llama's template shows today's date without it (S24)
    settings["enable_thinking"] = thinking != "closed"
    ids = list(tokenizer.apply_chat_template(chat, **settings))
    # The last nine ids hold the tag, even if it is several ids, and a line feed.
    if thinking == "open" and not tokenizer.decode(ids[-9:]).rstrip().endswith("<think>"):
        ids += tokenizer.encode("<think>\n", add_special_tokens=False)
    return ids


def _neutral(tokenizer, text: str) -> str:
    """The text with a blank inside each control token: "<|im_end|>" becomes "< |im_end|>".

    Halves of surrogate pairs, which no tokenizer accepts, become "?".
    """
    text = text.encode("utf-8", "replace").decode()
    tokens = {*map(str, tokenizer.get_added_vocab()), *tokenizer.all_special_tokens}
    control = [token for token in tokens if re.fullmatch(r"\S{2,}", token)]
    if not control:
        return text
    pattern = "|".join(map(re.escape, sorted(control, key=len, reverse=True)))  # longest first
    return re.sub(pattern, lambda match: f"{match[0][0]} {match[0][1:]}", text)


def text_of(tokenizer, ids: list[int]) -> str:
    """Decode ids, without special tokens. Think tags stay, because the answer comes after them."""
    hidden = {*tokenizer.all_special_ids}
    for i, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            hidden.add(i)
    hidden -= {tokenizer.added_tokens_encoder.get(tag) for tag in THINK}
    return tokenizer.decode([i for i in ids if i not in hidden])


def stop_ids(model, tokenizer) -> list[int]:
    """Every id that ends a completion: the tokenizer's and all of the model's (Qwen3 has two).

    model: an outline without weights is enough. Raises ValueError if no id ends a completion.
    """
    causal = causal_lm(model)
    config = causal.config
    stops: set[int | None] = set()
    for source in (tokenizer, config, config.get_text_config(), causal.generation_config):
        ids = getattr(source, "eos_token_id", None)
        stops.update(ids if isinstance(ids, list | tuple) else [ids])
    if not stops - {None}:
        fix = "name `eos_token_id` in its generation_config.json"
        raise ValueError(f"model {config.name_or_path}: no id ends a completion; {fix}")
    return sorted(i for i in stops if i is not None)


def context_limit(model) -> float:
    """The model's longest context in tokens; infinite where its config names no limit."""
    config = causal_lm(model).config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or math.inf
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "yarn":  # for llama3 the config's number is stretched already
        limit = max(limit, rope["original_max_position_embeddings"] * rope["factor"])
    return limit


# ---------------------------------------------------------------------------------- keyed draws


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn (Tab. 11). Temperature 0 is greedy; top_p 1 and top_k 0 are off."""

    temperature: float = 1.1
    top_p: float = 0.95
    top_k: int = 20
    max_new_tokens: int = 1024


def sample_key(seed: int, step: int, name: str, sample: int = 0) -> int:
    """The 64-bit key of one completion; the key and a position determine one draw.

    step: 0 outside training steps. name: what is completed, such as a problem's id or a prompt.
    sample: differs between the completions of one name in one step, as a problem's epoch does.
    """
    words = f"{seed}|{step}|{sample}|{name}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "big")


def uniforms(keys_B: np.ndarray, position_B: np.ndarray) -> np.ndarray:
    """One float64 in [0, 1) per uint64 key: the upper 52 bits of splitmix64 of key and position."""
    with np.errstate(over="ignore"):
        z = keys_B + np.uint64(0x9E3779B97F4A7C15) * (np.asarray(position_B) + 1).astype(np.uint64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((z ^ (z >> np.uint64(31))) >> np.uint64(12)) * 2.0**-52


def select_tokens(logits_BV: Tensor, u_B: Tensor, sampling: Sampling) -> Tensor:
    """The token at quantile u of each row's temperature, top-k and top-p distribution: ids [B].

    logits_BV: of any float dtype. u_B: float64 in [0, 1).
    We invert the CDF in vocabulary order. Both filters are thresholds: they keep or drop equal
    logits together, so the result never depends on the order of a sort.
    """
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    # A broken model shows later, by its non-finite loss; here its row only needs some token.
    x_BV = logits_BV.float().nan_to_num(0.0, 1e4, -1e4) / sampling.temperature
    if 0 < sampling.top_k < x_BV.shape[-1]:
        least_B1 = x_BV.topk(sampling.top_k).values[:, -1:]
        x_BV = x_BV.masked_fill(x_BV < least_B1, -torch.inf)
    p_BV = x_BV.softmax(-1)
    columns_C = (p_BV > 0).any(0).nonzero()[:, 0]  # that some row may draw: few after top-k
    p_BC = p_BV[:, columns_C]
    if sampling.top_p < 1:
        top_BM = p_BC.topk(min(1024, len(columns_C))).values.double()
        if (top_BM.sum(-1) < sampling.top_p).any():  # a nucleus of over 1,024 tokens
            top_BM = p_BC.sort(descending=True).values.double()  # sorting all takes 3 times as long
        before_BM = top_BM.cumsum(-1) - top_BM
        count_B1 = (before_BM < sampling.top_p).sum(-1, keepdim=True)
        p_BC = p_BC.masked_fill(p_BC < top_BM.gather(-1, count_B1 - 1).float(), 0)
    cdf_BC = p_BC.double().cumsum(-1)
    u_B1 = u_B[:, None] * cdf_BC[:, -1:]
    return columns_C[torch.searchsorted(cdf_BC, u_B1, right=True)[:, 0]]


class KeyedDraw(LogitsProcessor):
    """Leaves each row only the token that its key draws; `generate` then picks it greedily.

    starts: the place in each padded row where its completion begins.
    """

    def __init__(self, keys: Sequence[int], starts: Sequence[int], sampling: Sampling):
        self.keys_B = np.array(keys, dtype=np.uint64)
        self.starts_B = np.array(starts)
        self.sampling = sampling

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        u_B = torch.from_numpy(uniforms(self.keys_B, input_ids.shape[1] - self.starts_B))
        token_B = select_tokens(scores, u_B.to(scores.device), self.sampling)
        return scores.fill_(-torch.inf).scatter_(1, token_B[:, None], 0)  # `scores` is a copy


# ------------------------------------------------------------------------------------- decoding


@dataclass
class Job:
    """A prompt to complete. `stream` fills in the sampled ids, and sets `done` after the last."""

    index: int  # the caller's number for this job
    prompt: list[int]
    key: int  # a `sample_key`
    limit: int | None = None  # most tokens of the completion; None: the sampling's max_new_tokens
    x: Any = None  # the problem, with .id, .problem, .answer; None: nobody judges the completion
    ids: list[int] = field(default_factory=list)
    done: bool = False

    def begin(self, sampling: Sampling, context: float) -> None:
        """Set the limit, which is at most what the prompt leaves of the model's context (S35)."""
        limit = sampling.max_new_tokens if self.limit is None else self.limit
        self.limit = int(max(0, min(limit, context - len(self.prompt))))
        if self.limit == 0:
            self.done = True

    @property
    def tokens_left(self) -> int:
        """How many tokens may still be sampled, after `begin`."""
        assert self.limit is not None
        return self.limit - len(self.ids)


def stream(
    model, tokenizer, jobs: Sequence[Job], sampling: Sampling, rows: int, places: float = 0
) -> Iterator[list[Job]]:
    """Decode jobs, some tokens a turn; yield after each turn a list, often empty, of finished jobs.

    rows: maximum number of jobs decoded at once, each a row of the batch; when one is done, the
    next joins. places: maximum number of tokens in the cache, with padding and free places; 0: as
    many as memory holds. If the rows need more, the last to join leave, wait and are prefilled
    again later; one row always stays. A job's sampled ids end on a stop id, at its limit, or with
    the context (S35). If the prompt fills the context, there are none.
    A turn prefills the jobs that join, with a first token; then each row gets up to LONGEST_TURN:
    both by Hugging Face's `generate`, without the model's generation_config. Until the stream ends,
    the model is in eval mode: GPT-2, with activation checkpointing, has no cache in train mode.
    Raises ValueError on an empty prompt, on rows < 1, and as `stop_ids` does.
    """
    if rows < 1 or not all(job.prompt for job in jobs):
        raise ValueError(f"stream needs rows >= 1, got {rows}, and prompts that are not empty")
    causal = causal_lm(model)
    stops = stop_ids(model, tokenizer)
    was_training = model.training
    for job in jobs:
        job.begin(sampling, context_limit(model))
    waiting = collections.deque(job for job in jobs if not job.done)
    running: list[Job] = []
    cache: Any = None  # of the running rows: all their tokens but the last, hence the - 1 below
    model.eval()
    try:
        token_bytes, row_bytes = cache_bytes(causal)
        places = places or cache_places(causal.device, token_bytes)
        extra = LONGEST_TURN + FREE_PLACES + row_bytes / token_bytes  # of a row, besides its tokens
        yield [job for job in jobs if job.done]  # whose prompts fill the context
        while waiting or running:
            while pack := _next_pack(waiting, running, rows, places, extra):
                fresh = _empty_cache(causal)
                _decode(causal, pack, fresh, 1, sampling, stops)  # prefill; adds one token
                running += pack
                width = _width(running) - 1
                cache = _gathered([cache, fresh], slice(None), width) if cache else fresh
            if not any(job.done for job in running):  # else the rows that are done leave first
                _decode(causal, running, cache, _turn(causal, running), sampling, stops)
            yield [job for job in running if job.done]
            staying = [b for b, job in enumerate(running) if not job.done]
            while not _fit([running[b] for b in staying], places, extra):
                waiting.appendleft(running[staying.pop()])
            if len(staying) < len(running):
                running = [running[b] for b in staying]
                width = _width(running) - 1
                cache = _gathered([cache], staying, width) if running else None
    finally:
        model.train(was_training)


def _width(jobs: Iterable[Job]) -> int:
    """Tokens of the longest row, prompt included; 0 without rows."""
    return max((len(job.prompt) + len(job.ids) for job in jobs), default=0)


def _fit(jobs: Sequence[Job], places: float, extra: float = 0) -> bool:
    """Whether the rows fit if each is as wide as the longest, plus `extra`. One row always fits."""
    return len(jobs) < 2 or len(jobs) * (_width(jobs) + extra) <= places


def _next_pack(
    waiting: collections.deque[Job], running: list[Job], rows: int, places: float, extra: float
) -> list[Job]:
    """Take the next jobs that fit beside the running ones and into one prefill."""
    pack: list[Job] = []
    while waiting and len(running) + len(pack) < rows:
        longer = [*pack, waiting[0]]
        if not (_fit([*running, *longer], places, extra) and _fit(longer, READ_TOKENS)):
            break
        pack.append(waiting.popleft())
    return pack


def _turn(causal, jobs: list[Job]) -> int:
    """How many tokens the next turn adds to each row: at most the largest `tokens_left`."""
    most = TURN_TOKENS.get(causal.device.type, LONGEST_TURN)
    left = context_limit(causal) - _width(jobs)  # above 0, as a row at the context's end is done
    return int(min(most, max(job.tokens_left for job in jobs), left))


@torch.inference_mode()
def _decode(
    causal,
    jobs: list[Job],
    cache: DynamicCache,
    steps: int,
    sampling: Sampling,
    stops: list[int],
) -> None:
    """Add up to `steps` tokens to each job.

    The cache is empty (prefill), or holds everything but each row's last token.
    """
    width = _width(jobs)
    ids = []
    mask = []
    starts = []
    for job in jobs:
        ids_so_far = job.prompt + job.ids
        padding = [0] * (width - len(ids_so_far))
        ids.append(padding + ids_so_far)
        mask.append(padding + [1] * len(ids_so_far))
        starts.append(width - len(job.ids))
    draw = KeyedDraw([job.key for job in jobs], starts, sampling)
    ids_BL, mask_BL = torch.tensor([ids, mask], device=causal.device)
    settings = GenerationConfig(max_new_tokens=steps, eos_token_id=stops, pad_token_id=0)
    model_settings = causal.generation_config
    causal.generation_config = GenerationConfig()  # the model's would fill gaps in `settings`
    try:
        # `cache` was `past_key_values` before transformers 5.24.
        out_BL = causal.generate(ids_BL, settings, [draw], attention_mask=mask_BL, cache=cache)
    finally:
        causal.generation_config = model_settings
    for job, new_ids in zip(jobs, out_BL[:, width:].tolist()):
        for token in new_ids:
            if not job.done:  # nothing is taken after a stop id
                job.ids.append(token)
                job.done = token in stops or job.tokens_left == 0


def cache_places(device: torch.device, token_bytes: int) -> float:
    """The number of tokens whose keys and values fit in memory.

    On a GPU we take MEMORY_SHARE of its memory, less what is allocated. We do not ask what is free,
    so that the same card always decodes the same batches. Elsewhere we take half of the machine's
    memory, divided by the number of processes that torchrun started on it.
    """
    if device.type == "cuda":
        total = MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory
        return (total - torch.cuda.memory_allocated(device)) / token_bytes
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2
    return total / int(os.environ.get("LOCAL_WORLD_SIZE", 1)) / token_bytes


def cache_bytes(causal) -> tuple[int, int]:
    """Bytes of a token's keys and values in all layers, and of a row's states, whose size is fixed.

    We measure them by decoding one token. The model must be in eval mode.
    """
    cache: Any = _empty_cache(causal)
    job = Job(0, [0], key=0, limit=1)  # any id will do
    _decode(causal, [job], cache, 1, Sampling(temperature=0.0), stops=[0])
    token_bytes = row_bytes = 0
    for layer in cache.layers:
        for x in getattr(layer, "buffers", ()):
            token_bytes += x[:, :, 0].nbytes
        for name in STATES:
            for x in getattr(layer, name, {}).values():
                if x is not None:
                    row_bytes += x.nbytes
    return token_bytes, row_bytes


class RoomyLayer(DynamicLayer):
    """Keys and values [B, H, L, D] as views of buffers that have free places at their end.

    transformers' `DynamicLayer` copies all keys and values for each new token.
    """

    def update(self, key_states, value_states, *args, **kwargs):
        """Append keys and values, and return all. Full buffers are copied into longer ones."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.hold([key_states[:, :, :0]], [value_states[:, :, :0]], 0)
        begin = self.get_seq_length()
        end = begin + key_states.shape[2]
        if end > self.buffers[0].shape[2]:
            self.hold([self.keys], [self.values], begin, end - begin + FREE_PLACES)
        for buffer, new in zip(self.buffers, (key_states, value_states)):
            buffer[:, :, begin:end] = new
        self.keys, self.values = (buffer[:, :, :end] for buffer in self.buffers)
        return self.keys, self.values

    def hold(self, keys: list, values: list, width: int, spare: int = FREE_PLACES) -> None:
        """Join the rows of these tensors, each cut or padded on the left to `width` places.

        Behind them the buffers have `spare` free places.
        """
        self.buffers: list[Tensor] = []
        for parts in (keys, values):
            padded = [pad(x, (0, 0, width - x.shape[2], spare)) for x in parts]
            self.buffers.append(torch.cat(padded) if padded[1:] else padded[0])
        self.keys, self.values = (buffer[:, :, :width] for buffer in self.buffers)


class RoomyHybridLayer(RoomyLayer, HybridLayer):  # type: ignore[misc, override]
    """A `RoomyLayer` that also has the states of linear attention (Falcon-H1)."""


def _empty_cache(causal) -> DynamicCache:
    """An empty cache, whose rows can leave and be joined by others.

    The config decides the kind of each layer (states for linear attention), with two exceptions:
    keys and values get free places, and a layer with a sliding window keeps all keys and values,
    because transformers' own layer counts tokens, and would count wrong after we cut or pad.
    """
    cache = DynamicCache(config=causal.config)
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, HybridLayer):
            cache.layers[i] = RoomyHybridLayer(layer.number_of_states)
        elif isinstance(layer, DynamicLayer):
            cache.layers[i] = RoomyLayer()
    return cache


def _gathered(caches: list[Any], rows: Any, width: int) -> DynamicCache:
    """Move these rows of all caches into the first one, with `width` places of keys and values.

    We cut or pad them on the left. No row attends to the padding: the mask of the next call leaves
    it out. We empty the other caches layer by layer, so that nothing is in memory twice.
    """
    for i, layer in enumerate(caches[0].layers):
        layers = [cache.layers[i] for cache in caches]
        for cache in caches[1:]:
            cache.layers[i] = None
        if hasattr(layer, "buffers"):
            keys = [x.keys[rows] for x in layers]
            values = [x.values[rows] for x in layers]
            layer.hold(keys, values, width)
        for name in STATES:
            states = getattr(layer, name, {})
            for number, state in [*states.items()]:
                if state is not None:
                    states[number] = torch.cat([getattr(x, name)[number][rows] for x in layers])
    return caches[0]


def generate(
    model,
    tokenizer,
    prompt_ids: list[list[int]],
    sampling: Sampling,
    keys: Sequence[int],
    rows: int = 0,
) -> list[list[int]]:
    """One completion per prompt, in order, as sampled ids; see `stream`. rows 0: all at once."""
    jobs = []
    for i, (prompt, key) in enumerate(zip(prompt_ids, keys, strict=True)):
        jobs.append(Job(i, prompt, key=key))
    for _ in stream(model, tokenizer, jobs, sampling, rows or max(1, len(jobs))):
        pass  # `stream` fills in the jobs
    return [job.ids for job in jobs]


# ------------------------------------------------------------------------------------- outcomes


@dataclass(frozen=True)
class Rollout:
    """One sampled solution and its outcome (Eq. 1, §2)."""

    problem_id: str
    problem: str
    gold: str
    prompt_ids: list[int]
    completion_ids: list[int]
    text: str
    pred: str | None
    r: int
    truncated: bool  # cut at the length limit: it has no stop id (S4)


def rollouts(
    tokenizer, stops: Sequence[int], verifier, turns: Iterable[list[Job]]
) -> Iterator[list[tuple[Job, Rollout]]]:
    """Judge what `stream` decodes: for each turn, its finished jobs with their rollouts (Eq. 1).

    stops: from `stop_ids`. verifier: its judge(cases) takes pairs of a problem and a completion's
    text, and returns objects with .answer and .right, in order. turns: from `stream`; each job has
    a problem. A completion without an answer, such as one that was cut too early, has r = -1.
    ValueError if a verdict is not a bool.
    """
    for jobs in turns:
        texts = []
        cases = []
        for job in jobs:
            text = text_of(tokenizer, job.ids)
            texts.append(text)
            cases.append((job.x, think_tag(tokenizer, job.prompt) + text))
        verdicts = verifier.judge(cases) if jobs else []
        judged = []
        for job, text, verdict in zip(jobs, texts, verdicts, strict=True):
            x = job.x
            if not isinstance(verdict.right, bool | np.bool_):
                rule = "a verdict must be True or False"
                raise ValueError(f"verifier: {rule}, got {verdict.right!r} for {x}")
            roll = Rollout(
                problem_id=x.id,
                problem=x.problem,
                gold=x.answer,
                prompt_ids=job.prompt,
                completion_ids=job.ids,
                text=text,
                pred=verdict.answer,
                r=1 if verdict.right else -1,
                truncated=not job.ids or job.ids[-1] not in stops,
            )
            judged.append((job, roll))
        yield judged


def think_tag(tokenizer, prompt: list[int]) -> str:
    """The tag "<think>" if the prompt ends on it, so that the completion lacks it; else "".

    Some templates end on an open tag, perhaps followed by a line feed. The tag must be one id.
    """
    opening, closing = (tokenizer.encode(tag, add_special_tokens=False) for tag in THINK)
    last_ids = [prompt[-1:], prompt[-2:-1]]  # each as a list, like `opening` and `closing`
    return THINK[0] if opening in last_ids and closing not in last_ids else ""
