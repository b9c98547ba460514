"""Settings: one frozen dataclass, its flags and presets, and a user's mistake as one line.

A field that the paper or a decision (S..., D...) settles names it.
"""

import argparse
import contextlib
import difflib
import json
import math
import os
import pathlib
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, NoReturn

VERSION = "0.1.0"  # of the project: --version prints it, config.json keeps it


def setting(
    default: Any,
    source: str,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    resumable: bool = False,
) -> Any:
    """A setting: its default, its help and source, its range (a number is > 0 without a `least`).

    resumable: a resumed run may be given another value: where it runs, memory, logging, saving.
    """
    rule = {"source": source, "choices": choices, "least": least, "most": most}
    return field(default=default, metadata=rule | {"resumable": resumable})


@dataclass(frozen=True)
class Config:
    """SGSD's settings. The flags are made from the fields."""

    program: ClassVar[str] = "sgsd.py"

    # the run
    out: str = setting(
        "runs/sgsd", "directory of the run; skills.py: file of the bank, such as bank.json"
    )
    seed: int = setting(
        0, "seed of the data order, the adapters and the sampling", least=0, most=2**40
    )
    steps: int = setting(200, "number of optimizer steps; §4.1", resumable=True)
    checkpoint_every: int = setting(25, "save a checkpoint every N steps; §4.1", resumable=True)
    keep_checkpoints: int = setting(
        0, "keep the first and the last N checkpoints; 0 keeps all", least=0, resumable=True
    )
    eval_data: str = setting(
        "", "after training, evaluate base and last checkpoint on these problems", resumable=True
    )
    eval_samples: int = setting(12, "k of that evaluation's avg@k; App. F.1", resumable=True)
    eval_tokens: int = setting(
        38912, "longest sample of that evaluation, in tokens; App. F.1", resumable=True
    )
    device: str = setting(
        "auto", "auto takes CUDA where there is a GPU", ("auto", "cpu", "cuda"), resumable=True
    )
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
        "training problems: HUB_ID[:CONFIGURATION], directory, parquet, JSONL; App. F.1, D8",
    )
    split: str = setting("train", "split of --data, if that is a hub data set or a directory")
    problem_field: str = setting("problem", "column or field that holds the problem")
    answer_field: str = setting("answer", "column or field that holds the reference answer")
    answer_after: str = setting("", 'the answer is what follows this mark, as "####" in GSM8K')
    batch_size: int = setting(32, "problems in a step, over all processes together; S6")
    max_prompt_tokens: int = setting(20000, "refuse a longer prompt, and never cut one; Tab. 11")
    allow_eval_overlap: bool = setting(False, "train on problems of the evaluation sets, too")
    verifier: str = setting(
        "lib.verify:Verifier",
        "who says right or wrong, as MODULE:CLASS, a subclass of verify.Judge; docs/changing.md",
    )
    prompts: str = setting("", "directory of templates that replace prompts/; docs/changing.md")
    # the bank
    bank: str = setting("", "skill bank (JSON); without one the model writes its own first; Alg. 2")
    encoder: str = setting(
        "Qwen/Qwen3-Embedding-0.6B",
        "sentence-transformers model that embeds problems and skills; Tab. 12",
    )
    query_prompt: str = setting("", "text put in front of a problem before it is embedded; S10")
    cold_start: int = setting(
        256, "number of seed problems solved to build the first bank; Alg. 2, Tab. 12"
    )
    cold_start_temperature: float = setting(
        1.0, "sampling temperature of the seed solutions; S21", least=0
    )
    cold_start_top_p: float = setting(0.95, "top-p of the seed solutions; S21", most=1)
    cold_start_top_k: int = setting(0, "top-k of the seed solutions; 0 turns it off; S21", least=0)
    cold_start_tokens: int = setting(38912, "longest seed solution, in tokens; S21")
    cold_start_thinking: bool = setting(True, "solve the seed problems in thinking mode; S21")
    allow_empty_bank: bool = setting(False, "train although the bank makes no teacher; S8")
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
    reply_tokens: int = setting(4096, "longest reply to an extraction prompt, in tokens; D4")
    writer_model: str = setting("", "another model to write the bank's entries; App. D.4")
    memory_answer: bool = setting(
        False, "show the reference answer to the model that writes entries; D3"
    )
    # inference servers
    server: tuple[str, ...] = setting(
        (),
        "sample the policy there, such as http://localhost:8000/v1; rank i asks the i-th; none "
        "goes back to generate; S27",
        resumable=True,
    )
    writer_server: str = setting("", "server for --writer-model; S27", resumable=True)
    server_model: str = setting(
        "", "name of --model on --server, if not its own name or path; S27", resumable=True
    )
    server_seeds: bool = setting(False, "send a seed with each request; S27", resumable=True)
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
    # looking inside, memory, time limits and trackers
    audit_every: int = setting(
        25, "record every token's gaps every N steps; 0 disables", least=0, resumable=True
    )
    score_tokens: int = setting(
        16384, "most tokens in one padded forward pass of the teachers", resumable=True
    )
    checkpoint_above: int = setting(
        2048,
        "recompute activations in the backward pass of rollouts above N tokens, prompt included",
        least=0,
        resumable=True,
    )
    rollout_rows: int = setting(
        0,
        "solutions decoded at a time by each process; 0: all, and 16 for the bank or on a server",
        least=0,
        resumable=True,
    )
    verify_timeout: float = setting(
        5.0, "seconds that the verifier may take for an answer", most=1e6
    )
    verify_workers: int = setting(1, "verifier processes beside each process", resumable=True)
    report_to: str = setting(
        "none",
        "also send the metrics to this tracker; tensorboard writes to RUN/tensorboard",
        ("none", "wandb", "trackio", "tensorboard"),
        resumable=True,
    )

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
                raise ValueError(f"{flag(f.name)} {value}: {wrong} ({rule['source']})")
        if self.writer_server and not self.writer_model:
            fix = "give the model that it serves as --writer-model"
            raise ValueError(f"--writer-server {self.writer_server}: {fix}")

    @property
    def uses_skill_bank(self) -> bool:
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
            "evolve_every": self.evolve_every,
            "success_gate": self.success_gate,
            "max_new_items": self.max_new_items,
            "dynamic_capacity": self.dynamic_capacity,
            "memory_answer": self.memory_answer,
            **self.merging,
        }


GROUPS = {  # in --help, by the first setting of each
    "out": "the run",
    "model": "the model",
    "data": "the data",
    "bank": "the bank",
    "server": "inference servers",
    "num_teachers": "the objective",
    "temperature": "the student's sampling",
    "learning_rate": "the optimizer",
    "audit_every": "looking inside, memory, time limits and trackers",
    "method": "baselines and ablations",
}
PATHS = ("model", "encoder", "writer_model", "data", "eval_data", "bank", "prompts", "config")
TINY = os.path.relpath(pathlib.Path(__file__).resolve().parent.parent / "tiny")
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "tiny": {  # docs/decisions.md says why each one differs from the paper's
        "model": f"{TINY}/model",
        "encoder": f"{TINY}/encoder",
        "data": f"{TINY}/train.jsonl",
        "eval_data": f"{TINY}/test.jsonl",
        "out": "runs/tiny",
        "steps": 30,
        "batch_size": 16,
        "checkpoint_every": 10,
        "audit_every": 3,
        "eval_samples": 4,
        "cold_start": 64,
        "cold_start_temperature": 1.1,
        "cold_start_top_k": 20,
        "cold_start_tokens": 96,
        "cold_start_thinking": False,
        "evolve_every": 10,
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


# ------------------------------------------------------------------------- a mistake as one line


@contextlib.contextmanager
def mistakes_as_one_line(program: str, of_all_ranks: bool = False) -> Iterator[None]:
    """Bad input or a missing package: printed as one line, exit code 2.

    of_all_ranks: every rank sees the mistake, so only rank 0 prints it.
    """
    try:
        yield
    except (ValueError, OSError, ImportError) as e:
        fix = "; pip install -r requirements.txt" if isinstance(e, ImportError) else ""
        if not of_all_ranks or is_first_rank():
            print(f"{program}: {' '.join(str(e).split())}{fix}", file=sys.stderr)
        raise SystemExit(2) from None


def end_at_signals(advice: str) -> None:
    """From here on Ctrl-C and SIGTERM end the process at once, with exit code 130.

    advice: the printed sentence that says how to continue.
    """

    def end(*_: object) -> None:
        if is_first_rank():
            os.write(2, f"\nInterrupted. {advice}\n".encode())  # print may be what it interrupts
        os._exit(130)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def is_first_rank() -> bool:
    """Whether torchrun started this process as rank 0, or did not start it."""
    return os.environ.get("RANK", "0") == "0"


class Parser(argparse.ArgumentParser):
    """Flags that are never abbreviated, --version, and mistakes in one line.

    about: a docstring; its first line and its commands stand in --help.
    """

    def __init__(self, program: str, usage: str, about: str | None, **settings: Any):
        title, *body = (about or "").split("\n")
        commands = [line for line in body if line.startswith(("    python ", "    torchrun "))]
        super().__init__(
            program,
            usage=f"{program} {usage}",
            description=title,
            epilog="\n".join(["examples:", *commands]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **{"allow_abbrev": False, **settings},
        )
        self.add_argument("--version", action="version", version=f"sgsd {VERSION}")

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """As argparse's; the help says the default, and N for a whole number."""
        default = options.get("default")
        if default and default != argparse.SUPPRESS:
            shown = " ".join(default) if isinstance(default, list) else default
            options["help"] = f"{options.get('help', '')} (default: {shown})"
        if names[0][0] == "-" and not options.keys() & {"action", "choices", "metavar"}:
            options["metavar"] = {int: "N", float: "X"}.get(options.get("type", str), "NAME")
        return super().add_argument(*names, **options)

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and one line, which suggests the closest flag to each unknown one."""
        hint = ""
        for wrong in re.findall(r"--[\w-]+", message.partition("unrecognized arguments: ")[2]):
            for close in difflib.get_close_matches(wrong, [*self._option_string_actions], 1, 0.75):
                hint += f"did you mean {close}? "
        line = f"{name_of(self.prog)}: {' '.join(message.split())}"
        line += f"; {hint}--help lists the flags\n"
        self.exit(2, line if is_first_rank() else None)


def name_of(program: str) -> str:
    """The name that stands before an error: "sgsd" of "python sgsd.py"."""
    return program.removesuffix(".py").replace(".", " ").split()[-1]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def refuse_missing_path(flag_name: str, name: str) -> None:
    """ValueError for a name that looks like a path and is not there.

    The hub would be asked for it, for a minute. ORG/NAME may be a hub id, unless ORG is a directory
    here and the hub's cache does not have it.
    """
    path, (folder, _, configuration) = pathlib.Path(name), name.partition(":")
    if not name or path.exists() or (configuration and pathlib.Path(folder).is_dir()):
        return
    looks_like_path = name.startswith((".", "/", "~", "runs/")) or name.endswith("/")
    looks_like_path |= name.count("/") > 1
    looks_like_path |= path.suffix in (".json", ".jsonl", ".parquet", ".yaml", ".yml")
    if not looks_like_path and name.count("/") and path.parent.is_dir():
        from huggingface_hub import try_to_load_from_cache  # only such a name needs it

        cached = try_to_load_from_cache(name, "config.json")
        looks_like_path = not isinstance(cached, str)
    if looks_like_path:
        raise ValueError(f"{flag_name} {name}: no such file or directory; check the path")


# ------------------------------------------------------------------------------ the command line


def parse(
    argv: Sequence[str] | None,
    about: str | None,
    kind: type[Config] = Config,
    defaults_of_methods: dict[str, dict[str, Any]] | None = None,
    program: str = "",
) -> tuple[Config, bool]:
    """(settings, whether to resume) from a command line; a mistake exits with code 2.

    about: a program's docstring, for --help. A flag overrides the preset, and that overrides the
    defaults of a --method. `--resume RUN` starts from the run's saved settings instead.
    """
    program = f"python {program or kind.program}"
    resumable = [flag(f.name) for f in fields(kind) if f.metadata["resumable"]]
    usage = "[--preset NAME] [--FLAG VALUE ...]"
    parser = Parser(program, usage, about, argument_default=argparse.SUPPRESS)
    parser.epilog = f"Tags such as S3 and D8 are rows of docs/decisions.md.\n\n{parser.epilog}"
    parser.add_argument("--preset", choices=PRESETS, help="settings to start from")
    settings = "YAML of settings, or a run's config.json; above the preset, below flags"
    parser.add_argument("--config", metavar="FILE", help=settings)
    shown = "print every setting as YAML for --config, and exit"
    parser.add_argument("--print-config", action="store_true", help=shown)
    again = "continue a run from its last checkpoint, with its own settings; only these may be "
    again += f"given again: {', '.join(resumable)}"
    parser.add_argument("--resume", metavar="RUN", help=again)
    group = parser.add_argument_group()
    for f in fields(kind):
        if f.name in GROUPS:
            group = parser.add_argument_group(GROUPS[f.name])
        default = " ".join(f.default) if isinstance(f.default, tuple) else f.default
        text = f.metadata["source"].replace("%", "%%")
        text += "" if default == "" else f" (default: {default})"
        options: dict[str, Any] = {"type": type(f.default), "metavar": "N"}
        if f.metadata["choices"]:
            options = {"choices": f.metadata["choices"]}
        elif isinstance(f.default, str):
            options["metavar"] = "NAME"
        elif isinstance(f.default, float):
            options["metavar"] = "X"
        elif isinstance(f.default, tuple):
            options = {"nargs": "+", "metavar": "URL"}
        if isinstance(f.default, bool):
            options = {"action": argparse.BooleanOptionalAction}
        group.add_argument(flag(f.name), help=text, **options)
    given = vars(parser.parse_args(argv))
    with mistakes_as_one_line(name_of(program), of_all_ranks=True):
        if "resume" not in given:
            given = _of_file(given.pop("config", ""), kind) | given
        for name in PATHS:
            refuse_missing_path(flag(name), given.get(name, ""))
        if "resume" in given:
            return _resumed(given.pop("resume"), given, kind), True
        show, preset = given.pop("print_config", False), given.pop("preset", "paper")
        start = (defaults_of_methods or {}).get(given.get("method", ""), {})
        cfg = kind(**_with_tuples({**start, **PRESETS[preset], **given}))
    if not show:
        return cfg, _restarted(cfg)
    for f in fields(cfg):
        value = getattr(cfg, f.name)
        instead = "" if value == f.default else f"; instead of {f.default!r}"
        print(f"{f.name}: {json.dumps(value)}  # {f.metadata['source']}{instead}")
    raise SystemExit(0)


def _of_file(path: str, kind: type[Config]) -> dict[str, Any]:
    """The settings in a --config file; ValueError for an unknown name or another type."""
    if not path:
        return {}
    import yaml

    try:
        content = yaml.safe_load(pathlib.Path(path).read_text(encoding="utf-8")) or {}
        content = content.get("settings", content)  # a run's config.json
        settings = {str(name).replace("-", "_"): value for name, value in content.items()}
    except (yaml.YAMLError, ValueError, AttributeError) as e:
        raise ValueError(f"--config {path}: not a YAML mapping of settings ({e})") from None
    types = {f.name: type(f.default) for f in fields(kind)}
    for name, value in settings.items():
        if name not in types:
            close = difflib.get_close_matches(name, types, 1, 0.75)
            hint = f"; did you mean {close[0]}?" if close else "; --help lists the settings"
            raise ValueError(f"--config {path}: there is no setting {name}{hint}")
        if types[name] is float and type(value) in (int, str):
            with contextlib.suppress(ValueError):
                settings[name] = value = float(value)  # 5e-06 without a point is text in YAML 1.1
        if type(value) is not (list if types[name] is tuple else types[name]):
            rule = f"must be of type {types[name].__name__}"
            raise ValueError(f"--config {path}: {name}: {value!r} {rule}")
    return settings


def saved(run: str | pathlib.Path) -> dict[str, Any]:
    """The settings in a run's config.json. ValueError where there is none."""
    path = pathlib.Path(run, "config.json")
    try:
        return _with_tuples(json.loads(path.read_text(encoding="utf-8"))["settings"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as e:
        why = f"no readable config.json of a run there ({type(e).__name__}: {e})"
        raise ValueError(f"{run}: {why}; give a run such as runs/sgsd") from None


def _with_tuples(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with a tuple for each list, as JSON and argparse know lists only."""
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    if settings.get("server") == ("none",):
        settings["server"] = ()
    return settings


def _restarted(cfg: Config) -> bool:
    """Whether `torchrun --max-restarts` starts the command of an existing run once more."""
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    with contextlib.suppress(ValueError):
        return again and saved(cfg.out) == asdict(cfg)
    return False


def _resumed(run: str, given: dict[str, Any], kind: type[Config]) -> Config:
    """A run's own settings, with what may be given again."""
    resumable = {f.name for f in fields(kind) if f.metadata["resumable"]}
    for name in given.keys() - resumable:
        rule = "a resumed run keeps its own; leave it out, or start a new run"
        raise ValueError(f"{flag(name)} {given[name]}: {rule}")
    path = pathlib.Path(run)
    if path.parent.name == "checkpoints":
        raise ValueError(f"--resume {run}: is a checkpoint; give its run, {path.parent.parent}")
    settings = saved(run)
    if settings.keys() != {f.name for f in fields(kind)}:
        other = "-m extras.baselines" if "method" in settings else "sgsd.py"
        rule = f"its settings are not those of {kind.program}"
        if other == kind.program:
            rule += " at this commit; check out the one in its config.json"
        else:
            rule += f"; python {other} --resume {run} continues it"
        raise ValueError(f"--resume {run}: {rule}")
    try:
        return kind(**_with_tuples({**settings, **given, "out": run}))
    except TypeError as e:
        raise ValueError(f"--resume {run}: config.json holds a wrong value ({e})") from None
