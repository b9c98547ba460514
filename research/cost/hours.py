"""Hours of the paper's run: the tables of docs/reproduce.md. Arithmetic, nothing is measured.

    python research/cost/hours.py --gpu h100

Limit: FLOPs or bytes over the data sheet's rates, whichever takes longer. With `generate`: the
turns of a stream, TOKEN_S more for each token of a batch, the whole padded cache read for each and
copied once a turn; scoring, learning and reading prompts COMPUTE times as long as they must, the
adapters in fp32. An engine: ENGINE times the limit. Completions have their full length, or thinking
ones assumed lengths. Left out: embedding, verdicts, loading, merges of evolutions.
"""

import argparse
import collections
import itertools
import math
import pathlib
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import numpy as np

import rollout
from lib import config
from methods.grpo import GRPOConfig
from research.cost.counts import QWEN3, Counts
from research.markdown_table import head_of, row_of

# COMPUTE is measured on a CPU (at f8ace2d 2.1 times the least for scoring, 2.0 for the student).
# TOKEN_S and ENGINE are assumed; adapters alone take an engine 1.33 to 1.39 (trl#7017).
COMPUTE, TOKEN_S, ENGINE = 2.1, 0.030, 2.0
PLAIN, GUIDED, SKILLED = 200, 400, 1200  # tokens of a student's, a teacher's prompt, of --skills'
GPUS = 8  # §4.1
DEFAULTS = config.Config()
ENCODER = 2.4e9  # bytes of 0.6 billion weights in fp32
# Tokens of an extraction's prompt, counted once with Qwen3's tokenizer; and of the merges of
# Qwen3-1.7B's candidates when nothing merges, as bank_scale.py of commit 1e50ec6 counts them:
# replies, mean tokens of prompt and reply, decoding steps.
MEMORY, MERGES, MERGE, MERGE_STEPS = 1334, 45, (2973, 2826), 12462
# Of a thinking model on competition problems, assumed: a mean of 16,000 tokens, of which 4% pass
# 38,912: ln 16,000 = MU + SIGMA^2 / 2, ln 38,912 = MU + 1.751 SIGMA.
MU, SIGMA = 9.491, 0.616
Hours = np.ndarray  # [3]: at the limit, with generate, with an engine
Lengths = Callable[[int, int], list[int]]  # of so many completions, of so many tokens at most


class Card(NamedTuple):
    """A GPU by its data sheet."""

    flops: float  # per second, dense bf16
    fp32: float  # the same in fp32, without tensor cores
    bandwidth: float  # bytes per second of its memory
    memory: float  # bytes


CARDS = {  # of NVIDIA's, SXM; where a sheet has bf16 with sparsity, half of it
    "h100": Card(989e12, 67e12, 3.35e12, 80e9),
    "h200": Card(989e12, 67e12, 4.8e12, 141e9),
    "a100": Card(312e12, 19.5e12, 2.039e12, 80e9),
}


# ---------------------------------------------------------------------- the turns of a stream
#
# From lengths alone; a test holds them beside a real one's. Left out: states, which take room as
# well, and the end of a model's context.


def full(count: int, limit: int) -> list[int]:
    """Lengths of completions that all reach the limit."""
    return [limit] * count


def log_normal(count: int, limit: int) -> list[int]:
    """The quantiles of that distribution, cut at the limit, in any order."""
    lengths, z = [], statistics.NormalDist(MU, SIGMA)
    for i in range(count):
        lengths.append(min(limit, round(math.exp(z.inv_cdf((i + 0.5) / count)))))
    random.Random(0).shuffle(lengths)
    return lengths


@dataclass
class Row:
    """A job, in tokens."""

    prompt: int
    length: int  # of its completion
    limit: int  # that this might have
    drawn: int = 0

    @property
    def left(self) -> int:
        return self.limit - self.drawn if self.drawn < self.length else 0


class Turn(NamedTuple):
    """What a stream computes before it yields."""

    packs: list[tuple[int, int]]  # that are read: rows, and tokens of the longest
    rows: int  # that get tokens then
    width: int  # tokens of the longest of these
    steps: int  # tokens of each


def width(rows: Sequence[Row]) -> int:
    return max(row.prompt + row.drawn for row in rows)


def fit(rows: Sequence[Row], places: float, extra: int = 0) -> bool:
    return len(rows) < 2 or len(rows) * (width(rows) + extra) <= places


def next_pack(
    waiting: collections.deque[Row], running: list[Row], most: int, places: float
) -> list[Row]:
    """Take the rows that are read together."""
    pack: list[Row] = []
    while waiting and len(running) + len(pack) < most:
        longer = [*pack, waiting[0]]
        fits = fit([*running, *longer], places, 2 * rollout.FREE_PLACES)
        if not (fits and fit(longer, rollout.READ_TOKENS)):
            break
        pack.append(waiting.popleft())
    return pack


def turns(jobs: Sequence[Row], most: int, places: float, turn: int = 64) -> Iterator[Turn]:
    """A stream of at most `most` rows, in a cache of so many places."""
    waiting, running = collections.deque(jobs), list[Row]()
    while waiting or running:
        packs = []
        while pack := next_pack(waiting, running, most, places):
            packs.append((len(pack), width(pack)))
            for row in pack:
                row.drawn += 1
            running += pack
        to_come = [row.length - row.drawn for row in running]  # `generate` ends where all have
        steps = min(turn, max(row.left for row in running), max(to_come))
        yield Turn(packs, len(running), width(running), steps)
        for row in running:
            row.drawn = min(row.drawn + steps, row.length)
        running = [row for row in running if row.left]
        while not fit(running, places, 2 * rollout.FREE_PLACES):
            waiting.appendleft(running.pop())


# -------------------------------------------------------------------------- seconds


def least(c: Counts, card: Card, flops: float, moved: float) -> float:
    """Seconds at the hardware's limit."""
    return max(flops / card.flops, moved / card.bandwidth)


def pass_seconds(card: Card, flops: float, in_fp32: float, moved: float) -> float:
    """Expected for scoring, learning or reading."""
    seconds = (flops - in_fp32) / card.flops + in_fp32 / card.fp32
    return COMPUTE * max(seconds, moved / card.bandwidth)


def turn_seconds(c: Counts, card: Card, turn: Turn) -> float:
    """Expected for a turn of a stream: packs are read, then tokens decoded."""
    seconds = 0.0
    for rows, n in turn.packs:
        flops = rows * c.forward(n, 1)
        seconds += pass_seconds(card, flops, c.fp32(rows * n), c.weights)
    n = turn.width + turn.steps / 2
    cache = turn.rows * n * c.place
    flops, moved = turn.rows * c.token(n), c.weights + cache
    seconds += turn.steps * (TOKEN_S + least(c, card, flops, moved))
    return seconds + 2 * cache / card.bandwidth


def places(c: Counts, card: Card) -> float:
    """As `rollout.cache_places`, beside weights, AdamW's moments and the encoder."""
    there = c.weights + 8 * c.adapters + ENCODER
    return (rollout.MEMORY_SHARE * card.memory - there) / c.place


def drawing(
    c: Counts, card: Card, jobs: list[Row], gpus: int, most: int = 0, meet: bool = False
) -> Hours:
    """Completions by so many GPUs, `most` rows each, 0 for all. meet: they wait after each turn."""
    flops, moved, longest, ranks = 0.0, 0.0, 0, []
    for row in jobs:
        of_row = c.decoding(row.prompt, row.length, 1, 0)
        flops, moved = flops + of_row[0] / gpus, moved + of_row[1] / gpus
    for rank in range(gpus):
        stream = [*turns(jobs[rank::gpus], most or len(jobs), places(c, card))]
        longest = max(longest, sum(turn.steps + len(turn.packs) for turn in stream))
        ranks.append([turn_seconds(c, card, turn) for turn in stream])
    seconds = max(map(sum, ranks))
    if meet:
        seconds = sum(map(max, itertools.zip_longest(*ranks, fillvalue=0.0)))
    limit = least(c, card, flops, moved + longest * c.weights)
    return np.array([limit, seconds, ENGINE * limit]) / 3600


def jobs_of(prompt: int, limit: int, count: int, lengths: Lengths = full) -> list[Row]:
    return [Row(prompt, length, limit) for length in lengths(count, limit)]


def passes(c: Counts, card: Card, flops: float, in_fp32: float, moved: float) -> Hours:
    """Scoring or learning."""
    expected = pass_seconds(card, flops, in_fp32, moved)
    return np.array([least(c, card, flops, moved), expected, expected]) / 3600


def learning(c: Counts, card: Card, n: int, predicted: int, rows: float) -> Hours:
    """The student's forward and backward on rows of n tokens."""
    flops = rows * (c.forward(n, predicted) + c.backward(n, predicted))
    return passes(c, card, flops, 4 * rows * c.fp32(n), 3 * rows * c.weights)


def step(c: Counts, card: Card, gpus: int, cfg: config.Config = DEFAULTS) -> Hours:
    """A step of SGSD; where an engine samples, it is a step on TRL."""
    T, rows = cfg.max_new_tokens, cfg.batch_size / gpus
    teachers, n = rows * cfg.num_teachers, GUIDED + T
    scoring = passes(c, card, teachers * c.forward(n, T), teachers * c.fp32(n), rows * c.weights)
    sampling = drawing(c, card, jobs_of(PLAIN, T, cfg.batch_size), gpus)
    return sampling + scoring + learning(c, card, PLAIN + T, T, rows)


def grpo_step(
    c: Counts,
    card: Card,
    gpus: int,
    most: int,
    T: int,
    lengths: Lengths,
    cfg: config.Config = DEFAULTS,
) -> Hours:
    """A step of GRPO, of at most T tokens."""
    jobs = jobs_of(PLAIN, T, cfg.batch_size * GRPOConfig.generations, lengths)
    total = drawing(c, card, jobs, gpus, most)
    for row in jobs:
        total += learning(c, card, PLAIN + row.length, row.length, 1 / gpus)
    return total


def replies(c: Counts, card: Card, gpus: int, count: int, cfg: config.Config = DEFAULTS) -> Hours:
    """Extractions from so many solutions."""
    return drawing(
        c, card, jobs_of(MEMORY, cfg.reply_tokens, count), gpus, cfg.rollout_rows or 64, True
    )


def first_bank(c: Counts, card: Card, gpus: int, lengths: Lengths) -> Hours:
    cfg = config.Config()
    jobs = jobs_of(PLAIN, cfg.cold_start_tokens, cfg.cold_start, lengths)
    solving = drawing(c, card, jobs, gpus, cfg.rollout_rows or 64, True)
    limit = least(c, card, *c.decoding(*MERGE, MERGES / gpus, MERGE_STEPS))
    merging = np.array([limit, limit + TOKEN_S * MERGE_STEPS, ENGINE * limit]) / 3600
    return solving + replies(c, card, gpus, cfg.cold_start) + merging


def small_bank(c: Counts, card: Card) -> Hours:
    """32 short solutions, their extractions, and four layers of two merges of full length."""
    T, reply_tokens = config.Config.max_new_tokens, config.Config.reply_tokens
    layer = drawing(c, card, jobs_of(MERGE[0], reply_tokens, 2), 1)
    return drawing(c, card, jobs_of(PLAIN, T, 32), 1) + replies(c, card, 1, 32) + 4 * layer


def evolution(c: Counts, card: Card, gpus: int, cfg: config.Config = DEFAULTS) -> Hours:
    hours = replies(c, card, gpus, cfg.evolve_every * cfg.batch_size, cfg)
    return hours[[0, 1, 1]]  # always with generate


def on_eight(c: Counts, card: Card, lengths: Lengths) -> dict[str, Hours]:
    """Each part of the paper's run; and GRPO in its place."""
    cfg, limit = config.Config(), config.EvalConfig.max_new_tokens
    evolutions, policies = cfg.steps // cfg.evolve_every, 1 + cfg.steps // cfg.checkpoint_every
    samples = jobs_of(PLAIN, limit, 90 * config.EvalConfig.samples, lengths)
    evaluation = drawing(c, card, samples, GPUS, config.EvalConfig.rows, True)
    parts = {
        f"{cfg.steps} steps": cfg.steps * step(c, card, GPUS),
        "first bank": first_bank(c, card, GPUS, lengths),
        f"{evolutions} evolutions": evolutions * evolution(c, card, GPUS),
        f"{policies} evaluations, 90 problems x 12": policies * evaluation,
    }
    parts["**all of it**"] = np.sum([*parts.values()], axis=0)
    long, short = GRPOConfig.max_new_tokens, cfg.max_new_tokens
    one = grpo_step(c, card, GPUS, GRPOConfig.rollout_rows, long, lengths)
    parts[f"GRPO, {cfg.steps} steps"] = cfg.steps * one
    parts["the same with --short"] = cfg.steps * grpo_step(c, card, GPUS, 0, short, full)
    return parts


def on_one(c: Counts, card: Card) -> dict[str, float]:
    """Hours with `generate` on one GPU."""
    cfg = config.Config()
    sgsd, grpo = step(c, card, 1), grpo_step(c, card, 1, 0, cfg.max_new_tokens, full)
    samples, skilled = jobs_of(PLAIN, 4096, 200), jobs_of(SKILLED, 4096, 200)
    more = jobs_of(PLAIN, 4096, 800)
    parts = {
        "first bank": first_bank(c, card, 1, full),
        "first bank, assumed lengths": first_bank(c, card, 1, log_normal),
        "a bank of 32 short solutions": small_bank(c, card),
        "an evolution": evolution(c, card, 1),
        "20 steps of SGSD": 20 * sgsd,
        "60 steps of SGSD": 60 * sgsd,
        "200 steps of SGSD": 200 * sgsd,
        "20 steps of GRPO --short": 20 * grpo,
        "200 steps of GRPO --short": 200 * grpo,
        "50 problems x 4": drawing(c, card, samples, 1, config.EvalConfig.rows, True),
        "200 problems x 4": drawing(c, card, more, 1, config.EvalConfig.rows, True),
        "50 problems x 4, with --skills": drawing(
            c, card, skilled, 1, config.EvalConfig.rows, True
        ),
    }
    return {name: float(hours[1]) for name, hours in parts.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gpu", choices=CARDS, default="h100")
    card = CARDS[parser.parse_args(argv).gpu]
    columns = ["generate", "an engine", "the limit"]
    for model, c in QWEN3.items():
        print(f"\n{model}, {GPUS} GPUs; then the same with assumed lengths\n")
        print("\n".join(head_of(["part", *columns, *columns])))
        by_lengths = [on_eight(c, card, lengths) for lengths in (full, log_normal)]
        for name in by_lengths[0]:
            cells = [f"{parts[name][i]:,.2f}" for parts in by_lengths for i in (1, 2, 0)]
            print(row_of([name, *cells]))
    print("\nOne GPU, with generate\n")
    print("\n".join(head_of(["part", *QWEN3])))
    ones = [on_one(c, card) for c in QWEN3.values()]
    for name in ones[0]:
        print(row_of([name, *[f"{parts[name]:,.2f}" for parts in ones]]))


if __name__ == "__main__":
    main()
