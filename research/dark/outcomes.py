"""The tables of this folder's page, from its rows.

    python research/dark/outcomes.py

A run begins if at its end 10% of 320 solutions are right; arms are compared by Fisher's exact test.
"""

import argparse
import json
import math
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from research.markdown_table import head_of, row_of

SOLUTIONS, LEAST = 320, 32  # in an evaluation; right ones of a run that begins


def fisher(a: int, n: int, b: int, m: int) -> float:
    """Two-sided p of a in n beside b in m: all tables that are no likelier."""

    def ways(k: int) -> int:
        return math.comb(n, k) * math.comb(m, a + b - k)

    tables = [ways(k) for k in range(max(0, a + b - m), min(n, a + b) + 1)]
    return sum(x for x in tables if x <= ways(a)) / math.comb(n + m, a + b)


def begun(rows: list[dict]) -> int:
    return sum(row["solved"] >= LEAST for row in rows)


def first_mixed(row: dict) -> int | None:
    """The step of the first group with both verdicts, counted over both phases."""
    groups = row["phase 1"]["mixed"] + row["phase 2"]["mixed"]
    return next((step for step, count in enumerate(groups, 1) if count), None)


def falls(row: dict) -> bool:
    """Whether in phase 2 the right ones of 80 solutions drop by 20 or more from their best."""
    right = row["phase 2"]["right"]
    windows = [sum(right[i : i + 5]) for i in range(len(right) - 4)]
    return any(max(windows[: i + 1]) - x >= 20 for i, x in enumerate(windows))


def shares(counts: dict[str, list[int]]) -> str:
    return " ".join(f"{100 * right / steps:.0f}" for right, steps in counts.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("rows", nargs="?", type=pathlib.Path, default=HERE / "rows.jsonl")
    rows = [json.loads(line) for line in open(parser.parse_args().rows)]
    rows.sort(key=lambda row: (row["arm"], row["base"], row["seed"]))
    arms: dict[str, list[dict]] = {}
    for row in rows:
        arms.setdefault(row["arm"], []).append(row)
    lines = head_of(["arm", "begin", "p beside B", "solved, %", "first mixed", "falls", "CPU s"])
    for arm, of_arm in arms.items():
        p = fisher(begun(of_arm), len(of_arm), begun(arms["B"]), len(arms["B"]))
        cells = [arm, f"{begun(of_arm)} of {len(of_arm)}", f"{p:.3f}"]
        cells.append(" ".join(f"{100 * row['solved'] / SOLUTIONS:.0f}" for row in of_arm))
        cells.append(" ".join(str(first_mixed(row) or "-") for row in of_arm))
        cells += [sum(map(falls, of_arm)), sum(row["cpu_seconds"] for row in of_arm)]
        lines.append(row_of(cells))
    lines += [
        "",
        *head_of(["run", "right in phase 1", "2", "steps right before GRPO, %", "at the end"]),
    ]
    for row in rows:
        name = f"{row['arm']}, base {row['base']}, seed {row['seed']}"
        right = [sum(row[f"phase {i}"]["right"]) for i in (1, 2)]
        steps = [shares(row["phase 2"]["begin"]), shares(row["families"])]
        lines.append(row_of([name, *right, *steps]))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
