"""A step for a method that samples several solutions of each problem.

A method is one function, losses(run, step, x, rolls_G, pairs_K). For each solution of a problem, in
order, it yields the loss, the numbers of its row in rollouts.jsonl, and those of its row in
tokens.jsonl; `step_fn` makes a step of it, and `sgsd.train` does the rest. The teachers' contexts
are made after sampling, so they may show what was sampled. docs/changing.md has an example.

Dimension key: G solutions of a problem, K teachers, T completion tokens.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import rollout
import sgsd
import skills
from lib import problems
from lib.config import NO_COLD_START, Config, setting
from lib.problems import Problem
from lib.run import Prompt, Run, longest_problem, solve
from rollout import Job, Rollout
from sgsd import RolloutLoss
from skills import SkillPair


@dataclass(frozen=True)
class GroupConfig(Config):
    """SGSD's settings, and the size of a group."""

    generations: int = setting(8, "G: solutions sampled for each problem; Tab. 11", least=2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature == 0:
            raise ValueError("--temperature 0: makes all --generations of a problem the same")

    @property
    def uses_skill_bank(self) -> bool:
        return bool(self.bank)

    def void(self) -> dict[str, str]:
        return super().void() | NO_COLD_START


Numbers = dict[str, Tensor]  # detached, by their names in the logs
Losses = Iterable[tuple[Tensor, Numbers, Numbers]]  # of a group's solutions
StudentPrompt = Callable[[Any, Problem, list[SkillPair]], list[int]]


def rewards(rolls_G: Sequence[Rollout]) -> Tensor:
    """Training rewards of a group. [G]."""
    return torch.tensor([float(sgsd.reward(roll)) for roll in rolls_G])


def prompt_with_skills(run: Run, x: Problem, pairs_K: Sequence[SkillPair]) -> list[int]:
    """The student's prompt, with the skills that --bank gives, if any (S17)."""
    text = skills.render_skills(pairs_K, x.problem)
    return sgsd.prompt_ids(run, text, run.cfg.student_prefix)


def longest_prompts(run: Run) -> list[Prompt]:
    """The student's longest prompt, with the skills that --bank gives, if any."""
    x, pairs = longest_problem(run), run.cfg.num_teachers
    where = f"problem {x.id}"
    return [sgsd.longest_prompt(run, pairs, x.problem, where, run.cfg.student_prefix)]


@dataclass
class Group:
    """A problem of the minibatch, with the jobs of its solutions."""

    x: Problem
    pairs_K: list[SkillPair]  # those of --bank; empty without one
    jobs_G: list[Job]


def step_groups(run: Run, step: int, student_prompt: StudentPrompt) -> list[Group]:
    """This rank's share of the minibatch, in whole groups.

    The index of a problem's i-th job is its place in the minibatch times G, plus i.
    """
    cfg: Any = run.cfg
    G, share = cfg.generations, []
    batch = problems.minibatch(run.problems, cfg.batch_size, step, cfg.seed)
    for place in range(run.world.rank, len(batch), run.world.size):
        x, epoch = batch[place]
        pairs_K = []
        if cfg.uses_skill_bank:
            pairs_K = run.bank.retrieve(x.problem, cfg.num_teachers, run.embed)
        group, prompt = Group(x, pairs_K, []), student_prompt(run, x, pairs_K)
        for i in range(G):
            key = rollout.sample_key(cfg.seed, step, x.id, epoch * G + i)
            job = Job(place * G + i, prompt, key=key, left=cfg.max_new_tokens, problem=x)
            group.jobs_G.append(job)
        share.append(group)
    return share


def step_fn(
    losses: Callable[[Any, int, Problem, list[Rollout], list[SkillPair]], Losses],
    student_prompt: StudentPrompt = prompt_with_skills,
) -> Callable[[Run, int], tuple[list[dict], float]]:
    """A step in the place of `sgsd.train_step`; run.cfg.generations solutions of each problem.

    losses: of the solutions of one problem, in their order. A generator keeps the graph of one at a
    time; a loss without a graph has no backward pass.
    """

    def train_step(run: Run, step: int) -> tuple[list[dict], float]:
        cfg: Any = run.cfg
        G, rows = cfg.generations, []
        share = step_groups(run, step, student_prompt)
        jobs = itertools.chain.from_iterable(group.jobs_G for group in share)
        rolls = iter(solve(run, list(jobs)))
        for group in share:
            rolls_G = list(itertools.islice(rolls, G))
            results = losses(run, step, group.x, rolls_G, group.pairs_K)
            for job, roll, result in zip(group.jobs_G, rolls_G, results, strict=True):
                result = RolloutLoss(*result)
                if result.loss.requires_grad:
                    (result.loss / (cfg.batch_size * G)).backward()
                rows.append(sgsd.record(run, step, job.index, group.pairs_K, roll, result))
                run.clock.lap("bwd")
        norm = sgsd.optimizer_step(run, step)
        return rows, norm

    return train_step
