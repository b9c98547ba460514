"""The bank: schema, lossless files, rank-aligned pairs, an index, and a bank without pairs."""

import re

import conftest
import numpy as np
import pytest
from conftest import ROOT, fake_embed, make_bank

import config
import policy
import skills
from bank import lint, refuse_without_pairs
from cli import UserError
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


def test_the_encoder_gives_the_same_unit_vector_for_the_same_text(world_dir):
    embed = policy.load_encoder(str(world_dir / "encoder"), "cpu")
    x = embed(["a b", "a b", "c"])
    assert x.shape == (3, 16) and np.array_equal(x[0], x[1])
    np.testing.assert_allclose(np.linalg.norm(x, axis=1), 1, atol=1e-5)
    assert np.array_equal(embed(["a b"])[0], x[0])


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


def test_lint_names_entries_with_one_problems_numbers():
    bank = make_bank(n_skills=3, n_mistakes=2)
    assert lint(bank) == ""
    bank.general_skills[1]["principle"] = "Of 2024 and 2.5 take 10, 3 and 360."
    bank.common_mistakes[0]["how_to_avoid"] = "Use 17."
    start = "bank: 2 entries carry numbers that look like one problem's: "
    assert lint(bank) == start + "gen_002 (2024, 2.5), err_001 (17)"


REASONS = [  # right and cut off of eight seed solutions, lost replies, and what is said
    (0, 1, {}, "none of 8 seed solutions was right, so there are no skills"),
    (8, 0, {}, "all 8 seed solutions were right, so there are no mistakes"),
    (0, 5, {}, "5 of 8 seed solutions were cut off at --cold-start-tokens 38912: raise it"),
    (4, 0, {"no JSON": 3}, "3 replies were lost (no JSON): let another model write"),
]


@pytest.mark.parametrize("right,cut,lost,words", REASONS)
@pytest.mark.parametrize("sizes", [(0, 0), (2, 0), (0, 2)])
def test_a_bank_with_one_empty_list_is_refused_with_its_cause(right, cut, lost, words, sizes):
    bank = conftest.make_bank(None, *sizes)
    bank.metadata |= {"seed_solutions": 8, "right_seed_solutions": right}
    bank.metadata |= {"truncated_seed_solutions": cut, "lost_replies": lost}
    with pytest.raises(UserError, match=re.escape(words)):
        refuse_without_pairs(bank, config.Config(), "--resume RUN")
    refuse_without_pairs(bank, config.Config(allow_empty_bank=True), "--resume RUN")
    refuse_without_pairs(conftest.make_bank(), config.Config(), "--resume RUN")
