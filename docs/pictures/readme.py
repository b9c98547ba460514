"""README.md, docs/method.md and docs/guide.md as a code host shows them, in both themes.

    npm install github-markdown-css katex
    python docs/pictures/readme.py node_modules runs/pages

writes README_light.png and so on into runs/pages. Needs Chromium, and Python's markdown-it-py and
pillow. Look at the pictures after a change to one of the pages or drawings.
"""

import pathlib
import subprocess
import sys
import tempfile

from markdown_it import MarkdownIt
from PIL import Image, ImageChops

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/method.md", "docs/guide.md")
GROUNDS = {"light": "#ffffff", "dark": "#0d1117"}
WIDTH, HEIGHT = 900, 12_000  # more than the page has; the rest is cut off
PAGE = """<!doctype html><meta charset="utf-8"><base href="file://{folder}/">
<meta name="color-scheme" content="{theme}">
<link rel="stylesheet" href="file://{modules}/katex/dist/katex.min.css">
<script defer src="file://{modules}/katex/dist/katex.min.js"></script>
<style>{css}
body {{ margin: 0; background: {ground}; }}
article {{ box-sizing: border-box; width: {width}px; padding: 32px; }}
</style><article class="markdown-body">{body}</article>
<script type="module">
for (const code of document.querySelectorAll("code.language-math"))
  katex.render(code.textContent, code.parentElement, {{ displayMode: true }});
</script>"""


def picture(path: pathlib.Path, theme: str, modules: pathlib.Path) -> Image.Image:
    """A page in a theme, without the empty rest below it."""
    body = MarkdownIt("gfm-like", {"linkify": False}).render(path.read_text())
    with tempfile.TemporaryDirectory() as folder:
        page, shot = pathlib.Path(folder, "page.html"), pathlib.Path(folder, "shot.png")
        style = (modules / f"github-markdown-css/github-markdown-{theme}.css").read_text()
        values = {"folder": path.parent, "css": style, "ground": GROUNDS[theme], "width": WIDTH}
        page.write_text(PAGE.format(**values, modules=modules, theme=theme, body=body))
        flags = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--screenshot={shot}"]
        flags += ["--virtual-time-budget=4000", "--allow-file-access-from-files"]
        flags += [f"--blink-settings=preferredColorScheme={int(theme == 'light')}"]
        command = ["chromium", *flags, f"--window-size={WIDTH},{HEIGHT}", str(page)]
        subprocess.run(command, check=True, capture_output=True)
        image = Image.open(shot).convert("RGB")
    ground = Image.new("RGB", image.size, GROUNDS[theme])
    _, _, _, bottom = ImageChops.difference(image, ground).getbbox() or (0, 0, 0, HEIGHT)
    return image.crop((0, 0, WIDTH, bottom + 32)).quantize(256, dither=Image.Dither.NONE)


def main() -> None:
    modules, out = (pathlib.Path(word).resolve() for word in sys.argv[1:])
    out.mkdir(parents=True, exist_ok=True)
    for name in PAGES:
        for theme in GROUNDS:
            image = picture(ROOT / name, theme, modules)
            image.save(out / f"{pathlib.Path(name).stem}_{theme}.png", optimize=True)


if __name__ == "__main__":
    main()
