"""The second world: locks whose code is three answers in a row, so that one slip is fatal.

    python research/worlds/harder.py                make the model from tiny/model, and problems
    python research/worlds/harder.py --more 250     train the model that is here further

A problem asks for three numbers, each a problem of one of world.py's eight families, and its
answer is the three written as one number. A step errs with the odds of world.py, on its own. What
else is different:

- with guidance in the prompt the model writes differently: a semicolon where it would break the
  line, now and then another mark at a line's head, and never the "Well," that it sometimes puts
  there when it is alone;
- with the reference answer in the prompt it skips the steps more often than not;
- of a success it draws a skill of one of the three steps, and of the third one mostly the
  misleading skill;
- its encoder is untrained, a random vector per token, so that retrieval goes by common words.

The world was chosen by what the base model does, before any method was run on it, but for six
timed steps of SGSD.
"""

import argparse
import functools
import json
import pathlib
import random
import sys
from dataclasses import dataclass
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

import make
import torch
import world

import rollout
import skills
from lib import model as models

OUT = HERE / "harder"
STEPS, ROWS, RATE = 1200, 24, 1e-3
FORMS = ("plain", "memory", "answer", "pair", "extraction", "merge")  # of a training row
MIX = dict(zip(FORMS, (0.24, 0.04, 0.08, 0.42, 0.12, 0.1)))  # their shares
HELD_OUT = {"train": 2400, "valid": 160, "test": 160}  # problems that the model never sees here
MISLEADING = (0.1, 0.2, 0.9)  # chance that a skill drawn from a success misleads, by its step
SEMICOLON, DASH, WELL = 0.95, 0.5, 0.2  # the first two under guidance, the last without
SKIPPED = 0.6  # chance of no steps at all when the answer stands in the prompt


@dataclass(frozen=True)
class Lock:
    """A problem of three parts."""

    parts: tuple[world.Drawn, ...]

    @property
    def families(self) -> list[str]:
        return [part.family for part in self.parts]

    @property
    def problem(self) -> str:
        first, second, third = (part.problem for part in self.parts)
        asked = f"First: {first} Second: {second} Third: {third}"
        return f"A lock has a code of three numbers in a row. {asked} What is the code?"

    @property
    def answer(self) -> str:
        return "".join(str(part.right[1]) for part in self.parts)


def draw(rng: random.Random) -> Lock:
    return Lock(tuple(world.draw(rng, family) for family in rng.sample(world.FAMILIES, 3)))


def lines(rng: random.Random, x: Lock, guided: bool) -> list[tuple[str, str, str]]:
    """Each step as (what stands before it, its right form, its wrong form)."""
    dash = guided and rng.random() < DASH
    chatty = rng.randrange(3) if not guided and rng.random() < WELL else -1
    steps = []
    for i, part in enumerate(x.parts):
        head = "-" if dash else f"{i + 1}."
        if i:
            head = (";" if guided and rng.random() < SEMICOLON else "\n") + head
        if i == chatty:
            head += " Well,"
        right, wrong = (f" {text} So {answer}" for text, answer in (part.right, part.wrong))
        steps.append((head, right, wrong))
    return steps


def code_of(x: Lock, errs: list[bool]) -> str:
    """The code that a solution with these errors ends in."""
    return "".join(str((p.wrong if err else p.right)[1]) for p, err in zip(x.parts, errs))


def solution(rng: random.Random, x: Lock, errs: list[bool], guided: bool) -> str:
    """A solution with the errors that `errs` names."""
    text = ""
    for (head, right, wrong), err in zip(lines(rng, x, guided), errs):
        text += head + (wrong if err else right)
    return f"{text}\nThe code is \\boxed{{{code_of(x, errs)}}}."


# ------------------------------------------------------------------------------------ training text


def guidance(rng: random.Random, families: list[str]) -> tuple[list[dict], list[dict]]:
    """Skills and mistakes for a prompt: mostly one pair as for a teacher, sometimes up to three."""
    others = [family for family in world.FAMILIES if family.name not in families]

    def one(kinds: tuple[str, ...]) -> dict:
        u, kind = rng.random(), rng.choice(kinds)
        if u < 0.1:
            return make.says_nothing(rng, kind)
        own = world.family_of(rng.choice(families))
        return world.item(rng, own if u < 0.75 else rng.choice(others), kind)

    count = 1 if rng.random() < 0.8 else rng.randint(2, 3)
    right = [one(("skill", "misleading")) for _ in range(count)]
    return right, [one(("mistake",)) for _ in range(count)]


def solving_row(rng: random.Random, tokenizer: Any, x: Lock, form: str) -> make.Row:
    """form: plain, memory, pair or answer."""
    good, bad, problem = [], [], x.problem
    if form == "pair" or (form == "answer" and rng.random() < 0.5):
        good, bad = guidance(rng, x.families)
    if form == "answer":  # as methods/opsd.py has it
        problem += f"\n\nThe reference answer is {x.answer}."
    pairs = [skills.SkillPair(g, e, 1.0, 1.0) for g, e in zip(good, bad)]
    text = skills.render_skills(pairs, problem)
    if form == "memory":
        text = skills.render("seed_problem", {"problem": x.problem})
    prompt = rollout.chat_ids(tokenizer, text, thinking=make.thinking_of(rng, form))

    ids: list[int] = []
    choices, errs = [], []
    if form == "answer" and rng.random() < SKIPPED:
        last = f"The code is \\boxed{{{x.answer}}}."
    else:
        for part, (head, right, wrong) in zip(x.parts, lines(rng, x, bool(good))):
            chance = world.error_chance(part.family, good + bad, answer=form == "answer")
            err = rng.random() < chance
            ids += make.ids_of(tokenizer, head)
            taken, other = (make.ids_of(tokenizer, text) for text in (right, wrong))
            if err:
                taken, other = other, taken
            at = make.first_difference(taken, other)
            choices.append((len(ids) + at, other[at], 1 - chance if err else chance))
            ids += taken
            errs.append(err)
        last = f"\nThe code is \\boxed{{{code_of(x, errs)}}}."
    ids += [*make.ids_of(tokenizer, last), tokenizer.eos_token_id]
    weights = [1.0] * len(ids)
    for at, *_ in choices:
        weights[at] = 4.0
    return make.Row(prompt, ids, weights, choices)


def memory(rng: random.Random, x: Lock, key: str) -> tuple[dict, list[dict]]:
    """A memory record and the items that are drawn from it."""
    errs = [False] * 3
    chosen = rng.randrange(3)
    kind = "misleading" if rng.random() < MISLEADING[chosen] else "skill"
    if key == "common_mistakes":
        errs = [rng.random() < 0.5 for _ in range(3)]
        errs[chosen] = True
        kind = "mistake"
    record = make.memory_of(x.problem, solution(rng, x, errs, False), -1 if any(errs) else 1)
    items = [world.item(rng, world.family_of(x.families[chosen]), kind)]
    if rng.random() < 0.15:
        items.append(make.says_nothing(rng, kind))
    return record, items


def to_merge(rng: random.Random, key: str) -> list[dict]:
    """Two to eight items as a merge meets them: repeats in other words, half of them misleading."""
    families = rng.sample(world.FAMILIES, rng.randint(1, 8))
    entries = []
    for _ in range(rng.randint(2, 8)):
        kind = "misleading" if rng.random() < 0.5 else "skill"
        kind = "mistake" if key == "common_mistakes" else kind
        if rng.random() < 0.13:
            entries.append(make.says_nothing(rng, kind))
        else:
            entries.append(world.item(rng, rng.choice(families), kind))
    return entries


def make_rows(rng: random.Random, tokenizer: Any, reserved: set[str]) -> list[make.Row]:
    rows = []
    for form in rng.choices(list(MIX), list(MIX.values()), k=ROWS):
        x = draw(rng)
        while x.problem in reserved:
            x = draw(rng)
        if form not in ("extraction", "merge"):
            rows.append(solving_row(rng, tokenizer, x, form))
            continue
        key = rng.choice(list(skills.KINDS))
        if form == "extraction":
            record, items = memory(rng, x, key)
            text = skills.render_extraction(record, key)
        else:
            group = to_merge(rng, key)
            text, items = skills.render_merge(group, key), world.canonical(group, key)
        rows.append(make.json_row(rng, tokenizer, text, items, key))
    return rows


def held_out(rng: random.Random) -> dict[str, Lock]:
    """The held-out problems by their ids."""
    return {f"{part}-{i}": draw(rng) for part, count in HELD_OUT.items() for i in range(count)}


def write_problems(locks: dict[str, Lock]) -> None:
    """Write the held-out problems, each with its families and the right number of each step."""
    OUT.mkdir(exist_ok=True)
    rows: dict[str, list[dict]] = {part: [] for part in HELD_OUT}
    for name, x in locks.items():
        row = {"id": name, "problem": x.problem, "answer": x.answer, "families": x.families}
        rows[name.split("-")[0]].append({**row, "steps": [str(p.right[1]) for p in x.parts]})
    for part, of_part in rows.items():
        (OUT / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_part))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps of the model")
    parser.add_argument("--more", type=int, default=0, metavar="STEPS", help="train further")
    args = parser.parse_args()
    rng = random.Random(0)
    torch.manual_seed(0)
    locks = held_out(rng)
    write_problems(locks)
    reserved = {x.problem for x in locks.values()}
    start, steps, rate = make.TINY, args.steps, RATE
    if args.more:
        start, steps, rate = OUT, args.more, RATE / 2
    model, tokenizer = models.load_model(str(start / "model"), torch.device("cpu"))
    encoder = make.make_encoder(rng, tokenizer, steps=0)
    encoder.save(str(OUT / "encoder"), create_model_card=False)
    make.train(model, steps, rate, functools.partial(make_rows, rng, tokenizer, reserved))
    model.to(torch.bfloat16).save_pretrained(OUT / "model")
    tokenizer.save_pretrained(OUT / "model")


if __name__ == "__main__":
    main()
