"""OPSD: on-policy self-distillation from one teacher that sees the answer; Tab. 11, S16.

    loss(y) = mean over all t of sum_v min( p_T(v) (log p_T(v) - log p_S(v)), 0.05 )

    python -m methods.opsd --out runs/d                      the paper's baseline
    python -m methods.opsd --bank bank.json --out runs/e     OPSD+Skill: both roles see the skills

The teacher is the base model with the reference answer in its prompt; the verdict plays no part.
Source: the released scripts of SGSD, since the paper gives neither the bound of 0.05 nor the
temperature of the loss, which is the sampling's. Ours shows the answer in one sentence (S16).

Dimension key: T completion tokens, n positions of a slice, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import distributed
import sgsd
import skills
from lib.config import NO_COLD_START, Config, setting
from lib.problems import Problem
from lib.run import Prompt, Run, longest_problem
from methods import divergences, groups, teachers
from methods.groups import Losses
from rollout import Rollout
from skills import SkillPair


@dataclass(frozen=True)
class OPSDConfig(Config):
    """SGSD's settings, and the bound of OPSD's divergence."""

    program: ClassVar[str] = "-m methods.opsd"
    generations: ClassVar[int] = 1  # solutions of a problem

    out: str = "runs/opsd"
    objective_clip: float = setting(
        0.05, "bound on each term of the divergence; 0 removes it; S16", least=0
    )

    @property
    def uses_skill_bank(self) -> bool:
        return bool(self.bank)

    def void(self) -> dict[str, str]:
        return super().void() | NO_COLD_START


VARIANTS: dict[str, dict[str, Any]] = {"bank": {"num_teachers": 3, "evolve_every": 0}}  # S17


def with_answer(problem: str, answer: str) -> str:
    """The problem as a teacher sees it that knows the reference answer (S16)."""
    return f"{problem}\n\nThe reference answer is {answer}."


def losses(
    run: Run, step: int, x: Problem, rolls_G: list[Rollout], pairs_K: list[SkillPair]
) -> Losses:
    """The loss of a solution by one teacher, whose prompt has the answer and any skills."""
    cfg: Any = run.cfg
    text = skills.render_skills(pairs_K, with_answer(x.problem, x.answer))
    contexts_1 = [sgsd.prompt_ids(run, text, cfg.teacher_prefix)]

    def token_losses(ids_n: Tensor, s_nV: Tensor, teachers_nV: list[Tensor]) -> Tensor:
        loss_n = divergences.generalized_jsd(s_nV, teachers_nV[0], 0.0, clip=cfg.objective_clip)
        gap_n1 = divergences.full_gaps(ids_n, s_nV.detach(), teachers_nV)  # for the logs
        return torch.stack([loss_n[:, None], gap_n1], 2)

    for roll in rolls_G:
        ell_1T, delta_1T = divergences.scored(
            run, roll, contexts_1, token_losses, cfg.temperature or 1.0, teachers.frozen(run)
        )
        yield divergences.mean_loss(ell_1T, delta_1T, cfg.c_delta)


train_step = groups.step_fn(losses)


def longest_prompts(run: Run) -> list[Prompt]:
    """The student's longest prompt, and the teacher's, which has the answer as well."""

    def shown(x: Problem) -> str:
        return with_answer(x.problem, x.answer)

    cfg, x = run.cfg, longest_problem(run, shown)
    where = f"problem {x.id} with its answer"
    teacher = sgsd.longest_prompt(run, cfg.num_teachers, shown(x), where, cfg.teacher_prefix)
    return [*groups.longest_prompts(run), teacher]


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    return sgsd.main(argv, __doc__, OPSDConfig, train_step, longest_prompts, VARIANTS)


if __name__ == "__main__":
    distributed.run_and_exit(main)
