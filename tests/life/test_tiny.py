"""The embedded default: two sound worlds, a model that listens to guidance, a preset that runs."""

import json
import random
import re
import subprocess
import sys

import harder
import make
import pytest
import torch
import world
from conftest import ROOT

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
            assert set(entry) == set(skills.FIELDS[world.variants(family, kind)[0]])
    assert world.meaning(world.item(rng, None, "skill", 1)) == (None, "skill")
    assert world.meaning({"title": "of another world"}) is None
    first, _, third = world.FAMILIES[:3]
    doubled = [world.item(rng, family, "mistake") for family in (third, first, third)]
    merged = [world.item(None, family, "mistake") for family in (first, third)]
    assert world.canonical(doubled, "common_mistakes") == merged


def test_the_files_are_small_and_the_sets_apart():
    files = [path for path in (ROOT / "tiny").rglob("*") if "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) < 10e6
    seen = set()
    for name, n in make.HELD_OUT.items():
        lines = (ROOT / "tiny" / f"{name}.jsonl").read_text().splitlines()
        texts = {json.loads(line)["problem"] for line in lines}
        assert len(texts) == n and not texts & seen
        seen |= texts


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


@pytest.mark.long
def test_the_preset_lives_the_whole_life_of_a_run(tmp_path):
    """Cold start, training, an evolution of the bank, checkpoints, and an evaluation."""
    lines = (ROOT / "tiny" / "test.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "test.jsonl").write_text("".join(lines[:3]))
    out = tmp_path / "run"

    def call(*command):
        words = [sys.executable, *map(str, command)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    flags = "--steps 2 --evolve-every 2 --success-gate 1.1 --checkpoint-every 1 --cold-start 8"
    call("sgsd.py", "--preset", "tiny", *flags.split(), "--batch-size", 4, "--out", out)
    steps = [int(path.stem[5:]) for path in sorted((out / "bank").glob("step_*.json"))]
    assert steps == [0, 2] and len(list((out / "checkpoints").iterdir())) == 2
    bank = skills.SkillBank.load(out / "bank" / "bank.json")
    assert any(world.meaning(entry) for entry in bank.general_skills + bank.common_mistakes)
    flags = "--no-thinking --max-new-tokens 96 --device cpu --data"
    printed = call("eval.py", "tiny/model", out, *flags.split(), tmp_path / "test.jsonl")
    assert "| tiny/model |" in printed and "| step_000002 |" in printed


# ------------------------------------------------------------------------------ the second world


@pytest.mark.parametrize("guided", [False, True])
def test_a_solution_is_right_exactly_where_no_step_errs(guided):
    rng = random.Random(0)
    for _ in range(200):
        x = harder.draw(rng)
        errs = [rng.random() < 0.5 for _ in range(3)]
        text = harder.solution(rng, x, errs, guided)
        assert harder.steps_right(x, text) == [not err for err in errs]
        assert (verify.extract_answer(text) == x.answer) == (not any(errs))
        assert ("Well," in text) <= (not guided) and (";" in text) <= guided
    assert harder.steps_right(x, "The code is \\boxed{1}.") == [None] * 3
