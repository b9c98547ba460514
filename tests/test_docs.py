"""The documents against the code: every decision has its row, and every command parses."""

import re
import shlex

import pytest
from conftest import ROOT

import baselines
import config
import eval
import report
from distributed import UserError

PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
TEXT = "\n".join(path.read_text() for path in PAGES).replace("\\\n", " ")


def test_every_decision_in_the_code_has_its_row_and_back():
    tags = set()
    for path in ROOT.glob("*.py"):
        tags |= set(re.findall(r"\b[SD]\d+\b(?! ?=)", path.read_text()))
    rows = re.findall(r"^\| ([SD]\d+) \|", TEXT, re.M)
    assert set(rows) == tags


def commands():
    """The lines of fenced blocks that begin with python or torchrun."""
    found = set()
    for block in re.findall(r"^```\w*\n(.*?)^```", TEXT, re.M | re.S):
        found |= set(re.findall(r"^(?:python|torchrun) .*", block, re.M))
    return sorted(found)


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_documents_parses(command, tmp_path, monkeypatch, capsys):
    words = shlex.split(command, comments=True)
    script = next((word for word in words if word.endswith(".py")), None)
    if script is None:
        assert words[1] == "-m"
        return
    argv = words[words.index(script) + 1 :]
    monkeypatch.chdir(tmp_path)  # where there is no run
    if script in ("sgsd.py", "skills.py", "baselines.py"):
        kind = baselines.BaselineConfig if script == "baselines.py" else config.Config
        try:
            config.parse(argv, script, "", kind, baselines.DEFAULTS)
        except UserError as e:
            assert "--resume" in argv and "no readable config.json" in str(e), e
    elif script == "eval.py":
        eval.arguments(argv)
    elif script == "report.py":
        assert report.main(argv) == 2
        assert "--help lists the flags" not in capsys.readouterr().err
    else:
        text = (ROOT / script).read_text()
        for flag in re.findall(r"--[a-z][a-z-]*", command.partition(script)[2]):
            assert f'"{flag}"' in text, flag
