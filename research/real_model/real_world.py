"""Learning on a real model: SGSD beside GRPO on two cores, continued at will.

    python research/real_model/real_world.py FOLDER --make MODELS DATA BANK    once
    python research/real_model/real_world.py FOLDER --minutes 150              repeated

The first command makes the folder. MODELS has a causal model in qwen05/ and a sentence-transformers
model in encoder/; DATA has svamp.jsonl (`problem`, `answer` on each line), whose every fifth
problem is for the test; the one after it is left out.

The second trains both methods, evaluates the base model, and tests each run half-way and at its end
as soon as the checkpoint exists, two processes at a time. When the minutes are over, the program
stops the runs after their step, and the same command continues. At the end it prints the tables of
extras.compare: differences to the base and to SGSD. Intervals are over problems, since there is one
run of each method.
"""

import argparse
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
METHODS = {  # the program, its flags and its bank
    "sgsd": "sgsd.py --batch-size 8 --num-teachers 2 --bank {0}/bank.json",
    "grpo": "-m methods.grpo --batch-size 2 --generations 4",
}
TRAINING = (
    "--max-new-tokens 400 --lora-rank 16 --lora-alpha 32"
    " --rollout-rows 8 --evolve-every 0 --audit-every 10"
)
EVALUATION = "--max-new-tokens 400 --samples 2 --rows 64"
JOBS = 2  # processes at a time


def make(
    folder: pathlib.Path, models: pathlib.Path, data: pathlib.Path, bank: pathlib.Path
) -> None:
    for name, source in (("model", "qwen05"), ("encoder", "encoder")):
        shutil.copytree(models / source, folder / name, dirs_exist_ok=True)
    shutil.copy(bank, folder / "bank.json")
    rows = [json.loads(line) for line in open(data / "svamp.jsonl")]
    parts = {"train": [x for i, x in enumerate(rows) if i % 5 > 1], "test": rows[::5]}
    for name, of_part in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in of_part))
        print(f"{folder / name}.jsonl: {len(of_part)} problems")


def side_by_side(
    commands: dict[str, str], folder: pathlib.Path, until: float, needs: dict[str, pathlib.Path]
) -> None:
    """Run the commands, so many at a time; end the program if one failed or the time was over.

    needs: what has to be there before a command can start.
    """
    env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ}
    waiting, stopped = list(commands), False
    running: dict[str, subprocess.Popen] = {}
    failed: list[str] = []
    while True:
        ready = [name for name in waiting if name not in needs or needs[name].exists()]
        if not running and (stopped or not ready):  # what still waits needs what has failed
            break
        while ready and len(running) < JOBS and not stopped:
            name = ready.pop(0)
            waiting.remove(name)
            argv = [sys.executable, *shlex.split(commands[name])]
            with open(folder / f"{name}.txt", "a") as log:
                running[name] = subprocess.Popen(argv, stdout=log, stderr=log, cwd=ROOT, env=env)
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


def results_of(folder: pathlib.Path, policy: pathlib.Path) -> pathlib.Path:
    """Where eval.py keeps the results of the base model, or of RUN/checkpoints/STEP."""
    is_base = policy == folder / "model"
    name = folder.name if is_base else policy.parent.parent.name
    return folder / "eval" / f"{name}--{policy.name}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    paths = {"type": pathlib.Path, "metavar": ("MODELS", "DATA", "BANK")}
    add("folder", type=pathlib.Path)
    add("--make", nargs=3, help="make the folder", **paths)
    add("--dtype", default="auto", help="of the base; bfloat16 is faster where a CPU has it")
    add("--minutes", type=float, default=1e5, help="stop after so many, once a step is finished")
    add("--steps", type=int, default=20, help="of every run; the rate falls to 0 over them")
    add("--rate", default="1e-4", help="of every training, in the first step")
    add("--seed", type=int, default=0, help="of every training; each needs a FOLDER of its own")
    add("--methods", nargs="+", choices=METHODS, default=[*METHODS], help="these alone")
    args = parser.parse_args(argv)
    folder, until = args.folder.resolve(), time.time() + 60 * args.minutes
    if args.make:
        return make(folder, *args.make)

    here, half = shlex.quote(str(folder)), round(args.steps / 2)
    places = {"base": [folder / "model"]}  # what is tested
    trainings = {}
    for name in args.methods:
        out = f"{here}/runs/{name}_{args.rate}"
        line = f"{METHODS[name].format(here)} {TRAINING} --learning-rate {args.rate}"
        line += f" --dtype {args.dtype} --seed {args.seed}"
        line += f" --model {here}/model --data {here}/train.jsonl --encoder {here}/encoder"
        line += f" --steps {args.steps} --checkpoint-every {half} --out {out}"
        checkpoints = folder / f"runs/{name}_{args.rate}/checkpoints"
        places[name] = [checkpoints / f"step_{step:06d}" for step in (args.steps, half)]
        if not places[name][0].exists():
            trainings[f"{name}_{args.rate}"] = line
    tests, needs = {}, {}
    for i in range(2):  # what matters most comes first
        for method, of_method in places.items():
            for place in of_method[i : i + 1]:
                name = f"test_{method}_{place.name}"
                words = shlex.join([str(place), "--data", f"{folder}/test.jsonl"])
                tests[name] = f"eval.py {words} --out {here}/eval {EVALUATION} --dtype {args.dtype}"
                needs[name] = place
    side_by_side({**trainings, **tests}, folder, until, needs)
    for first in [name for name in ("base", "sgsd") if name in places]:  # differences to each
        others = [place for name in places if name != first for place in places[name]]
        finished = [str(results_of(folder, place)) for place in [*places[first], *others]]
        log = folder / f"table_{first}.txt"
        log.unlink(missing_ok=True)
        side_by_side({log.stem: shlex.join(["-m", "extras.compare", *finished])}, folder, until, {})
        print(log.read_text())


if __name__ == "__main__":
    main()
