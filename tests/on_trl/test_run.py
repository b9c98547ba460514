"""A run on TRL, of SGSD or GRPO: its folder, its bank, going on, kills and signals, eval.py on it.

The rules of a folder, and of what may change when a command goes on, are those of sgsd.py's runs.
"""

import shutil
import signal

import driver
import pytest
import small_run
import torch
import trl_worlds
from conftest import ROOT
from trl_worlds import small_flags, small_grpo_flags

import eval
import methods.grpo
import skills
from extras import grpo_on_trl, on_trl, report
from lib import files, runlog


def program(argv, method=on_trl):
    """The command, with the tests' writer."""
    with small_run.signals_restored(), small_run.faked():
        return method.main(argv)


def grpo(argv):
    return program(argv, grpo_on_trl)


METHODS = {"sgsd": (program, small_flags), "grpo": (grpo, small_grpo_flags)}


@pytest.fixture(scope="module")
def complete(world_dir, tmp_path_factory):
    """A run of four steps, of which each is saved, with an evolution after the second and last."""
    folder = tmp_path_factory.mktemp("complete") / "run"
    assert program(small_flags(world_dir, folder, steps=4)) == 0
    return folder


@pytest.fixture(scope="module")
def complete_grpo(world_dir, tmp_path_factory):
    """The same of GRPO, which has no bank."""
    folder = tmp_path_factory.mktemp("complete_grpo") / "run"
    assert grpo(small_grpo_flags(world_dir, folder, steps=4)) == 0
    return folder


@pytest.fixture
def run(complete, tmp_path):
    """A copy of it."""
    return shutil.copytree(complete, tmp_path / "run")


def state(run):
    """What must be equal of a run that was cut short and one that was not."""
    logs = [driver.rows(run / f"{name}.jsonl") for name in ("rollouts", "tokens")]
    logs += [driver.rows(path) for path in run.glob("bank/replies.jsonl")]
    last = max(files.by_step(run / "checkpoints").values())
    contents = [path.read_bytes() for path in sorted(last.glob("adapter_model.*"))]
    contents += [path.read_bytes() for path in last.glob(files.BANK)]
    names = sorted(path.name for path in [*run.glob("checkpoints/*"), *run.glob("bank/*.json")])
    return logs, contents, names, driver.timeless(driver.rows(run / "metrics.jsonl"))


def test_the_defaults_are_the_papers():
    args = on_trl.settings_of(on_trl.TRLConfig(device="cpu"), (), small_run.ALONE)
    assert (args.temperature, args.max_completion_length) == (1.0, 1024)
    assert (args.learning_rate, args.weight_decay, args.max_steps) == (5e-6, 0, 200)
    assert (args.max_grad_norm, args.beta, args.num_generations) == (0.1, 0.0, 1)
    assert (args.loss_type, args.num_iterations) == ("grpo", 1)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 32
    assert (args.adam_beta1, args.adam_beta2, args.adam_epsilon) == (0.9, 0.999, 1e-8)


def test_a_run_has_the_files_of_one_of_sgsd_py(complete):
    record, checkpoints = files.read_json(complete / "config.json"), complete / "checkpoints"
    assert record["program"] == "-m extras.on_trl" and record["continuations"] == []
    assert [*files.by_step(complete / "bank")] == [0, 2, 4]
    assert [*files.by_step(checkpoints)] == [1, 2, 3, 4] and len([*checkpoints.iterdir()]) == 4
    for step, path in files.by_step(checkpoints).items():
        files.refuse_damaged(path, files.digests_of(path, needed=True))
        bank = skills.SkillBank.load(path / files.BANK)
        assert len(bank.metadata.get("updates", [])) == step // 2
        assert len(bank.window) == step % 2 * 4


@pytest.mark.parametrize("method", METHODS)
def test_its_logs_and_report_are_those_of_the_method(
    method, complete, complete_grpo, world_dir, tmp_path
):
    """An epoch of the twelve problems has three steps of SGSD."""
    own, run = tmp_path / "own", complete if method == "sgsd" else complete_grpo
    if method == "sgsd":
        changes = {"num_teachers": 2, "eps_a": 0.0, "max_new_tokens": 8, "audit_every": 1}
        small_run.train(world_dir, own, steps=4, **changes)
    else:
        argv = small_grpo_flags(world_dir, own, steps=4)
        driver.completes(methods.grpo.main, argv[: argv.index("--")])
    for name in runlog.LOGS:
        ours, theirs = (driver.rows(x / f"{name}.jsonl") for x in (run, own))
        assert ours[0].keys() == theirs[0].keys()
        for column in ("step", "index", "problem_id", "prompt_ids", "learning_rate"):
            assert [row.get(column) for row in ours] == [row.get(column) for row in theirs]
    driver.completes(report.main, [run, "--out", tmp_path / "page.html"])


@pytest.mark.parametrize("method, full", [("sgsd", False), ("sgsd", True), ("grpo", False)])
def test_eval_takes_its_checkpoints_and_tells_of_problems_seen(
    world_dir, tmp_path, method, full, capsys
):
    run, (command, flags_of) = tmp_path / "run", METHODS[method]
    command(flags_of(world_dir, run, steps=1, full=full))
    argv = [world_dir / "model", run, "--data", world_dir / "data.jsonl", "--samples", 1]
    argv += ["--limit", 2, "--max-new-tokens", 4, "--device", "cpu"]
    driver.completes(eval.main, [*argv, "--verifier", "small_run:CoinVerifier"])
    torch.set_num_threads(1)
    assert (run / "eval/step_000001/results.json").exists()
    assert "trained on 2 of these 2 problems" in capsys.readouterr().out


# ------------------------------------------------------------------------------------ going on


def test_more_steps_go_on_by_their_own_schedule(world_dir, run, monkeypatch):
    """Layout may change on the way, and how many checkpoints stay."""
    rates = []

    def keep(loop, *_, **__):
        rates.append(loop.run.optimizer.param_groups[0]["lr"])

    monkeypatch.setattr(on_trl.Loop, "on_pre_optimizer_step", keep, raising=False)
    program(small_flags(world_dir, run, steps=5, keep_last=2))
    assert [*files.by_step(run / "checkpoints")] == [4, 5]
    argv = small_flags(world_dir, run, steps=6, backward_rows=1, score_rows=2)
    driver.run_two(argv, program)
    logged = [row["learning_rate"] for row in driver.rows(run / "metrics.jsonl")]
    assert rates == [1e-2 * (1 / 5)] == logged[4:5]
    assert logged == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3, 1e-2 / 5, 1e-2 / 6])
    assert [row["index"] for row in driver.rows(run / "rollouts.jsonl")] == [0, 1, 2, 3] * 6
    said = "\n".join(files.read_json(run / "config.json")["continuations"][-1]["changed"])
    assert "--backward-rows 1" in said and "processes 2" in said


KILL, STOP = signal.SIGKILL, signal.SIGTERM
CUTS = [  # a method, a signal, the file that is touched next, steps that are saved
    ("sgsd", KILL, "checkpoint-2/tokenizer_config.json", [1]),
    ("sgsd", KILL, "step_000002.tmp/.bank.json", [1]),
    ("sgsd", KILL, "step_000002.tmp/.digests.json", [1]),
    ("sgsd", KILL, "bank/replies.jsonl", [1, 2]),  # in an evolution
    ("sgsd", KILL, "bank/.step_000002", [1, 2]),
    ("sgsd", KILL, "step_000002/.bank.json", [1, 2]),
    ("sgsd", STOP, "metrics.jsonl", [1]),  # in a step
    ("sgsd", STOP, "step_000001.tmp/.digests.json", [1]),
    ("sgsd", STOP, "bank/replies.jsonl", [1, 2]),
    ("grpo", KILL, "checkpoint-2/trainer_state.json", [1]),
    ("grpo", KILL, "step_000002.tmp/.digests.json", [1]),
    ("grpo", STOP, "metrics.jsonl", [1]),
]


@pytest.mark.parametrize("method, number, file, saved", CUTS)
def test_a_run_that_is_cut_goes_on(
    world_dir, tmp_path, complete, complete_grpo, method, number, file, saved
):
    """A first signal in a step waits for its save; an evolution is made again, alone."""
    run, (command, flags_of) = tmp_path / "run", METHODS[method]
    argv, ends = flags_of(world_dir, run, steps=4), -number if number == KILL else 130
    driver.run(argv, driver.stopped_at(file, by=number, program=command), ends)
    assert [*files.by_step(run / "checkpoints")] == saved
    made = driver.rows(run / "metrics.jsonl")[: len(saved)]
    assert command(argv) == 0
    assert state(run) == state(complete if method == "sgsd" else complete_grpo)
    assert driver.rows(run / "metrics.jsonl")[: len(saved)] == made


# ----------------------------------------------------------------------------------- processes


def sharded_run(folder):
    """Two steps of the tiny world, all weights, FSDP2, an evolution, both saved."""
    given = {"preset": "tiny", "bank": ROOT / "banks/word_problems.json", "out": folder}
    given |= {name: ROOT / "tiny" / name for name in ("model", "encoder")}
    given |= {"data": ROOT / "tiny/train.jsonl", "score_rows": 16, "full": True, "steps": 2}
    given |= {"evolve_every": 2, "batch_size": 4, "checkpoint_every": 1}
    assert on_trl.main(trl_worlds.words_of(given)) == 0


def test_the_command_trains_all_weights_sharded_evolves_and_goes_on(tmp_path):
    """FSDP2 on two processes, whose completions end at different lengths; the model's replies."""
    run = tmp_path / "run"
    trl_worlds.torchrun("test_run:sharded_run", run)
    rows, last = driver.rows(run / "rollouts.jsonl"), run / "checkpoints/step_000002"
    assert [row["index"] for row in rows] == [0, 1, 2, 3] * 2
    bank = skills.SkillBank.load(last / files.BANK)
    assert [update["step"] for update in bank.metadata["updates"]] == [2]
    assert driver.rows(run / "bank/replies.jsonl") and (last / "config.json").exists()
    weights = (last / "model.safetensors").read_bytes()
    shutil.rmtree(last)
    trl_worlds.torchrun("test_run:sharded_run", run)
    assert driver.rows(run / "rollouts.jsonl") == rows
    assert (last / "model.safetensors").read_bytes() == weights
