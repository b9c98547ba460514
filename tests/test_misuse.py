"""More of a user's mistakes than `test_cli.py` has: exit code 2, one line on stderr with the thing and the fix, nothing half-written."""

import json
import shutil

import pytest
import torch
from conftest import make_bank, make_model, make_tokenizer
from test_cli import file, flags, refused  # noqa: F401  (a fixture)

import eval as E
import rollout as R
import sgsd
import skills as S
from distributed import UserError


def bank_of(path, **changes):
    data = {"general_skills": [], "common_mistakes": [], "metadata": {}, **changes}
    return file(path, json.dumps(data), "b.json")


def lines(path, text):
    return file(path, text, "e.jsonl")


def binary(path, data, name):
    (path / name).write_bytes(data)
    return path / name


FLAGS = {  # one flag, its value, and words that must be said
    "fraction for a count": ("--batch-size", "1.5", "invalid int value"),
    "unknown device": ("--device", "tpu", "cpu", "cuda"),
    "unknown dtype": ("--dtype", "float16", "float32", "bfloat16"),
    "unknown attention": ("--attn", "flash", "sdpa"),
    "unknown method": ("--method", "ppo", "must be one of sgsd"),
    "method that trains nothing": ("--method", "base", "eval.py MODEL"),
    "nor with skills": ("--method", "base+skill", "eval.py MODEL --skills BANK"),
    "baseline with a bank": ("--method", "grpo", "sees no skills", "grpo+skill"),
    "another with a bank": ("--method", "opsd", "sees no skills", "opsd+skill"),
    "unknown teacher": ("--teacher", "dead", "live", "ema"),
    "unknown objective": ("--objective", "kl", "reverse_kl"),
    "unknown prefix": ("--teacher-prefix", "none", "closed"),
    "unknown preset": ("--preset", "huge", "paper", "tiny"),
    "decay of one": ("--teacher-decay", "1", "< 1"),
    "not a number": ("--tau-g", "nan", "> 0"),
    "infinite temperature": ("--temperature", "inf", "finite"),
    "negative temperature": ("--temperature", "-1", "temperature >= 0"),
    "no tokens": ("--max-new-tokens", "0", "max_new_tokens >= 1"),
    "negative top-k": ("--top-k", "-1", "top_k >= 0"),
    "negative seed": ("--seed", "-1", ">= 0"),
    "no rank": ("--lora-rank", "0", "> 0"),
    "groups of one to merge": ("--merge-group-size", "1", ">= 2"),
    "no budget": ("--score-tokens", "0", "> 0"),
    "window that is thrown away": ("--keep-rollouts", "10", ">= --update-every 25"),
    "fewer than none": ("--keep-rollouts", "-1", ">= 0"),
    "no time": ("--verify-timeout", "0", "> 0"),
    "never a checkpoint": ("--checkpoint-every", "0", "> 0"),
    "value of a switch": ("--polarity", "false", "unrecognized arguments: false"),
    "short for a flag": ("--update", "3", "unrecognized arguments", "--help"),
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags(name, flags, tmp_path, capsys):  # noqa: F811
    flag, value, *words = FLAGS[name]
    refused({**flags, flag: value}, capsys, *words)
    assert not (tmp_path / "run").exists()


FILES = {
    "list for a bank": lambda t: (
        {"--bank": file(t, "[]")},
        ("x.json", "a JSON object is wanted, got list"),
    ),
    "bank without lists": lambda t: (
        {"--bank": file(t, '{"skills": []}')},
        ("x.json", "`general_skills` must be a list", "skills"),
    ),
    "entry without a field": lambda t: (
        {"--bank": bank_of(t, general_skills=[{"skill_id": "a"}])},
        ("general_skills[0] lacks", "title", "App. C"),
    ),
    "entry that is a string": lambda t: (
        {"--bank": bank_of(t, common_mistakes=["careless"])},
        ("common_mistakes[0] lacks", "description"),
    ),
    "metadata in a list": lambda t: (
        {"--bank": bank_of(t, metadata=[])},
        ("b.json", "`metadata` must be an object"),
    ),
    "directory for a bank": lambda t: ({"--bank": t}, ("bank", "cannot be read")),
    "bank in another encoding": lambda t: (
        {"--bank": binary(t, '{"a": "é"}'.encode("utf-16"), "u.json")},
        ("u.json", "cannot be read"),
    ),
    "bank without a bottom": lambda t: (
        {"--bank": file(t, "[" * 100_000)},
        ("x.json", "cannot be read"),
    ),
    "number without an end": lambda t: (
        {"--data": lines(t, '{"problem": "p", "answer": ' + "1" * 5000 + "}\n")},
        ("e.jsonl:1", "not a JSON line"),
    ),
    "data without a bottom": lambda t: (
        {"--data": lines(t, "[" * 100_000)},
        ("e.jsonl:1", "not a JSON line"),
    ),
    "list for a row": lambda t: (
        {"--data": lines(t, '["p", "1"]\n')},
        ("e.jsonl:1", "a JSON object is wanted"),
    ),
    "binary data": lambda t: (
        {"--data": binary(t, b"\xff\xfe\x00", "e.jsonl")},
        ("e.jsonl", "UTF-8"),
    ),
    "broken parquet": lambda t: (
        {"--data": binary(t, b"PAR1", "e.parquet")},
        ("e.parquet", "not read"),
    ),
    "directory without data": lambda t: (
        {"--data": (t / "d").mkdir() or t / "d"},
        ("no .parquet and no .jsonl",),
    ),
    "answers in conflict": lambda t: (
        {"--data": lines(t, "".join(f'{{"problem": "p", "answer": "{i}"}}\n' for i in (1, 2)))},
        ("no problem is left",),
    ),
    "no such evaluation data": lambda t: (
        {"--eval-data": t / "none.jsonl"},
        ("none.jsonl", "no such file"),
    ),
    "nor with the overlap allowed": lambda t: (
        {"--eval-data": t / "none.jsonl"},
        ("none.jsonl", "no such file"),
    ),
    "evaluation set by name, offline": lambda t: (
        {"--eval-data": "amc23"},
        ("amc23: math-ai/amc23", "not read"),
    ),
    "encoder that is none": lambda t: (
        {"--encoder": (t / "d").mkdir() or t / "d"},
        ("--encoder", "not loaded"),
    ),
    "encoder that is a file": lambda t: ({"--encoder": file(t, "x")}, ("--encoder", "not loaded")),
    "no such update model": lambda t: (
        {"--update-model": "/no/such"},
        ("--update-model /no/such", "no such directory"),
    ),
    "no update model": lambda t: ({"--update-model": t}, ("--update-model", "not loaded")),
    "run below a file": lambda t: ({"--out": file(t, "x") / "run"}, ("x.json/run", "irectory")),
    "FlashAttention on a CPU": lambda t: (
        {"--attn": "flash_attention_2", "--device": "cpu"},
        ("--attn flash_attention_2: flash-attn is not installed",),
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_files(name, flags, tmp_path, capsys):  # noqa: F811
    changes, words = FILES[name](tmp_path)
    before = ["--allow-eval-overlap"] if "allowed" in name else []
    refused({**flags, **changes, "--seed": 1}, capsys, *words, before=before)
    assert not (tmp_path / "run").exists()


def spoil(folder, name):
    """A model directory with one thing wrong."""
    make_model(vocab=267 if name == "row too few" else 272).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    if name == "no chat template":
        (folder / "chat_template.jinja").unlink()
    elif name == "torn weights":
        (folder / "model.safetensors").write_bytes(
            (folder / "model.safetensors").read_bytes()[:1000]
        )
    elif name == "no weights":
        (folder / "model.safetensors").unlink()
    elif name == "broken config":
        (folder / "config.json").write_text("{")


@pytest.mark.parametrize(
    "name,word",
    [
        ("no chat template", "no chat template"),
        ("torn weights", "not loaded"),
        ("no weights", "not loaded"),
        ("broken config", "not loaded"),
        ("row too few", "knows 268 ids, the model has rows for 267"),
    ],
)
def test_models(name, word, flags, tmp_path, capsys):  # noqa: F811
    spoil(tmp_path / "model", name)
    capsys.readouterr()
    refused({**flags, "--model": tmp_path / "model"}, capsys, "--model", word)
    assert not (tmp_path / "run").exists()


def loaded(folder, vocab, *added, **special):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(list(added))
    tokenizer.add_special_tokens(special)
    make_model(vocab=vocab).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return R.load_model(str(folder), torch.device("cpu"))


def test_a_row_for_every_id_of_the_tokenizer(tmp_path):
    """As many rows as ids are enough, and more are usual; an added token's id counts, a text-only model's placeholder for images does not."""
    assert loaded(tmp_path / "a", 268) and loaded(tmp_path / "b", 271, "<a>", "<b>")
    for added, special in ((["<a>"], {}), ([], {"bos_token": "<a>"})):
        with pytest.raises(
            UserError, match=r"--model .*knows 269 ids.*rows for 268.*\(the last is '<a>'\)"
        ):
            loaded(tmp_path / "c", 268, *added, **special)
    with pytest.raises(UserError, match="rows for 268"):
        loaded(tmp_path / "d", 268, "<image>")
    edit(
        tmp_path / "d/tokenizer_config.json",
        lambda c: c.update(extra_special_tokens={"image_token": "<image>"}),
    )  # as Gemma 3's small ones say
    assert R.load_model(str(tmp_path / "d"), torch.device("cpu"))


@pytest.fixture(scope="module")
def finished(world_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    settings = {"model": "model", "data": "data.jsonl", "bank": "bank.json", "encoder": "encoder"}
    given = [f"--{k}={world_dir / v}" for k, v in settings.items()]
    assert (
        sgsd.main(
            [
                *given,
                "--num-teachers=3",
                "--batch-size=4",
                "--max-new-tokens=8",
                "--updates=2",
                "--lora-rank=4",
                f"--out={out}",
            ]
        )
        == 0
    )
    return out


def edit(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


STEP = "checkpoints/step_000002"
RUNS = {  # what was done to a run's directory, the flags, and words that must be said
    "torn adapter": (
        lambda r: (r / STEP / "adapter_model.safetensors").write_bytes(b"x"),
        [],
        "step_000002: does not fit",
    ),
    "no optimizer state": (
        lambda r: (r / STEP / "trainer.safetensors").unlink(),
        [],
        "step_000002: does not fit",
    ),
    "no trainer state": (
        lambda r: (r / STEP / "trainer.json").unlink(),
        [],
        "step_000002: does not fit",
    ),
    "step that is a word": (
        lambda r: (r / STEP / "trainer.json").write_text('{"step": "two"}'),
        [],
        "step_000002: does not fit",
    ),
    "adapter of another rank": (lambda r: None, ["--lora-rank=8"], "does not fit"),
    "broken config": (lambda r: (r / "config.json").write_text("{"), [], "no readable config.json"),
    "config of a later version": (
        lambda r: edit(r / "config.json", lambda c: c["settings"].update(new=1)),
        [],
        "no readable config.json",
    ),
    "config that is a list": (
        lambda r: (r / "config.json").write_text("[]"),
        [],
        "no readable config.json",
    ),
    "settings that are a list": (
        lambda r: (r / "config.json").write_text('{"settings": []}'),
        [],
        "no readable config.json",
    ),
    "config that is no text": (
        lambda r: (r / "config.json").write_bytes(b"\xff\xfe"),
        [],
        "no readable config.json",
    ),
    "word for a setting": (
        lambda r: edit(r / "config.json", lambda c: c["settings"].update(tau_g="x")),
        [],
        "no readable config.json",
    ),
    "setting out of range": (
        lambda r: edit(r / "config.json", lambda c: c["settings"].update(tau_g=-1)),
        [],
        "--tau-g -1: must be > 0",
    ),
    "another method": (lambda r: None, ["--method=grpo"], "is a run of sgsd"),
    "preset": (lambda r: None, ["--preset=tiny"], "has its own settings"),
    "another directory": (
        lambda r: None,
        ["--out=elsewhere"],
        "--out elsewhere",
        "goes on where it is",
    ),
    "flag without use": (
        lambda r: None,
        ["--teacher-decay=.5"],
        "--teacher-decay",
        "the other settings make",
    ),
    "marker without a mask": (
        lambda r: None,
        ["--no-token-mask", "--mask-extra"],
        "--mask-extra",
        "the other settings make",
    ),
    "broken bank": (
        lambda r: (r / "bank/bank.json").write_text("{"),
        [],
        "bank.json: cannot be read",
    ),
    "broken log": (
        lambda r: (r / "metrics.jsonl").write_text("{}}\n"),
        ["--updates=3"],
        "metrics.jsonl:1",
    ),
    "broken ledger": (
        lambda r: (r / STEP / "ledger.json").write_text("{}"),
        ["--updates=3"],
        "step_000002/ledger.json",
        "cannot be read",
    ),
    "fewer updates than made": (lambda r: None, ["--updates=1"], "--updates 1", "update 2"),
}


@pytest.mark.parametrize("name", RUNS)
def test_resumed_runs(name, finished, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    spoiled, given, *words = RUNS[name]
    spoiled(run)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    refused({"--resume": run}, capsys, *words, before=given)
    assert before == {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}


TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29511",
}


@pytest.mark.parametrize(
    "change,words",
    [
        ({"LOCAL_RANK": None}, ("RANK is set but LOCAL_RANK is not", "torchrun")),
        ({"RANK": None, "WORLD_SIZE": "2"}, ("WORLD_SIZE is set but RANK is not", "torchrun")),
        ({"RANK": "first"}, ("must be numbers", "first")),
        ({"RANK": "1"}, ("RANK 1", "WORLD_SIZE 1")),
        ({"WORLD_SIZE": "0"}, ("RANK 0", "WORLD_SIZE 0")),
        ({"MASTER_PORT": "http"}, ("127.0.0.1:http", "not joined")),
        ({"MASTER_PORT": "99999999"}, ("127.0.0.1:99999999", "not joined")),
    ],
)
def test_half_set_torchrun(change, words, flags, tmp_path, capsys, monkeypatch):  # noqa: F811
    for k, v in {**TORCHRUN, **change}.items():
        monkeypatch.delenv(k, raising=False) if v is None else monkeypatch.setenv(k, v)
    refused({**flags, "--device": "cpu"}, capsys, *words)
    assert not (tmp_path / "run").exists() and not torch.distributed.is_initialized()


@pytest.mark.parametrize("package", ["datasets", "peft", "sentence_transformers"])
def test_a_missing_package_is_named(package, flags, tmp_path, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setitem(__import__("sys").modules, package, None)
    data = {"--data": binary(tmp_path, b"PAR1", "e.parquet")} if package == "datasets" else {}
    refused({**flags, **data}, capsys, package)
    assert not (tmp_path / "run").exists()


def test_making_a_bank(world_dir, tmp_path, capsys):
    given = {"--model": world_dir / "model", "--data": world_dir / "data.jsonl", "--device": "cpu"}
    refused(given, capsys, "--out", "required", program=S.main)
    refused({**given, "--out": tmp_path}, capsys, "--out", "is a directory", program=S.main)
    refused(
        {**given, "--out": tmp_path / "b", "--problems": 0},
        capsys,
        "--problems",
        ">= 1",
        program=S.main,
    )
    refused(
        {**given, "--out": tmp_path / "b", "--max-new-tokens": 0},
        capsys,
        "max_new_tokens >= 1",
        program=S.main,
    )
    refused(
        {**given, "--out": tmp_path / "b", "--data": "none.jsonl"},
        capsys,
        "none.jsonl",
        "no such file",
        program=S.main,
    )
    (tmp_path / "b.work").mkdir()
    file(tmp_path, "{}", "b.work/settings.json")
    refused({**given, "--out": tmp_path / "b"}, capsys, "b.work", "other settings", program=S.main)
    assert not list(tmp_path.glob("b*json")) and [
        p.name for p in (tmp_path / "b.work").iterdir()
    ] == ["settings.json"]


def test_evaluating(world_dir, tmp_path, capsys):
    refused({}, capsys, "PATH", "required", program=E.main)
    before = (
        str(world_dir / "model"),
        "--data",
        str(world_dir / "data.jsonl"),
        "--out",
        str(tmp_path / "o"),
    )
    make_bank(tmp_path / "b.json")
    refused(
        {"--skills": tmp_path / "b.json"},
        capsys,
        "--num-skills 8",
        "1..4",
        program=E.main,
        before=before,
    )
    refused({"--temperature": -1}, capsys, "temperature >= 0", program=E.main, before=before)
    refused({"--limit": -1}, capsys, "--limit -1", program=E.main, before=before)
    assert not (tmp_path / "o").exists()
