"""What a run says of itself: a line per step, notices, token texts, provenance; checkpoints."""

import contextlib
import importlib.metadata
import json
import math
import pathlib
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import cli
import config
import distributed
import eval
import files
import policy
from bank import SkillPair, bank_versions
from cli import UserError, brief
from config import Config
from distributed import World
from policy import Model, Tokenizer
from rollout import Rollout
from verify import is_success

FATE = {1: "distilled", -1: "reversed", 0: "ignored"}  # of a teacher, by rho (Eq. 13)
LOGS = ("metrics", "rollouts", "tokens")
PACKAGES = ("torch", "transformers", "peft", "sentence-transformers", "numpy", "math-verify")
ECHO_STEPS = 25  # in a block that may echo the verdict; docs/metrics.md
ECHO_TEACHERS = 100  # of each outcome that must have been decided in it
ECHO_EXCEPTIONS = 0.02  # the share of them that may lean the other way
FALL_PROBLEMS = 100  # in a window of steps whose shares are compared; docs/metrics.md
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
    """Cut the logs and banks back to step `start`, write config.json, start other loggers.

    Where the bank's evolution after `start` was put off, of that step nothing is kept.
    """
    distributed.agree(start, world, "checkpoints")  # and all have read before anyone writes
    loggers: list[Logger] = []
    out = pathlib.Path(cfg.out)
    logs = [out / f"{name}.jsonl" for name in (*LOGS, "bank/replies")]
    before = config.saved(out) if (out / "config.json").exists() else asdict(cfg)
    most_lost = max(cfg.checkpoint_every, before["checkpoint_every"])  # steps, by a kill
    with distributed.errors_shared(world):
        if world.main:
            for log in logs:  # a broken log is refused before anything is written
                last = max((row.get("step", 0) for row in files.read_jsonl(log)), default=0)
                if last > start + most_lost:
                    rule = f"the last checkpoint is of step {start}; were others moved away?"
                    raise UserError(f"{log}: reaches step {last}, but {rule}")
            loggers = mirrors(cfg, start)
            files.write_json(out / "config.json", provenance(cfg))
            for log in logs:  # the steps after `start` will be made again
                of_bank = log.stem == "replies"
                files.trim_jsonl(log, start - bank_is_due if of_bank else start)
            for since, path in bank_versions(out).items():
                if since > start - bank_is_due:
                    path.unlink()
    return loggers


def how_to_continue(cfg: Config) -> str:
    """What goes on with a run that was broken off, as the end of a sentence."""
    if not pathlib.Path(cfg.out, "config.json").exists():
        return "nothing of the run is written yet: give the same command again"
    command = f"python {cli.program(cfg.program)} --resume {cfg.out}"
    return f"all files of the run are whole: {command} continues it"


def bank_is_due(out: pathlib.Path, step: int) -> bool:
    """Whether the bank's evolution after this step was put off: its numbers are not logged then."""
    rows = files.read_jsonl(out / "metrics.jsonl")
    return any(row["step"] == step and "bank_skills" not in row for row in rows)


def complete_metrics(out: pathlib.Path, counts: dict) -> None:
    """Put the numbers of the bank's evolution into the last line of metrics.jsonl."""
    *rows, last = files.read_jsonl(out / "metrics.jsonl")
    files.write_jsonl(out / "metrics.jsonl", [*rows, last | counts])


def write(out: pathlib.Path, of_logs: tuple[list[dict], ...], loggers: list[Logger]) -> None:
    """Append one step's rows to the LOGS, and pass its metrics on."""
    for name, rows in zip(LOGS, of_logs):
        files.append_jsonl(out / f"{name}.jsonl", rows)
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
    # In the order of the whole sum, so that rounding lifts no share above 1.
    with_verdict = squared_KT.where(credit_KT * r > 0, 0).sum()
    return {"credit_sq": float(squared_KT.sum()), "credit_sq_with_verdict": float(with_verdict)}


def summarize(
    step: int, records: list[dict], norm: float, lr: float, seconds: dict[str, float], gb: float
) -> dict:
    """One step's line in metrics.jsonl, from the records of all ranks."""
    total = len(records)
    metrics: dict = {
        "step": step,
        "loss": sum(row["loss"] for row in records) / total,
        "success": sum(is_success(row["r"]) for row in records) / total,
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
        cases = ["", "_success" if is_success(row["r"]) else "_failure"]
        if row["truncated"]:
            cases.append("_truncated")
        for rho in row["rho"]:
            for case in cases:
                metrics[f"rho_{FATE[rho]}{case}"] += 1
    sizes = torch.tensor(supports or [0.0]).abs()
    for percent in (10, 50, 90):
        metrics[f"abs_a_p{percent}"] = float(sizes.quantile(percent / 100))
    for outcome, wanted in (("success", True), ("failure", False)):
        signed = [a for row in records if is_success(row["r"]) == wanted for a in row["a"]]
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
    """The line of a step on the terminal, from its metrics."""
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
    step: int  # the step after which it is noticed
    now: float  # over the window of steps up to that one
    best: float  # over the best window before
    best_step: int  # the last step of that window
    window: int  # steps


def fallen(metrics: list[dict], batch_size: int) -> list[Fall]:
    """Every fall of a run's success or of its share of boxed answers, from its metrics.jsonl.

    A share p of n problems has the variance p (1 - p) / n, so the difference of two windows with
    n problems each, whose mean share is p, has twice that. A fall is a window that lies more than
    four standard deviations of this difference below the best one before it. It is noticed once,
    and again only after the windows have come back to within two such deviations of the best.
    batch_size: problems per step; rollouts of one problem are alike, and so count as one.
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
    line = f"fall: {fall.what} {fall.now:.2f} in steps {first} to {fall.step}, "
    line += f"{fall.best:.2f} in {best_first} to {fall.best_step}"
    saved = [p for p in checkpoints.glob("step_*") if int(p.name[5:]) <= fall.best_step]
    if not saved:
        return f"{line}; no checkpoint was saved by then"
    return f"{line}; the checkpoint to go back to: {max(saved)}"


def echo_line(metrics: list[dict]) -> str:
    """One line after the first block of steps whose polarity only echoes the verdict, else "".

    Blocks have 25 steps. One echoes where at least 100 teachers of each outcome were decided
    (rho is not 0), and 49 of 50 of each had supports of the same sign: then rho says nothing that
    the verdict does not say. metrics: lines of metrics.jsonl; the block must end with the last.
    """
    if len(metrics) % ECHO_STEPS:
        return ""
    for end in range(ECHO_STEPS, len(metrics) + 1, ECHO_STEPS):
        block = metrics[end - ECHO_STEPS : end]
        lean = _lean(block)
        if lean:
            line = f"polarity: in steps {block[0]['step']} to {block[-1]['step']} the supports "
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
    """What is worth a line after the last of these steps. metrics: the run's lines so far."""
    lines = [echo_line(metrics)]
    for fall in fallen(metrics, cfg.batch_size):
        if fall.step == metrics[-1]["step"]:
            lines.append(fall_line(fall, pathlib.Path(cfg.out) / "checkpoints"))
    return [line for line in lines if line]


def mirrors(cfg: Config, start: int) -> list[Logger]:
    """Functions that pass a line of metrics.jsonl on to --wandb and --tensorboard."""
    loggers: list[Logger] = []
    out = pathlib.Path(cfg.out)
    if cfg.wandb:
        import wandb

        out.mkdir(parents=True, exist_ok=True)  # else wandb writes elsewhere
        try:  # a resumed run is a run of its own there
            wandb.init(project="sgsd", name=out.name, dir=str(out), config=asdict(cfg))
        except Exception as e:  # not logged in, or no network
            fix = "log in, set WANDB_MODE=offline, or leave the flag out"
            raise UserError(f"--wandb: not started ({cli.brief(e)}); {fix}") from None
        loggers.append(lambda m: wandb.log(m, step=m["step"]))
    if cfg.tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(out / "tensorboard"), purge_step=start + 1, flush_secs=10)

        def add(m: dict) -> None:
            for name, value in m.items():
                writer.add_scalar(name, value, m["step"])

        loggers.append(add)
    return loggers


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
    versions = {"sgsd": cli.VERSION, "python": sys.version.split()[0]}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    commit = None
    with contextlib.suppress(OSError):  # no git here
        git = ["git", "-C", str(pathlib.Path(__file__).parent), "rev-parse", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or None
    command = [pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]
    return {"settings": asdict(cfg), "command": command, "commit": commit, "versions": versions}


# ----------------------------------------------------------------------------------- checkpoints


CARD = """# A LoRA adapter of {base}

Made by {program}, method {method}, of the SGSD project (skill-conditioned gated self-distillation)
on the problems of {data}, after step {step} of {updates}. To load it, in this directory:

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(".")  # needs peft, and the base
    tokenizer = AutoTokenizer.from_pretrained(".")

The licence is the base model's.
"""


def save_checkpoint(
    path: pathlib.Path,
    model,
    tokenizer,
    optimizer: Optimizer,
    step: int,
    kept: policy.Tensors,
    cfg: Config,
) -> None:
    """Write a PEFT adapter that anyone can load, the tokenizer, a model card, the trainer's state.

    kept: further tensors to be saved by name. Safetensors and JSON, no pickle.
    """
    from safetensors.torch import save_file

    with files.whole(path) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        state = {name: x.cpu() for name, x in kept.items()}
        for name, p in policy.trained(model).items():
            for part, value in optimizer.state[p].items():
                state[f"{name}.{part}"] = value.cpu()
        save_file(state, folder / "trainer.safetensors")
        files.write_json(folder / "trainer.json", {"step": step})
        base = model.active_peft_config.base_model_name_or_path
        values = {"program": cli.program(cfg.program), "method": "sgsd", **asdict(cfg)}
        files.write_text(folder / "README.md", CARD.format(base=base, step=step, **values))


def _restore(path: pathlib.Path, model: Model, optimizer: Optimizer) -> tuple[int, policy.Tensors]:
    """Put a checkpoint's adapter and moments in place; its step, and what else it kept."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    state = load_file(path / "trainer.safetensors")
    step = int(json.loads((path / "trainer.json").read_text())["step"])
    adapter = load_file(path / "adapter_model.safetensors")
    result: Any = set_peft_model_state_dict(model, adapter)
    if result.unexpected_keys:
        raise KeyError(f"{len(result.unexpected_keys)} tensors have no place in the model")
    moments = {}
    for i, name in enumerate(policy.trained(model)):
        if f"{name}.step" in state:  # else no step has been finite yet
            parts = ("step", "exp_avg", "exp_avg_sq")
            moments[i] = {part: state.pop(f"{name}.{part}") for part in parts}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
    return step, {name: x.to(policy.causal_lm(model).device) for name, x in state.items()}


def load_trainable(
    cfg: Config, world: World, checkpoint: pathlib.Path | None
) -> tuple[Model, Tokenizer, Optimizer, int, policy.Tensors]:
    """Model with adapters, tokenizer, AdamW (S7), the last step, what else a checkpoint kept."""
    where = f"--model {cfg.model}"
    model, tokenizer = policy.load_model(cfg.model, world.device, cfg.dtype, cfg.attn)
    torch.manual_seed(cfg.seed)
    model = policy.with_adapters(model, cfg.lora_rank, cfg.lora_alpha, where)
    params = policy.trained(model).values()
    distributed.broadcast_parameters(params, world)
    optimizer = torch.optim.AdamW(params, lr=cfg.learning_rate, weight_decay=0.0)
    step, kept = 0, policy.Tensors()
    try:
        if checkpoint is not None:
            step, kept = _restore(checkpoint, model, optimizer)
    except Exception as e:  # a missing or torn file, other shapes, other names
        why = f"does not fit {where} ({brief(e)}); was it made with another model or --lora-rank?"
        raise UserError(f"checkpoint {checkpoint}: {why}") from None
    return model, tokenizer, optimizer, step, kept
