"""The pictures of the report that README.md and this folder's page show, from the tiny run.

    python sgsd.py --preset tiny
    python research/tiny_run/pictures.py runs/tiny

It writes the run's report and takes each picture with Chromium, without a window:

    chromium --headless --hide-scrollbars --window-size=1280,900 --screenshot=FILE.png PAGE#VIEW

Then Pillow, which comes with matplotlib, makes it a picture of 256 colours: a third of the bytes.
"""

import argparse
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from extras import report

PICTURES = {  # name: (width and height, view)
    "report_curves": ("1280,800", "view=curves"),
    "report_gate": ("1280,1060", "view=gate&k=0"),  # opens where teachers differ most; teacher 1
    "report_ledger": ("1280,900", "view=ledger"),
}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=pathlib.Path, metavar="RUN", help="a finished tiny run")
    here = pathlib.Path(__file__).parent
    parser.add_argument("--out", type=pathlib.Path, default=here, help="folder of the pictures")
    args = parser.parse_args(argv)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        parser.error(f"no browser: install one of {', '.join(BROWSERS)}")
    page = args.run.resolve() / "report.html"
    report.main([str(args.run)])
    for name, (size, view) in PICTURES.items():
        picture = args.out / f"{name}.png"
        take(browser, f"{page.as_uri()}#{view}", size, picture)
        print(f"{picture}: {picture.stat().st_size / 1000:.0f} KB")


def take(browser: str, address: str, size: str, picture: pathlib.Path) -> None:
    """A picture of a page, of this size in pixels."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={profile}", f"--window-size={size}"]
        command += ["--virtual-time-budget=5000", f"--screenshot={picture.resolve()}", address]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    method = Image.Quantize.MAXCOVERAGE  # the default loses colours that only a few pixels have
    with Image.open(picture) as image:
        flat = image.convert("RGB").quantize(256, method, dither=Image.Dither.NONE)
    flat.save(picture, optimize=True)


if __name__ == "__main__":
    main()
