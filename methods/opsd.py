"""OPSD: on-policy self-distillation from one teacher that sees the answer; Tab. 11, S16.

    loss(y) = mean over all t of sum_v min( p_T(v) (log p_T(v) - log p_S(v)), 0.05 )

    python -m methods.opsd --out runs/d                      the paper's baseline
    python -m methods.opsd --bank bank.json --out runs/e     OPSD+Skill: both roles see the skills

The teacher is the base model with the reference answer in its prompt; the verdict plays no part.
Source: the released scripts of SGSD, because the paper gives neither the bound of 0.05 nor the
temperature of the loss, which is the sampling's. We show the answer in one sentence (S16).

Dimension key: T completion tokens, n positions of a slice, V vocabulary.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

import distributed
import sgsd
import skills
from lib.config import setting
from lib.problems import Problem
from lib.run import Run, teacher_ids
from methods import divergences, groups
from rollout import Rollout
from skills import SkillPair


@dataclass(frozen=True)
class OPSDConfig(groups.MethodConfig):
    """SGSD's settings, and the bound of OPSD's divergence."""

    program: ClassVar[str] = "-m methods.opsd"
    generations: ClassVar[int] = 1  # solutions per problem

    out: str = "runs/opsd"
    bank: str = setting(
        "",
        "skill bank (JSON): OPSD+Skill, with three pairs in each prompt and no evolution; S17",
        "the bank",
        brings={"num_teachers": 3, "evolve_every": 0},
    )
    objective_clip: float = setting(
        0.05, "bound on each term of the divergence; 0 removes it; S16", least=0
    )
    teacher_field: str = setting("", "show the teacher this field in the place of the answer")


def with_answer(x: Problem, field: str) -> str:
    """The problem and its reference answer, as a teacher sees them (S16).

    field: --teacher-field. Its text replaces the sentence with the answer, word for word.
    """
    shown = x.extra[field] if field else f"The reference answer is {x.answer}."
    return f"{x.problem}\n\n{shown}"


def teacher_prompt(
    run: Run, x: Problem, pairs_K: Sequence[SkillPair], roll: Rollout
) -> list[int] | None:
    """The prompt of a teacher that sees the answer (S16), and the skills of any pairs (S14).

    None if the context does not hold it with the solution (S35).
    """
    text = skills.render_skills(pairs_K, with_answer(x, run.cfg.teacher_field))
    return teacher_ids(run, text, roll)


def losses(
    run: Run, step: int, x: Problem, rolls_G: list[Rollout], pairs_K: list[SkillPair]
) -> groups.Losses:
    """The loss of a solution from one teacher, whose prompt has the answer and any skills."""

    def token_losses(ids_n: Tensor, s_nV: Tensor, t_nV: Tensor) -> tuple[Tensor, Tensor]:
        loss_n = divergences.generalized_jsd(s_nV, t_nV, 0.0, clip=run.cfg.objective_clip)
        return loss_n, divergences.gap(ids_n, s_nV, t_nV)  # the gap is for the logs

    for roll in rolls_G:
        context = teacher_prompt(run, x, pairs_K, roll)
        base = run.lm.disable_adapter()
        yield divergences.distilled(run, roll, context, token_losses, base)


train_step = groups.make_step(losses, shows_skills=True)


main = functools.partial(sgsd.main, doc=__doc__, config_class=OPSDConfig, step_fn=train_step)


if __name__ == "__main__":
    distributed.run_and_exit(main)
