"""One update against plain loops; the same seed, the same bits; a run's resume, files and bank."""

import dataclasses
import itertools
import json
import math
import shutil

import driver
import peft
import pytest
import torch
from conftest import make_bank, make_tokenizer
from driver import make_run, rows, stopping_at, timeless, train
from safetensors.torch import load_file
from tokenizers import AddedToken
from transformers import GenerationConfig

import config
import policy
import rollout
import runlog
import sgsd
import skills
from distributed import UserError
from problems import Problem


def test_the_gradient_of_an_update_equals_plain_loops(world_dir, tmp_path):
    """One row at a time, full logits, the paper's formulas written out: as nothing here does it."""
    run = make_run(world_dir, tmp_path / "run", learning_rate=1.0, grad_clip=1e9)
    params = policy.trained(run.model)
    for name, p in params.items():  # with B = 0, as at the start, A has no gradient
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        torch.nn.init.normal_(p, std=0.1, generator=generator)
    before = {name: p.detach().clone() for name, p in params.items()}
    run.optimizer = torch.optim.SGD(params.values(), lr=1.0)  # a step is the gradient itself
    records, _, _ = sgsd.train_step(run, 1)
    got = {name: before[name] - p.detach() for name, p in params.items()}
    for name, p in params.items():
        p.data = before[name]

    def logps(text, thinking, completion):
        prompt = policy.chat_ids(run.tokenizer, text, thinking=thinking)
        logits = run.model(input_ids=torch.tensor([prompt + completion])).logits[0]
        chosen = torch.tensor(completion)[:, None]
        return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, chosen)[:, 0]

    total = 0.0
    for (x, _), row in zip(sgsd.minibatch(run.problems, run.cfg, 1), records):
        assert row["problem_id"] == x.id
        assert row["r"] == (1 if int(x.answer) % 4 == 1 else -1)
        y = row["completion_ids"]
        m = torch.tensor([float(i not in run.masked_ids) for i in y])
        pairs = run.bank.retrieve(x.problem, 3, run.embed)
        weights = [math.exp((pair.s_g + pair.s_e) / 2) for pair in pairs]
        student = logps(skills.render_student(x.problem), False, y)
        for k, pair in enumerate(pairs):
            teacher = logps(skills.render_teacher(pair, x.problem), True, y).detach()
            gap = teacher - student
            a = float((m * gap.detach().clamp(-3, 3)).sum() / m.sum())
            rho = 0 if abs(a) <= 0.2 else row["r"] * math.copysign(1, a)
            assert rho == row["rho"][k]
            assert a == pytest.approx(row["a"][k], abs=1e-4)
            gate = math.log(2) - torch.log(1 + torch.exp(-(gap**2) / 2))
            total = total + weights[k] / sum(weights) * rho * (m * gate).sum() / m.sum() / 4
    total.backward()
    assert {row["r"] for row in records} == {-1, 1}
    assert {rho for row in records for rho in row["rho"]} >= {-1, 1}
    mean = sum(row["loss"] for row in records) / 4
    assert float(total.detach()) == pytest.approx(mean, abs=1e-5)
    for name, p in params.items():
        torch.testing.assert_close(got[name], p.grad, atol=2e-5, rtol=1e-3)


def test_the_same_seed_gives_the_same_bits_and_another_does_not(world_dir, tmp_path):
    made = []
    for i, seed in enumerate((0, 0, 1)):
        out = tmp_path / str(i)
        train(world_dir, out, seed=seed, updates=2)
        adapter = (out / "checkpoints/step_000002/adapter_model.safetensors").read_bytes()
        made.append((adapter, (out / "rollouts.jsonl").read_text()))
    assert made[0] == made[1]
    assert made[0][0] != made[2][0] and made[0][1] != made[2][1]


BANK = {"bank": "", "cold_start": 8, "update_every": 2, "max_new_items": 2}


@pytest.fixture(scope="module")
def whole(world_dir, tmp_path_factory):
    """A run of four updates that makes its own bank."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return train(world_dir, out, **BANK)


def test_stopped_and_resumed_equals_uninterrupted(whole, world_dir, tmp_path):
    """D9: it stops in the middle of a window of the bank's updates."""
    out = tmp_path / "run"
    train(world_dir, out, step_fn=stopping_at(3), **BANK)
    assert [m["step"] for m in rows(out / "metrics.jsonl")] == [1, 2, 3]
    with open(out / "metrics.jsonl", "a") as f:  # what a kill in the fourth update may leave
        f.write('{"step": 4, "loss": 9}\n{"step": 5, "lo')
    run = make_run(world_dir, out, resume=True, **BANK)
    saved = load_file(out / "checkpoints/step_000003/trainer.safetensors")
    assert run.step == 3
    for name, p in policy.trained(run.model).items():
        assert torch.equal(run.optimizer.state[p]["exp_avg"], saved[f"{name}.exp_avg"])
    sgsd.train(run)
    last = "checkpoints/step_000004"
    names = ["rollouts.jsonl", "tokens.jsonl", "bank/memories.jsonl", "bank/replies.jsonl"]
    names += [f"bank/step_00000{i}.json" for i in (0, 2, 4)]
    names += [f"{last}/adapter_model.safetensors", f"{last}/trainer.safetensors"]
    for name in names:
        assert (whole.out / name).read_bytes() == (out / name).read_bytes(), name
    metrics = [timeless(rows(path / "metrics.jsonl")) for path in (whole.out, out)]
    assert metrics[0] == metrics[1]


def test_what_a_run_leaves_on_disk(whole, world_dir):
    out = whole.out
    saved = json.loads((out / "config.json").read_text())
    assert saved["settings"]["num_teachers"] == 3 and saved["versions"]["torch"]
    metrics, rolls, tokens = (rows(out / f"{name}.jsonl") for name in runlog.LOGS)
    assert [m["step"] for m in metrics] == [1, 2, 3, 4]
    assert [m["learning_rate"] for m in metrics] == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])
    assert len(rolls) == 16 and [r["index"] for r in rolls[:4]] == [0, 1, 2, 3]
    assert {t["step"] for t in tokens} == {2, 4}
    for m in metrics:
        mine = [r for r in rolls if r["step"] == m["step"]]
        assert m["loss"] == pytest.approx(sum(r["loss"] for r in mine) / 4)
        assert m["success"] == sum(r["r"] == 1 for r in mine) / 4
        teachers = m["rho_distilled"] + m["rho_reversed"] + m["rho_ignored"]
        assert teachers == sum(len(r["rho"]) for r in mine) > 0
        assert m["rho_distilled"] == m["rho_distilled_success"] + m["rho_distilled_failure"]
    by_name = {(r["step"], r["problem_id"]): r for r in rolls}
    for t in tokens:  # the credit is Eq. 20 of the logged gaps
        r = by_name[t["step"], t["problem_id"]]
        delta, mask, alpha = (torch.tensor(x) for x in (t["delta"], t["mask"], r["alpha"]))
        credit = sgsd.token_credit(delta, mask, alpha, torch.tensor(r["rho"]).float(), 1.0)
        torch.testing.assert_close(torch.tensor(t["credit"]), credit)
        assert whole.tokenizer.decode(r["completion_ids"], skip_special_tokens=True) == r["text"]
    base, _ = policy.load_model(str(world_dir / "model"), torch.device("cpu"))
    again = peft.PeftModel.from_pretrained(base, out / "checkpoints/step_000004")
    logits = [model(input_ids=torch.tensor([[1, 2, 3]])).logits for model in (again, whole.model)]
    torch.testing.assert_close(*logits)
    assert not {path.suffix for path in out.rglob("*")} & {".tmp", ".pt", ".bin"}


def dynamic(bank):
    entries = bank.general_skills + bank.common_mistakes
    return [e for e in entries if e.get("skill_id", e.get("mistake_id")).startswith("dyn_")]


def test_a_run_makes_its_bank_and_evolves_it(whole):
    """Without --bank: cold start (Alg. 2), and every second update evolution (Alg. 4)."""
    versions = runlog.bank_versions(whole.out)
    assert list(versions) == [0, 2, 4]
    banks = [skills.SkillBank.load(path) for path in versions.values()]
    memories = rows(whole.out / "bank/memories.jsonl")
    assert len(memories) == 8
    assert {m["problem_id"] for m in memories} == set(banks[0].metadata["seed_problems"])
    assert not any("reference_answer" in m for m in memories)  # D3
    for old, new in itertools.pairwise(banks):
        for key in skills.FIELDS:
            static = [e for e in old.collection(key) if e not in dynamic(old)]
            assert static == [e for e in new.collection(key) if e not in dynamic(new)]
        assert 0 < len(dynamic(new)) <= len(dynamic(old)) + 2
    assert whole.bank == banks[2] == skills.SkillBank.load(whole.out / "bank/bank.json")
    metrics = rows(whole.out / "metrics.jsonl")
    assert metrics[0]["replies_read"] == 0 < metrics[1]["replies_read"]
    assert metrics[3]["bank_skills"] == len(whole.bank.general_skills)
    assert {row["outcome"] for row in rows(whole.out / "bank/replies.jsonl")} == {"read"}


def test_only_the_adapters_train_and_in_fp32(world_dir, tmp_path):
    run = make_run(world_dir, tmp_path / "run", dtype="bfloat16", updates=2)
    params = policy.trained(run.model)
    assert {p.dtype for p in params.values()} == {torch.float32}
    assert len(params) == 2 * 7 * 2  # A and B, seven projections, two layers
    assert all("lora_" in name for name in params)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    sgsd.train(run)
    for name, p in run.model.named_parameters():
        assert torch.equal(p, before[name]) != (name in params), name


def test_three_updates_in_a_row_that_are_not_finite_end_the_run(world_dir, tmp_path, capsys):
    run, metrics = make_run(world_dir, tmp_path / "run"), tmp_path / "run/metrics.jsonl"
    before = [p.detach().clone() for p in policy.trained(run.model).values()]
    assert sgsd.train(run, driver.breaking({1, 2, 3})) == 1
    assert [m["skipped"] for m in rows(metrics)] == [1, 1, 1]
    assert all(torch.equal(a, b) for a, b in zip(before, policy.trained(run.model).values()))
    assert "three updates in a row were not finite; continue with" in capsys.readouterr().out
    again = make_run(world_dir, tmp_path / "run", resume=True)
    assert sgsd.train(again) == 0 and len(rows(metrics)) == 4


def test_no_teachers_no_loss(world_dir, tmp_path):
    run = make_run(world_dir, tmp_path / "run")
    run.bank = skills.SkillBank(make_bank().general_skills, [])  # S8
    records, norm, seconds = sgsd.train_step(run, 1)
    assert all(row["rho"] == [] and row["loss"] == 0 for row in records) and norm == 0
    metrics = runlog.summarize(1, records, norm, 0.0, seconds, 0.0)
    assert metrics["no_teachers"] == 4
    assert "rho +0/-0/0:0" in runlog.log_line(metrics, 4)


def test_minibatches_cover_each_epoch_once():
    problems = [Problem(str(i), "x", "1") for i in range(10)]
    cfg, seen = config.Config(batch_size=4), []
    for step in range(1, 6):
        seen += [x.id for x, _ in sgsd.minibatch(problems, cfg, step)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == sorted(map(str, range(10)))
    assert seen[:10] != seen[10:]
    twice = sgsd.minibatch(problems[:2], cfg, 1)  # a problem that comes twice is sampled twice
    assert len({key for _, key in twice}) == 4


def test_the_prefixes_of_the_roles(world_dir, tmp_path):
    """S3: the student's think block is closed, a teacher's left to the model, open or closed."""
    closed = "<think>\n\n</think>\n\n"
    for prefix, ending in (("bare", ""), ("open", "<think>\n"), ("closed", closed)):
        run = make_run(world_dir, tmp_path / prefix, teacher_prefix=prefix)
        x = run.problems[0]
        (ids,) = sgsd.teacher_prompts(run, x, run.bank.retrieve(x.problem, 1, run.embed))
        assert run.tokenizer.decode(ids).rpartition("assistant\n")[2] == ending
        student = run.tokenizer.decode(sgsd.prompt_ids(run, "x", "student"))
        assert student.rpartition("assistant\n")[2] == closed


def test_which_ids_are_masked(tokenizer):
    ids = policy.masked_token_ids(tokenizer)
    special = "<|endoftext|> <|im_start|> <|im_end|> <think> </think>".split()
    assert {tokenizer.decode([i]) for i in ids} == {"\n", "\n\n", "\n\n\n\n", *special}
    markdown, digit = tokenizer.encode("#")[0], tokenizer.encode("5")[0]
    extra = policy.masked_token_ids(tokenizer, extra=True) - ids
    assert {markdown, *(tokenizer.encode(blank)[0] for blank in (" ", "\r"))} <= extra
    assert digit not in extra
    assert sgsd.token_mask([min(ids), digit], ids).tolist() == [0, 1]


def test_a_special_token_without_a_role_and_every_stop_id_are_masked(world_dir, tmp_path):
    """S2: Gemma's <end_of_turn> is special, and only its generation_config names it as a stop."""
    shutil.copytree(world_dir / "model", tmp_path / "model")
    own = make_tokenizer()
    own.add_tokens([AddedToken("<end_of_turn>", special=True)])
    own.save_pretrained(tmp_path / "model")
    settings = GenerationConfig.from_pretrained(tmp_path / "model")
    settings.eos_token_id = [265, 5]
    settings.save_pretrained(tmp_path / "model")
    run = make_run(world_dir, tmp_path / "run", model=str(tmp_path / "model"))
    turn = run.tokenizer.convert_tokens_to_ids("<end_of_turn>")
    assert turn not in run.tokenizer.all_special_ids
    assert {turn, 5} <= run.masked_ids


class CountingVerifier(driver.CoinVerifier):
    seen = 0

    def verify_many(self, pairs):
        self.seen += len(pairs)
        return super().verify_many(pairs)


def test_no_memory_is_made_twice_after_a_kill(world_dir, tmp_path):
    changes = {"bank": "", "cold_start": 6, "max_new_tokens": 9}
    run, verifier = make_run(world_dir, tmp_path / "run", **changes), CountingVerifier()

    def make(folder):
        writer = dataclasses.replace(run.writer, rows=2, folder=folder)
        solver = (run.model, run.tokenizer, verifier)
        return skills.make_bank(run.problems, *solver, writer, run.cfg)

    whole = make(tmp_path / "a")
    assert verifier.seen == 6
    lines = (tmp_path / "a/memories.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/memories.jsonl").write_text("".join(lines[:3]) + lines[3][:50])  # torn
    assert make(tmp_path / "b") == whole
    assert verifier.seen == 6 + 3
    assert (tmp_path / "b/memories.jsonl").read_text() == "".join(lines)


def test_seed_problems_are_solved_under_settings_of_their_own(world_dir, tmp_path):
    """S21: the authors' by default; here greedy and short, whatever the student's sampling is."""
    settings = dataclasses.asdict(config.Config())
    own = [settings[f"cold_start_{name}"] for name in ("temperature", "top_p", "top_k", "tokens")]
    assert own == [1.0, 0.95, 0, 38912] and settings["cold_start_thinking"]
    greedy = {"bank": "", "cold_start": 12, "cold_start_temperature": 0.0, "cold_start_tokens": 5}
    made = []
    for seed in (0, 1):
        run = make_run(world_dir, tmp_path / str(seed), seed=seed, **greedy)
        solver = (run.model, run.tokenizer, run.verifier)
        bank = skills.make_bank(run.problems, *solver, run.writer, run.cfg)
        memories = rows(tmp_path / str(seed) / "bank/memories.jsonl")
        made.append({memory["problem_id"]: memory["completion"] for memory in memories})
        right = sum(memory["reward"] == 1 for memory in memories)
        assert bank.metadata["seed_solutions"] == 12
        assert bank.metadata["right_seed_solutions"] == right == 6
    assert made[0] == made[1]
    assert all(len(text) <= 30 for text in made[0].values())  # no token has more than 6 characters


def test_memories_of_other_settings_are_not_mixed_in(world_dir, tmp_path):
    changes = {"bank": "", "cold_start": 6}
    for tokens, lines in ((9, 6), (9, 6), (5, 12)):
        run = make_run(world_dir, tmp_path / "run", True, cold_start_tokens=tokens, **changes)
        skills.make_bank(run.problems, run.model, run.tokenizer, run.verifier, run.writer, run.cfg)
        memories = rows(tmp_path / "run/bank/memories.jsonl")
        assert [m["made_with"]["max_new_tokens"] for m in memories[-6:]] == [tokens] * 6
        assert len(memories) == lines


def test_a_run_without_its_checkpoints_is_not_begun_anew(world_dir, tmp_path):
    train(world_dir, tmp_path / "run", updates=6)
    before = (tmp_path / "run/metrics.jsonl").read_text()
    shutil.rmtree(tmp_path / "run/checkpoints")
    with pytest.raises(UserError, match="reaches update 6, but the last checkpoint is of update 0"):
        train(world_dir, tmp_path / "run", resume=True, updates=6)
    assert (tmp_path / "run/metrics.jsonl").read_text() == before


def test_updates_that_a_longer_interval_has_lost_are_made_again(world_dir, tmp_path):
    train(world_dir, tmp_path / "run", updates=4, checkpoint_every=4)
    shutil.rmtree(tmp_path / "run/checkpoints")
    train(world_dir, tmp_path / "run", resume=True, updates=4, checkpoint_every=1)
    assert len(rows(tmp_path / "run/metrics.jsonl")) == 4


def test_a_signal_is_acknowledged_at_once(world_dir, tmp_path, capfd):
    run = make_run(world_dir, tmp_path / "run")
    run.step = 9
    run.ask_to_stop()
    assert run.stop and "finishing update 10, then stopping" in capfd.readouterr().err


def test_an_online_update_says_what_it_did_or_why_it_did_nothing(world_dir, tmp_path, capsys):
    """Three of eight are right: below the first gate, and not below the second."""
    changes = {"updates": 2, "update_every": 2, "batch_size": 4}
    train(world_dir, tmp_path / "a", **changes)
    said = capsys.readouterr().out
    assert "bank: 4 skills and 4 mistakes\n" in said
    copies = "0 copies of static entries dropped"
    line = f"bank: success 0.38; 3 candidate skills, 2 after merging, {copies}, net new 1"
    line += f"; 5 candidate mistakes, 4 after merging, {copies}, net new 3; 0 replies lost\n"
    assert line in said
    train(world_dir, tmp_path / "b", success_gate=0.375, **changes)
    assert "success 0.38 is not below the gate: kept as it is" in capsys.readouterr().out
    for m in rows(tmp_path / "b/metrics.jsonl"):
        assert m["seconds"]["bank"] >= 0


def test_a_users_mistake_in_an_update_is_one_clear_error(world_dir, tmp_path):
    run = make_run(world_dir, tmp_path / "run")
    run.cfg = dataclasses.replace(run.cfg, max_prompt_tokens=150)  # too few for a teacher
    with pytest.raises(UserError, match=r"teacher of p\d+: the prompt has .*in update 1; --resume"):
        sgsd.train(run)


def test_a_completion_without_a_reasoning_token_teaches_nothing(world_dir, tmp_path):
    """It is the stop id alone, or nothing but newlines: r = -1, rho = 0, and a gradient of 0."""
    run = make_run(world_dir, tmp_path / "run", max_new_tokens=3)
    run.verifier = rollout.Verifier()
    causal = policy.causal_lm(run.model)
    causal.get_input_embeddings().weight.data[:, 0] = 100.0  # every hidden state is about (1, 0..)
    for always, completion in ((265, [265]), (256, [256] * 3)):
        head = causal.get_output_embeddings().weight.data
        head[:, 0] = 0.0
        head[always, 0] = 100.0  # so this id is always the likeliest by far
        records, norm, seconds = sgsd.train_step(run, 1)
        assert [row["completion_ids"] for row in records] == [completion] * 4
        for row in records:
            assert (row["r"], row["pred"], row["rho"], row["loss"]) == (-1, None, [0] * 3, 0)
            assert row["unmasked"] == 0 and all(map(math.isfinite, row["a"] + row["losses"]))
        metrics = runlog.summarize(1, records, norm, 0.0, seconds, 0.0)
        assert norm == 0 and "nan" not in f"{runlog.log_line(metrics, 1)} {metrics}"
    run.verifier.close()


def test_a_batch_in_which_every_teacher_is_unsure_changes_nothing(world_dir, tmp_path):
    run = train(world_dir, tmp_path / "run", eps_a=1e9, updates=2)
    for m in rows(tmp_path / "run/metrics.jsonl"):
        assert (m["rho_ignored"], m["loss"], m["grad_norm"], m["skipped"]) == (12, 0, 0, 0)
    params = policy.trained(run.model)
    assert not any(p.any() for name, p in params.items() if "lora_B" in name)


def test_a_bank_that_stays_empty_is_said_and_counted(world_dir, tmp_path, capsys):
    """A random model's own replies cannot be read: no teachers, no loss, and the run ends well."""
    settings = {**BANK, "cold_start": 4, "max_new_tokens": 8, "updates": 2}
    run = make_run(world_dir, tmp_path / "run", **settings)
    cfg = dataclasses.replace(run.cfg, reply_tokens=8)
    run.writer = rollout.writer(cfg, run.world, run.model, run.tokenizer, run.out / "bank")
    assert sgsd.train(run) == 0
    assert "there is no teacher, and nothing is learnt (S8)" in capsys.readouterr().out
    metrics = rows(tmp_path / "run/metrics.jsonl")
    assert metrics[1]["replies_lost"] > 0
    for m in metrics:
        assert (m["no_teachers"], m["bank_skills"], m["loss"], m["grad_norm"]) == (4, 0, 0, 0)
