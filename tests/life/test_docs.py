"""The documents against the code and the paper: decisions, commands, links, and rows of tables."""

import importlib.util
import json
import re
import shlex

import pytest
from conftest import ROOT

import eval
from extras import baselines, probe, report
from lib import config
from research.methods import lock_tables

PAGES = [ROOT / "README.md", ROOT / "tiny" / "README.md", *(ROOT / "docs").glob("*.md")]
TEXT = "\n".join(path.read_text() for path in PAGES).replace("\\\n", " ")
README = (ROOT / "README.md").read_text()
CHANGING = (ROOT / "docs" / "changing.md").read_text()
REPRODUCE = (ROOT / "docs" / "reproduce.md").read_text()
CLAIMS = (ROOT / "research" / "methods" / "claims.md").read_text()
SHARED = ROOT.parent / "shared"
PAPER = SHARED / "paper.tex"
OF_A_READER = set(re.findall(r"^# (\w+\.py)$", CHANGING, re.M))  # what a reader writes himself
OTHERS = {  # flags of programs that are not ours, which a page names
    "--max-restarts",
    "--shutdown-timeout",
    "--nproc_per_node",
    "--max-lora-rank",
    "--override-generation-config",
    "--api-server-count",
    "--data-parallel-size",
    "--enable-lora",
    "--generation-config",
    "--logprobs-mode",
    "--max-loras",
    "--max-model-len",
    "--gpu-memory-utilization",
}


def test_every_decision_in_the_code_has_its_row_and_back():
    tags = set()
    for path in [*ROOT.glob("*.py"), *(ROOT / "extras").glob("*.py")]:
        tags |= set(re.findall(r"\b[SD]\d+\b(?! ?=)", path.read_text()))
    rows = re.findall(r"^\| ([SD]\d+) \|", TEXT, re.M)
    assert set(rows) == tags


def test_a_python_file_that_a_page_names_is_there():
    """Named by its file alone or by its path."""
    files = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py")}
    names = {path.rpartition("/")[2] for path in files}
    for span in re.findall(r"`([^`\n]+)`", TEXT):
        for path in re.findall(r"[\w/]+\.py\b", span):
            is_there = path in files if "/" in path else path in names | OF_A_READER
            assert is_there, path


def test_a_link_leads_to_a_file():
    pages = [*PAGES, ROOT / "CHANGELOG.md", *(ROOT / "research").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page}: {target}"


def test_a_flag_that_a_page_names_is_one():
    sources = [*ROOT.glob("*.py"), *(ROOT / "extras").glob("*.py"), *(ROOT / "tiny").glob("*.py")]
    sources += (ROOT / "research").rglob("*.py")
    text = "\n".join(path.read_text() for path in sources)
    flags = set(re.findall(r'"(--[a-z-]+)"', text)) | OTHERS
    for kind in (config.Config, baselines.BaselineConfig):
        for name in kind.__dataclass_fields__:
            flags |= {config.flag(name), config.flag(f"no_{name}")}
    prose = re.sub(r"^```.*?^```$", "", TEXT, flags=re.M | re.S)
    for span in re.findall(r"`([^`\n]+)`", prose):
        for name in re.findall(r"(?<![\w-])--[a-z][a-z_-]+", span):
            assert name in flags, span


def commands():
    """The lines of fenced blocks, and the words in backticks, that run a program."""
    lines = set(re.findall(r"`((?:python|torchrun) [^`\n]*(?:\.py|-m )[^`\n]*)`", TEXT))
    for block in re.findall(r"^```\w*\n(.*?)^```", TEXT, re.M | re.S):
        lines |= set(re.findall(r"^(?:python|torchrun) .*", block, re.M))
    return sorted(lines)


def program_of(command):
    """The program that a command starts, a file or a module, and its arguments."""
    words = shlex.split(command.partition(" > ")[0], comments=True)
    for i, word in enumerate(words):
        if word == "-m":
            return words[i + 1], words[i + 2 :]
        if word.endswith(".py"):
            return word, words[i + 1 :]
    raise AssertionError(command)


def make_paths(argv, folder):
    """Make every file and folder that a command line names, empty: a missing one is refused."""
    for word in argv:
        if "://" in word or word.startswith("Qwen/"):  # an address, a hub id
            continue
        if "/" in word or word.endswith((".json", ".jsonl", ".yaml")):
            path = folder / word
            path.parent.mkdir(parents=True, exist_ok=True)
            is_file = path.suffix in (".json", ".jsonl", ".yaml")
            path.touch() if is_file else path.mkdir(exist_ok=True)


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_documents_parses(command, tmp_path, monkeypatch, capsys):
    program, argv = program_of(command)
    monkeypatch.chdir(tmp_path)
    make_paths(argv, tmp_path)
    if program in {"sgsd.py", "skills.py", "extras.baselines"} | OF_A_READER:
        try:
            if program == "extras.baselines":
                baselines.parse(argv)
            else:
                config.parse(argv, "", program=program)
        except SystemExit as end:
            is_resumed = "no readable config.json" in capsys.readouterr().err
            assert (end.code == 2 and is_resumed) or (end.code == 0 and "--print-config" in argv)
    elif program == "eval.py":
        eval.arguments(argv)
    elif program == "extras.report":
        report.arguments(argv)
    elif program == "extras.probe":
        probe.parse(argv)
    elif program.endswith(".py"):
        text = (ROOT / program).read_text()
        for flag in re.findall(r"--[a-z][a-z-]*", command.partition(program)[2]):
            assert f'"{flag}"' in text, flag
    else:
        assert program in {"venv", "pytest", "gym_data", "sglang.launch_server"}


def test_readme_gives_a_run_on_many_processes_the_time_to_save():
    """torchrun kills its workers 30 seconds after the first signal otherwise."""
    trainings = re.findall(r"^torchrun .*(?:sgsd\.py|baselines).*", README, re.M)
    assert trainings and all("--shutdown-timeout 600" in command for command in trainings)


def test_readme_has_the_commands_of_make_for_who_has_no_make():
    recipes = re.findall(r"^\t\$\((?:run|pip)\) (.*)", (ROOT / "Makefile").read_text(), re.M)
    assert len(recipes) == 5
    for recipe in recipes:  # $(if RUN IS THERE,--resume runs/tiny,--preset tiny)
        command = re.sub(r"\$\(if .*,(.*)\)", r"\1", recipe)
        assert command in README, command


def test_the_drawing_is_what_its_script_makes():
    path = ROOT / "docs" / "pictures" / "loop.py"
    spec = importlib.util.spec_from_file_location("loop", path)
    loop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loop)
    assert loop.svg() == path.with_suffix(".svg").read_text()


def test_what_is_said_of_gains_and_losses_stands_in_research():
    status = README.partition("## Status")[2].partition("\n## ")[0]
    said = status + (ROOT / "docs" / "when.md").read_text()
    pages = "".join(path.read_text() for path in (ROOT / "research").rglob("*.md"))
    assert set(re.findall(r"\d+\.\d", said)) <= set(re.findall(r"\d+\.\d", pages))


def test_an_evaluation_of_the_tiny_run_is_asked_for_as_the_run_asks_itself(tmp_path, monkeypatch):
    """So that it decodes as many rows at a time, and the samples that the run made are used."""
    cfg, _ = config.parse(["--preset", "tiny"], "")
    evaluations = [command for command in commands() if "eval.py tiny/model" in command]
    assert len(evaluations) > 4
    monkeypatch.chdir(tmp_path)
    for command in evaluations:
        make_paths(program_of(command)[1], tmp_path)
    flags = ["--data", "tiny/test.jsonl", *eval.flags_of(cfg).split()]
    wanted = vars(eval.arguments(["tiny/model", *flags]))
    for command in evaluations:
        given = vars(eval.arguments(program_of(command)[1]))
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
    command = r"`(?:python|torchrun) [^`]+`"
    lines = re.findall(rf"^\| (.+?) \| {command} \| {command} ", section, re.M)
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
    sentence = "{}, {} and {} general skills, {}, {} and {} common mistakes".format(*sizes)
    assert sentence in REPRODUCE.replace("\n", " ")


def test_a_row_of_the_miniature_that_a_page_names_is_in_its_results():
    page = (ROOT / "research" / "methods" / "README.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \|", page, re.M)
    assert set(re.findall(r"\(\*(.+?)\*[,)]", REPRODUCE)) <= set(rows)


def test_the_figures_of_the_second_worlds_page_are_those_of_its_data(capsys):
    lock_tables.main([])
    printed = capsys.readouterr().out
    page = (ROOT / "research" / "methods" / "README.md").read_text()
    assert "seed: [9, 53, 20, 20, 20]" in printed and "9, 53, 20, 20 and 20" in page
    for figure in ("29.6%", "23.8%", "92.7% ± 8.0%", "67.5% ± 11.2%", "31.0% ± 13.0%"):
        assert figure in printed and figure.replace("% ±", " ±").rstrip("%") in page
