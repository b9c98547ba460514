"""Files that a kill cannot tear: written whole or not at all, JSON lines, and a folder's lock."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import pathlib
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator
from typing import IO, Any

from safetensors import SafetensorError

from cli import UserError, brief

LOCK = ".lock"


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """Keep a folder to this process; UserError while another one is in it.

    The lock is on a file in the folder. The system takes the lock back when the process ends,
    however it ends. Folders that were made for it go again if nothing else is in them.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    file = _lock(folder / LOCK, fcntl.LOCK_EX)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}")
    file.flush()
    try:
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)  # before it is free: see `_lock`
        file.close()
        with contextlib.suppress(OSError):  # not empty
            for path in missing:
                path.rmdir()


def refuse_busy(folder: pathlib.Path) -> None:
    """UserError while another process works in a folder. Leaves no trace."""
    if (folder / LOCK).exists():
        _lock(folder / LOCK, fcntl.LOCK_SH).close()  # shared: the ranks of one command look at once


def _lock(path: pathlib.Path, kind: int) -> IO[str]:
    """The file, open and with flock's lock on it; UserError where another process has that."""
    file = open(path, "a+")  # noqa: SIM115 (it stays open)
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            raise BlockingIOError  # its holder has just removed it, and a third may have it anew
    except (BlockingIOError, FileNotFoundError):
        file.seek(0)
        holder = file.read() or "another process"
        file.close()
        why = f"{holder} is at work there; wait until it ends, or stop it"
        raise UserError(f"{path.parent}: {why}") from None
    except OSError as e:
        if e.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
            raise
        risk = "see to it yourself that no other process works there"
        print(f"{path.parent}: this file system has no locks; {risk}", file=sys.stderr)
    return file


def listed(folder: pathlib.Path) -> str:
    """What stands in a folder, for an error: its first names, or that there are none."""
    names = sorted(path.name for path in folder.glob("*") if path.name != LOCK)
    empty = "the directory is empty" if folder.is_dir() else "there is no such directory"
    return f"but {', '.join(names[:5])}" if names else empty


def _sync(path: pathlib.Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _named(path: pathlib.Path) -> Iterator[None]:
    """Name the path in the OSError of a failed write; a full disk and safetensors leave it out."""
    try:
        yield
    except (OSError, SafetensorError) as e:
        raise OSError(f"{path}: {e}") from None


@contextlib.contextmanager
def whole(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield a temporary name for a file or directory, which becomes `path` on a clean exit.

    All is flushed before it is renamed: a kill or an error leaves the old file or the new one, of
    two directories at worst neither.
    """
    tmp = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(tmp, ignore_errors=True)  # what a kill has left
    path.parent.mkdir(parents=True, exist_ok=True)
    with _named(path):
        try:
            yield tmp
            for written in (tmp, *tmp.rglob("*")):
                _sync(written)
            if tmp.is_dir():  # an old one makes room; a file never takes a directory's place
                shutil.rmtree(path, ignore_errors=True)
            tmp.replace(path)
        finally:
            shutil.rmtree(tmp, ignore_errors=True)
            tmp.unlink(missing_ok=True)
        _sync(path.parent)


def write_text(path: str | os.PathLike, text: str) -> None:
    with whole(pathlib.Path(path)) as tmp:  # a lone surrogate is written as its JSON escape
        tmp.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_json(path: str | os.PathLike, obj: object) -> None:
    write_text(path, json.dumps(obj, indent=2, ensure_ascii=False) + "\n")


def read_json(path: pathlib.Path) -> Any:
    """One of our .json files. UserError where it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: not read ({brief(e)}); mend or remove it") from None


def append_jsonl(path: pathlib.Path, rows: Iterable[dict]) -> None:
    """Append one JSON line per row, flushed; the next append cuts off what a kill has torn."""
    with _named(path), open(path, "a+b") as f:
        if f.tell():
            f.seek(-1, os.SEEK_END)
            if f.read() != b"\n":
                f.truncate(path.read_bytes().rfind(b"\n") + 1)
        for row in rows:
            f.write(json.dumps(row).encode() + b"\n")
        f.flush()
        os.fsync(f.fileno())


def read_jsonl(path: pathlib.Path) -> Iterator[dict]:
    """The rows of one of our .jsonl files; a torn last line, without its newline, is left out."""
    if not path.exists():
        return
    with open(path, "rb") as f:
        for i, line in enumerate(f, 1):
            try:
                if line.endswith(b"\n"):
                    yield json.loads(line)
            except ValueError as e:
                why = f"not a line that was written here ({brief(e)}); mend or remove it"
                raise UserError(f"{path}:{i}: {why}") from None


def write_jsonl(path: pathlib.Path, rows: Iterable[dict]) -> None:
    """Write rows as they come: a log may be larger than the memory."""
    with whole(path) as tmp, open(tmp, "w") as f:
        for row in rows:
            f.write(json.dumps(row) + "\n")


def trim_jsonl(path: pathlib.Path, step: int) -> None:
    """Cut a .jsonl back to the step of the checkpoint: later steps will be made again."""
    if path.exists():
        write_jsonl(path, (row for row in read_jsonl(path) if row.get("step", 0) <= step))


def encodable(text: str) -> str:
    """The text with "?" for halves of surrogate pairs, which no file or terminal takes."""
    return text.encode("utf-8", "replace").decode()


def digest(*parts: object) -> str:
    """Sixteen hexadecimal digits that differ where the parts' `repr` differs."""
    return hashlib.blake2b(repr(parts).encode("utf-8", "replace"), digest_size=8).hexdigest()


def file_digest(path: str | None) -> str:
    """A digest of a file's content; "unknown" where there is none, as for what was typed in."""
    if path is None or not pathlib.Path(path).is_file():
        return "unknown"
    return digest(pathlib.Path(path).read_bytes())
