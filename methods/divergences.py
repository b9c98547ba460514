"""Losses that compare the whole distributions of student and teacher at each token.

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

JSD_BETA = {"reverse_kl": 1.0, "forward_kl": 0.0, "jsd": 0.5}  # D10


def generalized_jsd(
    logits_s: Tensor, logits_t: Tensor, beta: float, temperature: float = 1.0, clip: float = 0.0
) -> Tensor:
    """Divergence of student and teacher per token: [..., V] twice -> [...], in nats.

    beta 0: forward KL(T || S). beta 1: reverse KL(S || T). Between them
    beta KL(T || M) + (1 - beta) KL(S || M) with the mixture M = beta T + (1 - beta) S.
    clip > 0 bounds each vocabulary entry's term from above, as OPSD does (S16); the sum can then
    be negative. Multiplied by rho = -1 it is maximised: forward KL without bound, reverse KL up to
    -log of the teacher's smallest probability, a mixture up to log 2 (S26).
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

    It holds the teacher's top k tokens and the sampled one: §4.5 "top-k support", by the paper's
    only formula for "reverse KL" (§3, App. E.5; S19). s_nV, t_nV: logits of student and teacher.
    """
    sampled_n1 = ids_n[:, None]
    top_nk = t_nV.topk(min(k, t_nV.shape[-1])).indices
    support = torch.cat([sampled_n1, top_nk], 1)
    twice = support == sampled_n1  # the sampled token once more, among the top k: masked below
    twice[:, 0] = False
    logp_s = s_nV.gather(1, support).masked_fill(twice, -1e30).log_softmax(1)
    logp_t = t_nV.gather(1, support).masked_fill(twice, -1e30).log_softmax(1)
    return (logp_t.exp() * (logp_t - logp_s)).sum(1), (logp_t - logp_s)[:, 0]


def full_gaps(ids_n: Tensor, s_nV: Tensor, teachers_nV: list[Tensor]) -> Tensor:
    """Eq. 7's gaps of the sampled ids, from logits of the student and of K teachers. [n, K]."""
    logp_nK = torch.stack([scoring.logprob_of(ids_n, t_nV) for t_nV in teachers_nV], 1)
    return logp_nK - scoring.logprob_of(ids_n, s_nV)[:, None]


def scored(
    run: Run,
    roll: Rollout,
    contexts_K: list[list[int]],
    token_losses: Callable[[Tensor, Tensor, list[Tensor]], Tensor],
    temperature: float,
    teacher: contextlib.AbstractContextManager,
) -> Tensor:
    """token_losses over all positions of a rollout, a slice at a time: [C, K, T].

    contexts_K: the teachers' prompts, at least one. token_losses(ids_n, s_nV, [t_nV, ...]) takes
    logits in fp32, the student's with gradient, and returns [n, K, C]. temperature: divides the
    logits. teacher: in it the model has the teachers' weights.
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
    states = [student_TD] + [states_K[k] for k in range(len(contexts_K))]

    def losses(ids_n: Tensor, student_nV: Tensor, *teachers_nV: Tensor) -> Tensor:
        return token_losses(ids_n, student_nV, list(teachers_nV))

    columns_TKC = scoring.over_slices(run.lm, states, sampled_T, losses, temperature)
    return columns_TKC.permute(2, 1, 0).contiguous()


def mean_loss(
    ell_1T: Tensor, delta_1T: Tensor, c_delta: float
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The mean of a completion's token losses under one teacher, and the numbers for the logs.

    ell_1T: with gradient. delta_1T: gaps. Every token counts, and the teacher is distilled.
    """
    one_1, ones_T = ell_1T.new_ones(1), ell_1T.new_ones(ell_1T.shape[1])
    lbar_1, a_1 = ell_1T.mean(1), sgsd.robust_support(delta_1T, ones_T, c_delta)
    numbers = {"alpha": one_1, "a_plain": sgsd.plain_support(delta_1T), "a": a_1}
    numbers |= {"rho": one_1.int(), "losses": lbar_1.detach()}
    return lbar_1.sum(), numbers, {"mask": ones_T.int(), "delta": delta_1T.detach()}
