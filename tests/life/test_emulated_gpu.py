"""Whole runs on an emulated GPU, which refuses a mix of devices as CUDA does.

Each test starts a process of its own, since a process has the emulation for good. A real GPU has
kernels, memory and speed that this says nothing about: research/speed/gpu.py tries those.
"""

import concurrent.futures
import os
import socket
import subprocess
import sys

import pytest
from conftest import ROOT
from driver import rows

BEGIN = """
import os, pathlib, sys

sys.path[:0] = [{root!r}, {tests!r}]
import emulated_gpu
import torch

import distributed, eval, rollout, scoring, sgsd
import conftest, driver

distributed.init = lambda device="auto": distributed.World(0, 1, emulated_gpu.DEVICE)
world, out = pathlib.Path({world!r}), pathlib.Path({out!r})
common = dict(evolve_every=2, success_gate=1.1, verifier="driver:UnevenVerifier")
common |= dict(checkpoint_above=10**6)


def train(**changes):
    method = changes.pop("method", "sgsd")
    kind, step_fn, _ = driver.METHODS[method]
    run = driver.train(world, out, step_fn=step_fn, kind=kind, **(common | changes))
    assert run.code == 0
    assert {{p.device.type for p in run.lm.parameters()}} == {{"npu"}}
    return run
"""
END = """
print("done", flush=True)
os._exit(0)  # the emulation does not end in an orderly way
"""


def on_the_emulated_gpu(script, world_dir, out, group=()):
    """What a process prints that runs a script there; it must succeed. group: its environment."""
    parts = {"root": str(ROOT), "tests": str(ROOT / "tests"), "world": str(world_dir)}
    source = BEGIN.format(out=str(out), **parts) + script + END
    env = {**os.environ, "OMP_NUM_THREADS": "1", **dict(group)}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=env)
    assert done.returncode == 0 and "done" in done.stdout, done.stderr[-3000:]
    return done.stdout


SCRIPTS = {
    "SGSD with a bank that evolves, and a checkpoint that goes on": """
train(steps=2)
train(steps=3)
""",
    "SGSD on a hybrid, whose rows leave and join": """
hybrid = out.parent / "hybrid"
conftest.make_model("qwen3_5_text").save_pretrained(hybrid)
conftest.make_tokenizer().save_pretrained(hybrid)
train(steps=2, model=str(hybrid), rollout_rows=2)
""",
    "GRPO": """
run = train(steps=2, method="grpo", generations=2, bank="")
assert any(row["grad_norm"] > 0 for row in driver.rows(out / "metrics.jsonl"))
""",
    "a divergence with an EMA teacher": """
train(steps=2, method="ablations", objective="jsd", teacher="ema", teacher_decay=0.5)
""",
    "OPSD": """
train(steps=2, method="opsd", bank="")
""",
    "an evaluation of base and checkpoint": """
train(steps=2)
paths = f"{world}/model {out} --data {world}/data.jsonl --samples 2 --max-new-tokens 6"
assert eval.main(f"{paths} --rows 5 --device auto --verifier driver:Exact".split()) == 0
""",
}


@pytest.mark.long
@pytest.mark.parametrize("what", SCRIPTS)
def test_no_mix_of_devices_in(what, world_dir, tmp_path):
    on_the_emulated_gpu(SCRIPTS[what], world_dir, tmp_path / "run")


@pytest.mark.long
def test_a_mask_that_stays_on_the_cpu_is_noticed(world_dir, tmp_path):
    script = """
mask = sgsd.token_mask
sgsd.token_mask = lambda ids, masked: mask(ids.cpu(), masked)
try:
    train(steps=1)
    raise SystemExit("nothing was noticed")
except RuntimeError as e:
    assert "tensors on npu:0 and on cpu" in str(e)
"""
    on_the_emulated_gpu(script, world_dir, tmp_path / "run")


@pytest.mark.long
def test_the_emulated_gpu_samples_and_scores_as_the_cpu_does(world_dir, tmp_path):
    script = """
from lib import model

conftest.make_model("qwen3_5_text").save_pretrained(out)
conftest.make_tokenizer().save_pretrained(out)
prompts, sampling = [[1, 2, 3], [4, 5], [6, 7, 8, 9]], rollout.Sampling(max_new_tokens=20)
for folder in (str(world / "model"), str(out)):
    samples, scores = [], []
    for device in ("cpu", emulated_gpu.DEVICE):
        lm, tokenizer = model.load_model(folder, device, "float32")
        ids = rollout.generate(lm, tokenizer, prompts, sampling, [1, 2, 3], 2)
        samples.append(ids)
        scores.append(scoring.token_logprobs(lm, prompts, ids).cpu())
    assert samples[0] == samples[1]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-5, atol=1e-5)
"""
    on_the_emulated_gpu(script, world_dir, tmp_path / "run")


@pytest.mark.long
def test_what_compares_a_gpu_with_the_cpu_holds_there(world_dir, tmp_path):
    script = """
sys.path.insert(0, os.path.join(os.path.dirname(emulated_gpu.__file__), "life"))
import test_device
from conftest import make_tokenizer

test_device.DEVICE = emulated_gpu.DEVICE
test_device.test_log_probabilities_and_gradients_are_the_cpus()
test_device.test_a_left_padded_row_has_the_logits_of_the_row_alone(torch.float32)
test_device.test_a_left_padded_row_has_the_logits_of_the_row_alone(torch.bfloat16)
test_device.test_greedy_rows_do_not_depend_on_the_batch(make_tokenizer())
"""
    on_the_emulated_gpu(script, world_dir, tmp_path / "run")


@pytest.mark.long
def test_two_processes_there_sample_as_one(world_dir, tmp_path):
    """In the place of NCCL's two operations stand gloo's, over a copy on the CPU."""
    script = """
import torch.distributed as dist

if "RANK" in os.environ:
    dist.init_process_group("gloo")
    group = distributed.World(dist.get_rank(), 2, emulated_gpu.DEVICE)
    distributed.init = lambda device="auto": group

    def over_the_cpu(operation):
        def run(tensor, **settings):
            copy = tensor.detach().cpu()
            operation(copy, **settings)
            tensor.copy_(copy)

        return run

    dist.all_reduce, dist.broadcast = over_the_cpu(dist.all_reduce), over_the_cpu(dist.broadcast)
train(steps=3)
"""
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    on_the_emulated_gpu(script, world_dir, alone)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        ranks = []
        for rank in "01":
            of_rank = {**group, "RANK": rank, "LOCAL_RANK": rank}
            ranks.append(pool.submit(on_the_emulated_gpu, script, world_dir, shared, of_rank))
        for done in ranks:
            done.result()
    one, two = (rows(out / "rollouts.jsonl") for out in (alone, shared))
    assert len(one) == len(two) == 12
    for row, other in zip(one, two):
        assert row["completion_ids"] == other["completion_ids"]
