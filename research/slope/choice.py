"""Can the slope of the base model choose a setting? The change with the largest one is trained.

    python research/slope/choice.py --minutes 60    goes on with choice.jsonl
    python research/slope/choice.py --table         the tables of what is there

In the harder world, with the bank `own-8` of measure.py: one probe of the base ranks the published
settings and changes of one setting each. Then the published settings and the change with the
largest slope train with five seeds, 60 steps each. predictions.md was written before.
"""

import argparse
import contextlib
import dataclasses
import json
import pathlib
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from research.markdown_table import head_of, row_of
from research.methods import compare
from research.slope import measure

PLANNED = "own-8"  # the bank
CHANGES = [f"--bank {name}" for name in measure.BANKS if name[:3] == "own" and name != PLANNED]
CHANGES += ["--num-teachers 1", "--num-teachers 6", "--tau-g 0.3", "--tau-g 3"]
CHANGES += ["--eps-a 0", "--eps-a 0.02", "--no-token-mask", "--retrieval random"]
SEEDS = range(20, 25)
W = dataclasses.replace(compare.WORLDS["lock"], points=measure.POINTS)
Row = dict[str, Any]


def with_paths(flags: str, work: pathlib.Path) -> str:
    """The flags with the bank's file in the place of its name."""
    words = flags.split()
    if words[:1] == ["--bank"]:
        words[1] = str(work / f"{words[1]}.json")
    return " ".join(words)


def probe(work: pathlib.Path) -> Row:
    """The slopes of the published settings and of all changes, from one set of rollouts."""
    from extras import probe as program

    argv = f"{W.flags} --batch-size {W.batch} --max-new-tokens {W.tokens} --seed 45".split()
    argv += f"--problems {measure.PROBLEMS} --samples {measure.SAMPLES}".split()
    argv += f"--learning-rate {measure.RATE} --evolve-every 0 --out {work}/probe.json".split()
    paths = {**compare.places(W), "encoder": W.encoder, "bank": work / f"{PLANNED}.json"}
    for name, value in paths.items():
        argv += [f"--{name}", str(value)]
    for flags in CHANGES:
        argv += ["--try", with_paths(flags, work)]
    if program.main(argv):
        raise RuntimeError("the probe did not end")
    found = json.loads((work / "probe.json").read_text())
    found["slopes"] = dict(zip(["grpo", "published", *CHANGES], found.pop("rows")))
    for row in found["slopes"].values():
        del row["flags"]  # they have this machine's paths
    return found


def train(name: str, seed: int, work: pathlib.Path) -> Row:
    """Test accuracy after 5, 20 and 60 steps."""
    run, bank = work / f"{name}-{seed}".replace(" ", "-") / "run", work / f"{PLANNED}.json"
    flags = with_paths("" if name == "published" else name, work)
    if flags.startswith("--bank"):
        bank, flags = pathlib.Path(flags.split()[1]), ""
    compare.METHODS[name] = flags
    job = {"method": name, "seed": seed, "rate": measure.RATE, "points": True}
    compare.train(job, W, bank, run)
    accuracy = measure.test_accuracy(W, run, seed)
    shutil.rmtree(run.parent)
    return {"accuracy": accuracy}


def largest(slopes: Row) -> str:
    """The change with the largest slope."""
    return max(CHANGES, key=lambda name: slopes[name]["slope"])


def tables(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        if row["kind"] == "slopes":
            lines = head_of(["settings", "slope, points a step", "relative to GRPO"])
            unit = row["slopes"]["grpo"]["unit"]
            for name, x in sorted(row["slopes"].items(), key=lambda item: -item[1]["slope"]):
                span = f"{x['slope']:.2f} ({x['low']:.2f} to {x['high']:.2f})"
                lines.append(row_of([f"`{name}`", span, f"{x['unit'] / unit:.2f}"]))
    trained = {(r["name"], r["seed"]): r["accuracy"] for r in rows if r["kind"] == "train"}
    names = list(dict.fromkeys(name for name, _ in trained))
    lines += ["", *head_of(["trained", "seeds", *[f"after {step}" for step in W.points]])]
    for name in names:
        runs = [x for (other, _), x in trained.items() if other == name]
        cells = [f"`{name}`", len(runs)]
        for step in W.points:
            values = [x[str(step)] for x in runs]
            cells.append(compare.with_interval(values) if len(runs) > 1 else f"{values[0]:.1%}")
        lines.append(row_of(cells))
    both = [seed for seed in SEEDS if all((name, seed) in trained for name in names)]
    if len(names) == 2 and len(both) > 1:
        cells = ["chosen less published, paired", len(both)]
        for step in map(str, W.points):
            gaps = [trained[names[1], s][step] - trained[names[0], s][step] for s in both]
            cells.append(compare.with_interval(gaps, "+"))
        lines.append(row_of(cells))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60, help="begin no job after so many")
    parser.add_argument("--work", default="runs/choice", help="banks, and the run under way")
    parser.add_argument("--table", action="store_true", help="only print the tables")
    args = parser.parse_args()
    from lib import files

    out, began = measure.HERE / "choice.jsonl", time.monotonic()
    rows = list(files.read_jsonl(out))
    if args.table:
        print("\n".join(tables(rows)))
        return
    work = pathlib.Path(args.work).absolute()
    work.mkdir(parents=True, exist_ok=True)
    for row in files.read_jsonl(measure.HERE / "lock.jsonl"):
        if row["kind"] == "bank":
            (work / f"{row['bank']}.json").write_text(json.dumps(row["content"]))
    with open(work / "log.txt", "a") as log, contextlib.redirect_stdout(log):
        with contextlib.redirect_stderr(log):
            if not rows:
                rows.append({"kind": "slopes", **probe(work)})
                files.append_jsonl(out, rows)
            for seed in SEEDS:
                for name in ("published", largest(rows[0]["slopes"])):
                    done = any((r.get("name"), r.get("seed")) == (name, seed) for r in rows)
                    if done or time.monotonic() - began > 60 * args.minutes:
                        continue
                    print(f"{time.strftime('%H:%M')} {name} {seed}", flush=True)
                    row = {"kind": "train", "name": name, "seed": seed} | train(name, seed, work)
                    files.append_jsonl(out, [row])


if __name__ == "__main__":
    main()
