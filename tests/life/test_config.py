"""Settings: flags with their rules, presets, a run that is resumed, and a mistake as one line."""

import dataclasses
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tomllib

import pytest
from conftest import ROOT
from driver import refused

from extras import baselines
from lib import config, runlog

PROGRAMS = {  # module: its command
    "sgsd": "python sgsd.py",
    "skills": "python skills.py",
    "eval": "python eval.py",
    "extras.baselines": "python -m extras.baselines",
    "extras.report": "python -m extras.report",
}


def parse(text, kind=config.Config):
    return config.parse(text.split(), "about", kind, baselines.DEFAULTS)


def refuse(capsys, text, *words, kind=config.Config):
    refused(capsys, lambda argv: parse(" ".join(argv), kind), text.split(), *words)


@pytest.fixture
def run(tmp_path):
    """A run with settings of its own."""
    settings = dataclasses.asdict(config.Config(tau_g=2.0, steps=7, writer_model="w"))
    (tmp_path / "config.json").write_text(json.dumps({"settings": settings}))
    return tmp_path


# ------------------------------------------------------------------------------------------ flags


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
def test_every_flag_has_its_rule_and_says_it(kind, capsys):
    for f in dataclasses.fields(kind):
        name = config.flag(f.name)
        for value in forbidden(f):
            if f.metadata["choices"]:
                refuse(capsys, f"{name}={value}", name, value, kind=kind)
            else:
                with pytest.raises(ValueError) as refusal:
                    kind(**{f.name: type(f.default)(value)})
                line = str(refusal.value)
                assert line.startswith(f"{name} {type(f.default)(value)}: must be ")
                assert f"({f.metadata['source']})" in line


FLAGS = {  # what is wrong, and the words of the line
    "--no-clip": "sgsd: unrecognized arguments: --no-clip; --help lists",  # none is like it
    "--num-teacher 3": "--num-teacher 3; did you mean --num-teachers? --help lists the flags",
    "--step 3": "unrecognized arguments: --step 3; did you mean --steps?",  # no abbreviations
    "--steps many": "--steps: invalid int value: 'many'",
    "--batch-size 0": "--batch-size 0: must be > 0 (problems in a step, over all processes "
    "together; S6)",
    "--device tpu": "--device: invalid choice: 'tpu' (choose from",
    "--mask-extra false": "unrecognized arguments: false",
    "--method grpo": "unrecognized arguments: --method grpo",  # extras.baselines has it
    "--data no.jsonl": "--data no.jsonl: no such file or directory; check the path",
    "--eval-data no.parquet": "--eval-data no.parquet: no such file or directory",
    "--bank no.json": "--bank no.json: no such file or directory",
    "--model /no/such": "--model /no/such: no such file or directory",
    "--encoder ./no": "--encoder ./no: no such file or directory",
    "--writer-model a/b/c": "--writer-model a/b/c: no such file or directory",
    "--prompts ~/no": "--prompts ~/no: no such file or directory",
    "--writer-server http://x/v1": "--writer-server http://x/v1: give the model that it serves as "
    "--writer-model",
}


@pytest.mark.parametrize("given", FLAGS)
def test_a_wrong_flag_is_one_line(given, capsys):
    refuse(capsys, given, FLAGS[given])


def test_a_name_is_a_path_where_its_first_part_is_a_directory_and_else_a_hub_id(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    for name in ("tiny/nope", "./nope", "a/b/c", "runs/nope", "nope/", "~/nope", "nope.jsonl"):
        with pytest.raises(ValueError, match=f"--model {name}: no such file or directory"):
            config.refuse_missing_path("--model", name)
    for name in ("", "tiny", "Qwen/Qwen3-1.7B", "gpt2"):
        config.refuse_missing_path("--model", name)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: "its config.json")
    config.refuse_missing_path("--model", "tiny/nope")  # the hub's, in its cache


def test_a_flag_goes_before_the_preset_and_that_before_the_method():
    cfg, resume = parse("--tau-g 2.5 --mask-extra --top-k 7 --no-cold-start-thinking")
    assert (cfg.tau_g, cfg.mask_extra, cfg.top_k, resume) == (2.5, True, 7, False)
    assert not cfg.cold_start_thinking
    assert parse("")[0] == config.Config() == parse("--preset paper")[0]
    cfg, _ = parse("--preset tiny --method grpo --top-p .9", baselines.BaselineConfig)
    assert (cfg.top_p, cfg.max_new_tokens, cfg.temperature, cfg.tau_g) == (0.9, 96, 1.2, 1.0)


def test_a_run_may_have_several_servers():
    assert parse("--server http://a/v1 http://b/v1")[0].server == ("http://a/v1", "http://b/v1")


def printed(text, capsys, kind=config.Config):
    """What --print-config prints."""
    with pytest.raises(SystemExit) as end:
        parse(f"{text} --print-config", kind)
    assert end.value.code == 0
    return capsys.readouterr().out


def test_print_config_shows_every_setting_with_its_source(capsys):
    lines = printed("--preset tiny", capsys).splitlines()
    assert len(lines) == len(dataclasses.fields(config.Config))
    assert "tau_g: 1.0  # width of the gate; Eq. 14, Tab. 12" in lines
    source = "problems in a step, over all processes together; S6"
    assert f"batch_size: 16  # {source}; instead of 32" in lines


@pytest.mark.parametrize(
    "text",
    ["", "--preset tiny --server http://a/v1 http://b/v1 --mask-extra", "--method opsd+skill"],
)
def test_what_print_config_prints_is_a_config_file_of_the_same_settings(text, tmp_path, capsys):
    kind = baselines.BaselineConfig
    (tmp_path / "c.yaml").write_text(printed(text, capsys, kind))
    assert parse(f"--config {tmp_path}/c.yaml", kind) == parse(text, kind)


def test_a_config_file_goes_before_the_preset_and_a_flag_before_the_file(run, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("tau-g: 3\nlearning_rate: 1e-4\ntop_k: 7\nmask_extra: true\n")
    cfg, resume = parse(f"--preset tiny --config {file} --top-k 9")
    assert (cfg.tau_g, cfg.learning_rate, cfg.mask_extra) == (3.0, 1e-4, True)
    assert (cfg.top_k, cfg.batch_size, resume) == (9, 16, False)
    cfg, resume = parse(f"--config {run}/config.json --out new")  # that of a run
    assert (cfg.tau_g, cfg.steps, cfg.out, resume) == (2.0, 7, "new", False)
    file.write_text("method: grpo\n")
    cfg, _ = parse(f"--config {file}", baselines.BaselineConfig)
    assert (cfg.method, cfg.generations) == ("grpo", 8)
    file.write_text("# nothing yet\n")
    assert parse(f"--config {file}")[0] == config.Config()


CONFIGS = {  # a --config file, and the words of the line
    "tau: 1": "c.yaml: there is no setting tau; ",
    "num_teacher: 1": "c.yaml: there is no setting num_teacher; did you mean num_teachers?",
    "steps: 1.5": "c.yaml: steps: 1.5 must be of type int",
    "steps: yes": "c.yaml: steps: True must be of type int",
    "tau_g: wide": "c.yaml: tau_g: 'wide' must be of type float",
    "server: http://a/v1": "c.yaml: server: 'http://a/v1' must be of type tuple",
    "- steps": "c.yaml: not a YAML mapping of settings",
    "steps: [": "c.yaml: not a YAML mapping of settings",
    "tau_g: -1": "--tau-g -1.0: must be > 0",
    "data: no.jsonl": "--data no.jsonl: no such file or directory",
}


@pytest.mark.parametrize("text", CONFIGS)
def test_a_wrong_config_file_is_one_line(text, tmp_path, capsys):
    (tmp_path / "c.yaml").write_text(text)
    refuse(capsys, f"--config {tmp_path}/c.yaml", CONFIGS[text])


def test_a_config_file_that_is_not_there_is_one_line(tmp_path, capsys):
    refuse(capsys, f"--config {tmp_path}/no.yaml", f"{tmp_path}/no.yaml")


@pytest.mark.parametrize("program", ["sgsd", "skills", "extras.baselines"])
def test_help_has_groups_defaults_and_examples(program, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module(program).main(["--help"])
    text = capsys.readouterr().out
    for group in config.GROUPS.values():
        of_baselines = group == "baselines and ablations"
        assert (f"\n{group}:\n" in text) == (not of_baselines or program == "extras.baselines")
    for part in (f"examples:\n    {PROGRAMS[program]} ", "(default: 0.05)", "Eq. 14, Tab. 12"):
        assert part in text


@pytest.mark.parametrize("program", ["eval", "extras.report", "extras.probe"])
def test_other_programs_help_has_defaults_and_examples(program, capsys):
    with pytest.raises(SystemExit):
        main = importlib.import_module(program)
        (main.parse if program == "extras.probe" else main.arguments)(["--help"])
    text = capsys.readouterr().out
    command = f"python {program}.py" if program == "eval" else f"python -m {program}"
    assert f"examples:\n    {command} " in text
    assert re.search(r"--(samples|draws) N .*\(default: \d+\)", text)
    assert "(default: )" not in text and "(default: None)" not in text


# ----------------------------------------------------------------------------------------- resume


METHOD = set(  # what the steps of a run are made of
    "seed model dtype lora_rank lora_alpha data batch_size verifier prompts bank encoder "
    "query_prompt cold_start evolve_every success_gate max_new_items dynamic_capacity "
    "merge_group_size merge_patience reply_tokens writer_model memory_answer num_teachers "
    "teacher_prefix tau_g c_delta eps_a mask_extra temperature top_p top_k max_new_tokens "
    "learning_rate grad_clip verify_timeout".split()
)


def other(f):
    """Another value of a setting, as it stands on a command line; and the value itself."""
    if isinstance(f.default, bool):
        return "", not f.default
    if isinstance(f.default, tuple):
        return "http://a/v1", ("http://a/v1",)
    if f.metadata["choices"]:
        return f.metadata["choices"][-1], f.metadata["choices"][-1]
    value = f"other-{f.name}" if isinstance(f.default, str) else type(f.default)(9)
    return str(value), value


def test_a_resumed_run_has_its_own_settings_and_takes_those_that_change_rounding_alone(run):
    cfg, resume = parse(f"--resume {run}")
    own = config.Config(tau_g=2.0, steps=7, writer_model="w", out=str(run))
    assert (cfg, resume) == (own, True)
    for f in dataclasses.fields(config.Config):
        if f.metadata["resumable"]:
            text, value = other(f)
            again, _ = parse(f"--resume {run} {config.flag(f.name)} {text}")
            assert again == dataclasses.replace(own, **{f.name: value}) != own
    names = {f.name for f in dataclasses.fields(config.Config) if f.metadata["resumable"]}
    assert {"steps", "checkpoint_every", "device", "server", "score_tokens"} < names
    assert not names & METHOD


@pytest.mark.parametrize(
    "given",
    [
        "--tau-g 2.0",
        "--bank banks",
        "--out elsewhere",
        "--preset tiny",
        "--print-config",
        "--config banks",
    ],
)
def test_any_other_setting_of_a_resumed_run_is_refused(given, run, capsys):
    name, _, value = given.partition(" ")
    (run / "banks").touch()
    words = f"{name} {value or 'True'}: a resumed run keeps its own; leave it out, or start a new"
    refuse(capsys, f"--resume {run} {given}", words)


def test_a_resumable_setting_still_has_its_rule(run, capsys):
    refuse(capsys, f"--resume {run} --steps 0", "--steps 0: must be > 0")
    refuse(capsys, f"--resume {run} --eval-data no.jsonl", "--eval-data no.jsonl: no such file")


def test_a_checkpoint_or_another_directory_is_no_run_to_resume(tmp_path, capsys):
    step = tmp_path / "run/checkpoints/step_000002"
    step.mkdir(parents=True)
    refuse(capsys, f"--resume {step}", "is a checkpoint; give its run", "/run")
    words = ("no readable config.json of a run there", "give a run such as runs/sgsd")
    refuse(capsys, f"--resume {tmp_path}", *words)


BROKEN = {  # a config.json, and the words of the line
    "{": "no readable config.json of a run there (JSONDecodeError",
    "[]": "no readable config.json of a run there (TypeError",
    '{"settings": []}': "no readable config.json of a run there (AttributeError",
    '{"settings": {"of_a_later_version": 1}}': "its settings are not those of sgsd.py",
    '{"settings": {"tau_g": "x"}}': "config.json holds a wrong value (",
    '{"settings": {"tau_g": -1}}': "--tau-g -1: must be > 0",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_config_is_one_line(text, run, capsys):
    if "tau_g" in text:
        settings = json.loads((run / "config.json").read_text())["settings"]
        text_of_run = json.dumps({"settings": settings | json.loads(text)["settings"]})
    else:
        text_of_run = text
    (run / "config.json").write_text(text_of_run)
    refuse(capsys, f"--resume {run}", BROKEN[text])


def test_a_run_is_continued_by_the_program_that_began_it(run, capsys):
    words = f"not those of -m extras.baselines; python sgsd.py --resume {run} continues it"
    refuse(capsys, f"--resume {run}", words, kind=baselines.BaselineConfig)
    settings = dataclasses.asdict(baselines.BaselineConfig(method="opsd"))
    (run / "config.json").write_text(json.dumps({"settings": settings}))
    words = f"not those of sgsd.py; python -m extras.baselines --resume {run} continues it"
    refuse(capsys, f"--resume {run}", words)
    assert parse(f"--resume {run}", baselines.BaselineConfig)[0].method == "opsd"


def test_torchruns_own_restart_continues_a_run_of_the_same_settings(run, monkeypatch):
    same = f"--out {run} --tau-g 2 --steps 7 --writer-model w"
    settings = dataclasses.asdict(parse(same)[0])
    (run / "config.json").write_text(json.dumps({"settings": settings}))
    assert [parse(same)[1], parse(f"{same} --seed 1")[1]] == [False, False]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert [parse(same)[1], parse(f"{same} --seed 1")[1]] == [True, False]
    assert not parse(f"--out {run}/new")[1]


# ------------------------------------------------------------------------------- mistakes, signals


def test_a_mistake_of_the_command_line_is_printed_by_rank_0_alone(monkeypatch, capsys):
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        for given in ("--no-such-flag", "--batch-size 0", "--data no.jsonl"):
            with pytest.raises(SystemExit) as end:
                parse(given)
            assert end.value.code == 2 and capsys.readouterr().err.count("\n") == lines


def test_bad_input_and_a_missing_package_are_one_line_and_a_bug_is_a_traceback(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")  # whichever rank has made it
    for error in (ValueError("a\n  b"), OSError("a b")):
        with pytest.raises(SystemExit) as end, config.mistakes_as_one_line("program"):
            raise error
        assert end.value.code == 2 and capsys.readouterr().err == "program: a b\n"
    with pytest.raises(SystemExit), config.mistakes_as_one_line("program"):
        raise ModuleNotFoundError("No module named 'x'")
    fix = "pip install -r requirements.txt"
    assert capsys.readouterr().err == f"program: No module named 'x'; {fix}\n"
    with pytest.raises(KeyError), config.mistakes_as_one_line("program"):
        raise KeyError("a bug")


SLEEPER = """
import sys, time, config
config.end_at_signals("Go on with: x.")
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_program_at_once_and_says_how_to_continue(number):
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", SLEEPER]
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as program:
        assert program.stdout.readline() == "ready\n"
        program.send_signal(number)
        assert program.communicate()[1] == "\nInterrupted. Go on with: x.\n"
    assert program.returncode == 130


# --------------------------------------------------------------------------------------- programs


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_and_mistakes_are_answered_without_torch(program, tmp_path):
    """Its import takes seconds."""
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch is imported')")
    path = f"{tmp_path}:{ROOT}"
    done = []
    for argv in (["--help"], ["x", "--hepl"]):
        command = [*PROGRAMS[program].split()[1:], *argv]
        environment = {**os.environ, "PYTHONPATH": path}
        run = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        done.append(run)
    assert [run.returncode for run in done] == [0, 2], done[0].stderr + done[1].stderr
    assert PROGRAMS[program] in done[0].stdout or "--help" in done[0].stdout
    assert done[1].stderr.count("\n") == 1 and "--hepl" in done[1].stderr


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_says_the_version_which_the_changes_name(program, capsys):
    with pytest.raises(SystemExit) as end:
        importlib.import_module(program).main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"sgsd {config.VERSION}\n"


def test_the_version_stands_in_the_changes_the_package_and_a_runs_provenance():
    """The package's requirements are the file's that README.md installs."""
    assert f"\n## {config.VERSION}" in (ROOT / "CHANGELOG.md").read_text()
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert package["project"]["version"] == config.VERSION
    dependencies = package["tool"]["setuptools"]["dynamic"]["dependencies"]
    assert dependencies == {"file": ["requirements.txt"]}
    assert runlog.provenance({}, config.VERSION)["versions"]["sgsd"] == config.VERSION
