"""A run: its files, masks, prompts and bank, and what ends an update or leaves it empty."""

import dataclasses
import itertools
import json
import math
import re
import shutil
import types

import conftest
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
import problems
import rollout
import runlog
import sgsd
import skills
from bank import bank_versions
from cli import UserError
from problems import Problem

BANK = {"bank": "", "cold_start": 8, "update_every": 2, "max_new_items": 2}


@pytest.fixture(scope="module")
def whole(world_dir, tmp_path_factory):
    """A run of four updates that makes its own bank."""
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


def dynamic(bank):
    entries = bank.general_skills + bank.common_mistakes
    return [e for e in entries if e.get("skill_id", e.get("mistake_id")).startswith("dyn_")]


def test_a_run_makes_its_bank_and_evolves_it(whole):
    """Without --bank: cold start (Alg. 2), and every second update evolution (Alg. 4)."""
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


def test_minibatches_cover_each_epoch_once():
    data = [Problem(str(i), "x", "1") for i in range(10)]
    cfg, seen = config.Config(batch_size=4), []
    for step in range(1, 6):
        seen += [x.id for x, _ in problems.minibatch(data, cfg, step)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == sorted(map(str, range(10)))
    assert seen[:10] != seen[10:]
    twice = problems.minibatch(data[:2], cfg, 1)  # a problem that comes twice is sampled twice
    assert len(set(twice)) == 4
    assert problems.minibatch(data, config.Config(batch_size=4, seed=1), 1) != twice


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


def test_which_ids_are_masked(tokenizer):
    ids = policy.masked_token_ids(tokenizer)
    special = "<|endoftext|> <|im_start|> <|im_end|> <think> </think>".split()
    assert {tokenizer.decode([i]) for i in ids} == {"\n", "\n\n", "\n\n\n\n", *special}
    markdown, digit = tokenizer.encode("#")[0], tokenizer.encode("5")[0]
    extra = policy.masked_token_ids(tokenizer, extra=True) - ids
    assert {markdown, *(tokenizer.encode(blank)[0] for blank in (" ", "\r"))} <= extra
    assert digit not in extra
    assert sgsd.token_mask([min(ids), digit], ids).tolist() == [0, 1]


def test_newlines_are_masked_where_the_tokenizer_puts_a_blank_first():
    """As SentencePiece's do: a text of newlines alone has one more id than newlines in a text."""
    from tokenizers import normalizers

    own = make_tokenizer()
    own.backend_tokenizer.normalizer = normalizers.Prepend("_")
    assert len(own.encode("\n")) == 2
    newline = own.encode("a\n")[-1]
    assert newline in policy.masked_token_ids(own) and own.decode([newline]) == "\n"


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
    said = "finishing update 10, then stopping; once more stops at once"
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
    changes["bank"] = f"{tmp_path}/a/bank/bank.json"  # whose own last update was of this step, too
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


REASONS = [  # right and cut off of eight seed solutions, lost replies, and what is said
    (0, 1, {}, "none of 8 seed solutions was right, so there are no skills"),
    (8, 0, {}, "all 8 seed solutions were right, so there are no mistakes"),
    (0, 5, {}, "5 of 8 seed solutions were cut off at --cold-start-tokens 38912: raise it"),
    (4, 0, {"no JSON": 3}, "3 replies were lost (no JSON): let another model write"),
]


@pytest.mark.parametrize("right,cut,lost,words", REASONS)
@pytest.mark.parametrize("sizes", [(0, 0), (2, 0), (0, 2)])
def test_a_bank_with_one_empty_list_is_refused_with_its_cause(right, cut, lost, words, sizes):
    bank = conftest.make_bank(None, *sizes)
    bank.metadata |= {"seed_solutions": 8, "right_seed_solutions": right}
    bank.metadata |= {"truncated_seed_solutions": cut, "lost_replies": lost}
    with pytest.raises(UserError, match=re.escape(words)):
        skills.refuse_without_pairs(bank, config.Config(), "--resume RUN")
    skills.refuse_without_pairs(bank, config.Config(allow_empty_bank=True), "--resume RUN")
    skills.refuse_without_pairs(conftest.make_bank(), config.Config(), "--resume RUN")


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


def test_the_last_line_of_a_run_without_test_problems_asks_for_some(world_dir, tmp_path):
    cfg = config.Config(**driver.settings(world_dir, tmp_path / "run"))
    said = runlog.what_next(cfg)
    assert "--data YOUR_TEST_PROBLEMS.jsonl" in said
    assert "without --data" in said and "AIME24" in said and "38,912 tokens" in said
