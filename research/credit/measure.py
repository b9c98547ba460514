"""Do teachers know where the credit belongs? Four weights of a token's advantage, harder world.

    python research/credit/measure.py                  train and evaluate: four weights, five seeds
    python research/credit/measure.py --show           this folder's tables, from weights.json
    python research/credit/measure.py --picture        curves.png, from weights.json

A step is GRPO's, and each row weights a solution's advantage in its own way, token by token. All
rows have one rate, one bank by hand, and in each step the same problems with the same seeds of
sampling.
A problem's three teachers are shown the true skills and mistakes of its own three steps. Finished
runs stay in --work, and the same command goes on with the others.
"""

import argparse
import itertools
import json
import math
import pathlib
import random
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT / "research/worlds")]

import harder
import torch
import world
from torch import Tensor

import eval
import scoring
import sgsd
import skills
from lib import command, files
from lib.config import PRESETS
from lib.problems import Problem
from lib.run import Run
from methods import groups, grpo, rlsd
from research.markdown_table import head_of, row_of
from rollout import Rollout

WORLD = ROOT / "research" / "worlds" / "harder"
POINTS = (5, 10, 20)  # steps after which a run is evaluated; the last one ends it
PHASES = ((1, 5), (6, 20))  # steps
FLAGS = (
    "--preset tiny --batch-size 2 --max-new-tokens 160 --evolve-every 0 --num-teachers 3"
    " --audit-every 1 --checkpoint-every 5 --learning-rate 1e-3"
)
# Student's t, by the number of seeds.
T_95 = {
    2: 12.71,
    3: 4.30,
    4: 3.18,
    5: 2.78,
    6: 2.57,
    7: 2.45,
    8: 2.36,
    9: 2.31,
    10: 2.26,
}  # by seeds
TAU_G = 1.0


# ----------------------------------------------------------------------------------- the weights


def by_rlsd(delta_KT: Tensor, alpha_K: Tensor, advantage: Tensor, step: int) -> Tensor:
    """RLSD's weights, from SGSD's teachers; their share falls from 0.5 to 0 within 50 steps."""
    share = rlsd.weighting_share(step - 1, 0.5, 50)
    return rlsd.token_advantages(alpha_K @ delta_KT, advantage.item(), share)


def ones(delta_KT: Tensor, alpha_K: Tensor, advantage: Tensor, step: int) -> Tensor:
    """GRPO: every token has the solution's advantage."""
    return advantage * torch.ones(delta_KT.shape[1])


def gate(delta_KT: Tensor, alpha_K: Tensor, advantage: Tensor, step: int) -> Tensor:
    """A_t = A w_t, w_t = sum_k alpha_k |g_tau(Delta_t^(k))| over its mean."""
    w_T = alpha_K @ sgsd.gate_grad(delta_KT, TAU_G).abs()
    return advantage * w_T / w_T.mean().clamp_min(1e-12)


def shuffled(delta_KT: Tensor, alpha_K: Tensor, advantage: Tensor, step: int) -> Tensor:
    """The gate's weights, each on another token of the same solution."""
    advantage_T = gate(delta_KT, alpha_K, advantage, step)
    order = list(range(len(advantage_T)))
    random.Random(f"{step} {advantage_T.sum().item()}").shuffle(order)
    return advantage_T[order]


Weights = Callable[[Tensor, Tensor, Tensor, int], Tensor]
ROWS: dict[str, Weights] = {"grpo": ones, "rlsd": by_rlsd, "gate": gate, "shuffled": shuffled}


# ------------------------------------------------------------------------------------- one run


def losses_by(weights: Weights) -> Callable[..., groups.Losses]:
    """A method of groups: GRPO with these weights, from SGSD's teachers."""

    def losses(
        run: Run, step: int, x: Problem, rolls_G: list[Rollout], pairs_K: list[skills.SkillPair]
    ) -> groups.Losses:
        alpha_K = sgsd.pair_weights(run, pairs_K)
        contexts_K = sgsd.teacher_prompts(run, pairs_K, x.problem)
        for roll, advantage in zip(rolls_G, grpo.grpo_advantages(groups.rewards(rolls_G))):
            ids_T = roll.completion_ids
            logpT_KT = scoring.score_teachers(run.lm, contexts_K, ids_T, run.cfg.score_tokens)
            logpS_T = scoring.score_student(run.lm, roll.prompt_ids, ids_T)
            delta_KT = sgsd.log_prob_gap(logpT_KT, logpS_T.detach())
            advantage_T = weights(delta_KT, alpha_K, advantage, step)
            yield -(advantage_T * logpS_T).mean(), {}, {"advantage": advantage_T}

    return losses


def train(argv: list[str], weights: Weights) -> int:
    """A training's exit code."""
    command.end_at_signals()
    cfg = command.parse(argv, __doc__, groups.GroupConfig, PRESETS)
    step_fn = groups.step_fn(losses_by(weights), rlsd.student_prompt)
    with Run.open(cfg, OwnSteps.load) as run:
        return sgsd.train(run, step_fn)


def make_bank(path: pathlib.Path) -> None:
    """Each family's true skill and mistake, by hand."""
    right, wrong = [], []
    for family in world.FAMILIES:
        right.append({"skill_id": family.name, **world.item(None, family, "skill")})
        wrong.append({"mistake_id": family.name, **world.item(None, family, "mistake")})
    skills.SkillBank(right, wrong).save(path)


class OwnSteps(skills.SkillBank):
    """A bank that retrieves the pairs of a problem's own steps, all with one weight."""

    families: ClassVar[dict[str, list[str]]] = {}  # by the problem's text

    def retrieve(self, problem: str, k: int, embed: Any) -> list[skills.SkillPair]:
        pairs = []
        for name in self.families[problem]:
            skill = next(x for x in self.general_skills if x["skill_id"] == name)
            mistake = next(x for x in self.common_mistakes if x["mistake_id"] == name)
            pairs.append(skills.SkillPair(skill, mistake, 0.0, 0.0))
        return pairs


def one_run(name: str, seed: int, steps: int, samples: int, limit: int, work: pathlib.Path) -> dict:
    """Train one row with one seed, and evaluate it: accuracy by step, and where its credit lay."""
    out, bank = work / f"{name}-{seed}", work / "bank.json"
    if not bank.exists():
        make_bank(bank)
    data = files.read_jsonl(WORLD / "train.jsonl")
    OwnSteps.families = {row["problem"]: row["families"] for row in data}
    paths = {"model": WORLD / "model", "data": WORLD / "train.jsonl", "encoder": WORLD / "encoder"}
    argv = f"{FLAGS} --steps {steps} --seed {seed} --bank {bank} --out {out}".split()
    for flag, path in paths.items():
        argv += [f"--{flag}", str(path)]
    if train(argv, ROWS[name]):
        raise RuntimeError(f"{name}-{seed}: training ended early")
    points = [step for step in POINTS if step < steps] + [steps]
    taken = [str(out / "checkpoints" / f"step_{step:06d}") for step in points]
    asked = f"--max-new-tokens 160 --samples {samples} --rows 160 --seed {seed} --limit {limit}"
    if eval.main([*taken, "--data", str(WORLD / "test.jsonl"), *asked.split()]):
        raise RuntimeError(f"{name}-{seed}: evaluation ended early")
    accuracy = {}
    for step in points:
        place = out / "eval" / f"step_{step:06d}" / "samples.jsonl"
        accuracy[step] = statistics.mean(row["r"] > 0 for row in files.read_jsonl(place))
    successes: dict[int, list[bool]] = {}
    for row in files.read_jsonl(out / "rollouts.jsonl"):
        successes.setdefault(row["step"], []).append(row["r"] > 0)
    return {
        "accuracy": accuracy,
        "success": {step: statistics.mean(found) for step, found in successes.items()},
        "aims": aims(out),
    }


# ---------------------------------------------------------------------------- where the credit lay


def spans(texts: list[str]) -> list[range]:
    """The tokens of each step: from one step's number to the next, which is after "So"."""
    whole, ends = "", []
    for text in texts:
        whole += text
        ends.append(len(whole))
    found, start = [], 0
    for match in list(re.finditer(r"So \d+", whole))[:3]:
        tokens = [i for i, end in enumerate(ends) if start < end <= match.end()]
        found.append(range(tokens[0], tokens[-1] + 1) if tokens else range(0))
        start = match.end()
    return found


def deciding(texts: list[str], span: range, part: world.Drawn) -> int | None:
    """The token of a step at which right and wrong form first differ; None in any other form."""
    forms = [f"{text} So {answer}" for text, answer in (part.right, part.wrong)]
    alike = itertools.takewhile(lambda both: both[0] == both[1], zip(*forms))
    same = forms[0][: len(list(alike))]
    at = "".join(texts[i] for i in span).find(same)
    left = at + len(same)  # characters of the step in front of that token
    for i in span if at >= 0 else ():
        left -= len(texts[i])
        if left < 0:
            return i
    return None


def aims(out: pathlib.Path) -> dict[str, dict[str, float]]:
    """For each phase of a run, what of its credit lay on the tokens that decide a step.

    A token's credit is its advantage over the solution's length. The ideal credit is 1 on the
    deciding token of a right step, -1 on that of a wrong one, and 0 elsewhere.
    """
    locks = harder.held_out(random.Random(0))
    rows = files.read_jsonl(out / "rollouts.jsonl")
    audited = files.read_jsonl(out / "tokens.jsonl")
    pairs = list(zip(rows, audited, strict=True))
    found = {}
    for first, last in PHASES:
        tokens_decide = tokens = steps = product = squares = squares_there = 0.0
        for row, of_tokens in pairs:
            if not first <= row["step"] <= last:
                continue
            texts, x = of_tokens["text"], locks[row["problem_id"]]
            credit = [a / len(texts) for a in of_tokens["advantage"]]
            squares += sum(c * c for c in credit)
            tokens += len(texts)
            steps_right = harder.steps_right(x, row["text"])
            for span, part, ok in zip(spans(texts), x.parts, steps_right):
                at = deciding(texts, span, part)
                if at is None:
                    continue
                tokens_decide += 1
                squares_there += credit[at] ** 2
                if any(credit):  # a solution of a group that is all right or all wrong has none
                    steps += 1
                    product += credit[at] if ok else -credit[at]
        found[f"{first} to {last}"] = {
            "tokens": tokens_decide / max(tokens, 1),
            "share": squares_there / squares if squares else 0.0,
            "cosine": product / math.sqrt(squares * steps) if squares and steps else 0.0,
        }
    return found


# ---------------------------------------------------------------------------------------- tables


def interval(values: Sequence[float], sign: str = "") -> str:
    """Mean of the seeds' values with Student's 95% interval."""
    if len(values) < 2:
        return f"{values[0]:{sign}.1%}"
    half = T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):{sign}.1%} ± {half:.1%}"


def tables(results: dict[str, dict]) -> list[str]:
    """Accuracy and its differences to GRPO's, paired by seed; then where the credit lay."""
    seeds_of: dict[str, list[int]] = {name: [] for name in ROWS}
    for key in results:
        name, _, seed = key.partition("-")
        seeds_of[name].append(int(seed))
    points = list(results["grpo-0"]["accuracy"])
    head = ["weight", "seeds", *[f"{p} steps" for p in points]]
    lines = head_of([*head, *[f"less grpo, {p}" for p in points]])
    for name, seeds in seeds_of.items():
        runs = [results[f"{name}-{seed}"]["accuracy"] for seed in seeds]
        base = [results[f"grpo-{seed}"]["accuracy"] for seed in seeds]
        cells = [name, len(seeds), *[interval([run[p] for run in runs]) for p in points]]
        for p in points:
            gaps = [run[p] - own[p] for run, own in zip(runs, base)]
            cells.append("" if name == "grpo" else interval(gaps, "+"))
        lines.append(row_of(cells))
    phases, head = list(results["grpo-0"]["aims"]), ["weight"]
    for phase in phases:
        head += [f"share of credit², steps {phase}", "cosine"]
    lines += ["", *head_of(head)]
    for name, seeds in seeds_of.items():
        cells = [name]
        for phase in phases:
            aimed = [results[f"{name}-{seed}"]["aims"][phase] for seed in seeds]
            cells.append(interval([a["share"] for a in aimed]))
            cells.append(f"{statistics.mean(a['cosine'] for a in aimed):+.3f}")
        lines.append(row_of(cells))
    return lines


def picture(results: dict[str, dict], path: pathlib.Path) -> None:
    """Accuracy by steps, a line per weight, and a thin one per seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.2))
    for number, name in enumerate(ROWS):
        runs = [run for key, run in results.items() if key.startswith(f"{name}-")]
        points = [int(p) for p in runs[0]["accuracy"]]
        curves = [[100 * x for x in run["accuracy"].values()] for run in runs]
        for curve in curves:
            axis.plot(points, curve, color=f"C{number}", linewidth=0.6, alpha=0.5)
        means = [statistics.mean(values) for values in zip(*curves)]
        axis.plot(points, means, color=f"C{number}", linewidth=2.2, marker="o", label=name)
    axis.set(xlabel="steps", ylabel="accuracy on test problems, %", ylim=(0, 100))
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--steps", type=int, default=POINTS[-1])
    parser.add_argument("--samples", type=int, default=2, help="of each test problem")
    parser.add_argument("--limit", type=int, default=160, help="test problems")
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "runs" / "credit")
    parser.add_argument("--have", type=pathlib.Path, default=HERE / "weights.json")
    parser.add_argument("--show", action="store_true", help="only print the tables of --have")
    parser.add_argument("--picture", action="store_true", help="only draw the curves of --have")
    args = parser.parse_args(argv)
    if args.picture:
        picture(json.loads(args.have.read_text()), args.have.with_name("curves.png"))
        return
    if args.show:
        print("\n".join(tables(json.loads(args.have.read_text()))))
        return
    args.work.mkdir(parents=True, exist_ok=True)
    results = {}
    for seed, name in itertools.product(args.seeds, args.rows):
        done = args.work / f"{name}-{seed}.json"
        if not done.exists():
            found = one_run(name, seed, args.steps, args.samples, args.limit, args.work)
            files.write_json(done, found)
        results[f"{name}-{seed}"] = json.loads(done.read_text())
    files.write_json(args.work / "weights.json", results)
    if set(args.rows) == set(ROWS):
        print("\n".join(tables(results)))


if __name__ == "__main__":
    main()
