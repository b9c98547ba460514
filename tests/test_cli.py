"""Flags and settings: a user's mistake is exit code 2 and one line on stderr that names it."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from driver import flags, make_run

import baselines
import cli
import config
import runlog
import sgsd
import skills
from cli import UserError
from distributed import World


def refused(capsys, program, argv, *words):
    """The program ends with 2 and one line that has these words in it."""
    capsys.readouterr()
    assert program([str(arg) for arg in argv]) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said and "Traceback" not in said, said
    for word in words:
        assert word in said, said


def forbidden(f):
    """Values that a setting's own rule forbids."""
    rule = f.metadata
    if rule["choices"]:
        yield "no-such-choice"
    elif type(f.default) in (int, float):
        yield 0 if rule["least"] is None else rule["least"] - 1
        if rule["most"] is not None:
            yield rule["most"] + 1
    if type(f.default) is float:
        yield from ("nan", "inf")


@pytest.mark.parametrize("kind", [config.Config, baselines.BaselineConfig])
def test_every_flag_has_its_rule_and_says_it(kind):
    for f in dataclasses.fields(kind):
        for value in forbidden(f):
            name = config.flag(f.name)
            with pytest.raises(UserError) as refusal:
                config.parse([f"{name}={value}"], "x", "", kind)
            assert name in str(refusal.value) and str(value) in str(refusal.value)
            rule = (": must be ", f"({f.metadata['source']})")
            assert f.metadata["choices"] or all(part in str(refusal.value) for part in rule)


FLAGS = {  # what is wrong, and what is said
    "--no-clip": "unrecognized arguments: --no-clip; --help",  # nothing here is much like it
    "--teachers 3": "--teachers 3; for --teachers there is --num-teachers; --help lists the flags",
    "--update 3": "unrecognized arguments: --update 3",  # short for a flag
    "--updates many": "--updates: invalid int value: 'many'",
    "--batch-size 0": "--batch-size 0: must be > 0 (problems in a step, over all processes "
    "together; S6)",
    "--device tpu": "--device: invalid choice: 'tpu' (choose from",
    "--mask-extra false": "unrecognized arguments: false",
    "--method grpo": "unrecognized arguments: --method grpo",  # baselines.py has it
    "--model /no/such": "--model /no/such: no such directory",
    "--model no/such-id": "--model no/such-id: not loaded",
    "--encoder /no/such": "--encoder /no/such: no such directory",
    "--update-model /no/such": "--update-model /no/such: no such directory",
    "--data no/such-id": "`problem` and `answer` works offline",
    "--eval-data no.jsonl --allow-eval-overlap": "no.jsonl: no such file",
    "--eval-data amc23": "amc23: math-ai/amc23: not read",
    "--num-teachers 9": "general_skills has 4 entries, --num-teachers 9 needs as many",
    "--max-prompt-tokens 30": "tokens, --max-prompt-tokens is 30",
    "--device cuda": "--device cuda: torch finds no CUDA GPU here",
    "--attn flash_attention_2": "flash-attn is not installed",
}


@pytest.mark.parametrize("given", FLAGS)
def test_a_wrong_flag_is_one_line(given, world_dir, tmp_path, capsys):
    if given == "--device cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    argv = [*flags(world_dir, tmp_path / "run"), *given.split()]
    refused(capsys, sgsd.main, argv, FLAGS[given])
    assert not (tmp_path / "run").exists()


def test_a_wrong_directory_is_one_line(world_dir, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    for out, words in (
        ("file", "is a file"),
        ("file/run", "irectory"),
        ("", "the directory is not empty; choose another, or continue its run with --resume"),
    ):
        refused(capsys, sgsd.main, flags(world_dir, tmp_path / out), words)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_every_rank_needs_a_problem(world_dir, tmp_path):
    cfg = make_run(world_dir, tmp_path / "run").cfg
    with pytest.raises(UserError, match="--batch-size 4: must be >= 8, as every process needs"):
        sgsd.prepare(cfg, World(0, 8, torch.device("cpu")), False)


def parse(text, kind=config.Config):
    return config.parse(text.split(), "sgsd.py", "", kind, baselines.DEFAULTS)


def test_a_flag_goes_before_the_preset_and_that_before_the_method(capsys):
    cfg, resume = parse("--tau-g 2.5 --mask-extra --top-k 7")
    assert (cfg.tau_g, cfg.mask_extra, cfg.top_k, resume) == (2.5, True, 7, False)
    assert parse("")[0] == config.Config() == parse("--preset paper")[0]
    cfg, _ = parse("--preset tiny --method grpo --top-p .9", baselines.BaselineConfig)
    assert (cfg.top_p, cfg.max_new_tokens, cfg.temperature, cfg.tau_g) == (0.9, 96, 1.2, 1.0)
    with pytest.raises(SystemExit) as end:
        parse("--preset tiny --print-config")
    shown = capsys.readouterr().out.splitlines()
    assert end.value.code == 0 and len(shown) == len(dataclasses.fields(config.Config))
    assert "tau_g = 1.0  (width of the gate; Eq. 14, Tab. 12)" in shown
    source = "problems in a step, over all processes together; S6"
    assert f"batch_size = 16  ({source}, instead of 32)" in shown


def test_resume_takes_the_settings_of_the_run_and_the_flags(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"settings": {"tau_g": 2.0, "updates": 7}}))
    cfg, resume = parse(f"--resume {tmp_path} --updates 9")
    assert (cfg.tau_g, cfg.updates, cfg.out, resume) == (2.0, 9, str(tmp_path), True)
    for given, words in {
        "--bank b.json": "--bank b.json: a resumed run has its own bank",
        "--out elsewhere": "--out elsewhere: a resumed run has its own directory",
        "--preset tiny": "--preset tiny: a resumed run has its own settings",
        "--print-config": "--print-config True: a resumed run has its own settings",
    }.items():
        refused(capsys, sgsd.main, ["--resume", tmp_path, *given.split()], words)


def test_a_mistake_is_one_line_and_exit_code_2_of_the_process():
    command = [sys.executable, ROOT / "sgsd.py", "--bank", "no.json", "--data", "no.jsonl"]
    wrong = subprocess.run(command, capture_output=True, text=True)
    said = "sgsd: no.jsonl: no such file; check the path\n"
    assert (wrong.returncode, wrong.stderr) == (2, said)


@pytest.mark.parametrize("program", ["sgsd", "skills", "baselines", "eval", "report"])
def test_help_and_mistakes_are_answered_without_torch(program, tmp_path):
    """Its import takes seconds."""
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch is imported')")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    said = []
    for argv in (["--help"], ["x", "--hepl"]):
        command = [sys.executable, ROOT / f"{program}.py", *argv]
        said.append(subprocess.run(command, env=env, capture_output=True, text=True))
    assert [done.returncode for done in said] == [0, 2]
    assert f"python {program}.py" in said[0].stdout or "--help" in said[0].stdout
    assert said[1].stderr.startswith(f"{program}: ") and "--hepl" in said[1].stderr


MISTAKES = {  # a command, and what is said; {w} holds models and data, {o} what is wrong
    "sgsd.py --data no.jsonl": "no.jsonl: no such file",
    "sgsd.py --data {o}/wrong.jsonl": "wrong.jsonl:1: needs `problem` and `answer`",
    "sgsd.py --eval-data {w}/data.jsonl": "stand in an evaluation set",
    "sgsd.py --model /no/such": "--model /no/such: no such directory",
    "sgsd.py --model {o}": "o: not loaded: no model there, but none.jso, wrong.jsonl",
    "sgsd.py --encoder {w}/model": "is a causal model and no encoder",
    "sgsd.py --bank no.json": "bank no.json: cannot be read as JSON",
    "sgsd.py --bank {w}/bank.json": "has 4 entries, --num-teachers 8 needs as many",
    "sgsd.py --out {w}": "the directory is not empty",
    "baselines.py --out {w}/data.jsonl": "is a file; a directory is wanted",
    "skills.py --out {w}/bank.json": "exists, but skills.py did not make it",
    "eval.py /no/such": "/no/such: no such directory",
    "eval.py {w}/model --data no.jsonl": "no.jsonl: no such file",
    "eval.py {w}/model --skills {o}/none.jso": "no pair can be made of 0 skills and 0 mistakes",
}
COMMANDS = """
import json, runpy, sys
for program, *given in json.load(sys.stdin):
    sys.argv = [program, *given]
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        print("code", end.code, file=sys.stderr)
"""


def test_what_files_show_is_answered_without_torch(world_dir, tmp_path):
    fakes, wrong = tmp_path / "fakes", tmp_path / "o"
    for folder in (fakes, wrong):
        folder.mkdir()
    (fakes / "torch.py").write_text("raise RuntimeError('torch is imported')")
    (wrong / "wrong.jsonl").write_text('{"problem": "p"}')
    (wrong / "none.jso").write_text('{"general_skills": [], "common_mistakes": []}')
    usual = f"--model={world_dir}/model --encoder={world_dir}/encoder --data={world_dir}/data.jsonl"
    commands = []
    for text in MISTAKES:
        program, *given = text.format(w=world_dir, o=wrong).split()
        settings = [] if program == "eval.py" else [*usual.split(), f"--out={tmp_path}/run"]
        commands.append([str(ROOT / program), *settings, *given])
    env = {**os.environ, "PYTHONPATH": f"{fakes}:{ROOT}"}
    command, asked = [sys.executable, "-c", COMMANDS], json.dumps(commands)
    done = subprocess.run(command, input=asked, env=env, capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert lines[1::2] == ["code 2"] * len(MISTAKES), done.stderr
    for line, words in zip(lines[::2], MISTAKES.values()):
        assert words in line


@pytest.mark.parametrize("program", [sgsd, baselines, skills])
def test_help_has_groups_defaults_and_examples(program, capsys):
    with pytest.raises(SystemExit):
        program.main(["--help"])
    said = capsys.readouterr().out
    of_one = {"baselines and ablations": baselines, "a cold start by a server": skills}
    for group in config.GROUPS.values():
        assert (f"\n{group}:\n" in said) == (of_one.get(group, program) is program)
    for part in ("examples:\n    python ", "(default: 0.05)", "width of the gate; Eq. 14, Tab. 12"):
        assert part in said


def test_a_checkpoint_or_another_directory_is_no_run_to_resume(tmp_path, capsys):
    step = tmp_path / "run/checkpoints/step_000002"
    step.mkdir(parents=True)
    (tmp_path / "notes").touch()
    refused(capsys, sgsd.main, ["--resume", step], "is a checkpoint; give its run", "/run")
    refused(capsys, sgsd.main, ["--resume", tmp_path], "no readable config.json", "but notes, run")


def test_a_run_is_continued_by_the_program_that_began_it(tmp_path, capsys):
    for settings, own, other in (
        ({"tau_g": 1.0}, "sgsd.py", baselines),
        ({"method": "grpo"}, "baselines.py", sgsd),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"settings": settings}))
        said = f"is a run of {own}; python {own} continues it"
        refused(capsys, other.main, ["--resume", tmp_path], said)


@pytest.mark.parametrize("program", ("sgsd", "baselines", "skills", "eval", "report"))
def test_every_program_says_the_version_which_the_changes_name(program, capsys):
    with pytest.raises(SystemExit) as end:
        importlib.import_module(program).main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"sgsd {cli.VERSION}\n"
    assert f"\n## {cli.VERSION}" in (ROOT / "CHANGELOG.md").read_text()
    assert runlog.provenance(config.Config())["versions"]["sgsd"] == cli.VERSION


def test_a_script_of_the_users_own_is_what_goes_on(tmp_path, monkeypatch):
    script = tmp_path / "my_gate.py"
    script.touch()
    monkeypatch.setattr(sys, "argv", [str(script), "--preset", "tiny"])
    assert cli.program("sgsd.py") == str(script)
    for started in ("-c", "/usr/bin/pytest", str(tmp_path / "gone.py"), f"{tmp_path}/__main__.py"):
        monkeypatch.setattr(sys, "argv", [started])
        assert cli.program("sgsd.py") == "sgsd.py"
