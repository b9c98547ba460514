"""Files that a kill cannot tear: whole-or-absent writes, JSON lines, the lock of a folder."""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import shutil
from collections.abc import Iterable, Iterator
from typing import Any

import filelock

LOCK = ".lock"  # in a folder that a command uses


@contextlib.contextmanager
def locked(folder: pathlib.Path, seconds: float = 60) -> Iterator[None]:
    """Keep a folder to this process; ValueError if another one holds it for a minute.

    A job that is started again may wait for the one before to end. The system frees the lock when
    the process ends, however it ends.
    """
    lock = filelock.FileLock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(filelock.Timeout):
            lock.acquire(timeout=0)
        if not lock.is_locked:
            line = "another command uses this directory; waiting for it to end, a minute at most"
            print(f"{folder}: {line}", flush=True)
            lock.acquire(timeout=seconds)
    except filelock.Timeout:
        line = f"{folder}: another command uses this directory; wait until it ends, or stop it"
        raise ValueError(line) from None
    except OSError as e:
        line = f"{folder}: cannot be written to ({e.strerror}); give another --out"
        raise OSError(line) from None
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def whole(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield a temporary name for a file or a folder, which becomes `path` on a clean exit.

    A kill or an error leaves the old file or the new one. OSError names the path.
    """
    tmp = path.with_name(f".{path.name}.tmp")
    try:
        shutil.rmtree(tmp, ignore_errors=True)  # left by a kill
        path.parent.mkdir(parents=True, exist_ok=True)
        yield tmp
        for written in (tmp, *tmp.rglob("*")):
            descriptor = os.open(written, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        tmp.replace(path)
    except OSError as e:
        raise OSError(f"{path}: {e}") from None  # a full disk names no file


def write_json(path: pathlib.Path, obj: object) -> None:
    """Half of a surrogate pair, which UTF-8 cannot hold, is written as its JSON escape."""
    with whole(path) as tmp:
        text = json.dumps(obj, indent=2, ensure_ascii=False) + "\n"
        tmp.write_text(text, encoding="utf-8", errors="backslashreplace")


def read_json(path: pathlib.Path) -> Any:
    """The content of a .json file. ValueError or OSError names the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{path}: not readable as JSON ({e}); repair or remove it") from None


def append_jsonl(path: pathlib.Path, rows: Iterable[dict]) -> None:
    """Append one JSON line per row, flushed. A line that a kill has torn is cut off first."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b") as f:
            if f.tell():
                f.seek(-1, os.SEEK_END)
                if f.read() != b"\n":
                    f.truncate(path.read_bytes().rfind(b"\n") + 1)
            for row in rows:
                f.write(json.dumps(row).encode() + b"\n")
            f.flush()
            os.fsync(f.fileno())
    except OSError as e:
        raise OSError(f"{path}: {e}") from None


def read_jsonl(path: pathlib.Path) -> Iterator[dict]:
    """The rows of a .jsonl file, none where there is no file. A torn last line is left out.

    ValueError names the file and the line that is not JSON.
    """
    if not path.exists():
        return
    with open(path, "rb") as f:
        for i, line in enumerate(f, 1):
            try:
                if line.endswith(b"\n"):
                    yield json.loads(line)
            except ValueError as e:
                raise ValueError(f"{path}:{i}: not JSON ({e}); repair or remove it") from None


def trim_jsonl(path: pathlib.Path, step: int) -> bool:
    """Cut a .jsonl file behind the rows of steps up to `step`; whether it had later ones.

    Rows are in the order of their steps. A torn last line goes, too. ValueError names the file and
    the line that is not JSON.
    """
    if not path.exists():
        return False
    end, is_cut = 0, False
    with open(path, "rb") as f:
        for line, row in zip(f, read_jsonl(path)):
            is_cut = row["step"] > step
            if is_cut:
                break
            end += len(line)
    if end < path.stat().st_size:
        os.truncate(path, end)
    return is_cut


def of_step(folder: pathlib.Path, step: int, suffix: str = "") -> pathlib.Path:
    """The checkpoint, or the version of the bank, of a step."""
    return folder / f"step_{step:06d}{suffix}"


def by_step(folder: pathlib.Path) -> dict[int, pathlib.Path]:
    """The checkpoints, or the versions of the bank, in a folder by their steps, in order.

    Any other name, and an empty folder, is nobody's.
    """
    paths = {}
    for path in sorted(folder.glob("step_*")):
        match = re.fullmatch(r"step_([0-9]{6})(\.json)?", path.name)
        if match and (path.is_file() or os.listdir(path)):
            paths[int(match[1])] = path
    return paths


def by_number(folder: pathlib.Path) -> dict[int, pathlib.Path]:
    """The whole checkpoints of a run on TRL, `checkpoint-25`, by their steps, in order.

    Its bank is the last file of a checkpoint: what a kill has left unfinished has none.
    """
    paths = {}
    for bank in folder.glob("checkpoint-*/bank.json"):
        number = bank.parent.name.removeprefix("checkpoint-")
        if number.isdecimal():
            paths[int(number)] = bank.parent
    return dict(sorted(paths.items()))


def digest(*parts: object) -> str:
    """Sixteen hexadecimal digits that differ where the parts' `repr` differs."""
    return hashlib.blake2b(repr(parts).encode("utf-8", "replace"), digest_size=8).hexdigest()


def file_digest(path: str | os.PathLike) -> str:
    """A digest of a file's content; OSError where there is no such file."""
    return digest(pathlib.Path(path).read_bytes())


OF_A_MODEL = (".json", ".jinja", ".txt", ".model", ".safetensors", ".bin")
OF_TRAINING = ("trainer.json", "trainer.safetensors", "bank.json")  # a checkpoint's other files
BESIDE_A_MODEL = ("sgsd", "eval")  # and checkpoints, where a run on TRL has left its weights
PIECE = 2**23  # bytes


def contents(name: str, every_byte: bool = False) -> str:
    """A digest of what a file or a model's folder holds; the name itself where nothing is there.

    Of a file above 16 MiB in a folder it takes the size and 8 MiB at three places: training moves
    all weights. A checkpoint's bank and trainer do not count: an evolution that is due replaces
    the bank later.
    """
    path = pathlib.Path(name)
    if path.is_file():
        return file_digest(path)
    parts: list[object] = []
    for file in sorted(path.rglob("*")) if name else []:
        top = file.relative_to(path).parts[0]
        if top in BESIDE_A_MODEL or top.startswith("checkpoint-"):
            continue
        if file.suffix in OF_A_MODEL and file.name not in OF_TRAINING and file.is_file():
            size = file.stat().st_size
            parts += [file.relative_to(path).as_posix(), size]
            with open(file, "rb") as f:
                some = (0, size // 2, max(0, size - PIECE))
                for start in range(0, size, PIECE) if every_byte else some:
                    f.seek(start)
                    parts.append(hashlib.blake2b(f.read(PIECE)).digest())
    return digest(parts) if parts else name
