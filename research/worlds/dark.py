"""The dark world: locks of which the base model solves about one in ten thousand.

    python research/worlds/dark.py                  two bases and the problems, into runs/dark
    python research/worlds/dark.py --measure 6000   what the bases do, on as many fresh locks

A base is the harder world's model, trained a little further on the harder world's text, in which
four of the eight families err with other odds: log-odds of the error HARD in the place of
world.BASE. Skills, mistakes and misleading skills shift them as before. A lock has three of the
four. HARD was chosen by what a base does without guidance, before any method was run.
"""

import argparse
import functools
import json
import math
import pathlib
import random
import re
import shutil
import sys
from collections.abc import Iterator

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

import harder
import make
import torch
import world

import skills
from lib import model as models
from lib import verify
from research.markdown_table import head_of, row_of
from rollout import Sampling

OUT = HERE.parents[1] / "runs" / "dark"
DARK, HARD = ("carry", "count", "boats", "order"), 2.9
STEPS, RATE, SEEDS = 160, 1e-3, (1, 2)
HELD_OUT = {"dark_train": 2400, "dark_test": 160, "dark_fresh": 6000}
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=160)
PREFIX = "closed"  # of all prompts of a student, in training and in evaluations
CASES = ("relevant", "irrelevant", "misleading")

usual_chance = world.error_chance


def error_chance(family: str, guidance: list[dict], answer: bool = False) -> float:
    """`world.error_chance`, with HARD in the place of BASE for the dark families."""
    chance = usual_chance(family, guidance, answer)
    odds = math.log(chance / (1 - chance)) + (HARD - world.BASE if family in DARK else 0)
    return 1 / (1 + math.exp(-odds))


def draw(rng: random.Random) -> harder.Lock:
    """A lock of three dark families."""
    return harder.Lock(tuple(world.draw(rng, world.family_of(x)) for x in rng.sample(DARK, 3)))


def write_problems(out: pathlib.Path) -> set[str]:
    """Write the held-out locks as the harder world does; the texts of all locks held out."""
    rng = random.Random(77)
    reserved = {x.problem for x in harder.held_out(random.Random(0)).values()}
    out.mkdir(parents=True, exist_ok=True)
    for part, count in HELD_OUT.items():
        with open(out / f"{part}.jsonl", "w") as file:
            for i in range(count):
                x = draw(rng)
                while x.problem in reserved:
                    x = draw(rng)
                reserved.add(x.problem)
                steps = [str(drawn.right[1]) for drawn in x.parts]
                row = {"id": f"{part}-{i}", "problem": x.problem, "answer": x.answer}
                print(json.dumps({**row, "families": x.families, "steps": steps}), file=file)
    return reserved


def read_problems(file: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in open(file)]


def make_base(out: pathlib.Path, seed: int, reserved: set[str]) -> None:
    """Train the harder world's model further, on what the dark world's model writes."""
    torch.manual_seed(seed)
    make.BF16, world.error_chance = False, error_chance
    model, tokenizer = models.load_model(str(harder.OUT / "model"), torch.device("cpu"))
    rows = functools.partial(harder.make_rows, random.Random(seed), tokenizer, reserved)
    make.train(model, STEPS, RATE, rows)
    model.to(torch.bfloat16).save_pretrained(out / f"base-{seed}")
    tokenizer.save_pretrained(out / f"base-{seed}")


def save_full_bank(file: pathlib.Path) -> None:
    """Every family's true skill and true mistake, in the canonical wording."""
    right, wrong = [], []
    for family in world.FAMILIES:
        right.append({"skill_id": f"gen_{family.name}", **world.item(None, family, "skill")})
        wrong.append({"mistake_id": f"err_{family.name}", **world.item(None, family, "mistake")})
    skills.SkillBank(right, wrong).save(file)


# ------------------------------------------------------------------------------------- measuring


def steps_right(text: str, steps: list[str]) -> list[bool]:
    """Whether each step of a solution ends in its right number."""
    got = re.findall(r"So (\d+)", text)
    return [got[i : i + 1] == [right] for i, right in enumerate(steps)]


def by_family(rows: list[dict], texts: list[str]) -> dict[str, list[int]]:
    """{family: [right steps, steps]}."""
    counts: dict[str, list[int]] = {}
    for x, text in zip(rows, texts, strict=True):
        for family, ok in zip(x["families"], steps_right(text, x["steps"]), strict=True):
            of_family = counts.setdefault(family, [0, 0])
            of_family[0] += ok
            of_family[1] += 1
    return dict(sorted(counts.items()))


def solved(rows: list[dict], texts: list[str]) -> int:
    return sum(verify.extract_answer(text) == x["answer"] for x, text in zip(rows, texts))


def guided(rng: random.Random, x: dict, case: str) -> tuple[str, str]:
    """A prompt with one pair, and the family of the step that it is about (if it is)."""
    own = world.family_of(rng.choice(x["families"]))
    other = rng.choice([f for f in world.FAMILIES if f.name not in x["families"]])
    kind = "misleading" if case == "misleading" else "skill"
    skill = world.item(rng, other if case == "irrelevant" else own, kind)
    mistake = world.item(rng, own if case == "relevant" else other, "mistake")
    pair = skills.SkillPair(skill, mistake, 1.0, 1.0)
    return skills.render_teacher(pair, x["problem"]), own.name


def measure(base: pathlib.Path, rows: list[dict]) -> Iterator[tuple[str, list[int]]]:
    """Solved locks and right steps: a plain sample of each lock, guided ones of every eighth."""
    model, tokenizer = models.load_model(str(base), torch.device("cpu"))
    prompts = [skills.render_student(x["problem"]) for x in rows]
    texts = make.replies_to(model, tokenizer, prompts, PREFIX, SAMPLING, "plain")
    yield "plain", [solved(rows, texts), len(rows)]
    yield from by_family(rows, texts).items()
    few = rows[::8]
    for case in CASES:
        rng = random.Random(0)
        prompts, own = zip(*[guided(rng, x, case) for x in few])
        texts = make.replies_to(model, tokenizer, [*prompts], PREFIX, SAMPLING, case)
        yield case, [solved(few, texts), len(few)]
        right = 0
        for text, x, family in zip(texts, few, own):
            right += steps_right(text, x["steps"])[x["families"].index(family)]
        yield f"{case}: its step", [right, len(few)]


def interval(right: int, count: int) -> str:
    """A share with its 95% Wilson interval."""
    return make.interval([True] * right + [False] * (count - right))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--out", type=pathlib.Path, default=OUT, help="folder of bases and problems")
    add("--seeds", type=int, nargs="+", default=SEEDS, help="of the bases")
    add("--measure", type=int, default=0, metavar="N", help="only measure, on N fresh locks")
    args = parser.parse_args()
    if not args.measure:
        reserved = write_problems(args.out)
        save_full_bank(args.out / "full_bank.json")
        shutil.copytree(harder.OUT / "encoder", args.out / "encoder", dirs_exist_ok=True)
        for seed in args.seeds:
            make_base(args.out, seed, reserved)
        return
    rows = read_problems(args.out / "dark_fresh.jsonl")[: args.measure]
    for seed in args.seeds:
        found = {}
        print("\n".join(head_of(["base", seed])))
        for name, (right, count) in measure(args.out / f"base-{seed}", rows):
            print(row_of([name, f"{interval(right, count)}, {right} of {count}"]), flush=True)
            found[name] = [right, count]
            (args.out / f"base-{seed}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
