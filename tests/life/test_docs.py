"""Pages: links lead somewhere, commands parse, decisions have their rows; research/ runs."""

import ast
import os
import re
import shlex
import subprocess
import sys

import pytest
import small_run
from conftest import ROOT
from driver import rows
from small_run import METHODS

from extras import compare, report
from lib import runlog

PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "tiny").rglob("*.md")]
PAGES.append(ROOT / "tests" / "spec" / "README.md")
CLAIMS = ROOT / "tests" / "spec" / "claims.md"
RESEARCH = sorted((ROOT / "research").rglob("*.md"))
TEXT = "\n".join(path.read_text() for path in PAGES)
README = (ROOT / "README.md").read_text()
RECIPES = (ROOT / "docs/changing.md").read_text() + (ROOT / "docs/engines.md").read_text()
OF_A_READER = set(re.findall(r"^# (\w+\.py)$", RECIPES, re.M))  # what a reader writes himself
EXTRAS = {"extras.compare": compare, "extras.report": report}
PROGRAMS = {"venv", "pytest", "gym_data"}  # that are started with -m
PROGRAMS |= {"extras.on_trl", "extras.grpo_on_trl"}  # their parsers need TRL


def prose(page):
    """A page without its blocks of code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    return re.sub(r"^    .*$", "", text, flags=re.M)


def anchors(page):
    """The names of a page's headings, as a code host makes them."""
    names = set()
    for heading in re.findall(r"^#+ (.*)", prose(page), re.M):
        text = re.sub(r"\]\([^)]*\)", "", heading).lower()
        names.add(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    return names


@pytest.mark.parametrize(
    "page", [*PAGES, CLAIMS, *RESEARCH], ids=lambda page: str(page.relative_to(ROOT))
)
def test_a_link_leads_to_a_file_and_to_a_heading_in_it(page):
    """And a path in backticks, of research/ or tests/, to a file."""
    text = prose(page)
    for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        place = page.parent / path if path else page
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), target
    for path in re.findall(r"`((?:research|tests)/[^`\s:]*)", text):
        assert (ROOT / path).exists(), path


def test_every_decision_in_the_code_has_its_row_and_back():
    tags = set()
    for path in [*ROOT.glob("*.py"), *ROOT.glob("*/*.py")]:
        tags |= set(re.findall(r"\b[SD]\d+\b(?! ?=)", path.read_text()))
    rows = re.findall(r"^\| ([SD]\d+) \|", TEXT, re.M)
    assert set(rows) == tags


def commands():
    """The lines of blocks that run a program, and the words in backticks outside of records; and
    make's."""
    makefile = re.sub(r" *\\\n\s*", " ", (ROOT / "Makefile").read_text())
    lines = set(re.findall(r"^\t\$\(run\) (.*)", makefile, re.M))
    lines = {f"python {line}" for line in lines}
    for page in [*PAGES, *RESEARCH]:
        text = re.sub(r" *\\\n\s*", " ", page.read_text())  # without broken lines
        if page in PAGES:
            lines |= set(re.findall(r"`((?:python|torchrun) [^`\n]*(?:\.py|-m )[^`\n]*)`", text))
        lines |= set(re.findall(r"^ {0,4}((?:python|torchrun) .*(?:\.py|-m ).*)", text, re.M))
    return sorted(line for line in lines if not {"$", "…"} & {*line})


def program_of(command):
    """The program that a command starts, a file or a module, and its arguments."""
    words = shlex.split(command.partition(" > ")[0].replace(" ...", ""), comments=True)
    for i, word in enumerate(words):
        if word == "-m":
            return words[i + 1], words[i + 2 :]
        if word.endswith(".py"):
            return word, words[i + 1 :]
    raise AssertionError(command)


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_pages_parses(command, tmp_path, monkeypatch):
    program, argv = program_of(command)
    monkeypatch.chdir(tmp_path)
    for word in argv:
        if word.startswith("@"):  # a file of flags
            (tmp_path / word[1:]).touch()
    if "--help" in argv or program in OF_A_READER:  # whose recipe's test runs it
        return
    method = program.removeprefix("methods.").removesuffix(".py")
    if method in {"eval", *METHODS}:
        small_run.parsed(argv, method)
    elif program in EXTRAS:
        EXTRAS[program].arguments(argv)
    elif program.endswith(".py"):
        text = (ROOT / program).read_text()
        for flag in re.findall(r"--[a-z][a-z-]*", command.partition(program)[2]):
            assert f'"{flag}"' in text, flag
    else:
        assert program in PROGRAMS


def test_each_test_that_a_claim_names_exists():
    """And each equation of the paper's text and each line of Algorithms 1-4 has its row."""
    page = CLAIMS.read_text()
    names = {}
    for path, name in re.findall(r"`(tests/\S+)::(test_\w+)`", page):
        names.setdefault(path, set()).add(name)
    for path, of_file in names.items():
        defined = {getattr(x, "name", "") for x in ast.parse((ROOT / path).read_text()).body}
        assert of_file <= defined, path
    for title, kind, last in (
        ("Equations", r"Eqs?\.", 26),
        ("Algorithm 1", "lines?", 18),
        ("Algorithm 2", "lines?", 16),
        ("Algorithm 3", "lines?", 13),
        ("Algorithm 4", "lines?", 14),
    ):
        section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        shown = set()
        for first, end in re.findall(rf"^\| {kind} (\d+)(?:-(\d+))?", section, re.M):
            shown |= {*range(int(first), int(end or first) + 1)}
        assert shown == {*range(1, last + 1)}, title


def run(*argv):
    """What Python prints, which must succeed."""
    command, environment = [sys.executable, *argv], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.long
def test_what_must_be_checked_on_a_gpu_runs_in_small_without_one(tmp_path):
    steps = ["bf16", "bf16_eval", "fp32", "fp32_again", "step"]
    steps += ["large_decode", "large_attention", "large_masks", "large_step", "large_rows"]
    printed = run("research/speed/gpu.py", str(tmp_path), "--cpu", "--steps", *steps)
    codes = dict(re.findall(r"^\| (\w+) \| (\w+) \| \d+ \|$", printed, re.M))
    assert codes == dict.fromkeys(steps, "0")
    assert "fp32 twice: 8 of 8 rollouts" in printed


@pytest.mark.long
@pytest.mark.parametrize(
    "question", ("cost", "methods", "polarity", "robustness", "speed", "worlds")
)
def test_a_question_with_tests_of_its_own_passes_them(question):
    run("-m", "pytest", "-m", "", f"research/{question}")


def test_the_sections_and_functions_that_readme_names_are_in_their_files():
    """In a row of a table: a file, *sections* of it, and names that it defines."""
    rows_of_files = re.findall(r"^\|.*`([a-z/]+\.py)`.*$", README, re.M)
    for row in re.findall(r"^\|.*`[a-z/]+\.py`.*$", README, re.M):
        (name,) = re.findall(r"`([a-z/]+\.py)`", row)
        text = (ROOT / name).read_text()
        for section in re.findall(r"\*([a-z ]+)\*", row):
            assert re.search(rf"^# -+ {section}\b", text, re.M), section
        defined = {getattr(x, "name", "") for x in ast.parse(text).body}
        assert {*re.findall(r"`([A-Za-z_]+)`", row)} <= defined, row
    assert {"sgsd.py", "skills.py", "scoring.py", "rollout.py"} <= {*rows_of_files}


def test_the_page_of_metrics_names_each_number_of_a_step(uninterrupted):
    """The columns of metrics.jsonl, and the words of the line."""
    (row, *_) = rows(uninterrupted / "metrics.jsonl")
    page = (ROOT / "docs/metrics.md").read_text()
    named = set(re.findall(r"`([^`\s]+)`", page))
    columns = {re.sub(r"_(success|failure|truncated)$|^seconds(?=\.)", "", name) for name in row}
    words = re.findall(r"(?<= )([a-z]+\+?) [-+.]?\d", runlog.log_line(row, 6))
    stems = {re.sub(r"_(success|failure|truncated)$|^seconds(?=\.)", "", name) for name in named}
    assert columns - {"step"} <= stems and {*words} <= stems
