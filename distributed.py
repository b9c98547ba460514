"""One process group, one summed gradient, gathered objects, and work shared over the ranks.

Every rank holds the whole model; there is no wrapper class. No rank may skip a collective. A rank
that fails ends itself, and torchrun ends the others; under a launcher that does not, they wait for
the group's timeout.
"""

import atexit
import contextlib
import datetime
import io
import itertools
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from tqdm import tqdm


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
    """Join the process group that torchrun describes in the environment, or be alone without it.

    device: "auto" (CUDA where there is a GPU), "cpu" or "cuda". On CUDA tensors travel by NCCL, and
    objects by gloo as on CPU. ValueError where torchrun's variables are incomplete, no GPU is left,
    or torch does not find the GPU of a machine that has one.
    """
    rank, size, local = _place()
    here = torch.device("cpu")
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # read at the first use of the device
        # The cache of `generate` grows by concatenation, and fixed blocks soon stop fitting.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # Adapters and encoder are fp32 (S22): TF32, which an image's environment may set, would round.
    torch.set_float32_matmul_precision("highest")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    has_driver = os.path.exists("/proc/driver/nvidia/version") and not hidden
    needs_gpu = device == "cuda" or (device == "auto" and has_driver)
    if needs_gpu and not torch.cuda.is_available():
        fix = "install the build of torch for its CUDA (see pytorch.org), or give --device cpu"
        raise ValueError(f"--device {device}: torch {torch.__version__} finds no GPU; {fix}")
    if device != "cpu" and torch.cuda.is_available():
        count = torch.cuda.device_count()
        if local >= count:
            raise ValueError(f"LOCAL_RANK {local}: there are {count} GPUs; lower --nproc_per_node")
        here = torch.device("cuda", local)
        torch.cuda.set_device(here)
    if "RANK" in os.environ:
        _join(rank, size, here)
    return World(rank, size, here)


def _place() -> tuple[int, int, int]:
    """Rank, number of ranks and rank on this machine; 0, 1, 0 where torchrun did not start this."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    values = [os.environ.get(name, "") for name in names]
    if not any(values):
        return 0, 1, 0
    if not all(map(str.isdecimal, values)) or int(values[0]) >= int(values[1]):
        rule = "must be numbers, and RANK below WORLD_SIZE; start with torchrun, or unset all three"
        raise ValueError(f"{', '.join(names)} are {', '.join(map(repr, values))}: they {rule}")
    rank, size, local = map(int, values)
    return rank, size, local


def _join(rank: int, size: int, here: torch.device) -> None:
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store, *_ = next(dist.rendezvous("env://"))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if here.type == "cuda" else "gloo",
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
        raise ValueError(
            f"could not join the process group at {at} ({e}); start with torchrun, on a free port; "
            "several machines may need GLOO_SOCKET_IFNAME, the interface that joins them"
        ) from None


@contextlib.contextmanager
def checked_on_all_ranks(world: World, *kinds: type[Exception]) -> Iterator[list]:
    """A block that every rank runs and that holds no collective: it fails on all ranks or on none.

    Where a rank's block raises one of these kinds, rank 0 raises its own error, or else one of the
    first kind with the other rank's words. The other ranks exit with code 2, without a line.
    Yields a list; what the blocks of all ranks put into it is in it afterwards, in rank order.
    """
    shared: list = []
    error = None
    try:
        yield shared
    except kinds as e:
        error = e
    message = error and (str(error) or type(error).__name__)
    messages, shares = zip(*all_gather((message, shared), world))
    shared[:] = itertools.chain.from_iterable(shares)
    if not any(messages):
        return
    if not world.main:
        time.sleep(2)  # at the first exit torchrun kills the others: rank 0 has to print first
        raise SystemExit(2)
    if error:
        raise error
    rank, message = next((i, text) for i, text in enumerate(messages) if text)
    raise kinds[0](f"rank {rank}: {message}")


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Run a command and end the process with its exit code.

    In a group it ends at once, as gloo's threads may abort in an orderly teardown.
    """
    code: Any
    in_group = "RANK" in os.environ
    if isinstance(sys.stdout, io.TextIOWrapper):  # a log file, too, shows each line as it comes
        sys.stdout.reconfigure(line_buffering=True)
    try:
        code = main()
    except SystemExit as e:
        code = e.code
    except torch.OutOfMemoryError as e:
        fix = "lower --rollout-rows (in eval.py --rows), --score-tokens or --checkpoint-above"
        line = f"{str(e).partition('. ')[0]}: {fix}; run the same command to continue"
        print(line, file=sys.stderr, flush=True)
        code = 1
    except BaseException:
        if not in_group:
            raise
        traceback.print_exc()
        code = 1
    if in_group:
        atexit._run_exitfuncs()  # trackers close their writers there
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    sys.exit(code)


def broadcast_parameters(params: Iterable[torch.Tensor], world: World) -> None:
    """Give every rank rank 0's values, in place."""
    if world.size > 1:
        for p in params:
            dist.broadcast(p.data, src=0)


def sum_gradients(params: Iterable[torch.nn.Parameter], world: World) -> None:
    """Sum the gradients over ranks in one all-reduce of one flat fp32 vector, in place.

    Each rank's loss is already divided by the *global* batch size, so the sum is the gradient of
    the global mean. A missing gradient counts as zero: a rank without any still joins.
    """
    params = list(params)
    barrier(world)  # where a rank has failed, this raises; an all-reduce on GPUs would wait
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    flat = torch.cat([g.flatten().float() for g in gradients])
    if world.size > 1:
        dist.all_reduce(flat)
    for p, part in zip(params, flat.split([p.numel() for p in params])):
        p.grad = part.view_as(p).to(p.dtype)


def all_gather(obj: Any, world: World) -> list:
    """Every rank's object, in rank order, on every rank."""
    if world.size == 1:
        return [obj]
    objects: list = [None] * world.size
    dist.all_gather_object(objects, obj)
    return objects


def refuse_other_commands(commands: Sequence[dict[str, Any]]) -> None:
    """ValueError unless all processes have the same settings. commands: of each rank, by flag."""
    for rank, theirs in enumerate(commands):
        for name, value in commands[0].items():
            if theirs[name] != value:
                rule = f"rank 0 has {value!r}, and rank {rank} {theirs[name]!r}"
                raise ValueError(f"{name}: {rule}; give every process the same command")


def broadcast(obj: Any, world: World) -> Any:
    """Rank 0's object, on every rank."""
    if world.size == 1:
        return obj
    objects = [obj]
    dist.broadcast_object_list(objects, src=0)
    return objects[0]


def gathered(rows: list[dict], world: World) -> list[dict]:
    """The rows of all ranks, in the order of their "index", on every rank."""
    return sorted(
        itertools.chain.from_iterable(all_gather(rows, world)), key=lambda row: row["index"]
    )


def barrier(world: World) -> None:
    """Wait until every rank is here."""
    all_gather(None, world)


def progress_bar(world: World, stage: str, total: int = 0) -> tqdm:
    """Rank 0's progress bar of a stage; hidden where the stage has no name.

    A bar whose total is still 0 shows nothing before its first update.
    """
    seconds = 0.1 if sys.stderr.isatty() else 60  # from one print to the next: few in a log file
    hidden, delay = not (stage and world.main), 0 if total else 1e-3
    return tqdm(desc=stage, total=total, disable=hidden, mininterval=seconds, delay=delay)


def share_jobs(
    world: World,
    jobs: Sequence[Any],
    work: Callable[[list], Iterator[list]],
    stage: str = "",
) -> Iterator[list]:
    """Work on jobs on all ranks, each its share: what all of them have finished, turn by turn.

    jobs: objects with a .prompt; the ranks take them in turn, ordered by its length. work: from a
    rank's jobs to turns, lists of one picklable result for each job that is done. Every rank gets
    every result, and must ask for all turns: each is a collective. stage: the name of a progress
    bar. Raises OSError as `checked_on_all_ranks` does.
    """
    mine = sorted(jobs, key=lambda job: len(job.prompt))[world.rank :: world.size]
    turns, left = work(mine), len(jobs)
    with progress_bar(world, stage if jobs else "", left) as bar:
        while left:
            with checked_on_all_ranks(world, OSError) as results:  # a server may be lost
                results += next(turns, [])
            left -= len(results)
            bar.update(len(results))
            yield results
