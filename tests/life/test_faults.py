"""Signals, full disks, bugs, numbers not finite, lost ranks."""

import functools
import math
import os
import resource
import signal
import subprocess
import sys
import time

import driver
import pytest
from conftest import ROOT
from driver import at_touch, go, rows, small_flags, state, two
from safetensors.torch import load_file

import distributed
import sgsd
from lib import files, model


def at_step(number, rank, act):
    """A step function that first acts, in one step on one rank."""

    def step_fn(run, step):
        if (step, run.world.rank) == (number, rank):
            act()
        return sgsd.train_step(run, step)

    return step_fn


def breaking(steps, rank=0):
    """A step function in which the gradient is not finite, on one rank, in these steps."""

    def step_fn(run, step):
        bad = math.nan if step in steps and run.world.rank == rank else 1.0
        p = next(iter(model.trained(run.lm).values()))
        hook = p.register_hook(lambda gradient: gradient * bad)
        result = sgsd.train_step(run, step)
        hook.remove()
        return result

    return step_fn


def steps_of(out):
    """The steps in the log, and those of the checkpoints."""
    logged = [m["step"] for m in rows(out / "metrics.jsonl")]
    return logged, list(files.by_step(out / "checkpoints"))


def assert_goes_on(argv, out, uninterrupted, log):
    """The same command makes the run what it would have been."""
    assert go(argv, log) == 0, log.read_text()[-3000:]
    assert state(out) == state(uninterrupted)


def assert_one_line(log, *words):
    """The log has one line of an error with these words, and no traceback."""
    text = log.read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("sgsd: ")]
    assert "Traceback" not in text and all(word in line for word in words), text[-3000:]


SIGNALS = [  # seconds between them, the steps in the log, the steps saved
    (0.0, [1, 2, 3], [2, 3]),  # one: torchrun passes on what the terminal has sent
    (1.1, [1, 2], [2]),
]


@pytest.mark.parametrize("seconds, logged, saved", SIGNALS)
def test_a_signal_waits_for_the_save_and_a_later_one_ends_at_once(
    seconds, logged, saved, world_dir, tmp_path, uninterrupted
):
    """With 130. The evolution that is due after this step comes with the continued run."""

    def send_two():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
            time.sleep(seconds)

    out, log = tmp_path / "run", tmp_path / "log"
    argv = small_flags(world_dir, out)
    assert go(argv, log, at_step(3, 0, send_two)) == 130
    text = log.read_text()
    assert text.count("finishing this step") == 1 and "Traceback" not in text
    assert "same command" in text.splitlines()[-1]
    assert steps_of(out) == (logged, saved) and not (out / "bank/step_000003.json").exists()
    assert_goes_on(argv, out, uninterrupted, log)


def test_a_signal_of_one_rank_ends_both_after_the_save(world_dir, tmp_path):
    step_fn = at_step(2, 1, functools.partial(signal.raise_signal, signal.SIGTERM))
    assert two(small_flags(world_dir, tmp_path / "run"), tmp_path, step_fn) == [130, 130]
    assert steps_of(tmp_path / "run") == ([1, 2], [2])


@pytest.mark.parametrize("place, banks", [("bank/replies.jsonl", 0), ("bank/.step_000003", 1)])
def test_outside_of_a_step_a_signal_ends_a_run_at_once(place, banks, world_dir, tmp_path):
    """In the cold start, and in the evolution after step 3, which is saved before."""
    out, log = tmp_path / "run", tmp_path / "log"
    before = at_touch(place, number=signal.SIGINT)
    assert go(small_flags(world_dir, out), log, before=before) == 130
    text = log.read_text()
    assert "same command" in text.splitlines()[-1] and "Traceback" not in text
    assert len([*out.glob("bank/step*")]) == banks


class Failing(driver.CoinVerifier):
    """It has a bug on one rank."""

    def judge(self, cases):
        if os.environ["RANK"] == os.environ["FAILING"]:
            raise ValueError("a planted bug")
        return super().judge(cases)


@pytest.mark.parametrize("bank", ["", "bank.json"])
@pytest.mark.parametrize("rank", ["0", pytest.param("1", marks=pytest.mark.long)])
def test_a_bug_of_one_rank_shows_its_traceback_and_no_rank_hangs(bank, rank, world_dir, tmp_path):
    """In the cold start, and in a step."""
    changes = {"verifier": "test_faults:Failing", "bank": bank and world_dir / bank}
    before = functools.partial(os.environ.update, FAILING=rank)
    argv = small_flags(world_dir, tmp_path / "run", **changes)
    assert two(argv, tmp_path, before=before) == [1, 1]
    log = (tmp_path / f"log{rank}").read_text()
    assert "Traceback" in log and "a planted bug" in log


def test_a_full_disk_is_one_line_and_leaves_whole_files(world_dir, tmp_path, uninterrupted):
    """As full as one process can make it: from step 4 on no file may grow beyond 100,000 bytes."""
    out, log = tmp_path / "run", tmp_path / "log"
    argv = small_flags(world_dir, out)
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (100_000, most))
    assert go(argv, log, at_step(4, 0, limit)) == 2
    assert_one_line(log, "step_000004", "too large", "same command")
    assert steps_of(out)[1] == [2, 3]
    assert_goes_on(argv, out, uninterrupted, log)


def test_a_bad_step_moves_no_weight_and_a_third_in_a_row_ends_both_ranks(world_dir, tmp_path):
    """S34: on one rank the gradient was not finite. The count goes on where the command does."""
    out, log = tmp_path / "run", tmp_path / "log"
    argv = small_flags(world_dir, out, bank=world_dir / "bank.json", evolve_every=0)
    assert two(argv, tmp_path, breaking({1, 3, 4, 5}, rank=1)) == [2, 2]
    assert [m["skipped"] for m in rows(out / "metrics.jsonl")] == [1, 0, 1, 1, 1]
    by_step = files.by_step(out / "checkpoints")
    weights = [(path / "adapter_model.safetensors").read_bytes() for path in by_step.values()]
    assert [*by_step] == [2, 4, 5] and weights[0] == weights[1] == weights[2]
    assert_one_line(tmp_path / "log0", "last 3 steps", f"--adapter {by_step[5]}")
    for _ in range(2):  # the last step is bad, too: the run never ends well on it
        log.unlink(missing_ok=True)
        assert go(argv, log, breaking({6})) == 2
        assert_one_line(log, "last 4 steps")
    assert go([*argv, "--steps=7"], log) == 0
    assert [m["skipped"] for m in rows(out / "metrics.jsonl")] == [1, 0, 1, 1, 1, 1, 0]
    last = out / "checkpoints/step_000007"
    assert (last / "adapter_model.safetensors").read_bytes() != weights[0]
    assert all(x.isfinite().all() for x in load_file(last / "trainer.safetensors").values())


def test_an_evolution_that_is_due_after_a_third_bad_step_comes_with_the_next_command(
    world_dir, tmp_path
):
    out, log = tmp_path / "run", tmp_path / "log"
    argv = small_flags(world_dir, out, checkpoint_every=9)
    assert go(argv, log, breaking({1, 2, 3})) == 2
    assert steps_of(out)[1] == [3] and not (out / "bank/step_000003.json").exists()
    assert go(argv, log) == 0 and (out / "bank/step_000003.json").exists()


def kill():
    """End this process, but not after a restart."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") != "1":
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_ends_ends_the_other(world_dir, tmp_path):
    """gloo tells rank 0, and torchrun would end it."""
    out = tmp_path / "run"
    argv = small_flags(world_dir, out, bank=world_dir / "bank.json")
    assert two(argv, tmp_path, at_step(3, 1, kill)) == [1, -signal.SIGKILL]
    assert "another process has ended" in (tmp_path / "log0").read_text()
    assert steps_of(out) == ([1, 2], [2])


def interrupt():
    """What Ctrl-C sends: SIGINT to torchrun and to each rank."""
    os.killpg(os.getpgrp(), signal.SIGINT)
    time.sleep(0.2)


STEPS = {"kill": at_step(3, 1, kill), "interrupt": at_step(3, 0, interrupt)}


def torchrun(step_fn, option, argv):
    """A run of two processes by torchrun, with a step function of STEPS."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests", "OMP_NUM_THREADS": "1"}
    command += [option, __file__, step_fn, *argv]
    given = {"env": environment, "capture_output": True, "text": True}
    return subprocess.run(command, start_new_session=True, **given)


def assert_same_banks(out, uninterrupted):
    """Memories lie in another order where two processes made them."""
    ours, theirs = state(out), state(uninterrupted)
    assert [m["step"] for m in ours["metrics"]] == [1, 2, 3, 4, 5, 6]
    for name in theirs:
        assert "bank/step" not in name or ours[name] == theirs[name], name


@pytest.mark.long
def test_torchrun_starts_a_run_again_that_lost_a_rank(world_dir, tmp_path, uninterrupted):
    argv = small_flags(world_dir, tmp_path / "run")
    done = torchrun("kill", "--max-restarts=1", argv)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("continues after step 2") == 1
    assert_same_banks(tmp_path / "run", uninterrupted)


@pytest.mark.long
def test_ctrl_c_under_torchrun_finishes_the_step_and_saves(world_dir, tmp_path, uninterrupted):
    out = tmp_path / "run"
    argv = small_flags(world_dir, out)
    done = torchrun("interrupt", "--shutdown-timeout=60", argv)
    assert done.returncode != 0 and "stopped after step 3" in done.stdout
    assert steps_of(out) == ([1, 2, 3], [2, 3])
    assert go(argv, tmp_path / "log") == 0
    assert_same_banks(out, uninterrupted)


if __name__ == "__main__":  # a process of `torchrun`
    distributed.run_and_exit(lambda: driver.main(sys.argv[2:], STEPS[sys.argv[1]]))
