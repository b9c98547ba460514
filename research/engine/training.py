"""Tiny trainings whose rollouts come from an inference server, beside `generate`'s.

    python research/engine/training.py FOLDER --server URL [URL] --seeds 0 1 2 --log SERVER_LOG
    python research/engine/training.py FOLDER

The first command trains the tiny preset with each seed by `generate` and by the server, one after
the other; a run that is complete is not made again. The server has tiny/model (docs/engines.md has
its flags). The second prints the tables of all runs in FOLDER. --flags adds to every training.
"""

import argparse
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]


def train(out: pathlib.Path, seed: int, servers: list[str], args: argparse.Namespace) -> None:
    """One run of the tiny preset, with its evaluation by `generate` in either case."""
    command = [sys.executable, "sgsd.py", "--preset", "tiny", "--seed", str(seed)]
    command += ["--steps", str(args.steps), "--device", "cpu", "--audit-every", "0"]
    command += ["--out", str(out), *shlex.split(args.flags)]
    if servers:
        command += ["--server", *servers]
    started = time.perf_counter()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(f"{out}.log", "a") as log:
        subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=log, check=True)
    seconds = time.perf_counter() - started
    checkpoint = out / "checkpoints" / f"step_{args.steps:06d}"
    evaluate = [sys.executable, "eval.py", "tiny/model", str(checkpoint)]
    evaluate += ["--data", "tiny/test.jsonl", "--samples", "4", "--max-new-tokens", "96"]
    evaluate += ["--rows", "170", "--device", "cpu", "--out", f"{out}.eval"]
    evaluate += ["--limit", str(args.limit)]
    with open(f"{out}.log", "a") as log:
        subprocess.run(evaluate, cwd=ROOT, env=env, stdout=log, stderr=log, check=True)
    pathlib.Path(f"{out}.seconds").write_text(str(seconds))


def rows(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in open(path)]


def accuracies(out: pathlib.Path) -> list[float]:
    """avg@4 before and after."""
    folder = pathlib.Path(f"{out}.eval")
    base, last = folder / "tiny--model", max(folder.glob("*--step_*"))
    results = [json.loads((place / "results.json").read_text()) for place in (base, last)]
    return [table["test"]["avg"] for table in results]


def table(folder: pathlib.Path, log: pathlib.Path | None) -> None:
    """Print each run's success by step, supports and gaps; and the server's loads and unloads."""
    print(
        "| run | success in the first third | second | last | mean support of successes, failures "
        "| before | after | gap, mean | largest | run, s |"
    )
    print("|---" * 10 + "|")
    for done in sorted(folder.glob("*.seconds")):
        out = done.with_suffix("")
        metrics = rows(out / "metrics.jsonl")
        cells = [out.name]
        for third in range(3):
            block = metrics[third * len(metrics) // 3 : (third + 1) * len(metrics) // 3]
            success = [row["success"] for row in block]
            cells.append(f"{sum(success) / len(success):.1%}" if success else "-")
        means = []
        for outcome in ("success", "failure"):
            values = [row[f"a_mean_{outcome}"] for row in metrics if f"a_mean_{outcome}" in row]
            means.append(f"{sum(values) / len(values):+.4f}" if values else "-")
        cells.append(", ".join(means))
        cells += [f"{x:.1%}" for x in accuracies(out)]
        gaps = [row for row in metrics if "sampling_logp_difference_mean" in row]
        if gaps:
            mean = sum(row["sampling_logp_difference_mean"] for row in gaps) / len(gaps)
            largest = max(row["sampling_logp_difference_max"] for row in gaps)
            cells += [f"{mean:.1e}", f"{largest:.1e}"]
        else:
            cells += ["", ""]
        cells.append(f"{float(done.read_text()):.0f}")
        print(f"| {' | '.join(cells)} |")
    if log:
        text = log.read_text(errors="replace")
        for what in ("load", "unload"):
            count = len(re.findall(rf'POST /v1/{what}_lora_adapter HTTP/1.1" 200', text))
            print(f"\n{what}s that the server answered with 200: {count}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--server", nargs="+", default=[])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--log", type=pathlib.Path, help="the server's log, to count adapters")
    parser.add_argument("--steps", type=int, default=30, help="of each training")
    parser.add_argument("--limit", type=int, default=0, help="only so many test problems; 0: all")
    parser.add_argument("--flags", default="", help="of every training, besides the preset")
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds if args.server else []:
        for name, servers in (("server", args.server), ("generate", [])):
            out = (args.folder / f"{name}_{seed}").resolve()
            if not pathlib.Path(f"{out}.seconds").exists():
                train(out, seed, servers, args)
    table(args.folder, args.log)


if __name__ == "__main__":
    main()
