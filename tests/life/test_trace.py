"""A run frozen number by number: whoever rearranges the code must leave it as it is.

    PYTHONPATH=tests python tests/life/test_trace.py RUN

freezes a finished run of COMMAND, where a change is meant.
trace.jsonl beside it holds 12 steps of the tiny preset, with the cold start and one evolution of
the bank: the ids of prompts and rollouts, verdicts, pairs, weights, supports, polarities,
losses, gradient norms, and the bank's texts. Ids are compared exactly and numbers within 1e-5. A
processor that rounds otherwise draws another token now and then, and then all that follows differs,
so there the test is skipped: the first line is a fingerprint of how the machine rounds.
"""

import hashlib
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from driver import rows

TRACE = ROOT / "tests" / "life" / "trace.jsonl"
COMMAND = "sgsd.py --preset tiny --device cpu --dtype float32 --steps 12 --learning-rate 3e-4"
COMMAND += " --checkpoint-every 12 --audit-every 0"
EXACT = ("step", "problem_id", "prompt_ids", "completion_ids", "pred", "r", "pairs", "rho")
CLOSE = ("alpha", "a_plain", "a", "losses", "loss")


def rounding():
    """A fingerprint of this machine's arithmetic: the tiny model's logits, to the last bit."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(ROOT / "tiny" / "model", dtype=torch.float32)
    ids = torch.arange(600).view(4, 150) % 1000
    with torch.no_grad():
        bits = model(input_ids=ids).logits.numpy().tobytes()
    digest = hashlib.blake2b(bits, digest_size=8).hexdigest()
    return {"rounding": digest, "torch": torch.__version__}


def trace(run):
    """What is frozen of a run's directory, line by line."""
    lines = []
    for row in rows(run / "rollouts.jsonl"):
        numbers = {name: row[name] for name in CLOSE}
        lines.append({name: row[name] for name in EXACT} | {"numbers": numbers})
    for row in rows(run / "metrics.jsonl"):
        lines.append({"step": row["step"], "numbers": {"grad_norm": row["grad_norm"]}})
    for version in sorted((run / "bank").glob("step_*.json")):
        bank = json.loads(version.read_text())
        for kind in ("general_skills", "common_mistakes"):
            lines.append({"bank": version.name, kind: bank[kind]})
    return lines


def rounded(x):
    return float(f"{x:.7g}") if isinstance(x, float) else [rounded(y) for y in x]


@pytest.mark.long
def test_the_run_is_the_frozen_one(tmp_path):
    want = rows(TRACE)
    if want[0] != rounding():
        pytest.skip(f"frozen with {want[0]}, this machine has {rounding()}")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *COMMAND.split(), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    got = trace(tmp_path / "run")
    assert len(got) == len(want) - 1
    for i, (new, old) in enumerate(zip(got, want[1:])):
        numbers, frozen = new.pop("numbers", {}), old.pop("numbers", {})
        assert new == old, f"line {i + 2}"
        assert numbers.keys() == frozen.keys()
        for name in frozen:
            assert numbers[name] == pytest.approx(frozen[name], abs=1e-5), f"line {i + 2}, {name}"


if __name__ == "__main__":
    frozen = [rounding()]
    for row in trace(pathlib.Path(sys.argv[1])):
        for name, x in row.get("numbers", {}).items():
            row["numbers"][name] = rounded(x)
        frozen.append(row)
    TRACE.write_text("".join(json.dumps(row) + "\n" for row in frozen))
