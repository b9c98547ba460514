"""Decoding before and after a change, in one run: processor seconds, and the memory of the cache.

    python research/speed/paired.py OLD stream          8 rows at contexts of 256, 1,024 and 4,096
    python research/speed/paired.py OLD storages        bytes held at 4,096, of those in use
    python research/speed/paired.py OLD model DIR       8 solutions of a real model, to 400 tokens
    python research/speed/paired.py OLD demo            sgsd.py --preset tiny, each three times

OLD: a checkout of the commit before. One thread (OMP_NUM_THREADS=1), user and system time.
"generate" is transformers' own, with its own cache and our draws. Of `stream` all ways are measured
in turn, --repeats times, and the least counts; a token takes from its pass to the next one.
"""

import argparse
import gc
import importlib.util
import json
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
from torch.overrides import TorchFunctionMode
from transformers import GenerationConfig

import rollout
import skills
from lib import model as models
from research.markdown_table import head_of, row_of
from research.speed.bench import NO_STOPS, Shape, machine, random_model, static, stop_after

# A narrow model whose cache is that of four layers of Qwen3-1.7B.
NARROW = Shape(256, 4, 768, 16, 128, T=0, vocab=8192)
DEEP = Shape(32, 28, 48, 2, 16, T=0, vocab=8192)  # with its number of layers
ROWS = 8


def loaded(tree: pathlib.Path) -> Any:
    """The rollout.py of a checkout, which imports nothing of ours."""
    spec: Any = importlib.util.spec_from_file_location("rollout_before", tree / "rollout.py")
    module = sys.modules["rollout_before"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn(way: Any, lm: Any, prompts: list[list[int]], limits: list[int], tokenizer: Any) -> list:
    """The ids of each prompt. way: a rollout.py; or None, for `generate` in batches of ROWS."""
    sampling, keys = rollout.Sampling(max_new_tokens=max(limits)), list(range(len(prompts)))
    if way is None:
        return static(lm, prompts, keys, ROWS, sampling, True)
    jobs = [way.Job(i, prompt, i, limits[i]) for i, prompt in enumerate(prompts)]
    for _ in way.stream(lm, tokenizer, jobs, sampling, ROWS):
        pass
    return [job.ids for job in jobs]


def prompts_of(count: int, length: int) -> list[list[int]]:
    return [[5 + (17 * i + 31 * place) % 8000 for place in range(length)] for i in range(count)]


def stream(ways: dict[str, Any], repeats: int) -> Iterator[list[object]]:
    """Milliseconds a token: from the first pass over single tokens to the last."""
    lm = stop_after(random_model(NARROW, torch.device("cpu")), 0)
    times: list[float] = []

    def note(_: Any, args: Any, given: dict) -> None:
        if len(given["input_ids"]) == ROWS and given["input_ids"].shape[1] == 1:
            times.append(time.process_time())

    lm.register_forward_pre_hook(note, with_kwargs=True)
    for context in (256, 1024, 4096):
        prompts, least = prompts_of(ROWS, context), dict.fromkeys(ways, float("inf"))
        for _ in range(repeats):
            for name, way in ways.items():
                times.clear()
                ids = drawn(way, lm, prompts, [65] * ROWS, NO_STOPS)
                assert {*map(len, ids)} == {65}
                least[name] = min(least[name], (times[-1] - times[0]) / (len(times) - 1))
        yield [context, *[f"{1000 * least[name]:.1f}" for name in ways]]


class Watch(TorchFunctionMode):
    """Notes the bytes that are alive where rows join and leave, outside of `generate`."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def look(self) -> None:
        storages = {}
        for x in gc.get_objects():
            if type(x) is torch.Tensor:
                storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        self.most = max(self.most, sum(storages.values()))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch.is_inference_mode_enabled():
            self.look()
        return func(*args, **(kwargs or {}))


def storages(ways: dict[str, Any]) -> Iterator[list[object]]:
    """The most that is alive, of ROWS rows' keys and values: one leaves, another joins."""
    lm = stop_after(random_model(DEEP, torch.device("cpu")), 0)
    cache = ROWS * (4096 + 40) * rollout.cache_bytes(lm)[0]
    for name in ("before", "after"):
        gc.collect()
        gc.freeze()
        with Watch() as watch:
            drawn(ways[name], lm, prompts_of(ROWS + 1, 4096), [40] * 7 + [20, 40], NO_STOPS)
        gc.unfreeze()
        yield [name, f"{watch.most / cache:.2f}"]


def model(ways: dict[str, Any], folder: str) -> Iterator[list[object]]:
    """Seconds of the whole, and how many completions are the same. Both streams turn by turn."""
    lm, tokenizer = models.load_model(folder, "cpu")
    lm.generation_config = GenerationConfig(eos_token_id=lm.generation_config.eos_token_id)
    prompts, jobs, streams = [], {}, {}
    for line in open(ROOT / "tiny/test.jsonl").readlines()[:ROWS]:
        text = skills.render_student(json.loads(line)["problem"])
        prompts.append(rollout.chat_ids(tokenizer, text, thinking="closed"))
    sampling = rollout.Sampling(max_new_tokens=400)
    for name in ("before", "after"):
        way = ways[name]
        jobs[name] = [way.Job(i, prompt, i, 400) for i, prompt in enumerate(prompts)]
        streams[name] = way.stream(lm, tokenizer, jobs[name], sampling, ROWS)
    seconds, waiting = dict.fromkeys(ways, 0.0), [*streams]
    while waiting:
        for name in [*waiting]:
            began = time.process_time()
            if next(streams[name], None) is None:
                waiting.remove(name)
            seconds[name] += time.process_time() - began
    ids = {name: [job.ids for job in jobs[name]] for name in jobs}
    began = time.process_time()
    ids["generate"] = static(lm, prompts, [*range(ROWS)], ROWS, sampling, True)
    seconds["generate"] = time.process_time() - began
    for name in ways:
        same = sum(a == b for a, b in zip(ids[name], ids["after"]))
        yield [name, f"{seconds[name]:.1f}", sum(map(len, ids[name])), f"{same} of {ROWS}"]


def demo(trees: dict[str, pathlib.Path]) -> Iterator[list[object]]:
    """Seconds of each run in turn."""
    for name in ("before", "after", "after", "before", "before", "after"):
        with tempfile.TemporaryDirectory() as folder:
            began = resource.getrusage(resource.RUSAGE_CHILDREN)
            command = [sys.executable, "sgsd.py", "--preset", "tiny", "--out", f"{folder}/run"]
            subprocess.run(command, cwd=trees[name], check=True, capture_output=True)
            ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        user, system = ended.ru_utime - began.ru_utime, ended.ru_stime - began.ru_stime
        yield [name, f"{user + system:.1f}"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("old", type=pathlib.Path)
    parser.add_argument("what", choices=("stream", "storages", "model", "demo"))
    parser.add_argument("folder", nargs="?", default="")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    ways = {"before": loaded(args.old), "after": rollout, "generate": None}
    tables = {
        "stream": ("context, tokens | before | after | generate", stream, [ways, args.repeats]),
        "storages": ("way | held, of the cache", storages, [ways]),
        "model": ("way | seconds | tokens | same", model, [ways, args.folder]),
        "demo": ("way | seconds", demo, [{"before": args.old, "after": ROOT}]),
    }
    columns, rows, given = tables[args.what]
    print(f"{machine(torch.device('cpu'))}\n")
    print("\n".join(head_of(columns.split(" | "))), flush=True)
    for row in rows(*given):
        print(row_of(row), flush=True)


if __name__ == "__main__":
    main()
