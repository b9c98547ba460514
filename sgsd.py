"""Skill-Conditioned Gated Self-Distillation (SGSD, arXiv 2605.28791), in plain PyTorch.

    loss(x) = sum_k alpha_k * rho_k * mean over unmasked t of
              [ log 2 - log(1 + exp(-Delta_kt^2 / (2 tau_g))) ]                     Eq. 16

(alpha_k weighs teacher k, tau_g is the gate's width.)

One policy plays two roles. The student sees only the problem and samples a solution; a verifier
says right or wrong. Each of K retrieved skill-mistake pairs makes a teacher: the same policy, as it
is now, with that pair in its prompt. Every teacher scores the student's tokens; Delta is a token's
log-probability under the teacher, less that under the student. If a teacher makes a right solution
likelier, or a wrong one less likely, the student is distilled from it (rho = +1). If it does the
opposite, the student is pushed away from it (-1). If its opinion is too weak, it is ignored (0).

    python sgsd.py --preset tiny                                         see it run, in minutes
    torchrun --nproc_per_node 8 sgsd.py --model Qwen/Qwen3-1.7B          train, or continue
    python eval.py runs/sgsd/checkpoints/step_000200                     avg@12

This file is Algorithm 1, from the inside out: the objective, a step, the bank, the loop.
Retrieval and Algorithms 2 to 4 are in skills.py, the wording of prompts in prompts/, sampling in
rollout.py, the scoring of given tokens in scoring.py, settings with their sources in lib/config.py,
what a run keeps on disk in lib/run.py. Tags such as S3 and D7 are rows of docs/decisions.md.

The defaults that decide the method:

    optimizer   learning_rate 5e-6 in the first step, falling linearly to 0 after the last (S7)
                steps 200, batch_size 32 problems with one solution each (S6), grad_clip 0.1
                lora_rank 64, lora_alpha 128
    teachers    num_teachers 8 (K), eps_a 0.05 and c_delta 3 nats, tau_g 1 nats^2
                teacher_prefix bare: the prompt leaves it to the model to begin a think block, and a
                teacher begins none, as it only scores
    student     student_prefix closed: an empty think block, so no thinking (S3)
                temperature 1.1, top_p 0.95, top_k 20, max_new_tokens 1024
    bank        a problem gets the K nearest skills and the K nearest mistakes, static or evolved
                evolve_every 25 (F), success_gate 0.8 (gamma); max_new_items 5 (N) in each
                evolution, skills and mistakes together (S12); dynamic_capacity 30 (C) in each list
                merge_group_size 32 (H), merge_patience 3 (P), reply_tokens 4096 (D4)
                memory_answer is off: the bank's writer never sees the reference answer (D3)
    cold start  cold_start 256 seed problems, from a bare prompt, so that the model thinks (S21);
                cold_start_temperature 1.0, top-p 0.95, no top-k, cold_start_tokens 38912
    prompts     max_prompt_tokens 20000: a longer problem is left out, and none is cut (S35)

Fixed choices, not settings, and the function that makes each. What the model reads and writes:

    problems    DAPO-Math-17k: in English, without duplicates, its instruction around each problem
                removed (D8): lib.problems.load_problems
    prompts     one user turn without a system message, in the model's chat template:
                rollout.chat_ids
    draws       temperature, then top-k, then top-p: rollout.select_tokens. A token's draw depends
                on seed, step, problem, its epoch, and position alone: rollout.sample_key
    the end     any stop id, of the tokenizer or the model (Qwen3 has two): rollout.stop_ids
    verdict     the last box after the last </think>: lib.verify.extract_answer. We rewrite some
                spellings that math-verify misreads, then math-verify compares the answer with the
                reference (D5): lib.verify.math_verdict. A solution without a box is wrong, and so
                is one whose check takes longer than --verify-timeout, 5 seconds

What else the gradient depends on:

    order       a new permutation in each epoch, by the seed (0); a minibatch may span several
                epochs: lib.problems.minibatch
    encoder     Qwen3-Embedding-0.6B in fp32, with its own pooling, without an instruction:
                lib.model.load_encoder
    base        bf16 on a GPU, fp32 on a CPU (S22): lib.model.load_model
    adapters    LoRA in fp32 on all linear layers but the head, times alpha / rank, without dropout,
                never merged; the sum with the base's output is rounded to the base's dtype. PEFT
                draws A by the seed, the same on each rank, and B is 0: lib.model.with_adapters
    scores      log-probabilities in nats, at temperature 1 whatever --temperature is; softmax and
                the head's product in fp32, on a GPU the product in TF32, which holds bf16 numbers
                exactly: scoring.token_logprobs
    optimizer   AdamW, betas 0.9 and 0.999, eps 1e-8, no weight decay: lib.run.add_adapters.
                A gradient that is not finite moves no weight: optimizer_step. The third such step
                in a row is saved, then ends the command with an error: lib.run.exit_code
    continuing  restores adapters, AdamW's moments, the bank and its window: lib.run.Run.open

Package versions are those of requirements.txt.

Dimension key: K teachers, T completion tokens; `delta_KT` is [K, T].
"""

import math
import random
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

import distributed
import rollout
import scoring
import skills
from lib import command, config, model, problems, runlog
from lib.config import Config
from lib.problems import Problem
from lib.run import (
    Run,
    bank_writer,
    evolution_is_due,
    exit_code,
    shared_rollouts,
    should_stop,
    teacher_ids,
)
from rollout import Job, Rollout, Sampling
from skills import SkillBank, SkillPair

# ------------------------------------------------------------------------------- the objective
# Tensors in, tensors out. To copy the objective, take everything from here to the next line of
# dashes, and the imports of math, torch, Tensor, Collection and Sequence.

EPS = 1e-8  # in the denominators (S1)


def teacher_weights(s_g_K: Tensor, s_e_K: Tensor) -> Tensor:
    """alpha_k: softmax over teachers of the mean of skill and mistake similarity (Eq. 6, §2.2).

    s_g_K, s_e_K: cosine similarities, [K]. Returns [K], positive, of sum 1; empty for K = 0.
    """
    return torch.softmax((s_g_K + s_e_K) / 2, dim=0)


def log_prob_gap(logpT_KT: Tensor, logpS_T: Tensor) -> Tensor:
    """Delta_t^(k) = log p_T^(k)(y_t) - log p_S(y_t) (Eq. 7, §2.3); positive: k supports the token.

    logpT_KT: [K, T], taken as constant. logpS_T: [T], with gradient. Returns [K, T] in nats.
    ValueError unless both have these shapes, and both are float32 or both float64.
    """
    if logpT_KT.ndim != 2 or logpT_KT.shape[1:] != logpS_T.shape:
        shapes = f"{tuple(logpT_KT.shape)} and {tuple(logpS_T.shape)}"
        raise ValueError(f"log_prob_gap (Eq. 7): wanted [K, T] and [T], got {shapes}")
    if logpT_KT.dtype != logpS_T.dtype or logpS_T.dtype not in (torch.float32, torch.float64):
        rule = "both must be float32 or float64; bf16 is too coarse: errors of about 0.1 nat"
        raise ValueError(f"log_prob_gap (Eq. 7): {rule}; got {logpT_KT.dtype}, {logpS_T.dtype}")
    return logpT_KT.detach() - logpS_T


def token_mask(ids_T: Sequence[int] | Tensor, masked_ids: Collection[int]) -> Tensor:
    """m_t (§2.4): 1 on reasoning tokens, 0 on special, template and formatting tokens (S2).

    masked_ids: the ids that get 0. Returns [T] fp32.
    """
    ids = torch.as_tensor(ids_T)
    masked = torch.tensor(sorted(masked_ids), dtype=ids.dtype, device=ids.device)
    return 1.0 - torch.isin(ids, masked).float()


def zero_masked(x_KT: Tensor, mask_T: Tensor) -> Tensor:
    """Set masked tokens to 0. (Multiplying would keep a masked inf or nan.) [K, T]."""
    return torch.where(mask_T.bool(), x_KT, 0)


def masked_mean(x_KT: Tensor, mask_T: Tensor) -> Tensor:
    """sum_t m_t x_t / (sum_t m_t + eps): the mean over unmasked tokens (Eqs. 12 and 15). [K].

    It is 0 where all is masked (S1). Masked x_t must be finite: see `zero_masked`.
    """
    m_T = mask_T.to(x_KT)
    return (m_T * x_KT).sum(1) / (m_T.sum() + EPS)


def robust_support(delta_KT: Tensor, mask_T: Tensor, c_delta: float) -> Tensor:
    """ã_k: mean over unmasked tokens of the gap clipped to ±c_delta (Eqs. 11-12, §2.4). [K], nats.

    Here `a_K` is this support, and the paper's a_k is `plain_support`. No gradient. It is 0 where
    all is masked (S1).
    """
    delta_KT = zero_masked(delta_KT.detach(), mask_T)
    return masked_mean(delta_KT.clamp(-c_delta, c_delta), mask_T)


def polarity(a_K: Tensor, r: float, eps_a: float) -> Tensor:
    """rho_k in {-1, 0, +1} (Eqs. 9 and 13, Tab. 2): sgn(r) sgn(ã_k) where |ã_k| > eps_a, else 0.

    r: -1 or +1; ValueError on anything else, a bool among them. The threshold is strict, and
    sgn(0) = 0. [K], constant.
    """
    number = r.item() if hasattr(r, "item") else r  # a torch or numpy bool becomes a Python bool
    if type(number) is bool or number not in (-1, 1):  # True == 1 would pass
        raise ValueError(f"polarity (Eq. 9): r must be -1 or +1, got {r}; is it a 0/1 reward?")
    a_K = a_K.detach()
    return torch.where(a_K.abs() > eps_a, int(r) * torch.sign(a_K), 0)


def gated_loss(delta: Tensor, tau_g: float) -> Tensor:
    """l_gate = log 2 - log(1 + exp(-delta^2 / (2 tau_g))) (Eq. 14, §2.5), elementwise.

    In [0, log 2]. At every fp32 gap from 6e-5 to 10, with tau_g = 1, the slope is right to 2e-6
    (relative) and the value to 6.4e-8 (absolute). So the value may be 0 at gaps below 0.00025, but
    we train by the slope; the value only goes to the logs.
    """
    return math.log(2) - torch.nn.functional.softplus(-(delta**2) / (2 * tau_g))


def teacher_losses(delta_KT: Tensor, mask_T: Tensor, tau_g: float) -> Tensor:
    """lbar^(k): mean gated loss over unmasked tokens, of *unclipped* gaps (Eq. 15, §2.5). [K]."""
    delta_KT = zero_masked(delta_KT, mask_T)
    return masked_mean(gated_loss(delta_KT, tau_g), mask_T)


def sgsd_loss(lbar_K: Tensor, alpha_K: Tensor, rho_K: Tensor) -> Tensor:
    """L(x) = sum_k alpha_k rho_k lbar^(k) (Eq. 16, §2.5): a scalar in ±log 2; 0 for K = 0.

    The gradient flows through lbar_K alone.
    """
    return (alpha_K.detach() * rho_K.detach() * lbar_K).sum()


def loss_of(
    cfg, logpT_KT: Tensor, logpS_T: Tensor, mask_T: Tensor, alpha_K: Tensor, r: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Lines 10 to 14 of Algorithm 1: a rollout's loss, and the numbers that it came from.

    To change the objective, edit this function and those above: sgsd.py and extras/on_trl.py both
    train by its gradient.

    cfg: has c_delta, eps_a and tau_g. logpT_KT, logpS_T: log-probabilities in nats, [K, T] and [T],
    the student's with gradient. mask_T: [T]. alpha_K: [K]. r: the training reward, -1 or +1.
    Returns the loss, a scalar with gradient, and detached numbers by their names in the logs: of
    each teacher alpha, a_plain, a (the robust support), rho and losses, [K]; of each token mask
    [T], delta and credit [K, T]. ValueError as `log_prob_gap` and `polarity` raise it.
    """
    delta_KT = log_prob_gap(logpT_KT, logpS_T)  # line 10, Eq. 7
    a_K = robust_support(delta_KT, mask_T, cfg.c_delta)  # line 10, Eqs. 11-12
    rho_K = polarity(a_K, r, cfg.eps_a)  # line 11, Eq. 13
    lbar_K = teacher_losses(delta_KT, mask_T, cfg.tau_g)  # line 12, Eqs. 14-15
    loss = sgsd_loss(lbar_K, alpha_K, rho_K)  # line 14, Eq. 16
    credit_KT = token_credit(delta_KT, mask_T, alpha_K, rho_K, cfg.tau_g)
    numbers = numbers_of(delta_KT, mask_T, alpha_K, a_K, rho_K, lbar_K)
    return loss, numbers | {"credit": credit_KT}


# What follows is for the logs and the tests: the loss does not depend on it.


def numbers_of(
    delta_KT: Tensor, mask_T: Tensor, alpha_K: Tensor, a_K: Tensor, rho_K: Tensor, lbar_K: Tensor
) -> dict[str, Tensor]:
    """The numbers of a rollout's loss that the logs keep, detached, by their names in the logs."""
    return {
        "alpha": alpha_K,
        "a_plain": plain_support(delta_KT),
        "a": a_K,
        "rho": rho_K.int(),
        "losses": lbar_K.detach(),
        "mask": mask_T.int(),
        "delta": delta_KT.detach(),
    }


def plain_support(delta_KT: Tensor) -> Tensor:
    """a_k: mean gap over all T tokens (Eq. 8, §2.3). [K]. No polarity depends on it."""
    return delta_KT.detach().mean(1)


def gate_grad(delta: Tensor, tau_g: float) -> Tensor:
    """g_tau = dl_gate/ddelta = delta / (tau_g (1 + exp(delta^2 / (2 tau_g)))) (Eq. 17, §3).

    Elementwise, odd, |g_tau| <= 1/sqrt(e tau_g).
    """
    return delta / tau_g * torch.sigmoid(-(delta**2) / (2 * tau_g))


def token_credit(
    delta_KT: Tensor, mask_T: Tensor, alpha_K: Tensor, rho_K: Tensor, tau_g: float
) -> Tensor:
    """W_t^(k) = alpha_k rho_k (m_t / Z) g_tau(Delta), Z = sum m + eps (Eq. 20, §3). [K, T].

    -grad L = sum over k and t of W_t^(k) grad log p_S(y_t). The result has no gradient.
    """
    g_KT = gate_grad(zero_masked(delta_KT.detach(), mask_T), tau_g)
    m_T = mask_T.to(g_KT)
    return (alpha_K * rho_K).detach()[:, None] * m_T / (m_T.sum() + EPS) * g_KT


# ----------------------------------------------------------------- a step (Algorithm 1, lines 2-16)
# Algorithm 1 by its lines; its loops over updates, problems and teachers are 1 to 18, 3 to 15 and
# 8 to 13:
#    2  sample a minibatch                    step_jobs
#    4  retrieve K ranked pairs               SkillBank.retrieve
#    5  weigh the teachers                    pair_weights
#    6  form the teachers' prompts            teacher_prompts
#    7  sample a solution and judge it        solve
#    9  score it by every teacher             scoring.score_teachers
#   10  gaps and robust supports, 11 polarities, 12 gated losses, 14 their sum: loss_of
#   16  update the policy                     optimizer_step
#   17  update the bank                       evolve_bank
# We sample (7) before we retrieve (4), for methods whose teachers read what was sampled.


class RolloutLoss(NamedTuple):
    """A rollout's loss, and for the logs detached numbers by name."""

    loss: Tensor  # a scalar; without a graph if all teachers are ignored (`constant_if_ignored`)
    numbers: dict[str, Tensor]  # for the rollout's row of rollouts.jsonl
    token_numbers: dict[str, Tensor]  # [T] or [K, T], for its row of tokens.jsonl
    pairs_K: Sequence[SkillPair] | None = None  # of its teachers, for its row of rollouts.jsonl


def reward(roll: Rollout) -> float:
    """Training reward of a rollout: the verifier's ±1. Edit this function for another one.

    SGSD's loss takes -1 or +1. Evaluation, the bank's memories and its success gate use the verdict
    itself, so another reward does not change them.
    """
    return roll.r


def student_prompt(run: Run, problem: str) -> list[int]:
    r"""The student's prompt, as ids. In Qwen3's template:

    <|im_start|>user
    Problem: What is 2 + 3?

    Please reason step by step, and put your final answer within \boxed{}.<|im_end|>
    <|im_start|>assistant
    <think>

    </think>

    """
    text = skills.render_student(problem)
    return rollout.chat_ids(run.tokenizer, text, thinking=run.cfg.student_prefix)


def teacher_prompts(
    run: Run, pairs_K: Sequence[SkillPair], problem: str, roll: Rollout
) -> tuple[list[SkillPair], list[list[int]]]:
    r"""The K teachers' pairs and prompts c_k(x), as ids (Eq. 3, Fig. 6).

    We leave out a teacher whose prompt does not fit the model's context with the solution (S35).
    A prompt has all fields of its pair but a mistake's `why_it_happens`: a skill's title, principle
    and when to apply it, a mistake's description and how to avoid it. For example:

    <|im_start|>user
    You may use the following retrieved math-reasoning guidance as soft guidance.
    Solve the current problem independently and do not quote it verbatim.

    ### General Principles
    - **Carry the ten**: When the ones pass nine, carry one to the tens.
      _Apply when: Two numbers are added._

    ### Mistakes to Avoid
    - **Don't**: Dropping the carry when two amounts are added.
      **Instead**: Add the carried one to the tens.

    Problem: What is 2 + 3?

    Please reason step by step, and put your final answer within \boxed{}.<|im_end|>
    <|im_start|>assistant
    """
    teachers_K = []
    for pair in pairs_K:
        ids = teacher_ids(run, skills.render_teacher(pair, problem), roll)  # g_k + e_k + x
        if ids:
            teachers_K.append((pair, ids))
    return [pair for pair, _ in teachers_K], [ids for _, ids in teachers_K]


def step_jobs(run: Run, step: int) -> list[Job]:
    """Line 2: this rank's share of the minibatch, as jobs: a prompt and the key of its draws.

    Every rank draws the same global minibatch and takes every world.size-th problem. A job's index
    is its problem's place in the minibatch.
    """
    cfg = run.cfg
    world = run.world
    batch = problems.minibatch(run.problems, cfg.batch_size, step, cfg.seed)
    jobs = []
    for index in range(world.rank, len(batch), world.size):
        x, epoch = batch[index]
        key = rollout.sample_key(cfg.seed, step, x.id, epoch)
        prompt = student_prompt(run, x.problem)
        jobs.append(Job(index, prompt, key=key, x=x))
    return jobs


def solve(run: Run, jobs: list[Job]) -> list[Rollout]:
    """Line 7: a rollout y ~ p_S(. | x) of each job, in order, with its outcome r (Eq. 1).

    We divide logits by --temperature, keep the --top-k likeliest tokens, renormalise, and keep the
    nucleus of --top-p. r is +1 if the answer in the last \\boxed{} is right, else -1; so a rollout
    that the length limit cuts before its answer gets -1. completion_ids end on a stop id, unless
    the limit has cut them.
    """
    cfg = run.cfg
    sampling = Sampling(cfg.temperature, cfg.top_p, cfg.top_k, cfg.max_new_tokens)
    # `turns` is lazy: the loop below makes it decode, some tokens a turn, and judges the jobs that
    # are done after each turn.
    turns = run.stream(jobs, sampling, cfg.rollout_rows or max(1, len(jobs)))
    roll_of: dict[int, Rollout] = {}
    for judged in rollout.rollouts(run.tokenizer, run.stops, run.verifier, turns):
        roll_of |= {job.index: roll for job, roll in judged}
    run.clock.lap("gen")
    return [roll_of[job.index] for job in jobs]


def pair_weights(run: Run, pairs_K: Sequence[SkillPair]) -> Tensor:
    """alpha_K of retrieved pairs (Eq. 6)."""
    s_g_K = torch.tensor([pair.s_g for pair in pairs_K], device=run.device)
    s_e_K = torch.tensor([pair.s_e for pair in pairs_K], device=run.device)
    return teacher_weights(s_g_K, s_e_K)


def rollout_loss(run: Run, roll: Rollout, pairs_K: Sequence[SkillPair]) -> RolloutLoss:
    """Lines 5-6 and 8-14: the loss of a rollout, from all K teachers' scores of its tokens."""
    cfg = run.cfg
    ids_T = roll.completion_ids
    mask_T = token_mask(torch.tensor(ids_T, device=run.device), run.masked_ids)
    pairs_K, contexts_K = teacher_prompts(run, pairs_K, roll.problem, roll)  # line 6
    alpha_K = pair_weights(run, pairs_K)  # line 5, over the teachers that fit (S35)
    # Line 9. The teachers are the present policy with its adapters, without a gradient.
    logpT_KT = scoring.score_teachers(run.lm, contexts_K, ids_T, cfg.score_tokens)  # Eq. 4
    run.clock.lap("score")  # retrieval and the teachers; the student's pass counts as "bwd"
    # One pass of the student serves all K teachers: the same gradient as K passes, cheaper (D7).
    logpS_T = scoring.score_student(run.lm, roll.prompt_ids, ids_T)  # Eq. 5
    loss, numbers = loss_of(cfg, logpT_KT, logpS_T, mask_T, alpha_K, reward(roll))  # lines 10-14
    return result_of(constant_if_ignored(loss, numbers["rho"]), numbers, pairs_K)


def constant_if_ignored(loss: Tensor, rho_K: Tensor) -> Tensor:
    """The loss, without its graph if all teachers are ignored: it needs no backward pass then.

    A loss that is NaN keeps its graph: its gradient is NaN, too, so the step is skipped. (A NaN
    support has rho 0, and 0 times NaN is NaN.)
    """
    return loss if rho_K.any() or not loss.isfinite() else loss.detach()


def train_step(run: Run, step: int) -> tuple[list[dict], float]:
    """Lines 2-16: a step. Returns this rank's rows of rollouts.jsonl and the gradient's norm.

    step: the step's number, from 1.

    Line 4, retrieval: a frozen sentence encoder embeds the bare problem and, of each entry of the
    bank, its three fields with ". " between them: title, principle, when to apply; or description,
    why it happens, how to avoid. The K nearest skills and the K nearest mistakes by cosine are
    paired rank by rank; a shorter list makes fewer pairs.
    """
    cfg = run.cfg
    rows = []
    jobs = step_jobs(run, step)  # line 2
    for job, roll in zip(jobs, solve(run, jobs)):  # line 7
        pairs_K = run.bank.retrieve(roll.problem, cfg.num_teachers, run.embed)  # line 4, Eq. 2
        result = rollout_loss(run, roll, pairs_K)  # lines 5-6 and 8-14
        if result.loss.requires_grad:  # else all teachers are ignored: the gradient is 0
            # We divide by the *global* batch, because ranks sum their gradients.
            (result.loss / cfg.batch_size).backward()
        rows.append(log_row(run, step, job.index, roll, result))
        run.clock.lap("bwd")
    norm = optimizer_step(run, step)  # line 16
    return rows, norm


def optimizer_step(run: Run, step: int) -> float:
    """Line 16: sum gradients over ranks, clip, AdamW with linear decay (S7).

    Returns the norm before clipping. A missing gradient counts as 0, so AdamW steps even where all
    teachers were ignored. The sum spreads a NaN to all ranks, so all of them skip the step.
    """
    cfg = run.cfg
    params = list(model.trained(run.lm).values())
    distributed.sum_gradients(params, run.world)
    norm = float(torch.nn.utils.clip_grad_norm_(params, cfg.grad_clip))
    run.optimizer.param_groups[0]["lr"] = cfg.learning_rate * (1 - (step - 1) / cfg.steps)
    if math.isfinite(norm):
        run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    run.clock.lap("opt")
    return norm


# What follows is for the logs.


def result_of(
    loss: Tensor, numbers: dict[str, Tensor], pairs_K: Sequence[SkillPair] | None = None
) -> RolloutLoss:
    """A loss and its numbers, sorted by the log that they go to."""
    of_rollout: dict[str, Tensor] = {}
    of_tokens: dict[str, Tensor] = {}
    for name, x in numbers.items():
        log = of_tokens if name in ("mask", "delta", "credit") else of_rollout
        log[name] = x
    return RolloutLoss(loss, of_rollout, of_tokens, pairs_K)


def log_row(run: Run, step: int, index: int, roll: Rollout, result: RolloutLoss) -> dict:
    """One rollout's row of rollouts.jsonl.

    In an audited step the row also has a field "audit": the rollout's row of tokens.jsonl.
    index: the rollout's place among all rollouts of the step.
    """
    row = runlog.rollout_row(step, index, roll, reward(roll), result, run.cfg.c_delta)
    every = run.cfg.audit_every
    if every and (step == 1 or step % every == 0):
        row["audit"] = runlog.token_row(step, index, roll, result, run.tokenizer)
    return row


# ------------------------------------------------ the bank (Algorithm 1, line 17; Algorithms 2-4)
# Algorithm 2, the cold start (skills.cold_start):
#   - The policy solves 256 seed problems, thinking. Each solution becomes a memory: the problem,
#     the verdict, the boxed answer, the text after </think> (the whole text if it has none; above
#     2,000 characters only the first and the last 1,000), and up to eight lines of that text.
#   - The writer, which is the policy without thinking, gets a right solution's memory in
#     prompts/extract_skills.txt, a wrong one's in extract_mistakes.txt. It replies with items: JSON
#     objects with the three fields of their list. We take a reply's first three items, even if the
#     reply is cut.
#   - Algorithm 3 merges each list. The merged entries are the static ones, which never change.
# Algorithm 3, merging (skills.merge_by_layers, for one list):
#   - We divide the list, in order, into groups of H. The writer gets each group of two or more with
#     merge_*.txt. A reply takes its group's place if its JSON is complete, and it has at least one
#     item and no more than the group; else the group stays.
#   - This repeats, layer by layer, until a layer was one group, or P layers in a row did not
#     shorten the list.
#   - Both lists' prompts of a layer go out in one call.
# Algorithm 4, the evolution, after each step that F divides (skills.evolve):
#   - W holds all rollouts of the last F steps. If a share of gamma or more is right, the bank
#     stays. Else we extract items from each rollout, as in Algorithm 2.
#   - We drop an item that repeats a static entry, in whatever letter case (D11). Algorithm 3 merges
#     the rest.
#   - If a list has new items, Algorithm 3 merges them once more, together with the list's dynamic
#     entries, which earlier evolutions added and which come first.
#   - A list keeps its first C dynamic entries. Then, as long as the two lists together have grown
#     by more than N, the one that grew more (at a tie, the skills) loses its last entry (S12).


def make_bank(run: Run) -> SkillBank:
    """Algorithm 2: the policy solves seed problems, and writes a bank from its solutions (S21)."""
    cfg = run.cfg
    count = min(cfg.cold_start, len(run.problems))
    seed_problems = random.Random(cfg.seed).sample(run.problems, count)
    memories = seed_memories(run, seed_problems)  # lines 2-7
    bank = skills.cold_start(  # lines 8-16
        memories,
        bank_writer(run, 0),
        group_size=cfg.merge_group_size,
        patience=cfg.merge_patience,
    )
    bank.metadata.update(seed=cfg.seed, seed_problems=[x.id for x in seed_problems])
    return bank


def seed_memories(run: Run, seed_problems: Sequence[Problem]) -> list[dict]:
    """Solve the seed problems; a memory of each, in their order (Algorithm 2, lines 2-7).

    Memories are logged as they come. A run that continues a killed cold start uses them again.
    """
    cfg = run.cfg
    memories = dict(run.memories)
    thinking = "bare" if cfg.cold_start_thinking else "closed"
    jobs: list[Job] = []
    for x in seed_problems:
        if x.id not in memories:
            key = rollout.sample_key(cfg.seed, 0, x.id)
            text = skills.render("seed_problem", {"problem": x.problem})
            prompt = rollout.chat_ids(run.tokenizer, text, thinking=thinking)
            jobs.append(Job(len(jobs), prompt, key=key, x=x))
    sampling = Sampling(
        temperature=cfg.cold_start_temperature,
        top_p=0.95,
        top_k=0,
        max_new_tokens=cfg.cold_start_tokens,
    )
    for judged in shared_rollouts(run, jobs, sampling):
        fresh = []
        for _, roll in judged:
            memory = skills.memory_of(asdict(roll), cfg.memory_answer)
            fresh.append({**memory, "truncated": roll.truncated})
        run.log_rows("bank/memories", fresh)
        memories |= {memory["problem_id"]: memory for memory in fresh}
    return [memories[x.id] for x in seed_problems]


def begin_bank(run: Run) -> None:
    """Make the first bank by Algorithm 2, unless the run has its own or that of --bank (D9)."""
    started = time.monotonic()
    seconds = 0.0
    if run.bank is None:
        run.bank = make_bank(run)
        seconds = time.monotonic() - started
        run.save_bank()  # before the check, as making a bank may take hours
        if not (run.bank.general_skills and run.bank.common_mistakes):
            fix = "in a new --out try another --bank or a larger --cold-start"
            raise command.UserError(f"{skills.describe(run.bank)}: no pair, no teacher (S8); {fix}")
    elif not run.step:  # the bank is --bank's, or that of a run without a checkpoint
        run.save_bank()
    if run.world.main:
        print(skills.describe(run.bank, seconds))


def evolve_bank(run: Run) -> None:
    """Line 17: after each step that F divides, run Algorithm 4 on the bank's window (D2).

    The window holds all ranks' rollouts. We empty it afterwards, even if the bank stays as it is.
    """
    if not evolution_is_due(run):
        return
    cfg = run.cfg
    old = run.bank
    step = run.step
    started = time.monotonic()
    run.bank = skills.evolve(
        old,
        old.window,
        step,
        bank_writer(run, step),
        evolve_every=cfg.evolve_every,
        success_gate=cfg.success_gate,
        max_new_items=cfg.max_new_items,
        dynamic_capacity=cfg.dynamic_capacity,
        group_size=cfg.merge_group_size,
        patience=cfg.merge_patience,
        memory_answer=cfg.memory_answer,
    )
    if run.world.main:
        same = "bank: unchanged, as the success is not below --success-gate"
        seconds = time.monotonic() - started
        tqdm.write(same if run.bank is old else skills.describe(run.bank, seconds))
    run.bank.window = []
    run.save_bank()


# ------------------------------------------------------------------------------------- the loop


def train(run: Run, step_fn: Any = train_step) -> int:
    """Algorithm 1: make all steps that are left. Returns the exit code.

    step_fn(run, step) -> (rows, norm): makes a step. Another method passes its own.
    """
    cfg = run.cfg
    if cfg.uses_skill_bank:  # SGSD does, GRPO does not
        begin_bank(run)
    evolve_bank(run)  # only where a kill or a signal has left an evolution due
    has_bar = run.world.main and sys.stderr.isatty()  # in a log file the steps' lines show progress
    for step in tqdm(range(run.step + 1, cfg.steps + 1), "train", disable=not has_bar):
        run.clock = runlog.Stopwatch()
        run.signals.in_step = True  # from here to the save a first Ctrl-C waits
        rows, norm = step_fn(run, step)  # lines 2-16
        rows = distributed.gathered(rows, run.world)
        run.step = step
        run.skipped = 0 if math.isfinite(norm) else run.skipped + 1
        if cfg.evolves:
            run.bank.remember(rows)  # W of Algorithm 4
        run.log(rows, norm)  # all ranks call it, and rank 0 writes
        if run.save_is_due():
            run.save()
        if should_stop(run):  # after a signal on any rank, or the third bad step in a row
            run.save()
            break
        run.signals.in_step = False
        evolve_bank(run)  # line 17, where F divides the step
    return exit_code(run)


def main(
    argv: Sequence[str] | None = None,
    doc: str | None = __doc__,
    config_class: type[Config] = Config,
    step_fn: Any = train_step,
) -> int:
    """The command of SGSD, or of another method; returns its exit code.

    doc: the method's docstring, for --help. config_class: the class of its settings. step_fn: its
    step, as `train` takes it.
    """
    cfg = command.parse(argv, doc, config_class, config.presets_of(config_class))
    with Run.open(cfg, SkillBank.load, student_prompt) as run:
        return train(run, step_fn)


if __name__ == "__main__":
    distributed.run_and_exit(main)
