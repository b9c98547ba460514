"""Files that a kill cannot tear: whole-or-absent writes, JSON lines, the lock of a folder."""

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import filelock

NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
LOCK = ".lock"  # name of the lock's file in a locked folder


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """Keep a folder to this process; ValueError while another process holds it.

    The system frees the lock when the process ends, however it ends. A folder that was created for
    the lock goes again if nothing else was written.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        rule = "another command is using this directory; wait until it ends, or stop it"
        raise ValueError(f"{folder}: {rule}") from None
    except (OSError, NotImplementedError) as e:
        if getattr(e, "errno", errno.ENOSYS) not in NO_LOCKS:
            raise
        rule = "make sure that no other command uses this directory"
        print(f"{folder}: its file system has no locks ({e}); {rule}", file=sys.stderr)
    try:
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)  # while this process still holds it
        lock.release()
        with contextlib.suppress(OSError):  # a folder that is not empty stays
            for path in missing:
                path.rmdir()


@contextlib.contextmanager
def whole(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield a temporary name for a file or directory, which becomes `path` on a clean exit.

    Everything is flushed before the rename. A kill or an error leaves the old file or the new one;
    of a directory that replaces another at worst neither. OSError names the path.
    """
    tmp = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(tmp, ignore_errors=True)  # left by a kill
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield tmp
        for written in (tmp, *tmp.rglob("*")):
            _flush(written)
        if tmp.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        tmp.replace(path)
        _flush(path.parent)
    except OSError as e:
        raise OSError(f"{path}: {e}") from None  # a full disk names no file
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.unlink(missing_ok=True)


def _flush(path: pathlib.Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a file whole. A lone surrogate becomes its JSON escape."""
    with whole(pathlib.Path(path)) as tmp:
        tmp.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_json(path: str | os.PathLike, obj: object) -> None:
    write_text(path, json.dumps(obj, indent=2, ensure_ascii=False) + "\n")


def read_json(path: pathlib.Path) -> Any:
    """The content of a .json file. ValueError or OSError names the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{path}: not readable as JSON ({e}); repair or remove it") from None


def append_jsonl(path: pathlib.Path, rows: Iterable[dict]) -> None:
    """Append one JSON line per row, flushed. A line that a kill has torn is cut off first."""
    try:
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


def write_jsonl(path: pathlib.Path, rows: Iterable[dict]) -> None:
    """Write rows as they come: a log may be larger than memory."""
    with whole(path) as tmp, open(tmp, "w") as f:
        for row in rows:
            f.write(json.dumps(row) + "\n")


def trim_jsonl(path: pathlib.Path, step: int) -> None:
    """Cut a .jsonl file back to the rows of steps up to `step`."""
    if path.exists():
        write_jsonl(path, (row for row in read_jsonl(path) if row.get("step", 0) <= step))


def digest(*parts: object) -> str:
    """Sixteen hexadecimal digits that differ where the parts' `repr` differs."""
    return hashlib.blake2b(repr(parts).encode("utf-8", "replace"), digest_size=8).hexdigest()


def file_digest(path: str | os.PathLike) -> str:
    """A digest of a file's content; OSError where there is no such file."""
    return digest(pathlib.Path(path).read_bytes())
