"""A run: its files, prompts and bank, and what ends a step or leaves it empty."""

import dataclasses
import itertools
import json
import math
import shutil
import types

import driver
import pytest
import torch
from conftest import make_tokenizer
from driver import ALONE, make_run, rows, settings, train
from tokenizers import AddedToken
from transformers import GenerationConfig

import baselines
import config
import policy
import rollout
import runlog
import sgsd
import skills
from bank import bank_versions
from cli import UserError
from distributed import World

BANK = {"bank": "", "cold_start": 8, "update_every": 2, "max_new_items": 2}


@pytest.fixture(scope="module")
def whole(world_dir, tmp_path_factory):
    """A run of four steps that makes its own bank."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return train(world_dir, out, **BANK)


def test_what_a_run_leaves_on_disk(whole):
    out = whole.out
    saved = json.loads((out / "config.json").read_text())
    assert saved["settings"]["num_teachers"] == 3 and saved["versions"]["torch"]
    metrics, rolls, tokens = (rows(out / f"{name}.jsonl") for name in runlog.LOGS)
    assert [m["step"] for m in metrics] == [1, 2, 3, 4]
    assert [m["learning_rate"] for m in metrics] == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])
    assert len(rolls) == 16 and [r["index"] for r in rolls[:4]] == [0, 1, 2, 3]
    assert {t["step"] for t in tokens} == {2, 4}
    by_name = {(r["step"], r["problem_id"]): r for r in rolls}
    for t in tokens:  # the credit is Eq. 20 of the logged gaps
        r = by_name[t["step"], t["problem_id"]]
        delta, mask, alpha = (torch.tensor(x) for x in (t["delta"], t["mask"], r["alpha"]))
        credit = sgsd.token_credit(delta, mask, alpha, torch.tensor(r["rho"]).float(), 1.0)
        torch.testing.assert_close(torch.tensor(t["credit"]), credit)
        assert whole.tokenizer.decode(r["completion_ids"], skip_special_tokens=True) == r["text"]
    assert not {path.suffix for path in out.rglob("*")} & {".tmp", ".pt", ".bin"}


@pytest.mark.parametrize("error", [ConnectionError, UserError])
def test_no_step_is_lost_where_the_banks_writer_fails(
    error, whole, world_dir, tmp_path, monkeypatch
):
    """As where its server is gone after step 2: what was trained is saved, and a resume evolves."""
    out = tmp_path / "run"

    def fail(*_, **__):
        raise error("no server answers")

    with monkeypatch.context() as patch:
        patch.setattr(skills, "evolve", fail)
        with pytest.raises(error, match="no server answers") as raised:
            train(world_dir, out, **BANK)
    advice = [str(raised.value), *getattr(raised.value, "__notes__", [])]
    assert any(f"--resume {out} continues it" in line for line in advice)
    assert (out / "checkpoints/step_000002").exists()
    assert [m["step"] for m in rows(out / "metrics.jsonl")] == [1, 2]
    train(world_dir, out, resume=True, **BANK)
    assert [m["step"] for m in rows(out / "metrics.jsonl")] == [1, 2, 3, 4]
    for name in ("rollouts.jsonl", "bank/bank.json"):
        assert (out / name).read_bytes() == (whole.out / name).read_bytes()


def dynamic(bank):
    entries = bank.general_skills + bank.common_mistakes
    return [e for e in entries if e.get("skill_id", e.get("mistake_id")).startswith("dyn_")]


def test_a_run_makes_its_bank_and_evolves_it(whole):
    """Without --bank: cold start (Alg. 2), and every second step evolution (Alg. 4)."""
    versions = bank_versions(whole.out)
    assert list(versions) == [0, 2, 4]
    banks = [skills.SkillBank.load(path) for path in versions.values()]
    memories = rows(whole.out / "bank/memories.jsonl")
    assert len(memories) == 8
    assert {m["problem_id"] for m in memories} == set(banks[0].metadata["seed_problems"])
    assert not any("reference_answer" in m for m in memories)  # D3
    for old, new in itertools.pairwise(banks):
        assert 0 < len(dynamic(new)) <= len(dynamic(old)) + 2
    assert whole.bank == banks[2] == skills.SkillBank.load(whole.out / "bank/bank.json")
    metrics = rows(whole.out / "metrics.jsonl")
    assert metrics[0]["replies_read"] == 0 < metrics[1]["replies_read"]
    assert metrics[3]["bank_skills"] == len(whole.bank.general_skills)
    assert {row["outcome"] for row in rows(whole.out / "bank/replies.jsonl")} == {"read"}


def test_the_adapters_train_and_nothing_else(world_dir, tmp_path):
    run = make_run(world_dir, tmp_path / "run", dtype="bfloat16", updates=2)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    sgsd.train(run)
    for name, p in run.model.named_parameters():
        assert torch.equal(p, before[name]) != ("lora_" in name), name


def test_another_reward_moves_training_alone(world_dir, tmp_path, monkeypatch):
    """The verdict stays what it is in the records, in a memory and for the bank's success gate."""
    plain, _, _ = sgsd.train_step(make_run(world_dir, tmp_path / "a"), 1)
    monkeypatch.setattr(sgsd, "reward", lambda roll: -roll.r)
    other, _, _ = sgsd.train_step(make_run(world_dir, tmp_path / "b"), 1)
    assert any(rho for row in plain for rho in row["rho"])
    for was, now in zip(plain, other):
        assert now["rho"] == [-rho for rho in was["rho"]]
        assert (now["r"], now["reward"]) == (was["r"], -was["r"])
        verdict = "accepted" if was["r"] == 1 else "rejected"
        memory = skills.memory_of(types.SimpleNamespace(**now | {"pred": "5"}))
        assert memory["feedback"] == f"The verifier {verdict} the final answer."
    same = runlog.summarize(1, plain, 0.0, 0.0, {}, 0.0)["success"]
    assert runlog.summarize(1, other, 0.0, 0.0, {}, 0.0)["success"] == same


def test_a_retriever_of_ones_own_needs_no_encoder(world_dir, tmp_path):
    def first(bank, x, k, step):
        return [skills.SkillPair(bank.general_skills[0], bank.common_mistakes[0], 0.5, 0.5)]

    cfg = config.Config(**settings(world_dir, tmp_path / "run", encoder="/no/such"))
    run = driver.with_fakes(sgsd.prepare(cfg, ALONE, False, first))
    records, _, _ = sgsd.train_step(run, 1)
    assert {tuple(map(tuple, row["pairs"])) for row in records} == {(("gen_001", "err_001"),)}
    assert [row["alpha"] for row in records] == [[1.0]] * 4


def test_the_prefixes_of_the_roles(world_dir, tmp_path):
    """S3: the student's think block is closed, a teacher's left to the model, open or closed."""
    closed = "<think>\n\n</think>\n\n"
    for prefix, ending in (("bare", ""), ("open", "<think>\n"), ("closed", closed)):
        run = make_run(world_dir, tmp_path / prefix, teacher_prefix=prefix)
        x = run.problems[0]
        (ids,) = sgsd.teacher_prompts(run, x, run.retrieve(x, 1)[:1])
        assert run.tokenizer.decode(ids).rpartition("assistant\n")[2] == ending
        student = run.tokenizer.decode(sgsd.prompt_ids(run, "x", "student"))
        assert student.rpartition("assistant\n")[2] == closed


@pytest.mark.parametrize("end", ["<think>\\n", "<think>"])
def test_a_template_may_open_the_think_block_itself_and_may_know_no_other_way(
    end, world_dir, tmp_path, capsys
):
    shutil.copytree(world_dir / "model", tmp_path / "model")
    template = r"{{ messages[0].content + '\nassistant\n" + end + "' }}"
    (tmp_path / "model/chat_template.jinja").write_text(template)
    run = make_run(world_dir, tmp_path / "run", model=tmp_path / "model", teacher_prefix="open")
    x = run.problems[0]
    (ids,) = sgsd.teacher_prompts(run, x, run.retrieve(x, 1)[:1])
    assert run.tokenizer.decode(ids).rpartition("assistant\n")[2].rstrip() == "<think>"
    assert "thinking: no switch in the chat template" in capsys.readouterr().out
    other = dataclasses.replace(run.cfg, attn="eager", dtype="bfloat16")
    assert "--dtype bfloat16 --attn eager" in runlog.what_next(other)


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


def test_a_run_without_its_checkpoints_is_not_begun_anew(world_dir, tmp_path):
    train(world_dir, tmp_path / "run", updates=6)
    before = (tmp_path / "run/metrics.jsonl").read_text()
    shutil.rmtree(tmp_path / "run/checkpoints")
    with pytest.raises(UserError, match="reaches step 6, but the last checkpoint is of step 0"):
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
    said = "finishing step 10, then stopping; once more stops at once"
    assert run.stop and said in capfd.readouterr().err


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
    changes["bank"] = f"{tmp_path}/a/bank/bank.json"  # whose own last step was of this step, too
    train(world_dir, tmp_path / "b", success_gate=0.375, **changes)
    assert "success 0.38 is not below the gate: kept as it is" in capsys.readouterr().out
    for m in rows(tmp_path / "b/metrics.jsonl"):
        assert m["seconds.bank"] >= 0


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


def run_without_pairs(world_dir, out, **changes):
    """A run whose own model writes the replies, of 8 tokens each."""
    settings = {**BANK, "cold_start": 4, "max_new_tokens": 8, "updates": 2, **changes}
    run = make_run(world_dir, out, **settings)
    cfg = dataclasses.replace(run.cfg, reply_tokens=8)
    run.writer = skills.writer_of(cfg, run.world, run.model, run.tokenizer, run.out / "bank")
    return run


def test_a_run_whose_bank_has_no_pair_ends_before_its_first_update_and_says_why(
    world_dir, tmp_path
):
    run = run_without_pairs(world_dir, tmp_path / "run")
    with pytest.raises(UserError) as refusal:
        sgsd.train(run)
    said = str(refusal.value)
    assert "bank: 0 skills and 0 mistakes; without a pair there is no teacher" in said
    assert "4 of 4 seed solutions were cut off at --cold-start-tokens 20: raise it" in said
    assert "4 replies were lost (cut off): raise --reply-tokens" in said
    assert f"then --resume {run.out} uses the solutions again; with --allow-empty-bank it" in said
    assert not (run.out / "metrics.jsonl").exists() and not bank_versions(run.out)
    (reply, *_) = rows(run.out / "bank/replies.jsonl")
    assert (reply["outcome"], reply["cause"]) == ("retried", "cut off")


def test_a_bank_that_stays_empty_is_said_and_counted(world_dir, tmp_path, capsys):
    """A random model's own replies cannot be read: no teachers, no loss, and the run ends well."""
    run = run_without_pairs(world_dir, tmp_path / "run", allow_empty_bank=True)
    assert sgsd.train(run) == 0
    said = capsys.readouterr().out
    assert "there is no teacher, and nothing is learnt (S8)" in said
    assert "4 replies lost (4 cut off)" in said and "| 100% cut at --max-new-tokens" in said
    metrics = rows(tmp_path / "run/metrics.jsonl")
    assert metrics[1]["replies_lost"] > 0
    for m in metrics:
        assert (m["no_teachers"], m["bank_skills"], m["skipped"]) == (4, 0, 0)
        assert m["loss"] == m["grad_norm"] == 0
    params = policy.trained(run.model).items()
    assert not any(p.any() for name, p in params if "lora_B" in name)


def test_a_bank_evolves_under_a_retrieval_that_has_no_encoder(world_dir, tmp_path):
    changes = {"updates": 2, "update_every": 2, "retrieval": "random", "encoder": "/no/such"}
    run = make_run(world_dir, tmp_path / "run", kind=baselines.BaselineConfig, **changes)
    assert sgsd.train(run, baselines.method_step) == 0
    assert list(bank_versions(run.out)) == [0, 2] and dynamic(run.bank)


def test_every_rank_needs_a_problem(world_dir, tmp_path):
    cfg = make_run(world_dir, tmp_path / "run").cfg
    with pytest.raises(UserError, match="--batch-size 4: must be >= 8, as every process needs"):
        sgsd.prepare(cfg, World(0, 8, torch.device("cpu")), False)
