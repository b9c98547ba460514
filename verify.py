"""The verdict: a completion's answer, and whether it equals the reference. One verifier for training and evaluation (D5).

extract_answer   the last \\boxed{} after the last </think>
Verifier         equality by number, then symbolically (math-verify, gold first), then by string, in killable workers

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
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

MAX_CHARS = 1000  # a longer answer is compared as a string only
MEMORY_BYTES = 4 << 30  # address space of a worker
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


# ---------------------------------------------------------------------------------------- equality


def normalize(answer: str) -> str:
    """The string compared by the fallback: no dollars, no sizing commands, no spaces, no final full stop."""
    answer = re.sub(r"\\(left|right|displaystyle|,|!|;|:)(?![a-zA-Z])|\$|~", "", answer)
    answer = re.sub(r"\\(?:text|mathrm|textbf)\s*\{([^{}]*)\}", r"\1", answer.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac"))
    answer = re.sub(r"(?<=\d)\s+(?=\d)", "_", re.sub(r"\\qquad|\\quad", " ", answer.strip()))  # "1 1/2" is not 11/2
    return re.sub(r"\s+", "", answer).removesuffix(".")


def number(answer: str) -> Fraction | None:
    """The value of a plain integer or decimal, thousands separators allowed; None for anything else."""
    plain = re.sub(r"(?<=\d)\{?,\}?(?=\d{3}(?:\D|$))", "", answer) if re.fullmatch(r"[+-]?\d{1,3}(\{?,\}?\d{3})+(\.\d+)?", answer) else answer
    return Fraction(plain) if len(plain) <= MAX_CHARS and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)", plain, re.A) else None


def quick_verdict(gold: str, pred: str | None) -> bool | None:
    """A verdict that needs no algebra: no answer, the same string, or two plain numbers; None when unsure."""
    if not pred or not pred.strip():
        return False
    left, right = normalize(gold), normalize(pred)
    if left == right:
        return bool(left)
    a, b = number(left), number(right)
    if a is not None and b is not None:
        return a == b
    return False if max(len(gold), len(pred)) > MAX_CHARS else None


def overlooked(gold: str, pred: str) -> bool:
    """Differences that math-verify overlooks: tuple for set, number bases, "2..5", a line break, "1 1/2" for 11/2, "6=5" for 5."""
    kinds = {m[1] for a in (gold, pred) if (m := re.match(r"\$?\s*(?:\\left)?\s*(\(|\\\{)", a))}
    bases = [re.findall(r"\d_\{?(\d+)", a) for a in (gold, pred)]
    odd = r"\.\.|\\\\[\d\s](?!.*\\end)|(?<!frac )\d\s+\d|^[^a-zA-Z\\=]*\d[^a-zA-Z\\=]*="
    return len(kinds) == 2 or (all(bases) and bases[0] != bases[1]) or bool(re.search(odd, pred.strip(" $"), re.S))


def symbolic_verdict(gold: str, pred: str) -> bool:
    """math-verify's verdict, gold first. What it cannot read is unequal: equal strings were decided before."""
    from math_verify import parse, verify

    if overlooked(gold, pred):
        return False
    # its own timeouts use signals that fail off the main thread; the caller's clock and kill replace them
    parsed = [parse(f"${answer.strip().strip('$')}$", parsing_timeout=None) for answer in (gold, pred)]  # type: ignore[arg-type]
    return bool(parsed[0] and parsed[1] and verify(parsed[0], parsed[1], timeout_seconds=None))


# ---------------------------------------------------------------------------------------- workers


class _Worker:
    """One subprocess that judges one pair at a time and is killed when it takes too long."""

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self.process: Any = None

    def _start(self) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        command = [sys.executable, os.path.abspath(__file__), str(self.timeout_s)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env)
        if self._read(START_S) != "ready":
            self.close()
            raise RuntimeError("the verifier's worker did not start; does `python -c 'import math_verify'` work?")

    def _read(self, timeout_s: float) -> str | None:
        """One line of the worker; "" when it died, None when time is up."""
        data, deadline, fd = b"", time.monotonic() + timeout_s, self.process.stdout.fileno()
        while not data.endswith(b"\n"):
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            chunk = os.read(fd, 4096)
            if not chunk:
                return ""
            data += chunk
        return data.decode().strip()

    def judge(self, gold: str, pred: str) -> bool:
        for _ in range(2):  # a worker that died may have died idle (out of memory, killed): one more try with a new one
            if self.process is None or self.process.poll() is not None:
                self.close()
                self._start()
            try:
                self.process.stdin.write((json.dumps([gold, pred]) + "\n").encode())
                self.process.stdin.flush()
                reply = self._read(self.timeout_s)
            except BrokenPipeError:
                reply = ""
            if reply:
                return reply == "true"
            self.close()
            if reply is None:
                return False
        return False

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()  # waits, and closes the pipes
            self.process = None


class Verifier:
    """Judges answers within a wall-clock limit each; a context manager, safe to call from any thread.

    timeout_s: seconds per answer; an answer that takes longer, or kills its worker, is wrong.
    workers: how many subprocesses; they start when first needed and end with close() or with this process.
    """

    def __init__(self, timeout_s: float = 5.0, workers: int = 1):
        if timeout_s <= 0 or workers < 1:
            raise ValueError(f"Verifier needs timeout_s > 0 and workers >= 1, got {timeout_s} and {workers}")
        self._idle: queue.Queue[_Worker] = queue.Queue()
        self._workers = [_Worker(timeout_s) for _ in range(workers)]
        for worker in self._workers:
            self._idle.put(worker)

    def verify(self, gold: str, pred: str | None) -> bool:
        """True when `pred` equals `gold`. None, empty, unreadable or too slow: False."""
        verdict = quick_verdict(gold, pred)
        if verdict is not None or pred is None:
            return bool(verdict)
        worker = self._idle.get()
        try:
            return worker.judge(gold, pred)
        finally:
            self._idle.put(worker)

    def verify_many(self, pairs: Iterable[tuple[str, str | None]]) -> list[bool]:
        """`verify` for each (gold, pred), spread over the workers, in order."""
        with ThreadPoolExecutor(len(self._workers)) as pool:
            return list(pool.map(lambda pair: self.verify(*pair), pairs))

    def outcome(self, gold: str, text: str) -> int:
        """r of a completion (§2): +1 if its extracted answer is right, else -1."""
        return 1 if self.verify(gold, extract_answer(text)) else -1

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> "Verifier":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main() -> None:
    """The worker: dies with its parent (stdin ends), on its own clock (SIGALRM), or at its memory limit."""
    import resource
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    timeout_s = float(sys.argv[1])
    symbolic_verdict("1/2", "2/4")  # imports sympy and builds the grammar
    print("ready", flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, timeout_s + 1)
        try:
            verdict = symbolic_verdict(*json.loads(line))
        except Exception:  # whatever a hostile expression raises is a wrong answer
            verdict = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main()
