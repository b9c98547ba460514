"""The five drawings of docs/method.md, from a run of the tiny preset.

    python sgsd.py --preset tiny --audit-every 1 --out runs/method
    python docs/pictures/method.py runs/method    what the drawings need of it, into method.json
    python docs/pictures/method.py                teachers, gaps, support, gate and bank.svg

A page is shown on a light or a dark ground, and a picture cannot know which. So the ground is
transparent, text on it and axes are grey, as far from white as from black, and boxes have a fill
and a text colour of their own.
"""

import itertools
import json
import math
import pathlib
import sys
from collections import Counter
from collections.abc import Callable
from html import escape
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
DATA = HERE / "method.json"
GREY, FAINT = "#777b80", "#8c9096"
DARK, SOFT = "#16191d", "#363c44"  # text in a box
FILLS = {"problem": "#e7e9ec", "model": "#cfe3fb", "verdict": "#d5efd8", "bank": "#fbe6c4"}
LIKES, DISLIKES = "#4a8fe0", "#dd7a2c"  # a teacher finds a token likelier, or less likely
BARS = "#d9a441"  # sizes of a bank
FATES = {1: "distilled", -1: "reversed", 0: "ignored"}
FATE_COLORS = {"distilled": "#3aa35c", "reversed": "#c95fb4", "ignored": "#a9aeb4"}
WIDTH = 900
NEAR_0 = 0.05  # nats; a smaller gap is drawn as almost 0
BOUNDS = (0.01, 0.1, 0.5, 1.0, 2.0, 3.0)  # of the histogram of gaps, in nats

# ------------------------------------------------------------------------------- from a run's files


def rows(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def banks_of(run: pathlib.Path) -> dict[int, dict]:
    """The versions of a run's bank, by step."""
    paths = sorted((run / "bank").glob("step_*.json"))
    return {int(path.stem.partition("_")[2]): json.loads(path.read_text()) for path in paths}


def example_of(rollouts: list[dict], audited: dict) -> dict:
    """The shortest solution with all three fates among its teachers and a gap beyond the clip."""
    shown = []
    for row in rollouts:
        if {*row["rho"]} == {*FATES} and row["clipped"] and (row["step"], row["index"]) in audited:
            shown.append(row)
    if not shown:
        raise SystemExit("no solution of this run shows all three fates and a cut gap; try a seed")
    return min(shown, key=lambda row: len(row["completion_ids"]))


def extract(run: pathlib.Path) -> dict[str, Any]:
    """All that the drawings show, rounded to what can be seen."""
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    rollouts, banks = rows(run / "rollouts.jsonl"), banks_of(run)
    tokens = rows(run / "tokens.jsonl")
    place = {(row["step"], row["problem_id"]): row for row in tokens}
    audited = {(r["step"], r["index"]) for r in rollouts if (r["step"], r["problem_id"]) in place}
    row = example_of(rollouts, audited)
    audit = place[row["step"], row["problem_id"]]
    bank = banks[max(step for step in banks if step < row["step"])]
    names = ("step", "problem", "gold", "text", "r", "s_g", "s_e", "alpha", "a", "rho")
    example = {name: row[name] for name in names}
    example |= {"tokens": audit["text"], "mask": audit["mask"]}
    example["delta"] = [[round(x, 4) for x in delta_T] for delta_T in audit["delta"]]
    example["pairs"] = [pair_of(bank, *ids) for ids in row["pairs"]]
    settings = ("c_delta", "eps_a", "tau_g", "success_gate", "evolve_every")
    return {
        "commit": config["commit"],
        "settings": {name: config["settings"][name] for name in settings},
        "example": example,
        "gaps": histogram(tokens),
        "bank": {**life_of(banks), "success": success_of(rollouts, config["settings"])},
        "fates": fates_of(rollouts, banks),
        "added": added_at(banks),
    }


def pair_of(bank: dict, skill_id: str, mistake_id: str) -> dict:
    """What a teacher is shown, without the ids."""
    (skill,) = (e for e in bank["general_skills"] if e["skill_id"] == skill_id)
    (mistake,) = (e for e in bank["common_mistakes"] if e["mistake_id"] == mistake_id)
    texts = {name: skill[name] for name in ("title", "principle")}
    return texts | {"mistake": mistake["description"]}


def histogram(tokens: list[dict]) -> list[int]:
    """How many gaps of unmasked tokens lie below each bound, and beyond the last."""
    counts = [0] * (len(BOUNDS) + 1)
    for row in tokens:
        for delta_T in row["delta"]:
            for gap, counted in zip(delta_T, row["mask"]):
                if counted:
                    counts[sum(abs(gap) >= bound for bound in BOUNDS)] += 1
    return counts


def life_of(banks: dict[int, dict]) -> dict[str, Any]:
    """The sizes of the first bank after each layer of merging, and of every version."""
    made = banks[0]["metadata"]
    life: dict[str, Any] = {"solutions": made["seed_solutions"]}
    life["right"] = made["right_seed_solutions"]
    layers = {"skills": "general_merge_layers", "mistakes": "common_mistake_merge_layers"}
    for kind, name in layers.items():
        sizes = [layer["output_items"] for layer in made[name]]
        life[kind] = [made[name][0]["input_items"], *sizes]
    sizes_of = [[len(b["general_skills"]), len(b["common_mistakes"])] for b in banks.values()]
    life["versions"] = dict(zip(banks, sizes_of))
    return life


def success_of(rollouts: list[dict], settings: dict) -> dict[int, float]:
    """The success within the window before each step at which the bank may evolve."""
    every = settings["evolve_every"]
    success = {}
    for last in range(every, settings["steps"] + 1, every):
        window = [row["r"] > 0 for row in rollouts if last - every < row["step"] <= last]
        success[last] = round(sum(window) / len(window), 4)
    return success


def fates_of(rollouts: list[dict], banks: dict[int, dict]) -> list[list]:
    """For each skill: its title, and how many of its teachers were distilled, reversed, ignored."""
    counts: dict[str, Counter] = {}
    for version in banks.values():
        for skill in version["general_skills"]:
            counts.setdefault(skill["title"], Counter())
    for row in rollouts:
        bank = banks[max(step for step in banks if step < row["step"])]
        titles = {skill["skill_id"]: skill["title"] for skill in bank["general_skills"]}
        for (skill_id, _), rho in zip(row["pairs"], row["rho"]):
            counts[titles[skill_id]][FATES[rho]] += 1
    return [[title, *(count[f] for f in FATE_COLORS)] for title, count in counts.items()]


def added_at(banks: dict[int, dict]) -> dict[str, int]:
    """The step at which each skill came into the bank, by title."""
    added: dict[str, int] = {}
    for step, version in banks.items():
        for skill in version["general_skills"]:
            added.setdefault(skill["title"], step)
    return added


# ------------------------------------------------------------------------------------ shapes of SVG


def page(height: int, title: str, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">'
    )
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>", ""])


def text(
    x: float,
    y: float,
    words: str,
    color: str = GREY,
    size: float = 13,
    anchor: str = "start",
    weight: int = 400,
) -> str:
    """A line of text; y is its base line."""
    return (
        f'<text x="{x:.5g}" y="{y:.5g}" fill="{color}" font-size="{size:g}" font-weight="{weight}" '
        f'text-anchor="{anchor}" xml:space="preserve">{escape(words)}</text>'
    )


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    radius: float = 6,
    opacity: float = 1,
) -> str:
    return (
        f'<rect x="{x:.5g}" y="{y:.5g}" width="{width:.5g}" height="{height:.5g}" rx="{radius:g}" '
        f'fill="{fill}" fill-opacity="{opacity:.3g}"/>'
    )


def outline(x: float, y: float, width: float, height: float, dash: str = "") -> str:
    """An empty box."""
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<rect x="{x:.5g}" y="{y:.5g}" width="{width:.5g}" height="{height:.5g}" rx="3" '
        f'fill="none" stroke="{GREY}"{dashes}/>'
    )


def dot(x: float, y: float, radius: float, color: str) -> str:
    return f'<circle cx="{x:.5g}" cy="{y:.5g}" r="{radius:g}" fill="{color}"/>'


def line(
    x1: float, y1: float, x2: float, y2: float, color: str = GREY, width: float = 1, dash: str = ""
) -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1:.5g}" y1="{y1:.5g}" x2="{x2:.5g}" y2="{y2:.5g}" stroke="{color}" '
        f'stroke-width="{width:g}"{dashes}/>'
    )


def upward(x: float, y: float, words: str) -> str:
    """A line of small text that reads upwards; y is its middle."""
    return (
        f'<g transform="rotate(-90 {x:g} {y:g})">{text(x, y, words, size=12, anchor="middle")}</g>'
    )


def curve(points: list[tuple[float, float]], color: str) -> str:
    corners = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
    return f'<polyline points="{corners}" fill="none" stroke="{color}" stroke-width="2"/>'


def signed(x: float, digits: int) -> str:
    return f"{x:+.{digits}f}".replace("-", "−")


# ------------------------------------------------------------------------------------- the drawings


def teachers(data: dict) -> str:
    """A problem, a solution with its verdict, and the pair of equal rank of each teacher."""
    x = data["example"]
    verdict = "right" if x["r"] > 0 else "wrong"
    told = f"r = {signed(x['r'], 0)}: {verdict}, the answer is {x['gold']}"
    parts = [
        box(10, 10, 880, 50, FILLS["problem"]),
        text(24, 30, "problem", SOFT, 12),
        text(24, 49, x["problem"], DARK, 15),
        box(10, 72, 590, 70, FILLS["model"]),
        text(24, 92, "the student's solution; it sees only the problem", SOFT, 12),
        box(612, 72, 278, 70, FILLS["verdict"]),
        text(626, 92, "verifier", SOFT, 12),
        text(626, 113, told, DARK, 14),
    ]
    for i, words in enumerate(x["text"].split("\n")):
        parts.append(text(24, 112 + 20 * i, words, DARK, 14))
    parts += [
        text(120, 172, "the bank's skills, nearest to the problem first"),
        text(512, 172, "its mistakes, nearest first"),
    ]
    for k, pair in enumerate(x["pairs"]):
        top = 182 + 60 * k
        skill = f"skill {k + 1}, cosine {signed(x['s_g'][k], 2)}: {pair['title']}"
        mistake = f"mistake {k + 1}, cosine {signed(x['s_e'][k], 2)}"
        parts += [
            text(14, top + 23, f"teacher {k + 1}", size=15, weight=600),
            text(14, top + 42, f"α = {x['alpha'][k]:.2f}"),
            box(106, top, 372, 52, FILLS["bank"]),
            text(120, top + 20, skill, SOFT),
            text(120, top + 41, pair["principle"], DARK, 14),
            text(488, top + 33, "+", size=20, anchor="middle", weight=600),
            box(498, top, 392, 52, FILLS["bank"]),
            text(512, top + 20, mistake, SOFT),
            text(512, top + 41, pair["mistake"], DARK, 14),
        ]
    words = (
        "α, a teacher's weight: a softmax, over the teachers, of the mean of a pair's two cosines"
    )
    parts.append(text(14, 440, words, size=12.5))
    return page(452, "A problem, a solution, its verdict, and the pairs of its teachers", parts)


def shown_token(token: str) -> str:
    """A token with its spaces and line breaks visible."""
    return token.replace(" ", "·").replace("\n", "↵")


def gaps(data: dict) -> str:
    """Each token of the solution with a cell for every teacher, coloured by the gap."""
    x = data["example"]
    count = len(x["delta"])
    parts, left, top = [], 84.0, 10.0
    for i, token in enumerate(x["tokens"]):
        words = shown_token(token)
        width = max(24, 8 * len(words) + 8, 40 * any(abs(d[i]) >= NEAR_0 for d in x["delta"]))
        if left + width > WIDTH - 10:
            left, top = 84.0, top + 28 + 20 * count + 24
        if left == 84.0:
            for k in range(count):
                parts.append(text(10, top + 43 + 20 * k, f"teacher {k + 1}"))
        if x["mask"][i]:
            parts.append(outline(left + 0.5, top + 0.5, width - 3, 23))
            for k in range(count):
                parts += cell(left, top + 28 + 20 * k, width - 2, x["delta"][k][i])
        else:
            parts.append(outline(left + 0.5, top + 0.5, width - 3, 25 + 20 * count, "3 3"))
        parts.append(text(left + width / 2 - 1, top + 17, words, GREY, 13, "middle"))
        left += width
    top += 28 + 20 * count + 24
    return page(round(top) + 64, "The gap of every teacher at every token", parts + legend(top))


def legend(top: float) -> list[str]:
    """What the colours and signs of the gaps' drawing mean."""
    parts = [
        text(210, top + 4, "less likely under the teacher than under the student"),
        text(722, top + 4, "likelier"),
        *cell(84, top + 18, 38, 0),
        text(130, top + 32, f"almost equal: |Δ| below {NEAR_0:g} nats"),
        text(594, top + 32, "deeper colour: larger |Δ|, in nats"),
        outline(84.5, top + 46.5, 37, 17, "3 3"),
        text(130, top + 60, "masked: neither support nor loss counts this token"),
        text(594, top + 60, "·  a space      ↵  a line break"),
    ]
    for i, size in enumerate((3, 1, 0.3)):
        parts += cell(84 + 40 * i, top - 10, 38, -size)
        parts += cell(674 - 40 * i, top - 10, 38, size)
    return parts


def cell(x: float, y: float, width: float, gap: float) -> list[str]:
    """A gap's cell: the stronger its colour the larger the gap, with its number if not near 0."""
    if abs(gap) < NEAR_0:
        return [box(x, y, width, 18, FAINT, 3, 0.3)]
    color = tint(LIKES if gap > 0 else DISLIKES, min(1, 0.3 + 0.4 * math.sqrt(abs(gap))))
    number = text(x + width / 2, y + 13, signed(gap, 2), DARK, 11, "middle")
    return [box(x, y, width, 18, color, 3), number]


def tint(color: str, strength: float) -> str:
    """The colour over white."""
    channels = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - strength * (255 - c)):02x}" for c in channels)


def support(data: dict) -> str:
    """Left: a teacher's gaps, cut at the clip. Right: all supports, and what the verdict makes."""
    x, settings = data["example"], data["settings"]
    clip = settings["c_delta"]
    parts = [text(20, 22, "the gap of teacher 1 at each unmasked token, in nats")]
    bottom, scale = 62, 52  # y of a gap of 0; pixels of a nat

    def y_of(gap: float) -> float:
        return bottom - scale * gap

    for level in (0.0, -1.0, -2.0, -clip):
        width = 1 if level in (0, -clip) else 0.4
        parts.append(line(50, y_of(level), 420, y_of(level), FAINT, width))
        parts.append(text(44, y_of(level) + 4, signed(level, 0) if level else "0", anchor="end"))
    counted = [gap for gap, kept in zip(x["delta"][0], x["mask"]) if kept]
    step = 360 / len(counted)
    for i, gap in enumerate(counted):
        kept = max(-clip, min(clip, gap))
        color = LIKES if gap > 0 else DISLIKES
        place = 54 + step * i
        if abs(gap) >= NEAR_0:
            parts.append(line(place, y_of(0), place, y_of(kept), color, 4))
        else:
            parts.append(dot(place, y_of(gap), 2.5, FAINT))
        if abs(gap) > clip:
            words = f"{signed(gap, 2)} counts as {signed(kept, 0)}: the clip is ±{clip:g}"
            parts.append(text(place + step + 4, y_of(kept) - 9, words))
    rest = sum(abs(gap) < NEAR_0 for gap in counted)
    parts.append(text(420, y_of(0) - 10, f"the other {rest} gaps: almost 0", anchor="end", size=12))
    words = f"mean over {len(counted)} tokens: ã = {signed(x['a'][0], 3)}"
    parts.append(text(235, y_of(-clip) + 34, words, anchor="middle", weight=600))
    parts += thresholds(x, settings["eps_a"])
    return page(292, "Clip, mean, threshold and polarity", parts)


def thresholds(x: dict, eps: float) -> list[str]:
    """The teachers' supports on one axis, with the band that is ignored."""
    low, high, left, right, axis = -0.08, 0.02, 520, 740, 226

    def x_of(a: float) -> float:
        return left + (right - left) * (a - low) / (high - low)

    outcome = "right" if x["r"] > 0 else "wrong"
    parts = [
        text(left, 22, f"support ã of each teacher, in nats; the solution is {outcome}"),
        box(x_of(-eps), 36, x_of(eps) - x_of(-eps), axis - 36, FAINT, 3, 0.3),
        line(x_of(0), 36, x_of(0), axis, GREY, 1, "2 3"),
        line(left, axis, right, axis),
    ]
    for a in (-0.08, -0.06, -0.04, -0.02, 0.0, 0.02):
        parts.append(line(x_of(a), axis, x_of(a), axis + 5))
        name = signed(a, 2) if a else "0"
        parts.append(text(x_of(a), axis + 19, name, size=12, anchor="middle"))
    for k, (a, rho) in enumerate(zip(x["a"], x["rho"])):
        y, fate = 58 + 44 * k, FATES[rho]
        color = FATE_COLORS[fate] if rho else GREY
        parts += [
            line(left, y, right, y, FAINT, 0.7),
            dot(x_of(a), y, 6, color),
            text(left - 8, y + 4, f"teacher {k + 1}", anchor="end"),
            text(right + 12, y + 4, signed(a, 3)),
            text(right + 66, y + 4, fate, color, 13, "start", 600),
        ]
    parts += [
        text(left, axis + 42, "← finds it less likely", size=12),
        text(right, axis + 42, "likelier →", size=12, anchor="end"),
        box(right + 16, axis + 30, 14, 14, FAINT, 3, 0.3),
        text(right + 36, axis + 42, f"|ã| ≤ ε_a = {eps:g}", size=12),
    ]
    return parts


def loss_of(gap: float, tau: float) -> float:
    """Eq. 14."""
    return math.log(2) - math.log1p(math.exp(-(gap**2) / (2 * tau)))


def slope_of(gap: float, tau: float) -> float:
    """Eq. 17."""
    return gap / tau / (1 + math.exp(gap**2 / (2 * tau)))


def gate(data: dict) -> str:
    """Left: the gated loss and its slope. Right: how many gaps of the run lie where."""
    tau = data["settings"]["tau_g"]
    x_0, y_0, unit, tall = 266, 172, 40, 190  # the axes' crossing, pixels of a nat and of 1

    def point(gap: float, value: float) -> tuple[float, float]:
        return x_0 + unit * gap, y_0 - tall * value

    left, right = x_0 - 5 * unit, x_0 + 5 * unit
    span = [i / 20 for i in range(-100, 101)]
    parts = [upward(14, 148, "a token's loss, and its slope")]
    for value in (-0.4, -0.2, 0.2, 0.4, 0.6):
        _, y = point(0, value)
        parts.append(line(left, y, right, y, FAINT, 0.4))
        parts.append(text(left - 6, y + 4, signed(value, 1), size=12, anchor="end"))
    parts += [
        line(left, y_0, right, y_0),
        line(x_0, 34, x_0, 262),
        text(left - 6, y_0 + 4, "0", anchor="end"),
    ]
    for i in (-4, -2, 2, 4):
        parts.append(line(x_0 + unit * i, y_0, x_0 + unit * i, y_0 + 4))
        parts.append(text(x_0 + unit * i, y_0 + 17, signed(i, 0), size=12, anchor="middle"))
    parts.append(text(right, y_0 + 32, "gap Δ, nats", size=12, anchor="end"))
    parts.append(curve([point(d, loss_of(d, tau)) for d in span], LIKES))
    parts.append(curve([point(d, slope_of(d, tau)) for d in span], DISLIKES))
    parts.append(text(left, 26, "the gate, at most log 2 = 0.69", LIKES, 13, weight=600))
    parts.append(text(362, 126, "its slope g", DISLIKES, 13, weight=600))
    parts += marks_of_teachers(data["example"], tau, point)
    parts += gap_bars(data["gaps"], len(data["example"]["delta"]))
    return page(292, "The gate, its slope, and where a run's gaps lie", parts)


def marks_of_teachers(x: dict, tau: float, point: Callable) -> list[str]:
    """On the slope, the largest gap of each teacher that is not ignored, in its fate's colour."""
    parts, above, below = [], 150, 226  # y of the next label, left and right of the axis
    for teacher, (delta_T, rho) in enumerate(zip(x["delta"], x["rho"]), 1):
        if not rho:
            continue
        gap, color = max(delta_T, key=abs), FATE_COLORS[FATES[rho]]
        x_dot, y_dot = point(gap, slope_of(gap, tau))
        words = f"g({signed(gap, 2)}) = {signed(slope_of(gap, tau), 3)}"
        name = f"teacher {teacher}:"
        if gap < 0:
            parts.append(text(70, above, name, color, 12, weight=600))
            parts.append(text(70, above + 16, words, size=12))
            above -= 36
        else:
            parts.append(text(286, below, name, color, 12, weight=600))
            parts.append(text(362, below, words, size=12))
            below += 17
        parts.append(dot(x_dot, y_dot, 4, color))
    return parts


def gap_bars(counts: list[int], teachers_of_one: int) -> list[str]:
    """A bar for each range of |gap|, its length by the logarithm of the count."""
    edges = [f"{bound:g}" for bound in BOUNDS]
    names = [f"below {edges[0]}"]
    names += [f"{one} to {other}" for one, other in itertools.pairwise(edges)]
    names.append(f"above {edges[-1]}")
    total = sum(counts)
    words = f"{total // teachers_of_one:,} unmasked tokens × {teachers_of_one} teachers"
    parts = [
        text(520, 26, f"the run's {total:,} gaps by |Δ|, in nats", weight=600),
        text(520, 46, words, size=12),
        text(606, 62 + 30 * len(counts) + 8, "bar length on a log scale", size=12),
    ]
    for i, (name, count) in enumerate(zip(names, counts)):
        y = 62 + 30 * i
        width = 170 * math.log10(max(count, 1)) / math.log10(max(counts))
        words = f"{count:,} ({count / total:.2%})"
        parts += [
            text(598, y + 15, name, anchor="end"),
            box(606, y, max(width, 1), 20, BARS, 3, 0.85),
            text(614 + width, y + 15, words, size=12),
        ]
    return parts


def bank(data: dict) -> str:
    """Left: how the first bank was made, and its versions. Right: each skill's fate."""
    life = data["bank"]
    wrong = life["solutions"] - life["right"]
    words = f"before step 1: {life['solutions']} solutions, {life['right']} right, {wrong} wrong"
    parts = [
        text(10, 22, words, weight=600),
        text(10, 44, "entries left after each round of merging", size=12),
    ]
    for kind, x in (("skills", 10), ("mistakes", 226)):
        sizes = life[kind]
        for i, size in enumerate(sizes):
            parts.append(box(x + 17 * i, 174 - 2.8 * size, 14, 2.8 * size, BARS, 2))
            if i in (0, len(sizes) - 1):
                parts.append(text(x + 17 * i + 7, 189, str(size), size=12, anchor="middle"))
        parts.append(text(x, 70, f"{kind}, {len(sizes) - 1} rounds", size=12))
    versions = {int(step): sizes for step, sizes in life["versions"].items()}
    every = data["settings"]["evolve_every"]
    words = f"success: share of right solutions in the last {every} steps"
    parts.append(text(10, 232, words, size=12))
    y, before = 258, versions[0]
    for step, share in life["success"].items():
        sizes, goal = versions.get(int(step), before), data["settings"]["success_gate"]
        skills, mistakes = (size - old for size, old in zip(sizes, before))
        change = "no change"
        if skills + mistakes:
            change = f"{grown(skills, 'skill')}, {grown(mistakes, 'mistake')}"
        sign = "<" if share < goal else "≥"
        parts.append(text(10, y, f"after step {step}", weight=600))
        parts.append(text(122, y, f"success {share:.0%} {sign} {goal:.0%}: {change}"))
        y, before = y + 24, sizes
    parts += fate_bars(data["fates"], data["added"], len(data["example"]["rho"]))
    return page(350, "The life of a bank, and what became of each skill", parts)


def grown(count: int, noun: str) -> str:
    return f"+{count} {noun}" + "s" * (count != 1)


def fate_bars(fates: list[list], added: dict[str, int], teachers_of_one: int) -> list[str]:
    """A row for each skill: its teachers, reversed to the left and distilled to the right."""
    middle, unit, top = 692.0, 3.2, 74  # x of no teachers; pixels of a teacher; y of the first row
    total = sum(sum(counts) for _, *counts in fates)
    ignored = sum(counts[-1] for _, *counts in fates) / total
    words = f"{total // teachers_of_one} solutions × {teachers_of_one} teachers, by skill"
    parts = [
        text(450, 22, words, weight=600),
        text(450, 44, f"{ignored:.0%} are ignored: their support is too weak", size=12),
        text(middle - 8, 66, "reversed", FATE_COLORS["reversed"], 12, "end", 600),
        text(middle + 8, 66, "distilled", FATE_COLORS["distilled"], 12, "start", 600),
        text(850, 66, "ignored", GREY, 12, "end", 600),
        line(middle, top, middle, 346),
    ]
    y = top
    for title, distilled, reversed_, rest in fates:
        new = added[title] > 0
        if new and y == top + 25 * sum(step == 0 for step in added.values()):
            parts.append(text(436, y + 14, f"new after step {added[title]}", size=12, weight=600))
            y += 22
        parts += [
            text(576, y + 14, title, size=12.5, anchor="end"),
            box(middle - unit * reversed_, y, unit * reversed_, 18, FATE_COLORS["reversed"], 2),
            box(middle, y, unit * distilled, 18, FATE_COLORS["distilled"], 2),
            text(middle - unit * reversed_ - 6, y + 14, str(reversed_), size=12, anchor="end"),
            text(middle + unit * distilled + 6, y + 14, str(distilled), size=12),
            text(850, y + 14, str(rest), size=12, anchor="end"),
        ]
        y += 25
    return parts


DRAWINGS = {draw.__name__: draw for draw in (teachers, gaps, support, gate, bank)}


def main() -> None:
    if sys.argv[1:]:
        DATA.write_text(json.dumps(extract(pathlib.Path(sys.argv[1])), ensure_ascii=False) + "\n")
    data = json.loads(DATA.read_text(encoding="utf-8"))
    for name, draw in DRAWINGS.items():
        (HERE / f"{name}.svg").write_text(draw(data), encoding="utf-8")
        print(f"written: {HERE / name}.svg")


if __name__ == "__main__":
    main()
