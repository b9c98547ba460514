"""README.md's drawing of one step: python docs/pictures/loop.py writes loop.svg beside this file.

A README is shown on a light or a dark ground, and the picture cannot know which. So the ground is
transparent, each box has a fill and a text colour of its own, and arrows and the words beside them
have a grey that is as far from white as from black.
"""

import pathlib

GREY = "#777b80"  # contrast 4.3 with white, 4.4 with #0d1117
FILLS = {"problem": "#e7e9ec", "model": "#cfe3fb", "verdict": "#d5efd8", "bank": "#fbe6c4"}
WIDTH, HEIGHT = 900, 346

BOXES = [  # left, top, width, fill, title, lines below it
    (10, 62, 150, "problem", "problem", ["from the training set"]),
    (226, 62, 186, "model", "student", ["sees only the problem"]),
    (474, 62, 174, "verdict", "verifier", ["right or wrong, r = ±1"]),
    (696, 62, 174, "problem", "reference answer", ["only for the verifier"]),
    (10, 214, 150, "bank", "skill bank", ["skills and mistakes"]),
    (226, 214, 186, "model", "K teachers", ["each also sees one pair:", "a skill and a mistake"]),
    (474, 214, 174, "verdict", "polarity", ["distil, ignore or", "reverse: push away"]),
    (696, 214, 174, "verdict", "push on tokens", ["bounded by the gate"]),
]
TALL = {62: 60, 214: 78}  # the height of a row's boxes, by its top

ARROWS = [  # the corners of a line, and whether it is dashed
    ("160,92 224,92", False),  # problem to student
    ("412,92 472,92", False),  # student to verifier
    ("696,92 650,92", False),  # reference answer to verifier
    ("40,122 40,212", False),  # problem to bank
    ("160,253 224,253", False),  # bank to teachers
    ("336,122 336,212", False),  # student to teachers
    ("561,122 561,212", False),  # verifier to polarity
    ("412,253 472,253", False),  # teachers to polarity
    ("648,253 694,253", False),  # polarity to push
    ("870,253 888,253 888,34 319,34 319,60", False),  # push to student
    ("258,122 258,166 138,166 138,212", True),  # a step's solutions to bank
]

WORDS = [  # x, y, anchor, text
    (603, 26, "middle", "one optimizer step on the student"),
    (48, 163, "start", "nearest"),
    (48, 180, "start", "pairs"),
    (252, 159, "end", "every 25 steps"),
    (147, 184, "start", "new entries, from right"),
    (147, 201, "start", "and wrong solutions"),
    (345, 172, "start", "its solution's tokens"),
    (570, 172, "start", "the verdict"),
]

LEGEND = [  # x, fill, text
    (10, "problem", "data"),
    (112, "model", "one model in both roles"),
    (352, "bank", "written by this model"),
    (576, "verdict", "fixed rules"),
]


def main() -> None:
    path = pathlib.Path(__file__).with_name("loop.svg")
    path.write_text(svg(), encoding="utf-8")
    print(f"written: {path}")


def svg() -> str:
    """The drawing."""
    title = "One step: problem, student, verifier; skill bank, teachers, polarity, push on tokens"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">',
        f"<title>{title}</title>",
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        'markerUnits="userSpaceOnUse" orient="auto">',
        f'<path d="M0,0 L8,4 L0,8 z" fill="{GREY}"/></marker>',
    ]
    for corners, dashed in ARROWS:
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        parts.append(
            f'<polyline points="{corners}" fill="none" stroke="{GREY}" stroke-width="1.8"'
            f'{dashes} marker-end="url(#tip)"/>'
        )
    for left, top, width, fill, name, lines in BOXES:
        middle, tall = left + width / 2, TALL[top]
        y = top + tall / 2 - 9 * len(lines) + 5  # of the title; the words stand in the middle
        parts.append(box(left, top, width, tall, 8, fill))
        parts.append(text(middle, y, "middle", name, "#16191d", "15", "600"))
        for i, line in enumerate(lines, 1):
            parts.append(text(middle, y + 2 + 18 * i, "middle", line, "#363c44", "12.5"))
    for x, y, anchor, words in WORDS:
        parts.append(text(x, y, anchor, words, GREY, "13"))
    for x, fill, words in LEGEND:
        parts.append(box(x, 318, 18, 18, 4, fill))
        parts.append(text(x + 26, 332, "start", words, GREY, "13"))
    return "\n".join([*parts, "</svg>", ""])


def box(left: float, top: float, width: float, height: float, radius: float, fill: str) -> str:
    return (
        f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
        f'fill="{FILLS[fill]}"/>'
    )


def text(
    x: float, y: float, anchor: str, words: str, fill: str, size: str, weight: str = "400"
) -> str:
    """A line of text; y is its base line."""
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}" font-size="{size}" '
        f'font-weight="{weight}">{words}</text>'
    )


if __name__ == "__main__":
    main()
