"""Where GRPO has nothing to learn from: 20 steps of one of five kinds, then 60 steps of GRPO.

    python research/worlds/dark.py                    the bases and the problems
    python research/worlds/dark.py --measure 6000     only a measured base is used
    python research/dark/phases.py                    all jobs without a row; give it twice for two

A  GRPO        B  SGSD with the full bank        C  SGSD whose teachers read empty entries
D  GRPO with the bank's hints in the prompt
E  right solutions sampled under the hints, fitted under the plain prompt (RAFT)
F  as B, but all 60 steps of its schedule (asked for by --arms F alone)

Pairs are random ones of the full bank; the second phase draws by a seed of its own. Each finished
job appends a row to --rows. Until a run's first gradient no weight moves, so we then sample several
steps at a time: the draws are the same. Of a killed job remove the .claim in --work.
"""

import argparse
import contextlib
import dataclasses
import json
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
import fast
import torch

import rollout
import scoring
import sgsd
import skills
from lib import command, config, files, verify
from lib.problems import Problem
from lib.run import Run
from methods import ablations, groups, grpo
from rollout import Job, Rollout
from skills import SkillPair

STEPS = 60  # of each phase's schedule
PROBLEMS = 480  # of dark_train.jsonl, which is more than a phase asks; a run reads all of them
AHEAD = 8  # most steps sampled at a time while no weight moves
HERE = pathlib.Path(__file__).resolve().parent


class Codes(verify.Judge):
    """Compares codes as texts, as the default does for plain integers; it needs no worker."""

    def is_right(self, problem: Any, answer: str) -> bool:
        return answer == problem.answer


# ------------------------------------------------------------------------------------- the steps


def random_pairs(run: Run, step: int, x: Problem) -> list[SkillPair]:
    """As `ablations.chosen_pairs` draws them: anew in each step."""
    draw, count = random.Random(rollout.sample_key(run.cfg.seed, step, x.id)), run.cfg.num_teachers
    right = draw.sample(run.bank.general_skills, count)
    wrong = draw.sample(run.bank.common_mistakes, count)
    return [SkillPair(skill, mistake, 0.0, 0.0) for skill, mistake in zip(right, wrong)]


def no_pairs(run: Run, step: int, x: Problem) -> list[SkillPair]:
    return []


def solve(run: Run, jobs: list[Job]) -> list[Rollout]:
    """As `sgsd.solve`, but faster."""
    fast.sample(run.lm, run.tokenizer, jobs, dark.SAMPLING)
    (judged,) = rollout.rollouts(run.tokenizer, run.stops, run.verifier, [jobs])
    return [roll for _, roll in judged]


def sampled_ahead(
    losses: Callable, retrieve: groups.Retrieve, prompt: groups.StudentPrompt = groups.prompt_alone
) -> groups.Step:
    """A step as `groups.make_step` makes it, which samples ahead until the first gradient."""
    drawn: dict[int, Any] = {}  # a step's jobs, pairs and solutions
    ahead = 1

    def draw(run: Run, steps: range) -> None:
        jobs = []
        for step in steps:
            drawn[step] = groups.step_jobs(run, step, prompt, retrieve)
            jobs += drawn[step][0]
        rolls = iter(solve(run, jobs))
        for step in steps:
            drawn[step] += ([next(rolls) for _ in drawn[step][0]],)

    def train_step(run: Run, step: int) -> tuple[list[dict], float]:
        nonlocal ahead
        if step not in drawn:
            draw(run, range(step, min(step + max(1, ahead), run.cfg.steps + 1)))
            ahead = min(2 * ahead, AHEAD)
        jobs, pairs, rolls = drawn.pop(step)
        G, rows = run.cfg.generations, []
        for g, pairs_K in enumerate(pairs):
            of_group = rolls[g * G : g * G + G]
            for i, result in enumerate(losses(run, step, jobs[g * G].problem, of_group, pairs_K)):
                result = sgsd.RolloutLoss(*result)
                if result.loss.requires_grad:
                    (result.loss / len(jobs)).backward()
                    ahead = 0  # from here on AdamW moves the weights in each step
                rows.append(sgsd.log_row(run, step, g * G + i, pairs_K, of_group[i], result))
        if not ahead:
            drawn.clear()
        return rows, sgsd.optimizer_step(run, step)

    return train_step


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


def taught() -> groups.Step:
    return sampled_ahead(ablations.losses, ablations.retrieve)


HINTED = random_pairs, groups.prompt_with_skills
ARMS: dict[str, tuple[type, Callable[[], groups.Step], str]] = {  # settings, step, flags
    "A": (grpo.GRPOConfig, lambda: sampled_ahead(grpo.losses, no_pairs), GROUPS),
    "B": (ablations.AblationConfig, taught, SGSD),
    "C": (ablations.AblationConfig, taught, f"{SGSD} --skill-text none"),
    "D": (grpo.GRPOConfig, lambda: sampled_ahead(grpo.losses, *HINTED), f"{GROUPS} {HINTS}"),
    "E": (FittedConfig, lambda: sampled_ahead(fitted, *HINTED), f"{HINTS} --batch-size 16"),
    "F": (ablations.AblationConfig, taught, SGSD),
}
EQUAL = (
    "--preset tiny --temperature 1 --top-p 1 --top-k 0 --student-prefix closed --rollout-rows 160"
)
EQUAL += " --max-new-tokens 160 --learning-rate 1e-3 --checkpoint-every 20 --audit-every 0"
EQUAL += f" --verifier research.dark.phases:Codes --steps {STEPS}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """One run: a base of the dark world, a seed, and what its first phase is."""

    base: int
    seed: int
    arm: str

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.base}-{self.seed}"

    @property
    def phases(self) -> tuple[int, int]:
        """Steps of each phase."""
        return (60 if self.arm == "F" else 20), 60


def settings(plan: Plan, phase: int, world: pathlib.Path, folder: pathlib.Path) -> Any:
    """The settings of a phase, through the command line's parser."""
    kind, _, flags = ARMS[plan.arm if phase == 1 else "A"]
    paths = {"model": world / f"base-{plan.base}", "data": world / "train.jsonl"}
    paths |= {"out": folder / f"phase-{phase}", "encoder": world / "encoder"}
    if phase == 1 and plan.arm != "A":
        paths["bank"] = world / "full_bank.json"
    if phase == 2:
        paths["adapter"] = folder / f"phase-1/checkpoints/step_{plan.phases[0]:06d}"
    if plan.arm == "A" or phase == 2:
        del paths["encoder"]  # GRPO without a bank has no such flag
    argv = [*EQUAL.split(), *flags.split(), "--seed", str(plan.seed + 100 * (phase - 1))]
    for name, path in paths.items():
        argv += [f"--{name}", str(path)]
    return command.parse(argv, None, kind, config.presets_of(kind))


def train(plan: Plan, phase: int, world: pathlib.Path, folder: pathlib.Path) -> dict[str, Any]:
    """Make a phase's steps; after the second one also what the run solves."""
    step_fn = ARMS[plan.arm if phase == 1 else "A"][1]()
    cfg = settings(plan, phase, world, folder)
    found: dict[str, Any] = {}
    with Run.open(cfg, skills.load_bank, sgsd.student_prompt) as run:
        sgsd.train(run, stopped(step_fn, plan.phases[phase - 1]))
        if phase == 2:
            tests = dark.read_problems(world / "dark_test.jsonl")
            texts = [text for i in (0, 1) for text in solutions(run, tests, i)]
            found["solved"] = dark.solved(2 * tests, texts)
            found["families"] = dark.by_family(2 * tests, texts)
    return found


def solutions(run: Run, tests: list[dict], number: int) -> list[str]:
    """A solution of each test problem, sampled as the run trains."""
    jobs = []
    for i, x in enumerate(tests):
        key = rollout.sample_key(run.cfg.seed, 0, x["id"], number)
        prompt = sgsd.student_prompt(run, x["problem"])
        jobs.append(Job(i, prompt, key=key, tokens_left=run.cfg.max_new_tokens))
    fast.sample(run.lm, run.tokenizer, jobs, dark.SAMPLING)
    return [rollout.text_of(run.tokenizer, job.ids) for job in jobs]


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
        found[name] = dark.by_family(
            [locks[x["problem_id"]] for x in few], [x["text"] for x in few]
        )
    return found


def run(plan: Plan, world: pathlib.Path, work: pathlib.Path) -> dict[str, Any]:
    """A plan's row."""
    started, folder = time.process_time(), work / plan.name
    found: dict[str, Any] = dataclasses.asdict(plan)
    for phase in (1, 2):
        if phase == 2 or not (folder / f"phase-1/checkpoints/step_{plan.phases[0]:06d}").exists():
            shutil.rmtree(folder / f"phase-{phase}", ignore_errors=True)  # of a killed job
            found |= train(plan, phase, world, folder)
        found[f"phase {phase}"] = summary(folder / f"phase-{phase}", plan.phases[phase - 1], world)
    return found | {"cpu_seconds": round(time.process_time() - started)}


def claimed(plans: list[Plan], world: pathlib.Path, work: pathlib.Path) -> Any:
    """Claim and yield plans in their order, those alone whose base was measured."""
    while True:
        for plan in plans:
            claim = work / f"{plan.name}.claim"
            if not claim.exists() and (world / f"base-{plan.base}.json").exists():
                with contextlib.suppress(FileExistsError):
                    claim.touch(exist_ok=False)
                    yield plan
                break
        else:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--world", type=pathlib.Path, default=dark.OUT, help="what dark.py made")
    add("--work", type=pathlib.Path, default=ROOT / "runs" / "phases", help="of the runs")
    add("--rows", type=pathlib.Path, default=HERE / "rows.jsonl", help="file of results")
    add("--bases", type=int, nargs="+", default=dark.SEEDS)
    add("--seeds", type=int, default=10)
    add("--arms", nargs="+", default=[*"ABCDE"], choices=ARMS)
    add("--until", default="", metavar="HH:MM", help="begin no plan after this time (UTC)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    plans = []
    for seed in range(args.seeds):
        for base in args.bases:
            plans += [Plan(base, seed, arm) for arm in args.arms]
    args.work.mkdir(parents=True, exist_ok=True)
    lines = open(args.world / "dark_train.jsonl").readlines()
    (args.world / "train.jsonl").write_text("".join(lines[:PROBLEMS]))
    rows = dark.read_problems(args.rows) if args.rows.exists() else []
    done = {(row["base"], row["seed"], row["arm"]) for row in rows}
    plans = [plan for plan in plans if dataclasses.astuple(plan) not in done]
    for plan in claimed(plans, args.world, args.work):
        row = run(plan, args.world, args.work)
        with open(args.rows, "a") as file:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
        print(time.strftime("%H:%M"), plan.name, row["solved"], row["cpu_seconds"], flush=True)
        if args.until and time.strftime("%H:%M", time.gmtime()) > args.until:
            return


if __name__ == "__main__":
    main()
