"""What happens to the command of a test, and what it leaves. small_run.py has the commands.

    completes(main, argv)                   it ends with 0; what it printed
    refused(main, argv, "--bank")           it ends in one line, with 2

In processes of their own:

    run(argv, program)                      it ends with 0, or the code `ends`
    run_two(argv, program)                  the same on two ranks
    killed_at("metrics.jsonl", argv)        it is killed before it writes that file
    equal(out, other)                       two runs have left the same, byte for byte
"""

import contextlib
import functools
import gc
import io
import itertools
import json
import multiprocessing
import os
import pathlib
import re
import signal
import socket
import sys
import tempfile
import threading

from small_run import main, signals_restored
from tqdm import tqdm

from lib import files

# --------------------------------------------------------------------- commands in this process


def called(program, argv):
    """A program in this process: its exit code, and what it printed on stdout and on stderr."""
    out, err = io.StringIO(), io.StringIO()
    with signals_restored(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = program([str(arg) for arg in argv])
        except SystemExit as end:
            code = end.code
    print(out.getvalue(), err.getvalue(), sep="\n")  # pytest shows it where a test fails
    return code, out.getvalue(), err.getvalue()


def completes(program, argv):
    """The program ends with 0; what it printed."""
    code, out, err = called(program, argv)
    assert code == 0, out + err
    return out


def refused(program, argv, *words):
    """The program ends with 2 and one line on stderr that has these words; the line.

    A progress bar may stand before it.
    """
    code, _, err = called(program, argv)
    lines = [x for x in re.split(r"[\r\n]", err) if x.strip() and "it/s]" not in x]
    assert code == 2 and len(lines) == 1 and "Traceback" not in err, err
    for word in words:
        assert str(word) in lines[0], lines[0]
    return lines[0]


# ---------------------------------------------------------------------- in processes of their own


def start(argv, log, program=main):
    """A process that calls a program; what it prints goes to a file.

    It is forked from the tests', so that it costs no imports.
    """

    def call():
        gc.freeze()  # a collection would pass over all that the tests hold
        sys.stdout = sys.stderr = open(log, "a", buffering=1)
        os.dup2(sys.stderr.fileno(), 2)  # handlers of signals write there
        tqdm.set_lock(threading.RLock())  # its own is shared with forked processes that are killed
        sys.exit(program([str(arg) for arg in argv]))

    process = multiprocessing.get_context("fork").Process(target=call)
    process.start()
    return process


def ended(argv, program=main):
    """A command in a process: its exit code, negative for a signal, and what it printed."""
    with tempfile.NamedTemporaryFile("r") as log:
        process = start(argv, log.name, program)
        process.join()
        return process.exitcode, log.read()


def run(argv, program=main, ends=0):
    """A command in a process of its own, which must end with this code; what it printed."""
    code, text = ended(argv, program)
    assert code == ends, text[-3000:]
    return text


def run_two(argv, program=main, ends=(0, 0)):
    """A command on two ranks, which must end with these codes; what each printed."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]

    def of_rank(rank, argv):
        os.environ.update(WORLD_SIZE="2", RANK=rank, LOCAL_RANK=rank)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        return program(argv)

    with tempfile.TemporaryDirectory() as folder:
        logs = [pathlib.Path(folder, rank) for rank in "01"]
        ranks = [start(argv, log, functools.partial(of_rank, log.name)) for log in logs]
        for process in ranks:
            process.join()
        texts = [log.read_text() for log in logs]
    codes = [process.exitcode for process in ranks]
    assert codes == [*ends], "\n---\n".join(text[-3000:] for text in texts)
    return texts


def stopped_at(file, nth=1, by=signal.SIGKILL, program=main):
    """The program, with a signal before the nth touch of a file whose path has `file` in it.

    A touch opens a file for writing, cuts, moves or removes it.
    """
    touches = itertools.count(1)

    def watch(event, args):
        is_touch = event in ("os.truncate", "os.rename", "os.remove")
        is_touch |= event == "open" and bool({*"wa+x"} & {*str(args[1])})
        if is_touch and str(file) in str(args[0]) and next(touches) == nth:
            os.kill(os.getpid(), by)

    def stopping(argv):
        sys.addaudithook(watch)
        return program(argv)

    return stopping


def killed_at(file, argv, nth=1, program=main):
    """A command is killed before the nth touch of a file whose path has `file` in it."""
    run(argv, stopped_at(file, nth, program=program), ends=-signal.SIGKILL)


# ------------------------------------------------------------------------------ what a run has left


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path, lines):
    """What `rows` reads."""
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))


def timeless(metrics):
    """Lines of metrics.jsonl without the numbers that differ from run to run."""
    lines = []
    for row in metrics:
        lines.append({k: v for k, v in row.items() if not k.startswith(("seconds.", "memory_gb"))})
    return lines


def contents(folder):
    """All files below a folder with their bytes, but the lock, which may stay."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != files.LOCK]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def state(out):
    """What must be equal of two equal runs: the last checkpoint, all of the bank, the logs."""
    last = max(files.by_step(out / "checkpoints").values())
    paths = [*last.glob("*.safetensors"), *last.glob("bank.json"), *out.glob("bank/*.json*")]
    paths += [out / "problems.json", out / "rollouts.jsonl", out / "tokens.jsonl"]
    by_name = {str(path.relative_to(out)): path.read_bytes() for path in paths}
    return by_name | {"metrics": timeless(rows(out / "metrics.jsonl"))}


def equal(out, other, *parts):
    """Two runs are equal byte for byte, up to times and memory in the metrics.

    parts: where they are given, only the files that have one of them in their names.
    """
    ours, theirs = state(out), state(other)
    assert parts or ours.keys() == theirs.keys()
    for name in theirs:
        if not parts or any(part in name for part in parts):
            assert ours[name] == theirs[name], name
    assert not list(out.rglob("*.tmp"))
