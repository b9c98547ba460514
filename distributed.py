"""One process group, one summed gradient, gathered objects, and work shared over the ranks.

Every rank holds the whole model; there is no wrapper class. No rank may skip a collective. A rank
that fails says why and ends. Then torchrun ends the others, or else their next collective does.
"""

import atexit
import datetime
import io
import itertools
import os
import sys
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
    objects by gloo as on CPU. ValueError where the group cannot be joined, no GPU is left, or torch
    does not find the GPU of a machine that has one.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_RANK", 0))
    here = torch.device("cpu")
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # read at the first use of the device
        # The cache of `generate` moves to ever longer buffers; fixed blocks soon stop fitting.
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


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Run a command and end the process with its exit code.

    In a group it ends at once, as gloo's threads may abort in an orderly teardown.
    """
    code: Any = 1
    if isinstance(sys.stdout, io.TextIOWrapper):  # a log file, too, shows each line as it comes
        sys.stdout.reconfigure(line_buffering=True)
    try:
        code = main()
    except SystemExit as e:
        code = e.code
    except torch.OutOfMemoryError as e:
        fix = (
            "lower what goes at a time (--rollout-rows, --score-tokens, --checkpoint-above; in "
            "eval.py --rows; on TRL --backward-rows, --score-rows); run the same command to "
            "continue"
        )
        print(f"{str(e).partition('. ')[0]}: {fix}", file=sys.stderr, flush=True)
    except BaseException:
        traceback.print_exc()
    if "RANK" in os.environ:
        atexit._run_exitfuncs()  # trackers close their writers there
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    sys.exit(code)


def broadcast_parameters(params: Iterable[torch.Tensor], world: World) -> None:
    """Give every rank rank 0's values, in place."""
    barrier(world)  # as in `sum_gradients`
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
    objects: list = [obj] * world.size
    if world.size > 1:
        _ending_with_the_others(world, dist.all_gather_object, objects, obj)
    return objects


def broadcast(obj: Any, world: World) -> Any:
    """Rank 0's object, on every rank."""
    objects = [obj]
    if world.size > 1:
        _ending_with_the_others(world, dist.broadcast_object_list, objects, src=0)
    return objects[0]


def _ending_with_the_others(world: World, collective: Callable, *args: Any, **given: Any) -> None:
    """Call a collective of gloo; end this process where another one has ended, and said why."""
    try:
        collective(*args, **given)
    except RuntimeError as e:  # gloo's, as a connection was closed
        if "TORCHELASTIC_RUN_ID" not in os.environ:  # torchrun tells which one ended
            line = f"rank {world.rank}: another process has ended, so this one ends ({e})"
            print(" ".join(line.split()), file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def refuse_other_commands(commands: Sequence[dict[str, Any]]) -> None:
    """ValueError unless all processes have the same settings. commands: of each rank, by flag."""
    for rank, theirs in enumerate(commands):
        for name, value in commands[0].items():
            if theirs[name] != value:
                rule = f"rank 0 has {value!r}, and rank {rank} {theirs[name]!r}"
                raise ValueError(f"{name}: {rule}; give every process the same command")


def gathered(rows: list[dict], world: World) -> list[dict]:
    """The rows of all ranks, in the order of their "index", on every rank."""
    return sorted(
        itertools.chain.from_iterable(all_gather(rows, world)), key=lambda row: row["index"]
    )


def barrier(world: World) -> None:
    """Wait until every rank is here."""
    all_gather(None, world)


def share_jobs(
    world: World,
    jobs: Sequence[Any],
    work: Callable[[list], Iterator[list]],
    stage: str = "",
) -> Iterator[list]:
    """Work on jobs on all ranks, each its share: what all of them have finished, turn by turn.

    jobs: objects with a .prompt; the ranks take them in turn, ordered by its length. work: from a
    rank's jobs to turns, lists of one picklable result for each job that is done. Every rank gets
    every result, and must ask for all turns: each is a collective. stage: the name of rank 0's
    progress bar; "" for none.
    """
    mine = sorted(jobs, key=lambda job: len(job.prompt))[world.rank :: world.size]
    turns, left = work(mine), len(jobs)
    seconds = 0.1 if sys.stderr.isatty() else 60  # from one print to the next: few in a log file
    hidden = not (stage and jobs and world.main)
    with tqdm(desc=stage, total=left, disable=hidden, mininterval=seconds, leave=False) as bar:
        while left:
            results = [*itertools.chain.from_iterable(all_gather(next(turns, []), world))]
            left -= len(results)
            bar.update(len(results))
            yield results
