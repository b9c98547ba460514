"""The verdict: a completion's answer, and whether it is right (D5). No torch.

A `Judge` decides for a domain. `Verifier`, of mathematics, is the default; another one is a
subclass in a file of one's own, which --verifier names (docs/changing.md).

`Verifier` compares an answer with the reference. Equal strings and integers are decided at once,
the rest by math-verify in workers that end when an answer takes too long. Four tables stand around
it, each row with an example: SPELLING is what it misreads, SAME and MARKS what it accepts and must
not, UNITS the names of a unit. An answer that is copied from the problem is none.
"""

import importlib
import json
import os
import queue
import re
import resource
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import lru_cache
from select import select
from subprocess import DEVNULL, PIPE, Popen
from typing import Any, NamedTuple, Protocol

MAX_CHARS, MEMORY_BYTES = 1000, 1 << 30  # of an answer that is parsed, of a worker's address space


def extract_answer(text: str) -> str | None:
    r"""The inside of the last `\boxed{}` after the last `</think>`; None if none, or never closed.

    A thinking block that is still open at the end holds no answer. Nested braces are followed. A
    box without braces counts where a dollar sign ends it: `$\boxed 5$`.
    """
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    text = re.sub(r"\\boxed\s+([^\s{}$\\]+)\s*\$", r"\\boxed{\1}", text)
    *before, last = re.split(r"\\boxed\s*\{", text)
    depth = 1
    for match in re.finditer(r"\\.|[{}]", last if before else "", re.S):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return last[: match.start()].strip()
    return None


# -------------------------------------------------------------------------- a verdict of any domain


class Asked(Protocol):
    """What a verdict may see of a problem; a `problems.Problem` has it."""

    @property
    def problem(self) -> str: ...

    @property
    def answer(self) -> str: ...

    @property
    def extra(self) -> Mapping[str, Any]: ...


class Verdict(NamedTuple):
    """What a completion answers, None where it gives no answer; and whether that is right."""

    answer: str | None
    right: bool


class Judge(AbstractContextManager):
    """Decides for (problem, completion) whether it is right: the one seam for another domain.

    A subclass has `is_right`, or `judge` where it judges whole batches. The other methods are here
    to be replaced, too. An exception ends the run: what cannot be read is a wrong answer, False.

    timeout_s: the seconds that an answer may take. workers: the processes that may be used. Both
    are for a subclass to keep to; `timeouts` counts the answers that took longer.
    """

    timeouts = 0

    def __init__(self, timeout_s: float = 5.0, workers: int = 1):
        if not 0 < timeout_s <= 1e6 or workers < 1:
            raise ValueError(f"need timeout_s in 0..1e6 and workers >= 1: {timeout_s}, {workers}")
        self.timeout_s, self.workers = timeout_s, workers

    def answer(self, text: str) -> str | None:
        """The answer in a completion, or None. Thinking that the prompt began is given its tag."""
        return extract_answer(text)

    def is_right(self, problem: Asked, answer: str) -> bool:
        """Whether an answer to a problem is right."""
        raise NotImplementedError

    def same(self, one: str, other: str) -> bool:
        """Whether two answers to one problem are the same one, so that maj@k counts them together.

        eval.py does not ask where one of them is right and the other is not.
        """
        return one == other

    def judge(self, cases: Sequence[tuple[Asked, str]]) -> list[Verdict]:
        """The verdict of each (problem, completion), in order. No answer is a wrong one."""
        verdicts = []
        for problem, text in cases:
            answer = self.answer(text)
            verdicts.append(Verdict(answer, answer is not None and self.is_right(problem, answer)))
        return verdicts

    def close(self) -> None:
        """Give back what the judge holds. It may be asked again afterwards."""

    def __exit__(self, *_: object) -> None:
        self.close()


def load_judge(name: str) -> type[Judge]:
    """The class MODULE:CLASS, from an installed module or a file in the current directory."""
    module_name, _, class_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as e:  # of any kind: it runs the module
        raise ValueError(f"--verifier {name}: not imported ({e})") from None
    kind = getattr(module, class_name, None)
    if not isinstance(kind, type) or not issubclass(kind, Judge):
        raise ValueError(f"--verifier {name}: must be a subclass of verify.Judge")
    return kind


def is_success(r: float) -> bool:
    """Whether an outcome r in {-1, +1} is a success (§2)."""
    return r > 0


# ------------------------------------------------------------------ answers copied from the problem

TOKEN = re.compile(
    r"\\[a-zA-Z]+|\\.|\d+(?:(?:,|\{,\}|,?\\[,!])\d{3})*(?:\.\d+)?|[a-zA-Z]+|\S", re.S
)
NO_MEANING = re.compile(  # tokens of layout
    r"[{}$.]|\\(?:[][()$!,:; \n]|left|right|[bB]igg?[lr]?|displaystyle|q?quad|text[a-z]*"
    r"|mbox|mathrm|mathbf)"
)
NO_EXPRESSION = re.compile(  # a number with its unit, an option's letter, words
    r"(?:[-+] )?\d\S*(?: (?:[a-zA-Z]+|\\?%|\^|\\circ|°))*|\( \w+ \)|\w+(?: \w+)*"
)


@lru_cache(4096)
def tokens(text: str) -> str:
    r"""The tokens of a LaTeX text with one blank between, without those of layout."""
    kept = [token for token in TOKEN.findall(text) if not NO_MEANING.fullmatch(token)]
    joined = re.sub(r"\\[dt]frac(?= )", r"\\frac", " ".join(kept))
    return re.sub(r"\\frac (\d)(\d)(?= |$)", r"\\frac \1 \2", joined)


def uncopied(gold: str, pred: str | None, problem: str) -> str | None:
    """An answer; None if it is an expression that stands in the problem, and not the reference.

    Else a policy lives on boxing the problem's longest formula, which often equals the reference.
    """
    if not pred or not problem or len(pred) > MAX_CHARS:
        return pred
    name_or_unit = r"^\S+ = |(?: [a-zA-Z]{3,})+$"
    answer, reference = (re.sub(name_or_unit, "", tokens(text)) for text in (pred, gold))
    inside = re.sub(r"^\( (.*) \)$", r"\1", answer)
    stands_there = f" {inside} " in f" {tokens(problem)} "
    if NO_EXPRESSION.fullmatch(answer) or answer == reference or not stands_there:
        return pred
    return None


# ------------------------------------------------------------------------------------- four tables


class Rule(NamedTuple):
    """A pattern and what stands in its place; an example of it, which a test runs."""

    pattern: str
    replacement: str
    before: str
    after: str


class Guard(NamedTuple):
    """A pattern that finds different things in a reference and an answer that is wrong."""

    pattern: str
    reference: str
    answer: str


GROUP = r"[^{}]*"  # what stands between two braces, up to four deep
for _ in range(3):
    GROUP = rf"[^{{}}]*(?:\{{{GROUP}\}}[^{{}}]*)*"
FONT = r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|boldsymbol|mbox)\s*"
TEXT = rf"{FONT}\{{([^{{}}]*)\}}"
SIGNS: dict[str, Any] = {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "π": r"\pi "}
SIGNS |= {"∞": r"\infty ", "°": r"^\circ ", "±": r"\pm ", "⁻": "^-", "∪": r"\cup ", "θ": r"\theta "}
SIGNS |= {sign: f"^{digit}" for digit, sign in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
SPELLING = [  # what models write and math-verify misreads or refuses, and how it reads it; in order
    Rule(r"\^(-|\d)\^(\d)", r"^{\1\2}", "x^1^0", "x^{10}"),  # was x¹⁰
    Rule(r"√\s*(?:[({]([^(){}]+)[)}]|(\d+|[a-z]))", r"\\sqrt{\1\2}", "√13", r"\sqrt{13}"),
    Rule("√", r"\\sqrt ", r"√\frac12", r"\sqrt \frac12"),
    Rule(r"\s+(?=\{)", "", r"\frac {1} {2}", r"\frac{1}{2}"),
    # No units: 5\mathrm{i} is not 5.
    Rule(r"\\(?:mathrm|text)\s*\{([ie])\}", r"\1 ", r"5\mathrm{i}", "5i "),
    Rule(rf"{FONT}(?=\{{\s*[-\d({{\\](?!%))", "", r"\mathbf{\frac{3}{7}}", r"{\frac{3}{7}}"),
    Rule(r"(?<=\d)\s*(\{,\}|,?\\[,!])\s*(?=\d{3})", "", r"1{,}234,\! 567", "1234567"),
    Rule(r"\\!", "", r"8\!:\!34", "8:34"),
    Rule(r"\\(left|right)\b\.?", "", r"\left(1,2\right)", "(1,2)"),
    Rule(r"\\([bB]igg?[lr]?|displaystyle|boxed|fbox)\b", "", r"\bigl(1,2\bigr)", "(1,2)"),
    Rule(r"(?<=\\\\)\[[\d.]+ *[a-z]+\]", "", r"1\\[4pt]2", r"1\\2"),
    Rule(r"(?<!\\)\\[][()]", "", r"\(7\)", "7"),
    Rule(r"(?<!\\)\\(q?quad\b|[;:>, ])|~|\{\}", " ", r"12\,\text{cm}", r"12 \text{cm}"),
    Rule(r"^\\\$(.+?)[\s.]*$", r"\1 \\text{dollars}", r"\$5.", r"5 \text{dollars}"),
    Rule(r"^(\\?\$|=|\\approx|\*\*|\s)+", "", "= $5", "5"),
    Rule(r"([\s.]|\*\*|\\?\$|\^?\\degree)+$|\\?\$", "", r"90\degree.", "90"),
    Rule(rf"^\{{(?!.*\\choose)({GROUP})\}}$", r"\1", r"{\frac{1}{2}}", r"\frac{1}{2}"),
    Rule(rf"^\s*{TEXT}[\s.]*$", r"\1", r"\text{even}", "even"),  # a whole answer set as text
    Rule(r"(?i)^(\\text\w*\{\s*)?answer:\s*\}?", "", r"\text{Answer: }5", "5"),
    Rule(r"(?<![\w}^_\]])\{(\d+)\}", r"\1", "{22}_{6}", "22_{6}"),
    Rule(r"\((\d+)\)(?=_)", r"\1", "(22)_6", "22_6"),
    Rule(r"\\[dt]frac", r"\\frac", r"\dfrac{1}{2}", r"\frac{1}{2}"),
    Rule(r"\\frac *(\d) *(\d)", r"\\frac{\1}{\2}", r"\frac 12", r"\frac{1}{2}"),
    Rule(r"\\frac *(\d)(?=\{)", r"\\frac{\1}", r"\frac1{512}", r"\frac{1}{512}"),
    Rule(r"(\\text\s*\{)?\s*percent\s*\}?$", r"\\%", "50 percent", r"50\%"),
    Rule(r",?\s*(\\text\s*\{,?\s*)?\b(and|or)\b\s*\}?", ", ", r"2, \text{ and } 4", "2,  4"),
    Rule(
        r"^([1-9]\d*)\s*(\\text\s*\{\s*)?\bto\b\s*\}?\s*(\d+)$", r"\1:\3", r"1\text{ to }4", "1:4"
    ),
    Rule(r"(?<![\w.^)}])(\d+) +(\d+)/(\d+)", r"\1\\frac{\2}{\3}", "1 1/2", r"1\frac{1}{2}"),
    Rule(r"(?<!\\)\b([a-zA-Z]) +(?=[a-zA-Z]\b)", r"\1", "s e a t", "seat"),
    # To math-verify 2 3, 2(3), (2)3, 2[3] and {2}{3} are 2+3, as 2\frac{1}{2} is.
    Rule(r"(?<!_)(\d)\s+(?=\d)", r"\1 ? ", "2 3", "2 ? 3"),  # nobody can read it
    Rule(r"(?<![\d_^])(\d+|\))\s*(?=[(\[{]+\s*(\d|\\frac))", r"\1\\cdot ", "2(3)", r"2\cdot (3)"),
    Rule(r"\)\s*(?=\d)", r")\\cdot ", "(2)3", r"(2)\cdot 3"),
    Rule(r"\\varnothing\b|\\\{\s*\\\}", r"\\emptyset ", r"\{\}", r"\emptyset "),
    Rule(r"\\neq(?![a-z])|!=", r"\\ne ", r"x\neq 5", r"x\ne  5"),
    Rule(r"^([^=,]*)=([a-zA-Z])$", r"\2=\1", "5=x", "x=5"),
    Rule(r"(?<![a-zA-Z\\_])(?<!_\{)i(?![a-zA-Z])", "{I}", "6-5i^2", "6-5{I}^2"),  # imaginary
]
START, END = r"(?<![a-z\\])", "(?![a-z])"  # of a word in a guard
SAME = [  # what stands in the answer stands in the reference, too, and the other way round
    Guard(rf"{START}(?:hundred|thousand|[a-z]*illion|dozen)(?:ths?|s)?{END}", "5", "5 million"),
    Guard(rf"{START}(?:(?:thir|four|fif|six|seven|eigh|nin|ten)(?:th|d)s?){END}", "5", "5 ninths"),
    Guard(rf"{START}(?:half|halves|squared|cubed|factorial){END}", "5", "5 halves"),
    Guard(rf"{START}(?:is|are|not|wrong|false|plus|minus|times|over){END}", "5", "minus 5"),
    Guard(rf"{START}(?:[ap]\.?m){END}", "8:34 p.m", "8:34 a.m"),
    Guard(r"\b\d\d?:[0-5]\d\b", "9:24", "3:8"),  # a time is no ratio
    # A problem is not its own answer.
    Guard(rf"\\(?:sum|prod|i*int|oint|lim|partial|operatorname){END}", "45", r"\sum_{k=1}^{9} k"),
    Guard(rf"\\(?:max|min|sup|inf|gcd|lcm|det|[bp]?mod){END}|vmatrix", "5", r"\max(2,5)"),
    Guard(rf"{START}d[r-z]{END}", "5", r"\frac{d}{dz}5z"),
    Guard(r"\\ne |\\not", "5", r"x\ne 5"),
    Guard(r"=[^,;]*=|\\approx.*\\approx", "5", "1=2=3=4=5"),  # many guesses
]
MARKS = [  # two answers that have such a mark have the same one; to math-verify
    # A number is another base's.
    Guard(r"_\{?\s*(\w+)\s*\}?$", "52_8", "52_{9}"),
    # A tuple is a set, and a list of tuples a list of sets.
    Guard(r"^(?:(?:\\\{|[(\[]) ?(?=(?:\\\{|[(\[])[^][(){}]*,))?([(\[]|\\\{)", "(1,2)", r"\{1,2\}"),
]
UNIT = Rule(
    rf"(?<=[\w)}}])(\s*({FONT}\{{[^{{}}\d]*\}}|[ckm]m|kg|ft)"
    r"|\s+(in|yd|lbs?|hrs?|[a-zA-Z]{3}[a-zA-Z. ]*))(\^\{?\d\}?)?$",
    "",
    r"5\text{ cm}^2",
    "5",
)
UNITS = [  # the names of one unit
    Rule(r"\b(?:foot|feet)\b", "ft", "square feet", "square ft"),
    Rule(r"\binch(?:es)?\b", "in", "inches", "in"),
    Rule(r"\byards?\b", "yd", "yards", "yd"),
    Rule(r"\b(?:pound|lb)s?\b", "lb", "pounds", "lb"),
    Rule(r"\b(?:hour|hr)s?\b", "h", "hours", "h"),
    Rule(r"\b(?:minute|min)s?\b", "min", "minutes", "min"),
    Rule(r"\b(?:second|sec)s?\b", "s", "seconds", "s"),
    Rule(r"\b([cm]|k)(?:enti|illi|ilo)(?=met|gram)", r"\1", "kilometers", "kmeters"),
    Rule(r"\bmiles per h\b", "mph", "miles per h", "mph"),
    Rule(r"(\w*)met(?:er|re)s?\b", r"\1m", "kmeters", "km"),
    Rule(r"\b(k?)grams?\b", r"\1g", "kgrams", "kg"),
    Rule(r"\bsq(?:uare|\.)? (\w+)", r"\1^2", "square cm", "cm^2"),
    Rule(r"\bcubic (\w+)", r"\1^3", "cubic cm", "cm^3"),
    Rule(r"(?<=\w\w)s\b", "", "apples", "apple"),
]
NAME = Rule(  # x, f(3), x_1 or (x,y) may stand before =; 6=5 and 2x=5 are not 5
    r"(?i)(?:^|(?<=[,;(]))\s*"
    r"([a-z\\|][^=<>\d,;^!+*/-]*?|[a-z]\s*[_{(]+[-\d./]+[)}]*|[(\[][a-z, ]+[])])\s*=",
    "",
    "f(3) = 9",
    " 9",
)
SUM = Rule(r"(?i)^[a-z\\][^=<>\d,;^!]*=(?=[^=]*$)", "", "m+n=33", "33")  # for a reference without =
COMMA = re.compile(r",(?![^][(){}]*[])}])")  # not in brackets


# ---------------------------------------------------------------------------------------- a verdict


def quick_verdict(gold: str, pred: str | None) -> bool | None:
    """A verdict that needs no parser: no answer, equal strings, two integers; None when unsure."""
    gold, pred = gold.strip(), (pred or "").strip()
    if not pred or gold == pred or max(len(gold), len(pred)) > MAX_CHARS:
        return bool(pred) and gold == pred
    integers = re.fullmatch(r"[+-]?\d+ [+-]?\d+", f"{gold} {pred}", re.A)
    return int(gold) == int(pred) if integers else None


def math_verdict(gold: str, pred: str) -> bool:
    """math-verify's verdict, unless a guard knows better; the same text is always equal."""
    from math_verify import verify

    gold, pred = respell(gold), respell(pred)
    gold_text, pred_text = plain(gold), plain(pred)
    if gold_text == pred_text:
        return bool(gold_text)
    if re.fullmatch(r"[a-z]{3}[a-z .'-]*|.* [ap]\.?m", gold_text):  # words: red is not der
        return re.sub(r"[ .]", "", gold_text) == re.sub(r"[ .]", "", pred_text)
    if refused(gold, pred):
        return False
    gold, pred = re.sub(UNIT.pattern, "", gold), re.sub(UNIT.pattern, "", pred)
    if "=" not in gold:
        pred = re.sub(SUM.pattern, "", pred)
    gold_names, gold = named(gold)
    pred_names, pred = named(pred)
    if ("=" in gold) != ("=" in pred) or (gold_names and pred_names and gold_names != pred_names):
        return False
    if COMMA.search(gold) and re.fullmatch(r"\(.*\)", pred) and not COMMA.search(pred):
        gold = f"({gold})"  # 1,2 is (1,2), and not (2,1)
    a, b = read(gold), read(pred)
    return alike(a, b) and verify(a, b, timeout_seconds=None)


def respell(answer: str) -> str:
    """An answer as math-verify can read it."""
    answer = answer.translate(str.maketrans(SIGNS))
    for rule in SPELLING:
        answer = re.sub(rule.pattern, rule.replacement, answer)
    return answer


def plain(answer: str) -> str:
    r"""An answer in lower case with single blanks, without \text and a last full stop."""
    return " ".join(re.sub(TEXT, r" \1", answer).casefold().split()).rstrip(".")


def refused(gold: str, pred: str) -> bool:
    """Whether a guard tells an answer from the reference."""
    for guard in SAME:
        if set(re.findall(guard.pattern, gold)) != set(re.findall(guard.pattern, pred)):
            return True
    for guard in MARKS:
        wanted, given = re.findall(guard.pattern, gold), re.findall(guard.pattern, pred)
        if wanted and given and wanted != given:
            return True
    return bool(unit(gold) and unit(pred)) and unit(gold) != unit(pred)


def unit(answer: str) -> str:
    """The unit of an answer under its one name; empty if it has none."""
    last = re.search(UNIT.pattern, answer)
    name = plain(last[0]) if last else ""
    for rule in UNITS:
        name = re.sub(rule.pattern, rule.replacement, name)
    return re.sub(r"[\s{}]", "", name)


def named(answer: str) -> tuple[list[str], str]:
    """The names before =, sorted, and what they name: of several names a tuple, by name."""
    first, *pieces = re.split(NAME.pattern, answer)
    names = [name.strip() for name in pieces[::2]]
    values = [value.strip(" ,;") for value in pieces[1::2]]
    if first.strip() or len(set(names)) < max(2, len(names)):
        return sorted(set(names)), first + ", ".join(values)
    pairs = list(zip(names, values))
    if all(name.isalpha() for name in names):  # Greek names, r and \theta, stand in their own order
        pairs.sort()
    return sorted(names), f"({', '.join(value for _, value in pairs)})"


@lru_cache(4096)  # a problem's reference is read once for all its samples
def read(latex: str) -> Any:
    r"""What math-verify reads. \pm stands for both signs."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    if r"\pm" in latex and "," not in latex and r"\{" not in latex:
        latex = latex.replace(r"\pm", "+") + ", " + latex.replace(r"\pm", "-")
    spelling = NormalizationConfig(units=False, malformed_operators=True, nits=True)
    target = LatexExtractionConfig(boxed_match_priority=0, normalization_config=spelling)
    return parse(
        rf"\boxed{{{latex}}}", [target], "no_fallback", "first_match", parsing_timeout=None
    )[0]


def alike(gold: Any, pred: Any) -> bool:
    """Whether two answers have as many numbers, and the same: to math-verify 1,1,2 is 1,2."""
    left, right = (sorted(numbers(x), key=lambda n: n.evalf().sort_key()) for x in (gold, pred))
    if left and right and len(left) != len(right):
        return False
    for a, b in zip(left, right):  # rationals exactly: to 15 decimals 2^{-98} is 2^{-97}
        tolerance = 0 if a.is_Rational and b.is_Rational else 1e-5
        if not abs(a - b).evalf() <= tolerance * max(abs(a).evalf(), abs(b).evalf()):
            return False
    return True


def numbers(value: Any) -> Iterator[Any]:
    r"""The numbers in an answer; an error if one is not finite, for 2^\infty may be any."""
    import sympy as sp

    if isinstance(value, (sp.FiniteSet, sp.Tuple, sp.Interval)):
        for part in getattr(value, "_unsorted_args", value.args):  # with what a set has twice
            yield from numbers(part)
    elif isinstance(value, sp.Expr) and value not in (sp.oo, -sp.oo):
        done = value.doit()
        if sp.Tuple(value, done).has(sp.oo, -sp.oo, sp.zoo, sp.nan, sp.AccumBounds):
            raise ValueError("not finite")
        if done.is_number and not value.has(sp.UnevaluatedExpr):  # 5% may be 5
            yield done


# ----------------------------------------------------------------------- who judges, and how long


class Verifier(Judge):
    """Judges mathematics within a wall-clock limit each; a context manager, safe from any thread.

    timeout_s: seconds per answer; one that takes longer (`timeouts` counts it) or kills its worker
    is wrong. workers: how many subprocesses; they start when needed and end with close() or us.
    """

    def __init__(self, timeout_s: float = 5.0, workers: int = 1):
        super().__init__(timeout_s, workers)
        self._lock = threading.Lock()
        self._idle: queue.Queue[Any] = queue.Queue()  # None: to be started
        for _ in range(workers):
            self._idle.put(None)

    def verify(self, gold: str, pred: str | None, problem: str = "") -> bool:
        """True when `pred` equals `gold`. None, empty, copied, unreadable or too slow: False."""
        return self.verify_many([(gold, uncopied(gold, pred, problem))])[0]

    def verify_many(self, pairs: Iterable[tuple[str, str | None]]) -> list[bool]:
        """`verify` for each (gold, pred), spread over the workers, in order."""
        # Ctrl-C reaches the main thread only, so that no judging thread leaves a reply behind.
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(self._verify_one, pairs))

    def is_right(self, problem: Asked, answer: str) -> bool:
        return self.verify(problem.answer, answer, problem.problem)

    def same(self, one: str, other: str) -> bool:
        return self.verify(one, other)

    def judge(self, cases: Sequence[tuple[Asked, str]]) -> list[Verdict]:
        """As the base's, spread over the workers; what is copied from the problem is wrong."""
        answers, claims = [], []
        for problem, text in cases:
            answer = self.answer(text)
            answers.append(answer)
            claims.append((problem.answer, uncopied(problem.answer, answer, problem.problem)))
        rights = self.verify_many(claims)
        return [Verdict(answer, right) for answer, right in zip(answers, rights)]

    def _verify_one(self, pair: tuple[str, str | None]) -> bool:
        gold, pred = pair
        if (verdict := quick_verdict(gold, pred)) is not None:
            return verdict
        worker = self._idle.get()
        try:
            for _ in range(2):  # a worker may have been killed: one more try with a new one
                worker = worker or self._start()
                with suppress(BrokenPipeError):
                    print(json.dumps(pair), file=worker.stdin, flush=True)
                if reply := worker.stdout.readline():
                    return reply == "true\n"
                worker.communicate()  # it died: this waits, and closes the pipes
                status, worker = worker.returncode, None
                if status == -signal.SIGALRM:  # time was up
                    with self._lock:
                        self.timeouts += 1
                    break
            return False
        finally:
            self._idle.put(worker)

    def _start(self) -> Any:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        command = [sys.executable, os.path.abspath(__file__), str(self.timeout_s), str(os.getpid())]
        worker: Any = Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=env, text=True)
        if worker.stdout.readline() != "true\n":
            raise ImportError("the verifier did not start; does `import math_verify` work?")
        return worker

    def outcome(self, gold: str, text: str, problem: str = "") -> int:
        """r of a completion (§2): +1 if its extracted answer is right, else -1."""
        return 1 if self.verify(gold, self.answer(text), problem) else -1

    def close(self) -> None:
        """Ends the workers, each after the answer it is at. A later verdict starts them again."""
        for worker in [self._idle.get() for _ in range(self.workers)]:
            if worker:
                worker.kill()
                worker.communicate()
            self._idle.put(None)


def main() -> None:
    """The worker: JSON lines in and out; ends with its parent or by SIGALRM. No memory: "wrong"."""
    timeout_s, parent = float(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it kills, whatever the parser is at
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    replies, sys.stdout = sys.stdout, sys.stderr  # nothing else may write there
    print(json.dumps(math_verdict("1/2", "2/4")), file=replies, flush=True)  # reads the grammar
    while os.getppid() == parent:  # whose fork may hold the pipe open
        if select([sys.stdin], [], [], 0.5)[0]:
            gold, pred = json.loads(input())  # at end of file this raises, and the worker ends
            signal.setitimer(signal.ITIMER_REAL, timeout_s)
            try:
                verdict = math_verdict(gold, pred)
            except Exception:  # whatever a hostile expression raises is a wrong answer
                verdict = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            print(json.dumps(verdict), file=replies, flush=True)


if __name__ == "__main__":
    main()
