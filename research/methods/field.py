"""SDPO and RLSD beside SGSD, GRPO and OPSD in the harder world: two tables of README.md.

    python research/methods/field.py --show research/methods/field.json

The rows are compare.py's: its table.json of these rows in the world lock will do. Accuracy between
two evaluations is taken to be linear in what was spent. Processor seconds are of training alone,
without bank and evaluation: the mean of a row's runs that measured them, evenly spread over steps.
"""

import argparse
import itertools
import json
import pathlib
import statistics
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from research.markdown_table import head_of, row_of
from research.methods import compare
from research.methods.compare import BASES, Job, with_interval

STEPS = (5, 20, 60)  # after which a run is shown
SHORT = "grpo, sampled as sgsd"
ROWS = ("sgsd", "grpo", SHORT, "opsd", *compare.NEW)
BESIDE = ("sgsd", SHORT)  # what the others are compared with
SPENT = ("generated_tokens", "processor_seconds")


def runs_of(kept: Job, name: str) -> list[Job]:
    """A row's jobs by seed."""
    runs = [job for job in kept["results"].values() if job["method"] == name]
    return sorted(runs, key=lambda job: job["seed"])


def curves(kept: Job, name: str) -> list[dict[int, float]]:
    """Each seed's accuracy after 0 steps, which is the base model's, and after STEPS."""
    of_seeds = []
    for both in zip(runs_of(kept, name), runs_of(kept, "base")):
        curve = compare.curve(*both)
        of_seeds.append({step: curve[step] for step in (0, *STEPS)})
    return of_seeds


def cost_of(kept: Job, name: str, run: Job, cost: str) -> list[float]:
    """What a row's run had spent after 0 steps, and after STEPS."""
    if cost == "generated_tokens":
        return [0, *[run["generated_at"][str(step)] for step in STEPS]]
    whole = statistics.mean(job[cost] for job in runs_of(kept, name) if cost in job)
    return [whole * step / STEPS[-1] for step in (0, *STEPS)]


def value_at(where: list[float], values: list[float], x: float) -> float:
    """Linear between two points of a curve."""
    for (x0, y0), (x1, y1) in itertools.pairwise(zip(where, values)):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    raise ValueError(f"{x} is outside {where[0]}..{where[-1]}")


def at(kept: Job, name: str, cost: str, budgets: list[float]) -> list[float]:
    """Each seed's accuracy where its run has spent its budget."""
    values = []
    for run, curve, budget in zip(runs_of(kept, name), curves(kept, name), budgets):
        where = cost_of(kept, name, run, cost)
        values.append(value_at(where, list(curve.values()), budget))
    return values


def interval(values: list[float], sign: str = "") -> str:
    return with_interval(values, sign) if len(values) > 1 else f"{values[0]:{sign}.1%}"


def less(ours: list[float], others: list[float]) -> str:
    return interval([a - b for a, b in zip(ours, others)], "+")


def gaps(kept: Job, name: str, other: str, step: int) -> str:
    """A row's accuracy after a step less another's; "" for the row itself."""
    both = [[curve[step] for curve in curves(kept, x)] for x in (name, other)]
    return "" if name == other else less(*both)


def passed(kept: Job, name: str) -> str:
    """pass@2 at the end, of the seeds that kept each problem's score."""
    shares = []
    for run in runs_of(kept, name):
        if "last_scores" in run:
            shares.append(statistics.mean(score > 0 for score in run["last_scores"].values()))
    return interval(shares)


def by_steps(kept: Job) -> list[str]:
    """A row's accuracy after some steps, and its differences to others."""
    head = ["method", *[f"{step} steps" for step in STEPS], "pass@2"]
    head += [*[f"less {x}" for x in BESIDE], f"less {SHORT}, {STEPS[1]} steps"]
    lines = head_of(head)
    for name in BASES:
        ends = [compare.final(run) for run in runs_of(kept, name)]
        lines.append(row_of([name, "", "", interval(ends), passed(kept, name), "", "", ""]))
    for name in ROWS:
        of_seeds = curves(kept, name)
        cells = [name, *[interval([curve[step] for curve in of_seeds]) for step in STEPS]]
        cells.append(passed(kept, name))
        cells += [gaps(kept, name, other, STEPS[-1]) for other in BESIDE]
        cells.append(gaps(kept, name, SHORT, STEPS[1]))
        lines.append(row_of(cells))
    return lines


def at_equal(kept: Job) -> list[str]:
    """Each row beside others where both have spent as much: all that the cheaper of them did.

    Budgets are each seed's own.
    """
    head = ["method"]
    for cost in SPENT:
        head += [cost.replace("_", " "), *[f"less {x}" for x in BESIDE]]
    lines = head_of(head)
    for name in ROWS:
        cells = [name]
        for cost in SPENT:
            wholes = [cost_of(kept, name, run, cost)[-1] for run in runs_of(kept, name)]
            cells.append(f"{statistics.mean(wholes):,.0f}")
            for other in BESIDE:
                others = [cost_of(kept, other, run, cost)[-1] for run in runs_of(kept, other)]
                budgets = list(map(min, wholes, others))
                both = [at(kept, x, cost, budgets) for x in (name, other)]
                cells.append("" if name == other else less(*both))
        lines.append(row_of(cells))
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--show", type=pathlib.Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    kept = json.loads(args.show.read_text())
    print("\n".join([*by_steps(kept), "", *at_equal(kept)]))


if __name__ == "__main__":
    main()
