"""The dialect of all programs: flags from fields, presets, @FILE, and a mistake as one line."""

import dataclasses
import errno
import importlib
import inspect
import math
import os
import re

import driver
import pytest

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


def forbidden(rule):
    """Values that a setting's rule forbids."""
    if rule.choices:
        yield "no-such-choice"
    elif rule.value_type in (int, float):
        yield 0 if rule.least is None else rule.least - 1
        if rule.most < math.inf:
            yield rule.value_type(rule.most + 1)
    if rule.value_type is float:
        yield from ("nan", "inf")


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_every_setting_has_a_flag_whose_rule_is_kept_and_said(kind, capsys):
    """But for those that have no part in a method: they are kept, and have no flag."""
    path = "PATH " if kind is config.EvalConfig else ""
    assert {*kind.rules()} == {f.name for f in dataclasses.fields(kind)}
    for name, rule in kind.rules().items():
        flag = config.flag(name)
        for value in forbidden(rule) if name not in kind.not_offered else ():
            refused(capsys, f"{path}{flag}={value}", flag, str(value), kind=kind)
        for value in forbidden(rule):
            with pytest.raises(ValueError, match=flag):  # of a settings object, too
                kind(**{name: rule.value_type(value)})


FLAGS = {  # what is wrong, and the words of the line
    "--no-clip": ("--no-clip", "--help"),
    "--step 3": ("--step", "--help"),  # nothing is abbreviated
    "--steps": ("--steps",),
    "--memory-answer false": ("false",),
    "@no_such_file": ("no_such_file",),
}


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


@pytest.mark.parametrize("name", KINDS)
def test_help_has_every_flag_with_its_default_and_its_source_in_groups(name, capsys):
    kind = KINDS[name]
    with pytest.raises(SystemExit) as end:
        importlib.import_module(name).main(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and f"examples:\n    python {kind.program} " in text
    parts = dict(part.split(":\n", 1) for part in text.split("\n\n") if ":\n" in part)
    titles = {}
    for title, names in config.GROUPS.items():
        titles |= dict.fromkeys(names.split(), title)
    for setting in kind.rules().keys() - kind.not_offered:
        shown = "PATH" if setting == "paths" else config.flag(setting)
        part = parts[titles.get(setting, "the method")]
        assert re.search(rf"^  {shown}\b", part, re.M), setting
    one = "App. F.1 (default: 12)" if name == "eval" else "App. F.1, S7 (default: 5e-06)"
    assert one in " ".join(text.split())
    assert "(default: )" not in text and "(default: None)" not in text


def test_a_default_without_an_annotation_is_refused():
    """Dataclasses would ignore it without a word."""
    bare = dataclasses.dataclass(frozen=True)(type("Bare", (config.Config,), {"tau_g": 2.0}))
    for call in (bare, bare.rules):
        with pytest.raises(TypeError, match=r"Bare\.tau_g: "):
            call()


NOT_OFFERED = {  # flags that have no part in a method
    "grpo": ["--cold-start 8", "--no-cold-start-thinking", "--server http://a/v1", "--eps-a .1"],
    "opsd": ["--cold-start-tokens 96", "--tau-g 2"],
    "rlsd": ["--cold-start 8", "--c-delta 2"],
    "sdpo": ["--bank x.json", "--num-teachers 2", "--encoder x"],
}


@pytest.mark.parametrize("name", NOT_OFFERED)
def test_a_method_does_not_offer_what_has_no_part_in_it_and_a_preset_may_set_it(name, capsys):
    kind = driver.METHODS[name][0]
    for given in NOT_OFFERED[name]:
        refused(capsys, given, "unrecognized", given.split()[0], kind=kind)
        assert parse(given) and parse(given, ablations.AblationConfig)
    assert parse("--preset tiny", kind).cold_start_tokens == 96


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


def test_another_ranks_mistake_has_its_rank_and_comes_later(monkeypatch, capsys):
    """Two seconds: torchrun has then ended it, if rank 0 has the same mistake."""
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setenv("RANK", "1")
    refused(capsys, "--no-such-flag", "rank 1: sgsd: ", "--no-such-flag")
    assert slept == [2]


def printed_by(capsys, error, kinds):
    """The line that an error becomes, with exit code 2."""
    with pytest.raises(SystemExit) as end, command.one_line_errors("-m extras.program", *kinds):
        raise error
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("program: ")
    return line


def test_where_input_is_read_an_error_is_one_line_and_later_only_what_may_still_go_wrong(capsys):
    """A full disk, a lost server, and what only a bank that was made can show."""
    for error in (ValueError("a\n  b"), OSError("a b"), command.UserError("a b")):
        assert printed_by(capsys, error, command.GIVEN) == "program: a b"
    line = printed_by(capsys, ModuleNotFoundError("No module named 'x'"), command.GIVEN)
    assert "No module named 'x'" in line and line.endswith("install it")
    assert printed_by(capsys, command.UserError("a b"), command.LATER) == "program: a b"
    assert "same command" in printed_by(capsys, ConnectionError("no server"), command.LATER)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for error in (full, OSError(f"run/metrics.jsonl: {full}")):
        assert "free space; run the same command" in printed_by(capsys, error, command.LATER)
    for error in (ValueError("a bug"), ImportError("a bug"), KeyError("a bug")):
        with pytest.raises(type(error)), command.one_line_errors("p.py", *command.LATER):
            raise error
