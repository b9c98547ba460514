"""The documents against the code and the paper: decisions, commands, and rows of tables."""

import json
import re
import shlex

import lock_tables
import pytest
from conftest import ROOT

import baselines
import config
import eval
import report
from cli import UserError

PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
TEXT = "\n".join(path.read_text() for path in PAGES).replace("\\\n", " ")
CLAIMS = (ROOT / "results" / "claims.md").read_text()
REPRODUCE = (ROOT / "docs" / "reproduce.md").read_text()
SHARED = ROOT.parent / "shared"
PAPER = SHARED / "paper.tex"
OF_A_READER = {  # scripts of docs/changing.md, and the program whose flags they take
    "my_gate.py": "sgsd.py",
    "total_variation.py": "baselines.py",
    "rejection.py": "baselines.py",
}


def test_every_decision_in_the_code_has_its_row_and_back():
    tags = set()
    for path in ROOT.glob("*.py"):
        tags |= set(re.findall(r"\b[SD]\d+\b(?! ?=)", path.read_text()))
    rows = re.findall(r"^\| ([SD]\d+) \|", TEXT, re.M)
    assert set(rows) == tags


def test_a_test_that_a_page_names_is_there():
    """Named by its file alone or by its path."""
    named = set(re.findall(r"`(?:[a-z]+/)*(test_\w+\.py)`", TEXT))
    assert named and named <= {path.name for path in (ROOT / "tests").rglob("test_*.py")}


def commands():
    """The lines of fenced blocks, and the words in backticks, that run a program."""
    found = set(re.findall(r"`((?:python|torchrun) [^`\n]*\.py[^`\n]*)`", TEXT))
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
    script = OF_A_READER.get(script, script)
    monkeypatch.chdir(tmp_path)  # where there is no run
    if script in ("sgsd.py", "skills.py", "baselines.py"):
        kinds = {"baselines.py": baselines.BaselineConfig, "skills.py": config.BankConfig}
        kind = kinds.get(script, config.Config)
        try:
            config.parse(argv, script, "", kind, baselines.DEFAULTS)
        except UserError as e:
            assert "--resume" in argv and "no readable config.json" in str(e), e
        except SystemExit:
            assert "--print-config" in argv
    elif script == "eval.py":
        eval.arguments(argv)
    elif script == "report.py":
        assert report.main(argv) == 2
        assert "--help lists the flags" not in capsys.readouterr().err
    else:
        text = (ROOT / script).read_text()
        for flag in re.findall(r"--[a-z][a-z-]*", command.partition(script)[2]):
            assert f'"{flag}"' in text, flag


def test_an_evaluation_of_the_tiny_run_is_asked_for_as_the_run_asks_itself():
    """So that it decodes as many rows at a time, and the samples that the run made are used."""
    cfg, _ = config.parse(["--preset", "tiny"], "sgsd.py", "")
    asked = [command for command in commands() if "eval.py tiny/model" in command]
    assert len(asked) > 4
    flags = ["--data", cfg.eval_data, *eval.flags_of(cfg).split()]
    wanted = vars(eval.arguments(["tiny/model", *flags]))
    for command in asked:
        given = vars(eval.arguments(shlex.split(command.partition("eval.py")[2])))
        for name in ("data", "samples", "rows", "max_new_tokens", "seed", "temperature", "dtype"):
            assert given[name] == wanted[name], (command, name)


@pytest.mark.skipif(not PAPER.exists(), reason="the paper is not here")
@pytest.mark.parametrize(
    "title, label, row",
    [
        ("Tab. 3", "tab:main", r"& ([A-Z]\S*) & (?:\\\w+\{)?\d"),
        ("Tab. 4", "tab:ablation-robust", r"(w/o [a-z ]+[a-z]|Base|SGSD)"),
    ],
)
def test_every_row_of_a_table_of_the_paper_has_its_two_commands(title, label, row):
    latex = PAPER.read_text().replace(r"\method{}", "SGSD").partition(f"\\label{{{label}}}")[2]
    names = set(re.findall(row, latex.partition(r"\end{tabular}")[0]))
    section = REPRODUCE.partition(f"## {title}")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| (.+?) \| `[^`]+\.py [^`]+` \| `[^`]+\.py [^`]+` ", section, re.M)
    assert names and sorted(lines) == sorted(names)


@pytest.mark.skipif(not PAPER.exists(), reason="the paper is not here")
def test_every_figure_that_claims_md_gives_as_the_papers_stands_in_the_paper():
    figures = re.findall(r"^\| [^|]+ \| ([^|]*\d[^|]*) \|", CLAIMS, re.M)
    given = set(re.findall(r"\d+\.\d", " ".join(figures)))
    assert len(given) > 20 and not given - set(re.findall(r"\d+\.\d", PAPER.read_text()))


@pytest.mark.skipif(not (SHARED / "banks").exists(), reason="the authors' banks are not here")
def test_the_sizes_of_the_papers_banks_are_those_of_the_released_files():
    sizes = []
    for key in ("general_skills", "common_mistakes"):
        for size in ("1b", "4b", "8b"):
            bank = json.loads((SHARED / "banks" / f"qwen3_{size}.json").read_text())
            sizes.append(len(bank[key]))
    told = "{}, {} and {} general skills, {}, {} and {} common mistakes".format(*sizes)
    assert told in REPRODUCE.replace("\n", " ")


def test_a_row_of_the_miniature_that_a_page_names_is_in_its_results():
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "results" / "miniature.md").read_text(), re.M)
    assert set(re.findall(r"\(\*(.+?)\*[,)]", REPRODUCE)) <= set(rows)


def test_the_figures_of_the_page_are_those_of_the_results(capsys):
    lock_tables.main()
    said, page = capsys.readouterr().out, (ROOT / "results/compare_lock_findings.md").read_text()
    assert "seed: [9, 53, 20, 20, 20]" in said and "9, 53, 20, 20 and 20" in page
    for figure in ("29.6%", "23.8%", "92.7% ± 8.0%", "67.5% ± 11.2%", "31.0% ± 13.0%"):
        assert figure in said and figure.replace("% ±", " ±").rstrip("%") in page
