"""Will it help? The slope of the success rate along a method's step, before anything is trained.

    PROBE="python -m research.slope.probe"
    $PROBE --preset tiny --bank A.json     the planned run, and GRPO beside it
    $PROBE --preset tiny --bank A.json --try "--bank B.json" --try "--method opsd"
    $PROBE @flags.txt --at runs/a/checkpoints/step_000020     flags of runs/a

A step moves the weights along u. To first order it changes the success rate J by

    <grad J, u> = mean over problems x of Cov_y( 1[r > 0], <grad log q(y | x), u> ),   y ~ q(. | x)

so the question is: does the step make right solutions likelier than wrong ones to the same problem?
We sample rollouts of the present policy q and split their problems in halves. The direction u comes
from one half, the covariance from the other; then they change places. The derivation is in
research/slope/README.md.

Dimension key: G rollouts of a problem, N problems, n positions of a slice, V vocabulary, P trained
weights.
"""

import argparse
import contextlib
import functools
import itertools
import os
import pathlib
import random
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from extras.baselines import Example
from torch import Tensor
from tqdm import tqdm

import distributed
import rollout
import scoring
import sgsd
import skills
from extras import baselines
from lib import config, files, model
from lib.problems import Problem
from lib.run import Run
from rollout import Rollout, Sampling

# All rows share the model, the problems, the server and the making of the bank.
SHARED = "model dtype attn lora_rank lora_alpha device data seed verifier".split()
SHARED += "split problem_field answer_field answer_after server cold_start".split()
SHARED += "cold_start_temperature cold_start_tokens cold_start_thinking memory_answer".split()
SHARED += "merge_group_size merge_patience reply_tokens".split()
BACKWARD = 4  # forward passes in the time of one forward and back, with checkpointing
ENOUGH = 20  # problems with both outcomes: with fewer the intervals are too narrow
SUPPORTS = "support_success", "support_failure"
POWER = 1.96 + 0.84  # standard errors from 0 where the interval leaves 0 in 80% of cases


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[tuple[str, Any]]]:
    """The probe's own options; and (flags, settings) of GRPO, the planned run and each --try."""
    usage = "[--problems N] [--samples N] [--FLAG VALUE ...]"
    own = config.Parser("-m research.slope.probe", usage, __doc__, add_help=False)
    own.add_argument("--problems", type=int, default=80, metavar="N", help="training problems")
    own.add_argument("--samples", type=int, default=4, metavar="N", help="rollouts of each problem")
    text = "further rollouts of each, for the covariance alone: they need no teachers"
    own.add_argument("--extra-samples", type=int, default=0, metavar="N", help=text)
    text = "a further row: the planned run with these flags changed; give it as often as you like"
    own.add_argument("--try", action="append", default=[], dest="tries", metavar="FLAGS", help=text)
    own.add_argument("--at", metavar="CHECKPOINT", help="measure there, not at the base model")
    own.add_argument("--out", metavar="FILE.json", help="also write the numbers to this file")
    words = list(sys.argv[1:] if argv is None else argv)
    for i in reversed(range(len(words) - 1)):
        if words[i] == "--try":  # argparse takes a value that begins with "-" for a flag
            words[i : i + 2] = [f"--try={words[i + 1]}"]
    options, plan = own.parse_known_args(words)
    if {"-h", "--help"} & {*plan}:
        print(own.format_help() + "\nand the flags of the planned run:\n")
    cfg: Any = baselines.parse(plan)
    rows = [] if is_grpo(cfg) else [("", cfg)]
    for flags in options.tries:
        no_bank = ["--bank="] if re.search(r"--method[ =](grpo|opsd)(?!\+skill)", flags) else []
        rows.append((flags, baselines.parse([*plan, *no_bank, *shlex.split(flags)])))
    with config.one_line_errors("probe"):
        if options.problems < 4 or options.samples < 2 or options.extra_samples < 0:
            raise ValueError("--problems must be >= 4, --samples >= 2 and --extra-samples >= 0")
        for flags, row_cfg in rows:
            for name in SHARED:
                if getattr(row_cfg, name) != getattr(cfg, name):
                    rule = "all rows share it; probe this row in a command of its own"
                    raise ValueError(f"--try {flags!r}: {config.flag(name)}: {rule}")
            if not row_cfg.temperature:
                raise ValueError("--temperature 0: a greedy policy has no slope")
        return options, [grpo_of(cfg, options.samples), *rows]


def is_grpo(cfg: Any) -> bool:
    return cfg.method in ("grpo", "grpo-short")


def grpo_of(cfg: Any, samples: int) -> tuple[str, Any]:
    """GRPO's (flags, settings), sampled as planned, with about as many rollouts in a step.

    That is grpo-short, unless GRPO as published is what is planned.
    """
    plain = {name: getattr(baselines.BaselineConfig, name) for name in baselines.OF_TEACHERS}
    if not is_grpo(cfg):
        plain |= {"loss_temperature": 0.0, "method": "grpo-short"}
    groups = max(1, cfg.batch_size * cfg.generations // samples)
    cfg = replace(cfg, bank="", batch_size=groups, generations=samples, **plain)
    shown = "student_prefix temperature top_p top_k max_new_tokens grad_clip learning_rate".split()
    flags = f"--method {cfg.method}"
    for name in (*shown, "batch_size", "generations", "loss_temperature"):
        flags += f" {config.flag(name)} {getattr(cfg, name)}"
    return flags + (" --drop-truncated" if cfg.drop_truncated else ""), cfg


@dataclass
class Row:
    """A method with its settings, bank, prompts and rollouts; and what was measured of it."""

    flags: str
    run: Run  # shares model and verifier with all rows
    sampling: Sampling
    examples: list[list[Example]]  # [N][--samples and --extra-samples], without rollouts
    groups: list[list[Rollout]] = field(default_factory=list)  # [N][G]; rows that agree share them
    directions: list[Tensor] = field(default_factory=list)  # from each half: Adam's, unit; [2, P]
    points_N: np.ndarray = field(default_factory=lambda: np.zeros(0))  # each problem's slope
    numbers: dict[str, Any] = field(default_factory=dict)  # its row in --out


# --------------------------------------------------------------------------------- the covariance


def contrast(right_G: Tensor) -> Tensor:
    """w_i = (1[r_i > 0] - the mean of the others) / G: sum_i w_i s_i is the covariance, unbiased.

    The same as (1[r_i > 0] - the mean of all) / (G - 1); 0 unless both outcomes are there.
    """
    return (right_G - right_G.mean()) / (len(right_G) - 1)


def allowed(logits_nV: Tensor, sampling: Sampling) -> Tensor:
    """The ids that top-k and top-p leave at each position, as in `rollout.select_tokens`. [n, V].

    logits_nV: divided by the temperature.
    """
    size = logits_nV.shape[-1]
    k = min(sampling.top_k or size, size)
    allowed_nV = torch.ones_like(logits_nV, dtype=torch.bool)
    if k < size:  # more than k are left where logits are equal
        allowed_nV = logits_nV >= logits_nV.topk(k).values[:, -1:]
    if sampling.top_p < 1:
        p_nV = logits_nV.masked_fill(~allowed_nV, -torch.inf).softmax(-1)
        top_nk = p_nV.topk(k).values.double()
        count_n1 = (top_nk.cumsum(-1) - top_nk < sampling.top_p).sum(-1, keepdim=True)
        allowed_nV &= p_nV >= top_nk.gather(-1, count_n1 - 1).to(p_nV)
    return allowed_nV


def drawn_logprob(sampling: Sampling, ids_n: Tensor, logits_nV: Tensor) -> Tensor:
    """log q of drawn ids under the distribution that drew them, its allowed ids held fixed. [n].

    The drawn id counts as allowed: rounding can put it beyond a threshold.
    """
    allowed_nV = allowed(logits_nV.detach(), sampling).scatter(1, ids_n[:, None], True)
    return scoring.logprob_of(ids_n, logits_nV.masked_fill(~allowed_nV, -torch.inf))


def ascent(run: Run, group: Sequence[Rollout], sampling: Sampling) -> Tensor:
    """A problem's part of grad J: sum_i w_i grad log q(y_i | x), with w from `contrast`. [P]."""
    w_G = contrast(torch.tensor([float(roll.r > 0) for roll in group])).to(run.world.device)
    logprob = functools.partial(drawn_logprob, sampling)
    lengths = [len(roll.prompt_ids) + len(roll.completion_ids) for roll in group]
    for pack in scoring.packs(lengths, run.cfg.score_tokens):
        prompts = [group[i].prompt_ids for i in pack]
        completions = [group[i].completion_ids for i in pack]
        x_n, ids_n = scoring.predictors(run.lm, prompts, completions)
        logq_n = scoring.over_slices(run.lm, [x_n], ids_n, logprob, sampling.temperature)
        w_n = torch.cat([w_G[i].expand(len(group[i].completion_ids)) for i in pack])
        (w_n * logq_n).sum().backward()
    return take_gradient(run)


def take_gradient(run: Run) -> Tensor:
    """The accumulated gradient of the trained weights as one vector [P], which is then cleared."""
    parts = []
    for p in model.trained(run.lm).values():
        parts.append(torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten())
        p.grad = None
    return torch.cat(parts).float()


def problem_slopes(
    halves: Sequence[Sequence[int]],
    directions: Sequence[Sequence[Tensor]],
    ascent_of: Callable[[int], Tensor | None],
) -> np.ndarray:
    """<problem i's part of grad J, u> for each u of the half that i is not in. [D, N].

    directions: of each half, for every row, [d, P]; D is the sum of the d. ascent_of: a problem's
    part [P], None for 0; one at a time.
    """
    slopes_DN = np.zeros((sum(map(len, directions[0])), sum(map(len, halves))))
    for half, of_half in zip(halves, reversed(directions)):
        for i in half:
            g_P = ascent_of(i)
            if g_P is not None:
                slopes_DN[:, i] = torch.cat([u_dP @ g_P for u_dP in of_half]).tolist()
    return slopes_DN


def set_slopes(rows: Sequence[Row], halves: Sequence[list[int]], bar: tqdm) -> None:
    """The slopes of rows that share their rollouts: one backward pass of a problem serves all."""
    groups = rows[0].groups

    def ascent_of(i: int) -> Tensor | None:
        bar.update(BACKWARD * len(groups[i]))
        mixed = len({roll.r for roll in groups[i]}) == 2
        return ascent(rows[0].run, groups[i], rows[0].sampling) if mixed else None

    directions = [[row.directions[h] for row in rows] for h in (0, 1)]
    points_R2N = 100 * problem_slopes(halves, directions, ascent_of).reshape(len(rows), 2, -1)
    for row, (adam_N, unit_N) in zip(rows, points_R2N):
        row.points_N = adam_N * row.run.cfg.learning_rate
        names = "slope", "low", "high", "error"
        row.numbers |= dict(zip(names, interval([row.points_N[half] for half in halves])))
        row.numbers["unit"], *_, row.numbers["unit_error"] = interval([unit_N[h] for h in halves])


def interval(halves: Sequence[np.ndarray], draws: int = 4000) -> tuple[float, float, float, float]:
    """(mean, low, high, standard error) of problems' slopes: a 95% bootstrap by problem.

    Each half has its own interval, for a direction that its problems had no part in. Their ends are
    averaged: the halves' errors may agree, since each half made the other one's direction.
    """
    rng, total = np.random.default_rng(0), np.zeros(4)
    for x_n in halves:
        means = x_n[rng.integers(len(x_n), size=(draws, len(x_n)))].mean(1)
        total += len(x_n) * np.array([x_n.mean(), *np.quantile(means, (0.025, 0.975)), means.std()])
    mean, low, high, error = (total / sum(map(len, halves))).tolist()
    return mean, low, high, error


# --------------------------------------------------------------------------------- the directions


def minibatches(half: Sequence[int], samples: int, cfg: Any) -> list[list[tuple[int, int]]]:
    """A half's examples (problem, sample) in minibatches of about the planned size, at least one.

    A method that compares a group gets whole groups, any other one sample of many problems.
    """
    units = [[(i, j)] for j in range(samples) for i in half]
    if cfg.generations > 1:
        units = [[(i, j) for j in range(samples)] for i in half]
    count = round(len(half) * samples / (cfg.batch_size * cfg.generations))
    parts = np.array_split(np.arange(len(units)), min(max(1, count), len(units)))
    return [[example for u in part for example in units[u]] for part in parts]


def set_directions(row: Row, halves: Sequence[list[int]], samples: int, bar: tqdm) -> None:
    """The method's step at the present weights, from each half; no weight moves.

    Adam's is -m / (sqrt v + 1e-8), where m and v are means over minibatches of the clipped gradient
    and of its square: where AdamW's steps tend while the weights stay (its first ones are nearer to
    the gradient's sign). The unit direction is the mean gradient's.
    """
    run, cfg = row.run, baselines.settings(row.run)
    seen: dict[str, list[float]] = {name: [] for name in (*SUPPORTS, "decided")}
    for half in halves:
        mean_P = m_P = v_P = torch.zeros((), device=run.world.device)
        batches = minibatches(half, samples, cfg)
        for batch in batches:
            for i, j in batch:
                example, group = row.examples[i][j], row.groups[i][:samples]
                bar.update(len(example.teachers_K) + BACKWARD)
                if cfg.method[:4] == "grpo" and len({sgsd.reward(roll) for roll in group}) == 1:
                    continue  # no advantage, no gradient
                example.index, example.group = i * samples + j, group
                example.rollout = group[j]
                result = baselines.rollout_loss(run, example)
                seen[SUPPORTS[group[j].r < 0]] += result.a_K.tolist()
                seen["decided"] += (result.rho_K != 0).tolist()
                if result.loss.requires_grad:  # --drop-truncated leaves a constant
                    (result.loss / len(batch)).backward()
            g_P = take_gradient(run)
            if not g_P.isfinite().all():
                where = row.flags or "the planned run"
                raise ValueError(f"{where}: a gradient is not finite; try --dtype float32")
            clipped_P = g_P * min(1.0, cfg.grad_clip / (float(g_P.norm()) + 1e-6))
            mean_P, m_P, v_P = mean_P + g_P, m_P + clipped_P, v_P + clipped_P.square()
        m_P, v_P = m_P / len(batches), v_P / len(batches)
        adam_P = -m_P / (v_P.sqrt() + 1e-8)
        unit_P = -mean_P / mean_P.norm().clamp(min=1e-30)
        row.directions.append(torch.stack([adam_P, unit_P]))
    row.numbers |= {name: float(np.mean(x)) if x else None for name, x in seen.items()}


# ------------------------------------------------------------------------------- rows and rollouts


def make_row(
    run: Run, flags: str, cfg: Any, data: Sequence[Problem], options: Any, cache: dict[Any, Any]
) -> Row:
    """A row with its bank and prompts, without rollouts. cache: banks and encoders to share."""
    each = options.samples + options.extra_samples
    if cfg.method.startswith("grpo"):  # its groups are those that are sampled here
        groups = max(1, cfg.batch_size * cfg.generations // options.samples)
        cfg = replace(cfg, generations=options.samples, batch_size=groups)
    run = replace(run, cfg=cfg, bank=None, extra_tensors={**run.extra_tensors})
    if cfg.uses_skill_bank:
        if cfg.encoder not in cache:
            cache[cfg.encoder] = model.load_encoder(cfg.encoder, run.device)
        run.embed = cache[cfg.encoder]
        if cfg.bank not in cache:
            cache[cfg.bank] = bank_of(run, options.at)
        run.bank = cache[cfg.bank]
        sgsd.check_bank(run)
    sampling = Sampling(cfg.temperature, cfg.top_p, cfg.top_k, cfg.max_new_tokens)
    row = Row(flags, run, sampling, [])
    for x in data:
        row.examples.append([])
        for j in range(each):
            turn = 0 if cfg.method.startswith("grpo") else j  # a group shares its prompt
            pairs_K = baselines.retrieve(run, x, run.step + 1 + turn)  # random ones are drawn anew
            student, teachers_K = baselines.prompts(run, x, pairs_K)
            key = rollout.sample_key(cfg.seed, -1 - run.step, x.id, j)  # no step is below 0
            row.examples[-1].append(Example(j, x, key, pairs_K, student, teachers_K))
    return row


def bank_of(run: Run, at: str | None) -> Any:
    """A row's bank: the one in use at the checkpoint, --bank, or one that the model writes.

    A --bank that is not the run's own stands for itself, at a checkpoint too.
    """
    trained_in = pathlib.Path(at or "").absolute().parent.parent
    versions = files.by_step(trained_in / "bank") if at else {}
    if versions:
        begun_with = files.read_json(trained_in / "config.json")["settings"]["bank"]
        if config.comparable(run.cfg)["bank"] in ("", begun_with):
            return skills.SkillBank.load(versions[max(n for n in versions if n <= run.step)])
    if run.cfg.bank:
        return skills.SkillBank.load(run.cfg.bank)
    return sgsd.make_bank(run)


def draw(row: Row) -> list[list[Rollout]]:
    """A rollout of each of the row's examples, from its prompt."""
    every = list(itertools.chain.from_iterable(row.examples))
    for at in tqdm(range(0, len(every), 64), "sampling", disable=None):
        sgsd.sample(row.run, every[at : at + 64])
    return [[example.rollout for example in of_problem] for of_problem in row.examples]


# ------------------------------------------------------------------------------------ the command


def measure(rows: Sequence[Row], data: Sequence[Problem], samples: int) -> dict[str, Any]:
    """Print the cost, the rows and the advice; the content of --out. rows: GRPO's is the first.

    samples: those of each problem that make the directions.
    """
    grpo, each = rows[0], len(rows[0].examples[0])
    drawn = len(data) * each
    alike: dict[str, list[Row]] = {}  # rows by what their rollouts are drawn from
    passes = BACKWARD * drawn  # GRPO's slope comes first, by itself
    for row in rows:
        every = list(itertools.chain.from_iterable(row.examples))
        students = [example.student for example in every]
        alike.setdefault(files.digest(students, row.sampling), []).append(row)
        for of_problem in row.examples:
            passes += sum(len(x.teachers_K) + BACKWARD for x in of_problem[:samples])
    passes += BACKWARD * drawn * len(alike)
    size = 16 * len(rows) * sum(p.numel() for p in model.trained(grpo.run.lm).values()) / 1e6
    drawn_in_all = f"{len(alike)} x {len(data)} problems x {each} = {len(alike) * drawn} rollouts"
    print(f"cost: {drawn_in_all}; then at most {passes:,} forward passes over one", end=" ")
    print(f"({BACKWARD} for one forward and back); directions take {size:,.0f} MB")
    for sharing in alike.values():
        groups = draw(sharing[0])
        rolls = list(itertools.chain.from_iterable(groups))
        for row in sharing:
            row.groups = groups
            row.numbers["success"] = float(np.mean([roll.r > 0 for roll in rolls]))
            row.numbers["cut"] = float(np.mean([roll.truncated for roll in rolls]))
    n, planned = grpo.numbers, next((row for row in rows if not row.flags), grpo)
    mixed = sum(len({roll.r for roll in group}) == 2 for group in planned.groups)
    success = planned.numbers["success"]
    print(f"success {success:.1%}; {mixed} of {len(data)} problems have both outcomes")
    if planned.numbers["cut"] > 0.5:
        limit = planned.run.cfg.max_new_tokens
        print(f"{planned.numbers['cut']:.0%} were cut at --max-new-tokens {limit}: raise it")

    halves = [list(range(0, len(data), 2)), list(range(1, len(data), 2))]
    with tqdm(total=passes, desc="passes", disable=None, unit="pass") as bar:
        set_directions(grpo, halves, samples, bar)
        set_slopes([grpo], halves, bar)
        bar.write(f"GRPO: {span(n)}; {rollouts_needed(n, drawn)}")
        for row in rows[1:]:
            set_directions(row, halves, samples, bar)
        for sharing in alike.values():
            others = [row for row in sharing if row is not grpo]
            if others:
                set_slopes(others, halves, bar)
    print(f"\n{'':30} {'points of success a step':26} of GRPO's   cut  supports +, -   decided")
    for row in rows:
        alone = row.groups is not grpo.groups  # it has other rollouts, so another success rate
        row.numbers["relative"] = None if alone else ratio(row.numbers["unit"], n)
        row.numbers["smallest"] = POWER * row.numbers["error"]
        gap = [None] * 3 if alone else interval([(row.points_N - grpo.points_N)[h] for h in halves])
        row.numbers |= dict(zip(("less_grpo", "less_grpo_low", "less_grpo_high"), gap))
        print(line_of("GRPO" if row is grpo else row.flags or "as planned", row.numbers))
    least = planned.numbers["smallest"]
    if least:
        print(f"{drawn} rollouts tell a slope of {least:.3f} from 0 in at least 4 of 5 cases")
    print(advice(planned.numbers, n, mixed))
    numbers = {"success": success, "rollouts": drawn, "mixed": mixed}
    return numbers | {"rows": [{"flags": row.flags, **row.numbers} for row in rows]}


def ratio(unit: float, grpo: dict[str, Any]) -> float | None:
    """A row's `unit` over GRPO's; None where GRPO's is not told above 0, so that it is noise."""
    return unit / grpo["unit"] if grpo["unit"] > 1.96 * grpo["unit_error"] else None


def rollouts_needed(grpo: dict[str, Any], drawn: int) -> str:
    """How many rollouts would tell half of GRPO's slope from 0; its error falls with their root."""
    if grpo["low"] <= 0 <= grpo["high"]:
        return f"not told from 0 with {drawn} rollouts"
    needed = drawn * (2 * POWER * grpo["error"] / grpo["slope"]) ** 2
    return f"to tell half of it from 0 takes about {needed:,.0f} rollouts"


def span(numbers: dict[str, Any]) -> str:
    return "{slope:+.3f} ({low:+.3f} to {high:+.3f})".format(**numbers)


def line_of(label: str, n: dict[str, Any]) -> str:
    """A row of the printed table; of a long label its end, where paths differ."""
    label = label if len(label) <= 30 else f"…{label[-29:]}"
    texts = ["-" if n[name] is None else f"{n[name]:+.3f}" for name in SUPPORTS]
    relative = "-" if n["relative"] is None else f"{n['relative']:.2f}"
    decided = "-" if n["decided"] is None else f"{n['decided']:.0%}"
    line = f"{label:30} {span(n):26} {relative:>9} {n['cut']:5.0%}"
    return f"{line}  {texts[0]:>6} {texts[1]:>6}  {decided:>7}"


def advice(planned: dict[str, Any], grpo: dict[str, Any], mixed: int) -> str:
    """What to do, in one sentence, by the planned row's intervals; `less_grpo` is paired."""
    if planned["error"] == 0:
        return "Change the plan: there is no loss, or no problem has both outcomes."
    if mixed < ENOUGH:
        return f"Sample more: {mixed} problems have both outcomes, and intervals need {ENOUGH}."
    if planned["high"] < 0:
        return "Do not train as planned: the step makes wrong solutions likelier than right ones."
    if planned["low"] <= 0 < grpo["low"]:
        return "Take GRPO or another row: GRPO's slope is told above 0, the planned one is not."
    if planned["low"] <= 0:
        return "Sample more before you decide: neither the plan's slope nor GRPO's is told above 0."
    if planned["less_grpo"] is not None and planned["less_grpo_high"] < 0:
        return f"It helps, but a step of GRPO adds {-planned['less_grpo']:.2f} points more."
    return "The planned step helps; later ones may not: train some, and as many with GRPO."


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    began, (options, settings) = time.perf_counter(), parse(argv)
    cfg = settings[0][1]  # of GRPO: all that the rows share is the plan's
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(130))  # the temporary folder goes, too
    with contextlib.ExitStack() as held, config.one_line_errors("probe"):
        if options.out and not options.out.endswith(".json"):
            raise ValueError(f"--out {options.out}: the file of the numbers must end with .json")
        if "RANK" in os.environ:
            raise ValueError("the probe runs in one process: start it with python, not torchrun")
        cfg = replace(cfg, out=held.enter_context(tempfile.TemporaryDirectory(prefix="probe-")))
        run = held.enter_context(Run.open(cfg, skills.SkillBank.load))
        if options.at:
            at = pathlib.Path(options.at)
            run.step, run.extra_tensors = model.restore(at, run.lm, run.optimizer)
        chosen = random.Random(f"probe {cfg.seed}")
        data = chosen.sample(run.problems, min(options.problems, len(run.problems)))
        cache: dict[Any, Any] = {}
        rows = [make_row(run, *pair, data, options, cache) for pair in settings]
        numbers = measure(rows, data, options.samples)
        if options.out:
            numbers |= {"seconds": time.perf_counter() - began}
            files.write_json(pathlib.Path(options.out), numbers)
    return 0


if __name__ == "__main__":
    distributed.leave(main)
