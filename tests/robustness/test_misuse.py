"""Wrong files: exit code 2, one line that names the file and the fault, nothing written."""

import json
import shutil
import sys

import pytest
import torch
from conftest import make_model, make_tokenizer
from driver import flags, refused

import distributed
import eval
import policy
import sgsd
import skills
from cli import UserError

DEEP = "[" * 100_000
ROW = '{"problem": "p", "answer": "1"}\n'
CONFLICT = ROW + '{"problem": "p", "answer": "2"}\n'


def bank(skills=(), mistakes=(), metadata=None):
    lists = {"general_skills": list(skills), "common_mistakes": list(mistakes)}
    return json.dumps({**lists, "metadata": {} if metadata is None else metadata})


SKILL = dict.fromkeys(("skill_id", "title", "principle", "when_to_apply"), "a")

NO_JSON = "cannot be read as JSON"
FILES = [  # the setting, a file, its content, and what is said
    ("bank", "x.json", "{", NO_JSON),
    ("bank", "x.json", DEEP, NO_JSON),
    ("bank", "x.json", '{"a": "é"}'.encode("utf-16"), NO_JSON),
    ("bank", "x", "folder", NO_JSON),
    ("bank", "x.json", "[]", "a JSON object is wanted, got list"),
    ("bank", "x.json", '{"skills": []}', "`general_skills` must be a list; found: skills"),
    ("bank", "x.json", bank([{**SKILL, "title": 3}]), "general_skills[0] lacks the strings title"),
    ("bank", "x.json", bank([{**SKILL, "sources": 5}]), "general_skills[0] needs its own id, and"),
    ("bank", "x.json", bank([SKILL] * 2), "general_skills[1] needs its own id, and"),
    ("bank", "x.json", bank([], ["text"]), "common_mistakes[0] lacks"),
    ("bank", "x.json", bank(metadata=[]), "`metadata` must be an object"),
    ("bank", "x.json", bank(metadata={"updates": 3}), "`updates` in it a list"),
    ("data", "x.jsonl", "", "x.jsonl: no problem is left of 0 rows"),
    ("data", "x.jsonl", CONFLICT, "'duplicates': 1, 'conflicting': 1"),
    ("data", "x.jsonl", '{"problem": "p", "answer": " "}\n', "x.jsonl:1: `answer` is empty"),
    ("data", "x.jsonl", f'{ROW}{{"problem": "p", "answer": 3}}\n', "got int '3'; quote it"),
    ("data", "x.jsonl", '{"prompt": ["p"], "reward_model": {}}\n', "must be a string"),
    ("data", "x.jsonl", '["p", "1"]\n', "x.jsonl:1: a JSON object is wanted, got list"),
    ("data", "x.jsonl", f"{DEEP}\n", "x.jsonl:1: not a JSON line"),
    ("data", "x.jsonl", f'{{"answer": {"1" * 5000}}}\n', "x.jsonl:1: not a JSON line"),
    ("data", "x.jsonl", b"\xff\xfe\x00", "x.jsonl: not a JSON line ('utf-8'"),
    ("data", "x.parquet", b"PAR1", "x.parquet: not read"),
    ("data", "x", "folder", "x: the directory holds no .parquet and no .jsonl file"),
    ("encoder", "x", "folder", "x: not loaded"),
    ("encoder", "x", "x", "x: not loaded"),
    ("model", "x", "folder", "x: not loaded"),
    ("update_model", "x", "folder", "x: not loaded"),
]


def put(path, content):
    """A file with this content, a directory for "folder", and nothing for None."""
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.fixture
def refusal(world_dir, tmp_path, capsys):
    """Checks that sgsd.py refuses these flags with these words in one line, and writes nothing."""

    def check(*words, **changes):
        refused(capsys, sgsd.main, flags(world_dir, tmp_path / "run", **changes), *words)
        assert not (tmp_path / "run").exists() and not torch.distributed.is_initialized()

    return check


@pytest.mark.parametrize("flag,name,content,words", FILES)
def test_a_wrong_file_is_one_line(flag, name, content, words, tmp_path, refusal):
    put(tmp_path / name, content)
    refusal(str(tmp_path / name), words, **{flag: tmp_path / name})


def save(folder, *kind, tokenizer=None, **changes):
    make_model(*kind, **changes).save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return folder


MODELS = {  # a file of the model, what is left of it, and what is said
    "chat_template.jinja": (None, "its tokenizer's chat template does not work"),
    "model.safetensors": ("torn", "not loaded"),
    "config.json": ("{", "not loaded"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_broken_model_is_one_line(name, tmp_path, refusal):
    content, words = MODELS[name]
    file = save(tmp_path / "model") / name
    file.unlink()
    put(file, content)
    refusal(f"--model {tmp_path / 'model'}", words, model=tmp_path / "model")


@pytest.mark.parametrize(
    "template, words",
    [
        ("{{ raise_exception('no system turn') }}", "chat template does not work (TemplateError"),
        ("{% for m in %}", "chat template does not work (TemplateSyntaxError"),
        ("User: {% for part in messages[0].content %}{{ part.text }}{% endfor %}", "drops what"),
    ],
)
def test_a_chat_template_that_fails_or_drops_the_problem_is_one_line(
    template, words, tmp_path, refusal
):
    (save(tmp_path / "model") / "chat_template.jinja").write_text(template)
    refusal(f"--model {tmp_path / 'model'}", words, model=tmp_path / "model")


def test_a_model_whose_solutions_would_never_end_is_refused(tmp_path):
    save(tmp_path)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        settings = json.loads((tmp_path / name).read_text())
        settings |= {"eos_token": None, "eos_token_id": None}
        (tmp_path / name).write_text(json.dumps(settings))
    with pytest.raises(UserError, match="no id that ends a completion; name `eos_token_id` in"):
        policy.load_model(str(tmp_path), torch.device("cpu"))


def test_the_model_needs_a_row_for_every_id(tmp_path):
    """An added token's id counts; a text-only model's placeholder for images does not."""
    cpu, one_more = torch.device("cpu"), make_tokenizer()
    one_more.add_tokens(["<image>"])
    policy.load_model(str(save(tmp_path / "as-many", vocab=268)), cpu)
    policy.load_model(str(save(tmp_path / "more", vocab=271, tokenizer=one_more)), cpu)
    short = save(tmp_path / "short", vocab=268, tokenizer=one_more)
    words = r"knows 269 ids, the model has rows for 268 \(the last is '<image>'\)"
    with pytest.raises(UserError, match=words):
        policy.load_model(str(short), cpu)
    settings = json.loads((short / "tokenizer_config.json").read_text())
    settings["extra_special_tokens"] = {"image_token": "<image>"}  # as Gemma 3's small ones say it
    (short / "tokenizer_config.json").write_text(json.dumps(settings))
    policy.load_model(str(short), cpu)


def test_a_model_without_all_projections_is_refused(tmp_path, refusal):
    model = save(tmp_path / "phi", "phi3")
    refusal("has no q_proj, k_proj, v_proj, gate_proj, up_proj to adapt", model=model)


def test_a_mixture_of_experts_is_refused(tmp_path, refusal):
    """A shared expert has all seven projections, and LoRA would adapt it alone."""
    small = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4}
    model = save(tmp_path / "moe", "qwen2_moe", **small)
    refusal("is a mixture of experts", "(S7); take another model", model=model)


@pytest.fixture(scope="module")
def finished(world_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    assert sgsd.main(flags(world_dir, out, updates=2, max_new_tokens=8)) == 0
    return out


LAST = "checkpoints/step_000002"
TORN = "step_000002: does not fit --model"
RUNS = [  # a file of a run, what stands there instead (None for nothing), flags, and what is said
    (f"{LAST}/adapter_model.safetensors", "x", "", TORN),
    (f"{LAST}/trainer.safetensors", None, "", TORN),
    (f"{LAST}/trainer.json", None, "", TORN),
    (f"{LAST}/trainer.json", '{"step": "two"}', "", TORN),
    ("config.json", "{", "", "config.json of a run there"),
    ("config.json", '{"settings": []}', "", "config.json of a run there"),
    ("config.json", '{"settings": {"of_a_later_version": 1}}', "", "config.json of a run there"),
    ("config.json", '{"settings": {"tau_g": "x"}}', "", "config.json of a run there"),
    ("config.json", '{"settings": {"tau_g": -1}}', "", "--tau-g -1: must be > 0"),
    ("bank/bank.json", None, "--lora-rank 8", "made with another model or --lora-rank?"),
    ("bank/step_000000.json", "{", "", "step_000000.json: cannot be read as JSON"),
    ("metrics.jsonl", "{}}\n", "--updates 3", "metrics.jsonl:1: not a line that was written here"),
    ("bank/bank.json", None, "--updates 1", "--updates 1: "),
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


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
PLACES = [
    ("RANK", None, "RANK is not set, but another of RANK, WORLD_SIZE"),
    ("RANK", "first", "RANK, WORLD_SIZE, LOCAL_RANK must be numbers"),
    ("RANK", "1", "RANK 1 is no rank of WORLD_SIZE 1"),
    ("MASTER_PORT", "http", "the process group at 127.0.0.1:http was not joined"),
    ("MASTER_PORT", "99999999", "the process group at 127.0.0.1:99999999 was not joined"),
]


@pytest.mark.parametrize("name,value,words", PLACES)
def test_a_wrong_place_in_the_world_is_one_line(name, value, words, refusal, monkeypatch):
    for variable, usual in (TORCHRUN | {name: value}).items():
        monkeypatch.delenv(variable, raising=False)
        if usual is not None:
            monkeypatch.setenv(variable, usual)
    refusal(words)


def test_a_run_that_is_at_work_is_not_continued_by_another_process(finished, capsys):
    with distributed.locked(finished, distributed.World(0, 1, torch.device("cpu"))):
        refused(capsys, sgsd.main, ["--resume", finished, "--updates=3"], "is at work there; wait")


@pytest.mark.parametrize("package", ["datasets", "peft", "sentence_transformers"])
def test_a_missing_package_is_named(package, tmp_path, refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    put(tmp_path / "x.parquet", "PAR1")
    refusal(package, **({"data": tmp_path / "x.parquet"} if package == "datasets" else {}))


def test_making_a_bank_from_wrong_flags_is_one_line(world_dir, tmp_path, capsys):
    model, data = f"--model={world_dir / 'model'}", f"--data={world_dir / 'data.jsonl'}"
    out = tmp_path / "bank.json"
    out.write_text("somebody's")
    for given, words in (
        ([], "--out runs/sgsd: a file for the bank is wanted, such as bank.json"),
        ([f"--out={tmp_path}"], f"--out {tmp_path}: a file for the bank is wanted"),
        ([f"--out={out}", "--cold-start=0"], "--cold-start 0: must be > 0"),
        ([f"--out={out}"], "bank.json: exists, but skills.py did not make it;"),
        ([f"--out={tmp_path / 'new.json'}", "--data=no.jsonl"], "no.jsonl: no such file"),
    ):
        refused(capsys, skills.main, [model, data, "--device=cpu", *given], words)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["somebody's"]


OTHER_BASE = "mlp.down_proj, of size 32 in the adapter, has size 48 there; give its own base as"


def test_evaluating_from_wrong_flags_is_one_line(finished, world_dir, tmp_path, capsys):
    model, data, bank = world_dir / "model", world_dir / "data.jsonl", world_dir / "bank.json"
    shutil.copy(data, tmp_path / "data.jsonl")
    save(tmp_path / "other", hidden_size=48)
    (tmp_path / "fresh/checkpoints").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    files = "adapter/adapter_config.json begun/config.json begun/rollouts.jsonl notes/x.txt"
    for file in map(tmp_path.joinpath, files.split()):
        file.parent.mkdir(exist_ok=True)
        file.write_text("{")
    wanted = "neither config.json nor adapter_config.json nor checkpoints/, but x.txt"
    refused(capsys, eval.main, [], "PATH")
    refused(capsys, eval.main, [model], "aime24: HuggingFaceH4/aime_2024: not read")
    for path, given, words in (
        (finished, [f"--model={tmp_path / 'other'}"], OTHER_BASE),
        (tmp_path / "empty", [], "checkpoints/, the directory is empty"),
        (tmp_path / "fresh", [], "fresh: a run without a checkpoint"),
        (tmp_path / "begun", [], "begun: a run without a checkpoint"),
        (tmp_path / "notes", [], f"notes: no policy: it has {wanted}"),
        (tmp_path / "adapter", [], "names no base model"),
        ("runs/sgdd", [], "runs/sgdd: no such directory"),  # and no hub id
        ("sgsd/checkpoints/step_000200", [], "step_000200: no such directory"),
        (data, [], "data.jsonl: no such directory"),
        (model, ["--data", data, tmp_path / "data.jsonl"], "two sets have one name"),
        (model, [f"--skills={bank}"], "--num-skills 8: must be in 1..4"),
        (model, ["--temperature=-1"], "temperature >= 0"),
        (model, ["--samples=0"], "--samples 0"),
        (model, ["--limit=-1"], "--limit -1"),
        (model, ["--verify-timeout=0"], "--verify-timeout 0"),
        (model, ["--verify-timeout=inf"], "--verify-timeout inf"),
    ):
        out = f"--out={tmp_path / 'out'}"
        refused(capsys, eval.main, [path, out, "--data", data, *given], words)
    assert not (tmp_path / "out").exists()


def test_a_model_without_the_asked_attention_gets_a_hint(tmp_path):
    save(tmp_path, "gemma2")
    with pytest.raises(UserError, match="not loaded .*; --attn eager suits every model"):
        policy.load_model(str(tmp_path), torch.device("cpu"))


def test_a_model_whose_cache_cannot_be_batched_is_refused(tmp_path):
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    save(tmp_path, "qwen3_next", **layers)
    with pytest.raises(UserError, match="linear_attention: not supported"):
        policy.load_model(str(tmp_path), torch.device("cpu"))


def test_a_model_that_keeps_a_state_is_refused(tmp_path):
    save(tmp_path, "xlstm", num_blocks=1, num_heads=2, head_dim=16)
    with pytest.raises(UserError, match="a recurrent state: not supported"):
        policy.load_model(str(tmp_path), torch.device("cpu"), attn="eager")


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_longest_row_are_refused(kind, tmp_path):
    """Two rows in one batch would be scored otherwise than each alone."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
        rope["original_max_position_embeddings"] = 64
    save(tmp_path, "llama", rope_parameters=rope)
    with pytest.raises(UserError, match="its positions depend on the longest row"):
        policy.load_model(str(tmp_path), torch.device("cpu"))


@pytest.mark.parametrize("flag", ["model", "encoder", "update_model", "data"])
def test_a_mistyped_path_is_not_looked_for_on_the_hub(flag, world_dir, refusal, monkeypatch):
    monkeypatch.chdir(world_dir.parent)
    name = f"{world_dir.name}/nope"
    refusal(f"{name}: no such", **{flag: name})
