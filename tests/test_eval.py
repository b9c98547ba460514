"""Metrics and intervals by hand, the sets, Base+Skill, and evaluations that go on after a kill."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import datasets
import numpy as np
import peft
import pytest
import torch
from conftest import PROBLEMS, ROOT, make_bank, make_model

import eval
import policy
import problems
import rollout
import skills
from distributed import UserError

ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_pass_is_the_mean_over_all_subsets_and_of_one_the_average(k):
    rows = [[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]]
    hits = [any(subset) for row in rows for subset in itertools.combinations(row, k)]
    assert eval.pass_at_k(np.array(rows, dtype=bool), k) == pytest.approx(np.mean(hits))
    assert eval.avg_at_k(np.array(rows, dtype=bool)) == 8 / 20


def test_maj_by_hand():
    def same(gold, pred):
        return pred is not None and float(gold) == float(pred)

    preds = [["1", "2.0", "2"], [None, None, "3"], ["5", "6", None], [None, None, None]]
    # 2 has two votes, 3 has one, 5 came before 6, and nobody voted on the last
    assert eval.maj_at_k(preds, ["2", "3", "5", "7"], same) == 3 / 4
    assert eval.maj_at_k([["1", "2", "2"]], ["1"], same) == 0


def test_bad_metric_input():
    for shape in ((0, 3), (3,), (2, 0)):
        with pytest.raises(ValueError, match="correct_PK must be"):
            eval.avg_at_k(np.zeros(shape))
    with pytest.raises(ValueError, match=r"pass_at_k: got k = 4, must be in 1..3"):
        eval.pass_at_k(np.ones((2, 3)), 4)
    with pytest.raises(ValueError, match="maj_at_k: got 1 rows"):
        eval.maj_at_k([["1"]], ["1", "2"], lambda gold, pred: True)


def test_intervals():
    scores = np.random.default_rng(1).random(200)
    low, high = eval.bootstrap_interval(scores)
    assert low < scores.mean() < high
    # for many problems it is the normal interval
    assert high - low == pytest.approx(2 * 1.96 * scores.std() / 200**0.5, rel=0.1)
    # sets weigh alike: of 1,000 sure problems and 10 coin flips it is half as wide as the coins'
    low, high = eval.bootstrap_interval(np.ones(1000), np.array([0.0, 1.0] * 5))
    assert (low + high) / 2 == pytest.approx(0.75, abs=0.02)
    assert high - low == pytest.approx(2 * 1.96 * 0.5 / 10**0.5 / 2, rel=0.15)


def measured(path, base="", **sets):
    """A policy with these scores per problem, by set."""
    table = {name: {"avg": float(np.mean(scores_P))} for name, scores_P in sets.items()}
    scores = {name: [np.asarray(scores_P)] for name, scores_P in sets.items()}
    return eval.Policy(path, base, scores=scores, table=table)


def test_pairing_removes_what_policies_share():
    """One policy is better by .1 everywhere: the difference is certain, and neither mean is."""
    shared = np.linspace(0, 0.9, 30)
    base, new = measured("base", d=shared), measured("new", d=shared + 0.1)
    eval.tabulate([base, new])
    row = new.table["d"]
    assert "diff" not in base.table["d"] and row["avg_low"] < 0.48
    assert [row["diff"], row["diff_low"], row["diff_high"]] == pytest.approx([0.1] * 3)


def test_the_best_checkpoint_stands_beside_the_last():
    averages = {"r/checkpoints/1": 0.3, "r/checkpoints/2": 0.5, "r/checkpoints/3": 0.4, "q/a": 0.8}
    policies = [measured("base", d=[0.9] * 4, e=[0.9] * 4)]
    for path, avg in averages.items():
        policies.append(measured(path, "base", d=[avg] * 4, e=[avg] * 4))
    eval.tabulate(policies)
    (choice,) = eval.selections(policies)
    assert (choice["of"], choice["checkpoints"]) == ("r/checkpoints", 3)
    assert (choice["best"], choice["last"]) == ("r/checkpoints/2", "r/checkpoints/3")
    found = [choice["best_avg"], choice["last_avg"], choice["diff"]]
    assert found == pytest.approx([0.5, 0.4, 0.1])


ANSWERS = {  # what the hub holds and what is read; some sets call the problem a question
    "aime24": ("problem", "025", "025"),
    "aime25": ("problem", 25, "25"),
    "hmmt25": ("problem", "\\pi", "\\pi"),
    "math500": ("problem", "1", "1"),
    "amc23": ("question", 27.0, "27"),
    "gsm8k": ("question", "2+2=<<2+2=4>>4\n#### 1,234", "1,234"),
}


@pytest.fixture
def hub(monkeypatch):
    """A hub that holds two rows of each set."""
    names = {entry[:3]: name for name, entry in problems.SETS.items()}

    def load(hub_id, config=None, *, split):
        key, answer, _ = ANSWERS[names[hub_id, config, split]]
        return [{"id": 60, key: " p ", "answer": answer}] * 2

    monkeypatch.setattr(datasets, "load_dataset", load)


@pytest.mark.parametrize("name", problems.SETS)
def test_sets_by_name(name, hub, monkeypatch):
    found = problems.load_set(name, "unused")
    assert found == [problems.Problem(str(i), "p", ANSWERS[name][2]) for i in range(2)]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [{"text": "p"}])
    with pytest.raises(UserError, match=f"{name}: .* not read .KeyError.*a JSONL"):
        problems.load_set(name, "unused")


def command(world_dir, out, more="", model=""):
    flags = f"--data {world_dir}/data.jsonl --samples 3 --max-new-tokens 8 --rows 5 --device cpu"
    return f"{model or world_dir / 'model'} {flags} --out {out} {more}".split()


def evaluate(world_dir, out, more="", model=""):
    """The samples in order of an evaluation that succeeds."""
    assert eval.main(command(world_dir, out, more, model)) == 0
    return samples(out)


def samples(out):
    rows = [json.loads(line) for line in open(out / "samples.jsonl")]
    return sorted(rows, key=lambda row: (row["set"], row["id"], row["sample"]))


def test_the_papers_three_sets_are_the_default(world_dir, tmp_path, hub, capsys):
    flags = f"--limit 1 --samples 1 --max-new-tokens 4 --out {tmp_path}"
    assert eval.main([f"{world_dir}/model", *flags.split()]) == 0
    assert [row["set"] for row in samples(tmp_path)] == ["aime24", "aime25", "hmmt25"]
    assert "| model | (mean) | 3 | 0.0% | 0.0%-0.0% |" in capsys.readouterr().out


def test_kill_9_and_go_on(world_dir, tmp_path):
    """One row at a time, so that it is exact: a batch's other rows can move a draw by rounding."""
    long = "--max-new-tokens 40 --samples 5 --rows 1 --limit 6"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    rows = evaluate(world_dir, whole, long)
    log = killed / "samples.jsonl"
    program = [sys.executable, ROOT / "eval.py", *command(world_dir, killed, long)]
    process = subprocess.Popen(program, env=ONE_THREAD)
    while process.poll() is None and not (log.exists() and log.stat().st_size):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    before = log.read_text()
    before = before[: before.rfind("\n") + 1]
    assert 0 < before.count("\n") < 30 and not (killed / "results.json").exists()
    log.write_text(before + '{"set": "da')  # a torn line
    assert evaluate(world_dir, killed, long) == rows
    assert log.read_text().startswith(before)
    assert (whole / "results.json").read_bytes() == (killed / "results.json").read_bytes()


def test_two_processes_give_the_samples_of_one(world_dir, tmp_path):
    one, two = tmp_path / "1", tmp_path / "2"
    whole = evaluate(world_dir, one)
    assert len(whole) == 36 and len({row["text"] for row in whole}) > 30
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node=2".split()
    program = [sys.executable, *torchrun, ROOT / "eval.py", *command(world_dir, two)]
    run = subprocess.run(program, capture_output=True, text=True, env=ONE_THREAD, timeout=150)
    assert run.returncode == 0, run.stderr[:2000] + run.stderr[-2000:]
    assert samples(two) == whole
    assert (one / "results.json").read_bytes() == (two / "results.json").read_bytes()


def test_a_problem_that_changed_is_sampled_anew(world_dir, tmp_path):
    data = tmp_path / "d.jsonl"
    for answer in ("3", "4"):
        data.write_text(json.dumps({"problem": "What is 1 plus 2?", "answer": answer}) + "\n")
        rows = evaluate(world_dir, tmp_path, f"--data {data} --samples 1")
        assert [row["gold"] for row in rows] == [answer]


def test_a_sample_is_a_function_of_seed_problem_and_number(world_dir, tmp_path):
    """Other problems, a problem's id and set, the rows and the number of samples have no part."""
    whole = {row["id"]: [] for row in PROBLEMS}
    for row in evaluate(world_dir, tmp_path / "a"):
        whole[row["id"]].append(row["text"])
    part = [{**row, "id": f"new {row['id']}"} for row in reversed(PROBLEMS[3:7])]
    data = tmp_path / "part.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in part))
    more = f"--data {data} --rows 2 --samples 2 --limit 3"
    rows = evaluate(world_dir, tmp_path / "b", more)
    assert len(rows) == 6
    for row in rows:
        assert row["text"] == whole[row["id"].removeprefix("new ")][row["sample"]]
    (table,) = json.loads((tmp_path / "b/results.json").read_text())["results"].values()
    assert (table["part"]["problems"], table["part"]["samples"]) == (3, 6)


def test_a_base_against_all_checkpoints_of_a_run(world_dir, tmp_path, capsys):
    base, foreign = tmp_path / "model", tmp_path / "foreign"
    shutil.copytree(world_dir / "model", base)
    steps = [tmp_path / f"run/checkpoints/step_00000{i}" for i in (1, 2)]
    for seed, path in enumerate([*steps, foreign]):
        model, _ = policy.load_model(str(base), torch.device("cpu"))
        torch.manual_seed(seed)
        lora = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
        peft.get_peft_model(model, lora).save_pretrained(path)
    more = f"--data {world_dir}/data.jsonl --samples 3 --max-new-tokens 8".split()
    everything = [str(base), str(tmp_path / "run"), str(foreign), *more]
    assert eval.main(everything) == 0
    out = capsys.readouterr().out
    whole = json.loads((tmp_path / "run/eval/results.json").read_text())
    assert list(whole["results"]) == [str(path) for path in (base, *steps, foreign)]
    assert [choice["best"] for choice in whole["selection"]] == [str(steps[0])]
    assert "of 2 checkpoints" in out and "best was picked on these problems" in out
    assert whole["results"][str(foreign)]["data"]["diff"] == 0.0
    assert out.count("+0.0% to +0.0%") == 4
    texts = set()  # each policy has sampled, in a folder of its own
    for path in (base, *steps, foreign):
        texts.add(tuple(row["text"] for row in samples(path / "eval")))
    assert len(texts) == 4

    config = (base / "config.json").rename(tmp_path / "away")  # now the model cannot be loaded
    assert eval.main([str(steps[1]), *more]) == 0  # and need not be: the samples are there
    assert (steps[1] / "eval/results.json").exists()
    config.rename(base / "config.json")
    shutil.copy(steps[0] / "adapter_model.safetensors", foreign)
    capsys.readouterr()
    assert eval.main(everything) == 2
    assert "foreign/eval/settings.json: an evaluation with other" in capsys.readouterr().err


def test_other_weights_at_the_same_place_are_not_the_same_policy(world_dir, tmp_path, capsys):
    """Local weights count by content: made anew they are refused, moved they are known again."""
    model, moved, out = tmp_path / "model", tmp_path / "moved", tmp_path / "out"
    shutil.copytree(world_dir / "model", model)
    evaluate(world_dir, out, "--limit 2", model)
    before = (out / "samples.jsonl").read_bytes()
    model.rename(moved)
    evaluate(world_dir, out, "--limit 2", moved)
    assert (out / "samples.jsonl").read_bytes() == before
    make_model(seed=1).save_pretrained(moved)
    assert eval.main(command(world_dir, out, "--limit 2", moved)) == 2
    assert "other settings" in capsys.readouterr().err


def test_base_skill_is_the_teachers_block_with_all_pairs():
    bank = make_bank()
    pairs = []
    for skill, mistake in zip(bank.general_skills, bank.common_mistakes):
        pairs.append(skills.SkillPair(skill, mistake, 1.0, 1.0))
    one = skills.render_teacher(pairs[0], "{skills}")
    assert skills.render_skills(pairs[:1], "{skills}") == one
    text = skills.render_skills(pairs, "P")
    assert [text.count("_Apply when"), text.count("**Instead**")] == [4, 4]
    assert text.index("Use add") < text.index("Use carry") < text.index("### Mistakes to Avoid")
    assert text.endswith("\n\n" + skills.render_student("P"))


def test_skills_reach_a_prompt_only_when_asked_for(world_dir, tmp_path, capsys):
    """The samples are those of prompts with the retrieved pairs, and of plain ones without."""
    model, tokenizer = policy.load_model(f"{world_dir}/model", torch.device("cpu"))
    bank = skills.SkillBank.load(world_dir / "bank.json")
    embed = policy.load_encoder(f"{world_dir}/encoder", "cpu")
    given = f"--samples 1 --skills {world_dir}/bank.json --encoder {world_dir}/encoder"
    sampling = rollout.Sampling(1.0, 0.95, 0, 8)
    flags = {"skilled": f"{given} --num-skills 2", "plain": "--samples 1"}
    for name, more in flags.items():
        for row in evaluate(world_dir, tmp_path / name, more):
            problem = PROBLEMS[int(row["id"][1:])]["problem"]
            pairs = bank.retrieve(problem, 2, embed) if name == "skilled" else []
            text = skills.render_skills(pairs, problem)
            prompt = rollout.chat_ids(tokenizer, text, thinking=True)
            key = rollout.sample_key(0, 0, problem)
            (drawn,) = rollout.generate(model, tokenizer, [prompt], sampling, [key])
            assert row["text"] == tokenizer.decode(drawn, skip_special_tokens=True)
    settings = json.loads((tmp_path / "skilled/settings.json").read_text())
    assert settings["num_skills"] == 2 and settings["bank"]
    assert eval.main(command(world_dir, tmp_path / "skilled", flags["plain"])) == 2
    assert "other settings" in capsys.readouterr().err
    assert eval.main(command(world_dir, tmp_path / "c", given)) == 2
    assert "--num-skills 8: must be in 1..4" in capsys.readouterr().err
