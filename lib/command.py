"""The command line of every program: its flags, a mistake as one line, and signals."""

import argparse
import contextlib
import difflib
import errno
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn

NEGATIVE = re.compile(r"-\.?\d")  # a value, and no flag: argparse's own knows no -1e-5
VERSION = "0.1.0"  # of the project: --version prints it

# ------------------------------------------------------------------- mistakes and signals, one line

GIVEN = (ValueError, OSError, ImportError)  # what reading a user's input may raise


class UserError(ValueError):
    """A mistake in the user's input that shows only after all of it was read."""


@contextlib.contextmanager
def user_errors(where: str = "") -> Iterator[None]:
    """A ValueError of this block is the user's mistake, at any time. where: before its line."""
    try:
        yield
    except ValueError as e:
        raise UserError(f"{where}{e}") from None


@contextlib.contextmanager
def one_line_errors(program: str, reading: bool = False) -> Iterator[None]:
    """Print an expected error as one line and exit with code 2; any other is a bug.

    reading: the block reads what the user gave, so it expects GIVEN. Otherwise it expects OSError,
    such as a full disk or a lost server, and `UserError`.
    """
    expected = GIVEN if reading else (OSError, UserError)
    try:
        yield
    except expected as e:
        fix = "; pip install -r requirements.txt" if isinstance(e, ImportError) else ""
        if any(os.strerror(number) in str(e) for number in (errno.ENOSPC, errno.EDQUOT)):
            fix = "; free space"
        if not reading and isinstance(e, OSError):
            fix += "; run the same command to continue"
        if isinstance(e, BrokenPipeError):
            e = BrokenPipeError("standard output is closed; redirect it, as by > log.txt")
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing is left to fail at the exit
        rank = "" if is_first_rank() else f"rank {os.environ['RANK']}: "
        line = f"{rank}{name_of(program)}: {' '.join(str(e).split())}{fix}"
        print(line, file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def end_at_signals() -> None:
    """From here on Ctrl-C and SIGTERM end the process at once, with exit code 130."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end_now)


@dataclass
class Signals:
    """Ctrl-C and SIGTERM that a process has had while it was at a step."""

    first: float = 0.0  # when the first one came, on a monotonic clock; 0: none did


@contextlib.contextmanager
def finish_at_signals(signals: Signals) -> Iterator[None]:
    """In this block the first Ctrl-C or SIGTERM is written down alone, a later one ends at once.

    Within a second a signal counts as the same one: torchrun passes on what the terminal has sent.
    After the block any of them ends the process at once.
    """

    def write_down(*_: object) -> None:
        now = time.monotonic()
        if signals.first and now - signals.first > 1:
            end_now()
        if is_first_rank() and not signals.first:  # print may be what the signal interrupts
            os.write(2, b"\nfinishing this step, then stopping; once more stops at once\n")
        signals.first = signals.first or now

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, write_down)
    try:
        yield
    finally:
        end_at_signals()


def end_now(*_: object) -> None:
    """End the process as a signal does; rank 0 says how to go on."""
    if is_first_rank():
        os.write(2, b"\nInterrupted. Run the same command to continue.\n")  # print may be busy
    os._exit(130)


def is_first_rank() -> bool:
    """Whether torchrun started this process as rank 0, or did not start it."""
    return os.environ.get("RANK", "0") == "0"


class Parser(argparse.ArgumentParser):
    """Flags that are never abbreviated, @FILE for more of them, --version, mistakes in one line.

    about: a docstring; its first line and its commands stand in --help. The lines of FILE are
    split as a shell splits them, and # begins a comment.
    """

    def __init__(self, program: str, usage: str, about: str | None, **settings: Any):
        title, *body = (about or "").split("\n")
        commands = [line for line in body if line.startswith(("    python ", "    torchrun "))]
        tags = "Tags such as S3 and D8 are rows of docs/decisions.md."
        super().__init__(
            f"python {program}",
            usage=f"python {program} {usage}",
            description=title,
            epilog="\n".join([tags, "\nexamples:", *commands]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            fromfile_prefix_chars="@",
            **{"allow_abbrev": False, **settings},
        )
        self._negative_number_matcher = NEGATIVE
        self.add_argument("--version", action="version", version=f"sgsd {VERSION}")

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        try:
            return shlex.split(arg_line, comments=True)
        except ValueError as e:  # an open quote
            self.error(f"a line of the @FILE cannot be split ({e}): {arg_line}")

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and one line, which suggests the closest flag to each unknown one."""
        hint = ""
        for wrong in re.findall(r"--[\w-]+", message.partition("unrecognized arguments: ")[2]):
            for close in difflib.get_close_matches(wrong, [*self._option_string_actions], 1, 0.75):
                hint += f"did you mean {close}? "
        line = f"{name_of(self.prog)}: {' '.join(message.split())}; {hint}--help lists the flags\n"
        if not is_first_rank():
            time.sleep(2)  # at the first exit torchrun kills the others: rank 0 has to print first
        self.exit(2, line if is_first_rank() else None)


def name_of(program: str) -> str:
    """The name in front of an error: "sgsd" of "python sgsd.py"."""
    return program.removesuffix(".py").replace(".", " ").split()[-1]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


# ------------------------------------------------------------------------------ the command line


def parse(
    argv: Sequence[str] | None,
    about: str | None,
    kind: Any,
    presets: dict[str, dict[str, Any]] | None = None,
    variants: dict[str, dict[str, Any]] | None = None,
) -> Any:
    """The settings of a command line; a mistake exits with code 2.

    about: a program's docstring, for --help. kind: a class of settings, as lib/config.py has them.
    presets: other defaults by the name that --preset takes. variants: other defaults where a
    setting is given. A flag overrides the preset, and that overrides those.
    """
    parser = parser_of(about, kind, presets or {})
    typed = vars(parser.parse_args(argv))
    preset = (presets or {}).get(typed.pop("preset", ""), {})
    start: dict[str, Any] = {}
    for name, defaults in (variants or {}).items():
        start |= defaults if typed.get(name) else {}
    try:
        settings = kind.from_dict({**start, **preset, **typed})
    except ValueError as e:
        parser.error(str(e))
    for name, reason in settings.void().items():
        if name in typed:
            parser.error(f"{flag(name)} {typed[name]}: {reason}; leave it out")
    return settings


def parser_of(about: str | None, kind: Any, presets: dict[str, dict[str, Any]]) -> Parser:
    """The parser of a class of settings, whose rules stand in groups, in the class's order."""
    usage = "[--preset NAME] [--FLAG VALUE ...] [@FILE]"
    if not presets:
        usage = "PATH [PATH ...] [--FLAG VALUE ...] [@FILE]"
    parser = Parser(kind.program, usage, about, argument_default=argparse.SUPPRESS)
    if presets:
        parser.add_argument("--preset", choices=presets, help="settings to start from")
    groups = {title: parser.add_argument_group(title) for title in kind.groups}
    default_of = {f.name: f.default for f in fields(kind)}
    for name, rule in kind.rules().items():
        if name == "paths":
            groups[rule.group].add_argument(name, nargs="+", metavar="PATH", help=rule.help)
        else:
            groups[rule.group].add_argument(flag(name), **options_of(rule, default_of[name]))
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
