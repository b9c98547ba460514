"""The verdict: a completion's answer, and whether it is right (D5). This module needs no torch.

A `Judge` decides for a domain: subclass it in a file of your own, for --verifier MODULE:CLASS.
`Verifier`, the default, judges mathematics. Equal texts and integers are decided at once;
math-verify decides the rest, in a worker process that ends when an answer takes too long.
"""

import importlib
import json
import os
import re
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from functools import lru_cache
from subprocess import DEVNULL, PIPE, Popen
from typing import Any, NamedTuple

MAX_CHARS = 1000  # of an answer that is parsed
MEMORY_BYTES = 1 << 30  # of the worker's address space


def extract_answer(text: str) -> str | None:
    r"""The text in the last `\boxed{}` after the last `</think>`; None if missing or not closed.

    A thinking block that is still open at the end holds no answer. Boxes may hold nested braces. A
    box without braces counts if a dollar sign ends it: `$\boxed 5$`.
    """
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    text = re.sub(r"\\boxed\s+([^\s{}$\\]+)\s*\$", r"\\boxed{\1}", text)
    text = re.sub(r"\\boxed\s*\{", r"\\boxed{", text)
    _, box, content = text.rpartition(r"\boxed{")
    if not box:
        return None
    depth = 1
    for match in re.finditer(r"\\.|[{}]", content, re.S):  # an escaped brace counts as neither
        if match[0] == "{":
            depth += 1
        elif match[0] == "}":
            depth -= 1
        if depth == 0:
            return content[: match.start()].strip()
    return None


# ------------------------------------------------------------------------------------- any domain


class Verdict(NamedTuple):
    """A completion's answer, or None if it has none; and whether the answer is right."""

    answer: str | None
    right: bool


class Judge(AbstractContextManager):
    """Decides whether a completion solves a problem. For another domain, subclass it.

    A subclass has `is_right`, or `judge` if it judges whole batches, and may override the rest. An
    exception ends the run, with a note of problem and answer: return False for what cannot be read.
    A subclass keeps to `timeout_s`, seconds per answer, and counts late answers in `timeouts`.
    """

    timeouts = 0

    def __init__(self, timeout_s: float = 5.0):
        if not 0 < timeout_s <= 1e6:
            raise ValueError(f"timeout_s must be above 0, at most 1e6 seconds, got {timeout_s}")
        self.timeout_s = timeout_s

    def answer(self, text: str) -> str | None:
        """The answer in a completion, or None.

        text: the completion; if its prompt ends on an open think tag, `text` begins with that tag.
        """
        return extract_answer(text)

    def is_right(self, problem: Any, answer: str) -> bool:
        """Whether an answer is right. problem: has .problem, .answer, and .extra, a mapping."""
        raise NotImplementedError

    def same(self, one: str, other: str) -> bool:
        """Whether maj@k counts two answers together. Both are right, or both are wrong."""
        return one == other

    def judge(self, cases: Sequence[tuple[Any, str]]) -> list[Verdict]:
        """The verdict of each (problem, completion), in order: wrong where there is no answer."""
        verdicts = []
        for problem, text in cases:
            answer = None
            try:
                answer = self.answer(text)
                right = answer is not None and self.is_right(problem, answer)
            except Exception as e:
                e.add_note(f"the verifier was at {problem}, answer {answer!r:.200}")
                raise
            verdicts.append(Verdict(answer, right))
        return verdicts

    def close(self) -> None:
        """Release the judge's resources. It may be asked again afterwards."""

    def __exit__(self, *_: object) -> None:
        self.close()


def load_judge(name: str) -> type[Judge]:
    """The class MODULE:CLASS; ValueError if there is none, or it cannot judge.

    The module is installed or lies in the working directory. We search the working directory last,
    so that no file there takes the place of one of ours.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    module_name, _, class_name = name.partition(":")
    try:
        kind = getattr(importlib.import_module(module_name), class_name)
    except Exception as e:  # of any kind: importing runs the module
        cause = " ".join(f"{type(e).__name__}: {e}".split())
        rule = "write MODULE:CLASS, of a module that is installed or in the working directory"
        raise ValueError(f"verifier {name}: not loaded ({cause}); {rule}") from None
    is_judge = isinstance(kind, type) and issubclass(kind, Judge)
    if not is_judge or (kind.is_right is Judge.is_right and kind.judge is Judge.judge):
        rule = "must be a subclass of lib.verify.Judge, with the method is_right or judge"
        raise ValueError(f"verifier {name}: {class_name} {rule}")
    return kind


def file_of(name: str) -> str:
    """The file that defines the class MODULE:CLASS."""
    return str(sys.modules[load_judge(name).__module__].__file__)


# ------------------------------------------------------------------------------------ mathematics


def is_copied(gold: str, pred: str, problem: str) -> bool:
    """Whether an answer is an expression copied from the problem, and not the reference.

    math-verify calls the problem's longest formula right in 5% of MATH: a policy could box that.
    Words are never copies, nor are plain numbers, even with `x =` in front or a unit behind them; a
    fraction may be a copy.
    """
    answer = without_layout(pred)
    reference = without_layout(gold)
    text = without_layout(problem)
    # Degrees and styles, such as \textbf{(C)}, are no expressions.
    is_expression = re.search(
        r"\\(?!circ|text|math)[a-z]|(?<=.)([-+*/_=<>!|]|\^(?!\\circ))", answer
    )
    return bool(is_expression) and answer in text and answer != reference


LAYOUT = (  # sizes, the d or t of a \dfrac or \tfrac that has braces in it, units, blanks, brackets
    r"\\(?:left|right|[bB]igg?[lr]?|displaystyle)\b|(?<=\\)[dt](?=frac)"
    r"|\\(?:text|mbox)\s*\{[^{}]*\}|\\[^a-zA-Z]|[][\s(){}$.]"
)


@lru_cache(4096)
def without_layout(latex: str) -> str:
    r"""A text without LAYOUT and without `name=` in front; \frac12 becomes 1/2."""
    latex = re.sub(r"\\[dt]?frac *(?:\{([^{}]+)\} *\{([^{}]+)\}|(\d)(\d))", r"\1\3/\2\4", latex)
    return re.sub(r"^\w*=", "", re.sub(LAYOUT, "", latex))


INSIDE = r"(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*"  # what stands between two braces
SPELLINGS = [  # (what models write and math-verify misreads, our replacement), applied in order
    ("−", "-"),
    ("²", "^2"),
    ("³", "^3"),
    ("∞", r"\\infty "),
    ("°", r"^\\circ "),
    ("∪", r"\\cup "),
    (r"√\s*(?:[({]([^(){}]+)[)}]|(\d+|[a-z]))", r"\\sqrt{\1\2}"),  # √13, √(13)
    (r"(?i)^\s*(?:\\text\s*\{)?\s*(?:the )?(?:final )?answer(?: is\b)?:?\s*\}?", ""),
    (r"^\\text\s*\{[^{}]*\}\s*=", ""),  # \text{Area} = 5\text{ cm}
    (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle)(?![a-zA-Z])\.?\s*", ""),  # \bigl(1,2\bigr)
    (r"^(?:\s|=|\$|\*\*|\\[(\[])+", ""),
    (r"(?:\s|\.|\$|\*\*|\\[)\]]|\\\\)+$", ""),  # $5$, 5. and 5\\
    (rf"^(?:\\(?:text|math|bold)\w*\s*)?\{{({INSIDE})\}}$", r"\1"),  # {5}, \text{5}, \mathbf{5}
    (r"(?<=\d)(?:\{,\}|\\,|,\\!| )(?=\d{3}(?!\d))", ""),  # 1{,}234 and 1\,234
    (r"(?<!\\)\\[,;:]", " "),  # 1,234 \, \text{km}
    (r"(?<![\w.^)}])(\d+) +(\d+)/(\d+)", r"\1\\frac{\2}{\3}"),  # 1 1/2
    (r"(?<=\d)\s+[a-zA-Z]{3,}(?: [a-zA-Z]+)*$", ""),  # 5 eggs
    (r"^(?:\(|\\text\s*\{)(\w+)[)}](?=_)", r"\1"),  # (22)_6
]


INFINITE = re.compile(r"inf|(?<![a-zA-Z])oo(?![a-zA-Z])")  # oo is sympy's infinity


def respell(answer: str) -> str:
    """An answer as math-verify can read it."""
    for pattern, replacement in 2 * SPELLINGS:  # twice, as spellings nest: {\text{odd}}
        answer = re.sub(pattern, replacement, answer)
    return answer


def math_verdict(gold: str, pred: str) -> bool:
    r"""math-verify's verdict, with rules of ours before and after it.

    For example, math-verify alone calls 2^\infty right for one in ten finite references.
    """
    from math_verify import verify

    gold = respell(gold)
    pred = respell(pred)
    if re.fullmatch(r"[a-zA-Z]{3}[a-zA-Z ]*", gold):  # words, not products: else CBAD = ABCD
        return gold.casefold().split() == pred.casefold().split()
    if INFINITE.search(pred) and not INFINITE.search(gold):
        return False
    if gold == pred != "":
        return True
    equal = verify(read(gold), read(pred), timeout_seconds=None)  # `main` limits the time
    return equal and not are_tiny_and_differ(read(gold), read(pred))


def are_tiny_and_differ(golds: Sequence[Any], preds: Sequence[Any]) -> bool:
    """Whether the reference is below 1e-3, and the answer differs from it by more than 0.1%.

    math-verify rounds to 1e-6, so it may call such numbers equal.
    """
    try:
        gold = golds[0].doit().evalf(30)
        pred = preds[0].doit().evalf(30)
        return bool(abs(gold) < 1e-3 and abs(gold - pred) > 1e-3 * abs(gold))
    except (TypeError, AttributeError):  # no numbers, but a set, an equation or words
        return False


@lru_cache(4096)  # a problem's reference is read once for all its samples
def read(latex: str) -> Any:
    """What math-verify parses from a box with this content."""
    from math_verify import parse

    return parse(rf"\boxed{{{latex}}}", parsing_timeout=None)


class Verifier(Judge):
    """Judges mathematics, from any thread. An answer that takes too long is wrong.

    One worker process decides, one answer at a time. The worker starts with this object
    (ImportError if it cannot start), and ends with `close` or with this process.
    """

    def __init__(self, timeout_s: float = 5.0):
        super().__init__(timeout_s)
        self._lock = threading.RLock()  # held by the thread that uses the worker
        self._worker: Any = self._start()  # None: the next question starts one

    def verify(self, gold: str, pred: str | None, problem: str = "") -> bool:
        """True when `pred` equals `gold`. None, empty, copied, unreadable or too slow: False.

        An answer that kills two workers is wrong, too.
        """
        gold = gold.strip()
        pred = (pred or "").strip()
        if gold == pred:
            return bool(pred)
        if not pred or max(len(gold), len(pred)) > MAX_CHARS:
            return False
        if re.fullmatch(r"[+-]?\d+ [+-]?\d+", f"{gold} {pred}", re.A):
            return int(gold) == int(pred)
        return not is_copied(gold, pred, problem) and self._ask(gold, pred)

    def is_right(self, problem: Any, answer: str) -> bool:
        return self.verify(problem.answer, answer, problem.problem)

    def outcome(self, gold: str, text: str, problem: str = "") -> int:
        """r of a completion (§2): +1 if its extracted answer is right, else -1."""
        return 1 if self.verify(gold, self.answer(text), problem) else -1

    def same(self, one: str, other: str) -> bool:
        return self.verify(one, other)

    def close(self) -> None:
        """End the worker, at once or after the answer that another thread waits for.

        A later question starts another worker.
        """
        with self._lock:
            worker = self._worker
            self._worker = None
            if worker:
                worker.kill()
                worker.communicate()

    def _ask(self, gold: str, pred: str) -> bool:
        """The worker's verdict; False if time was up, or two workers have died."""
        with self._lock:
            for _ in range(2):  # somebody may have killed the worker: one more try with a new one
                worker = self._worker = self._worker or self._start()
                try:
                    with suppress(BrokenPipeError):
                        print(json.dumps((gold, pred)), file=worker.stdin, flush=True)
                    reply = worker.stdout.readline()
                except BaseException:  # such as Ctrl-C: else the next question would get this reply
                    self.close()
                    raise
                if reply:
                    return reply == "true\n"
                self.close()
                # (The worker was dead before `close`: its return code says what it died of.)
                if worker.returncode == -signal.SIGALRM:  # its time was up
                    self.timeouts += 1
                    break
            return False

    def _start(self) -> Any:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        command = [sys.executable, os.path.abspath(__file__), str(self.timeout_s)]
        worker: Any = Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=env, text=True)
        if worker.stdout.readline() != "true\n":  # the line that `main` begins with
            raise ImportError("the verifier did not start; does `import math_verify` work?")
        return worker


def main() -> None:
    """The worker: JSON lines in and out. It ends with its input or by SIGALRM."""
    timeout_s = float(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it kills the worker at any point
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    replies = sys.stdout  # nothing else may write there
    sys.stdout = sys.stderr
    print(json.dumps(math_verdict("1/2", "2/4")), file=replies, flush=True)  # loads the grammar
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            verdict = math_verdict(*json.loads(line))
        except Exception:  # a hostile expression may raise anything, such as MemoryError: wrong
            verdict = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(verdict), file=replies, flush=True)


if __name__ == "__main__":
    main()
