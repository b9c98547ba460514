"""Do the slopes of the first steps add up to what these steps gain?

    python research/slope/steps.py             goes on with steps.jsonl
    python research/slope/steps.py --table     the table of what is there

In the harder world SGSD trains five steps with each of three banks. We probe the base and every
checkpoint: 80 training problems, the same ones, with four fresh rollouts of each. If success were
linear, five times the base's slope would be the gain; if each step were small, the sum of the
slopes before it. Slope and success are about the same prompt and sampling here.
"""

import argparse
import contextlib
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from research.markdown_table import head_of, row_of
from research.methods import compare
from research.slope import measure

BANKS, STEPS, SEED = ("hand-0", "own-8", "hand-100"), 5, 80
W = compare.WORLDS["lock"]


def probe(bank: pathlib.Path, run: pathlib.Path, step: int) -> dict:
    """Success and slope before step `step` + 1."""
    from extras import probe as program

    flags = f"{W.flags} --batch-size {W.batch} --evolve-every 0 --max-new-tokens {W.tokens}"
    flags += f" --learning-rate {measure.RATE} --seed {SEED}"
    flags += f" --problems {measure.PROBLEMS} --samples {measure.SAMPLES}"
    paths = {**compare.places(W), "encoder": W.encoder, "bank": bank, "out": run / "probe.json"}
    if step:
        paths["at"] = run / f"checkpoints/step_{step:06d}"
    compare.call(program.main, flags, **paths)
    found = json.loads((run / "probe.json").read_text())
    return {name: found["rows"][1][name] for name in ("success", "slope", "low", "high")}


def table(rows: list[dict]) -> list[str]:
    """A row for each bank: success and slope by step, and the three gains."""
    head = ["bank", "success before each step, and after the last, %", "slope before each step"]
    lines = head_of([*head, "gain", "five times the first slope", "sum of the slopes"])
    for bank in BANKS:
        mine = [row for row in rows if row["bank"] == bank]
        if len(mine) <= STEPS:
            continue
        success = [100 * row["success"] for row in mine]
        slopes = [row["slope"] for row in mine[:STEPS]]
        texts = " ".join(f"{x:.0f}" for x in success), " ".join(f"{x:.1f}" for x in slopes)
        gains = success[-1] - success[0], STEPS * slopes[0], sum(slopes)
        lines.append(row_of([bank, *texts, *[f"{x:+.1f}" for x in gains]]))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--work", default="runs/steps", help="banks, runs and checkpoints")
    parser.add_argument("--table", action="store_true", help="only print the table")
    args = parser.parse_args()
    import files

    out = measure.HERE / "steps.jsonl"
    if args.table:
        print("\n".join(table(list(files.read_jsonl(out)))))
        return
    work = pathlib.Path(args.work).absolute()
    kept = files.read_jsonl(measure.HERE / "lock.jsonl")
    contents = {row["bank"]: row["content"] for row in kept if row["kind"] == "bank"}
    for name in BANKS:
        folder = work / name
        folder.mkdir(parents=True, exist_ok=True)
        bank = folder / f"{name}.json"
        bank.write_text(json.dumps(contents[name]))
        done = sum(row["bank"] == name for row in files.read_jsonl(out))
        with open(work / "log.txt", "a") as log, contextlib.redirect_stdout(log):
            with contextlib.redirect_stderr(log):
                job = {"kind": "train", "bank": name, "seed": SEED}
                run = measure.train(job, W, folder, STEPS, every=1)
                for step in range(done, STEPS + 1):
                    row = {"bank": name, "step": step} | probe(bank, run, step)
                    files.append_jsonl(out, [row])
    print("\n".join(table(list(files.read_jsonl(out)))))


if __name__ == "__main__":
    main()
