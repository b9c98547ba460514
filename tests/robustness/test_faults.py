"""Broken on purpose: kills, signals, full and read-only disks, lost ranks, numbers not finite.

A run is forked from the test's process, so that it costs a second and not the imports.
"""

import ctypes
import dataclasses
import functools
import json
import multiprocessing
import os
import pathlib
import random
import resource
import signal
import socket
import sys
import threading
import time
import traceback

import driver
import numpy as np
import pytest
import torch
from driver import breaking, make_run, rows, stopping_at, timeless, two_processes
from safetensors.torch import load, load_file
from tqdm import tqdm

import files
import rollout
import sgsd


def flags(world_dir, out, **changes):
    """A run that makes its own bank; its checkpoints are much larger than its logs."""
    settings = {"bank": "", "cold_start": 8, "update_every": 3, "max_new_items": 2, "updates": 6}
    settings |= {"max_new_tokens": 12, "lora_rank": 32}
    return driver.flags(world_dir, out, **{**settings, **changes})


def start(argv, log, step_fn=None, before=None):
    """The id of a process that calls before and driver.main; what it says goes to `log`."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        sys.stdout = sys.stderr = open(log, "a", buffering=1)
        tqdm.set_lock(threading.RLock())  # its own is shared with forked processes that are killed
        if before:
            before()
        code = driver.main(argv, step_fn)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # never back into the tests


def wait(pid):
    """The exit code of a process, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def go(*args, **kw):
    return wait(start(*args, **kw))


def resumed_equals(whole, world_dir, out, log):
    """What a user does: --resume, or the first command again where there is no run yet."""
    begun = (out / "config.json").exists()
    code = go(["--resume", str(out)] if begun else flags(world_dir, out), log)
    assert code == 0, log.read_text()[-3000:]
    for name, content in state(out).items():
        assert content == whole[0][name], name


def state(out):
    """All that must be equal: adapter, optimizer, the versions of the bank, memories and logs."""
    last = max((out / "checkpoints").glob("step_*"))
    files = [*last.glob("*.safetensors"), *out.glob("bank/*.json*")]
    files += [out / "rollouts.jsonl", out / "tokens.jsonl"]
    found = {str(path.relative_to(out)): path.read_bytes() for path in files}
    return found | {"metrics": timeless(rows(out / "metrics.jsonl"))}


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


@pytest.mark.parametrize("share", [0.002, 0.05, 0.3, 0.5, 0.75, 0.98])
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("place", ["step", "bank's evolution", "cold start"])
def test_a_signal_is_an_orderly_stop(place, number, world_dir, tmp_path, whole):
    """A step is finished and saved, a cold start interrupted; all go on as if uninterrupted."""
    out, log = tmp_path / "run", tmp_path / "log"

    def signalled(run, step):
        if place == "step" and step == 3:
            os.kill(os.getpid(), number)
        return sgsd.train_step(run, step)

    def interrupted(*_):
        while True:  # an exception that strikes in a finalizer is lost: then once more, as a user
            os.kill(os.getpid(), number)
            time.sleep(0.2)

    def answered(writer, questions, times, stage):
        if writer.step == 3:
            os.kill(os.getpid(), number)
        return [(writer.reply(question.prompt), False) for question in questions]

    def before():  # in the forked process alone
        if place == "cold start":
            driver.FakeWriter.replies = interrupted
        if place == "bank's evolution":
            driver.FakeWriter.replies = answered

    code = go(flags(world_dir, out), log, signalled, before)
    if place != "cold start":
        said = f"stopped as asked; continue with: python baselines.py --resume {out}"
        assert code == 0 and said in log.read_text() and "Traceback" not in log.read_text()
        assert (out / "checkpoints/step_000003").is_dir() and len(rows(out / "metrics.jsonl")) == 3
    else:
        assert code == 130
        assert_one_line(log, f"driver: interrupted; {whole_files(out)}")
    resumed_equals(whole, world_dir, out, log)


def test_a_second_signal_ends_at_once_and_loses_at_most_this_step(world_dir, tmp_path, whole):
    """In step 3 of 6, where no checkpoint is due before step 6."""
    out, log = tmp_path / "run", tmp_path / "log"

    def impatient(run, step):
        result = sgsd.train_step(run, step) if step < 3 else None
        while step == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)  # signals of one instant count once
        return result

    assert go(flags(world_dir, out, checkpoint_every=6), log, impatient) == 130
    assert_one_line(log, f"driver: interrupted; {whole_files(out)}")
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step_000002"]
    resumed_equals(whole, world_dir, out, log)


def test_a_step_whose_weights_change_is_finished_whatever_comes(world_dir, tmp_path, whole):
    """More signals, while the optimizer changes the weights in step 3 of 6, stop it no sooner."""
    out, log = tmp_path / "run", tmp_path / "log"

    def impatient(run, step):
        change = run.optimizer.step

        def interrupted():
            change()
            for _ in range(5):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.3)

        run.optimizer.step = interrupted if step == 3 else change
        return sgsd.train_step(run, step)

    assert go(flags(world_dir, out, checkpoint_every=6), log, impatient) == 0
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step_000003"]
    resumed_equals(whole, world_dir, out, log)


@pytest.mark.parametrize("place", ["before", "in"])
def test_a_stop_does_not_wait_for_the_banks_evolution_which_comes_with_the_resumed_run(
    place, world_dir, tmp_path, whole
):
    """It is due after step 3. The first signal is enough before it begins, a second one in it."""
    out, log = tmp_path / "run", tmp_path / "log"

    def signalled(run, step):
        if place == "before" and step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return sgsd.train_step(run, step)

    def endless(writer, questions, times, stage):
        while writer.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
        return [(writer.reply(question.prompt), False) for question in questions]

    def before():  # in the forked process alone
        driver.FakeWriter.replies = endless

    assert go(flags(world_dir, out), log, signalled, before) == (0 if place == "before" else 130)
    assert rows(out / "metrics.jsonl")[-1]["step"] == 3
    assert (out / "checkpoints/step_000003").is_dir()
    assert not (out / "bank/step_000003.json").exists()
    resumed_equals(whole, world_dir, out, log)


@pytest.mark.parametrize("data,stopped", [("", False), ("data.jsonl", True)])
def test_a_stop_in_the_last_step_names_what_is_left_if_anything_is(
    data, stopped, world_dir, tmp_path, capsys
):
    changes = {"eval_data": data and str(world_dir / data), "allow_eval_overlap": True}
    run = make_run(world_dir, tmp_path / "run", updates=2, max_new_tokens=8, **changes)
    assert sgsd.train(run, stopping_at(2)) == 0
    said = capsys.readouterr().out
    assert run.stop == stopped == ("stopped as asked; only the evaluation is left" in said)


def whole_files(out):
    """What is said of a run that was broken off after its first files were written."""
    return f"all files of the run are whole: python baselines.py --resume {out} continues it"


def assert_one_line(log, *words):
    text = log.read_text()
    (said,) = [line for line in text.splitlines() if line.startswith("driver: ")]
    assert "Traceback" not in text, text[-3000:]
    for word in words:
        assert word in said, text[-3000:]


@pytest.mark.parametrize("size,name", [(16_384, ".jsonl"), (100_000, "step_000004")])
def test_a_full_disk_leaves_whole_files(size, name, world_dir, tmp_path, whole):
    """As full as one process can make it: from step 4 on no file may grow beyond `size` bytes."""
    out, log = tmp_path / "run", tmp_path / "log"

    def limited(run, step):
        if step == 4:
            most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
        return sgsd.train_step(run, step)

    assert go(flags(world_dir, out), log, limited) == 2
    assert_one_line(log, name, "too large")
    assert not list(out.rglob("*.tmp"))
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step_000002"]
    resumed_equals(whole, world_dir, out, log)


def drop_powers():
    """Root without its powers: the bits of a directory hold for it, too."""
    version, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert not ctypes.CDLL(None).capset(version, none)


def test_a_read_only_directory_is_one_line(world_dir, tmp_path):
    out, log = tmp_path / "run", tmp_path / "log"
    assert go(flags(world_dir, out, updates=2), log) == 0
    before = state(out)
    folders = {out: ["--resume", str(out)], tmp_path: flags(world_dir, tmp_path / "new")}
    for folder, argv in folders.items():
        log.write_text("")
        folder.chmod(0o555)
        code = go(argv, log, before=drop_powers)
        folder.chmod(0o755)
        assert code == 2
        assert_one_line(log, str(folder), "Permission denied")
    assert state(out) == before and not (tmp_path / "new").exists()


def two(argv, path, step_fn=None):
    """The exit codes of two ranks; what they say goes to path/log0 and path/log1."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    pids = []
    for rank in (0, 1):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        join = functools.partial(os.environ.update, place)
        pids.append(start(argv, path / f"log{rank}", step_fn, join))
    return [wait(pid) for pid in pids]


def test_resumed_on_another_world_size(world_dir, tmp_path, whole):
    """Stopped by one process and finished by two: the same bank and samples, up to rounding."""
    out = tmp_path / "run"
    assert go(flags(world_dir, out), tmp_path / "log", stopping_at(3)) == 0
    assert two(["--resume", str(out)], tmp_path) == [0, 0]
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


def killed_at_3(run, step):
    """A step function that kills rank 1 in step 3, but not after a restart."""
    if (step, run.world.rank) == (3, 1) and os.environ.get("TORCHELASTIC_RESTART_COUNT") != "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return sgsd.train_step(run, step)


def test_a_lost_rank_ends_the_other(world_dir, tmp_path):
    assert two(flags(world_dir, tmp_path / "run"), tmp_path, killed_at_3) == [1, -signal.SIGKILL]
    said = whole_files(tmp_path / "run")
    assert_one_line(tmp_path / "log0", "rank 0 lost another rank", said)
    assert len(rows(tmp_path / "run/metrics.jsonl")) == 2
    assert (tmp_path / "run/checkpoints/step_000002").is_dir()


@pytest.mark.parametrize("fault", ["a mistake", "a number that is not finite"])
def test_what_goes_wrong_on_one_rank_goes_for_both(fault, world_dir, tmp_path):
    """One line of a user's mistake; a skipped step, and after three in a row the end."""
    broken, out = breaking({1, 3, 4, 5}, rank=1), tmp_path / "run"

    def mistaken(run, step):
        if run.world.rank == 1:
            run.cfg = dataclasses.replace(run.cfg, max_prompt_tokens=150)  # few for a teacher
        return sgsd.train_step(run, step)

    argv = flags(world_dir, out, bank=world_dir / "bank.json")
    if fault == "a mistake":
        assert two(argv, tmp_path, mistaken) == [2, 2]
        assert_one_line(tmp_path / "log0", "teacher of p", "prompt has", "in step 1; --resume")
        assert "driver: " not in (tmp_path / "log1").read_text()
    else:
        assert two(argv, tmp_path, broken) == [1, 1]
        assert [m["skipped"] for m in rows(out / "metrics.jsonl")] == [1, 0, 1, 1, 1]
        assert (out / "checkpoints/step_000005").is_dir()
        assert "three steps in a row were not finite" in (tmp_path / "log0").read_text()


PROGRAM = f"""
import sys
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
import driver, distributed, test_faults
distributed.leave(driver.main(None, test_faults.killed_at_3))
"""


@pytest.mark.long
def test_torchrun_starts_a_run_again_that_lost_a_rank(world_dir, tmp_path, whole):
    (tmp_path / "program.py").write_text(PROGRAM)
    argv = flags(world_dir, tmp_path / "run")
    said = two_processes("--max-restarts=1", tmp_path / "program.py", *argv)
    assert said.count("parameters learn") == 2  # it was started twice
    ours = state(tmp_path / "run")
    assert [m["step"] for m in ours["metrics"]] == [1, 2, 3, 4, 5, 6]
    for name in whole[0]:  # memories lie in another order
        assert "bank/step" not in name or ours[name] == whole[0][name]


def test_a_restarted_command_resumes_its_own_run_only(world_dir, tmp_path, monkeypatch, capsys):
    argv = driver.flags(world_dir, tmp_path / "run", updates=1)
    assert sgsd.main(argv) == 0
    assert sgsd.main(argv) == 2
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert sgsd.main([*argv, "--seed=1"]) == 2
    assert "not empty" in capsys.readouterr().err
    assert sgsd.main(argv) == 0


@pytest.mark.parametrize("what", ["gradient", "student", "teacher"])
def test_numbers_that_are_not_finite_skip_the_step(what, world_dir, tmp_path):
    """Step 2 changes nothing and is counted, and the run goes on."""
    run = make_run(world_dir, tmp_path / "run", checkpoint_every=1, updates=3)
    assert sgsd.train(run, breaking({2}, what)) == 0
    assert [m["skipped"] for m in rows(run.out / "metrics.jsonl")] == [0, 1, 0]
    steps = [run.out / f"checkpoints/step_00000{i}" for i in (1, 2, 3)]
    one, two, three = [(path / "adapter_model.safetensors").read_bytes() for path in steps]
    assert one == two != three
    assert all(x.isfinite().all() for x in load_file(steps[2] / "trainer.safetensors").values())


def resources():
    """Resident KB, open files, threads and child processes of this process."""
    me = pathlib.Path("/proc/self")
    kb = int((me / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024
    threads = list((me / "task").iterdir())
    children = [child for task in threads for child in (task / "children").read_text().split()]
    return kb, len(os.listdir(me / "fd")), len(threads), len(children)


LONG = int(os.environ.get("LONG_UPDATES", 400))


@pytest.mark.parametrize("updates,kb", [(40, 600), pytest.param(LONG, 10, marks=pytest.mark.long)])
def test_a_run_stays_flat(updates, kb, world_dir, tmp_path):
    """Slopes per step after the warm-up, where the bank evolves every 10."""
    changes = {"updates": updates, "bank": "", "update_every": 10, "max_new_tokens": 6}
    changes |= {"batch_size": 2, "cold_start": 8, "checkpoint_every": 20, "audit_every": 0}
    changes["allow_empty_bank"] = True  # a random model is never right, so there is no skill
    run, seen = make_run(world_dir, tmp_path / "run", **changes), []
    run.verifier = rollout.Verifier()

    def step_fn(run, step):
        seen.append(resources())
        return sgsd.train_step(run, step)

    with run.verifier:
        assert sgsd.train(run, step_fn) == 0
    kept = np.array(seen[updates // 4 :], dtype=float)
    slopes = np.polyfit(np.arange(len(kept)), kept, 1)[0]
    print("slopes of KB, files, threads and processes:", slopes)
    assert abs(slopes[0]) < kb and (abs(slopes[1:]) < 1e-2).all(), slopes
