"""What must be checked on a GPU, step by step, logged to a folder; a failed step does not end it.

    python research/speed/gpu.py OUT          first_minutes.py, in twelve minutes; large.py decode
                                              and attention; then tests, runs of tiny, bench.py
                                              --cuda, the rest of large.py
    python research/speed/gpu.py OUT --cpu    the same in small without a GPU, to rehearse it

Two runs with one seed in fp32 should sample the same ids; the last line counts those that do. A
step may take nine minutes, and --steps names those of a call. A step's output goes to OUT/STEP.txt,
and two tables to the terminal: what the first minutes took and were expected to take, and each step
with its exit code and its seconds. Real learning is a command of its own,
`research/real_model/real_world.py`.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from research.markdown_table import head_of

LIMIT = 540  # seconds of a step
FIRST = ("model", "sgsd", "grpo", "eval")  # the commands of first_minutes.py
COLUMNS = ("command", "part", "s", "expected s", "sampled tokens/s", "peak GiB")
RUNS = {"bf16": ("bfloat16", 30), "fp32": ("float32", 5), "fp32_again": ("float32", 5)}


def commands(out: pathlib.Path, device: str) -> dict[str, list[str]]:
    """Each step's command."""
    in_small = device == "cpu"
    large = {}
    for mode in ("decode", "attention", "masks", "step", "rows", "row"):
        words = ["research/speed/large.py", mode]
        large[f"large_{mode}"] = [*words, "--cpu"] if in_small else words
    steps_of = {}
    for name in FIRST:
        words = ["research/speed/first_minutes.py", name, f"{out}/first"]
        steps_of[f"first_{name}"] = [*words, "--cpu"] if in_small else words
    for name in ("large_decode", "large_attention"):
        steps_of[name] = large.pop(name)
    steps_of["tests"] = ["-m", "pytest", "-q", "research/speed/test_device.py"]
    for name, (dtype, steps) in RUNS.items():
        run = ["sgsd.py", "--preset", "tiny", "--device", device, "--dtype", dtype]
        run += ["--steps", str(2 if in_small else steps), "--out", f"{out}/{name}"]
        if in_small:  # without a cold start
            run += ["--bank", "banks/word_problems.json", "--batch-size", "4"]
        steps_of[name] = run
    evaluation = ["eval.py", "tiny/model", f"{out}/bf16", "--data", "tiny/test.jsonl"]
    evaluation += ["--samples", "4", "--max-new-tokens", "96", "--device", device]
    steps_of["bf16_eval"] = [*evaluation, "--limit", "8"] if in_small else evaluation
    modes, how = ("score", "step", "rollout", "memory"), ["--cuda"]
    if in_small:
        modes, how = ("score", "step"), ["--shape", "tiny", "--repeats", "1", "--one-process"]
    for mode in modes:
        steps_of[mode] = ["research/speed/bench.py", mode, *how]
    return steps_of | large


def ids_of(run: pathlib.Path) -> list[list[int]]:
    """All ids that a run has sampled, in order."""
    return [json.loads(line)["completion_ids"] for line in open(run / "rollouts.jsonl")]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--cpu", action="store_true", help="a rehearsal")
    parser.add_argument("--steps", nargs="+", help="these alone")
    args = parser.parse_args(argv)
    out = args.out.resolve()
    every = commands(out, "cpu" if args.cpu else "cuda")
    unknown = set(args.steps or []) - set(every)
    if unknown:
        parser.error(f"--steps: {', '.join(sorted(unknown))}: not among {', '.join(every)}")
    out.mkdir(parents=True, exist_ok=True)
    lines = []
    for name in args.steps or every:
        command = every[name]
        began, code = time.perf_counter(), "limit"
        with open(out / f"{name}.txt", "w") as log:
            both = {"stdout": log, "stderr": subprocess.STDOUT, "cwd": ROOT}
            step = subprocess.Popen([sys.executable, *command], process_group=0, **both)
            try:
                code = str(step.wait(LIMIT))
            except subprocess.TimeoutExpired:
                pass
            finally:
                if step.poll() is None:  # the processes that it has started end with it
                    os.killpg(step.pid, signal.SIGKILL)
        lines.append(f"| {name} | {code} | {time.perf_counter() - began:.0f} |")
        print(lines[-1], flush=True)
    if all((out / name / "rollouts.jsonl").exists() for name in ("fp32", "fp32_again")):
        first, again = ids_of(out / "fp32"), ids_of(out / "fp32_again")
        lines.append(f"\nfp32 twice: {sum(a == b for a, b in zip(first, again))} of {len(first)}")
        lines[-1] += " rollouts have the same ids"
    first = head_of(COLUMNS)
    for name in FIRST:
        log = out / f"first_{name}.txt"
        if log.exists():
            first += [line for line in log.read_text().splitlines() if line.startswith("| ")]
    print("\n".join([*first, "", *head_of(["step", "exit code", "seconds"]), *lines]))


if __name__ == "__main__":
    main()
