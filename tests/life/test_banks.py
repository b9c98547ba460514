"""The hand-written banks stay valid."""

import json

import pytest
from conftest import ROOT

import skills
from skills import SkillBank

BANKS = sorted((ROOT / "banks").glob("*.json"))


@pytest.mark.parametrize("path", BANKS, ids=lambda path: path.stem)
def test_a_hand_written_bank_says_so_and_is_saved_as_it_was_loaded(path, tmp_path):
    bank = SkillBank.load(path)
    assert "by hand" in bank.metadata["source"]
    for key in skills.FIELDS:
        ids = [entry[skills.IDS[key]] for entry in bank.collection(key)]
        assert ids == [f"{skills.PREFIX[key]}{i:03d}" for i in range(1, len(ids) + 1)]
    bank.save(tmp_path / "bank.json")
    assert json.loads((tmp_path / "bank.json").read_text()) == json.loads(path.read_text())
