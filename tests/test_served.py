"""Sampling through a server: protocol, preflight, faults and going on, with a small server here."""

import contextlib
import http.server
import json
import re
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import PROBLEMS
from driver import FakeWriter, evaluate, flags, make_adapter, refused, samples, settings

import baselines
import config
import eval
import policy
import rollout
import served
import sgsd
import skills
from cli import UserError
from distributed import World

LISTED = {"owned_by": "vllm", "max_model_len": 40960}


class Engine(http.server.ThreadingHTTPServer):
    """A server of one model. `answer` makes the reply to a completion's request: (status, JSON).

    Another reply than a pair drops the connection.
    """

    daemon_threads = True

    def __init__(self, tokenizer, base):
        super().__init__(("127.0.0.1", 0), Handler)
        self.tokenizer, self.base = tokenizer, str(base)
        self.listed, self.version, self.metrics = dict(LISTED), "1.2.3", ""
        self.adapters, self.most_rank, self.calls = {}, 64, []
        self.answer = self.boxed
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def boxed(self, body):
        """An answer that differs from prompt to prompt, as sampled ids."""
        ids = self.tokenizer.encode(f"\\boxed{{{sum(body['prompt']) % 7}}}")
        return 200, choices(token_ids=[*ids, *body["stop_token_ids"][:1]])

    def of(self, path):
        """The bodies of the requests to a path."""
        return [body for where, body in self.calls if where == path]

    def get(self, path):
        names = {self.base: self.listed | {"root": self.base}}
        names |= {name: {"parent": self.base, "root": path} for name, path in self.adapters.items()}
        listed = {"data": [{"id": name, **entry} for name, entry in names.items()]}
        replies = {"/v1/models": listed, "/version": {"version": self.version}}
        return (200, replies[path]) if path in replies else (200, self.metrics)

    def post(self, path, body):
        if path == "/v1/load_lora_adapter" and self.most_rank:
            rank = json.loads(open(f"{body['lora_path']}/adapter_config.json").read())["r"]
            if rank > self.most_rank:
                return 500, {
                    "error": {"message": f"LoRA rank {rank} is greater than max_lora_rank"}
                }
            self.adapters[body["lora_name"]] = body["lora_path"]
            return 200, "Success"
        if path == "/v1/unload_lora_adapter" and self.most_rank:
            return (200, "Success") if self.adapters.pop(body["lora_name"], "") else (404, {})
        if path == "/v1/completions" and body["model"] in {self.base, *self.adapters}:
            return self.answer(body)
        return 404, {"detail": "Not Found"}


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.send(self.server.get(self.path))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.calls.append((self.path, body))
        self.send(self.server.post(self.path, body))

    def send(self, reply):
        if not isinstance(reply, tuple):
            return
        status, value = reply
        text = value if isinstance(value, str) else json.dumps(value)
        with contextlib.suppress(OSError):  # nobody may be waiting any more
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())


def choices(reason="stop", **fields):
    return {"choices": [{"finish_reason": reason, **fields}]}


@pytest.fixture
def start(tokenizer, world_dir):
    """Starts a server of the model, or of what is named."""
    engines = []

    def of(base=world_dir / "model"):
        engine = Engine(tokenizer, base)
        threading.Thread(target=engine.serve_forever, args=[0.01], daemon=True).start()
        engines.append(engine)
        return engine

    yield of
    for engine in engines:
        engine.shutdown()
        engine.server_close()


@pytest.fixture
def outline(world_dir):
    return policy.load_outline(str(world_dir / "model"))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    assert all(later > pause > 0 for pause, later in zip(served.PAUSES, served.PAUSES[1:]))
    monkeypatch.setattr(served, "PAUSES", (0.01, 0.01, 0.01))


def rows(count=6, limit=30):
    return rollout.rows_of([[7, 8, 9 + i] for i in range(count)], range(count), limit)


def stream(engines, outline, asked, sampling=None, in_flight=2, **changes):
    """Every completion by its index."""
    servers = served.Servers([engine.url for engine in engines], engines[0].base, **changes)
    sampling = sampling or rollout.Sampling(1.0, 0.95, 0)
    turns = list(servers.stream(*outline, asked, sampling, in_flight))
    found = [completion for turn in turns for completion in turn]
    assert len(found) == len(dict(found))
    return dict(found)


def test_prompts_travel_as_ids_with_every_field_of_sampling_and_sampled_ids_come_back(
    start, outline
):
    engine = start()
    completions = stream([engine], outline, rows(limit=30), rollout.Sampling(0.7, 0.9, 20))
    stops = policy.stop_ids(*outline)
    for i, row in enumerate(rows()):
        text = f"\\boxed{{{sum(row.prompt) % 7}}}"
        assert completions[i] == [*engine.tokenizer.encode(text), stops[0]]
    bodies = {body["prompt"][2]: body for body in engine.of("/v1/completions")}
    assert len(bodies) == len(engine.calls) == 6
    sent = bodies[9 + 3]
    assert sent.pop("seed") == 3 >> 1
    assert sent == {
        "model": engine.base,
        "prompt": [7, 8, 12],
        "max_tokens": 30,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": stops,
        "skip_special_tokens": False,
        "return_token_ids": True,
    }


def test_without_top_k_the_server_is_told_so(start, outline):
    engine = start()
    stream([engine], outline, rows(1), rollout.Sampling(1.0, 1.0, 0))
    assert engine.of("/v1/completions")[0]["top_k"] == -1


def test_of_a_server_without_ids_come_its_text_its_count_and_its_reason(start, world_dir, tmp_path):
    engine = start()

    def answer(body):
        cut = body["seed"] % 2
        reply = choices("length" if cut else "stop", text=f"\\boxed{{{cut}}}")
        return 200, reply | {"usage": {"completion_tokens": 8 if cut else 5}}

    engine.answer = answer
    found = evaluate(world_dir, tmp_path, f"--server {engine.url}")
    assert len(found) == 36 and {row["truncated"] for row in found} == {False, True}
    for row in found:
        cut = row["truncated"]
        assert (row["tokens"], row["pred"]) == ((8, "1") if cut else (5, "0"))
        assert row["text"] == f"\\boxed{{{int(cut)}}}"


def test_a_stop_id_that_a_server_leaves_out_does_not_make_a_completion_a_cut_one(start, outline):
    engine = start()
    stops = policy.stop_ids(*outline)
    engine.answer = lambda body: (200, choices(token_ids=[65, 66]))
    assert stream([engine], outline, rows(1)) == {0: [65, 66, stops[0]]}
    engine.answer = lambda body: (200, choices("length", token_ids=[65, 66]))
    assert stream([engine], outline, rows(1, limit=2)) == {0: [65, 66]}


def test_a_completion_that_a_limit_of_the_server_cut_is_refused(start, outline):
    """Else it would count as one that was cut at our own limit, and lower a figure silently."""
    engine = start()
    engine.answer = lambda body: (200, choices("length", token_ids=[65, 66]))
    with pytest.raises(UserError, match="cut after 2 of 30 tokens, by a limit of the server's own"):
        stream([engine], outline, rows(1))
    reply = choices("length", text="x") | {"usage": {"completion_tokens": 0}}
    engine.answer = lambda body: (200, reply)
    with pytest.raises(UserError, match="cut after 1 of 30 tokens"):
        stream([engine], outline, rows(1))


def test_what_finishes_first_comes_first(start, outline):
    engine, last = start(), threading.Event()

    def answer(body):
        if body["prompt"][2] == 9:
            last.wait(60)
        return engine.boxed(body)

    engine.answer = answer
    servers, seen = served.Servers([engine.url], engine.base), []
    for turn in servers.stream(*outline, rows(), rollout.Sampling(), 2):
        seen += [i for i, _ in turn]
        if len(seen) == 5:
            last.set()
    assert seen[-1] == 0 and sorted(seen) == list(range(6))


def slow(body):
    time.sleep(1)
    return 200, {}


FAULTS = {
    "a broken server": lambda body: (500, {"error": "EngineCore"}),
    "a server that starts": lambda body: (503, {}),
    "a server with too much to do": lambda body: (429, {}),
    "a dropped connection": lambda body: "drop",
    "a completion that was broken off": lambda body: (200, choices("abort", token_ids=[])),
    "an answer after the timeout": slow,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_after_a_fault_a_request_is_tried_again(fault, start, outline):
    engine, seen = start(), []

    def answer(body):
        seen.append(body["prompt"])
        return FAULTS[fault](body) if seen.count(body["prompt"]) < 3 else engine.boxed(body)

    engine.answer = answer
    count, timeout_s = (1, 0.2) if "timeout" in fault else (4, 60.0)
    assert len(stream([engine], outline, rows(count), timeout_s=timeout_s)) == count
    assert len(seen) == 3 * count


@pytest.mark.parametrize("fault", ["a dropped connection", "an answer after the timeout"])
def test_a_fault_that_stays_is_one_line_after_what_had_finished(
    fault, start, world_dir, tmp_path, capsys
):
    engine, good = start(), []

    def answer(body):
        good.append(1)
        return engine.boxed(body) if len(good) < 8 else FAULTS[fault](body)

    engine.answer = answer
    more = f"--server {engine.url} --rows 2 --server-timeout 0.2"
    assert eval.main(command(world_dir, tmp_path, more)) == 1
    (line,) = error_lines(capsys)
    assert engine.url in line and "failed 4 times (" in line
    assert line.endswith("what was sampled is kept: give the same command again")
    before = samples(tmp_path)
    assert len(before) == 7 and not list(tmp_path.glob("*/results.json"))

    other = start()  # another server goes on
    assert eval.main(command(world_dir, tmp_path, f"--server {other.url}")) == 0
    found = samples(tmp_path)
    assert len(other.of("/v1/completions")) == 12 - 7
    keys = [(row["id"], row["sample"]) for row in found]
    assert len(found) == len(set(keys)) == 12 and all(row in found for row in before)
    assert list(tmp_path.glob("*/results.json"))


def command(world_dir, out, more):
    flags = f"--data {world_dir}/data.jsonl --samples 3 --max-new-tokens 8 --device cpu --limit 4"
    return f"{world_dir}/model {flags} --out {out} {more}".split()


def error_lines(capsys):
    lines = capsys.readouterr().err.splitlines()
    return [line for line in lines if line.startswith("eval: ")]


NONSENSE = {
    "no JSON": ("<html>", "JSONDecodeError"),
    "no choices": ({"error": "x"}, "KeyError"),
    "no object": (["x"], "TypeError"),
    "no ids": (choices(token_ids=["a"]), "token_ids must be at most 8 ids"),
    "too many ids": (choices(token_ids=[5] * 9), "token_ids must be at most 8 ids"),
    "neither ids nor a count": (choices(text="x"), "KeyError: 'usage'"),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_is_one_line(what, start, outline):
    value, words = NONSENSE[what]
    engine = start()
    engine.answer = lambda body: (200, value)
    with pytest.raises(UserError) as error:
        stream([engine], outline, rows(limit=8))
    assert f"--server {engine.url}: no completion of a prompt of 3 tokens: " in str(error.value)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_request_that_a_server_refuses_is_not_tried_again(start, world_dir, tmp_path, capsys):
    engine = start()
    engine.answer = lambda body: (400, {"detail": "prompt must be a string."})
    assert eval.main(command(world_dir, tmp_path, f"--server {engine.url} --rows 1")) == 2
    (line,) = error_lines(capsys)
    assert "HTTP 400" in line and "prompt must be a string" in line and len(engine.calls) == 1


def test_several_servers_share_the_work_and_one_that_dies_leaves_it_to_the_others(start, outline):
    engines = [start(), start()]
    assert len(stream(engines, outline, rows(20))) == 20
    assert all(engine.of("/v1/completions") for engine in engines)
    engines[0].calls.clear()
    engines[0].answer = lambda body: "drop"
    assert len(stream(engines, outline, rows(20))) == 20
    assert engines[0].calls


def test_what_does_not_answer_at_a_start_is_asked_again_or_left_out(start, outline, capsys):
    """One server of two that is gone ends no evaluation at its next policy."""
    engines = [start(), start()]
    servers = served.Servers([engine.url for engine in engines], engines[0].base)
    engines[0].shutdown()
    engines[0].server_close()
    turns = servers.stream(*outline, rows(), rollout.Sampling(), 2)
    assert sorted(i for turn in turns for i, _ in turn) == list(range(6))
    assert "the others go on without it" in capsys.readouterr().err
    busy, get = iter([(503, {}), "drop"]), engines[1].get
    engines[1].get = lambda path: next(busy, None) or get(path)
    assert len(stream([engines[1]], outline, rows())) == 6
    engines[1].get = lambda path: (503, {})
    with pytest.raises(ConnectionError, match="no server answers .HTTP 503"):
        stream([engines[1]], outline, rows())


def test_the_first_failure_of_a_server_is_said_and_its_rows_go_to_the_other(start, outline, capsys):
    engines = [start(), start()]
    engines[0].answer = FAULTS["a server that starts"]
    assert len(stream(engines, outline, rows(20), in_flight=1)) == 20
    assert len(engines[1].of("/v1/completions")) == 20
    error = capsys.readouterr().err
    assert error.count(f"{engines[0].url}: HTTP 503: {{}}: trying again") == 1


def test_after_an_error_a_row_that_waits_for_its_next_try_is_given_up(start, outline, monkeypatch):
    monkeypatch.setattr(served, "PAUSES", (1e6,))
    engine, waiting = start(), threading.Event()

    def answer(body):
        if body["prompt"][2] == 9:
            waiting.set()
            return 503, {}
        waiting.wait()
        return 400, {"detail": "refused"}

    engine.answer = answer
    with pytest.raises(UserError, match="HTTP 400"):
        stream([engine], outline, rows(2))
    assert len(engine.of("/v1/completions")) == 2


def test_servers_of_two_versions_are_refused(start, world_dir, tmp_path, capsys):
    engines = [start(), start()]
    engines[1].version = "1.2.4"
    more = f"--server {engines[0].url} {engines[1].url}"
    assert eval.main(command(world_dir, tmp_path, more)) == 2
    (line,) = error_lines(capsys)
    assert f"{engines[0].url} is vllm 1.2.3, {engines[1].url} is vllm 1.2.4" in line


# --------------------------------------------------------------------------------- the preflight


@pytest.fixture
def adapter(world_dir, tmp_path):
    make_adapter(tmp_path / "adapter", world_dir / "model")
    return tmp_path / "adapter"


REFUSED = {
    "another model": ({"base": "other"}, "serves other, not "),
    "a short context": ({"listed": LISTED | {"max_model_len": 40}}, "a context of 40 tokens is"),
    "no LoRA": ({"most_rank": 0}, "does not load {adapter} (HTTP 404"),
    "a rank too small": ({"most_rank": 2}, "(HTTP 500: "),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_server_that_is_not_fit_is_refused_with_the_command_that_starts_one(
    what, start, world_dir, adapter, tmp_path, capsys
):
    changes, words = REFUSED[what]
    engine = start()
    vars(engine).update(changes)
    argv = [str(adapter), *command(world_dir, tmp_path / "out", f"--server {engine.url}")]
    assert eval.main(argv) == 2
    (line,) = error_lines(capsys)
    assert f"--server {engine.url}: " in line and words.format(adapter=adapter) in line
    longest = max(len(prompt_ids(world_dir, row["problem"])) for row in PROBLEMS[:4])
    start_command = (
        f"; start one with: VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve {world_dir}/model "
        f"--port {engine.server_port} --max-model-len {longest + 8} --enable-lora --max-lora-rank 8"
    )
    assert line.endswith(start_command)
    assert not (tmp_path / "out").exists() and not engine.of("/v1/completions")


def prompt_ids(world_dir, problem):
    _, tokenizer = policy.load_outline(f"{world_dir}/model")
    return policy.chat_ids(tokenizer, skills.render_student(problem), thinking=True)


def test_where_no_server_answers_the_line_has_the_command_that_starts_one(
    start, world_dir, tmp_path, capsys
):
    engine = start()
    engine.shutdown()  # else its thread may still hold the socket, and a connection is reset
    engine.server_close()
    assert eval.main(command(world_dir, tmp_path / "out", f"--server {engine.url}")) == 2
    (line,) = error_lines(capsys)
    assert f"{engine.url}: no server answers (ConnectionRefusedError" in line
    assert re.search(r"start one with: vllm serve \S+/model --port \d+ --max-model-len \d+$", line)
    assert not (tmp_path / "out").exists()


def test_what_is_no_server_is_one_line(start, world_dir, tmp_path, capsys):
    engine = start()
    engine.get = lambda path: (200, "<html>")
    assert eval.main(command(world_dir, tmp_path, f"--server {engine.url}")) == 2
    assert "no list of models (JSONDecodeError" in error_lines(capsys)[0]
    for url in (
        "localhost:8000/v1",
        "http://localhost:8000",
        "http://localhost:80O0/v1",
        "http://localhost:99999/v1",
        "http://[::1/v1",
    ):
        assert eval.main(command(world_dir, tmp_path, f"--server {url}")) == 2
        assert "an address such as http://localhost:8000/v1 is wanted" in error_lines(capsys)[0]


def test_a_key_is_sent_and_a_server_that_wants_one_is_named(
    start, world_dir, tmp_path, monkeypatch, capsys
):
    engine, seen = start(), []

    def do_get(handler):
        seen.append(handler.headers.get("Authorization"))
        allowed = seen[-1] == "Bearer secret"
        handler.send(engine.get(handler.path) if allowed else (401, {"error": "Unauthorized"}))

    monkeypatch.setattr(Handler, "do_GET", do_get)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert eval.main(command(world_dir, tmp_path, f"--server {engine.url}")) == 2
    assert f"--server {engine.url}: HTTP 401: " in error_lines(capsys)[0]
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    evaluate(world_dir, tmp_path, f"--server {engine.url}")
    assert seen[0] is None and seen[-1] == "Bearer secret"
    monkeypatch.setenv("OPENAI_API_KEY", "sec\rret")
    assert eval.main(command(world_dir, tmp_path / "other", f"--server {engine.url}")) == 2
    (line,) = error_lines(capsys)
    assert "OPENAI_API_KEY has characters that no header may have" in line and "ret" not in line


def test_a_table_whose_samples_exist_needs_no_server(start, world_dir, tmp_path):
    engine = start()
    before = evaluate(world_dir, tmp_path, f"--server {engine.url}")
    engine.server_close()
    assert evaluate(world_dir, tmp_path, f"--server {engine.url}") == before


def test_under_torchrun_a_server_is_refused(start, world_dir, tmp_path):
    args = eval.arguments(command(world_dir, tmp_path, f"--server {start().url}"))
    with pytest.raises(UserError, match="start eval.py without torchrun"):
        eval.evaluate(args, World(0, 2, torch.device("cpu")))


# --------------------------------------------------------------------------- names and adapters


def test_adapters_are_loaded_while_they_are_sampled_and_unloaded(
    start, world_dir, adapter, tmp_path
):
    engine = start()
    held = []

    def answer(body):
        held.append((body["model"], dict(engine.adapters)))
        return engine.boxed(body)

    engine.answer = answer
    argv = command(world_dir, tmp_path / "out", f"--server {engine.url}")
    assert eval.main([str(adapter), *argv]) == 0
    assert [len(adapters) for _, adapters in held] == [1] * 12 + [0] * 12
    assert {model for model, _ in held[12:]} == {engine.base} and not engine.adapters
    for model, adapters in held[:12]:
        assert model.startswith("adapter-") and adapters == {model: str(adapter)}


def test_a_server_that_was_started_anew_has_the_adapter_loaded_again(start, outline, adapter):
    engine = start()
    servers, restarted = served.Servers([engine.url], engine.base), []

    def answer(body):
        if not restarted:
            restarted.append(engine.adapters.clear())
            return "drop"
        return engine.boxed(body)

    engine.answer = answer
    turns = servers.stream(*outline, rows(), rollout.Sampling(), 2, str(adapter))
    assert sorted(i for turn in turns for i, _ in turn) == list(range(6))
    assert len({body["lora_name"] for body in engine.of("/v1/load_lora_adapter")}) == 1


def test_one_server_without_the_adapter_leaves_the_work_to_the_other(start, outline, adapter):
    """One that was started anew without it, and that loads none."""
    engines = [start(), start()]
    for engine in engines:
        engine.adapters["mine"] = str(adapter)
    servers = served.Servers([engine.url for engine in engines], engines[0].base)
    servers.names = {served.place(str(adapter)): "mine"}
    turns = servers.stream(*outline, rows(12), rollout.Sampling(), 2, str(adapter))
    done = [next(turns)]
    engines[0].adapters.clear()
    done += turns
    assert sorted(i for turn in done for i, _ in turn) == list(range(12))


def test_a_fault_while_an_adapter_is_loaded_is_tried_again_or_leaves_the_server_out(
    start, outline, adapter, capsys
):
    engines = [start(), start()]
    refusals, post = iter([(503, {}), "drop"]), engines[0].post

    def loading(path, body):
        return next(refusals, None) or post(path, body) if "/load" in path else post(path, body)

    engines[0].post = loading
    for chosen in (engines[:1], engines):
        servers = served.Servers([engine.url for engine in chosen], chosen[0].base)
        turns = servers.stream(*outline, rows(), rollout.Sampling(), 2, str(adapter))
        assert sorted(i for turn in turns for i, _ in turn) == list(range(6))
        assert not any(engine.adapters for engine in chosen)
        refusals = iter([(503, {})])
    error = capsys.readouterr().err
    assert f"does not load {adapter} (HTTP 503: {{}}): the others go on without it" in error


def test_a_name_that_a_user_gave_is_asked_for_and_nothing_is_loaded(
    start, world_dir, adapter, tmp_path, capsys
):
    """base:name is SGLang's way to ask for an adapter."""
    engine = start("base")
    model = world_dir / "model"
    engine.adapters["base:mine"] = "elsewhere"
    more = f"--server {engine.url} --served base={model} base:mine={adapter}"
    assert eval.main([str(adapter), *command(world_dir, tmp_path / "out", more)]) == 0
    assert {path for path, _ in engine.calls} == {"/v1/completions"}
    assert [body["model"] for body in engine.of("/v1/completions")] == (
        ["base:mine"] * 12 + ["base"] * 12
    )
    more = f"--server {engine.url} --served base={model} gone={adapter}"
    assert eval.main([str(adapter), *command(world_dir, tmp_path / "other", more)]) == 2
    assert f"--served gone={adapter}: {engine.url} serves base" in error_lines(capsys)[0]
    more = f"--server {engine.url} --served other={model}"
    assert eval.main(command(world_dir, tmp_path / "third", more)) == 2
    (line,) = error_lines(capsys)
    assert "serves base, base:mine, not other; " in line and "--served-model-name other" in line
    for more in ("--served x=y", f"--server {engine.url} --served x"):
        assert eval.main(command(world_dir, tmp_path, more)) == 2
        assert "NAME=PATH is wanted, and --server" in error_lines(capsys)[0]


# -------------------------------------------------------------------------- who made a sample


def test_a_sample_says_who_made_it_and_samples_of_generate_and_of_a_server_are_not_mixed(
    start, world_dir, tmp_path, capsys
):
    engine = start()
    local, remote = tmp_path / "local", tmp_path / "remote"
    assert re.fullmatch(r"transformers \d.*", evaluate(world_dir, local)[0]["engine"])
    found = evaluate(world_dir, remote, f"--server {engine.url}")
    assert {row["engine"] for row in found} == {"vllm 1.2.3"}
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json*")}
    for out, more, made in (
        (local, f"--server {engine.url}", "engine generate, now a server's"),
        (remote, "", "engine a server's, now generate"),
    ):
        assert eval.main(command(world_dir, out, more)) == 2
        line = error_lines(capsys)[-1]
        assert made in line and line.endswith("give another --out")
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*.json*")}

    (file,) = local.glob("*/settings.json")  # as it was written before there were servers
    old = json.loads(file.read_text())
    del old["engine"]
    file.write_text(json.dumps(old))
    assert eval.main(command(world_dir, local, f"--server {engine.url}")) == 2
    assert "engine generate, now a server's" in error_lines(capsys)[-1]
    evaluate(world_dir, local)


def test_a_figure_of_two_versions_says_so(start, world_dir, tmp_path, capsys):
    engine = start()
    evaluate(world_dir, tmp_path, f"--server {engine.url} --limit 2")
    assert "of its samples" not in capsys.readouterr().out
    engine.version = "2"
    evaluate(world_dir, tmp_path, f"--server {engine.url} --limit 5")
    assert "of its samples 6 by vllm 1.2.3, 9 by vllm 2" in capsys.readouterr().out


ON_CPU = 'vllm:cache_config_info{block_size="128",kv_cache_memory_bytes="1073741824"} 1.0'
ON_GPU = 'vllm:cache_config_info{block_size="16",kv_cache_memory_bytes="None"} 1.0'


def test_vllm_on_cpu_is_noticed_and_gets_no_seeds(start, outline, capsys):
    """There a request's seed ends the engine when its prompt is computed in two parts."""
    engine = start()
    engine.metrics = ON_GPU
    stream([engine], outline, rows(2))
    assert all("seed" in body for body in engine.of("/v1/completions"))
    engine.calls.clear()
    engine.metrics = ON_CPU
    stream([engine], outline, rows(2))
    assert not any("seed" in body for body in engine.of("/v1/completions"))
    assert capsys.readouterr().err.count("requests carry no seeds from here on") == 1


def test_after_a_seed_has_broken_an_engine_no_more_are_sent_to_it(start, outline, capsys):
    """Another server's requests keep theirs: without seeds two servers draw the same numbers."""
    engine, other = start(), start()
    engine.answer = lambda body: (500, "EngineCore") if "seed" in body else engine.boxed(body)
    assert len(stream([engine, other], outline, rows())) == 6
    assert all("seed" in body for body in other.of("/v1/completions"))
    error = capsys.readouterr().err
    assert (
        error.count("a request with a seed failed (HTTP 500: EngineCore): requests carry no") == 1
    )


# ------------------------------------------------------------------------------------- the bank


def writing(engine):
    """Answers of a server without ids: solutions, every other one right, and a writer's replies."""

    def answer(body):
        prompt = engine.tokenizer.decode(body["prompt"])
        first, second = map(int, re.search(r"What is (\d+) plus (\d+)", prompt).groups())
        text = f"\\boxed{{{first + second if first % 2 else 'x'}}}"
        if "JSON" in prompt:
            text = FakeWriter.reply(None, prompt)
        return 200, choices(text=text) | {"usage": {"completion_tokens": 9}}

    engine.answer = answer
    return engine


def test_a_bank_is_made_by_a_server(start, world_dir, tmp_path, capsys):
    engine, out = writing(start()), tmp_path / "bank.json"
    given = settings(world_dir, out, cold_start=6, reply_tokens=400)
    argv = [f"{config.flag(name)}={value}" for name, value in given.items() if name != "bank"]
    assert skills.main([*argv, "--server", engine.url]) == 0
    bank = skills.SkillBank.load(out)
    assert bank.general_skills and bank.common_mistakes
    assert bank.metadata["engine"] == "vllm 1.2.3"
    assert bank.metadata["replies"]["read"] == len(engine.of("/v1/completions")) - 6
    memories = (tmp_path / "bank.json.work/memories.jsonl").read_text().splitlines()
    assert [json.loads(row)["made_with"]["engine"] for row in memories] == ["vllm 1.2.3"] * 6
    engine.server_close()
    assert skills.main([*argv, "--server", engine.url]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"skills: --server {engine.url}: no server answers")


def test_another_model_on_a_server_writes_the_bank_of_a_run(start, world_dir, tmp_path):
    engine = writing(start())
    changes = {"update_model": str(world_dir / "model"), "update_server": engine.url}
    cfg = config.Config(**settings(world_dir, tmp_path, **changes))
    world = World(0, 1, torch.device("cpu"))
    writer = skills.writer_of(cfg, world, None, None, tmp_path)
    memory = skills.memory_of(
        SimpleNamespace(problem="What is 1 plus 2?", text="x", r=-1, pred=None)
    )
    found = skills.extract([memory], writer)
    assert len(found["common_mistakes"]) == 1 and writer.counts["read"] == 1
    (body,) = engine.of("/v1/completions")
    assert body["temperature"] == 0 and body["max_tokens"] == cfg.reply_tokens


def test_a_run_with_a_wrong_update_server_is_refused_before_anything_is_written(
    start, world_dir, tmp_path, capsys
):
    engine = start("other")
    model = str(world_dir / "model")
    argv = flags(world_dir, tmp_path / "run", update_model=model, update_server=engine.url)
    refused(capsys, sgsd.main, argv, f"--update-server {engine.url}: serves other, not {model}")
    argv = flags(world_dir, tmp_path / "run", update_server=engine.url)
    refused(capsys, baselines.main, argv, "give the model that it serves as --update-model")
    assert not (tmp_path / "run").exists()
