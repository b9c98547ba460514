"""An inference server: protocol, adapters and bad days of its client; a run with --server.

`engine` (fake_engine.py) is a server in a thread. `engine.answer` makes its replies, and
`engine.bodies()` are the requests for completions that it had.
"""

import itertools
import json
import shutil

import pytest
from conftest import one_line
from driver import completes, rows, run_two
from fake_engine import DROP, STOPS, choices, serving
from small_run import flags, main, reply_to, small_flags

import sgsd
from lib import served
from rollout import Job, Sampling


def jobs(count=6, limit=30):
    return [Job(i, [7, 8, 9 + i], 2**63 + i, limit) for i in range(count)]


PLAIN = Sampling(1.0, 1.0, 0)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(served, "PAUSE_S", 0.001)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def a_server(engine, model="base", **options):
    return served.Server(engine.url, model, STOPS, 4096, **options)


@pytest.fixture
def sample(engine):
    """Does jobs: every completion by its index."""

    def of(jobs, adapter="", rows=16, **options):
        turns = a_server(engine, **options).stream(jobs, PLAIN, rows, adapter)
        done = list(itertools.chain.from_iterable(turns))
        completions = {job.index: job.ids for job in done}
        assert len(completions) == len(done)
        return completions

    return of


def test_prompts_travel_as_ids_with_every_field_of_sampling_and_ids_come_back(engine, sample):
    todo, full = jobs(limit=5000), Job(9, [7] * 4096, key=9, limit=5)
    for turn in a_server(engine).stream([*todo, full], Sampling(0.7, 0.9, 20), 16):
        (job,) = turn
        if job is full:  # its prompt fills the context
            continue
        assert job.ids == [24 + job.index, 7, STOPS[0]]
    assert all(job.done for job in [*todo, full]) and not full.ids
    bodies = {body["prompt"][2]: body for body in engine.bodies()}
    assert len(bodies) == len(engine.calls) == 6
    fields = {"model": "base", "prompt": [7, 8, 12], "max_tokens": 4093, "temperature": 0.7}
    fields |= {"top_p": 0.9, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.0}
    fields |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "stop_token_ids": STOPS}
    assert bodies[9 + 3] == fields | {"return_token_ids": True}
    sample(jobs(1))
    assert engine.bodies()[-1]["top_k"] == -1  # as vLLM writes that there is none


def test_a_stop_id_that_a_server_leaves_out_does_not_make_a_completion_a_cut_one(engine, sample):
    engine.answer = lambda body: (200, choices(token_ids=[65, 66]))
    assert sample(jobs(1)) == {0: [65, 66, STOPS[0]]}
    engine.answer = lambda body: (200, choices("length", token_ids=[65, 66]))
    assert sample(jobs(1, limit=2)) == {0: [65, 66]}


def test_the_key_in_the_environment_is_sent_and_never_shown(engine, monkeypatch):
    served.Server(engine.url + "/", "base", STOPS, 4096).check()  # a slash at its end is none
    monkeypatch.setenv("OPENAI_API_KEY", "secret\n")
    server = a_server(engine)
    server.check()
    assert engine.keys_seen == [None, "Bearer secret"]
    engine.get = lambda path: (401, {"error": "no such key: secret"})
    assert "secret" not in one_line(server.check, "HTTP 401", "no such key", kind=OSError)


def test_of_several_bases_the_models_own_is_used(engine, tmp_path, monkeypatch):
    """One is taken at its word. Of several without the model one line lists them."""
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    engine.adapters["mine"] = "/somewhere"  # an adapter is no base
    a_server(engine, "org/any").check()
    engine.bases.append({"id": "short", "root": "org/b", "owned_by": "another"})
    engine.bases.append({"id": "shorter", "root": f"{tmp_path}/model"})
    for model, base, name in (("org/b", "short", "another"), ("model", "shorter", "unknown")):
        server = a_server(engine, model)
        server.check()
        assert (server.base, server.engine) == (base, name)
    words = [engine.url, "base, short, shorter", "org/other"]
    one_line(a_server(engine, "org/other").check, *words, kind=OSError)


@pytest.mark.parametrize("fault", [(500, {"error": "EngineCore"}), (429, {}), DROP])
def test_after_a_fault_a_request_is_tried_again_seven_times(fault, engine, sample):
    """A broken server, one with too much to do, and a dropped connection."""
    seen = []

    def answer(body):
        seen.append(body["prompt"])
        return fault if seen.count(body["prompt"]) < 8 else engine.sampled(body)

    engine.answer = answer
    assert len(sample(jobs(4), rows=4)) == 4 and len(seen) == 8 * 4
    engine.answer = lambda body: fault
    one_line(lambda: sample(jobs(1)), engine.url, kind=OSError)
    assert len(engine.bodies()) == 8 * 4 + 8


CUT_PROMPT = choices(usage={"prompt_tokens": 2}, token_ids=[5, 265])
UNEXPECTED = {  # a reply, and words of the line
    "no JSON": ("<html>\n", "JSONDecodeError"),
    "text and no ids": (choices(text="x"), "token_ids"),
    "a reply cut by the server": (choices("length", token_ids=[65, 66]), "2 of 8 token_ids"),
    "more ids than asked for": (choices(token_ids=[65] * 9), "9 of 8 token_ids"),
    "ids that are none": (choices(token_ids=["65"]), "token_ids"),
    "a prompt cut by the server": (CUT_PROMPT, "2 tokens of 3"),
}


@pytest.mark.parametrize("what", UNEXPECTED)
def test_an_unexpected_reply_is_one_line(what, engine, sample):
    value, words = UNEXPECTED[what]
    engine.answer = lambda body: (200, value)
    one_line(lambda: sample(jobs(1, limit=8)), engine.url, words, kind=OSError)
    engine.get = lambda path: (200, value)
    one_line(a_server(engine).check, engine.url, "reply", kind=OSError)


DEAD = "http://127.0.0.1:9/v1"


@pytest.fixture
def writing(engine, tokenizer):
    """The engine solves as it does by itself, and writes the bank as `small_run.fake_writer`."""

    def answer(body):
        text = tokenizer.decode(body["prompt"])
        if "Return ONLY" not in text:  # a seed problem
            return engine.sampled(body)
        return 200, choices(token_ids=[*tokenizer.encode(reply_to(text)), STOPS[0]])

    engine.answer = answer
    return engine


def test_a_bank_alone_is_made_on_a_server_from_an_outline(writing, tokenizer, world_dir, tmp_path):
    out, no_weights = tmp_path / "run", shutil.ignore_patterns("*.safetensors")
    outline = shutil.copytree(world_dir / "model", tmp_path / "outline", ignore=no_weights)
    changes = {"model": outline, "bank": "", "steps": 0, "cold_start": 8, "reply_tokens": 999}
    completes(sgsd.main, flags(world_dir, out, server=writing.url, **changes))
    sampled = [tokenizer.decode(body["prompt"]) for body in writing.bodies()]
    assert sum("Return ONLY" not in text for text in sampled) == 8
    replies = rows(out / "bank/replies.jsonl")
    assert replies and len(replies) == len(sampled) - 8
    assert (out / "bank/bank.json").exists()


def test_after_the_first_bank_steps_and_evolutions_ask_no_server(writing, world_dir, tmp_path):
    """The model ends on half of all ids, so the replies that `generate` draws are short."""
    out, hasty = tmp_path / "run", shutil.copytree(world_dir / "model", tmp_path / "hasty")
    (hasty / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(0, 270, 2)]}))
    changes = {"bank": "", "cold_start": 8, "reply_tokens": 200, "steps": 2, "evolve_every": 1}
    changes["model"] = hasty
    changes |= {"success_gate": 2.0, "batch_size": 2, "server": writing.url}
    completes(sgsd.main, flags(world_dir, out, **changes))
    replies = [row["step"] for row in rows(out / "bank/replies.jsonl")]
    assert {*replies} == {0, 1, 2} and len(rows(out / "rollouts.jsonl")) == 4
    assert len(writing.calls) == 8 + replies.count(0)


def test_a_run_that_has_its_bank_goes_on_without_its_server(engine, world_dir, tmp_path):
    """Nor does one need it that is given a bank. A line says so."""
    out, changes = tmp_path / "run", {"evolve_every": 0}
    completes(main, small_flags(world_dir, out, steps=1, server=engine.url, **changes))
    assert len(engine.bodies()) == 8
    longer = small_flags(world_dir, out, steps=2, server=DEAD, **changes)
    assert "nothing asks it" in completes(main, longer)
    (out / "bank/step_000000.json").unlink()  # the checkpoint has a bank, too
    completes(main, small_flags(world_dir, out, steps=3, **changes))
    given = flags(world_dir, tmp_path / "given", steps=1, server=DEAD)
    assert "nothing asks it" in completes(main, given)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_server_that_one_rank_loses_in_the_cold_start_ends_both(rank, world_dir, tmp_path):
    """In one line of the rank that lost it. The solutions that came are not asked for again."""
    out = tmp_path / "run"
    with serving() as first, serving() as second:
        argv = [*small_flags(world_dir, out, steps=1), "--server", first.url, second.url]
        lost = second if rank else first
        lost.answer = lambda body: lost.sampled(body) if len(lost.bodies()) < 3 else DROP
        texts = run_two(argv, ends=[1, 2] if rank else [2, 1])
        assert texts[rank].count("sgsd: ") == 1 and f"{lost.url}: " in texts[rank]
        assert "sgsd: " not in texts[1 - rank] and "Traceback" not in "".join(texts)
        memories = rows(out / "bank/memories.jsonl")
        assert 0 < len(memories) < 8
        first.calls.clear()
        second.calls.clear()
        lost.answer = lost.sampled
        run_two(argv)
        assert len(first.bodies()) + len(second.bodies()) == 8 - len(memories)
    assert rows(out / "bank/memories.jsonl")[: len(memories)] == memories
