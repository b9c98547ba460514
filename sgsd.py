"""Skill-Conditioned Gated Self-Distillation (SGSD), in plain PyTorch.

    loss(x) = sum_k alpha_k * rho_k * mean over unmasked t of [ log 2 - log(1 + exp(-Delta_t^2 / (2 tau_g))) ]     Eq. 16

One policy, two roles. The student sees only the problem and samples a solution; a verifier says right or wrong. Each of K
retrieved skill-mistake pairs makes a teacher: the same policy with that pair in its prompt. All score the student's
tokens; Delta is the teacher-student gap of log-probabilities. A teacher that supports a success or suppresses a failure
is distilled (rho = +1), the opposite is reversed (-1), the unsure is ignored (0).

    torchrun --nproc_per_node 8 sgsd.py --model Qwen/Qwen3-1.7B --bank bank.json      train
    python sgsd.py --resume runs/sgsd                                                  go on from the last checkpoint
    python eval.py runs/sgsd/checkpoints/step_000200                                   avg@12

Read it top to bottom: objective, scoring, one training step (Algorithm 1), the run. Decisions that the
paper leaves open (S...) or that differ from it (D...) carry their tag; the README has a row for each.

Dimension key: K teachers, T completion tokens, B rollouts. `delta_KT` is a [K, T] tensor. Log-probabilities are natural
logs (nats) in fp32.
"""

# ======================================================================================= objective (needs math, torch)

import math
from collections.abc import Collection, Sequence

import torch


def _check(where: str, ok: object, got: object, rule: str) -> None:
    if not ok:
        raise ValueError(f"{where}: got {got() if callable(got) else got}, {rule}")


def _check_KT(
    where: str, delta_KT: torch.Tensor, mask_T: torch.Tensor | None = None, *weights_K: torch.Tensor
) -> None:
    """Shapes and dtype that every function over gaps wants: delta [K, T] fp32/fp64, mask [T] of 0 and 1, weights [K]."""
    shape = tuple(delta_KT.shape)
    _check(
        where,
        delta_KT.dtype in (torch.float32, torch.float64),
        delta_KT.dtype,
        "gaps must be float32 or float64; bf16 errs by up to .1 nat",
    )
    _check(where, delta_KT.ndim == 2, shape, "delta_KT must be [K, T]")
    if mask_T is not None:
        _check(
            where,
            tuple(mask_T.shape) == shape[1:],
            tuple(mask_T.shape),
            f"mask_T must be [T] = {shape[1:]}, the T of delta_KT",
        )
        _check(
            where,
            ((mask_T == 0) | (mask_T == 1)).all(),
            lambda: mask_T.unique().tolist(),
            "mask_T must hold only 0 and 1",
        )
    for w_K in weights_K:
        _check(
            where,
            tuple(w_K.shape) == shape[:1],
            tuple(w_K.shape),
            f"alpha_K and rho_K must be [K] = {shape[:1]}, the K of delta_KT",
        )


def _unmasked(delta_KT: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """Gaps with 0 where the mask is 0: 0 * inf is nan, and a masked token must stay inert whatever its gap is."""
    return torch.where(mask_T.bool(), delta_KT, torch.zeros_like(delta_KT))


def teacher_weights(s_g_K: torch.Tensor, s_e_K: torch.Tensor) -> torch.Tensor:
    """alpha_k: softmax over teachers of the mean of skill and mistake similarity (Eq. 6, §2.2).

    s_g_K, s_e_K: [K] cosine similarities. Returns [K], positive, sum 1 (empty for K = 0). ValueError on other shapes.
    """
    _check(
        "teacher_weights (Eq. 6)",
        s_g_K.ndim == 1 and s_g_K.shape == s_e_K.shape,
        (tuple(s_g_K.shape), tuple(s_e_K.shape)),
        "both must be [K]",
    )
    return torch.softmax((s_g_K + s_e_K) / 2, dim=0)


def log_prob_gap(logpT_KT: torch.Tensor, logpS_T: torch.Tensor) -> torch.Tensor:
    """Delta_t^(k) = log p_T^(k)(y_t) - log p_S(y_t) (Eq. 7, §2.3), in nats; positive: teacher k supports the token.

    logpT_KT: [K, T], taken as constant. logpS_T: [T], with gradient. Returns [K, T]. ValueError on other shapes.
    """
    shapes = (tuple(logpT_KT.shape), tuple(logpS_T.shape))
    _check(
        "log_prob_gap (Eq. 7)",
        logpT_KT.ndim == 2 and shapes[0][1:] == shapes[1],
        shapes,
        "wanted [K, T] teachers and [T] student",
    )
    _check(
        "log_prob_gap (Eq. 7)",
        logpT_KT.dtype == logpS_T.dtype,
        (logpT_KT.dtype, logpS_T.dtype),
        "both sides must have one dtype",
    )
    return logpT_KT.detach() - logpS_T


def plain_support(delta_KT: torch.Tensor) -> torch.Tensor:
    """a_k: mean gap over all T tokens (Eq. 8, §2.3). Logged; the polarity uses `robust_support`. Returns [K]."""
    _check_KT("plain_support (Eq. 8)", delta_KT)
    return delta_KT.detach().mean(1)


def outcome_sign(r: float) -> int:
    """sgn_out(r) (Eq. 9, §2.3): +1 for a verified success, -1 for a failure; ValueError on anything but -1 and +1."""
    if "bool" in str(getattr(r, "dtype", type(r))) or r not in (-1, 1):
        raise ValueError(
            f"outcome r must be -1 or +1 (Eq. 9), got {r}; did the verifier return a 0/1 reward?"
        )
    return int(r)


def token_mask(ids_T: Sequence[int] | torch.Tensor, masked_ids: Collection[int]) -> torch.Tensor:
    """m_t (§2.4): 1 on reasoning tokens, 0 on special, template, think-tag and pure-formatting tokens (S2). [T] fp32.

    masked_ids: from `masked_token_ids(tokenizer)`.
    """
    ids = torch.as_tensor(ids_T)
    return (
        1.0
        - torch.isin(
            ids, torch.tensor(sorted(masked_ids), dtype=ids.dtype, device=ids.device)
        ).float()
    )


def robust_support(
    delta_KT: torch.Tensor, mask_T: torch.Tensor, c_delta: float, eps: float = 1e-8
) -> torch.Tensor:
    """a~_k: mean over unmasked tokens of the gap clipped to [-c_delta, c_delta] (Eqs. 11-12, §2.4). [K], nats.

    Not part of the gradient. eps keeps an all-masked completion finite (0) (S1). ValueError on shapes or c_delta <= 0.
    """
    _check(
        "robust_support (Eq. 11)", c_delta > 0, c_delta, "the clipping bound c_delta must be > 0"
    )
    _check_KT("robust_support (Eq. 12)", delta_KT, mask_T)
    clipped_KT = _unmasked(delta_KT.detach(), mask_T).clamp(-c_delta, c_delta)  # Eq. 11
    m_T = mask_T.to(delta_KT)
    return (m_T * clipped_KT).sum(1) / (m_T.sum() + eps)  # Eq. 12


def polarity(a_K: torch.Tensor, r: float, eps_a: float) -> torch.Tensor:
    """rho_k in {-1, 0, +1} (Eq. 13, Tab. 2): sgn_out(r) * sgn(a~_k) where |a~_k| > eps_a, else 0 (unsure, ignored). [K].

    +1 distils teacher k, -1 reverses it. The threshold is strict and sgn(0) = 0. ValueError on a wrong r or eps_a < 0.
    """
    _check("polarity (Eq. 13)", eps_a >= 0, eps_a, "the confidence threshold eps_a must be >= 0")
    a_K = a_K.detach()
    return torch.where(a_K.abs() > eps_a, outcome_sign(r) * torch.sign(a_K), torch.zeros_like(a_K))


def gated_loss(delta: torch.Tensor, tau_g: float) -> torch.Tensor:
    """l_gate = log 2 - log(1 + exp(-delta^2 / (2 tau_g))) (Eq. 14, §2.5), elementwise, even, in [0, log 2].

    Written as -log1p(expm1(z)/2) with z = -delta^2 / (2 tau_g): the same number, without cancellation near 0.
    ValueError on tau_g <= 0.
    """
    _check("gated_loss (Eq. 14)", tau_g > 0, tau_g, "the gate width tau_g must be > 0")
    return -torch.log1p(torch.expm1(-(delta**2) / (2 * tau_g)) / 2)


def gate_grad(delta: torch.Tensor, tau_g: float) -> torch.Tensor:
    """g_tau = d l_gate / d delta = delta / (tau_g (1 + exp(delta^2 / (2 tau_g)))) (Eq. 17, §3), elementwise.

    Odd, |g_tau| <= 1/sqrt(e tau_g); for logs and tests, training uses autograd. ValueError on tau_g <= 0.
    """
    _check("gate_grad (Eq. 17)", tau_g > 0, tau_g, "the gate width tau_g must be > 0")
    return delta / tau_g * torch.sigmoid(-(delta**2) / (2 * tau_g))


def teacher_losses(
    delta_KT: torch.Tensor, mask_T: torch.Tensor, tau_g: float, eps: float = 1e-8
) -> torch.Tensor:
    """lbar^(k): mean gated loss over unmasked tokens, of the *unclipped* gaps (Eq. 15, §2.5). [K], in [0, log 2]."""
    _check_KT("teacher_losses (Eq. 15)", delta_KT, mask_T)
    m_T = mask_T.to(delta_KT)
    return (m_T * gated_loss(_unmasked(delta_KT, mask_T), tau_g)).sum(1) / (m_T.sum() + eps)


def sgsd_loss(
    delta_KT: torch.Tensor,
    mask_T: torch.Tensor,
    alpha_K: torch.Tensor,
    rho_K: torch.Tensor,
    tau_g: float,
    eps: float = 1e-8,
) -> torch.Tensor:
    """L(x) = sum_k alpha_k rho_k lbar^(k) (Eq. 16, §2.5). Scalar in [-log 2, log 2]; 0 for K = 0.

    The gradient flows through delta_KT's student side only: alpha and rho are constants. ValueError on other shapes.
    """
    _check_KT("sgsd_loss (Eq. 16)", delta_KT, mask_T, alpha_K, rho_K)
    return (alpha_K.detach() * rho_K.detach() * teacher_losses(delta_KT, mask_T, tau_g, eps)).sum()


def token_credit(
    delta_KT: torch.Tensor,
    mask_T: torch.Tensor,
    alpha_K: torch.Tensor,
    rho_K: torch.Tensor,
    tau_g: float,
    eps: float = 1e-8,
) -> torch.Tensor:
    """W_t^(k) = alpha_k rho_k (m_t / Z) g_tau(Delta), Z = sum m + eps (Eq. 20, §3). [K, T]; no gradient.

    -grad L = sum_{k,t} W_t^(k) grad log p_S(y_t): summed over k it is the token's advantage-like dense credit.
    """
    _check_KT("token_credit (Eq. 20)", delta_KT, mask_T, alpha_K, rho_K)
    m_T = mask_T.to(delta_KT)
    g_KT = gate_grad(_unmasked(delta_KT.detach(), mask_T), tau_g)
    return (alpha_K * rho_K).detach()[:, None] * m_T / (m_T.sum() + eps) * g_KT


# ================================================================================================ end of the objective

import contextlib  # the objective above stands alone; from here on the program
import importlib.util
import itertools
import json
import os
import pathlib
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace

import banklife
import distributed as D
import eval as E
import rollout as R
import runlog
import skills as S
from config import Config, find_method, parse_config
from distributed import UserError

# ============================================================================================================== scoring


def masked_token_ids(tokenizer: R.Tokenizer, extra: bool = False) -> set[int]:
    """Ids that the token mask removes (§2.4, S2): special ids (EOS among them), <|...|>, think tags, runs of 1-8 newlines.

    extra: also tokens that are nothing but markdown (**, ##, ```, ---).
    """
    ids = {i for i in tokenizer.all_special_ids if i is not None}
    ids |= {
        i
        for token, i in tokenizer.get_vocab().items()
        if re.fullmatch(r"<\|.*\|>|</?think>", token)
    }
    for n in range(1, 9):
        run = tokenizer.encode("\n" * n, add_special_tokens=False)
        ids |= set(run) if len(run) == 1 else set()
    if extra:
        ids |= {
            i
            for i in range(len(tokenizer))
            if re.fullmatch(r"\s*(\*\*+|#+|`+|---+|___+)\s*", tokenizer.decode([i]))
        }
    return ids


def score_teachers(
    model: R.Model,
    contexts: list[list[int]],
    ids_T: list[int],
    score_tokens: int = 16384,
    temperature: float = 1.0,
) -> torch.Tensor:
    """log p_T^(k)(y_t) of the student's tokens under each context c_k (Eq. 4): [K, T] fp32, no gradient.

    contexts: K prompts as ids. K rows go through as few padded forwards as the token budget allows. The teacher is live:
    the current policy, stop-gradient (Tab. 12).
    """
    logpT_KT = torch.zeros(len(contexts), len(ids_T), device=R.causal_lm(model).device)
    for group in R.packs([len(c) + len(ids_T) for c in contexts], score_tokens):
        logpT_KT[group] = R.token_logprobs(
            model, [contexts[k] for k in group], [ids_T] * len(group), temperature=temperature
        )
    return logpT_KT


# =============================================================================================== one update (Algorithm 1)


@dataclass
class Run:
    """What a training run holds."""

    cfg: Config
    world: D.World
    model: R.Model
    tokenizer: R.Tokenizer
    problems: list[R.Problem]
    bank: S.SkillBank | None  # None until the cold start has made it
    embed: S.Embed | None  # None where the method sees no skills
    verifier: R.Verifier
    params: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    masked_ids: set[int]
    teacher: dict[str, torch.Tensor] = field(
        default_factory=dict
    )  # a periodic or ema teacher's adapter, by parameter name
    stop: bool = False  # asked to by a signal


def prompt_ids(run: Run, text: str, what: str, *, teacher: bool = False) -> list[int]:
    """A student's prompt (think block closed, §4.1) or a teacher's, each by its own prefix (S3), within the prompt limit."""
    prefix = run.cfg.teacher_prefix if teacher else run.cfg.student_prefix
    ids = R.chat_ids(run.tokenizer, text, thinking=prefix != "closed")
    if prefix == "open":
        ids += run.tokenizer.encode("<think>\n", add_special_tokens=False)
    if len(ids) > run.cfg.max_prompt_tokens:
        raise UserError(
            f"{what}: the prompt has {len(ids)} tokens, --max-prompt-tokens is {run.cfg.max_prompt_tokens}; drop it or raise the limit"
        )
    return ids


def minibatch(problems: list[R.Problem], cfg: Config, step: int) -> list[tuple[R.Problem, int]]:
    """The global batch of update `step` (from 1) as (problem, sampling key), groups together: a function of seed and step alone."""
    batch = []
    for at in range((step - 1) * cfg.batch_size, step * cfg.batch_size):
        epoch, i = divmod(at, len(problems))
        order = torch.randperm(
            len(problems), generator=torch.Generator().manual_seed(cfg.seed * 1_000_003 + epoch)
        )
        x = problems[int(order[i])]
        batch += [
            (x, R.sample_key(cfg.seed, step, x.id, epoch * cfg.generations + g))
            for g in range(cfg.generations)
        ]
    return batch


def sample(
    run: Run, step: int, student: Callable[[R.Problem], str]
) -> tuple[list[R.Problem], list[R.Rollout]]:
    """y ~ p_S(. | x) (Eq. 1) for this rank's share of the batch, whole groups; student(x) is the prompt's text."""
    cfg, batch = run.cfg, minibatch(run.problems, run.cfg, step)
    mine = [
        item
        for i, item in enumerate(batch)
        if i // cfg.generations % run.world.size == run.world.rank
    ]
    problems, keys = [x for x, _ in mine], [key for _, key in mine]
    ids = [prompt_ids(run, student(x), f"problem {x.id}") for x in problems]
    return problems, R.sample_rollouts(
        run.model, run.tokenizer, problems, ids, cfg.sampling, keys, run.verifier, cfg.rollout_rows
    )


def retrieve(run: Run, batch: Sequence[R.Problem], step: int) -> list[list[S.SkillPair]]:
    """The K_x pairs for each problem (Eq. 2), or with --retrieval random any, of equal weight (S20)."""
    cfg, bank = run.cfg, run.bank
    assert bank is not None and run.embed is not None
    if cfg.retrieval == "embedding":
        return bank.retrieve_all(
            [cfg.query_prompt + x.problem for x in batch], cfg.num_teachers, run.embed
        )
    pairs = []
    for x in batch:
        draw = random.Random(R.sample_key(cfg.seed, step, x.id))
        chosen = [
            draw.sample(entries, min(cfg.num_teachers, len(entries)))
            for entries in (bank.general_skills, bank.common_mistakes)
        ]
        pairs.append([S.SkillPair(g, e, 0.0, 0.0) for g, e in zip(*chosen)])
    return pairs


def with_answer(x: R.Problem) -> str:
    """The problem with its reference answer, for a teacher's prompt (S16)."""
    return f"{x.problem}\n\nThe reference answer is {x.answer}."


def contexts(run: Run, x: R.Problem, pairs: list[S.SkillPair]) -> list[list[int]]:
    """c_k(x) as ids, one per pair (Eq. 3)."""
    problem = with_answer(x) if run.cfg.answer_pi else x.problem
    return [
        prompt_ids(run, S.render_teacher(p, problem), f"teacher of {x.id}", teacher=True)
        for p in pairs
    ]


@contextlib.contextmanager
def teacher_policy(run: Run) -> Iterator[None]:
    """The model under the teacher's adapter for the while (--teacher): live changes nothing, frozen is the base alone."""

    def swap() -> None:
        for name in run.teacher:
            run.params[name].data, run.teacher[name] = run.teacher[name], run.params[name].data

    with run.model.disable_adapter() if run.cfg.teacher == "frozen" else contextlib.nullcontext():
        swap()
        try:
            yield
        finally:
            swap()


def accumulate(run: Run, step: int) -> tuple[list[dict], dict[str, float]]:
    """Algorithm 1, lines 2-14, on this rank's share: leaves the gradient in the parameters; returns records and seconds."""
    cfg, clock = run.cfg, [time.perf_counter()]
    batch, rollouts = sample(run, step, lambda x: S.render_student(x.problem))  # Eq. 1
    clock.append(time.perf_counter())

    pairs, logpT = retrieve(run, batch, step), []  # Eq. 2
    with teacher_policy(run):
        for x, roll, pairs_K in zip(batch, rollouts, pairs):
            ctx = contexts(run, x, pairs_K)  # Eq. 3
            logpT.append(
                score_teachers(
                    run.model, ctx, roll.completion_ids, cfg.score_tokens, cfg.loss_temperature
                )
            )  # Eq. 4
    clock.append(time.perf_counter())

    records: list[dict] = [{}] * len(batch)
    for group in R.packs(
        [len(r.prompt_ids) + len(r.completion_ids) for r in rollouts], cfg.score_tokens
    ):
        logpS_BT = R.token_logprobs(  # Eq. 5, with gradient, once per rollout (D7)
            run.model,
            [rollouts[i].prompt_ids for i in group],
            [rollouts[i].completion_ids for i in group],
            grad=True,
            temperature=cfg.loss_temperature,
        )
        losses = []
        for i, logpS_T in zip(group, logpS_BT):
            roll, dev = rollouts[i], logpS_T.device
            s_g_K, s_e_K = (
                torch.tensor([getattr(p, s) for p in pairs[i]], device=dev) for s in ("s_g", "s_e")
            )
            mask_T = token_mask(torch.tensor(roll.completion_ids, device=dev), run.masked_ids)
            alpha_K = teacher_weights(s_g_K, s_e_K)  # Eq. 6
            delta_KT = log_prob_gap(logpT[i], logpS_T[: len(mask_T)])  # Eq. 7
            a_K = robust_support(delta_KT, mask_T, cfg.clip_bound)  # Eqs. 11-12
            rho_K = (
                polarity(a_K, roll.r, cfg.eps_a) if cfg.polarity else torch.ones_like(a_K)
            )  # Eq. 13
            loss = sgsd_loss(delta_KT, mask_T, alpha_K, rho_K, cfg.tau_g)  # Eqs. 14-16
            losses.append(loss * float(cfg.counts(roll.truncated)))  # S4
            records[i] = record(
                run,
                step,
                roll,
                pairs[i],
                delta_KT.detach(),
                mask_T,
                alpha_K,
                a_K,
                rho_K,
                float(losses[-1].detach()),
            )
        backward(losses, cfg)
    clock.append(time.perf_counter())
    return records, dict(
        zip(("gen", "score", "bwd"), (b - a for a, b in itertools.pairwise(clock)))
    )


def backward(losses: list[torch.Tensor], cfg: Config) -> None:
    """Of the mean over the global batch. A loss that is not finite makes a gradient that is not, so that all ranks see it."""
    mean = torch.stack(losses).sum() / (cfg.batch_size * cfg.generations)
    mean.backward(1 + 0 * mean.detach())


def update(run: Run, step: int) -> float:
    """Algorithm 1, line 16: sum over ranks, clip, AdamW, linear decay (S7). Returns the gradient norm before clipping.

    A norm that is not finite skips the update; the summed gradient is the same on every rank, so all skip together.
    """
    params = list(run.params.values())
    D.sum_gradients(params, run.world)
    norm = float(torch.nn.utils.clip_grad_norm_(params, run.cfg.grad_clip))
    for group in run.optimizer.param_groups:
        group["lr"] = run.cfg.learning_rate * (1 - (step - 1) / run.cfg.updates)
    if math.isfinite(norm):
        run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    follow = (
        1 - run.cfg.teacher_decay
        if run.cfg.teacher == "ema"
        else float(step % run.cfg.teacher_period == 0)
    )
    for name, own in run.teacher.items():  # exactly as it was at 0, exactly the student at 1
        own.lerp_(run.params[name].detach(), follow)
    return norm


# ================================================================================================================= logs


def record(run, step, roll, pairs, delta_KT, mask_T, alpha_K, a_K, rho_K, loss) -> dict:
    """One rollout's line in rollouts.jsonl; on an audited update `tokens` carries its line in tokens.jsonl."""
    cfg, m_T = run.cfg, mask_T.bool()
    row = {
        "step": step,
        **asdict(roll),
        "pairs": [[p.skill["skill_id"], p.mistake["mistake_id"]] for p in pairs],
        "s_g": [p.s_g for p in pairs],
        "s_e": [p.s_e for p in pairs],
        "alpha": alpha_K.tolist(),
        "a_plain": plain_support(delta_KT).tolist(),
        "a": a_K.tolist(),
        "rho": [int(x) for x in rho_K],
        "losses": teacher_losses(delta_KT, mask_T, cfg.tau_g).tolist(),
        "loss": loss,
        "unmasked": int(m_T.sum()),
        "clipped": int((delta_KT[:, m_T].abs() > cfg.clip_bound).sum()),
        "first_gap": delta_KT[:, 0].tolist(),
    }
    if cfg.audit_every and step % cfg.audit_every == 0:
        credit_KT = token_credit(delta_KT, mask_T, alpha_K, rho_K, cfg.tau_g)
        row["tokens"] = {
            "step": step,
            "problem_id": roll.problem_id,
            "text": runlog.token_texts(run.tokenizer, roll.completion_ids),
            "mask": [int(x) for x in mask_T],
            "delta": delta_KT.tolist(),
            "credit": credit_KT.tolist(),
        }
    return row


# ======================================================================================================= a run on disk


def save_checkpoint(run: Run, step: int) -> pathlib.Path:
    """A PEFT adapter that anyone can load, the tokenizer, and the trainer's state (safetensors and JSON, no pickle)."""
    from safetensors.torch import save_file

    path = pathlib.Path(run.cfg.out) / "checkpoints" / f"step_{step:06d}"
    if run.world.main:
        with D.named(path), D.whole_directory(path) as tmp:
            run.model.save_pretrained(tmp)
            run.tokenizer.save_pretrained(tmp)
            state = {
                f"{name}.{k}": v.cpu()
                for name, p in run.params.items()
                for k, v in run.optimizer.state[p].items()
            }
            state |= {f"{name}.teacher": own.cpu() for name, own in run.teacher.items()}
            save_file(state, tmp / "trainer.safetensors")
            D.write_json(tmp / "trainer.json", {"step": step})
            if (
                ledger := pathlib.Path(run.cfg.out) / "ledger.json"
            ).exists():  # of this update: a resumed run counts on from here
                shutil.copy(ledger, tmp)
    return path


def load_checkpoint(run: Run) -> int:
    """Put the last checkpoint's adapter and optimizer state into the run; returns its step, 0 without one."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    found = sorted((pathlib.Path(run.cfg.out) / "checkpoints").glob("step_*"))
    if not found:
        return 0
    path = found[-1]
    try:
        adapter = load_file(path / "adapter_model.safetensors")
        state = load_file(path / "trainer.safetensors")
        step = int(json.loads((path / "trainer.json").read_text())["step"])
        if unexpected := getattr(
            set_peft_model_state_dict(run.model, adapter), "unexpected_keys", None
        ):
            raise KeyError(f"{len(unexpected)} tensors have no place in the model")
        for name, own in run.teacher.items():
            own.copy_(
                state.pop(f"{name}.teacher", run.params[name].detach())
            )  # a copy that begins now begins as the student
        for name, p in (
            run.params.items() if state else ()
        ):  # none where no update has been finite yet
            run.optimizer.state[p] = {
                k: state[f"{name}.{k}"].to(p.device if k != "step" else "cpu")
                for k in ("step", "exp_avg", "exp_avg_sq")
            }
    except Exception as e:  # missing file, torn file, other shapes, other names
        raise UserError(
            f"checkpoint {path}: does not fit --model {run.cfg.model} ({D.brief(e)}); is it of another model?"
        ) from None
    return step


# ============================================================================================================= the run


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def with_adapters(model: R.Model, rank: int, alpha: int) -> R.Model:
    """LoRA on all seven projections (App. F.1), without dropout and biases; of a bf16 base it is fp32: a 5e-6 step is lost in bf16."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        target_modules=list(PROJECTIONS),
    )
    return R.lean_adapters(get_peft_model(model, lora))


def prepare(cfg: Config, world: D.World, resume: bool) -> Run:
    """Everything that a user's mistake can break is read and checked here, before the run directory is made."""
    if cfg.batch_size < world.size:
        raise UserError(
            f"--batch-size {cfg.batch_size} is smaller than the world of {world.size} processes; every rank needs a problem"
        )
    if pathlib.Path(cfg.out).is_file():
        raise UserError(f"--out {cfg.out}: is a file; a directory is wanted")
    if (
        not resume
        and not cfg.explain
        and pathlib.Path(cfg.out).exists()
        and any(p.suffix != ".tmp" for p in pathlib.Path(cfg.out).iterdir())
    ):
        raise UserError(
            f"--out {cfg.out}: the directory is not empty; choose another, or go on with --resume {cfg.out}"
        )
    own = (
        pathlib.Path(cfg.out) / "bank" / "bank.json"
    )  # D9: which of its versions, BankLife.begin decides
    bank = (
        S.SkillBank.load(own)
        if resume and own.exists()
        else S.SkillBank.load(cfg.bank)
        if cfg.bank
        else None
    )
    for key in S.FIELDS if bank and not resume else ():
        if (n := len(getattr(bank, key))) < cfg.num_teachers:
            raise UserError(
                f"--bank {cfg.bank}: {key} has {n} entries, --num-teachers {cfg.num_teachers} wants as many; lower it or add entries"
            )
    for name in ("wandb", "tensorboard"):
        if getattr(cfg, name) and not getattr(
            importlib.util.find_spec(name), "origin", None
        ):  # a mere folder has no origin
            raise UserError(
                f"--{name}: the package is not installed; pip install {name}, or leave the flag out"
            )
    given = [R.Problem("explained", cfg.explain, cfg.answer)], {"given": 1}
    problems, counts = given if cfg.explain else R.load_problems(cfg.data)
    held_out = (
        {cfg.eval_data: E.load_set(cfg.eval_data, "test")} if cfg.eval_data else {}
    )  # read now, not after the last update
    if not cfg.allow_eval_overlap and not cfg.explain:
        R.refuse_overlap(problems, cfg.data, held_out)
    model, tokenizer = R.load_model(cfg.model, world.device, dtype=cfg.dtype, attn=cfg.attn)
    torch.manual_seed(cfg.seed)
    try:
        model = with_adapters(model, cfg.lora_rank, cfg.lora_alpha)
    except ValueError as e:
        raise UserError(f"--model {cfg.model}: no place for the adapters ({D.brief(e)})") from None
    R.causal_lm(model).gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    R.causal_lm(model).enable_input_require_grads()
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    missing = [t for t in PROJECTIONS if not any(f".{t}.lora_" in name for name in params)]
    if missing:
        raise UserError(
            f"--model {cfg.model}: has no {', '.join(missing)} to adapt; wanted are all of {', '.join(PROJECTIONS)} (App. F.1)"
        )
    D.broadcast_parameters(params.values(), world)
    if cfg.whole_logits and not R.head_is_sliced(model):
        raise UserError(
            f"--model {cfg.model}: caps or scales its logits; --objective {cfg.objective} and --support-top-k need a plain head"
        )
    run = Run(
        cfg,
        world,
        model,
        tokenizer,
        problems,
        bank,
        S.load_encoder(cfg.encoder, str(world.device)) if cfg.sees_skills else None,
        R.Verifier(cfg.verify_timeout, cfg.verify_workers),
        params,
        torch.optim.AdamW(params.values(), lr=cfg.learning_rate, weight_decay=0.0),
        masked_token_ids(tokenizer, cfg.mask_extra) if cfg.token_mask else set(),
        {name: p.detach().clone() for name, p in params.items()}
        if cfg.teacher in ("periodic", "ema")
        else {},
    )
    for x in (
        problems
    ):  # only those that might be too long are tokenised: no token is shorter than a byte
        if len(x.problem.encode("utf-8", "replace")) + 512 > cfg.max_prompt_tokens:
            prompt_ids(run, S.render_student(x.problem), f"problem {x.id}")
    if world.main:
        runlog.announce(run, counts, own if resume else cfg.bank)
    return run


def train(run: Run, resume: bool) -> int:
    """The updates, with their log, checkpoints and an orderly stop. Returns the exit code: 1 when the numbers broke."""
    from tqdm import tqdm

    cfg, world, out = run.cfg, run.world, pathlib.Path(run.cfg.out)
    method = (
        accumulate if cfg.method == "sgsd" and not cfg.whole_logits else find_method(cfg.method)[0]
    )
    bounds = {"metrics": 0, "rollouts": cfg.keep_rollouts, "tokens": cfg.keep_rollouts}
    logs = {name: out / f"{name}.jsonl" for name in bounds}
    start = load_checkpoint(run) if resume else 0
    D.agree(start, world, "checkpoints")
    if start > cfg.updates:
        raise D.SharedError(
            f"--updates {cfg.updates}: {out} has made update {start} already; give a larger number, or evaluate it"
        )
    bank_life = banklife.BankLife(run, start) if cfg.sees_skills else None
    for path in logs.values() if world.main else ():
        D.read_jsonl(path)  # a broken one is refused before anything is written
    passed_on = runlog.mirrors(cfg, start) if world.main else []
    if world.main:
        D.write_json(out / "config.json", runlog.provenance(cfg))
        for name, path in logs.items():
            D.trim_jsonl(path, start, bounds[name])
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # before the first update it interrupts, as Ctrl-C does
    if bank_life:
        bank_life.begin()
    for number in (signal.SIGTERM, signal.SIGINT):  # finish the update, checkpoint, leave
        signal.signal(number, lambda *_: setattr(run, "stop", True))
    saved = skipped = 0
    bar = tqdm(
        range(start + 1, cfg.updates + 1),
        initial=start,
        total=cfg.updates,
        disable=not world.main,
        unit="update",
    )
    for step in bar:
        error: str | None = None
        records: list[dict] = []
        seconds: dict[str, float] = {}
        try:
            records, seconds = method(run, step)
        except UserError as e:  # on one rank, perhaps: all leave together
            error = str(e)
        if errors := [e for e in D.gather(error, world) if e]:
            raise D.SharedError(
                f"{errors[0]} (in update {step}; --resume {cfg.out} goes on from the last checkpoint)"
            )
        began = time.perf_counter()
        norm = update(run, step)
        seconds["opt"] = time.perf_counter() - began
        shares = D.gather({"records": records, "stop": run.stop}, world)
        stop = any(share["stop"] for share in shares)
        skipped = 0 if math.isfinite(norm) else skipped + 1
        at = [(i % world.size, i // world.size * cfg.generations) for i in range(cfg.batch_size)]
        everyone = [
            r
            for rank, first in at
            for r in shares[rank]["records"][first : first + cfg.generations]
        ]  # the batch's order
        bank_counts = bank_life.after_update(step, everyone) if bank_life else {}  # Alg. 1, line 17
        if world.main:
            metrics = (
                runlog.summarize(
                    step,
                    everyone,
                    norm,
                    run.optimizer.param_groups[0]["lr"],
                    seconds,
                    runlog.memory_gb(world),
                )
                | bank_counts
            )
            D.append_jsonl(logs["tokens"], [r["tokens"] for r in everyone if "tokens" in r])
            D.append_jsonl(
                logs["rollouts"], [{k: v for k, v in r.items() if k != "tokens"} for r in everyone]
            )
            D.append_jsonl(logs["metrics"], [metrics])
            for pass_on in passed_on:
                pass_on(metrics)
            bar.write(runlog.log_line(metrics, cfg.updates))
        if step % cfg.checkpoint_every == 0 or step == cfg.updates or stop or skipped == 3:
            saved = step
            if world.main and bank_life:
                bank_life.save_ledger()
            saved_at = save_checkpoint(run, step)
            for name, path in (
                logs.items() if world.main and cfg.keep_rollouts else ()
            ):  # what no later start needs
                D.trim_jsonl(path, step, bounds[name])
            if world.main:
                bar.write(f"saved {saved_at}")
        if stop or skipped == 3:
            why = "three updates in a row were not finite" if skipped == 3 else "stopped as asked"
            if world.main:
                bar.write(f"{why}; go on with: python sgsd.py --resume {cfg.out}")
            break
    bar.close()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
    if world.main and saved and skipped < 3:
        print(f"done: {out} (evaluate with: python eval.py {out}/checkpoints/step_{saved:06d})")
    D.leave_together(world)
    return int(skipped == 3)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    def body() -> int:
        cfg, resume = parse_config(argv)
        world = D.init(cfg.device)
        if cfg.explain:
            cfg = replace(cfg, data="--explain", batch_size=1, generations=1, audit_every=1)
        run = prepare(cfg, world, resume)
        if cfg.explain:
            import report  # which imports this module

            with run.verifier:
                return report.explain(run, resume)
        try:
            with run.verifier:
                code = train(run, resume)
        except KeyboardInterrupt:  # before the first update; from then on it is an orderly stop
            raise KeyboardInterrupt(f"go on with: python sgsd.py --resume {cfg.out}") from None
        stopped = run.stop
        del run  # its memory is wanted for the evaluation
        if not stopped:
            E.before_and_after(cfg, world)
        return code

    return D.command("sgsd", body)


if __name__ == "__main__":
    D.leave(main())
