"""Whose weights a teacher has: the policy's as they are now, the base's, a copy's (§4.5, S18)."""

import contextlib
from collections.abc import Iterator

from lib import model
from lib.run import Run


@contextlib.contextmanager
def frozen(run: Run) -> Iterator[None]:
    """The model without its adapters: the base."""
    with run.lm.disable_adapter():
        yield


def begin(run: Run) -> None:
    """Before a step: make a copy of the adapters, unless there is one, on every rank (S18).

    It is in `run.extra_tensors`, and so in the checkpoints.
    """
    for name, p in model.trained(run.lm).items():
        if f"{name}.teacher" not in run.extra_tensors:
            run.extra_tensors[f"{name}.teacher"] = p.detach().clone()


@contextlib.contextmanager
def copied(run: Run) -> Iterator[None]:
    """The model under the copy of its adapters, which `begin` has made."""
    params = model.trained(run.lm)
    students = {name: p.data for name, p in params.items()}
    for name, p in params.items():
        p.data = run.extra_tensors[f"{name}.teacher"]
    try:
        yield
    finally:
        for name, p in params.items():
            p.data = students[name]


def follow(run: Run, share: float) -> None:
    """Move the copy towards the student by a share: 0 leaves it, 1 copies exactly.

    An EMA of decay d moves by 1 - d in each step. It averages the factors A and B of the adapters,
    and not their products.
    """
    for name, p in model.trained(run.lm).items():
        copy = run.extra_tensors.get(f"{name}.teacher")
        if copy is not None:
            copy.lerp_(p.detach(), share)
