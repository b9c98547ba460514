"""GRPO on TRL is methods.grpo: its settings, problems, ids, rewards and gradient; it goes on."""

import itertools
import pathlib
import shutil
import signal
from types import SimpleNamespace
from unittest import mock

import conftest
import driver
import pytest
import torch
import trl_worlds
from conftest import ROOT
from torch.distributed.tensor import DTensor

import distributed
import eval
import rollout
from extras import grpo_on_trl, on_trl
from lib import command, config, files, model, problems, verify
from methods import groups, grpo

TINY = ROOT / "tiny"


def flags(folder, **changes):
    """A command line on the tiny world, whose groups have both outcomes.

    Of two processes each gets one and a half of the three groups.
    """
    given = {"preset": "tiny", "short": True, "out": pathlib.Path(folder, "run"), "steps": 1}
    given |= {"batch_size": 3, "generations": 4, "model": TINY / "model"}
    return trl_worlds.words_of(given | {"data": TINY / "train.jsonl"} | changes)


def parsed(argv):
    """The settings of a command line."""
    presets = config.presets_of(grpo_on_trl.Settings)
    return command.parse(argv, "", grpo_on_trl.Settings, presets)


def main(argv):
    """The command, which leaves the handlers of signals as they were."""
    with driver.signals_restored():
        return grpo_on_trl.main(argv)


# ------------------------------------------------------------------------------ beside methods.grpo


def record(folder, **changes):
    """The trainer of a run in FOLDER/run. FOLDER/steps.pt has its steps: gradient, weights before
    it, and of the solutions of all processes prompt, ids, advantage."""
    trainers, gradients, rows = [], trl_worlds.Gradients(), []

    class Recorded(on_trl.Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, callbacks=[gradients], **kwargs)
            trainers.append(self)

        def _generate_and_score_completions(self, inputs):
            output, solutions = super()._generate_and_score_completions(inputs), []
            for b in range(len(inputs)):
                row = {"advantage": output["advantages"][b].item()}
                for name in ("prompt", "completion"):
                    mask_L = output[f"{name}_mask"][b].bool()
                    row[name] = output[f"{name}_ids"][b][mask_L].tolist()
                solutions.append(row)
            gathered = distributed.all_gather(solutions, self.run.world)
            rows.append([*itertools.chain.from_iterable(gathered)])
            return output

    with mock.patch.object(on_trl, "Trainer", Recorded):
        assert main(flags(folder, **changes)) == 0
    if trainers[0].run.world.main:
        steps = zip(gradients.steps, gradients.weights, rows)
        torch.save([*steps], pathlib.Path(folder, "steps.pt"))
    return trainers[0]


def sharded(folder):
    """`record` of all weights, in shards."""
    of_trl = record(folder, full=True)
    assert all(isinstance(p, DTensor) for p in of_trl.model.parameters())


RUNS = {  # name: what two processes call, whether all weights learn, steps
    "adapters": ("", False, 2),
    "all weights": ("", True, 2),
    "adapters, two processes": ("record", False, 1),
    "all weights, two shards": ("sharded", True, 1),
}


@pytest.fixture(scope="module", params=RUNS)
def recorded(request, tmp_path_factory):
    """A run: its settings, folder, and steps as `record` saves them."""
    function, full, steps = RUNS[request.param]
    folder = tmp_path_factory.mktemp("grpo")
    if function:
        trl_worlds.torchrun(f"test_grpo:{function}", folder)
    else:
        record(folder, full=full, steps=steps)
    cfg = parsed(flags(folder, full=full, steps=steps))
    steps_made = torch.load(folder / "steps.pt", weights_only=True)
    assert len(steps_made) == steps
    return SimpleNamespace(cfg=cfg, out=folder / "run", steps=steps_made)


@pytest.fixture(scope="module")
def student():
    """What gives prompts and verdicts, of a run of methods.grpo on the tiny world."""
    lm, tokenizer = model.load_model(str(TINY / "model"), "cpu")
    data, _ = problems.load_problems(str(TINY / "train.jsonl"))
    with verify.Verifier() as judge:
        yield SimpleNamespace(lm=lm, tokenizer=tokenizer, problems=data, judge=judge)


def groups_of(student, cfg, step, rows):
    """The groups of a step of methods.grpo, with the completions of rows: [(problem, rolls_G)]."""
    run = SimpleNamespace(cfg=cfg, **vars(student))
    batch, jobs = problems.minibatch(student.problems, cfg.batch_size, step, cfg.seed), []
    for b, row in enumerate(rows):
        x = batch[b // cfg.generations][0]
        prompt = groups.prompt_with_skills(run, x, [])
        jobs.append(rollout.Job(b, prompt, 0, 0, x, row["completion"]))
    stops = rollout.stop_ids(student.lm, student.tokenizer)
    (judged,) = rollout.rollouts(student.tokenizer, stops, student.judge, [jobs])
    rolls, size = [roll for _, roll in judged], cfg.generations
    return [(x, rolls[i * size : (i + 1) * size]) for i, (x, _) in enumerate(batch)]


def test_its_problems_ids_and_rewards_are_those_of_the_method(recorded, student):
    middle = []  # the groups of a step whose solutions lie on both of two processes
    for step, (_, _, rows) in enumerate(recorded.steps, 1):
        groups_G = [rolls_G for _, rolls_G in groups_of(student, recorded.cfg, step, rows)]
        expected = [grpo.grpo_advantages(groups.rewards(rolls_G)) for rolls_G in groups_G]
        advantages = torch.tensor([row["advantage"] for row in rows])
        torch.testing.assert_close(advantages, torch.cat(expected))
        middle.append(expected[1])
        for roll, row in zip(itertools.chain.from_iterable(groups_G), rows):
            assert roll.prompt_ids == row["prompt"]
            assert roll.truncated == (len(roll.completion_ids) == recorded.cfg.max_new_tokens)
    assert torch.cat(middle).any()


def test_its_gradient_is_that_of_the_method(recorded, student):
    cfg, lm = recorded.cfg, model.load_model(str(TINY / "model"), "cpu")[0].train()
    if not cfg.full:
        lm = model.with_adapters(lm, cfg.lora_rank, cfg.lora_alpha)
    learning = model.trained(lm)
    run = SimpleNamespace(cfg=cfg, lm=lm, device=torch.device("cpu"))
    for step, (gradient, weights, rows) in enumerate(recorded.steps, 1):
        lm.load_state_dict(weights, strict=False)
        lm.zero_grad()
        for x, rolls_G in groups_of(student, cfg, step, rows):
            for loss, _, _ in grpo.losses(run, step, x, rolls_G, []):
                if loss.requires_grad:
                    (loss / (cfg.batch_size * cfg.generations)).backward()
        torch.nn.utils.clip_grad_norm_(learning.values(), cfg.grad_clip)
        own = {name: p.grad for name, p in learning.items()}
        assert trl_worlds.distance(gradient, own) < 1e-4


def test_eval_takes_what_it_saves(recorded, tmp_path):
    checkpoint = recorded.out / f"checkpoint-{recorded.cfg.steps}"
    argv = [checkpoint, "--data", TINY / "test.jsonl", "--limit", 2, "--samples", 1]
    argv += ["--max-new-tokens", 4, "--no-thinking", "--device", "cpu", "--out", tmp_path]
    driver.completes(eval.main, argv)
    torch.set_num_threads(1)
    (results,) = tmp_path.glob("*/results.json")
    assert files.read_json(results)["test"]["samples"] == 2


# ---------------------------------------------------------------------------- on a random model


def small_flags(world_dir, folder, **changes):
    """A command line of eight steps, of which six are an epoch, on the random model."""
    given = {"model": world_dir / "model", "data": world_dir / "data.jsonl", "steps": 8}
    given |= {"verifier": "driver:UnevenVerifier", "max_new_tokens": 8, "checkpoint_every": 2}
    return flags(folder, **(given | {"batch_size": 2, "generations": 2} | changes))


def test_its_settings_and_stop_ids_are_those_of_the_method(world_dir, tmp_path):
    """The model has several stop ids, as Qwen3 has; what is saved has all of them."""
    stops = [*range(60, 120), trl_worlds.END]
    lm = conftest.save_model(tmp_path / "lm", eos_token_id=stops[:-1], attention_dropout=0.1)
    changes = {"model": lm, "data": world_dir / "data.jsonl", "verifier": "driver:UnevenVerifier"}
    changes |= {"generations": 5, "batch_size": 2, "full": True, "keep_last": 2}
    trainer = record(tmp_path, **changes)
    args, cfg = trainer.args, parsed(flags(tmp_path, **changes))
    wanted = {"temperature": cfg.temperature, "top_p": cfg.top_p, "top_k": cfg.top_k}
    wanted |= {"max_completion_length": cfg.max_new_tokens, "num_generations": cfg.generations}
    wanted |= {"learning_rate": cfg.learning_rate, "lr_scheduler_type": "linear", "seed": cfg.seed}
    wanted |= {"max_grad_norm": cfg.grad_clip, "weight_decay": 0, "max_steps": cfg.steps}
    wanted |= {"save_steps": cfg.checkpoint_every, "per_device_train_batch_size": 2}
    wanted |= {"gradient_accumulation_steps": 5, "steps_per_generation": 5, "num_iterations": 1}
    wanted |= {"loss_type": "grpo", "beta": 0, "scale_rewards": "group"}
    wanted |= {"save_total_limit": 2, "vllm_importance_sampling_correction": False}
    assert {name: getattr(args, name) for name in wanted} == wanted
    assert args.generation_kwargs["temperature"] == cfg.temperature
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert trainer.model.config.attention_dropout == 0
    saved, tokenizer = model.load_model(str(tmp_path / "run/checkpoint-1"), "cpu")
    assert trainer.eos_token_ids == rollout.stop_ids(saved, tokenizer) == stops
    ((_, _, rows),) = torch.load(tmp_path / "steps.pt", weights_only=True)
    for ids in [row["completion"] for row in rows]:
        assert len(ids) == cfg.max_new_tokens or ids[-1] in stops
        assert not {*stops} & {*ids[:-1]}


def state(out):
    """What must be equal of a run that was cut short and one that was not."""
    checkpoints = sorted(path.name for path in out.glob("checkpoint-*"))
    weights = [path.read_bytes() for path in out.glob("checkpoint-8/*model.safetensors")]
    log = files.read_json(out / "checkpoint-8/trainer_state.json")["log_history"]
    return checkpoints, weights, [{k: v for k, v in row.items() if k != "step_time"} for row in log]


@pytest.fixture(scope="module", params=[False, True], ids=["adapters", "all weights"])
def complete(request, world_dir, tmp_path_factory):
    """Whether all weights learn, and a run of eight steps that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("complete")
    assert main(small_flags(world_dir, folder, full=request.param)) == 0
    return request.param, folder / "run"


def test_a_killed_run_goes_on_after_its_newest_whole_checkpoint(complete, world_dir, tmp_path):
    """The sampler of TRL begins each start with the first epoch's order: here that is the only one.

    A run with nothing left to do makes no step.
    """
    full, uninterrupted = complete
    run, argv = tmp_path / "run", small_flags(world_dir, tmp_path, full=full)
    kill = driver.at_touch("checkpoint-6/trainer_state.json")
    code = driver.go(argv, tmp_path / "log", before=kill, program=main)
    assert code == -signal.SIGKILL
    assert (run / "checkpoint-6").exists()  # which is not whole
    assert main(argv) == 0
    assert files.read_json(run / "config.json")["continuations"][0]["step"] == 4
    assert state(run) == state(uninterrupted)
    assert main(argv) == 0
    assert state(run) == state(uninterrupted)


# ---------------------------------------------------------------------------------------- refused


REFUSED = [  # settings, TRL's words, and words of the line
    ({"bank": "b.json"}, "", "--bank"),
    ({"loss_temperature": 1.0}, "", "--loss-temperature"),
    ({"steps": 0}, "", "--steps"),
    ({"max_prompt_tokens": 20}, "", "--max-prompt-tokens"),
    ({"full": True, "dtype": "bfloat16"}, "", "--dtype float32"),
    ({}, "--learning_rate 1", "--learning_rate"),
    ({"model": "qwen2_moe"}, "", "experts --full"),
]


@pytest.mark.parametrize("changes, words, said", REFUSED)
def test_what_it_would_leave_out_is_refused(world_dir, tmp_path, capsys, changes, words, said):
    if "model" in changes:
        changes = {"model": conftest.save_model(tmp_path / "lm", changes["model"])}
    argv = [*small_flags(world_dir, tmp_path, **changes), "--", *words.split()]
    driver.refused(capsys, grpo_on_trl.main, argv, *said.split())
    assert not (tmp_path / "run/config.json").exists()


def test_other_runs_are_refused_and_stay(complete, world_dir, tmp_path, uninterrupted, capsys):
    full, own = complete
    of_sgsd = shutil.copytree(uninterrupted, tmp_path / "sgsd")
    for out, changes, said in (
        (own, {"steps": 9}, "--steps 9"),
        (own, {"checkpoint_every": 1}, "--checkpoint-every 1"),  # TRL would keep its save_steps
        (own, {"temperature": 0.5}, "--temperature 0.5"),
        (of_sgsd, {}, "sgsd.py"),
    ):
        before = driver.contents(out)
        argv = small_flags(world_dir, tmp_path, full=full, **(changes | {"out": out}))
        driver.refused(capsys, grpo_on_trl.main, argv, said, "--out", str(out))
        assert driver.contents(out) == before
