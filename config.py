"""A run's settings: one frozen dataclass, its flags, and the presets.

A field that the paper or a decision (S..., D...) settles names it.
"""

import argparse
import contextlib
import json
import math
import os
import pathlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

import distributed
from distributed import UserError


def setting(
    default: Any,
    source: str,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """A setting: its default, its help and source, its rule (a number is > 0 without a `least`)."""
    rule = {"source": source, "choices": choices, "least": least, "most": most}
    return field(default=default, metadata=rule)


@dataclass(frozen=True)
class Config:
    """SGSD's settings; the flags are made from them."""

    program: ClassVar[str] = "sgsd.py"

    # the run
    out: str = setting("runs/sgsd", "the run's directory; for skills.py the bank's file, x.json")
    seed: int = setting(0, "of the data order, the adapters and sampling", least=0, most=2**40)
    updates: int = setting(200, "optimizer updates; §4.1")
    checkpoint_every: int = setting(25, "updates between two checkpoints; §4.1")
    eval_data: str = setting("", "problems for avg@k before and after the run; see also eval.py")
    eval_samples: int = setting(12, "samples per problem in those evaluations; App. F.1")
    eval_tokens: int = setting(38912, "new tokens of an evaluation sample; App. F.1")
    device: str = setting("auto", "auto is CUDA where there is one", ("auto", "cpu", "cuda"))
    # the model
    model: str = setting("Qwen/Qwen3-1.7B", "the policy, a hub id or directory; §4.1")
    dtype: str = setting("auto", "auto: bf16 on CUDA; App. F.1", ("auto", "float32", "bfloat16"))
    attn: str = setting("sdpa", "attention kernels; S25", ("sdpa", "flash_attention_2", "eager"))
    lora_rank: int = setting(64, "rank of the adapters; App. F.1")
    lora_alpha: int = setting(128, "scale of the adapters; App. F.1")
    # the data
    data: str = setting("BytedTsinghua-SIA/DAPO-Math-17k", "hub id, parquet or JSONL; App. F.1, D8")
    batch_size: int = setting(32, "problems per update over all ranks; S6")
    max_prompt_tokens: int = setting(20000, "a longer prompt is an error, never cut; Tab. 11")
    allow_eval_overlap: bool = setting(False, "learn from problems of the evaluation sets, too")
    # the bank
    bank: str = setting("", "skill bank (JSON); without one the run makes its own; §2.1, Alg. 2")
    encoder: str = setting("Qwen/Qwen3-Embedding-0.6B", "a sentence-transformers model; Tab. 12")
    query_prompt: str = setting("", "text put in front of a problem before it is embedded; S10")
    cold_start: int = setting(256, "seed problems of a bank that the run makes; Alg. 2, Tab. 12")
    cold_start_temperature: float = setting(1.0, "of the seed solutions' sampling; S21", least=0)
    cold_start_top_p: float = setting(0.95, "nucleus of the seed solutions' sampling; S21", most=1)
    cold_start_top_k: int = setting(0, "top k of the seed solutions' sampling; S21", least=0)
    cold_start_tokens: int = setting(38912, "length of a seed solution; S21")
    cold_start_thinking: bool = setting(True, "solve the seed problems in thinking mode; S21")
    update_every: int = setting(25, "F, updates per online update; 0 is never; Alg. 4", least=0)
    success_gate: float = setting(0.8, "gamma, success that skips a bank update; Alg. 4", least=0)
    max_new_items: int = setting(5, "N, net new entries per online update; Alg. 4", least=0)
    dynamic_capacity: int = setting(30, "C, dynamic entries per collection; Alg. 4, Tab. 12")
    merge_group_size: int = setting(32, "H, items per merge; Alg. 3", least=2)
    merge_patience: int = setting(3, "P, merge layers without progress; Alg. 3")
    reply_tokens: int = setting(4096, "new tokens of an extraction's reply; D4")
    update_model: str = setting("", "another model for extraction and merging; App. D.4")
    update_server: str = setting("", "the server of --update-model, several in quotes; S26")
    memory_answer: bool = setting(False, "show the reference answer to the extractor; D3")
    # the objective
    num_teachers: int = setting(8, "K, retrieved skill-mistake pairs; Tab. 12")
    teacher_prefix: str = setting("bare", "a teacher's think block; S3", ("bare", "open", "closed"))
    tau_g: float = setting(1.0, "gate width; Eq. 14, Tab. 12")
    c_delta: float = setting(3.0, "bound of the gaps in the support, in nats; Eq. 11, Tab. 12")
    eps_a: float = setting(0.05, "threshold on the support, in nats; Eq. 13, Tab. 12", least=0)
    mask_extra: bool = setting(False, "also mask tokens of white space, markdown, tool tags; S2")
    # the student's sampling
    temperature: float = setting(1.1, "of the student's sampling; Tab. 11", least=0)
    top_p: float = setting(0.95, "nucleus of the student's sampling; Tab. 11", most=1)
    top_k: int = setting(20, "most likely tokens that can be drawn; 0 is all; Tab. 11", least=0)
    max_new_tokens: int = setting(1024, "completion length; Tab. 11")
    # the optimizer
    learning_rate: float = setting(5e-6, "AdamW's, falling linearly to 0; App. F.1, S7")
    grad_clip: float = setting(0.1, "largest gradient norm; S7")
    # looking inside, and what bounds memory without changing a result
    audit_every: int = setting(25, "updates between records in tokens.jsonl; 0 is never", least=0)
    score_tokens: int = setting(16384, "token budget of one padded forward pass")
    rollout_rows: int = setting(
        0, "rows decoded at a time on each rank; 0 is all rollouts, and 16 for the bank", least=0
    )
    verify_timeout: float = setting(5.0, "seconds the verifier may take for an answer", most=1e6)
    verify_workers: int = setting(1, "verifier processes per rank")
    wandb: bool = setting(False, "also send the numbers of metrics.jsonl to Weights & Biases")
    tensorboard: bool = setting(False, "also write the numbers of metrics.jsonl to RUN/tensorboard")

    def __post_init__(self) -> None:
        for f in fields(self):
            value, rule, wrong = getattr(self, f.name), f.metadata, ""
            number = type(f.default) in (int, float)  # a string from a config.json raises TypeError
            if rule["choices"] and value not in rule["choices"]:
                wrong = f"must be one of {', '.join(rule['choices'])}"
            elif number and not math.isfinite(value):
                wrong = "must be finite"
            elif number and rule["least"] is None and value <= 0:
                wrong = "must be > 0"
            elif rule["least"] is not None and value < rule["least"]:
                wrong = f"must be >= {rule['least']}"
            elif rule["most"] is not None and value > rule["most"]:
                wrong = f"must be <= {rule['most']}"
            if wrong:
                raise UserError(f"{flag(f.name)} {value}: {wrong} ({rule['source']})")
        if self.update_server and not self.update_model:
            wrong = "give the model that it serves as --update-model"
            raise UserError(f"--update-server {self.update_server}: {wrong}")

    @property
    def sees_skills(self) -> bool:
        """Whether the method has a bank and an encoder."""
        return True

    @property
    def merging(self) -> dict[str, int]:
        """Algorithm 3's settings."""
        return {"group_size": self.merge_group_size, "patience": self.merge_patience}

    @property
    def evolution(self) -> dict[str, Any]:
        """Algorithm 4's settings."""
        return {
            "update_every": self.update_every,
            "success_gate": self.success_gate,
            "max_new_items": self.max_new_items,
            "dynamic_capacity": self.dynamic_capacity,
            "memory_answer": self.memory_answer,
            **self.merging,
        }


@dataclass(frozen=True)
class BankConfig(Config):
    """The settings of skills.py, which has no policy that changes."""

    program: ClassVar[str] = "skills.py"

    server: str = setting("", "sample --model on this server, several in quotes; S26")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


GROUPS = {  # in --help, by the first setting of each
    "out": "the run",
    "model": "the model",
    "data": "the data",
    "bank": "the bank",
    "num_teachers": "the objective",
    "temperature": "the student's sampling",
    "learning_rate": "the optimizer",
    "audit_every": "looking inside, memory, time limits and loggers",
    "server": "a cold start by a server",
    "method": "baselines and ablations",
}
TINY = os.path.relpath(pathlib.Path(__file__).resolve().parent / "tiny")
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "tiny": {  # docs/decisions.md says why each one differs from the paper's
        "model": f"{TINY}/model",
        "encoder": f"{TINY}/encoder",
        "data": f"{TINY}/train.jsonl",
        "eval_data": f"{TINY}/test.jsonl",
        "out": "runs/tiny",
        "updates": 30,
        "batch_size": 16,
        "checkpoint_every": 10,
        "eval_samples": 4,
        "cold_start": 64,
        "cold_start_temperature": 1.1,
        "cold_start_top_k": 20,
        "cold_start_tokens": 96,
        "cold_start_thinking": False,
        "update_every": 10,
        "merge_group_size": 8,
        "reply_tokens": 640,
        "max_new_tokens": 96,
        "rollout_rows": 32,
        "eval_tokens": 96,
        "num_teachers": 4,
        "eps_a": 0.005,
        "learning_rate": 1e-3,
        "lora_rank": 16,
        "lora_alpha": 32,
    },
}


def parse(
    argv: Sequence[str] | None,
    program: str,
    about: str | None,
    kind: type[Config] = Config,
    own_defaults: dict[str, dict[str, Any]] | None = None,
) -> tuple[Config, bool]:
    """(settings, whether to resume) from a command line.

    about: a program's docstring; its first line and its commands stand in --help. A flag overrides
    the preset, and that overrides a --method's own defaults. `--resume RUN` starts from the run's
    saved settings instead. Raises UserError on anything that is wrong.
    """
    title, *more = (about or "").split("\n")
    commands = [line for line in more if line.startswith(("    python ", "    torchrun "))]
    parser = distributed.Parser(
        program,
        description=f"{title}\n\nTags such as S3 and D8 are rows of docs/decisions.md.",
        usage="%(prog)s [--preset NAME] [--FLAG VALUE ...]",
        epilog="\n".join(["examples:", *commands]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--preset", choices=PRESETS, help="settings to start from")
    parser.add_argument("--print-config", action="store_true", help="print every setting, and end")
    parser.add_argument("--resume", metavar="RUN", help="continue from a run's last checkpoint")
    group = parser.add_argument_group()
    for f in fields(kind):
        if f.name in GROUPS:
            group = parser.add_argument_group(GROUPS[f.name])
        text = f"{f.metadata['source']} (default: {f.default})".replace("%", "%%")
        how: dict[str, Any] = {"type": type(f.default), "choices": f.metadata["choices"] or None}
        if not how["choices"]:
            how["metavar"] = type(f.default).__name__
        if isinstance(f.default, bool):
            how = {"action": argparse.BooleanOptionalAction}
        group.add_argument(flag(f.name), help=text, **how)
    given = vars(parser.parse_args(argv))
    if "resume" in given:
        return _resumed(given.pop("resume"), given, kind), True
    show, preset = given.pop("print_config", False), given.pop("preset", "paper")
    start = (own_defaults or {}).get(given.get("method", ""), {})
    cfg = kind(**{**start, **PRESETS[preset], **given})
    if not show:
        return cfg, _restarted(cfg)
    for f in fields(cfg):
        value = getattr(cfg, f.name)
        instead = "" if value == f.default else f", instead of {f.default!r}"
        print(f"{f.name} = {value!r}  ({f.metadata['source']}{instead})")
    raise SystemExit(0)


def saved(run: str | pathlib.Path) -> dict[str, Any]:
    """The settings in a run's config.json. UserError where there is none."""
    path = pathlib.Path(run)
    try:
        return {**json.loads((path / "config.json").read_text(encoding="utf-8"))["settings"]}
    except (OSError, ValueError, KeyError, TypeError) as e:
        there = ", ".join(sorted(file.name for file in path.glob("*"))[:5]) or "nothing"
        why = f"no readable config.json of a run there ({distributed.brief(e)}), but {there}"
        raise UserError(f"{run}: {why}; give a run such as runs/sgsd") from None


def _restarted(cfg: Config) -> bool:
    """Whether `torchrun --max-restarts` starts the command of an existing run once more."""
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    with contextlib.suppress(UserError):
        return again and saved(cfg.out) == asdict(cfg)
    return False


def _resumed(run: str, given: dict[str, Any], kind: type[Config]) -> Config:
    own = {"bank": "bank (D9)", "out": "directory", "method": "method"}
    own |= {"preset": "settings", "print_config": "settings"}
    for name, what in own.items():
        if name in given:
            rule = f"a resumed run has its own {what}; leave it out, or start a new run"
            raise UserError(f"{flag(name)} {given[name]}: {rule}")
    path = pathlib.Path(run)
    if path.parent.name == "checkpoints":
        raise UserError(f"--resume {run}: is a checkpoint; give its run, {path.parent.parent}")
    settings = saved(run)
    program = "baselines.py" if "method" in settings else "sgsd.py"
    if program != kind.program:
        raise UserError(f"--resume {run}: is a run of {program}; python {program} continues it")
    try:
        return kind(**{**settings, **given, "out": run})
    except TypeError as e:
        what = "no readable config.json of a run there"
        raise UserError(f"--resume {run}: {what} ({distributed.brief(e)})") from None
