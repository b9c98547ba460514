"""A new run begins with the weights of another run's checkpoint: --adapter."""

import json
import shutil

import driver
import pytest
import torch
from conftest import make_model, make_tokenizer
from driver import flags, opened, refused, rows, train

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
    """A run that goes on needs it no more."""
    with opened(world_dir, checkpoint.parent.parent, steps=3) as first:
        trained = weights(first)
        assert first.optimizer.state and first.step == 2
    ours = shutil.copytree(checkpoint, tmp_path / "adapter")
    changes = {"adapter": str(ours), "lora_rank": 64, "learning_rate": 1e-4, "bank": ""}
    changes["cold_start"] = 4
    with opened(world_dir, tmp_path / "run", **changes) as run:
        begun = weights(run)
        assert begun.keys() == trained.keys()
        assert all(torch.equal(begun[name], trained[name]) for name in trained)
        assert not run.optimizer.state and run.step == 0 and run.bank is None
        sgsd.train(run)
    adapter = json.loads((run.out / "checkpoints/step_000004/adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"]) == (4, 8)
    shutil.rmtree(ours)
    train(world_dir, tmp_path / "run", steps=5, **changes)
    assert [m["step"] for m in rows(run.out / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_a_frozen_teacher_is_the_base_and_not_the_adapter(world_dir, tmp_path, checkpoint):
    ids, answer = [5, 6, 7], [20, 21]
    base, _ = model.load_model(str(world_dir / "model"), "cpu")
    want = scoring.token_logprobs(base, [ids], [answer])
    changes = {"kind": ablations.AblationConfig, "adapter": str(checkpoint), "teacher": "frozen"}
    with opened(world_dir, tmp_path / "run", **changes) as run:
        assert not torch.allclose(scoring.token_logprobs(run.lm, [ids], [answer]), want, atol=1e-3)
        with ablations.teacher_policy(run):
            torch.testing.assert_close(scoring.token_logprobs(run.lm, [ids], [answer]), want)


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
