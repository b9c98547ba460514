"""Signals, full disks, bugs, numbers not finite, lost ranks.

`run(argv)` is a command in a process of its own, which must end with 0 or the code `ends`, and
`run_two` the same on two ranks; they return what was printed. A run of `small_flags` makes its
bank, saves after steps 2, 3, 4 and 6, and evolves after 3 and 6; `uninterrupted` is such a run.
Another function of a step, by `with_steps`, does the damage.
"""

import functools
import math
import os
import resource
import signal
import subprocess
import sys
import time

import pytest
import small_run
from conftest import ROOT
from driver import equal, rows, run, run_two, stopped_at
from safetensors.torch import load_file
from small_run import small_flags, with_steps

import distributed
import sgsd
from lib import files, model


def before_step(number, act, rank=0):
    """The command, in which one rank first acts in one step."""

    def step_fn(run, step):
        if step == number and run.world.rank == rank:
            act()
        return sgsd.train_step(run, step)

    return with_steps(step_fn)


def not_finite(*steps, rank=0):
    """The command, in which on one rank the gradient is not finite in these steps."""

    def step_fn(run, step):
        bad = math.nan if step in steps and run.world.rank == rank else 1.0
        p = next(iter(model.trained(run.lm).values()))
        hook = p.register_hook(lambda gradient: gradient * bad)
        result = sgsd.train_step(run, step)
        hook.remove()
        return result

    return with_steps(step_fn)


def logged(out):
    """The steps in the log."""
    return [m["step"] for m in rows(out / "metrics.jsonl")]


def saved(out):
    """The steps of the checkpoints."""
    return [*files.by_step(out / "checkpoints")]


def error_in(text):
    """The one line of an error in what a command printed."""
    (line,) = [line for line in text.splitlines() if line.startswith("sgsd: ")]
    assert "Traceback" not in text, text[-3000:]
    return line


# ---------------------------------------------------------------------------------------- signals


def two_signals(seconds):
    """Send two signals, so far apart."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.raise_signal(number)
        time.sleep(seconds)


@pytest.mark.parametrize("seconds, last", [(0.0, 3), (1.1, 2)])
def test_a_signal_waits_for_the_save_and_a_later_one_ends_at_once(
    seconds, last, world_dir, tmp_path, uninterrupted
):
    """Two at once are one: torchrun passes on what the terminal has sent. The evolution that is due
    after step 3 comes with the continued run."""
    out = tmp_path / "run"
    argv = small_flags(world_dir, out)
    text = run(argv, before_step(3, lambda: two_signals(seconds)), ends=130)
    assert text.count("finishing this step") == 1 and "Traceback" not in text
    assert "same command" in text.splitlines()[-1]
    assert logged(out)[-1] == saved(out)[-1] == last
    assert not (out / "bank/step_000003.json").exists()
    run(argv)
    equal(out, uninterrupted)


def test_a_signal_of_one_rank_ends_both_after_the_save(world_dir, tmp_path):
    out, stop = tmp_path / "run", functools.partial(signal.raise_signal, signal.SIGTERM)
    run_two(small_flags(world_dir, out), before_step(2, stop, rank=1), ends=(130, 130))
    assert logged(out) == [1, 2] and saved(out) == [2]


@pytest.mark.parametrize("file", ["bank/replies.jsonl", "bank/.step_000003"])
def test_outside_of_a_step_a_signal_ends_a_run_at_once(file, world_dir, tmp_path):
    """In the cold start, and in the evolution after step 3, which is saved before."""
    out = tmp_path / "run"
    text = run(small_flags(world_dir, out), stopped_at(file, by=signal.SIGINT), ends=130)
    assert "same command" in text.splitlines()[-1] and "Traceback" not in text
    assert saved(out) == ([] if "replies" in file else [2, 3])
    assert not (out / "bank/step_000003.json").exists()


# ------------------------------------------------------------------------ bugs, disks and numbers


class Failing(small_run.CoinVerifier):
    """It has a bug on one rank."""

    def judge(self, cases):
        if os.environ["RANK"] == os.environ["FAILING"]:
            raise ValueError("a planted bug")
        return super().judge(cases)


@pytest.mark.parametrize("bank", ["", "bank.json"])
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_bug_of_one_rank_shows_its_traceback_and_no_rank_hangs(
    bank, rank, world_dir, tmp_path, monkeypatch
):
    """In the cold start, and in a step."""
    monkeypatch.setenv("FAILING", str(rank))
    changes = {"verifier": "test_faults:Failing", "bank": bank and world_dir / bank}
    texts = run_two(small_flags(world_dir, tmp_path / "run", **changes), ends=(1, 1))
    assert "Traceback" in texts[rank] and "a planted bug" in texts[rank]


def test_a_full_disk_is_one_line_and_leaves_whole_files(world_dir, tmp_path, uninterrupted):
    """As full as one process can make it: from step 4 on no file may grow beyond 100,000 bytes."""
    out = tmp_path / "run"
    argv = small_flags(world_dir, out)
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (100_000, most))
    line = error_in(run(argv, before_step(4, limit), ends=2))
    assert "step_000004" in line and "too large" in line and "same command" in line
    assert saved(out) == [2, 3]
    run(argv)
    equal(out, uninterrupted)


def test_a_bad_step_moves_no_weight_and_a_third_in_a_row_ends_both_ranks(world_dir, tmp_path):
    """S34: on one rank the gradient was not finite. The count goes on where the command does."""
    out = tmp_path / "run"
    argv = small_flags(world_dir, out, bank=world_dir / "bank.json", evolve_every=0)
    text, _ = run_two(argv, not_finite(1, 3, 4, 5, rank=1), ends=(2, 2))
    assert [m["skipped"] for m in rows(out / "metrics.jsonl")] == [1, 0, 1, 1, 1]
    by_step = files.by_step(out / "checkpoints")
    weights = [(path / "adapter_model.safetensors").read_bytes() for path in by_step.values()]
    assert [*by_step] == [2, 4, 5] and weights[0] == weights[1] == weights[2]
    assert "last 3 steps" in error_in(text) and "new --out" in text
    for _ in range(2):  # the last step is bad, too: the run never ends well on it
        assert "last 4 steps" in error_in(run(argv, not_finite(6), ends=2))
    run([*argv, "--steps=7"])
    assert [m["skipped"] for m in rows(out / "metrics.jsonl")] == [1, 0, 1, 1, 1, 1, 0]
    last = out / "checkpoints/step_000007"
    assert (last / "adapter_model.safetensors").read_bytes() != weights[0]
    assert all(x.isfinite().all() for x in load_file(last / "trainer.safetensors").values())


# ------------------------------------------------------------------------------------- lost ranks


def kill():
    """End this process, but not after a restart."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") != "1":
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_ends_ends_the_other(world_dir, tmp_path):
    """gloo tells rank 0, and torchrun would end it."""
    out = tmp_path / "run"
    argv = small_flags(world_dir, out, bank=world_dir / "bank.json")
    text, _ = run_two(argv, before_step(3, kill, rank=1), ends=(1, -signal.SIGKILL))
    assert "another process has ended" in text
    assert logged(out) == [1, 2] and saved(out) == [2]


def interrupt():
    """What Ctrl-C sends: SIGINT to torchrun and to each rank."""
    os.killpg(os.getpgrp(), signal.SIGINT)
    time.sleep(0.2)


UNDER_TORCHRUN = {"kill": before_step(3, kill, rank=1), "interrupt": before_step(3, interrupt)}


def torchrun(name, option, argv):
    """A run of two processes by torchrun, of UNDER_TORCHRUN."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests", "OMP_NUM_THREADS": "1"}
    command += [option, __file__, name, *argv]
    given = {"env": environment, "capture_output": True, "text": True}
    return subprocess.run(command, start_new_session=True, **given)


@pytest.mark.long
def test_torchrun_starts_a_run_again_that_lost_a_rank(world_dir, tmp_path, uninterrupted):
    out = tmp_path / "run"
    done = torchrun("kill", "--max-restarts=1", small_flags(world_dir, out))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("continues after step 2") == 1
    assert logged(out) == [1, 2, 3, 4, 5, 6]
    equal(out, uninterrupted, "bank/step")


@pytest.mark.long
def test_ctrl_c_under_torchrun_finishes_the_step_and_saves(world_dir, tmp_path, uninterrupted):
    out = tmp_path / "run"
    argv = small_flags(world_dir, out)
    done = torchrun("interrupt", "--shutdown-timeout=60", argv)
    assert done.returncode != 0 and "stopped after step 3" in done.stdout
    assert logged(out) == [1, 2, 3] and saved(out) == [2, 3]
    run(argv)
    assert logged(out) == [1, 2, 3, 4, 5, 6]
    equal(out, uninterrupted, "bank/step")


if __name__ == "__main__":  # a process of `torchrun`
    program, *words = sys.argv[1:]
    distributed.run_and_exit(lambda: UNDER_TORCHRUN[program](words))
