"""One step of `SGSDTrainer` has the gradient of sgsd.py's step."""

import os
import pathlib

import pytest
import torch
import trl_worlds
from torch.distributed.tensor import DTensor
from trl_worlds import (
    PLAIN,
    completions,
    distance,
    one_step,
    policy,
    rollouts_of,
    settings,
    step_of_sgsd,
    trainer,
)

import scoring
import sgsd
from extras import on_trl


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("num_teachers", [1, 4])
@pytest.mark.parametrize("rows", [6, 3], ids=["one backward pass", "two micro-batches"])
def test_the_gradient_is_that_of_sgsd_py(tmp_path, lora, num_teachers, rows):
    """Lengths are uneven; one rollout has no unmasked token, and one is cut."""
    of_trl, gradient = one_step(tmp_path, lora, num_teachers=num_teachers, backward_rows=rows)
    rolls = rollouts_of(of_trl.run, completions(6))
    assert [roll.truncated for roll in rolls] == [False, False, True, False, False, False]
    expected, results = step_of_sgsd(policy(lora), of_trl.run, rolls)
    assert int(results[1].token_numbers["mask"].sum()) == 0
    assert sum(float(x.square().sum()) for x in expected.values()) > 0
    assert distance(gradient, expected) < 1e-5


def sharded_step(folder):
    """`one_step` of all weights, in shards."""
    of_trl, _ = one_step(folder, lora=False, words=())
    assert all(isinstance(p, DTensor) for p in of_trl.model.parameters())


def sharded_adapters(folder):
    one_step(folder, words=())


@pytest.mark.parametrize(
    "lora, function", [(True, "one_step"), (True, "sharded_adapters"), (False, "sharded_step")]
)
def test_two_processes_with_given_rollouts_have_the_gradient_of_one(tmp_path, lora, function):
    """Adapters on each process, or in shards as all weights."""
    _, gradient = one_step(tmp_path, lora)
    output = trl_worlds.torchrun(f"test_gradient:{function}", tmp_path / "two")
    other = torch.load(tmp_path / "two/gradient.pt", weights_only=True)
    assert distance(other, gradient) < 1e-5, output


CONTEXT = 457  # tokens


def short_step(folder, words=()):
    """A step in which the longest teachers' prompts do not fit the context with the solution."""
    return one_step(folder, lora=False, words=words, context=CONTEXT)


def test_teachers_that_do_not_fit_the_context_are_left_out(tmp_path):
    """S35. In shards, processes that score fewer teachers make as many passes as the others."""
    of_trl, gradient = short_step(tmp_path, PLAIN)
    rolls = rollouts_of(of_trl.run, completions(6))
    expected, results = step_of_sgsd(policy(False, context=CONTEXT), of_trl.run, rolls)
    assert [len(result.pairs_K) for result in results] == [3, 3, 2, 1, 1, 0]
    assert distance(gradient, expected) < 1e-5
    trl_worlds.torchrun("test_gradient:sharded_short_step", tmp_path / "two")
    other = torch.load(tmp_path / "two/gradient.pt", weights_only=True)
    assert distance(other, gradient) < 1e-5


def sharded_short_step(folder):
    short_step(folder)


def test_in_bf16_supports_and_polarities_are_those_of_scoring_py(tmp_path):
    """TRL's own head would round log-probabilities to bf16, and eps_a is .05 nats."""
    lm, rows = policy(lora=False, dtype=torch.bfloat16), completions(6)
    of_trl = trainer(settings(tmp_path, backward_rows=6), lm, rows)
    run = of_trl.run
    of_trl.rolls = rollouts_of(run, rows)
    _, results = step_of_sgsd(policy(lora=False, dtype=torch.bfloat16), run, of_trl.rolls)
    output = {"completion_ids": torch.zeros(6, max(map(len, rows)))}
    ours = [result for _, result in of_trl.results(output)]
    for b, (roll, result) in enumerate(zip(of_trl.rolls, results)):
        _, teachers_K = sgsd.teacher_prompts(run, result.pairs_K, roll.problem, roll)
        contexts, ids_T = [roll.prompt_ids, *teachers_K], roll.completion_ids
        want = scoring.token_logprobs(lm, contexts, [ids_T] * 5)
        torch.testing.assert_close(of_trl.score(contexts, ids_T), want, rtol=0, atol=1e-4)
        assert ours[b].numbers["rho"].tolist() == result.numbers["rho"].tolist()
        A_T, credit_T = output["advantages"][b], result.token_numbers["credit"].sum(0)
        wanted_T = torch.zeros_like(A_T)
        wanted_T[: len(ids_T)] = len(ids_T) * credit_T
        torch.testing.assert_close(A_T, wanted_T, rtol=0.05, atol=1e-3)


def sharded_bf16(folder):
    """A step of all weights in shards, multiplied in bf16; rank 0 saves what it scored, too."""
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    scored = []

    class Recorded(on_trl.SGSDTrainer):
        def score(self, contexts, ids_T):
            scored.append(super().score(contexts, ids_T))
            return scored[-1]

    on_trl.SGSDTrainer = Recorded
    of_trl, _ = one_step(folder, lora=False, words=(*PLAIN, "--bf16", "True"))
    kept = of_trl.accelerator.state.fsdp_plugin.mixed_precision_policy
    dtypes = kept.param_dtype, kept.reduce_dtype, kept.output_dtype
    assert dtypes == (torch.bfloat16, torch.float32, None)
    if of_trl.accelerator.is_main_process:
        torch.save(torch.cat([x.flatten() for x in scored]), pathlib.Path(folder, "scored.pt"))


def test_in_bf16_shards_round_no_log_probability_and_have_the_gradient_of_one_process(tmp_path):
    """FSDP2 may cast what a model returns, and sums of gradients; products alone are rounded."""
    _, gradient = one_step(tmp_path, lora=False)
    trl_worlds.torchrun("test_gradient:sharded_bf16", tmp_path / "two")
    scored = torch.load(tmp_path / "two/scored.pt", weights_only=True)
    assert (scored != scored.bfloat16().float()).float().mean() > 0.9
    other = torch.load(tmp_path / "two/gradient.pt", weights_only=True)
    assert distance(other, gradient) < 0.05


# ----------------------------------------------------------------------- an edit reaches both loops


def test_an_edit_of_a_function_of_sgsd_py_changes_both_loops_alike(tmp_path, monkeypatch):
    """log cosh in the place of the gate."""
    rows, changes = completions(6, step=9), []
    for name in ("before", "after"):
        of_trl, gradient = one_step(tmp_path / name, ids=rows)
        own, _ = step_of_sgsd(policy(lora=True), of_trl.run, rollouts_of(of_trl.run, rows))
        assert distance(gradient, own) < 1e-5
        changes.append(gradient)
        monkeypatch.setattr(sgsd, "gated_loss", lambda delta, tau_g: delta.cosh().log())
        monkeypatch.setattr(sgsd, "gate_grad", lambda delta, tau_g: delta.tanh())
    assert distance(*changes) > 0.1
