"""The hand-written banks stay valid."""

import json
import re

import pytest
from conftest import ROOT

import skills
from skills import SkillBank

BANKS = sorted((ROOT / "banks").glob("*.json"))
MOST_CHARACTERS = 220  # of a field: two sentences


@pytest.mark.parametrize("path", BANKS, ids=lambda path: path.stem)
def test_a_hand_written_bank_says_so_and_is_saved_as_it_was_loaded(path, tmp_path):
    bank = SkillBank.load(path)
    assert "by hand" in bank.metadata["source"]
    for key in skills.FIELDS:
        ids = [entry[skills.IDS[key]] for entry in bank.collection(key)]
        assert ids == [f"{skills.PREFIX[key]}{i:03d}" for i in range(1, len(ids) + 1)]
    bank.save(tmp_path / "bank.json")
    assert json.loads((tmp_path / "bank.json").read_text()) == json.loads(path.read_text())


@pytest.mark.parametrize("key", skills.FIELDS)
def test_each_text_of_the_hand_written_banks_is_short_and_general_and_stands_once(key):
    """A number of two digits would be one problem's."""
    entries = [entry for path in BANKS for entry in SkillBank.load(path).collection(key)]
    for field in skills.FIELDS[key]:
        texts = [entry[field].casefold() for entry in entries]
        assert len(set(texts)) == len(texts) > 0
        for text in texts:
            assert 0 < len(text) <= MOST_CHARACTERS and text == text.strip()
            assert not re.search(r"\d\d", text), text
