"""Algorithm 2 in a run: lines 1-7, and the same bank from one process and two.

The tests' random model solves the seed problems, and the tests' verifier says which are right.
What becomes of the memories (lines 8-16) is in test_algorithms.py.
"""

import dataclasses
import json
import shutil

import driver
import pytest
import small_run
import torch
from conftest import save_model
from driver import rows
from small_run import flags, opened

import rollout
import sgsd
import skills
from lib import model
from lib.run import Run
from rollout import Sampling

SEEDS = {"bank": "", "cold_start": 6, "rollout_rows": 2}
policy_as_writer = sgsd.bank_writer  # which the tests' runs replace by a fake


def solve(world_dir, out, **changes):
    """(the bank of a run, its memories by their problems)"""
    with opened(world_dir, out, **SEEDS | changes) as run:
        bank = sgsd.make_bank(run)
    memories = rows(out / "bank/memories.jsonl")
    return bank, {memory["problem_id"]: memory for memory in memories}


@pytest.mark.parametrize("thinking", [True, False])
def test_alg2_lines_1_to_7_solved_seed_problems_become_memories(thinking, world_dir, tmp_path):
    """The paper's sampling in evaluation, by default with thinking (S21)."""
    out = tmp_path / "run"
    bank, memories = solve(world_dir, out, cold_start_thinking=thinking)
    lm, tokenizer = model.load_model(str(world_dir / "model"), torch.device("cpu"))
    with opened(world_dir, tmp_path / "other") as run:
        data = {x.id: x for x in run.problems}
    seeds = bank.metadata["seed_problems"]
    assert len(seeds) == bank.metadata["seed_solutions"] == len(memories) == 6
    for name in seeds:
        x = data[name]
        text = skills.render("seed_problem", {"problem": x.problem})  # line 3
        prompt = rollout.chat_ids(tokenizer, text, thinking="bare" if thinking else "closed")
        key = rollout.sample_key(0, 0, x.id)
        job, sampling = rollout.Job(0, prompt, key, 20, x), Sampling(1.0, 0.95, 0, 20)
        turns = rollout.stream(lm, tokenizer, [job], sampling, 1)
        stops, verifier = rollout.stop_ids(lm, tokenizer), small_run.CoinVerifier(5.0)
        for turn in rollout.rollouts(tokenizer, stops, verifier, turns):  # line 4
            roll = turn[0][1] if turn else None
        record = skills.memory_of(dataclasses.asdict(roll)) | {"truncated": roll.truncated}
        assert memories[x.id] == record  # lines 5 and 6
    right = sum(memory["reward"] == 1 for memory in memories.values())
    assert bank.metadata["right_seed_solutions"] == right
    assert 0 < right < 6 and bank.general_skills and bank.common_mistakes


def test_the_seed_problems_are_drawn_by_the_runs_seed(world_dir, tmp_path):
    """Also where more are asked for than there are."""
    names = []
    for seed, count in ((0, 6), (1, 6), (0, 99)):
        bank, _ = solve(world_dir, tmp_path / f"{seed} {count}", seed=seed, cold_start=count)
        names.append(bank.metadata["seed_problems"])
    assert {*names[0]} != {*names[1]} and len({*names[2]}) == 12


def test_a_reply_depends_on_its_prompt_and_how_often_it_came_before_alone(world_dir, tmp_path):
    """D4: greedy first, then sampled; a new writer begins anew."""
    with opened(world_dir, tmp_path / "run", reply_tokens=8) as run:
        writer = policy_as_writer(run, 0)
        a, b = writer(["a", "b b b"])
        second, other = writer(["a", "b b b"])
        (third,) = writer(["a"])
        assert len({a, second, third}) == 3 and other != b
        again = policy_as_writer(run, 25)
        assert again(["b b b", "a", "c"])[:2] == [b, a]
        assert again(["b b b"]) == [other] and again(["a"]) == [second] and again(["a"]) == [third]
        prompt = rollout.chat_ids(run.tokenizer, "a", thinking="closed")
        greedy = Sampling(0.0, 1.0, 0, len(prompt) * 5 // 4)
        (ids,) = rollout.generate(run.lm, run.tokenizer, [prompt], greedy, [0])
        assert a == rollout.text_of(run.tokenizer, ids)
        log = rows(run.out / "bank/replies.jsonl")
        assert [row["step"] for row in log] == [0] * 5 + [25] * 6
        assert [row["repeat"] for row in log[:5]] == [0, 0, 1, 1, 2] and log[0]["reply"] == a


def test_a_reply_gets_what_the_context_leaves_and_the_cut_ones_are_counted(
    world_dir, tmp_path, capsys
):
    """S35. By default a reply may be a quarter longer than its prompt (D4)."""
    place = str(save_model(tmp_path / "model", max_position_embeddings=900))
    with opened(world_dir, tmp_path / "run", model=place, reply_tokens=100) as run:
        decode, lengths = run.stream, {}

        def stream(jobs, sampling, rows):
            for turn in decode(jobs, sampling, rows):
                lengths.update((job.index, (len(job.prompt), len(job.ids))) for job in turn)
                yield turn

        run.stream = stream
        prompts = ["a" * 50, "b" * 840, "c" * 900]
        replies = policy_as_writer(run, 0)(prompts)
    assert replies[0] and replies[1] and replies[2] == ""
    assert lengths[0][1] <= 100 and sum(lengths[1]) == 900 and 2 not in lengths
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "cut 2 of 3" in x]
    assert "context of 900" in line and "--merge-group-size" in line
    assert [row["reply"] for row in rows(tmp_path / "run/bank/replies.jsonl")] == replies


def with_the_policy_as_writer(argv):
    """A process that makes a bank. The random model's own replies give no entry."""
    with Run.open(small_run.parsed(argv), skills.SkillBank.load, sgsd.student_prompt) as run:
        run.bank = sgsd.make_bank(run)
        run.save_bank()
    return 0


@pytest.mark.parametrize("program", [small_run.main, with_the_policy_as_writer])
def test_two_processes_make_the_bank_of_one(program, world_dir, tmp_path):
    """By the tests' writer, and by the model, which ends on half of all ids: replies are short.
    Memories are written as they come."""
    hasty, made = shutil.copytree(world_dir / "model", tmp_path / "hasty"), []
    (hasty / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(0, 270, 2)]}))
    for count in (1, 2):
        out = tmp_path / str(count)
        argv = flags(world_dir, out, model=hasty, steps=0, **SEEDS | {"cold_start": 4})
        if count == 1:
            driver.run(argv, program)
        else:
            driver.run_two(argv, program)
        bank = driver.contents(out / "bank")
        made.append(bank | {"memories.jsonl": sorted(bank["memories.jsonl"].splitlines())})
    assert made[0] == made[1]
