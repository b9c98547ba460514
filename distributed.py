"""One process group, one summed gradient, and objects that travel between ranks as JSON.

Every rank holds the whole model; there is no wrapper class. Nothing is pickled, and nothing here
knows the method. torch is imported where it is used, since a command that is answered before its
slow imports passes through here.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import files
from cli import SharedError, UserError, brief

if TYPE_CHECKING:
    import torch


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
    """SharedError on every rank unless all see the same value, as on a shared file system.

    It is also where the ranks wait for one another: what rank 0 writes afterwards, none of them
    can still be about to read.
    """
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
    for message in gather(error, world):
        if message:
            raise SharedError(message)


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


@contextlib.contextmanager
def locked(folder: pathlib.Path, world: World) -> Iterator[None]:
    """Keep a folder to this process group; UserError on all ranks while another one is in it.

    Rank 0 holds the lock. The others learn in one exchange whether it got it.
    """
    with contextlib.ExitStack() as held:
        with errors_shared(world):
            if world.main:
                held.enter_context(files.locked(folder))
        yield
