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
