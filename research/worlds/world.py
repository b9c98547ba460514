r"""The arithmetic world: eight families of word problems, each with a typical error, a true skill, a
true mistake and a misleading skill; and the text that a model of this world writes.

How often a solution falls into its family's error depends on the guidance in the prompt:

    log-odds of the error = BASE - 1.7 per relevant skill or mistake + 2.2 per misleading skill

Anything about another family changes nothing. wordings.json has two wordings of each field of each
item, the canonical one first; "nothing 0" and "nothing 1" are true of anything, and of no help.
"""

import json
import math
import pathlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from skills import KINDS

BASE, RELEVANT, MISLEADING = 0.05, -1.7, 2.2  # log-odds
ANSWER = -3.0  # the same, where the reference answer stands in the prompt
NAMES = "Ann Ben Cara Dan Eva Finn Gina Hugo Iris Jack Kate Leo Mia Noah Olga Paul".split()
KEYS = {"skill": "general_skills", "misleading": "general_skills", "mistake": "common_mistakes"}
WORDINGS = json.loads(pathlib.Path(__file__).with_name("wordings.json").read_text())
Steps = tuple[str, int]  # a solution's lines and its answer
Texts = tuple[tuple[str, ...], Steps, Steps]  # wordings of a problem; right solution, wrong one


@dataclass(frozen=True)
class Family:
    """draw(rng, name): a problem of this family, about somebody of that name."""

    name: str
    draw: Callable[[random.Random, str], Texts]


def carry(rng: random.Random, n: str) -> Texts:
    x = rng.randint(2, 9)
    y = rng.randint(10 - x if x < 9 else 1, 9)
    t = rng.randint(1, 7)
    u = rng.randint(1, 8 - t)
    a, b, thing = 10 * t + x, 10 * u + y, rng.choice("pens coins cards books shells stamps".split())
    problems = (
        f"{n} has {a} {thing} and gets {b} more {thing}. How many {thing} does {n} have in all?",
        f"A shop sells {a} {thing} on Monday and {b} {thing} on Friday. How many {thing} are sold in all?",
    )
    ones = f"Ones: {x}+{y}={x + y}."
    right = f"{ones} Carry 1 to the tens: {t}+{u}+1={t + u + 1}.", a + b
    return problems, right, (f"{ones} Now the tens: {t}+{u}={t + u}.", 10 * (t + u) + (x + y) % 10)


def count(rng: random.Random, n: str) -> Texts:
    a = rng.randint(2, 60)
    d = rng.randint(2, 8)
    b = a + d
    problems = (
        f"{n} reads every page from page {a} to page {b}. How many pages does {n} read?",
        f"{n} paints every door from door {a} to door {b}. How many doors does {n} paint?",
        f"The rows from row {a} to row {b} are full. How many rows are full?",
    )
    first = f"From {a} to {b}: {b}-{a}={d}."
    return (
        problems,
        (f"{first} Both ends count: {d}+1={d + 1}.", d + 1),
        (f"{first} That many: {d}.", d),
    )


def fence(rng: random.Random, n: str) -> Texts:
    a, b = rng.randint(3, 9), rng.randint(2, 8)
    place = rng.choice("garden yard field park lawn pool".split())
    problems = (
        f"A {place} is {a} m long and {b} m wide. How long is the fence around the {place}?",
        f"{n} walks once around a {place} that is {a} m long and {b} m wide. How many m does {n} walk?",
    )
    first, around = f"Sides: {a}+{b}={a + b}.", 2 * (a + b)
    right = f"{first} Twice each side: 2*{a + b}={around}.", around
    return problems, right, (f"{first} All around: {a + b}.", a + b)


def boats(rng: random.Random, n: str) -> Texts:
    size, q = rng.randint(2, 6), rng.randint(2, 9)
    rest = rng.randint(1, size - 1)
    total = size * q + rest
    pairs = ("children", "boats"), ("guests", "tables"), ("eggs", "boxes"), ("balls", "bags")
    who, what = rng.choice(pairs)
    problems = (
        f"{total} {who} go into {what} of {size}. How many {what} are needed?",
        f"{n} puts {total} {who} into {what} that hold {size} each. How many {what} does {n} need?",
    )
    first = f"Divide: {total}={size}*{q}+{rest}."
    right = f"{first} The rest needs one more: {q}+1={q + 1}.", q + 1
    return problems, right, (f"{first} Full ones: {q}.", q)


def order(rng: random.Random, n: str) -> Texts:
    a, b, c = rng.randint(2, 9), rng.randint(2, 6), rng.randint(2, 6)
    pairs = ("nuts", "sacks"), ("beads", "jars"), ("tiles", "piles"), ("plums", "bowls")
    thing, pack = rng.choice(pairs)
    problems = (
        f"{n} has {a} single {thing} and {b} {pack} of {c} {thing}. How many {thing} are there?",
        f"On a desk lie {a} single {thing} beside {b} {pack} of {c} {thing}. How many {thing} lie there?",
    )
    first, right, wrong = f"Total: {a}+{b}*{c}.", a + b * c, (a + b) * c
    right_text = f"{first} Multiply first: {b}*{c}={b * c}. Then {a}+{b * c}={right}."
    wrong_text = f"{first} Left to right: {a}+{b}={a + b}. Then {a + b}*{c}={wrong}."
    return problems, (right_text, right), (wrong_text, wrong)


def mean(rng: random.Random, n: str) -> Texts:
    m = rng.randint(3, 8)
    d, e = rng.randint(1, 2), rng.randint(0, 1)
    values = [m - d, m + d + e, m - e]
    rng.shuffle(values)
    a, b, c = values
    pairs = ("points", "games"), ("goals", "matches"), ("laps", "days"), ("calls", "weeks")
    what, when = rng.choice(pairs)
    problems = (
        f"{n} counts {a}, {b} and {c} {what} in three {when}. What is the mean of the {what}?",
        f"In three {when} there were {a}, {b} and {c} {what}. What is the mean of the {what}?",
    )
    first, half = f"Sum: {a}+{b}+{c}={3 * m}.", 3 * m // 2
    right = f"{first} Three values: {3 * m}/3={m}.", m
    return problems, right, (f"{first} Halve it: {3 * m}/2={half}.", half)


def sale(rng: random.Random, n: str) -> Texts:
    p, k = rng.randint(2, 9), rng.choice([1, 2, 3, 4, 6])
    price, off = 10 * p, p * k
    thing = rng.choice("coat lamp chair bag watch vase".split())
    problems = (
        f"A {thing} costs {price} dollars. In a sale it is {k}0 percent off. What is the new price?",
        f"{n} buys a {thing} of {price} dollars at {k}0 percent off. What does {n} pay?",
    )
    first = f"{k}0 percent: {p}*{k}={off}."
    right = f"{first} Take it off: {price}-{off}={price - off}.", price - off
    return problems, right, (f"{first} Pay that: {off}.", off)


def clock(rng: random.Random, n: str) -> Texts:
    h, m = rng.randint(1, 5), 5 * rng.randint(1, 9)
    what = rng.choice("film trip class walk flight lesson".split())
    problems = (
        f"A {what} takes {h} hours and {m} minutes. How many minutes is that?",
        f"The {what} of {n} lasts {h} hours and {m} minutes. How many minutes does it last?",
    )
    solutions = []
    for word, size in ("Sixty", 60), ("Hundred", 100):
        minutes = size * h
        text = f"Hours: {h}. {word} each: {h}*{size}={minutes}. Then {minutes}+{m}={minutes + m}."
        solutions.append((text, minutes + m))
    return problems, *solutions


FAMILIES = tuple(
    Family(f.__name__, f) for f in (carry, count, fence, boats, order, mean, sale, clock)
)


@dataclass(frozen=True)
class Drawn:
    """A problem with its two solutions."""

    family: str
    problem: str
    right: Steps
    wrong: Steps

    def solution(self, wrong: bool) -> str:
        lines, answer = self.wrong if wrong else self.right
        return f"{lines}\nThe answer is \\boxed{{{answer}}}."


def draw(rng: random.Random, family: Family | None = None) -> Drawn:
    family = family or rng.choice(FAMILIES)
    problems, right, wrong = family.draw(rng, rng.choice(NAMES))
    return Drawn(family.name, rng.choice(problems), right, wrong)


def family_of(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


# --------------------------------------------------------------------------- skills and mistakes


def wordings(family: Family | None, kind: str, which: int = 0) -> dict[str, list[str]]:
    """Each field's wordings. family: None for an item that says nothing, of which there are two.

    kind: skill, misleading or mistake.
    """
    return WORDINGS[family.name if family else f"nothing {which}"][kind]


def item(rng: random.Random | None, family: Family | None, kind: str, which: int = 0) -> dict:
    """An item in random wording; without rng in the canonical one."""
    fields = wordings(family, kind, which)
    return {name: rng.choice(texts) if rng else texts[0] for name, texts in fields.items()}


def all_items() -> list[tuple[Family | None, str, int]]:
    """The arguments of `item` for each thing that can be said, in the order of a perfect merge."""
    of_families = [(family, kind, 0) for family in FAMILIES for kind in KEYS]
    return of_families + [(None, kind, which) for kind in ("skill", "mistake") for which in (0, 1)]


def places_by_text() -> dict[str, int]:
    """An item's place in ITEMS, by each wording of its title or description."""
    places: dict[str, int] = {}
    for place, arguments in enumerate(ITEMS):
        titles, *_ = wordings(*arguments).values()
        places |= dict.fromkeys(titles, place)
    return places


ITEMS = all_items()
PLACES = places_by_text()


def meaning(entry: dict) -> tuple[str | None, str] | None:
    """(family, kind) of a bank's entry by its title or description.

    The family is None if the entry says nothing. None for an entry that is not of this world.
    """
    place = PLACES.get(entry.get("title", entry.get("description", "")))
    if place is None:
        return None
    family, kind, _ = ITEMS[place]
    return family.name if family else None, kind


def canonical(entries: list[dict], key: str) -> list[dict]:
    """What a perfect merge gives: one canonical wording per meaning, in the world's order."""
    places = {PLACES[entry[KINDS[key].fields[0]]] for entry in entries}
    return [item(None, *ITEMS[place]) for place in sorted(places)]


def error_chance(family: str, guidance: list[dict], answer: bool = False) -> float:
    """How often a solution falls into its family's error under these skills and mistakes."""
    odds = BASE + (ANSWER if answer else 0)
    for about in map(meaning, guidance):
        if about and about[0] == family:
            odds += MISLEADING if about[1] == "misleading" else RELEVANT
    return 1 / (1 + math.exp(-odds))


def reply(rng: random.Random, entries: list[dict], key: str) -> str:
    """How the model writes items: JSON, at times fenced, with a trailing comma, or broken off."""
    text = json.dumps({key: entries})
    u = rng.random()
    if u < 0.03:
        return text[:-2] + ",]}"
    if u < 0.06:
        return text[: rng.randint(len(text) // 2, len(text) - 3)]
    return f"```json\n{text}\n```" if u < 0.12 else text


def extracted(rng: random.Random, family: Family, key: str) -> list[dict]:
    """What one memory teaches: its family's item, and at times one that says nothing.

    A success teaches the misleading skill one time in four.
    """
    kind = plain = "mistake" if key == "common_mistakes" else "skill"
    if kind == "skill" and rng.random() < 0.25:
        kind = "misleading"
    nothing = [item(rng, None, plain, rng.randrange(2))] if rng.random() < 0.15 else []
    return [item(rng, family, kind), *nothing]
