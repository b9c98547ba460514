"""Wrong files, settings and places: exit code 2, one line that names the fault, nothing written.

Each kind of file is refused once by a whole command here. All that can be wrong with one stands
beside its reader, in test_problems.py, test_skills_bank.py, test_model.py and test_config.py.
"""

import json
import shutil
import sys

import pytest
import torch
from conftest import make_model, make_tokenizer
from driver import flags, refused

import eval
import sgsd
import skills
from extras import baselines
from lib import files

EMPTY_BANK = json.dumps({"general_skills": [], "common_mistakes": []})


def put(path, content):
    """A file with this content, a directory for "folder", and nothing for None."""
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.fixture
def refusal(world_dir, tmp_path, capsys):
    """Checks that a program refuses these flags with these words in one line, writing nothing."""

    def check(*words, program=sgsd.main, **changes):
        out = changes.pop("out", tmp_path / "run")
        refused(capsys, program, flags(world_dir, out, **changes), *words)
        assert not (tmp_path / "run").exists() and not torch.distributed.is_initialized()

    return check


# ------------------------------------------------------------------------------------- beginning


FILES = [  # the setting, a file, its content, and the words of the line
    ("bank", "x.json", "{", "x.json: cannot be read as JSON"),
    ("bank", "x", "folder", "x: cannot be read as JSON"),
    ("bank", "x.json", EMPTY_BANK, "x.json: has 0 skills and 0 mistakes, --num-teachers 3 needs"),
    ("data", "x.jsonl", "", "x.jsonl: no problem is left of 0 rows"),
    ("data", "x.jsonl", '{"problem": "p"}\n', "x.jsonl:1: a row needs `problem` and `answer`"),
    ("data", "x.parquet", b"PAR1", "x.parquet: could not read it"),
    ("data", "x", "folder", "x: could not read it (EmptyDatasetError: The directory"),
    ("eval_data", "x.jsonl", "{", "x.jsonl:1: not a JSON line"),
    ("prompts", "x", "folder", "x: extract_mistakes.txt not read ("),
    ("encoder", "x", "folder", "x: not loaded: no model there, the directory is empty"),
    ("model", "x", "folder", "x: not loaded: no model there, the directory is empty"),
    ("writer_model", "x", "folder", "x: not loaded: no model there, the directory is empty"),
]


@pytest.mark.parametrize("flag,name,content,words", FILES)
def test_a_wrong_file_is_one_line(flag, name, content, words, tmp_path, refusal):
    put(tmp_path / name, content)
    refusal(str(tmp_path / name), words, **{flag: tmp_path / name})


SETTINGS = [  # settings ({w} has models and data), and the words of the line
    ({"model": "no/such-id"}, "model no/such-id: not loaded"),
    ({"data": "no/such-id"}, "no/such-id: could not read it ("),
    ({"eval_data": "amc23"}, "math-ai/amc23: could not read it"),
    ({"eval_data": "{w}/data.jsonl"}, "12 of its problems are in an evaluation set: p0 ("),
    ({"encoder": "{w}/model"}, "it is a causal model and no encoder"),
    ({"num_teachers": 8}, "bank.json: has 4 skills and 4 mistakes, --num-teachers 8 needs"),
    ({"max_prompt_tokens": 30}, "tokens, --max-prompt-tokens is 30"),
    ({"attn": "flash_attention_2"}, "flash-attn is not installed"),
    ({"device": "cuda"}, "--device cuda: torch finds no CUDA GPU"),
    ({"verifier": "no_such:Judge"}, "no_such:Judge"),
    ({"out": "{w}/data.jsonl/run"}, "data.jsonl is a file; a directory is needed"),
    ({"out": "{w}"}, "the directory is not empty; choose another, or continue its run with"),
]


@pytest.mark.parametrize("changes,words", SETTINGS)
def test_wrong_settings_are_one_line(changes, words, world_dir, refusal):
    if torch.cuda.is_available() and {"device", "attn"} & {*changes}:
        pytest.skip("there is a GPU")
    before = {path: path.read_bytes() for path in world_dir.rglob("*") if path.is_file()}
    texts = {name: str(value).format(w=world_dir) for name, value in changes.items()}
    refusal(words, **texts)
    assert before == {path: path.read_bytes() for path in world_dir.rglob("*") if path.is_file()}


def test_an_evaluation_set_is_read_before_training_also_where_it_may_overlap(
    world_dir, tmp_path, capsys
):
    put(tmp_path / "x.jsonl", "{")
    argv = flags(world_dir, tmp_path / "run", eval_data=tmp_path / "x.jsonl")
    refused(capsys, sgsd.main, [*argv, "--allow-eval-overlap"], "x.jsonl:1: not a JSON line")


def test_the_baselines_refuse_what_sgsd_refuses(world_dir, refusal):
    out = world_dir / "data.jsonl"
    refusal("is a file; a directory is needed", program=baselines.main, out=out)


@pytest.mark.parametrize("package", ["datasets", "peft", "sentence_transformers"])
def test_a_missing_package_is_named(package, tmp_path, refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    put(tmp_path / "x.parquet", "PAR1")
    refusal(package, **({"data": tmp_path / "x.parquet"} if package == "datasets" else {}))


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
PLACES = [
    ("RANK", None, "RANK is not set, but another of RANK, WORLD_SIZE"),
    ("RANK", "first", "RANK, WORLD_SIZE, LOCAL_RANK must be numbers"),
    ("RANK", "1", "RANK 1 must be below WORLD_SIZE 1"),
    ("MASTER_PORT", "http", "could not join the process group at 127.0.0.1:http"),
    ("MASTER_PORT", "99999999", "could not join the process group at 127.0.0.1:99999999"),
]


@pytest.mark.parametrize("name,value,words", PLACES)
def test_a_wrong_place_in_the_world_is_one_line(name, value, words, refusal, monkeypatch):
    for variable, usual in (TORCHRUN | {name: value}).items():
        monkeypatch.delenv(variable, raising=False)
        if usual is not None:
            monkeypatch.setenv(variable, usual)
    refusal(words)


# -------------------------------------------------------------------------------------- resuming


@pytest.fixture(scope="module")
def finished(world_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    assert sgsd.main(flags(world_dir, out, steps=2, max_new_tokens=8)) == 0
    return out


LAST = "checkpoints/step_000002"
TORN = "step_000002: does not fit the model"
RUNS = [  # a file of a run, what stands there instead (None for nothing), flags, and the words
    (f"{LAST}/adapter_model.safetensors", "x", "", TORN),
    (f"{LAST}/trainer.json", None, "", TORN),
    ("config.json", "{", "", "config.json of a run there"),
    ("bank/step_000000.json", "{", "", "step_000000.json: cannot be read as JSON"),
    ("metrics.jsonl", "{}}\n", "--steps 3", "metrics.jsonl:1: not JSON"),
]


@pytest.mark.parametrize("name,content,given,words", RUNS)
def test_a_broken_run_stays_as_it_is(name, content, given, words, finished, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / name).unlink()
    put(run / name, content)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    refused(capsys, sgsd.main, ["--resume", run, *given.split()], words)
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_refused_setting_leaves_a_finished_run_as_it_was(finished, capsys):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    words = "a resumed run keeps its own"
    refused(capsys, sgsd.main, ["--resume", finished, "--seed", "9"], words)
    assert before == {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}


def test_a_run_that_is_at_work_is_not_continued_by_another_process(finished, capsys):
    with files.locked(finished):
        words = f"{finished}: another command is using this directory; wait until it ends"
        refused(capsys, sgsd.main, ["--resume", finished, "--steps=3"], words)


# ------------------------------------------------------------------------- a bank, an evaluation


def test_making_a_bank_from_wrong_flags_is_one_line(world_dir, tmp_path, capsys):
    model, data = f"--model={world_dir / 'model'}", f"--data={world_dir / 'data.jsonl'}"
    out, broken = tmp_path / "bank.json", tmp_path / "x.jsonl"
    out.write_text("somebody's")
    broken.write_text("somebody's")
    for given, words in (
        ([], "--out runs/sgsd: a file for the bank is needed, such as bank.json"),
        ([f"--out={tmp_path}"], f"--out {tmp_path}: a file for the bank is needed"),
        ([f"--out={out}", "--cold-start=0"], "--cold-start 0: must be > 0"),
        ([f"--out={out}"], "bank.json: exists, and skills.py did not make it; give another"),
        ([f"--out={tmp_path / 'new.json'}", f"--data={broken}"], "x.jsonl:1: not a JSON line"),
    ):
        refused(capsys, skills.main, [model, data, "--device=cpu", *given], words)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["somebody's"] * 2


def test_evaluating_from_wrong_flags_is_one_line(finished, world_dir, tmp_path, capsys):
    model, data, bank = world_dir / "model", world_dir / "data.jsonl", world_dir / "bank.json"
    shutil.copy(data, tmp_path / "data.jsonl")
    for part in (make_model(hidden_size=48), make_tokenizer()):
        part.save_pretrained(tmp_path / "other")
    (tmp_path / "fresh/checkpoints").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    names = "adapter/adapter_config.json begun/config.json begun/rollouts.jsonl notes/x.txt"
    for file in map(tmp_path.joinpath, names.split()):
        file.parent.mkdir(exist_ok=True)
        file.write_text("{")
    put(tmp_path / "empty.jso", EMPTY_BANK)
    needed = "; a model, an adapter or a run with checkpoints is needed"
    refused(capsys, eval.main, [], "PATH")
    refused(capsys, eval.main, [model], "HuggingFaceH4/aime_2024: could not read it")
    for path, given, words in (
        (finished, [f"--model={tmp_path / 'other'}"], f"does not fit {tmp_path / 'other'} ("),
        (tmp_path / "empty", [], f"empty: it has no files{needed}"),
        (tmp_path / "fresh", [], f"fresh: it has checkpoints{needed}"),
        (tmp_path / "begun", [], "begun: a run without a checkpoint"),
        (tmp_path / "notes", [], f"notes: it has x.txt{needed}"),
        (tmp_path / "adapter", [], "names no base model"),
        ("runs/sgdd", [], "PATH runs/sgdd: no such file or directory"),  # and no hub id
        ("sgsd/checkpoints/step_000200", [], "step_000200: no such file or directory"),
        (data, [], "data.jsonl: not loaded"),
        (model, ["--data", data, tmp_path / "data.jsonl"], "two sets have one name"),
        (model, ["--data", "no.jsonl"], "--data no.jsonl: no such file or directory"),
        (model, [f"--skills={bank}"], "--num-skills 8: must be in 1..4"),
        (model, [f"--skills={tmp_path / 'empty.jso'}"], "--num-skills 8: must be in 1..0"),
        (model, ["--skills=no.json"], "--skills no.json: no such file or directory"),
        (model, ["--encoder=/no/such"], "--encoder /no/such: no such file or directory"),
        (model, ["--temperature=-1"], "temperature >= 0"),
        (model, ["--samples=0"], "--samples 0: must be above 0 and at most 1,000,000"),
        (model, ["--limit=-1"], "--limit -1"),
        (model, ["--verify-timeout=0"], "--verify-timeout 0"),
        (model, ["--verify-timeout=inf"], "--verify-timeout inf"),
        (model, ["--verifier=no_such:Judge"], "no_such:Judge"),
    ):
        usual = [path, f"--out={tmp_path / 'out'}", "--verifier=driver:Exact", "--data", data]
        refused(capsys, eval.main, [*usual, *given], words)
    assert not (tmp_path / "out").exists()
