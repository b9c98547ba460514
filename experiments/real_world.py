"""Learning on a real model: methods side by side on one GPU, stopped and continued at will.

    python experiments/real_world.py FOLDER --make MODELS DATA BANK [OWN]    once
    python experiments/real_world.py FOLDER --minutes 9                      again and again

The first makes the folder. MODELS has a causal model in qwen05/ and a sentence-transformers model
in encoder/; DATA has svamp.jsonl, gsm8k_train.jsonl and gsm8k_test.jsonl (`problem`, `answer` on
each line); BANK was made by another model, OWN by this one. SVAMP's file has no parts, so every
fifth problem is for the test, and the one after it for the choice of rates.

The second trains every method at every rate, all at once; evaluates the last checkpoints on the
validation problems; and then the best of each method, beside the base model, on the test problems.
When the minutes are over it stops in good order, and the same command goes on. GRPO draws 8
solutions of each of 4 problems, the others one of each of 32. Intervals are over problems, since
there is one run of each.
"""

import argparse
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
METHODS = {  # the program, its flags and its bank
    "sgsd": "sgsd.py --batch-size 32 --bank {0}/bank.json",
    "sgsd_own_bank": "sgsd.py --batch-size 32 --bank {0}/own.json",
    "no_polarity": "baselines.py --no-polarity --batch-size 32 --bank {0}/bank.json",
    "grpo": "baselines.py --method grpo --batch-size 4",
    "opsd": "baselines.py --method opsd --batch-size 32",
}
RATES = ("1e-5", "3e-5", "1e-4")
SETTINGS = "--max-new-tokens 400 --lora-rank 32 --lora-alpha 64 --rollout-rows 64 --update-every 0"
SETTINGS += " --eval-data= --checkpoint-every 25 --audit-every 0"
EVALUATION = "--max-new-tokens 400 --samples 4 --rows 128"


def read(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in open(path)]


def parts(svamp: list[dict], train: list[dict], test: list[dict]) -> dict[str, list[dict]]:
    """Problems to learn from, to choose rates with, and to test on: none stands in two parts."""
    return {
        "train": [x for i, x in enumerate(svamp) if i % 5 > 1] + train[:2400],
        "valid": svamp[1::5][:80] + train[-80:],
        "test": svamp[::5] + test[:200],
    }


def make(
    folder: pathlib.Path, models: pathlib.Path, data: pathlib.Path, *banks: pathlib.Path
) -> None:
    for name, source in (("model", "qwen05"), ("encoder", "encoder")):
        shutil.copytree(models / source, folder / name, dirs_exist_ok=True)
    for name, bank in zip(("bank", "own"), banks):
        shutil.copy(bank, folder / f"{name}.json")
    files = [read(data / f"{name}.jsonl") for name in ("svamp", "gsm8k_train", "gsm8k_test")]
    for name, rows in parts(*files).items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
        print(f"{folder / name}.jsonl: {len(rows)} problems")


def side_by_side(commands: dict[str, str], folder: pathlib.Path, until: float) -> None:
    """Run the commands all at once; end the program if one failed or the time was over."""
    env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ}
    processes = {}
    for name, command in commands.items():
        with open(folder / f"{name}.txt", "a") as log:
            both = {"stdout": log, "stderr": subprocess.STDOUT, "cwd": ROOT, "env": env}
            processes[name] = subprocess.Popen([sys.executable, *shlex.split(command)], **both)
    stopped = False
    while any(process.poll() is None for process in processes.values()):
        if not stopped and time.time() > until:
            stopped = True
            for process in processes.values():
                process.terminate()  # a training finishes its step and saves
        time.sleep(0.5)
    said = []
    for name, process in processes.items():
        if process.returncode > 0 and not (stopped and process.returncode == 130):  # interrupted
            said.append(f"failed: see {folder / name}.txt")
    if stopped:
        said.append("the time is over; the same command goes on")
    if said:
        sys.exit("\n".join(said))


def training(folder: pathlib.Path, updates: int) -> dict[str, tuple[pathlib.Path, str]]:
    """Each run's last checkpoint, and the command that makes it or goes on with it."""
    here, found = shlex.quote(str(folder)), {}
    data = f"--model {here}/model --data {here}/train.jsonl --encoder {here}/encoder"
    for method, command in METHODS.items():
        if method == "sgsd_own_bank" and not (folder / "own.json").exists():
            continue
        program, _, flags = command.format(here).partition(" ")
        for rate in RATES:
            name = f"{method}_{rate}"
            out = folder / "runs" / name
            command = f"{program} {flags} {SETTINGS} {data} --out {here}/runs/{name}"
            command += f" --updates {updates} --learning-rate {rate}"
            if (out / "config.json").exists():
                command = f"{program} --resume {here}/runs/{name} --updates {updates}"
            found[name] = out / "checkpoints" / f"step_{updates:06d}", command
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("folder", type=pathlib.Path)
    add("--make", nargs="+", type=pathlib.Path, help="MODELS DATA BANK [OWN]: make the folder")
    add("--minutes", type=float, default=1e5, help="stop after so many, once a step is finished")
    add("--updates", type=int, default=100, help="of every run; the rate falls to 0 over them")
    args = parser.parse_args()
    folder, until = args.folder.resolve(), time.time() + 60 * args.minutes
    if args.make:
        if len(args.make) < 3:
            parser.error("--make needs MODELS DATA BANK")
        return make(folder, *args.make)

    def evaluation(part: str, *policies: pathlib.Path) -> str:
        paths = [*policies, "--data", folder / f"{part}.jsonl", "--out", folder / "eval"]
        return f"eval.py {shlex.join(map(str, paths))} {EVALUATION}"

    runs = training(folder, args.updates)
    left = {name: command for name, (last, command) in runs.items() if not last.exists()}
    side_by_side(left, folder, until)
    tries = {f"valid_{name}": evaluation("valid", last) for name, (last, _) in runs.items()}
    side_by_side(tries, folder, until)
    best: dict[str, tuple[float, str]] = {}
    for name, (last, _) in runs.items():
        results = json.loads((folder / f"eval/{name}--{last.name}/results.json").read_text())
        score, method = results["valid"]["avg"], name.rpartition("_")[0]
        print(f"{name}: {score:.1%} on the validation problems")
        best[method] = max(best.get(method, (-1.0, "")), (score, name))
    chosen = {"base": folder / "model"}
    chosen |= {method: runs[name][0] for method, (_, name) in best.items()}
    tests = {f"test_{method}": evaluation("test", place) for method, place in chosen.items()}
    side_by_side(tests, folder, until)
    for first in ("base", "sgsd"):  # differences to each of them
        others = [place for method, place in chosen.items() if method != first]
        log = folder / f"table_{first}.txt"
        log.unlink(missing_ok=True)
        side_by_side({log.stem: evaluation("test", chosen[first], *others)}, folder, until)
        print(log.read_text())
    for _, name in best.values():
        rows = read(folder / "runs" / name / "rollouts.jsonl")
        drawn = sum(len(row["completion_ids"]) for row in rows)
        print(f"{name}: {len(rows)} solutions of {drawn:,} tokens")


if __name__ == "__main__":
    main()
