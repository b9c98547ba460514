"""The skill bank's life: schema, cosine index, retrieval, prompts; cold start, merging, online evolution.

Nothing here holds a model. What talks to one comes in as a function: `embed(texts) -> float array [n, d]` and
`complete(prompts) -> replies`, which must answer the same prompt anew when it is asked again.
Entries are plain dicts with the paper's field names (App. C); an entry is replaced, never edited.

Dimension key: n entries of a list, d embedding size, K pairs.
"""

import collections
import functools
import json
import os
import pathlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import distributed as D
from distributed import UserError, brief, write_text

Embed = Callable[[Sequence[str]], Any]
Complete = Callable[[list[str]], list[str]]
Log = Callable[[dict], None]

FIELDS = {  # Tab. 5; the order is also the order in which an entry is embedded (S10)
    "general_skills": ("title", "principle", "when_to_apply"),
    "common_mistakes": ("description", "why_it_happens", "how_to_avoid"),
}
IDS = {"general_skills": "skill_id", "common_mistakes": "mistake_id"}
ITEM_FORM = '\nEach item is an object with the string fields "{}", "{}" and "{}".'  # S13: the paper's prompt names no fields
PREFIX = {"general_skills": "gen_", "common_mistakes": "err_"}
EXTRACT_PROMPT = {"general_skills": "extract_skills", "common_mistakes": "extract_mistakes"}
MERGE_PROMPT = {"general_skills": "merge_skills", "common_mistakes": "merge_mistakes"}


# ------------------------------------------------------------------------------------------------ the bank


@dataclass(frozen=True)
class SkillPair:
    """The k-th teacher's privileged information g_k + e_k (Eq. 3) with the two cosine similarities (Eq. 6)."""

    skill: dict
    mistake: dict
    s_g: float
    s_e: float


@dataclass
class SkillBank:
    """B = {G, E} (§2.1). `extra` keeps unknown top-level keys of a file, so that load and save lose nothing."""

    general_skills: list[dict]
    common_mistakes: list[dict]
    metadata: dict = field(default_factory=dict)
    extra: dict = field(default_factory=dict)
    _index: dict = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "SkillBank":
        """Read a bank's JSON; UserError names the file, the entry and the field that is wrong."""
        try:
            data = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as e:
            raise UserError(
                f"bank {path}: cannot be read as JSON ({e}); a file with general_skills and common_mistakes is wanted"
            ) from None
        if not isinstance(data, dict):
            raise UserError(f"bank {path}: a JSON object is wanted, got {type(data).__name__}")
        for key, fields in FIELDS.items():
            if not isinstance(data.get(key), list):
                raise UserError(
                    f"bank {path}: `{key}` must be a list; keys found: {', '.join(data) or 'none'}"
                )
            for i, entry in enumerate(data[key]):
                bad = [
                    f
                    for f in (IDS[key], *fields)
                    if not isinstance(entry, dict) or not isinstance(entry.get(f), str)
                ]
                if bad:
                    raise UserError(
                        f"bank {path}: {key}[{i}] lacks the string field(s) {', '.join(bad)} (App. C)"
                    )
        if not isinstance(data.get("metadata", {}), dict):
            raise UserError(f"bank {path}: `metadata` must be an object")
        extra = {k: v for k, v in data.items() if k not in (*FIELDS, "metadata")}
        return cls(data["general_skills"], data["common_mistakes"], data.get("metadata", {}), extra)

    def save(self, path: str | os.PathLike) -> None:
        data = {
            "general_skills": self.general_skills,
            **self.extra,
            "common_mistakes": self.common_mistakes,
            "metadata": self.metadata,
        }
        write_text(path, json.dumps(data, indent=2, ensure_ascii=False))

    def retrieve(self, problem: str, k: int, embed: Embed) -> list[SkillPair]:
        """The K_x = min(k, |G|, |E|) best skills and mistakes for a problem, paired rank by rank, best first (Eq. 2, S8).

        Cosine similarity of L2-normalised embeddings; equal scores keep the bank's order. Entry texts are embedded once
        per bank and `embed`. An empty list gives no pairs. Raises ValueError on k < 1.
        """
        return self.retrieve_all([problem], k, embed)[0]

    def retrieve_all(self, problems: Sequence[str], k: int, embed: Embed) -> list[list[SkillPair]]:
        """`retrieve` for each problem, the same bits: a large index is read from memory once for all of them, not once for each."""
        if k < 1:
            raise ValueError(f"retrieve (Eq. 2) needs k >= 1, got {k}")
        if not problems or not self.general_skills or not self.common_mistakes:
            return [[] for _ in problems]
        queries_Qd = _normalized(embed(problems))
        tops = (
            [_top(scores_n, k) for scores_n in _scores(self._matrix(key, embed), queries_Qd)]
            for key in FIELDS
        )
        return [
            [
                SkillPair(self.general_skills[g], self.common_mistakes[e], float(sg), float(se))
                for g, e, sg, se in zip(top_g, top_e, s_g, s_e)
            ]
            for (top_g, s_g), (top_e, s_e) in zip(*tops)
        ]

    def _matrix(self, key: str, embed: Embed) -> np.ndarray:
        """The [n, d] index of one list, rebuilt when the list's entries are other ones."""
        entries = getattr(self, key)
        made_for, matrix_nd = self._index.get(key, (None, None))
        if made_for != (embed, entries):
            matrix_nd = _normalized(embed([entry_text(e, key) for e in entries]))
            self._index[key] = ((embed, list(entries)), matrix_nd)
        return matrix_nd


COMMON_NUMBERS = {
    "10",
    "12",
    "20",
    "24",
    "30",
    "45",
    "50",
    "60",
    "90",
    "100",
    "120",
    "180",
    "360",
    "1000",
}


def lint(bank: SkillBank) -> str:
    """One line on the entries with a number that looks like one problem's: two digits or more, not a common one; "" if none."""
    found = []
    for key, fields in FIELDS.items():
        for e in getattr(bank, key):
            numbers = re.findall(r"\d+(?:\.\d+)?", " ".join(e[f] for f in fields))
            odd = [n for n in dict.fromkeys(numbers) if len(n) > 1 and n not in COMMON_NUMBERS]
            found += [f"{e[IDS[key]]} ({', '.join(odd)})"] if odd else []
    some = (
        (", ".join(found[:5]) + (", ..." if len(found) > 5 else ""))
        .encode("utf-8", "replace")
        .decode()
    )  # it is printed
    return (
        f"bank: {len(found)} entries carry numbers that look like one problem's: {some}"
        if found
        else ""
    )


def entry_text(entry: dict, key: str) -> str:
    """What of an entry is embedded (S10): "title. principle. when" or "description. why. how"."""
    return ". ".join(entry[f] for f in FIELDS[key])


def _normalized(x: Any) -> np.ndarray:
    x_nd = np.asarray(x, dtype=np.float32)
    return x_nd / np.maximum(np.linalg.norm(x_nd, axis=-1, keepdims=True), 1e-12)


BLOCK = 1024  # entries that every query meets while they are in the processor's cache


def _scores(matrix_nd: np.ndarray, queries_Qd: np.ndarray) -> np.ndarray:
    """[Q, n], each query by products of its own: one product of all would round by how many they are, that is by the world's size."""
    scores_Qn = np.empty((len(queries_Qd), len(matrix_nd)), dtype=np.float32)
    for at in range(0, len(matrix_nd), BLOCK):
        for scores_n, query_d in zip(scores_Qn, queries_Qd):
            scores_n[at : at + BLOCK] = matrix_nd[at : at + BLOCK] @ query_d
    return scores_Qn


def _top(scores_n: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Places and scores of the k best, best first, equal scores in order of place: a stable sort of those that can be among them."""
    least = np.partition(scores_n, max(0, len(scores_n) - k))[max(0, len(scores_n) - k)]
    able = np.flatnonzero(scores_n >= least)
    order = able[np.argsort(-scores_n[able], kind="stable")[:k]]
    return order, scores_n[order]


# ------------------------------------------------------------------------------------------------ prompts


@functools.cache
def template(name: str) -> str:
    """A template of prompts/, word for word the paper's."""
    return (pathlib.Path(__file__).parent / "prompts" / f"{name}.txt").read_text(encoding="utf-8")


def render(name: str, values: dict[str, str]) -> str:
    r"""Fill a template in one pass: text that is put in is never expanded again, `\boxed{}` is left alone, {{}} is {} (S9)."""
    pattern = "|".join(map(re.escape, ("{{}}", *(f"{{{key}}}" for key in values))))
    return re.sub(pattern, lambda m: "{}" if m[0] == "{{}}" else values[m[0][1:-1]], template(name))


def as_json(obj: object) -> str:
    """How records stand in a prompt."""
    return json.dumps(obj, indent=2, ensure_ascii=False)


def _no_log(row: dict) -> None:
    """The default listener for replies and their outcomes."""


def render_student(problem: str) -> str:
    """The plain prompt x (Fig. 6): the problem and nothing else."""
    return render("student", {"problem": problem})


def render_teacher(pair: SkillPair, problem: str) -> str:
    """The k-th teacher's prompt c_k(x) = g_k + e_k + x (Eq. 3, Fig. 6; D1)."""
    skill = {f"skill.{f}": pair.skill[f] for f in FIELDS["general_skills"]}
    mistake = {f"mistake.{f}": pair.mistake[f] for f in FIELDS["common_mistakes"]}
    return render("teacher", {"problem": problem, **skill, **mistake})


def render_skills(pairs: Sequence[SkillPair], problem: str) -> str:
    """All pairs in one prompt, best first (S14): the teacher's template with a bullet per skill and mistake; the plain one without pairs."""
    if not pairs:
        return render_student(problem)
    parts = template("teacher").split("\n\n")[:3]  # what it is, skills, mistakes
    for at, kind in ((1, "skill"), (2, "mistake")):
        title, bullet = parts[at].split("\n", 1)
        entries = [vars(p)[kind] for p in pairs]
        parts[at] = "\n".join(
            [
                title,
                *(re.sub(rf"{{{kind}\.(\w+)}}", lambda m, e=e: e[m[1]], bullet) for e in entries),
            ]
        )  # type: ignore[misc]
    return "\n\n".join([*parts, render_student(problem)])


def render_extraction(memory: dict, key: str) -> str:
    """The prompt that asks for the general skills of a success or the common mistakes of a failure (Alg. 2, App. D.2)."""
    shown = as_json({k: v for k, v in memory.items() if k != "problem_id"})
    return render(EXTRACT_PROMPT[key], {"memory_json": shown}) + ITEM_FORM.format(*FIELDS[key])


def render_merge(items: list[dict], key: str) -> str:
    """The prompt that asks to merge a group of items (Alg. 3, line 5): their three fields and nothing else."""
    return render(MERGE_PROMPT[key], {"items_json": as_json([_item(e, key) or e for e in items])})


# ------------------------------------------------------------------------------------------------ JSON from a model

_COMMANDS = set(  # LaTeX that begins like JSON's \n, \r or \t; \b and \f are never meant as control characters
    "nabla natural ne nearrow neg neq newline nexists ngeq ngtr ni nleq nleqslant nless nmid nolimits nonumber not notin nparallel "
    "nprec nsim nsubseteq nsucceq nu num nwarrow rVert rangle rbrace rbrack rceil restriction rfloor rho right rightarrow rightarrows "
    "rightharpoonup rightleftharpoons rm root rtimes rvert tag tan tanh tau tbinom text textbf textit textrm textstyle texttt tfrac "
    "therefore theta thickapprox thinspace tilde times tiny to top triangle trianglelefteq triangleq twoheadrightarrow".split()
)
_ESCAPE = re.compile(r'(?P<valid>\\[\\"/]|\\u[0-9a-fA-F]{4})|\\(?P<letters>[a-zA-Z]*)')
_OPENING = re.compile(r"[{\[]")
MAX_REPLY = 100_000  # characters of a reply that are read
MAX_EFFORT = 1_000_000  # characters that are decoded in vain before reading ends: "[[[[..." would take quadratic time


def _latex_safe(text: str) -> str:
    r"""Double each backslash that JSON would misread (\frac, \theta, \(); one that is escaped already stays as it is."""

    def fix(match: re.Match[str]) -> str:
        letters = match["letters"] or ""
        control = letters[:1] in ("n", "r", "t") and letters not in _COMMANDS
        return match[0] if match["valid"] or control else "\\" + match[0]

    return _ESCAPE.sub(fix, text)


def read_items(text: str, key: str) -> tuple[list[dict], bool]:
    """The items of a model's reply, and whether the reply was whole: nothing broken off, every item in it valid.

    Thinking, code fences and prose around the JSON are passed over; LaTeX backslashes and trailing commas are repaired; a
    single object counts as a list of one; of a reply that was cut off the complete items are kept. An item keeps the three
    fields of its kind (Tab. 5), all non-empty strings. key: "general_skills" or "common_mistakes". Never raises on a str.
    """
    text = _latex_safe(text.rpartition("</think>")[2].partition("<think>")[0][:MAX_REPLY])
    readings = [_scan(t, key) for t in (text, re.sub(r",(\s*[}\]])", r"\1", text))]
    return max(readings, key=lambda reading: (reading[1], len(reading[0])))


def _scan(text: str, key: str) -> tuple[list[dict], bool]:
    decoder = json.JSONDecoder(strict=False)
    listed: list[Any] = []  # entries of lists that were read whole
    loose: list[Any] = []  # items found outside of any
    broken = at = effort = 0
    while effort < MAX_EFFORT and (start := _OPENING.search(text, at)):
        try:
            value, at = decoder.raw_decode(text, start.start())
        except (ValueError, RecursionError) as e:
            at = start.end()
            effort += getattr(e, "pos", len(text)) - at + 300  # an exception has its own price
            broken += bool(
                re.match(r'\s*[{\["]', text[at : at + 100])
            )  # a bracket of prose is nothing lost
            continue
        if isinstance(value, dict) and key in value:
            listed += value[key] if isinstance(value[key], list) else [value[key]]
        elif isinstance(value, list) and any(isinstance(v, dict) for v in value):
            listed += value
        elif _item(value, key):
            loose.append(value)
        else:
            effort += at - start.end()
            at = start.end()  # some other value: look inside
    items = [item for item in (_item(v, key) for v in listed + loose) if item]
    whole = not broken and (len(items) == len(listed) > 0 or (not listed and len(loose) == 1))
    return [item for i, item in enumerate(items) if item not in items[:i]], whole


def _item(value: Any, key: str) -> dict | None:
    """The three fields of an item, stripped; None when one is missing, empty or not a string."""
    texts = [value.get(f) if isinstance(value, dict) else None for f in FIELDS[key]]
    good = [
        t.strip().encode("utf-8", "replace").decode()
        for t in texts
        if isinstance(t, str) and t.strip()
    ]  # no lone surrogates
    return dict(zip(FIELDS[key], good)) if len(good) == len(texts) else None


def parse_json_items(text: str, key: str) -> list[dict]:
    """The readable items of a reply, [] when there are none; see `read_items`."""
    return read_items(text, key)[0]


# ------------------------------------------------------------------------------------------------ merging (Alg. 3)


def _ask(
    kind: str,
    prompts: list[str],
    key: str,
    complete: Complete,
    log: Log,
    usable: Callable[[int, list[dict], bool], bool],
) -> list[list[dict] | None]:
    """Items per prompt; a prompt whose reply is not usable is asked once more (D4), then None. Every reply is logged."""
    found: list[list[dict] | None] = [None] * len(prompts)
    for attempt in (1, 2):
        left = [i for i, items in enumerate(found) if items is None]
        for i, reply in zip(left, complete([prompts[i] for i in left]) if left else []):
            items, whole = read_items(reply, key)
            outcome = (
                ("read" if whole else "repaired")
                if usable(i, items, whole)
                else ("retried" if attempt == 1 else "lost")
            )
            found[i] = items if outcome in ("read", "repaired") else None
            log(
                {
                    "kind": kind,
                    "attempt": attempt,
                    "outcome": outcome,
                    "items": len(items),
                    "prompt": prompts[i],
                    "reply": reply,
                }
            )
    return found


def merge(
    items: list[dict],
    key: str,
    complete: Complete,
    group_size: int = 32,
    patience: int = 3,
    *,
    prefix: str = "",
    log: Log = _no_log,
) -> tuple[list[dict], list[dict]]:
    """Hierarchical merging (Alg. 3): one collection's merged entries under new ids, and a record per layer.

    key: "general_skills" or "common_mistakes". complete(prompts) -> replies is asked for all groups of a layer at once.
    A group stays as it is unless its reply is whole and holds at least one item (S11) and no more than the group: a merge
    may merge, never lose or add. An entry's `sources`, where it has them, follow it; a rewritten entry gets its group's.
    prefix: of the ids; "gen_" or "err_" by default. Raises ValueError on group_size < 2 or patience < 1.
    """
    if group_size < 2 or patience < 1:
        raise ValueError(
            f"merge (Alg. 3) needs group_size >= 2 and patience >= 1, got {group_size} and {patience}"
        )
    layers: list[dict] = []
    current, stagnant, reason = list(items), 0, None  # line 1
    while reason is None:
        groups = [current[i : i + group_size] for i in range(0, len(current), group_size)]  # line 3
        asked = [g for g in groups if len(g) > 1]  # line 4
        prompts = [render_merge(g, key) for g in asked]  # line 5
        usable = lambda i, found, whole: whole and 0 < len(found) <= len(asked[i])  # noqa: B023, E731
        replies = iter(_ask(MERGE_PROMPT[key], prompts, key, complete, log, usable))
        merged: list[dict] = []
        for group in groups:
            reply = next(replies) if len(group) > 1 else None
            merged += (
                group if reply is None else [_inherit(e, group, key) for e in reply]
            )  # lines 6, 8
        stagnant = 0 if len(merged) < len(current) else stagnant + 1  # line 9
        reason = (
            "root_group_reached"
            if len(groups) <= 1
            else "stagnation_patience_reached"
            if stagnant >= patience
            else None
        )  # line 11
        layers.append(
            {
                "layer_index": len(layers),
                "input_items": len(current),
                "num_groups": len(groups),
                "output_items": len(merged),
                "stagnant_layers": stagnant,
                "stopped_reason": reason,
            }
        )
        current = merged  # line 10
    unique: dict[tuple, dict] = {}
    for e in current:  # line 12
        twin = unique.setdefault(texts := tuple(e.get(f) for f in FIELDS[key]), e)
        if twin is not e and "sources" in twin | e:
            unique[texts] = {
                **twin,
                "sources": sorted({*twin.get("sources", []), *e.get("sources", [])}),
            }
    ids = (f"{prefix or PREFIX[key]}{i:03d}" for i in range(1, len(unique) + 1))
    return [
        {IDS[key]: i, **{k: v for k, v in e.items() if k != IDS[key]}}
        for i, e in zip(ids, unique.values())
    ], layers


def _inherit(entry: dict, group: list[dict], key: str) -> dict:
    """A merged entry with the sources it came from: its twin's in the group, else all of the group's."""
    parents = [e for e in group if _item(e, key) == entry] or group
    sources = sorted({s for e in parents for s in e.get("sources", [])})
    return {**entry, "sources": sources} if sources else entry


# ------------------------------------------------------------------------------------------------ cold start (Alg. 2)


def make_memory(
    problem_id: str, problem: str, text: str, r: int, pred: str | None, *, answer: str | None = None
) -> dict:
    """A memory record (Alg. 2, line 5; S21): problem, completion excerpt, reward, answer, trajectory summary, feedback.

    answer: the reference answer, kept out unless it is given (D3).
    """
    text = text.rpartition("</think>")[2].strip()
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    feedback = (
        "The verifier accepted the final answer."
        if r > 0
        else "The verifier rejected the final answer."
    )
    if pred is None:
        feedback = "The attempt gave no final answer in a box."
    return {
        "problem_id": problem_id,
        "problem": problem,
        "completion": text if len(text) <= 2000 else f"{text[:1000]}\n[...]\n{text[-1000:]}",
        "reward": r,
        "predicted_answer": pred,
        "trajectory_summary": [
            line[:200] for line in (lines if len(lines) <= 8 else lines[:4] + lines[-4:])
        ],
        "feedback": feedback,
        **({} if answer is None else {"reference_answer": answer}),
    }


def extract(memories: list[dict], complete: Complete, log: Log = _no_log) -> dict[str, list[dict]]:
    """Candidates (Alg. 2, lines 8-14): up to three general skills per success, up to three common mistakes per failure."""
    found: dict[str, list[dict]] = {}
    for key, wanted in (("general_skills", 1), ("common_mistakes", -1)):
        chosen = [m for m in memories if m["reward"] == wanted]
        replies = _ask(
            EXTRACT_PROMPT[key],
            [render_extraction(m, key) for m in chosen],
            key,
            complete,
            log,
            lambda _, items, whole: bool(items),
        )
        named = [[m["problem_id"]] if m.get("problem_id") else [] for m in chosen]
        found[key] = [
            {**e, **({"sources": s} if s else {})}
            for items, s in zip(replies, named)
            for e in (items or [])[:3]
        ]
    return found


def cold_start(
    memories: list[dict],
    complete: Complete,
    *,
    group_size: int = 32,
    patience: int = 3,
    log: Log = _no_log,
) -> SkillBank:
    """The initial bank from memory records (Alg. 2, lines 8-16), its metadata with the layer-level merge counts."""
    found = extract(memories, complete, log)
    (skills, skill_layers), (mistakes, mistake_layers) = (
        merge(found[key], key, complete, group_size, patience, log=log) for key in FIELDS
    )
    return SkillBank(
        skills,
        mistakes,
        {
            "source": f"cold start from {len(memories)} memories, {sum(m['reward'] == 1 for m in memories)} of them successes",
            "merge_group_size": group_size,
            "merge_stagnation_patience": patience,
            "input_general_skills": len(found["general_skills"]),
            "output_general_skills": len(skills),
            "input_common_mistakes": len(found["common_mistakes"]),
            "output_common_mistakes": len(mistakes),
            "general_merge_layers": skill_layers,
            "common_mistake_merge_layers": mistake_layers,
        },
    )


# ------------------------------------------------------------------------------------------------ evolution (Alg. 4)


def evolve(
    bank: SkillBank,
    window: Sequence[Any],
    step: int,
    complete: Complete,
    *,
    update_every: int = 25,
    success_gate: float = 0.8,
    max_new_items: int = 5,
    dynamic_capacity: int = 30,
    group_size: int = 32,
    patience: int = 3,
    memory_answer: bool = False,
    log: Log = _no_log,
) -> SkillBank:
    """The bank after online evolution (Alg. 4); the same object when nothing is due. Static entries are never touched.

    window: all rollouts since the last update (D2), objects with .problem, .text, .r, .pred, for `memory_answer` (D3) .gold
    too. update_every: 0 for never. At most `max_new_items` net new dynamic entries per update, both collections together
    (S12), and `dynamic_capacity` per collection: what a merge puts first stays.
    """
    if not window or not update_every or step % update_every:  # line 1
        return bank
    success = sum(w.r > 0 for w in window) / len(window)  # line 4
    if success >= success_gate:  # line 5
        return bank
    memories = [
        make_memory(
            getattr(w, "problem_id", ""),
            w.problem,
            w.text,
            w.r,
            w.pred,
            answer=w.gold if memory_answer else None,
        )
        for w in window
    ]
    candidates = extract(memories, complete, log=log)  # lines 8-10
    before, after = {}, {}
    for key in FIELDS:
        before[key] = [e for e in getattr(bank, key) if e[IDS[key]].startswith("dyn_")]
        new, _ = merge(candidates[key], key, complete, group_size, patience, log=log)  # line 11
        both = before[key] + new  # line 12
        after[key] = (
            merge(both, key, complete, group_size, patience, prefix=f"dyn_{PREFIX[key]}", log=log)[
                0
            ]
            if new
            else both
        )
    growth = {key: max(0, len(after[key]) - len(before[key])) for key in FIELDS}  # line 13
    while sum(growth.values()) > max_new_items:
        growth[max(growth, key=growth.__getitem__)] -= 1
    kept = {
        key: after[key][: min(len(before[key]) + growth[key], dynamic_capacity)] for key in FIELDS
    }
    static = {
        key: [e for e in getattr(bank, key) if not e[IDS[key]].startswith("dyn_")] for key in FIELDS
    }
    counts = {
        f"{name}_{key}": len(x[key])
        for name, x in (("candidate", candidates), ("dynamic", kept))
        for key in FIELDS
    }
    update = {"step": step, "success": success, **counts}
    metadata = {**bank.metadata, "updates": [*bank.metadata.get("updates", []), update]}
    skills, mistakes = (static[key] + kept[key] for key in FIELDS)
    return SkillBank(skills, mistakes, metadata, bank.extra)  # line 14


# ------------------------------------------------------------------------------------------------ the encoder


def load_encoder(name: str, device: str) -> Embed:
    """`embed` over a sentence-transformers model (hub id or directory): L2-normalised fp32, each text encoded once."""
    if not pathlib.Path(name).exists() and name.startswith((".", "/", "~")):
        raise UserError(
            f"--encoder {name}: no such directory; a hub id or a sentence-transformers directory is wanted"
        )
    try:
        from sentence_transformers import SentenceTransformer

        encoder = SentenceTransformer(name, device=device).float()  # whatever the files are in
    except Exception as e:  # many kinds: no such id, offline, not an encoder
        raise UserError(f"--encoder {name}: not loaded ({brief(e)})") from None
    cache: dict[str, np.ndarray] = {}

    def embed(texts: Sequence[str]) -> np.ndarray:
        new = list(dict.fromkeys(t for t in texts if t not in cache))
        if new:  # one at a time: in a batch, padding changes the last bits, and a resumed run batches differently
            clean = [
                t.encode("utf-8", "replace").decode() for t in new
            ]  # lone surrogates have no bytes
            cache.update(
                zip(
                    new,
                    encoder.encode(
                        clean,
                        batch_size=1,
                        normalize_embeddings=True,
                        convert_to_numpy=True,
                        show_progress_bar=False,
                    ),
                )
            )
        return np.stack([cache[t] for t in texts])

    return embed


# ------------------------------------------------------------------------------------------------ making a bank for real


class ReplyLog:
    """Keeps every raw reply with its outcome in bank/replies.jsonl (rank 0), and counts outcomes until they are taken."""

    def __init__(self, folder: pathlib.Path, world: D.World):
        self.path, self.world, self.counts = (
            folder / "replies.jsonl",
            world,
            collections.Counter[str](),
        )
        self.step = 0  # the update they belong to

    def __call__(self, row: dict) -> None:
        self.counts[row["outcome"]] += 1
        if self.world.main:
            D.append_jsonl(self.path, [{"step": self.step, **row}])

    def take(self) -> dict[str, int]:
        counts, self.counts = (
            {k: self.counts[k] for k in ("read", "repaired", "retried", "lost")},
            collections.Counter(),
        )
        return counts


def make_bank(
    folder: pathlib.Path,
    problems: list,
    model: Any,
    tokenizer: Any,
    verifier: Any,
    complete: Complete,
    world: D.World,
    *,
    count: int = 256,
    seed: int = 0,
    max_new_tokens: int = 1024,
    memory_answer: bool = False,
    group_size: int = 32,
    patience: int = 3,
    rows: int = 32,
) -> SkillBank:
    """Algorithm 2 from problems to bank, shared over ranks. folder/memories.jsonl grows as memories come: what a killed
    run has made is not made again. The seed set is drawn by `seed` and stands in the metadata by id."""
    from tqdm import tqdm

    import rollout as R  # only making a bank needs a model

    chosen = random.Random(seed).sample(problems, min(count, len(problems)))
    path, log = folder / "memories.jsonl", ReplyLog(folder, world)
    text_of = {x.id: x.problem for x in chosen}
    done = {
        m["problem_id"]: m
        for m in D.read_jsonl(path)
        if text_of.get(m["problem_id"]) == m["problem"]
    }
    D.gather(None, world)  # every rank has read before one writes
    if world.main:
        write_text(
            path, "".join(json.dumps(m) + "\n" for m in done.values())
        )  # without a torn last line
        log.path.unlink(missing_ok=True)  # its replies are all asked for again
    left = [x for x in chosen if x.id not in done]
    bar = tqdm(
        total=len(chosen),
        initial=len(chosen) - len(left),
        disable=not world.main,
        unit="memory",
        desc="cold start",
    )
    for at in range(0, len(left), rows * world.size):
        mine = left[at : at + rows * world.size][world.rank :: world.size]
        prompts = [
            R.chat_ids(tokenizer, render("memory", {"problem": x.problem}), thinking=False)
            for x in mine
        ]
        keys = [R.sample_key(seed, 0, x.id) for x in mine]
        rolls = R.sample_rollouts(
            model,
            tokenizer,
            mine,
            prompts,
            R.Sampling(max_new_tokens=max_new_tokens),
            keys,
            verifier,
        )
        new = [
            make_memory(
                x.id, x.problem, y.text, y.r, y.pred, answer=x.answer if memory_answer else None
            )
            for x, y in zip(mine, rolls)
        ]
        shares = D.gather(new, world)
        fresh = [m for share in shares for m in share]
        if world.main:
            D.append_jsonl(path, fresh)
        done.update((m["problem_id"], m) for m in fresh)
        bar.update(len(fresh))
    bar.close()
    bank = cold_start(
        [done[x.id] for x in chosen], complete, group_size=group_size, patience=patience, log=log
    )
    bank.metadata.update(seed=seed, seed_problems=[x.id for x in chosen], replies=log.take())
    return bank


def main(argv: Sequence[str] | None = None) -> int:
    """python skills.py --model M --data D --out bank.json: a cold-start bank, written beside its memories and replies."""
    import rollout as R

    parser = D.Parser(
        "skills.py",
        description="Make a skill bank by cold start (Algorithm 2).",
        allow_abbrev=False,
    )
    parser.add_argument("--model", default="Qwen/Qwen3-1.7B", help="hub id or directory")
    parser.add_argument(
        "--data",
        default="BytedTsinghua-SIA/DAPO-Math-17k",
        help="problems: hub id, parquet, directory or JSONL",
    )
    parser.add_argument(
        "--out",
        required=True,
        help="the bank (JSON); memories.jsonl and replies.jsonl go into the folder OUT.work",
    )
    parser.add_argument("--problems", type=int, default=256, help="seed problems; Tab. 12")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-new-tokens", type=int, default=1024, help="of a solution; Tab. 11")
    parser.add_argument(
        "--reply-tokens", type=int, default=2048, help="of an extraction or merge reply"
    )
    parser.add_argument(
        "--merge-group-size", type=int, default=32, help="H, items per merge; Alg. 3"
    )
    parser.add_argument(
        "--memory-answer",
        action="store_true",
        help="show the reference answer to the extractor; D3",
    )
    parser.add_argument(
        "--allow-eval-overlap",
        action="store_true",
        help="take problems that also stand in AIME24, AIME25 or HMMT25",
    )
    parser.add_argument("--rows", type=int, default=32, help="rows per generation batch and rank")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))

    def body() -> None:
        args = parser.parse_args(argv)
        if min(args.problems, args.rows, args.reply_tokens, args.merge_group_size - 1) < 1:
            raise UserError(
                "--problems, --rows and --reply-tokens must be >= 1, --merge-group-size >= 2"
            )
        if pathlib.Path(args.out).is_dir():
            raise UserError(f"--out {args.out}: is a directory; a file for the bank is wanted")
        R.Sampling(max_new_tokens=args.max_new_tokens)  # its own check
        world = D.init(args.device)
        settings = {k: v for k, v in vars(args).items() if k not in ("out", "rows", "device")}
        if (file := pathlib.Path(f"{args.out}.work", "settings.json")).exists() and json.loads(
            file.read_text()
        ) != settings:
            raise UserError(
                f"{file.parent}: holds memories made with other settings (see its settings.json); give another --out"
            )
        problems, _ = R.load_problems(args.data)
        if not args.allow_eval_overlap:
            R.refuse_overlap(problems, args.data, {})
        model, tokenizer = R.load_model(args.model, world.device, dtype=args.dtype)
        complete = R.make_complete(
            model,
            tokenizer,
            world,
            max_new_tokens=args.reply_tokens,
            seed=args.seed,
            rows=args.rows,
        )
        if world.main:
            D.write_json(file, settings)
        with R.Verifier() as verifier:
            bank = make_bank(
                pathlib.Path(f"{args.out}.work"),
                problems,
                model,
                tokenizer,
                verifier,
                complete,
                world,
                count=args.problems,
                seed=args.seed,
                max_new_tokens=args.max_new_tokens,
                memory_answer=args.memory_answer,
                group_size=args.merge_group_size,
                rows=args.rows,
            )
        if world.main:
            bank.save(args.out)
            if warning := lint(bank):
                print(warning)
            counts = f"{len(bank.general_skills)} general skills, {len(bank.common_mistakes)} common mistakes"
            print(f"{args.out}: {counts}; replies {bank.metadata['replies']}")
        D.leave_together(world)

    return D.command("skills", body)


if __name__ == "__main__":
    D.leave(main())
