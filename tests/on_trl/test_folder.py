"""The folder of a run on TRL: what it holds, what continues it, what is refused; eval.py on it."""

import json
import os
import shutil

import driver
import pytest
import torch
from safetensors.torch import load_file, save_file
from trl_worlds import small_flags

import eval
import sgsd
import skills
from extras import on_trl
from lib import files


def write(self, prompts, names, repeats, limits):
    """In the place of the trainer's `write`, without a model."""
    return [driver.reply_to(prompt) for prompt in names]


@pytest.fixture(autouse=True)
def writer(monkeypatch):
    monkeypatch.setattr(on_trl.SGSDTrainer, "write", write)


@pytest.fixture(scope="module")
def complete(world_dir, tmp_path_factory):
    """A run of two steps, of which both are saved, with an evolution after the second."""
    folder = tmp_path_factory.mktemp("complete") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_trl.SGSDTrainer, "write", write)
        assert on_trl.main(small_flags(world_dir, folder)) == 0
    return folder


@pytest.fixture
def run(complete, tmp_path):
    """A copy of it."""
    return shutil.copytree(complete, tmp_path / "run")


def record_of(run):
    return files.read_json(run / "sgsd/config.json")


def unfinished(run):
    """The run as a kill before the last file leaves it."""
    files.write_json(run / "sgsd/config.json", record_of(run) | {"finished": 0})


def rates(run, step):
    """{step: rate} of a checkpoint."""
    state = files.read_json(run / f"checkpoint-{step}/trainer_state.json")
    return {row["step"]: row["learning_rate"] for row in state["log_history"] if "loss" in row}


def contents(folder):
    """Every file's digest, but that of the lock."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != files.LOCK]
    return {str(path.relative_to(folder)): files.file_digest(path) for path in paths}


def weights(folder):
    return (folder / "adapter_model.safetensors").read_bytes()


# ------------------------------------------------------------------------------------ what is there


def test_a_runs_own_files_lie_in_a_folder_of_their_own(complete):
    record = record_of(complete)
    assert record["program"] == "extras.on_trl" and record["finished"] == 2
    assert record["settings"]["learning_rate"] == 1e-2 and record["digests"]["bank"]
    assert record["trl"]["weight_decay"] == 0 and record["trl"]["save_steps"] == 1
    assert {"trl", "torch"} <= record["versions"].keys() and record["continuations"] == []
    banks = [path.name for path in sorted((complete / "sgsd/bank").glob("*.json"))]
    assert banks == ["bank.json", "step_000000.json", "step_000002.json"]
    last = skills.SkillBank.load(complete / "sgsd/bank/bank.json")
    assert [update["step"] for update in last.metadata["updates"]] == [2]
    assert {row["step"] for row in files.read_jsonl(complete / "sgsd/bank/replies.jsonl")} == {2}
    for step in (1, 2):
        assert (complete / f"checkpoint-{step}/bank.json").exists()
    assert not (complete / "bank.json").exists() and not (complete / "replies.jsonl").exists()


# --------------------------------------------------------------------------------------- continuing


def test_a_complete_run_says_so_and_makes_no_step(world_dir, run, capsys):
    before = contents(run)
    with pytest.raises(SystemExit) as end:
        on_trl.main(small_flags(world_dir, run))
    assert end.value.code == 0
    assert "complete" in capsys.readouterr().out
    assert contents(run) == before


def test_more_steps_go_on_at_the_rate_of_their_own_schedule(world_dir, run, capsys):
    """Layout may change on the way; that is said, and recorded."""
    changes = {"per_device_train_batch_size": 2, "score_rows": 8, "save_steps": 4}
    assert on_trl.main(small_flags(world_dir, run, steps=4, **changes)) == 0
    assert rates(run, 4) == pytest.approx({1: 1e-2, 2: 5e-3, 3: 5e-3, 4: 2.5e-3})
    assert [*files.by_number(run)] == [1, 2, 4]
    record, output = record_of(run), capsys.readouterr().out
    (again,) = record["continuations"]
    assert again["step"] == 2 and record["finished"] == 4
    for name in ("steps", *changes):
        (line,) = [line for line in again["changed"] if line.startswith(f"--{name} ")]
        assert line in output
    assert weights(run) == weights(run / "checkpoint-4")


@pytest.mark.parametrize(
    "name, value",
    {
        "learning_rate": 5e-3,
        "tau_g": 2.0,
        "weight_decay": 0.1,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "warmup_steps": 1,
        "full": True,
    }.items(),
)
def test_another_value_of_what_trains_is_refused_in_one_line(world_dir, run, capsys, name, value):
    before = contents(run)
    argv = small_flags(world_dir, run, steps=3, **{name: value})
    driver.refused(capsys, on_trl.main, argv, f"--{name.partition('_')[0]}", str(run))
    assert contents(run) == before


@pytest.mark.parametrize("name", ["data", "bank"])
def test_other_contents_of_a_file_are_refused_and_another_place_is_not(
    world_dir, run, capsys, tmp_path, name
):
    place = world_dir / {"data": "data.jsonl", "bank": "bank.json"}[name]
    moved = shutil.copy(place, tmp_path / place.name)
    with pytest.raises(SystemExit) as end:
        on_trl.main(small_flags(world_dir, run, **{name: moved}))
    assert end.value.code == 0
    other = place.read_text().replace("What is 1 plus", "What is 1 and").replace("with care", "")
    (tmp_path / place.name).write_text(other)
    argv = small_flags(world_dir, run, steps=3, **{name: moved})
    driver.refused(capsys, on_trl.main, argv, f"--{name}")


def test_fewer_steps_than_are_made_are_refused(world_dir, run, capsys):
    driver.refused(capsys, on_trl.main, small_flags(world_dir, run, steps=1), "--steps 1")


def test_a_run_that_was_killed_while_it_saved_goes_on_with_the_checkpoint_before(
    world_dir, run, capsys
):
    """What came after it is cut, and made again."""
    unfinished(run)
    (run / "checkpoint-2/bank.json").unlink()
    made = run / "sgsd/bank/step_000002.json"
    replies = [*files.read_jsonl(run / "sgsd/bank/replies.jsonl")]
    assert on_trl.main(small_flags(world_dir, run)) == 0
    output = capsys.readouterr().out
    assert "after step 1" in output and "replies.jsonl" in output
    assert rates(run, 2) == pytest.approx({1: 1e-2, 2: 5e-3})
    assert made.exists() and skills.SkillBank.load(run / "checkpoint-2/bank.json").window == []
    assert len([*files.read_jsonl(run / "sgsd/bank/replies.jsonl")]) <= 2 * len(replies)
    assert weights(run) == weights(run / "checkpoint-2")


def test_a_run_that_goes_on_evolves_on_the_rollouts_before_the_break_too(
    world_dir, run, monkeypatch
):
    unfinished(run)
    shutil.rmtree(run / "checkpoint-2")
    saved = [*skills.SkillBank.load(run / "checkpoint-1/bank.json").window]
    assert len(saved) == 4
    windows = []
    evolve = skills.evolve

    def kept(bank, window, *rest, **settings):
        windows.append([*window])
        return evolve(bank, window, *rest, **settings)

    monkeypatch.setattr(skills, "evolve", kept)
    assert on_trl.main(small_flags(world_dir, run)) == 0
    (window,) = windows
    assert len(window) == 8 and window[:4] == saved


def problems_by_step(run):
    """The ids of each step's problems, sorted."""
    ids = {}
    for row in files.read_jsonl(run / "sgsd/rollouts.jsonl"):
        ids.setdefault(row["step"], []).append(row["problem_id"])
    return {step: sorted(problems) for step, problems in ids.items()}


def test_a_run_that_goes_on_in_a_later_epoch_has_the_problems_of_one_without_a_break(
    world_dir, tmp_path
):
    """An epoch of the twelve problems has three steps, and each an order of its own."""
    changes = {"steps": 8, "evolve_every": 0}
    run = tmp_path / "run"
    assert on_trl.main(small_flags(world_dir, run, **changes)) == 0
    expected = problems_by_step(run)
    assert expected[1] != expected[4] != expected[7]
    for last in (7, 4, 3, 2):
        unfinished(run)
        for step in range(last + 1, 9):
            shutil.rmtree(run / f"checkpoint-{step}")
        changes["per_device_train_batch_size"] = 2 + last % 2 * 2
        assert on_trl.main(small_flags(world_dir, run, **changes)) == 0
        assert problems_by_step(run) == expected


def test_a_run_whose_checkpoints_are_lost_is_refused_and_its_logs_stay(world_dir, run, capsys):
    unfinished(run)
    for step in (1, 2):
        shutil.rmtree(run / f"checkpoint-{step}")
    before = contents(run)
    driver.refused(capsys, on_trl.main, small_flags(world_dir, run), "2 steps", "no checkpoint")
    assert contents(run) == before


@pytest.mark.parametrize("saved, now", [("no", "steps"), ("steps", "no")])
def test_a_run_that_was_to_save_none_begins_anew_and_another_is_refused(
    world_dir, run, capsys, saved, now
):
    """It counts how the run was to save, and not how the command would."""
    unfinished(run)
    for step in (1, 2):
        shutil.rmtree(run / f"checkpoint-{step}")
    record = record_of(run)
    record["trl"]["save_strategy"] = saved
    files.write_json(run / "sgsd/config.json", record)
    argv = small_flags(world_dir, run, save_strategy=now, evolve_every=0)
    if saved == "steps":
        driver.refused(capsys, on_trl.main, argv, "no checkpoint")
    else:
        assert on_trl.main(argv) == 0
        assert record_of(run)["finished"] == 2


def test_an_older_checkpoint_is_removed_after_the_new_one_is_whole(
    world_dir, tmp_path, monkeypatch
):
    """A kill while it is saved leaves one to go on with, also where only one is kept."""
    out, whole = tmp_path / "run", []
    save = skills.SkillBank.save

    def watched(bank, path):
        if "checkpoint-" in str(path):
            whole.append([*files.by_number(out)])
        save(bank, path)

    monkeypatch.setattr(skills.SkillBank, "save", watched)
    assert on_trl.main(small_flags(world_dir, out, save_total_limit=1)) == 0
    assert whole == [[], [1]] and [*files.by_number(out)] == [2]


def test_going_on_between_evolutions_adds_no_version_of_the_bank(world_dir, run, capsys):
    unfinished(run)
    shutil.rmtree(run / "checkpoint-2")
    assert on_trl.main(small_flags(world_dir, run)) == 0
    versions = [path.name for path in sorted((run / "sgsd/bank").glob("step_*.json"))]
    assert versions == ["step_000000.json", "step_000002.json"]


def test_a_run_that_was_killed_after_its_last_checkpoint_makes_no_further_step(world_dir, run):
    unfinished(run)
    kept = weights(run)
    (run / "adapter_model.safetensors").unlink()
    assert on_trl.main(small_flags(world_dir, run)) == 0
    assert weights(run) == kept and record_of(run)["finished"] == 2
    assert [*files.by_number(run)] == [1, 2]


def test_a_run_without_a_checkpoint_begins_anew_with_other_settings(world_dir, run, capsys):
    unfinished(run)
    for step in (1, 2):
        shutil.rmtree(run / f"checkpoint-{step}")
    (run / "sgsd/metrics.jsonl").unlink()  # as if it had been killed in its first step
    assert on_trl.main(small_flags(world_dir, run, tau_g=2.0, evolve_every=0)) == 0
    assert "anew" in capsys.readouterr().out
    assert record_of(run)["settings"]["tau_g"] == 2.0
    assert [path.name for path in (run / "sgsd/bank").glob("step_*")] == ["step_000000.json"]
    assert not any(files.read_jsonl(run / "sgsd/bank/replies.jsonl"))


def test_a_run_of_a_version_without_a_record_goes_on(world_dir, run, capsys):
    shutil.rmtree(run / "sgsd")
    assert on_trl.main(small_flags(world_dir, run, steps=3, evolve_every=0)) == 0
    assert "not compared" in capsys.readouterr().out
    assert record_of(run)["finished"] == 3


def test_a_folder_that_is_no_run_on_trl_is_refused_and_stays_as_it_is(
    world_dir, tmp_path, uninterrupted, capsys
):
    """Files of anyone's, a run of sgsd.py, and the folder in which such a run is named sgsd."""
    (tmp_path / "any").mkdir()
    (tmp_path / "any/notes.txt").write_text("mine")
    shutil.copytree(uninterrupted, tmp_path / "own")
    shutil.copytree(uninterrupted, tmp_path / "runs/sgsd")
    for name in ("any", "own", "runs"):
        before = contents(tmp_path / name)
        driver.refused(capsys, on_trl.main, small_flags(world_dir, tmp_path / name), "output_dir")
        assert contents(tmp_path / name) == before


def test_sgsd_py_refuses_a_folder_of_a_run_on_trl(world_dir, run, capsys):
    driver.refused(capsys, sgsd.main, driver.flags(world_dir, run), str(run))


# ------------------------------------------------------------------------------------------ eval.py


def evaluate(world_dir, path, *flags):
    """eval.py on two problems."""
    argv = [str(path), "--data", str(world_dir / "data.jsonl"), "--samples", "1", "--limit", "2"]
    argv += ["--max-new-tokens", "4", "--device", "cpu", "--verifier", "driver:CoinVerifier"]
    with driver.signals_restored():
        assert eval.main([*argv, *flags]) == 0
    torch.set_num_threads(1)


def test_eval_takes_the_weights_of_a_finished_run_and_tells_of_problems_seen(
    world_dir, run, tmp_path, capsys
):
    evaluate(world_dir, run, "--out", str(tmp_path / "eval"))
    assert len([*tmp_path.glob("eval/*/results.json")]) == 1
    assert "trained on 2 of these 2 problems" in capsys.readouterr().out


def test_eval_takes_the_checkpoints_of_a_run_that_has_not_ended(world_dir, run, tmp_path):
    """Its own weights are those of an earlier end, and a torn checkpoint is none."""
    unfinished(run)
    shutil.copytree(run / "checkpoint-2", run / "checkpoint-3")
    (run / "checkpoint-3/bank.json").unlink()
    evaluate(world_dir, run)
    results = [path.parent.name for path in sorted(run.glob("eval/*/results.json"))]
    assert results == ["checkpoint-1", "checkpoint-2"]


def test_eval_takes_full_weights_and_those_of_a_run_that_has_not_ended(world_dir, tmp_path):
    run = tmp_path / "run"
    argv = ["--full", *small_flags(world_dir, run, steps=1, evolve_every=0)]
    assert on_trl.main(argv) == 0
    assert json.loads((run / "config.json").read_text())["model_type"] == "qwen3"
    evaluate(world_dir, run, "--out", str(tmp_path / "eval"))
    assert len([*tmp_path.glob("eval/*/results.json")]) == 1
    unfinished(run)
    os.remove(run / "model.safetensors")
    evaluate(world_dir, run)
    assert (run / "eval/checkpoint-1/results.json").exists()


# ------------------------------------------------------------------------------- what is refused


def changed_model(world_dir, folder, change):
    """A copy of the model with other weights."""
    shutil.copytree(world_dir / "model", folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_model_that_lacks_a_weight_or_has_one_that_is_not_finite_is_refused(
    world_dir, tmp_path, capsys
):
    def lose(tensors):
        tensors.pop("model.norm.weight")

    def spoil(tensors):
        tensors["model.norm.weight"].fill_(float("nan"))

    for name, change, words in (("a", lose, "model.norm.weight"), ("b", spoil, "not finite")):
        lm = changed_model(world_dir, tmp_path / name, change)
        argv = small_flags(world_dir, tmp_path / "run", model=lm)
        assert words in refusal_of(argv, capsys)


def refusal_of(argv, capsys):
    """The last line of a command that is refused; libraries warn before it."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        on_trl.main(argv)
    assert end.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_what_can_be_known_without_the_model_is_refused_before_it_is_loaded(
    world_dir, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(on_trl.lib_model, "load_outline", None)
    for changes in ({"num_teachers": 99}, {"encoder": world_dir / "model"}, {"data": "./no"}):
        ((_, value),) = changes.items()
        argv = small_flags(world_dir, tmp_path / "run", **changes)
        assert str(value) in refusal_of(argv, capsys)


def test_a_torn_last_checkpoint_can_be_removed_to_go_on_after_the_one_before(
    run, world_dir, capsys
):
    unfinished(run)
    last = run / "checkpoint-2"
    (last / "adapter_model.safetensors").write_bytes(b"torn")
    argv = small_flags(world_dir, run, steps=3)
    line = refusal_of(argv, capsys)
    assert f"remove {last}" in line and "after checkpoint-1" in line
    shutil.rmtree(last)
    assert on_trl.main(argv) == 0
    assert record_of(run)["finished"] == 3
