"""The verdict: a completion's answer, and whether it equals the reference. Decision D5.

Equal strings and integers are decided at once, the rest by math-verify in worker processes that are
killed when an answer takes too long. SPELLING is what models write and math-verify misreads; the
tables below it and `alike` are what it accepts and must not. The reference comes first.

Run as a program this file is the worker: JSON lines [gold, pred] in, true or false out. It imports
neither torch nor transformers, so that a worker starts in about a second.
"""

import json
import os
import queue
import re
import select
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
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
    boxes = list(re.finditer(r"\\boxed\s*\{", text))
    if not boxes:
        return None
    text, depth = text[boxes[-1].end() :], 1
    for match in re.finditer(r"\\.|[{}]", text, re.S):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[: match.start()].strip()
    return None


def quick_verdict(gold: str, pred: str | None) -> bool | None:
    """A verdict that needs no parser: no answer, equal strings, two integers; None when unsure."""
    gold, pred = gold.strip(), (pred or "").strip()
    if not pred or gold == pred:
        return bool(pred)
    if max(len(gold), len(pred)) > MAX_CHARS:
        return False
    integers = re.fullmatch(r"[+-]?\d+ [+-]?\d+", f"{gold} {pred}", re.A)
    return int(gold) == int(pred) if integers else None


TEXT = r"\\(?:text(?:bf|it|rm)?|mathrm|mathbf|mbox)\s*\{([^{}]*)\}"
SIGNS: dict[str, Any] = {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "π": r"\pi "}
SIGNS |= {"∞": r"\infty ", "°": r"^\circ ", "√": r"\sqrt ", "±": r"\pm ", "²": "^2"}
SPELLING = [  # what models write and math-verify misreads or refuses
    (r"(?<=\d)(?:\{,\}|,?\\[,!]) ?(?=\d{3}(?!\d))", ""),  # thousands: 1{,}234
    (r"^\s*\\f?boxed\s*\{((?!.*boxed).*)\}\s*$", r"\1"),  # a box in the box; two are a list
    (r"(?<=\})\s*\\f?boxed", ","),
    (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle)(?![a-zA-Z])|\\f?boxed(?=\s*\{)|\\[!;:>]", ""),
    (r"\\q?quad(?![a-zA-Z])|~", " "),
    (rf"^\s*{TEXT}[\s.]*$", r"\1"),  # a whole answer set as text
    (r"^(?:=|\\approx|\\,|\s)+|(?:\\,|[\s.])+$", ""),  # = 5, and 5 with a full stop
    (r"^\\\$(.+)", r"\1 \\text{dollars}"),
    (r"\\?\$", ""),  # the other dollar signs are delimiters
    (r"\s*\\text\s*\{\s*percent\s*\}", r"\\%"),
    (r",?\s*\\text\s*\{,?\s*(?:and|or)\s*\}", ", "),
    (r"^([^\d,({\[]*\d{1,3}),(\d{3})(?:,(\d{3}))?(?=[^\d,]*$)", r"\1\2\3"),  # 1,234 apples
    (r"(?<![\w.^)}])(\d+) +(\d+)/(\d+)(?!\w)", r"\1\\frac{\2}{\3}"),  # 1 1/2
    (r"(?<!\\frac \d)(?<!\\frac\d)(?<!_\d)(?<=\d) +(?=\d)", " ? "),  # else 2 3 is read as 2+3,
    (r"(?<=[\d)])(?<!_\d) *\((?=\d)", r"\\cdot("),  # and so is 2(3)
    (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
    (r" *(?:=|\\in(?![a-z])) *", "="),
]
NO_UNIT = "hundred|thousand|[mb]illion|dozen|half|[ap]\\.?m|is|are|not|or|and|plus|minus|times|over"
UNIT = re.compile(  # math-verify drops too much: 5 million is not 5, nor is 6t 6
    rf"(?<=[\w)}}])(?!.*\b(?:{NO_UNIT}|squared|factorial)\b)"
    rf"(?:\s*{TEXT}|\s*(?:[ckm]m|ft|kg)|\s+[a-zA-Z]{{3}}[a-zA-Z. ]*)(?:\^\{{?\d\}}?)?$"
)
MARKS = [  # where two answers have such a mark, it is the same one; math-verify would
    r"[\w)}] ([a-z][a-z .]*?)s?(\^\{?\d\}?)?$",  # take 5 m for 5 cm,
    r"[\da-f}]_\{?(\d+)\}?$",  # a number for another base's,
    r"^([(\[]|\\\{)",  # a tuple for a set,
    r"^([a-z .'-]*[a-z]{3}[a-z .'-]*|\d+:\d\d [ap]\.?m)$",  # red for der, 8:34 p.m. for 4:17 p.m.
]
QUESTION = re.compile(  # a problem is not its own answer: \sum_{k=1}^{9} k
    r"\\(?:sum|prod|i*nt|lim|max|min|sup|inf|gcd|lcm|det|[bp]?mod|operatorname)(?![a-z])"
    r"|\\begin\{vmatrix|\\frac\{\\?(?:d|partial)\}?"
)
NAME = re.compile(  # x=, f(3)=, m+n= and =x may stand beside a value; 6=5 and 2x=5 are not 5
    r"(?<![^,;(])\s*((?=[a-zA-Z\\|(])(?:[^=<>\d,;^()]|_\{?\d+\}?|\([-\d./]+\)|\([a-zA-Z, ]+\))*)="
    r"|=[a-zA-Z]$"
)
CHAIN = re.compile(r"=[^,;]*=|\\approx.*\\approx")  # 1=2=3=4=5 is many guesses


def math_verdict(gold: str, pred: str) -> bool:
    """math-verify's verdict, unless a guard knows better; the same text is always equal."""
    from math_verify import verify

    gold, pred = respell(gold), respell(pred)
    texts = [" ".join(re.sub(TEXT, r" \1", x).casefold().split()).rstrip(".") for x in (gold, pred)]
    if texts[0] == texts[1]:
        return bool(texts[0])
    marks = [[re.findall(mark, text) for text in texts] for mark in MARKS]
    if any(left and right and left != right for left, right in marks):
        return False
    if CHAIN.search(pred) or set(QUESTION.findall(pred)) - set(QUESTION.findall(gold)):
        return False
    gold, pred = UNIT.sub("", gold), UNIT.sub("", pred)
    names = [set(NAME.findall(x)) for x in (gold, pred)]
    bare = [NAME.sub("", x) for x in (gold, pred)]
    if ("=" in bare[0]) != ("=" in bare[1]):
        return False
    if not all(names) or len(names[0] | names[1]) == 1:
        gold, pred = bare
    a, b = value(gold), value(pred)
    if a is None or b is None or not alike(a, b):
        return False
    return bool(verify(a, b, timeout_seconds=None))


@lru_cache(4096)  # a problem's reference is read once for all its samples
def respell(answer: str) -> str:
    """An answer as math-verify can read it."""
    answer = answer.translate(str.maketrans(SIGNS))
    for old, new in SPELLING:
        answer = re.sub(old, new, answer)
    return answer


@lru_cache(4096)
def value(latex: str) -> Any:
    r"""What math-verify reads, or None. \pm stands for both signs, i for the imaginary unit."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    if r"\pm" in latex and not re.search(r",|\\\{", latex):
        latex = latex.replace(r"\pm", "+") + ", " + latex.replace(r"\pm", "-")
    latex = re.sub(r"(?<![a-zA-Z\\_])(?<!_\{)i(?![a-zA-Z])", "I ", latex)
    spelling = NormalizationConfig(units=False, malformed_operators=True, nits=True)
    config = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=spelling)]
    boxed = rf"\boxed{{{latex}}}"
    parsed = parse(boxed, config, "no_fallback", "first_match", parsing_timeout=None)
    return parsed[0] if parsed else None


def alike(gold: Any, pred: Any) -> bool:
    """Whether two answers have as many numbers, and the same: to math-verify 1,1,2 is 1,2."""
    left, right = numbers(gold), numbers(pred)
    if not left or not right:
        return True
    return len(left) == len(right) and all(map(close, left, right))


def close(a: Any, b: Any) -> bool:
    """Whether rationals are equal, and others almost: to 15 decimals 2^{-98} is 2^{-97}."""
    tolerance = 0 if a.is_Rational and b.is_Rational else 1e-5
    return bool(abs(a - b).evalf() <= tolerance * max(abs(a).evalf(), abs(b).evalf()))


def numbers(value: Any) -> list[Any]:
    r"""The numbers in an answer, sorted; an error if one is not finite, for 2^\infty may be any."""
    import sympy as sp

    if isinstance(value, sp.Expr):
        if value in (sp.oo, -sp.oo) or value.has(sp.UnevaluatedExpr):  # 5% may be 5
            return []
        done = value.doit()
        if sp.Tuple(value, done).has(sp.oo, -sp.oo, sp.zoo, sp.nan, sp.AccumBounds):
            raise ValueError("not finite")
        return [done] if done.is_number else []
    if not isinstance(value, (sp.FiniteSet, sp.Tuple, sp.Interval)):
        return []
    found: list[Any] = []
    for part in getattr(value, "_unsorted_args", value.args):
        found += numbers(part)
    return sorted(found, key=lambda number: sp.default_sort_key(number.evalf()))


class _Worker:
    """One subprocess that judges one pair at a time and is killed when it takes too long."""

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self.process: Any = None

    def _start(self) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        command = [sys.executable, os.path.abspath(__file__), str(self.timeout_s), str(os.getpid())]
        self.process = Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=env, text=True)
        if self._read(START_S) != "ready":
            self.close()
            raise RuntimeError("the verifier did not start; does `import math_verify` work?")

    def _read(self, timeout_s: float) -> str | None:
        """One line of the worker; "" when it died, None when time is up."""
        poll = select.poll()  # select() fails on descriptors from 1024 on
        poll.register(self.process.stdout, select.POLLIN)
        return self.process.stdout.readline().strip() if poll.poll(timeout_s * 1000) else None

    def judge(self, gold: str, pred: str) -> bool | None:
        """The worker's verdict; None when time is up."""
        for _ in range(2):  # a worker may have died idle: one more try with a new one
            reply: str | None = ""
            try:
                if self.process is None:
                    self._start()
                print(json.dumps([gold, pred]), file=self.process.stdin, flush=True)
                reply = self._read(self.timeout_s)
            except BrokenPipeError:
                pass
            finally:  # on Ctrl-C too: a late reply must not become the next answer's verdict
                if not reply:
                    self.close()
            if reply != "":
                return None if reply is None else reply == "true"
        return False

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()  # waits, and closes the pipes
            self.process = None


class Verifier:
    """Judges answers within a wall-clock limit each; a context manager, safe from any thread.

    timeout_s: seconds per answer; one that takes longer (`timeouts` counts it) or kills its worker
    is wrong. workers: how many subprocesses; they start when needed and end with close() or us.
    """

    def __init__(self, timeout_s: float = 5.0, workers: int = 1):
        if timeout_s <= 0 or workers < 1:
            given = f"{timeout_s} and {workers}"
            raise ValueError(f"Verifier needs timeout_s > 0 and workers >= 1, got {given}")
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
        hard = [pair for pair, verdict in zip(pairs, verdicts) if verdict is None]
        with ThreadPoolExecutor(len(self._workers)) if len(hard) > 1 else nullcontext() as pool:
            judged = iter((pool.map if pool else map)(self._judge, hard))
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
    """Ends this process once its parent is gone, even if the parent's fork holds the pipe open."""
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
    math_verdict("1/2", "2/4")  # imports sympy and builds the grammar
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, timeout_s + 1)
        try:
            verdict = math_verdict(*json.loads(line))
        except Exception:  # whatever a hostile expression raises is a wrong answer
            verdict = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(verdict), file=replies, flush=True)


if __name__ == "__main__":
    main()
