"""The turns of `rollout.stream` from lengths alone. A test holds them beside a real stream.

Left out: states, which take room as well, and the end of a model's context.
"""

import collections
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollout import FREE_PLACES, READ_TOKENS

# Of a thinking model on competition problems, assumed: a mean of 16,000 tokens, of which 4% pass
# 38,912: ln 16,000 = MU + SIGMA^2 / 2, ln 38,912 = MU + 1.751 SIGMA.
MU, SIGMA = 9.491, 0.616


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
        fits = fit([*running, *longer], places, 2 * FREE_PLACES)
        if not (fits and fit(longer, READ_TOKENS)):
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
        while not fit(running, places, 2 * FREE_PLACES):
            waiting.appendleft(running.pop())
