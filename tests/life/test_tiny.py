"""The embedded default: small files, sets apart, a preset that lives the whole life of a run."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

import skills

HELD_OUT = {"train": 2400, "valid": 240, "test": 240}  # problems


def test_the_files_are_small_and_the_sets_apart():
    files = [path for path in (ROOT / "tiny").rglob("*") if "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) < 10e6
    seen = set()
    for name, n in HELD_OUT.items():
        lines = (ROOT / "tiny" / f"{name}.jsonl").read_text().splitlines()
        texts = {json.loads(line)["problem"] for line in lines}
        assert len(texts) == n and not texts & seen
        seen |= texts


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
    assert bank.general_skills and bank.common_mistakes
    flags = "--no-thinking --max-new-tokens 96 --device cpu --data"
    printed = call("eval.py", "tiny/model", out, *flags.split(), tmp_path / "test.jsonl")
    assert "tiny--model, test: avg@12" in printed and "step_000002, test: avg@12" in printed
