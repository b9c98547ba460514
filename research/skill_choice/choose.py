"""A smaller bank: of each list the entries with the highest contrast in a run.

    python research/skill_choice/choose.py RUN --keep 8 --out BANK.json

RUN has made some steps with one bank that did not evolve, best a probe: random retrieval, and a
rate at which nothing is learnt. The contrast of a pair counts for its skill and for its mistake,
and the entries keep the bank's order.

Of a rollout with K teachers let c_k be a teacher's support less the mean support of all K: the
others, on the same solution, are the control for its style and its difficulty. An entry's contrast
is the mean of c over successes less the mean over failures, in nats a token.
"""

import argparse
import json
import pathlib
import sys
from collections import defaultdict
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import skills
from extras.report import contrast
from lib import files


def contrasts(rows: Sequence[dict], kind: int) -> dict[str, float]:
    """By an entry's id; without the entries that have none, and the rollouts of one teacher.

    kind: 0 for skills, 1 for mistakes, as in a row's pairs.
    """
    uses: dict[int, dict[str, list[float]]] = {1: defaultdict(list), -1: defaultdict(list)}
    for row in rows:
        if len(row["a"]) < 2:
            continue
        mean = sum(row["a"]) / len(row["a"])
        for pair, a in zip(row["pairs"], row["a"]):
            uses[row["r"]][pair[kind]].append(a - mean)
    found = {}
    for id_ in uses[1]:
        if interval := contrast(uses[1][id_], uses[-1][id_]):
            found[id_] = interval[0]
    return found


def choose(bank: skills.SkillBank, rows: Sequence[dict], keep: int) -> skills.SkillBank:
    """The bank with the first `keep` entries of each list, in the bank's order."""
    lists = []
    for kind, key in enumerate(skills.KINDS):
        by_id = contrasts(rows, kind)
        chosen = sorted(by_id, key=lambda id_: -by_id[id_])[:keep]
        lists.append([x for x in bank.collection(key) if x[skills.KINDS[key].id_field] in chosen])
    return skills.SkillBank(*lists, {"chosen_by": "contrast"})


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("run", type=pathlib.Path)
    add("--keep", type=int, required=True, metavar="N", help="entries of each list")
    add("--steps", type=int, metavar="N", help="read the first N steps alone")
    add("--out", type=pathlib.Path, required=True, metavar="BANK")
    args = parser.parse_args(argv)
    rows = [*files.read_jsonl(args.run / "rollouts.jsonl")]
    if args.steps:
        rows = [row for row in rows if row["step"] <= args.steps]
    chosen = choose(skills.SkillBank.load(args.run / "bank/step_000000.json"), rows, args.keep)
    for key, kind in skills.KINDS.items():
        print(f"{key}: {json.dumps([entry[kind.id_field] for entry in chosen.collection(key)])}")
    chosen.save(args.out)


if __name__ == "__main__":
    main()
