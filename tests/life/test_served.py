"""The client of an inference server: protocol, adapters and bad days.

The server is the small one of fake_engine.py.
"""

import itertools
import threading

import pytest
from conftest import one_line
from fake_engine import DROP, STOPS, Engine, choices, serving

from lib import served
from rollout import Job, Sampling


def jobs(count=6, limit=30):
    return [Job(i, [7, 8, 9 + i], 2**63 + i, limit) for i in range(count)]


PLAIN = Sampling(1.0, 1.0, 0)


@pytest.fixture
def engine():
    with serving() as engine:
        yield engine


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(served, "PAUSES", (0.01, 0.01, 0.01, 0))


def a_server(engine, tokenizer=None, model="base", **options):
    return served.Server(engine.url, model, tokenizer, STOPS, **options)


@pytest.fixture
def sample(engine, tokenizer):
    """Does jobs: every completion by its index."""

    def of(jobs, adapter="", server=None, rows=16, **options):
        server = server or a_server(engine, tokenizer, **options)
        turns = server.stream(jobs, PLAIN, rows, adapter)
        done = list(itertools.chain.from_iterable(turns))
        completions = {job.index: job.ids for job in done}
        assert len(completions) == len(done)
        return completions

    return of


# ----------------------------------------------------------------------------------- the protocol


def test_prompts_travel_as_ids_with_every_field_of_sampling_and_sampled_ids_come_back(
    engine, sample, tokenizer
):
    server, todo = a_server(engine, tokenizer), jobs()
    turns = list(server.stream(todo, Sampling(0.7, 0.9, 20), 16))
    want = [[24 + i, 7, STOPS[0]] for i in range(6)]
    done = list(itertools.chain.from_iterable(turns))
    assert sorted(done, key=lambda job: job.index) == todo
    assert [(job.ids, job.left) for job in todo] == [(ids, 0) for ids in want]
    bodies = {body["prompt"][2]: body for body in engine.bodies()}
    assert len(bodies) == len(engine.calls) == 6
    fields = {"model": "base", "prompt": [7, 8, 12], "max_tokens": 30, "temperature": 0.7}
    fields |= {"top_p": 0.9, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.0}
    fields |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "stop_token_ids": STOPS}
    fields |= {"skip_special_tokens": False, "return_token_ids": True}
    assert bodies[9 + 3] == fields
    sample(jobs(1))
    assert engine.bodies()[-1]["top_k"] == -1  # as vLLM writes that there is none


def test_rows_is_the_number_of_requests_under_way(engine, sample):
    under_way, most, lock = [], [], threading.Lock()
    full = threading.Barrier(3, timeout=60)  # breaks unless three requests are under way at once

    def answer(body):
        with lock:
            under_way.append(body)
            most.append(len(under_way))
        full.wait()
        with lock:
            under_way.remove(body)
        return engine.sampled(body)

    engine.answer = answer
    assert len(sample(jobs(9), rows=3)) == 9 and max(most) == 3


def test_a_server_that_fails_now_and_then_is_reported_once_a_minute(
    engine, sample, tokenizer, capsys, monkeypatch
):
    """Every second request fails; then a minute has passed."""
    engine.answer = lambda body: engine.sampled(body) if len(engine.calls) % 2 else (503, "busy")
    server = a_server(engine, tokenizer)
    sample(jobs(), server=server, rows=1)
    (line,) = capsys.readouterr().err.splitlines()
    assert engine.url in line and "503" in line and len(engine.calls) > 6
    monkeypatch.setattr(served, "REPORT_S", 0.0)
    sample(jobs(2), server=server, rows=1)
    assert capsys.readouterr().err.count("trying again") >= 1


def test_a_caller_that_breaks_off_does_not_wait_for_replies(engine, tokenizer):
    released = threading.Event()

    def answer(body):
        if body["prompt"][2] > 9:
            released.wait(60)
        return engine.sampled(body)

    engine.answer = answer
    turns = a_server(engine, tokenizer).stream(jobs(), PLAIN, 2)
    assert next(turns)[0].index == 0
    turns.close()
    assert not released.is_set() and len(engine.calls) <= 3
    released.set()


def test_of_a_server_without_ids_the_text_is_tokenized(engine, sample, tokenizer):
    text = "\\boxed{7}"
    usage = {"completion_tokens": 30, "prompt_tokens": 3}
    engine.answer = lambda body: (200, choices(text=text))
    ids = tokenizer.encode(text)
    assert sample(jobs(1)) == {0: [*ids, STOPS[0]]}
    engine.answer = lambda body: (200, choices(text=f"{text}<|im_end|>"))
    assert sample(jobs(1)) == {0: [*ids, 265]}
    engine.answer = lambda body: (200, choices("length", usage, text=text))
    assert sample(jobs(1)) == {0: ids}


def test_a_stop_id_that_a_server_leaves_out_does_not_make_a_completion_a_cut_one(engine, sample):
    engine.answer = lambda body: (200, choices(token_ids=[65, 66]))
    assert sample(jobs(1)) == {0: [65, 66, STOPS[0]]}
    engine.answer = lambda body: (200, choices("length", token_ids=[65, 66]))
    assert sample(jobs(1, limit=2)) == {0: [65, 66]}


def test_the_key_in_the_environment_is_sent(engine, monkeypatch):
    server = a_server(engine)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server.check()
    monkeypatch.setenv("OPENAI_API_KEY", "secret\n")
    server.check()
    assert engine.keys_seen == [None, "Bearer secret"]
    monkeypatch.setenv("OPENAI_API_KEY", "sec\nret")
    line = one_line(server.check, "OPENAI_API_KEY")
    assert "ret" not in line.replace("characters", "")


# ------------------------------------------------------------------------------------- what it has


def test_a_server_that_lists_one_base_is_taken_at_its_word(engine):
    engine.adapters["mine"] = "/somewhere"  # an adapter is no base
    server = a_server(engine, model="org/model")
    server.check()
    assert (server.base, server.engine) == ("base", "vllm")


def test_of_several_bases_the_one_with_the_models_name_or_path_is_used(
    engine, tmp_path, monkeypatch
):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    for model, name, root in (
        ("org/model", "org/model", "elsewhere"),
        ("org/model", "short", "org/model"),
        ("model", "short", str(tmp_path / "model")),
    ):
        engine.bases[1:] = [{"id": name, "root": root}]
        server = a_server(engine, model=model)
        server.check()
        assert (server.base, server.engine) == (name, "unknown")


def test_of_several_bases_without_the_model_one_line_lists_them(engine):
    engine.bases.append({"id": "another", "root": "another"})
    engine.adapters["mine"] = "/somewhere"
    server = a_server(engine, model="org/model")
    words = [engine.url, "base, another", "org/model"]
    assert "mine" not in one_line(server.check, *words, kind=OSError)


@pytest.mark.parametrize("url", ["localhost:8000/v1", "http://localhost:8000"])
def test_what_is_no_address_is_refused_with_an_example_of_one(url):
    one_line(
        lambda: served.Server(url, "base", None, STOPS),
        f"server {url}: ",
        "http://localhost:8000/v1",
    )


@pytest.mark.parametrize("reply", ["<html>", {"models": []}, ["x"]])
def test_a_list_of_models_that_cannot_be_read_is_one_line(reply, engine):
    engine.get = lambda path: (200, reply)
    one_line(a_server(engine).check, engine.url, "reply", kind=OSError)


def test_where_nobody_answers_every_question_says_so(tmp_path, sample):
    with Engine() as gone:
        server = a_server(gone)
    for ask in (
        server.check,
        lambda: server.load("mine", str(tmp_path)),
        lambda: sample(jobs(3), server=server),
    ):
        one_line(ask, server.url, "ConnectionRefusedError", kind=OSError)


# ---------------------------------------------------------------------------------------- adapters


def test_an_adapter_is_loaded_sampled_by_its_name_and_unloaded(
    engine, sample, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    server = a_server(engine)
    server.load("mine", "adapter")  # the server has another working directory
    assert engine.adapters == {"mine": str(tmp_path / "adapter")}
    assert len(sample(jobs(2), "mine", server=server)) == 2
    assert [body["model"] for body in engine.bodies()] == ["mine", "mine"]
    server.unload("mine")
    assert not engine.adapters
    server.unload("mine")  # a server that was started anew has lost it
    with Engine() as gone:
        pass
    a_server(gone).unload("mine")  # one that is gone has none


def test_an_adapter_that_is_refused_says_what_the_server_needs(engine, tmp_path):
    server = a_server(engine)
    for reply in ((404, {"detail": "Not Found"}), (500, {"error": "LoRA rank 64\nis greater"})):
        engine.post = lambda path, body, reply=reply: reply
        words = ["VLLM_ALLOW_RUNTIME_LORA_UPDATING=True", "--enable-lora", "--max-lora-rank"]
        words.append(f"HTTP {reply[0]}: ")
        one_line(lambda: server.load("mine", str(tmp_path)), *words, kind=OSError)


# ---------------------------------------------------------------------------------------- bad days


FAULTS = {
    "a broken server": lambda body: (500, {"error": "EngineCore"}),
    "a server with too much to do": lambda body: (429, {}),
    "a dropped connection": lambda body: DROP,
    "a completion that was broken off": lambda body: (200, choices("abort", token_ids=[])),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_after_a_fault_a_request_is_tried_again(fault, engine, sample):
    seen = []

    def answer(body):
        seen.append(body["prompt"])
        return FAULTS[fault](body) if seen.count(body["prompt"]) < 3 else engine.sampled(body)

    engine.answer = answer
    assert len(sample(jobs(4), rows=4)) == 4
    assert len(seen) == 3 * 4


def test_a_fault_that_stays_is_raised_after_the_replies_under_way(engine, tokenizer):
    failed = threading.Event()

    def answer(body):
        if body["prompt"][2] == 9:  # row 0 finishes when row 1 has failed for the last time
            failed.wait(60)
            return engine.sampled(body)
        if len([b for b in engine.bodies() if b["prompt"] == body["prompt"]]) == 4:
            failed.set()
        return DROP

    engine.answer = answer
    seen = []

    def ask():
        for turn in a_server(engine, tokenizer).stream(jobs(), PLAIN, 2):
            seen.extend(job.index for job in turn)

    one_line(ask, engine.url, kind=OSError)
    assert seen == [0]
    prompts = {body["prompt"][2] for body in engine.bodies()}
    assert prompts <= {9, 10, 11}  # the other rows were not begun


def test_a_server_that_stays_silent_is_not_asked_twice(engine, sample):
    released = threading.Event()
    engine.answer = lambda body: (released.wait(60), {})
    one_line(lambda: sample(jobs(1), timeout_s=0.2), engine.url, "0.2 s", kind=OSError)
    released.set()
    assert len(engine.bodies()) == 1


def test_a_request_that_is_too_long_is_the_servers_own_refusal_and_not_tried_again(engine, sample):
    detail = "This model's maximum context length is 20 tokens.\nHowever, you requested 33."
    engine.answer = lambda body: (400, {"error": {"message": detail}})
    words = [engine.url, "HTTP 400: ", "maximum context length is 20 tokens"]
    one_line(lambda: sample(jobs(1)), *words, kind=OSError)
    assert len(engine.calls) == 1


def test_a_server_that_was_started_anew_without_the_adapter_is_not_asked_twice(engine, sample):
    one_line(lambda: sample(jobs(1), "gone"), engine.url, "HTTP 404: ", kind=OSError)
    assert len(engine.calls) == 1


CUT_TEXT = choices("length", {"completion_tokens": 1}, text="x")
CUT_PROMPT = choices(usage={"prompt_tokens": 2}, token_ids=[5, 265])
UNEXPECTED = {  # a reply, and words of the line
    "no JSON": ("<html>\n", "JSONDecodeError"),
    "no choices": ({"error": "x"}, "KeyError: 'choices'"),
    "neither ids nor text": (choices(), "KeyError: 'text'"),
    "a reply cut by the server": (choices("length", token_ids=[65, 66]), "after 2 of 8 tokens"),
    "more ids than asked for": (choices(token_ids=[65] * 9), "token_ids"),
    "ids that are none": (choices(token_ids=[65, -1]), "token_ids"),
    "a text cut by the server": (CUT_TEXT, "after 1 of 8 tokens"),
    "a prompt cut by the server": (CUT_PROMPT, "2 of 3 prompt tokens"),
}


@pytest.mark.parametrize("what", UNEXPECTED)
def test_an_unexpected_reply_is_one_line(what, engine, sample):
    value, words = UNEXPECTED[what]
    engine.answer = lambda body: (200, value)
    one_line(lambda: sample(jobs(1, limit=8)), engine.url, words, kind=OSError)
