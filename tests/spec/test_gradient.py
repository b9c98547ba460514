"""Gradients in float64: closed forms, finite differences, and the policy-gradient identity."""

from math import log

import pytest
import torch
from conftest import same

import sgsd

TAUS = [0.25, 1.0, 4.0]
K, T, V = 5, 7, 11
GRID = torch.linspace(-8, 8, 401, dtype=torch.float64)


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

    def gaps(self, logits_TV):
        logpS_T = logits_TV.log_softmax(-1)[torch.arange(T), self.ids_T]
        return sgsd.log_prob_gap(self.logpT_KT, logpS_T)

    def loss(self, logits_TV, tau_g=1.0):
        delta_KT = self.gaps(logits_TV)
        return sgsd.sgsd_loss(delta_KT, self.mask_T, self.alpha_K, self.rho_K, tau_g)


@pytest.mark.parametrize("tau_g", TAUS)
def test_eq17_is_the_slope_of_eq14(tau_g):
    """Against autograd, and against central differences; it has the sign of the gap."""
    delta, h = GRID.clone().requires_grad_(), 1e-5
    (grad,) = torch.autograd.grad(sgsd.gated_loss(delta, tau_g).sum(), delta)
    closed = sgsd.gate_grad(GRID, tau_g)
    same(grad, closed)
    slope = (sgsd.gated_loss(GRID + h, tau_g) - sgsd.gated_loss(GRID - h, tau_g)) / (2 * h)
    same(closed, slope, tol=1e-8)
    assert torch.equal(sgsd.gate_grad(GRID, 1.0).sign(), GRID.sign())


@pytest.mark.parametrize("tau_g", TAUS)
@pytest.mark.parametrize("seed", range(5))
def test_eq19_policy_gradient_identity(seed, tau_g):
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


def test_teachers_weights_and_polarity_are_constants():
    x = Example()
    for constant in (x.logpT_KT, x.alpha_K, x.rho_K):
        constant.requires_grad_()
    x.loss(x.logits_TV).backward()
    assert x.logits_TV.grad.any()
    assert x.logpT_KT.grad is x.alpha_K.grad is x.rho_K.grad is None
    delta_KT = x.gaps(x.logits_TV)
    assert delta_KT.requires_grad
    assert not sgsd.robust_support(delta_KT, x.mask_T, 3.0).requires_grad
    assert not sgsd.polarity(delta_KT.mean(1), 1, 0.01).requires_grad
    assert not sgsd.token_credit(delta_KT, x.mask_T, x.alpha_K, x.rho_K, 1.0).requires_grad


@pytest.mark.parametrize("k, mask", [(2, 0.0), (0, 1.0)])
def test_all_masked_and_no_teachers_have_zero_gradient(k, mask):
    logpS_T = torch.randn(3, requires_grad=True)
    delta_KT = sgsd.log_prob_gap(torch.randn(k, 3), logpS_T)
    loss = sgsd.sgsd_loss(delta_KT, torch.full((3,), mask), torch.ones(k), torch.ones(k), 1.0)
    assert torch.autograd.grad(loss, logpS_T)[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("tau_g", TAUS)
@pytest.mark.parametrize("gap", [1e-2, 1e-3, 1e-4, 1e-6])
def test_no_cancellation_near_zero_in_fp32(gap, tau_g):
    """Eq. 14 as it stands is 0 or a multiple of 6e-8 here; the series is delta^2 / (4 tau)."""
    delta = torch.tensor([gap, -gap], dtype=torch.float32, requires_grad=True)
    loss = sgsd.gated_loss(delta, tau_g)
    (grad,) = torch.autograd.grad(loss.sum(), delta)
    tol = 1e-6 + gap**2 / (8 * tau_g)  # the next term of the series, relative
    torch.testing.assert_close(loss, torch.full((2,), gap**2 / (4 * tau_g)), rtol=tol, atol=0)
    torch.testing.assert_close(grad, delta.detach() / (2 * tau_g), rtol=2 * tol, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tau_g", [1e-3, *TAUS, 1e3])
def test_extreme_gaps_stay_finite(tau_g, dtype):
    far = torch.logspace(-10, 4, 141, dtype=dtype)
    delta = torch.cat([-far, torch.zeros(1, dtype=dtype), far]).requires_grad_()
    loss = sgsd.gated_loss(delta, tau_g)
    (grad,) = torch.autograd.grad(loss.sum(), delta)
    for values in (loss, grad, sgsd.gate_grad(delta.detach(), tau_g)):
        assert values.isfinite().all()
    assert loss[-1].item() == pytest.approx(log(2), rel=1e-6)
    assert grad[-1] == 0 and grad[141] == 0
