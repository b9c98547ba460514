"""The dialect of all programs: flags from fields, presets, @FILE, and a mistake as one line."""

import dataclasses
import errno
import inspect
import math
import os
import re

import driver
import pytest
import small_run

import eval
import rollout
import skills
from lib import command, config, model
from lib.config import setting
from methods import ablations, grpo, rlsd

PROGRAMS = [*small_run.METHODS.values(), (eval, config.EvalConfig)]


def parse(text, kind=config.Config):
    presets = {} if kind is config.EvalConfig else config.presets_of(kind)
    return command.parse(text.split(), "about", kind, presets)


def refused(text, *words, kind=config.Config):
    """A command line is refused in one line with these words."""
    driver.refused(lambda argv: parse(" ".join(argv), kind), text.split(), *words)


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


@pytest.mark.parametrize("program, kind", PROGRAMS)
def test_every_setting_has_a_flag_that_help_shows_and_whose_rule_is_kept(program, kind, capsys):
    """But for those that have no effect in a method: they have no flag."""
    with pytest.raises(SystemExit) as end:
        program.main(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    path = "PATH " if kind is config.EvalConfig else ""
    for f in dataclasses.fields(kind):
        flag, rule = config.flag(f.name), kind.rules().get(f.name)
        shown = "PATH" if f.name == "paths" else flag
        assert bool(re.search(rf"^  {shown}[ ,\n]", text, re.M)) == bool(rule)
        for value in forbidden(rule) if rule else ():
            refused(f"{path}{flag}={value}", flag, value, kind=kind)
            with pytest.raises(ValueError, match=flag):  # of a settings object, too
                kind(**{f.name: rule.value_type(value)})


def test_a_wrong_command_line_is_one_line():
    """Nothing is abbreviated."""
    refused("--no-clip", "--no-clip", "--help")
    refused("--step 3", "--step", "--help")
    refused("--memory-answer false", "false")
    refused("@no_such_file", "no_such_file")
    refused("--seed=-1", "<= 1,099,511,627,776")


def test_flags_that_contradict_each_other_are_one_line():
    refused("--temperature=0", "--temperature 0", kind=grpo.GRPOConfig)
    refused("--teacher-field=hint --bank=b.json", "--bank", kind=rlsd.RLSDConfig)
    kind = ablations.AblationConfig
    refused("--teacher-field=hint", "--answer-pi", kind=kind)
    refused("--objective=jsd --support-top-k=9", "--support-top-k", "--objective", kind=kind)


def test_a_flag_goes_before_the_preset_and_that_before_a_methods_own_default():
    cfg = parse("--tau-g 2.5 --memory-answer --no-cold-start-thinking")
    assert (cfg.tau_g, cfg.memory_answer, cfg.cold_start_thinking) == (2.5, True, False)
    assert parse("") == config.Config() == parse("--preset paper")
    cfg = parse("--preset tiny --top-p .9", grpo.GRPOConfig)
    assert (cfg.top_p, cfg.max_new_tokens, cfg.temperature) == (0.9, 96, 1.2)
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


@dataclasses.dataclass(frozen=True)
class Own(grpo.GRPOConfig):
    """A method of one's own, with settings of each type."""

    program = "own.py"

    temperature: float = 1  # in this class a whole number, but still a float's setting
    penalty: float = setting(1, "at most 100% of the loss", least=0, most=1)
    words: tuple[str, ...] = setting((), "a list")
    gentle: bool = setting(False, "", brings={"penalty": 0.1, "learning_rate": 1e-6, "top_p": 0.8})
    rare: str = setting("", "", brings={"learning_rate": 1e-7})


def test_a_setting_of_ones_own_is_one_line(capsys):
    cfg = parse("--temperature .7 --penalty .5 --words a b", Own)
    assert (cfg.temperature, cfg.penalty, cfg.words) == (0.7, 0.5, ("a", "b"))
    refused("--penalty 2", "--penalty 2.0", "<= 1", kind=Own)
    with pytest.raises(SystemExit):
        parse("--help", Own)
    assert "at most 100% of the loss (default: 1)" in capsys.readouterr().out


def test_a_setting_may_bring_other_defaults_and_the_last_that_is_declared_wins():
    cfg = parse("--rare x --gentle --short --penalty .3", Own)
    assert (cfg.penalty, cfg.learning_rate, cfg.top_p) == (0.3, 1e-7, 0.8)
    cfg = parse("--preset tiny --gentle --no-short", Own)
    assert (cfg.penalty, cfg.learning_rate, cfg.top_p) == (0.1, 1e-3, 0.8)


MISTAKES = {  # words of the error: the body of a class of settings
    "Own.top_p: dataclasses ignore": {"top_p": 0.9},
    "Own.topp: no setting": {"topp": 0.9, "__annotations__": {"topp": float}},
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_class_whose_default_would_vanish_is_refused(words):
    made = type("Own", (grpo.GRPOConfig,), dict(MISTAKES[words]))
    kind = dataclasses.dataclass(frozen=True)(made)
    for call in (kind, kind.rules, lambda: parse("", kind)):
        with pytest.raises(TypeError, match=words):
            call()


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


FULL = OSError(f"run/metrics.jsonl: {OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))}")
ERRORS = [  # in the input or later, the error, and the line
    (command.GIVEN, ModuleNotFoundError("No module named 'x'"), "program: No module named 'x'"),
    (command.GIVEN, ValueError("a\n  b"), "program: a b"),
    (command.LATER, FULL, "run the same command"),
    (command.LATER, ConnectionError("no server"), "run the same command"),
    (command.LATER, command.UserError("a b"), "program: a b"),
]


@pytest.mark.parametrize("kinds, error, line", ERRORS)
def test_an_error_of_the_input_is_one_line_and_later_that_of_a_disk_or_server(kinds, error, line):
    """And a bug is not."""

    def program(argv, error=error):
        with command.one_line_errors("-m extras.program", *kinds):
            raise error

    driver.refused(program, [], line)
    for bug in (KeyError("x"), *([ValueError("x")] if kinds == command.LATER else [])):
        with pytest.raises(type(bug)):
            program([], bug)
