"""What a run records: a row per rollout, token and step, the log line, notices and provenance.

This file writes nothing itself: it returns rows and lines, and sgsd.py appends and prints them.
Only trackers (Weights & Biases, TensorBoard) write files of their own. docs/metrics.md explains
every number.
"""

import contextlib
import hashlib
import importlib.metadata
import math
import os
import pathlib
import resource
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

LOGS = ("metrics", "rollouts", "tokens")  # the .jsonl files of a run
FATE = {1: "distilled", -1: "reversed", 0: "ignored"}  # of a teacher, by rho (Eq. 13)
PACKAGES = ("torch", "transformers", "peft", "sentence-transformers", "numpy", "math-verify")

SERVER_GAP = 0.2  # nats on the mean; in bf16 others report a standard deviation of .05
ECHO_STEPS = 25  # steps in a block
ECHO_TEACHERS = 100  # decided teachers that a block needs, of each outcome
ECHO_EXCEPTIONS = 0.02  # share of them that may lean the other way
FALL_PROBLEMS = 100  # problems in a window
FALL_DEVIATIONS = 4.0  # between two windows, in standard deviations of their difference


class Stopwatch:
    """Seconds of a step by part: each lap is added to the part that it names."""

    def __init__(self) -> None:
        self.seconds = {"gen": 0.0, "score": 0.0, "bwd": 0.0, "opt": 0.0}
        self.last = time.perf_counter()

    def lap(self, part: str) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # else the part that waits for the GPU pays for the others
        now = time.perf_counter()
        self.seconds[part] += now - self.last
        self.last = now


def memory_gb(device: torch.device) -> float:
    """Peak memory so far in GiB: allocated on the GPU, else resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 2**30 if sys.platform == "darwin" else 2**20  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


# --------------------------------------------------------------------------- rollouts and tokens


def rollout_row(
    step: int, roll: Any, pairs_K: Sequence[Any], numbers: dict[str, Tensor]
) -> dict[str, Any]:
    """One rollout's line in rollouts.jsonl.

    roll: the dataclass of a rollout. pairs_K: the retrieved pairs, with .skill, .mistake, .s_g and
    .s_e. numbers: further fields by name, of any shape.
    """
    row = {"step": step, **asdict(roll)}
    row["pairs"] = [[pair.skill["skill_id"], pair.mistake["mistake_id"]] for pair in pairs_K]
    row["s_g"] = [pair.s_g for pair in pairs_K]
    row["s_e"] = [pair.s_e for pair in pairs_K]
    return row | {name: x.tolist() for name, x in numbers.items()}


def token_row(step: int, roll: Any, tokenizer: Any, numbers: dict[str, Tensor]) -> dict[str, Any]:
    """One audited rollout's line in tokens.jsonl. numbers: [T] or [K, T], over its tokens."""
    row = {"step": step, "problem_id": roll.problem_id}
    row["text"] = token_texts(tokenizer, roll.completion_ids)
    return row | {name: x.tolist() for name, x in numbers.items()}


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token. Where tokens share a character, the last of them gets it."""
    texts: list[str] = []
    pending: list[int] = []  # tokens of a character that is not complete yet
    for i in ids:
        pending.append(i)
        text = tokenizer.decode(pending, clean_up_tokenization_spaces=False)
        if text.endswith("\ufffd") and len(pending) < 4:  # UTF-8 takes up to 4 bytes
            texts.append("")
        else:
            texts.append(text)
            pending = []
    return texts


def credit_sums(credit_KT: Tensor, r: int) -> dict[str, float]:
    """A rollout's squared credit (Eq. 20), and the part of it on tokens whose credit has r's sign.

    credit_KT: [K, T], or [0] for a rollout without teachers. r: -1 or +1.
    """
    squared_KT = credit_KT.square()
    # Summed in the same order as the whole, so that rounding lifts no share above 1.
    with_verdict = squared_KT.where(credit_KT * r > 0, 0).sum()
    return {"credit_sq": float(squared_KT.sum()), "credit_sq_with_verdict": float(with_verdict)}


# ------------------------------------------------------------------------------------------ steps


def summarize(
    step: int,
    records: list[dict],
    norm: float,
    lr: float,
    seconds: dict[str, float],
    gb: float,
) -> dict[str, Any]:
    """One step's line in metrics.jsonl.

    records: the rows of rollouts.jsonl of all ranks, at least one. norm: of the gradient, before
    clipping; a step whose norm is not finite counts as skipped. seconds: by part. gb: peak memory.
    A mean over nothing is left out.
    """
    total = len(records)
    metrics: dict[str, Any] = {
        "step": step,
        "loss": sum(row["loss"] for row in records) / total,
        "success": sum(row["r"] > 0 for row in records) / total,
        "truncated": sum(row["truncated"] for row in records) / total,
        "no_answer": sum(row["pred"] is None for row in records) / total,
        "no_teachers": sum(not row["rho"] for row in records),
    }
    for fate in FATE.values():
        for case in ("", "_success", "_failure", "_truncated"):
            metrics[f"rho_{fate}{case}"] = 0
    supports: dict[str, list[float]] = {"success": [], "failure": []}
    first_gaps: list[float] = []
    for row in records:
        outcome = "success" if row["r"] > 0 else "failure"
        supports[outcome] += row["a"]
        first_gaps += row["first_gap"]
        cases = ["", f"_{outcome}"]
        if row["truncated"]:
            cases.append("_truncated")
        for rho in row["rho"]:
            for case in cases:
                metrics[f"rho_{FATE[rho]}{case}"] += 1

    sizes = torch.tensor(supports["success"] + supports["failure"] or [0.0]).abs()
    for percent in (10, 50, 90):
        metrics[f"abs_a_p{percent}"] = float(sizes.quantile(percent / 100))
    for outcome, signed in supports.items():
        if signed:  # 0 would look like teachers that lean to neither side
            metrics[f"a_mean_{outcome}"] = sum(signed) / len(signed)
            metrics[f"a_positive_{outcome}"] = sum(a > 0 for a in signed) / len(signed)
    credit = sum(row["credit_sq"] for row in records)
    if credit:
        with_verdict = sum(row["credit_sq_with_verdict"] for row in records)
        metrics["credit_with_verdict"] = with_verdict / credit

    served = [row for row in records if row.get("sampling_logp_difference")]
    if served:  # |log p_ours - log p_engine| of the sampled tokens, in nats
        means, largest = zip(*[row["sampling_logp_difference"] for row in served])
        metrics["sampling_logp_difference_mean"] = sum(means) / len(means)
        metrics["sampling_logp_difference_max"] = max(largest)

    metrics |= {f"seconds.{part}": round(x, 3) for part, x in seconds.items()}
    tokens = sum(len(row["completion_ids"]) for row in records)
    gaps = sum(row["unmasked"] * len(row["rho"]) for row in records)
    return metrics | {
        "clip_share": sum(row["clipped"] for row in records) / max(1, gaps),
        "mask_share": sum(row["unmasked"] for row in records) / max(1, tokens),
        "first_gap": sum(first_gaps) / max(1, len(first_gaps)),
        "completion_tokens": tokens / total,
        "grad_norm": norm,
        "learning_rate": lr,
        "skipped": int(not math.isfinite(norm)),
        "memory_gb": round(gb, 2),
    }


def log_line(metrics: dict[str, Any], steps: int) -> str:
    """A step's line on the terminal. metrics: its line of metrics.jsonl. steps: of the run."""
    m = metrics
    rho = f"+{m['rho_distilled']}/-{m['rho_reversed']}/0:{m['rho_ignored']}"
    success, mask = (f"{m[name]:.2f}".removeprefix("0") for name in ("success", "mask_share"))
    cut = f" | {m['truncated']:.0%} cut at --max-new-tokens" if m["truncated"] > 0.5 else ""
    parts = []
    for part in ("gen", "score", "bwd"):
        x = m[f"seconds.{part}"]
        parts.append(f"{part} {x:.1f}s" if x < 10 else f"{part} {x:.0f}s")
    return (
        f"step {m['step']}/{steps} loss {m['loss']:+.4f} r+ {success} rho {rho} "
        f"clip {m['clip_share']:.1%} mask {mask} gnorm {m['grad_norm']:.2g} "
        f"| {' '.join(parts)} | {m['memory_gb']:.1f}GB{cut}"
    )


# ---------------------------------------------------------------------------------------- notices


@dataclass(frozen=True)
class Fall:
    """A share that lies well below its best."""

    what: str  # "success" or "boxed answers"
    step: int  # last step of the window that is low
    now: float  # share in that window
    best: float  # share in the best window before it
    best_step: int  # last step of the best window
    window: int  # steps in a window


def fallen(metrics: list[dict], batch_size: int) -> list[Fall]:
    """All falls of a run's success, or of its share of boxed answers, by step.

    A window is as many steps as have 100 problems. A share p of n problems has the variance
    p (1 - p) / n, so the difference of two windows with n problems each, whose mean share is p, has
    twice that. A fall is a window more than four standard deviations of this difference below the
    best one before it. A fall is reported once, and the next one only after the windows have come
    back to within two such deviations of the best.

    metrics: the run's lines of metrics.jsonl, from the first step on.
    batch_size: problems per step; rollouts of one problem are alike and count as one.
    """
    window = math.ceil(FALL_PROBLEMS / batch_size)
    shares = {
        "success": [row["success"] for row in metrics],
        "boxed answers": [1 - row["no_answer"] for row in metrics],
    }
    falls = []
    for what, share in shares.items():
        best, best_step, is_down = -1.0, 0, False
        for end in range(window, len(share) + 1):
            now = sum(share[end - window : end]) / window
            step = metrics[end - 1]["step"]
            if now >= best:
                best, best_step, is_down = now, step, False
            p = (best + now) / 2
            deviation = math.sqrt(2 * p * (1 - p) / (window * batch_size))
            far = FALL_DEVIATIONS * deviation
            if best - now > far and not is_down:
                falls.append(Fall(what, step, now, best, best_step, window))
            is_down = best - now > (far / 2 if is_down else far)
    return sorted(falls, key=lambda fall: fall.step)


def fall_line(fall: Fall, checkpoints: pathlib.Path) -> str:
    """A fall in one line, with the checkpoint to go back to. checkpoints: the run's folder."""
    low = f"{fall.now:.2f} in steps {fall.step - fall.window + 1} to {fall.step}"
    high = f"{fall.best:.2f} in steps {fall.best_step - fall.window + 1} to {fall.best_step}"
    line = f"fall: {fall.what} {low}, down from {high}"
    saved = [p for p in checkpoints.glob("step_*") if int(p.name[5:]) <= fall.best_step]
    if not saved:
        return f"{line}; no checkpoint was saved by step {fall.best_step}"
    return f"{line}; last checkpoint by step {fall.best_step}: {max(saved)}"


def echo_line(metrics: list[dict]) -> str:
    """One line after the first block of steps whose polarity only repeats the verdict, else "".

    A block is 25 steps. Polarity repeats the verdict where a block has at least 100 decided
    teachers of each outcome (rho is not 0), and 49 of 50 of their supports have the same sign on
    both outcomes. Then rho says nothing that the verdict does not say.

    metrics: the run's lines of metrics.jsonl; the block must end with the last one.
    """
    if len(metrics) % ECHO_STEPS:
        return ""
    for end in range(ECHO_STEPS, len(metrics) + 1, ECHO_STEPS):
        block = metrics[end - ECHO_STEPS : end]
        side = _side_of_supports(block)
        if side:
            line = f"polarity: in steps {block[0]['step']} to {block[-1]['step']} nearly all "
            line += f"decided supports were {side} zero, on successes and on failures, so "
            line += "polarity only repeats the verdict; see docs/polarity.md"
            return line if end == len(metrics) else ""
    return ""


def _side_of_supports(block: list[dict]) -> str:
    """The side of zero on which nearly all decided supports lie: "below", "above", or ""."""
    sides = {"below", "above"}
    for outcome, above, below in (
        ("success", "distilled", "reversed"),
        ("failure", "reversed", "distilled"),
    ):
        n_above = sum(row[f"rho_{above}_{outcome}"] for row in block)
        n_below = sum(row[f"rho_{below}_{outcome}"] for row in block)
        if n_above + n_below < ECHO_TEACHERS:
            return ""
        exceptions = ECHO_EXCEPTIONS * (n_above + n_below)
        if n_above > exceptions:
            sides.discard("below")
        if n_below > exceptions:
            sides.discard("above")
    return "".join(sides)  # at most one: half of the supports or more lie on one side


def notices(metrics: list[dict], batch_size: int, checkpoints: pathlib.Path) -> list[str]:
    """The lines to print after the last of these steps; most steps have none.

    No state is kept, so a resumed run prints what it would have printed without the stop.
    metrics: the run's lines of metrics.jsonl so far. The others: as in `fallen`, `fall_line`.
    """
    lines = [echo_line(metrics)]
    gap = metrics[-1].get("sampling_logp_difference_mean", 0.0)
    if gap > SERVER_GAP:
        line = f"server: its log-probabilities of sampled tokens differ from ours by {gap:.2f} nats"
        lines.append(f"{line} on the mean; does it have another base, or a truncated context?")
    for fall in fallen(metrics, batch_size):
        if fall.step == metrics[-1]["step"]:
            lines.append(fall_line(fall, checkpoints))
    return [line for line in lines if line]


# ------------------------------------------------------------------------ trackers and provenance


def open_trackers(
    out: pathlib.Path, settings: dict[str, Any], start: int, report_to: str, run_id: str
) -> list[Callable[[dict[str, Any]], None]]:
    """Trackers: each gets every line of metrics.jsonl.

    out: the run's folder. start: the last step that is done; TensorBoard drops what came after it.
    report_to: "wandb", "trackio", "tensorboard" or "none". run_id: by which wandb continues a run
    that is resumed; trackio knows it by its name.
    Raises ValueError if a tracker is not installed or does not start.
    """
    if report_to == "none":
        return []
    out.mkdir(parents=True, exist_ok=True)  # else wandb writes elsewhere
    about: dict[str, Any] = {"project": "sgsd", "name": out.name, "config": settings}
    try:
        if report_to == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(out / report_to), purge_step=start + 1, flush_secs=10)
        elif report_to == "wandb":
            import wandb

            wandb.init(**about, dir=str(out), id=run_id, resume="allow")
            return [lambda metrics: wandb.log(metrics, step=metrics["step"])]
        else:
            import trackio

            trackio.init(**about, resume="allow")
            return [lambda metrics: trackio.log(metrics, step=metrics["step"])]
    except Exception as e:  # not installed, not logged in, no network
        cause = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
        fix = f"pip install {report_to} and log in if it asks for it, or leave out --report-to"
        raise ValueError(f"{report_to} did not start ({cause}); {fix}") from None

    def add(metrics: dict[str, Any]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, metrics["step"])

    return [add]


def provenance(settings: dict[str, Any], version: str) -> dict[str, Any]:
    """What config.json holds: an id, settings, command line, commit, uncommitted changes, versions.

    version: of this project. `changes` is a digest of what differs from the commit, "" for a clean
    tree; both are None outside a git repository.
    """
    versions = {"sgsd": version, "python": sys.version.split()[0]}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    command = [pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]
    commit = _git("rev-parse", "HEAD")
    return {
        "id": uuid.uuid4().hex[:12],
        "settings": settings,
        "command": command,
        "commit": commit.decode().strip() if commit else None,
        "changes": _changes() if commit else None,
        "versions": versions,
    }


def _changes() -> str:
    """A digest of `git diff HEAD` and of the untracked .py files, by name and content."""
    parts = [_git("diff", "HEAD") or b""]
    names = _git("ls-files", "--others", "--exclude-standard", "-z", "*.py") or b""
    for name in sorted(names.split(b"\0")):
        path = pathlib.Path(__file__).parent / os.fsdecode(name)
        if path.is_file():  # a dangling link, such as an editor's lock, is not
            parts += [name, path.read_bytes()]
    if not any(parts):
        return ""
    digest = hashlib.blake2b(digest_size=6)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def _git(*words: str) -> bytes | None:
    """What git prints about this file's repository; None without git or a repository."""
    command = ["git", "-C", str(pathlib.Path(__file__).parent), *words]
    try:
        return subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
