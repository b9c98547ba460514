"""Does the slope of the base model predict what training with a bank does?

    python research/slope/measure.py --world lock --minutes 60    goes on with lock.jsonl
    python research/slope/measure.py --world tiny --minutes 60    the same in the first world
    python research/slope/measure.py --world lock --table         the tables and figures
    python research/slope/measure.py --picture slope.png          both worlds (needs matplotlib)
    python research/slope/measure.py --world tiny --rehearse      all of it in small, in --work

Twelve banks per world: the model's own from seeds 5 to 9; hand-written ones with a true mistake for
every family and a skill that misleads for 0, 25, 50, 75 and 100% of them; and two with all words in
another order. SGSD has the settings of research/methods/compare.py.

A round measures the slopes of all banks on one set of rollouts of the base model (80 problems x 4),
then trains with each bank for 60 steps and evaluates after 5, 20 and 60 on the test problems, then
makes a pilot with each bank: 5 steps, and solutions of validation problems, as many rollouts
together as the probe has. All three have seeds of their own. Each finished job is one line, so the
same command goes on after a kill. One process, one thread. The predictions were committed before.
--rehearse takes two banks, two steps and few rollouts, and leaves the kept files alone.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT / "research/worlds")]
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np

from research.markdown_table import head_of, row_of
from research.methods.compare import (
    WORLDS,
    World,
    arguments,
    call,
    make_bank,
    make_misleading_bank,
    places,
    scores_of,
)

OWN, SHARES = range(5, 10), (0, 25, 50, 75, 100)
BANKS = [f"own-{seed}" for seed in OWN] + [f"hand-{share}" for share in SHARES]
BANKS += ["shuffled-own-5", "shuffled-hand-0"]
POINTS = (5, 20, 60)  # steps
RATE = 1e-3
Job = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is measured."""

    banks: tuple[str, ...] = tuple(BANKS)
    rounds: int = 3
    problems: int = 80  # of a probe
    samples: int = 4  # of each
    points: tuple[int, ...] = POINTS  # steps after which a run is evaluated
    pilot: int = 5  # steps


FULL = Plan()
SMALL = Plan(("own-5", "shuffled-own-5"), rounds=1, problems=8, samples=2, points=(1, 2), pilot=1)


def jobs_of(plan: Plan) -> list[Job]:
    """All jobs in order; whatever is done when time is up makes a table."""
    jobs: list[Job] = [{"kind": "bank", "bank": name} for name in plan.banks]
    jobs.append({"kind": "base"})
    for turn in range(plan.rounds):
        jobs.append({"kind": "slopes", "seed": 40 + turn})
        for name in plan.banks:
            jobs.append({"kind": "train", "bank": name, "seed": 20 + turn})
        for name in plan.banks:
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


def write_bank(name: str, w: World, work: pathlib.Path) -> None:
    import skills

    kind, _, number = name.rpartition("-")
    path = work / f"{name}.json"
    if kind == "own":
        make_bank(int(number), w, work / f"{name}_run", path)
    elif kind == "hand":
        make_misleading_bank({"seed": 0, "share": int(number)}, path)
    else:
        whole = skills.SkillBank.load(work / f"{name.removeprefix('shuffled-')}.json")
        shuffled(whole, 0).save(path)


def train(job: Job, w: World, work: pathlib.Path, plan: Plan, last: int) -> pathlib.Path:
    """A run of SGSD over the first `last` of its planned steps; its folder.

    Goes on with a killed one.
    """
    import sgsd
    from lib import config
    from lib.run import Run
    from skills import SkillBank

    out = work / "now"
    if (out / "job.json").exists() and json.loads((out / "job.json").read_text()) != job:
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "job.json").write_text(json.dumps(job))
    run, steps = out / "run", plan.points[-1]
    end = run / "checkpoints" / f"step_{last:06d}"
    if end.exists():
        return run
    flags = f"{w.flags} --batch-size {w.batch} --max-new-tokens {w.tokens} --evolve-every 0"
    flags += f" --steps {steps} --checkpoint-every {plan.points[0]} --audit-every 0"
    flags += f" --seed {job['seed']} --learning-rate {RATE}"
    bank = work / f"{job['bank']}.json"
    argv = arguments(flags, **places(w), encoder=w.encoder, bank=bank, out=run)

    def step_fn(opened: Run, step: int) -> tuple[list[dict], float]:
        result = sgsd.train_step(opened, step)
        if step == last < steps:
            opened.signalled = time.monotonic()  # a pilot stops here, with the plan's own rates
        return result

    with Run.open(config.parse(argv, "", config.Config), SkillBank.load) as opened:
        sgsd.train(opened, step_fn)
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


def test_accuracy(w: World, run: pathlib.Path, seed: int, plan: Plan) -> dict[str, float]:
    """By step: a run's accuracy on the test problems after each of the plan's points."""
    names = [f"step_{step:06d}" for step in plan.points]
    policies = [str(run / "checkpoints" / name) for name in names]
    evaluate(w, policies, pathlib.Path(w.folder, "test.jsonl"), w.samples, seed)
    scores = [mean_score(run / "eval" / name / "samples.jsonl") for name in names]
    return dict(zip(map(str, plan.points), scores))


def do_job(job: Job, w: World, work: pathlib.Path, plan: Plan) -> dict[str, Any]:
    """A job's result."""
    if job["kind"] == "bank":
        write_bank(job["bank"], w, work)
        return {"content": json.loads((work / f"{job['bank']}.json").read_text())}
    if job["kind"] == "base":
        shutil.rmtree(work / "base", ignore_errors=True)
        test = pathlib.Path(w.folder, "test.jsonl")
        evaluate(w, [f"{w.folder}/model"], test, w.samples, 20, out=work / "base")
        (log,) = work.glob("base/*/samples.jsonl")
        return {"accuracy": mean_score(log)}
    if job["kind"] == "slopes":
        return slopes(job, w, work, plan)
    if job["kind"] == "train":
        run = train(job, w, work, plan, plan.points[-1])
        return {"accuracy": test_accuracy(w, run, job["seed"], plan)}
    return pilot(job, w, work, plan)


def pilot(job: Job, w: World, work: pathlib.Path, plan: Plan) -> dict[str, Any]:
    """The accuracy after the first steps, by the rollouts that these leave of a probe's."""
    trained = plan.pilot * w.batch
    left = max(2, plan.problems * plan.samples - trained)
    lines = pathlib.Path(w.folder, "valid.jsonl").read_text().splitlines()[: left // 2]
    problems = work / "pilot.jsonl"
    problems.write_text("\n".join(lines) + "\n")
    run = train(job, w, work, plan, plan.pilot)
    name = f"step_{plan.pilot:06d}"
    evaluate(w, [str(run / "checkpoints" / name)], problems, 2, job["seed"])
    log = run / "eval" / name / "samples.jsonl"
    return {"accuracy": mean_score(log), "rollouts": trained + 2 * len(lines)}


def slopes(job: Job, w: World, work: pathlib.Path, plan: Plan) -> dict[str, Any]:
    """The probe's numbers for all banks, from one set of rollouts."""
    from research.slope import probe

    flags = f"{w.flags} --batch-size {w.batch} --max-new-tokens {w.tokens}"
    flags += f" --problems {plan.problems} --samples {plan.samples} --seed {job['seed']}"
    flags += f" --learning-rate {RATE}"
    first, *others = plan.banks
    argv = arguments(flags, **places(w), encoder=w.encoder, bank=work / f"{first}.json")
    for name in others:
        argv += ["--try", f"--bank {work}/{name}.json"]
    out = work / "probe.json"
    if probe.main([*argv, "--out", str(out)]):
        raise RuntimeError("the probe did not end")
    numbers = json.loads(out.read_text())
    rows = dict(zip(["grpo", *plan.banks], numbers.pop("rows")))
    for row in rows.values():
        del row["flags"]  # they have this machine's paths
    return numbers | {"slopes": rows}


def spearman(a: list[float], b: list[float]) -> float:
    """The correlation of ranks; equal values share their mean rank."""

    def ranks(values: list[float]) -> np.ndarray:
        x = np.array(values)
        return (x[:, None] > x).sum(1) + ((x[:, None] == x).sum(1) - 1) / 2

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def with_bounds(a: list[float], b: list[float]) -> str:
    """The rank correlation with a 95% bootstrap over banks."""
    low, high = bootstrap(spearman, a, b)
    return f"{spearman(a, b):.2f} ({low:.2f} to {high:.2f})"


def bootstrap(f: Callable[..., float], *values: Sequence[float], draws: int = 4000) -> np.ndarray:
    """95% of f over banks drawn with replacement; values: of each bank. [2]."""
    columns, rng, found = np.array(values), np.random.default_rng(0), []
    for _ in range(draws):
        drawn = columns[:, rng.integers(columns.shape[1], size=columns.shape[1])].tolist()
        if all(len({*column}) > 1 for column in drawn):
            found.append(f(*drawn))
    return np.quantile(found, (0.025, 0.975))


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
    return lines


def facts(rows: list[dict]) -> list[str]:
    """The other figures of the page, a line each, once every bank has a run in each round."""
    slopes_RN, low_RN = of_probes(rows, "slope"), of_probes(rows, "low")
    runs = {step: of_kind(rows, "train", str(step)) for step in POINTS}
    probes = [row for row in rows if row["kind"] == "slopes"]
    (base,) = (row["accuracy"] for row in rows if row["kind"] == "base")
    slope_N, pilot_N = slopes_RN.mean(0), of_kind(rows, "pilot").mean(0)
    grpo = [probe["slopes"]["grpo"]["slope"] for probe in probes]
    below = sum(int((slopes_N < x).sum()) for slopes_N, x in zip(slopes_RN, grpo))
    always_N = (low_RN > 0).all(0)
    own_N = np.array([name.startswith("own") for name in BANKS])
    lines = [f"base model: {base:.1%} on the test problems"]
    lines.append(f"GRPO's slopes: {shown(grpo)}; below them {below} of the banks' {slopes_RN.size}")
    lines.append(f"intervals of banks above 0, by probe: {(low_RN > 0).sum(1).tolist()}")
    lines.append(f"mean slope of the banks, by probe: {shown(slopes_RN.mean(1))}")
    for step, accuracy_RN in runs.items():
        end_N = accuracy_RN.mean(0)
        alone = [spearman(list(x_N), list(end_N)) for x_N in slopes_RN]
        own = spearman(list(slope_N[own_N]), list(end_N[own_N]))
        lines.append(f"after {step} steps: rank correlation of each probe alone {shown(alone)}")
        lines.append(f"  of the own banks {own:.2f}; pilot's less slope's, 95%: ")
        lines[-1] += shown(bootstrap(pilot_less_slope, pilot_N, slope_N, end_N))
        lines.append(f"  runs below the base model: {int((accuracy_RN < base).sum())}")
        if always_N.any() and not always_N.all():
            above, others = end_N[always_N].mean(), end_N[~always_N].mean()
            lines.append(f"  banks above 0 in every probe: {above:.1%}, others {others:.1%}")
        if len(accuracy_RN) > 1:
            spread = accuracy_RN.var(0, ddof=1).mean() ** 0.5
            lines.append(f"  standard deviation of a bank's runs: {100 * spread:.1f} points")
    gain_N = 100 * (runs[POINTS[0]].mean(0) - base) / (POINTS[0] * slope_N)
    ends = shown([gain_N.min(), gain_N.max()])
    lines.append(f"gain after {POINTS[0]} steps over as many slopes, least and most: {ends}")
    if len(slopes_RN) > 1:
        moved_RN = slopes_RN - slopes_RN.mean(1, keepdims=True)
        spreads = [x_RN.var(0, ddof=1).mean() ** 0.5 for x_RN in (slopes_RN, moved_RN)]
        spreads.append(slope_N.std(ddof=1))
        lines.append("standard deviation of a bank's slope between probes, the same without ")
        lines[-1] += f"each probe's mean, and between banks: {shown(spreads)}"
    seconds = {"pilot": 0, "slopes": 0}
    for row in rows:
        if row["kind"] in seconds:
            seconds[row["kind"]] += row["cpu_seconds"]
    lines.append(f"pilots took {seconds['pilot'] / seconds['slopes']:.0%} of the probes' time")
    return lines


def shown(values: Any) -> str:
    return ", ".join(f"{x:.2f}" for x in values)


def of_kind(rows: list[dict], kind: str, step: str = "") -> np.ndarray:
    """Accuracies by round and bank; of a training after `step`. [R, N]."""
    columns = []
    for bank in BANKS:
        mine = [row["accuracy"] for row in rows if (row["kind"], row.get("bank")) == (kind, bank)]
        columns.append([x[step] if step else x for x in mine])
    return np.array(columns).T


def of_probes(rows: list[dict], name: str) -> np.ndarray:
    """A number of each bank by round. [R, N]."""
    numbers = []
    for row in rows:
        if row["kind"] == "slopes":
            numbers.append([row["slopes"][bank][name] for bank in BANKS])
    return np.array(numbers)


def pilot_less_slope(pilot: list[float], slope: list[float], end: list[float]) -> float:
    return spearman(pilot, end) - spearman(slope, end)


def picture(path: str) -> None:
    """Accuracy after 20 steps by the slope of the base, a point for each bank."""
    import matplotlib

    from lib import files

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


def main(argv: Sequence[str] | None = None, worlds: dict[str, World] = WORLDS) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--world", choices=("lock", "tiny"), default="lock")
    parser.add_argument("--minutes", type=float, default=60, help="begin no job after so many")
    parser.add_argument("--work", default="runs/slope", help="banks, and the job under way")
    parser.add_argument("--table", action="store_true", help="only print what is there")
    parser.add_argument("--picture", metavar="FILE", help="only draw both worlds")
    parser.add_argument("--rehearse", action="store_true", help="in small, into --work alone")
    args = parser.parse_args(argv)
    from lib import files

    if args.picture:
        picture(args.picture)
        return
    work = pathlib.Path(args.work, args.world).absolute()
    w, out, began = worlds[args.world], HERE / f"{args.world}.jsonl", time.monotonic()
    if args.table:
        rows = list(files.read_jsonl(out))
        print("\n".join([*table(rows), "", *facts(rows)]))
        return
    plan = FULL
    if args.rehearse:
        plan, out = SMALL, work / "rehearsal.jsonl"
        flags = f"{w.flags} --cold-start 8 --num-teachers 1"
        w = dataclasses.replace(w, flags=flags, batch=2, samples=1)
    rows = list(files.read_jsonl(out))
    work.mkdir(parents=True, exist_ok=True)
    for row in rows:
        if row["kind"] == "bank":
            (work / f"{row['bank']}.json").write_text(json.dumps(row["content"]))
    done = [{k: row[k] for k in ("kind", "bank", "seed") if k in row} for row in rows]
    for job in jobs_of(plan):
        if job in done:
            continue
        if time.monotonic() - began > 60 * args.minutes:
            print(f"{args.minutes:g} minutes are over; the same command goes on")
            return
        print(f"{time.strftime('%H:%M')} {job}", flush=True)
        with open(work / "log.txt", "a") as log, contextlib.redirect_stdout(log):
            with contextlib.redirect_stderr(log):
                started = time.process_time()
                result = do_job(job, w, work, plan)
        result["cpu_seconds"] = round(time.process_time() - started)
        files.append_jsonl(out, [job | result])


if __name__ == "__main__":
    main()
