"""A policy in training that is sampled on a server: each step's adapter, the gap, bad days; and
what needs the model's outline alone.

The server is the small one of fake_engine.py, whose engine knows nothing of the adapter.
"""

import contextlib
import shutil

import driver
import pytest
import torch
from conftest import one_line
from driver import completes, rows
from fake_engine import DROP, STOPS, choices, serving

import eval
import sgsd
from lib import served
from rollout import Job, Sampling


@pytest.fixture
def engine():
    with serving() as engine:
        yield engine


# ---------------------------------------------------------------------------- the policy's adapter


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
def policy(engine, tokenizer, tmp_path):
    server = served.Server(engine.url, "base")
    server.check()
    server.tokenizer, server.stops = tokenizer, STOPS
    return served.TrainedPolicy(server, Adapted(), tmp_path / "served", "run-rank0", logprobs)


def job(index=0):
    return Job(index, [7, 8], 2**60 + index, 30)


SAMPLING = Sampling(1.0, 1.0, 0)


def step(policy, effect=0.0):
    """Sample two rows as a step of training does, and then move the weights."""
    assert len(list(policy.compared_stream([job(0), job(1)], SAMPLING, 2))) == 2
    policy.lm.effect += effect
    policy.changed = True


def test_each_steps_adapter_has_a_name_of_its_own_and_the_one_before_is_unloaded(engine, policy):
    for _ in range(3):
        step(policy)
    list(policy.stream([job()], SAMPLING, 1))  # the bank's writer, after the last step
    list(policy.stream([job()], SAMPLING, 1))  # and once more, with the same weights
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


def test_the_gap_to_the_engines_log_probabilities_is_noted_for_each_rollout(policy):
    """The engine says -.5, -1.5 and -.25, we say -1: gaps of .5, .5 and .75."""
    step(policy)
    assert policy.gaps == [pytest.approx([1.75 / 3, 0.75])] * 2


def test_an_adapter_that_is_accepted_and_does_not_act_ends_the_step(engine, policy):
    """A change that rounding may hide proves nothing, but .009 twice does."""
    engine.prompt_logprob = -1.0  # as the base's
    step(policy, effect=0.009)  # the adapter is still without effect: base and adapter are one
    step(policy, effect=0.009)
    one_line(lambda: step(policy), "base's", "1.8e-02", kind=OSError)
    policy.lm.effect = 0.3
    engine.prompt_logprob = -0.72  # ours is -.7: it acts, within the engine's rounding
    step(policy)


def test_an_engine_that_keeps_the_last_adapter_under_the_new_name_ends_the_step(engine, policy):
    """Base -1, first adapter -.7, second -.4; the engine stays at -.7."""
    policy.lm.effect = 0.3
    engine.prompt_logprob = -0.7
    step(policy, effect=0.3)
    one_line(lambda: step(policy), "last adapter's", "3.0e-01", kind=OSError)


def test_a_server_that_refuses_an_adapter_ends_a_step_in_one_line(engine, policy):
    post = engine.post
    engine.post = lambda path, body: (500, "rank 64") if "load" in path else post(path, body)
    one_line(lambda: step(policy), "load_lora_adapter", "HTTP 500: rank 64", kind=OSError)


# ------------------------------------------------------------------------------------------- a run


def run_flags(world_dir, out, engine, **changes):
    return driver.flags(world_dir, out, server=engine.url, evolve_every=0, **changes)


def test_a_run_is_sampled_on_its_server_and_logs_the_gap(engine, world_dir, tmp_path):
    completes(sgsd.main, run_flags(world_dir, tmp_path / "run", engine, steps=3))
    for line in rows(tmp_path / "run/metrics.jsonl"):
        assert line["sampling_logp_difference_max"] >= line["sampling_logp_difference_mean"] > 0
    assert len(engine.bodies("/v1/load_lora_adapter")) == 3 and not engine.adapters
    rollouts = rows(tmp_path / "run/rollouts.jsonl")
    sent = {tuple(body["prompt"]) for body in engine.bodies() if "logprobs" in body}
    assert {tuple(line["prompt_ids"]) for line in rollouts} == sent
    assert all(line["completion_ids"][-1] == STOPS[0] for line in rollouts)


def test_a_server_that_goes_amid_a_step_costs_that_step_alone(
    engine, world_dir, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(served, "PAUSES", (0.01, 0))
    out = tmp_path / "run"
    flags = run_flags(world_dir, out, engine, steps=3, checkpoint_every=3)
    requests = []

    def dies(body):
        requests.append(body)
        return DROP if len(requests) > 6 else engine.sampled(body)  # in step 2, of 4 rollouts each

    engine.answer = dies
    with pytest.raises(SystemExit) as end, driver.signals_restored():
        sgsd.main(flags)
    *_, last = capsys.readouterr().err.strip().splitlines()
    assert end.value.code == 2
    assert engine.url in last and "run the same command to continue" in last
    assert len(rows(out / "metrics.jsonl")) == 1
    assert (out / "checkpoints/step_000001").is_dir()
    engine.answer = engine.sampled
    completes(sgsd.main, flags)
    steps = [line["step"] for line in rows(out / "rollouts.jsonl")]
    assert steps == [1] * 4 + [2] * 4 + [3] * 4
    assert [line["step"] for line in rows(out / "metrics.jsonl")] == [1, 2, 3]


# ---------------------------------------------------------------------------- the outline is enough


@pytest.fixture
def outline(world_dir, tmp_path):
    """The tests' model without its weights, which only a server can sample."""
    return shutil.copytree(
        world_dir / "model", tmp_path / "outline", ignore=shutil.ignore_patterns("*.safetensors")
    )


def test_a_bank_alone_is_made_on_a_server_from_the_models_outline(
    engine, outline, tokenizer, world_dir, tmp_path
):
    def answer(body):
        text = tokenizer.decode(body["prompt"])
        if "Return ONLY" not in text:  # a seed problem
            return engine.sampled(body)
        reply = driver.reply_to(text)
        return 200, choices(token_ids=[*tokenizer.encode(reply), STOPS[0]])

    engine.answer = answer
    out = tmp_path / "run"
    changes = {"model": str(outline), "bank": "", "steps": 0, "cold_start": 8, "reply_tokens": 999}
    completes(sgsd.main, run_flags(world_dir, out, engine, **changes))
    sampled = [tokenizer.decode(body["prompt"]) for body in engine.bodies()]
    assert sum("Return ONLY" not in text for text in sampled) == 8
    assert len(rows(out / "bank/memories.jsonl")) == 8
    replies = rows(out / "bank/replies.jsonl")
    assert replies and len(replies) == len(sampled) - 8
    assert (out / "bank/bank.json").read_text() == (out / "bank/step_000000.json").read_text()
    assert not engine.bodies("/v1/load_lora_adapter") and not (out / "checkpoints").exists()


def test_an_evaluation_on_a_server_loads_the_models_outline_alone(
    engine, outline, world_dir, tmp_path
):
    line = driver.evaluation(world_dir, tmp_path / "eval", f"--server {engine.url}")
    completes(eval.main, [outline, *line[1:]])
    samples = driver.samples(tmp_path / "eval")
    assert len(samples) == len(engine.bodies()) == 12 * 3
    assert {sample["engine"] for sample in samples} == {"vllm"}
