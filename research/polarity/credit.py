"""Where a run's credit lies: on successes or failures, on liked or disliked tokens, on which ones.

    python research/polarity/credit.py RUN [--window 16] [--first 20]
    python research/polarity/credit.py RUN --word "Well"       how a word spreads, in any run

RUN must have been audited at every step (--audit-every 1). Credit is Eq. 20's, summed over teachers
and unmasked tokens, a thousand times its mean over rollouts. A teacher likes a token if its gap is
positive. Positive credit makes a token likelier. The last columns have the net credit of the first
token of the solutions, and the tokens with the largest net credit elsewhere. The last line says how
much credit the first token has, and how many polarities it decides, in the steps up to --first.
"""

import collections
import pathlib
import statistics
import sys
from collections.abc import Iterator, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import torch

import sgsd
from lib import config, files
from research.markdown_table import head_of, row_of

PARTS = ("success, liked", "success, disliked", "failure, liked", "failure, disliked")
SHOWN = 3  # tokens with the largest net credit


def add_rollout(credit: collections.Counter, roll: dict, tokens: dict) -> None:
    """Add a rollout's credit to that of its window, by part and by token."""
    outcome = "success" if roll["r"] > 0 else "failure"
    for delta_T, credit_T in zip(tokens["delta"], tokens["credit"]):
        for place, (text, gap, weight) in enumerate(zip(tokens["text"], delta_T, credit_T)):
            credit[f"{outcome}, {'liked' if gap > 0 else 'disliked'}"] += weight
            credit["first" if place == 0 else ("token", text)] += weight


def audited(run: pathlib.Path) -> Iterator[tuple[dict, dict]]:
    """Each rollout with its tokens. ValueError where a step was not audited."""
    rolls, rows = files.read_jsonl(run / "rollouts.jsonl"), files.read_jsonl(run / "tokens.jsonl")
    for roll, tokens in zip(rolls, rows):
        if (roll["step"], roll["problem_id"]) != (tokens["step"], tokens["problem_id"]):
            raise ValueError(f"{run}: not every step is audited; train with --audit-every 1")
        yield roll, tokens


def first_token(run: pathlib.Path, last: int) -> str:
    """What the first token holds of the credit's size and of the polarities up to step `last`."""
    settings = config.saved(run)
    held = whole = 0.0
    gaps: list[float] = []
    changed: list[bool] = []
    for roll, tokens in audited(run):
        if roll["step"] > last:
            break
        size_KT = torch.tensor(tokens["credit"]).abs()
        held, whole = held + float(size_KT[:, 0].sum()), whole + float(size_KT.sum())
        delta_KT, mask_T = torch.tensor(tokens["delta"]), torch.tensor(tokens["mask"]).float()
        gaps += delta_KT[:, 0].tolist()
        others_T = mask_T.clone()
        others_T[0] = 0
        fates = []
        for kept_T in (mask_T, others_T):
            a_K = sgsd.robust_support(delta_KT, kept_T, settings["c_delta"])
            fates.append(sgsd.polarity(a_K, roll["r"], settings["eps_a"]))
        changed += (fates[0] != fates[1]).tolist()
    return (
        f"steps 1 to {last}: the first token has a mean gap of {statistics.mean(gaps):.2f} and "
        f"holds {held / whole:.0%} of the credit; without it {statistics.mean(changed):.0%} of the "
        "polarities would be others"
    )


def table(run: pathlib.Path, window: int) -> list[str]:
    """A Markdown table with a row per window of steps."""
    lines = head_of(["steps", "success", "boxed", *PARTS, "first token", "other tokens"])
    windows: dict[int, list[tuple[dict, dict]]] = {}
    for roll, tokens in audited(run):
        windows.setdefault((roll["step"] - 1) // window, []).append((roll, tokens))
    for number, pairs in windows.items():
        credit: collections.Counter = collections.Counter()
        for roll, tokens in pairs:
            add_rollout(credit, roll, tokens)
        count = len(pairs)
        right = sum(roll["r"] > 0 for roll, _ in pairs) / count
        boxed = sum(roll["pred"] is not None for roll, _ in pairs) / count
        sums = [f"{1000 * credit[part] / count:+.2f}" for part in PARTS]
        others = [(key[1], total) for key, total in credit.items() if isinstance(key, tuple)]
        others.sort(key=lambda other: -abs(other[1]))
        named = [f"`{text}` {1000 * total / count:+.2f}" for text, total in others[:SHOWN]]
        steps = f"{number * window + 1} to {pairs[-1][0]['step']}"
        first = f"{1000 * credit['first'] / count:+.2f}"
        cells = [steps, f"{right:.2f}", f"{boxed:.2f}", *sums, first, ", ".join(named)]
        lines.append(row_of(cells))
    return lines


def words(run: pathlib.Path, window: int, word: str) -> list[str]:
    """A table with a row per window of steps: how many solutions have the word, and which."""
    head = ["steps", "success", "solutions with it", "of it in each", "at most"]
    head += ["right with it", "right without"]
    lines = head_of(head)
    windows: dict[int, list[dict]] = {}
    for roll in files.read_jsonl(run / "rollouts.jsonl"):
        windows.setdefault((roll["step"] - 1) // window, []).append(roll)
    for number, rolls in windows.items():
        counts = [roll["text"].count(word) for roll in rolls]
        outcomes: dict[bool, list[bool]] = {True: [], False: []}
        for roll, count in zip(rolls, counts):
            outcomes[count > 0].append(roll["r"] > 0)
        shares = []
        for right in (outcomes[True] + outcomes[False], outcomes[True], outcomes[False]):
            shares.append(f"{statistics.mean(right):.0%}" if right else "")
        steps = f"{number * window + 1} to {rolls[-1]['step']}"
        cells = [steps, shares[0], f"{len(outcomes[True]) / len(rolls):.0%}"]
        cells += [f"{statistics.mean(counts):.2f}", str(max(counts)), *shares[1:]]
        lines.append(row_of(cells))
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = config.Parser("python research/polarity/credit.py", "RUN [--FLAG VALUE ...]", __doc__)
    parser.add_argument(
        "run", type=pathlib.Path, help="a run; without --word audited at every step"
    )
    parser.add_argument("--window", type=int, default=16, help="steps of a row")
    parser.add_argument("--first", type=int, default=20, help="steps of the line on first tokens")
    parser.add_argument("--word", default="", help="show how often solutions have this, and end")

    args = parser.parse_args(argv)
    with config.mistakes_as_one_line("credit"):
        if args.word:
            print("\n".join(words(args.run, args.window, args.word)))
            return
        print("\n".join(table(args.run, args.window)))
        print(f"\n{first_token(args.run, args.first)}")


if __name__ == "__main__":
    main()
