"""The changes of mutate.py quote the files as they are."""

import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from research.robustness.mutate import CHANGES


@pytest.mark.parametrize("file", CHANGES)
def test_the_text_of_a_change_is_in_its_file_once(file):
    text = (ROOT / file).read_text()
    assert [change.before for change in CHANGES[file] if text.count(change.before) != 1] == []
