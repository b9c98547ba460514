"""A command: its flags, what it answers before slow imports, and errors that are one line.

A mistake of the user is a UserError: one line on stderr and exit code 2, never a traceback.
"""

import argparse
import contextlib
import difflib
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

LAUNCHERS = ("__main__.py", "ipykernel_launcher.py")  # python -m, and a notebook
VERSION = "0.1.0"  # of the project: --version shows it, config.json keeps it


class UserError(ValueError):
    """A user's mistake, such as a wrong flag or file: one clear line and exit code 2."""


class SharedError(UserError):
    """A mistake that every rank has seen, so that rank 0 alone says it."""


class Parser(argparse.ArgumentParser):
    """Flags whose mistakes are UserErrors, and --version."""

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.add_argument("--version", action="version", version=f"sgsd {VERSION}")

    def error(self, message: str) -> NoReturn:
        """End with a UserError, and suggest the closest flag to each unknown one."""
        hint, flags = "", list(self._option_string_actions)
        for flag in re.findall(r"--[\w-]+", message.partition("unrecognized arguments: ")[2]):
            for close in difflib.get_close_matches(flag, flags, 1, 0.75):
                hint += f"for {flag} there is {close}; "
        raise UserError(f"{message}; {hint}--help lists the flags")


def program(default: str) -> str:
    """The script that was started, for a line that says how to go on; else `default`.

    A script of the user's own, which changes a part of the method and then calls `main`, has to be
    the one that goes on: the program itself would continue without the change.
    """
    started = sys.argv[0]
    path = pathlib.Path(started)
    is_script = path.suffix == ".py" and path.name not in LAUNCHERS and path.exists()
    return started if is_script else default


def brief(error: BaseException) -> str:
    """An exception as one short line, for the cause in a UserError."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def command(name: str, body: Callable[[], object]) -> int:
    """Run a program's body and return its exit code; what ends it early is one line on stderr."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    code, told = 2, True
    try:
        result = body()
        return result if isinstance(result, int) else 0
    except ImportError as e:
        message = f"{e}; pip install -r requirements.txt"
    except ConnectionError as e:
        code, message = 1, f"{e}; {_advice(e)}"
    except OSError as e:  # a full disk, or a directory that cannot be written
        message = f"{e}; mend this; {_advice(e)}"
    except UserError as e:
        message = str(e)
        told = not isinstance(e, SharedError) or os.environ.get("RANK", "0") == "0"
    except KeyboardInterrupt as e:
        code, message = 130, f"interrupted; {_advice(e)}"
    if told:
        print(f"{name}: {' '.join(message.split())}", file=sys.stderr)
    return code


def _advice(error: BaseException) -> str:
    """How to go on: what `continued_by` has noted, or the usual."""
    return "; ".join(getattr(error, "__notes__", ["give the same command again"]))


@contextlib.contextmanager
def continued_by(advice: Callable[[], str]) -> Iterator[None]:
    """Note what goes on from here on an error or a signal that ends the block, for its one line."""
    try:
        yield
    except (OSError, KeyboardInterrupt) as e:
        e.add_note(advice())
        raise


def answer(name: str, look: Callable[[], object]) -> None:
    """Let --help and the mistakes that files show end a program, before its slow imports."""
    code = command(name, look)
    if code:
        sys.exit(code)
