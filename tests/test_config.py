"""Settings: flags with their rules, presets, and a run that is resumed."""

import dataclasses
import json

import pytest
import torch
from driver import flags, refused

import baselines
import config
import sgsd
import skills
from cli import UserError


def forbidden(f):
    """Values that a setting's own rule forbids."""
    rule = f.metadata
    if rule["choices"]:
        yield "no-such-choice"
    elif type(f.default) in (int, float):
        yield 0 if rule["least"] is None else rule["least"] - 1
        if rule["most"] is not None:
            yield rule["most"] + 1
    if type(f.default) is float:
        yield from ("nan", "inf")


@pytest.mark.parametrize("kind", [config.Config, baselines.BaselineConfig])
def test_every_flag_has_its_rule_and_says_it(kind):
    for f in dataclasses.fields(kind):
        for value in forbidden(f):
            name = config.flag(f.name)
            with pytest.raises(UserError) as refusal:
                config.parse([f"{name}={value}"], "x", "", kind)
            assert name in str(refusal.value) and str(value) in str(refusal.value)
            rule = (": must be ", f"({f.metadata['source']})")
            assert f.metadata["choices"] or all(part in str(refusal.value) for part in rule)


FLAGS = {  # what is wrong, and what is said
    "--no-clip": "unrecognized arguments: --no-clip; --help",  # nothing here is much like it
    "--teachers 3": "--teachers 3; for --teachers there is --num-teachers; --help lists the flags",
    "--update 3": "unrecognized arguments: --update 3",  # short for a flag
    "--updates many": "--updates: invalid int value: 'many'",
    "--batch-size 0": "--batch-size 0: must be > 0 (problems in a step, over all processes "
    "together; S6)",
    "--device tpu": "--device: invalid choice: 'tpu' (choose from",
    "--mask-extra false": "unrecognized arguments: false",
    "--method grpo": "unrecognized arguments: --method grpo",  # baselines.py has it
    "--model no/such-id": "--model no/such-id: not loaded",
    "--encoder /no/such": "--encoder /no/such: no such directory",
    "--update-model /no/such": "--update-model /no/such: no such directory",
    "--data no/such-id": "`problem` and `answer` works offline",
    "--eval-data no.jsonl --allow-eval-overlap": "no.jsonl: no such file",
    "--eval-data amc23": "amc23: math-ai/amc23: not read",
    "--max-prompt-tokens 30": "tokens, --max-prompt-tokens is 30",
    "--device cuda": "--device cuda: torch finds no CUDA GPU here",
    "--attn flash_attention_2": "flash-attn is not installed",
}


@pytest.mark.parametrize("given", FLAGS)
def test_a_wrong_flag_is_one_line(given, world_dir, tmp_path, capsys):
    if given == "--device cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    argv = [*flags(world_dir, tmp_path / "run"), *given.split()]
    refused(capsys, sgsd.main, argv, FLAGS[given])
    assert not (tmp_path / "run").exists()


def parse(text, kind=config.Config):
    return config.parse(text.split(), "sgsd.py", "", kind, baselines.DEFAULTS)


def test_a_flag_goes_before_the_preset_and_that_before_the_method(capsys):
    cfg, resume = parse("--tau-g 2.5 --mask-extra --top-k 7")
    assert (cfg.tau_g, cfg.mask_extra, cfg.top_k, resume) == (2.5, True, 7, False)
    assert parse("")[0] == config.Config() == parse("--preset paper")[0]
    cfg, _ = parse("--preset tiny --method grpo --top-p .9", baselines.BaselineConfig)
    assert (cfg.top_p, cfg.max_new_tokens, cfg.temperature, cfg.tau_g) == (0.9, 96, 1.2, 1.0)
    with pytest.raises(SystemExit) as end:
        parse("--preset tiny --print-config")
    shown = capsys.readouterr().out.splitlines()
    assert end.value.code == 0 and len(shown) == len(dataclasses.fields(config.Config))
    assert "tau_g = 1.0  (width of the gate; Eq. 14, Tab. 12)" in shown
    source = "problems in a step, over all processes together; S6"
    assert f"batch_size = 16  ({source}, instead of 32)" in shown


def test_resume_takes_the_settings_of_the_run_and_the_flags(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"settings": {"tau_g": 2.0, "updates": 7}}))
    cfg, resume = parse(f"--resume {tmp_path} --updates 9")
    assert (cfg.tau_g, cfg.updates, cfg.out, resume) == (2.0, 9, str(tmp_path), True)
    for given, words in {
        "--bank b.json": "--bank b.json: a resumed run has its own bank",
        "--out elsewhere": "--out elsewhere: a resumed run has its own directory",
        "--preset tiny": "--preset tiny: a resumed run has its own settings",
        "--print-config": "--print-config True: a resumed run has its own settings",
    }.items():
        refused(capsys, sgsd.main, ["--resume", tmp_path, *given.split()], words)


@pytest.mark.parametrize("program", [sgsd, baselines, skills])
def test_help_has_groups_defaults_and_examples(program, capsys):
    with pytest.raises(SystemExit):
        program.main(["--help"])
    said = capsys.readouterr().out
    of_one = {"baselines and ablations": baselines, "a cold start by a server": skills}
    for group in config.GROUPS.values():
        assert (f"\n{group}:\n" in said) == (of_one.get(group, program) is program)
    for part in ("examples:\n    python ", "(default: 0.05)", "width of the gate; Eq. 14, Tab. 12"):
        assert part in said


def test_a_checkpoint_or_another_directory_is_no_run_to_resume(tmp_path, capsys):
    step = tmp_path / "run/checkpoints/step_000002"
    step.mkdir(parents=True)
    (tmp_path / "notes").touch()
    refused(capsys, sgsd.main, ["--resume", step], "is a checkpoint; give its run", "/run")
    refused(capsys, sgsd.main, ["--resume", tmp_path], "no readable config.json", "but notes, run")


def test_a_run_is_continued_by_the_program_that_began_it(tmp_path, capsys):
    for settings, own, other in (
        ({"tau_g": 1.0}, "sgsd.py", baselines),
        ({"method": "grpo"}, "baselines.py", sgsd),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"settings": settings}))
        said = f"is a run of {own}; python {own} continues it"
        refused(capsys, other.main, ["--resume", tmp_path], said)


def test_a_name_is_a_path_where_its_first_part_is_a_directory_and_else_a_hub_id(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    for name in ("tiny/nope", "./nope", "a/b/c", "runs/nope", "nope/", "~/nope"):
        assert config.missing_path(name)
    for name in ("tiny", "Qwen/Qwen3-1.7B", "gpt2"):
        assert not config.missing_path(name)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: "its config.json")
    assert not config.missing_path("tiny/nope")  # the hub's, in its cache
