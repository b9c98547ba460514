"""Every recipe of docs/changing.md, applied to a copy of the tree and run, does what the page says.

That takes a quarter of a minute each. The quick test is that each diff still applies.
"""

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
from driver import rows

from lib.problems import Problem, load_problems
from lib.verify import load_judge
from skills import entry_text

PAGE = (ROOT / "docs" / "changing.md").read_text()
DIFFS = re.findall(r"^```diff\n(.*?)^```$", PAGE, re.M | re.S)
COPIED = ("lib", "methods", "extras", "prompts", "banks", "tiny")
# So that a run takes seconds: no cold start, one small step.
SHORT = "--steps 1 --batch-size 4 --bank banks/word_problems.json --evolve-every 0"


def section(title):
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def copy_of_the_tree(folder):
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    for name in COPIED:
        no_caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=no_caches)
    return folder


def apply(diff, folder, *options):
    command = ["git", "apply", *options]
    done = subprocess.run(command, input=diff, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def run(command, folder, more=""):
    """What a command prints that must succeed. more: flags that overrule its own."""
    python, *words = shlex.split(command.replace("\\\n", " "))
    assert python == "python"
    words = [sys.executable, *words, *shlex.split(more)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def command_of(title):
    (block,) = re.findall(r"^```\n(python .*?)^```$", section(title), re.M | re.S)
    return block


def write_files(title, folder):
    """The files of a section, which a reader writes."""
    blocks = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", section(title), re.M | re.S)
    assert blocks
    for name, code in blocks:
        (folder / name).write_text(code)


def follow(title, folder, more=SHORT):
    """Write the files of a section or apply its diff, run its command; the run's folder."""
    diffs = re.findall(r"^```diff\n(.*?)^```$", section(title), re.M | re.S)
    for diff in diffs:
        apply(diff, folder)
    if not diffs:
        write_files(title, folder)
    run(command_of(title), folder, more)
    return folder / re.search(r"--out (\S+)", command_of(title))[1]


@pytest.mark.parametrize("diff", DIFFS, ids=[re.search(r"a/(\S+)", diff)[1] for diff in DIFFS])
def test_a_diff_applies(diff, tmp_path):
    for name in re.findall(r"^--- a/(\S+)$", diff, re.M):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    apply(diff, tmp_path, "--check")


def test_every_part_has_its_recipe():
    """A row of the page's table that names a function has a diff of its file."""
    edits = re.findall(r"^\| [^|]+ \| `[^|]+ in `(\S+\.py)` \|", PAGE, re.M)
    assert sorted(edits) == sorted(re.search(r"a/(\S+)", diff)[1] for diff in DIFFS)


@pytest.mark.long
def test_another_function_of_the_gap_is_the_loss_and_the_logged_credit(tmp_path):
    copy = copy_of_the_tree(tmp_path)
    out = follow("Another function of the gap", copy, f"{SHORT} --audit-every 1 --eps-a 0")
    rollouts = rows(out / "rollouts.jsonl")
    for row, tokens in zip(rollouts, rows(out / "tokens.jsonl"), strict=True):
        delta_KT = torch.tensor(tokens["delta"], dtype=torch.float64)
        mask_T = torch.tensor(tokens["mask"], dtype=torch.float64)
        lbar_K = (torch.log(torch.cosh(delta_KT)) * mask_T).sum(1) / mask_T.sum()
        assert row["losses"] == pytest.approx(lbar_K.tolist(), rel=1e-4, abs=1e-7)
        signed_K = torch.tensor(row["alpha"]) * torch.tensor(row["rho"])
        credit_KT = signed_K[:, None] * mask_T / mask_T.sum() * torch.tanh(delta_KT)
        assert torch.allclose(torch.tensor(tokens["credit"]), credit_KT.float(), atol=1e-7)
    assert any(any(row["rho"]) for row in rollouts)


@pytest.mark.long
def test_consistent_tokens_alone_have_credit(tmp_path):
    copy = copy_of_the_tree(tmp_path)
    more = f"{SHORT} --audit-every 1 --eps-a 0"
    out = follow("Credit for consistent tokens alone", copy, more)
    dropped = 0
    for row, tokens in zip(rows(out / "rollouts.jsonl"), rows(out / "tokens.jsonl"), strict=True):
        for k, a in enumerate(row["a"]):
            loss = 0.0
            for m, gap, credit in zip(tokens["mask"], tokens["delta"][k], tokens["credit"][k]):
                if m * gap * a > 0:
                    loss += math.log(2) - math.log1p(math.exp(-(gap**2) / 2))
                    slope = gap / (1 + math.exp(gap**2 / 2)) / sum(tokens["mask"])
                    expected = row["alpha"][k] * row["rho"][k] * slope
                    assert credit == pytest.approx(expected, abs=1e-6)
                else:
                    assert credit == 0
                    dropped += bool(m and gap)
            assert row["losses"][k] == pytest.approx(loss / sum(tokens["mask"]), abs=1e-6)
    assert dropped


@pytest.mark.long
def test_another_divergence_takes_the_place_of_jsd(tmp_path):
    """Pinsker's inequality and its counterpart tie the total variation to JSD at each token."""
    copy = copy_of_the_tree(tmp_path)
    run(command_of("Another divergence"), copy, f"{SHORT} --out runs/jsd")
    out = follow("Another divergence", copy)
    count = 0
    for old, new in zip(rows(copy / "runs/jsd/rollouts.jsonl"), rows(out / "rollouts.jsonl")):
        assert old["completion_ids"] == new["completion_ids"]
        for jsd, variation in zip(old["losses"], new["losses"], strict=True):
            assert variation**2 / 2 < jsd < variation * math.log(2)
            count += 1
    assert count == 4 * 4


@pytest.mark.long
def test_another_verdict_trains_the_tiny_model(tmp_path):
    out = follow("Another verdict", copy_of_the_tree(tmp_path), f"{SHORT} --batch-size 16")
    settings = json.loads((out / "config.json").read_text())["settings"]
    assert settings["verifier"] == "my_domain:Estimate"
    rollouts = rows(out / "rollouts.jsonl")
    for row in rollouts:
        answers = row["pred"], row["gold"]
        if all(re.fullmatch(r"\d+", str(answer)) for answer in answers):
            assert (row["r"] > 0) == (int(row["pred"]) == int(row["gold"]))
    assert {row["r"] for row in rollouts} == {-1, 1}


@pytest.mark.long
def test_another_reward_changes_the_polarity_and_no_verdict(tmp_path):
    copy = copy_of_the_tree(tmp_path)
    out = follow("Another reward of training", copy, f"{SHORT} --batch-size 16 --eps-a 0")
    kinds = set()
    for row in rows(out / "rollouts.jsonl"):
        assert row["r"] == (1 if row["pred"] == row["gold"] else -1)
        is_short = len(row["completion_ids"]) < 40
        assert row["reward"] == (1 if row["r"] > 0 and is_short else -1)
        assert row["rho"] == [row["reward"] * math.copysign(1, a) for a in row["a"]]
        kinds.add((row["r"], row["reward"]))
    assert kinds == {(1, 1), (1, -1), (-1, -1)}


@pytest.mark.long
def test_another_retrieval_ranks_entries_by_their_words(tmp_path):
    copy = copy_of_the_tree(tmp_path)
    out = follow("Another retrieval", copy)
    bank = json.loads((copy / "banks/word_problems.json").read_text())
    for row in rows(out / "rollouts.jsonl"):
        shares = {}
        for entry in bank["general_skills"]:
            words = {*entry_text(entry, "general_skills").lower().split()}
            common = words & {*row["problem"].lower().split()}
            shares[entry["skill_id"]] = len(common) / len(words)
        best = sorted(shares, key=lambda name: -shares[name])[:4]
        assert [skill for skill, _ in row["pairs"]] == best
        assert row["s_g"] == pytest.approx([shares[name] for name in best])


@pytest.mark.long
def test_another_method_is_a_step_and_continues_and_its_edit_is_noticed(tmp_path):
    copy, title = copy_of_the_tree(tmp_path), "Another method"
    out = follow(title, copy, "--audit-every 1 --steps 1")
    file = copy / "length_penalty.py"
    file.write_text(file.read_text().replace("def losses(", "# edited\n\n\ndef losses("))
    assert "changed: the code" in run(command_of(title), copy, "--audit-every 1 --steps 2")
    rollouts = rows(out / "rollouts.jsonl")
    assert [row["step"] for row in rollouts] == [1] * 16 + [2] * 16
    for first in range(0, 32, 8):
        group = rollouts[first : first + 8]
        wanted = [row["r"] - len(row["completion_ids"]) / 96 for row in group]
        rewards = torch.tensor(wanted)
        of_group = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        assert [row["advantage"] for row in group] == pytest.approx(of_group.tolist(), abs=1e-5)


@pytest.mark.long
def test_a_step_without_groups_has_a_moving_baseline_that_a_continued_run_keeps(tmp_path):
    """The baseline is the rewards' moving mean, of a run that stopped in between and of one."""
    copy, title = copy_of_the_tree(tmp_path), "A method without groups"
    small = "--batch-size 4 --checkpoint-every 1 --steps 4"
    whole = follow(title, copy, small)
    assert not (whole / "bank").exists()
    run(command_of(title), copy, f"{small} --out runs/halves --steps 2")
    run(command_of(title), copy, f"{small} --out runs/halves")
    baseline = 0.0
    for out in (whole, copy / "runs/halves"):
        baseline, rollouts = 0.0, rows(out / "rollouts.jsonl")
        assert [row["step"] for row in rollouts] == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
        for first in range(0, 16, 4):
            batch = rollouts[first : first + 4]
            for row in batch:
                assert row["advantage"] == pytest.approx(row["r"] - baseline, abs=1e-6)
            baseline = 0.9 * baseline + 0.1 * sum(row["r"] for row in batch) / 4
    assert baseline


PROGRAMS = "A verdict on programs"


def row_of_programs():
    """The row that the page shows, as a line of a file."""
    return re.search(r'^    (\{"problem".*)$', section(PROGRAMS), re.M)[1] + "\n"


def test_a_program_is_right_if_it_gets_past_its_tests_in_time(tmp_path, monkeypatch):
    """Not one that ends before them, runs on, or cannot be run."""
    write_files(PROGRAMS, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "programs.jsonl").write_text(row_of_programs())
    (problem,) = load_problems("programs.jsonl")[0]
    programs = {
        "def double(n):\n    return 2 * n": True,
        "def double(n):\n    return n * n": False,
        "raise SystemExit(0)": False,
        "while True:\n    pass": False,
        "def double(n): return \0": False,
    }
    cases = [(problem, f"So:\n```python\n{program}\n```\n") for program in programs]
    with load_judge("code_domain:Program")(2.0) as judge:
        verdicts = judge.judge([*cases, (problem, "double = lambda n: 2 * n")])
        assert judge.timeouts == 1
    assert [verdict.right for verdict in verdicts] == [*programs.values(), False]
    assert verdicts[-1].answer is None


@pytest.mark.long
def test_a_verdict_on_programs_trains_and_says_that_no_solution_has_one(tmp_path):
    copy = copy_of_the_tree(tmp_path)
    row, lines = json.loads(row_of_programs()), []
    for i in range(4):
        lines.append(json.dumps({**row, "problem": f"{row['problem']} ({i})"}) + "\n")
    (copy / "programs.jsonl").write_text("".join(lines))
    write_files(PROGRAMS, copy)
    output = run(command_of(PROGRAMS), copy, f"{SHORT} --steps 5")
    assert output.count("no right solution") == 1 and "had an answer" in output
    assert {row["r"] for row in rows(copy / "runs/programs/rollouts.jsonl")} == {-1}


GYM = "Another domain, end to end"
NO_GYM = "reasoning_gym is not installed: pip install reasoning-gym, and this recipe runs, too"


@pytest.mark.long
def test_another_domain_is_trained_and_evaluated_end_to_end(tmp_path):
    pytest.importorskip("reasoning_gym", reason=NO_GYM)
    copy = copy_of_the_tree(tmp_path)
    write_files(GYM, copy)
    for command in command_of(GYM).replace("\\\n", " ").splitlines():
        output = run(command, copy)
    out = copy / "runs/gym"
    problems = {row["problem"].strip(): row for row in rows(copy / "gym_train.jsonl")}
    assert {row["task"] for row in problems.values()} == {"letter_counting", "countdown"}
    assert {row["step"] for row in rows(out / "rollouts.jsonl")} == {1, 2}
    assert all(row["problem"] in problems for row in rows(out / "rollouts.jsonl"))
    for file in (copy / "prompts").glob("*.txt"):
        assert "math" not in file.read_text()
    results = json.loads((out / "eval/step_000002/results.json").read_text())
    assert results["gym_test"]["settings"]["verifier"].startswith("gym_domain:ReasoningGym (")
    assert len(rows(out / "eval/step_000002/samples.jsonl")) == 20 * 4
    assert "step_000002, gym_test: avg@4" in output and "20 problems" in output


def test_an_expression_that_is_not_the_reference_is_right_where_its_value_is(tmp_path, monkeypatch):
    """What a scorer evaluates is arithmetic and short, whatever a model writes."""
    pytest.importorskip("reasoning_gym", reason=NO_GYM)
    write_files(GYM, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    metadata = {"numbers": [6, 61, 94, 4], "target": 309}
    x = Problem("0", "p", "94*4 - 61 - 6", {"task": "countdown", "metadata": metadata})
    answers = ["4*94 - (61 + 6)", "309", "9**9**9**9", "__import__('os').getcwd()", "(", "1/0"]
    cases = [(x, rf"so \boxed{{{answer}}}") for answer in answers]
    with load_judge("gym_domain:ReasoningGym")() as judge:
        assert [verdict.right for verdict in judge.judge(cases)] == [True] + [False] * 5
