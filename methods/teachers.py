"""Teachers whose weights are a copy of the policy's that follows the policy (§4.5, S18).

A teacher without a copy is the policy as it is now, or its base: `run.lm.disable_adapter()`.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from lib import model
from lib.run import Run
from methods.groups import Step


def begin(run: Run) -> None:
    """Copy the adapters, unless there is a copy (S18). Call it before a step, on every rank.

    The copy is in `run.extra_tensors`, and so in the checkpoints.
    """
    for name, p in model.trained(run.lm).items():
        if f"{name}.teacher" not in run.extra_tensors:
            run.extra_tensors[f"{name}.teacher"] = p.detach().clone()


@contextlib.contextmanager
def copied(run: Run) -> Iterator[None]:
    """A block in which the model has the copy of its adapters that `begin` has made."""
    params = model.trained(run.lm)
    students = {name: p.data for name, p in params.items()}
    for name, p in params.items():
        p.data = run.extra_tensors[f"{name}.teacher"]
    try:
        yield
    finally:
        for name, p in params.items():
            p.data = students[name]


def followed(step_fn: Step, share: Callable[[Any, int], float | None]) -> Step:
    """`step_fn`, after which the copy moves towards the student by share(cfg, step).

    0 leaves the copy as it is, 1 copies exactly; None: the run has no copy. An EMA of decay d moves
    by 1 - d in each step. It averages the factors A and B of the adapters, not their products.
    """

    def train_step(run: Run, step: int) -> tuple[list[dict], float]:
        moved = share(run.cfg, step)
        if moved is None:
            return step_fn(run, step)
        begin(run)
        result = step_fn(run, step)
        for name, p in model.trained(run.lm).items():
            run.extra_tensors[f"{name}.teacher"].lerp_(p.detach(), moved)
        return result

    return train_step
