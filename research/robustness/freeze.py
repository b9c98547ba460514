"""Is each number of a run the same at a commit and in the working tree?

    python research/robustness/freeze.py COMMIT --cache FOLDER      all but the long runs
    python research/robustness/freeze.py --list                     the runs

Each run is made twice, by this Python and on one thread: in a temporary git worktree of COMMIT, and
in the working tree with its uncommitted changes. Then rollouts, tokens, metrics, banks, replies,
weights and evaluations are compared, number by number. Seconds and memory are left out. --cache
keeps the runs of each commit, so the next comparison with it makes those of the working tree alone;
their last ones, and the logs, lie there, too. The exit code is 1 if anything differs.

What only the working tree has is no difference; a line below the table names it. What is lost is
one, unless MAY_GO or OF_TEACHERS below says that it may go: then a line names it as well. Dynamic
entries of a bank may have other ids: they are compared by their text.
"""

import argparse
import contextlib
import dataclasses
import fnmatch
import importlib.metadata
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from safetensors.numpy import load_file

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from research.markdown_table import head_of, row_of

# --------------------------------------------------------------------------------- what is compared

TINY = "--preset tiny --batch-size 4 --audit-every 1 --out {out}"
BANK = "--bank banks/word_problems.json --num-teachers 2"
EVOLVING = (
    f"sgsd.py {TINY} --steps 5 --cold-start 8 --merge-group-size 4 --evolve-every 2"
    " --success-gate 1 --num-teachers 2"
)
GROUP = f"{TINY} --steps 3 --generations 4"
ABLATION = f"-m methods.ablations {TINY} --steps 3 {BANK}"
EVALUATION = (
    "eval.py tiny/model {out} --data tiny/test.jsonl --limit 12 --samples 2 --no-thinking"
    " --max-new-tokens 96 --device cpu --rows 16"
)
RUNS = {  # by name: the commands of a run, one after the other
    "sgsd": [EVOLVING],
    "sgsd-killed": [EVOLVING],
    "sgsd-two-processes": [
        f"-m torch.distributed.run --standalone --nproc_per_node 2 {EVOLVING}",
    ],
    "sgsd-bank": [f"sgsd.py {TINY} --steps 3 {BANK}"],
    "grpo": [f"-m methods.grpo {GROUP}"],
    "grpo-short": [f"-m methods.grpo {GROUP} --short"],
    "grpo-skill": [f"-m methods.grpo {GROUP} {BANK}"],
    "opsd": [f"-m methods.opsd {TINY} --steps 3"],
    "opsd-skill": [f"-m methods.opsd {TINY} --steps 3 {BANK}"],
    "sdpo": [f"-m methods.sdpo {GROUP}"],
    "rlsd": [f"-m methods.rlsd {GROUP} --teacher-period 2"],
    "rlsd-bank": [f"-m methods.rlsd {GROUP} {BANK}"],
    "no-polarity": [f"{ABLATION} --no-polarity"],
    "no-mask-no-clip": [f"{ABLATION} --no-token-mask --no-clip"],
    "jsd": [f"{ABLATION} --objective jsd"],
    "ema-teacher": [f"{ABLATION} --teacher ema --teacher-decay 0.9"],
    "support-top-k": [f"{ABLATION} --support-top-k 5"],
    "random-retrieval": [f"{ABLATION} --retrieval random"],
    "answer-pi": [f"{ABLATION} --answer-pi"],
    "evaluation": [f"sgsd.py {TINY} --steps 3 --learning-rate 0.01 {BANK}", EVALUATION],
}
LONG = {  # with --long; some minutes each
    "sgsd-tiny-preset": ["sgsd.py --preset tiny --steps 12 --out {out}"],
}
ALL = {**RUNS, **LONG}
KILLED = {"sgsd-killed": 3}  # SIGKILL at so many lines of metrics.jsonl; then the command again
RENAMED: dict[str, str] = {}  # a word of a command here: the same word at the commit

KINDS = {  # what is compared: its files, and by what rows are sorted where their order is free
    "rollouts": ("rollouts.jsonl", ()),
    "tokens": ("tokens.jsonl", ()),
    "metrics": ("metrics.jsonl", ()),
    "banks": ("bank/*.json", ()),
    "saved banks": ("checkpoints/*/bank.json", ()),
    "memories": ("bank/memories.jsonl", ("problem_id",)),
    "replies": ("bank/replies.jsonl", ("step", "prompt", "repeat", "reply")),
    "weights": ("checkpoints/*/*.safetensors", ()),
    "samples": ("eval/*/samples.jsonl", ("set", "id", "sample")),
    "results": ("eval/*/results.json", ()),
}
LEFT_OUT = (
    "metrics.seconds.*",  # they differ from run to run
    "metrics.memory_gb",
    "samples.digest",  # of all that a sample depends on, before of its problem
    "results.*.digest",  # of the problems themselves, before of their digests
    "results.*.settings.the policy's files",  # an adapter's name its base by its path
)
# What may be lost: what held nothing ([]), these,
MAY_GO = (
    "metrics.sampling_logp_difference_*",  # of a run whose steps a server sampled
    "metrics.abs_a_p*",  # of a step without supports
    "*banks.metadata.updates.new",  # the report compares versions of the bank
    "*banks.metadata.updates.dropped",
    "*banks.metadata.updates.copied_*",  # how many copies of static entries were dropped (D11)
    "rollouts.a_full",  # with --support-top-k, beside the truncated support that decides
    "rollouts.gap_error",
    "tokens.delta_full",
)
# and these columns, where the row at the commit has no teacher.
OF_TEACHERS = "alpha a rho losses first_gap clipped unmasked a_plain mask delta credit".split()

IDS = {"general_skills": "skill_id", "common_mistakes": "mistake_id"}
PACKAGES = ("torch", "transformers", "peft", "sentence-transformers", "numpy", "math-verify")

# ------------------------------------------------------------------------------------ making a run


def make(name: str, tree: pathlib.Path, folder: pathlib.Path) -> str:
    """Make a run in folder/run; "", or why it failed. tree: where its commands are run."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    commands = [(words, 0) for words in ALL[name]]
    if name in KILLED:
        commands = [(commands[0][0], KILLED[name]), *commands]
    for words, lines in commands:
        argv = [word.replace("{out}", str(folder / "run")) for word in words.split()]
        if tree != ROOT:
            argv = [RENAMED.get(word, word) for word in argv]
        code = execute(argv, tree, folder, lines)
        if code != (-signal.SIGKILL if lines else 0):
            said = (folder / "log").read_text().rstrip("=\n").rpartition("\n")[2]
            return f"exit code {code}{' before the kill' if lines else ''}: {said}"
    return ""


def execute(argv: list[str], tree: pathlib.Path, folder: pathlib.Path, lines: int) -> int:
    """A command's exit code. lines: kill it when metrics.jsonl has so many; 0 never."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command, metrics = [sys.executable, *argv], folder / "run/metrics.jsonl"
    with open(folder / "log", "a") as log:
        process = subprocess.Popen(command, cwd=tree, env=environment, stdout=log, stderr=log)
    while lines and process.poll() is None:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= lines:
            process.kill()
            break
        time.sleep(0.01)
    return process.wait()


def make_unless_kept(name: str, tree: pathlib.Path, folder: pathlib.Path) -> str:
    """`make`, unless the folder has the run from the same commands and versions."""
    versions = [sys.version, *map(importlib.metadata.version, PACKAGES)]
    made_by = [ALL[name], KILLED.get(name), RENAMED, versions]
    mark = folder / "made_by.json"
    if mark.exists() and json.loads(mark.read_text()) == made_by:
        return ""
    failure = make(name, tree, folder)
    if not failure:
        mark.write_text(json.dumps(made_by))
    return failure


def git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@contextlib.contextmanager
def worktree(commit: str) -> Iterator[pathlib.Path]:
    """A temporary folder with a worktree of the commit in it, `tree`."""
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder).resolve() / "tree"
        git("worktree", "add", "--detach", str(tree), commit)
        try:
            yield tree.parent
        finally:
            git("worktree", "remove", "--force", str(tree))


# ----------------------------------------------------------------------------------- reading a run


def read(out: pathlib.Path, kind: str) -> dict[str, list[Any]]:
    """The rows of each file of a kind, by the file's name in the run."""
    pattern, order = KINDS[kind]
    files = {}
    for path in sorted(out.glob(pattern)):
        if path.suffix == ".jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
        elif path.suffix == ".json":
            rows = [json.loads(path.read_text())]
        else:
            tensors = sorted(load_file(path).items())
            names = [name for name, _ in tensors]
            rows = [{f"names in {path.stem}": names, path.stem: [x for _, x in tensors]}]
        if order:
            rows.sort(key=lambda row: [row[name] for name in order])
        files[str(path.relative_to(out))] = rows
    if kind in ("banks", "saved banks"):
        for (bank,) in files.values():
            name_by_text(bank)
    if kind == "rollouts":
        name_pairs_by_text(files.get("rollouts.jsonl", []), out)
    return files


def texts_of(bank: dict) -> dict[str, str]:
    """What stands for the id of each dynamic entry: its own fields."""
    texts = {}
    for key, id_name in IDS.items():
        for entry in bank[key]:
            if entry[id_name].startswith("dyn_"):
                shown = {k: v for k, v in entry.items() if k not in (id_name, "sources")}
                texts[entry[id_name]] = f"dynamic: {json.dumps(shown, sort_keys=True)}"
    return texts


def name_by_text(bank: dict) -> None:
    texts = texts_of(bank)
    for key, id_name in IDS.items():
        for entry in bank[key]:
            entry[id_name] = texts.get(entry[id_name], entry[id_name])


def name_pairs_by_text(rows: list[dict], out: pathlib.Path) -> None:
    """A row's pairs are of the bank before its step: the last one that was saved."""
    texts_by_step = {}
    for path in sorted(out.glob("bank/step_*.json")):
        texts_by_step[int(path.stem.removeprefix("step_"))] = texts_of(json.loads(path.read_text()))
    for row in rows:
        before = [step for step in texts_by_step if step < row["step"]]
        texts = texts_by_step[max(before)] if before else {}
        if "pairs" in row:
            row["pairs"] = [[texts.get(name, name) for name in pair] for pair in row["pairs"]]


# --------------------------------------------------------------------------------------- comparing


@dataclasses.dataclass
class Findings:
    """What a comparison found, by names such as "rollouts.loss"."""

    rows: dict[str, int] = dataclasses.field(default_factory=dict)  # compared, by kind
    differences: dict[str, float] = dataclasses.field(default_factory=dict)  # inf: no numbers
    lost: set[str] = dataclasses.field(default_factory=set)
    may_go: set[str] = dataclasses.field(default_factory=set)  # lost, and no difference
    added: set[str] = dataclasses.field(default_factory=set)

    def cells(self) -> list[str]:
        """What was compared, the largest difference of numbers, and what differs, "" if nothing."""
        counts = ", ".join(f"{count} {kind}" for kind, count in self.rows.items())
        finite = {name: size for name, size in self.differences.items() if size < np.inf}
        differs = [f"{name} {size:.1g}" for name, size in finite.items()]
        differs += [name for name in self.differences if name not in finite]
        differs += [f"lost: {name}" for name in sorted(self.lost)]
        return [counts, f"{max(finite.values(), default=0):.3g}", ", ".join(differs)]

    def notes(self) -> list[str]:
        """What is no difference: a line for each name."""
        lines = [f"lost, as it may be: {name}" for name in sorted(self.may_go)]
        return lines + [f"new: {name}" for name in sorted(self.added)]


def compare_runs(old: pathlib.Path, new: pathlib.Path, found: Findings) -> None:
    """Two folders of a run."""
    for kind in KINDS:
        files, others = read(old, kind), read(new, kind)
        found.lost |= {*files} - {*others}
        found.added |= {*others} - {*files}
        if files:
            found.rows[kind] = sum(map(len, files.values()))
        for name in files.keys() & others.keys():
            compare(files[name], others[name], kind, found)


def compare(old: Any, new: Any, name: str, found: Findings) -> None:
    """Two values of JSON, or arrays. name: of the value."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old:
            inner = f"{name}.{key}"
            if any(fnmatch.fnmatch(inner, pattern) for pattern in LEFT_OUT):
                continue
            if key in new:
                compare(old[key], new[key], inner, found)
            else:
                (found.may_go if may_go(old, key, inner) else found.lost).add(inner)
        found.added |= {f"{name}.{key}" for key in new if key not in old}
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for one, other in zip(old, new):
            compare(one, other, name, found)
    else:
        size = distance(old, new)
        if size:
            found.differences[name] = max(size, found.differences.get(name, 0))


def may_go(row: dict, key: str, name: str) -> bool:
    """Whether a row may lose this key."""
    has_no_teacher = row.get("rho") == [] or row.get("delta") == []
    is_of_teachers = has_no_teacher and key in OF_TEACHERS
    return row[key] == [] or is_of_teachers or any(fnmatch.fnmatch(name, x) for x in MAY_GO)


def distance(old: Any, new: Any) -> float:
    """0 for equal values, NaN among them; the largest difference; inf if these are no numbers."""
    numbers = (int, float, np.ndarray)
    if not isinstance(old, numbers) or not isinstance(new, numbers):
        return 0.0 if old == new else np.inf
    if np.array_equal(old, new, equal_nan=True):
        return 0.0
    if np.shape(old) != np.shape(new):
        return np.inf
    size = float(np.max(np.abs(np.asarray(old, float) - np.asarray(new, float))))
    return np.inf if np.isnan(size) else size


# ------------------------------------------------------------------------------------- the command


def freeze(commit: str, runs: Sequence[str], cache: str) -> bool:
    """Make and compare these runs, and print the table; whether all are equal."""
    commit = git("rev-parse", "--verify", f"{commit}^{{commit}}")
    noted: dict[str, list[str]] = {}  # what is no difference: the runs
    all_equal = True
    print("\n".join(head_of(["run", "compared", "largest difference", "what differs"])), flush=True)
    with worktree(commit) as temporary:
        folder = pathlib.Path(cache or temporary).resolve()
        for name in runs:
            old, new = folder / commit / name, folder / f"tree_{ROOT.name}" / name
            failures = [make_unless_kept(name, temporary / "tree", old), make(name, ROOT, new)]
            found = Findings()
            for where, failure in zip((commit[:7], "here"), failures):
                if failure:
                    found.differences[f"fails {where}, {failure}"] = np.inf
            if not any(failures):
                compare_runs(old / "run", new / "run", found)
            print(row_of([name, *found.cells()]), flush=True)
            all_equal = all_equal and found.cells()[2] == ""
            for line in found.notes():
                noted.setdefault(line, []).append(name)
    print("\n" + "\n".join(f"{line}: {', '.join(names)}" for line, names in noted.items()))
    return all_equal


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("commit", nargs="?", help="commit to compare the working tree with")
    parser.add_argument("--cache", default="", metavar="FOLDER", help="keep the runs here")
    parser.add_argument("--long", action="store_true", help="also the long runs")
    parser.add_argument("--only", nargs="+", choices=ALL, metavar="RUN", help="only these runs")
    parser.add_argument("--list", action="store_true", help="print the runs, and make none")
    given = parser.parse_args(argv)
    runs = given.only or [*RUNS, *(LONG if given.long else [])]
    if given.list:
        for name in runs:
            kill = f" (killed at line {KILLED[name]}, and continued)" if name in KILLED else ""
            print("\n    ".join([f"{name}{kill}", *ALL[name]]))
        return 0
    if not given.commit:
        parser.error("give a COMMIT, or --list")
    return 0 if freeze(given.commit, runs, given.cache) else 1


if __name__ == "__main__":
    raise SystemExit(main())
