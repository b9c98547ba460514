"""Looking inside a run: a page of its curves, gates, ledger and bank; and one problem explained.

    python -m extras.report runs/sgsd                          writes runs/sgsd/report.html
    python -m extras.report runs/a runs/b --out both.html      overlays the curves of two runs
    python -m extras.report runs/sgsd --explain "What is 2 + 3?" --answer 5

A run may be finished or still going. The page is report_template.html with the data in it as JSON;
its script draws plain SVG and needs neither a network nor a build. Every call counts the run's
ledger.json anew. --explain draws several solutions of one problem with the settings, the last bank
and the last adapter of a run, takes them through Algorithm 1, says how many are right, and prints
what each teacher did to a right and to a wrong one. It writes a folder beside the run and leaves
the run as it was.
"""

import contextlib
import decimal
import itertools
import json
import math
import pathlib
import re
import shutil
import signal
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import distributed
import rollout
import sgsd
import skills
from lib import config, files, runlog
from lib.problems import Problem
from lib.run import State, prepare

MAX_BYTES = 4_900_000  # of the page
MAX_POINTS = 1000  # of a curve, over all runs
MAX_SOURCES = 8  # memories of one entry on the page
ECHO_STEPS = 25  # steps in a block
ECHO_TEACHERS = 100  # decided teachers that a block needs, of each outcome
ECHO_EXCEPTIONS = 0.02  # share of them that may lean the other way
WINDOW_PROBLEMS = 100  # problems in a window
FALL_DEVIATIONS = 4.0  # between two windows, in standard deviations of their difference

Banks = dict[int, skills.SkillBank]  # by the step after which each came into use, oldest first
Entries = dict[tuple[str, str], dict]  # by kind and id


def arguments(argv: Sequence[str] | None = None) -> Namespace:
    """The command line's settings; a mistake exits with code 2."""
    usage = "RUN [RUN ...] [--FLAG VALUE ...]"
    parser = config.Parser("-m extras.report", usage, __doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=pathlib.Path, metavar="RUN", help="a run's directory")
    page = "the page (default: report.html in the first run)"
    add("--out", type=pathlib.Path, metavar="FILE", help=page)
    add("--explain", metavar="PROBLEM", help="take this problem through one step of the run")
    add("--answer", help="the reference answer of the problem in --explain")
    add("--draws", type=int, default=8, metavar="N", help="solutions that --explain draws")
    args = parser.parse_args(argv)
    if (args.explain is None) != (args.answer is None):
        parser.error("--explain and --answer: each needs the other; give both")
    if args.explain is not None and len(args.runs) > 1:
        parser.error(f"--explain: give one run, got {len(args.runs)}")
    if args.draws < 1:
        parser.error(f"--draws {args.draws}: must be >= 1")
    if args.out and args.out.is_dir():
        parser.error(f"--out {args.out}: is a directory; give a file such as report.html")
    return args


def number(x: Any) -> Any:
    """A number for the page: six significant digits, None for nan and inf; others unchanged."""
    if isinstance(x, float):
        return float(f"{x:.6g}") if math.isfinite(x) else None
    return x


def excerpt(text: str, size: int = 500) -> str:
    """A text, or its beginning and end where it is longer than `size` characters."""
    return text if len(text) <= size else f"{text[: size // 2]} […] {text[-size // 2 :]}"


# ------------------------------------------------------------------------------------ the ledger


def load_banks(run: pathlib.Path) -> Banks:
    versions = files.by_step(run / "bank")
    return {step: skills.SkillBank.load(path) for step, path in versions.items()}


def settings_of(run: pathlib.Path) -> dict[str, Any]:
    """The settings in a run's config.json; ValueError where there is none."""
    try:
        return json.loads((run / "config.json").read_text(encoding="utf-8"))["settings"]
    except (OSError, ValueError, LookupError, TypeError) as e:
        why = f"no readable config.json of a run there ({type(e).__name__}: {e})"
        raise ValueError(f"{run}: {why}; give a run such as runs/sgsd") from None


def entries(bank: skills.SkillBank) -> Entries:
    by_id = {}
    for kind, id_field in skills.IDS.items():
        for entry in bank.collection(kind):
            by_id[kind, entry[id_field]] = entry
    return by_id


def entries_in_use(banks: Banks, step: int) -> Entries:
    """What a step could retrieve: the entries of the last version before it."""
    earlier = [version for version in banks if version < step]
    return entries(banks[max(earlier)]) if earlier else {}


def identity(kind: str, id_: str, entry: dict) -> tuple[str, str]:
    """An entry's name in all versions: its id, or its text if dynamic (Alg. 4 renumbers it)."""
    return kind, skills.entry_text(entry, kind) if id_.startswith(skills.DYNAMIC) else id_


def ledger(run: pathlib.Path) -> dict:
    """What ledger.json holds: {"step": the last step, "entries": a row per skill and mistake}.

    A row says which versions of the bank held the entry first and last, how often it was retrieved,
    and how often it was distilled, reversed or ignored, on successes and on failures.
    ValueError where a rollout used an entry that no version of the bank explains.
    """
    rollouts = list(files.read_jsonl(run / "rollouts.jsonl"))
    banks = load_banks(run)  # after the rollouts: a run that is still going writes both
    rows: dict[tuple[str, str], dict] = {}
    for step, bank in banks.items():
        for (kind, id_), entry in entries(bank).items():
            row = rows.setdefault(identity(kind, id_, entry), uncounted(kind, entry, step))
            row |= {"id": id_, "last": step}
    for roll in rollouts:
        used = entries_in_use(banks, roll["step"])
        outcome = "success" if roll["r"] > 0 else "failure"
        has_teachers = len(roll["rho"]) == len(roll["pairs"])  # a baseline's pairs need not teach
        for k, pair in enumerate(roll["pairs"]):
            for kind, id_ in zip(skills.IDS, pair):
                if (kind, id_) not in used:
                    rule = f"step {roll['step']} used {id_}, which is not in the version of the "
                    rule += "bank before it; are files of bank/ missing?"
                    raise ValueError(f"{run}: {rule}")
                row = rows[identity(kind, id_, used[kind, id_])]
                row["retrieved"] += 1
                if has_teachers:
                    row[runlog.FATE[roll["rho"][k]]][outcome] += 1
    return {"step": rollouts[-1]["step"] if rollouts else 0, "entries": list(rows.values())}


def uncounted(kind: str, entry: dict, step: int) -> dict[str, Any]:
    """A ledger's row with all counts at 0. step: the first version that has the entry."""
    row: dict[str, Any] = {"kind": kind, "id": entry[skills.IDS[kind]], "first": step, "last": step}
    row["entry"] = {name: entry[name] for name in skills.FIELDS[kind]}
    row |= {"sources": entry.get("sources", []), "retrieved": 0}
    for fate in runlog.FATE.values():
        row[fate] = {"success": 0, "failure": 0}
    return row


def memories(run: pathlib.Path, rollouts: list[dict]) -> dict[str, dict[int, dict]]:
    """The solutions of each problem that entries may come from, by problem id and step.

    Step 0 is the cold start.
    """
    rows = []
    for row in files.read_jsonl(run / "bank/memories.jsonl"):
        seed_solution = {"step": 0, "r": row["reward"], "pred": row["predicted_answer"]}
        rows.append(row | seed_solution | {"text": row["completion"]})
    by_problem: dict[str, dict[int, dict]] = {}
    for row in rows + rollouts:
        memory = {name: row[name] for name in ("step", "r", "pred")}
        memory |= {"problem": excerpt(row["problem"]), "text": excerpt(row["text"])}
        by_problem.setdefault(row["problem_id"], {})[row["step"]] = memory
    return by_problem


def source_steps(row: dict, by_problem: dict[str, dict[int, dict]]) -> list[tuple[str, int | None]]:
    """The first sources of a ledger's row: problem id, and the step of its memory, None if unknown.

    A dynamic entry came from the newest rollout before it; what was merged into it may be older.
    """
    dynamic = row["id"].startswith(skills.DYNAMIC)
    sources = []
    for source in row["sources"][:MAX_SOURCES]:
        rollouts = by_problem.get(source, {})
        steps = [step for step in rollouts if step <= row["first"] and (step > 0) == dynamic]
        sources.append((source, max(steps, default=None)))
    return sources


# ---------------------------------------------------------------------------- the bank's history


def named(entry: dict, kind: str) -> list[str]:
    """An entry for the page: its id, then its fields in the order of Tab. 5."""
    return [entry[name] for name in (skills.IDS[kind], *skills.FIELDS[kind])]


def timeline(banks: Banks) -> list[dict]:
    """What each version changed: a mark for each such entry, and what it was merged from.

    The marks: "start" in the first version; "copied" where a dynamic entry has the text of a static
    one (D11); "merged" where it carries the sources of entries that are gone; "new"; and "pruned".
    The sizes are those of skills, mistakes, dynamic entries, and dynamic entries that are copies.
    """
    events: list[dict] = []
    before: Entries = {}
    for step, bank in banks.items():
        now: Entries = {}
        dynamic, static_texts = {}, set()
        for (kind, id_), entry in entries(bank).items():
            key, text = identity(kind, id_, entry), skills.entry_text(entry, kind).casefold()
            now[key] = entry
            if id_.startswith(skills.DYNAMIC):
                dynamic[key] = kind, text
            else:
                static_texts.add((kind, text))
        copied = [key for key, text in dynamic.items() if text in static_texts]
        gone = {key: entry for key, entry in before.items() if key not in now}
        merged_keys: set[tuple[str, str]] = set()
        changes = []
        for key, entry in now.items():
            if key in before:
                continue
            parents = parents_of(key[0], entry, gone)
            merged_keys |= parents.keys()
            mark = "merged" if parents else "new" if events else "start"
            names = [named(parent, key[0]) for parent in parents.values()]
            changes.append(["copied" if key in copied else mark, named(entry, key[0]), names])
        for key, entry in gone.items():
            if key not in merged_keys:
                changes.append(["pruned", named(entry, key[0]), []])
        note = {k: number(v) for k, v in bank.metadata.items() if isinstance(v, str | int | float)}
        for update in bank.metadata.get("updates", []):
            note = update if update.get("step") == step else note
        sizes = [len(bank.general_skills), len(bank.common_mistakes), len(dynamic), len(copied)]
        events.append({"step": step, "sizes": sizes, "note": note, "changes": changes})
        before = now
    return events


def parents_of(kind: str, entry: dict, gone: Entries) -> Entries:
    """The entries that are gone and whose sources this entry carries on."""
    sources = set(entry.get("sources", []))
    parents = {}
    for key, parent in gone.items():
        of_parent = parent.get("sources")
        if key[0] == kind and of_parent and set(of_parent) <= sources:
            parents[key] = parent
    return parents


# --------------------------------------------------------------------------- an audited rollout


def sentence(a: float, rho: int, r: int) -> str:
    """A teacher's decision in words (Tab. 2), as in "supports a failure: reversed"."""
    stance = "supports" if a > 0 else "suppresses"
    if rho == 0:
        stance = "is unsure of"
    return f"{stance} a {'success' if r > 0 else 'failure'}: {runlog.FATE[rho]}"


def teachers(row: dict, used: Entries) -> list[dict]:
    """The teachers of a rollout with their decisions, for the page."""
    of_rollout = []
    for k, rho in enumerate(row["rho"]):
        teacher = {"rho": rho, "says": sentence(row["a"][k], rho, row["r"]), "s_g": None}
        teacher |= {name: number(row[name][k]) for name in ("alpha", "a_plain", "a", "losses")}
        if len(row["pairs"]) == len(row["rho"]):
            teacher |= {name: number(row[name][k]) for name in ("s_g", "s_e")}
            for name, kind, id_ in zip(("skill", "mistake"), skills.IDS, row["pairs"][k]):
                teacher[name] = named(used[kind, id_], kind)
        of_rollout.append(teacher)
    return of_rollout


def gate_view(row: dict, tokens: dict, banks: Banks, eps_a: float) -> dict:
    """One audited rollout for the page: its teachers' decisions, its tokens' gaps and credits.

    row, tokens: its lines in rollouts.jsonl and tokens.jsonl. Gaps become whole numbers, as fine as
    is needed to tell the side of the threshold; credits become ten-thousandths of the largest.
    """
    digits = max(3, 1 - int(decimal.Decimal(str(eps_a)).as_tuple().exponent))
    credit_KT = tokens.get("credit", [])  # Eq. 20 is the gate's: a divergence has none
    sizes = [abs(w) for w in itertools.chain.from_iterable(credit_KT) if math.isfinite(w)]
    unit = max(sizes, default=0.0) / 10_000 or 1.0
    used = entries_in_use(banks, row["step"])
    view = {"loss": number(row["loss"]), "digits": digits, "teachers": teachers(row, used)}
    for name in ("step", "index", "problem_id", "problem", "gold", "pred", "r", "truncated"):
        view[name] = row[name]
    view |= {"text": tokens["text"], "mask": tokens["mask"], "unit": unit}
    return view | {"delta": whole(tokens["delta"], 10.0**-digits), "credit": whole(credit_KT, unit)}


def whole(x_KT: list[list[float]], unit: float) -> list[list[int | None]]:
    """Numbers as whole multiples of a unit; None for nan and inf."""
    multiples = []
    for x_T in x_KT:
        multiples.append([round(x / unit) if math.isfinite(x) else None for x in x_T])
    return multiples


def in_words(view: dict, eps_a: float) -> str:
    """A rollout's decisions, line by line."""
    verdict = "right" if view["r"] > 0 else "wrong"
    cut = ", cut at the length limit" if view["truncated"] else ""
    lines = [
        f"completion: {''.join(view['text'])}",
        f"answer {view['pred']}, reference {view['gold']}: {verdict}, r = {view['r']:+d}{cut}",
        f"{len(view['mask'])} tokens, {view['mask'].count(0)} of them masked; "
        f"loss {view['loss']:+.6f}; threshold |a~| > {eps_a}",
        "  k     s_g     s_e  alpha         a        a~  rho",
    ]
    digits = view["digits"]
    for k, x in enumerate(view["teachers"], 1):
        similarities = f"{x['s_g']:6.3f}  {x['s_e']:6.3f}  {x['alpha']:5.3f}"
        supports = f"{x['a_plain']:+8.{digits}f}  {x['a']:+8.{digits}f}"
        rho = f"{x['rho']:+3d}" if x["rho"] else "  0"
        lines.append(f"{k:3d}  {similarities}  {supports}  {rho}  {x['says']}")
        skill, mistake = " ".join(x["skill"][:2]), " ".join(x["mistake"][:2])
        lines.append(f"     {skill} | {mistake}")
    return "\n".join(lines)


def explanation(data: dict) -> str:
    """What --explain prints: the count of right draws, and the first draw of each outcome.

    data: what `collect` returns for its folder. No escape sequence in a model's text is left.
    """
    views = data["rollouts"]
    parts = [f"{data['sentence']}\nproblem: {views[0]['problem']}"]
    for outcome, is_success in (("right", True), ("wrong", False)):
        draws = [view for view in views if (view["r"] > 0) == is_success]
        if draws:
            heading = f"the first {outcome} one, draw {draws[0]['index'] + 1}:"
            parts.append(f"{heading}\n{in_words(draws[0], data['settings']['eps_a'])}")
    text = "\n\n".join(parts)
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


# ------------------------------------------------------------------------- a run in one sentence


def what_happened(
    run: pathlib.Path, metrics: list[dict], rollouts: list[dict], banks: Banks
) -> str:
    """A run in one sentence: its steps, success, evaluation and bank.

    It says what is missing: steps, an evaluation, an interval, or anything to learn from; where
    the success fell, and whether polarity only repeated the verdict.
    """
    settings = settings_of(run)
    source, steps = "/".join(pathlib.Path(settings["data"]).parts[-2:]), settings["steps"]
    if rollouts and not metrics:
        return draws_in_words(rollouts)
    if not metrics:
        return f"No step of {steps} on {source} so far."
    last = metrics[-1]["step"]
    done = count(last, "step") if last >= steps else f"{last} of {count(steps, 'step')}"
    parts = [f"{done} on {source}: {success_in_words(metrics, settings['batch_size'])}"]
    parts.append(fall_in_words(metrics, settings["batch_size"]))
    parts.append(echo_in_words(metrics))
    parts.append(nothing_learnt(metrics, rollouts))
    parts.append(evaluation_in_words(run, last) or no_evaluation(last < steps))
    if banks:
        parts.append(bank_in_words(banks))
    return "; ".join(part for part in parts if part) + "."


def count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def no_evaluation(is_going: bool) -> str:
    return "no evaluation so far" if is_going else "no evaluation"


def draws_in_words(rollouts: list[dict]) -> str:
    """How many draws of --explain are right. Their step is the one after the adapter's."""
    right, step = sum(row["r"] > 0 for row in rollouts), rollouts[0]["step"] - 1
    policy = f"the adapter of step {step}" if step else "the base model"
    draws = f"{count(len(rollouts), 'draw')} of one problem under {policy}"
    return f"{draws}: {right} right, {len(rollouts) - right} wrong."


def success_in_words(metrics: list[dict], batch_size: int) -> str:
    """The success of training in the first and in the last steps.

    A step has few problems, so steps are taken together that have 100, at most half of all. A
    difference of two standard deviations or less is said to be within chance.
    """
    shares = [row["success"] for row in metrics]
    if len(shares) == 1:
        return f"success {shares[0]:.0%}"
    window = min(math.ceil(WINDOW_PROBLEMS / batch_size), len(shares) // 2)
    before, after = sum(shares[:window]) / window, sum(shares[-window:]) / window
    p = (before + after) / 2
    deviation = math.sqrt(2 * p * (1 - p) / (window * batch_size))
    first = f"{before:.0%} ({in_steps(metrics[:window])})"
    last = f"{after:.0%} ({in_steps(metrics[-window:])})"
    if abs(after - before) <= 2 * deviation:
        return f"success {first} and {last}, within chance"
    return f"success {'rose' if after > before else 'fell'} from {first} to {last}"


def in_steps(rows: list[dict]) -> str:
    first, last = rows[0]["step"], rows[-1]["step"]
    return f"step {first}" if first == last else f"steps {first} to {last}"


def fall_in_words(metrics: list[dict], batch_size: int) -> str:
    """The first fall of the success, or of the share of boxed answers, well below its best; "".

    A window is as many steps as have 100 problems. A share p of n problems has the variance
    p (1 - p) / n, so the difference of two windows with n problems each, whose mean share is p, has
    twice that. A fall is a window more than four standard deviations of this difference below the
    best one before it. Rollouts of one problem are alike and count as one.
    """
    window = math.ceil(WINDOW_PROBLEMS / batch_size)
    shares = {
        "success": [row["success"] for row in metrics],
        "the share of boxed answers": [1 - row["no_answer"] for row in metrics],
    }
    falls = []
    for what, share in shares.items():
        best, best_end = -1.0, 0
        for end in range(window, len(share) + 1):
            now = sum(share[end - window : end]) / window
            if now >= best:
                best, best_end = now, end
            p = (best + now) / 2
            deviation = math.sqrt(2 * p * (1 - p) / (window * batch_size))
            if best - now > FALL_DEVIATIONS * deviation:
                low, high = metrics[end - window : end], metrics[best_end - window : best_end]
                text = f"{what} fell from {best:.0%} ({in_steps(high)}) to {now:.0%}"
                falls.append((end, f"{text} ({in_steps(low)})"))
                break
    return min(falls)[1] if falls else ""


def echo_in_words(metrics: list[dict]) -> str:
    """Whether polarity only repeated the verdict in a block of 25 steps; "" if it did not.

    It repeats the verdict where a block has at least 100 decided teachers of each outcome (rho is
    not 0), and 49 of 50 of their supports have one sign on both outcomes.
    """
    for end in range(ECHO_STEPS, len(metrics) + 1, ECHO_STEPS):
        block = metrics[end - ECHO_STEPS : end]
        side = side_of_supports(block)
        if side:
            line = f"in {in_steps(block)} nearly all decided supports were {side} zero, so polarity"
            return f"{line} only repeated the verdict"
    return ""


def side_of_supports(block: list[dict]) -> str:
    """The side of zero on which nearly all decided supports lie: "below", "above", or ""."""
    sides = {"below", "above"}
    for outcome, above, below in (
        ("success", "distilled", "reversed"),
        ("failure", "reversed", "distilled"),
    ):
        n_above = sum(row[f"rho_{above}_{outcome}"] for row in block)
        n_below = sum(row[f"rho_{below}_{outcome}"] for row in block)
        if n_above + n_below < ECHO_TEACHERS:
            return ""
        exceptions = ECHO_EXCEPTIONS * (n_above + n_below)
        if n_above > exceptions:
            sides.discard("below")
        if n_below > exceptions:
            sides.discard("above")
    return "".join(sides)  # at most one: half of the supports or more lie on one side


def nothing_learnt(metrics: list[dict], rollouts: list[dict]) -> str:
    """Why no step can have changed the policy; "" where one has."""
    finite = [row["grad_norm"] for row in metrics if math.isfinite(row["grad_norm"])]
    if any(finite):
        return ""
    polarities = [rho for row in rollouts for rho in row["rho"]]
    why = "no step had a gradient"
    if not finite:
        why = "no step had a finite gradient"
    elif not polarities:
        why = "no rollout had a teacher"
    elif not any(polarities):
        why = "every teacher was ignored"
    return f"{why}, so nothing was learnt"


def evaluation_in_words(run: pathlib.Path, last: int) -> str:
    """avg@k of the base and of the last checkpoint evaluated, with their difference; "" if none.

    last: the run's last step.
    """
    of_sets: dict[str, list[dict]] = {}
    for point in evaluations(run):
        if point["is_plain"]:
            of_sets.setdefault(point["set"], []).append(point)
    of_sets = {name: points for name, points in of_sets.items() if points[-1]["step"]}
    parts = []
    for name, points in of_sets.items():
        first, shown = points[0], points[-1]["shown"]
        where = f" on {name}" if len(of_sets) > 1 else ""
        where += f" of step {points[-1]['step']}:" if points[-1]["step"] < last else ""
        if first["step"]:
            interval = " (no interval)"
            if points[-1]["avg_low"] is not None:
                interval = f" (95%: {shown['avg_low']} to {shown['avg_high']})"
            parts.append(f"evaluation{where} {shown['avg']}{interval}")
        else:
            gap = gap_to_base(run, points[-1])
            parts.append(f"evaluation{where} {first['shown']['avg']} to {shown['avg']}{gap}")
    return ", ".join(parts)


def gap_to_base(run: pathlib.Path, point: dict) -> str:
    """A checkpoint's difference to the base, paired by problem; "" if comparison.json has none."""
    path = run / "eval" / "comparison.json"
    sets = files.read_json(path) if path.exists() else {}
    place = files.of_step(pathlib.Path(run.resolve().name, "checkpoints"), point["step"])
    for policy, row in sets.get(point["set"], {}).get("results", {}).items():
        if pathlib.Path(policy).parts[-3:] != place.parts or row["digest"] != point["digest"]:
            continue
        if "diff" in row and folder_of(row["to"]) == base_folder(run):
            diff, low, high = (row[name] for name in ("diff", "diff_low", "diff_high"))
            if low is None:
                return f" ({100 * diff:+.1f} points, no interval)"
            chance = ", within chance" if low <= 0 <= high else ""
            interval = f"95%: {100 * low:+.1f} to {100 * high:+.1f}"
            return f" ({100 * diff:+.1f} points, {interval}{chance})"
    return ""


def bank_in_words(banks: Banks) -> str:
    """The sizes of the last bank, and how many of its entries the first one did not have.

    A copy of a static entry (D11) is none of these.
    """
    texts = []
    for bank in (banks[min(banks)], banks[max(banks)]):
        of_bank = set()
        for (kind, _), entry in entries(bank).items():
            of_bank.add((kind, skills.entry_text(entry, kind).casefold()))
        texts.append(of_bank)
    added, last = len(texts[1] - texts[0]), banks[max(banks)]
    sizes = f"{count(len(last.general_skills), 'skill')} and "
    sizes += count(len(last.common_mistakes), "mistake")
    return f"bank {sizes}, {added or 'none'} of them added in training"


# -------------------------------------------------------------------------------------- the page


def curves(metrics: list[dict], points: int) -> tuple[dict[str, list], int]:
    """The numbers of metrics.jsonl by name, of every n-th step up to the last one; and n."""
    every = max(1, math.ceil(len(metrics) / points))
    rows = metrics[(len(metrics) - 1) % every :: every]
    columns = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(rows)):
        columns[name] = [number(row.get(name)) for row in rows]
    return columns, every


def evaluations(run: pathlib.Path) -> list[dict]:
    """Points of the evaluation curves, from every RUN/eval/*/results.json (Figs. 2 and 4).

    This run's checkpoints stand at their step, plain models at 0; the curves begin at the model
    of the run, and other models are curves of their own. Left out are other runs' checkpoints, and
    points of other problems than the last one's, where two files had one name.
    """
    base, points = base_folder(run), []
    for path in sorted(run.glob("eval/*/results.json")):
        policy = path.parent.name.removesuffix("--skills")
        step = re.fullmatch(r"step_(\d+)", policy)
        if not step and re.search(r"--step_\d+$", policy):
            continue
        suffix = " + skills" if policy != path.parent.name else ""
        if not step and policy != base:
            suffix = f", {policy}{suffix}"
        for name, row in files.read_json(path).items():
            point = {"set": name + suffix, "step": int(step[1]) if step else 0}
            point["is_plain"] = not suffix
            figures = {k: row[k] for k in ("avg", "avg_low", "avg_high")}
            point |= {k: number(x) for k, x in figures.items()}
            # As eval.py prints them; there is no interval of few problems or equal scores.
            point["shown"] = {k: f"{x:.1%}" for k, x in figures.items() if x is not None}
            point["samples"] = row["samples"] // row["problems"]  # k of avg@k
            point["digest"] = row["digest"]
            points.append(point)
    points.sort(key=lambda point: (point["set"], point["step"]))
    last = {point["set"]: point["digest"] for point in points}
    return [point for point in points if point["digest"] == last[point["set"]]]


def base_folder(run: pathlib.Path) -> str:
    """The name of the folder in which eval.py keeps the results of a run's base model."""
    return folder_of(settings_of(run)["model"])


def folder_of(model: str) -> str:
    path = pathlib.Path(model)
    return "--".join((path.resolve() if path.is_dir() else path).parts[-2:])


def collect(run: pathlib.Path, points: int = MAX_POINTS) -> dict:
    """The page's data of a run. Writes its ledger.json. ValueError where there is no run."""
    settings = settings_of(run)
    metrics, rollouts, tokens = (
        list(files.read_jsonl(run / f"{name}.jsonl")) for name in runlog.LOGS
    )
    banks, counted = load_banks(run), ledger(run)
    files.write_json(run / "ledger.json", counted)
    columns, every = curves(metrics, points)
    audited = {line["step"] for line in tokens}
    rows = [row for row in rollouts if row["step"] in audited]  # in the order of their tokens
    eps_a, views = settings["eps_a"], []
    for row, of_tokens in zip(rows, tokens):
        views.append(gate_view(row, of_tokens, banks, eps_a))
    by_problem = memories(run, rollouts)
    shown: dict[str, dict[int, dict]] = {}
    for row in counted["entries"]:
        row["all_sources"] = len(row["sources"])
        row["sources"] = source_steps(row, by_problem)
        for source, step in row["sources"]:
            if step is not None:
                shown.setdefault(source, {})[step] = by_problem[source][step]
    x, tau_g = torch.linspace(-6, 6, 121), settings["tau_g"]
    gate = [x, sgsd.gated_loss(x, tau_g), sgsd.gate_grad(x, tau_g)]
    noise = float(sgsd.gate_grad(torch.tensor(eps_a, dtype=torch.float64), tau_g))
    # The run's and not a rollout's. A credit's are those of a rollout with one unmasked token.
    bounds = {"delta": colour_bounds(eps_a, settings["c_delta"])}
    bounds["credit"] = colour_bounds(noise, float(gate[2].max()))
    return {
        "name": run.resolve().name,
        "sentence": what_happened(run, metrics, rollouts, banks),
        "settings": settings,
        "metrics": columns,
        "every": every,
        "evals": evaluations(run),
        "rollouts": views,
        "ledger": counted["entries"],
        "memories": shown,
        "timeline": timeline(banks),
        "taught": any(row["rho"] for row in rollouts),  # whether any rollout had a teacher
        "explained": bool(views) and not metrics,  # --explain's folder, which logs no step
        "bounds": bounds,
        "gate": [[number(y) for y in curve.tolist()] for curve in gate],
    }


def colour_bounds(noise: float, full: float) -> list[float]:
    """Five bounds of a colour's six strengths, from noise to the full colour by equal factors.

    So what barely exceeds the noise and what is large differ. Noise is at most a tenth of the full.
    """
    least = min(noise, full / 10) or full / 1000
    return [number(least * (full / least) ** (i / 4)) for i in range(5)]


def dump(obj: object) -> str:
    """ASCII JSON that can stand in a <script>: no "<" of a text can open or close a tag."""
    return json.dumps(obj, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def fit(views: list[dict], budget: int) -> tuple[list[dict], list[str]]:
    """As many gate views as fit in `budget` bytes, from all steps, and the names of the others."""
    counts: dict[int, int] = {}
    order = []  # the first of each step, then the second of each, and so on
    for i, view in enumerate(views):
        counts[view["step"]] = counts.get(view["step"], 0) + 1
        order.append((counts[view["step"]], i))
    chosen = set()
    for _, i in sorted(order):
        budget -= len(dump(views[i])) + 1
        if budget < 0:
            break
        chosen.add(i)
    fitting = [view for i, view in enumerate(views) if i in chosen]
    others = [f"{x['step']}: {x['problem_id']}" for i, x in enumerate(views) if i not in chosen]
    return fitting, others


def write(runs: list[pathlib.Path], out: pathlib.Path, max_bytes: int = MAX_BYTES) -> list[str]:
    """Write the page of these runs, whole or not at all; returns each run's sentence.

    Where the audited rollouts do not all fit, the page says which were left out.
    """
    template = pathlib.Path(__file__).with_name("report_template.html").read_text(encoding="utf-8")
    data = [collect(run, max(1, MAX_POINTS // len(runs))) for run in runs]
    if len({run["name"] for run in data}) < len(runs):
        for run, path in zip(data, runs):
            run["name"] = str(path)
    if len(data) > 1:
        for run in data:
            run["sentence"] = f"{run['name']}: {run['sentence']}"
    views = [run.pop("rollouts") for run in data]
    budget = (max_bytes - len(template) - len(dump(data))) // len(runs)
    for run, views_of_run in zip(data, views):
        run["audited"] = len(views_of_run)
        run["rollouts"], others = fit(views_of_run, budget)
        run["left_out"] = excerpt(", ".join(others), 2000)
        ranks = []  # of each rollout: how many fates its teachers have, how many are not ignored
        for view in run["rollouts"]:
            rho_K = [teacher["rho"] for teacher in view["teachers"]]
            ranks.append((len({*rho_K}), sum(rho != 0 for rho in rho_K)))
        run["opens"] = ranks.index(max(ranks)) if ranks else 0
    with files.whole(out) as tmp:
        tmp.write_text(template.replace("{{data}}", dump(data)), encoding="utf-8")
    return [run["sentence"] for run in data]


# ------------------------------------------------------------------------------------ the command


def explain(run: pathlib.Path, problem: str, answer: str, draws: int) -> pathlib.Path:
    """Take several draws of one problem through a step, in memory only, and print what came of it.

    Its logs go to a folder beside the run, which is returned; the run itself stays as it was.
    ValueError where the run has no bank.
    """
    about = files.read_json(run / "config.json") if settings_of(run) else {}
    if about["program"] != config.Config.program:
        program = about["program"].removeprefix("-m ")
        raise ValueError(f"--explain: {run} is a run of {program}; give one of sgsd.py")
    banks = load_banks(run)
    if not banks:
        raise ValueError(f"--explain: {run} has no bank yet; wait until its cold start is done")
    cfg = config.from_dict(config.Config, about["settings"])
    # A server gets the adapter through a folder in the run, which stays as it is.
    cfg = replace(cfg, out=str(run), audit_every=1, server=())
    x = Problem("explained", problem, answer)
    with contextlib.ExitStack() as held:
        step = max(files.by_step(run / "checkpoints"), default=0)
        state = State(identity={}, data=[x], counts={}, step=step, evolved=max(banks))
        world = distributed.init(cfg.device)
        rows = explained(prepare(cfg, world, state, skills.SkillBank.load, held), x, draws)
    name = f"{run.resolve().name}-explain-{files.digest(problem, answer)[:8]}"
    folder = run.resolve().with_name(name)
    print(f"--explain writes {folder}, a folder beside the run; the run stays as it is")
    shutil.rmtree(folder, ignore_errors=True)
    files.write_json(folder / "config.json", about)
    banks[max(banks)].save(folder / "bank" / "step_000000.json")
    files.append_jsonl(folder / "tokens.jsonl", [row.pop("tokens") for row in rows])
    files.append_jsonl(folder / "rollouts.jsonl", rows)
    print(f"\n{explanation(collect(folder))}\n")
    return folder


def explained(run: Any, x: Problem, draws: int) -> list[dict]:
    """The rows of several rollouts of one problem in the run's next step, without a step."""
    pairs_K = run.bank.retrieve(x.problem, run.cfg.num_teachers, run.embed)
    step = run.step + 1
    share = [(i, x, rollout.sample_key(run.cfg.seed, step, x.id, i)) for i in range(draws)]
    rows = []
    for (i, _, _), roll in zip(share, sgsd.sample(run, share)):
        result = sgsd.rollout_loss(run, roll, pairs_K)
        rows.append(sgsd.record(run, step, i, pairs_K, roll, result))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    config.end_at_signals()
    args = arguments(argv)
    with config.one_line_errors("report"):
        runs = args.runs
        if args.explain is not None:
            runs = [explain(runs[0], args.explain, args.answer, args.draws)]
        out = args.out or runs[0] / "report.html"
        sentences = write(runs, out)
    if args.explain is None:
        print("\n".join(sentences))
    print(f"written: {out}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    distributed.leave(main)
