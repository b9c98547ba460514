"""What a support can be: the claims of README.md on toy worlds, enumerated and not sampled.

    python -m pytest research/bound

A world is a student and a teacher over a small vocabulary, each with a distribution of its own
after every prefix. Every sequence is listed with its probability, so that a probability here is a
sum, and the only error is that of float64.
"""

import itertools
import math
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import pytest
import torch

import sgsd

VOCABULARY, LENGTH = 3, 5
PREFIXES = [p for n in range(LENGTH) for p in itertools.product(range(VOCABULARY), repeat=n)]
SEQUENCES = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
PLACE = {prefix: i for i, prefix in enumerate(PREFIXES)}
AT_NT = torch.tensor([[PLACE[y[:i]] for i in range(LENGTH)] for y in SEQUENCES])
TOKEN_NT = torch.tensor(SEQUENCES)
EPS_A = (0.0, 0.02, 0.1, 0.3, 0.7)


def t(x):
    return torch.tensor(x, dtype=torch.float64)


def speaker(seed, sharpness=1.0):
    """A distribution over the next token after every prefix. [prefixes, VOCABULARY]"""
    torch.manual_seed(seed)
    logits = sharpness * torch.randn(len(PREFIXES), VOCABULARY, dtype=torch.float64)
    return logits.softmax(1)


def log_probs(model):
    """log p of each token of each sequence. [N, T]"""
    return model[AT_NT, TOKEN_NT].log()


def probability(model):
    """Of each sequence. [N]"""
    return log_probs(model).sum(1).exp()


def succeeds(y):
    """A verdict that depends on the whole sequence: its sum leaves 0 when divided by 4."""
    return sum(y) % 4 == 0


def fails(y):
    return not succeeds(y)


def knowing(student, event):
    """The student's own distribution, given that the sequence will be in the event."""
    reach = {y: float(event(y)) for y in SEQUENCES}  # the event's probability after each prefix
    model = student.clone()
    for prefix in reversed(PREFIXES):
        joint = torch.stack([p * reach[(*prefix, i)] for i, p in enumerate(student[PLACE[prefix]])])
        reach[prefix] = float(joint.sum())
        if reach[prefix] > 0:
            model[PLACE[prefix]] = joint / joint.sum()
    return model


STUDENT = speaker(0)
P = probability(STUDENT)
SUCCESS = torch.tensor([succeeds(y) for y in SEQUENCES])
TEACHERS = {
    "another": speaker(1),
    "a near one": 0.8 * STUDENT + 0.2 * speaker(2),
    "a sharp one": speaker(3, 4.0),
    "one that knows what succeeds": knowing(STUDENT, succeeds),
    "one that knows what fails": knowing(STUDENT, fails),
    "the student": STUDENT,
}
every_teacher = pytest.mark.parametrize("name", TEACHERS)


def gaps(name):
    """Of every sequence: [N, T], one row in the place of each of the K teachers."""
    return log_probs(TEACHERS[name]) - log_probs(STUDENT)


def exponent(c_delta):
    """lambda: the largest root of 1 - x = exp(-c_delta x). It is 0 at c_delta = 1, .94 at 3."""
    x = 1.0
    for _ in range(2000):
        x = 1 - math.exp(-c_delta * x)
    return x


def supports(delta_NT, masks_NT, c_delta):
    """ã of each sequence under its own mask. [N]"""
    a_N = torch.zeros(len(delta_NT), dtype=torch.float64)
    for mask_T in masks_NT.unique(dim=0):
        mine = (masks_NT == mask_T).all(1)
        a_N[mine] = sgsd.robust_support(delta_NT[mine], mask_T, c_delta)
    return a_N


# ------------------------------------------------------------------ the plain support, y from p_S


@every_teacher
def test_the_likelihood_ratio_has_mean_one_at_most_and_so_supports_are_rare(name):
    delta_NT = gaps(name)
    assert float((P * delta_NT.sum(1).exp()).sum()) <= 1 + 1e-12
    a_N = sgsd.plain_support(delta_NT)
    for eps_a in EPS_A:
        assert float(P[a_N > eps_a].sum()) <= math.exp(-eps_a * LENGTH) + 1e-12


@every_teacher
def test_on_successes_and_on_failures_the_mean_support_is_bounded_by_their_rarity(name):
    """By log(P_T / P_S) of the outcome over T, which is -log P_S / T at most; so is its tail."""
    a_N = sgsd.plain_support(gaps(name))
    P_T = probability(TEACHERS[name])
    for outcome in (SUCCESS, ~SUCCESS):
        mine, its = float(P[outcome].sum()), float(P_T[outcome].sum())
        mean = float((P * a_N)[outcome].sum()) / mine
        assert mean <= (math.log(its / mine) / LENGTH if its else -math.inf) + 1e-12
        assert mean <= -math.log(mine) / LENGTH + 1e-12
        for eps_a in EPS_A:
            share = float(P[outcome & (a_N > eps_a)].sum()) / mine
            assert share <= its / mine * math.exp(-eps_a * LENGTH) + 1e-12


def test_no_teacher_supports_successes_more_than_one_that_knows_them_all():
    """It has -log P(success) / T on every success: the bound is reached."""
    a_N = sgsd.plain_support(gaps("one that knows what succeeds"))
    want = -math.log(float(P[SUCCESS].sum())) / LENGTH
    assert torch.allclose(a_N[SUCCESS], torch.full_like(a_N[SUCCESS], want))
    assert -math.log(0.25) / 400 == pytest.approx(0.0035, abs=5e-5)  # at 25% and 400 tokens


@every_teacher
def test_without_a_threshold_supports_are_as_rare_as_the_two_are_different(name):
    """P(a > 0) <= E_S sqrt(p_T / p_S), a sum that two unlike speakers make small."""
    delta_NT = gaps(name)
    affinity = float((P * (delta_NT.sum(1) / 2).exp()).sum())
    a_N = sgsd.plain_support(delta_NT)
    assert float(P[a_N > 0].sum()) <= affinity + 1e-12
    for eps_a in EPS_A:
        bound = affinity * math.exp(-eps_a * LENGTH / 2)
        assert float(P[a_N > eps_a].sum()) <= bound + 1e-12


def test_with_lengths_that_differ_the_bound_is_of_length_and_support_together():
    """The student stops with .9 after each token and is cut after 4; the teacher never stops.

    So a completion that was cut is supported for certain, and all others are as far from it as can
    be: the bound holds for "cut and supported", and not among those that were cut.
    """
    eps_a, limit = 1.0, 4
    p_cut = 0.1**limit
    delta_1T = t([[math.log(1.0 / 0.1)] * limit])
    assert float(sgsd.plain_support(delta_1T)) > eps_a
    assert p_cut < math.exp(-eps_a * limit) < 1


# ------------------------------------------------------------------------ the clipped support


@pytest.mark.parametrize("c_delta", [1.0, 1.5, 3.0, 10.0])
def test_clipping_at_one_or_more_leaves_the_mean_gap_below_zero(c_delta):
    """clip(x) <= exp(x) - 1 for every x, and the mean of the right side is 0 at most."""
    x = torch.linspace(-30, 30, 200_001, dtype=torch.float64)
    assert bool((x.clamp(-c_delta, c_delta) <= torch.expm1(x) + 1e-12).all())
    for name in TEACHERS:
        a_N = sgsd.robust_support(gaps(name), t([1.0] * LENGTH), c_delta)
        assert float((P * a_N).sum()) <= 1e-12


def test_clipping_below_one_can_lift_the_mean_gap_above_zero():
    """The student is wrong with .1, and the teacher never: +.105 nine times, -c once."""
    for c_delta, sign in ((0.5, 1), (1.0, -1)):
        delta_12 = t([[math.log(1 / 0.9), -math.inf]])
        mean = float((t([0.9, 0.1]) * delta_12.clamp(-c_delta, c_delta)).sum())
        assert math.copysign(1, mean) == sign


@pytest.mark.parametrize("c_delta", [1.2, 2.0, 3.0])
@every_teacher
def test_clipped_supports_are_rare_with_an_exponent_a_little_below_one(name, c_delta):
    """P(ã > eps) <= exp(-lambda eps T), since exp(lambda clip(x)) <= 1 + lambda (exp(x) - 1)."""
    power = exponent(c_delta)
    x = torch.linspace(-30, 30, 200_001, dtype=torch.float64)
    left = (power * x.clamp(-c_delta, c_delta)).exp()
    assert bool((left <= 1 + power * torch.expm1(x) + 1e-12).all())
    a_N = sgsd.robust_support(gaps(name), t([1.0] * LENGTH), c_delta)
    for eps_a in EPS_A:
        assert float(P[a_N > eps_a].sum()) <= math.exp(-power * eps_a * LENGTH) + 1e-12


def test_the_exponent_at_the_papers_bound_is_nearly_one():
    assert exponent(3.0) == pytest.approx(0.9405, abs=1e-4)
    assert exponent(1.0) < 2e-3  # at 1 there is no tail left, only the mean


def test_for_clipped_supports_the_exponent_one_is_too_much():
    """14 fair coins; the teacher gives one side nothing, and the bound of 2 forgives it once."""
    tokens, c_delta = 14, 2.0
    up = math.log(2)
    a_N = [((tokens - bad) * up - bad * c_delta) / tokens for bad in range(tokens + 1)]
    p_N = [math.comb(tokens, bad) / 2**tokens for bad in range(tokens + 1)]
    eps_a = a_N[1] - 1e-9
    share = sum(p for a, p in zip(a_N, p_N) if a > eps_a)
    assert math.exp(-eps_a * tokens) < share <= math.exp(-exponent(c_delta) * eps_a * tokens)


# -------------------------------------------------------------------------------- the token mask


def by_prefix(y):
    """A mask that is settled before the token is drawn: all tokens after a 2 are left out."""
    return [float(i == 0 or y[i - 1] != 2) for i in range(LENGTH)]


def by_token(y):
    """The method's mask (S2): a set of ids that never count, here the 2."""
    return [float(token != 2) for token in y]


def masks(of):
    return torch.tensor([of(y) for y in SEQUENCES])


@every_teacher
def test_a_mask_that_is_settled_before_its_token_keeps_the_bound(name):
    delta_NT, masks_NT, c_delta = gaps(name), masks(by_prefix), 3.0
    a_N, count_N = supports(delta_NT, masks_NT, c_delta), masks_NT.sum(1)
    for eps_a, least in itertools.product(EPS_A, (1, 3, 5)):
        share = float(P[(a_N > eps_a) & (count_N >= least)].sum())
        assert share <= math.exp(-exponent(c_delta) * eps_a * least) + 1e-12


def test_a_mask_by_the_token_itself_can_break_the_bound():
    """Line breaks are half of the student's tokens and a tenth of the teacher's: every other token
    has the gap log(.9 / .5) = .59, and every completion that has one is supported."""
    p_S, p_T, tokens = {"\n": 0.5, "x": 0.5}, {"\n": 0.1, "x": 0.9}, 10
    supported = plain = 0.0
    eps_a = 0.5
    for y in itertools.product(p_S, repeat=tokens):
        p = 0.5**tokens
        delta_1T = t([[math.log(p_T[token] / p_S[token]) for token in y]])
        mask_T = t([float(token != "\n") for token in y])
        supported += p * bool(sgsd.robust_support(delta_1T, mask_T, 3.0)[0] > eps_a)
        plain += p * bool(sgsd.plain_support(delta_1T)[0] > eps_a)
    assert supported == 1 - 0.5**tokens  # far above exp(-5) = .0067
    assert plain <= math.exp(-eps_a * tokens)


def lifts(teacher, sampler, counted):
    """beta of each token: how much of its gap is no support of it. [N, T]; counted: ids.

    log of what the teacher gives all counted tokens over what the sampler gives them, and log of
    what the sampler gives this token over what the student gives it.
    """
    all_counted = (teacher[:, counted].sum(1) / sampler[:, counted].sum(1)).log()
    return all_counted[AT_NT] + log_probs(sampler) - log_probs(STUDENT)


def holds_beyond_the_lift(name, sampler):
    """P(ã > eps + mean of beta+, n tokens or more count) <= exp(-lambda eps n), y from sampler."""
    q_N, masks_NT, c_delta = probability(sampler), masks(by_token), 3.0
    beta_NT = lifts(TEACHERS[name], sampler, counted=[0, 1]).clamp(min=0)
    lift_N = torch.where(masks_NT.bool(), beta_NT, 0).sum(1) / masks_NT.sum(1)
    a_N = supports(gaps(name), masks_NT, c_delta)
    for eps_a, least in itertools.product(EPS_A, (1, 3, 5)):
        counts = (q_N > 0) & (masks_NT.sum(1) >= least)
        share = float(q_N[counts & (a_N > eps_a + lift_N)].sum())
        assert share <= math.exp(-exponent(c_delta) * eps_a * least) + 1e-12


@every_teacher
def test_with_a_mask_by_the_token_the_bound_holds_beyond_what_the_masked_tokens_give(name):
    """beta = log P_T(unmasked) - log P_S(unmasked), which is at most -log P_S(unmasked)."""
    holds_beyond_the_lift(name, STUDENT)


# ------------------------------------------------------ the sampler that is not the student's p_S


def sampled(temperature, top_p):
    """The student's distribution after temperature and nucleus (Tab. 11). [prefixes, V]"""
    warm = STUDENT ** (1 / temperature)
    warm = warm / warm.sum(1, keepdim=True)
    top, order = warm.sort(dim=1, descending=True)
    top = top * (top.cumsum(1) - top < top_p)
    q = torch.zeros_like(warm).scatter(1, order, top)
    return q / q.sum(1, keepdim=True)


def divergence(p, q):
    """KL(p || q) where p is above 0."""
    return float((p * (p.log() - q.log())).nan_to_num(nan=0.0, neginf=0.0).sum())


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (1.0, 0.6), (1.1, 0.95), (2.0, 0.8)])
def test_the_mean_gap_under_a_sampler_is_a_difference_of_two_divergences(temperature, top_p):
    """E_q[Delta] = KL(q || p_S) - KL(q || p_T), at every token."""
    for q, p_S, p_T in zip(sampled(temperature, top_p), STUDENT, TEACHERS["another"]):
        mean = float((q * (p_T.log() - p_S.log())).sum())
        assert mean == pytest.approx(divergence(q, p_S) - divergence(q, p_T), abs=1e-12)
        if (temperature, top_p) == (1.0, 1.0):
            assert mean <= 1e-12  # minus KL(p_S || p_T)


@pytest.mark.parametrize("top_p", [0.6, 0.95])
def test_a_nucleus_adds_minus_log_top_p_to_a_gap_at_most(top_p):
    """The gap that it adds is log(q / p_S), the same for each token that can be drawn."""
    for q, p_S in zip(sampled(1.0, top_p), STUDENT):
        added = (q.log() - p_S.log())[q > 0]
        assert float(added.max()) <= -math.log(top_p) + 1e-12
        assert float(added.max() - added.min()) < 1e-12
    assert -math.log(0.95) == pytest.approx(0.0513, abs=5e-5)


def test_the_papers_nucleus_alone_can_lift_every_support_above_the_papers_threshold():
    """A student with .95 on one token, drawn always, and a teacher that is sure of it."""
    tokens = 400
    delta_1T = torch.full((1, tokens), math.log(1 / 0.95), dtype=torch.float64)
    a_K = sgsd.robust_support(delta_1T, torch.ones(tokens), 3.0)
    assert sgsd.polarity(a_K, 1, 0.05).tolist() == [1]


@pytest.mark.parametrize("temperature, top_p", [(1.0, 0.6), (1.1, 0.95), (2.0, 0.8)])
@every_teacher
def test_under_any_sampler_and_mask_the_bound_holds_beyond_the_lift(name, temperature, top_p):
    """The theorem of the page in full."""
    holds_beyond_the_lift(name, sampled(temperature, top_p))


@every_teacher
def test_truncation_lifts_only_as_far_as_the_teacher_prefers_what_can_be_drawn(name):
    """Without a mask, beta = log of the nucleus's probability under the teacher over p_S's.

    E_q exp(sum of Delta - beta) is 1 at most. So where both leave out equally much, nothing is
    lifted.
    """
    q = sampled(1.0, 0.6)
    nucleus, teacher = q > 0, TEACHERS[name]
    beta = ((teacher * nucleus).sum(1) / (STUDENT * nucleus).sum(1)).log()
    assert float(beta.max()) <= -math.log(0.6) + 1e-12
    ratio_N = (gaps(name) - beta[AT_NT]).sum(1).exp()
    assert float((probability(q) * ratio_N)[probability(q) > 0].nan_to_num(0).sum()) <= 1 + 1e-12


# --------------------------------------------------------------------- what it does to the credit


def test_below_zero_the_polarity_is_minus_the_verdict_and_the_credit_follows_the_dislike():
    """With ã < -eps_a: on a success what the teacher likes more is pushed down, on a failure up."""
    delta_KT = t([[-2.0, 0.5, -0.3]])
    mask_T, alpha_K = t([1.0, 1.0, 1.0]), t([1.0])
    a_K = sgsd.robust_support(delta_KT, mask_T, 3.0)
    for r in (1, -1):
        rho_K = sgsd.polarity(a_K, r, 0.05)
        assert rho_K.tolist() == [-r]
        w_KT = sgsd.token_credit(delta_KT, mask_T, alpha_K, rho_K, 1.0)
        assert (w_KT.sign() * r).tolist() == [[1, -1, 1]]
