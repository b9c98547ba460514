"""Does the slope of the base model predict what training with a bank does?

    python research/slope/measure.py --world lock --table         the tables and figures
    python research/slope/measure.py --picture slope.png          both worlds (needs matplotlib)

Twelve banks per world: the model's own from seeds 5 to 9; hand-written ones with a true mistake for
every family and a skill that misleads for 0, 25, 50, 75 and 100% of them; and two with all words in
another order.

A round measured the slopes of all banks on one set of rollouts of the base model (80 problems x 4),
then trained with each bank for 60 steps and evaluated after 5, 20 and 60 on the test problems, then
made a pilot with each bank: 5 steps, and solutions of validation problems, as many rollouts
together as the probe has. All three have seeds of their own. lock.jsonl and tiny.jsonl have a line
per job. Commit 66a6f29 has what made them.
"""

import argparse
import json
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

import numpy as np

from research.markdown_table import head_of, row_of

OWN, SHARES = range(5, 10), (0, 25, 50, 75, 100)
BANKS = [f"own-{seed}" for seed in OWN] + [f"hand-{share}" for share in SHARES]
BANKS += ["shuffled-own-5", "shuffled-hand-0"]
POINTS = (5, 20, 60)  # steps


def spearman(a: list[float], b: list[float]) -> float:
    """The correlation of ranks; equal values share their mean rank."""

    def ranks(values: list[float]) -> np.ndarray:
        x = np.array(values)
        return (x[:, None] > x).sum(1) + ((x[:, None] == x).sum(1) - 1) / 2

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def with_bounds(a: list[float], b: list[float], draws: int = 4000) -> str:
    """The rank correlation with a 95% bootstrap over banks."""
    columns, rng, drawn = np.array([a, b]), np.random.default_rng(0), []
    for _ in range(draws):
        both = columns[:, rng.integers(len(a), size=len(a))].tolist()
        if all(len({*column}) > 1 for column in both):
            drawn.append(spearman(*both))
    low, high = np.quantile(drawn, (0.025, 0.975))
    return f"{spearman(a, b):.2f} ({low:.2f} to {high:.2f})"


def table(rows: list[dict]) -> list[str]:
    """Means over the seeds that are there, and rank correlations over banks."""
    probes = [row["slopes"] for row in rows if row["kind"] == "slopes"]
    columns: dict[str, list[list[float]]] = {"slope": [], "pilot": []}
    columns |= {f"after {step}": [] for step in POINTS}
    told = []
    for bank in BANKS:
        mine = [row for row in rows if row.get("bank") == bank]
        columns["slope"].append([x[bank]["slope"] for x in probes])
        columns["pilot"].append([row["accuracy"] for row in mine if row["kind"] == "pilot"])
        for step in POINTS:
            of_step = [row["accuracy"][str(step)] for row in mine if row["kind"] == "train"]
            columns[f"after {step}"].append(of_step)
        told.append(sum(x[bank]["low"] > 0 for x in probes))
    lines = head_of(["bank", "intervals above 0", *columns])
    for i, bank in enumerate(BANKS):
        cells = [bank, f"{told[i]} of {len(probes)}"]
        for name, values in columns.items():
            form = "{:.2f}" if name == "slope" else "{:.1%}"
            cells.append(form.format(statistics.mean(values[i])) if values[i] else "")
        lines.append(row_of(cells))
    lines += ["", *head_of(["rank correlation", *[f"after {step}" for step in POINTS]])]
    for name in ("slope", "pilot"):
        cells = [name]
        for step in POINTS:
            both = zip(columns[name], columns[f"after {step}"])
            means = [(statistics.mean(a), statistics.mean(b)) for a, b in both if a and b]
            one, other = [a for a, _ in means], [b for _, b in means]
            cells.append(with_bounds(one, other) if len(means) > 2 else "")
        lines.append(row_of(cells))
    return lines


def facts(rows: list[dict]) -> list[str]:
    """The other figures of the page, a line each, once every bank has a run in each round."""
    slopes_RN = of_probes(rows, "slope")
    probes = [row for row in rows if row["kind"] == "slopes"]
    (base,) = (row["accuracy"] for row in rows if row["kind"] == "base")
    grpo = [probe["slopes"]["grpo"]["slope"] for probe in probes]
    below = sum(int((slopes_N < x).sum()) for slopes_N, x in zip(slopes_RN, grpo))
    lines = [f"base model: {base:.1%} on the test problems"]
    lines.append(f"GRPO's slopes: {shown(grpo)}; below them {below} of the banks' {slopes_RN.size}")
    for step in POINTS:
        below_base = int((of_kind(rows, "train", str(step)) < base).sum())
        lines.append(f"after {step} steps: {below_base} runs below the base model")
    seconds = {"pilot": 0, "slopes": 0}
    for row in rows:
        if row["kind"] in seconds:
            seconds[row["kind"]] += row["cpu_seconds"]
    lines.append(f"pilots took {seconds['pilot'] / seconds['slopes']:.0%} of the probes' time")
    return lines


def shown(values: Any) -> str:
    return ", ".join(f"{x:.2f}" for x in values)


def of_kind(rows: list[dict], kind: str, step: str = "") -> np.ndarray:
    """Accuracies by round and bank; of a training after `step`. [R, N]."""
    columns = []
    for bank in BANKS:
        mine = [row["accuracy"] for row in rows if (row["kind"], row.get("bank")) == (kind, bank)]
        columns.append([x[step] if step else x for x in mine])
    return np.array(columns).T


def of_probes(rows: list[dict], name: str) -> np.ndarray:
    """A number of each bank by round. [R, N]."""
    numbers = []
    for row in rows:
        if row["kind"] == "slopes":
            numbers.append([row["slopes"][bank][name] for bank in BANKS])
    return np.array(numbers)


def picture(path: str) -> None:
    """Accuracy after 20 steps by the slope of the base, a point for each bank."""
    import matplotlib

    from lib import files

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = {"tiny": "tiny world", "lock": "harder world"}
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.6))
    for axis, (world, title) in zip(axes, titles.items()):
        rows = list(files.read_jsonl(HERE / f"{world}.jsonl"))
        probes = [row["slopes"] for row in rows if row["kind"] == "slopes"]
        for bank in BANKS:
            runs = [r for r in rows if (r["kind"], r.get("bank")) == ("train", bank)]
            ends = [100 * run["accuracy"]["20"] for run in runs]
            ranges = [[p[bank][name] for name in ("low", "slope", "high")] for p in probes]
            (low, x, high), y = np.mean(ranges, 0), statistics.mean(ends)
            color = {"own": "tab:blue", "hand": "tab:green"}.get(bank.split("-")[0], "tab:gray")
            axis.errorbar(x, y, xerr=[[x - low], [high - x]], fmt="o", color=color, alpha=0.7)
            if world == "lock":  # in the tiny world all names would lie on each other
                axis.annotate(bank, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=8)
        axis.axvline(0, color="black", linewidth=0.5)
        (base,) = (100 * row["accuracy"] for row in rows if row["kind"] == "base")
        axis.axhline(base, color="black", linewidth=0.5, linestyle=":")
        axis.set_title(title)
        axis.set_xlabel("slope of the base model, points a step (95% interval)")
    axes[0].set_ylabel("accuracy after 20 steps, test problems, %")
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--world", choices=("lock", "tiny"), default="lock")
    parser.add_argument("--table", action="store_true", help="print a world's table")
    parser.add_argument("--picture", metavar="FILE", help="draw both worlds")
    args = parser.parse_args(argv)
    if args.picture:
        picture(args.picture)
    else:
        lines = (HERE / f"{args.world}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        print("\n".join([*table(rows), "", *facts(rows)]))


if __name__ == "__main__":
    main()
