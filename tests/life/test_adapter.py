"""A new run begins with the weights of another run's checkpoint: --adapter."""

import json
import shutil
import signal

import driver
import pytest
import torch
from conftest import make_model, make_tokenizer
from driver import flags, go, killing, opened, refused, rows, small_flags, train

import scoring
import sgsd
from lib import files, model
from methods import ablations


@pytest.fixture(scope="module")
def checkpoint(world_dir, tmp_path_factory):
    """Of a run of rank 4 and alpha 8, after two steps."""
    out = tmp_path_factory.mktemp("first") / "run"
    train(world_dir, out, steps=2)
    return files.of_step(out / "checkpoints", 2)


def weights(run):
    return {name: p.detach().clone() for name, p in model.trained(run.lm).items()}


def test_a_run_begins_with_a_checkpoints_weights_rank_and_alpha_and_with_nothing_else_of_it(
    world_dir, tmp_path, checkpoint
):
    with opened(world_dir, checkpoint.parent.parent, steps=3) as first:
        trained = weights(first)
        assert first.optimizer.state and first.step == 2
    changes = {"adapter": str(checkpoint), "lora_rank": 64, "learning_rate": 1e-4, "bank": ""}
    with opened(world_dir, tmp_path / "run", cold_start=4, **changes) as run:
        ours = weights(run)
        assert ours.keys() == trained.keys()
        assert all(torch.equal(ours[name], trained[name]) for name in trained)
        assert not run.optimizer.state and run.step == 0 and run.bank is None
        sgsd.train(run)
    adapter = json.loads((run.out / "checkpoints/step_000004/adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"]) == (4, 8)
    about = files.read_json(run.out / "config.json")
    assert about["settings"]["adapter"] == str(checkpoint)
    assert [m["step"] for m in rows(run.out / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_frozen_teacher_is_the_base_and_not_the_adapter(world_dir, tmp_path, checkpoint):
    ids, answer = [5, 6, 7], [20, 21]
    base, _ = model.load_model(str(world_dir / "model"), "cpu")
    want = scoring.token_logprobs(base, [ids], [answer])
    changes = {"kind": ablations.AblationConfig, "adapter": str(checkpoint), "teacher": "frozen"}
    with opened(world_dir, tmp_path / "run", **changes) as run:
        assert not torch.allclose(scoring.token_logprobs(run.lm, [ids], [answer]), want, atol=1e-3)
        with ablations.teacher_policy(run):
            torch.testing.assert_close(scoring.token_logprobs(run.lm, [ids], [answer]), want)


def memories(out):
    by_id = {row["problem_id"]: row["completion"] for row in rows(out / "bank/memories.jsonl")}
    return dict(sorted(by_id.items()))


def test_the_cold_start_samples_with_it_with_steps_or_without(world_dir, tmp_path, checkpoint):
    changes = {"bank": "", "cold_start": 4, "cold_start_tokens": 40}
    for name, steps, adapter in (("base", 0, ""), ("alone", 0, checkpoint), ("run", 1, checkpoint)):
        train(world_dir, tmp_path / name, steps=steps, adapter=str(adapter), **changes)
    base, alone, run = (memories(tmp_path / name) for name in ("base", "alone", "run"))
    assert alone == run and alone.keys() == base.keys() and alone != base


def test_a_server_has_the_base_and_is_refused_beside_it(world_dir, tmp_path, checkpoint, capsys):
    """Also where a bank is there already."""
    for bank in ("", world_dir / "bank.json"):
        changes = {"bank": bank, "server": "http://127.0.0.1:9/v1", "adapter": checkpoint}
        argv = flags(world_dir, tmp_path / "run", **changes)
        refused(capsys, sgsd.main, argv, "--server http://127.0.0.1:9/v1", "--adapter")
        assert not driver.contents(tmp_path / "run")


def test_it_needs_its_own_base_and_a_folder_that_holds_one(world_dir, tmp_path, checkpoint, capsys):
    other = tmp_path / "other"
    for part in (make_model(seed=1), make_tokenizer()):
        part.save_pretrained(other)
    for changes, words in (
        ({"adapter": checkpoint, "model": other}, [str(checkpoint), str(world_dir / "model")]),
        ({"adapter": checkpoint, "model": other, "steps": 0}, [str(checkpoint), "--model"]),
        ({"adapter": checkpoint.parent}, [str(checkpoint.parent)]),
        ({"adapter": tmp_path / "none"}, [str(tmp_path / "none")]),
    ):
        refused(capsys, sgsd.main, flags(world_dir, tmp_path / "run", **changes), *words)
        assert not driver.contents(tmp_path / "run")


def test_a_continued_run_needs_it_no_more_and_takes_no_other(
    world_dir, tmp_path, checkpoint, capsys
):
    ours, log = tmp_path / "adapter", tmp_path / "log"
    shutil.copytree(checkpoint, ours)
    argv = small_flags(world_dir, tmp_path / "run", adapter=ours, steps=4)
    assert go(argv, log) == 0
    whole = driver.state(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    assert go(argv, log, before=killing(sgsd, "optimizer_step", 3)) == -signal.SIGKILL
    train(world_dir, tmp_path / "second", steps=1)
    another = tmp_path / "second/checkpoints/step_000001"
    changed = small_flags(world_dir, tmp_path / "run", adapter=another, steps=4)
    refused(capsys, driver.main, changed, f"--adapter '{another}'", str(ours))
    shutil.rmtree(ours)
    assert go(argv, log) == 0, log.read_text()
    assert driver.state(tmp_path / "run") == whole
