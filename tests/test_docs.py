"""The README against the code: every tag has its row and back, the flag table is the configuration, commands parse."""

import dataclasses
import re
import shlex

import pytest
from conftest import ROOT

import config
import sgsd

README = (ROOT / "README.md").read_text().replace("\\\n", " ")
CODE = "".join(p.read_text() for p in ROOT.glob("*.py"))


def flag_table() -> str:
    lines = ["| flag | default | source |", "|---|---|---|"]
    for f in dataclasses.fields(sgsd.Config):
        lines.append(
            f"| `--{f.name.replace('_', '-')}` | `{f.default!r}` | {f.metadata['source']} |"
        )
    return "\n".join(lines)


def test_the_flag_table_is_the_configuration():
    assert flag_table() in README, "paste this into the README:\n" + flag_table()


def test_the_presets_are_their_table():
    rows = re.findall(r"^\| `--([\w-]+)` \| (.*?) \| (.*?) ?\| (.*?) ?\| .*\|$", README, re.M)
    shown = {
        name: dict(zip(("paper", "authors", "tiny"), (cell.strip("`") for cell in cells)))
        for name, *cells in rows
    }
    wanted: dict[str, dict[str, str]] = {}
    for preset in ("authors", "tiny"):
        for name, value in config.PRESETS[preset].items():
            default = {f.name: f.default for f in dataclasses.fields(sgsd.Config)}[name]
            row = wanted.setdefault(
                name.replace("_", "-"), {"paper": str(default) or "none", "authors": "", "tiny": ""}
            )
            row[preset] = str(value)
    assert shown == wanted and config.PRESETS["paper"] == {}


def test_every_tag_has_its_row_and_back():
    rows = set(re.findall(r"^\| ([SD]\d+) \|", README, re.M))
    tags = set(re.findall(r"\b([SD]\d+)\b", re.sub(r"\b[SD]\d+ ?=", "", CODE)))
    assert rows == tags


def test_every_test_file_named_exists():
    for name in re.findall(r"`(test_\w+\.py|bench\.py)`", README):
        assert (ROOT / "tests" / name).exists(), name
    for name in re.findall(r"^\| `(\w+\.py|\w+/)` \|", README, re.M):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize(
    "command", sorted(set(re.findall(r"((?:sgsd|eval|bench)\.py(?: [^\n`]*[^\n` ])?)", README)))
)
def test_commands_use_flags_that_exist(command):
    given = set(re.findall(r"--[a-z][a-z-]+", command))
    program = "tests/bench.py" if command.startswith("bench") else shlex.split(command)[0]
    text = (ROOT / program).read_text() + (CODE if program == "sgsd.py" else "")
    known = set(re.findall(r'"(--[a-z][a-z-]+)"', text))
    if program == "sgsd.py":
        known = {"--resume", "--help", "--preset", "--print-config"} | {
            "--" + f.name.replace("_", "-") for f in dataclasses.fields(sgsd.Config)
        }
    assert given <= known, given - known


def test_the_miniature_tables_are_the_measured_ones():
    for table in (ROOT / "results" / "miniature.md").read_text().split("\n\n")[:2]:
        assert table.strip() in README


def test_every_flag_named_in_the_text_exists():
    code = CODE + "".join(
        (ROOT / "tests" / name).read_text() for name in ("bench.py", "miniature.py")
    )
    known = {"--" + f.name.replace("_", "-") for f in dataclasses.fields(sgsd.Config)} | set(
        re.findall(r'"(--[a-z][a-z-]+)"', code)
    )
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)) - known <= {
        "--nproc",
        "--standalone",
        "--shutdown-timeout",
        "--max-restarts",
    }


def test_the_project_speaks_of_itself_alone():
    for path in [*ROOT.glob("*.py"), *ROOT.glob("tests/*.py"), ROOT / "README.md"]:
        assert (
            not re.search(r"/work/|/root/|pypi\.org|/tmp/", path.read_text())
            or path.name == "test_docs.py"
        ), path
