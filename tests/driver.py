"""Runs for the tests: a random model, with a verifier and a writer that do not need a good one.

A random model never gets a problem right and never writes JSON, so the reference answer alone
decides the outcome, and the writer is a function.

    python driver.py ...flags...      torchrun --nproc_per_node 2 driver.py ...flags...

STEP_FN=MODULE:FUNCTION in the environment is the step of such a command.
"""

import contextlib
import functools
import gc
import itertools
import json
import math
import os
import pkgutil
import re
import signal
import socket
import sys
import threading
import traceback

import conftest  # noqa: F401  (one thread, and the project on the path)
import peft
import pytest
import torch
from tqdm import tqdm
from transformers import DynamicCache

import distributed
import eval
import sgsd
import skills
from lib import command, config, files, model, verify
from lib.run import Run
from methods import ablations, grpo, opsd, rlsd, sdpo

ALONE = distributed.World(0, 1, torch.device("cpu"))


class Exact(verify.Judge):
    """An answer is right when it is the reference's text. Mathematics would start a process."""

    def is_right(self, problem, answer):
        return answer == problem.answer


class CoinVerifier(Exact):
    """An answer is right when the reference leaves 1 divided by 4."""

    def judge(self, cases):
        verdicts = []
        for problem, text in cases:
            verdicts.append(verify.Verdict(self.answer(text), int(problem.answer) % 4 == 1))
        return verdicts


class UnevenVerifier(Exact):
    """A solution is right when its text has an odd number of characters: a group has both."""

    def judge(self, cases):
        return [verify.Verdict(self.answer(text), len(text) % 2 == 1) for _, text in cases]


class LateVerifier(Exact):
    """Each verdict takes too long."""

    def judge(self, cases):
        self.timeouts += len(cases)
        return super().judge(cases)


def fake_writer(run, step):
    """In the place of `sgsd.bank_writer`, without a model: one item from each memory, named after
    its problem; a merge drops the last item."""

    def complete(prompts):
        replies = [reply_to(prompt) for prompt in prompts]
        for prompt, reply in zip(prompts, replies):
            row = {"step": step, "repeat": 0, "prompt": prompt, "reply": reply}
            run.log_rows("bank/replies", [row])
        return replies

    return complete


def reply_to(prompt):
    key = "general_skills" if "key general_skills" in prompt else "common_mistakes"
    if "to merge:" in prompt:
        listed = prompt.partition("to merge:\n")[2].partition("\n\nReturn ONLY")[0]
        items = json.loads(listed)
        return json.dumps({key: items[: max(1, len(items) - 1)]})
    name = prompt[prompt.index("What is") :][:20].strip()
    return json.dumps({key: [{field: f"{field} of {name}" for field in skills.KINDS[key].fields}]})


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
    given = settings(world_dir, out, **changes)
    words = []
    for name, value in given.items():
        words.append(config.flag(name) if value is True else f"{config.flag(name)}={value}")
    return words


SMALL = {"bank": "", "cold_start": 8, "evolve_every": 3, "max_new_items": 2, "steps": 6}
SMALL |= {"max_new_tokens": 5, "batch_size": 2, "num_teachers": 2, "rollout_rows": 4}
SMALL |= {"cold_start_tokens": 5, "lora_rank": 32}  # checkpoints are much larger than logs


def small_flags(world_dir, out, **changes):
    """A run that makes its own bank. It saves after steps 2, 3, 4 and 6, and evolves at 3 and 6."""
    return flags(world_dir, out, **{**SMALL, **changes})


@contextlib.contextmanager
def opened(world_dir, out, kind=config.Config, **changes):
    """A run that is open and has not begun its bank; the handlers of signals stay as they were."""
    cfg = kind(**settings(world_dir, out, **changes))
    load = skills.load_bank
    with signals_restored(), faked(), Run.open(cfg, load, sgsd.shown) as run:
        yield run


def train(world_dir, out, step_fn=sgsd.train_step, kind=config.Config, **changes):
    """A run through its steps, begun or continued; its exit code is kept in `code`."""
    with opened(world_dir, out, kind, **changes) as run:
        run.code = sgsd.train(run, step_fn)
    return run


@contextlib.contextmanager
def faked():
    """The bank's writer is `fake_writer`."""
    writer = sgsd.bank_writer
    sgsd.bank_writer = fake_writer
    try:
        yield
    finally:
        sgsd.bank_writer = writer


@contextlib.contextmanager
def signals_restored():
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def killing(owner, name, call, after=False, number=signal.SIGKILL):
    """For `before`: a signal comes at the call-th call of owner.name, or as that one returns."""
    original, calls = getattr(owner, name), itertools.count(1)

    def counted(*args, **kwargs):
        is_time = next(calls) == call
        if is_time and not after:
            os.kill(os.getpid(), number)
        result = original(*args, **kwargs)
        if is_time:
            os.kill(os.getpid(), number)
        return result

    return functools.partial(setattr, owner, name, counted)


@contextlib.contextmanager
def watched(lm):
    """The passes of `generate` in a block: the shape of the ids, and the first keys before it."""
    passes = []

    def note(_, args, given):
        (cache,) = [x for x in given.values() if isinstance(x, DynamicCache)]
        keys = [layer.keys for layer in cache.layers if hasattr(layer, "keys")]
        passes.append((tuple(given["input_ids"].shape), keys[0]))

    hook = lm.register_forward_pre_hook(note, with_kwargs=True)
    yield passes
    hook.remove()


def breaking(steps, rank=0):
    """A step function in which the gradient is not finite, on one rank, in these steps."""

    def step_fn(run, step):
        bad = math.nan if step in steps and run.world.rank == rank else 1.0
        p = next(iter(model.trained(run.lm).values()))
        hook = p.register_hook(lambda gradient: gradient * bad)
        result = sgsd.train_step(run, step)
        hook.remove()
        return result

    return step_fn


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


def steps_of(out):
    """The steps in the log, and those of the checkpoints."""
    logged = [m["step"] for m in rows(out / "metrics.jsonl")]
    return logged, list(files.by_step(out / "checkpoints"))


def completes(program, argv):
    """The program ends with 0."""
    with signals_restored():
        assert program([str(arg) for arg in argv]) == 0


def refused(capsys, program, argv, *words):
    """The program ends with 2 and one line on stderr that has these words in it; the line.

    A progress bar may stand before it.
    """
    capsys.readouterr()
    with pytest.raises(SystemExit) as end, signals_restored():
        program([str(arg) for arg in argv])
    printed = re.split(r"[\r\n]", capsys.readouterr().err)
    line = "\n".join(part for part in printed if part.strip() and "it/s]" not in part)
    assert end.value.code == 2, line
    assert "\n" not in line and "Traceback" not in line, line
    for word in words:
        assert word in line, line
    return line


def start(argv, log, step_fn=None, before=None, program=None):
    """The id of a process that calls before and main, or another program on these arguments.

    What it prints goes to `log`. It is forked from the tests', so that it costs no imports.
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
        if before:
            before()
        argv = [str(arg) for arg in argv]
        code = program(argv) if program else main(argv, step_fn)
    except SystemExit as e:
        code = e.code
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # never back into the tests


def wait(pid):
    """The exit code of a process, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def go(argv, log, step_fn=None, before=None):
    """The exit code of a run in a process of its own; see `start`."""
    return wait(start(argv, log, step_fn, before))


def two(argv, path, step_fn=None, argv1=None, program=None, before=None):
    """The exit codes of two ranks of `start`; what they print goes to path/log0 and path/log1.

    argv1: another command line for rank 1.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    pids = []
    for rank, given in enumerate((argv, argv1 or argv)):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        join = functools.partial(_join, place, before)
        pids.append(start(given, path / f"log{rank}", step_fn, join, program))
    return [wait(pid) for pid in pids]


def _join(place, before):
    os.environ.update(place)
    if before:
        before()


def evaluation(world_dir, out, more=""):
    """The command line of an evaluation of the tests' model."""
    flags = f"--data {world_dir}/data.jsonl --samples 3 --max-new-tokens 8 --rows 5 --device cpu"
    flags += " --verifier driver:Exact"
    return f"{world_dir}/model {flags} --out {out} {more}".split()


def evaluate(world_dir, out, more=""):
    """The samples in order of an evaluation that succeeds."""
    assert eval.main(evaluation(world_dir, out, more)) == 0
    return samples(out)


def samples(out):
    """The samples in order of the one policy in a folder given as --out."""
    (log,) = out.glob("*/samples.jsonl")
    rows = [json.loads(line) for line in open(log)]
    return sorted(rows, key=lambda row: (row["set"], row["id"], row["sample"]))


def make_adapter(path, base, seed=0, rank=4):
    """An adapter with weights of its own, saved as PEFT saves it."""
    lm, _ = model.load_model(str(base), torch.device("cpu"))
    torch.manual_seed(seed)
    lora = peft.LoraConfig(r=rank, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(lm, lora).save_pretrained(path)


METHODS = {  # settings, step, other defaults, prompts that are known before sampling
    "sgsd": (config.Config, sgsd.train_step, {}, sgsd.shown),
    "grpo": (grpo.GRPOConfig, grpo.train_step, grpo.VARIANTS, grpo.shown),
    "opsd": (opsd.OPSDConfig, opsd.train_step, opsd.VARIANTS, opsd.shown),
    "rlsd": (rlsd.RLSDConfig, rlsd.train_step, rlsd.VARIANTS, rlsd.shown),
    "sdpo": (sdpo.SDPOConfig, sdpo.train_step, {}, sgsd.shown),
    "ablations": (ablations.AblationConfig, ablations.train_step, {}, ablations.shown),
}


def parsed(argv, method="sgsd"):
    """The settings of a command line of sgsd.py, of another method, or of eval.py ("eval")."""
    if method == "eval":
        return command.parse(argv, "", config.EvalConfig)
    kind, _, variants, _ = METHODS[method]
    return command.parse(argv, "", kind, config.presets_of(kind), variants)


def main(argv=None, step_fn=None):
    """A command like sgsd.py's or, after the name of a method, that one's; its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    method = argv.pop(0) if argv and argv[0] in METHODS else "sgsd"
    kind, own_step, variants, shown = METHODS[method]
    not_offered = {config.flag(name) for name in kind.not_offered}  # which argparse would refuse
    argv = [arg for arg in argv if str(arg).partition("=")[0] not in not_offered]
    with signals_restored(), faked():
        return sgsd.main(argv, "", kind, step_fn or own_step, variants, shown)


if __name__ == "__main__":
    named = os.environ.get("STEP_FN")  # as MODULE:FUNCTION
    distributed.run_and_exit(lambda: main(None, pkgutil.resolve_name(named) if named else None))
