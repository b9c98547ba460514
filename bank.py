"""The skill bank: its schema, its index, the files of a run's banks, and what is said of a bank.

Entries are plain dicts with the paper's field names (App. C); an entry is replaced, never edited.

Dimension key: n entries of a list, d embedding size.
"""

import functools
import json
import pathlib
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import files
import inputs
from cli import SharedError
from config import Config
from inputs import FIELDS, IDS
from policy import Embed
from replies import Items
from verify import is_success

SHORT = {"general_skills": "skills", "common_mistakes": "mistakes"}
as_json = functools.partial(json.dumps, indent=2, ensure_ascii=False)  # in prompts and files
COMMON_NUMBERS = set("10 12 20 24 30 45 50 60 90 100 120 180 360 1000".split())


@dataclass(frozen=True)
class SkillPair:
    """The k-th teacher's guidance g_k + e_k (Eq. 3) and its two cosine similarities (Eq. 6)."""

    skill: dict
    mistake: dict
    s_g: float
    s_e: float


@dataclass
class SkillBank:
    """B = {G, E} (§2.1). `extra` keeps a file's unknown keys: load and save lose nothing."""

    general_skills: Items
    common_mistakes: Items
    metadata: dict = field(default_factory=dict)
    extra: dict = field(default_factory=dict)
    _index: dict = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def load(cls, path: str | pathlib.Path) -> "SkillBank":
        """Read a bank's JSON. UserError names the file, the entry and the field that is wrong."""
        data = inputs.read_bank(path)
        skills, mistakes, metadata = (data.pop(name) for name in (*FIELDS, "metadata"))
        return cls(skills, mistakes, metadata, data)

    def save(self, path: str | pathlib.Path) -> None:
        data = {"general_skills": self.general_skills, **self.extra}
        data |= {"common_mistakes": self.common_mistakes, "metadata": self.metadata}
        files.write_text(path, as_json(data))

    @property
    def sizes(self) -> str:
        return f"{len(self.general_skills)} skills and {len(self.common_mistakes)} mistakes"

    def collection(self, key: str) -> Items:
        """One of the two lists; key: "general_skills" or "common_mistakes", here and below."""
        return self.general_skills if key == "general_skills" else self.common_mistakes

    def retrieve(self, problem: str, k: int, embed: Embed) -> list[SkillPair]:
        """The min(k, |G|, |E|) best pairs for a problem, paired rank by rank (Eq. 2, S8).

        Scores are cosine similarities; equal scores keep the bank's order. Entries are embedded
        once per bank and `embed`. An empty list gives no pairs. Raises ValueError on k < 1.
        """
        if k < 1:
            raise ValueError(f"retrieve (Eq. 2) needs k >= 1, got {k}")
        if not self.general_skills or not self.common_mistakes:
            return []
        query_d = _normalized(embed([problem]))[0]
        best = []
        for key in FIELDS:
            entries = self.collection(key)
            source, matrix_nd = self._index.get(key, (None, None))
            if source != (embed, entries):
                matrix_nd = _normalized(embed([entry_text(e, key) for e in entries]))
                self._index[key] = (embed, list(entries)), matrix_nd
            scores_n = matrix_nd @ query_d
            order = np.argsort(-scores_n, kind="stable")[:k]
            best.append([(entries[i], float(scores_n[i])) for i in order])
        return [SkillPair(g, e, s_g, s_e) for (g, s_g), (e, s_e) in zip(*best)]


def entry_text(entry: dict, key: str) -> str:
    """The text that is embedded (S10): "title. principle. when" or "description. why. how"."""
    return ". ".join(entry[name] for name in FIELDS[key])


def _normalized(vectors: Any) -> np.ndarray:
    x_nd = np.asarray(vectors, dtype=np.float32)
    return x_nd / np.maximum(np.linalg.norm(x_nd, axis=-1, keepdims=True), 1e-12)


# ------------------------------------------------------------------------- the banks of a run


def bank_versions(out: pathlib.Path) -> dict[int, pathlib.Path]:
    """The saved banks of a run, by the step after which each came into use."""
    return {int(path.stem[5:]): path for path in sorted((out / "bank").glob("step_*.json"))}


def load_bank(cfg: Config, step: int, resume: bool) -> SkillBank | None:
    """The run's own bank after step `step` (D9), else --bank, else None."""
    versions = bank_versions(pathlib.Path(cfg.out)) if resume else {}
    if versions:
        return SkillBank.load(versions[max(since for since in versions if since <= step)])
    if not cfg.bank:
        return None
    inputs.check_bank(cfg)
    return SkillBank.load(cfg.bank)


def save_bank(bank: SkillBank, out: pathlib.Path, step: int) -> None:
    """Save a bank as the version of step `step` and as the latest."""
    for name in (f"step_{step:06d}", "bank"):
        bank.save(out / "bank" / f"{name}.json")
    warning = lint(bank)
    if warning:
        print(warning)


# ------------------------------------------------------------------- what is said of a bank


def lint(bank: SkillBank) -> str:
    """One line on the entries with a number that looks like one problem's, "" without any."""
    named = []
    for key in FIELDS:
        for entry in bank.collection(key):
            numbers = re.findall(r"\d+(?:\.\d+)?", entry_text(entry, key))
            odd = [n for n in dict.fromkeys(numbers) if len(n) > 1 and n not in COMMON_NUMBERS]
            if odd:
                named.append(f"{entry[IDS[key]]} ({', '.join(odd)})")
    some = files.encodable(", ".join(named[:5])) + (", ..." if len(named) > 5 else "")
    what = "entries carry numbers that look like one problem's"
    return f"bank: {len(named)} {what}: {some}" if named else ""


def bank_line(bank: SkillBank, teachers: int) -> str:
    """What a bank holds, what its first entries were made from, whether it is shorter than K."""
    sizes = len(bank.general_skills), len(bank.common_mistakes)
    line = f"bank: {bank.sizes}"
    if "seed_solutions" in bank.metadata:
        origin = " of {input_general_skills} and {input_common_mistakes} candidates, from "
        origin += "{seed_solutions} seed solutions, {right_seed_solutions} of them right"
        line += origin.format(**bank.metadata)
    if bank.metadata.get("lost_replies"):
        line += f"; {lost(bank.metadata['lost_replies'])}"
    if min(sizes) == 0:
        return f"{line}; without a pair there is no teacher, and nothing is learnt (S8)"
    if min(sizes) < teachers:
        line += f"; enough for {min(sizes)} teachers, not for --num-teachers {teachers} (S8)"
    return line


def lost(by_cause: dict[str, int]) -> str:
    """How many replies were lost, and why."""
    causes = ", ".join(f"{n} {cause}" for cause, n in by_cause.items())
    return f"{sum(by_cause.values())} replies lost" + (f" ({causes})" if causes else "")


def evolution_line(old: SkillBank, new: SkillBank, window: list[dict], by_cause: dict) -> str:
    """What an evolution did to the bank, or why it did nothing. by_cause: lost replies."""
    success = sum(is_success(row["r"]) for row in window) / len(window)
    if new is old:
        return f"bank: success {success:.2f} is not below the gate: kept as it is"
    line, update = f"bank: success {success:.2f}", new.metadata["updates"][-1]
    for key in FIELDS:
        line += f"; {update[f'candidate_{key}']} candidate {SHORT[key]}"
        line += f", {update[f'merged_{key}']} after merging"
        line += f", {update[f'copied_{key}']} copies of static entries dropped"
        line += f", net new {update[f'net_new_{key}']}"
    return f"{line}; {lost(by_cause)}"


def refuse_without_pairs(bank: SkillBank, cfg: Config, again: str) -> None:
    """UserError, on all ranks alike, where no teacher can be made of a bank (S8): what to do.

    again: what goes on with the seed solutions that were made, when the cause is mended.
    """
    if (bank.general_skills and bank.common_mistakes) or cfg.allow_empty_bank:
        return
    about = bank.metadata
    total, right = about.get("seed_solutions", 0), about.get("right_seed_solutions", 0)
    cut = about.get("truncated_seed_solutions", 0)
    reasons = []
    if total and 2 * cut >= total:
        rule = f"--cold-start-tokens {cfg.cold_start_tokens}: raise it"
        reasons.append(f"{cut} of {total} seed solutions were cut off at {rule}")
    elif total and not right:
        fix = "take easier problems or a stronger model, or raise --cold-start"
        reasons.append(f"none of {total} seed solutions was right, so there are no skills: {fix}")
    elif total and right == total:
        fix = "take harder problems, or raise --cold-start"
        reasons.append(f"all {total} seed solutions were right, so there are no mistakes: {fix}")
    fixes = {"cut off": f"raise --reply-tokens {cfg.reply_tokens}"}
    for cause, n in about.get("lost_replies", {}).items():
        fix = fixes.get(cause, "let another model write, --update-model")
        reasons.append(f"{n} replies were lost ({cause}): {fix}")
    why = "; ".join(reasons) or "it was saved like that"
    rule = "without a pair there is no teacher, and nothing would be learnt (S8)"
    go_on = f"then {again} uses the solutions again; with --allow-empty-bank it goes on like that"
    raise SharedError(f"bank: {bank.sizes}; {rule}; {why}; {go_on}")
