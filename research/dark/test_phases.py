"""python -m pytest research/dark"""

import pathlib
import sys

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[2])]

import phases
from phases import dark


def test_the_odds_of_an_error_and_fishers_p():
    assert round(dark.error_chance("boats", []), 3) == 0.948  # 1 / (1 + exp(-2.9))
    assert dark.error_chance("sale", []) == dark.usual_chance("sale", [])
    assert [round(phases.fisher(a, 20, b, 20), 3) for a, b in ((6, 0), (9, 2))] == [0.02, 0.031]
