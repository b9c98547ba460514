"""The paper's methods and ablations, SDPO and RLSD, in the tiny and the harder world.

    python research/methods/compare.py --show    every method in both worlds; nothing is trained
    python research/methods/compare.py --show FILE.json    all tables of a finished comparison
    python research/methods/compare.py --budgets    SGSD and GRPO at equal steps and equal tokens
    python research/methods/compare.py --claims     the paper's claims beside what both worlds show
    python research/methods/compare.py --world lock     the harder world: every row, five seeds
    python research/methods/compare.py --world tiny     the same in the first world, the default
    python research/methods/compare.py --world lock --methods sgsd grpo    these rows alone
    python research/methods/compare.py --world lock_long --seeds 3    three methods, 180 steps

Every method takes the world's settings and a bank that the world's model made: one per seed, the
same for all methods except those with the hand-written full bank. The learning rate comes from the
validation problems: the best of three for sgsd and each baseline, and sgsd's for its ablations.

Each method then trains with five seeds. After some steps we measure accuracy on the test problems
under the plain prompt, thinking on. Intervals are Student's over seeds; differences are paired by
seed. GRPO draws 8 solutions of each of its problems, in all twice the others' samples.

WORK has a folder for each job, with its runs, evaluations and log.txt, and what is finished in
WORK/done: the same command continues a killed one. After a change to a world's settings, use
another --work. Costs are of the training alone, processor seconds of its last command.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORLDS_OF = ROOT / "research" / "worlds"
sys.path[:0] = [str(ROOT), str(WORLDS_OF)]

import numpy as np

from research.markdown_table import head_of, row_of

METHODS: dict[str, str] = {  # `program_of` says whose each one is
    "sgsd": "",
    "grpo": "",
    "opsd": "",
    "opsd, no bound": "--objective-clip 0",
    "no polarity": "--no-polarity",
    "sgsd, other bank": "",  # fixed where sgsd's evolves, and the other way round
    "grpo+skill": "--num-teachers 3 --evolve-every 0",
    "opsd+skill": "--num-teachers 3 --evolve-every 0",
    "opsd+skill, no bound": "--num-teachers 3 --evolve-every 0 --objective-clip 0",
    "one teacher": "--num-teachers 1",
    "no token mask": "--no-token-mask",
    "no clip": "--no-clip",
    "no threshold": "--eps-a 0",
    "none of the three": "--no-token-mask --no-clip --eps-a 0",
    "answer in the prompt": "--answer-pi",
    "frozen teacher": "--teacher frozen",
    "periodic teacher": "--teacher periodic --teacher-period 10",
    "ema teacher": "--teacher ema --teacher-decay 0.97",
    "reverse KL": "--objective reverse_kl",
    "forward KL": "--objective forward_kl",
    "JSD": "--objective jsd",
    "top-100 support": "--support-top-k 100",
    "random retrieval": "--retrieval random",
    "bare prompt": "--student-prefix bare",  # as in evaluation, and as GRPO trains
    "grpo, sampled as sgsd": "--short",
}
FULL = "random retrieval, full bank"  # by hand: every family's true skill and mistake
METHODS[FULL] = METHODS["random retrieval"]
PAPER = tuple(METHODS)  # the rows of the large table, beside the bases
NEW = ("sdpo", "rlsd", "rlsd, sgsd's teachers")  # SDPO and RLSD, by --methods alone
METHODS |= {"sdpo": "", "rlsd": "", "rlsd, sgsd's teachers": "--evolve-every 0"}
METHODS |= {  # what teachers read, by --methods alone
    "donor's pairs": "--retrieval donor",
    "shuffled words": "--skill-text shuffled",
    "no text": "--skill-text none",
}
FACTORS = {"grpo, a fifth of the rate": 1 / 5, "grpo, a twentieth of the rate": 1 / 20}
METHODS |= dict.fromkeys(FACTORS, "")  # beside grpo, by --methods alone
TRIED: tuple[str, ...] = ("sgsd", "grpo", "opsd", "opsd, no bound", "grpo+skill", "opsd+skill")
TRIED += ("opsd+skill, no bound", *NEW)  # methods with a rate of their own
BASES = ("base", "base+skill")


@dataclasses.dataclass(frozen=True)
class World:
    """Where a world lies and how its runs are set."""

    folder: pathlib.Path  # with model/, encoder/ and train, valid and test.jsonl
    bank_flags: str
    points: tuple[int, ...]  # steps after which a run is evaluated; the last one ends it
    rates: tuple[float, ...]
    tokens: int  # of a solution
    batch: int  # problems per step
    grpo_batch: int  # the same for GRPO, which draws 8 rollouts of each
    samples: int  # per problem of an evaluation
    other: int  # steps per evolution of the bank of "sgsd, other bank"; the others' stay
    methods: tuple[str, ...]


WORLDS = {
    "tiny": World(
        folder=ROOT / "tiny",
        bank_flags="",
        points=(5, 10, 20, 40),
        rates=(1e-4, 3e-4, 1e-3),
        tokens=96,
        batch=16,
        grpo_batch=4,
        samples=4,
        other=10,
        methods=tuple(name for name in PAPER if name != FULL),
    ),
    "lock": World(
        folder=WORLDS_OF / "harder",
        bank_flags="--cold-start 320 --cold-start-tokens 160",
        points=(5, 10, 20, 40, 60),
        rates=(3e-4, 1e-3, 3e-3),
        tokens=160,
        batch=8,
        grpo_batch=2,
        samples=2,
        other=20,
        methods=PAPER,
    ),
}
WORLDS["lock_long"] = dataclasses.replace(  # is there a late collapse?
    WORLDS["lock"], points=(20, 60, 120, 180), methods=("sgsd", "no polarity", "grpo")
)
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}  # Student's t, by seeds
COSTS = ("generated_tokens", "forward_tokens", "seconds")  # forward tokens: kept runs alone
BUDGETS = (  # in the harder world; the last is what 60 steps of GRPO cost with its cheapest seed
    (20, "steps"),
    (60, "steps"),
    (10_000, "generated_tokens"),
    (20_000, "generated_tokens"),
    (60_000, "generated_tokens"),
    (277_000, "forward_tokens"),
)
Job = dict[str, Any]
OLDER_TEACHERS = ("frozen teacher", "periodic teacher", "ema teacher")
# A claim; what the paper has (Qwen3-1.7B; 9 to 18 AIME24; none: a curve alone); whether it holds in
# the harder world; the rows that it is about, each minus the first. The last two are ours.
CLAIMS = (
    ("1. SGSD improves on the base", "37.4 to 43.7", "yes", "base", "sgsd"),
    ("2. a skill in the prompt alone does not help", "37.4 to 35.9", "no", "base", "base+skill"),
    ("3. SGSD is above GRPO", "43.7, 37.5", "no", "grpo", "sgsd"),
    ("4. GRPO is often below the base", "", "no", "base", "grpo"),
    ("5. SGSD is above OPSD", "43.7, 42.0; 8B 65.5, 66.8", "no fair test", "opsd", "sgsd"),
    ("6. OPSD falls late", "", "in part: at once", "base", "opsd", "opsd, no bound"),
    ("7. visible skills spoil OPSD", "42.0 to 40.6", "no", "opsd", "opsd+skill"),
    ("7, without its bound", "", "no; tiny: yes", "opsd, no bound", "opsd+skill, no bound"),
    (
        "8. visible skills do not help GRPO",
        "37.5 to 39.0; 8B 65.0 to 63.4",
        "yes",
        "grpo",
        "grpo+skill",
    ),
    ("9. no polarity: it collapses late", "", "yes", "sgsd", "no polarity"),
    ("10. one teacher is below several", "", "yes", "sgsd", "one teacher"),
    ("11. no token mask: worse", "54.4 to 54.2", "yes", "sgsd", "no token mask"),
    ("12. no clip: worse", "54.4 to 52.5", "open", "sgsd", "no clip"),
    ("13. no threshold: worse", "54.4 to 51.4", "open", "sgsd", "no threshold"),
    ("14. none of the three: below the base", "48.1, base 51.1", "no", "base", "none of the three"),
    ("15. a live teacher ends best", "", "yes", "sgsd", *OLDER_TEACHERS),
    ("16. the gate peaks highest", "", "yes", "sgsd", "reverse KL", "forward KL", "JSD"),
    ("17. the top 100 tokens are not enough", "", "yes", "sgsd", "top-100 support"),
    ("18. the teacher sees the answer: collapse", "-9.7", "open", "sgsd", "answer in the prompt"),
    ("19. an evolving bank helps", "not measured", "not seen", "sgsd", "sgsd, other bank"),
    ("20. nearest pairs beat random ones", "", "no", "sgsd", "random retrieval"),
    ("21. right steps of failures have reversed teachers", "", "no: 0 of 214", "sgsd"),
)


# --------------------------------------------------------------------------------------- one job


def program_of(method: str) -> str:
    """What trains a row."""
    for name in ("grpo", "opsd", "rlsd", "sdpo"):
        if method.startswith(name):
            return f"-m methods.{name}"
    return "sgsd.py" if method.startswith("sgsd") else "-m methods.ablations"


def sees_bank(method: str) -> bool:
    """Whether a row's training is given a bank."""
    plain = method.split(",")[0] in ("grpo", "opsd", "rlsd", "sdpo")
    return not plain or method == "rlsd, sgsd's teachers"


def call(folder: pathlib.Path, line: str, **paths: object) -> float:
    """Run a command, with its output in folder/log.txt; its processor seconds. It must succeed."""
    argv = shlex.split(line)
    for flag, value in paths.items():
        argv += [f"--{flag}", str(value)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "log.txt", "a") as log:
        print("$", shlex.join(argv), file=log, flush=True)
        command = [sys.executable, *argv]
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{shlex.join(argv)}: exit code {process.returncode}; see {log.name}")
    return used.ru_utime + used.ru_stime


def train_flags(job: Job, w: World) -> str:
    """The flags of a job's training, without its paths."""
    name, flags = job["method"], METHODS[job["method"]]
    if program_of(name) in ("sgsd.py", "-m methods.ablations"):
        flags += f" --evolve-every {w.other if name == 'sgsd, other bank' else 0}"
    batch = w.grpo_batch if name.startswith(("grpo", "rlsd", "sdpo")) else w.batch
    flags += f" --batch-size {batch} --max-new-tokens {w.tokens} --steps {w.points[-1]}"
    flags += f" --checkpoint-every {w.points[0]} --audit-every 0"
    return f"--preset tiny {flags} --seed {job['seed']} --learning-rate {job['rate']}"


def bank_of(job: Job, w: World, work: pathlib.Path) -> pathlib.Path:
    if job["method"] != FULL:
        return work / f"bank-{job['seed']}/run/bank/bank.json"
    import world

    import skills

    right, wrong = [], []
    for family in world.FAMILIES:
        right.append({"skill_id": f"gen_{family.name}", **world.item(None, family, "skill")})
        wrong.append({"mistake_id": f"err_{family.name}", **world.item(None, family, "mistake")})
    skills.SkillBank(right, wrong).save(work / "full_bank.json")
    return work / "full_bank.json"


def train(job: Job, w: World, folder: pathlib.Path, work: pathlib.Path) -> Job:
    """Train; what it cost."""
    from lib import files

    out = folder / "run"
    paths: Job = {"model": w.folder / "model", "data": w.folder / "train.jsonl", "out": out}
    if sees_bank(job["method"]):
        paths |= {"bank": bank_of(job, w, work), "encoder": w.folder / "encoder"}
    used = call(folder, f"{program_of(job['method'])} {train_flags(job, w)}", **paths)
    drawn, seconds = dict.fromkeys(range(1, w.points[-1] + 1), 0), 0.0
    for row in files.read_jsonl(out / "rollouts.jsonl"):
        drawn[row["step"]] += len(row["completion_ids"])
    for row in files.read_jsonl(out / "metrics.jsonl"):
        seconds += sum(x for name, x in row.items() if name.startswith("seconds."))
    tokens = list(itertools.accumulate(drawn.values()))
    cost = {"seconds": seconds, "processor_seconds": round(used), "generated_tokens": tokens[-1]}
    return cost | {"generated_at": {step: tokens[step - 1] for step in w.points}}


def scores_of(place: pathlib.Path) -> dict[str, float]:
    """Each problem's share of right samples in an evaluation."""
    right: dict[str, list[bool]] = {}
    for line in open(place / "samples.jsonl"):
        row = json.loads(line)
        right.setdefault(row["id"], []).append(row["r"] > 0)
    return {problem: statistics.mean(verdicts) for problem, verdicts in right.items()}


def run(job: Job, w: World, folder: pathlib.Path, work: pathlib.Path) -> Job:
    """A bank, or an evaluation of the base model or of a training's checkpoints."""
    out, model = folder / "run", w.folder / "model"
    if job["kind"] == "bank":
        line = f"sgsd.py --preset tiny {w.bank_flags} --steps 0 --seed {job['seed']}"
        paths = {"data": w.folder / "train.jsonl", "encoder": w.folder / "encoder"}
        call(folder, line, model=model, out=out, **paths)
        return {"bank": json.loads((out / "bank/bank.json").read_text())}
    flags = f"--max-new-tokens {w.tokens} --samples {w.samples} --rows 160 --seed {job['seed']}"
    paths, cost = {"data": w.folder / f"{job['split']}.jsonl"}, {}
    if job["kind"] == "base":
        places, evaluated = {0: out / f"{w.folder.name}--model"}, [model]
        paths["out"] = out
        if job["method"] == "base+skill":
            paths |= {"skills": bank_of(job, w, work), "encoder": w.folder / "encoder"}
            flags, places = f"{flags} --num-skills 3", {0: out / f"{w.folder.name}--model--skills"}
    else:
        cost = train(job, w, folder, work)
        points = w.points if job["split"] == "test" else w.points[-1:]
        places = {step: out / f"eval/step_{step:06d}" for step in points}
        evaluated = [out / "checkpoints" / place.name for place in places.values()]
    call(folder, shlex.join(["eval.py", *map(str, evaluated)]) + f" {flags}", **paths)
    scores = {step: scores_of(place) for step, place in places.items()}
    accuracy = {step: statistics.mean(of_step.values()) for step, of_step in scores.items()}
    return cost | {"accuracy": accuracy, "last_scores": list(scores.values())[-1]}


class Runner:
    """Jobs of one world, some at a time; what is finished is kept."""

    def __init__(self, world: str, work: pathlib.Path, workers: int):
        self.world, self.work, self.workers = world, work, workers

    def result(self, job: Job) -> Job:
        from lib import files

        done = self.work / "done" / f"{job['name']}.json"
        if not done.exists():
            made = run(job, WORLDS[self.world], self.work / job["name"], self.work)
            done.parent.mkdir(exist_ok=True)
            files.write_json(done, {**job, "world": self.world, **made})
            print(job["name"], "is done", flush=True)
        kept = json.loads(done.read_text())
        if not job.items() <= kept.items():
            raise RuntimeError(f"{done}: of other settings; give another --work")
        return kept

    def do(self, jobs: list[Job]) -> dict[str, Job]:
        """All jobs' results by name."""
        with concurrent.futures.ThreadPoolExecutor(self.workers) as pool:
            return {job["name"]: result for job, result in zip(jobs, pool.map(self.result, jobs))}

    def compare(self, names: Sequence[str], seeds: Sequence[int], rate: float = 0) -> Job:
        """Everything: banks, trials of rates if none is given, and each row with each seed."""
        trial = () if rate else (100,)
        banks = [{"name": f"bank-{x}", "kind": "bank", "seed": x} for x in (*seeds, *trial)]
        banks_by_name = self.do(banks)
        trials = []
        for name in TRIED:
            for tried in WORLDS[self.world].rates if not rate and name in (*names, "sgsd") else ():
                trials.append(training(f"valid-{name}-{tried}", name, tried, 100, "valid"))
        validation = self.do(trials)
        best: dict[str, float] = {}
        for trial in sorted(trials, key=lambda job: final(validation[job["name"]])):
            best[trial["method"]] = trial["rate"]
        rates = {name: best.get(name, best.get("sgsd", rate)) for name in names}
        for name in [name for name in names if name in FACTORS]:
            rates[name] *= FACTORS[name]
        jobs = []
        for seed in seeds:
            for name in BASES:
                job = {"name": f"{name}-{seed}", "kind": "base", "method": name, "seed": seed}
                jobs.append(job | {"split": "test"})
            for name in names:
                jobs.append(training(f"{name}-{seed}", name, rates[name], seed, "test"))
        kept = {"rates": rates, "validation": validation, "results": self.do(jobs)}
        return kept | {"banks": banks_by_name}


def training(name: str, method: str, rate: float, seed: int, split: str) -> Job:
    job = {"name": name, "kind": "train", "method": method, "rate": rate}
    return job | {"seed": seed, "split": split}


# ------------------------------------------------------------------------------------ the tables


def final(result: Job) -> float:
    return list(result["accuracy"].values())[-1]


def with_interval(values: list[float], sign: str = "") -> str:
    """Mean of the seeds' values with Student's 95% interval."""
    mean = statistics.mean(values)
    half = T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:{sign}.1%} ± {half:.1%}"


def curve(result: Job, base: Job) -> dict[int, float]:
    """Steps -> accuracy, from the base model on."""
    accuracy = {0: final(base)}
    for step, value in result["accuracy"].items():
        accuracy[int(step)] = value
    return accuracy


def area(points: dict[int, float]) -> float:
    """The mean accuracy over all steps: the area under the curve by the length of its base."""
    steps, total = list(points), 0.0
    for start, end in itertools.pairwise(steps):
        total += (points[start] + points[end]) / 2 * (end - start)
    return total / steps[-1]


def tables(kept: Job, beside: str = "sgsd") -> list[str]:
    """A row per method: accuracy over steps, differences to one row and cost; then each seed's."""
    results = kept["results"]
    trained = [job for job in results.values() if job["kind"] == "train"]
    names = list(dict.fromkeys(job["method"] for job in trained))
    seeds = range(1 + max(job["seed"] for job in trained))
    bases = [results[f"base-{seed}"] for seed in seeds]
    curves = {}
    for name in names:
        curves[name] = [curve(results[f"{name}-{seed}"], bases[seed]) for seed in seeds]
    steps = list(curves[beside][0])
    head = ["method", "rate", *steps, "mean over steps", f"mean - {beside}", f"last - {beside}"]
    costs = [name for name in COSTS if all(name in job for job in trained)]
    lines = head_of([*head, *[cost.replace("_", " ") for cost in costs]])
    by_seed = ["", *head_of(["method", *[f"{step}: - {beside}, by seed" for step in steps[1:]]])]
    for kind in BASES:
        shown = with_interval([final(results[f"{kind}-{seed}"]) for seed in seeds])
        lines.append(row_of([kind, "", shown] + [""] * (len(head) - 3 + len(costs))))
    for name, of_seeds in curves.items():
        runs = [results[f"{name}-{seed}"] for seed in seeds]
        pairs = list(zip(of_seeds, curves[beside]))
        cells = [name, runs[0]["rate"], ""]
        cells += [with_interval([c[step] for c in of_seeds]) for step in steps[1:]]
        cells.append(with_interval([area(c) for c in of_seeds]))
        means = with_interval([area(c) - area(own) for c, own in pairs], "+")
        lasts = with_interval([c[steps[-1]] - own[steps[-1]] for c, own in pairs], "+")
        cells += ["", ""] if name == beside else [means, lasts]
        for cost in costs:
            cells.append(f"{statistics.mean(job[cost] for job in runs):,.0f}")
        lines.append(row_of(cells))
        cells = [name]
        for step in steps[1:]:
            gap = with_interval([c[step] - own[step] for c, own in pairs], "+")
            cells.append(f"{gap}: {' '.join(f'{100 * c[step]:.1f}' for c in of_seeds)}")
        by_seed.append(row_of(cells))
    return lines + by_seed


def kept_results(world: str) -> dict[str, Job]:
    text = (ROOT / f"research/methods/compare_{world}.json").read_text()
    return json.loads(text)["results"]


def both_worlds() -> list[str]:
    """A row per method: its accuracy in the end in the two worlds, and its difference to SGSD."""
    kept, head = [kept_results("tiny"), kept_results("lock")], ["method"]
    for title in ("tiny world, 40 steps", "harder world, 60 steps"):
        head += [title, "minus SGSD"]
    lines = head_of(head)
    for method in (*BASES, *PAPER):
        cells = [method]
        for results in kept:
            if f"{method}-0" not in results:
                cells += ["", ""]
                continue
            ends = [final(results[f"{method}-{seed}"]) for seed in range(5)]
            gaps = [end - final(results[f"sgsd-{seed}"]) for seed, end in enumerate(ends)]
            cells += [with_interval(ends), "" if method == "sgsd" else with_interval(gaps, "+")]
        lines.append(row_of(cells))
    return lines


def claims() -> list[str]:
    """A row per claim: the final accuracy of its first row, and what the others have minus it."""
    lines = head_of(["claim", "paper", "holds in the harder world?", "harder world", "tiny world"])
    for claim, paper, holds, first, *others in CLAIMS:
        cells = [claim, paper, holds]
        for world in ("lock", "tiny"):
            results = kept_results(world)
            start = [final(results[f"{first}-{seed}"]) for seed in range(5)]
            parts = [f"{first} {with_interval(start)}"]
            for name in others:
                ends = [final(results[f"{name}-{seed}"]) for seed in range(5)]
                gaps = [end - its for end, its in zip(ends, start)]
                parts.append(f"{name} {with_interval(gaps, '+')}")
            cells.append("; ".join(parts))
        lines.append(row_of(cells))
    return lines


def spent(result: Job, cost: str) -> list[float]:
    """What a run has spent, in steps or tokens, at each point at which it was evaluated.

    Forward tokens were counted for the whole run alone: every step is taken to cost the same.
    """
    steps = [0, *map(int, result["accuracy"])]
    if cost == "steps":
        return steps
    if cost == "generated_tokens":
        return [0, *result["generated_at"].values()]
    return [result[cost] * step / steps[-1] for step in steps]


def accuracy_at(result: Job, base: Job, cost: str, budget: float) -> float:
    """A run's accuracy at a budget, on the straight line between two evaluations."""
    costs = spent(result, cost)
    assert budget <= costs[-1], (result["name"], cost, budget)
    return float(np.interp(budget, costs, [*curve(result, base).values()]))


def budgets(results: dict[str, Job], own: str) -> list[str]:
    """A row per budget: the method `own`, both ways of sampling GRPO, and own minus each."""
    others = ("grpo", "grpo, sampled as sgsd")
    lines = head_of(["budget", own, *others, *[f"{own} - {other}" for other in others]])
    for budget, cost in BUDGETS:
        ends: dict[str, list[float]] = {}
        for name in (own, *others):
            of_seeds = []
            for seed in range(5):
                base = results[f"base-{seed}"]
                of_seeds.append(accuracy_at(results[f"{name}-{seed}"], base, cost, budget))
            ends[name] = of_seeds
        cells = [f"{budget:,} {cost.replace('_', ' ')}"]
        cells += [with_interval(of_seeds) for of_seeds in ends.values()]
        for other in others:
            gaps = [mine - its for mine, its in zip(ends[own], ends[other])]
            cells.append(with_interval(gaps, "+"))
        lines.append(row_of(cells))
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--world", choices=WORLDS, default="tiny")
    add("--methods", nargs="+", choices=METHODS, help="rows of the table (default: the world's)")
    add("--seeds", type=int, default=5, choices=range(2, 9))
    add("--rate", type=float, default=0, help="of all rows (default: the best of three trials)")
    add("--jobs", type=int, default=2, help="processes of one thread each")
    add("--work", type=pathlib.Path, help="of the jobs (default: runs/compare_WORLD)")
    add("--show", nargs="*", metavar="FILE", help="print tables of finished comparisons, then end")
    add("--beside", default="sgsd", metavar="ROW", help="what --show FILE compares its rows with")
    add("--budgets", action="store_true", help="print SGSD and GRPO at equal budgets, then end")
    add("--claims", action="store_true", help="print the paper's claims and both worlds, then end")
    args = parser.parse_args(argv)
    if args.budgets:
        for own in ("sgsd", FULL):
            print("\n".join([*budgets(kept_results("lock"), own), ""]))
        return
    if args.claims:
        print("\n".join(claims()))
        return
    if args.show is not None:
        parts = []
        for file in args.show:
            parts.append(tables(json.loads(pathlib.Path(file).read_text()), args.beside))
        print("\n\n".join("\n".join(lines) for lines in parts or [both_worlds()]))
        return
    names = ["sgsd", *(args.methods or WORLDS[args.world].methods)]  # compared with the first
    work = (args.work or pathlib.Path(f"runs/compare_{args.world}")).resolve()
    runner = Runner(args.world, work, args.jobs)
    kept = runner.compare([*dict.fromkeys(names)], range(args.seeds), args.rate)
    (work / "table.json").write_text(json.dumps(kept) + "\n")
    print("\n".join(tables(kept)))


if __name__ == "__main__":
    main()
