"""The paper's equations as loops over Python numbers: what the tests compare the objective with.

Nothing here imports the project or torch. A row is a list of one teacher's numbers, token by token.
"""

import math

EPS = 1e-8  # S1


def eq6(s_g, s_e):
    """The teachers' weights."""
    exps = [math.exp((g + e) / 2) for g, e in zip(s_g, s_e)]
    return [x / sum(exps) for x in exps]


def eq7(teacher, student):
    """A teacher's gaps."""
    return [logp_t - logp_s for logp_t, logp_s in zip(teacher, student)]


def eq8(gaps):
    """The plain support."""
    return sum(gaps) / len(gaps)


def sgn(x):
    return (x > 0) - (x < 0)


def eq10(a, r):
    """The plain polarity; sgn_out(r) is Eq. 9."""
    return sgn(r) * sgn(a)


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
    """The polarity."""
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
