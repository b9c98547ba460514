"""Where GRPO has nothing to learn from: 20 steps of one of five kinds, then 60 steps of GRPO.

    python research/worlds/dark.py                    the bases and the problems
    python research/dark/phases.py --bases 1          all jobs that have no row; four CPU hours
    python research/dark/phases.py --show             the tables of research/small_worlds.md

A  GRPO        B  SGSD with the full bank        C  SGSD whose teachers read empty entries
D  GRPO with the bank's hints in the prompt
E  right solutions sampled under the hints, fitted under the plain prompt (RAFT)
F  as B, but all 60 steps of its schedule (asked for by --arms F alone)

Pairs are random ones of the full bank; the second phase draws by a seed of its own. Each finished
job appends a row to --rows. A run begins if at its end 10% of 320 solutions are right; arms are
compared by Fisher's exact test.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import random
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any, ClassVar

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "research" / "worlds")]

import dark
import torch

import rollout
import scoring
import sgsd
import skills
from lib import command, config, files
from lib.problems import Problem
from lib.run import Run
from methods import ablations, groups, grpo
from research.markdown_table import head_of, row_of
from rollout import Rollout
from skills import SkillPair

STEPS = 60  # of each phase's schedule
PROBLEMS = 480  # of dark_train.jsonl, which is more than a phase asks
SOLUTIONS, LEAST = 320, 32  # in an evaluation; right ones of a run that begins
ROWS = pathlib.Path(__file__).with_name("rows.jsonl")


# ------------------------------------------------------------------------------------- the steps


def random_pairs(run: Run, step: int, x: Problem) -> list[SkillPair]:
    """As `ablations.chosen_pairs` draws them: anew in each step."""
    draw, count = random.Random(rollout.sample_key(run.cfg.seed, step, x.id)), run.cfg.num_teachers
    right = draw.sample(run.bank.general_skills, count)
    wrong = draw.sample(run.bank.common_mistakes, count)
    return [SkillPair(skill, mistake, 0.0, 0.0) for skill, mistake in zip(right, wrong)]


@dataclasses.dataclass(frozen=True)
class FittedConfig(groups.MethodConfig):
    """SGSD's settings, with one solution of each problem."""

    program: ClassVar[str] = "research/dark/phases.py"
    generations: ClassVar[int] = 1


def fitted(
    run: Run, step: int, x: Problem, rolls_1: list[Rollout], pairs_K: list[SkillPair]
) -> groups.Losses:
    """The mean of -log p of a right solution under the plain prompt; 0 of a wrong one."""
    for roll in rolls_1:
        loss = torch.zeros(())
        if roll.r > 0:
            prompt = sgsd.student_prompt(run, x.problem)
            loss = -scoring.score_student(run.lm, prompt, roll.completion_ids).mean()
        yield loss, {}, {}


def hinted(losses: Callable) -> groups.Step:
    return groups.make_step(losses, groups.prompt_with_skills, random_pairs)


def stopped(step_fn: groups.Step, last: int) -> groups.Step:
    """The step, after whose `last` call the run saves and stops, as after a signal."""

    def train_step(run: Run, step: int) -> tuple[list[dict], float]:
        result = step_fn(run, step)
        if step == last:
            run.signals.first = time.monotonic()
        return result

    return train_step


# -------------------------------------------------------------------------------------- the jobs

GROUPS, HINTS = "--short --batch-size 2", "--num-teachers 3 --evolve-every 0"
SGSD = "--retrieval random --evolve-every 0 --batch-size 16"
ARMS: dict[str, tuple[type, groups.Step, str]] = {  # settings, step, flags
    "A": (grpo.GRPOConfig, grpo.train_step, GROUPS),
    "B": (ablations.AblationConfig, ablations.train_step, SGSD),
    "C": (ablations.AblationConfig, ablations.train_step, f"{SGSD} --skill-text none"),
    "D": (grpo.GRPOConfig, hinted(grpo.losses), f"{GROUPS} {HINTS}"),
    "E": (FittedConfig, hinted(fitted), f"{HINTS} --batch-size 16"),
    "F": (ablations.AblationConfig, ablations.train_step, SGSD),
}
EQUAL = (
    f"--preset tiny --temperature 1 --top-p 1 --top-k 0 --student-prefix closed --steps {STEPS} "
    "--max-new-tokens 160 --learning-rate 1e-3 --checkpoint-every 20 --audit-every 0"
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """One run: a base of the dark world, a seed, and what its first phase is."""

    base: int
    seed: int
    arm: str

    @property
    def phases(self) -> tuple[int, int]:
        """Steps of each phase."""
        return (60 if self.arm == "F" else 20), 60


def settings(plan: Plan, phase: int, world: pathlib.Path, folder: pathlib.Path) -> Any:
    """The settings of a phase, through the command line's parser."""
    kind, _, flags = ARMS[plan.arm if phase == 1 else "A"]
    paths = {"model": world / f"base-{plan.base}", "data": world / "train.jsonl"}
    paths["out"] = folder / f"phase-{phase}"
    if phase == 1 and plan.arm != "A":
        paths |= {"bank": world / "full_bank.json", "encoder": world / "encoder"}
    if phase == 2:
        paths["adapter"] = folder / f"phase-1/checkpoints/step_{plan.phases[0]:06d}"
    argv = [*EQUAL.split(), *flags.split(), "--seed", str(plan.seed + 100 * (phase - 1))]
    for name, path in paths.items():
        argv += [f"--{name}", str(path)]
    return command.parse(argv, None, kind, config.presets_of(kind))


def train(plan: Plan, phase: int, world: pathlib.Path, folder: pathlib.Path) -> dict[str, Any]:
    """Make a phase's steps; after the second one also what the run solves."""
    step_fn = ARMS[plan.arm if phase == 1 else "A"][1]
    found: dict[str, Any] = {}
    with Run.open(
        settings(plan, phase, world, folder), skills.load_bank, sgsd.student_prompt
    ) as run:
        sgsd.train(run, stopped(step_fn, plan.phases[phase - 1]))
        if phase == 2:
            tests = 2 * dark.read_problems(world / "dark_test.jsonl")
            prompts = [sgsd.student_prompt(run, x["problem"]) for x in tests]
            keys = []
            for i, x in enumerate(tests):
                keys.append(rollout.sample_key(run.cfg.seed, 0, x["id"], 2 * i // len(tests)))
            ids = rollout.generate(run.lm, run.tokenizer, prompts, dark.SAMPLING, keys, 160)
            texts = [rollout.text_of(run.tokenizer, of_one) for of_one in ids]
            found["solved"] = dark.solved(tests, texts)
            found["families"] = dark.by_family(tests, texts)
    return found


def summary(folder: pathlib.Path, steps: int, world: pathlib.Path) -> dict[str, Any]:
    """Of a phase: right solutions in each step, mixed groups, and right steps by family.

    begin, end: right steps among its first and its last 80 solutions.
    """
    rolls = [*files.read_jsonl(folder / "rollouts.jsonl")]
    locks = {x["id"]: x for x in dark.read_problems(world / "dark_train.jsonl")}
    right, mixed = [0] * steps, [0.0] * steps
    for roll in rolls:
        right[roll["step"] - 1] += roll["r"] > 0
        mixed[roll["step"] - 1] += roll.get("mixed", 0) / 8
    found: dict[str, Any] = {"right": right, "mixed": [round(x) for x in mixed]}
    for name, few in (("begin", rolls[:80]), ("end", rolls[-80:])):
        of_few = [locks[x["problem_id"]] for x in few]
        found[name] = dark.by_family(of_few, [x["text"] for x in few])
    return found


def run(plan: Plan, world: pathlib.Path, folder: pathlib.Path) -> dict[str, Any]:
    """A plan's row."""
    started, found = time.process_time(), dataclasses.asdict(plan)
    shutil.rmtree(folder, ignore_errors=True)  # of a killed job
    for phase, steps in enumerate(plan.phases, 1):
        found |= train(plan, phase, world, folder)
        found[f"phase {phase}"] = summary(folder / f"phase-{phase}", steps, world)
    return found | {"cpu_seconds": round(time.process_time() - started)}


# ------------------------------------------------------------------------------------ the tables


def fisher(a: int, n: int, b: int, m: int) -> float:
    """Two-sided p of a in n beside b in m: of all tables that are no likelier."""

    def ways(k: int) -> int:
        return math.comb(n, k) * math.comb(m, a + b - k)

    tables = [ways(k) for k in range(max(0, a + b - m), min(n, a + b) + 1)]
    return sum(x for x in tables if x <= ways(a)) / math.comb(n + m, a + b)


def begun(rows: list[dict], by: tuple[str, ...]) -> tuple[int, int]:
    """How many runs begin, of how many; by ("seed",) a seed does if one of its runs does."""
    begins: dict[tuple, bool] = {}
    for row in rows:
        unit = tuple(row[name] for name in by)
        begins[unit] = begins.get(unit, False) or row["solved"] >= LEAST
    return sum(begins.values()), len(begins)


def first_mixed(row: dict) -> int | None:
    """The step of the first group with both verdicts, counted over both phases."""
    mixed = row["phase 1"]["mixed"] + row["phase 2"]["mixed"]
    return next((step for step, count in enumerate(mixed, 1) if count), None)


def tables(rows: list[dict]) -> list[str]:
    """A row per arm, runs by base and seed; then each run's right steps by family."""
    rows = sorted(rows, key=lambda row: (row["arm"], row["base"], row["seed"]))
    arms = {name: [row for row in rows if row["arm"] == name] for name in ARMS}
    head = ["arm", "begin", "p beside B", "seeds that begin", "p beside B"]
    lines = head_of([*head, "solved, %", "first mixed", "CPU s"])
    for name, of_arm in arms.items():
        cells = [name]
        for by in (("base", "seed"), ("seed",)):
            ours, count = begun(of_arm, by)
            p = fisher(ours, count, *begun(arms["B"], by))
            cells += [f"{ours} of {count}", f"{p:.2g}"]
        cells.append(" ".join(f"{100 * row['solved'] / SOLUTIONS:.0f}" for row in of_arm))
        cells.append(" ".join(str(first_mixed(row) or "-") for row in of_arm))
        lines.append(row_of([*cells, sum(row["cpu_seconds"] for row in of_arm)]))
    lines += [
        "",
        *head_of(["run", "right in phase 1", "2", "steps right before GRPO, %", "in the end"]),
    ]
    for row in rows:
        right = [sum(row[f"phase {i}"]["right"]) for i in (1, 2)]
        shown = []
        for counts in (row["phase 2"]["begin"], row["families"]):
            shown.append(" ".join(f"{100 * ok / steps:.0f}" for ok, steps in counts.values()))
        lines.append(row_of([f"{row['arm']}-{row['base']}-{row['seed']}", *right, *shown]))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--world", type=pathlib.Path, default=dark.OUT, help="what dark.py made")
    add("--work", type=pathlib.Path, default=ROOT / "runs" / "phases", help="of the runs")
    add("--rows", type=pathlib.Path, default=ROWS, help="file of results")
    add("--bases", type=int, nargs="+", default=dark.SEEDS)
    add("--seeds", type=int, default=10)
    add("--arms", nargs="+", default=[*"ABCDE"], choices=ARMS)
    add("--show", action="store_true", help="print the tables of --rows, then end")
    args = parser.parse_args()
    rows = dark.read_problems(args.rows) if args.rows.exists() else []
    if args.show:
        print("\n".join(tables(rows)))
        return
    lines = open(args.world / "dark_train.jsonl").read().splitlines(True)
    (args.world / "train.jsonl").write_text("".join(lines[:PROBLEMS]))
    done = {(row["base"], row["seed"], row["arm"]) for row in rows}
    for seed in range(args.seeds):
        for base in args.bases:
            for arm in args.arms:
                if (base, seed, arm) not in done:
                    row = run(Plan(base, seed, arm), args.world, args.work / f"{arm}-{base}-{seed}")
                    with open(args.rows, "a") as file:
                        file.write(json.dumps(row, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
