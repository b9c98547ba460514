"""The seam of the verdict: a judge of one's own, and how it is named."""

import sys
import types

import pytest

from lib import verify

MINE = '''
from lib import verify

class Even(verify.Judge):
    """Right is an even number."""

    def answer(self, text):
        return text.rpartition("=")[2].strip() or None

    def is_right(self, problem, answer):
        return answer.isdigit() and int(answer) % 2 == 0

class Batch(verify.Verifier):
    def judge(self, cases):
        return [verify.Verdict("x", True) for _ in cases]

class Missing(verify.Judge):
    """It decides nothing."""

class Unasked(verify.Verifier):
    def is_right(self, problem, answer):
        return True

class Other:
    """It is of another family."""
'''


def asked(problem, answer, **extra):
    return types.SimpleNamespace(problem=problem, answer=answer, extra=extra)


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
        verdicts = judge.judge([(x, "so = 4"), (x, "= 3"), (x, "nothing ="), (x, "= four")])
    assert verdicts == [("4", True), ("3", False), (None, False), ("four", False)]
    assert judge.judge([]) == [] and judge.timeouts == 0
    assert judge.same("4", "4") and not judge.same("4", "4.0")


def test_a_judge_by_default_takes_the_last_box_and_is_asked_nothing_without_one():
    requests = []

    class Recorder(verify.Judge):
        def is_right(self, problem, answer):
            requests.append((problem.extra, answer))
            return True

    x = asked("p", "1", level=3)
    texts = [r"\boxed{1} and \boxed{2}", r"<think>\boxed{3}", "none"]
    verdicts = Recorder().judge([(x, text) for text in texts])
    assert verdicts == [("2", True), (None, False), (None, False)]
    assert requests == [({"level": 3}, "2")]


def test_the_mathematical_judge_knows_the_problem():
    """A copied formula is shown as the answer, and is wrong; in a batch as one by one."""
    copied, other = asked("What is 2 + 3?", "5"), asked("What is 4 + 1?", "5")
    with verify.Verifier() as judge:
        verdicts = judge.judge([(x, r"\boxed{2+3}") for x in (copied, other)] + [(copied, "5")])
        assert verdicts == [("2+3", False), ("2+3", True), (None, False)]
        assert [judge.is_right(x, "2+3") for x in (copied, other)] == [False, True]
        assert judge.same(r"\frac{1}{2}", "0.5") and not judge.same("1", "2")


@pytest.mark.parametrize(
    "wrong", [{"timeout_s": 0.0}, {"timeout_s": 1e7}, {"timeout_s": float("nan")}, {"workers": 0}]
)
@pytest.mark.parametrize("kind", [verify.Judge, verify.Verifier])
def test_limits_that_make_no_sense_are_refused_for_every_judge(kind, wrong):
    with pytest.raises(ValueError, match="need timeout_s in 0..1e6 and workers >= 1"):
        kind(**wrong)


NAMES = {  # a --verifier, and what is said of it
    "mine": "write MODULE:CLASS",
    ":Even": "write MODULE:CLASS",
    "nowhere:Even": "not loaded (ModuleNotFoundError: No module named 'nowhere')",
    "broken:Even": "not loaded (SyntaxError",
    "failing:Even": "not loaded (ZeroDivisionError: division by zero)",
    "mine:Nope": "not loaded (AttributeError: module 'mine' has no attribute 'Nope')",
    "mine:verify": "verify must be a subclass of verify.Judge",
    "mine:Other": "Other must be a subclass of verify.Judge",
    "mine:Missing": "Missing needs a method judge, or is_right",
    "mine:Unasked": "Unasked needs a method judge, or is_right (which the judge of Verifier does",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_name_of_a_judge_is_one_line(here, name):
    (here / "broken.py").write_text("def")
    (here / "failing.py").write_text("1 / 0")
    with pytest.raises(ValueError) as error:
        verify.load_judge(name)
    assert str(error.value).startswith(f"verifier {name}: ") and NAMES[name] in str(error.value)
    assert "\n" not in str(error.value)


def test_a_name_is_of_a_class_that_is_installed_or_in_the_working_directory(here):
    (here / "verify.py").write_text("class Verifier: pass")  # takes no place of ours
    assert verify.load_judge("lib.verify:Verifier") is verify.Verifier
    with verify.load_judge("mine:Batch")(timeout_s=1.0, workers=2) as judge:
        assert judge.judge([(asked("p", "1"), "text")]) == [("x", True)]
        assert (judge.timeout_s, judge.workers) == (1.0, 2)
