"""What a run's credit says about the single steps of a solution, in the world tiny/harder.

    python research/polarity/steps.py RUN ...    runs with --audit-every 1 and --evolve-every 0

Positive credit makes a token likelier. The first table is of all runs. Each step has one token at
which the right and the wrong form first differ. The ideal credit is 1 there if the step is right,
-1 if it is wrong, and 0 elsewhere. The table gives the cosine of the run's own credit with it
(Eq. 20 summed over teachers; for GRPO the advantage over the length), its chance level (two
standard deviations of the cosine if each solution's credit has a random sign), and the share of all
squared credit that lies on those tokens.

The second table has a run's families of steps: how many steps of each were right at first and in
the end, and in how many of its problems a teacher showed the family's true skill or mistake.

The outcome of the whole solution decides the polarity. So a table for each run says how often its
teachers were distilled, ignored and reversed, by outcome, by what their skill is about and by
whether that step was right; and the credit that they gave the tokens of that step, or of the whole
solution if the skill is about no step.
"""

import argparse
import itertools
import json
import math
import pathlib
import random
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tiny")]

import harder as lock
import world

import skills
from lib import runlog
from research.markdown_table import head_of, row_of
from research.polarity import credit

PHASES, LAST = ((1, 5), (6, 20), (21, 60)), (41, 60)  # steps
FATES = ("distilled", "ignored", "reversed")


def spans(texts: list[str]) -> list[range]:
    """The tokens of each step: from one step's number to the next, which is after "So"."""
    whole, ends = "", []
    for text in texts:
        whole += text
        ends.append(len(whole))
    found, start = [], 0
    for match in list(re.finditer(r"So \d+", whole))[:3]:
        tokens = [i for i, end in enumerate(ends) if start < end <= match.end()]
        found.append(range(tokens[0], tokens[-1] + 1) if tokens else range(0))
        start = match.end()
    return found


def deciding(texts: list[str], span: range, part: world.Drawn) -> int | None:
    """The token of a step at which right and wrong form first differ; None in any other form."""
    forms = [f"{text} So {answer}" for text, answer in (part.right, part.wrong)]
    alike = itertools.takewhile(lambda both: both[0] == both[1], zip(*forms))
    same = forms[0][: len(list(alike))]
    at = "".join(texts[i] for i in span).find(same)
    left = at + len(same)  # characters of the step in front of that token
    for i in span if at >= 0 else ():
        left -= len(texts[i])
        if left < 0:
            return i
    return None


def credit_of(row: dict, tokens: dict) -> list[float]:
    """Each token's credit: Eq. 20 summed over teachers, or GRPO's advantage over the length."""
    length = len(tokens["text"])
    if "advantage" in row:
        return [row["advantage"] / length] * length
    return [sum(of_teachers) for of_teachers in zip(*tokens["credit"])] or [0.0] * length


def aim(rows: list[dict], audited: list[dict], locks: dict[str, lock.Lock]) -> tuple:
    """Right and wrong steps, the cosine with the ideal credit, its chance level, the share."""
    steps, squares, found = Counter[bool](), 0.0, 0.0
    products = []  # of each solution's credit with the ideal one
    for row, tokens in zip(rows, audited):
        credit, x = credit_of(row, tokens), locks[row["problem_id"]]
        squares += sum(c * c for c in credit)
        right = lock.steps_right(x, row["text"])
        products.append(0.0)
        for step, part, ok in zip(spans(tokens["text"]), x.parts, right):
            at = deciding(tokens["text"], step, part)
            if at is not None:
                steps[bool(ok)] += 1
                products[-1] += credit[at] if ok else -credit[at]
                found += credit[at] ** 2
    size = math.sqrt(squares * steps.total())
    chance = 2 * math.sqrt(sum(x * x for x in products)) / size
    return steps[True], steps[False], sum(products) / size, chance, found / squares


def aims(
    name: str, rows: list[dict], audited: list[dict], locks: dict[str, lock.Lock]
) -> list[str]:
    """A run's rows of the first table, one per phase."""
    lines = []
    for first, last in PHASES:
        own = [i for i, row in enumerate(rows) if first <= row["step"] <= last]
        if not own:
            continue
        measured = aim([rows[i] for i in own], [audited[i] for i in own], locks)
        right, wrong, cosine, chance, share = measured
        cells = [name, f"{first} to {last}", right, wrong, f"{cosine:+.3f}", f"{chance:.3f}"]
        lines.append(row_of([*cells, f"{share:.1%}"]))
    return lines


def families(name: str, bank: pathlib.Path, rows: list[dict], locks: dict[str, lock.Lock]) -> list:
    """A run's rows of the second table, the family that is shown most often first."""
    meanings, lists = {}, json.loads(bank.read_text()) if bank.exists() else {}
    for key, id_name in skills.IDS.items():
        for entry in lists.get(key, []):
            meanings[entry[id_name]] = world.meaning(entry)
    cells: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        x = locks[row["problem_id"]]
        taught = {meanings.get(entry) for pair in row["pairs"] for entry in pair}
        for family, ok in zip(x.families, lock.steps_right(x, row["text"])):
            cell = cells[family]
            cell["shown"].append(bool({(family, "skill"), (family, "mistake")} & taught))
            for phase, (first, last) in {"early": PHASES[0], "late": LAST}.items():
                if first <= row["step"] <= last:
                    cell[phase].append(bool(ok))
    lines = []
    for family, cell in sorted(cells.items(), key=lambda item: -statistics.mean(item[1]["shown"])):
        shares = []
        for part in ("shown", "early", "late"):
            known = cell[part] and (meanings or part != "shown")  # GRPO has no bank
            shares.append(f"{statistics.mean(cell[part]):.0%}" if known else "")
        lines.append(row_of([name, family, *shares]))
    return lines


def count(
    bank: pathlib.Path, rows: list[dict], audited: list[dict], locks: dict[str, lock.Lock]
) -> dict[tuple, dict[str, float]]:
    """(outcome, kind of the skill, own step) -> number of teachers by fate, and their credit.

    "size" is the sum of the credit's absolute values over the whole solution.
    """
    entries = json.loads(bank.read_text())["general_skills"]
    meanings = {entry["skill_id"]: world.meaning(entry) for entry in entries}
    found: dict[tuple, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row, tokens in zip(rows, audited):
        steps, x = spans(tokens["text"]), locks[row["problem_id"]]
        right = lock.steps_right(x, row["text"])
        for k, (skill, _) in enumerate(row["pairs"]):
            family, kind = meanings[skill] or (None, "")
            outcome, credit = "success" if row["r"] > 0 else "failure", tokens["credit"][k]
            key, about = (outcome, "of no step", ""), range(len(credit))
            if family in x.families:
                at = x.families.index(family)
                if at >= len(steps):  # a step that was never written
                    continue
                about = steps[at]
                key = outcome, kind, "right" if right[at] else "wrong"
            found[key][runlog.FATE[row["rho"][k]]] += 1
            found[key]["credit"] += sum(credit[i] for i in about)
            found[key]["size"] += sum(map(abs, credit))
    return found


def table(found: dict[tuple, dict[str, float]]) -> list[str]:
    head = ["outcome", "its skill", "own step", "teachers", *FATES]
    lines = head_of([*head, "credit of the step, x 1000, mean", "sum"])
    for key, cell in sorted(found.items()):
        total = sum(cell[fate] for fate in FATES)
        shares = [f"{cell[fate] / total:.0%}" for fate in FATES]
        credit = [f"{1000 * cell['credit'] / total:+.2f}", f"{cell['credit']:+.2f}"]
        lines.append(row_of([*key, f"{total:.0f}", *shares, *credit]))
    return lines


def summary(rows: list[dict], found: dict[tuple, dict[str, float]]) -> list[str]:
    """How the supports lean, the fates by outcome, and what teachers of no step weigh."""
    supports = [a for row in rows for a in row["a"]]
    lines = ["", f"{sum(a < 0 for a in supports)} of {len(supports)} supports are below 0"]
    for name, r in (("successes", 1), ("failures", -1)):
        fates = [runlog.FATE[rho] for row in rows if row["r"] == r for rho in row["rho"]]
        lines.append(f"teachers of {name}: {dict(Counter(fates))}")
    of_none = sum(cell["size"] for key, cell in found.items() if key[1] == "of no step")
    total = sum(cell["size"] for cell in found.values())
    return [*lines, f"{of_none / total:.0%} of all credit, by size, is of teachers of no step"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("runs", type=pathlib.Path, nargs="+")
    args = parser.parse_args(argv)
    head = ["run", "steps", "right steps", "wrong steps", "cosine", "chance", "share"]
    print("\n".join(head_of(head)))
    locks = lock.held_out(random.Random(0))
    tables = ["", *head_of(["run", "family", "shown", "right, steps 1 to 5", "41 to 60"])]
    of_teachers = []
    for run in args.runs:
        pairs = list(credit.audited(run))
        rows, audited = [row for row, _ in pairs], [tokens for _, tokens in pairs]
        print("\n".join(aims(run.name, rows, audited, locks)))
        bank = run / "bank" / "bank.json"
        tables += families(run.name, bank, rows, locks)
        if rows[0]["pairs"]:
            found = count(bank, rows, audited, locks)
            of_teachers += ["", run.name, "", *table(found), *summary(rows, found)]
    print("\n".join(tables + of_teachers))


if __name__ == "__main__":
    main()
