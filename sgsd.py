"""Skill-Conditioned Gated Self-Distillation (SGSD), in plain PyTorch.

    loss(x) = sum_k alpha_k * rho_k * mean over unmasked t of
              [ log 2 - log(1 + exp(-Delta_t^2 / (2 tau_g))) ]                      Eq. 16

One policy plays two roles. The student sees only the problem and samples a solution; a verifier
says right or wrong. Each of K retrieved skill-mistake pairs makes a teacher: the same policy with
that pair in its prompt. All of them score the student's tokens; Delta is the teacher-student gap
of log-probabilities. If a teacher makes a right solution likelier, or a wrong one less likely, the
student is distilled from it (rho = +1). If it does the opposite, the student is pushed away from it
(-1). If its opinion is too weak, it is ignored (0).

    python sgsd.py --preset tiny                                         see it run, in minutes
    torchrun --nproc_per_node 8 sgsd.py --model Qwen/Qwen3-1.7B          train
    python sgsd.py --resume runs/sgsd                                    continue a run
    python eval.py runs/sgsd/checkpoints/step_000200                     avg@12

Read it from top to bottom: the objective, one step (Algorithm 1), the bank's schedule, the run.
Tags are rows of docs/decisions.md: what the paper leaves open (S...), and what differs (D...).

Dimension key: K teachers, T completion tokens; `delta_KT` is [K, T]. Log-probabilities are nats.
"""

if __name__ == "__main__":  # --help and a wrong flag are answered before torch is imported
    from lib import config

    config.end_at_signals("Run the same command to continue.")
    config.parse(None, __doc__)

# ------------------------------------------------------- the objective: needs torch only

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

EPS = 1e-8  # in the denominators (S1)


def _check(where: str, ok: object, rule: str) -> None:
    if not ok:
        raise ValueError(f"{where}: {rule}")


def _check_gaps(where: str, delta_KT: Tensor, mask_T: Tensor | None = None, *of_K: Tensor) -> None:
    """Gaps must be [K, T] in fp32 or fp64, the mask [T] of 0 and 1, weights and polarities [K]."""
    is_float = delta_KT.dtype in (torch.float32, torch.float64)
    rule = f"gaps must be float32 or float64, got {delta_KT.dtype}; bf16 errs by .1"
    _check(where, is_float, rule)
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
import functools
import itertools
import json
import math
import os
import pathlib
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

from tqdm import tqdm

import distributed
import eval
import rollout
import scoring
import skills
from distributed import World
from lib import config, files, model, problems, runlog, verify
from lib.config import Config
from lib.problems import Problem
from rollout import Rollout, Sampling
from skills import SkillBank, SkillPair

ROOT = pathlib.Path(__file__).parent
Retriever = Callable[[SkillBank, Problem, int, int], list[SkillPair]]  # (bank, problem, K, step)
Stream = Callable[[list[rollout.Row], Sampling, int], Iterator]  # (rows, sampling, rows at a time)


@dataclass
class Run:
    """A training run."""

    cfg: Config
    out: pathlib.Path  # the directory
    world: World
    lm: Any  # the policy: a causal language model with adapters
    tokenizer: Any
    problems: list[Problem]
    verifier: verify.Judge
    stream: Stream  # decodes completions of the policy
    stops: list[int]  # ids that end a completion
    served: Any = None  # the policy on an inference server, an `lib.served.TrainedPolicy`
    optimizer: Any = None
    masked_ids: set[int] = field(default_factory=set)
    step: int = 0  # the last complete step
    extra_tensors: dict[str, Tensor] = field(default_factory=dict)  # saved with a checkpoint
    signalled: float = 0.0  # when the first signal came, in seconds of a monotonic clock; 0: never
    clock: runlog.Stopwatch = field(default_factory=runlog.Stopwatch)  # of the present step
    # The bank's life; None where the method uses no bank.
    bank: SkillBank | None = None
    retriever: Retriever | None = None
    writer: skills.Writer | None = None
    window: list[dict] = field(default_factory=list)  # rollouts since the bank last evolved

    def retrieve(self, x: Problem, step: int) -> list[SkillPair]:
        """The K_x skill-mistake pairs of a problem, best first (Eq. 2); none without a bank."""
        if self.bank is None or self.retriever is None:
            return []
        return self.retriever(self.bank, x, self.cfg.num_teachers, step)


# ----------------------------------------------------------------------- one step (Algorithm 1)


@dataclass
class Example:
    """A rollout with what its loss is made from."""

    index: int  # its place in the global batch
    rollout: Rollout
    group: list[Rollout]  # all rollouts of its problem in this step, itself among them
    pairs_K: list[SkillPair]  # the retrieved ones
    contexts_K: list[list[int]]  # the teachers' prompts


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
        """For a method whose loss needs only the student's log-probabilities."""
        none_K, none_KT = logp_T.new_zeros(0), logp_T.new_zeros(0, len(logp_T))
        return cls(loss, torch.ones_like(logp_T), none_KT, none_K, none_K, none_K, none_K)


PromptsOf = Callable[[Run, Problem, list[SkillPair]], tuple[list[int], list[list[int]]]]
LossOf = Callable[[Run, Example], RolloutLoss]
StepResult = tuple[list[dict], float, dict[str, float]]  # records, gradient norm, seconds by part


def reward(roll: Rollout) -> float:
    """Training reward of a rollout; by default the verifier's ±1.

    SGSD takes -1 or +1, GRPO any number. Evaluation, the bank's memories and its success gate use
    the verdict itself, so another reward changes none of them.
    """
    return roll.r


def prompt_ids(run: Run, text: str, what: str, thinking: str = "closed") -> list[int]:
    """A prompt's ids with the think block closed, open, or bare: left to the model (§4.1, S3)."""
    ids = rollout.chat_ids(run.tokenizer, text, thinking=thinking != "closed")
    if thinking == "open" and not run.tokenizer.decode(ids[-9:]).rstrip().endswith("<think>"):
        ids += run.tokenizer.encode("<think>\n", add_special_tokens=False)
    limit = run.cfg.max_prompt_tokens
    if len(ids) > limit:
        rule = f"--max-prompt-tokens is {limit}; drop the problem or raise the limit"
        raise ValueError(f"{what}: the prompt has {len(ids)} tokens, {rule}")
    return ids


def teacher_prompts(run: Run, x: Problem, pairs_K: list[SkillPair]) -> list[list[int]]:
    """c_k(x) = g_k + e_k + x as ids, one per pair (Eq. 3)."""
    contexts_K = []
    for pair in pairs_K:
        text = skills.render_teacher(pair, x.problem)
        contexts_K.append(prompt_ids(run, text, f"teacher of {x.id}", run.cfg.teacher_prefix))
    return contexts_K


def prompts(run: Run, x: Problem, pairs_K: list[SkillPair]) -> tuple[list[int], list[list[int]]]:
    """The student's prompt, which is the problem and nothing else, and each teacher's."""
    student = prompt_ids(run, skills.render_student(x.problem), x.id)
    return student, teacher_prompts(run, x, pairs_K)  # Eq. 3


def sample(
    run: Run, data: list[Problem], students: list[list[int]], keys: list[int]
) -> list[Rollout]:
    """y ~ p_S(. | x) for each problem, and the verifier's r (Eq. 1). students: the prompts."""
    cfg = run.cfg
    sampling = Sampling(cfg.temperature, cfg.top_p, cfg.top_k, cfg.max_new_tokens)
    rows = rollout.rows_of(students, keys, cfg.max_new_tokens)
    stream = run.served.rollouts if run.served else run.stream
    turns = stream(rows, sampling, cfg.rollout_rows or max(1, len(rows)))
    completions = dict(itertools.chain.from_iterable(turns))
    turn = [(i, completions[i]) for i in range(len(rows))]
    return rollout.judge(run.tokenizer, run.stops, data, students, turn, run.verifier)


def pair_weights(run: Run, pairs_K: list[SkillPair]) -> Tensor:
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
    contexts_K = example.contexts_K
    logpT_KT = scoring.score_teachers(run.lm, contexts_K, ids_T, cfg.score_tokens)  # Eq. 4
    run.clock.lap("score")
    # The student's own pass is made once for all K teachers (D7).
    logpS_1T = scoring.token_logprobs(run.lm, [roll.prompt_ids], [ids_T], grad=True)  # Eq. 5
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
    batch = problems.minibatch(run.problems, cfg.batch_size, step, cfg.seed, generations)
    places = [i for i in range(len(batch)) if i // generations % world.size == world.rank]
    data = [batch[i][0] for i in places]
    keys = [rollout.sample_key(cfg.seed, step, batch[i][0].id, batch[i][1]) for i in places]

    # Lines 4 and 6. Each retrieved skill-mistake pair becomes one teacher's prompt.
    pairs, students, contexts = [], [], []
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
        length = len(roll.prompt_ids) + len(roll.completion_ids)
        model.checkpoint_activations(run.lm, length > cfg.checkpoint_above)
        result = loss_of(run, example)
        if result.loss.requires_grad:  # no pair, no teacher, no loss (S8)
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
    cfg, params = run.cfg, list(model.trained(run.lm).values())
    distributed.sum_gradients(params, run.world)
    norm = float(torch.nn.utils.clip_grad_norm_(params, cfg.grad_clip))
    run.optimizer.param_groups[0]["lr"] = cfg.learning_rate * (1 - (step - 1) / cfg.steps)
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


def bank_versions(out: pathlib.Path) -> dict[int, pathlib.Path]:
    """The saved banks of a run, by the step after which each came into use."""
    return {int(path.stem[5:]): path for path in sorted((out / "bank").glob("step_*.json"))}


def save_bank(bank: SkillBank, out: pathlib.Path, step: int) -> None:
    """Save a bank as the version of step `step` and as the latest."""
    for name in (f"step_{step:06d}", "bank"):
        bank.save(out / "bank" / f"{name}.json")


def begin_bank(run: Run) -> None:
    """Make the bank where there is none (Alg. 2), and continue its schedule (D2, D9).

    An evolution that was due after the last step is made again: a checkpoint is of the time before.
    """
    cfg, step = run.cfg, run.step
    bank = run.bank or make_bank(run, run.out / "bank")
    distributed.together(lambda: refuse_without_pairs(bank, cfg), run.world)
    run.bank = bank
    distributed.together(lambda: check_teacher_prompts(run), run.world)
    window = []
    if run.world.main:
        save_bank(bank, run.out, max(bank_versions(run.out), default=0))
        print(skills.bank_line(bank, cfg.num_teachers))
        before = (step - 1) - (step - 1) % max(1, cfg.evolve_every)  # when it evolved before `step`
        rows = files.read_jsonl(run.out / "rollouts.jsonl")
        window = [row for row in rows if row["step"] > before]
    run.window = distributed.gather(window, run.world)[0]  # rank 0's, given to all
    if step:
        evolve_bank(run, step, [])


def check_teacher_prompts(run: Run) -> None:
    """ValueError where the longest pair with the longest problem exceeds --max-prompt-tokens."""
    bank = run.bank
    if bank is None or not bank.general_skills or not bank.common_mistakes:
        return
    longest = max(run.problems, key=lambda x: len(x.problem))
    skill = max(bank.general_skills, key=lambda e: len(skills.entry_text(e, "general_skills")))
    mistake = max(bank.common_mistakes, key=lambda e: len(skills.entry_text(e, "common_mistakes")))
    teacher_prompts(run, longest, [SkillPair(skill, mistake, 0.0, 0.0)])


def evolve_bank(run: Run, step: int, records: list[dict]) -> None:
    """Algorithm 4, where it is due, on all ranks' rollouts since it was last due (D2)."""
    cfg = run.cfg
    assert run.bank is not None and run.writer is not None
    if not cfg.evolve_every:
        return
    run.window += records
    if step % cfg.evolve_every:
        return
    run.writer.step = step
    window = [SimpleNamespace(**row) for row in run.window]
    bank = skills.evolve(run.bank, window, step, run.writer, **cfg.evolution)
    if run.world.main:
        tqdm.write(skills.evolution_line(run.bank, bank, run.window, run.writer.lost))
        if bank is not run.bank:
            save_bank(bank, run.out, step)
    run.bank, run.window = bank, []


def bank_numbers(run: Run) -> dict[str, int]:
    """For metrics.jsonl: the bank that a step used, and the writer's replies since the last.

    Every rank asks: `take` makes old prompts new again, and ranks must agree on what is new.
    """
    if run.bank is None or run.writer is None:
        return {}
    sizes = len(run.bank.general_skills), len(run.bank.common_mistakes)
    counts = {f"replies_{outcome}": n for outcome, n in run.writer.take().items()}
    return {"bank_skills": sizes[0], "bank_mistakes": sizes[1], **counts}


def refuse_without_pairs(bank: SkillBank, cfg: Config) -> None:
    """ValueError where no teacher can be made of a bank (S8), unless --allow-empty-bank."""
    if (bank.general_skills and bank.common_mistakes) or cfg.allow_empty_bank:
        return
    about = bank.metadata
    rule = "no pair, no teacher, nothing to learn (S8)"
    if "seed_solutions" in about:
        rule += f"; it was written from {about['seed_solutions']} solutions"
        cut = about.get("truncated_seed_solutions", 0)
        rule += f", {about['right_seed_solutions']} correct and {cut} cut at --cold-start-tokens"
        rule += f"; {skills.describe_lost_replies(about.get('lost_replies', {}))}"
    fix = "take easier or harder problems, raise --cold-start or a limit of tokens"
    fix += ", or pass --allow-empty-bank"
    raise ValueError(f"bank: {bank.sizes}: {rule}; {fix}")


def make_bank(run: Run, folder: pathlib.Path) -> SkillBank:
    """Algorithm 2 from problems to bank, shared over the ranks.

    The policy solves seed problems under settings of their own (S21), and the writer answers the
    prompts. Memories go to memories.jsonl in the folder as they come; those that a killed run has
    left are used again.
    """
    cfg, world, writer = run.cfg, run.world, run.writer
    assert writer is not None
    path = folder / "memories.jsonl"
    chosen = random.Random(cfg.seed).sample(run.problems, min(cfg.cold_start, len(run.problems)))
    sampling = Sampling(
        cfg.cold_start_temperature,
        cfg.cold_start_top_p,
        cfg.cold_start_top_k,
        cfg.cold_start_tokens,
    )
    made_with = {"model": cfg.model, "seed": cfg.seed, **asdict(sampling)}
    made_with |= {"thinking": cfg.cold_start_thinking, "memory_answer": cfg.memory_answer}
    made_with |= {"verifier": eval.verifier_version(cfg.verifier)}
    made_with |= {"prompt": skills.template("memory"), "server": bool(cfg.server)}  # S27

    def made(problem: str, answer: str) -> dict:  # a corrected answer is another verdict
        return made_with | {"problem": problem, "answer": answer}

    memories = {m["problem_id"]: m for m in files.read_jsonl(path)}
    memories = distributed.gather(memories, world)[0]  # rank 0's, before it writes
    left = []
    for x in chosen:
        memory = memories.get(x.id, {})
        if memory.get("made_with") != made(x.problem, x.answer):
            left.append(x)
    if world.main:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "replies.jsonl").unlink(missing_ok=True)  # all its prompts are asked again
    texts = [skills.render("memory", {"problem": x.problem}) for x in left]
    think = cfg.cold_start_thinking
    seed_prompts = [rollout.chat_ids(run.tokenizer, text, thinking=think) for text in texts]
    keys = [rollout.sample_key(cfg.seed, 0, x.id) for x in left]

    def finish(turn: list[tuple[int, list[int]]]) -> list[dict]:
        verifier = run.verifier
        rolls = rollout.judge(run.tokenizer, run.stops, left, seed_prompts, turn, verifier)
        fresh = []
        for roll in rolls:
            about = {"truncated": roll.truncated, "made_with": made(roll.problem, roll.gold)}
            fresh.append({**skills.memory_of(roll, cfg.memory_answer), **about})
        return fresh

    rows = rollout.rows_of(seed_prompts, keys, cfg.cold_start_tokens)
    rows_at_a_time = cfg.rollout_rows or 16

    def solve(mine: list[rollout.Row]) -> Iterator:
        return run.stream(mine, sampling, rows_at_a_time)

    for fresh in distributed.share(world, rows, solve, finish, "solving"):  # lines 2-7
        if world.main:
            files.append_jsonl(path, fresh)
        memories |= {m["problem_id"]: m for m in fresh}
    seeds = [memories[x.id] for x in chosen]
    bank = skills.cold_start(seeds, writer, **cfg.merging)  # lines 8-16
    bank.metadata["truncated_seed_solutions"] = sum(m["truncated"] for m in seeds)
    bank.metadata["lost_replies"] = dict(writer.lost)
    outcomes = writer.take()
    bank.metadata.update(seed=cfg.seed, seed_problems=[x.id for x in chosen], replies=outcomes)
    if cfg.server:
        bank.metadata["engine"] = "a server's"
    return bank


def writer_of(
    cfg: Config, world: World, policy: tuple[Any, Any, Stream], folder: pathlib.Path
) -> skills.Writer:
    """The bank's writer: the policy, or --writer-model in its place, here or on --writer-server.

    policy: the model, its tokenizer and what decodes it. folder: of replies.jsonl.
    """
    lm, tokenizer, stream = policy
    if cfg.writer_server:
        lm, tokenizer = model.load_outline(cfg.writer_model)
        nothing = skills.memory_of(SimpleNamespace(problem="", text="", r=-1, pred=None))
        text = skills.render_extraction(nothing, "common_mistakes")
        tokens = len(rollout.chat_ids(tokenizer, text, thinking=False)) + cfg.reply_tokens
        server = server_of(cfg, cfg.writer_server, cfg.writer_model, tokens)
        stream = server_stream(server, lm, tokenizer)
    elif cfg.writer_model:
        lm, tokenizer = model.load_model(cfg.writer_model, world.device, cfg.dtype, cfg.attn)
        stream = functools.partial(rollout.stream, lm, tokenizer)
    rows_at_a_time = cfg.rollout_rows or 16

    def reply(rows: list[rollout.Row], sampling: Sampling, stage: str) -> dict[int, list[int]]:
        def decode(mine: list[rollout.Row]) -> Iterator:
            return stream(mine, sampling, rows_at_a_time)

        replies: dict[int, list[int]] = {}
        for finished in distributed.share(world, rows, decode, list, stage):
            replies |= dict(finished)
        return replies

    def log(row: dict) -> None:
        if world.main:
            files.append_jsonl(folder / "replies.jsonl", [row])

    stops = rollout.stop_ids(lm, tokenizer)
    return skills.Writer(tokenizer, stops, reply, log, cfg.reply_tokens, cfg.seed)


def server_of(cfg: Config, url: str, name: str, tokens: int) -> Any:
    """An inference server that has the model `name` and a context of so many tokens (S27)."""
    from lib import served

    server = served.Server(url, name, seeds=cfg.server_seeds, rows=cfg.rollout_rows or 16)
    server.check(tokens)
    return server


def server_stream(server: Any, lm: Any, tokenizer: Any) -> Stream:
    """What decodes a server's base model, with the interface of `rollout.stream`."""
    stops = rollout.stop_ids(lm, tokenizer)
    return lambda rows, sampling, rows_at_a_time: server.stream(tokenizer, stops, rows, sampling)


def context_needed(cfg: Config, data: list[Problem], tokenizer: Any) -> int:
    """Tokens of the longest prompt about a problem with its reply; a server must have as many.

    What a merge needs depends on the entries, and shows only when it is asked.
    """
    longest = max((x.problem for x in data), key=lambda text: len(text.encode("utf-8", "replace")))
    limits = {skills.render_student(longest): cfg.max_new_tokens}
    if cfg.uses_skill_bank and not cfg.bank:
        limits[skills.render("memory", {"problem": longest})] = cfg.cold_start_tokens
    if cfg.uses_skill_bank and (cfg.evolve_every or not cfg.bank):
        solution = SimpleNamespace(problem=longest, text="so " * 700, r=-1, pred="12")
        memory = skills.memory_of(solution)
        limits[skills.render_extraction(memory, "common_mistakes")] = cfg.reply_tokens
    needs = []
    for text, limit in limits.items():
        needs.append(len(rollout.chat_ids(tokenizer, text, thinking=True)) + limit)
    return max(needs)


# ----------------------------------------------------------------------------------------- a run


def load_training(cfg: Config) -> tuple[list[Problem], dict[str, int]]:
    """The training problems and their counts; ValueError where one is in an evaluation set."""
    fields = problems.Fields(cfg.problem_field, cfg.answer_field, cfg.answer_after)
    data, counts = problems.load_problems(cfg.data, split=cfg.split, fields=fields)
    held_out = json.loads((ROOT / "lib/eval_sets.json").read_text())
    others = problems.load_set(cfg.eval_data, "test", fields) if cfg.eval_data else []
    if others:  # read now, not after the last step
        held_out[cfg.eval_data] = [problems.fingerprint(x.problem) for x in others]
    if cfg.verifier == Config.verifier:
        problems.refuse_unanswerable(data, f"--data {cfg.data}")
        problems.refuse_unanswerable(others, f"--eval-data {cfg.eval_data}")
    if not cfg.allow_eval_overlap:
        problems.refuse_overlap(data, f"--data {cfg.data}", held_out)
    return data, counts


def check_directory(out: pathlib.Path, resume: bool) -> None:
    """ValueError unless --out can take this run."""
    for path in (out, *out.parents):
        if path.is_file():
            raise ValueError(f"--out {out}: {path} is a file; a directory is needed")
    names = {path.name for path in out.glob("*") if path.suffix != ".tmp"}
    if not resume and names - {"wandb", "tensorboard", "served", files.LOCK}:
        rule = "the directory is not empty; choose another, or continue its run"
        raise ValueError(f"--out {out}: {rule} with --resume {out}")


def prepare(
    cfg: Config,
    world: World,
    resume: bool,
    held: contextlib.ExitStack,
    retriever: Retriever | None = None,
) -> Run:
    """Read and check everything that a user's mistake can break. No collective, no file written.

    held: takes the lock of the directory, on rank 0, and the verifier. retriever: replaces the
    nearest pairs by --encoder.
    """
    out = pathlib.Path(cfg.out)
    if cfg.batch_size < world.size:
        rule = f"must be >= {world.size}, since every process needs a problem"
        raise ValueError(f"--batch-size {cfg.batch_size}: {rule}")
    check_directory(out, resume)
    if world.main:
        held.enter_context(files.locked(out))
    data, counts = load_training(cfg)
    checkpoint = max(out.glob("checkpoints/step_*"), default=None) if resume else None
    step = int(checkpoint.name[5:]) if checkpoint else 0
    if step > cfg.steps:
        fix = "give a larger number, or evaluate the run"
        raise ValueError(f"--steps {cfg.steps}: {out} is at step {step} already; {fix}")
    if resume and not checkpoint:
        lost = max((row["step"] for row in files.read_jsonl(out / "metrics.jsonl")), default=0)
        if lost > config.saved(out)["checkpoint_every"]:
            rule = f"has made {lost} steps, but checkpoints/ is empty"
            raise ValueError(f"--resume {out}: {rule}; bring them back, or start a new run")
    bank = load_bank(cfg, step, resume) if cfg.uses_skill_bank else None
    skills.use_prompts(cfg.prompts)
    kind = verify.load_judge(cfg.verifier)
    verifier = held.enter_context(kind(cfg.verify_timeout, cfg.verify_workers))
    verifier.same("1/2", "2/4")  # a verifier that does not start shows now

    lm, tokenizer = model.load_model(cfg.model, world.device, cfg.dtype, cfg.attn)
    stops = rollout.stop_ids(lm, tokenizer)
    torch.manual_seed(cfg.seed)
    lm = model.with_adapters(lm, cfg.lora_rank, cfg.lora_alpha)
    stream: Stream = functools.partial(rollout.stream, lm, tokenizer)
    run = Run(cfg, out, world, lm, tokenizer, data, verifier, stream, stops, bank=bank)
    run.masked_ids = model.masked_token_ids(tokenizer, cfg.mask_extra) | {*stops}
    params = model.trained(lm).values()
    run.optimizer = torch.optim.AdamW(params, lr=cfg.learning_rate, weight_decay=0.0)
    if checkpoint:
        run.step, run.extra_tensors = model.restore(checkpoint, lm, run.optimizer)
    if cfg.server:
        run.served = served_policy(run)
        run.stream = run.served.stream
    if cfg.uses_skill_bank:
        run.retriever = retriever or nearest(cfg, world)
        run.writer = writer_of(cfg, world, (lm, tokenizer, run.stream), out / "bank")
    for x in data:  # no token is shorter than a byte, so few problems need to be tokenised
        if len(x.problem.encode("utf-8", "replace")) + 512 > cfg.max_prompt_tokens:
            prompt_ids(run, skills.render_student(x.problem), f"problem {x.id}")
    if world.main:
        announce(run, counts)
    return run


def served_policy(run: Run) -> Any:
    """The policy on this rank's server, which gets the adapter whenever it has changed (S27)."""
    from lib import served

    cfg, rank = run.cfg, run.world.rank
    url = cfg.server[rank % len(cfg.server)]
    tokens = context_needed(cfg, run.problems, run.tokenizer)
    server = server_of(cfg, url, cfg.server_model or cfg.model, tokens)
    name = f"{run.out.name}-rank{rank}"
    folder = run.out / "served"
    return served.TrainedPolicy(
        server, run.lm, run.tokenizer, run.stops, folder, name, scoring.token_logprobs
    )


def load_bank(cfg: Config, step: int, resume: bool) -> SkillBank | None:
    """The bank that a run uses in step `step`, at first that of --bank; None without any (D9)."""
    versions = bank_versions(pathlib.Path(cfg.out)) if resume else {}
    if versions:
        in_use = [since for since in versions if since < max(1, step)]
        if not in_use:
            rule = f"no version is from before step {step}; was a file removed?"
            raise ValueError(f"{cfg.out}/bank: {rule}")
        return SkillBank.load(versions[max(in_use)])
    if not cfg.bank:
        return None
    bank = SkillBank.load(cfg.bank)
    refuse_short_bank(bank, cfg)
    return bank


def refuse_short_bank(bank: SkillBank, cfg: Config) -> None:
    """ValueError where the bank of --bank makes fewer than K pairs."""
    shorter = min(len(bank.general_skills), len(bank.common_mistakes))
    if shorter < cfg.num_teachers:
        rule = f"--num-teachers {cfg.num_teachers} needs as many of each; lower it"
        raise ValueError(f"--bank {cfg.bank}: has {bank.sizes}, {rule}")


def nearest(cfg: Config, world: World) -> Retriever:
    """Retrieval of the pairs nearest to a problem by --encoder (Eq. 2, S10)."""
    embed = model.load_encoder(cfg.encoder, str(world.device))

    def retrieve(bank: SkillBank, x: Problem, k: int, step: int) -> list[SkillPair]:
        return bank.retrieve(cfg.query_prompt + x.problem, k, embed)

    return retrieve


def announce(run: Run, counts: dict[str, int]) -> None:
    """Print what a run starts from."""
    cfg, lm, tokenizer = run.cfg, run.lm, run.tokenizer
    print(f"data {cfg.data}: " + ", ".join(f"{n} {k.replace('_', ' ')}" for k, n in counts.items()))
    if cfg.batch_size > len(run.problems):
        again = f"{cfg.batch_size / len(run.problems):.1f} times in each step"
        print(f"data: --batch-size {cfg.batch_size} takes each of the problems {again}")
    learning = sum(p.numel() for p in model.trained(lm).values())
    learn = f"{learning:,} of {lm.num_parameters():,} parameters learn"
    print(f"model {cfg.model}: {learn}, {run.world.size} x {run.world.device.type}")
    shown = [repr(tokenizer.decode([i])) for i in sorted(run.masked_ids)[:40]]
    count = len(run.masked_ids)
    print(f"token mask: {count} formatting and special ids (S2): {' '.join(shown)}")
    both = [rollout.chat_ids(tokenizer, "x", thinking=on) for on in (True, False)]
    if both[0] == both[1]:
        print("thinking: no switch in the chat template, so closed and bare are one prompt (S3)")
    if not scoring.head_is_sliced(lm):
        print("head: caps or scales the logits: they are scored whole, in the model's dtype (S22)")
    line = "a step's line: mean loss, share of right solutions, teachers distilled/reversed/ignored"
    print(f"{line}, clipped gaps, unmasked tokens, gradient norm, seconds; docs/metrics.md")
    if run.step:
        print(f"resumed from step {run.step}")


def begin(run: Run, resume: bool) -> list[Callable[[dict], None]]:
    """Cut the files back to the last checkpoint, write config.json, make or continue the bank.

    Returns the trackers of --report-to. All ranks have read before it is called.
    """
    cfg, world, out, step = run.cfg, run.world, run.out, run.step
    distributed.broadcast_parameters(model.trained(run.lm).values(), world)
    trackers: list[Callable[[dict], None]] = []
    if world.main:
        for name in runlog.LOGS:
            files.trim_jsonl(out / f"{name}.jsonl", step)
        shutil.rmtree(out / "served", ignore_errors=True)  # adapters that a kill has left
        # The evolution after `step` is made again.
        files.trim_jsonl(out / "bank/replies.jsonl", max(0, step - 1))
        for since, path in bank_versions(out).items():
            if since >= max(1, step):
                path.unlink()
        about = provenance(cfg, resume, step)
        trackers = runlog.open_trackers(out, asdict(cfg), step, cfg.report_to, about["id"])
        files.write_json(out / "config.json", about)
    distributed.barrier(world)
    if cfg.uses_skill_bank:
        begin_bank(run)
    return trackers


def provenance(cfg: Config, resume: bool, step: int) -> dict:
    """What config.json holds: settings, command, commit, versions; and every continuation."""
    fresh = runlog.provenance(asdict(cfg), config.VERSION)
    file = pathlib.Path(cfg.out, "config.json")
    if not resume or not file.exists():
        return fresh | {"continuations": []}
    first, settings = files.read_json(file), config.saved(cfg.out)
    changed = {k: [v, fresh["settings"][k]] for k, v in settings.items()}
    changed = {k: pair for k, pair in changed.items() if pair[0] != pair[1] and k != "out"}
    if "server" in changed:
        print("from here on another sampler draws the rollouts: --server has changed (S27)")
    if "steps" in changed:
        rates = [cfg.learning_rate * (1 - step / steps) for steps in changed["steps"]]
        before, now = changed["steps"]
        print(
            f"--steps {now} instead of {before}: the learning rate of step {step + 1} is "
            f"{rates[1]:.2g} instead of {max(0.0, rates[0]):.2g}"
        )
    differences = []
    for name in ("commit", "changes"):
        if fresh[name] != first.get(name):
            before, now = first.get(name) or "none", fresh[name] or "none"
            differences.append(f"{name}: {before}, now {now}")
    if differences:
        what = "; ".join(differences)
        print(f"the code has changed since the run began ({what})", file=sys.stderr)
    again = {k: fresh[k] for k in ("command", "commit", "changes")}
    again |= {"when": time.strftime("%Y-%m-%d %H:%M:%S"), "step": step, "changed": changed}
    continuations = [*first.get("continuations", []), again]
    return first | {"settings": fresh["settings"], "continuations": continuations}


def train(
    run: Run,
    trackers: Sequence[Callable[[dict], None]] = (),
    step_fn: Callable[[Run, int], StepResult] = train_step,
) -> int:
    """The steps, with logs and checkpoints.

    Returns the exit code: 0 at the end, 130 after a signal, 1 after three steps in a row that were
    not finite.
    """
    cfg, world, skipped = run.cfg, run.world, 0
    history = list(files.read_jsonl(run.out / "metrics.jsonl")) if world.main else []
    silent = not (world.main and sys.stderr.isatty())  # a log file has the steps' own lines
    remaining = range(run.step + 1, cfg.steps + 1)
    for step in tqdm(remaining, "train", cfg.steps, initial=run.step, disable=silent, unit="step"):
        finish_step_at_signals(run)
        try:
            records_of_rank, norm, seconds = step_fn(run, step)
        except OSError:  # such as a server that is gone; no weight has moved
            save(run)
            raise
        shares = distributed.gather(records_of_rank, world)
        records = sorted(itertools.chain.from_iterable(shares), key=lambda row: row["index"])
        tokens = [row.pop("tokens") for row in records if "tokens" in row]
        of_bank = bank_numbers(run)
        if world.main:
            rate, peak = run.optimizer.param_groups[0]["lr"], runlog.memory_gb(world.device)
            metrics = runlog.summarize(step, records, norm, rate, seconds, peak) | of_bank
            log_step(run, metrics, (records, tokens), trackers)
            history.append(metrics)
            for notice in runlog.notices(history, cfg.batch_size, run.out / "checkpoints"):
                tqdm.write(notice)
        run.step = step
        skipped = 0 if math.isfinite(norm) else skipped + 1
        evolves = bool(cfg.uses_skill_bank and cfg.evolve_every and step % cfg.evolve_every == 0)
        is_due = evolves or step % cfg.checkpoint_every == 0 or step == cfg.steps
        if is_due or skipped == 3:
            save(run)
        stop = any(distributed.gather(bool(run.signalled), world))  # it may reach some ranks only
        if stop or skipped == 3:
            save(run)
            reason = "stopped by a signal" if stop else "three steps in a row were not finite"
            if world.main:
                tqdm.write(f"{reason}; {how_to_continue(cfg)}")
            return 130 if stop else 1
        config.end_at_signals(how_to_continue(cfg))
        if cfg.uses_skill_bank:
            evolve_bank(run, step, records)  # line 17
    return 0


def finish_step_at_signals(run: Run) -> None:
    """From here on the first Ctrl-C or SIGTERM stops the run after the step, a later one at once.

    Within a second a signal counts as the same one: torchrun passes on what the terminal has sent.
    """

    def stop(*_: object) -> None:
        now = time.monotonic()
        if run.signalled and now - run.signalled > 1:
            os._exit(130)
        if not run.signalled and run.world.main:
            line = f"finishing step {run.step + 1}, then stopping; once more stops at once"
            os.write(2, f"\n{line}\n".encode())  # print may be what the signal interrupts
        run.signalled = run.signalled or now

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def log_step(
    run: Run,
    metrics: dict,
    rows: tuple[list[dict], list[dict]],
    trackers: Sequence[Callable[[dict], None]],
) -> None:
    """Append a step's lines to the logs and print its line. rows: of rollouts and of tokens."""
    records, tokens = rows
    for name, lines in zip(runlog.LOGS, ([metrics], records, tokens)):
        files.append_jsonl(run.out / f"{name}.jsonl", lines)
    for track in trackers:
        track(metrics)
    tqdm.write(runlog.log_line(metrics, run.cfg.steps))


def save(run: Run) -> None:
    """A checkpoint of the last step, unless it is saved already. Rank 0 writes.

    --keep-checkpoints N removes all but the first and the last N, and but one under evaluation.
    """
    path = run.out / "checkpoints" / f"step_{run.step:06d}"
    if run.world.main and run.step and not path.exists():
        with files.whole(path) as folder:
            model.save(folder, run.lm, run.tokenizer, run.optimizer, run.step, run.extra_tensors)
        tqdm.write(f"saved {path}")
        keep = run.cfg.keep_checkpoints
        others = sorted(path.parent.glob("step_*"))[1:]
        for old in others[:-keep] if keep else []:
            with contextlib.suppress(ValueError), files.locked(run.out / "eval" / old.name):
                shutil.rmtree(old.rename(old.with_name(f".{old.name}.tmp")))


def how_to_continue(cfg: Config) -> str:
    processes = os.environ.get("LOCAL_WORLD_SIZE")
    launcher = f"torchrun --nproc_per_node {processes}" if processes else "python"
    return f"continue with: {launcher} {cfg.program} --resume {cfg.out}"


# ------------------------------------------------------------------------------------ the commands


def launch(
    cfg: Config,
    resume: bool,
    step_fn: Callable[[Run, int], StepResult] = train_step,
    retriever: Retriever | None = None,
) -> int:
    """Prepare, train, and evaluate before and after where --eval-data is given; the exit code."""
    name = config.name_of(cfg.program)
    with contextlib.ExitStack() as held:
        with config.mistakes_as_one_line(name):
            world = distributed.init(cfg.device)
            run = distributed.together(lambda: prepare(cfg, world, resume, held, retriever), world)
            config.end_at_signals(how_to_continue(cfg))
            trackers = begin(run, resume)
        if run.served:
            step_fn = run.served.wrap(step_fn)
        try:
            code = train(run, trackers, step_fn)
        except OSError as e:  # a disk, or a server
            with config.mistakes_as_one_line(name):
                raise OSError(f"{e}; {how_to_continue(cfg)}") from None
        finally:
            if run.served:
                run.served.close()
        if code:
            distributed.barrier(world)  # no rank leaves while another still talks to it
            return code
        del run, step_fn  # the evaluation needs their memory
        with config.mistakes_as_one_line(name):
            eval.before_and_after(cfg, world)
    if world.main:
        print(what_next(cfg))
    distributed.barrier(world)
    return 0


def what_next(cfg: Config) -> str:
    """The commands that fit a complete run."""
    data = cfg.eval_data or "YOUR_TEST_PROBLEMS.jsonl"
    evaluate = f"python eval.py {cfg.model} {cfg.out} --data {data} {eval.flags_of(cfg)}"
    lines = [f"done; look inside: python -m extras.report {cfg.out}"]
    lines.append(f"all checkpoints: {evaluate}")
    if not cfg.eval_data:
        sets = "AIME24, AIME25 and HMMT25, from the hub"
        lines.append(f"(without --data on {sets}; a sample has up to {cfg.eval_tokens:,} tokens)")
    return "\n".join(lines)


def write_bank(argv: Sequence[str] | None = None) -> int:
    """python skills.py --out bank.json: a bank made by cold start, with the settings of sgsd.py."""
    cfg, resume = config.parse(argv, skills.__doc__, program="skills.py")
    out, folder = pathlib.Path(cfg.out), pathlib.Path(f"{cfg.out}.work")
    with config.mistakes_as_one_line("skills"), contextlib.ExitStack() as held:
        if resume or out.suffix != ".json" or out.is_dir():
            raise ValueError(f"--out {out}: a file for the bank is needed, such as bank.json")
        if out.exists() and not folder.exists():
            raise ValueError(f"--out {out}: exists, and skills.py did not make it; give another")
        # With servers this process computes nothing: CPU and gloo.
        is_served = cfg.server and (cfg.writer_server or not cfg.writer_model)
        world = distributed.init("cpu" if is_served else cfg.device)
        run = distributed.together(lambda: prepare_bank(cfg, world, folder, held), world)
        bank = make_bank(run, folder)
        distributed.together(lambda: refuse_without_pairs(bank, cfg), world)
        if world.main:
            bank.save(out)
            print(f"{out}: {bank.sizes}")
        distributed.barrier(world)
    return 0


def prepare_bank(
    cfg: Config, world: World, folder: pathlib.Path, held: contextlib.ExitStack
) -> Run:
    """`prepare` for a cold start alone: without adapters, optimizer and encoder."""
    if world.main:
        held.enter_context(files.locked(folder))
    data, _ = load_training(cfg)
    skills.use_prompts(cfg.prompts)
    kind = verify.load_judge(cfg.verifier)
    verifier = held.enter_context(kind(cfg.verify_timeout, cfg.verify_workers))
    stream: Stream
    if cfg.server:
        lm, tokenizer = model.load_outline(cfg.model)
        url, name = cfg.server[world.rank % len(cfg.server)], cfg.server_model or cfg.model
        server = server_of(cfg, url, name, context_needed(cfg, data, tokenizer))
        stream = server_stream(server, lm, tokenizer)
    else:
        lm, tokenizer = model.load_model(cfg.model, world.device, cfg.dtype, cfg.attn)
        stream = functools.partial(rollout.stream, lm, tokenizer)
    stops = rollout.stop_ids(lm, tokenizer)
    run = Run(cfg, folder, world, lm, tokenizer, data, verifier, stream, stops)
    run.writer = writer_of(cfg, world, (lm, tokenizer, stream), folder)
    return run


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    cfg, resume = config.parse(argv, __doc__)
    return launch(cfg, resume)


if __name__ == "__main__":
    distributed.leave(main)
