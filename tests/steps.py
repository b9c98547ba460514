"""What a whole solution's verdict does to teachers of its single steps, in the world tiny/lock.

    python tests/steps.py RUN    a run with --audit-every 1 whose bank stayed as it was made

The polarity is decided by the outcome of the whole solution. Of each teacher whose skill is about
one of the three steps: how often it was distilled, ignored and reversed, by outcome and by whether
its own step was right; and the credit (Eq. 20) that it gave the tokens of that step, or where it is
about no step those of the whole solution. Credit above 0 makes a token more likely.
"""

import argparse
import json
import pathlib
import re
import sys
from collections import Counter, defaultdict

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tiny")]

import world  # noqa: E402

import distributed  # noqa: E402

FATES = {1: "distilled", 0: "ignored", -1: "reversed"}


def spans(texts: list[str]) -> list[range]:
    """The tokens of each step: from one step's number to the next, which is after "So"."""
    whole, ends = "", []
    for text in texts:
        whole += text
        ends.append(len(whole))
    found, start = [], 0
    for match in list(re.finditer(r"So \d+", whole))[:3]:
        tokens = [i for i, end in enumerate(ends) if start < end <= match.end()]
        found.append(range(tokens[0], tokens[-1] + 1) if tokens else range(0))
        start = match.end()
    return found


def count(
    run: pathlib.Path, rows: list[dict], problems: dict[str, dict]
) -> dict[tuple, dict[str, float]]:
    """(outcome, kind of the skill, own step) -> number of teachers by fate, and their credit.

    "size" is the sum of the credit's absolute values over the whole solution.
    """
    bank = json.loads((run / "bank" / "bank.json").read_text())
    meanings = {entry["skill_id"]: world.meaning(entry) for entry in bank["general_skills"]}
    found: dict[tuple, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row, tokens in zip(rows, distributed.read_jsonl(run / "tokens.jsonl")):
        steps, problem = spans(tokens["text"]), problems[row["problem_id"]]
        own = problem["families"]
        given = re.findall(r"So (\d+)", row["text"])
        for k, (skill, _) in enumerate(row["pairs"]):
            family, kind = meanings[skill] or (None, "")
            outcome, credit = "success" if row["r"] > 0 else "failure", tokens["credit"][k]
            key, about = (outcome, "of no step", ""), range(len(credit))
            if family in own:
                at = own.index(family)
                if at >= len(steps):  # a step that was never written
                    continue
                about = steps[at]
                state = "right" if given[at] == problem["steps"][at] else "wrong"
                key = outcome, kind, state
            found[key][FATES[row["rho"][k]]] += 1
            found[key]["credit"] += sum(credit[i] for i in about)
            found[key]["size"] += sum(map(abs, credit))
    return found


def table(found: dict[tuple, dict[str, float]]) -> list[str]:
    head = "outcome | its skill | own step | teachers | distilled | ignored | reversed | credit"
    lines = [f"| {head} of the step, x 1000, mean | sum |", "|---" * 9 + "|"]
    for key, cell in sorted(found.items()):
        total = sum(cell[fate] for fate in FATES.values())
        shares = [f"{cell[fate] / total:.0%}" for fate in FATES.values()]
        credit = [f"{1000 * cell['credit'] / total:+.2f}", f"{cell['credit']:+.2f}"]
        lines.append("| " + " | ".join([*key, f"{total:.0f}", *shares, *credit]) + " |")
    return lines


def summary(rows: list[dict], found: dict[tuple, dict[str, float]]) -> list[str]:
    """How the supports lean, the fates by outcome, and what teachers of no step weigh."""
    supports = [a for row in rows for a in row["a"]]
    lines = ["", f"{sum(a < 0 for a in supports)} of {len(supports)} supports are below 0"]
    for name, r in (("successes", 1), ("failures", -1)):
        fates = [FATES[rho] for row in rows if row["r"] == r for rho in row["rho"]]
        lines.append(f"teachers of {name}: {dict(Counter(fates))}")
    of_none = sum(cell["size"] for key, cell in found.items() if key[1] == "of no step")
    total = sum(cell["size"] for cell in found.values())
    return [*lines, f"{of_none / total:.0%} of all credit, by size, is of teachers of no step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=pathlib.Path)
    args = parser.parse_args()
    rows = distributed.read_jsonl(args.run / "rollouts.jsonl")
    written = distributed.read_jsonl(ROOT / "tiny" / "lock" / "train.jsonl")
    found = count(args.run, rows, {row["id"]: row for row in written})
    print("\n".join(table(found) + summary(rows, found)))


if __name__ == "__main__":
    main()
