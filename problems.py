"""Problems to learn from and to be tested on: JSONL, parquet, directories and hub data sets.

A problem that also stands in an evaluation set is refused as training data.
"""

import hashlib
import json
import pathlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cli import UserError, brief
from config import Config, missing_path


@dataclass(frozen=True)
class Problem:
    """A problem and its reference answer."""

    id: str
    problem: str
    answer: str
    extra: dict = field(default_factory=dict, compare=False)  # a row's other fields, for a verdict


DAPO_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem."
)
DAPO_SUFFIX = 'Remember to put your answer on its own line after "Answer:".'
CJK = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]")


def load_problems(
    source: str, *, split: str = "train", unique: bool = True
) -> tuple[list[Problem], dict[str, int]]:
    """Problems from a JSONL file, a parquet file, a directory of either, or a hub id; and counts.

    A row has the strings `problem` and `answer` (`id` is optional), or is one of DAPO-Math's chats,
    stripped of their boilerplate and dropped if in Chinese, Japanese or Korean (D8). With `unique`,
    copies are dropped, and so is a problem whose copies disagree. Raises UserError by row.
    """
    counts = {"rows": 0, "not_english": 0, "duplicates": 0, "conflicting": 0}
    kept: dict[str, Problem] = {}
    ids: set[str] = set()
    conflicting: set[str] = set()
    for index, (where, row) in enumerate(_rows(source, split)):
        counts["rows"] += 1
        x = _problem(row, where, index)
        key = x.problem if unique else str(index)
        if "problem" not in row and CJK.search(x.problem):
            counts["not_english"] += 1
        elif key in kept:
            counts["duplicates"] += 1
            if x.answer != kept[key].answer:
                conflicting.add(key)
        else:
            name = x.id
            while name in ids:
                name += f"#{index}"
            ids.add(name)
            kept[key] = replace(x, id=name)
    problems = [x for key, x in kept.items() if key not in conflicting]
    counts |= {"conflicting": len(conflicting), "kept": len(problems)}
    if not problems:
        left = f"no problem is left of {counts['rows']} rows ({counts})"
        raise UserError(f"{source}: {left}; is this the right file or split?")
    return problems, counts


def _problem(row: object, where: str, index: int) -> Problem:
    """One row as a problem; UserError when a field is missing, empty or not a string."""
    if not isinstance(row, dict):
        raise UserError(f"{where}: a JSON object is wanted, got {type(row).__name__}")
    fields = f"fields found: {', '.join(map(str, row)) or 'none'}"
    if "prompt" in row and isinstance(row.get("reward_model"), dict):
        row = _dapo(row) | row
    if "problem" not in row or "answer" not in row:
        wanted = "needs `problem` and `answer` (or DAPO's `prompt` and `reward_model`)"
        raise UserError(f"{where}: {wanted}; {fields}")
    for name in ("problem", "answer"):
        value = row[name]
        if not isinstance(value, str):
            got = f"got {type(value).__name__} {str(value)[:40]!r}"
            raise UserError(f"{where}: `{name}` must be a string, {got}; quote it")
        if not value.strip():
            raise UserError(f"{where}: `{name}` is empty; {fields}")
    extra = {name: row[name] for name in row if name not in ("id", "problem", "answer")}
    return Problem(str(row.get("id", index)), row["problem"].strip(), row["answer"].strip(), extra)


def _dapo(row: dict) -> dict:
    """Problem, answer and id of a row of DAPO-Math, where the problem stands in a chat."""
    problem = row["prompt"]
    if isinstance(problem, list) and problem:
        problem = problem[-1]
    if isinstance(problem, dict):
        problem = problem.get("content")
    if isinstance(problem, str):
        problem = problem.strip().removeprefix(DAPO_PREFIX).removesuffix(DAPO_SUFFIX)
    plain = {"problem": problem, "answer": row["reward_model"].get("ground_truth")}
    if isinstance(row.get("extra_info"), dict) and "index" in row["extra_info"]:
        plain["id"] = row["extra_info"]["index"]
    return plain


def _rows(source: str, split: str) -> Iterator[tuple[str, dict]]:
    """(where, row) for each row of a file, a directory or a hub data set."""
    path = pathlib.Path(source)
    files = sorted([*path.rglob("*.parquet"), *path.rglob("*.jsonl")]) if path.is_dir() else [path]
    if not files:
        raise UserError(f"{source}: the directory holds no .parquet and no .jsonl file")
    if path.exists():
        for file in files:
            if file.suffix == ".parquet":
                yield from _hub_rows(str(file), "parquet", "train", data_files=str(file))
            else:
                yield from _json_rows(file)
    elif path.suffix in (".jsonl", ".json", ".parquet") or missing_path(source):
        raise UserError(f"{source}: no such file; check the path")
    else:
        yield from _hub_rows(source, source, split)


def _json_rows(file: pathlib.Path) -> Iterator[tuple[str, dict]]:
    where = str(file)
    try:
        for i, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
            where = f"{file}:{i}"
            if line.strip():
                yield where, json.loads(line)
    except (OSError, ValueError, RecursionError) as e:  # no UTF-8; or broken, too long, too deep
        why = f"not a JSON line ({e}); one object per line is wanted, or parquet"
        raise UserError(f"{where}: {why}") from None


def _hub_rows(source: str, hub: str, split: str, **options: Any) -> Iterator[tuple[str, dict]]:
    import datasets  # only hub ids and parquet need it

    datasets.disable_progress_bars()
    try:
        data = datasets.load_dataset(hub, split=split, **options)
        row = 0
        for part in data.iter(batch_size=10_000):  # DAPO has 1.8 million rows; one by one is slow
            for values in zip(*part.values()):
                yield f"{source} row {row}", dict(zip(part, values))
                row += 1
    except Exception as e:  # the library raises many kinds: offline, no such id, no such split
        fix = "a JSONL with `problem` and `answer` works offline"
        raise UserError(f"{source}: not read ({brief(e)}); {fix}") from None


SETS = {  # hub id, configuration, split, fields of problem and answer; the paper's three come first
    "aime24": ("HuggingFaceH4/aime_2024", None, "train", "problem", "answer"),
    "aime25": ("yentinglin/aime_2025", None, "train", "problem", "answer"),
    "hmmt25": ("MathArena/hmmt_feb_2025", None, "train", "problem", "answer"),
    "math500": ("HuggingFaceH4/MATH-500", None, "test", "problem", "answer"),
    "amc23": ("math-ai/amc23", None, "test", "question", "answer"),
    "gsm8k": ("openai/gsm8k", "main", "test", "question", "answer"),
}


def load_set(name: str, split: str) -> list[Problem]:
    """An evaluation set: one of SETS from the hub, or whatever `load_problems` reads.

    Numbers are written out as text; of GSM8K's answers only what follows #### is the answer.
    """
    if name not in SETS:
        return load_problems(name, split=split, unique=False)[0]
    hub, config, split, problem, answer = SETS[name]
    loaded = []
    for i, (where, row) in enumerate(_hub_rows(f"{name}: {hub}", hub, split, name=config)):
        gold = row.get(answer, "")
        if isinstance(gold, float) and gold.is_integer():
            gold = int(gold)
        plain = {"problem": row.get(problem), "answer": str(gold).rpartition("####")[2]}
        others = {
            field: value for field, value in row.items() if field != "id"
        }  # they go by their place
        loaded.append(_problem({**others, **plain}, where, i))
    return loaded


def fingerprint(problem: str) -> str:
    """48 bits of a problem's letters and digits; layout, case and LaTeX spacing do not matter."""
    letters = re.sub(r"[\W_]", "", problem.lower()).encode("utf-8", "replace")
    return hashlib.blake2b(letters, digest_size=6).hexdigest()


def refuse_overlap(problems: list[Problem], data: str, held_out: dict[str, list[Problem]]) -> None:
    """UserError when a training problem also stands in an evaluation set.

    The paper's three are known by fingerprint (eval_sets.json); `held_out` adds others by name.
    """
    prints_of = json.loads((pathlib.Path(__file__).parent / "eval_sets.json").read_text())
    for name, held_out_problems in held_out.items():
        prints_of[name] = [fingerprint(x.problem) for x in held_out_problems]
    set_of: dict[str, str] = {}
    for name, prints in prints_of.items():
        set_of |= dict.fromkeys(prints, name)
    overlap = []
    for x in problems:
        set_name = set_of.get(fingerprint(x.problem))
        if set_name:
            overlap.append(f"{x.id} ({set_name})")
    if overlap:
        some = ", ".join(overlap[:3])
        why = f"{len(overlap)} of its problems stand in an evaluation set: {some}"
        raise UserError(f"--data {data}: {why}; drop them, or say --allow-eval-overlap")


def read_quickly(source: str) -> bool:
    """Whether problems are JSON lines here, or a path without a file: read or refused at once."""
    path = pathlib.Path(source)
    if source in SETS:
        return False
    if path.exists():
        files = path.rglob("*") if path.is_dir() else [path]
        return not any(file.suffix == ".parquet" for file in files)
    return path.suffix in (".jsonl", ".json", ".parquet") or missing_path(source)


def load_training(cfg: Config) -> tuple[list[Problem], dict[str, int]]:
    """The training problems and their counts; none may stand in an evaluation set."""
    data, counts = load_problems(cfg.data)
    # Read now, not after the last step.
    held_out = {cfg.eval_data: load_set(cfg.eval_data, "test")} if cfg.eval_data else {}
    if not cfg.allow_eval_overlap:
        refuse_overlap(data, cfg.data, held_out)
    return data, counts


def minibatch(
    data: Sequence[Problem], cfg: Config, step: int, generations: int = 1
) -> list[tuple[Problem, int]]:
    """The global batch of a step, as (problem, sample number): a function of seed and step alone.

    step: from 1. An epoch is a permutation of the data. A problem comes `generations` times, and
    its sample numbers go on from epoch to epoch, since a batch may span two of them.
    """
    import torch  # not at the top: problems are also looked at before it is imported

    batch = []
    for place in range((step - 1) * cfg.batch_size, step * cfg.batch_size):
        epoch, i = divmod(place, len(data))
        generator = torch.Generator().manual_seed(cfg.seed * 1_000_003 + epoch)
        x = data[int(torch.randperm(len(data), generator=generator)[i])]
        for sample in range(epoch * generations, (epoch + 1) * generations):
            batch.append((x, sample))
    return batch
