"""Every function of the objective against plain-Python loops that write the paper's equations literally."""

import math
import random

import pytest
import torch

import sgsd

EPS = 1e-8

# ------------------------------------------------------------------------------------------------------ the paper, in loops (math only)


def eq6(s_g, s_e):
    s = [(g + e) / 2 for g, e in zip(s_g, s_e)]
    total = sum(math.exp(s_j) for s_j in s)
    return [math.exp(s_k) / total for s_k in s]


def eq7(logp_teachers, logp_student):
    return [[lt - ls for lt, ls in zip(teacher, logp_student)] for teacher in logp_teachers]


def eq8(delta):
    return [sum(gaps) / len(gaps) for gaps in delta]


def eq11(gap, c_delta):
    if gap > c_delta:
        return c_delta
    if gap < -c_delta:
        return -c_delta
    return gap


def eq12(delta, mask, c_delta):
    support = []
    for gaps in delta:
        num = 0.0
        for gap, m in zip(gaps, mask):
            num += m * eq11(gap, c_delta)
        support.append(num / (sum(mask) + EPS))
    return support


def sgn(x):
    return 1 if x > 0 else -1 if x < 0 else 0


def eq13(support, r, eps_a):
    return [sgn(r) * sgn(a) if abs(a) > eps_a else 0 for a in support]


def eq14(gap, tau):
    return math.log(2) - math.log(1 + math.exp(-(gap**2) / (2 * tau)))


def eq15(delta, mask, tau):
    losses = []
    for gaps in delta:
        num = 0.0
        for gap, m in zip(gaps, mask):
            num += m * eq14(gap, tau)
        losses.append(num / (sum(mask) + EPS))
    return losses


def eq16(delta, mask, alpha, rho, tau):
    total = 0.0
    for a, p, loss in zip(alpha, rho, eq15(delta, mask, tau)):
        total += a * p * loss
    return total


def eq17(gap, tau):
    return gap / (tau * (1 + math.exp(gap**2 / (2 * tau))))


def eq20(delta, mask, alpha, rho, tau):
    z = sum(mask) + EPS
    return [
        [a * p * m / z * eq17(gap, tau) for gap, m in zip(gaps, mask)]
        for gaps, a, p in zip(delta, alpha, rho)
    ]


# --------------------------------------------------------------------------------------------------------------------------- the cases


def case(seed):
    """K in 1..8, T in 1..40, both extremes included; numbers on a grid of 1/1024, so that fp32 and fp64 read the same gaps."""
    rng = random.Random(seed)
    k, n = {0: (1, 1), 1: (8, 40)}.get(seed, (rng.randint(1, 8), rng.randint(1, 40)))

    def on_grid(x):
        return round(x * 1024) / 1024

    student = [on_grid(-rng.expovariate(1.0)) for _ in range(n)]
    stances = [rng.uniform(-0.5, 0.5) for _ in range(k)]
    return {
        "s_g": [on_grid(rng.uniform(-1, 1)) for _ in range(k)],
        "s_e": [on_grid(rng.uniform(-1, 1)) for _ in range(k)],
        "logpT": [
            [on_grid(s + rng.gauss(stance, rng.choice([0.1, 1.0, 4.0]))) for s in student]
            for stance in stances
        ],
        "logpS": student,
        "mask": [0 if rng.random() < 0.25 else 1 for _ in range(n)] if seed != 2 else [0] * n,
        "r": rng.choice([-1, 1]),
        "tau": rng.choice([0.5, 1.0, 2.0]),
        "c_delta": rng.choice([1.0, 3.0]),
        "eps_a": rng.choice([0.0, 0.05, 0.25]),
    }


SEEDS = range(40)


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("seed", SEEDS)
def test_golden(seed, dtype, tol):
    c = case(seed)
    r, tau, c_delta, eps_a = c["r"], c["tau"], c["c_delta"], c["eps_a"]
    s_g_K, s_e_K, logpT_KT, logpS_T, mask_T = (
        torch.tensor(c[name], dtype=dtype) for name in ("s_g", "s_e", "logpT", "logpS", "mask")
    )

    def same(got, want):
        assert got.dtype == dtype
        torch.testing.assert_close(got, torch.tensor(want, dtype=dtype), rtol=tol, atol=tol)

    alpha, delta = eq6(c["s_g"], c["s_e"]), eq7(c["logpT"], c["logpS"])
    support = eq12(delta, c["mask"], c_delta)
    rho = eq13(support, r, eps_a)

    alpha_K, delta_KT = sgsd.teacher_weights(s_g_K, s_e_K), sgsd.log_prob_gap(logpT_KT, logpS_T)
    a_K = sgsd.robust_support(delta_KT, mask_T, c_delta)
    rho_K = sgsd.polarity(a_K, r, eps_a)

    same(alpha_K, alpha)
    same(delta_KT, delta)
    same(sgsd.plain_support(delta_KT), eq8(delta))
    same(a_K, support)
    assert rho_K.tolist() == rho
    same(
        sgsd.polarity(sgsd.plain_support(delta_KT), r, 0.0),
        [float(sgn(r) * sgn(a)) for a in eq8(delta)],
    )  # Eq. 10
    same(sgsd.gated_loss(delta_KT, tau), [[eq14(gap, tau) for gap in gaps] for gaps in delta])
    same(sgsd.gate_grad(delta_KT, tau), [[eq17(gap, tau) for gap in gaps] for gaps in delta])
    same(sgsd.teacher_losses(delta_KT, mask_T, tau), eq15(delta, c["mask"], tau))
    same(
        sgsd.sgsd_loss(delta_KT, mask_T, alpha_K, rho_K, tau),
        eq16(delta, c["mask"], alpha, rho, tau),
    )
    same(
        sgsd.token_credit(delta_KT, mask_T, alpha_K, rho_K, tau),
        eq20(delta, c["mask"], alpha, rho, tau),
    )


def test_the_cases_cover_the_rules():
    seen, clipped, outcomes = set(), 0, set()
    for c in map(case, SEEDS):
        delta = eq7(c["logpT"], c["logpS"])
        support = eq12(delta, c["mask"], c["c_delta"])
        assert all(
            abs(abs(a) - c["eps_a"]) > 1e-5 or a == 0 for a in support
        )  # no polarity hangs on rounding
        seen |= {(sgn(a), rho) for a, rho in zip(support, eq13(support, c["r"], c["eps_a"]))}
        clipped += sum(abs(gap) > c["c_delta"] for gaps in delta for gap in gaps)
        outcomes.add(c["r"])
    assert {(1, 1), (1, -1), (1, 0), (-1, 1), (-1, -1), (-1, 0), (0, 0)} <= seen
    assert clipped > 100 and outcomes == {-1, 1}
