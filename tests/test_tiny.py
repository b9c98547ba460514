"""The embedded default: its world is sound, its files are what make.py says, its model listens to guidance, its preset runs."""

import json
import random
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

import config
import rollout as R
import sgsd
import skills as S

sys.path.insert(0, str(ROOT / "tiny"))
import make as M
import world as W


@pytest.fixture(scope="module")
def tiny():
    return R.load_model(str(ROOT / "tiny" / "model"), torch.device("cpu"))


@pytest.mark.parametrize("family", W.FAMILIES, ids=lambda f: f.name)
def test_solutions_part_and_arithmetic_holds(family):
    rng = random.Random(0)
    for _ in range(300):
        x = W.draw(rng, family)
        assert x.right[1] != x.wrong[1]
        for wrong in (False, True):
            text = x.solution(wrong)
            assert R.extract_answer(text) == str((x.wrong if wrong else x.right)[1])
            for left, right in (
                part.rstrip(".").split("=")
                for part in text.split()
                if "=" in part and part[0].isdigit()
            ):
                value = eval(left.replace("/", "//"))
                assert value == eval(right), text


def test_the_error_depends_on_guidance_of_the_own_family():
    """Log-odds .05, -1.7 for each relevant item, +2.2 for a misleading one: 51%, 16%, 3.4%, 90%; others leave it alone."""
    own, other = W.FAMILIES[:2]

    def chance(*items):
        return round(W.error_chance(own.name, [W.item(None, f, kind) for f, kind in items]), 3)

    assert chance() == chance((other, "skill"), (other, "mistake"), (None, "skill")) == 0.512
    assert (
        chance((own, "skill")),
        chance((own, "skill"), (own, "mistake")),
        chance((own, "misleading")),
    ) == (0.161, 0.034, 0.905)


def test_every_wording_has_one_meaning():
    rng = random.Random(0)
    for family in W.FAMILIES:
        for kind in ("skill", "misleading", "mistake"):
            entry = W.item(rng, family, kind)
            assert W.meaning(entry) == (family.name, kind) and set(entry) == set(
                S.FIELDS[W.variants(family, kind)[0]]
            )
    assert (
        W.meaning(W.item(rng, None, "skill", 1)) == (None, "skill")
        and W.meaning({"title": "of another world"}) is None
    )
    doubled = [W.item(rng, f, "mistake") for f in (W.FAMILIES[2], W.FAMILIES[0], W.FAMILIES[2])]
    assert W.canonical(doubled, "common_mistakes") == [
        W.item(None, W.FAMILIES[0], "mistake"),
        W.item(None, W.FAMILIES[2], "mistake"),
    ]


def test_files_are_small_and_apart():
    assert (
        sum(p.stat().st_size for p in (ROOT / "tiny").rglob("*") if "__pycache__" not in p.parts)
        < 10e6
    )
    sets = [
        {json.loads(line)["problem"] for line in open(ROOT / "tiny" / f"{name}.jsonl")}
        for name in M.HELD_OUT
    ]
    assert [len(s) for s in sets] == list(M.HELD_OUT.values()) and not (
        sets[0] & sets[1] or sets[0] & sets[2] or sets[1] & sets[2]
    )


def test_the_model_listens(tiny):
    """A coarse check (128 problems a case); README.md of tiny/ has the figures and their intervals."""
    rng = random.Random(3)
    problems = [W.draw(rng, f) for f in W.FAMILIES for _ in range(16)]
    right = {case: sum(M.accuracy(*tiny, problems, case)) / len(problems) for case in M.CASES}
    assert right["relevant"] > right["plain"] + 0.1 > right["misleading"] + 0.15, right


def test_the_encoder_finds_the_own_family():
    embed = S.load_encoder(str(ROOT / "tiny" / "encoder"), "cpu")
    bank = S.SkillBank(
        [{"skill_id": f.name, **W.item(None, f, "skill")} for f in W.FAMILIES],
        [{"mistake_id": f.name, **W.item(None, f, "mistake")} for f in W.FAMILIES],
    )
    rng = random.Random(4)
    hits = []
    for x in (W.draw(rng) for _ in range(100)):
        pair = bank.retrieve(x.problem, 1, embed)[0]
        hits += [pair.skill["skill_id"] == x.family, pair.mistake["mistake_id"] == x.family]
    assert sum(hits) >= 190


def test_the_preset_lives_the_whole_life(tmp_path):
    """Cold start, training, two online updates, checkpoints, evaluation before and after: the real command, shortened."""
    (tmp_path / "test.jsonl").write_text(
        "".join(open(ROOT / "tiny" / "test.jsonl").readlines()[:8])
    )
    out = tmp_path / "run"
    flags = f"--preset tiny --updates 4 --update-every 2 --success-gate 1.1 --checkpoint-every 2 --cold-start 12 --batch-size 4 --out {out}"
    done = subprocess.run(
        [sys.executable, "sgsd.py", *flags.split(), "--eval-data", str(tmp_path / "test.jsonl")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    steps = [int(p.stem[5:]) for p in sorted((out / "bank").glob("step_*.json"))]
    assert steps == [0, 2, 4] and len(list((out / "checkpoints").iterdir())) == 2
    bank = S.SkillBank.load(out / "bank" / "bank.json")
    assert any(W.meaning(e) for e in bank.general_skills + bank.common_mistakes)
    table = json.loads((out / "eval" / "results.json").read_text())["results"]
    assert len(table) == 2 and "diff" in list(table.values())[1]["test"]
    assert "| model |" in done.stdout and "| step_000004 |" in done.stdout


def test_presets_name_settings_that_exist():
    for preset in config.PRESETS:
        assert sgsd.parse_config(["--preset", preset])[0].model
