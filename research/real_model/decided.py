"""How many teachers of a real model are decided, and does their support tell right from wrong?

    python research/real_model/decided.py FOLDER --model M --encoder E --data PROBLEMS.jsonl \
        --bank hand=A.json released=B.json --reads own donor shuffled none
    python research/real_model/decided.py FOLDER --table

The first command samples a solution of each of the first problems as training does, keeps them in
FOLDER/solutions.jsonl, and scores each by teachers of every bank: FOLDER/NAME_READS.jsonl. --reads
says what they read, as the flags of methods.ablations do: the problem's own pairs, a donor's, the
own pairs with the words of each field shuffled, or the template without text (one teacher, as all
would be the same). What is there is not made again. Both commands print the table: a teacher is
decided where |support| > eps_a; "minus none" is the mean difference of a solution's support to the
one without text. Intervals are over solutions.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import random
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import rollout
import scoring
import sgsd
import skills
from eval import bootstrap_interval
from lib import files, model, verify
from methods import ablations
from research.markdown_table import head_of, row_of
from rollout import Job, Sampling

ROWS = 16  # solutions decoded at a time
C_DELTA, EPS_A = 3.0, 0.05  # nats; Tab. 12


def sample(args: Any, lm: Any, tokenizer: Any) -> list[dict]:
    """The judged solutions, as rows; those that FOLDER has are kept."""
    file = args.folder / "solutions.jsonl"
    rows = [*files.read_jsonl(file)]
    lines = [json.loads(line) for line in open(args.data)][: args.solutions]
    stops, jobs = rollout.stop_ids(lm, tokenizer), []
    for index, line in enumerate(lines):
        x = SimpleNamespace(**{name: line[name] for name in ("id", "problem", "answer")})
        text = skills.render_student(x.problem)
        prompt = rollout.chat_ids(tokenizer, text, thinking="closed")
        key = rollout.sample_key(0, 1, x.id)
        if index not in {row["index"] for row in rows}:
            jobs.append(Job(index, prompt, key=key, limit=args.max_new_tokens, x=x))
    turns = rollout.stream(lm, tokenizer, jobs, Sampling(), ROWS) if jobs else iter(())
    with verify.Verifier() as judge:
        for judged in rollout.rollouts(tokenizer, stops, judge, turns):
            fresh = [{"index": job.index, **dataclasses.asdict(roll)} for job, roll in judged]
            files.append_jsonl(file, fresh)
            rows += fresh
            print(f"{len(rows)} of {len(lines)} solutions", flush=True)
    return sorted(rows, key=lambda row: row["index"])


def pairs_read(
    bank: skills.SkillBank, row: dict, problems: Sequence[str], reads: str, k: int, embed: Any
) -> list[skills.SkillPair]:
    """The pairs that a solution's teachers read; as in training, what is drawn goes by a key."""
    draw, problem = random.Random(rollout.sample_key(0, 1, row["problem_id"])), row["problem"]
    if reads == "donor":
        problem = draw.choice([other for other in problems if other != problem])
    pairs_K = []
    for pair in bank.retrieve(problem, 1 if reads == "none" else k, embed):
        text = reads if reads in ("shuffled", "none") else "whole"
        skill = ablations.as_shown(pair.skill, "general_skills", text, draw)
        mistake = ablations.as_shown(pair.mistake, "common_mistakes", text, draw)
        pairs_K.append(dataclasses.replace(pair, skill=skill, mistake=mistake))
    return pairs_K


def supports_of(
    lm: Any, tokenizer: Any, masked: set[int], row: dict, pairs_K: Sequence[skills.SkillPair]
) -> list[float]:
    """The robust support of each pair's teacher for a solution (Eq. 12)."""
    ids_T, contexts_K = row["completion_ids"], []
    for pair in pairs_K:
        text = skills.render_teacher(pair, row["problem"])
        contexts_K.append(rollout.chat_ids(tokenizer, text, thinking="bare"))
    logpT_KT = scoring.score_teachers(lm, contexts_K, ids_T)
    logpS_1T = scoring.token_logprobs(lm, [row["prompt_ids"]], [ids_T])
    delta_KT = sgsd.log_prob_gap(logpT_KT, logpS_1T[0])
    return sgsd.robust_support(delta_KT, sgsd.token_mask(ids_T, masked), C_DELTA).tolist()


def score(args: Any, lm: Any, tokenizer: Any, rows: list[dict]) -> None:
    """Add to FOLDER/NAME.jsonl the solutions that it lacks, bank by bank."""
    embed = model.load_encoder(args.encoder, "cpu")
    masked = model.masked_token_ids(tokenizer) | {*rollout.stop_ids(lm, tokenizer)}
    problems = [row["problem"] for row in rows]
    for (name, path), reads in itertools.product(args.bank, args.reads):
        bank, full_name = skills.SkillBank.load(path), f"{name}_{reads}"
        file = args.folder / f"{full_name}.jsonl"
        done = {row["index"] for row in files.read_jsonl(file)}
        for row in [row for row in rows if row["index"] not in done]:
            pairs_K = pairs_read(bank, row, problems, reads, args.num_teachers, embed)
            a_K = supports_of(lm, tokenizer, masked, row, pairs_K)
            names = [[pair.skill["skill_id"], pair.mistake["mistake_id"]] for pair in pairs_K]
            files.append_jsonl(file, [{"index": row["index"], "pairs": names, "a": a_K}])
            print(full_name, row["index"], row["r"], [f"{a:+.4f}" for a in a_K], flush=True)


# ----------------------------------------------------------------------------------- the table


def auc(right: Sequence[float], wrong: Sequence[float]) -> float:
    """The chance that a right solution has a larger support than a wrong one; a tie is a half."""
    gaps = np.array(right)[:, None] - np.array(wrong)[None]
    return float((gaps > 0).mean() + (gaps == 0).mean() / 2)


def auc_interval(r_B: np.ndarray, a_BK: np.ndarray) -> tuple[float, float]:
    """95% interval of `auc`, by a bootstrap over solutions."""
    draw, values = np.random.default_rng(0), []
    for _ in range(2000):
        chosen = draw.integers(len(r_B), size=len(r_B))
        r, a = r_B[chosen], a_BK[chosen]
        if {*r} == {-1, 1}:
            values.append(auc(a[r > 0].ravel(), a[r < 0].ravel()))
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


def shown(values_B: np.ndarray, form: str) -> str:
    """A mean over solutions, with its interval where that has one."""
    low, high = bootstrap_interval([values_B])
    mean = format(values_B.mean(), form)
    return mean if low is None else f"{mean} ({low:{form}} to {high:{form}})"


def table(folder: pathlib.Path) -> Iterator[str]:
    r_of = {row["index"]: row["r"] for row in files.read_jsonl(folder / "solutions.jsonl")}
    mean_of: dict[str, dict[int, float]] = {}  # file -> solution -> mean support
    for file in sorted(folder.glob("*.jsonl")):
        rows = [*files.read_jsonl(file)] if file.name != "solutions.jsonl" else []
        mean_of |= {file.stem: {row["index"]: float(np.mean(row["a"])) for row in rows}}
    heads = [
        "bank",
        "teachers",
        "decided, %",
        "above 0, %",
        "+ on right",
        "- on right",
        "+ on wrong",
    ]
    heads += [
        "- on wrong",
        "mean support",
        "5%",
        "median",
        "95%",
        "median size",
        "AUC",
        "minus none",
    ]
    yield from head_of(heads)
    for file in sorted(folder.glob("*.jsonl")):
        rows = [*files.read_jsonl(file)] if file.name != "solutions.jsonl" else []
        if not rows:
            continue
        a_BK = np.array([row["a"] for row in rows])
        r_B = np.array([r_of[row["index"]] for row in rows])
        cells: list[str] = [file.stem, str(a_BK.size)]
        for counts_BK in (np.abs(a_BK) > EPS_A, a_BK > 0):
            cells.append(shown(100 * counts_BK.mean(1), ".1f"))
        for r in (1, -1):
            for sign in (1, -1):
                cells.append(str(int((sign * a_BK[r_B == r] > EPS_A).sum())))
        cells.append(shown(a_BK.mean(1), "+.4f"))
        cells += [f"{np.quantile(a_BK, q):+.4f}" for q in (0.05, 0.5, 0.95)]
        cells.append(f"{np.median(np.abs(a_BK)):.4f}")
        value = auc(a_BK[r_B > 0].ravel(), a_BK[r_B < 0].ravel())
        low, high = auc_interval(r_B, a_BK)
        cells.append(f"{value:.2f} ({low:.2f} to {high:.2f})")
        none = mean_of.get(file.stem.rpartition("_")[0] + "_none", {})
        gaps = [a - none[i] for i, a in mean_of[file.stem].items() if i in none]
        is_compared = gaps and not file.stem.endswith("none")
        yield row_of([*cells, shown(np.array(gaps), "+.4f") if is_compared else ""])


def named(text: str) -> tuple[str, str]:
    """NAME=FILE."""
    name, _, path = text.partition("=")
    return name, path


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("folder", type=pathlib.Path)
    add("--table", action="store_true", help="print the table of what FOLDER has")
    add("--model", help="a causal model with a chat template")
    add("--encoder", help="a sentence-transformers model")
    add("--data", type=pathlib.Path, help="problems as JSON lines")
    add("--bank", nargs="+", type=named, default=[], metavar="NAME=FILE")
    reads = ("own", "donor", "shuffled", "none")
    add("--reads", nargs="+", default=["own"], choices=reads, help="what teachers read")
    add("--solutions", type=int, default=64, help="the first N problems of --data")
    add("--num-teachers", type=int, default=2, help="pairs, each a teacher")
    add("--max-new-tokens", type=int, default=400)
    add("--dtype", default="auto", help="of the weights; bfloat16 is faster where a CPU has it")
    args = parser.parse_args(argv)
    if not args.table:
        lm, tokenizer = model.load_model(args.model, "cpu", args.dtype)
        score(args, lm, tokenizer, sample(args, lm, tokenizer))
    print("\n".join(table(args.folder)))


if __name__ == "__main__":
    main()
