"""The report of the demo as README.md shows it, in both themes.

    make demo
    python docs/pictures/report.py

writes report_light.png and report_dark.png beside this file, from the first screen of
runs/tiny/report.html. Needs Chromium and Python's pillow.
"""

import pathlib
import subprocess
import tempfile

from PIL import Image

HERE = pathlib.Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "runs/tiny/report.html"
THEMES = {"dark": 0, "light": 1}  # Chromium's numbers
SIZE = "1280,700"
VIEW = "#view=gate"


def main() -> None:
    for theme, number in THEMES.items():
        with tempfile.TemporaryDirectory() as folder:
            shot = pathlib.Path(folder, "shot.png")
            flags = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={SIZE}"]
            flags += [
                f"--blink-settings=preferredColorScheme={number}",
                f"--user-data-dir={folder}",
            ]
            flags += ["--virtual-time-budget=4000", f"--screenshot={shot}"]
            command = ["chromium", *flags, f"{PAGE.as_uri()}{VIEW}"]
            subprocess.run(command, check=True, capture_output=True)
            image = Image.open(shot).convert("RGB")
            image = image.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        image.save(HERE / f"report_{theme}.png", optimize=True)


if __name__ == "__main__":
    main()
