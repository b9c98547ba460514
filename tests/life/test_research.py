"""What of research/ is used again: scripts that pages start, and the tests of its own."""

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT


def run(script, *argv):
    """What a script of research/ prints; it must succeed."""
    command = [sys.executable, str(ROOT / "research" / script), *map(str, argv)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.long
def test_what_must_be_checked_on_a_gpu_runs_in_small_without_one(tmp_path):
    steps = ("bf16", "bf16_eval", "fp32", "fp32_again", "step", "large_masks", "large_step")
    printed = run("speed/gpu.py", tmp_path, "--cpu", "--steps", *steps)
    codes = dict(re.findall(r"^\| (\w+) \| (\w+) \| \d+ \|$", printed, re.M))
    assert codes == dict.fromkeys(steps, "0")
    assert "fp32 twice: 8 of 8 rollouts" in printed


@pytest.mark.long
def test_a_change_of_the_method_falls_or_is_named():
    printed = run("house/mutate.py", "--only", "spec/scoring eq5")
    assert "| `scoring.py` | 2 | 1 | 1 | 0 |" in printed
    assert "`rows = 8 if logits_nV`" in printed


def scripts():
    """The scripts that pages of research/ start, but those that need TRL."""
    names = set()
    for page in (ROOT / "research").rglob("*.md"):
        names |= set(re.findall(r"python\s+research/([\w/]+\.py)", page.read_text()))
    return sorted(name for name in names if not name.startswith("trl/"))


@pytest.mark.long
@pytest.mark.parametrize("script", scripts())
def test_a_script_that_a_page_of_research_starts_runs_as_far_as_its_help(script):
    without = {"intervals.py": [], "robustness/families.py": ["qwen2"]}  # their smallest case
    assert run(script, *without.get(script, ["--help"]))


@pytest.mark.long
@pytest.mark.parametrize("question", ("bound", "cost", "house", "methods", "worlds"))
def test_a_question_with_tests_of_its_own_passes_them(question):
    command = [sys.executable, "-m", "pytest", "-m", "", str(ROOT / "research" / question)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
