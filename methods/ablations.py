"""SGSD with one part changed: every row of Tab. 4, §4.4 and §4.5 that is not a setting of its.

    loss(x) = sum_k alpha_k rho_k mean over unmasked t of l_t^(k)         Eq. 16, any part replaced

    python -m methods.ablations --no-polarity --out runs/a              distil every teacher; §4.4
    python -m methods.ablations --no-token-mask --no-clip --out runs/b              parts of Tab. 4
    python -m methods.ablations --objective jsd --out runs/c            a divergence; §4.5
    python -m methods.ablations --teacher ema --out runs/d              a teacher's weights; §4.5

With all defaults a step equals `sgsd.train_step` bit for bit. Two rows of the paper are settings of
sgsd.py itself: --eps-a 0, without the threshold, and --num-teachers 1.

Dimension key: K teachers, T completion tokens, n positions of a slice, V vocabulary.
"""

import contextlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import distributed
import rollout
import sgsd
from lib.config import Config, setting
from lib.problems import Problem
from lib.run import Run, solve
from methods import divergences, teachers
from methods.opsd import with_answer
from rollout import Rollout
from sgsd import RolloutLoss
from skills import SkillPair


@dataclass(frozen=True)
class AblationConfig(Config):
    """SGSD's settings, and a flag for each part that can be changed."""

    program: ClassVar[str] = "-m methods.ablations"

    out: str = "runs/ablation"
    token_mask: bool = setting(
        True, "leave formatting tokens out; without it every token counts; Tab. 4"
    )
    clip: bool = setting(True, "clip the gaps for the support; Tab. 4")
    polarity: bool = setting(
        True, "distil or reverse by the verdict; without it distil every teacher; §4.4"
    )
    retrieval: str = setting(
        "embedding", "nearest by embedding, or random; S20", ("embedding", "random")
    )
    answer_pi: bool = setting(False, "show teachers the reference answer, too; §4.5, S16")
    teacher: str = setting(
        "live",
        "teacher weights: current adapter, base, periodic copy or EMA; §4.5",
        choices=("live", "frozen", "periodic", "ema"),
    )
    teacher_period: int = setting(50, "copy the student to a periodic teacher every N steps; S18")
    teacher_decay: float = setting(0.999, "decay of an EMA teacher, per step; S18", least=0, most=1)
    objective: str = setting(
        "gate",
        "the gate, or a divergence over the whole vocabulary; §4.5, D10",
        choices=("gate", *divergences.JSD_BETA),
    )
    support_top_k: int = setting(0, "gate on the teacher's top k tokens; 0 disables; S19", least=0)
    loss_temperature: float = setting(
        1.0, "temperature of the loss; 0 takes the sampling's; S5", least=0
    )
    drop_truncated: bool = setting(
        False, "leave solutions that the length limit cut out of the loss; S4"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.support_top_k and self.objective != "gate":
            raise ValueError("--support-top-k: needs the gate; leave out --objective")

    @property
    def score_temperature(self) -> float:
        """The temperature of the log-probabilities in the loss; a greedy draw has none."""
        return self.loss_temperature or self.temperature or 1.0


def settings(run: Run) -> AblationConfig:
    assert isinstance(run.cfg, AblationConfig)
    return run.cfg


def token_losses(
    cfg: AblationConfig, ids_n: Tensor, s_nV: Tensor, teachers_nV: list[Tensor]
) -> Tensor:
    """Loss, gap and full gap of each position under each teacher: [n, K, 3].

    s_nV: the student's logits, with gradient. teachers_nV: K tensors of logits. The gap decides the
    polarity. The full gap is Eq. 7's, from which the gap differs where --support-top-k truncates
    the vocabulary (S19).
    """
    full_nK = divergences.full_gaps(ids_n, s_nV, teachers_nV)
    columns = []
    for t_nV, full_n in zip(teachers_nV, full_nK.unbind(1)):
        gap_n, gated_n = full_n, full_n
        if cfg.support_top_k:
            gated_n, gap_n = divergences.local_support(ids_n, s_nV, t_nV, cfg.support_top_k)
        if cfg.objective == "gate":
            loss_n = sgsd.gated_loss(gated_n, cfg.tau_g)
        else:
            beta = divergences.JSD_BETA[cfg.objective]
            loss_n = divergences.generalized_jsd(s_nV, t_nV, beta)
        columns.append(torch.stack([loss_n, gap_n, full_n], 1))
    return torch.stack(columns, 1)


def teacher_policy(run: Run) -> contextlib.AbstractContextManager:
    """In it the model has the teachers' weights (--teacher)."""
    kind = settings(run).teacher
    if kind == "live":
        return contextlib.nullcontext()
    return teachers.frozen(run) if kind == "frozen" else teachers.copied(run)


def follow(run: Run, step: int) -> None:
    """Let a copied teacher follow the student (--teacher periodic or ema; S18)."""
    cfg = settings(run)
    is_copied_now = step % cfg.teacher_period == 0
    teachers.follow(run, 1 - cfg.teacher_decay if cfg.teacher == "ema" else float(is_copied_now))


def rollout_loss(run: Run, x: Problem, roll: Rollout, pairs_K: Sequence[SkillPair]) -> RolloutLoss:
    """`sgsd.rollout_loss`, with any part changed."""
    cfg = settings(run)
    ids_T = torch.tensor(roll.completion_ids, device=run.device)
    mask_T = sgsd.token_mask(ids_T, run.masked_ids if cfg.token_mask else [])
    alpha_K = sgsd.pair_weights(run, pairs_K)
    ell_KT, gap_KT, full_KT = scored(run, x, roll, pairs_K)
    bound = cfg.c_delta if cfg.clip else math.inf
    a_K = sgsd.robust_support(gap_KT, mask_T, bound)
    rho_K = torch.ones_like(a_K)
    if cfg.polarity:
        rho_K = sgsd.polarity(a_K, sgsd.reward(roll), cfg.eps_a)
    if cfg.drop_truncated and roll.truncated:
        rho_K = torch.zeros_like(a_K)  # every teacher is ignored (S4)
    lbar_K = sgsd.masked_mean(sgsd.unmasked(ell_KT, mask_T), mask_T)
    loss = sgsd.sgsd_loss(lbar_K, alpha_K, rho_K)
    if not rho_K.any() and loss.isfinite():
        loss = loss.detach()  # its gradient is 0
    numbers = {"alpha": alpha_K, "a_plain": sgsd.plain_support(gap_KT), "a": a_K}
    numbers |= {"rho": rho_K.int(), "losses": lbar_K.detach()}
    token_numbers = {"mask": mask_T.int(), "delta": gap_KT.detach()}
    if cfg.objective == "gate" and not cfg.support_top_k:  # else Eq. 20 does not describe the loss
        credit_KT = sgsd.token_credit(gap_KT, mask_T, alpha_K, rho_K, cfg.tau_g)
        token_numbers["credit"] = credit_KT
    if cfg.support_top_k:  # logs what truncation does to the supports and to the mean gap (S19)
        error_KT = (gap_KT - full_KT).abs()
        numbers["a_full"] = sgsd.robust_support(full_KT, mask_T, bound)
        numbers["gap_error"] = sgsd.robust_support(error_KT, mask_T, math.inf)
        token_numbers["delta_full"] = full_KT.detach()
    return RolloutLoss(loss, numbers, token_numbers)


def scored(run: Run, x: Problem, roll: Rollout, pairs_K: Sequence[SkillPair]) -> Tensor:
    """Token losses, gaps and full gaps of all teachers: [3, K, T]."""
    cfg = settings(run)
    problem = with_answer(x.problem, x.answer) if cfg.answer_pi else x.problem
    contexts_K = sgsd.teacher_prompts(run, pairs_K, problem)

    def losses(ids_n: Tensor, s_nV: Tensor, teachers_nV: list[Tensor]) -> Tensor:
        return token_losses(cfg, ids_n, s_nV, teachers_nV)

    policy = teacher_policy(run)
    return divergences.scored(run, roll, contexts_K, losses, cfg.score_temperature, policy)


def retrieve(run: Run, x: Problem, step: int) -> list[SkillPair]:
    """The nearest pairs by --encoder; with --retrieval random, others for each step (S20).

    Random pairs all have one weight.
    """
    cfg = settings(run)
    bank: Any = run.bank
    if cfg.retrieval == "embedding":
        return bank.retrieve(x.problem, cfg.num_teachers, run.embed)
    draw, k = random.Random(rollout.sample_key(cfg.seed, step, x.id)), cfg.num_teachers
    lists = bank.general_skills, bank.common_mistakes
    chosen = [draw.sample(entries, min(k, len(entries))) for entries in lists]
    return [SkillPair(skill, mistake, 0.0, 0.0) for skill, mistake in zip(*chosen)]


def train_step(run: Run, step: int) -> tuple[list[dict], float]:
    """`sgsd.train_step` with `retrieve` and `rollout_loss` of this file, and a teacher's copy."""
    if settings(run).teacher in ("periodic", "ema"):
        teachers.begin(run)
    cfg, rows = settings(run), []
    jobs = sgsd.step_jobs(run, step)
    for job, roll in zip(jobs, solve(run, jobs)):
        pairs_K = retrieve(run, job.problem, step)
        result = rollout_loss(run, job.problem, roll, pairs_K)
        if result.loss.requires_grad:
            (result.loss / cfg.batch_size).backward()
        rows.append(sgsd.record(run, step, job.index, pairs_K, roll, result))
        run.clock.lap("bwd")
    norm = sgsd.optimizer_step(run, step)
    follow(run, step)
    return rows, norm


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    return sgsd.main(argv, __doc__, AblationConfig, train_step)


if __name__ == "__main__":
    distributed.run_and_exit(main)
