"""Algorithm 1 on several processes: two compute what one computes (§4.1 has eight GPUs).

The minibatch is global (line 2), the gradient is that of its mean (line 16), and the bank evolves
from the rollouts of all (Alg. 4, line 4). Then the collectives that this is made of.
"""

import types

import pytest
import torch
from driver import rows, run_two
from safetensors.torch import load_file
from small_run import flags, train

import distributed


def test_two_processes_compute_the_step_of_one(world_dir, tmp_path):
    """A batch of 5, so with uneven shards: the same samples, the same update, the same bank."""
    changes = {"batch_size": 5, "steps": 2, "checkpoint_every": 1, "max_new_tokens": 12}
    changes["evolve_every"] = 2
    outs = [tmp_path / "one", tmp_path / "two"]
    train(world_dir, outs[0], **changes)
    run_two(flags(world_dir, outs[1], **changes))
    logs, metrics, states = [], [], []
    for out in outs:
        logs.append(rows(out / "rollouts.jsonl"))
        metrics.append(rows(out / "metrics.jsonl"))
        states.append(load_file(out / "checkpoints/step_000001/trainer.safetensors"))
    for a, b in zip(*logs, strict=True):
        assert (a["problem_id"], a["r"]) == (b["problem_id"], b["r"])
    for a, b in zip(logs[0][:5], logs[1][:5]):
        assert a["completion_ids"] == b["completion_ids"]
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
    for name in states[0]:  # exp_avg is a tenth of the clipped gradient of the first step
        torch.testing.assert_close(states[0][name], states[1][name], atol=1e-6, rtol=1e-3)
    norm = metrics[0][0]["grad_norm"]
    assert norm > 0 and norm == pytest.approx(metrics[1][0]["grad_norm"], rel=1e-4)
    banks = [(out / "bank/step_000002.json").read_bytes() for out in outs]
    assert banks[0] == banks[1] and b"dyn_" in banks[0]


def sums_gradients(world):
    p = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.zeros(2))]
    p[0].grad = torch.ones(3) * (world.rank + 1)
    if world.main:  # the other rank has no gradient here, and still joins
        p[1].grad = torch.ones(2) * 5
    distributed.sum_gradients(p, world)
    assert p[0].grad.tolist() == [3, 3, 3] and p[1].grad.tolist() == [5, 5]


def broadcasts_rank_0s_values(world):
    p = torch.nn.Parameter(torch.full((2,), float(world.rank)))
    distributed.broadcast_parameters([p], world)
    assert p.tolist() == [0, 0]


def gathers_by_rank(world):
    objects = distributed.all_gather({"text": "é" * (1 + 1000 * world.rank)}, world)
    assert [len(x["text"]) for x in objects] == [1, 1001]
    assert distributed.all_gather(None, world) == [None, None]
    assert distributed.broadcast({"of": world.rank}, world) == {"of": 0}
    distributed.barrier(world)
    distributed.refuse_other_files("equal", world)
    with pytest.raises(ValueError, match="model"):
        distributed.refuse_other_files(f"of rank {world.rank}", world)


def shares_jobs(world, count):
    jobs = [types.SimpleNamespace(index=i, prompt=[0] * (9 - i)) for i in range(count)]
    mine = []

    def work(jobs_of_rank):
        mine.extend(job.index for job in jobs_of_rank)
        for job in jobs_of_rank:
            yield [(job.index, world.rank)]

    turns = list(distributed.share_jobs(world, jobs, work))
    results = [result for turn in turns for result in turn]
    assert sorted(i for i, _ in results) == list(range(count))
    assert [i for i, rank in results if rank == world.rank] == mine
    assert mine == list(range(count))[::-1][world.rank :: 2]  # ordered by length, in turn
    assert distributed.all_gather(turns, world) == [turns, turns]  # every rank has every result


def use_collectives(argv):
    """What each of two ranks does; the exit code says which."""
    world = distributed.init("cpu")
    sums_gradients(world)
    broadcasts_rank_0s_values(world)
    gathers_by_rank(world)
    for count in (0, 1, 5):  # one job for two ranks, and uneven shares
        shares_jobs(world, count)
    return 10 + world.rank


def test_the_collectives():
    run_two([], use_collectives, ends=(10, 11))
