r"""The skill bank: entries, index, prompts, and Algorithms 2-4, which build and evolve it.

    python skills.py --model Qwen/Qwen3-1.7B --data mine.jsonl --out bank.json       cold start
    python skills.py --out bank.json --server http://localhost:8000/v1               on a server

From here to class `Writer` the file needs NumPy and the standard library only. A model comes in as
a function: embed(texts) returns a float array [n, d], complete(prompts) returns one reply per
prompt. A `Writer` can stand in for `complete`. It logs each reply, and samples a new one when a
prompt comes again (D4).

Entries are plain dicts with the paper's field names (App. C). Code replaces an entry, and never
edits one in place. `key` names one of the two lists: "general_skills" or "common_mistakes".

Dimension key: n entries of a list, d embedding size.
"""

import collections
import functools
import json
import os
import pathlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

# ------------------------------------------------------------------------------------- the bank

FIELDS = {  # Tab. 5; an entry is embedded in this order (S10)
    "general_skills": ("title", "principle", "when_to_apply"),
    "common_mistakes": ("description", "why_it_happens", "how_to_avoid"),
}
IDS = {"general_skills": "skill_id", "common_mistakes": "mistake_id"}
PREFIX = {"general_skills": "gen_", "common_mistakes": "err_"}  # of an id (Alg. 3, line 12)
DYNAMIC = "dyn_"  # stands before the prefix of an entry that online evolution added
SHORT = {"general_skills": "skills", "common_mistakes": "mistakes"}
as_json = functools.partial(json.dumps, indent=2, ensure_ascii=False)  # in prompts and files


@dataclass(frozen=True)
class SkillPair:
    """The k-th teacher's guidance g_k + e_k (Eq. 3) and its two cosine similarities (Eq. 6).

    Another retriever should keep its scores on the scale of cosines, in [-1, 1]: Eq. 6 takes a
    softmax over (s_g + s_e) / 2 without a temperature, so a lead of 0.1 weighs a teacher 11% more.
    """

    skill: dict
    mistake: dict
    s_g: float
    s_e: float


@dataclass
class SkillBank:
    """B = {G, E} (§2.1). `extra` holds a file's unknown keys, so load and save lose nothing."""

    general_skills: list[dict]
    common_mistakes: list[dict]
    metadata: dict = field(default_factory=dict)
    extra: dict = field(default_factory=dict)
    _index: dict = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def load(cls, path: str | pathlib.Path) -> "SkillBank":
        """Read a bank's JSON. ValueError names the file, the entry and the wrong field."""
        try:
            data = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as e:
            raise ValueError(f"bank {path}: cannot be read as JSON ({e}); is it a bank?") from None
        if not isinstance(data, dict):
            raise ValueError(f"bank {path}: a JSON object is wanted, got {type(data).__name__}")
        for key in FIELDS:
            if not isinstance(data.get(key), list):
                raise ValueError(f"bank {path}: `{key}` must be a list; found: {', '.join(data)}")
            _check_entries(data[key], key, f"bank {path}: {key}")
        metadata = data.pop("metadata", {})
        if not isinstance(metadata, dict) or not isinstance(metadata.get("updates", []), list):
            raise ValueError(f"bank {path}: `metadata` must be an object, `updates` in it a list")
        return cls(data.pop("general_skills"), data.pop("common_mistakes"), metadata, extra=data)

    def save(self, path: str | pathlib.Path) -> None:
        """Write the bank as JSON. A kill leaves the old file or the new one, never half of one.

        Half of a surrogate pair, which UTF-8 cannot hold, is written as its JSON escape.
        """
        data = {"general_skills": self.general_skills, **self.extra}
        data |= {"common_mistakes": self.common_mistakes, "metadata": self.metadata}
        text, path = as_json(data), pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.tmp")
        try:
            with open(unfinished, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        except OSError as e:  # the error of a full disk does not name the file
            unfinished.unlink(missing_ok=True)
            raise OSError(f"bank {path}: not saved ({e})") from None

    @property
    def sizes(self) -> str:
        return f"{len(self.general_skills)} skills and {len(self.common_mistakes)} mistakes"

    def collection(self, key: str) -> list[dict]:
        """One of the two lists."""
        return self.general_skills if key == "general_skills" else self.common_mistakes

    def retrieve(self, problem: str, k: int, embed: Callable[[list[str]], Any]) -> list[SkillPair]:
        """The min(k, |G|, |E|) best pairs for a problem, paired rank by rank (Eq. 2, S8).

        Scores are cosine similarities. Equal scores keep the bank's order. A bank embeds an entry
        once per `embed`. If one list is empty, there are no pairs. ValueError on k < 1.
        """
        if k < 1:
            raise ValueError(f"retrieve (Eq. 2) needs k >= 1, got {k}")
        if not self.general_skills or not self.common_mistakes:
            return []
        query_d = _normalized(embed([problem]))[0]
        skills = self._best("general_skills", query_d, k, embed)
        mistakes = self._best("common_mistakes", query_d, k, embed)
        return [SkillPair(g, e, s_g, s_e) for (g, s_g), (e, s_e) in zip(skills, mistakes)]

    def _best(
        self, key: str, query_d: np.ndarray, k: int, embed: Callable[[list[str]], Any]
    ) -> list[tuple[dict, float]]:
        """The k entries of a list that are nearest to the query, best first, with their scores."""
        entries = self.collection(key)
        source, matrix_nd = self._index.get(key, (None, None))
        if source != (embed, entries):
            matrix_nd = _normalized(embed([entry_text(e, key) for e in entries]))
            self._index[key] = (embed, list(entries)), matrix_nd
        scores_n = matrix_nd @ query_d
        order = np.argsort(-scores_n, kind="stable")[:k]
        return [(entries[i], float(scores_n[i])) for i in order]


def _check_entries(entries: list, key: str, where: str) -> None:
    """ValueError unless every entry has its id and its three fields (App. C), and ids differ."""
    seen_ids = set()
    for i, entry in enumerate(entries):
        values = entry if isinstance(entry, dict) else {}
        names = (IDS[key], *FIELDS[key])
        missing = [name for name in names if not isinstance(values.get(name), str)]
        if missing:
            raise ValueError(f"{where}[{i}] lacks the strings {', '.join(missing)} (App. C)")
        if values[IDS[key]] in seen_ids or not isinstance(values.get("sources", []), list):
            raise ValueError(f"{where}[{i}] needs its own id, and a list for any `sources`")
        seen_ids.add(values[IDS[key]])


def entry_text(entry: dict, key: str) -> str:
    """The text that is embedded (S10): "title. principle. when" or "description. why. how"."""
    return ". ".join(entry[name] for name in FIELDS[key])


def _normalized(vectors: Any) -> np.ndarray:
    x_nd = np.asarray(vectors, dtype=np.float32)
    return x_nd / np.maximum(np.linalg.norm(x_nd, axis=-1, keepdims=True), 1e-12)


# -------------------------------------------------------------------------------------- prompts

PROMPTS = pathlib.Path(__file__).parent / "prompts"  # the paper's templates
_folder = PROMPTS


def use_prompts(folder: str) -> None:
    """Take the templates of this directory from now on; "" stands for the paper's, in prompts/.

    A process has one set of templates. ValueError unless the directory has every template with
    the paper's placeholders.
    """
    global _folder
    if folder:
        _check_prompts(folder)
    _folder = pathlib.Path(folder) if folder else PROMPTS
    template.cache_clear()


def _check_prompts(folder: str) -> None:
    """ValueError unless `use_prompts` can take the templates of a directory."""
    texts = {}
    for paper in sorted(PROMPTS.glob("*.txt")):
        try:
            text = (pathlib.Path(folder) / paper.name).read_text(encoding="utf-8")
        except (OSError, ValueError) as e:
            rule = "the directory must have all files that prompts/ has"
            raise ValueError(f"prompts {folder}: {paper.name} not read ({e}); {rule}") from None
        wanted = dict.fromkeys(re.findall(r"\{[a-z_.]+\}", paper.read_text(encoding="utf-8")))
        missing = [placeholder for placeholder in wanted if placeholder not in text]
        if missing:
            raise ValueError(f"prompts {folder}: {paper.name} lacks {', '.join(missing)}")
        texts[paper.stem] = text
    parts = texts["teacher"].split("\n\n", 3)
    shaped = len(parts) == 4 and parts[3].strip() == texts["student"].strip()
    for part, start in zip(parts[1:3], ("{skill.", "{mistake.")):
        heading, _, line = part.partition("\n")
        shaped = shaped and "{" not in heading and start in line
    if not shaped:
        rule = "an opening, a heading and a line of the skill, a heading and a line of the mistake"
        rule += ", each followed by an empty line, and then student.txt"
        raise ValueError(f"prompts {folder}: teacher.txt must be: {rule}")


@functools.cache
def template(name: str) -> str:
    """A template: word for word the paper's, or that of `use_prompts`."""
    return (_folder / f"{name}.txt").read_text(encoding="utf-8")


def render(name: str, values: dict[str, str]) -> str:
    """A template with each {name} replaced by its value."""
    return _fill(template(name), values)


def _fill(text: str, values: dict[str, str]) -> str:
    r"""One pass: values are never expanded themselves, \boxed{} stays, {{}} becomes {} (S9)."""
    replaced = {"{{}}": "{}"} | {f"{{{name}}}": value for name, value in values.items()}
    pattern = "|".join(map(re.escape, replaced))
    return re.sub(pattern, lambda match: replaced[match[0]], text)


def render_student(problem: str) -> str:
    """The plain prompt x (Fig. 6): the problem and nothing else."""
    return render("student", {"problem": problem})


def render_teacher(pair: SkillPair, problem: str) -> str:
    """The k-th teacher's prompt c_k(x) = g_k + e_k + x (Eq. 3, Fig. 6; D1)."""
    return render_skills([pair], problem)


def render_skills(pairs: Sequence[SkillPair], problem: str) -> str:
    """All pairs in one prompt, best first (S14): the teacher's, with one bullet per entry."""
    if not pairs:
        return render_student(problem)
    guidance = []
    for pair in pairs:
        values = {f"skill.{name}": text for name, text in pair.skill.items()}
        values |= {f"mistake.{name}": text for name, text in pair.mistake.items()}
        guidance.append(values)
    opening, skills, mistakes = template("teacher").split("\n\n")[:3]  # the rest: the student's
    blocks = [opening]
    for block in (skills, mistakes):
        heading, bullet = block.split("\n", 1)
        bullets = [_fill(bullet, values) for values in guidance]
        blocks.append("\n".join([heading, *bullets]))
    return "\n\n".join([*blocks, render_student(problem)])


def render_extraction(memory: dict, key: str) -> str:
    """Ask for a success's general skills or a failure's common mistakes (Alg. 2, App. D.2)."""
    hidden = ("problem_id", "made_with", "truncated")
    shown = {name: memory[name] for name in memory if name not in hidden}
    prompt = render(f"extract_{SHORT[key]}", {"memory_json": as_json(shown)})
    first, second, third = FIELDS[key]
    form = f'Each item is an object with the string fields "{first}", "{second}" and "{third}".'
    return f"{prompt}\n{form}"  # S13


def render_merge(items: list[dict], key: str) -> str:
    """Ask to merge a group of items (Alg. 3, line 5): their three fields and nothing else."""
    shown = [item_of(entry, FIELDS[key]) or entry for entry in items]
    return render(f"merge_{SHORT[key]}", {"items_json": as_json(shown)})


# ------------------------------------------------------------------------------ reading replies
# A reply may put prose, thinking and code fences around its JSON, LaTeX into its strings, a comma
# too many, or break off. `read_items` does not know what the items are about.

MAX_REPLY = 100_000  # characters of a reply that are read
MAX_EFFORT = 1_000_000  # characters decoded in vain: "[[[[..." would take quadratic time
_OPENING = re.compile(r"[{\[]")
# LaTeX commands begin like JSON's \b, \f, \n, \r and \t, of which models mean only the line feed
# and the tab. Commands that begin with n:
_COMMANDS = (
    "nabla|natural|ne|nearrow|neg|neq|newline|nexists|ngeq|ngtr|ni|nleq|nleqslant|nless|nmid|"
    "nolimits|nonumber|not|notin|nparallel|nprec|nsim|nsubseteq|nsucceq|nu|num|nwarrow"
)
# A backslash; group 1 is the whole escape if JSON reads it as the model meant it.
_BACKSLASH = re.compile(
    rf'(\\[\\"/]|\\u[0-9a-fA-F]{{4}}|\\(?!(?:{_COMMANDS})(?![a-zA-Z]))n|\\t(?![a-zA-Z]))|\\'
)


def parse_json_items(text: str, key: str) -> list[dict]:
    """The readable items of a reply, [] when there are none; see `read_items`."""
    return read_items(text, key, FIELDS[key])[0]


def read_items(text: str, key: str, fields: Sequence[str]) -> tuple[list[dict], bool]:
    """A reply's items, and whether it is whole: not broken off, and every item in it valid.

    key: the name under which an object may hold the list of items. fields: the strings that make a
    valid item, which loses all others. Thinking, code fences and prose are skipped; LaTeX
    backslashes and trailing commas are repaired; a single object counts as a list of one; a reply
    that was cut off gives its complete items. Never raises on a str.
    """
    after_thinking = text.rpartition("</think>")[2].partition("<think>")[0][:MAX_REPLY]
    escaped = _BACKSLASH.sub(lambda match: match[1] or r"\\", after_thinking)
    without_commas = re.sub(r",(\s*[}\]])", r"\1", escaped)
    # Removing commas can spoil a string that holds ",]", so both are read and the better counts.
    readings = [_scan(escaped, key, fields), _scan(without_commas, key, fields)]
    return max(readings, key=lambda reading: (reading[1], len(reading[0])))


def _scan(text: str, key: str, fields: Sequence[str]) -> tuple[list[dict], bool]:
    """`read_items` of the JSON in a text: decode a value at each opening bracket in turn."""
    decoder = json.JSONDecoder(strict=False)
    # A list promises items, so an invalid entry in it makes the reply broken. An object on its own
    # promises nothing: it is an item, or we look inside it.
    listed: list[Any] = []
    standalone: list[Any] = []
    broken, at, effort = False, 0, 0
    while effort < MAX_EFFORT and (opening := _OPENING.search(text, at)):
        at = opening.end()
        try:
            value, end = decoder.raw_decode(text, opening.start())
        except (ValueError, RecursionError) as e:
            reached = e.pos if isinstance(e, json.JSONDecodeError) else len(text)
            effort += reached - at + 300  # an exception has its own price
            # A bracket before {, [ or a quote is JSON that broke off; any other is prose.
            broken = broken or text[at : at + 100].lstrip()[:1] in ("{", "[", '"')
            continue
        if isinstance(value, dict) and key in value:
            listed += value[key] if isinstance(value[key], list) else [value[key]]
        elif isinstance(value, list) and any(isinstance(v, dict) for v in value):
            listed += value
        elif item_of(value, fields):
            standalone.append(value)
        else:  # some other value: look inside
            effort += end - at
            continue
        at = end
    items = []
    for value in listed + standalone:
        item = item_of(value, fields)
        if item:
            items.append(item)
    whole = not broken and len(items) == max(1, len(listed))
    each_once = {tuple(item.values()): item for item in items}
    return list(each_once.values()), whole


def item_of(value: Any, fields: Sequence[str]) -> dict | None:
    """An item's own fields, stripped; None when one is missing, empty or not a string."""
    values = value if isinstance(value, dict) else {}
    texts = [values.get(name) for name in fields]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        return None
    return {name: _encodable(values[name].strip()) for name in fields}


def _encodable(text: str) -> str:
    """The text with "?" for halves of surrogate pairs, which no file or terminal accepts."""
    return text.encode("utf-8", "replace").decode()


# -------------------------------------------------------------------- asking for items (Algs. 2-4)


@dataclass(frozen=True)
class Question:
    """A prompt that asks for items."""

    prompt: str
    key: str  # of the list that the items belong to
    shown: int = 0  # items that a merge shows; 0 for an extraction

    @property
    def kind(self) -> str:
        return f"{'merge' if self.shown else 'extract'}_{SHORT[self.key]}"


# complete(prompts) -> replies; or an object that can `answer` questions and `record` what came of
# each reply, as a Writer does. An object with these two methods must not be callable.
Complete: TypeAlias = "Callable[[list[str]], list[str]] | Writer"


def _ask(questions: list[Question], complete: Complete, stage: str) -> list[list[dict]]:
    """The items of each question's reply; [] after two replies that cannot be used (D4).

    A reply can be used if it has an item. A merge's reply must also be whole, with no more items
    than the merge showed. The first reply is greedy, so a second one helps only because it is
    sampled. After that the caller falls back as the paper says: an extraction gives nothing, a
    merge leaves its group as it was.
    """
    items_of_each: list[list[dict]] = [[] for _ in questions]
    for attempt in (1, 2):
        unanswered = [i for i, items in enumerate(items_of_each) if not items]
        if not unanswered:
            break
        answers = _answers([questions[i] for i in unanswered], complete, stage)
        for i, (reply, cut) in zip(unanswered, answers, strict=True):
            question = questions[i]
            items, whole = read_items(reply, question.key, FIELDS[question.key])
            row = {"kind": question.kind, "attempt": attempt, "items": len(items)}
            if items and (not question.shown or (whole and len(items) <= question.shown)):
                items_of_each[i] = items
                row["outcome"] = "read" if whole else "repaired"
            else:
                row["outcome"] = "retried" if attempt == 1 else "lost"
                row["cause"] = "cut off" if cut else _cause(reply, items, whole)
            if not callable(complete):
                complete.record(question, {**row, "reply": reply})
    return items_of_each


def _answers(questions: list[Question], complete: Complete, stage: str) -> list[tuple[str, bool]]:
    """A reply to each question, and whether a limit cut it off. A plain function has no limit."""
    if callable(complete):
        return [(reply, False) for reply in complete([question.prompt for question in questions])]
    return complete.answer(questions, stage)


def _cause(reply: str, items: list[dict], whole: bool) -> str:
    """Why a reply that was not cut off cannot be used."""
    if items:
        return "more items than it was shown" if whole else "not whole"
    return "no valid item" if re.search(r"[{\[]\s*[\"{}\]]", reply) else "no JSON"


# ---------------------------------------------------------------- Algorithm 3: hierarchical merging


def merge(
    items: list[dict], key: str, complete: Complete, group_size: int = 32, patience: int = 3
) -> tuple[list[dict], list[dict]]:
    """Hierarchical merging (Alg. 3): the merged entries under new ids, and a record per layer."""
    merged, layers = merge_lists({key: items}, complete, group_size, patience)
    return merged[key], layers[key]


def merge_lists(
    lists: dict[str, list[dict]], complete: Complete, group_size: int, patience: int
) -> tuple[dict[str, list[dict]], dict[str, list[dict]]]:
    """Algorithm 3 on one list or on both. A layer asks for the merges of both lists together.

    lists: the candidates C by key. group_size: H. patience: P. A group stays as it is unless its
    reply is whole, has an item (S11), and has no more items than the group: a merge may merge, but
    never lose or add. An entry's `sources` follow it. ValueError on H < 2 or P < 1.
    """
    if group_size < 2 or patience < 1:
        sizes = f"{group_size} and {patience}"
        raise ValueError(f"merge (Alg. 3) needs group_size >= 2 and patience >= 1, got {sizes}")
    current = dict(lists)
    layers: dict[str, list[dict]] = {key: [] for key in lists}
    stagnant = dict.fromkeys(lists, 0)  # line 1
    unfinished = list(lists)
    while unfinished:  # line 2
        groups = []
        for key in unfinished:
            for start in range(0, len(current[key]), group_size):  # line 3
                groups.append((key, current[key][start : start + group_size]))
        questions = []
        for key, group in groups:
            if len(group) > 1:  # line 4
                questions.append(Question(render_merge(group, key), key, len(group)))  # line 5
        stage = f"merging, layer {len(layers[unfinished[0]]) + 1}"
        replies = iter(_ask(questions, complete, stage))
        merged: dict[str, list[dict]] = {key: [] for key in unfinished}
        for key, group in groups:
            items = next(replies) if len(group) > 1 else []
            merged[key] += _merged_group(group, items, key)  # line 8
        for key in unfinished:
            before, after = len(current[key]), len(merged[key])
            num_groups = -(-before // group_size)  # rounded up
            stagnant[key] = 0 if after < before else stagnant[key] + 1  # line 9
            reason = None
            if num_groups <= 1:  # line 11
                reason = "root_group_reached"
            elif stagnant[key] >= patience:
                reason = "stagnation_patience_reached"
            layers[key].append(
                {
                    "layer_index": len(layers[key]),
                    "input_items": before,
                    "num_groups": num_groups,
                    "output_items": after,
                    "stopped_reason": reason,
                    "stagnant_layers": stagnant[key],
                }
            )
            current[key] = merged[key]  # line 10
        unfinished = [key for key in unfinished if not layers[key][-1]["stopped_reason"]]
    return {key: _numbered(entries, key) for key, entries in current.items()}, layers  # line 13


def _merged_group(group: list[dict], items: list[dict], key: str) -> list[dict]:
    """What a group becomes: its reply's items with their sources, or itself without one."""
    if not items:
        return group  # line 6
    merged = []
    for item in items:
        unchanged = [entry for entry in group if item_of(entry, FIELDS[key]) == item]
        merged.append(_with_sources(item, unchanged or group))
    return merged


def _numbered(entries: list[dict], key: str) -> list[dict]:
    """Entries under new ids; exact duplicates become one, with all sources (Alg. 3, line 12)."""
    twins: dict[tuple, list[dict]] = {}
    for entry in entries:
        texts = tuple(entry.get(name) for name in FIELDS[key])
        twins.setdefault(texts, []).append(entry)
    numbered = []
    for number, same in enumerate(twins.values(), 1):
        entry = _with_sources(same[0], same)
        entry.pop(IDS[key], None)
        numbered.append({IDS[key]: f"{PREFIX[key]}{number:03d}", **entry})
    return numbered


def _with_sources(entry: dict, parents: list[dict]) -> dict:
    """A copy of an entry with the sources of its parents, if they have any."""
    sources = set()
    for parent in parents:
        sources.update(parent.get("sources", []))
    return {**entry, "sources": sorted(sources)} if sources else dict(entry)


# ------------------------------------------------------------------------ Algorithm 2: cold start


def memory_of(x: Any, with_answer: bool = False) -> dict:
    """A memory record (Alg. 2, line 5); a long text is cut to its beginning and end (S21).

    x: a rollout, or any object with .problem, .text, .r and .pred. with_answer: show the reference
    answer .gold, too (D3).
    """
    text = x.text.rpartition("</think>")[2].strip()
    lines = [line.strip()[:200] for line in text.split("\n") if line.strip()]
    feedback = f"The verifier {'accepted' if x.r > 0 else 'rejected'} the final answer."
    if x.pred is None:
        feedback = "The attempt gave no final answer in a box."
    memory = {
        "problem_id": getattr(x, "problem_id", ""),
        "problem": x.problem,
        "completion": text if len(text) <= 2000 else f"{text[:1000]}\n[...]\n{text[-1000:]}",
        "reward": x.r,
        "predicted_answer": x.pred,
        "trajectory_summary": lines if len(lines) <= 8 else lines[:4] + lines[-4:],
        "feedback": feedback,
    }
    return {**memory, "reference_answer": x.gold} if with_answer else memory


def extract(memories: list[dict], complete: Complete) -> dict[str, list[dict]]:
    """Candidates (Alg. 2, lines 8-14): up to three skills per success and mistakes per failure."""
    successes = [memory for memory in memories if memory["reward"] > 0]  # line 8
    failures = [memory for memory in memories if memory["reward"] <= 0]
    questions = []
    for key, group in (("general_skills", successes), ("common_mistakes", failures)):
        questions += [Question(render_extraction(memory, key), key) for memory in group]
    items_of_each = _ask(questions, complete, "extracting")
    candidates: dict[str, list[dict]] = {key: [] for key in FIELDS}
    for memory, question, items in zip(successes + failures, questions, items_of_each):
        source = memory.get("problem_id")
        for item in items[:3]:  # lines 10 and 13
            candidates[question.key].append({**item, "sources": [source]} if source else item)
    return candidates


def cold_start(
    memories: list[dict], complete: Complete, *, group_size: int = 32, patience: int = 3
) -> SkillBank:
    """The initial bank from memory records (Alg. 2, lines 8-16)."""
    candidates = extract(memories, complete)
    merged, layers = merge_lists(candidates, complete, group_size, patience)  # line 15
    metadata: dict[str, Any] = {
        "source": f"cold start from {len(memories)} seed solutions",
        "seed_solutions": len(memories),
        "right_seed_solutions": sum(memory["reward"] > 0 for memory in memories),
        "merge_group_size": group_size,
        "merge_stagnation_patience": patience,
    }
    for key in FIELDS:
        metadata[f"input_{key}"] = len(candidates[key])
        metadata[f"output_{key}"] = len(merged[key])
    metadata["general_merge_layers"] = layers["general_skills"]
    metadata["common_mistake_merge_layers"] = layers["common_mistakes"]
    return SkillBank(merged["general_skills"], merged["common_mistakes"], metadata)  # line 16


# ------------------------------------------------------------------- Algorithm 4: online evolution


def evolve(
    bank: SkillBank,
    window: Sequence[Any],
    step: int,
    complete: Complete,
    *,
    evolve_every: int = 25,
    success_gate: float = 0.8,
    max_new_items: int = 5,
    dynamic_capacity: int = 30,
    group_size: int = 32,
    patience: int = 3,
    memory_answer: bool = False,
) -> SkillBank:
    """The bank after online evolution (Alg. 4); the same object if no evolution is due.

    window: W, all rollouts since an evolution was last due (D2), as `memory_of` takes them.
    evolve_every: F; 0 disables. success_gate: γ. max_new_items: N, which both lists share (S12).
    dynamic_capacity: C, per list; what a merge puts first stays. Static entries are never touched,
    and a candidate with the text of one is dropped (D11).
    """
    if not window or not evolve_every or step % evolve_every:  # line 1
        return bank
    success = sum(x.r > 0 for x in window) / len(window)  # line 4
    if success >= success_gate:  # line 5
        return bank
    memories = [memory_of(x, memory_answer) for x in window]
    candidates = extract(memories, complete)  # lines 8-10
    update: dict[str, Any] = {"step": step, "success": success}
    static, before, fresh = {}, {}, {}
    for key in FIELDS:
        entries = bank.collection(key)
        static[key] = [e for e in entries if not e[IDS[key]].startswith(DYNAMIC)]
        before[key] = [e for e in entries if e[IDS[key]].startswith(DYNAMIC)]
        fresh[key] = _without_copies(candidates[key], static[key], key)
        update[f"candidate_{key}"] = len(candidates[key])
        update[f"copied_{key}"] = len(candidates[key]) - len(fresh[key])
    new, _ = merge_lists(fresh, complete, group_size, patience)  # line 11
    update |= {f"merged_{key}": len(new[key]) for key in FIELDS}
    both = {key: before[key] + new[key] for key in FIELDS if new[key]}
    merged, _ = merge_lists(both, complete, group_size, patience)  # line 12
    dynamic = dict(before)
    for key, entries in merged.items():
        originals = _without_copies(entries, static[key], key)
        update[f"copied_{key}"] += len(entries) - len(originals)
        dynamic[key] = [{**e, IDS[key]: f"{DYNAMIC}{e[IDS[key]]}"} for e in originals]
    dynamic = {key: dynamic[key][:dynamic_capacity] for key in FIELDS}  # line 13: C
    growth = {key: max(0, len(dynamic[key]) - len(before[key])) for key in FIELDS}
    while sum(growth.values()) > max_new_items:  # line 13: N, from the list that grows more
        larger = max(growth, key=lambda key: growth[key])
        growth[larger] -= 1
    for key in FIELDS:
        dynamic[key] = dynamic[key][: len(before[key]) + growth[key]]
        update[f"dynamic_{key}"] = len(dynamic[key])
        update[f"net_new_{key}"] = len(dynamic[key]) - len(before[key])
    metadata = {**bank.metadata, "updates": [*bank.metadata.get("updates", []), update]}
    skills, mistakes = (static[key] + dynamic[key] for key in FIELDS)
    return SkillBank(skills, mistakes, metadata, bank.extra)  # line 14


def _without_copies(entries: list[dict], static: list[dict], key: str) -> list[dict]:
    """The entries whose text, whatever its case, no static entry has (D11)."""
    texts = {entry_text(e, key).casefold() for e in static}
    return [e for e in entries if entry_text(e, key).casefold() not in texts]


# ----------------------------------------------------------------------------- lines about a bank


def bank_line(bank: SkillBank, teachers: int) -> str:
    """What a bank holds, what its cold start made it from, and whether K teachers get a pair."""
    sizes = len(bank.general_skills), len(bank.common_mistakes)
    line = f"bank: {bank.sizes}"
    if "seed_solutions" in bank.metadata:
        line = "bank: {} skills (from {input_general_skills} candidates) and {} mistakes"
        line += " (from {input_common_mistakes}), written from {seed_solutions} solutions"
        line += ", {right_seed_solutions} correct"
        line = line.format(sizes[0], sizes[1], **bank.metadata)
    if bank.metadata.get("lost_replies"):
        line += f"; {describe_lost_replies(bank.metadata['lost_replies'])}"
    if min(sizes) == 0:
        line += "; no pair, no teacher, no loss (S8)"
    elif min(sizes) < teachers:
        line += f"; enough for {min(sizes)} teachers, not for {teachers} (S8)"
    return line


def evolution_line(
    old: SkillBank, new: SkillBank, window: list[dict], lost_by_cause: dict[str, int]
) -> str:
    """What an evolution did to the bank, or why it did nothing. window: rows with "r"."""
    success = sum(row["r"] > 0 for row in window) / len(window)
    if new is old:
        return f"bank: success {success:.2f} is not below the gate: kept as it is"
    line, update = f"bank: success {success:.2f}", new.metadata["updates"][-1]
    for key in FIELDS:
        line += f"; {update[f'candidate_{key}']} candidate {SHORT[key]}"
        line += f", {update[f'merged_{key}']} after merging"
        line += f", {update[f'copied_{key}']} copies of static entries dropped"
        line += f", net new {update[f'net_new_{key}']}"
    return f"{line}; {describe_lost_replies(lost_by_cause)}"


def describe_lost_replies(by_cause: dict[str, int]) -> str:
    """How many replies could not be used twice in a row, by cause."""
    causes = ", ".join(f"{n} {cause}" for cause, n in by_cause.items())
    return f"{sum(by_cause.values())} replies lost" + (f" ({causes})" if causes else "")


# ------------------------------------------------------------------------ a model as `complete`
# What follows needs rollout.py, and `main` sgsd.py.


@dataclass
class Writer:
    """The model that writes the bank: it answers extraction and merge prompts, thinking off (D4).

    sample(rows, sampling, stage) -> {row index: sampled ids}: decodes `rollout.Row`s, on every
    rank, under a progress bar with the name `stage`. log(row) stores what came of a reply. Every
    rank calls a writer with the same prompts and gets the same replies.
    """

    tokenizer: Any
    stops: list[int]  # ids that end a reply
    sample: Callable[[list, Any, str], dict[int, list[int]]]
    log: Callable[[dict], None]
    reply_tokens: int  # limit of an extraction's reply
    seed: int
    step: int = 0  # the training step that the replies belong to
    counts: collections.Counter[str] = field(default_factory=collections.Counter)  # by outcome
    lost: collections.Counter[str] = field(default_factory=collections.Counter)  # by cause
    requests: collections.Counter[str] = field(default_factory=collections.Counter)  # by prompt

    def answer(self, questions: list[Question], stage: str) -> list[tuple[str, bool]]:
        """A reply to each question, and whether a limit cut it off.

        The reply to a new prompt is greedy. A prompt that comes again since the last `take` gets a
        sampled reply, another one each time (D4). A draw depends only on the seed, the prompt and
        how often it came before.
        """
        import rollout

        greedy: list[rollout.Row] = []
        sampled: list[rollout.Row] = []
        for i, question in enumerate(questions):
            times_before = self.requests[question.prompt]
            ids = rollout.chat_ids(self.tokenizer, question.prompt, thinking=False)
            key = rollout.sample_key(self.seed, 0, question.prompt, times_before)
            row = rollout.Row(i, ids, key, self.limit(ids, question.shown > 0))
            (sampled if times_before else greedy).append(row)
        self.requests.update({question.prompt for question in questions})
        replies: dict[int, list[int]] = {}
        if greedy:
            replies |= self.sample(greedy, rollout.Sampling(temperature=0.0), stage)
        if sampled:
            replies |= self.sample(sampled, rollout.Sampling(), stage)
        answers = []
        for i in range(len(questions)):
            cut = not replies[i] or replies[i][-1] not in self.stops
            answers.append((rollout.text_of(self.tokenizer, replies[i]), cut))
        return answers

    def limit(self, prompt_ids: list[int], merging: bool) -> int:
        """The most tokens of a reply (D4): for a merge those of its prompt and a quarter more.

        That is enough to repeat every item of the prompt, even in a wordier layout.
        """
        return len(prompt_ids) * 5 // 4 if merging else self.reply_tokens

    def record(self, question: Question, row: dict) -> None:
        """Count the outcome of a reply, and log the reply with its prompt."""
        self.counts[row["outcome"]] += 1
        if row["outcome"] == "lost":
            self.lost[row["cause"]] += 1
        self.log({"step": self.step, **row, "prompt": question.prompt})

    def take(self) -> dict[str, int]:
        """The outcomes since the last call, which count no more; every prompt is new again."""
        counts = {name: self.counts[name] for name in ("read", "repaired", "retried", "lost")}
        self.counts.clear()
        self.lost.clear()
        self.requests.clear()
        return counts


def main(argv: Sequence[str] | None = None) -> None:
    """python skills.py --out bank.json: build a bank by cold start, under sgsd.py's settings."""
    from lib import config

    config.end_at_signals("Run the same command to continue: the seed solutions are kept.")
    config.parse(argv, __doc__, program="skills.py")  # a wrong flag ends before torch is imported
    import distributed
    import sgsd

    distributed.leave(lambda: sgsd.write_bank(argv))


if __name__ == "__main__":
    import skills  # sgsd.py uses this module: one copy of it holds the templates

    skills.main()
