"""GRPO on TRL's GRPOTrainer: the baseline with all weights, sharding, vLLM (docs/engines.md).

    python -m extras.grpo_on_trl --short --data mine.jsonl --out runs/trl_grpo
    accelerate launch --config_file extras/fsdp2.yaml -m extras.grpo_on_trl --short --full
    python eval.py Qwen/Qwen3-1.7B runs/trl_grpo

Settings, the problems of each step, prompts, verdicts and stop ids are those of methods.grpo, and
so is the gradient on the same solutions (tests/on_trl/test_grpo.py). TRL samples, computes the
advantages and the loss, and makes the steps. The run's folder, its logs, and the flags after a lone
-- are as in extras/on_trl.py. Only methods.grpo has --bank. This program needs
extras/requirements.txt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import distributed
from extras import on_trl
from methods import grpo


@dataclass(frozen=True)
class Settings(on_trl.OnTRL, grpo.GRPOConfig):
    """The settings of methods.grpo, and those of a run on TRL."""

    program: ClassVar[str] = "-m extras.grpo_on_trl"
    without: ClassVar[frozenset[str]] = grpo.GRPOConfig.without | {
        "the bank",
        "checkpoint_above",
        "rollout_rows",
    }

    out: str = "runs/trl_grpo"


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code. If the folder has a run, it continues the run."""
    return on_trl.main(argv, __doc__, Settings, on_trl.Trainer)


if __name__ == "__main__":
    distributed.run_and_exit(main)
