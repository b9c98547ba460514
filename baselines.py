"""The paper's baselines, GRPO and OPSD, and SGSD with another token loss: on SGSD's loop, data, sampling and verifier.

    python sgsd.py --method grpo                    rewards relative to a group of 8 rollouts, clipped ratio, no KL
    python sgsd.py --method grpo+skill              the same, with retrieved skills in the rollouts' prompts
    python sgsd.py --method opsd                    one teacher that sees the reference answer, forward KL
    python sgsd.py --method opsd+skill              student and teacher both see the skills
    python sgsd.py --objective reverse_kl           SGSD, a divergence in the gate's place; also --support-top-k 100

A method is a function (run, step) -> (records, seconds) that leaves the update's gradient in the parameters, and a line in
METHODS. Evaluation is plain for all of them.

Dimension key: G rollouts of a group, K teachers, T completion tokens, n positions of a slice, V vocabulary.
"""

import functools
import time
from collections.abc import Callable

import torch

import rollout as R
import sgsd
import skills as S
from distributed import UserError

# ============================================================================================================= formulas

JSD_BETA = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}  # D10


def grpo_advantages(rewards_G: torch.Tensor, eps: float = 1e-4) -> torch.Tensor:
    """(r - mean) / (std + eps) within one group, std of the sample (n - 1) (S15). [G]; 0 where all rewards are equal.

    ValueError on fewer than two rewards.
    """
    if rewards_G.ndim != 1 or len(rewards_G) < 2:
        raise ValueError(
            f"grpo_advantages: got shape {tuple(rewards_G.shape)}, rewards_G must be [G] with G >= 2"
        )
    return (rewards_G - rewards_G.mean()) / (rewards_G.std() + eps)


def grpo_loss(
    logp_T: torch.Tensor,
    logp_old_T: torch.Tensor,
    advantage: torch.Tensor | float,
    clip: float = 0.2,
) -> torch.Tensor:
    """-mean_t min(w_t A, clip(w_t, 1 - clip, 1 + clip) A), w_t = pi(y_t) / pi_old(y_t), of one completion; no KL (S15).

    logp_T: [T] with gradient. logp_old_T: [T], taken as constant. advantage: the completion's. Scalar.
    """
    ratio_T = (logp_T - logp_old_T.detach()).exp()
    return -torch.minimum(ratio_T * advantage, ratio_T.clamp(1 - clip, 1 + clip) * advantage).mean()


def generalized_jsd(
    logits_s: torch.Tensor,
    logits_t: torch.Tensor,
    beta: float,
    temperature: float = 1.0,
    clip: float = 0.0,
) -> torch.Tensor:
    """Divergence of student and teacher per token, over the last dimension: [..., V] twice -> [...], nats.

    beta 0: forward KL(T || S). beta 1: reverse KL(S || T). Between: beta KL(T || M) + (1 - beta) KL(S || M) with the mixture
    M = beta T + (1 - beta) S. clip > 0 bounds each vocabulary entry's term from above before the sum, as OPSD does (S16); the
    sum can then be negative. ValueError on beta outside [0, 1].
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"generalized_jsd: got beta {beta}, must be in [0, 1]")
    logp_s, logp_t = (torch.log_softmax(x / temperature, -1) for x in (logits_s, logits_t))
    if beta == 0:
        terms = logp_t.exp() * (logp_t - logp_s)
    elif beta == 1:
        terms = logp_s.exp() * (logp_s - logp_t)
    else:
        weights = torch.tensor([beta, 1 - beta], dtype=logp_s.dtype, device=logp_s.device).log()
        logp_m = torch.logaddexp(logp_t + weights[0], logp_s + weights[1])
        terms = beta * logp_t.exp() * (logp_t - logp_m) + (1 - beta) * logp_s.exp() * (
            logp_s - logp_m
        )
    return (terms.clamp(max=clip) if clip else terms).sum(-1)


def local_support(
    ids_n: torch.Tensor, logits_s_nV: torch.Tensor, logits_t_nV: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both sides on the teacher's top_k tokens and the sampled one, renormalised: (KL(S || T) [n], gap of the sampled token [n]).

    §4.5 "top-k support": the truncated local reverse KL (S19).
    """
    top_nk = logits_t_nV.topk(min(top_k, logits_t_nV.shape[-1])).indices
    support = torch.cat([ids_n[:, None], top_nk], 1)
    twice = torch.cat(
        [torch.zeros_like(ids_n[:, None], dtype=torch.bool), top_nk == ids_n[:, None]], 1
    )  # the sampled token counts once
    logp_s, logp_t = (
        x.gather(1, support).masked_fill(twice, -1e30).log_softmax(1)
        for x in (logits_s_nV, logits_t_nV)
    )
    return (logp_s.exp() * (logp_s - logp_t)).sum(1), (logp_t - logp_s)[:, 0]


def sampled_gap(
    ids_n: torch.Tensor, logits_s_nV: torch.Tensor, logits_t_nV: torch.Tensor
) -> torch.Tensor:
    """Delta (Eq. 7) of the sampled tokens, from whole logits: [n]."""
    logp_s, logp_t = (
        x.gather(1, ids_n[:, None])[:, 0] - x.logsumexp(1) for x in (logits_s_nV, logits_t_nV)
    )
    return logp_t - logp_s


def token_losses(
    cfg: sgsd.Config, ids_n: torch.Tensor, logits_s_nV: torch.Tensor, *teachers_nV: torch.Tensor
) -> torch.Tensor:
    """Loss and gap of each position under each teacher, [n, K, 2], by --objective and --support-top-k."""
    pairs = []
    for logits_t_nV in teachers_nV:
        if cfg.support_top_k:
            kl_n, gap_n = local_support(ids_n, logits_s_nV, logits_t_nV, cfg.support_top_k)
            loss_n = sgsd.gated_loss(kl_n, cfg.tau_g)
        else:
            gap_n = sampled_gap(ids_n, logits_s_nV, logits_t_nV)
            if cfg.objective == "gate":
                loss_n = sgsd.gated_loss(gap_n, cfg.tau_g)
            else:
                loss_n = generalized_jsd(
                    logits_s_nV, logits_t_nV, JSD_BETA[cfg.objective], clip=cfg.objective_clip
                )
        pairs.append(torch.stack([loss_n, gap_n], -1))
    return torch.stack(pairs, 1)


# ============================================================================================================== methods

Result = tuple[list[dict], dict[str, float]]


def _skills(run: sgsd.Run, step: int, skill: bool) -> Callable[[R.Problem], list[S.SkillPair]]:
    """The pairs that a problem's prompts show: retrieved once per problem, none without +skill."""
    return functools.cache(lambda x: sgsd.retrieve(run, [x], step)[0] if skill else [])


def _packs(run: sgsd.Run, rollouts: list[R.Rollout]) -> list[list[int]]:
    return R.packs(
        [len(r.prompt_ids) + len(r.completion_ids) for r in rollouts], run.cfg.score_tokens
    )


def grpo(run: sgsd.Run, step: int, skill: bool = False) -> Result:
    """One GRPO update: every problem's `generations` rollouts are a group. On-policy: one step per rollout, so pi_old = pi (S15)."""
    cfg, began = run.cfg, time.perf_counter()
    pairs = _skills(run, step, skill)
    batch, rollouts = sgsd.sample(run, step, lambda x: S.render_skills(pairs(x), x.problem))
    sampled = time.perf_counter()
    rewards = torch.tensor([float(roll.r) for roll in rollouts])
    advantages = torch.cat(
        [grpo_advantages(rewards_G) for rewards_G in rewards.split(cfg.generations)]
    ).tolist()
    records: list[dict] = [{}] * len(batch)
    for group in _packs(run, rollouts):
        prompts, completions = (
            [rollouts[i].prompt_ids for i in group],
            [rollouts[i].completion_ids for i in group],
        )
        logp_BT = R.token_logprobs(
            run.model, prompts, completions, grad=True, temperature=cfg.loss_temperature
        )
        losses = []
        for i, padded_T in zip(group, logp_BT):
            roll, logp_T = rollouts[i], padded_T[: len(rollouts[i].completion_ids)]
            losses.append(
                grpo_loss(logp_T, logp_T, advantages[i]) * float(cfg.counts(roll.truncated))
            )
            none_K, no_gaps_KT, mask_T = (
                logp_T.new_zeros(0),
                logp_T.new_zeros(0, len(logp_T)),
                torch.ones_like(logp_T),
            )
            loss = float(losses[-1].detach())
            row = sgsd.record(
                run, step, roll, pairs(batch[i]), no_gaps_KT, mask_T, none_K, none_K, none_K, loss
            )
            records[i] = row | {"advantage": advantages[i]}
        sgsd.backward(losses, cfg)
    return records, {"gen": sampled - began, "score": 0.0, "bwd": time.perf_counter() - sampled}


def opsd(run: sgsd.Run, step: int, skill: bool = False) -> Result:
    """One OPSD update: a single teacher that sees the reference answer is distilled, whatever the outcome."""
    began, pairs = time.perf_counter(), _skills(run, step, skill)
    batch, rollouts = sgsd.sample(run, step, lambda x: S.render_skills(pairs(x), x.problem))
    texts = [
        S.render_skills(pairs(x), sgsd.with_answer(x) if run.cfg.answer_pi else x.problem)
        for x in batch
    ]
    ctx = [
        [sgsd.prompt_ids(run, text, f"teacher of {x.id}", teacher=True)]
        for x, text in zip(batch, texts)
    ]
    return distil(
        run, step, rollouts, [pairs(x) for x in batch], ctx, [torch.ones(1)] * len(batch), began
    )


def sgsd_whole(run: sgsd.Run, step: int) -> Result:
    """Algorithm 1 with --objective or --support-top-k: the same teachers, weights, mask and polarity."""
    began = time.perf_counter()
    batch, rollouts = sgsd.sample(run, step, lambda x: S.render_student(x.problem))
    pairs = sgsd.retrieve(run, batch, step)
    ctx = [sgsd.contexts(run, x, pairs_K) for x, pairs_K in zip(batch, pairs)]
    alphas = [
        sgsd.teacher_weights(
            torch.tensor([p.s_g for p in pairs_K]), torch.tensor([p.s_e for p in pairs_K])
        )
        for pairs_K in pairs
    ]
    return distil(run, step, rollouts, pairs, ctx, alphas, began)


def distil(
    run: sgsd.Run,
    step: int,
    rollouts: list[R.Rollout],
    pairs: list[list[S.SkillPair]],
    ctx: list[list[list[int]]],
    alphas: list[torch.Tensor],
    began: float,
) -> Result:
    """Student and teachers as hidden states, their logits by slices of positions (`token_losses`); Eqs. 11-13, 15, 16 as in SGSD.

    ctx: per rollout the K teachers' prompts. alphas: per rollout [K].
    """
    cfg, sampled, scored = run.cfg, time.perf_counter(), 0.0
    records: list[dict] = [{}] * len(rollouts)
    for group in _packs(run, rollouts):
        start = time.perf_counter()
        with sgsd.teacher_policy(run):
            teachers = [teacher_states(run, ctx[i], rollouts[i].completion_ids) for i in group]
        scored += time.perf_counter() - start
        students = completion_states(
            run.model,
            [rollouts[i].prompt_ids for i in group],
            [rollouts[i].completion_ids for i in group],
            grad=True,
        )
        losses = []
        for i, student_TD, teachers_KTD in zip(group, students, teachers):
            roll, alpha_K = rollouts[i], alphas[i].to(student_TD.device)
            ids_T = torch.tensor(roll.completion_ids, device=student_TD.device)
            mask_T = sgsd.token_mask(ids_T, run.masked_ids)
            if ctx[i]:
                f = functools.partial(token_losses, cfg)
                both_TK2 = R.over_slices(
                    run.model, [student_TD, *teachers_KTD], ids_T, f, cfg.loss_temperature
                )
            else:
                both_TK2 = (
                    student_TD[:, :0, None].float().expand(-1, -1, 2)
                )  # S8: no teachers, no loss
            ell_KT, delta_KT = both_TK2[..., 0].T, both_TK2[..., 1].detach().T
            a_K = sgsd.robust_support(delta_KT, mask_T, cfg.clip_bound)  # Eqs. 11-12
            rho_K = (
                sgsd.polarity(a_K, roll.r, cfg.eps_a) if cfg.polarity else torch.ones_like(a_K)
            )  # Eq. 13
            lbar_K = (mask_T * ell_KT).sum(1) / (mask_T.sum() + 1e-8)  # Eq. 15
            losses.append(
                (alpha_K * rho_K * lbar_K).sum() * float(cfg.counts(roll.truncated))
            )  # Eq. 16
            row = sgsd.record(
                run,
                step,
                roll,
                pairs[i],
                delta_KT,
                mask_T,
                alpha_K,
                a_K,
                rho_K,
                float(losses[-1].detach()),
            )
            records[i] = row | {"losses": lbar_K.tolist()}
            if "tokens" in row:  # Eq. 20 is the gate's
                del row["tokens"]["credit"]
                row["tokens"]["losses"] = ell_KT.tolist()
        sgsd.backward(losses, cfg)
    return records, {
        "gen": sampled - began,
        "score": scored,
        "bwd": time.perf_counter() - sampled - scored,
    }


def completion_states(
    model: R.Model,
    prompt_ids: list[list[int]],
    completion_ids: list[list[int]],
    *,
    grad: bool = False,
) -> list[torch.Tensor]:
    """The last hidden states that predict each row's completion tokens, [T_b, D] per row, for `rollout.over_slices`.

    Rows as in `rollout.token_logprobs`. Raises ValueError on a model whose logits are more than head(hidden).
    """
    if not R.head_is_sliced(model):
        raise ValueError(
            "completion_states needs a model whose logits are head(hidden); this one caps or scales them"
        )
    x_N, *_ = R.predictors(model, prompt_ids, completion_ids, grad)
    return list(x_N.split([len(c) for c in completion_ids]))


def teacher_states(run: sgsd.Run, ctx: list[list[int]], ids_T: list[int]) -> list[torch.Tensor]:
    """K times [T, D], no gradient: `sgsd.score_teachers` short of the head."""
    states: dict[int, torch.Tensor] = {}
    for group in R.packs([len(c) + len(ids_T) for c in ctx], run.cfg.score_tokens):
        states |= zip(
            group, completion_states(run.model, [ctx[k] for k in group], [ids_T] * len(group))
        )
    return [states[k] for k in range(len(ctx))]


# What each method's update is, and the settings that are its own where no flag is given: Tab. 11, and for what the paper
# leaves open the released scripts (S15-S17). A method is a function and a line in METHODS.
METHODS: dict[str, Callable[[sgsd.Run, int], Result]] = {
    "sgsd": sgsd_whole,
    "grpo": grpo,
    "grpo+skill": functools.partial(grpo, skill=True),
    "opsd": opsd,
    "opsd+skill": functools.partial(opsd, skill=True),
}
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
METHOD_DEFAULTS: dict[str, dict] = {
    "grpo": GRPO,
    "grpo+skill": GRPO | SKILL,
    "opsd": OPSD,
    "opsd+skill": OPSD | SKILL,
}

OF_TEACHERS = {
    "teacher",
    "teacher_period",
    "teacher_decay",
    "teacher_prefix",
    "objective",
    "objective_clip",
    "support_top_k",
    "answer_pi",
    "polarity",
    "token_mask",
    "clip",
    "eps_a",
    "c_delta",
    "tau_g",
    "mask_extra",
}
OF_SKILLS = {
    "retrieval",
    "num_teachers",
    "encoder",
    "query_prompt",
    "cold_start",
    "update_every",
    "success_gate",
    "max_new_items",
    "dynamic_capacity",
    "merge_group_size",
    "merge_patience",
    "reply_tokens",
    "update_model",
    "memory_answer",
}
UNUSED = {"grpo": OF_TEACHERS | OF_SKILLS, "grpo+skill": OF_TEACHERS, "opsd": OF_SKILLS}


def find(name: str) -> tuple[Callable[[sgsd.Run, int], Result], dict, set[str]]:
    """A method's function, its own defaults and the settings it has no use for; UserError on a name that trains nothing."""
    if name in ("base", "base+skill"):
        raise UserError(
            f"--method {name}: trains nothing; measure it with python eval.py MODEL{' --skills BANK' if name[4:] else ''}"
        )
    if name not in METHODS:
        raise UserError(f"--method {name}: must be one of {', '.join(METHODS)}")
    return METHODS[name], METHOD_DEFAULTS.get(name, {}), UNUSED.get(name, set())
