"""The paper's methods and ablations as curves, in the tiny and the harder world.

    python research/methods/compare.py --show    the table of this folder's page; nothing is trained
    python research/methods/compare.py --show FILE.json    all tables of a finished comparison
    python research/methods/compare.py --world lock     the harder world: table.md, .json, .png
    python research/methods/compare.py --world tiny     the same in the first world, the default
    python research/methods/compare.py --world lock --methods sgsd grpo    these rows alone
    python research/methods/compare.py --world lock_long --seeds 3    three methods, 180 steps
    python research/methods/compare.py --sweep    banks with misleading skills, in the world tiny

Every method takes the world's settings and a bank that the world's model made: one per seed, the
same for all methods except those with the hand-written full bank. The learning rate comes from the
validation problems: the best of three for sgsd and each baseline, and sgsd's for its ablations; a
row named 3e-4 has that rate.

Each method then trains with five seeds. After some steps we measure accuracy on the test problems
under the plain prompt, thinking on. Intervals are Student's over seeds; differences are paired by
seed. GRPO draws 8 solutions of each of its problems, in all twice the others' samples. "Forward
tokens" went through the model outside decoding, with padding. Costs are of the training runs alone,
without the making of their banks.

Finished jobs stay in --work, so the same command continues a killed one. After a change to a
world's settings, use another --work. Logs and checkpoints of the runs stay in --work, too.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import importlib
import itertools
import json
import multiprocessing
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY, WORLDS_OF = ROOT / "tiny", ROOT / "research" / "worlds"
sys.path[:0] = [str(ROOT), str(WORLDS_OF)]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per process
os.environ.setdefault("HF_HUB_OFFLINE", "1")

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
PAPER = tuple(METHODS)  # the rows that a table has, beside the world's bases
RATES = {"sgsd, 3e-4": 3e-4}  # fixed, where others are chosen
METHODS |= {"sgsd, 3e-4": ""}
METHODS |= {"sdpo": "", "rlsd": "", "rlsd, sgsd's teachers": "--evolve-every 0"}  # field.py's
TRIED: tuple[str, ...] = ("sgsd", "grpo", "opsd", "opsd, no bound", "grpo+skill", "opsd+skill")
TRIED += ("opsd+skill, no bound",)  # methods with a rate of their own


@dataclasses.dataclass(frozen=True)
class World:
    """Where a world lies and how its runs are set."""

    folder: str  # with model/ and train, valid and test.jsonl
    encoder: str
    flags: str  # of the bank and of training
    bank_flags: str  # of the bank alone
    points: tuple[int, ...]  # steps after which a run is evaluated; the last one ends it
    trial: int  # steps of a run that tries a rate
    rates: tuple[float, ...]
    tokens: int  # of a solution
    batch: int  # problems per step
    grpo_batch: int  # the same for GRPO, which draws 8 rollouts of each
    samples: int  # per problem of an evaluation
    rows: int  # that an evaluation decodes at a time
    evolve: int  # steps per evolution of the bank; 0 keeps the bank as it was made
    other: int  # the same for "sgsd, other bank"
    skills: int  # pairs in a prompt of base+skill
    methods: tuple[str, ...] = tuple(name for name in PAPER if name != FULL)


TINY_FLAGS = "--preset tiny"
WORLDS = {
    "tiny": World(
        folder=f"{TINY}",
        encoder=f"{TINY}/encoder",
        flags=TINY_FLAGS,
        bank_flags="",
        points=(5, 10, 20, 40),
        trial=40,
        rates=(1e-4, 3e-4, 1e-3),
        tokens=96,
        batch=16,
        grpo_batch=4,
        samples=4,
        rows=160,
        evolve=0,
        other=10,
        skills=3,
    ),
    "lock": World(
        folder=f"{WORLDS_OF}/harder",
        encoder=f"{WORLDS_OF}/harder/encoder",
        flags=TINY_FLAGS,
        bank_flags="--cold-start 320 --cold-start-tokens 160",
        points=(5, 10, 20, 40, 60),
        trial=60,
        rates=(3e-4, 1e-3, 3e-3),
        tokens=160,
        batch=8,
        grpo_batch=2,
        samples=2,
        rows=160,
        evolve=0,
        other=20,
        skills=3,
        methods=PAPER,
    ),
}
WORLDS["lock_long"] = dataclasses.replace(  # is there a late collapse?
    WORLDS["lock"], points=(20, 60, 120, 180), methods=("sgsd", "no polarity", "grpo")
)
SHARES = (0, 25, 50, 75, 100)  # percent of families whose skill in the bank misleads
SWEPT = ("sgsd", "no polarity", "one teacher")
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}  # Student's t, by seeds
COSTS = ("generated_tokens", "forward_tokens", "seconds")
Job = dict[str, Any]


# --------------------------------------------------------------------------------------- one job


def arguments(flags: str, **paths: object) -> list[str]:
    """A command's arguments. paths: flags whose values may have spaces."""
    argv = flags.split()
    for name, value in paths.items():
        argv += [f"--{name}", str(value)]
    return argv


def call(program: Callable[[list[str]], object], flags: str, **paths: object) -> None:
    """Run a command in this process, with `arguments`."""
    argv = arguments(flags, **paths)
    code: object
    try:
        code = program(argv)
    except SystemExit as e:  # a mistake, which the program has printed
        code = e.code
    if code:
        raise RuntimeError(f"{program.__module__} {argv} ended with {code}; see its log.txt")


def make_bank(seed: int, w: World, out: pathlib.Path, bank: pathlib.Path) -> None:
    """The world's model writes a bank: a run without steps in `out`. Goes on with a killed one."""
    import sgsd

    flags = f"{w.flags} {w.bank_flags} --steps 0 --seed {seed}"
    call(sgsd.main, flags, **places(w), encoder=w.encoder, out=out)
    shutil.copy(out / "bank" / "bank.json", bank)


def places(w: World) -> dict[str, object]:
    return {"model": f"{w.folder}/model", "data": f"{w.folder}/train.jsonl"}


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

    counts: list[int] = []

    def count(module: torch.nn.Module, inputs: tuple) -> None:
        if isinstance(module, torch.nn.Embedding) and not torch.is_inference_mode_enabled():
            counts.append(inputs[0].numel())

    handle = torch.nn.modules.module.register_module_forward_pre_hook(count)
    try:
        yield counts
    finally:
        handle.remove()


def processor_seconds() -> float:
    """Of this process and of its children that have ended, such as the verifier's worker."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def points_of(job: Job, w: World) -> tuple[int, ...]:
    """The steps after which a job's run is evaluated."""
    return w.points if job["points"] else (w.trial,)


def settings_of(job: Job, w: World) -> str:
    """The flags of a job's training, without its paths."""
    name, flags = job["method"], METHODS[job["method"]]
    if program_of(name) in ("sgsd", "methods.ablations"):
        flags += f" --evolve-every {w.other if name == 'sgsd, other bank' else w.evolve}"
    batch = w.grpo_batch if name.startswith(("grpo", "rlsd", "sdpo")) else w.batch
    points = points_of(job, w)
    flags += f" --batch-size {batch} --max-new-tokens {w.tokens} --steps {points[-1]}"
    flags += f" --checkpoint-every {points[0]} --audit-every 0"
    return f"{w.flags} {flags} --seed {job['seed']} --learning-rate {job['rate']}"


def program_of(method: str) -> str:
    """The module that trains a row."""
    for name in ("grpo", "opsd", "rlsd", "sdpo"):
        if method.startswith(name):
            return f"methods.{name}"
    return "sgsd" if method.startswith("sgsd") else "methods.ablations"


def train(job: Job, w: World, bank: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    """What a training run cost; its checkpoints are in `out`. Goes on with a run that is there."""
    from lib import files

    name, points = job["method"], points_of(job, w)
    steps = points[-1]
    paths: dict[str, object] = {**places(w), "out": out}
    of_skills = name == "rlsd, sgsd's teachers"
    if of_skills or name.split(",")[0] not in ("grpo", "opsd", "rlsd", "sdpo"):
        paths |= {"bank": bank, "encoder": w.encoder}
    cost = out / "cost.json"
    if not cost.exists():  # else a kill came after the training
        made = max(files.by_step(out / "checkpoints"), default=0)
        if made == steps:  # killed before its tokens were written down
            made = 0
            shutil.rmtree(out)
        began = processor_seconds()
        with forward_tokens() as forward:
            call(importlib.import_module(program_of(name)).main, settings_of(job, w), **paths)
        whole = steps / (steps - made)  # a killed run's first steps were not watched
        spent = {"forward_tokens": round(sum(forward) * whole)}
        spent["processor_seconds"] = round((processor_seconds() - began) * whole)
        files.write_json(cost, spent)
    seconds = 0.0
    for row in files.read_jsonl(out / "metrics.jsonl"):
        seconds += sum(x for name, x in row.items() if name.startswith("seconds."))
    drawn = dict.fromkeys(range(1, steps + 1), 0)
    for row in files.read_jsonl(out / "rollouts.jsonl"):
        drawn[row["step"]] += len(row["completion_ids"])
    return {
        "seconds": seconds,
        **json.loads(cost.read_text()),
        "generated_tokens": sum(drawn.values()),
        "generated_at": {step: sum(list(drawn.values())[:step]) for step in points},
    }


def scores_of(samples: pathlib.Path) -> dict[str, float]:
    """Each problem's share of right samples, from a samples.jsonl."""
    right: dict[str, list[bool]] = {}
    for line in open(samples):
        row = json.loads(line)
        right.setdefault(row["id"], []).append(row["r"] > 0)
    return {problem: statistics.mean(x) for problem, x in right.items()}


def do_job(job: Job, w: World, folder: pathlib.Path, work: pathlib.Path) -> dict[str, Any]:
    """A bank, or an evaluation of the base model or of a training run's checkpoints."""
    import eval

    bank = work / f"bank_{job.get('share', 'made')}_{job['seed']}.json"
    out = folder / "run"
    if job["kind"] == "bank":
        make_bank(job["seed"], w, out, bank)
        return {"bank": json.loads(bank.read_text())}
    if "share" in job and not bank.exists():
        make_misleading_bank(job, bank)
    paths: dict[str, object] = {"data": f"{w.folder}/{job['split']}.jsonl"}
    flags = f"--max-new-tokens {w.tokens} --samples {w.samples} --seed {job['seed']}"
    flags += f" --rows {w.rows}"
    cost = {}
    if job["kind"] == "base":
        paths["out"], name = out, f"{pathlib.Path(w.folder).name}--model"
        if job["method"] == "base+skill":
            paths |= {"skills": bank, "encoder": w.encoder}
            flags, name = f"{flags} --num-skills {w.skills}", f"{name}--skills"
        evaluated, folders = [f"{w.folder}/model"], {0: out / name}
    else:
        cost = train(job, w, bank, out)
        folders = {step: out / "eval" / f"step_{step:06d}" for step in points_of(job, w)}
        evaluated = [str(out / "checkpoints" / path.name) for path in folders.values()]
    call(lambda argv: eval.main([*evaluated, *argv]), flags, **paths)
    scores = {step: scores_of(place / "samples.jsonl") for step, place in folders.items()}
    accuracy = {step: statistics.mean(found.values()) for step, found in scores.items()}
    figures = {}
    for step, place in folders.items():
        (of_set,) = json.loads((place / "results.json").read_text()).values()
        figures[step] = {name: of_set[name] for name in ("pass", "tokens")}
    return {
        **cost,
        "accuracy": accuracy,
        "figures": figures,
        "last_scores": [*scores.values()][-1],
    }


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def run(job: Job, w: World, work: pathlib.Path) -> Job:
    """One job in a process of its own; its output goes to a file."""
    from lib import files

    folder = work / "now" / job["name"].replace(" ", "-").replace(",", "")
    asked = folder / "job.json"
    if not asked.exists() or json.loads(asked.read_text()) != job:  # else it was killed: go on
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        asked.write_text(json.dumps(job))
    with open(folder / "log.txt", "a") as log:
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            result = {**job, "commit": commit(), **do_job(job, w, folder, work)}
    files.write_json(done_file(work, job), result)  # whatever becomes of the others
    kept = work / "kept" / folder.name  # logs and checkpoints, for whoever wants to look closer
    shutil.rmtree(kept, ignore_errors=True)
    kept.parent.mkdir(exist_ok=True)
    folder.rename(kept)
    return json.loads(json.dumps(result))


def done_file(work: pathlib.Path, job: Job) -> pathlib.Path:
    return work / "done" / f"{job['name']}.json"


def do(jobs: list[Job], w: World, work: pathlib.Path, workers: int, what: str) -> dict[str, Job]:
    """All jobs' results by name, those that are kept and those that are made now."""
    from tqdm import tqdm

    results, left = {}, []
    for job in jobs:
        job["flags"] = METHODS.get(job.get("method", ""), "")
        file = done_file(work, job)
        old = json.loads(file.read_text()) if file.exists() else {}
        if job.items() <= old.items():  # of the same method, seed, rate and world
            results[job["name"]] = old
        else:
            left.append(job)
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, spawn) as pool:
        futures = [pool.submit(run, job, w, work) for job in left]
        done = concurrent.futures.as_completed(futures)
        try:
            for future in tqdm(done, total=len(left), desc=what, unit="job"):
                results[future.result()["name"]] = future.result()
        except BaseException:  # what waits is not begun, and what runs is kept
            pool.shutdown(cancel_futures=True)
            raise
    return results


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
    for step, value in result.get("accuracy", {}).items():
        accuracy[int(step)] = value
    return accuracy


def value_at(where: list[float], values: list[float], x: float) -> float:
    """Linear between two points of a curve."""
    for (x0, y0), (x1, y1) in itertools.pairwise(zip(where, values)):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    raise ValueError(f"{x} is outside {where[0]}..{where[-1]}")


def area(points: dict[int, float]) -> float:
    """The mean accuracy over all steps: the area under the curve by the length of its base."""
    steps, total = list(points), 0.0
    for start, end in itertools.pairwise(steps):
        total += (points[start] + points[end]) / 2 * (end - start)
    return total / steps[-1]


def spent(result: Job, cost: str, w: World) -> list[float]:
    """Tokens until each point of the curve; the forward tokens are spread evenly over steps."""
    if cost == "generated_tokens":
        return [0, *result["generated_at"].values()]
    return [result[cost] * step / w.points[-1] for step in (0, *w.points)]


def table(w: World, results: dict[str, Job], names: list[str], seeds: range) -> list[str]:
    """A row per method: accuracy over steps, differences to SGSD paired by seed, and its cost."""
    head = ["method", "rate", 0, *w.points, "mean over steps", "mean - sgsd", "last - sgsd"]
    lines = head_of([*head, *[cost.replace("_", " ") for cost in COSTS]])
    for kind in ("base", "base+skill"):
        shown = with_interval([final(results[f"{kind}-{seed}"]) for seed in seeds])
        lines.append(row_of([kind, "", shown] + [""] * (len(head) - 3 + len(COSTS))))
    bases = [results[f"base-{seed}"] for seed in seeds]
    ours = [curve(results[f"sgsd-{seed}"], base) for seed, base in zip(seeds, bases)]
    for name in names:
        runs = [results[f"{name}-{seed}"] for seed in seeds]
        curves = [curve(run, base) for run, base in zip(runs, bases)]
        cells = [name, runs[0]["rate"], ""]
        cells += [with_interval([c[step] for c in curves]) for step in w.points]
        cells.append(with_interval([area(c) for c in curves]))
        means = [area(c) - area(own) for c, own in zip(curves, ours)]
        lasts = [c[w.points[-1]] - own[w.points[-1]] for c, own in zip(curves, ours)]
        gaps = [with_interval(x, "+") for x in (means, lasts)]
        cells += [""] * 2 if name == "sgsd" else gaps
        for cost in COSTS:
            cells.append(f"{statistics.mean(run[cost] for run in runs):,.0f}")
        lines.append(row_of(cells))
    return lines


def both_worlds() -> list[str]:
    """A row per method: its accuracy in the end in the two worlds, and its difference to SGSD."""
    kept, head = [], ["method"]
    for name, title in (("tiny", "tiny world, 40 steps"), ("lock", "harder world, 60 steps")):
        text = (ROOT / f"research/methods/compare_{name}.json").read_text()
        kept.append(json.loads(text)["results"])
        head += [title, "less SGSD's"]
    lines = head_of(head)
    for method in ("base", "base+skill", *PAPER):
        cells = [method]
        for results in kept:
            if f"{method}-0" not in results:
                cells += [""] * 2
                continue
            ends = [final(results[f"{method}-{seed}"]) for seed in range(5)]
            gaps = [end - final(results[f"sgsd-{seed}"]) for seed, end in enumerate(ends)]
            cells += [with_interval(ends), "" if method == "sgsd" else with_interval(gaps, "+")]
        lines.append(row_of(cells))
    return lines


def kept_tables(file: pathlib.Path) -> list[str]:
    """All tables of a finished comparison, from its .json."""
    results = json.loads(file.read_text())["results"]
    trained = [job for job in results.values() if job["kind"] == "train"]
    names = list(dict.fromkeys(job["method"] for job in trained))
    seeds = range(1 + max(job["seed"] for job in trained))
    w = WORLDS[trained[0]["world"]]
    lines = table(w, results, names, seeds) + by_steps(results, names, seeds)
    return lines + (equal_cost(w, results, names, seeds) if len(names) > 1 else [])


def by_steps(results: dict[str, Job], names: list[str], seeds: range) -> list[str]:
    """Each method's difference to SGSD after so many steps, and every seed's accuracy there."""
    points = list(results[f"sgsd-{seeds[0]}"]["accuracy"])
    lines = ["", *head_of(["method", *[f"{step}: - sgsd, by seed" for step in points]])]
    for name in names:
        cells = [name]
        for step in points:
            runs, ours = (
                [results[f"{x}-{s}"]["accuracy"][step] for s in seeds] for x in (name, "sgsd")
            )
            gap = with_interval([a - b for a, b in zip(runs, ours)], "+")
            cells.append(f"{gap}: {' '.join(f'{100 * x:.1f}' for x in runs)}")
        lines.append(row_of(cells))
    return lines


def equal_cost(w: World, results: dict[str, Job], names: list[str], seeds: range) -> list[str]:
    """Each method beside SGSD where both have spent as many tokens, which is the cheaper's all."""
    head = ["method"]
    for cost in COSTS[:2]:
        head += [cost.replace("_", " "), "accuracy", "sgsd's"]
    lines = ["", *head_of(head)]
    ours, *others = names
    for name in others:
        cells = [name]
        for cost in COSTS[:2]:
            budget = min(results[f"{x}-{seed}"][cost] for x in (name, ours) for seed in seeds)
            cells.append(f"{budget:,.0f}")
            for x in (name, ours):
                cells.append(with_interval(at_cost(w, results, x, seeds, cost, budget)))
        lines.append(row_of(cells))
    return lines


def at_cost(
    w: World, results: dict[str, Job], name: str, seeds: range, cost: str, budget: float
) -> list[float]:
    """Each seed's accuracy where its run has spent so many tokens."""
    found = []
    for seed in seeds:
        run = results[f"{name}-{seed}"]
        values = list(curve(run, results[f"base-{seed}"]).values())
        found.append(value_at(spent(run, cost, w), values, budget))
    return found


def picture(w: World, results: dict[str, Job], names: list[str], seeds: range, path) -> None:
    """Curves by steps, sampled tokens and forward tokens; methods above, ablations below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    above = (*TRIED, "no polarity", "grpo, sampled as sgsd")
    methods = [name for name in names if name in above]
    ablations = ["sgsd", *[name for name in names if name not in methods]]
    groups = [shown for shown in (methods, ablations) if len(shown) > 1]
    size = (18, 5.5 * len(groups))
    figure, axes = pyplot.subplots(len(groups), 3, figsize=size, sharey=True, squeeze=False)
    for row, shown in zip(axes, groups):
        for axis, cost in zip(row, ("steps", *COSTS[:2])):
            for i, name in enumerate(shown):
                where, values = [], []
                for seed in seeds:
                    run = results[f"{name}-{seed}"]
                    values.append(list(curve(run, results[f"base-{seed}"]).values()))
                    steps = [0.0, *w.points]
                    where.append(steps if cost == "steps" else spent(run, cost, w))
                x = [statistics.mean(column) for column in zip(*where)]
                y = [statistics.mean(column) for column in zip(*values)]
                style = "-" if i < 10 else "--"
                axis.plot(x, y, style, label=name, linewidth=3 if name == "sgsd" else 1.5)
            axis.set_xlabel(cost.replace("_", " "))
            axis.grid(alpha=0.3)
        row[0].set_ylabel("accuracy, test problems")
        row[-1].legend(bbox_to_anchor=(1.02, 1), loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=60)


def sweep_table(sweep: dict[str, Job], seeds: range) -> list[str]:
    lines = head_of(["misleading skills", *SWEPT])
    for share in SHARES:
        cells = [f"{share}%"]
        for name in SWEPT:
            runs = [sweep[f"misleading-{share}-{name}-{seed}"] for seed in seeds]
            cells.append(with_interval([final(r) for r in runs]))
        lines.append(row_of(cells))
    return lines


# --------------------------------------------------------------------------------------- the jobs


def training(world: str, name: str, method: str, rate: float, seed: int, **more: object) -> Job:
    job = {"world": world, "name": name, "kind": "train", "method": method, "rate": rate}
    return {**job, "seed": seed, "split": "test", "points": False, **more}


def choose_rates(
    world: str, w: World, names: Sequence[str], do_all: Callable[[list[Job], str], dict[str, Job]]
) -> tuple[dict[str, float], dict[str, Job]]:
    """Each tried method's best rate on the validation problems, sgsd's for all others."""
    jobs = []
    for name in TRIED:
        if name in names or name == "sgsd":
            for rate in w.rates:
                job = training(world, f"valid-{name}-{rate}", name, rate, 100, split="valid")
                jobs.append(job)
    trials, best = do_all(jobs, "rates"), dict[str, float]()
    for job in sorted(jobs, key=lambda job: final(trials[job["name"]])):
        best[job["method"]] = job["rate"]
    return {name: (best | RATES).get(name, best["sgsd"]) for name in names}, trials


def main(argv: Sequence[str] | None = None, worlds: dict[str, World] = WORLDS) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--world", choices=worlds, default="tiny")
    add("--methods", nargs="+", choices=METHODS, help="rows of the table (default: the world's)")
    add("--sweep", action="store_true", help="banks with misleading skills, at 1e-3")
    add("--seeds", type=int, default=5, choices=range(2, 9))
    add("--jobs", type=int, default=2, help="processes of one thread each")
    add("--work", default="", help="where finished jobs are kept (default: runs/compare_WORLD)")
    add("--out", default="", help="of the tables (default: runs/compare_WORLD/table)")
    add("--show", nargs="*", metavar="FILE", help="print tables of finished comparisons, then end")
    args = parser.parse_args(argv)
    if args.show is not None:
        parts = [kept_tables(pathlib.Path(file)) for file in args.show] or [both_worlds()]
        print("\n\n".join("\n".join(lines) for lines in parts))
        return
    w, seeds = worlds[args.world], range(args.seeds)
    work = pathlib.Path(args.work or f"runs/compare_{args.world}")
    if args.sweep and args.world != "tiny":
        parser.error("--sweep is of the world tiny")
    names = args.methods or w.methods
    names = list(dict.fromkeys(["sgsd", *names]))  # the others are compared with it
    out = pathlib.Path(args.out or f"runs/compare_{args.world}/table")
    out.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()

    def do_all(jobs: list[Job], what: str) -> dict[str, Job]:
        return do(jobs, w, work, args.jobs, what)

    if args.sweep:
        jobs = []
        for share in SHARES:
            for name in SWEPT:
                for seed in seeds:
                    title = f"misleading-{share}-{name}-{seed}"
                    jobs.append(training("tiny", title, name, 1e-3, seed, share=share))
        print("\n".join(sweep_table(do_all(jobs, "misleading skills"), seeds)))
        return

    jobs = []
    for seed in (*seeds, 100):
        jobs.append({"world": args.world, "name": f"bank-{seed}", "kind": "bank", "seed": seed})
    banks = do_all(jobs, "banks")
    rates, trials = choose_rates(args.world, w, names, do_all)
    jobs = []
    for seed in seeds:
        for name in ("base", "base+skill"):
            job = {"world": args.world, "name": f"{name}-{seed}", "kind": "base", "method": name}
            jobs.append({**job, "seed": seed, "split": "test"})
    for name in names:
        for seed in seeds:
            job = training(args.world, f"{name}-{seed}", name, rates[name], seed, points=True)
            jobs.append(job | ({"share": 0} if name == FULL else {}))
    results = do_all(jobs, "methods")
    lines = [f"# Methods in the world {args.world}: accuracy by steps, and what it cost", ""]
    lines += ["The mean over steps is the area under the curve; forward tokens are those that"]
    lines[-1] += " went through the model outside decoding, with padding."
    lines.append("")
    lines += table(w, results, names, seeds) + by_steps(results, names, seeds)
    lines += equal_cost(w, results, names, seeds)
    minutes = (time.perf_counter() - began) / 60
    lines += ["", f"{len(seeds)} seeds, {args.jobs} processes of one thread; the last call took "]
    lines[-1] += f"{minutes:.0f} minutes, and used what earlier ones had made."
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    found = {"rates": rates, "validation": trials, "results": results, "banks": banks}
    out.with_suffix(".json").write_text(json.dumps(found) + "\n")
    picture(w, results, names, seeds, out.with_suffix(".png"))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
