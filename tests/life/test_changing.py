"""Every recipe of docs/changing.md, applied to a copy of the tree and run, does what the page says.

That takes a quarter of a minute each. The quick test is that each diff still applies.
"""

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys

import conftest
import pytest
import torch
from conftest import ROOT
from driver import rows

PAGE = (ROOT / "docs" / "changing.md").read_text()
DIFFS = re.findall(r"^```diff\n(.*?)^```$", PAGE, re.M | re.S)
COPIED = ("extras", "prompts", "banks", "tiny")
# So that a run takes seconds: no cold start, one small step, no evaluation.
SHORT = "--steps 1 --batch-size 4 --bank banks/word_problems.json --evolve-every 0 --eval-data="


def section(title):
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def copy_of_the_tree(folder):
    for path in [*ROOT.glob("*.py"), ROOT / "eval_sets.json"]:
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
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words, *shlex.split(more)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def command_of(title):
    (block,) = re.findall(r"^```\n(python .*?)^```$", section(title), re.M | re.S)
    return block


def follow(title, folder, more=SHORT):
    """Write the files of a section, apply its diff, run its command; the run's folder."""
    for name, code in re.findall(
        r"^```python\n# (\w+\.py)\n(.*?)^```$", section(title), re.M | re.S
    ):
        (folder / name).write_text(code)
    for diff in re.findall(r"^```diff\n(.*?)^```$", section(title), re.M | re.S):
        apply(diff, folder)
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
    more = f"{SHORT} --batch-size 16 --eps-a 0"
    run(command_of("Another reward of training"), copy, f"{more} --out runs/verdict")
    out = follow("Another reward of training", copy, more)
    is_other = []
    for old, new in zip(rows(copy / "runs/verdict/rollouts.jsonl"), rows(out / "rollouts.jsonl")):
        assert new["r"] == old["r"] == old["reward"]
        is_short = len(new["completion_ids"]) < 40
        assert new["reward"] == (1 if new["r"] > 0 and is_short else -1)
        other = new["reward"] != old["reward"]
        assert new["rho"] == [-rho if other else rho for rho in old["rho"]]
        is_other.append(other)
    assert any(is_other) and not all(is_other)


@pytest.mark.long
def test_another_retrieval_serves_training_and_evaluation(tmp_path):
    copy = copy_of_the_tree(tmp_path)
    out = follow("Another retrieval", copy)
    bank = json.loads((copy / "banks/word_problems.json").read_text())
    kinds = (
        ("s_g", "general_skills", "skill_id", ("title", "principle", "when_to_apply")),
        ("s_e", "common_mistakes", "mistake_id", ("description", "why_it_happens", "how_to_avoid")),
    )
    for row in rows(out / "rollouts.jsonl"):
        words = set(row["problem"].lower().split())
        for place, (score, key, id_field, fields) in enumerate(kinds):
            shares = []
            for entry in bank[key]:
                text = set(". ".join(entry[field] for field in fields).lower().split())
                shares.append((-len(text & words) / len(text), entry[id_field]))
            best = sorted(shares, key=lambda share: share[0])[:4]
            assert row[score] == pytest.approx([-share for share, _ in best])
            assert [pair[place] for pair in row["pairs"]] == [id_ for _, id_ in best]
    # Base+Skill asks the same function: a bank that is asked for its entries by words.
    seen = """
import eval, rollout, skills
calls, by_words = [], skills.SkillBank._best_by_words
def counted(self, key, problem, k):
    calls.append(key)
    return by_words(self, key, problem, k)
skills.SkillBank._best_by_words = counted
flags = "--data tiny/test.jsonl --limit 1 --samples 1 --max-new-tokens 4 --out runs/eval"
flags += " --skills banks/word_problems.json --encoder tiny/encoder"
assert eval.main(["tiny/model", *flags.split()]) == 0
assert {*calls} == {"general_skills", "common_mistakes"}
"""
    (copy / "seen.py").write_text(seen)
    run("python seen.py", copy)


@pytest.mark.long
def test_another_method_is_two_functions_and_continues(tmp_path):
    copy = copy_of_the_tree(tmp_path)
    out = follow("Another method", copy, "--steps 1 --batch-size 2 --eval-data=")
    run("python rejection.py --resume runs/rejection --steps 2", copy)
    rollouts = rows(out / "rollouts.jsonl")
    assert [row["step"] for row in rollouts] == [1] * 8 + [2] * 8
    assert [len({row["problem_id"] for row in rollouts[i : i + 4]}) for i in (0, 4, 8, 12)] == [
        1
    ] * 4
    assert not any(row["pairs"] for row in rollouts) and not (out / "bank").exists()
    assert {row["r"] for row in rollouts} == {-1, 1}
    assert all((row["loss"] > 0) == (row["r"] > 0) for row in rollouts)
    assert all(row["loss"] == 0 for row in rollouts if row["r"] < 0)


@pytest.mark.long
def test_another_model_family_needs_the_names_of_its_projections(tmp_path):
    copy = copy_of_the_tree(tmp_path)
    conftest.make_model("gpt_neox").save_pretrained(copy / "models/neox")
    conftest.make_tokenizer().save_pretrained(copy / "models/neox")
    words = shlex.split(command_of("Another model family"))[1:]
    done = subprocess.run(
        [sys.executable, *words, *SHORT.split()], cwd=copy, capture_output=True, text=True
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    out = follow("Another model family", copy, f"{SHORT} --max-new-tokens 8")
    assert len(rows(out / "rollouts.jsonl")) == 4
    adapter = json.loads(next(out.glob("checkpoints/*/adapter_config.json")).read_text())
    wanted = {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}
    assert set(adapter["target_modules"]) == wanted


GYM = "Another domain, end to end"
NO_GYM = "reasoning_gym is not installed: pip install reasoning-gym, and this recipe runs, too"


@pytest.mark.long
def test_another_domain_is_trained_and_evaluated_end_to_end(tmp_path):
    pytest.importorskip("reasoning_gym", reason=NO_GYM)
    copy = copy_of_the_tree(tmp_path)
    for name, code in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", section(GYM), re.M | re.S):
        (copy / name).write_text(code)
    output = ""
    for command in command_of(GYM).replace("\\\n", " ").splitlines():
        output += run(command, copy)
    out = copy / "runs" / "gym"
    problems = {row["problem"].strip(): row for row in rows(copy / "gym_train.jsonl")}
    assert {row["task"] for row in problems.values()} == {"letter_counting", "countdown"}
    assert {row["step"] for row in rows(out / "rollouts.jsonl")} == {1, 2}
    assert all(row["problem"] in problems for row in rows(out / "rollouts.jsonl"))
    prompts = [row["prompt"] for row in rows(out / "bank" / "replies.jsonl")]
    assert all("math" not in prompt for prompt in prompts) and "puzzle" in prompts[0]
    settings = json.loads((out / "eval/step_000002/settings.json").read_text())
    assert settings["verifier"].startswith("gym_domain:ReasoningGym (")
    # The run's own evaluation, and then eval.py on the same samples.
    assert len(rows(out / "eval/step_000002/samples.jsonl")) == 80
    assert output.count("| step_000002 | gym_test | 20 |") == 2


def test_an_expression_that_is_not_the_reference_is_right_where_its_value_is(tmp_path):
    """What a scorer evaluates is arithmetic and short, whatever a model writes."""
    pytest.importorskip("reasoning_gym", reason=NO_GYM)
    code = re.search(r"^```python\n(# gym_domain\.py\n.*?)^```", section(GYM), re.M | re.S)[1]
    (tmp_path / "gym_domain.py").write_text(code)
    question = """
import gym_domain, problems
metadata = {"numbers": [6, 61, 94, 4], "target": 309}
x = problems.Problem("0", "p", "94*4 - 61 - 6", {"task": "countdown", "metadata": metadata})
answers = ["4*94 - (61 + 6)", "309", "9**9**9**9", "__import__('os').getcwd()", "(", "1/0"]
cases = [(x, rf"so \\boxed{{{answer}}}") for answer in answers]
with gym_domain.ReasoningGym() as judge:
    print([verdict.right for verdict in judge.judge(cases)])
"""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-c", question], env=environment, capture_output=True, text=True
    )
    assert done.stdout == f"{[True] + [False] * 5}\n", done.stderr
