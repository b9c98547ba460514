"""What TRL would pass over, and what a command is refused for."""

import itertools
import re
import shutil

import conftest
import driver
import pytest
import small_run
import torch
import trl_worlds
from safetensors.torch import load_file, save_file
from trl_worlds import completions, policy, rollouts_of, settings, trainer

import sgsd
from extras import grpo_on_trl, on_trl
from lib import command, config, files
from lib import model as lib_model
from rollout import Job, Sampling


@pytest.mark.parametrize("kind", ["seed_oss", "persimmon"])
def test_teacher_and_student_are_one_function_whatever_dropout_a_model_has(tmp_path, kind):
    rows, name = completions(6), {"seed_oss": "residual_dropout", "persimmon": "hidden_dropout"}
    lm = conftest.make_model(kind, **{"attention_dropout": 0.1, name[kind]: 0.1})
    of_trl = trainer(settings(tmp_path), lm, rows)
    of_trl.model.train()
    prompts = [roll.prompt_ids for roll in rollouts_of(of_trl.run, rows)]
    one, other = of_trl.score(prompts, rows[0]), of_trl.score(prompts, rows[0])
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("lora", [True, False])
def test_a_models_own_generation_settings_change_neither_rollouts_nor_replies(tmp_path, lora):
    outcomes, others = [], {"no_repeat_ngram_size": 1, "min_p": 0.9, "do_sample": True}
    for name, own in (("a", {}), ("b", others | {"suppress_tokens": [*range(99)]})):
        lm = policy(lora)
        lib_model.causal_lm(lm).generation_config.update(**own)
        of_trl = trainer(settings(tmp_path / name), lm)
        of_trl.train()
        rows = [row["completion_ids"] for row in of_trl.rows]
        jobs = [Job(i, row["prompt_ids"], 0, 20) for i, row in enumerate(of_trl.rows)]
        turns = [*of_trl.stream(jobs, Sampling(temperature=0.0), 6)]
        outcomes.append((rows, [job.ids for turn in turns for job in turn]))
        kept = lib_model.causal_lm(lm).generation_config.to_dict()
        assert own.items() <= kept.items()
    assert outcomes[0] == outcomes[1]


# ------------------------------------------------------------------- a gradient that is not finite


def overflowing(steps):
    """In the place of `results`: the same, but in some steps with infinite advantages."""
    results = on_trl.SGSDTrainer.results

    def of_batch(self, output):
        yield from results(self, output)
        if self.run.step + 1 in steps:
            output["advantages"] += float("inf")

    return of_batch


def test_a_bad_step_moves_no_weight_and_a_third_ends_it(world_dir, tmp_path, monkeypatch):
    """S34: the two before are not in a row. The same command goes on."""
    run, changes = tmp_path / "run", {"steps": 8, "checkpoint_every": 1, "evolve_every": 0}
    argv = trl_worlds.small_flags(world_dir, run, **changes)
    with monkeypatch.context() as patch:
        patch.setattr(on_trl.SGSDTrainer, "results", overflowing([2, 3, 5, 6, 7]))
        driver.refused(on_trl.main, argv, "last 3 steps", "--learning-rate")
    driver.completes(on_trl.main, argv)
    checkpoints = [*files.by_step(run / "checkpoints").values()]
    weights = [(path / "adapter_model.safetensors").read_bytes() for path in checkpoints]
    assert [a == b for a, b in itertools.pairwise(weights)] == [1, 1, 0, 1, 1, 1, 0]
    skipped = [row["skipped"] for row in driver.rows(run / "metrics.jsonl")]
    assert skipped == [0, 1, 1, 0, 1, 1, 1, 0]
    moments = torch.load(checkpoints[-1] / "optimizer.pt", weights_only=True)["state"].values()
    assert moments and all(int(x["step"]) == 3 for x in moments)


def sharded_infinite(folder):
    """A step of all weights in shards, in which one process has an infinite gradient."""

    class Overflowing(on_trl.SGSDTrainer):
        def _clip_grad_norm(self, model):
            p = next(p for p in model.parameters() if p.grad.to_local().numel())
            if self.accelerator.process_index == 1:
                p.grad.to_local().fill_(float("inf"))
            return super()._clip_grad_norm(model)

    on_trl.SGSDTrainer = Overflowing
    of_trl = trainer(settings(folder), policy(lora=False), completions(6), words=())
    of_trl.train()
    assert of_trl.run.metrics[-1]["skipped"] == 1
    for p, start in zip(of_trl.model.parameters(), policy(lora=False).parameters()):
        assert torch.equal(p.full_tensor(), start)


def test_an_infinite_gradient_on_one_process_leaves_out_the_step_on_both(tmp_path):
    """Clipped by an infinite norm, the other process's shards would be finite zeros."""
    trl_worlds.torchrun("test_edges:sharded_infinite", tmp_path / "run")


# ------------------------------------------------------------------- refused, before a step


@pytest.fixture
def refused(world_dir, tmp_path):
    """Call it with settings and TRL's words: the command is refused in one line with `said`."""

    def call(said, words=(), **changes):
        argv = trl_worlds.small_flags(world_dir, tmp_path / "run", **changes)
        driver.refused(on_trl.main, [*argv, *words], *said.split())
        assert not (tmp_path / "run/config.json").exists()

    return call


REFUSED = [  # settings, TRL's words, and words of the line
    ({"bank": ""}, "", "--bank sgsd.py"),
    ({"batch_size": 1}, "", "--batch-size"),
    ({"full": True, "adapter": "x"}, "", "--adapter --model"),
    ({"full": True, "dtype": "bfloat16"}, "", "--dtype float32"),
    ({"dtype": "bfloat16"}, "--use_vllm", "--dtype float32"),
    ({}, "--num_iterations=2", "--num_iterations"),
    ({}, "--vllm_importance_sampling_correction", "--vllm_importance"),
    ({}, "--vllm_st a", "--vllm_st"),  # an abbreviation
    ({}, "--dataloader_num_workers many", "many"),
    ({}, "stray", "stray"),
]


@pytest.mark.parametrize("changes, words, said", REFUSED)
def test_what_would_train_otherwise_or_fail_later_is_refused(refused, changes, words, said):
    refused(said, words.split(), **changes)


MODELS = [  # a kind of model, what becomes of its last norm, and words of the line
    ("qwen3", lambda x: {}, "model.norm.weight"),
    ("qwen3", lambda x: {"model.norm.weight": x * torch.nan}, "model.norm.weight finite"),
    ("gpt2", None, "left padding"),
]


def test_a_context_that_holds_no_solution_is_refused_by_the_setting_that_helps(refused, tmp_path):
    """TRL asks of the context that it holds the longest solution behind each prompt (S35)."""
    folder = conftest.save_model(tmp_path / "lm", max_position_embeddings=150)
    refused("12 of 12 150, less 48 --max-new-tokens", model=folder, max_new_tokens=48)


@pytest.mark.parametrize("kind, change, said", MODELS)
def test_a_model_that_would_learn_wrongly_is_refused(refused, tmp_path, kind, change, said):
    folder = conftest.save_model(tmp_path / "lm", kind)
    if change:
        tensors = load_file(folder / "model.safetensors")
        tensors |= change(tensors.pop("model.norm.weight"))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refused(said, model=folder)


# ------------------------------------------------------------------------------------- folders


def test_other_runs_are_refused_and_stay_as_they_are(world_dir, tmp_path, uninterrupted):
    """What is refused stays as it is."""
    run, own = tmp_path / "run", shutil.copytree(uninterrupted, tmp_path / "own")
    driver.completes(on_trl.main, trl_worlds.small_flags(world_dir, run, steps=1))
    before = driver.contents(tmp_path)
    driver.refused(sgsd.main, small_run.flags(world_dir, run), "on_trl", str(run))
    for out, said, changes in (
        (own, "sgsd.py", {}),
        (run, "--tau-g", {"tau_g": 2.0}),
        (run, "--full", {"full": True}),
    ):
        argv = trl_worlds.small_flags(world_dir, out, steps=2, **changes)
        driver.refused(on_trl.main, argv, said, "--out", str(out))
    assert driver.contents(tmp_path) == before


def test_the_commands_of_the_pages_are_parsed():
    commands = []
    for page in [conftest.ROOT / "docs/engines.md", *conftest.ROOT.glob("research/trl/*.md")]:
        text = re.sub(r" *\\\n\s*", " ", page.read_text())
        line = r"^ *(?:accelerate|python|srun|OMP).*\b(grpo_on_trl|on_trl) (--.*)"
        commands += re.findall(line, text, re.M)
    assert {"grpo_on_trl", "on_trl"} <= {program for program, _ in commands}
    for program, line in commands:
        kind = grpo_on_trl.Settings if program == "grpo_on_trl" else on_trl.TRLConfig
        ours, _, of_trl = f"{line} ".partition(" -- ")
        cfg = command.parse(ours.split(), "", kind, config.presets_of(kind))
        on_trl.settings_of(cfg, of_trl.split(), small_run.ALONE)
