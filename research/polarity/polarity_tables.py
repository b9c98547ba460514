"""The tables and the curves of this folder's README.md, from the runs kept in research/.

    python research/polarity/polarity_tables.py
    python research/polarity/polarity_tables.py --picture research/polarity/polarity.png

Means over seeds with Student's 95% intervals; differences are paired by the seeds that both methods
have.
"""

import argparse
import json
import pathlib
import statistics
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from research.markdown_table import head_of, row_of
from research.methods import compare

FILES = {  # of research/, whose runs a world's tables show
    "lock_long": (
        "methods/compare_lock_long",
        "methods/compare_lock_long_sgsd",
        "polarity/polarity_long_jobs",
    ),
    "lock": ("methods/compare_lock", "polarity/polarity_lock_jobs"),
    "tiny": ("methods/compare_tiny", "polarity/polarity_tiny_jobs"),
    "ideas": ("polarity/polarity_ideas",),
}
STEPS = {
    "lock_long": ("20", "60", "120", "180"),
    "lock": ("20", "40", "60"),
    "tiny": ("5", "10", "20", "40"),
    "ideas": ("20", "60", "120", "180"),
}
BOTH_RATES = ("sgsd", "sgsd, 3e-4", "consistent tokens", "consistent tokens, 3e-4")
RELATIVES = ("confident tokens", "all tokens", "agreeing tokens")
METHODS = {  # rows of each world
    "lock_long": (*BOTH_RATES, "grpo", "no polarity", *compare.BY_HAND),
    "lock": (*BOTH_RATES, *RELATIVES, "grpo", "no polarity", *compare.BY_HAND),
    "tiny": ("sgsd", "consistent tokens", "grpo"),
    "ideas": ("centred",),
}
HIGH = ("consistent tokens", "sgsd")
LOW = ("consistent tokens, 3e-4", "sgsd, 3e-4")
FULL = (compare.FULL_CONSISTENT, compare.FULL)
PAIRS = {  # of methods whose difference is shown
    "lock_long": (
        HIGH,
        LOW,
        ("consistent tokens", "sgsd, 3e-4"),
        ("consistent tokens", "consistent tokens, 3e-4"),
        ("consistent tokens", "grpo"),
        FULL,
        ("consistent tokens, full bank", "grpo"),
    ),
    "lock": (
        ("sgsd, 3e-4", "sgsd"),
        HIGH,
        ("consistent tokens, 3e-4", "sgsd"),
        ("confident tokens", "sgsd"),
        ("all tokens", "sgsd"),
        ("agreeing tokens", "sgsd"),
        ("grpo", "sgsd"),
        LOW,
        ("consistent tokens", "grpo"),
        FULL,
    ),
    "tiny": (HIGH, ("consistent tokens", "grpo")),
}
BUDGETS = (60_000, 120_000, 180_000)  # sampled tokens at which runs of 180 steps are compared
CURVES = {  # pictures side by side: a title, its world and the methods shown
    "harder world, 60 steps, own banks": ("lock", METHODS["lock"][:9]),
    "harder world, 180 steps, own banks": ("lock_long", METHODS["lock_long"][:6]),
    "harder world, 180 steps, the full bank by hand": ("lock_long", ("grpo", *compare.BY_HAND)),
}
SHOWN = (*METHODS["lock_long"], *RELATIVES)  # each with a colour of its own
Runs = dict[str, dict[int, compare.Job]]  # {method: {seed: its finished job}}


def load(world: str) -> Runs:
    """Every run of this world that is kept, with its accuracies on the test problems."""
    runs: Runs = {}
    for file in FILES[world]:
        results = json.loads((ROOT / "research" / f"{file}.json").read_text())["results"]
        for run in results.values():
            if run["kind"] == "train":
                runs.setdefault(run["method"], {})[run["seed"]] = run
    return runs


def difference(runs: Runs, ours: str, theirs: str, step: str) -> str:
    """The mean difference of two methods after a step, with its interval."""
    gaps = []
    for seed in sorted(runs[ours].keys() & runs[theirs].keys()):
        our, their = runs[ours][seed], runs[theirs][seed]
        gaps.append(our["accuracy"][step] - their["accuracy"][step])
    return compare.with_interval(gaps, "+")


def accuracies(runs: Runs, methods: Sequence[str], steps: Sequence[str]) -> list[str]:
    """A row per method: its accuracy after these steps, and each seed's after the last."""
    titles = ["method", *[f"after {step}" for step in steps], "by seed, in the end"]
    lines = head_of(titles)
    for method in methods:
        curves = [runs[method][seed]["accuracy"] for seed in sorted(runs[method])]
        cells = [method]
        for step in steps:
            cells.append(compare.with_interval([curve[step] for curve in curves]))
        cells.append(", ".join(f"{100 * curve[steps[-1]]:.1f}" for curve in curves))
        lines.append(row_of(cells))
    return lines


def differences(runs: Runs, pairs: Sequence[tuple[str, str]], steps: Sequence[str]) -> list[str]:
    """A row per pair of methods: their difference after these steps."""
    titles = ["difference", *[f"after {step}" for step in steps]]
    lines = head_of(titles)
    for ours, theirs in pairs:
        cells = [difference(runs, ours, theirs, step) for step in steps]
        lines.append(row_of([f"({ours}) - ({theirs})", *cells]))
    return lines


def at_tokens(run: compare.Job, budget: int) -> float:
    """A run's accuracy where it has sampled so many tokens, linear between two evaluations."""
    spent = list(run["generated_at"].values())
    return compare.value_at(spent, list(run["accuracy"].values()), budget)


def by_tokens(runs: Runs, methods: Sequence[str]) -> list[str]:
    """A row per method: its accuracy at equal sampled tokens."""
    titles = ["method", *[f"at {budget:,} tokens" for budget in BUDGETS]]
    lines = head_of(titles)
    for method in methods:
        cells = [method]
        for budget in BUDGETS:
            found = [at_tokens(run, budget) for run in runs[method].values()]
            cells.append(compare.with_interval(found))
        lines.append(row_of(cells))
    return lines


def tables() -> str:
    parts = []
    for world, methods in METHODS.items():
        runs = load(world)
        parts.append(accuracies(runs, methods, STEPS[world]))
        if world in PAIRS:
            parts.append(differences(runs, PAIRS[world], STEPS[world]))
        if world == "lock_long":
            parts.append(by_tokens(runs, methods))
    return "\n\n".join("\n".join(lines) for lines in parts)


def picture(path: pathlib.Path) -> None:
    """Each method's mean over seeds by steps; thin lines are its seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = pyplot.get_cmap("turbo")
    figure, axes = pyplot.subplots(1, len(CURVES), figsize=(18, 5.5), sharey=True)
    for axis, (title, (world, methods)) in zip(axes, CURVES.items()):
        runs = load(world)
        steps = [int(step) for step in STEPS[world]]
        for method in methods:
            color, curves = colors(SHOWN.index(method) / len(SHOWN)), []
            for run in runs[method].values():
                curves.append([100 * run["accuracy"][step] for step in STEPS[world]])
                axis.plot(steps, curves[-1], color=color, linewidth=0.5, alpha=0.5)
            means = [statistics.mean(column) for column in zip(*curves)]
            axis.plot(steps, means, "o-", color=color, linewidth=2.5, label=method)
        axis.set_title(title)
        axis.set_xlabel("steps")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0].set_ylabel("accuracy, test problems (%)")
    figure.tight_layout()
    figure.savefig(path, dpi=60)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--picture", type=pathlib.Path, help="draw the curves here, and end")
    args = parser.parse_args(argv)
    if args.picture:
        picture(args.picture)
        return
    print(tables())


if __name__ == "__main__":
    main()
