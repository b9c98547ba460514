"""The hand-written banks stay valid, and the script that checks a bank sees its faults."""

import json

import pytest
from conftest import ROOT, make_bank

import skills
from research.banks import check_bank
from skills import SkillBank

SIZES = {"competition_math": 48, "word_problems": 24}  # of either list
MOST_CHARACTERS = 220  # of a field: two sentences


def hand_written(name):
    return SkillBank.load(ROOT / "banks" / f"{name}.json")


def test_every_hand_written_bank_is_tested():
    assert {path.stem for path in (ROOT / "banks").glob("*.json")} == set(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_a_hand_written_bank_loads_and_carries_no_problems_numbers(name, tmp_path):
    bank = hand_written(name)
    assert {len(bank.collection(key)) for key in skills.FIELDS} == {SIZES[name]}
    assert check_bank.lint(bank) == []
    bank.save(tmp_path / "bank.json")
    assert json.loads((tmp_path / "bank.json").read_text()) == json.loads(
        (ROOT / "banks" / f"{name}.json").read_text()
    )


@pytest.mark.parametrize("name", SIZES)
def test_a_hand_written_bank_says_that_it_is_no_part_of_the_paper(name):
    source = hand_written(name).metadata["source"]
    assert "by hand" in source and "no part of the paper" in source


@pytest.mark.parametrize("name", SIZES)
def test_ids_of_a_hand_written_bank_count_up_and_are_not_those_of_online_evolution(name):
    bank = hand_written(name)
    for key, prefix in skills.PREFIX.items():
        ids = [entry[skills.IDS[key]] for entry in bank.collection(key)]
        assert ids == [f"{prefix}{number:03d}" for number in range(1, SIZES[name] + 1)]


@pytest.mark.parametrize("key", skills.FIELDS)
def test_each_text_of_the_hand_written_banks_is_short_and_stands_once(key):
    entries = [entry for name in SIZES for entry in hand_written(name).collection(key)]
    for field in skills.FIELDS[key]:
        texts = [entry[field].casefold() for entry in entries]
        assert len(set(texts)) == len(texts)
        assert all(0 < len(text) <= MOST_CHARACTERS and text == text.strip() for text in texts)


def test_entries_that_are_never_or_always_retrieved_are_named():
    """The bounds are 1% and 90%; a set that is not judged does not count."""
    shares = {"meant": {"a": 0.0, "b": 0.01, "c": 0.9, "d": 0.91}}
    shares["other"] = dict.fromkeys("abcd", 0.5)
    assert check_bank.rare_entries(shares, ["meant"]) == ["a"]
    assert check_bank.constant_entries(shares, ["meant"]) == ["d"]


def write_problems(path):
    rows = [{"problem": f"Add {i} and {i}.", "answer": str(2 * i)} for i in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_check_of_a_bank_fails_where_two_entries_say_the_same(tmp_path, world_dir, capsys):
    bank = make_bank(n_skills=3, n_mistakes=3)
    bank.general_skills[2] = {**bank.general_skills[0], "skill_id": "gen_003"}
    bank.common_mistakes[1]["how_to_avoid"] = "Use 17."
    bank.save(tmp_path / "bank.json")
    write_problems(tmp_path / "data.jsonl")
    argv = [str(tmp_path / "bank.json"), "--data", str(tmp_path / "data.jsonl")]
    argv += ["--encoder", str(world_dir / "encoder"), "--tokenizer", str(world_dir / "model")]
    assert check_bank.main(argv) == 1
    printed = capsys.readouterr().out
    assert "near-copies: gen_001, gen_003" in printed
    assert "a problem's numbers: err_002 (17)" in printed
    assert "nearly always retrieved: gen_001" in printed  # three entries, eight places
