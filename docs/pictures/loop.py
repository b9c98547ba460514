"""README.md's drawing of one step: python docs/pictures/loop.py writes loop.svg beside this file.

A README is shown on a light or a dark ground, and the picture cannot know which. So the ground is
transparent, each box has a fill and a text colour of its own, and arrows and the words beside them
have a grey that is as far from white as from black.
"""

import pathlib

GREY = "#777b80"  # contrast 4.3 with white, 4.4 with #0d1117
FILLS = {"problem": "#e7e9ec", "model": "#cfe3fb", "verdict": "#d5efd8", "bank": "#fbe6c4"}
WIDTH, HEIGHT = 900, 322

BOXES = [  # left, top, width, fill, title, lines below it
    (10, 62, 170, "problem", "problem", "with its reference answer"),
    (250, 62, 190, "model", "student", "sees only the problem"),
    (500, 62, 170, "verdict", "verifier", "right or wrong, r = ±1"),
    (10, 186, 170, "bank", "skill bank", "skills and mistakes"),
    (250, 186, 190, "model", "K teachers", "each also sees one pair"),
    (500, 186, 170, "verdict", "polarity", "distil, push away or skip"),
    (720, 186, 170, "verdict", "push on tokens", "bounded by the gate"),
]
TALL = 60  # of a box

ARROWS = [  # the corners of a line, and whether it is dashed
    ("180,92 248,92", False),  # problem to student
    ("440,92 498,92", False),  # student to verifier
    ("95,122 95,184", False),  # problem to bank
    ("180,216 248,216", False),  # bank to teachers
    ("345,122 345,184", False),  # student to teachers
    ("585,122 585,184", False),  # verifier to polarity
    ("440,216 498,216", False),  # teachers to polarity
    ("670,216 718,216", False),  # polarity to push
    ("805,186 805,34 345,34 345,60", False),  # push to student
    ("805,246 805,286 95,286 95,248", True),  # a step's solutions to bank
]

WORDS = [  # x, y, anchor, text
    (575, 26, "middle", "one optimizer step on the student"),
    (104, 158, "start", "nearest pairs"),
    (354, 158, "start", "its solution's tokens"),
    (594, 158, "start", "the verdict"),
    (451, 306, "middle", "every 25 steps the model adds to the bank from its own solutions"),
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
    for left, top, width, fill, name, line in BOXES:
        middle = left + width / 2
        parts += [
            f'<rect x="{left}" y="{top}" width="{width}" height="{TALL}" rx="8" '
            f'fill="{FILLS[fill]}"/>',
            text(middle, top + 25, "middle", name, "#16191d", "15", "600"),
            text(middle, top + 45, "middle", line, "#363c44", "12.5"),
        ]
    for x, y, anchor, words in WORDS:
        parts.append(text(x, y, anchor, words, GREY, "13"))
    return "\n".join([*parts, "</svg>", ""])


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
