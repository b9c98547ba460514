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

import cli
import files
from cli import UserError


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
    out: str = setting(
        "runs/sgsd", "directory of the run; skills.py: file of the bank, such as bank.json"
    )
    seed: int = setting(
        0, "seed of the data order, the adapters and the sampling", least=0, most=2**40
    )
    updates: int = setting(200, "number of optimizer steps; §4.1")
    checkpoint_every: int = setting(25, "save a checkpoint every so many steps; §4.1")
    eval_data: str = setting(
        "", "problems on which base and last checkpoint are evaluated in the end"
    )
    eval_samples: int = setting(12, "k of that evaluation's avg@k; App. F.1")
    eval_tokens: int = setting(38912, "longest sample of that evaluation, in tokens; App. F.1")
    device: str = setting("auto", "auto takes CUDA where there is a GPU", ("auto", "cpu", "cuda"))
    # the model
    model: str = setting("Qwen/Qwen3-1.7B", "policy to train: a hub id or a directory; §4.1")
    dtype: str = setting(
        "auto",
        "weights of the base; auto is bf16 on CUDA; App. F.1",
        ("auto", "float32", "bfloat16"),
    )
    attn: str = setting("sdpa", "attention kernels; S25", ("sdpa", "flash_attention_2", "eager"))
    lora_rank: int = setting(64, "rank of the adapters; App. F.1")
    lora_alpha: int = setting(128, "LoRA alpha, the scale of the adapters; App. F.1")
    # the data
    data: str = setting(
        "BytedTsinghua-SIA/DAPO-Math-17k",
        "training problems: hub id, parquet or JSONL; App. F.1, D8",
    )
    batch_size: int = setting(32, "problems in a step, over all processes together; S6")
    max_prompt_tokens: int = setting(20000, "refuse a longer prompt, and never cut one; Tab. 11")
    allow_eval_overlap: bool = setting(False, "train on problems of the evaluation sets, too")
    verifier: str = setting(
        "verify:Verifier",
        "who says right or wrong, as MODULE:CLASS, a subclass of verify.Judge; docs/changing.md",
    )
    prompts: str = setting("", "directory of templates in the place of prompts/; docs/changing.md")
    # the bank
    bank: str = setting("", "skill bank (JSON); without one the model writes its own first; Alg. 2")
    encoder: str = setting(
        "Qwen/Qwen3-Embedding-0.6B",
        "sentence-transformers model that embeds problems and skills; Tab. 12",
    )
    query_prompt: str = setting("", "text put in front of a problem before it is embedded; S10")
    cold_start: int = setting(
        256, "solve so many seed problems to write the first bank; Alg. 2, Tab. 12"
    )
    cold_start_temperature: float = setting(
        1.0, "sampling temperature of the seed solutions; S21", least=0
    )
    cold_start_top_p: float = setting(0.95, "top-p of the seed solutions; S21", most=1)
    cold_start_top_k: int = setting(0, "top-k of the seed solutions; 0 turns it off; S21", least=0)
    cold_start_tokens: int = setting(38912, "longest seed solution, in tokens; S21")
    cold_start_thinking: bool = setting(True, "solve the seed problems in thinking mode; S21")
    allow_empty_bank: bool = setting(False, "train though no pair, so no teacher, was found; S8")
    update_every: int = setting(25, "F: evolve the bank every F steps; 0 disables; Alg. 4", least=0)
    success_gate: float = setting(
        0.8, "gamma: leave the bank as it is where the success is this high; Alg. 4", least=0
    )
    max_new_items: int = setting(
        5, "N: most new entries each time that the bank evolves; Alg. 4", least=0
    )
    dynamic_capacity: int = setting(30, "C: most dynamic entries in each list; Alg. 4, Tab. 12")
    merge_group_size: int = setting(32, "H: merge so many items at a time; Alg. 3", least=2)
    merge_patience: int = setting(3, "P: stop after so many merge layers without progress; Alg. 3")
    reply_tokens: int = setting(4096, "longest reply to an extraction prompt, in tokens; D4")
    update_model: str = setting("", "another model to write the bank's entries; App. D.4")
    update_server: str = setting("", "server that has --update-model; several in quotes; S27")
    memory_answer: bool = setting(
        False, "show the reference answer to the model that writes entries; D3"
    )
    # the objective
    num_teachers: int = setting(8, "K: retrieved skill-mistake pairs, each a teacher; Tab. 12")
    teacher_prefix: str = setting(
        "bare",
        "think block of a teacher's prompt: left to the model, begun, or empty; S3",
        ("bare", "open", "closed"),
    )
    tau_g: float = setting(1.0, "width of the gate; Eq. 14, Tab. 12")
    c_delta: float = setting(3.0, "clip gaps to this for the support, in nats; Eq. 11, Tab. 12")
    eps_a: float = setting(
        0.05, "ignore teachers of a smaller support, in nats; Eq. 13, Tab. 12", least=0
    )
    mask_extra: bool = setting(False, "also mask tokens of white space, markdown and tool tags; S2")
    # the student's sampling
    temperature: float = setting(1.1, "sampling temperature of the student; Tab. 11", least=0)
    top_p: float = setting(0.95, "top-p of the student; Tab. 11", most=1)
    top_k: int = setting(20, "top-k of the student; 0 turns it off; Tab. 11", least=0)
    max_new_tokens: int = setting(1024, "longest solution, in tokens; Tab. 11")
    # the optimizer
    learning_rate: float = setting(
        5e-6, "learning rate of AdamW, falling linearly to 0; App. F.1, S7"
    )
    grad_clip: float = setting(0.1, "clip the gradient to this norm; S7")
    # looking inside, and what bounds memory without changing a result
    audit_every: int = setting(
        25, "record every token's gaps every so many steps; 0 disables", least=0
    )
    score_tokens: int = setting(16384, "most tokens in one padded forward pass of the teachers")
    rollout_rows: int = setting(
        0, "solutions decoded at a time by each process; 0: all, and 16 for the bank", least=0
    )
    verify_timeout: float = setting(
        5.0, "seconds that the verifier may take for an answer", most=1e6
    )
    verify_workers: int = setting(1, "verifier processes beside each process")
    wandb: bool = setting(False, "also send the metrics to Weights & Biases")
    tensorboard: bool = setting(False, "also write the metrics to RUN/tensorboard")

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

    server: str = setting("", "server that samples --model; several in quotes; S27")


def missing_path(name: str) -> bool:
    """Whether a name is a path at which nothing is; any other name may be a hub id.

    ORG/NAME is taken for a path where there is a directory ORG here, unless the hub's cache has it.
    """
    path = pathlib.Path(name)
    if path.exists():
        return False
    if name.startswith((".", "/", "~", "runs/")) or name.count("/") > 1 or name.endswith("/"):
        return True
    if not name.count("/") or not path.parent.is_dir():
        return False
    from huggingface_hub import try_to_load_from_cache  # only such a name needs it

    return not isinstance(try_to_load_from_cache(name, "config.json"), str)


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
    title, *body = (about or "").split("\n")
    commands = [line for line in body if line.startswith(("    python ", "    torchrun "))]
    parser = cli.Parser(
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
    again = "continue a run from its last checkpoint; skills.py goes on by the same command"
    parser.add_argument("--resume", metavar="RUN", help=again)
    group = parser.add_argument_group()
    for f in fields(kind):
        if f.name in GROUPS:
            group = parser.add_argument_group(GROUPS[f.name])
        text = f"{f.metadata['source']} (default: {f.default})".replace("%", "%%")
        options: dict[str, Any] = {"type": type(f.default)}
        if f.metadata["choices"]:
            options["choices"] = f.metadata["choices"]
        else:
            options["metavar"] = type(f.default).__name__
        if isinstance(f.default, bool):
            options = {"action": argparse.BooleanOptionalAction}
        group.add_argument(flag(f.name), help=text, **options)
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
        why = f"no readable config.json of a run there ({cli.brief(e)})"
        why += f", {files.listed(path)}"
        raise UserError(f"{run}: {why}; give a run such as runs/sgsd") from None


def _restarted(cfg: Config) -> bool:
    """Whether `torchrun --max-restarts` starts the command of an existing run once more."""
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    with contextlib.suppress(UserError):
        return again and saved(cfg.out) == asdict(cfg)
    return False


def _resumed(run: str, given: dict[str, Any], kind: type[Config]) -> Config:
    kept = {"bank": "bank (D9)", "out": "directory", "method": "method"}
    kept |= {"preset": "settings", "print_config": "settings"}
    for name, what in kept.items():
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
        raise UserError(f"--resume {run}: {what} ({cli.brief(e)})") from None
