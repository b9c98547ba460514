"""Whether a bank of skills and mistakes is fit for use: its form, near-copies, retrieval, length.

    python research/banks/check_bank.py BANK --encoder DIR --tokenizer DIR --data FILE ...

Prints markdown: the bank beside others (--beside), the closest pairs of each list, and the share of
problems for which each entry is among the nearest. Ends with 1 where a check fails:

- an entry carries numbers that look like one problem's (`lint`);
- two entries of a list have a cosine similarity above TWINS;
- an entry is retrieved for less than RARE of the problems in every file of --data, or for more than
  CONSTANT of them in one file. Problems of --other-data are shown and not judged.

All similarities are the given encoder's: another one sees other neighbours.
"""

import argparse
import pathlib
import random
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np
from transformers import AutoTokenizer

import skills
from lib import model
from lib.problems import Problem, load_problems
from research.markdown_table import head_of, row_of
from skills import SkillBank

TWINS = 0.80  # cosine above which two entries count as near-copies
RARE, CONSTANT = 0.01, 0.90  # shares of a set's problems
CLOSEST = 3  # pairs that are shown for each list
COMMON_NUMBERS = "10 12 20 24 30 45 50 60 90 100 120 180 360 1000".split()  # of any problem

Embed = Callable[[Sequence[str]], np.ndarray]
Pair = tuple[float, str, str]  # a cosine and the ids of two entries
Shares = dict[str, dict[str, float]]  # by set of problems: each entry's share of them


def sampled(path: pathlib.Path, size: int) -> list[Problem]:
    """A set's problems, or `size` of them drawn with a fixed seed."""
    problems, _ = load_problems(str(path))
    return random.Random(0).sample(problems, min(size, len(problems)))


def lint(bank: SkillBank) -> list[str]:
    """A line on each entry with a number that looks like one problem's."""
    lines = []
    for key in skills.FIELDS:
        for entry in bank.collection(key):
            numbers = re.findall(r"\d+(?:\.\d+)?", skills.entry_text(entry, key))
            odd = [n for n in dict.fromkeys(numbers) if len(n) > 1 and n not in COMMON_NUMBERS]
            if odd:
                lines.append(f"a problem's numbers: {entry[skills.IDS[key]]} ({', '.join(odd)})")
    return lines


def pairs_by_cosine(bank: SkillBank, key: str, embed: Embed) -> list[Pair]:
    """All pairs of a list's entries, closest first."""
    entries = bank.collection(key)
    ids = [entry[skills.IDS[key]] for entry in entries]
    vectors_nd = embed([skills.entry_text(entry, key) for entry in entries])
    cosine_nn = vectors_nd @ vectors_nd.T
    first, second = np.triu_indices(len(entries), 1)
    pairs = [(float(cosine_nn[i, j]), ids[i], ids[j]) for i, j in zip(first, second)]
    return sorted(pairs, reverse=True)


def retrieval_shares(
    bank: SkillBank, sets: dict[str, list[Problem]], nearest: int, embed: Embed
) -> Shares:
    """For each set, the share of its problems for which an entry is among the nearest."""
    shares: Shares = {}
    for name, problems in sets.items():
        hits: Counter[str] = Counter()
        for x in problems:
            for pair in bank.retrieve(x.problem, nearest, embed):
                hits.update([pair.skill["skill_id"], pair.mistake["mistake_id"]])
        shares[name] = {entry_id: hits[entry_id] / len(problems) for entry_id in ids_of(bank)}
    return shares


def ids_of(bank: SkillBank) -> list[str]:
    return [entry[skills.IDS[key]] for key in skills.FIELDS for entry in bank.collection(key)]


def rare_entries(shares: Shares, judged: Sequence[str]) -> list[str]:
    """Entries that are retrieved for less than RARE of the problems in every judged set."""
    ids = shares[judged[0]]
    return [i for i in ids if max(shares[name][i] for name in judged) < RARE]


def constant_entries(shares: Shares, judged: Sequence[str]) -> list[str]:
    """Entries that are retrieved for more than CONSTANT of the problems in a judged set."""
    ids = shares[judged[0]]
    return [i for i in ids if max(shares[name][i] for name in judged) > CONSTANT]


def lengths(bank: SkillBank, key: str, count: Callable[[str], int]) -> str:
    """Tokens of an entry as it is embedded: mean and longest."""
    tokens = [count(skills.entry_text(entry, key)) for entry in bank.collection(key)]
    return f"{statistics.mean(tokens):.0f} ({max(tokens)})"


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print("\n".join([*head_of(header), *map(row_of, rows), ""]))


def retrieval_rows(bank: SkillBank, key: str, shares: Shares) -> list[list[str]]:
    rows = []
    for entry in bank.collection(key):
        entry_id = entry[skills.IDS[key]]
        cells = [f"{shares[name][entry_id]:.1%}" for name in shares]
        rows.append([entry_id, entry[skills.FIELDS[key][0]].replace("|", "\\|"), *cells])
    return rows


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    path = pathlib.Path
    parser.add_argument("bank", type=path, help="the bank to check")
    parser.add_argument("--encoder", required=True, help="a sentence-transformers model")
    parser.add_argument("--tokenizer", required=True, help="counts the entries' tokens")
    help_text = "JSONL files of problems that the bank is meant for"
    parser.add_argument("--data", type=path, nargs="+", required=True, help=help_text)
    help_text = "further files of problems, shown and not judged"
    parser.add_argument("--other-data", type=path, nargs="*", default=[], help=help_text)
    help_text = "banks to compare lengths, near-copies and retrieval with"
    parser.add_argument("--beside", type=path, nargs="*", default=[], help=help_text)
    parser.add_argument("--sample", type=int, default=300, help="problems drawn from a file")
    parser.add_argument("--nearest", type=int, default=8, help="pairs retrieved, K in the paper")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    banks = {path: SkillBank.load(path) for path in (args.bank, *args.beside)}
    sets = {path.stem: sampled(path, args.sample) for path in (*args.data, *args.other_data)}
    judged = [path.stem for path in args.data]
    embed = model.load_encoder(args.encoder, "cpu")
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    rows, failures = [], []
    for path, bank in banks.items():
        by_key = {key: pairs_by_cosine(bank, key, embed) for key in skills.FIELDS}
        shares = retrieval_shares(bank, sets, args.nearest, embed)
        rare, constant = rare_entries(shares, judged), constant_entries(shares, judged)
        copies = {key: [p for p in pairs if p[0] > TWINS] for key, pairs in by_key.items()}
        sizes = [str(len(bank.collection(key))) for key in skills.FIELDS]
        tokens = [lengths(bank, key, count) for key in skills.FIELDS]
        twins = [f"{len(copies[key])} ({by_key[key][0][0]:.2f})" for key in skills.FIELDS]
        rows.append([path.name, *sizes, *tokens, *twins, str(len(rare)), str(len(constant))])
        if path == args.bank:
            checked_pairs, checked_shares = by_key, shares
            failures += lint(bank)
            failures += [f"near-copies: {p[1]}, {p[2]}" for key in copies for p in copies[key]]
            failures += [f"rarely retrieved: {entry_id}" for entry_id in rare]
            failures += [f"nearly always retrieved: {entry_id}" for entry_id in constant]

    counted = ", ".join(f"{len(problems)} of {name}" for name, problems in sets.items())
    print(f"{args.bank.name}; problems: {counted}; judged by {', '.join(judged)};")
    print(f"the {args.nearest} nearest by {pathlib.Path(args.encoder).name}\n")
    header = ["bank", "skills", "mistakes", "tokens of a skill: mean (most)", "of a mistake"]
    header += [f"pairs of skills above {TWINS:.2f} (closest)", "of mistakes"]
    header += [f"entries in under {RARE:.0%}", f"in over {CONSTANT:.0%}"]
    print_table(header, rows)
    closest = []
    for key, pairs in checked_pairs.items():
        closest += [[skills.SHORT[key], a, b, f"{cosine:.3f}"] for cosine, a, b in pairs[:CLOSEST]]
    print_table(["closest", "entry", "entry", "cosine"], closest)
    for key in skills.FIELDS:
        of_key = retrieval_rows(banks[args.bank], key, checked_shares)
        print_table(["id", skills.SHORT[key], *sets], of_key)
    print("\n".join(failures) if failures else "every check holds")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
