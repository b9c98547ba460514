"""Hours of the paper's run: the table of docs/reproduce.md. Arithmetic, nothing is measured.

    python research/cost/hours.py --gpu h100

Limit: FLOPs or bytes over the data sheet's rates, whichever takes longer. Expected: scoring and
learning COMPUTE times as long, the adapters in fp32; `generate` TOKEN_S more for each token of a
batch, and a copy of its cache for each; an engine ENGINE times the limit. Completions are as long
as they may be. Left out: reading prompts, embedding, verdicts, loading, merges of evolutions.
"""

import argparse
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import numpy as np

from lib import config
from methods.grpo import GRPOConfig
from research.cost.counts import QWEN3, Counts
from research.markdown_table import head_of, row_of

# COMPUTE is measured on a CPU (research/speed: 2.1 times the least for scoring, 2.0 for the
# student). TOKEN_S and ENGINE are assumed; adapters alone take an engine 1.33 to 1.39 (trl#7017).
COMPUTE, TOKEN_S, ENGINE = 2.1, 0.030, 2.0
PLAIN, GUIDED, SKILLED = 200, 400, 1200  # tokens of a student's, a teacher's prompt, of --skills'
GPUS = 8  # §4.1
# Tokens of an extraction's prompt, counted once with Qwen3's tokenizer; and of the merges of
# Qwen3-1.7B's candidates when nothing merges, as bank_scale.py of commit 1e50ec6 counts them:
# replies, mean tokens of prompt and reply, decoding steps.
MEMORY, MERGES, MERGE, MERGE_STEPS = 1334, 45, (2973, 2826), 12462
Hours = np.ndarray  # [3]: at the limit, with generate, with an engine


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


def decoding(
    c: Counts, card: Card, prompt: int, new: int, samples: float, rows: float, steps: int = 0
) -> Hours:
    """Samples of one policy on one GPU, `rows` at a time, or in so many steps."""
    steps = steps or math.ceil(samples / rows) * new
    flops, moved = c.decoding(prompt, new, samples, steps)
    copied = 2 * samples * c.cache(prompt, new)
    limit = max(flops / card.flops, moved / card.bandwidth)
    generate = max(flops / card.flops, (moved + copied) / card.bandwidth) + TOKEN_S * steps
    return np.array([limit, generate, ENGINE * limit]) / 3600


def passes(card: Card, flops: float, in_fp32: float, moved: float) -> Hours:
    """Scoring or learning."""
    seconds = (flops - in_fp32) / card.flops + in_fp32 / card.fp32
    expected = COMPUTE * max(seconds, moved / card.bandwidth)
    return np.array([max(flops / card.flops, moved / card.bandwidth), expected, expected]) / 3600


def learning(c: Counts, card: Card, n: int, predicted: int, rows: float) -> Hours:
    """The student's forward and backward on rows of n tokens."""
    flops = rows * (c.forward(n, predicted) + c.backward(n, predicted))
    return passes(card, flops, 4 * rows * c.fp32(n), 3 * rows * c.weights)


def step(c: Counts, card: Card, gpus: int) -> Hours:
    """A step of SGSD on one of so many GPUs; where an engine samples, it is a step on TRL."""
    cfg = config.Config()
    T, rows = cfg.max_new_tokens, cfg.batch_size / gpus
    teachers, n = rows * cfg.num_teachers, GUIDED + T
    scoring = passes(card, teachers * c.forward(n, T), teachers * c.fp32(n), rows * c.weights)
    sampling = decoding(c, card, PLAIN, T, rows, T)
    return sampling + scoring + learning(c, card, PLAIN + T, T, rows)


def step_of_grpo(c: Counts, card: Card, gpus: int, T: int) -> Hours:
    rollouts = config.Config().batch_size * GRPOConfig.generations / gpus
    sampling = decoding(c, card, PLAIN, T, rollouts, GRPOConfig.rollout_rows)
    return sampling + learning(c, card, PLAIN + T, T, rollouts)


def rows_of(c: Counts, card: Card, tokens: int) -> int:
    """Samples decoded together: 16, or 8 (--rows, --rollout-rows) if their cache is too large."""
    cache = 16 * 2 * c.kind * c.layers * c.kv * (PLAIN + tokens)
    return 16 if c.weights + cache < card.memory else 8


def hours(c: Counts, card: Card) -> dict[str, Hours]:
    """Each part, on one of 8 GPUs but for the last four."""
    cfg, long = config.Config(), config.EvalConfig.max_new_tokens
    rows, seeds, short = rows_of(c, card, long), cfg.cold_start / GPUS, cfg.max_new_tokens
    first_bank = decoding(c, card, PLAIN, cfg.cold_start_tokens, seeds, rows)
    first_bank += decoding(c, card, MEMORY, cfg.reply_tokens, seeds, 16)
    first_bank += decoding(c, card, *MERGE, MERGES / GPUS, 16, MERGE_STEPS)
    window, evolutions = cfg.evolve_every * cfg.batch_size / GPUS, cfg.steps // cfg.evolve_every
    evolving = evolutions * decoding(c, card, MEMORY, cfg.reply_tokens, window, 16)
    evolving[2] = evolving[1]  # always with generate
    policies = 1 + cfg.steps // cfg.checkpoint_every
    evaluating = policies * decoding(c, card, PLAIN, long, 12 * 90 / GPUS, rows)
    parts = {
        f"{cfg.steps} steps": cfg.steps * step(c, card, GPUS),
        "first bank": first_bank,
        f"{evolutions} evolutions": evolving,
        f"{policies} evaluations, 90 problems x 12": evaluating,
    }
    parts["**all of it**"] = np.sum([*parts.values()], axis=0)
    grpo = GRPOConfig.max_new_tokens
    parts["GRPO"] = cfg.steps * step_of_grpo(c, card, GPUS, grpo)
    parts["GRPO --short"] = cfg.steps * step_of_grpo(c, card, GPUS, short)
    parts["one GPU: 20 steps"] = 20 * step(c, card, 1)
    parts["one GPU: 20 steps of GRPO --short"] = 20 * step_of_grpo(c, card, 1, short)
    parts["one GPU: 50 problems x 4"] = decoding(c, card, PLAIN, 4096, 200, 16)
    parts["one GPU: the same with --skills"] = decoding(c, card, SKILLED, 4096, 200, 16)
    return parts


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gpu", choices=CARDS, default="h100")
    args = parser.parse_args(argv)
    for model, c in QWEN3.items():
        print(f"\n{model}\n")
        print("\n".join(head_of(["part", "at the limit", "with generate", "with an engine"])))
        for name, three in hours(c, CARDS[args.gpu]).items():
            print(row_of([name, *[f"{x:,.2f}" for x in three]]))


if __name__ == "__main__":
    main()
