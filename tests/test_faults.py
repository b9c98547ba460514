"""Broken on purpose: kills at any instant, signals, full and read-only disks, lost ranks, numbers that are not finite (DESIGN 7, 9).

A run is forked from the test's process, so that one costs a second and not the imports; with `kill_at=n` it is killed by SIGKILL at
the n-th of its durable steps (fsync, rename).
"""

import os
import pathlib
import random
import signal
import sys
import time
import traceback

import driver
import pytest
from test_train import FakeReplies, rows, timeless

import distributed as D
import rollout as R
import sgsd


def flags(world_dir, out, **changes):
    settings = dict(model=world_dir / "model", data=world_dir / "data.jsonl", bank="", encoder=world_dir / "encoder", out=out, num_teachers=3,
                    batch_size=4, max_new_tokens=12, updates=6, checkpoint_every=2, audit_every=2, lora_rank=4, lora_alpha=8, eps_a=0.2,
                    learning_rate=1e-2, cold_start=8, update_every=3, max_new_items=2, device="cpu")  # fmt: skip
    return [f"--{k.replace('_', '-')}={v}" for k, v in {**settings, **changes}.items()]


def start(argv, log, *, env=(), kill_at=0, before=lambda: None):
    """The process id of a forked run with the coin verifier and the fake extractor; its output goes to `log`."""
    if pid := os.fork():
        return pid
    code = 99
    try:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(fd, 1), os.dup2(fd, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        os.environ.update(env)
        R.make_complete, R.Verifier = FakeReplies, driver.CoinVerifier
        durable(kill_at, log)
        before()
        code = sgsd.main(argv)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def durable(kill_at, log):
    """Counts fsyncs and renames in `log`.steps, and kills this process before the `kill_at`-th."""
    done = [0]

    def counted(f):
        def g(*args, **kw):
            done[0] += 1
            if done[0] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            pathlib.Path(f"{log}.steps").write_text(str(done[0]))
            return f(*args, **kw)

        return g

    os.fsync, pathlib.Path.replace = counted(os.fsync), counted(pathlib.Path.replace)


def wait(pid, timeout=120):
    """Its exit code, negative for a signal; a run that hangs is killed and fails the test."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    pytest.fail(f"process {pid} did not end within {timeout} s")


def go(argv, log, **kw):
    return wait(start(argv, log, **kw))


def resume(world_dir, out, log, **kw):
    """What a user does: --resume, or the first command again where the kill came before there was a run."""
    return go(["--resume", str(out)] if (out / "config.json").exists() else flags(world_dir, out), log, **kw)


def state(out):
    """All that must be equal: adapter and optimizer, every version of the bank, memories, logs; metrics without times and memory."""
    last = max((out / "checkpoints").glob("step_*"))
    files = [*last.glob("*.safetensors"), *out.glob("bank/*.json"), out / "bank/memories.jsonl", out / "rollouts.jsonl", out / "tokens.jsonl",
             *out.glob("ledger.json")]  # fmt: skip
    return {str(f.relative_to(out)): f.read_bytes() for f in files} | {"metrics": timeless(rows(out / "metrics.jsonl"))}


@pytest.fixture(scope="module")
def whole(world_dir, tmp_path_factory):
    """The uninterrupted run: its state, how many durable steps it makes, how long it takes."""
    path = tmp_path_factory.mktemp("whole")
    began = time.monotonic()
    assert go(flags(world_dir, path / "run"), path / "log") == 0, (path / "log").read_text()
    seconds = time.monotonic() - began
    return state(path / "run"), int(pathlib.Path(f"{path / 'log'}.steps").read_text()), seconds


# ------------------------------------------------------------------------------------------------ exact resume


def test_the_run_that_is_killed_has_it_all(whole):
    files, steps, _ = whole
    assert {"bank/step_000000.json", "bank/step_000003.json", "bank/step_000006.json", "bank/memories.jsonl"} <= {*files}
    assert len(files["metrics"]) == 6 and any(m["replies_read"] for m in files["metrics"]) and steps > 100


def killed_and_resumed(world_dir, tmp_path, whole, *, kill_at=0, after=0.0, tear=False):
    out, log = tmp_path / "run", tmp_path / "log"
    pid = start(flags(world_dir, out), log, kill_at=kill_at)
    if after:
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
    assert wait(pid) in (-signal.SIGKILL, 0)
    for file in out.rglob("*.jsonl") if tear else ():
        if file.name != "memories.jsonl" or not (out / "bank/bank.json").exists():  # once there is a bank, nothing is written there
            with open(file, "ab") as f:
                f.write(b'{"step": 1, "kind": "torn \xc3')
    assert resume(world_dir, out, log) == 0, log.read_text()
    for name, content in state(out).items():
        assert content == whole[0][name], name
    assert not list(out.rglob("*.tmp"))
    assert all(D.read_jsonl(f) for f in out.rglob("*.jsonl"))  # every line of every log can be read


@pytest.mark.parametrize("share", [0.005, 0.04, 0.25, 0.45, 0.75, 0.97])
def test_killed_at_a_durable_step(share, world_dir, tmp_path, whole):
    """From before config.json, through cold start, bank versions and checkpoints, to the last one."""
    killed_and_resumed(world_dir, tmp_path, whole, kill_at=1 + int(share * whole[1]), tear=share > 0.04)


@pytest.mark.long
def test_killed_at_every_durable_step(world_dir, tmp_path, whole):
    for n in range(1, whole[1] + 1):
        killed_and_resumed(world_dir, tmp_path / str(n), whole, kill_at=n, tear=n % 2)


@pytest.mark.long
def test_killed_at_40_random_instants(world_dir, tmp_path, whole):
    draw = random.Random(7)
    for n in range(40):
        killed_and_resumed(world_dir, tmp_path / str(n), whole, after=draw.uniform(0, whole[2]))
