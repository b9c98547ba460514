"""RLSD: GRPO's advantage, weighted token by token by a teacher that sees the answer.

    loss(y) = - mean over t of  A (1 - lam + lam w_t) log p_S(y_t)
    w_t = clip( exp( sgn(A) (log p_T(y_t) - log p_S(y_t)) ), 0.8, 1.2 )

    python -m methods.rlsd --out runs/rlsd                     one teacher, which sees the answer
    python -m methods.rlsd --bank bank.json --out runs/rlsd_k  SGSD's K teachers in its place

The verdicts decide which way a solution is pushed. The teacher only decides how its tokens share
the push. lam = 0.5 (1 - step / 60); from step 60 on it is 0, and the method is GRPO. The teacher
is a copy of the policy that is renewed every 20 steps.

Source: arXiv 2604.03128, github.com/iie-ycx/RLSD at 93e46f7. Ours differs: sampling, gradient bound
and optimizer are SGSD's, and one step per batch leaves no ratio to clip (S31); the loss is a mean
over a solution's tokens, then over solutions, not over all tokens of the batch (S32). With --bank
the gap is sum_k alpha_k Delta_t^(k) of SGSD's teachers, which have the current weights: this form
is ours (S33).

Dimension key: G solutions of a problem, K teachers, T completion tokens.
"""

import contextlib
import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import distributed
import scoring
import sgsd
from lib.config import Config, setting
from lib.problems import Problem
from lib.run import Run
from methods import groups, teachers
from methods.grpo import grpo_advantages, grpo_loss
from methods.opsd import teacher_prompt
from rollout import Rollout
from skills import SkillPair


@dataclass(frozen=True)
class RLSDConfig(groups.GroupConfig):
    """SGSD's settings, and how much and how long the teacher's weights count."""

    program: ClassVar[str] = "-m methods.rlsd"
    without: ClassVar[frozenset[str]] = groups.GroupConfig.without | {"c_delta"}

    out: str = "runs/rlsd"
    teacher_prefix: str = "closed"
    bank: str = setting(
        "",
        "skill bank (JSON): SGSD's K teachers in the place of one, without evolution; S33",
        "the bank",
        brings={"teacher_prefix": Config.teacher_prefix, "evolve_every": 0},
    )
    weighting: float = setting(
        0.5, "lam before the first step: how much the weights count", least=0, most=1
    )
    weighting_steps: int = setting(60, "steps within which lam falls to 0")
    teacher_period: int = setting(20, "copy the policy to the teacher every N steps")
    teacher_field: str = setting("", "show the teacher this field in the place of the answer")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bank and self.teacher_field:
            raise ValueError("--teacher-field: with --bank the teachers see skills alone")


def token_advantages(gap_T: Tensor, advantage: float, lam: float) -> Tensor:
    """A_t = A (1 - lam + lam w_t), w_t = clip(exp(sgn(A) gap_t), 0.8, 1.2). [T].

    gap_T: log p_T(y_t) - log p_S(y_t) in nats. A token that the teacher finds likelier than the
    student does gets more of a success's push, and less of a failure's. The sign is always A's.
    """
    sign = (advantage > 0) - (advantage < 0)
    w_T = torch.exp(sign * gap_T.detach()).clamp(0.8, 1.2)
    return advantage * (1 - lam + lam * w_T)


def weighting_share(step: int, first: float, steps: int) -> float:
    """lam of a step, counted from 1: first (1 - step / steps), and 0 from `steps` on."""
    return first * max(0.0, 1 - step / steps)


def losses(
    run: Run, step: int, x: Problem, rolls_G: list[Rollout], pairs_K: list[SkillPair]
) -> groups.Losses:
    """The loss of each solution of a group. If its advantage is 0, it is 0 without scoring."""
    cfg = run.cfg
    lam = weighting_share(step, cfg.weighting, cfg.weighting_steps)
    advantages_G = grpo_advantages(groups.rewards(rolls_G), eps=1e-6)
    for roll, advantage in zip(rolls_G, advantages_G):
        ids_T = roll.completion_ids
        loss = torch.zeros((), device=run.device)
        advantage_T = advantage.expand(len(ids_T))
        used_K = pairs_K
        logpT_T = None
        if advantage and lam:
            used_K, logpT_T = teachers_logprobs(run, x, roll, pairs_K)
        if advantage:
            logpS_T = scoring.score_student(run.lm, roll.prompt_ids, ids_T, cfg.temperature)
            gap_T = torch.zeros_like(logpS_T) if logpT_T is None else logpT_T - logpS_T
            advantage_T = token_advantages(gap_T, advantage.item(), lam)
            loss = grpo_loss(logpS_T, logpS_T, advantage_T)
        mixed = advantages_G.any().float()
        yield loss, {"advantage": advantage, "mixed": mixed}, {"advantage": advantage_T}, used_K


def teachers_logprobs(
    run: Run, x: Problem, roll: Rollout, pairs_K: list[SkillPair]
) -> tuple[list[SkillPair], Tensor | None]:
    """The teachers' pairs, if any, and log p_T(y_t): with SGSD's K teachers the weighted mean.

    [T], no gradient; None if no teacher's prompt fits (S35).
    """
    cfg = run.cfg
    policy: contextlib.AbstractContextManager = contextlib.nullcontext()
    if pairs_K:
        pairs_K, contexts_K = sgsd.teacher_prompts(run, pairs_K, x.problem, roll)
        alpha_K = sgsd.pair_weights(run, pairs_K)
    else:
        context = teacher_prompt(run, x, [], roll)
        contexts_K = [context] if context else []
        alpha_K = torch.ones(1, device=run.device)
        policy = teachers.copied(run)
    if not contexts_K:
        return pairs_K, None
    with policy:
        logpT_KT = scoring.score_teachers(
            run.lm, contexts_K, roll.completion_ids, cfg.score_tokens, cfg.temperature
        )
    run.clock.lap("score")
    return pairs_K, alpha_K @ logpT_KT


def teacher_share(cfg: Any, step: int) -> float | None:
    """1 if this step renews the teacher's copy, else 0; None with --bank: live teachers (S33)."""
    return None if cfg.bank else float(step % cfg.teacher_period == 0)


train_step = teachers.followed(groups.make_step(losses), teacher_share)


main = functools.partial(sgsd.main, doc=__doc__, config_class=RLSDConfig, step_fn=train_step)


if __name__ == "__main__":
    distributed.run_and_exit(main)
