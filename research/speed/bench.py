"""Speed and memory, as ratios in one run. Random weights: speed needs no trained ones.

    python research/speed/bench.py MODE    one of these, or all, which goes on where one fails

    score      K teachers and the student, against one student row per teacher
    rollout    rollout.generate against static batches of `generate`
    step       a step by part, and the least that the machine must take
    eval       12 samples of 30 problems; how often the rows change an id
    verify     verdicts per second
    memory     peak memory of scoring; Qwen3-8B on one card, by arithmetic
    scaling    cost against K, T, the bank's size and the number of ranks
    operations how many a decoded token takes, with and without adapters
    cost       hours of the paper's run, by arithmetic; --gpu NAME: at that card's rates

With --cuda on one GPU, at Qwen3-1.7B's shape. Tables are markdown. Peaks are above what the loaded
model holds, each in a process of its own. "limit" and "least seconds" are what the machine must
take: bytes of weights and cache over its copy rate, FLOPs over its matmul rate, both measured in
the same run. On a CPU with one thread (OMP_NUM_THREADS=1) seconds are this process's processor
seconds, so that a busy machine matters less; a step's are wall time. The best of --repeats counts;
rollout and eval run once.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import gc
import math
import multiprocessing
import os
import pathlib
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, Qwen3Config
from transformers.utils import logging

import rollout
import scoring
import sgsd
import skills
from lib import config, files
from lib import model as models
from lib.run import Run
from lib.verify import Verifier
from methods.grpo import GRPOConfig
from research.markdown_table import head_of, row_of

logging.disable_progress_bar()
STUDENT, TEACHER, K, VOCAB = 64, 192, 8, 151_936  # prompt tokens; teachers; Qwen3's vocabulary
Args = argparse.Namespace


@dataclass(frozen=True)
class Shape:
    """A model, and how much is made of everything. Small models decode with a small vocabulary,
    they would spend their time on the head."""

    width: int
    layers: int
    mlp: int
    heads: int  # of queries; half as many of keys and values
    size: int  # of a head
    T: int  # completion tokens of score and step
    batch: int = 4  # problems of a step
    new: int = 96  # the longest completion of rollout and eval
    mean: int = 16  # about what is sampled until one of the stop ids comes
    rows: tuple[int, ...] = (32,)  # that decode together
    eval_rows: int = 16  # eval.py's default
    problems: int = 30  # of eval
    vocab: int = VOCAB
    decode_vocab: int = 8192  # of rollout, eval and step

    @property
    def rank(self) -> int:
        return self.width // 32  # 64 of Qwen3-1.7B's 2048

    def layer_bytes(self, kind: int) -> int:
        """Activations of one layer per token, at most. kind: bytes of a number."""
        return kind * (6 * self.width + 2 * self.heads * self.size + 3 * self.mlp)


TINY: dict[str, Any] = {"new": 12, "mean": 4, "rows": (4,), "eval_rows": 4, "problems": 2}
LARGE: dict[str, Any] = {"new": 512, "mean": 128, "rows": (32, 128), "eval_rows": 64}
SHAPES = {
    "tiny": Shape(32, 2, 48, 2, 16, T=8, batch=2, vocab=512, decode_vocab=1024, **TINY),
    "few": Shape(256, 8, 768, 4, 64, T=32, batch=2),  # what two ranks share out
    "small": Shape(256, 8, 768, 4, 64, T=128),
    "qwen3-1.7b": Shape(2048, 28, 6144, 16, 128, T=1024, batch=32, decode_vocab=VOCAB, **LARGE),
}


def random_model(s: Shape, device: torch.device, vocab: int = 0) -> Any:
    """A Qwen3 of this shape."""
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=vocab or s.vocab,
        hidden_size=s.width,
        intermediate_size=s.mlp,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.heads // 2,
        head_dim=s.size,
        tie_word_embeddings=True,
        max_position_embeddings=40960,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation="sdpa")
    for name, p in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            p.data *= 30  # else a tied head repeats the last token for ever
    return model


def stop_after(model: Any, mean: int) -> Any:
    """The model with each `mean`-th id as a stop id, for long-tailed lengths; 0: it never stops."""
    vocab = model.config.vocab_size
    stops = list(range(0, vocab, mean)) if mean else [vocab]  # an id that is never sampled
    model.config.eos_token_id = model.generation_config.eos_token_id = stops
    return model.eval()


def clock(device: torch.device) -> float:
    """Seconds; processor time where that is wall time on a quiet machine."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()


def seconds_of(f: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The best of `repeats`."""
    best = math.inf
    for _ in range(repeats):
        began = clock(device)
        f()
        best = min(best, clock(device) - began)
    return best


def rates(device: torch.device) -> tuple[float, float]:
    """Bytes per second of a copy, read and written, and FLOPs per second of a matrix product.

    In bf16 on CUDA, elsewhere in fp32.
    """
    n, numbers, dtype = 1024, 1 << 25, torch.float32
    if device.type == "cuda":
        n, numbers, dtype = 8192, 1 << 28, torch.bfloat16
    a, b = torch.randn(2, n, n, dtype=dtype, device=device)  # of ones it is faster
    c, d = torch.randn(2, numbers, dtype=dtype, device=device)
    copying = seconds_of(lambda: d.copy_(c), device, 5)
    multiplying = seconds_of(lambda: a @ b, device, 5)
    return 2 * c.nbytes / copying, 2 * n**3 / multiplying


def machine(device: torch.device) -> str:
    git = ["git", "rev-parse", "--short", "HEAD"] if shutil.which("git") else ["true"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    name = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        name = torch.cuda.get_device_name()
    return f"{name}, torch {torch.__version__}, commit {commit or 'none'}"


def table(title: str, device: torch.device, columns: str, rows: Iterable[Sequence[object]]) -> None:
    """Print rows as they come: what was measured stays when the rest is killed or fails."""
    print(f"\n{title}; {machine(device)}\n")
    print("\n".join(head_of(columns.split(" | "))), flush=True)
    for row in rows:
        print(row_of(row), flush=True)


def times(a: float, b: float) -> str:
    """a as a multiple of b, where b was large enough to be seen."""
    return f"{a / b:.1f}x" if b > 0 else "-"


def resident(field: str) -> int:
    """Bytes of this process's memory: VmRSS now, VmHWM at its highest (Linux)."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status[status.index(field) :].split()[1]) * 1024


def in_own_process(args: Args, f: Callable[..., Any], *rest: object, peak: bool = True) -> Any:
    """f(args, *rest) where no other run's memory lies in the way.

    peak: what is freed goes back to the system at once, so that a peak is what was alive. That
    costs time, so seconds are measured without it, as a user has them.
    """
    if args.one_process:
        return f(args, *rest)
    with mock.patch.dict(os.environ, {"MALLOC_MMAP_THRESHOLD_": "262144"} if peak else {}):
        spawn = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:
            return pool.submit(f, args, *rest).result()


# ------------------------------------------------------------------------------------------- cost


@dataclass(frozen=True)
class Counts:
    """FLOPs and bytes of a Qwen3 with adapters. A multiply-add is 2 FLOPs; attention looks back."""

    width: int
    layers: int
    mlp: int
    queries: int  # width of all query heads together
    kv: int
    vocab: int = VOCAB
    kind: int = 2  # bytes of a weight
    rank: int = 64

    @property
    def projections(self) -> int:
        attention = 2 * self.width * (self.queries + self.kv)
        return self.layers * (attention + 3 * self.width * self.mlp)

    @property
    def adapters(self) -> int:
        attention = 2 * (self.width + self.queries) + 2 * (self.width + self.kv)
        return self.layers * self.rank * (attention + 3 * (self.width + self.mlp))

    @property
    def weights(self) -> int:
        """Bytes that a forward reads; adapters are fp32."""
        return self.kind * (self.projections + self.vocab * self.width) + 4 * self.adapters

    def attention(self, n: int) -> int:
        """FLOPs of n tokens that look back at each other."""
        return 2 * self.layers * self.queries * n * n

    def forward(self, n: int, predicted: int) -> int:
        """FLOPs of n tokens of a row, with the head on those that predict."""
        products = 2 * (self.projections + self.adapters) * n
        return products + self.attention(n) + 2 * self.vocab * self.width * predicted

    def backward(self, n: int, predicted: int) -> int:
        """FLOPs: everything once more, then the gradients of all inputs and of the adapters."""
        return 2 * self.forward(n, predicted) + self.attention(n) + 2 * self.adapters * n

    def decoding(self, prompt: int, new: int, rows: float, steps: float) -> tuple[float, float]:
        """FLOPs and bytes of `rows` completions of `new` tokens in `steps` steps.

        Each step reads all weights, each token its row's cache.
        """
        flops = self.forward(prompt + new, new) - self.forward(prompt, 0)
        return rows * flops, steps * self.weights + rows * self.cache(prompt, new)

    def cache(self, prompt: int, new: int) -> float:
        """Bytes of a row's cache, summed over the tokens that read it."""
        return 2 * self.kind * self.layers * self.kv * (prompt * new + new * new / 2)

    def fp32(self, n: int) -> int:
        """FLOPs of a forward that run in fp32: those of the adapters. A backward has three times
        as many, with the second forward."""
        return 2 * self.adapters * n


@dataclass(frozen=True)
class Card:
    """A GPU by its data sheet."""

    name: str
    flops: float  # per second, dense bf16
    fp32: float  # the same in fp32, without tensor cores
    bandwidth: float  # bytes per second of its memory
    memory: float  # bytes
    source: str


CARDS = {
    "h100": Card(
        "H100 SXM",
        989e12,
        67e12,
        3.35e12,
        80e9,
        "NVIDIA's H100 data sheet: 1,979 TFLOPS in bf16 with sparsity, so half of it dense; "
        "67 in fp32; 3.35 TB/s",
    ),
    "h200": Card(
        "H200 SXM",
        989e12,
        67e12,
        4.8e12,
        141e9,
        "NVIDIA's H200 data sheet: 1,979 TFLOPS in bf16 with sparsity, so half of it dense; "
        "67 in fp32; 4.8 TB/s",
    ),
    "a100": Card(
        "A100 SXM, 80 GB",
        312e12,
        19.5e12,
        2.039e12,
        80e9,
        "NVIDIA's A100 data sheet: 312 TFLOPS in bf16, dense; 19.5 in fp32; 2,039 GB/s",
    ),
}


@dataclass(frozen=True)
class RowCache:
    """What a row keeps while it decodes in bf16: keys and values, and states of linear attention.

    A state is fp32, of value heads of 128 x 128; the convolution's has 4 places in bf16.
    """

    layers: int  # of attention
    kv: int  # width of all key heads together
    linear: int = 0  # layers of linear attention
    key_heads: int = 0
    value_heads: int = 0

    @property
    def token(self) -> int:
        """Bytes of a token."""
        return 2 * 2 * self.layers * self.kv

    @property
    def states(self) -> int:
        """Bytes that do not grow with the tokens."""
        convolved = 128 * (2 * self.key_heads + self.value_heads)
        return self.linear * (4 * self.value_heads * 128 * 128 + 2 * 4 * convolved)


CACHES = {  # the hybrids' shapes: 0.8B by its model card, 9B by transformers' defaults
    "Qwen3-1.7B": RowCache(28, 1024),
    "Qwen3-4B, 8B": RowCache(36, 1024),
    "Qwen3.5-0.8B": RowCache(6, 512, 18, 16, 16),
    "Qwen3.5-9B": RowCache(8, 1024, 24, 16, 32),
}
QWEN3 = {
    "Qwen3-1.7B": Counts(2048, 28, 6144, 2048, 1024),
    "Qwen3-4B": Counts(2560, 36, 9728, 4096, 1024),
    "Qwen3-8B": Counts(4096, 36, 12288, 4096, 1024),
}
PLAIN, GUIDED = 200, 400  # tokens of a student's and a teacher's prompt: the paper doesn't say
GPUS, CARD = 8, 80e9  # §4.1; bytes of a GPU
EVAL_TOKENS = config.EvalConfig.max_new_tokens
GPU_SLICE = 1 << 27  # numbers in a slice of logits (scoring.py)
# Tokens of an extraction's prompt, counted once with Qwen3's tokenizer; and of the merges of
# Qwen3-1.7B's candidates when nothing merges, as bank_scale.py of commit 1e50ec6 counts them:
# replies, mean tokens of prompt and reply, decoding steps.
MEMORY, MERGES, MERGE, MERGE_STEPS = 1334, 45, (2973, 2826), 12462
SMALL = {"plain": PLAIN, "with skills": 1200}  # tokens of a prompt; with 8 pairs: assumed
EVOLVING = "extracting, always with generate"
# From the limit to the hours expected. COMPUTE is measured on a CPU (README.md, step: 2.1 times the
# least for scoring, 2.0 for the student). TOKEN_S is assumed. Of ENGINE, adapters take 1.33 to 1.39
# (trl#7017), and the rest is assumed.
COMPUTE, TOKEN_S, ENGINE = 2.1, 0.030, 2.0


def counts(s: Shape, vocab: int, device: torch.device, rank: int = 64) -> Counts:
    kind = 2 if device.type == "cuda" else 4
    queries = s.heads * s.size
    return Counts(s.width, s.layers, s.mlp, queries, queries // 2, vocab, kind, rank)


def eval_rows(c: Counts, tokens: int, card: float = CARD) -> int:
    """Samples decoded together, in evaluation and cold start: 16, or 8 if their cache is too large.

    Eight need --rows 8 and --rollout-rows 8.
    """
    cache = 16 * 2 * c.kind * c.layers * c.kv * (PLAIN + tokens)
    return 16 if c.weights + cache < card else 8


def paper_costs(c: Counts, card: float = CARD) -> dict[str, tuple[float, float]]:
    """FLOPs and bytes on one of 8 GPUs: a step by parts, one evaluation, the bank's life.

    All completions are as long as they may be, and a cold start merges nothing.
    """
    cfg = config.Config()
    x, T, rows = PLAIN, cfg.max_new_tokens, cfg.batch_size / GPUS
    samples = 12 * 90 / GPUS  # three sets of 30
    rounds = math.ceil(samples / eval_rows(c, EVAL_TOKENS, card))
    teachers = rows * cfg.num_teachers * c.forward(GUIDED + T, T)
    long, seeds = cfg.cold_start_tokens, cfg.cold_start / GPUS
    turns = math.ceil(seeds / eval_rows(c, long, card))
    reply = cfg.reply_tokens
    window = cfg.evolve_every * cfg.batch_size / GPUS
    return {
        "prefill": (rows * c.forward(x, 1), c.weights),
        "decoding": c.decoding(x, T, rows, T),
        "teachers": (teachers, rows * c.weights),
        "student, forward": (rows * c.forward(x + T, T), c.weights),
        "student, backward": (rows * c.backward(x + T, T), 2 * c.weights),
        "an evaluation": c.decoding(x, EVAL_TOKENS, samples, rounds * EVAL_TOKENS),
        "cold start, solving": c.decoding(x, long, seeds, turns * long),
        "cold start, extracting": c.decoding(MEMORY, reply, seeds, math.ceil(seeds / 16) * reply),
        "cold start, merging": c.decoding(*MERGE, MERGES / GPUS, MERGE_STEPS),
        "an evolution of the bank, extracting": c.decoding(
            MEMORY, reply, window, math.ceil(window / 16) * reply
        ),
    }


@dataclass(frozen=True)
class Part:
    """A part of a run or of an evaluation, on one GPU."""

    name: str
    flops: float
    moved: float  # bytes
    steps: float = 0  # of decoding; 0 where the model only scores or learns
    joined: float = 0  # bytes of the cache that `generate` copies, since `cat` makes it anew
    fp32: float = 0  # FLOPs in fp32, among the others

    def times(self, n: float) -> "Part":
        rest = n * self.steps, n * self.joined, n * self.fp32
        return Part(self.name, n * self.flops, n * self.moved, *rest)

    def limit(self, card: Card) -> float:
        """Seconds that the card takes at least."""
        return max(self.flops / card.flops, self.moved / card.bandwidth)

    def expected(self, card: Card) -> tuple[float, float]:
        """Seconds expected, where `generate` decodes and where an engine does."""
        if self.steps:
            whole = max(self.flops / card.flops, (self.moved + self.joined) / card.bandwidth)
            return whole + TOKEN_S * self.steps, ENGINE * self.limit(card)
        seconds = (self.flops - self.fp32) / card.flops + self.fp32 / card.fp32
        expected = COMPUTE * max(seconds, self.moved / card.bandwidth)
        return expected, expected


def step_parts(c: Counts, gpus: int) -> list[Part]:
    """A step on one of `gpus` GPUs; where an engine samples, it is a step on TRL."""
    cfg, x = config.Config(), PLAIN
    T, rows = cfg.max_new_tokens, cfg.batch_size / gpus
    flops, moved = c.decoding(x, T, rows, T)
    learned = rows * (c.forward(x + T, T) + c.backward(x + T, T))
    teachers = rows * cfg.num_teachers * c.forward(GUIDED + T, T)
    joined = 2 * rows * c.cache(x, T)
    in_fp32 = rows * cfg.num_teachers * c.fp32(GUIDED + T)
    return [
        Part("sampling", flops + rows * c.forward(x, 1), moved + c.weights, T, joined),
        Part("teachers", teachers, rows * c.weights, fp32=in_fp32),
        Part("student", learned, 3 * c.weights, fp32=4 * rows * c.fp32(x + T)),
    ]


def decoded(c: Counts, name: str, prompt: int, samples: float, tokens: int, rows: int) -> Part:
    """Samples of one policy on one GPU, `rows` at a time."""
    steps = math.ceil(samples / rows) * tokens
    joined = 2 * samples * c.cache(prompt, tokens)
    return Part(name, *c.decoding(prompt, tokens, samples, steps), steps, joined)


def grpo_parts(c: Counts, gpus: int, T: int) -> list[Part]:
    """A step of GRPO on one of `gpus` GPUs, with completions of T tokens."""
    rollouts = config.Config().batch_size * GRPOConfig.generations / gpus
    learned = rollouts * (c.forward(PLAIN + T, T) + c.backward(PLAIN + T, T))
    return [
        decoded(c, "sampling", PLAIN, rollouts, T, GRPOConfig.rollout_rows),
        Part("learning", learned, 3 * rollouts * c.weights, fp32=4 * rollouts * c.fp32(PLAIN + T)),
    ]


def plain(parts: Iterable[Part], n: float = 1) -> list[tuple[Part, str]]:
    """Each part n times, without a note."""
    return [(part.times(n), "") for part in parts]


def parts_of_run(c: Counts, card: Card) -> dict[str, list[tuple[Part, str]]]:
    """The parts of the paper's run on one of 8 GPUs, then small ones on one GPU; notes on each."""
    cfg, costs = config.Config(), paper_costs(c, card.memory)
    rows, long = eval_rows(c, EVAL_TOKENS, card.memory), cfg.cold_start_tokens
    seeds, window = cfg.cold_start / GPUS, cfg.evolve_every * cfg.batch_size / GPUS
    onlines, policies = cfg.steps // cfg.evolve_every, 1 + cfg.steps // cfg.checkpoint_every
    solving = decoded(c, "solving", PLAIN, seeds, long, rows)
    extracting = decoded(c, "extracting", MEMORY, seeds, cfg.reply_tokens, 16)
    joined = 2 * MERGES / GPUS * c.cache(*MERGE)
    merging = Part("merging", *costs["cold start, merging"], MERGE_STEPS, joined)
    evolving = decoded(c, EVOLVING, MEMORY, window, cfg.reply_tokens, 16)
    whole = decoded(c, "decoding", PLAIN, 12 * 90 / GPUS, EVAL_TOKENS, rows)
    small, skilled = (decoded(c, name, n, 200, 4096, 16) for name, n in SMALL.items())
    T, grpo_T = cfg.max_new_tokens, GRPOConfig.max_new_tokens
    at_a_time, few = f"{rows} rows at a time", "up to 4,096 tokens, 16 rows at a time"
    return {
        f"{cfg.steps} steps": plain(step_parts(c, GPUS), cfg.steps),
        "first bank": [(solving, at_a_time), (extracting, ""), (merging, "")],
        f"{onlines} evolutions of the bank": [(evolving.times(onlines), "")],
        f"{policies} evaluations, 90 problems x 12": [(whole.times(policies), at_a_time)],
        f"GRPO: {cfg.steps} steps of {grpo_T:,} tokens": plain(
            grpo_parts(c, GPUS, grpo_T), cfg.steps
        ),
        f"GRPO: {cfg.steps} steps of {T:,} tokens": plain(grpo_parts(c, GPUS, T), cfg.steps),
        "one GPU: 20 steps": plain(step_parts(c, 1), 20),
        f"one GPU: 20 steps of GRPO, {T:,} tokens": plain(grpo_parts(c, 1, T), 20),
        "one GPU: 50 problems x 4": [(small, few)],
        "one GPU: the same with --skills": [(skilled, few)],
    }


def cost_by_data_sheet(card: Card) -> None:
    """Print each part's hours at the card's limit and as expected. Nothing is measured here."""
    print(f"cost: arithmetic, NOT a measured run; {card.name}: {card.source}")
    columns = "part | PFLOP | TB | hours at the limit | with generate | with an engine | note"
    for model, c in QWEN3.items():
        print(f"\n{model}\n\n" + "\n".join(head_of(columns.split(" | "))))
        run = np.zeros(3)
        for group, parts in parts_of_run(c, card).items():
            total = np.zeros(3)
            for part, note in parts:
                hours = np.array([part.limit(card), *part.expected(card)]) / 3600
                if part.name == EVOLVING:
                    hours[2] = hours[1]
                total += hours
                sizes = f"{part.flops / 1e15:,.2f}", f"{part.moved / 1e12:,.1f}"
                print(row_of((f"{group}: {part.name}", *sizes, *shown(hours), note)))
            if len(parts) > 1:
                print(row_of((f"**{group}**", "", "", *shown(total), "")))
            run += 0 if group.startswith(("one GPU", "GRPO")) else total
            if "evaluations" in group:
                print(row_of((f"**all on {GPUS} GPUs**", "", "", *shown(run), "")))
    print(
        f"\nAll but the small parts are on one of {GPUS} GPUs. Prompts have {PLAIN} and {GUIDED} "
        f"tokens, with skills {SMALL['with skills']:,} (assumed); completions are as long as they "
        "may be. Limit: FLOPs over FLOP/s or bytes over bytes/s, whichever is more. Expected: "
        f"scoring and learning {COMPUTE:g} times the limit, as measured on a CPU, the adapters "
        f"in fp32; generate {1000 * TOKEN_S:.0f} ms more for each token of a batch (assumed), and "
        f"a copy of its cache for each, two thirds of the cache's traffic; an engine {ENGINE:g} "
        "times the limit (assumed; adapters alone 1.33 to 1.39 times, trl#7017). Left out: "
        "embedding, verdicts, loading, the merges of evolutions of the bank."
    )


def shown(hours: Iterable[float]) -> list[str]:
    return [f"{x:,.2f}" if x else "-" for x in hours]


def cost(args: Args, s: Shape, device: torch.device) -> None:
    if args.gpu:
        cost_by_data_sheet(CARDS[args.gpu])
        return
    (copied, multiplied), cfg = rates(device), config.Config()
    evaluations = cfg.steps // cfg.checkpoint_every
    lines, sums = [], []
    for name, c in QWEN3.items():
        parts = {}
        for part, (flops, moved) in paper_costs(c).items():
            parts[part] = flops, moved, max(flops / multiplied, moved / copied)
        steps = list(parts.values())
        of_step = tuple(sum(column) for column in zip(*steps[:5]))
        evaluation, *cold_start, online = (least for _, _, least in steps[5:])
        parts = {**parts, "a step": of_step}
        for part, (flops, moved, least) in parts.items():
            cells = f"{flops / 1e12:,.1f}", f"{moved / 1e12:,.3f}", f"{least:,.2f}"
            lines.append((name, part, *cells))
        onlines = cfg.steps // cfg.evolve_every
        seconds = cfg.steps * of_step[2], evaluations * evaluation, sum(cold_start)
        hours = [f"{x / 3600:,.1f} h" for x in (*seconds, onlines * online)]
        sums.append(
            f"{name}, at least: {cfg.steps} steps {hours[0]}; {evaluations} evaluations "
            f"{hours[1]}, {eval_rows(c, EVAL_TOKENS)} samples at a time; the first bank "
            f"{hours[2]}; {onlines} evolutions of the bank {hours[3]}"
        )
    title = (
        f"cost: lower limits, NOT a measured run: the paper's run on one of {GPUS} GPUs of this "
        f"kind, {multiplied / 1e12:.2f} TFLOP/s and {copied / 1e9:,.0f} GB/s measured here"
    )
    table(title, device, "model | part | TFLOP | TB | seconds at least", lines)
    print("\n" + "\n".join(sums))
    columns = f"cache in bf16 | bytes a token | MB of states | GB of {EVAL_TOKENS:,} tokens"
    print("\n" + "\n".join(head_of(f"{columns} | GB of 16 such rows".split(" | "))))
    for name, row in CACHES.items():
        most = row.token * (PLAIN + EVAL_TOKENS) + row.states
        cells = f"{row.states / 1e6:.1f}", f"{most / 1e9:.2f}", f"{16 * most / 1e9:.1f}"
        print(row_of((name, f"{row.token:,}", *cells)))
    print(
        f"\nPrompts have {PLAIN} and {GUIDED} tokens (assumed), completions are as long as they "
        "may be. Seconds: FLOPs over the matmul rate or bytes over the copy rate, whichever is "
        "more. Left out: sampling, embedding, the merges of evolutions of the bank."
    )


# ------------------------------------------------------------------------------------------ score


LAYOUTS = ["replicated", "replicated, no prompt logits", "ours"]  # the second is kinder


def replicated(model, prompts, ids, keep):
    """From full logits of all rows at once, or of the last `keep` places."""
    x = torch.tensor([p + ids for p in prompts], device=model.device)
    logits = model(input_ids=x, use_cache=False, logits_to_keep=keep).logits
    logp = logits[:, -len(ids) - 1 : -1].float().log_softmax(-1)
    return logp.gather(-1, x[:, -len(ids) :, None])[..., 0]


def scoring_model(s: Shape, device: torch.device, checkpointed: bool = False) -> Any:
    """With adapters as a run has them, which do something."""
    above = 0 if checkpointed else 1 << 30  # tokens of a pass
    model = models.with_adapters(random_model(s, device), s.rank, 2 * s.rank, above)
    scoring.head_is_sliced(model)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.01)
    return model


def score_once(model, layout: str, T: int, teachers: int = K, score_tokens: int = 16384) -> float:
    """One rollout's loss, forward and backward; of layout "teachers" their scores alone."""
    gen = torch.Generator().manual_seed(1)
    lengths = [STUDENT, T, *[TEACHER] * teachers]
    vocab = model.config.vocab_size
    drawn = [torch.randint(0, vocab, (n,), generator=gen).tolist() for n in lengths]
    student, ids, *contexts = drawn
    if layout in ("ours", "teachers"):
        logpT_KT = scoring.score_teachers(model, contexts, ids, score_tokens)
        if layout == "teachers":
            return 0.0
        logpS = scoring.token_logprobs(model, [student], [ids], grad=True)
    else:  # the student's row once per teacher
        keep = 0 if layout == "replicated" else T + 1  # 0 is all
        with torch.no_grad():
            logpT_KT = replicated(model, contexts, ids, keep)
        logpS = replicated(model, [student] * teachers, ids, keep)
    mask_T, rho_K = torch.ones(T, device=model.device), torch.ones(teachers, device=model.device)
    lbar_K = sgsd.teacher_losses(logpT_KT - logpS, mask_T, 1.0)
    loss = sgsd.sgsd_loss(lbar_K, rho_K / teachers, rho_K)
    loss.backward()
    model.zero_grad(set_to_none=True)
    return float(loss.detach())


def measure(
    args: Args, layout: str, T: int, checkpointed: bool = False, score_tokens: int = 16384
) -> dict[str, float]:
    """Seconds, peak extra MiB and the loss of a layout; of ours also the teachers' seconds."""
    device, found = args.device, {}
    model = scoring_model(SHAPES[args.shape], device, checkpointed)

    def once() -> None:
        found["loss"] = score_once(model, layout, T, K, score_tokens)

    # The teachers alone get logits in slices of 16 MiB, so that what the layers take is seen.
    slices = {device.type: 1 << 24} if layout == "teachers" else {}
    with mock.patch.dict(scoring.SLICE_LOGITS, slices):
        if device.type == "cuda":
            once()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        else:
            pathlib.Path("/proc/self/clear_refs").write_text("5")  # the high mark starts anew
            before = resident("VmRSS")
        found["seconds"] = seconds_of(once, device, args.repeats)
        peak = torch.cuda.max_memory_allocated() if args.cuda else resident("VmHWM")
    found["mib"] = (peak - before) / 2**20
    if layout == "ours" and not checkpointed:
        alone = functools.partial(score_once, model, "teachers", T)
        found["teachers"] = seconds_of(alone, device, args.repeats)
    return found


def score(args: Args, s: Shape, device: torch.device) -> None:
    results = {}
    for layout in LAYOUTS:
        results[layout] = in_own_process(args, measure, layout, s.T, peak=False)
        results[layout]["mib"] = in_own_process(args, measure, layout, s.T)["mib"]
    own, rows = results["ours"], []
    for name, r in results.items():
        seconds = f"{r['seconds']:.2f}", times(r["seconds"], own["seconds"])
        memory = f"{r['mib']:.0f}", times(r["mib"], own["mib"])
        rows.append((name, *seconds, *memory, f"{r['loss']:.6f}"))
    title = f"score: K={K}, T={s.T}, vocabulary {s.vocab:,}, shape {args.shape}"
    table(title, device, "layout | seconds | of ours | peak extra MiB | of ours | loss", rows)
    flops = K * counts(s, s.vocab, device, s.rank).forward(TEACHER + s.T, s.T)
    share = flops / own["teachers"] / rates(device)[1]
    print(
        f"\nteacher forwards alone: {own['teachers']:.3f} s, {flops / 1e12:.2f} TFLOP, "
        f"{share:.0%} of the measured matmul rate (bar on CUDA: 45%)"
    )


# ---------------------------------------------------------------------------------- rollout, eval


NO_STOPS = types.SimpleNamespace(eos_token_id=None)  # as a tokenizer: the stops are the model's


def static(model, prompts, keys, rows: int, sampling: rollout.Sampling, same_draws: bool) -> list:
    """`generate`, `rows` prompts at a time, each batch until its longest row is through."""
    stops, out = rollout.stop_ids(model, NO_STOPS), []
    how: dict[str, Any] = {"max_new_tokens": sampling.max_new_tokens, "eos_token_id": stops}
    how |= {"pad_token_id": 0, "do_sample": not same_draws}
    if not same_draws:
        how |= {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
    for at in range(0, len(prompts), rows):
        batch = prompts[at : at + rows]
        width = max(map(len, batch))
        if same_draws:
            draw = rollout.KeyedDraw(keys[at : at + rows], [width] * len(batch), sampling)
            how["logits_processor"] = [draw]
        ids = torch.tensor([[0] * (width - len(p)) + p for p in batch], device=model.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
        found = model.generate(input_ids=ids, attention_mask=mask.to(model.device), **how)
        for row in found[:, width:].tolist():
            ends = [t + 1 for t, token in enumerate(row) if token in stops]
            out.append(row[: min(ends, default=len(row))])
    return out


DECODED = "way | seconds | tokens | tokens/s | ours is | seconds of limit | same ids as ours"
OWN, SAME, OURS, HALF = "generate", "generate, same draws", "ours", "ours, half the rows"


def decode(
    s: Shape, model, samples: int, rows: int, ways: Sequence[str], bandwidth: float
) -> tuple[list[list], dict[str, list]]:
    """A table's row per way of sampling the same prompts, and what each way sampled."""
    gen, prompts = torch.Generator().manual_seed(2), []
    for i in range(samples):
        length = STUDENT // 2 + i % (STUDENT // 2)
        prompts.append(torch.randint(0, s.decode_vocab, (length,), generator=gen).tolist())
    keys = [rollout.sample_key(0, 0, str(i)) for i in range(samples)]
    sampling = rollout.Sampling(max_new_tokens=s.new)
    c = counts(s, s.decode_vocab, model.device, rank=0)
    rows_of = dict.fromkeys(ways, rows) | {HALF: rows // 2}
    found, out, lines = {}, {}, []
    for way in ways:
        began = clock(model.device)
        if way in (OWN, SAME):
            out[way] = static(model, prompts, keys, rows, sampling, way == SAME)
        else:
            out[way] = rollout.generate(model, NO_STOPS, prompts, sampling, keys, rows_of[way])
        found[way] = clock(model.device) - began
    rate = {way: sum(map(len, out[way])) / found[way] for way in ways}
    for way in ways:
        tokens = sum(map(len, out[way]))
        same = sum(a == b for a, b in zip(out[way], out[OURS]))
        steps = max(*map(len, out[way]), math.ceil(tokens / rows_of[way]))
        moved = float(steps * c.weights)
        for prompt, ids in zip(prompts, out[way]):
            moved += c.decoding(len(prompt), len(ids), 1, 0)[1]
        limit = moved / bandwidth
        line = [way, f"{found[way]:.1f}", tokens, f"{rate[way]:.0f}"]
        line += [f"{rate[OURS] / rate[way]:.2f}x", f"{found[way] / limit:.1f}x"]
        lines.append([*line, "own draws" if way == OWN else f"{same} of {samples}"])
    return lines, out


def rollouts(args: Args, s: Shape, device: torch.device) -> None:
    bandwidth, model = rates(device)[0], random_model(s, device, s.decode_vocab)
    warm = rollout.Sampling(max_new_tokens=4)
    rollout.generate(stop_after(model, 0), NO_STOPS, [[1] * 8] * 2, warm, [1, 2])  # for kernels
    cases = [(f"all to {s.new} tokens", rows, rows, 0) for rows in s.rows]
    cases += [(f"long-tailed, up to {s.new}", rows, rows, s.mean) for rows in s.rows]
    cases += [("long-tailed, more samples than rows", 3 * s.rows[0], s.rows[0], s.mean)]

    def lines() -> Iterator[list[str]]:
        for name, samples, rows, mean in cases:
            ways = [OWN, SAME, OURS]
            found, _ = decode(s, stop_after(model, mean), samples, rows, ways, bandwidth)
            for line in found:
                yield [f"{name}: {samples} samples, {rows} rows", *line]

    title = f"rollout: shape {args.shape}, vocabulary {s.decode_vocab:,}"
    title += f", copies at {bandwidth / 1e9:.1f} GB/s"
    table(title, device, f"case | {DECODED}", lines())


def evaluation(args: Args, s: Shape, device: torch.device) -> None:
    samples, bandwidth = 12 * s.problems, rates(device)[0]
    model = stop_after(random_model(s, device, s.decode_vocab), s.mean)
    lines, out = decode(s, model, samples, s.eval_rows, [SAME, OURS, HALF], bandwidth)
    title = f"eval: 12 samples of {s.problems} problems, long-tailed up to {s.new}"
    title += f", {s.eval_rows} rows, shape {args.shape}"
    table(title, device, DECODED, lines)
    differ = sum(a != b for a, b in zip(out[OURS], out[HALF]))
    print(
        f"\nties: {differ} of {samples} samples, {sum(map(len, out[OURS]))} tokens, differ "
        f"between {s.eval_rows} and {s.eval_rows // 2} rows"
    )


# ------------------------------------------------------------------------------------------- step


class LatexVerifier(Verifier):
    """Judges LaTeX in the place of what a random model writes, and keeps the time."""

    seconds = 0.0

    def judge(self, cases):
        began = time.perf_counter()
        preds = [pred for _, pred in latex_pairs(64)]
        boxed = [(x, rf"\boxed{{{preds[len(x.answer)]}}}") for x, _ in cases]
        verdicts = super().judge(boxed)
        self.seconds += time.perf_counter() - began
        return verdicts


def write_inputs(folder: pathlib.Path, s: Shape, device: torch.device, answers: list) -> dict:
    """The settings of a run of three steps, and what it needs: a random model with the tokenizer
    of tiny/, and problems with these answers."""
    stop_after(random_model(s, device, s.decode_vocab), s.T).save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(ROOT / "tiny" / "model").save_pretrained(folder / "model")
    rows = []
    for i, gold in enumerate(answers):
        rows.append({"problem": f"What is {i} plus {i + 3}?", "answer": gold})
    files.append_jsonl(folder / "data.jsonl", rows)
    where = {"model": folder / "model", "data": folder / "data.jsonl", "out": folder / "run"}
    where["encoder"] = ROOT / "tiny" / "encoder"
    where["bank"] = ROOT / "banks" / "word_problems.json"
    settings: dict[str, Any] = {name: str(path) for name, path in where.items()}
    settings |= {"steps": 3, "batch_size": s.batch, "max_new_tokens": s.T, "num_teachers": K}
    return settings | {"audit_every": 0, "evolve_every": 0, "device": device.type}


def least_seconds(
    run: Run, rows: list[dict], c: Counts, copied: float, multiplied: float
) -> dict[str, float]:
    """What the steps of these rollouts take at least, by part."""
    least = {"rollout": 0.0, "scoring": 0.0, "backward": 0.0}
    longest: dict[int, int] = {}
    for row in rows:
        x, new = len(row["prompt_ids"]), len(row["completion_ids"])
        longest[row["step"]] = max(new, longest.get(row["step"], 0))
        least["rollout"] += c.decoding(x, new, 1, 0)[1] / copied
        back = c.backward(x + new, new) if any(row.get("rho", [])) else 0
        least["backward"] += (c.forward(x + new, new) + back) / multiplied
        pairs_K = run.bank.retrieve(row["problem"], run.cfg.num_teachers, run.embed)
        for context in sgsd.teacher_prompts(run, pairs_K, row["problem"]):
            least["scoring"] += c.forward(len(context) + new, new) / multiplied
    least["rollout"] += sum(longest.values()) * c.weights / copied
    return least


def step(args: Args, s: Shape, device: torch.device) -> None:
    copied, multiplied = rates(device)
    ends, laps, verifier = [], [], LatexVerifier()

    def timed(run: Run, step: int) -> tuple[list[dict], float]:
        result = sgsd.train_step(run, step)
        ends.append(time.perf_counter())
        laps.append({**run.clock.seconds, "verification": verifier.seconds})
        verifier.seconds = 0.0
        return result

    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(sys.stderr):
        golds = [gold for gold, _ in latex_pairs(64)]
        cfg = config.Config(**write_inputs(pathlib.Path(name), s, device, golds))
        with Run.open(cfg, skills.SkillBank.load) as run, verifier:
            run.verifier = verifier
            sgsd.train(run, timed)
        rows = list(files.read_jsonl(run.out / "rollouts.jsonl"))
        later = [row for row in rows if row["step"] > 1]  # the first step warms up
        c = counts(s, s.decode_vocab, device)
        least = least_seconds(run, later, c, copied, multiplied)
    seconds = {part: laps[1][part] + laps[2][part] for part in laps[0]}
    verification = seconds.pop("verification")
    everything = ends[2] - ends[0]
    parts = {
        "rollout": seconds["gen"] - verification,
        "verification": verification,
        "scoring": seconds["score"],
        "backward": seconds["bwd"],
        "optimizer": seconds["opt"],
        "the rest: records, gather, logs": everything - sum(seconds.values()),
        "a step": everything,
    }
    lines = []
    for part, x in parts.items():
        line = [part, f"{x / 2:.3f}", f"{x / everything:.1%}", "", ""]
        if part in least:
            line[3:] = f"{least[part] / 2:.3f}", times(x, least[part])
        lines.append(line)
    tokens = sum(len(row["completion_ids"]) for row in rows) / len(rows)
    title = f"step: {s.batch} problems, K={K}, up to {s.T} tokens (mean {tokens:.0f})"
    title += f", LaTeX answers, shape {args.shape}"
    table(title, device, "part | seconds | share | least seconds | of these", lines)
    work = sum(parts[part] for part in least) / everything
    print(
        f"\nrollout (prompts and retrieval with it), scoring and backward: {work:.1%} (bar: 60%); "
        f"all else: {1 - work:.1%} (bar: under 10%)"
    )


# ----------------------------------------------------------------------------------------- memory


def memory(args: Args, s: Shape, device: torch.device) -> None:
    args = Args(**{**vars(args), "repeats": 1})  # of its seconds, little hangs
    kind, Ts = 4, [128, 256, 512, 1024]
    if args.cuda or args.shape == "tiny":
        kind, Ts = 2 if args.cuda else 4, [s.T // 8, s.T // 4, s.T // 2, s.T]

    def accounted(T: int) -> float:
        """MiB that grow with T: the student's checkpointed states and one layer with its outputs
        and gradients, or the teachers' one layer, whichever is more."""
        together = min(K, max(1, 16384 // (TEACHER + T)))
        teachers = together * (TEACHER + T) * s.layer_bytes(kind)
        states = s.layers * s.width * kind
        student = (STUDENT + T) * (states + 3 * s.layer_bytes(kind))
        return max(teachers, student) / 2**20

    def lines() -> Iterator[list[object]]:
        before = 0.0
        for T in Ts:
            peak = in_own_process(args, measure, "ours", T, True)["mib"]
            grown = ["", ""]
            if before:
                grown = [f"{peak - before:+.0f}", f"{accounted(T) - accounted(T // 2):+.0f}"]
            yield [T, f"{peak:.0f}", *grown, f"{K * T * s.vocab * 4 / 2**20:.0f}"]
            before = peak

    columns = "T | peak extra MiB | more than at T/2 | hidden states and one layer account for"
    columns += " | logits of the teachers would take"
    table(f"memory: K={K}, shape {args.shape}, layers checkpointed", device, columns, lines())

    def packed() -> Iterator[list[object]]:
        for n in (16384, 4096, 1024):
            r = in_own_process(args, measure, "teachers", Ts[-1], False, n)
            rows = min(K, max(1, n // (TEACHER + Ts[-1])))
            layer = rows * (TEACHER + Ts[-1]) * s.layer_bytes(kind) / 2**20
            yield [n, f"{r['mib']:.0f}", rows, f"{layer:.0f}", f"{r['seconds']:.2f}"]

    columns = "--score-tokens | peak extra MiB | rows together | one layer | seconds"
    title = f"memory: the teachers alone, T={Ts[-1]}, logits in slices of 16 MiB"
    table(title, device, columns, packed())
    parts = qwen3_8b()
    title = "memory: Qwen3-8B, bf16, on one card, default flags, 32 problems"
    lines_of = [(name, f"{x / 1e9:.1f}") for name, x in parts.items()]
    table(title, device, "what | GB", lines_of)
    total = sum(parts.values()) / 1e9
    fits = "fits" if total < 76 else "does NOT fit"
    print(f"\nall at once: {total:.1f} GB, which {fits} one 80 GB card with 4 GB left over")


def qwen3_8b() -> dict[str, float]:
    """Bytes, by arithmetic; its head is not tied to the embedding."""
    cfg, c, rows = config.Config(), QWEN3["Qwen3-8B"], 32
    tokens, D, M = cfg.score_tokens, c.width, c.mlp
    # One layer of a training pack, per token: inputs, norms, heads and MLP in bf16; what PEFT
    # casts to fp32 for the seven adapters; the MLP's sums and gradients while they last.
    layer = 2 * (14 * D + 5 * M) + 4 * (6 * D + M) + 3 * 4 * M
    cache = 2 * c.kind * c.layers * c.kv * rows * (512 + cfg.max_new_tokens)
    return {
        "weights, bf16": 2 * (c.projections + 2 * VOCAB * D),
        "adapters, their gradients, AdamW's two moments, fp32": 4 * 4 * c.adapters,
        f"checkpointed hidden states of {tokens} tokens": 2 * c.layers * D * tokens,
        f"one layer's activations, {tokens} tokens": layer * tokens,
        "head: its weight in fp32, and the logits of a slice": 4 * (VOCAB * D + GPU_SLICE),
        "encoder, 0.6 billion weights, fp32": 4 * 0.6e9,
        f"cache of {rows} rows, 512 + {cfg.max_new_tokens} tokens": cache,
        "sampling: logits of the rows, fp64 and temporaries": 5 * 8 * rows * VOCAB,
    }


# ---------------------------------------------------------------------------------------- scaling


def rank_seconds(args: Args) -> dict[int, float]:
    """Seconds of a step, times the ranks, with as much work per rank."""
    found, few = {}, SHAPES["tiny" if args.shape == "tiny" else "few"]
    launch = ["-m", "torch.distributed.run", "--standalone"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}  # else one rank has all cores
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory() as name:
            golds = [str(i) for i in range(64)]
            settings = write_inputs(pathlib.Path(name), few, torch.device("cpu"), golds)
            settings["batch_size"] *= ranks
            flags = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
            program = [f"--nproc_per_node={ranks}", str(ROOT / "sgsd.py")]
            run = [sys.executable, *launch, *program, *flags]
            subprocess.run(run, check=True, env=env, stdout=subprocess.DEVNULL)
            rows = files.read_jsonl(pathlib.Path(settings["out"], "metrics.jsonl"))
            sums = []
            for row in rows:
                sums.append(sum(x for name, x in row.items() if name.startswith("seconds.")))
            found[ranks] = ranks * min(sums)
    return found


def scaling(args: Args, s: Shape, device: torch.device) -> None:
    model, tiny = scoring_model(s, device), args.shape == "tiny"

    def scored(T: int, teachers: int = K) -> float:
        return seconds_of(lambda: score_once(model, "ours", T, teachers), device, args.repeats)

    def retrieved(n: int) -> float:
        kinds: dict[str, Any] = {}
        for key, fields in skills.FIELDS.items():
            text = dict.fromkeys(fields, "text")
            kinds[key] = [{skills.IDS[key]: str(i), **text} for i in range(n // 2)]
        bank, rng = skills.SkillBank(**kinds), np.random.default_rng(0)

        def embed(texts: Sequence[str]) -> np.ndarray:
            return rng.standard_normal((len(texts), 1024), dtype=np.float32)

        once = functools.partial(bank.retrieve, "a problem", K, embed)
        once()  # embeds the entries
        return seconds_of(once, device, 4 * args.repeats)

    def lines() -> Iterator[tuple[str, ...]]:
        Ts = [4, 8, 16] if tiny else [256, 512, 1024, 2048]
        banks = [100, 1000] if tiny else [100, 1000, 10_000, 100_000]
        yield line("K", {k: scored(s.T // 2, k) for k in (1, 2, 4, 8, 16)})
        yield line("T", {T: scored(T) for T in Ts})
        yield line("bank entries", {n: retrieved(n) for n in banks})
        yield line("ranks (rank-seconds, work per rank the same)", rank_seconds(args))

    def line(what: str, cost: dict[int, float]) -> tuple[str, ...]:
        slope = np.polyfit(np.log(list(cost)), np.log(list(cost.values())), 1)[0]
        cells = ", ".join(f"{n:,}: {1000 * x:,.3g} ms" for n, x in cost.items())
        return what, cells, f"{slope:.2f}", "yes" if slope < 1.1 else "NO"

    columns = "against | cost | log-log slope | linear or better"
    table(f"scaling: shape {args.shape}", device, columns, lines())
    print("\nretrieval is of one problem, its embedding apart")


# ----------------------------------------------------------------------------------------- verify

LATEX = (  # answers as competition problems have them, each with another spelling
    (r"\frac{{{a}}}{{{b}}}", r"{a}/{b}"),
    (r"{a}\sqrt{{{b}}}", r"{a} \cdot \sqrt{{{b}}}"),
    (r"\left({a}, \frac{{{b}}}{{7}}\right)", r"({a},{b}/7)"),
    (r"({a},\infty)", r"x>{a}"),
    ("x^2+{a}x-{b}", "-{b}+{a}x+x^2"),
    (r"\frac{{{a}\pi}}{{{b}}}", r"\dfrac{{{a}}}{{{b}}}\pi"),
    (r"{a}+{b}i", "{b}i+{a}"),
    (r"\{{{a}, -{b}\}}", r"\{{-{b}, {a}\}}"),
    (r"{a}\pm\sqrt{{{b}}}", r"{a}-\sqrt{{{b}}}, {a}+\sqrt{{{b}}}"),
    ("{a}.{b}", r"x = {a}.{b}0"),
    (r"{a}^\circ", "{a}"),
    (r"\begin{{pmatrix}}{a}\\{b}\end{{pmatrix}}", r"\begin{{pmatrix}} {a} \\ {b} \end{{pmatrix}}"),
    (r"{a}\text{{ cm}}^2", "{a}"),
    ("y={a}x+{b}", "{b}+{a}x"),
)


def latex_pairs(n: int) -> list[tuple[str, str]]:
    """Golds and predictions; in every second round of the spellings the answer is another."""
    rng, pairs = random.Random(0), []
    for i in range(n):
        a, b = rng.sample(range(11, 5000), 2)
        gold, pred = LATEX[i % len(LATEX)]
        wrong = (i // len(LATEX)) % 2
        pairs.append((gold.format(a=a, b=b), pred.format(a=a + wrong, b=b)))
    return pairs


def judged(verifier: Verifier, pairs: list[tuple[str, str]]) -> tuple[float, int]:
    """Seconds for the verdicts, and how many pairs are equal."""
    began = time.perf_counter()
    right = [verifier.verify(*pair) for pair in pairs]
    return time.perf_counter() - began, sum(right)


def verify(args: Args, s: Shape, device: torch.device) -> None:
    """How right they are is counted by research/verdict/measure.py."""
    starts, at_once, count = [], 364, 100_000
    if args.shape == "tiny":
        at_once, count = 28, 1000
    for _ in range(3):
        began = time.perf_counter()
        with Verifier() as v:
            v.verify("1/2", "2/4")
            starts.append(time.perf_counter() - began)
    latex = latex_pairs(4 * at_once)
    with Verifier() as v:
        integers, _ = judged(v, [(str(i), str(i + i % 2)) for i in range(count)])
        parts = [judged(v, latex[at : at + at_once]) for at in range(0, len(latex), at_once)]
    equal = sum(right for _, right in parts)
    lines = [
        ("start to first verdict, best of 3", f"{min(starts):.2f} s"),
        ("plain integers", f"{count / integers:,.0f} per second"),
        (
            f"ordinary LaTeX, best of 4 times {at_once}",
            f"{at_once / min(parts)[0]:,.0f} per second",
        ),
        ("ordinary LaTeX: called equal (half are)", f"{equal} of {len(latex)}"),
    ]
    table("verify: one worker, pairs not seen before", device, "what | measured", lines)


# ------------------------------------------------------------------------------------- operations

VIEWS = "view t transpose unsqueeze slice expand _unsafe_view select permute alias detach".split()
VIEWS += "split unbind reshape squeeze as_strided".split()


class Operations(TorchDispatchMode):
    """Counts the operations that are run, views left out."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function._schema.name.partition("::")[2] not in VIEWS
        return function(*args, **(kwargs or {}))


def operations(args: Args, s: Shape, device: torch.device) -> None:
    """Print how many operations a decoded token takes in 28 layers, whatever their width."""
    lines = []
    for name in ("base", "with adapters"):
        model = random_model(replace(s, layers=28), device, vocab=1024).to(torch.bfloat16)
        if name != "base":
            model = models.with_adapters(model, 64, 128, 1 << 30)
        model.eval()
        ids, cache = torch.ones(2, 6, dtype=torch.long, device=device), DynamicCache()
        mask = torch.ones_like(ids)
        with torch.inference_mode():
            model(ids[:, :5], attention_mask=mask[:, :5], past_key_values=cache)
            with Operations() as seen:
                model(ids[:, 5:], attention_mask=mask, past_key_values=cache)
        lines.append((name, f"{seen.count:,}"))
    table("operations: of one decoded token, 28 layers", device, "model | operations", lines)


Mode = Callable[[Args, Shape, torch.device], None]
MODES: dict[str, Mode] = {
    "cost": cost,
    "score": score,
    "rollout": rollouts,
    "step": step,
    "eval": evaluation,
    "verify": verify,
    "memory": memory,
    "scaling": scaling,
    "operations": operations,
}


def main(argv: Sequence[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("what", choices=[*MODES, "all"])
    add("--cuda", action="store_true", help="on one CUDA GPU, at Qwen3-1.7B's shape")
    add("--shape", choices=SHAPES)
    sheet = "cost: rates from a card's data sheet instead of this machine's; needs no GPU"
    add("--gpu", choices=CARDS, help=sheet)
    add("--repeats", type=int, default=3, help="the best of so many counts")
    add("--one-process", action="store_true", help="quick, but then peaks say nothing")
    args = parser.parse_args(argv)
    args.device = torch.device("cuda" if args.cuda else "cpu")
    args.shape = args.shape or ("qwen3-1.7b" if args.cuda else "small")
    failed = []
    for name in MODES if args.what == "all" else [args.what]:
        try:
            MODES[name](args, SHAPES[args.shape], args.device)
        except Exception:
            failed.append(name)
            print(f"\n{name}: failed\n\n{traceback.format_exc()}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()  # the next mode may measure in processes of its own
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
