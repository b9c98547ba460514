"""GRPO (§4.1, Tab. 11): advantages and loss by hand, a step by its definition, the command."""

import math

import pytest
import small_run
import torch
from conftest import one_line, same, t
from method_steps import assert_gradients, logprobs_of, one_step
from small_run import parsed

import scoring
import skills
from lib import config
from methods import groups, grpo


def test_grpo_advantages():
    # mean 0, std sqrt(4 / 3) = 1.1547: +-1 / (1.1547 + 0.0001)
    want = [x / (math.sqrt(4 / 3) + 1e-4) for x in (1, -1, -1, 1)]
    same(grpo.grpo_advantages(t([1.0, -1.0, -1.0, 1.0])), want)
    # mean 1/2, std sqrt((1/4 + 1/4 + 0) / 2) = 1/2; eps 1/2: -+1/2 and 0
    same(grpo.grpo_advantages(t([0.0, 1.0, 0.5]), eps=0.5), [-0.5, 0.5, 0.0])
    assert not grpo.grpo_advantages(t([-1.0] * 8)).any()  # a group that teaches nothing
    assert not grpo.grpo_advantages(t([0.3] * 6), eps=1e-6).any()  # whose mean rounds
    one_line(lambda: grpo.grpo_advantages(torch.ones(1)), "G >= 2", "(1,)")


@pytest.mark.parametrize(
    ("advantage", "loss", "slopes"),
    [
        # ratios 1, 2 and 1/2 are clipped to 1, 1.2 and 0.8; the smaller of both terms counts:
        # A = 2: 2, 2.4 and 1, a sum of 5.4; the second is the clipped one and has no slope
        (2.0, -5.4 / 3, [-2 / 3, 0.0, -1 / 3]),
        # A = -1: -1, -2 and -0.8, a sum of -3.8; the third is the clipped one
        (-1.0, 3.8 / 3, [1 / 3, 2 / 3, 0.0]),
    ],
)
def test_grpo_loss(advantage, loss, slopes):
    old_T = t([-1.0, -2.0, -0.5])
    new_T = (old_T + t([1.0, 2.0, 0.5]).log()).requires_grad_()
    got = grpo.grpo_loss(new_T, old_T, advantage)
    got.backward()
    same(got.detach(), loss)
    same(new_T.grad, slopes)
    of_each_token = grpo.grpo_loss(new_T.detach(), old_T, t([advantage] * 3))
    same(of_each_token, loss)


@pytest.mark.parametrize("method", ["grpo", "grpo+skill"])
def test_the_gradient_of_grpo_is_the_policy_gradient(method, world_dir, tmp_path):
    changes = {"generations": 3, "batch_size": 2, "verifier": "method_steps:TwoOfThree"}
    run, rows_of_step, got = one_step(world_dir, tmp_path / "run", method, **changes)
    for group in (rows_of_step[:3], rows_of_step[3:]):
        assert sorted(row["r"] for row in group) == [-1, 1, 1]
    assert len({tuple(row["completion_ids"]) for row in rows_of_step}) == 6
    assert len({tuple(row["prompt_ids"]) for row in rows_of_step}) == 2
    total = 0.0
    for row in rows_of_step:
        # rewards -1, 1, 1: mean 1/3, sample std 2 / sqrt(3)
        advantage = (row["r"] - 1 / 3) / (2 / math.sqrt(3) + 1e-4)
        assert (row["advantage"], row["loss"]) == pytest.approx((advantage, -advantage), abs=1e-5)
        assert not {"alpha", "a", "rho"} & {*row} and row["mixed"] == 1  # it has no teachers
        pairs, ids = [], row["completion_ids"]
        if method == "grpo+skill":
            pairs = run.bank.retrieve(row["problem"], 3, run.embed)
        assert [names[0] for names in row["pairs"]] == [pair.skill["skill_id"] for pair in pairs]
        logp_TV = logprobs_of(run, skills.render_skills(pairs, row["problem"]), "bare", ids)
        # at ratio 1 the clipped ratio's gradient is the policy gradient
        total = total - advantage * logp_TV[range(len(ids)), ids].mean() / 6
    assert_gradients(got, run, total)


def test_a_group_whose_rewards_are_equal_is_not_scored(world_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "token_logprobs", lambda *_, **__: pytest.fail("it is scored"))
    changes = {"generations": 3, "batch_size": 2, "verifier": "small_run:Exact"}
    _, of_step, gradients = one_step(world_dir, tmp_path / "run", "grpo", **changes)
    assert {(row["r"], row["loss"], row["mixed"]) for row in of_step} == {(-1, 0, 0)}
    assert not any(gradient.any() for gradient in gradients)


def test_no_two_solutions_of_a_problem_that_comes_twice_have_one_draw(world_dir, tmp_path):
    """Twelve problems in a batch of 24: the epoch is part of a draw's key."""
    changes = {"batch_size": 24, "generations": 3, "bank": ""}
    with small_run.opened(world_dir, tmp_path / "run", grpo.GRPOConfig, **changes) as run:
        jobs, _ = groups.step_jobs(run, 1, False, groups.nearest)
    assert len(jobs) == len({job.key for job in jobs}) == 72


LENGTHS = ("max_new_tokens", "max_prompt_tokens", "temperature", "top_p", "top_k")


def test_tab11_its_own_defaults_with_skills_or_without_and_flags_that_win_over_them():
    """With +skill the bank stays as it is (S17). --short is sampled and clipped as SGSD."""
    for argv in ([], ["--bank", "b.json"]):
        cfg = parsed(argv, "grpo")
        assert [getattr(cfg, name) for name in LENGTHS] == [16000, 2048, 1.2, 1.0, 0]
        assert (cfg.generations, cfg.student_prefix, cfg.grad_clip) == (8, "bare", 1.0)
        assert cfg.uses_skill_bank == bool(argv)
    assert (cfg.num_teachers, cfg.evolve_every) == (3, 0)
    assert parsed(["--top-k", "20"], "grpo").top_k == 20
    short, ours = parsed(["--short"], "grpo"), config.Config()
    for name in (*LENGTHS, "student_prefix", "grad_clip", "learning_rate", "batch_size"):
        assert getattr(short, name) == getattr(ours, name)
    assert short.generations == 8 and not short.uses_skill_bank
