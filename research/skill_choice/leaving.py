"""SGSD in which entries leave the bank while it learns; the flags are those of methods.ablations.

    python research/skill_choice/leaving.py --bank BANK --evolve-every 0 --steps 60 ...

After every five steps the entries whose contrast has a 95% interval below 0 leave both lists. The
contrast is counted over all rollouts of the run so far. The run is made in one go: a continued one
would begin to count anew.
"""

import pathlib
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(pathlib.Path(__file__).parent)]

import choose

import distributed
import sgsd
import skills
from extras.report import contrast
from lib.run import Run
from methods import ablations

EVERY = 5
rollouts: list[dict[str, Any]] = []  # of all steps so far


def lies_below_0(uses: list[choose.Use]) -> bool:
    """Whether an entry makes right solutions less likely, beside wrong ones, than the others do."""
    success = [use.centred for use in uses if use.r > 0]
    failure = [use.centred for use in uses if use.r <= 0]
    interval = contrast(success, failure)
    return interval is not None and interval[2] < 0


def without_harmful(bank: skills.SkillBank) -> skills.SkillBank:
    """The bank without the entries whose interval lies below 0."""
    lists = []
    for kind, key in enumerate(choose.KINDS):
        uses = choose.uses_of(rollouts, kind)
        id_field = skills.KINDS[key].id_field
        harmful = {id_ for id_, uses_of_entry in uses.items() if lies_below_0(uses_of_entry)}
        lists.append([x for x in bank.collection(key) if x[id_field] not in harmful])
    return skills.SkillBank(*lists, bank.metadata, bank.extra)


def train_step(run: Run, step: int) -> tuple[list[dict], float]:
    """A step of methods.ablations; after every fifth one entries leave."""
    rows, norm = ablations.train_step(run, step)
    rollouts.extend(rows)
    if step % EVERY == 0:
        run.bank = without_harmful(run.bank)
    return rows, norm


def main() -> int:
    return sgsd.main(None, __doc__, ablations.AblationConfig, train_step)


if __name__ == "__main__":
    distributed.run_and_exit(main)
