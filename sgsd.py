"""Skill-Conditioned Gated Self-Distillation (SGSD), in plain PyTorch.

    loss(x) = sum_k alpha_k * rho_k * mean over unmasked t of
              [ log 2 - log(1 + exp(-Delta_t^2 / (2 tau_g))) ]                      Eq. 16

One policy plays two roles. The student sees only the problem and samples a solution; a verifier
says right or wrong. Each of K retrieved skill-mistake pairs makes a teacher: the same policy with
that pair in its prompt. All of them score the student's tokens; Delta is the teacher-student gap
of log-probabilities. A teacher that supports a success or suppresses a failure is distilled
(rho = +1), one that does the opposite is reversed (-1), and an unsure one is ignored (0).

    python sgsd.py --preset tiny                                         see it run, in minutes
    torchrun --nproc_per_node 8 sgsd.py --model Qwen/Qwen3-1.7B          train
    python sgsd.py --resume runs/sgsd                                    continue a run
    python eval.py runs/sgsd/checkpoints/step_000200                     avg@12

Read it from top to bottom: the objective, one step (Algorithm 1), the bank's schedule, the run.
Tags are rows of docs/decisions.md: what the paper leaves open (S...), and what differs (D...).

Dimension key: K teachers, T completion tokens; `delta_KT` is [K, T]. Log-probabilities are nats.
"""

if __name__ == "__main__":  # --help and mistakes are answered before torch is imported
    import cli
    import config
    import inputs

    cli.answer("sgsd", lambda: inputs.look(*config.parse(None, "sgsd.py", __doc__)))

# ------------------------------------------------------- the objective: needs math and torch only

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

EPS = 1e-8  # in the denominators (S1)


def _check(where: str, ok: object, rule: str) -> None:
    if not ok:
        raise ValueError(f"{where}: {rule}")


def _check_gaps(where: str, delta_KT: Tensor, mask_T: Tensor | None = None, *of_K: Tensor) -> None:
    """What every function over gaps wants: delta [K, T] in fp32 or fp64, mask [T] of 0 and 1."""
    fine = delta_KT.dtype in (torch.float32, torch.float64)
    _check(where, fine, f"gaps must be float32 or float64, got {delta_KT.dtype}; bf16 errs by .1")
    shape = tuple(delta_KT.shape)
    _check(where, len(shape) == 2, f"delta_KT must be [K, T], got {shape}")
    if mask_T is not None:
        got = tuple(mask_T.shape)
        _check(where, got == shape[1:], f"mask_T must be [T] = {shape[1:]}, got {got}")
        _check(where, ((mask_T == 0) | (mask_T == 1)).all(), "mask_T must hold only 0 and 1")
    for w_K in of_K:
        got = tuple(w_K.shape)
        _check(where, got == shape[:1], f"alpha_K and rho_K must be [K] = {shape[:1]}, got {got}")


def _unmasked(delta_KT: Tensor, mask_T: Tensor) -> Tensor:
    """Gaps with 0 where the mask is 0: 0 * inf is nan, and a masked token must stay inert."""
    return torch.where(mask_T.bool(), delta_KT, torch.zeros_like(delta_KT))


def teacher_weights(s_g_K: Tensor, s_e_K: Tensor) -> Tensor:
    """alpha_k: softmax over teachers of the mean of skill and mistake similarity (Eq. 6, §2.2).

    s_g_K, s_e_K: [K]. Returns [K], positive, of sum 1; empty for K = 0. ValueError on shapes.
    """
    shapes = tuple(s_g_K.shape), tuple(s_e_K.shape)
    same = len(shapes[0]) == 1 and shapes[0] == shapes[1]
    _check("teacher_weights (Eq. 6)", same, f"both must be [K], got {shapes}")
    return torch.softmax((s_g_K + s_e_K) / 2, dim=0)


def log_prob_gap(logpT_KT: Tensor, logpS_T: Tensor) -> Tensor:
    """Delta_t^(k) = log p_T^(k)(y_t) - log p_S(y_t) (Eq. 7, §2.3); positive: k supports the token.

    logpT_KT: [K, T], taken as constant. logpS_T: [T], with gradient. Returns [K, T] in nats.
    ValueError on other shapes or two dtypes.
    """
    where, shapes = "log_prob_gap (Eq. 7)", (tuple(logpT_KT.shape), tuple(logpS_T.shape))
    same = logpT_KT.ndim == 2 and shapes[0][1:] == shapes[1]
    _check(where, same, f"wanted [K, T] teachers and [T] student, got {shapes}")
    dtypes = logpT_KT.dtype, logpS_T.dtype
    _check(where, dtypes[0] == dtypes[1], f"both sides must have one dtype, got {dtypes}")
    return logpT_KT.detach() - logpS_T


def plain_support(delta_KT: Tensor) -> Tensor:
    """a_k: mean gap over all T tokens (Eq. 8, §2.3). [K]. For the logs: ã decides the polarity."""
    _check_gaps("plain_support (Eq. 8)", delta_KT)
    return delta_KT.detach().mean(1)


def outcome_sign(r: float) -> int:
    """sgn_out(r) (Eq. 9, §2.3): +1 for a success, -1 for a failure; ValueError on anything else."""
    is_bool = "bool" in type(r).__name__ or getattr(r, "dtype", None) == torch.bool
    if is_bool or r not in (-1, 1):
        hint = "did the verifier return a 0/1 reward?"
        raise ValueError(f"outcome r must be -1 or +1 (Eq. 9), got {r}; {hint}")
    return int(r)


def token_mask(ids_T: Sequence[int] | Tensor, masked_ids: Collection[int]) -> Tensor:
    """m_t (§2.4): 1 on reasoning tokens, 0 on special, template and formatting tokens (S2).

    masked_ids: from `masked_token_ids(tokenizer)`. Returns [T] fp32.
    """
    ids = torch.as_tensor(ids_T)
    masked = torch.tensor(sorted(masked_ids), dtype=ids.dtype, device=ids.device)
    return 1.0 - torch.isin(ids, masked).float()


def masked_mean(x_KT: Tensor, mask_T: Tensor, eps: float = EPS) -> Tensor:
    """sum_t m_t x_t / (sum_t m_t + eps): the mean over unmasked tokens (Eqs. 12 and 15). [K].

    It is 0 where all is masked (S1).
    """
    return _unmasked(x_KT, mask_T).sum(1) / (mask_T.to(x_KT).sum() + eps)


def robust_support(delta_KT: Tensor, mask_T: Tensor, c_delta: float, eps: float = EPS) -> Tensor:
    """ã_k: mean over unmasked tokens of the gap clipped to ±c_delta (Eqs. 11-12, §2.4). [K], nats.

    No gradient. It is 0 where all is masked (S1). ValueError on other shapes or c_delta <= 0.
    """
    _check("robust_support (Eq. 11)", c_delta > 0, f"the bound c_delta must be > 0, got {c_delta}")
    _check_gaps("robust_support (Eq. 12)", delta_KT, mask_T)
    clipped_KT = delta_KT.detach().clamp(-c_delta, c_delta)  # Eq. 11
    return masked_mean(clipped_KT, mask_T, eps)  # Eq. 12


def polarity(a_K: Tensor, r: float, eps_a: float) -> Tensor:
    """rho_k in {-1, 0, +1} (Eq. 13, Tab. 2): sgn_out(r) sgn(ã_k) where |ã_k| > eps_a, else 0. [K].

    The threshold is strict, and sgn(0) = 0. ValueError on a wrong r or eps_a < 0.
    """
    _check("polarity (Eq. 13)", eps_a >= 0, f"the threshold eps_a must be >= 0, got {eps_a}")
    a_K = a_K.detach()
    return torch.where(a_K.abs() > eps_a, outcome_sign(r) * torch.sign(a_K), torch.zeros_like(a_K))


def gated_loss(delta: Tensor, tau_g: float) -> Tensor:
    """l_gate = log 2 - log(1 + exp(-delta^2 / (2 tau_g))) (Eq. 14, §2.5), elementwise.

    In [0, log 2]. Written as -log1p(expm1(z) / 2) with z = -delta^2 / (2 tau_g): the same number
    without cancellation near 0. ValueError on tau_g <= 0.
    """
    _check("gated_loss (Eq. 14)", tau_g > 0, f"the gate width tau_g must be > 0, got {tau_g}")
    return -torch.log1p(torch.expm1(-(delta**2) / (2 * tau_g)) / 2)


def gate_grad(delta: Tensor, tau_g: float) -> Tensor:
    """g_tau = dl_gate/ddelta = delta / (tau_g (1 + exp(delta^2 / (2 tau_g)))) (Eq. 17, §3).

    Elementwise, odd, |g_tau| <= 1/sqrt(e tau_g). For logs and tests. ValueError on tau_g <= 0.
    """
    _check("gate_grad (Eq. 17)", tau_g > 0, f"the gate width tau_g must be > 0, got {tau_g}")
    return delta / tau_g * torch.sigmoid(-(delta**2) / (2 * tau_g))


def teacher_losses(delta_KT: Tensor, mask_T: Tensor, tau_g: float, eps: float = EPS) -> Tensor:
    """lbar^(k): mean gated loss over unmasked tokens, of *unclipped* gaps (Eq. 15, §2.5). [K]."""
    _check_gaps("teacher_losses (Eq. 15)", delta_KT, mask_T)
    return masked_mean(gated_loss(_unmasked(delta_KT, mask_T), tau_g), mask_T, eps)


def weighted_loss(lbar_K: Tensor, alpha_K: Tensor, rho_K: Tensor) -> Tensor:
    """sum_k alpha_k rho_k lbar^(k) (Eq. 16, §2.5): a scalar. The gradient flows through lbar_K."""
    return (alpha_K.detach() * rho_K.detach() * lbar_K).sum()


def sgsd_loss(
    delta_KT: Tensor, mask_T: Tensor, alpha_K: Tensor, rho_K: Tensor, tau_g: float, eps: float = EPS
) -> Tensor:
    """L(x) = sum_k alpha_k rho_k lbar^(k) (Eq. 16, §2.5): a scalar in ±log 2; 0 for K = 0.

    The gradient flows through delta_KT alone. ValueError on other shapes.
    """
    _check_gaps("sgsd_loss (Eq. 16)", delta_KT, mask_T, alpha_K, rho_K)
    return weighted_loss(teacher_losses(delta_KT, mask_T, tau_g, eps), alpha_K, rho_K)


def token_credit(
    delta_KT: Tensor, mask_T: Tensor, alpha_K: Tensor, rho_K: Tensor, tau_g: float, eps: float = EPS
) -> Tensor:
    """W_t^(k) = alpha_k rho_k (m_t / Z) g_tau(Delta), Z = sum m + eps (Eq. 20, §3). [K, T].

    -grad L = sum over k and t of W_t^(k) grad log p_S(y_t). No gradient. ValueError on shapes.
    """
    _check_gaps("token_credit (Eq. 20)", delta_KT, mask_T, alpha_K, rho_K)
    m_T = mask_T.to(delta_KT)
    g_KT = gate_grad(_unmasked(delta_KT.detach(), mask_T), tau_g)
    return (alpha_K * rho_K).detach()[:, None] * m_T / (m_T.sum() + eps) * g_KT


# --------------------------------------------------------------------------- end of the objective

import contextlib
import itertools
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

from tqdm import tqdm

import cli
import config
import distributed
import eval
import files
import inputs
import policy
import problems
import rollout
import runlog
import skills
from bank import (
    bank_line,
    bank_versions,
    evolution_line,
    load_bank,
    refuse_without_pairs,
    save_bank,
)
from cli import SharedError, UserError
from config import Config
from distributed import World
from policy import Ids, Model, Tokenizer, masked_token_ids, score_teachers
from problems import Problem
from rollout import Rollout, Sampling
from skills import Writer
from verify import Judge


@dataclass
class Run:
    """What a training run holds."""

    cfg: Config
    out: pathlib.Path  # the directory
    world: World
    model: Model
    tokenizer: Tokenizer
    problems: list[Problem]
    verifier: Judge
    optimizer: torch.optim.Optimizer
    masked_ids: set[int]
    step: int = 0  # the last step that was made
    kept: dict[str, torch.Tensor] = field(default_factory=dict)  # more tensors of a checkpoint
    stop: bool = False  # a signal asked to stop
    stop_asked: float = 0.0  # when it came, in seconds of a monotonic clock
    may_end_now: bool = False  # whether a second signal may break off what is being done
    clock: runlog.Stopwatch = field(default_factory=runlog.Stopwatch)  # of the step that is made
    # The bank's life; None where the method sees no skills.
    bank: skills.SkillBank | None = None
    retriever: skills.Retriever | None = None
    writer: Writer | None = None
    window: list[dict] = field(default_factory=list)  # rollouts since it was last due to evolve
    bank_is_due: bool = False  # its evolution after step `step` was put off, as the run was stopped

    def retrieve(self, x: Problem, step: int) -> list[skills.SkillPair]:
        """The K_x skill-mistake pairs of a problem, best first (Eq. 2); none without skills."""
        if self.bank is None or self.retriever is None:
            return []
        return self.retriever(self.bank, x, self.cfg.num_teachers, step)

    def ask_to_stop(self, *_: object) -> None:
        """A signal's handler: the first one stops the run after the step, a second one now."""
        if self.stop:
            # torchrun passes on to its workers at once what the terminal has sent to them, too.
            if self.may_end_now and time.monotonic() - self.stop_asked > 1:
                raise KeyboardInterrupt
            return
        self.stop, self.stop_asked = True, time.monotonic()
        if self.world.main:  # past all buffers, since a signal may come inside a print
            what = f"finishing step {self.step + 1}, then stopping; once more stops at once"
            os.write(2, f"\n{what}\n".encode())


# ----------------------------------------------------------------------- one step (Algorithm 1)


@dataclass
class Example:
    """A rollout with what its loss is made from."""

    index: int  # its place in the global batch
    rollout: Rollout
    group: list[Rollout]  # all rollouts of its problem in this step, itself among them
    pairs_K: list[skills.SkillPair]  # the retrieved ones
    contexts_K: list[Ids]  # the teachers' prompts


@dataclass
class RolloutLoss:
    """A rollout's loss and, for the logs, what it came from; K is 0 where there are no teachers."""

    loss: Tensor  # a scalar with gradient
    mask_T: Tensor
    delta_KT: Tensor
    alpha_K: Tensor
    a_K: Tensor  # the support that decides the polarity
    rho_K: Tensor
    lbar_K: Tensor
    credit_KT: Tensor | None = None  # Eq. 20, where the loss has that form
    numbers: dict[str, Tensor] = field(default_factory=dict)  # further ones for rollouts.jsonl
    token_numbers: dict[str, Tensor] = field(default_factory=dict)  # the same for tokens.jsonl

    @classmethod
    def without_teachers(cls, loss: Tensor, logp_T: Tensor) -> "RolloutLoss":
        """That of a method whose loss needs the student's log-probabilities alone."""
        none_K, none_KT = logp_T.new_zeros(0), logp_T.new_zeros(0, len(logp_T))
        return cls(loss, torch.ones_like(logp_T), none_KT, none_K, none_K, none_K, none_K)


PromptsOf = Callable[["Run", Problem, list[skills.SkillPair]], tuple[Ids, list[Ids]]]
LossOf = Callable[["Run", Example], RolloutLoss]
StepResult = tuple[list[dict], float, dict[str, float]]  # records, gradient norm, seconds by part


def reward(roll: Rollout) -> float:
    """What training wants of a rollout: the verdict. SGSD takes -1 or +1, GRPO any number.

    Training alone asks for it. Evaluation, the bank's memories and its success gate see the
    verdict itself, so another reward changes none of them.
    """
    return roll.r


def prompt_ids(run: Run, text: str, what: str, thinking: str = "closed") -> Ids:
    """A prompt's ids with the think block closed, open, or bare: left to the model (§4.1, S3)."""
    ids = policy.chat_ids(run.tokenizer, text, thinking=thinking != "closed")
    if thinking == "open" and not run.tokenizer.decode(ids[-9:]).rstrip().endswith("<think>"):
        ids += run.tokenizer.encode("<think>\n", add_special_tokens=False)
    limit = run.cfg.max_prompt_tokens
    if len(ids) > limit:
        rule = f"--max-prompt-tokens is {limit}; drop the problem or raise the limit"
        raise UserError(f"{what}: the prompt has {len(ids)} tokens, {rule}")
    return ids


def teacher_prompts(run: Run, x: Problem, pairs_K: list[skills.SkillPair]) -> list[Ids]:
    """c_k(x) = g_k + e_k + x as ids, one per pair (Eq. 3)."""
    contexts_K = []
    for pair in pairs_K:
        text = skills.render_teacher(pair, x.problem)
        contexts_K.append(prompt_ids(run, text, f"teacher of {x.id}", run.cfg.teacher_prefix))
    return contexts_K


def prompts(run: Run, x: Problem, pairs_K: list[skills.SkillPair]) -> tuple[Ids, list[Ids]]:
    """What the student reads, the problem and nothing else, and what each teacher reads."""
    student = prompt_ids(run, skills.render_student(x.problem), x.id)
    return student, teacher_prompts(run, x, pairs_K)  # Eq. 3


def sample(run: Run, data: list[Problem], students: list[Ids], keys: list[int]) -> list[Rollout]:
    """y ~ p_S(. | x) for each problem, and the verifier's r (Eq. 1). students: the prompts."""
    cfg, model, tokenizer = run.cfg, run.model, run.tokenizer
    sampling = Sampling(cfg.temperature, cfg.top_p, cfg.top_k, cfg.max_new_tokens)
    completions = rollout.generate(model, tokenizer, students, sampling, keys, cfg.rollout_rows)
    turn = list(enumerate(completions))
    return rollout.judge(model, tokenizer, data, students, turn, run.verifier)


def pair_weights(run: Run, pairs_K: list[skills.SkillPair]) -> Tensor:
    """alpha_K of retrieved pairs (Eq. 6)."""
    device = run.world.device
    s_g_K = torch.tensor([pair.s_g for pair in pairs_K], device=device)
    s_e_K = torch.tensor([pair.s_e for pair in pairs_K], device=device)
    return teacher_weights(s_g_K, s_e_K)


def rollout_loss(run: Run, example: Example) -> RolloutLoss:
    """The loss of one rollout (Algorithm 1, lines 5 and 8-14): K teachers score its tokens."""
    cfg, roll = run.cfg, example.rollout
    ids_T = roll.completion_ids
    mask_T = token_mask(torch.tensor(ids_T, device=run.world.device), run.masked_ids)
    alpha_K = pair_weights(run, example.pairs_K)  # Eq. 6
    logpT_KT = score_teachers(run.model, example.contexts_K, ids_T, cfg.score_tokens)  # Eq. 4
    run.clock.lap("score")
    # The student's own pass is made once for all K teachers (D7).
    logpS_1T = policy.token_logprobs(run.model, [roll.prompt_ids], [ids_T], grad=True)  # Eq. 5
    delta_KT = log_prob_gap(logpT_KT, logpS_1T[0])  # Eq. 7
    a_K = robust_support(delta_KT, mask_T, cfg.c_delta)  # Eqs. 11-12
    rho_K = polarity(a_K, reward(roll), cfg.eps_a)  # Eq. 13
    loss = sgsd_loss(delta_KT, mask_T, alpha_K, rho_K, cfg.tau_g)  # Eqs. 14-16
    lbar_K = teacher_losses(delta_KT.detach(), mask_T, cfg.tau_g)
    credit_KT = token_credit(delta_KT, mask_T, alpha_K, rho_K, cfg.tau_g)
    return RolloutLoss(loss, mask_T, delta_KT, alpha_K, a_K, rho_K, lbar_K, credit_KT)


def train_step(
    run: Run,
    step: int,
    prompts_of: PromptsOf = prompts,
    loss_of: LossOf = rollout_loss,
    generations: int = 1,
) -> StepResult:
    """One step (Algorithm 1, lines 2-16): this rank's records, the gradient norm, the seconds.

    Another method puts its own functions in the place of `prompts` and `rollout_loss`.
    """
    cfg, world = run.cfg, run.world
    run.clock = runlog.Stopwatch()

    # Line 2. Every rank draws the same global minibatch and takes its share, in whole groups.
    batch = problems.minibatch(run.problems, cfg, step, generations)
    places = [i for i in range(len(batch)) if i // generations % world.size == world.rank]
    data = [batch[i][0] for i in places]
    keys = [rollout.sample_key(cfg.seed, step, batch[i][0].id, batch[i][1]) for i in places]

    # Lines 4 and 6. Each retrieved skill-mistake pair becomes one teacher's prompt.
    pairs, students, contexts = [], [], []
    with distributed.errors_shared(world):
        for x in data:
            pairs_K = run.retrieve(x, step)  # Eq. 2
            student, contexts_K = prompts_of(run, x, pairs_K)
            pairs.append(pairs_K)
            students.append(student)
            contexts.append(contexts_K)

    # Line 7, for the whole share.
    rollouts = sample(run, data, students, keys)  # Eq. 1
    run.clock.lap("gen")

    records = []
    for at, (roll, pairs_K, contexts_K) in enumerate(zip(rollouts, pairs, contexts)):
        # Lines 5 and 8-14.
        first = at - at % generations
        group = rollouts[first : first + generations]
        example = Example(places[at], roll, group, pairs_K, contexts_K)
        result = loss_of(run, example)
        if result.loss.requires_grad:  # without teachers there may be no loss (S8)
            # Divided by the *global* batch, because ranks sum their gradients below.
            (result.loss / (cfg.batch_size * generations)).backward()
        records.append(record(run, step, example, result))
        run.clock.lap("bwd")

    norm = optimizer_step(run, step)  # line 16
    run.clock.lap("opt")
    return records, norm, run.clock.seconds


def optimizer_step(run: Run, step: int) -> float:
    """Sum the gradients over ranks, clip, AdamW with linear decay (S7); the norm before clipping.

    After the sum a NaN is on every rank, so that all skip a step that is not finite.
    """
    cfg, params = run.cfg, list(policy.trained(run.model).values())
    distributed.sum_gradients(params, run.world)
    run.may_end_now = False  # from here on this rank finishes the step
    norm = float(torch.nn.utils.clip_grad_norm_(params, cfg.grad_clip))
    run.optimizer.param_groups[0]["lr"] = cfg.learning_rate * (1 - (step - 1) / cfg.updates)
    if math.isfinite(norm):
        run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    return norm


def record(run: Run, step: int, example: Example, result: RolloutLoss) -> dict:
    """One rollout's line in rollouts.jsonl; "tokens" is its line in tokens.jsonl, if audited."""
    cfg, mask_T, delta_KT = run.cfg, result.mask_T, result.delta_KT.detach()
    numbers = {
        "alpha": result.alpha_K,
        "a_plain": plain_support(delta_KT),
        "a": result.a_K,
        "rho": result.rho_K.int(),
        "losses": result.lbar_K.detach(),
        "loss": result.loss.detach(),
        "unmasked": mask_T.sum().int(),
        "clipped": (delta_KT[:, mask_T.bool()].abs() > cfg.c_delta).sum(),
        "first_gap": delta_KT[:, 0],
    }
    row: dict = {"index": example.index}
    row |= runlog.rollout_row(step, example.rollout, example.pairs_K, numbers | result.numbers)
    row["reward"] = reward(example.rollout)
    credit_KT = result.credit_KT if result.credit_KT is not None else torch.zeros(0)
    row |= runlog.credit_sums(credit_KT, example.rollout.r)
    if cfg.audit_every and step % cfg.audit_every == 0:
        of_tokens = {"mask": mask_T.int(), "delta": delta_KT, **result.token_numbers}
        if result.credit_KT is not None:
            of_tokens["credit"] = credit_KT
        row["tokens"] = runlog.token_row(step, example.rollout, run.tokenizer, of_tokens)
    return row


# ------------------------------------------------------ the bank's schedule (Algorithm 1, line 17)


def begin_bank(run: Run) -> None:
    """Make the bank where there is none (Alg. 2), and restore its window (D2, D9)."""
    cfg, writer = run.cfg, run.writer
    assert writer is not None
    if run.bank is None:
        run.bank = skills.make_bank(
            run.problems, run.model, run.tokenizer, run.verifier, writer, cfg
        )
    refuse_without_pairs(run.bank, cfg, f"--resume {cfg.out}")
    window = []
    if run.world.main:
        save_bank(run.bank, run.out, max(bank_versions(run.out), default=0))
        print(bank_line(run.bank, cfg.num_teachers))
        complete = run.step - run.bank_is_due  # the bank has seen all steps up to here
        last = complete - complete % max(1, cfg.update_every)
        rows = files.read_jsonl(run.out / "rollouts.jsonl")
        window = [row for row in rows if row["step"] > last]
    run.window = distributed.gather(window, run.world)[0]  # rank 0's, given to all
    if run.bank_is_due:
        counts = evolve_bank(run, run.step, [])
        if run.world.main:
            runlog.complete_metrics(run.out, counts)
        run.bank_is_due = False


def evolve_bank(run: Run, step: int, records: list[dict]) -> dict[str, int]:
    """Algorithm 4, where it is due, on all ranks' rollouts (D2); the bank's numbers to log."""
    cfg = run.cfg
    assert run.bank is not None and run.writer is not None
    run.writer.step = step
    if cfg.update_every:
        run.window += records
    if cfg.update_every and step % cfg.update_every == 0:
        window = [SimpleNamespace(**row) for row in run.window]
        bank = skills.evolve(run.bank, window, step, run.writer, **cfg.evolution)
        if run.world.main:
            tqdm.write(evolution_line(run.bank, bank, run.window, run.writer.lost))
            if bank is not run.bank:
                save_bank(bank, run.out, step)
        run.bank, run.window = bank, []
    sizes = len(run.bank.general_skills), len(run.bank.common_mistakes)
    counts = {f"replies_{outcome}": n for outcome, n in run.writer.take().items()}
    return {"bank_skills": sizes[0], "bank_mistakes": sizes[1], **counts}


# ----------------------------------------------------------------------------------------- a run


def prepare(
    cfg: Config, world: World, resume: bool, retriever: skills.Retriever | None = None
) -> Run:
    """Read and check everything that a user's mistake can break, before anything is written.

    retriever: without one the nearest pairs by --encoder are taken.
    """
    out = pathlib.Path(cfg.out)
    if cfg.batch_size < world.size:
        rule = f"must be >= {world.size}, as every process needs a problem"
        raise UserError(f"--batch-size {cfg.batch_size}: {rule}")
    inputs.check_directory(cfg, resume)
    skills.use_prompts(cfg.prompts)
    data, counts = problems.load_training(cfg)
    last = max(out.glob("checkpoints/step_*"), default=None) if resume else None
    model, tokenizer, optimizer, step, kept = runlog.load_trainable(cfg, world, last)
    if step > cfg.updates:
        why = f"{out} has made step {step} already"
        raise UserError(f"--updates {cfg.updates}: {why}; give a larger number, or evaluate it")
    masked_ids = masked_token_ids(tokenizer, cfg.mask_extra) | {*policy.stop_ids(model, tokenizer)}
    verifier = inputs.make_verifier(cfg)
    run = Run(cfg, out, world, model, tokenizer, data, verifier, optimizer, masked_ids, step, kept)
    if cfg.sees_skills:
        run.bank_is_due = resume and runlog.bank_is_due(out, step)
        run.bank = load_bank(cfg, step - run.bank_is_due, resume)
        device = str(world.device)
        run.retriever = retriever or skills.nearest(cfg.encoder, cfg.query_prompt, device)
        run.writer = skills.writer_of(cfg, world, model, tokenizer, out / "bank")
    for x in data:  # no token is shorter than a byte, so few problems need to be tokenised
        if len(x.problem.encode("utf-8", "replace")) + 512 > cfg.max_prompt_tokens:
            prompt_ids(run, skills.render_student(x.problem), f"problem {x.id}")
    if world.main:
        runlog.announce(cfg, world, model, tokenizer, masked_ids, counts)
    return run


def train(run: Run, step_fn: Callable[[Run, int], StepResult] = train_step) -> int:
    """The steps, with their logs, checkpoints and an orderly stop.

    Returns the exit code: 1 after three steps in a row that were not finite.
    """
    cfg, world = run.cfg, run.world
    with cli.continued_by(lambda: runlog.how_to_continue(cfg)):
        loggers = runlog.begin(cfg, world, run.step, run.bank_is_due)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # interrupts the cold start, too
        if cfg.sees_skills:
            begin_bank(run)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, run.ask_to_stop)
        reason, code = make_steps(run, step_fn, loggers)
        run.stop = bool(reason)  # on all ranks alike
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if reason and world.main:
            left = "the bank's evolution" if run.bank_is_due else "the evaluation"
            last = f"only {left} is left; " if run.step == cfg.updates and not code else ""
            command = f"python {cli.program(cfg.program)} --resume {cfg.out}"
            tqdm.write(f"{reason}; {last}continue with: {command}")
        distributed.leave_together(world)
    return code


def make_steps(
    run: Run, step_fn: Callable[[Run, int], StepResult], loggers: list[runlog.Logger]
) -> tuple[str, int]:
    """The steps that are left: the reason why the run stops before its end, and the exit code."""
    cfg, world, skipped = run.cfg, run.world, 0
    history = list(files.read_jsonl(run.out / "metrics.jsonl")) if world.main else []
    steps = range(run.step + 1, cfg.updates + 1)
    silent = not (world.main and sys.stderr.isatty())  # a file has the steps' own lines
    bar = tqdm(steps, "train", cfg.updates, initial=run.step, disable=silent, unit="step")
    for step in bar:
        try:
            with end_at_once(run):
                records_of_rank, norm, seconds = step_fn(run, step)
        except SharedError as e:
            hint = f"--resume {cfg.out} continues from the last checkpoint"
            raise SharedError(f"{e} (in step {step}; {hint})") from None
        except KeyboardInterrupt:  # this step is lost, and no other
            save(run)
            raise
        shares = distributed.gather(records_of_rank, world)
        records = sorted(itertools.chain.from_iterable(shares), key=lambda row: row["index"])
        tokens = [row.pop("tokens") for row in records if "tokens" in row]
        stop = any(distributed.gather(run.stop, world))  # a signal may have come to some ranks only
        due = cfg.sees_skills and cfg.update_every and step % cfg.update_every == 0
        run.bank_is_due = bool(due and stop)  # it may take minutes: put off
        ended_by: BaseException | None = None
        counts, begun = {}, time.perf_counter()
        if cfg.sees_skills and not run.bank_is_due:
            try:
                with end_at_once(run):
                    counts = evolve_bank(run, step, records)  # line 17
                stop = any(distributed.gather(run.stop, world)) if due else stop
            except (KeyboardInterrupt, ConnectionError, UserError) as e:  # its server may be gone
                run.bank_is_due = stop = True
                ended_by = e
        seconds["bank"] = time.perf_counter() - begun
        run.step = step
        skipped = 0 if math.isfinite(norm) else skipped + 1
        if world.main:
            rate, peak = run.optimizer.param_groups[0]["lr"], runlog.memory_gb(world)
            metrics = runlog.summarize(step, records, norm, rate, seconds, peak) | counts
            runlog.write(run.out, ([metrics], records, tokens), loggers)
            bar.write(runlog.log_line(metrics, cfg.updates))
            history.append(metrics)
            for notice in runlog.notices(cfg, history):
                bar.write(notice)
        if stop or skipped == 3 or step % cfg.checkpoint_every == 0 or step == cfg.updates:
            save(run)
        if isinstance(ended_by, UserError):
            raise type(ended_by)(f"{ended_by}; {runlog.how_to_continue(cfg)}")
        if ended_by:
            raise ended_by
        if skipped == 3:
            return "three steps in a row were not finite", 1
        if stop and (step < cfg.updates or cfg.eval_data or run.bank_is_due):
            return "stopped as asked", 0
    return "", 0


@contextlib.contextmanager
def end_at_once(run: Run) -> Iterator[None]:
    """In this block a second signal raises KeyboardInterrupt; elsewhere it would tear files.

    `optimizer_step` ends that early, before it changes the weights.
    """
    run.may_end_now = True
    try:
        yield
    finally:
        run.may_end_now = False


def save(run: Run) -> None:
    """A checkpoint of the last step, if there is one and it is not saved yet. Rank 0 writes."""
    at = run.out / "checkpoints" / f"step_{run.step:06d}"
    if run.world.main and run.step and not at.exists():
        kept, step, cfg = run.kept, run.step, run.cfg
        runlog.save_checkpoint(at, run.model, run.tokenizer, run.optimizer, step, kept, cfg)
        tqdm.write(f"saved {at}")


def launch(
    cfg: Config,
    resume: bool,
    step_fn: Callable[[Run, int], StepResult] = train_step,
    retriever: skills.Retriever | None = None,
) -> int:
    """Prepare, train, and evaluate before and after where --eval-data is given; the exit code."""
    inputs.check_directory(cfg, resume)
    if resume:
        inputs.check_script(cfg)
    world = distributed.init(cfg.device)
    with distributed.locked(pathlib.Path(cfg.out), world):
        run = prepare(cfg, world, resume, retriever)
        with run.verifier:
            code = train(run, step_fn)
        if run.stop or code:
            return code
        del run  # the evaluation wants its memory
        with cli.continued_by(lambda: runlog.how_to_continue(cfg)):
            eval.before_and_after(cfg, world)
    if world.main:
        print(runlog.what_next(cfg))
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    return cli.command("sgsd", lambda: launch(*config.parse(argv, "sgsd.py", __doc__)))


if __name__ == "__main__":
    distributed.leave(main())
