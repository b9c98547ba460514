"""The arithmetic of the comparison, by hand.

python -m pytest research/methods
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import pytest

from research.methods import compare


def test_an_interval_and_an_area_by_hand():
    # Mean .5, standard deviation .1, three seeds: 4.30 * .1 / sqrt(3) = .248
    assert compare.with_interval([0.4, 0.5, 0.6], "+") == "+50.0% ± 24.8%"
    # (0 + .5) / 2 * 5 = 1.25 and (.5 + 1) / 2 * 15 = 11.25, over 20 steps
    assert compare.area({0: 0.0, 5: 0.5, 20: 1.0}) == pytest.approx(12.5 / 20)


def test_an_accuracy_at_a_budget_by_hand():
    """10% at first; 100 tokens later 30%, and after 300 in all 50%."""
    base = {"accuracy": {"0": 0.1}}
    result = {"name": "sgsd-0", "accuracy": {"5": 0.3, "20": 0.5}, "forward_tokens": 4000}
    result["generated_at"] = {"5": 100, "20": 300}
    # Half-way between 100 and 300 tokens, and between 5 and 20 steps at 200 forward tokens each
    assert compare.accuracy_at(result, base, "generated_tokens", 200) == pytest.approx(0.4)
    assert compare.accuracy_at(result, base, "forward_tokens", 2500) == pytest.approx(0.4)
    assert compare.accuracy_at(result, base, "steps", 5) == pytest.approx(0.3)
    with pytest.raises(AssertionError):
        compare.accuracy_at(result, base, "generated_tokens", 301)
