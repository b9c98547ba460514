"""A command: a user's mistake is exit code 2 and one line, and quick answers come before torch."""

import importlib
import os
import subprocess
import sys

import pytest
from conftest import ROOT

import cli
import config
import runlog


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
