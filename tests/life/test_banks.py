"""The hand-written banks stay valid."""

import json
import re

import pytest
from conftest import ROOT

import skills
from skills import SkillBank

SIZES = {"competition_math": 48, "word_problems": 24}  # of either list
MOST_CHARACTERS = 220  # of a field: two sentences


def hand_written(name):
    return SkillBank.load(ROOT / "banks" / f"{name}.json")


def test_every_hand_written_bank_is_tested():
    assert {path.stem for path in (ROOT / "banks").glob("*.json")} == set(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_a_hand_written_bank_says_so_and_is_saved_as_it_was_loaded(name, tmp_path):
    bank = hand_written(name)
    assert "by hand" in bank.metadata["source"]
    bank.save(tmp_path / "bank.json")
    files = [tmp_path / "bank.json", ROOT / "banks" / f"{name}.json"]
    assert json.loads(files[0].read_text()) == json.loads(files[1].read_text())


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("key", skills.FIELDS)
def test_ids_of_a_hand_written_bank_count_up_and_are_not_those_of_online_evolution(key, name):
    ids = [entry[skills.IDS[key]] for entry in hand_written(name).collection(key)]
    assert ids == [f"{skills.PREFIX[key]}{number:03d}" for number in range(1, SIZES[name] + 1)]


@pytest.mark.parametrize("key", skills.FIELDS)
def test_each_text_of_the_hand_written_banks_is_short_and_general_and_stands_once(key):
    """A number of two digits would be one problem's."""
    entries = [entry for name in SIZES for entry in hand_written(name).collection(key)]
    for field in skills.FIELDS[key]:
        texts = [entry[field].casefold() for entry in entries]
        assert len(set(texts)) == len(texts)
        for text in texts:
            assert 0 < len(text) <= MOST_CHARACTERS and text == text.strip()
            assert not re.search(r"\d\d", text), text
