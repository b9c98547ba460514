"""The small worlds: sound problems and solutions, a model that listens to guidance.

python -m pytest research/worlds
"""

import pathlib
import random
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

import harder
import make
import pytest
import torch
import world

import skills
from lib import model as models
from lib import verify

# ------------------------------------------------------------------------------- the first world


@pytest.mark.parametrize("family", world.FAMILIES, ids=lambda family: family.name)
def test_solutions_end_in_their_answer_and_the_arithmetic_holds(family):
    rng = random.Random(0)
    for _ in range(300):
        x = world.draw(rng, family)
        assert x.right[1] != x.wrong[1]
        for wrong, (_, answer) in ((False, x.right), (True, x.wrong)):
            text = x.solution(wrong)
            assert verify.extract_answer(text) == str(answer)
            for left, right in re.findall(r"(\d[^\s=]*)=([^\s=]*[^\s=.])", text):
                assert eval(left.replace("/", "//")) == eval(right), text


def test_the_error_depends_on_guidance_of_the_own_family_alone():
    """Log-odds .05; -1.7 for each relevant item, +2.2 for a misleading one."""
    own, other = world.FAMILIES[:2]

    def chance(*items):
        entries = [world.item(None, family, kind) for family, kind in items]
        return round(world.error_chance(own.name, entries), 3)

    assert chance() == chance((other, "skill"), (other, "mistake"), (None, "skill")) == 0.512
    assert chance((own, "skill")) == 0.161
    assert chance((own, "skill"), (own, "mistake")) == 0.034
    assert chance((own, "misleading")) == 0.905


def test_every_wording_has_one_meaning():
    rng = random.Random(0)
    for family in world.FAMILIES:
        for kind in ("skill", "misleading", "mistake"):
            entry = world.item(rng, family, kind)
            assert world.meaning(entry) == (family.name, kind)
            assert set(entry) == set(skills.KINDS[world.KEYS[kind]].fields)
    assert world.meaning(world.item(rng, None, "skill", 1)) == (None, "skill")
    assert world.meaning({"title": "of another world"}) is None
    first, _, third = world.FAMILIES[:3]
    doubled = [world.item(rng, family, "mistake") for family in (third, first, third)]
    merged = [world.item(None, family, "mistake") for family in (first, third)]
    assert world.canonical(doubled, "common_mistakes") == merged


@pytest.mark.long
def test_the_model_listens_to_guidance():
    """A coarse check on 64 problems; README.md of tiny/ has the figures and their intervals."""
    model, tokenizer = models.load_model(str(ROOT / "tiny" / "model"), torch.device("cpu"))
    rng, right = random.Random(3), {}
    drawn = [world.draw(rng, family) for family in world.FAMILIES * 8]
    for case in ("plain", "relevant", "irrelevant", "misleading"):
        right[case] = sum(make.accuracy(model, tokenizer, drawn, case)) / len(drawn)
    assert right["relevant"] > right["plain"] + 0.1 > right["misleading"] + 0.15, right
    assert abs(right["irrelevant"] - right["plain"]) < 0.2, right


def test_the_encoder_finds_the_own_family():
    embed = models.load_encoder(str(ROOT / "tiny" / "encoder"), "cpu")
    bank = skills.SkillBank([], [])
    for family in world.FAMILIES:
        skill, mistake = (world.item(None, family, kind) for kind in ("skill", "mistake"))
        bank.general_skills.append({"skill_id": family.name, **skill})
        bank.common_mistakes.append({"mistake_id": family.name, **mistake})
    rng, hits = random.Random(4), 0
    for _ in range(100):
        x = world.draw(rng)
        (pair,) = bank.retrieve(x.problem, 1, embed)
        hits += (pair.skill["skill_id"] == x.family) + (pair.mistake["mistake_id"] == x.family)
    assert hits >= 190


# ------------------------------------------------------------------------------ the second world


@pytest.mark.parametrize("guided", [False, True])
def test_a_solution_is_right_exactly_where_no_step_errs(guided):
    rng = random.Random(0)
    for _ in range(200):
        x = harder.draw(rng)
        errs = [rng.random() < 0.5 for _ in range(3)]
        text = harder.solution(rng, x, errs, guided)
        steps = zip(re.findall(r"So (\d+)", text), x.parts)
        assert [n == str(part.right[1]) for n, part in steps] == [not err for err in errs]
        assert (verify.extract_answer(text) == x.answer) == (not any(errs))
        assert ("Well," in text) <= (not guided) and (";" in text) <= guided
