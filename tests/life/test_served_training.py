"""A policy in training that is sampled on a server: each step's adapter, the gap, bad days.

The server is the fake one of test_served.py, whose engine knows nothing of the adapter.
"""

import contextlib
import json
import threading
from types import SimpleNamespace

import driver
import pytest
import torch
from extras_engine import Engine

import sgsd
from lib import served

STOPS = [265, 263]


class Adapted:
    """Stands for a PEFT model: it saves an adapter, and can put it aside."""

    def __init__(self):
        self.effect, self.on, self.saved = 0.0, True, []

    def save_pretrained(self, folder, save_embedding_layers):
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
        self.saved.append(folder)

    @contextlib.contextmanager
    def disable_adapter(self):
        self.on = False
        yield
        self.on = True


def logprobs(lm, prompts, completions):
    """The base gives every token -1; the adapter adds its effect."""
    value = -1.0 + (lm.effect if lm.on else 0.0)
    return torch.full((1, len(completions[0])), value)


@pytest.fixture
def engine():
    engine = Engine()
    engine.prompt_logprob = -1.0  # of each token of a canary, whatever the adapter
    engine.answer = lambda body: answer(engine, body)
    threading.Thread(target=engine.serve_forever, args=[0.01], daemon=True).start()
    yield engine
    engine.shutdown()
    engine.server_close()


def answer(engine, body):
    if "prompt_logprobs" in body:
        places = [{str(token): {"logprob": engine.prompt_logprob}} for token in body["prompt"]]
        return 200, {"choices": [{"prompt_logprobs": places}]}
    return engine.sampled(body)


@pytest.fixture
def policy(engine, tokenizer, tmp_path):
    lm, server = Adapted(), served.Server(engine.url, "base")
    server.check(10)
    folder = tmp_path / "served"
    return served.TrainedPolicy(server, lm, tokenizer, STOPS, folder, "run-rank0", logprobs)


def row(index=0):
    return SimpleNamespace(index=index, prompt=[7, 8], key=2**60 + index, left=30, ids=[])


SAMPLING = SimpleNamespace(temperature=1.0, top_p=1.0, top_k=0)


def step_fn(policy, effect):
    """A step that samples two rows, and then moves the weights."""

    def step(run, number):
        turns = list(policy.rollouts([row(0), row(1)], SAMPLING, 2))
        assert len(turns) == 2
        policy.lm.effect += effect
        return [{"r": 1}, {"r": -1}], 0.5, {"gen": 1.0}

    return policy.wrap(step)


def test_each_steps_adapter_has_a_name_of_its_own_and_the_one_before_is_unloaded(engine, policy):
    step = step_fn(policy, effect=0.0)
    for number in (1, 2, 3):
        step(None, number)
    list(policy.stream([row()], SAMPLING, 1))  # the bank's writer, after the last step
    list(policy.stream([row()], SAMPLING, 1))  # and once more, with the same weights
    loaded = [body["lora_name"] for body in engine.bodies("/v1/load_lora_adapter")]
    assert len(set(loaded)) == len(loaded) == 4
    assert all(name.startswith("run-rank0-") for name in loaded)
    unloaded = [body["lora_name"] for body in engine.bodies("/v1/unload_lora_adapter")]
    assert unloaded == loaded[:3] and [*engine.adapters] == loaded[3:]
    assert [folder.exists() for folder in policy.lm.saved] == [False, False, False, True]
    models = [body["model"] for body in engine.bodies() if "prompt_logprobs" not in body]
    assert models == [loaded[0]] * 2 + [loaded[1]] * 2 + [loaded[2]] * 2 + [loaded[3]] * 2
    with_logprobs = [body["model"] for body in engine.bodies() if "logprobs" in body]
    assert loaded[3] not in with_logprobs  # replies are not scored
    policy.close()
    assert not engine.adapters and not policy.folder.exists()


def test_the_gap_to_the_engines_log_probabilities_is_noted_with_the_seconds_of_a_load(policy):
    """The engine says -.5, -1.5 and -.25, we say -1: gaps of .5, .5 and .75."""
    records, norm, seconds = step_fn(policy, effect=0.0)(None, 1)
    for record in records:
        assert record["sampling_logp_difference"] == pytest.approx([1.75 / 3, 0.75])
    assert norm == 0.5 and seconds["gen"] == 1.0 and seconds["load"] > 0
    assert not policy.server.logprobs  # each is taken once


def test_an_adapter_that_is_accepted_and_does_not_act_ends_the_step(engine, policy):
    step = step_fn(policy, effect=0.3)
    step(None, 1)  # the adapter is still without effect: base and adapter are one
    with pytest.raises(
        OSError, match=r"does not act: .*base's within 0\.0e\+00.*differ by 3\.0e-01"
    ):
        step(None, 2)
    engine.prompt_logprob = -0.72  # ours is -.7: it acts, within the engine's rounding
    step(None, 2)


def test_an_engine_that_keeps_the_last_adapter_under_the_new_name_ends_the_step(engine, policy):
    """Base -1, first adapter -.7, second -.4; the engine stays at -.7."""
    policy.lm.effect = 0.3
    engine.prompt_logprob = -0.7
    step = step_fn(policy, effect=0.3)
    step(None, 1)
    with pytest.raises(
        OSError, match=r"numbers are the last adapter's within .*differ by 3\.0e-01"
    ):
        step(None, 2)


def test_a_server_that_refuses_an_adapter_ends_a_step_in_one_line(engine, policy):
    post = engine.post
    engine.post = lambda path, body: (500, "rank 64") if "load" in path else post(path, body)
    with pytest.raises(OSError, match="refuses /load_lora_adapter: HTTP 500: rank 64"):
        step_fn(policy, effect=0.0)(None, 1)


# ------------------------------------------------------------------------------------------- a run


def run_flags(world_dir, out, engine, **changes):
    engine.base |= {"id": "base", "root": str(world_dir / "model")}
    return driver.flags(world_dir, out, **changes, server=engine.url, evolve_every=0)


def test_a_run_is_sampled_on_its_server_and_logs_the_gap(engine, world_dir, tmp_path):
    flags = run_flags(world_dir, tmp_path / "run", engine, steps=3)
    with driver.signals_restored():
        assert sgsd.main(flags) == 0
    metrics = driver.rows(tmp_path / "run/metrics.jsonl")
    for line in metrics:
        assert line["sampling_logp_difference_max"] >= line["sampling_logp_difference_mean"] > 0
        assert line["seconds.load"] > 0
    assert len(engine.bodies("/v1/load_lora_adapter")) == 3 and not engine.adapters
    rollouts = driver.rows(tmp_path / "run/rollouts.jsonl")
    sent = {tuple(body["prompt"]) for body in engine.bodies() if "logprobs" in body}
    assert {tuple(line["prompt_ids"]) for line in rollouts} == sent
    assert all(line["completion_ids"][-1] == STOPS[0] for line in rollouts)


def test_a_server_that_goes_amid_a_step_costs_that_step_alone(
    engine, world_dir, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(served, "PAUSES", (0.01,))
    flags = run_flags(world_dir, tmp_path / "run", engine, steps=3, checkpoint_every=3)
    requests = []

    def dies(body):
        requests.append(body)
        return None if len(requests) > 6 else answer(engine, body)  # in step 2, of 4 rollouts each

    engine.answer = dies
    with pytest.raises(SystemExit) as end, driver.signals_restored():
        sgsd.main(flags)
    *notes, last = capsys.readouterr().err.strip().splitlines()
    assert end.value.code == 2 and notes[-1].endswith("trying again")
    assert "no completion" in last and "continue with: python sgsd.py --resume" in last
    assert len(driver.rows(tmp_path / "run/metrics.jsonl")) == 1
    assert (tmp_path / "run/checkpoints/step_000001").is_dir()
    engine.answer = lambda body: answer(engine, body)
    with driver.signals_restored():
        assert sgsd.main(["--resume", str(tmp_path / "run")]) == 0
    steps = [line["step"] for line in driver.rows(tmp_path / "run/rollouts.jsonl")]
    assert steps == [1] * 4 + [2] * 4 + [3] * 4
    names = [json.loads(line)["step"] for line in open(tmp_path / "run/metrics.jsonl")]
    assert names == [1, 2, 3]
