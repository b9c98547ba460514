"""The objective, Eqs. 6-16 and Tab. 2, in the paper's order; Eqs. 17-26 are in test_gradient.py.

Under each equation stand numbers worked by hand, and what holds for every input (Hypothesis). Then
each function meets the loops of tests/plain.py, which write the equations as the paper prints them.
"""

import random
from math import e, inf, log, nan, sqrt

import plain
import pytest
import torch
from conftest import one_line, same, t
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import sgsd
from lib import model

check = settings(max_examples=100, derandomize=True, deadline=None, database=None)
gaps, taus, scores = st.floats(-50, 50), st.floats(0.05, 20), st.floats(-1, 1)
# Where a sum over three tokens is divided by 3 + eps, the hand's result by 3 is off by 3e-9.
NEAR = 1e-8


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


# ------------------------------------------------------------------------ Eq. 6: teacher weights


def test_eq6_weights_are_the_softmax_of_mean_similarities():
    # s_1 = (log 2 + log 8) / 2 = log 4 and s_2 = (1 - 1) / 2 = 0; exp: 4 and 1
    same(sgsd.teacher_weights(t([log(2), 1.0]), t([log(8), -1.0])), [4 / 5, 1 / 5])
    same(sgsd.teacher_weights(t([0.3] * 4), t([0.7] * 4)), [1 / 4] * 4)
    same(sgsd.teacher_weights(t([-0.9]), t([0.1])), [1.0])


# ------------------------------------------------------------ Eqs. 7-10: gaps and plain polarity


def test_eq7_a_gap_is_positive_where_the_teacher_supports_the_token():
    # teacher 1/2, student 1/4: log 2; both 1/4: 0; teacher 1/4, student 1/2: -log 2
    gap_KT = sgsd.log_prob_gap(t([[log(1 / 2), log(1 / 4), log(1 / 4)]]), t([log(1 / 4)] * 3))
    same(gap_KT, [[log(2), 0.0, 0.0]])
    same(sgsd.log_prob_gap(t([[log(1 / 4)]]), t([log(1 / 2)])), [[-log(2)]])


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


def test_eq11_gaps_are_clipped_at_the_bound():
    one_token_K1 = t([[9.0], [-9.0], [3.0], [2.5], [-2.5]])  # so the support is the clipped gap
    same(sgsd.robust_support(one_token_K1, t([1]), 3.0), [3.0, -3.0, 3.0, 2.5, -2.5], NEAR)


def test_eq12_the_support_is_the_mean_of_clipped_gaps_over_unmasked_tokens():
    delta_KT = t([[1.0, 10.0, -2.0, 99.0], [-1.0, -1.0, -10.0, 0.0]])
    # (1 + 3 - 2) / 3 and (-1 - 1 - 3) / 3
    same(sgsd.robust_support(delta_KT, t([1, 1, 1, 0]), 3.0), [2 / 3, -5 / 3], NEAR)


def test_eq12_one_outlier_flips_the_plain_stance_and_not_the_clipped_one():
    delta_KT = t([[1.0, 1.0, -20.0]])
    same(sgsd.plain_support(delta_KT), [-6.0])  # (2 - 20) / 3
    same(sgsd.robust_support(delta_KT, torch.ones(3), 1.5), [0.5 / 3], NEAR)  # (2 - 1.5) / 3


@check
@given(examples(), st.floats(0.01, 20))
def test_eq12_clipping_bounds_the_support_and_a_wide_clip_leaves_it_plain(x, c_delta):
    delta_KT, mask_T, *_ = x
    assert (sgsd.robust_support(delta_KT, mask_T, c_delta).abs() <= c_delta).all()
    wide_K = sgsd.robust_support(delta_KT, torch.ones(delta_KT.shape[1]), 50.0)
    same(wide_K, sgsd.plain_support(delta_KT), NEAR)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eq13_a_support_up_to_the_threshold_is_ignored_whatever_the_outcome(dtype):
    at_K = torch.tensor([0.05, -0.05], dtype=dtype)
    above_K = torch.nextafter(at_K, 2 * at_K)
    for r in (1, -1):
        assert sgsd.polarity(at_K, r, 0.05).tolist() == [0, 0]
        assert sgsd.polarity(above_K, r, 0.05).tolist() == [r, -r]


# ------------------------------------------------------------------------ Eqs. 14-16: the loss

D3 = sqrt(2 * log(3))  # at tau = 1: exp(-D3^2 / 2) = 1/3, so the loss is log 2 - log(4/3)


def test_eq14_the_gated_loss():
    same(sgsd.gated_loss(t([0.0, D3, -D3]), 1.0), [0.0, log(3 / 2), log(3 / 2)])
    same(sgsd.gated_loss(t([100.0, -100.0]), 1.0), [log(2), log(2)])
    # At tau = 1/2 exp(-1^2 / 1) = 1/e. Twice the gap at four times tau is the same.
    same(sgsd.gated_loss(t([1.0, -1.0]), 0.5), [log(2) - log(1 + 1 / e)] * 2)
    same(sgsd.gated_loss(t([2 * D3]), 4.0), [log(3 / 2)])


@check
@given(gaps, gaps, taus)
def test_eq14_the_loss_is_even_and_grows_from_0_to_log_2(a, b, tau_g):
    delta_2 = t(sorted([a, b], key=abs))
    loss_2 = sgsd.gated_loss(delta_2, tau_g)
    assert torch.equal(loss_2, sgsd.gated_loss(-delta_2, tau_g))
    assert 0 <= loss_2[0] <= loss_2[1] + 1e-15 <= log(2) + 2e-15


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


# ----------------------------------------------------------------------- masks, and no teachers


@check
@given(examples(), taus, st.data())
def test_masked_tokens_are_inert_and_masking_is_leaving_out(x, tau_g, data):
    delta_KT, mask_T, alpha_K, rho_K = x
    assume((mask_T == 0).any())
    wild_KT = t(data.draw(row(row(st.floats(-1e4, 1e4), delta_KT.shape[1]), len(delta_KT))))
    other_KT = torch.where(mask_T == 0, wild_KT, delta_KT)
    rest_KT, ones_T = delta_KT[:, mask_T == 1], torch.ones(int(mask_T.sum()))
    for f in (
        lambda d, m: sgsd.robust_support(d, m, 3.0),
        lambda d, m: sgsd.teacher_losses(d, m, tau_g),
        lambda d, m: sgsd.token_credit(d, m, alpha_K, rho_K, tau_g).sum(1),
    ):
        assert torch.equal(f(other_KT, mask_T), f(delta_KT, mask_T))
        same(f(delta_KT, mask_T), f(rest_KT, ones_T))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.float64])
@pytest.mark.parametrize("wild", [nan, inf, -inf])
def test_a_masked_gap_is_inert_even_when_it_is_not_finite(wild, dtype):
    """Whatever the mask's dtype."""
    delta_KT = torch.tensor([[1.0, wild, 4.0]], requires_grad=True)
    mask_T, one_K = torch.tensor([1, 0, 1]).to(dtype), torch.ones(1)
    assert sgsd.robust_support(delta_KT, mask_T, 3.0).item() == 2.0  # (1 + 3) / 2
    assert sgsd.token_credit(delta_KT, mask_T, one_K, one_K, 1.0)[0, 1] == 0
    sgsd.sgsd_loss(sgsd.teacher_losses(delta_KT, mask_T, 1.0), one_K, one_K).backward()
    assert delta_KT.grad[0, 1] == 0 and delta_KT.grad.isfinite().all()


def test_without_teachers_there_is_nothing_to_add_up():
    none_K, none_KT, mask_T = torch.zeros(0), torch.zeros(0, 3), torch.ones(3)
    assert sgsd.teacher_weights(none_K, none_K).shape == (0,)
    assert sgsd.log_prob_gap(none_KT, torch.zeros(3)).shape == (0, 3)
    assert sgsd.plain_support(none_KT).shape == (0,)
    assert sgsd.robust_support(none_KT, mask_T, 3.0).shape == (0,)
    assert sgsd.polarity(none_K, 1, 0.05).shape == (0,)
    assert sgsd.teacher_losses(none_KT, mask_T, 1.0).shape == (0,)
    assert sgsd.token_credit(none_KT, mask_T, none_K, none_K, 1.0).shape == (0, 3)
    assert sgsd.sgsd_loss(none_K, none_K, none_K).item() == 0


# -------------------------------------------------------------- against loops in plain Python

SEEDS = range(40)


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
    similarities = [[round(1024 * rng.uniform(-1, 1)) / 1024 for _ in range(k)] for _ in "ge"]
    r, tau, c_delta = rng.choice([-1, 1]), rng.choice([0.5, 1.0, 2.0]), rng.choice([1.0, 3.0])
    return similarities, teachers, student, mask, r, tau, c_delta, rng.choice([0.0, 0.05, 0.25])


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_function_equals_its_loop(seed, dtype, tol):
    (s_g, s_e), teachers, student, mask, r, tau, c_delta, eps_a = case(seed)
    s_g_K, s_e_K = torch.tensor(s_g, dtype=dtype), torch.tensor(s_e, dtype=dtype)
    logpT_KT, logpS_T = torch.tensor(teachers, dtype=dtype), torch.tensor(student, dtype=dtype)
    mask_T = torch.tensor(mask, dtype=dtype)
    alpha_K = sgsd.teacher_weights(s_g_K, s_e_K)
    delta_KT = sgsd.log_prob_gap(logpT_KT, logpS_T)
    plain_K = sgsd.plain_support(delta_KT)
    a_K = sgsd.robust_support(delta_KT, mask_T, c_delta)
    rho_K = sgsd.polarity(a_K, r, eps_a)
    lbar_K = sgsd.teacher_losses(delta_KT, mask_T, tau)
    credit_KT = sgsd.token_credit(delta_KT, mask_T, alpha_K, rho_K, tau)
    alphas, rhos, losses = plain.eq6(s_g, s_e), [], []
    same(alpha_K, alphas, tol)
    for k, teacher in enumerate(teachers):
        gaps_T = plain.eq7(teacher, student)
        a = plain.eq12(gaps_T, mask, c_delta)
        rhos.append(plain.eq13(a, r, eps_a))
        losses.append(plain.eq15(gaps_T, mask, tau))
        same(delta_KT[k], gaps_T, tol)
        same(plain_K[k], plain.eq8(gaps_T), tol)
        assert sgsd.polarity(plain_K, r, 0.0)[k] == plain.eq10(plain.eq8(gaps_T), r)
        same(a_K[k], a, tol)
        assert rho_K[k] == rhos[k]
        same(sgsd.gated_loss(delta_KT, tau)[k], [plain.eq14(gap, tau) for gap in gaps_T], tol)
        same(sgsd.gate_grad(delta_KT, tau)[k], [plain.eq17(gap, tau) for gap in gaps_T], tol)
        same(lbar_K[k], losses[k], tol)
        same(credit_KT[k], plain.eq20(gaps_T, mask, alphas[k], rhos[k], tau), tol)
    same(sgsd.sgsd_loss(lbar_K, alpha_K, rho_K), plain.eq16(alphas, rhos, losses), tol)
