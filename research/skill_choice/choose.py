"""Which entries of a bank help? A number for each, from the rollouts of a run; and a smaller bank.

    python research/skill_choice/choose.py RUN --by contrast --keep 8 --out BANK.json
    python research/skill_choice/choose.py RUN --by sguid --keep 8 --out BANK.json

RUN has made some steps with one bank that did not evolve, best a probe: random retrieval, and a
rate at which nothing is learnt. Both lists of the bank are chosen from by the same rule, the number
of a pair counts for its skill and for its mistake, and the entries keep the bank's order.

contrast: of a rollout with K teachers let c_k be a teacher's support less the mean support of all
K: the others, on the same solution, are the control for its style and its difficulty. An entry's
contrast is the mean of c over successes less the mean over failures, in nats a token.

sguid: the rule of SGUID (arXiv 2610.12367), re-told. A hit is rho = +1. In an early and a late half
of the steps let A be an entry's hits and Q their share of its retrievals. It stays if A_early > 0,
A_late >= 10 and Q_late >= Q_early / 5; the first by A_late, ties by Q_late, are kept. The paper
scores skills alone, and does not say what happens where fewer are left: then fewer are kept.
"""

import argparse
import json
import pathlib
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import skills
from extras.report import contrast
from lib import files

KINDS = ("general_skills", "common_mistakes")
Scores = dict[str, float]  # by an entry's id; the higher the better


@dataclass(frozen=True)
class Use:
    """One teacher of one rollout, as one of its two entries sees it."""

    step: int
    r: int
    rho: int
    support: float  # ã, nats a token
    centred: float  # c, the same less the mean of the rollout's teachers


def uses_of(rows: Sequence[dict], kind: int) -> dict[str, list[Use]]:
    """Each entry's uses. kind: 0 for skills, 1 for mistakes. Rows with one teacher have no c."""
    uses = defaultdict(list)
    for row in rows:
        if len(row["a"]) < 2:
            continue
        mean = sum(row["a"]) / len(row["a"])
        for pair, a, rho in zip(row["pairs"], row["a"], row["rho"]):
            uses[pair[kind]].append(Use(row["step"], row["r"], rho, a, a - mean))
    return dict(uses)


def by_contrast(uses: dict[str, list[Use]], name: str = "centred") -> Scores:
    """Entries by their contrast, but those that have none. name: "support" for no control."""
    scores = {}
    for id_, uses_of_entry in uses.items():
        success = [getattr(use, name) for use in uses_of_entry if use.r > 0]
        failure = [getattr(use, name) for use in uses_of_entry if use.r <= 0]
        if found := contrast(success, failure):
            scores[id_] = found[0]
    return scores


def by_sguid(uses: dict[str, list[Use]], steps: int) -> Scores:
    """The entries that SGUID keeps, by A_late, and Q_late as a fraction. steps: of the run."""
    scores = {}
    for id_, uses_of_entry in uses.items():
        halves: list[list[int]] = [[], []]
        for use in uses_of_entry:
            halves[2 * use.step > steps].append(use.rho)
        hits = [rho.count(1) for rho in halves]
        early, late = (n / max(1, len(rho)) for n, rho in zip(hits, halves))
        if hits[0] > 0 and hits[1] >= 10 and late >= early / 5:
            scores[id_] = hits[1] + late / 2  # Q is at most 1: it decides ties alone
    return scores


def by_mean(uses: dict[str, list[Use]], name: str) -> Scores:
    """Entries by their mean support, or by how often rho = +1 (name "hit")."""
    scores = {}
    for id_, uses_of_entry in uses.items():
        values = [use.rho == 1 if name == "hit" else use.support for use in uses_of_entry]
        scores[id_] = sum(values) / len(values)
    return scores


def first(scores: Scores, count: int) -> list[str]:
    """The ids with the highest scores, best first."""
    return sorted(scores, key=lambda id_: -scores[id_])[:count]


def read(run: pathlib.Path, steps: int = 0) -> list[dict]:
    """The run's rollouts, of its first steps alone if that is given."""
    rows: list[dict[str, Any]] = [*files.read_jsonl(run / "rollouts.jsonl")]
    return [row for row in rows if not steps or row["step"] <= steps]


def scores_of(rows: Sequence[dict], kind: int, rule: str) -> Scores:
    uses, steps = uses_of(rows, kind), max(row["step"] for row in rows)
    if rule == "sguid":
        return by_sguid(uses, steps)
    if rule == "contrast":
        return by_contrast(uses)
    if rule == "contrast without control":
        return by_contrast(uses, "support")
    return by_mean(uses, {"rho = +1": "hit", "mean support": "support"}[rule])


def choose(bank: skills.SkillBank, rows: Sequence[dict], rule: str, keep: int) -> skills.SkillBank:
    """The bank with the first `keep` entries of each list, in the bank's order."""
    lists = []
    for kind, key in enumerate(KINDS):
        chosen = first(scores_of(rows, kind, rule), keep)
        lists.append([x for x in bank.collection(key) if x[skills.KINDS[key].id_field] in chosen])
    return skills.SkillBank(*lists, {"chosen_by": rule})


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("run", type=pathlib.Path)
    add("--by", required=True, choices=("contrast", "sguid"))
    add("--keep", type=int, required=True, metavar="N", help="entries of each list")
    add("--steps", type=int, default=0, metavar="N", help="read the first N steps alone")
    add("--out", type=pathlib.Path, required=True, metavar="BANK")
    args = parser.parse_args(argv)
    rows = read(args.run, args.steps)
    bank = skills.SkillBank.load(args.run / "bank/step_000000.json")
    chosen = choose(bank, rows, args.by, args.keep)
    for key in KINDS:
        kept = [entry[skills.KINDS[key].id_field] for entry in chosen.collection(key)]
        fewer = "" if len(kept) == args.keep else f" (the rule keeps no more than {len(kept)})"
        print(f"{key}: {json.dumps(kept)}{fewer}")
    chosen.save(args.out)


if __name__ == "__main__":
    main()
