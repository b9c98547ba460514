"""SGSD on TRL's GRPOTrainer: full weights, sharding, vLLM in the same process (docs/engines.md).

    accelerate launch --config_file extras/fsdp2.yaml -m extras.on_trl --full --bank bank.json
    python -m extras.on_trl --bank bank.json -- --use_vllm --vllm_mode colocate

The flags are those of sgsd.py. After a lone -- come TRL's, but only those that lay out a run. The
program needs extras/requirements.txt. `Trainer` is GRPO, and the base of other methods: their own
is `results`. A step of SGSD is a policy gradient whose advantage differs from token to token,

    A_t = -T dL / d log p_S(y_t).

By Eq. 20 that is T sum_k W_t^(k). So TRL's loss of type grpo, which takes the mean over a rollout's
T tokens, has SGSD's gradient as long as a batch is used for one step: its ratio is then 1. L is
`sgsd.loss_of`, by which sgsd.py trains, too, and autograd takes its derivative. So an edit of the
method reaches both.

TRL samples, shards and makes the steps. All else is as in sgsd.py: the run is a `lib.run.Run`, with
the same folder, logs, problems in each step, bank and rules for continuing. Only a checkpoint holds
TRL's files (weights, optimizer), beside the bank and the digests. TRL makes its own random draws,
so a run cannot be repeated exactly.

Dimension key: B rollouts of a process, K teachers, T completion tokens, L places of a padded row.
"""

import functools
import itertools
import math
import os
import pathlib
import re
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, HfArgumentParser, PrinterCallback, TrainerCallback

import distributed
import rollout
import sgsd
import skills
from lib import command, files, model, problems, runlog
from lib.config import Config, presets_of, setting
from lib.run import Run, exit_code, leave_out_long, lora_settings, should_stop

try:
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer.utils import add_fused_lm_head
except ImportError as e:
    command.fail("-m extras.on_trl", f"{e}; pip install -r extras/requirements.txt")

# ------------------------------------------------------------------------------------- settings


@dataclass(frozen=True)
class OnTRL:
    """The settings that a run on TRL has besides those of its method."""

    of_trl: ClassVar[dict[str, Any]] = {}  # TRL's own settings that the method changes
    needs_bank: ClassVar[bool] = False

    full: bool = setting(False, "train all weights, and not adapters", "on TRL")
    backward_rows: int = setting(
        4, "most rollouts in one backward pass of a process", "on TRL", free=True
    )
    keep_last: int = setting(
        0, "keep the last N checkpoints alone; 0 keeps all", "on TRL", least=0, free=True
    )


@dataclass(frozen=True)
class TRLConfig(OnTRL, Config):
    """SGSD's settings, and those of a run on TRL."""

    program: ClassVar[str] = "-m extras.on_trl"
    makes_bank: ClassVar[bool] = False
    needs_bank: ClassVar[bool] = True
    without: ClassVar[frozenset[str]] = frozenset(
        {"the first bank", "score_tokens", "checkpoint_above"}
    )
    generations: ClassVar[int] = 1  # teachers give the signal, not a group
    loss_temperature: ClassVar[float] = 1.0  # S5

    out: str = "runs/trl"
    score_rows: int = setting(
        9,
        "most rows in one forward pass of a solution's student and K teachers",
        "on TRL",
        free=True,
    )
    rollout_rows: int = setting(
        8,
        "replies of the bank's writer that a process decodes at a time; vLLM takes all",
        "looking inside, and memory",
        free=True,
    )


# TRL's settings that a user may give: they lay out a run, and change gradients only by rounding.
LAYOUT = re.compile(
    r"use_vllm|vllm_(?!importance|structured)\w+|fsdp\w*|bf16|ddp_(?!timeout)\w+"
    r"|(no_)?(gradient|activation)_checkpointing|(gradient|activation)_checkpointing_kwargs"
    r"|dataloader_(num_workers|prefetch_factor|persistent_workers)|(no_)?dataloader_pin_memory"
    r"|torch_empty_cache_steps|pad_to_multiple_of|log_level\w*"
)


class LayoutParser(HfArgumentParser):
    """The parser of TRL's flags; bad input is a ValueError."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"after --: {message}")


def settings_of(cfg: Any, words: Sequence[str], world: distributed.World) -> GRPOConfig:
    """TRL's settings for a run; ValueError for flags that change the training or fail later.

    words: TRL's flags of the command line, of which we accept only those of LAYOUT.
    """
    for word in words:
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if word.startswith("--") and not LAYOUT.fullmatch(name):
            raise ValueError(f"{word}: only what lays out TRL's run may follow --")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise ValueError("DeepSpeed was never tried; shard by FSDP, as extras/fsdp2.yaml does")
    solutions = cfg.batch_size * cfg.generations
    if solutions % world.size or solutions < 2:
        raise ValueError(
            f"--batch-size {cfg.batch_size}: solutions of a step must be 2 or more, and a multiple "
            f"of the number of processes, {world.size}"
        )
    share = solutions // world.size  # of a process
    rows = min(share, cfg.backward_rows)  # in one backward pass
    while share % rows:
        rows -= 1
    parser = LayoutParser(GRPOConfig, allow_abbrev=False)
    parser.set_defaults(
        **{
            "output_dir": cfg.out,
            "seed": cfg.seed % 2**32,
            "max_steps": cfg.steps,
            "learning_rate": cfg.learning_rate,
            "max_grad_norm": cfg.grad_clip,
            "per_device_train_batch_size": rows,
            "gradient_accumulation_steps": share // rows,
            "num_generations": solutions,  # TRL asks for two or more
            "shuffle_dataset": False,  # the order of problems is ours
            "max_completion_length": cfg.max_new_tokens,
            "temperature": cfg.loss_temperature or cfg.temperature,  # of the log-probabilities
            "loss_type": "grpo",  # the mean over a rollout's tokens, then over rollouts
            "disable_dropout": True,  # teacher and student are one function of their input
            "vllm_importance_sampling_correction": False,  # the loss has no ratio to the sampler
            "router_aux_loss_coef": 0.0,  # no second loss on a mixture of experts
            "bf16": world.device.type == "cuda",
            "use_cpu": world.device.type == "cpu",
            "save_strategy": "no",  # `Loop` decides when to save
            "logging_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        | cfg.of_trl
    )
    args: Any = parser.parse_args_into_dataclasses([*words], look_for_args_file=False)[0]
    args.num_generations = cfg.generations
    args.model_init_kwargs = {"dtype": dtype_of(cfg, args), "attn_implementation": cfg.attn}
    if args.n_gpu > 1:
        raise ValueError(f"{args.n_gpu} GPUs: start a process for each, by accelerate or torchrun")
    return args


def dtype_of(cfg: Any, args: GRPOConfig) -> str:
    """The dtype in which we load the model; ValueError for bf16 where weights must be in fp32.

    A step of 5e-6 is lost in bf16, so what learns is in fp32 (S22). For vLLM, TRL adds adapters to
    their base at each step, and then subtracts them: in bf16 that changes the base (trl#6688).
    """
    needs_fp32 = cfg.full or args.use_vllm
    if needs_fp32 and cfg.dtype == "bfloat16":
        raise ValueError(f"--dtype {cfg.dtype}: must be float32 with --full, or with vLLM (S22)")
    auto = "bfloat16" if args.device.type == "cuda" and not needs_fp32 else "float32"
    return auto if cfg.dtype == "auto" else cfg.dtype


# -------------------------------------------------------------------------------------- the trainer


class Trainer(GRPOTrainer):
    """GRPO, with our problems in their order, prompts, verdicts, logs and stop ids, sharded or not.

    Another method writes its own `results`. run: its model may still be an outline. TRL loads `lm`,
    a name or a model, and the run gets it. kwargs: of GRPOTrainer, such as `peft_config`.
    Of the latest step, `rolls` are this process's rollouts, `rows` theirs of rollouts.jsonl, and
    `norm` is that of the gradient.
    """

    def __init__(self, run: Any, args: Any, lm: Any, **kwargs: Any):
        self.run = run
        # All steps are one epoch (line 2): TRL's sampler restarts with the first epoch's order.
        data: list[dict] = []
        for step in range(1, run.cfg.steps + 1):
            batch = problems.minibatch(run.problems, run.cfg.batch_size, step, run.cfg.seed)
            data += [{"prompt": x.problem} for x, _ in batch]
        super().__init__(
            lm,
            reward_funcs=[self.rewards],
            args=args,
            train_dataset=Dataset.from_list(data),
            processing_class=run.tokenizer,
            **kwargs,
        )
        args.output_dir = str(run.out / "checkpoints/.trl.tmp")  # TRL's place for a checkpoint
        self.eos_token_ids = run.stops
        run.lm = model.causal_lm(self.model)
        run.stream = self.stream
        model.remove_dropout(self.model)  # TRL's disable_dropout skips floats
        self.refuse_wrong_numbers()
        # TRL's head rounds to bf16, with errors of up to 0.1 nats; eps_a is 0.05 nats.
        add_fused_lm_head(
            run.lm, self.temperature, cast_lm_head_to_fp32=True, outputs=("log_probs", "entropy")
        )
        self.set_up_shards()
        self.remove_callback(PrinterCallback)  # it prints TRL's numbers
        self.add_callback(Loop(self))

    def refuse_wrong_numbers(self) -> None:
        """ValueError for weights with NaN, and for a model that reads left padding."""
        lm = self.run.lm
        cfg = self.run.cfg
        # GPUs get their shards, and other ranks weights, only when training begins.
        if not self.run.world.main or (lm.device.type, cfg.attn) == ("cpu", "flash_attention_2"):
            return
        model.refuse_not_finite(lm.named_parameters())
        ids_2L = torch.tensor([[0, 0, 0, 1, 2, 3], [1, 2, 3, 0, 0, 0]], device=lm.device)
        left_LV, right_LV = lm(input_ids=ids_2L, attention_mask=ids_2L.sign()).logits.detach()
        limit = max(1e-3, torch.finfo(lm.dtype).eps ** 0.5)  # 9% in bf16, for its rounding
        if model.difference(left_LV[3:], right_LV[:3]) > limit:
            raise ValueError(
                f"--model {cfg.model}: its positions or states take in left padding, which TRL "
                "adds; take another model"
            )

    def set_up_shards(self) -> None:
        """Set up what FSDP2 does not do by itself; ValueError for FSDP that fails in the end."""
        if not self.is_fsdp_enabled:
            return
        plugin = self.accelerator.state.fsdp_plugin
        if not self.accelerator.is_fsdp2 or "FULL" not in str(plugin.state_dict_type):
            raise ValueError("FSDP: must be version 2 with FULL_STATE_DICT, see fsdp2.yaml")
        # Completions end at different lengths, and each forward pass is a collective.
        self.model.generate = functools.partial(self.model.generate, synced_gpus=True)
        # accelerate makes it sum gradients in bf16, and round all that the model returns to bf16,
        # log-probabilities too.
        if plugin.mixed_precision_policy is not None:
            plugin.mixed_precision_policy = replace(
                plugin.mixed_precision_policy, reduce_dtype=torch.float32, output_dtype=None
            )

    # ------------------------------------------------------------------------------ sampling

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict]:
        """The student's prompts as sgsd.py makes them (S3), for TRL to sample from."""
        cfg = self.run.cfg
        ids = [sgsd.student_prompt(self.run, problem) for problem in prompts]
        self.draw_by(
            rollout.Sampling(temperature=cfg.temperature, top_p=cfg.top_p, top_k=cfg.top_k),
            cfg.max_new_tokens,
            max(map(len, ids)) + cfg.max_new_tokens,
        )
        return ids, None, {}

    def draw_by(self, sampling: rollout.Sampling, limit: int, tokens: int) -> None:
        """Set how `generate` or vLLM samples from now on.

        limit: most tokens of a completion. tokens: what vLLM must hold; UserError if it cannot.
        """
        most = self.args.vllm_max_model_length
        if self.use_vllm and most and tokens > most:
            raise command.UserError(
                f"--vllm_max_model_length {most}: raise it, as a prompt and its reply may have "
                f"{tokens} tokens"
            )
        drawn: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        }
        if self.use_vllm:  # greedy at a temperature of 0
            self.vllm_generation.generation_kwargs = {
                **drawn,
                "max_tokens": limit,
                "stop_token_ids": self.run.stops,
            }
        else:
            self.generation_config = GenerationConfig(
                max_new_tokens=limit,
                eos_token_id=self.run.stops,
                pad_token_id=self.run.tokenizer.pad_token_id,
                disable_compile=True,
                do_sample=sampling.temperature > 0,
                **(drawn if sampling.temperature else {}),
            )

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """As in TRL, but `generate` takes nothing from the model's own generation_config."""
        own = self.run.lm.generation_config
        self.run.lm.generation_config = GenerationConfig()
        try:
            return super()._generate_single_turn(*args, **kwargs)
        finally:
            self.run.lm.generation_config = own

    def stream(
        self, jobs: list[rollout.Job], sampling: rollout.Sampling, rows: int
    ) -> Iterator[list[rollout.Job]]:
        """Replaces `rollout.stream` for the bank's writer; vLLM takes all jobs at once.

        Under sharding all processes must call `generate` equally often; with vLLM also with equally
        many prompts and the same limit. So a process with fewer jobs repeats a prompt, or a stop
        id. A call's limit is at most what the context leaves after its longest prompt.
        """
        sizes_of_ranks = distributed.all_gather(
            [(len(job.prompt), job.limit) for job in jobs], self.run.world
        )
        most = max(map(len, sizes_of_ranks))
        rows = most if self.use_vllm else rows
        for start in range(0, most, rows):
            turn = jobs[start : start + rows]
            turns = [sizes[start : start + rows] for sizes in sizes_of_ranks]
            prompts = [job.prompt for job in turn] or [self.run.stops[:1]]
            prompts += prompts[:1] * (max(map(len, turns)) - len(prompts))
            longest = limit = 0
            for length, left in itertools.chain.from_iterable(turns):
                longest = max(longest, length)
                limit = max(limit, left)
            room = rollout.context_limit(self.run.lm) - longest
            self.draw_by(sampling, int(min(limit, room)), longest + 1)
            for job, ids in zip(turn, self._generate_single_turn(prompts, None, {}, 1)[0]):
                job.ids = ids[: job.limit]
            yield turn

    # ------------------------------------------------------------------------------ a batch

    def rewards(self, prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        """TRL's reward function: judges the rollouts, with the ids that TRL trains on.

        prompts: the problems' texts.
        """
        run = self.run
        x_of = {x.problem: x for x in run.problems}
        jobs = []
        for problem, ids in zip(prompts, completion_ids):
            prompt = sgsd.student_prompt(run, problem)
            jobs.append(rollout.Job(0, prompt, 0, 0, x_of[problem], ids))
        (judged,) = rollout.rollouts(run.tokenizer, run.stops, run.verifier, [jobs])
        self.rolls = [roll for _, roll in judged]
        run.clock.lap("gen")
        return [sgsd.reward(roll) for roll in self.rolls]

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict[str, Any]:
        """TRL's batch of this process, with the method's advantages."""
        output = super()._generate_and_score_completions(inputs)
        run = self.run
        first = run.world.rank * len(inputs)
        self.rows = []
        for b, (pairs_K, result) in enumerate(self.results(output)):
            result = result._replace(pairs_K=pairs_K)
            row = sgsd.log_row(run, run.step + 1, first + b, self.rolls[b], result)
            self.rows.append(row)
        run.clock.lap("score")
        return output

    def results(self, output: dict[str, Any]) -> Iterator[tuple[list, sgsd.RolloutLoss]]:
        """The pairs and the loss of each of `rolls`, in order; here GRPO's, by TRL's advantages.

        output: TRL's batch. A method may change its "advantages", [B] or for each token [B, T].
        """
        for advantage in output["advantages"].clone():
            numbers = {"advantage": advantage, "mixed": (advantage != 0).float()}
            yield [], sgsd.RolloutLoss(-advantage, numbers, {})

    # ------------------------------------------------------------------------------- its end

    def _get_grad_norm(self, lm: Any, grad_norm: Any = None) -> Any:
        """The norm before clipping. If it is not finite, we drop all gradients: AdamW does nothing.

        The norm is that of all processes. A process's own gradients may not tell: clipping by an
        infinite norm turns finite gradients to zeros.
        """
        self.run.clock.lap("bwd")
        norm = super()._get_grad_norm(lm, grad_norm)
        self.norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not math.isfinite(self.norm):
            lm.zero_grad()
        return norm

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """As in TRL, but in a temporary folder; the run moves the checkpoint to its own place."""
        try:
            super()._save_checkpoint(*args, **kwargs)
        except Exception as e:  # torch and safetensors raise other kinds for a full disk
            raise OSError(f"{self.args.output_dir}: {e}") from None
        distributed.barrier(self.run.world)  # each process has written its own files
        self.run.save()
        if self.run.world.main:
            shutil.rmtree(self.args.output_dir)
            saved = files.by_step(self.run.out / "checkpoints").values()
            for old in [*saved][: -self.run.cfg.keep_last]:  # none if keep_last is 0
                shutil.rmtree(old.rename(old.with_name(f".{old.name}.tmp")))


class SGSDTrainer(Trainer):
    """Trainer whose advantages [B, T] are SGSD's."""

    def results(self, output: dict[str, Any]) -> Iterator[tuple[list, sgsd.RolloutLoss]]:
        """Lines 4 to 14, rollout by rollout; A_t = -T dL/dlog p_S(y_t) are the advantages."""
        run = self.run
        A_BT = torch.zeros(output["completion_ids"].shape, device=run.device)
        for A_T, roll in zip(A_BT, self.rolls):
            all_K = run.bank.retrieve(roll.problem, run.cfg.num_teachers, run.embed)
            pairs_K, contexts_K = sgsd.teacher_prompts(run, all_K, roll.problem, roll)
            # All ranks must make equally many passes, so we score a dummy row for each teacher that
            # was left out.
            spare = [roll.prompt_ids] * (len(all_K) - len(pairs_K))
            logps = self.score([roll.prompt_ids, *contexts_K, *spare], roll.completion_ids)
            logpS_T = logps[0].requires_grad_()
            logpT_KT = logps[1 : 1 + len(pairs_K)]
            ids_T = torch.tensor(roll.completion_ids, device=run.device)
            mask_T = sgsd.token_mask(ids_T, run.masked_ids)
            alpha_K = sgsd.pair_weights(run, pairs_K)
            r = sgsd.reward(roll)
            with torch.enable_grad(), torch.autocast(run.device.type, enabled=False):
                loss, numbers = sgsd.loss_of(run.cfg, logpT_KT, logpS_T, mask_T, alpha_K, r)
                (slope_T,) = torch.autograd.grad(loss, logpS_T)
            A_T[: len(slope_T)] = -len(slope_T) * slope_T
            yield pairs_K, sgsd.result_of(loss.detach(), numbers)
        output["advantages"] = A_BT

    @torch.no_grad()
    def score(self, contexts: list[list[int]], ids_T: list[int]) -> Tensor:
        """log p of a completion under each context, fp32 nats [contexts, T] (Eqs. 4 and 5).

        We pad rows on the right (D6), and take score_rows at a time. So all processes make equally
        many passes, which under sharding are collectives.
        """
        logps = []
        size = self.run.cfg.score_rows
        for start in range(0, len(contexts), size):
            pack = contexts[start : start + size]
            rows = [torch.tensor(context + ids_T) for context in pack]
            labels = [torch.tensor([-100] * len(context) + ids_T) for context in pack]
            ids_BL = pad_sequence(rows, batch_first=True).to(self.run.device)
            labels_BL = pad_sequence(labels, batch_first=True, padding_value=-100).to(ids_BL.device)
            with self.accelerator.autocast():
                out = self.model(input_ids=ids_BL, labels=labels_BL, fused_lm_head=True)
            for context, logp_L in zip(pack, out.log_probs):  # place t - 1 predicts token t
                logps.append(logp_L[len(context) - 1 :][: len(ids_T)].float())
        return torch.stack(logps)


# ------------------------------------------------------------------------------------- the loop


class Loop(TrainerCallback):
    """Does around TRL's steps what `sgsd.train` does around its own."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.run = trainer.run

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        run = self.run
        run.optimizer = self.trainer.optimizer
        for group in run.optimizer.param_groups:  # a checkpoint's rate is of its old --steps (S7)
            group["lr"] = run.cfg.learning_rate * ((run.cfg.steps - run.step) / run.cfg.steps)
        if run.cfg.uses_skill_bank:
            sgsd.begin_bank(run)
        sgsd.evolve_bank(run)  # only where a kill or a signal has left an evolution due

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.run.clock = runlog.Stopwatch()
        self.run.signals.in_step = True  # from here to the save a first signal waits

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the step, while the optimizer still has its learning rate."""
        run = self.run
        rows = distributed.gathered(self.trainer.rows, run.world)
        run.clock.lap("opt")
        run.step = state.global_step + 1
        run.skipped = 0 if math.isfinite(self.trainer.norm) else run.skipped + 1
        if run.cfg.evolves:
            run.bank.remember(rows)  # W of Algorithm 4
        run.log(rows, self.trainer.norm)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = should_stop(self.run) or self.run.save_is_due()
        self.run.signals.in_step = control.should_save

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if should_stop(self.run):  # before or during the save
            control.should_training_stop = True
            return
        self.run.signals.in_step = False
        sgsd.evolve_bank(self.run)  # line 17, where F divides the step: a save comes before


# -------------------------------------------------------------------------------------- the command


@dataclass(kw_only=True)
class RunOnTRL(Run):
    """A run whose model, steps and checkpoints are TRL's."""

    trainer: Any = None

    def save_weights(self, folder: pathlib.Path) -> None:
        """Move the trainer's own checkpoint of the last step to this folder."""
        pathlib.Path(self.trainer.args.output_dir, f"checkpoint-{self.step}").rename(folder)


def load(trainer: type[Trainer], words: Sequence[str], run: RunOnTRL) -> None:
    """Replaces `lib.run.load_run`. trainer: its class. words: TRL's flags of the command line."""
    cfg = run.cfg
    if cfg.needs_bank and run.bank is None:
        raise ValueError("SGSD on TRL needs a --bank; sgsd.py --steps 0 makes one")
    if cfg.full and cfg.adapter:
        raise ValueError(f"--adapter {cfg.adapter}: with --full give whole weights, by --model")
    args = settings_of(cfg, words, run.world)
    if cfg.uses_skill_bank:
        run.embed = model.load_encoder(cfg.encoder, run.device)
    run.lm, run.tokenizer = model.load_outline(cfg.model)
    lora = None
    if not cfg.full:  # it refuses a model that adapters do not reach whole
        lora = model.with_adapters(run.lm, *lora_settings(run)).peft_config["default"]
    model.load_model(cfg.model, "meta")  # refuses missing weights, which TRL would let pass
    # TRL ends all replies of a batch at one limit, and none with the context.
    leave_out_long(run, sgsd.student_prompt, cfg.max_new_tokens)
    run.trainer = trainer(run, args, run.lm.name_or_path, peft_config=lora)
    if cfg.adapter and not run.checkpoint:
        if run.world.main:  # the other ranks may have no weights yet
            model.restore(cfg.adapter, run.trainer.model)
        distributed.broadcast_parameters(model.trained(run.lm).values(), run.world)


def main(
    argv: Sequence[str] | None = None,
    doc: str | None = __doc__,
    config_class: type[Any] = TRLConfig,
    trainer: type[Trainer] = SGSDTrainer,
) -> int:
    """The command of SGSD, or of another method; returns its exit code.

    doc: the method's docstring, for --help. config_class: the class of its settings. If the folder
    has a run, the command continues it.
    """
    words = [*(sys.argv[1:] if argv is None else argv)]
    end = words.index("--") if "--" in words else len(words)
    if any("vllm" in word for word in words[end:]):  # vLLM's sleep mode refuses expandable segments
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    # TRL and PEFT use names that transformers 5.24 deprecates.
    warnings.filterwarnings("ignore", ".*gradient_checkpointing.* is deprecated", FutureWarning)
    cfg = command.parse(words[:end], doc, config_class, presets_of(config_class))
    with RunOnTRL.open(
        cfg,
        skills.SkillBank.load,
        sgsd.student_prompt,
        functools.partial(load, trainer, words[end + 1 :]),
    ) as run:
        run.trainer.train(run.checkpoint)
        return exit_code(run)


if __name__ == "__main__":
    distributed.run_and_exit(main)
