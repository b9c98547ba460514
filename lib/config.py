"""Settings: frozen dataclasses, from which lib/command.py makes the flags.

A field that the paper or a decision (S..., D...) settles names it.
"""

import math
import os
import pathlib
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar


def flag(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def setting(
    default: Any,
    help: str,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    on_continue: str = "refused",
    group: str = "",
    in_eval: bool = False,
) -> Any:
    """A setting: its default, its help with its source, its range (> 0 without a `least`).

    on_continue: what becomes of another value when the command continues its run. "refused".
    "contents": refused where the files of that name hold something else; their place may change.
    "announced", in a line that the run keeps. "quiet", where it changes nothing but rounding.
    group: the title in --help from this setting on. in_eval: the command that evaluates the run
    repeats it.
    """
    rule = {"help": help, "choices": choices, "least": least, "most": most, "group": group}
    return field(default=default, metadata=rule | {"on_continue": on_continue, "in_eval": in_eval})


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

    out: str = setting(
        "runs/sgsd",
        "directory of the run; the same command continues it",
        on_continue="quiet",
        group="the run",
    )
    seed: int = setting(
        0, "seed of the data order, the adapters and the sampling", least=0, most=2**40
    )
    steps: int = setting(
        200,
        "number of optimizer steps; 0 makes the bank alone; §4.1",
        least=0,
        on_continue="announced",
    )
    checkpoint_every: int = setting(
        25, "save a checkpoint every N steps; §4.1", on_continue="quiet"
    )
    device: str = setting(
        "auto", "auto takes CUDA where there is a GPU", DEVICES, on_continue="quiet", in_eval=True
    )
    model: str = setting(
        "Qwen/Qwen3-1.7B",
        "policy to train: a hub id or a directory; §4.1",
        on_continue="contents",
        group="the model",
    )
    adapter: str = setting(
        "",
        "begin with the weights of this checkpoint of --model, and with its rank and alpha",
        on_continue="contents",
    )
    dtype: str = setting(
        "auto", "weights of the base; auto is bf16 on CUDA; App. F.1", DTYPES, in_eval=True
    )
    attn: str = setting("sdpa", "attention kernels; S25", KERNELS)
    lora_rank: int = setting(64, "rank of the adapters; App. F.1")
    lora_alpha: int = setting(128, "LoRA alpha, the scale of the adapters; App. F.1")
    data: str = setting(
        "BytedTsinghua-SIA/DAPO-Math-17k",
        "training problems: HUB_ID[:CONFIGURATION], directory, parquet, JSONL; App. F.1, D8",
        on_continue="contents",
        group="the problems",
    )
    split: str = setting("train", "split of --data, if that is a hub data set or a directory")
    problem_field: str = setting("problem", "column or field that holds the problem", in_eval=True)
    answer_field: str = setting(
        "answer", "column or field that holds the reference answer", in_eval=True
    )
    answer_after: str = setting(
        "", 'the answer is what follows this mark, as "####" in GSM8K', in_eval=True
    )
    batch_size: int = setting(32, "problems in a step, over all processes together; S6")
    max_prompt_tokens: int = setting(
        20000,
        "longest prompt, in tokens; a longer one is refused, never cut; Tab. 11",
        on_continue="announced",
    )
    verifier: str = setting(
        "lib.verify:Verifier",
        "verifier, as MODULE:CLASS, a subclass of lib.verify.Judge; docs/changing.md",
        in_eval=True,
    )
    verify_timeout: float = setting(
        5.0, "seconds that the verifier may take for an answer", most=1e6
    )
    bank: str = setting(
        "",
        "skill bank (JSON); without one the model writes its own first; Alg. 2",
        on_continue="contents",
        group="the bank",
    )
    encoder: str = setting(
        "Qwen/Qwen3-Embedding-0.6B",
        "sentence-transformers model that embeds problems and skills; Tab. 12",
        on_continue="contents",
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
    num_teachers: int = setting(
        8, "K: retrieved skill-mistake pairs, each a teacher; Tab. 12", group="the objective"
    )
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
        group="the student's sampling",
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
        on_continue="announced",
    )
    learning_rate: float = setting(
        5e-6, "learning rate of AdamW, falling linearly to 0; App. F.1, S7", group="the optimizer"
    )
    grad_clip: float = setting(0.1, "clip the gradient to this norm; S7")
    audit_every: int = setting(
        25,
        "record all gaps in step 1 and every N steps; 0: never",
        least=0,
        on_continue="quiet",
        group="looking inside, and memory",
    )
    score_tokens: int = setting(
        16384, "most tokens in one padded forward pass of the teachers", on_continue="quiet"
    )
    checkpoint_above: int = setting(
        2048,
        "recompute activations in the backward pass of rollouts above N tokens, prompt included",
        least=0,
        on_continue="quiet",
    )
    rollout_rows: int = setting(
        0,
        "solutions decoded at a time by each process; 0: all, and 16 for the bank",
        least=0,
        on_continue="quiet",
    )
    report_to: str = setting(
        "none",
        "also send the metrics to this tracker; tensorboard writes to RUN/tensorboard",
        ("none", "wandb", "tensorboard"),
        on_continue="quiet",
    )

    def __post_init__(self) -> None:
        check(self)

    @property
    def uses_skill_bank(self) -> bool:
        return True

    @property
    def pairs_in_a_prompt(self) -> int:
        """Skill-mistake pairs that the longest prompt shows; a teacher's shows one."""
        return 1

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

    paths: tuple[str, ...] = setting(
        (), "model, adapter, run (its checkpoints) or hub id", group="what is evaluated"
    )
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
        group="the problems",
    )
    split: str = setting("test", "split of a hub data set or a directory")
    problem_field: str = setting("problem", "column or field that holds the problem")
    answer_field: str = setting("answer", "column or field that holds the reference answer")
    answer_after: str = setting("", 'the answer is what follows this mark, as "####" in GSM8K')
    limit: int = setting(0, "only the first N problems of each set; 0 is all", least=0)
    verifier: str = setting(Config.verifier, "verifier, as MODULE:CLASS; docs/changing.md")
    verify_timeout: float = setting(
        5.0, "seconds that the verifier may take for an answer", most=1e6
    )
    samples: int = setting(
        12, "k, the samples per problem; App. F.1", most=1e6, group="the samples"
    )
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
