"""The dialect of all programs: flags from fields, presets, @FILE, and a mistake as one line."""

import dataclasses
import errno
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tomllib

import driver
import pytest
from conftest import ROOT

import rollout
import skills
from lib import command, config, model
from methods import ablations, grpo

KINDS = {
    "sgsd": config.Config,
    "methods.grpo": grpo.GRPOConfig,
    "methods.ablations": ablations.AblationConfig,
    "eval": config.EvalConfig,
}


def parse(text, kind=config.Config):
    presets = {} if kind is config.EvalConfig else config.presets_of(kind)
    return command.parse(text.split(), "about", kind, presets, grpo.VARIANTS)


def refused(capsys, text, *words, kind=config.Config):
    driver.refused(capsys, lambda argv: parse(" ".join(argv), kind), text.split(), *words)


# ------------------------------------------------------------------------------------------ flags


def forbidden(rule):
    """Values that a setting's rule forbids."""
    if rule.choices:
        yield "no-such-choice"
    elif rule.value_type in (int, float):
        yield 0 if rule.least is None else rule.least - 1
        if rule.most is not None:
            yield rule.most + 1
    if rule.value_type is float:
        yield from ("nan", "inf")


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_every_setting_has_a_flag_whose_rule_is_kept_and_said(kind, capsys):
    path = "PATH " if kind is config.EvalConfig else ""
    assert {*kind.rules()} == {f.name for f in dataclasses.fields(kind)}
    for name, rule in kind.rules().items():
        flag = config.flag(name)
        for value in forbidden(rule):
            refused(capsys, f"{path}{flag}={value}", flag, str(value), kind=kind)
        for value in forbidden(rule):
            with pytest.raises(ValueError, match=flag):  # of a settings object, too
                kind(**{name: rule.value_type(value)})


FLAGS = {  # what is wrong, and the words of the line
    "--no-clip": ("--no-clip", "--help"),
    "--num-teacher 3": ("--num-teacher", "did you mean --num-teachers?"),
    "--step 3": ("--step", "did you mean --steps?"),  # nothing is abbreviated
    "--steps many": ("--steps", "many"),
    "--steps": ("--steps",),
    "--batch-size 0": ("--batch-size 0", "> 0"),
    "--device tpu": ("--device", "tpu", "cuda"),
    "--memory-answer false": ("false",),
    "@no_such_file": ("no_such_file",),
}
OPEN_QUOTE = "--data 'my problems.jsonl"


@pytest.mark.parametrize("given", FLAGS)
def test_a_wrong_flag_is_one_line(given, capsys):
    refused(capsys, given, *FLAGS[given])


def test_a_flag_goes_before_the_preset_and_that_before_a_methods_own_default():
    cfg = parse("--tau-g 2.5 --memory-answer --top-k 7 --no-cold-start-thinking")
    assert (cfg.tau_g, cfg.memory_answer, cfg.top_k) == (2.5, True, 7)
    assert not cfg.cold_start_thinking
    assert parse("") == config.Config() == parse("--preset paper")
    cfg = parse("--preset tiny --top-p .9", grpo.GRPOConfig)
    assert (cfg.top_p, cfg.max_new_tokens, cfg.temperature, cfg.tau_g) == (0.9, 96, 1.2, 1.0)
    assert cfg.generations == 8
    cfg = parse("--preset tiny --short --top-p .9", grpo.GRPOConfig)
    assert (cfg.top_p, cfg.max_new_tokens, cfg.temperature) == (0.9, 96, 1.1)


def test_a_file_of_flags_is_split_as_a_shell_does_and_a_later_flag_goes_before_it(tmp_path):
    file = tmp_path / "flags"
    file.write_text(
        "# a comment\n\n--tau-g 2   # the gate\n--data 'my problems.jsonl' --top-k=7\n"
        '--answer-after "#### "\n--server http://a/v1 http://b/v1\n'
    )
    cfg = parse(f"--tau-g 1 @{file} --top-k 9")
    assert (cfg.tau_g, cfg.data, cfg.top_k) == (2.0, "my problems.jsonl", 9)
    assert (cfg.answer_after, cfg.server) == ("#### ", ("http://a/v1", "http://b/v1"))


def test_an_open_quote_in_a_file_of_flags_is_one_line(tmp_path, capsys):
    file = tmp_path / "flags"
    file.write_text(f"--seed 1\n{OPEN_QUOTE}\n")
    refused(capsys, f"@{file}", OPEN_QUOTE)


def test_an_evaluation_takes_several_paths_and_sets_of_different_names(capsys):
    cfg = parse("a b --data x/one.jsonl y/two.jsonl --samples 3", config.EvalConfig)
    assert (cfg.paths, cfg.data) == (("a", "b"), ("x/one.jsonl", "y/two.jsonl"))
    refused(capsys, "", "PATH", kind=config.EvalConfig)
    both = "x/one.jsonl y/one.parquet"
    refused(capsys, f"a --data {both}", f"--data {both}", kind=config.EvalConfig)


@pytest.mark.parametrize("name", KINDS)
def test_help_has_every_flag_with_its_default_and_its_source_in_groups(name, capsys):
    program = importlib.import_module(name)
    kind = KINDS[name]
    with pytest.raises(SystemExit) as end:
        program.main(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and f"examples:\n    python {kind.program} " in text
    parts = text.split("\n\n")
    for setting, rule in kind.rules().items():
        (part,) = [part for part in parts if part.startswith(f"{rule.group}:\n")]
        assert ("PATH" if setting == "paths" else f"  {config.flag(setting)}") in part
    titles = [part.partition(":\n")[0] for part in parts]
    titles = [title for title in titles if title in kind.groups]
    assert titles == sorted(titles, key=kind.groups.index)  # in the class's own order
    one = "App. F.1 (default: 12)" if name == "eval" else "Eq. 13, Tab. 12 (default: 0.05)"
    assert one in " ".join(text.split())
    assert "(default: )" not in text and "(default: None)" not in text


@pytest.mark.parametrize(
    "name", ["sgsd", "eval", "methods.grpo", "methods.opsd", "methods.ablations", "extras.report"]
)
def test_every_program_says_its_version(name, capsys):
    with pytest.raises(SystemExit) as end:
        importlib.import_module(name).main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"sgsd {command.VERSION}\n"


def test_the_package_has_the_version_and_the_requirements_that_the_readme_installs():
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert package["project"]["version"] == command.VERSION
    dependencies = package["tool"]["setuptools"]["dynamic"]["dependencies"]
    assert dependencies == {"file": ["requirements.txt"]}


# --------------------------------------------------------------------------------- other settings


@dataclasses.dataclass(frozen=True)
class Own(grpo.GRPOConfig):
    """A method with a default, a rule and a setting of its own."""

    program = "own.py"

    temperature: float = 2
    top_p: float = config.setting(0.5, "nucleus; ours", least=0.25, most=0.75)
    margin: float = config.setting(1.0, "margin of the loss; ours")


def test_a_method_writes_a_default_alone_may_replace_a_rule_and_adds_a_setting(capsys):
    """The other rules are found along its classes, also where the default is written as an int."""
    rules, inherited = Own.rules(), grpo.GRPOConfig.rules()
    assert rules["temperature"] == inherited["temperature"] == config.Config.rules()["temperature"]
    assert parse("--temperature 1.5", Own).temperature == 1.5 and parse("", Own).temperature == 2
    assert (rules["top_p"].help, rules["margin"].group) == ("nucleus; ours", "the method")
    refused(capsys, "--top-p 0.9", "--top-p 0.9", "nucleus; ours", kind=Own)
    assert {name for name in inherited if rules[name] != inherited[name]} == {"top_p"}


def test_a_default_without_an_annotation_or_of_a_class_that_is_no_dataclass_is_refused():
    """Dataclasses would ignore it without a word."""
    bare = dataclasses.dataclass(frozen=True)(type("Bare", (config.Config,), {"tau_g": 2.0}))
    annotated = {"tau_g": 2.0, "__annotations__": {"tau_g": float}}
    for kind in (bare, type("Plain", (config.Config,), annotated)):
        for call in (kind, kind.rules):
            with pytest.raises(TypeError, match=rf"{kind.__name__}\.tau_g: "):
                call()


OF_COLD_START = ["--cold-start 8", "--cold-start-tokens 96", "--no-cold-start-thinking"]


@pytest.mark.parametrize("name", ["grpo", "opsd", "rlsd", "sdpo"])
def test_what_another_setting_makes_void_is_refused_where_it_was_typed_and_nowhere_else(
    name, capsys
):
    """A preset sets it, too. Only a method that makes a bank of its own has a cold start."""
    kind = driver.METHODS[name][0]
    for given in OF_COLD_START:
        flag = given.split()[0].replace("--no-", "--")
        refused(capsys, given, flag, "no bank", kind=kind)
    assert parse("--preset tiny", kind).cold_start_tokens == 96
    for given in OF_COLD_START:
        assert parse(given) and parse(given, ablations.AblationConfig)
    for flag in ("--lora-rank", "--lora-alpha"):
        refused(capsys, f"--adapter x {flag} 4", f"{flag} 4", "--adapter", kind=kind)
        assert parse(f"{flag} 4", kind) and parse("--preset tiny --adapter x", kind)


def test_every_method_has_a_folder_of_its_own_under_each_preset():
    for preset in config.PRESETS:
        outs = [driver.parsed(["--preset", preset], name).out for name in driver.METHODS]
        assert len({*outs}) == len(outs)
    assert parse("--preset tiny").out == "runs/tiny"
    assert parse("--preset tiny --out x", grpo.GRPOConfig).out == "x"


def test_the_functions_of_the_paper_have_the_defaults_of_the_settings():
    """Those that people import and call without a run."""
    other_names = {"group_size": "merge_group_size", "patience": "merge_patience"}
    count = 0
    functions = (skills.merge, skills.cold_start, skills.evolve, rollout.Sampling)
    for function in (*functions, model.load_model, model.with_adapters):
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.default is not parameter.empty:
                assert parameter.default == getattr(config.Config, other_names.get(name, name))
                count += 1
    assert count > 15


def test_settings_come_back_from_json():
    cfg = parse("--server http://a/v1 http://b/v1 --tau-g 2")
    assert config.Config.from_dict(json.loads(json.dumps(dataclasses.asdict(cfg)))) == cfg


# ------------------------------------------------------------------------------- mistakes, signals


def test_a_mistake_of_the_command_line_is_printed_by_rank_0_alone(monkeypatch, capsys):
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        for given in ("--no-such-flag", "--batch-size 0"):
            with pytest.raises(SystemExit) as end:
                parse(given)
            assert end.value.code == 2 and capsys.readouterr().err.count("\n") == lines


def printed_by(capsys, error, **phase):
    """The line that an error becomes, with exit code 2."""
    with pytest.raises(SystemExit) as end, command.one_line_errors("-m extras.program", **phase):
        raise error
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("program: ")
    return line


def test_where_input_is_read_an_error_is_one_line_and_later_only_what_may_still_go_wrong(capsys):
    """A full disk, a lost server, and what only a bank that was made can show."""
    for error in (ValueError("a\n  b"), OSError("a b"), command.UserError("a b")):
        assert printed_by(capsys, error, reading=True) == "program: a b"
    line = printed_by(capsys, ModuleNotFoundError("No module named 'x'"), reading=True)
    assert "No module named 'x'" in line and "pip install -r requirements.txt" in line
    assert printed_by(capsys, command.UserError("a b")) == "program: a b"
    assert "same command" in printed_by(capsys, ConnectionError("no server"))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for error in (full, OSError(f"run/metrics.jsonl: {full}")):
        assert "free space" in printed_by(capsys, error)
    for error in (ValueError("a bug"), ImportError("a bug"), KeyError("a bug")):
        with pytest.raises(type(error), match="a bug"), command.one_line_errors("program.py"):
            raise error
    with pytest.raises(KeyError), command.one_line_errors("program.py", reading=True):
        raise KeyError("a bug")


SLEEPER = """
import time
from lib import command
command.end_at_signals()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_program_at_once_and_rank_0_says_that_it_can_go_on(number, rank):
    pipe, environment = subprocess.PIPE, {**os.environ, "RANK": rank}
    command = [sys.executable, "-c", SLEEPER]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True
    ) as program:
        assert program.stdout.readline() == "ready\n"
        program.send_signal(number)
        printed = program.communicate()[1]
    assert program.returncode == 130 and "Traceback" not in printed
    assert ("same command" in printed) == (rank == "0")
