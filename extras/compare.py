"""The table of finished evaluations, of any day and machine: figures, and differences to the first.

    python -m extras.compare runs/sgsd
    python -m extras.compare runs/sgsd runs/grpo
    python -m extras.compare eval/Qwen--Qwen3-1.7B eval/Qwen--Qwen3-1.7B--skills

A FOLDER is a run, a folder of evaluations, or one evaluation. Of several evaluations in it plain
models come before checkpoints, so that a run's base model is the first. Differences are paired by
problem, with 95% intervals over problems. Of each run the best checkpoint stands beside the last.
The mean, and with it the best checkpoint, is over the sets that all have; a cell is empty where an
evaluation lacks the set.
Evaluations of other problems, samples or settings, and adapters on another base model, are named
and not compared.
comparison.json, beside the first evaluation, holds all that is printed.

Dimension key: P problems.
"""

import itertools
import pathlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))  # python extras/compare.py

import distributed
from eval import bootstrap_interval, interval
from lib import command, files

# Settings in which two evaluations may differ: who is evaluated, and the machine.
MAY_DIFFER = {"the policy's files", "skills", "num_skills", "the skills' prompts", "encoder"}
MAY_DIFFER |= {"device", "attn"}
STEP = re.compile(r"(?:step_|checkpoint-)(\d+)")  # of sgsd.py, and on TRL


@dataclass(frozen=True)
class Evaluated:
    """A finished evaluation: a folder that eval.py wrote."""

    folder: pathlib.Path
    settings: dict[str, Any]
    sets: dict[str, dict]  # {set: figures}

    @property
    def step(self) -> int:
        """A checkpoint's step, 0 for all else."""
        match = STEP.search(self.folder.name)
        return int(match[1]) if match else 0

    @property
    def is_plain(self) -> bool:
        """Whether a whole model was evaluated, not adapters on one."""
        return self.settings["the policy's files"] == self.settings["the base's files"]

    def samples_per_problem(self, name: str) -> int:
        return self.sets[name]["samples"] // self.sets[name]["problems"]

    def scores_P(self, name: str) -> np.ndarray:
        """Each problem's share of right samples on a set."""
        right_P = np.array([*self.sets[name]["right"].values()])
        return right_P / self.samples_per_problem(name)


def evaluations_in(folder: pathlib.Path) -> list[Evaluated]:
    """The evaluations of a FOLDER, plain models first; [] where there is none."""
    results = [*folder.glob("results.json"), *folder.glob("*/results.json")]
    results += folder.glob("eval/*/results.json")
    evaluated = []
    for path in sorted(results):
        settings, sets = files.read_json(path.with_name("settings.json")), files.read_json(path)
        if "the policy's files" not in settings:
            fix = "move its folder away and give its eval.py command again"
            raise ValueError(f"{path}: is of an older eval.py; {fix}")
        evaluated.append(Evaluated(path.parent, settings, sets))
    return sorted(evaluated, key=lambda x: (x.step, not x.is_plain))


def why_not(one: Evaluated, other: Evaluated, name: str) -> str:
    """Why two evaluations cannot be compared on a set; "" if they can."""
    conditions = []
    for x in (one, other):
        if name not in x.sets:
            return f"{x.folder} was not evaluated on it"
        row = x.sets[name]
        conditions.append(x.settings | {"problems": row["digest"], "samples": row["samples"]})
    mine, theirs = conditions
    differ = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    may_differ = MAY_DIFFER
    if one.is_plain and other.is_plain:  # such as weights that were all trained, and their base
        may_differ = MAY_DIFFER | {"the base's files"}
    named = sorted({*differ} - may_differ)
    return f"they have different values of {', '.join(named)}" if named else ""


def figures(x: Evaluated, names: Sequence[str]) -> dict[str, Any]:
    """The figures on a set, or their mean over several (Tab. 3 "Avg."), where sets weigh alike."""
    rows = [x.sets[name] for name in names]
    mean: dict[str, Any] = {}
    for key in ("avg", "pass", "maj", "boxed", "truncated", "tokens"):
        mean[key] = sum(row[key] for row in rows) / len(rows)
    for key in ("problems", "samples"):
        mean[key] = sum(row[key] for row in rows)
    low, high = bootstrap_interval([x.scores_P(name) for name in names])
    return mean | {"avg_low": low, "avg_high": high}


def difference(ours: Evaluated, theirs: Evaluated, names: Sequence[str]) -> dict[str, Any]:
    """Our mean score less theirs, paired by problem, with its interval.

    The interval is None where the gaps of problems have no spread, or there are too few of them.
    """
    gaps = [ours.scores_P(name) - theirs.scores_P(name) for name in names]
    low, high = bootstrap_interval(gaps)
    mean = float(np.mean([gap_P.mean() for gap_P in gaps]))
    return {"to": str(theirs.folder), "diff": mean, "diff_low": low, "diff_high": high}


def comparison(
    first: Evaluated, evaluated: Sequence[Evaluated], names: Sequence[str]
) -> dict[str, Any]:
    """The figures of evaluations on sets that all of them have, and each run's best and last.

    Differences are to the first evaluation of the table, where that is among them. Of several sets
    all is on the mean over them, by which §4.1's best checkpoint is picked (S23).
    """
    results: dict[str, dict] = {}
    runs: dict[str, list[Evaluated]] = {}
    for x in evaluated:
        results[str(x.folder)] = figures(x, names)
        if evaluated[0] is first and x is not first:
            results[str(x.folder)] |= difference(x, first, names)
        if x.step:
            runs.setdefault(STEP.sub("step", str(x.folder)), []).append(x)
    chosen = []
    for checkpoints in [x for x in runs.values() if len(x) > 1]:
        best = max(checkpoints, key=lambda x: results[str(x.folder)]["avg"])
        last = max(checkpoints, key=lambda x: x.step)
        choice = {"checkpoints": len(checkpoints), "best": str(best.folder)}
        choice |= {"last": str(last.folder)}
        chosen.append(choice | difference(best, last, names))
    return {"results": results, "selections": chosen}


def tables_of(evaluated: Sequence[Evaluated]) -> tuple[dict[str, dict], list[str], list[str]]:
    """A table for each set, of those that have it, and one for the mean over the sets all have.

    All are the evaluations that can be compared with the first on one of its sets; no other is in a
    table. Also the sets that all have, and a line for each evaluation that a table lacks.
    """
    first, tables, reasons = evaluated[0], {}, []
    compared = []
    for x in evaluated:
        if not all(why_not(first, x, name) for name in first.sets):
            compared.append(x)
    for name in dict.fromkeys(itertools.chain.from_iterable(x.sets for x in compared)):
        reference = next(x for x in compared if name in x.sets)
        alike = []
        for x in evaluated:
            reason = why_not(reference, x, name)
            if reason:
                reasons.append(f"not compared on {name}: {x.folder}; {reason}")
            elif x in compared:
                alike.append(x)
        tables[name] = comparison(first, alike, [name])
    shared = [name for name in tables if len(tables[name]["results"]) == len(compared)]
    if len(shared) > 1:
        tables[f"mean of {', '.join(sorted(shared))}"] = comparison(first, compared, shared)
    return tables, shared, reasons


def print_tables(tables: dict[str, dict], shared: Sequence[str]) -> None:
    """The figures in Markdown, with empty cells where an evaluation lacks a set; the best."""
    heads = "model | set | problems | avg@k | 95% | - first | 95% | pass@k | maj@k | boxed | cut"
    print(f"| {heads} | tokens |\n{'|---' * 12}|")
    cells = "{problems} | {avg:.1%} | {interval} | {gap} | {pass:.1%} | {maj:.1%} | {boxed:.1%} | "
    cells += "{truncated:.1%} | {tokens:.0f}"
    everyone = dict.fromkeys(itertools.chain.from_iterable(x["results"] for x in tables.values()))
    for name, table in tables.items():
        for folder in everyone:
            row, numbers = table["results"].get(folder), " | " * 9
            if row:
                has_gap = "diff" in row
                gap = f"{row['diff']:+.1%} | {interval(row, 'diff', '+')}" if has_gap else " | "
                numbers = cells.format(**row, interval=interval(row, "avg"), gap=gap)
            print(f"| {folder} | {name} | {numbers} |")
    if not shared:
        print("no mean and no best checkpoint: no set is common to all")
        return
    line = "of {checkpoints} checkpoints: best {best}, last {last}, best - last {diff:+.1%} "
    line += "({interval}); the best was picked on these problems: {sets}"
    name = shared[0] if len(shared) == 1 else [*tables][-1]
    for row in tables[name]["selections"]:
        print(line.format(**row, interval=interval(row, "diff", "+"), sets=name))


def compare(folders: Sequence[pathlib.Path]) -> None:
    """Print the table of the evaluations in some folders and write comparison.json."""
    by_place: dict[pathlib.Path, Evaluated] = {}
    for folder in folders:
        inside = evaluations_in(folder)
        if not inside:
            raise ValueError(f"{folder}: no results.json of an evaluation; eval.py writes it")
        for x in inside:
            by_place.setdefault(x.folder.resolve(), x)
    evaluated = [*by_place.values()]
    tables, shared, reasons = tables_of(evaluated)
    print_tables(tables, shared)
    for reason in reasons:
        print(reason)
    file = evaluated[0].folder.resolve().parent / "comparison.json"
    files.write_json(file, {"sets": tables, "not_compared": reasons})
    print(f"written: {file}")


def arguments(argv: Sequence[str] | None = None) -> list[pathlib.Path]:
    """The FOLDERs of a command line; a mistake exits with code 2."""
    parser = command.Parser("-m extras.compare", "FOLDER [FOLDER ...]", __doc__)
    about = "a run, a folder of evaluations, or one evaluation"
    parser.add_argument("folders", nargs="+", type=pathlib.Path, metavar="FOLDER", help=about)
    return parser.parse_args(argv).folders


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    folders = arguments(argv)
    with command.one_line_errors("compare", *command.GIVEN):
        compare(folders)
    return 0


if __name__ == "__main__":
    distributed.run_and_exit(main)
