"""The verdict: a completion's answer, and whether it equals the reference. Decision D5.

Equal strings and integers are decided at once, the rest by math-verify in worker processes that end
when an answer takes too long. SPELLING is what models write and math-verify misreads, and WORDS and
MARKS are for what it accepts and must not. Run as a program this file is the worker: JSON lines
[gold, pred] in, true or false out; it does not import torch, so that it starts in a second.
"""

import json
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import lru_cache
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

MAX_CHARS = 1000  # a longer answer is compared as a string only
MEMORY_BYTES = 1 << 30  # address space of a worker
START_S = 60.0  # a worker imports sympy first; this is not counted against an answer


def extract_answer(text: str) -> str | None:
    r"""The inside of the last `\boxed{}` after the last `</think>`; None if none, or never closed.

    A thinking block that is still open at the end holds no answer. Nested braces are followed.
    """
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    *before, last = re.split(r"\\boxed\s*\{", text)
    depth = 1
    for match in re.finditer(r"\\.|[{}]", last if before else "", re.S):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return last[: match.start()].strip()
    return None


def quick_verdict(gold: str, pred: str | None) -> bool | None:
    """A verdict that needs no parser: no answer, equal strings, two integers; None when unsure."""
    gold, pred = gold.strip(), (pred or "").strip()
    if not pred or gold == pred or max(len(gold), len(pred)) > MAX_CHARS:
        return bool(pred) and gold == pred
    integers = re.fullmatch(r"[+-]?\d+ [+-]?\d+", f"{gold} {pred}", re.A)
    return int(gold) == int(pred) if integers else None


TEXT = r"\\(?:text(?:bf|it|rm)?|mathrm|mathbf|mbox)\s*\{([^{}]*)\}"
SIGNS: dict[str, Any] = {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "π": r"\pi "}
SIGNS |= {"∞": r"\infty ", "°": r"^\circ ", "√": r"\sqrt ", "±": r"\pm ", "²": "^2"}
SPELLING = [  # what models write and math-verify misreads or refuses, and how it reads it
    (r"(?<=\d)(\{,\}|,?\\[,!])(?=\d{3})", ""),  # thousands: 1{,}234 and 1\,234
    (r"\\(left|right|[bB]igg?[lr]?|displaystyle|f?boxed)\b", ""),
    (r"\\(q?quad\b|[!;:>])|~", " "),
    (rf"^\s*{TEXT}[\s.]*$", r"\1"),  # a whole answer set as text
    (r"^\\\$(.+)", r"\1 \\text{dollars}"),
    (r"\\?\$", ""),  # the other dollar signs are delimiters
    (r"^(=|\\approx|\s)+|[\s.]+$", ""),  # = 5, and 5 with a full stop
    (r"\\[dt]frac", r"\\frac"),
    (r"(\\text\s*\{)?\s*percent\s*\}?$", r"\\%"),
    (r",?\s*(\\text\s*\{,?\s*)?\b(and|or)\b\s*\}?", ", "),
    (r"(?<![\w.^)}])(\d+) +(\d+)/(\d+)", r"\1\\frac{\2}{\3}"),  # 1 1/2
    (r"\\frac *(\d) +(\d)", r"\\frac{\1}{\2}"),  # no other two numbers stand side by side:
    (r"(?<!_)(\d) +(?=\d)", r"\1 ? "),  # 2 3 is not 2+3,
    (r"(?<!_)([\d)]) *\((?=\d)", r"\1\\cdot("),  # nor is 2(3), but \log_2(8) stays
    (r"\\varnothing\b|\\\{\s*\\\}", r"\\emptyset "),
    (r"^([^=,]*)=([a-zA-Z])$", r"\2=\1"),  # 5=x
]
UNIT = re.compile(
    rf"(?<=[\w)}}])(\s*{TEXT}|\s*([ckm]m|kg|ft)|\s+[a-zA-Z]{{3}}[a-zA-Z. ]*)(\^\{{?\d\}}?)?$"
)
NAME = re.compile(  # x, m+n, f(3), x_1 or (x,y) may stand before =; 6=5 and 2x=5 are not 5
    r"(?:^|(?<=[,;(]))\s*([a-zA-Z\\|][^=<>\d,;^]*|[a-zA-Z][_{(]+[-\d./]+[)}]*|\([a-zA-Z, ]+\))="
)
CHAIN = re.compile(r"=[^,;]*=|\\approx.*\\approx")  # 1=2=3=4=5 is many guesses
WORD = r"\\?[a-z]+(?:\.m)?"
WORDS = frozenset(  # 5 million is not 5, and a problem, \sum_{k=1}^{9} k, is not its own answer
    r"hundred thousand million billion dozen half am pm a.m p.m squared factorial is are not plus"
    r" minus times over \sum \prod \int \iint \iiint \oint \lim \max \min \sup \inf \gcd \lcm \det"
    r" \mod \bmod \pmod \operatorname vmatrix \partial dx dy dt".split()
)
MARKS = [  # two answers that have such a mark have the same one; to math-verify
    r"[\w)}] ([a-z][a-z .]*?)s?(\^\{?\d\}?)?$",  # 5 m is 5 cm,
    r"_\{?(\d+)\}?$",  # a number is another base's,
    r"^([(\[]|\\\{)",  # a tuple is a set,
    r"^([a-z]{3}[a-z .'-]*)$",  # red is der,
    r"^(.+ [ap]\.?m)$",  # and 8:34 p.m. is 4:17 p.m.
]


def math_verdict(gold: str, pred: str) -> bool:
    """math-verify's verdict, unless a guard knows better; the same text is always equal."""
    from math_verify import verify

    gold, pred = respell(gold), respell(pred)
    gold_text, pred_text = plain(gold), plain(pred)
    if gold_text == pred_text:
        return bool(gold_text)
    gold_words, pred_words = re.findall(WORD, gold), re.findall(WORD, pred)
    if CHAIN.search(pred) or WORDS & (set(gold_words) ^ set(pred_words)):
        return False
    for mark in MARKS:
        wanted, given = re.findall(mark, gold_text), re.findall(mark, pred_text)
        if wanted and given and wanted != given:
            return False
    gold, pred = UNIT.sub("", gold), UNIT.sub("", pred)
    gold_value, pred_value = NAME.sub("", gold), NAME.sub("", pred)
    if ("=" in gold_value) != ("=" in pred_value):
        return False
    gold_names, pred_names = set(NAME.findall(gold)), set(NAME.findall(pred))
    if not gold_names or not pred_names or len(gold_names | pred_names) == 1:
        gold, pred = gold_value, pred_value
    a, b = read(gold), read(pred)
    return a is not None and b is not None and alike(a, b) and verify(a, b, timeout_seconds=None)


@lru_cache(4096)  # a problem's reference is read once for all its samples
def respell(answer: str) -> str:
    """An answer as math-verify can read it."""
    answer = answer.translate(str.maketrans(SIGNS))
    for old, new in SPELLING:
        answer = re.sub(old, new, answer)
    return answer


def plain(answer: str) -> str:
    r"""An answer in lower case with single blanks, without \text and a last full stop."""
    return " ".join(re.sub(TEXT, r" \1", answer).casefold().split()).rstrip(".")


@lru_cache(4096)
def read(latex: str) -> Any:
    r"""What math-verify reads, or None. \pm stands for both signs, i for the imaginary unit."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    if r"\pm" in latex and "," not in latex and r"\{" not in latex:
        latex = latex.replace(r"\pm", "+") + ", " + latex.replace(r"\pm", "-")
    latex = re.sub(r"(?<![a-zA-Z\\_])(?<!_\{)i(?![a-zA-Z])", "I ", latex)
    spelling = NormalizationConfig(units=False, malformed_operators=True, nits=True)
    config = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=spelling)]
    latex = rf"\boxed{{{latex}}}"
    parsed = parse(latex, config, "no_fallback", "first_match", parsing_timeout=None)
    return parsed[0] if parsed else None


def alike(gold: Any, pred: Any) -> bool:
    """Whether two answers have as many numbers, and the same: to math-verify 1,1,2 is 1,2."""
    from sympy import default_sort_key

    left = sorted(numbers(gold), key=lambda number: default_sort_key(number.evalf()))
    right = sorted(numbers(pred), key=lambda number: default_sort_key(number.evalf()))
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


class Verifier(AbstractContextManager):
    """Judges answers within a wall-clock limit each; a context manager, safe from any thread.

    timeout_s: seconds per answer; one that takes longer (`timeouts` counts it) or kills its worker
    is wrong. workers: how many subprocesses; they start when needed and end with close() or us.
    """

    def __init__(self, timeout_s: float = 5.0, workers: int = 1):
        if timeout_s <= 0 or workers < 1:
            raise ValueError(f"need timeout_s > 0 and workers >= 1, got {timeout_s} and {workers}")
        self.timeout_s, self.workers, self.timeouts = timeout_s, workers, 0
        self._lock = threading.Lock()
        self._idle: queue.Queue[Any] = queue.Queue()  # None: to be started
        for _ in range(workers):
            self._idle.put(None)

    def verify(self, gold: str, pred: str | None) -> bool:
        """True when `pred` equals `gold`. None, empty, unreadable or too slow: False."""
        return self.verify_many([(gold, pred)])[0]

    def verify_many(self, pairs: Iterable[tuple[str, str | None]]) -> list[bool]:
        """`verify` for each (gold, pred), spread over the workers, in order."""
        # Ctrl-C reaches the main thread only, so that no judging thread leaves a reply behind.
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(self._judge, pairs))

    def _judge(self, pair: tuple[str, str | None]) -> bool:
        verdict = quick_verdict(*pair)
        if verdict is not None:
            return verdict
        worker = self._idle.get()
        try:
            for _ in range(2):  # a worker may have died idle: one more try with a new one
                worker = worker or self._start()
                reply = _ask(worker, pair)
                if reply:
                    return reply == "true"
                worker, status = None, _end(worker)
                if status == -signal.SIGALRM:
                    with self._lock:
                        self.timeouts += 1
                    return False
            return False
        finally:
            self._idle.put(worker)

    def _start(self) -> Any:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        command = [sys.executable, os.path.abspath(__file__), str(self.timeout_s), str(os.getpid())]
        worker = Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=env, text=True)
        if _ask(worker, ("1/2", "2/4")) != "true":
            _end(worker)
            raise RuntimeError("the verifier did not start; does `import math_verify` work?")
        return worker

    def outcome(self, gold: str, text: str) -> int:
        """r of a completion (§2): +1 if its extracted answer is right, else -1."""
        return 1 if self.verify(gold, extract_answer(text)) else -1

    def close(self) -> None:
        """Ends the workers, each after the answer it is at. A later verdict starts them again."""
        for worker in [self._idle.get() for _ in range(self.workers)]:
            if worker:
                _end(worker)
            self._idle.put(None)

    def __exit__(self, *_: object) -> None:
        self.close()


def _ask(worker: Any, pair: tuple[str, str | None]) -> str:
    """The worker's reply; "" when it died, as it does of SIGALRM when time is up."""
    try:
        print(json.dumps(pair), file=worker.stdin, flush=True)
        return worker.stdout.readline().strip()
    except BrokenPipeError:
        return ""


def _end(worker: Any) -> int:
    """The exit status of a worker, dead or killed here."""
    worker.kill()
    worker.communicate()  # waits, and closes the pipes
    return worker.returncode


def main() -> None:
    """The worker: dies with its parent, when time is up (SIGALRM), or at its memory limit."""
    import resource

    timeout_s, parent = float(sys.argv[1]), int(sys.argv[2])

    def end_with_parent() -> None:  # even if the parent's fork holds the pipe open
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it kills, whatever the parser is at
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    threading.Thread(target=end_with_parent, daemon=True).start()
    replies, sys.stdout = sys.stdout, sys.stderr  # nothing else may write there
    limit = START_S  # for the first pair, which imports sympy and builds the grammar
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, limit)
        try:
            verdict = math_verdict(*json.loads(line))
        except Exception:  # whatever a hostile expression raises is a wrong answer
            verdict = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(verdict), file=replies, flush=True)
        limit = timeout_s


if __name__ == "__main__":
    main()
