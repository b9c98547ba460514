"""How a test of a whole run is written. `world_dir` (conftest.py) has a model, a bank and data.

In this process:

    completes(main, flags(world_dir, out, steps=2))   a command that ends with 0; what it printed
    refused(main, argv, "--bank")                     one that ends in one line, with 2
    with opened(world_dir, out) as run: ...           a run before its first step
    run = train(world_dir, out, step_fn, **settings)  a run through its steps

In processes of their own:

    run(argv, program)                      a command that ends with 0, or the code `ends`
    run_two(argv, program)                  the same on two ranks
    killed_at("metrics.jsonl", argv)        killed before it writes that file
    equal(out, other)                       two runs have left the same, byte for byte

`main` is the command of sgsd.py or, after its name, of another method. A random model never gets a
problem right and never writes JSON: so the reference answer alone decides the outcome
(CoinVerifier), and in `opened`, `train` and `main` a function writes the bank (fake_writer). A run
of `small_flags` makes its bank, saves after steps 2, 3, 4 and 6, and evolves after 3 and 6.
"""

import contextlib
import functools
import gc
import io
import itertools
import json
import os
import pathlib
import re
import signal
import socket
import sys
import tempfile
import threading
import traceback
from dataclasses import fields
from unittest import mock

import conftest  # noqa: F401  (one thread, and the project on the path)
import torch
from tqdm import tqdm

import distributed
import sgsd
import skills
from lib import command, config, files, verify
from lib.run import Run
from methods import ablations, grpo, opsd, rlsd, sdpo

ALONE = distributed.World(0, 1, torch.device("cpu"))
METHODS = {  # the program and its settings
    "sgsd": (sgsd, config.Config),
    "grpo": (grpo, grpo.GRPOConfig),
    "opsd": (opsd, opsd.OPSDConfig),
    "rlsd": (rlsd, rlsd.RLSDConfig),
    "sdpo": (sdpo, sdpo.SDPOConfig),
    "ablations": (ablations, ablations.AblationConfig),
}

# ------------------------------------------------------------------------- verdicts, and a writer


class Exact(verify.Judge):
    """An answer is right when it is the reference's text. Mathematics would start a process."""

    def is_right(self, problem, answer):
        return answer == problem.answer


class CoinVerifier(Exact):
    """An answer is right when the reference leaves 1 divided by 4."""

    def judge(self, cases):
        return [verify.Verdict(self.answer(text), int(x.answer) % 4 == 1) for x, text in cases]


class UnevenVerifier(Exact):
    """A solution is right when its text has an odd number of characters: a group has both."""

    def judge(self, cases):
        return [verify.Verdict(self.answer(text), len(text) % 2 == 1) for _, text in cases]


def fake_writer(run, step):
    """In the place of `sgsd.bank_writer`, without a model: see `reply_to`."""

    def complete(prompts):
        replies = [reply_to(prompt) for prompt in prompts]
        for prompt, reply in zip(prompts, replies):
            row = {"step": step, "repeat": 0, "prompt": prompt, "reply": reply}
            run.log_rows("bank/replies", [row])
        return replies

    return complete


def reply_to(prompt):
    """One item from each memory, named after its problem; a merge drops the last item."""
    key = "general_skills" if "key general_skills" in prompt else "common_mistakes"
    if "to merge:" in prompt:
        items = json.loads(prompt.partition("to merge:\n")[2].partition("\n\nReturn ONLY")[0])
        return json.dumps({key: items[: max(1, len(items) - 1)]})
    name = prompt[prompt.index("What is") :][:20].strip()
    return json.dumps({key: [{field: f"{field} of {name}" for field in skills.KINDS[key].fields}]})


# ----------------------------------------------------------------------------------- command lines


def settings(world_dir, out, **changes):
    base = {name: str(world_dir / name) for name in ("model", "encoder")}
    base |= {"data": str(world_dir / "data.jsonl"), "bank": str(world_dir / "bank.json")}
    base |= {"verifier": "driver:CoinVerifier"}
    base |= {"out": str(out), "device": "cpu", "steps": 4, "batch_size": 4, "num_teachers": 3}
    base |= {"max_new_tokens": 20, "checkpoint_every": 2, "audit_every": 2, "lora_rank": 4}
    base |= {"lora_alpha": 8, "learning_rate": 1e-2, "eps_a": 0.2, "cold_start_tokens": 20}
    return base | changes


def flags(world_dir, out, **changes):
    """The same settings as a command line."""
    words = []
    for name, value in settings(world_dir, out, **changes).items():
        words.append(config.flag(name) if value is True else f"{config.flag(name)}={value}")
    return words


SMALL = {"bank": "", "cold_start": 8, "evolve_every": 3, "max_new_items": 2, "steps": 6}
SMALL |= {"max_new_tokens": 5, "batch_size": 2, "num_teachers": 2, "rollout_rows": 4}
SMALL |= {"cold_start_tokens": 5, "lora_rank": 32}  # checkpoints are much larger than logs


def small_flags(world_dir, out, **changes):
    return flags(world_dir, out, **{**SMALL, **changes})


def parsed(argv, method="sgsd"):
    """The settings of a command line of sgsd.py, of another method, or of eval.py ("eval")."""
    if method == "eval":
        return command.parse(argv, "", config.EvalConfig)
    _, kind = METHODS[method]
    return command.parse(argv, "", kind, config.presets_of(kind))


# --------------------------------------------------------------------------- runs in this process


@contextlib.contextmanager
def signals_restored():
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def faked():
    """In this block the bank's writer is `fake_writer`."""
    return mock.patch.object(sgsd, "bank_writer", fake_writer)


@contextlib.contextmanager
def opened(world_dir, out, kind=config.Config, **changes):
    """A run that is open and has not begun its bank."""
    cfg = kind(**settings(world_dir, out, **changes))
    with signals_restored(), faked(), Run.open(cfg, skills.load_bank, sgsd.student_prompt) as run:
        yield run


def train(world_dir, out, step_fn=sgsd.train_step, kind=config.Config, **changes):
    """A run through its steps, begun or continued; its exit code is kept in `code`."""
    with opened(world_dir, out, kind, **changes) as run:
        run.code = sgsd.train(run, step_fn)
    return run


def main(argv, step_fn=None):
    """The command of sgsd.py or, after its name, of another method; its exit code.

    Of the flags those are left out that have no effect in the method.
    """
    method, *rest = argv if argv[0] in METHODS else ["sgsd", *argv]
    program, kind = METHODS[method]
    without = {config.flag(f.name) for f in fields(kind) if f.name not in kind.rules()}
    rest = [arg for arg in rest if arg.partition("=")[0] not in without]
    with signals_restored(), faked():
        return sgsd.main(rest, step_fn=step_fn) if step_fn else program.main(rest)


def with_steps(step_fn):
    """`main`, with another function of a step."""
    return functools.partial(main, step_fn=step_fn)


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
    """The program ends with 2 and one line on stderr that has these words in it; the line.

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
    """The id of a process that calls a program; what it prints goes to a file.

    It is forked from the tests', so that it costs no imports.
    """
    pid = os.fork()
    if pid:
        return pid
    gc.freeze()  # a collection would pass over all that the tests hold
    code = 1
    try:
        sys.stdout = sys.stderr = open(log, "a", buffering=1)
        os.dup2(sys.stderr.fileno(), 2)  # handlers of signals write there
        tqdm.set_lock(threading.RLock())  # its own is shared with forked processes that are killed
        code = program([str(arg) for arg in argv])
    except SystemExit as e:
        code = e.code
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # never back into the tests


def wait(pid):
    """The exit code of a process, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def ended(argv, program=main):
    """A command in a process of its own: its exit code, and what it printed."""
    with tempfile.NamedTemporaryFile("r") as log:
        code = wait(start(argv, log.name, program))
        return code, log.read()


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

    def of_rank(rank):
        def ranked(argv):
            os.environ.update(WORLD_SIZE="2", RANK=rank, LOCAL_RANK=rank)
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            return program(argv)

        return ranked

    with tempfile.TemporaryDirectory() as folder:
        logs = [pathlib.Path(folder, rank) for rank in "01"]
        pids = [start(argv, log, of_rank(log.name)) for log in logs]
        codes = [wait(pid) for pid in pids]
        texts = [log.read_text() for log in logs]
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
