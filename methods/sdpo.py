"""SDPO: a teacher sees a right solution of the same problem by the policy itself.

    loss(y) = mean over all t of  a KL(T || M) + (1 - a) KL(S || M),  M = (1 - a) S + a T

    python -m methods.sdpo --out runs/sdpo

S and T are student and teacher over the student's k likeliest tokens, with one number for the rest.
The teacher sees the first of the group's other solutions that is right. Without such a sibling, a
solution teaches nothing: in a group without success that is every solution, and where only one is
right, that one. Advantages play no part.

Source: Self-Distillation Policy Optimization, github.com/lasgroup/SDPO at 0e6d510. Ours differs:
without a right sibling, we have no feedback of the environment to show (S28); the EMA teacher
averages adapters, not weights (S29); AdamW is as for SGSD, without warmup or weight decay, and one
step per batch needs no ratio (S30).

Dimension key: G solutions of a problem, T completion tokens, n positions of a slice, V vocabulary,
k likeliest tokens.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import distributed
import sgsd
import skills
from lib.config import setting
from lib.problems import Problem
from lib.run import Run, teacher_ids
from methods import divergences, groups, teachers
from rollout import THINK, Rollout
from skills import SkillPair


@dataclass(frozen=True)
class SDPOConfig(groups.GroupConfig):
    """SGSD's settings with SDPO's defaults, and the settings of its teacher."""

    program: ClassVar[str] = "-m methods.sdpo"
    without: ClassVar[frozenset[str]] = groups.GroupConfig.without | {"the bank"}

    out: str = "runs/sdpo"
    teacher_prefix: str = "closed"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    learning_rate: float = 1e-5
    grad_clip: float = 1.0
    divergence_alpha: float = setting(
        0.5, "the teacher's share of the mixture: 0 is KL(T||S), 1 is KL(S||T)", least=0, most=1
    )
    divergence_top_k: int = setting(
        100, "compare the student's likeliest tokens one by one, and the others together"
    )
    teacher_decay: float = setting(0.95, "decay of the EMA teacher, per step", least=0, most=1)


def top_k_with_tail(s_nV: Tensor, t_nV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of student and teacher at the student's k likeliest ids, and of the rest.

    s_nV, t_nV: logits, the student's with gradient. Returns [n, k + 1] twice, in nats, without
    renormalising: the last number, log(1 - sum of the others), completes the probabilities to 1. We
    take the sum as at most 1 - 1e-7. k is the vocabulary's size at most.
    """
    top_nk = s_nV.detach().topk(min(k, s_nV.shape[-1])).indices
    both = []
    for logits_nV in (s_nV, t_nV):
        logp_nk = logits_nV.log_softmax(-1).gather(1, top_nk)
        together_n1 = logp_nk.logsumexp(1, keepdim=True).clamp(max=-1e-7)
        tail_n1 = torch.log(-torch.expm1(together_n1))
        both.append(torch.cat([logp_nk, tail_n1], 1))
    return both[0], both[1]


def sdpo_divergence(s_nV: Tensor, t_nV: Tensor, alpha: float, k: int) -> Tensor:
    """a KL(T || M) + (1 - a) KL(S || M) over the k + 1 numbers of `top_k_with_tail`: [n] nats.

    M = (1 - a) S + a T; a = 0 is KL(T || S), a = 1 is KL(S || T). No term is clipped.
    """
    return divergences.generalized_jsd(*top_k_with_tail(s_nV, t_nV.detach(), k), alpha)


def shown_sibling(rewards_G: Sequence[float], i: int) -> int | None:
    """Which solution the teacher of solution i sees: the first other one with a reward >= 0.5.

    None if there is no such solution: solution i then teaches nothing.
    """
    return next((j for j, r in enumerate(rewards_G) if j != i and r >= 0.5), None)


def with_solution(problem: str, solution: str) -> str:
    """The problem as the teacher sees it: with a right solution, without its thinking (S30)."""
    shown = solution.rpartition(THINK[1])[2].strip()
    return f"{problem}\n\nA correct solution:\n\n{shown}\n\nNow solve the original problem."


def losses(
    run: Run, step: int, x: Problem, rolls_G: list[Rollout], pairs_K: list[SkillPair]
) -> groups.Losses:
    """The loss of each solution of a group. Without a right sibling, it is 0 without scoring."""
    cfg = run.cfg

    def token_losses(ids_n: Tensor, s_nV: Tensor, t_nV: Tensor) -> tuple[Tensor, Tensor]:
        loss_n = sdpo_divergence(s_nV, t_nV, cfg.divergence_alpha, cfg.divergence_top_k)
        return loss_n, divergences.gap(ids_n, s_nV, t_nV)  # the gap is for the logs

    rewards_G = groups.rewards(rolls_G).tolist()
    for i, roll in enumerate(rolls_G):
        sibling = shown_sibling(rewards_G, i)
        context = None
        if sibling is not None:
            text = skills.render_student(with_solution(x.problem, rolls_G[sibling].text))
            context = teacher_ids(run, text, roll)
        yield divergences.distilled(run, roll, context, token_losses, teachers.copied(run))


def teacher_share(cfg: Any, step: int) -> float:
    """How far the teacher's copy moves towards the student after a step: an EMA (S29)."""
    return 1 - cfg.teacher_decay


train_step = teachers.followed(groups.make_step(losses), teacher_share)


main = functools.partial(sgsd.main, doc=__doc__, config_class=SDPOConfig, step_fn=train_step)


if __name__ == "__main__":
    distributed.run_and_exit(main)
