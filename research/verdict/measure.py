"""How verdicts fare on answers that are known to be right, wrong, or worth nothing.

    python research/verdict/measure.py                    this tree's lib/verify.py
    python research/verdict/measure.py --judge OLD.py     another one: git show COMMIT:verify.py
    python research/verdict/measure.py --judge alone      math-verify with its own settings

Reads the data sets of ../shared/data (--data). Every list is drawn with seed 0, so the counts are
the same on every machine, unless an answer runs out of time; these are counted.
"""

import argparse
import functools
import importlib.util
import json
import logging
import pathlib
import random
import re
import signal
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
SETS = {  # how many distinct references are drawn from each; of MATH those that are no integers
    "math_train": 690,
    "math500": 130,
    "hmmt25": 20,
    "aime24": 10,
    "aime25": 10,
    "amc23": 10,
    "dapo_math_en": 30,
    "gsm8k_test": 20,
}
PROBLEMS = {"math_train": 600, "math500": 100, "gsm8k_test": 30, "hmmt25": 30, "aime24": 30}
PROBLEMS |= {"amc23": 20}
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.S)


def rows_of(data: pathlib.Path, name: str) -> list[tuple[str, str]]:
    """The (problem, reference) pairs of a set."""
    rows = map(json.loads, (data / f"{name}.jsonl").read_text().splitlines())
    return [(row["problem"], str(row["answer"])) for row in rows]


def longest_formula(problem: str) -> str:
    """The longest formula of a problem, without its last punctuation; empty if it has none."""
    formulas = ["".join(groups) for groups in FORMULA.findall(problem)]
    return max(formulas, key=len, default="").strip().rstrip(".,;?").strip()


# ------------------------------------------------------------------- ordinary rewritings, all right


def swap(old: str, new: str):
    return lambda answer: answer.replace(old, new)


def around(before: str, after: str):
    return lambda answer: f"{before}{answer}{after}"


def named(*names: str):
    """A tuple of so many numbers with their names."""

    def rewrite(answer: str) -> str:
        inside = re.fullmatch(r"\(([^][()]*)\)", re.sub(r"\\(left|right)", "", answer).strip())
        values = inside[1].split(",") if inside else []
        if len(values) != len(names):
            return answer
        return ", ".join(f"{name}={value.strip()}" for name, value in zip(names, values))

    return rewrite


def after_name(answer: str) -> str:
    is_value = not re.search(r"[=:<>]|\\(?:text|infty|leq?|geq?|in)\b", answer)
    return f"x = {answer}" if is_value else answer


def with_left(answer: str) -> str:
    if "left" in answer:
        return answer
    return answer.replace("(", r"\left(").replace(")", r"\right)")


REWRITINGS = {  # what a model writes around or in place of a right answer
    r"in \[ \]": around(r"\[", r"\]"),
    r"in \( \)": around(r"\(", r"\)"),
    "in $ $": around("$", "$"),
    "in { }": around("{", "}"),
    r"in \text{ }, numbers only": lambda a: rf"\text{{{a}}}" if re.fullmatch(r"[\d.]+", a) else a,
    r"after \text{Answer: }": around(r"\text{Answer: }", ""),
    "after Answer:": around("Answer: ", ""),
    "after x =": after_name,
    "with a full stop": around("", "."),
    r"with \displaystyle": around(r"\displaystyle ", ""),
    r"\dfrac for \frac": lambda a: re.sub(r"\\[dt]?frac", r"\\dfrac", a),
    r"a/b for \frac{a}{b}": lambda a: re.sub(r"^(-?)\\d?frac\{(\d+)\}\{(\d+)\}$", r"\1\2/\3", a),
    "blanks in braces": lambda a: re.sub(r"\\frac\{(\w+)\}\{(\w+)\}", r"\\frac { \1 } { \2 }", a),
    r"√ for \sqrt": lambda a: re.sub(r"\\sqrt\{(\d+)\}", r"√\1", a),
    r"√( ) for \sqrt": lambda a: re.sub(r"\\sqrt\{(\d+)\}", r"√(\1)", a),
    "x² for x^2": lambda a: a.replace("^2", "²").replace("^3", "³"),
    "− for -": swap("-", "−"),
    r"π for \pi": swap("\\pi", "π"),
    r"∞ for \infty": swap("\\infty", "∞"),
    r"∪ for \cup": swap("\\cup", "∪"),
    r"° for ^\circ": lambda a: re.sub(r"\^\{?\\circ\}?", "°", a),
    r"\left( \right)": with_left,
    r"without \left, \right": lambda a: re.sub(r"\\(left|right)", "", a),
    r"\, between thousands": lambda a: re.sub(r"^(\d{1,3})(\d{3})$", r"\1\\,\2", a),
    ", between thousands": lambda a: re.sub(r"^(\d{1,3})(\d{3})$", r"\1,\2", a),
    "{,} between thousands": lambda a: re.sub(r"^(\d{1,3}),?(?:\\!)?(\d{3})$", r"\1{,}\2", a),
    ".0 behind an integer": lambda a: re.sub(r"^(-?\d+)$", r"\1.0", a),
    r"percent for \%": lambda a: a.replace(r"\%", r" \text{ percent}"),
    "without unit": lambda a: re.sub(r"\s*\\(?:text|mbox)\{[^{}]*\}(\^\d)?$", "", a) or a,
    "unit as words": lambda a: re.sub(r"\\(?:text|mbox)\{ ?([a-z ]+)\}$", r" \1", a),
    r"without ^\circ": lambda a: re.sub(r"\^\{?\\circ\}?$", "", a),
    "named pair": named("x", "y"),
    "named triple": named("x", "y", "z"),
    "(22)_6 for 22_6": lambda a: re.sub(r"^(\d+)_\{?(\d+)\}?$", r"(\1)_{\2}", a),
    "a set without braces": lambda a: re.sub(r"^\\\{(.*)\\\}$", r"\1", a),
    "a list in braces": lambda a: re.sub(
        r"^(?!\d+,\d{3}$)(-?[\d./]+(?:, ?-?[\d./]+)+)$", r"\\{\1\\}", a
    ),
    "a list with and": lambda a: re.sub(  # 58,500 is no list
        r"^(?!\d+,\d{3}$)(-?[\d./]+), ?(-?[\d./]+)$", r"\1 \\text{ and } \2", a
    ),
    "pmatrix as bmatrix": swap("pmatrix", "bmatrix"),
}
ODD = {  # what hardly any model writes in a box; counted apart
    "in ** **": around("**", "**"),
    r"in \mathbf{ }": around(r"\mathbf{", "}"),
    "after =": around("= ", ""),
    r"\text{22}_6 for 22_6": lambda a: re.sub(r"^(\d+)_\{?(\d+)\}?$", r"\\text{\1}_{\2}", a),
    "(x, y) = pair": lambda a: (
        f"(x, y) = {a}" if re.fullmatch(r"\\?(left)?\([^()]*,[^()]*\)", a) else a
    ),
}


def rewritten(data: pathlib.Path, rewritings: dict) -> list[tuple[str, str, str, str]]:
    """(kind, reference, answer, problem) of each reference that a rewriting changes."""
    rng, golds = random.Random(0), []
    for name, count in SETS.items():
        answers = sorted({gold for _, gold in rows_of(data, name)})
        if name.startswith("math"):
            answers = [gold for gold in answers if not re.fullmatch(r"-?\d+", gold)]
        golds += rng.sample(answers, min(count, len(answers)))
    cases = []
    for kind, rewrite in rewritings.items():
        cases += [(kind, gold, rewrite(gold), "") for gold in golds if rewrite(gold) != gold]
    return cases


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


def thousands(mark: str):
    return lambda answer: re.sub(r"(?<=\d)(?=(?:\d{3})+$)", lambda _: mark, answer)


def doubled(answer: str) -> str:
    over, under = map(int, re.fullmatch(FRACTION, answer).groups())
    return rf"\frac{{{2 * over}}}{{{2 * under}}}"


FORMS = [  # a reference that fits the pattern, written as models do: @ stands for it, & for 7 less
    (NUMBER, "m+n = & + 7 = @"),
    (NUMBER, "a+b+c = & + 4 + 3 = @"),
    (NUMBER, "& + 7 = @"),
    (NUMBER, r"2 \cdot @ - @ = @"),
    (NUMBER, "m+n = @"),
    (NUMBER, "N = @"),
    (NUMBER, r"\angle ABC = @^\circ"),
    (NUMBER, r"@^\circ"),
    (NUMBER, r"@^{\circ}"),
    (NUMBER, r"@ \text{ degrees}"),
    (NUMBER, "@ degrees"),
    (NUMBER, r"\$@"),
    (NUMBER, r"\$@.00"),
    (NUMBER, "@ dollars"),
    (NUMBER, r"@ \text{ dollars}"),
    (NUMBER, r"@\text{ cm}"),
    (NUMBER, r"@\ \text{cm}^2"),
    (NUMBER, r"@ \, \text{miles}"),
    (NUMBER, r"@ \text{ square units}"),
    (NUMBER, r"@ \text{ miles per hour}"),
    (NUMBER, r"@\text{ ways}"),
    (NUMBER, r"@ \text{ apples}"),
    (NUMBER, "@ hours"),
    (NUMBER, r"\text{@}"),
    (NUMBER, r"\text{@ eggs}"),
    (NUMBER, r"\textbf{@}"),
    (NUMBER, "@.0"),
    (NUMBER, "@."),
    (VALUE, r"@\\"),
    (VALUE, r"\text{The answer is } @"),
    (VALUE, r"\text{The final answer is } @"),
    (VALUE, "The answer is @"),
    (VALUE, "The answer is $@$."),
    (VALUE, r"\text{Answer: } @"),
    (VALUE, "Answer: @"),
    (VALUE, "x = @"),
    (VALUE, "x=@."),
    (VALUE, "AB = @"),
    (VALUE, "f(3) = @"),
    (VALUE, "P(A) = @"),
    (VALUE, r"\tan A = @"),
    (VALUE, r"\sin \theta = @"),
    (VALUE, "x_1 = @"),
    (VALUE, r"\frac{m}{n} = @"),
    (VALUE, r"\text{Area} = @"),
    (VALUE, r"\text{Area} = @ \text{ cm}^2"),
    (VALUE, r"@ \text{ units}"),
    (VALUE, "$@$"),
    (VALUE, r"\(@\)"),
    (VALUE, r"\displaystyle @"),
    (ANY, "$@$."),
    (ANY, r"\left( @ \right)"),
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


def written(form, answer: str) -> str:
    """An answer in one of the forms above."""
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


def as_written(data: pathlib.Path, wrong: bool) -> list[tuple[str, str, str, str]]:
    """(form, reference, answer, problem): a right answer in each form, or a wrong one."""
    rng, pool = random.Random(1), []
    for name in SETS:
        rows = rows_of(data, name)
        pool += rng.sample(rows, min(1500, len(rows)))
    rng.shuffle(pool)
    cases = []
    for pattern, form in FORMS:
        fitting = [row for row in pool if re.fullmatch(pattern, row[1].replace(" ", ""))]
        chosen = rng.sample(fitting, min(12 if wrong else 22, len(fitting)))
        for problem, gold in chosen:
            answer = gold.replace(" ", "") if pattern != ANY else gold
            if wrong and not re.search(r"\d", answer):
                continue
            text = written(form, other_value(answer) if wrong else answer)
            cases.append((str(form) if isinstance(form, str) else pattern, gold, text, problem))
    for pattern, form in MISTAKES if wrong else []:
        fitting = [row for row in pool if re.fullmatch(pattern, row[1].replace(" ", ""))]
        for problem, gold in rng.sample(fitting, min(12, len(fitting))):
            text = written(form, gold.replace(" ", ""))
            if text != gold.replace(" ", "") and gold != "0":
                cases.append((f"mistake {pattern}", gold, text, problem))
    return cases


# ----------------------------------------------------------------- policies that solve no problem

POLICIES = [
    *(r"2^\infty", r"0\cdot\infty", r"\infty-\infty", r"\frac{1}{0}", r"\frac{0}{0}", "2^{inf}"),
    *(r"\sin(\infty)", r"2^{\text{infinity}}", r"2^∞", r"\frac{x}{0}", r"\tan(90^\circ)", "nan"),
    *("0=1=2=3=4=5", "1,2,3,4,5", r"\{0,1,2,3,4,5,6,7,8,9,10\}", "x", r"\{\}", r"\mathbb{R}"),
    *(r"(-\infty,\infty)", "0=0", "1 or 2 or 5", r"\text{the answer}", "oo", "zoo", "2^{oo}"),
    *(r"\log(0)", r"\ln 0", r"(-1)!", r"\lim_{x\to\infty} x", r"\sum_{n=1}^\infty n", "0/0"),
]


def policies(data: pathlib.Path) -> tuple[list, list]:
    """Always the same answer; and the problem's longest formula."""
    rng, rows = random.Random(2), []
    for name, count in PROBLEMS.items():
        rows += rng.sample(rows_of(data, name), count)
    constant = []
    for policy in POLICIES:
        constant += [(policy, gold, policy, problem) for problem, gold in rows]
    formulas = [(longest_formula(problem), gold, problem) for problem, gold in rows]
    copies = [("longest formula", gold, text, problem) for text, gold, problem in formulas if text]
    return constant, copies


# ----------------------------------------------------------------------------------------- judges


class Late(Exception):
    """A verdict took too long."""


class Alone:
    """math-verify as its documentation uses it, after equal texts and integers."""

    timeouts = 0

    def __init__(self) -> None:
        import math_verify

        self.library = math_verify
        self.read = functools.lru_cache(4096)(self.parsed)
        signal.signal(signal.SIGALRM, self.stop)

    def stop(self, *_: object) -> None:
        raise Late

    def parsed(self, text: str):
        return self.library.parse(rf"\boxed{{{text}}}", parsing_timeout=None)

    def verify(self, gold: str, pred: str, problem: str) -> bool:
        if gold.strip() == pred.strip():
            return True
        if re.fullmatch(r"[+-]?\d+ [+-]?\d+", f"{gold.strip()} {pred.strip()}"):
            return int(gold) == int(pred)
        signal.alarm(10)
        try:
            gold, pred = self.read(gold), self.read(pred)
            return bool(self.library.verify(gold, pred, timeout_seconds=None))
        except Late:
            self.timeouts += 1
            return False
        except Exception:
            return False
        finally:
            signal.alarm(0)


def judge_of(name: str):
    """A judge with `verify` and `timeouts`: math-verify alone, or the Verifier of a file."""
    if name == "alone":
        return Alone()
    spec = importlib.util.spec_from_file_location("judged", name)
    module = importlib.util.module_from_spec(spec)
    sys.modules["judged"] = module
    spec.loader.exec_module(module)
    return module.Verifier(timeout_s=10.0)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    own = str(ROOT / "lib" / "verify.py")
    parser.add_argument("--judge", default=own, help="a verify.py, or alone")
    parser.add_argument(
        "--data", default=str(ROOT.parent / "shared" / "data"), help="the data sets"
    )
    parser.add_argument("--share", type=float, default=1.0, help="of each list, to look quickly")
    parser.add_argument("--only", default="", help="lists whose name has this in it")
    parser.add_argument("--show", help="a file for every case whose verdict is wrong")
    args = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)
    data = pathlib.Path(args.data)
    if not data.is_dir():
        sys.exit(f"measure: no data sets in {data}; name their directory with --data")
    constant, copies = policies(data)
    lists = {  # what is counted: verdicts that are not this one
        "ordinary rewritings refused": (rewritten(data, REWRITINGS), True),
        "odd rewritings refused": (rewritten(data, ODD), True),
        "right answers as models write them, refused": (as_written(data, wrong=False), True),
        "wrong answers, accepted": (as_written(data, wrong=True), False),
        "the same answer always, accepted": (constant, False),
        "the problem's longest formula, accepted": (copies, False),
    }
    judge = judge_of(args.judge)
    mistakes = []
    print(f"| {args.judge} | cases | count |\n|---|---|---|", flush=True)
    for what, (cases, wanted) in lists.items():
        if args.only not in what:
            continue
        if args.share < 1:
            cases = random.Random(3).sample(cases, int(args.share * len(cases)))
        wrong = []
        for kind, gold, pred, problem in cases:
            if bool(judge.verify(gold, pred, problem)) is not wanted and (wanted or gold != pred):
                wrong.append((what, kind, gold, pred))
        print(f"| {what} | {len(cases)} | {len(wrong)} |", flush=True)
        mistakes += wrong
    counts: dict[tuple[str, str], int] = {}
    for what, kind, _, _ in mistakes:
        counts[what, kind] = counts.get((what, kind), 0) + 1
    print(f"\nout of time: {judge.timeouts}\n")
    for (what, kind), count in sorted(counts.items(), key=lambda item: -item[1]):
        print(f"{count:5} {what}: {kind}")
    if args.show:
        lines = [json.dumps(row, ensure_ascii=False) for row in mistakes]
        pathlib.Path(args.show).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
