"""A user's mistakes: exit code 2, one line on stderr that names the thing, no traceback, nothing half-written."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT, make_bank, make_model, make_tokenizer

import config
import eval as E
import sgsd
from distributed import UserError


@pytest.fixture
def flags(world_dir, tmp_path):
    return {
        "--model": world_dir / "model",
        "--data": world_dir / "data.jsonl",
        "--bank": world_dir / "bank.json",
        "--encoder": world_dir / "encoder",
        "--num-teachers": 3,
        "--batch-size": 4,
        "--max-new-tokens": 8,
        "--updates": 1,
        "--lora-rank": 4,
        "--out": tmp_path / "run",
    }


def refused(flags, capsys, *words, program=sgsd.main, before=()):
    code = program([*before, *(str(x) for pair in flags.items() for x in pair)])
    err = capsys.readouterr().err.strip()
    assert code == 2 and "\n" not in err and "Traceback" not in err, err
    assert all(w in err for w in words), err


def file(tmp_path, text, name="x.json"):
    (tmp_path / name).write_text(text)
    return tmp_path / name


MISTAKES = {
    "no such model": lambda t: (
        {"--model": "/no/such/dir"},
        ("--model /no/such/dir", "no such directory"),
    ),
    "model is no model": lambda t: ({"--model": t}, ("--model", "not loaded")),
    "hub id offline": lambda t: (
        {"--model": "no/such-model"},
        ("--model no/such-model", "not loaded"),
    ),
    "no such data": lambda t: ({"--data": "nowhere.jsonl"}, ("nowhere.jsonl", "no such file")),
    "empty data": lambda t: ({"--data": file(t, "", "e.jsonl")}, ("e.jsonl", "no problem is left")),
    "problem without an answer": lambda t: (
        {"--data": file(t, '{"problem": "p"}\n', "e.jsonl")},
        ("e.jsonl:1", "answer", "fields found: problem"),
    ),
    "answer that is no string": lambda t: (
        {"--data": file(t, '{"problem": "p", "answer": 3}\n', "e.jsonl")},
        ("e.jsonl:1", "must be a string"),
    ),
    "no such bank": lambda t: ({"--bank": "nobank.json"}, ("nobank.json", "cannot be read")),
    "unreadable bank": lambda t: ({"--bank": file(t, "{")}, ("x.json", "cannot be read as JSON")),
    "bank with an empty list": lambda t: (
        {"--bank": (make_bank(t / "b.json", mistakes=0), t / "b.json")[1]},
        ("b.json", "common_mistakes has 0 entries"),
    ),
    "K larger than the bank": lambda t: (
        {"--num-teachers": 9},
        ("general_skills has 4 entries", "--num-teachers 9"),
    ),
    "no such encoder": lambda t: (
        {"--encoder": "/no/encoder"},
        ("--encoder /no/encoder", "no such directory"),
    ),
    "prompt too long": lambda t: (
        {"--max-prompt-tokens": 30},
        ("prompt has", "--max-prompt-tokens is 30"),
    ),
    "unknown flag": lambda t: ({"--teachers": 3}, ("--teachers", "--help")),
    "word for a number": lambda t: ({"--updates": "many"}, ("--updates", "many")),
    "zero batch": lambda t: ({"--batch-size": 0}, ("--batch-size 0", "> 0")),
    "negative threshold": lambda t: ({"--eps-a": -0.1}, ("--eps-a -0.1", ">= 0", "Eq. 13")),
    "zero gate width": lambda t: ({"--tau-g": 0}, ("--tau-g 0", "> 0", "Eq. 14")),
    "top-p above one": lambda t: ({"--top-p": 1.5}, ("top_p", "1.5")),
    "no GPU": lambda t: ({"--device": "cuda"}, ("--device cuda", "no CUDA GPU")),
    "infinite rate": lambda t: (
        {"--learning-rate": "inf"},
        ("--learning-rate inf", "must be finite"),
    ),
    "huge seed": lambda t: ({"--seed": 10**14}, ("--seed", "2^40")),
    "directory that is a file": lambda t: ({"--out": file(t, "x")}, ("--out", "is a file")),
    "strange chat": lambda t: (
        {"--data": file(t, '{"prompt": ["x"], "reward_model": {"ground_truth": 3}}\n', "e.jsonl")},
        ("must be a string",),
    ),
    "used directory": lambda t: (
        {"--out": file(t, "x").parent},
        ("--out", "not empty", "--resume"),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name, flags, tmp_path, capsys):
    import torch

    if name == "no GPU" and torch.cuda.is_available():
        pytest.skip("there is one")
    changes, words = MISTAKES[name](tmp_path)
    refused({**flags, **changes}, capsys, *words)
    assert not (tmp_path / "run").exists()


def test_batch_smaller_than_the_world(flags, capsys, monkeypatch):
    monkeypatch.setattr(sgsd.D, "init", lambda device: sgsd.D.World(0, 8, "cpu"))
    refused(flags, capsys, "--batch-size 4 is smaller than the world of 8 processes")


def test_adapter_of_another_model(flags, tmp_path, capsys):
    assert sgsd.main([str(x) for pair in flags.items() for x in pair]) == 0
    capsys.readouterr()
    make_model(hidden_size=48).save_pretrained(tmp_path / "other")
    make_tokenizer().save_pretrained(tmp_path / "other")
    refused(
        {"--resume": flags["--out"], "--model": tmp_path / "other"},
        capsys,
        "checkpoint",
        "does not fit --model",
        "of another model",
    )
    out = flags["--out"] / "checkpoints" / "step_000001"
    data = ("--data", str(flags["--data"]))
    refused(
        {"--model": tmp_path / "other"},
        capsys,
        "does not fit",
        "other",
        program=E.main,
        before=(str(out), *data),
    )
    (tmp_path / "fresh" / "checkpoints").mkdir(parents=True)
    refused(
        {},
        capsys,
        "fresh: a run without a checkpoint",
        program=E.main,
        before=(str(out), str(tmp_path / "fresh"), *data),
    )
    refused(
        {},
        capsys,
        "/no/such: no such directory",
        program=E.main,
        before=(str(out), "/no/such", *data),
    )
    refused({"--samples": 0}, capsys, "--samples 0", program=E.main, before=(str(out), *data))
    refused(
        {},
        capsys,
        "aime24: HuggingFaceH4",
        "not read",
        "works offline",
        program=E.main,
        before=(str(out),),
    )


def test_model_without_all_projections(flags, tmp_path, capsys):
    import transformers

    config = transformers.Phi3Config(
        vocab_size=272,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=263,
        eos_token_id=265,
        bos_token_id=264,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "phi")
    make_tokenizer().save_pretrained(tmp_path / "phi")
    capsys.readouterr()
    refused(
        {**flags, "--model": tmp_path / "phi"},
        capsys,
        "has no q_proj, k_proj, v_proj, gate_proj, up_proj to adapt",
    )


def test_a_resumed_run_keeps_its_bank(tmp_path, capsys):
    refused({"--resume": tmp_path, "--bank": "b.json"}, capsys, "--bank b.json", "has its own bank")


def test_evaluation_mistakes(world_dir, tmp_path, capsys):
    (tmp_path / "a").mkdir()
    twin = file(tmp_path / "a", (world_dir / "data.jsonl").read_text(), "data.jsonl")
    before = (str(world_dir / "model"), "--data", str(world_dir / "data.jsonl"))
    refused(
        {"--out": tmp_path / "o", "--verify-timeout": 0},
        capsys,
        "--verify-timeout 0",
        program=E.main,
        before=before,
    )
    refused({}, capsys, "two sets have one name", program=E.main, before=(*before, str(twin)))
    (tmp_path / "adapter").mkdir()
    file(tmp_path / "adapter", "{", "adapter_config.json")
    refused(
        {},
        capsys,
        "names no base model",
        program=E.main,
        before=(str(tmp_path / "adapter"), *before[1:]),
    )
    assert not (tmp_path / "o").exists()


def test_resume_of_nothing(tmp_path, capsys):
    refused({"--resume": tmp_path}, capsys, "--resume", "no readable config.json")


def test_flags_come_from_the_config():
    cfg, resume = sgsd.parse_config(["--tau-g", "2.5", "--mask-extra", "--top-k", "7"])
    assert (cfg.tau_g, cfg.mask_extra, cfg.top_k, resume) == (2.5, True, 7, False)
    assert sgsd.parse_config([])[0] == sgsd.Config()


def test_resume_takes_the_runs_settings_and_given_flags(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"settings": {"tau_g": 2.0, "updates": 7}}))
    cfg, resume = sgsd.parse_config(["--resume", str(tmp_path), "--updates", "9"])
    assert (cfg.tau_g, cfg.updates, cfg.out, resume) == (2.0, 9, str(tmp_path), True)


def test_as_a_user_runs_it(flags, tmp_path):
    """A real process: help, a mistake, and a signal that ends in a checkpoint and a word on how to go on."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}

    def run(*args):
        return subprocess.run(
            [sys.executable, ROOT / "sgsd.py", *map(str, args)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=env,
            timeout=100,
        )

    helped = run("--help")
    assert helped.returncode == 0 and "gate width; Eq. 14, Tab. 12" in helped.stdout
    wrong = run("--bank", "none.json")
    assert (
        wrong.returncode == 2
        and wrong.stderr.startswith("sgsd: bank none.json")
        and wrong.stderr.count("\n") == 1
    )
    process = subprocess.Popen(
        [
            sys.executable,
            ROOT / "sgsd.py",
            *(str(x) for pair in {**flags, "--updates": 10_000}.items() for x in pair),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=env,
    )
    for line in process.stdout:
        if line.startswith("step 2/"):
            process.terminate()
            break
    rest, _ = process.communicate(timeout=60)
    assert (
        process.returncode == 0
        and "stopped as asked; go on with: python sgsd.py --resume" in rest
        and "saved" in rest
    )


def test_a_flag_goes_before_the_preset_before_the_method_before_the_paper(capsys):
    cfg, source = config.layered("tiny", {"method": "grpo", "top_p": 0.9})
    assert (cfg.top_p, cfg.max_new_tokens, cfg.temperature, cfg.tau_g) == (0.9, 96, 1.2, 1.0)
    assert [source[name] for name in ("top_p", "max_new_tokens", "temperature")] == [
        "a flag",
        "--preset tiny",
        "the default of --method grpo",
    ]
    with pytest.raises(SystemExit) as end:
        config.parse_config(["--preset", "tiny", "--method", "grpo", "--print-config"])
    shown = capsys.readouterr().out
    assert (
        end.value.code == 0
        and "temperature = 1.2  (the default of --method grpo)" in shown
        and "tau_g = 1.0  (gate width; Eq. 14, Tab. 12)" in shown
    )
    with pytest.raises(UserError, match="--preset tiny: a resumed run has its own settings"):
        config.parse_config(["--preset", "tiny", "--resume", "x"])


@pytest.mark.parametrize(
    "argv",
    [
        "--method grpo --tau-g 2",
        "--method opsd --num-teachers 2",
        "--method grpo+skill --no-polarity",
        "--method grpo --cold-start 9",
        "--teacher ema --teacher-period 9",
        "--teacher-decay .9",
        "--objective-clip .1",
        "--objective jsd --tau-g 2",
        "--no-clip --c-delta 2",
        "--no-polarity --eps-a 0",
    ],
)
def test_a_flag_without_use_is_refused(argv, capsys):
    assert sgsd.main(argv.split()) == 2 and "no use of it" in capsys.readouterr().err


def test_greedy_groups_are_refused(capsys):
    assert (
        sgsd.main("--method grpo --temperature 0".split()) == 2
        and "makes the 8 --generations of a problem the same" in capsys.readouterr().err
    )
