"""Every function of the objective against plain-Python loops that write the paper's equations."""

import math
import random

import pytest
import torch
from conftest import same as close

import sgsd

EPS = 1e-8
SEEDS = range(40)

# ------------------------------------------------------------- the paper, in loops (math only)


def eq6(s_g, s_e):
    exps = [math.exp((g + e) / 2) for g, e in zip(s_g, s_e)]
    return [x / sum(exps) for x in exps]


def eq7(teacher, student):
    return [lt - ls for lt, ls in zip(teacher, student)]


def eq11(gap, c_delta):
    return max(-c_delta, min(gap, c_delta))


def masked_mean(values, mask):  # of Eqs. 12 and 15
    return sum(m * value for m, value in zip(mask, values)) / (sum(mask) + EPS)


def sgn(x):
    return (x > 0) - (x < 0)


def eq13(a, r, eps_a):
    return sgn(r) * sgn(a) if abs(a) > eps_a else 0


def eq14(gap, tau):
    return math.log(2) - math.log(1 + math.exp(-(gap**2) / (2 * tau)))


def eq17(gap, tau):
    return gap / (tau * (1 + math.exp(gap**2 / (2 * tau))))


def eq20(gaps, mask, a, p, tau):
    z = sum(mask) + EPS
    return [a * p * m / z * eq17(gap, tau) for gap, m in zip(gaps, mask)]


# ------------------------------------------------------------------------------------ the cases


def case(seed):
    """K in 1..8, T in 1..40. Log-probabilities in 1/1024, so that fp32 and fp64 read the same."""
    rng = random.Random(seed)
    k, n = {0: (1, 1), 1: (8, 40)}.get(seed, (rng.randint(1, 8), rng.randint(1, 40)))
    student = [round(-1024 * rng.expovariate(1.0)) / 1024 for _ in range(n)]
    teachers = []
    for _ in range(k):
        stance, width = rng.uniform(-0.5, 0.5), rng.choice([0.1, 1.0, 4.0])
        teachers.append([round(1024 * (s + rng.gauss(stance, width))) / 1024 for s in student])
    mask = [int(rng.random() >= 0.25 and seed != 2) for _ in range(n)]  # case 2: all masked
    scores = [[round(1024 * rng.uniform(-1, 1)) / 1024 for _ in range(k)] for _ in "ge"]
    settings = rng.choice([-1, 1]), rng.choice([0.5, 1.0, 2.0]), rng.choice([1.0, 3.0])
    return scores, teachers, student, mask, *settings, rng.choice([0.0, 0.05, 0.25])


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_function_equals_its_loop(seed, dtype, tol):
    (s_g, s_e), teachers, student, mask, r, tau, c_delta, eps_a = case(seed)
    sides = torch.tensor(s_g, dtype=dtype), torch.tensor(s_e, dtype=dtype)
    mask_T = torch.tensor(mask, dtype=dtype)
    alpha_K = sgsd.teacher_weights(*sides)
    logpT_KT, logpS_T = torch.tensor(teachers, dtype=dtype), torch.tensor(student, dtype=dtype)
    delta_KT = sgsd.log_prob_gap(logpT_KT, logpS_T)
    plain_K = sgsd.plain_support(delta_KT)
    a_K = sgsd.robust_support(delta_KT, mask_T, c_delta)
    rho_K = sgsd.polarity(a_K, r, eps_a)
    lbar_K = sgsd.teacher_losses(delta_KT, mask_T, tau)
    credit_KT = sgsd.token_credit(delta_KT, mask_T, alpha_K, rho_K, tau)
    alpha, loss = eq6(s_g, s_e), 0.0
    close(alpha_K, alpha, tol)
    for k, teacher in enumerate(teachers):
        gaps = eq7(teacher, student)
        plain = sum(gaps) / len(gaps)  # Eq. 8
        a = masked_mean([eq11(gap, c_delta) for gap in gaps], mask)  # Eq. 12
        rho = eq13(a, r, eps_a)
        gates = [eq14(gap, tau) for gap in gaps]
        lbar = masked_mean(gates, mask)  # Eq. 15
        loss += alpha[k] * rho * lbar  # Eq. 16
        close(delta_KT[k], gaps, tol)
        close(plain_K[k], plain, tol)
        close(a_K[k], a, tol)
        assert rho_K[k] == rho
        assert sgsd.polarity(plain_K, r, 0.0)[k] == sgn(r) * sgn(plain)  # Eq. 10
        close(sgsd.gated_loss(delta_KT, tau)[k], gates, tol)
        close(sgsd.gate_grad(delta_KT, tau)[k], [eq17(gap, tau) for gap in gaps], tol)
        close(lbar_K[k], lbar, tol)
        close(credit_KT[k], eq20(gaps, mask, alpha[k], rho, tau), tol)
    close(sgsd.sgsd_loss(delta_KT, mask_T, alpha_K, rho_K, tau), loss, tol)


def test_the_cases_cover_the_rules_and_none_hangs_on_rounding():
    seen, clipped = set(), 0
    for seed in SEEDS:
        _, teachers, student, mask, r, _, c_delta, eps_a = case(seed)
        for teacher in teachers:
            bounded = [eq11(gap, c_delta) for gap in eq7(teacher, student)]
            clipped += sum(abs(gap) == c_delta for gap in bounded)
            a = masked_mean(bounded, mask)
            assert a == 0 or abs(abs(a) - eps_a) > 1e-5
            seen.add((r, sgn(a), eq13(a, r, eps_a)))
    assert {(r, sign, r * sign) for r in (-1, 1) for sign in (-1, 1)} <= seen
    assert {sign for _, sign, rho in seen if rho == 0} == {-1, 0, 1} and clipped > 100
