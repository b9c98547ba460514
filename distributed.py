"""One process group, one summed gradient, gathered objects, and work shared over the ranks.

Every rank holds the whole model; there is no wrapper class. No rank may skip a collective. A rank
that fails prints why and exits. Then torchrun ends the others, or their next collective ends them.
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
    """Join the process group that torchrun describes in the environment, if any; else run alone.

    device: "auto" (CUDA where there is a GPU), "cpu" or "cuda". On CUDA, tensors travel by NCCL and
    objects by gloo; on CPU all travels by gloo. ValueError if torch finds no GPU for "cuda", or for
    "auto" on a machine that has one. Torch itself raises for a used port and for more processes
    than GPUs.
    """
    rank = int(os.environ.get("RANK", 0))
    size = int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_RANK", 0))
    here = torch.device("cpu")
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the same setting
        # The cache of `generate` keeps moving to longer buffers, which soon fit no fixed block.
        # (torch reads this at the first use of the device.)
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # Adapters and encoder are fp32 (S22). A container may turn on TF32, which would round them.
    torch.set_float32_matmul_precision("highest")
    # Since torch 2.11, Hopper GPUs prefer cuDNN's attention. It makes a new plan for every length,
    # so for each decoded token, and its backward pass under a mask gave NaN (pytorch#196678; S25).
    torch.backends.cuda.enable_cudnn_sdp(False)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    has_driver = os.path.exists("/proc/driver/nvidia/version") and not hidden
    needs_gpu = device == "cuda" or (device == "auto" and has_driver)
    if needs_gpu and not torch.cuda.is_available():
        fix = "install the build of torch for its CUDA (see pytorch.org), or take the device cpu"
        raise ValueError(f"device {device}: torch {torch.__version__} finds no GPU; {fix}")
    if device != "cpu" and torch.cuda.is_available():
        here = torch.device("cuda", local)
        torch.cuda.set_device(here)
    if "RANK" in os.environ:
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store, *_ = next(dist.rendezvous("env://"))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if here.type == "cuda" else "gloo",
            # After a restart by `torchrun --max-restarts` the store still holds old addresses.
            store=dist.PrefixStore(restart, store),
            rank=rank,
            world_size=size,
            device_id=here if here.type == "cuda" else None,
            # Ranks may wait hours for each other: one of them can draw all the long completions.
            timeout=datetime.timedelta(hours=12),
        )
    return World(rank, size, here)


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Run a command and end the process with its exit code.

    In a process group we skip Python's teardown, because gloo's threads may abort during it.
    """
    code: Any = 1
    if isinstance(sys.stdout, io.TextIOWrapper):  # so that a log file shows each line at once
        sys.stdout.reconfigure(line_buffering=True)
    try:
        code = main()
    except SystemExit as e:
        code = e.code
    except torch.OutOfMemoryError as e:
        fix = "lower what goes at a time (docs/guide.md); run the same command to continue"
        print(f"{str(e).partition('. ')[0]}: {fix}", file=sys.stderr, flush=True)
    except BaseException:
        traceback.print_exc()
    if "RANK" in os.environ:
        atexit._run_exitfuncs()  # in which trackers close their writers
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    sys.exit(code)


def broadcast_parameters(params: Iterable[torch.Tensor], world: World) -> None:
    """Copy rank 0's values to every rank, in place."""
    barrier(world)  # raises if a rank has failed; a broadcast on GPUs would wait for it
    if world.size > 1:
        for p in params:
            dist.broadcast(p.data, src=0)


def sum_gradients(params: Iterable[torch.nn.Parameter], world: World) -> None:
    """Sum the gradients over ranks in one all-reduce of one flat fp32 vector, in place.

    Each rank's loss is already divided by the *global* batch size, so the sum is the gradient of
    the global mean. A missing gradient counts as zero: a rank without any still takes part.
    """
    params = list(params)
    barrier(world)  # raises if a rank has failed; an all-reduce on GPUs would wait for it
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
        _or_exit(world, dist.all_gather_object, objects, obj)
    return objects


def broadcast(obj: Any, world: World) -> Any:
    """Rank 0's object, on every rank."""
    objects = [obj]
    if world.size > 1:
        _or_exit(world, dist.broadcast_object_list, objects, src=0)
    return objects[0]


def _or_exit(world: World, collective: Callable, *args: Any, **given: Any) -> None:
    """Call a gloo collective. If another process has ended (it printed why), end this one, too."""
    try:
        collective(*args, **given)
    except RuntimeError as e:  # from gloo, if a connection was closed
        if "TORCHELASTIC_RUN_ID" not in os.environ:  # else torchrun says which process ended
            line = f"rank {world.rank}: another process has ended, so this one ends ({e})"
            print(" ".join(line.split()), file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def refuse_other_files(digest: str, world: World) -> None:
    """ValueError unless this digest of a model's files is the same on all ranks."""
    if len({*all_gather(digest, world)}) > 1:
        raise ValueError("the processes read different files of the model; copy them anew")


def gathered(rows: list[dict], world: World) -> list[dict]:
    """All ranks' rows of a log, on every rank, in the order of their "index"."""
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
    """Divide jobs among the ranks. Each turn yields, on every rank, what all ranks finished in it.

    jobs: objects with a .prompt, dealt out one by one in the order of its length. work: takes a
    rank's jobs and yields turns: lists with one picklable result for each finished job. Every rank
    gets every result, and must consume all turns, because each is a collective. stage: label of
    rank 0's progress bar on a terminal; "" for none.
    """
    mine = sorted(jobs, key=lambda job: len(job.prompt))[world.rank :: world.size]
    turns = work(mine)
    left = len(jobs)
    hidden = not (stage and jobs and world.main and sys.stderr.isatty())
    with tqdm(desc=stage, total=left, disable=hidden, leave=False) as bar:
        while left:
            results = [*itertools.chain.from_iterable(all_gather(next(turns, []), world))]
            left -= len(results)
            bar.update(len(results))
            yield results
    # All results are there, but a rank's `turns` may still wait at its last yield. When we return,
    # Python closes it, and the `finally` of `rollout.stream` restores the model's mode.
