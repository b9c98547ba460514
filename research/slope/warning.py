"""Does the slope warn of a fall? It is measured every 5 steps in runs that fell and runs that held.

    python research/slope/warning.py --minutes 60    goes on with warning.jsonl
    python research/slope/warning.py --table         the tables of what is there

Pairs of runs of the harder world, one of which fell in research/methods/compare_lock.json and one
held: the same method with two seeds where there are both. We train each for 60 steps with the bank
of its seed, and probe its checkpoints (80 training problems x 4 rollouts, the same ones) until the
success of the probe's rollouts has been below half of the best twice in a row.

Each probe is one line, so the same command goes on after a kill. One process, one thread; --part
shares the pairs among several. What they print goes to --work. predictions.md was written before.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from research.markdown_table import head_of, row_of
from research.methods import compare
from research.slope import measure

PAIRS = [  # (method, seed): fell; held
    (("no polarity", 3), ("no polarity", 1)),
    (("answer in the prompt", 0), ("answer in the prompt", 1)),
    (("JSD", 1), ("JSD", 4)),
    (("forward KL", 1), ("sgsd", 1)),
    (("reverse KL", 0), ("reverse KL", 2)),
    (("top-100 support", 0), ("random retrieval", 1)),
    (("no token mask", 0), ("no token mask", 1)),
    (("forward KL", 2), ("sgsd", 0)),
    (("JSD", 2), ("JSD", 3)),
    (("top-100 support", 2), ("random retrieval", 2)),
]
STEPS = range(5, 61, 5)
AHEAD = 10  # steps: a fall within them is one that a signal should show
FIRST_ALARM = 10  # before it success is low and rises everywhere
W = dataclasses.replace(compare.WORLDS["lock"], points=tuple(STEPS))
Row = dict[str, Any]


def probe(method: str, seed: int, step: int, run: pathlib.Path, bank: pathlib.Path) -> Row:
    """The planned row's and GRPO's numbers at a checkpoint."""
    from extras import probe as program

    flags = f"{W.flags} {compare.METHODS[method]} --batch-size {W.batch} --evolve-every 0"
    flags += f" --max-new-tokens {W.tokens} --learning-rate {measure.RATE}"
    flags += f" --problems {measure.PROBLEMS} --samples {measure.SAMPLES} --seed 50"
    paths = {**compare.places(W), "encoder": W.encoder, "bank": bank}
    paths |= {"at": run / f"checkpoints/step_{step:06d}", "out": run / "probe.json"}
    compare.call(program.main, flags, **paths)
    found = json.loads((run / "probe.json").read_text())
    grpo, planned = found["rows"]
    return {
        **{name: planned[name] for name in planned if name != "flags"},
        "grpo": {name: grpo[name] for name in ("slope", "low", "high", "unit")},
        "mixed": found["mixed"],
        "seconds": found["seconds"],
    }


def fallen(successes: Sequence[float]) -> bool:
    """Whether the last two values lie below half of the best before them."""
    best = max(successes[:-2], default=0.0)
    return len(successes) > 2 and max(successes[-2:]) < best / 2


def follow(method: str, seed: int, rows: list[Row], work: pathlib.Path, out: pathlib.Path) -> None:
    """Train the run unless it is there, then probe the checkpoints that have no line yet."""
    from lib import files

    folder = work / f"{method}-{seed}".replace(" ", "-")
    run, bank = folder / "run", work / f"bank_{seed}.json"
    if not bank.exists():
        kept = json.loads((ROOT / "research/methods/compare_lock.json").read_text())["banks"]
        bank.write_text(json.dumps(kept[f"bank-{seed}"]["bank"]))
    mine = [row for row in rows if (row["method"], row["seed"]) == (method, seed)]
    successes = [row["success"] for row in mine if row["kind"] == "probe"]
    for step in STEPS[len(successes) :]:
        if fallen(successes):
            break
        if not (run / f"checkpoints/step_{STEPS[-1]:06d}").exists():
            print(f"{time.strftime('%H:%M')} {method} {seed}: training", flush=True)
            job = {"method": method, "seed": seed, "rate": measure.RATE, "points": True}
            compare.train(job, W, bank, run)
        print(f"{time.strftime('%H:%M')} {method} {seed}: probe at step {step}", flush=True)
        found = probe(method, seed, step, run, bank)
        found = {"kind": "probe", "method": method, "seed": seed, "step": step} | found
        files.append_jsonl(out, [found])
        successes.append(found["success"])
    if not any(row["kind"] == "run" for row in mine):
        names = "success", "completion_tokens", "no_answer", "a_mean_success", "a_mean_failure"
        log: dict[str, list] = {name: [] for name in names}
        for row in files.read_jsonl(run / "metrics.jsonl"):
            for name in names:
                log[name].append(row.get(name))
        line = {"kind": "run", "method": method, "seed": seed, "log": log}
        files.append_jsonl(out, [line])


# ------------------------------------------------------------------------------------- the tables


def signals(probes: Sequence[Row], i: int, log: dict[str, list]) -> dict[str, float]:
    """Signals at the i-th probe; the larger, the more a fall is to be expected."""
    now, before = probes[i], probes[: i + 1]
    step = now["step"]
    lengths = log["completion_tokens"]
    first, last = statistics.mean(lengths[:5]), statistics.mean(lengths[step - 5 : step])
    supports = [now[name] or 0.0 for name in ("support_success", "support_failure")]
    return {
        "slope over its standard error": -now["slope"] / max(now["error"], 1e-9),
        "slope": -now["slope"],
        "GRPO's slope": -now["grpo"]["slope"],
        "success lost so far": max(row["success"] for row in before) - now["success"],
        "success": -now["success"],
        "change of length": abs(last / first - 1),
        "cut share": now["cut"],
        "support on successes less failures": supports[1] - supports[0],
        "decided teachers": now["decided"] or 0.0,
    }


def area(positive: Sequence[float], negative: Sequence[float]) -> float:
    """P(a positive's signal is above a negative's), ties half."""
    total = 0.0
    for a in positive:
        for b in negative:
            total += (a > b) + (a == b) / 2
    return total / (len(positive) * len(negative))


def tables(rows: Sequence[Row]) -> list[str]:
    """A row per run; then how well each signal ranks the checkpoints before a fall."""
    head = [
        "run",
        "success of the probes, %",
        "slope, points a step (* interval contains 0 or less)",
    ]
    lines = head_of([*head, "fallen at", "first alarm"])
    ahead: list[dict[str, float]] = []  # of pairs that share their method
    others: list[dict[str, float]] = []
    shared = {fell[0] for fell, held in PAIRS if fell[0] == held[0]}
    for method, seed in [run for pair in PAIRS for run in pair]:
        mine = [row for row in rows if (row["method"], row["seed"]) == (method, seed)]
        probes = [row for row in mine if row["kind"] == "probe"]
        logs = [row["log"] for row in mine if row["kind"] == "run"]
        if not logs:
            continue  # under way
        successes = [row["success"] for row in probes]
        fall = probes[-2]["step"] if fallen(successes) else None
        before = [x for x in probes if FIRST_ALARM <= x["step"] < (fall or STEPS[-1] + 1)]
        alarms = [x["step"] for x in before if x["low"] <= 0]
        told = [f"{x['slope']:.2f}{'*' if x['low'] <= 0 else ''}" for x in probes]
        cells = [f"{method}, {seed}", " ".join(f"{100 * x:.0f}" for x in successes), " ".join(told)]
        lines.append(row_of([*cells, fall or "held", alarms[0] if alarms else "none"]))
        for i, x in enumerate(probes):
            if x not in before or method not in shared:
                continue
            soon = fall is not None and fall - x["step"] <= AHEAD
            (ahead if soon else others).append(signals(probes, i, logs[0]))
    if not ahead or not others:
        return lines
    text = f"area under the curve: {len(ahead)} checkpoints with a fall within {AHEAD} steps"
    text += f", {len(others)} without, of pairs that share their method"
    lines += ["", *head_of(["signal", text])]
    for name in ahead[0]:
        value = area([x[name] for x in ahead], [x[name] for x in others])
        lines.append(row_of([name, f"{value:.2f}"]))
    return lines


def alarms_and_falls(rows: Sequence[Row]) -> list[str]:
    """How often an alarm came, how early, and what stopping at the first one would have kept."""
    ahead: list[int] = []
    kept: dict[str, list[float]] = {"fell": [], "held": []}  # points, at the alarm less at the end
    counts = {"fell": 0, "held": 0, "fell, twice in a row": 0, "held, twice in a row": 0}
    runs = dict.fromkeys((row["method"], row["seed"]) for row in rows if row["kind"] == "run")
    for run in runs:
        probes = [row for row in rows if (row["method"], row["seed"]) == run and "step" in row]
        successes = [row["success"] for row in probes]
        fall = probes[-2]["step"] if fallen(successes) else STEPS[-1] + 1
        before = [row for row in probes if FIRST_ALARM <= row["step"] < fall]
        kind = "fell" if fallen(successes) else "held"
        counts[kind] += 1
        pairs = itertools.pairwise(before)
        counts[f"{kind}, twice in a row"] += any(a["low"] <= 0 >= b["low"] for a, b in pairs)
        first = next((row for row in before if row["low"] <= 0), None)
        if first:
            kept[kind].append(100 * (first["success"] - successes[-1]))
            if kind == "fell":
                ahead.append(fall - first["step"])
    lines = [""]
    for kind, gains in kept.items():
        line = f"{kind}: {counts[kind]} runs, {len(gains)} with an alarm before"
        line += f", {counts[f'{kind}, twice in a row']} with two in a row"
        if gains:
            line += f"; at the first alarm less the end {min(gains):+.0f} to {max(gains):+.0f}"
            line += f" points, mean {statistics.mean(gains):+.0f}"
        lines.append(line)
    if ahead:
        lines.append(f"first alarm before a fall: median {statistics.median(ahead):g} steps")
    return lines


def what_followed(rows: Sequence[Row]) -> list[str]:
    """How success changed in the five steps after a probe, by its interval."""
    changes: dict[str, list[float]] = {"above 0": [], "contains 0, or below": []}
    probes = [row for row in rows if row["kind"] == "probe"]
    probes.sort(key=lambda row: (row["method"], row["seed"], row["step"]))  # parts mix their lines
    for one, other in itertools.pairwise(probes):
        same = (one["method"], one["seed"]) == (other["method"], other["seed"])
        if same and one["success"] > 0.1:
            kind = "above 0" if one["low"] > 0 else "contains 0, or below"
            changes[kind].append(100 * (other["success"] - one["success"]))
    head = [
        "interval of the slope",
        "probes",
        "success rose in the next five steps",
        "mean, points",
    ]
    lines = ["", *head_of(head)]
    for kind, values in changes.items():
        if values:
            rose = sum(x > 0 for x in values)
            lines.append(row_of([kind, len(values), rose, f"{statistics.mean(values):+.1f}"]))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60, help="begin no run after so many")
    parser.add_argument("--part", default="0/1", help="every n-th pair from the i-th on: i/n")
    parser.add_argument("--work", default="runs/warning", help="the runs and their checkpoints")
    parser.add_argument("--table", action="store_true", help="only print the tables")
    args = parser.parse_args()
    from lib import files

    out, began = measure.HERE / "warning.jsonl", time.monotonic()
    if args.table:
        rows = sorted(files.read_jsonl(out), key=lambda row: (row["method"], row["seed"]))
        print("\n".join(tables(rows) + what_followed(rows) + alarms_and_falls(rows)))
        return
    work = pathlib.Path(args.work).absolute()
    work.mkdir(parents=True, exist_ok=True)
    start, count = map(int, args.part.split("/"))
    for pair in PAIRS[start::count]:
        for method, seed in pair:
            if time.monotonic() - began > 60 * args.minutes:
                print(f"{args.minutes:g} minutes are over; the same command goes on")
                return
            with open(work / f"log_{start}.txt", "a") as log, contextlib.redirect_stdout(log):
                with contextlib.redirect_stderr(log):
                    follow(method, seed, list(files.read_jsonl(out)), work, out)


if __name__ == "__main__":
    main()
