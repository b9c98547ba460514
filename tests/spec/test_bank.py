"""The bank: its schema, lossless files, rank-aligned pairs, its index, and lines about it."""

import json

import numpy as np
import pytest
from conftest import ROOT, fake_embed, make_bank

import skills
from skills import SkillBank

RELEASED = sorted((ROOT.parent / "shared" / "banks").glob("*.json"))
BANKS = [path for path in RELEASED if not path.stem.startswith("candidates")]


def ids(pairs):
    return [(p.skill["skill_id"], p.mistake["mistake_id"]) for p in pairs]


def test_retrieval_by_hand():
    """Query (3, 4), not normalised. Skills (1,0): .6, (0,2): .8, (6,8): 1. Mistakes (0,-1): -.8,
    (4,3): .96. Three skills and two mistakes make two pairs (S8)."""
    bank = make_bank(n_skills=3, n_mistakes=2)
    vectors = {"q": (3, 4)}
    for entry, vector in zip(bank.general_skills, [(1, 0), (0, 2), (6, 8)]):
        vectors[skills.entry_text(entry, "general_skills")] = vector
    for entry, vector in zip(bank.common_mistakes, [(0, -1), (4, 3)]):
        vectors[skills.entry_text(entry, "common_mistakes")] = vector
    pairs = bank.retrieve("q", 8, lambda texts: np.array([vectors[t] for t in texts]))
    assert ids(pairs) == [("gen_003", "err_002"), ("gen_002", "err_001")]
    scores = [(p.s_g, p.s_e) for p in pairs]
    np.testing.assert_allclose(scores, [(1, 0.96), (0.8, -0.8)], atol=1e-6)


def test_the_best_k_are_those_of_all():
    bank = make_bank(n_skills=10, n_mistakes=10)
    every = bank.retrieve("carry the one", 10, fake_embed)
    for k in range(1, 11):
        assert bank.retrieve("carry the one", k, fake_embed) == every[:k]


def test_equal_scores_keep_the_banks_order():
    pairs = make_bank().retrieve("q", 4, lambda texts: np.ones((len(texts), 3)))
    assert [p.skill["skill_id"] for p in pairs] == ["gen_001", "gen_002", "gen_003", "gen_004"]


def test_an_empty_list_gives_no_pairs():
    assert SkillBank([], make_bank().common_mistakes).retrieve("q", 3, fake_embed) == []


def test_retrieving_no_pair_is_an_error():
    with pytest.raises(ValueError, match=r"Eq. 2.*k >= 1, got 0"):
        make_bank().retrieve("q", 0, fake_embed)


def test_an_entry_is_embedded_as_its_three_fields():
    """S10."""
    bank = make_bank()
    skill = skills.entry_text(bank.general_skills[0], "general_skills")
    mistake = skills.entry_text(bank.common_mistakes[0], "common_mistakes")
    assert skill == "Use add. Always add with care.. When you add."
    assert mistake == "Forgetting to add.. Haste.. Remember add."


def test_entries_are_embedded_once():
    bank, calls = make_bank(), []

    def embed(texts):
        calls.append(len(texts))
        return fake_embed(texts)

    for _ in range(3):
        bank.retrieve("carry the one", 2, embed)
    assert calls == [1, 4, 4, 1, 1]


def test_a_replaced_entry_is_embedded_anew():
    bank = make_bank()
    for i in range(30):  # a freed dict's address is often taken by the next one
        bank.retrieve("q", 4, fake_embed)
        del bank.general_skills[0]
        texts = {"title": "z" * i, "principle": "q", "when_to_apply": "w"}
        bank.general_skills.append({"skill_id": f"dyn_{i}", **texts})
        fresh = SkillBank(list(bank.general_skills), bank.common_mistakes)
        assert bank.retrieve("qz", 4, fake_embed) == fresh.retrieve("qz", 4, fake_embed)


@pytest.mark.parametrize("text", ["\\frac{1}{2} é", "half \ud83d é"], ids=["LaTeX", "surrogate"])
def test_save_and_load_lose_nothing(text, tmp_path):
    bank = make_bank()
    bank.extra["task_specific_skills"] = {"x": [1]}
    bank.general_skills[0]["note"] = text
    bank.save(tmp_path / "b.json")
    assert SkillBank.load(tmp_path / "b.json") == bank


@pytest.mark.skipif(not BANKS, reason="the authors' released banks are not here")
@pytest.mark.parametrize("path", BANKS, ids=lambda path: path.stem)
def test_the_released_banks_come_back_byte_for_byte(path, tmp_path):
    """With the sizes of App. C."""
    bank = SkillBank.load(path)
    sizes = len(bank.general_skills), len(bank.common_mistakes)
    assert sizes in ((28, 98), (24, 15), (46, 8))
    bank.save(tmp_path / "b.json")
    assert (tmp_path / "b.json").read_bytes() == path.read_bytes()


def test_a_save_that_fails_names_the_file_and_leaves_nothing_behind(tmp_path):
    (tmp_path / "bank.json").mkdir()
    with pytest.raises(OSError, match=r"bank .*/bank\.json: not saved"):
        make_bank().save(tmp_path / "bank.json")
    assert [path.name for path in tmp_path.iterdir()] == ["bank.json"]


SKILL = {"skill_id": "gen_001", "title": "t", "principle": "p", "when_to_apply": "w"}
NO_JSON = "cannot be read as JSON"


def bank_text(general_skills=(), common_mistakes=(), metadata=None):
    return json.dumps(
        {
            "general_skills": general_skills,
            "common_mistakes": common_mistakes,
            "metadata": {} if metadata is None else metadata,
        }
    )


WRONG = [
    (None, NO_JSON),
    ("{", NO_JSON),
    ("[" * 100_000, NO_JSON),
    ('{"a": "é"}'.encode("utf-16"), NO_JSON),
    ("[]", "a JSON object is wanted, got list"),
    ('{"skills": []}', "`general_skills` must be a list; found: skills"),
    (bank_text([{**SKILL, "title": 3}]), "general_skills[0] lacks the strings title (App. C)"),
    (bank_text([{"title": "t"}]), "lacks the strings skill_id, principle, when_to_apply"),
    (bank_text([{**SKILL, "sources": 5}]), "general_skills[0] needs its own id, and a list"),
    (bank_text([SKILL] * 2), "general_skills[1] needs its own id, and"),
    (bank_text([], ["text"]), "common_mistakes[0] lacks"),
    (bank_text(metadata=[]), "`metadata` must be an object"),
    (bank_text(metadata={"updates": 3}), "`updates` in it a list"),
]


@pytest.mark.parametrize("content,words", WRONG)
def test_a_wrong_bank_is_one_line_that_names_the_file_and_the_entry(content, words, tmp_path):
    path = tmp_path / "b.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as error:
        SkillBank.load(path)
    line = str(error.value)
    assert line.startswith(f"bank {path}: ") and words in line and "\n" not in line


def test_a_bank_without_metadata_can_be_loaded(tmp_path):
    (tmp_path / "b.json").write_text('{"general_skills": [], "common_mistakes": []}')
    assert SkillBank.load(tmp_path / "b.json") == SkillBank([], [])


# -------------------------------------------------------------------------- lines about a bank


def test_the_line_about_a_bank_says_what_it_was_made_from_and_what_it_lacks():
    assert skills.bank_line(make_bank(), 4) == "bank: 4 skills and 4 mistakes"
    line = skills.bank_line(make_bank(n_skills=3), 4)
    assert line == "bank: 3 skills and 4 mistakes; enough for 3 teachers, not for 4 (S8)"
    line = skills.bank_line(make_bank(n_mistakes=0), 4)
    assert line == "bank: 4 skills and 0 mistakes; no pair, no teacher, no loss (S8)"
    bank = make_bank(n_mistakes=2)
    bank.metadata |= {"input_general_skills": 32, "input_common_mistakes": 20}
    bank.metadata |= {"seed_solutions": 64, "right_seed_solutions": 31, "lost_replies": {}}
    line = "bank: 4 skills (from 32 candidates) and 2 mistakes (from 20)"
    line += ", written from 64 solutions, 31 correct"
    assert skills.bank_line(bank, 2) == line
    bank.metadata["lost_replies"] = {"no JSON": 2, "cut off": 1}
    assert skills.bank_line(bank, 2) == f"{line}; 3 replies lost (2 no JSON, 1 cut off)"


def test_the_line_about_an_evolution_says_what_it_did_or_why_nothing():
    old, window = make_bank(), [{"r": 1}, {"r": -1}, {"r": -1}, {"r": -1}]
    line = skills.evolution_line(old, old, window, {})
    assert line == "bank: success 0.25 is not below the gate: kept as it is"
    update = {}
    for key, numbers in zip(skills.FIELDS, [(3, 2, 1, 1), (5, 4, 0, 3)]):
        names = ("candidate", "merged", "copied", "net_new")
        update |= {f"{name}_{key}": n for name, n in zip(names, numbers)}
    new = SkillBank([], [], {"updates": [update]})
    line = "bank: success 0.25"
    line += "; 3 candidate skills, 2 after merging, 1 copies of static entries dropped, net new 1"
    line += "; 5 candidate mistakes, 4 after merging, 0 copies of static entries dropped, net new 3"
    assert skills.evolution_line(old, new, window, {}) == f"{line}; 0 replies lost"
    assert skills.evolution_line(old, new, window, {"cut off": 2}).endswith(" lost (2 cut off)")
