"""The objective, one test per equation of the paper: numbers small enough to check by hand, and every refusal with its reason."""

import builtins
import pathlib
import re
from math import e, inf, log, nan, sqrt

import pytest
import torch

import sgsd

CONTRACT = [
    "teacher_weights",
    "log_prob_gap",
    "plain_support",
    "outcome_sign",
    "token_mask",
    "robust_support",
    "polarity",
    "gated_loss",
    "gate_grad",
    "teacher_losses",
    "sgsd_loss",
    "token_credit",
]


def t(x):
    return torch.tensor(x, dtype=torch.float64)


def same(got, want, tol=1e-12):
    torch.testing.assert_close(got, t(want), rtol=tol, atol=tol)


# ---------------------------------------------------------------------------------------------------- Eqs. 6-10: teachers and plain polarity


def test_eq6_teacher_weights():
    # s_1 = (log 2 + log 8) / 2 = log 4, s_2 = (1 - 1) / 2 = 0; exp: 4 and 1; alpha = 4/5, 1/5
    same(sgsd.teacher_weights(t([log(2), 1.0]), t([log(8), -1.0])), [4 / 5, 1 / 5])
    # equal similarities: 1/K each; a single teacher: 1
    same(sgsd.teacher_weights(t([0.3, 0.3, 0.3, 0.3]), t([0.7, 0.7, 0.7, 0.7])), [0.25] * 4)
    same(sgsd.teacher_weights(t([-0.9]), t([0.1])), [1.0])


def test_eq7_log_prob_gap():
    # the teacher gives the two tokens 1/2 and 1/4, the student 1/4 and 1/2: log 2 (supported) and -log 2 (suppressed)
    logpT_KT = t([[log(1 / 2), log(1 / 4)], [log(1 / 4), log(1 / 2)]])
    logpS_T = t([log(1 / 4), log(1 / 2)])
    same(sgsd.log_prob_gap(logpT_KT, logpS_T), [[log(2), -log(2)], [0.0, 0.0]])


def test_eq8_plain_support():
    # (1 + 2 - 6) / 3 = -1; (3 + 0 + 0) / 3 = 1; over all T, no mask, no clip
    same(sgsd.plain_support(t([[1.0, 2.0, -6.0], [3.0, 0.0, 0.0]])), [-1.0, 1.0])


def test_eq9_outcome_sign():
    assert sgsd.outcome_sign(1) == sgsd.outcome_sign(1.0) == 1
    assert sgsd.outcome_sign(-1) == sgsd.outcome_sign(-1.0) == -1


def test_eq10_plain_polarity():
    # Eq. 10 is Eq. 13 on the plain support with eps_a = 0: sgn_out(r) sgn(a_k), sgn(0) = 0
    a_K = sgsd.plain_support(t([[1.0, 2.0], [1.0, -2.0], [1.0, -1.0]]))  # 1.5, -0.5, 0
    same(sgsd.polarity(a_K, 1, 0.0), [1.0, -1.0, 0.0])
    same(sgsd.polarity(a_K, -1, 0.0), [-1.0, 1.0, 0.0])


@pytest.mark.parametrize(
    ("r", "a", "rho"),
    [
        (+1, +0.5, +1),  # helpful: supports a success, distilled
        (-1, -0.5, +1),  # warning: suppresses a failure, distilled
        (+1, -0.5, -1),  # over-suppressive: suppresses a success, reversed
        (-1, +0.5, -1),  # misleading: supports a failure, reversed
    ],
)
def test_the_four_cases_of_the_polarity_table(r, a, rho):
    same(sgsd.polarity(t([a]), r, 0.05), [float(rho)])


# -------------------------------------------------------------------------------------------------------- Eqs. 11-13: mask, clip, threshold


def test_token_mask():
    same(sgsd.token_mask([5, 7, 5, 9], {7, 9}).double(), [1.0, 0.0, 1.0, 0.0])
    same(sgsd.token_mask(torch.tensor([5, 7]), frozenset()).double(), [1.0, 1.0])
    assert sgsd.token_mask([5], [7]).dtype == torch.float32


def test_eq11_clip():
    # one token, so the support is the clipped gap (eps = 0): 9 -> 3, -9 -> -3, the rest as it is
    same(
        sgsd.robust_support(t([[9.0], [-9.0], [2.5], [-2.5], [3.0], [0.0]]), t([1]), 3.0, eps=0.0),
        [3.0, -3.0, 2.5, -2.5, 3.0, 0.0],
    )


def test_eq12_robust_support():
    delta_KT, mask_T = t([[1.0, 10.0, -2.0, 100.0], [-1.0, -1.0, -10.0, 0.0]]), t([1, 1, 1, 0])
    # teacher 1: (1 + 3 - 2) / (3 + 1) = 0.5; teacher 2: (-1 - 1 - 3) / (3 + 1) = -1.25; the last token is masked; eps = 1
    same(sgsd.robust_support(delta_KT, mask_T, 3.0, eps=1.0), [0.5, -1.25])
    # eps = 1e-8: 2/3 and -5/3 but for one part in 10^8
    same(sgsd.robust_support(delta_KT, mask_T, 3.0), [2 / 3, -5 / 3], tol=1e-8)


def test_eq12_clipping_keeps_the_stance():
    # one outlier flips the plain support, (1 + 1 + 1 - 20) / 4 = -4.25, and not the robust one, (1 + 1 + 1 - 2) / 4 = 0.25
    delta_KT = t([[1.0, 1.0, 1.0, -20.0]])
    same(sgsd.plain_support(delta_KT), [-4.25])
    same(sgsd.robust_support(delta_KT, torch.ones(4), 2.0), [0.25], tol=1e-8)


def test_eq13_polarity():
    # eps_a = 0.05: 0.06 and -0.06 are confident, 0.04, -0.04 and 0 are not
    a_K = t([0.06, -0.06, 0.04, -0.04, 0.0])
    same(sgsd.polarity(a_K, 1, 0.05), [1.0, -1.0, 0.0, 0.0, 0.0])
    same(sgsd.polarity(a_K, -1, 0.05), [-1.0, 1.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eq13_threshold_is_strict(dtype):
    at = torch.tensor([0.05, -0.05], dtype=dtype)
    above = torch.nextafter(at, 2 * at)
    assert sgsd.polarity(at, 1, 0.05).tolist() == [0, 0]
    assert sgsd.polarity(above, 1, 0.05).tolist() == [1, -1]


def test_eq13_sgn_of_zero_is_zero():
    assert sgsd.polarity(t([0.0, -0.0]), 1, 0.0).tolist() == [0, 0]
    assert sgsd.polarity(t([1e-300, -1e-300]), 1, 0.0).tolist() == [1, -1]


# ------------------------------------------------------------------------------------------------ Eqs. 14-17, 20: gate, loss, gradient, credit

D3 = sqrt(2 * log(3))  # tau = 1: exp(-D3^2 / 2) = 1/3


def test_eq14_gated_loss():
    # exp(-D3^2/2) = 1/3: log 2 - log(4/3) = log(3/2)
    # delta = 1, tau = 1/2: exp(-1), log 2 - log(1 + 1/e) = 0.693147 - 0.313262 = 0.379885
    same(sgsd.gated_loss(t([0.0, D3, -D3]), 1.0), [0.0, log(3 / 2), log(3 / 2)])
    same(sgsd.gated_loss(t(1.0), 0.5), log(2) - log(1 + 1 / e))
    same(sgsd.gated_loss(t(1.0), 0.5), 0.379885, tol=1e-6)
    # it saturates: 100 nats cost log 2; tau is a width squared: twice the gap at four times tau costs the same
    same(sgsd.gated_loss(t([100.0, -100.0]), 1.0), [log(2), log(2)])
    same(sgsd.gated_loss(t(2 * D3), 4.0), log(3 / 2))


def test_eq15_teacher_losses():
    delta_KT, mask_T = t([[D3, 0.0, -D3, 50.0], [0.0, 0.0, 100.0, D3]]), t([1, 1, 1, 0])
    # teacher 1: (log 3/2 + 0 + log 3/2) / (3 + 1) = log(3/2) / 2; teacher 2: log 2 / (3 + 1); eps = 1, nothing clipped
    same(sgsd.teacher_losses(delta_KT, mask_T, 1.0, eps=1.0), [log(3 / 2) / 2, log(2) / 4])
    same(sgsd.teacher_losses(delta_KT, mask_T, 1.0), [log(3 / 2) * 2 / 3, log(2) / 3], tol=1e-8)


def test_eq16_sgsd_loss():
    # teachers lose log(3/2), log 2 and log(3/2); 0.5 * log(3/2) - 0.3 * log 2 + 0 = 0.202733 - 0.207944 = -0.005212
    delta_KT, alpha_K, rho_K = t([[D3], [100.0], [D3]]), t([0.5, 0.3, 0.2]), t([1.0, -1.0, 0.0])
    got = sgsd.sgsd_loss(delta_KT, t([1]), alpha_K, rho_K, 1.0, eps=0.0)
    assert got.shape == ()
    same(got, 0.5 * log(3 / 2) - 0.3 * log(2))
    same(got, -0.005212, tol=1e-6)


def test_eq17_gate_grad():
    # exp(D3^2/2) = 3: D3 / (1 + 3); delta = 1, tau = 1/2: 1 / (1/2 (1 + e)) = 2 / (1 + e) = 0.537883
    same(sgsd.gate_grad(t([0.0, D3, -D3]), 1.0), [0.0, D3 / 4, -D3 / 4])
    same(sgsd.gate_grad(t([1.0, -1.0]), 0.5), [2 / (1 + e), -2 / (1 + e)])
    # extreme gaps teach nothing: 3 / (1 + exp(4.5)) = 3 / 91.017 = 0.0330, and 0 at 100
    same(sgsd.gate_grad(t([3.0, 100.0]), 1.0), [0.0330, 0.0], tol=1e-4)


def test_eq20_token_credit():
    delta_KT, mask_T, alpha_K, rho_K = (
        t([[D3, -D3, 7.0], [D3, 0.0, 7.0], [D3, D3, D3]]),
        t([1, 1, 0]),
        t([0.5, 0.3, 0.2]),
        t([1.0, -1.0, 0.0]),
    )
    # Z = 2 + 2; g(D3) = D3 / 4; teacher 1: +0.5 / 4 * D3 / 4 = D3 / 32; teacher 2: -0.3 / 4 * D3 / 4 = -0.3 D3 / 16; masked and ignored: 0
    want = [[D3 / 32, -D3 / 32, 0.0], [-0.3 * D3 / 16, 0.0, 0.0], [0.0, 0.0, 0.0]]
    same(sgsd.token_credit(delta_KT, mask_T, alpha_K, rho_K, 1.0, eps=2.0), want)


# ------------------------------------------------------------------------------------------------------------------------- edges of the domain


def test_no_teachers():
    none, empty, mask_T = torch.empty(0), torch.empty(0, 3), torch.ones(3)
    assert sgsd.teacher_weights(none, none).shape == (0,)
    assert sgsd.log_prob_gap(empty, torch.zeros(3)).shape == (0, 3)
    assert sgsd.plain_support(empty).shape == (0,)
    assert sgsd.robust_support(empty, mask_T, 3.0).shape == (0,)
    assert sgsd.polarity(none, 1, 0.05).shape == (0,)
    assert sgsd.teacher_losses(empty, mask_T, 1.0).shape == (0,)
    assert sgsd.token_credit(empty, mask_T, none, none, 1.0).shape == (0, 3)
    assert sgsd.sgsd_loss(empty, mask_T, none, none, 1.0).item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_masked(dtype):
    delta_KT, mask_T, alpha_K = (
        torch.full((2, 3), 5.0, dtype=dtype),
        torch.zeros(3),
        torch.full((2,), 0.5),
    )
    a_K = sgsd.robust_support(delta_KT, mask_T, 3.0)
    assert a_K.tolist() == [0, 0]
    assert sgsd.polarity(a_K, 1, 0.0).tolist() == [0, 0]
    assert sgsd.teacher_losses(delta_KT, mask_T, 1.0).tolist() == [0, 0]
    assert sgsd.sgsd_loss(delta_KT, mask_T, alpha_K, torch.ones(2), 1.0).item() == 0
    assert not sgsd.token_credit(delta_KT, mask_T, alpha_K, torch.ones(2), 1.0).any()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.float64])
def test_a_mask_of_any_dtype(dtype):
    delta_KT, mask_T = t([[1.0, 2.0, 4.0]]), torch.tensor([1, 0, 1]).to(dtype)
    same(sgsd.robust_support(delta_KT, mask_T, 3.0, eps=0.0), [2.0])  # (1 + 3) / 2
    same(
        sgsd.teacher_losses(delta_KT, mask_T, 1.0),
        sgsd.teacher_losses(delta_KT[:, [0, 2]], torch.ones(2), 1.0).tolist(),
    )


# -------------------------------------------------------------------------------------------------- refusals: the place, the value and the rule


def refuses(call, *parts):
    with pytest.raises(ValueError) as err:
        call()
    for part in parts:
        assert part in str(err.value), f"{part!r} is not in {str(err.value)!r}"


@pytest.mark.parametrize("r", [0, 0.5, -0.5, 2, True, False, nan, inf, None, "1"])
def test_wrong_outcome(r):
    message = f"outcome r must be -1 or +1 (Eq. 9), got {r}; did the verifier return a 0/1 reward?"
    refuses(lambda: sgsd.outcome_sign(r), message)
    refuses(lambda: sgsd.polarity(t([0.5]), r, 0.05), message)


Z = torch.zeros
GAPS = {  # every function over gaps, as call(delta_KT, mask_T); plain_support has no mask
    "robust_support (Eq. 12)": lambda d, m: sgsd.robust_support(d, m, 3.0),
    "teacher_losses (Eq. 15)": lambda d, m: sgsd.teacher_losses(d, m, 1.0),
    "sgsd_loss (Eq. 16)": lambda d, m: sgsd.sgsd_loss(d, m, Z(2), Z(2), 1.0),
    "token_credit (Eq. 20)": lambda d, m: sgsd.token_credit(d, m, Z(2), Z(2), 1.0),
}


@pytest.mark.parametrize("place", GAPS)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_mask_of_another_length(place, n):
    refuses(lambda: GAPS[place](Z(2, 3), Z(n)), place, f"got ({n},)", "mask_T must be [T] = (3,)")


@pytest.mark.parametrize("place", GAPS)
def test_mask_of_another_rank(place):
    refuses(lambda: GAPS[place](Z(2, 3), Z(2, 3)), place, "got (2, 3)", "mask_T must be [T] = (3,)")


@pytest.mark.parametrize("place", GAPS)
@pytest.mark.parametrize("value", [2.0, -1.0, 0.5, nan])
def test_mask_of_other_values(place, value):
    refuses(
        lambda: GAPS[place](Z(2, 3), torch.tensor([0.0, 1.0, value])),
        place,
        str(value),
        "mask_T must hold only 0 and 1",
    )


@pytest.mark.parametrize("place", ["plain_support (Eq. 8)", *GAPS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_gaps_of_another_dtype(place, dtype):
    call = GAPS.get(place, lambda d, m: sgsd.plain_support(d))
    refuses(
        lambda: call(Z(2, 3, dtype=dtype), Z(3)),
        place,
        f"got {dtype}",
        "gaps must be float32 or float64",
    )


@pytest.mark.parametrize("place", ["plain_support (Eq. 8)", *GAPS])
@pytest.mark.parametrize("shape", [(3,), (1, 2, 3), ()])
def test_gaps_of_another_rank(place, shape):
    call = GAPS.get(place, lambda d, m: sgsd.plain_support(d))
    refuses(lambda: call(Z(shape), Z(3)), place, f"got {shape}", "delta_KT must be [K, T]")


@pytest.mark.parametrize(
    ("call", "place"),
    [(sgsd.sgsd_loss, "sgsd_loss (Eq. 16)"), (sgsd.token_credit, "token_credit (Eq. 20)")],
)
@pytest.mark.parametrize("wrong", [(3,), (1,), (), (2, 1)])
def test_weights_of_another_shape(call, place, wrong):
    refuses(
        lambda: call(Z(2, 3), Z(3), Z(wrong), Z(2), 1.0),
        place,
        f"got {wrong}",
        "alpha_K and rho_K must be [K] = (2,)",
    )
    refuses(
        lambda: call(Z(2, 3), Z(3), Z(2), Z(wrong), 1.0),
        place,
        f"got {wrong}",
        "alpha_K and rho_K must be [K] = (2,)",
    )


@pytest.mark.parametrize("shapes", [((2,), (3,)), ((2,), (1,)), ((), ()), ((2, 2), (2, 2))])
def test_similarities_of_other_shapes(shapes):
    refuses(
        lambda: sgsd.teacher_weights(Z(shapes[0]), Z(shapes[1])),
        "teacher_weights (Eq. 6)",
        f"got {shapes}",
        "both must be [K]",
    )


@pytest.mark.parametrize(
    "shapes", [((2, 3), (4,)), ((2, 3), (1,)), ((3,), (3,)), ((2, 3), (2, 3)), ((2, 3), ())]
)
def test_log_probs_of_other_shapes(shapes):
    refuses(
        lambda: sgsd.log_prob_gap(Z(shapes[0]), Z(shapes[1])),
        "log_prob_gap (Eq. 7)",
        f"got {shapes}",
        "wanted [K, T] teachers and [T] student",
    )


@pytest.mark.parametrize("tau_g", [0, 0.0, -1.0, -inf, nan])
def test_tau_must_be_positive(tau_g):
    parts = (f"got {tau_g}", "the gate width tau_g must be > 0")
    refuses(lambda: sgsd.gated_loss(Z(3), tau_g), "gated_loss (Eq. 14)", *parts)
    refuses(lambda: sgsd.gate_grad(Z(3), tau_g), "gate_grad (Eq. 17)", *parts)
    for call in (
        lambda: sgsd.teacher_losses(Z(2, 3), Z(3), tau_g),
        lambda: sgsd.sgsd_loss(Z(2, 3), Z(3), Z(2), Z(2), tau_g),
        lambda: sgsd.token_credit(Z(2, 3), Z(3), Z(2), Z(2), tau_g),
    ):
        refuses(call, *parts)


@pytest.mark.parametrize("c_delta", [0, 0.0, -3.0, nan])
def test_c_delta_must_be_positive(c_delta):
    refuses(
        lambda: sgsd.robust_support(Z(2, 3), Z(3), c_delta),
        "robust_support (Eq. 11)",
        f"got {c_delta}",
        "the clipping bound c_delta must be > 0",
    )


@pytest.mark.parametrize("eps_a", [-1e-9, -1.0, nan])
def test_eps_a_must_not_be_negative(eps_a):
    refuses(
        lambda: sgsd.polarity(t([0.5]), 1, eps_a),
        "polarity (Eq. 13)",
        f"got {eps_a}",
        "the confidence threshold eps_a must be >= 0",
    )


# ------------------------------------------------------------------------------------------------------------------------------- copying it out


def objective_alone():
    """The objective section of sgsd.py, executed in an empty namespace in which only math, torch and collections.abc can be imported."""
    text = pathlib.Path(sgsd.__file__).read_text(encoding="utf-8")
    (section,) = re.findall(
        r"^# =+ objective \(needs math, torch\)\n(.*?)^# =+ end of the objective\n",
        text,
        re.M | re.S,
    )

    def allowed(name, globals=None, locals=None, fromlist=(), level=0):
        if level or name not in ("math", "torch", "collections.abc"):
            raise ImportError(f"the objective needs only math and torch, not {name}")
        return builtins.__import__(name, globals, locals, fromlist, level)

    names = {"__name__": "copied", "__builtins__": {**vars(builtins), "__import__": allowed}}
    exec(compile(section, "objective", "exec"), names)
    return names


def test_the_objective_stands_alone():
    names = objective_alone()
    assert [name for name in CONTRACT if not callable(names.get(name))] == []
    generator = torch.Generator().manual_seed(0)
    s_K, logpT_KT, logpS_T = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((3,), (3, 5), (5,))
    )

    def run(f):
        mask_T = f("token_mask")([4, 9, 4, 4, 4], {9})
        delta_KT = f("log_prob_gap")(logpT_KT, logpS_T)
        alpha_K, a_K = (
            f("teacher_weights")(s_K, -2 * s_K),
            f("robust_support")(delta_KT, mask_T, 1.0),
        )
        rho_K = f("polarity")(a_K, f("outcome_sign")(-1), 0.01)
        args = (delta_KT, mask_T, alpha_K, rho_K, 1.0)
        losses = (
            f("teacher_losses")(delta_KT, mask_T, 1.0),
            f("gated_loss")(delta_KT, 1.0),
            f("gate_grad")(delta_KT, 1.0),
        )
        return [
            mask_T,
            *args[:4],
            a_K,
            f("plain_support")(delta_KT),
            *losses,
            f("sgsd_loss")(*args),
            f("token_credit")(*args),
        ]

    for copied, original in zip(
        run(names.__getitem__), run(lambda name: getattr(sgsd, name)), strict=True
    ):
        assert torch.equal(copied, original)
    refuses(lambda: names["gated_loss"](Z(1), 0.0), "gated_loss (Eq. 14)")


def test_an_import_of_anything_else_would_be_noticed():
    names = objective_alone()
    for line in (
        "import os",
        "import rollout",
        "from torch.nn import functional",
        "from . import skills",
    ):
        with pytest.raises(ImportError):
            exec(line, names)


@pytest.mark.parametrize("wild", [float("nan"), float("inf"), -float("inf")])
def test_a_masked_gap_is_inert_even_when_it_is_not_finite(wild):
    delta = torch.tensor([[1.0, wild]], requires_grad=True)
    mask, one = torch.tensor([1.0, 0.0]), torch.ones(1)
    assert sgsd.robust_support(delta, mask, 3.0).item() == 1.0
    assert torch.isfinite(sgsd.token_credit(delta, mask, one, one, 1.0)).all()
    sgsd.sgsd_loss(delta, mask, one, one, 1.0).backward()
    assert delta.grad[0, 1] == 0 and torch.isfinite(delta.grad).all()


def test_any_kind_of_bool_is_no_outcome():
    for true in (True, torch.tensor(True)):
        with pytest.raises(ValueError, match="0/1 reward"):
            sgsd.outcome_sign(true)


def test_both_sides_of_the_gap_have_one_dtype():
    with pytest.raises(ValueError, match=r"Eq\. 7.*one dtype"):
        sgsd.log_prob_gap(torch.zeros(1, 2, dtype=torch.bfloat16), torch.zeros(2))
