"""The tables of results/polarity.md, from the accuracies that are kept in results/.

    python experiments/polarity_tables.py

Means over seeds with Student's 95% intervals; differences are paired by the seeds that both methods
have.
"""

import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "experiments"))

import compare

LONG = ("compare_lock_long", "compare_lock_long_sgsd", "polarity_long_jobs")
SHORT = ("compare_lock", "polarity_lock_jobs")
PAIRS = (  # of methods over 180 steps whose difference is shown
    ("consistent tokens", "sgsd"),
    ("consistent tokens, 3e-4", "sgsd, 3e-4"),
    ("consistent tokens", "sgsd, 3e-4"),
    ("consistent tokens", "consistent tokens, 3e-4"),
    ("consistent tokens", "grpo"),
)
RELATIVES = ("confident tokens", "all tokens", "agreeing tokens")
Runs = dict[str, dict[int, dict[str, float]]]  # {method: {seed: {step: accuracy}}}


def load(tables: tuple[str, ...]) -> Runs:
    """The accuracies on the test problems of every run in these files of results/."""
    runs: Runs = {}
    for table in tables:
        results = json.loads((ROOT / "results" / f"{table}.json").read_text())["results"]
        for run in results.values():
            if run["kind"] == "train":
                runs.setdefault(run["method"], {})[run["seed"]] = run["accuracy"]
    return runs


def difference(runs: Runs, ours: str, theirs: str, step: str) -> str:
    """The mean difference of two methods after a step, with its interval."""
    seeds = sorted(runs[ours].keys() & runs[theirs].keys())
    gaps = [runs[ours][seed][step] - runs[theirs][seed][step] for seed in seeds]
    return compare.with_interval(gaps, "+")


def accuracies(runs: Runs, methods: tuple[str, ...], steps: tuple[str, ...]) -> list[str]:
    """A row per method: its accuracy after these steps, and each seed's after the last."""
    lines = [
        compare.row_of(["method", *[f"after {step}" for step in steps], "by seed, in the end"])
    ]
    lines.append("|---" * (len(steps) + 2) + "|")
    for method in methods:
        seeds = sorted(runs[method])
        cells = [method]
        for step in steps:
            cells.append(compare.with_interval([runs[method][seed][step] for seed in seeds]))
        ends = [f"{100 * runs[method][seed][steps[-1]]:.1f}" for seed in seeds]
        lines.append(compare.row_of([*cells, ", ".join(ends)]))
    return lines


def differences(
    runs: Runs, pairs: tuple[tuple[str, str], ...], steps: tuple[str, ...]
) -> list[str]:
    """A row per pair of methods: their difference after these steps."""
    lines = [compare.row_of(["difference", *[f"after {step}" for step in steps]])]
    lines.append("|---" * (len(steps) + 1) + "|")
    for ours, theirs in pairs:
        cells = [difference(runs, ours, theirs, step) for step in steps]
        lines.append(compare.row_of([f"({ours}) - ({theirs})", *cells]))
    return lines


def main() -> None:
    both_rates = ("sgsd", "sgsd, 3e-4", "consistent tokens", "consistent tokens, 3e-4")
    runs, steps = load(LONG), ("20", "60", "120", "180")
    print("\n".join(accuracies(runs, (*both_rates, "grpo", "no polarity"), steps)))
    print("\n".join(["", *differences(runs, PAIRS, steps)]))
    runs, steps = load(SHORT), ("20", "40", "60")
    methods = (*both_rates, *RELATIVES, "grpo")
    print("\n".join(["", *accuracies(runs, methods, steps)]))
    pairs = [(method, "sgsd") for method in methods if method != "sgsd"]
    pairs.append(("consistent tokens, 3e-4", "sgsd, 3e-4"))
    print("\n".join(["", *differences(runs, tuple(pairs), steps)]))


if __name__ == "__main__":
    main()
