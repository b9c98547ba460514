r"""The skill bank: entries, retrieval, prompts, and Algorithms 2-4, which build and evolve it.

Models are passed as functions: embed(texts) returns a float array [n, d], complete(prompts) returns
one reply per prompt (`lib.run.bank_writer` makes such a function of the policy).

Entries are plain dicts with the paper's field names (App. C). The code replaces entries, and never
edits one in place. `key` names one of the two lists: "general_skills" or "common_mistakes".

Dimension key: n entries of a list, d embedding size.
"""

import contextlib
import functools
import itertools
import json
import os
import pathlib
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

# ----------------------------------------------------------------------------- entries and the bank


class Kind(NamedTuple):
    """The names that the entries of a list share."""

    name: str  # in the file names of prompts/
    fields: tuple[str, ...]  # Tab. 5; an entry is embedded in this order (S10)
    id_field: str
    prefix: str  # of each id (Alg. 3, line 12)


KINDS = {
    "general_skills": Kind("skill", ("title", "principle", "when_to_apply"), "skill_id", "gen_"),
    "common_mistakes": Kind(
        "mistake", ("description", "why_it_happens", "how_to_avoid"), "mistake_id", "err_"
    ),
}
DYNAMIC = "dyn_"  # precedes the prefix in the id of an entry that online evolution added
OF_ROW = ("problem_id", "problem", "text", "r", "pred", "gold")  # what `memory_of` reads
as_json = functools.partial(json.dumps, indent=2, ensure_ascii=False)  # in prompts and files


@dataclass(frozen=True)
class SkillPair:
    """The k-th teacher's guidance g_k + e_k (Eq. 3) and its two cosine similarities (Eq. 6).

    Another retriever should keep its scores on the scale of cosines, in [-1, 1]: Eq. 6 takes a
    softmax over (s_g + s_e) / 2 without a temperature, so a lead of 0.1 gives 11% more weight.
    """

    skill: dict
    mistake: dict
    s_g: float
    s_e: float


@dataclass
class SkillBank:
    """B = {G, E} (§2.1). `extra` holds a file's unknown keys, so load and save lose nothing.

    window: W of Algorithm 4, the rollouts since the last evolution; see `evolution_is_due`. A file
    has this field only if the window is not empty.
    """

    general_skills: list[dict]
    common_mistakes: list[dict]
    metadata: dict = field(default_factory=dict)
    extra: dict = field(default_factory=dict)
    window: list[dict] = field(default_factory=list)
    _embedded: dict[Any, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def load(cls, path: str | pathlib.Path, least: int = 0) -> "SkillBank":
        """Read a bank's JSON. ValueError names the file, the entry and the wrong field.

        ValueError also if a list has fewer than `least` entries. `least` is --num-teachers for a
        --bank, and 1 for a run's own bank, because merges may shorten its lists (S8).
        """
        try:
            data = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as e:
            raise ValueError(f"bank {path}: cannot be read: {e}") from None
        data = data if isinstance(data, dict) else {}
        lists = {key: data.pop(key, None) for key in KINDS}
        metadata = data.pop("metadata", {})
        window = data.pop("window", [])
        for key, entries in lists.items():
            _check_entries(entries, key, f"bank {path}: {key}")
        if not isinstance(metadata, dict):
            raise ValueError(f"bank {path}: metadata must be an object")
        _check_rows(metadata.get("updates", []), (), f"bank {path}: updates in metadata")
        _check_rows(window, OF_ROW, f"bank {path}: window")
        bank = cls(**lists, metadata=metadata, window=window, extra=data)
        shorter = min(bank.counts.values())
        if shorter < least:
            fewer = f"--num-teachers {shorter}, or " if shorter else ""
            raise ValueError(
                f"bank {path}: {bank.sizes}: each list needs {least} or more; give {fewer}"
                "in a new --out another --bank or a larger --cold-start"
            )
        return bank

    def save(self, path: str | pathlib.Path) -> None:
        """Write the bank as JSON. A kill leaves the old file or the new one, never half of one.

        Half of a surrogate pair, which UTF-8 cannot hold, is written as its JSON escape.
        """
        data = {
            "general_skills": self.general_skills,
            **self.extra,
            "common_mistakes": self.common_mistakes,
            "metadata": self.metadata,
            **({"window": self.window} if self.window else {}),
        }
        path = pathlib.Path(path)  # not by lib/files.py, so that skills.py can be copied alone
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.tmp")
        with open(unfinished, "w", encoding="utf-8", errors="backslashreplace") as f:
            f.write(as_json(data))
        os.replace(unfinished, path)

    def evolution_is_due(self, step: int, evolve_every: int) -> bool:
        """Whether the bank evolves after this step: F divides it, and W has rollouts (D9).

        Each step's rollouts join W, and each evolution ends by emptying W, whether or not the bank
        has changed. So after a step that F divides, W is empty once the evolution is done. If a run
        was killed before that, it continues with W from its checkpoint, and the evolution is still
        due. evolve_every: F; 0: never.
        """
        return bool(self.window) and evolve_every > 0 and step % evolve_every == 0

    def remember(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows of rollouts.jsonl to the window, with the fields that `memory_of` reads."""
        for row in rows:
            self.window.append({name: row[name] for name in OF_ROW})

    @property
    def counts(self) -> dict[str, int]:
        """The sizes of both lists, for metrics.jsonl."""
        return {"bank_skills": len(self.general_skills), "bank_mistakes": len(self.common_mistakes)}

    @property
    def sizes(self) -> str:
        return f"{len(self.general_skills)} skills and {len(self.common_mistakes)} mistakes"

    def collection(self, key: str) -> list[dict]:
        """One of the two lists."""
        return self.general_skills if key == "general_skills" else self.common_mistakes

    def retrieve(self, problem: str, k: int, embed: Callable[[list[str]], Any]) -> list[SkillPair]:
        """The best skill with the best mistake, and so on: min(k, |G|, |E|) pairs (Eq. 2, S8).

        Scores are cosine similarities. Equal scores keep the bank's order. If one list is empty,
        there are no pairs.
        """
        if not self.general_skills or not self.common_mistakes:
            return []
        query_d = _normalized(embed([problem]))[0]
        ranked = []
        for key in KINDS:
            entries = self.collection(key)
            scores_n = self._vectors(key, embed) @ query_d
            best = np.argsort(-scores_n, kind="stable")[:k]
            ranked.append([(entries[i], float(scores_n[i])) for i in best])
        pairs_K = []
        for (skill, s_g), (mistake, s_e) in zip(*ranked):
            pairs_K.append(SkillPair(skill, mistake, s_g, s_e))
        return pairs_K

    def _vectors(self, key: str, embed: Callable[[list[str]], Any]) -> np.ndarray:
        """Unit vectors of a list's entries [n, d]; we embed the list again if its texts change.

        If one entry is new, we still embed all: in an encoder of your own, a vector's rounding may
        depend on the texts that it embeds together.
        """
        texts = tuple(entry_text(entry, key) for entry in self.collection(key))
        if (embed, texts) not in self._embedded:
            self._embedded[embed, texts] = _normalized(embed([*texts]))
        return self._embedded[embed, texts]


def entry_text(entry: dict, key: str) -> str:
    """The text that is embedded (S10): "title. principle. when" or "description. why. how"."""
    return ". ".join(entry[name] for name in KINDS[key].fields)


def _normalized(vectors: Any) -> np.ndarray:
    x_nd = np.asarray(vectors, dtype=np.float32)
    return x_nd / np.maximum(np.linalg.norm(x_nd, axis=-1, keepdims=True), 1e-12)


def _check_entries(entries: Any, key: str, where: str) -> None:
    """ValueError unless this is a list of entries, with all their texts (App. C) and unique ids."""
    rule = ": each must be a text that is not blank (App. C)"
    _check_rows(entries, (KINDS[key].id_field, *KINDS[key].fields), where, rule)
    ids = [entry[KINDS[key].id_field] for entry in entries]
    for i, id_ in enumerate(ids):
        if id_ in ids[:i]:
            raise ValueError(f"{where}[{i}] needs an id of its own, got {id_} again")


def _check_rows(rows: Any, names: Sequence[str], where: str, rule: str = "") -> None:
    """ValueError unless rows are a list of objects with these fields.

    rule: if given, the fields must be strings that are not blank, and the error quotes it.
    """
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{where} must be a list of objects")
    for i, row in enumerate(rows):
        missing = []
        for name in names:
            if name not in row or (rule and not _is_text(row[name])):
                missing.append(name)
        if missing:
            raise ValueError(f"{where}[{i}] lacks {', '.join(missing)}{rule}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


# The words of `describe`: where a bank came from, and what an evolution did.
WRITTEN = (
    " from {input_general_skills} and {input_common_mistakes} candidates, written from "
    "{seed_solutions} solutions, {right_seed_solutions} correct; {lost_replies} replies lost"
)
EVOLVED = (
    ", evolved after step {step} with success {success:.2f}: {net_new_general_skills} and "
    "{net_new_common_mistakes} net new from {candidate_general_skills} and "
    "{candidate_common_mistakes} candidates, {lost_replies} replies lost"
)


def describe(bank: SkillBank, seconds: float = 0.0) -> str:
    """A bank in one line: its sizes and, if we made it, what its last version was made from.

    seconds: how long making it took; 0 if it was only loaded.
    """
    last = (bank.metadata.get("updates") or [bank.metadata])[-1]
    line = f"bank: {bank.sizes}"
    with contextlib.suppress(LookupError, TypeError, ValueError):  # not a bank of ours
        line += (EVOLVED if "success" in last else WRITTEN).format(**last)
    return f"{line}, in {seconds:.0f} s" if seconds else line


# ------------------------------------------------------------------------------------------ prompts


@functools.cache
def template(name: str) -> str:
    """The text of a file in prompts/: the paper's words (S9, S13). To change it, edit the file."""
    file = pathlib.Path(__file__).parent / "prompts" / f"{name}.txt"
    return file.read_text(encoding="utf-8")


def render(name: str, values: Mapping[str, Any]) -> str:
    r"""A template with each {name} replaced by its value.

    All in one pass: a {name} inside a value stays, \boxed{} stays, and {{}} becomes {} (S9).
    """
    replaced = {"{{}}": "{}"}
    for word, value in values.items():
        replaced[f"{{{word}}}"] = value
    pattern = "|".join(map(re.escape, replaced))
    return re.sub(pattern, lambda match: replaced[match[0]], template(name))


def render_student(problem: str) -> str:
    """The plain prompt x (Fig. 6): the problem, and the request to reason and box the answer."""
    return render("student", {"problem": problem})


def render_teacher(pair: SkillPair, problem: str) -> str:
    """The k-th teacher's prompt c_k(x) = g_k + e_k + x (Eq. 3, Fig. 6; D1)."""
    return render_skills([pair], problem)


def render_skills(pairs: Sequence[SkillPair], problem: str) -> str:
    """All pairs in one prompt, best first (S14): the teacher's prompt with a bullet per entry."""
    if not pairs:
        return render_student(problem)
    skills = "\n".join(render("skill", pair.skill) for pair in pairs)
    mistakes = "\n".join(render("mistake", pair.mistake) for pair in pairs)
    return render("teacher", {"skills": skills, "mistakes": mistakes, "problem": problem})


def render_extraction(memory: dict, key: str) -> str:
    """The prompt for skills of a right solution or mistakes of a wrong one (Alg. 2, App. D.2)."""
    shown = {name: x for name, x in memory.items() if name not in ("problem_id", "truncated")}
    prompt = render(f"extract_{KINDS[key].name}s", {"memory_json": as_json(shown)})
    first, second, third = KINDS[key].fields
    form = f'Each item is an object with the string fields "{first}", "{second}" and "{third}".'
    return f"{prompt}\n{form}"  # the files in prompts/ do not name the fields (S13)


def render_merge(items: list[dict], key: str) -> str:
    """The prompt to merge a group of items (Alg. 3, line 5). It shows their three fields alone."""
    shown = [item_of(entry, key) for entry in items]
    return render(f"merge_{KINDS[key].name}s", {"items_json": as_json(shown)})


# ---------------------------------------------------------------------------------- reading replies
# A reply may have prose, thinking and code fences around its JSON, LaTeX in its strings, or a comma
# too many. It may also break off.

# Where an object or a list may begin. If a string or another bracket follows, it is JSON; else it
# may be prose.
_OPENING = re.compile(r'[{\[](?P<json>\s*[{\["])?')
# LaTeX commands begin like JSON's \b, \f, \n, \r and \t. We read \b, \f and \r always as LaTeX, \t
# if a letter follows, and \n if it begins one of these words:
_COMMANDS = (
    "nabla|natural|ne|nearrow|neg|neq|newline|nexists|ngeq|ngtr|ni|nleq|nleqslant|nless|nmid|"
    "nolimits|nonumber|not|notin|nparallel|nprec|nsim|nsubseteq|nsucceq|nu|num|nwarrow"
)
_ESCAPES = (  # those that we leave to JSON; we double every other backslash
    r'\\[\\"/]'
    r"|\\u[0-9a-fA-F]{4}"
    rf"|(?!\\(?:{_COMMANDS})(?![a-zA-Z]))\\n"
    r"|\\t(?![a-zA-Z])"
)
# A backslash; group 1 is the whole escape, if it is one of _ESCAPES.
_BACKSLASH = re.compile(rf"({_ESCAPES})|\\")
# A string (group 1), which we match so that its commas stay; or a comma to drop, with the closing
# bracket behind it (group 2). In JSON a string follows one of four characters, so a quotation mark
# in prose hardly ever begins a match.
_TRAILING_COMMA = re.compile(r'([\[{,:]\s*"(?:[^"\\]|\\.)*")|,(\s*[}\]])', re.DOTALL)


def parse_json_items(text: str, key: str) -> list[dict]:
    """The readable items of a reply, [] when there are none; see `read_items`."""
    return read_items(text, key)[0]


def read_items(text: str, key: str) -> tuple[list[dict], bool]:
    """A reply's items, and whether it is whole.

    An item is an object with the three fields of its list, at any depth. A reply is whole if it has
    an item, its JSON does not break off, and no list in it mixes items with other values. We drop
    thinking, and repair LaTeX backslashes and trailing commas. Never raises on a str.
    """
    values, whole = _json_values(text)
    items: dict[tuple, dict] = {}
    for value in values:  # we append to this list while walking it: nested values are searched too
        item = item_of(value, key)
        if item:
            items[tuple(item.values())] = item  # a duplicate counts once
        elif isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value
            count = sum(item_of(x, key) is not None for x in value)
            if 0 < count < len(value):
                whole = False
    return list(items.values()), whole and bool(items)


def _json_values(text: str) -> tuple[list[Any], bool]:
    """The JSON values in a reply, with their backslashes and commas repaired; whether all end."""
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    text = _BACKSLASH.sub(lambda match: match[1] or r"\\", text)
    text = _TRAILING_COMMA.sub(lambda match: match[1] or match[2], text)
    decoder = json.JSONDecoder(strict=False)
    values: list[Any] = []
    whole = True
    at = 0
    while opening := _OPENING.search(text, at):
        try:
            value, at = decoder.raw_decode(text, opening.start())
            values.append(value)
        except (ValueError, RecursionError):
            at = opening.start() + 1  # look inside
            if opening["json"]:  # JSON, which is broken or cut
                whole = False
    return values, whole


def item_of(value: Any, key: str) -> dict | None:
    """An object's three fields, stripped; None when one is missing, blank or not a string."""
    names = KINDS[key].fields
    if not isinstance(value, dict) or not all(_is_text(value.get(name)) for name in names):
        return None
    # "?" stands for halves of surrogate pairs, which no file or terminal accepts.
    return {name: value[name].strip().encode("utf-8", "replace").decode() for name in names}


# ---------------------------------------------------------------- asking for items (Algorithms 2-4)
# Both lists go through the algorithms together: a reply may take minutes, so all prompts that are
# due at a time go into one call of `complete`.

Complete = Callable[[list[str]], list[str]]  # one reply per prompt
Lists = dict[str, list[dict]]  # by `key`: a list's items or entries, or records of its layers


class Request(NamedTuple):
    """A prompt that asks for items of a list."""

    prompt: str
    key: str
    shown: int = 0  # the number of items that a merge shows; 0 in an extraction


def ask(requests: Sequence[Request], complete: Complete) -> list[list[dict]]:
    """The items of each request's reply; [] if neither of two replies can be used (D4).

    We drop an item that lacks one of its three fields. The reply to an extraction can be used if it
    has an item; if the reply breaks off, we keep its complete items. The reply to a merge must also
    be whole, and have no more items than the merge showed. Without a usable reply, a memory gives
    no candidates, and a merge leaves its group as it is. The second reply differs from the first,
    because `complete` samples the reply to a prompt that comes again (`lib.run.bank_writer`).
    """
    items_of_each: list[list[dict]] = [[] for _ in requests]
    for _ in (1, 2):
        due = [i for i, items in enumerate(items_of_each) if not items]
        if not due:
            break
        replies = complete([requests[i].prompt for i in due])
        for i, reply in zip(due, replies, strict=True):
            items, whole = read_items(reply, requests[i].key)
            if not requests[i].shown or (whole and len(items) <= requests[i].shown):
                items_of_each[i] = items
    return items_of_each


# ---------------------------------------------------------------- Algorithm 3: hierarchical merging


Merge = Generator[list[Request], list[list[dict]], tuple[list[dict], list[dict]]]


def merge_by_layers(items: list[dict], key: str, group_size: int, patience: int) -> Merge:
    """Hierarchical merging (Alg. 3) of one list, as a generator: `merge_lists` runs it.

    Layer by layer we ask the writer to merge items that say the same, H at a time, in order. A
    group of one stays as it is. Merging ends after a layer that was a single group, or after P
    layers in a row that made the list no shorter.
    At each layer the generator yields the requests, waits, and is sent the items of each request's
    reply. An empty list, too, has a layer, without requests. Returns the merged entries under new
    ids, and a record per layer.
    items: the candidates. group_size: H. patience: P. A group stays unless its reply is whole, has
    an item (S11), and has no more items than the group. If it has fewer, we assume that the
    writer joined some. An entry gets the `sources` of the item that it repeats, or of its group.
    """
    layers: list[dict] = []
    stagnant = 0  # line 1
    reason = None
    while not reason:  # line 2
        groups = [items[i : i + group_size] for i in range(0, len(items), group_size)]  # line 3
        requests = []
        for group in groups:
            if len(group) > 1:  # line 4
                requests.append(Request(render_merge(group, key), key, len(group)))
        items_of_each = yield requests  # line 5
        merged: list[dict] = []
        lost = 0
        for group in groups:
            of_group = items_of_each.pop(0) if len(group) > 1 else group  # line 4: no request
            if not of_group:
                lost += 1
                merged += group  # line 6
            for item in of_group:
                merged.append(_with_sources_in(group, item))  # line 8
        stagnant = 0 if len(merged) < len(items) else stagnant + 1  # line 9
        if len(groups) <= 1:  # line 11
            reason = "root_group_reached"
        elif stagnant >= patience:
            reason = "stagnation_patience_reached"
        layers.append(
            {
                "layer_index": len(layers),
                "input_items": len(items),
                "num_groups": len(groups),
                "output_items": len(merged),
                "lost_replies": lost,
                "stopped_reason": reason,
                "stagnant_layers": stagnant,
            }
        )
        items = merged  # line 10
    return _numbered(items, key), layers  # lines 12-13


def merge_lists(
    lists: Lists, complete: Complete, group_size: int, patience: int
) -> tuple[Lists, Lists]:
    """Algorithm 3 on several lists side by side: a layer's requests go into one call of `complete`.

    lists: their items, by key. Each merge ends by itself: one may need more layers than another.
    `next` runs a merge up to its first requests; `send` gives it the replies' items, and runs it up
    to its next requests or its end.
    """
    merged: Lists = {}
    layers: Lists = {}
    merges: dict[str, Merge] = {}
    due: dict[str, list[Request]] = {}  # of the merges that have not ended
    for key, items in lists.items():
        merges[key] = merge_by_layers(items, key, group_size, patience)
        due[key] = next(merges[key])
    while due:
        items_of_each = iter(ask([*itertools.chain(*due.values())], complete))
        for key, requests in list(due.items()):
            of_list = [*itertools.islice(items_of_each, len(requests))]  # in the requests' order
            try:
                due[key] = merges[key].send(of_list)
            except StopIteration as done:  # this merge has ended
                merged[key], layers[key] = done.value
                del due[key]
    return merged, layers


def merge(
    items: list[dict], key: str, complete: Complete, group_size: int = 32, patience: int = 3
) -> tuple[list[dict], list[dict]]:
    """Algorithm 3 on one list: the merged entries under new ids, and a record per layer.

    The arguments are those of `merge_by_layers`. A bank has two lists: see `merge_lists`.
    """
    merged, layers = merge_lists({key: items}, complete, group_size, patience)
    return merged[key], layers[key]


def _with_sources_in(group: list[dict], item: dict) -> dict:
    """A merged item, with the sources of the entry that it repeats, or else of the whole group."""
    unchanged = [entry for entry in group if item.items() <= entry.items()]
    return _with_sources(item, unchanged or group)


def lost_in(layers: Lists) -> int:
    """The number of replies that were lost in the merges of all lists."""
    lost = 0
    for of_list in layers.values():
        for layer in of_list:
            lost += layer["lost_replies"]
    return lost


def _numbered(entries: list[dict], key: str) -> list[dict]:
    """Entries under new ids; exact duplicates become one, with all sources (Alg. 3, line 12)."""
    twins: dict[tuple, list[dict]] = {}
    for entry in entries:
        twins.setdefault(_texts(entry, key), []).append(entry)
    numbered = []
    for number, same in enumerate(twins.values(), 1):
        entry = _with_sources(same[0], same)
        entry.pop(KINDS[key].id_field, None)
        id_ = f"{KINDS[key].prefix}{number:03d}"
        numbered.append({KINDS[key].id_field: id_, **entry})  # the id comes first
    return numbered


def _texts(entry: dict, key: str) -> tuple:
    """An entry's three fields."""
    return tuple(entry.get(name) for name in KINDS[key].fields)


def _with_sources(entry: dict, parents: list[dict]) -> dict:
    """A copy of an entry with the sources of its parents, if they have any."""
    sources = set().union(*(parent.get("sources") or [] for parent in parents))
    return {**entry, "sources": sorted(sources)} if sources else dict(entry)


# -------------------------------------------------------------------------- Algorithm 2: cold start


def memory_of(row: Mapping[str, Any], with_answer: bool = False) -> dict:
    """A memory record (Alg. 2, line 5); a long text is cut to its beginning and end (S21).

    A memory has the problem, the verdict, the boxed answer, and the solution after its thinking, or
    the thinking if that never ended; above 2,000 characters, only the first and the last 1,000.
    row: a rollout's problem, text, r and pred, and perhaps its problem_id. with_answer: also show
    the reference answer, from `gold` (D3).
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
        "reward": row["r"],  # the verdict, under the paper's name; not `sgsd.reward`
        "predicted_answer": row["pred"],
        "trajectory_summary": lines if len(lines) <= 8 else lines[:4] + lines[-4:],
        "feedback": feedback,
    }
    return {**memory, "reference_answer": row["gold"]} if with_answer else memory


def extract(memories: list[dict], complete: Complete) -> tuple[Lists, int]:
    """Both lists' candidates (Alg. 2, lines 8-14), and the number of memories that gave none.

    Skills come from successes and mistakes from failures. Of each memory's reply we take the first
    three complete items.
    """
    ordered = sorted(memories, key=lambda memory: memory["reward"] <= 0)  # line 8: right ones first
    requests = []
    for memory in ordered:
        key = "general_skills" if memory["reward"] > 0 else "common_mistakes"
        requests.append(Request(render_extraction(memory, key), key))  # lines 9-14
    items_of_each = ask(requests, complete)
    candidates: Lists = {key: [] for key in KINDS}
    for memory, request, items in zip(ordered, requests, items_of_each):
        for item in items[:3]:
            if memory.get("problem_id"):
                item = {**item, "sources": [memory["problem_id"]]}
            candidates[request.key].append(item)
    return candidates, items_of_each.count([])


def cold_start(
    memories: list[dict], complete: Complete, *, group_size: int = 32, patience: int = 3
) -> SkillBank:
    """The initial bank from memory records (Alg. 2, lines 8-16).

    We ask the writer for skills of each right solution, and for mistakes of each wrong one. Then we
    merge each list (Alg. 3).
    """
    candidates, lost = extract(memories, complete)  # lines 8-14
    lists, layers = merge_lists(candidates, complete, group_size, patience)  # line 15
    metadata: dict[str, Any] = {
        "source": f"cold start from {len(memories)} seed solutions",
        "seed_solutions": len(memories),
        "right_seed_solutions": sum(memory["reward"] > 0 for memory in memories),
        "truncated_seed_solutions": sum(memory.get("truncated", False) for memory in memories),
        "lost_replies": lost + lost_in(layers),
        "merge_group_size": group_size,
        "merge_stagnation_patience": patience,
    }
    for key, name in zip(KINDS, ("general", "common_mistake")):
        metadata[f"input_{key}"] = len(candidates[key])
        metadata[f"output_{key}"] = len(lists[key])
        metadata[f"{name}_merge_layers"] = layers[key]
    return SkillBank(lists["general_skills"], lists["common_mistakes"], metadata)  # line 16


# -------------------------------------------------------------------- Algorithm 4: online evolution


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
    """The bank after online evolution (Alg. 4); the same object if it does not evolve.

    Candidates are merged with each other and then, if any are left, with their list's dynamic
    entries. Static entries stay, and no dynamic entry repeats a static one's text (D11).
    window: W, the rows of all rollouts since the last evolution (D2); see `memory_of`.
    evolve_every: F; 0 disables. success_gate: γ. max_new_items: N, for both lists together (S12).
    dynamic_capacity: C, per list. memory_answer: show the reference answers to the writer (D3).
    """
    if not window or not evolve_every or step % evolve_every:  # line 1
        return bank
    success = sum(row["r"] > 0 for row in window) / len(window)  # line 4
    if success >= success_gate:  # line 5
        return bank
    memories = [memory_of(row, memory_answer) for row in window]
    candidates, lost = extract(memories, complete)  # lines 8-10
    static: Lists = {}
    dynamic: Lists = {}
    fresh: Lists = {}
    for key in KINDS:
        static[key], dynamic[key] = split(bank, key)
        fresh[key] = _without_copies(candidates[key], static[key], key)
    new, new_layers = merge_lists(fresh, complete, group_size, patience)  # line 11
    joined = {key: dynamic[key] + new[key] for key in KINDS if new[key]}
    merged, layers = merge_lists(joined, complete, group_size, patience)  # line 12
    grown = dict(dynamic)
    for key in merged:
        entries = _without_copies(merged[key], static[key], key)  # a merge may make a copy again
        grown[key] = _under_dynamic_ids(entries, dynamic[key], key, step)
    after = limit_growth(dynamic, grown, max_new_items, dynamic_capacity)  # line 13
    update = {"step": step, "success": success}
    update["lost_replies"] = lost + lost_in(new_layers) + lost_in(layers)
    update |= _counts_of_update(candidates, new, dynamic, after)
    lists = {key: static[key] + after[key] for key in KINDS}  # line 14
    metadata = {**bank.metadata, "updates": [*bank.metadata.get("updates", []), update]}
    return SkillBank(lists["general_skills"], lists["common_mistakes"], metadata, bank.extra)


def _counts_of_update(
    candidates: Lists, new: Lists, dynamic: Lists, after: Lists
) -> dict[str, int]:
    """What an evolution did to both lists, for `metadata`. The arguments are locals of `evolve`."""
    counts = {}
    for key in KINDS:
        counts[f"candidate_{key}"] = len(candidates[key])
        counts[f"merged_{key}"] = len(new[key])
        counts[f"dynamic_{key}"] = len(after[key])
        counts[f"net_new_{key}"] = len(after[key]) - len(dynamic[key])
    return counts


def split(bank: SkillBank, key: str) -> tuple[list[dict], list[dict]]:
    """A list's static and its dynamic entries."""
    static: list[dict] = []
    dynamic: list[dict] = []
    for entry in bank.collection(key):
        if entry[KINDS[key].id_field].startswith(DYNAMIC):
            dynamic.append(entry)
        else:
            static.append(entry)
    return static, dynamic


def _under_dynamic_ids(entries: list[dict], dynamic: list[dict], key: str, step: int) -> list[dict]:
    """Entries under the id of the dynamic entry with the same texts, or else under a new id."""
    kind = KINDS[key]
    # Reversed, so that of entries with the same texts the first one's id counts.
    old_ids = {_texts(entry, key): entry[kind.id_field] for entry in reversed(dynamic)}
    renamed = []
    number = 0
    for entry in entries:
        id_ = old_ids.get(_texts(entry, key))
        while id_ is None:  # the next number that is free: a --bank may have entries of this step
            number += 1
            new_id = f"{DYNAMIC}{kind.prefix}{step:03d}_{number:03d}"
            if new_id not in old_ids.values():
                id_ = new_id
        renamed.append({**entry, kind.id_field: id_})
    return renamed


def limit_growth(before: Lists, after: Lists, max_new_items: int, dynamic_capacity: int) -> Lists:
    """Limit each list to C entries, and the growth of both together to N (Alg. 4, line 13).

    Each list keeps its first C entries. Its growth is the number of entries by which it is longer
    than before, at least 0. While both together have grown by more than N, the list that grew more
    (at a tie, the skills) loses its last entry (S12).
    """
    limited = {key: after[key][:dynamic_capacity] for key in after}
    growth: dict[str, int] = {}
    while True:
        for key in limited:
            growth[key] = max(0, len(limited[key]) - len(before[key]))
        if sum(growth.values()) <= max_new_items:
            return limited
        larger = max(growth, key=growth.__getitem__)
        limited[larger].pop()


def _without_copies(entries: list[dict], static: list[dict], key: str) -> list[dict]:
    """The entries that do not repeat a static entry's text; letter case is ignored (D11)."""
    texts = {entry_text(e, key).casefold() for e in static}
    return [e for e in entries if entry_text(e, key).casefold() not in texts]
