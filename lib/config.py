"""Settings: frozen dataclasses, from which lib/command.py makes the flags.

If the paper or a decision (S..., D...) settles a field, the field's help names that source.
"""

import math
import os
import pathlib
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Self

GROUPS = {  # the groups of --help, in order; a setting in none of them is the method's own
    "what is evaluated": "paths skills num_skills",
    "the run": "out seed steps checkpoint_every",
    "the model": "model adapter lora_rank lora_alpha device dtype attn",
    "the problems": "data split limit batch_size max_prompt_tokens problem_field answer_field"
    " answer_after verifier verify_timeout",
    "the bank": "bank encoder cold_start cold_start_temperature cold_start_tokens"
    " cold_start_thinking evolve_every success_gate max_new_items dynamic_capacity"
    " merge_group_size merge_patience reply_tokens memory_answer",
    "the objective": "num_teachers teacher_prefix tau_g c_delta eps_a",
    "the sampling": "student_prefix samples temperature top_p top_k max_new_tokens thinking rows"
    " server",
    "the optimizer": "learning_rate grad_clip",
    "looking inside, and memory": "audit_every score_tokens checkpoint_above rollout_rows"
    " report_to",
}

# Settings that have no effect in a method that makes no bank of its own.
OF_COLD_START = "cold_start cold_start_temperature cold_start_tokens cold_start_thinking server"
NO_COLD_START = frozenset(OF_COLD_START.split())


def flag(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Rule:
    """What a setting may be, in every class that has it."""

    help: str  # what the setting does, and its source
    value_type: type
    choices: tuple[str, ...]
    least: float | None  # None: a number must be > 0
    most: float

    def fault(self, value: Any) -> str:
        """What is wrong with a value; "" if nothing is."""
        if self.choices and value not in self.choices:
            return f"must be one of {', '.join(self.choices)}"
        if self.value_type in (int, float):
            is_enough = value > 0 if self.least is None else value >= self.least
            if not (is_enough and value <= self.most and value < math.inf):
                least = "> 0" if self.least is None else f">= {self.least:g}"
                most = "finite" if self.most == math.inf else f"<= {self.most:g}"
                return f"must be {least} and {most}"
        return ""


def setting(
    default: Any,
    help: str,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float = math.inf,
) -> Any:
    """A setting: its default, and its `Rule`. A subclass may write just another default."""
    rule = Rule(help, type(default), choices, least, most)
    return field(default=default, metadata={"rule": rule})


DEVICES = "auto", "cpu", "cuda"
DTYPES = "auto", "float32", "bfloat16"
KERNELS = "sdpa", "flash_attention_2", "eager"
SETS = "aime24", "aime25", "hmmt25"


@dataclass(frozen=True)
class Common:
    """The settings that training and evaluation share."""

    program: ClassVar[str]
    groups: ClassVar[dict[str, str]] = GROUPS
    not_offered: ClassVar[frozenset[str]] = frozenset()  # no effect here, and so no flag
    free: ClassVar[frozenset[str]] = frozenset()  # more settings that may change when a run goes on

    device: str = setting("auto", "auto takes CUDA where there is a GPU", DEVICES)
    dtype: str = setting("auto", "weights of the base; auto is bf16 on CUDA; App. F.1", DTYPES)
    attn: str = setting("sdpa", "attention kernels; S25", KERNELS)
    problem_field: str = setting("problem", "column or field that holds the problem")
    answer_field: str = setting("answer", "column or field that holds the reference answer")
    answer_after: str = setting("", 'the answer is what follows this mark, as "####" in GSM8K')
    verifier: str = setting(
        "lib.verify:Verifier",
        "verifier, as MODULE:CLASS, a subclass of lib.verify.Judge; docs/changing.md",
    )
    verify_timeout: float = setting(
        5.0, "seconds that the verifier may take for an answer", most=1e6
    )

    def __post_init__(self) -> None:
        """ValueError for a value outside its setting's choices or range."""
        for name, rule in self.rules().items():
            value = getattr(self, name)
            fault = rule.fault(value)
            if fault:
                raise ValueError(f"{flag(name)} {value}: {fault} ({rule.help})")

    @classmethod
    def rules(cls) -> dict[str, Rule]:
        """Each setting's rule. A subclass that writes just another default keeps the rule.

        TypeError for a default without an annotation: dataclasses would ignore it.
        """
        rules: dict[str, Rule] = {}
        for base in filter(is_dataclass, reversed(cls.__mro__)):
            rules |= {f.name: f.metadata["rule"] for f in fields(base) if f.metadata}
        for f in fields(cls):
            if getattr(cls, f.name) != f.default:
                fix = "write its type behind the name, and @dataclass(frozen=True) above the class"
                raise TypeError(f"{cls.__name__}.{f.name}: dataclasses ignore this default; {fix}")
        return rules

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Settings from names and values. The lists of argparse and JSON become tuples."""
        tuples: dict[str, Any] = {k: tuple(v) for k, v in values.items() if isinstance(v, list)}
        return cls(**{**values, **tuples})


@dataclass(frozen=True)
class Config(Common):
    """SGSD's settings. The flags are made from the fields."""

    program: ClassVar[str] = "sgsd.py"

    out: str = setting("runs/sgsd", "directory of the run; the same command continues it")
    seed: int = setting(
        0, "seed of the data order, the adapters and the sampling", least=0, most=2**40
    )
    steps: int = setting(200, "number of optimizer steps; 0 makes the bank alone; §4.1", least=0)
    checkpoint_every: int = setting(25, "save a checkpoint every N steps; §4.1")
    model: str = setting("Qwen/Qwen3-1.7B", "policy to train: a hub id or a directory; §4.1")
    adapter: str = setting(
        "", "begin with the weights of this checkpoint of --model; it brings its rank and alpha"
    )
    lora_rank: int = setting(64, "rank of the adapters; App. F.1")
    lora_alpha: int = setting(128, "LoRA alpha, the scale of the adapters; App. F.1")
    data: str = setting(
        "BytedTsinghua-SIA/DAPO-Math-17k",
        "training problems: HUB_ID[:CONFIGURATION], directory, parquet, JSONL; App. F.1, D8",
    )
    split: str = setting("train", "split of --data, if that is a hub data set or a directory")
    batch_size: int = setting(32, "problems in a step, over all processes together; S6")
    max_prompt_tokens: int = setting(
        20000, "longest prompt, in tokens; a longer one is refused, never cut; Tab. 11"
    )
    bank: str = setting("", "skill bank (JSON); without one the model writes its own first; Alg. 2")
    encoder: str = setting(
        "Qwen/Qwen3-Embedding-0.6B",
        "sentence-transformers model that embeds problems and skills; Tab. 12",
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
    merge_group_size: int = setting(32, "H: number of items merged at a time; Alg. 3", least=2)
    merge_patience: int = setting(
        3, "P: stop merging after this many layers without progress; Alg. 3"
    )
    reply_tokens: int = setting(
        4096, "longest reply of the bank's writer, in tokens; a merge may repeat its prompt; D4"
    )
    memory_answer: bool = setting(
        False, "show the reference answer to the model that writes entries; D3"
    )
    num_teachers: int = setting(8, "K: retrieved skill-mistake pairs, each a teacher; Tab. 12")
    teacher_prefix: str = setting(
        "bare",
        "think block of a teacher's prompt: left to the model, begun, or empty; S3",
        ("bare", "open", "closed"),
    )
    tau_g: float = setting(1.0, "width of the gate; Eq. 14, Tab. 12")
    c_delta: float = setting(
        3.0, "bound to which gaps are clipped for the support, in nats; Eq. 11, Tab. 12"
    )
    eps_a: float = setting(
        0.05, "threshold: ignore teachers with a smaller support, in nats; Eq. 13, Tab. 12", least=0
    )
    student_prefix: str = setting(
        "closed",
        "think block of the student's prompt: empty, left to the model, or begun; S3",
        ("closed", "bare", "open"),
    )
    temperature: float = setting(1.1, "sampling temperature of the student; Tab. 11", least=0)
    top_p: float = setting(0.95, "top-p of the student; Tab. 11", most=1)
    top_k: int = setting(20, "top-k of the student; 0 turns it off; Tab. 11", least=0)
    max_new_tokens: int = setting(
        1024, "longest solution, in tokens; a student that thinks needs some 16000; Tab. 11"
    )
    server: tuple[str, ...] = setting(
        (),
        "sample the first bank, and nothing else, on inference servers of the base, such as "
        "http://localhost:8000/v1; rank i asks the i-th; S27",
    )
    learning_rate: float = setting(
        5e-6, "learning rate of AdamW, falling linearly to 0; App. F.1, S7"
    )
    grad_clip: float = setting(0.1, "clip the gradient to this norm; S7")
    audit_every: int = setting(25, "record all gaps in step 1 and every N steps; 0: never", least=0)
    score_tokens: int = setting(16384, "most tokens in one padded forward pass of the teachers")
    checkpoint_above: int = setting(
        2048,
        "recompute activations in the backward pass of rollouts above N tokens, prompt included",
        least=0,
    )
    rollout_rows: int = setting(
        0, "most solutions decoded at a time by each process; 0: all, and 64 for the bank", least=0
    )
    report_to: str = setting(
        "none",
        "also send the metrics to this tracker; tensorboard writes to RUN/tensorboard",
        ("none", "wandb", "tensorboard"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.server and self.adapter:
            rule = "it samples the base, and --adapter begins with other weights"
            raise ValueError(f"--server {' '.join(self.server)}: {rule}; leave one of them out")

    @property
    def uses_skill_bank(self) -> bool:
        return True

    @property
    def evolves(self) -> bool:
        """Whether there is a bank that evolves."""
        return self.uses_skill_bank and self.evolve_every > 0

    @property
    def bank_rows(self) -> int:
        """Maximum number of seed solutions, or of the writer's replies, decoded at a time."""
        return self.rollout_rows or 64

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
class EvalConfig(Common):
    """The settings of an evaluation."""

    program: ClassVar[str] = "eval.py"

    paths: tuple[str, ...] = setting((), "model, adapter, run (its checkpoints) or hub id")
    model: str = setting("", "an adapter's base, if not the one that the adapter names")
    out: str = setting("", "folder of all results, instead of eval/ in the run or else here")
    skills: str = setting(
        "", "evaluate Base+Skill: prompts with entries of this bank (JSON); §4.1, S14"
    )
    num_skills: int = setting(8, "pairs in a prompt of Base+Skill; Tab. 12")
    encoder: str = setting(Config.encoder, "encoder of --skills; Tab. 12")
    data: tuple[str, ...] = setting(
        SETS,
        "aime24, aime25, hmmt25, math500, amc23, gsm8k, files or hub ids; the stem of a path is "
        "the set's name",
    )
    split: str = setting("test", "split of a hub data set that has no name here, or a directory")
    limit: int = setting(0, "only the first N problems of each set; 0 is all", least=0)
    samples: int = setting(12, "k, the samples per problem; App. F.1", most=1e6)
    temperature: float = setting(1.0, "sampling temperature; App. F.1", least=0)
    top_p: float = setting(0.95, "top-p of the sampling; App. F.1", most=1)
    top_k: int = setting(0, "top-k of the sampling; 0 turns it off; App. F.1", least=0)
    max_new_tokens: int = setting(38912, "longest sample, in tokens; App. F.1")
    thinking: bool = setting(True, "thinking mode; S3")
    seed: int = setting(0, "seed of the samples", least=0, most=2**40)
    rows: int = setting(64, "most samples decoded, or asked of a server, at a time", most=1e6)
    server: tuple[str, ...] = setting(
        (), "sample on inference servers, such as http://localhost:8000/v1; S27"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [pathlib.Path(source).stem for source in self.data]
        if len({*names}) < len(names):
            rule = "two sets have one name; rename a file"
            raise ValueError(f"--data {' '.join(self.data)}: {rule}")


TINY = os.path.relpath(pathlib.Path(__file__).resolve().parent.parent / "tiny")
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "tiny": {  # minutes instead of days
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
        "cold_start_temperature": 1.1,  # as in training: the model cannot think
        "cold_start_tokens": 96,
        "cold_start_thinking": False,
        "evolve_every": 10,  # after 20 steps the success gate closes
        "merge_group_size": 8,  # the model learnt to merge eight items
        "reply_tokens": 640,
        "max_new_tokens": 96,  # solutions have about 40 tokens
        "rollout_rows": 32,
        "num_teachers": 4,  # more pairs would be irrelevant
        "eps_a": 0.005,  # one token of 40 decides, so supports are small
        "learning_rate": 1e-3,  # best of three on validation problems
        "lora_rank": 16,  # the model has 0.7 million parameters
        "lora_alpha": 32,
    },
}


def presets_of(kind: type[Config]) -> dict[str, dict[str, Any]]:
    """PRESETS for a class of settings. A method that has its own --out keeps it."""
    own = {"out": kind.out} if kind.out != Config.out else {}
    return {name: {**preset, **own} for name, preset in PRESETS.items()}
