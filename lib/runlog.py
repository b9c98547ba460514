"""What a run records: a row per rollout, audit and step, the printed line, and its provenance.

In this module, only the tracker (Weights & Biases) writes files. docs/metrics.md explains every
number.
"""

import contextlib
import importlib.metadata
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
# Why no solution was right, and what to do.
ALL_CUT = "all were cut: raise --max-new-tokens, if the model's context allows"
NO_ANSWER = "none had an answer; see `text` in rollouts.jsonl, and `answer` of --verifier"
NONE_RIGHT = "compare `pred` and `gold` in rollouts.jsonl, and see --answer-field and --verifier"
ALIKE = {  # if no group had right and wrong solutions: what to do, by the share of right ones
    0.0: "all were wrong; if their verdicts are right, take easier problems, or more --generations",
    1.0: "all were right; take harder problems, or more --generations",
}
# Names that are in the logs already: a method's own numbers may not have them (`joined`). In a row
# of rollouts.jsonl, an int or a float of any other name is a method's own: `summarize` averages it.
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
            torch.cuda.synchronize()  # else a part is charged for GPU work of earlier parts
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
    roll: Any,
    reward: float,
    result: Any,
    c_delta: float,
) -> dict[str, Any]:
    """One rollout's row of rollouts.jsonl.

    index: the rollout's place in the global batch. result: has .loss, .numbers, .token_numbers and
    .pairs_K (`SkillPair`s, or None). If its token numbers have a `mask` or gaps `delta`, the row
    counts the unmasked tokens and the clipped gaps; without a mask every token counts. c_delta: the
    bound beyond which a gap counts as clipped. ValueError as `joined` raises it.
    """
    row = {"index": index, "step": step, **asdict(roll), "reward": float(reward)}
    row |= {"pairs": [], "s_g": [], "s_e": []}
    for pair in result.pairs_K or ():
        row["pairs"].append([pair.skill["skill_id"], pair.mistake["mistake_id"]])
        row["s_g"].append(pair.s_g)
        row["s_e"].append(pair.s_e)
    row["loss"] = result.loss.item()
    T = len(roll.completion_ids)
    # (A mask on the CPU can index a tensor of any device.)
    mask_T = result.token_numbers.get("mask", torch.ones(T)).bool().cpu()
    delta_KT = result.token_numbers.get("delta", torch.ones(0, T))
    if {"mask", "delta"} & result.token_numbers.keys():
        row |= {
            "unmasked": int(mask_T.sum()),
            "clipped": int((delta_KT[:, mask_T].abs() > c_delta).sum()),
            "first_gap": delta_KT[:, 0].tolist(),  # T > 0: see `lib.run.leave_out_long`
        }
    return joined(row, result.numbers)


def joined(row: dict[str, Any], numbers: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A row with more numbers. ValueError for a name that this row has already, or one of TAKEN."""
    longer = dict(row)
    for name, x in numbers.items():
        if name in row or name in TAKEN:
            raise ValueError(
                f"{name!r}: a log has another number of this name; rename the method's"
            )
        longer[name] = x.tolist()
    return longer


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
    before clipping; if it is not finite, the step counts as skipped. seconds: by part of the step.
    gb: peak memory, GiB. We leave out a mean or quantile of supports that would be over nothing,
    and `gap_numbers` if no row has gaps or a mask. Any other share or mean over nothing is 0. We
    average a method's own number over the rows that have it. ValueError as `joined` raises it.
    """
    columns: dict[str, list[float]] = {"loss": []}
    columns |= {"success": [], "truncated": [], "no_answer": []}
    no_teachers = tokens = 0
    own: dict[str, list[float]] = {}  # a method's own numbers; SGSD has none
    for row in rows:
        columns["loss"].append(row["loss"])
        columns["success"].append(row["r"] > 0)
        columns["truncated"].append(row["truncated"])
        columns["no_answer"].append(row["pred"] is None)
        # A row with teachers has polarities or, if the method has no polarities, gaps.
        no_teachers += not row.get("rho") and not row.get("first_gap")
        tokens += len(row["completion_ids"])
        for name, x in row.items():
            if type(x) in (int, float) and name not in TAKEN:  # a bool is neither
                own.setdefault(name, []).append(x)
    metrics: dict[str, Any] = {"step": step}
    for name, xs in columns.items():
        metrics[name] = sum(xs) / len(rows)
    metrics["no_teachers"] = no_teachers
    metrics |= polarity_numbers(rows)
    for part, x in seconds.items():
        metrics[f"seconds.{part}"] = round(x, 3)
    if any("unmasked" in row for row in rows):
        metrics |= gap_numbers(rows, tokens)
    metrics |= {
        "completion_tokens": tokens / len(rows),
        "grad_norm": norm,
        "learning_rate": lr,
        "skipped": int(not math.isfinite(norm)),
        "memory_gb": round(gb, 2),
    }
    return joined(metrics, {name: torch.tensor(xs).double().mean() for name, xs in own.items()})


def pooled(rows: list[dict], name: str) -> list[Any]:
    """The rows' lists of this name, joined into one, such as the rho of all teachers."""
    values = []
    for row in rows:
        values += row.get(name, [])
    return values


def gap_numbers(rows: list[dict], tokens: int) -> dict[str, float]:
    """The shares of clipped gaps and of unmasked tokens, and the mean gap of first tokens.

    tokens: the number of tokens in all rows' completions.
    """
    unmasked = gaps = clipped = 0
    for row in rows:
        counted = row.get("unmasked", len(row["completion_ids"]))  # without a mask every token
        unmasked += counted
        gaps += counted * len(row.get("first_gap", []))
        clipped += row.get("clipped", 0)
    first_gaps = pooled(rows, "first_gap")
    return {
        "clip_share": clipped / max(1, gaps),
        "mask_share": unmasked / tokens,
        "first_gap": sum(first_gaps) / max(1, len(first_gaps)),
    }


def polarity_numbers(rows: list[dict]) -> dict[str, Any]:
    """Teachers counted by fate, over all, right, wrong and cut rollouts; and their supports."""
    rows_of: dict[str, list[dict]] = {"": rows, "_success": [], "_failure": [], "_truncated": []}
    for row in rows:
        rows_of["_success" if row["r"] > 0 else "_failure"].append(row)
        if row["truncated"]:
            rows_of["_truncated"].append(row)
    metrics: dict[str, Any] = {}
    for case, of_case in rows_of.items():
        rho = pooled(of_case, "rho")
        for sign, fate in FATE.items():
            metrics[f"rho_{fate}{case}"] = rho.count(sign)
        supports = pooled(of_case, "a")
        # Without supports a mean of 0 would look as if they were balanced.
        if supports and case in ("_success", "_failure"):
            metrics[f"a_mean{case}"] = sum(supports) / len(supports)
            metrics[f"a_positive{case}"] = sum(a > 0 for a in supports) / len(supports)
    if supports := pooled(rows, "a"):
        sizes = torch.tensor(supports).abs()
        for percent in (10, 50, 90):
            metrics[f"abs_a_p{percent}"] = float(sizes.quantile(percent / 100))
    return metrics


def log_line(m: dict[str, Any], steps: int, late: int = 0) -> str:
    """A step's line on the terminal, with what the method logs. LEGENDS follow the line of step 1.

    m: the step's row of metrics.jsonl. steps: the run's number of steps. late: the number of
    answers that took the verifier too long since the command began.
    """
    words = {"r+": _short(m["success"])}
    if m["rho_distilled"] or m["rho_reversed"] or m["rho_ignored"]:
        words["rho"] = "+{rho_distilled}/-{rho_reversed}/0:{rho_ignored}".format(**m)
    if "mixed" in m:
        words["mixed"] = _short(m["mixed"])
    if "clip_share" in m:
        words["clip"] = f"{m['clip_share']:.1%}"
        words["mask"] = _short(m["mask_share"])
    words["gnorm"] = f"{m['grad_norm']:.2g}"
    line = f"step {m['step']}/{steps} loss {m['loss']:+.4f}"
    for word, number in words.items():
        line += f" {word} {number}"
    line += " |"
    for part in ("gen", "score", "bwd"):
        x = m[f"seconds.{part}"]
        line += f" {part} {x:.1f}s" if x < 10 else f" {part} {x:.0f}s"
    line += f" | {m['memory_gb']:.1f}GB"
    if m["truncated"] > 0.5:
        line += f" | {m['truncated']:.0%} cut by --max-new-tokens or the context"
    if late:
        line += f" | {late} answers so far took longer than --verify-timeout"
    for word, legend in LEGENDS.items():
        if m["step"] == 1 and word in words:
            line += f"\n  {legend}"
    return line


def _short(share: float) -> str:
    return f"{share:.2f}".removeprefix("0")


def warnings_after(steps: Sequence[dict[str, Any]], cfg: Any) -> list[str]:
    """Lines that warn after the command's fifth step if its steps so far taught nothing.

    steps: the rows of metrics.jsonl of the command's steps so far. cfg: the run's settings; only a
    method with --eps-a gets the warning about teachers.
    """
    if len(steps) != FIRST_STEPS:
        return []

    def mean(name: str) -> float:
        return statistics.fmean(row[name] for row in steps)

    lines = []
    beginning = f"in this command's first {FIRST_STEPS} steps"
    if not mean("success"):
        cause = NONE_RIGHT
        if mean("truncated") == 1:
            cause = ALL_CUT
        elif mean("no_answer") == 1:
            cause = NO_ANSWER
        lines.append(f"no right solution {beginning}: {cause}")
    if "mixed" in steps[0] and not mean("mixed"):
        success = mean("success")
        cause = ALIKE.get(success, "each was all right or all wrong; take more --generations")
        lines.append(
            f"no group had right and wrong solutions {beginning}, so nothing was learnt: {cause}"
        )
    if cfg.has_polarity and not mean("rho_distilled") and not mean("rho_reversed"):
        cause = "no solution had a teacher: is the bank empty, or the model's context too short?"
        if mean("rho_ignored"):
            size = statistics.median(row["abs_a_p50"] for row in steps if "abs_a_p50" in row)
            cause = f"the median size of a support is {size:.3g} nats, and --eps-a is {cfg.eps_a:g}"
        lines.append(
            f"no teacher was decided {beginning}, so nothing was learnt: {cause}; "
            "docs/metrics.md has more"
        )
    return lines


# ------------------------------------------------------------------------ trackers and provenance


def load_tracker(report_to: str) -> Any:
    """The package of --report-to, or None. ImportError if it is not installed."""
    if report_to == "none":
        return None
    import wandb

    return wandb


def open_tracker(
    out: pathlib.Path, manifest: dict[str, Any]
) -> Callable[[dict[str, Any]], object] | None:
    """A function that sends a row of metrics.jsonl to Weights & Biases; None without --report-to.

    out: the run's folder. manifest: its config.json, by whose id wandb continues a run.
    """
    settings = manifest["settings"]
    wandb = load_tracker(settings["report_to"])
    if not wandb:
        return None
    given = {"name": out.name, "id": manifest["id"], "dir": str(out), "config": settings}
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
