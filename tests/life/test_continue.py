"""The same command continues a run: after a kill at any place, and with each kind of change.

A run here saves after steps 2, 3, 4 and 6; its bank is made first and evolves after 3 and 6. The
one that most tests continue was killed in step 6: five steps are in its logs, and the last
checkpoint is that of step 4.
"""

import dataclasses
import functools
import itertools
import json
import os
import shutil
import signal
import sys
import time

import driver
import pytest
import torch
from conftest import ROOT
from driver import contents, go, killing, refused, rows, small_flags, start, state, two, wait
from safetensors.torch import load

import sgsd
import skills
from lib import config, files, model, run, runlog
from lib.run import Run
from skills import SkillBank


def kill(argv, log, *place):
    """A run that is killed at a place of `driver.killing`."""
    assert go(argv, log, before=killing(*place)) == -signal.SIGKILL, log.read_text()[-3000:]
    log.unlink()


@pytest.fixture(scope="module")
def killed_once(world_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("killed")
    kill(small_flags(world_dir, path / "run"), path / "log", sgsd, "optimizer_step", 6)
    return path / "run"


@pytest.fixture
def killed(killed_once, tmp_path):
    """A copy of the run that was killed in step 6."""
    return shutil.copytree(killed_once, tmp_path / "run")


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


def assert_equal(out, other):
    """Two runs are equal byte for byte, up to times and memory in the metrics."""
    ours, theirs = state(out), state(other)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert ours[name] == theirs[name], name
    assert not list(out.rglob("*.tmp"))


def stored(out):
    return json.loads((out / "config.json").read_text())


# ------------------------------------------------------------------------------------------ kills

KILLS = [  # where; the function that kills there, at which call, whether after it; what was said
    ("among the seed solutions", files, "append_jsonl", 2, False, ""),
    ("among the replies of the cold start", Run, "log_reply", 5, False, "starts with step 1"),
    ("before the first bank has its version", SkillBank, "save", 2, False, "starts with step 1"),
    ("in step 1", sgsd, "optimizer_step", 1, False, "starts with step 1"),
    ("after step 1, which has no checkpoint", runlog, "log_line", 1, True, "starts with step 1"),
    ("within the checkpoint of step 2", model, "save", 1, True, "starts with step 1"),
    ("in step 3", sgsd, "optimizer_step", 3, False, "starts with step 1"),
    ("between the checkpoint of step 3 and its evolution", skills, "evolve", 1, False, "step 2"),
    ("in the evolution after step 3", skills, "merge", 1, False, "step 3"),
    ("before the evolved bank has its version", SkillBank, "save", 2, False, "step 3"),
    ("between the logs of step 4 and its checkpoint", runlog, "log_line", 1, True, "step 3"),
    ("in step 6", sgsd, "optimizer_step", 3, False, "step 3"),
    ("in the last evolution, when all steps are done", Run, "save_bank", 1, False, "step 4"),
]


def test_a_run_that_is_killed_everywhere_and_continued_equals_the_uninterrupted_one(
    world_dir, tmp_path, uninterrupted
):
    out = tmp_path / "run"
    argv = small_flags(world_dir, out)
    for number, (where, owner, name, call, after, words) in enumerate(KILLS):
        log = tmp_path / f"log{number}"
        code = go(argv, log, before=killing(owner, name, call, after))
        assert code == -signal.SIGKILL and words in log.read_text(), f"{where}: {log.read_text()}"
        assert_is_a_part(out, uninterrupted, where)
        for file in out.glob("*.jsonl"):  # as a kill within a write leaves it
            with open(file, "ab") as f:
                f.write(b'{"step": 1, "kind": "torn \xc3')
    assert go(argv, tmp_path / "log") == 0
    assert "continues after step 6\n" in (tmp_path / "log").read_text()
    assert_equal(out, uninterrupted)
    steps = [int(words[5:]) for *_, words in KILLS if words.startswith("step ")]
    assert [x["step"] for x in stored(out)["continuations"]] == [*steps, 6]


def assert_is_a_part(out, whole, where):
    """What a kill has left is a part of the whole run."""
    for name, content in contents(out).items():
        if name.endswith(".jsonl") and name != "metrics.jsonl":  # which has times
            assert (whole / name).read_bytes().startswith(content), f"{where}: {name}"
        elif ".tmp" not in name and ("bank/step" in name or name.endswith(".safetensors")):
            assert (whole / name).read_bytes() == content, f"{where}: {name}"


@pytest.mark.long
def test_a_kill_at_any_touch_of_a_file_is_as_good_as_none(world_dir, tmp_path, uninterrupted):
    """Before every eighth time that the run opens, makes, renames or removes something."""
    for n in itertools.count(1, 8):
        out, log = tmp_path / str(n), tmp_path / f"log{n}"
        argv = small_flags(world_dir, out)
        code = go(argv, log, before=killing_at_touch(out, n))
        if code == 0:
            break
        assert code == -signal.SIGKILL and go(argv, log) == 0, log.read_text()[-3000:]
        assert_equal(out, uninterrupted)
    assert n > 100


def killing_at_touch(out, n):
    """For `before`: the process is killed before it touches a file of the run for the n-th time."""
    touches = itertools.count(1)

    def watch(event, args):
        is_touch = event in ("open", "os.mkdir", "os.rename", "os.remove")
        if is_touch and str(args[0]).startswith(str(out)) and next(touches) == n:
            os.kill(os.getpid(), signal.SIGKILL)

    return lambda: sys.addaudithook(watch)


# --------------------------------------------------------- nothing is left to do, or no step yet


def test_a_complete_run_says_so_and_stays_as_it_is(world_dir, uninterrupted, tmp_path, log):
    out = shutil.copytree(uninterrupted, tmp_path / "run")
    assert go(small_flags(world_dir, out), log) == 0
    assert f"{out}: complete" in log.read_text() and contents(out) == contents(uninterrupted)


def test_a_bank_that_was_made_alone_is_used_by_the_steps_that_follow(
    world_dir, tmp_path, uninterrupted, log
):
    """`--steps 0` and then all steps, whose other gate does not make the bank."""
    out = tmp_path / "run"
    argv = small_flags(world_dir, out, steps=0, tau_g=2.0)
    assert go(argv, log) == 0
    made = contents(out / "bank")
    assert made.keys() == {"bank.json", "step_000000.json", "memories.jsonl", "replies.jsonl"}
    assert go(argv, log) == 0 and f"{out}: complete" in log.read_text()
    written = (out / "bank/memories.jsonl").stat().st_mtime_ns
    assert go(small_flags(world_dir, out), log) == 0
    assert (out / "bank/memories.jsonl").stat().st_mtime_ns == written
    assert_equal(out, uninterrupted)
    assert stored(out)["settings"]["tau_g"] == 1.0


def test_a_bank_that_something_else_has_made_is_made_again_and_that_is_said(
    world_dir, tmp_path, uninterrupted, log
):
    """Before the first step a setting, the code or the problems may change."""
    out = tmp_path / "run"
    assert go(small_flags(world_dir, out, steps=0, cold_start=5), log) == 0
    assert len(rows(out / "bank/memories.jsonl")) == 5
    argv = small_flags(world_dir, out, steps=0)
    for changed in ("--cold-start", "code", "problems"):
        if changed != "--cold-start":
            values = stored(out) | {changed: {}}
            (out / "config.json").write_text(json.dumps(values))
            (out / "bank/memories.jsonl").write_text("old")
        assert go(argv, log) == 0
        (line,) = [x for x in log.read_text().splitlines() if "bank is made again" in x]
        assert changed in line
        for name in ("memories.jsonl", "step_000000.json"):
            ours, theirs = (folder / "bank" / name for folder in (out, uninterrupted))
            assert ours.read_bytes() == theirs.read_bytes(), (changed, name)
        log.unlink()
    assert {*run.MAKES_BANK} <= {f.name for f in dataclasses.fields(config.Config)}


# ------------------------------------------------------------------- what may change, and what not

AGAIN = {"device", "rollout_rows", "score_tokens", "checkpoint_above", "checkpoint_every"}
AGAIN |= {"audit_every", "report_to", "changed_code", "steps", "server"}


def other(f, value):
    """Another value of a setting."""
    if f.metadata["choices"]:
        return next(x for x in f.metadata["choices"] if x != value)
    if isinstance(value, bool):
        return not value
    return f"other_{f.name}" if isinstance(value, str) else value + 1


def flag(name, value):
    if isinstance(value, bool):
        return config.flag(name if value else f"no_{name}")
    return f"{config.flag(name)}={value}"


def test_every_setting_that_changes_more_than_rounding_is_refused(
    world_dir, killed, tmp_path, capsys
):
    """In one line: the setting, the new value, the run's own. Nothing on disk changes."""
    argv, before = small_flags(world_dir, killed), contents(killed)
    cfg = config.parse(argv, "", config.Config)
    shutil.copy(world_dir / "data.jsonl", tmp_path)
    values = {"data": tmp_path / "data.jsonl", "verifier": "driver:Exact", "top_p": 0.5}
    tried = set()
    for f in dataclasses.fields(cfg):
        if f.metadata["again"] == "refused" and f.name not in ("out", "answer_after"):
            value = getattr(cfg, f.name)
            new = values.get(f.name) or other(f, value)
            words = config.flag(f.name), str(new), str(value)
            refused(capsys, driver.main, [*argv, flag(f.name, new)], *words)
            tried.add(f.name)
    names = {f.name for f in dataclasses.fields(cfg)}
    assert tried == names - AGAIN - {"out", "answer_after"}
    assert contents(killed) == before


def test_what_changes_only_rounding_may_change_quietly(world_dir, killed, uninterrupted, log):
    changes = {"checkpoint_every": 5, "rollout_rows": 1, "score_tokens": 500, "audit_every": 0}
    argv = small_flags(world_dir, killed, **changes, checkpoint_above=0)
    assert go(argv, log) == 0 and "changed:" not in log.read_text()
    (continuation,) = stored(killed)["continuations"]
    assert continuation["step"] == 4 and continuation["changed"] == []
    assert {row["step"] for row in rows(killed / "tokens.jsonl")} == {1, 2, 4}
    ours, theirs = (rows(out / "rollouts.jsonl") for out in (killed, uninterrupted))
    assert [x["completion_ids"] for x in ours] == [x["completion_ids"] for x in theirs]


def test_another_number_of_steps_is_announced_with_its_learning_rate_and_recorded(
    world_dir, killed, log, capsys
):
    first = stored(killed)
    for steps, rate in ((8, "0.005"), (9, "0.0011")):  # 1e-2 (1 - 4/8) at 5, 1e-2 (1 - 8/9) at 9
        assert go(small_flags(world_dir, killed, steps=steps), log) == 0
        lines = [line for line in log.read_text().splitlines() if line.startswith("changed: ")]
        assert f"--steps {steps}" in lines[-2] and rate in lines[-1]
    last = stored(killed)
    assert [x["step"] for x in last["continuations"]] == [4, 8]
    for continuation, steps in zip(last["continuations"], (8, 9)):
        assert f"--steps {steps}" in continuation["changed"][0]
        assert {"when", "command", "commit", "versions"} <= continuation.keys()
    assert last["settings"] == first["settings"] | {"steps": 9, "out": str(killed)}
    assert (last["id"], last["command"]) == (first["id"], first["command"])
    rates = [m["learning_rate"] for m in rows(killed / "metrics.jsonl")]
    assert rates[4:] == pytest.approx([5e-3, 3.75e-3, 2.5e-3, 1.25e-3, 1e-2 / 9])
    refused(capsys, driver.main, small_flags(world_dir, killed, steps=8), "--steps 8", "step 9")


def test_two_processes_continue_the_run_of_one(world_dir, killed, uninterrupted, tmp_path):
    """That is said and recorded: the bank and the samples are the same, numbers up to rounding."""
    assert two(small_flags(world_dir, killed), tmp_path) == [0, 0]
    assert "changed: 2 processes" in (tmp_path / "log0").read_text()
    assert len(stored(killed)["continuations"][0]["changed"]) == 1
    ours, theirs = state(killed), state(uninterrupted)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert not name.startswith("bank/") or ours[name] == theirs[name], name
    logs = [map(json.loads, x["rollouts.jsonl"].splitlines()) for x in (ours, theirs)]
    for a, b in zip(*logs, strict=True):
        assert (a["completion_ids"], a["rho"]) == (b["completion_ids"], b["rho"])
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)
    last = "checkpoints/step_000006/adapter_model.safetensors"
    torch.testing.assert_close(load(ours[last]), load(theirs[last]), atol=1e-4, rtol=1e-2)


OWN_JUDGE = "import driver\n\n\nclass Judge(driver.CoinVerifier):\n    pass\n"


def test_changed_code_needs_a_flag_once_and_changed_problems_another_directory(
    world_dir, tmp_path, monkeypatch, capsys, log
):
    monkeypatch.syspath_prepend(tmp_path)
    judge, data, out = tmp_path / "own_judge.py", tmp_path / "data.jsonl", tmp_path / "run"
    judge.write_text(OWN_JUDGE)
    shutil.copy(world_dir / "data.jsonl", data)
    argv = small_flags(world_dir, out, steps=3, data=data, verifier="own_judge:Judge")
    kill(argv, log, sgsd, "optimizer_step", 3)
    before, problems = contents(out), data.read_text()
    data.write_text(problems.replace('"answer": "3"', '"answer": "4"'))
    refused(capsys, driver.main, argv, str(out), "--data")
    data.write_text(problems)
    judge.write_text(OWN_JUDGE + "# edited\n")
    refused(capsys, driver.main, argv, str(out), "own_judge.py", "--changed-code")
    assert contents(out) == before
    kill([*argv, "--changed-code"], log, sgsd, "optimizer_step", 1)
    assert ["own_judge.py" in line for line in stored(out)["continuations"][0]["changed"]] == [True]
    assert go(argv, log) == 0 and stored(out)["continuations"][1]["changed"] == []


def test_a_run_knows_the_code_by_its_content_wherever_the_project_lies(killed_once):
    names = stored(killed_once)["code"].keys()
    assert {"sgsd.py", "skills.py", "lib/run.py", "prompts/teacher.txt", "tests/driver.py"} <= names
    assert all((ROOT / name).is_file() for name in names)


# ------------------------------------------------------------------------- what is gone, or foreign

PARTS = ["checkpoints", "bank/step_000003.json", "rollouts.jsonl", "metrics.jsonl"]


@pytest.mark.parametrize("name", PARTS)
def test_a_run_that_has_lost_a_part_is_refused_by_its_name(name, world_dir, killed, capsys):
    gone = killed / name
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    before = contents(killed)
    refused(capsys, driver.main, small_flags(world_dir, killed), str(killed), name)
    assert contents(killed) == before


def test_a_run_without_a_bank_may_lose_all_steps_before_its_first_checkpoint(
    world_dir, tmp_path, log
):
    """GRPO has no evolution, before which SGSD saves."""
    changes = {"generations": 2, "steps": 4, "checkpoint_every": 4}
    argv = ["grpo"] + small_flags(world_dir, tmp_path / "run", evolve_every=1, **changes)
    kill(argv, log, sgsd, "optimizer_step", 3)
    assert go(argv, log) == 0, log.read_text()
    assert driver.steps_of(tmp_path / "run") == ([1, 2, 3, 4], [4])


def test_another_programs_run_and_a_folder_or_file_that_is_no_run_are_refused(
    world_dir, killed, tmp_path, capsys
):
    argv = ["ablations", *small_flags(world_dir, killed)]
    refused(capsys, driver.main, argv, str(killed), "sgsd.py", "methods.ablations")
    (killed / "config.json").unlink()
    refused(capsys, driver.main, small_flags(world_dir, killed), str(killed), "checkpoints")
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "todo.txt").write_text("somebody's")
    refused(capsys, driver.main, small_flags(world_dir, folder), str(folder), "todo.txt")
    assert [path.name for path in folder.iterdir()] == ["todo.txt"]
    file = folder / "todo.txt"
    refused(capsys, driver.main, small_flags(world_dir, file), str(file))
    assert file.read_text() == "somebody's"


@pytest.mark.parametrize("wrong", ["--seed=9", "--server=http://127.0.0.1:9/v1"])
def test_where_one_rank_refuses_nothing_is_trimmed_or_written(wrong, world_dir, killed, tmp_path):
    """In the settings, or when all is loaded and its server is not there: one line of rank 0."""
    argv, before = small_flags(world_dir, killed), contents(killed)
    assert two(argv, tmp_path, argv1=[*argv, wrong]) == [2, 2]
    (line,) = (tmp_path / "log0").read_text().splitlines()
    assert "rank 1" in line and wrong.partition("=")[2] in line
    assert (tmp_path / "log1").read_text() == "" and contents(killed) == before


def test_a_command_waits_for_the_one_that_uses_the_directory(world_dir, killed, uninterrupted, log):
    waits, locked = log.with_name("waits"), files.locked

    def locked_later(folder):
        waits.touch()
        return locked(folder)

    with locked(killed):
        before = functools.partial(setattr, files, "locked", locked_later)
        pid = start(small_flags(world_dir, killed), log, before=before)
        while not waits.exists():
            assert os.waitpid(pid, os.WNOHANG) == (0, 0), log.read_text()
            time.sleep(0.01)
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    assert wait(pid) == 0
    assert_equal(killed, uninterrupted)
