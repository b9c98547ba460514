"""Two gloo processes compute what one computes."""

import pytest
import torch
from conftest import ROOT
from driver import flags, rows, train, two_processes
from safetensors.torch import load_file


def test_two_processes_compute_the_update_of_one(world_dir, tmp_path):
    """A batch of 5 over two ranks, so with uneven shards: the same samples and the same step."""
    changes = {"batch_size": 5, "updates": 2, "checkpoint_every": 1, "max_new_tokens": 12}
    outs = [tmp_path / "one", tmp_path / "two"]
    train(world_dir, outs[0], **changes)
    two_processes(ROOT / "tests/driver.py", *flags(world_dir, outs[1], **changes))
    logs, metrics, states = [], [], []
    for out in outs:
        logs.append(rows(out / "rollouts.jsonl"))
        metrics.append(rows(out / "metrics.jsonl"))
        states.append(load_file(out / "checkpoints/step_000001/trainer.safetensors"))
    for one, two in zip(*logs, strict=True):
        assert (one["problem_id"], one["r"]) == (two["problem_id"], two["r"])
    for one, two in zip(logs[0][:5], logs[1][:5]):
        assert one["completion_ids"] == two["completion_ids"]
        assert one["loss"] == pytest.approx(two["loss"], abs=1e-5)
    for name in states[0]:  # exp_avg is a tenth of the clipped gradient of the first step
        torch.testing.assert_close(states[0][name], states[1][name], atol=1e-6, rtol=1e-3)
    norm = metrics[0][0]["grad_norm"]
    assert norm > 0 and norm == pytest.approx(metrics[1][0]["grad_norm"], rel=1e-4)


COLLECTIVES = """
import pathlib
import sys
import torch
import cli
import distributed
folder = pathlib.Path(sys.argv[1])
world = distributed.init("cpu")
p = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.zeros(2))]
p[0].grad = torch.ones(3) * (world.rank + 1)
if world.main:  # the other rank has no gradient here, and still joins
    p[1].grad = torch.ones(2) * 5
distributed.sum_gradients(p, world)
assert p[0].grad.tolist() == [3, 3, 3] and p[1].grad.tolist() == [5, 5]
found = distributed.gather({"text": "\\u00e9" * (1 + 1000 * world.rank)}, world)
assert [len(x["text"]) for x in found] == [1, 1001]
assert distributed.gather(None, world) == [None, None]
for wrong in (0, 1):  # one rank's mistake is raised on both
    try:
        with distributed.errors_shared(world):
            if world.rank == wrong:
                raise cli.UserError(f"of rank {wrong}")
        raise AssertionError
    except cli.SharedError as e:
        assert str(e) == f"of rank {wrong}"
if world.main:  # a folder that another process holds is refused on both
    held = distributed.locked(folder, distributed.World(0, 1, world.device))
    held.__enter__()
try:
    with distributed.locked(folder, world):
        raise AssertionError
except cli.SharedError as e:
    assert "is at work there" in str(e)
try:
    distributed.agree(world.rank, world, "checkpoints")
    raise AssertionError
except cli.SharedError as e:
    assert "the ranks see different checkpoints" in str(e)
distributed.leave_together(world)
distributed.leave(0)
"""


def test_the_collectives(tmp_path):
    (tmp_path / "program.py").write_text(COLLECTIVES)
    two_processes(tmp_path / "program.py", tmp_path / "held")
