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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

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

# ------------------------------------------------------------------------------------ settings


@dataclass(frozen=True)
class BaselineConfig(Config):
    """SGSD's settings, and those of the baselines and the ablations."""

    program: ClassVar[str] = "baselines.py"

    method: str = setting("sgsd", "sgsd, grpo, grpo+skill, opsd or opsd+skill; Tab. 11")
    generations: int = setting(1, "G, rollouts per problem; Tab. 11", above=0)
    student_prefix: str = setting(
        "closed", "the student's think block: closed, or bare; S3, S15", choices=("closed", "bare")
    )
    loss_temperature: float = setting(1.0, "of the log-probabilities in the loss; S5", above=0)
    drop_truncated: bool = setting(False, "leave out of the loss what the length limit cut; S4")
    token_mask: bool = setting(True, "without it every token counts; Tab. 4")
    clip: bool = setting(True, "without it the support takes the gaps as they are; Tab. 4")
    polarity: bool = setting(True, "without it every teacher is distilled, rho = +1; §4.4")
    retrieval: str = setting(
        "embedding", "the nearest pairs, or random ones; S20", choices=("embedding", "random")
    )
    answer_pi: bool = setting(False, "the reference answer in a teacher's prompt too; §4.5, S16")
    teacher: str = setting(
        "live",
        "the teacher's adapter: the student's own, none at all, a copy made every "
        "--teacher-period updates, or a moving average; §4.5",
        choices=("live", "frozen", "periodic", "ema"),
    )
    teacher_period: int = setting(50, "updates between copies of a periodic teacher; S18", above=0)
    teacher_decay: float = setting(0.999, "decay of an ema teacher; S18", at_least=0, below=1)
    objective: str = setting(
        "gate",
        "the gate of the sampled gap, or a divergence over the vocabulary; §4.5, D10",
        choices=("gate", "reverse_kl", "forward_kl", "jsd"),
    )
    objective_clip: float = setting(
        0.0, "upper bound of a vocabulary entry's term of a divergence; 0 is none; S16", at_least=0
    )
    support_top_k: int = setting(
        0, "the gate on the teacher's top k tokens and the sampled one; 0 is off; S19", at_least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method in ("base", "base+skill"):
            bank = " --skills BANK" if "skill" in self.method else ""
            raise UserError(
                f"--method {self.method}: trains nothing; "
                f"measure it with python eval.py MODEL{bank}"
            )
        if self.method not in STEPS:
            raise UserError(f"--method {self.method}: must be one of {', '.join(STEPS)}")
        if self.bank and not self.sees_skills:
            raise UserError(
                f"--bank {self.bank}: --method {self.method} sees no skills; leave it out, "
                f"or take {self.method}+skill"
            )
        if self.method.startswith("grpo") and self.generations < 2:
            raise UserError("--generations: GRPO compares a group, so it must be >= 2")
        if self.temperature == 0 and self.generations > 1:
            raise UserError("--temperature 0: makes all --generations of a problem the same")
        if self.support_top_k and self.objective != "gate":
            raise UserError("--support-top-k: is a gate; leave out --objective")

    @property
    def sees_skills(self) -> bool:
        return self.method == "sgsd" or self.method.endswith("+skill")


GRPO = {
    "generations": 8,
    "max_new_tokens": 16000,
    "max_prompt_tokens": 2048,
    "temperature": 1.2,
    "top_p": 1.0,
    "top_k": 0,
    "loss_temperature": 1.2,
    "student_prefix": "bare",
    "grad_clip": 1.0,
    "rollout_rows": 16,
}
OPSD = {
    "teacher": "frozen",
    "answer_pi": True,
    "objective": "forward_kl",
    "objective_clip": 0.05,
    "loss_temperature": 1.1,
    "polarity": False,
    "token_mask": False,
}
SKILL = {"num_teachers": 3, "update_every": 0}
DEFAULTS: dict[str, dict[str, Any]] = {  # Tab. 11; the released scripts for what it leaves open
    "grpo": GRPO,
    "grpo+skill": GRPO | SKILL,
    "opsd": OPSD,
    "opsd+skill": OPSD | SKILL,
}

# ------------------------------------------------------------------------------------ formulas

JSD_BETA = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}  # D10


def grpo_advantages(rewards_G: torch.Tensor, eps: float = 1e-4) -> torch.Tensor:
    """(r - mean) / (std + eps) within one group, with the sample's std (n - 1) (S15). [G].

    0 where all rewards are equal. ValueError on fewer than two rewards.
    """
    if rewards_G.ndim != 1 or len(rewards_G) < 2:
        shape = tuple(rewards_G.shape)
        raise ValueError(f"grpo_advantages: rewards_G must be [G] with G >= 2, got {shape}")
    return (rewards_G - rewards_G.mean()) / (rewards_G.std() + eps)


def grpo_loss(
    logp_T: torch.Tensor,
    logp_old_T: torch.Tensor,
    advantage: torch.Tensor | float,
    clip: float = 0.2,
) -> torch.Tensor:
    """-mean_t min(w_t A, clip(w_t, 1 - clip, 1 + clip) A), w_t = pi(y_t) / pi_old(y_t) (S15).

    No KL term. logp_T: [T] with gradient. logp_old_T: [T], taken as constant. advantage: the
    completion's. Returns a scalar.
    """
    ratio_T = (logp_T - logp_old_T.detach()).exp()
    clipped_T = ratio_T.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio_T * advantage, clipped_T * advantage).mean()


def generalized_jsd(
    logits_s: torch.Tensor,
    logits_t: torch.Tensor,
    beta: float,
    temperature: float = 1.0,
    clip: float = 0.0,
) -> torch.Tensor:
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
    ids_n: torch.Tensor, logits_s_nV: torch.Tensor, logits_t_nV: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
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
    cfg: BaselineConfig,
    ids_n: torch.Tensor,
    logits_s_nV: torch.Tensor,
    *teachers_nV: torch.Tensor,
) -> torch.Tensor:
    """Loss and gap of each position under each teacher, [n, K, 2], from whole logits."""
    found = []
    for logits_t_nV in teachers_nV:
        if cfg.support_top_k:
            kl_n, gap_n = local_support(ids_n, logits_s_nV, logits_t_nV, cfg.support_top_k)
            loss_n = sgsd.gated_loss(kl_n, cfg.tau_g)
        else:
            logp_t_n = policy.logprob_of(ids_n, logits_t_nV)
            gap_n = logp_t_n - policy.logprob_of(ids_n, logits_s_nV)
            beta = JSD_BETA[cfg.objective]
            loss_n = generalized_jsd(logits_s_nV, logits_t_nV, beta, clip=cfg.objective_clip)
        found.append(torch.stack([loss_n, gap_n], -1))
    return torch.stack(found, 1)


# ------------------------------------------------------------------------------------- methods


def sample(
    run: Run, step: int, student: Callable[[Problem], str]
) -> tuple[list[int], list[Problem], list[Rollout]]:
    """This rank's places in the global batch, in whole groups; their problems and rollouts.

    student: makes the text of a problem's prompt.
    """
    cfg: Any = run.cfg
    batch = sgsd.minibatch(run.problems, cfg, step, cfg.generations)
    places = []
    for group in range(cfg.batch_size)[run.world.rank :: run.world.size]:
        places += range(group * cfg.generations, (group + 1) * cfg.generations)
    data = [batch[i][0] for i in places]
    keys = [batch[i][1] for i in places]
    with distributed.errors_shared(run.world):
        prompts = [sgsd.prompt_ids(run, student(x), x.id, cfg.student_prefix) for x in data]
    rollouts = rollout.sample_rollouts(
        run.model, run.tokenizer, data, prompts, run.sampling, keys, run.verifier, cfg.rollout_rows
    )
    return places, data, rollouts


def retrieve(run: Run, step: int, x: Problem) -> list[SkillPair]:
    """The pairs of a problem: the nearest ones, or with --retrieval random any (S20)."""
    cfg: Any = run.cfg
    if cfg.retrieval == "embedding":
        return sgsd.retrieve(run, x)
    assert run.bank is not None
    draw = random.Random(rollout.sample_key(cfg.seed, step, x.id))
    chosen = []
    for entries in (run.bank.general_skills, run.bank.common_mistakes):
        chosen.append(draw.sample(entries, min(cfg.num_teachers, len(entries))))
    return [SkillPair(skill, mistake, 0.0, 0.0) for skill, mistake in zip(*chosen)]


def with_answer(run: Run, x: Problem) -> Problem:
    """What a teacher's prompt shows of a problem: with --answer-pi also the answer (S16)."""
    cfg: Any = run.cfg
    if not cfg.answer_pi:
        return x
    return Problem(x.id, f"{x.problem}\n\nThe reference answer is {x.answer}.", x.answer)


def sgsd_step(run: Run, step: int) -> Update:
    """Algorithm 1 with any of its parts changed; with none, `sgsd.train_step`."""
    clock = runlog.Stopwatch()
    places, data, rollouts = sample(run, step, lambda x: skills.render_student(x.problem))
    clock.lap("gen")
    pairs, contexts, alphas = [], [], []
    with distributed.errors_shared(run.world):
        for x in data:
            pairs_K = retrieve(run, step, x)
            pairs.append(pairs_K)
            contexts.append(sgsd.teacher_prompts(run, with_answer(run, x), pairs_K))
            s_g_K = torch.tensor([pair.s_g for pair in pairs_K], device=run.world.device)
            s_e_K = torch.tensor([pair.s_e for pair in pairs_K], device=run.world.device)
            alphas.append(sgsd.teacher_weights(s_g_K, s_e_K))
    return distil(run, step, places, rollouts, pairs, contexts, alphas, clock)


def opsd_step(run: Run, step: int, skill: bool = False) -> Update:
    """One OPSD update: a single teacher that sees the answer is distilled, whatever the outcome."""
    cfg, clock = run.cfg, runlog.Stopwatch()
    shown = functools.cache(lambda x: retrieve(run, step, x) if skill else [])
    places, data, rollouts = sample(run, step, lambda x: skills.render_skills(shown(x), x.problem))
    clock.lap("gen")
    contexts = []
    with distributed.errors_shared(run.world):
        for x in data:
            text = skills.render_skills(shown(x), with_answer(run, x).problem)
            what = f"teacher of {x.id}"
            contexts.append([sgsd.prompt_ids(run, text, what, cfg.teacher_prefix)])
    alphas = [torch.ones(1, device=run.world.device)] * len(data)
    return distil(run, step, places, rollouts, [shown(x) for x in data], contexts, alphas, clock)


def distil(
    run: Run,
    step: int,
    places: Sequence[int],
    rollouts: Sequence[Rollout],
    pairs: Sequence[list[SkillPair]],
    contexts: Sequence[list[list[int]]],
    alphas: Sequence[torch.Tensor],
    clock: runlog.Stopwatch,
) -> Update:
    """Lines 8-16 of Algorithm 1 with every switch.

    Per rollout: its place in the batch, its pairs, its K teachers' prompts and their weights [K].
    """
    cfg: Any = run.cfg
    records = []
    for i, roll, pairs_K, contexts_K, alpha_K in zip(places, rollouts, pairs, contexts, alphas):
        ids_T = torch.tensor(roll.completion_ids, device=run.world.device)
        mask_T = sgsd.token_mask(ids_T, run.masked_ids if cfg.token_mask else [])
        plain = cfg.objective == "gate" and not cfg.support_top_k
        if plain or not contexts_K:  # S8: without teachers there is no loss
            delta_KT = gaps(run, roll, contexts_K, clock)
            lbar_K = sgsd.teacher_losses(delta_KT, mask_T, cfg.tau_g)  # Eq. 15
        else:
            ell_KT, delta_KT = divergences(run, roll, contexts_K, clock)
            lbar_K = (mask_T * ell_KT).sum(1) / (mask_T.sum() + sgsd.EPS)
        gap_KT = delta_KT.detach()
        a_K = sgsd.robust_support(gap_KT, mask_T, cfg.c_delta if cfg.clip else math.inf)
        rho_K = torch.ones_like(a_K)
        if cfg.polarity:
            rho_K = sgsd.polarity(a_K, roll.r, cfg.eps_a)  # Eq. 13
        loss = (alpha_K * rho_K * lbar_K).sum()  # Eq. 16
        if cfg.drop_truncated and roll.truncated:
            loss = 0 * loss
        (loss / (cfg.batch_size * cfg.generations)).backward()
        row = sgsd.record(
            run, step, roll, pairs_K, gap_KT, mask_T, alpha_K, a_K, rho_K, loss.item()
        )
        if not plain:
            row["losses"] = lbar_K.tolist()
            row.get("tokens", {}).pop("credit", None)  # Eq. 20 is the gate's
        records.append({"index": i, **row})
        clock.lap("bwd")
    return finish(run, step, records, clock)


def gaps(
    run: Run, roll: Rollout, contexts_K: list[list[int]], clock: runlog.Stopwatch
) -> torch.Tensor:
    """Delta (Eq. 7) [K, T] of a rollout under --teacher and --loss-temperature."""
    cfg: Any = run.cfg
    ids_T, temperature = roll.completion_ids, cfg.loss_temperature
    with teacher_policy(run):
        logpT_KT = sgsd.score_teachers(run.model, contexts_K, ids_T, cfg.score_tokens, temperature)
    clock.lap("score")
    logpS_1T = policy.token_logprobs(
        run.model, [roll.prompt_ids], [ids_T], grad=True, temperature=temperature
    )
    return sgsd.log_prob_gap(logpT_KT, logpS_1T[0])


def divergences(
    run: Run, roll: Rollout, contexts_K: list[list[int]], clock: runlog.Stopwatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token losses and gaps, each [K, T], from whole logits a slice of positions at a time."""
    cfg: Any = run.cfg
    ids_T = roll.completion_ids
    teachers_KTD: list[Any] = [None] * len(contexts_K)
    with teacher_policy(run):
        for group in policy.packs([len(c) + len(ids_T) for c in contexts_K], cfg.score_tokens):
            prompts = [contexts_K[k] for k in group]
            x_N, *_ = policy.predictors(run.model, prompts, [ids_T] * len(group), False)
            for k, x_TD in zip(group, x_N.split(len(ids_T))):
                teachers_KTD[k] = x_TD
    clock.lap("score")
    student_TD, sampled_T, *_ = policy.predictors(run.model, [roll.prompt_ids], [ids_T], True)
    both_TK2 = policy.over_slices(
        run.model,
        [student_TD, *teachers_KTD],
        sampled_T,
        functools.partial(token_losses, cfg),
        cfg.loss_temperature,
    )
    return both_TK2[..., 0].T, both_TK2[..., 1].T


@contextlib.contextmanager
def teacher_policy(run: Run) -> Iterator[None]:
    """The model under the teacher's adapter (--teacher); a live teacher changes nothing.

    A copy lives in `run.kept`, and so in the checkpoints. It begins as the student.
    """
    cfg: Any = run.cfg
    if cfg.teacher == "live":
        yield
    elif cfg.teacher == "frozen":
        with run.model.disable_adapter():
            yield
    else:
        params = policy.trained(run.model)
        for name, p in params.items():
            run.kept.setdefault(f"{name}.teacher", p.detach().clone())
        own = {name: p.data for name, p in params.items()}
        try:
            for name, p in params.items():
                p.data = run.kept[f"{name}.teacher"]
            yield
        finally:
            for name, p in params.items():
                p.data = own[name]


def grpo_step(run: Run, step: int, skill: bool = False) -> Update:
    """One GRPO update: the `generations` rollouts of a problem are a group.

    One optimizer step per rollout, so that pi_old = pi (S15).
    """
    cfg: Any = run.cfg
    clock = runlog.Stopwatch()
    shown = functools.cache(lambda x: retrieve(run, step, x) if skill else [])
    places, data, rollouts = sample(run, step, lambda x: skills.render_skills(shown(x), x.problem))
    clock.lap("gen")
    rewards = torch.tensor([float(roll.r) for roll in rollouts])
    advantages = torch.cat([grpo_advantages(x_G) for x_G in rewards.split(cfg.generations)])
    records = []
    for i, x, roll, advantage in zip(places, data, rollouts, advantages.tolist()):
        logp_T = policy.token_logprobs(
            run.model,
            [roll.prompt_ids],
            [roll.completion_ids],
            grad=True,
            temperature=cfg.loss_temperature,
        )[0]
        loss = grpo_loss(logp_T, logp_T, advantage)
        if cfg.drop_truncated and roll.truncated:
            loss = 0 * loss
        (loss / (cfg.batch_size * cfg.generations)).backward()
        none_K, no_gaps_KT, mask_T = logp_T.new_zeros(0), logp_T.new_zeros(0, len(logp_T)), None
        mask_T = torch.ones_like(logp_T)
        row = sgsd.record(
            run, step, roll, shown(x), no_gaps_KT, mask_T, none_K, none_K, none_K, loss.item()
        )
        records.append({"index": i, **row, "advantage": advantage})
        clock.lap("bwd")
    return finish(run, step, records, clock)


def finish(run: Run, step: int, records: list[dict], clock: runlog.Stopwatch) -> Update:
    """The optimizer's step, and then the copied teacher's."""
    cfg: Any = run.cfg
    norm = sgsd.optimizer_step(run, step)
    follow = 0.0
    if cfg.teacher == "ema":
        follow = 1 - cfg.teacher_decay
    elif step % cfg.teacher_period == 0:
        follow = 1.0
    for name, p in policy.trained(run.model).items():
        if f"{name}.teacher" in run.kept:  # exactly as it was at 0, exactly the student at 1
            run.kept[f"{name}.teacher"].lerp_(p.detach(), follow)
    clock.lap("opt")
    return records, norm, clock.seconds


STEPS: dict[str, sgsd.StepFunction] = {
    "sgsd": sgsd_step,
    "grpo": grpo_step,
    "grpo+skill": functools.partial(grpo_step, skill=True),
    "opsd": opsd_step,
    "opsd+skill": functools.partial(opsd_step, skill=True),
}


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    about = "The baselines GRPO and OPSD, and the ablations of SGSD."

    def body() -> int:
        cfg: Any
        cfg, resume = config.parse(argv, "baselines.py", about, BaselineConfig, DEFAULTS)
        return sgsd.launch(cfg, resume, STEPS[cfg.method], cfg.sees_skills)

    return distributed.command("baselines", body)


if __name__ == "__main__":
    distributed.leave(main())
