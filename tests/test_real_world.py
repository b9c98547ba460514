"""Learning on a real model: its problems; its command, with the tiny model in its place."""

import json
import shutil
import sys

import pytest
import real_world
from conftest import ROOT, make_bank

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
    monkeypatch.setattr(real_world, "RATES", ("1e-3",))
    monkeypatch.setattr(
        real_world,
        "SETTINGS",
        "--preset tiny --update-every 0 --eval-data= --batch-size 2 --checkpoint-every 1",
    )
    monkeypatch.setattr(real_world, "EVALUATION", "--max-new-tokens 96 --samples 1 --rows 32")
    folder = tmp_path / "a folder"

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["real_world.py", str(folder), *map(str, words)])
        real_world.main()

    call("--make", tmp_path / "models", tmp_path, *[tmp_path / "bank.json"] * 2)
    with pytest.raises(SystemExit, match="the time is over; the same command goes on"):
        call("--updates", "2", "--minutes", "0.25")
    capsys.readouterr()
    call("--updates", "2")
    out = capsys.readouterr().out
    for name in real_world.METHODS:
        assert f"{name}_1e-3: " in out
        assert f"/{name}_1e-3/checkpoints/step_000002 | test | 16 | " in out
    logs = [json.loads(x) for x in open(folder / "runs/sgsd_1e-3/metrics.jsonl")]
    assert [row["step"] for row in logs] == [1, 2]
    (folder / "model/config.json").unlink()
    shutil.rmtree(folder / "eval")
    with pytest.raises(SystemExit, match=r"failed: see .*valid_sgsd_1e-3.txt"):
        call("--updates", "2")
