"""Durable files: whole or absent, JSON lines, and a folder that one process holds."""

import contextlib
import resource
import signal
import threading

import pytest
from conftest import one_line
from driver import run, start

from lib import files

DEEP = "[" * 100_000


def names(folder):
    return [path.name for path in sorted(folder.rglob("*"))]


@pytest.mark.parametrize("left", [".a.tmp", ".a.tmp/old"])
def test_a_file_or_folder_is_whole_or_absent_without_what_a_kill_left(left, tmp_path):
    """A kill has left a file, or a folder with a file in it."""
    (tmp_path / left).parent.mkdir(exist_ok=True)
    (tmp_path / left).touch()
    for half in (True, False):
        with contextlib.suppress(KeyError), files.whole(tmp_path / "a") as folder:
            folder.mkdir()
            files.write_json(folder / "b.json", {"text": "π \ud800"})  # half of a surrogate pair
            if half:
                raise KeyError
        assert (tmp_path / "a").exists() != half
    assert names(tmp_path) == ["a", "b.json"]
    assert files.read_json(tmp_path / "a/b.json") == {"text": "π \ud800"}


@pytest.mark.parametrize("text", [None, "{", DEEP, "5", "null", "[]", '{"part": 3}'])
def test_a_json_file_that_is_not_what_it_must_be_is_named(text, tmp_path):
    """It is not there, torn, too deep to read, no object, or has a part of another kind."""
    file = tmp_path / "a.json"
    if text is not None:
        file.write_text(text)
    line = one_line(lambda: files.read_json(file, {"part": dict}), file)
    assert ("JSON" in line) == (text in ("{", DEEP))


def test_a_damaged_row_or_list_of_digests_is_named(tmp_path):
    (tmp_path / files.DIGESTS).write_text('["a.json"]')
    one_line(lambda: files.digests_of(tmp_path), tmp_path / files.DIGESTS)
    log = tmp_path / "log.jsonl"
    for row in ("{}}", "{}", '{"step": "3"}', "[1]", DEEP):
        log.write_text(f'{{"step": 1}}\n{row}\n{{"step": 2}}\n')
        one_line(lambda: files.end_of_step(log, 2), f"{log}:2")


def test_a_full_disk_is_told_with_the_logs_name(tmp_path):
    """As full as one process can make it; the error of the system names no file."""
    log = tmp_path / "log.jsonl"

    def program(argv):
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
        one_line(lambda: files.append_jsonl(log, [{"step": 1}] * 9), log, "too large", kind=OSError)
        return 0

    run([], program)


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path):
    """Past six digits, too. Other names are ignored."""
    steps = [2, 999_999, 1_000_000, 10_000_000]
    for step in reversed(steps):
        files.of_step(tmp_path, step).mkdir()
    for name in ("step_00002", "step_0000002", "step_000003.tmp"):
        (tmp_path / name).mkdir()
    paths = files.by_step(tmp_path)
    assert [*paths] == steps and paths[10_000_000].name == "step_10000000"
    assert files.by_step(tmp_path / "none") == {}


def test_a_folder_is_kept_to_one_process_and_a_kill_frees_it(tmp_path, capsys):
    """Another command says that it waits for that, by default a minute."""
    folder = tmp_path / "runs/run"

    def hold_for_ever(argv):
        with files.locked(folder):
            (tmp_path / "held").touch()
            signal.pause()

    other = start([], tmp_path / "log", hold_for_ever)
    while not (tmp_path / "held").exists():
        assert other.is_alive(), (tmp_path / "log").read_text()
    for _ in range(2):  # the first refusal changes nothing
        with pytest.raises(OSError, match=str(folder)):
            files.locked(folder, seconds=0.1).__enter__()
        assert f"{folder}: another command uses it; waiting" in capsys.readouterr().out
    threading.Timer(0.5, other.kill).start()
    with files.locked(folder):
        other.join()
        assert other.exitcode == -signal.SIGKILL
        (folder / "file").touch()
    assert {*names(folder)} == {files.LOCK, "file"}


def test_a_models_digest_is_of_its_inner_files_too(tmp_path):
    weights = tmp_path / "1_Dense/model.safetensors"
    weights.parent.mkdir()
    weights.write_text("x")
    digest = files.tree_digest(str(tmp_path))
    weights.write_text("y")
    assert files.tree_digest(str(tmp_path)) != digest
