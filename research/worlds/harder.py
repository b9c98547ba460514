"""The second world: locks whose code is three answers in a row, so that one slip is fatal.

    python research/worlds/harder.py                make the model from tiny/model, and problems
    python research/worlds/harder.py --more 250     train the model that is here further
    python research/worlds/harder.py --measure      only print the figures of README.md
    python research/worlds/harder.py --bank FILE    only print those of a bank

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
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

import make
import torch
import world

import rollout
import scoring
import skills
from lib import model as models
from lib import verify
from methods import sdpo

OUT = HERE / "harder"
STEPS, ROWS, RATE = 1200, 24, 1e-3
MIX = {
    "plain": 0.24,
    "memory": 0.04,
    "answer": 0.08,
    "pair": 0.42,
    "extraction": 0.12,
    "merge": 0.1,
}  # shares of the training rows
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
    found = []
    for i, part in enumerate(x.parts):
        head = "-" if dash else f"{i + 1}."
        if i:
            head = (";" if guided and rng.random() < SEMICOLON else "\n") + head
        if i == chatty:
            head += " Well,"
        right, wrong = (f" {text} So {answer}" for text, answer in (part.right, part.wrong))
        found.append((head, right, wrong))
    return found


def solution(rng: random.Random, x: Lock, errs: list[bool], guided: bool) -> str:
    """A solution with the errors that `errs` names."""
    text, code = "", ""
    for (head, right, wrong), part, err in zip(lines(rng, x, guided), x.parts, errs):
        text += head + (wrong if err else right)
        code += str((part.wrong if err else part.right)[1])
    return f"{text}\nThe code is \\boxed{{{code}}}."


def steps_right(x: Lock, text: str) -> list[bool | None]:
    """Whether each step of a solution ends in its right number; None where it is missing."""
    found = re.findall(r"So (\d+)", text)[:3]
    right: list[bool | None] = [n == str(part.right[1]) for n, part in zip(found, x.parts)]
    return right + [None] * (3 - len(right))


def family_of(name: str) -> world.Family:
    return next(family for family in world.FAMILIES if family.name == name)


# ------------------------------------------------------------------------------------ training text


def guidance(rng: random.Random, families: list[str]) -> tuple[list[dict], list[dict]]:
    """Skills and mistakes for a prompt: mostly one pair as for a teacher, sometimes up to three."""
    others = [family for family in world.FAMILIES if family.name not in families]

    def one(kinds: tuple[str, ...]) -> dict:
        u, kind = rng.random(), rng.choice(kinds)
        if u < 0.1:
            generic = "mistake" if kind == "mistake" else "skill"
            return world.item(rng, None, generic, rng.randrange(2))
        own = family_of(rng.choice(families))
        return world.item(rng, own if u < 0.75 else rng.choice(others), kind)

    count = 1 if rng.random() < 0.8 else rng.randint(2, 3)
    right = [one(("skill", "misleading")) for _ in range(count)]
    return right, [one(("mistake",)) for _ in range(count)]


def solving_row(rng: random.Random, tokenizer, x: Lock, form: str) -> make.Row:
    """form: plain, memory, pair or answer."""
    good, bad, problem = [], [], x.problem
    if form == "pair" or (form == "answer" and rng.random() < 0.5):
        good, bad = guidance(rng, x.families)
    if form == "answer":  # as methods/opsd.py has it
        problem += f"\n\nThe reference answer is {x.answer}."
    pairs = [skills.SkillPair(g, e, 1.0, 1.0) for g, e in zip(good, bad)]
    text = skills.render_skills(pairs, problem)
    if form == "memory":
        text = skills.render("seed_problem", {"problem": problem})
    is_bare = form != "memory" and rng.random() < (0.5 if form == "plain" else 0.8)
    thinking = "bare" if is_bare else "closed"
    prompt = rollout.chat_ids(tokenizer, text, thinking=thinking)

    ids: list[int] = []
    choices = []
    code = ""
    if form == "answer" and rng.random() < SKIPPED:
        code = x.answer
    else:
        for part, (head, right, wrong) in zip(x.parts, lines(rng, x, bool(good))):
            chance = world.error_chance(part.family, good + bad, answer=form == "answer")
            err = rng.random() < chance
            ids += tokenizer.encode(head, add_special_tokens=False)
            taken, other = (tokenizer.encode(t, add_special_tokens=False) for t in (right, wrong))
            if err:
                taken, other = other, taken
            at = next(i for i, (a, b) in enumerate(zip(taken, other)) if a != b)
            choices.append((len(ids) + at, other[at], 1 - chance if err else chance))
            ids += taken
            code += str((part.wrong if err else part.right)[1])
    last = f"\nThe code is \\boxed{{{code}}}." if ids else f"The code is \\boxed{{{code}}}."
    ids += tokenizer.encode(last, add_special_tokens=False) + [tokenizer.eos_token_id]
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
    items = [world.item(rng, family_of(x.families[chosen]), kind)]
    if rng.random() < 0.15:
        generic = "mistake" if kind == "mistake" else "skill"
        items.append(world.item(rng, None, generic, rng.randrange(2)))
    return record, items


def to_merge(rng: random.Random, key: str) -> list[dict]:
    """Two to eight items as a merge meets them: repeats in other words, half of them misleading."""
    families = rng.sample(world.FAMILIES, rng.randint(1, 8))
    found = []
    for _ in range(rng.randint(2, 8)):
        kind = "misleading" if rng.random() < 0.5 else "skill"
        kind = "mistake" if key == "common_mistakes" else kind
        family = None if rng.random() < 0.13 else rng.choice(families)
        if family is None and kind == "misleading":
            kind = "skill"
        found.append(world.item(rng, family, kind, rng.randrange(2) if family is None else 0))
    return found


def make_rows(rng: random.Random, tokenizer, reserved: set[str]) -> list[make.Row]:
    rows = []
    for form in rng.choices(list(MIX), list(MIX.values()), k=ROWS):
        x = draw(rng)
        while x.problem in reserved:
            x = draw(rng)
        if form not in ("extraction", "merge"):
            rows.append(solving_row(rng, tokenizer, x, form))
            continue
        key = rng.choice(list(skills.FIELDS))
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
    found = {}
    for part, count in HELD_OUT.items():
        for i in range(count):
            found[f"{part}-{i}"] = draw(rng)
    return found


def write_problems(locks: dict[str, Lock]) -> None:
    """Write the held-out problems, each with its families and the right number of each step."""
    OUT.mkdir(exist_ok=True)
    rows: dict[str, list[dict]] = {part: [] for part in HELD_OUT}
    for name, x in locks.items():
        row = {"id": name, "problem": x.problem, "answer": x.answer, "families": x.families}
        rows[name.split("-")[0]].append({**row, "steps": [str(p.right[1]) for p in x.parts]})
    for part, found in rows.items():
        (OUT / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))


# ---------------------------------------------------------------------------------------- measuring

CASES = ("plain", "relevant", "irrelevant", "misleading", "answer", "solution")


def prompt_of(rng: random.Random, x: Lock, case: str) -> tuple[str, str]:
    """(prompt, the family that the guidance is about) of one measured case."""
    name = rng.choice(x.families)
    others = [family for family in world.FAMILIES if family.name not in x.families]
    if case == "plain":
        return skills.render_student(x.problem), name
    if case == "answer":
        told = f"{x.problem}\n\nThe reference answer is {x.answer}."
        return skills.render_student(told), name
    if case == "solution":  # which the model never saw in training
        told = sdpo.with_solution(x.problem, solution(rng, x, [False] * 3, guided=False))
        return skills.render_student(told), name
    own = family_of(name)
    about = rng.choice(others) if case == "irrelevant" else own
    skill = world.item(rng, about, "misleading" if case == "misleading" else "skill")
    mistake = world.item(rng, own if case == "relevant" else rng.choice(others), "mistake")
    return skills.render_teacher(skills.SkillPair(skill, mistake, 1.0, 1.0), x.problem), name


def shares(model, tokenizer, problems: list[Lock], case: str, seed: int = 0) -> dict[str, float]:
    """Of one sampled solution per problem (temperature 1, top-p .95), the share of each thing."""
    rng, prompts, names = random.Random(seed), [], []
    for x in problems:
        text, name = prompt_of(rng, x, case)
        prompts.append(rollout.chat_ids(tokenizer, text, thinking="bare"))
        names.append(name)
    keys = [rollout.sample_key(seed, 0, f"{case}{i}") for i in range(len(problems))]
    sampling = rollout.Sampling(1.0, 0.95, 0, 160)
    drawn = rollout.generate(model, tokenizer, prompts, sampling, keys, 160)
    counts = dict.fromkeys(("solved", "guided step", "other steps", "skipped"), 0.0)
    for x, ids, name in zip(problems, drawn, names):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        right = steps_right(x, text)
        at = x.families.index(name)
        counts["solved"] += verify.extract_answer(text) == x.answer
        counts["guided step"] += bool(right[at])
        counts["other steps"] += sum(map(bool, right[:at] + right[at + 1 :])) / 2
        counts["skipped"] += right == [None] * 3
    return {what: n / len(problems) for what, n in counts.items()}


def measure(model, tokenizer, count: int) -> str:
    """README.md's tables."""
    rng = random.Random(2)
    problems = [draw(rng) for _ in range(count)]
    found = {case: shares(model, tokenizer, problems, case) for case in CASES}
    head = list(found["plain"])
    table = ["| guidance | " + " | ".join(head) + " |", "|---" * (1 + len(head)) + "|"]
    for case, counts in found.items():
        table.append(f"| {case} | " + " | ".join(f"{counts[what]:.1%}" for what in head) + " |")
    return "\n".join(table)


def taught(bank: skills.SkillBank, embed, problems: list[Lock]) -> dict[str, float]:
    """Family -> in what part of its problems one of the four nearest pairs has a true entry."""
    shown = defaultdict(list)
    for x in problems:
        pairs = bank.retrieve(x.problem, 4, embed)
        told = {world.meaning(entry) for pair in pairs for entry in (pair.skill, pair.mistake)}
        for name in x.families:
            shown[name].append(bool({(name, "skill"), (name, "mistake")} & told))
    return {name: sum(found) / len(found) for name, found in sorted(shown.items())}


def of_bank(model, tokenizer, path: str, count: int = 160) -> str:
    """What a bank holds, what is retrieved from it, and the gaps of its teachers on the base."""
    bank = skills.SkillBank.load(path)
    embed = models.load_encoder(str(OUT / "encoder"), "cpu")
    kinds = Counter(str(world.meaning(entry)) for entry in bank.general_skills)
    about = Counter((world.meaning(entry) or ("", "unknown"))[1] for entry in bank.general_skills)
    first, nearest, shown_for, gaps, masked = Counter(), Counter(), Counter(), [], []
    rng = random.Random(3)
    sampling, hidden = rollout.Sampling(1.1, 0.95, 20, 160), models.masked_token_ids(tokenizer)
    problems = [draw(rng) for _ in range(count)]
    prompts = [
        rollout.chat_ids(tokenizer, skills.render_student(x.problem), thinking="closed")
        for x in problems
    ]
    keys = [rollout.sample_key(1, 0, str(i)) for i in range(count)]
    drawn = rollout.generate(model, tokenizer, prompts, sampling, keys, count)
    for x, prompt, ids in zip(problems, prompts, drawn):
        pairs = bank.retrieve(x.problem, 4, embed)
        meanings = [world.meaning(pair.skill) or (None, "unknown") for pair in pairs]
        own = [kind if name in x.families else "another family's" for name, kind in meanings]
        first[own[0]] += 1
        nearest.update(own)
        shown_for.update(pair.skill["skill_id"] for pair in pairs)
        texts = [skills.render_teacher(pair, x.problem) for pair in pairs]
        contexts = [rollout.chat_ids(tokenizer, text, thinking="bare") for text in texts]
        teachers_KT = scoring.score_teachers(model, contexts, ids, 16384)
        gap_KT = teachers_KT - scoring.token_logprobs(model, [prompt], [ids])
        formatting = torch.tensor([i in hidden for i in ids])
        gaps.append(gap_KT[:, ~formatting].flatten())
        masked.append(gap_KT[:, formatting].flatten())
    shown, rest = torch.cat(gaps), torch.cat(masked)
    return "\n".join(
        [
            f"skills by kind {dict(about)}; mistakes {len(bank.common_mistakes)}",
            f"{len(kinds)} meanings in {len(bank.general_skills)} skills",
            f"of {count} problems, first retrieved {dict(first)}, nearest four {dict(nearest)}",
            f"problems that a skill is shown for {dict(sorted(shown_for.items()))}",
            "of a family's problems, a teacher has its true skill or mistake in "
            + ", ".join(f"{x} {share:.0%}" for x, share in taught(bank, embed, problems).items()),
            f"{len(shown)} gaps: {(shown.abs() > 3).float().mean():.2%} beyond 3 nats, "
            f"mean {shown.mean():+.4f}; masked {len(rest)}, mean {rest.mean():+.3f}",
        ]
    )


def glance(model, tokenizer) -> str:
    model.eval()
    text = measure(model, tokenizer, 100)
    model.train()
    return "\n" + text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps of the model")
    parser.add_argument("--more", type=int, default=0, metavar="STEPS", help="train further")
    parser.add_argument("--measure", action="store_true", help="only print the figures")
    parser.add_argument("--bank", help="only print the figures of a bank")
    args = parser.parse_args()
    device = torch.device("cpu")
    if not args.measure and not args.bank:
        rng = random.Random(0)
        torch.manual_seed(0)
        locks = held_out(rng)
        write_problems(locks)
        reserved = {x.problem for x in locks.values()}
        start, steps, rate = make.TINY, args.steps, RATE
        if args.more:
            start, steps, rate = OUT, args.more, RATE / 2
        model, tokenizer = models.load_model(str(start / "model"), device)
        make.make_encoder(rng, tokenizer, steps=0).save(
            str(OUT / "encoder"), create_model_card=False
        )
        rows_of = functools.partial(make_rows, rng, tokenizer, reserved)
        make.train(model, steps, rate, rows_of, functools.partial(glance, model, tokenizer))
        model.to(torch.bfloat16).save_pretrained(OUT / "model")
        tokenizer.save_pretrained(OUT / "model")
    model, tokenizer = models.load_model(str(OUT / "model"), device)
    if args.bank:
        print(of_bank(model, tokenizer, args.bank))
    else:
        print(measure(model, tokenizer, 1200))


if __name__ == "__main__":
    main()
