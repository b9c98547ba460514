"""The slope: its equations on a policy whose grad J is enumerated, then the command."""

import dataclasses
import json
import math
import tempfile
from types import SimpleNamespace

import driver
import numpy as np
import pytest
import torch
from conftest import make_bank, same, t
from driver import refused
from fake_engine import serving
from tqdm import tqdm

import rollout
import scoring
from extras import baselines, probe
from extras.baselines import BaselineConfig
from lib import files, model

NO_BAR = tqdm(disable=True)

# ------------------------------------------------------------------------------ hand-worked numbers


def test_a_rollout_weighs_its_outcome_minus_the_mean_of_the_others():
    # (1 - 1/3)/4 = 1/6 for a right one, (0 - 2/3)/4 = -1/6 for a wrong one
    same(probe.contrast(t([1.0, 0.0, 0.0, 1.0])), [1 / 6, -1 / 6, -1 / 6, 1 / 6])
    # (1 - 1/4)/5 = 3/20 and (0 - 2/4)/5 = -1/10
    same(probe.contrast(t([1.0, 1.0, 0.0, 0.0, 0.0])), [0.15, 0.15, -0.1, -0.1, -0.1])


def test_a_problem_without_both_outcomes_weighs_nothing():
    for all_alike in ([1.0, 1.0, 1.0], [0.0, 0.0]):
        same(probe.contrast(t(all_alike)), [0.0] * len(all_alike))


def test_each_problem_is_measured_along_the_other_halfs_direction():
    # One row of two directions; from problems 0 and 2, and from problem 1.
    directions = [[t([[1.0, 0.0], [2.0, 0.0]])], [t([[0.0, 1.0], [0.0, 2.0]])]]
    parts = {0: t([3.0, 5.0]), 1: t([7.0, 11.0]), 2: None}
    slopes_2N = probe.problem_slopes([[0, 2], [1]], directions, parts.__getitem__)
    assert slopes_2N.tolist() == [[5.0, 7.0, 0.0], [10.0, 14.0, 0.0]]


def test_the_interval_of_equal_slopes_is_a_point():
    assert probe.interval([np.array([2.0, 2.0]), np.array([2.0])]) == (2.0, 2.0, 2.0, 0.0)


def test_a_minibatch_has_many_problems_or_whole_groups():
    got = probe.minibatches([5, 7], 3, BaselineConfig(batch_size=2))  # 6 examples, 2 at a time
    assert got == [[(5, 0), (7, 0)], [(5, 1), (7, 1)], [(5, 2), (7, 2)]]
    grouped = BaselineConfig(batch_size=1, generations=3, method="grpo")
    groups = [[(5, 0), (5, 1), (5, 2)], [(7, 0), (7, 1), (7, 2)]]
    assert probe.minibatches([5, 7], 3, grouped) == groups
    assert len(probe.minibatches([5, 7], 3, BaselineConfig(batch_size=100))) == 1


def test_the_ratio_to_grpo_needs_a_slope_of_grpos_above_0():
    grpo = {"unit": 4.0, "unit_error": 2.0}
    assert probe.ratio(3.0, grpo) == 0.75  # 4 > 1.96 * 2
    assert probe.ratio(3.0, grpo | {"unit_error": 2.1}) is None
    assert probe.ratio(-3.0, {"unit": -4.0, "unit_error": 1.0}) is None
    assert probe.ratio(0.0, {"unit": 0.0, "unit_error": 0.0}) is None  # it has no gradient


def test_the_rollouts_needed_follow_from_grpos_interval():
    # twice the 2.8 standard errors, squared: (2 * 2.8 * .5 / 2)^2 = 1.96 times as many
    grpo = {"slope": 2.0, "low": 1.0, "high": 3.0, "error": 0.5}
    assert " 196 rollouts" in probe.rollouts_needed(grpo, 100)
    below = {"slope": -2.0, "low": -3.0, "high": -1.0, "error": 0.5}
    assert " 196 rollouts" in probe.rollouts_needed(below, 100)
    for untold in (grpo | {"low": -0.1}, dict.fromkeys(grpo, 0.0)):  # no problem has both outcomes
        assert "not told from 0" in probe.rollouts_needed(untold, 100)


def test_the_advice_follows_the_intervals():
    grpo = {"slope": 2.0, "low": 1.0, "high": 3.0, "error": 0.5}
    grpo |= {"less_grpo": 0.0, "less_grpo_high": 0.0}
    plan = {"slope": 1.0, "low": 0.5, "high": 1.5, "error": 0.2}
    plan |= {"less_grpo": -1.0, "less_grpo_high": 0.1}
    unsure = {"low": -1.0}
    for planned, reference, words in (
        (plan, grpo, "The planned step helps"),
        (grpo, grpo, "The planned step helps"),
        (plan | {"less_grpo_high": -0.1}, grpo, "a step of GRPO adds 1.00 points more"),
        (plan | {"less_grpo": None}, grpo, "The planned step helps"),
        (plan | unsure, grpo, "Take GRPO"),
        (plan | unsure, grpo | unsure, "Sample more"),
        (plan | {"low": -2.0, "high": -1.0}, grpo, "Do not train"),
        (plan | {"slope": 0.0, "error": 0.0}, grpo, "Change the plan"),
    ):
        assert words in probe.advice(planned, reference, 30)
    assert "7 problems" in probe.advice(plan, grpo, 7)


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
        w_G = probe.contrast(self.right_XY[x, y_G])
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
    slopes_1N = probe.problem_slopes(halves, used, lambda i: toy.ascent(x_n[i], y_nG[i]))
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
    mean, low, high, _ = probe.interval(slopes_of(toy, x_n, y_nG, halves, used), 500)
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
    allowed_nV = probe.allowed(logits_nV / sampling.temperature, sampling)
    u_B = torch.linspace(0, 1 - 1e-9, 40_000, dtype=torch.float64)
    for logits_V, allowed_V in zip(logits_nV, allowed_nV):
        drawn = rollout.select_tokens(logits_V.expand(len(u_B), -1), u_B, sampling)
        assert sorted(drawn.unique().tolist()) == allowed_V.nonzero()[:, 0].tolist()


def test_the_score_of_truncated_draws_has_mean_zero():
    """It would not with the log-probability of the whole vocabulary."""
    torch.manual_seed(1)
    logits_V = torch.randn(7, requires_grad=True)
    sampling = rollout.Sampling(1.0, 0.8, 5)
    ids = probe.allowed(logits_V.detach()[None], sampling)[0].nonzero()[:, 0]
    logq_n = probe.drawn_logprob(sampling, ids, logits_V.expand(len(ids), -1))
    q_n = logq_n.exp().detach()
    assert float(q_n.sum()) == pytest.approx(1, abs=1e-6) and len(ids) < 6
    mean = torch.autograd.grad((q_n * logq_n).sum(), logits_V)[0]
    assert float(mean.abs().max()) < 1e-6
    plain = torch.autograd.grad((q_n * logits_V.log_softmax(-1)[ids]).sum(), logits_V)[0]
    assert float(plain.abs().max()) > 0.01


def test_a_drawn_id_beyond_a_threshold_counts_as_allowed():
    logits_nV = torch.tensor([[5.0, 4.0, -9.0]])
    logq_n = probe.drawn_logprob(rollout.Sampling(1.0, 1.0, 2), torch.tensor([2]), logits_nV)
    same(logq_n, logits_nV.log_softmax(-1)[:, 2], 1e-6)


# ------------------------------------------------------------------------------------- on the model


@pytest.fixture
def run(world_dir, tmp_path):
    """A run as after some steps: B is not 0."""
    changes = {"verifier": "driver:UnevenVerifier", "max_new_tokens": 12, "batch_size": 1}
    with driver.opened(world_dir, tmp_path / "run", BaselineConfig, **changes) as run:
        torch.manual_seed(3)
        for p in model.trained(run.lm).values():
            p.data += 0.05 * torch.randn_like(p)
        yield run


def a_row(run, samples=1):
    """A row of the run's settings, with rollouts of four problems."""
    options = SimpleNamespace(samples=samples, extra_samples=0, at=None)
    row = probe.make_row(run, "", run.cfg, run.problems[:4], options, {})
    row.groups = probe.draw(row)
    return row


def a_group(run):
    """Four rollouts of a problem with both outcomes, and how they were sampled."""
    row = a_row(run, samples=4)
    mixed = [group for group in row.groups if len({roll.r for roll in group}) == 2]
    return mixed[0], row.sampling


def test_the_backward_pass_is_the_difference_under_weights_moved_both_ways(run):
    """Forward passes under weights moved along +u and -u say the same, for one direction."""
    group, sampling = a_group(run)
    g_P = probe.ascent(run, group, sampling)
    torch.manual_seed(4)
    u_P = torch.nn.functional.normalize(torch.randn_like(g_P), dim=0)
    u_P = torch.nn.functional.normalize(u_P + g_P / g_P.norm(), dim=0)
    w_G = probe.contrast(torch.tensor([float(roll.r > 0) for roll in group]))
    prompts, ids = [roll.prompt_ids for roll in group], [roll.completion_ids for roll in group]
    params = list(model.trained(run.lm).values())
    parts = u_P.split([p.numel() for p in params])

    def weighed(step):
        """sum_i w_i log q(y_i) with the allowed ids of the unmoved weights, in float64."""
        with torch.no_grad():
            kept, _ = scoring.predictors(run.lm, prompts, ids)
            for p, part in zip(params, parts):
                p.add_(step * part.view_as(p))
            moved, ids_n = scoring.predictors(run.lm, prompts, ids)
            for p, part in zip(params, parts):
                p.sub_(step * part.view_as(p))
            head = scoring.causal_lm(run.lm).get_output_embeddings().weight.double()
            before, after = (x.double() @ head.T / sampling.temperature for x in (kept, moved))
            allowed_nV = probe.allowed(before, sampling).scatter(1, ids_n[:, None], True)
            logq_nV = after.masked_fill(~allowed_nV, -torch.inf).log_softmax(-1)
            logq_n = logq_nV.gather(1, ids_n[:, None])[:, 0]
            return sum(w * x.sum() for w, x in zip(w_G, logq_n.split([*map(len, ids)])))

    h = 2e-3
    difference = float(weighed(h) - weighed(-h)) / (2 * h)
    assert difference == pytest.approx(float(g_P @ u_P), rel=2e-3)


HALVES = [[0, 2], [1, 3]]


def test_adams_direction_is_minus_the_mean_gradient_over_its_root_mean_square(run, monkeypatch):
    """Minibatches of one problem. Of each weight's gradients only the 3 is clipped, to 1."""
    gradients = [3.0, 0.0, -0.5, 0.5]

    def rollout_loss(run, example):
        loss = gradients[example.index] * sum(p.sum() for p in model.trained(run.lm).values())
        return SimpleNamespace(loss=loss, a_K=t([0.5]), rho_K=t([1.0]))

    monkeypatch.setattr(baselines, "rollout_loss", rollout_loss)
    size = sum(p.numel() for p in model.trained(run.lm).values())
    run.cfg = dataclasses.replace(run.cfg, grad_clip=size**0.5)
    row = a_row(run)
    probe.set_directions(row, HALVES, 1, NO_BAR)
    # -(1 - .5)/2 / sqrt((1 + .25)/2), and -(0 + .5)/2 / sqrt((0 + .25)/2)
    expected = [-0.25 / 0.625**0.5, -0.25 / 0.125**0.5]
    for (adam_P, unit_P), value in zip(row.directions, expected):
        same(adam_P, torch.full((size,), value), 1e-5)
        same(unit_P, torch.full((size,), -(size**-0.5)), 1e-7)  # 3 - .5 and 0 + .5 are above 0


def test_the_slope_is_points_of_success_along_a_step_at_the_planned_rate(run):
    """100 times the rate, 1e-2, for Adam's direction; without the rate for the unit direction."""
    row = a_row(run, samples=4)
    parts = [probe.ascent(run, group, row.sampling) for group in row.groups]
    torch.manual_seed(5)
    row.directions = [torch.randn(2, len(parts[0])) for _ in HALVES]
    probe.set_slopes([row], HALVES, NO_BAR)
    along = [row.directions[1 - i % 2] @ parts[i] for i in range(4)]  # the other half's
    same(t(row.points_N.tolist()), [float(adam) for adam, _ in along], 1e-5)
    assert any(row.points_N)
    assert row.numbers["slope"] == pytest.approx(float(row.points_N.mean()))
    assert row.numbers["unit"] == pytest.approx(100 * sum(float(unit) for _, unit in along) / 4)


def test_a_gradient_that_is_not_finite_ends_the_probe(run):
    row = a_row(run)
    next(iter(model.trained(run.lm).values())).data.fill_(math.nan)
    with pytest.raises(ValueError, match="not finite"):
        probe.set_directions(row, HALVES, 1, NO_BAR)


# -------------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def command(world_dir, tmp_path_factory):
    """Runs the probe in an empty folder; its numbers, and nothing else is left behind."""
    folder = tmp_path_factory.mktemp("probe")
    scratch = folder / "scratch"
    scratch.mkdir()
    changes = {"max_new_tokens": 12, "batch_size": 3, "verifier": "driver:UnevenVerifier"}
    flags = driver.flags(world_dir, "unused", **changes)
    base = [flag for flag in flags if not flag.startswith("--out=")]
    base += ["--problems=4", "--samples=3"]

    class Command:
        argv = base

        def __call__(self, *more):
            numbers = folder / "numbers.json"
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(folder)
                patch.setattr(tempfile, "tempdir", str(scratch))
                driver.completes(probe.main, [*base, *more, f"--out={numbers}"])
            assert not list(scratch.iterdir()) and not (folder / "unused").exists()
            return json.loads(numbers.read_text())

    return Command()


@pytest.fixture(scope="module")
def plain(command):
    """The numbers of the command without another flag."""
    return command()


ROW = {"flags", "slope", "low", "high", "relative", "cut", "success", "decided", "smallest"}


def test_the_probe_has_a_row_for_grpo_the_plan_and_each_try(command, tmp_path, capsys):
    make_bank(tmp_path / "other.json", 9, 9)
    tries = (f"--bank {tmp_path}/other.json --num-teachers 2", "--method opsd", "--no-polarity")
    numbers = command(*[f"--try={text}" for text in tries])
    assert {"success", "rollouts", "seconds", "rows"} <= numbers.keys()
    assert numbers["rollouts"] == 12 and 0 < numbers["success"] < 1
    grpo, plan, *others = numbers["rows"]
    for row in numbers["rows"]:
        assert row.keys() >= ROW and row["low"] <= row["slope"] <= row["high"]
        assert row["success"] == numbers["success"]  # one set of rollouts
        assert row["less_grpo"] == pytest.approx(row["slope"] - grpo["slope"])
        assert row["less_grpo_low"] <= row["less_grpo"] <= row["less_grpo_high"]
    assert grpo["flags"].startswith("--method grpo") and plan["flags"] == ""
    assert [row["flags"] for row in others] == list(tries)
    assert grpo["decided"] is None and 0 < plan["decided"] <= 1
    assert len({row["slope"] for row in numbers["rows"]}) == 5
    printed = capsys.readouterr().out
    assert printed.index("cost: ") < printed.index("success ") < printed.index("\nas planned")


def test_the_same_command_gives_the_same_numbers(plain, command):
    assert command()["rows"] == plain["rows"]


@pytest.mark.long
def test_rows_that_sample_otherwise_have_rollouts_of_their_own(command, capsys):
    numbers = command("--try", "--temperature 0.6", "--try", "--student-prefix bare")
    assert "cost: 3 x 4 problems" in capsys.readouterr().out
    assert len({row["slope"] for row in numbers["rows"]}) == 4
    assert [row["less_grpo"] is None for row in numbers["rows"]] == [False, False, True, True]


def test_extra_samples_are_for_the_covariance_alone(plain, command):
    more = command("--extra-samples", "3")
    assert (plain["rollouts"], more["rollouts"]) == (12, 24)
    for a, b in zip(plain["rows"], more["rows"]):
        assert a["decided"] == b["decided"] and a["support_failure"] == b["support_failure"]
        assert a["slope"] != b["slope"]


def test_a_planned_grpo_is_grpos_row(command):
    (row,) = command("--method=grpo", "--bank=")["rows"]
    assert row["flags"].startswith("--method grpo") and row["less_grpo"] == 0


def test_a_planned_grpo_keeps_its_own_settings():
    changes = {"batch_size": 4, "generations": 6, "loss_temperature": 0.5, "drop_truncated": True}
    flags, of_row = probe.grpo_of(BaselineConfig(method="grpo", **changes), samples=3)
    assert (of_row.batch_size, of_row.generations) == (8, 3)  # as many rollouts, in smaller groups
    assert of_row.loss_temperature == 0.5 and of_row.drop_truncated
    assert "--drop-truncated" in flags and "--loss-temperature 0.5" in flags
    of_sgsd = probe.grpo_of(BaselineConfig(loss_temperature=0.5), 3)[1]
    assert of_sgsd.loss_temperature == 0.0  # the sampling's


def test_on_a_server_the_probe_samples_its_adapter_and_takes_it_off_again(command):
    with serving() as engine:
        assert command("--server", engine.url)["rollouts"] == 12
        asked = [body["model"] for body in engine.bodies() if "prompt_logprobs" not in body]
        (loaded,) = engine.bodies("/v1/load_lora_adapter")
        assert asked == [loaded["lora_name"]] * 12 and not engine.adapters


def test_at_a_checkpoint_its_adapter_is_measured(command, world_dir, tmp_path):
    """Two checkpoints of one step, and so of the same draws, which were trained at other rates."""
    changes, slopes = {"max_new_tokens": 12, "batch_size": 3, "steps": 2}, []
    for name, rate in (("moved", 1e-2), ("as begun", 1e-9)):
        out = tmp_path / name
        driver.train(
            world_dir, out, baselines.train_step, BaselineConfig, learning_rate=rate, **changes
        )
        numbers = command("--at", str(out / "checkpoints/step_000002"))
        slopes.append([row["slope"] for row in numbers["rows"]])
    assert slopes[0] != slopes[1]


def test_at_a_checkpoint_the_runs_bank_is_the_one_in_use(run, tmp_path):
    (tmp_path / "old/bank").mkdir(parents=True)
    files.write_json(tmp_path / "old/config.json", {"settings": {"bank": "a.json"}})
    for name, size in (("old/bank/step_000000", 4), ("old/bank/step_000002", 5), ("b", 6)):
        make_bank(tmp_path / f"{name}.json", size, size)
    at = str(tmp_path / "old/checkpoints/step_000002")
    for bank, size in (("a.json", 5), ("", 5), (str(tmp_path / "b.json"), 6)):
        cfg = dataclasses.replace(run.cfg, bank=bank)
        at_step_2 = dataclasses.replace(run, cfg=cfg, step=2)
        assert len(probe.bank_of(at_step_2, at).general_skills) == size


def test_flags_of_the_plan_and_tries_may_stand_in_a_file(tmp_path):
    lines = '--num-teachers 2  # fewer\n--bank "a b.json"\n--problems 9\n--try=--no-clip\n'
    (tmp_path / "flags.txt").write_text(lines)
    options, ((_, grpo), (_, plan), (flags, other)) = probe.parse([f"@{tmp_path}/flags.txt"])
    assert options.problems == 9 and (plan.num_teachers, plan.bank) == (2, "a b.json")
    assert flags == "--no-clip" and not other.clip and plan.clip and grpo.method == "grpo-short"


def test_a_mistake_is_one_line(command, capsys, tmp_path):
    for given, *words in (
        ("--problems=3", "--problems", ">= 4"),
        ("--at=nowhere", "nowhere"),
        ("--try=--seed 4", "--seed 4", "all rows share it"),
        ("--try=--split valid", "--split", "all rows share it"),
        ("--try=--no-such", "--no-such"),
        ("--try=--num-teachers 99", "--num-teachers 99"),
        ("--temperature=0", "--temperature 0"),
        (f"--out={tmp_path}", ".json"),
    ):
        refused(capsys, probe.main, [*command.argv, given], *words)
