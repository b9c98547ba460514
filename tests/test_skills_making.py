"""Who makes a bank: seed solutions, the writer and its replies, a bank of the paper's size."""

import dataclasses

import bank_scale
import driver
import pytest
import torch
from conftest import make_model
from driver import make_run, rows

import config
import distributed
import policy
import rollout
import skills
from rollout import Sampling


class CountingVerifier(driver.CoinVerifier):
    seen = 0

    def verify_many(self, pairs):
        self.seen += len(pairs)
        return super().verify_many(pairs)


def test_no_memory_is_made_twice_after_a_kill(world_dir, tmp_path):
    changes = {"bank": "", "cold_start": 6, "max_new_tokens": 9}
    run, verifier = make_run(world_dir, tmp_path / "run", **changes), CountingVerifier()

    def make(folder):
        writer = dataclasses.replace(run.writer, rows=2, folder=folder)
        solver = (run.model, run.tokenizer, verifier)
        return skills.make_bank(run.problems, *solver, writer, run.cfg)

    whole = make(tmp_path / "a")
    assert verifier.seen == 6
    lines = (tmp_path / "a/memories.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/memories.jsonl").write_text("".join(lines[:3]) + lines[3][:50])  # torn
    assert make(tmp_path / "b") == whole
    assert verifier.seen == 6 + 3
    assert (tmp_path / "b/memories.jsonl").read_text() == "".join(lines)


def test_seed_problems_are_solved_under_settings_of_their_own(world_dir, tmp_path):
    """S21: the authors' by default; here greedy and short, whatever the student's sampling is."""
    settings = dataclasses.asdict(config.Config())
    own = [settings[f"cold_start_{name}"] for name in ("temperature", "top_p", "top_k", "tokens")]
    assert own == [1.0, 0.95, 0, 38912] and settings["cold_start_thinking"]
    greedy = {"bank": "", "cold_start": 12, "cold_start_temperature": 0.0, "cold_start_tokens": 5}
    made = []
    for seed in (0, 1):
        run = make_run(world_dir, tmp_path / str(seed), seed=seed, **greedy)
        solver = (run.model, run.tokenizer, run.verifier)
        bank = skills.make_bank(run.problems, *solver, run.writer, run.cfg)
        memories = rows(tmp_path / str(seed) / "bank/memories.jsonl")
        made.append({memory["problem_id"]: memory["completion"] for memory in memories})
        right = sum(memory["reward"] == 1 for memory in memories)
        assert bank.metadata["seed_solutions"] == 12
        assert bank.metadata["right_seed_solutions"] == right == 6
    assert made[0] == made[1]
    assert all(len(text) <= 30 for text in made[0].values())  # no token has more than 6 characters


def test_memories_of_other_settings_are_not_mixed_in(world_dir, tmp_path):
    changes = {"bank": "", "cold_start": 6}
    for tokens, lines in ((9, 6), (9, 6), (5, 12)):
        run = make_run(world_dir, tmp_path / "run", True, cold_start_tokens=tokens, **changes)
        skills.make_bank(run.problems, run.model, run.tokenizer, run.verifier, run.writer, run.cfg)
        memories = rows(tmp_path / "run/bank/memories.jsonl")
        assert [m["made_with"]["max_new_tokens"] for m in memories[-6:]] == [tokens] * 6
        assert len(memories) == lines


def test_the_writer_answers_greedily_and_samples_what_it_is_asked_again(tokenizer, tmp_path):
    """A reply is a function of the prompt and of how often it was asked: resume needs no memory."""
    model, alone = make_model(), distributed.World(0, 1, torch.device("cpu"))
    writer = skills.Writer(model, tokenizer, alone, tmp_path, 8, 0)

    def ask(prompts, times):
        questions = [skills.Question(prompt, "general_skills") for prompt in prompts]
        return [text for text, _ in writer.replies(questions, times, "")]

    a, b = ask(["a", "b b b"], [0, 0])
    assert ask(["b b b", "a", "c"], [0, 0, 0])[:2] == [b, a] and ask([], []) == []
    first, second, other = ask(["a", "a", "b b b"], [1, 2, 1])
    assert len({a, first, second}) == 3 and other != b
    assert ask(["b b b", "a"], [1, 2]) == [other, second]
    prompt = policy.chat_ids(tokenizer, "a", thinking=False)
    ids = rollout.generate(model, tokenizer, [prompt], Sampling(0.0, 1.0, 0, 8), [0])[0]
    assert a == tokenizer.decode(ids, skip_special_tokens=True)


# ------------------------------------------------------------------- a bank of the paper's size

FILES = bank_scale.SHARED.exists() and bank_scale.TOKENIZER.exists()
needs_files = pytest.mark.skipif(not FILES, reason="no candidates of the authors or no tokenizer")


@needs_files
@pytest.mark.parametrize("name", bank_scale.SIZES)
def test_a_model_that_keeps_every_item_loses_none_and_every_reply_is_whole(name):
    lists, layers, writer = bank_scale.merged(name, 1)
    assert {row["outcome"] for row in writer.said} == {"read"}
    for key, size in zip(skills.FIELDS, bank_scale.SIZES[name]):
        assert layers[key][0]["input_items"] == size
        assert [layer["output_items"] for layer in layers[key]] == [size] * len(layers[key])
        texts = {skills.entry_text(entry, key) for entry in bank_scale.candidates(name)[key]}
        assert {skills.entry_text(entry, key) for entry in lists[key]} == texts


@needs_files
def test_a_model_that_merges_half_comes_to_its_root_group_without_losing_a_reply():
    _, layers, writer = bank_scale.merged("1b", 2)
    assert {row["outcome"] for row in writer.said} == {"read"}
    assert [layer["output_items"] for layer in layers["general_skills"]] == [175, 88, 44, 22, 11]
    assert {layers[key][-1]["stopped_reason"] for key in layers} == {"root_group_reached"}
