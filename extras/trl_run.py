"""A run on TRL: its settings, its trainer's checks, its folder, and what may change in it.

    OUTPUT_DIR/                 the weights after the last step
    OUTPUT_DIR/checkpoint-25/   TRL's checkpoint, and bank.json: the bank in use with its window
    OUTPUT_DIR/sgsd/            config.json, problems.json, bank/, metrics.jsonl, rollouts.jsonl and
                                tokens.jsonl, as in a folder of sgsd.py

With --full the config.json of OUTPUT_DIR is the model's. Settings of SGSD are compared as sgsd.py
compares them, and TRL's by the lists below.
"""

import contextlib
import functools
import importlib.metadata
import json
import math
import os
import pathlib
import shutil
from dataclasses import MISSING, dataclass, field, fields, make_dataclass, replace
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, gather_object
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from trl import GRPOConfig, GRPOTrainer

from distributed import World, refuse_other_commands
from lib import command, files, model, problems, runlog
from lib.config import Config
from lib.problems import Problem
from lib.run import ROOT, differences, load_training, record_of, shared_settings
from skills import SkillBank

PROGRAM = "extras.on_trl"
CONFIG, RULES = Config.__dataclass_fields__, Config.rules()

# ------------------------------------------------------------------------------------- settings

# Settings with the names, defaults and help texts of sgsd.py.
SGSD = """
    model dtype attn lora_rank lora_alpha data split problem_field answer_field answer_after
    batch_size max_prompt_tokens verifier verify_timeout bank encoder evolve_every success_gate
    max_new_items dynamic_capacity merge_group_size merge_patience reply_tokens memory_answer
    num_teachers student_prefix teacher_prefix tau_g c_delta eps_a temperature top_p top_k
    max_new_tokens steps learning_rate grad_clip seed audit_every
""".split()
# TRL's settings that make another run: refused where they differ from the run's.
REFUSED = """
    full model_init_kwargs optim optim_args adam_beta1 adam_beta2 adam_epsilon weight_decay
    lr_scheduler_type lr_scheduler_kwargs warmup_steps data_seed
""".split()
# Those that only round, lay out, save or log: another value is said and recorded. Every setting of
# TRL's that is in neither list stays at its default.
FREE = """
    score_rows use_cpu per_device_train_batch_size bf16
    gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing
    activation_checkpointing_kwargs torch_empty_cache_steps pad_to_multiple_of
    dataloader_num_workers dataloader_pin_memory
    fsdp fsdp_config deepspeed ds3_gather_for_generation ddp_backend ddp_timeout
    ddp_bucket_cap_mb ddp_find_unused_parameters ddp_broadcast_buffers
    use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_server_base_url vllm_server_host
    vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization
    vllm_max_model_length vllm_tensor_parallel_size
    output_dir do_train save_strategy save_steps save_total_limit
    logging_strategy logging_steps logging_first_step logging_nan_inf_filter log_level
    log_level_replica log_on_each_node report_to run_name project trackio_space_id disable_tqdm
    include_num_input_tokens_seen skip_memory_metrics debug
    push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_revision
""".split()
WHY_NOT = {  # what leaves the method alone, and is refused all the same
    "tf32": "it rounds what is fp32 here: adapters, and log-probabilities, which eps_a needs",
    "fp16": "its scaler lets gradients overflow until it has found a scale; take bf16",
    "use_transformers_continuous_batching": "it casts the weights that learn to bf16",
    "use_transformers_paged": "it casts the weights that learn to bf16",
    "resume_from_checkpoint": "the same command continues after the last checkpoint of output_dir",
    "save_only_model": "a run needs its optimizer to go on; save_total_limit saves disk space, too",
    "log_completions": "sgsd/rollouts.jsonl has them",
    **dict.fromkeys(
        "do_eval eval_strategy eval_steps eval_delay eval_on_start".split(),
        "it has no problems to evaluate; eval.py takes its checkpoints",
    ),
}


def ours(name: str) -> tuple[str, Any, Any]:
    """A setting of sgsd.py as a field that TRL's parser reads."""
    setting = CONFIG[name]
    text = RULES[name].help.replace("%", "%%")
    return name, setting.type, field(default=setting.default, metadata={"help": text})


Ours: Any = make_dataclass("Ours", [ours(name) for name in SGSD])


@dataclass
class SGSDConfig(Ours, GRPOConfig):
    """TRL's settings, with SGSD's under sgsd.py's names and with the paper's defaults.

    `temperature` is that of the sampling. The loss is at temperature 1 (S5). `batch_size` is the
    number of problems in a step over all processes; the number of micro-batches follows from it.
    ValueError for a setting of TRL's that would make another method of it.
    """

    full: bool = field(default=False, metadata={"help": "train all weights, and not adapters"})
    score_rows: int = field(
        default=8, metadata={"help": "rows of a forward pass of the teachers, or of the writer"}
    )
    # TRL's, with defaults of ours
    output_dir: str = field(default="sgsd_trl", metadata={"help": "folder of the run"})
    per_device_train_batch_size: int = field(
        default=4, metadata={"help": "rollouts in one backward pass of a process"}
    )
    logging_steps: float = field(default=1, metadata={"help": "log every N steps"})
    save_steps: float = field(default=25, metadata={"help": "save a checkpoint every N steps"})
    # TRL's, fixed
    num_generations: int | None = 1  # one solution a problem: teachers give the signal, no group
    loss_type: str = "grpo"  # the mean over a rollout's tokens, then over rollouts
    disable_dropout: bool = True  # teacher and student are one function of their input
    vllm_importance_sampling_correction: bool = False  # the loss has no ratio to the sampler
    router_aux_loss_coef: float | None = 0.0  # no second loss on a mixture of experts

    def __post_init__(self) -> None:
        self.refuse_other_methods()
        self.sgsd = Config(out=self.output_dir, **{name: getattr(self, name) for name in SGSD})
        rows = self.per_device_train_batch_size * int(os.environ.get("WORLD_SIZE", "1"))
        if self.batch_size % rows or self.batch_size % 2:  # TRL checks for groups of two
            rule = "must be even, and divisible by processes times per_device_train_batch_size"
            raise ValueError(f"batch_size {self.batch_size}: {rule}, which is {rows}")
        if not self.steps:
            raise ValueError("steps 0: a bank alone is made by sgsd.py --steps 0")
        if not self.sgsd.temperature:
            raise ValueError(f"temperature {self.sgsd.temperature}: TRL samples, and divides by it")
        if self.save_strategy not in ("steps", "no") or self.save_steps < 1:
            given = f"save_strategy {self.save_strategy}, save_steps {self.save_steps}"
            raise ValueError(f"{given}: a run saves every 1 or more steps, or never (no)")
        self.gradient_accumulation_steps = self.batch_size // rows
        self.max_steps, self.max_grad_norm = self.steps, self.grad_clip
        self.max_completion_length = self.max_new_tokens
        self.generation_kwargs = {"temperature": self.sgsd.temperature}  # for `generate` and vLLM
        self.temperature = 1.0  # of the log-probabilities
        self.num_generations = 2
        super().__post_init__()
        self.num_generations = 1
        if self.n_gpu > 1:
            rule = "one process would split the model over them"
            raise ValueError(f"{self.n_gpu} GPUs: {rule}; start a process for each, by accelerate")

    def refuse_other_methods(self) -> None:
        """ValueError for a value of TRL's that is neither SGSD's nor harmless."""
        for f in fields(self):
            default = f.default if f.default_factory is MISSING else f.default_factory()
            value = getattr(self, f.name)
            if value != default and f.name not in [*SGSD, *REFUSED, *FREE]:
                rule = f"trains by another method, or was never tried; SGSD has {default!r}"
                raise ValueError(f"{f.name} {value!r}: {WHY_NOT.get(f.name, rule)}")


# ----------------------------------------------------------------------------------- the trainer


class CheckedTrainer(GRPOTrainer):
    """GRPOTrainer that leaves out steps that are not finite, and makes none after the last."""

    skipped = 0  # steps in a row whose gradient was not finite
    norm = rate = 0.0  # of the latest step: the gradient's norm, and the learning rate

    def refuse_what_fails_later(self, causal: Any) -> None:
        """ValueError for shards that fail in the end, rows that take in their padding, and NaN."""
        if self.accelerator.distributed_type == DistributedType.FSDP:
            self.refuse_shards()
        if not self.accelerator.is_main_process:
            return  # others may have no weights yet
        if causal.device.type == "cpu" and self.args.sgsd.attn == "flash_attention_2":
            return  # shards go to the GPUs later, and these kernels run nowhere else
        with command.user_errors(f"model {causal.name_or_path}: "):
            model.check_batching(causal)
            if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
                return  # it may have split the weights
            model.refuse_not_finite(causal.named_parameters())
            if not model.ignores_left_padding(causal):
                rule = "its positions count a row's left padding, and TRL pads prompts so"
                raise ValueError(f"{rule}; take another model")

    def refuse_shards(self) -> None:
        """ValueError where the bank's writer would crash, or the weights would not be saved."""
        if not self.accelerator.is_fsdp2:
            rule = "the bank's writer cannot call `generate` on its shards"
            raise ValueError(f"FSDP version 1: {rule}; take version 2, as extras/fsdp2.yaml does")
        kind = str(self.accelerator.state.fsdp_plugin.state_dict_type)
        if "FULL" not in kind:
            rule = "the folder would have no weights in the end"
            raise ValueError(f"{kind}: {rule}; set fsdp_state_dict_type: FULL_STATE_DICT")

    def set_up_shards(self) -> None:
        """What FSDP2 does not do of itself."""
        if self.accelerator.distributed_type != DistributedType.FSDP:
            return
        # Completions end at different lengths, and each forward pass is a collective.
        self.model.generate = functools.partial(self.model.generate, synced_gpus=True)
        # accelerate lets it sum gradients in bf16, and round all that the model returns to bf16,
        # log-probabilities too.
        plugin = self.accelerator.state.fsdp_plugin
        policy = plugin.mixed_precision_policy
        if policy is not None:
            policy = replace(policy, reduce_dtype=torch.float32, output_dtype=None)
            plugin.mixed_precision_policy = policy

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """The norm before clipping. Where it is not finite no gradient stays: AdamW makes no step.

        The norm is that of all processes. Their gradients may not tell: clipping by an infinite
        norm leaves zeros where they were finite.
        """
        norm = super()._get_grad_norm(model, grad_norm)
        self.rate = self.optimizer.param_groups[0]["lr"]
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            self.norm = math.nan if norm is None else float(norm)
            return norm  # it has made its step already
        norm = norm.full_tensor() if isinstance(norm, DTensor) else torch.as_tensor(norm)
        self.norm = float(norm)
        self.skipped = 0 if norm.isfinite() else self.skipped + 1
        if self.skipped:
            for p in model.parameters():
                p.grad = None
            self.say(f"step {self.state.global_step + 1}: gradient norm {norm:.3g}; no update")
        return norm

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """A checkpoint has the rate that its own number of steps gave: take the present one's."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint and isinstance(self.lr_scheduler, LambdaLR):
            self.lr_scheduler.last_epoch -= 1
            self.lr_scheduler.step()

    def _get_train_sampler(self, *args: Any) -> Any:
        self.sampler = super()._get_train_sampler(*args)
        return self.sampler

    def _run_epoch(self, **epoch: Any) -> None:
        """TRL's, which would make a step before it sees that all are made.

        The sampler draws an order of problems for each epoch. A run that goes on in a later one
        draws those before it first: TRL would take the first.
        """
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        if epoch["epoch"] == epoch["epochs_trained"]:
            for _ in range(epoch["epoch"]):
                next(iter(self.sampler))
        super()._run_epoch(**epoch)

    def say(self, line: str) -> None:
        """The main process prints a line."""
        if self.accelerator.is_main_process:
            print(line, flush=True)


# ----------------------------------------------------------------------------------- the folder


@dataclass
class Start:
    """What a command begins with, or goes on with."""

    record: dict[str, Any]  # sgsd/config.json, as this command writes it
    problems: list[Problem]
    notes: list[str]  # lines to print
    step: int = 0  # of the last checkpoint
    checkpoint: pathlib.Path | None = None  # the last one


def home(args: SGSDConfig) -> pathlib.Path:
    """Where our files of a run lie."""
    return pathlib.Path(args.output_dir, "sgsd")


def claim(args: SGSDConfig, held: contextlib.ExitStack) -> None:
    """The main process locks the folder; ValueError where its files are of no run on TRL."""
    if args.process_index == 0:
        out = pathlib.Path(args.output_dir)
        names = {path.name for path in out.glob("*")} - {files.LOCK}
        file = home(args) / "config.json"
        if file.exists():
            is_run = files.read_json(file).get("program") == PROGRAM
        else:
            is_run = bool(files.by_number(out))  # of an older version
        if names and not is_run:
            listed = ", ".join(sorted(names)[:5])
            rule = f"holds {listed}, and no run on TRL; give another folder"
            raise ValueError(f"--output_dir {out}: {rule}")
        held.enter_context(files.locked(out))
    PartialState().wait_for_everyone()


def inspect(args: SGSDConfig) -> Start:
    """Read the data and the folder, and decide whether this command may go on with its run.

    Exits with 0 where the run is complete.
    """
    cfg, out, file = args.sgsd, pathlib.Path(args.output_dir), home(args) / "config.json"
    if not cfg.bank:
        raise ValueError("--bank: needed; make one by sgsd.py --steps 0, or take one of banks/")
    data, _ = load_training(cfg)
    start = Start(record_on_trl(args, data), data, [])
    values = {f"--{name}": start.record["trl"][name] for name in REFUSED}
    refuse_other_commands(gather_object([shared_settings(start.record) | values]))
    checkpoints = files.by_number(out)
    start.step = max(checkpoints, default=0)
    start.checkpoint = checkpoints.get(start.step)
    if file.exists():
        go_on(args, start, files.read_json(file))
    elif start.checkpoint:
        start.notes.append("the run has no config.json in sgsd/: its settings are not compared")
    if cfg.steps < start.step:
        raise ValueError(f"--steps {cfg.steps}: {out} is at step {start.step} already")
    if start.step:
        start.notes.append(f"continues after step {start.step}")
    return start


def record_on_trl(args: SGSDConfig, data: list[Problem]) -> dict[str, Any]:
    """A new run's config.json: what sgsd.py records, and TRL's settings."""
    world = World(args.process_index, args.world_size, args.device)
    record = record_of(args.sgsd, data, world)
    for name in ("trl", "accelerate"):
        record["versions"][name] = importlib.metadata.version(name)
    for name in ("extras/on_trl.py", "extras/trl_run.py"):
        record["code"][name] = files.file_digest(ROOT / name)
    values = args.to_dict()  # without the hub's token
    chosen = {name: values[name] for name in [*REFUSED, *FREE]}
    record |= {"program": PROGRAM, "trl": json.loads(json.dumps(chosen, default=str))}
    return record | {"finished": 0}  # or the step of the weights in the folder itself


def go_on(args: SGSDConfig, start: Start, saved: dict[str, Any]) -> None:
    """Compare the command with the run of its folder. saved: the run's config.json.

    ValueError for what would make another run of it. A run without a checkpoint is begun anew.
    """
    out, record = args.output_dir, start.record
    refused, changes = differences(saved, record, args.sgsd)
    for name, new in record["trl"].items():
        old = saved["trl"].get(name, new)
        line = f"--{name} {new!r}, where the run has {old!r}"
        if old != new and name in REFUSED:
            refused = refused or line
        elif old != new and name != "output_dir":
            changes.append(line)
    finished = saved["finished"]
    if refused and (start.step or finished):
        raise ValueError(f"{out}: {refused}; give the run's value, or another --output_dir")
    if finished == args.steps:
        if args.process_index == 0:
            print(f"{out}: complete, all of its {finished} steps are done")
        raise SystemExit(0)
    made = max((row["step"] for row in files.read_jsonl(home(args) / "metrics.jsonl")), default=0)
    trl = saved["trl"]
    if trl["save_strategy"] == "steps" and made > trl["save_steps"] >= 1 and not start.step:
        line = f"{out}: it has made {made} steps, but has no checkpoint"
        raise ValueError(f"{line}; bring them back, or give another --output_dir")
    if finished and not start.step:
        raise ValueError(f"{out}: has no checkpoint to go on with; give another --output_dir")
    if refused:
        start.notes.append(f"begins anew: {refused}")
        return
    again = {**runlog.provenance(), "step": start.step, "changed": changes}
    now = {name: record[name] for name in ("settings", "digests", "code", "processes", "trl")}
    continuations = [*saved["continuations"], again]
    start.record = {**saved, **now, "continuations": continuations, "finished": 0}
    start.notes += [f"changed: {line}" for line in changes]


def refuse_coarse_weights(lm: Any) -> None:
    """ValueError unless all that learns is in fp32."""
    for name, p in model.trained(lm).items():
        if p.dtype != torch.float32:
            rule = "what learns must be in float32, as bf16 loses a step of 5e-6 (S22)"
            raise ValueError(f"--dtype: {name} is in {p.dtype}; {rule}")


def begin(args: SGSDConfig, start: Start) -> None:
    """The main process cuts the logs after the last checkpoint and writes config.json."""
    PartialState().wait_for_everyone()  # all have read the folder
    if args.process_index:
        return
    folder = home(args)
    for name in (*runlog.LOGS, "bank/replies"):
        if files.trim_jsonl(folder / f"{name}.jsonl", start.step):
            print(f"{name}.jsonl is cut after step {start.step}")
    for step, path in files.by_step(folder / "bank").items():
        if step > start.step:
            path.unlink()
        else:
            shutil.copyfile(path, folder / "bank/bank.json")  # the last one stays
    files.write_json(folder / "config.json", start.record)
    fingerprints = [problems.fingerprint(x.problem) for x in start.problems]
    files.write_json(folder / "problems.json", fingerprints)
    if args.push_to_hub:
        start.notes.append("push_to_hub uploads sgsd/, too, with problems and solutions")
    print("\n".join(start.notes), end="\n" * bool(start.notes))


def finish(args: SGSDConfig, start: Start) -> None:
    """The main process notes that the folder holds the weights after the last step."""
    if args.process_index == 0:
        files.write_json(home(args) / "config.json", start.record | {"finished": args.steps})


def save_version(args: SGSDConfig, bank: SkillBank, step: int) -> None:
    """The main process saves the bank in use after a step, changed or not."""
    if args.process_index == 0:
        folder = home(args) / "bank"
        bank.save(files.of_step(folder, step, ".json"))
        bank.save(folder / "bank.json")


def append(args: SGSDConfig, name: str, rows: list[dict]) -> None:
    """The main process appends rows to one of our logs."""
    if args.process_index == 0 and rows:
        files.append_jsonl(home(args) / f"{name}.jsonl", rows)
