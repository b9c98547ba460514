"""A step of sgsd.py against one of extras/on_trl.py, by part: seconds and peak memory.

    python research/trl/side_by_side.py                                         the tiny world
    python research/trl/side_by_side.py --model DIR --encoder DIR --batch-size 2 --dtype bfloat16

Each engine runs in a process of its own, one thread, on CPU, with the same model, bank, problems,
teachers and adapters. No completion ends before --tokens, so that both do equal work:
a hook keeps the head from sampling a stop id, and scoring does not pass through it. The median of
the steps after the first --warm-up counts. Seconds are the process's processor seconds, so that
a busy machine matters less. Memory is the largest resident size during a part, above that before
the first step, read every 5 ms. Needs extras/requirements.txt.
"""

import argparse
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

import rollout
import sgsd
from lib import config, runlog
from lib.run import Run
from research.markdown_table import head_of, row_of
from skills import load_bank

PARTS = {
    "gen": "sampling and verdicts",
    "score": "teachers",
    "bwd": "student, forward and backward",
    "opt": "optimizer",
}


class Watch:
    """Seconds and peak resident memory of the parts of steps."""

    def __init__(self):
        self.steps, self.peak = [], 0.0
        self.loaded = self.now_mb()
        self.last = time.process_time()
        threading.Thread(target=self.sample, daemon=True).start()

    @staticmethod
    def now_mb():
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def sample(self):
        while True:
            self.peak = max(self.peak, self.now_mb())
            time.sleep(0.005)

    def begin_step(self):
        self.steps.append({part: [0.0, 0.0] for part in PARTS})
        self.last, self.peak = time.process_time(), 0.0

    def lap(self, part):
        """What has passed since the last call belongs to this part."""
        now = time.process_time()
        seconds, peak = self.steps[-1][part]
        peak = max(peak, self.peak, self.now_mb())
        self.steps[-1][part] = [seconds + now - self.last, peak]
        self.last, self.peak = time.process_time(), 0.0

    def report(self, warm_up):
        """{part: [median seconds, peak MiB above the loaded model]} after the first steps."""
        rows = {}
        for part in PARTS:
            seconds, peaks = zip(*[step[part] for step in self.steps[warm_up:]])
            rows[part] = [statistics.median(seconds), max(peaks) - self.loaded]
        return rows


def keep_from_ending(model, tokenizer):
    """No stop id is sampled. Log-probabilities multiply by the head's matrix, past this hook."""
    stops = rollout.stop_ids(model, tokenizer)
    head = rollout.causal_lm(model).get_output_embeddings()

    def without_stops(module, inputs, logits):
        return logits.index_fill(-1, torch.tensor(stops), -1e4)

    head.register_forward_hook(without_stops)


def settings(args, out):
    """The settings that both programs have."""
    return {
        "model": args.model,
        "encoder": args.encoder,
        "data": args.data,
        "bank": args.bank,
        "out": out,
        "dtype": args.dtype,
        "device": "cpu",
        "steps": args.warm_up + args.steps,
        "checkpoint_every": 1000,
        "audit_every": 0,
        "batch_size": args.batch_size,
        "num_teachers": args.teachers,
        "max_new_tokens": args.tokens,
        "evolve_every": 0,
        "lora_rank": 16,
        "lora_alpha": 32,
    }


def laps_of(watch):
    """In this block a run's clock times by this watch."""
    return mock.patch.object(runlog.Stopwatch, "lap", lambda self, part: watch.lap(part))


def of_sgsd(args, out):
    """The parts of sgsd.py's steps."""
    cfg = config.Config(**settings(args, out))
    with Run.open(cfg, load_bank, sgsd.shown) as run:
        keep_from_ending(run.lm, run.tokenizer)
        watch = Watch()

        def step_fn(run, step):
            watch.begin_step()
            return sgsd.train_step(run, step)

        with laps_of(watch):
            sgsd.train(run, step_fn)
    return watch.report(args.warm_up)


def of_trl(args, out):
    """The parts of the trainer's steps."""
    from transformers import TrainerCallback

    from extras import on_trl

    class Steps(TrainerCallback):
        def on_step_begin(self, *_, **__):
            watch.begin_step()

    given = {"backward_rows": args.rows, "score_rows": 9, **settings(args, out)}
    cfg = on_trl.TRLConfig(**given)
    load = functools.partial(on_trl.load, ["--gradient_checkpointing", "False"])
    with on_trl.RunOnTRL.open(cfg, load_bank, sgsd.shown, load) as run:
        keep_from_ending(run.trainer.model, run.tokenizer)
        watch = Watch()
        run.trainer.add_callback(Steps())
        with laps_of(watch):
            on_trl.train(run)
    return watch.report(args.warm_up)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tiny = ROOT / "tiny"
    parser.add_argument("--model", default=tiny / "model", help="directory of the policy")
    parser.add_argument("--encoder", default=tiny / "encoder", help="directory of the encoder")
    parser.add_argument("--data", default=tiny / "train.jsonl", help="training problems")
    parser.add_argument("--bank", default=ROOT / "banks/word_problems.json", help="a bank")
    parser.add_argument("--dtype", default="float32", help="of the base's weights")
    parser.add_argument("--batch-size", type=int, default=16, help="problems in a step")
    parser.add_argument("--rows", type=int, default=1, help="TRL's rollouts in one backward pass")
    parser.add_argument("--teachers", type=int, default=8, help="K")
    parser.add_argument("--tokens", type=int, default=256, help="length of each completion")
    parser.add_argument("--steps", type=int, default=3, help="steps that count")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before, which do not count")
    parser.add_argument("--engine", choices=("sgsd", "trl"), help="this one alone, as JSON")
    args = parser.parse_args()
    for name in ("model", "encoder", "data", "bank"):
        setattr(args, name, str(getattr(args, name)))
    if args.engine:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            run = {"sgsd": of_sgsd, "trl": of_trl}[args.engine]
            print(json.dumps(run(args, f"{folder}/run")))
        return
    results = {}
    for engine in ("sgsd", "trl"):
        command = [sys.executable, __file__, *sys.argv[1:], "--engine", engine]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results[engine] = json.loads(done.stdout.splitlines()[-1])
    columns = ("part", "sgsd.py, s", "TRL, s", "ratio", "sgsd.py, MiB", "TRL, MiB")
    print(*head_of(columns), sep="\n")
    totals = {engine: [0.0, 0.0] for engine in results}
    for part, words in PARTS.items():
        for engine, parts in results.items():
            seconds, peak = parts[part]
            totals[engine] = [totals[engine][0] + seconds, max(totals[engine][1], peak)]
        print(line_of(words, results["sgsd"][part], results["trl"][part]))
    print(line_of("a step", totals["sgsd"], totals["trl"]))


def line_of(words, ours, trls):
    """A row of the table: seconds, their ratio, memory."""
    ratio = f"{trls[0] / ours[0]:.2f}" if ours[0] > 0.01 else ""
    cells = [words, f"{ours[0]:.2f}", f"{trls[0]:.2f}", ratio, f"{ours[1]:.0f}", f"{trls[1]:.0f}"]
    return row_of(cells)


if __name__ == "__main__":
    main()
