"""One step of `SGSDTrainer` has the gradient of sgsd.py's step."""

from types import SimpleNamespace

import conftest
import driver
import pytest
import torch
import trl_worlds
from trl_worlds import PROBLEMS, completions, one_step, policy, settings, trainer

import rollout
import scoring
import sgsd
from lib import config, runlog


def step_of_sgsd(lm, run, rolls, num_teachers):
    """The gradient of sgsd.py's loss on these rollouts, and what came of each."""
    cfg = config.Config(num_teachers=num_teachers)
    bank, tokenizer = conftest.make_bank(), conftest.make_tokenizer()
    space = SimpleNamespace(cfg=cfg, lm=lm, tokenizer=tokenizer, masked_ids=run.masked_ids)
    space.device, space.clock = torch.device("cpu"), runlog.Stopwatch()
    results = []
    for roll in rolls:
        pairs_K = bank.retrieve(roll.problem, num_teachers, conftest.fake_embed)
        results.append(sgsd.rollout_loss(space, roll, pairs_K))
        (results[-1].loss / len(rolls)).backward()
    gradient = {n: p.grad for n, p in lm.named_parameters() if p.grad is not None}
    return gradient, results


def rollouts_of(run, rows):
    """The given rollouts, judged."""
    tokenizer = conftest.make_tokenizer()
    jobs = []
    for i, (x, ids) in enumerate(zip(PROBLEMS, rows)):
        prompt = trl_worlds.student_ids(tokenizer, x.problem)
        jobs.append(rollout.Job(i, prompt, 0, 0, x, ids))
    (judged,) = rollout.rollouts(tokenizer, run.stops, driver.CoinVerifier(), [jobs])
    return [roll for _, roll in judged]


def distance(one, other):
    """||one - other|| / ||other|| over all parameters, whose names must agree."""
    assert one.keys() == other.keys()
    difference = sum(float((one[name] - other[name]).square().sum()) for name in one)
    return (difference / sum(float(x.square().sum()) for x in other.values())) ** 0.5


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("num_teachers", [1, 4])
@pytest.mark.parametrize("rows", [6, 3], ids=["one backward pass", "two micro-batches"])
def test_the_gradient_is_that_of_sgsd_py(tmp_path, lora, num_teachers, rows):
    """Lengths are uneven; one rollout has no unmasked token, and one is cut."""
    changes = {"num_teachers": num_teachers, "per_device_train_batch_size": rows}
    run, gradient = one_step(tmp_path, lora, **changes)
    rolls = rollouts_of(run, completions(6))
    assert [roll.truncated for roll in rolls] == [False, False, True, False, False, False]
    expected, results = step_of_sgsd(policy(lora), run, rolls, num_teachers)
    assert float(results[1].mask_T.sum()) == 0
    assert sum(float(x.square().sum()) for x in expected.values()) > 0
    assert distance(gradient, expected) < 1e-5


@pytest.mark.parametrize("lora, function", [(True, "one_step"), (False, "sharded_step")])
def test_two_processes_with_given_rollouts_have_the_gradient_of_one(tmp_path, lora, function):
    """Adapters on each process, or all weights in shards."""
    _, gradient = one_step(tmp_path, lora)
    output = trl_worlds.torchrun(function, tmp_path / "two")
    other = torch.load(tmp_path / "two/gradient.pt", weights_only=True)
    assert distance(other, gradient) < 1e-5, output


def test_in_bf16_supports_and_polarities_are_those_of_scoring_py(tmp_path):
    """TRL's own head would round log-probabilities to bf16, and eps_a is .05 nats."""
    lm = policy(lora=False, dtype=torch.bfloat16)
    rows = completions(6)
    run = trainer(settings(tmp_path, per_device_train_batch_size=6), lm, rows)
    rolls = rollouts_of(run, rows)
    _, results = step_of_sgsd(policy(lora=False, dtype=torch.bfloat16), run, rolls, 4)
    for roll, result in zip(rolls, results):
        pairs_K = run.bank.retrieve(roll.problem, 4, run.embed)
        contexts = [roll.prompt_ids, *sgsd.teacher_prompts(run.parts, pairs_K, roll.problem)]
        logpS_T, *logps = run.score(contexts, [roll.completion_ids] * 5)
        ours = scoring.token_logprobs(lm, contexts, [roll.completion_ids] * 5)
        torch.testing.assert_close(torch.stack([logpS_T, *logps]), ours, rtol=0, atol=1e-4)
        A_T, numbers = run.advantage(roll, pairs_K, logpS_T, torch.stack(logps))
        fates = [(result.rho_K == rho).float().mean().item() for rho in (1, -1, 0)]
        assert numbers[:3].tolist() == fates
        T = len(A_T)
        torch.testing.assert_close(A_T, T * result.credit_KT.sum(0), rtol=0.05, atol=1e-3)
