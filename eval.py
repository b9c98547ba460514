"""avg@k of checkpoints, adapters and plain models on sets of problems, under the plain prompt (App. F.1).

    python eval.py runs/sgsd/checkpoints/step_000200                                    AIME24, AIME25 and HMMT25
    torchrun --nproc_per_node 8 eval.py Qwen/Qwen3-1.7B runs/sgsd                       a base model against all checkpoints of a run
    python eval.py Qwen/Qwen3-1.7B --data gsm8k my.jsonl --skills bank.json --out base_skill         the baseline Base+Skill

Every sample is appended to samples.jsonl as it finishes; the same command goes on where a killed one stopped. Sample j of
problem i is a function of (seed, problem, j) alone. Without --skills no bank is read, and no skill text can reach a prompt.

Dimension key: P problems, K samples per problem.
"""

import argparse
import hashlib
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Sequence

import numpy as np

import distributed as D
import rollout as R
import skills as S
from config import Config
from distributed import UserError

# ============================================================================================================== metrics


def avg_at_k(correct_PK: np.ndarray) -> float:
    """Mean accuracy over problems and samples (§4.1 "avg@12"). correct_PK: bool [P, K], P and K at least 1."""
    return float(_checked(correct_PK).mean())


def pass_at_k(correct_PK: np.ndarray, k: int) -> float:
    """Unbiased chance that one of k samples is right: mean over problems of 1 - C(n-c, k) / C(n, k), n = K samples, c right."""
    correct = _checked(correct_PK)
    n = correct.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"pass_at_k: got k = {k}, must be in 1..{n}, the samples per problem")
    return float(np.mean([1 - math.comb(n - int(c), k) / math.comb(n, k) for c in correct.sum(1)]))


def maj_at_k(
    preds: Sequence[Sequence[str | None]],
    golds: Sequence[str],
    verify: Callable[[str, str | None], bool],
) -> float:
    """Accuracy of the most frequent answer of each problem's samples; answers that `verify` calls equal count together.

    No answer (None) is not a vote; ties go to the answer that came first.
    """
    if len(preds) != len(golds) or not golds:
        raise ValueError(
            f"maj_at_k: got {len(preds)} rows of answers for {len(golds)} golds, wanted one row each and at least one"
        )
    right = 0
    for row, gold in zip(preds, golds):
        votes: dict[str, int] = {}
        for pred in row:
            if pred is not None:
                same = pred if pred in votes else next((v for v in votes if verify(v, pred)), pred)
                votes[same] = votes.get(same, 0) + 1
        right += bool(votes) and verify(gold, max(votes, key=votes.__getitem__))
    return right / len(golds)


def bootstrap_interval(
    *sets_P: np.ndarray, draws: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """95% interval of the mean of per-problem scores, by percentile bootstrap over problems; of several sets, of the mean of their
    means, each set drawn by itself. Scores or, for two policies on the same problems, their paired differences."""
    rng, means = np.random.default_rng(seed), np.zeros(draws)
    for scores_P in sets_P:
        values, counts = np.unique(
            scores_P, return_counts=True
        )  # drawing problems is drawing how often each score comes up
        means += (
            rng.multinomial(len(scores_P), counts / len(scores_P), draws)
            @ values
            / len(scores_P)
            / len(sets_P)
        )
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def _checked(correct_PK: np.ndarray) -> np.ndarray:
    correct = np.asarray(correct_PK)
    if correct.ndim != 2 or correct.size == 0:
        raise ValueError(
            f"correct_PK must be [problems, samples] and not empty, got shape {correct.shape}"
        )
    return correct.astype(bool)


# =================================================================================================== problems and policies

SETS = {  # hub id, configuration, split, fields of problem and answer; the paper's three, as the released evaluation reads them, first
    "aime24": ("HuggingFaceH4/aime_2024", None, "train", "problem", "answer"),
    "aime25": ("yentinglin/aime_2025", None, "train", "problem", "answer"),
    "hmmt25": ("MathArena/hmmt_feb_2025", None, "train", "problem", "answer"),
    "math500": ("HuggingFaceH4/MATH-500", None, "test", "problem", "answer"),
    "amc23": ("math-ai/amc23", None, "test", "question", "answer"),
    "gsm8k": ("openai/gsm8k", "main", "test", "question", "answer"),
}


def load_set(name: str, split: str) -> list[R.Problem]:
    """A set of the table from the hub, or whatever `load_problems` reads. Numbers are written out; GSM8K's answer follows ####."""
    if name not in SETS:
        return R.load_problems(name, split=split, unique=False)[0]
    import datasets  # only needed for hub ids

    hub, config, split, problem, answer = SETS[name]
    try:
        rows = [
            (row[problem], row[answer]) for row in datasets.load_dataset(hub, config, split=split)
        ]
    except Exception as e:  # the library raises many kinds; a field that is not there is a KeyError
        raise UserError(
            f"{name}: {hub} not read ({D.brief(e)}); a JSONL with `problem` and `answer` works offline"
        ) from None
    golds = [
        str(int(a) if isinstance(a, float) and a.is_integer() else a).rpartition("####")[2].strip()
        for _, a in rows
    ]
    if not rows or not all(golds):
        raise UserError(
            f"{name}: {hub} has {len(rows)} rows, {golds.count('')} of them without an answer"
        )
    return [R.Problem(str(i), p.strip(), gold) for i, ((p, _), gold) in enumerate(zip(rows, golds))]


def find_policies(paths: Sequence[str], base: str) -> dict[str, str]:
    """What the PATHs stand for, in order: {path of a policy: base of an adapter, "" for a plain model}.

    A run's directory stands for all of its checkpoints. `base` replaces the one that an adapter names.
    """
    found: dict[str, str] = {}
    for path in paths:
        steps = sorted(pathlib.Path(path, "checkpoints").glob("step_*"))
        if not steps and pathlib.Path(path, "checkpoints").is_dir():
            raise UserError(f"{path}: a run without a checkpoint")
        if path.startswith((".", "/", "~")) and not pathlib.Path(path).is_dir():
            raise UserError(
                f"{path}: no such directory; a checkpoint, run, adapter or model is wanted, or a hub id"
            )
        for policy in steps or [pathlib.Path(path)]:
            found[str(policy)] = ""
            if (file := policy / "adapter_config.json").exists():
                try:
                    found[str(policy)] = (
                        base or json.loads(file.read_text())["base_model_name_or_path"]
                    )
                except (ValueError, KeyError) as e:
                    raise UserError(
                        f"{policy}: adapter_config.json names no base model ({D.brief(e)}); --model does"
                    ) from None
    return found


def load_policy(path: str, base: str, device, dtype: str, attn: str) -> tuple[R.Model, R.Tokenizer]:
    """A plain model, or a PEFT adapter on its base."""
    model, tokenizer = R.load_model(base or path, device, dtype=dtype, attn=attn)
    if not base:
        return model, tokenizer
    from peft import PeftModel

    try:
        return R.lean_adapters(PeftModel.from_pretrained(model, path)).eval(), tokenizer
    except Exception as e:  # many kinds: other shapes, torn, a pickle
        raise UserError(
            f"{path}: the adapter does not fit {base} ({D.brief(e)}); --model names its base"
        ) from None


# =============================================================================================================== prompts


def prompt_maker(args: argparse.Namespace, device) -> Callable[[str], str]:
    """problem -> prompt: the plain one, or with --skills Base+Skill's, retrieved for each problem (Tab. 12)."""
    if not args.skills:
        return S.render_student
    bank = S.SkillBank.load(args.skills)
    if (
        not 1
        <= args.num_skills
        <= (most := min(len(bank.general_skills), len(bank.common_mistakes)))
    ):
        raise UserError(
            f"--num-skills {args.num_skills}: must be in 1..{most}, the shorter list of --skills {args.skills}"
        )
    embed = S.load_encoder(args.encoder, str(device))
    return lambda problem: S.render_skills(bank.retrieve(problem, args.num_skills, embed), problem)


# ============================================================================================================== sampling


def _digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode("utf-8", "replace"), digest_size=8).hexdigest()


def contents(path: str) -> str:
    """What a directory of weights holds, by its content; a hub id as it is."""
    files = sorted(
        file
        for pattern in ("*.safetensors", "*.bin")
        for file in pathlib.Path(path).glob(pattern)
        if file.stem != "trainer"
    )
    digests = []
    for file in files:
        with open(file, "rb") as f:
            digests.append(hashlib.file_digest(f, "blake2b").hexdigest())
    return _digest(*digests) if files else path


def settings_of(path: str, base: str, args: argparse.Namespace) -> dict:
    """All that a policy's samples depend on besides the problems; local weights and the bank by their content, so that they may move."""
    names = [
        "device",
        "dtype",
        "attn",
        "thinking",
        "seed",
        "temperature",
        "top_p",
        "top_k",
        "max_new_tokens",
    ]
    settings = {
        "policy": contents(path),
        "base": contents(base) if base else "",
        **{k: getattr(args, k) for k in names},
    }
    if args.skills:
        bank = _digest(pathlib.Path(args.skills).read_bytes())
        settings |= {"bank": bank, "num_skills": args.num_skills, "encoder": contents(args.encoder)}
    return settings


def sample(
    path: str,
    base: str,
    folder: pathlib.Path,
    sets: dict[str, list[R.Problem]],
    prompt: Callable[[str], str],
    args: argparse.Namespace,
    world: D.World,
    verifier: R.Verifier,
) -> dict[tuple, dict]:
    """All samples of one policy, {(set, problem id, sample): row}: those in the folder's samples.jsonl, and the missing ones made."""
    log = folder / "samples.jsonl"
    now = {
        (name, x.id): _digest(x.problem, x.answer)
        for name, problems in sets.items()
        for x in problems
    }
    kept = [
        s for s in D.read_jsonl(log) if now.get((s["set"], s["id"]), s["digest"]) == s["digest"]
    ]  # a problem that changed is sampled anew
    done = {
        (s["set"], s["id"], s["sample"]): s
        for s in kept
        if (s["set"], s["id"]) in now and s["sample"] < args.samples
    }
    D.agree(len(kept), world, "samples")  # and everyone has looked before anyone writes
    if world.main:
        D.write_text(log, "".join(json.dumps(s) + "\n" for s in kept))  # without a torn last line
    todo = [
        (name, x, j)
        for name, problems in sets.items()
        for x in problems
        for j in range(args.samples)
        if (name, x.id, j) not in done
    ]
    if not todo:
        return done
    model, tokenizer = load_policy(path, base, world.device, args.dtype, args.attn)
    ids = {
        x.problem: R.chat_ids(tokenizer, prompt(x.problem), thinking=args.thinking)
        for _, x, j in todo
    }
    todo.sort(key=lambda item: len(ids[item[1].problem]))
    mine = todo[world.rank :: world.size]
    sampling = R.Sampling(args.temperature, args.top_p, args.top_k, args.max_new_tokens)
    keys = [R.sample_key(args.seed, 0, x.problem, j) for _, x, j in mine]
    turns = R.stream(
        model, tokenizer, [ids[x.problem] for _, x, _ in mine], sampling, keys, args.rows
    )
    from tqdm import tqdm

    bar = tqdm(
        total=len(done) + len(todo),
        initial=len(done),
        disable=not world.main,
        unit="sample",
        desc=pathlib.Path(path).name,
    )
    began, tokens, left = time.perf_counter(), 0, len(todo)
    while left:  # ranks go turn by turn together; one that has no more to do waits in `gather`
        turn = next(turns, [])
        these = [mine[i] for i, _ in turn]
        problems, completions = [x for _, x, _ in these], [c for _, c in turn]
        rolls = R.judge(
            model, tokenizer, problems, [ids[x.problem] for x in problems], completions, verifier
        )
        rows = [
            {
                "set": name,
                "id": x.id,
                "sample": j,
                "digest": now[name, x.id],
                "gold": x.answer,
                "pred": r.pred,
                "r": r.r,
                "truncated": r.truncated,
                "tokens": len(r.completion_ids),
                "text": r.text,
            }
            for (name, x, j), r in zip(these, rolls)
        ]
        new = [row for share in D.gather(rows, world) for row in share]
        if world.main and new:
            D.append_jsonl(log, new)
        done.update({(s["set"], s["id"], s["sample"]): s for s in new})
        tokens += sum(s["tokens"] for s in new)
        left -= len(new)
        running = sum(s["r"] > 0 for s in done.values()) / max(1, len(done))
        bar.set_postfix_str(
            f"avg {running:.1%} {tokens / (time.perf_counter() - began):.0f} tok/s", refresh=False
        )
        bar.update(len(new))
    bar.close()
    return done


# ================================================================================================================= table

MEAN = "(mean)"  # of the sets, each weighing the same (Tab. 3 "Avg.")


def metrics(
    rows: list[list[dict]], golds: list[str], verify: Callable[[str, str | None], bool]
) -> dict:
    """One set's figures, from its samples by problem."""
    correct_PK, flat = (
        np.array([[s["r"] > 0 for s in row] for row in rows]),
        [s for row in rows for s in row],
    )
    return {
        "problems": len(rows),
        "samples": len(flat),
        "avg": avg_at_k(correct_PK),
        "pass": pass_at_k(correct_PK, len(rows[0])),
        "maj": maj_at_k([[s["pred"] for s in row] for row in rows], golds, verify),
        "boxed": sum(s["pred"] is not None for s in flat) / len(flat),
        "truncated": sum(s["truncated"] for s in flat) / len(flat),
        "tokens": sum(s["tokens"] for s in flat) / len(flat),
    }


def tabulate(tables: dict[str, dict[str, dict]], scores: dict[str, dict[str, np.ndarray]]) -> None:
    """Put intervals into the tables {policy: {set: figures}}, paired differences to the first policy, and the mean over sets.

    scores: {policy: {set: [P], a problem's mean over its samples}}.
    """
    first = next(iter(tables))
    for policy, table in tables.items():
        if len(table) > 1:
            columns = {k: [row[k] for row in table.values()] for k in next(iter(table.values()))}
            table[MEAN] = {
                k: sum(v) if k in ("problems", "samples") else float(np.mean(v))
                for k, v in columns.items()
            }
        for name, row in table.items():
            row["avg_low"], row["avg_high"] = bootstrap_interval(
                *(s_P for n, s_P in scores[policy].items() if name in (n, MEAN))
            )
            if policy != first:
                row |= difference(scores[policy], scores[first], name)


def difference(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], name: str) -> dict:
    """Ours minus theirs, paired by problem, with its interval."""
    gaps = [ours[n] - theirs[n] for n in ours if name in (n, MEAN)]
    low, high = bootstrap_interval(*gaps)
    return {
        "diff": float(np.mean([g_P.mean() for g_P in gaps])),
        "diff_low": low,
        "diff_high": high,
    }


def selections(
    tables: dict[str, dict[str, dict]], scores: dict, adapters: Sequence[str]
) -> list[dict]:
    """Of the checkpoints that lie in one directory: the best (on these very problems, so flattered) beside the last."""
    runs: dict[str, list[str]] = {}
    for path in adapters:
        runs.setdefault(str(pathlib.Path(path).parent), []).append(path)
    chosen, name = [], list(next(iter(tables.values())))[-1]  # the mean over sets, or the only set
    for run, paths in runs.items():
        best, last = max(paths, key=lambda p: tables[p][name]["avg"]), max(paths)
        if len(paths) > 1:
            chosen.append(
                {
                    "of": run,
                    "checkpoints": len(paths),
                    "best": best,
                    "best_avg": tables[best][name]["avg"],
                    "last": last,
                    "last_avg": tables[last][name]["avg"],
                    **difference(scores[best], scores[last], name),
                }
            )
    return chosen


def print_table(tables: dict[str, dict[str, dict]], chosen: list[dict], k: int) -> None:
    names = [pathlib.Path(p).name for p in tables]
    short = dict(zip(tables, names if len(set(names)) == len(names) else tables))
    print(
        f"| policy | set | problems | avg@{k} | 95% | - first | 95% | pass@{k} | maj@{k} | boxed | truncated | tokens |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for policy, table in tables.items():
        for name, r in table.items():
            gap = (
                f"{r['diff']:+.1%} | {r['diff_low']:+.1%} to {r['diff_high']:+.1%}"
                if "diff" in r
                else " | "
            )
            print(
                f"| {short[policy]} | {name} | {r['problems']} | {r['avg']:.1%} | {r['avg_low']:.1%}-{r['avg_high']:.1%} | {gap} "
                f"| {r['pass']:.1%} | {r['maj']:.1%} | {r['boxed']:.1%} | {r['truncated']:.1%} | {r['tokens']:.0f} |"
            )
    for c in chosen:
        print(
            f"of {c['checkpoints']} checkpoints in {c['of']}: best {short[c['best']]} {c['best_avg']:.1%}, "
            f"last {short[c['last']]} {c['last_avg']:.1%}, best - last {c['diff']:+.1%} ({c['diff_low']:+.1%} to {c['diff_high']:+.1%}); "
            "the best was picked on these problems"
        )


# ============================================================================================================ the command


def evaluate(args: argparse.Namespace, world: D.World) -> None:
    R.Sampling(args.temperature, args.top_p, args.top_k, args.max_new_tokens)  # its own checks
    if args.samples < 1 or args.rows < 1 or args.limit < 0:
        raise UserError(
            f"--samples {args.samples} and --rows {args.rows} must be >= 1, --limit {args.limit} >= 0"
        )
    if args.verify_timeout <= 0 or args.verify_workers < 1:
        raise UserError(
            f"--verify-timeout {args.verify_timeout} must be > 0, --verify-workers {args.verify_workers} >= 1"
        )
    if len({pathlib.Path(name).stem for name in args.data}) < len(args.data):
        raise UserError(f"--data {' '.join(args.data)}: two sets have one name; rename a file")
    policies = find_policies(args.paths, args.model)
    prompt = prompt_maker(args, world.device)
    sets = {
        pathlib.Path(name).stem: load_set(name, args.split)[: args.limit or None]
        for name in args.data
    }
    folders = {}
    args.device = world.device.type
    settings = {path: settings_of(path, base, args) for path, base in policies.items()}
    for path in policies:  # each keeps its samples in a folder of its own
        own = (
            pathlib.Path(path, "eval")
            if pathlib.Path(path).is_dir()
            else pathlib.Path("eval", path.replace("/", "--"))
        )
        folders[path] = (
            own
            if not args.out
            else pathlib.Path(
                args.out, path.strip("/").replace("/", "--") if len(policies) > 1 else ""
            )
        )
        if (file := folders[path] / "settings.json").exists() and json.loads(
            file.read_text()
        ) != settings[path]:
            raise UserError(
                f"{folders[path]}: holds an evaluation with other settings (see its settings.json); give another --out"
            )
    if len(set(folders.values())) < len(folders):
        raise UserError(
            f"{' '.join(folders)}: two of them would keep their samples in one folder; give --out, or evaluate them apart"
        )
    run = next((p for p in args.paths if pathlib.Path(p, "checkpoints").is_dir()), None)
    out = pathlib.Path(
        args.out
        or (
            f"{run}/eval"
            if run
            else folders[next(iter(policies))]
            if len(policies) == 1
            else "eval"
        )
    )
    with R.Verifier(args.verify_timeout, args.verify_workers) as verifier:
        tables: dict[str, dict[str, dict]] = {path: {} for path in policies}
        scores: dict[str, dict[str, np.ndarray]] = {path: {} for path in policies}
        for path, base in policies.items():
            if world.main:
                D.write_json(folders[path] / "settings.json", settings[path])
            done = sample(path, base, folders[path], sets, prompt, args, world, verifier)
            for name, problems in sets.items() if world.main else ():
                rows = [[done[name, x.id, j] for j in range(args.samples)] for x in problems]
                tables[path][name] = metrics(rows, [x.answer for x in problems], verifier.verify)
                scores[path][name] = np.array([np.mean([s["r"] > 0 for s in row]) for row in rows])
    if world.main:
        tabulate(tables, scores)
        chosen = selections(tables, scores, [path for path, base in policies.items() if base])
        D.write_json(
            out / "results.json", {"settings": settings, "results": tables, "selection": chosen}
        )
        print_table(tables, chosen, args.samples)
        print(f"written: {out}/results.json")
    D.leave_together(world)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's settings."""
    parser = D.Parser("eval.py", description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="checkpoint, run (all its checkpoints), any PEFT adapter, model directory or hub id",
    )
    sets = f"{' '.join(SETS)}, or problem files: JSONL with `problem` and `answer`, parquet, directory or hub id"
    parser.add_argument(
        "--data",
        nargs="+",
        default=list(SETS)[:3],
        help=f"{sets}; default: the first three, as in §4.1",
    )
    parser.add_argument("--split", default="test", help="of a hub data set")
    parser.add_argument(
        "--model",
        default="",
        help="base of the adapter, where it is not the one that the adapter names",
    )
    parser.add_argument(
        "--out", default="", help="where samples.jsonl and results.json go (default: PATH/eval)"
    )
    parser.add_argument(
        "--skills",
        default="",
        help="skill bank (JSON) for the baseline Base+Skill, which retrieves at inference; §4.1, S14",
    )
    parser.add_argument(
        "--num-skills",
        type=int,
        default=8,
        help="retrieved pairs of skill and mistake in the prompt of Base+Skill; Tab. 12",
    )
    parser.add_argument(
        "--encoder",
        default="Qwen/Qwen3-Embedding-0.6B",
        help="sentence-transformers encoder of --skills; Tab. 12",
    )
    parser.add_argument("--samples", type=int, default=12, help="k, samples per problem; App. F.1")
    parser.add_argument("--temperature", type=float, default=1.0, help="App. F.1")
    parser.add_argument("--top-p", type=float, default=0.95, help="App. F.1")
    parser.add_argument("--top-k", type=int, default=0, help="0 is off; App. F.1")
    parser.add_argument("--max-new-tokens", type=int, default=38912, help="App. F.1")
    parser.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="enable_thinking of the chat template; S3",
    )
    parser.add_argument(
        "--limit", type=int, default=0, help="only the first N problems of each set; 0 is all"
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=16,
        help="samples decoded at a time on each rank; lower it when memory runs out",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument(
        "--attn", default="auto", choices=("auto", "flash_attention_2", "sdpa", "eager")
    )
    parser.add_argument("--verify-timeout", type=float, default=5.0, help="seconds per answer")
    parser.add_argument("--verify-workers", type=int, default=1)
    return parser.parse_args(argv)


def before_and_after(cfg: Config, world: D.World) -> None:
    """avg@12 on --eval-data of the base model and of the last checkpoint, once the run is through."""
    last = max((pathlib.Path(cfg.out) / "checkpoints").glob("step_*"), default=None)
    if cfg.eval_data and last and int(last.name[5:]) == cfg.updates:
        rows = max(16, cfg.score_tokens // cfg.eval_tokens)
        settings = {
            "data": cfg.eval_data,
            "max-new-tokens": cfg.eval_tokens,
            "rows": rows,
            "out": f"{cfg.out}/eval",
            "seed": cfg.seed,
            "verify-timeout": cfg.verify_timeout,
            "verify-workers": cfg.verify_workers,
            "device": cfg.device,
            "dtype": cfg.dtype,
            "attn": cfg.attn,
        }
        evaluate(
            arguments(
                [cfg.model, str(last), *(f"--{name}={value}" for name, value in settings.items())]
            ),
            world,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    def body() -> None:
        args = arguments(argv)
        evaluate(args, D.init(args.device))

    return D.command("eval", body)


if __name__ == "__main__":
    D.leave(main())
