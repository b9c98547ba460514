"""Broken on purpose: kills, signals, full and read-only disks, lost ranks, numbers not finite.

A run is forked from the test's process, so that it costs a second and not the imports.
"""

import ctypes
import json
import multiprocessing
import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
import time

import driver
import numpy as np
import pytest
import torch
from conftest import ROOT
from driver import (
    breaking,
    make_run,
    rows,
    signals_restored,
    start,
    stopping_at,
    timeless,
    train,
    two,
    two_processes,
    wait,
)
from safetensors.torch import load, load_file

import sgsd
from lib import files, verify

CONTINUE = "continue with: python -m extras.baselines --resume"
TORCHRUN = "continue with: torchrun --nproc_per_node 2 -m extras.baselines --resume"


def flags(world_dir, out, **changes):
    """A run that makes its own bank; its checkpoints are much larger than its logs."""
    settings = {"bank": "", "cold_start": 8, "evolve_every": 3, "max_new_items": 2, "steps": 6}
    settings |= {"max_new_tokens": 8, "lora_rank": 32, "batch_size": 3, "num_teachers": 2}
    return driver.flags(world_dir, out, **{**settings, **changes})


def go(argv, log, step_fn=None, before=None):
    """The exit code of a run in a process of its own."""
    return wait(start(argv, log, step_fn, before))


def resumed_equals(whole, world_dir, out, log):
    """What a user does: --resume, or the first command again where there is no run yet."""
    is_there = (out / "config.json").exists()
    code = go(["--resume", out] if is_there else flags(world_dir, out), log)
    assert code == 0, log.read_text()[-3000:]
    for name, content in state(out).items():
        assert content == whole[0][name], name


def state(out):
    """All that must be equal: adapter, optimizer, the versions of the bank, memories and logs."""
    last = max((out / "checkpoints").glob("step_*"))
    paths = [*last.glob("*.safetensors"), *out.glob("bank/*.json*")]
    paths += [out / "rollouts.jsonl", out / "tokens.jsonl"]
    contents = {str(path.relative_to(out)): path.read_bytes() for path in paths}
    return contents | {"metrics": timeless(rows(out / "metrics.jsonl"))}


def steps_of(out):
    """The steps in the log, and those of the checkpoints."""
    saved = [int(path.name[5:]) for path in sorted((out / "checkpoints").glob("*"))]
    return [m["step"] for m in rows(out / "metrics.jsonl")], saved


def count_files(out, counter, kill_at=0):
    """Count how often this process opens, makes, renames or removes something in the run.

    The process is killed before the `kill_at`-th time.
    """
    events = {"open", "os.mkdir", "os.rename", "os.remove"}

    def watch(event, args):
        if event in events and str(args[0]).startswith(str(out)):
            counter.value += 1
            if counter.value == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


@pytest.fixture(scope="module")
def whole(world_dir, tmp_path_factory):
    """The uninterrupted run: its state, how often it touches files, how many seconds it takes."""
    path, counter = tmp_path_factory.mktemp("whole"), multiprocessing.RawValue("l")
    out, log, began = path / "run", path / "log", time.time()
    code = go(flags(world_dir, out), log, before=lambda: count_files(out, counter))
    assert code == 0, log.read_text()[-3000:]
    return state(out), counter.value, time.time() - began


# ------------------------------------------------------------------------------------------ kills


def check_killed(world_dir, path, whole, kill_at=0, seconds=0.0, tear=False):
    """Whether the run was killed before its end; then resumed, it must equal the whole one."""
    path.mkdir(exist_ok=True)
    out, log, counter = path / "run", path / "log", multiprocessing.RawValue("l")
    pid = start(flags(world_dir, out), log, before=lambda: count_files(out, counter, kill_at))
    if seconds:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
    code = wait(pid)
    assert code == -signal.SIGKILL or (seconds and code == 0), log.read_text()[-3000:]
    for file in out.glob("*.jsonl") if tear else []:
        with open(file, "ab") as f:
            f.write(b'{"step": 1, "kind": "torn \xc3')
    resumed_equals(whole, world_dir, out, log)
    assert not list(out.rglob("*.tmp"))
    assert all(list(files.read_jsonl(file)) for file in out.rglob("*.jsonl"))
    return code != 0


LONG_SHARES = [pytest.param(share, marks=pytest.mark.long) for share in (0.05, 0.3, 0.5)]


@pytest.mark.parametrize("share", [0.002, 0.98, *LONG_SHARES])
def test_killed_when_it_touches_a_file(share, world_dir, tmp_path, whole):
    """From before config.json through cold start, banks and checkpoints to the last one."""
    kill_at = 1 + int(share * whole[1])
    check_killed(world_dir, tmp_path, whole, kill_at=kill_at, tear=share > 0.4)


@pytest.mark.long
def test_killed_every_time_it_touches_a_file(world_dir, tmp_path, whole):
    """Every eighth time; KILLS=all takes each of them, in half an hour."""
    assert whole[1] > 100
    for n in range(1, whole[1] + 1, 1 if os.environ.get("KILLS") == "all" else 8):
        check_killed(world_dir, tmp_path / str(n), whole, kill_at=n, tear=n % 2 == 1)


@pytest.mark.long
def test_killed_at_40_random_instants(world_dir, tmp_path, whole):
    draw, tried, killed = random.Random(7), 0, 0
    while killed < 40:  # a run may end before its instant comes, which is no kill
        seconds = draw.uniform(0.01, whole[2])
        killed += check_killed(world_dir, tmp_path / str(tried), whole, seconds=seconds)
        tried += 1
        assert tried < 200


# ---------------------------------------------------------------------------------------- signals


def signalled_in_step_3(number, times=1, seconds=0.0):
    """A step function that sends itself signals at the beginning of step 3."""

    def step_fn(run, step):
        for _ in range(times if step == 3 else 0):
            os.kill(os.getpid(), number)
            time.sleep(seconds)
        return sgsd.train_step(run, step)

    return step_fn


@pytest.mark.parametrize("number,times", [(signal.SIGTERM, 1), (signal.SIGINT, 2)])
def test_a_signal_finishes_the_step_and_saves_it(number, times, world_dir, tmp_path, whole):
    """Two within a second count as one: torchrun passes on what the terminal has sent.

    The evolution that is due after this step comes with the resumed run.
    """
    out, log = tmp_path / "run", tmp_path / "log"
    code = go(flags(world_dir, out), log, signalled_in_step_3(number, times))
    text = log.read_text()
    assert code == 130 and "Traceback" not in text
    assert text.count("finishing step 3, then stopping; once more stops at once\n") == 1
    assert f"stopped by a signal; {CONTINUE} {out}\n" in text
    assert steps_of(out) == ([1, 2, 3], [2, 3])
    assert not (out / "bank/step_000003.json").exists()
    resumed_equals(whole, world_dir, out, log)
    assert "resumed from step 3\n" in log.read_text()


def test_a_second_signal_more_than_a_second_later_ends_the_step_at_once(world_dir, tmp_path, whole):
    out, log = tmp_path / "run", tmp_path / "log"
    assert go(flags(world_dir, out), log, signalled_in_step_3(signal.SIGINT, 9, 0.6)) == 130
    assert "finishing step 3" in log.read_text() and "Traceback" not in log.read_text()
    assert steps_of(out) == ([1, 2], [2])
    resumed_equals(whole, world_dir, out, log)


@pytest.mark.parametrize("place", ["cold start", "evolution"])
def test_elsewhere_a_signal_ends_a_run_at_once(place, world_dir, tmp_path, whole):
    """In the cold start, and in the evolution after step 3, which is saved before."""
    out, log = tmp_path / "run", tmp_path / "log"

    def answer(writer, questions, stage):
        if writer.step == (0 if place == "cold start" else 3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(600)
        return [(writer.reply(question.prompt), False) for question in questions]

    def before():  # in the forked process alone
        driver.FakeWriter.answer = answer

    assert go(flags(world_dir, out), log, before=before) == 130
    text = log.read_text()
    assert f"--resume {out}\n" in text.partition("Interrupted. ")[2] and "Traceback" not in text
    if place == "evolution":
        assert steps_of(out) == ([1, 2, 3], [2, 3])
    assert not (out / "bank/step_000003.json").exists()
    resumed_equals(whole, world_dir, out, log)


class InterruptedJudge(driver.Exact):
    """Judges no sample while INTERRUPTED is set; a run of the driver's trains with another."""

    def judge(self, cases):
        if "INTERRUPTED" in os.environ:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(600)
        return super().judge(cases)


def interrupt_the_evaluation():
    os.environ["INTERRUPTED"] = "1"


def test_a_stop_in_the_last_step_or_in_the_evaluation_leaves_the_evaluation_to_the_resumed_run(
    world_dir, tmp_path
):
    changes = {"steps": 2, "bank": world_dir / "bank.json", "eval_data": world_dir / "data.jsonl"}
    changes |= {"allow_eval_overlap": True, "eval_samples": 2, "eval_tokens": 8}
    changes["verifier"] = "test_faults:InterruptedJudge"
    samples = []
    for name, stops in (("whole", 0), ("stopped", 2)):
        out, log = tmp_path / name, tmp_path / f"{name}.log"
        argv = flags(world_dir, out, **changes)
        if stops:
            assert go(argv, log, stopping_at(2)) == 130
            assert steps_of(out) == ([1, 2], [2]) and not (out / "eval").exists()
            argv = ["--resume", out]
            assert go(argv, log, before=interrupt_the_evaluation) == 130
            assert not list(out.rglob("results.json"))
        assert go(argv, log) == 0, log.read_text()[-3000:]
        assert "Traceback" not in log.read_text() and list(out.rglob("results.json"))
        paths = out.rglob("samples.jsonl")
        samples.append(sorted(line for path in paths for line in path.read_text().splitlines()))
    assert len(samples[0]) == 2 * 2 * 12 and samples[0] == samples[1]


# --------------------------------------------------------------------- what fails, and what it says


def assert_one_line(log, *words):
    """The log has one line of an error with these words, and no traceback."""
    text = log.read_text()
    lines = [line for line in text.splitlines() if line.startswith("baselines: ")]
    assert len(lines) == 1 and "Traceback" not in text, text[-3000:]
    for word in words:
        assert word in lines[0], text[-3000:]


@pytest.mark.parametrize(
    "size,name",
    [pytest.param(8_192, ".jsonl", marks=pytest.mark.long), (100_000, "step_000004")],
)
def test_a_full_disk_leaves_whole_files(size, name, world_dir, tmp_path, whole):
    """As full as one process can make it: from step 4 on no file may grow beyond `size` bytes."""
    out, log = tmp_path / "run", tmp_path / "log"

    def limited(run, step):
        if step == 4:
            most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
        return sgsd.train_step(run, step)

    assert go(flags(world_dir, out), log, limited) == 2
    assert_one_line(log, name, "too large", f"{CONTINUE} {out}")
    assert not list(out.rglob("*.tmp"))
    assert steps_of(out)[1] == [2, 3]
    resumed_equals(whole, world_dir, out, log)


@pytest.mark.parametrize("error,place", [(ConnectionError, "evolution"), (KeyError, "step")])
def test_a_server_that_is_gone_is_one_line_and_a_bug_is_a_traceback(
    error, place, world_dir, tmp_path, whole
):
    """Both end the run, which a resumed one then makes as if nothing had happened."""
    out, log = tmp_path / "run", tmp_path / "log"

    def fail(run, step):
        if step == 3 and place == "step":
            raise error("no server answers")
        return sgsd.train_step(run, step)

    def answer(writer, questions, stage):
        if writer.step == 3:
            raise error("no server answers")
        return [(writer.reply(question.prompt), False) for question in questions]

    def before():  # in the forked process alone
        if place == "evolution":
            driver.FakeWriter.answer = answer

    code = go(flags(world_dir, out), log, fail, before)
    if error is ConnectionError:
        assert code == 2
        assert_one_line(log, f"no server answers; {CONTINUE} {out}")
    else:
        assert code == 1 and "Traceback" in log.read_text()
    assert steps_of(out) == (([1, 2], [2]) if place == "step" else ([1, 2, 3], [2, 3]))
    resumed_equals(whole, world_dir, out, log)


def drop_powers():
    """Root without its powers: the bits of a directory hold for it, too."""
    version, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert not ctypes.CDLL(None).capset(version, none)


def test_a_read_only_directory_is_one_line(world_dir, tmp_path):
    out, log = tmp_path / "run", tmp_path / "log"
    assert go(flags(world_dir, out, steps=2), log) == 0
    before = state(out)
    folders = {out: ["--resume", out], tmp_path: flags(world_dir, tmp_path / "new")}
    for folder, argv in folders.items():
        log.write_text("")
        folder.chmod(0o555)
        code = go(argv, log, before=drop_powers)
        folder.chmod(0o755)
        assert code == 2
        assert_one_line(log, str(folder), "Permission denied")
    assert state(out) == before and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "what", ["gradient", "teacher", pytest.param("student", marks=pytest.mark.long)]
)
def test_numbers_that_are_not_finite_skip_the_step(what, world_dir, tmp_path):
    """Step 2 changes nothing and is counted, and the run goes on."""
    run = train(
        world_dir, tmp_path / "run", step_fn=breaking({2}, what), checkpoint_every=1, steps=3
    )
    assert run.code == 0
    assert [m["skipped"] for m in rows(run.out / "metrics.jsonl")] == [0, 1, 0]
    folders = [run.out / f"checkpoints/step_00000{i}" for i in (1, 2, 3)]
    first, second, third = [(path / "adapter_model.safetensors").read_bytes() for path in folders]
    assert first == second != third
    assert all(x.isfinite().all() for x in load_file(folders[2] / "trainer.safetensors").values())


# ----------------------------------------------------------------------------------- several ranks


def test_resumed_on_another_world_size(world_dir, tmp_path, whole):
    """Stopped by one process and finished by two: the same bank and samples, up to rounding."""
    out = tmp_path / "run"
    assert go(flags(world_dir, out), tmp_path / "log", stopping_at(3)) == 130
    assert two(["--resume", out], tmp_path) == [0, 0]
    ours, theirs = state(out), whole[0]
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert not name.startswith("bank/") or ours[name] == theirs[name], name
    logs = [map(json.loads, x["rollouts.jsonl"].splitlines()) for x in (ours, theirs)]
    for a, b in zip(*logs, strict=True):
        assert (a["completion_ids"], a["rho"]) == (b["completion_ids"], b["rho"])
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)
    last = "checkpoints/step_000006/adapter_model.safetensors"
    torch.testing.assert_close(load(ours[last]), load(theirs[last]), atol=1e-4, rtol=1e-2)


def test_a_signal_that_reaches_one_rank_stops_both_after_the_same_step(world_dir, tmp_path):
    out = tmp_path / "run"

    def stop_rank_1(run, step):
        if (step, run.world.rank) == (3, 1):
            os.kill(os.getpid(), signal.SIGTERM)
        return sgsd.train_step(run, step)

    assert two(flags(world_dir, out), tmp_path, stop_rank_1) == [130, 130]
    assert steps_of(out) == ([1, 2, 3], [2, 3])


def killed_at_3(run, step):
    """A step function that kills rank 1 in step 3, but not after a restart."""
    if (step, run.world.rank) == (3, 1) and os.environ.get("TORCHELASTIC_RESTART_COUNT") != "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return sgsd.train_step(run, step)


def failing_at_3(run, step):
    """A step function in which rank 1 has no server in step 3."""
    if (step, run.world.rank) == (3, 1):
        raise ConnectionError("no server answers")
    return sgsd.train_step(run, step)


@pytest.mark.parametrize("step_fn,code", [(killed_at_3, -signal.SIGKILL), (failing_at_3, 2)])
def test_a_rank_that_ends_ends_the_other(step_fn, code, world_dir, tmp_path):
    """gloo tells rank 0, and torchrun would end it; its own mistake is one line of rank 1."""
    out = tmp_path / "run"
    assert two(flags(world_dir, out), tmp_path, step_fn) == [1, code]
    assert "Connection closed by peer" in (tmp_path / "log0").read_text()
    if code == 2:
        assert_one_line(tmp_path / "log1", f"no server answers; {CONTINUE} {out}")
    assert steps_of(out) == ([1, 2], [2])


def test_a_mistake_that_one_rank_sees_before_the_first_step_is_one_line_of_rank_0(
    world_dir, tmp_path
):
    argv = flags(world_dir, tmp_path / "run", bank=world_dir / "bank.json")
    wrong = [*argv, "--num-teachers=9"]
    assert two(argv, tmp_path, argv1=wrong) == [2, 2]
    assert_one_line(tmp_path / "log0", "rank 1: --bank", "--num-teachers 9 needs as many")
    assert "baselines: " not in (tmp_path / "log1").read_text()
    assert not (tmp_path / "run").exists()


def test_three_steps_in_a_row_that_are_not_finite_on_one_rank_end_both(world_dir, tmp_path):
    out = tmp_path / "run"
    argv = flags(world_dir, out, bank=world_dir / "bank.json", evolve_every=0)
    assert two(argv, tmp_path, breaking({1, 3, 4, 5}, rank=1)) == [1, 1]
    assert [m["skipped"] for m in rows(out / "metrics.jsonl")] == [1, 0, 1, 1, 1]
    assert steps_of(out)[1] == [2, 4, 5]
    assert "three steps in a row were not finite" in (tmp_path / "log0").read_text()


PROGRAM = f"""
import sys
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
import driver, distributed, test_faults
step_fn = getattr(test_faults, sys.argv.pop(1))
distributed.leave(lambda: driver.main(None, step_fn))
"""


def same_banks(out, whole):
    """Memories lie in another order where two processes made them."""
    ours = state(out)
    assert [m["step"] for m in ours["metrics"]] == [1, 2, 3, 4, 5, 6]
    for name in whole[0]:
        assert "bank/step" not in name or ours[name] == whole[0][name]


@pytest.mark.long
def test_torchrun_starts_a_run_again_that_lost_a_rank(world_dir, tmp_path, whole):
    (tmp_path / "program.py").write_text(PROGRAM)
    argv = ["killed_at_3", *flags(world_dir, tmp_path / "run")]
    printed = two_processes("--max-restarts=1", tmp_path / "program.py", *argv)
    assert printed.count("parameters learn") == 2  # it was started twice
    same_banks(tmp_path / "run", whole)


def waiting_at_3(run, step):
    """A step function in which rank 1 has a bug in step 3, while rank 0 waits for something."""
    if step == 3 and run.world.main:
        time.sleep(600)
    assert step < 3, "a bug"
    return sgsd.train_step(run, step)


def interrupted_at_3(run, step):
    """A step function that sends what Ctrl-C sends: SIGINT to torchrun and to each rank."""
    if step == 3 and run.world.main:
        os.killpg(os.getpgrp(), signal.SIGINT)
        time.sleep(0.2)
    return sgsd.train_step(run, step)


@pytest.mark.long
@pytest.mark.parametrize("step_fn", ["waiting_at_3", "interrupted_at_3"])
def test_under_torchrun_a_lost_rank_ends_the_others_and_ctrl_c_saves_the_step(
    step_fn, world_dir, tmp_path, whole
):
    (tmp_path / "program.py").write_text(PROGRAM)
    out = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["--shutdown-timeout=5" if step_fn == "waiting_at_3" else "--shutdown-timeout=60"]
    command += [tmp_path / "program.py", step_fn, *flags(world_dir, out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, start_new_session=True
    )
    assert done.returncode != 0
    if step_fn == "waiting_at_3":
        assert "AssertionError: a bug" in done.stderr
        assert steps_of(out) == ([1, 2], [2])
    else:
        assert f"stopped by a signal; {TORCHRUN} {out}" in done.stdout
        assert steps_of(out) == ([1, 2, 3], [2, 3])
    assert go(["--resume", out], tmp_path / "log") == 0
    same_banks(out, whole)


# -------------------------------------------------------------------------------------- long runs


def resources():
    """Resident KB, open files, threads and child processes of this process."""
    me = pathlib.Path("/proc/self")
    kb = int((me / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024
    threads = list((me / "task").iterdir())
    children = [child for task in threads for child in (task / "children").read_text().split()]
    return kb, len(os.listdir(me / "fd")), len(threads), len(children)


LONG = int(os.environ.get("LONG_STEPS", 400))


@pytest.mark.long
@pytest.mark.parametrize("steps,kb", [(40, 600), (LONG, 10)])
def test_a_run_stays_flat(steps, kb, world_dir, tmp_path):
    """Slopes per step after the warm-up, where the bank evolves every 10."""
    changes = {"steps": steps, "bank": "", "evolve_every": 10, "max_new_tokens": 6}
    changes |= {"batch_size": 2, "cold_start": 8, "checkpoint_every": 20, "audit_every": 0}
    changes["allow_empty_bank"] = True  # a random model is never right, so there is no skill
    run, seen = make_run(world_dir, tmp_path / "run", **changes), []

    def step_fn(run, step):
        seen.append(resources())
        return sgsd.train_step(run, step)

    with verify.Verifier() as run.verifier, signals_restored():
        assert sgsd.train(run, sgsd.begin(run, resume=False), step_fn) == 0
    after = np.array(seen[steps // 4 :], dtype=float)
    slopes = np.polyfit(np.arange(len(after)), after, 1)[0]
    print("slopes of KB, files, threads and processes:", slopes)
    assert abs(slopes[0]) < kb and (abs(slopes[1:]) < 1e-2).all(), slopes
