"""The verdict: a completion's answer, and whether it equals the reference (D5). No torch.

Equal strings and integers are decided at once, the rest by math-verify in workers that end when an
answer takes too long. SPELLING is what it misreads, WORDS and MARKS what it accepts and must not.
"""

import json
import os
import queue
import re
import resource
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import lru_cache
from select import select
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

MAX_CHARS, MEMORY_BYTES = 1000, 1 << 30  # of an answer that is parsed, of a worker's address space


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


TEXT = r"\\(?:text(?:bf|it|rm|normal)?|mathrm|mathbf|mbox)\s*\{([^{}]*)\}"
SIGNS: dict[str, Any] = {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "π": r"\pi "}
SIGNS |= {"∞": r"\infty ", "°": r"^\circ ", "√": r"\sqrt ", "±": r"\pm ", "²": "^2"}
SPELLING = [  # what models write and math-verify misreads or refuses, and how it reads it
    (r"\\(?:mathrm|text)\s*\{([ie])\}", r"\1 "),  # no units: 5\mathrm{i} is not 5
    (r"(?<=\d)(\{,\}|,?\\[,!])(?=\d{3})|\\!", ""),  # thousands: 1{,}234 and 1\,234
    (r"\\(left|right|[bB]igg?[lr]?|displaystyle|boxed|fbox)\b|(?<=\\\\)\[[\d.]+ *[a-z]+\]", ""),
    (r"(?<!\\)\\(q?quad\b|[!;:>, ])|~", " "),
    (rf"^\s*{TEXT}[\s.]*$", r"\1"),  # a whole answer set as text
    (r"^\\\$(.+)", r"\1 \\text{dollars}"),
    (r"^(\\?\$|=|\\approx|\s)+|([\s.]|\\?\$|\^?\\degree)+$|\\?\$", ""),  # = 5, $5$, 5. and 5\degree
    (r"\\[dt]frac", r"\\frac"),
    (r"(\\text\s*\{)?\s*percent\s*\}?$", r"\\%"),
    (r",?\s*(\\text\s*\{,?\s*)?\b(and|or)\b\s*\}?", ", "),
    (r"(?<![\w.^)}])(\d+) +(\d+)/(\d+)", r"\1\\frac{\2}{\3}"),  # 1 1/2
    (r"\\frac *(\d) +(\d)", r"\\frac{\1}{\2}"),
    (r"(?<!_)(\d)\s+(?=\d)", r"\1 ? "),  # math-verify reads 2 3 as 2+3; with a ? it is unreadable
    (r"(?<!_)([\d)])\s*\((?=\d)", r"\1\\cdot("),  # it reads 2(3) as 2+3, too; \log_2(8) stays
    (r"\\varnothing\b|\\\{\s*\\\}", r"\\emptyset "),
    (r"^([^=,]*)=([a-zA-Z])$", r"\2=\1"),  # 5=x
]
UNIT = rf"(?<=[\w)}}])(\s*({TEXT}|[ckm]m|kg|ft)|\s+[a-zA-Z]{{3}}[a-zA-Z. ]*)(\^\{{?\d\}}?)?$"
NAME = re.compile(  # x, m+n, f(3), x_1 or (x,y) may stand before =; 6=5 and 2x=5 are not 5
    r"(?i)(?:^|(?<=[,;(]))\s*([a-z\\|][^=<>\d,;^]*?|[a-z][_{(]+[-\d./]+[)}]*|[(\[][a-z, ]+[])])\s*="
)
CHAIN = re.compile(r"=[^,;]*=|\\approx.*\\approx")  # 1=2=3=4=5 is many guesses
WORDS = (  # 5 million is not 5, and a problem, \sum_{k=1}^{9} k, is not its own answer
    r"(?<![a-z\\])(?:hundred|thousand|million|billion|dozen|half|squared|factorial|is|are|not|plus"
    r"|minus|times|over|[ap]\.?m|vmatrix|d[r-z])(?![a-z])|\\(?:sum|prod|i*int|oint|lim|max|min|sup"
    r"|inf|gcd|lcm|det|[bp]?mod|operatorname|partial)(?![a-z])"
)
MARKS = [  # two answers that have such a mark have the same one; to math-verify
    r"[\w)}] ([a-z][a-z .]*?)s?(\^\{?\d\}?)?$",  # 5 m is 5 cm,
    r"_\{?(\d+)\}?$",  # a number is another base's,
    r"^(?:(?:\\\{|[(\[]) ?(?=(?:\\\{|[(\[])[^][(){}]*,))?([(\[]|\\\{)",  # a tuple is a set,
    r"^([a-z]{3}[a-z .'-]*|.+ [ap]\.?m)$",  # red is der, and 8:34 p.m. is 4:17 p.m.
]


def math_verdict(gold: str, pred: str) -> bool:
    """math-verify's verdict, unless a guard knows better; the same text is always equal."""
    from math_verify import verify

    gold, pred = respell(gold), respell(pred)
    gold_text, pred_text = plain(gold), plain(pred)
    if gold_text == pred_text:
        return bool(gold_text)
    if CHAIN.search(pred) or set(re.findall(WORDS, gold)) != set(re.findall(WORDS, pred)):
        return False
    for mark in MARKS:
        wanted, given = re.findall(mark, gold_text), re.findall(mark, pred_text)
        if wanted and given and wanted != given:
            return False
    gold, pred = re.sub(UNIT, "", gold), re.sub(UNIT, "", pred)
    gold_value, pred_value = NAME.sub("", gold), NAME.sub("", pred)
    if ("=" in gold_value) != ("=" in pred_value):
        return False
    gold_names, pred_names = set(NAME.findall(gold)), set(NAME.findall(pred))
    if not gold_names or not pred_names or len(gold_names | pred_names) == 1:
        gold, pred = gold_value, pred_value
    a, b = read(gold), read(pred)
    return alike(a, b) and verify(a, b, timeout_seconds=None)


def respell(answer: str) -> str:
    """An answer as math-verify can read it."""
    answer = answer.translate(str.maketrans(SIGNS))
    for old, new in SPELLING:
        answer = re.sub(old, new, answer)
    return answer


def plain(answer: str) -> str:
    r"""An answer in lower case with single blanks, without \text and a last full stop."""
    return " ".join(re.sub(TEXT, r" \1", answer).casefold().split()).rstrip(".")


@lru_cache(4096)  # a problem's reference is read once for all its samples
def read(latex: str) -> Any:
    r"""What math-verify reads. \pm stands for both signs, i for the imaginary unit."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    if r"\pm" in latex and "," not in latex and r"\{" not in latex:
        latex = latex.replace(r"\pm", "+") + ", " + latex.replace(r"\pm", "-")
    latex = re.sub(r"(?<![a-zA-Z\\_])(?<!_\{)i(?![a-zA-Z])", "I ", latex)
    spelling = NormalizationConfig(units=False, malformed_operators=True, nits=True)
    how = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=spelling)]
    return parse(rf"\boxed{{{latex}}}", how, "no_fallback", "first_match", parsing_timeout=None)[0]


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


class Verifier(AbstractContextManager):
    """Judges answers within a wall-clock limit each; a context manager, safe from any thread.

    timeout_s: seconds per answer; one that takes longer (`timeouts` counts it) or kills its worker
    is wrong. workers: how many subprocesses; they start when needed and end with close() or us.
    """

    def __init__(self, timeout_s: float = 5.0, workers: int = 1):
        if not 0 < timeout_s <= 1e6 or workers < 1:
            raise ValueError(f"need timeout_s in 0..1e6 and workers >= 1: {timeout_s}, {workers}")
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
        if (verdict := quick_verdict(*pair)) is not None:
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

    def outcome(self, gold: str, text: str) -> int:
        """r of a completion (§2): +1 if its extracted answer is right, else -1."""
        return 1 if self.verify(gold, extract_answer(text)) else -1

    def close(self, *_: object) -> None:
        """Ends the workers, each after the answer it is at. A later verdict starts them again."""
        for worker in [self._idle.get() for _ in range(self.workers)]:
            if worker:
                worker.kill()
                worker.communicate()
            self._idle.put(None)

    __exit__ = close


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
            pair = json.loads(input())  # at end of file this raises, and the worker ends
            signal.setitimer(signal.ITIMER_REAL, timeout_s)
            try:
                verdict = math_verdict(*pair)
            except Exception:  # whatever a hostile expression raises is a wrong answer
                verdict = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            print(json.dumps(verdict), file=replies, flush=True)


if __name__ == "__main__":
    main()
