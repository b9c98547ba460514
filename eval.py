"""avg@k of checkpoints, adapters and plain models on sets of problems, under the plain prompt.

    python eval.py runs/sgsd/checkpoints/step_000200
    torchrun --nproc_per_node 8 eval.py Qwen/Qwen3-1.7B runs/sgsd
    python eval.py Qwen/Qwen3-1.7B --data gsm8k my.jsonl --skills bank.json
    python eval.py Qwen/Qwen3-1.7B runs/sgsd --server http://localhost:8000/v1 --rows 256

The second evaluates a base model and all checkpoints of a run, the third the baseline Base+Skill,
with the bank's nearest entries in each prompt. The last samples on an inference server, such as
vLLM's (docs/engines.md), which loads and unloads the checkpoints. Each model has a folder and gets
a line per set; the last line is the command that compares them (extras/compare.py).

The folder of a checkpoint is RUN/eval/step_000200, that of any other model eval/NAME in the first
run among the PATHs, or else here; with --skills its name ends with --skills. It holds
settings.json, samples.jsonl and results.json ({set: figures}). A call replaces the figures of its
sets and keeps all samples, so an earlier command has its figures again at once. The same command
continues a killed one: a sample is a function of (seed, problem, its number).

Dimension key: P problems, K samples per problem.
"""

import contextlib
import functools
import math
import os
import pathlib
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

import distributed
import rollout
import skills
from distributed import World
from lib import command, config, files, model, problems, served, verify
from lib.config import EvalConfig
from lib.problems import Problem
from rollout import Job, Rollout

# --------------------------------------------------------------------------- the metrics
# They need NumPy alone: copy from here to the next rule.


def avg_at_k(correct_PK: np.ndarray) -> float:
    """Mean accuracy over problems and samples (§4.1 "avg@12"). correct_PK: bool [P, K]."""
    return float(_checked(correct_PK).mean())


def pass_at_k(correct_PK: np.ndarray, k: int) -> float:
    """Unbiased chance that one of k is right: mean of 1 - C(n-c, k) / C(n, k), c of n = K right.

    ValueError on k outside 1..K.
    """
    correct_PK = _checked(correct_PK)
    n = correct_PK.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"pass_at_k: got k = {k}, must be in 1..{n}, the samples per problem")
    right_P = correct_PK.sum(1).tolist()
    return float(np.mean([1 - math.comb(n - c, k) / math.comb(n, k) for c in right_P]))


def maj_at_k(
    preds: Sequence[Sequence[str | None]],
    golds: Sequence[str],
    verify: Callable[[str, str], bool],
) -> float:
    """Accuracy of each problem's most frequent answer; see `majority`.

    preds: the answers [P][K], None for no answer. verify(gold or answer, answer): are they equal?
    """
    if len(preds) != len(golds) or not golds:
        raise ValueError(f"maj_at_k: got {len(preds)} rows of answers for {len(golds)} golds")
    winners = [majority(row, verify) for row in preds]
    right = [pred is not None and verify(gold, pred) for gold, pred in zip(golds, winners)]
    return sum(right) / len(golds)


def majority(preds: Sequence[str | None], same: Callable[[str, str], bool]) -> str | None:
    """The most frequent answer, the first of several; None casts no vote, and wins without any.

    Answers that `same` calls equal count together.
    """
    votes: Counter[str] = Counter()
    for pred in preds:
        if pred is not None and pred not in votes:
            pred = next((earlier for earlier in votes if same(earlier, pred)), pred)
        if pred is not None:
            votes[pred] += 1
    return votes.most_common(1)[0][0] if votes else None


def bootstrap_interval(sets_P: Sequence[np.ndarray]) -> tuple[float | None, float | None]:
    """95% interval of a mean over problems, by percentile bootstrap.

    sets_P: per set its problems' scores, or the paired differences of two policies. Of several sets
    it is the interval of the mean of their means. (None, None) for a set of fewer than ten
    problems, or if all scores are equal: of 40 problems that all score 0 it would be 0 to 0.
    """
    enough = all(len(scores_P) >= 10 for scores_P in sets_P)
    if not enough or all(np.ptp(scores_P) < 1e-9 for scores_P in sets_P):  # equal up to rounding
        return None, None
    rng = np.random.default_rng(0)
    means = np.zeros(200_000)
    for scores_P in sets_P:
        values, counts = np.unique(scores_P, return_counts=True)
        drawn = rng.multinomial(len(scores_P), counts / len(scores_P), len(means))
        means += drawn @ values / len(scores_P) / len(sets_P)
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def _checked(correct_PK: np.ndarray) -> np.ndarray:
    correct_PK = np.asarray(correct_PK)
    if correct_PK.ndim != 2 or correct_PK.size == 0:
        raise ValueError(f"correct_PK must be [problems, samples], got shape {correct_PK.shape}")
    return correct_PK.astype(bool)


# -------------------------------------------------------------------- policies and their places


@dataclass
class Policy:
    """A model to evaluate."""

    path: str  # a directory or hub id
    base: str  # the model under an adapter; a plain model is its own
    folder: pathlib.Path  # of settings.json, samples.jsonl, results.json; as it is printed
    settings: dict[str, Any] = field(default_factory=dict)  # all that its samples depend on


def checkpoints_of(path: str) -> list[pathlib.Path]:
    """The checkpoints of a run in order; or else the model, adapter or hub id itself."""
    place = pathlib.Path(path)
    if not place.exists():
        return [place]
    place = place.resolve()
    steps = [*files.by_step(place / "checkpoints").values()]
    has_model = any((place / f"{kind}.json").exists() for kind in ("config", "adapter_config"))
    is_run = (place / "problems.json").exists()
    if not steps and (is_run or not has_model):
        fix = "give a model, an adapter or a run; a bank goes with --skills, problems with --data"
        raise ValueError(f"{path}: no model, adapter or checkpoint is there; {fix}")
    return steps or [place]


def run_of(place: pathlib.Path) -> pathlib.Path | None:
    """The run that a checkpoint belongs to; None for all else."""
    is_checkpoint = place.parent.name == "checkpoints" and place.name.startswith("step_")
    return place.parent.parent if is_checkpoint else None


def find_policies(cfg: EvalConfig) -> list[Policy]:
    """The policies that the PATHs name, in order, each with a folder of its own."""
    places: list[pathlib.Path] = []
    for path in cfg.paths:
        places += checkpoints_of(path)
    runs = [run for run in map(run_of, places) if run]
    home = pathlib.Path(cfg.out or (runs[0] / "eval" if runs else "eval")).resolve()
    policies: dict[pathlib.Path, Policy] = {}
    for place in places:
        run, base = run_of(place), model.base_of(place, cfg.model) or str(place)
        if any(home.is_relative_to(pathlib.Path(used).resolve()) for used in (place, base)):
            raise ValueError(f"{home}: lies in the directory of a model; give another --out")
        name = f"{run.name}/{place.name}" if run else "/".join(place.parts[-2:])
        folder = home / name.replace("/", "--")
        if run and not cfg.out:
            folder = run / "eval" / place.name
        if cfg.skills:
            folder = folder.with_name(f"{folder.name}--skills")
        folder = pathlib.Path(os.path.relpath(folder))
        first = policies.setdefault(folder, Policy(str(place), base, folder))
        if first.path != str(place):
            both = f"{first.path} and {place} would both write to {folder}"
            raise ValueError(f"{both}; rename one")
    return list(policies.values())


# Settings that no sample depends on; problems are known by their own digests.
BESIDE_SAMPLES = """
    paths model out data split limit samples rows server problem_field answer_field answer_after
""".split()


def settings_of(
    policy: Policy, cfg: EvalConfig, world: World, digests: dict[str, str]
) -> dict[str, Any]:
    """All that samples depend on besides problems. Files count by what they hold, and may move.

    digests: of the models' files, by path. ValueError, naming what differs, where the policy's
    folder has samples or results of other settings.
    """
    settings = {name: value for name, value in asdict(cfg).items() if name not in BESIDE_SAMPLES}
    settings["the policy's files"] = digests[policy.path]
    settings["the base's files"] = digests[policy.base]
    settings["engine"] = "a server" if cfg.server else "generate"  # S27
    settings["device"] = world.device.type
    if cfg.verifier != EvalConfig.verifier:  # a class of the user's own
        settings["verifier"] += f" ({files.file_digest(verify.file_of(cfg.verifier))})"
    settings["the plain prompt"] = files.digest(skills.template("student"))
    templates = [skills.template(name) for name in ("teacher", "skill", "mistake")]
    settings["the skills' prompts"] = cfg.skills and files.digest(templates)
    settings |= {name: files.contents(getattr(cfg, name)) for name in ("skills", "encoder")}
    file = policy.folder / "settings.json"
    old = files.read_json(file) if file.exists() else settings
    changed = [name for name in {**old, **settings} if old.get(name) != settings.get(name)]
    has_results = (policy.folder / "results.json").exists()
    if changed and (has_results or any(files.read_jsonl(policy.folder / "samples.jsonl"))):
        rule = f"its samples have another value of {', '.join(changed)}"
        raise ValueError(f"{policy.folder}: {rule}, or are of an older eval.py; give another --out")
    return settings


# ------------------------------------------------------------------------- before the first sample

KEY = ("set", "id", "sample", "digest")  # names a sample; the digest is of its problem
Tasks = dict[tuple, Problem]  # the samples asked for, by their keys


@dataclass
class Evaluation:
    """All that an evaluation has read and checked before its first sample."""

    cfg: EvalConfig
    policies: list[Policy]
    tasks: Tasks
    prompts: dict[str, str]  # by problem
    verifier: verify.Judge
    server: served.Server | None  # samples in the place of `generate`


def prepare(cfg: EvalConfig, world: World, held: contextlib.ExitStack) -> Evaluation:
    """Read and check everything that a user's mistake can break. No collective.

    held: takes the locks of the folders, on rank 0, and the verifier.
    """
    policies = find_policies(cfg)
    tasks = load_tasks(cfg)
    server = server_for(cfg, policies, world) if cfg.server else None
    read_policies(policies, bool(server))
    for policy in policies if world.main else []:
        held.enter_context(files.locked(policy.folder))
    models = {policy.path for policy in policies} | {policy.base for policy in policies}
    digests = {path: files.contents(path) for path in models}
    for policy in policies:
        policy.settings = settings_of(policy, cfg, world, digests)
    if world.main:
        print_other_bases(policies, digests)
    verifier = held.enter_context(verify.load_judge(cfg.verifier)(cfg.verify_timeout))
    prompts = make_prompts(cfg, tasks, world)
    return Evaluation(cfg, policies, tasks, prompts, verifier, server)


def read_policies(policies: list[Policy], has_server: bool) -> None:
    """ValueError for any policy that could not be loaded, before the first one is sampled.

    has_server: the base is the server's, and was asked for.
    """
    for policy in policies:
        if policy.path != policy.base:
            model.check_tensors("adapter", policy.path, model.ADAPTER_FILE)
    for base in {policy.base for policy in policies if not has_server}:
        model.check_model(base)


def print_other_bases(policies: list[Policy], digests: dict[str, str]) -> None:
    """Say which plain models are no base of the adapters beside them.

    digests: of the models' files, by path.
    """
    bases = {policy.base for policy in policies if policy.path != policy.base}
    held = {digests[base] for base in bases}
    for policy in policies:
        if bases and policy.path == policy.base and digests[policy.path] not in held:
            named = ", ".join(sorted(bases))
            print(f"{policy.path}: is not the base of the adapters, which is {named}")


def load_tasks(cfg: EvalConfig) -> Tasks:
    """The samples asked for, in order. A problem that has changed gets new ones."""
    is_ours = cfg.verifier == EvalConfig.verifier
    reading = {
        "problem_field": cfg.problem_field,
        "answer_field": cfg.answer_field,
        "answer_after": cfg.answer_after,
        "extract": verify.extract_answer if is_ours else None,
    }
    tasks = {}
    for source in cfg.data:
        data = problems.load_set(source, cfg.split, **reading)[: cfg.limit or None]
        for x in data:
            extra = [] if is_ours else sorted(x.extra.items())  # another verifier may read it
            digest = files.digest(x.problem, x.answer, extra)
            for number in range(cfg.samples):
                tasks[pathlib.Path(source).stem, x.id, number, digest] = x
    return tasks


def make_prompts(cfg: EvalConfig, tasks: Tasks, world: World) -> dict[str, str]:
    """{problem: prompt}: the plain one, or with --skills that of Base+Skill (Tab. 12, S14)."""
    asked = {x.problem for x in tasks.values()}
    if not cfg.skills:
        return {problem: skills.render_student(problem) for problem in asked}
    bank = skills.SkillBank.load(cfg.skills)
    most = min(len(bank.general_skills), len(bank.common_mistakes))
    if cfg.num_skills > most:
        rule = f"the shorter list of --skills {cfg.skills} has {most} entries; lower it"
        raise ValueError(f"--num-skills {cfg.num_skills}: {rule}")
    embed, prompts = model.load_encoder(cfg.encoder, str(world.device)), {}
    for problem in asked:
        pairs = bank.retrieve(problem, cfg.num_skills, embed)
        prompts[problem] = skills.render_skills(pairs, problem)
    return prompts


def server_for(cfg: EvalConfig, policies: list[Policy], world: World) -> served.Server:
    """This rank's server, which must have the one base model of all policies."""
    bases = sorted({served.whole_name(policy.base) for policy in policies})
    if len(bases) > 1:
        raise ValueError(f"--server: serves one base model, got {', '.join(bases)}")
    lm, tokenizer = model.load_outline(bases[0])
    url = cfg.server[world.rank % len(cfg.server)]
    server = served.Server(url, bases[0], rollout.stop_ids(lm, tokenizer))
    server.check()
    return server


# ------------------------------------------------------------------------------------- the samples


def sample(policy: Policy, evaluation: Evaluation, world: World) -> dict[tuple, dict]:
    """The samples asked for, as rows of samples.jsonl: those that are there, and the missing ones.

    Rank 0 returns them all; another rank those that are new.
    """
    cfg, tasks, server = evaluation.cfg, evaluation.tasks, evaluation.server
    log = policy.folder / "samples.jsonl"
    done = {}
    with command.one_line_errors(cfg.program, *command.GIVEN):
        for row in files.read_jsonl(log) if world.main else []:
            done[tuple(row[name] for name in KEY)] = row
    missing = distributed.broadcast([key for key in tasks if key not in done], world)
    if not missing:
        return done
    with contextlib.ExitStack() as loaded:
        with command.one_line_errors(cfg.program, *command.GIVEN):
            lm, tokenizer, stream = load_policy(policy, evaluation, loaded, world)
            stops = rollout.stop_ids(lm, tokenizer)
            jobs = []
            thinking = "bare" if cfg.thinking else "closed"  # S3
            for i, key in enumerate(missing):
                x, number = tasks[key], key[KEY.index("sample")]
                ids = rollout.chat_ids(tokenizer, evaluation.prompts[x.problem], thinking=thinking)
                draw = rollout.sample_key(cfg.seed, 0, x.problem, number)
                jobs.append(Job(i, ids, key=draw, left=cfg.max_new_tokens, problem=x))
            longest = max(len(job.prompt) for job in jobs)
            model.refuse_beyond_context(lm, longest, cfg.max_new_tokens, "--max-new-tokens")
        if world.main:
            files.write_json(policy.folder / "settings.json", policy.settings)
        sampling = rollout.Sampling(temperature=cfg.temperature, top_p=cfg.top_p, top_k=cfg.top_k)

        def work(jobs_of_rank: list[Job]) -> Iterator[list[tuple[Job, Rollout]]]:
            turns = stream(jobs_of_rank, sampling, cfg.rows)
            return rollout.rollouts(tokenizer, stops, evaluation.verifier, turns)

        for judged in distributed.share_jobs(world, jobs, work, str(policy.folder)):
            rows = []
            for job, roll in judged:
                key = missing[job.index]
                row = dict(zip(KEY, key)) | {"gold": roll.gold, "pred": roll.pred, "r": roll.r}
                row |= {"truncated": roll.truncated, "tokens": len(roll.completion_ids)}
                row |= {"text": roll.text, "engine": server.engine if server else "generate"}
                done[key] = row
                rows.append(row)
            if world.main and rows:
                files.append_jsonl(log, rows)
    return done


def load_policy(
    policy: Policy, evaluation: Evaluation, loaded: contextlib.ExitStack, world: World
) -> tuple[Any, Any, Callable[..., Any]]:
    """The model, its tokenizer, and what decodes, as `rollout.stream`. An outline with a server.

    loaded: unloads a server's adapter in the end.
    """
    cfg, server = evaluation.cfg, evaluation.server
    is_adapter = policy.path != policy.base
    if server:
        lm, tokenizer = model.load_outline(policy.base)
        name = ""
        if is_adapter:
            name = loaded.enter_context(server.adapter(policy.path))
        return lm, tokenizer, functools.partial(server.stream, adapter=name)
    lm, tokenizer = model.load_model(policy.base, world.device, dtype=cfg.dtype, attn=cfg.attn)
    if is_adapter:
        lm = model.load_adapter(lm, policy.path)
    return lm, tokenizer, functools.partial(rollout.stream, lm, tokenizer)


# ------------------------------------------------------------------------------------- the figures


def figures(rows: list[dict], k: int, same: Callable[[str, str], bool]) -> dict[str, Any]:
    """What results.json holds of one set. rows: its samples in order, k of each problem.

    "right" has each problem's count of right samples: extras/compare.py pairs policies by it. same:
    whether two answers to one problem are the same one, such as `Judge.same`.
    """
    correct_PK = np.array([row["r"] > 0 for row in rows]).reshape(-1, k)
    low, high = bootstrap_interval([correct_PK.mean(1)])
    won = [majority_is_right(rows[i : i + k], same) for i in range(0, len(rows), k)]
    return {
        "digest": files.digest([row["digest"] for row in rows[::k]]),  # of the problems
        "problems": len(won),
        "samples": len(rows),
        "avg": avg_at_k(correct_PK),
        "avg_low": low,
        "avg_high": high,
        "pass": pass_at_k(correct_PK, k),
        "maj": sum(won) / len(won),
        "boxed": sum(row["pred"] is not None for row in rows) / len(rows),
        "truncated": sum(row["truncated"] for row in rows) / len(rows),
        "tokens": sum(row["tokens"] for row in rows) / len(rows),
        "right": dict(zip([row["id"] for row in rows[::k]], correct_PK.sum(1).tolist())),
    }


def majority_is_right(rows: list[dict], same: Callable[[str, str], bool]) -> bool:
    """The verdict on the most frequent answer of one problem's samples.

    It is a sample's own verdict, which knew the problem. A right answer and a wrong one never count
    together: a formula that was copied from its problem is wrong, though it equals the reference.
    """
    right = {row["pred"]: row["r"] > 0 for row in rows}

    def same_and_alike(one: str, other: str) -> bool:
        return right[one] == right[other] and same(one, other)

    winner = majority([row["pred"] for row in rows], same_and_alike)
    return winner is not None and right[winner]


def interval(row: dict[str, Any], name: str, sign: str = "") -> str:
    """The interval of a figure in percent, "none" for a few problems or equal scores."""
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return "none" if low is None else f"{low:{sign}.1%} to {high:{sign}.1%}"


def line_of(policy: Policy, name: str, row: dict[str, Any], cfg: EvalConfig) -> str:
    """What is printed of a policy on one set. row: its figures."""
    k = cfg.samples
    line = f"{policy.folder}, {name}: avg@{k} {row['avg']:.1%} (95%: {interval(row, 'avg')}), "
    line += f"pass@{k} {row['pass']:.1%}, maj@{k} {row['maj']:.1%}, boxed {row['boxed']:.1%}, "
    line += f"cut {row['truncated']:.1%}, {row['tokens']:.0f} tokens, {row['problems']} problems"
    if row["truncated"] > 0.5:
        line += f"; most were cut: raise --max-new-tokens {cfg.max_new_tokens}, or --no-thinking"
    return line


# ------------------------------------------------------------------------------------ the command


def evaluate(cfg: EvalConfig, world: World) -> None:
    """Sample every policy on every set; write the results and print a line for each."""
    with contextlib.ExitStack() as held:
        with command.one_line_errors(cfg.program, *command.GIVEN):
            values = {config.flag(name): value for name, value in asdict(cfg).items()}
            commands = distributed.all_gather({**values, "--out": ""}, world)
            distributed.refuse_other_commands(commands)
            evaluation = prepare(cfg, world, held)
        held.enter_context(command.one_line_errors(cfg.program, *command.LATER))
        for policy in evaluation.policies:
            done = sample(policy, evaluation, world)
            if world.main:
                write_results(policy, evaluation, done)
        late = sum(distributed.all_gather(evaluation.verifier.timeouts, world))
        if world.main:
            print_notes(evaluation, late)
            homes = dict.fromkeys(str(policy.folder.parent) for policy in evaluation.policies)
            print("compare:", shlex.join(["python", "-m", "extras.compare", *homes]))
        distributed.barrier(world)


def write_results(policy: Policy, evaluation: Evaluation, done: dict[tuple, dict]) -> None:
    """Add a policy's figures to its results.json, and print them."""
    cfg, file = evaluation.cfg, policy.folder / "results.json"
    table = files.read_json(file) if file.exists() else {}
    by_set: dict[str, list[dict]] = {}
    for key in evaluation.tasks:
        by_set.setdefault(key[0], []).append(done[key])
    for name, rows in by_set.items():
        table[name] = figures(rows, cfg.samples, evaluation.verifier.same)
        print(line_of(policy, name, table[name], cfg), flush=True)
    files.write_json(file, table)


def print_notes(evaluation: Evaluation, late: int) -> None:
    """Say how many of the problems a run was trained on, and how many answers took too long."""
    asked = {problems.fingerprint(x.problem) for x in evaluation.tasks.values()}
    places = map(pathlib.Path, [policy.path for policy in evaluation.policies])
    for run in sorted({run_of(place) or place for place in places}):
        file = run / "problems.json"
        seen = asked & {*files.read_json(file)} if file.exists() else set()
        if seen:
            print(f"{run} was trained on {len(seen)} of these {len(asked)} problems")
    if late:
        print(f"{late} answers took longer than --verify-timeout: wrong")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    command.Signals()  # each ends at once
    cfg = command.parse(argv, __doc__, EvalConfig)
    with command.one_line_errors(cfg.program, *command.GIVEN):
        # With a server this process computes nothing: CPU and gloo.
        world = distributed.init("cpu" if cfg.server else cfg.device)
    evaluate(cfg, world)
    return 0


if __name__ == "__main__":
    distributed.run_and_exit(main)
