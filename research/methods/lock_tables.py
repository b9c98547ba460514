"""Figures of this folder's README.md that are computed from compare_lock.json.

    python research/methods/lock_tables.py

A problem is covered if its seed's bank shows all three of its families, each in 30% of its
problems or more. Differences are in points with Student's 95% intervals, paired by seed. A bank's
tokens are counted if compare.py has made all five banks in runs/compare_lock.
"""

import argparse
import json
import pathlib
import random
import statistics
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tiny")]

import harder as lock
import world
from transformers import AutoTokenizer

import skills
from lib import files, model
from research.methods import compare

SEEDS, OTHERS = range(5), ("grpo", "grpo, sampled as sgsd")


def covered(banks: list[skills.SkillBank], embed) -> list[set[str]]:
    """Each bank's test problems whose families it shows; prints how true the nearest skills are."""
    rng, tests = random.Random(3), list(files.read_jsonl(lock.OUT / "test.jsonl"))
    problems, found, nearest, drawn = [lock.draw(rng) for _ in range(160)], [], [], []
    for bank in banks:
        shares = lock.taught(bank, embed, problems)
        shown = {name for name, share in shares.items() if share >= 0.3}
        found.append({x["id"] for x in tests if {*x["families"]} <= shown})
        for x in problems:
            true = {(name, "skill") for name in x.families}
            pairs = bank.retrieve(x.problem, 4, embed)
            nearest += [world.meaning(pair.skill) in true for pair in pairs]
            drawn.append(statistics.mean(world.meaning(s) in true for s in bank.general_skills))
    near, any_four = statistics.mean(nearest), statistics.mean(drawn)
    print(f"true skills: {near:.1%} of the four nearest, {any_four:.1%} of four drawn at random")
    return found


def work_of(seed: int) -> pathlib.Path:
    """What the making of a bank has left."""
    return ROOT / f"runs/compare_lock/bank_made_{seed}.json.work"


def bank_tokens(tokenizer, seed: int) -> list[int]:
    """Tokens of a bank's seed solutions and of the replies that made it, stop ids included."""
    folder, counts = work_of(seed), []
    for name, field in (("memories", "completion"), ("replies", "reply")):
        texts = [row[field] for row in files.read_jsonl(folder / f"{name}.jsonl")]
        counts.append(sum(len(tokenizer.encode(x, add_special_tokens=False)) + 1 for x in texts))
    return counts


def main(argv: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0]).parse_args(argv)
    w = compare.WORLDS["lock"]
    results = json.loads((ROOT / "research/methods/compare_lock.json").read_text())
    banks = []
    for seed in SEEDS:
        lists = results["banks"][f"bank-{seed}"]["bank"]
        banks.append(skills.SkillBank(lists["general_skills"], lists["common_mistakes"]))
    runs = results["results"]
    inside = covered(banks, model.load_encoder(str(lock.OUT / "encoder"), "cpu"))
    print(f"covered problems by seed: {[len(ids) for ids in inside]}")
    for name in ("sgsd, other bank", "grpo, sampled as sgsd", compare.FULL):
        means: dict[bool, list[float]] = {True: [], False: []}
        for seed, ids in zip(SEEDS, inside):
            scores = runs[f"{name}-{seed}"]["last_scores"]
            for where, found in means.items():
                found.append(statistics.mean(s for x, s in scores.items() if (x in ids) == where))
        shown = [compare.with_interval(found) for found in means.values()]
        shown.append(compare.with_interval([a - b for a, b in zip(*means.values())], "+"))
        print(f"{name}: covered {shown[0]}, others {shown[1]}, difference {shown[2]}")
    for ours in ("sgsd", compare.FULL):
        for name in OTHERS:
            cheapest = min(runs[f"{name}-{seed}"]["forward_tokens"] for seed in SEEDS)
            budgets = [("generated_tokens", x) for x in (10_000, 20_000, 60_000)]
            for cost, budget in [*budgets, ("forward_tokens", cheapest)]:
                both = [compare.at_cost(w, runs, x, SEEDS, cost, budget) for x in (name, ours)]
                gap = compare.with_interval([a - b for a, b in zip(*both)], "+")
                print(f"{name} - {ours} at {budget:,} {cost.replace('_', ' ')}: {gap}")
    for name in ("random retrieval", "sgsd", *OTHERS):
        gaps = []
        for step in map(str, w.points):
            ends = [runs[f"{x}-{s}"]["accuracy"][step] for x in (compare.FULL, name) for s in SEEDS]
            gaps.append(compare.with_interval([a - b for a, b in zip(ends[:5], ends[5:])], "+"))
        print(f"{compare.FULL} - {name} after {w.points} steps: {', '.join(gaps)}")
    if not all(work_of(seed).exists() for seed in SEEDS):
        return
    tokenizer = AutoTokenizer.from_pretrained(lock.OUT / "model")
    counts = [bank_tokens(tokenizer, seed) for seed in SEEDS]
    print(f"tokens of a bank's solutions and replies: {[statistics.mean(x) for x in zip(*counts)]}")


if __name__ == "__main__":
    main()
