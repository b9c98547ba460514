"""What a run records: a row per rollout, token and step, the log line, and where it came from.

Nothing here writes a file but the trackers (Weights & Biases, TensorBoard). docs/metrics.md
explains every number.
"""

import contextlib
import importlib.metadata
import math
import pathlib
import resource
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

FIRST_STEPS, MEAN_OF = 3, 10  # steps: without a right solution; of a mean of the success
LEAST_FALL = 0.1  # of such a mean, unless to 0: half of a low one comes and goes by chance
LOGS = ("metrics", "rollouts", "tokens")  # the .jsonl files of a run
FATE = {1: "distilled", -1: "reversed", 0: "ignored"}  # of a teacher, by rho (Eq. 13)
PACKAGES = ("torch", "transformers", "peft", "sentence-transformers", "numpy", "math-verify")


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
    step: int, index: int, pairs_K: Sequence[Any], roll: Any, result: Any, c_delta: float
) -> dict[str, Any]:
    """One rollout's line in rollouts.jsonl.

    index: its place in the global batch. pairs_K: its `SkillPair`s. result: its loss, .numbers and
    .token_numbers; where these have teachers' gaps, the line has counts of them. c_delta: the bound
    beyond which a gap counts as clipped.
    """
    row = {"index": index, "step": step, **asdict(roll)}
    row["pairs"] = [[pair.skill["skill_id"], pair.mistake["mistake_id"]] for pair in pairs_K]
    row["s_g"] = [pair.s_g for pair in pairs_K]
    row["s_e"] = [pair.s_e for pair in pairs_K]
    numbers = {**result.numbers, "loss": result.loss.detach()}
    if "delta" in result.token_numbers:
        delta_KT, unmasked_T = result.token_numbers["delta"], result.token_numbers["mask"].bool()
        numbers["unmasked"] = unmasked_T.sum()
        numbers["clipped"] = (delta_KT[:, unmasked_T].abs() > c_delta).sum()
        numbers["first_gap"] = delta_KT[:, 0]
    return row | {name: x.tolist() for name, x in numbers.items()}


def token_row(step: int, index: int, roll: Any, result: Any, tokenizer: Any) -> dict[str, Any]:
    """One audited rollout's line in tokens.jsonl: [T] and [K, T], over its tokens.

    index: as in `rollout_row`. A token that holds a part of a character has U+FFFD in its text.
    """
    row = {"step": step, "index": index, "problem_id": roll.problem_id}
    row["text"] = tokenizer.batch_decode([[i] for i in roll.completion_ids])
    return row | {name: x.tolist() for name, x in result.token_numbers.items()}


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
    A mean over nothing is left out. A row of a method without teachers has no numbers of theirs.
    """
    total = len(records)
    metrics: dict[str, Any] = {
        "step": step,
        "loss": sum(row["loss"] for row in records) / total,
        "success": sum(row["r"] > 0 for row in records) / total,
        "truncated": sum(row["truncated"] for row in records) / total,
        "no_answer": sum(row["pred"] is None for row in records) / total,
        "no_teachers": sum(not row.get("rho") for row in records),
    }
    metrics |= polarity_numbers(records)
    metrics |= {f"seconds.{part}": round(x, 3) for part, x in seconds.items()}
    first_gaps: list[float] = []
    tokens, unmasked, gaps, clipped = 0, 0, 0, 0
    for row in records:
        length = len(row["completion_ids"])
        unmasked_of_row = row.get("unmasked", length)  # no mask: every token counts
        tokens += length
        unmasked += unmasked_of_row
        gaps += unmasked_of_row * len(row.get("rho", []))
        clipped += row.get("clipped", 0)
        first_gaps += row.get("first_gap", [])
    return metrics | {
        "clip_share": clipped / max(1, gaps),
        "mask_share": unmasked / max(1, tokens),
        "first_gap": sum(first_gaps) / max(1, len(first_gaps)),
        "completion_tokens": tokens / total,
        "grad_norm": norm,
        "learning_rate": lr,
        "skipped": int(not math.isfinite(norm)),
        "memory_gb": round(gb, 2),
    }


def polarity_numbers(records: list[dict]) -> dict[str, Any]:
    """Teachers by fate and outcome, and among cut rollouts; their supports."""
    metrics: dict[str, Any] = {}
    for fate in FATE.values():
        for case in ("", "_success", "_failure", "_truncated"):
            metrics[f"rho_{fate}{case}"] = 0
    supports: dict[str, list[float]] = {"success": [], "failure": []}
    for row in records:
        outcome = "success" if row["r"] > 0 else "failure"
        supports[outcome] += row.get("a", [])
        cases = ["", f"_{outcome}"]
        if row["truncated"]:
            cases.append("_truncated")
        for rho in row.get("rho", []):
            for case in cases:
                metrics[f"rho_{FATE[rho]}{case}"] += 1

    sizes = torch.tensor(supports["success"] + supports["failure"] or [0.0]).abs()
    for percent in (10, 50, 90):
        metrics[f"abs_a_p{percent}"] = float(sizes.quantile(percent / 100))
    for outcome, signed in supports.items():
        if signed:  # 0 would look like teachers that lean to neither side
            metrics[f"a_mean_{outcome}"] = sum(signed) / len(signed)
            metrics[f"a_positive_{outcome}"] = sum(a > 0 for a in signed) / len(signed)
    return metrics


def log_line(metrics: dict[str, Any], steps: int, late: int = 0) -> str:
    """A step's line on the terminal; after the first step's line a second one explains rho.

    metrics: the step's line of metrics.jsonl. steps: of the run. late: answers since the command
    began that took the verifier too long.
    """
    m = metrics
    counts = f"+{m['rho_distilled']}/-{m['rho_reversed']}/0:{m['rho_ignored']}"
    rho = "" if counts == "+0/-0/0:0" else f"rho {counts} "  # GRPO has no teachers
    success, mask = (f"{m[name]:.2f}".removeprefix("0") for name in ("success", "mask_share"))
    cut = f" | {m['truncated']:.0%} cut at --max-new-tokens" if m["truncated"] > 0.5 else ""
    slow = f" | {late} answers so far took longer than --verify-timeout" if late else ""
    legend = ""
    if rho and m["step"] == 1:
        legend = "\n  rho +/-/0: teachers distilled, reversed (pushed away from), ignored"
    parts = []
    for part in ("gen", "score", "bwd"):
        x = m[f"seconds.{part}"]
        parts.append(f"{part} {x:.1f}s" if x < 10 else f"{part} {x:.0f}s")
    return (
        f"step {m['step']}/{steps} loss {m['loss']:+.4f} r+ {success} {rho}"
        f"clip {m['clip_share']:.1%} mask {mask} gnorm {m['grad_norm']:.2g} "
        f"| {' '.join(parts)} | {m['memory_gb']:.1f}GB{cut}{slow}{legend}"
    )


class Watch:
    """Notices a run that learns nothing, from its steps since this command began.

    It says so twice at most: once after the first steps, where none of their solutions was right,
    and once where the mean success of ten steps is below half of the best ten's, by LEAST_FALL or
    at 0.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []  # their lines of metrics.jsonl
        self.best = 0.0  # the highest mean success of ten steps
        self.best_step = 0  # the last of these
        self.has_fallen = False

    def line_after(self, metrics: dict[str, Any]) -> str:
        """The line to print after a step, or "". metrics: the step's line of metrics.jsonl."""
        self.steps.append(metrics)
        if len(self.steps) == FIRST_STEPS:
            return self._nothing_right()
        return self._fall() if len(self.steps) >= MEAN_OF else ""

    def _mean(self, name: str) -> float:
        """The mean of a number over the last ten steps, or over all if there are fewer."""
        values = [metrics[name] for metrics in self.steps[-MEAN_OF:]]
        return sum(values) / len(values)

    def _nothing_right(self) -> str:
        """Why no solution was right so far, and the flag to look at."""
        if self._mean("success") > 0:
            return ""
        if self._mean("truncated") == 1:
            cause = "all were cut at --max-new-tokens; raise it"
        elif self._mean("no_answer") == 1:
            cause = "none had an answer; see `text` in rollouts.jsonl, and `answer` of --verifier"
        else:
            flags = "--answer-field, --answer-after and --verifier"
            cause = f"no answer was right; compare `pred` and `gold` in rollouts.jsonl; see {flags}"
        return f"no right solution in this command's first {FIRST_STEPS} steps: {cause}"

    def _fall(self) -> str:
        """Whether the success fell, said once."""
        mean, step = self._mean("success"), self.steps[-1]["step"]
        if mean > self.best:
            self.best, self.best_step = mean, step
        is_clear = mean == 0 or self.best - mean >= LEAST_FALL
        if self.has_fallen or mean >= self.best / 2 or not is_clear:
            return ""
        self.has_fallen = True
        rule = "keep an earlier checkpoint, or lower --learning-rate"
        best = f"{self.best:.2f} in steps {self.best_step - MEAN_OF + 1} to {self.best_step}"
        return f"success fell to {mean:.2f} in the last {MEAN_OF} steps, from {best}; {rule}"


# ------------------------------------------------------------------------ trackers and provenance


def open_tracker(
    out: pathlib.Path, settings: dict[str, Any], step: int, report_to: str, run_id: str
) -> Callable[[dict[str, Any]], object]:
    """A tracker, as a function that takes each line of metrics.jsonl; "none" takes and drops it.

    out: the run's folder. step: the last complete one; TensorBoard drops what came after it.
    run_id: by which wandb continues a run. ValueError if the tracker is not installed or does not
    start.
    """
    if report_to == "none":
        return lambda metrics: None
    try:
        if report_to == "wandb":
            import wandb

            about = {"name": out.name, "id": run_id, "dir": str(out), "config": settings}
            wandb.init(project="sgsd", resume="allow", **about)
            return lambda m: wandb.log(m, step=m["step"])
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1, flush_secs=10)

        def add(m: dict[str, Any]) -> None:
            for name, x in m.items():
                writer.add_scalar(name, x, m["step"])

        return add
    except Exception as e:  # not installed, not logged in, no network
        cause = f"{type(e).__name__}: {textwrap.shorten(str(e), 300, placeholder=' ...')}"
        fix = f"pip install {report_to} and log in if it asks for it, or leave out --report-to"
        raise ValueError(f"{report_to} did not start ({cause}); {fix}") from None


def provenance() -> dict[str, Any]:
    """The command line, the commit and the versions that a run or its continuation has."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    here, commit = pathlib.Path(__file__).parent, None
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # no git, no repository
        command = ["git", "-C", str(here), "rev-parse", "HEAD"]
        commit = subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()
    return {
        "when": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": [pathlib.Path(sys.argv[0]).name, *sys.argv[1:]],
        "commit": commit,
        "versions": {"python": sys.version.split()[0], **versions},
    }
