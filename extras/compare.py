"""The table of finished evaluations, of any day and machine: figures, and differences to the first.

    python -m extras.compare runs/sgsd
    python -m extras.compare runs/sgsd runs/grpo
    python -m extras.compare eval/Qwen--Qwen3-1.7B eval/Qwen--Qwen3-1.7B--skills

A FOLDER is a run, a folder of evaluations, or one evaluation. If it has several, plain models come
before checkpoints, so that a run's base model is the first. We compare set by set, on the sets that
the first one has, and in the mean over these sets if one verifier judged all. Differences are
paired by problem, in percentage points, with 95% intervals over problems (bootstrap); beside them
stand the problems that were won, lost and tied by their counts of right samples. For each run we
compare its best checkpoint on a set, or in the mean, with its last.
We leave out an evaluation of a set, and print the reason, if it has no figures there, if problems,
samples or settings are others, or if its adapters are on another base model. The mean has those
that no set leaves out. comparison.json, beside the first evaluation, holds all that is printed.

Dimension key: P problems.
"""

import pathlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import distributed
from eval import bootstrap_interval, interval, results_of
from lib import command, files

# Settings in which two evaluations may differ: who is evaluated, and the machine.
MAY_DIFFER = {"the policy's files", "skills", "device", "attn"}
STEP = re.compile(r"step_(\d+)")  # in a checkpoint's name
SHARES = ("maj", "boxed", "truncated")  # of problems or samples, without intervals


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

    def scores_P(self, name: str, figure: str = "avg") -> np.ndarray:
        """Each problem's share of right samples on a set; for "pass" 1 where any is right, or 0."""
        right_P = np.array([*self.sets[name]["right"].values()])
        if figure == "pass":
            return np.sign(right_P)
        return right_P / self.samples_per_problem(name)


def evaluations_in(folder: pathlib.Path) -> list[Evaluated]:
    """The evaluations of a FOLDER, plain models first; [] where there is none."""
    results: list[pathlib.Path] = []
    for pattern in ("results.json", "*/results.json", "eval/*/results.json"):
        results += folder.glob(pattern)
    evaluated = [Evaluated(path.parent, results_of(path.parent)) for path in sorted(results)]
    return sorted(evaluated, key=lambda x: (x.step, not x.is_plain))


def differences(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Names of settings in which two rows of results.json differ; or "problems" and "samples"."""
    mine = one["settings"] | {"problems": one["digest"], "samples": one["samples"]}
    theirs = other["settings"] | {"problems": other["digest"], "samples": other["samples"]}
    return {name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)}


def why_not(one: Evaluated, other: Evaluated, name: str) -> str:
    """Why the other evaluation cannot be compared with one on a set; "" if it can."""
    if name not in other.sets:
        return f"was not evaluated on {name}"
    differing = differences(one.sets[name], other.sets[name]) - MAY_DIFFER
    if one.is_plain and other.is_plain:  # such as a fully trained model and its base
        differing.discard("the base's files")
    return f"has other values of {', '.join(sorted(differing))} on {name}" if differing else ""


def with_interval(key: str, sets_P: Sequence[np.ndarray]) -> dict[str, Any]:
    """The mean of the sets' means, and its interval over problems. sets_P: a score per problem."""
    low, high = bootstrap_interval(sets_P)
    mean = float(np.mean([scores_P.mean() for scores_P in sets_P]))
    return {key: mean, f"{key}_low": low, f"{key}_high": high}


def mean_figures(x: Evaluated, names: Sequence[str]) -> dict[str, Any]:
    """The figures on a set, or their mean over several sets of equal weight (Tab. 3 "Avg.")."""
    figures: dict[str, Any] = {}
    for key in (*SHARES, "tokens", "problems", "samples"):
        total = sum(x.sets[name][key] for name in names)
        figures[key] = total if key in ("problems", "samples") else total / len(names)
    for key in ("avg", "pass"):
        figures |= with_interval(key, [x.scores_P(name, key) for name in names])
    return figures


def difference(ours: Evaluated, theirs: Evaluated, names: Sequence[str]) -> dict[str, Any]:
    """Our avg@k and pass@k minus theirs, paired by problem, and how many problems we won.

    An interval is None if the difference is the same for all problems, or if they are too few.
    """
    row: dict[str, Any] = {"to": str(theirs.folder)}
    for figure, key in (("pass", "pass_diff"), ("avg", "diff")):
        gaps = [ours.scores_P(name, figure) - theirs.scores_P(name, figure) for name in names]
        row |= with_interval(key, gaps)
    signs_P = np.sign(np.concatenate(gaps))  # of avg@k
    row["won_lost_tied"] = [int((signs_P == sign).sum()) for sign in (1, -1, 0)]
    return row


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
        best = max(checkpoints, key=lambda x: (results[str(x.folder)]["avg"], x.step))
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
    in_mean = [*evaluated]
    tables: dict[str, dict] = {}
    reasons: list[str] = []
    for name in first.sets:
        compared: list[Evaluated] = []
        for x in evaluated:
            if why := why_not(first, x, name):
                reasons.append(f"left out: {x.folder} {why}")
                in_mean = [other for other in in_mean if other is not x]
            else:
                compared.append(x)
        tables[name] = comparison(compared, [name])
    names = sorted(tables)
    if len({row["settings"].get("verifier") for row in first.sets.values()}) > 1:
        reasons.append(f"no mean of {', '.join(names)}: they have different values of verifier")
    elif len(names) > 1:
        tables[f"mean of {', '.join(names)}"] = comparison(in_mean, names)
    return tables, reasons


def points(row: dict[str, Any], key: str) -> str:
    """A difference and its interval in percentage points."""
    low = row[f"{key}_low"]
    between = "none" if low is None else f"{100 * low:+.1f} to {100 * row[f'{key}_high']:+.1f}"
    return f"{100 * row[key]:+.1f} ({between})"


def print_tables(tables: dict[str, dict]) -> None:
    """The figures in Markdown; for each table the runs' best and last checkpoints."""
    print(
        "| model | set | problems | avg@k (95%) | pass@k (95%) | avg - first, points "
        "| won, lost, tied | pass - first, points | maj@k | boxed | cut | tokens |\n"
        f"{'|---' * 12}|"
    )
    for name, table in tables.items():
        for folder, row in table["results"].items():
            cells = [folder, name, str(row["problems"])]
            for key in ("avg", "pass"):
                cells.append(f"{row[key]:.1%} ({interval(row, key)})")
            if "diff" in row:
                won, lost, tied = row["won_lost_tied"]
                cells += [points(row, "diff"), f"{won}, {lost}, {tied}", points(row, "pass_diff")]
            else:
                cells += ["", "", ""]
            cells += [f"{row[share]:.1%}" for share in SHARES]
            print(f"| {' | '.join(cells)} | {row['tokens']:.0f} |")
    for name, table in tables.items():
        for row in table["selections"]:
            line = f"{name}: of {row['checkpoints']} checkpoints the best is {row['best']}"
            if row["best"] == row["last"]:
                print(f"{line}, the last")
            else:
                print(f"{line}, by {points(row, 'diff')} points to the last, {row['last']}")


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
