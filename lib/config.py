"""Settings: frozen dataclasses, from which lib/command.py makes the flags.

All that there is to know about a setting stands at its field. If the paper or a decision (S...,
D...) settles a field, the field's help names that source.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, get_origin, get_type_hints


def flag(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def flags_that_differ(values: dict[str, Any], others: dict[str, Any]) -> list[str]:
    """The flags of the values that differ from `others`. We skip a name that `others` lacks."""
    return [f"{flag(name)}={x}" for name, x in values.items() if others.get(name, x) != x]


@dataclass(frozen=True)
class Rule:
    """Everything about a setting except its default, which a subclass may change."""

    help: str  # what the setting does, and its source
    group: str = "the method"  # the group of --help
    choices: tuple[str, ...] = ()
    least: float | None = None  # None: a number must be > 0
    most: float = math.inf
    free: bool = False  # a run that continues may change it; eval.py's digests leave it out
    brings: Mapping[str, Any] = field(default_factory=dict)  # defaults of others, if this is given
    metavar: str = ""  # what --help calls a value; "": by the type
    value_type: Any = None  # the field's: bool, int, float, str or tuple

    def check(self, name: str, value: Any) -> None:
        """ValueError for a value outside the choices or the range."""
        lower = "> 0" if self.least is None else f">= {self.least:,.15g}"
        upper = "finite" if self.most == math.inf else f"<= {self.most:,.15g}"
        allowed = f"one of {', '.join(self.choices)}" if self.choices else f"{lower} and {upper}"
        is_allowed = not self.choices or value in self.choices
        if self.value_type in (int, float):
            is_enough = value > 0 if self.least is None else value >= self.least
            is_allowed = is_enough and value <= self.most and value < math.inf
        if not is_allowed:
            raise ValueError(f"{flag(name)} {value}: must be {allowed} ({self.help})")


def setting(default: Any, help: str, group: str = "the method", **rule: Any) -> Any:
    """A setting: its default, and its `Rule`. A subclass may change the default alone.

    free, of a run: the setting may change when the run continues, and config.json records that. But
    for rounding, no number depends on such a setting, with three exceptions. The learning rate
    depends on --steps. Settings such as --answer-field decide which problems are read: we compare
    the problems. --server decides who samples the first bank: `lib.run.memories_so_far` compares.
    free, of eval.py: no sample's digest has the setting itself. Either no sample depends on it, or
    the digest has what it leads to, such as the prompt.
    brings: defaults that other settings get if a flag sets this one. A flag or a preset for those
    settings overrides these defaults. If two settings bring the same default, the later one in
    `rules()` wins.
    """
    return field(default=default, metadata={"rule": Rule(help, group, **rule)})


@dataclass(frozen=True)
class Common:
    """The settings that training and evaluation share."""

    # Settings, or whole groups of --help, that the method ignores: they get no flag.
    without: ClassVar[frozenset[str]] = frozenset()

    device: str = setting(
        "auto",
        "auto takes CUDA where there is a GPU",
        "the model",
        choices=("auto", "cpu", "cuda"),
        free=True,
    )
    dtype: str = setting(
        "auto",
        "weights of the base; auto is bf16 on CUDA; App. F.1",
        "the model",
        choices=("auto", "float32", "bfloat16"),
    )
    attn: str = setting(
        "sdpa",
        "attention kernels; S25",
        "the model",
        choices=("sdpa", "flash_attention_2", "eager"),
    )
    problem_field: str = setting(
        "problem", "column or field that holds the problem", "the problems", free=True
    )
    answer_field: str = setting(
        "answer", "column or field that holds the reference answer", "the problems", free=True
    )
    answer_after: str = setting(
        "", 'the answer is what follows this mark, as "####" in GSM8K', "the problems", free=True
    )
    verifier: str = setting(
        "lib.verify:Verifier",
        "verifier, as MODULE:CLASS, a subclass of lib.verify.Judge; docs/changing.md",
        "the problems",
    )
    verify_timeout: float = setting(
        5.0, "seconds that the verifier may take for an answer", "the problems", most=1e6
    )

    def __post_init__(self) -> None:
        """ValueError for a value outside its setting's choices or range."""
        for name, rule in self.rules().items():
            rule.check(name, getattr(self, name))

    @classmethod
    def rules(cls) -> dict[str, Rule]:
        """The rule of each setting that has an effect in this class, in the order of --help.

        A subclass that changes the default alone keeps the rule. TypeError for a name that is no
        setting, and for a default that would have no effect.
        """
        rules: dict[str, Rule] = {}
        for base in filter(is_dataclass, reversed(cls.__mro__)):
            types = {name: get_origin(hint) or hint for name, hint in get_type_hints(base).items()}
            rules |= {
                f.name: replace(f.metadata["rule"], value_type=types[f.name])
                for f in fields(base)
                if f.metadata  # a bare default has none: the parent's rule stays
            }
        for f in fields(cls):
            if f.name not in rules:
                fix = "mend the name, or write setting(...) behind it"
                raise TypeError(f"{cls.__name__}.{f.name}: no setting; {fix}")
            # `seed = 1` in a subclass, without a type or @dataclass, leaves the field as it was.
            if getattr(cls, f.name) != f.default:
                fix = "write its type behind the name, and @dataclass(frozen=True) above the class"
                raise TypeError(f"{cls.__name__}.{f.name}: dataclasses ignore this default; {fix}")
        return {  # a program's own settings, then those of `Common`
            name: rules[name]
            for name in sorted(rules, key=lambda name: hasattr(Common, name))
            if not {name, rules[name].group} & cls.without
        }


@dataclass(frozen=True)
class Config(Common):
    """SGSD's settings."""

    program: ClassVar[str] = "sgsd.py"
    makes_bank: ClassVar[bool] = True  # whether a run without --bank first writes a bank

    out: str = setting(
        "runs/sgsd", "directory of the run; the same command continues it", "the run", free=True
    )
    seed: int = setting(
        0, "seed of the data order, the adapters and the sampling", "the run", least=0, most=2**40
    )
    steps: int = setting(
        200,
        "number of optimizer steps; 0 makes the bank alone; §4.1",
        "the run",
        least=0,
        free=True,
    )
    checkpoint_every: int = setting(
        25, "save a checkpoint every N steps; §4.1", "the run", free=True
    )
    model: str = setting(
        "Qwen/Qwen3-1.7B", "policy to train: a hub id or a directory; §4.1", "the model"
    )
    adapter: str = setting(
        "",
        "begin with the weights of this checkpoint of --model, at its rank and alpha",
        "the model",
    )
    lora_rank: int = setting(64, "rank of the adapters; App. F.1", "the model")
    lora_alpha: int = setting(128, "LoRA alpha, the scale of the adapters; App. F.1", "the model")
    data: str = setting(
        "BytedTsinghua-SIA/DAPO-Math-17k",
        "training problems: HUB_ID[:CONFIGURATION], directory, parquet, JSONL; App. F.1, D8",
        "the problems",
    )
    split: str = setting(
        "train", "split of --data, if that is a hub data set or a directory", "the problems"
    )
    batch_size: int = setting(
        32, "problems in a step, over all processes together; S6", "the problems"
    )
    max_prompt_tokens: int = setting(
        20000,
        "leave out problems whose prompt has more tokens; none is cut; Tab. 11, S35",
        "the problems",
    )
    bank: str = setting(
        "", "skill bank (JSON); without one the model writes its own first; Alg. 2", "the bank"
    )
    encoder: str = setting(
        "Qwen/Qwen3-Embedding-0.6B",
        "sentence-transformers model that embeds problems and skills; Tab. 12",
        "the bank",
    )
    num_teachers: int = setting(
        8, "K: retrieved skill-mistake pairs, each a teacher; Tab. 12", "the bank"
    )
    evolve_every: int = setting(
        25, "F: evolve the bank every F steps; 0 disables; Alg. 4", "the bank", least=0
    )
    success_gate: float = setting(
        0.8,
        "gamma: leave the bank as it is where the success is this high; Alg. 4",
        "the bank",
        least=0,
    )
    max_new_items: int = setting(
        5, "N: most new entries each time that the bank evolves; Alg. 4", "the bank", least=0
    )
    dynamic_capacity: int = setting(
        30, "C: most dynamic entries in each list; Alg. 4, Tab. 12", "the bank"
    )
    merge_group_size: int = setting(
        32,
        "H: number of items merged at a time; the paper's prompts say 32 whatever it is; Alg. 3",
        "the bank",
        least=2,
    )
    merge_patience: int = setting(
        3, "P: stop merging after this many layers without progress; Alg. 3", "the bank"
    )
    reply_tokens: int = setting(
        4096,
        "longest reply of the bank's writer, in tokens; a merge may repeat its prompt; D4",
        "the bank",
    )
    memory_answer: bool = setting(
        False, "show the reference answer to the model that writes entries; D3", "the bank"
    )
    cold_start: int = setting(
        256,
        "number of seed problems solved to build the first bank; Alg. 2, Tab. 12",
        "the first bank",
    )
    cold_start_temperature: float = setting(
        1.0,
        "sampling temperature of the seed solutions, at top-p 0.95; S21",
        "the first bank",
        least=0,
    )
    cold_start_tokens: int = setting(
        38912, "longest seed solution, in tokens; S21", "the first bank"
    )
    cold_start_thinking: bool = setting(
        True, "solve the seed problems in thinking mode; S21", "the first bank"
    )
    server: tuple[str, ...] = setting(
        (),
        "sample the first bank, and nothing else, on inference servers of the base, such as "
        "http://localhost:8000/v1; rank i asks the i-th; S27",
        "the first bank",
        free=True,
        metavar="URL",
    )
    teacher_prefix: str = setting(
        "bare",
        "think block of teachers: bare (left to the model), open (begun) or closed (empty); S3",
        "the teachers",
        choices=("bare", "open", "closed"),
    )
    c_delta: float = setting(
        3.0,
        "bound to which gaps are clipped for the support, in nats; Eq. 11, Tab. 12",
        "the teachers",
    )
    score_tokens: int = setting(
        16384, "most tokens in one padded forward pass of the teachers", "the teachers", free=True
    )
    tau_g: float = setting(1.0, "width of the gate; Eq. 14, Tab. 12", "the objective")
    eps_a: float = setting(
        0.05,
        "threshold: ignore teachers with a smaller support, in nats; Eq. 13, Tab. 12",
        "the objective",
        least=0,
    )
    student_prefix: str = setting(
        "closed",
        "think block of the student: closed (empty), bare (left to the model) or open (begun); S3",
        "the sampling",
        choices=("closed", "bare", "open"),
    )
    temperature: float = setting(
        1.1, "sampling temperature of the student; Tab. 11", "the sampling", least=0
    )
    top_p: float = setting(0.95, "top-p of the student; Tab. 11", "the sampling", most=1)
    top_k: int = setting(
        20, "top-k of the student; 0 turns it off; Tab. 11", "the sampling", least=0
    )
    max_new_tokens: int = setting(
        1024,
        "longest solution, in tokens; a student that thinks needs some 16000; Tab. 11",
        "the sampling",
    )
    learning_rate: float = setting(
        5e-6, "learning rate of AdamW, falling linearly to 0; App. F.1, S7", "the optimizer"
    )
    grad_clip: float = setting(0.1, "clip the gradient to this norm; S7", "the optimizer")
    audit_every: int = setting(
        25,
        "record all gaps in step 1 and every N steps; 0: never",
        "looking inside, and memory",
        least=0,
        free=True,
    )
    checkpoint_above: int = setting(
        2048,
        "recompute activations in the backward pass of rollouts above N tokens, prompt included",
        "looking inside, and memory",
        least=0,
        free=True,
    )
    rollout_rows: int = setting(
        0,
        "most solutions decoded at a time by each process; 0: all, and 64 for the bank",
        "looking inside, and memory",
        least=0,
        free=True,
    )
    report_to: str = setting(
        "none",
        "also send the metrics to this tracker",
        "looking inside, and memory",
        choices=("none", "wandb"),
        free=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.steps or self.makes_bank):
            raise ValueError("--steps 0 makes a bank alone: this program makes none, sgsd.py does")

    @property
    def uses_skill_bank(self) -> bool:
        """Whether there is a bank: that of --bank, or one that the method makes first."""
        return bool(self.bank) or self.makes_bank

    @property
    def evolves(self) -> bool:
        """Whether there is a bank that evolves."""
        return self.uses_skill_bank and self.evolve_every > 0

    @property
    def has_polarity(self) -> bool:
        """Whether --eps-a decides which teachers count. A method without it has its own rule."""
        return "eps_a" in self.rules()

    @property
    def masks_tokens(self) -> bool:
        """Whether the loss leaves formatting tokens out (S2). Only methods with polarity do."""
        return self.has_polarity


@dataclass(frozen=True)
class EvalConfig(Common):
    """The settings of an evaluation.

    Digests of samples depend on the order of the fields that are not free.
    """

    program: ClassVar[str] = "eval.py"

    paths: tuple[str, ...] = setting(
        (),
        "model, adapter, run (its checkpoints) or hub id",
        "what is evaluated",
        free=True,
        metavar="PATH",
    )
    skills: str = setting(
        "",
        "evaluate Base+Skill: prompts with entries of this bank (JSON); §4.1, S14",
        "what is evaluated",
    )
    num_skills: int = setting(
        8, "pairs in a prompt of Base+Skill; Tab. 12", "what is evaluated", free=True
    )
    out: str = setting(
        "", "folder of all results, instead of eval/ in the run or else here", "the run", free=True
    )
    model: str = setting(
        "", "an adapter's base, if not the one that the adapter names", "the model", free=True
    )
    data: tuple[str, ...] = setting(
        ("aime24", "aime25", "hmmt25"),
        "aime24, aime25, hmmt25, aime26, math500, amc23, gsm8k, files or hub ids; the stem of a "
        "path is the set's name",
        "the problems",
        free=True,
    )
    split: str = setting(
        "test",
        "split of a directory, or of a hub data set that has no name here",
        "the problems",
        free=True,
    )
    limit: int = setting(
        0, "only the first N problems of each set; 0 is all", "the problems", least=0, free=True
    )
    encoder: str = setting(Config.encoder, "encoder of --skills; Tab. 12", "the bank", free=True)
    samples: int = setting(
        12, "k, the samples per problem; App. F.1", "the sampling", most=1e6, free=True
    )
    temperature: float = setting(1.0, "sampling temperature; App. F.1", "the sampling", least=0)
    top_p: float = setting(0.95, "top-p of the sampling; App. F.1", "the sampling", most=1)
    top_k: int = setting(
        0, "top-k of the sampling; 0 turns it off; App. F.1", "the sampling", least=0
    )
    max_new_tokens: int = setting(38912, "longest sample, in tokens; App. F.1", "the sampling")
    thinking: bool = setting(True, "thinking mode; S3", "the sampling")
    seed: int = setting(0, "seed of the samples", "the run", least=0, most=2**40)
    verifier: str = setting(
        "",
        "verifier, as MODULE:CLASS; if not given, the run's, as are the fields, or mathematics",
        "the problems",
    )
    problem_field: str = ""  # "": as the run trained, or else training's default
    answer_field: str = ""
    answer_after: str = ""  # "": the run's, unless --answer-field differs from the run's
    rows: int = setting(
        64,
        "most samples decoded, or asked of a server, at a time",
        "the sampling",
        most=1e6,
        free=True,
    )
    server: tuple[str, ...] = setting(
        (),
        "sample on inference servers, such as http://localhost:8000/v1; S27",
        "the sampling",
        free=True,
        metavar="URL",
    )


TINY = os.path.relpath(os.path.realpath(f"{os.path.dirname(__file__)}/../tiny"))
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
        "evolve_every": 10,  # after step 10; later the success is above the gate
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


def presets_of(config_class: type[Config]) -> dict[str, dict[str, Any]]:
    """PRESETS for a class of settings. A method that has its own --out keeps it."""
    own = {"out": config_class.out} if config_class.out != Config.out else {}
    return {name: {**preset, **own} for name, preset in PRESETS.items()}
