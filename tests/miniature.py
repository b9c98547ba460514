"""The paper's main table, its ablations and a sweep of misleading skills, on the embedded default.

    python tests/miniature.py             all of it: results/miniature.json and results/miniature.md
    python tests/miniature.py --quick     one seed, three methods, no choice of rates

Every method takes the preset tiny for 40 updates, a bank that the tiny model made (one per seed,
the same for all methods) and the best of three learning rates on the validation problems; then
five seeds on the test problems. GRPO draws 8 rollouts for each of 4 problems, twice the samples of
the others' 16; one row has it at their 16 problems, 8 times the samples. What is done is kept in
--work, so that a killed run goes on. The bank stays as it was made but for "sgsd, bank evolving".
Accuracy is avg@4 under the plain prompt, thinking on, but for base+skill. Only runs on the test
problems are evaluated before their last update. "Forward tokens" went through the model outside
decoding, padding with them.
"""

import argparse
import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import pathlib
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
TINY = ROOT / "tiny"
sys.path[:0] = [str(ROOT), str(TINY)]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per process
os.environ.setdefault("HF_HUB_OFFLINE", "1")

METHODS: dict[str, str] = {  # sgsd is sgsd.py's, all others are baselines.py's
    "grpo": "--method grpo --batch-size 4",
    "grpo+skill": "--method grpo+skill --num-teachers 3 --batch-size 4",
    "grpo, 16 problems": "--method grpo",
    "opsd": "--method opsd",
    "opsd, no clip": "--method opsd --objective-clip 0",
    "opsd+skill": "--method opsd+skill --num-teachers 3",
    "opsd+skill, no clip": "--method opsd+skill --num-teachers 3 --objective-clip 0",
    "sgsd": "",
    "sgsd, bank evolving": "--update-every 10",
    "no token mask": "--no-token-mask",
    "no clip": "--no-clip",
    "no threshold": "--eps-a 0",
    "none of the three": "--no-token-mask --no-clip --eps-a 0",
    "no polarity": "--no-polarity",
    "one teacher": "--num-teachers 1",
    "frozen teacher": "--teacher frozen",
    "periodic teacher": "--teacher periodic --teacher-period 10",
    "ema teacher": "--teacher ema --teacher-decay 0.97",
    "reverse KL": "--objective reverse_kl",
    "forward KL": "--objective forward_kl",
    "JSD": "--objective jsd",
    "top-100 support": "--support-top-k 100",
    "answer in the prompt": "--answer-pi",
    "random retrieval": "--retrieval random",
}
RATES = (1e-4, 3e-4, 1e-3)
RATE_OF = {"grpo, 16 problems": "grpo"}  # its own trials would cost 4 times as much
UPDATES, EVERY = 40, 20  # updates of a run, and between two evaluations
SHARES = (0, 25, 50, 75, 100)  # percent of families whose skill in the bank misleads
SWEPT = ("sgsd", "no polarity", "one teacher")
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # of Student's t, by number of seeds
COSTS = ("generated_tokens", "forward_tokens", "seconds")
Job = dict[str, Any]


# --------------------------------------------------------------------------------------- one job


def call(program: Callable[[list[str]], int], flags: str, **paths: object) -> None:
    """Run a command in this process. paths: flags whose values may have spaces."""
    argv = flags.split()
    for name, value in paths.items():
        argv += [f"--{name}", str(value)]
    code = program(argv)
    if code:
        raise RuntimeError(f"{program.__module__} {argv} ended with {code}; see its log.txt")


def make_bank(job: Job, bank: pathlib.Path) -> None:
    import skills

    call(skills.main, f"--preset tiny --seed {job['seed']}", out=bank)


def make_misleading_bank(job: Job, bank: pathlib.Path) -> None:
    """By hand: each family's true mistake and its skill, misleading for a share of the families."""
    import world

    import skills

    names = [family.name for family in world.FAMILIES]
    chosen = random.Random(job["seed"]).sample(names, round(job["share"] * len(names) / 100))
    right, wrong = [], []
    for family in world.FAMILIES:
        kind = "misleading" if family.name in chosen else "skill"
        right.append({"skill_id": f"gen_{family.name}", **world.item(None, family, kind)})
        wrong.append({"mistake_id": f"err_{family.name}", **world.item(None, family, "mistake")})
    skills.SkillBank(right, wrong, {"misleading": sorted(chosen)}).save(bank)


@contextlib.contextmanager
def forward_tokens() -> Iterator[list[int]]:
    """Counts the tokens of each forward pass outside decoding, by a hook on the embeddings."""
    import torch

    found: list[int] = []

    def count(module: torch.nn.Module, inputs: tuple) -> None:
        if isinstance(module, torch.nn.Embedding) and not torch.is_inference_mode_enabled():
            found.append(inputs[0].numel())

    handle = torch.nn.modules.module.register_module_forward_pre_hook(count)
    try:
        yield found
    finally:
        handle.remove()


def train(job: Job, bank: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    """What a training run cost."""
    import baselines
    import sgsd

    flags = METHODS[job["method"]]
    paths: dict[str, object] = {"out": out}
    if job["method"].split(",")[0] not in ("grpo", "opsd"):
        paths["bank"] = bank
        if "--update-every" not in flags:
            flags += " --update-every 0"
    paths["eval-data"] = ""
    every = EVERY if job["points"] else UPDATES
    flags = (
        f"--preset tiny --audit-every 0 --seed {job['seed']} --learning-rate {job['rate']} "
        f"--updates {UPDATES} --checkpoint-every {every} {flags}"
    )
    program = sgsd.main if job["method"].startswith("sgsd") else baselines.main
    began = time.perf_counter()
    with forward_tokens() as forward:
        call(program, flags, **paths)
    seconds = time.perf_counter() - began
    generated = 0
    for line in open(out / "rollouts.jsonl"):
        generated += len(json.loads(line)["completion_ids"])
    return {"seconds": seconds, "forward_tokens": sum(forward), "generated_tokens": generated}


def accuracy(samples: pathlib.Path) -> float:
    """The mean over problems, from a samples.jsonl."""
    right: dict[str, list[bool]] = {}
    for line in open(samples):
        row = json.loads(line)
        right.setdefault(row["id"], []).append(row["r"] > 0)
    return statistics.mean(statistics.mean(x) for x in right.values())


def do_job(job: Job, folder: pathlib.Path, work: pathlib.Path) -> dict[str, Any]:
    """A bank, or an evaluation of the base model or of a training run's checkpoints."""
    import eval

    bank = work / f"bank_{job.get('share', 'made')}_{job['seed']}.json"
    out = folder / "run"
    if job["kind"] == "bank":
        make_bank(job, bank)
        return {}
    if "share" in job and not bank.exists():
        make_misleading_bank(job, bank)
    paths: dict[str, object] = {"data": TINY / f"{job['split']}.jsonl"}
    flags = f"--samples 4 --max-new-tokens 96 --rows 160 --seed {job['seed']}"
    cost = {}
    if job["kind"] == "base":
        paths["out"], name = out, "tiny--model"
        if job["method"] == "base+skill":
            paths |= {"skills": bank, "encoder": TINY / "encoder"}
            flags, name = f"{flags} --num-skills 3", "tiny--model--skills"
        evaluated, folders = TINY / "model", {0: out / name}
    else:
        cost = train(job, bank, out)
        evaluated, folders = out, {}
        for path in sorted((out / "checkpoints").glob("step_*")):
            folders[int(path.name[5:])] = out / "eval" / path.name
    call(lambda argv: eval.main([str(evaluated), *argv]), flags, **paths)
    points = {step: accuracy(place / "samples.jsonl") for step, place in folders.items()}
    return {**cost, "accuracy": points}


def run(job: Job, work: pathlib.Path) -> Job:
    """One job in a process of its own; its output goes to a file."""
    folder = work / "now" / job["name"].replace(" ", "-").replace(",", "")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with open(folder / "log.txt", "w") as log:
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            result = {**job, **do_job(job, folder, work)}
    shutil.rmtree(folder)
    return result


def do(jobs: list[Job], work: pathlib.Path, workers: int, what: str) -> dict[str, Job]:
    """All jobs' results by name, those that are kept and those that are made now."""
    from tqdm import tqdm

    kept, results, left = work / "done", {}, []
    kept.mkdir(parents=True, exist_ok=True)
    for job in jobs:
        job["flags"] = METHODS.get(job.get("method", ""), "")
        file = kept / f"{job['name']}.json"
        old = json.loads(file.read_text()) if file.exists() else {}
        if job.items() <= old.items():  # made with the same settings
            results[job["name"]] = old
        else:
            left.append(job)
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, spawn) as pool:
        futures = [pool.submit(run, job, work) for job in left]
        done = concurrent.futures.as_completed(futures)
        for future in tqdm(done, total=len(left), desc=what, unit="job"):
            text = json.dumps(future.result())
            result = json.loads(text)
            results[result["name"]] = result
            (kept / f"{result['name']}.json").write_text(text)
    return results


# ------------------------------------------------------------------------------------ the tables


def final(result: Job) -> float:
    return list(result["accuracy"].values())[-1]


def with_interval(values: list[float], sign: str = "") -> str:
    """Mean of the seeds' values with Student's 95% interval."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{mean:{sign}.1%}"
    half = T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:{sign}.1%} ± {half:.1%}"


def row_of(cells: list[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def table(
    results: dict[str, Job], names: list[str], seeds: range, rates: dict[str, float]
) -> list[str]:
    """A row per method: accuracy over updates, difference to SGSD paired by seed, and its cost."""
    steps = list(range(EVERY, UPDATES + 1, EVERY))
    head = ["method", "rate", *steps[:-1], f"{UPDATES} updates", "- sgsd"]
    head += [cost.replace("_", " ") for cost in COSTS]
    lines = [row_of(head), "|---" * len(head) + "|"]
    for name in names:
        runs = [results[f"{name}-{seed}"] for seed in seeds]
        accuracies = [list(r["accuracy"].values()) for r in runs]
        points = [with_interval(list(column)) for column in zip(*accuracies)]
        gaps = [final(r) - final(results[f"sgsd-{seed}"]) for r, seed in zip(runs, seeds)]
        gap = "" if name == "sgsd" else with_interval(gaps, "+")
        costs = [""] * len(COSTS)
        if "seconds" in runs[0]:
            costs = [f"{statistics.mean(r[cost] for r in runs):,.0f}" for cost in COSTS]
        missing = [""] * (len(steps) - len(points))
        lines.append(row_of([name, rates.get(name, ""), *missing, *points, gap, *costs]))
    return lines


def sweep_table(sweep: dict[str, Job], seeds: range) -> list[str]:
    lines = ["", row_of(["misleading skills", *SWEPT]), "|---" * (1 + len(SWEPT)) + "|"]
    for share in SHARES:
        cells = [f"{share}%"]
        for name in SWEPT:
            runs = [sweep[f"misleading-{share}-{name}-{seed}"] for seed in seeds]
            cells.append(with_interval([final(r) for r in runs]))
        lines.append(row_of(cells))
    return lines


def training(name: str, method: str, rate: float, seed: int, **more: object) -> Job:
    settings = {"method": method, "rate": rate, "seed": seed}
    return {"name": name, "kind": "train", **settings, "split": "test", "points": False, **more}


def choose_rates(names: list[str], trials: dict[str, Job]) -> dict[str, float]:
    """Each method's best rate on the validation problems; the lowest of several."""
    rates = {}
    for name in names:
        of = RATE_OF.get(name, name)
        found = {rate: final(trials[f"valid-{of}-{rate}"]) for rate in RATES}
        rates[name] = max(found, key=lambda rate: found[rate])
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="one seed; base, grpo, opsd and sgsd at 3e-4")
    add("--seeds", type=int, default=5, choices=range(1, 6))
    add("--jobs", type=int, default=2, help="processes of one thread each")
    add("--work", default="runs/miniature", help="where banks and finished jobs are kept")
    add("--out", default="", help="of the table (default: results/miniature, or WORK/quick)")
    args = parser.parse_args()
    work, seeds = pathlib.Path(args.work), range(1 if args.quick else args.seeds)
    began = time.perf_counter()
    names = ["grpo", "opsd", "sgsd"] if args.quick else list(METHODS)
    bases = ["base"] if args.quick else ["base", "base+skill"]

    banks = [{"name": f"bank-{seed}", "kind": "bank", "seed": seed} for seed in (*seeds, 100)]
    do(banks, work, args.jobs, "banks")
    rates, trials = dict.fromkeys(names, 3e-4), {}
    if not args.quick:
        jobs = []
        for name in names:
            if name in RATE_OF:
                continue
            for rate in RATES:
                jobs.append(training(f"valid-{name}-{rate}", name, rate, 100, split="valid"))
        trials = do(jobs, work, args.jobs, "rates")
        rates = choose_rates(names, trials)
    jobs = []
    for seed in seeds:
        for name in bases:
            job = {"name": f"{name}-{seed}", "kind": "base", "method": name, "seed": seed}
            jobs.append({**job, "split": "test"})
        for name in names:
            jobs.append(training(f"{name}-{seed}", name, rates[name], seed, points=True))
    results = do(jobs, work, args.jobs, "methods")
    lines, sweep = table(results, bases + names, seeds, rates), {}
    if not args.quick:
        jobs = []
        for share in SHARES:
            for name in SWEPT:
                for seed in seeds:
                    title = f"misleading-{share}-{name}-{seed}"
                    jobs.append(training(title, name, rates[name], seed, share=share))
        sweep = do(jobs, work, args.jobs, "misleading skills")
        lines += sweep_table(sweep, seeds)
    minutes = (time.perf_counter() - began) / 60
    spent = f"{len(seeds)} seeds, {args.jobs} processes of one thread"
    lines += ["", f"{spent}, {minutes:.0f} minutes in this call."]

    out = ROOT / "results" / "miniature"
    if args.out or args.quick:
        out = pathlib.Path(args.out or work / "quick")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    found = {"rates": rates, "validation": trials, "results": results, "sweep": sweep}
    out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
