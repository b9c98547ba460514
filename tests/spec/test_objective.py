"""The objective, Eqs. 6-16 and Tab. 2, in the paper's order; Eqs. 17-26 are in test_gradient.py.

Under each equation stand numbers worked by hand. All of them together meet the loops of
tests/plain.py, which write the equations as the paper prints them, in test_step.py.
"""

from math import e, inf, log, nan, sqrt
from types import SimpleNamespace

import pytest
import torch
from conftest import one_line, same, t

import sgsd
from lib import model

# Where a sum over three tokens is divided by 3 + eps, the hand's result by 3 is off by 3e-9.
NEAR = 1e-8


# ------------------------------------------------------------------------ Eq. 6: teacher weights


def test_eq6_weights_are_the_softmax_of_mean_similarities():
    # s_1 = (log 2 + log 8) / 2 = log 4 and s_2 = (1 - 1) / 2 = 0; exp: 4 and 1
    same(sgsd.teacher_weights(t([log(2), 1.0]), t([log(8), -1.0])), [4 / 5, 1 / 5])
    same(sgsd.teacher_weights(t([0.3] * 4), t([0.7] * 4)), [1 / 4] * 4)


# ------------------------------------------------------------ Eqs. 7-10: gaps and plain polarity


def test_eq7_a_gap_is_positive_where_the_teacher_supports_the_token():
    # teacher 1/2, student 1/4: log 2; both 1/4: 0; teacher 1/4, student 1/2: -log 2
    logpS_T = t([log(1 / 4), log(1 / 4), log(1 / 2)])
    gap_KT = sgsd.log_prob_gap(t([[log(1 / 2), log(1 / 4), log(1 / 4)]]), logpS_T)
    same(gap_KT, [[log(2), 0.0, -log(2)]])


WRONG_TEACHERS = [torch.zeros(shape) for shape in ((2, 4), (3,), (2, 1), (1, 1, 3), ())]
WRONG_TEACHERS += [torch.zeros(1, 3, dtype=dtype) for dtype in (torch.float64, torch.bfloat16)]


@pytest.mark.parametrize("logpT_KT", WRONG_TEACHERS)
def test_eq7_a_shape_or_dtype_that_does_not_fit_is_refused_by_its_value(logpT_KT):
    wrong = logpT_KT.dtype if logpT_KT.shape == (1, 3) else tuple(logpT_KT.shape)
    one_line(lambda: sgsd.log_prob_gap(logpT_KT, torch.zeros(3)), "Eq. 7", wrong)
    bf16_KT = torch.zeros(1, 3).bfloat16()
    one_line(lambda: sgsd.log_prob_gap(bf16_KT, bf16_KT[0]), "bfloat16")


def test_eq8_the_plain_support_is_the_mean_over_all_tokens():
    # (1 + 2 - 6) / 3 and (3 + 0 + 0) / 3: no mask, no clip
    same(sgsd.plain_support(t([[1.0, 2.0, -6.0], [3.0, 0.0, 0.0]])), [-1.0, 1.0])


WRONG_OUTCOMES = [0, 0.5, 2, True, False, nan, inf, None, "1", torch.tensor(True)]


@pytest.mark.parametrize("r", WRONG_OUTCOMES)
def test_eq9_an_outcome_other_than_minus_or_plus_one_is_refused(r):
    one_line(lambda: sgsd.polarity(t([0.5]), r, 0.05), "Eq. 9", f"got {r}")


TABLE_2 = {  # the outcome, the sign of the support, and the polarity
    "helpful": (1, 1, 1),
    "warning": (-1, -1, 1),
    "over-suppressive": (1, -1, -1),
    "misleading": (-1, 1, -1),
}


@pytest.mark.parametrize("kind", TABLE_2)
def test_eq10_and_tab2_a_teacher_that_agrees_with_the_outcome_is_distilled_else_reversed(kind):
    """Eq. 10 is Eq. 13 on the plain support, without a threshold."""
    r, sign, rho = TABLE_2[kind]
    a_K = t([sign * 1e-300, sign * 1.5, 0.0])  # sgn(0) = 0
    for outcome in (r, float(r), torch.tensor(r)):
        assert sgsd.polarity(a_K, outcome, 0.0).tolist() == [rho, rho, 0]


# ------------------------------------------------------------ Eqs. 11-13: robust support, polarity


def test_the_mask_leaves_out_special_template_thinking_and_formatting_tokens(tokenizer):
    """m_t of §2.4, with the ids that a tokenizer makes it of (S2)."""
    masked_ids = model.masked_token_ids(tokenizer)
    ids = tokenizer.encode("<think>1\n\n</think>\n<|im_start|># 7\n\n\n\n<|im_end|><|endoftext|>")
    want = [0, 1, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0]
    for sequence in (ids, torch.tensor(ids)):
        mask_T = sgsd.token_mask(sequence, masked_ids)
        assert mask_T.tolist() == want and mask_T.dtype == torch.float32
    assert sgsd.token_mask(ids, frozenset()).tolist() == [1] * len(ids)


def test_eq11_and_eq12_the_support_is_the_mean_over_unmasked_tokens_of_clipped_gaps():
    one_token_K1 = t([[9.0], [-9.0], [3.0], [2.5], [-2.5]])  # so the support is the clipped gap
    same(sgsd.robust_support(one_token_K1, t([1]), 3.0), [3.0, -3.0, 3.0, 2.5, -2.5], NEAR)
    delta_KT = t([[1.0, 10.0, -2.0, 99.0], [-1.0, -1.0, -10.0, 0.0]])
    # (1 + 3 - 2) / 3 and (-1 - 1 - 3) / 3
    same(sgsd.robust_support(delta_KT, t([1, 1, 1, 0]), 3.0), [2 / 3, -5 / 3], NEAR)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eq13_a_support_up_to_the_threshold_is_ignored_whatever_the_outcome(dtype):
    at_K = torch.tensor([0.05, -0.05], dtype=dtype)
    above_K = torch.nextafter(at_K, 2 * at_K)
    for r in (1, -1):
        assert sgsd.polarity(at_K, r, 0.05).tolist() == [0, 0]
        assert sgsd.polarity(above_K, r, 0.05).tolist() == [r, -r]


# ------------------------------------------------------------------------ Eqs. 14-16: the loss

D3 = sqrt(2 * log(3))  # at tau = 1: exp(-D3^2 / 2) = 1/3, so the loss is log 2 - log(4/3)


def test_eq14_the_gated_loss_is_0_without_a_gap_even_and_saturates_at_log_2():
    same(sgsd.gated_loss(t([0.0, D3, -D3]), 1.0), [0.0, log(3 / 2), log(3 / 2)])
    same(sgsd.gated_loss(t([100.0, -100.0]), 1.0), [log(2), log(2)])
    # At tau = 1/2 exp(-1^2 / 1) = 1/e. Twice the gap at four times tau is the same.
    same(sgsd.gated_loss(t([1.0, -1.0]), 0.5), [log(2) - log(1 + 1 / e)] * 2)
    same(sgsd.gated_loss(t([2 * D3]), 4.0), [log(3 / 2)])


def test_eq15_a_teachers_loss_is_the_mean_over_unmasked_tokens_of_unclipped_gaps():
    delta_KT = t([[D3, 0.0, -D3, 50.0], [0.0, 0.0, 100.0, D3]])
    # 2 log(3/2) / 3 and log 2 / 3
    want = [2 * log(3 / 2) / 3, log(2) / 3]
    same(sgsd.teacher_losses(delta_KT, t([1, 1, 1, 0]), 1.0), want, NEAR)


def test_eq16_the_loss_is_a_sum_weighed_by_alpha_and_signed_by_rho():
    # 0.5 log(3/2) - 0.3 log 2 + 0 log(3/2) = 0.202733 - 0.207944 = -0.005212
    lbar_K = t([log(3 / 2), log(2), log(3 / 2)])
    loss = sgsd.sgsd_loss(lbar_K, t([0.5, 0.3, 0.2]), t([1, -1, 0]))
    same(loss, 0.5 * log(3 / 2) - 0.3 * log(2))
    assert loss.item() == pytest.approx(-0.005212, abs=5e-7)


# -------------------------------------------------------- lines 10-14 of Algorithm 1, all together


def test_alg1_lines_10_to_14_the_loss_of_a_rollout_from_its_log_probabilities():
    """On a failure, r = -1, with c_delta 1 and eps_a 0.4; token 3 is masked."""
    cfg = SimpleNamespace(c_delta=1.0, eps_a=0.4, tau_g=1.0)
    gap_KT = t([[D3, 0.0, 9.0], [-D3, -D3, 9.0], [0.3, 0.1, 9.0]])
    logpS_T, alpha_K = t([-1.0, -2.0, -3.0]).requires_grad_(), t([0.25, 0.5, 0.25])
    logpT_KT = gap_KT + logpS_T.detach()
    loss, numbers = sgsd.loss_of(cfg, logpT_KT, logpS_T, t([1, 1, 0]), alpha_K, -1)
    # Clipped: (1 + 0) / 2, (-1 - 1) / 2, (0.3 + 0.1) / 2. The first supports a failure.
    same(numbers["a"], [0.5, -1.0, 0.2], NEAR)
    assert numbers["rho"].tolist() == [-1, 1, 0]
    same(numbers["a_plain"], [(D3 + 9) / 3, (9 - 2 * D3) / 3, 9.4 / 3])
    same(numbers["losses"][:2], [log(3 / 2) / 2, log(3 / 2)], NEAR)
    # 0.25 (-1) log(3/2) / 2 + 0.5 log(3/2)
    same(loss, 3 / 8 * log(3 / 2), NEAR)
    # g(D3) = D3 / 4 and Z = 2: -0.25 D3/8 and 0.5 (-D3/8) on token 1, 0.5 (-D3/8) on token 2.
    loss.backward()
    same(-logpS_T.grad, [-3 / 32 * D3, -D3 / 16, 0.0], NEAR)
    same(numbers["credit"].sum(0), -logpS_T.grad)
    same(numbers["delta"], gap_KT)
    assert numbers["mask"].tolist() == [1, 1, 0] and numbers["alpha"].tolist() == [0.25, 0.5, 0.25]
    assert not any(x.requires_grad for x in numbers.values())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.float64])
@pytest.mark.parametrize("wild", [1e4, nan, inf, -inf])
def test_a_masked_gap_is_inert_even_when_it_is_not_finite(wild, dtype):
    """Whatever the mask's dtype."""
    delta_KT = torch.tensor([[1.0, wild, 4.0]], requires_grad=True)
    mask_T, one_K = torch.tensor([1, 0, 1]).to(dtype), torch.ones(1)
    assert sgsd.robust_support(delta_KT, mask_T, 3.0).item() == 2.0  # (1 + 3) / 2
    assert sgsd.token_credit(delta_KT, mask_T, one_K, one_K, 1.0)[0, 1] == 0
    sgsd.sgsd_loss(sgsd.teacher_losses(delta_KT, mask_T, 1.0), one_K, one_K).backward()
    assert delta_KT.grad[0, 1] == 0 and delta_KT.grad.isfinite().all()
