"""avg@k of a checkpoint, an adapter or a plain model on problem files, under the plain prompt (App. F.1).

    python eval.py runs/sgsd/checkpoints/step_000200 --data aime24.jsonl aime25.jsonl hmmt25.jsonl
    torchrun --nproc_per_node 8 eval.py Qwen/Qwen3-1.7B --data aime24.jsonl

Every sample is appended to samples.jsonl as it finishes; the same command goes on where a killed one stopped. Sample j of
problem i is a function of (seed, problem, j) alone. No skill text can reach a prompt: nothing here reads a bank.

Dimension key: P problems, K samples per problem.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

import distributed as D
import rollout as R
from distributed import UserError
from skills import render_student

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


def maj_at_k(preds: Sequence[Sequence[str | None]], golds: Sequence[str], verify: Callable[[str, str | None], bool]) -> float:
    """Accuracy of the most frequent answer of each problem's samples; answers that `verify` calls equal count together.

    No answer (None) is not a vote; ties go to the answer that came first.
    """
    if len(preds) != len(golds) or not golds:
        raise ValueError(f"maj_at_k: got {len(preds)} rows of answers for {len(golds)} golds, wanted one row each and at least one")
    right = 0
    for row, gold in zip(preds, golds):
        votes: dict[str, int] = {}
        for pred in row:
            if pred is not None:
                same = pred if pred in votes else next((v for v in votes if verify(v, pred)), pred)
                votes[same] = votes.get(same, 0) + 1
        right += bool(votes) and verify(gold, max(votes, key=votes.__getitem__))
    return right / len(golds)


def bootstrap_interval(scores_P: np.ndarray, draws: int = 10_000, seed: int = 0) -> tuple[float, float]:
    """95% interval of the mean of per-problem scores, by percentile bootstrap over problems."""
    rng = np.random.default_rng(seed)
    means = np.array([scores_P[rng.integers(0, len(scores_P), len(scores_P))].mean() for _ in range(draws)])
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def _checked(correct_PK: np.ndarray) -> np.ndarray:
    correct = np.asarray(correct_PK)
    if correct.ndim != 2 or correct.size == 0:
        raise ValueError(f"correct_PK must be [problems, samples] and not empty, got shape {correct.shape}")
    return correct.astype(bool)


# ============================================================================================================ a run of it


def load_policy(path: str, base: str, device, dtype: str, attn: str) -> tuple[R.Model, R.Tokenizer]:
    """A plain model, or a PEFT adapter on its base (`base` replaces the one that the adapter names)."""
    folder = pathlib.Path(path)
    if not (folder / "adapter_config.json").exists():
        if (folder / "checkpoints").is_dir():
            last = max((folder / "checkpoints").glob("step_*"), default="step_000025")
            raise UserError(f"{path}: is a run; give one of its checkpoints, such as {last}")
        return R.load_model(path, device, dtype=dtype, attn=attn)
    from peft import PeftModel

    try:
        base = base or json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    except (ValueError, KeyError) as e:
        raise UserError(f"{path}: adapter_config.json names no base model ({D.brief(e)}); --model does") from None
    model, tokenizer = R.load_model(base, device, dtype=dtype, attn=attn)
    try:
        return PeftModel.from_pretrained(model, path).eval(), tokenizer
    except (RuntimeError, ValueError, KeyError, OSError) as e:
        raise UserError(f"{path}: the adapter does not fit {base} ({D.brief(e)}); --model names its base") from None


def evaluate(args: argparse.Namespace, world: D.World) -> None:
    sampling = R.Sampling(args.temperature, args.top_p, args.top_k, args.max_new_tokens)
    if args.samples < 1 or args.rows < 1 or args.limit < 0:
        raise UserError(f"--samples {args.samples} and --rows {args.rows} must be >= 1, --limit {args.limit} >= 0")
    if args.verify_timeout <= 0 or args.verify_workers < 1:
        raise UserError(f"--verify-timeout {args.verify_timeout} must be > 0, --verify-workers {args.verify_workers} >= 1")
    if len({pathlib.Path(name).stem for name in args.data}) < len(args.data):
        raise UserError(f"--data {' '.join(args.data)}: two sets have one name; rename a file")
    sets = {pathlib.Path(name).stem: R.load_problems(name, split=args.split, unique=False)[0] for name in args.data}
    sets = {name: problems[: args.limit or None] for name, problems in sets.items()}
    model, tokenizer = load_policy(args.path, args.model, world.device, args.dtype, args.attn)
    out = pathlib.Path(args.out or (f"{args.path}/eval" if pathlib.Path(args.path).is_dir() else "eval"))

    settings = {"path": str(pathlib.Path(args.path)), **{k: getattr(args, k) for k in ("model", "dtype", "attn", "thinking", "seed")}}
    settings |= dataclasses.asdict(sampling)
    log, done = out / "samples.jsonl", {}
    if (out / "settings.json").exists() and json.loads((out / "settings.json").read_text()) != settings:
        raise UserError(f"{out}: holds an evaluation with other settings (see its settings.json); give another --out")
    if log.exists():
        done = {(s["set"], s["id"], s["sample"]): s for s in D.read_jsonl(log)}
        now = {(name, x.id): _digest(x) for name, problems in sets.items() for x in problems}
        done = {key: s for key, s in done.items() if now.get(key[:2], s["digest"]) == s["digest"]}  # a problem that changed is sampled anew
    D.agree(len(done), world, "samples")  # and everyone has looked before anyone writes
    if world.main:
        D.write_json(out / "settings.json", settings)
        D.write_text(log, "".join(json.dumps(s) + "\n" for s in done.values()))  # without a torn last line
    todo = [
        (name, x, j, R.chat_ids(tokenizer, render_student(x.problem), thinking=args.thinking))
        for name, problems in sets.items() for x in problems for j in range(args.samples) if (name, x.id, j) not in done
    ]  # fmt: skip
    todo.sort(key=lambda item: len(item[3]))
    batches = [todo[i : i + args.rows * world.size] for i in range(0, len(todo), args.rows * world.size)]
    from tqdm import tqdm

    bar = tqdm(total=len(todo), disable=not world.main, unit="sample")
    began, tokens = time.perf_counter(), 0
    with R.Verifier(args.verify_timeout, args.verify_workers) as verifier:
        for batch in batches:
            mine = batch[world.rank :: world.size]
            keys = [R.sample_key(args.seed, 0, x.id, j) for _, x, j, _ in mine]
            rolls = R.sample_rollouts(model, tokenizer, [x for _, x, _, _ in mine], [ids for *_, ids in mine], sampling, keys, verifier)
            rows = [
                {"set": name, "id": x.id, "sample": j, "digest": _digest(x), "gold": x.answer, "pred": r.pred, "r": r.r, "truncated": r.truncated,
                 "tokens": len(r.completion_ids), "text": r.text}
                for (name, x, j, _), r in zip(mine, rolls)
            ]  # fmt: skip
            new = [row for share in D.gather(rows, world) for row in share]
            if world.main:
                D.append_jsonl(log, new)
            done.update({(s["set"], s["id"], s["sample"]): s for s in new})
            tokens += sum(s["tokens"] for s in new)
            bar.update(len(new))
            running = sum(s["r"] > 0 for s in done.values()) / len(done)
            bar.set_postfix_str(f"avg {running:.1%} {tokens / (time.perf_counter() - began):.0f} tok/s")
        bar.close()
        if world.main:
            table = {name: _results(name, problems, args.samples, done, verifier) for name, problems in sets.items()}
            D.write_json(out / "results.json", {"settings": settings, "results": table})
            _print_table(table, args.samples)
            print(f"written: {out}/results.json")
    D.leave_together(world)


def _digest(x: R.Problem) -> str:
    return hashlib.blake2b(repr((x.problem, x.answer)).encode("utf-8", "replace"), digest_size=8).hexdigest()


def _results(name: str, problems: list[R.Problem], samples: int, done: dict, verifier: R.Verifier) -> dict:
    rows = [[done[name, x.id, j] for j in range(samples)] for x in problems]
    correct_PK = np.array([[s["r"] > 0 for s in row] for row in rows])
    low, high = bootstrap_interval(correct_PK.mean(1))
    flat = [s for row in rows for s in row]
    return {
        "problems": len(problems), "samples": samples, "avg": avg_at_k(correct_PK), "avg_low": low, "avg_high": high,
        "pass": pass_at_k(correct_PK, samples),
        "maj": maj_at_k([[s["pred"] for s in row] for row in rows], [x.answer for x in problems], verifier.verify),
        "boxed": sum(s["pred"] is not None for s in flat) / len(flat), "truncated": sum(s["truncated"] for s in flat) / len(flat),
        "tokens": sum(s["tokens"] for s in flat) / len(flat),
    }  # fmt: skip


def _print_table(table: dict, k: int) -> None:
    print(f"| set | problems | avg@{k} | 95% | pass@{k} | maj@{k} | boxed | truncated | tokens |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, r in table.items():
        print(
            f"| {name} | {r['problems']} | {r['avg']:.1%} | {r['avg_low']:.1%}-{r['avg_high']:.1%} | {r['pass']:.1%} | {r['maj']:.1%} "
            f"| {r['boxed']:.1%} | {r['truncated']:.1%} | {r['tokens']:.0f} |"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Exit code 0, or 2 with one line on stderr for a user's mistake."""
    parser = D.Parser("eval.py", description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("path", help="checkpoint of a run, any PEFT adapter, model directory or hub id")
    parser.add_argument("--data", nargs="+", required=True, help="problem files: JSONL with `problem` and `answer`, parquet, directory or hub id")
    parser.add_argument("--split", default="test", help="of a hub data set")
    parser.add_argument("--model", default="", help="base of the adapter, where it is not the one that the adapter names")
    parser.add_argument("--out", default="", help="where samples.jsonl and results.json go (default: PATH/eval)")
    parser.add_argument("--samples", type=int, default=12, help="k, samples per problem; App. F.1")
    parser.add_argument("--temperature", type=float, default=1.0, help="App. F.1")
    parser.add_argument("--top-p", type=float, default=0.95, help="App. F.1")
    parser.add_argument("--top-k", type=int, default=0, help="0 is off; App. F.1")
    parser.add_argument("--max-new-tokens", type=int, default=38912, help="App. F.1")
    parser.add_argument("--thinking", action=argparse.BooleanOptionalAction, default=True, help="enable_thinking of the chat template; S3")
    parser.add_argument("--limit", type=int, default=0, help="only the first N problems of each set; 0 is all")
    parser.add_argument("--rows", type=int, default=16, help="samples per generation batch and rank; lower it when memory runs out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--attn", default="auto", choices=("auto", "flash_attention_2", "sdpa", "eager"))
    parser.add_argument("--verify-timeout", type=float, default=5.0, help="seconds per answer")
    parser.add_argument("--verify-workers", type=int, default=1)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        args = parser.parse_args(argv)
        evaluate(args, D.init(args.device))
    except (UserError, OSError) as e:
        print(f"eval: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("eval: interrupted; the same command goes on", file=sys.stderr)
        return 130
    finally:
        D.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
