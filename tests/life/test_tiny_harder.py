"""The second world: its solutions, and what the training text says."""

import json
import random

import harder as lock
import pytest
import transformers
from conftest import ROOT

from lib import verify


@pytest.mark.parametrize("guided", [False, True])
def test_a_solution_is_right_exactly_where_no_step_errs(guided):
    rng = random.Random(0)
    for _ in range(200):
        x = lock.draw(rng)
        errs = [rng.random() < 0.5 for _ in range(3)]
        text = lock.solution(rng, x, errs, guided)
        assert lock.steps_right(x, text) == [not err for err in errs]
        assert (verify.extract_answer(text) == x.answer) == (not any(errs))
        assert ("Well," in text) <= (not guided) and (";" in text) <= guided
    assert lock.steps_right(x, "The code is \\boxed{1}.") == [None] * 3


def test_a_row_decides_each_step_by_itself():
    """A relevant skill and mistake leave .034 of the error, and the two other steps their .512."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "tiny" / "model")
    rng, seen = random.Random(1), set()
    for _ in range(300):
        x = lock.draw(rng)
        row = lock.solving_row(rng, tokenizer, x, "plain")
        assert len(row.choices) == 3 and len(row.weights) == len(row.reply_ids)
        for at, other, chance in row.choices:
            assert row.reply_ids[at] != other and row.weights[at] == 4
            assert round(chance, 3) in (0.512, 0.488)
        chances = lock.solving_row(rng, tokenizer, x, "pair").choices
        seen |= {round(min(chance, 1 - chance), 3) for _, _, chance in chances}
    assert {0.034, 0.488, 0.161} <= seen


def test_held_out_problems_name_their_steps():
    locks = lock.held_out(random.Random(0))
    for name, count in lock.HELD_OUT.items():
        rows = [json.loads(line) for line in open(lock.OUT / f"{name}.jsonl")]
        assert len(rows) == count and len({row["problem"] for row in rows}) == count
        for row in rows:
            assert "".join(row["steps"]) == row["answer"] and len(set(row["families"])) == 3
            assert locks[row["id"]].problem == row["problem"]  # they can be drawn again
