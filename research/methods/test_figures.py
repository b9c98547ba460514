"""The arithmetic of the comparison, by hand.

python -m pytest research/methods
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import pytest

from research.methods import compare, field


def test_rows_are_compared_where_both_have_spent_as_much():
    def run(method, accuracy, tokens):
        job = {"method": method, "seed": 0, "generated_tokens": tokens[-1], "rate": 1e-3}
        job["accuracy"] = dict(zip(("5", "20", "60"), accuracy))
        return job | {"generated_at": dict(zip(("5", "20", "60"), tokens))}

    results = {
        "base-0": {"method": "base", "seed": 0, "accuracy": {"0": 0.0}},
        "sgsd-0": run("sgsd", (0.2, 0.4, 0.6), (50, 200, 600)),
        "grpo-0": run("grpo", (0.1, 0.5, 0.9), (100, 400, 1200)),
    }
    # SGSD's 600 tokens are a quarter of the way of GRPO from 400 to 1,200: .5 + (.9 - .5) / 4
    at_600 = field.at({"results": results}, "grpo", "generated_tokens", [600])
    assert at_600 == pytest.approx([0.6])
    # Before the first evaluation, from the base model on: half of .1
    at_50 = field.at({"results": results}, "grpo", "generated_tokens", [50])
    assert at_50 == pytest.approx([0.05])


def test_intervals_areas_and_equal_costs_by_hand():
    # Mean .5, standard deviation .1, three seeds: 4.30 * .1 / sqrt(3) = .248
    assert compare.with_interval([0.4, 0.5, 0.6], "+") == "+50.0% ± 24.8%"
    # (0 + .5) / 2 * 5 = 1.25 and (.5 + 1) / 2 * 15 = 11.25, over 20 steps
    assert compare.area({0: 0.0, 5: 0.5, 20: 1.0}) == pytest.approx(12.5 / 20)
    # From .5 at step 5 to 1 at step 20: three of fifteen steps further it is .6
    assert field.value_at([0, 5, 20], [0.0, 0.5, 1.0], 8) == pytest.approx(0.6)
