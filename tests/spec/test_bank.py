"""The bank B = {G, E} of §2.1, Eq. 2, and its file (App. C, Tab. 5)."""

import json

import numpy as np
import pytest
from conftest import ROOT, fake_embed, item, make_bank, one_line

import skills
from skills import SkillBank

RELEASED = sorted((ROOT.parent / "shared" / "banks").glob("*.json"))
BANKS = [path for path in RELEASED if not path.stem.startswith("candidates")]


def test_eq2_skills_and_mistakes_are_ranked_by_cosine_and_paired_rank_by_rank():
    """Query (3, 4), not normalised. Skills (1,0): .6, (0,2): .8, (6,8): 1. Mistakes (0,-1): -.8,
    (4,3): .96. Three skills and two mistakes make two pairs (S8)."""
    bank = make_bank(n_skills=3, n_mistakes=2)
    vectors = {"q": (3, 4)}
    for entry, vector in zip(bank.general_skills, [(1, 0), (0, 2), (6, 8)]):
        vectors[skills.entry_text(entry, "general_skills")] = vector
    for entry, vector in zip(bank.common_mistakes, [(0, -1), (4, 3)]):
        vectors[skills.entry_text(entry, "common_mistakes")] = vector
    pairs = bank.retrieve("q", 8, lambda texts: np.array([vectors[t] for t in texts]))
    ids = [(pair.skill["skill_id"], pair.mistake["mistake_id"]) for pair in pairs]
    assert ids == [("gen_003", "err_002"), ("gen_002", "err_001")]
    similarities = [(pair.s_g, pair.s_e) for pair in pairs]
    np.testing.assert_allclose(similarities, [(1, 0.96), (0.8, -0.8)], atol=1e-6)


def test_the_best_k_are_those_of_all():
    bank = make_bank(n_skills=10, n_mistakes=10)
    every = bank.retrieve("carry the one", 10, fake_embed)
    for k in range(1, 11):
        assert bank.retrieve("carry the one", k, fake_embed) == every[:k]
    assert SkillBank([], bank.common_mistakes).retrieve("carry the one", 3, fake_embed) == []


def test_equal_scores_keep_the_banks_order():
    """Sixty of either kind, of which every second is nearer: some sorts keep the order of a few."""
    lists = []
    for key in skills.KINDS:
        lists.append([{skills.KINDS[key].id_field: str(i), **item(str(i), key)} for i in range(60)])

    def embed(texts):  # cosines of 1 and .6 with the query
        return np.array([(1, 0) if int(text.split()[0]) % 2 else (3, 4) for text in texts])

    pairs = SkillBank(*lists).retrieve("1 of them", 60, embed)
    want = [str(i) for i in [*range(1, 60, 2), *range(0, 60, 2)]]
    assert [pair.skill["skill_id"] for pair in pairs] == want
    assert [pair.mistake["mistake_id"] for pair in pairs] == want


def test_an_entry_is_embedded_as_its_three_fields():
    """S10."""
    bank = make_bank()
    skill = skills.entry_text(bank.general_skills[0], "general_skills")
    mistake = skills.entry_text(bank.common_mistakes[0], "common_mistakes")
    assert skill == "Use add. Always add with care.. When you add."
    assert mistake == "Forgetting to add.. Haste.. Remember add."


def test_entries_are_embedded_once_and_a_replaced_one_anew():
    """A freed dict's address is often taken by the next one."""
    bank, calls = make_bank(), []
    embed = lambda texts: calls.append(len(texts)) or fake_embed(texts)  # noqa: E731
    for _ in range(3):
        bank.retrieve("carry the one", 2, embed)
    assert calls == [1, 4, 4, 1, 1]
    for i in range(30):
        bank.general_skills[:] = [{**SKILL, "title": "z" * i}]
        fresh = SkillBank(list(bank.general_skills), bank.common_mistakes)
        assert bank.retrieve("qz", 1, embed) == fresh.retrieve("qz", 1, embed)


SKILL = {"skill_id": "gen_001", "title": "t", "principle": "p", "when_to_apply": "w"}
MISTAKE = {"mistake_id": "err_001", "description": "d", "why_it_happens": "y", "how_to_avoid": "a"}


def bank_text(general_skills=(), common_mistakes=(), **more):
    return json.dumps(
        {"general_skills": general_skills, "common_mistakes": common_mistakes, **more}
    )


def test_tab5_the_fields_of_a_banks_file_and_metadata_may_lack(tmp_path):
    path = tmp_path / "b.json"
    path.write_text(bank_text([SKILL], [MISTAKE], metadata={"source": "x"}))
    assert SkillBank.load(path) == SkillBank([SKILL], [MISTAKE], {"source": "x"})
    path.write_text(bank_text())
    assert SkillBank.load(path) == SkillBank([], [])


@pytest.mark.parametrize("text", ["\\frac{1}{2} é", "half \ud83d é"], ids=["LaTeX", "surrogate"])
def test_save_and_load_lose_nothing(text, tmp_path):
    bank = make_bank()
    bank.extra["task_specific_skills"] = {"x": [1]}
    bank.general_skills[0]["note"] = text
    row = {**ROW, "problem": text}
    bank.remember([{**row, "completion_ids": [1, 2]}])
    assert bank.window == [row]
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


ROW = {"problem_id": "a", "problem": "What?", "text": "", "r": 1, "pred": None, "gold": "2"}
WRONG = [
    (None, "cannot be read"),
    ("{", "cannot be read"),
    ("[]", "general_skills"),
    (bank_text([SKILL, {**SKILL, "title": 3}]), "general_skills[1] lacks title:"),
    (bank_text([], [{**MISTAKE, "how_to_avoid": " \n"}]), "common_mistakes[0] lacks how_to_avoid:"),
    (bank_text([{"title": "t"}]), "general_skills[0] lacks skill_id, principle, when_to_apply:"),
    (bank_text([SKILL] * 2), "general_skills[1]"),
    (bank_text(metadata=None), "metadata"),
    (bank_text(metadata={"updates": [3]}), "updates"),
    (bank_text(window=[ROW, {"problem": "?", "r": 1}]), "window[1]"),
    (bank_text(window=[{k: v for k, v in ROW.items() if k != "gold"}]), "window[0] lacks gold"),
    (bank_text(window=None), "window"),
]


@pytest.mark.parametrize("content, words", WRONG)
def test_a_wrong_bank_is_one_line_that_names_the_file_and_the_entry(content, words, tmp_path):
    path = tmp_path / "b.json"
    if content is not None:
        path.write_text(content)
    one_line(lambda: SkillBank.load(path), f"bank {path}: ", words)


def test_s8_a_bank_that_is_given_has_a_pair_for_each_teacher(tmp_path):
    make_bank(tmp_path / "b.json", n_skills=4, n_mistakes=3)
    words = f"bank {tmp_path}/b.json: ", "4 skills and 3 mistakes", "--num-teachers 3"
    one_line(lambda: SkillBank.load(tmp_path / "b.json", 4), *words)
    assert SkillBank.load(tmp_path / "b.json", 3) == SkillBank.load(tmp_path / "b.json")


def test_a_hand_written_bank_says_so():
    for path in (ROOT / "banks").glob("*.json"):
        assert "by hand" in SkillBank.load(path).metadata["source"]
