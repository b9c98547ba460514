"""What a run records: a row per rollout, audit and step, the printed line, and its provenance.

In this module, only the tracker (Weights & Biases) writes files. docs/metrics.md explains every
number.
"""

import contextlib
import importlib.metadata
import itertools
import math
import pathlib
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

FIRST_STEPS = 5  # after these a run warns if they taught nothing
CAUSES = {  # why no solution was right: what all solutions were, and what to do
    "truncated": "all were cut: raise --max-new-tokens, if the model's context allows",
    "no_answer": "none had an answer; see `text` in rollouts.jsonl, and `answer` of --verifier",
}
NONE_RIGHT = "compare `pred` and `gold` in rollouts.jsonl, and see --answer-field and --verifier"
ALIKE = {  # if no group had right and wrong solutions: what to do, by the share of right ones
    0.0: "all were wrong; if their verdicts are right, take easier problems, or more --generations",
    1.0: "all were right; take harder problems, or more --generations",
}
# Names of numbers in our logs, which a method may not give to its own.
TAKEN = (
    "index step r reward loss unmasked clipped first_gap audit bank_skills bank_mistakes".split()
)
LOGS = ("metrics", "rollouts", "tokens")  # the .jsonl files of a run
FATE = {1: "distilled", -1: "reversed", 0: "ignored"}  # of a teacher, by rho (Eq. 13)
LEGENDS = {  # what we print below the first step's line
    "rho": "rho +/-/0: teachers distilled, reversed, ignored",
    "mixed": "mixed: share of groups with right and wrong solutions; the others teach nothing",
}
PACKAGES = ("torch", "transformers", "peft", "sentence-transformers", "numpy", "math-verify")


class Stopwatch:
    """Seconds of a step by part: each lap is added to the part that it names."""

    def __init__(self) -> None:
        self.seconds = {"gen": 0.0, "score": 0.0, "bwd": 0.0, "opt": 0.0}
        self.last = time.perf_counter()

    def lap(self, part: str) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # else a part is charged for GPU work of earlier ones
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
    step: int,
    index: int,
    pairs_K: Sequence[Any],
    roll: Any,
    reward: float,
    result: Any,
    c_delta: float,
) -> dict[str, Any]:
    """One rollout's row of rollouts.jsonl.

    index: its place in the global batch. pairs_K: its `SkillPair`s. result: its .loss, .numbers and
    .token_numbers. The row has counts of the gaps `delta` and of the `mask`, if there are any;
    without a mask every token counts. c_delta: the bound beyond which a gap counts as clipped.
    ValueError as `joined` raises it.
    """
    row = {"index": index, "step": step, **asdict(roll), "reward": float(reward)}
    row["pairs"] = [[pair.skill["skill_id"], pair.mistake["mistake_id"]] for pair in pairs_K]
    row["s_g"] = [pair.s_g for pair in pairs_K]
    row["s_e"] = [pair.s_e for pair in pairs_K]
    row["loss"] = result.loss.item()
    T = len(roll.completion_ids)
    mask_T = result.token_numbers.get("mask", torch.ones(T)).bool().cpu()  # indexes any device
    delta_KT = result.token_numbers.get("delta", torch.ones(0, T))
    if {"mask", "delta"} & result.token_numbers.keys():
        row |= {
            "unmasked": int(mask_T.sum()),
            "clipped": int((delta_KT[:, mask_T].abs() > c_delta).sum()),
            "first_gap": delta_KT[:, 0].tolist(),
        }
    return joined(row, result.numbers)


def joined(row: dict[str, Any], numbers: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A row with more numbers. ValueError for a name that the row, or another one, has already."""
    for name in [name for name in numbers if name in row or name in TAKEN]:
        raise ValueError(f"{name!r}: a log has another number of this name; rename the method's")
    return row | {name: x.tolist() for name, x in numbers.items()}


def token_row(step: int, index: int, roll: Any, result: Any, tokenizer: Any) -> dict[str, Any]:
    """One audited rollout's row of tokens.jsonl: numbers [T] and [K, T] of its tokens.

    index: as in `rollout_row`. A token that holds a part of a character has U+FFFD in its text.
    """
    row = {"step": step, "index": index, "problem_id": roll.problem_id}
    row["text"] = tokenizer.batch_decode([[i] for i in roll.completion_ids])
    return joined(row, result.token_numbers)


# ------------------------------------------------------------------------------------------ steps


def summarize(
    step: int,
    rows: list[dict],
    norm: float,
    lr: float,
    seconds: dict[str, float],
    gb: float,
) -> dict[str, Any]:
    """One step's row of metrics.jsonl.

    rows: the step's rows of rollouts.jsonl from all ranks, at least one. norm: the gradient's,
    before clipping; if it is not finite, the step counts as skipped. seconds: those of each part.
    gb: peak memory, GiB. We leave out a mean support over no teachers, and where no row has gaps or
    a mask their numbers; shares and other means over nothing are 0. A number of the method's own is
    a mean over the rows that have it. ValueError as `joined` raises it.
    """
    total = len(rows)
    metrics: dict[str, Any] = {
        "step": step,
        "loss": sum(row["loss"] for row in rows) / total,
        "success": sum(row["r"] > 0 for row in rows) / total,
        "truncated": sum(row["truncated"] for row in rows) / total,
        "no_answer": sum(row["pred"] is None for row in rows) / total,
        "no_teachers": sum(not row.get("rho") and not row.get("first_gap") for row in rows),
    }
    metrics |= polarity_numbers(rows)
    metrics |= {f"seconds.{part}": round(x, 3) for part, x in seconds.items()}
    lengths = [len(row["completion_ids"]) for row in rows]
    metrics |= gap_numbers(rows, lengths) if any("unmasked" in row for row in rows) else {}
    metrics |= {
        "completion_tokens": sum(lengths) / total,
        "grad_norm": norm,
        "learning_rate": lr,
        "skipped": int(not math.isfinite(norm)),
        "memory_gb": round(gb, 2),
    }
    own: dict[str, list[float]] = {}
    for row in rows:
        for name, x in row.items():
            if type(x) in (int, float) and name not in TAKEN:
                own.setdefault(name, []).append(x)
    return joined(metrics, {name: torch.tensor(xs).double().mean() for name, xs in own.items()})


def gap_numbers(rows: list[dict], lengths: list[int]) -> dict[str, float]:
    """The shares of clipped gaps and of unmasked tokens, and the mean gap of first tokens."""
    # Without a mask every token counts.
    unmasked = [row.get("unmasked", length) for row, length in zip(rows, lengths)]
    gaps = sum(n * len(row.get("first_gap", [])) for row, n in zip(rows, unmasked))
    first_gaps = list(itertools.chain.from_iterable(row.get("first_gap", []) for row in rows))
    return {
        "clip_share": sum(row.get("clipped", 0) for row in rows) / max(1, gaps),
        "mask_share": sum(unmasked) / sum(lengths),
        "first_gap": sum(first_gaps) / max(1, len(first_gaps)),
    }


def polarity_numbers(rows: list[dict]) -> dict[str, Any]:
    """Teachers counted by fate, over all, right, wrong and cut rollouts; and their supports."""
    metrics: dict[str, Any] = {}
    rows_of = {
        "": rows,
        "_success": [row for row in rows if row["r"] > 0],
        "_failure": [row for row in rows if row["r"] <= 0],
        "_truncated": [row for row in rows if row["truncated"]],
    }
    for case, of_case in rows_of.items():
        rho = list(itertools.chain.from_iterable(row.get("rho", []) for row in of_case))
        metrics |= {f"rho_{fate}{case}": rho.count(sign) for sign, fate in FATE.items()}
        signed = list(itertools.chain.from_iterable(row.get("a", []) for row in of_case))
        if signed and case in ("_success", "_failure"):  # for no teachers 0 would look balanced
            metrics[f"a_mean{case}"] = sum(signed) / len(signed)
            metrics[f"a_positive{case}"] = sum(a > 0 for a in signed) / len(signed)
    signed = list(itertools.chain.from_iterable(row.get("a", []) for row in rows))
    sizes = torch.tensor(signed or [0.0]).abs()
    shares = {f"abs_a_p{percent}": sizes.quantile(percent / 100) for percent in (10, 50, 90)}
    return metrics | {name: float(size) for name, size in shares.items()}


def log_line(m: dict[str, Any], steps: int, late: int = 0) -> str:
    """A step's line on the terminal, with what its method logs; the first step's explains a word.

    m: the step's row of metrics.jsonl. steps: the run's number of steps. late: the number of
    answers that took the verifier too long since the command began.
    """
    share = {name: f"{x:.2f}".removeprefix("0") for name, x in m.items()}
    fates = [m[f"rho_{fate}"] for fate in FATE.values()]
    numbers = {
        "r+": share["success"],
        "rho": "+{}/-{}/0:{}".format(*fates) if any(fates) else "",
        "mixed": share.get("mixed"),
        "clip": f"{m['clip_share']:.1%}" if "clip_share" in m else "",
        "mask": share.get("mask_share"),
        "gnorm": f"{m['grad_norm']:.2g}",
    }
    words = [f"{word} {number}" for word, number in numbers.items() if number]
    cut = (
        f" | {m['truncated']:.0%} cut by --max-new-tokens or the context"
        if m["truncated"] > 0.5
        else ""
    )
    slow = f" | {late} answers so far took longer than --verify-timeout" if late else ""
    legends = [f"\n  {LEGENDS[word]}" for word in LEGENDS if numbers[word] and m["step"] == 1]
    parts = []
    for part in ("gen", "score", "bwd"):
        x = m[f"seconds.{part}"]
        parts.append(f"{part} {x:.1f}s" if x < 10 else f"{part} {x:.0f}s")
    return (
        f"step {m['step']}/{steps} loss {m['loss']:+.4f} {' '.join(words)} "
        f"| {' '.join(parts)} | {m['memory_gb']:.1f}GB{cut}{slow}{''.join(legends)}"
    )


def warnings_after(steps: Sequence[dict[str, Any]], cfg: Any) -> list[str]:
    """Lines that warn after the fifth step if a run learns nothing.

    steps: the rows of metrics.jsonl of the command's steps so far. cfg: its settings; a method
    without --eps-a decides by a rule of its own.
    """
    if len(steps) != FIRST_STEPS:
        return []
    lines, beginning = [], f"in this command's first {FIRST_STEPS} steps"
    if not any(row["success"] for row in steps):
        causes = [text for name, text in CAUSES.items() if all(row[name] == 1 for row in steps)]
        lines.append(f"no right solution {beginning}: {[*causes, NONE_RIGHT][0]}")
    if not any(row.get("mixed", 1) for row in steps):
        success = statistics.fmean(row["success"] for row in steps)
        cause = ALIKE.get(success, "each was all right or all wrong; take more --generations")
        lines.append(
            f"no group had right and wrong solutions {beginning}, so nothing was learnt: {cause}"
        )
    decided = any(row["rho_distilled"] or row["rho_reversed"] for row in steps)
    if "eps_a" in cfg.rules() and not decided:
        cause = "no solution had a teacher: is the bank empty, or the model's context too short?"
        if any(row["rho_ignored"] for row in steps):
            size = statistics.median(row["abs_a_p50"] for row in steps if "abs_a_p50" in row)
            cause = f"the median size of a support is {size:.3g} nats, and --eps-a is {cfg.eps_a:g}"
        lines.append(
            f"no teacher was decided {beginning}, so nothing was learnt: {cause}; "
            "docs/when.md has more"
        )
    return lines


# ------------------------------------------------------------------------ trackers and provenance


def open_tracker(
    out: pathlib.Path, about: dict[str, Any]
) -> Callable[[dict[str, Any]], object] | None:
    """What sends a row of metrics.jsonl to Weights & Biases; None without --report-to.

    out: the run's folder. about: its config.json, by whose id wandb continues a run. ImportError if
    wandb is not installed.
    """
    settings = about["settings"]
    if settings["report_to"] == "none":
        return None
    import wandb

    given = {"name": out.name, "id": about["id"], "dir": str(out), "config": settings}
    wandb.init(project="sgsd", resume="allow", **given)
    return lambda m: wandb.log(m, step=m["step"])


def provenance() -> dict[str, Any]:
    """The command line, the commit and the versions of a run or of its continuation."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    commit = None
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # no git, no repository
        command = ["git", "-C", str(pathlib.Path(__file__).parent), "rev-parse", "HEAD"]
        commit = subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()
    return {
        "when": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": [pathlib.Path(sys.argv[0]).name, *sys.argv[1:]],
        "commit": commit,
        "versions": {"python": sys.version.split()[0], **versions},
    }
