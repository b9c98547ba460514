"""Mistakes on purpose, as a new user makes them: how soon each is answered, and by what line.

    python research/robustness/mistakes.py                  prints the table of mistakes.md
    python research/robustness/mistakes.py --before TREE    with the answers of another checkout

Every command runs as a process of its own, with the tiny world, in a scratch folder. A command
that has not ended after LIMIT seconds is stopped. The script asserts nothing.
"""

import argparse
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from research.markdown_table import head_of, row_of

LIMIT = 120  # seconds
TRAIN = "sgsd.py --preset tiny --eval-data= --steps 2 --batch-size 2 --max-new-tokens 16"
SHORT = "--data tiny/test.jsonl --limit 2 --samples 1 --max-new-tokens 8"


@dataclass
class Mistake:
    """One mistake: what it is, its command, and a command that is at work at the same time."""

    kind: str
    command: str
    beside: str = ""
    sign: str = ""  # a file that the command at work beside it writes, once it is


MISTAKES = [
    Mistake("a mistyped flag", "{train} --teachers 3"),
    Mistake("a value out of its range", "{train} --batch-size 0"),
    Mistake("a data file that is not there", "{train} --data no.jsonl"),
    Mistake("an answer that is no string", "{train} --data {s}/number.jsonl"),
    Mistake("a data line that is no JSON", "{train} --data {s}/broken.jsonl"),
    Mistake("training on the test problems", "{train} --data {s}/d.jsonl --eval-data {s}/d.jsonl"),
    Mistake("a mistyped model path", "{train} --model tiny/nope"),
    Mistake("a directory without a model", "{train} --model {s}/empty"),
    Mistake("a mistyped encoder path", "{train} --encoder tiny/nope"),
    Mistake("the policy as the encoder", "{train} --encoder tiny/model"),
    Mistake("a directory that is in use", "{train} --out {s}/run"),
    Mistake("a bank that is not there", "{train} --bank no.json"),
    Mistake("a bank whose entry lacks a field", "{train} --bank {s}/invalid.json"),
    Mistake("a bank shorter than K", "{train} --bank {s}/bank.json --num-teachers 9"),
    Mistake("replies cut off, so an empty bank", "{train} --cold-start 8 --reply-tokens 4"),
    Mistake("resuming nothing", "sgsd.py --resume runs/nope"),
    Mistake("resuming a checkpoint", "sgsd.py --resume {s}/run/checkpoints/step_000002"),
    Mistake("resuming a torn checkpoint", "sgsd.py --resume {s}/torn --steps 3"),
    Mistake("resuming to fewer steps", "sgsd.py --resume {s}/run --steps 1"),
    Mistake(
        "resuming a run that is at work",
        "sgsd.py --resume {s}/busy --steps 4000",
        "sgsd.py --resume {s}/busy --steps 4000",
        "busy/metrics.jsonl",
    ),
    Mistake(
        "more processes than problems",
        "-m torch.distributed.run --standalone --nproc_per_node 2 {train} --batch-size 1",
    ),
    Mistake("an unknown setting in a file", "{train} --config {s}/odd.yaml"),
    Mistake("another rate for a run that goes on", "sgsd.py --resume {s}/run --learning-rate 1"),
    Mistake("a data set without its configuration", "{train} --data {s}/hub"),
    Mistake("a server that is not there", "{train} --server http://127.0.0.1:9/v1"),
    Mistake("evaluating a path that is not there", "eval.py runs/nope {short}"),
    Mistake(
        "an adapter on another base",
        "eval.py {s}/run/checkpoints/step_000002 --model {s}/other {short} --out {s}/out",
    ),
    Mistake(
        "an empty bank in an evaluation",
        "eval.py tiny/model --skills {s}/none.json --encoder tiny/encoder {short} --out {s}/out",
    ),
    Mistake(
        "samples of other settings", "eval.py tiny/model {short} --out {s}/done --temperature 0.5"
    ),
    Mistake(
        "evaluating into a folder at work",
        "eval.py tiny/model --data tiny/test.jsonl --samples 400 --max-new-tokens 96 --out {s}/e",
        "eval.py tiny/model --data tiny/test.jsonl --samples 400 --max-new-tokens 96 --out {s}/e",
        "e/tiny--model/samples.jsonl",
    ),
]


def prepare(scratch: pathlib.Path, tree: pathlib.Path) -> None:
    """The files that the mistakes are about: problems, banks, a model, runs, an evaluation."""
    row = '{"problem": "p", "answer": "1"}\n'
    (scratch / "number.jsonl").write_text(row + '{"problem": "q", "answer": 0.5}\n')
    (scratch / "broken.jsonl").write_text(row + '{"problem": "q", \n')
    (scratch / "d.jsonl").write_text(row)
    (scratch / "odd.yaml").write_text("learning_rat: 0.1\n")
    card = ["configs:"]
    for name in ("main", "other"):
        (scratch / "hub" / name).mkdir(parents=True)
        (scratch / "hub" / name / "train.jsonl").write_text(row)
        card += [f"- config_name: {name}", f"  data_files: {name}/train.jsonl"]
    (scratch / "hub/README.md").write_text("\n".join(["---", *card, "---", ""]))
    (scratch / "empty").mkdir()
    skills, mistakes = [], []
    for i in range(4):
        skill = dict.fromkeys(("title", "principle", "when_to_apply"), f"Check sum {i}.")
        skills.append({"skill_id": f"gen_{i}", **skill})
        mistake = dict.fromkeys(("description", "why_it_happens", "how_to_avoid"), f"Haste {i}.")
        mistakes.append({"mistake_id": f"err_{i}", **mistake})
    banks = {"bank": (skills, mistakes), "none": ([], []), "invalid": ([{"skill_id": "a"}], [])}
    for name, (good, bad) in banks.items():
        bank = {"general_skills": good, "common_mistakes": bad}
        (scratch / f"{name}.json").write_text(json.dumps(bank))
    other = (
        "import transformers as t; c = t.AutoConfig.from_pretrained('tiny/model');"
        "c.hidden_size = 32;"
        f"t.AutoModelForCausalLM.from_config(c).save_pretrained('{scratch}/other');"
        f"t.AutoTokenizer.from_pretrained('tiny/model').save_pretrained('{scratch}/other')"
    )
    needed = [["-c", other], f"eval.py tiny/model {SHORT} --out {scratch}/done".split()]
    for name in ("run", "torn", "busy"):
        words = f"{{train}} --bank={scratch}/bank.json --out={scratch}/{name}"
        needed.append(fill(words, TRAIN, scratch, tree))
    for command in needed:
        done = subprocess.run(
            [sys.executable, *command], cwd=tree, env=environment(), capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr[-2000:]}")
    (scratch / "torn/checkpoints/step_000002/adapter_model.safetensors").write_text("torn")


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def walk(tree: pathlib.Path) -> list[tuple[float, str]]:
    """For each mistake in a checkout: seconds until its command ended, and its last line."""
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        prepare(scratch, tree)
        for number, mistake in enumerate(MISTAKES):
            train = TRAIN if "--out {s}" in mistake.command else f"{TRAIN} --out {{s}}/{number}"
            beside = None
            if mistake.beside:
                words = fill(mistake.beside, train, scratch, tree)
                beside = subprocess.Popen(
                    [sys.executable, *words],
                    cwd=tree,
                    env=environment(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                wait_for(scratch / mistake.sign, beside)
            seconds, line = answer(fill(mistake.command, train, scratch, tree), tree)
            if beside is not None:
                beside.kill()
                beside.wait()
            line = line.replace(str(scratch), "SCRATCH").replace("|", "\\|")
            answers.append((seconds, line))
            print(f"{seconds:6.1f} {mistake.kind}: {line}", file=sys.stderr)
    return answers


def wait_for(file: pathlib.Path, process: subprocess.Popen) -> None:
    """Until a process that is at work has written to a file."""
    before = file.stat().st_mtime if file.exists() else 0.0
    while not file.exists() or file.stat().st_mtime == before:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args} ended with {process.returncode}")
        time.sleep(0.5)


def fill(command: str, train: str, scratch: pathlib.Path, tree: pathlib.Path) -> list[str]:
    text = command.replace("{train}", train).replace("{short}", SHORT)
    if " steps: int" not in (tree / "config.py").read_text():  # an older name
        text = text.replace("--steps", "--updates")
    return text.replace("{s}", str(scratch)).split()


def answer(words: list[str], tree: pathlib.Path) -> tuple[float, str]:
    """The seconds that a command took, and the last line that the project's program printed."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=tree,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that all its processes can be stopped
    )
    ended = f"ended with 0, no mistake was seen; {LIMIT} s are the limit"
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        ended = f"went on, and was stopped after {LIMIT} s"
    seconds = time.perf_counter() - started
    lines = [line for line in output.splitlines() if re.match(r"(sgsd|eval)(\.py)?: ", line)]
    return seconds, lines[-1] if lines else f"({ended})"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--before", type=pathlib.Path, metavar="TREE", help="another checkout")
    args = parser.parse_args(argv)
    walks = {"": walk(ROOT)}
    if args.before:
        walks["before: "] = walk(args.before.absolute())
    head = ["", "the mistake"]
    for when in walks:
        head += [f"{when}seconds", f"{when}the line"]
    print("\n".join(head_of(head)))
    for i, mistake in enumerate(MISTAKES):
        cells = [i + 1, mistake.kind]
        for answers in walks.values():
            cells += [f"{answers[i][0]:.1f}", answers[i][1]]
        print(row_of(cells))


if __name__ == "__main__":
    main()
