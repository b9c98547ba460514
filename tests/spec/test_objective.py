"""The objective: numbers worked by hand, plain-Python loops, and every refusal's reason."""

import ast
import builtins
import math
import pathlib
import random
import re
from math import e, inf, log, nan, sqrt

import pytest
import torch
from conftest import same, t
from torch import zeros

import sgsd

D3 = sqrt(2 * log(3))  # tau = 1: exp(-D3^2 / 2) = 1/3
Z3 = 3 + 1e-8  # three tokens, with the default eps
CASES = [  # function, arguments, result; lists are tensors
    # Eq. 6: s_1 = (log 2 + log 8) / 2 = log 4, s_2 = (1 - 1) / 2 = 0; exp: 4 and 1
    (sgsd.teacher_weights, ([log(2), 1.0], [log(8), -1.0]), [4 / 5, 1 / 5]),
    # equal similarities: 1/K each; a single teacher: 1
    (sgsd.teacher_weights, ([0.3] * 4, [0.7] * 4), [0.25] * 4),
    (sgsd.teacher_weights, ([-0.9], [0.1]), [1.0]),
    # Eq. 7: teacher 1/2, student 1/4: log 2 (supported); 1/4 and 1/2: -log 2 (suppressed)
    (sgsd.log_prob_gap, ([[log(1 / 2)], [log(1 / 4)]], [log(1 / 4)]), [[log(2)], [0.0]]),
    (sgsd.log_prob_gap, ([[log(1 / 4)], [log(1 / 2)]], [log(1 / 2)]), [[-log(2)], [0.0]]),
    # Eq. 8: (1 + 2 - 6) / 3; (3 + 0 + 0) / 3; over all T, no mask, no clip
    (sgsd.plain_support, ([[1.0, 2.0, -6.0], [3.0, 0.0, 0.0]],), [-1.0, 1.0]),
    # Eq. 9
    (sgsd.outcome_sign, (1,), 1),
    (sgsd.outcome_sign, (1.0,), 1),
    (sgsd.outcome_sign, (-1,), -1),
    (sgsd.outcome_sign, (-1.0,), -1),
    # Eq. 10 is Eq. 13 on the plain support, 1.5, -0.5 and 0 here, without a threshold
    (sgsd.polarity, ([1.5, -0.5, 0.0], 1, 0.0), [1.0, -1.0, 0.0]),
    (sgsd.polarity, ([1.5, -0.5, 0.0], -1, 0.0), [-1.0, 1.0, 0.0]),
    # the mask: 0 for reasoning ids, whatever they come in
    (sgsd.token_mask, ((5, 7, 5, 9), {7, 9}), [1.0, 0.0, 1.0, 0.0]),
    (sgsd.token_mask, (torch.tensor([5, 7]), frozenset()), [1.0, 1.0]),
    # Eq. 11: of one token, the support is the clipped gap (eps = 0)
    (sgsd.robust_support, ([[9.0], [-9.0], [2.5], [-2.5]], [1], 3.0, 0.0), [3.0, -3.0, 2.5, -2.5]),
    (sgsd.robust_support, ([[3.0], [0.0]], [1], 3.0, 0.0), [3.0, 0.0]),
    # Eq. 12: (1 + 3 - 2) / (3 + 1) with eps = 1, what is masked apart; (-1 - 1 - 3) / (3 + 1)
    (sgsd.robust_support, ([[1.0, 10.0, -2.0, 99.0]], [1, 1, 1, 0], 3.0, 1.0), [0.5]),
    (sgsd.robust_support, ([[-1.0, -1.0, -10.0, 0.0]], [1, 1, 1, 0], 3.0, 1.0), [-1.25]),
    (sgsd.robust_support, ([[1.0, 10.0, -2.0, 99.0]], [1, 1, 1, 0], 3.0), [2 / Z3]),
    # one outlier flips the plain stance, (2 - 20) / 3, and not the clipped one, (2 - 1.5) / 3
    (sgsd.plain_support, ([[1.0, 1.0, -20.0]],), [-6.0]),
    (sgsd.robust_support, ([[1.0, 1.0, -20.0]], [1, 1, 1], 1.5), [0.5 / Z3]),
    # Eq. 13, confident beyond 0.05. A success: support is helpful, suppression over-suppressive.
    (sgsd.polarity, ([0.06, -0.06, 0.04, -0.04, 0.0], 1, 0.05), [1.0, -1.0, 0.0, 0.0, 0.0]),
    # A failure: support is misleading, suppression a warning.
    (sgsd.polarity, ([0.06, -0.06, 0.04, -0.04, 0.0], -1, 0.05), [-1.0, 1.0, 0.0, 0.0, 0.0]),
    # the sign of zero is zero
    (sgsd.polarity, ([0.0, -0.0, 1e-300, -1e-300], 1, 0.0), [0.0, 0.0, 1.0, -1.0]),
    # Eq. 14: exp(-D3^2/2) = 1/3: log 2 - log(4/3) = log(3/2); it saturates at log 2
    (sgsd.gated_loss, ([0.0, D3, -D3], 1.0), [0.0, log(3 / 2), log(3 / 2)]),
    (sgsd.gated_loss, ([100.0, -100.0], 1.0), [log(2), log(2)]),
    # delta = 1, tau = 1/2: log 2 - log(1 + exp(-1)); twice the gap at four times tau is the same
    (sgsd.gated_loss, ([1.0, -1.0], 0.5), [log(2) - log(1 + 1 / e)] * 2),
    (sgsd.gated_loss, ([2 * D3], 4.0), [log(3 / 2)]),
    # Eq. 15: 2 log(3/2) / (3 + 1) with eps = 1; log 2 / (3 + 1): nothing is clipped
    (sgsd.teacher_losses, ([[D3, 0.0, -D3, 50.0]], [1, 1, 1, 0], 1.0, 1.0), [log(3 / 2) / 2]),
    (sgsd.teacher_losses, ([[0.0, 0.0, 100.0, D3]], [1, 1, 1, 0], 1.0, 1.0), [log(2) / 4]),
    (sgsd.teacher_losses, ([[0.0, 0.0, 100.0, D3]], [1, 1, 1, 0], 1.0), [log(2) / Z3]),
    # Eq. 16: 0.5 log(3/2) - 0.3 log 2 + 0 log(3/2) = 0.202733 - 0.207944 = -0.005212
    (
        sgsd.sgsd_loss,
        ([[D3], [100.0], [D3]], [1], [0.5, 0.3, 0.2], [1.0, -1.0, 0.0], 1.0, 0.0),
        0.5 * log(3 / 2) - 0.3 * log(2),
    ),
    # Eq. 17: exp(D3^2/2) = 3: D3 / (1 + 3); delta = 1, tau = 1/2: 1 / (1/2 (1 + e))
    (sgsd.gate_grad, ([0.0, D3, -D3], 1.0), [0.0, D3 / 4, -D3 / 4]),
    (sgsd.gate_grad, ([1.0, -1.0], 0.5), [2 / (1 + e), -2 / (1 + e)]),
    # extreme gaps teach nothing: 3 / (1 + exp(4.5)) = 3 / 91.017 = 0.0330, and 0 at 100
    (sgsd.gate_grad, ([3.0, 100.0], 1.0), [3 / (1 + e**4.5), 0.0]),
    # Eq. 20: Z = 2 + 2 and g(D3) = D3 / 4. Teacher 1: 0.5 / 4 * D3 / 4 = D3 / 32; teacher 2:
    # -0.3 / 4 * D3 / 4 = -0.3 D3 / 16; what is masked or ignored: 0
    (
        sgsd.token_credit,
        ([[D3, -D3, 7.0], [D3, 0.0, 7.0]], [1, 1, 0], [0.5, 0.3], [1.0, -1.0], 1.0, 2.0),
        [[D3 / 32, -D3 / 32, 0.0], [-0.3 * D3 / 16, 0.0, 0.0]],
    ),
    (sgsd.token_credit, ([[D3, D3]], [1, 1], [0.2], [0.0], 1.0, 2.0), [[0.0, 0.0]]),
]


@pytest.mark.parametrize("function, args, want", CASES)
def test_each_equation_gives_the_numbers_worked_by_hand(function, args, want):
    got = function(*[t(x) if isinstance(x, list) else x for x in args])
    torch.testing.assert_close(torch.as_tensor(got).double(), t(want), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eq13_the_threshold_is_strict_whatever_the_dtype(dtype):
    at = torch.tensor([0.05, -0.05], dtype=dtype)
    assert sgsd.polarity(at, 1, 0.05).tolist() == [0, 0]
    assert sgsd.polarity(torch.nextafter(at, 2 * at), 1, 0.05).tolist() == [1, -1]


def test_a_mask_is_float32():
    assert sgsd.token_mask([5], [7]).dtype == torch.float32


# ----------------------------------- against plain-Python loops that write the paper's equations

EPS = 1e-8
SEEDS = range(40)


def eq6(s_g, s_e):
    exps = [math.exp((g + e) / 2) for g, e in zip(s_g, s_e)]
    return [x / sum(exps) for x in exps]


def eq7(teacher, student):
    return [lt - ls for lt, ls in zip(teacher, student)]


def eq11(gap, c_delta):
    return max(-c_delta, min(gap, c_delta))


def masked_mean(values, mask):  # of Eqs. 12 and 15
    return sum(m * value for m, value in zip(mask, values)) / (sum(mask) + EPS)


def sgn(x):
    return (x > 0) - (x < 0)


def eq13(a, r, eps_a):
    return sgn(r) * sgn(a) if abs(a) > eps_a else 0


def eq14(gap, tau):
    return math.log(2) - math.log(1 + math.exp(-(gap**2) / (2 * tau)))


def eq17(gap, tau):
    return gap / (tau * (1 + math.exp(gap**2 / (2 * tau))))


def eq20(gaps, mask, a, p, tau):
    z = sum(mask) + EPS
    return [a * p * m / z * eq17(gap, tau) for gap, m in zip(gaps, mask)]


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
    scores = [[round(1024 * rng.uniform(-1, 1)) / 1024 for _ in range(k)] for _ in "ge"]
    settings = rng.choice([-1, 1]), rng.choice([0.5, 1.0, 2.0]), rng.choice([1.0, 3.0])
    return scores, teachers, student, mask, *settings, rng.choice([0.0, 0.05, 0.25])


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_function_equals_its_loop(seed, dtype, tol):
    (s_g, s_e), teachers, student, mask, r, tau, c_delta, eps_a = case(seed)
    sides = torch.tensor(s_g, dtype=dtype), torch.tensor(s_e, dtype=dtype)
    mask_T = torch.tensor(mask, dtype=dtype)
    alpha_K = sgsd.teacher_weights(*sides)
    logpT_KT, logpS_T = torch.tensor(teachers, dtype=dtype), torch.tensor(student, dtype=dtype)
    delta_KT = sgsd.log_prob_gap(logpT_KT, logpS_T)
    plain_K = sgsd.plain_support(delta_KT)
    a_K = sgsd.robust_support(delta_KT, mask_T, c_delta)
    rho_K = sgsd.polarity(a_K, r, eps_a)
    lbar_K = sgsd.teacher_losses(delta_KT, mask_T, tau)
    credit_KT = sgsd.token_credit(delta_KT, mask_T, alpha_K, rho_K, tau)
    alpha, loss = eq6(s_g, s_e), 0.0
    same(alpha_K, alpha, tol)
    for k, teacher in enumerate(teachers):
        gaps = eq7(teacher, student)
        plain = sum(gaps) / len(gaps)  # Eq. 8
        a = masked_mean([eq11(gap, c_delta) for gap in gaps], mask)  # Eq. 12
        rho = eq13(a, r, eps_a)
        gates = [eq14(gap, tau) for gap in gaps]
        lbar = masked_mean(gates, mask)  # Eq. 15
        loss += alpha[k] * rho * lbar  # Eq. 16
        same(delta_KT[k], gaps, tol)
        same(plain_K[k], plain, tol)
        same(a_K[k], a, tol)
        assert rho_K[k] == rho
        assert sgsd.polarity(plain_K, r, 0.0)[k] == sgn(r) * sgn(plain)  # Eq. 10
        same(sgsd.gated_loss(delta_KT, tau)[k], gates, tol)
        same(sgsd.gate_grad(delta_KT, tau)[k], [eq17(gap, tau) for gap in gaps], tol)
        same(lbar_K[k], lbar, tol)
        same(credit_KT[k], eq20(gaps, mask, alpha[k], rho, tau), tol)
    same(sgsd.sgsd_loss(delta_KT, mask_T, alpha_K, rho_K, tau), loss, tol)


def test_the_cases_cover_the_rules_and_none_hangs_on_rounding():
    seen, clipped = set(), 0
    for seed in SEEDS:
        _, teachers, student, mask, r, _, c_delta, eps_a = case(seed)
        for teacher in teachers:
            bounded = [eq11(gap, c_delta) for gap in eq7(teacher, student)]
            clipped += sum(abs(gap) == c_delta for gap in bounded)
            a = masked_mean(bounded, mask)
            assert a == 0 or abs(abs(a) - eps_a) > 1e-5
            seen.add((r, sgn(a), eq13(a, r, eps_a)))
    assert {(r, sign, r * sign) for r in (-1, 1) for sign in (-1, 1)} <= seen
    assert {sign for _, sign, rho in seen if rho == 0} == {-1, 0, 1} and clipped > 100


# ------------------------------------------------------------------------------ edges of the domain


def test_no_teachers():
    none_K, none_KT, mask_T = zeros(0), zeros(0, 3), torch.ones(3)
    assert sgsd.teacher_weights(none_K, none_K).shape == (0,)
    assert sgsd.log_prob_gap(none_KT, zeros(3)).shape == (0, 3)
    assert sgsd.robust_support(none_KT, mask_T, 3.0).shape == sgsd.plain_support(none_KT).shape
    assert sgsd.polarity(none_K, 1, 0.05).shape == (0,)
    assert sgsd.teacher_losses(none_KT, mask_T, 1.0).shape == (0,)
    assert sgsd.token_credit(none_KT, mask_T, none_K, none_K, 1.0).shape == (0, 3)
    assert sgsd.sgsd_loss(none_KT, mask_T, none_K, none_K, 1.0).item() == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.float64])
@pytest.mark.parametrize("wild", [nan, inf, -inf])
def test_a_masked_gap_is_inert_even_when_it_is_not_finite(wild, dtype):
    """Whatever the mask's dtype."""
    delta_KT = torch.tensor([[1.0, wild, 4.0]], requires_grad=True)
    mask_T, one_K = torch.tensor([1, 0, 1]).to(dtype), torch.ones(1)
    assert sgsd.robust_support(delta_KT, mask_T, 3.0).item() == 2.0  # (1 + 3) / 2
    assert sgsd.token_credit(delta_KT, mask_T, one_K, one_K, 1.0)[0, 1] == 0
    sgsd.sgsd_loss(delta_KT, mask_T, one_K, one_K, 1.0).backward()
    assert delta_KT.grad[0, 1] == 0 and delta_KT.grad.isfinite().all()


# ------------------------------------------------------ refusals: the place, the value, the rule


def refuses(rule, call, *args):
    with pytest.raises(ValueError, match=re.escape(rule)):
        call(*args)


@pytest.mark.parametrize("r", [0, 0.5, 2, True, False, nan, inf, None, "1", torch.tensor(True)])
def test_a_wrong_outcome(r):
    rule = f"outcome r must be -1 or +1 (Eq. 9), got {r}; did the verifier return a 0/1 reward?"
    refuses(rule, sgsd.outcome_sign, r)
    refuses(rule, sgsd.polarity, t([0.5]), r, 0.05)


GAPS = {  # every function over gaps, as call(delta_KT, mask_T)
    "robust_support (Eq. 12)": lambda d, m: sgsd.robust_support(d, m, 3.0),
    "teacher_losses (Eq. 15)": lambda d, m: sgsd.teacher_losses(d, m, 1.0),
    "sgsd_loss (Eq. 16)": lambda d, m: sgsd.sgsd_loss(d, m, zeros(2), zeros(2), 1.0),
    "token_credit (Eq. 20)": lambda d, m: sgsd.token_credit(d, m, zeros(2), zeros(2), 1.0),
    "plain_support (Eq. 8)": lambda d, m: sgsd.plain_support(d),
}


@pytest.mark.parametrize("place", GAPS)
def test_wrong_gaps_and_masks(place):
    for dtype in (torch.bfloat16, torch.float16, torch.int64):
        rule = f"{place}: gaps must be float32 or float64, got {dtype}"
        refuses(rule, GAPS[place], zeros(2, 3, dtype=dtype), zeros(3))
    for shape in ((3,), (1, 2, 3), ()):
        rule = f"{place}: delta_KT must be [K, T], got {shape}"
        refuses(rule, GAPS[place], zeros(shape), zeros(3))
    if "plain" in place:  # it takes no mask
        return
    for shape in ((1,), (2,), (4,), (2, 3)):
        rule = f"{place}: mask_T must be [T] = (3,), got {shape}"
        refuses(rule, GAPS[place], zeros(2, 3), zeros(shape))
    for value in (2.0, -1.0, 0.5, nan):
        rule = f"{place}: mask_T must hold only 0 and 1"
        refuses(rule, GAPS[place], zeros(2, 3), torch.tensor([0.0, 1.0, value]))


def test_other_shapes_and_dtypes():
    for call in (sgsd.sgsd_loss, sgsd.token_credit):
        for wrong in ((3,), (1,), (), (2, 1)):
            rule = f"alpha_K and rho_K must be [K] = (2,), got {wrong}"
            refuses(rule, call, zeros(2, 3), zeros(3), zeros(wrong), zeros(2), 1.0)
            refuses(rule, call, zeros(2, 3), zeros(3), zeros(2), zeros(wrong), 1.0)
    for a, b in (((2,), (3,)), ((2,), (1,)), ((), ()), ((2, 2), (2, 2))):
        rule = f"teacher_weights (Eq. 6): both must be [K], got {(a, b)}"
        refuses(rule, sgsd.teacher_weights, zeros(a), zeros(b))
    for a in ((2, 4), (3,), (2, 1), ()):
        rule = f"log_prob_gap (Eq. 7): wanted [K, T] teachers and [T] student, got {(a, (3,))}"
        refuses(rule, sgsd.log_prob_gap, zeros(a), zeros(3))
    refuses(
        "(Eq. 7): both sides must have one dtype", sgsd.log_prob_gap, zeros(1, 3).half(), zeros(3)
    )


@pytest.mark.parametrize("bad", [0, -1.0, -inf, nan])
def test_settings_out_of_range(bad):
    rule = f"the gate width tau_g must be > 0, got {bad}"
    refuses(f"gated_loss (Eq. 14): {rule}", sgsd.gated_loss, zeros(3), bad)
    refuses(f"gate_grad (Eq. 17): {rule}", sgsd.gate_grad, zeros(3), bad)
    refuses(rule, sgsd.teacher_losses, zeros(2, 3), zeros(3), bad)
    refuses(rule, sgsd.sgsd_loss, zeros(2, 3), zeros(3), zeros(2), zeros(2), bad)
    refuses(rule, sgsd.token_credit, zeros(2, 3), zeros(3), zeros(2), zeros(2), bad)
    rule = f"robust_support (Eq. 11): the bound c_delta must be > 0, got {bad}"
    refuses(rule, sgsd.robust_support, zeros(2, 3), zeros(3), bad)
    bad = bad or -1e-9  # a threshold of 0 is fine
    rule = f"polarity (Eq. 13): the threshold eps_a must be >= 0, got {bad}"
    refuses(rule, sgsd.polarity, t([0.5]), 1, bad)


# ---------------------------------------------------------------------------------- copying it out


def copied_out(wanted):
    """The named functions of sgsd.py and all that they use, where only math and torch import."""
    defined = {}
    for node in ast.parse(pathlib.Path(sgsd.__file__).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined.update({alias.asname or alias.name: node for alias in node.names})
        elif isinstance(node, ast.Assign):
            defined.update({target.id: node for target in node.targets})
    taken, waiting = set(), list(wanted)
    while waiting:
        node = defined.get(waiting.pop())
        if node is not None and node not in taken:
            taken.add(node)
            waiting += [name.id for name in ast.walk(node) if isinstance(name, ast.Name)]

    def allowed(name, *args):
        if name not in ("math", "torch", "collections.abc"):
            raise ImportError(f"the objective needs only math and torch, not {name}")
        return builtins.__import__(name, *args)

    names = {"__builtins__": {**vars(builtins), "__import__": allowed}}
    body = sorted(taken, key=lambda node: node.lineno)
    exec(compile(ast.Module(body, []), "objective", "exec"), names)
    return names


def test_the_objective_stands_alone():
    """Copied out, each of its functions gives what it gives in its place."""
    names = copied_out({function.__name__ for function, _, _ in CASES})
    for function, args, want in CASES:
        test_each_equation_gives_the_numbers_worked_by_hand(names[function.__name__], args, want)
    refuses("gated_loss (Eq. 14)", names["gated_loss"], zeros(1), 0.0)
    with pytest.raises(ImportError):  # the fence holds: the step needs the rest of the house
        copied_out(["train_step"])
