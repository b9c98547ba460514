"""Losses that compare the whole distributions of student and teacher at each token.

`generalized_jsd` and `local_support` are the formulas, `scored` applies one to a rollout, and
`distilled` is the loss of a method with one teacher (OPSD, SDPO).

Dimension key: K teachers, T completion tokens, n positions of a slice, V vocabulary, D hidden size.
"""

import contextlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

import scoring
import sgsd
from lib.run import Run
from rollout import Rollout
from sgsd import RolloutLoss

JSD_BETA = {"reverse_kl": 1.0, "forward_kl": 0.0, "jsd": 0.5}  # D10
# (ids_n, s_nV, t_nV) -> (loss_n, gap_n): from the sampled ids and the fp32 logits of the student,
# with gradient, and of one teacher, the loss and the gap of each position.
TokenLosses = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def generalized_jsd(
    logits_s: Tensor, logits_t: Tensor, beta: float, temperature: float = 1.0, clip: float = 0.0
) -> Tensor:
    """Divergence of student and teacher per token: [..., V] twice -> [...], in nats.

    beta 0: forward KL(T || S). beta 1: reverse KL(S || T). Between them
    beta KL(T || M) + (1 - beta) KL(S || M) with the mixture M = beta T + (1 - beta) S.
    clip > 0 bounds each vocabulary token's term from above, as OPSD does (S16); the sum can then
    be negative. If rho = -1, we maximise it: forward KL without bound, reverse KL up to -log of the
    teacher's smallest probability, a mixture up to log 2 (S26).
    ValueError on beta outside [0, 1].
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"generalized_jsd: beta must be in [0, 1], got {beta}")
    logp_s = torch.log_softmax(logits_s / temperature, -1)
    logp_t = torch.log_softmax(logits_t / temperature, -1)
    if beta == 0:
        terms = logp_t.exp() * (logp_t - logp_s)
    elif beta == 1:
        terms = logp_s.exp() * (logp_s - logp_t)
    else:
        logp_m = torch.logaddexp(logp_t + math.log(beta), logp_s + math.log(1 - beta))
        of_teacher = logp_t.exp() * (logp_t - logp_m)
        of_student = logp_s.exp() * (logp_s - logp_m)
        terms = beta * of_teacher + (1 - beta) * of_student
    if clip:
        terms = terms.clamp(max=clip)
    return terms.sum(-1)


def local_support(ids_n: Tensor, s_nV: Tensor, t_nV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(KL(T || S) [n], gap of the sampled token [n]) on a truncated, renormalised vocabulary.

    This holds the teacher's top k tokens and the sampled one: §4.5 "top-k support", by the paper's
    only formula for "reverse KL" (§3, App. E.5; S19). s_nV, t_nV: logits of student and teacher.
    """
    sampled_n1 = ids_n[:, None]
    top_nk = t_nV.topk(min(k, t_nV.shape[-1])).indices
    support = torch.cat([sampled_n1, top_nk], 1)
    twice = support == sampled_n1  # the sampled token again, among the top k: we mask it below
    twice[:, 0] = False
    logp_s = s_nV.gather(1, support).masked_fill(twice, -1e30).log_softmax(1)
    logp_t = t_nV.gather(1, support).masked_fill(twice, -1e30).log_softmax(1)
    return (logp_t.exp() * (logp_t - logp_s)).sum(1), (logp_t - logp_s)[:, 0]


def gap(ids_n: Tensor, s_nV: Tensor, t_nV: Tensor) -> Tensor:
    """Eq. 7's gap of the sampled ids, from logits of student and teacher. [n], no gradient."""
    return scoring.logprob_of(ids_n, t_nV) - scoring.logprob_of(ids_n, s_nV.detach())


def scored(
    run: Run,
    roll: Rollout,
    contexts_K: list[list[int]],
    token_losses: TokenLosses,
    temperature: float,
    teacher: contextlib.AbstractContextManager,
) -> tuple[Tensor, Tensor]:
    """Losses, with gradient, and gaps of a rollout's tokens under each teacher: [K, T] each.

    contexts_K: the teachers' prompts, at least one. token_losses: is called on slices of positions,
    so that [T, V] logits never exist as a whole. temperature: divides the logits. teacher: a
    context manager under which the model has the teachers' weights.
    """
    ids_T = roll.completion_ids
    states_K: dict[int, Tensor] = {}  # [T, D] by k
    with teacher, torch.no_grad():
        lengths = [len(context) + len(ids_T) for context in contexts_K]
        for group in scoring.packs(lengths, run.cfg.score_tokens):
            prompts = [contexts_K[k] for k in group]
            x_N, _ = scoring.predictors(run.lm, prompts, [ids_T] * len(group))
            states_K.update(zip(group, x_N.split(len(ids_T))))
    run.clock.lap("score")
    student_TD, sampled_T = scoring.predictors(run.lm, [roll.prompt_ids], [ids_T])
    states = [student_TD]
    for k in range(len(contexts_K)):
        states.append(states_K[k])

    def columns(ids_n: Tensor, s_nV: Tensor, *teachers_nV: Tensor) -> Tensor:
        columns_K = []
        for t_nV in teachers_nV:
            ell_n, gap_n = token_losses(ids_n, s_nV, t_nV)
            columns_K.append(torch.stack([ell_n, gap_n], 1))
        return torch.stack(columns_K, 1)

    columns_TK2 = scoring.over_slices(run.lm, states, sampled_T, columns, temperature)
    ell_KT, gap_KT = columns_TK2.permute(2, 1, 0).contiguous()
    return ell_KT, gap_KT


def weighted(
    ell_KT: Tensor, gap_KT: Tensor, mask_T: Tensor, alpha_K: Tensor, a_K: Tensor, rho_K: Tensor
) -> RolloutLoss:
    """Eq. 16 with any token loss instead of Eq. 14's, and the numbers for the logs.

    ell_KT: token losses, with gradient. The others are those of `sgsd.loss_of`.
    """
    lbar_K = sgsd.masked_mean(sgsd.zero_masked(ell_KT, mask_T), mask_T)
    numbers = sgsd.numbers_of(gap_KT, mask_T, alpha_K, a_K, rho_K, lbar_K)
    loss = sgsd.sgsd_loss(lbar_K, alpha_K, rho_K)
    return sgsd.result_of(sgsd.constant_if_ignored(loss, rho_K), numbers)


def distilled(
    run: Run,
    roll: Rollout,
    context: list[int] | None,
    token_losses: TokenLosses,
    teacher: contextlib.AbstractContextManager,
) -> RolloutLoss:
    """The mean of a rollout's token losses under one teacher: every token counts, and rho is 1.

    context: the teacher's prompt; None: no teacher, and a loss of 0 without scoring (S8).
    token_losses, teacher: as for `scored`. The loss has the temperature of the sampling; 1 if
    sampling is greedy.
    """
    if context is None:
        return RolloutLoss(torch.zeros((), device=run.device), {}, {})
    temperature = run.cfg.temperature or 1.0
    ell_1T, gap_1T = scored(run, roll, [context], token_losses, temperature, teacher)
    one_1 = torch.ones_like(ell_1T[:, 0])
    ones_T = torch.ones_like(ell_1T[0])
    a_1 = sgsd.robust_support(gap_1T, ones_T, run.cfg.c_delta)
    return weighted(ell_1T, gap_1T, ones_T, one_1, a_1, one_1)
