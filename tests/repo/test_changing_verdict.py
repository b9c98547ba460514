"""The recipes of docs/changing.md for another verdict and another domain, run as they stand.

That takes half a minute each; the same seam in small is in test_verify_judge.py.
"""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT
from driver import rows

PAGE = (ROOT / "docs" / "changing.md").read_text()


def followed(title, folder):
    """Follow a section in a folder that holds what it takes from the repository.

    A Python block is a file, whose name stands in its first line; other blocks are commands.
    """
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    for name in ("tiny", "prompts"):
        (folder / name).symlink_to(ROOT / name)
    output = ""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", section, re.M | re.S):
        if language == "python":
            (folder / re.match(r"# (\w+\.py)\n", block)[1]).write_text(block)
            continue
        for command in block.replace("\\\n", " ").splitlines():
            output += run(command, folder)
    return output


def run(command, folder):
    """What a command prints that must succeed; the repository's programs are taken from there."""
    python, *words = shlex.split(command)
    assert python == "python"
    if words[0].endswith(".py"):
        words[0] = str(ROOT / words[0])
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return done.stdout.decode()


@pytest.mark.long
def test_another_verdict_trains_the_tiny_model(tmp_path):
    followed("Another verdict", tmp_path)
    out = tmp_path / "runs" / "estimate"
    settings = json.loads((out / "config.json").read_text())["settings"]
    assert settings["verifier"] == "my_domain:Estimate"
    rollouts = rows(out / "rollouts.jsonl")
    assert {row["step"] for row in rollouts} == {1, 2} and {row["r"] for row in rollouts} == {-1, 1}
    assert len((tmp_path / "my_domain.py").read_text().splitlines()) <= 15


@pytest.mark.long
def test_another_domain_is_trained_and_evaluated_end_to_end(tmp_path):
    pytest.importorskip("reasoning_gym")
    output = followed("Another domain, end to end", tmp_path)
    out = tmp_path / "runs" / "gym"
    problems = {row["problem"].strip(): row for row in rows(tmp_path / "gym_train.jsonl")}
    assert {row["task"] for row in problems.values()} == {"letter_counting", "countdown"}
    assert {row["step"] for row in rows(out / "rollouts.jsonl")} == {1, 2}
    assert all(row["problem"] in problems for row in rows(out / "rollouts.jsonl"))
    asked = [row["prompt"] for row in rows(out / "bank" / "replies.jsonl")]
    assert all("math" not in prompt for prompt in asked) and "puzzle" in asked[0]
    settings = json.loads((out / "eval/step_000002/settings.json").read_text())
    assert settings["verifier"].startswith("gym_domain:ReasoningGym (")
    # The run's own evaluation, and then eval.py on the same samples.
    assert len(rows(out / "eval/step_000002/samples.jsonl")) == 80
    assert output.count("| step_000002 | gym_test | 20 |") == 2


def test_an_expression_that_is_not_the_reference_is_right_where_its_value_is(tmp_path):
    """What a scorer evaluates is arithmetic and short, whatever a model writes."""
    pytest.importorskip("reasoning_gym")
    section = PAGE.partition("\n## Another domain, end to end\n")[2]
    code = re.search(r"^```python\n(# gym_domain\.py\n.*?)^```", section, re.M | re.S)[1]
    (tmp_path / "gym_domain.py").write_text(code)
    asked = """
import gym_domain, problems
metadata = {"numbers": [6, 61, 94, 4], "target": 309}
x = problems.Problem("0", "p", "94*4 - 61 - 6", {"task": "countdown", "metadata": metadata})
answers = ["4*94 - (61 + 6)", "309", "9**9**9**9", "__import__('os').getcwd()", "(", "1/0"]
cases = [(x, rf"so \\boxed{{{answer}}}") for answer in answers]
with gym_domain.ReasoningGym() as judge:
    print([verdict.right for verdict in judge.judge(cases)])
"""
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", asked], env=env, capture_output=True, text=True)
    assert done.stdout == f"{[True] + [False] * 5}\n", done.stderr
