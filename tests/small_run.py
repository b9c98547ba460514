"""The run of the tests: its command line, the programs, verdicts, and a writer of its bank.

    flags(world_dir, out, steps=2)                    a command line with a given bank
    small_flags(world_dir, out)                       one that makes its bank, saves after steps 2,
                                                      3, 4 and 6, and evolves after 3 and 6
    main(argv)                                        the command of sgsd.py or, after its name, of
                                                      another method
    with opened(world_dir, out) as run: ...           a run before its first step
    run = train(world_dir, out, step_fn, **settings)  a run through its steps

`world_dir` (conftest.py) has a model, a bank and data. A random model never gets a problem right
and never writes JSON: so the reference answer alone decides the outcome (CoinVerifier), and a
function writes the bank (fake_writer).
"""

import contextlib
import functools
import json
import signal
from dataclasses import fields
from unittest import mock

import conftest  # noqa: F401  (one thread, and the project on the path)
import torch

import distributed
import sgsd
import skills
from lib import command, config, verify
from lib.run import Run
from methods import ablations, grpo, opsd, rlsd, sdpo

# ------------------------------------------------------------------------------- the command line


def settings(world_dir, out, **changes):
    base = {name: str(world_dir / name) for name in ("model", "encoder")}
    base |= {"data": str(world_dir / "data.jsonl"), "bank": str(world_dir / "bank.json")}
    base |= {"verifier": "small_run:CoinVerifier"}
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


ALONE = distributed.World(0, 1, torch.device("cpu"))
METHODS = {  # the program and its settings
    "sgsd": (sgsd, config.Config),
    "grpo": (grpo, grpo.GRPOConfig),
    "opsd": (opsd, opsd.OPSDConfig),
    "rlsd": (rlsd, rlsd.RLSDConfig),
    "sdpo": (sdpo, sdpo.SDPOConfig),
    "ablations": (ablations, ablations.AblationConfig),
}


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
    with (
        signals_restored(),
        faked(),
        Run.open(cfg, skills.SkillBank.load, sgsd.student_prompt) as run,
    ):
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
