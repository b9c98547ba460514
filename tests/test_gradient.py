"""Gradients in float64: autograd against the closed forms, finite differences, and the policy-gradient identity through logits."""

from math import log

import pytest
import torch

import sgsd

TAUS = [0.25, 1.0, 4.0]
K, T, V = 5, 7, 11


def grid():
    return torch.linspace(-8, 8, 401, dtype=torch.float64)


def same(got, want, tol=1e-12):
    torch.testing.assert_close(got, want, rtol=tol, atol=tol)


class Example:
    """One rollout of T tokens over V logits under K teachers, with every kind of polarity and a mask."""

    def __init__(self, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.logits_TV = torch.randn(T, V, generator=g, dtype=torch.float64, requires_grad=True)
        self.ids_T = torch.randint(V, (T,), generator=g)
        self.logpT_KT = torch.randn(K, T, V, generator=g, dtype=torch.float64).log_softmax(-1)[
            :, torch.arange(T), self.ids_T
        ]
        self.mask_T = torch.tensor([1, 1, 0, 1, 1, 1, 0])
        self.alpha_K = torch.randn(K, generator=g, dtype=torch.float64).softmax(0)
        self.rho_K = torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0], dtype=torch.float64)

    def gaps(self):
        logpS_T = self.logits_TV.log_softmax(-1).gather(1, self.ids_T[:, None])[:, 0]
        return sgsd.log_prob_gap(self.logpT_KT, logpS_T)

    def loss(self, tau_g=1.0):
        return sgsd.sgsd_loss(self.gaps(), self.mask_T, self.alpha_K, self.rho_K, tau_g)

    def credit(self, tau_g=1.0):
        return sgsd.token_credit(self.gaps(), self.mask_T, self.alpha_K, self.rho_K, tau_g)


# ------------------------------------------------------------------------------------------------------------------------- the gate, Eqs. 14, 17


@pytest.mark.parametrize("tau_g", TAUS)
def test_autograd_of_the_loss_is_the_gate(tau_g):
    delta = grid().requires_grad_()
    (grad,) = torch.autograd.grad(sgsd.gated_loss(delta, tau_g).sum(), delta)
    same(grad, sgsd.gate_grad(delta.detach(), tau_g))


@pytest.mark.parametrize("tau_g", TAUS)
def test_gradcheck(tau_g):
    assert torch.autograd.gradcheck(
        lambda d: sgsd.gated_loss(d, tau_g), grid()[::10].requires_grad_()
    )


@pytest.mark.parametrize("tau_g", TAUS)
def test_central_differences(tau_g):
    delta, h = grid(), 1e-5
    slope = (sgsd.gated_loss(delta + h, tau_g) - sgsd.gated_loss(delta - h, tau_g)) / (2 * h)
    same(sgsd.gate_grad(delta, tau_g), slope, tol=1e-8)


def test_the_gate_has_the_sign_of_the_gap():
    delta = grid()
    assert torch.equal(sgsd.gate_grad(delta, 1.0).sign(), delta.sign())


# ----------------------------------------------------------------------------------------------------------- the policy gradient, Eqs. 18-20


def test_eq18_the_gap_moves_against_the_student():
    logpS_T = torch.zeros(T, dtype=torch.float64, requires_grad=True)
    (grad_T,) = torch.autograd.grad(sgsd.log_prob_gap(Example().logpT_KT, logpS_T).sum(), logpS_T)
    same(grad_T, torch.full((T,), -float(K), dtype=torch.float64))  # -1 from each of K teachers


@pytest.mark.parametrize("tau_g", TAUS)
@pytest.mark.parametrize("seed", range(5))
def test_eq19_policy_gradient_identity(seed, tau_g):
    x = Example(seed)
    (grad_TV,) = torch.autograd.grad(x.loss(tau_g), x.logits_TV)
    # d log p_S(y_t) / d logits_t = onehot(y_t) - softmax(logits_t); -grad L = sum over k, t of W_t^(k) times that
    with torch.no_grad():
        score_TV = torch.nn.functional.one_hot(x.ids_T, V) - x.logits_TV.softmax(-1)
        want_TV = torch.zeros(T, V, dtype=torch.float64)
        for credit_T in x.credit(tau_g):
            want_TV -= credit_T[:, None] * score_TV
    assert want_TV.abs().max() > 1e-3
    same(grad_TV, want_TV, tol=1e-14)
    assert not grad_TV[x.mask_T == 0].any()


def test_finite_differences_through_the_logits():
    x = Example()
    assert torch.autograd.gradcheck(
        lambda logits_TV: sgsd.sgsd_loss(
            sgsd.log_prob_gap(x.logpT_KT, logits_TV.log_softmax(-1)[torch.arange(T), x.ids_T]),
            x.mask_T,
            x.alpha_K,
            x.rho_K,
            1.0,
        ),
        x.logits_TV,
    )


@pytest.mark.parametrize(("rho", "direction"), [(1.0, 1), (-1.0, -1), (0.0, 0)])
def test_a_step_follows_the_teacher_or_leaves_it(rho, direction):
    """One teacher that supports the token: distilled, a step of descent makes the token likelier; reversed, rarer; ignored, neither."""
    logits_V = torch.zeros(1, V, dtype=torch.float64, requires_grad=True)
    gap = sgsd.log_prob_gap(
        torch.full((1, 1), log(0.5), dtype=torch.float64), logits_V.log_softmax(-1)[:, 3]
    )
    (grad,) = torch.autograd.grad(
        sgsd.sgsd_loss(gap, torch.ones(1), torch.ones(1), torch.tensor([rho]), 1.0), logits_V
    )
    moved = (logits_V - grad).log_softmax(-1)[0, 3] - logits_V.log_softmax(-1)[0, 3]
    assert torch.sign(moved).item() == direction


# ---------------------------------------------------------------------------------------------------------------------- what carries no gradient


def test_teachers_weights_and_polarity_are_constants():
    x = Example()
    constants = x.logpT_KT, x.alpha_K, x.rho_K = [
        c.detach().requires_grad_() for c in (x.logpT_KT, x.alpha_K, x.rho_K)
    ]
    x.loss().backward()
    assert x.logits_TV.grad is not None and x.logits_TV.grad.any()
    assert [c.grad for c in constants] == [None, None, None]


def test_support_polarity_and_credit_are_constants():
    x = Example()
    x.alpha_K.requires_grad_()
    x.rho_K.requires_grad_()
    delta_KT = x.gaps()
    assert delta_KT.requires_grad
    a_K = sgsd.robust_support(delta_KT, x.mask_T, 3.0)
    assert not a_K.requires_grad
    assert not sgsd.polarity(a_K, 1, 0.01).requires_grad
    assert not sgsd.polarity(delta_KT.mean(1), 1, 0.01).requires_grad
    assert not sgsd.token_credit(delta_KT, x.mask_T, x.alpha_K, x.rho_K, 1.0).requires_grad


def test_all_masked_and_no_teachers_have_zero_gradient():
    logpS_T = torch.randn(3, requires_grad=True)
    for k, mask_T in ((2, torch.zeros(3)), (0, torch.ones(3))):
        loss = sgsd.sgsd_loss(
            sgsd.log_prob_gap(torch.randn(k, 3), logpS_T), mask_T, torch.ones(k), torch.ones(k), 1.0
        )
        (grad_T,) = torch.autograd.grad(loss, logpS_T)
        assert grad_T.tolist() == [0, 0, 0]


# ------------------------------------------------------------------------------------------------------------------------------ floating point


@pytest.mark.parametrize("tau_g", TAUS)
@pytest.mark.parametrize("gap", [1e-2, 1e-3, 1e-4, 1e-6])
def test_no_cancellation_near_zero_in_fp32(gap, tau_g):
    """log 2 - log(1 + exp(..)) taken literally in fp32 is 0 or a multiple of 6e-8 here; the series is delta^2 / (4 tau)."""
    delta = torch.tensor([gap, -gap], dtype=torch.float32, requires_grad=True)
    loss = sgsd.gated_loss(delta, tau_g)
    (grad,) = torch.autograd.grad(loss.sum(), delta)
    series = gap**2 / (4 * tau_g)
    tol = 1e-6 + gap**2 / (8 * tau_g)  # the next term of the series, relative
    torch.testing.assert_close(loss, torch.tensor([series, series]), rtol=tol, atol=0)
    torch.testing.assert_close(grad, torch.tensor([gap, -gap]) / (2 * tau_g), rtol=2 * tol, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tau_g", [1e-3, *TAUS, 1e3])
def test_extreme_gaps_stay_finite(tau_g, dtype):
    far = torch.logspace(-10, 4, 141, dtype=dtype)
    delta = torch.cat([-far, torch.zeros(1, dtype=dtype), far]).requires_grad_()
    loss = sgsd.gated_loss(delta, tau_g)
    (grad,) = torch.autograd.grad(loss.sum(), delta)
    for values in (loss, grad, sgsd.gate_grad(delta.detach(), tau_g)):
        assert values.isfinite().all()
    torch.testing.assert_close(loss[-1].item(), log(2), rtol=1e-6, atol=0)
    assert grad[-1] == 0 and grad[141] == 0
