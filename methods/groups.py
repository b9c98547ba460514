"""A step for every method that is one function of a problem's solutions.

A method is a function losses(run, step, x, rolls_G, pairs_K). For each of a problem's G solutions,
in order, it yields (loss, numbers, token_numbers). `make_step` turns it into a step, and
`sgsd.train` does the rest. G is the method's `generations`, and may be 1. The teachers' prompts are
made after sampling, so they may show what was sampled. docs/changing.md has examples.

The loss is a scalar; if its gradient is 0, it needs no graph. `make_step` divides it by the batch
size times G, so the step's loss is the mean over solutions. The numbers are for the logs: detached
tensors by name, each of them optional.

    numbers        shape   what becomes of it in rollouts.jsonl, metrics.jsonl and the report
    rho            [K]     -1, 0 or 1 of each teacher: counted; the report names its decision
    a              [K]     the supports: means and quantiles; drawn beside the threshold
    a_plain, alpha, losses [K]     logged, and shown beside each teacher
    mixed          scalar  1 if the group's rewards differ, so that it teaches, else 0; its mean is
                           on the step's line, and a run warns if that is 0 in its first steps
    any other      scalar  logged; the mean over the step's rollouts that have it is a metric with a
                           curve

    token_numbers          what becomes of it in tokens.jsonl, in audited steps, and the report
    delta          [K, T]  the gaps: the first and the clipped are counted; they colour the tokens
    mask           [T]     1 where a token counts; without it every token does
    credit         [K, T]  colours the tokens
    any other      [T] or [K, T]   logged

A name that a row or a metric has already is a ValueError in the first step. If a method leaves out
some teachers (`sgsd.teacher_prompts`), it yields the pairs of the others as a fourth item.

Dimension key: G solutions of a problem, K teachers, T completion tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import rollout
import sgsd
import skills
from lib import problems
from lib.config import Config, setting
from lib.problems import Problem
from lib.run import Run, print_once
from rollout import Job, Rollout
from sgsd import RolloutLoss
from skills import SkillPair


@dataclass(frozen=True)
class MethodConfig(Config):
    """SGSD's settings, for a method that has no gate, and a bank only if --bank gives one."""

    makes_bank: ClassVar[bool] = False
    without: ClassVar[frozenset[str]] = frozenset({"the first bank", "the objective"})


@dataclass(frozen=True)
class GroupConfig(MethodConfig):
    """MethodConfig's settings, and the size of a group."""

    temperature: float = setting(
        Config.temperature,
        "sampling temperature of the student, above 0: a problem's solutions must differ; Tab. 11",
        "the sampling",
    )
    generations: int = setting(8, "G: solutions sampled for each problem; Tab. 11", least=2)


Losses = Iterable[tuple[Any, ...]]  # (loss, numbers, token_numbers) of a problem's solutions
Retrieve = Callable[[Any, int, Problem], list[SkillPair]]
Step = Callable[[Run, int], tuple[list[dict], float]]  # as `sgsd.train` takes it


def rewards(rolls_G: Sequence[Rollout]) -> Tensor:
    """Training rewards of a group. [G]."""
    return torch.tensor([float(sgsd.reward(roll)) for roll in rolls_G])


def prompt_with_skills(
    run: Run, x: Problem, pairs_K: list[SkillPair]
) -> tuple[list[int], list[SkillPair]]:
    """The student's prompt with the skills of these pairs (S17), and the pairs that it shows.

    If it has more than --max-prompt-tokens, or leaves no room in the model's context, we leave out
    the last pair, and so on. The plain prompt always fits: other problems are left out (S35).
    """
    room = min(run.cfg.max_prompt_tokens, rollout.context_limit(run.lm) - 1)
    text = skills.render_skills(pairs_K, x.problem)
    ids = rollout.chat_ids(run.tokenizer, text, thinking=run.cfg.student_prefix)
    if len(ids) <= room or not pairs_K:
        return ids, pairs_K
    print_once(
        run,
        "a student's last pairs are left out where its prompt would be longer than "
        "--max-prompt-tokens, or fill the model's context (S35)",
    )
    return prompt_with_skills(run, x, pairs_K[:-1])


def nearest(run: Run, step: int, x: Problem) -> list[SkillPair]:
    """The pairs of the bank that are nearest to the problem; none without a bank."""
    if not run.cfg.uses_skill_bank:
        return []
    return run.bank.retrieve(x.problem, run.cfg.num_teachers, run.embed)


def step_jobs(
    run: Run, step: int, shows_skills: bool, retrieve: Retrieve
) -> tuple[list[Job], list[list[SkillPair]]]:
    """This rank's share of the minibatch: the jobs, G for each problem, and each problem's pairs.

    The index of a problem's i-th job is its place in the minibatch times G, plus i. If the student
    reads skills, the pairs are those that its prompt has.
    """
    cfg = run.cfg
    G = cfg.generations
    jobs = []
    pairs = []
    batch = problems.minibatch(run.problems, cfg.batch_size, step, cfg.seed)
    for place in range(run.world.rank, len(batch), run.world.size):
        x, epoch = batch[place]
        pairs_K = retrieve(run, step, x)
        if shows_skills:
            prompt, pairs_K = prompt_with_skills(run, x, pairs_K)
        else:
            prompt = sgsd.student_prompt(run, x.problem)
        for i in range(G):
            key = rollout.sample_key(cfg.seed, step, x.id, epoch * G + i)
            jobs.append(Job(place * G + i, prompt, key=key, x=x))
        pairs.append(pairs_K)
    return jobs, pairs


def make_step(
    losses: Callable[[Any, int, Problem, list[Rollout], list[SkillPair]], Losses],
    shows_skills: bool = False,
    retrieve: Retrieve = nearest,
) -> Step:
    """A step to use instead of `sgsd.train_step`, with run.cfg.generations solutions per problem.

    losses: yields those of one problem's solutions, in order. If it is a generator, one graph is in
    memory at a time. A loss without a graph has no backward pass. shows_skills: whether the
    student's prompt has the skills, too.
    """

    def train_step(run: Run, step: int) -> tuple[list[dict], float]:
        G = run.cfg.generations
        rows = []
        jobs, pairs = step_jobs(run, step, shows_skills, retrieve)
        rolls = sgsd.solve(run, jobs)
        for g, pairs_K in enumerate(pairs):
            group = slice(g * G, g * G + G)
            results = losses(run, step, jobs[g * G].x, rolls[group], pairs_K)
            for job, roll, result in zip(jobs[group], rolls[group], results, strict=True):
                result = RolloutLoss(*result)
                if result.pairs_K is None:  # the method has left none out
                    result = result._replace(pairs_K=pairs_K)
                if result.loss.requires_grad:
                    (result.loss / (run.cfg.batch_size * G)).backward()
                rows.append(sgsd.log_row(run, step, job.index, roll, result))
                run.clock.lap("bwd")
        return rows, sgsd.optimizer_step(run, step)

    return train_step
