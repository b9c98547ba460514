"""Verdicts: the answer in a text, known pairs, copies, hostile answers, processes, own judges."""

import contextlib
import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ROOT, one_line

from lib import verify
from lib.verify import MEMORY_BYTES, Verifier, extract_answer

PAIRS = [json.loads(line) for line in open(ROOT / "tests/data/verdicts.jsonl")]


@pytest.fixture(scope="module")
def verifier():
    with Verifier(timeout_s=20.0) as v:
        yield v
        assert v.timeouts == 0, "an honest answer ran out of time"


@pytest.fixture(scope="module")
def impatient():
    with Verifier(timeout_s=1.0) as v:
        yield v


def mistakes(verifier, cases, wanted):
    """The cases (reference, answer, perhaps problem) whose verdict is not the wanted one."""
    return [case for case in cases if verifier.verify(*case) is not wanted]


ANSWERS = {
    r"so $\boxed{5}$.": "5",
    "\\boxed {\n5\n}": "5",
    r"\boxed{1} and \boxed{2}": "2",
    r"\boxed{\frac{1}{\sqrt{2}}}": r"\frac{1}{\sqrt{2}}",
    r"\boxed{\left\{1,2\right.}": r"\left\{1,2\right.",
    r"\boxed{\boxed{5}}": "5",
    r"\boxed{}": "",
    # never closed, or no box
    r"\boxed{5} no: \boxed{6": None,
    r"\fbox{5}": None,
    "5": None,
    # a box without braces ends at a dollar sign
    r"$\boxed 12 $.": "12",
    r"\boxed 5": None,
    # thinking holds no answer
    r"<think>\boxed{5}</think> so 6": None,
    r"<think>\boxed{5}</think> \boxed{6}": "6",
    r"<think>\boxed{5}": None,
    r"</think>\boxed{6}<think>\boxed{5}": "6",
}


@pytest.mark.parametrize("text", ANSWERS)
def test_the_answer_is_in_the_last_box_behind_all_thinking(text, verifier):
    answer = extract_answer(text)
    assert answer == ANSWERS[text]
    assert verifier.outcome("5", text) == (1 if answer == "5" else -1)


def wrong_verdicts(verifier, kind, right, every=1):
    """The known pairs of a kind, of which each is right or each wrong, whose verdict is another."""
    pairs = [x for x in PAIRS if (x["kind"], x["right"]) == (kind, right)][::every]
    assert len(pairs) > 8
    cases = [(x["reference"], x["answer"], x.get("problem", "")) for x in pairs]
    return mistakes(verifier, cases, right)


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.long)])
def test_known_pairs_get_their_verdict_but_for_a_few(every, verifier):
    """Every fifth one, or all."""
    assert wrong_verdicts(verifier, "exploitable", False, every) == []
    refused = wrong_verdicts(verifier, "ordinary", True, every)
    assert len(refused) <= (18 if every == 1 else 2), refused
    # each has the right digits: another unit or base, a set's braces
    accepted = wrong_verdicts(verifier, "ordinary", False, every)
    assert len(accepted) <= (17 if every == 1 else 5), accepted


@pytest.mark.parametrize("kind", ["by hand", "copied"])
def test_pairs_by_hand_and_copied_answers_get_their_verdict(kind, verifier):
    """A copy is right only as the reference's text, a plain number or a word."""
    assert wrong_verdicts(verifier, kind, True) == wrong_verdicts(verifier, kind, False) == []
    assert verifier.verify("z" * 3000, "z" * 3000) and not verifier.verify("z" * 3000, "z" * 2999)


def test_every_reference_equals_itself_in_another_spelling(verifier):
    """A hundred references of all kinds."""
    cases = []
    for gold in [json.loads(line)["answer"] for line in open(ROOT / "tests/data/references.jsonl")]:
        respelled = gold.replace(r"\frac", r"\dfrac").replace("(", " (")
        cases += [(gold, gold), (gold, gold if "text" in gold else f"${respelled}$")]
    assert mistakes(verifier, cases, True) == []


def asked(problem, answer, **extra):
    return types.SimpleNamespace(id="p", problem=problem, answer=answer, extra=extra)


def test_a_copied_formula_is_shown_as_the_answer_and_is_wrong(verifier):
    copied, other = asked("What is 2 + 3?", "5"), asked("What is 4 + 1?", "5")
    cases = [(copied, r"\boxed{2+3}"), (other, r"\boxed{2+3}"), (copied, "5")]
    assert verifier.judge(cases) == [("2+3", False), ("2+3", True), (None, False)]
    assert verifier.same(r"\frac{1}{2}", "0.5") and not verifier.same("1", "2")


HOSTILE = r"""
9^{9^{9^9}}   9^9^9^9   \left(   }{   ∞   ٧   __import__('os').system('touch pwned')
().__class__.__bases__[0]   eval(input())   \input{/etc/passwd}   1e999999999   nan   None   True
\int_0^\infty e^{-x^2}dx   \sum_{i=1}^{10^9} i   \lim_{x\to0}\frac{\sin x}{x}
"""
HOSTILE = re.split(r" {3,}|\n", HOSTILE.strip())
LONG = ["{" * 5000, r"\frac{" * 300, "1" * 100_000, "x" * 100_000, "x," * 450, "\\" * 999]
LONG += ["\x00", "7\x00", "\ud800", "7\u202e"]


@pytest.mark.parametrize("pred", HOSTILE + LONG)
def test_a_hostile_answer_is_wrong_and_runs_no_code(pred, impatient, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert impatient.outcome("7", rf"so \boxed{{{pred}}}") == -1
    assert impatient.verify("1/2", "2/4")
    assert not os.listdir(tmp_path), "it ran code"


def workers(parent: int) -> set[int]:
    """The worker processes that a process has started and not yet seen end."""
    pids = set()
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            its_parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            if int(its_parent) == parent and "verify.py" in (entry / "cmdline").read_text():
                pids.add(int(entry.name))
    return pids


def started(make):
    """What `make` returns, and the process id of the one worker that it has started."""
    before = workers(os.getpid())
    result = make()
    (pid,) = workers(os.getpid()) - before
    return result, pid


def test_a_killed_worker_is_replaced_and_a_closed_one_starts_again_when_it_is_needed():
    """From any thread; close() waits for an answer that is asked for."""
    before = workers(os.getpid())
    v, first = started(Verifier)
    os.kill(first, signal.SIGKILL)
    is_right, _ = started(lambda: v.verify("1/2", "2/4"))
    v.close()
    assert all(v.verify(str(i), f"0{i}") for i in range(2000)), "integers need no worker"
    assert is_right and workers(os.getpid()) == before
    with v, ThreadPoolExecutor(1) as thread:
        verdict = thread.submit(v.verify, r"\sum_{i=1}^{300} i", "45150")
        v.close()
        assert verdict.result()


PARENT = """
import sys, threading, time
from lib.verify import Verifier
v = Verifier(timeout_s=2.0)
if sys.argv[1] == "busy":
    threading.Thread(target=v.verify, args=("7", "9^{9^{9^9}}+x")).start()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_the_worker_ends_when_its_parent_is_killed(state):
    command = [sys.executable, "-c", PARENT, state]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "ready\n"
        (worker,) = workers(parent.pid)
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 20
    while pathlib.Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not pathlib.Path(f"/proc/{worker}").exists()


def test_after_ctrl_c_in_the_midst_of_an_answer_the_next_verdict_is_its_own(verifier):
    """The answer is right, and takes a second or two: its reply would make the next one right."""
    slow = r"\sum_{i=1}^{1000} \frac{1}{i^2}", r"\sum_{j=1}^{1000} \frac{1}{j^2}"
    main_thread = threading.main_thread().ident
    ctrl_c = threading.Timer(0.1, signal.pthread_kill, (main_thread, signal.SIGINT))
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            ctrl_c.start()
            verifier.verify(*slow)
    finally:
        ctrl_c.cancel()
        signal.signal(signal.SIGINT, handler)
    assert mistakes(verifier, [("1/2", "3/7"), ("1/2", "4/7")], False) == []
    assert mistakes(verifier, [("1/3", "3/9")], True) == []


def test_time_and_memory_of_a_worker_are_bounded_and_late_answers_are_counted():
    v, worker = started(lambda: Verifier(timeout_s=1.0))
    with v:
        limits = resource.prlimit(worker, resource.RLIMIT_AS)
        assert limits == (MEMORY_BYTES, MEMORY_BYTES) and MEMORY_BYTES <= 1 << 30
        assert mistakes(v, [("7", "8/3"), ("7", "((10!)!)!")], False) == [] and v.timeouts == 1
        assert not v.verify("7", "2^{10^{10}}") and v.verify("1/2", "2/4")
    one_line(lambda: Verifier(0.0), "timeout_s")


MINE = '''
from lib import verify

class Even(verify.Judge):
    """Right is an even number, or the row's level."""

    def answer(self, text):
        before, _, after = text.rpartition("=")
        return after.strip() if before else super().answer(text)

    def is_right(self, problem, answer):
        return answer == problem.extra["level"] or answer.isdigit() and int(answer) % 2 == 0

class Other:
    """It is no judge."""

class Undecided(verify.Judge):
    """It says when two answers are one, and never which is right."""

    def same(self, one, other):
        return one.lower() == other.lower()
'''
NAMES = {  # a --verifier, and what is said of it
    "math": "MODULE:CLASS",
    "failing:Even": "ZeroDivisionError",
    "mine:Other": "Judge",
    "mine:Undecided": "is_right",
    "tabnanny:Even": "Even",  # no file here takes the place of an installed module
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory, with a module of a domain in it that no other test has imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    for name, text in (("mine", MINE), ("tabnanny", MINE), ("failing", "1 / 0")):
        (tmp_path / f"{name}.py").write_text(text)
    yield tmp_path
    sys.modules.pop("mine", None)


def test_a_judge_of_ones_own_reads_and_decides_and_is_asked_nothing_without_an_answer(here):
    x = asked("p", "no reference", level="7")
    cases = [(x, text) for text in ("so = 4", "so = 3", r"\boxed{7}", "nothing")]
    with verify.load_judge("mine:Even")(timeout_s=1.0) as judge:
        verdicts = judge.judge(cases)
        assert verdicts == [("4", True), ("3", False), ("7", True), (None, False)]
        assert judge.same("4", "4") and not judge.same("4", "4.0") and judge.timeout_s == 1.0


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_name_of_a_judge_is_one_line(name, here):
    one_line(lambda: verify.load_judge(name), f"verifier {name}: ", NAMES[name])
