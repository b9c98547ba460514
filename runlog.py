"""What a run says of itself: a line per update, token texts, other loggers, provenance."""

import contextlib
import importlib.metadata
import math
import pathlib
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

import config
import distributed
import eval
import inputs
import policy
import skills
from config import Config
from distributed import UserError, World
from policy import Model, Tokenizer
from rollout import Rollout
from skills import SkillBank, SkillPair

FATE = {1: "distilled", -1: "reversed", 0: "ignored"}  # of a teacher, by rho (Eq. 13)
LOGS = ("metrics", "rollouts", "tokens")
PACKAGES = ("torch", "transformers", "peft", "sentence-transformers", "numpy", "math-verify")
COMMON_NUMBERS = set("10 12 20 24 30 45 50 60 90 100 120 180 360 1000".split())
ECHO_UPDATES = 25  # in a block that may echo the verdict; docs/metrics.md
ECHO_TEACHERS = 100  # of each outcome that must have been decided in it
ECHO_EXCEPTIONS = 0.02  # the share of them that may lean the other way
FALL_PROBLEMS = 100  # in a window of updates whose shares are compared; docs/metrics.md
FALL_DEVIATIONS = 4.0  # between two windows, of their difference's standard deviation

Logger = Callable[[dict], None]


def announce(
    cfg: Config, world: World, model: Model, tokenizer: Tokenizer, masked: set[int], counts: dict
) -> None:
    """Print what a run starts from."""
    print(f"data {cfg.data}: " + ", ".join(f"{n} {k.replace('_', ' ')}" for k, n in counts.items()))
    learning = sum(p.numel() for p in policy.trained(model).values())
    learn = f"{learning:,} of {model.num_parameters():,} parameters learn"
    print(f"model {cfg.model}: {learn}, {world.size} x {world.device.type}")
    shown = [repr(tokenizer.decode([i])) for i in sorted(masked)[:40]]
    print(f"mask (S2): {len(masked)} ids: {' '.join(shown)}")
    prompts = [policy.chat_ids(tokenizer, "x", thinking=on) for on in (True, False)]
    if prompts[0] == prompts[1]:
        print("thinking: no switch in the chat template, so closed and bare are one prompt (S3)")
    if not policy.head_is_sliced(model):
        print("head: caps or scales the logits: they are scored whole, in the model's dtype (S22)")


def begin(cfg: Config, world: World, start: int, bank_is_due: bool = False) -> list[Logger]:
    """Cut the logs and banks back to update `start`, write config.json, start other loggers.

    Where the bank's update after `start` was put off, of that update nothing is kept.
    """
    distributed.agree(start, world, "checkpoints")  # and all have read before anyone writes
    loggers: list[Logger] = []
    out = pathlib.Path(cfg.out)
    logs = [out / f"{name}.jsonl" for name in (*LOGS, "bank/replies")]
    before = config.saved(out) if (out / "config.json").exists() else asdict(cfg)
    most_lost = max(cfg.checkpoint_every, before["checkpoint_every"])  # updates, by a kill
    with distributed.errors_shared(world):
        if world.main:
            for log in logs:  # a broken log is refused before anything is written
                last = max((row.get("step", 0) for row in distributed.read_jsonl(log)), default=0)
                if last > start + most_lost:
                    rule = f"the last checkpoint is of update {start}; were others moved away?"
                    raise UserError(f"{log}: reaches update {last}, but {rule}")
            loggers = mirrors(cfg, start)
            distributed.write_json(out / "config.json", provenance(cfg))
            for log in logs:  # the updates after `start` will be made again
                of_bank = log.stem == "replies"
                distributed.trim_jsonl(log, start - bank_is_due if of_bank else start)
            for made, path in bank_versions(out).items():
                if made > start - bank_is_due:
                    path.unlink()
    return loggers


def how_to_continue(cfg: Config) -> str:
    """What goes on with a run that was broken off, as the end of a sentence."""
    if not pathlib.Path(cfg.out, "config.json").exists():
        return "nothing of the run is written yet: give the same command again"
    return f"all files of the run are whole: python {cfg.program} --resume {cfg.out} continues it"


def bank_is_due(out: pathlib.Path, step: int) -> bool:
    """Whether the bank's update after this update was put off: its numbers are not logged then."""
    rows = distributed.read_jsonl(out / "metrics.jsonl")
    return any(row["step"] == step and "bank_skills" not in row for row in rows)


def complete_metrics(out: pathlib.Path, counts: dict) -> None:
    """Put the numbers of the bank's update into the last line of metrics.jsonl."""
    *rows, last = distributed.read_jsonl(out / "metrics.jsonl")
    distributed.write_jsonl(out / "metrics.jsonl", [*rows, last | counts])


def write(out: pathlib.Path, of_logs: tuple[list[dict], ...], loggers: list[Logger]) -> None:
    """Append one update's rows to the LOGS, and pass its metrics on."""
    for name, rows in zip(LOGS, of_logs):
        distributed.append_jsonl(out / f"{name}.jsonl", rows)
    for pass_on in loggers:
        pass_on(*of_logs[0])


def what_next(cfg: Config) -> str:
    """The commands that fit a run that has come to its end."""
    data = cfg.eval_data or "YOUR_TEST_PROBLEMS.jsonl"
    evaluate = f"python eval.py {cfg.model} {cfg.out} --data {data} {eval.flags_of(cfg)}"
    lines = [f"done; look inside: python report.py {cfg.out}", f"all checkpoints: {evaluate}"]
    if not cfg.eval_data:
        sets = "AIME24, AIME25 and HMMT25, from the hub"
        lines.append(f"(without --data on {sets}; a sample has up to {cfg.eval_tokens:,} tokens)")
    return "\n".join(lines)


def bank_versions(out: pathlib.Path) -> dict[int, pathlib.Path]:
    """The saved banks of a run, by the update after which each came into use."""
    return {int(path.stem[5:]): path for path in sorted((out / "bank").glob("step_*.json"))}


def load_bank(cfg: Config, step: int, resume: bool) -> SkillBank | None:
    """The run's own bank after update `step` (D9), else --bank, else None."""
    own = bank_versions(pathlib.Path(cfg.out)) if resume else {}
    if own:
        return SkillBank.load(own[max(made for made in own if made <= step)])
    if not cfg.bank:
        return None
    inputs.check_bank(cfg)
    return SkillBank.load(cfg.bank)


def save_bank(bank: SkillBank, out: pathlib.Path, step: int) -> None:
    """Save a bank as the version of update `step` and as the latest."""
    for name in (f"step_{step:06d}", "bank"):
        bank.save(out / "bank" / f"{name}.json")
    warning = lint(bank)
    if warning:
        print(warning)


def lint(bank: SkillBank) -> str:
    """One line on the entries with a number that looks like one problem's, "" without any."""
    found = []
    for key in skills.FIELDS:
        for entry in bank.collection(key):
            numbers = re.findall(r"\d+(?:\.\d+)?", skills.entry_text(entry, key))
            odd = [n for n in dict.fromkeys(numbers) if len(n) > 1 and n not in COMMON_NUMBERS]
            if odd:
                found.append(f"{entry[skills.IDS[key]]} ({', '.join(odd)})")
    some = policy.encodable(", ".join(found[:5])) + (", ..." if len(found) > 5 else "")
    what = "entries carry numbers that look like one problem's"
    return f"bank: {len(found)} {what}: {some}" if found else ""


def bank_line(bank: SkillBank, teachers: int) -> str:
    """What a bank holds, what its first entries were made from, whether it is shorter than K."""
    sizes = len(bank.general_skills), len(bank.common_mistakes)
    line = f"bank: {bank.sizes}"
    if "seed_solutions" in bank.metadata:
        made = " of {input_general_skills} and {input_common_mistakes} candidates, from "
        made += "{seed_solutions} seed solutions, {right_seed_solutions} of them right"
        line += made.format(**bank.metadata)
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
    """What an online update did to the bank, or why it did nothing. by_cause: lost replies."""
    success = sum(row["r"] > 0 for row in window) / len(window)
    if new is old:
        return f"bank: success {success:.2f} is not below the gate: kept as it is"
    line, update = f"bank: success {success:.2f}", new.metadata["updates"][-1]
    for key in skills.FIELDS:
        line += f"; {update[f'candidate_{key}']} candidate {skills.SHORT[key]}"
        line += f", {update[f'merged_{key}']} after merging"
        line += f", {update[f'copied_{key}']} copies of static entries dropped"
        line += f", net new {update[f'net_new_{key}']}"
    return f"{line}; {lost(by_cause)}"


class Stopwatch:
    """Seconds by part: each lap goes to the part that it names."""

    def __init__(self) -> None:
        self.seconds = {"gen": 0.0, "score": 0.0, "bwd": 0.0, "opt": 0.0}
        self.last = time.perf_counter()

    def lap(self, part: str) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # else the work would count where it is waited for
        now = time.perf_counter()
        self.seconds[part] += now - self.last
        self.last = now


def rollout_row(
    step: int, roll: Rollout, pairs_K: list[SkillPair], numbers: dict[str, Tensor]
) -> dict:
    """One rollout's line in rollouts.jsonl."""
    row = {"step": step, **asdict(roll)}
    row["pairs"] = [[pair.skill["skill_id"], pair.mistake["mistake_id"]] for pair in pairs_K]
    row["s_g"] = [pair.s_g for pair in pairs_K]
    row["s_e"] = [pair.s_e for pair in pairs_K]
    return row | {name: x.tolist() for name, x in numbers.items()}


def token_row(step: int, roll: Rollout, tokenizer: Tokenizer, numbers: dict[str, Tensor]) -> dict:
    """One audited rollout's line in tokens.jsonl. numbers: [T], or [K, T], of its tokens."""
    row = {"step": step, "problem_id": roll.problem_id}
    row["text"] = token_texts(tokenizer, roll.completion_ids)
    return row | {name: x.tolist() for name, x in numbers.items()}


def credit_sums(credit_KT: Tensor, r: int) -> dict[str, float]:
    """A rollout's squared credit (Eq. 20), and that of the tokens whose credit has r's sign."""
    squared_KT = credit_KT.square()
    with_verdict = squared_KT[credit_KT * r > 0].sum()
    return {"credit_sq": float(squared_KT.sum()), "credit_sq_with_verdict": float(with_verdict)}


def summarize(
    step: int, records: list[dict], norm: float, lr: float, seconds: dict[str, float], gb: float
) -> dict:
    """One update's line in metrics.jsonl, from the records of all ranks."""
    total = len(records)
    metrics: dict = {
        "step": step,
        "loss": sum(row["loss"] for row in records) / total,
        "success": sum(row["r"] == 1 for row in records) / total,
        "truncated": sum(row["truncated"] for row in records) / total,
        "no_answer": sum(row["pred"] is None for row in records) / total,
        "no_teachers": sum(not row["rho"] for row in records),
    }
    for fate in FATE.values():
        for case in ("", "_success", "_failure", "_truncated"):
            metrics[f"rho_{fate}{case}"] = 0
    supports, first_gaps = [], []
    for row in records:
        supports += row["a"]
        first_gaps += row["first_gap"]
        cases = ["", "_success" if row["r"] > 0 else "_failure"]
        if row["truncated"]:
            cases.append("_truncated")
        for rho in row["rho"]:
            for case in cases:
                metrics[f"rho_{FATE[rho]}{case}"] += 1
    sizes = torch.tensor(supports or [0.0]).abs()
    for percent in (10, 50, 90):
        metrics[f"abs_a_p{percent}"] = float(sizes.quantile(percent / 100))
    for outcome, r in (("success", 1), ("failure", -1)):
        signed = [a for row in records if row["r"] == r for a in row["a"]]
        if signed:  # a mean over nothing is left out: 0 would stand for a teacher without a lean
            metrics[f"a_mean_{outcome}"] = sum(signed) / len(signed)
            metrics[f"a_positive_{outcome}"] = sum(a > 0 for a in signed) / len(signed)
    credit = sum(row["credit_sq"] for row in records)
    if credit:
        with_verdict = sum(row["credit_sq_with_verdict"] for row in records)
        metrics["credit_with_verdict"] = with_verdict / credit
    tokens = sum(len(row["completion_ids"]) for row in records)
    gaps = sum(row["unmasked"] * len(row["rho"]) for row in records)
    metrics |= {f"seconds.{part}": round(x, 3) for part, x in seconds.items()}
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


def log_line(m: dict, updates: int) -> str:
    """The line of an update on the terminal, from its metrics."""
    rho = f"+{m['rho_distilled']}/-{m['rho_reversed']}/0:{m['rho_ignored']}"
    success, mask = (f"{m[name]:.2f}".removeprefix("0") for name in ("success", "mask_share"))
    cut = f" | {m['truncated']:.0%} cut at --max-new-tokens" if m["truncated"] > 0.5 else ""
    parts = []
    for part in ("gen", "score", "bwd"):
        x = m[f"seconds.{part}"]
        parts.append(f"{part} {x:.1f}s" if x < 10 else f"{part} {x:.0f}s")
    return (
        f"step {m['step']}/{updates} loss {m['loss']:+.4f} r+ {success} rho {rho} "
        f"clip {m['clip_share']:.1%} mask {mask} gnorm {m['grad_norm']:.2g} "
        f"| {' '.join(parts)} | {m['memory_gb']:.1f}GB{cut}"
    )


@dataclass(frozen=True)
class Fall:
    """A share that is well below its best."""

    what: str  # "success" or "boxed answers"
    step: int  # the update after which it is noticed
    now: float  # over the window of updates up to that one
    best: float  # over the best window before
    best_step: int  # the last update of that window
    window: int  # updates


def fallen(metrics: list[dict], batch_size: int) -> list[Fall]:
    """Every fall of a run's success or of its share of boxed answers, from its metrics.jsonl.

    A share p of n problems has the variance p (1 - p) / n, so the difference of two windows with
    n problems each, whose mean share is p, has twice that. A fall is a window that lies more than
    four standard deviations of this difference below the best one before it. It is noticed once,
    and again only after half of the distance has been made up. batch_size: problems per update;
    rollouts of one problem are alike, and so count as one.
    """
    window = math.ceil(FALL_PROBLEMS / batch_size)
    shares = {
        "success": [row["success"] for row in metrics],
        "boxed answers": [1 - row["no_answer"] for row in metrics],
    }
    falls = []
    for what, share in shares.items():
        best, best_step, down = -1.0, 0, False
        for end in range(window, len(share) + 1):
            now = sum(share[end - window : end]) / window
            step = metrics[end - 1]["step"]
            if now >= best:
                best, best_step, down = now, step, False
            both = (best + now) / 2
            deviation = math.sqrt(2 * both * (1 - both) / (window * batch_size))
            far = FALL_DEVIATIONS * deviation
            if best - now > far and not down:
                falls.append(Fall(what, step, now, best, best_step, window))
            down = best - now > (far / 2 if down else far)
    return sorted(falls, key=lambda fall: fall.step)


def fall_line(fall: Fall, checkpoints: pathlib.Path) -> str:
    """A fall in one line, with the last checkpoint before it. checkpoints: the folder of all."""
    first, best_first = fall.step - fall.window + 1, fall.best_step - fall.window + 1
    line = f"fall: {fall.what} {fall.now:.2f} in updates {first} to {fall.step}, "
    line += f"{fall.best:.2f} in {best_first} to {fall.best_step}"
    saved = [p for p in checkpoints.glob("step_*") if int(p.name[5:]) <= fall.best_step]
    if not saved:
        return f"{line}; no checkpoint was saved by then"
    return f"{line}; the checkpoint to go back to: {max(saved)}"


def echo_line(metrics: list[dict]) -> str:
    """One line after the first block of updates whose polarity only echoes the verdict, else "".

    Blocks have 25 updates. One echoes where at least 100 teachers of each outcome were decided
    (rho is not 0), and 49 of 50 of each had supports of the same sign: then rho says nothing that
    the verdict does not say. metrics: lines of metrics.jsonl; the block must end with the last.
    """
    if len(metrics) % ECHO_UPDATES:
        return ""
    for end in range(ECHO_UPDATES, len(metrics) + 1, ECHO_UPDATES):
        block = metrics[end - ECHO_UPDATES : end]
        lean = _lean(block)
        if lean:
            line = f"polarity: in updates {block[0]['step']} to {block[-1]['step']} the supports "
            line += f"that count were {lean} zero on successes and on failures, so that it only "
            line += "echoes the verdict; docs/polarity.md"
            return line if end == len(metrics) else ""
    return ""


def _lean(block: list[dict]) -> str:
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
    return "".join(sides)  # not both: one side has half of them or more


def notices(cfg: Config, metrics: list[dict]) -> list[str]:
    """What is worth a line after the last of these updates. metrics: the run's lines so far."""
    lines = [echo_line(metrics)]
    for fall in fallen(metrics, cfg.batch_size):
        if fall.step == metrics[-1]["step"]:
            lines.append(fall_line(fall, pathlib.Path(cfg.out) / "checkpoints"))
    return [line for line in lines if line]


def mirrors(cfg: Config, start: int) -> list[Logger]:
    """Functions that pass a line of metrics.jsonl on to --wandb and --tensorboard."""
    found: list[Logger] = []
    out = pathlib.Path(cfg.out)
    if cfg.wandb:
        import wandb

        out.mkdir(parents=True, exist_ok=True)  # else wandb writes elsewhere
        try:  # a resumed run is a run of its own there
            wandb.init(project="sgsd", name=out.name, dir=str(out), config=asdict(cfg))
        except Exception as e:  # not logged in, or no network
            fix = "log in, set WANDB_MODE=offline, or leave the flag out"
            raise UserError(f"--wandb: not started ({distributed.brief(e)}); {fix}") from None
        found.append(lambda m: wandb.log(m, step=m["step"]))
    if cfg.tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(out / "tensorboard"), purge_step=start + 1, flush_secs=10)

        def add(m: dict) -> None:
            for name, value in m.items():
                writer.add_scalar(name, value, m["step"])

        found.append(add)
    return found


def token_texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Each token's own text; tokens that share a character leave it to the last of them."""
    texts, held = [], []
    for i in ids:
        held.append(i)
        text = tokenizer.decode(held, clean_up_tokenization_spaces=False)
        whole = not text.endswith("\ufffd") or len(held) == 4  # UTF-8 takes up to 4 bytes
        texts.append(text if whole else "")
        held = [] if whole else held
    return texts


def memory_gb(world: World) -> float:
    """Peak so far: allocated on the GPU, else resident in this process."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 2**30 if sys.platform == "darwin" else 2**20  # bytes there, else KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def provenance(cfg: Config) -> dict:
    """What config.json holds: settings, command line, commit and versions."""
    versions = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    commit = None
    with contextlib.suppress(OSError):  # no git here
        git = ["git", "-C", str(pathlib.Path(__file__).parent), "rev-parse", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or None
    command = [pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]
    return {"settings": asdict(cfg), "command": command, "commit": commit, "versions": versions}
