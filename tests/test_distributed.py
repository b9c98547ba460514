"""Two gloo processes compute what one computes; files are whole or absent."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file

import distributed as D

HERE = ROOT / "tests"


def command(world_dir, out, processes, *flags):
    launch = (
        [sys.executable]
        if processes == 1
        else [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={processes}",
        ]
    )
    given = [
        "--model",
        world_dir / "model",
        "--data",
        world_dir / "data.jsonl",
        "--bank",
        world_dir / "bank.json",
        "--encoder",
        world_dir / "encoder",
        "--num-teachers",
        3,
        "--max-new-tokens",
        12,
        "--lora-rank",
        4,
        "--checkpoint-every",
        1,
        "--audit-every",
        1,
        "--learning-rate",
        0.01,
        "--device",
        "cpu",
        "--out",
        out,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*launch, HERE / "driver.py", *map(str, given), *flags],
        capture_output=True,
        text=True,
        env=env,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run


def test_two_processes_compute_the_update_of_one(world_dir, tmp_path):
    """Batch 5 over two ranks: uneven shards. The same samples, the same update up to the order of a sum."""
    for n in (1, 2):
        command(world_dir, tmp_path / str(n), n, "--batch-size", "5", "--updates", "2")
    logs = [[json.loads(x) for x in open(tmp_path / str(n) / "rollouts.jsonl")] for n in (1, 2)]
    assert [r["completion_ids"] for r in logs[0][:5]] == [r["completion_ids"] for r in logs[1][:5]]
    assert [r["problem_id"] for r in logs[0]] == [r["problem_id"] for r in logs[1]] and [
        r["r"] for r in logs[0]
    ] == [r["r"] for r in logs[1]]
    np.testing.assert_allclose(
        [r["loss"] for r in logs[0][:5]], [r["loss"] for r in logs[1][:5]], atol=1e-5
    )
    first = [
        load_file(tmp_path / str(n) / "checkpoints/step_000001/adapter_model.safetensors")
        for n in (1, 2)
    ]
    moments = [
        load_file(tmp_path / str(n) / "checkpoints/step_000001/trainer.safetensors") for n in (1, 2)
    ]
    for name in moments[0]:  # exp_avg is a tenth of the clipped gradient of the first update
        torch.testing.assert_close(moments[0][name], moments[1][name], atol=1e-6, rtol=1e-3)
    assert any(v.abs().max() > 0 for k, v in first[0].items() if "lora_B" in k)
    metrics = [
        [json.loads(x) for x in open(tmp_path / str(n) / "metrics.jsonl")][0] for n in (1, 2)
    ]
    assert metrics[0]["grad_norm"] == pytest.approx(metrics[1]["grad_norm"], rel=1e-4)


WORKER = """
import sys, json, torch
sys.path.insert(0, {root!r})
import distributed as D
world = D.init("cpu")
p = [torch.nn.Parameter(torch.ones(3) * (world.rank + 1)), torch.nn.Parameter(torch.zeros(2))]
D.broadcast_parameters(p, world)
assert p[0].tolist() == [1, 1, 1]
p[0].grad = torch.ones(3) * (world.rank + 1)
if world.rank == 0:
    p[1].grad = torch.ones(2) * 5          # the other rank has nothing to learn here, and still joins
D.sum_gradients(p, world)
assert p[0].grad.tolist() == [3, 3, 3] and p[1].grad.tolist() == [5, 5]
assert D.gather({{"rank": world.rank, "text": "\\u00e9" * (1 + 1000 * world.rank)}}, world)[1]["text"] == "\\u00e9" * 1001
assert D.gather(None, world) == [None, None]
D.leave_together(world)
D.leave(0)
"""


def test_collectives(tmp_path):
    (tmp_path / "w.py").write_text(WORKER.format(root=str(ROOT)))
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=2",
            tmp_path / "w.py",
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert run.returncode == 0, run.stderr[-3000:]


def test_half_set_environment_is_named(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(D.UserError, match="RANK is set but WORLD_SIZE"):
        D.init("cpu")


def test_a_directory_is_whole_or_absent(tmp_path):
    with pytest.raises(RuntimeError), D.whole_directory(tmp_path / "a") as tmp:
        (tmp / "half").write_text("x")
        raise RuntimeError
    assert not list(tmp_path.iterdir())
    for text in ("one", "two"):
        with D.whole_directory(tmp_path / "a") as tmp:
            (tmp / "file").write_text(text)
    assert (tmp_path / "a/file").read_text() == "two" and [p.name for p in tmp_path.iterdir()] == [
        "a"
    ]


def test_a_torn_last_line_is_left_out(tmp_path):
    path = tmp_path / "x.jsonl"
    D.append_jsonl(path, [{"a": "é\ud800"}, {"a": 2}])
    with open(path, "a") as f:
        f.write('{"a": 3')
    assert (
        D.read_jsonl(path) == [{"a": "é\ud800"}, {"a": 2}] and D.read_jsonl(tmp_path / "none") == []
    )
    D.append_jsonl(path, [{"a": 4}])  # cut before the next one, not glued to it
    assert D.read_jsonl(path) == [{"a": "é\ud800"}, {"a": 2}, {"a": 4}]
