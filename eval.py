"""avg@k of checkpoints, adapters and plain models on sets of problems, under the plain prompt.

    python eval.py runs/sgsd/checkpoints/step_000200
    torchrun --nproc_per_node 8 eval.py Qwen/Qwen3-1.7B runs/sgsd
    python eval.py Qwen/Qwen3-1.7B --data gsm8k my.jsonl --skills bank.json
    python eval.py Qwen/Qwen3-1.7B runs/sgsd --server http://localhost:8000/v1 --rows 256

The second evaluates a base model and all checkpoints of a run, the third the baseline Base+Skill,
with the bank's nearest entries in each prompt. The last samples on an inference server, such as
vLLM's (docs/engines.md), which loads and unloads the checkpoints. Each model gets a line per set;
the last line is the command that compares what was evaluated, now or earlier (extras/compare.py).

Nothing is written into a model's directory. The results of a checkpoint are in the folder
RUN/eval/step_000200, those of any other model in eval/NAME of the first run among the PATHs, or
else of the working directory; with --skills the folder's name ends with --skills. It holds
settings.json, samples.jsonl and results.json ({set: figures}, which each call adds its sets to).
The same command continues a killed one: a sample is a function of (seed, problem, its number).

Dimension key: P problems, K samples per problem.
"""

import contextlib
import functools
import hashlib
import math
import os
import pathlib
import shlex
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

import distributed
import rollout
import skills
from distributed import World
from lib import config, files, model, problems, served, verify
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

Key = tuple[str, str, int]  # names a sample: its set, its problem's id, its number
Tasks = dict[Key, Problem]  # the samples asked for


@dataclass
class Policy:
    """A model to evaluate."""

    path: str  # a directory or hub id
    base: str  # the model under an adapter; "" for a plain model
    name: str  # in what is printed
    folder: pathlib.Path  # of settings.json, samples.jsonl, results.json
    settings: dict = field(default_factory=dict)  # all that its samples depend on


@dataclass
class Evaluation:
    """All that an evaluation has read and checked before its first sample."""

    cfg: EvalConfig
    policies: list[Policy]
    tasks: Tasks
    prompt: Callable[[Problem], str]
    verifier: verify.Judge
    server: served.Server | None = None  # samples in the place of `generate`


def checkpoints_of(path: str) -> list[pathlib.Path]:
    """The checkpoints of a run in order; or else the model, adapter or hub id itself."""
    place = pathlib.Path(path)
    if place.is_file():
        fix = "give a model, an adapter or a run; a bank goes with --skills, problems with --data"
        raise ValueError(f"{path}: is a file; {fix}")
    if not place.is_dir():
        return [place]
    place = place.resolve()
    steps = [*files.by_step(place / "checkpoints").values()]
    names = sorted(file.name for file in place.iterdir())
    if not steps and not {"config.json", "adapter_config.json"} & {*names}:
        has = f"it has {', '.join(names[:5]) or 'no files'}"
        raise ValueError(f"{path}: {has}; a model, an adapter or a run with checkpoints is needed")
    if not steps and "problems.json" in names:
        raise ValueError(f"{path}: a run without a checkpoint")
    return steps or [place]


def run_of(place: pathlib.Path) -> pathlib.Path | None:
    """The run that a checkpoint belongs to; None for all else."""
    is_checkpoint = place.parent.name == "checkpoints" and place.name.startswith("step_")
    return place.parent.parent if is_checkpoint else None


def find_policies(cfg: EvalConfig) -> list[Policy]:
    """The policies that the PATHs name, in order."""
    places: list[pathlib.Path] = []
    for path in cfg.paths:
        places += checkpoints_of(path)
    runs = [run for run in map(run_of, places) if run]
    home = pathlib.Path(cfg.out or (runs[0] / "eval" if runs else "eval")).resolve()
    for parent in (home, *home.parents):
        if (cfg.out or not runs) and [*parent.glob("*.safetensors")]:
            raise ValueError(f"{home}: lies in a model's directory, {parent}; give another --out")
    policies: dict[pathlib.Path, Policy] = {}
    for place in places:
        run, name = run_of(place), "/".join(place.parts[-2:])
        folder = home / name.replace("/", "--").strip("-")
        if run:
            name = f"{run.name}/{place.name}"
            folder = home / f"{run.name}--{place.name}" if cfg.out else run / "eval" / place.name
        if cfg.skills:
            name, folder = f"{name} + skills", folder.with_name(f"{folder.name}--skills")
        policy = Policy(str(place), model.base_of(place, cfg.model), name, folder)
        first = policies.setdefault(folder, policy)
        if first.path != policy.path:
            both = f"{first.path} and {policy.path} would both write to {folder}"
            raise ValueError(f"{both}; rename one")
    return list(policies.values())


def settings_of(policy: Policy, cfg: EvalConfig, world: World) -> dict:
    """All that samples depend on besides problems. Files count by their content and may move.

    ValueError, naming what differs, where the policy's folder has samples of other settings.
    """
    settings: dict[str, Any] = {"the policy's weights": contents(policy.path)}
    settings["the base's weights"] = policy.base and contents(policy.base)
    settings |= {"device": world.device.type, "dtype": cfg.dtype, "attn": cfg.attn}
    settings["engine"] = "generate"  # S27
    if cfg.server:
        settings |= dict.fromkeys(("engine", "device", "dtype", "attn"), "a server's")
    settings |= {"thinking": cfg.thinking, "seed": cfg.seed, **asdict(sampling_of(cfg))}
    settings["verify_timeout"] = cfg.verify_timeout  # a verdict that took longer is "wrong"
    settings["verifier"] = cfg.verifier
    if cfg.verifier != EvalConfig.verifier:  # a class of the user's own
        settings["verifier"] += f" ({files.file_digest(verify.file_of(cfg.verifier))})"
    settings["prompts"] = files.digest([skills.template("student")])
    if cfg.skills:
        templates = [skills.template(name) for name in ("teacher", "skill", "mistake")]
        settings["the skills' prompts"] = files.digest(templates)
        settings["the bank's text"] = files.file_digest(cfg.skills)
        settings["the encoder's weights"] = contents(cfg.encoder)
        settings["num_skills"] = cfg.num_skills
    file = policy.folder / "settings.json"
    old = files.read_json(file) if file.exists() else settings
    changed = [name for name in {**old, **settings} if old.get(name) != settings.get(name)]
    if changed and any(files.read_jsonl(policy.folder / "samples.jsonl")):
        rule = f"its samples were made with another value of {', '.join(changed)}"
        raise ValueError(f"{policy.folder}: {rule}; give another --out")
    return settings


def sampling_of(cfg: EvalConfig) -> rollout.Sampling:
    return rollout.Sampling(cfg.temperature, cfg.top_p, cfg.top_k, cfg.max_new_tokens)


@functools.cache
def contents(path: str) -> str:
    """A digest of the weights in a directory; a hub id as it is."""
    digests = []
    for file in sorted(pathlib.Path(path).glob("*")):
        if file.suffix in (".safetensors", ".bin") and file.stem != "trainer":
            with open(file, "rb") as f:
                digests.append(hashlib.file_digest(f, "blake2b").hexdigest())
    return files.digest(digests) if digests else path


# ------------------------------------------------------------------------- before the first sample


def prepare(cfg: EvalConfig, world: World, held: contextlib.ExitStack) -> Evaluation:
    """Read and check everything that a user's mistake can break. No collective.

    held: takes the locks of the folders, on rank 0, and the verifier.
    """
    policies = find_policies(cfg)
    tasks: Tasks = {}
    columns = problems.Fields(cfg.problem_field, cfg.answer_field, cfg.answer_after)
    for source in cfg.data:
        data = problems.load_set(source, cfg.split, columns)[: cfg.limit or None]
        if cfg.verifier == EvalConfig.verifier:
            problems.refuse_unanswerable(data, f"--data {source}")
        for problem in data:
            for number in range(cfg.samples):
                tasks[pathlib.Path(source).stem, problem.id, number] = problem
    for policy in policies:
        policy.settings = settings_of(policy, cfg, world)
    verifier = held.enter_context(verify.load_judge(cfg.verifier)(cfg.verify_timeout))
    verifier.same("1/2", "2/4")  # a verifier that does not start shows now
    evaluation = Evaluation(cfg, policies, tasks, prompt_maker(cfg, world), verifier)
    if cfg.server:
        evaluation.server = server_for(evaluation, world)
    for policy in policies if world.main else []:
        held.enter_context(files.locked(policy.folder))
    return evaluation


def plain_prompt(x: Problem) -> str:
    return skills.render_student(x.problem)


def prompt_maker(cfg: EvalConfig, world: World) -> Callable[[Problem], str]:
    """problem -> prompt: the plain one, or with --skills that of Base+Skill (Tab. 12, S14)."""
    if not cfg.skills:
        return plain_prompt
    bank = skills.SkillBank.load(cfg.skills)
    most = min(len(bank.general_skills), len(bank.common_mistakes))
    if not 1 <= cfg.num_skills <= most:
        rule = f"must be in 1..{most}, the length of the bank's shorter list"
        raise ValueError(f"--num-skills {cfg.num_skills}: {rule} (--skills {cfg.skills})")
    embed = model.load_encoder(cfg.encoder, str(world.device))

    @functools.cache  # all samples of a problem have one
    def prompt(x: Problem) -> str:
        return skills.render_skills(bank.retrieve(x.problem, cfg.num_skills, embed), x.problem)

    return prompt


def server_for(evaluation: Evaluation, world: World) -> served.Server:
    """This rank's server, which must have the one base model of all policies."""
    cfg = evaluation.cfg
    bases = sorted(
        {served.whole_name(policy.base or policy.path) for policy in evaluation.policies}
    )
    if len(bases) > 1:
        raise ValueError(f"--server: serves one base model, got {', '.join(bases)}")
    server = served.Server(cfg.server[world.rank % len(cfg.server)], bases[0], rows=cfg.rows)
    server.check()
    return server


# ------------------------------------------------------------------------------------- the samples


def samples_of(policy: Policy, tasks: Tasks) -> dict[Key, dict]:
    """The rows of a policy's samples.jsonl that are asked for."""
    done = {}
    for row in files.read_jsonl(policy.folder / "samples.jsonl"):
        key = (row["set"], row["id"], row["sample"])
        problem = tasks.get(key)  # one that has changed is sampled anew
        if problem and row["digest"] == digest_of(problem, policy):
            done[key] = row
    return done


def digest_of(x: Problem, policy: Policy) -> str:
    """A digest of all of a problem that a prompt or the verdict may depend on."""
    is_default = policy.settings["verifier"] == EvalConfig.verifier
    return files.digest(x.problem, x.answer, [] if is_default else sorted(x.extra.items()))


def sample(policy: Policy, evaluation: Evaluation, world: World) -> dict[Key, dict]:
    """The samples asked for, as rows of samples.jsonl: those that are there, and the missing ones.

    Rank 0 returns them all; another rank those that are new.
    """
    cfg, tasks, server = evaluation.cfg, evaluation.tasks, evaluation.server
    log = policy.folder / "samples.jsonl"
    with reading(cfg, world):
        done = samples_of(policy, tasks) if world.main else {}
    missing = [key for key in tasks if key not in done]
    missing = distributed.gather(missing, world)[0]  # rank 0 alone knows its log
    with contextlib.ExitStack() as loaded:
        if missing:  # before anything is written: it may not load
            with reading(cfg, world):
                lm, tokenizer, stream = load_policy(policy, evaluation, world, loaded)
        if world.main:
            files.write_json(policy.folder / "settings.json", policy.settings)
        if not missing:
            return done
        stops = rollout.stop_ids(lm, tokenizer)
        thinking = "bare" if cfg.thinking else "closed"  # S3
        jobs = []
        for i, key in enumerate(missing):
            x, (_, _, number) = tasks[key], key
            ids = rollout.chat_ids(tokenizer, evaluation.prompt(x), thinking=thinking)
            draw = rollout.sample_key(cfg.seed, 0, x.problem, number)
            jobs.append(Job(i, ids, draw, cfg.max_new_tokens, x))
        longest = max(len(job.prompt) for job in jobs)
        with reading(cfg, world):
            model.refuse_beyond_context(lm, longest, cfg.max_new_tokens, "--max-new-tokens")
        engine = server.engine if server else "generate"

        def work(jobs_of_rank: list[Job]) -> Iterator[list[tuple[Job, Rollout]]]:
            turns = stream(jobs_of_rank, sampling_of(cfg), cfg.rows)
            return rollout.rollouts(tokenizer, stops, evaluation.verifier, turns)

        for judged in distributed.share_jobs(world, jobs, work, policy.name):
            rows = []
            for job, roll in judged:
                key = missing[job.index]
                rows.append(row_of(key, digest_of(tasks[key], policy), roll, engine))
                done[key] = rows[-1]
            if world.main and rows:
                files.append_jsonl(log, rows)
    return done


def load_policy(
    policy: Policy, evaluation: Evaluation, world: World, loaded: contextlib.ExitStack
) -> tuple[Any, Any, Callable[..., Any]]:
    """The model, its tokenizer, and what decodes, as `rollout.stream`. An outline with a server.

    loaded: unloads a server's adapter in the end.
    """
    cfg, server = evaluation.cfg, evaluation.server
    base = policy.base or policy.path
    if server:
        lm, tokenizer = model.load_outline(base)
        name = ""
        if policy.base:  # under a new name, by which an engine's cache goes
            place = pathlib.Path(policy.path)
            name = f"{place.name}-{uuid.uuid4().hex[:12]}"
            server.load(name, str(place.resolve()))
            loaded.callback(server.unload, name)
        server.tokenizer, server.stops = tokenizer, rollout.stop_ids(lm, tokenizer)
        return lm, tokenizer, functools.partial(server.stream, adapter=name)
    lm, tokenizer = model.load_model(base, world.device, dtype=cfg.dtype, attn=cfg.attn)
    if policy.base:
        lm = model.load_adapter(lm, policy.path)
    return lm, tokenizer, functools.partial(rollout.stream, lm, tokenizer)


def row_of(key: Key, problem_digest: str, roll: Rollout, engine: str) -> dict:
    """A line of samples.jsonl."""
    row = {"set": key[0], "id": key[1], "sample": key[2], "digest": problem_digest}
    row |= {"gold": roll.gold, "pred": roll.pred, "r": roll.r, "truncated": roll.truncated}
    return row | {"tokens": len(roll.completion_ids), "text": roll.text, "engine": engine}


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


def line_of(policy: Policy, name: str, row: dict[str, Any], cfg: EvalConfig) -> str:
    """What is printed of a policy on one set. row: its figures."""
    interval = "no interval"  # fewer than ten problems, or equal scores
    if row["avg_low"] is not None:
        interval = "95%: {avg_low:.1%} to {avg_high:.1%}".format(**row)
    k = cfg.samples
    line = f"{policy.name}, {name}: avg@{k} {row['avg']:.1%} ({interval}), pass@{k} "
    line += f"{row['pass']:.1%}, maj@{k} {row['maj']:.1%}, boxed {row['boxed']:.1%}, "
    line += f"cut {row['truncated']:.1%}, {row['tokens']:.0f} tokens, {row['problems']} problems"
    if row["truncated"] > 0.5:
        fix = "raise it, or give --no-thinking" if cfg.thinking else "raise it"
        line += f"; most were cut at --max-new-tokens {cfg.max_new_tokens}: {fix}"
    return line


# ------------------------------------------------------------------------------------ the command


@contextlib.contextmanager
def reading(cfg: EvalConfig, world: World) -> Iterator[None]:
    """A block on every rank that reads what the user gave: a mistake in it is one line."""
    with (
        config.one_line_errors(cfg.program, reading=True),
        distributed.checked_on_all_ranks(world, *config.GIVEN),
    ):
        yield


def evaluate(cfg: EvalConfig, world: World) -> None:
    """Sample every policy on every set; write the results and print a line for each."""
    contents.cache_clear()  # of an earlier call
    with contextlib.ExitStack() as held:
        with reading(cfg, world):
            evaluation = prepare(cfg, world, held)
        held.enter_context(config.one_line_errors(cfg.program))
        for policy in evaluation.policies:
            done = sample(policy, evaluation, world)
            if world.main:
                write_results(policy, evaluation, done)
        if world.main:
            print_notes(evaluation)
            homes = dict.fromkeys(str(policy.folder.parent) for policy in evaluation.policies)
            shown = [min(home, os.path.relpath(home), key=len) for home in homes]
            print("compare:", shlex.join(["python", "-m", "extras.compare", *shown]))
        distributed.barrier(world)


def write_results(policy: Policy, evaluation: Evaluation, done: dict[Key, dict]) -> None:
    """Add a policy's figures to its results.json, and print them."""
    cfg, file = evaluation.cfg, policy.folder / "results.json"
    with config.one_line_errors(cfg.program, reading=True):
        table = files.read_json(file) if file.exists() else {}
    for source in cfg.data:
        name = pathlib.Path(source).stem
        rows = [done[key] for key in evaluation.tasks if key[0] == name]
        table[name] = figures(rows, cfg.samples, evaluation.verifier.same)
        print(line_of(policy, name, table[name], cfg), flush=True)
    files.write_json(file, table)


def print_notes(evaluation: Evaluation) -> None:
    """Say how many of the problems a run was trained on, and how many answers took too long."""
    asked = {problems.fingerprint(x.problem) for x in evaluation.tasks.values()}
    runs = {run_of(pathlib.Path(policy.path)) for policy in evaluation.policies} - {None}
    for run in sorted(map(str, runs)):
        file = pathlib.Path(run, "problems.json")
        seen = asked & {*files.read_json(file)} if file.exists() else set()
        if seen:
            print(f"{run} was trained on {len(seen)} of these {len(asked)} problems")
    if evaluation.verifier.timeouts:
        late = f"{evaluation.verifier.timeouts} answers"
        print(f"{late} took longer than --verify-timeout: wrong")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    config.end_at_signals()
    cfg = config.parse(argv, __doc__, EvalConfig)
    with config.one_line_errors(cfg.program, reading=True):
        # With a server this process computes nothing: CPU and gloo.
        world = distributed.init("cpu" if cfg.server else cfg.device)
    evaluate(cfg, world)
    return 0


if __name__ == "__main__":
    distributed.run_and_exit(main)
