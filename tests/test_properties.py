"""What holds for every input (Hypothesis, derandomized): bounds, symmetries, inertness of what is masked or unsure."""

from math import e, exp, log, nextafter, sqrt

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import sgsd

check = settings(max_examples=200, derandomize=True, deadline=None, database=None)

gaps = st.floats(-50, 50)
taus = st.floats(0.05, 20)
outcomes = st.sampled_from([-1, 1])
scores = st.floats(-1, 1)
TINY = 1e-300  # below it doubles lose digits


def t(x):
    return torch.tensor(x, dtype=torch.float64)


def row(of, n):
    return st.lists(of, min_size=n, max_size=n)


@st.composite
def examples(draw, polarities=(-1.0, 0.0, 1.0)):
    """delta_KT, mask_T, alpha_K, rho_K of one rollout."""
    k, n = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    delta_KT = t(draw(row(row(gaps, n), k)))
    mask_T = t(draw(row(st.sampled_from([0.0, 1.0]), n)))
    alpha_K = sgsd.teacher_weights(t(draw(row(scores, k))), t(draw(row(scores, k))))
    return delta_KT, mask_T, alpha_K, t(draw(row(st.sampled_from(polarities), k)))


# ------------------------------------------------------------------------------------------------------------------------------------ the gate


@check
@given(gaps, taus)
def test_gate_is_bounded(delta, tau_g):
    assert abs(sgsd.gate_grad(t(delta), tau_g).item()) <= 1 / sqrt(e * tau_g)


@check
@given(gaps, taus)
def test_loss_is_even_and_gate_is_odd(delta, tau_g):
    assert sgsd.gated_loss(t(delta), tau_g) == sgsd.gated_loss(t(-delta), tau_g)
    assert sgsd.gate_grad(t(delta), tau_g) == -sgsd.gate_grad(t(-delta), tau_g)


@check
@given(st.floats(-1e4, 1e4), taus)
def test_gated_loss_lies_in_zero_to_log_2(delta, tau_g):
    assert 0 <= sgsd.gated_loss(t(delta), tau_g).item() <= log(2) + 1e-15


@check
@given(st.floats(0, 50), st.floats(0, 50), taus)
def test_a_larger_gap_never_costs_less(a, b, tau_g):
    small, large = sgsd.gated_loss(t(sorted([a, b])), tau_g).tolist()
    assert small <= large + 1e-15


@check
@given(st.floats(-1, 1), taus)
def test_near_zero(delta, tau_g):
    # with u = delta^2 / (2 tau): loss = u/2 - log cosh(u/2), gate = delta/(2 tau) (1 - tanh(u/2)); log cosh v <= v^2/2, tanh v <= v
    loss, gate = sgsd.gated_loss(t(delta), tau_g).item(), sgsd.gate_grad(t(delta), tau_g).item()
    assert (
        abs(loss - delta**2 / (4 * tau_g))
        <= delta**4 / (32 * tau_g**2) * (1 + 1e-9) + 1e-14 * loss + TINY
    )
    assert (
        abs(gate - delta / (2 * tau_g))
        <= abs(delta) ** 3 / (8 * tau_g**2) * (1 + 1e-9) + 1e-14 * abs(gate) + TINY
    )


@check
@given(st.floats(2, 30), taus)
def test_far_from_zero(widths, tau_g):
    # at delta = widths * sqrt(tau): gate = delta / tau exp(-u) / (1 + exp(-u)), u = widths^2 / 2
    delta, u = widths * sqrt(tau_g), widths**2 / 2
    ratio = sgsd.gate_grad(t(delta), tau_g).item() / (delta / tau_g * exp(-u))
    assert 1 - exp(-u) - 1e-9 <= ratio <= 1 + 1e-9


# ------------------------------------------------------------------------------------------------------------- weights, support and polarity


@check
@given(st.lists(st.tuples(scores, scores), min_size=1, max_size=8), st.floats(-10, 10))
def test_teacher_weights(pairs, shift):
    s_g_K, s_e_K = t(pairs).unbind(1)
    alpha_K = sgsd.teacher_weights(s_g_K, s_e_K)
    assert (alpha_K > 0).all()
    torch.testing.assert_close(alpha_K.sum().item(), 1.0, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        sgsd.teacher_weights(s_g_K + shift, s_e_K + shift), alpha_K, rtol=0, atol=1e-12
    )
    torch.testing.assert_close(sgsd.teacher_weights(s_e_K, s_g_K), alpha_K, rtol=0, atol=1e-12)


@check
@given(examples(), st.floats(0.01, 20))
def test_clipping_bounds_the_support(x, c_delta):
    delta_KT, mask_T, *_ = x
    assert (sgsd.robust_support(delta_KT, mask_T, c_delta).abs() <= c_delta).all()


@check
@given(examples())
def test_a_wide_clip_and_a_full_mask_give_the_plain_support(x):
    delta_KT = x[0]
    robust_K = sgsd.robust_support(delta_KT, torch.ones(delta_KT.shape[1]), 50.0, eps=0.0)
    torch.testing.assert_close(robust_K, sgsd.plain_support(delta_KT), rtol=1e-12, atol=1e-12)


@check
@given(st.floats(-10, 10), outcomes, st.floats(0, 10))
def test_polarity_is_the_rule(a, r, eps_a):
    want = 0 if abs(a) <= eps_a else r if a > 0 else -r
    assert sgsd.polarity(t([a]), r, eps_a).tolist() == [want]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@check
@given(eps_a=st.floats(0, 10, width=32), r=outcomes)
def test_exactly_eps_a_is_neutral(dtype, eps_a, r):
    at = torch.tensor([eps_a, -eps_a], dtype=dtype)
    assert sgsd.polarity(at, r, eps_a).tolist() == [0, 0]
    assert sgsd.polarity(t([nextafter(eps_a, 11), -nextafter(eps_a, 11)]), r, eps_a).tolist() == [
        r,
        -r,
    ]


# ---------------------------------------------------------------------------------------------------------------------------------- the loss


@check
@given(examples(), taus)
def test_losses_are_bounded(x, tau_g):
    delta_KT, mask_T, alpha_K, rho_K = x
    lbar_K = sgsd.teacher_losses(delta_KT, mask_T, tau_g)
    assert (lbar_K >= 0).all() and (lbar_K <= log(2) + 1e-15).all()
    assert abs(sgsd.sgsd_loss(delta_KT, mask_T, alpha_K, rho_K, tau_g).item()) <= log(2) + 1e-14


@check
@given(examples(), taus, st.randoms(use_true_random=False))
def test_order_of_teachers_does_not_matter(x, tau_g, random):
    delta_KT, mask_T, alpha_K, rho_K = x
    order = list(range(len(rho_K)))
    random.shuffle(order)
    loss = sgsd.sgsd_loss(delta_KT, mask_T, alpha_K, rho_K, tau_g)
    shuffled = sgsd.sgsd_loss(delta_KT[order], mask_T, alpha_K[order], rho_K[order], tau_g)
    torch.testing.assert_close(shuffled, loss, rtol=1e-13, atol=1e-15)


@check
@given(examples(), taus, st.floats(0.5, 5), st.floats(0, 1))
def test_the_opposite_outcome_flips_the_loss(x, tau_g, c_delta, eps_a):
    delta_KT, mask_T, alpha_K, _ = x
    a_K = sgsd.robust_support(delta_KT, mask_T, c_delta)
    right, wrong = (
        sgsd.sgsd_loss(delta_KT, mask_T, alpha_K, sgsd.polarity(a_K, r, eps_a), tau_g)
        for r in (1, -1)
    )
    assert right == -wrong


@check
@given(examples(), taus, st.data())
def test_masked_tokens_are_inert(x, tau_g, data):
    delta_KT, mask_T, alpha_K, rho_K = x
    assume((mask_T == 0).any())
    other_KT = torch.where(
        mask_T == 0,
        t(data.draw(row(row(st.floats(-1e4, 1e4), delta_KT.shape[1]), len(delta_KT)))),
        delta_KT,
    )
    for f in (
        lambda delta_KT: sgsd.robust_support(delta_KT, mask_T, 3.0),
        lambda delta_KT: sgsd.teacher_losses(delta_KT, mask_T, tau_g),
        lambda delta_KT: sgsd.sgsd_loss(delta_KT, mask_T, alpha_K, rho_K, tau_g),
        lambda delta_KT: sgsd.token_credit(delta_KT, mask_T, alpha_K, rho_K, tau_g),
    ):
        assert torch.equal(f(other_KT), f(delta_KT))


@check
@given(examples(), taus)
def test_masking_is_leaving_out(x, tau_g):
    delta_KT, mask_T, alpha_K, rho_K = x
    kept_KT = delta_KT[:, mask_T == 1]
    ones_T = torch.ones(kept_KT.shape[1])
    for f in (
        lambda d, m: sgsd.robust_support(d, m, 3.0),
        lambda d, m: sgsd.sgsd_loss(d, m, alpha_K, rho_K, tau_g),
    ):
        torch.testing.assert_close(f(delta_KT, mask_T), f(kept_KT, ones_T), rtol=1e-12, atol=1e-14)


@check
@given(examples(), taus, outcomes)
def test_all_masked_is_zero(x, tau_g, r):
    delta_KT, _, alpha_K, _ = x
    none_T = torch.zeros(delta_KT.shape[1])
    a_K = sgsd.robust_support(delta_KT, none_T, 3.0)
    assert not a_K.any() and not sgsd.polarity(a_K, r, 0.0).any()
    for rho_K in (torch.ones(len(a_K)), -torch.ones(len(a_K))):
        assert sgsd.sgsd_loss(delta_KT, none_T, alpha_K, rho_K, tau_g).item() == 0
        assert not sgsd.token_credit(delta_KT, none_T, alpha_K, rho_K, tau_g).any()


@check
@given(examples(polarities=(-1.0, 1.0)), taus, st.data())
def test_an_ignored_teacher_adds_nothing(x, tau_g, data):
    delta_KT, mask_T, alpha_K, rho_K = x
    ignored = data.draw(st.integers(0, len(rho_K) - 1))
    rest = [k for k in range(len(rho_K)) if k != ignored]
    rho_K = rho_K.clone()
    rho_K[ignored] = 0
    loss = sgsd.sgsd_loss(delta_KT, mask_T, alpha_K, rho_K, tau_g)
    without = sgsd.sgsd_loss(delta_KT[rest], mask_T, alpha_K[rest], rho_K[rest], tau_g)
    torch.testing.assert_close(loss, without, rtol=1e-13, atol=1e-15)
    assert not sgsd.token_credit(delta_KT, mask_T, alpha_K, rho_K, tau_g)[ignored].any()


@check
@given(examples(), taus)
def test_credit_is_bounded_and_signed(x, tau_g):
    delta_KT, mask_T, alpha_K, rho_K = x
    w_KT = sgsd.token_credit(delta_KT, mask_T, alpha_K, rho_K, tau_g)
    assert w_KT.abs().sum().item() <= (1 + 1e-12) / sqrt(
        e * tau_g
    )  # sum of alpha is 1, sum of m / Z at most 1
    assert (w_KT * rho_K[:, None] * delta_KT >= 0).all()
