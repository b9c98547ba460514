"""What polarity does with true and misleading skills, on a base model's own failures.

    python research/dark/polarity.py runs/dark/base-1 runs/dark/dark_fresh.jsonl
    python research/dark/polarity.py research/worlds/harder/model research/worlds/harder/train.jsonl

First the right steps of 480 plain solutions, by family. Then each failure is scored under six
teachers: for each of its steps the true and the misleading skill, each beside a mistake of a family
that the lock does not have. In a row are the skill and whether its own step is right; then how many
teachers are distilled, reversed and ignored.
"""

import argparse
import pathlib
import random
import sys
from collections import Counter

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "research" / "worlds")]

import dark
import fast
import torch
import world

import rollout
import scoring
import sgsd
import skills
from lib import model as models
from lib import verify
from lib.config import PRESETS, Config
from research.markdown_table import head_of, row_of

FATES = {1: "distilled", -1: "reversed", 0: "ignored"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("base", help="folder of a model")
    parser.add_argument("problems", type=pathlib.Path, help="locks, with families and steps")
    parser.add_argument("--failures", type=int, default=200)
    parser.add_argument("--locks", type=int, default=480)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lm, tokenizer = models.load_model(args.base, torch.device("cpu"))
    masked = models.masked_token_ids(tokenizer) | {*rollout.stop_ids(lm, tokenizer)}
    jobs = []
    for i, x in enumerate(dark.read_problems(args.problems)[: args.locks]):
        text, key = skills.render_student(x["problem"]), rollout.sample_key(0, 0, x["id"])
        prompt = rollout.chat_ids(tokenizer, text, thinking=dark.PREFIX)
        jobs.append(rollout.Job(i, prompt, key=key, tokens_left=160, problem=x))
    fast.sample(lm, tokenizer, jobs, dark.SAMPLING)
    texts = [rollout.text_of(tokenizer, job.ids) for job in jobs]
    for name, (right, steps) in dark.by_family([job.problem for job in jobs], texts).items():
        print(name, dark.interval(right, steps))
    counts: dict[tuple[str, str], Counter] = {}
    rng, failures = random.Random(0), 0
    for job, text in zip(jobs, texts):
        x = job.problem
        if verify.extract_answer(text) == x["answer"] or failures == args.failures:
            continue
        failures += 1
        contexts, about = [], []
        others = [family for family in world.FAMILIES if family.name not in x["families"]]
        for name, right in zip(x["families"], dark.steps_right(text, x["steps"])):
            for kind in ("skill", "misleading"):
                skill = world.item(None, world.family_of(name), kind)
                pair = skills.SkillPair(
                    skill, world.item(None, rng.choice(others), "mistake"), 0, 0
                )
                prompt = skills.render_teacher(pair, x["problem"])
                contexts.append(rollout.chat_ids(tokenizer, prompt, thinking=Config.teacher_prefix))
                about.append((kind, "right" if right else "wrong"))
        with torch.no_grad():
            logpT_KT = scoring.score_teachers(lm, contexts, job.ids)
            logpS_T = scoring.score_student(lm, job.prompt, job.ids)
        gaps_KT, mask_T = sgsd.log_prob_gap(logpT_KT, logpS_T), sgsd.token_mask(job.ids, masked)
        a_K = sgsd.robust_support(gaps_KT, mask_T, Config.c_delta)
        for which, rho in zip(about, sgsd.polarity(a_K, -1, PRESETS["tiny"]["eps_a"]).tolist()):
            counts.setdefault(which, Counter())[FATES[rho]] += 1
    print(failures, "failures")
    print("\n".join(head_of(["skill", "its step", "teachers", *FATES.values()])))
    for which, of_row in sorted(counts.items()):
        cells = [f"{dark.interval(of_row[x], of_row.total())}: {of_row[x]}" for x in FATES.values()]
        print(row_of([*which, of_row.total(), *cells]))


if __name__ == "__main__":
    main()
