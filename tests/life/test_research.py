"""What of research/ is used again: the freeze, and the script that tries a GPU; their own tests."""

import itertools
import json
import os
import re
import subprocess
import sys

import driver
import pytest
from conftest import ROOT

from research.house import freeze


def run(script, *argv):
    """What a script of research/ prints; it must succeed."""
    command = [sys.executable, str(ROOT / "research" / script), *map(str, argv)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def parsed(program, argv):
    """The settings of a training's command."""
    return driver.parsed(argv, program.removeprefix("methods.").removesuffix(".py"))


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


def test_every_run_of_the_freeze_is_listed_and_parses(tmp_path):
    printed = run("house/freeze.py", "--list", "--long")
    for command in itertools.chain.from_iterable(freeze.ALL.values()):
        assert command in printed
        words = command.replace("{out}", str(tmp_path)).split()
        words = words[5:] if "--standalone" in words else words  # torchrun
        program, *flags = words[1:] if words[0] == "-m" else words
        if program == "eval.py":
            driver.parsed(flags, "eval")
        else:
            parsed(program, flags)


def frozen(folder, loss, dynamic_id, replies, **columns):
    """A run's folder: a rollout of step 2, its bank with a dynamic entry, and replies."""
    (folder / "bank").mkdir(parents=True)
    bank = {"general_skills": [{"skill_id": dynamic_id, "title": "Add"}], "common_mistakes": []}
    (folder / "bank/step_000001.json").write_text(json.dumps(bank))
    row = {"step": 2, "pairs": [[dynamic_id, "err_001"]], "loss": loss, "rho": [], **columns}
    driver.write_rows(folder / "rollouts.jsonl", [row])
    lines = [{"step": 1, "prompt": x, "repeat": 0, "reply": x} for x in replies]
    driver.write_rows(folder / "bank/replies.jsonl", lines)
    return folder


def test_the_freeze_sees_a_number_and_overlooks_what_may_change(tmp_path):
    """Ids of dynamic entries, the order of replies, and columns of teachers where there is none."""
    old = frozen(tmp_path / "old", 0.5, "dyn_gen_001", "ab", alpha=[], advantage=1.0)
    new = frozen(tmp_path / "new", 0.5, "dyn_gen_001_002", "ba", advantage=1.0, index=0)
    found = freeze.Findings()
    freeze.compare_runs(old, new, found)
    assert found.cells() == ["1 rollouts, 1 banks, 2 replies", "0", ""]
    assert (found.may_go, found.added) == ({"rollouts.alpha"}, {"rollouts.index"})
    other = frozen(tmp_path / "other", 0.75, "gen_001", "aa", alpha=[])
    found = freeze.Findings()
    freeze.compare_runs(old, other, found)
    assert found.differences["rollouts.loss"] == 0.25 and found.lost == {"rollouts.advantage"}
    assert {"rollouts.pairs", "replies.reply"} <= {*found.differences}


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
@pytest.mark.parametrize("question", ("bound", "cost", "methods", "worlds"))
def test_a_question_with_tests_of_its_own_passes_them(question):
    command = [sys.executable, "-m", "pytest", "-m", "", str(ROOT / "research" / question)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
