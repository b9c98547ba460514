"""The paper's equations as loops over Python numbers: what the tests compare a step with.

Nothing here imports the project. A row is a list of one teacher's numbers, token by token. The
log-probabilities that go in are Eqs. 4 and 5 as they stand: one row, the model's own logits.
"""

import math

import torch

EPS = 1e-8  # S1


def logprobs(lm, prompt, ids, temperature=1.0):
    """log p of every token of the vocabulary at each place of ids (Eqs. 4 and 5). [T, V]."""
    logits_LV = lm(input_ids=torch.tensor([prompt + ids])).logits[0]
    return (logits_LV[len(prompt) - 1 : -1] / temperature).log_softmax(-1)


def logprobs_of_ids(lm, prompt, ids, temperature=1.0):
    """log p of each of these ids. [T]."""
    return logprobs(lm, prompt, ids, temperature)[range(len(ids)), ids]


def eq6(s_g, s_e):
    """The teachers' weights."""
    exps = [math.exp((g + e) / 2) for g, e in zip(s_g, s_e)]
    return [x / sum(exps) for x in exps]


def eq7(teacher, student):
    """A teacher's gaps."""
    return [logp_t - logp_s for logp_t, logp_s in zip(teacher, student)]


def sgn(x):
    return (x > 0) - (x < 0)


def eq11(gap, c_delta):
    """A clipped gap."""
    return max(-c_delta, min(gap, c_delta))


def masked_mean(values, mask):
    total = sum(m * value for m, value in zip(mask, values))
    return total / (sum(mask) + EPS)


def eq12(gaps, mask, c_delta):
    """The robust support."""
    return masked_mean([eq11(gap, c_delta) for gap in gaps], mask)


def eq13(a, r, eps_a):
    """The polarity; sgn_out(r) is Eq. 9."""
    return sgn(r) * sgn(a) if abs(a) > eps_a else 0


def eq14(gap, tau):
    """The gated loss."""
    return math.log(2) - math.log(1 + math.exp(-(gap**2) / (2 * tau)))


def eq15(gaps, mask, tau):
    """A teacher's loss."""
    return masked_mean([eq14(gap, tau) for gap in gaps], mask)


def eq16(alphas, rhos, losses):
    """The loss of a rollout."""
    return sum(alpha * rho * loss for alpha, rho, loss in zip(alphas, rhos, losses))


def eq17(gap, tau):
    """The slope of the gate."""
    return gap / (tau * (1 + math.exp(gap**2 / (2 * tau))))


def eq20(gaps, mask, alpha, rho, tau):
    """The credit of a teacher's tokens."""
    z = sum(mask) + EPS
    return [alpha * rho * m / z * eq17(gap, tau) for gap, m in zip(gaps, mask)]
