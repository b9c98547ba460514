"""The first minutes of a GPU: each headline command once, beside what cost/hours.py expects of it.

    python research/speed/first_minutes.py COMMAND OUT          at Qwen3-1.7B's shapes
    python research/speed/first_minutes.py COMMAND OUT --cpu    a tiny shape, to rehearse it

COMMAND is model, which makes OUT/model, then sgsd (three steps with a given bank, and its
evolution), grpo (two short steps) or eval (eight problems). Weights are random, the tokenizer is
that of the tests, and every second solution or so counts as right, so that groups are mixed. Hardly
any completion ends before its limit. The last lines are rows of gpu.py's table: seconds of a step,
of an evolution or of all samples, without the first step, which warms up, and without loading.
"""

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch

import distributed
import eval
import sgsd
from lib import command, config, files, runlog, verify
from methods import grpo
from research.cost import hours
from research.markdown_table import row_of
from research.speed.bench import SHAPES, random_model, stop_after

PROGRAMS = {
    "sgsd": (
        sgsd,
        config.Config,
        "--steps 3 --evolve-every 3 --success-gate 2 --reply-tokens 1600",
    ),
    "grpo": (grpo, grpo.GRPOConfig, "--short --steps 2"),
    "eval": (eval, config.EvalConfig, "--limit 8 --no-thinking --max-new-tokens 1024"),
}
SMALL = {
    "sgsd": "--batch-size 4 --max-new-tokens 8",
    "grpo": "--batch-size 4 --max-new-tokens 8",
    "eval": "--max-new-tokens 8",
}


class Uneven(verify.Judge):
    """A solution is right if its text has an odd number of characters."""

    def answer(self, text: str) -> str:
        return text

    def is_right(self, problem: Any, answer: str) -> bool:
        return len(answer) % 2 == 1


def words_of(name: str, out: pathlib.Path, device: torch.device) -> list[str]:
    """The command's words."""
    folder = str(out / "model")
    words = [folder] if name == "eval" else ["--model", folder]
    words += ["--data", str(ROOT / f"tiny/{'test' if name == 'eval' else 'train'}.jsonl")]
    words += ["--verifier", "research.speed.first_minutes:Uneven", "--device", device.type]
    words += ["--out", str(out / name)]
    if name == "sgsd":
        words += ["--bank", str(ROOT / "banks/competition_math.json")]
        words += ["--encoder", str(ROOT / "tiny/encoder")]
    words += PROGRAMS[name][2].split()
    return words + (SMALL[name].split() if device.type == "cpu" else [])


def of_steps(run: pathlib.Path, hours_of_step: float) -> list[str]:
    """The cells of a step: seconds, those that are expected, tokens a second."""
    metrics = [*files.read_jsonl(run / "metrics.jsonl")]
    rollouts = [*files.read_jsonl(run / "rollouts.jsonl")]
    count = len(rollouts) / len(metrics)
    seconds = []
    rates = []
    for m in metrics[1:]:
        seconds.append(sum(x for name, x in m.items() if name.startswith("seconds.")))
        rates.append(m["completion_tokens"] * count / m["seconds.gen"])
    expected = 3600 * hours_of_step
    return [f"{statistics.mean(seconds):.1f}", f"{expected:.1f}", f"{statistics.mean(rates):,.0f}"]


def of_evolution(run: pathlib.Path, hours_of_evolution: float) -> list[str]:
    """The same of the evolution after the third step, which begins once its checkpoint is whole."""
    began = (run / "checkpoints/step_000003" / files.DIGESTS).stat().st_mtime
    ended = (run / "bank/step_000003.json").stat().st_mtime
    return [f"{ended - began:.1f}", f"{3600 * hours_of_evolution:.1f}", "-"]


def of_samples(out: pathlib.Path, seconds: float, hours_of_samples: float) -> list[str]:
    """The same of an evaluation's samples."""
    (file,) = out.rglob("samples.jsonl")
    tokens = sum(row["tokens"] for row in files.read_jsonl(file))
    return [f"{seconds:.1f}", f"{3600 * hours_of_samples:.1f}", f"{tokens / seconds:,.0f}"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("command", choices=["model", *PROGRAMS])
    parser.add_argument("out", type=pathlib.Path, help="a folder without an earlier measurement")
    parser.add_argument("--cpu", action="store_true", help="a rehearsal")
    args = parser.parse_args(argv)
    out = args.out.resolve()
    device = distributed.init("cpu" if args.cpu else "cuda").device
    shape = SHAPES["tiny" if args.cpu else "qwen3-1.7b"]
    if args.command == "model":
        from conftest import make_tokenizer  # it sets threads, which no command should have

        stop_after(random_model(shape, device), 0).save_pretrained(out / "model")
        make_tokenizer().save_pretrained(out / "model")
        return
    program, config_class, _ = PROGRAMS[args.command]
    words = words_of(args.command, out, device)
    print("python", config_class.program, *words, flush=True)
    loaded = []
    load_policy = eval.load_policy

    def timed_load(*given: Any) -> Any:
        policy = load_policy(*given)
        loaded.append(time.perf_counter())
        return policy

    eval.load_policy = timed_load
    if code := program.main(words):
        sys.exit(code)
    ended = time.perf_counter()
    c = shape.counts(device, shape.vocab, config.Config.lora_rank)
    card = hours.CARDS[card_of(device)]
    presets = None if args.command == "eval" else {}
    cfg = command.parse(words, None, config_class, presets)
    T = cfg.max_new_tokens
    rows = {}
    if args.command == "sgsd":
        rows["a step"] = of_steps(out / "sgsd", hours.step(c, card, 1, cfg)[1])
        rows["its evolution"] = of_evolution(out / "sgsd", hours.evolution(c, card, 1, cfg)[1])
    elif args.command == "grpo":
        hours_of_step = hours.grpo_step(c, card, 1, 0, T, hours.full, cfg)[1]
        rows["a step"] = of_steps(out / "grpo", hours_of_step)
    else:
        jobs = hours.jobs_of(hours.PLAIN, T, cfg.limit * cfg.samples)
        expected = hours.drawing(c, card, jobs, 1, cfg.rows, True)[1]
        rows["all samples"] = of_samples(out / "eval", ended - loaded[0], expected)
    peak = f"{runlog.memory_gb(device):.1f}"
    for part, cells in rows.items():
        print(row_of([args.command, part, *cells, peak]))


def card_of(device: torch.device) -> str:
    """The card's name in hours.CARDS; h100 for any other, and for a CPU."""
    name = torch.cuda.get_device_name(device).lower() if device.type == "cuda" else ""
    return next((card for card in hours.CARDS if card in name), "h100")


if __name__ == "__main__":
    main()
