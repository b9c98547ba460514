"""avg@k of checkpoints, adapters and plain models on sets of problems, under the plain prompt.

    python eval.py runs/sgsd/checkpoints/step_000200
    torchrun --nproc_per_node 8 eval.py Qwen/Qwen3-1.7B runs/sgsd
    python eval.py Qwen/Qwen3-1.7B --data gsm8k my.jsonl --skills bank.json
    python eval.py Qwen/Qwen3-1.7B runs/sgsd --server http://localhost:8000/v1 --rows 256

The second command evaluates a base model and all checkpoints of a run, the third the baseline
Base+Skill, with the bank's nearest entries in each prompt. The last samples on an inference server,
such as vLLM's (docs/engines.md), which loads and unloads the checkpoints. We print a line for each
model and set, and at the end the command that compares them (extras/compare.py).

If the command names no verifier or fields, we take over those of the checkpoints' run; named sets,
such as aime24, are mathematics. We take over nothing else, so give sets, thinking and sampling
yourself. At its end a training run prints a command for eval.py, with the flags for its own
thinking and sampling.

The results of a checkpoint are in RUN/eval/step_000200. Those of any other model are in eval/NAME,
in the first run among the PATHs or else in the working directory; with --skills the name ends with
--skills. The folder holds samples.jsonl and results.json ({set: figures}). Each sample has a digest
of all that it depends on: settings, weights, prompt, draws, reference answer. We draw the samples
whose digests are missing, and ignore rows with other digests. So the same command continues a
killed one, and an earlier command, given again, prints its figures at once. Each command replaces
the figures of its sets in results.json.

Dimension key: P problems, K samples per problem.
"""

import contextlib
import functools
import itertools
import math
import os
import pathlib
import shlex
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
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
# To copy the metrics, take everything from here to the next line of dashes, and the imports of
# math, np, Counter, Callable, Hashable, Sequence and Any.


def avg_at_k(correct_PK: np.ndarray) -> float:
    """Mean accuracy over problems and samples (§4.1 "avg@12"). correct_PK: bool [P, K]."""
    return float(np.mean(correct_PK))


def pass_at_k(correct_PK: np.ndarray, k: int) -> float:
    """Unbiased chance that one of k samples is right: mean of 1 - C(n-c, k) / C(n, k).

    A problem has n = K samples, of which c are right. ValueError on k outside 1..K.
    """
    n = correct_PK.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"pass_at_k: got k = {k}, must be in 1..{n}, the samples per problem")
    right_P = correct_PK.sum(1).tolist()
    return float(np.mean([1 - math.comb(n - c, k) / math.comb(n, k) for c in right_P]))


def maj_at_k(
    preds: Sequence[Sequence[Hashable | None]],
    right_PK: Sequence[Sequence[bool]],
    same: Callable[[Any, Any], bool],
) -> float:
    """Share of problems whose most frequent answer is right; at a tie the first one counts.

    preds: the answers [P][K], such as texts; None casts no vote. right_PK: their verdicts. Answers
    count together if `same` calls them equal, and both are right or both are wrong.
    """
    wins = 0
    for preds_K, right_K in zip(preds, right_PK, strict=True):
        votes: Counter[tuple[Hashable, bool]] = Counter()
        for pred, right in zip(preds_K, right_K, strict=True):
            if pred is None:
                continue
            if (pred, right) not in votes:
                for earlier, verdict in votes:
                    if verdict == right and same(earlier, pred):
                        pred = earlier
                        break
            votes[pred, right] += 1
        if votes:
            (_, is_right), _ = votes.most_common(1)[0]
            wins += is_right
    return wins / len(preds)


def bootstrap_interval(sets_P: Sequence[np.ndarray]) -> tuple[float | None, float | None]:
    """95% interval of a mean over problems, by percentile bootstrap.

    sets_P: per set its problems' scores, or the paired differences of two policies. For several
    sets we return the interval of the mean of their means. (None, None) if a set has fewer than ten
    problems, or if no set has two different scores: 40 problems that all score 0 would give 0 to 0.
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


# -------------------------------------------------------------------- policies and their places


@dataclass(frozen=True)
class Sample:
    """One of the samples that we compute results from: drawn before, or yet to be drawn."""

    row: dict[str, Any]  # of samples.jsonl: set, id, number and digest, known before the draw
    job: Job


@dataclass
class Policy:
    """A model to evaluate. `prepare` adds its results, settings and samples, on rank 0."""

    path: str  # a folder or hub id
    base: str  # the model under an adapter; a plain model is its own base
    folder: pathlib.Path  # holds samples.jsonl and results.json; the path as we print it
    results: dict[str, dict] = field(default_factory=dict)  # content of results.json
    settings: dict[str, Any] = field(default_factory=dict)  # that all its samples depend on
    samples: list[Sample] = field(default_factory=list)  # on all sets, drawn or not


def checkpoints_of(path: str) -> list[pathlib.Path]:
    """The checkpoints of a run in order; or else the model, adapter or hub id itself."""
    place = pathlib.Path(path)
    if not place.exists():
        return [place]
    place = place.resolve()
    steps = [*files.by_step(place / "checkpoints").values()]
    if steps:
        return steps
    is_run = (place / "problems.json").exists()  # whose config.json is no model's
    has_config = (place / "config.json").exists() or (place / "adapter_config.json").exists()
    if is_run or not has_config:
        raise ValueError(
            f"{path}: no model, adapter or checkpoint is there; give a model, an adapter or a "
            "run; a bank goes with --skills, problems with --data"
        )
    return [place]


def run_of(place: pathlib.Path) -> pathlib.Path | None:
    """The folder of a checkpoint's run; None for any other path."""
    is_checkpoint = place.parent.name == "checkpoints" and place.name.startswith("step_")
    return place.parent.parent if is_checkpoint else None


def base_of(place: pathlib.Path, base: str) -> str:
    """The model under an adapter: `base`, or if that is "" the base that the adapter names.

    A plain model is its own base. ValueError for a damaged checkpoint, and if the base is a path
    that is not there, such as one of another machine.
    """
    digests = {}  # of the files that an evaluation may read
    for name, digest in files.digests_of(place).items():
        if files.is_of_a_model(pathlib.Path(name)) and name not in files.OF_TRL:
            digests[name] = digest
    files.refuse_damaged(place, digests)
    if not (place / "adapter_config.json").exists():
        return str(place)
    base = base or model.lora_of(place)[0]
    if os.path.isabs(base) and not os.path.exists(base):
        raise ValueError(f"adapter {place}: its base {base} is not there; give it as --model")
    return base


def find_policies(cfg: EvalConfig) -> list[Policy]:
    """The policies that the PATHs name, in order, each with a folder of its own."""
    places = [*itertools.chain.from_iterable(map(checkpoints_of, cfg.paths))]
    runs = [run for run in map(run_of, places) if run]
    home = pathlib.Path(cfg.out or (runs[0] / "eval" if runs else "eval")).resolve()
    policies: dict[pathlib.Path, Policy] = {}
    for place in places:
        base = base_of(place, cfg.model)
        for used in (place, base):
            if home.is_relative_to(pathlib.Path(used).resolve()):
                raise ValueError(f"{home}: lies in the directory of a model; give another --out")
        folder = folder_of(place, home, cfg)
        first = policies.setdefault(folder, Policy(str(place), base, folder))
        if first.path != str(place):
            raise ValueError(f"{first.path} and {place} both write to {folder}; rename one")
    return list(policies.values())


def folder_of(place: pathlib.Path, home: pathlib.Path, cfg: EvalConfig) -> pathlib.Path:
    """The folder of a policy's samples and results, as we print it. home: --out, or its default."""
    run = run_of(place)
    if run and not cfg.out:
        folder = run / "eval" / place.name
    else:
        name = f"{run.name}/{place.name}" if run else "/".join(place.parts[-2:])
        folder = home / name.replace("/", "--")
    if cfg.skills:
        folder = folder.with_name(f"{folder.name}--skills")
    return pathlib.Path(os.path.relpath(folder))


# ------------------------------------------------- the problems, and the samples of each policy

MATHEMATICS = config.Common.verifier
Sets = dict[str, list[Problem]]  # by the set's name


def filled(cfg: EvalConfig, policies: list[Policy]) -> EvalConfig:
    """The settings, with verifier and fields where the command leaves them open.

    For files and hub ids we take those of the policies' runs, or without a run the defaults of
    training. Named sets are mathematics, and have their own fields (`problems.SETS`). If the
    command names another --answer-field than the run's, we do not take over the run's
    --answer-after. ValueError if runs differ, or if sets need two verifiers.
    """
    named = [source for source in cfg.data if source in problems.SETS]
    has_files = len(named) < len(cfg.data)  # named sets alone need nothing of a run
    settings_of_runs = []
    for run in dict.fromkeys(run_of(pathlib.Path(policy.path)) for policy in policies):
        if run and has_files and (run / "config.json").exists():
            manifest = files.read_json(run / "config.json", {"settings": dict})
            settings = manifest.get("settings", {})
            own_field = settings.get("answer_field", config.Common.answer_field)
            if cfg.answer_field not in ("", own_field):
                settings["answer_after"] = ""
            settings_of_runs.append(settings)
    reading = {}
    taken_over = {}
    for name in ("verifier", "problem_field", "answer_field", "answer_after"):
        if getattr(cfg, name):
            reading[name] = getattr(cfg, name)
            continue
        default = getattr(config.Common, name)
        values = {str(settings.get(name, default)) for settings in settings_of_runs} or {default}
        if len(values) > 1:
            rule = f"the runs trained with {', '.join(map(repr, sorted(values)))}"
            raise ValueError(f"{config.flag(name)}: {rule}; name one, or evaluate one by one")
        (reading[name],) = values
        taken_over[name] = reading[name]
    if named and taken_over.get("verifier", MATHEMATICS) != MATHEMATICS:
        rule = f"mathematics, and the run's verifier is {reading['verifier']}"
        raise ValueError(f"--data {' '.join(named)}: {rule}; give one --verifier, or two commands")
    words = config.flags_that_differ(taken_over, asdict(config.Common()))
    if settings_of_runs and words:
        print("as in training, files are read and judged with", *words)
    return replace(cfg, **reading)


def load_sets(cfg: EvalConfig) -> Sets:
    """The problems of each set, in order. Prints how many repeat another one of their set."""
    sets: Sets = {}
    for source in cfg.data:
        name = pathlib.Path(source).stem
        if name in sets:
            raise ValueError(f"--data {' '.join(cfg.data)}: two sets are {name}; rename a file")
        data = problems.load_set(
            source,
            cfg.split,
            problem_field=cfg.problem_field,
            answer_field=cfg.answer_field,
            answer_after=cfg.answer_after,
            boxed=cfg.verifier == MATHEMATICS,
        )
        data = data[: cfg.limit or None]
        sets[name] = data
        if repeats := len(data) - len({x.problem for x in data}):
            print(f"{source}: {repeats} of {len(data)} problems repeat another one")
    return sets


def prepare(
    policies: list[Policy],
    sets: Sets,
    digests: dict[str, str],
    cfg: EvalConfig,
    world: World,
    at_exit: contextlib.ExitStack,
) -> list[list[Sample]]:
    """Fill in each policy's settings, samples and results, and lock its folder.

    Returns the samples that each policy lacks. We look at all models here, but load no weights.
    digests: of the models' files, by path.
    at_exit: the exit stack that unlocks the folders at the end. ValueError for bad input.
    """
    bases = sorted({served.whole_name(policy.base) for policy in policies})
    if cfg.server and len(bases) > 1:
        raise ValueError(f"--server: serves one base model, got {', '.join(bases)}")
    print_trained(policies, sets)
    prompts = make_prompts(cfg, sets, world)
    shared = sample_settings(cfg, world)
    look = functools.cache(lambda base: look_at(base, cfg))
    for policy in policies:
        lm, tokenizer = look(policy.base)
        policy.settings = {
            **shared,
            "the policy's files": digests[policy.path],
            "the base's files": digests[policy.base],
        }
        policy.samples = samples_of(policy.settings, sets, prompts, tokenizer, cfg)
        longest = max((sample.job for sample in policy.samples), key=lambda job: len(job.prompt))
        if len(longest.prompt) >= rollout.context_limit(lm):
            raise ValueError(
                f"{policy.path}: {longest.x} fills the model's context; take it out of --data"
            )
    for policy in policies:
        at_exit.enter_context(files.locked(policy.folder))
        policy.results = results_of(policy.folder)
    return [missing_samples(policy) for policy in policies]


def look_at(base: str, cfg: EvalConfig) -> tuple[Any, Any]:
    """A model without its weights, and its tokenizer."""
    if cfg.server:
        return model.load_outline(base)
    return model.load_model(base, "meta", dtype=cfg.dtype, attn=cfg.attn)


def print_trained(policies: list[Policy], sets: Sets) -> None:
    """Print how many of the problems each run was trained on, if any."""
    fingerprints = set()
    for x in itertools.chain.from_iterable(sets.values()):
        fingerprints.add(problems.fingerprint(x.problem))
    for run in dict.fromkeys(run_of(pathlib.Path(policy.path)) for policy in policies):
        if not run or not (run / "problems.json").exists():
            continue
        if seen := fingerprints & {*files.read_json(run / "problems.json")}:
            print(
                f"{run} was trained on {len(seen)} of these {len(fingerprints)} problems, "
                "by their letters and digits"
            )


def make_prompts(cfg: EvalConfig, sets: Sets, world: World) -> dict[str, str]:
    """{problem: prompt}: the plain one, or with --skills that of Base+Skill (Tab. 12, S14)."""
    if cfg.skills:
        bank = skills.SkillBank.load(cfg.skills)
        if cfg.num_skills > min(bank.counts.values()):
            raise ValueError(
                f"--num-skills {cfg.num_skills}: --skills {cfg.skills} has {bank.sizes}; lower it"
            )
        embed = model.load_encoder(cfg.encoder, str(world.device))
    prompts = {}
    for x in itertools.chain.from_iterable(sets.values()):
        pairs = bank.retrieve(x.problem, cfg.num_skills, embed) if cfg.skills else []
        prompts[x.problem] = skills.render_skills(pairs, x.problem)
    return prompts


def sample_settings(cfg: EvalConfig, world: World) -> dict[str, Any]:
    """What samples depend on besides weights, prompt and problem. Of files we take digests.

    lib/verify.py is left out: after an edit of its rules evaluate into another --out.
    """
    # (Digests depend on the order. `cfg.device` is free: the loop leaves it out.)
    settings: dict[str, Any] = {"device": world.device.type}
    rules = cfg.rules()
    for name, value in asdict(cfg).items():
        if not rules[name].free:
            settings[name] = value
    if cfg.verifier != MATHEMATICS:  # a class of the user's own
        settings["verifier"] += f" ({files.file_digest(verify.file_of(cfg.verifier))})"
    if cfg.skills:  # a digest of the bank's content, in the place of its path
        settings["skills"] = files.digest(
            files.tree_digest(cfg.skills), cfg.num_skills, files.tree_digest(cfg.encoder)
        )
    return settings | {
        "the plain prompt": files.digest(skills.template("student")),
        "engine": "a server" if cfg.server else "generate",  # S27
    }


def samples_of(
    settings: dict[str, Any],
    sets: Sets,
    prompts: dict[str, str],
    tokenizer: Any,
    cfg: EvalConfig,
) -> list[Sample]:
    """All samples that we compute a policy's results from: set by set, k of each problem.

    A sample's digest covers all that it depends on: samples with the same digest are the same. The
    key has the problem's text, not its id, so a problem and its copies have the same samples.
    """
    thinking = "bare" if cfg.thinking else "closed"  # S3
    samples: list[Sample] = []
    for name, data in sets.items():
        for x in data:
            prompt = rollout.chat_ids(tokenizer, prompts[x.problem], thinking=thinking)
            for number in range(cfg.samples):
                key = rollout.sample_key(cfg.seed, 0, x.problem, number)
                digest = files.digest(settings, prompt, key, judged_by(x, cfg))
                row = {"set": name, "id": x.id, "sample": number, "digest": digest}
                job = Job(len(samples), prompt, key=key, x=x)
                samples.append(Sample(row, job))
    return samples


def judged_by(x: Problem, cfg: EvalConfig) -> list:
    """What a verdict reads of a problem. Only a verifier of the user's own may read `extra`."""
    extra = sorted(x.extra.items()) if cfg.verifier != MATHEMATICS else []
    return [x.problem, x.answer, extra]


def missing_samples(policy: Policy) -> list[Sample]:
    """The samples of a policy that its samples.jsonl lacks."""
    drawn = {row.get("digest") for row in files.read_jsonl(policy.folder / "samples.jsonl")}
    return [sample for sample in policy.samples if sample.row["digest"] not in drawn]


# ------------------------------------------------------------------------------------- the samples


def draw(
    policy: Policy, missing: list[Sample], verifier: verify.Judge, cfg: EvalConfig, world: World
) -> None:
    """Draw a policy's missing samples, on all ranks. Rank 0 appends them to samples.jsonl."""
    with contextlib.ExitStack() as at_exit:
        with command.one_line_errors(cfg.program, *command.GIVEN):
            lm, tokenizer, stream, engine = load_policy(policy, cfg, world, at_exit)
            stops = rollout.stop_ids(lm, tokenizer)
        distributed.barrier(world)  # until all ranks have loaded it
        sampling = rollout.Sampling(cfg.temperature, cfg.top_p, cfg.top_k, cfg.max_new_tokens)

        def work(jobs_of_rank: list[Job]) -> Iterator[list[tuple[Job, Rollout]]]:
            turns = stream(jobs_of_rank, sampling, cfg.rows)
            return rollout.rollouts(tokenizer, stops, verifier, turns)

        jobs = []
        row_of = {}
        for sample in missing:
            jobs.append(sample.job)
            row_of[sample.job.index] = sample.row
        for judged in distributed.share_jobs(world, jobs, work, str(policy.folder)):
            rows = []
            for job, roll in judged:
                outcome = {
                    "gold": roll.gold,
                    "pred": roll.pred,
                    "r": roll.r,
                    "truncated": roll.truncated,
                    "tokens": len(roll.completion_ids),
                    "text": roll.text,
                    "engine": engine,
                }
                rows.append(row_of[job.index] | outcome)
            if world.main and rows:
                files.append_jsonl(policy.folder / "samples.jsonl", rows)


def load_policy(
    policy: Policy, cfg: EvalConfig, world: World, at_exit: contextlib.ExitStack
) -> tuple[Any, Any, Callable[..., Any], str]:
    """The model, its tokenizer, a function stream(jobs, sampling, rows), and the engine's name.

    With a server the model is an outline. at_exit: the exit stack that unloads its adapter there.
    """
    is_adapter = policy.path != policy.base
    if cfg.server:
        lm, tokenizer = model.load_outline(policy.base)
        url = cfg.server[world.rank % len(cfg.server)]
        stops = rollout.stop_ids(lm, tokenizer)
        server = served.Server(url, policy.base, stops, rollout.context_limit(lm))
        server.check()
        name = at_exit.enter_context(server.adapter(policy.path)) if is_adapter else ""
        return lm, tokenizer, functools.partial(server.stream, adapter=name), server.engine
    lm, tokenizer = model.load_model(policy.base, world.device, dtype=cfg.dtype, attn=cfg.attn)
    if is_adapter:
        lm = model.load_adapter(lm, policy.path)
    return lm, tokenizer, functools.partial(rollout.stream, lm, tokenizer), "generate"


# ------------------------------------------------------------------------------------- the figures


def figures(
    ids: Sequence[str], rows: list[dict], k: int, same: Callable[[Any, Any], bool]
) -> dict[str, Any]:
    """The figures of one set. ids: of its problems. rows: of samples.jsonl, k each, in order.

    "right" has each problem's count of right samples, from which extras/compare.py compares
    policies. same: whether two answers to a problem are the same, such as `Judge.same`.
    """
    correct_PK = np.array([row["r"] > 0 for row in rows]).reshape(-1, k)
    low, high = bootstrap_interval([correct_PK.mean(1)])
    preds = []
    boxed = truncated = tokens = 0
    for row in rows:
        preds.append(row["pred"])
        boxed += row["pred"] is not None
        truncated += row["truncated"]
        tokens += row["tokens"]
    preds_PK = [preds[i : i + k] for i in range(0, len(rows), k)]
    return {
        "avg": avg_at_k(correct_PK),
        "avg_low": low,
        "avg_high": high,
        "pass": pass_at_k(correct_PK, k),
        "maj": maj_at_k(preds_PK, correct_PK.tolist(), same),
        "boxed": boxed / len(rows),
        "truncated": truncated / len(rows),
        "tokens": tokens / len(rows),
        "right": dict(zip(ids, correct_PK.sum(1).tolist(), strict=True)),
    }


def interval(row: dict[str, Any], name: str) -> str:
    """The interval of a figure in percent, or "none" where `bootstrap_interval` gave None.

    row: as in results.json.
    If the figure is 0 or 1, we use the rule of three instead: with n problems, the true rate is at
    most 3/n, or at least 1 - 3/n.
    """
    low = row[f"{name}_low"]
    high = row[f"{name}_high"]
    if row[name] in (0, 1):
        most = min(1.0, 3 / row["problems"])
        return f"at least {1 - most:.1%}" if row[name] else f"at most {most:.1%}"
    return "none" if low is None else f"{low:.1%} to {high:.1%}"


def results_of(folder: pathlib.Path) -> dict[str, dict]:
    """A folder's figures by set; {} if it has no results.json. ValueError for a damaged one."""
    file = folder / "results.json"
    table = files.read_json(file) if file.exists() else {}
    for row in table.values() if isinstance(table, dict) else [None]:
        if not isinstance(row, dict) or "right" not in row:
            raise ValueError(f"{file}: not the figures of sets; remove it and run eval.py again")
    return table


def line_of(policy: Policy, name: str, row: dict[str, Any], cfg: EvalConfig) -> str:
    """The line that we print for a policy on one set. row: as in results.json."""
    k = cfg.samples
    line = (
        f"{policy.folder}, {name}: avg@{k} {row['avg']:.1%} (95%: {interval(row, 'avg')}), "
        f"pass@{k} {row['pass']:.1%}, maj@{k} {row['maj']:.1%}, boxed {row['boxed']:.1%}, "
        f"cut {row['truncated']:.1%}, {row['tokens']:.0f} tokens, {row['problems']} problems"
    )
    if row["truncated"] > 0.5:
        line += f"; most were cut: raise --max-new-tokens {cfg.max_new_tokens}, if the model's "
        line += "context allows"
        if cfg.thinking:
            line += ", or --no-thinking"
    return line


# ------------------------------------------------------------------------------------ the command


def evaluate(cfg: EvalConfig, world: World) -> None:
    """Sample every policy on every set; write the results and print a line for each."""
    with contextlib.ExitStack() as at_exit:
        with command.one_line_errors(cfg.program, *command.GIVEN):
            # Rank 0 reads folders and data, and tells the others; each rank reads the models.
            policies = find_policies(cfg) if world.main else []
            cfg = filled(cfg, policies) if world.main else cfg
            policies, cfg = distributed.broadcast((policies, cfg), world)
            digests = digests_of_weights(policies)
            distributed.refuse_other_files(files.digest(digests), world)
            verifier = at_exit.enter_context(verify.load_judge(cfg.verifier)(cfg.verify_timeout))
            sets = load_sets(cfg) if world.main else {}
            missing = prepare(policies, sets, digests, cfg, world, at_exit) if world.main else None
            # `prepare` has filled in rank 0's policies; other ranks need only the missing samples.
            missing = distributed.broadcast(missing, world)
        at_exit.enter_context(command.one_line_errors(cfg.program, *command.LATER))
        for policy, samples in zip(policies, missing):
            if samples:
                draw(policy, samples, verifier, cfg, world)
            if world.main:
                write_results(policy, sets, verifier, cfg)
        late = sum(distributed.all_gather(verifier.timeouts, world))
        if world.main:
            if late:
                print(f"{late} answers took longer than --verify-timeout: wrong")
            homes = dict.fromkeys(str(policy.folder.parent) for policy in policies)
            print("compare:", shlex.join(["python", "-m", "extras.compare", *homes]))
        distributed.barrier(world)


def digests_of_weights(policies: list[Policy]) -> dict[str, str]:
    """Digests of the files of all models, adapters and bases, by path."""
    digests: dict[str, str] = {}
    for policy in policies:
        for path in (policy.path, policy.base):
            if path not in digests:
                digests[path] = files.tree_digest(path)
    return digests


def write_results(policy: Policy, sets: Sets, verifier: verify.Judge, cfg: EvalConfig) -> None:
    """Put a policy's figures into its results.json, and print them."""
    drawn = {row.get("digest"): row for row in files.read_jsonl(policy.folder / "samples.jsonl")}
    for name, data in sets.items():
        rows = []
        for sample in policy.samples:
            if sample.row["set"] == name:
                rows.append(drawn[sample.row["digest"]])
        policy.results[name] = {
            # Of the problems, for extras/compare.py.
            "digest": files.digest([judged_by(x, cfg) for x in data]),
            "problems": len(data),
            "samples": len(rows),
            "settings": policy.settings,
            **figures([x.id for x in data], rows, cfg.samples, verifier.same),
        }
        print(line_of(policy, name, policy.results[name], cfg), flush=True)
    files.write_json(policy.folder / "results.json", policy.results)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    command.Signals().install()  # a signal ends the command at once
    cfg = command.parse(argv, __doc__, EvalConfig)
    with command.one_line_errors(cfg.program, *command.GIVEN):
        # With a server this process decodes nothing: the CPU and gloo are enough.
        world = distributed.init("cpu" if cfg.server else cfg.device)
    evaluate(cfg, world)
    return 0


if __name__ == "__main__":
    distributed.run_and_exit(main)
