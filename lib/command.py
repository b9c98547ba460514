"""The command line of every program: its flags, errors in one line, and signals."""

import argparse
import contextlib
import functools
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

# ------------------------------------------------------------------ errors in one line, and signals


class UserError(ValueError):
    """Bad input that shows only after all input was read."""


GIVEN = (ValueError, OSError, ImportError)  # what reading a user's input may raise
LATER = (OSError, UserError)  # what may go wrong later, such as a full disk or a lost server


def fail(program: str, message: str) -> NoReturn:
    """Print an error as one line, and end this process with exit code 2.

    Often all ranks have the same error. When rank 0 exits, torchrun ends the other ranks. So the
    others wait before they print: what they still print is an error of their own.
    """
    name = program.removesuffix(".py").replace(".", " ").split()[-1]  # "-m methods.grpo" -> "grpo"
    if not is_first_rank():
        time.sleep(2)
        name = f"rank {os.environ['RANK']}: {name}"
    print(f"{name}: {' '.join(message.split())}", file=sys.stderr, flush=True)
    raise SystemExit(2)


@contextlib.contextmanager
def one_line_errors(program: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds into one line and exit code 2. Others are bugs: a traceback.

    kinds: GIVEN while the input is read, LATER after that.
    """
    try:
        yield
    except kinds as e:
        lines = [str(e), *getattr(e, "__notes__", [])]
        if kinds == LATER and isinstance(e, OSError):
            lines.append("run the same command to continue")
        fail(program, "; ".join(lines))


class Signals:
    """Ctrl-C and SIGTERM end the process with exit code 130.

    In a step, the first signal waits until the step is saved. `install` sets this up. Signals
    within a second count as one, because torchrun repeats what the terminal has sent.
    """

    def __init__(self) -> None:
        self.in_step = False  # from a step's beginning to its save
        self.first = 0.0  # time of a step's first signal, on a monotonic clock; 0: none came

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.receive)

    def receive(self, *_: object) -> None:
        """Note a signal, or end the process. A signal may interrupt a print: we use os.write."""
        now = time.monotonic()
        if self.in_step and not self.first:
            self.first = now
            self.say(b"finishing this step, then stopping; once more stops at once")
        elif not self.in_step or now - self.first > 1:  # else this repeats the first signal
            self.say(b"Interrupted. Run the same command to continue.")
            os._exit(130)

    def say(self, line: bytes) -> None:
        if is_first_rank():
            os.write(2, b"\n" + line + b"\n")


def is_first_rank() -> bool:
    """Whether torchrun started this process as rank 0, or did not start it."""
    return os.environ.get("RANK", "0") == "0"


class Parser(argparse.ArgumentParser):
    """A parser of whole flag names, with @FILE for more flags, and errors in one line.

    doc: a docstring; --help shows its first line and its commands. The lines of FILE are split as
    a shell splits them, and # begins a comment.
    """

    def __init__(self, program: str, usage: str, doc: str | None, **settings: Any):
        title, *body = (doc or "").split("\n")
        commands = [line for line in body if line.startswith(("    python ", "    torchrun "))]
        super().__init__(
            f"python {program}",
            usage=f"python {program} {usage}",
            description=title,
            epilog="\n".join(
                ["Tags such as S3 are rows of docs/decisions.md.\n\nexamples:", *commands]
            ),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            fromfile_prefix_chars="@",
            **{"allow_abbrev": False, **settings},
        )

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        return shlex.split(arg_line, comments=True)

    def error(self, message: str) -> NoReturn:
        fail(self.prog, f"{message}; --help lists the flags")


# ------------------------------------------------------------------------------ the command line


OPTIONS: dict[type, dict[str, Any]] = {  # how argparse reads a setting, by its type
    bool: {"action": argparse.BooleanOptionalAction},
    int: {"type": int, "metavar": "N"},
    float: {"type": float, "metavar": "X"},
    str: {"metavar": "NAME"},
    tuple: {"nargs": "+", "metavar": "NAME"},
}


def parse(
    argv: Sequence[str] | None,
    doc: str | None,
    config_class: Any,
    presets: dict[str, dict[str, Any]] | None = None,
) -> Any:
    """The settings of a command line; bad input exits with code 2.

    doc: a program's docstring, for --help. config_class: a class of settings, as lib/config.py has
    them. presets: other defaults, by the name for --preset. A flag may also bring defaults of other
    settings (`Rule.brings`). A preset overrides these, and a flag overrides both.
    """
    parser = parser_of(doc, config_class, presets or {})
    try:
        typed = vars(parser.parse_args(argv))
        preset = (presets or {}).get(typed.pop("preset", ""), {})
        values: dict[str, Any] = {}  # what comes later wins
        for name, rule in config_class.rules().items():
            if typed.get(name):
                values |= rule.brings
        values |= preset
        for name, value in typed.items():
            values[name] = tuple(value) if isinstance(value, list) else value
        return config_class(**values)
    except ValueError as e:
        parser.error(str(e))


def parser_of(doc: str | None, config_class: Any, presets: dict[str, dict[str, Any]]) -> Parser:
    """The parser of a class of settings: a flag for each, in its group of --help.

    Its result has only the flags that were given.
    """
    usage = f"{'[--preset NAME]' if presets else 'PATH [PATH ...]'} [--FLAG VALUE ...] [@FILE]"
    parser = Parser(config_class.program, usage, doc, argument_default=argparse.SUPPRESS)
    if presets:
        parser.add_argument(
            "--preset",
            choices=presets,
            help="settings to start from; --help shows the defaults without a preset",
        )
    group = functools.cache(parser.add_argument_group)  # by its title; made once
    for name, rule in config_class.rules().items():
        default = getattr(config_class, name)
        shown = " ".join(default) if isinstance(default, tuple) else default
        text = rule.help if shown == "" else f"{rule.help} (default: {shown})"
        options = {"choices": rule.choices} if rule.choices else OPTIONS[rule.value_type]
        if rule.metavar:
            options = {**options, "metavar": rule.metavar}
        word = name if name == "paths" else "--" + name.replace("_", "-")
        group(rule.group).add_argument(word, help=text.replace("%", "%%"), **options)
    return parser
