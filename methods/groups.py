"""A step for a method that samples several solutions of each problem.

A method is one function, losses(run, x, rolls_G, pairs_K), which yields the loss of each solution
of a problem; `step_fn` makes a step of it, and `sgsd.train` does the rest. The teachers' contexts
are made after sampling, so they may show what was sampled. docs/changing.md has an example.

Dimension key: G solutions of a problem, K teachers, T completion tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import rollout
import sgsd
import skills
from lib import problems
from lib.config import NO_COLD_START, Config, setting
from lib.problems import Problem
from lib.run import Run
from rollout import Job, Rollout
from skills import SkillPair


@dataclass(frozen=True)
class GroupConfig(Config):
    """SGSD's settings, and the size of a group."""

    generations: int = setting(8, "G: solutions sampled for each problem; Tab. 11")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generations < 2:
            raise ValueError("--generations: the method compares a group, so it must be >= 2")
        if self.temperature == 0:
            raise ValueError("--temperature 0: makes all --generations of a problem the same")

    @property
    def uses_skill_bank(self) -> bool:
        return bool(self.bank)

    def void(self) -> dict[str, str]:
        return super().void() | NO_COLD_START


@dataclass
class RolloutLoss(sgsd.RolloutLoss):
    """A rollout's loss with further numbers for rollouts.jsonl and tokens.jsonl."""

    numbers: dict[str, Tensor] = field(default_factory=dict)
    token_numbers: dict[str, Tensor] = field(default_factory=dict)
    has_credit: bool = True  # whether Eq. 20 describes this loss


def without_teachers(loss: Tensor, T: int, numbers: dict[str, Tensor]) -> RolloutLoss:
    """The loss of a completion of T tokens for which no teacher spoke."""
    ones_T, none_K = loss.new_ones(T).detach(), loss.new_zeros(0)
    none_KT = loss.new_zeros(0, T)
    return RolloutLoss(
        loss=loss,
        mask_T=ones_T,
        delta_KT=none_KT,
        alpha_K=none_K,
        a_K=none_K,
        rho_K=none_K,
        lbar_K=none_K,
        credit_KT=none_KT,
        numbers=numbers,
        has_credit=False,
    )


def of_one_teacher(ell_1T: Tensor, delta_1T: Tensor, c_delta: float) -> RolloutLoss:
    """The mean of a completion's token losses under one teacher; every token counts.

    ell_1T: with gradient. delta_1T: gaps, for the logs.
    """
    ones_1, ones_T = ell_1T.new_ones(1), ell_1T.new_ones(ell_1T.shape[1])
    lbar_1 = ell_1T.mean(1)
    return RolloutLoss(
        loss=lbar_1.sum(),
        mask_T=ones_T,
        delta_KT=delta_1T,
        alpha_K=ones_1,
        a_K=sgsd.robust_support(delta_1T, ones_T, c_delta),
        rho_K=ones_1,
        lbar_K=lbar_1,
        credit_KT=torch.zeros_like(delta_1T).detach(),
        has_credit=False,
    )


def rewards(rolls_G: Sequence[Rollout]) -> Tensor:
    """Training rewards of a group. [G]."""
    return torch.tensor([float(sgsd.reward(roll)) for roll in rolls_G])


def prompt_with_skills(run: Run, x: Problem, pairs_K: Sequence[SkillPair]) -> list[int]:
    """The student's prompt, with the skills that --bank gives, if any (S17)."""
    text = skills.render_skills(pairs_K, x.problem)
    return sgsd.prompt_ids(run, text, run.cfg.student_prefix)


def step_fn(
    losses: Callable[[Any, Problem, list[Rollout], list[SkillPair]], Iterable[RolloutLoss]],
    student_prompt: Callable[[Any, Problem, list[SkillPair]], list[int]] = prompt_with_skills,
) -> Callable[[Run, int], tuple[list[dict], float]]:
    """A step in the place of `sgsd.train_step`; run.cfg.generations solutions of each problem.

    losses: of a problem's solutions, in their order. A generator keeps the graph of one at a time.
    """

    def train_step(run: Run, step: int) -> tuple[list[dict], float]:
        cfg: Any = run.cfg
        world, size = run.world, cfg.generations
        batch = problems.minibatch(run.problems, cfg.batch_size, step, cfg.seed)
        share: list[tuple[int, Problem, list[SkillPair]]] = []
        jobs: list[Job] = []
        for place in range(world.rank, len(batch), world.size):  # whole groups
            x, epoch = batch[place]
            pairs_K = []
            if cfg.uses_skill_bank:
                pairs_K = run.bank.retrieve(x.problem, cfg.num_teachers, run.embed)
            share.append((place, x, pairs_K))
            prompt = student_prompt(run, x, pairs_K)
            for i in range(size):
                key = rollout.sample_key(cfg.seed, step, x.id, epoch * size + i)
                jobs.append(Job(len(jobs), prompt, key, cfg.max_new_tokens, x))
        rolls = iter(sgsd.solve(run, jobs))
        run.clock.lap("gen")
        rows = []
        for place, x, pairs_K in share:
            rolls_G = [next(rolls) for _ in range(size)]
            for i, result in enumerate(losses(run, x, rolls_G, pairs_K)):
                if result.loss.requires_grad:  # else its gradient is 0
                    (result.loss / (cfg.batch_size * size)).backward()
                rows.append(record(run, step, place * size + i, pairs_K, rolls_G[i], result))
                run.clock.lap("bwd")
        norm = sgsd.optimizer_step(run, step)
        run.clock.lap("opt")
        return rows, norm

    return train_step


def record(
    run: Run,
    step: int,
    index: int,
    pairs_K: Sequence[SkillPair],
    roll: Rollout,
    result: RolloutLoss,
) -> dict:
    """`sgsd.record` with the method's own numbers."""
    row = sgsd.record(run, step, index, pairs_K, roll, result)
    row |= {name: x.tolist() for name, x in result.numbers.items()}
    if "tokens" in row:
        row["tokens"] |= {name: x.tolist() for name, x in result.token_numbers.items()}
        if not result.has_credit:
            del row["tokens"]["credit"]
    return row
