"""What experiments/with_skills.py computes, by hand; and its command on the tiny model."""

import collections
import shutil

import pytest
import with_skills
from conftest import ROOT, make_bank

import files
import skills

TINY = ROOT / "tiny"


def words_of(bank):
    found = []
    for entry in bank.general_skills + bank.common_mistakes:
        for name, text in entry.items():
            if not name.endswith("_id"):
                found += text.split()
    return found


def test_a_shuffled_bank_has_the_same_words_and_as_many_in_each_field(tmp_path):
    bank = skills.SkillBank.load(ROOT / "banks" / "word_problems.json")
    before = words_of(bank)
    other = with_skills.shuffled(bank, 0)
    assert words_of(bank) == before != words_of(other)
    assert collections.Counter(before) == collections.Counter(words_of(other))
    for old, new in zip(bank.general_skills, other.general_skills, strict=True):
        assert old["skill_id"] == new["skill_id"] and old.keys() == new.keys()
        counts = [len(entry["principle"].split()) for entry in (old, new)]
        assert counts[0] == counts[1]
    other.save(tmp_path / "bank.json")
    assert skills.SkillBank.load(tmp_path / "bank.json") == other


def test_a_table_by_hand():
    test = {"samples": 2, "boxed": 1.0, "cut": 0.0, "tokens": 10.0, "prompt": 50.0}
    kept = {"plain": {**test, "right": "1000"}, "hand": {**test, "right": "1110"}}
    kept["shuffled"] = {**test, "right": "1110", "prompt": 80.0}
    _, _, plain, hand, noise = with_skills.table(kept)
    assert (
        plain.startswith("| plain | 2 | 25.0% (") and "|  |  | 100.0% | 0.0% | 10 | 50 |" in plain
    )
    assert hand.startswith("| hand | 2 | 75.0% (") and "| +50.0% (+50.0% to +50.0%) |" in hand
    assert "| +0.0% (+0.0% to +0.0%) |" in hand and noise.endswith("| 10 | 80 |")


def test_the_page_shows_what_the_command_prints(capsys):
    with_skills.main([])
    page = (ROOT / "results" / "with_skills.md").read_text()
    assert capsys.readouterr().out.strip() in page


@pytest.mark.long
def test_the_command_goes_on_and_keeps_scores(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "a folder"
    for name in ("model", "encoder"):
        shutil.copytree(TINY / name, folder / name)
    lines = (TINY / "test.jsonl").read_text().splitlines(keepends=True)
    (folder / "test.jsonl").write_text("".join(lines[:4]))
    make_bank(tmp_path / "bank.json", 4, 4)
    monkeypatch.setattr(with_skills, "KEPT", tmp_path / "kept.json")
    monkeypatch.setattr(with_skills, "SETTINGS", "--max-new-tokens 32 --num-skills 2")
    for samples in (2, 1):  # two are kept where one is asked for later
        argv = [str(folder), "--banks", f"hand={tmp_path / 'bank.json'}", "--samples", str(samples)]
        with_skills.main(argv)
    kept = files.read_json(tmp_path / "kept.json")
    assert list(kept) == ["plain", "hand", "shuffled"]
    assert all(len(test["right"]) == 8 for test in kept.values())
    assert kept["plain"]["prompt"] < kept["hand"]["prompt"]
    assert capsys.readouterr().out.count("| hand | ") == 2
