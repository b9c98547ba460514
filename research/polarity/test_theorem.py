"""What a support can be: the bound of research/bound.md and its edges, enumerated and not sampled.

    python -m pytest research/polarity

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

VOCABULARY, LENGTH, C_DELTA = 3, 5, 3.0
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


STUDENT = speaker(0)
TEACHERS = {
    "another": speaker(1),
    "a near one": 0.8 * STUDENT + 0.2 * speaker(2),
    "a sharp one": speaker(3, 4.0),
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


# ------------------------------------------------------------------------------------- the bound


@every_teacher
def test_on_the_students_own_samples_a_support_above_the_threshold_is_rare(name):
    """P(a > eps) <= exp(-eps T), since the likelihood ratio has mean one at most."""
    P_N, delta_NT = probability(STUDENT), gaps(name)
    assert float((P_N * delta_NT.sum(1).exp()).sum()) <= 1 + 1e-12
    a_N = sgsd.plain_support(delta_NT)
    for eps_a in EPS_A:
        assert float(P_N[a_N > eps_a].sum()) <= math.exp(-eps_a * LENGTH) + 1e-12


def sampled(temperature, top_p):
    """The student's distribution after temperature and nucleus (Tab. 11). [prefixes, V]"""
    warm = STUDENT ** (1 / temperature)
    warm = warm / warm.sum(1, keepdim=True)
    top, order = warm.sort(dim=1, descending=True)
    top = top * (top.cumsum(1) - top < top_p)
    q = torch.zeros_like(warm).scatter(1, order, top)
    return q / q.sum(1, keepdim=True)


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (1.0, 0.6), (1.1, 0.95), (2.0, 0.8)])
@every_teacher
def test_under_any_sampler_mask_and_clip_it_holds_beyond_the_lift(name, temperature, top_p):
    """P(ã > eps + mean of beta+ and n tokens or more count) <= exp(-lambda eps n): all of it.

    y comes from any sampler q; the mask is settled by the prefix and the token itself; U are the
    ids that can count, and beta_t = log [P_T(U) / q(U)] + log [q(y_t) / p_S(y_t)].

    Proof. For c_delta > 1 and every gap d, exp(lambda clip(d)) <= 1 - lambda + lambda e^d: from
    -c_delta on by convexity, below it by the choice of lambda. d0 = d - beta is log p_T(y|U) -
    log q(y|U). So the mean of exp(lambda m clip(d0)), m the mask, given the prefix is at most
    q(not U) + q(U) (1 - lambda + lambda) = 1, and the product over t has a mean of at most 1.
    Since clip(d) <= clip(d0) + beta+, Markov's inequality ends it.

    The mask is the method's (S2): a set of ids that never count, here the 2.
    """
    sampler, counted = sampled(temperature, top_p), [0, 1]
    q_N, mask_NT = probability(sampler), (TOKEN_NT != 2).double()
    beta = (TEACHERS[name][:, counted].sum(1) / sampler[:, counted].sum(1)).log()
    beta_NT = beta[AT_NT] + log_probs(sampler) - log_probs(STUDENT)
    lift_N = torch.where(mask_NT.bool(), beta_NT.clamp(min=0), 0).sum(1) / mask_NT.sum(1)
    a_N = torch.zeros_like(q_N)
    for mask_T in mask_NT.unique(dim=0):
        mine = (mask_NT == mask_T).all(1)
        a_N[mine] = sgsd.robust_support(gaps(name)[mine], mask_T, C_DELTA)
    for eps_a, least in itertools.product(EPS_A, (1, 3, 5)):
        counts = (q_N > 0) & (mask_NT.sum(1) >= least)
        share = float(q_N[counts & (a_N > eps_a + lift_N)].sum())
        assert share <= math.exp(-exponent(C_DELTA) * eps_a * least) + 1e-12


# -------------------------------------------------------------------------------------- its edges


def test_for_clipped_supports_the_exponent_one_is_too_much():
    """14 fair coins; the teacher gives one side nothing, and the bound of 2 forgives it once."""
    assert exponent(3.0) == pytest.approx(0.9405, abs=1e-4)
    tokens, c_delta = 14, 2.0
    up = math.log(2)
    a_N = [((tokens - bad) * up - bad * c_delta) / tokens for bad in range(tokens + 1)]
    p_N = [math.comb(tokens, bad) / 2**tokens for bad in range(tokens + 1)]
    eps_a = a_N[1] - 1e-9
    share = sum(p for a, p in zip(a_N, p_N) if a > eps_a)
    assert math.exp(-eps_a * tokens) < share <= math.exp(-exponent(c_delta) * eps_a * tokens)


def test_a_mask_by_the_token_itself_can_break_the_bound():
    """Line breaks are half of the student's tokens and a tenth of the teacher's: every other token
    has the gap log(.9 / .5) = .59, and every completion that has one is supported."""
    delta_T = t([math.log(0.1 / 0.5), math.log(0.9 / 0.5)])  # of a line break, of any other
    tokens, eps_a, supported = 10, 0.5, 0.0
    for y in itertools.product((0, 1), repeat=tokens):
        y_T = torch.tensor(y)
        supported += bool(sgsd.robust_support(delta_T[y_T][None], y_T.double(), C_DELTA) > eps_a)
    assert supported / 2**tokens == 1 - 0.5**tokens  # far above exp(-5) = .0067


def test_the_papers_nucleus_alone_can_lift_every_support_above_the_papers_threshold():
    """A student with .95 on one token, drawn always, and a teacher that is sure of it."""
    tokens = 400
    delta_1T = torch.full((1, tokens), math.log(1 / 0.95), dtype=torch.float64)
    a_K = sgsd.robust_support(delta_1T, torch.ones(tokens), C_DELTA)
    assert sgsd.polarity(a_K, 1, 0.05).tolist() == [1]
