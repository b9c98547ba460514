"""avg@k of checkpoints, adapters and plain models on sets of problems, under the plain prompt.

    python eval.py runs/sgsd/checkpoints/step_000200
    torchrun --nproc_per_node 8 eval.py Qwen/Qwen3-1.7B runs/sgsd
    python eval.py Qwen/Qwen3-1.7B --data gsm8k my.jsonl --skills bank.json
    python eval.py Qwen/Qwen3-1.7B runs/sgsd --server http://localhost:8000/v1 --rows 256

The first takes the paper's three sets, the second compares all checkpoints of a run with the base
model, the third compares the baseline Base+Skill with Base. The last samples on a server, such as
vLLM's (docs/engines.md): base models by name, checkpoints loaded and unloaded while it runs.

Nothing is written into a model's directory. The results of a checkpoint are in the folder
RUN/eval/step_000200, those of any other policy in eval/NAME of the first run among the PATHs, or
else of the working directory: settings.json, samples.jsonl and results.json ({set: figures}). A
comparison is in comparison.json beside the folders. Each call adds its sets to both. The same
command continues a killed one: a sample is a function of (seed, problem, its number) alone.

Dimension key: P problems, K samples per problem.
"""

import pathlib
from argparse import ArgumentDefaultsHelpFormatter, BooleanOptionalAction, Namespace
from collections.abc import Callable, Sequence

import cli
import distributed
import files
import inputs
import problems
from cli import UserError
from config import Config
from distributed import World
from inputs import base_of, places_of, run_of


def arguments(argv: Sequence[str] | None = None) -> Namespace:
    """The command line's settings. Raises UserError on one that is out of its range."""
    parser = cli.Parser("eval.py", description="avg@k of models.", allow_abbrev=False)
    parser.formatter_class = ArgumentDefaultsHelpFormatter
    add = parser.add_argument
    add("paths", nargs="+", metavar="PATH", help="model, adapter, run (its checkpoints) or hub id")
    sets = list(problems.SETS)
    sources = f"{', '.join(sets)}, files or hub ids; a set's name is the stem of its path"
    add("--data", nargs="+", default=sets[:3], help=sources)
    add("--split", default="test", help="the split of a hub data set")
    add("--model", default="", help="an adapter's base, if not the one that the adapter names")
    add("--out", default="", help="a folder for it all, in place of eval/ in the run or else here")
    both = "besides the plain prompt, Base+Skill with this bank (JSON), and the difference"
    add("--skills", default="", help=f"{both}; samples that exist are used again; §4.1, S14")
    add("--num-skills", type=int, default=8, help="pairs in a prompt of Base+Skill; Tab. 12")
    add("--encoder", default=Config.encoder, help="the encoder of --skills; Tab. 12")
    add("--query-prompt", default="", help="text put in front of a problem to embed it; S10")
    add("--samples", type=int, default=12, help="k, the samples per problem; App. F.1")
    add("--temperature", type=float, default=1.0, help="of the sampling; App. F.1")
    add("--top-p", type=float, default=0.95, help="of the sampling; App. F.1")
    add("--top-k", type=int, default=0, help="0 turns it off; App. F.1")
    add("--max-new-tokens", type=int, default=38912, help="longest sample; App. F.1")
    add("--thinking", action=BooleanOptionalAction, default=True, help="thinking mode; S3")
    add("--limit", type=int, default=0, help="only the first N problems of each set; 0 is all")
    add("--rows", type=int, default=16, help="samples decoded at a time; lower it to save memory")
    server = "servers that share the work, such as http://localhost:8000/v1; --rows is for each"
    add("--server", nargs="+", default=[], metavar="URL", help=f"{server}; S27")
    there = "a PATH, or an adapter's base, that they have under this name"
    add("--served", nargs="+", default=[], metavar="NAME=PATH", help=there)
    add("--server-timeout", type=float, default=3600.0, help="seconds per sample of a server")
    add("--seed", type=int, default=0, help="of the samples")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="auto is CUDA if any")
    dtypes = ("auto", "float32", "bfloat16")
    add("--dtype", default="auto", choices=dtypes, help="of the weights; auto is bf16 on CUDA")
    kernels = ("sdpa", "flash_attention_2", "eager")
    add("--attn", default="sdpa", choices=kernels, help="attention kernels; S25")
    judge = "who says right or wrong, as MODULE:CLASS, a subclass of verify.Judge"
    add("--verifier", default=Config.verifier, help=f"{judge}; docs/changing.md")
    add("--prompts", default="", help="directory of templates in the place of prompts/")
    add("--verify-timeout", type=float, default=5.0, help="seconds per answer")
    add("--verify-workers", type=int, default=1, help="processes that judge answers")
    args = parser.parse_args(argv)
    names = [pathlib.Path(source).stem for source in args.data]
    if len(set(names)) < len(names):
        raise UserError(f"--data {' '.join(args.data)}: two sets have one name; rename a file")
    for flag in ("samples", "rows", "limit", "verify_timeout", "verify_workers", "server_timeout"):
        value, name = vars(args)[flag], flag.replace("_", "-")
        if not 0 <= value <= 1e6 or (value == 0 and flag != "limit"):
            raise UserError(f"--{name} {value}: must be above 0, at most 1e6; --limit may be 0")
    for pair in args.served:
        if not args.server or not all(pair.partition("=")):
            raise UserError(f"--served {pair}: NAME=PATH is wanted, and --server")
    return args


if __name__ == "__main__":  # --help and mistakes are answered before torch is imported
    cli.answer("eval", lambda: inputs.look_at_evaluation(arguments()))

import contextlib
import functools
import gc
import hashlib
import importlib.metadata
import math
import shlex
from collections import Counter
from dataclasses import asdict, dataclass, field

import numpy as np

import rollout
import served
import skills
from policy import Model, Tokenizer, chat_ids, load_model, load_outline
from verify import Judge, is_success

Verify = Callable[[str, str], bool]  # (gold or answer, answer) -> whether they are equal
Key = tuple[str, str, int]  # names a sample: its set, its problem's id, its number
Tasks = dict[Key, problems.Problem]  # the samples asked for
Prompt = Callable[[problems.Problem], str]
BUILT_IN = "the paper's"
NEAREST = skills.nearest


def avg_at_k(correct_PK: np.ndarray) -> float:
    """Mean accuracy over problems and samples (§4.1 "avg@12"). correct_PK: bool [P, K]."""
    return float(_checked(correct_PK).mean())


def pass_at_k(correct_PK: np.ndarray, k: int) -> float:
    """Unbiased chance that one of k is right: mean of 1 - C(n-c, k) / C(n, k), c of n = K right."""
    correct_PK = _checked(correct_PK)
    n = correct_PK.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"pass_at_k: got k = {k}, must be in 1..{n}, the samples per problem")
    right_P = correct_PK.sum(1).tolist()
    return float(np.mean([1 - math.comb(n - c, k) / math.comb(n, k) for c in right_P]))


def maj_at_k(preds: Sequence[Sequence[str | None]], golds: Sequence[str], verify: Verify) -> float:
    """Accuracy of each problem's most frequent answer; see `majority`."""
    if len(preds) != len(golds) or not golds:
        raise ValueError(f"maj_at_k: got {len(preds)} rows of answers for {len(golds)} golds")
    winners = [majority(row, verify) for row in preds]
    right = [pred is not None and verify(gold, pred) for gold, pred in zip(golds, winners)]
    return sum(right) / len(golds)


def majority(preds: Sequence[str | None], same: Verify) -> str | None:
    """The most frequent answer, the first of several; None is no vote, and the result without any.
    Answers that `same` calls equal count together."""
    votes: Counter[str] = Counter()
    for pred in preds:
        if pred is not None and pred not in votes:
            pred = next((earlier for earlier in votes if same(earlier, pred)), pred)
        if pred is not None:
            votes[pred] += 1
    return votes.most_common(1)[0][0] if votes else None


def bootstrap_interval(*sets_P: np.ndarray) -> tuple[float, float]:
    """95% interval of a mean over problems, by percentile bootstrap; of several sets, of the mean
    of their means. sets_P: per-problem scores, or two policies' paired differences."""
    rng = np.random.default_rng(0)
    means = np.zeros(10_000)
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


@dataclass
class Policy:
    """A model to evaluate, and what came out."""

    path: str  # a directory or hub id
    base: str = ""  # the model under an adapter; "" for a plain model
    skilled: bool = False  # evaluated under the prompt of Base+Skill
    folder: pathlib.Path = pathlib.Path("eval")  # of settings.json, samples.jsonl, results.json
    settings: dict = field(default_factory=dict)  # all that its samples depend on
    servers: served.Servers | None = None  # that sample it, in place of `generate`
    scores: dict[str, np.ndarray] = field(default_factory=dict)  # {set: scores_P}
    table: dict[str, dict] = field(default_factory=dict)  # {set: figures}, for results.json

    @property
    def name(self) -> str:
        return f"{self.path} + skills" if self.skilled else self.path


def find_policies(args: Namespace) -> tuple[list[Policy], pathlib.Path]:
    """What the PATHs stand for, in order, and where their comparison goes; see above.

    With --skills, each stands for two policies: without the skills and with them.
    """
    places: list[pathlib.Path] = []
    for path in args.paths:
        places += places_of(path)
    runs = [run for run in map(run_of, places) if run]
    home = pathlib.Path(args.out or (runs[0] / "eval" if runs else "eval")).resolve()
    for parent in (home, *home.parents):
        if (args.out or not runs) and [*parent.glob("*.safetensors")]:
            raise UserError(f"{home}: lies in a model's directory, {parent}; give another --out")
    policies: dict[pathlib.Path, Policy] = {}
    for place in places:
        run, base = run_of(place), base_of(place, args.model)
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
                raise UserError(f"{both}; rename one")
    return list(policies.values()), home


def load_policy(policy: Policy, args: Namespace, world: World) -> tuple[Model, Tokenizer]:
    """A plain model, or a PEFT adapter on its base, or its outline; and the tokenizer."""
    name = policy.base or policy.path
    if policy.servers:
        return load_outline(name)
    model, tokenizer = load_model(name, world.device, dtype=args.dtype, attn=args.attn)
    if not policy.base:
        return model, tokenizer
    inputs.check_adapter(pathlib.Path(policy.path), policy.base)
    from peft import PeftModel  # takes seconds to import, and only adapters need it

    try:
        place = str(world.device)  # else PEFT puts every rank's on the first GPU
        return PeftModel.from_pretrained(model, policy.path, torch_device=place).eval(), tokenizer
    except Exception as e:  # many kinds: other shapes, a torn file, a pickle
        why = f"does not fit {name} ({cli.brief(e)}); give its base as --model"
        raise UserError(f"{policy.path}: the adapter {why}") from None


def settings_of(policy: Policy, args: Namespace, world: World) -> dict:
    """All that samples depend on besides problems; files count by their content and may move.

    Raises UserError, naming what differs, where the policy's folder has samples of other settings.
    """
    settings = {"the policy's weights": contents(policy.path)}
    settings["the base's weights"] = policy.base and contents(policy.base)
    settings |= {"device": world.device.type, "dtype": args.dtype, "attn": args.attn}
    settings["engine"] = "generate"  # S27
    if args.server:
        settings |= dict.fromkeys(("engine", "device", "dtype", "attn"), "a server's")
    settings |= {"thinking": args.thinking, "seed": args.seed, **asdict(args.sampling)}
    settings["verify_timeout"] = args.verify_timeout  # a verdict that took longer is "wrong"
    settings["verifier"] = inputs.verifier_version(args.verifier)
    settings["prompts"] = BUILT_IN
    if args.prompts:
        templates = ("student", "teacher") if policy.skilled else ("student",)
        settings["prompts"] = files.digest(*map(skills.template, templates))
    if policy.skilled:
        settings["the bank's text"] = files.digest(pathlib.Path(args.skills).read_bytes())
        settings["the encoder's weights"] = contents(args.encoder)
        settings["num_skills"] = args.num_skills
        if args.query_prompt:  # without one, samples of before there was this flag are known again
            settings["query_prompt"] = args.query_prompt
        if skills.nearest is not NEAREST:  # a script of the user's own has replaced it
            code = getattr(skills.nearest, "__code__", None)
            settings["retrieval"] = files.file_digest(code and code.co_filename)
    file = policy.folder / "settings.json"
    old = settings
    if file.exists():
        once = {"engine": "generate", "verifier": Config.verifier, "prompts": BUILT_IN}
        old = once | files.read_json(file)  # there was no choice of these
    changes = []
    for name in {**old, **settings}:
        if old.get(name) != settings.get(name):
            changes.append(f"{name} {old.get(name)}, now {settings.get(name)}")
    if changes and any(files.read_jsonl(policy.folder / "samples.jsonl")):
        raise UserError(f"{file}: made with {'; '.join(changes)}; give another --out")
    return settings


@functools.cache
def contents(path: str) -> str:
    """A digest of the weights in a directory; a hub id as it is."""
    digests = []
    for file in sorted(pathlib.Path(path).glob("*")):
        if file.suffix in (".safetensors", ".bin") and file.stem != "trainer":
            with open(file, "rb") as f:
                digests.append(hashlib.file_digest(f, "blake2b").hexdigest())
    return files.digest(*digests) if digests else path


def plain_prompt(x: problems.Problem) -> str:
    return skills.render_student(x.problem)


def prompt_maker(args: Namespace, world: World) -> Prompt:
    """problem -> prompt: the plain one, or with --skills that of Base+Skill (Tab. 12, S14)."""
    if not args.skills:
        return plain_prompt
    inputs.check_skills(args.skills, args.num_skills)
    bank = skills.SkillBank.load(args.skills)
    retriever = skills.nearest(args.encoder, args.query_prompt, str(world.device))

    def prompt(x: problems.Problem) -> str:
        return skills.render_skills(retriever(bank, x, args.num_skills, 0), x.problem)

    return prompt


def servers_for(
    policies: Sequence[Policy], tasks: Tasks, with_skills: Prompt, args: Namespace, world: World
) -> None:
    """Give each policy its servers, which must be fit for all samples that are missing.

    UserError before the first sample, so that no mistake is found after the hours of another.
    """
    names, ranks, tokens = {}, [0], 0
    for pair in args.served:
        name, _, path = pair.partition("=")
        names[served.place(path)] = name
    for policy in policies:
        if policy.base and served.place(policy.path) not in names:
            file = pathlib.Path(policy.path) / "adapter_config.json"
            ranks.append(files.read_json(file).get("r", 0))
    by_base: dict[str, served.Servers] = {}
    unfinished = []
    for policy in policies:
        base = policy.base or policy.path
        of_base = served.Servers(args.server, base, max(ranks), names, args.server_timeout)
        policy.servers = by_base.setdefault(served.place(base), of_base)
        prompt = with_skills if policy.skilled else plain_prompt
        done = samples_of(policy, tasks)
        missing = {x.problem: x for key, x in tasks.items() if key not in done}
        if missing:
            unfinished.append((policy.servers, [policy.path] if policy.base else []))
            _, tokenizer = load_policy(policy, args, world)
            for x in missing.values():
                ids = chat_ids(tokenizer, prompt(x), thinking=args.thinking)
                tokens = max(tokens, len(ids) + args.max_new_tokens)
    for servers, adapters in unfinished:
        servers.check(tokens, adapters)


def samples_of(policy: Policy, tasks: Tasks) -> dict[Key, dict]:
    """The rows of a policy's samples.jsonl that are asked for."""
    done = {}
    for row in files.read_jsonl(policy.folder / "samples.jsonl"):
        key = (row["set"], row["id"], row["sample"])
        problem = tasks.get(key)  # one that has changed is sampled anew
        if problem and row["digest"] == digest_of(problem, policy):
            done[key] = row
    return done


def digest_of(x: problems.Problem, policy: Policy) -> str:
    """A digest of all of a problem that a prompt or the verdict may depend on."""
    seen = [] if policy.settings["verifier"] == Config.verifier else sorted(x.extra.items())
    return files.digest(x.problem, x.answer, *seen)


def sample(
    policy: Policy, tasks: Tasks, prompt: Prompt, args: Namespace, world: World, verifier: Judge
) -> dict[Key, dict]:
    """The samples asked for, as rows of samples.jsonl: those that are there, and the missing."""
    log, done = policy.folder / "samples.jsonl", samples_of(policy, tasks)
    missing = [key for key in tasks if key not in done]
    if missing:  # before anything is written: it may not load
        model, tokenizer = load_policy(policy, args, world)
    distributed.agree(len(missing), world, "samples")  # everyone has read before anyone writes
    if world.main:
        files.write_json(policy.folder / "settings.json", policy.settings)
    if not missing:
        return done
    decode, ours = rollout.stream, f"transformers {importlib.metadata.version('transformers')}"
    if policy.servers:
        adapter = policy.path if policy.base else ""
        decode = functools.partial(policy.servers.stream, adapter=adapter)
    unsolved = [tasks[key] for key in missing]
    prompts, seeds = [], []
    for key, x in zip(missing, unsolved):
        prompts.append(chat_ids(tokenizer, prompt(x), thinking=args.thinking))
        seeds.append(rollout.sample_key(args.seed, 0, x.problem, key[2]))

    def finish(turn: rollout.Turn) -> list[dict]:
        rolls = rollout.judge(model, tokenizer, unsolved, prompts, turn, verifier)
        rows = []
        for (i, _), roll in zip(turn, rolls):
            row = row_of(missing[i], digest_of(unsolved[i], policy), roll)
            engine = policy.servers.engine if policy.servers else ours
            rows.append(row | {"tokens": asked[i].counted or row["tokens"], "engine": engine})
        return rows

    asked = rollout.rows_of(prompts, seeds, args.max_new_tokens)
    turns = rollout.spread(
        world,
        model,
        tokenizer,
        asked,
        args.sampling,
        args.rows,
        finish,
        stage=pathlib.Path(policy.name).name,
        decode=decode,
    )
    for rows in turns:
        done |= {(row["set"], row["id"], row["sample"]): row for row in rows}
        if world.main and rows:
            files.append_jsonl(log, rows)
    return done


def row_of(key: Key, problem_digest: str, roll: rollout.Rollout) -> dict:
    """A line of samples.jsonl."""
    row = {"set": key[0], "id": key[1], "sample": key[2], "digest": problem_digest}
    row |= {"gold": roll.gold, "pred": roll.pred, "r": roll.r, "truncated": roll.truncated}
    return row | {"tokens": len(roll.completion_ids), "text": roll.text}


def measure(policy: Policy, name: str, rows: list[dict], k: int, same: Verify) -> None:
    """Put one set's figures and scores into the policy. rows: its samples in order, k a problem.

    same: whether two answers to one problem are the same one, such as `Judge.same`.
    """
    correct_PK = np.array([is_success(row["r"]) for row in rows]).reshape(-1, k)
    policy.scores[name] = correct_PK.mean(1)
    low, high = bootstrap_interval(policy.scores[name])
    won = [majority_is_right(rows[i : i + k], same) for i in range(0, len(rows), k)]
    policy.table[name] = {
        "digest": int(files.digest(*[row["digest"] for row in rows[::k]]), 16),  # of the problems
        "problems": len(won),
        "samples": len(rows),
        "avg": avg_at_k(correct_PK),
        "pass": pass_at_k(correct_PK, k),
        "maj": sum(won) / len(won),
        "boxed": sum(row["pred"] is not None for row in rows) / len(rows),
        "truncated": sum(row["truncated"] for row in rows) / len(rows),
        "tokens": sum(row["tokens"] for row in rows) / len(rows),
        "avg_low": low,
        "avg_high": high,
    }


def majority_is_right(rows: list[dict], same: Verify) -> bool:
    """The verdict on the most frequent answer of one problem's samples.

    It is a sample's own verdict, which knew the problem. A right answer and a wrong one never count
    together: a formula that was copied from its problem is wrong, though it equals the reference.
    """
    right = {row["pred"]: is_success(row["r"]) for row in rows}

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
    for key in rows[0].keys() - {"digest"}:
        total = sum(row[key] for row in rows)
        mean[key] = total if key in ("problems", "samples") else total / len(rows)
    low, high = bootstrap_interval(*[policy.scores[name] for name in names])
    return mean | {"avg_low": low, "avg_high": high}


def difference(ours: Policy, theirs: Policy, names: Sequence[str]) -> dict:
    """Our mean score minus theirs, paired by problem, with its interval; see `figures`."""
    gaps = [ours.scores[name] - theirs.scores[name] for name in names]
    low, high = bootstrap_interval(*gaps)
    mean = float(np.mean([gap_P.mean() for gap_P in gaps]))
    return {"to": theirs.name, "diff": mean, "diff_low": low, "diff_high": high}


def compare(policies: Sequence[Policy], names: Sequence[str]) -> dict[str, dict]:
    """The figures on a set with differences to the first policy, and the selections: of each
    directory of checkpoints the best and the last. Of several sets it is all on the mean over them,
    by which §4.1's best is picked (S23)."""
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
    """Print the figures of all sets in Markdown, and what was selected on the last."""
    *_, last = sets.values()
    short = {name: pathlib.Path(name).name for name in last["results"]}
    if len(set(short.values())) < len(short):
        short = {name: name for name in short}
    measures = f"avg@{k} | 95% | - first | 95% | pass@{k} | maj@{k}"
    print(f"| policy | set | problems | {measures} | boxed | truncated | tokens |")
    print("|---" * 12 + "|")
    figures = "{problems} | {avg:.1%} | {avg_low:.1%}-{avg_high:.1%} | {gap} | {pass:.1%} | "
    figures += "{maj:.1%} | {boxed:.1%} | {truncated:.1%} | {tokens:.0f}"
    for name, comparison in sets.items():
        for policy, row in comparison["results"].items():
            gap = " | "
            if "diff" in row:
                gap = "{diff:+.1%} | {diff_low:+.1%} to {diff_high:+.1%}".format(**row)
            print(f"| {short[policy]} | {name} | {figures.format(**row, gap=gap)} |")
    line = "of {checkpoints} checkpoints in {of}: best {best} {best_avg:.1%}, last {last} "
    line += "{last_avg:.1%}, best - last {diff:+.1%} ({diff_low:+.1%} to {diff_high:+.1%}); "
    for run, row in last["selections"].items():
        names = {"of": run, "best": short[row["best"]], "last": short[row["last"]]}
        print(line.format(**row | names) + "the best was picked on these problems")


def print_engines(policy: Policy, rows: list[dict]) -> None:
    """Say which engines have made a policy's samples, where it is more than one (S27)."""
    counts = Counter(row.get("engine", "an engine that was not recorded") for row in rows)
    if len(counts) > 1:
        parts = [f"{count} by {engine}" for engine, count in counts.items()]
        print(f"{policy.name}: of its samples {', '.join(parts)}")


def merge_into(file: pathlib.Path, sets: dict[str, dict]) -> None:
    """Put the figures of these sets into a JSON file that may hold those of others."""
    stored = files.read_json(file) if file.exists() else {}
    # Versions before 0.1.0 kept means over sets, too; one of them may be of other figures by now.
    old = {name: row for name, row in stored.items() if not name.startswith("mean of ")}
    new = {name: _with_others(row, old.get(name, {})) for name, row in sets.items()}
    files.write_json(file, old | new)


def _with_others(new: dict, old: dict) -> dict:
    """A comparison on one set, with the policies of an older one that still stand beside its own.

    They were compared to the same first policy with the same figures, on the same problems.
    """
    if "results" not in new or "results" not in old:
        return new
    first, *_ = new["results"]
    kept = {name: row for name, row in old["results"].items() if row.get("to") == first}
    if not kept or old["results"][first] != new["results"][first]:
        return new
    results = {first: new["results"][first]} | kept | new["results"]
    return {"results": results, "selections": old["selections"] | new["selections"]}


def evaluate(args: Namespace, world: World) -> None:
    """Sample every policy on every set, print the table and write the results."""
    if args.server and world.size > 1:
        raise UserError("--server: the servers share the work; start eval.py without torchrun")
    names = [pathlib.Path(source).stem for source in args.data]
    args.sampling = rollout.Sampling(args.temperature, args.top_p, args.top_k, args.max_new_tokens)
    contents.cache_clear()  # of an earlier call
    skills.use_prompts(args.prompts)
    policies, home = find_policies(args)
    with_skills = prompt_maker(args, world)
    tasks: Tasks = {}
    for name, source in zip(names, args.data):
        for problem in problems.load_set(source, args.split)[: args.limit or None]:
            for number in range(args.samples):
                tasks[name, problem.id, number] = problem
    for policy in policies:
        policy.settings = settings_of(policy, args, world)
    folders = [policy.folder for policy in policies]
    if len(policies) > 1:
        folders.append(home)
    with contextlib.ExitStack() as held:
        for folder in folders:
            held.enter_context(distributed.locked(folder, world))
        verifier = held.enter_context(inputs.make_verifier(args))
        if args.server:
            servers_for(policies, tasks, with_skills, args, world)
        for policy in policies:
            prompt = with_skills if policy.skilled else plain_prompt
            done = sample(policy, tasks, prompt, args, world, verifier)
            if world.main:
                print_engines(policy, [done[key] for key in tasks])
                for name in names:
                    rows = [done[key] for key in tasks if key[0] == name]
                    measure(policy, name, rows, args.samples, verifier.same)
                merge_into(policy.folder / "results.json", policy.table)
        if world.main:
            sets = {name: compare(policies, [name]) for name in names}
            shown = dict(sets)
            if len(names) > 1:
                shown[f"mean of {', '.join(sorted(names))}"] = compare(policies, names)
            print_table(shown, args.samples)
            if len(policies) > 1:
                merge_into(home / "comparison.json", sets)
    if world.main:
        if verifier.timeouts:
            print(f"{verifier.timeouts} answers took longer than --verify-timeout: wrong")
        print(f"written: {home if len(policies) > 1 else policies[0].folder}")
    distributed.leave_together(world)


def before_and_after(cfg: Config, world: World) -> None:
    """avg@k on --eval-data of the base model and the last checkpoint, once the run is through."""
    last = max(pathlib.Path(cfg.out, "checkpoints").glob("step_*"), default=None)
    distributed.agree(cfg.eval_data and last and last.name, world, "checkpoints")
    gc.collect()  # the run's encoder is in a reference cycle
    if cfg.eval_data and last and int(last.name[5:]) == cfg.updates:
        flags = shlex.split(flags_of(cfg))
        try:
            evaluate(arguments([cfg.model, str(last), "--data", cfg.eval_data, *flags]), world)
        except UserError as e:  # such as samples that were made with other settings
            raise UserError(f"the run is complete, but eval.py refuses: {e}") from None


def flags_of(cfg: Config) -> str:
    """The flags by which a run's own evaluation is made, for its samples to be used again."""
    rows = max(cfg.rollout_rows or 16, cfg.score_tokens // cfg.eval_tokens)
    domain = "" if cfg.verifier == Config.verifier else f" --verifier {cfg.verifier}"
    domain += f" --prompts {shlex.quote(cfg.prompts)}" if cfg.prompts else ""
    return (
        f"--max-new-tokens {cfg.eval_tokens} --samples {cfg.eval_samples} --rows {rows} "
        f"--seed {cfg.seed} --device {cfg.device} --dtype {cfg.dtype} --attn {cfg.attn} "
        f"--verify-timeout {cfg.verify_timeout} --verify-workers {cfg.verify_workers}{domain}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""

    def body() -> None:
        args = arguments(argv)
        with cli.continued_by(lambda: "what was sampled is kept: give the same command again"):
            evaluate(args, distributed.init(args.device))

    return cli.command("eval", body)


if __name__ == "__main__":
    distributed.leave(main())
