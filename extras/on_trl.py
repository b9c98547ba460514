"""SGSD on TRL's GRPOTrainer: full weights, sharding, vLLM in the same process (docs/engines.md).

    accelerate launch --config_file extras/fsdp2.yaml -m extras.on_trl --full --bank bank.json
    python eval.py sgsd_trl                                              what it has saved

It needs extras/requirements.txt. A step of SGSD is a policy gradient whose advantage differs from
token to token,

    A_t = -T dL / d log p_S(y_t),

by Eq. 20 that is T sum_k W_t^(k). So TRL's loss of type grpo, which takes the mean over a rollout's
T tokens, has SGSD's gradient as long as a batch is used for one step: its ratio is then 1. L is
`sgsd.loss_of`, the function that sgsd.py trains by, and autograd takes its derivative: an edit of
the method reaches both. TRL samples, shards, saves and logs; verdict, teachers and bank are ours.

TRL samples with draws of its own, so a run cannot be repeated exactly. `sgsd.py --steps 0` makes
the bank; it evolves here.

Dimension key: B rollouts of a process, K teachers, T completion tokens, L places of a padded row.
"""

import functools
import os
import pathlib
import sys
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, make_dataclass
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import DistributedType, gather_object
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer, TrlParser
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import add_fused_lm_head

import rollout
import sgsd
import skills
from lib import command, files, verify
from lib import model as lib_model
from lib.config import Config
from lib.problems import Problem
from lib.run import load_training
from rollout import Job, Rollout
from skills import SkillBank, SkillPair

CONFIG, RULES = Config.__dataclass_fields__, Config.rules()

# ------------------------------------------------------------------------------------- settings

# Settings with the names, defaults and help texts of sgsd.py.
SGSD = """
    model dtype attn lora_rank lora_alpha data split problem_field answer_field answer_after
    batch_size max_prompt_tokens verifier verify_timeout bank encoder evolve_every success_gate
    max_new_items dynamic_capacity merge_group_size merge_patience reply_tokens memory_answer
    num_teachers student_prefix teacher_prefix tau_g c_delta eps_a temperature top_p top_k
    max_new_tokens steps learning_rate grad_clip seed
""".split()
# Settings that leave the method alone, nearly all of them TRL's. Every other stays at its default.
ALLOWED = """
    full score_rows
    output_dir use_cpu per_device_train_batch_size per_device_eval_batch_size model_init_kwargs
    bf16 fp16 tf32 gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing
    activation_checkpointing_kwargs torch_compile torch_compile_backend torch_compile_mode
    torch_empty_cache_steps pad_to_multiple_of cache_implementation
    optim optim_args adam_beta1 adam_beta2 adam_epsilon weight_decay lr_scheduler_type
    lr_scheduler_kwargs warmup_steps data_seed dataloader_num_workers dataloader_pin_memory
    fsdp fsdp_config deepspeed parallelism_config ds3_gather_for_generation ddp_backend ddp_timeout
    ddp_bucket_cap_mb ddp_find_unused_parameters ddp_broadcast_buffers
    use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_server_base_url vllm_server_host
    vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization
    vllm_max_model_length vllm_tensor_parallel_size
    do_train do_eval eval_strategy eval_steps eval_delay eval_on_start resume_from_checkpoint
    save_strategy save_steps save_total_limit save_only_model
    logging_strategy logging_steps logging_first_step logging_nan_inf_filter log_level
    log_level_replica log_on_each_node log_completions num_completions_to_print log_unique_prompts
    report_to run_name project trackio_space_id disable_tqdm include_num_input_tokens_seen
    skip_memory_metrics debug push_to_hub hub_model_id hub_strategy hub_token hub_private_repo
    hub_revision
""".split()


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
    output_dir: str | None = field(default="sgsd_trl", metadata={"help": "folder of the run"})
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
        self.sgsd = Config(**{name: getattr(self, name) for name in SGSD})
        rows = self.per_device_train_batch_size * int(os.environ.get("WORLD_SIZE", "1"))
        if self.batch_size % rows or self.batch_size % 2:  # TRL checks for groups of two
            rule = "must be even, and divisible by processes times per_device_train_batch_size"
            raise ValueError(f"batch_size {self.batch_size}: {rule}, which is {rows}")
        if not self.steps:
            raise ValueError("steps 0: a bank alone is made by sgsd.py --steps 0")
        self.gradient_accumulation_steps = self.batch_size // rows
        self.max_steps, self.max_grad_norm = self.steps, self.grad_clip
        self.max_completion_length = self.max_new_tokens
        self.generation_kwargs = {"temperature": self.sgsd.temperature}  # for `generate` and vLLM
        self.temperature = 1.0  # of the log-probabilities
        self.num_generations = 2
        super().__post_init__()
        self.num_generations = 1

    def refuse_other_methods(self) -> None:
        """ValueError for a value of TRL's that is neither SGSD's nor harmless."""
        for f in fields(self):
            default = f.default if f.default_factory is MISSING else f.default_factory()
            value = getattr(self, f.name)
            if value != default and f.name not in [*SGSD, *ALLOWED]:
                rule = f"would train by another method than SGSD, which has {default!r}"
                raise ValueError(f"{f.name} {value!r}: {rule}")


# -------------------------------------------------------------------------------------- the trainer

# Of a rollout, for the log: shares of its teachers by fate; means over them, in nats; a share.
NUMBERS = "distilled reversed ignored support support_size gap clip_share".split()


class SGSDTrainer(GRPOTrainer):
    """GRPOTrainer whose advantages [B, T] are SGSD's, and whose bank evolves.

    problems, eval_problems: `lib.problems.Problem`s. embed: texts -> [n, d]. judge: a
    `lib.verify.Judge`. kwargs: of GRPOTrainer, such as `peft_config`.
    """

    args: Any
    model: Any
    processing_class: Any

    def __init__(
        self,
        model: Any,
        args: SGSDConfig,
        problems: Sequence[Problem],
        bank: SkillBank,
        embed: Any,
        judge: verify.Judge,
        eval_problems: Sequence[Problem] = (),
        **kwargs: Any,
    ):
        if len(problems) < args.batch_size:  # TRL drops what does not fill a batch
            rule = f"there are {len(problems)} problems, and TRL takes none twice in an epoch"
            raise ValueError(f"batch_size {args.batch_size}: {rule}; lower it")
        self.cfg, self.bank, self.embed, self.judge = args.sgsd, bank, embed, judge
        self.problems = [*problems, *eval_problems]
        rows = [{"prompt": chat(x.problem), "index": i} for i, x in enumerate(self.problems)]
        self.rollouts: list[Rollout] = []  # of the latest batch of this process
        verdict: Any = self.verdict
        super().__init__(
            model,
            reward_funcs=[verdict],
            args=args,
            train_dataset=Dataset.from_list(rows[: len(problems)]),
            eval_dataset=Dataset.from_list(rows[len(problems) :]) if eval_problems else None,
            **kwargs,
        )
        skills.refuse_short(bank, self.cfg.bank, self.cfg.num_teachers)
        causal, tokenizer = lib_model.causal_lm(self.model), self.processing_class
        # What sgsd.py's functions read of a run.
        self.parts: Any = SimpleNamespace(
            cfg=self.cfg, tokenizer=tokenizer, device=self.accelerator.device
        )
        self.stops = rollout.stop_ids(causal, tokenizer)
        self.masked_ids = lib_model.masked_token_ids(tokenizer) | {*self.stops}
        self.eos_token_ids = self.stops
        if not self.use_vllm:
            self.generation_config.eos_token_id = self.stops
        # TRL's head rounds to bf16; eps_a is .05 nats, and bf16 errs by up to .1.
        outputs = ("log_probs", "entropy")
        add_fused_lm_head(causal, cast_lm_head_to_fp32=True, outputs=outputs)
        if self.accelerator.distributed_type == DistributedType.FSDP:
            # Completions end at different lengths, and each forward pass is a collective.
            self.model.generate = functools.partial(self.model.generate, synced_gpus=True)
        self.add_callback(BankCallback(self))

    # ------------------------------------------------------------------------------ a batch

    def _tokenize_prompts(self, prompts: list) -> tuple[list[list[int]], None, dict]:
        """The student's prompts as sgsd.py makes them (S3), for TRL to sample from."""
        ids = [sgsd.student_prompt(self.parts, prompt[0]["content"]) for prompt in prompts]
        return ids, None, {}

    def verdict(self, completion_ids: list[list[int]], index: list[int], **_: Any) -> list[float]:
        """The reward that TRL asks for: r of each completion, judged from its ids (Eq. 1)."""
        jobs = []
        for b, (i, ids) in enumerate(zip(index, completion_ids)):
            x = self.problems[i]
            jobs.append(Job(b, sgsd.student_prompt(self.parts, x.problem), 0, 0, x, ids))
        (judged,) = rollout.rollouts(self.processing_class, self.stops, self.judge, [jobs])
        self.rollouts = [roll for _, roll in judged]
        return [float(roll.r) for roll in self.rollouts]

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict[str, Any]:
        """TRL's batch, with SGSD's advantages. Evaluation logs verdicts alone."""
        output = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return output
        self.refuse_other_ids(output)
        pairs_BK, contexts, completions = [], [], []
        for roll in self.rollouts:
            pairs_K = self.bank.retrieve(roll.problem, self.cfg.num_teachers, self.embed)
            pairs_BK.append(pairs_K)
            contexts.append(roll.prompt_ids)
            contexts += sgsd.teacher_prompts(self.parts, pairs_K, roll.problem)
            completions += [roll.completion_ids] * (1 + len(pairs_K))
        logps = iter(self.score(contexts, completions))
        A_BT = torch.zeros(output["completion_ids"].shape, device=self.accelerator.device)
        numbers = []
        for b, (roll, pairs_K) in enumerate(zip(self.rollouts, pairs_BK)):
            logpS_T = next(logps)
            logpT_KT = torch.stack([next(logps) for _ in pairs_K])
            A_T, numbers_of_rollout = self.advantage(roll, pairs_K, logpS_T, logpT_KT)
            A_BT[b, : len(A_T)] = A_T
            numbers.append(numbers_of_rollout)
        output["advantages"] = A_BT
        self.log_numbers(numbers)
        if self.cfg.evolve_every:
            self.bank.remember(gather_object([asdict(roll) for roll in self.rollouts]))
        return output

    def refuse_other_ids(self, output: dict[str, Any]) -> None:
        """ValueError where TRL would train on other ids than those that teachers score."""
        for b, roll in enumerate(self.rollouts):
            for name, ours in (("prompt", roll.prompt_ids), ("completion", roll.completion_ids)):
                kept = output[f"{name}_mask"][b].bool()
                if output[f"{name}_ids"][b][kept].tolist() != ours:
                    rule = f"TRL trains on other {name} ids than those that teachers score"
                    raise ValueError(f"problem {roll.problem_id}: {rule}")

    @torch.no_grad()
    def score(self, contexts: list[list[int]], completions: list[list[int]]) -> list[Tensor]:
        """log p of each row's completion under its context, fp32 nats [T] (Eqs. 4 and 5).

        Rows of similar length go together, padded on the right (D6), score_rows at a time: so all
        processes make equally many passes, which under sharding are collectives.
        """
        logps: dict[int, Tensor] = {}
        order = sorted(range(len(contexts)), key=lambda i: len(contexts[i]) + len(completions[i]))
        for start in range(0, len(order), self.args.score_rows):
            pack = order[start : start + self.args.score_rows]
            rows, labels = [], []
            for i in pack:
                rows.append(torch.tensor(contexts[i] + completions[i]))
                labels.append(torch.tensor([-100] * len(contexts[i]) + completions[i]))
            ids_BL = pad_sequence(rows, batch_first=True).to(self.accelerator.device)
            labels_BL = pad_sequence(labels, batch_first=True, padding_value=-100).to(ids_BL.device)
            with self.accelerator.autocast():
                out = self.model(input_ids=ids_BL, labels=labels_BL, fused_lm_head=True)
            for b, i in enumerate(pack):
                start_T = len(contexts[i]) - 1  # place t - 1 predicts token t
                logps[i] = out.log_probs[b, start_T : start_T + len(completions[i])].float()
        return [logps[i] for i in range(len(contexts))]

    def advantage(
        self, roll: Rollout, pairs_K: list[SkillPair], logpS_T: Tensor, logpT_KT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """-T dL/dlog p_S(y_t) of a rollout [T], and the numbers of NUMBERS for the log.

        logpS_T [T], logpT_KT [K, T]: log-probabilities of the student and its teachers, in nats.
        """
        cfg, logpS_T = self.cfg, logpS_T.detach().requires_grad_()
        mask_T = sgsd.token_mask(torch.tensor(roll.completion_ids), self.masked_ids).to(logpS_T)
        alpha_K = sgsd.pair_weights(self.parts, pairs_K)
        r = sgsd.reward(roll)
        with torch.enable_grad(), torch.autocast(logpS_T.device.type, enabled=False):
            loss, n = sgsd.loss_of(cfg, logpT_KT, logpS_T, mask_T, alpha_K, r)
            (slope_T,) = torch.autograd.grad(loss, logpS_T)
        clipped_KT = (n["delta"].abs() > cfg.c_delta).float()
        numbers = torch.stack(
            [
                (n["rho"] > 0).float().mean(),
                (n["rho"] < 0).float().mean(),
                (n["rho"] == 0).float().mean(),
                n["a"].mean(),
                n["a"].abs().mean(),
                sgsd.masked_mean(sgsd.unmasked(n["delta"], mask_T), mask_T).mean(),
                sgsd.masked_mean(clipped_KT, mask_T).mean(),
            ]
        )
        return -len(logpS_T) * slope_T, numbers

    def log_numbers(self, numbers: list[Tensor]) -> None:
        """Add the means over all processes' rollouts to what TRL logs of the step."""
        means = self.accelerator.reduce(torch.stack(numbers).mean(0), "mean").tolist()
        for name, mean in zip(NUMBERS, means, strict=True):
            self._metrics["train"][f"sgsd/{name}"].append(mean)

    # ------------------------------------------------------------------------------- the bank

    def evolve_bank(self, step: int) -> None:
        """Algorithm 4 after every F-th step, on all processes' rollouts since the last time."""
        cfg, window = self.cfg, self.bank.window
        if not window or step % cfg.evolve_every:
            return
        tokenizer, reply_tokens = self.processing_class, cfg.reply_tokens
        writer = skills.Writer(
            tokenizer, rollout.chat_ids, self.write, self.log_replies, reply_tokens, step
        )
        self.bank = skills.evolve(self.bank, window, step, writer, **cfg.evolution)
        self.bank.window = []
        if self.accelerator.is_main_process:
            print(skills.describe(self.bank))

    def write(
        self, prompts: list[list[int]], names: list[str], repeats: list[int], limits: list[int]
    ) -> list[str]:
        """Replies of the present policy: greedy, or sampled where a prompt comes again (D4).

        Every process has all prompts and takes a share. One whose share is empty decodes a prompt
        again, because under sharding all must call `generate` equally often.
        """
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        replies: dict[int, list[int]] = {}
        for sampled in (False, True):
            asked = [i for i, repeat in enumerate(repeats) if (repeat > 0) == sampled]
            for start in range(0, len(asked), self.args.score_rows * world):
                turn = asked[start : start + self.args.score_rows * world]
                share = turn[rank::world] or turn[:1]
                ids = self.decode([prompts[i] for i in share], [limits[i] for i in share], sampled)
                replies |= dict(gather_object([*zip(share, ids)]))
        return [rollout.text_of(self.processing_class, replies[i]) for i in range(len(prompts))]

    def decode(self, prompts: list[list[int]], limits: list[int], sampled: bool) -> list[list[int]]:
        """One call of `generate`: ids that end on a stop id, or at the row's limit."""
        rows = [torch.tensor(prompt) for prompt in prompts]
        masks = [torch.ones_like(row) for row in rows]
        ids_BL, mask_BL = (
            pad_sequence(x, batch_first=True, padding_side="left").to(self.accelerator.device)
            for x in (rows, masks)
        )
        settings = GenerationConfig(
            max_new_tokens=max(limits),
            eos_token_id=self.stops,
            pad_token_id=self.processing_class.pad_token_id,
            do_sample=sampled,
            repetition_penalty=1.0,  # else the model's own generation_config decides
            **({"temperature": 1.1, "top_p": 0.95, "top_k": 20} if sampled else {}),
        )
        unwrapped = unwrap_model_for_generation(
            self.model_wrapped,
            self.accelerator,
            gather_deepspeed3_params=self.args.ds3_gather_for_generation,
            gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
        )
        with unwrapped as lm, torch.no_grad():
            out_BL = lm.generate(ids_BL, attention_mask=mask_BL, generation_config=settings)
        replies = []
        for ids, limit in zip(out_BL[:, ids_BL.shape[1] :].tolist(), limits):
            ends = [t for t, i in enumerate(ids) if i in self.stops]
            replies.append(ids[: min([limit, *[t + 1 for t in ends]])])
        return replies

    def log_replies(self, rows: list[dict]) -> None:
        """The main process appends replies of the bank's writer to replies.jsonl."""
        if self.accelerator.is_main_process:
            files.append_jsonl(pathlib.Path(self.args.output_dir, "replies.jsonl"), rows)

    # --------------------------------------------------------------------------- checkpoints

    def save_bank(self, folder: str | pathlib.Path) -> None:
        """The main process adds the bank with its window to a folder of weights."""
        if self.accelerator.is_main_process:
            self.bank.save(pathlib.Path(folder, "bank.json"))

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """TRL's training; a checkpoint's bank comes back with its weights."""
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(self.args.output_dir)
        if folder:
            self.bank = SkillBank.load(pathlib.Path(folder, "bank.json"))
        return super().train(folder, *args, **kwargs)


class BankCallback(TrainerCallback):
    """Evolves the bank after a step, and saves it with each checkpoint."""

    def __init__(self, trainer: SGSDTrainer):
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.evolve_bank(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.save_bank(pathlib.Path(args.output_dir, f"checkpoint-{state.global_step}"))


def chat(problem: str) -> list[dict[str, str]]:
    """A problem as a prompt in TRL's data set; `_tokenize_prompts` makes the student's of it."""
    return [{"role": "user", "content": problem}]


# -------------------------------------------------------------------------------------- the command


def prepare(args: SGSDConfig) -> SGSDTrainer:
    """The trainer of a command line; ValueError for a mistake in what it names."""
    cfg = args.sgsd
    if not cfg.bank:
        raise ValueError("--bank: needed; make one by sgsd.py --steps 0, or take one of banks/")
    problems, _ = load_training(cfg)
    outline, tokenizer = lib_model.load_outline(cfg.model)
    longest = max((x.problem for x in problems), key=len)
    parts: Any = SimpleNamespace(cfg=cfg, tokenizer=tokenizer)
    prompt = sgsd.student_prompt(parts, longest)
    lib_model.refuse_beyond_context(outline, len(prompt), cfg.max_new_tokens, "--max_new_tokens")
    bank = SkillBank.load(cfg.bank)
    bank.window = []
    # A step of 5e-6 is lost in bf16: what learns is in fp32 (S22).
    frozen_in_bf16 = cfg.dtype == "auto" and not args.full and args.device.type == "cuda"
    dtype = "bfloat16" if frozen_in_bf16 else "float32" if cfg.dtype == "auto" else cfg.dtype
    loading = {"dtype": dtype, "attn_implementation": cfg.attn}
    given: Any = args.model_init_kwargs or {}
    args.model_init_kwargs = {**loading, **given}
    lora = None
    if not args.full:
        lora = LoraConfig(
            r=cfg.lora_rank,
            lora_alpha=cfg.lora_alpha,
            task_type="CAUSAL_LM",
            target_modules=lib_model.linear_modules(outline),
        )
    return SGSDTrainer(
        cfg.model,
        args,
        problems,
        bank,
        lib_model.load_encoder(cfg.encoder, args.device),
        verify.load_judge(cfg.verifier)(cfg.verify_timeout),
        processing_class=tokenizer,
        peft_config=lora,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """The command. In a folder with checkpoints it continues after the last one."""
    with command.one_line_errors("extras.on_trl", reading=True):
        kind: Any = SGSDConfig
        (args,) = TrlParser(kind).parse_args_and_config(argv)
        trainer = prepare(args)
    out = pathlib.Path(args.output_dir)
    last = get_last_checkpoint(str(out)) if out.is_dir() else None
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint or last)
    trainer.save_model(str(out))
    trainer.save_bank(out)
    trainer.judge.close()


if __name__ == "__main__":
    main(sys.argv[1:])
