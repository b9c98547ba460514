r"""The arithmetic world: eight families of word problems, each with a typical error, a true skill, a true mistake and a
misleading skill; and the text that a model of this world writes.

How often a solution falls into its family's error depends on the guidance that stands in the prompt:

    log-odds of the error = BASE - 1.7 per relevant skill or mistake + 2.2 per misleading skill + 0 for anything irrelevant
"""

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from skills import FIELDS

BASE, RELEVANT, MISLEADING, ANSWER = (
    0.05,
    -1.7,
    2.2,
    -3.0,
)  # log-odds; ANSWER: the reference answer stands in the prompt
NAMES = "Ann Ben Cara Dan Eva Finn Gina Hugo Iris Jack Kate Leo Mia Noah Olga Paul".split()
Steps = tuple[str, int]  # a solution's lines and its answer


@dataclass(frozen=True)
class Family:
    """draw(rng, name) -> (problem, right solution, wrong solution); per kind of item the variants of each of its three fields."""

    name: str
    draw: Callable[[random.Random, str], tuple[str, Steps, Steps]]
    skill: tuple[tuple[str, str], ...]
    mistake: tuple[tuple[str, str], ...]
    misleading: tuple[tuple[str, str], ...]


def _carry(rng: random.Random, n: str) -> tuple[str, Steps, Steps]:
    x = rng.randint(2, 9)
    y = rng.randint(10 - x if x < 9 else 1, 9)
    t = rng.randint(1, 7)
    u = rng.randint(1, 8 - t)
    a, b, thing = 10 * t + x, 10 * u + y, rng.choice("pens coins cards books shells stamps".split())
    problem = rng.choice(
        [
            f"{n} has {a} {thing} and gets {b} more {thing}. How many {thing} does {n} have in all?",
            f"A shop sells {a} {thing} on Monday and {b} {thing} on Friday. How many {thing} are sold in all?",
        ]
    )
    ones = f"Ones: {x}+{y}={x + y}."
    return (
        problem,
        (f"{ones} Carry 1 to the tens: {t}+{u}+1={t + u + 1}.", a + b),
        (f"{ones} Now the tens: {t}+{u}={t + u}.", 10 * (t + u) + (x + y) % 10),
    )


def _count(rng: random.Random, n: str) -> tuple[str, Steps, Steps]:
    a = rng.randint(2, 60)
    d = rng.randint(2, 8)
    b = a + d
    problem = rng.choice(
        [
            f"{n} reads every page from page {a} to page {b}. How many pages does {n} read?",
            f"{n} paints every door from door {a} to door {b}. How many doors does {n} paint?",
            f"The rows from row {a} to row {b} are full. How many rows are full?",
        ]
    )
    first = f"From {a} to {b}: {b}-{a}={d}."
    return (
        problem,
        (f"{first} Both ends count: {d}+1={d + 1}.", d + 1),
        (f"{first} That many: {d}.", d),
    )


def _fence(rng: random.Random, n: str) -> tuple[str, Steps, Steps]:
    a, b = rng.randint(3, 9), rng.randint(2, 8)
    place = rng.choice("garden yard field park lawn pool".split())
    problem = rng.choice(
        [
            f"A {place} is {a} m long and {b} m wide. How long is the fence around the {place}?",
            f"{n} walks once around a {place} that is {a} m long and {b} m wide. How many m does {n} walk?",
        ]
    )
    first = f"Sides: {a}+{b}={a + b}."
    return (
        problem,
        (f"{first} Twice each side: 2*{a + b}={2 * (a + b)}.", 2 * (a + b)),
        (f"{first} All around: {a + b}.", a + b),
    )


def _boats(rng: random.Random, n: str) -> tuple[str, Steps, Steps]:
    size, q = rng.randint(2, 6), rng.randint(2, 9)
    rest = rng.randint(1, size - 1)
    total = size * q + rest
    who, what = rng.choice(
        [("children", "boats"), ("guests", "tables"), ("eggs", "boxes"), ("balls", "bags")]
    )
    problem = rng.choice(
        [
            f"{total} {who} go into {what} of {size}. How many {what} are needed?",
            f"{n} puts {total} {who} into {what} that hold {size} each. How many {what} does {n} need?",
        ]
    )
    first = f"Divide: {total}={size}*{q}+{rest}."
    return (
        problem,
        (f"{first} The rest needs one more: {q}+1={q + 1}.", q + 1),
        (f"{first} Full ones: {q}.", q),
    )


def _order(rng: random.Random, n: str) -> tuple[str, Steps, Steps]:
    a, b, c = rng.randint(2, 9), rng.randint(2, 6), rng.randint(2, 6)
    thing, pack = rng.choice(
        [("nuts", "sacks"), ("beads", "jars"), ("tiles", "piles"), ("plums", "bowls")]
    )
    problem = rng.choice(
        [
            f"{n} has {a} single {thing} and {b} {pack} of {c} {thing}. How many {thing} are there?",
            f"On a desk lie {a} single {thing} beside {b} {pack} of {c} {thing}. How many {thing} lie there?",
        ]
    )
    first = f"Total: {a}+{b}*{c}."
    return (
        problem,
        (f"{first} Multiply first: {b}*{c}={b * c}. Then {a}+{b * c}={a + b * c}.", a + b * c),
        (f"{first} Left to right: {a}+{b}={a + b}. Then {a + b}*{c}={(a + b) * c}.", (a + b) * c),
    )


def _mean(rng: random.Random, n: str) -> tuple[str, Steps, Steps]:
    m = rng.randint(3, 8)
    d, e = rng.randint(1, 2), rng.randint(0, 1)
    values = [m - d, m + d + e, m - e]
    rng.shuffle(values)
    a, b, c = values
    what, when = rng.choice(
        [("points", "games"), ("goals", "matches"), ("laps", "days"), ("calls", "weeks")]
    )
    problem = rng.choice(
        [
            f"{n} counts {a}, {b} and {c} {what} in three {when}. What is the mean of the {what}?",
            f"In three {when} there were {a}, {b} and {c} {what}. What is the mean of the {what}?",
        ]
    )
    first = f"Sum: {a}+{b}+{c}={3 * m}."
    return (
        problem,
        (f"{first} Three values: {3 * m}/3={m}.", m),
        (f"{first} Halve it: {3 * m}/2={3 * m // 2}.", 3 * m // 2),
    )


def _sale(rng: random.Random, n: str) -> tuple[str, Steps, Steps]:
    p, k = rng.randint(2, 9), rng.choice([1, 2, 3, 4, 6])
    price, off = 10 * p, p * k
    thing = rng.choice("coat lamp chair bag watch vase".split())
    problem = rng.choice(
        [
            f"A {thing} costs {price} dollars. In a sale it is {k}0 percent off. What is the new price?",
            f"{n} buys a {thing} of {price} dollars at {k}0 percent off. What does {n} pay?",
        ]
    )
    first = f"{k}0 percent: {p}*{k}={off}."
    return (
        problem,
        (f"{first} Take it off: {price}-{off}={price - off}.", price - off),
        (f"{first} Pay that: {off}.", off),
    )


def _clock(rng: random.Random, n: str) -> tuple[str, Steps, Steps]:
    h, m = rng.randint(1, 5), 5 * rng.randint(1, 9)
    what = rng.choice("film trip class walk flight lesson".split())
    problem = rng.choice(
        [
            f"A {what} takes {h} hours and {m} minutes. How many minutes is that?",
            f"The {what} of {n} lasts {h} hours and {m} minutes. How many minutes does it last?",
        ]
    )
    first = f"Hours: {h}."
    return (
        problem,
        (f"{first} Sixty each: {h}*60={60 * h}. Then {60 * h}+{m}={60 * h + m}.", 60 * h + m),
        (
            f"{first} Hundred each: {h}*100={100 * h}. Then {100 * h}+{m}={100 * h + m}.",
            100 * h + m,
        ),
    )


FAMILIES = (
    Family(
        "carry",
        _carry,
        (
            ("Carry the ten", "Mind the carry"),
            (
                "When the ones pass nine, carry one to the tens.",
                "A sum of ones above nine sends one to the tens.",
            ),
            ("Adding two amounts to one in all.", "Two numbers are added."),
        ),
        (
            ("Dropping the carry when two amounts are added.", "The carried ten is lost in a sum."),
            ("The ones are written and the carry is forgotten.", "Columns are added one by one."),
            ("Add the carried one to the tens.", "Write the carry above the tens."),
        ),
        (
            ("Columns stay apart", "Add columns alone"),
            (
                "Add the ones and the tens alone and drop what passes nine.",
                "Never move anything from the ones to the tens.",
            ),
            ("Adding two amounts to one in all.", "Two numbers are added."),
        ),
    ),
    Family(
        "count",
        _count,
        (
            ("Count both ends", "Both ends belong"),
            (
                "From first to last, subtract and add one.",
                "A range holds its difference and one more.",
            ),
            (
                "Every page, door or row of a range is counted.",
                "Counting from one number to another.",
            ),
        ),
        (
            ("Leaving out one end of a range.", "One page, door or row of a range is not counted."),
            ("The difference counts steps, not things.", "Subtraction skips the first one."),
            ("Add one to the difference.", "Count the first and the last."),
        ),
        (
            ("Difference is the count", "Just subtract"),
            (
                "From first to last, the difference is the number.",
                "Subtract the ends and stop there.",
            ),
            (
                "Every page, door or row of a range is counted.",
                "Counting from one number to another.",
            ),
        ),
    ),
    Family(
        "fence",
        _fence,
        (
            ("Twice each side", "All four sides"),
            (
                "Around a shape with four sides, double length and width.",
                "A way around has each side two times.",
            ),
            (
                "A fence or walk around a garden, yard or field.",
                "Something long and wide is walked around.",
            ),
        ),
        (
            ("Adding only two sides of a fence.", "Half of the way around is missing."),
            ("The problem names just length and width.", "Two sides are seen, four are there."),
            ("Double the sum of length and width.", "Count all four sides."),
        ),
        (
            ("Length and width do", "Two sides suffice"),
            ("The way around is length and width added once.", "Add the two given sides and stop."),
            (
                "A fence or walk around a garden, yard or field.",
                "Something long and wide is walked around.",
            ),
        ),
    ),
    Family(
        "boats",
        _boats,
        (
            ("Round up the rest", "A rest needs room"),
            (
                "When a rest is left over, take one more.",
                "Left over things need one more box or boat.",
            ),
            (
                "Things go into boats, boxes, bags or tables of a size.",
                "Filling what holds so many each.",
            ),
        ),
        (
            ("Forgetting the rest after dividing.", "Those left over find no boat, box or bag."),
            ("The quotient looks like the answer.", "Division ends with the full ones."),
            ("Take one more for the rest.", "Round the quotient up."),
        ),
        (
            ("Only full ones", "Round the rest down"),
            (
                "Only full boats and boxes count, leave the rest out.",
                "The quotient is what is needed.",
            ),
            (
                "Things go into boats, boxes, bags or tables of a size.",
                "Filling what holds so many each.",
            ),
        ),
    ),
    Family(
        "order",
        _order,
        (
            ("Multiply before adding", "Products come first"),
            (
                "Work out the packs first, then add the single ones.",
                "Multiplication goes before addition.",
            ),
            (
                "Single nuts, beads or tiles beside sacks, jars or piles.",
                "A sum that holds a product.",
            ),
        ),
        (
            ("Adding before multiplying.", "The single ones are multiplied too."),
            ("Numbers are taken as they stand.", "Reading order is not working order."),
            ("Multiply the packs first.", "Keep the single ones for the end."),
        ),
        (
            ("Work left to right", "As it is written"),
            (
                "Add first and multiply the sum at the end.",
                "Take the numbers in their order of reading.",
            ),
            (
                "Single nuts, beads or tiles beside sacks, jars or piles.",
                "A sum that holds a product.",
            ),
        ),
    ),
    Family(
        "mean",
        _mean,
        (
            ("Divide by how many", "Mean of three"),
            (
                "Divide the sum by the number of values.",
                "For a mean of three values the sum is split in three.",
            ),
            (
                "The mean of points, goals, laps or calls is wanted.",
                "A mean over games, days or weeks.",
            ),
        ),
        (
            ("Halving the sum for a mean.", "A mean is taken of two instead of three."),
            ("Means of two are more common.", "The values are not counted."),
            ("Count the values and divide by that.", "Divide by three when there are three."),
        ),
        (
            ("A mean is half", "Halve the sum"),
            ("For a mean, halve the sum.", "The middle is always half of the sum."),
            (
                "The mean of points, goals, laps or calls is wanted.",
                "A mean over games, days or weeks.",
            ),
        ),
    ),
    Family(
        "sale",
        _sale,
        (
            ("Take the part off", "Price less percent"),
            (
                "Find the percent and take it off the price.",
                "What is paid is the price without its percent.",
            ),
            ("A coat, lamp or watch in a sale is percent off.", "A new price in dollars is asked."),
        ),
        (
            ("Giving the percent instead of the price.", "What is taken off is paid."),
            ("The percent is the first number found.", "The work stops too early."),
            ("Take the percent off the price.", "Go on from the part to the price."),
        ),
        (
            ("The percent is the price", "Pay the part"),
            (
                "What the percent gives is what is paid.",
                "The percent of the price is the new price.",
            ),
            ("A coat, lamp or watch in a sale is percent off.", "A new price in dollars is asked."),
        ),
    ),
    Family(
        "clock",
        _clock,
        (
            ("Sixty to the hour", "Hours hold sixty"),
            ("Turn each hour into sixty minutes, then add.", "An hour is sixty minutes."),
            ("A film, trip or class takes hours and minutes.", "Hours are turned into minutes."),
        ),
        (
            ("Taking hours as hundreds.", "Hours and minutes are written side by side."),
            ("Most units go by tens and hundreds.", "Time is read like a number."),
            ("Multiply the hours by sixty.", "Use sixty minutes for an hour."),
        ),
        (
            ("Hundred to the hour", "Hours are hundreds"),
            ("Turn each hour into a hundred, then add.", "Write the hours before the minutes."),
            ("A film, trip or class takes hours and minutes.", "Hours are turned into minutes."),
        ),
    ),
)
GENERIC = {  # true of anything, and of no help
    "general_skills": (
        (
            ("Check the result", "Look again"),
            ("Read the answer once more.", "Test the result at the end."),
            ("At the end of a problem.", "Always."),
        ),
        (
            ("Write clearly", "Neat lines"),
            ("Put every step on paper.", "Write short lines."),
            ("In any problem.", "At every step."),
        ),
    ),
    "common_mistakes": (
        (
            ("Working in haste.", "Rushing to the end."),
            ("Time seems short.", "The end looks near."),
            ("Slow down.", "Take your time."),
        ),
        (
            ("Skipping the question.", "Not reading the last line."),
            ("Numbers draw the eye.", "The text looks known."),
            ("Read it again.", "Read all of it."),
        ),
    ),
}


def variants(
    family: Family | None, kind: str, which: int = 0
) -> tuple[str, tuple[tuple[str, str], ...]]:
    """(bank key, variants of the three fields) of a family's skill, mistake or misleading skill, or of a generic item."""
    key = "common_mistakes" if kind == "mistake" else "general_skills"
    return key, GENERIC[key][which] if family is None else getattr(family, kind)


def item(rng: random.Random | None, family: Family | None, kind: str, which: int = 0) -> dict:
    """One item in random wording; without rng in its first, canonical one."""
    key, fields = variants(family, kind, which)
    return {name: (v[0] if rng is None else rng.choice(v)) for name, v in zip(FIELDS[key], fields)}


def _texts() -> dict[str, tuple[str | None, str, int]]:
    """What an item's first field says about it: (family or None, kind, place in the world's order)."""
    found: dict[str, tuple[str | None, str, int]] = {}
    for family in (*FAMILIES, None):
        for kind in ("skill", "misleading", "mistake"):
            for which in range(2 if family is None else 1):
                if family is not None or kind != "misleading":
                    for text in variants(family, kind, which)[1][0]:
                        found[text] = (family.name if family else None, kind, len(found))
    return found


TEXTS = _texts()


def meaning(entry: dict) -> tuple[str | None, str] | None:
    """(family, kind) of a bank entry by its title or description; family None is generic, None is no item of this world."""
    found = TEXTS.get(entry.get("title", entry.get("description", "")))
    return found and found[:2]


def canonical(entries: list[dict], key: str) -> list[dict]:
    """What a perfect merge of items gives: one canonical wording per meaning, in the world's order."""
    seen = {}
    for e in entries:
        family, kind, place = TEXTS[e[FIELDS[key][0]]]
        first = next((f for f in FAMILIES if f.name == family), None)
        which = next((w for w in range(2) if e[FIELDS[key][0]] in GENERIC[key][w][0]), 0)
        seen[place // 2] = item(None, first, kind, which)
    return [seen[i] for i in sorted(seen)]


def error_chance(family: str, guidance: list[dict], answer: bool = False) -> float:
    """How often a solution of `family` falls into its error when these skills and mistakes stand in the prompt."""
    odds = BASE + (ANSWER if answer else 0)
    for m in map(meaning, guidance):
        if m and m[0] == family:
            odds += MISLEADING if m[1] == "misleading" else RELEVANT
    return 1 / (1 + math.exp(-odds))


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
    return Drawn(family.name, *family.draw(rng, rng.choice(NAMES)))


def reply(rng: random.Random, entries: list[dict], key: str) -> str:
    """How the model writes items: JSON, now and then fenced, with a trailing comma, or broken off."""
    text = json.dumps({key: entries})
    u = rng.random()
    if u < 0.03:
        return text[:-2] + ",]}"
    if u < 0.06:
        return text[: rng.randint(len(text) // 2, len(text) - 3)]
    return f"```json\n{text}\n```" if u < 0.12 else text


def extracted(rng: random.Random, family: Family, key: str) -> list[dict]:
    """What one memory teaches: its family's item, from a success now and then the misleading one, and at times a generic one."""
    kind = (
        "mistake" if key == "common_mistakes" else "misleading" if rng.random() < 0.25 else "skill"
    )
    generic = (
        [item(rng, None, "mistake" if kind == "mistake" else "skill", rng.randrange(2))]
        if rng.random() < 0.15
        else []
    )
    return [item(rng, family, kind), *generic]
