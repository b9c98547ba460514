"""GRPO: a solution's advantage is its reward relative to its group's; Tab. 11, S15.

    loss(y_i) = - mean over t of A_i w_t,  A_i = (r_i - mean r) / (std r + 1e-4),  w_t = pi / pi_old

    python -m methods.grpo --out runs/a                      as in the paper: the model thinks
    python -m methods.grpo --short --out runs/b              sampled and clipped as SGSD
    python -m methods.grpo --bank bank.json --out runs/c     GRPO+Skill: skills in the prompts

Source: DeepSeekMath (Shao et al. 2024), with the settings of SGSD's released scripts, and TRL's
defaults where these are silent (S15).
We make one optimizer step per batch, so w_t = 1 and the clip never acts. There is no KL term.

Dimension key: G solutions of a problem, T completion tokens.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import distributed
import scoring
import sgsd
from lib.config import Config, setting
from lib.problems import Problem
from lib.run import Run
from methods import groups
from rollout import Rollout
from skills import SkillPair


@dataclass(frozen=True)
class GRPOConfig(groups.GroupConfig):
    """SGSD's settings with GRPO's defaults (Tab. 11, S15)."""

    program: ClassVar[str] = "-m methods.grpo"
    without: ClassVar[frozenset[str]] = groups.GroupConfig.without | {"the teachers"}

    out: str = "runs/grpo"
    student_prefix: str = "bare"
    temperature: float = 1.2
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 16000
    max_prompt_tokens: int = 2048
    rollout_rows: int = 64
    grad_clip: float = 1.0
    bank: str = setting(
        "",
        "skill bank (JSON): GRPO+Skill, with three pairs in each prompt and no evolution; S17",
        "the bank",
        brings={"num_teachers": 3, "evolve_every": 0},
    )
    short: bool = setting(
        False,
        "sample and clip as SGSD: closed think block, 1,024 tokens, SGSD's temperature, top-p, "
        "top-k and --grad-clip; S15",
        brings={
            "student_prefix": Config.student_prefix,
            "temperature": Config.temperature,
            "top_p": Config.top_p,
            "top_k": Config.top_k,
            "max_new_tokens": Config.max_new_tokens,
            "max_prompt_tokens": Config.max_prompt_tokens,
            "rollout_rows": Config.rollout_rows,
            "grad_clip": Config.grad_clip,
        },
    )
    loss_temperature: float = setting(
        0.0, "temperature of the loss; 0 takes the sampling's; S5, S15", least=0
    )


def grpo_advantages(rewards_G: Tensor, eps: float = 1e-4) -> Tensor:
    """(r - mean) / (std + eps) within one group; std is the sample's, by n - 1 (S15). [G].

    0 if all rewards are equal. ValueError on fewer than two rewards.
    """
    if rewards_G.ndim != 1 or len(rewards_G) < 2:
        shape = tuple(rewards_G.shape)
        raise ValueError(f"grpo_advantages: rewards_G must be [G] with G >= 2, got {shape}")
    if (rewards_G == rewards_G[0]).all():  # in fp32 their mean may differ from them
        return torch.zeros_like(rewards_G)
    return (rewards_G - rewards_G.mean()) / (rewards_G.std() + eps)


def grpo_loss(
    logp_T: Tensor, logp_old_T: Tensor, advantage: float | Tensor, clip: float = 0.2
) -> Tensor:
    """-mean_t min(w_t A, clip(w_t, 1 - clip, 1 + clip) A), w_t = pi(y_t) / pi_old(y_t) (S15).

    No KL term. logp_T: [T] with gradient. logp_old_T: [T], taken as constant. advantage: the
    completion's, or that of each token [T]. Returns a scalar.
    """
    ratio_T = (logp_T - logp_old_T.detach()).exp()
    clipped_T = ratio_T.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio_T * advantage, clipped_T * advantage).mean()


def losses(
    run: Run, step: int, x: Problem, rolls_G: list[Rollout], pairs_K: list[SkillPair]
) -> groups.Losses:
    """The loss of each solution of a group. If all rewards are equal, it is 0 without scoring."""
    return weighted_losses(run, rolls_G, grpo_advantages(groups.rewards(rolls_G)))


def weighted_losses(run: Run, rolls_G: list[Rollout], advantages_G: Tensor) -> groups.Losses:
    """The loss of each solution, with its advantage as weight."""
    temperature = run.cfg.loss_temperature or run.cfg.temperature
    for roll, advantage in zip(rolls_G, advantages_G):
        loss = torch.zeros((), device=run.device)
        if advantage:
            ids_T = roll.completion_ids
            logp_T = scoring.score_student(run.lm, roll.prompt_ids, ids_T, temperature)
            loss = grpo_loss(logp_T, logp_T, advantage.item())
        yield loss, {"advantage": advantage, "mixed": advantages_G.any().float()}, {}


train_step = groups.make_step(losses, shows_skills=True)


main = functools.partial(sgsd.main, doc=__doc__, config_class=GRPOConfig, step_fn=train_step)


if __name__ == "__main__":
    distributed.run_and_exit(main)
