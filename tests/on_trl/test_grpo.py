"""The page's GRPO on TRL is methods.grpo: its settings, ids, rewards and gradient."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch
import trl
from conftest import ROOT
from transformers import TrainerCallback

import rollout
from methods import groups, grpo

PAGE = (ROOT / "docs/engines.md").read_text()
TINY = ROOT / "tiny"
FLAGS = f"--preset tiny --short --model {TINY}/model --data {TINY}/train.jsonl --batch-size 2"


class GradientOfMethod(TrainerCallback):
    """Before TRL's step: its gradient, and that of methods.grpo on the same rollouts."""

    def __init__(self, trainer, names):
        self.trainer, self.names = trainer, names

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.trainer.of_trl = {name: p.grad.clone() for name, p in learning.items()}
        model.zero_grad()
        cfg = self.names["cfg"]
        run = SimpleNamespace(cfg=cfg, lm=model, device=torch.device("cpu"))
        for x, rolls_G in groups_of(self.trainer, self.names):
            for loss, _, _ in grpo.losses(run, state.global_step, x, rolls_G, []):
                if loss.requires_grad:
                    (loss / (cfg.batch_size * cfg.generations)).backward()
        torch.nn.utils.clip_grad_norm_(learning.values(), cfg.grad_clip)
        self.trainer.of_method = {name: p.grad.clone() for name, p in learning.items()}
        for name, p in learning.items():
            p.grad = self.trainer.of_trl[name]


def groups_of(trainer, names):
    """Each problem with its group of rollouts, judged again from the ids of TRL's batch."""
    jobs, batch = [], trainer.batch
    for b, row in enumerate(trainer.inputs):
        prompt = batch["prompt_ids"][b][batch["prompt_mask"][b].bool()].tolist()
        ids = batch["completion_ids"][b][batch["completion_mask"][b].bool()].tolist()
        jobs.append(rollout.Job(b, prompt, 0, 0, names["problems"][row["index"]], ids))
    stops = rollout.stop_ids(trainer.model, names["tokenizer"])
    (judged,) = rollout.rollouts(names["tokenizer"], stops, names["judge"], [jobs])
    rolls, size = [roll for _, roll in judged], names["cfg"].generations
    starts = range(0, len(rolls), size)
    return [(jobs[start].problem, rolls[start : start + size]) for start in starts]


def run_block(names, words):
    """The page's block as a command with these words; its names go into a dict."""
    (source,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["", *FLAGS.split(), *words])
        exec(compile(source, "docs/engines.md", "exec"), names)


@pytest.fixture(scope="module")
def block(tmp_path_factory):
    """The names of the page's block after a step of the tiny world."""
    names = {}

    class Recorded(trl.GRPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.add_callback(GradientOfMethod(self, names))

        def _generate_and_score_completions(self, inputs):
            self.inputs, self.batch = inputs, super()._generate_and_score_completions(inputs)
            return self.batch

    out = tmp_path_factory.mktemp("grpo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl, "GRPOTrainer", Recorded)
        run_block(names, ["--steps", "1", "--out", str(out)])
    return names


def test_its_settings_are_those_of_the_method(block):
    cfg, args = block["cfg"], block["trainer"].args
    names = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "steps": "max_steps"}
    names |= {"max_new_tokens": "max_completion_length", "generations": "num_generations"}
    names |= {"learning_rate": "learning_rate", "grad_clip": "max_grad_norm", "seed": "seed"}
    for ours, theirs in names.items():
        assert getattr(args, theirs) == getattr(cfg, ours), ours
    rollouts = args.per_device_train_batch_size * args.gradient_accumulation_steps
    assert rollouts == cfg.batch_size * cfg.generations
    assert args.steps_per_generation == args.gradient_accumulation_steps
    assert (args.loss_type, args.beta, args.num_iterations) == ("grpo", 0, 1)
    assert (args.scale_rewards, args.lr_scheduler_type, args.weight_decay) == ("group", "linear", 0)
    assert not args.vllm_importance_sampling_correction
    assert block["lora"].r == cfg.lora_rank and block["lora"].lora_alpha == cfg.lora_alpha


def test_its_ids_and_rewards_are_those_of_the_method(block):
    cfg, batch = block["cfg"], block["trainer"].batch
    stops = rollout.stop_ids(block["trainer"].model, block["tokenizer"])
    assert sorted(block["trainer"].eos_token_ids) == stops
    run = block["student"]
    expected = []
    for x, rolls_G in groups_of(block["trainer"], block):
        for roll in rolls_G:
            assert roll.prompt_ids == groups.prompt_with_skills(run, x, [])
            assert roll.truncated == (len(roll.completion_ids) == cfg.max_new_tokens)
        expected.append(grpo.grpo_advantages(groups.rewards(rolls_G)))
    torch.testing.assert_close(batch["advantages"], torch.cat(expected))


def test_its_gradient_is_that_of_the_method(block):
    one, other = block["trainer"].of_trl, block["trainer"].of_method
    size = sum(float(x.square().sum()) for x in other.values())
    distance = sum(float((one[name] - other[name]).square().sum()) for name in other)
    assert size > 0
    assert (distance / size) ** 0.5 < 1e-4


@pytest.mark.parametrize(
    "flags, word",
    {
        "--generations 5": "10",  # solutions, in backward passes of eight
        f"--bank {ROOT}/banks/word_problems.json": "--bank",
        "--adapter elsewhere": "--adapter",
        "--loss-temperature 1": "--loss-temperature",
    }.items(),
)
def test_what_it_would_leave_out_is_refused_in_one_line(flags, word):
    with pytest.raises(SystemExit) as end:
        run_block({}, flags.split())
    assert word in end.value.code and "\n" not in end.value.code


def test_a_step_of_fewer_solutions_than_a_backward_pass_takes_is_one_pass(tmp_path):
    names = {}
    run_block(names, f"--generations 2 --steps 1 --out {tmp_path}".split())
    args = names["trainer"].args
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (4, 1)
