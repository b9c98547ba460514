"""Learning on a real model: methods side by side, on a GPU or two cores, continued at will.

    python research/real_model/real_world.py FOLDER --make MODELS DATA BANK [OWN]    once
    python research/real_model/real_world.py FOLDER --minutes 9              on a GPU, repeated
    python research/real_model/real_world.py FOLDER --cpu --minutes 150      on two cores

The first command makes the folder. MODELS has a causal model in qwen05/ and a sentence-transformers
model in encoder/; DATA has svamp.jsonl, gsm8k_train.jsonl and gsm8k_test.jsonl (`problem`, `answer`
on each line); BANK is hand-written or another model's, OWN was made by this model. SVAMP's file has
no parts, so every fifth problem is for the test, and the one after it for the choice of rates.

The second trains every method at every rate; evaluates the last checkpoints on the validation
problems if there is more than one rate; and then the best of each method, beside the base model,
on the test problems. With one rate there is no choice, and a test starts as soon as its checkpoint
exists. When the minutes are over, the program stops the runs after their step, and the same command
continues. On a GPU all methods run at once; GRPO draws 8 solutions of each of 4 problems, the
others one of each of 32. On two cores (--make needs --cpu, too) two run at a time, on SVAMP's
problems alone, with two teachers and 8 solutions a step, and they are tested half-way, too.
Intervals are over problems, since there is one run of each method.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Size:
    """What a machine can do in some hours."""

    methods: dict[str, str]  # the program, its flags and its bank
    rates: tuple[str, ...]
    settings: str  # of all trainings
    evaluation: str
    steps: int  # of every run
    points: tuple[float, ...]  # what share of them has been made at each test
    jobs: int  # processes at a time
    svamp_alone: bool = False


GPU = Size(
    methods={
        "sgsd": "sgsd.py --batch-size 32 --bank {0}/bank.json",
        "sgsd_own_bank": "sgsd.py --batch-size 32 --bank {0}/own.json",
        "no_polarity": "-m methods.ablations --no-polarity --batch-size 32 --bank {0}/bank.json",
        "grpo": "-m methods.grpo --batch-size 4",
        "opsd": "-m methods.opsd --batch-size 32",
    },
    rates=("1e-5", "3e-5", "1e-4"),
    settings="--max-new-tokens 400 --lora-rank 32 --lora-alpha 64 --rollout-rows 64"
    " --evolve-every 0 --audit-every 0",
    evaluation="--max-new-tokens 400 --samples 4 --rows 128",
    steps=100,
    points=(1.0,),
    jobs=100,
)
CPU = Size(
    methods={
        "sgsd": "sgsd.py --batch-size 8 --num-teachers 2 --bank {0}/bank.json",
        "grpo": "-m methods.grpo --batch-size 2 --generations 4",
    },
    rates=("1e-4",),
    settings="--max-new-tokens 400 --lora-rank 16 --lora-alpha 32 --rollout-rows 8"
    " --evolve-every 0 --audit-every 10",
    evaluation="--max-new-tokens 400 --samples 2 --rows 64",
    steps=20,
    points=(0.5, 1.0),
    jobs=2,
    svamp_alone=True,
)


def read(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in open(path)]


def parts(svamp: list[dict], train: list[dict], test: list[dict]) -> dict[str, list[dict]]:
    """Problems to learn from, to choose rates with, and to test on: none stands in two parts.

    train and test: GSM8K's; both may be empty.
    """
    return {
        "train": [x for i, x in enumerate(svamp) if i % 5 > 1] + train[:2400],
        "valid": svamp[1::5][:80] + train[-80:],
        "test": svamp[::5] + test[:200],
    }


def make(
    folder: pathlib.Path,
    size: Size,
    models: pathlib.Path,
    data: pathlib.Path,
    banks: list[pathlib.Path],
) -> None:
    for name, source in (("model", "qwen05"), ("encoder", "encoder")):
        shutil.copytree(models / source, folder / name, dirs_exist_ok=True)
    for name, bank in zip(("bank", "own"), banks):
        shutil.copy(bank, folder / f"{name}.json")
    train, test = [], []
    if not size.svamp_alone:
        train, test = read(data / "gsm8k_train.jsonl"), read(data / "gsm8k_test.jsonl")
    for name, rows in parts(read(data / "svamp.jsonl"), train, test).items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
        print(f"{folder / name}.jsonl: {len(rows)} problems")


def side_by_side(
    commands: dict[str, str],
    folder: pathlib.Path,
    until: float,
    jobs: int,
    needs: dict[str, pathlib.Path] | None = None,
) -> None:
    """Run the commands, so many at a time; end the program if one failed or the time was over.

    needs: what has to be there before a command can start.
    """
    env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ}
    needs, waiting, stopped = needs or {}, list(commands), False
    running: dict[str, subprocess.Popen] = {}
    failed: list[str] = []
    while True:
        ready = [name for name in waiting if name not in needs or needs[name].exists()]
        if not running and (stopped or not ready):  # what still waits needs what has failed
            break
        while ready and len(running) < jobs and not stopped:
            name = ready.pop(0)
            waiting.remove(name)
            with open(folder / f"{name}.txt", "a") as log:
                running[name] = subprocess.Popen(
                    [sys.executable, *shlex.split(commands[name])],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=ROOT,
                    env=env,
                )
        if not stopped and time.time() > until:
            stopped = True
            for process in running.values():
                process.terminate()  # a training finishes its step and saves
        time.sleep(0.5)
        for name in [name for name, process in running.items() if process.poll() is not None]:
            code = running.pop(name).returncode
            if code and not (stopped and code in (130, -signal.SIGTERM)):  # stopped as asked
                failed.append(f"failed: see {folder / name}.txt")
    if stopped:
        failed.append("the time is over; the same command goes on")
    if failed:
        sys.exit("\n".join(failed))


def training(folder: pathlib.Path, size: Size) -> dict[str, tuple[pathlib.Path, str]]:
    """Each run's last checkpoint, and the command that makes it or goes on with it."""
    here, runs = shlex.quote(str(folder)), {}
    data = f"--model {here}/model --data {here}/train.jsonl --encoder {here}/encoder"
    every = round(size.steps * size.points[0])
    for method, command in size.methods.items():
        if method == "sgsd_own_bank" and not (folder / "own.json").exists():
            continue
        program, _, flags = command.format(here).partition(" --")
        for rate in size.rates:
            name = f"{method}_{rate}"
            out = folder / "runs" / name
            command = f"{program} --{flags} {size.settings} {data} --out {here}/runs/{name}"
            command += f" --steps {size.steps} --checkpoint-every {every} --learning-rate {rate}"
            runs[name] = out / "checkpoints" / f"step_{size.steps:06d}", command
    return runs


def best_rates(folder: pathlib.Path, size: Size, until: float) -> dict[str, str]:
    """Each method's run: the only one, or the best on the validation problems."""
    runs = training(folder, size)
    methods = {name: name.rpartition("_")[0] for name in runs}
    if len(size.rates) == 1:
        return {method: name for name, method in methods.items()}
    tries = {}
    for name, (last, _) in runs.items():
        tries[f"valid_{name}"] = evaluation(folder, size, "valid", [last])
    side_by_side(tries, folder, until, size.jobs)
    best: dict[str, tuple[float, str]] = {}
    for name, (last, _) in runs.items():
        results = json.loads((results_of(folder, last) / "results.json").read_text())
        score = results["valid"]["avg"]
        print(f"{name}: {score:.1%} on the validation problems")
        best[methods[name]] = max(best.get(methods[name], (-1.0, "")), (score, name))
    return {method: name for method, (_, name) in best.items()}


def evaluation(
    folder: pathlib.Path, size: Size, part: str, policies: Sequence[pathlib.Path]
) -> str:
    """The command that evaluates policies on one part of the problems."""
    paths = [*policies, "--data", folder / f"{part}.jsonl", "--out", folder / "eval"]
    return f"eval.py {shlex.join(map(str, paths))} {size.evaluation}"


def results_of(folder: pathlib.Path, policy: pathlib.Path) -> pathlib.Path:
    """Where eval.py keeps the results of the base model, or of RUN/checkpoints/STEP."""
    is_base = policy == folder / "model"
    name = folder.name if is_base else policy.parent.parent.name
    return folder / "eval" / f"{name}--{policy.name}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("folder", type=pathlib.Path)
    add("--make", nargs="+", type=pathlib.Path, help="MODELS DATA BANK [OWN]: make the folder")
    add("--cpu", action="store_true", help="what two cores can do in some hours")
    add("--dtype", default="auto", help="of the base; bfloat16 is faster where a CPU has it")
    add("--minutes", type=float, default=1e5, help="stop after so many, once a step is finished")
    add("--steps", type=int, default=0, help="steps of every run; the rate falls to 0 over them")
    add("--seed", type=int, default=0, help="of every training; each needs a FOLDER of its own")
    add("--methods", nargs="+", help="these alone (default: all that the machine can do)")
    args = parser.parse_args(argv)
    folder, until = args.folder.resolve(), time.time() + 60 * args.minutes
    size = CPU if args.cpu else GPU
    unknown = set(args.methods or []) - set(size.methods)
    if unknown:
        parser.error(
            f"--methods: {', '.join(sorted(unknown))}: not among {', '.join(size.methods)}"
        )
    size = dataclasses.replace(
        size,
        methods={name: size.methods[name] for name in args.methods or size.methods},
        steps=args.steps or size.steps,
        settings=f"{size.settings} --dtype {args.dtype} --seed {args.seed}",
        evaluation=f"{size.evaluation} --dtype {args.dtype}",
    )
    if args.make:
        if len(args.make) < 3:
            parser.error("--make needs MODELS DATA BANK")
        return make(folder, size, args.make[0], args.make[1], args.make[2:])

    runs = training(folder, size)
    left = {name: command for name, (last, command) in runs.items() if not last.exists()}
    if len(size.rates) > 1:
        side_by_side(left, folder, until, size.jobs)
        left = {}
    best = best_rates(folder, size, until)
    tested: dict[str, list[pathlib.Path]] = {"base": [folder / "model"]}
    for method, name in best.items():
        checkpoints = folder / "runs" / name / "checkpoints"
        steps = [round(size.steps * point) for point in reversed(size.points)]
        tested[method] = [checkpoints / f"step_{step:06d}" for step in steps]
    tests, needs = {}, {}
    for i in range(len(size.points)):  # what matters most comes first
        for method, places in tested.items():
            if i < len(places):
                name = f"test_{method}_{places[i].name}"
                tests[name] = evaluation(folder, size, "test", [places[i]])
                needs[name] = places[i]
    side_by_side({**left, **tests}, folder, until, size.jobs, needs)
    for first in [name for name in ("base", "sgsd") if name in tested]:  # differences to each
        places = list(tested[first])
        for method in tested:
            places += tested[method] if method != first else []
        log = folder / f"table_{first}.txt"
        log.unlink(missing_ok=True)
        finished = [str(results_of(folder, place)) for place in places]
        table = {log.stem: shlex.join(["-m", "extras.compare", *finished])}
        side_by_side(table, folder, until, size.jobs)
        print(log.read_text())
    for name in best.values():
        rows = read(folder / "runs" / name / "rollouts.jsonl")
        drawn = sum(len(row["completion_ids"]) for row in rows)
        print(f"{name}: {len(rows)} solutions of {drawn:,} tokens")


if __name__ == "__main__":
    main()
