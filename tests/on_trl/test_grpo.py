"""GRPO on TRL is methods.grpo: its settings, problems, ids, rewards and gradient; it goes on."""

import itertools
import pathlib
import re
import sys
import types
from types import SimpleNamespace
from unittest import mock

import conftest
import driver
import pytest
import small_run
import torch
import trl_worlds
from conftest import ROOT
from torch.distributed.tensor import DTensor

import distributed
import rollout
import sgsd
from extras import grpo_on_trl, on_trl
from lib import command, config, model, problems, verify
from methods import groups, grpo

TINY = ROOT / "tiny"
PAGE = (ROOT / "docs/changing.md").read_text()


def flags(folder, **changes):
    """A command line on the tiny world, whose groups have both outcomes.

    Of two processes each gets one and a half of the three groups.
    """
    given = {"preset": "tiny", "short": True, "out": pathlib.Path(folder, "run"), "steps": 1}
    given |= {"batch_size": 3, "generations": 4, "model": TINY / "model"}
    return trl_worlds.words_of(given | {"data": TINY / "train.jsonl"} | changes)


def parsed(argv, kind=grpo_on_trl.Settings):
    """The settings of a command line."""
    return command.parse(argv, "", kind, config.presets_of(kind))


# ------------------------------------------------------------------------------ beside methods.grpo


def record(folder, program=grpo_on_trl, holder=on_trl, **changes):
    """The trainer of a run in FOLDER/run. FOLDER/steps.pt has its steps: gradient, weights before
    it, and of the solutions of all processes prompt, ids, advantage.

    holder: the module with the program's Trainer.
    """
    trainers, gradients, rows = [], trl_worlds.Gradients(), []

    class Recorded(holder.Trainer):
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

    with mock.patch.object(holder, "Trainer", Recorded), small_run.signals_restored():
        assert program.main(flags(folder, **changes)) == 0
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
        prompt = sgsd.student_prompt(run, x.problem)
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
    assert_steps(student, recorded, grpo.losses)


def assert_steps(student, recorded, losses):
    """Each recorded step has the gradient of a method's losses on its solutions, and their log."""
    cfg, log = recorded.cfg, iter(driver.rows(recorded.out / "rollouts.jsonl"))
    lm = model.load_model(str(TINY / "model"), "cpu")[0].train()
    if not cfg.full:
        lm = model.with_adapters(lm, cfg.lora_rank, cfg.lora_alpha)
    learning = model.trained(lm)
    run = SimpleNamespace(cfg=cfg, lm=lm, device=torch.device("cpu"))
    for step, (gradient, weights, rows) in enumerate(recorded.steps, 1):
        lm.load_state_dict(weights, strict=False)
        lm.zero_grad()
        for x, rolls_G in groups_of(student, cfg, step, rows):
            for loss, numbers, _ in losses(run, step, x, rolls_G, []):
                if loss.requires_grad:
                    (loss / (cfg.batch_size * cfg.generations)).backward()
                wanted, row = {**numbers, "loss": loss.detach()}, next(log)
                for name, value in wanted.items():
                    assert row[name] == pytest.approx(value.item(), abs=1e-5)
        torch.nn.utils.clip_grad_norm_(learning.values(), cfg.grad_clip)
        own = {name: p.grad for name, p in learning.items()}
        assert trl_worlds.distance(gradient, own) < 1e-4


# ---------------------------------------------------------------------------- on a random model


def small_flags(world_dir, folder, **changes):
    """A command line on the random model."""
    given = {"model": world_dir / "model", "data": world_dir / "data.jsonl"}
    given |= {"verifier": "small_run:UnevenVerifier", "max_new_tokens": 8}
    return flags(folder, **(given | {"batch_size": 2, "generations": 2} | changes))


def test_its_settings_and_stop_ids_are_those_of_the_method(world_dir, tmp_path):
    """The model has several stop ids, as Qwen3 has; what is saved has all of them."""
    stops = [*range(60, 120), trl_worlds.END]
    lm = conftest.save_model(tmp_path / "lm", eos_token_id=stops[:-1], attention_dropout=0.1)
    changes = {"model": lm, "data": world_dir / "data.jsonl"}
    changes |= {"verifier": "small_run:UnevenVerifier"}
    changes |= {"generations": 5, "batch_size": 2, "full": True, "keep_last": 2}
    trainer = record(tmp_path, **changes)
    args, cfg = trainer.args, parsed(flags(tmp_path, **changes))
    wanted = {"temperature": cfg.temperature, "num_generations": cfg.generations}
    wanted |= {"learning_rate": cfg.learning_rate, "lr_scheduler_type": "linear", "seed": cfg.seed}
    wanted |= {"max_grad_norm": cfg.grad_clip, "weight_decay": 0, "max_steps": cfg.steps}
    wanted |= {"per_device_train_batch_size": 2, "max_completion_length": cfg.max_new_tokens}
    wanted |= {"gradient_accumulation_steps": 5, "steps_per_generation": 5, "num_iterations": 1}
    wanted |= {"loss_type": "grpo", "beta": 0, "scale_rewards": "group"}
    wanted |= {"vllm_importance_sampling_correction": False}
    assert {name: getattr(args, name) for name in wanted} == wanted
    drawn = {"temperature": cfg.temperature, "top_p": cfg.top_p, "top_k": cfg.top_k}
    assert {name: getattr(trainer.generation_config, name) for name in drawn} == drawn
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert trainer.model.config.attention_dropout == 0
    saved, tokenizer = model.load_model(str(tmp_path / "run/checkpoints/step_000001"), "cpu")
    assert trainer.eos_token_ids == rollout.stop_ids(saved, tokenizer) == stops
    ((_, _, rows),) = torch.load(tmp_path / "steps.pt", weights_only=True)
    for ids in [row["completion"] for row in rows]:
        assert len(ids) == cfg.max_new_tokens or ids[-1] in stops
        assert not {*stops} & {*ids[:-1]}


# ---------------------------------------------------------------------------------------- refused


REFUSED = [  # settings, TRL's words, and words of the line
    ({"bank": "b.json"}, "", "--bank"),
    ({"max_prompt_tokens": 20}, "", "--max-prompt-tokens"),
    ({}, "--learning_rate 1", "--learning_rate"),
]


@pytest.mark.parametrize("changes, words, said", REFUSED)
def test_what_it_would_leave_out_is_refused(world_dir, tmp_path, changes, words, said):
    argv = [*small_flags(world_dir, tmp_path, **changes), "--", *words.split()]
    driver.refused(grpo_on_trl.main, argv, *said.split())
    assert not (tmp_path / "run/config.json").exists()


# ---------------------------------------------------------------------- a method of a reader's own


def recipe(title):
    """The program of a section of docs/changing.md, as a module."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    name, code = re.search(r"^```python\n# (\w+)\.py\n(.*?)^```$", section, re.M | re.S).groups()
    module = sys.modules[name] = types.ModuleType(name)
    exec(code, vars(module))
    return module


def test_the_recipe_on_trl_is_the_other_recipe(student, tmp_path):
    """Both are Dr. GRPO: on the same solutions they have one gradient, and log the same."""
    ours, plain = recipe("A method on TRL"), recipe("Another method")
    out = record(tmp_path, ours, ours, full=True, steps=2).run.out
    cfg = parsed(flags(tmp_path, full=True, steps=2), ours.Settings)
    steps = torch.load(tmp_path / "steps.pt", weights_only=True)
    assert len(steps) == 2 and any(row["loss"] for row in driver.rows(out / "rollouts.jsonl"))
    assert_steps(student, SimpleNamespace(cfg=cfg, out=out, steps=steps), plain.losses)
