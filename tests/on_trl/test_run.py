"""A run of extras/on_trl.py: its settings, its bank, its checkpoints, its processes."""

import functools
import json
import subprocess
import sys

import conftest
import driver
import pytest
import torch
import trl_worlds
from accelerate.commands.config.config_args import load_config_from_file
from trl_worlds import policy, settings, tiny_flags, trainer

import eval
import sgsd
import skills
from extras import on_trl, report
from lib import files, runlog


@pytest.mark.parametrize(
    "name, value",
    {
        "num_iterations": 2,
        "num_generations": 8,
        "loss_type": "dapo",
        "importance_sampling_level": "sequence",
        "vllm_importance_sampling_correction": True,
        "beta": 0.04,
        "disable_dropout": False,
        "generation_kwargs": {"temperature": 1.0},
        "fp16": True,
        "use_transformers_continuous_batching": True,
        "resume_from_checkpoint": "checkpoint-1",
        "save_only_model": True,
        "save_strategy": "epoch",
        "save_steps": 0.5,
        "do_eval": True,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "eval_on_start": True,
        "log_completions": True,
        "temperature": 0.0,
        "torch_compile": True,
        "cache_implementation": "static",
    }.items(),
)
def test_a_setting_that_sgsd_cannot_have_is_refused_in_one_line(tmp_path, name, value):
    conftest.one_line(lambda: settings(tmp_path, **{name: value}), name, value)


def test_a_wrong_value_of_a_setting_of_ours_is_refused_in_one_line(tmp_path):
    conftest.one_line(lambda: settings(tmp_path, eps_a=-1.0), "eps-a")
    conftest.one_line(lambda: settings(tmp_path, batch_size=7), "batch_size 7")


def test_fewer_problems_than_a_batch_takes_are_refused_in_one_line(tmp_path):
    rows = trl_worlds.completions(4)
    conftest.one_line(lambda: trainer(settings(tmp_path), policy(lora=True), rows), "batch_size 6")


def test_the_defaults_are_the_papers():
    args = on_trl.SGSDConfig(per_device_train_batch_size=8, use_cpu=True, bf16=False)
    assert (args.temperature, args.generation_kwargs) == (1.0, {"temperature": 1.1})
    assert (args.top_p, args.top_k, args.max_completion_length) == (0.95, 20, 1024)
    assert (args.learning_rate, args.lr_scheduler_type, args.weight_decay) == (5e-6, "linear", 0)
    assert (args.max_grad_norm, args.beta, args.num_generations) == (0.1, 0.0, 1)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 32
    assert (args.sgsd.num_teachers, args.sgsd.eps_a, args.max_steps) == (8, 0.05, 200)


def test_other_ids_than_the_teachers_score_are_refused(tmp_path):
    run = trainer(settings(tmp_path), policy(lora=True), trl_worlds.completions(6))
    given = run.rollout_func

    def shifted(prompts, trainer):
        rollouts = given(prompts, trainer)
        return rollouts | {"prompt_ids": [ids[:-1] for ids in rollouts["prompt_ids"]]}

    run.rollout_func = shifted
    conftest.one_line(run.train, "prompt")


def test_a_checkpoint_is_uploaded_with_its_bank(tmp_path, monkeypatch):
    uploads = []

    def upload(self, checkpoint_folder):
        uploads.append([*files.by_number(tmp_path)])

    monkeypatch.setattr(on_trl.SGSDTrainer, "_push_from_checkpoint", upload)
    args = settings(tmp_path, steps=2, save_strategy="steps", save_steps=1)
    run = trainer(args, policy(lora=True))
    args.push_to_hub = True  # before, TRL would make the repository
    run.train()
    assert uploads == [[1], [1, 2]]


def test_the_command_trains_all_weights_sharded_and_evolves_and_saves(tmp_path):
    """FSDP2 on two processes, whose completions end at different lengths."""
    trl_worlds.torchrun("sharded_run", tmp_path / "run")
    ranks = [json.loads((tmp_path / f"run/rank{rank}.json").read_text()) for rank in (0, 1)]
    assert ranks[0]["lengths"] != ranks[1]["lengths"]
    assert ranks[0]["bank"] == ranks[1]["bank"]
    bank = skills.SkillBank.load(tmp_path / "run/sgsd/bank/bank.json")
    assert files.digest(bank.general_skills) == ranks[0]["bank"]
    assert [update["step"] for update in bank.metadata["updates"]] == [2]
    evaluate(tmp_path, tmp_path / "run")


def test_the_command_trains_adapters_and_continues_in_its_folder(tmp_path, capsys):
    changes = {"batch_size": 4, "evolve_every": 0, "save_steps": 1, "num_teachers": 2}
    on_trl.main(tiny_flags(tmp_path / "run", steps=1, **changes))
    on_trl.main(tiny_flags(tmp_path / "run", steps=2, **changes))
    state = files.read_json(tmp_path / "run/checkpoint-2/trainer_state.json")
    steps = [row for row in state["log_history"] if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        fates = [row[f"sgsd/{fate}"] for fate in ("distilled", "reversed", "ignored")]
        assert sum(fates) == pytest.approx(1)
        assert {"sgsd/support", "sgsd/gap", "sgsd/clip_share", "reward"} <= row.keys()
    evaluate(tmp_path, tmp_path / "run")


def test_a_run_has_the_logs_of_sgsd_py_and_a_report(tmp_path, capsys):
    """One of sgsd.py with the same settings has the same columns; a continued one no row twice."""
    out, changes = tmp_path / "run", {"batch_size": 4, "save_steps": 1, "num_teachers": 2}
    changes |= {"evolve_every": 0, "audit_every": 1}
    on_trl.main(tiny_flags(out, steps=1, **changes))
    (line,) = driver.rows(out / "sgsd/metrics.jsonl")
    driver.write_rows(out / "sgsd/metrics.jsonl", [line, {**line, "step": 2}])  # as a kill leaves
    on_trl.main(tiny_flags(out, steps=2, **changes))
    words = f"--preset tiny --steps 2 --batch-size 4 --num-teachers 2 --audit-every 1 --out {out}-s"
    words += f" --bank {conftest.ROOT}/banks/word_problems.json"
    driver.completes(sgsd.main, words.split())
    for name in runlog.LOGS:
        ours, theirs = (
            driver.rows(folder / f"{name}.jsonl") for folder in (out / "sgsd", tmp_path / "run-s")
        )
        assert [row["step"] for row in ours] == [row["step"] for row in theirs]
        assert ours[0].keys() == theirs[0].keys()
        if name != "metrics":
            assert [row["index"] for row in ours] == [0, 1, 2, 3] * 2
    for row in driver.rows(out / "sgsd/rollouts.jsonl"):
        assert len(row["rho"]) == 2 and row["prompt_ids"] and row["reward"] == row["r"]
    assert report.main([str(out)]) == 0
    assert (out / "sgsd/report.html").exists()
    assert "2 of 2 steps" in capsys.readouterr().out


def test_a_run_without_a_right_solution_says_so_once(tmp_path, capsys):
    changes = {"batch_size": 4, "num_teachers": 2, "evolve_every": 0, "max_new_tokens": 4}
    on_trl.main(tiny_flags(tmp_path / "run", steps=4, **changes))
    (line,) = (x for x in capsys.readouterr().out.splitlines() if "no right solution" in x)
    assert "--max-new-tokens" in line


def test_the_sharded_configuration_is_one_of_accelerate():
    given = load_config_from_file(str(conftest.ROOT / "extras/fsdp2.yaml"))
    assert given.distributed_type == "FSDP" and given.num_processes == 8
    assert given.fsdp_config["fsdp_version"] == 2


@pytest.mark.parametrize(
    "script, flags, row",
    [
        ("side_by_side.py", "--batch-size 2 --teachers 2 --tokens 4 --steps 1", "| a step |"),
        ("head_in_bf16.py", "--problems 2 --teachers 2 --tokens 8", "| TRL's own head |"),
    ],
)
def test_what_measures_it_runs(script, flags, row):
    command = [sys.executable, conftest.ROOT / "research/trl" / script, *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=conftest.ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert row in done.stdout


def test_what_refuses_continuous_batching_names_the_weights(tmp_path):
    call = functools.partial(settings, tmp_path, use_transformers_continuous_batching=True)
    conftest.one_line(call, "bf16")


def test_a_command_without_a_bank_is_refused_in_one_line(tmp_path, capsys):
    argv = tiny_flags(tmp_path / "run", bank="")
    driver.refused(capsys, on_trl.main, argv, "--bank")


def evaluate(tmp_path, folder):
    """eval.py evaluates what a run has saved."""
    data = conftest.ROOT / "tiny/test.jsonl"
    flags = f"--data {data} --samples 1 --limit 4 --max-new-tokens 32 --device cpu"
    argv = [str(folder), *flags.split(), "--out", str(tmp_path / "eval")]
    assert eval.main(argv) == 0
    torch.set_num_threads(1)
