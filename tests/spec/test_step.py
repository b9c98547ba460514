"""Algorithm 1, line by line, and the settings of Tabs. 11 and 12.

The loss of a rollout is compared with the loops of tests/plain.py over log-probabilities of the
definition; a step with what its lines say, done by hand.
"""

import contextlib
import dataclasses
import types

import plain
import pytest
import small_run
import torch
from conftest import PROBLEMS, make_bank, same
from driver import rows
from small_run import opened, train

import rollout
import sgsd
import skills
from lib import config, model
from rollout import Sampling

IDS_T = [79, 256, 104, 53, 57, 51, 54, 51, 265]  # two newlines and the stop id are masked
SIMILARITIES = [(0.9, 0.1), (0.2, 0.6), (0.5, -0.3), (-0.4, 0.4)]


@contextlib.contextmanager
def learnt(world_dir, out, **changes):
    """A run whose adapters have learnt something."""
    with opened(world_dir, out, **changes) as run:
        torch.manual_seed(1)
        for p in model.trained(run.lm).values():
            p.data += 0.1 * torch.randn_like(p)
        yield run


@pytest.mark.parametrize("r", [1, -1])
def test_alg1_lines_5_and_8_to_14_the_loss_of_a_rollout_is_the_papers_arithmetic(
    r, world_dir, tmp_path
):
    """And its gradient is Eq. 19's. Teachers are the present policy, with its adapters (Eq. 4)."""
    changes = {"eps_a": 0.1, "tau_g": 0.5, "c_delta": 1.5, "score_tokens": 700}
    with learnt(world_dir, tmp_path / "run", **changes) as run:
        check_the_loss_of_a_rollout(run, r)


def check_the_loss_of_a_rollout(run, r):
    lm, cfg, x = run.lm, run.cfg, run.problems[0]
    pairs_K = []
    for pair, (s_g, s_e) in zip(run.bank.retrieve(x.problem, 4, run.embed), SIMILARITIES):
        pairs_K.append(dataclasses.replace(pair, s_g=s_g, s_e=s_e))
    student = sgsd.student_prompt(run, x.problem)
    given = {"problem": x.problem, "prompt_ids": student, "completion_ids": IDS_T, "r": r}
    roll = types.SimpleNamespace(**given)
    _, contexts_K = sgsd.teacher_prompts(run, pairs_K, x.problem, roll)
    result = sgsd.rollout_loss(run, roll, pairs_K)

    mask = [int(i not in (256, 265)) for i in IDS_T]
    student_T = plain.logprobs_of_ids(lm, student, IDS_T)
    alphas = plain.eq6(*zip(*SIMILARITIES))
    rhos, losses = [], []
    for k, context in enumerate(contexts_K):
        teacher_T = plain.logprobs_of_ids(lm, context, IDS_T)
        gaps = plain.eq7(teacher_T.tolist(), student_T.tolist())
        a = plain.eq12(gaps, mask, cfg.c_delta)
        rhos.append(plain.eq13(a, r, cfg.eps_a))
        losses.append(plain.eq15(gaps, mask, cfg.tau_g))
        same(result.token_numbers["delta"][k], gaps, 1e-4)
        same(result.numbers["a"][k], a, 1e-4)
        credit = plain.eq20(gaps, mask, alphas[k], rhos[k], cfg.tau_g)
        same(result.token_numbers["credit"][k], credit, 1e-4)
    assert result.token_numbers["mask"].tolist() == mask
    same(result.numbers["alpha"], alphas, 1e-6)
    assert result.numbers["rho"].tolist() == rhos and {*rhos} == {-1, 0, 1}
    same(result.numbers["losses"], losses, 1e-4)
    same(result.loss, plain.eq16(alphas, rhos, losses), 1e-4)

    parameters = [*model.trained(lm).values()]
    weighted = -(result.token_numbers["credit"].sum(0) * student_T).sum()
    wants = torch.autograd.grad(weighted, parameters)
    for got, want in zip(torch.autograd.grad(result.loss, parameters), wants):
        assert want.abs().max() > 0
        same(got, want, 1e-4)


def test_a_teacher_beyond_the_context_is_left_out_as_by_a_shorter_list(world_dir, tmp_path):
    """S35. Prompt and solution count together: for a solution of one token less it stays."""
    with opened(world_dir, tmp_path / "run") as run:
        x, context = run.problems[0], rollout.context_limit(run.lm)
        first, second, third = run.bank.retrieve(x.problem, 3, run.embed)
        long = {**second.mistake, "how_to_avoid": "a" * (context - 700)}
        pairs_K = [first, dataclasses.replace(second, mistake=long), third]
        student = sgsd.student_prompt(run, x.problem)
        given = {"problem": x.problem, "prompt_ids": student, "r": 1, "completion_ids": []}
        _, prompts_K = sgsd.teacher_prompts(run, pairs_K, x.problem, types.SimpleNamespace(**given))
        room = context - len(prompts_K[1])
        for length, kept in ((room, pairs_K), (room + 1, [first, third])):
            given["completion_ids"] = [70 + i % 20 for i in range(length)]
            roll = types.SimpleNamespace(**given)
            got, want = (sgsd.rollout_loss(run, roll, pairs) for pairs in (pairs_K, kept))
            assert got.pairs_K == kept and got.loss.isfinite()
            same(got.loss, want.loss)
            same(got.numbers["alpha"], sgsd.pair_weights(run, kept))


def step_by_hand(run, x, step):
    """Lines 4, 6 and 7 for one problem: pairs, the teachers' prompts, the rollout."""
    pairs_K = run.bank.retrieve(x.problem, 3, run.embed)  # line 4
    student = rollout.chat_ids(run.tokenizer, skills.render_student(x.problem), thinking="closed")
    teachers_K = []
    for pair in pairs_K:  # line 6
        text = skills.render_teacher(pair, x.problem)
        teachers_K.append(rollout.chat_ids(run.tokenizer, text, thinking="bare"))
    key = rollout.sample_key(run.cfg.seed, step, x.id)
    sampling = Sampling(1.1, 0.95, 20, run.cfg.max_new_tokens)
    (ids_T,) = rollout.generate(run.lm, run.tokenizer, [student], sampling, [key])  # line 7
    r = 1 if int(x.answer) % 4 == 1 else -1  # as the tests' verifier says
    names = {"problem": x.problem, "prompt_ids": student, "completion_ids": ids_T, "r": r}
    return pairs_K, teachers_K, types.SimpleNamespace(**names)


def test_alg1_lines_2_to_16_a_step_is_what_its_lines_say(world_dir, tmp_path):
    """Two steps, and the weights after them. The rate falls linearly to 0 (S7).

    A rollout all of whose teachers are ignored has no gradient: by hand, too, it gets none.
    """
    with opened(world_dir, tmp_path / "a", grad_clip=0.02, eps_a=1.05) as run:
        steps = [sgsd.train_step(run, step) for step in (1, 2)]
    fates = [{*row["rho"]} for row in steps[0][0]]
    assert {0} in fates and {0, 1} in fates and {-1, 0} in fates
    with opened(world_dir, tmp_path / "b", eps_a=1.05) as hand:
        parameters = [*model.trained(hand.lm).values()]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0)
        data = {x.id: x for x in hand.problems}
        for step, (logged, norm) in enumerate(steps, 1):
            assert len(logged) == 4
            for row in logged:  # line 3
                pairs_K, teachers_K, roll = step_by_hand(hand, data[row["problem_id"]], step)
                assert sgsd.student_prompt(hand, roll.problem) == roll.prompt_ids
                prompts = sgsd.teacher_prompts(hand, pairs_K, roll.problem, roll)
                assert prompts == (pairs_K, teachers_K)
                pairs = [[p.skill["skill_id"], p.mistake["mistake_id"]] for p in pairs_K]
                assert row["pairs"] == pairs
                assert row["prompt_ids"] == roll.prompt_ids
                assert row["completion_ids"] == roll.completion_ids
                assert row["r"] == roll.r
                result = sgsd.rollout_loss(hand, roll, pairs_K)  # lines 5-6 and 8-14
                same(result.loss, row["loss"], 1e-5)
                if result.loss.requires_grad:
                    (result.loss / 4).backward()  # line 16: the mean over the minibatch
            norm_by_hand = torch.nn.utils.clip_grad_norm_(parameters, 0.02).item()
            assert norm == pytest.approx(norm_by_hand, rel=1e-4) and norm > 0.02
            optimizer.param_groups[0]["lr"] = 1e-2 * (5 - step) / 4
            optimizer.step()
            optimizer.zero_grad()
        for got, want in zip(model.trained(run.lm).values(), parameters):
            same(got, want, 1e-5)


def test_a_problem_that_comes_twice_in_a_step_has_two_solutions(world_dir, tmp_path):
    """Twelve problems in a batch of 24: the epoch is part of a draw's key."""
    with opened(world_dir, tmp_path / "run", batch_size=24, num_teachers=1) as run:
        logged, _ = sgsd.train_step(run, 1)
    solutions = {(row["problem_id"], *row["completion_ids"]) for row in logged}
    assert len(logged) == len(solutions) == 24


def test_a_loss_that_is_no_number_is_still_differentiated(world_dir, tmp_path):
    """NaN supports no teacher, so that all are ignored; but the step must be skipped."""
    with opened(world_dir, tmp_path / "run") as run:
        for p in model.trained(run.lm).values():
            p.data.fill_(torch.nan)
        _, norm = sgsd.train_step(run, 1)
    assert norm != norm


class Saved:
    """A tensor that a graph keeps for its backward pass; `alive` counts them."""

    alive = 0

    def __init__(self, x):
        self.x = x.detach()  # a tensor with a graph would keep itself alive
        Saved.alive += 1

    def __del__(self):
        Saved.alive -= 1


@pytest.mark.parametrize("method", ["sgsd", "ablations", "grpo", "opsd", "sdpo", "rlsd"])
def test_no_graph_lives_while_the_next_rollout_is_scored(method, world_dir, tmp_path):
    """Also where all teachers are ignored, so that no backward pass frees it."""
    program, kind = small_run.METHODS[method]
    changes = {"eps_a": 1e9} if method in ("sgsd", "ablations") else {"bank": ""}
    changes |= {"verifier": "small_run:UnevenVerifier", "max_new_tokens": 8}
    alive = []

    def count(*_):
        is_teacher = not (torch.is_grad_enabled() or torch.is_inference_mode_enabled())
        if is_teacher:  # they come first, where a method has some; sampling is in inference mode
            alive.append(Saved.alive)

    with small_run.opened(world_dir, tmp_path / "run", kind, **changes) as run:
        model.causal_lm(run.lm).base_model.register_forward_pre_hook(count)
        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.x):
            rows_of_step, _ = program.train_step(run, 1)
    assert len(rows_of_step) >= 4
    assert alive or method == "grpo"
    assert not any(alive) and Saved.alive == 0


def test_alg1_lines_1_2_and_17_the_bank_evolves_every_f_steps(world_dir, tmp_path):
    """And Alg. 4, lines 4 and 14: the window is of all steps since; latest bank and a snapshot."""
    run = train(world_dir, tmp_path / "run", steps=6, evolve_every=3, max_new_tokens=8)
    rolls, out = rows(run.out / "rollouts.jsonl"), run.out / "bank"
    epochs = {3: [], 6: []}  # twelve problems in batches of four
    for row in rolls:
        epochs[3 if row["step"] <= 3 else 6].append(row["problem"])
    assert sorted(epochs[3]) == sorted(epochs[6]) == sorted(x["problem"] for x in PROBLEMS)
    assert epochs[3] != epochs[6]
    for step, epoch in epochs.items():
        extractions = []
        for row in rows(out / "replies.jsonl"):
            if row["step"] == step and "to merge:" not in row["prompt"]:
                extractions.append(row["prompt"])
        assert len(extractions) == 12
        for problem in epoch:
            assert sum(problem in prompt for prompt in extractions) == 1
    versions = [f"step_{step:06d}.json" for step in (0, 3, 6)]
    assert sorted(path.name for path in out.glob("step_*")) == versions
    first, second, last = (skills.SkillBank.load(out / name) for name in versions)
    assert first == make_bank() and run.bank == last == skills.SkillBank.load(out / "bank.json")
    assert second.general_skills[:4] == first.general_skills != second.general_skills
    retrieved = set()
    for row in rolls[12:]:  # of the steps after the first evolution
        retrieved |= {mistake for _, mistake in row["pairs"]}
    assert retrieved <= {entry["mistake_id"] for entry in second.common_mistakes}
    assert any(name.startswith("dyn_") for name in retrieved)


# §4.1 and App. F.1
DEFAULTS = {"model": "Qwen/Qwen3-1.7B", "data": "BytedTsinghua-SIA/DAPO-Math-17k"}
DEFAULTS |= {"steps": 200, "checkpoint_every": 25, "lora_rank": 64, "lora_alpha": 128}
DEFAULTS |= {"learning_rate": 5e-6, "teacher_prefix": "bare"}  # so it decides, and thinks (S3)
# Tab. 11; no reference solution
DEFAULTS |= {"max_new_tokens": 1024, "max_prompt_tokens": 20000, "memory_answer": False}
DEFAULTS |= {"temperature": 1.1, "top_p": 0.95, "top_k": 20}
# Tab. 12 and App. D
DEFAULTS |= {"cold_start": 256, "encoder": "Qwen/Qwen3-Embedding-0.6B", "num_teachers": 8}
DEFAULTS |= {"tau_g": 1.0, "c_delta": 3.0, "eps_a": 0.05, "evolve_every": 25, "success_gate": 0.8}
DEFAULTS |= {"max_new_items": 5, "dynamic_capacity": 30}
DEFAULTS |= {"merge_group_size": 32, "merge_patience": 3}
# App. F.1
EVALUATION = {"data": ("aime24", "aime25", "hmmt25"), "samples": 12, "max_new_tokens": 38912}
EVALUATION |= {"temperature": 1.0, "top_p": 0.95, "top_k": 0}


def test_the_defaults_are_those_of_tabs_11_and_12_and_app_f():
    assert DEFAULTS.items() <= dataclasses.asdict(config.Config()).items()
    assert EVALUATION.items() <= dataclasses.asdict(config.EvalConfig()).items()
    assert Sampling() == Sampling(1.1, 0.95, 20, 1024)


@pytest.mark.parametrize("limit", [{"max_new_items": 3}, {"dynamic_capacity": 1}])
def test_the_settings_of_algorithms_3_and_4_reach_them_by_name(limit, world_dir, tmp_path):
    """A run's banks are those of the functions with its settings, which ask the same."""
    given = {"evolve_every": 1, "success_gate": 0.99, "memory_answer": True, **limit}
    merging, asked = {"group_size": 3, "patience": 2}, []

    def complete(prompts):
        asked.extend(prompts)
        return [small_run.reply_to(prompt) for prompt in prompts]

    changes = {"merge_group_size": 3, "merge_patience": 2, "bank": "", "cold_start": 12}
    run = train(world_dir, tmp_path / "run", steps=1, batch_size=12, **changes, **given)
    memories, window = rows(run.out / "bank/memories.jsonl"), rows(run.out / "rollouts.jsonl")
    order = run.bank.metadata["seed_problems"]
    memories.sort(key=lambda memory: order.index(memory["problem_id"]))
    first = skills.cold_start(memories, complete, **merging)
    second = skills.evolve(first, window, 1, complete, **given, **merging)
    assert second.general_skills == run.bank.general_skills
    assert second.common_mistakes == run.bank.common_mistakes
    assert asked == [row["prompt"] for row in rows(run.out / "bank/replies.jsonl")]
