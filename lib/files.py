"""Files that a kill cannot tear: whole-or-absent writes, JSON lines, the lock of a folder."""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import filelock

LOCK = ".lock"  # in a folder that a command uses


def locked(folder: pathlib.Path, seconds: float = 60) -> contextlib.AbstractContextManager:
    """Lock a folder for a block. If another process holds the lock, we say so and wait.

    We wait because a restarted job may begin before the old one has ended. The system frees the
    lock when the process ends, however it ends. After `seconds` filelock raises an OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / LOCK, timeout=seconds)
    try:
        return lock.acquire(timeout=0)
    except filelock.Timeout:
        print(f"{folder}: another command uses it; waiting for up to {seconds:g} s", flush=True)
        return lock.acquire()


@contextlib.contextmanager
def whole(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield a temporary name for a file or a folder, which becomes `path` on a clean exit.

    A kill or an error leaves the old file or the new one. OSError names the path.
    """
    tmp = path.with_name(f".{path.name}.tmp")
    with _writing(path):
        shutil.rmtree(tmp, ignore_errors=True)  # left by a kill, as a folder or a file
        tmp.unlink(missing_ok=True)
        yield tmp
        tmp.replace(path)


@contextlib.contextmanager
def _writing(path: pathlib.Path) -> Iterator[None]:
    """A block that writes a file. Its OSErrors name the path, as the system's often do not."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as e:
        raise OSError(f"{path}: {e}") from None


def write_json(path: pathlib.Path, obj: object) -> None:
    """Write JSON. Half of a surrogate pair, which UTF-8 cannot hold, becomes its JSON escape."""
    with whole(path) as tmp:
        text = json.dumps(obj, indent=2, ensure_ascii=False) + "\n"
        tmp.write_text(text, encoding="utf-8", errors="backslashreplace")


def read_json(path: pathlib.Path, parts: Mapping[str, type] | None = None) -> Any:
    """The content of a .json file.

    parts: if given, the content must be an object, and each of these fields that it has must be of
    this type. ValueError names a file that is not there, not JSON, or otherwise wrong.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ValueError(f"{path}: {e.strerror}") from None
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path}: not JSON ({e}); repair or remove it") from None
    if parts is not None and not isinstance(content, dict):
        raise ValueError(f"{path}: must hold an object; repair or remove it")
    for name, kind in (parts or {}).items():
        if not isinstance(content.get(name, kind()), kind):
            raise ValueError(f"{path}: {name} must be a {kind.__name__}; repair or remove it")
    return content


def append_jsonl(path: pathlib.Path, rows: Iterable[dict]) -> None:
    """Append one JSON line per row. A line that a kill has torn is cut off first."""
    with _writing(path), open(path, "a+b") as f:
        if f.tell():
            f.seek(-1, os.SEEK_END)
            if f.read() != b"\n":
                f.truncate(path.read_bytes().rfind(b"\n") + 1)
        for row in rows:
            f.write(json.dumps(row).encode() + b"\n")


def read_jsonl(path: pathlib.Path) -> Iterator[dict]:
    """The rows of a .jsonl file; see `rows_and_ends`."""
    for row, _ in rows_and_ends(path):
        yield row


def rows_and_ends(path: pathlib.Path) -> Iterator[tuple[Any, int]]:
    """Each row of a .jsonl file, and the byte where it ends; none if there is no file.

    A torn last line is left out. ValueError names the file and the line that is not JSON.
    """
    if not path.exists():
        return
    end = 0
    with open(path, "rb") as f:
        for i, line in enumerate(f, 1):
            if not line.endswith(b"\n"):
                return
            end += len(line)
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as e:
                raise ValueError(f"{path}:{i}: not JSON ({e}); repair or remove it") from None
            yield row, end


def rows_with(path: pathlib.Path, name: str, kind: type) -> Iterator[tuple[dict, int]]:
    """As `rows_and_ends`. ValueError at a row in which this field is missing or of another type."""
    for i, (row, end) in enumerate(rows_and_ends(path), 1):
        if not isinstance(row, dict) or type(row.get(name)) is not kind:
            raise ValueError(f"{path}:{i}: a row without its {name}; repair or remove the file")
        yield row, end


def end_of_step(path: pathlib.Path, last: int) -> int:
    """The byte after the last row of all steps up to `last`; 0 without one. Steps are in order."""
    last_end = 0
    for row, end in rows_with(path, "step", int):
        if row["step"] <= last:
            last_end = end
    return last_end


def of_step(folder: pathlib.Path, step: int, suffix: str = "") -> pathlib.Path:
    """The path of a step's checkpoint, or of its version of the bank."""
    return folder / f"step_{step:06d}{suffix}"


def by_step(folder: pathlib.Path) -> dict[int, pathlib.Path]:
    """The checkpoints, or the versions of the bank, in a folder by their steps, in order.

    Other files in the folder are ignored. NotADirectoryError if a file stands in its place.
    """
    paths = {}
    for path in folder.iterdir() if folder.exists() else []:
        if match := re.fullmatch(r"step_([0-9]{6}|[1-9][0-9]{6,})(\.json)?", path.name):
            paths[int(match[1])] = path
    return dict(sorted(paths.items()))


# ------------------------------------------------------------------------------------ digests

DIGESTS = "digests.json"  # {file: sha256} of a checkpoint, which we write after its other files
BANK = "bank.json"  # in RUN/bank/ and each checkpoint; evolution replaces it, so it has no digest
OF_A_MODEL = (".json", ".jinja", ".txt", ".model", ".safetensors", ".bin")
# Files that lie beside a model's and are not part of it: a checkpoint's state, and FSDP's.
BESIDE_A_MODEL = ("trainer.safetensors", BANK, DIGESTS, "optimizer.bin", "pytorch_model_fsdp.bin")
# Files of TRL's trainer, which a user may have deleted. (They count in a model's digest, else the
# digests of older results would change.)
OF_TRL = ("trainer_state.json", "training_args.bin")


def digest(*parts: object) -> str:
    """Sixteen hexadecimal digits that differ where the parts' `repr` differs."""
    return hashlib.blake2b(repr(parts).encode("utf-8", "replace"), digest_size=8).hexdigest()


def file_digest(path: str | os.PathLike) -> str:
    """The sha256 of a file's content; OSError where there is no such file."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def is_of_a_model(file: pathlib.Path) -> bool:
    """Whether a file is part of a model or an adapter, and not of a checkpoint's other state."""
    return file.suffix in OF_A_MODEL and file.name not in BESIDE_A_MODEL


def tree_digest(name: str) -> str:
    """A digest of what a file or a model's folder holds; the name itself if nothing is there.

    It leaves out a checkpoint's bank and trainer state.
    """
    path = pathlib.Path(name)
    if path.is_file():
        return file_digest(path)
    parts = []
    for file in sorted(path.rglob("*")) if name else []:  # Path("") is the working directory
        if is_of_a_model(file) and file.is_file():
            parts.append((file.relative_to(path).as_posix(), file_digest(file)))
    return digest(parts) if parts else name


def write_digests(folder: pathlib.Path) -> None:
    """Write a checkpoint's digests, once its other files are there."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != BANK:
            digests[path.relative_to(folder).as_posix()] = file_digest(path)
    write_json(folder / DIGESTS, digests)


def digests_of(folder: pathlib.Path, needed: bool = False) -> dict[str, str]:
    """A checkpoint's digests; {} if it has no digests.json, which is an error if `needed`."""
    if not needed and not (folder / DIGESTS).exists():
        return {}
    return read_json(folder / DIGESTS, parts={})  # must be an object


def refuse_damaged(folder: pathlib.Path, digests: dict[str, str]) -> None:
    """ValueError that names the first file of a checkpoint that is missing or damaged."""
    for name, saved in digests.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path}: is not there, or on no disk that all processes share")
        if file_digest(path) != saved:
            raise ValueError(f"{path}: is damaged: not what {DIGESTS} says was saved")
