"""README.md as a code host shows it: readme_light.png and readme_dark.png beside this file.

    npm install github-markdown-css
    python docs/pictures/readme.py node_modules/github-markdown-css

Needs Chromium, and Python's markdown-it-py and pillow. Look at both pictures after a change to
README.md or to one of its drawings.
"""

import pathlib
import subprocess
import sys
import tempfile

from markdown_it import MarkdownIt
from PIL import Image, ImageChops

ROOT = pathlib.Path(__file__).resolve().parents[2]
GROUNDS = {"light": "#ffffff", "dark": "#0d1117"}
WIDTH, HEIGHT = 900, 12_000  # more than the page has; the rest is cut off
PAGE = """<!doctype html><meta charset="utf-8"><base href="file://{root}/">
<style>{css}
body {{ margin: 0; background: {ground}; }}
article {{ box-sizing: border-box; width: {width}px; padding: 32px; }}
</style><article class="markdown-body">{body}</article>"""


def picture(theme: str, css: pathlib.Path, body: str) -> Image.Image:
    """The page in a theme, without the empty rest below it."""
    with tempfile.TemporaryDirectory() as folder:
        page, shot = pathlib.Path(folder, "page.html"), pathlib.Path(folder, "shot.png")
        style = (css / f"github-markdown-{theme}.css").read_text()
        values = {"root": ROOT, "css": style, "ground": GROUNDS[theme], "width": WIDTH}
        page.write_text(PAGE.format(**values, body=body))
        flags = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--screenshot={shot}"]
        command = ["chromium", *flags, f"--window-size={WIDTH},{HEIGHT}", str(page)]
        subprocess.run(command, check=True, capture_output=True)
        image = Image.open(shot).convert("RGB")
    ground = Image.new("RGB", image.size, GROUNDS[theme])
    _, _, _, bottom = ImageChops.difference(image, ground).getbbox() or (0, 0, 0, HEIGHT)
    return image.crop((0, 0, WIDTH, bottom + 32)).quantize(256, dither=Image.Dither.NONE)


def main() -> None:
    body = MarkdownIt("gfm-like", {"linkify": False}).render((ROOT / "README.md").read_text())
    for theme in GROUNDS:
        image = picture(theme, pathlib.Path(sys.argv[1]), body)
        image.save(pathlib.Path(__file__).with_name(f"readme_{theme}.png"), optimize=True)


if __name__ == "__main__":
    main()
