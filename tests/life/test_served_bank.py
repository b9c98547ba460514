"""A run with --server: the server samples the first bank, and nothing else.

The server is the small one of fake_engine.py.
"""

import json
import shutil

import driver
import pytest
from driver import completes, flags, rows, small_flags, two
from fake_engine import DROP, STOPS, choices, serving

import sgsd
from lib import served

DEAD = "http://127.0.0.1:9/v1"


@pytest.fixture
def engine():
    with serving() as engine:
        yield engine


@pytest.fixture
def writing(engine, tokenizer):
    """The engine solves as it does by itself, and writes the bank as `driver.fake_writer`."""

    def answer(body):
        text = tokenizer.decode(body["prompt"])
        if "Return ONLY" not in text:  # a seed problem
            return engine.sampled(body)
        reply = driver.reply_to(text)
        return 200, choices(token_ids=[*tokenizer.encode(reply), STOPS[0]])

    engine.answer = answer
    return engine


def test_a_bank_alone_is_made_on_a_server_from_the_models_outline(
    writing, tokenizer, world_dir, tmp_path
):
    out, no_weights = tmp_path / "run", shutil.ignore_patterns("*.safetensors")
    outline = shutil.copytree(world_dir / "model", tmp_path / "outline", ignore=no_weights)
    changes = {"model": outline, "bank": "", "steps": 0, "cold_start": 8, "reply_tokens": 999}
    completes(sgsd.main, flags(world_dir, out, server=writing.url, **changes))
    sampled = [tokenizer.decode(body["prompt"]) for body in writing.bodies()]
    assert sum("Return ONLY" not in text for text in sampled) == 8
    assert len(rows(out / "bank/memories.jsonl")) == 8
    replies = rows(out / "bank/replies.jsonl")
    assert replies and len(replies) == len(sampled) - 8
    assert (out / "bank/bank.json").read_text() == (out / "bank/step_000000.json").read_text()


def test_after_the_first_bank_steps_and_evolutions_ask_a_server_for_nothing(
    writing, world_dir, tmp_path
):
    """The model ends on half of all ids, so the replies that `generate` draws are short."""
    out, hasty = tmp_path / "run", shutil.copytree(world_dir / "model", tmp_path / "hasty")
    (hasty / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(0, 270, 2)]}))
    changes = {"bank": "", "cold_start": 8, "reply_tokens": 200, "steps": 2, "evolve_every": 1}
    changes["model"] = hasty
    changes |= {"success_gate": 2.0, "batch_size": 2, "server": writing.url}
    completes(sgsd.main, flags(world_dir, out, **changes))
    replies = [row["step"] for row in rows(out / "bank/replies.jsonl")]
    assert {*replies} == {0, 1, 2} and len(rows(out / "rollouts.jsonl")) == 4
    assert len(writing.bodies()) == 8 + replies.count(0)
    assert {body["model"] for body in writing.bodies()} == {"base"}
    assert {path for path, _ in writing.calls} == {"/v1/completions"}


def test_a_run_that_has_made_its_bank_goes_on_without_its_server(
    engine, world_dir, tmp_path, capsys
):
    """Nor does one need it that is given a bank."""
    out, changes = tmp_path / "run", {"evolve_every": 0}
    completes(driver.main, small_flags(world_dir, out, steps=1, server=engine.url, **changes))
    assert len(engine.bodies()) == 8
    for more in (
        small_flags(world_dir, out, steps=2, server=DEAD, **changes),
        flags(world_dir, tmp_path / "given", steps=1, server=DEAD),
    ):
        completes(driver.main, more)
        assert "--server is not asked" in capsys.readouterr().out


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_server_that_one_of_two_ranks_loses_in_the_cold_start_ends_both(
    rank, world_dir, tmp_path, monkeypatch
):
    """In one line of the rank that lost it. The solutions that came are not asked for again."""
    monkeypatch.setattr(served, "PAUSE_S", 0.001)
    out, log = tmp_path / "run", tmp_path / "lost"
    log.mkdir()
    with serving() as first, serving() as second:
        argv = [*small_flags(world_dir, out, steps=1), "--server", first.url, second.url]
        lost = (first, second)[rank]
        lost.answer = lambda body: lost.sampled(body) if len(lost.bodies()) < 3 else DROP
        assert two(argv, log) == ([2, 1], [1, 2])[rank]
        words = (log / f"log{rank}").read_text().split()
        assert words.count("sgsd:") == 1 and f"{lost.url}:" in words and "Traceback" not in words
        assert not {"sgsd:", "Traceback"} & {*(log / f"log{1 - rank}").read_text().split()}
        memories = rows(out / "bank/memories.jsonl")
        assert 0 < len(memories) < 8
        for engine in (first, second):
            engine.calls.clear()
        lost.answer = lost.sampled
        assert two(argv, tmp_path) == [0, 0]
        assert len(first.bodies()) + len(second.bodies()) == 8 - len(memories)
    assert rows(out / "bank/memories.jsonl")[: len(memories)] == memories
