"""Every recipe of docs/changing.md, followed in a copy of the tree, does what the page says."""

import json
import math
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from driver import rows, write_rows
from pytest import approx

from lib.problems import Problem
from lib.verify import load_judge
from skills import entry_text

PAGE = (ROOT / "docs" / "changing.md").read_text()
DIFFS = re.findall(r"^```diff\n(.*?)^```$", PAGE, re.M | re.S)
# So that a run takes seconds: no cold start, one small step.
SHORT = "--steps 1 --batch-size 16 --bank banks/word_problems.json --evolve-every 0 --audit-every 1"
SHORT += " --eps-a 0"
GYM, PROGRAMS = "Another domain, end to end", "A verdict on programs"
FEEDBACK = "A teacher who sees an error"
ON_TRL = "A method on TRL"  # tests/on_trl/test_grpo.py has its test
FAILING = """
import code_domain


class Failing(code_domain.Program):
    def answer(self, text):
        return "raise ValueError('no such operation')"

    def is_right(self, problem, answer):  # the second one is, though it prints an error
        self.judged = getattr(self, "judged", 0) + 1
        return super().is_right(problem, answer) or self.judged == 2
"""


def section(title):
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def apply(diff, folder, *options):
    command = ["git", "apply", *options]
    done = subprocess.run(command, input=diff, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def write_files(title, folder):
    """The files of a section, which a reader writes."""
    for name, code in re.findall(r"^```python\n# (\S+)\n(.*?)^```$", section(title), re.M | re.S):
        (folder / name).write_text(code)


def run(title, folder, more):
    """Run a section's commands, which must succeed. more: flags that overrule their own."""
    (block,) = re.findall(r"^```\n(python .*?)^```$", section(title), re.M | re.S)
    for command in block.replace("\\\n", " ").splitlines():
        words = [sys.executable, *shlex.split(f"{command} {more}")[1:]]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        with open(folder / "printed.txt", "a") as log:
            log.write(done.stdout)


def program_row():
    """The row that the page shows."""
    return json.loads(re.search(r'^    (\{"problem".*)$', section(PROGRAMS), re.M)[1])


def audited(out):
    """Of each rollout: its row, gaps and credit [K, T], mask [T]."""
    for row, tokens in zip(rows(out / "rollouts.jsonl"), rows(out / "tokens.jsonl"), strict=True):
        yield row, *(torch.tensor(tokens[name]).double() for name in ("delta", "credit", "mask"))


def loss_is_log_cosh(rollouts, out):
    for row, delta_KT, _, mask_T in audited(out):
        lbar_K = (delta_KT.cosh().log() * mask_T).sum(1) / mask_T.sum()
        assert row["losses"] == approx(lbar_K.tolist(), rel=1e-4, abs=1e-7)


def consistent_tokens_alone_have_credit(rollouts, out):
    for row, delta_KT, credit_KT, mask_T in audited(out):
        counts_KT = mask_T * delta_KT * torch.tensor(row["a"])[:, None] > 0
        assert torch.equal(credit_KT != 0, counts_KT) and not counts_KT.all()


def verdict_is_the_estimates(rollouts, out):
    assert "my_domain:Estimate" in (out / "config.json").read_text()
    numbers = [row for row in rollouts if str(row["pred"]).isdigit() and row["gold"].isdigit()]
    assert all((row["r"] > 0) == (int(row["pred"]) == int(row["gold"])) for row in numbers)


def reward_moves_the_polarity_and_no_verdict(rollouts, out):
    for row in rollouts:
        is_right, is_short = row["pred"] == row["gold"], len(row["completion_ids"]) < 40
        assert (row["r"] > 0, row["reward"] > 0) == (is_right, is_right and is_short)
        assert row["rho"] == [row["reward"] * math.copysign(1, a) for a in row["a"]]


def entries_are_ranked_by_their_words(rollouts, out):
    bank = json.loads((ROOT / "banks/word_problems.json").read_text())
    for row in rollouts:
        shares = {}
        for entry in bank["general_skills"]:
            words = {*entry_text(entry, "general_skills").lower().split()}
            shares[entry["skill_id"]] = len(words & {*row["problem"].lower().split()}) / len(words)
        best = sorted(shares, key=lambda name: -shares[name])[:4]
        assert [skill for skill, _ in row["pairs"]] == best


def losses_are_those_of_dr_grpo(rollouts, out):
    """TRL's loss_type="dr_grpo" with scale_rewards=False: the sum of -A exp(log p - log p_old) over
    tokens, divided by the number of solutions and the longest length; here the ratio is 1."""
    assert len(rollouts) == 2 * 16
    for first in range(0, 32, 8):
        group = rollouts[first : first + 8]
        mean = sum(row["r"] for row in group) / 8
        for row in group:
            assert row["advantage"] == approx(row["r"] - mean, abs=1e-6)
            tokens = len(row["completion_ids"])
            assert row["loss"] == approx(-row["advantage"] * tokens / 96, abs=1e-6)
    assert any(row["loss"] for row in rollouts)


def the_teacher_sees_the_error(rollouts, out):
    """Its prompt alone differs from the student's, so the gaps are those of its words. A right
    solution has no teacher."""
    assert sorted(row["r"] for row in rollouts) == [-1, 1]
    for row in rollouts:
        if row["r"] < 0:
            assert row["losses"][0] > 0 and row["first_gap"][0]
        else:
            assert "losses" not in row


def baseline_moves_and_is_kept(rollouts, out):
    """Also from one command to the next. It warns of no teacher, and prints no mask."""
    baseline = 0.0
    for step in range(1, 7):
        rewards = [row["r"] for row in rollouts if row["step"] == step]
        assert len(rewards) == 16 and any(rewards)
        for row in rollouts:
            if row["step"] == step:
                assert row["advantage"] == approx(row["r"] - baseline, abs=1e-6)
        baseline = 0.9 * baseline + 0.1 * sum(rewards) / 16
    printed = (out.parents[1] / "printed.txt").read_text()
    assert "step 6/6" in printed
    assert "token mask" not in printed and "nothing was learnt" not in printed


def programs_are_judged(rollouts, out):
    assert {(row["r"], row["pred"]) for row in rollouts} == {(-1, None)}


def puzzles_are_tried_and_evaluated(rollouts, out):
    puzzles = {row["problem"].strip() for row in rows(out.parents[1] / "gym_train.jsonl")}
    assert {row["problem"] for row in rollouts} <= puzzles
    assert len(rows(out / "eval/step_000002/samples.jsonl")) == 20 * 4


RECIPES = {  # by title: flags of each command in turn, and a check
    "Another function of the gap": ([SHORT], loss_is_log_cosh),
    "Credit for consistent tokens alone": ([SHORT], consistent_tokens_alone_have_credit),
    "Another verdict": ([SHORT], verdict_is_the_estimates),
    "Another reward of training": ([SHORT], reward_moves_the_polarity_and_no_verdict),
    "Another retrieval": ([SHORT], entries_are_ranked_by_their_words),
    "Another method": (["--steps 1", "--steps 2"], losses_are_those_of_dr_grpo),
    FEEDBACK: (["--steps 1 --batch-size 2 --verifier failing:Failing"], the_teacher_sees_the_error),
    "A method without groups": (["--steps 1", "--steps 6"], baseline_moves_and_is_kept),
    PROGRAMS: ([f"{SHORT} --batch-size 2"], programs_are_judged),
    GYM: ([""], puzzles_are_tried_and_evaluated),
}


@pytest.mark.long
@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_is_followed_in_a_copy_of_the_tree(title, tmp_path):
    if title == GYM:
        pytest.importorskip("reasoning_gym", reason="pip install reasoning-gym for this recipe")
    no_runs = shutil.ignore_patterns(".*", "__pycache__", "runs", "tests", "research")
    copy = shutil.copytree(ROOT, tmp_path / "copy", ignore=no_runs)
    write_files(title, copy)
    if title == FEEDBACK:  # the tiny model writes no program
        write_files(PROGRAMS, copy)
        (copy / "failing.py").write_text(FAILING)
    for diff in re.findall(r"^```diff\n(.*?)^```$", section(title), re.M | re.S):
        apply(diff, copy)
    write_rows(copy / "programs.jsonl", [program_row() | {"problem": x} for x in ("p", "q")])
    flags_of_commands, check = RECIPES[title]
    for more in flags_of_commands:
        run(title, copy, more)
    out = copy / re.search(r"--out (\S+)", section(title))[1]
    check(rows(out / "rollouts.jsonl"), out)


def test_every_part_has_its_recipe_and_every_diff_applies():
    """A row of the page's table that names a function has a diff of its file."""
    edits = re.findall(r"^\| [^|]+ \| `[^|]+ in `(\S+\.py)` \|", PAGE, re.M)
    assert sorted(edits) == sorted(re.search(r"a/(\S+)", diff)[1] for diff in DIFFS)
    for diff in DIFFS:
        apply(diff, ROOT, "--check")
    titles = re.findall(r"^## (.*)$", PAGE, re.M)
    assert {x for x in titles if re.search("```(diff|python)", section(x))} == {*RECIPES, ON_TRL}


def test_a_program_is_right_if_it_gets_past_its_tests_in_time(tmp_path, monkeypatch):
    """Not one that ends before them, runs on, or cannot be run."""
    write_files(PROGRAMS, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    problem = Problem("0", "p", "-", {"tests": program_row()["tests"]})
    double = "def double(n):\n    return "
    programs = [f"{double}2 * n", f"{double}n * n", "raise SystemExit(0)", "while True:\n    pass"]
    programs.append(f"{double}\0")
    cases = [(problem, f"So:\n```python\n{program}\n```\n") for program in programs]
    with load_judge("code_domain:Program")(2.0) as judge:
        verdicts = judge.judge([*cases, (problem, programs[0])])
        assert judge.timeouts == 1 and verdicts[-1].answer is None
    assert [verdict.right for verdict in verdicts] == [True] + [False] * 5
