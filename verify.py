"""The verdict: a completion's answer, and whether it equals the reference. One verifier for training and evaluation (D5).

extract_answer   the last \\boxed{} after the last </think>
Verifier         equality by number or string, else by structure and exact algebra, in killable workers

An answer is taken apart (lists, sets, tuples, intervals, matrices, relations, units) and its atoms are read by the parser of
math-verify; they are compared exactly, because rounding makes 1/2004! and 1/2006! the same. Equality is symmetric.

Run as a program this file is the worker: JSON lines [gold, pred] in, true or false out. It imports neither torch nor
transformers, so that a worker starts in about a second.
"""

import json
import os
import queue
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from fractions import Fraction
from functools import lru_cache
from typing import Any

MAX_CHARS = 1000  # a longer answer is compared as a string only
MEMORY_BYTES = 1 << 30  # address space of a worker
START_S = 60.0  # a worker imports sympy first; this is not counted against an answer


def extract_answer(text: str) -> str | None:
    r"""The inside of the last `\boxed{}` after the last `</think>`; None if there is none, or it is never closed.

    A thinking block that is still open at the end holds no answer. Nested and escaped braces are followed.
    """
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    start = None
    for match in re.finditer(r"\\boxed\s*\{", text):
        start = match.end()
    if start is None:
        return None
    depth = 1
    for match in re.finditer(r"\\.|[{}]", text[start:], re.S):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[start : start + match.start()].strip()
    return None


# ---------------------------------------------------------------------------------------- strings and numbers: no algebra

GROUPED = r"[+-]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?"  # thousands separators
ASCII = str.maketrans({"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ", "√": r"\sqrt ",
                       "±": r"\pm ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∪": r"\cup ", "∈": r"\in ", "²": "^2"})  # fmt: skip
SPELLING = [(re.compile(old), new) for old, new in [
    (r"(?<=\d)(?:\{,\}|,\\!)(?=\d{3})", ""), (r"(?<!\\)\\[,;:!>]|\\(?:left|right|[bB]igg?[lr]?|displaystyle)(?![a-zA-Z])", ""),
    (r"\\(?:qquad|quad|enspace)(?![a-zA-Z])|(?<!\\)\\ |~|\s+", " "),
    (r"\\[dtc](frac|binom)", r"\\\1"),
    (r"\\(?:math(?:rm|bf|it)|text(?:bf|it|rm|normal)|mbox|operatorname)\s*(?=\{)", r"\\text"),
    (r"^ *\\\$(.+)", r"\1 \\text{dollars}"), (r"\\?\$", ""),  # a price; other dollar signs only delimit
    (r",? *\\text *\{[ ,]*(?:and|or)[ ,]*\}|,? *(?<![a-zA-Z\\{])(?:and|or)(?![a-zA-Z}])", ","),
    (r"\\text *\{ *to *\}|(?<=\d) +to +(?=\d)", ":"),
    (r"\\([lg])(?:eq(?:slant)?|e)(?![a-z])", r"\\\1e "), (r"<=", r"\\le "), (r">=", r"\\ge "), (r"\\lt(?![a-z])", "<"), (r"\\gt(?![a-z])", ">"),
    (r"\\neq(?![a-z])|!=", r"\\ne "), (r"\\varnothing|\\\{ *\\\}", r"\\emptyset "),
    (r" *\^ *(?:\{ *\\circ *\}|\\circ(?![a-z]))|(?<=[\d}]) *(?:\\text *\{ *degrees? *\}|degrees?\b)", r"\\degree "),
    (r"(?<=[\d})]) *(?:\\text *\{ *(?:\\?%|percent) *\}|percent\b|\\?%)", r"\\% "),
    (r"(?<![\\a-zA-Z])(sqrt|sin|cos|tan|cot|log|ln|pi|infty)(?![a-z])", r"\\\1"), (r"(?<!\\)\binfinity\b", r"\\infty "), (r" +", " "),
]]  # fmt: skip


def clean(answer: str) -> str:
    """One spelling: no sizing commands, math dollars or final full stop; single spaces, none beside punctuation; "and" as a comma."""
    answer = answer.translate(ASCII)
    for old, new in SPELLING:
        answer = old.sub(new, answer)
    if (
        m := re.fullmatch(
            rf"([^,\d()\[\]{{}}]*)({GROUPED})((?:[^,\d()\[\]{{}}]|\\text *\{{[^{{}}]*\}})*)", answer
        )
    ) and (m[1] or m[3]):
        answer = m[1] + m[2].replace(",", "") + m[3]  # 1,234 apples; alone, 100,200 may be a list
    return re.sub(
        r" (?![a-zA-Z0-9])|(?<![a-zA-Z0-9]) ", "", re.sub(r"(?<!\.)\.$", "", answer.strip())
    )  # "1 1/2" is not 11/2


def number(answer: str) -> Fraction | None:
    """The value of a plain integer or decimal, thousands separators allowed; None for anything else."""
    plain = answer.replace(",", "") if re.fullmatch(GROUPED, answer, re.A) else answer
    return (
        Fraction(plain)
        if len(plain) <= MAX_CHARS and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)", plain, re.A)
        else None
    )


def quick_verdict(gold: str, pred: str | None) -> bool | None:
    """A verdict that needs no algebra: no answer, the same string, or two plain numbers; None when unsure."""
    if not pred or not pred.strip():
        return False
    if max(len(gold), len(pred)) > MAX_CHARS:
        return gold.split() == pred.split()
    a, b = number(gold.strip()), number(pred.strip())
    if a is None or b is None:
        left, right = clean(gold), clean(pred)
        if not left or not right or left == right:
            return bool(left and right)
        a, b = number(left), number(right)
    return (
        None if a is None or b is None or ("," in gold and "," in pred) else a == b
    )  # 100,200 may be two numbers


# ---------------------------------------------------------------------------------------- structure

RELATION = r"\\(?:le|ge|ne|approx|in)(?![a-zA-Z])|[=<>]"
FLIP = {">": "<", r"\ge": r"\le"}
SCALE = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
UNITS = {alias: names.split()[0] for names in (
    "mm millimeter millimetre|cm centimeter centimetre|m meter metre|km kilometer kilometre|in inch|ft foot feet|yd yard|mi mile|mg milligram|g gram|"
    "kg kilogram|oz ounce|lb pound|ml milliliter|l liter litre|s sec second|min minute|h hr hour|day|week|month|yr year|cent|dollar|euro|am|pm|"
    "mph|kph|rad radian").split("|") for alias in names.split()}  # fmt: skip


def split(answer: str, marks: str) -> tuple[list[str], list[str]]:
    """The members between those matches of `marks` that lie outside all brackets, and these matches."""
    members, found, depth, start = [], [], 0, 0
    for m in re.finditer(rf"\\begin|\\end|\\?[{{}}]|[()\[\]]|{marks}", answer):
        if m[0] in ("(", "[", "{", r"\{", r"\begin"):
            depth += 1
        elif m[0] in (")", "]", "}", r"\}", r"\end"):
            depth -= 1
        elif depth == 0:
            members.append(answer[start : m.start()].strip())
            found.append(m[0])
            start = m.end()
    return [*members, answer[start:].strip()], found


def parts(answer: str) -> tuple[str, list[str]]:
    """Kind and elements: "" list, "{}" set, "()" "[)" ... tuple or interval, "cup" union, "matrix", "=" relation, "one" atom."""
    if m := re.fullmatch(r"\\text\{([^{}]*,[^{}]*)\}", answer):
        answer = m[1]
    listed = split(answer, "[,;]")[0]
    if len(listed) > 1:
        return "", [e for e in listed if e]
    depths = [0]
    for m in re.finditer(r"\\?[{}]|[()\[\]]", answer):
        depths.append(depths[-1] + (1 if m[0][-1] in "([{" else -1))
    bracket = (
        re.fullmatch(r"(\(|\[|\\\{)(.*)(\)|\]|\\\})", answer) if 0 not in depths[1:-1] else None
    )
    elements = split(bracket[2], "[,;]")[0] if bracket else []
    if bracket and bracket[1] == r"\{":
        return "{}", elements
    if re.search(r"\\(?:pm|mp)(?![a-z])", answer):
        return "", [
            answer.replace(r"\pm", plus).replace(r"\mp", minus) for plus, minus in ("+-", "-+")
        ]
    if bracket:
        return (bracket[1] + bracket[3], elements) if len(elements) > 1 else parts(bracket[2])
    if split(answer, RELATION)[1]:
        return "=", [answer]
    if len(union := split(answer, r"\\cup")[0]) > 1:
        return "cup", union
    if m := re.fullmatch(
        r"\\begin\{([pbB]?matrix|array)\}(?:\{[lcr|]*\})?(.*?)(?:\\\\)?\\end\{\1\}", answer
    ):
        return "matrix", [f"({row.replace('&', ',')})" for row in m[2].split(r"\\")]
    return "one", [answer]


def same(a: str, b: str) -> bool:
    """Equality of two cleaned answers, by structure. A list without brackets stands for a set, or for a tuple in that order."""
    if a == b:
        return bool(a)
    (kind_a, left), (kind_b, right) = parts(a), parts(b)
    kinds = {kind_a, kind_b}
    if not left or not right:
        return False
    for one, other, kind in ((a, b, kind_b), (b, a, kind_a)):
        if kind == "one" and re.fullmatch(GROUPED, one):
            return same(one.replace(",", ""), other)
    if "=" in kinds or kinds == {"one"}:
        try:
            if "=" not in kinds:
                return same_atom(left[0], right[0])
            return same_relation(left[0] if kind_a == "=" else a, right[0] if kind_b == "=" else b)
        except Exception:  # what cannot be read is unequal
            return False
    either = any(
        kind == "" and all(parts(e)[0] == "=" for e in side)
        for kind, side in ((kind_a, left), (kind_b, right))
    )  # x<1 or x>2
    if kinds <= {"", "{}", "one"} or kinds <= ({"cup", ""} if either else {"cup"}):
        left, right = (
            [x for e in side for x in (parts(e)[1] if parts(e)[0] == "" else [e])]
            for side in (left, right)
        )  # ± opens
        if kinds == {"{}"}:
            return all(any(same(x, y) for y in right) for x in left) and all(
                any(same(x, y) for x in left) for y in right
            )
        while (
            left
            and len(left) == len(right)
            and (y := next((y for y in right if same(left[0], y)), None)) is not None
        ):
            left.pop(0)
            right.remove(y)
        return not left and not right
    ordered = kind_a == kind_b or ("" in kinds and "matrix" not in kinds)
    return ordered and len(left) == len(right) and all(same(x, y) for x, y in zip(left, right))


def named(side: str) -> bool:
    """x, f(x), AB, x_1, (x,y), x+y, nothing: what may stand before "= 5" in an answer that is 5."""
    bare = re.sub(r"_(\w|\{\w+\})|\([^()]*\)", "", side)
    return not side or (
        bool(re.search("[a-zA-Z]", side)) and not re.search(r"\d|\^|\\pi|\\infty|\\sqrt", bare)
    )


def relation(answer: str) -> tuple[list[str], list[str]]:
    """Members and marks, turned so that all inequalities rise."""
    members, marks = split(answer, RELATION)
    return (
        (members[::-1], [FLIP[mark] for mark in marks[::-1]])
        if marks and set(marks) <= set(FLIP)
        else (members, marks)
    )


def value(answer: str) -> tuple[str, str | None]:
    """(name, value) of an answer with relations: x=1/2=0.5, a<x<=b (an interval), x in S. Value None: it stands for itself only."""
    members, marks = relation(answer)
    if r"\approx" in marks:
        keep = marks.index(r"\approx") + (
            members[0] == "" or (named(members[0]) and marks[0] == r"\approx")
        )
        members, marks = (
            members[: keep + 1],
            ["=" if mark == r"\approx" else mark for mark in marks[:keep]],
        )
    if not marks:
        return "", members[0]
    if marks == [r"\in"]:
        return members[0], members[1]
    if set(marks) == {"="}:
        first = next((i for i in (0, -1) if named(members[i])), None)
        name = members.pop(first) if first is not None else ""
        return name, members[-1] if all(
            same(m, members[-1]) for m in members[:-1]
        ) else None  # 6=5 is not 5
    if set(marks) <= set(FLIP.values()):
        opening, closing = "(["[marks[0] == r"\le"], ")]"[marks[-1] == r"\le"]
        if len(members) == 3 and named(members[1]):
            return members[1], f"{opening}{members[0]},{members[2]}{closing}"
        if len(members) == 2 and named(members[0]):
            return members[0], rf"(-\infty,{members[1]}{closing}"
        if len(members) == 2 and named(members[1]):
            return members[1], rf"{opening}{members[0]},\infty)"
    return "", None


def same_relation(a: str, b: str) -> bool:
    """Two relations, or one and what it stands for: x=5 is 5; y=2x+3 is 2x-y+3=0; x>3 is (3,\\infty)."""
    (name_a, x), (name_b, y) = value(a), value(b)
    if x is not None and y is not None and (name_a == name_b or not name_a or not name_b):
        return same(x, y)
    (left, marks_a), (right, marks_b) = relation(a), relation(b)
    if marks_a != marks_b or not set(marks_a) <= {"=", r"\ne", "<", r"\le"}:
        return False
    links = zip(left, left[1:], right, right[1:], marks_a)
    return all(
        proportional(f"({q})-({p})", f"({s})-({r})", mark in ("<", r"\le"))
        for p, q, r, s, mark in links
    )


# ---------------------------------------------------------------------------------------- atoms: units, words, algebra


def unit(answer: str) -> tuple[str, tuple[str, int] | None]:
    """The answer without its unit, and the unit if it is a known one; others ("apples") say nothing. 5 million is 5000000."""
    m = re.fullmatch(r"(.*[^\s+\-*/^_(=])( ?)\\text\{([^{}]*)\}(?:\^\{?(\d)\}?)?", answer)
    m = m or re.fullmatch(r"(.*[\d})])( ?)([a-zA-Z][a-zA-Z. ]*)(?:\^\{?(\d)\}?)?", answer)
    words = re.findall("[a-z]+", m[3].lower().replace(".", "")) if m else []
    if (
        not m
        or not 0 < len(words) <= 4
        or set(words)
        & {"is", "are", "not", "plus", "minus", "times", "over", "squared", "factorial", "half"}
    ):
        return answer, None
    known = [
        UNITS.get(w) or UNITS.get(w.removesuffix("s")) or UNITS.get(w.removesuffix("es"))
        for w in words
    ]
    if "\\text" not in answer and any(
        len(w) < 2 + (not k) or not (k or m[2] or m[1][-1] in "})") for w, k in zip(words, known)
    ):
        return answer, None  # 5x, 2ab and 5 xy are products
    power = int(m[4] or 0) or next(
        (p for w, p in {"square": 2, "sq": 2, "cubic": 3, "cu": 3}.items() if w in words), 1
    )
    bare = rf"({m[1]})\cdot10^{{{SCALE[words[0]]}}}" if words[0] in SCALE else m[1]
    return bare, next(((k, power) for k in known if k), None)


def word(answer: str) -> bool:
    """Whether it is to be read as text and not as a product of letters. One letter is a variable, where A is not a, unless set as text."""
    run = r"(?i:no)|[A-Z][a-z]+|(?=.*[a-zA-Z]{3})[a-zA-Z]+(?:[ .'-]+\w+)*"
    return "\\text" in answer or bool(re.fullmatch(run, answer))


def same_atom(a: str, b: str) -> bool:
    """Two answers without structure: units, clock times and ratios, percent and degrees, words, number bases, algebra."""
    (a, unit_a), (b, unit_b) = unit(a), unit(b)
    if unit_a and unit_b and unit_a != unit_b:
        return False
    if a == b:
        return True
    left, right = split(a, ":")[0], split(b, ":")[0]
    if len(left) > 1 or len(right) > 1:
        if unit_a or unit_b:  # 8:34 pm
            return False
        if len(left) == len(right):  # 1:2 is 2:4
            return all(
                same(rf"({p})\cdot({right[0]})", rf"({q})\cdot({left[0]})")
                for p, q in zip(left, right)
            )
        return {len(left), len(right)} == {1, 2} and same(
            *(rf"\frac{{{x[0]}}}{{{x[1]}}}" if x[1:] else x[0] for x in (left, right))
        )
    for sign, factor in {"%": r"\frac{1}{100}", "degree": r"\frac{\pi}{180}"}.items():
        marked_a, marked_b = (
            re.fullmatch(rf"((?:[^\\]|\\(?:frac|sqrt|pi|cdot|times))*)\\{sign}", x) for x in (a, b)
        )
        if marked_a and marked_b:
            return same(marked_a[1], marked_b[1])
        if m := marked_a or marked_b:
            other = b if marked_a else a
            # beside a number without it the sign may be a mere unit; but a probability of 0.5 is not 0.5%
            return same(rf"({m[1]})\cdot{factor}", other) or (
                (sign == "degree" or abs(expression(m[1])) >= 1) and same(m[1], other)
            )
    if word(a) or word(b):
        bare_a, bare_b = (
            re.findall(r"^-|\w+|[+*/^=<>\\]", s.replace("\\text", "").lower()) for s in (a, b)
        )
        return bare_a == bare_b != []
    digits_a, digits_b = (
        re.fullmatch(r"([0-9A-F]*\d[0-9A-F]*)(?:_\{?(\d+)\}?)?", s) for s in (a, b)
    )
    if (
        digits_a and digits_b and (digits_a[2] or digits_b[2])
    ):  # the base may be left out, as the problem names it
        return digits_a[1] == digits_b[1] and not (
            digits_a[2] and digits_b[2] and digits_a[2] != digits_b[2]
        )
    return equal(expression(a), expression(b))


BRACED = r"(\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})"
READABLE: list[tuple[re.Pattern[str], Any]] = [(re.compile(old), new) for old, new in [
    (r"(?<![\w.])(\d+) ?(?:\\frac\{(\d+)\}\{(\d+)\}|\\frac(\d)(\d)|(?<= )(\d+)/(\d+))(?![\d!^])",
     lambda m: "({}+\\frac{{{}}}{{{}}})".format(m[1], *[g for g in m.groups()[1:] if g])),  # 1 1/2
    (r"(?<=\d)[eE]([+-]?\d{1,4})(?!\w)", r"\\cdot10^{\1}"),
    (r"(\d+(?:\.\d+)?)\\degree", r"(\\frac{\1\\pi}{180})"), (r"\\%", r"\\cdot\\frac{1}{100}"),
    (r"(\d*)\.(\d*)\\overline\{(\d+)\}", lambda m: f"({int(m[1] + m[2] + m[3]) - int(m[1] + m[2] or 0)}/{'9' * len(m[3])}{'0' * len(m[2])})"),
    (r"(\d*)\.(\d+)", lambda m: f"(\\frac{{{m[1]}{m[2]}}}{{1{'0' * len(m[2])}}})"),  # decimals are exact
    (r"_(\w)", r"_{\1}"), (r"\*\*", "^"), (r"\*", r"\\cdot "), (r"\^\(([^()]*)\)", r"^{\1}"), (r"\\sqrt\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\{([^{}]*)\\choose([^{}]*)\}", r"\\binom{\1}{\2}"),
    (r"\\(sqrt|frac|binom) ?(\w|\\[a-zA-Z]+)", r"\\\1{\2}"), (rf"(\\(?:frac|binom){BRACED}) ?(\w|\\[a-zA-Z]+)", r"\1{\3}"),
]]  # fmt: skip


@lru_cache(4096)  # a problem's reference is read once for all its samples
def expression(answer: str) -> Any:
    """The exact sympy expression of an atom; an exception when it cannot be read."""
    from latex2sympy2_extended import latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from sympy import Expr, I, Rational, Symbol

    for old, new in READABLE:
        answer = old.sub(new, answer)
    if re.search(r"^$|\d \d|\.\.|!!|\\\\|\\text|['\"]", answer) or any(
        answer.count(x) != answer.count(y) for x, y in ("()", "{}", "[]")
    ):
        raise ValueError("unreadable")
    if m := re.fullmatch(
        r"\(?(-?)\(?(?:\\frac\{(-?\d+)\}\{(\d+)\}|(\d+)(?:/(\d+))?)\)*", answer, re.A
    ):  # the parser takes milliseconds
        return Rational(int(m[1] + "1") * int(m[2] or m[4]), int(m[3] or m[5] or 1))
    # "0+": an expression that is all in brackets might be a tuple or an interval, and the grammar takes 50 times longer to see that it isn't
    value = latex2sympy(
        "0+" + answer,
        is_real=True,
        normalization_config=None,
        conversion_config=ConversionConfig(lowercase_symbols=False),
    )
    if not isinstance(value, Expr):
        raise ValueError("not an expression")
    return value.subs(Symbol("i", real=True), I).doit()


def equal(x: Any, y: Any) -> bool:
    """Whether two expressions are the same: refuted by numbers where possible, accepted only when algebra shows it."""
    from sympy import Rational, nan, oo, simplify, zoo

    if x == y:
        return x not in (nan, zoo)
    if (x.is_Rational and y.is_Rational) or x.has(oo, zoo, nan) or y.has(oo, zoo, nan):
        return False
    for k in (0, 1):
        point = {
            s: Rational(17 + 10 * k + 6 * i, 13)
            for i, s in enumerate(sorted((x - y).free_symbols, key=str))
        }
        u, v = x.subs(point).evalf(40), y.subs(point).evalf(40)
        if u.is_number and v.is_number and abs(u - v) > 1e-30 * max(abs(u), abs(v)) + 1e-90:
            return False
    return (x - y).expand() == 0 or simplify(x - y) == 0 or (x - y).equals(0) is True


def proportional(a: str, b: str, positive: bool) -> bool:
    """Whether a = 0 and b = 0 (or > 0, if positive) are the same up to a constant factor."""
    from sympy import simplify

    x, y = expression(a), expression(b)
    if equal(x, y):
        return True
    ratio = simplify(x / y)
    return bool(
        not ratio.free_symbols
        and ratio.is_finite
        and ratio.is_nonzero
        and (ratio > 0 if positive else True)
    )


def symbolic_verdict(gold: str, pred: str) -> bool:
    """The verdict by structure and algebra; what cannot be read is unequal, as equal strings were decided before."""
    return bool(same(clean(gold), clean(pred)))  # sympy has truth values of its own


# ---------------------------------------------------------------------------------------- workers


class _Worker:
    """One subprocess that judges one pair at a time and is killed when it takes too long."""

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self.process: Any = None

    def _start(self) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        command = [sys.executable, os.path.abspath(__file__), str(self.timeout_s), str(os.getpid())]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env,
        )
        if self._read(START_S) != "ready":
            self.close()
            raise RuntimeError(
                "the verifier's worker did not start; does `python -c 'import math_verify'` work?"
            )

    def _read(self, timeout_s: float) -> str | None:
        """One line of the worker; "" when it died, None when time is up."""
        data, deadline, poll = (
            b"",
            time.monotonic() + timeout_s,
            select.poll(),
        )  # select() fails on descriptors from 1024 on
        poll.register(self.process.stdout, select.POLLIN)
        while not data.endswith(b"\n"):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return None
            chunk = os.read(self.process.stdout.fileno(), 4096)
            if not chunk:
                return ""
            data += chunk
        return data.decode().strip()

    def judge(self, gold: str, pred: str) -> bool | None:
        """The worker's verdict; None when time is up."""
        for _ in range(
            2
        ):  # a worker that died may have died idle (out of memory, killed): one more try with a new one
            reply: str | None = ""
            try:
                if self.process is None:
                    self._start()
                self.process.stdin.write((json.dumps([gold, pred]) + "\n").encode())
                self.process.stdin.flush()
                reply = self._read(self.timeout_s)
            except BrokenPipeError:
                pass
            finally:  # on Ctrl-C too: a late reply must not become the next answer's verdict
                if not reply:
                    self.close()
            if reply is None:
                return None
            if reply:
                return reply == "true"
        return False

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()  # waits, and closes the pipes
            self.process = None


class Verifier:
    """Judges answers within a wall-clock limit each; a context manager, safe to call from any thread.

    timeout_s: seconds per answer; an answer that takes longer, or kills its worker, is wrong. `timeouts` counts the former.
    workers: how many subprocesses; they start when first needed and end with close() or with this process.
    """

    def __init__(self, timeout_s: float = 5.0, workers: int = 1):
        if timeout_s <= 0 or workers < 1:
            raise ValueError(
                f"Verifier needs timeout_s > 0 and workers >= 1, got {timeout_s} and {workers}"
            )
        self.timeouts = 0
        self._lock = threading.Lock()
        self._idle: queue.Queue[_Worker] = queue.Queue()
        self._workers = [_Worker(timeout_s) for _ in range(workers)]
        for worker in self._workers:
            self._idle.put(worker)

    def verify(self, gold: str, pred: str | None) -> bool:
        """True when `pred` equals `gold`. None, empty, unreadable or too slow: False."""
        return self.verify_many([(gold, pred)])[0]

    def verify_many(self, pairs: Iterable[tuple[str, str | None]]) -> list[bool]:
        """`verify` for each (gold, pred), spread over the workers, in order."""
        pairs = list(pairs)
        verdicts = [quick_verdict(*pair) for pair in pairs]
        hard = [i for i, verdict in enumerate(verdicts) if verdict is None]
        with ThreadPoolExecutor(len(self._workers)) if len(hard) > 1 else nullcontext() as pool:
            judged = iter((pool.map if pool else map)(self._judge, [pairs[i] for i in hard]))
            return [next(judged) if verdict is None else verdict for verdict in verdicts]

    def _judge(self, pair: tuple[str, str | None]) -> bool:
        worker = self._idle.get()
        try:
            verdict = worker.judge(pair[0], pair[1] or "")
        finally:
            self._idle.put(worker)
        with self._lock:
            self.timeouts += verdict is None
        return bool(verdict)

    def outcome(self, gold: str, text: str) -> int:
        """r of a completion (§2): +1 if its extracted answer is right, else -1."""
        return 1 if self.verify(gold, extract_answer(text)) else -1

    def close(self) -> None:
        """Ends the workers, each after the answer it is at. A later verdict starts them again."""
        taken = [self._idle.get() for _ in self._workers]
        for worker in taken:
            worker.close()
            self._idle.put(worker)

    def __enter__(self) -> "Verifier":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end_with(parent: int) -> None:
    """Ends this process once its parent is gone, even if something that the parent forked holds the pipe open."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> None:
    """The worker: dies with its parent, on its own clock (SIGALRM), or at its memory limit."""
    import resource
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    timeout_s, parent = float(sys.argv[1]), int(sys.argv[2])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    replies, sys.stdout = sys.stdout, sys.stderr  # nothing else may write there
    symbolic_verdict("1/2", "2/4")  # imports sympy and builds the grammar
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, timeout_s + 1)
        try:
            verdict = symbolic_verdict(*json.loads(line))
        except Exception:  # whatever a hostile expression raises is a wrong answer
            verdict = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(verdict), file=replies, flush=True)


if __name__ == "__main__":
    main()
