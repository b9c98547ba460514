"""SGSD with one part changed: the rows of Tab. 4, §4.4 and §4.5 that sgsd.py has no setting for.

    loss(x) = sum_k alpha_k rho_k mean over unmasked t of l_t^(k)         Eq. 16, any part replaced

    python -m methods.ablations --no-polarity --out runs/a              distil every teacher; §4.4
    python -m methods.ablations --no-token-mask --no-clip --out runs/b              parts of Tab. 4
    python -m methods.ablations --objective jsd --out runs/c            a divergence; §4.5
    python -m methods.ablations --teacher ema --out runs/d              a teacher's weights; §4.5
    python -m methods.ablations --skill-text title --out runs/e         less in teachers' prompts

With all defaults a step equals `sgsd.train_step` bit for bit. For two of the paper's ablations, use
sgsd.py itself: --eps-a 0, without the threshold, and --num-teachers 1.

Source: the paper's Tab. 4, §4.4 and §4.5, and the authors' code where these are silent (S5, S18 to
S20). Ours differs: a copied teacher starts as the adapter at step 0 (S18), random pairs are drawn
anew in each step (S20), and "reverse" is KL(S || T), the usual name (D10). Ours alone are the
controls of what a teacher reads, --retrieval donor and --skill-text (S20).

Dimension key: K teachers, T completion tokens, n positions of a slice, V vocabulary.
"""

import contextlib
import functools
import math
import random
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

import distributed
import rollout
import scoring
import sgsd
from lib import command
from lib.config import Config, setting
from lib.problems import Problem
from lib.run import Run
from methods import divergences, groups, teachers
from methods.opsd import with_answer
from rollout import Rollout
from skills import KINDS, SkillPair

FIELDS_SHOWN = {"whole": 3, "title": 1, "none": 0}  # of an entry, by --skill-text


@dataclass(frozen=True)
class AblationConfig(Config):
    """SGSD's settings, and a flag for each part that can be changed."""

    program: ClassVar[str] = "-m methods.ablations"
    generations: ClassVar[int] = 1  # solutions per problem

    out: str = "runs/ablation"
    token_mask: bool = setting(
        True, "leave formatting tokens out; without it every token counts; Tab. 4"
    )
    clip: bool = setting(True, "clip the gaps for the support; Tab. 4")
    polarity: bool = setting(
        True, "distil or reverse by the verdict; without it distil every teacher; §4.4"
    )
    retrieval: str = setting(
        "embedding",
        "nearest by embedding, a donor's (those nearest to another problem), or random; S20",
        choices=("embedding", "donor", "random"),
    )
    skill_text: str = setting(
        "whole",
        "what teachers read of an entry: the whole, each field's words shuffled, its title, none",
        choices=("whole", "shuffled", "title", "none"),
    )
    answer_pi: bool = setting(False, "show teachers the reference answer, too; §4.5, S16")
    teacher_field: str = setting("", "--answer-pi: show this field in the place of the answer")
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
        if self.teacher_field and not self.answer_pi:
            raise ValueError("--teacher-field: needs --answer-pi")

    @property
    def masks_tokens(self) -> bool:
        return self.token_mask

    @property
    def score_temperature(self) -> float:
        """The temperature of the log-probabilities in the loss; 1 if sampling is greedy."""
        return self.loss_temperature or self.temperature or 1.0


def losses(
    run: Run, step: int, x: Problem, rolls_1: list[Rollout], pairs_K: list[SkillPair]
) -> groups.Losses:
    """The loss of a problem's one solution: lines 5 to 14 of Algorithm 1, a flag for each part."""
    cfg = run.cfg
    is_eq14 = cfg.objective == "gate" and not cfg.support_top_k
    problem = with_answer(x, cfg.teacher_field) if cfg.answer_pi else x.problem
    for roll in rolls_1:
        used_K, contexts_K = sgsd.teacher_prompts(run, pairs_K, problem, roll)  # line 6
        alpha_K = sgsd.pair_weights(run, used_K)  # line 5
        # Without teachers the losses are empty; only the gate's function takes no prompts at all.
        scored = gate_losses if is_eq14 or not used_K else divergence_losses
        ids_T = torch.tensor(roll.completion_ids, device=run.device)
        mask_T = sgsd.token_mask(ids_T, run.masked_ids if cfg.token_mask else [])
        ell_KT, gap_KT = scored(run, roll, contexts_K, mask_T)  # lines 9, 10 and 12
        a_K = sgsd.robust_support(gap_KT, mask_T, cfg.c_delta if cfg.clip else math.inf)  # line 10
        rho_K = torch.ones_like(a_K)
        if cfg.polarity:
            rho_K = sgsd.polarity(a_K, sgsd.reward(roll), cfg.eps_a)  # line 11
        if cfg.drop_truncated and roll.truncated:
            rho_K = torch.zeros_like(a_K)  # every teacher is ignored (S4)
        result = divergences.weighted(ell_KT, gap_KT, mask_T, alpha_K, a_K, rho_K)  # line 14
        if is_eq14:  # Eq. 20 describes no other loss
            credit_KT = sgsd.token_credit(gap_KT, mask_T, alpha_K, rho_K, cfg.tau_g)
            result.token_numbers["credit"] = credit_KT
        yield result._replace(pairs_K=used_K)


def gate_losses(
    run: Run, roll: Rollout, contexts_K: list[list[int]], mask_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Token losses (Eq. 14), with gradient, and gaps (Eq. 7): [K, T] each."""
    cfg = run.cfg
    ids_T = roll.completion_ids
    temperature = cfg.score_temperature
    with teacher_policy(run):
        logpT_KT = scoring.score_teachers(run.lm, contexts_K, ids_T, cfg.score_tokens, temperature)
    run.clock.lap("score")
    logpS_T = scoring.score_student(run.lm, roll.prompt_ids, ids_T, temperature)
    gap_KT = sgsd.log_prob_gap(logpT_KT, logpS_T)
    return sgsd.gated_loss(sgsd.zero_masked(gap_KT, mask_T), cfg.tau_g), gap_KT


def divergence_losses(
    run: Run, roll: Rollout, contexts_K: list[list[int]], mask_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Token losses of --objective or --support-top-k, and the gaps of the support: [K, T] each.

    Masked tokens have losses, too, which the mean leaves out. But if a masked token has infinite
    logits, the gradient is NaN and the step is skipped. With the gate it is not.
    """
    cfg = run.cfg

    def token_losses(ids_n: Tensor, s_nV: Tensor, t_nV: Tensor) -> tuple[Tensor, Tensor]:
        if cfg.support_top_k:  # the gate of a local KL(T || S), and the local gap (S19)
            kl_n, gap_n = divergences.local_support(ids_n, s_nV, t_nV, cfg.support_top_k)
            return sgsd.gated_loss(kl_n, cfg.tau_g), gap_n
        loss_n = divergences.generalized_jsd(s_nV, t_nV, divergences.JSD_BETA[cfg.objective])
        return loss_n, divergences.gap(ids_n, s_nV, t_nV)

    return divergences.scored(
        run, roll, contexts_K, token_losses, cfg.score_temperature, teacher_policy(run)
    )


def retrieve(run: Run, step: int, x: Problem) -> list[SkillPair]:
    """A problem's pairs, chosen by --retrieval, with the texts that --skill-text leaves them.

    What is drawn is drawn anew in each step (S20). Weights and logs are those of the whole entries.
    """
    cfg = run.cfg
    draw = random.Random(rollout.sample_key(cfg.seed, step, x.id))
    pairs_K = []
    for pair in chosen_pairs(run, step, x, draw):
        skill = as_shown(pair.skill, "general_skills", cfg.skill_text, draw)
        mistake = as_shown(pair.mistake, "common_mistakes", cfg.skill_text, draw)
        pairs_K.append(replace(pair, skill=skill, mistake=mistake))
    return pairs_K


def chosen_pairs(run: Run, step: int, x: Problem, draw: random.Random) -> list[SkillPair]:
    """The nearest pairs, those nearest to another problem of the data, or random ones.

    Random pairs have equal weights. UserError if there is no other problem.
    """
    cfg = run.cfg
    if cfg.retrieval == "random":
        drawn = []
        for entries in (run.bank.general_skills, run.bank.common_mistakes):
            drawn.append(draw.sample(entries, min(cfg.num_teachers, len(entries))))
        return [SkillPair(skill, mistake, 0.0, 0.0) for skill, mistake in zip(*drawn)]
    if cfg.retrieval == "donor":
        others = [other for other in run.problems if other.id != x.id]
        if not others:
            raise command.UserError("--retrieval donor needs two or more problems")
        x = draw.choice(others)
    return groups.nearest(run, step, x)


def as_shown(entry: dict, key: str, skill_text: str, draw: random.Random) -> dict:
    """The entry with what --skill-text leaves of its three fields."""
    fields = KINDS[key].fields
    if skill_text != "shuffled":
        return entry | dict.fromkeys(fields[FIELDS_SHOWN[skill_text] :], "")
    shown = dict(entry)
    for name in fields:
        words = entry[name].split()
        shown[name] = " ".join(draw.sample(words, len(words)))
    return shown


def teacher_policy(run: Run) -> contextlib.AbstractContextManager:
    """A block in which the model has the teachers' weights (--teacher)."""
    if run.cfg.teacher == "live":
        return contextlib.nullcontext()
    if run.cfg.teacher == "frozen":
        return run.lm.disable_adapter()
    return teachers.copied(run)


def teacher_share(cfg: Any, step: int) -> float | None:
    """How far a copied teacher moves towards the student after a step; None: no copy (S18)."""
    if cfg.teacher == "ema":
        return 1 - cfg.teacher_decay
    if cfg.teacher == "periodic":
        return float(step % cfg.teacher_period == 0)
    return None


train_step = teachers.followed(groups.make_step(losses, retrieve=retrieve), teacher_share)


main = functools.partial(sgsd.main, doc=__doc__, config_class=AblationConfig, step_fn=train_step)


if __name__ == "__main__":
    distributed.run_and_exit(main)
