"""Settings: frozen dataclasses, the flags that are made from them, and a mistake as one line.

A field that the paper or a decision (S..., D...) settles names it.
"""

import argparse
import contextlib
import difflib
import math
import os
import pathlib
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, NoReturn, TypeVar

VERSION = "0.1.0"  # of the project: --version prints it, config.json keeps it
Settings = TypeVar("Settings", bound="EvalConfig | Config")


def setting(
    default: Any,
    help: str,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    again: str = "refused",
    is_path: bool = False,
) -> Any:
    """A setting: its default, its help with its source, its range (> 0 without a `least`).

    again: what becomes of another value when the command continues its run: "refused"; "quiet",
    where it changes nothing but rounding; "announced", in a line that the run keeps.
    is_path: a path, if there is one of that name; two runs compare it resolved.
    """
    rule = {"help": help, "choices": choices, "least": least, "most": most}
    return field(default=default, metadata=rule | {"again": again, "is_path": is_path})


def with_default(kind: Any, name: str, default: Any) -> Any:
    """Another program's setting with a default of its own."""
    (metadata,) = [f.metadata for f in fields(kind) if f.name == name]
    return field(default=default, metadata=metadata)


def check(settings: Any) -> None:
    """ValueError for a value outside its setting's choices or range."""
    for f in fields(settings):
        value, rule, wrong = getattr(settings, f.name), f.metadata, ""
        number = type(f.default) in (int, float)
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
            raise ValueError(f"{flag(f.name)} {value}: {wrong} ({rule['help']})")


DEVICES = "auto", "cpu", "cuda"
DTYPES = "auto", "float32", "bfloat16"
KERNELS = "sdpa", "flash_attention_2", "eager"
SETS = ("aime24", "aime25", "hmmt25")


@dataclass(frozen=True)
class Config:
    """SGSD's settings. The flags are made from the fields."""

    program: ClassVar[str] = "sgsd.py"

    # the run
    out: str = setting("runs/sgsd", "directory of the run; the same command continues it")
    seed: int = setting(
        0, "seed of the data order, the adapters and the sampling", least=0, most=2**40
    )
    steps: int = setting(
        200, "number of optimizer steps; 0 makes the bank alone; §4.1", least=0, again="announced"
    )
    checkpoint_every: int = setting(25, "save a checkpoint every N steps; §4.1", again="quiet")
    device: str = setting("auto", "auto takes CUDA where there is a GPU", DEVICES, again="quiet")
    changed_code: bool = setting(
        False, "continue the run although the code has changed since it began", again="quiet"
    )
    # the model
    model: str = setting(
        "Qwen/Qwen3-1.7B", "policy to train: a hub id or a directory; §4.1", is_path=True
    )
    dtype: str = setting("auto", "weights of the base; auto is bf16 on CUDA; App. F.1", DTYPES)
    attn: str = setting("sdpa", "attention kernels; S25", KERNELS)
    lora_rank: int = setting(64, "rank of the adapters; App. F.1")
    lora_alpha: int = setting(128, "LoRA alpha, the scale of the adapters; App. F.1")
    # the data
    data: str = setting(
        "BytedTsinghua-SIA/DAPO-Math-17k",
        "training problems: HUB_ID[:CONFIGURATION], directory, parquet, JSONL; App. F.1, D8",
        is_path=True,
    )
    split: str = setting("train", "split of --data, if that is a hub data set or a directory")
    problem_field: str = setting("problem", "column or field that holds the problem")
    answer_field: str = setting("answer", "column or field that holds the reference answer")
    answer_after: str = setting("", 'the answer is what follows this mark, as "####" in GSM8K')
    batch_size: int = setting(32, "problems in a step, over all processes together; S6")
    max_prompt_tokens: int = setting(20000, "refuse a longer prompt, and never cut one; Tab. 11")
    verifier: str = setting(
        "lib.verify:Verifier",
        "who says right or wrong, as MODULE:CLASS, a subclass of lib.verify.Judge; "
        "docs/changing.md",
    )
    verify_timeout: float = setting(
        5.0, "seconds that the verifier may take for an answer", most=1e6
    )
    # the bank
    bank: str = setting(
        "", "skill bank (JSON); without one the model writes its own first; Alg. 2", is_path=True
    )
    encoder: str = setting(
        "Qwen/Qwen3-Embedding-0.6B",
        "sentence-transformers model that embeds problems and skills; Tab. 12",
        is_path=True,
    )
    cold_start: int = setting(
        256, "number of seed problems solved to build the first bank; Alg. 2, Tab. 12"
    )
    cold_start_temperature: float = setting(
        1.0, "sampling temperature of the seed solutions, at top-p 0.95; S21", least=0
    )
    cold_start_tokens: int = setting(38912, "longest seed solution, in tokens; S21")
    cold_start_thinking: bool = setting(True, "solve the seed problems in thinking mode; S21")
    evolve_every: int = setting(25, "F: evolve the bank every F steps; 0 disables; Alg. 4", least=0)
    success_gate: float = setting(
        0.8, "gamma: leave the bank as it is where the success is this high; Alg. 4", least=0
    )
    max_new_items: int = setting(
        5, "N: most new entries each time that the bank evolves; Alg. 4", least=0
    )
    dynamic_capacity: int = setting(30, "C: most dynamic entries in each list; Alg. 4, Tab. 12")
    merge_group_size: int = setting(32, "H: merge so many items at a time; Alg. 3", least=2)
    merge_patience: int = setting(3, "P: stop after so many merge layers without progress; Alg. 3")
    reply_tokens: int = setting(
        4096, "longest reply of the bank's writer, in tokens; a merge may repeat its prompt; D4"
    )
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
    # the student's sampling
    student_prefix: str = setting(
        "closed",
        "think block of the student's prompt: empty, left to the model, or begun; S3",
        ("closed", "bare", "open"),
    )
    temperature: float = setting(1.1, "sampling temperature of the student; Tab. 11", least=0)
    top_p: float = setting(0.95, "top-p of the student; Tab. 11", most=1)
    top_k: int = setting(20, "top-k of the student; 0 turns it off; Tab. 11", least=0)
    max_new_tokens: int = setting(1024, "longest solution, in tokens; Tab. 11")
    server: tuple[str, ...] = setting(
        (),
        "sample on inference servers of the base, such as http://localhost:8000/v1; rank i asks "
        "the i-th; S27",
        again="announced",
    )
    # the optimizer
    learning_rate: float = setting(
        5e-6, "learning rate of AdamW, falling linearly to 0; App. F.1, S7"
    )
    grad_clip: float = setting(0.1, "clip the gradient to this norm; S7")
    # looking inside, and memory
    audit_every: int = setting(
        25,
        "record all gaps in step 1 and every N steps; 0: never",
        least=0,
        again="quiet",
    )
    score_tokens: int = setting(
        16384, "most tokens in one padded forward pass of the teachers", again="quiet"
    )
    checkpoint_above: int = setting(
        2048,
        "recompute activations in the backward pass of rollouts above N tokens, prompt included",
        least=0,
        again="quiet",
    )
    rollout_rows: int = setting(
        0,
        "solutions decoded at a time by each process; 0: all, and 16 for the bank or on a server",
        least=0,
        again="quiet",
    )
    report_to: str = setting(
        "none",
        "also send the metrics to this tracker; tensorboard writes to RUN/tensorboard",
        ("none", "wandb", "trackio", "tensorboard"),
        again="quiet",
    )

    def __post_init__(self) -> None:
        check(self)

    @property
    def uses_skill_bank(self) -> bool:
        return True

    @property
    def bank_rows(self) -> int:
        """Seed solutions and replies of the bank's writer that are decoded at a time."""
        return self.rollout_rows or 16

    @property
    def merging(self) -> dict[str, int]:
        """Algorithm 3's settings."""
        return {"group_size": self.merge_group_size, "patience": self.merge_patience}

    @property
    def evolution(self) -> dict[str, Any]:
        """Algorithm 4's settings."""
        return {
            "evolve_every": self.evolve_every,
            "success_gate": self.success_gate,
            "max_new_items": self.max_new_items,
            "dynamic_capacity": self.dynamic_capacity,
            "memory_answer": self.memory_answer,
            **self.merging,
        }


@dataclass(frozen=True)
class EvalConfig:
    """The settings of an evaluation."""

    program: ClassVar[str] = "eval.py"

    # what is evaluated
    paths: tuple[str, ...] = setting((), "model, adapter, run (its checkpoints) or hub id")
    model: str = setting("", "an adapter's base, if not the one that the adapter names")
    out: str = setting("", "folder of all results, instead of eval/ in the run or else here")
    skills: str = setting(
        "",
        "evaluate Base+Skill: prompts with entries of this bank (JSON); §4.1, S14",
    )
    num_skills: int = setting(8, "pairs in a prompt of Base+Skill; Tab. 12")
    encoder: str = setting(Config.encoder, "encoder of --skills; Tab. 12")
    # the problems
    data: tuple[str, ...] = setting(
        SETS,
        "aime24, aime25, hmmt25, math500, amc23, gsm8k, files or hub ids; the stem of a path is "
        "the set's name",
    )
    split: str = setting("test", "split of a hub data set or a directory")
    problem_field: str = setting("problem", "column or field that holds the problem")
    answer_field: str = setting("answer", "column or field that holds the reference answer")
    answer_after: str = setting("", 'the answer is what follows this mark, as "####" in GSM8K')
    limit: int = setting(0, "only the first N problems of each set; 0 is all", least=0)
    verifier: str = setting(
        Config.verifier, "who says right or wrong, as MODULE:CLASS; docs/changing.md"
    )
    verify_timeout: float = setting(
        5.0, "seconds that the verifier may take for an answer", most=1e6
    )
    # the samples
    samples: int = setting(12, "k, the samples per problem; App. F.1", most=1e6)
    temperature: float = setting(1.0, "sampling temperature; App. F.1", least=0)
    top_p: float = setting(0.95, "top-p of the sampling; App. F.1", most=1)
    top_k: int = setting(0, "top-k of the sampling; 0 turns it off; App. F.1", least=0)
    max_new_tokens: int = setting(38912, "longest sample, in tokens; App. F.1")
    thinking: bool = setting(True, "thinking mode; S3")
    seed: int = setting(0, "seed of the samples", least=0, most=2**40)
    rows: int = setting(16, "samples decoded at a time; lower it to save memory", most=1e6)
    server: tuple[str, ...] = setting(
        (), "sample on inference servers, such as http://localhost:8000/v1; S27"
    )
    device: str = setting("auto", "auto takes CUDA where there is a GPU", DEVICES)
    dtype: str = setting("auto", "of the weights; auto is bf16 on CUDA", DTYPES)
    attn: str = setting("sdpa", "attention kernels; S25", KERNELS)

    def __post_init__(self) -> None:
        check(self)
        names = [pathlib.Path(source).stem for source in self.data]
        if len({*names}) < len(names):
            rule = "two sets have one name; rename a file"
            raise ValueError(f"--data {' '.join(self.data)}: {rule}")


GROUPS = {  # in training's --help, by the first setting of each
    "out": "the run",
    "model": "the model",
    "data": "the problems",
    "bank": "the bank",
    "num_teachers": "the objective",
    "student_prefix": "the student's sampling",
    "learning_rate": "the optimizer",
    "audit_every": "looking inside, and memory",
    "generations": "the method",
    "objective_clip": "the method",
    "token_mask": "the ablations",
}
EVAL_GROUPS = {"paths": "what is evaluated", "data": "the problems", "samples": "the samples"}
TINY = os.path.relpath(pathlib.Path(__file__).resolve().parent.parent / "tiny")
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "tiny": {  # docs/decisions.md says why each one differs from the paper's
        "model": f"{TINY}/model",
        "encoder": f"{TINY}/encoder",
        "data": f"{TINY}/train.jsonl",
        "out": "runs/tiny",
        "device": "cpu",
        "steps": 30,
        "batch_size": 16,
        "checkpoint_every": 10,
        "audit_every": 3,
        "cold_start": 64,
        "cold_start_temperature": 1.1,
        "cold_start_tokens": 96,
        "cold_start_thinking": False,
        "evolve_every": 10,
        "merge_group_size": 8,
        "reply_tokens": 640,
        "max_new_tokens": 96,
        "rollout_rows": 32,
        "num_teachers": 4,
        "eps_a": 0.005,
        "learning_rate": 1e-3,
        "lora_rank": 16,
        "lora_alpha": 32,
    },
}


# ------------------------------------------------------------------- mistakes and signals, one line


@contextlib.contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """Bad input or a missing package: printed as one line, exit code 2."""
    try:
        yield
    except (ValueError, OSError, ImportError) as e:
        fix = "; pip install -r requirements.txt" if isinstance(e, ImportError) else ""
        print(f"{name_of(program)}: {' '.join(str(e).split())}{fix}", file=sys.stderr)
        raise SystemExit(2) from None


def end_at_signals() -> None:
    """From here on Ctrl-C and SIGTERM end the process at once, with exit code 130."""

    def end(*_: object) -> None:
        if is_first_rank():
            os.write(2, b"\nInterrupted. Run the same command to continue.\n")  # print may be busy
        os._exit(130)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def is_first_rank() -> bool:
    """Whether torchrun started this process as rank 0, or did not start it."""
    return os.environ.get("RANK", "0") == "0"


class Parser(argparse.ArgumentParser):
    """Flags that are never abbreviated, @FILE for more of them, --version, mistakes in one line.

    about: a docstring; its first line and its commands stand in --help. The lines of FILE are
    split as a shell splits them, and # begins a comment.
    """

    def __init__(self, program: str, usage: str, about: str | None, **settings: Any):
        title, *body = (about or "").split("\n")
        commands = [line for line in body if line.startswith(("    python ", "    torchrun "))]
        tags = "Tags such as S3 and D8 are rows of docs/decisions.md."
        super().__init__(
            f"python {program}",
            usage=f"python {program} {usage}",
            description=title,
            epilog="\n".join([tags, "\nexamples:", *commands]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            fromfile_prefix_chars="@",
            **{"allow_abbrev": False, **settings},
        )
        self.add_argument("--version", action="version", version=f"sgsd {VERSION}")

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        return shlex.split(arg_line, comments=True)

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and one line, which suggests the closest flag to each unknown one."""
        hint = ""
        for wrong in re.findall(r"--[\w-]+", message.partition("unrecognized arguments: ")[2]):
            for close in difflib.get_close_matches(wrong, [*self._option_string_actions], 1, 0.75):
                hint += f"did you mean {close}? "
            if wrong == "--method":
                hint += "other methods are programs: python -m methods.grpo, opsd or ablations; "
        line = f"{name_of(self.prog)}: {' '.join(message.split())}; {hint}--help lists the flags\n"
        self.exit(2, line if is_first_rank() else None)


def name_of(program: str) -> str:
    """The name in front of an error: "sgsd" of "python sgsd.py"."""
    return program.removesuffix(".py").replace(".", " ").split()[-1]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


# ------------------------------------------------------------------------------ the command line


def parse(
    argv: Sequence[str] | None,
    about: str | None,
    kind: type[Settings],
    variants: dict[str, dict[str, Any]] | None = None,
) -> Settings:
    """The settings of a command line; a mistake exits with code 2.

    about: a program's docstring, for --help. variants: other defaults where a setting is given. A
    flag overrides the preset, and that overrides those.
    """
    is_training = issubclass(kind, Config)
    usage = "[--preset NAME] [--FLAG VALUE ...] [@FILE]"
    parser = Parser(
        kind.program,
        usage if is_training else "PATH [PATH ...] [--FLAG VALUE ...] [@FILE]",
        about,
        argument_default=argparse.SUPPRESS,
    )
    if is_training:
        parser.add_argument("--preset", choices=PRESETS, help="settings to start from")
    groups = GROUPS if is_training else EVAL_GROUPS
    group = parser.add_argument_group()
    for f in fields(kind):
        if f.name in groups:
            group = parser.add_argument_group(groups[f.name])
        if f.name == "paths":
            group.add_argument("paths", nargs="+", metavar="PATH", help=f.metadata["help"])
        else:
            group.add_argument(flag(f.name), **options_of(f))
    given = vars(parser.parse_args(argv))
    preset = PRESETS[given.pop("preset", "paper")] if is_training else {}
    start: dict[str, Any] = {}
    for name, defaults in (variants or {}).items():
        start |= defaults if given.get(name) else {}
    try:
        return from_dict(kind, {**start, **preset, **given})
    except ValueError as e:
        parser.error(str(e))


def options_of(f: Any) -> dict[str, Any]:
    """How argparse reads a setting's flag."""
    default = " ".join(f.default) if isinstance(f.default, tuple) else f.default
    text = f.metadata["help"].replace("%", "%%")
    text += "" if default == "" else f" (default: {default})"
    if isinstance(f.default, bool):
        return {"action": argparse.BooleanOptionalAction, "help": text}
    if isinstance(f.default, tuple):
        return {"nargs": "+", "metavar": "NAME" if f.default else "URL", "help": text}
    if f.metadata["choices"]:
        return {"choices": f.metadata["choices"], "help": text}
    metavar = {int: "N", float: "X", str: "NAME"}[type(f.default)]
    return {"type": type(f.default), "metavar": metavar, "help": text}


def from_dict(kind: type[Settings], values: dict[str, Any]) -> Settings:
    """Settings from their names and values, where argparse and JSON have lists for tuples."""
    tuples: dict[str, Any] = {k: tuple(v) for k, v in values.items() if isinstance(v, list)}
    return kind(**{**values, **tuples})


def comparable(settings: Config) -> dict[str, Any]:
    """The settings as JSON keeps them, local paths resolved: two runs can be compared by it."""
    values: dict[str, Any] = asdict(settings)
    for f in fields(settings):
        value = values[f.name]
        if isinstance(value, tuple):
            values[f.name] = list(value)
        if f.metadata["is_path"] and value and os.path.exists(value):
            values[f.name] = os.path.realpath(value)
    return values
