"""The command line of every program: its flags, errors in one line, and signals."""

import argparse
import contextlib
import errno
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, NoReturn

VERSION = "0.1.0"  # of the project: --version prints it

# ------------------------------------------------------------------- mistakes and signals, one line


class UserError(ValueError):
    """Bad input that shows only after all input was read."""


GIVEN = (ValueError, OSError, ImportError)  # what reading a user's input may raise
LATER = (OSError, UserError)  # what may go wrong later, such as a full disk or a lost server


def fail(program: str, message: str) -> NoReturn:
    """Print an error as one line, and end this process with exit code 2.

    Often all ranks have the same error. At the first exit torchrun ends the others, so all but rank
    0 wait before they print: what a rank then still prints is an error of its own.
    """
    name = program.removesuffix(".py").replace(".", " ").split()[-1]
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
        hint = "; install it" if isinstance(e, ImportError) else ""
        if any(os.strerror(number) in str(e) for number in (errno.ENOSPC, errno.EDQUOT)):
            hint = "; free space"
        if kinds == LATER and isinstance(e, OSError):
            hint += "; run the same command to continue"
        fail(program, "; ".join([str(e), *getattr(e, "__notes__", [])]) + hint)


class Signals:
    """Ctrl-C and SIGTERM end the process with exit code 130, but in a step the first one waits.

    Signals within a second count as one, because torchrun repeats what the terminal has sent.
    """

    def __init__(self) -> None:
        self.in_step = False  # from a step's beginning to its save
        self.first = 0.0  # time of a step's first signal, on a monotonic clock; 0: none came
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.receive)

    def receive(self, *_: object) -> None:
        """Note a signal, or end the process. It may interrupt a print, so we use os.write."""
        now, line = time.monotonic(), b"\nInterrupted. Run the same command to continue.\n"
        waits = self.in_step and now - (self.first or now) <= 1
        if waits:
            line = b"\nfinishing this step, then stopping; once more stops at once\n"
        if is_first_rank() and not (waits and self.first):
            os.write(2, line)
        if not waits:
            os._exit(130)
        self.first = self.first or now


def is_first_rank() -> bool:
    """Whether torchrun started this process as rank 0, or did not start it."""
    return os.environ.get("RANK", "0") == "0"


class Parser(argparse.ArgumentParser):
    """A parser of whole flag names, with @FILE for more flags, --version, and errors in one line.

    about: a docstring; --help shows its first line and its commands. The lines of FILE are split as
    a shell splits them, and # begins a comment.
    """

    def __init__(self, program: str, usage: str, about: str | None, **settings: Any):
        title, *body = (about or "").split("\n")
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
        self.add_argument("--version", action="version", version=f"sgsd {VERSION}")

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        return shlex.split(arg_line, comments=True)

    def error(self, message: str) -> NoReturn:
        fail(self.prog, f"{message}; --help lists the flags")


# ------------------------------------------------------------------------------ the command line


def parse(
    argv: Sequence[str] | None,
    about: str | None,
    kind: Any,
    presets: dict[str, dict[str, Any]] | None = None,
    variants: dict[str, dict[str, Any]] | None = None,
) -> Any:
    """The settings of a command line; bad input exits with code 2.

    about: a program's docstring, for --help. kind: a class of settings, as lib/config.py has them.
    presets: other defaults, by the name for --preset. variants: other defaults, by the setting that
    brings them if it is given. A flag overrides the preset, and the preset overrides variants.
    """
    parser = parser_of(about, kind, presets or {})
    try:
        typed = vars(parser.parse_args(argv))
        preset = (presets or {}).get(typed.pop("preset", ""), {})
        start: dict[str, Any] = {}
        for name, defaults in (variants or {}).items():
            start |= defaults if typed.get(name) else {}
        return kind.from_dict({**start, **preset, **typed})
    except ValueError as e:
        parser.error(str(e))


def parser_of(about: str | None, kind: Any, presets: dict[str, dict[str, Any]]) -> Parser:
    """The parser of a class of settings; kind.groups has the groups of --help."""
    usage = f"{'[--preset NAME]' if presets else 'PATH [PATH ...]'} [--FLAG VALUE ...] [@FILE]"
    parser = Parser(kind.program, usage, about, argument_default=argparse.SUPPRESS)
    if presets:
        parser.add_argument(
            "--preset",
            choices=presets,
            help="settings to start from; --help shows the defaults without a preset",
        )
    default_of = {f.name: f.default for f in fields(kind) if f.name not in kind.not_offered}
    listed = " ".join(kind.groups.values()).split()
    own = [name for name in default_of if name not in listed]
    for title, names in {**kind.groups, "the method": " ".join(own)}.items():
        group = parser.add_argument_group(title)
        for name in [name for name in names.split() if name in default_of]:
            rule = kind.rules()[name]
            if name == "paths":
                group.add_argument(name, nargs="+", metavar="PATH", help=rule.help)
            else:
                flag = "--" + name.replace("_", "-")
                group.add_argument(flag, **options_of(rule, default_of[name]))
    return parser


def options_of(rule: Any, default: Any) -> dict[str, Any]:
    """How argparse reads a setting's flag."""
    shown = " ".join(default) if isinstance(default, tuple) else default
    text = rule.help.replace("%", "%%")
    text += "" if shown == "" else f" (default: {shown})"
    if rule.value_type is bool:
        return {"action": argparse.BooleanOptionalAction, "help": text}
    if rule.value_type is tuple:
        return {"nargs": "+", "metavar": "NAME" if default else "URL", "help": text}
    if rule.choices:
        return {"choices": rule.choices, "help": text}
    metavar = {int: "N", float: "X", str: "NAME"}[rule.value_type]
    return {"type": rule.value_type, "metavar": metavar, "help": text}
