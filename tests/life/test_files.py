"""Durable files: whole or absent, JSON lines, and a folder that one process holds."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

from lib import files


def names(folder):
    return [path.name for path in sorted(folder.rglob("*"))]


# ----------------------------------------------------------------------------------- whole or not


def test_a_directory_is_whole_or_absent(tmp_path):
    with pytest.raises(RuntimeError), files.whole(tmp_path / "a") as folder:
        folder.mkdir()
        (folder / "half").write_text("x")
        raise RuntimeError
    assert not names(tmp_path)
    for text in ("one", "two"):
        with files.whole(tmp_path / "a") as folder:
            folder.mkdir()
            (folder / text).write_text(text)
    assert names(tmp_path) == ["a", "two"]


def test_a_file_is_the_old_one_or_the_new_one(tmp_path):
    files.write_text(tmp_path / "b/a", "one")
    with pytest.raises(RuntimeError), files.whole(tmp_path / "b/a") as half:
        half.write_text("tw")
        raise RuntimeError
    assert (tmp_path / "b/a").read_text() == "one" and names(tmp_path) == ["b", "a"]
    files.write_text(tmp_path / "b/a", "two")
    assert (tmp_path / "b/a").read_text() == "two" and names(tmp_path) == ["b", "a"]


def test_what_a_kill_has_left_is_no_part_of_the_next_write(tmp_path):
    (tmp_path / ".a.tmp").mkdir()
    (tmp_path / ".a.tmp/old").touch()
    with files.whole(tmp_path / "a") as folder:
        folder.mkdir()
        (folder / "new").touch()
    assert names(tmp_path) == ["a", "new"]


def test_a_file_never_takes_the_place_of_a_directory(tmp_path):
    (tmp_path / "runs/a").mkdir(parents=True)
    with pytest.raises(OSError, match="runs"):
        files.write_text(tmp_path / "runs", "page")
    assert names(tmp_path) == ["runs", "a"]


# ------------------------------------------------------------------------------------------- JSON


def test_json_comes_back_and_half_of_a_surrogate_pair_does_too(tmp_path):
    obj = {"text": "π \ud800", "list": [1, 2.5, None]}
    files.write_json(tmp_path / "a.json", obj)
    assert files.read_json(tmp_path / "a.json") == obj
    assert "π" in (tmp_path / "a.json").read_text()


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match=r"a.json: not readable as JSON \(.*; repair or remove it"):
        files.read_json(tmp_path / "a.json")
    with pytest.raises(OSError, match="none.json"):
        files.read_json(tmp_path / "none.json")


def test_lines_are_appended_after_the_last_whole_one(tmp_path):
    log = tmp_path / "log.jsonl"
    assert list(files.read_jsonl(log)) == []
    files.append_jsonl(log, [{"step": 1}, {"step": 2, "text": "π\n"}])
    with open(log, "a") as f:
        f.write('{"step": 3')  # as a kill leaves it
    assert [row["step"] for row in files.read_jsonl(log)] == [1, 2]
    files.append_jsonl(log, [{"step": 4}])
    assert list(files.read_jsonl(log)) == [{"step": 1}, {"step": 2, "text": "π\n"}, {"step": 4}]


def test_a_torn_line_that_is_alone_is_cut_too(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"st')
    files.append_jsonl(tmp_path / "log.jsonl", [{"step": 1}])
    assert (tmp_path / "log.jsonl").read_text() == '{"step": 1}\n'


def test_a_line_that_is_not_json_is_named(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{}}\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"log.jsonl:2: not JSON \(.*; repair or remove it"):
        list(files.read_jsonl(tmp_path / "log.jsonl"))


def test_a_log_is_cut_back_to_a_step(tmp_path):
    files.write_jsonl(tmp_path / "log.jsonl", ({"step": step} for step in (1, 1, 2, 3)))
    files.trim_jsonl(tmp_path / "log.jsonl", 2)
    assert [row["step"] for row in files.read_jsonl(tmp_path / "log.jsonl")] == [1, 1, 2]
    files.trim_jsonl(tmp_path / "none.jsonl", 2)
    assert names(tmp_path) == ["log.jsonl"]


def test_a_disk_that_is_full_is_an_error_that_names_the_file():
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    with pytest.raises(OSError, match="/dev/full: "):
        files.append_jsonl("/dev/full", [{"text": "x" * 100_000}])


def test_digests_differ_where_the_parts_do(tmp_path):
    (tmp_path / "a").write_text("x")
    texts = [files.digest(*parts) for parts in (["ab", "c"], ["a", "bc"], [["a", "bc"]], [1], [""])]
    assert len({*texts}) == 5 and files.digest("ab", "c") == texts[0]
    assert all(len(text) == 16 and int(text, 16) >= 0 for text in texts)
    assert files.file_digest(tmp_path / "a") == files.digest(b"x")
    assert len(files.digest("\ud800")) == 16  # half of a surrogate pair


# ------------------------------------------------------------------------------------------- lock


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
            with pytest.raises(ValueError, match=f"{folder}: another command is using this direct"):
                with files.locked(folder):
                    raise AssertionError
        holder.kill()
    assert (folder / files.LOCK).exists()
    with files.locked(folder):
        (folder / "file").write_text("x")
    assert names(tmp_path) == ["runs", "run", "file"]


def test_a_folder_that_was_made_for_a_lock_alone_goes_again(tmp_path):
    with pytest.raises(ZeroDivisionError), files.locked(tmp_path / "a/b"):
        raise ZeroDivisionError
    assert not names(tmp_path)
