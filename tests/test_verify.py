"""Verdicts: golden rows, hostile answers within their limit, threads, no process left behind."""

import os
import subprocess
import threading
import time

import pytest

import verify as V

GOLDEN = [  # gold, prediction, right?
    ("5", "5", 1), ("5", "05", 1), ("5", "5.0", 1), ("5", "6", 0), ("-5", "- 5", 1), ("1234", "1,234", 1), ("1234", "1{,}234", 1),
    ("12345", "12,345.5", 0), ("1/2", "0.5", 1), (r"\frac{1}{2}", r"\dfrac{2}{4}", 1), (r"\frac12", "1/2", 1), ("5", "x=5", 1),
    ("5", "$5$", 1), ("5", r"5 \text{ apples}", 1), ("12", r"12^{\circ}", 1), (r"2\sqrt{2}", r"\sqrt{8}", 1), (r"\pi", "3.14", 0),
    (r"\{1,2\}", r"\{2,1\}", 1), (r"\{1,2\}", r"\{1\}", 0), ("(1,2)", "(1, 2)", 1), ("(1,2)", "(2,1)", 0), ("1,2", "1", 0),
    ("1728", "1331 and 1728", 0), ("1331 and 1728", "1728", 0), ("blue", r"\text{blue}", 1), ("blue", "red", 0), ("5", "", 0),
    ("11/2", "1 1/2", 0), ("1 1/2", "1 1/2", 1), ("12", "1 2", 0), ("112", r"1\quad12", 0), ("5", "6=5", 0), ("17", r"17\\18", 0), ("2", "2..5", 0),
    ("10_8", "10_2", 0), ("(1,2)", r"\{1,2\}", 0), ("1,2", r"\{2,1\}", 1), (r"\frac{1}{2}", r"\frac 1 2", 1), ("5", "= 5", 1), ("5", "x = 5", 1),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", 1), ("5", "   ", 0), ("5", None, 0), (r"x^2+1", r"1+x^2", 1), (r"x^2+1", r"x^2-1", 0),
]  # fmt: skip
HOSTILE = ["9^{9^{9^9}}", "10000000000!", "(" * 900, r"\frac{" * 300, "1" * 100_000, "x^" * 400, "\x00", "\ud800", "}{", r"\left(",
           "__import__('os').system('touch pwned')", "{" * 5000, "1e999999999", "∞", "‮5"]  # fmt: skip


@pytest.fixture(scope="module")
def verifier():
    with V.Verifier(timeout_s=2.0) as v:
        yield v


@pytest.mark.parametrize("gold,pred,right", GOLDEN)
def test_golden(verifier, gold, pred, right):
    assert verifier.verify(gold, pred) is bool(right)


@pytest.mark.parametrize("pred", HOSTILE)
def test_hostile_answers_are_wrong_and_in_time(verifier, pred, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    verifier.verify("1/2", "2/4")  # a killed worker's restart is not the answer's fault
    began = time.perf_counter()
    assert verifier.verify("7", pred) is False and verifier.outcome("7", rf"so \boxed{{{pred}}}") == -1
    assert time.perf_counter() - began < 2 * 2.0 + V.START_S / 10
    assert not os.listdir(tmp_path)
    assert verifier.verify("1/2", "2/4")  # and it goes on working


def test_outcome_is_plus_or_minus_one(verifier):
    assert verifier.outcome("5", r"\boxed{5}") == 1
    assert verifier.outcome("5", r"\boxed{6}") == -1
    assert verifier.outcome("5", "5") == -1


def test_equal_strings_need_no_reading(verifier):
    """The fallback is reached: what math-verify can't read may still be the same string."""
    assert verifier.verify("Tuesday, noon", "Tuesday,  noon.")
    assert verifier.verify("z" * 3000, "z" * 3000) and not verifier.verify("z" * 3000, "z" * 2999)


def test_from_threads_and_in_order():
    pairs = [(f"{i}/2", f"{2 * i if i % 3 else 2 * i + 1}/4") for i in range(1, 19)]
    want = [i % 3 != 0 for i in range(1, 19)]
    results = {}
    with V.Verifier(timeout_s=5.0, workers=2) as v:
        threads = [threading.Thread(target=lambda n=n: results.update({n: v.verify_many(pairs)})) for n in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert results == {0: want, 1: want, 2: want}


def test_a_killed_worker_is_replaced_and_none_is_left():
    v = V.Verifier(timeout_s=5.0)
    assert v.verify("1/2", "2/4")
    pid = v._workers[0].process.pid
    os.kill(pid, 9)
    assert v.verify("1/2", "2/4") and v._workers[0].process.pid != pid
    last = v._workers[0].process.pid
    v.close()
    assert subprocess.run(["ps", "-p", f"{pid},{last}"], capture_output=True).returncode == 1


def test_numbers_are_decided_without_a_worker():
    v = V.Verifier()
    began = time.perf_counter()
    assert all(v.verify_many([(str(i), f"{i}.0") for i in range(2000)]))
    assert v._workers[0].process is None and time.perf_counter() - began < 1


def test_bad_settings():
    for bad in ({"timeout_s": 0}, {"workers": 0}):
        with pytest.raises(ValueError, match="timeout_s > 0 and workers >= 1"):
            V.Verifier(**bad)
