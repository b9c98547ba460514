"""GRPO on TRL's GRPOTrainer: the baseline with all weights, sharding, vLLM (docs/engines.md).

    python -m extras.grpo_on_trl --short --data mine.jsonl --out runs/trl_grpo
    accelerate launch --config_file extras/fsdp2.yaml -m extras.grpo_on_trl --short --full
    python eval.py Qwen/Qwen3-1.7B runs/trl_grpo/checkpoint-200

Settings, the problems of each step, prompts, verdicts and stop ids are those of methods.grpo, and
so is the gradient on the same solutions (tests/on_trl/test_grpo.py). TRL samples, computes the
advantages and the loss, makes the steps, logs and saves. Some of its flags may follow a lone --, as
in extras/on_trl.py. Only methods.grpo has --bank, --adapter and --loss-temperature.

--checkpoint-every is TRL's save_steps, and eval.py takes OUT/checkpoint-N. OUT/config.json has the
run's settings: the same command continues after the newest checkpoint that is whole. This program
needs extras/requirements.txt.
"""

import contextlib
import functools
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import distributed
import sgsd
from extras import on_trl
from lib import command, config, files, verify
from lib.run import (
    Run,
    about_run,
    claim,
    continued,
    leave_out_long,
    load_training,
    refuse_other_processes,
)
from methods import grpo


@dataclass(frozen=True)
class Settings(on_trl.OnTRL, grpo.GRPOConfig):
    """The settings of methods.grpo, and those of a run on TRL."""

    program: ClassVar[str] = "-m extras.grpo_on_trl"
    without: ClassVar[frozenset[str]] = grpo.GRPOConfig.without | {
        "the bank",
        "adapter",
        "loss_temperature",
        "audit_every",
        "checkpoint_above",
        "rollout_rows",
    }

    out: str = "runs/trl_grpo"
    # Not free: TRL's learning rate would jump, and it keeps the interval of the checkpoint.
    steps: int = config.setting(200, "number of optimizer steps; §4.1", "the run")
    checkpoint_every: int = config.setting(25, "save a checkpoint every N steps; §4.1", "the run")


def rewards(run: Run, prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """TRL's reward function. prompts: the problems' texts."""
    return [sgsd.reward(roll) for roll in on_trl.rollouts_of(run, prompts, completion_ids)]


def inspect(cfg: Settings, world: distributed.World, held: contextlib.ExitStack) -> Run:
    """Rank 0: the problems and the state of --out's run; ValueError if we may not continue it.

    TRL writes the trainer_state.json of a checkpoint last: without it the checkpoint is not whole.
    """
    claim(cfg, held)
    out, data = pathlib.Path(cfg.out), load_training(cfg)
    run = Run(cfg=cfg, world=world, about=about_run(cfg, data, world), problems=data)
    states = out.glob("checkpoint-*/trainer_state.json")
    by_step = {files.read_json(state)["global_step"]: state.parent for state in states}
    run.step = max(by_step, default=0)
    run.checkpoint = by_step.get(run.step)
    if (out / "config.json").exists():
        run.about = continued(run, files.read_json(out / "config.json"))
    return run


def load(words: Sequence[str], cfg: Settings, held: contextlib.ExitStack) -> on_trl.Trainer:
    """The trainer of the run in --out. words: TRL's flags."""
    world = distributed.init(cfg.device)
    refuse_other_processes(cfg, world)
    run: Any = inspect(cfg, world, held) if world.main else None
    run = distributed.broadcast(run, world)
    run.cfg, run.world, run.signals = cfg, world, command.Signals()
    args = on_trl.trl_settings(
        cfg,
        words,
        world,
        cfg.batch_size * cfg.generations,
        temperature=cfg.temperature,
        num_generations=cfg.generations,
        save_steps=cfg.checkpoint_every,
        save_total_limit=cfg.keep_last or None,
        logging_steps=1,
        report_to=cfg.report_to,
    )
    run.verifier = held.enter_context(verify.load_judge(cfg.verifier)(cfg.verify_timeout))
    run.lm, run.tokenizer = on_trl.load_outline(cfg)
    leave_out_long(run, sgsd.student_prompt, cfg.max_new_tokens)
    trainer = on_trl.Trainer(
        run,
        args,
        run.lm.name_or_path,
        functools.partial(rewards, run),
        peft_config=on_trl.lora_of(run),
    )
    if world.main:
        run.begin()
    return trainer


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code. If the folder has a run, it continues the run."""
    cfg, words = on_trl.command_line(argv, __doc__, Settings)
    with contextlib.ExitStack() as held:
        with command.one_line_errors(cfg.program, *command.GIVEN):
            trainer = load(words, cfg, held)
            checkpoint = trainer.run.checkpoint
        with command.one_line_errors(cfg.program, *command.LATER):
            trainer.train(checkpoint and str(checkpoint))
        if trainer.run.world.main:
            print(f"done; evaluate: python eval.py {cfg.model} {cfg.out}/checkpoint-{cfg.steps}")
    return 0


if __name__ == "__main__":
    distributed.run_and_exit(main)
