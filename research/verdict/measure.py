"""How verdicts fare on answers that are known to be right, wrong, or worth nothing.

    python research/verdict/measure.py --data ../shared/data

Three measures: right answers as models write them that are refused, wrong ones that are accepted,
and policies that solve no problem: always the same answer, and the problem's longest formula. The
lists are drawn by seeds, so the counts are the same on every machine, unless an answer runs out of
time; these are counted.
"""

import argparse
import json
import logging
import pathlib
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from lib.verify import Verifier
from research.markdown_table import head_of, row_of

SETS = (
    "math_train",
    "math500",
    "hmmt25",
    "aime24",
    "aime25",
    "amc23",
    "dapo_math_en",
    "gsm8k_test",
)
PROBLEMS = {"math_train": 600, "math500": 100, "gsm8k_test": 30, "hmmt25": 30, "aime24": 30}
PROBLEMS |= {"amc23": 20}  # drawn from each set, for the policies
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.S)


class Case(NamedTuple):
    kind: str
    gold: str
    answer: str
    problem: str


def rows_of(data: pathlib.Path, name: str) -> list[tuple[str, str]]:
    """The (problem, reference) pairs of a set."""
    rows = map(json.loads, (data / f"{name}.jsonl").read_text().splitlines())
    return [(row["problem"], str(row["answer"])) for row in rows]


# ------------------------------------------------- answers as models write them, right and wrong

NUMBER = r"-?\d+"
VALUE = r"-?(?:\d+|\d+/\d+|\\frac\{\d+\}\{\d+\}|\\sqrt\{\d+\}|\d*\\sqrt\{\d+\}|\d*\\pi)"
FRACTION = r"\\frac\{(\d+)\}\{(\d+)\}"
ANY = r"[^=]+"


def decimal(answer: str) -> str:
    over, under = map(int, re.fullmatch(FRACTION, answer).groups())
    return f"{over / under:.6f}"


def rounded(answer: str) -> str:
    over, under = map(int, re.fullmatch(FRACTION, answer).groups())
    return f"{over / under:.3f}"


def thousands(mark: str) -> Callable[[str], str]:
    return lambda answer: re.sub(r"(?<=\d)(?=(?:\d{3})+$)", lambda _: mark, answer)


def doubled(answer: str) -> str:
    over, under = map(int, re.fullmatch(FRACTION, answer).groups())
    return rf"\frac{{{2 * over}}}{{{2 * under}}}"


FORMS = [  # a reference that fits the pattern, written as models do
    (r"\d{4,}", thousands(",")),
    (r"\d{4,}", thousands("{,}")),
    (r"\d{4,}", thousands(r"\,")),
    (r"\d{4,}", thousands(r",\!")),
    (r"\d{4,}", thousands(" ")),
    (FRACTION, decimal),
    (FRACTION, doubled),
    (FRACTION, lambda a: f"{a} = {decimal(a)}"),
    (FRACTION, lambda a: rf"{a} \approx {rounded(a)}"),
    (FRACTION, lambda a: f"{doubled(a)} = {a}"),
    (FRACTION, lambda a: f"x = {doubled(a)} = {a}"),
    (FRACTION, lambda a: f"P = {doubled(a)} = {a}"),
    (FRACTION, lambda a: re.sub(FRACTION, r"\1/\2", a)),
    (FRACTION, lambda a: re.sub(FRACTION, r"\\tfrac{\1}{\2}", a)),
    (FRACTION, lambda a: re.sub(FRACTION, r"{\1 \\over \2}", a)),
    (r"-?\d+,-?\d\d?", lambda a: a.replace(",", r" \text{ and } ")),
    (r"-?\d+,-?\d\d?", lambda a: "x = " + a.replace(",", r" \text{ or } x = ")),
    (r"-?\d+,-?\d\d?", lambda a: "x = " + a.replace(",", ", ")),
    (r"-?\d+,-?\d\d?", lambda a: r"\{" + a + r"\}"),
    (r"\(-?\d+,-?\d+\)", lambda a: a.replace(",", ", ")),
    (r"\(-?\d+,-?\d+\)", lambda a: r"\left" + a.replace(")", r"\right)")),
    (r"\(-?\d+,-?\d+\)", lambda a: "(x, y) = " + a),
    (r"\(-?\d+,-?\d+\)", lambda a: "x=" + a.strip("()").replace(",", ", y=")),
    (r"\[-?\d+,-?\d+\]|\(-?\d+,-?\d+\]", lambda a: r"x \in " + a),
]


def all_forms() -> list[tuple[str, Any]]:
    """Those of forms.json first, where @ stands for the reference and & for 7 less."""
    texts = json.loads(pathlib.Path(__file__).with_name("forms.json").read_text())
    plain: list[tuple[str, Any]] = []
    for name, pattern in (("number", NUMBER), ("value", VALUE), ("any", ANY)):
        plain += [(pattern, text) for text in texts[name]]
    return plain + FORMS


def written(form: Any, answer: str) -> str:
    """An answer in one of these forms."""
    if not isinstance(form, str):
        return form(answer)
    less = str(int(answer) - 7) if "&" in form else ""
    return form.replace("@", answer).replace("&", less)


def other_value(answer: str) -> str:
    """A wrong answer of the same shape: the last number of it is one larger."""
    *_, last = re.finditer(r"\d+", answer)
    return answer[: last.start()] + str(int(last[0]) + 1) + answer[last.end() :]


MISTAKES = [  # a reference that fits the pattern, and a wrong answer that looks like it
    (NUMBER, lambda a: a[1:] if a[0] == "-" else "-" + a),
    (r"\d\d+", lambda a: a[::-1]),
    (NUMBER, "x = @ + 1"),
    (NUMBER, r"@ \text{ or } 7777"),
    (NUMBER, "@, 7777"),
    (NUMBER, "@x"),
    (NUMBER, r"\frac{@}{7}"),
    (NUMBER, r"@\pi"),
    (NUMBER, "@.5"),
    (NUMBER, r"\text{not } @"),
    (FRACTION, lambda a: re.sub(FRACTION, r"\\frac{\2}{\1}", a)),
    (r"\\frac\{\d+\}\{(3|7|9|11|13)\}", lambda a: rounded(a)[:-1]),
    (FRACTION, "-@"),
    (r"\((-?\d+),(-?\d+)\)", lambda a: re.sub(r"(-?\d+),(-?\d+)", r"\2,\1", a)),
    (r"\((-?\d+),(-?\d+)\)", lambda a: r"\{" + a.strip("()") + r"\}"),
    (r"\((-?\d+),(-?\d+)\)", lambda a: a.strip("()").partition(",")[0]),
    (r"-?\d+,-?\d\d?", lambda a: a.partition(",")[0]),
    (r"-?\d+,-?\d\d?", lambda a: a + ", 7777"),
    (r"[\[(]-?\w+,-?\w+[\])]", lambda a: a.translate(str.maketrans("[](", "()["))),
    (r"-?\d*\\sqrt\{\d+\}", lambda a: a.replace(r"\sqrt", "")),
    (r"-?\d*\\sqrt\{\d+\}", "@^2"),
    (r"-?\d*x[-+]\d+", lambda a: a.translate(str.maketrans("+-", "-+"))),
    (r"-?\d*x[-+]\d+", "@=0"),
]


def fitting(pool: list[tuple[str, str]], pattern: str) -> list[tuple[str, str]]:
    return [row for row in pool if re.fullmatch(pattern, row[1].replace(" ", ""))]


def as_written(data: pathlib.Path, wrong: bool) -> list[Case]:
    """A right answer in each form, or a wrong one."""
    rng, pool = random.Random(1), []
    for name in SETS:
        rows = rows_of(data, name)
        pool += rng.sample(rows, min(1500, len(rows)))
    rng.shuffle(pool)
    cases = []
    for pattern, form in all_forms():
        rows = fitting(pool, pattern)
        for problem, gold in rng.sample(rows, min(12 if wrong else 22, len(rows))):
            answer = gold.replace(" ", "") if pattern != ANY else gold
            if wrong and not re.search(r"\d", answer):
                continue
            text = written(form, other_value(answer) if wrong else answer)
            cases.append(Case(form if isinstance(form, str) else pattern, gold, text, problem))
    for pattern, form in MISTAKES if wrong else []:
        rows = fitting(pool, pattern)
        for problem, gold in rng.sample(rows, min(12, len(rows))):
            text = written(form, gold.replace(" ", ""))
            if text != gold.replace(" ", "") and gold != "0":
                cases.append(Case(f"mistake {pattern}", gold, text, problem))
    return cases


# ----------------------------------------------------------------- policies that solve no problem

POLICIES = [
    *(r"2^\infty", r"0\cdot\infty", r"\infty-\infty", r"\frac{1}{0}", r"\frac{0}{0}", "2^{inf}"),
    *(r"\sin(\infty)", r"2^{\text{infinity}}", r"2^∞", r"\frac{x}{0}", r"\tan(90^\circ)", "nan"),
    *("0=1=2=3=4=5", "1,2,3,4,5", r"\{0,1,2,3,4,5,6,7,8,9,10\}", "x", r"\{\}", r"\mathbb{R}"),
    *(r"(-\infty,\infty)", "0=0", "1 or 2 or 5", r"\text{the answer}", "oo", "zoo", "2^{oo}"),
    *(r"\log(0)", r"\ln 0", r"(-1)!", r"\lim_{x\to\infty} x", r"\sum_{n=1}^\infty n", "0/0"),
]


def longest_formula(problem: str) -> str:
    """The longest formula of a problem, without its last punctuation; empty if it has none."""
    formulas = ["".join(groups) for groups in FORMULA.findall(problem)]
    return max(formulas, key=len, default="").strip().rstrip(".,;?").strip()


def policies(data: pathlib.Path) -> tuple[list[Case], list[Case]]:
    """Always the same answer; and the problem's longest formula."""
    rng, rows = random.Random(2), []
    for name, count in PROBLEMS.items():
        rows += rng.sample(rows_of(data, name), count)
    constant = []
    for policy in POLICIES:
        constant += [Case(policy, gold, policy, problem) for problem, gold in rows]
    copies = [Case("copy", gold, longest_formula(problem), problem) for problem, gold in rows]
    return constant, [case for case in copies if case.answer]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    data = ROOT.parent / "shared/data"
    parser.add_argument("--data", type=pathlib.Path, default=data, help="folder of the sets")
    parser.add_argument("--share", type=float, default=1.0, help="of each list, to look quickly")
    args = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)
    if not args.data.is_dir():
        sys.exit(f"measure: no data sets in {args.data}; name their directory with --data")
    constant, copies = policies(args.data)
    lists = {  # the cases, and the verdict that is wanted
        "right answers as models write them, refused": (as_written(args.data, wrong=False), True),
        "wrong answers, accepted": (as_written(args.data, wrong=True), False),
        "the same answer always, accepted": (constant, False),
        "the problem's longest formula, accepted": (copies, False),
    }
    counts: Counter[str] = Counter()
    print("\n".join(head_of(["list", "cases", "count"])), flush=True)
    with Verifier(timeout_s=10.0) as judge:
        for what, (cases, wanted) in lists.items():
            if args.share < 1:
                cases = random.Random(3).sample(cases, int(args.share * len(cases)))
            errors = 0
            for case in cases:
                right = judge.verify(case.gold, case.answer, case.problem)
                if right != wanted and (wanted or case.gold != case.answer):
                    counts[f"{what}: {case.kind}"] += 1
                    errors += 1
            print(row_of([what, len(cases), errors]), flush=True)
        print(f"\nout of time: {judge.timeouts}\n")
    for kind, count in counts.most_common():
        print(f"{count:5} {kind}")


if __name__ == "__main__":
    main()
