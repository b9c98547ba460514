"""Durable files: whole or absent, JSON lines, and a folder that one process holds."""

import os
import shutil
import signal

import driver
import pytest
from conftest import one_line

from lib import files


def names(folder):
    return [path.name for path in sorted(folder.rglob("*"))]


# ----------------------------------------------------------------------------------- whole or not


def test_a_file_or_folder_is_the_old_one_or_the_new_one_without_what_a_kill_left(tmp_path):
    (tmp_path / ".a.tmp").mkdir()
    (tmp_path / ".a.tmp/old").touch()  # left by a kill
    with pytest.raises(RuntimeError), files.whole(tmp_path / "a") as folder:
        folder.mkdir()
        (folder / "half").touch()
        raise RuntimeError
    assert not (tmp_path / "a").exists()
    with files.whole(tmp_path / "a") as folder:
        folder.mkdir()
        files.write_json(folder / "b.json", "one")
        assert not (tmp_path / "a").exists()
    with pytest.raises(RuntimeError), files.whole(tmp_path / "a/b.json") as half:
        half.write_text("tw")
        raise RuntimeError
    assert files.read_json(tmp_path / "a/b.json") == "one"
    files.write_json(tmp_path / "a/b.json", "two")
    assert files.read_json(tmp_path / "a/b.json") == "two"
    assert names(tmp_path) == ["a", "b.json"]


# ------------------------------------------------------------------------------------------- JSON


def test_json_comes_back_and_half_of_a_surrogate_pair_does_too(tmp_path):
    obj = {"text": "π \ud800", "list": [1, 2.5, None]}
    files.write_json(tmp_path / "a.json", obj)
    assert files.read_json(tmp_path / "a.json") == obj
    assert "π" in (tmp_path / "a.json").read_text()


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "a.json").write_text("{")
    one_line(lambda: files.read_json(tmp_path / "a.json"), "a.json")
    one_line(lambda: files.read_json(tmp_path / "none.json"), "none.json", kind=OSError)
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{}}\n{"step": 2}\n')
    one_line(lambda: list(files.read_jsonl(tmp_path / "log.jsonl")), "log.jsonl:2")


def test_lines_are_appended_after_the_last_whole_one(tmp_path):
    log = tmp_path / "log.jsonl"
    assert list(files.read_jsonl(log)) == []
    log.write_text('{"st')  # as a kill leaves it, also in the very first line
    files.append_jsonl(log, [{"step": 1}, {"step": 2, "text": "π\n"}])
    with open(log, "a") as f:
        f.write('{"step": 3')
    assert [row["step"] for row in files.read_jsonl(log)] == [1, 2]
    files.append_jsonl(log, [{"step": 4}])
    assert list(files.read_jsonl(log)) == [{"step": 1}, {"step": 2, "text": "π\n"}, {"step": 4}]


def test_a_log_is_cut_where_the_rows_of_a_step_end_and_is_not_written_again(tmp_path):
    """Its bytes before the cut stay, as a torn line does not; nor is it touched without a cut."""
    log = tmp_path / "log.jsonl"
    kept = b'{"step":1}\n{"step": 1}\n{"step": 2}\n'  # not as json.dumps spaces it
    for rest, is_cut in ((b'{"step": 3}\n{"step": 4}\n', True), (b'{"step": 2', False)):
        log.write_bytes(kept + rest)
        inode = log.stat().st_ino
        assert files.trim_jsonl(log, 2) == is_cut
        assert (log.read_bytes(), log.stat().st_ino) == (kept, inode)
    before = log.stat().st_mtime_ns
    assert not files.trim_jsonl(log, 2) and log.stat().st_mtime_ns == before
    assert files.trim_jsonl(log, -1) and log.read_bytes() == b""
    log.write_bytes(kept + b"{}}\n")
    one_line(lambda: files.trim_jsonl(log, 2), f"{log}:4")
    assert not files.trim_jsonl(tmp_path / "none.jsonl", 2) and names(tmp_path) == ["log.jsonl"]


def test_checkpoints_and_versions_of_the_bank_are_found_by_their_steps_in_order(tmp_path):
    for step in (100, 25, 0):
        files.of_step(tmp_path, step, ".json").touch()
    (tmp_path / "bank.json").touch()
    (tmp_path / ".step_000050.json.tmp").touch()
    for name in ("step_000010.bak", "step_000026.json.bak", "step_abc", "step_11"):
        (tmp_path / name).touch()  # nobody's
    (tmp_path / "step_000011").mkdir()
    assert list(files.by_step(tmp_path)) == [0, 25, 100]
    assert files.by_step(tmp_path)[25].name == "step_000025.json"
    assert files.by_step(tmp_path / "none") == {}


def test_digests_differ_where_the_parts_do(tmp_path):
    (tmp_path / "a").write_text("x")
    texts = [files.digest(*parts) for parts in (["ab", "c"], ["a", "bc"], [["a", "bc"]], [1], [""])]
    assert len({*texts}) == 5 and files.digest("ab", "c") == texts[0]
    assert all(len(text) == 16 and int(text, 16) >= 0 for text in texts)
    assert files.file_digest(tmp_path / "a") == files.digest(b"x")
    assert len(files.digest("\ud800")) == 16  # half of a surrogate pair


# ------------------------------------------------------------------------------------------- lock


def test_a_folder_is_kept_to_one_process_and_a_kill_frees_it(tmp_path, capsys):
    folder = tmp_path / "runs/run"

    def hold(argv):
        with files.locked(folder):
            (tmp_path / "held").touch()
            signal.pause()

    pid = driver.start([], tmp_path / "log", program=hold)
    while not (tmp_path / "held").exists():
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), (tmp_path / "log").read_text()
    for _ in range(2):  # the first refusal changes nothing
        with pytest.raises(ValueError, match=f"{folder}: another command"):
            files.locked(folder, seconds=0.1).__enter__()
        assert f"{folder}: another command" in capsys.readouterr().out  # while it waits
    os.kill(pid, signal.SIGKILL)
    assert driver.wait(pid) == -signal.SIGKILL
    with files.locked(folder, seconds=0.1):
        (folder / "file").touch()
    assert {*names(folder)} == {files.LOCK, "file"}


def test_a_model_is_known_by_its_small_files_and_by_places_in_its_weights(tmp_path):
    """Wherever it lies. Training in place moves all weights, under the same names and sizes."""
    model = tmp_path / "model"
    (model / "1_Dense").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "README.md").write_text("about it")
    weights = bytearray(b"x" * 2**22)
    (model / "1_Dense/model.safetensors").write_bytes(weights)
    digest = files.contents(str(model))
    shutil.copytree(model, tmp_path / "moved")
    (model / "README.md").write_text("more about it")
    (model / "bank.json").write_text("{}")  # a checkpoint's, which an evolution may replace
    for logs in ("sgsd", "eval", "checkpoint-5"):  # of a run on TRL that left its weights here
        (model / logs).mkdir()
        (model / logs / "config.json").write_text("{}")
    assert files.contents(str(model)) == digest == files.contents(str(tmp_path / "moved"))
    (model / "config.json").write_text("{ }")
    other = files.contents(str(model))
    for at in (0, len(weights) // 2, len(weights) - 1):
        weights[at : at + 1] = b"y"
        (model / "1_Dense/model.safetensors").write_bytes(weights)
        assert files.contents(str(model)) not in (digest, other)
        other = files.contents(str(model))
    for name in ("Qwen/Qwen3-1.7B", "", str(tmp_path / "none")):
        assert files.contents(name) == name
    assert files.contents(str(model / "config.json")) == files.digest(b"{ }")


def test_every_byte_of_large_weights_counts_where_that_is_asked_for(tmp_path):
    """Elsewhere three places do, since training moves all weights."""
    weights = bytearray(5 * files.PIECE)
    digests = []
    for at in (0, files.PIECE + 7):  # between the places
        weights[at] += 1
        (tmp_path / "model.safetensors").write_bytes(weights)
        both = [files.contents(str(tmp_path), every_byte=x) for x in (False, True)]
        digests.append(both)
    (some, whole), (some_then, whole_then) = digests
    assert some == some_then and whole != whole_then
