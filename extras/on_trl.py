"""SGSD on TRL's GRPOTrainer: full weights, sharding, vLLM in the same process (docs/engines.md).

    accelerate launch --config_file extras/fsdp2.yaml -m extras.on_trl --full --bank bank.json
    python -m extras.on_trl --bank bank.json -- --use_vllm --vllm_mode colocate

The flags are those of sgsd.py. After a lone -- come TRL's, but only those that lay out a run. The
program needs extras/requirements.txt. A step of SGSD is a policy gradient whose advantage differs
from token to token,

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

import contextlib
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
from accelerate.utils import DistributedType
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, HfArgumentParser, PrinterCallback, TrainerCallback

import distributed
import rollout
import sgsd
import skills
from distributed import World
from lib import command, config, files, model, problems, runlog, verify
from lib.config import Config, setting
from lib.run import Run, exit_code, leave_out_long, lora_settings, should_stop
from rollout import Job, Rollout, Sampling
from skills import SkillPair

try:
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer.utils import add_fused_lm_head
except ImportError as e:
    command.fail("-m extras.on_trl", f"{e}; pip install -r extras/requirements.txt")

# ------------------------------------------------------------------------------------- settings


@dataclass(frozen=True)
class OnTRL:
    """The settings that a run on TRL has besides those of its method."""

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
    without: ClassVar[frozenset[str]] = frozenset(
        {"the first bank", "score_tokens", "checkpoint_above"}
    )

    out: str = "runs/trl"
    score_rows: int = setting(8, "rows in one forward pass of the teachers", "on TRL", free=True)
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


def settings_of(cfg: TRLConfig, words: Sequence[str], world: World) -> GRPOConfig:
    """TRL's settings for a run of SGSD; arguments and errors are those of `trl_settings`."""
    args = trl_settings(
        cfg,
        words,
        world,
        cfg.batch_size,
        temperature=1.0,  # of the log-probabilities (S5)
        num_generations=cfg.batch_size,  # TRL asks for two or more
        save_strategy="no",  # `Loop` decides when to save
        logging_strategy="no",
        report_to="none",
    )
    args.num_generations = 1  # one solution a problem: teachers give the signal, not a group
    return args


def trl_settings(
    cfg: Any, words: Sequence[str], world: World, solutions: int, **method: Any
) -> GRPOConfig:
    """TRL's settings for a run; ValueError for flags that change the training or fail later.

    words: TRL's flags of the command line, of which we accept only those of LAYOUT. solutions: the
    number of solutions in a step, over all processes. method: more of TRL's settings.
    """
    for word in words:
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if word.startswith("--") and not LAYOUT.fullmatch(name):
            raise ValueError(f"{word}: only what lays out TRL's run may follow --")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise ValueError("DeepSpeed was never tried; shard by FSDP, as extras/fsdp2.yaml does")
    if solutions % world.size or solutions < 2:
        rule = f"2 or more, and a multiple of the number of processes, {world.size}"
        raise ValueError(f"--batch-size {cfg.batch_size}: solutions of a step must be {rule}")
    share = solutions // world.size  # of a process
    rows = max(n for n in range(1, min(share, cfg.backward_rows) + 1) if share % n == 0)
    kind: Any = GRPOConfig
    parser = LayoutParser(kind, allow_abbrev=False)
    parser.set_defaults(
        output_dir=cfg.out,
        seed=cfg.seed % 2**32,
        max_steps=cfg.steps,
        learning_rate=cfg.learning_rate,
        max_grad_norm=cfg.grad_clip,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=share // rows,
        shuffle_dataset=False,  # the order of problems is ours
        max_completion_length=cfg.max_new_tokens,
        generation_kwargs={"temperature": cfg.temperature},  # for `generate` and vLLM
        top_p=cfg.top_p,
        top_k=cfg.top_k,
        loss_type="grpo",  # the mean over a rollout's tokens, then over rollouts
        disable_dropout=True,  # teacher and student are one function of their input
        vllm_importance_sampling_correction=False,  # the loss has no ratio to the sampler
        router_aux_loss_coef=0.0,  # no second loss on a mixture of experts
        bf16=world.device.type == "cuda",
        use_cpu=world.device.type == "cpu",
        disable_tqdm=True,
        **method,
    )
    args: Any = parser.parse_args_into_dataclasses([*words], look_for_args_file=False)[0]
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
    if cfg.dtype == "auto":
        return "bfloat16" if args.device.type == "cuda" and not needs_fp32 else "float32"
    if needs_fp32 and cfg.dtype != "float32":
        raise ValueError(f"--dtype {cfg.dtype}: must be float32 with --full, or with vLLM (S22)")
    return cfg.dtype


# -------------------------------------------------------------------------------------- the trainer


class Trainer(GRPOTrainer):
    """GRPOTrainer with our problems in their order, prompts and stop ids, sharded or not.

    run: its model may still be an outline. TRL loads `lm`, a name or a model, and the run gets it.
    reward: TRL's reward function. kwargs: of GRPOTrainer, such as `peft_config`.
    """

    args: Any
    model: Any
    norm = 0.0  # of the latest step's gradient

    def __init__(self, run: Any, args: Any, lm: Any, reward: Any, **kwargs: Any):
        self.run = run
        # All steps are one epoch (line 2): TRL's sampler restarts with the first epoch's order.
        data: list[dict] = []
        for step in range(1, run.cfg.steps + 1):
            batch = problems.minibatch(run.problems, run.cfg.batch_size, step, run.cfg.seed)
            data += [{"prompt": x.problem, "index": i} for i, (x, _) in enumerate(batch)]
        args.generation_kwargs["stop_token_ids" if args.use_vllm else "eos_token_id"] = run.stops
        super().__init__(
            lm,
            reward_funcs=[reward],
            args=args,
            train_dataset=Dataset.from_list(data),
            processing_class=run.tokenizer,
            **kwargs,
        )
        self.eos_token_ids = run.stops
        run.lm = model.causal_lm(self.model)
        model.remove_dropout(self.model)  # TRL's disable_dropout skips floats
        self.refuse_what_fails_later()
        # TRL's head rounds to bf16, with errors of up to 0.1 nats; eps_a is 0.05 nats.
        add_fused_lm_head(
            run.lm, self.temperature, cast_lm_head_to_fp32=True, outputs=("log_probs", "entropy")
        )
        self.set_up_shards()

    def refuse_what_fails_later(self) -> None:
        """ValueError for FSDP that fails in the end, a model that reads left padding, and NaN."""
        if self.accelerator.distributed_type == DistributedType.FSDP:
            kind = str(self.accelerator.state.fsdp_plugin.state_dict_type)
            if not self.accelerator.is_fsdp2 or "FULL" not in kind:
                raise ValueError("FSDP: must be version 2 with FULL_STATE_DICT, see fsdp2.yaml")
        lm, cfg = self.run.lm, self.run.cfg
        is_elsewhere = lm.device.type == "cpu" and cfg.attn == "flash_attention_2"
        if is_elsewhere or not self.run.world.main:
            return  # GPUs get their shards, and other ranks weights, only when training begins
        try:
            model.refuse_not_finite(lm.named_parameters())
            ids_2L = torch.tensor([[0, 0, 0, 1, 2, 3], [1, 2, 3, 0, 0, 0]], device=lm.device)
            left_LV, right_LV = lm(input_ids=ids_2L, attention_mask=ids_2L.sign()).logits.detach()
            limit = max(1e-3, torch.finfo(lm.dtype).eps ** 0.5)  # 9% in bf16, for its rounding
            if model.difference(left_LV[3:], right_LV[:3]) > limit:
                raise ValueError("its positions or states take in left padding, which TRL adds")
        except ValueError as e:
            raise ValueError(f"--model {cfg.model}: {e}; take another model") from None

    def set_up_shards(self) -> None:
        """Set up what FSDP2 does not do by itself."""
        if self.accelerator.distributed_type != DistributedType.FSDP:
            return
        # Completions end at different lengths, and each forward pass is a collective.
        self.model.generate = functools.partial(self.model.generate, synced_gpus=True)
        # accelerate makes it sum gradients in bf16, and round all that the model returns to bf16,
        # log-probabilities too.
        plugin = self.accelerator.state.fsdp_plugin
        if plugin.mixed_precision_policy is not None:
            plugin.mixed_precision_policy = replace(
                plugin.mixed_precision_policy, reduce_dtype=torch.float32, output_dtype=None
            )

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict]:
        """The student's prompts as sgsd.py makes them (S3), for TRL to sample from."""
        ids = [sgsd.student_prompt(self.run, problem) for problem in prompts]
        self.refuse_beyond_engine(ids, self.run.cfg.max_new_tokens)
        return ids, None, {}

    def refuse_beyond_engine(self, prompts: list[list[int]], reply: int) -> None:
        """UserError for a prompt that vLLM would refuse, or a reply that it would cut."""
        most = self.args.vllm_max_model_length
        longest = max(map(len, prompts)) + reply
        if self.use_vllm and most and longest > most:
            fix = f"raise it, as a prompt and its reply may have {longest} tokens"
            raise command.UserError(f"--vllm_max_model_length {most}: {fix}")

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """As in TRL, but `generate` takes nothing from the model's own generation_config."""
        lm = self.run.lm
        own, lm.generation_config = lm.generation_config, GenerationConfig()
        try:
            return super()._generate_single_turn(*args, **kwargs)
        finally:
            lm.generation_config = own

    def _get_grad_norm(self, lm: Any, grad_norm: Any = None) -> Any:
        """The norm before clipping. If it is not finite, we drop all gradients: AdamW does nothing.

        The norm is that of all processes. A process's own gradients may not tell: clipping by an
        infinite norm turns finite gradients to zeros.
        """
        norm = super()._get_grad_norm(lm, grad_norm)
        self.norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if not math.isfinite(self.norm):
            for p in lm.parameters():
                p.grad = None
        return norm


class SGSDTrainer(Trainer):
    """Trainer whose advantages [B, T] are SGSD's."""

    is_stopped = False  # by a signal or bad steps

    def __init__(self, run: "RunOnTRL", args: Any, lm: Any, **kwargs: Any):
        # TRL asks for rewards; the advantages are our own.
        super().__init__(run, args, lm, lambda prompts, **_: [0.0] * len(prompts), **kwargs)
        args.output_dir = str(run.out / "checkpoints/.trl.tmp")  # TRL's place for a checkpoint
        run.stream = self.stream
        self.remove_callback(PrinterCallback)  # it prints TRL's numbers, with a reward of 0
        self.add_callback(Loop(self))

    # ------------------------------------------------------------------------------ a batch

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict[str, Any]:
        """TRL's batch, with SGSD's advantages (lines 4 to 14)."""
        output, run = super()._generate_and_score_completions(inputs), self.run
        texts = [row["prompt"] for row in inputs]
        rows = zip(output["completion_ids"], output["completion_mask"].bool())
        rolls = rollouts_of(run, texts, [ids_T[mask_T].tolist() for ids_T, mask_T in rows])
        run.clock.lap("gen")
        pairs_BK, contexts, completions = [], [], []
        for roll in rolls:
            all_K = run.bank.retrieve(roll.problem, run.cfg.num_teachers, run.embed)
            pairs_K, contexts_K = sgsd.teacher_prompts(run, all_K, roll.problem, roll)
            pairs_BK.append(pairs_K)
            # Passes are collectives: a teacher that is left out leaves a row, which is not read.
            spare = [roll.prompt_ids] * (len(all_K) - len(pairs_K))
            contexts += [roll.prompt_ids, *contexts_K, *spare]
            completions += [roll.completion_ids] * (1 + len(all_K))
        logps = iter(self.score(contexts, completions))
        A_BT = torch.zeros(output["completion_ids"].shape, device=run.device)
        self.rows: list[dict] = []  # rows of rollouts.jsonl, of this step and process
        for b, (row, roll, pairs_K) in enumerate(zip(inputs, rolls, pairs_BK)):
            logpS_T, *of_teachers = itertools.islice(logps, 1 + len(all_K))
            logpT_KT = torch.stack([logpS_T, *of_teachers])[1 : 1 + len(pairs_K)]
            A_T, result = self.advantage(roll, pairs_K, logpS_T, logpT_KT)
            A_BT[b, : len(A_T)] = A_T
            self.rows.append(sgsd.log_row(run, run.step + 1, row["index"], pairs_K, roll, result))
        run.clock.lap("score")
        return output | {"advantages": A_BT}

    @torch.no_grad()
    def score(self, contexts: list[list[int]], completions: list[list[int]]) -> list[Tensor]:
        """log p of each row's completion under its context, fp32 nats [T] (Eqs. 4 and 5).

        We take rows of similar length together, padded on the right (D6), score_rows at a time. So
        all processes make equally many passes, which under sharding are collectives.
        """
        logps: dict[int, Tensor] = {}
        size = self.run.cfg.score_rows
        order = sorted(range(len(contexts)), key=lambda i: len(contexts[i]) + len(completions[i]))
        for start in range(0, len(order), size):
            pack = order[start : start + size]
            rows, labels = [], []
            for i in pack:
                rows.append(torch.tensor(contexts[i] + completions[i]))
                labels.append(torch.tensor([-100] * len(contexts[i]) + completions[i]))
            ids_BL = pad_sequence(rows, batch_first=True).to(self.run.device)
            labels_BL = pad_sequence(labels, batch_first=True, padding_value=-100).to(ids_BL.device)
            with self.accelerator.autocast():
                out = self.model(input_ids=ids_BL, labels=labels_BL, fused_lm_head=True)
            for b, i in enumerate(pack):
                start_T = len(contexts[i]) - 1  # place t - 1 predicts token t
                logps[i] = out.log_probs[b, start_T : start_T + len(completions[i])].float()
        return [logps[i] for i in range(len(contexts))]

    def advantage(
        self, roll: Rollout, pairs_K: list[SkillPair], logpS_T: Tensor, logpT_KT: Tensor
    ) -> tuple[Tensor, sgsd.RolloutLoss]:
        """-T dL/dlog p_S(y_t) of a rollout [T], and the loss with its numbers for the logs.

        logpS_T [T], logpT_KT [K, T]: log-probabilities of the student and its teachers, in nats.
        """
        run, logpS_T = self.run, logpS_T.detach().requires_grad_()
        ids_T = torch.tensor(roll.completion_ids, device=logpS_T.device)
        mask_T = sgsd.token_mask(ids_T, sgsd.masked_ids(run))
        alpha_K, r = sgsd.pair_weights(run, pairs_K), sgsd.reward(roll)
        with torch.enable_grad(), torch.autocast(logpS_T.device.type, enabled=False):
            loss, numbers = sgsd.loss_of(run.cfg, logpT_KT, logpS_T, mask_T, alpha_K, r)
            (slope_T,) = torch.autograd.grad(loss, logpS_T)
        return -len(logpS_T) * slope_T, sgsd.for_the_logs(loss.detach(), numbers)

    # ------------------------------------------------------------------------------- its end

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """As in TRL, but in a temporary folder; the run moves the checkpoint to its own place."""
        folder = pathlib.Path(self.args.output_dir)
        try:
            super()._save_checkpoint(*args, **kwargs)
        except Exception as e:  # torch and safetensors raise other kinds for a full disk
            raise OSError(f"{folder}: {e}") from None
        distributed.barrier(self.run.world)  # each process has written its own files
        self.run.save()
        if self.run.world.main:
            shutil.rmtree(folder)
            checkpoints = [*files.by_step(folder.parent).values()]
            for old in checkpoints[: -self.run.cfg.keep_last]:  # none if keep_last is 0
                shutil.rmtree(old)

    # ------------------------------------------------------------------------------- the bank

    def stream(self, jobs: list[Job], sampling: Sampling, rows: int) -> Iterator[list[Job]]:
        """Replaces `rollout.stream` for the bank's writer; vLLM takes all jobs at once.

        Under sharding all processes must call `generate` equally often; with vLLM also with equally
        many prompts and the same limit. So a process with fewer jobs repeats a prompt, or a stop
        id. The limit is at most what the context leaves after the longest prompt.
        """
        sizes = [(len(job.prompt), job.tokens_left) for job in jobs]
        sizes_of_ranks = distributed.all_gather(sizes, self.run.world)
        most = max(map(len, sizes_of_ranks))
        rows = most if self.use_vllm else rows
        for start in range(0, most, rows):
            turn = jobs[start : start + rows]
            turns = [sizes[start : start + rows] for sizes in sizes_of_ranks]
            prompts = [job.prompt for job in turn] or [self.run.stops[:1]]
            prompts += prompts[:1] * (max(map(len, turns)) - len(prompts))
            lengths, lefts = zip(*itertools.chain.from_iterable(turns))
            limit = int(min(max(lefts), rollout.context_limit(self.run.lm) - max(lengths)))
            for job, ids in zip(turn, self.decode(prompts, sampling, limit)):
                job.ids = ids[: job.tokens_left]
            yield turn

    def decode(self, prompts: list[list[int]], sampling: Sampling, limit: int) -> list[list[int]]:
        """Completions of prompts by the present policy, with other sampling than in a step."""
        self.refuse_beyond_engine(prompts, 1)
        drawn: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        }
        holder: Any = self.vllm_generation if self.use_vllm else self
        if self.use_vllm:  # greedy at a temperature of 0
            name = "generation_kwargs"
            settings: Any = {**drawn, "max_tokens": limit, "stop_token_ids": self.run.stops}
        else:
            name = "generation_config"
            settings = GenerationConfig(
                max_new_tokens=limit,
                eos_token_id=self.run.stops,
                pad_token_id=self.run.tokenizer.pad_token_id,
                do_sample=sampling.temperature > 0,
                **(drawn if sampling.temperature else {}),
            )
        of_a_step = getattr(holder, name)
        setattr(holder, name, settings)
        try:
            return self._generate_single_turn(prompts, None, {}, 1)[0]
        finally:
            setattr(holder, name, of_a_step)


def rollouts_of(run: Run, texts: list[str], completions: list[list[int]]) -> list[Rollout]:
    """The rollouts of problems, with the ids that TRL trains on. texts: of the problems."""
    problem_of, jobs = {x.problem: x for x in run.problems}, []
    for text, ids in zip(texts, completions):
        prompt = sgsd.student_prompt(run, text)
        jobs.append(Job(0, prompt, key=0, tokens_left=0, problem=problem_of[text], ids=ids))
    (judged,) = rollout.rollouts(run.tokenizer, run.stops, run.verifier, [jobs])
    return [roll for _, roll in judged]


# ------------------------------------------------------------------------------------- the loop


class Loop(TrainerCallback):
    """Does around TRL's steps what `sgsd.train` does around its own."""

    def __init__(self, trainer: SGSDTrainer):
        self.trainer, self.run = trainer, trainer.run

    def set_rate(self, step: int) -> None:
        """Set the learning rate of a step (S7). TRL's scheduler follows its checkpoint's rate."""
        cfg = self.run.cfg
        for group in self.run.optimizer.param_groups:
            group["lr"] = cfg.learning_rate * (1 - (step - 1) / cfg.steps)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.run.optimizer = self.trainer.optimizer
        sgsd.begin_bank(self.run)
        sgsd.evolve_bank(self.run)  # only where a kill or a signal has left an evolution due

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.run.clock = runlog.Stopwatch()
        self.run.signals.in_step = True  # from here to the save a first signal waits

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.run.clock.lap("bwd")
        self.set_rate(state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        run, rows = self.run, distributed.gathered(self.trainer.rows, self.run.world)
        run.clock.lap("opt")
        run.step = state.global_step
        self.set_rate(run.step)  # the scheduler has set the next one; we log this step's
        if run.cfg.evolves:
            run.bank.remember(rows)  # W of Algorithm 4
        run.log(rows, self.trainer.norm)
        self.trainer.is_stopped = should_stop(run)
        control.should_save = self.trainer.is_stopped or run.save_is_due()
        run.signals.in_step = control.should_save

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.trainer.is_stopped or should_stop(self.run):  # before or during the save
            self.trainer.is_stopped = control.should_training_stop = True
            return
        self.run.signals.in_step = False
        sgsd.evolve_bank(self.run)  # line 17, where F divides the step: a save comes before


# -------------------------------------------------------------------------------------- the command


@dataclass(kw_only=True)
class RunOnTRL(Run):
    """A run whose model, steps and checkpoints are TRL's."""

    cfg: TRLConfig
    trainer: Any = None

    def save_weights(self, folder: pathlib.Path) -> None:
        """Move the trainer's own checkpoint of the last step to this folder."""
        pathlib.Path(self.trainer.args.output_dir, f"checkpoint-{self.step}").rename(folder)


def load(words: Sequence[str], run: RunOnTRL, held: contextlib.ExitStack) -> None:
    """Replaces `lib.run.load_run`. words: TRL's flags of the command line."""
    cfg = run.cfg
    if run.bank is None or not cfg.steps:
        raise ValueError("--bank and --steps are needed; sgsd.py --steps 0 makes a bank alone")
    lora, args = lora_of(run), settings_of(cfg, words, run.world)
    run.verifier = held.enter_context(verify.load_judge(cfg.verifier)(cfg.verify_timeout))
    run.embed = model.load_encoder(cfg.encoder, run.device)
    run.lm, run.tokenizer = load_outline(cfg)
    # TRL ends all replies of a batch at one limit, and none with the context.
    leave_out_long(run, sgsd.student_prompt, cfg.max_new_tokens)
    run.trainer = SGSDTrainer(run, args, run.lm.name_or_path, peft_config=lora)
    if cfg.adapter and not run.checkpoint:
        if run.world.main:  # the other ranks may have no weights yet
            model.restore(cfg.adapter, run.trainer.model)
        distributed.broadcast_parameters(model.trained(run.lm).values(), run.world)


def load_outline(cfg: Any) -> tuple[Any, Any]:
    """The model's outline and tokenizer; ValueError for a model that TRL would train wrongly."""
    outline, tokenizer = model.load_outline(cfg.model)
    kinds = {path.rpartition(".")[2] for path, _ in outline.named_modules()}
    if not cfg.full and kinds & {"experts", "mamba"}:
        rule = "adapters would not reach its experts or Mamba layers (S7)"
        raise ValueError(f"--model {cfg.model}: {rule}; train all weights by --full")
    model.load_model(cfg.model, "meta")  # refuses missing weights, which TRL would let pass
    return outline, tokenizer


def lora_of(run: Run) -> LoraConfig | None:
    """The adapters' shape, if they learn."""
    cfg: Any = run.cfg
    if not cfg.full:
        rank, alpha = lora_settings(run)
        return LoraConfig(
            r=rank, lora_alpha=alpha, task_type="CAUSAL_LM", target_modules="all-linear"
        )
    if cfg.adapter:
        raise ValueError(f"--adapter {cfg.adapter}: with --full give whole weights, by --model")
    return None


def train(run: Any) -> int:
    """Make all steps that are left; returns the exit code."""
    run.trainer.train(run.checkpoint)
    return exit_code(run)


def command_line(argv: Sequence[str] | None, about: str | None, kind: Any) -> tuple[Any, list[str]]:
    """The settings of a command line, as `command.parse` takes it, and TRL's flags after a --."""
    words = [*(sys.argv[1:] if argv is None else argv)]
    end = words.index("--") if "--" in words else len(words)
    if any("vllm" in word for word in words[end:]):  # vLLM's sleep mode refuses expandable segments
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    # TRL and PEFT use names that transformers 5.24 deprecates.
    warnings.filterwarnings("ignore", ".*gradient_checkpointing.* is deprecated", FutureWarning)
    cfg = command.parse(words[:end], about, kind, config.presets_of(kind))
    return cfg, words[end + 1 :]


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code. If the folder has a run, it continues the run."""
    cfg, words = command_line(argv, __doc__, TRLConfig)
    with RunOnTRL.open(
        cfg,
        skills.load_bank,
        sgsd.student_prompt,
        functools.partial(load, words),
    ) as run:
        return train(run)


if __name__ == "__main__":
    distributed.run_and_exit(main)
