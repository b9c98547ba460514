"""The paper's baselines GRPO and OPSD, and every ablation of SGSD, on SGSD's own loop.

    python -m extras.baselines --out runs/a --method grpo             rewards relative to a group
    python -m extras.baselines --out runs/s --method grpo-short       the same, sampled as SGSD
    python -m extras.baselines --out runs/b --method grpo+skill       the same, skills in prompts
    python -m extras.baselines --out runs/c --method opsd             a teacher sees the answer
    python -m extras.baselines --out runs/d --method opsd+skill       both roles see the skills
    python -m extras.baselines --out runs/e --no-polarity             SGSD, all distilled; §4.4
    python -m extras.baselines --out runs/f --objective reverse_kl    SGSD with a divergence

A method is two functions: `prompts` of a problem and `rollout_loss`. `train_step` is sgsd.py's with
these two in it, and with groups of rollouts; all methods share the loop, data, verifier and
evaluation. DEFAULTS holds the settings in which a method differs from SGSD.

Dimension key: G rollouts of a group, K teachers, T completion tokens, n positions of a slice,
V vocabulary, D hidden size.
"""

import contextlib
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

import distributed
import rollout
import scoring
import sgsd
import skills
from lib import config, model, problems
from lib.config import Config, setting
from lib.problems import Problem
from lib.run import Run
from rollout import Rollout
from skills import SkillPair

OF_TEACHERS = (  # settings that change a teacher; GRPO has none
    "token_mask",
    "clip",
    "polarity",
    "answer_pi",
    "teacher",
    "teacher_period",
    "teacher_decay",
    "objective",
    "objective_clip",
    "support_top_k",
)
JSD_BETA = {"reverse_kl": 1.0, "forward_kl": 0.0, "jsd": 0.5}  # D10


@dataclass(frozen=True)
class BaselineConfig(Config):
    """SGSD's settings, and those of the baselines and the ablations."""

    program: ClassVar[str] = "-m extras.baselines"

    method: str = setting(
        "sgsd",
        "sgsd, grpo, grpo-short or opsd, grpo and opsd also with +skill; sets other defaults",
    )
    generations: int = setting(1, "G: solutions sampled for each problem; 8 for grpo; Tab. 11")
    student_prefix: str = setting(
        "closed",
        "think block of the student's prompt: empty, or left to the model; S3, S15",
        ("closed", "bare"),
    )
    loss_temperature: float = setting(
        1.0, "temperature of the loss; 0 takes the sampling's; S5, S15", least=0
    )
    drop_truncated: bool = setting(
        False, "leave solutions that the length limit cut out of the loss; S4"
    )
    token_mask: bool = setting(
        True, "leave formatting tokens out; without it every token counts; Tab. 4"
    )
    clip: bool = setting(True, "clip the gaps for the support; Tab. 4")
    polarity: bool = setting(
        True, "distil or reverse by the verdict; without it distil every teacher; §4.4"
    )
    retrieval: str = setting(
        "embedding", "nearest by embedding, or random; S20", ("embedding", "random")
    )
    answer_pi: bool = setting(False, "show teachers the reference answer, too; §4.5, S16")
    teacher: str = setting(
        "live",
        "teacher weights: current adapter, base, periodic copy or EMA; §4.5",
        choices=("live", "frozen", "periodic", "ema"),
    )
    teacher_period: int = setting(
        50, "copy the student to a periodic teacher every so many steps; S18"
    )
    teacher_decay: float = setting(0.999, "decay of an EMA teacher, per step; S18", least=0, most=1)
    objective: str = setting(
        "gate",
        "the gate, or a divergence over the whole vocabulary; §4.5, D10",
        choices=("gate", *JSD_BETA),
    )
    objective_clip: float = setting(
        0.0, "clip each term of a divergence to this; 0 disables; S16", least=0
    )
    support_top_k: int = setting(0, "gate on the teacher's top k tokens; 0 disables; S19", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        method = self.method
        if method not in METHODS:
            rule = f"must be one of {', '.join(METHODS)}; base and base+skill train nothing"
            raise ValueError(f"--method {method}: {rule}: use python eval.py MODEL --skills BANK")
        for name in OF_TEACHERS if method.startswith("grpo") else ():
            default = getattr(BaselineConfig, name)
            if getattr(self, name) != default:
                switch = config.flag(f"no_{name}" if default is True else name)
                raise ValueError(f"{switch}: applies to teachers; {method} has none")
        if self.bank and not self.uses_skill_bank:
            raise ValueError(f"--bank: {method} uses no skills; take {method}+skill, or no bank")
        if method.startswith("grpo") and self.generations < 2:
            raise ValueError("--generations: GRPO compares a group, so it must be >= 2")
        if self.temperature == 0 and self.generations > 1:
            raise ValueError("--temperature 0: makes all --generations of a problem the same")
        if self.support_top_k and self.objective != "gate":
            raise ValueError("--support-top-k: needs the gate; leave out --objective")

    @property
    def score_temperature(self) -> float:
        """The temperature of the log-probabilities in the loss; a greedy draw has none."""
        return self.loss_temperature or self.temperature or 1.0

    @property
    def uses_skill_bank(self) -> bool:
        return self.method == "sgsd" or self.method.endswith("+skill")


# Tab. 11, and the released scripts for what it leaves open (S15-S17).
GRPO: dict[str, Any] = {
    "temperature": 1.2,
    "top_p": 1.0,
    "top_k": 0,
    "max_new_tokens": 16000,
    "max_prompt_tokens": 2048,
    "rollout_rows": 16,
    "grad_clip": 1.0,
    "generations": 8,
    "loss_temperature": 0.0,
    "student_prefix": "bare",
}
OPSD: dict[str, Any] = {
    "objective": "forward_kl",
    "objective_clip": 0.05,
    "loss_temperature": 0.0,
    "teacher": "frozen",
    "answer_pi": True,
    "polarity": False,
    "token_mask": False,
}
# Sampled and clipped as SGSD: a thinking model answers at once, in 1,024 tokens (not in the paper).
GRPO_SHORT: dict[str, Any] = {"generations": 8, "loss_temperature": 0.0}
SKILL = {"num_teachers": 3, "evolve_every": 0}
DEFAULTS = {
    "grpo": GRPO,
    "grpo-short": GRPO_SHORT,
    "grpo+skill": GRPO | SKILL,
    "opsd": OPSD,
    "opsd+skill": OPSD | SKILL,
}
METHODS = ("sgsd", *DEFAULTS)


def parse(argv: Sequence[str] | None = None) -> BaselineConfig:
    """The settings of a command line."""
    return config.parse(argv, __doc__, BaselineConfig, DEFAULTS)


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
    be negative. Multiplied by rho = -1 it is maximised: forward KL without bound, reverse KL up to
    -log of the teacher's smallest probability, a mixture up to log 2 (S26).
    ValueError on beta outside [0, 1].
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


def local_support(ids_n: Tensor, s_nV: Tensor, t_nV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(KL(T || S) [n], gap of the sampled token [n]) on a truncated, renormalised vocabulary.

    It holds the teacher's top k tokens and the sampled one: §4.5 "top-k support", by the paper's
    only formula for "reverse KL" (§3, App. E.5; S19). s_nV, t_nV: logits of student and teacher.
    """
    sampled_n1 = ids_n[:, None]
    top_nk = t_nV.topk(min(k, t_nV.shape[-1])).indices
    support = torch.cat([sampled_n1, top_nk], 1)
    twice = support == sampled_n1  # the sampled token once more, among the top k: masked below
    twice[:, 0] = False
    logp_s = s_nV.gather(1, support).masked_fill(twice, -1e30).log_softmax(1)
    logp_t = t_nV.gather(1, support).masked_fill(twice, -1e30).log_softmax(1)
    return (logp_t.exp() * (logp_t - logp_s)).sum(1), (logp_t - logp_s)[:, 0]


def token_losses(
    cfg: BaselineConfig, ids_n: Tensor, s_nV: Tensor, teachers: Sequence[Tensor]
) -> Tensor:
    """Loss, gap and full gap of each position under each teacher: [n, K, 3].

    s_nV: the student's logits, with gradient. teachers: K tensors [n, V] of logits. The gap decides
    the polarity. The full gap is Eq. 7's, from which the gap differs where --support-top-k
    truncates the vocabulary (S19).
    """
    logp_nK = torch.stack([scoring.logprob_of(ids_n, t_nV) for t_nV in teachers], 1)
    full_nK = logp_nK - scoring.logprob_of(ids_n, s_nV)[:, None]
    columns = []
    for t_nV, full_n in zip(teachers, full_nK.unbind(1)):
        gap_n, gated_n = full_n, full_n
        if cfg.support_top_k:
            gated_n, gap_n = local_support(ids_n, s_nV, t_nV, cfg.support_top_k)
        if cfg.objective == "gate":
            loss_n = sgsd.gated_loss(gated_n, cfg.tau_g)
        else:
            beta, clip = JSD_BETA[cfg.objective], cfg.objective_clip
            loss_n = generalized_jsd(s_nV, t_nV, beta, clip=clip)
        columns.append(torch.stack([loss_n, gap_n, full_n], 1))
    return torch.stack(columns, 1)


@dataclass
class Example(sgsd.Example):
    """A rollout on its way through a step, with all rollouts of its problem in this step."""

    group: list[Rollout] = field(default_factory=list)


@dataclass
class RolloutLoss(sgsd.RolloutLoss):
    """A rollout's loss with further numbers for rollouts.jsonl and tokens.jsonl."""

    numbers: dict[str, Tensor] = field(default_factory=dict)
    token_numbers: dict[str, Tensor] = field(default_factory=dict)
    has_credit: bool = True  # whether Eq. 20 describes this loss


def settings(run: Run) -> BaselineConfig:
    assert isinstance(run.cfg, BaselineConfig)
    return run.cfg


def prompts(run: Run, x: Problem, pairs_K: list[SkillPair]) -> tuple[list[int], list[list[int]]]:
    """The student's prompt and each teacher's; GRPO has no teachers, and OPSD a single one.

    A +skill method puts the pairs in front of the student's problem, too (S17). With --answer-pi a
    teacher also sees the reference answer (S16).
    """
    cfg = settings(run)
    shown = pairs_K if cfg.method.endswith("+skill") else []
    student = sgsd.prompt_ids(run, skills.render_skills(shown, x.problem), cfg.student_prefix)
    if cfg.method.startswith("grpo"):
        return student, []
    if cfg.answer_pi:
        x = replace(x, problem=f"{x.problem}\n\nThe reference answer is {x.answer}.")
    if cfg.method.startswith("opsd"):
        text = skills.render_skills(pairs_K, x.problem)
        return student, [sgsd.prompt_ids(run, text, cfg.teacher_prefix)]
    return student, sgsd.prompts(run, x, pairs_K)[1]


def rollout_loss(run: Run, example: Example) -> RolloutLoss:
    """The loss of a rollout by the method."""
    if settings(run).method.startswith("grpo"):
        return grpo_rollout(run, example)
    return distilled_rollout(run, example)


def grpo_rollout(run: Run, example: Example) -> RolloutLoss:
    """A rollout's loss by its reward relative to its group's.

    There is one step per rollout, so that pi_old = pi and the ratio is 1 (S15).
    """
    cfg, roll = settings(run), example.rollout
    rewards_G = torch.tensor([float(sgsd.reward(other)) for other in example.group])
    advantage = grpo_advantages(rewards_G)[example.index % cfg.generations]
    logp_1T = scoring.token_logprobs(
        run.lm,
        [roll.prompt_ids],
        [roll.completion_ids],
        grad=True,
        temperature=cfg.score_temperature,
    )
    logp_T = logp_1T[0]
    loss = unless_cut(cfg, roll, grpo_loss(logp_T, logp_T, advantage.item()))
    return without_teachers(loss, logp_T, {"advantage": advantage})


def without_teachers(loss: Tensor, logp_T: Tensor, numbers: dict[str, Tensor]) -> RolloutLoss:
    """For a method whose loss needs only the student's log-probabilities [T]."""
    ones_T, none_K = torch.ones_like(logp_T), logp_T.new_zeros(0)
    none_KT = logp_T.new_zeros(0, len(logp_T))
    return RolloutLoss(
        loss=loss,
        mask_T=ones_T,
        delta_KT=none_KT,
        alpha_K=none_K,
        a_K=none_K,
        rho_K=none_K,
        lbar_K=none_K,
        credit_KT=none_KT,
        numbers=numbers,
        has_credit=False,
    )


def unless_cut(cfg: BaselineConfig, roll: Rollout, x: Tensor) -> Tensor:
    """A loss or credit, or with --drop-truncated 0 where the length limit cut the rollout (S4)."""
    return torch.zeros_like(x) if cfg.drop_truncated and roll.truncated else x


def distilled_rollout(run: Run, example: Example) -> RolloutLoss:
    """A rollout's loss by Algorithm 1, lines 5 and 8-14, with any part changed; or by OPSD."""
    cfg, roll = settings(run), example.rollout
    ids_T = torch.tensor(roll.completion_ids, device=run.device)
    mask_T = sgsd.token_mask(ids_T, run.masked_ids if cfg.token_mask else [])
    alpha_K = torch.ones(1, device=run.device)
    if not cfg.method.startswith("opsd"):
        alpha_K = sgsd.pair_weights(run, example.pairs_K)
    ell_KT, gap_KT, full_KT = scored(run, roll, example.teachers_K)
    bound = cfg.c_delta if cfg.clip else math.inf
    a_K = sgsd.robust_support(gap_KT, mask_T, bound)
    rho_K = torch.ones_like(a_K)
    if cfg.polarity:
        rho_K = sgsd.polarity(a_K, sgsd.reward(roll), cfg.eps_a)
    lbar_K = sgsd.masked_mean(ell_KT, mask_T)
    loss = sgsd.sgsd_loss(lbar_K, alpha_K, rho_K)
    credit_KT = sgsd.token_credit(gap_KT, mask_T, alpha_K, rho_K, cfg.tau_g)
    loss, credit_KT = unless_cut(cfg, roll, loss), unless_cut(cfg, roll, credit_KT)
    result = RolloutLoss(loss, mask_T, gap_KT, alpha_K, a_K, rho_K, lbar_K, credit_KT)
    if cfg.objective != "gate" or cfg.support_top_k:  # Eq. 20 holds for the gate on the full gap
        result.has_credit, result.credit_KT = False, torch.zeros_like(credit_KT)
    if cfg.support_top_k:  # logs what truncation does to the supports and to the mean gap (S19)
        error_KT = (gap_KT - full_KT).abs()
        result.numbers["a_full"] = sgsd.robust_support(full_KT, mask_T, bound)
        result.numbers["gap_error"] = sgsd.robust_support(error_KT, mask_T, math.inf)
        result.token_numbers["delta_full"] = full_KT.detach()
    return result


def scored(run: Run, roll: Rollout, contexts_K: list[list[int]]) -> Tensor:
    """Token losses, gaps and full gaps: [3, K, T], computed a slice of positions at a time."""
    cfg, ids_T = settings(run), roll.completion_ids
    if not contexts_K:
        return torch.zeros(3, 0, len(ids_T), device=run.device)
    teacher_states: dict[int, Tensor] = {}  # [T, D] by k
    with teacher_policy(run), torch.no_grad():
        for group in scoring.packs([len(c) + len(ids_T) for c in contexts_K], cfg.score_tokens):
            prompts = [contexts_K[k] for k in group]
            x_N, _ = scoring.predictors(run.lm, prompts, [ids_T] * len(group))
            teacher_states.update(zip(group, x_N.split(len(ids_T))))
    run.clock.lap("score")
    student_TD, sampled_T = scoring.predictors(run.lm, [roll.prompt_ids], [ids_T])
    states = [student_TD]
    states += [teacher_states[k] for k in range(len(contexts_K))]

    def losses(ids_n: Tensor, student_nV: Tensor, *teachers_nV: Tensor) -> Tensor:
        return token_losses(cfg, ids_n, student_nV, teachers_nV)

    columns_TK3 = scoring.over_slices(run.lm, states, sampled_T, losses, cfg.score_temperature)
    return columns_TK3.permute(2, 1, 0).contiguous()


@contextlib.contextmanager
def teacher_policy(run: Run) -> Iterator[None]:
    """The model under the teacher's adapter (--teacher); a live teacher changes nothing.

    A copy lives in `run.extra_tensors`, and so in the checkpoints. It begins as the student.
    """
    cfg = settings(run)
    if cfg.teacher == "live":
        yield
    elif cfg.teacher == "frozen":
        with run.lm.disable_adapter():
            yield
    else:
        params = model.trained(run.lm)
        students = {name: p.data for name, p in params.items()}
        for name, p in params.items():
            copy = f"{name}.teacher"
            if copy not in run.extra_tensors:
                run.extra_tensors[copy] = p.detach().clone()
            p.data = run.extra_tensors[copy]
        try:
            yield
        finally:
            for name, p in params.items():
                p.data = students[name]


def follow(run: Run, step: int) -> None:
    """Let a copied teacher follow the student (--teacher periodic or ema; S18)."""
    cfg = settings(run)
    share = float(step % cfg.teacher_period == 0)  # 0 leaves the copy as it is, 1 copies exactly
    if cfg.teacher == "ema":
        share = 1 - cfg.teacher_decay
    for name, p in model.trained(run.lm).items():
        copy = run.extra_tensors.get(f"{name}.teacher")
        if copy is not None:
            copy.lerp_(p.detach(), share)


# --------------------------------------------------------------------------- a step, the command


def retrieve(run: Run, x: Problem, step: int) -> list[SkillPair]:
    """The nearest pairs by --encoder; with --retrieval random, others for each step (S20).

    Random pairs all have one weight. A method without skills has no pairs.
    """
    cfg = settings(run)
    if not cfg.uses_skill_bank:
        return []
    if cfg.retrieval == "embedding":
        return run.bank.retrieve(x.problem, cfg.num_teachers, run.embed)
    draw, k = random.Random(rollout.sample_key(cfg.seed, step, x.id)), cfg.num_teachers
    lists = run.bank.general_skills, run.bank.common_mistakes
    chosen = [draw.sample(entries, min(k, len(entries))) for entries in lists]
    return [SkillPair(skill, mistake, 0.0, 0.0) for skill, mistake in zip(*chosen)]


def train_step(run: Run, step: int) -> tuple[list[dict], float]:
    """One step of any method; with all defaults it equals `sgsd.train_step` bit for bit."""
    cfg, world = settings(run), run.world
    batch, size = problems.minibatch(run.problems, cfg.batch_size, step, cfg.seed), cfg.generations
    examples = []
    for place in range(world.rank, len(batch), world.size):  # whole groups
        x, epoch = batch[place]
        pairs_K = retrieve(run, x, step)
        student, teachers_K = prompts(run, x, pairs_K)
        for i in range(size):
            key = rollout.sample_key(cfg.seed, step, x.id, epoch * size + i)
            index = place * size + i
            examples.append(Example(index, x, key, pairs_K, student, teachers_K))
    sgsd.sample(run, examples)
    run.clock.lap("gen")
    rows = []
    for at, example in enumerate(examples):
        first = at - at % size
        example.group = [other.rollout for other in examples[first : first + size]]
        result = rollout_loss(run, example)
        if result.loss.requires_grad:  # --drop-truncated leaves a constant
            (result.loss / (cfg.batch_size * size)).backward()
        rows.append(record(run, step, example, result))
        run.clock.lap("bwd")
    norm = sgsd.optimizer_step(run, step)
    follow(run, step)
    run.clock.lap("opt")
    return rows, norm


def record(run: Run, step: int, example: Example, result: RolloutLoss) -> dict:
    """`sgsd.record` with the method's own numbers."""
    row = sgsd.record(run, step, example, result)
    row |= {name: x.tolist() for name, x in result.numbers.items()}
    if "tokens" in row:
        row["tokens"] |= {name: x.tolist() for name, x in result.token_numbers.items()}
        if not result.has_credit:
            del row["tokens"]["credit"]
    return row


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    config.end_at_signals()
    cfg = parse(argv)
    with Run.open(cfg, skills.SkillBank.load) as run:
        return sgsd.train(run, train_step)


if __name__ == "__main__":
    distributed.leave(main)
