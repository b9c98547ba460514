"""Seconds of sampling, scoring and backward passes of two trees, in turns on one machine.

    python research/house/speed.py OLD_TREE . --rounds 5

Each round runs eight steps of the tiny preset with a written bank in each tree, one thread, and
reads the seconds from metrics.jsonl. The first step is left out. Printed are the medians over all
steps and rounds, and their ratio.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

PARTS = ("gen", "score", "bwd")


def seconds(tree: pathlib.Path, bank: pathlib.Path) -> list[dict[str, float]]:
    """The seconds by part of each step but the first."""
    count = "--steps" if (tree / "scoring.py").exists() else "--updates"
    command = [sys.executable, "sgsd.py", "--preset", "tiny", count, "9", "--bank", str(bank)]
    command += ["--device", "cpu", "--audit-every", "0", "--eval-data=", "--checkpoint-every", "9"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command += ["--out", f"{folder}/run"]
        subprocess.run(command, cwd=tree, env=env, check=True, capture_output=True)
        rows = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl")]
    return [{part: row[f"seconds.{part}"] for part in PARTS} for row in rows[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("old", type=pathlib.Path)
    parser.add_argument("new", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    bank = (args.new / "banks" / "word_problems.json").resolve()
    steps: dict[str, list[dict[str, float]]] = {"old": [], "new": []}
    for _ in range(args.rounds):
        for name in steps:
            steps[name] += seconds(vars(args)[name], bank)
    print("| part | old, s | new, s | new / old |")
    print("|---|---|---|---|")
    for part in PARTS:
        old, new = (statistics.median(row[part] for row in rows) for rows in steps.values())
        print(f"| {part} | {old:.3f} | {new:.3f} | {new / old:.3f} |")


if __name__ == "__main__":
    main()
