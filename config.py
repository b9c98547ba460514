"""Every setting: one frozen dataclass, its flags, the presets. Each field names its source in the paper, or its decision (S..., D...)."""

import argparse
import json
import math
import os
import pathlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import distributed as D
import rollout as R
from distributed import UserError


def _flag(default: Any, source: str, choices: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"source": source, "choices": choices})


@dataclass(frozen=True)
class Config:
    """Every setting; the flags are made from it. Defaults are the paper's, each with its source."""

    method: str = _flag(
        "sgsd",
        "sgsd, or a baseline with its own defaults: grpo, grpo+skill, opsd, opsd+skill; Tab. 11, baselines.py",
    )
    model: str = _flag("Qwen/Qwen3-1.7B", "hub id or directory of the policy; §4.1")
    data: str = _flag(
        "BytedTsinghua-SIA/DAPO-Math-17k",
        "training problems: hub id, parquet, directory or JSONL; App. F.1, D8",
    )
    bank: str = _flag("", "skill bank (JSON); made by cold start where none is given; §2.1")
    encoder: str = _flag(
        "Qwen/Qwen3-Embedding-0.6B", "sentence-transformers encoder, hub id or directory; Tab. 12"
    )
    query_prompt: str = _flag(
        "", "put in front of a problem before it is embedded, for encoders that want one; S10"
    )
    out: str = _flag("runs/sgsd", "the run's directory")
    seed: int = _flag(0, "of data order, adapter initialisation and sampling")
    device: str = _flag("auto", "auto is CUDA where there is one", ("auto", "cpu", "cuda"))
    dtype: str = _flag(
        "auto",
        "of the frozen base; auto is bfloat16 on CUDA (App. F.1), float32 on CPU",
        ("auto", "float32", "bfloat16"),
    )
    attn: str = _flag(
        "auto",
        "auto is FlashAttention 2 where installed (App. F.1), else SDPA",
        ("auto", "flash_attention_2", "sdpa", "eager"),
    )
    # the loop
    updates: int = _flag(200, "optimizer updates; §4.1")
    batch_size: int = _flag(32, "problems per update over all ranks; S6")
    generations: int = _flag(1, "rollouts per problem; Tab. 11")
    checkpoint_every: int = _flag(25, "updates; §4.1")
    audit_every: int = _flag(25, "updates between those whose gaps go to tokens.jsonl; 0 for none")
    keep_rollouts: int = _flag(
        0,
        "updates that rollouts.jsonl and tokens.jsonl go back at a checkpoint, 0 is all; at least --update-every",
    )
    score_tokens: int = _flag(
        16384, "token budget of one padded forward: bounds memory, changes no result"
    )
    verify_timeout: float = _flag(5.0, "seconds the verifier may think about one answer")
    verify_workers: int = _flag(1, "verifier processes per rank")
    allow_eval_overlap: bool = _flag(
        False, "learn from problems that also stand in AIME24, AIME25, HMMT25 or --eval-data"
    )
    eval_data: str = _flag(
        "",
        "problems for avg@12 of the model before and after, at the end of the run; eval.py by itself does more",
    )
    eval_tokens: int = _flag(38912, "new tokens of an evaluation sample; App. F.1")
    # the bank's life
    cold_start: int = _flag(
        256, "seed problems of a bank that is made here, where no --bank is given; Alg. 2, Tab. 12"
    )
    update_every: int = _flag(
        25, "F, updates between online updates of the bank; 0 for none; Alg. 4, Tab. 12"
    )
    success_gate: float = _flag(
        0.8, "gamma, a success rate from which an online update is skipped; Alg. 4, Tab. 12"
    )
    max_new_items: int = _flag(5, "N, net new entries per online update; Alg. 4, Tab. 12")
    dynamic_capacity: int = _flag(30, "C, dynamic entries per collection; Alg. 4, Tab. 12")
    merge_group_size: int = _flag(32, "H, items per merge; Alg. 3")
    merge_patience: int = _flag(3, "P, merge layers without progress; Alg. 3")
    reply_tokens: int = _flag(2048, "new tokens of an extraction or merge reply; D4")
    update_model: str = _flag(
        "", "another model for extraction and merging, hub id or directory; App. D.4"
    )
    memory_answer: bool = _flag(False, "show the reference answer to the extractor; D3")
    # optimizer and adapter
    learning_rate: float = _flag(5e-6, "AdamW, no weight decay, linear to 0; App. F.1, S7")
    grad_clip: float = _flag(0.1, "gradient norm; S7")
    lora_rank: int = _flag(64, "App. F.1")
    lora_alpha: int = _flag(128, "App. F.1")
    # the student's sampling
    temperature: float = _flag(1.1, "Tab. 11")
    top_p: float = _flag(0.95, "Tab. 11")
    top_k: int = _flag(20, "Tab. 11")
    max_new_tokens: int = _flag(1024, "completion length; Tab. 11")
    rollout_rows: int = _flag(
        0,
        "rollouts decoded at a time on each rank, 0 is all: bounds the cache's memory, changes no result",
    )
    student_prefix: str = _flag(
        "closed",
        "the student's think block: closed, or left to the model; §4.1, S3, S15",
        ("closed", "bare"),
    )
    max_prompt_tokens: int = _flag(20000, "a longer prompt is an error, never cut; Tab. 11")
    # the method
    num_teachers: int = _flag(8, "K, retrieved skill-mistake pairs; Tab. 12")
    teacher_prefix: str = _flag(
        "bare",
        "a teacher's think block: left to the model, open, or closed; S3",
        ("bare", "open", "closed"),
    )
    tau_g: float = _flag(1.0, "gate width; Eq. 14, Tab. 12")
    c_delta: float = _flag(
        3.0, "clipping bound of the gaps in the support score, nats; Eq. 11, Tab. 12"
    )
    eps_a: float = _flag(0.05, "confidence threshold on the support score, nats; Eq. 13, Tab. 12")
    loss_temperature: float = _flag(1.0, "of both sides' log-probabilities; S5")
    mask_extra: bool = _flag(False, "also mask tokens that are only markdown; S2")
    drop_truncated: bool = _flag(
        False,
        "leave rollouts cut at the length limit out of the loss and of the bank's updates; S4",
    )
    # ablations: each changes its own component alone (App. F.2)
    token_mask: bool = _flag(True, "without it every token counts; Tab. 4")
    clip: bool = _flag(True, "without it the support score takes gaps as they are; Tab. 4")
    polarity: bool = _flag(True, "without it every teacher is distilled, rho = +1; §4.4")
    retrieval: str = _flag(
        "embedding",
        "random pairs with equal weights in place of the nearest; S20",
        ("embedding", "random"),
    )
    answer_pi: bool = _flag(False, "the reference answer in the teacher's prompt too; §4.5, S16")
    teacher: str = _flag(
        "live",
        "its adapter: the student's, none, a periodic copy, an average; §4.5",
        ("live", "frozen", "periodic", "ema"),
    )
    teacher_period: int = _flag(50, "updates between copies of a periodic teacher; S18")
    teacher_decay: float = _flag(0.999, "of an ema teacher, per update; S18")
    objective: str = _flag(
        "gate",
        "of the sampled gap or the whole vocabulary; §4.5, D10",
        ("gate", "reverse_kl", "forward_kl", "jsd"),
    )
    objective_clip: float = _flag(
        0.0, "upper bound of one vocabulary entry's term of a divergence, 0 for none; S16"
    )
    support_top_k: int = _flag(
        0,
        "both sides on the teacher's top k and the sampled token, 0 is the whole vocabulary; §4.5, S19",
    )
    # looking inside
    explain: str = _flag(
        "", "a problem's text: takes it through one update's steps without training, and shows them"
    )
    answer: str = _flag("", "of the problem in --explain, for the verifier")
    wandb: bool = _flag(False, "also send metrics.jsonl's numbers to Weights & Biases")
    tensorboard: bool = _flag(False, "also write metrics.jsonl's numbers to RUN/tensorboard")

    def __post_init__(self) -> None:
        positive = (
            "updates",
            "batch_size",
            "checkpoint_every",
            "score_tokens",
            "verify_timeout",
            "verify_workers",
            "learning_rate",
            "grad_clip",
            "lora_rank",
            "lora_alpha",
            "max_prompt_tokens",
            "num_teachers",
            "tau_g",
            "c_delta",
            "loss_temperature",
            "cold_start",
            "dynamic_capacity",
            "merge_patience",
            "reply_tokens",
            "eval_tokens",
            "generations",
            "teacher_period",
        )
        nonnegative = (
            "eps_a",
            "audit_every",
            "seed",
            "update_every",
            "success_gate",
            "max_new_items",
            "objective_clip",
            "support_top_k",
            "rollout_rows",
            "keep_rollouts",
        )
        for f in fields(self):
            value, rule = getattr(self, f.name), None
            if f.name in positive and not value > 0:
                rule = "must be > 0"
            elif f.name in nonnegative and not value >= 0:
                rule = "must be >= 0"
            elif isinstance(value, float) and not math.isfinite(value):
                rule = "must be finite"
            elif f.name == "seed" and value >= 2**40:
                rule = "must be < 2^40"
            elif f.name == "merge_group_size" and value < 2:
                rule = "must be >= 2"
            elif f.name == "bank" and value and not self.sees_skills:
                rule = f"--method {self.method} sees no skills; leave it out, or take {self.method}+skill"
            elif f.name == "generations" and self.method.startswith("grpo") and value < 2:
                rule = f"must be >= 2 with --method {self.method}, whose advantages are relative to a group"
            elif f.name == "temperature" and value == 0 and self.generations > 1:
                rule = f"makes the {self.generations} --generations of a problem the same"
            elif f.name == "keep_rollouts" and self.sees_skills and 0 < value < self.update_every:
                rule = f"must be 0 or >= --update-every {self.update_every}, whose window a resumed run reads there"
            elif f.name == "teacher_decay" and not 0 <= value < 1:
                rule = "must be >= 0 and < 1"
            elif f.name == "support_top_k" and value and self.objective != "gate":
                rule = f"is gated; it needs --objective gate, not {self.objective}"
            elif f.name == "explain" and bool(value) != bool(self.answer):
                rule = "goes with --answer, the one with the other"
            elif f.name == "explain" and value and self.method != "sgsd":
                rule = f"shows what the teachers of SGSD do; --method {self.method} has none"
            elif f.name == "explain" and value and self.whole_logits:
                rule = "shows the gate; leave out --objective and --support-top-k"
            elif f.metadata["choices"] and value not in f.metadata["choices"]:
                rule = f"must be one of {', '.join(f.metadata['choices'])}"
            if rule:
                raise UserError(
                    f"--{f.name.replace('_', '-')} {value}: {rule} ({f.metadata['source']})"
                )
        _ = self.sampling  # its own checks

    @property
    def sampling(self) -> R.Sampling:
        return R.Sampling(self.temperature, self.top_p, self.top_k, self.max_new_tokens)

    @property
    def clip_bound(self) -> float:
        return self.c_delta if self.clip else math.inf

    @property
    def sees_skills(self) -> bool:
        """Whether the method needs a bank and an encoder."""
        return self.method == "sgsd" or self.method.endswith("+skill")

    def counts(self, truncated: bool) -> bool:
        """Whether a rollout is learned from (S4)."""
        return not (self.drop_truncated and truncated)

    @property
    def idle(self) -> set[str]:
        """Settings that change nothing beside the others."""
        used = {
            "teacher_period": self.teacher == "periodic",
            "teacher_decay": self.teacher == "ema",
            "tau_g": self.objective == "gate",
            "objective_clip": self.objective != "gate",
            "c_delta": self.clip,
            "eps_a": self.polarity,
            "mask_extra": self.token_mask,
        }
        return {name for name in used if not used[name]}

    @property
    def whole_logits(self) -> bool:
        """Whether the loss needs more than the sampled tokens' log-probabilities."""
        return self.objective != "gate" or self.support_top_k > 0


def find_method(name: str) -> tuple[Callable, dict[str, Any], set[str]]:
    """By --method: what leaves the gradient of an update, its own defaults, and the settings it has no use for; UserError if none."""
    import baselines  # which imports this module

    return baselines.find(name)


TINY = os.path.relpath(pathlib.Path(__file__).resolve().parent / "tiny")
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "authors": {
        "batch_size": 16,
        "memory_answer": True,
    },  # S6, D3: what of the released code's choices is a setting here
    "tiny": {  # README.md says why each one differs from the paper's
        "model": f"{TINY}/model",
        "encoder": f"{TINY}/encoder",
        "data": f"{TINY}/train.jsonl",
        "eval_data": f"{TINY}/test.jsonl",
        "out": "runs/tiny",
        "updates": 60,
        "batch_size": 16,
        "checkpoint_every": 20,
        "cold_start": 64,
        "update_every": 10,
        "merge_group_size": 8,
        "reply_tokens": 640,
        "max_new_tokens": 96,
        "eval_tokens": 96,
        "num_teachers": 4,
        "eps_a": 0.005,
        "learning_rate": 3e-4,
        "lora_rank": 16,
        "lora_alpha": 32,
    },
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per setting, its source in the help; a flag that isn't given leaves no trace."""
    for f in fields(Config):
        kind: dict[str, Any] = {"type": type(f.default), "choices": f.metadata["choices"]}
        if isinstance(f.default, bool):
            kind = {"action": argparse.BooleanOptionalAction}
        text = f"{f.metadata['source']} (default: {f.default})".replace("%", "%%")
        parser.add_argument(
            "--" + f.name.replace("_", "-"), default=argparse.SUPPRESS, help=text, **kind
        )


def layered(preset: str, given: dict[str, Any]) -> tuple[Config, dict[str, str]]:
    """The configuration, and where each value comes from: a flag, else the preset, else the method's own, else the paper."""
    method = given.get("method", "sgsd")
    own_defaults = find_method(method)[1]
    layers = {
        f"the default of --method {method}": own_defaults,
        f"--preset {preset}": PRESETS[preset],
        "a flag": given,
    }
    source = {f.name: f.metadata["source"] for f in fields(Config)} | {
        name: layer for layer, own in layers.items() for name in own
    }
    config = Config(**{name: value for own in layers.values() for name, value in own.items()})
    refuse_unused(config, given)
    return config, source


def refuse_unused(config: Config, given: Collection[str]) -> None:
    """UserError on a flag that would change nothing."""
    unused = find_method(config.method)[2]
    for name in given:
        if name in unused | config.idle:
            what = (
                f"--method {config.method} makes" if name in unused else "the other settings make"
            )
            raise UserError(f"--{name.replace('_', '-')}: {what} no use of it; leave it out")


def parse_config(argv: Sequence[str] | None = None) -> tuple[Config, bool]:
    """(config, resume). `--resume DIR` starts from the run's saved settings; flags that are given replace them."""
    parser = D.Parser(
        "sgsd.py",
        description="Skill-Conditioned Gated Self-Distillation (SGSD), in plain PyTorch.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--preset", choices=PRESETS, help="settings to start from; the paper's without it"
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print every setting with where it comes from, and end",
    )
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="go on from the last checkpoint of this run directory, with its settings",
    )
    add_flags(parser)
    given = vars(parser.parse_args(argv))
    run, preset, show = (given.pop(name) for name in ("resume", "preset", "print_config"))
    if show and run is None:
        config, source = layered(preset or "paper", given)
        print(
            "\n".join(
                f"{name} = {value!r}  ({source[name]})" for name, value in asdict(config).items()
            )
        )
        raise SystemExit(0)
    if run is None:
        config = layered(preset or "paper", given)[0]
        try:  # torchrun --max-restarts starts the same command again
            again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
            again = again and json.loads((pathlib.Path(config.out) / "config.json").read_text())[
                "settings"
            ] == asdict(config)
        except (OSError, ValueError, KeyError, TypeError):
            again = False
        return config, again
    if show:
        raise UserError(
            f"--print-config: the settings of {run} stand in its config.json; leave --resume out"
        )
    if preset:
        raise UserError(f"--preset {preset}: a resumed run has its own settings; leave it out")
    if "bank" in given:
        raise UserError(
            f"--bank {given['bank']}: a resumed run has its own bank (D9); start a new run for another"
        )
    if "out" in given:
        raise UserError(f"--out {given['out']}: a resumed run goes on where it is; leave it out")
    try:
        saved = json.loads((pathlib.Path(run) / "config.json").read_text())["settings"]
        if given.get("method", was := saved.get("method", "sgsd")) != was:
            raise UserError(f"--method {given['method']}: {run} is a run of {was}; start a new one")
        config = Config(**{**saved, **given, "out": run})
        refuse_unused(config, given)
        return config, True
    except UserError:
        raise
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as e:
        raise UserError(
            f"--resume {run}: no readable config.json of a run there ({e!r}); give a run directory such as runs/sgsd"
        ) from None
