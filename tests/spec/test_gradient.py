"""The gradient, §3 and App. E: Eqs. 17-24 and 26, in float64 unless a test says so.

The closed forms meet autograd, finite differences and, for every input (Hypothesis), the paper's
bound.
"""

from math import e, exp, log, sqrt

import pytest
import torch
from conftest import same, t
from hypothesis import given, settings
from hypothesis import strategies as st

import sgsd

check = settings(max_examples=100, derandomize=True, deadline=None, database=None)
gaps, taus = st.floats(-50, 50), st.floats(0.05, 20)
TAUS = [0.25, 1.0, 4.0]
GRID = torch.linspace(-8, 8, 401, dtype=torch.float64)
D3 = sqrt(2 * log(3))  # at tau = 1: exp(D3^2 / 2) = 3
K, T, V = 5, 7, 11


class Example:
    """One rollout of T tokens over V logits: K teachers, every kind of polarity, and a mask."""

    def __init__(self, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.logits_TV = torch.randn(T, V, generator=g, dtype=torch.float64, requires_grad=True)
        self.ids_T = torch.randint(V, (T,), generator=g)
        teachers_KTV = torch.randn(K, T, V, generator=g, dtype=torch.float64).log_softmax(-1)
        self.logpT_KT = teachers_KTV[:, torch.arange(T), self.ids_T]
        self.mask_T = torch.tensor([1, 1, 0, 1, 1, 1, 0])
        self.alpha_K = torch.randn(K, generator=g, dtype=torch.float64).softmax(0)
        self.rho_K = torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0], dtype=torch.float64)

    def logp(self, logits_TV):
        return logits_TV.log_softmax(-1)[torch.arange(T), self.ids_T]

    def gaps(self, logits_TV):
        return sgsd.log_prob_gap(self.logpT_KT, self.logp(logits_TV))

    def loss(self, logits_TV, tau_g=1.0):
        lbar_K = sgsd.teacher_losses(self.gaps(logits_TV), self.mask_T, tau_g)
        return sgsd.sgsd_loss(lbar_K, self.alpha_K, self.rho_K)


# ------------------------------------------------------------------------- Eq. 17: the gate's slope


def test_eq17_by_hand():
    # D3 / (1 + 3); at tau = 1/2 and a gap of 1: 1 / (1/2 (1 + e))
    same(sgsd.gate_grad(t([0.0, D3, -D3]), 1.0), [0.0, D3 / 4, -D3 / 4])
    same(sgsd.gate_grad(t([1.0, -1.0]), 0.5), [2 / (1 + e), -2 / (1 + e)])
    # Extreme gaps teach nothing: 3 / (1 + exp(4.5)) = 3 / 91.017 = 0.0330, and 0 at 100.
    same(sgsd.gate_grad(t([3.0, 100.0]), 1.0), [3 / (1 + e**4.5), 0.0])


@pytest.mark.parametrize("tau_g", TAUS)
def test_eq17_is_the_slope_of_eq14(tau_g):
    """Against autograd, and against central differences."""
    delta, h = GRID.clone().requires_grad_(), 1e-5
    (grad,) = torch.autograd.grad(sgsd.gated_loss(delta, tau_g).sum(), delta)
    closed = sgsd.gate_grad(GRID, tau_g)
    same(grad, closed)
    slope = (sgsd.gated_loss(GRID + h, tau_g) - sgsd.gated_loss(GRID - h, tau_g)) / (2 * h)
    same(closed, slope, tol=1e-8)


# ------------------------------------------------------- Eqs. 18-20: the policy-gradient form


def test_eq18_a_gap_falls_as_the_student_finds_its_token_likelier():
    """The teachers are constants, so the gradient of a gap is that of -log p_S."""
    x = Example()
    x.logpT_KT.requires_grad_()
    for k in range(K):
        (of_gap_TV,) = torch.autograd.grad(x.gaps(x.logits_TV)[k].sum(), x.logits_TV)
        (of_logp_TV,) = torch.autograd.grad(x.logp(x.logits_TV).sum(), x.logits_TV)
        assert torch.equal(of_gap_TV, -of_logp_TV) and of_gap_TV.any()
    x.gaps(x.logits_TV).sum().backward()
    assert x.logpT_KT.grad is None


def test_weights_support_polarity_and_credit_are_constants():
    x = Example()
    x.alpha_K.requires_grad_(), x.rho_K.requires_grad_()
    x.loss(x.logits_TV).backward()
    assert x.logits_TV.grad.any()
    assert x.alpha_K.grad is x.rho_K.grad is None
    delta_KT = x.gaps(x.logits_TV)
    assert delta_KT.requires_grad
    assert not sgsd.plain_support(delta_KT).requires_grad
    assert not sgsd.robust_support(delta_KT, x.mask_T, 3.0).requires_grad
    assert not sgsd.polarity(delta_KT.mean(1), 1, 0.01).requires_grad
    assert not sgsd.token_credit(delta_KT, x.mask_T, x.alpha_K, x.rho_K, 1.0).requires_grad


@pytest.mark.parametrize("tau_g", TAUS)
@pytest.mark.parametrize("seed", range(5))
def test_eq19_the_gradient_is_the_credit_times_the_score(seed, tau_g):
    """-grad L is the sum over k and t of W_t^(k) grad log p_S(y_t); masked tokens have none."""
    x = Example(seed)
    (grad_TV,) = torch.autograd.grad(x.loss(x.logits_TV, tau_g), x.logits_TV)
    credit_KT = sgsd.token_credit(x.gaps(x.logits_TV), x.mask_T, x.alpha_K, x.rho_K, tau_g)
    # d log p_S(y_t) / d logits_t = onehot(y_t) - softmax(logits_t)
    score_TV = torch.nn.functional.one_hot(x.ids_T, V) - x.logits_TV.detach().softmax(-1)
    want_TV = -credit_KT.sum(0)[:, None] * score_TV
    assert want_TV.abs().max() > 1e-3
    same(grad_TV, want_TV, tol=1e-14)
    assert not grad_TV[x.mask_T == 0].any()
    assert torch.autograd.gradcheck(x.loss, x.logits_TV)  # finite differences say the same


def test_eq20_the_credit_of_a_token():
    # Z = 2 and g(D3) = D3 / 4. Teacher 1: 0.5 (1/2) D3/4 = D3 / 16; teacher 2: -0.3 (1/2) D3/4;
    # teacher 3 is ignored, and token 3 masked: 0. The eps in Z is off by 5e-9.
    delta_KT = t([[D3, -D3, 7.0], [D3, 0.0, 7.0], [D3, D3, D3]])
    alpha_K, rho_K = t([0.5, 0.3, 0.2]), t([1, -1, 0])
    credit_KT = sgsd.token_credit(delta_KT, t([1, 1, 0]), alpha_K, rho_K, 1.0)
    want_KT = [[D3 / 16, -D3 / 16, 0.0], [-0.3 * D3 / 8, 0.0, 0.0], [0.0, 0.0, 0.0]]
    same(credit_KT, want_KT, tol=1e-8)


@pytest.mark.parametrize("k, mask", [(2, 0.0), (0, 1.0)])
def test_where_all_is_masked_or_no_teacher_speaks_loss_and_gradient_are_0(k, mask):
    logpS_T, mask_T = torch.randn(3, requires_grad=True), torch.full((3,), mask)
    delta_KT = sgsd.log_prob_gap(torch.randn(k, 3), logpS_T)
    assert sgsd.robust_support(delta_KT, mask_T, 3.0).tolist() == [0.0] * k
    lbar_K = sgsd.teacher_losses(delta_KT, mask_T, 1.0)
    loss = sgsd.sgsd_loss(lbar_K, torch.ones(k), torch.ones(k))
    assert loss.item() == 0
    assert torch.autograd.grad(loss, logpS_T)[0].tolist() == [0, 0, 0]


# ------------------------------------------------------- Eqs. 21-24 and 26: the shape of the gate


@check
@given(gaps, taus)
def test_eq21_and_eq22_the_gate_is_odd_has_the_gaps_sign_and_is_bounded(delta, tau_g):
    gate = sgsd.gate_grad(t(delta), tau_g)
    assert torch.equal(gate, -sgsd.gate_grad(-t(delta), tau_g))
    assert abs(gate) <= 1 / sqrt(e * tau_g)
    assert gate * delta >= 0
    if 1e-300 < abs(delta) < 20 * sqrt(tau_g):  # beyond, exp(-200) and less
        assert gate.sign() == t(delta).sign()


@pytest.mark.parametrize("tau_g", TAUS)
@pytest.mark.parametrize("gap", [1e-2, 1e-3, 1e-4, 1e-6])
def test_eq23_and_eq26_near_zero_the_loss_is_a_square_and_its_slope_a_line(gap, tau_g):
    """delta^2 / (4 tau), in fp32: the slope to the last digits, the value to 6e-8."""
    delta = torch.tensor([gap, -gap], dtype=torch.float32, requires_grad=True)
    loss = sgsd.gated_loss(delta, tau_g)
    (grad,) = torch.autograd.grad(loss.sum(), delta)
    tol = 1e-6 + gap**2 / (8 * tau_g)  # the next term of the series, relative
    torch.testing.assert_close(loss, torch.full((2,), gap**2 / (4 * tau_g)), rtol=tol, atol=6e-8)
    torch.testing.assert_close(grad, delta.detach() / (2 * tau_g), rtol=2 * tol, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tau_g", [1e-3, *TAUS, 1e3])
def test_eq24_far_from_zero_the_gate_closes_and_extreme_gaps_stay_finite(tau_g, dtype):
    far = torch.logspace(-10, 4, 141, dtype=dtype)
    delta = torch.cat([-far, torch.zeros(1, dtype=dtype), far]).requires_grad_()
    loss = sgsd.gated_loss(delta, tau_g)
    (grad,) = torch.autograd.grad(loss.sum(), delta)
    for values in (loss, grad, sgsd.gate_grad(delta.detach(), tau_g)):
        assert values.isfinite().all()
    assert loss[-1].item() == pytest.approx(log(2), rel=1e-6)
    assert grad[-1] == 0 and grad[141] == 0
    # At 6 sqrt(tau) it is 6 / sqrt(tau) exp(-18), up to a relative exp(-18) = 1.5e-8.
    six = torch.tensor(6 * sqrt(tau_g), dtype=dtype, requires_grad=True)
    (grad,) = torch.autograd.grad(sgsd.gated_loss(six, tau_g), six)
    for slope in (grad, sgsd.gate_grad(six.detach(), tau_g)):
        assert slope.item() == pytest.approx(6 / sqrt(tau_g) * exp(-18), rel=1e-4)
