"""The slope of the success rate along a method's step, estimated without bias.

A step moves the weights along u. To first order it changes the success rate J by

    <grad J, u> = mean over problems x of Cov_y( 1[r > 0], <grad log q(y | x), u> ),   y ~ q(. | x)

The rollouts' problems are split in halves: u comes from one half, the covariance from the other.
The command that measured with this, `extras/probe.py`, is in commit 66a6f29.

Dimension key: G rollouts of a problem, N problems, n positions of a slice, V vocabulary, P trained
weights.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

import scoring
from rollout import Sampling


def contrast(right_G: Tensor) -> Tensor:
    """w_i = (1[r_i > 0] - the mean of the others) / G: sum_i w_i s_i is the covariance, unbiased.

    The same as (1[r_i > 0] - the mean of all) / (G - 1); 0 unless both outcomes are there.
    """
    return (right_G - right_G.mean()) / (len(right_G) - 1)


def allowed(logits_nV: Tensor, sampling: Sampling) -> Tensor:
    """The ids that top-k and top-p leave at each position, as in `rollout.select_tokens`. [n, V].

    logits_nV: divided by the temperature.
    """
    size = logits_nV.shape[-1]
    k = min(sampling.top_k or size, size)
    allowed_nV = torch.ones_like(logits_nV, dtype=torch.bool)
    if k < size:  # more than k are left where logits are equal
        allowed_nV = logits_nV >= logits_nV.topk(k).values[:, -1:]
    if sampling.top_p < 1:
        p_nV = logits_nV.masked_fill(~allowed_nV, -torch.inf).softmax(-1)
        top_nk = p_nV.topk(k).values.double()
        count_n1 = (top_nk.cumsum(-1) - top_nk < sampling.top_p).sum(-1, keepdim=True)
        allowed_nV &= p_nV >= top_nk.gather(-1, count_n1 - 1).to(p_nV)
    return allowed_nV


def drawn_logprob(sampling: Sampling, ids_n: Tensor, logits_nV: Tensor) -> Tensor:
    """log q of drawn ids under the distribution that drew them, its allowed ids held fixed. [n].

    The drawn id counts as allowed: rounding can put it beyond a threshold.
    """
    allowed_nV = allowed(logits_nV.detach(), sampling).scatter(1, ids_n[:, None], True)
    return scoring.logprob_of(ids_n, logits_nV.masked_fill(~allowed_nV, -torch.inf))


def problem_slopes(
    halves: Sequence[Sequence[int]],
    directions: Sequence[Sequence[Tensor]],
    ascent_of: Callable[[int], Tensor | None],
) -> np.ndarray:
    """<problem i's part of grad J, u> for each u of the half that i is not in. [D, N].

    directions: of each half, for every row, [d, P]; D is the sum of the d. ascent_of: a problem's
    part [P], None for 0; one at a time.
    """
    slopes_DN = np.zeros((sum(map(len, directions[0])), sum(map(len, halves))))
    for half, of_half in zip(halves, reversed(directions)):
        for i in half:
            g_P = ascent_of(i)
            if g_P is not None:
                slopes_DN[:, i] = torch.cat([u_dP @ g_P for u_dP in of_half]).tolist()
    return slopes_DN


def interval(halves: Sequence[np.ndarray], draws: int = 4000) -> tuple[float, float, float, float]:
    """(mean, low, high, standard error) of problems' slopes: a 95% bootstrap by problem.

    Each half has its own interval, for a direction that its problems had no part in. Their ends are
    averaged: the halves' errors may agree, since each half made the other one's direction.
    """
    rng, total = np.random.default_rng(0), np.zeros(4)
    for x_n in halves:
        means = x_n[rng.integers(len(x_n), size=(draws, len(x_n)))].mean(1)
        total += len(x_n) * np.array([x_n.mean(), *np.quantile(means, (0.025, 0.975)), means.std()])
    mean, low, high, error = (total / sum(map(len, halves))).tolist()
    return mean, low, high, error
