"""Learning on a real model: its problems; its command, with the tiny model in its place."""

import dataclasses
import json
import re
import shlex
import shutil
import sys
import time
from types import SimpleNamespace

import pytest
import real_world
from conftest import ROOT, make_bank

import baselines
import config

TINY = ROOT / "tiny"


def test_no_problem_stands_in_two_parts():
    svamp = [{"problem": f"s{i}"} for i in range(1000)]
    train = [{"problem": f"g{i}"} for i in range(7473)]
    test = [{"problem": f"t{i}"} for i in range(1319)]
    found = real_world.parts(svamp, train, test)
    texts = {part: {row["problem"] for row in rows} for part, rows in found.items()}
    assert {part: len(rows) for part, rows in texts.items()} == {
        "train": 3000,
        "valid": 160,
        "test": 400,
    }
    assert len(texts["train"] | texts["valid"] | texts["test"]) == 3560


@pytest.mark.parametrize("size,count,rollouts_of_a_step", [("GPU", 15, 32), ("CPU", 3, 8)])
def test_every_training_command_is_accepted(size, count, rollouts_of_a_step, tmp_path):
    (tmp_path / "own.json").touch()
    chosen = getattr(real_world, size)
    runs = real_world.training(tmp_path, chosen)
    assert len(runs) == count
    for name, (last, command) in runs.items():
        program, *argv = shlex.split(command)
        parsed = {"sgsd.py": config.parse, "baselines.py": baselines.parse}[program]
        given = (argv, program, "") if program == "sgsd.py" else (argv,)
        cfg, resume = parsed(*given)
        checkpoint = f"runs/{name}/checkpoints/step_{chosen.steps:06d}"
        assert last == tmp_path / checkpoint and not resume
        assert cfg.checkpoint_every == chosen.steps * chosen.points[0]
        rollouts = cfg.batch_size * getattr(cfg, "generations", 1)
        assert (rollouts, cfg.updates) == (rollouts_of_a_step, chosen.steps)
        assert (cfg.update_every, cfg.eval_data) == (0, "")


def test_a_method_that_is_not_there_is_refused(tmp_path, monkeypatch, capsys):
    words = ["real_world.py", str(tmp_path), "--cpu", "--methods", "sgsd", "ppo"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        real_world.main()
    assert "--methods: ppo: not among sgsd, grpo, consistent" in capsys.readouterr().err


def test_a_command_waits_for_what_it_needs_and_not_for_what_never_comes(tmp_path):
    made, never = tmp_path / "made", tmp_path / "never"
    code = f"import pathlib; pathlib.Path({str(made)!r}).touch()"
    commands = {
        "late": "-c 'print(1)'",
        "first": shlex.join(["-c", code]),
        "stuck": "-c 'print(2)'",
        "free": "-c 'print(3)'",
    }
    needs = {"late": made, "stuck": never}
    real_world.side_by_side(commands, tmp_path, time.time() + 60, 1, needs)
    assert {path.stem for path in tmp_path.glob("*.txt")} == {"late", "first", "free"}
    with pytest.raises(SystemExit, match="failed: see .*bad.txt"):
        real_world.side_by_side({"bad": "-c 'exit(3)'"}, tmp_path, time.time() + 60, 1)
    killed = "-c 'import os; os.kill(os.getpid(), 9)'"  # as by a system without memory
    with pytest.raises(SystemExit, match="failed: see .*bad.txt"):
        real_world.side_by_side({"bad": killed}, tmp_path, time.time() + 60, 1)


@pytest.mark.long
def test_the_command_stops_in_time_and_goes_on_to_the_tables(tmp_path, monkeypatch, capsys):
    for name, source in (("qwen05", "model"), ("encoder", "encoder")):
        shutil.copytree(TINY / source, tmp_path / "models" / name)
    lines = (TINY / "train.jsonl").read_text().splitlines(keepends=True)
    held_out = (TINY / "test.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "svamp.jsonl").write_text("".join(lines[:50]))
    (tmp_path / "gsm8k_train.jsonl").write_text("".join(lines[50:80]))
    (tmp_path / "gsm8k_test.jsonl").write_text("".join(held_out[:6]))
    make_bank(tmp_path / "bank.json", 4, 4)
    small = dataclasses.replace(
        real_world.GPU,
        methods={name: real_world.GPU.methods[name] for name in ("sgsd", "sgsd_own_bank", "grpo")},
        rates=("3e-4", "1e-3"),
        settings="--preset tiny --update-every 0 --eval-data= --max-new-tokens 32",
        evaluation="--max-new-tokens 96 --samples 1 --rows 32",
        points=(1 / 6, 1.0),
        jobs=4,
    )
    monkeypatch.setattr(real_world, "GPU", small)
    folder = tmp_path / "a folder"

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["real_world.py", str(folder), *map(str, words)])
        real_world.main()

    call("--make", tmp_path / "models", tmp_path, *[tmp_path / "bank.json"] * 2)

    def stopped_at(pattern):
        """Stop the command as soon as such a file is there."""

        def now():
            return 61.0 * any(folder.glob(pattern))

        with monkeypatch.context() as patch:
            patch.setattr(real_world, "time", SimpleNamespace(time=now, sleep=time.sleep))
            with pytest.raises(SystemExit, match=r"^the time is over; the same command goes on$"):
                call("--updates", "6", "--minutes", "1")

    stopped_at("runs/*/checkpoints/step_*")
    made = [int(path.name[5:]) for path in folder.glob("runs/*/checkpoints/step_*")]
    assert 0 < min(made) < 6 and len(made) < 6 * len(small.methods) * len(small.rates)
    call("--updates", "6")
    out = capsys.readouterr().out
    for name in small.methods:
        assert f"{name}_1e-3: " in out and f"{name}_3e-4: " in out
        for step in (1, 6):
            assert re.search(
                rf"/{name}_[13]e-[34]/checkpoints/step_00000{step} \| test \| 16 \| ", out
            )
    logs = [json.loads(x) for x in open(folder / "runs/sgsd_1e-3/metrics.jsonl")]
    assert [row["step"] for row in logs] == [1, 2, 3, 4, 5, 6]
    (folder / "model/config.json").unlink()
    shutil.rmtree(folder / "eval")
    with pytest.raises(SystemExit, match=r"failed: see .*valid_sgsd_[13]e-[34].txt"):
        call("--updates", "6")
