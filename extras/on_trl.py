"""SGSD on TRL's GRPOTrainer: full weights, sharding, vLLM in the same process (docs/engines.md).

    accelerate launch --config_file extras/fsdp2.yaml -m extras.on_trl --full --bank bank.json
    python eval.py sgsd_trl                                              what it has saved

The same command continues a run (extras/trl_run.py). It needs extras/requirements.txt. A step of
SGSD is a policy gradient whose advantage differs from token to token,

    A_t = -T dL / d log p_S(y_t),

by Eq. 20 that is T sum_k W_t^(k). So TRL's loss of type grpo, which takes the mean over a rollout's
T tokens, has SGSD's gradient as long as a batch is used for one step: its ratio is then 1. L is
`sgsd.loss_of`, the function that sgsd.py trains by, and autograd takes its derivative: an edit of
the method reaches both. TRL samples, shards, saves and logs; verdict, teachers and bank are ours.

TRL samples with draws of its own, so a run cannot be repeated exactly. `sgsd.py --steps 0` makes
the bank; it evolves here.

Dimension key: B rollouts of a process, K teachers, T completion tokens, L places of a padded row.
"""

import contextlib
import functools
import pathlib
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, TrainerCallback
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_utils import rotate_checkpoints
from trl import TrlParser
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import add_fused_lm_head

import rollout
import sgsd
import skills
from distributed import World
from extras import trl_run
from extras.trl_run import CheckedTrainer, SGSDConfig
from lib import command, files, runlog, verify
from lib import model as lib_model
from lib.problems import Problem
from lib.run import evolution_is_due, reading_last
from rollout import Job, Rollout
from skills import SkillBank, SkillPair

# -------------------------------------------------------------------------------------- the trainer

# Of a rollout, for the log: shares of its teachers by fate; means over them, in nats; a share.
NUMBERS = "distilled reversed ignored support support_size gap clip_share".split()


class SGSDTrainer(CheckedTrainer):
    """GRPOTrainer whose advantages [B, T] are SGSD's, and whose bank evolves.

    problems: `lib.problems.Problem`s. bank: in use, with its window. embed: texts -> [n, d]. judge:
    a `lib.verify.Judge`. kwargs: of GRPOTrainer, such as `peft_config`.
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
        **kwargs: Any,
    ):
        if len(problems) < args.batch_size:  # TRL drops what does not fill a batch
            rule = f"there are {len(problems)} problems, and TRL takes none twice in an epoch"
            raise ValueError(f"batch_size {args.batch_size}: {rule}; lower it")
        self.cfg, self.bank, self.embed, self.judge = args.sgsd, bank, embed, judge
        self.problems = problems
        self.rollouts: list[Rollout] = []  # of the latest batch of this process
        self.rows: list[dict] = []  # of rollouts.jsonl, of the latest step, of all processes
        self.clock = runlog.Stopwatch()  # of the present step
        self.watch = runlog.Watch()  # of a run that learns nothing
        self.start: Any = None  # of a command: a `trl_run.Start`
        rows = [{"prompt": chat(x.problem), "index": i} for i, x in enumerate(problems)]
        verdict: Any = self.verdict
        super().__init__(
            model,
            reward_funcs=[verdict],
            args=args,
            train_dataset=Dataset.from_list(rows),
            **kwargs,
        )
        causal, tokenizer = lib_model.causal_lm(self.model), self.processing_class
        self.parts = parts_of(self, causal)
        sgsd.check_prompts(self.parts, sgsd.longest_prompts)
        lib_model.remove_dropout(self.model)  # TRL's disable_dropout leaves floats
        self.refuse_what_fails_later(causal)
        self.stops = rollout.stop_ids(causal, tokenizer)
        self.masked_ids = lib_model.masked_token_ids(tokenizer) | {*self.stops}
        self.eos_token_ids = self.stops
        if self.use_vllm:
            self.vllm_generation.generation_kwargs["stop_token_ids"] = self.stops
        else:
            self.generation_config.eos_token_id = self.stops
        # TRL's head rounds to bf16; eps_a is .05 nats, and bf16 errs by up to .1.
        outputs = ("log_probs", "entropy")
        add_fused_lm_head(causal, cast_lm_head_to_fp32=True, outputs=outputs)
        self.set_up_shards()
        self.add_callback(BankCallback(self))

    # ------------------------------------------------------------------------------ a batch

    def _tokenize_prompts(self, prompts: list) -> tuple[list[list[int]], None, dict]:
        """The student's prompts as sgsd.py makes them (S3), for TRL to sample from."""
        ids = [sgsd.student_prompt(self.parts, prompt[0]["content"]) for prompt in prompts]
        return ids, None, {}

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with given_settings_alone(self.parts.lm):
            return super()._generate_single_turn(*args, **kwargs)

    def verdict(self, completion_ids: list[list[int]], index: list[int], **_: Any) -> list[float]:
        """The reward that TRL asks for: r of each completion, judged from its ids (Eq. 1)."""
        jobs = []
        for b, (i, ids) in enumerate(zip(index, completion_ids)):
            x = self.problems[i]
            prompt = sgsd.student_prompt(self.parts, x.problem)
            jobs.append(Job(b, prompt, key=0, left=0, problem=x, ids=ids))
        (judged,) = rollout.rollouts(self.processing_class, self.stops, self.judge, [jobs])
        self.rollouts = [roll for _, roll in judged]
        return [float(roll.r) for roll in self.rollouts]

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict[str, Any]:
        """TRL's batch, with SGSD's advantages."""
        output = super()._generate_and_score_completions(inputs)
        self.clock.lap("gen")
        refuse_other_ids(self.rollouts, output)
        pairs_BK, contexts, completions = [], [], []
        for roll in self.rollouts:
            pairs_K = self.bank.retrieve(roll.problem, self.cfg.num_teachers, self.embed)
            pairs_BK.append(pairs_K)
            contexts.append(roll.prompt_ids)
            contexts += sgsd.teacher_prompts(self.parts, pairs_K, roll.problem)
            completions += [roll.completion_ids] * (1 + len(pairs_K))
        logps = iter(self.score(contexts, completions))
        A_BT = torch.zeros(output["completion_ids"].shape, device=self.accelerator.device)
        rows, numbers = [], []
        first, step = self.accelerator.process_index * len(A_BT), self.state.global_step + 1
        for b, (roll, pairs_K) in enumerate(zip(self.rollouts, pairs_BK)):
            logpS_T = next(logps)
            logpT_KT = torch.stack([next(logps) for _ in pairs_K])
            A_T, result = self.advantage(roll, pairs_K, logpS_T, logpT_KT)
            A_BT[b, : len(A_T)] = A_T
            numbers.append(numbers_of(result, self.cfg.c_delta))
            rows.append(sgsd.record(self.parts, step, first + b, pairs_K, roll, result))
        output["advantages"] = A_BT
        self.log_numbers(numbers)
        self.rows = gather_object(rows)
        if self.cfg.evolves:
            self.bank.remember(self.rows)
        self.clock.lap("score")
        return output

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
    ) -> tuple[Tensor, sgsd.RolloutLoss]:
        """-T dL/dlog p_S(y_t) of a rollout [T], and the loss with its numbers for the logs.

        logpS_T [T], logpT_KT [K, T]: log-probabilities of the student and its teachers, in nats.
        """
        logpS_T = logpS_T.detach().requires_grad_()
        mask_T = sgsd.token_mask(torch.tensor(roll.completion_ids), self.masked_ids).to(logpS_T)
        alpha_K = sgsd.pair_weights(self.parts, pairs_K)
        r = sgsd.reward(roll)
        with torch.enable_grad(), torch.autocast(logpS_T.device.type, enabled=False):
            loss, numbers = sgsd.loss_of(self.cfg, logpT_KT, logpS_T, mask_T, alpha_K, r)
            (slope_T,) = torch.autograd.grad(loss, logpS_T)
        return -len(logpS_T) * slope_T, sgsd.for_the_logs(loss.detach(), numbers)

    def log_numbers(self, numbers: list[Tensor]) -> None:
        """Add the means over all processes' rollouts to what TRL logs of the step."""
        means = self.accelerator.reduce(torch.stack(numbers).mean(0), "mean").tolist()
        for name, mean in zip(NUMBERS, means, strict=True):
            self._metrics["train"][f"sgsd/{name}"].append(mean)

    def log_step(self, step: int) -> None:
        """The main process appends a step's lines to the logs that sgsd.py has, too."""
        self.clock.lap("bwd")
        audits = gather_object(self.parts.audits)
        self.parts.audits = []
        peak = runlog.memory_gb(self.accelerator.device)
        metrics = runlog.summarize(step, self.rows, self.norm, self.rate, self.clock.seconds, peak)
        lines = [metrics | self.bank.counts], self.rows, audits
        for name, rows in zip(runlog.LOGS, lines, strict=True):
            trl_run.append(self.args, name, rows)
        if warning := self.watch.line_after(metrics):
            self.say(warning)

    # ------------------------------------------------------------------------------- the bank

    def evolve_bank(self, step: int) -> None:
        """Algorithm 4 after every F-th step, on all processes' rollouts since the last time."""
        cfg, old = self.cfg, self.bank
        if not evolution_is_due(cfg, step, old):
            return
        log = functools.partial(trl_run.append, self.args, "bank/replies")
        tokenizer, reply_tokens = self.processing_class, cfg.reply_tokens
        writer = skills.writer(tokenizer, rollout.chat_ids, self.write, log, reply_tokens, step)
        self.bank = skills.evolve(old, old.window, step, writer, **cfg.evolution)
        same = "bank: unchanged, as the success is not below --success_gate"
        self.say(same if self.bank is old else skills.describe(self.bank))
        self.bank.window = []
        trl_run.save_version(self.args, self.bank, step)

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
            **({"temperature": 1.1, "top_p": 0.95, "top_k": 20} if sampled else {}),
        )
        unwrapped = unwrap_model_for_generation(
            self.model_wrapped,
            self.accelerator,
            gather_deepspeed3_params=self.args.ds3_gather_for_generation,
            gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
        )
        with unwrapped as lm, torch.no_grad(), given_settings_alone(self.parts.lm):
            out_BL = lm.generate(ids_BL, attention_mask=mask_BL, generation_config=settings)
        replies = []
        for ids, limit in zip(out_BL[:, ids_BL.shape[1] :].tolist(), limits):
            ends = [t for t, i in enumerate(ids) if i in self.stops]
            replies.append(ids[: min([limit, *[t + 1 for t in ends]])])
        return replies

    # --------------------------------------------------------------------------- checkpoints

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """TRL's, with the bank and its window as the last file. Only then are older ones removed,
        and this one uploaded.

        A checkpoint without a bank is not whole: after a kill the run goes on with the one before.
        """
        given = self.args.save_total_limit, self.args.push_to_hub
        self.args.save_total_limit, self.args.push_to_hub = None, False
        super()._save_checkpoint(*args, **kwargs)
        self.args.save_total_limit, self.args.push_to_hub = given
        self.accelerator.wait_for_everyone()
        folder = pathlib.Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        if self.accelerator.is_main_process:
            self.bank.save(folder / "bank.json")
            rotate_checkpoints(self.args.output_dir, self.args.save_total_limit, use_mtime=True)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))


class BankCallback(TrainerCallback):
    """Logs a step, evolves the bank, and ends a run that is not finite."""

    def __init__(self, trainer: SGSDTrainer):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.compute_steps(args, state.max_steps)  # a checkpoint's save_steps would stay

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.clock = runlog.Stopwatch()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.log_step(state.global_step)
        self.trainer.evolve_bank(state.global_step)
        if self.trainer.skipped == 3:
            self.trainer.say("three steps were not finite")
            control.should_training_stop = control.should_save = True


def parts_of(trainer: SGSDTrainer, causal: Any) -> Any:
    """What sgsd.py's functions read of a run. Processes have one bank, and ask no others."""
    device = trainer.accelerator.device
    return SimpleNamespace(
        cfg=trainer.cfg,
        tokenizer=trainer.processing_class,
        device=device,
        problems=trainer.problems,
        bank=trainer.bank,
        lm=causal,
        world=World(0, 1, device),
        audits=[],
    )


@contextlib.contextmanager
def given_settings_alone(causal: Any) -> Iterator[None]:
    """In this block `generate` fills in nothing from the model's own generation_config."""
    own, causal.generation_config = causal.generation_config, GenerationConfig()
    try:
        yield
    finally:
        causal.generation_config = own


def refuse_other_ids(rolls: Sequence[Rollout], output: dict[str, Any]) -> None:
    """ValueError where TRL would train on other ids than those that teachers score."""
    for b, roll in enumerate(rolls):
        for name, ours in (("prompt", roll.prompt_ids), ("completion", roll.completion_ids)):
            kept = output[f"{name}_mask"][b].bool()
            if output[f"{name}_ids"][b][kept].tolist() != ours:
                rule = f"TRL trains on other {name} ids than those that teachers score"
                raise ValueError(f"problem {roll.problem_id}: {rule}")


def numbers_of(result: sgsd.RolloutLoss, c_delta: float) -> Tensor:
    """The numbers of NUMBERS of a rollout."""
    a_K, rho_K = result.numbers["a"], result.numbers["rho"]
    mask_T, delta_KT = result.token_numbers["mask"], result.token_numbers["delta"]
    clipped_KT = (delta_KT.abs() > c_delta).float()
    return torch.stack(
        [
            (rho_K > 0).float().mean(),
            (rho_K < 0).float().mean(),
            (rho_K == 0).float().mean(),
            a_K.mean(),
            a_K.abs().mean(),
            sgsd.masked_mean(sgsd.unmasked(delta_KT, mask_T), mask_T).mean(),
            sgsd.masked_mean(clipped_KT, mask_T).mean(),
        ]
    )


def chat(problem: str) -> list[dict[str, str]]:
    """A problem as a prompt in TRL's data set; `_tokenize_prompts` makes the student's of it."""
    return [{"role": "user", "content": problem}]


# -------------------------------------------------------------------------------------- the command


def prepare(args: SGSDConfig) -> SGSDTrainer:
    """The trainer of a command line.

    ValueError for a mistake in what the command names. Exits with 0 where the run is complete.
    """
    cfg, start = args.sgsd, trl_run.inspect(args)
    with reading_last([*files.by_number(pathlib.Path(args.output_dir)).values()]):
        bank = sgsd.load_bank(cfg, start.checkpoint / "bank.json" if start.checkpoint else cfg.bank)
    embed = lib_model.load_encoder(cfg.encoder, args.device)
    _, tokenizer = lib_model.load_outline(cfg.model)
    if not is_deepspeed_zero3_enabled():  # under which transformers lets nobody read names alone
        lib_model.load_model(cfg.model, "meta")  # TRL lets transformers make up missing weights
    if not start.checkpoint:
        bank.window = []
    args.model_init_kwargs = loading_of(args)
    lora = None
    if not args.full:
        lora = LoraConfig(
            r=cfg.lora_rank,
            lora_alpha=cfg.lora_alpha,
            task_type="CAUSAL_LM",
            target_modules="all-linear",
        )
    trainer = SGSDTrainer(
        cfg.model,
        args,
        start.problems,
        bank,
        embed,
        verify.load_judge(cfg.verifier)(cfg.verify_timeout),
        processing_class=tokenizer,
        peft_config=lora,
    )
    trainer.start = start
    return trainer


def loading_of(args: SGSDConfig) -> dict[str, Any]:
    """How TRL loads the model; ValueError where merging would change the base.

    A step of 5e-6 is lost in bf16, so what learns is in fp32 (S22). For vLLM TRL adds adapters to
    their base at each step and subtracts them again: in bf16 that changes the base (trl#6688).
    """
    cfg, dtype = args.sgsd, args.sgsd.dtype
    if dtype == "auto":
        stays_as_it_is = not args.full and not args.use_vllm
        dtype = "bfloat16" if stays_as_it_is and args.device.type == "cuda" else "float32"
    given: Any = args.model_init_kwargs or {}
    options = {"dtype": dtype, "attn_implementation": cfg.attn, **given}
    if args.use_vllm and not args.full and options["dtype"] not in ("float32", torch.float32):
        rule = "with vLLM the base of adapters must be in float32, as TRL merges them at each step"
        raise ValueError(f"dtype {options['dtype']}: {rule}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code. In a folder with checkpoints it continues."""
    torch.set_float32_matmul_precision("highest")  # TF32 would round what is fp32 here
    with contextlib.ExitStack() as held:
        with command.one_line_errors(trl_run.PROGRAM, reading=True):
            kind: Any = SGSDConfig
            parser: Any = TrlParser(kind)
            parser._negative_number_matcher = command.NEGATIVE
            (args,) = parser.parse_args_and_config(argv)
            trl_run.claim(args, held)
            trainer = prepare(args)
            trl_run.refuse_coarse_weights(trainer.model)
        held.callback(trainer.judge.close)
        with command.one_line_errors(trl_run.PROGRAM):
            trl_run.begin(args, trainer.start)
            if not trainer.start.step:
                trl_run.save_version(args, trainer.bank, 0)
            checkpoint = trainer.start.checkpoint
            trainer.train(str(checkpoint) if checkpoint else None)
            if trainer.skipped == 3:
                return 1
            trainer.save_model(args.output_dir)
            trl_run.finish(args, trainer.start)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
