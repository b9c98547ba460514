"""A run: its files, masks, prompts and bank, and what ends an update or leaves it empty."""

import dataclasses
import itertools
import json
import math
import shutil

import driver
import pytest
import torch
from conftest import make_tokenizer
from driver import make_run, rows, train
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
    versions = runlog.bank_versions(whole.out)
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
    problems = [Problem(str(i), "x", "1") for i in range(10)]
    cfg, seen = config.Config(batch_size=4), []
    for step in range(1, 6):
        seen += [x.id for x, _ in sgsd.minibatch(problems, cfg, step)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == sorted(map(str, range(10)))
    assert seen[:10] != seen[10:]
    twice = sgsd.minibatch(problems[:2], cfg, 1)  # a problem that comes twice is sampled twice
    assert len({key for _, key in twice}) == 4
    others = sgsd.minibatch(problems, config.Config(batch_size=4, seed=1), 1)
    assert not {key for _, key in others} & {key for _, key in sgsd.minibatch(problems, cfg, 1)}


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


@pytest.mark.parametrize("end", ["<think>\\n", "<think>"])
def test_a_template_may_open_the_think_block_itself_and_may_know_no_other_way(
    end, world_dir, tmp_path, capsys
):
    shutil.copytree(world_dir / "model", tmp_path / "model")
    template = r"{{ messages[0].content + '\nassistant\n" + end + "' }}"
    (tmp_path / "model/chat_template.jinja").write_text(template)
    run = make_run(world_dir, tmp_path / "run", model=tmp_path / "model", teacher_prefix="open")
    x = run.problems[0]
    (ids,) = sgsd.teacher_prompts(run, x, run.bank.retrieve(x.problem, 1, run.embed))
    assert run.tokenizer.decode(ids).rpartition("assistant\n")[2].rstrip() == "<think>"
    assert "thinking: no switch in the chat template" in capsys.readouterr().out
    other = dataclasses.replace(run.cfg, attn="eager", dtype="bfloat16")
    assert runlog.what_next(other).endswith(f"{run.cfg.out} --dtype bfloat16 --attn eager")


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


def test_a_bank_that_stays_empty_is_said_and_counted(world_dir, tmp_path, capsys):
    """A random model's own replies cannot be read: no teachers, no loss, and the run ends well."""
    settings = {**BANK, "cold_start": 4, "max_new_tokens": 8, "updates": 2}
    run = make_run(world_dir, tmp_path / "run", **settings)
    cfg = dataclasses.replace(run.cfg, reply_tokens=8)
    run.writer = skills.writer_of(cfg, run.world, run.model, run.tokenizer, run.out / "bank")
    assert sgsd.train(run) == 0
    assert "there is no teacher, and nothing is learnt (S8)" in capsys.readouterr().out
    metrics = rows(tmp_path / "run/metrics.jsonl")
    assert metrics[1]["replies_lost"] > 0
    for m in metrics:
        assert (m["no_teachers"], m["bank_skills"], m["skipped"]) == (4, 0, 0)
        assert m["loss"] == m["grad_norm"] == 0
    params = policy.trained(run.model).items()
    assert not any(p.any() for name, p in params if "lora_B" in name)
