"""Processes and files: one process group, one averaged gradient, objects gathered as JSON, files that are whole or absent.

Every rank holds the whole model; there is no wrapper class. Nothing here knows the method, and nothing is pickled.
"""

import argparse
import atexit
import contextlib
import datetime
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist


class UserError(ValueError):
    """A user's mistake (flag, path, data, bank, checkpoint): one clear line and exit code 2, never a traceback."""


class SharedError(UserError):
    """A mistake that every rank has seen, so that rank 0 alone says it."""


class Parser(argparse.ArgumentParser):
    """Flags whose mistakes are UserErrors."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help lists the flags")


def brief(error: BaseException) -> str:
    """An exception as one short line, for the cause in a UserError."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def command(name: str, body: Callable[[], int | None]) -> int:
    """A program's exit code: 2 with one line on stderr for a user's mistake, 130 when interrupted, else what `body` returns."""
    try:
        return body() or 0
    except ImportError as e:
        print(f"{name}: {e}; pip install -r requirements.txt", file=sys.stderr)
        return 2
    except ConnectionError as e:
        print(f"{name}: {e}", file=sys.stderr)
        return 1
    except OSError as e:  # a full disk, a directory that can't be written
        print(
            f"{name}: {e}; every file already written is whole: put this right and go on from there",
            file=sys.stderr,
        )
        return 2
    except UserError as e:
        if not (isinstance(e, SharedError) and dist.is_initialized() and dist.get_rank() > 0):
            print(f"{name}: {' '.join(str(e).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as e:
        print(
            f"{name}: interrupted; {e if e.args else 'the same command goes on'}", file=sys.stderr
        )
        return 130


def leave(code: int) -> NoReturn:
    """End the process; in a group at once: gloo's threads now and then abort in an orderly teardown."""
    if dist.is_initialized():
        atexit._run_exitfuncs()  # other loggers' writers close there
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
    """Join the process group that `torchrun` describes in the environment (NCCL on CUDA, gloo on CPU); alone without it.

    device: "auto" (CUDA where there is one), "cpu" or "cuda". Raises UserError on half-set torchrun variables.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if missing and (half := [name for name in names[:3] if name in os.environ]):
        raise UserError(
            f"{half[0]} is set but {', '.join(missing)} is not; start with torchrun, or unset {' and '.join(half)}"
        )
    try:
        rank, size, local = (
            int(os.environ[n]) if not missing else d for n, d in zip(names, (0, 1, 0))
        )
    except ValueError as e:
        raise UserError(
            f"RANK, WORLD_SIZE and LOCAL_RANK must be numbers ({e}); start with torchrun, or unset them"
        ) from None
    if not 0 <= rank < size:
        raise UserError(
            f"RANK {rank} is no rank of WORLD_SIZE {size}; start with torchrun, or unset both"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "--device cuda: torch finds no CUDA GPU here; use --device cpu, or install a CUDA build of torch"
        )
    cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if cuda and local >= torch.cuda.device_count():
        raise UserError(
            f"LOCAL_RANK {local} but this machine has {torch.cuda.device_count()} GPUs; lower --nproc_per_node"
        )
    here = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(here)
    if not missing:
        # the backends give up after 10 or 30 minutes, but ranks may meet only after hours: one of them can draw the long completions
        patience = datetime.timedelta(hours=12)
        try:  # a store of its own for each start by `torchrun --max-restarts`, which else still holds the addresses of the last one
            store = dist.PrefixStore(
                os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
                next(dist.rendezvous("env://"))[0],
            )
            dist.init_process_group(
                "nccl" if cuda else "gloo",
                store=store,
                rank=rank,
                world_size=size,
                device_id=here if cuda else None,
                timeout=patience,
            )
        except (RuntimeError, ValueError, OverflowError) as e:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise UserError(
                f"the process group at {where} was not joined ({brief(e)}); start with torchrun, on a port that is free"
            ) from None
    return World(rank, size, here)


def agree(value: object, world: World, what: str) -> None:
    """SharedError on every rank unless all of them see the same: files must lie where every node sees them."""
    if any(other != value for other in gather(value, world)):
        raise SharedError(
            f"the ranks see different {what}; the run's directory must be on a file system that all nodes share"
        )


def leave_together(world: World) -> None:
    """The last collective of an orderly end: a rank that leaves while another still talks to it is an error there."""
    gather(None, world)


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """A collective that fails because another process is gone is a ConnectionError (gloo and NCCL raise plain RuntimeErrors)."""
    try:
        yield
    except RuntimeError as e:
        raise ConnectionError(
            f"rank {dist.get_rank()} lost another rank, which torchrun names ({brief(e)}); --resume goes on"
        ) from None


def broadcast_parameters(params: Iterable[torch.Tensor], world: World) -> None:
    """Give every rank rank 0's values, in place."""
    if world.size > 1:
        with _together():
            for p in params:
                dist.broadcast(p.data, src=0)


def sum_gradients(params: list[torch.nn.Parameter], world: World) -> None:
    """Sum every parameter's gradient over ranks in one all-reduce of one flat fp32 vector, in place.

    Each rank's loss is already divided by the *global* batch size, so this sum is the gradient of the global mean.
    A missing gradient counts as zero: a rank that has nothing to learn from still joins.
    """
    for p in params:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    if world.size > 1:
        flat = torch.cat([p.grad.reshape(-1).float() for p in params if p.grad is not None])
        with _together():
            dist.all_reduce(flat)
        for p, g in zip(params, flat.split([p.numel() for p in params])):
            p.grad = g.view_as(p).to(p.dtype)


def gather(obj: object, world: World) -> list:
    """Every rank's JSON-able object, in rank order, on every rank. A collective: no rank may skip it."""
    if world.size == 1:
        return [obj]
    data = torch.frombuffer(bytearray(json.dumps(obj).encode()), dtype=torch.uint8).to(world.device)
    sizes = [torch.zeros(1, dtype=torch.long, device=world.device) for _ in range(world.size)]
    with _together():
        dist.all_gather(sizes, torch.tensor([data.numel()], device=world.device))
        longest = max(int(s) for s in sizes)
        parts = [
            torch.zeros(longest, dtype=torch.uint8, device=world.device) for _ in range(world.size)
        ]
        dist.all_gather(parts, torch.nn.functional.pad(data, (0, longest - data.numel())))
    return [json.loads(bytes(part[: int(size)].cpu().numpy())) for part, size in zip(parts, sizes)]


# ------------------------------------------------------------------------------------------------ files


def _sync(path: pathlib.Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def named(path: pathlib.Path) -> Iterator[None]:
    """A write that fails as an OSError with the path, which a full disk leaves out and safetensors' own error too."""
    try:
        yield
    except OSError as e:
        raise OSError(e.errno, e.strerror or str(e), str(path)) from None
    except Exception as e:
        if type(e).__name__ != "SafetensorError":
            raise
        raise OSError(f"{path}: {brief(e)}") from None


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a file so that a kill at any instant leaves the old one or the new one: temporary name, flush, rename."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.tmp")
    with named(path):
        try:
            tmp.write_text(
                text, encoding="utf-8", errors="backslashreplace"
            )  # a lone surrogate becomes its JSON escape
            _sync(tmp)
            tmp.replace(path)
        finally:
            tmp.unlink(missing_ok=True)
        _sync(path.parent)


def write_json(path: str | os.PathLike, obj: object) -> None:
    write_text(path, json.dumps(obj, indent=2, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def whole_directory(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield a temporary sibling to fill; on a clean exit it becomes `path`, on an error nothing is left."""
    tmp = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    try:
        yield tmp
        for file in tmp.rglob("*"):
            _sync(file)
        shutil.rmtree(path, ignore_errors=True)
        tmp.replace(path)
        _sync(path.parent)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def append_jsonl(path: pathlib.Path, rows: Iterable[dict]) -> None:
    """Append one JSON line per row and flush to disk; a kill leaves at most one torn last line, which the next append cuts."""
    with named(path), open(path, "a+b") as f:
        if f.tell() and (f.seek(-1, os.SEEK_END), f.read())[1] != b"\n":
            f.truncate(path.read_bytes().rfind(b"\n") + 1)
        f.writelines(json.dumps(row).encode() + b"\n" for row in rows)
        f.flush()
        os.fsync(f.fileno())


def read_jsonl(path: pathlib.Path) -> list[dict]:
    """The rows of a .jsonl of ours; a last line without its newline was torn by a kill and is left out."""
    if not path.exists():
        return []
    data = path.read_bytes()
    rows = []
    for i, line in enumerate(data[: data.rfind(b"\n") + 1].split(b"\n"), 1):
        try:
            rows += [json.loads(line)] if line else []
        except ValueError as e:
            raise UserError(
                f"{path}:{i}: not a line that was written here ({brief(e)}); mend it or take it out"
            ) from None
    return rows


def trim_jsonl(path: pathlib.Path, step: int, keep: int = 0) -> None:
    """Cut a .jsonl back to the updates of the checkpoint, later ones will be made again; with `keep` to the last so many of them."""
    if path.exists():
        rows = [
            row
            for row in read_jsonl(path)
            if (step - keep if keep else -1) < row.get("step", 0) <= step
        ]
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
