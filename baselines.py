"""The paper's baselines GRPO and OPSD, and every ablation of SGSD, on SGSD's own loop.

    python baselines.py --method grpo            rewards relative to a group of 8 rollouts
    python baselines.py --method grpo+skill      the same, with retrieved skills in the prompts
    python baselines.py --method opsd            one teacher that sees the reference answer
    python baselines.py --method opsd+skill      student and teacher both see the skills
    python baselines.py --no-polarity            SGSD with every teacher distilled; Tab. 4 and §4.5
    python baselines.py --objective reverse_kl   SGSD with a divergence in place of the gate

A method is a function (run, step) -> (records, gradient norm, seconds), in place of
`sgsd.train_step`. Data, sampling, verifier, bank and evaluation are the same for all.

Dimension key: G rollouts of a group, K teachers, T completion tokens, n positions of a slice,
V vocabulary, D hidden size.
"""

import contextlib
import functools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

import config
import distributed
import policy
import rollout
import runlog
import sgsd
import skills
from config import Config, setting
from distributed import UserError
from problems import Problem
from rollout import Rollout
from sgsd import Run, Update
from skills import SkillPair

JSD_BETA = {"reverse_kl": 1.0, "forward_kl": 0.0, "jsd": 0.5}  # D10


@dataclass(frozen=True)
class BaselineConfig(Config):
    """SGSD's settings, and those of the baselines and the ablations."""

    program: ClassVar[str] = "baselines.py"

    method: str = setting("sgsd", "sgsd, grpo, grpo+skill, opsd or opsd+skill; Tab. 11")
    generations: int = setting(1, "G, rollouts per problem; Tab. 11")
    student_prefix: str = setting(
        "closed", "the student's think block; S3, S15", choices=("closed", "bare")
    )
    loss_temperature: float = setting(1.0, "of the log-probabilities in the loss; S5")
    drop_truncated: bool = setting(False, "leave out of the loss what the length limit cut; S4")
    token_mask: bool = setting(True, "without it every token counts; Tab. 4")
    clip: bool = setting(True, "without it the support takes the gaps as they are; Tab. 4")
    polarity: bool = setting(True, "without it every teacher is distilled, rho = +1; §4.4")
    retrieval: str = setting(
        "embedding", "the nearest pairs, or any; S20", choices=("embedding", "random")
    )
    answer_pi: bool = setting(False, "the reference answer in a teacher's prompt too; §4.5, S16")
    teacher: str = setting(
        "live", "the adapter; frozen has none; §4.5", choices=("live", "frozen", "periodic", "ema")
    )
    teacher_period: int = setting(50, "updates between copies of a periodic teacher; S18")
    teacher_decay: float = setting(0.999, "decay of an ema teacher; S18", least=0)
    objective: str = setting(
        "gate", "the gate, or a divergence over all tokens; §4.5, D10", choices=("gate", *JSD_BETA)
    )
    objective_clip: float = setting(0.0, "bound of a divergence's terms; 0 is none; S16", least=0)
    support_top_k: int = setting(0, "the gate on the teacher's top k; 0 is off; S19", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        method = self.method
        if method in ("base", "base+skill"):
            bank = " --skills BANK" if method == "base+skill" else ""
            raise UserError(f"--method {method}: trains nothing; use python eval.py MODEL{bank}")
        if method not in STEPS:
            raise UserError(f"--method {method}: must be one of {', '.join(STEPS)}")
        if self.bank and not self.sees_skills:
            raise UserError(f"--bank: {method} sees no skills; take {method}+skill, or no bank")
        if method.startswith("grpo") and self.generations < 2:
            raise UserError("--generations: GRPO compares a group, so it must be >= 2")
        if self.temperature == 0 and self.generations > 1:
            raise UserError("--temperature 0: makes all --generations of a problem the same")
        if self.teacher_decay >= 1:
            raise UserError(f"--teacher-decay {self.teacher_decay}: must be < 1 (S18)")
        if self.support_top_k and self.objective != "gate":
            raise UserError("--support-top-k: is a gate; leave out --objective")

    @property
    def sees_skills(self) -> bool:
        return self.method == "sgsd" or self.method.endswith("+skill")


# Tab. 11, and the released scripts for what it leaves open (S15-S17).
GRPO: dict[str, Any] = {"temperature": 1.2, "top_p": 1.0, "top_k": 0, "max_new_tokens": 16000}
GRPO |= {"max_prompt_tokens": 2048, "rollout_rows": 16, "grad_clip": 1.0, "generations": 8}
GRPO |= {"loss_temperature": 1.2, "student_prefix": "bare"}
OPSD: dict[str, Any] = {"objective": "forward_kl", "objective_clip": 0.05, "loss_temperature": 1.1}
OPSD |= {"teacher": "frozen", "answer_pi": True, "polarity": False, "token_mask": False}
SKILL = {"num_teachers": 3, "update_every": 0}
DEFAULTS = {"grpo": GRPO, "grpo+skill": GRPO | SKILL, "opsd": OPSD, "opsd+skill": OPSD | SKILL}


def grpo_advantages(rewards_G: Tensor, eps: float = 1e-4) -> Tensor:
    """(r - mean) / (std + eps) within one group, with the sample's std (n - 1) (S15). [G].

    0 where all rewards are equal. ValueError on fewer than two rewards.
    """
    if rewards_G.ndim != 1 or len(rewards_G) < 2:
        shape = tuple(rewards_G.shape)
        raise ValueError(f"grpo_advantages: rewards_G must be [G] with G >= 2, got {shape}")
    return (rewards_G - rewards_G.mean()) / (rewards_G.std() + eps)


def grpo_loss(logp_T: Tensor, logp_old_T: Tensor, advantage: float, clip: float = 0.2) -> Tensor:
    """-mean_t min(w_t A, clip(w_t, 1 - clip, 1 + clip) A), w_t = pi(y_t) / pi_old(y_t) (S15).

    No KL term. logp_T: [T] with gradient. logp_old_T: [T], taken as constant. advantage: the
    completion's. Returns a scalar.
    """
    ratio_T = (logp_T - logp_old_T.detach()).exp()
    clipped_T = ratio_T.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio_T * advantage, clipped_T * advantage).mean()


def generalized_jsd(
    logits_s: Tensor, logits_t: Tensor, beta: float, temperature: float = 1.0, clip: float = 0.0
) -> Tensor:
    """Divergence of student and teacher per token: [..., V] twice -> [...], in nats.

    beta 0: forward KL(T || S). beta 1: reverse KL(S || T). Between them
    beta KL(T || M) + (1 - beta) KL(S || M) with the mixture M = beta T + (1 - beta) S.
    clip > 0 bounds each vocabulary entry's term from above, as OPSD does (S16); the sum can then
    be negative. ValueError on beta outside [0, 1].
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"generalized_jsd: beta must be in [0, 1], got {beta}")
    logp_s = torch.log_softmax(logits_s / temperature, -1)
    logp_t = torch.log_softmax(logits_t / temperature, -1)
    if beta == 0:
        terms = logp_t.exp() * (logp_t - logp_s)
    elif beta == 1:
        terms = logp_s.exp() * (logp_s - logp_t)
    else:
        logp_m = torch.logaddexp(logp_t + math.log(beta), logp_s + math.log(1 - beta))
        of_teacher = logp_t.exp() * (logp_t - logp_m)
        of_student = logp_s.exp() * (logp_s - logp_m)
        terms = beta * of_teacher + (1 - beta) * of_student
    if clip:
        terms = terms.clamp(max=clip)
    return terms.sum(-1)


def local_support(
    ids_n: Tensor, logits_s_nV: Tensor, logits_t_nV: Tensor, top_k: int
) -> tuple[Tensor, Tensor]:
    """(KL(S || T) [n], gap of the sampled token [n]) on a truncated, renormalised vocabulary.

    It holds the teacher's top_k tokens and the sampled one: §4.5 "top-k support", the truncated
    local reverse KL (S19).
    """
    top_nk = logits_t_nV.topk(min(top_k, logits_t_nV.shape[-1])).indices
    sampled_n1 = ids_n[:, None]
    support = torch.cat([sampled_n1, top_nk], 1)
    twice = torch.cat([torch.zeros_like(sampled_n1, dtype=torch.bool), top_nk == sampled_n1], 1)
    logp_s = logits_s_nV.gather(1, support).masked_fill(twice, -1e30).log_softmax(1)
    logp_t = logits_t_nV.gather(1, support).masked_fill(twice, -1e30).log_softmax(1)
    return (logp_s.exp() * (logp_s - logp_t)).sum(1), (logp_t - logp_s)[:, 0]


def token_losses(
    cfg: BaselineConfig, ids_n: Tensor, logits_s_nV: Tensor, *teachers_nV: Tensor
) -> Tensor:
    """Loss and gap of each position under each teacher, [n, K, 2], from whole logits."""
    logp_nK = torch.stack([policy.logprob_of(ids_n, t_nV) for t_nV in teachers_nV], 1)
    gap_nK = logp_nK - policy.logprob_of(ids_n, logits_s_nV)[:, None]
    if cfg.support_top_k:
        k = cfg.support_top_k
        local = [local_support(ids_n, logits_s_nV, t_nV, k) for t_nV in teachers_nV]
        loss_nK = sgsd.gated_loss(torch.stack([kl_n for kl_n, _ in local], 1), cfg.tau_g)
        gap_nK = torch.stack([gap_n for _, gap_n in local], 1)
    elif cfg.objective == "gate":
        loss_nK = sgsd.gated_loss(gap_nK, cfg.tau_g)
    else:
        beta, clip = JSD_BETA[cfg.objective], cfg.objective_clip
        losses = [generalized_jsd(logits_s_nV, t_nV, beta, clip=clip) for t_nV in teachers_nV]
        loss_nK = torch.stack(losses, 1)
    return torch.stack([loss_nK, gap_nK], -1)


def settings(run: Run) -> BaselineConfig:
    assert isinstance(run.cfg, BaselineConfig)
    return run.cfg


def retrieve(run: Run, step: int, x: Problem) -> list[SkillPair]:
    """The pairs of a problem: the nearest ones, or with --retrieval random any (S20)."""
    cfg = settings(run)
    if cfg.retrieval == "embedding":
        return sgsd.retrieve(run, x)
    assert run.bank is not None
    draw = random.Random(rollout.sample_key(cfg.seed, step, x.id))
    chosen = []
    for entries in (run.bank.general_skills, run.bank.common_mistakes):
        chosen.append(draw.sample(entries, min(cfg.num_teachers, len(entries))))
    return [SkillPair(skill, mistake, 0.0, 0.0) for skill, mistake in zip(*chosen)]


def visible(run: Run, step: int, x: Problem) -> list[SkillPair]:
    """The pairs that the student's own prompt shows: none but for a method with +skill."""
    return retrieve(run, step, x) if settings(run).method.endswith("+skill") else []


def sample(run: Run, step: int) -> tuple[list[int], list[Problem], list[Rollout]]:
    """This rank's places in the global batch, in whole groups; their problems and rollouts."""
    cfg = settings(run)
    batch = rollout.minibatch(run.problems, cfg, step, cfg.generations)
    places = list[int]()
    for group in range(cfg.batch_size)[run.world.rank :: run.world.size]:
        places += range(group * cfg.generations, (group + 1) * cfg.generations)
    data = [batch[i][0] for i in places]
    keys = [batch[i][1] for i in places]
    prompts = []
    with distributed.errors_shared(run.world):
        for x in data:
            text = skills.render_skills(visible(run, step, x), x.problem)
            prompts.append(sgsd.prompt_ids(run, text, x.id, cfg.student_prefix))
    return places, data, sgsd.sample(run, data, prompts, keys)


def teachers(run: Run, step: int, x: Problem) -> tuple[list[SkillPair], list[list[int]], Tensor]:
    """The pairs of a problem, its K teachers' prompts, and their weights [K].

    OPSD has a single teacher. With --answer-pi a teacher also sees the reference answer (S16).
    """
    cfg, device = settings(run), run.world.device
    shown = x
    if cfg.answer_pi:
        shown = replace(x, problem=f"{x.problem}\n\nThe reference answer is {x.answer}.")
    if cfg.method.startswith("opsd"):
        pairs = visible(run, step, x)
        text = skills.render_skills(pairs, shown.problem)
        context = sgsd.prompt_ids(run, text, f"teacher of {x.id}", cfg.teacher_prefix)
        return pairs, [context], torch.ones(1, device=device)
    pairs = retrieve(run, step, x)
    s_g_K = torch.tensor([pair.s_g for pair in pairs], device=device)
    s_e_K = torch.tensor([pair.s_e for pair in pairs], device=device)
    return pairs, sgsd.teacher_prompts(run, shown, pairs), sgsd.teacher_weights(s_g_K, s_e_K)


def distil_step(run: Run, step: int) -> Update:
    """Algorithm 1 with any part changed, or OPSD; with every default it is `sgsd.train_step`."""
    cfg, clock = settings(run), runlog.Stopwatch()
    places, data, rollouts = sample(run, step)
    clock.lap("gen")
    with distributed.errors_shared(run.world):
        guidance = [teachers(run, step, x) for x in data]
    records = []
    for i, roll, (pairs_K, contexts_K, alpha_K) in zip(places, rollouts, guidance):
        ids_T = torch.tensor(roll.completion_ids, device=run.world.device)
        mask_T = sgsd.token_mask(ids_T, run.masked_ids if cfg.token_mask else [])
        ell_KT, gap_KT = scored(run, roll, contexts_K, clock)
        ell_KT = torch.where(mask_T.bool(), ell_KT, 0)
        lbar_K = ell_KT.sum(1) / (mask_T.sum() + sgsd.EPS)  # Eq. 15
        a_K = sgsd.robust_support(gap_KT, mask_T, cfg.c_delta if cfg.clip else math.inf)
        rho_K = torch.ones_like(a_K)
        if cfg.polarity:
            rho_K = sgsd.polarity(a_K, roll.r, cfg.eps_a)  # Eq. 13
        loss = (alpha_K * rho_K * lbar_K).sum()  # Eq. 16
        row = sgsd.record(run, step, roll, pairs_K, gap_KT, mask_T, alpha_K, a_K, rho_K, loss)
        row["losses"] = lbar_K.tolist()
        if cfg.objective != "gate" or cfg.support_top_k:
            row.get("tokens", {}).pop("credit", None)  # Eq. 20 is the gate's
        records.append({"index": i, **row, "loss": backward(run, roll, loss)})
        clock.lap("bwd")
    return finish(run, step, records, clock)


def backward(run: Run, roll: Rollout, loss: Tensor) -> float:
    """Backpropagate a rollout's part of the mean loss over the global batch; returns the loss."""
    cfg = settings(run)
    if cfg.drop_truncated and roll.truncated:  # S4
        loss = 0 * loss
    if loss.requires_grad:  # without teachers there is no loss (S8)
        (loss / (cfg.batch_size * cfg.generations)).backward()
    return loss.item()


def scored(
    run: Run, roll: Rollout, contexts_K: list[list[int]], clock: runlog.Stopwatch
) -> tuple[Tensor, Tensor]:
    """Token losses [K, T], and gaps [K, T] without gradient, a slice of positions at a time."""
    cfg, ids_T = settings(run), roll.completion_ids
    if not contexts_K:
        none_KT = torch.zeros(0, len(ids_T), device=run.world.device)
        return none_KT, none_KT
    teachers_KTD: dict[int, Tensor] = {}
    with teacher_policy(run):
        for group in policy.packs([len(c) + len(ids_T) for c in contexts_K], cfg.score_tokens):
            prompts = [contexts_K[k] for k in group]
            x_N, *_ = policy.predictors(run.model, prompts, [ids_T] * len(group), False)
            teachers_KTD.update(zip(group, x_N.split(len(ids_T))))
    clock.lap("score")
    student_TD, sampled_T, *_ = policy.predictors(run.model, [roll.prompt_ids], [ids_T], True)
    states = [student_TD, *[teachers_KTD[k] for k in range(len(contexts_K))]]
    losses = functools.partial(token_losses, cfg)
    both_TK2 = policy.over_slices(run.model, states, sampled_T, losses, cfg.loss_temperature)
    loss_KT, gap_KT = both_TK2.permute(2, 1, 0).contiguous()
    return loss_KT, gap_KT.detach()


@contextlib.contextmanager
def teacher_policy(run: Run) -> Iterator[None]:
    """The model under the teacher's adapter (--teacher); a live teacher changes nothing.

    A copy lives in `run.kept`, and so in the checkpoints. It begins as the student.
    """
    cfg = settings(run)
    if cfg.teacher == "live":
        yield
    elif cfg.teacher == "frozen":
        with run.model.disable_adapter():
            yield
    else:
        params = policy.trained(run.model)
        own = {name: p.data for name, p in params.items()}
        for name, p in params.items():
            copy = f"{name}.teacher"
            if copy not in run.kept:
                run.kept[copy] = p.detach().clone()
            p.data = run.kept[copy]
        try:
            yield
        finally:
            for name, p in params.items():
                p.data = own[name]


def grpo_step(run: Run, step: int) -> Update:
    """One GRPO update: the `generations` rollouts of a problem are a group.

    One optimizer step per rollout, so that pi_old = pi (S15).
    """
    cfg, clock = settings(run), runlog.Stopwatch()
    places, data, rollouts = sample(run, step)
    clock.lap("gen")
    rewards = torch.tensor([float(roll.r) for roll in rollouts])
    advantages = torch.cat([grpo_advantages(x_G) for x_G in rewards.split(cfg.generations)])
    records = []
    for i, x, roll, advantage in zip(places, data, rollouts, advantages.tolist()):
        prompt, ids, heat = [roll.prompt_ids], [roll.completion_ids], cfg.loss_temperature
        logp_T = policy.token_logprobs(run.model, prompt, ids, grad=True, temperature=heat)[0]
        loss = grpo_loss(logp_T, logp_T, advantage)
        none_K, none_KT = logp_T.new_zeros(0), logp_T.new_zeros(0, len(logp_T))
        pairs, mask_T = visible(run, step, x), torch.ones_like(logp_T)
        row = sgsd.record(run, step, roll, pairs, none_KT, mask_T, none_K, none_K, none_K, loss)
        row |= {"advantage": advantage, "loss": backward(run, roll, loss)}
        records.append({"index": i, **row})
        clock.lap("bwd")
    return finish(run, step, records, clock)


def finish(run: Run, step: int, records: list[dict], clock: runlog.Stopwatch) -> Update:
    """The optimizer's step, and then the copied teacher's."""
    cfg = settings(run)
    norm = policy.update(run.model, run.optimizer, run.world, cfg, step)
    follow = float(step % cfg.teacher_period == 0)
    if cfg.teacher == "ema":
        follow = 1 - cfg.teacher_decay
    for name, p in policy.trained(run.model).items():
        if f"{name}.teacher" in run.kept:  # exactly as it was at 0, exactly the student at 1
            run.kept[f"{name}.teacher"].lerp_(p.detach(), follow)
    clock.lap("opt")
    return records, norm, clock.seconds


STEPS = {"sgsd": distil_step, "grpo": grpo_step, "grpo+skill": grpo_step}
STEPS |= {"opsd": distil_step, "opsd+skill": distil_step}


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    about = "The baselines GRPO and OPSD, and the ablations of SGSD."

    def body() -> int:
        cfg, resume = config.parse(argv, "baselines.py", about, BaselineConfig, DEFAULTS)
        assert isinstance(cfg, BaselineConfig)
        return sgsd.launch(cfg, resume, STEPS[cfg.method])

    return distributed.command("baselines", body)


if __name__ == "__main__":
    distributed.leave(main())
