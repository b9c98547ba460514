"""Looking inside a run: a page of its curves, gates, ledger and bank.

    python -m extras.report runs/sgsd                          writes runs/sgsd/report.html
    python -m extras.report runs/a runs/b --out both.html      overlays the curves of two runs

A run may be finished or still going. The page is report_template.html with the data in it as JSON;
its script draws plain SVG and needs neither a network nor a build. Every call also writes the run's
ledger.json anew.
"""

import itertools
import json
import math
import pathlib
import statistics
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

import distributed
import sgsd
import skills
from extras import compare
from extras.compare import Evaluated
from lib import command, config, files, runlog

SHOWN = 8  # audited rollouts of each step on the page, at most

OF_TEACHER = ("rho", "a", "a_plain", "alpha", "losses")  # numbers of a row, one for each teacher

Banks = dict[int, skills.SkillBank]  # by the step after which each came into use, oldest first
Ledger = dict[tuple[str, str], dict]  # by key and id


def number(x: Any, digits: int = 6) -> Any:
    """For the page: floats to `digits` significant digits, nan and inf as None, all else as is."""
    if isinstance(x, float):
        return float(f"{x:.{digits}g}") if math.isfinite(x) else None
    return x


# ------------------------------------------------------------------------------------ the ledger


def manifest_of(run: pathlib.Path) -> dict[str, Any]:
    """A run's config.json; ValueError if there is none."""
    if not run.is_dir():
        raise ValueError(f"{run}: no such folder; give a run such as runs/sgsd")
    read = files.read_json(run / "config.json", {"settings": dict, "program": str})
    if not {"settings", "program"} <= read.keys():
        raise ValueError(f"{run}: its config.json is no run's; give a run such as runs/sgsd")
    return read


def ledger(banks: Banks, rollouts: list[dict]) -> Ledger:
    """A row for each skill and mistake.

    A row says which versions of the bank held the entry first and last, how often it was retrieved,
    how often it was distilled, reversed or ignored, on successes and on failures, and its contrast.
    ValueError where a rollout used an entry that is in no version of the bank.
    """
    rows: Ledger = {}
    centred: dict[tuple[str, str], dict[str, list[float]]] = {}  # by entry and outcome
    for step, bank in banks.items():
        for key in skills.KINDS:
            for entry in bank.collection(key):
                id_ = entry[skills.KINDS[key].id_field]
                row = rows.setdefault((key, id_), uncounted(key, id_, entry, step))
                row["last"] = step
    for roll in rollouts:
        outcome = "success" if roll["r"] > 0 else "failure"
        # A baseline's pairs need not be teachers, and a method may have more or fewer teachers.
        is_decided = len(roll.get("rho", [])) == len(roll["pairs"])
        is_compared = len(roll.get("a", [])) == len(roll["pairs"]) > 1
        mean = statistics.fmean(roll["a"]) if is_compared else math.nan
        for k, pair in enumerate(roll["pairs"]):
            for key, id_ in zip(skills.KINDS, pair):
                if (key, id_) not in rows:
                    used = f"step {roll['step']} used {id_}, which no version of the bank has"
                    raise ValueError(f"{used}; are files of bank/ missing?")
                row = rows[key, id_]
                row["retrieved"] += 1
                if is_decided:
                    row[runlog.FATE[roll["rho"][k]]][outcome] += 1
                if math.isfinite(mean):  # a skipped step may have supports of NaN
                    values = centred.setdefault((key, id_), {"success": [], "failure": []})
                    values[outcome].append(roll["a"][k] - mean)
    for place, values in centred.items():
        rows[place]["contrast"] = contrast(**values)
    return rows


def uncounted(key: str, id_: str, entry: dict, step: int) -> dict[str, Any]:
    """A ledger's row with all counts at 0. step: the first version that has the entry."""
    row: dict[str, Any] = {"kind": key, "id": id_, "first": step, "last": step}
    row["entry"] = {name: entry[name] for name in skills.KINDS[key].fields}
    row |= {"sources": entry.get("sources", []), "retrieved": 0, "contrast": None}
    for fate in runlog.FATE.values():
        row[fate] = {"success": 0, "failure": 0}
    return row


def contrast(success: Sequence[float], failure: Sequence[float]) -> list[float] | None:
    """An entry's contrast with its 95% interval, in nats a token.

    For a rollout with K teachers let c_k = a_k - mean of a: the other teachers of the same solution
    are the control for its style and its difficulty. The contrast is the mean of c over the
    successes that had the entry, minus the mean over such failures. Above 0, the entry makes right
    solutions likelier, relative to wrong ones, more than other entries do.
    success, failure: values of c. None unless both have two or more.
    """
    if min(len(success), len(failure)) < 2:
        return None
    variance = sum(statistics.variance(c) / len(c) for c in (success, failure))
    mean = statistics.mean(success) - statistics.mean(failure)
    half = 1.96 * math.sqrt(variance)
    return [mean, mean - half, mean + half]


def named(row: dict) -> list[str]:
    """A ledger's row for the page: its entry's id, then the fields in the order of Tab. 5."""
    return [row["id"], *row["entry"].values()]


# ---------------------------------------------------------------------------- the bank's history


def history(banks: Banks, rows: Ledger) -> list[dict]:
    """What each version of the bank changed: the mark, kind and fields of the entries.

    The marks are "start" in the first version, and "new" or "dropped" later. The sizes count
    skills, mistakes and dynamic entries.
    """
    events: list[dict] = []
    count = 0  # evolutions before this version, which has none itself if the success gate closed
    for before, (step, bank) in zip([None, *banks], banks.items()):
        updates = bank.metadata.get("updates", [])  # a record of each evolution
        update = updates[-1] if events and len(updates) > count else {}
        mark = "new" if events else "start"
        added = []
        dropped = []
        for row in rows.values():
            if row["first"] == step:
                added.append([mark, row["kind"], named(row)])
            if row["last"] == before:
                dropped.append(["dropped", row["kind"], named(row)])
        note = {}
        for name, x in (update if events else bank.metadata).items():
            if isinstance(x, str | int | float):
                note[name] = number(x)
        sizes = [len(bank.general_skills), len(bank.common_mistakes), 0]
        for key in skills.KINDS:
            sizes[2] += len(skills.split(bank, key)[1])
        events.append({"step": step, "sizes": sizes, "note": note, "changes": added + dropped})
        count = len(updates)
    return events


# --------------------------------------------------------------------------- an audited rollout


def sentence(a: float, rho: int, r: int) -> str:
    """A teacher's decision in words (Tab. 2), as in "supports a failure: reversed"."""
    stance = "supports" if a > 0 else "suppresses"
    if rho == 0:
        stance = "is unsure of"
    return f"{stance} a {'success' if r > 0 else 'failure'}: {runlog.FATE[rho]}"


def teachers(row: dict, tokens: dict, rows: Ledger) -> list[dict]:
    """The teachers of a rollout for the page, each with the numbers that its method logs."""
    logged = {}
    for name in OF_TEACHER:
        if isinstance(row.get(name), list):
            logged[name] = row[name]
    count = max(map(len, [*logged.values(), tokens.get("delta", []), tokens.get("credit", [])]))
    of_rollout = []
    for k in range(count):
        teacher: dict[str, Any] = {}
        for name, x_K in logged.items():
            if x_K:
                teacher[name] = number(x_K[k])
        if "rho" in teacher and "a" in teacher:
            teacher["says"] = sentence(teacher["a"] or 0.0, teacher["rho"], row["r"])
        if len(row["pairs"]) == count:
            teacher |= {"s_g": number(row["s_g"][k]), "s_e": number(row["s_e"][k])}
            for name, key, id_ in zip(("skill", "mistake"), skills.KINDS, row["pairs"][k]):
                teacher[name] = named(rows[key, id_])
        of_rollout.append(teacher)
    return of_rollout


def gate_view(row: dict, tokens: dict, rows: Ledger, generations: int) -> dict:
    """One audited rollout for the page: its teachers' decisions, its tokens' gaps and credits.

    row, tokens: its rows of rollouts.jsonl and tokens.jsonl. generations: solutions of a problem.
    """
    view = {"loss": number(row["loss"]), "teachers": teachers(row, tokens, rows)}
    for name in ("step", "index", "problem_id", "problem", "gold", "pred", "r", "truncated"):
        view[name] = row[name]
    number_in_group = row["index"] % generations + 1
    view["solution"] = f"{number_in_group} of {generations}" if generations > 1 else ""
    view |= {"text": tokens["text"], "mask": tokens.get("mask", [1] * len(tokens["text"]))}
    for name in ("delta", "credit"):  # Eq. 20's credit is the gate's: a divergence has none
        view[name] = [[number(x, 4) for x in x_T] for x_T in tokens.get(name, [])]
    return view


# -------------------------------------------------------------------------------------- the page


def evaluations(run: pathlib.Path) -> dict[tuple[str, str], list[Evaluated]]:
    """The evaluations of a run's base model (step 0) and checkpoints, in order (Figs. 2 and 4).

    Keys: the set, and " + skills" if prompts have them. We leave out evaluations that cannot be
    compared with the last one, such as another base model's, and checkpoints of other runs.
    """
    curves: dict[tuple[str, str], list[Evaluated]] = {}
    for x in compare.evaluations_in(run / "eval"):
        is_own = compare.STEP.match(x.folder.name)
        for name, row in x.sets.items() if is_own or x.is_plain else []:
            skilled = " + skills" if row["settings"]["skills"] else ""
            curves.setdefault((name, skilled), []).append(x)
    for (name, skilled), inside in curves.items():
        comparable = [x for x in inside if not compare.why_not(inside[-1], x, name)]
        curves[name, skilled] = comparable
    return curves


def points_of(run: pathlib.Path) -> list[dict]:
    """Points of the evaluation curves."""
    points = []
    for (name, skilled), inside in evaluations(run).items():
        for x in inside:
            k = x.samples_per_problem(name)
            point = {"set": f"{name}{skilled}", "step": x.step, "samples": k}
            for figure in ("avg", "avg_low", "avg_high"):  # few or equal scores have no interval
                point[figure] = number(x.sets[name][figure])
            points.append(point)
    return points


def rows_of(log: pathlib.Path) -> list[dict]:
    """The rows of a run's log; ValueError names a row that is damaged."""
    return [row for row, _ in files.rows_with(log, "step", int)]


def collect(run: pathlib.Path) -> dict:
    """The page's data of a run. Writes its ledger.json. ValueError if there is no run."""
    manifest = manifest_of(run)
    # A method without --eps-a has no threshold.
    settings = asdict(config.Config(eps_a=0.0)) | manifest["settings"]
    # A run that is still going writes a step's metrics first, then rollouts, then tokens.
    tokens = rows_of(run / "tokens.jsonl")
    rollouts = rows_of(run / "rollouts.jsonl")
    metrics = rows_of(run / "metrics.jsonl")
    # We read the banks after the rollouts, which use their entries.
    banks = {k: skills.SkillBank.load(path) for k, path in files.by_step(run / "bank").items()}
    by_id = ledger(banks, rollouts)
    counted = {"step": rollouts[-1]["step"] if rollouts else 0, "entries": [*by_id.values()]}
    files.write_json(run / "ledger.json", counted)
    columns = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(metrics)):
        columns[name] = [number(row.get(name)) for row in metrics]
    row_of = {(row["step"], row["index"]): row for row in rollouts}
    views = []
    for line in tokens:
        row = row_of.get((line["step"], line["index"]))
        if row and line["index"] < SHOWN:
            views.append(gate_view(row, line, by_id, settings.get("generations", 1)))
    tau_g = settings["tau_g"]
    eps_a = settings["eps_a"]
    has_gate = "tau_g" in manifest["settings"] and settings.get("objective", "gate") == "gate"
    x = torch.linspace(-6, 6, 121)
    slope = sgsd.gate_grad(x, tau_g)
    gate = []
    if has_gate:
        for curve in (x, sgsd.gated_loss(x, tau_g), slope):
            gate.append([number(y) for y in curve.tolist()])
    noise = float(sgsd.gate_grad(torch.tensor(eps_a, dtype=torch.float64), tau_g))
    # All rollouts of the run share them. For the credit, we assume one unmasked token in a rollout.
    bounds = {"delta": colour_bounds(eps_a, settings["c_delta"])}
    bounds["credit"] = colour_bounds(noise, float(slope.max()))
    return {
        "name": str(run),
        "program": manifest["program"],
        "settings": settings,
        "metrics": columns,
        "evals": points_of(run),
        "rollouts": views,
        "audited": len(tokens),
        "ledger": [*by_id.values()],
        "history": history(banks, by_id),
        "taught": any(row.get("rho") or row.get("first_gap") for row in rollouts),  # by a teacher
        "bounds": bounds,
        "gate": gate,
        "opens": max(range(len(views)), key=lambda i: rank(views[i]), default=0),  # of rollouts
    }


def colour_bounds(noise: float, full: float) -> list[float]:
    """The five bounds between six strengths of a colour, from noise to full, by equal factors.

    So a value just above the noise looks different from a large one. We take the noise as at most a
    tenth of the full value.
    """
    least = min(noise, full / 10) or full / 1000
    return [number(least * (full / least) ** (i / 4)) for i in range(5)]


def dump(obj: object) -> str:
    """ASCII JSON that can stand in a <script>: no "<" of a text can open or close a tag."""
    return json.dumps(obj, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def rank(view: dict) -> tuple[int, int]:
    """How many different fates a rollout's teachers have, and how many are not ignored."""
    rho_K = [teacher.get("rho", 0) for teacher in view["teachers"]]
    return len({*rho_K}), sum(map(abs, rho_K))


def write(runs: list[pathlib.Path], out: pathlib.Path) -> None:
    """Write the page of these runs, whole or not at all."""
    template = pathlib.Path(__file__).with_name("report_template.html").read_text(encoding="utf-8")
    data = [collect(run) for run in runs]
    with files.whole(out) as tmp:
        tmp.write_text(template.replace("{{data}}", dump(data)), encoding="utf-8")


# ------------------------------------------------------------------------------------ the command


def arguments(argv: Sequence[str] | None = None) -> Namespace:
    """The command line's settings; bad input exits with code 2."""
    parser = command.Parser("-m extras.report", "RUN [RUN ...] [--FLAG VALUE ...]", __doc__)
    parser.add_argument(
        "runs", nargs="+", type=pathlib.Path, metavar="RUN", help="a run's directory"
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="FILE",
        help="the page (default: report.html, in the run if there is one)",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    command.Signals().install()  # a signal ends the command at once
    args = arguments(argv)
    with command.one_line_errors("report", *command.GIVEN):
        folder = args.runs[0] if len(args.runs) == 1 else pathlib.Path()
        out = args.out or folder / "report.html"
        write(args.runs, out)
        print(f"written: {out}")
    return 0


if __name__ == "__main__":
    distributed.run_and_exit(main)
