"""Qwen3-1.7B's shape on a GPU, with random weights and no hub: where do the milliseconds go?

    python research/speed/large.py step       two steps of SGSD, torch.profiler; again on two GPUs
    python research/speed/large.py row        one row of 38,912 tokens: seconds and peak memory
    python research/speed/large.py rows       as many rows as fit: how many, hours and peak memory
    python research/speed/large.py decode     ms a token: base, adapters, four remedies
    python research/speed/large.py attention  fp32 under grouped queries; cuDNN without a mask
    python research/speed/large.py masks      rows that are masked whole give no NaN

With --cpu the same in small, to rehearse it. The host's share of a step is the part of its wall
time in which the GPU ran no kernel.
"""

import argparse
import importlib.util
import itertools
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from transformers import AutoTokenizer, StaticCache

import distributed
import rollout
import scoring
import sgsd
import skills
from lib import command, config
from lib import model as models
from lib.run import Run
from research.cost.counts import QWEN3
from research.cost.hours import CARDS, GPUS, Row, drawing, jobs_of, log_normal, turn_seconds, turns
from research.markdown_table import head_of, row_of
from research.speed.bench import (
    NO_STOPS,
    SHAPES,
    clock,
    random_model,
    seconds_of,
    static,
    stop_after,
)

Args = argparse.Namespace
ON_H100 = QWEN3["Qwen3-1.7B"], CARDS["h100"]


def made(args: Args, device: torch.device) -> Any:
    """A random model; its vocabulary holds that of tiny/'s tokenizer, in small, too."""
    if args.cpu:
        return random_model(SHAPES["tiny"], device, vocab=1024)
    return random_model(SHAPES["qwen3-1.7b"], device)


def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(ROOT / "tiny" / "model")


# ------------------------------------------------------------------------------------------- step


def step(args: Args, device: torch.device) -> None:
    """Profile two steps on one GPU; where there are two, run them there once more."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        stop_after(made(args, device), 0).save_pretrained(folder / "model")
        tokenizer().save_pretrained(folder / "model")
        words = f"--preset tiny --model {folder / 'model'} --bank {ROOT}/banks/word_problems.json"
        words += f" --steps 2 --evolve-every 0 --audit-every 0 --device {device.type}"
        words += f" --batch-size {4 if args.cpu else 32} --max-new-tokens {8 if args.cpu else 64}"
        words += " --rollout-rows 32 --num-teachers 8 --lora-rank 64 --lora-alpha 128"
        profiled(words + f" --out {folder / 'one'}", device)
        if torch.cuda.device_count() > 1:
            command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
            command += ["sgsd.py", *f"{words} --out {folder / 'two'}".split()]
            done = subprocess.run([sys.executable, *command], cwd=ROOT)
            print(f"\ntwo GPUs: exit code {done.returncode}")


def profiled(words: str, device: torch.device) -> None:
    """Run sgsd.py's steps, and print the ten longest kernels of the second one."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    cfg = command.parse(words.split(), None, config.Config, config.PRESETS)

    def step_fn(run: Run, number: int) -> tuple[list[dict], float]:
        if number < cfg.steps:  # it warms up
            return sgsd.train_step(run, number)
        with profile(activities=activities) as watched:
            began = clock(device)
            result = sgsd.train_step(run, number)
            seconds = clock(device) - began
        print_kernels(watched, seconds, device)
        return result

    with Run.open(cfg, skills.SkillBank.load, sgsd.student_prompt) as run:
        if device.type == "cuda":  # as distributed.init asks for
            allocator = torch.cuda.memory._snapshot()["allocator_settings"]
            assert allocator["expandable_segments"], allocator
        if sgsd.train(run, step_fn):
            raise RuntimeError("the run ended early")


def print_kernels(watched: Any, seconds: float, device: torch.device) -> None:
    on_gpu = device.type == "cuda"
    name = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    rows = sorted(watched.key_averages(), key=lambda row: -getattr(row, name))
    total = sum(getattr(row, name) for row in rows) / 1e6
    print(f"\na step takes {seconds:.2f} s; kernels {total:.2f} s", end="")
    print(f", so the host's share is {max(0.0, 1 - total / seconds):.0%}\n" if on_gpu else "\n")
    print("\n".join(head_of(["kernel", "calls", "ms", "share"])))
    for row in rows[:10]:
        ms = getattr(row, name) / 1e3
        print(row_of([row.key[:60], row.count, f"{ms:.1f}", f"{ms / 1e3 / total:.0%}"]))


# ---------------------------------------------------------------------------------- row and decode


Ids = list[list[int]]
Decode = Callable[[Any, Ids, rollout.Sampling, list[int]], Ids]  # model, prompts, sampling, keys


def streamed(model: Any, prompts: Ids, sampling: rollout.Sampling, keys: list[int]) -> Ids:
    """As we decode today."""
    return rollout.generate(model, NO_STOPS, prompts, sampling, keys)


def with_static_cache() -> Decode:
    """`generate` on a cache of a fixed size, which all calls share: CUDA graphs keep addresses.

    On CUDA `generate` then compiles the model's call by itself; drawing stays outside.
    """
    kept: dict[int, StaticCache] = {}  # by its length

    def decode(model: Any, prompts: Ids, sampling: rollout.Sampling, keys: list[int]) -> Ids:
        causal, length = rollout.causal_lm(model), len(prompts[0]) + sampling.max_new_tokens
        cache = kept.setdefault(length, StaticCache(causal.config, length))
        cache.reset()
        return static(causal, prompts, keys, len(prompts), sampling, True, cache)

    return decode


def decoded(
    model: Any, tokens: int, rows: int, device: torch.device, decode: Decode = streamed
) -> tuple[float, Ids]:
    """Seconds in which rows of so many tokens are decoded, and their ids."""
    stop_after(model, 0)
    prompts, keys = [list(range(5, 69))] * rows, list(range(rows))
    sampling = rollout.Sampling(max_new_tokens=tokens)
    began = clock(device)
    ids = decode(model, prompts, sampling, keys)
    seconds = clock(device) - began
    assert {*map(len, ids)} == {tokens}
    return seconds, ids


def row(args: Args, device: torch.device) -> None:
    tokens = 64 if args.cpu else 38912
    seconds, _ = decoded(made(args, device), tokens, 1, device)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    print(
        f"one row of {tokens:,} tokens: {seconds:.0f} s, {1000 * seconds / tokens:.1f} ms a token"
    )
    print(f"peak memory {peak:.1f} GiB")


def rows(args: Args, device: torch.device) -> None:
    """Streams of as many rows as fit: one fills the card, one is an evaluation in small.

    That has a sixteenth of the tokens of one GPU's share, in a sixteenth of the cache. "expected"
    are the seconds that hours.py counts for the same turns on an H100.
    """
    model = models.with_adapters(made(args, device), 64, 128, 1 << 30)
    causal = stop_after(rollout.causal_lm(model), 0)
    places = rollout.cache_places(device, rollout.cache_bytes(causal)[0])
    count, prompt, tokens, part = int(places / 16_000) + 4, 16_000, 192, 16
    if args.cpu:
        places, count, prompt, tokens, part = 28_300, 8, 3_900, 40, 64
    lengths = log_normal(10 if args.cpu else 135, 38_912)
    cases = {
        "full": (places, [(prompt, tokens)] * count),
        "evaluation": (places / part, [(200 // part, length // part) for length in lengths]),
    }
    columns = "case | most rows | mean | rows read | passes | seconds | expected | peak, GB"
    print("\n".join(head_of(columns.split(" | "))))
    for name, (room, shapes) in cases.items():
        seconds, expected = watched_stream(name, model, shapes, room, device)
    nine = 9 * drawing(*ON_H100, jobs_of(200, 38_912, 1080, log_normal), GPUS, 64, True)[1]
    print(f"\nnine evaluations: {nine:.1f} hours, at this rate {nine * seconds / expected:.1f}")
    if device.type == "cuda":
        print(f"the card has {torch.cuda.get_device_properties(device).total_memory / 1e9:.1f} GB")


def watched_stream(
    name: str, model: Any, shapes: list[tuple[int, int]], places: float, device: torch.device
) -> tuple[float, float]:
    """Print a stream's line; its seconds and the expected ones. shapes: prompt, completion."""
    jobs, rows_of_passes, read = [], [], 0
    for i, (prompt, new) in enumerate(shapes):
        ids = [5 + (17 * i + 31 * place) % 900 for place in range(prompt)]
        jobs.append(rollout.Job(i, ids, key=i, limit=new))

    def note(_: Any, args: Any, given: dict) -> None:
        nonlocal read
        count, n = given["input_ids"].shape
        if n > 1:
            read += count
        else:
            rows_of_passes.append(count)

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    hook = rollout.causal_lm(model).register_forward_pre_hook(note, with_kwargs=True)
    began = clock(device)
    for _ in rollout.stream(model, NO_STOPS, jobs, rollout.Sampling(), 64, places):
        pass
    seconds = clock(device) - began
    hook.remove()
    turn = rollout.TURN_TOKENS.get(device.type, 64)
    by_length = [Row(prompt, new, new) for prompt, new in shapes]
    expected = sum(turn_seconds(*ON_H100, x) for x in turns(by_length, 64, places, turn))
    peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
    mean = sum(rows_of_passes) / len(rows_of_passes)
    cells = [name, max(rows_of_passes), f"{mean:.1f}", read, len(rows_of_passes)]
    print(row_of([*cells, f"{seconds:.1f}", f"{expected:.1f}", f"{peak:.1f}"]), flush=True)
    return seconds, expected


def compiled(model: Any) -> Any:
    for layer in scoring.causal_lm(model).model.layers:
        layer.compile(dynamic=True)
    return model


def decode(args: Args, device: torch.device) -> None:
    """Milliseconds a token of 16 rows, with and without adapters, and what remedies gain.

    "same" are the rows whose samples are those of the adapters' row: all in exact arithmetic.
    """
    tokens, rows = (8, 2) if args.cpu else (256, 16)

    def adapted() -> Any:
        return models.with_adapters(made(args, device), 64, 128, 1 << 30)

    def liger() -> Any:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3()
        return adapted()

    ways: dict[str, tuple[Callable[[], Any], Decode]] = {
        "adapters": (adapted, streamed),
        "adapters, static cache": (adapted, with_static_cache()),
        "base": (lambda: made(args, device), streamed),
        "base, static cache": (lambda: made(args, device), with_static_cache()),
    }
    if not args.cpu:
        ways["adapters, layer.compile(dynamic=True)"] = lambda: compiled(adapted()), streamed
    if importlib.util.find_spec("liger_kernel") and not args.cpu:
        ways["adapters, Liger's kernels"] = liger, streamed  # the last one: it changes the classes
    print("\n".join(head_of(["way", "ms a token", "of adapters alone", "same"])))
    alone: tuple[float, Ids] | None = None  # the first way's
    for name, (make, how) in ways.items():
        try:
            model = make()
            decoded(model, tokens, rows, device, how)  # warms up, and compiles
            seconds, ids = decoded(model, tokens, rows, device, how)
        except Exception as e:  # one try each
            print(row_of([name, f"{type(e).__name__}: {str(e)[:80]}", "", ""]))
            continue
        alone = alone or (seconds, ids)
        same = sum(ours == theirs for ours, theirs in zip(ids, alone[1]))
        ratio = f"{seconds / alone[0]:.2f}"
        cells = [name, f"{1000 * seconds / tokens:.2f}", ratio, f"{same} of {rows}"]
        print(row_of(cells), flush=True)
    print("\na remedy is kept if it is below 0.80")


# -------------------------------------------------------------------------------------- attention


def attention(args: Args, device: torch.device) -> None:
    """A layer's causal attention without a mask, forward and backward, as transformers calls it.

    In fp32 under grouped queries there may be no kernel but one that holds all scores. cuDNN's is
    off in a run, because it gave NaN under masks.
    """
    print("\n".join(head_of(["dtype", "keys", "cuDNN", "ms", "peak MiB", "finite"])))
    for dtype, keys, cudnn in itertools.product(
        ("bfloat16", "float32"), ("grouped", "repeated"), ("off", "on")
    ):
        torch.backends.cuda.enable_cudnn_sdp(cudnn == "on")
        measured = attended(args, device, getattr(torch, dtype), keys == "grouped")
        print(row_of([dtype, keys, cudnn, *measured]), flush=True)
    torch.backends.cuda.enable_cudnn_sdp(False)


def attended(args: Args, device: torch.device, dtype: torch.dtype, grouped: bool) -> list[object]:
    """Milliseconds, MiB above queries, keys and gradients, and whether these are finite."""
    rows, n = (2, 16) if args.cpu else (8, 1424)
    how: dict[str, Any] = {"dtype": dtype, "device": device, "requires_grad": True}
    queries = torch.randn(rows, 16, n, 128, **how)
    keys = torch.randn(rows, 8 if grouped else 16, n, 128, **how)

    def once() -> None:
        out = scaled_dot_product_attention(queries, keys, keys, is_causal=True, enable_gqa=grouped)
        out.float().square().sum().backward()

    once()
    peak = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    seconds = seconds_of(once, device, 5)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() - before
    finite = all(x.grad.isfinite().all() for x in (queries, keys))
    return [f"{1000 * seconds:.2f}", f"{peak / 2**20:.0f}", finite]


# ------------------------------------------------------------------------------------------ masks


def masks(args: Args, device: torch.device) -> None:
    """Forward and backward with a row of padding alone in the batch: no NaN, and the same numbers.

    cuDNN's attention gave NaN in the backward pass of such rows (pytorch#196678).
    """
    model = models.with_adapters(made(args, device), 16, 32, 1 << 30)
    lengths = (7, 300, 40)
    prompts = [list(range(5, 5 + n)) for n in lengths]
    ids = [list(range(100, 100 + n)) for n in (50, 3, 20)]
    logp = scoring.token_logprobs(model, prompts, ids, grad=True)
    logp.sum().backward()
    grads = [p.grad for p in models.trained(model).values() if p.grad is not None]
    assert torch.isfinite(logp).all() and all(torch.isfinite(g).all() for g in grads)
    x = torch.randint(5, 900, (2, 64), device=device)
    mask = torch.ones_like(x)
    mask[1] = 0  # masked whole
    out = model(input_ids=x, attention_mask=mask, use_cache=False).logits
    out[0].float().sum().backward()
    assert torch.isfinite(out[0]).all(), "NaN beside a row that is masked whole"
    assert all(torch.isfinite(g).all() for g in grads), "NaN in the gradient"
    alone = model(input_ids=x[:1], use_cache=False).logits
    gap = float((out[0] - alone[0]).detach().abs().max())
    print(f"no NaN; beside a row that is masked whole the logits differ by {gap:.1e}")


MODES: dict[str, Callable[[Args, torch.device], None]] = {
    "step": step,
    "row": row,
    "rows": rows,
    "decode": decode,
    "attention": attention,
    "masks": masks,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=MODES)
    parser.add_argument("--cpu", action="store_true", help="a rehearsal, in small")
    args = parser.parse_args(argv)
    device = distributed.init("cpu" if args.cpu else "cuda").device
    began = time.perf_counter()
    MODES[args.what](args, device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"\n{name}, torch {torch.__version__}: {time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
