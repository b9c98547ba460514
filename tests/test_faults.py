"""Broken on purpose: kills at any instant, signals, full and read-only disks, lost ranks, numbers that are not finite (DESIGN 7, 9).

A run is forked from the test's process, so that one costs a second and not the imports; with `kill_at=n` it is killed by SIGKILL at
the n-th of its durable steps (fsync, rename).
"""

import contextlib
import ctypes
import json
import math
import os
import pathlib
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import tracemalloc

import driver
import numpy as np
import pytest
import torch
from conftest import ROOT
from safetensors.torch import load, load_file
from test_train import FakeReplies, make_run, rows, timeless, train
from tqdm import tqdm

import distributed as D
import rollout as R
import runlog
import sgsd


def flags(world_dir, out, **changes):
    settings = dict(
        model=world_dir / "model",
        data=world_dir / "data.jsonl",
        bank="",
        encoder=world_dir / "encoder",
        out=out,
        num_teachers=3,
        batch_size=4,
        max_new_tokens=12,
        updates=6,
        checkpoint_every=2,
        audit_every=2,
        lora_rank=4,
        lora_alpha=8,
        eps_a=0.2,
        learning_rate=1e-2,
        cold_start=8,
        update_every=3,
        max_new_items=2,
        keep_rollouts=3,
        device="cpu",
    )
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
        tqdm.set_lock(
            threading.RLock()
        )  # tqdm's own is shared by forked processes: one killed while it holds it would stop the next
        R.make_complete, R.Verifier = FakeReplies, driver.CoinVerifier
        durable(kill_at, log)
        before()
        code = sgsd.main(argv)
    except BaseException:
        traceback.print_exc()
    finally:  # never back into the tests
        with contextlib.suppress(BaseException):
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
    return go(
        ["--resume", str(out)] if (out / "config.json").exists() else flags(world_dir, out),
        log,
        **kw,
    )


def state(out):
    """All that must be equal: adapter and optimizer, every version of the bank, memories, logs; metrics without times and memory."""
    last = max((out / "checkpoints").glob("step_*"))
    files = [
        *last.glob("*.safetensors"),
        *out.glob("bank/*.json*"),
        out / "rollouts.jsonl",
        out / "tokens.jsonl",
        *out.glob("ledger.json"),
        *last.glob("ledger.json"),
    ]
    return {str(f.relative_to(out)): f.read_bytes() for f in files} | {
        "metrics": timeless(rows(out / "metrics.jsonl"))
    }


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
    assert {
        "bank/step_000000.json",
        "bank/step_000003.json",
        "bank/step_000006.json",
        "bank/memories.jsonl",
        "bank/replies.jsonl",
    } <= {*files}
    assert {row["step"] for row in map(json.loads, files["rollouts.jsonl"].splitlines())} == {
        4,
        5,
        6,
    }  # --keep-rollouts 3
    assert (
        len(files["metrics"]) == 6
        and any(m["replies_read"] for m in files["metrics"])
        and steps > 100
    )


def killed_and_resumed(world_dir, tmp_path, whole, *, kill_at=0, after=0.0, tear=False):
    tmp_path.mkdir(exist_ok=True)
    out, log = tmp_path / "run", tmp_path / "log"
    pid = start(flags(world_dir, out), log, kill_at=kill_at)
    if after:
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
    killed = (code := wait(pid)) == -signal.SIGKILL
    assert killed or (after and code == 0)  # a random instant may come after the end
    for file in out.rglob("*.jsonl") if tear else ():
        if (
            file.name != "memories.jsonl" or not (out / "bank/step_000000.json").exists()
        ):  # once there is a bank, nothing is written there
            with open(file, "ab") as f:
                f.write(b'{"step": 1, "kind": "torn \xc3')
    assert resume(world_dir, out, log) == 0, log.read_text()
    for name, content in state(out).items():
        assert content == whole[0][name], name
    assert not list(out.rglob("*.tmp"))
    assert all(D.read_jsonl(f) for f in out.rglob("*.jsonl"))  # every line of every log can be read
    return killed


@pytest.mark.parametrize("share", [0.005, 0.04, 0.25, 0.45, 0.75, 0.97])
def test_killed_at_a_durable_step(share, world_dir, tmp_path, whole):
    """From before config.json, through cold start, bank versions and checkpoints, to the last one."""
    killed_and_resumed(
        world_dir, tmp_path, whole, kill_at=1 + int(share * whole[1]), tear=share > 0.04
    )


@pytest.mark.long
def test_killed_at_every_durable_step(world_dir, tmp_path, whole):
    for n in range(1, whole[1] + 1):
        killed_and_resumed(world_dir, tmp_path / str(n), whole, kill_at=n, tear=n % 2)


@pytest.mark.long
def test_killed_at_40_random_instants(world_dir, tmp_path, whole):
    draw = random.Random(7)
    killed = sum(
        killed_and_resumed(world_dir, tmp_path / str(n), whole, after=draw.uniform(0, whole[2]))
        for n in range(45)
    )
    print(f"{killed} of 45 killed before their end")
    assert killed >= 40


# ------------------------------------------------------------------------------------------------ signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_update_and_the_run_can_go_on(number, world_dir, tmp_path, whole):
    out, log = tmp_path / "run", tmp_path / "log"

    def before():
        keep = sgsd.update
        sgsd.update = lambda run, step: (
            os.kill(os.getpid(), number) if step == 3 else None,
            keep(run, step),
        )[1]

    assert go(flags(world_dir, out), log, before=before) == 0
    assert (
        f"stopped as asked; go on with: python sgsd.py --resume {out}" in log.read_text()
        and "Traceback" not in log.read_text()
    )
    assert (out / "checkpoints/step_000003").is_dir() and len(rows(out / "metrics.jsonl")) == 3
    assert resume(world_dir, out, log) == 0 and state(out) == whole[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_cold_start(number, world_dir, tmp_path, whole):
    out, log = tmp_path / "run", tmp_path / "log"

    def before():
        def interrupted(self, prompts):
            while True:  # an exception that strikes inside a finalizer is lost: then as a user would, once more
                os.kill(os.getpid(), number)
                time.sleep(0.2)

        FakeReplies.__call__ = interrupted

    assert go(flags(world_dir, out), log, before=before) == 130
    assert (
        f"sgsd: interrupted; go on with: python sgsd.py --resume {out}\n" in log.read_text()
        and "Traceback" not in log.read_text()
    )
    assert resume(world_dir, out, log) == 0 and state(out) == whole[0]


# ------------------------------------------------------------------------------------------------ disks


def one_line(log, *words):
    said = [line for line in log.read_text().splitlines() if line.startswith("sgsd: ")]
    assert (
        len(said) == 1 and all(w in said[0] for w in words) and "Traceback" not in log.read_text()
    ), log.read_text()[-3000:]


def limit_files(size):
    """A disk that is full, as far as a process can make one: no file may grow beyond `size` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


FULL = {
    "log": (runlog, "summarize", 4, ".jsonl"),
    "checkpoint": (sgsd, "save_checkpoint", 2, "step_000004"),
}  # (function, which call of it, what is named)


@pytest.mark.parametrize("place", FULL)
def test_a_full_disk(place, world_dir, tmp_path, whole):
    out, log = tmp_path / "run", tmp_path / "log"
    module, name, nth, words = FULL[place]

    def before():
        keep, calls = getattr(module, name), []
        setattr(
            module,
            name,
            lambda *args: (
                calls.append(1),
                limit_files(16_384) if len(calls) == nth else None,
                keep(*args),
            )[2],
        )

    assert go(flags(world_dir, out), log, before=before) == 2
    one_line(log, words, "too large")
    assert not list(out.rglob("*.tmp"))
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["step_000002"]
    assert resume(world_dir, out, log) == 0 and state(out) == whole[0]


def small_disk(folder):
    """A file system of 300 KB over `folder`, for this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x20000) or libc.mount(
        b"none", b"/", None, 1 << 14 | 1 << 18, None
    ):  # CLONE_NEWNS; MS_REC | MS_PRIVATE
        os._exit(77)
    if libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, b"size=300k"):
        os._exit(77)


def test_a_disk_that_is_full_for_real(world_dir, tmp_path):
    out, log = tmp_path / "disk" / "run", tmp_path / "log"
    out.parent.mkdir()

    def before():
        small_disk(out.parent)
        keep = D.command
        D.command = lambda *args: (
            keep(*args),
            print("checkpoints", sorted(os.listdir(out / "checkpoints"))),
        )[0]

    code = go(flags(world_dir, out, checkpoint_every=1, updates=50), log, before=before)
    if code == 77:
        pytest.skip("mounting is not allowed here")
    assert code == 2
    one_line(log, "run/", "No space left on device")
    assert "checkpoints ['step_000001'" in log.read_text()


def drop_powers():
    """Root without its powers: the bits of a directory hold for it too."""
    libc = ctypes.CDLL(None)
    assert not libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())


@pytest.mark.parametrize("there", [False, True])
def test_a_read_only_directory(there, world_dir, tmp_path, whole):
    out, log = tmp_path / "run", tmp_path / "log"
    if there:
        assert go(flags(world_dir, out), log) == 0
    folder = out if there else tmp_path
    argv = ["--resume", str(out)] if there else flags(world_dir, out)
    log.write_text("")
    folder.chmod(0o555)
    try:
        assert go(argv, log, before=drop_powers) == 2
    finally:
        folder.chmod(0o755)
    one_line(log, str(out), "Permission denied")
    assert state(out) == whole[0] if there else not out.exists()


# ------------------------------------------------------------------------------------------------ ranks


def start_two(argv, log, **kw):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        start(argv, f"{log}{rank}", env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}, **kw)
        for rank in (0, 1)
    ]


def test_resumed_on_another_world_size(world_dir, tmp_path, whole):
    """Stopped after update 3 by one process, finished by two: the same up to rounding, and the same bank and samples."""
    out, log = tmp_path / "run", tmp_path / "log"

    def before():
        keep = sgsd.update
        sgsd.update = lambda run, step: (setattr(run, "stop", step == 3), keep(run, step))[1]

    assert go(flags(world_dir, out), log, before=before) == 0
    assert [wait(pid) for pid in start_two(["--resume", str(out)], log)] == [0, 0], pathlib.Path(
        f"{log}0"
    ).read_text()[-3000:]
    ours, theirs = state(out), whole[0]
    for name in theirs:
        if name.startswith("bank/"):
            assert ours[name] == theirs[name], name
    for a, b in zip(
        D.read_jsonl(out / "rollouts.jsonl"),
        map(json.loads, theirs["rollouts.jsonl"].decode().splitlines()),
        strict=True,
    ):
        assert a["completion_ids"] == b["completion_ids"] and a["rho"] == b["rho"]
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)
    name = "checkpoints/step_000006/adapter_model.safetensors"
    mine, other = load(ours[name]), load(theirs[name])
    for k in mine:
        torch.testing.assert_close(mine[k], other[k], atol=1e-4, rtol=1e-2)


def test_a_lost_rank_ends_the_other(world_dir, tmp_path):
    """One of two killed in update 3: the other ends within seconds with one line, and the run goes on from its checkpoint."""
    out, log = tmp_path / "run", tmp_path / "log"

    def before():
        keep = sgsd.update
        die = lambda run, step: (
            os.kill(os.getpid(), signal.SIGKILL) if (step, run.world.rank) == (3, 1) else None
        )  # noqa: E731
        sgsd.update = lambda run, step: (die(run, step), keep(run, step))[1]

    first, second = start_two(flags(world_dir, out), log, before=before)
    assert wait(second) == -signal.SIGKILL
    began = time.monotonic()
    assert wait(first) == 1 and time.monotonic() - began < 20
    one_line(pathlib.Path(f"{log}0"), "lost another rank", "--resume")
    assert (out / "checkpoints/step_000002").is_dir() and len(rows(out / "metrics.jsonl")) == 2


@pytest.mark.long
def test_torchrun_names_the_lost_rank_and_starts_again(world_dir, tmp_path, whole):
    """`torchrun --max-restarts 1`: rank 1 is killed in update 3 of the first start; the second goes on from update 2."""
    out = tmp_path / "run"
    (tmp_path / "program.py").write_text(f"""
import os, signal, sys
sys.path[:0] = [{str(ROOT / "tests")!r}]
import driver, sgsd, rollout
from test_train import FakeReplies
rollout.Verifier, rollout.make_complete, keep = driver.CoinVerifier, FakeReplies, sgsd.update
def update(run, step):
    if (step, run.world.rank, os.environ["TORCHELASTIC_RESTART_COUNT"]) == (3, 1, "0"):
        os.kill(os.getpid(), signal.SIGKILL)
    return keep(run, step)
sgsd.update = update
sgsd.D.leave(sgsd.main())
""")
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "--max-restarts",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    fails = subprocess.run(
        [*launch, "0", tmp_path / "program.py", *flags(world_dir, tmp_path / "fails")],
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
    )
    assert (
        fails.returncode == 1
        and "rank      : 1" in fails.stderr
        and "Signal 9 (SIGKILL)" in fails.stderr
    ), fails.stderr[-3000:]
    run = subprocess.run(
        [*launch, "1", tmp_path / "program.py", *flags(world_dir, out)],
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
    )
    assert run.returncode == 0 and "saved" in run.stdout, run.stderr[-3000:]
    assert [m["step"] for m in rows(out / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    banks = [
        {k: v for k, v in x.items() if k.startswith("bank/step")} for x in (state(out), whole[0])
    ]  # memories lie in another order
    assert banks[0] == banks[1]


def test_a_restarted_command_resumes_its_own_run_only(world_dir, tmp_path, monkeypatch, capsys):
    argv = flags(world_dir, tmp_path / "run", bank=world_dir / "bank.json", updates=1)
    assert sgsd.main(argv) == 0
    assert sgsd.main(argv) == 2
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert sgsd.main([*argv, "--seed=1"]) == 2 and "not empty" in capsys.readouterr().err
    assert sgsd.main(argv) == 0


# ------------------------------------------------------------------------------------------------ numbers


def break_numbers(what, steps, rank=0):
    """Makes something not finite, on one rank, in these updates."""
    now = {"on": False}
    learn, loss, score, push = sgsd.accumulate, sgsd.sgsd_loss, R.token_logprobs, sgsd.update

    def accumulate(run, step):
        now["on"] = step in steps and run.world.rank == rank
        return learn(run, step)

    def update(run, step):
        if now["on"] and what == "gradient":
            next(iter(run.params.values())).grad[0, 0] = math.inf
        return push(run, step)

    def token_logprobs(model, *args, grad=False, **kw):
        norm = R.causal_lm(model).base_model.norm
        bad = {"student's logit": grad, "teacher's logit": not grad}.get(what, False) and now["on"]
        handle = norm.register_forward_hook(
            lambda _, args, x: (
                x.index_fill(1, torch.tensor([x.shape[1] - 3]), math.nan) if bad else x
            )
        )
        try:
            return score(model, *args, grad=grad, **kw)
        finally:
            handle.remove()

    sgsd.accumulate, sgsd.update, R.token_logprobs = accumulate, update, token_logprobs
    if what in ("nan loss", "infinite loss"):
        wrong = math.nan if what == "nan loss" else math.inf
        sgsd.sgsd_loss = lambda *args: loss(*args) + (wrong if now["on"] else 0.0)


NUMBERS = ["nan loss", "infinite loss", "gradient", "student's logit", "teacher's logit"]


@pytest.mark.parametrize("what", NUMBERS)
def test_numbers_that_are_not_finite_skip_the_update(what, world_dir, tmp_path):
    """Update 2 changes nothing and is counted; the run goes on."""
    out, log = tmp_path / "run", tmp_path / "log"
    assert (
        go(
            flags(world_dir, out, checkpoint_every=1, updates=3),
            log,
            before=lambda: break_numbers(what, (2,)),
        )
        == 0
    ), log.read_text()[-3000:]
    assert [m["skipped"] for m in rows(out / "metrics.jsonl")] == [0, 1, 0]
    one, two, three = [
        (out / f"checkpoints/step_00000{i}/adapter_model.safetensors").read_bytes()
        for i in (1, 2, 3)
    ]
    assert one == two != three and all(
        t.isfinite().all()
        for t in load_file(out / "checkpoints/step_000003/trainer.safetensors").values()
    )


def test_ranks_skip_together(world_dir, tmp_path):
    """Not finite on rank 1 alone: both skip; three in a row end both with a checkpoint and exit code 1."""
    out, log = tmp_path / "run", tmp_path / "log"
    pids = start_two(
        flags(world_dir, out),
        log,
        before=lambda: break_numbers("infinite loss", (1, 3, 4, 5), rank=1),
    )
    assert [wait(pid) for pid in pids] == [1, 1]
    assert [m["skipped"] for m in rows(out / "metrics.jsonl")] == [1, 0, 1, 1, 1] and (
        out / "checkpoints/step_000005"
    ).is_dir()
    assert (
        "three updates in a row were not finite; go on with" in pathlib.Path(f"{log}0").read_text()
    )


@pytest.mark.parametrize("completion", [[265], [256, 257, 265]])
def test_completions_without_a_reasoning_token(completion, world_dir, tmp_path, monkeypatch):
    """Empty (the stop id alone), or nothing that the mask leaves: r = -1, rho = 0, loss 0, a gradient of 0."""
    run = make_run(world_dir, tmp_path / "run")
    monkeypatch.setattr(
        R, "generate", lambda model, tok, prompts, *rest: [completion] * len(prompts)
    )
    run.verifier = R.Verifier()
    records, _ = sgsd.accumulate(run, 1)
    assert {(r["r"], r["pred"]) for r in records} == {(-1, None)} and all(
        math.isfinite(x) for r in records for x in r["a"] + r["losses"]
    )
    assert (
        all(r["rho"] == [0] * 3 and r["loss"] == 0 and r["unmasked"] == 0 for r in records)
        and sgsd.update(run, 1) == 0.0
    )
    m = runlog.summarize(1, records, 0.0, 0.0, {"gen": 0, "score": 0, "bwd": 0}, 0.0)
    assert all(
        math.isfinite(v) for v in m.values() if isinstance(v, float)
    ) and "nan" not in runlog.log_line(m, 1)


def test_a_batch_in_which_every_teacher_is_unsure(world_dir, tmp_path):
    run = train(world_dir, tmp_path / "run", eps_a=1e9)
    metrics = rows(tmp_path / "run/metrics.jsonl")
    assert all(
        m["rho_ignored"] == 12 and m["loss"] == 0 and m["grad_norm"] == 0 and not m["skipped"]
        for m in metrics
    )
    assert not any(p.any() for name, p in run.params.items() if "lora_B" in name)


def test_a_bank_that_is_empty_from_cold_start_to_the_end(world_dir, tmp_path, capsys):
    """A random model's replies cannot be read: no teachers, no loss, counted; the run says so and ends well."""
    train(
        world_dir,
        tmp_path / "run",
        bank="",
        cold_start=4,
        update_every=2,
        reply_tokens=8,
        max_new_tokens=8,
    )
    assert "one of its lists is empty" in capsys.readouterr().out
    metrics = rows(tmp_path / "run/metrics.jsonl")
    assert [m["no_teachers"] for m in metrics] == [4] * 4 and [
        m["bank_skills"] for m in metrics
    ] == [0] * 4
    assert metrics[1]["replies_lost"] > 0 and all(
        m["loss"] == 0 and m["grad_norm"] == 0 for m in metrics
    )


# ------------------------------------------------------------------------------------------------ long runs


def slope(values):
    """Least squares per update, over the second three quarters: after warm-up."""
    kept = np.array(values[len(values) // 4 :], dtype=float)
    return float(np.polyfit(np.arange(len(kept)), kept, 1)[0])


def watch(updates, world_dir, tmp_path):
    """Slopes per update of resident KB, Python's own KB, open files, threads, child processes and CPU seconds, with bank updates every 25."""
    out, log, seen = tmp_path / "run", tmp_path / "log", tmp_path / "seen"

    def before():
        keep, last, me = sgsd.update, [time.process_time()], pathlib.Path("/proc/self")

        def update(run, step):
            norm, now = keep(run, step), time.process_time()
            kb = int((me / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024
            children = (me / f"task/{os.getpid()}/children").read_text().split()
            python_kb = (
                tracemalloc.get_traced_memory()[0] / 1024
            )  # 0 unless PYTHONTRACEMALLOC is set
            row = [
                kb,
                python_kb,
                len(os.listdir("/proc/self/fd")),
                len(os.listdir("/proc/self/task")),
                len(children),
                now - last[0],
            ]
            last[0] = now
            with open(seen, "a") as f:
                f.write(" ".join(map(str, row)) + "\n")
            return norm

        sgsd.update = update

    argv = flags(
        world_dir,
        out,
        updates=updates,
        update_every=25,
        keep_rollouts=50,
        checkpoint_every=50,
        audit_every=0,
        max_new_tokens=6,
        batch_size=2,
    )
    assert wait(start(argv, log, before=before), 3000) == 0, log.read_text()[-3000:]
    columns = np.loadtxt(seen).T
    return {
        name: (slope(column), float(np.median(column)))
        for name, column in zip(
            ("kb", "python_kb", "files", "threads", "processes", "seconds"), columns
        )
    }


def check_flat(figures, kb):
    assert abs(figures["kb"][0]) < kb and all(
        abs(figures[k][0]) < 1e-3 for k in ("files", "threads", "processes")
    ), figures


def test_a_run_stays_flat(world_dir, tmp_path):
    check_flat(watch(60, world_dir, tmp_path), kb=400)


@pytest.mark.long
def test_a_long_run_stays_flat(world_dir, tmp_path):
    figures = watch(updates := int(os.environ.get("LONG_UPDATES", 2000)), world_dir, tmp_path)
    print(figures)
    check_flat(figures, kb=10)
    assert abs(figures["seconds"][0]) * updates < 0.5 * figures["seconds"][1], (
        figures
    )  # over the whole run less than half a step's time
