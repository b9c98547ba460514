"""What holds for every input (Hypothesis, derandomized): bounds, symmetries, inertness."""

from math import e, exp, log, sqrt

import torch
from conftest import same, t
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import sgsd

check = settings(max_examples=100, derandomize=True, deadline=None, database=None)
gaps, taus, scores = st.floats(-50, 50), st.floats(0.05, 20), st.floats(-1, 1)
TINY = 1e-300  # below it doubles lose digits


def row(of, n):
    return st.lists(of, min_size=n, max_size=n)


@st.composite
def examples(draw):
    """delta_KT, mask_T, alpha_K, rho_K of one rollout."""
    k, n = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    delta_KT = t(draw(row(row(gaps, n), k)))
    mask_T = t(draw(row(st.sampled_from([0.0, 1.0]), n)))
    alpha_K = sgsd.teacher_weights(t(draw(row(scores, k))), t(draw(row(scores, k))))
    return delta_KT, mask_T, alpha_K, t(draw(row(st.sampled_from([-1.0, 0.0, 1.0]), k)))


# --------------------------------------------------------------------------------------- the gate


@check
@given(gaps, gaps, taus)
def test_the_gate_is_odd_and_bounded_and_the_loss_is_even_and_grows_to_log_2(a, b, tau_g):
    delta_2 = t(sorted([a, b], key=abs))
    loss_2, gate_2 = sgsd.gated_loss(delta_2, tau_g), sgsd.gate_grad(delta_2, tau_g)
    assert torch.equal(loss_2, sgsd.gated_loss(-delta_2, tau_g))
    assert torch.equal(gate_2, -sgsd.gate_grad(-delta_2, tau_g))
    assert (gate_2.abs() <= 1 / sqrt(e * tau_g)).all()
    assert 0 <= loss_2[0] <= loss_2[1] + 1e-15 <= log(2) + 2e-15


@check
@given(st.floats(-1, 1), taus)
def test_near_zero_the_loss_is_a_square_and_the_gate_a_line(delta, tau_g):
    # With u = delta^2 / (2 tau): loss = u/2 - log cosh(u/2), gate = delta/(2 tau) (1 - tanh(u/2));
    # and log cosh v <= v^2/2, tanh v <= v.
    loss, gate = sgsd.gated_loss(t(delta), tau_g).item(), sgsd.gate_grad(t(delta), tau_g).item()
    loss_bound = delta**4 / (32 * tau_g**2) * (1 + 1e-9) + 1e-14 * loss + TINY
    gate_bound = abs(delta) ** 3 / (8 * tau_g**2) * (1 + 1e-9) + 1e-14 * abs(gate) + TINY
    assert abs(loss - delta**2 / (4 * tau_g)) <= loss_bound
    assert abs(gate - delta / (2 * tau_g)) <= gate_bound


@check
@given(st.floats(2, 30), taus)
def test_far_from_zero_the_gate_closes(widths, tau_g):
    # At delta = widths sqrt(tau): gate = delta / tau exp(-u) / (1 + exp(-u)), u = widths^2 / 2.
    delta, u = widths * sqrt(tau_g), widths**2 / 2
    ratio = sgsd.gate_grad(t(delta), tau_g).item() / (delta / tau_g * exp(-u))
    assert 1 - exp(-u) - 1e-9 <= ratio <= 1 + 1e-9


# ------------------------------------------------------------------ weights, support and polarity


@check
@given(st.lists(st.tuples(scores, scores), min_size=1, max_size=8), st.floats(-10, 10))
def test_teacher_weights_are_positive_and_sum_to_one(pairs, shift):
    """A shift of all similarities changes nothing, nor does swapping skills and mistakes."""
    s_g_K, s_e_K = t(pairs).unbind(1)
    alpha_K = sgsd.teacher_weights(s_g_K, s_e_K)
    assert (alpha_K > 0).all()
    same(alpha_K.sum(), t(1.0))
    same(sgsd.teacher_weights(s_g_K + shift, s_e_K + shift), alpha_K)
    same(sgsd.teacher_weights(s_e_K, s_g_K), alpha_K)


@check
@given(examples(), st.floats(0.01, 20))
def test_clipping_bounds_the_support_and_a_wide_clip_leaves_it_plain(x, c_delta):
    delta_KT, mask_T, *_ = x
    assert (sgsd.robust_support(delta_KT, mask_T, c_delta).abs() <= c_delta).all()
    wide_K = sgsd.robust_support(delta_KT, torch.ones(delta_KT.shape[1]), 50.0, eps=0.0)
    same(wide_K, sgsd.plain_support(delta_KT))


# --------------------------------------------------------------------------------------- the loss


@check
@given(examples(), taus)
def test_losses_and_credit_are_bounded_and_credit_is_signed(x, tau_g):
    delta_KT, mask_T, alpha_K, rho_K = x
    lbar_K = sgsd.teacher_losses(delta_KT, mask_T, tau_g)
    assert (lbar_K >= 0).all() and (lbar_K <= log(2) + 1e-15).all()
    assert abs(sgsd.sgsd_loss(delta_KT, mask_T, alpha_K, rho_K, tau_g).item()) <= log(2) + 1e-14
    w_KT = sgsd.token_credit(delta_KT, mask_T, alpha_K, rho_K, tau_g)
    # The sum of alpha is 1, and that of m / Z at most 1.
    assert w_KT.abs().sum().item() <= (1 + 1e-12) / sqrt(e * tau_g)
    assert (w_KT * rho_K[:, None] * delta_KT >= 0).all()


@check
@given(examples(), taus, st.randoms(use_true_random=False))
def test_the_order_of_teachers_does_not_matter_and_an_ignored_one_adds_nothing(x, tau_g, random):
    delta_KT, mask_T, alpha_K, rho_K = x
    order = list(range(len(rho_K)))
    random.shuffle(order)
    ignored, *rest = order
    shuffled = sgsd.sgsd_loss(delta_KT[order], mask_T, alpha_K[order], rho_K[order], tau_g)
    same(shuffled, sgsd.sgsd_loss(delta_KT, mask_T, alpha_K, rho_K, tau_g))
    rho_K[ignored] = 0
    without = sgsd.sgsd_loss(delta_KT[rest], mask_T, alpha_K[rest], rho_K[rest], tau_g)
    same(sgsd.sgsd_loss(delta_KT, mask_T, alpha_K, rho_K, tau_g), without)
    assert not sgsd.token_credit(delta_KT, mask_T, alpha_K, rho_K, tau_g)[ignored].any()


@check
@given(examples(), taus, st.data())
def test_masked_tokens_are_inert_and_masking_is_leaving_out(x, tau_g, data):
    delta_KT, mask_T, alpha_K, rho_K = x
    assume((mask_T == 0).any())
    wild_KT = t(data.draw(row(row(st.floats(-1e4, 1e4), delta_KT.shape[1]), len(delta_KT))))
    other_KT = torch.where(mask_T == 0, wild_KT, delta_KT)
    kept_KT, ones_T = delta_KT[:, mask_T == 1], torch.ones(int(mask_T.sum()))
    for f in (
        lambda d, m: sgsd.robust_support(d, m, 3.0),
        lambda d, m: sgsd.teacher_losses(d, m, tau_g),
        lambda d, m: sgsd.sgsd_loss(d, m, alpha_K, rho_K, tau_g),
        lambda d, m: sgsd.token_credit(d, m, alpha_K, rho_K, tau_g).sum(1),
    ):
        assert torch.equal(f(other_KT, mask_T), f(delta_KT, mask_T))
        same(f(delta_KT, mask_T), f(kept_KT, ones_T))
