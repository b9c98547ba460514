"""The table of finished evaluations, of any day and machine: figures, and differences to the first.

    python -m extras.compare runs/sgsd
    python -m extras.compare runs/sgsd runs/grpo
    python -m extras.compare eval/Qwen--Qwen3-1.7B eval/Qwen--Qwen3-1.7B--skills

A FOLDER is a run, a folder of evaluations, or one evaluation. If it has several, plain models come
before checkpoints, so that a run's base model is the first. We compare all evaluations on the sets
that the first one has. Differences are paired by problem, with 95% intervals over problems. For
each run we compare the best checkpoint, by the mean over the sets, with the last.
We leave out an evaluation, and print the reason, if it has no figures of one of these sets, if its
problems, samples or settings are others, or if its adapters are on another base model.
comparison.json, beside the first evaluation, holds all that is printed.

Dimension key: P problems.
"""

import pathlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import distributed
from eval import bootstrap_interval, interval
from lib import command, files

# Settings in which two evaluations may differ: who is evaluated, and the machine.
MAY_DIFFER = {"the policy's files", "skills", "device", "attn"}
STEP = re.compile(r"step_(\d+)")  # in a checkpoint's name
SHARES = ("pass", "maj", "boxed", "truncated")  # of problems or samples, without intervals


@dataclass(frozen=True)
class Evaluated:
    """An evaluation: a folder that eval.py wrote."""

    folder: pathlib.Path
    sets: dict[str, dict]  # {set: figures}

    @property
    def step(self) -> int:
        """A checkpoint's step, 0 for any other model."""
        match = STEP.search(self.folder.name)
        return int(match[1]) if match else 0

    @property
    def is_plain(self) -> bool:
        """Whether a whole model was evaluated, not adapters on one."""
        for row in self.sets.values():
            if row["settings"]["the policy's files"] != row["settings"]["the base's files"]:
                return False
        return True

    def samples_per_problem(self, name: str) -> int:
        return self.sets[name]["samples"] // self.sets[name]["problems"]

    def scores_P(self, name: str) -> np.ndarray:
        """Each problem's share of right samples on a set."""
        right_P = np.array([*self.sets[name]["right"].values()])
        return right_P / self.samples_per_problem(name)


def evaluations_in(folder: pathlib.Path) -> list[Evaluated]:
    """The evaluations of a FOLDER, plain models first; [] where there is none."""
    results: list[pathlib.Path] = []
    for pattern in ("results.json", "*/results.json", "eval/*/results.json"):
        results += folder.glob(pattern)
    evaluated = [Evaluated(path.parent, files.read_json(path)) for path in sorted(results)]
    return sorted(evaluated, key=lambda x: (x.step, not x.is_plain))


def differences(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Names of settings in which two rows of results.json differ; or "problems" and "samples"."""
    mine = one["settings"] | {"problems": one["digest"], "samples": one["samples"]}
    theirs = other["settings"] | {"problems": other["digest"], "samples": other["samples"]}
    return {name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)}


def why_not(one: Evaluated, other: Evaluated, name: str) -> str:
    """Why two evaluations cannot be compared on a set; "" if they can."""
    if name not in other.sets:
        return "it has no figures; run its command to the end"
    differing = differences(one.sets[name], other.sets[name]) - MAY_DIFFER
    if one.is_plain and other.is_plain:  # such as a fully trained model and its base
        differing.discard("the base's files")
    return f"they have different values of {', '.join(sorted(differing))}" if differing else ""


def mean_figures(x: Evaluated, names: Sequence[str]) -> dict[str, Any]:
    """The figures on a set, or their mean over several sets of equal weight (Tab. 3 "Avg.")."""
    figures: dict[str, Any] = {}
    for key in ("avg", *SHARES, "tokens", "problems", "samples"):
        total = sum(x.sets[name][key] for name in names)
        figures[key] = total if key in ("problems", "samples") else total / len(names)
    low, high = bootstrap_interval([x.scores_P(name) for name in names])
    return figures | {"avg_low": low, "avg_high": high}


def difference(ours: Evaluated, theirs: Evaluated, names: Sequence[str]) -> dict[str, Any]:
    """Our mean score minus theirs, paired by problem, with its interval.

    The interval is None if the difference is the same for all problems, or if they are too few.
    """
    gaps = [ours.scores_P(name) - theirs.scores_P(name) for name in names]
    low, high = bootstrap_interval(gaps)
    mean = float(np.mean([gap_P.mean() for gap_P in gaps]))
    return {"to": str(theirs.folder), "diff": mean, "diff_low": low, "diff_high": high}


def comparison(evaluated: Sequence[Evaluated], names: Sequence[str]) -> dict[str, Any]:
    """The figures of evaluations on some sets, differences to the first, each run's best and last.

    For several sets we compare their mean, by which we also pick §4.1's best checkpoint (S23).
    """
    results = {str(x.folder): mean_figures(x, names) for x in evaluated}
    for x in evaluated[1:]:
        results[str(x.folder)] |= difference(x, evaluated[0], names)
    runs: dict[str, list[Evaluated]] = {}
    for x in evaluated:
        if x.step:
            runs.setdefault(STEP.sub("step", str(x.folder)), []).append(x)
    selections = []
    for checkpoints in runs.values():
        if len(checkpoints) == 1:
            continue
        best = max(checkpoints, key=lambda x: results[str(x.folder)]["avg"])
        last = max(checkpoints, key=lambda x: x.step)
        selection = {
            "checkpoints": len(checkpoints),
            "best": str(best.folder),
            "last": str(last.folder),
        }
        selections.append(selection | difference(best, last, names))
    return {"results": results, "selections": selections}


def tables_of(evaluated: Sequence[Evaluated]) -> tuple[dict[str, dict], list[str]]:
    """A table for each set of the first evaluation, and for their mean.

    Also a line for each set for which an evaluation is left out.
    """
    first = evaluated[0]
    compared: list[Evaluated] = []
    reasons: list[str] = []
    for x in evaluated:
        is_compared = True
        for name in first.sets:
            if why := why_not(first, x, name):
                reasons.append(f"left out: {x.folder}, {name}: {why}")
                is_compared = False
        if is_compared:
            compared.append(x)
    tables = {name: comparison(compared, [name]) for name in first.sets}
    if len(tables) > 1:
        tables[f"mean of {', '.join(sorted(tables))}"] = comparison(compared, [*tables])
    return tables, reasons


def print_tables(tables: dict[str, dict]) -> None:
    """The figures in Markdown; each run's best checkpoint and its last, by the last table."""
    heads = "model | set | problems | avg@k | 95% | - first | 95% | pass@k | maj@k | boxed | cut"
    print(f"| {heads} | tokens |\n{'|---' * 12}|")
    for name, table in tables.items():
        for folder, row in table["results"].items():
            cells = [folder, name, f"{row['problems']}", f"{row['avg']:.1%}", interval(row, "avg")]
            if "diff" in row:
                cells += [f"{row['diff']:+.1%}", interval(row, "diff", "+")]
            else:
                cells += ["", ""]
            cells += [f"{row[share]:.1%}" for share in SHARES]
            print(f"| {' | '.join(cells)} | {row['tokens']:.0f} |")
    for row in table["selections"]:  # of the last table
        print(
            f"of {row['checkpoints']} checkpoints: best {row['best']}, last {row['last']}, best - "
            f"last {row['diff']:+.1%} ({interval(row, 'diff', '+')}); the best was picked on these "
            f"problems: {name}"
        )


def compare(folders: Sequence[pathlib.Path]) -> None:
    """Print the table of the evaluations in some folders and write comparison.json."""
    by_place: dict[pathlib.Path, Evaluated] = {}
    for folder in folders:
        inside = evaluations_in(folder)
        if not inside:
            raise ValueError(f"{folder}: no results.json of an evaluation; eval.py writes it")
        for x in inside:
            by_place.setdefault(x.folder.resolve(), x)
    tables, reasons = tables_of([*by_place.values()])
    print_tables(tables)
    file = next(iter(by_place)).parent / "comparison.json"
    files.write_json(file, {"sets": tables, "not_compared": reasons})
    print(*reasons, f"written: {file}", sep="\n")


def arguments(argv: Sequence[str] | None = None) -> list[pathlib.Path]:
    """The FOLDERs of a command line; bad input exits with code 2."""
    parser = command.Parser("-m extras.compare", "FOLDER [FOLDER ...]", __doc__)
    parser.add_argument(
        "folders",
        nargs="+",
        type=pathlib.Path,
        metavar="FOLDER",
        help="a run, a folder of evaluations, or one evaluation",
    )
    return parser.parse_args(argv).folders


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    folders = arguments(argv)
    with command.one_line_errors("compare", *command.GIVEN):
        compare(folders)
    return 0


if __name__ == "__main__":
    distributed.run_and_exit(main)
