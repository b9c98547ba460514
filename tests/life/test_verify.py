"""Verdicts: the answer in a text, known pairs, copies, hostile answers, processes, own judges."""

import json
import os
import pathlib
import random
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
from lib.verify import MEMORY_BYTES, Verifier, drop_if_copied, extract_answer

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


def mistakes(verifier, pairs, wanted):
    """The pairs (reference, answer) whose verdict is not the wanted one."""
    return [pair for pair in pairs if verifier.verify(*pair) is not wanted]


# ------------------------------------------------------------------------------ reading the answer

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
    "": None,
    # a box without braces ends at a dollar sign
    r"$\boxed 12 $.": "12",
    r"\boxed 5": None,
    # thinking holds no answer
    r"<think>\boxed{5}</think> so 6": None,
    r"<think>\boxed{5}</think> \boxed{6}": "6",
    r"<think>\boxed{5}": None,
    r"\boxed{5}</think>": None,
    r"</think>\boxed{6}<think>\boxed{5}": "6",
}


@pytest.mark.parametrize("text", ANSWERS)
def test_the_answer_is_in_the_last_box_behind_all_thinking(text):
    assert extract_answer(text) == ANSWERS[text]


def test_a_completion_is_right_or_wrong_by_its_answer(verifier):
    outcomes = {r"\boxed{5}": 1, r"\boxed{x=5}": 1, r"\boxed{6}": -1, r"\boxed{}": -1, "5": -1}
    assert {text: verifier.outcome("5", text) for text in outcomes} == outcomes


# ------------------------------------------------------------------------------------- known pairs


def disagreements(verifier, kind, right, every=1):
    """Of every n-th pair of a kind those whose verdict is not the one of the data."""
    pairs = []
    for x in PAIRS:
        if x["kind"] == kind and x["right"] is right:
            answer = drop_if_copied(x["reference"], x["answer"], x.get("problem", ""))
            pairs.append((x["reference"], answer))
    assert len(pairs) > 30
    return mistakes(verifier, pairs[::every], right)


def test_no_policy_lives_on_an_answer_that_solves_nothing(verifier):
    assert disagreements(verifier, "exploitable", False) == []


@pytest.mark.parametrize("every, most", [(5, 2), pytest.param(1, 18, marks=pytest.mark.long)])
def test_few_right_answers_are_refused(every, most, verifier):
    """Of 458."""
    refused = disagreements(verifier, "ordinary", True, every)
    assert len(refused) <= most, refused


@pytest.mark.parametrize("every, most", [(5, 5), pytest.param(1, 21, marks=pytest.mark.long)])
def test_few_wrong_answers_are_accepted(every, most, verifier):
    """Of 167. Each needs the right digits: another unit or base, a tuple as a set, tiny numbers."""
    accepted = disagreements(verifier, "ordinary", False, every)
    assert len(accepted) <= most, accepted


def test_nothing_is_no_answer_and_equal_text_always_is(verifier):
    pairs = [("5", None), ("5", "  "), ("", ""), ("$", "$$"), ("z" * 3000, "z" * 2999)]
    assert mistakes(verifier, pairs, False) == []
    pairs = [("z" * 3000, "z" * 3000), (r"\undefined{", r" \undefined{"), ("Noon", "Noon")]
    assert mistakes(verifier, pairs, True) == []


DATA = ["aime24", "aime25", "hmmt25", "amc23", "gsm8k_test", "svamp"]
LONG_DATA = ["math500", "gsm8k_train", "math_train", "dapo_math_en"]


@pytest.mark.parametrize(
    "name", DATA + [pytest.param(name, marks=pytest.mark.long) for name in LONG_DATA]
)
def test_every_reference_equals_itself_in_another_spelling(verifier, name):
    path = ROOT.parent / "shared" / "data" / f"{name}.jsonl"
    if not path.exists():
        pytest.skip("the data sets are not beside this project")
    golds = sorted({str(json.loads(line)["answer"]) for line in path.open()})
    pairs = [(gold, gold) for gold in golds]
    for gold in golds:
        if "text" not in gold:
            respelled = gold.replace(r"\frac", r"\dfrac").replace("(", " (")
            pairs.append((gold, f"${respelled}$"))
    assert mistakes(verifier, pairs, True) == []


# ------------------------------------------------------------------------------------------ copies

# problem, reference, answers that count, answers that are copied; two blanks between answers
COPIES = [
    (
        r"Compute $\sqrt{36+64}-\sqrt{25-16}.$",
        "7",
        r"7  10-3  \sqrt{49}  \sqrt{100}-\sqrt{9}",
        r"\sqrt{36+64}-\sqrt{25-16}  \sqrt{36 + 64} - \sqrt{25 - 16}  $\sqrt{36+64}-\sqrt{25-16}$"
        r"  \sqrt{36+64}-\sqrt{25-16}\text{ units}"
        r"  x=(\sqrt{36+64}-\sqrt{25-16})  \left(\sqrt{36+64}-\sqrt{25-16}\right)",
    ),
    ("Factor $ab+5b+2a+10$.", "(a+5)(b+2)", "(b+2)(a+5)  ab+2a+5b+10", "ab+5b+2a+10"),
    (
        "Reduce $\\frac{84}{144}.$",
        r"\frac{7}{12}",
        r"\frac{7}{12}  7/12",
        r"\dfrac{84}{144}  \frac{84}{144}",
    ),
    # as the reference's text, with a name or without
    (
        r"If $\lceil x\rceil-\lfloor x\rfloor=0$, what is it?",
        "0",
        "0  x=0",
        r"\lceil x\rceil-\lfloor x\rfloor=0",
    ),
    ("Is it (A) $y=2x+3$ or (B) $y=3x$?", "y = 2x + 3", "y=2x+3  2x+3  y = 3+2x", ""),
    ("Is it (A) $\\frac12$ or (B) $\\frac{1}{3}$?", r"\frac{1}{2}", r"\frac12  \dfrac{1}{2}", ""),
    ("Does $[0,1]$ or $(0, 1)$ hold it?", r"\left[0,1\right]", "[0,1]  [0, 1]", ""),
    # plain numbers, names, letters and words
    ("At $x=5$ he eats 5 apples of 1,234.", "5", r"5  x=5  5 apples  5\text{ apples}", ""),
    ("Is 50\\% of 1,234 more than -5?", "0.5", r"50\%  \frac12", ""),
    ("Is $-5.0$ one?", "-5", "-5  -5.0", ""),
    ("Choose. (A) two lines (B) a circle", r"\text{(A)}", "A  (A)", ""),
    ("Choose. (A) two lines (B) a circle", r"\text{two lines}", r"two lines  \text{two lines}", ""),
]


@pytest.mark.parametrize("problem, gold, counted, copies", COPIES)
def test_an_expression_of_the_problem_counts_only_as_the_references_text(
    problem, gold, counted, copies, verifier
):
    for answer in counted.split("  "):
        assert verifier.verify(gold, answer, problem), answer
    for answer in filter(None, copies.split("  ")):
        assert verifier.verify(gold, answer) and not verifier.verify(gold, answer, problem), answer
        assert verifier.outcome(gold, rf"so \boxed{{{answer}}}", problem) == -1
    assert verifier.outcome(gold, rf"so \boxed{{{gold}}}", problem) == 1


def asked(problem, answer, **extra):
    return types.SimpleNamespace(problem=problem, answer=answer, extra=extra)


def test_a_copied_formula_is_shown_as_the_answer_and_wrong_in_a_batch_as_one_by_one(verifier):
    copied, other = asked("What is 2 + 3?", "5"), asked("What is 4 + 1?", "5")
    cases = [(copied, r"\boxed{2+3}"), (other, r"\boxed{2+3}"), (copied, "5")]
    assert verifier.judge(cases) == [("2+3", False), ("2+3", True), (None, False)]
    one_by_one = [verifier.verify(x.answer, "2+3", x.problem) for x in (copied, other)]
    assert one_by_one == [False, True]
    assert verifier.same(r"\frac{1}{2}", "0.5") and not verifier.same("1", "2")


# ------------------------------------------  answers that are right without knowing the reference

REFERENCES = r"""
0   1   -1   42   \frac{1}{2}   0.08   \sqrt{2}   \pi   \ln 2   3+4i   50\%   90^\circ
15\text{ cm}^2   52_8   1:2   (1,2)   [0,1)   (-\infty,0)\cup(0,\infty)   1,2   \{1,2,3\}
\pm 5   x^2+1   n(n+1)
y=2x+3   x\ge 3   \begin{pmatrix}1\\2\end{pmatrix}   \text{even}   \text{(C)}   Yes   f(x)=x^2
"""
# Not finite, a problem, nothing, everything, relations that always hold, guesses, programs, signs.
TRICKS = r"""
\infty-\infty   2^\infty   \frac{x}{0}   oo-oo   0\cdot oo   \int dx   \emptyset   (-\infty,\infty)
everything   \exists x   x   0x=0   0<1   x=0=1=2=5   0,1,-1,2,42   \{-1,0,1,2,3,42\}   1-100
\boxed{1} \text{ or } \boxed{42}   \text{A, B, C or D}   1\pm 0   S.Reals   max(2,42)   *   \text{ }
"""


def test_no_trick_is_right_for_two_references(verifier):
    """One that says a value may be right for that."""
    golds, tricks = (re.split(r" {3,}|\n", text.strip()) for text in (REFERENCES, TRICKS))
    for trick in [*tricks, '""', "\u200b", "\ud800", "\x00"]:
        pairs = [(gold, trick) for gold in golds]
        right_for = [gold for gold, _ in mistakes(verifier, pairs, False)]
        assert len(right_for) <= 1, (trick, right_for)
    assert mistakes(verifier, [("0", "oo-oo"), ("0", r"0\cdot oo")], False) == []


# ------------------------------------------------------------------------- hostile answers and fuzz

HOSTILE = r"""
9^{9^{9^9}}   9^9^9^9   \left(   }{   ∞   ٧   __import__('os').system('touch pwned')
().__class__.__bases__[0]   eval(input())   \input{/etc/passwd}   1e999999999   nan   None   True
\int_0^\infty e^{-x^2}dx   \sum_{i=1}^{10^9} i   \lim_{x\to0}\frac{\sin x}{x}
"""
LONG = ["{" * 5000, r"\frac{" * 300, "1" * 100_000, "x" * 100_000, "x," * 450, "\\" * 999]
UNREADABLE = ["\x00", "7\x00", "\ud800", "7\u202e"]
SLOW = [  # each takes all of its time, as some above do
    "(" * 900,
    "((10!)!)!",
    "2^{10^{10}}",
    r"\prod_{i=1}^{10^7} i",
    "(x+1)^{100000}(x+2)",
    r"\frac{1}{1+" * 60 + "1" + "}" * 60,
]
ANY_TIME = [*re.split(r" {3,}|\n", HOSTILE.strip()), *LONG, *UNREADABLE]


@pytest.mark.parametrize(
    "pred", ANY_TIME + [pytest.param(pred, marks=pytest.mark.long) for pred in SLOW]
)
def test_a_hostile_answer_is_wrong_runs_no_code_and_the_next_one_is_judged(
    pred, impatient, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert impatient.outcome("7", rf"so \boxed{{{pred}}}") == -1
    assert impatient.verify("1/2", "2/4")
    assert not os.listdir(tmp_path), "it ran code"


TOKENS = (
    r"""\frac { } ( ) [ ] + - ^ _ ! , ; : = < / * . $ % & ~ ' " # | \ \\ \{ \} \sqrt \pm \cup \in
    \le \infty \pi \text{ \text{and} \circ \% \cdot \binom \boxed{ \begin{pmatrix} \end{pmatrix}
    \sin \log x y i e AB and apples cm é ² √ ½ ٣ 0 1 2 3 4 5 6""".split()
    + [" ", "\n", "\x00", "\ud83d"]
)


@pytest.mark.parametrize("n", [300, pytest.param(2500, marks=pytest.mark.long)])
def test_random_tokens_are_never_a_large_prime(impatient, n):
    rng = random.Random(0)
    preds = ["".join(rng.choices(TOKENS, k=rng.randint(1, 30))) for _ in range(n)]
    assert mistakes(impatient, [("1000000007", pred) for pred in preds], False) == []


# ---------------------------------------------------------------------------------------- processes


def workers(parent: int | None = None) -> set[int]:
    """The live worker processes, or those that a process has started."""
    found = set()
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            state, its_parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            command = (entry / "cmdline").read_text()
        except OSError:
            continue
        if state != "Z" and "verify.py" in command and parent in (None, int(its_parent)):
            found.add(int(entry.name))
    return found


def started(make):
    """What `make` returns, and the process id of the one worker that it has started."""
    before = workers(os.getpid())
    result = make()
    (pid,) = workers(os.getpid()) - before
    return result, pid


def test_each_of_several_threads_gets_its_own_verdicts(verifier):
    pairs = [(f"{i}/2", f"{2 * i if i % 3 else 2 * i + 1}/4") for i in range(1, 19)]
    want = [pair for i, pair in enumerate(pairs, 1) if i % 3 == 0]
    with ThreadPoolExecutor(3) as threads:
        wrong = threads.map(lambda _: mistakes(verifier, pairs, True), range(3))
        assert [*wrong] == [want] * 3


def test_a_killed_worker_is_replaced_and_close_leaves_none():
    v, first = started(Verifier)
    os.kill(first, signal.SIGKILL)
    is_right, second = started(lambda: v.verify("1/2", "2/4"))
    v.close()
    assert is_right and not {first, second} & workers()
    before = workers(os.getpid())
    assert all(v.verify(str(i), f"0{i}") for i in range(2000)), "integers need no worker"
    assert workers(os.getpid()) == before
    with v:
        assert v.verify("1/2", "2/4"), "a closed verifier starts again"


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
        while worker in workers() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert worker not in workers()


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


def test_timeouts_are_counted(impatient):
    before = impatient.timeouts
    assert not impatient.verify("7", "((10!)!)!") and not impatient.verify("7", "8/3")
    assert impatient.timeouts == before + 1


def test_a_workers_memory_is_bounded_and_hunger_is_wrong():
    v, worker = started(lambda: Verifier(timeout_s=1.0))
    with v:
        limits = resource.prlimit(worker, resource.RLIMIT_AS)
        assert limits == (MEMORY_BYTES, MEMORY_BYTES) and MEMORY_BYTES <= 1 << 30
        assert not v.verify("7", "2^{10^{10}}") and v.verify("1/2", "2/4")


def test_without_math_verify_there_is_no_verifier(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    one_line(Verifier, "math_verify", kind=ImportError)


# --------------------------------------------------------------------------- a judge of one's own

MINE = '''
from lib import verify

class Even(verify.Judge):
    """Right is an even number."""

    def answer(self, text):
        return text.rpartition("=")[2].strip() or None

    def is_right(self, problem, answer):
        return answer.isdigit() and int(answer) % 2 == 0

class Other:
    """It is no judge."""

class Undecided(verify.Judge):
    """It says when two answers are one, and never which is right."""

    def same(self, one, other):
        return one.lower() == other.lower()
'''


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory, with a module of a domain in it that no other test has imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "mine.py").write_text(MINE)
    yield tmp_path
    sys.modules.pop("mine", None)


def test_a_judge_decides_by_the_answer_that_it_takes_from_the_text(here):
    x = asked("p", "no reference")
    with verify.load_judge("mine:Even")() as judge:
        verdicts = judge.judge([(x, "so = 4"), (x, "= 3"), (x, "nothing =")])
    assert verdicts == [("4", True), ("3", False), (None, False)]
    assert judge.same("4", "4") and not judge.same("4", "4.0")


def test_a_judge_by_default_takes_the_last_box_and_is_asked_nothing_without_one():
    class Level(verify.Judge):
        def is_right(self, problem, answer):
            return answer == str(problem.extra["level"])

    x = asked("p", "1", level=2)
    cases = [(x, text) for text in (r"\boxed{1} and \boxed{2}", r"<think>\boxed{3}", "none")]
    assert Level().judge(cases) == [("2", True), (None, False), (None, False)]


def test_tiny_numbers_are_compared_by_their_ratio():
    cases = [
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}", False),
        (r"\frac{1}{2004!}", r"\frac{1}{2004 \cdot 2003!}", True),
        (r"2^{-40}", r"2^{-41}", False),
        (r"2^{-40}", r"\frac{1}{1099511627776}", True),
        (r"\frac{1}{7000}", "0.000142857", True),
        ("0", r"10^{-9}", False),
        (r"50\%", r"\frac{1}{2}", True),
    ]
    for gold, pred, right in cases:
        assert verify.math_verdict(gold, pred) == right, (gold, pred)


NAMES = {  # a --verifier, and what is said of it
    "math": "MODULE:CLASS",
    "math:": "MODULE:CLASS",
    "nowhere:Even": "nowhere",
    "failing:Even": "ZeroDivisionError",
    "mine:Nope": "Nope",
    "mine:Other": "Judge",
    "mine:Undecided": "is_right",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_name_of_a_judge_is_one_line(name, here):
    (here / "failing.py").write_text("1 / 0")
    one_line(lambda: verify.load_judge(name), f"verifier {name}: ", NAMES[name])


def test_a_name_is_of_a_class_that_is_installed_or_in_the_working_directory(here):
    (here / "tabnanny.py").write_text(MINE)  # takes the place of no installed module
    one_line(lambda: verify.load_judge("tabnanny:Even"), "Even")
    with verify.load_judge("mine:Even")(timeout_s=1.0) as judge:
        assert judge.timeout_s == 1.0
