"""The skill bank: schema, cosine index, retrieval of rank-aligned skill-mistake pairs, rendering into prompts.

Nothing here holds a model. What talks to one comes in as a function: `embed(texts) -> float array [n, d]`.
Entries are plain dicts with the paper's field names (App. C); an entry is replaced, never edited.

Dimension key: n entries of a list, d embedding size, K pairs.
"""

import functools
import json
import os
import pathlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distributed import UserError, brief, write_text

Embed = Callable[[Sequence[str]], Any]

FIELDS = {  # Tab. 5; the order is also the order in which an entry is embedded (S10)
    "general_skills": ("title", "principle", "when_to_apply"),
    "common_mistakes": ("description", "why_it_happens", "how_to_avoid"),
}
IDS = {"general_skills": "skill_id", "common_mistakes": "mistake_id"}


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
        except (OSError, ValueError) as e:
            raise UserError(f"bank {path}: cannot be read as JSON ({e}); a file with general_skills and common_mistakes is wanted") from None
        if not isinstance(data, dict):
            raise UserError(f"bank {path}: a JSON object is wanted, got {type(data).__name__}")
        for key, fields in FIELDS.items():
            if not isinstance(data.get(key), list):
                raise UserError(f"bank {path}: `{key}` must be a list; keys found: {', '.join(data) or 'none'}")
            for i, entry in enumerate(data[key]):
                bad = [f for f in (IDS[key], *fields) if not isinstance(entry, dict) or not isinstance(entry.get(f), str)]
                if bad:
                    raise UserError(f"bank {path}: {key}[{i}] lacks the string field(s) {', '.join(bad)} (App. C)")
        if not isinstance(data.get("metadata", {}), dict):
            raise UserError(f"bank {path}: `metadata` must be an object")
        extra = {k: v for k, v in data.items() if k not in (*FIELDS, "metadata")}
        return cls(data["general_skills"], data["common_mistakes"], data.get("metadata", {}), extra)

    def save(self, path: str | os.PathLike) -> None:
        data = {"general_skills": self.general_skills, **self.extra, "common_mistakes": self.common_mistakes, "metadata": self.metadata}
        write_text(path, json.dumps(data, indent=2, ensure_ascii=False))

    def retrieve(self, problem: str, k: int, embed: Embed) -> list[SkillPair]:
        """The K_x = min(k, |G|, |E|) best skills and mistakes for a problem, paired rank by rank, best first (Eq. 2, S8).

        Cosine similarity of L2-normalised embeddings; equal scores keep the bank's order. Entry texts are embedded once
        per bank and `embed`. An empty list gives no pairs. Raises ValueError on k < 1.
        """
        if k < 1:
            raise ValueError(f"retrieve (Eq. 2) needs k >= 1, got {k}")
        if not self.general_skills or not self.common_mistakes:
            return []
        query_d = _normalized(embed([problem]))[0]
        (top_g, s_g), (top_e, s_e) = (_top(self._matrix(key, embed) @ query_d, k) for key in FIELDS)
        return [
            SkillPair(self.general_skills[g], self.common_mistakes[e], float(sg), float(se))
            for g, e, sg, se in zip(top_g, top_e, s_g, s_e)
        ]

    def _matrix(self, key: str, embed: Embed) -> np.ndarray:
        """The [n, d] index of one list, rebuilt when the list's entries are other ones."""
        entries = getattr(self, key)
        made_for, matrix_nd = self._index.get(key, (None, None))
        if made_for != (embed, wanted := [id(e) for e in entries]):
            matrix_nd = _normalized(embed([entry_text(e, key) for e in entries]))
            self._index[key] = ((embed, wanted), matrix_nd)
        return matrix_nd


def entry_text(entry: dict, key: str) -> str:
    """What of an entry is embedded (S10): "title. principle. when" or "description. why. how"."""
    return ". ".join(entry[f] for f in FIELDS[key])


def _normalized(x: Any) -> np.ndarray:
    x_nd = np.asarray(x, dtype=np.float32)
    return x_nd / np.maximum(np.linalg.norm(x_nd, axis=-1, keepdims=True), 1e-12)


def _top(scores_n: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(-scores_n, kind="stable")[:k]
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


def render_student(problem: str) -> str:
    """The plain prompt x (Fig. 6): the problem and nothing else."""
    return render("student", {"problem": problem})


def render_teacher(pair: SkillPair, problem: str) -> str:
    """The k-th teacher's prompt c_k(x) = g_k + e_k + x (Eq. 3, Fig. 6; D1)."""
    skill = {f"skill.{f}": pair.skill[f] for f in FIELDS["general_skills"]}
    mistake = {f"mistake.{f}": pair.mistake[f] for f in FIELDS["common_mistakes"]}
    return render("teacher", {"problem": problem, **skill, **mistake})


# ------------------------------------------------------------------------------------------------ the encoder


def load_encoder(name: str, device: str) -> Embed:
    """`embed` over a sentence-transformers model (hub id or directory): L2-normalised fp32, each text encoded once.

    """
    if not pathlib.Path(name).exists() and name.startswith((".", "/", "~")):
        raise UserError(f"--encoder {name}: no such directory; a hub id or a sentence-transformers directory is wanted")
    try:
        from sentence_transformers import SentenceTransformer

        encoder = SentenceTransformer(name, device=device)
    except Exception as e:  # many kinds: no such id, offline, not an encoder
        raise UserError(f"--encoder {name}: not loaded ({brief(e)})") from None
    cache: dict[str, np.ndarray] = {}

    def embed(texts: Sequence[str]) -> np.ndarray:
        new = list(dict.fromkeys(t for t in texts if t not in cache))
        if new:
            cache.update(zip(new, encoder.encode(new, normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False)))
        return np.stack([cache[t] for t in texts])

    return embed
