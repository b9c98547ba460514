"""Problems for training and evaluation: JSONL, parquet, folders and hub data sets.

Also here: the check that no training problem is in an evaluation set, and a step's minibatch.
"""

import hashlib
import itertools
import json
import math
import pathlib
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

import torch


@dataclass(frozen=True)
class Problem:
    """A problem and its reference answer."""

    id: str
    problem: str
    answer: str
    extra: dict = field(default_factory=dict, compare=False)  # its row, for a judge or a teacher
    where: str = field(default="", compare=False)  # file and line of a row that has no id

    def __str__(self) -> str:
        """The problem's name in an error."""
        return f"problem {self.where or self.id}"


# ---------------------------------------------------------------------------------------- reading


DAPO_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem."
)
DAPO_SUFFIX = 'Remember to put your answer on its own line after "Answer:".'
CJK = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]")
# Matches a text of nothing but blanks and characters without width.
BLANK = re.compile(r"[\s\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]*")


def load_problems(
    source: str,
    *,
    split: str = "train",
    problem_field: str = "problem",
    answer_field: str = "answer",
    answer_after: str = "",
    boxed: bool = False,
    unique: bool = True,
) -> tuple[list[Problem], dict[str, int]]:
    """Read problems, in order, and count what was dropped.

    A row has a problem and an answer, texts or numbers, and may have an `id`. A row of DAPO-Math
    has a chat instead: we strip its boilerplate, and drop Chinese, Japanese, Korean (D8).

    source: a JSONL or parquet file, HUB_ID or HUB_ID:CONFIGURATION, or a folder in the hub's
    layout. Hub and folder have splits. answer_after: the mark before an answer, as GSM8K's "####".
    boxed: whether `lib.verify.Verifier` judges: we refuse a reference of several lines or "####".
    unique: keep one copy of a problem, and none if the answers of its copies differ.

    Returns the problems, whose ids all differ, and the counts: rows, not_english, duplicates,
    conflicting, kept. Raises ValueError at the first broken row: file, line, cause.
    """
    counts = {"rows": 0, "not_english": 0, "duplicates": 0, "conflicting": 0}
    first_copies: dict[str, Problem] = {}
    ids: set[str] = set()
    conflicting: set[str] = set()
    for index, (where, raw) in enumerate(_rows(source, split)):
        try:
            x = _problem(raw, where, index, problem_field, answer_field, answer_after, boxed)
        except ValueError as e:
            raise ValueError(f"{where}: {e}") from None
        counts["rows"] += 1
        key = x.problem if unique else str(index)
        if problem_field not in raw and CJK.search(x.problem):  # a chat of DAPO-Math
            counts["not_english"] += 1
        elif key in first_copies:
            counts["duplicates"] += 1
            if x.answer != first_copies[key].answer:
                conflicting.add(key)
        else:
            while x.id in ids:
                x = replace(x, id=f"{x.id}#{index}")
            ids.add(x.id)
            first_copies[key] = x
    problems = [x for key, x in first_copies.items() if key not in conflicting]
    counts |= {"conflicting": len(conflicting), "kept": len(problems)}
    if not problems:
        raise ValueError(f"{source}: no problem is left of {counts}; is this the right split?")
    return problems, counts


def _problem(
    row: Any,
    where: str,
    index: int,
    problem_field: str,
    answer_field: str,
    answer_after: str,
    boxed: bool,
) -> Problem:
    """One row as a problem. ValueError for what `load_problems` refuses."""
    if not isinstance(row, dict):
        raise ValueError(f"a row must be a JSON object, got {type(row).__name__}")
    if {"prompt", "reward_model"} <= row.keys() and not {problem_field, answer_field} <= row.keys():
        row = _dapo(row, problem_field, answer_field) | row
    problem = _text(row, problem_field)
    answer = _text(row, answer_field)
    if answer_after:
        _, mark, rest = answer.rpartition(answer_after)
        if not mark or BLANK.fullmatch(rest):
            raise ValueError(f"nothing follows --answer-after {answer_after!r} in {answer!r:.60}")
        answer = rest.strip()
    if boxed and ("####" in answer or "\n" in answer):
        raise ValueError(
            f"the reference holds more than the answer: ...{answer[-40:]!r}; name the mark before "
            "the answer by --answer-after, or write it in one line"
        )
    extra = {name: value for name, value in row.items() if name != "id"}
    return Problem(str(row.get("id", index)), problem, answer, extra, "" if "id" in row else where)


def _text(row: dict, name: str) -> str:
    """A field's text without blanks around it, or its number's digits. ValueError for all else.

    A float has the digits of its `repr`, but no exponent: as mathematics, 1e-05 would be e - 5.
    """
    value: Any = row.get(name)
    if type(value) in (int, float) and math.isfinite(value):
        value = f"{Decimal(repr(value)):f}".removesuffix(".0")
    if not isinstance(value, str) or BLANK.fullmatch(value):
        raise ValueError(
            f"`{name}` must be a text or number, got {value!r:.40}; the row has {', '.join(row)}; "
            "--problem-field and --answer-field read other fields"
        )
    return value.strip()


def _dapo(row: dict, problem_field: str, answer_field: str) -> dict:
    """Problem, answer and id of a row of DAPO-Math, whose problem is in a chat."""
    try:
        problem = row["prompt"][-1]["content"].strip()
        return {
            problem_field: problem.removeprefix(DAPO_PREFIX).removesuffix(DAPO_SUFFIX),
            answer_field: row["reward_model"]["ground_truth"],
            "id": row["extra_info"]["index"],
        }
    except (LookupError, TypeError, AttributeError) as e:
        raise ValueError(f"`prompt` and `reward_model` are not DAPO-Math's ({e!r})") from None


def _rows(source: str, split: str) -> Iterator[tuple[str, Any]]:
    """(where, row) for each row of a file, a folder or a hub data set."""
    path = pathlib.Path(source)
    if path.suffix in (".jsonl", ".json"):
        yield from _json_rows(path)
    elif path.suffix == ".parquet":
        yield from _hub_rows(source, "parquet", split="train", data_files=source)
    else:  # a hub id, or a folder: its files' names tell the library their splits
        hub, _, configuration = source.partition(":")
        yield from _hub_rows(source, hub, split=split, name=configuration or None)


def _json_rows(file: pathlib.Path) -> Iterator[tuple[str, Any]]:
    """(where, row) for each line of a file."""
    where = str(file)
    try:
        with file.open(encoding="utf-8-sig") as lines:  # Windows may put a byte order mark first
            for i, line in enumerate(lines, 1):
                where = f"{file}:{i}"
                if line.strip():
                    yield where, json.loads(line)
    except OSError as e:
        raise ValueError(f"{file}: {e.strerror}") from None
    except (ValueError, RecursionError) as e:
        cause = str(e).replace("line 1 ", "")  # json sees this line alone
        raise ValueError(f"{where}: not read as JSON in UTF-8 ({cause})") from None


def _hub_rows(source: str, *args: str, **options: Any) -> Iterator[tuple[str, dict]]:
    """(where, row) for each row of `datasets.load_dataset(*args, **options)`.

    Without a network the library tries to reach the hub for half a minute, says so, and then looks
    into its cache.
    """
    import datasets  # only hub ids, folders and parquet need it

    try:
        data = datasets.load_dataset(*args, **options)
        # DAPO has 1.8 million rows: we read 10,000 at a time, because one by one is slow.
        parts = (zip(*part.values()) for part in data.iter(batch_size=10_000))
        for i, values in enumerate(itertools.chain.from_iterable(parts)):
            yield f"{source} row {i}", dict(zip(data.column_names, values))
    except Exception as e:  # the library raises many kinds: offline, no such id, no such split
        e = e.__cause__ if isinstance(e.__cause__, Exception) else e  # not just "An error occurred"
        cause = f"{type(e).__name__}: {textwrap.shorten(str(e), 300, placeholder=' ...')}"
        raise ValueError(f"{source}: not read ({cause}); check --data and --split") from None


# -------------------------------------------------------------------------------- evaluation sets


SETS: dict[str, tuple[str, str, dict[str, str]]] = {  # source, split and other arguments
    "aime24": ("HuggingFaceH4/aime_2024", "train", {}),  # the first three are the paper's
    "aime25": ("yentinglin/aime_2025", "train", {}),
    "hmmt25": ("MathArena/hmmt_feb_2025", "train", {}),
    "aime26": ("MathArena/aime_2026", "train", {}),
    "math500": ("HuggingFaceH4/MATH-500", "test", {}),
    "amc23": ("math-ai/amc23", "test", {"problem_field": "question"}),
    "gsm8k": ("openai/gsm8k:main", "test", {"problem_field": "question", "answer_after": "####"}),
}


def load_set(name: str, split: str, **reading: Any) -> list[Problem]:
    """Read an evaluation set, copies included: one of SETS, or any source of `load_problems`.

    split, reading: arguments of `load_problems`, which we ignore for one of SETS. ValueError for a
    problem whose copies have different answers.
    """
    source, split, reading = SETS.get(name, (name, split, reading))
    data, _ = load_problems(source, split=split, unique=False, **reading)
    answers: dict[str, str] = {}
    for x in data:
        first = answers.setdefault(x.problem, x.answer)
        if x.answer != first:
            raise ValueError(f"{source}: {x} has the answer {x.answer!r}, and a copy {first!r}")
    return data


def fingerprint(problem: str) -> str:
    """A 48-bit hash of a problem's letters and digits, whatever its layout, case, LaTeX spacing."""
    letters = re.sub(r"[\W_]", "", problem.lower()).encode("utf-8", "replace")
    return hashlib.blake2b(letters, digest_size=6).hexdigest()


def refuse_overlap(problems: Sequence[Problem], where: str) -> None:
    """ValueError that names all training problems that are in the paper's evaluation sets.

    where: the source of the problems, for the error. eval_sets.json has the sets' fingerprints.
    """
    sets = json.loads((pathlib.Path(__file__).parent / "eval_sets.json").read_text())
    overlap = []
    for x in problems:
        key = fingerprint(x.problem)
        for name, fingerprints in sets.items():
            if key in fingerprints:
                overlap.append(f"{x.where or x.id} ({name})")
    if overlap:
        raise ValueError(
            f"{where}: {len(overlap)} problems are in an evaluation set; drop them: "
            f"{', '.join(overlap)}"
        )


# -------------------------------------------------------------------------------------- minibatch


def minibatch(
    data: Sequence[Problem], batch_size: int, step: int, seed: int
) -> list[tuple[Problem, int]]:
    """The global batch of a step. It depends on seed and step alone, not on the world size.

    Each epoch is a permutation of the data, and a batch may span several. step: from 1.
    Returns batch_size pairs (problem, epoch). The epoch goes into the key of a problem's draws, so
    that a problem that comes twice in a batch is sampled with different draws.
    """
    batch: list[tuple[Problem, int]] = []
    orders: dict[int, list[int]] = {}  # by epoch
    for place in range((step - 1) * batch_size, step * batch_size):  # in all epochs, end to end
        epoch, i = divmod(place, len(data))
        if epoch not in orders:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
            orders[epoch] = torch.randperm(len(data), generator=generator).tolist()
        batch.append((data[orders[epoch][i]], epoch))
    return batch
