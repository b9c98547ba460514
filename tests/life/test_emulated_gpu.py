"""Whole runs on an emulated GPU, which refuses a mix of devices as CUDA does.

Each test starts a process of its own, since a process has the emulation for good. A real GPU has
kernels, memory and speed that this says nothing about: research/speed/gpu.py tries those.
"""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

BEGIN = """
import os, pathlib, sys

sys.path[:0] = [{root!r}, {tests!r}]
import emulated_gpu

import distributed, eval, sgsd
import conftest, driver

distributed.init = lambda device="auto": distributed.World(0, 1, emulated_gpu.DEVICE)
world, out = pathlib.Path({world!r}), pathlib.Path({out!r})
common = dict(evolve_every=2, success_gate=1.1, verifier="driver:UnevenVerifier")
common |= dict(checkpoint_above=10**6)


def train(**changes):
    method = changes.pop("method", "sgsd")
    kind, step_fn, *_ = driver.METHODS[method]
    run = driver.train(world, out, step_fn=step_fn, kind=kind, **(common | changes))
    assert run.code == 0
    assert {{p.device.type for p in run.lm.parameters()}} == {{"npu"}}
    return run
"""
END = """
print("done", flush=True)
os._exit(0)  # the emulation does not end in an orderly way
"""


def on_the_emulated_gpu(script, world_dir, out):
    """A process of its own runs a script there; it must succeed."""
    parts = {"root": str(ROOT), "tests": str(ROOT / "tests"), "world": str(world_dir)}
    source = BEGIN.format(out=str(out), **parts) + script + END
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=env)
    assert done.returncode == 0 and "done" in done.stdout, done.stderr[-3000:]


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
