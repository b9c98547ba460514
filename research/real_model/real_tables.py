"""The tables of this folder's README.md, from real_learning.json.

    python research/real_model/real_tables.py
    python research/real_model/real_tables.py --entries    which entries were distilled, or reversed
    python research/real_model/real_tables.py --add FOLDER    put a folder's runs and tests in first
    python research/real_model/real_tables.py --picture research/real_model/real_learning.png
    python research/real_model/real_tables.py --solutions FOLDER METHOD

FOLDER is one of real_world.py --cpu; runs and tests that are not finished are left out. Intervals
are bootstrapped over the problems, and differences are paired by problem. The last form prints
solutions that training has changed: of the first test problem that was wrong in all samples before
and is right in all of them after, and of the first one with the opposite change.
"""

import argparse
import collections
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import eval as evaluation
from extras import report
from lib import config, files, runlog
from research.markdown_table import head_of, row_of

KEPT = ROOT / "research/real_model/real_learning.json"
BLOCK = 5  # steps of a row
SHOWN = 5  # entries of a bank
PARTS = ("gen", "score", "bwd")
FATES = tuple(runlog.FATE.values())  # distilled, reversed, ignored


def score(rows: list[dict]) -> dict:
    """What is kept of a test: a digit for each sample, 1 where it is right, problem by problem.

    Of those samples that every problem has.
    """
    samples = min(collections.Counter(row["id"] for row in rows).values())
    rows = [row for row in rows if row["sample"] < samples]
    rows.sort(key=lambda row: (row["id"], row["sample"]))
    return {
        "right": "".join(str(int(row["r"] > 0)) for row in rows),
        "samples": samples,  # of each problem
        "boxed": sum(row["pred"] is not None for row in rows) / len(rows),
        "cut": sum(row["truncated"] for row in rows) / len(rows),
        "tokens": statistics.mean(row["tokens"] for row in rows),
    }


def training(rollouts: list[dict], metrics: list[dict]) -> list[dict]:
    """What is kept of a run: sums over each block of steps."""
    blocks: list[dict] = []
    for start in range(1, metrics[-1]["step"] + 1, BLOCK):
        steps = range(start, start + BLOCK)
        rolls = [roll for roll in rollouts if roll["step"] in steps]
        block: dict = {"steps": len({roll["step"] for roll in rolls}), "solutions": len(rolls)}
        block["right"] = sum(roll["r"] > 0 for roll in rolls)
        block["cut"] = sum(roll["truncated"] for roll in rolls)
        block["tokens"] = sum(len(roll["completion_ids"]) for roll in rolls)
        logged = [row for row in metrics if row["step"] in steps]
        for part in PARTS:
            block[part] = sum(row[f"seconds.{part}"] for row in logged)
        for outcome in ("success", "failure"):
            supports = []
            for roll in rolls:
                if (roll["r"] > 0) == (outcome == "success"):
                    supports += roll["a"]
            mean = statistics.mean(supports) if supports else None
            above = sum(a > 0 for a in supports)
            block[outcome] = {"mean": mean, "above": above, "teachers": len(supports)}
        credit = sum(roll["credit_sq"] for roll in rolls)
        with_verdict = sum(roll["credit_sq_with_verdict"] for roll in rolls)
        block["credit_with_verdict"] = with_verdict / credit if credit else None
        for rho, fate in runlog.FATE.items():
            block[fate] = sum(roll["rho"].count(rho) for roll in rolls)
        blocks.append(block)
    return blocks


def entries(ledger: dict, fate: str) -> list[list]:
    """The entries of a ledger with this fate most often: id, title, on successes, on failures."""
    rows = [row for row in ledger["entries"] if sum(row[fate].values())]
    rows.sort(key=lambda row: -sum(row[fate].values()))
    shown = []
    for row in rows[:SHOWN]:
        title = next(iter(row["entry"].values()))
        shown.append([row["id"], title, row[fate]["success"], row[fate]["failure"]])
    return shown


def label(run: pathlib.Path) -> str:
    """A run's method, and its seed if that is not 0."""
    method, seed = run.name.rpartition("_")[0], config.saved(run)["seed"]
    return f"{method}, seed {seed}" if seed else method


def add(folder: pathlib.Path) -> None:
    """Put a folder's runs and tests into what is kept, in the place of those of the same name."""
    kept = files.read_json(KEPT) if KEPT.exists() else {"tests": {}, "runs": {}}
    for policy in sorted((folder / "eval").iterdir()):
        if (policy / "results.json").exists():  # the test has been finished
            rows = list(files.read_jsonl(policy / "samples.jsonl"))
            run, _, step = policy.name.partition("--step_")
            name = f"{label(folder / 'runs' / run)}, step {int(step)}" if step else "base"
            kept["tests"][name] = score([row for row in rows if row["set"] == "test"])
    for place in sorted((folder / "runs").iterdir()):
        metrics = list(files.read_jsonl(place / "metrics.jsonl"))
        if not metrics or metrics[-1]["step"] < config.saved(place)["steps"]:
            continue
        rollouts = list(files.read_jsonl(place / "rollouts.jsonl"))
        found: dict = {"blocks": training(rollouts, metrics)}
        if any(roll["rho"] for roll in rollouts):
            ledger = report.ledger(place)
            found["entries"] = {fate: entries(ledger, fate) for fate in FATES[:2]}
        kept["runs"][label(place)] = found
    files.write_json(KEPT, kept)


def share(test: dict) -> np.ndarray:
    """Each problem's share of right samples."""
    right = np.array([int(digit) for digit in test["right"]], dtype=float)
    return right.reshape(-1, test["samples"]).mean(1)


def with_interval(scores_P: np.ndarray, sign: str = "") -> str:
    low, high = evaluation.bootstrap_interval([scores_P])
    return f"{scores_P.mean():{sign}.1%} ({low:{sign}.1%} to {high:{sign}.1%})"


def tests(kept: dict) -> Iterator[str]:
    """A row per policy: its score, and its difference to the base and to SGSD after as many steps.

    A difference needs tests of the same problems.
    """
    samples = kept["tests"]["base"]["samples"]
    head = ["policy", f"avg@{samples}", "to the base", "to SGSD", "boxed", "cut", "tokens"]
    yield from head_of(head)
    for name, test in sorted(kept["tests"].items(), key=lambda item: (item[0] != "base", item[0])):
        step = name.partition(", ")[2]
        gaps = []
        for other in ("base", f"sgsd, {step}"):
            gap = ""
            if other in kept["tests"] and other != name and (step or other == "base"):
                gap = with_interval(share(test) - share(kept["tests"][other]), "+")
            gaps.append(gap)
        figures = [f"{test['boxed']:.1%}", f"{test['cut']:.1%}", f"{test['tokens']:.0f}"]
        yield row_of([name, with_interval(share(test)), *gaps, *figures])


def lean(supports: dict) -> list[str]:
    """The cells of an outcome's supports: their mean, and how many lie above 0."""
    if not supports["teachers"]:
        return ["", ""]
    return [f"{supports['mean']:+.4f}", f"{supports['above']} of {supports['teachers']}"]


def runs(kept: dict) -> Iterator[str]:
    """A row per run and block of steps."""
    head = ["run", "steps", "right", "cut", "tokens", "ã on successes", "above 0"]
    head += ["ã on failures", "above 0", "distilled, reversed, ignored", "credit with the verdict"]
    head += ["seconds a step: sampling, teachers, student"]
    yield from head_of(head)
    for name, run in kept["runs"].items():
        first = 1
        for block in run["blocks"]:
            count, steps = block["solutions"], block["steps"]
            cells = [name, f"{first} to {first + steps - 1}", f"{block['right']} of {count}"]
            cells += [block["cut"], f"{block['tokens'] / count:.0f}"]
            cells += [*lean(block["success"]), *lean(block["failure"])]
            fates = [block[fate] for fate in FATES]
            cells.append(", ".join(map(str, fates)) if any(fates) else "")
            agreeing = block["credit_with_verdict"]
            cells.append("" if agreeing is None else f"{agreeing:.2f}")
            seconds = [f"{block[part] / steps:.0f}" for part in PARTS]
            cells.append(", ".join(seconds))
            yield row_of(cells)
            first += steps


def most(kept: dict) -> Iterator[str]:
    """A row per entry that was among those distilled, or reversed, most often in a run."""
    yield from head_of(["run", "fate", "entry", "on successes", "on failures"])
    for name, run in kept["runs"].items():
        for fate in FATES[:2]:
            for id_, title, successes, failures in run.get("entries", {}).get(fate, []):
                yield row_of([name, fate, f"{id_}: {title}", successes, failures])


def picture(kept: dict, path: pathlib.Path) -> None:
    """Accuracy on the test problems, and what a run's supports and credit were as it went."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (accuracy, support, credit) = pyplot.subplots(1, 3, figsize=(16, 4.5))
    for number, (name, run) in enumerate(kept["runs"].items()):
        color = f"C{number}"
        points = {0: kept["tests"]["base"]}
        for test, value in kept["tests"].items():
            method, _, step = test.partition(", step ")
            if method == name:
                points[int(step)] = value
        scores = [share(points[step]) for step in sorted(points)]
        ends = 100 * np.array([evaluation.bootstrap_interval([score_P]) for score_P in scores])
        means = np.array([100 * score_P.mean() for score_P in scores])
        places = np.array(sorted(points)) + 0.15 * number  # beside one another, to be readable
        bars = [means - ends[:, 0], ends[:, 1] - means]
        accuracy.errorbar(places, means, bars, marker="o", capsize=3, color=color, label=name)
        blocks = run["blocks"]
        lengths = np.array([block["steps"] for block in blocks])
        middles = np.cumsum(lengths) - (lengths - 1) / 2
        if "entries" not in run:  # it has no teachers
            continue
        for outcome, line in (("success", "o-"), ("failure", "o--")):
            leans = [block[outcome]["mean"] for block in blocks]
            support.plot(middles, leans, line, color=color, label=f"{name}, {outcome}")
        agreeing = [block["credit_with_verdict"] for block in blocks]
        credit.plot(middles, agreeing, "o-", color=color, label=name)
    accuracy.set_ylabel("right, test problems (%)")
    support.set_ylabel("mean support with its sign ã (nats)")
    support.axhline(0, color="grey", linewidth=1)
    credit.set_ylabel("share of squared credit with the verdict's sign")
    for axis in (accuracy, support, credit):
        axis.set_xlabel("steps")
        axis.xaxis.set_major_locator(pyplot.MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=60)


def solutions(folder: pathlib.Path, method: str) -> Iterator[str]:
    """The first problem that training has won and the first that it has lost, before and after."""
    base = next((folder / "eval").glob("*--model"))
    last = max((folder / "eval").glob(f"{method}_*--step_*"))
    by_policy = []
    for place in (base, last):
        problems: dict[str, list[dict]] = {}
        for row in files.read_jsonl(place / "samples.jsonl"):
            problems.setdefault(row["id"], []).append(row)
        by_policy.append(problems)
    before, after = by_policy

    def is_all(rows: list[dict], right: bool) -> bool:
        return all((row["r"] > 0) == right for row in rows)

    for won in (True, False):
        for id_, rows in sorted(before.items()):
            if is_all(rows, not won) and is_all(after[id_], won):
                yield f"{method}, {'won' if won else 'lost'}: {id_}, answer {rows[0]['gold']}"
                yield f"\nbefore:\n{rows[0]['text']}\n\nafter:\n{after[id_][0]['text']}\n"
                break


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--add", type=pathlib.Path, metavar="FOLDER", help="put this in first")
    parser.add_argument("--entries", action="store_true", help="print the entries' fates, and end")
    parser.add_argument("--picture", type=pathlib.Path, help="draw the curves here, and end")
    parser.add_argument("--solutions", nargs=2, metavar=("FOLDER", "METHOD"), help="print changes")
    args = parser.parse_args(argv)
    if args.solutions:
        folder, method = args.solutions
        print("\n".join(solutions(pathlib.Path(folder), method)))
        return
    if args.add:
        add(args.add)
    kept = files.read_json(KEPT)
    if args.picture:
        picture(kept, args.picture)
        return
    tables: list[Callable[[dict], Iterator[str]]] = [most] if args.entries else [tests, runs]
    print("\n\n".join("\n".join(table(kept)) for table in tables))


if __name__ == "__main__":
    main()
