"""vLLM in the trainer's process: it has the weights that learn."""

import re
import subprocess
import sys

import conftest
import pytest
import trl_worlds
from conftest import ROOT
from trl.trainer import grpo_trainer

from extras import on_trl


@pytest.mark.parametrize("flag", ["--dtype bfloat16", '--model_init_kwargs {"dtype":"bfloat16"}'])
def test_a_base_that_merging_adapters_would_change_is_refused_in_one_line(tmp_path, flag):
    argv = [*trl_worlds.tiny_flags(tmp_path), "--use_vllm", *flag.split()]
    (args,) = on_trl.TrlParser(on_trl.SGSDConfig).parse_args_and_config(argv)
    conftest.one_line(lambda: on_trl.prepare(args), "bfloat16", "float32")


class Engine:
    """In the place of TRL's vLLM."""

    def __init__(self, generation_kwargs, **_):
        self.generation_kwargs = generation_kwargs


def test_the_engine_ends_on_every_stop_id(tmp_path, monkeypatch):
    """Of itself it knows those of the tokenizer and of generation_config.json."""
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", Engine)
    lm = trl_worlds.policy(lora=False)
    lm.config.eos_token_id = [trl_worlds.END, 77]
    run = trl_worlds.trainer(trl_worlds.settings(tmp_path, use_vllm=True), lm)
    given = run.vllm_generation.generation_kwargs
    assert given == {"temperature": 1.1, "stop_token_ids": [77, trl_worlds.END]}


@pytest.mark.parametrize("run, is_synchronised", [("adapters", True), ("not synchronised", False)])
def test_the_engine_gets_the_weights_of_each_step(run, is_synchronised):
    """At temperature 1 its log-probabilities are ours; without its update they are not."""
    pytest.importorskip("vllm")
    command = [sys.executable, ROOT / "research/trl/vllm_weights.py", "--steps", "2", "--run", run]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    (numbers,) = re.findall(rf"^\| {run} \| (.*) \|$", done.stdout, re.M)
    first, _, last, *_ = map(float, numbers.split(" | "))
    assert first < 1e-5
    assert (last < 1e-5) == is_synchronised
