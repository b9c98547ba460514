"""avg@k of checkpoints, adapters and plain models on sets of problems, under the plain prompt.

    python eval.py runs/sgsd/checkpoints/step_000200
    torchrun --nproc_per_node 8 eval.py Qwen/Qwen3-1.7B runs/sgsd
    python eval.py Qwen/Qwen3-1.7B --data gsm8k my.jsonl --skills bank.json
    python eval.py Qwen/Qwen3-1.7B runs/sgsd --server http://localhost:8000/v1 --rows 256

The first takes the paper's three sets, the second compares all checkpoints of a run with the base
model, the third compares the baseline Base+Skill with Base. The last samples on an inference
server, such as vLLM's (docs/engines.md), which loads and unloads the checkpoints.

Nothing is written into a model's directory. The results of a checkpoint are in the folder
RUN/eval/step_000200, those of any other policy in eval/NAME of the first run among the PATHs, or
else of the working directory: settings.json, samples.jsonl and results.json ({set: figures}, which
each call adds its sets to). The call's comparison is in comparison.json beside the folders. The
same command continues a killed one: a sample is a function of (seed, problem, its number) alone.

Dimension key: P problems, K samples per problem.
"""

# ------------------------------------------------------------------------ the metrics: need numpy

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np


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


def bootstrap_interval(sets_P: Sequence[np.ndarray]) -> tuple[float, float]:
    """95% interval of a mean over problems, by percentile bootstrap.

    sets_P: per set its problems' scores, or the paired differences of two policies. Of several sets
    it is the interval of the mean of their means.
    """
    rng = np.random.default_rng(0)
    means = np.zeros(10_000)
    for scores_P in sets_P:
        values, counts = np.unique(scores_P, return_counts=True)
        drawn = rng.multinomial(len(scores_P), counts / len(scores_P), len(means))
        means += drawn @ values / len(scores_P) / len(sets_P)
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def has_spread(sets_P: Sequence[np.ndarray]) -> bool:
    """Whether a bootstrap over problems means anything: ten problems in a set, and not all equal.

    Of 40 problems that all score 0 it would give 0 to 0, as if nothing could be otherwise.
    """
    enough = all(len(scores_P) >= 10 for scores_P in sets_P)
    return enough and any(np.ptp(scores_P) > 1e-9 for scores_P in sets_P)  # more than rounding


def wilson_interval(p: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95% interval of a share p of n problems, which does not collapse at p = 0 or 1."""
    center = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, center - half), min(1.0, center + half)


def score_interval(sets_P: Sequence[np.ndarray]) -> dict[str, float | str]:
    """avg_low and avg_high of the mean of sets' mean scores, and the kind of the interval."""
    kind, (low, high) = "bootstrap", bootstrap_interval(sets_P)
    if not has_spread(sets_P):
        mean = float(np.mean([scores_P.mean() for scores_P in sets_P]))
        kind = "Wilson"
        low, high = wilson_interval(mean, sum(len(scores_P) for scores_P in sets_P))
    return {"avg_low": low, "avg_high": high, "interval": kind}


def _checked(correct_PK: np.ndarray) -> np.ndarray:
    correct_PK = np.asarray(correct_PK)
    if correct_PK.ndim != 2 or correct_PK.size == 0:
        raise ValueError(f"correct_PK must be [problems, samples], got shape {correct_PK.shape}")
    return correct_PK.astype(bool)


# ----------------------------------------------------------------------------- end of the metrics

import pathlib
from argparse import BooleanOptionalAction, Namespace

from lib import config
from lib.config import Config


def arguments(argv: Sequence[str] | None = None) -> Namespace:
    """The command line's settings; a mistake exits with code 2."""
    parser = config.Parser("python eval.py", "PATH [PATH ...] [--FLAG VALUE ...]", __doc__)
    add = parser.add_argument
    add("paths", nargs="+", metavar="PATH", help="model, adapter, run (its checkpoints) or hub id")
    sources = "aime24, aime25, hmmt25, math500, amc23, gsm8k, files or hub ids; "
    sources += "the stem of a path is the set's name"
    add("--data", nargs="+", default=["aime24", "aime25", "hmmt25"], help=sources)
    add("--split", default="test", help="split of a hub data set or a directory")
    add("--problem-field", default="problem", help="column or field that holds the problem")
    add("--answer-field", default="answer", help="column or field that holds the reference")
    mark = 'the answer is what follows this mark, as "####" in GSM8K'
    add("--answer-after", default="", help=mark)
    add("--model", default="", help="an adapter's base, if not the one that the adapter names")
    add("--out", default="", help="folder of all results, instead of eval/ in the run or else here")
    both = "evaluate Base+Skill with this bank (JSON), too, and the difference to the plain prompt"
    add("--skills", default="", help=f"{both}; §4.1, S14")
    add("--num-skills", type=int, default=8, help="pairs in a prompt of Base+Skill; Tab. 12")
    add("--encoder", default=Config.encoder, help="encoder of --skills; Tab. 12")
    add("--query-prompt", default="", help="text put in front of a problem to embed it; S10")
    add("--samples", type=int, default=12, help="k, the samples per problem; App. F.1")
    add("--temperature", type=float, default=1.0, help="sampling temperature; App. F.1")
    add("--top-p", type=float, default=0.95, help="top-p of the sampling; App. F.1")
    add("--top-k", type=int, default=0, help="top-k of the sampling; 0 turns it off; App. F.1")
    add("--max-new-tokens", type=int, default=38912, help="longest sample; App. F.1")
    add("--thinking", action=BooleanOptionalAction, default=True, help="thinking mode; S3")
    add("--limit", type=int, default=0, help="only the first N problems of each set; 0 is all")
    add("--rows", type=int, default=16, help="samples decoded at a time; lower it to save memory")
    add("--server", nargs="+", default=[], metavar="URL", help="sample on inference servers; S27")
    served = "the server's name for the base model, if not the name or path of PATH"
    add("--server-model", default="", metavar="NAME", help=served)
    add("--server-seeds", action="store_true", help="send a seed with each request; S27")
    add("--seed", type=int, default=0, help="seed of the samples")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="auto is CUDA if any")
    dtypes = ("auto", "float32", "bfloat16")
    add("--dtype", default="auto", choices=dtypes, help="of the weights; auto is bf16 on CUDA")
    kernels = ("sdpa", "flash_attention_2", "eager")
    add("--attn", default="sdpa", choices=kernels, help="attention kernels; S25")
    judge = "who says right or wrong, as MODULE:CLASS, a subclass of verify.Judge"
    add("--verifier", default=Config.verifier, help=f"{judge}; docs/changing.md")
    add("--prompts", default="", help="directory of templates that replace prompts/")
    add("--verify-timeout", type=float, default=5.0, help="seconds per answer")
    add("--verify-workers", type=int, default=1, help="processes that judge answers")
    args = parser.parse_args(argv)
    names = [pathlib.Path(source).stem for source in args.data]
    if len(set(names)) < len(names):
        parser.error(f"--data {' '.join(args.data)}: two sets have one name; rename a file")
    for name in ("samples", "rows", "verify_timeout", "verify_workers"):
        if not 0 < vars(args)[name] <= 1e6:
            value = f"{config.flag(name)} {vars(args)[name]}"
            parser.error(f"{value}: must be above 0 and at most 1,000,000")
    if args.limit < 0:
        parser.error(f"--limit {args.limit}: must be 0, for all problems, or above")
    with config.mistakes_as_one_line("eval", of_all_ranks=True):
        for place in args.paths:
            config.refuse_missing_path("PATH", place)
        for source in args.data:
            config.refuse_missing_path("--data", source)
        for name in ("model", "skills", "encoder", "prompts"):
            config.refuse_missing_path(config.flag(name), vars(args)[name])
    return args


if __name__ == "__main__":  # --help and a wrong flag are answered before torch is imported
    config.end_at_signals("Run the same command to continue: the samples are kept.")
    arguments()

import contextlib
import functools
import gc
import hashlib
import inspect
import shlex
import uuid
from dataclasses import asdict, dataclass, field
from typing import Any

import distributed
import rollout
import skills
from distributed import World
from lib import files, model, problems, verify
from lib.problems import Problem

Key = tuple[str, str, int]  # names a sample: its set, its problem's id, its number
Tasks = dict[Key, Problem]  # the samples asked for
BUILT_IN = "the paper's"


@dataclass
class Policy:
    """A model to evaluate, and the results."""

    path: str  # a directory or hub id
    base: str = ""  # the model under an adapter; "" for a plain model
    skilled: bool = False  # evaluated under the prompt of Base+Skill
    folder: pathlib.Path = pathlib.Path("eval")  # of settings.json, samples.jsonl, results.json
    settings: dict = field(default_factory=dict)  # all that its samples depend on
    scores: dict[str, np.ndarray] = field(default_factory=dict)  # {set: scores_P}
    table: dict[str, dict] = field(default_factory=dict)  # {set: figures}, for results.json

    @property
    def name(self) -> str:
        return f"{self.path} + skills" if self.skilled else self.path


@dataclass
class Evaluation:
    """All that an evaluation has read and checked before its first sample."""

    args: Namespace
    policies: list[Policy]
    home: pathlib.Path  # of comparison.json
    tasks: Tasks
    prompt_with_skills: Callable[[Problem], str]
    verifier: verify.Judge
    server: Any = None  # an `lib.served.Server` that samples in place of `generate`


# ------------------------------------------------------------------------ policies and their place


def checkpoints_of(path: str) -> list[pathlib.Path]:
    """The checkpoints of a run in order; or else the model, adapter or hub id itself."""
    place = pathlib.Path(path)
    if not place.is_dir():
        return [place]
    place = place.resolve()
    steps = sorted(place.glob("checkpoints/step_*"))
    names = sorted(file.name for file in place.iterdir())
    if not steps and not {"config.json", "adapter_config.json"} & {*names}:
        has = f"it has {', '.join(names[:5]) or 'no files'}"
        raise ValueError(f"{path}: {has}; a model, an adapter or a run with checkpoints is needed")
    if not steps and "rollouts.jsonl" in names:
        raise ValueError(f"{path}: a run without a checkpoint")
    return steps or [place]


def run_of(place: pathlib.Path) -> pathlib.Path | None:
    """The run that a checkpoint belongs to; None for all else."""
    is_checkpoint = place.parent.name == "checkpoints" and place.name.startswith("step_")
    return place.parent.parent if is_checkpoint else None


def find_policies(args: Namespace) -> tuple[list[Policy], pathlib.Path]:
    """The policies that the PATHs name, in order, and the folder of their comparison.

    With --skills, each PATH names two policies: without the skills and with them.
    """
    places: list[pathlib.Path] = []
    for path in args.paths:
        places += checkpoints_of(path)
    runs = [run for run in map(run_of, places) if run]
    home = pathlib.Path(args.out or (runs[0] / "eval" if runs else "eval")).resolve()
    for parent in (home, *home.parents):
        if (args.out or not runs) and [*parent.glob("*.safetensors")]:
            raise ValueError(f"{home}: lies in a model's directory, {parent}; give another --out")
    policies: dict[pathlib.Path, Policy] = {}
    for place in places:
        run, base = run_of(place), model.base_of(place, args.model)
        folder = home / "--".join(place.parts[-2:]).strip("/")
        if run:
            folder = home / f"{run.name}--{place.name}" if args.out else run / "eval" / place.name
        of_place = [Policy(str(place), base, False, folder)]
        if args.skills:
            skilled_folder = folder.with_name(f"{folder.name}--skills")
            of_place.append(Policy(str(place), base, True, skilled_folder))
        for policy in of_place:
            first = policies.setdefault(policy.folder, policy)
            if first.name != policy.name:
                both = f"{first.name} and {policy.name} would both write to {policy.folder}"
                raise ValueError(f"{both}; rename one")
    return list(policies.values()), home


def settings_of(policy: Policy, args: Namespace, world: World) -> dict:
    """All that samples depend on besides problems. Files count by their content and may move.

    ValueError, naming what differs, where the policy's folder has samples of other settings.
    """
    settings = {"the policy's weights": contents(policy.path)}
    settings["the base's weights"] = policy.base and contents(policy.base)
    settings |= {"device": world.device.type, "dtype": args.dtype, "attn": args.attn}
    settings["engine"] = "generate"  # S27
    if args.server:
        settings |= dict.fromkeys(("engine", "device", "dtype", "attn"), "a server's")
    settings |= {"thinking": args.thinking, "seed": args.seed, **asdict(sampling_of(args))}
    settings["verify_timeout"] = args.verify_timeout  # a verdict that took longer is "wrong"
    settings["verifier"] = verifier_version(args.verifier)
    settings["prompts"] = BUILT_IN
    if args.prompts:
        templates = ("student", "teacher") if policy.skilled else ("student",)
        settings["prompts"] = files.digest([skills.template(name) for name in templates])
    if policy.skilled:
        settings["the bank's text"] = files.file_digest(args.skills)
        settings["the encoder's weights"] = contents(args.encoder)
        settings |= {"num_skills": args.num_skills, "query_prompt": args.query_prompt}
    file = policy.folder / "settings.json"
    old = files.read_json(file) if file.exists() else settings
    changes = []
    for name in {**old, **settings}:
        if old.get(name) != settings.get(name):
            changes.append(f"{name} {old.get(name)}, now {settings.get(name)}")
    if changes and any(files.read_jsonl(policy.folder / "samples.jsonl")):
        raise ValueError(f"{file}: made with {'; '.join(changes)}; give another --out")
    return settings


def sampling_of(args: Namespace) -> rollout.Sampling:
    return rollout.Sampling(args.temperature, args.top_p, args.top_k, args.max_new_tokens)


def verifier_version(name: str) -> str:
    """--verifier, and for a class of the user's own a digest of the file that defines it."""
    if name == Config.verifier:
        return name
    file = inspect.getsourcefile(verify.load_judge(name))
    return f"{name} ({files.file_digest(file) if file else 'unknown'})"


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


def prepare(args: Namespace, world: World, held: contextlib.ExitStack) -> Evaluation:
    """Read and check everything that a user's mistake can break. No collective.

    held: takes the locks of the folders, on rank 0, and the verifier.
    """
    skills.use_prompts(args.prompts)
    policies, home = find_policies(args)
    tasks: Tasks = {}
    fields = problems.Fields(args.problem_field, args.answer_field, args.answer_after)
    for source in args.data:
        data = problems.load_set(source, args.split, fields)[: args.limit or None]
        if args.verifier == Config.verifier:
            problems.refuse_unanswerable(data, f"--data {source}")
        for problem in data:
            for number in range(args.samples):
                tasks[pathlib.Path(source).stem, problem.id, number] = problem
    for policy in policies:
        policy.settings = settings_of(policy, args, world)
    kind = verify.load_judge(args.verifier)
    verifier = held.enter_context(kind(args.verify_timeout, args.verify_workers))
    verifier.same("1/2", "2/4")  # a verifier that does not start shows now
    evaluation = Evaluation(args, policies, home, tasks, prompt_maker(args, world), verifier)
    if args.server:
        evaluation.server = server_for(evaluation, world)
    folders = [policy.folder for policy in policies]
    folders += [home] if len(policies) > 1 else []
    for folder in folders if world.main else []:
        held.enter_context(files.locked(folder))
    return evaluation


def plain_prompt(x: Problem) -> str:
    return skills.render_student(x.problem)


def prompt_maker(args: Namespace, world: World) -> Callable[[Problem], str]:
    """problem -> prompt: the plain one, or with --skills that of Base+Skill (Tab. 12, S14)."""
    if not args.skills:
        return plain_prompt
    bank = skills.SkillBank.load(args.skills)
    most = min(len(bank.general_skills), len(bank.common_mistakes))
    if not 1 <= args.num_skills <= most:
        rule = f"must be in 1..{most}, the length of the bank's shorter list"
        raise ValueError(f"--num-skills {args.num_skills}: {rule} (--skills {args.skills})")
    embed = model.load_encoder(args.encoder, str(world.device))

    def prompt(x: Problem) -> str:
        pairs = bank.retrieve(args.query_prompt + x.problem, args.num_skills, embed)
        return skills.render_skills(pairs, x.problem)

    return prompt


def whole_name(name: str) -> str:
    """A directory's whole path, so that two names of one model are equal; a hub id as it is."""
    path = pathlib.Path(name)
    return str(path.resolve()) if path.exists() else name


def server_for(evaluation: Evaluation, world: World) -> Any:
    """This rank's server, which must have the base model and context for every sample."""
    from lib import served

    args, policies = evaluation.args, evaluation.policies
    bases = sorted({whole_name(policy.base or policy.path) for policy in policies})
    if len(bases) > 1:
        raise ValueError(f"--server: serves one base model, got {', '.join(bases)}")
    url = args.server[world.rank % len(args.server)]
    server = served.Server(
        url, args.server_model or bases[0], seeds=args.server_seeds, rows=args.rows
    )
    _, tokenizer = model.load_outline(bases[0])
    longest = 0
    for policy in policies:
        prompt = evaluation.prompt_with_skills if policy.skilled else plain_prompt
        for text in {prompt(x) for x in evaluation.tasks.values()}:
            ids = rollout.chat_ids(tokenizer, text, thinking=args.thinking)
            longest = max(longest, len(ids))
    server.check(longest + args.max_new_tokens)
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
    is_default = policy.settings["verifier"] == Config.verifier
    return files.digest(x.problem, x.answer, [] if is_default else sorted(x.extra.items()))


def sample(policy: Policy, evaluation: Evaluation, world: World) -> dict[Key, dict]:
    """The samples asked for, as rows of samples.jsonl: those that are there, and the missing ones.

    Rank 0 returns them all; another rank those that are new.
    """
    args, tasks, server = evaluation.args, evaluation.tasks, evaluation.server
    log = policy.folder / "samples.jsonl"
    done = samples_of(policy, tasks) if world.main else {}
    missing = [key for key in tasks if key not in done]
    missing = distributed.gather(missing, world)[0]  # rank 0 alone knows its log
    with contextlib.ExitStack() as loaded:
        if missing:  # before anything is written: it may not load
            lm, tokenizer, stream = load_policy(policy, evaluation, world, loaded)
        if world.main:
            files.write_json(policy.folder / "settings.json", policy.settings)
        if not missing:
            return done
        stops = rollout.stop_ids(lm, tokenizer)
        prompt = evaluation.prompt_with_skills if policy.skilled else plain_prompt
        unsolved = [tasks[key] for key in missing]
        prompts, keys = [], []
        for (_, _, number), x in zip(missing, unsolved):
            prompts.append(rollout.chat_ids(tokenizer, prompt(x), thinking=args.thinking))
            keys.append(rollout.sample_key(args.seed, 0, x.problem, number))

        def finish(turn: list[tuple[int, list[int]]]) -> list[dict]:
            verifier = evaluation.verifier
            rolls = rollout.judge(tokenizer, stops, unsolved, prompts, turn, verifier)
            rows = []
            for (i, _), roll in zip(turn, rolls):
                row = row_of(missing[i], digest_of(unsolved[i], policy), roll)
                rows.append(row | {"engine": server.engine if server else "generate"})
            return rows

        asked_for = rollout.rows_of(prompts, keys, args.max_new_tokens)
        stage = pathlib.Path(policy.name).name
        for rows in distributed.share(world, asked_for, stream, finish, stage):
            done |= {(row["set"], row["id"], row["sample"]): row for row in rows}
            if world.main and rows:
                files.append_jsonl(log, rows)
    return done


def load_policy(
    policy: Policy, evaluation: Evaluation, world: World, loaded: contextlib.ExitStack
) -> tuple[Any, Any, Callable[[list], Any]]:
    """The model, its tokenizer, and what decodes: from rows to turns. An outline with a server.

    loaded: unloads a server's adapter in the end.
    """
    args, server = evaluation.args, evaluation.server
    base, sampling = policy.base or policy.path, sampling_of(args)
    if server:
        lm, tokenizer = model.load_outline(base)
        name = ""
        if policy.base:  # the weights name it: an engine's cache goes by the name
            place = pathlib.Path(policy.path)
            name = f"{place.name}-{contents(policy.path)}-{uuid.uuid4().hex[:8]}"
            server.load(name, str(place.resolve()))
            loaded.enter_context(contextlib.suppress(OSError, ValueError))  # of the unloading
            loaded.callback(server.unload, name)
        stops = rollout.stop_ids(lm, tokenizer)
        stream = functools.partial(server.stream, tokenizer, stops)
        return lm, tokenizer, functools.partial(stream, sampling=sampling, adapter=name)
    lm, tokenizer = model.load_model(base, world.device, dtype=args.dtype, attn=args.attn)
    if policy.base:
        lm = model.load_adapter(lm, policy.path, world.device)
    stream = functools.partial(rollout.stream, lm, tokenizer)
    return lm, tokenizer, functools.partial(stream, sampling=sampling, rows=args.rows)


def row_of(key: Key, problem_digest: str, roll: rollout.Rollout) -> dict:
    """A line of samples.jsonl."""
    row = {"set": key[0], "id": key[1], "sample": key[2], "digest": problem_digest}
    row |= {"gold": roll.gold, "pred": roll.pred, "r": roll.r, "truncated": roll.truncated}
    return row | {"tokens": len(roll.completion_ids), "text": roll.text}


# ------------------------------------------------------------------------- figures and comparisons


def measure(
    policy: Policy, name: str, rows: list[dict], k: int, same: Callable[[str, str], bool]
) -> None:
    """Put one set's figures and scores into the policy. rows: its samples in order, k a problem.

    same: whether two answers to one problem are the same one, such as `Judge.same`.
    """
    correct_PK = np.array([row["r"] > 0 for row in rows]).reshape(-1, k)
    policy.scores[name] = correct_PK.mean(1)
    won = [majority_is_right(rows[i : i + k], same) for i in range(0, len(rows), k)]
    policy.table[name] = {
        "digest": files.digest([row["digest"] for row in rows[::k]]),  # of the problems
        "problems": len(won),
        "samples": len(rows),
        "avg": avg_at_k(correct_PK),
        "pass": pass_at_k(correct_PK, k),
        "maj": sum(won) / len(won),
        "boxed": sum(row["pred"] is not None for row in rows) / len(rows),
        "truncated": sum(row["truncated"] for row in rows) / len(rows),
        "tokens": sum(row["tokens"] for row in rows) / len(rows),
        **score_interval([policy.scores[name]]),
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


def figures(policy: Policy, names: Sequence[str]) -> dict:
    """A policy's figures on a set, or on several the mean over them (Tab. 3 "Avg.").

    In the mean each set weighs the same; problems and samples are summed.
    """
    rows = [policy.table[name] for name in names]
    if len(rows) == 1:
        return rows[0]
    mean = {}
    for key in rows[0].keys() - {"digest", "avg_low", "avg_high", "interval"}:
        total = sum(row[key] for row in rows)
        mean[key] = total if key in ("problems", "samples") else total / len(rows)
    return mean | score_interval([policy.scores[name] for name in names])


def difference(ours: Policy, theirs: Policy, names: Sequence[str]) -> dict:
    """Our mean score minus theirs, paired by problem, with its interval; see `figures`.

    The interval is None where the gaps of problems have no spread, or there are too few of them.
    """
    gaps = [ours.scores[name] - theirs.scores[name] for name in names]
    low, high = bootstrap_interval(gaps) if has_spread(gaps) else (None, None)
    mean = float(np.mean([gap_P.mean() for gap_P in gaps]))
    return {"to": theirs.name, "diff": mean, "diff_low": low, "diff_high": high}


def compare(policies: Sequence[Policy], names: Sequence[str]) -> dict[str, dict]:
    """The figures on a set with differences to the first policy, and each run's best and last.

    Of several sets all is on the mean over them, by which §4.1's best checkpoint is picked (S23).
    """
    first, *others = policies
    results = {first.name: figures(first, names)}
    for policy in others:
        results[policy.name] = figures(policy, names) | difference(policy, first, names)
    runs: dict[str, list[Policy]] = {}
    for policy in policies:
        if policy.base:
            parent = str(pathlib.Path(policy.path).parent)
            runs.setdefault(parent + " + skills" * policy.skilled, []).append(policy)
    chosen = {}
    for run, checkpoints in runs.items():
        if len(checkpoints) > 1:
            best = max(checkpoints, key=lambda policy: results[policy.name]["avg"])
            last = max(checkpoints, key=lambda policy: policy.path)
            choice = {"checkpoints": len(checkpoints), "best": best.name, "last": last.name}
            choice["best_avg"] = results[best.name]["avg"]
            choice["last_avg"] = results[last.name]["avg"]
            chosen[run] = choice | difference(best, last, names)
    return {"results": results, "selections": chosen}


def print_table(sets: dict[str, dict], k: int) -> None:
    """Print the figures of all sets in Markdown, and which checkpoint was best on the last."""
    *_, last = sets.values()
    short = {}
    for name in last["results"]:
        path = pathlib.Path(name)
        is_plain = path.name.startswith("step_")  # of a base, "model" alone would say nothing
        short[name] = path.name if is_plain else "/".join(path.parts[-2:])
    if len(set(short.values())) < len(short):
        short = {name: name for name in short}
    measures = f"avg@{k} | 95% | - first | 95% | pass@{k} | maj@{k}"
    print(f"| policy | set | problems | {measures} | boxed | truncated | tokens |")
    print("|---" * 12 + "|")
    figures = "{problems} | {avg:.1%} | {avg_low:.1%}-{avg_high:.1%}{mark} | {gap} | {pass:.1%} | "
    figures += "{maj:.1%} | {boxed:.1%} | {truncated:.1%} | {tokens:.0f}"
    marked = ""
    for name, comparison in sets.items():
        for policy, row in comparison["results"].items():
            gap = _gap(row) if "diff" in row else " | "
            mark = "" if row["interval"] == "bootstrap" else "*"
            marked = marked or mark
            print(f"| {short[policy]} | {name} | {figures.format(**row, gap=gap, mark=mark)} |")
    if marked:
        why = "fewer than ten problems, or all scores equal: there the bootstrap says nothing"
        print(f"* Wilson's interval, and none of a difference: {why}")
    line = "of {checkpoints} checkpoints in {of}: best {best} {best_avg:.1%}, last {last} "
    line += "{last_avg:.1%}, best - last {gap}; the best was picked on these problems"
    for run, row in last["selections"].items():
        names = {"of": run, "best": short[row["best"]], "last": short[row["last"]]}
        print(line.format(**row | names, gap=_gap(row).replace(" | ", " (") + ")"))


def _gap(row: dict) -> str:
    """Two cells: a difference and its interval."""
    if row["diff_low"] is None:
        return "{diff:+.1%} | no interval".format(**row)
    return "{diff:+.1%} | {diff_low:+.1%} to {diff_high:+.1%}".format(**row)


# ------------------------------------------------------------------------------------ the command


def evaluate(args: Namespace, world: World) -> None:
    """Sample every policy on every set, print the table and write the results."""
    names = [pathlib.Path(source).stem for source in args.data]
    contents.cache_clear()  # of an earlier call
    with contextlib.ExitStack() as held:
        evaluation = distributed.together(lambda: prepare(args, world, held), world)
        policies, tasks, verifier = evaluation.policies, evaluation.tasks, evaluation.verifier
        for policy in policies:
            done = sample(policy, evaluation, world)
            if world.main:
                for name in names:
                    rows = [done[key] for key in tasks if key[0] == name]
                    measure(policy, name, rows, args.samples, verifier.same)
                results = policy.folder / "results.json"
                stored = files.read_json(results) if results.exists() else {}
                files.write_json(results, stored | policy.table)
        if world.main:
            sets = {name: compare(policies, [name]) for name in names}
            shown = dict(sets)
            if len(names) > 1:
                shown[f"mean of {', '.join(sorted(names))}"] = compare(policies, names)
            print_table(shown, args.samples)
            if len(policies) > 1:
                files.write_json(evaluation.home / "comparison.json", sets)
            if verifier.timeouts:
                print(f"{verifier.timeouts} answers took longer than --verify-timeout: wrong")
            print(f"written: {evaluation.home if len(policies) > 1 else policies[0].folder}")
        distributed.barrier(world)


def before_and_after(cfg: Config, world: World) -> None:
    """avg@k on --eval-data of the base model and the last checkpoint, once training is complete."""
    last = max(pathlib.Path(cfg.out, "checkpoints").glob("step_*"), default=None)
    if cfg.eval_data and last and int(last.name[5:]) == cfg.steps:
        gc.collect()  # the run's encoder is in a reference cycle
        flags = shlex.split(flags_of(cfg))
        args = arguments([cfg.model, str(last), "--data", cfg.eval_data, *flags])
        try:
            evaluate(args, world)
        except ValueError as e:  # such as samples that were made with other settings
            raise ValueError(f"the run is complete, but eval.py refuses: {e}") from None


def flags_of(cfg: Config) -> str:
    """The flags by which a run evaluates itself, for its samples to be used again."""
    rows = max(cfg.rollout_rows or 16, cfg.score_tokens // cfg.eval_tokens)
    domain = "" if cfg.verifier == Config.verifier else f" --verifier {cfg.verifier}"
    domain += f" --prompts {shlex.quote(cfg.prompts)}" if cfg.prompts else ""
    for name in ("problem_field", "answer_field", "answer_after"):
        value = getattr(cfg, name)
        if value != getattr(Config, name):
            domain += f" {config.flag(name)} {shlex.quote(value)}"
    domain += f" --server {shlex.join(cfg.server)}" if cfg.server else ""
    domain += f" --server-model {shlex.quote(cfg.server_model)}" if cfg.server_model else ""
    domain += " --server-seeds" if cfg.server_seeds else ""
    return (
        f"--max-new-tokens {cfg.eval_tokens} --samples {cfg.eval_samples} --rows {rows} "
        f"--seed {cfg.seed} --device {cfg.device} --dtype {cfg.dtype} --attn {cfg.attn} "
        f"--verify-timeout {cfg.verify_timeout} --verify-workers {cfg.verify_workers}{domain}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = arguments(argv)
    with config.mistakes_as_one_line("eval"):
        # With a server this process computes nothing: CPU and gloo.
        evaluate(args, distributed.init("cpu" if args.server else args.device))
    return 0


if __name__ == "__main__":
    distributed.leave(main)
