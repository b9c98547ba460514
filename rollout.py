"""A rollout: problem -> prompt ids -> sampled ids -> text -> answer -> outcome r in {-1, +1}.

Two promises. The ids that were sampled are the ids that are scored: text never becomes ids again.
And the draw for a token is a pure function of (seed, step, problem, sample index, position): the
batch, the rank and the order of work reach it only through the rounding of the logits.

Dimension key: B rows, L places of a padded batch, V vocabulary, C its kept columns.
"""

import collections
import hashlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from tqdm import tqdm
from transformers import DynamicCache, GenerationConfig, LogitsProcessor

from cli import UserError
from distributed import World, gather
from policy import THINK, Ids, Model, causal_lm, stop_ids, text_of
from policy import chat_ids as chat_ids  # for those who look for it here
from policy import token_logprobs as token_logprobs
from verify import Judge
from verify import Verifier as Verifier
from verify import extract_answer as extract_answer

Turn = list[tuple[int, Ids]]  # what a turn of decoding has finished: index of a prompt, sampled ids
TURN = {"cpu": 16, "cuda": 64}  # tokens of one call of `generate`, then a look at who has finished


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn (Tab. 11). Temperature 0 is greedy; top_p 1 and top_k 0 are off."""

    temperature: float = 1.1
    top_p: float = 0.95
    top_k: int = 20
    max_new_tokens: int = 1024

    def __post_init__(self) -> None:
        good = self.temperature >= 0 and 0 < self.top_p <= 1
        if not good or self.top_k < 0 or self.max_new_tokens < 1:
            rule = "temperature >= 0, 0 < top_p <= 1, top_k >= 0 and max_new_tokens >= 1"
            raise UserError(f"sampling needs {rule}, got {self}")


def sample_key(seed: int, step: int, problem_id: str, sample: int = 0) -> int:
    """64 bits that name one rollout; together with a position they name one draw."""
    name = f"{seed}|{step}|{sample}|{problem_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")


def uniforms(keys_B: np.ndarray, position_B: np.ndarray) -> np.ndarray:
    """One float64 in [0, 1) per uint64 key: splitmix64 of key and position, its upper 52 bits."""
    with np.errstate(over="ignore"):
        z = keys_B + np.uint64(0x9E3779B97F4A7C15) * (np.asarray(position_B) + 1).astype(np.uint64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((z ^ (z >> np.uint64(31))) >> np.uint64(12)) * 2.0**-52


def select_tokens(logits_BV: Tensor, u_B: Tensor, sampling: Sampling) -> Tensor:
    """The token at quantile u of each row's temperature, top-k and top-p distribution: [B].

    By inverse CDF in vocabulary order. Both filters keep by threshold, so equal logits are kept or
    dropped together, and the order of a sort never matters.
    """
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    # A broken model is stopped by its non-finite loss, not here.
    x_BV = logits_BV.float().nan_to_num(0.0, 1e4, -1e4) / sampling.temperature
    if 0 < sampling.top_k < x_BV.shape[-1]:
        least_B1 = x_BV.topk(sampling.top_k).values[:, -1:]
        x_BV = x_BV.masked_fill(x_BV < least_B1, -torch.inf)
    p_BV = x_BV.softmax(-1)
    kept_C = (p_BV > 0).any(0).nonzero()[:, 0]  # few columns after top-k; zeros change no sum below
    p_BC = p_BV[:, kept_C]
    if sampling.top_p < 1:
        top = p_BC.topk(min(1024, len(kept_C))).values.double()
        if len(kept_C) > top.shape[1] and (top.sum(-1) < sampling.top_p).any():
            top = p_BC.sort(descending=True).values.double()  # a nucleus of more than 1,024 tokens
        before = top.cumsum(-1) - top
        count_B1 = (before < sampling.top_p).sum(-1, keepdim=True)
        p_BC = p_BC.masked_fill(p_BC < top.gather(-1, count_B1 - 1).float(), 0)
    cdf_BC = p_BC.double().cumsum(-1)
    u_B1 = u_B[:, None] * cdf_BC[:, -1:]
    return kept_C[torch.searchsorted(cdf_BC, u_B1, right=True)[:, 0]]


class KeyedDraw(LogitsProcessor):
    """Leaves each row only the token that its key draws, which `generate` then takes greedily.

    starts: the place in the padded batch where each row's completion begins.
    """

    def __init__(self, keys: Sequence[int], starts: Sequence[int], sampling: Sampling):
        self.keys_B, self.starts_B = np.array(keys, dtype=np.uint64), np.array(starts)
        self.sampling = sampling

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        u_B = torch.from_numpy(uniforms(self.keys_B, input_ids.shape[1] - self.starts_B))
        token_B = select_tokens(scores, u_B.to(scores.device), self.sampling)
        return scores.fill_(-torch.inf).scatter_(1, token_B[:, None], 0)  # the scores are a copy


@dataclass
class Row:
    """A prompt on its way to a completion, which `stream` fills in."""

    index: int  # of the prompt among its caller's
    prompt: Ids
    key: int  # a `sample_key`
    left: int  # tokens that may still come; 0 when the row has finished
    ids: Ids = field(default_factory=list)
    counted: int = 0  # sampled tokens, by a server that gives their text and not their ids


def rows_of(prompt_ids: list[Ids], keys: Sequence[int], limit: int) -> list[Row]:
    """A row for each prompt, with one limit for all. ValueError unless each has its key."""
    pairs = enumerate(zip(prompt_ids, keys, strict=True))
    return [Row(i, prompt, key, limit) for i, (prompt, key) in pairs]


def stream(model, tokenizer, asked: Sequence[Row], sampling: Sampling, rows: int) -> Iterator[Turn]:
    """Completions as they finish: lists, perhaps empty, of (index of the prompt, sampled ids).

    The stop id is included, and nothing after it. At most `rows` decode at a time: a finished row
    leaves the batch and the next one takes its place.
    Hugging Face's `generate` decodes, a turn of tokens at a call with the cache kept; the model's
    own generation_config has no say. ValueError on an empty prompt or rows < 1.
    """
    if rows < 1 or not all(row.prompt for row in asked):
        raise ValueError(f"stream needs rows >= 1, got {rows}, and prompts that are not empty")
    causal, stops, training = causal_lm(model), stop_ids(model, tokenizer), model.training
    waiting = collections.deque(asked)
    running: list[Row] = []
    cache = DynamicCache()
    model.eval()
    try:
        while waiting or running:
            new = [waiting.popleft() for _ in range(min(len(waiting), rows - len(running)))]
            if new:
                fresh = DynamicCache()
                _decode(causal, new, fresh, 1, sampling, stops)  # the prompts, and one token each
                cache = _joined(cache, fresh) if running else fresh
                running += new
            steps = min(TURN[causal.device.type], max(row.left for row in running))
            if steps:
                _decode(causal, running, cache, steps, sampling, stops)
            yield [(row.index, row.ids) for row in running if not row.left]
            kept = [b for b, row in enumerate(running) if row.left]
            running = [row for row in running if row.left]
            if running:
                width = max(len(row.prompt) + len(row.ids) for row in running)
                _keep(cache, kept, width - 1)
    finally:
        model.train(training)


Decode = Callable[..., Iterator[Turn]]  # `stream`, or what samples in its place


@torch.inference_mode()
def _decode(
    causal: Model, rows: list[Row], cache: DynamicCache, steps: int, sampling: Sampling, stops: Ids
) -> None:
    """At most `steps` more tokens per row. The cache is empty or holds all its ids but the last."""
    width = max(len(row.prompt) + len(row.ids) for row in rows)
    ids, mask, starts = [], [], []
    for row in rows:
        ids_so_far = row.prompt + row.ids
        padding = [0] * (width - len(ids_so_far))
        ids.append(padding + ids_so_far)
        mask.append(padding + [1] * len(ids_so_far))
        starts.append(width - len(row.ids))
    draw = KeyedDraw([row.key for row in rows], starts, sampling)
    ids_BL, mask_BL = torch.tensor([ids, mask], device=causal.device)
    settings = GenerationConfig(max_new_tokens=steps, eos_token_id=stops or None, pad_token_id=0)
    model_settings = causal.generation_config
    causal.generation_config = GenerationConfig()  # it would fill in what `settings` leave open
    try:
        out_BL = causal.generate(
            ids_BL, settings, [draw], attention_mask=mask_BL, past_key_values=cache
        )
    finally:
        causal.generation_config = model_settings
    for row, new in zip(rows, out_BL[:, width:].tolist()):
        for token in new:
            if row.left:  # nothing is taken after a stop id
                row.ids.append(token)
                row.left = 0 if token in stops else row.left - 1


def _keep(cache: DynamicCache, rows: list[int], width: int) -> None:
    """Keep these rows alone, and their last `width` places."""
    for layer in cache.layers:
        for name in ("keys", "values"):
            setattr(layer, name, getattr(layer, name)[rows, :, -width:])


def _joined(cache: DynamicCache, new: DynamicCache) -> DynamicCache:
    """The rows of both; the narrower of the two is padded on the left.

    New prompts come with a cache of their own, and a `DynamicCache` has no way to take in another.
    What the padding holds is never attended to: the mask of the next call leaves it out.
    """
    width = max(cache.get_seq_length(), new.get_seq_length())
    for ours, theirs in zip(cache.layers, new.layers):
        for name in ("keys", "values"):
            parts = [getattr(layer, name) for layer in (ours, theirs)]
            padded = [pad(x, (0, 0, width - x.shape[2], 0)) for x in parts]
            setattr(ours, name, torch.cat(padded))
    return cache


def generate(
    model, tokenizer, prompt_ids: list[Ids], sampling: Sampling, keys: Sequence[int], rows: int = 0
) -> list[Ids]:
    """One completion per prompt, in order, as sampled ids; see `stream`. rows 0 is all at once."""
    asked = rows_of(prompt_ids, keys, sampling.max_new_tokens)
    turns = stream(model, tokenizer, asked, sampling, rows or max(1, len(asked)))
    finished = dict(itertools.chain.from_iterable(turns))
    return [finished[i] for i in range(len(asked))]


def spread(
    world: World,
    model,
    tokenizer,
    asked: list[Row],
    sampling: Sampling,
    rows: int,
    finish,
    stage="",
    decode: Decode = stream,
) -> Iterator[list]:
    """`stream`, shared out over the ranks: what all of them have finished, turn by turn.

    finish: makes a list of JSON-able rows, one of each completion of a turn, on the rank that
    decoded it. Every rank gets every row, and no rank may leave before the end: each turn is a
    collective. stage: the name of a progress bar. decode: what stands in for `stream`.
    """
    mine = sorted(asked, key=lambda row: len(row.prompt))[world.rank :: world.size]
    turns = decode(model, tokenizer, mine, sampling, rows)
    left, total, begun = len(asked), len(asked), time.perf_counter()
    shown = bool(stage and total and world.main)
    moving = shown and sys.stderr.isatty()  # a file gets one line, at the end
    # It moves by tokens, of which a reply has at most its limit: a merge's replies end together.
    look = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
    tokens = sum(row.left for row in asked)
    name = f"{stage}: 0/{total}"
    with tqdm(desc=name, total=tokens, disable=not moving, bar_format=look) as bar:
        while left:
            turn = finish(next(turns, []))
            turns_of_ranks = gather([turn, sum(row.left for row in mine)], world)
            finished = list(itertools.chain.from_iterable(rows for rows, _ in turns_of_ranks))
            left -= len(finished)
            bar.set_description_str(f"{stage}: {total - left}/{total}", refresh=False)
            bar.update(tokens - sum(to_come for _, to_come in turns_of_ranks) - bar.n)
            yield finished
    if shown and not moving:
        seconds = time.perf_counter() - begun
        print(f"{stage}: {total} in {seconds:.0f} s", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Rollout:
    """One sampled solution and its outcome (Eq. 1, §2)."""

    problem_id: str
    problem: str
    gold: str
    prompt_ids: Ids
    completion_ids: Ids
    text: str
    pred: str | None
    r: int
    truncated: bool  # cut at the length limit: it has no stop id (S4)


def judge(
    model, tokenizer, problems, prompt_ids: list[Ids], turn: Turn, verifier: Judge
) -> list[Rollout]:
    """A turn's completions as rollouts; its indices point into `problems` and `prompt_ids`."""
    stops = stop_ids(model, tokenizer)
    marks = [tokenizer.encode(tag, add_special_tokens=False) for tag in THINK]
    texts, cases = [], []
    for i, ids in turn:
        prompt, text = prompt_ids[i], text_of(tokenizer, ids)
        # Some templates end on an open think tag, maybe with a line feed; seen if a tag is one id.
        ends = [prompt[-1:] == mark or prompt[-2:-1] == mark for mark in marks]
        opened = ends == [True, False]
        texts.append(text)
        cases.append((problems[i], "<think>" + text if opened else text))
    rollouts = []
    for (i, ids), text, verdict in zip(turn, texts, verifier.judge(cases), strict=True):
        x, r = problems[i], 1 if verdict.right else -1
        truncated = not ids or ids[-1] not in stops
        rollouts.append(
            Rollout(
                problem_id=x.id,
                problem=x.problem,
                gold=x.answer,
                prompt_ids=prompt_ids[i],
                completion_ids=ids,
                text=text,
                pred=verdict.answer,
                r=r,
                truncated=truncated,
            )
        )
    return rollouts
