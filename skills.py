r"""The skill bank: entries, index, prompts, and Algorithms 2-4, which build and evolve it.

A model comes in as a function: embed(texts) returns a float array [n, d], complete(prompts) returns
one reply per prompt. `Writer` makes a policy into `complete`.

Entries are plain dicts with the paper's field names (App. C). Code replaces an entry, and never
edits one in place. `key` names one of the two lists: "general_skills" or "common_mistakes".

Dimension key: n entries of a list, d embedding size.
"""

import collections
import functools
import itertools
import json
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
    """B = {G, E} (§2.1). `extra` holds a file's unknown keys, so load and save lose nothing.

    window: W of Algorithm 4, the rollouts since the last multiple of F, which a run goes on with.
    A file has it only where it is not empty.
    """

    general_skills: list[dict]
    common_mistakes: list[dict]
    metadata: dict = field(default_factory=dict)
    extra: dict = field(default_factory=dict)
    window: list[dict] = field(default_factory=list)
    _index: dict = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def load(cls, path: str | pathlib.Path) -> "SkillBank":
        """Read a bank's JSON. ValueError names the file, the entry and the wrong field."""
        try:
            data = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise ValueError(f"bank {path}: cannot be read: {e}") from None
        for key in FIELDS:
            if not isinstance(data, dict) or not isinstance(data.get(key), list):
                raise ValueError(f"bank {path}: it needs an object with the list `{key}`")
            _check_entries(data[key], key, f"bank {path}: {key}")
        lists = data.pop("general_skills"), data.pop("common_mistakes")
        metadata, window = data.pop("metadata", {}), data.pop("window", [])
        if not isinstance(metadata, dict) or not isinstance(metadata.get("updates", []), list):
            raise ValueError(f"bank {path}: `metadata` must be an object, its `updates` a list")
        return cls(*lists, metadata, extra=data, window=window)

    def save(self, path: str | pathlib.Path) -> None:
        """Write the bank as JSON: the old file or the new one is there, never half of one.

        Half of a surrogate pair, which UTF-8 cannot hold, is written as its JSON escape.
        """
        data = {"general_skills": self.general_skills, **self.extra}
        data |= {"common_mistakes": self.common_mistakes, "metadata": self.metadata}
        data |= {"window": self.window} if self.window else {}
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.tmp")
        with open(unfinished, "w", encoding="utf-8", errors="backslashreplace") as f:
            f.write(as_json(data))
            f.flush()
            os.fsync(f.fileno())
        os.replace(unfinished, path)

    def remember(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows of rollouts.jsonl to the window: what `memory_of` reads of them."""
        names = ("problem_id", "problem", "text", "r", "pred", "gold")
        self.window += [{name: row[name] for name in names} for row in rows]

    @property
    def counts(self) -> dict[str, int]:
        """For metrics.jsonl."""
        skills, mistakes = len(self.general_skills), len(self.common_mistakes)
        return {"bank_skills": skills, "bank_mistakes": mistakes}

    @property
    def sizes(self) -> str:
        return f"{len(self.general_skills)} skills and {len(self.common_mistakes)} mistakes"

    def collection(self, key: str) -> list[dict]:
        """One of the two lists."""
        return self.general_skills if key == "general_skills" else self.common_mistakes

    def retrieve(self, problem: str, k: int, embed: Callable[[list[str]], Any]) -> list[SkillPair]:
        """The min(k, |G|, |E|) best pairs for a problem, paired rank by rank (Eq. 2, S8).

        Scores are cosine similarities. Equal scores keep the bank's order. A bank embeds an entry
        once per `embed`. If one list is empty, there are no pairs.
        """
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
    names, seen_ids = (IDS[key], *FIELDS[key]), set()
    for i, entry in enumerate(entries):
        values = entry if isinstance(entry, dict) else {}
        missing = [name for name in names if not isinstance(values.get(name), str)]
        if missing:
            raise ValueError(f"{where}[{i}] lacks the strings {', '.join(missing)} (App. C)")
        sources = entry.get("sources") or []
        if not isinstance(sources, list) or not all(isinstance(x, str) for x in sources):
            raise ValueError(f"{where}[{i}] has `sources` that are no list of strings")
        if entry[IDS[key]] in seen_ids:
            raise ValueError(f"{where}[{i}] needs an id of its own, got {entry[IDS[key]]} again")
        seen_ids.add(entry[IDS[key]])


def entry_text(entry: dict, key: str) -> str:
    """The text that is embedded (S10): "title. principle. when" or "description. why. how"."""
    return ". ".join(entry[name] for name in FIELDS[key])


def _normalized(vectors: Any) -> np.ndarray:
    x_nd = np.asarray(vectors, dtype=np.float32)
    return x_nd / np.maximum(np.linalg.norm(x_nd, axis=-1, keepdims=True), 1e-12)


# -------------------------------------------------------------------------------------- prompts


@functools.cache
def template(name: str) -> str:
    """A file of prompts/, word for word the paper's: edit it there."""
    file = pathlib.Path(__file__).parent / "prompts" / f"{name}.txt"
    return file.read_text(encoding="utf-8")


def render(name: str, values: Mapping[str, Any]) -> str:
    r"""A template with each {name} replaced by its value.

    In one pass: values are never expanded themselves, \boxed{} stays, {{}} becomes {} (S9).
    """
    replaced = {"{{}}": "{}"} | {f"{{{name}}}": value for name, value in values.items()}
    pattern = "|".join(map(re.escape, replaced))
    return re.sub(pattern, lambda match: replaced[match[0]], template(name))


def render_student(problem: str) -> str:
    """The plain prompt x (Fig. 6): the problem, and the request to reason and box the answer."""
    return render("student", {"problem": problem})


def render_teacher(pair: SkillPair, problem: str) -> str:
    """The k-th teacher's prompt c_k(x) = g_k + e_k + x (Eq. 3, Fig. 6; D1)."""
    return render_skills([pair], problem)


def render_skills(pairs: Sequence[SkillPair], problem: str) -> str:
    """All pairs in one prompt, best first (S14): the teacher's, with one bullet per entry."""
    if not pairs:
        return render_student(problem)
    skills = "\n".join(render("skill", pair.skill) for pair in pairs)
    mistakes = "\n".join(render("mistake", pair.mistake) for pair in pairs)
    return render("teacher", {"skills": skills, "mistakes": mistakes, "problem": problem})


def render_extraction(memory: dict, key: str) -> str:
    """Ask for a success's general skills or a failure's common mistakes (Alg. 2, App. D.2)."""
    hidden = ("problem_id", "truncated")
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
# A comma before a closing bracket is group 2; group 1 is a string, whose commas stay. In JSON a
# string begins after one of four characters, so a quotation mark in prose hardly ever begins one.
_TRAILING_COMMA = re.compile(r'([\[{,:]\s*"(?:[^"\\]|\\.)*")|,(\s*[}\]])', re.DOTALL)


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
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    text = _BACKSLASH.sub(lambda match: match[1] or r"\\", text)
    text = _TRAILING_COMMA.sub(lambda match: match[1] or match[2], text)
    decoder = json.JSONDecoder(strict=False)
    # A list promises items, so an invalid entry in it makes the reply broken. An object on its own
    # promises nothing: it is an item, or we look inside it.
    listed: list[Any] = []
    standalone: list[Any] = []
    broken, at = False, 0
    # Decode a value at each opening bracket in turn.
    while opening := _OPENING.search(text, at):
        at = opening.end()
        try:
            value, end = decoder.raw_decode(text, opening.start())
        except (ValueError, RecursionError):
            # A bracket before {, [ or a quote is JSON that broke off; any other is prose.
            broken = broken or text[at : at + 100].lstrip()[:1] in ("{", "[", '"')
            continue
        if isinstance(value, dict) and key in value:
            listed += value[key] if isinstance(value[key], list) else [value[key]]
        elif isinstance(value, list) and any(isinstance(v, dict) for v in value):
            listed += value
        elif item_of(value, fields):
            standalone.append(value)
        else:
            continue  # some other value: look inside
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
    # "?" stands for halves of surrogate pairs, which no file or terminal accepts.
    return {name: values[name].strip().encode("utf-8", "replace").decode() for name in fields}


# -------------------------------------------------------------------- asking for items (Algs. 2-4)

Complete = Callable[[list[str]], list[str]]  # one reply per prompt


class Request(NamedTuple):
    """A prompt that asks for items of a list."""

    prompt: str
    key: str
    size: int = 0  # of a merge: how many items it shows


def ask(requests: Sequence[Request], complete: Complete) -> list[list[dict]]:
    """The items of each request's reply; [] where two replies cannot be used (D4).

    An item that lacks one of its three fields is dropped; a reply that breaks off gives its
    complete items. A reply can be used if it has an item. That to a merge must also be whole, with
    no item dropped, and have no more items than the merge showed. A `Writer` samples the second
    reply, since the first one is greedy. Without items a memory gives no candidates, and a group
    of a merge stays as it is.
    """
    items_of_each: list[list[dict]] = [[] for _ in requests]
    for _ in (1, 2):
        unanswered = [i for i, items in enumerate(items_of_each) if not items]
        replies = complete([requests[i].prompt for i in unanswered]) if unanswered else []
        for i, reply in zip(unanswered, replies, strict=True):
            _, key, size = requests[i]
            items, whole = read_items(reply, key, FIELDS[key])
            if not size or (whole and len(items) <= size):
                items_of_each[i] = items
    return items_of_each


# ---------------------------------------------------------------- Algorithm 3: hierarchical merging


def merge(
    items: list[dict], key: str, complete: Complete, group_size: int = 32, patience: int = 3
) -> tuple[list[dict], list[dict]]:
    """Hierarchical merging (Alg. 3): the merged entries under new ids, and a record per layer.

    Layer by layer the writer is asked to merge items that say the same, H at a time, in order. A
    group of one stays as it is. Merging ends after a layer that was a single group, or after P
    layers in a row that made the list no shorter.
    items: the candidates C. group_size: H. patience: P. A group stays as it is unless its reply is
    whole, has an item (S11), and has no more items than the group: a merge may merge, but never
    lose or add. An entry's `sources` follow it.
    """
    merged, layers = merge_lists({key: items}, complete, group_size, patience)
    return merged[key], layers[key]


def merge_lists(
    lists: Mapping[str, list[dict]], complete: Complete, group_size: int, patience: int
) -> tuple[dict[str, list[dict]], dict[str, list[dict]]]:
    """`merge` of lists by key, side by side: a layer's prompts of all of them go into one call."""
    items, stagnant = dict(lists), dict.fromkeys(lists, 0)  # line 1
    layers: dict[str, list[dict]] = {key: [] for key in lists}
    left = list(lists)
    while left:  # line 2
        groups, several, requests = {}, {}, []
        for key in left:
            starts = range(0, len(items[key]), group_size)
            groups[key] = [items[key][start : start + group_size] for start in starts]  # line 3
            several[key] = [group for group in groups[key] if len(group) > 1]  # line 4
            for group in several[key]:
                requests.append(Request(render_merge(group, key), key, len(group)))  # line 5
        replies = iter(ask(requests, complete))
        for key in [*left]:
            replies_of_list = [next(replies) for _ in several[key]]
            merged = _merged_layer(groups[key], replies_of_list, key)
            stagnant[key] = 0 if len(merged) < len(items[key]) else stagnant[key] + 1  # line 9
            reason = None
            if len(groups[key]) <= 1:  # line 11
                reason = "root_group_reached"
            elif stagnant[key] >= patience:
                reason = "stagnation_patience_reached"
            layers[key].append(
                {
                    "layer_index": len(layers[key]),
                    "input_items": len(items[key]),
                    "num_groups": len(groups[key]),
                    "output_items": len(merged),
                    "lost_replies": sum(not reply for reply in replies_of_list),
                    "stopped_reason": reason,
                    "stagnant_layers": stagnant[key],
                }
            )
            items[key] = merged  # line 10
            if reason:
                left.remove(key)
    return {key: _numbered(items[key], key) for key in lists}, layers  # lines 12-13


def _merged_layer(groups: list[list[dict]], replies: list[list[dict]], key: str) -> list[dict]:
    """A layer's items: those of each group's reply with their sources, or the group without one.

    replies: in order, of the groups that have several items.
    """
    left, merged = iter(replies), []
    for group in groups:
        items = next(left) if len(group) > 1 else []
        for item in items:  # line 8
            unchanged = [entry for entry in group if item_of(entry, FIELDS[key]) == item]
            merged.append(_with_sources(item, unchanged or group))
        merged += [] if items else group  # line 6
    return merged


def _numbered(entries: list[dict], key: str) -> list[dict]:
    """Entries under new ids; exact duplicates become one, with all sources (Alg. 3, line 12)."""
    twins: dict[tuple, list[dict]] = {}
    for entry in entries:
        twins.setdefault(_texts(entry, key), []).append(entry)
    numbered = []
    for number, same in enumerate(twins.values(), 1):
        entry = _with_sources(same[0], same)
        entry.pop(IDS[key], None)
        numbered.append({IDS[key]: f"{PREFIX[key]}{number:03d}", **entry})
    return numbered


def _texts(entry: dict, key: str) -> tuple:
    """An entry's three fields."""
    return tuple(entry.get(name) for name in FIELDS[key])


def _with_sources(entry: dict, parents: list[dict]) -> dict:
    """A copy of an entry with the sources of its parents, if they have any."""
    sources: set[str] = set()
    for parent in parents:
        sources.update(parent.get("sources") or [])
    return {**entry, "sources": sorted(sources)} if sources else dict(entry)


# ------------------------------------------------------------------------ Algorithm 2: cold start


def memory_of(row: Mapping[str, Any], with_answer: bool = False) -> dict:
    """A memory record (Alg. 2, line 5); a long text is cut to its beginning and end (S21).

    It has the problem, the verdict, the boxed answer, and the solution after its thinking, or the
    thinking that never ended; of more than 2,000 characters the first and the last 1,000.
    row: a rollout's problem, text, r and pred, and perhaps its problem_id. with_answer: show the
    reference answer, too, from `gold` (D3).
    """
    text = row["text"].rpartition("</think>")[2].strip()
    lines = [line.strip()[:200] for line in text.split("\n") if line.strip()]
    feedback = f"The verifier {'accepted' if row['r'] > 0 else 'rejected'} the final answer."
    if row["pred"] is None:
        feedback = "The attempt gave no final answer in a box."
    memory = {
        "problem_id": row.get("problem_id", ""),
        "problem": row["problem"],
        "completion": text if len(text) <= 2000 else f"{text[:1000]}\n[...]\n{text[-1000:]}",
        "reward": row["r"],
        "predicted_answer": row["pred"],
        "trajectory_summary": lines if len(lines) <= 8 else lines[:4] + lines[-4:],
        "feedback": feedback,
    }
    return {**memory, "reference_answer": row["gold"]} if with_answer else memory


def extract(memories: list[dict], complete: Complete) -> tuple[dict[str, list[dict]], int]:
    """Candidates by key (Alg. 2, lines 8-14), and the number of memories that gave none.

    Up to three skills come from each success, and up to three mistakes from each failure.
    """
    successes = [memory for memory in memories if memory["reward"] > 0]  # line 8
    failures = [memory for memory in memories if memory["reward"] <= 0]
    requests = []
    for key, memories_of_key in (("general_skills", successes), ("common_mistakes", failures)):
        requests += [Request(render_extraction(memory, key), key) for memory in memories_of_key]
    replies = ask(requests, complete)
    candidates: dict[str, list[dict]] = {key: [] for key in FIELDS}
    for memory, request, items in zip(successes + failures, requests, replies, strict=True):
        sources = {"sources": [memory["problem_id"]]} if memory.get("problem_id") else {}
        candidates[request.key] += [{**item, **sources} for item in items[:3]]  # lines 10 and 13
    return candidates, sum(not items for items in replies)


def cold_start(
    memories: list[dict], complete: Complete, *, group_size: int = 32, patience: int = 3
) -> SkillBank:
    """The initial bank from memory records (Alg. 2, lines 8-16).

    From each right solution the writer is asked for skills, from each wrong one for mistakes; the
    first three complete items count. Then each list is merged (Alg. 3).
    """
    candidates, lost = extract(memories, complete)
    metadata: dict[str, Any] = {
        "source": f"cold start from {len(memories)} seed solutions",
        "seed_solutions": len(memories),
        "right_seed_solutions": sum(memory["reward"] > 0 for memory in memories),
        "truncated_seed_solutions": sum(memory.get("truncated", False) for memory in memories),
        "lost_replies": lost,
        "merge_group_size": group_size,
        "merge_stagnation_patience": patience,
    }
    merged, layers = merge_lists(candidates, complete, group_size, patience)  # line 15
    for key, name in (("general_skills", "general"), ("common_mistakes", "common_mistake")):
        metadata[f"input_{key}"] = len(candidates[key])
        metadata[f"output_{key}"] = len(merged[key])
        metadata[f"{name}_merge_layers"] = layers[key]
    return SkillBank(merged["general_skills"], merged["common_mistakes"], metadata)  # line 16


# ------------------------------------------------------------------- Algorithm 4: online evolution


def evolve(
    bank: SkillBank,
    window: Sequence[Mapping[str, Any]],
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
    """The bank after online evolution (Alg. 4); the same object where it stays as it is.

    Candidates come from every row of the window as in Algorithm 2, and are merged with each other.
    If there are any, the dynamic entries, which earlier evolutions added, are merged with them, so
    the writer may reword or join these.
    window: W, the rows of all rollouts since an evolution was last due (D2); see `memory_of`.
    evolve_every: F; 0 disables. success_gate: γ. max_new_items: N, for both lists together (S12).
    dynamic_capacity: C, per list. Static entries stay, and no dynamic one has their text (D11).
    """
    if not window or not evolve_every or step % evolve_every:  # line 1
        return bank
    success = sum(row["r"] > 0 for row in window) / len(window)  # line 4
    if success >= success_gate:  # line 5
        return bank
    memories = [memory_of(row, memory_answer) for row in window]
    candidates, lost = extract(memories, complete)  # lines 8-10
    static, before = split(bank)
    fresh = {key: _without_copies(candidates[key], static[key], key) for key in FIELDS}
    new, _ = merge_lists(fresh, complete, group_size, patience)  # line 11
    grown = {key: before[key] + new[key] for key in FIELDS if new[key]}
    merged, _ = merge_lists(grown, complete, group_size, patience)  # line 12
    originals = {key: _without_copies(merged[key], static[key], key) for key in merged}
    named = {key: _under_dynamic_ids(originals[key], key, step, bank) for key in merged}
    after = limit_growth(before, before | named, max_new_items, dynamic_capacity)  # line 13
    update: dict[str, Any] = {"step": step, "success": success, "lost_replies": lost}
    for key in FIELDS:
        copied = len(candidates[key]) - len(fresh[key])
        copied += len(merged.get(key, [])) - len(originals.get(key, []))
        update |= {f"copied_{key}": copied, f"candidate_{key}": len(candidates[key])}
        update[f"merged_{key}"] = len(new[key])
    update |= changes(before, after)
    metadata = {**bank.metadata, "updates": [*bank.metadata.get("updates", []), update]}
    skills, mistakes = (static[key] + after[key] for key in FIELDS)
    return SkillBank(skills, mistakes, metadata, bank.extra)  # line 14


def split(bank: SkillBank) -> tuple[dict[str, list[dict]], dict[str, list[dict]]]:
    """A bank's static and its dynamic entries, by key."""
    static: dict[str, list[dict]] = {key: [] for key in FIELDS}
    dynamic: dict[str, list[dict]] = {key: [] for key in FIELDS}
    for key in FIELDS:
        for entry in bank.collection(key):
            kind = dynamic if entry[IDS[key]].startswith(DYNAMIC) else static
            kind[key].append(entry)
    return static, dynamic


def _under_dynamic_ids(entries: list[dict], key: str, step: int, bank: SkillBank) -> list[dict]:
    """Entries under dynamic ids, each of which names one text for as long as the bank lives.

    An entry with the three fields of an earlier dynamic one keeps that one's id. Any other gets a
    new id, with the step in it, that neither the bank nor its updates name.
    """
    ids_by_text: dict[tuple, str] = {}
    for entry in bank.collection(key):
        ids_by_text.setdefault(_texts(entry, key), entry[IDS[key]])
    names = as_json([[e[IDS[key]] for e in bank.collection(key)], bank.metadata.get("updates")])
    ids = (f"{DYNAMIC}{PREFIX[key]}{step:03d}_{n:03d}" for n in itertools.count(1))
    new_ids = (id_ for id_ in ids if f'"{id_}"' not in names)
    named = []
    for entry in entries:
        id_ = ids_by_text.get(_texts(entry, key)) or next(new_ids)
        named.append({**entry, IDS[key]: id_})
    return named


def changes(before: dict[str, list[dict]], after: dict[str, list[dict]]) -> dict[str, Any]:
    """What an update says of the dynamic entries: their numbers, and the ids new and dropped."""
    record: dict[str, Any] = {"new": [], "dropped": []}
    for key in FIELDS:
        old_ids = [entry[IDS[key]] for entry in before[key]]
        new_ids = [entry[IDS[key]] for entry in after[key]]
        record[f"dynamic_{key}"] = len(new_ids)
        record[f"net_new_{key}"] = len(new_ids) - len(old_ids)
        record["new"] += [id_ for id_ in new_ids if id_ not in old_ids]
        record["dropped"] += [id_ for id_ in old_ids if id_ not in new_ids]
    return record


def limit_growth(
    before: dict[str, list[dict]],
    after: dict[str, list[dict]],
    max_new_items: int,
    dynamic_capacity: int,
) -> dict[str, list[dict]]:
    """The lists with at most C entries each and N more than before together (Alg. 4, line 13).

    Each keeps its first C. A list's growth is the number of entries by which it is longer than
    before, at least 0. While both together have grown by more than N, the one that grew more, at a
    tie the skills, loses its last (S12).
    """
    limited = {key: after[key][:dynamic_capacity] for key in after}
    while True:
        growth = {key: max(0, len(limited[key]) - len(before[key])) for key in limited}
        if sum(growth.values()) <= max_new_items:
            return limited
        larger = max(growth, key=lambda key: growth[key])
        limited[larger].pop()


def describe(bank: SkillBank, seconds: float = 0.0) -> str:
    """A bank in one line: what it holds and, where we made it, what it was last made from.

    seconds: how long that took; 0 where it was not just made.
    """
    line, about = f"bank: {bank.sizes}", bank.metadata
    last = (about.get("updates") or [{}])[-1]
    if "lost_replies" in last:
        new = sum(last[f"net_new_{key}"] for key in FIELDS)
        candidates = sum(last[f"candidate_{key}"] for key in FIELDS)
        line += f", evolved after step {last['step']} with success {last['success']:.2f}: "
        line += f"{new} net new from {candidates} candidates, {last['lost_replies']} replies lost"
    elif "lost_replies" in about:
        line += " from {input_general_skills} and {input_common_mistakes} candidates, written from "
        line += "{seed_solutions} solutions, {right_seed_solutions} correct; "
        line = (line + "{lost_replies} replies lost").format(**about)
    return f"{line}, in {seconds:.0f} s" if seconds else line


def refuse_short(bank: SkillBank, path: str, num_teachers: int) -> None:
    """ValueError if a list is empty, or one of a bank that --bank names is below K entries.

    path: the value of --bank; "" for a bank that the run has made.
    """
    shorter = min(len(bank.general_skills), len(bank.common_mistakes))
    where = f"--bank {path}: {bank.sizes}" if path else describe(bank)
    if not shorter:
        fix = "in a new --out try another --bank or a larger --cold-start"
        raise ValueError(f"{where}: no pair, no teacher (S8); {fix}")
    if path and shorter < num_teachers:
        raise ValueError(f"{where}: --num-teachers {num_teachers} needs as many of each; lower it")


def longest_pairs(bank: SkillBank, k: int, size: Callable[[str], int]) -> list[SkillPair]:
    """The k longest skills with the k longest mistakes: no prompt with k pairs is longer.

    size: of a text, such as its number of tokens.
    """
    skills = sorted(bank.general_skills, key=lambda e: size(render("skill", e)), reverse=True)
    mistakes = sorted(bank.common_mistakes, key=lambda e: size(render("mistake", e)), reverse=True)
    return [SkillPair(skill, mistake, 0.0, 0.0) for skill, mistake in zip(skills[:k], mistakes[:k])]


def without_longest(
    bank: SkillBank, fits: Callable[[SkillBank], bool]
) -> tuple[SkillBank, list[str]]:
    """The bank without the dynamic entries with which a prompt would be too long, and their ids.

    fits: whether all prompts of a bank fit. Dynamic entries are tried in order, skills first; the
    static ones stay, and of a list without any the shortest one. The same bank where it fits; else
    its last update names what was left out.
    """
    if fits(bank):
        return bank, []
    static, dynamic = split(bank)
    for key in FIELDS:
        if not static[key]:  # without it there would be no pair, and every entry would fit
            shortest = min(dynamic[key], key=lambda entry: len(entry_text(entry, key)))
            static[key] = [shortest]
            dynamic[key] = [entry for entry in dynamic[key] if entry is not shortest]
    shorter = SkillBank(static["general_skills"], static["common_mistakes"], {}, bank.extra)
    left_out = []
    for key in FIELDS:
        kept = shorter.collection(key)
        for entry in dynamic[key]:
            kept.append(entry)
            if not fits(shorter):
                left_out.append(kept.pop()[IDS[key]])
    *earlier, last = bank.metadata.get("updates") or [{}]
    new, dropped = last.get("new", []), last.get("dropped", [])
    update = {**last, "too_long": left_out}
    update["new"] = [id_ for id_ in new if id_ not in left_out]
    update["dropped"] = dropped + [id_ for id_ in left_out if id_ not in new]
    for key in FIELDS:
        count = len(shorter.collection(key)) - len(bank.collection(key))
        update[f"dynamic_{key}"] = last.get(f"dynamic_{key}", 0) + count
        update[f"net_new_{key}"] = last.get(f"net_new_{key}", 0) + count
    shorter.metadata = {**bank.metadata, "updates": [*earlier, update]}
    shorter.window = bank.window
    return shorter, left_out


def _without_copies(entries: list[dict], static: list[dict], key: str) -> list[dict]:
    """The entries whose text, whatever its case, no static entry has (D11)."""
    texts = {entry_text(e, key).casefold() for e in static}
    return [e for e in entries if entry_text(e, key).casefold() not in texts]


# ------------------------------------------------------------------------ a model as `complete`


@dataclass
class Writer:
    """The policy as `complete`: it answers extraction and merge prompts, thinking off (D4).

    The reply to a new prompt is greedy. A prompt that comes again gets a sampled reply, another one
    each time: after a reply that could not be used, or where a later layer of merging shows a group
    again. Make a new writer for each cold start and each evolution.
    """

    tokenizer: Any
    chat_ids: Callable[..., list[int]]  # (tokenizer, text, thinking="closed") -> prompt ids
    # (prompts' ids, prompts, how often each was asked before, token limits) -> texts; on every rank
    sample: Callable[[list[list[int]], list[str], list[int], list[int]], list[str]]
    log: Callable[[list[dict]], None]  # stores the replies of a call
    reply_tokens: int  # the longest reply, but a merge may always repeat its prompt
    step: int = 0  # the training step that the replies belong to
    requests: collections.Counter[str] = field(default_factory=collections.Counter)  # by prompt

    def __call__(self, prompts: list[str]) -> list[str]:
        ids = [self.chat_ids(self.tokenizer, prompt, thinking="closed") for prompt in prompts]
        repeats = [self.requests[prompt] for prompt in prompts]
        # A quarter more than the prompt is enough to repeat its items in a wordier layout.
        limits = [max(self.reply_tokens, len(prompt) * 5 // 4) for prompt in ids]
        self.requests.update({*prompts})
        replies = self.sample(ids, prompts, repeats, limits)
        rows = []
        for prompt, repeat, reply in zip(prompts, repeats, replies, strict=True):
            row = {"step": self.step, "repeat": repeat, "prompt": prompt, "reply": reply}
            rows.append(row)
        self.log(rows)
        return replies
