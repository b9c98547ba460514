"""A run's first bank: seed solutions under settings of their own, made once, and its refusal."""

import dataclasses
import json
import re

import conftest
import driver
import pytest
from driver import make_run, rows

import sgsd
from lib import config, files


class CountingVerifier(driver.CoinVerifier):
    seen = 0

    def judge(self, cases):
        self.seen += len(cases)
        return super().judge(cases)


def make_bank(world_dir, out, **changes):
    """(bank, memories, how many solutions were judged) of a cold start.

    A run writes its settings before it.
    """
    if changes.get("resume"):
        settings = driver.settings(world_dir, out)
        out.mkdir(exist_ok=True)
        files.write_json(out / "config.json", {"settings": settings})
    run = make_run(world_dir, out, bank="", **changes)
    run.verifier = CountingVerifier()
    bank = sgsd.make_bank(run, out / "bank")
    return bank, rows(out / "bank/memories.jsonl"), run.verifier.seen


def test_no_memory_is_made_twice_after_a_kill(world_dir, tmp_path):
    changes = {"cold_start": 6, "rollout_rows": 2}
    whole, memories, judged = make_bank(world_dir, tmp_path / "a", **changes)
    assert judged == 6
    lines = (tmp_path / "a/bank/memories.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "b/bank").mkdir(parents=True)
    torn = tmp_path / "b/bank/memories.jsonl"
    torn.write_text("".join(lines[:3]) + lines[3][:50])
    again = make_bank(world_dir, tmp_path / "b", resume=True, **changes)
    assert again == (whole, memories, 3)
    assert torn.read_text() == "".join(lines)


def test_seed_problems_are_solved_under_settings_of_their_own(world_dir, tmp_path):
    """S21: the authors' by default; here greedy and short, whatever the student's sampling is."""
    defaults = dataclasses.asdict(config.Config())
    names = ("temperature", "top_p", "top_k", "tokens")
    assert [defaults[f"cold_start_{name}"] for name in names] == [1.0, 0.95, 0, 38912]
    assert defaults["cold_start_thinking"]
    greedy = {"cold_start": 12, "cold_start_temperature": 0.0, "cold_start_tokens": 5}
    completions = []
    for seed in (0, 1):
        bank, memories, _ = make_bank(world_dir, tmp_path / str(seed), seed=seed, **greedy)
        completions.append({memory["problem_id"]: memory["completion"] for memory in memories})
        right = sum(memory["reward"] == 1 for memory in memories)
        assert bank.metadata["seed_solutions"] == 12
        assert bank.metadata["right_seed_solutions"] == right == 6
    assert completions[0] == completions[1]
    assert all(len(text) <= 30 for text in completions[0].values())  # 6 characters a token at most


def test_memories_of_other_settings_are_not_mixed_in(world_dir, tmp_path):
    for tokens, judged, lines in ((9, 6, 6), (9, 0, 6), (5, 6, 12)):
        changes = {"cold_start": 6, "cold_start_tokens": tokens, "resume": True}
        _, memories, seen = make_bank(world_dir, tmp_path / "run", **changes)
        assert [m["made_with"]["max_new_tokens"] for m in memories[-6:]] == [tokens] * 6
        assert (seen, len(memories)) == (judged, lines)


def test_a_corrected_reference_answer_makes_its_memory_anew(world_dir, tmp_path):
    changes = {"cold_start": 6, "resume": True}
    make_bank(world_dir, tmp_path / "run", **changes)
    file = tmp_path / "run/bank/memories.jsonl"
    memories = rows(file)
    memories[2]["made_with"]["answer"] = "a mistake"
    file.write_text("".join(json.dumps(m) + "\n" for m in memories))
    _, again, seen = make_bank(world_dir, tmp_path / "run", **changes)
    assert seen == 1 and again[6]["problem_id"] == memories[2]["problem_id"]


REASONS = [  # correct and cut of eight seed solutions, lost replies, and what the error says
    (0, 1, {}, "from 8 solutions, 0 correct and 1 cut at --cold-start-tokens"),
    (8, 0, {}, "from 8 solutions, 8 correct and 0 cut"),
    (4, 0, {"no JSON": 3}, "3 replies lost (3 no JSON)"),
]


@pytest.mark.parametrize("right,cut,lost,words", REASONS)
@pytest.mark.parametrize("sizes", [(0, 0), (2, 0), (0, 2)])
def test_a_bank_with_an_empty_list_is_refused_with_its_cause(right, cut, lost, words, sizes):
    bank = conftest.make_bank(None, *sizes)
    bank.metadata |= {"seed_solutions": 8, "right_seed_solutions": right}
    bank.metadata |= {"truncated_seed_solutions": cut, "lost_replies": lost}
    with pytest.raises(ValueError, match=re.escape(words)):
        sgsd.refuse_without_pairs(bank, config.Config())
    sgsd.refuse_without_pairs(bank, config.Config(allow_empty_bank=True))


def test_a_bank_with_a_pair_is_not_refused_and_one_by_hand_may_be():
    sgsd.refuse_without_pairs(conftest.make_bank(None, 1, 1), config.Config())
    with pytest.raises(ValueError, match="bank: 0 skills and 2 mistakes: no pair, no teacher"):
        sgsd.refuse_without_pairs(conftest.make_bank(None, 0, 2), config.Config())
