"""Durable files: whole or absent, and a folder that one process holds."""

import errno
import fcntl
import os
import subprocess
import sys

import pytest
from conftest import ROOT

import files
from cli import UserError


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
