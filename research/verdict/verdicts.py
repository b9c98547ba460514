"""How the verdict fares on answers that are known to be right or copied: an experiment, no test.

    python research/verdict/verdicts.py    this tree's verify.py, beside math-verify alone
    python research/verdict/verdicts.py --judge OLD.py    another one

Reads the data sets of ../shared/data. Counts are exact and the same on every machine, unless an
answer runs out of time; these are counted.
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
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
SETS = ("math_train", "math500", "aime24", "aime25", "hmmt25", "amc23", "dapo_math_en")
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.S)


def load(name: str) -> list[tuple[str, str]]:
    """The (problem, reference) pairs of a set."""
    rows = map(json.loads, (DATA / f"{name}.jsonl").open())
    return [(row["problem"], str(row["answer"])) for row in rows]


def longest_formula(problem: str) -> str:
    """The longest formula of a problem, without its last punctuation; empty if it has none."""
    formulas = ["".join(groups) for groups in FORMULA.findall(problem)]
    return max(formulas, key=len, default="").strip().rstrip(".,;?").strip()


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


def as_it_is(answer: str) -> bool:
    return "=" not in answer and not re.search(r"[a-zA-Z]{3}\}|\\infty|:", answer)


REWRITINGS = {  # what a model writes around or in place of a right answer
    r"in \[ \]": around(r"\[", r"\]"),
    r"in \( \)": around(r"\(", r"\)"),
    "in $ $": around("$", "$"),
    "in ** **": around("**", "**"),
    "in { }": around("{", "}"),
    r"in \text{ }, numbers only": lambda a: rf"\text{{{a}}}" if re.fullmatch(r"[\d.]+", a) else a,
    r"in \mathbf{ }": around(r"\mathbf{", "}"),
    r"after \text{Answer: }": around(r"\text{Answer: }", ""),
    "after Answer:": around("Answer: ", ""),
    "after x =": lambda a: f"x = {a}" if as_it_is(a) else a,
    "after =": around("= ", ""),
    "with a full stop": around("", "."),
    r"with \displaystyle": around(r"\displaystyle ", ""),
    r"\dfrac for \frac": lambda a: re.sub(r"\\[dt]?frac", r"\\dfrac", a),
    "a/b for \\frac{a}{b}": lambda a: re.sub(r"^(-?)\\d?frac\{(\d+)\}\{(\d+)\}$", r"\1\2/\3", a),
    "blanks in braces": lambda a: re.sub(r"\\frac\{(\w+)\}\{(\w+)\}", r"\\frac { \1 } { \2 }", a),
    "√ for \\sqrt": lambda a: re.sub(r"\\sqrt\{(\d+)\}", r"√\1", a),
    "√( ) for \\sqrt": lambda a: re.sub(r"\\sqrt\{(\d+)\}", r"√(\1)", a),
    "x² for x^2": lambda a: a.replace("^2", "²").replace("^3", "³").replace("^4", "⁴"),
    "− for -": swap("-", "−"),
    "π for \\pi": swap("\\pi", "π"),
    "∞ for \\infty": swap("\\infty", "∞"),
    r"\left( \right)": lambda a: (
        swap("(", r"\left(")(swap(")", r"\right)")(a)) if "left" not in a else a
    ),
    "without \\left, \\right": lambda a: re.sub(r"\\(left|right)", "", a),
    r"\, between thousands": lambda a: re.sub(r"^(\d{1,3})(\d{3})$", r"\1\\,\2", a),
    ", between thousands": lambda a: re.sub(r"^(\d{1,3})(\d{3})$", r"\1,\2", a),
    "{,} between thousands": lambda a: re.sub(r"^(\d{1,3}),?(?:\\!)?(\d{3})$", r"\1{,}\2", a),
    ".0 behind an integer": lambda a: re.sub(r"^(-?\d+)$", r"\1.0", a),
    r"\% for percent": lambda a: a if r"\%" not in a else a.replace(r"\%", r" \text{ percent}"),
    "without unit": lambda a: re.sub(r"\s*\\(?:text|mbox)\{[^{}]*\}(\^\d)?$", "", a) or a,
    "unit as words": lambda a: re.sub(r"\\(?:text|mbox)\{ ?([a-z ]+)\}$", r" \1", a),
    "^\\circ without": lambda a: re.sub(r"\^\{?\\circ\}?$", "", a),
    "named pair": named("x", "y"),
    "named triple": named("x", "y", "z"),
    "(x, y) = pair": lambda a: (
        f"(x, y) = {a}" if re.fullmatch(r"\\?(left)?\([^()]*,[^()]*\)", a) else a
    ),
    "(22)_6 for 22_6": lambda a: re.sub(r"^(\d+)_\{?(\d+)\}?$", r"(\1)_{\2}", a),
    r"\text{22}_6 for 22_6": lambda a: re.sub(r"^(\d+)_\{?(\d+)\}?$", r"\\text{\1}_{\2}", a),
    "a set without braces": lambda a: re.sub(r"^\\\{(.*)\\\}$", r"\1", a),
    "a list in braces": lambda a: re.sub(r"^(-?[\d./]+(?:, ?-?[\d./]+)+)$", r"\\{\1\\}", a),
    "a list with and": lambda a: re.sub(r"^(-?[\d./]+), ?(-?[\d./]+)$", r"\1 \\text{ and } \2", a),
    "pmatrix as bmatrix": swap("pmatrix", "bmatrix"),
}


class Late(Exception):
    """A verdict took too long."""


def in_time(judge):
    """A judge in this process, within ten seconds for an answer; one that fails says no."""

    @functools.wraps(judge)
    def timed(*texts: str) -> bool:
        signal.alarm(10)
        try:
            return bool(judge(*texts))
        except Late:
            timed.late += 1
            return False
        except Exception:
            return False
        finally:
            signal.alarm(0)

    timed.late = 0
    return timed


def stop(*_: object) -> None:
    raise Late


def alone(gold: str, pred: str) -> bool:
    """math-verify's verdict as its own documentation uses it."""
    import math_verify

    boxes = [rf"\boxed{{{side}}}" for side in (gold, pred)]
    sides = [math_verify.parse(box, parsing_timeout=None) for box in boxes]
    return bool(math_verify.verify(sides[0], sides[1], timeout_seconds=None))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--judge", default=str(ROOT / "verify.py"), help="a verify.py")
    args = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, stop)
    spec = importlib.util.spec_from_file_location("judge", pathlib.Path(args.judge))
    judge = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(judge)
    uncopied = getattr(judge, "uncopied", lambda gold, pred, problem: pred)

    def ours(gold: str, pred: str, problem: str) -> bool:
        pred = uncopied(gold, pred, problem)
        quick = judge.quick_verdict(gold, pred)
        return judge.math_verdict(gold, pred) if quick is None else quick

    ours, theirs = in_time(ours), in_time(alone)

    kept: list[str] = []
    print("| the problem's longest formula as its answer | problems | accepted |\n|---|---|---|")
    for name, count in (("math_train", 900), ("math500", 200)):
        rows = random.Random(0).sample(load(name), count)
        copies = [(gold, longest_formula(problem), problem) for problem, gold in rows]
        accepted = [copy for copy in copies if copy[1] and ours(copy[0], copy[1], copy[2])]
        print(f"| {name}, drawn with seed 0 | {count} | {len(accepted)} |", flush=True)
        kept += [f"copied: {gold}  <-  {pred}" for gold, pred, _ in accepted]

    print(
        "\n| the reference as its answer, the problem given | problems | refused |\n|---|---|---|"
    )
    for name in SETS:
        rows = load(name)
        refused = [gold for problem, gold in rows if not ours(gold, gold, problem)]
        print(f"| {name} | {len(rows)} | {len(refused)} |", flush=True)

    golds = sorted({gold for _, gold in load("math_train")})
    golds = [gold for gold in golds if not re.fullmatch(r"-?\d+", gold)]
    golds = random.Random(0).sample(golds, 200) + ["7", "-5", "1234", "56789"]
    print("\n| rewriting of a MATH reference | answers | accepted | by math-verify alone |")
    print("|---|---|---|---|")
    sums, missed = [0, 0, 0], []
    for what, rewrite in REWRITINGS.items():
        pairs = [(gold, rewrite(gold)) for gold in golds if rewrite(gold) != gold]
        right = [pair for pair in pairs if ours(pair[0], pair[1], "")]
        missed += [(what, *pair) for pair in pairs if pair not in right]
        other = sum(theirs(gold, pred) for gold, pred in pairs)
        sums = [a + b for a, b in zip(sums, (len(pairs), len(right), other))]
        print(f"| {what} | {len(pairs)} | {len(right)} | {other} |", flush=True)
    print(f"| all | {sums[0]} | {sums[1]} | {sums[2]} |")
    print(f"\nout of time: {ours.late}; math-verify alone: {theirs.late}\n")
    print("\n".join(kept))
    for what, gold, pred in missed:
        print(f"refused: {what}: {gold}  <-  {pred}")


if __name__ == "__main__":
    main()
