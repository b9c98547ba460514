"""Problems for training and evaluation: JSONL, parquet, directories and hub data sets.

Also here: the check that no training problem is in an evaluation set, and a step's minibatch.
"""

import hashlib
import json
import logging
import pathlib
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Problem:
    """A problem and its reference answer."""

    id: str
    problem: str
    answer: str
    extra: dict = field(default_factory=dict, compare=False)  # the row's other fields, for a judge
    line: str = field(default="", compare=False)  # FILE:11 of a row without an id

    @property
    def place(self) -> str:
        """The problem in an error: where its row is, or else its id."""
        return self.line or f"problem {self.id}"


@dataclass(frozen=True)
class Fields:
    """Where a source's rows have problem and answer.

    answer_after: the answer is what follows the last of these marks, such as GSM8K's "####".
    """

    problem: str = "problem"
    answer: str = "answer"
    answer_after: str = ""


# ---------------------------------------------------------------------------------------- reading


DAPO_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem."
)
DAPO_SUFFIX = 'Remember to put your answer on its own line after "Answer:".'
CJK = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]")


def load_problems(
    source: str, *, split: str = "train", unique: bool = True, fields: Fields = Fields()
) -> tuple[list[Problem], dict[str, int]]:
    """Read problems, in order, and count what was dropped.

    A row has a problem and an answer, both strings (a whole number is taken as its text), and may
    have an `id`. A row of DAPO-Math has a chat instead: we strip its boilerplate, and drop problems
    in Chinese, Japanese or Korean (D8).

    source: a JSONL file, a parquet file, HUB_ID or HUB_ID:CONFIGURATION, or a directory in the
    hub's layout.
    split: of a hub data set or such a directory.
    fields: where a row has them.
    unique: drop copies of a problem, and drop it altogether if its copies disagree on the answer.

    Returns the problems, whose ids all differ, and the counts: rows, not_english, duplicates,
    conflicting, kept. Raises ValueError with the number of wrong rows, and file and line of each
    of the first five causes.
    """
    counts = {"rows": 0, "not_english": 0, "duplicates": 0, "conflicting": 0}
    first_copies: dict[str, Problem] = {}
    ids: set[str] = set()
    conflicting: set[str] = set()
    for index, (row, x) in enumerate(_problems(source, split, fields)):
        counts["rows"] += 1
        key = x.problem if unique else str(index)
        if fields.problem not in row and CJK.search(x.problem):
            counts["not_english"] += 1
        elif key in first_copies:
            counts["duplicates"] += 1
            if x.answer != first_copies[key].answer:
                conflicting.add(key)
        else:
            name = x.id
            while name in ids:
                name += f"#{index}"
            ids.add(name)
            first_copies[key] = replace(x, id=name)
    problems = [x for key, x in first_copies.items() if key not in conflicting]
    counts |= {"conflicting": len(conflicting), "kept": len(problems)}
    if not problems:
        dropped = [f"{n} {name.replace('_', ' ')}" for name, n in counts.items() if n]
        what = f"no problem is left ({', '.join(dropped) or 'it has no rows'})"
        raise ValueError(f"{source}: {what}; is this the right file or split?")
    return problems, counts


def _problems(source: str, split: str, fields: Fields) -> Iterator[tuple[dict, Problem]]:
    """Each row with its problem. In the end ValueError if rows are wrong: how many, five causes."""
    wrong: dict[str, list[str]] = {}  # {cause: where}
    rows = 0
    for where, row in _rows(source, split):
        try:
            fields_of_row: Any = _json(row) if isinstance(row, str) else row
            x = _problem(fields_of_row, rows, fields)
            if isinstance(row, str) and "id" not in fields_of_row:
                x = replace(x, line=where)
        except ValueError as e:
            wrong.setdefault(str(e), []).append(where)
        else:
            yield fields_of_row, x
        rows += 1
    if wrong:
        total = sum(map(len, wrong.values()))
        causes = [f"{where[0]}: {cause}" for cause, where in wrong.items()]
        what = f"{total} of {rows} rows are wrong: " if total > 1 else ""
        raise ValueError(what + "; ".join(causes[:5]))


def _json(line: str) -> Any:
    """ValueError for what is no JSON."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as e:
        raise ValueError(f"is not JSON ({e.msg} at character {e.pos + 1})") from None


def _problem(row: dict, index: int, fields: Fields) -> Problem:
    """One row as a problem; ValueError where a field is missing, empty or not a string."""
    if not isinstance(row, dict):
        raise ValueError(f"a row must be a JSON object, got {type(row).__name__}")
    columns = f"its fields: {', '.join(map(str, row)) or 'none'}"
    is_plain = {fields.problem, fields.answer} <= row.keys()
    if not is_plain and "prompt" in row and "reward_model" in row:
        row = _dapo(row, fields) | row
    if fields.problem not in row or fields.answer not in row:
        rule = f"a row needs `{fields.problem}` and `{fields.answer}`"
        raise ValueError(f"{rule}; {columns}; name them by --problem-field and --answer-field")
    problem, answer = row[fields.problem], row[fields.answer]
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    if type(answer) is int:
        answer = str(answer)
    for name, value in ((fields.problem, problem), (fields.answer, answer)):
        if value is None or value == "" or str(value).isspace():
            raise ValueError(f"`{name}` is empty; fill it in, or drop the row; {columns}")
        if not isinstance(value, str):
            kind = "a list" if isinstance(value, list) else type(value).__name__
            rule = f"must be a string, got {kind} {json.dumps(value, default=str)[:40]}"
            raise ValueError(f"`{name}` {rule}; {columns}")
    if fields.answer_after:
        _, mark, answer = answer.rpartition(fields.answer_after)
        if not mark or not answer.strip():
            rule = f"has nothing after --answer-after {fields.answer_after!r}"
            raise ValueError(f"`{fields.answer}` {rule}: {row[fields.answer]!r:.60}")
    extra = {k: v for k, v in row.items() if k not in ("id", fields.problem, fields.answer)}
    return Problem(str(row.get("id", index)), problem.strip(), answer.strip(), extra)


def _dapo(row: dict, fields: Fields) -> dict:
    """Problem, answer and id of a row of DAPO-Math, whose problem is in a chat."""
    try:
        problem = row["prompt"][-1]["content"].strip()
        answer, index = row["reward_model"]["ground_truth"], row["extra_info"]["index"]
    except (LookupError, TypeError, AttributeError) as e:
        raise ValueError(f"`prompt` and `reward_model` are not DAPO-Math's ({e!r})") from None
    problem = problem.removeprefix(DAPO_PREFIX).removesuffix(DAPO_SUFFIX)
    return {fields.problem: problem, fields.answer: answer, "id": index}


def _rows(source: str, split: str) -> Iterator[tuple[str, object]]:
    """(where, row) for each row of a file, a directory or a hub data set; a JSON line as text."""
    path = pathlib.Path(source)
    if not path.exists():
        if path.suffix in (".jsonl", ".json", ".parquet") or source.startswith((".", "/", "~")):
            raise ValueError(f"{source}: no such file; check the path")
        hub, _, configuration = source.partition(":")
        _ask_once(source, hub)
        yield from _hub_rows(source, hub, split=split, name=configuration or None)
    elif path.suffix in (".jsonl", ".json"):
        yield from _json_rows(path)
    elif path.is_dir():  # test.parquet is no training data: the library knows splits by name
        yield from _hub_rows(source, source, split=split)
    elif path.suffix == ".parquet":
        yield from _hub_rows(source, "parquet", split="train", data_files=source)
    else:
        raise ValueError(f"{source}: must be a .jsonl or .parquet file; convert it")


def _json_rows(file: pathlib.Path) -> Iterator[tuple[str, str]]:
    try:
        text = file.read_text(encoding="utf-8-sig")  # Windows may put a mark in front
    except ValueError as e:
        raise ValueError(f"{file}: not UTF-8 ({e}); save it as UTF-8") from None
    for i, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{file}:{i}", line


def _ask_once(source: str, hub: str) -> None:
    """ValueError for a hub id that is neither in the local caches nor on the hub.

    Asked once: the libraries would try six times for each of several files.
    """
    import datasets
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError

    *namespace, name = hub.split("/")
    prepared = "___".join([*namespace, datasets.naming.camelcase_to_snakecase(name)])
    downloaded = "--".join(["datasets", *hub.split("/")])
    caches = [pathlib.Path(datasets.config.HF_DATASETS_CACHE, prepared)]
    caches.append(pathlib.Path(constants.HF_HUB_CACHE, downloaded))
    if constants.HF_HUB_OFFLINE or any(cache.exists() for cache in caches):
        return  # without a network they ask nobody
    try:
        get_hf_file_metadata(hf_hub_url(hub, ".gitattributes", repo_type="dataset"), timeout=10)
    except EntryNotFoundError:
        return
    except Exception as e:
        folder = pathlib.Path(hub).parts[0]
        hint = f"; {folder}/ is a folder here: check what follows"
        hint *= pathlib.Path(folder).is_dir()
        cause = f"{type(e).__name__}: {textwrap.shorten(str(e), 300, placeholder=' ...')}"
        raise ValueError(f"{source}: no file here, so a hub id{hint}; not read ({cause})") from None


def _hub_rows(source: str, *where: str, **options: Any) -> Iterator[tuple[str, dict]]:
    """The rows of `datasets.load_dataset(*where, **options)`."""
    import datasets  # only hub ids and parquet need it

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # its errors are in the exception
    try:
        data = datasets.load_dataset(*where, **options)
        row = 0
        for part in data.iter(batch_size=10_000):  # DAPO has 1.8 million rows; one by one is slow
            for values in zip(*part.values()):
                yield f"{source} row {row}", dict(zip(part, values))
                row += 1
    except Exception as e:  # the library raises many kinds: offline, no such id, no such split
        e = e.__cause__ if isinstance(e.__cause__, Exception) else e  # "An error occurred" hides it
        cause = f"{type(e).__name__}: {textwrap.shorten(str(e), 300, placeholder=' ...')}"
        raise ValueError(f"{source}: not read ({cause}); check --data and --split") from None


# -------------------------------------------------------------------------------- evaluation sets


SETS = {  # source, split and fields; the paper's three come first
    "aime24": ("HuggingFaceH4/aime_2024", "train", Fields()),
    "aime25": ("yentinglin/aime_2025", "train", Fields()),
    "hmmt25": ("MathArena/hmmt_feb_2025", "train", Fields()),
    "math500": ("HuggingFaceH4/MATH-500", "test", Fields()),
    "amc23": ("math-ai/amc23", "test", Fields("question", "answer")),
    "gsm8k": ("openai/gsm8k:main", "test", Fields("question", "answer", "####")),
}


def load_set(name: str, split: str, fields: Fields = Fields()) -> list[Problem]:
    """Read an evaluation set: one of SETS, or any source of `load_problems`; copies are kept."""
    source, split, fields = SETS.get(name, (name, split, fields))
    return load_problems(source, split=split, unique=False, fields=fields)[0]


def refuse_unanswerable(problems: Sequence[Problem], where: str) -> None:
    """ValueError for a reference that holds more than a final answer, so that none can equal it."""
    for x in problems:
        if "####" in x.answer or "\n" in x.answer:
            what = f"the reference of {x.place} holds more than the answer"
            fix = "name the mark before the answer by --answer-after"
            raise ValueError(f"{where}: {what}: ...{x.answer[-40:]!r}; {fix}")


def fingerprint(problem: str) -> str:
    """48 bits of a problem's letters and digits; layout, case and LaTeX spacing do not matter."""
    letters = re.sub(r"[\W_]", "", problem.lower()).encode("utf-8", "replace")
    return hashlib.blake2b(letters, digest_size=6).hexdigest()


def refuse_overlap(problems: Sequence[Problem], where: str) -> None:
    """ValueError, with all ids, if a training problem is in one of the paper's evaluation sets.

    where: the source of the problems, for the error. eval_sets.json has the sets' fingerprints.
    """
    sets = json.loads((pathlib.Path(__file__).parent / "eval_sets.json").read_text())
    set_of: dict[str, str] = {}
    for name, fingerprints in sets.items():
        set_of |= dict.fromkeys(fingerprints, name)
    overlap = []
    for x in problems:
        set_name = set_of.get(fingerprint(x.problem))
        if set_name:
            overlap.append(f"{x.line or x.id} ({set_name})")
    if overlap:
        what = f"{len(overlap)} of its problems are in an evaluation set; drop them"
        raise ValueError(f"{where}: {what}: {', '.join(overlap)}")


# -------------------------------------------------------------------------------------- minibatch


def minibatch(
    data: Sequence[Problem], batch_size: int, step: int, seed: int
) -> list[tuple[Problem, int]]:
    """The global batch of a step: a function of seed and step alone, whatever the world size.

    Each epoch is a permutation of the data, and a batch may span two of them. step: from 1.
    Returns batch_size pairs (problem, epoch). The epoch numbers a problem's samples, so that no
    problem is sampled twice with the same draws.
    """
    batch: list[tuple[Problem, int]] = []
    start, end = (step - 1) * batch_size, step * batch_size
    for epoch in range(start // len(data), -(-end // len(data))):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(data), generator=generator).tolist()
        first = epoch * len(data)
        batch += [(data[i], epoch) for i in order[max(0, start - first) : end - first]]
    return batch
