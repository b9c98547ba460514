"""GRPO (§4.1, Tab. 11): advantages and loss by hand, a step by its definition, the command."""

import math

import driver
import pytest
import small_run
import torch
from conftest import one_line, same, save_model, t, watched
from method_steps import assert_gradients, logprobs_of, one_step
from small_run import parsed

import rollout
import skills
from lib import config, model
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


@pytest.mark.parametrize("verifier", ["small_run:Exact", "method_steps:TwoOfThree"])
def test_a_group_whose_rewards_are_equal_is_not_scored(verifier, world_dir, tmp_path):
    """A pass that scores has prompt and solution; one that decodes has the prompt or a token."""
    changes = {"generations": 3, "batch_size": 2, "verifier": verifier, "bank": ""}
    with small_run.opened(world_dir, tmp_path / "run", grpo.GRPOConfig, **changes) as run:
        with watched(model.causal_lm(run.lm).base_model) as passes:
            of_step, norm = grpo.train_step(run, 1)
    of_mixed = [row["mixed"] for row in of_step if row["loss"]]
    assert len(of_mixed) == (0 if verifier == "small_run:Exact" else 6) == sum(of_mixed)
    longest = max(len(row["prompt_ids"]) for row in of_step)
    assert sum(width > longest for _, width in passes) == len(of_mixed)
    assert bool(norm) == bool(of_mixed)


@pytest.mark.parametrize("method", ["grpo", "opsd"])
@pytest.mark.parametrize("limit", ["context", "max_prompt_tokens"])
def test_the_last_pairs_are_left_out_until_the_prompt_fits(
    limit, method, world_dir, tmp_path, capsys
):
    """S35. Of three pairs one is shown: the row names it, and a line says so once."""
    program, config_class = small_run.METHODS[method]
    bank = skills.SkillBank.load(world_dir / "bank.json")
    with small_run.opened(world_dir, tmp_path / "a", config_class, steps=1) as run:
        best = {x.problem: bank.retrieve(x.problem, 3, run.embed) for x in run.problems}

    def prompt_of(problem, count):
        text = skills.render_skills(best[problem][:count], problem)
        return rollout.chat_ids(run.tokenizer, text, thinking=run.cfg.student_prefix)

    most = max(len(prompt_of(problem, 1)) for problem in best)
    assert most < min(len(prompt_of(problem, 2)) for problem in best)
    changes = {"max_prompt_tokens": most}
    if limit == "context":
        folder = save_model(tmp_path / "model", max_position_embeddings=most + 1)
        changes = {"model": str(folder)}
    with small_run.opened(world_dir, tmp_path / "b", config_class, **changes) as run:
        of_step, _ = program.train_step(run, 1)
    for row in of_step:
        first = best[row["problem"]][0]
        assert row["pairs"] == [[first.skill["skill_id"], first.mistake["mistake_id"]]]
        assert row["prompt_ids"] == prompt_of(row["problem"], 1)
    assert capsys.readouterr().out.count("pairs are left out") == 1


def test_no_steps_are_refused_where_there_is_no_bank_to_make(world_dir, tmp_path):
    argv = small_run.flags(world_dir, tmp_path / "run", steps=0, bank="")
    driver.refused(small_run.main, ["grpo", *argv], "--steps 0")
    assert not (tmp_path / "run").exists()


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
