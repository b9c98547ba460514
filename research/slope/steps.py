"""Do the slopes of the first steps add up to what these steps gain?

    python research/slope/steps.py             goes on with steps.jsonl
    python research/slope/steps.py --table     the table of what is there

In the harder world SGSD trains five steps with each of three banks. At the base and at every
checkpoint we draw four rollouts of each of 80 training problems and measure three things under the
student's training prompt: success; the slope, as the probe does; and the slope along the very step
that the run then makes, from one checkpoint to the next. The run's steps come from 8 solutions and
young moments, so they differ from the probe's direction. If each step were small, the slopes along
the steps made would add up to the gain.
"""

import argparse
import contextlib
import dataclasses
import json
import pathlib
import random
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np

from research.markdown_table import head_of, row_of
from research.methods import compare
from research.slope import measure

BANKS, STEPS, SEED = ("hand-0", "own-8", "hand-100"), 5, 80
W = compare.WORLDS["lock"]


def measured(bank: pathlib.Path, run: pathlib.Path, step: int) -> dict[str, float]:
    """Success, the probe's slope and the slope of the step made, after `step` steps."""
    from extras import probe

    flags = f"{W.flags} --batch-size {W.batch} --evolve-every 0 --max-new-tokens {W.tokens}"
    flags += f" --learning-rate {measure.RATE} --seed {SEED}"
    flags += f" --problems {measure.PROBLEMS} --samples {measure.SAMPLES}"
    argv = compare.arguments(flags, **compare.places(W), encoder=W.encoder, bank=bank)
    if step:
        argv += ["--at", str(checkpoint(run, step))]
    code = probe.main([*argv, "--out", str(run / "probe.json")])
    if code:
        raise RuntimeError(f"the probe ended with {code}")
    planned = json.loads((run / "probe.json").read_text())["rows"][1]
    values = {name: planned[name] for name in ("success", "slope", "low", "high")}
    if step < STEPS:
        values["made"], values["made_error"] = along_the_step(argv, run, step)
    return values


def checkpoint(run: pathlib.Path, step: int) -> pathlib.Path:
    return run / f"checkpoints/step_{step:06d}"


def along_the_step(argv: list[str], run_folder: pathlib.Path, step: int) -> tuple[float, float]:
    """<grad J, the step from `step` to the next>, in points, and its standard error.

    From rollouts that had no part in the step, so no halves are needed.
    """
    import torch

    import distributed
    import sgsd
    from extras import probe
    from lib import model

    options, settings = probe.parse(argv)
    with contextlib.ExitStack() as held:
        place = held.enter_context(tempfile.TemporaryDirectory())
        cfg = dataclasses.replace(settings[0][1], out=f"{place}/run")
        run = sgsd.prepare(cfg, distributed.init(cfg.device), False, held, lambda *_: [])

        def weights_at(number: int) -> torch.Tensor:
            if number:  # the base's are there already: its adapter comes from the run's seed
                at = checkpoint(run_folder, number)
                run.step, run.extra_tensors = model.restore(at, run.lm, run.optimizer)
            trained = model.trained(run.lm).values()
            return torch.cat([p.detach().flatten().clone() for p in trained])

        before_P = weights_at(step)
        data = random.Random(f"probe {cfg.seed}").sample(run.problems, options.problems)
        row = probe.make_row(run, *settings[1], data, options, {})
        groups = probe.draw(row, data, options.samples)
        step_P = weights_at(step + 1) - before_P
        trained = model.trained(run.lm).values()
        for p, part in zip(trained, before_P.split([p.numel() for p in trained])):
            p.data.copy_(part.view_as(p))
        points_N = np.zeros(len(groups))
        for i, group in enumerate(groups):
            if len({roll.r for roll in group}) == 2:
                points_N[i] = 100 * float(probe.ascent(run, group, row.sampling) @ step_P)
    return float(points_N.mean()), float(points_N.std(ddof=1)) / len(points_N) ** 0.5


def table(rows: list[dict]) -> list[str]:
    """A row for each bank: by step its success and slopes, and the gain beside their sums."""
    head = ["bank", "success before each step, and after the last, %"]
    head += ["the probe's slope before each step", "slope of each step made", "gain"]
    head += ["five times the first slope", "sum of the slopes", "sum of the steps made"]
    lines = head_of(head)
    for bank in BANKS:
        of_bank = [row for row in rows if row["bank"] == bank]
        if len(of_bank) <= STEPS:
            continue  # under way
        before = of_bank[:STEPS]
        success = [100 * row["success"] for row in of_bank]
        slopes = [row["slope"] for row in before]
        made = [row["made"] for row in before]
        error = sum(row["made_error"] ** 2 for row in before) ** 0.5
        cells = [bank, " ".join(f"{x:.0f}" for x in success)]
        cells += [" ".join(f"{x:.1f}" for x in values) for values in (slopes, made)]
        cells += [f"{success[-1] - success[0]:+.1f}", f"{STEPS * slopes[0]:+.1f}"]
        cells += [f"{sum(slopes):+.1f}", f"{sum(made):+.1f} ± {1.96 * error:.1f}"]
        lines.append(row_of(cells))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--work", default="runs/steps", help="banks, runs and checkpoints")
    parser.add_argument("--table", action="store_true", help="only print the table")
    args = parser.parse_args()
    from lib import files

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
                    row = {"bank": name, "step": step} | measured(bank, run, step)
                    files.append_jsonl(out, [row])
    print("\n".join(table(list(files.read_jsonl(out)))))


if __name__ == "__main__":
    main()
