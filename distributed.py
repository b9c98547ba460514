"""Processes and files: one process group, one summed gradient, files that are whole or absent.

Every rank holds the whole model; there is no wrapper class. Objects travel between ranks as JSON,
and nothing is pickled. Nothing here knows the method. torch is imported where it is used: it takes
seconds, and a mistake on the command line is answered without it.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import datetime
import difflib
import errno
import fcntl
import json
import os
import pathlib
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, NoReturn

from safetensors import SafetensorError

if TYPE_CHECKING:
    import torch


class UserError(ValueError):
    """A user's mistake, such as a wrong flag or file: one clear line and exit code 2."""


class SharedError(UserError):
    """A mistake that every rank has seen, so that rank 0 alone says it."""


class Parser(argparse.ArgumentParser):
    """Flags whose mistakes are UserErrors."""

    def error(self, message: str) -> NoReturn:
        """Also names the flags that an unknown one is most like."""
        hint, known = "", list(self._option_string_actions)
        for flag in re.findall(r"--[\w-]+", message.partition("unrecognized arguments: ")[2]):
            for close in difflib.get_close_matches(flag, known, 1, 0.75):
                hint += f"for {flag} there is {close}; "
        raise UserError(f"{message}; {hint}--help lists the flags")


def brief(error: BaseException) -> str:
    """An exception as one short line, for the cause in a UserError."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def command(name: str, body: Callable[[], object]) -> int:
    """Run a program's body and return its exit code; what ends it early is one line on stderr."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    code, told = 2, True
    try:
        result = body()
        return result if isinstance(result, int) else 0
    except ImportError as e:
        message = f"{e}; pip install -r requirements.txt"
    except ConnectionError as e:
        code, message = 1, f"{e}; {_advice(e)}"
    except OSError as e:  # a full disk, or a directory that cannot be written
        message = f"{e}; mend this; {_advice(e)}"
    except UserError as e:
        message = str(e)
        told = not isinstance(e, SharedError) or os.environ.get("RANK", "0") == "0"
    except KeyboardInterrupt as e:
        code, message = 130, f"interrupted; {_advice(e)}"
    if told:
        print(f"{name}: {' '.join(message.split())}", file=sys.stderr)
    return code


def _advice(error: BaseException) -> str:
    """How to go on: what `continued_by` has noted, or the usual."""
    return "; ".join(getattr(error, "__notes__", ["give the same command again"]))


@contextlib.contextmanager
def continued_by(advice: Callable[[], str]) -> Iterator[None]:
    """Note what goes on from here on an error or a signal that ends the block, for its one line."""
    try:
        yield
    except (OSError, KeyboardInterrupt) as e:
        e.add_note(advice())
        raise


def answer(name: str, look: Callable[[], object]) -> None:
    """Let --help and the mistakes that files show end a program, before its slow imports."""
    code = command(name, look)
    if code:
        sys.exit(code)


def leave(code: int) -> NoReturn:
    """End the process; in a group at once, as gloo's threads may abort in an orderly teardown."""
    if "RANK" in os.environ:
        atexit._run_exitfuncs()  # other loggers close their writers there
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


@dataclass(frozen=True)
class World:
    """This process's place among the others."""

    rank: int
    size: int
    device: torch.device

    @property
    def main(self) -> bool:
        return self.rank == 0


def init(device: str = "auto") -> World:
    """Join the process group that `torchrun` describes in the environment, or be alone without it.

    device: "auto" (CUDA where there is one), "cpu" or "cuda"; the backend is NCCL on CUDA and gloo
    on CPU. Raises UserError where torchrun's variables are incomplete or wrong.
    """
    import torch

    rank, size, local = _place()
    here = torch.device("cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no CUDA GPU here; use cpu, or a CUDA build")
    if device != "cpu" and torch.cuda.is_available():
        count = torch.cuda.device_count()
        if local >= count:
            raise UserError(f"LOCAL_RANK {local}: there are {count} GPUs; lower --nproc_per_node")
        here = torch.device("cuda", local)
        torch.cuda.set_device(here)
    if "RANK" in os.environ:
        _join(rank, size, here)
    return World(rank, size, here)


def _place() -> tuple[int, int, int]:
    """Rank, number of ranks and rank on this machine; 0, 1, 0 where torchrun did not start this."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not any(name in os.environ for name in names):
        return 0, 1, 0
    try:
        rank, size, local = (int(os.environ[name]) for name in names)
        if 0 <= rank < size:
            return rank, size, local
        wrong = f"RANK {rank} is no rank of WORLD_SIZE {size}"
    except KeyError as e:
        wrong = f"{e.args[0]} is not set, but another of {', '.join(names)} is"
    except ValueError as e:
        wrong = f"{', '.join(names)} must be numbers ({e})"
    raise UserError(f"{wrong}; start with torchrun, or unset all three")


def _join(rank: int, size: int, here: torch.device) -> None:
    import torch.distributed as dist

    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store, *_ = next(dist.rendezvous("env://"))
        dist.init_process_group(
            "nccl" if here.type == "cuda" else "gloo",
            # After a restart by `torchrun --max-restarts` the store still holds old addresses.
            store=dist.PrefixStore(restart, store),
            rank=rank,
            world_size=size,
            device_id=here if here.type == "cuda" else None,
            # Ranks may meet only after hours: one of them can draw all the long completions.
            timeout=datetime.timedelta(hours=12),
        )
    except (RuntimeError, ValueError, OverflowError) as e:
        at = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        why = f"{brief(e)}; start with torchrun, on a port that is free"
        raise UserError(f"the process group at {at} was not joined ({why})") from None


def agree(value: object, world: World, what: str) -> None:
    """SharedError on every rank unless all see the same value, as on a shared file system."""
    if any(other != value for other in gather(value, world)):
        raise SharedError(f"the ranks see different {what}; let them share one file system")


def leave_together(world: World) -> None:
    """The last collective of an orderly end: no rank leaves while another still talks to it."""
    gather(None, world)


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """Turn the RuntimeError of a collective whose partner is gone into a ConnectionError."""
    try:
        yield
    except RuntimeError as e:
        lost = f"rank {os.environ.get('RANK')} lost another rank, which torchrun names ({brief(e)})"
        raise ConnectionError(lost) from None


@contextlib.contextmanager
def errors_shared(world: World) -> Iterator[None]:
    """Raise one rank's UserError of this block on all ranks, so that they leave together."""
    error = None
    try:
        yield
    except UserError as e:
        error = str(e)
    for found in gather(error, world):
        if found:
            raise SharedError(found)


def broadcast_parameters(params: Iterable[torch.Tensor], world: World) -> None:
    """Give every rank rank 0's values, in place, whatever each of them drew."""
    import torch.distributed as dist

    if world.size > 1:
        with _together():
            for p in params:
                dist.broadcast(p.data, src=0)


def sum_gradients(params: list[torch.nn.Parameter], world: World) -> None:
    """Sum the gradients over ranks in one all-reduce of one flat fp32 vector, in place.

    Each rank's loss is already divided by the *global* batch size, so the sum is the gradient of
    the global mean. A missing gradient counts as zero: a rank without any still joins.
    """
    import torch
    import torch.distributed as dist

    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    flat = torch.cat([g.flatten().float() for g in gradients])
    if world.size > 1:
        with _together():
            dist.all_reduce(flat)
    for p, part in zip(params, flat.split([p.numel() for p in params])):
        p.grad = part.view_as(p).to(p.dtype)


def gather(obj: object, world: World) -> list:
    """Every rank's JSON-able object, in rank order, on every rank: no rank may skip the call."""
    if world.size == 1:
        return [obj]
    import torch
    import torch.distributed as dist

    text = json.dumps(obj).encode()
    longest = torch.tensor(len(text), device=world.device)
    with _together():
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        padded = bytearray(text.ljust(int(longest)))  # JSON may end in blanks
        mine = torch.frombuffer(padded, dtype=torch.uint8).to(world.device)
        parts = [torch.zeros_like(mine) for _ in range(world.size)]
        dist.all_gather(parts, mine)
    return [json.loads(part.cpu().numpy().tobytes()) for part in parts]


LOCK = ".lock"


@contextlib.contextmanager
def locked(folder: pathlib.Path, world: World) -> Iterator[None]:
    """Keep a folder to this process group; UserError on all ranks while another one is in it.

    Rank 0 holds a lock on a file in the folder. The system takes the lock back when the process
    ends, however it ends. Folders that were made for it go again if nothing else is in them.
    """
    made: list[pathlib.Path] = []
    file = None
    with errors_shared(world):
        if world.main:
            made = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            file = _lock(folder / LOCK, fcntl.LOCK_EX)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}")
            file.flush()
    try:
        yield
    finally:
        if file is not None:
            (folder / LOCK).unlink(missing_ok=True)  # before it is free: see `_lock`
            file.close()
        with contextlib.suppress(OSError):  # not empty
            for path in made:
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
    """Cut a .jsonl back to the update of the checkpoint: later updates will be made again."""
    if path.exists():
        write_jsonl(path, (row for row in read_jsonl(path) if row.get("step", 0) <= step))
