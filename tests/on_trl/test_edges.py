"""What TRL would pass over: dropouts, steps that are not finite, padding, prompts, precision."""

import dataclasses
import functools
import json
from types import SimpleNamespace

import conftest
import driver
import pytest
import torch
import trl_worlds
from accelerate.utils import DistributedType
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import TrainerCallback
from transformers.models.qwen3_5 import modeling_qwen3_5
from trl_worlds import PROBLEMS, completions, policy, rollouts_of, settings, small_flags, trainer

from extras import on_trl, trl_run
from lib import files
from lib import model as lib_model


@pytest.mark.parametrize(
    "kind, changes",
    {
        "seed_oss": {"attention_dropout": 0.1, "residual_dropout": 0.1},
        "persimmon": {"attention_dropout": 0.1, "hidden_dropout": 0.1},
    }.items(),
)
def test_teacher_and_student_are_one_function_whatever_dropout_a_model_has(tmp_path, kind, changes):
    rows = completions(6)
    run = trainer(settings(tmp_path), conftest.make_model(kind, **changes), rows)
    run.model.train()
    rolls = rollouts_of(run, rows)
    prompts = [roll.prompt_ids for roll in rolls]
    for one, other in zip(run.score(prompts, rows), run.score(prompts, rows)):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_kernels_of_a_gpu_are_not_tried_before_shards_are_on_it(tmp_path, monkeypatch):
    run = trainer(settings(tmp_path), conftest.make_model(), completions(6))
    monkeypatch.setattr(lib_model, "refuse_not_finite", None)
    run.args.sgsd = dataclasses.replace(run.args.sgsd, attn="flash_attention_2")
    run.refuse_what_fails_later(run.parts.lm)


# ------------------------------------------------------------------- a gradient that is not finite


class Weights(TrainerCallback):
    """Keeps what learns after each step."""

    def __init__(self):
        self.steps = []

    def on_step_end(self, args, state, control, model=None, **_):
        kept = {name: p.detach().clone() for name, p in lib_model.trained(model).items()}
        self.steps.append(kept)


def overflowing(steps):
    """In the place of `advantage`: its numbers, but infinite in some steps."""
    advantage = on_trl.SGSDTrainer.advantage

    def of_rollout(self, *rest):
        A_T, numbers = advantage(self, *rest)
        is_bad = self.state.global_step + 1 in steps
        return A_T + float("inf") if is_bad else A_T, numbers

    return of_rollout


def test_a_step_whose_gradient_is_not_finite_leaves_the_weights_as_they_are(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(on_trl.SGSDTrainer, "advantage", overflowing([2]))
    weights = Weights()
    args = settings(tmp_path, steps=3, eps_a=0.0, learning_rate=1e-2)
    run = trainer(args, policy(lora=True), completions(6), callbacks=[weights])
    run.train()
    first, second, third = weights.steps
    for name in first:
        assert torch.equal(first[name], second[name])
        assert third[name].isfinite().all()
    assert any(not torch.equal(second[name], third[name]) for name in first)
    assert "step 2" in capsys.readouterr().out
    moments = [*run.optimizer.state.values()]
    assert moments and all(int(x["step"]) == 2 for x in moments)


def test_three_such_steps_in_a_row_end_the_command_with_1(world_dir, tmp_path, monkeypatch, capsys):
    """Before, they are not in a row. Started again it goes on after the last one."""
    monkeypatch.setattr(on_trl.SGSDTrainer, "advantage", overflowing([1, 2, 4, 5, 6]))
    argv = small_flags(world_dir, tmp_path / "run", steps=8, save_steps=8, evolve_every=0)
    assert on_trl.main(argv) == 1
    assert "three steps" in capsys.readouterr().out
    record = files.read_json(tmp_path / "run/sgsd/config.json")
    assert record["finished"] == 0
    assert [*files.by_number(tmp_path / "run")] == [6]
    monkeypatch.undo()
    assert on_trl.main(argv) == 0
    assert [*files.by_number(tmp_path / "run")] == [6, 8]


def test_an_infinite_gradient_on_one_process_leaves_out_the_step_on_both(tmp_path):
    """Clipped by an infinite norm, the other process's shards would be finite zeros."""
    trl_worlds.torchrun("sharded_infinite", tmp_path / "run")
    for rank in (0, 1):
        says = json.loads((tmp_path / f"run/rank{rank}.json").read_text())
        assert says == {"skipped": 1, "moved": []}


# --------------------------------------------------------------------------- refused before a step


@pytest.mark.parametrize(
    "function, words",
    {
        "sharded_by_version_1": "version 2",
        "sharded_in_parts": "fsdp_state_dict_type: FULL_STATE_DICT",
    }.items(),
)
def test_shards_that_fail_in_the_end_are_refused_in_one_line(tmp_path, function, words):
    """The bank's writer would crash, or the folder would have no weights."""
    output = trl_worlds.torchrun(function, tmp_path / "run")
    lines = [line for line in output.split("\n") if line.startswith("refused: ")]
    assert len(lines) == 2 and all(words in line for line in lines)


@pytest.mark.parametrize("kind", ["gpt2", "gpt_bigcode"])
def test_a_model_whose_positions_count_the_padding_is_refused_in_one_line(tmp_path, kind):
    """TRL's training pass pads prompts on the left and names no positions."""
    call = functools.partial(trainer, settings(tmp_path), conftest.make_model(kind), completions(6))
    conftest.one_line(call, "left padding")


def test_a_model_whose_states_take_in_padding_is_refused_in_one_line(tmp_path, monkeypatch):
    trainer(settings(tmp_path), conftest.make_model("qwen3_5_text"), completions(6))
    monkeypatch.setattr(modeling_qwen3_5, "apply_mask_to_padding_states", lambda x, _: x)
    lm = conftest.make_model("qwen3_5_text")
    call = functools.partial(trainer, settings(tmp_path), lm, completions(6))
    conftest.one_line(call, "left padding")


def test_shards_sum_gradients_and_return_log_probabilities_in_fp32():
    """accelerate's policy for bf16 rounds both."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    plugin = SimpleNamespace(mixed_precision_policy=policy)
    accelerator = SimpleNamespace(distributed_type=DistributedType.FSDP)
    accelerator.state = SimpleNamespace(fsdp_plugin=plugin)
    run = SimpleNamespace(accelerator=accelerator, model=SimpleNamespace(generate=print))
    trl_run.CheckedTrainer.set_up_shards(run)
    kept = plugin.mixed_precision_policy
    assert (kept.param_dtype, kept.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert kept.output_dtype is None


def test_one_process_that_sees_several_gpus_is_refused(tmp_path, monkeypatch):
    """TRL would lay the model over all of them."""
    monkeypatch.setattr(on_trl.SGSDConfig, "n_gpu", 2)
    conftest.one_line(lambda: settings(tmp_path), "2 GPUs", "accelerate")


def test_weights_that_learn_in_bf16_are_refused_in_one_line(world_dir, tmp_path, capsys):
    argv = ["--full", *small_flags(world_dir, tmp_path / "run", dtype="bfloat16")]
    driver.refused(capsys, on_trl.main, argv, "bfloat16", "float32")
    assert not (tmp_path / "run/sgsd").exists()


@pytest.mark.parametrize("changes", [{"max_prompt_tokens": 200}, {"max_new_tokens": 3900}])
def test_a_teachers_prompt_that_is_too_long_is_refused_at_the_start(tmp_path, changes):
    """The student's would fit."""
    tokenizer = conftest.make_tokenizer()
    students = [trl_worlds.student_ids(tokenizer, x.problem) for x in PROBLEMS]
    assert max(map(len, students)) < 190
    args = settings(tmp_path, **changes)
    call = functools.partial(trainer, args, policy(lora=True), completions(6))
    (flag,) = changes
    conftest.one_line(call, flag.replace("_", "-"), "gen_", "err_")


# ------------------------------------------------------------------------------------ the sampling


@pytest.mark.parametrize("lora", [True, False])
def test_a_models_own_generation_settings_change_neither_rollouts_nor_replies(tmp_path, lora):
    outcomes = []
    for own in ({}, {"no_repeat_ngram_size": 1, "min_p": 0.9, "suppress_tokens": [*range(99)]}):
        lm = policy(lora)
        lib_model.causal_lm(lm).generation_config.update(**own)
        run = trainer(settings(tmp_path), lm)
        run.train()
        rows = [roll.completion_ids for roll in run.rollouts]
        prompts = [roll.prompt_ids for roll in run.rollouts]
        outcomes.append((rows, run.decode(prompts, [20] * len(prompts), sampled=False)))
        kept = lib_model.causal_lm(lm).generation_config.to_dict()
        assert own.items() <= kept.items()
    assert outcomes[0] == outcomes[1]


# --------------------------------------------------------------------------------------- the bank


def write(self, prompts, names, repeats, limits):
    """In the place of the trainer's `write`."""
    return [driver.reply_to(prompt) for prompt in names]


def test_where_the_gate_is_closed_the_line_of_the_last_evolution_is_not_repeated(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(on_trl.SGSDTrainer, "write", write)
    changes = {"evolve_every": 1, "success_gate": 1.1}
    run = trainer(settings(tmp_path, **changes), policy(lora=True), completions(6))
    run.train()
    assert capsys.readouterr().out.count("evolved after step 1") == 1
    changes = {"evolve_every": 1, "success_gate": 0.0}
    again = trainer(settings(tmp_path / "again", **changes), policy(lora=True), completions(6))
    again.bank = run.bank
    again.train()
    output = capsys.readouterr().out
    assert "evolved after step 1" not in output and "unchanged" in output
    assert again.bank is run.bank and again.bank.window == []
