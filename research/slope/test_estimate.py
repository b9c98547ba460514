"""The slope is unbiased: on a policy whose grad J is enumerated, and under truncated draws.

python -m pytest research/slope
"""

import math
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np
import pytest
import torch
from conftest import same, t

import rollout
from research.slope import estimate

# ------------------------------------------------------------------------------ hand-worked numbers


def test_a_rollout_weighs_its_outcome_minus_the_mean_of_the_others():
    # (1 - 1/3)/4 = 1/6 for a right one, (0 - 2/3)/4 = -1/6 for a wrong one
    same(estimate.contrast(t([1.0, 0.0, 0.0, 1.0])), [1 / 6, -1 / 6, -1 / 6, 1 / 6])
    # (1 - 1/4)/5 = 3/20 and (0 - 2/4)/5 = -1/10
    same(estimate.contrast(t([1.0, 1.0, 0.0, 0.0, 0.0])), [0.15, 0.15, -0.1, -0.1, -0.1])


def test_a_problem_without_both_outcomes_weighs_nothing():
    for all_alike in ([1.0, 1.0, 1.0], [0.0, 0.0]):
        same(estimate.contrast(t(all_alike)), [0.0] * len(all_alike))


def test_each_problem_is_measured_along_the_other_halfs_direction():
    # One row of two directions; from problems 0 and 2, and from problem 1.
    directions = [[t([[1.0, 0.0], [2.0, 0.0]])], [t([[0.0, 1.0], [0.0, 2.0]])]]
    parts = {0: t([3.0, 5.0]), 1: t([7.0, 11.0]), 2: None}
    slopes_2N = estimate.problem_slopes([[0, 2], [1]], directions, parts.__getitem__)
    assert slopes_2N.tolist() == [[5.0, 7.0, 0.0], [10.0, 14.0, 0.0]]


def test_the_interval_of_equal_slopes_is_a_point():
    assert estimate.interval([np.array([2.0, 2.0]), np.array([2.0])]) == (2.0, 2.0, 2.0, 0.0)


# ------------------------------------------------------------------ a policy that can be enumerated

TYPES, WORDS = 12, 3


class Toy:
    """Twelve problems, solutions of two words out of three, P = 12 shared weights; all exact."""

    def __init__(self, seed=0, bias=0.0):
        rng = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=rng, dtype=torch.float64)

        first, second = normal(TYPES, WORDS, WORDS), normal(TYPES, WORDS, WORDS, WORDS)
        weights = normal(WORDS + WORDS * WORDS).requires_grad_()
        one = torch.einsum("xvw,w->xv", first, weights[:WORDS]).log_softmax(-1)
        square = weights[WORDS:].view(WORDS, WORDS)
        two = torch.einsum("xavw,aw->xav", second, square).log_softmax(-1)
        logp_XY = (one[:, :, None] + two).flatten(1)
        self.p_XY = logp_XY.exp().detach()
        scores = []
        for logp in logp_XY.flatten():
            scores.append(torch.autograd.grad(logp, weights, retain_graph=True)[0])
        self.score_XYP = torch.stack(scores).view(TYPES, WORDS * WORDS, -1)
        self.right_XY = (normal(TYPES, WORDS * WORDS) > bias).double()
        part_XP = torch.einsum("xy,xy,xyp->xp", self.p_XY, self.right_XY, self.score_XYP)
        self.part_XP, self.grad_P = part_XP, part_XP.mean(0)

    def draw(self, problems, samples, seed):
        """(types [n], solutions [n, G]) of problems drawn with replacement."""
        rng = torch.Generator().manual_seed(seed)
        x_n = torch.randint(TYPES, (problems,), generator=rng)
        return x_n, torch.multinomial(self.p_XY[x_n], samples, True, generator=rng)

    def ascent(self, x, y_G):
        w_G = estimate.contrast(self.right_XY[x, y_G])
        return w_G @ self.score_XYP[x, y_G] if w_G.any() else None

    def sampled(self, x_n, y_nG, half):
        """A method's noisy direction: the mean over a half of the sampled ascent."""
        parts = [self.ascent(x_n[i], y_nG[i]) for i in half]
        zero = torch.zeros_like(self.grad_P)
        return torch.stack([zero if g is None else g for g in parts]).mean(0)[None]


def halves_of(n):
    return [list(range(0, n, 2)), list(range(1, n, 2))]


def slopes_of(toy, x_n, y_nG, halves, directions):
    """The problems' slopes, by half."""
    used = [[u_1P] for u_1P in directions]
    slopes_1N = estimate.problem_slopes(halves, used, lambda i: toy.ascent(x_n[i], y_nG[i]))
    return [slopes_1N[0][half] for half in halves]


def one_probe(toy, seed, problems=16, samples=3, same_half=False, direction="sampled"):
    """(slope, low, high, the exact slope of the same directions).

    direction: the sampled ascent itself, as GRPO's; or other rollouts' of other problems.
    """
    x_n, y_nG = toy.draw(problems, samples, seed)
    halves = halves_of(problems)
    source = (x_n, y_nG) if direction == "sampled" else toy.draw(problems, samples, seed + 10**6)
    directions = [toy.sampled(*source, half) for half in halves]
    used = directions[::-1] if same_half else directions
    mean, low, high, _ = estimate.interval(slopes_of(toy, x_n, y_nG, halves, used), 500)
    return mean, low, high, float(toy.grad_P @ torch.cat(directions).mean(0))


def z_of(differences):
    x = np.array(differences)
    return x.mean() / (x.std() / math.sqrt(len(x)))


def test_the_covariance_is_the_gradient_of_the_success_rate():
    """Over all pairs of solutions, weighed by their probability, the estimate is exact."""
    toy = Toy()
    for x in range(TYPES):
        mean = torch.zeros_like(toy.grad_P)
        for a in range(WORDS * WORDS):
            for b in range(WORDS * WORDS):
                g = toy.ascent(x, torch.tensor([a, b]))
                mean += 0 if g is None else toy.p_XY[x, a] * toy.p_XY[x, b] * g
        same(mean, toy.part_XP[x], 1e-12)


def test_the_mean_of_the_estimate_is_the_slope():
    toy = Toy()
    probes = [one_probe(toy, seed) for seed in range(200)]
    assert abs(z_of([mean - exact for mean, _, _, exact in probes])) < 3.5


def test_without_halves_the_estimate_is_too_high():
    toy = Toy()
    probes = [one_probe(toy, seed, same_half=True) for seed in range(100)]
    excess = [mean - exact for mean, _, _, exact in probes]
    assert z_of(excess) > 10
    assert np.mean(excess) > np.mean([exact for *_, exact in probes])  # more bias than slope here


@pytest.mark.parametrize(
    "direction, problems, bias", [("sampled", 80, 1.2), ("independent", 24, 0.0)]
)
def test_the_interval_covers_the_slope_of_its_directions(problems, bias, direction):
    toy, covered = Toy(bias=bias), []
    for seed in range(150):
        _, low, high, exact = one_probe(toy, seed, problems, 4, direction=direction)
        covered.append(low <= exact <= high)
    assert np.mean(covered) >= 0.9


# ------------------------------------------------------------------------ tempered, truncated draws


@pytest.mark.parametrize("top_p, top_k", [(0.8, 0), (1.0, 3), (0.7, 5), (1.0, 0)])
def test_the_allowed_ids_are_those_that_can_be_drawn(top_p, top_k):
    torch.manual_seed(0)
    logits_nV = 2 * torch.randn(6, 9)
    logits_nV[-1, :6] = 3.0  # equal logits stay or go together
    sampling = rollout.Sampling(0.7, top_p, top_k)
    allowed_nV = estimate.allowed(logits_nV / sampling.temperature, sampling)
    u_B = torch.linspace(0, 1 - 1e-9, 40_000, dtype=torch.float64)
    for logits_V, allowed_V in zip(logits_nV, allowed_nV):
        drawn = rollout.select_tokens(logits_V.expand(len(u_B), -1), u_B, sampling)
        assert sorted(drawn.unique().tolist()) == allowed_V.nonzero()[:, 0].tolist()


def test_the_score_of_truncated_draws_has_mean_zero():
    """It would not with the log-probability of the whole vocabulary."""
    torch.manual_seed(1)
    logits_V = torch.randn(7, requires_grad=True)
    sampling = rollout.Sampling(1.0, 0.8, 5)
    ids = estimate.allowed(logits_V.detach()[None], sampling)[0].nonzero()[:, 0]
    logq_n = estimate.drawn_logprob(sampling, ids, logits_V.expand(len(ids), -1))
    q_n = logq_n.exp().detach()
    assert float(q_n.sum()) == pytest.approx(1, abs=1e-6) and len(ids) < 6
    mean = torch.autograd.grad((q_n * logq_n).sum(), logits_V)[0]
    assert float(mean.abs().max()) < 1e-6
    plain = torch.autograd.grad((q_n * logits_V.log_softmax(-1)[ids]).sum(), logits_V)[0]
    assert float(plain.abs().max()) > 0.01


def test_a_drawn_id_beyond_a_threshold_counts_as_allowed():
    logits_nV = torch.tensor([[5.0, 4.0, -9.0]])
    logq_n = estimate.drawn_logprob(rollout.Sampling(1.0, 1.0, 2), torch.tensor([2]), logits_nV)
    same(logq_n, logits_nV.log_softmax(-1)[:, 2], 1e-6)
