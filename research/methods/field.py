"""SDPO and RLSD beside SGSD, GRPO and OPSD in the harder world: one table, field.md's.

    python research/methods/field.py                     train, evaluate, print the tables
    python research/methods/field.py --rows sdpo rlsd    finish these rows' jobs, without the tables
    python research/methods/field.py --show research/methods/field.json    the kept tables

Jobs, banks and settings are compare.py's. A row that compare_lock.json has keeps the rate chosen
there and its jobs, but seed 0 trains anew, for what was not measured then. A new row tries three
rates on validation problems. Finished jobs stay in --work, so the same command continues a killed
one.

Accuracy between two evaluations is taken to be linear in what was spent. Processor seconds are of
training alone, without bank and evaluation: the mean of a row's runs that measured them, evenly
spread over steps.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from research.markdown_table import head_of, row_of
from research.methods import compare
from research.methods.compare import Job, with_interval

KEPT = ROOT / "research" / "methods" / "compare_lock.json"
STEPS = (5, 20, 60)  # after which a run is evaluated
WORLD = dataclasses.replace(compare.WORLDS["lock"], points=STEPS)
BASES = ("base", "base+skill")
BEFORE = ("sgsd", "grpo", "grpo, sampled as sgsd", "opsd")
NEW = ("sdpo", "rlsd", "rlsd, sgsd's teachers")
ROWS = BEFORE + NEW
SHORT = "grpo, sampled as sgsd"
BESIDE = ("sgsd", SHORT)  # what the others are compared with
SPENT = ("generated_tokens", "processor_seconds")
Kept = dict[str, Any]  # rates, validation, results


def measure(
    rows: Sequence[str],
    seeds: range,
    processes: int,
    work: pathlib.Path,
    w: compare.World,
    before: Kept,
) -> Kept:
    """All jobs of these rows and of the two bases, finished. before: what compare.py kept."""
    work.mkdir(parents=True, exist_ok=True)
    for bank in before["banks"].values():
        (work / f"bank_made_{bank['seed']}.json").write_text(json.dumps(bank["bank"]))

    def do(jobs: list[Job], what: str) -> dict[str, Job]:
        return compare.do(jobs, w, work, processes, what)

    rates = {name: before["rates"][name] for name in rows if name in BEFORE}
    chosen, trials = choose_rates([name for name in rows if name in NEW], w, do)
    rates |= chosen
    jobs, kept = [], {}
    for seed in seeds:
        for name in BASES:
            job = {"world": "lock", "name": f"{name}-{seed}", "kind": "base", "method": name}
            jobs.append(job | {"seed": seed, "split": "test"})
        for name in rows:
            title = f"{name}-{seed}"
            if name in BEFORE and seed:
                kept[title] = before["results"][title]
                continue
            jobs.append(compare.training("lock", title, name, rates[name], seed, points=True))
    results = kept | do(jobs, "methods")
    return {"rates": rates, "validation": trials, "results": results}


def choose_rates(
    names: list[str], w: compare.World, do: Callable[[list[Job], str], dict[str, Job]]
) -> tuple[dict[str, float], dict[str, Job]]:
    """Each row's best rate on the validation problems, and the trials."""
    jobs = []
    for name in names:
        for rate in w.rates:
            title = f"valid-{name}-{rate}"
            jobs.append(compare.training("lock", title, name, rate, 100, split="valid"))
    trials, best = do(jobs, "rates"), dict[str, float]()
    for job in sorted(jobs, key=lambda job: compare.final(trials[job["name"]])):
        best[job["method"]] = job["rate"]
    return best, trials


# ------------------------------------------------------------------------------------ the tables


def runs_of(kept: Kept, name: str) -> list[Job]:
    """A row's jobs by seed."""
    runs = [job for job in kept["results"].values() if job["method"] == name]
    return sorted(runs, key=lambda job: job["seed"])


def curves(kept: Kept, name: str) -> list[dict[int, float]]:
    """Each seed's accuracy after 0 steps, which is the base model's, and after STEPS."""
    of_seeds = []
    for both in zip(runs_of(kept, name), runs_of(kept, "base")):
        curve = compare.curve(*both)
        of_seeds.append({step: curve[step] for step in (0, *STEPS)})
    return of_seeds


def cost_of(kept: Kept, name: str, run: Job, cost: str) -> list[float]:
    """What a row's run had spent after 0 steps, and after STEPS."""
    if cost == "generated_tokens":
        return [0, *[run["generated_at"][str(step)] for step in STEPS]]
    whole = statistics.mean(job[cost] for job in runs_of(kept, name) if cost in job)
    return [whole * step / STEPS[-1] for step in (0, *STEPS)]


def at(kept: Kept, name: str, cost: str, budgets: list[float]) -> list[float]:
    """Each seed's accuracy where its run has spent its budget."""
    values = []
    for run, curve, budget in zip(runs_of(kept, name), curves(kept, name), budgets):
        where = cost_of(kept, name, run, cost)
        values.append(compare.value_at(where, list(curve.values()), budget))
    return values


def interval(values: list[float], sign: str = "") -> str:
    return with_interval(values, sign) if len(values) > 1 else f"{values[0]:{sign}.1%}"


def less(ours: list[float], others: list[float]) -> str:
    return interval([a - b for a, b in zip(ours, others)], "+")


def names_of(kept: Kept) -> list[str]:
    return [name for name in ROWS if runs_of(kept, name)]


def gaps(kept: Kept, name: str, other: str, step: int) -> str:
    """A row's accuracy after a step less another's; "" for the row itself."""
    both = [[curve[step] for curve in curves(kept, x)] for x in (name, other)]
    return "" if name == other else less(*both)


def passed(kept: Kept, name: str) -> str:
    """pass@2 at the end, of the seeds that kept each problem's score."""
    shares = []
    for run in runs_of(kept, name):
        if "last_scores" in run:
            shares.append(statistics.mean(score > 0 for score in run["last_scores"].values()))
    return interval(shares)


def by_steps(kept: Kept) -> list[str]:
    """A row's accuracy after some steps, and its differences to others."""
    early = f"less {SHORT}, {STEPS[1]} steps"
    head = ["method", *[f"{step} steps" for step in STEPS], "pass@2"]
    head += [*[f"less {x}" for x in BESIDE], early]
    lines = head_of(head)
    for name in BASES:
        ends = [compare.final(run) for run in runs_of(kept, name)]
        lines.append(row_of([name, "", "", interval(ends), passed(kept, name), "", "", ""]))
    for name in names_of(kept):
        of_seeds = curves(kept, name)
        cells = [name, *[interval([curve[step] for curve in of_seeds]) for step in STEPS]]
        cells.append(passed(kept, name))
        cells += [gaps(kept, name, other, STEPS[-1]) for other in BESIDE]
        cells.append(gaps(kept, name, SHORT, STEPS[1]))
        lines.append(row_of(cells))
    return lines


def at_equal(kept: Kept) -> list[str]:
    """Each row beside others where both have spent as much: all that the cheaper of them did.

    Budgets are each seed's own.
    """
    head = ["method"]
    for cost in SPENT:
        head += [cost.replace("_", " "), *[f"less {x}" for x in BESIDE]]
    lines = head_of(head)
    for name in names_of(kept):
        cells = [name]
        for cost in SPENT:
            wholes = [cost_of(kept, name, run, cost)[-1] for run in runs_of(kept, name)]
            cells.append(f"{statistics.mean(wholes):,.0f}")
            for other in BESIDE:
                others = [cost_of(kept, other, run, cost)[-1] for run in runs_of(kept, other)]
                budgets = list(map(min, wholes, others))
                both = [at(kept, x, cost, budgets) for x in (name, other)]
                cells.append("" if name == other else less(*both))
        lines.append(row_of(cells))
    return lines


def tables(kept: Kept) -> list[str]:
    return [*by_steps(kept), "", *at_equal(kept)]


def picture(kept: Kept, path: pathlib.Path) -> None:
    """Accuracy by steps, sampled tokens and processor seconds: means over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(18, 5.5), sharey=True)
    for axis, cost in zip(axes, ("steps", *SPENT)):
        for name in names_of(kept):
            values = [list(curve.values()) for curve in curves(kept, name)]
            where = [list(map(float, curve)) for curve in curves(kept, name)]
            if cost != "steps":
                where = [cost_of(kept, name, run, cost) for run in runs_of(kept, name)]
            x = [statistics.mean(column) for column in zip(*where)]
            y = [statistics.mean(column) for column in zip(*values)]
            width = 3 if name == "sgsd" else 1.5
            axis.plot(x, y, f"C{ROWS.index(name)}", label=name, linewidth=width)
        axis.set_xlabel(cost.replace("_", " "))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("accuracy, test problems")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=60)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--rows", nargs="+", choices=ROWS, help="only finish these rows' jobs")
    add("--seeds", type=int, default=5, choices=range(1, 9))
    add("--jobs", type=int, default=2, help="processes of one thread each")
    add("--work", type=pathlib.Path, default=pathlib.Path("runs/field"))
    add("--show", type=pathlib.Path, metavar="FILE", help="print kept tables, then end")
    args = parser.parse_args(argv)
    if args.show:
        kept = json.loads(args.show.read_text())
    else:
        before, seeds = json.loads(KEPT.read_text()), range(args.seeds)
        kept = measure(args.rows or ROWS, seeds, args.jobs, args.work, WORLD, before)
        if args.rows:
            return
        (args.work / "field.json").write_text(json.dumps(kept) + "\n")
        picture(kept, args.work / "field.png")
    print("\n".join(tables(kept)))


if __name__ == "__main__":
    main()
