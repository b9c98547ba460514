"""Two gloo processes compute what one computes; files are whole or absent."""

import errno
import fcntl
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from conftest import ROOT
from driver import flags, make_run, rows, train
from safetensors.torch import load_file

import files
import policy
import runlog
from cli import UserError


def two_processes(*command):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    done = subprocess.run([*torchrun, *command], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_two_processes_compute_the_update_of_one(world_dir, tmp_path):
    """A batch of 5 over two ranks, so with uneven shards: the same samples and the same update."""
    changes = {"batch_size": 5, "updates": 2, "checkpoint_every": 1, "max_new_tokens": 12}
    outs = [tmp_path / "one", tmp_path / "two"]
    train(world_dir, outs[0], **changes)
    two_processes(ROOT / "tests/driver.py", *flags(world_dir, outs[1], **changes))
    logs, metrics, states = [], [], []
    for out in outs:
        logs.append(rows(out / "rollouts.jsonl"))
        metrics.append(rows(out / "metrics.jsonl"))
        states.append(load_file(out / "checkpoints/step_000001/trainer.safetensors"))
    for one, two in zip(*logs, strict=True):
        assert (one["problem_id"], one["r"]) == (two["problem_id"], two["r"])
    for one, two in zip(logs[0][:5], logs[1][:5]):
        assert one["completion_ids"] == two["completion_ids"]
        assert one["loss"] == pytest.approx(two["loss"], abs=1e-5)
    for name in states[0]:  # exp_avg is a tenth of the clipped gradient of the first update
        torch.testing.assert_close(states[0][name], states[1][name], atol=1e-6, rtol=1e-3)
    norm = metrics[0][0]["grad_norm"]
    assert norm > 0 and norm == pytest.approx(metrics[1][0]["grad_norm"], rel=1e-4)


COLLECTIVES = """
import pathlib
import sys
import torch
import cli
import distributed
folder = pathlib.Path(sys.argv[1])
world = distributed.init("cpu")
p = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.zeros(2))]
p[0].grad = torch.ones(3) * (world.rank + 1)
if world.main:  # the other rank has no gradient here, and still joins
    p[1].grad = torch.ones(2) * 5
distributed.sum_gradients(p, world)
assert p[0].grad.tolist() == [3, 3, 3] and p[1].grad.tolist() == [5, 5]
found = distributed.gather({"text": "\\u00e9" * (1 + 1000 * world.rank)}, world)
assert [len(x["text"]) for x in found] == [1, 1001]
assert distributed.gather(None, world) == [None, None]
for wrong in (0, 1):  # one rank's mistake is raised on both
    try:
        with distributed.errors_shared(world):
            if world.rank == wrong:
                raise cli.UserError(f"of rank {wrong}")
        raise AssertionError
    except cli.SharedError as e:
        assert str(e) == f"of rank {wrong}"
if world.main:  # a folder that another process holds is refused on both
    held = distributed.locked(folder, distributed.World(0, 1, world.device))
    held.__enter__()
try:
    with distributed.locked(folder, world):
        raise AssertionError
except cli.SharedError as e:
    assert "is at work there" in str(e)
try:
    distributed.agree(world.rank, world, "checkpoints")
    raise AssertionError
except cli.SharedError as e:
    assert "the ranks see different checkpoints" in str(e)
distributed.leave_together(world)
distributed.leave(0)
"""


def test_the_collectives(tmp_path):
    (tmp_path / "program.py").write_text(COLLECTIVES)
    two_processes(tmp_path / "program.py", tmp_path / "held")


def test_a_directory_is_whole_or_absent(tmp_path):
    with pytest.raises(RuntimeError), files.whole(tmp_path / "a") as folder:
        folder.mkdir()
        (folder / "half").write_text("x")
        raise RuntimeError
    assert not list(tmp_path.iterdir())
    for text in ("one", "two"):
        with files.whole(tmp_path / "a") as folder:
            folder.mkdir()
            (folder / text).write_text(text)
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "two"]


def test_a_file_is_the_old_one_or_the_new_one(tmp_path):
    files.write_text(tmp_path / "b/a", "one")
    with pytest.raises(RuntimeError), files.whole(tmp_path / "b/a") as half:
        half.write_text("tw")
        raise RuntimeError
    assert (tmp_path / "b/a").read_text() == "one" and len(list(tmp_path.rglob("*"))) == 2
    files.write_text(tmp_path / "b/a", "two")
    assert (tmp_path / "b/a").read_text() == "two" and len(list(tmp_path.rglob("*"))) == 2


def test_a_checkpoint_loads_by_its_own_card_from_any_directory(world_dir, tmp_path, monkeypatch):
    """By transformers and PEFT alone, though the run was given its model as a relative path."""
    monkeypatch.chdir(world_dir)
    run, path = make_run(world_dir, tmp_path / "run", model="model"), tmp_path / "checkpoint"
    for p in policy.trained(run.model).values():
        torch.nn.init.normal_(p, std=0.1)
    runlog.save_checkpoint(path, run.model, run.tokenizer, run.optimizer, 3, {}, run.cfg)
    card = (path / "README.md").read_text()
    for said in ("sgsd.py, method sgsd", "update 3 of 4", "data.jsonl", "licence", "world_dir"):
        assert said.replace("world_dir", str(world_dir / "model")) in card
    lines = [line for line in card.splitlines() if line.startswith("    ")]
    assert "[More" not in card and len(lines) < 7
    monkeypatch.chdir(path)
    made = {}
    exec(textwrap.dedent("\n".join(lines)), made)
    ids = torch.tensor([[1, 2, 3]])
    logits = [model(input_ids=ids).logits for model in (made["model"], run.model)]
    torch.testing.assert_close(*logits)
    assert made["tokenizer"].get_vocab() == run.tokenizer.get_vocab()


def test_a_file_never_takes_the_place_of_a_directory(tmp_path):
    (tmp_path / "runs/a").mkdir(parents=True)
    with pytest.raises(OSError, match="runs"):
        files.write_text(tmp_path / "runs", "page")
    assert [path.name for path in tmp_path.rglob("*")] == ["runs", "a"]


HOLDER = """
import pathlib, sys, files
with files.locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    input()
"""


def test_a_folder_is_kept_to_one_process_and_a_kill_frees_it(tmp_path):
    folder = tmp_path / "runs/run"
    command = [sys.executable, "-c", HOLDER, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment) as holder:
        assert holder.stdout.readline() == b"held\n"
        for _ in range(2):  # the first refusal changes nothing
            with pytest.raises(UserError, match=f"{folder}: process {holder.pid} on .* is at work"):
                with files.locked(folder):
                    raise AssertionError
            with pytest.raises(UserError, match="is at work there"):
                files.refuse_busy(folder)
        holder.kill()
    assert (folder / files.LOCK).exists()
    files.refuse_busy(folder)
    with files.locked(folder):
        (folder / "file").write_text("x")
    assert [path.name for path in tmp_path.rglob("*")] == ["runs", "run", "file"]


def test_a_folder_that_was_made_for_a_lock_alone_goes_again(tmp_path):
    with pytest.raises(ZeroDivisionError), files.locked(tmp_path / "a/b"):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_locks_is_said_and_nothing_is_refused(tmp_path, monkeypatch, capsys):
    def flock(file, kind):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with files.locked(tmp_path):
        assert "this file system has no locks" in capsys.readouterr().err
