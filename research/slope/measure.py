"""Does the slope of the base model predict what training with a bank does?

    python research/slope/measure.py --world lock --minutes 60    goes on with lock.jsonl
    python research/slope/measure.py --world tiny --minutes 60    the same in the first world
    python research/slope/measure.py --world lock --table         the table of what is there
    python research/slope/measure.py --picture slope.png          both worlds (needs matplotlib)

Twelve banks per world: the model's own from seeds 5 to 9; hand-written ones with a true mistake for
every family and a skill that misleads for 0, 25, 50, 75 and 100% of them; and two with all words in
another order. SGSD has the settings of research/methods/compare.py.

A round measures the slopes of all banks on one set of rollouts of the base model (80 problems x 4),
then trains with each bank for 60 steps and evaluates after 5, 20 and 60 on the test problems, then
makes a pilot with each bank: 5 steps, and solutions of validation problems, as many rollouts
together as the probe has. All three have seeds of their own. Each finished job is one line, so the
same command goes on after a kill. One process, one thread. predictions.md was written before.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import shutil
import statistics
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT / "tiny")]
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np

from research.markdown_table import head_of, row_of
from research.methods.compare import (
    WORLDS,
    World,
    arguments,
    call,
    make_misleading_bank,
    places,
    scores_of,
)

OWN, SHARES, ROUNDS = range(5, 10), (0, 25, 50, 75, 100), 3
BANKS = [f"own-{seed}" for seed in OWN] + [f"hand-{share}" for share in SHARES]
BANKS += ["shuffled-own-5", "shuffled-hand-0"]
PROBLEMS, SAMPLES = 80, 4  # of a probe
POINTS, PILOT = (5, 20, 60), 5  # steps
RATE = 1e-3
Job = dict[str, Any]


def jobs_of() -> list[Job]:
    """All jobs in order; whatever is done when time is up makes a table."""
    jobs: list[Job] = [{"kind": "bank", "bank": name} for name in BANKS]
    jobs.append({"kind": "base"})
    for turn in range(ROUNDS):
        jobs.append({"kind": "slopes", "seed": 40 + turn})
        for name in BANKS:
            jobs.append({"kind": "train", "bank": name, "seed": 20 + turn})
        for name in BANKS:
            jobs.append({"kind": "pilot", "bank": name, "seed": 30 + turn})
    return jobs


def shuffled(bank, seed: int):
    """The bank with all words in another order; each field keeps its number of words."""
    from skills import FIELDS, SkillBank

    words: list[str] = []
    spots = []
    lists: dict[str, Any] = {key: [dict(x) for x in getattr(bank, key)] for key in FIELDS}
    for key, names in FIELDS.items():
        for entry in lists[key]:
            for name in names:
                spots.append((entry, name, len(entry[name].split())))
                words += entry[name].split()
    random.Random(seed).shuffle(words)
    for entry, name, count in spots:
        entry[name] = " ".join(words[:count])
        del words[:count]
    metadata = {"shuffled": "all words in another order"}
    return SkillBank(lists["general_skills"], lists["common_mistakes"], metadata)


def make_bank(name: str, w: World, work: pathlib.Path) -> None:
    import skills

    kind, _, number = name.rpartition("-")
    path = work / f"{name}.json"
    if kind == "own":
        flags = f"{w.flags} --max-new-tokens {w.tokens} --seed {number}"
        call(skills.main, flags, **places(w), encoder=w.encoder, out=path)
    elif kind == "hand":
        make_misleading_bank({"seed": 0, "share": int(number)}, path)
    else:
        whole = skills.SkillBank.load(work / f"{name.removeprefix('shuffled-')}.json")
        shuffled(whole, 0).save(path)


def train(
    job: Job, w: World, work: pathlib.Path, last: int, every: int = POINTS[0]
) -> pathlib.Path:
    """A run of SGSD over the first `last` of 60 steps; its folder. Goes on with a killed one.

    every: steps between its checkpoints.
    """
    import config
    import sgsd

    out = work / "now"
    if (out / "job.json").exists() and json.loads((out / "job.json").read_text()) != job:
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "job.json").write_text(json.dumps(job))
    run = out / "run"
    flags = f"{w.flags} --batch-size {w.batch} --max-new-tokens {w.tokens} --evolve-every 0"
    flags += f" --steps {POINTS[-1]} --checkpoint-every {every} --audit-every 0"
    flags += f" --seed {job['seed']} --learning-rate {RATE}"
    bank = work / f"{job['bank']}.json"
    argv = arguments(flags, **places(w), encoder=w.encoder, bank=bank, out=run)
    if list(run.glob("checkpoints/step_*")):
        argv = ["--resume", str(run)]
    else:
        shutil.rmtree(run, ignore_errors=True)

    def step_fn(run_: Any, step: int) -> sgsd.StepResult:
        result = sgsd.train_step(run_, step)
        if step == last < POINTS[-1]:
            run_.signalled = time.monotonic()  # a pilot stops here, with the plan's own rates
        return result

    end = run / f"checkpoints/step_{last:06d}"
    if not end.exists():
        cfg, resume = config.parse(argv, "")
        sgsd.launch(cfg, resume, step_fn)
    if not end.exists():
        raise RuntimeError("stopped by a signal; the same command goes on")
    return run


def evaluate(
    w: World, policies: list[str], data: pathlib.Path, samples: int, seed: int, **paths: Any
) -> None:
    import eval

    flags = f"--max-new-tokens {w.tokens} --samples {samples} --seed {seed} --rows {w.rows}"
    call(lambda argv: eval.main([*policies, *argv]), flags, data=data, **paths)


def mean_score(samples: pathlib.Path) -> float:
    return statistics.mean(scores_of(samples).values())


def test_accuracy(w: World, run: pathlib.Path, seed: int) -> dict[str, float]:
    """By step: a run's accuracy on the test problems after each of POINTS."""
    names = [f"step_{step:06d}" for step in POINTS]
    policies = [str(run / "checkpoints" / name) for name in names]
    evaluate(w, policies, pathlib.Path(w.folder, "test.jsonl"), w.samples, seed)
    scores = [mean_score(run / "eval" / name / "samples.jsonl") for name in names]
    return dict(zip(map(str, POINTS), scores))


def do_job(job: Job, w: World, work: pathlib.Path) -> dict[str, Any]:
    """What a job found."""
    test = pathlib.Path(w.folder, "test.jsonl")
    if job["kind"] == "bank":
        make_bank(job["bank"], w, work)
        return {"content": json.loads((work / f"{job['bank']}.json").read_text())}
    if job["kind"] == "base":
        shutil.rmtree(work / "base", ignore_errors=True)
        evaluate(w, [f"{w.folder}/model"], test, w.samples, 20, out=work / "base")
        (log,) = work.glob("base/*/samples.jsonl")
        return {"accuracy": mean_score(log)}
    if job["kind"] == "slopes":
        return slopes(job, w, work)
    if job["kind"] == "train":
        run = train(job, w, work, POINTS[-1])
        return {"accuracy": test_accuracy(w, run, job["seed"])}
    left = PROBLEMS * SAMPLES - PILOT * w.batch  # rollouts that are left for the evaluation
    lines = pathlib.Path(w.folder, "valid.jsonl").read_text().splitlines()[: left // 2]
    problems = work / "pilot.jsonl"
    problems.write_text("\n".join(lines) + "\n")
    run = train(job, w, work, PILOT)
    evaluate(w, [str(run / f"checkpoints/step_{PILOT:06d}")], problems, 2, job["seed"])
    log = run / f"eval/step_{PILOT:06d}/samples.jsonl"
    return {"accuracy": mean_score(log), "rollouts": PILOT * w.batch + 2 * len(lines)}


def slopes(job: Job, w: World, work: pathlib.Path) -> dict[str, Any]:
    """The probe's numbers for all banks, from one set of rollouts."""
    from extras import probe

    flags = f"{w.flags} --batch-size {w.batch} --max-new-tokens {w.tokens}"
    flags += f" --problems {PROBLEMS} --samples {SAMPLES} --seed {job['seed']}"
    flags += f" --learning-rate {RATE}"
    bank = work / f"{BANKS[0]}.json"
    argv = arguments(flags, **places(w), encoder=w.encoder, bank=bank)
    for name in BANKS[1:]:
        argv += ["--try", f"--bank {work}/{name}.json"]
    out = work / "probe.json"
    if probe.main([*argv, "--out", str(out)]):
        raise RuntimeError("the probe did not end")
    numbers = json.loads(out.read_text())
    rows = dict(zip(["grpo", *BANKS], numbers.pop("rows")))
    for row in rows.values():
        del row["flags"]  # they have this machine's paths
    return numbers | {"slopes": rows}


def spearman(a: list[float], b: list[float]) -> float:
    """The correlation of ranks; equal values share their mean rank."""

    def ranks(values: list[float]) -> np.ndarray:
        x = np.array(values)
        return (x[:, None] > x).sum(1) + ((x[:, None] == x).sum(1) - 1) / 2

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def with_bounds(a: list[float], b: list[float], draws: int = 4000) -> str:
    """The rank correlation with a 95% bootstrap over banks."""
    x, y, rng, found = np.array(a), np.array(b), np.random.default_rng(0), []
    for _ in range(draws):
        chosen = rng.integers(len(x), size=len(x))
        if len({*x[chosen]}) > 1 and len({*y[chosen]}) > 1:
            found.append(spearman(list(x[chosen]), list(y[chosen])))
    low, high = np.quantile(found, (0.025, 0.975))
    return f"{spearman(a, b):.2f} ({low:.2f} to {high:.2f})"


def table(rows: list[dict]) -> list[str]:
    """Means over the seeds that are there, and rank correlations over banks."""
    probes = [row["slopes"] for row in rows if row["kind"] == "slopes"]
    columns: dict[str, list[list[float]]] = {"slope": [], "relative": [], "pilot": []}
    columns |= {f"after {step}": [] for step in POINTS}
    told = []
    for bank in BANKS:
        mine = [row for row in rows if row.get("bank") == bank]
        columns["slope"].append([x[bank]["slope"] for x in probes])
        columns["relative"].append([x[bank]["unit"] / x["grpo"]["unit"] for x in probes])
        columns["pilot"].append([row["accuracy"] for row in mine if row["kind"] == "pilot"])
        for step in POINTS:
            of_step = [row["accuracy"][str(step)] for row in mine if row["kind"] == "train"]
            columns[f"after {step}"].append(of_step)
        told.append(sum(x[bank]["low"] > 0 for x in probes))
    lines = head_of(["bank", "intervals above 0", *columns])
    for i, bank in enumerate(BANKS):
        cells = [bank, f"{told[i]} of {len(probes)}"]
        for name, values in columns.items():
            form = "{:.2f}" if name in ("slope", "relative") else "{:.1%}"
            cells.append(form.format(statistics.mean(values[i])) if values[i] else "")
        lines.append(row_of(cells))
    lines += ["", *head_of(["rank correlation", *[f"after {step}" for step in POINTS]])]
    for name in ("slope", "relative", "pilot"):
        cells = [name]
        for step in POINTS:
            both = zip(columns[name], columns[f"after {step}"])
            means = [(statistics.mean(a), statistics.mean(b)) for a, b in both if a and b]
            one, other = [a for a, _ in means], [b for _, b in means]
            cells.append(with_bounds(one, other) if len(means) > 2 else "")
        lines.append(row_of(cells))
    cells = ["slope of each probe alone"]
    for step in POINTS:
        ends = [statistics.mean(runs) for runs in columns[f"after {step}"] if runs]
        alone = []
        for probe in probes if len(ends) == len(BANKS) else []:
            alone.append(f"{spearman([probe[bank]['slope'] for bank in BANKS], ends):.2f}")
        cells.append(", ".join(alone))
    lines.append(row_of(cells))
    for row in rows:
        if row["kind"] == "base":
            lines += ["", f"Base: {row['accuracy']:.1%} on the test problems."]
    return lines


def picture(path: str) -> None:
    """Accuracy after 20 steps by the slope of the base, a point for each bank."""
    import matplotlib

    import files

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = {"tiny": "tiny world", "lock": "harder world"}
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.6))
    for axis, (world, title) in zip(axes, titles.items()):
        rows = list(files.read_jsonl(HERE / f"{world}.jsonl"))
        probes = [row["slopes"] for row in rows if row["kind"] == "slopes"]
        for bank in BANKS:
            runs = [r for r in rows if (r["kind"], r.get("bank")) == ("train", bank)]
            ends = [100 * run["accuracy"]["20"] for run in runs]
            ranges = [[p[bank][name] for name in ("low", "slope", "high")] for p in probes]
            (low, x, high), y = np.mean(ranges, 0), statistics.mean(ends)
            color = {"own": "tab:blue", "hand": "tab:green"}.get(bank.split("-")[0], "tab:gray")
            axis.errorbar(x, y, xerr=[[x - low], [high - x]], fmt="o", color=color, alpha=0.7)
            if world == "lock":  # in the tiny world all names would lie on each other
                axis.annotate(bank, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=8)
        axis.axvline(0, color="black", linewidth=0.5)
        (base,) = (100 * row["accuracy"] for row in rows if row["kind"] == "base")
        axis.axhline(base, color="black", linewidth=0.5, linestyle=":")
        axis.set_title(title)
        axis.set_xlabel("slope of the base model, points a step (95% interval)")
    axes[0].set_ylabel("accuracy after 20 steps, test problems, %")
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--world", choices=("lock", "tiny"), default="lock")
    parser.add_argument("--minutes", type=float, default=60, help="begin no job after so many")
    parser.add_argument("--work", default="runs/slope", help="banks, and the job under way")
    parser.add_argument("--table", action="store_true", help="only print the table")
    parser.add_argument("--picture", metavar="FILE", help="only draw both worlds")
    args = parser.parse_args()
    import files

    if args.picture:
        picture(args.picture)
        return
    w, out, began = WORLDS[args.world], HERE / f"{args.world}.jsonl", time.monotonic()
    rows = list(files.read_jsonl(out))
    if args.table:
        print("\n".join(table(rows)))
        return
    work = pathlib.Path(args.work, args.world).absolute()
    work.mkdir(parents=True, exist_ok=True)
    for row in rows:
        if row["kind"] == "bank":
            (work / f"{row['bank']}.json").write_text(json.dumps(row["content"]))
    done = [{k: row[k] for k in ("kind", "bank", "seed") if k in row} for row in rows]
    for job in jobs_of():
        if job in done:
            continue
        if time.monotonic() - began > 60 * args.minutes:
            print(f"{args.minutes:g} minutes are over; the same command goes on")
            return
        print(f"{time.strftime('%H:%M')} {job}", flush=True)
        with open(work / "log.txt", "a") as log, contextlib.redirect_stdout(log):
            with contextlib.redirect_stderr(log):
                started = time.process_time()
                result = do_job(job, w, work)
        result["cpu_seconds"] = round(time.process_time() - started)
        files.append_jsonl(out, [job | result])


if __name__ == "__main__":
    main()
