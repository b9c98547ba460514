"""The bank: schema, lossless files, cosine retrieval of rank-aligned pairs, an index that embeds once."""

import json

import numpy as np
import pytest
from conftest import ROOT, fake_embed, make_bank

import skills as S
from distributed import UserError

RELEASED = sorted((ROOT.parent / "shared" / "banks").glob("*.json"))


def table_embed(table):
    return lambda texts: np.array([table[t] for t in texts], dtype=np.float64)


def test_retrieval_by_hand():
    """Query (3, 4), not normalised. Skills (1,0): .6, (0,2): .8, (6,8): 1. Mistakes (0,-1): -.8, (4,3): .96."""
    bank = make_bank(skills=3, mistakes=2)
    texts = [S.entry_text(e, key) for key in S.FIELDS for e in getattr(bank, key)]
    embed = table_embed(
        {"q": (3, 4), **dict(zip(texts, [(1, 0), (0, 2), (6, 8), (0, -1), (4, 3)]))}
    )
    pairs = bank.retrieve("q", 8, embed)
    assert [(p.skill["skill_id"], p.mistake["mistake_id"]) for p in pairs] == [
        ("gen_003", "err_002"),
        ("gen_002", "err_001"),
    ]  # S8: two of each
    np.testing.assert_allclose([(p.s_g, p.s_e) for p in pairs], [(1, 0.96), (0.8, -0.8)], atol=1e-6)
    assert len(bank.retrieve("q", 1, embed)) == 1


def test_equal_scores_keep_the_banks_order():
    pairs = make_bank(skills=4).retrieve("q", 4, lambda texts: np.ones((len(texts), 3)))
    assert [p.skill["skill_id"] for p in pairs] == ["gen_001", "gen_002", "gen_003", "gen_004"]


def test_the_best_k_are_those_of_a_stable_sort():
    rng = np.random.default_rng(0)
    for n, k in ((1, 1), (5, 8), (50, 8), (1000, 3)):
        scores = rng.integers(0, 6, n).astype(np.float32)  # many ties
        np.testing.assert_array_equal(S._top(scores, k)[0], np.argsort(-scores, kind="stable")[:k])


@pytest.mark.parametrize("n", [1, 5, 1100])
def test_many_problems_retrieve_the_bits_of_each_alone(n):
    """However many they are; an index of one block is the whole product, a larger one is it up to rounding."""
    entries = {
        key: [{S.IDS[key]: f"{i}", **dict.fromkeys(fields, f"{key} {i}")} for i in range(n)]
        for key, fields in S.FIELDS.items()
    }
    bank, rng, table = S.SkillBank(**entries), np.random.default_rng(0), {}

    def embed(texts):
        return np.stack(
            [table.setdefault(t, rng.standard_normal(48, dtype=np.float32)) for t in texts]
        )

    problems = [f"problem {i}" for i in range(7)]
    assert bank.retrieve_all(problems, 4, embed) == [bank.retrieve(p, 4, embed) for p in problems]
    matrix, queries = bank._matrix("general_skills", embed), S._normalized(embed(problems))
    found, whole = S._scores(matrix, queries), np.stack([matrix @ q for q in queries])
    np.testing.assert_allclose(found, whole, rtol=0, atol=0 if n <= S.BLOCK else 1e-6)
    assert bank.retrieve_all([], 4, embed) == []


def test_entry_text_is_title_principle_when():
    bank = make_bank()
    assert (
        S.entry_text(bank.general_skills[0], "general_skills")
        == "Use add. Always add with care.. When you add."
    )
    assert (
        S.entry_text(bank.common_mistakes[0], "common_mistakes")
        == "Forgetting to add.. Haste.. Remember add."
    )


def test_entries_are_embedded_once_and_again_when_they_change():
    calls = []

    def embed(texts):
        calls.append(list(texts))
        return fake_embed(texts)

    bank = make_bank()
    for _ in range(3):
        bank.retrieve("carry the one", 2, embed)
    assert [len(c) for c in calls] == [1, 4, 4, 1, 1]
    bank.general_skills.append(
        {**bank.general_skills[0], "skill_id": "dyn_001", "title": "carry carry carry"}
    )
    before = len(calls)
    assert len(bank.retrieve("carry the one", 4, embed)) == 4 and [
        len(c) for c in calls[before:]
    ] == [1, 5]


def test_empty_list_and_bad_k():
    assert S.SkillBank([], make_bank().common_mistakes).retrieve("q", 3, fake_embed) == []
    with pytest.raises(ValueError, match=r"Eq. 2.*k >= 1, got 0"):
        make_bank().retrieve("q", 0, fake_embed)


def test_save_and_load_lose_nothing(tmp_path):
    bank = make_bank()
    bank.extra["task_specific_skills"] = {"x": [1]}
    bank.general_skills[0]["note"] = "\\frac{1}{2} é"
    bank.save(tmp_path / "b.json")
    assert S.SkillBank.load(tmp_path / "b.json") == bank


@pytest.mark.skipif(not RELEASED, reason="the authors' released banks are not here")
@pytest.mark.parametrize("path", RELEASED, ids=lambda p: p.stem)
def test_released_banks(path, tmp_path):
    bank = S.SkillBank.load(path)
    assert (len(bank.general_skills), len(bank.common_mistakes)) in (
        (28, 98),
        (24, 15),
        (46, 8),
    )  # App. C
    assert len(bank.retrieve("Find the area of a triangle.", 8, fake_embed)) == 8
    bank.save(tmp_path / "b.json")
    assert (tmp_path / "b.json").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    "data,message",
    [
        ("{", "cannot be read as JSON"),
        ([], "a JSON object is wanted, got list"),
        ({"general_skills": []}, "`common_mistakes` must be a list"),
        (
            {
                "general_skills": [{"skill_id": "a", "title": "t", "principle": 3}],
                "common_mistakes": [],
            },
            r"general_skills\[0\] lacks .*principle, when",
        ),
        ({"general_skills": ["x"], "common_mistakes": []}, r"general_skills\[0\] lacks"),
        (
            {"general_skills": [], "common_mistakes": [], "metadata": 3},
            "`metadata` must be an object",
        ),
    ],
)
def test_bad_banks_are_named(tmp_path, data, message):
    (tmp_path / "b.json").write_text(data if isinstance(data, str) else json.dumps(data))
    with pytest.raises(UserError, match=message):
        S.SkillBank.load(tmp_path / "b.json")


def test_encoder_normalises_and_caches(world_dir):
    embed = S.load_encoder(str(world_dir / "encoder"), "cpu")
    x = embed(["a b", "a b", "c"])
    assert (
        x.shape == (3, 16)
        and np.array_equal(x[0], x[1])
        and np.allclose(np.linalg.norm(x, axis=1), 1, atol=1e-5)
    )
    assert np.array_equal(embed(["a b"])[0], x[0])


def test_a_replaced_entry_is_embedded_anew():
    bank = make_bank()
    for i in range(30):  # a freed dict's address is often taken by the next one
        bank.retrieve("q", 4, fake_embed)
        del bank.general_skills[0]
        bank.general_skills.append(
            {"skill_id": f"dyn_{i}", "title": "z" * i, "principle": "q", "when_to_apply": "w"}
        )
        fresh = S.SkillBank(list(bank.general_skills), bank.common_mistakes)
        assert bank.retrieve("qz", 4, fake_embed) == fresh.retrieve("qz", 4, fake_embed)


def test_a_lone_surrogate_survives_a_file(tmp_path):
    bank = make_bank()
    bank.general_skills[0]["title"] = "half \ud83d é"
    bank.save(tmp_path / "b.json")
    assert S.SkillBank.load(tmp_path / "b.json") == bank


def test_lint_names_entries_with_one_problems_numbers():
    bank = make_bank(skills=3, mistakes=2)
    assert S.lint(bank) == ""
    bank.general_skills[1] = {
        **bank.general_skills[1],
        "principle": "Of 2024 and 2.5 take 10, 3 and 360.",
    }
    bank.common_mistakes[0] = {**bank.common_mistakes[0], "how_to_avoid": "Use 17."}
    assert (
        S.lint(bank)
        == "bank: 2 entries carry numbers that look like one problem's: gen_002 (2024, 2.5), err_001 (17)"
    )
