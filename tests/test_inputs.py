"""What a command is given is looked at before torch is imported."""

import json
import os
import subprocess
import sys

from conftest import ROOT
from driver import flags, refused, refused_without_torch

import config
import inputs
import sgsd

MISTAKES = {  # a command, and what is said; {w} holds models and data, {o} what is wrong
    "sgsd.py --data no.jsonl": "no.jsonl: no such file",
    "sgsd.py --data {o}/wrong.jsonl": "wrong.jsonl:1: needs `problem` and `answer`",
    "sgsd.py --eval-data {w}/data.jsonl": "stand in an evaluation set",
    "sgsd.py --out {o}/wrong.jsonl/run": "wrong.jsonl is a file; a directory is wanted",
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


def test_what_files_show_is_answered_without_torch(world_dir, tmp_path):
    wrong = tmp_path / "o"
    wrong.mkdir()
    (wrong / "wrong.jsonl").write_text('{"problem": "p"}')
    (wrong / "none.jso").write_text('{"general_skills": [], "common_mistakes": []}')
    usual = f"--model={world_dir}/model --encoder={world_dir}/encoder --data={world_dir}/data.jsonl"
    commands = []
    for text in MISTAKES:
        program, *given = text.format(w=world_dir, o=wrong).split()
        settings = [] if program == "eval.py" else [*usual.split(), f"--out={tmp_path}/run"]
        commands.append([str(ROOT / program), *settings, *given])
    for line, words in zip(refused_without_torch(commands, tmp_path), MISTAKES.values()):
        assert words in line
    assert not (tmp_path / "run").exists()


def test_a_run_of_a_script_of_the_users_own_is_continued_by_that_script(
    world_dir, tmp_path, capsys, monkeypatch
):
    """The program itself would go on without what the script has changed, and say nothing."""
    script, saved = tmp_path / "my_gate.py", tmp_path / "config.json"
    script.touch()
    for begun_by, started, refusal in (
        ("my_gate.py", "sgsd.py", "was begun by my_gate.py; python my_gate.py continues it"),
        ("sgsd.py", str(script), "was begun by sgsd.py; python sgsd.py continues it"),
    ):
        saved.write_text(json.dumps({"settings": {"tau_g": 1.0}, "command": [begun_by]}))
        monkeypatch.setattr(sys, "argv", [started])
        refused(capsys, sgsd.main, ["--resume", tmp_path], refusal)
    monkeypatch.setattr(sys, "argv", ["sgsd.py"])
    for command in (["sgsd.py"], ["ipykernel_launcher.py"], ["-c"], [], None, 3):
        saved.write_text(json.dumps({"settings": {}, "command": command}))
        inputs.check_script(config.Config(out=str(tmp_path)))


def test_a_run_is_explained_by_whoever_asks(world_dir, tmp_path):
    """--explain continues nothing. A script that replaced a part is imported for it."""
    (tmp_path / "my_gate.py").write_text("import sgsd\n\nsgsd.distributed.leave(sgsd.main())\n")
    (tmp_path / "part.py").write_text("")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "OMP_NUM_THREADS": "1"}
    given = flags(world_dir, tmp_path / "run", updates=1, max_new_tokens=4)
    begin = [sys.executable, str(tmp_path / "my_gate.py"), *given]
    asked = [str(tmp_path / "run"), "--explain", "What is 2 plus 3?", "--answer", "5"]
    report = [sys.executable, str(ROOT / "report.py"), *asked]
    imported = [sys.executable, "-c", "import part, report; report.main()", *asked]
    for command in (begin, report, imported):
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
