"""The objective, one test per equation: numbers to check by hand, and every refusal's reason."""

import ast
import builtins
import pathlib
import re
from math import e, inf, log, nan, sqrt

import pytest
import torch
from torch import zeros

import sgsd

CONTRACT = """teacher_weights log_prob_gap plain_support outcome_sign token_mask robust_support
    polarity gated_loss gate_grad teacher_losses sgsd_loss token_credit""".split()


def t(x):
    return torch.tensor(x, dtype=torch.float64)


def same(got, want, tol=1e-12):
    torch.testing.assert_close(got, t(want), rtol=tol, atol=tol)


# ------------------------------------------------------------------ Eqs. 6-13: weights to polarity


def test_eq6_teacher_weights():
    # s_1 = (log 2 + log 8) / 2 = log 4, s_2 = (1 - 1) / 2 = 0; exp: 4 and 1; alpha = 4/5, 1/5
    same(sgsd.teacher_weights(t([log(2), 1.0]), t([log(8), -1.0])), [4 / 5, 1 / 5])
    # equal similarities: 1/K each; a single teacher: 1
    same(sgsd.teacher_weights(t([0.3] * 4), t([0.7] * 4)), [0.25] * 4)
    same(sgsd.teacher_weights(t([-0.9]), t([0.1])), [1.0])


def test_eq7_log_prob_gap():
    # teacher 1/2 and 1/4, student 1/4 and 1/2: log 2 (supported) and -log 2 (suppressed)
    logpT_KT = t([[log(1 / 2), log(1 / 4)], [log(1 / 4), log(1 / 2)]])
    logpS_T = t([log(1 / 4), log(1 / 2)])
    same(sgsd.log_prob_gap(logpT_KT, logpS_T), [[log(2), -log(2)], [0.0, 0.0]])


def test_eq8_plain_support():
    # (1 + 2 - 6) / 3 = -1; (3 + 0 + 0) / 3 = 1; over all T, no mask, no clip
    same(sgsd.plain_support(t([[1.0, 2.0, -6.0], [3.0, 0.0, 0.0]])), [-1.0, 1.0])


def test_eq9_outcome_sign():
    assert sgsd.outcome_sign(1) == sgsd.outcome_sign(1.0) == 1
    assert sgsd.outcome_sign(-1) == sgsd.outcome_sign(-1.0) == -1


def test_eq10_plain_polarity_is_eq13_on_the_plain_support_without_a_threshold():
    a_K = sgsd.plain_support(t([[1.0, 2.0], [1.0, -2.0], [1.0, -1.0]]))  # 1.5, -0.5, 0
    same(sgsd.polarity(a_K, 1, 0.0), [1.0, -1.0, 0.0])
    same(sgsd.polarity(a_K, -1, 0.0), [-1.0, 1.0, 0.0])


def test_token_mask():
    same(sgsd.token_mask([5, 7, 5, 9], {7, 9}).double(), [1.0, 0.0, 1.0, 0.0])
    same(sgsd.token_mask(torch.tensor([5, 7]), frozenset()).double(), [1.0, 1.0])
    assert sgsd.token_mask([5], [7]).dtype == torch.float32


def test_eq11_clip():
    # one token, so the support is the clipped gap (eps = 0): 9 -> 3, -9 -> -3, the rest stays
    delta_KT = t([[9.0], [-9.0], [2.5], [-2.5], [3.0], [0.0]])
    same(sgsd.robust_support(delta_KT, t([1]), 3.0, eps=0.0), [3.0, -3.0, 2.5, -2.5, 3.0, 0.0])


def test_eq12_robust_support():
    delta_KT = t([[1.0, 10.0, -2.0, 100.0], [-1.0, -1.0, -10.0, 0.0]])
    mask_T = t([1, 1, 1, 0])
    # teacher 1: (1 + 3 - 2) / (3 + 1) = 0.5; teacher 2: (-1 - 1 - 3) / (3 + 1) = -1.25; eps = 1
    same(sgsd.robust_support(delta_KT, mask_T, 3.0, eps=1.0), [0.5, -1.25])
    # eps = 1e-8: 2/3 and -5/3 but for one part in 10^8
    same(sgsd.robust_support(delta_KT, mask_T, 3.0), [2 / 3, -5 / 3], tol=1e-8)


def test_eq12_clipping_keeps_the_stance_that_one_outlier_flips():
    delta_KT = t([[1.0, 1.0, 1.0, -20.0]])
    same(sgsd.plain_support(delta_KT), [-4.25])  # (3 - 20) / 4
    same(sgsd.robust_support(delta_KT, torch.ones(4), 2.0), [0.25], tol=1e-8)  # (3 - 2) / 4


def test_eq13_the_four_cases_of_the_polarity_table_and_the_unsure():
    # confident beyond 0.05. A success: support is helpful, suppression over-suppressive.
    a_K = t([0.06, -0.06, 0.04, -0.04, 0.0])
    same(sgsd.polarity(a_K, 1, 0.05), [1.0, -1.0, 0.0, 0.0, 0.0])
    # A failure: support is misleading, suppression a warning.
    same(sgsd.polarity(a_K, -1, 0.05), [-1.0, 1.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eq13_the_threshold_is_strict_and_the_sign_of_zero_is_zero(dtype):
    at = torch.tensor([0.05, -0.05], dtype=dtype)
    assert sgsd.polarity(at, 1, 0.05).tolist() == [0, 0]
    assert sgsd.polarity(torch.nextafter(at, 2 * at), 1, 0.05).tolist() == [1, -1]
    assert sgsd.polarity(t([0.0, -0.0, 1e-300, -1e-300]), 1, 0.0).tolist() == [0, 0, 1, -1]


# --------------------------------------------------- Eqs. 14-17, 20: gate, loss, gradient, credit

D3 = sqrt(2 * log(3))  # tau = 1: exp(-D3^2 / 2) = 1/3


def test_eq14_gated_loss():
    # exp(-D3^2/2) = 1/3: log 2 - log(4/3) = log(3/2)
    same(sgsd.gated_loss(t([0.0, D3, -D3]), 1.0), [0.0, log(3 / 2), log(3 / 2)])
    # delta = 1, tau = 1/2: exp(-1), log 2 - log(1 + 1/e) = 0.693147 - 0.313262 = 0.379885
    same(sgsd.gated_loss(t(1.0), 0.5), log(2) - log(1 + 1 / e))
    same(sgsd.gated_loss(t(1.0), 0.5), 0.379885, tol=1e-6)
    # it saturates at log 2; twice the gap at four times tau costs the same
    same(sgsd.gated_loss(t([100.0, -100.0]), 1.0), [log(2), log(2)])
    same(sgsd.gated_loss(t(2 * D3), 4.0), log(3 / 2))


def test_eq15_teacher_losses():
    delta_KT, mask_T = t([[D3, 0.0, -D3, 50.0], [0.0, 0.0, 100.0, D3]]), t([1, 1, 1, 0])
    # teacher 1: 2 log(3/2) / (3 + 1); teacher 2: log 2 / (3 + 1); eps = 1, nothing is clipped
    same(sgsd.teacher_losses(delta_KT, mask_T, 1.0, eps=1.0), [log(3 / 2) / 2, log(2) / 4])
    same(sgsd.teacher_losses(delta_KT, mask_T, 1.0), [log(3 / 2) * 2 / 3, log(2) / 3], tol=1e-8)


def test_eq16_sgsd_loss():
    # the teachers lose log(3/2), log 2 and log(3/2):
    # 0.5 log(3/2) - 0.3 log 2 + 0 = 0.202733 - 0.207944 = -0.005212
    alpha_K, rho_K = t([0.5, 0.3, 0.2]), t([1.0, -1.0, 0.0])
    got = sgsd.sgsd_loss(t([[D3], [100.0], [D3]]), t([1]), alpha_K, rho_K, 1.0, eps=0.0)
    assert got.shape == ()
    same(got, 0.5 * log(3 / 2) - 0.3 * log(2))
    same(got, -0.005212, tol=1e-6)


def test_eq17_gate_grad():
    # exp(D3^2/2) = 3: D3 / (1 + 3); delta = 1, tau = 1/2: 1 / (1/2 (1 + e)) = 2 / (1 + e)
    same(sgsd.gate_grad(t([0.0, D3, -D3]), 1.0), [0.0, D3 / 4, -D3 / 4])
    same(sgsd.gate_grad(t([1.0, -1.0]), 0.5), [2 / (1 + e), -2 / (1 + e)])
    # extreme gaps teach nothing: 3 / (1 + exp(4.5)) = 3 / 91.017 = 0.0330, and 0 at 100
    same(sgsd.gate_grad(t([3.0, 100.0]), 1.0), [0.0330, 0.0], tol=1e-4)


def test_eq20_token_credit():
    delta_KT = t([[D3, -D3, 7.0], [D3, 0.0, 7.0], [D3, D3, D3]])
    alpha_K, rho_K = t([0.5, 0.3, 0.2]), t([1.0, -1.0, 0.0])
    got = sgsd.token_credit(delta_KT, t([1, 1, 0]), alpha_K, rho_K, 1.0, eps=2.0)
    # Z = 2 + 2 and g(D3) = D3 / 4. Teacher 1: 0.5 / 4 * D3 / 4 = D3 / 32;
    # teacher 2: -0.3 / 4 * D3 / 4 = -0.3 D3 / 16; what is masked or ignored: 0
    same(got, [[D3 / 32, -D3 / 32, 0.0], [-0.3 * D3 / 16, 0.0, 0.0], [0.0, 0.0, 0.0]])


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
    names = copied_out(CONTRACT)
    delta_KT, s_K = torch.tensor([[1.0, -2.0, 0.3], [0.4, 5.0, -1.0]]), torch.tensor([0.3, 0.8])
    mask_T, rho_K = torch.tensor([1, 0, 1]), torch.tensor([1.0, -1.0])
    arguments = {
        "teacher_weights": (s_K, -s_K),
        "log_prob_gap": (delta_KT, mask_T.float()),
        "plain_support": (delta_KT,),
        "outcome_sign": (-1,),
        "token_mask": ([4, 9, 4], {9}),
        "robust_support": (delta_KT, mask_T, 1.0),
        "polarity": (s_K, -1, 0.5),
        "gated_loss": (delta_KT, 1.0),
        "gate_grad": (delta_KT, 1.0),
        "teacher_losses": (delta_KT, mask_T, 1.0),
        "sgsd_loss": (delta_KT, mask_T, s_K, rho_K, 1.0),
        "token_credit": (delta_KT, mask_T, s_K, rho_K, 1.0),
    }
    assert list(arguments) == CONTRACT
    for name, args in arguments.items():
        copied, original = names[name](*args), getattr(sgsd, name)(*args)
        assert torch.equal(torch.as_tensor(copied), torch.as_tensor(original)), name
    refuses("gated_loss (Eq. 14)", names["gated_loss"], zeros(1), 0.0)
    with pytest.raises(ImportError):  # the fence holds: the step needs the rest of the house
        copied_out(["train_step"])
