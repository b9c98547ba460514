"""What a run says of itself: a line per update, token texts, mirrors to other loggers, provenance."""

import contextlib
import math
import pathlib
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

import distributed as D
import rollout as R
from config import Config, find_method
from distributed import UserError

if TYPE_CHECKING:
    import sgsd

FATE = {1: "distilled", -1: "reversed", 0: "ignored"}  # of a teacher, by rho (Eq. 13)


def announce(run: "sgsd.Run", counts: dict[str, int], bank_from: str | pathlib.Path) -> None:
    """What a run starts from, printed: method, data, bank, model, mask."""
    cfg, own = run.cfg, find_method(run.cfg.method)[1]
    print(
        f"method {cfg.method}: "
        + (", ".join(f"{name} {getattr(cfg, name)}" for name in own) or "the paper's settings")
    )
    print(f"data {cfg.data}: " + ", ".join(f"{v} {k.replace('_', ' ')}" for k, v in counts.items()))
    if run.bank:
        print(
            f"bank {bank_from}: {len(run.bank.general_skills)} general skills, {len(run.bank.common_mistakes)} common mistakes"
        )
    trained = sum(p.numel() for p in run.params.values())
    print(
        f"model {cfg.model}: {trained:,} trained of {run.model.num_parameters():,} parameters, {run.world.size} x {run.world.device.type}"
    )
    print(
        f"mask (S2): {len(run.masked_ids)} ids: "
        + " ".join(repr(run.tokenizer.decode([i])) for i in sorted(run.masked_ids)[:40])
    )
    if not R.head_is_sliced(run.model):
        print(
            "head: this model's logits are not head(hidden) (soft-capped or scaled); scored by full logits, memory grows with T*V"
        )


def summarize(
    step: int,
    records: list[dict],
    norm: float,
    lr: float,
    seconds: dict[str, float],
    memory_gb: float,
) -> dict:
    """One update's line in metrics.jsonl, from the records of all ranks."""
    total = len(records)
    rho = [(k, r["r"], r["truncated"]) for r in records for k in r["rho"]]
    abs_a = torch.tensor([abs(a) for r in records for a in r["a"]] or [0.0])
    gaps = sum(r["unmasked"] * len(r["rho"]) for r in records)
    first = [g for r in records for g in r["first_gap"]]
    tokens = [len(r["completion_ids"]) for r in records]
    return {
        "step": step,
        "loss": sum(r["loss"] for r in records) / total,
        "success": sum(r["r"] > 0 for r in records) / total,
        "truncated": sum(r["truncated"] for r in records) / total,
        "no_answer": sum(r["pred"] is None for r in records) / total,
        "no_teachers": sum(not r["rho"] for r in records),
        **{f"rho_{name}": sum(k == value for k, _, _ in rho) for value, name in FATE.items()},
        **{
            f"rho_{name}_{case}": sum(k == value and hit(r, cut) for k, r, cut in rho)
            for value, name in FATE.items()
            for case, hit in (
                ("success", lambda r, _: r > 0),
                ("failure", lambda r, _: r < 0),
                ("truncated", lambda _, cut: cut),
            )
        },
        **{f"abs_a_p{q}": float(abs_a.quantile(q / 100)) for q in (10, 50, 90)},
        "clip_share": sum(r["clipped"] for r in records) / max(1, gaps),
        "mask_share": sum(r["unmasked"] for r in records) / max(1, sum(tokens)),
        "first_gap": sum(first) / max(1, len(first)),
        "completion_tokens": sum(tokens) / total,
        "grad_norm": norm,
        "learning_rate": lr,
        "skipped": int(not math.isfinite(norm)),
        "seconds": {k: round(v, 3) for k, v in seconds.items()},
        "memory_gb": round(memory_gb, 2),
    }


def mirrors(cfg: Config, start: int) -> list[Callable[[dict], None]]:
    """--wandb, --tensorboard: what takes a line of metrics.jsonl and passes its numbers on, under the same names."""
    found: list[Callable[[dict], None]] = []
    out = pathlib.Path(cfg.out)
    if cfg.wandb:
        import wandb

        out.mkdir(parents=True, exist_ok=True)  # else it goes elsewhere
        try:
            wandb.init(
                project="sgsd", name=out.name, dir=str(out), config=asdict(cfg)
            )  # a resumed run is a run of its own there
        except Exception as e:  # not logged in, no network
            raise UserError(
                f"--wandb: not started ({D.brief(e)}); log in, set WANDB_MODE=offline, or leave the flag out"
            ) from None
        found.append(lambda m: wandb.log(flat(m), step=m["step"]))
    if cfg.tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(out / "tensorboard"), purge_step=start + 1, flush_secs=10)

        def add(m: dict) -> None:
            for name, value in flat(m).items():
                writer.add_scalar(name, value, m["step"])

        found.append(add)
    return found


def flat(metrics: dict) -> dict:
    """One level: {"seconds": {"gen": 1}} is {"seconds.gen": 1}."""
    return {
        f"{name}.{k}" if k else name: v
        for name, value in metrics.items()
        for k, v in (value.items() if isinstance(value, dict) else [("", value)])
    }


def log_line(m: dict, updates: int) -> str:
    def short(x: float) -> str:
        return f"{x:.2f}".removeprefix("0")

    rho = f"+{m['rho_distilled']}/-{m['rho_reversed']}/0:{m['rho_ignored']}"
    seconds = " ".join(
        f"{k} {m['seconds'][k]:.{1 if m['seconds'][k] < 10 else 0}f}s"
        for k in ("gen", "score", "bwd")
    )
    return (
        f"step {m['step']}/{updates} loss {m['loss']:+.4f} r+ {short(m['success'])} rho {rho} clip {m['clip_share']:.1%} "
        f"mask {short(m['mask_share'])} gnorm {m['grad_norm']:.2g} | {seconds} | {m['memory_gb']:.1f}GB"
    )


def token_texts(tokenizer: R.Tokenizer, ids: list[int]) -> list[str]:
    """Each token's own text. Tokens that share a character leave it to the last of them: "", then "é"."""
    texts, held = [], []
    for i in ids:
        held.append(i)
        text = tokenizer.decode(held, clean_up_tokenization_spaces=False)
        whole = (
            not text.endswith("\ufffd") or len(held) == 4
        )  # no character of UTF-8 has more bytes
        texts.append(text if whole else "")
        held = [] if whole else held
    return texts


def memory_gb(world: D.World) -> float:
    """Peak so far: allocated on the GPU, else resident in this process."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        2**30 if sys.platform == "darwin" else 2**20
    )  # bytes there, else KiB


def provenance(cfg: Config) -> dict:
    """What config.json holds: settings, versions, command line, commit."""
    import importlib.metadata

    versions = {"python": sys.version.split()[0]}
    for name in ("torch", "transformers", "peft", "sentence-transformers", "numpy", "math-verify"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    try:
        git = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=pathlib.Path(__file__).parent,
            capture_output=True,
            text=True,
        ).stdout.strip()
    except OSError:  # no git here
        git = ""
    command = [pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]
    return {
        "settings": asdict(cfg),
        "command": command,
        "commit": git or None,
        "versions": versions,
    }
