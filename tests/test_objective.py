"""The objective, one test per equation: numbers to check by hand, and every refusal's reason."""

import ast
import builtins
import pathlib
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
    assert sgsd.plain_support(none_KT).shape == (0,)
    assert sgsd.robust_support(none_KT, mask_T, 3.0).shape == (0,)
    assert sgsd.polarity(none_K, 1, 0.05).shape == (0,)
    assert sgsd.teacher_losses(none_KT, mask_T, 1.0).shape == (0,)
    assert sgsd.token_credit(none_KT, mask_T, none_K, none_K, 1.0).shape == (0, 3)
    assert sgsd.sgsd_loss(none_KT, mask_T, none_K, none_K, 1.0).item() == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.float64])
def test_a_mask_of_any_dtype(dtype):
    delta_KT, mask_T = t([[1.0, 2.0, 4.0]]), torch.tensor([1, 0, 1]).to(dtype)
    same(sgsd.robust_support(delta_KT, mask_T, 3.0, eps=0.0), [2.0])  # (1 + 3) / 2
    kept = sgsd.teacher_losses(t([[1.0, 4.0]]), torch.ones(2), 1.0)
    same(sgsd.teacher_losses(delta_KT, mask_T, 1.0), kept.tolist())


@pytest.mark.parametrize("wild", [nan, inf, -inf])
def test_a_masked_gap_is_inert_even_when_it_is_not_finite(wild):
    delta_KT = torch.tensor([[1.0, wild]], requires_grad=True)
    mask_T, one_K = torch.tensor([1.0, 0.0]), torch.ones(1)
    assert sgsd.robust_support(delta_KT, mask_T, 3.0).item() == 1.0
    assert sgsd.token_credit(delta_KT, mask_T, one_K, one_K, 1.0).isfinite().all()
    sgsd.sgsd_loss(delta_KT, mask_T, one_K, one_K, 1.0).backward()
    assert delta_KT.grad[0, 1] == 0 and delta_KT.grad.isfinite().all()


# ------------------------------------------------------- refusals: the place, the value and the rule


def refuses(call, *parts):
    with pytest.raises(ValueError) as err:
        call()
    assert [part for part in parts if part not in str(err.value)] == [], str(err.value)


@pytest.mark.parametrize("r", [0, 0.5, 2, True, False, nan, inf, None, "1", torch.tensor(True)])
def test_a_wrong_outcome(r):
    rule = f"outcome r must be -1 or +1 (Eq. 9), got {r}; did the verifier return a 0/1 reward?"
    refuses(lambda: sgsd.outcome_sign(r), rule)
    refuses(lambda: sgsd.polarity(t([0.5]), r, 0.05), rule)


GAPS = {  # every function over gaps, as call(delta_KT, mask_T); plain_support has no mask
    "plain_support (Eq. 8)": lambda d, m: sgsd.plain_support(d),
    "robust_support (Eq. 12)": lambda d, m: sgsd.robust_support(d, m, 3.0),
    "teacher_losses (Eq. 15)": lambda d, m: sgsd.teacher_losses(d, m, 1.0),
    "sgsd_loss (Eq. 16)": lambda d, m: sgsd.sgsd_loss(d, m, zeros(2), zeros(2), 1.0),
    "token_credit (Eq. 20)": lambda d, m: sgsd.token_credit(d, m, zeros(2), zeros(2), 1.0),
}


@pytest.mark.parametrize("place", GAPS)
def test_gaps_of_another_dtype_or_rank(place):
    for dtype in (torch.bfloat16, torch.float16, torch.int64):
        delta_KT = zeros(2, 3, dtype=dtype)
        rule = f"gaps must be float32 or float64, got {dtype}"
        refuses(lambda delta_KT=delta_KT: GAPS[place](delta_KT, zeros(3)), place, rule)
    for shape in ((3,), (1, 2, 3), ()):
        rule = f"delta_KT must be [K, T], got {shape}"
        refuses(lambda shape=shape: GAPS[place](zeros(shape), zeros(3)), place, rule)


@pytest.mark.parametrize("place", [place for place in GAPS if "8" not in place])
def test_masks_of_another_shape_or_with_other_values(place):
    for shape in ((1,), (2,), (4,), (2, 3)):
        rule = f"mask_T must be [T] = (3,), got {shape}"
        refuses(lambda shape=shape: GAPS[place](zeros(2, 3), zeros(shape)), place, rule)
    for value in (2.0, -1.0, 0.5, nan):
        mask_T = torch.tensor([0.0, 1.0, value])
        rule = "mask_T must hold only 0 and 1"
        refuses(lambda mask_T=mask_T: GAPS[place](zeros(2, 3), mask_T), place, rule)


@pytest.mark.parametrize("name", ["sgsd_loss", "token_credit"])
@pytest.mark.parametrize("wrong", [(3,), (1,), (), (2, 1)])
def test_weights_of_another_shape(name, wrong):
    call, rule = getattr(sgsd, name), f"alpha_K and rho_K must be [K] = (2,), got {wrong}"
    refuses(lambda: call(zeros(2, 3), zeros(3), zeros(wrong), zeros(2), 1.0), name, rule)
    refuses(lambda: call(zeros(2, 3), zeros(3), zeros(2), zeros(wrong), 1.0), name, rule)


@pytest.mark.parametrize("shapes", [((2,), (3,)), ((2,), (1,)), ((), ()), ((2, 2), (2, 2))])
def test_similarities_of_other_shapes(shapes):
    rule = f"teacher_weights (Eq. 6): both must be [K], got {shapes}"
    refuses(lambda: sgsd.teacher_weights(zeros(shapes[0]), zeros(shapes[1])), rule)


@pytest.mark.parametrize("teachers", [(2, 4), (3,), (2, 1), ()])
def test_log_probabilities_of_other_shapes_or_dtypes(teachers):
    rule = f"wanted [K, T] teachers and [T] student, got {(teachers, (3,))}"
    refuses(lambda: sgsd.log_prob_gap(zeros(teachers), zeros(3)), "log_prob_gap (Eq. 7)", rule)
    half = zeros(1, 3, dtype=torch.bfloat16)
    refuses(lambda: sgsd.log_prob_gap(half, zeros(3)), "Eq. 7", "one dtype, got (torch.bfloat16")


@pytest.mark.parametrize("bad", [0, -1.0, -inf, nan])
def test_settings_out_of_range(bad):
    width = f"the gate width tau_g must be > 0, got {bad}"
    refuses(lambda: sgsd.gated_loss(zeros(3), bad), "gated_loss (Eq. 14)", width)
    refuses(lambda: sgsd.gate_grad(zeros(3), bad), "gate_grad (Eq. 17)", width)
    refuses(lambda: sgsd.teacher_losses(zeros(2, 3), zeros(3), bad), width)
    refuses(lambda: sgsd.sgsd_loss(zeros(2, 3), zeros(3), zeros(2), zeros(2), bad), width)
    refuses(lambda: sgsd.token_credit(zeros(2, 3), zeros(3), zeros(2), zeros(2), bad), width)
    bound = f"robust_support (Eq. 11): the bound c_delta must be > 0, got {bad}"
    refuses(lambda: sgsd.robust_support(zeros(2, 3), zeros(3), bad), bound)
    bad = bad or -1e-9  # a threshold of 0 is fine
    threshold = f"polarity (Eq. 13): the threshold eps_a must be >= 0, got {bad}"
    refuses(lambda: sgsd.polarity(t([0.5]), 1, bad), threshold)


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

    def allowed(name, globals=None, locals=None, fromlist=(), level=0):
        if level or name not in ("math", "torch", "collections.abc"):
            raise ImportError(f"the objective needs only math and torch, not {name}")
        return builtins.__import__(name, globals, locals, fromlist, level)

    names = {"__name__": "copied", "__builtins__": {**vars(builtins), "__import__": allowed}}
    body = sorted(taken, key=lambda node: node.lineno)
    exec(compile(ast.Module(body, []), "objective", "exec"), names)
    return names


def results(f):
    """One number or tensor of every function of the contract; f finds a function by its name."""
    generator = torch.Generator().manual_seed(0)
    s_K, logpT_KT, logpS_T = torch.randn(23, generator=generator).double().split([3, 15, 5])
    delta_KT = f("log_prob_gap")(logpT_KT.view(3, 5), logpS_T)
    mask_T = f("token_mask")([4, 9, 4, 4, 4], {9})
    alpha_K, a_K = f("teacher_weights")(s_K, -2 * s_K), f("robust_support")(delta_KT, mask_T, 1.0)
    rho_K = f("polarity")(a_K, f("outcome_sign")(-1), 0.01)
    found = [delta_KT, mask_T, alpha_K, a_K, rho_K, f("plain_support")(delta_KT)]
    found += [f("teacher_losses")(delta_KT, mask_T, 1.0), f("gate_grad")(delta_KT, 1.0)]
    for name in ("sgsd_loss", "token_credit"):
        found.append(f(name)(delta_KT, mask_T, alpha_K, rho_K, 1.0))
    return [*found, f("gated_loss")(delta_KT, 1.0)]


def test_the_objective_stands_alone():
    names = copied_out(CONTRACT)
    for copied, original in zip(results(names.get), results(vars(sgsd).get), strict=True):
        assert torch.equal(copied, original)
    refuses(lambda: names["gated_loss"](zeros(1), 0.0), "gated_loss (Eq. 14)")
    with pytest.raises(ImportError):  # the fence holds: the step needs the rest of the house
        copied_out(["train_step"])
