"""A run: its files, prompts and bank, how it is continued, and what leaves a step empty."""

import contextlib
import dataclasses
import itertools
import json
import math
import re
import shlex
import shutil
import types

import datasets
import driver
import pytest
import torch
from conftest import PROBLEMS, make_tokenizer
from driver import ALONE, completes, make_run, refused, rows, settings, train
from tokenizers import AddedToken
from transformers import GenerationConfig

import eval
import scoring
import sgsd
import skills
from distributed import World
from extras import baselines
from lib import config, files, model, runlog, verify

BANK = {"bank": "", "cold_start": 8, "evolve_every": 2, "max_new_items": 2}


@pytest.fixture(scope="module")
def whole(world_dir, tmp_path_factory):
    """A run of four steps that makes its own bank."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return train(world_dir, out, **BANK)


def test_what_a_run_leaves_on_disk(whole):
    out = whole.out
    stored = json.loads((out / "config.json").read_text())
    assert stored["settings"]["num_teachers"] == 3 and stored["versions"]["torch"]
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


def test_no_skill_text_reaches_a_student(whole):
    entries = []
    for version in sgsd.bank_versions(whole.out).values():
        bank = skills.SkillBank.load(version)
        entries += bank.general_skills + bank.common_mistakes
    for row in rows(whole.out / "rollouts.jsonl"):
        text = whole.tokenizer.decode(row["prompt_ids"])
        assert skills.render_student(row["problem"]) in text and "guidance" not in text
        for entry in entries:
            assert not any(value in text for value in entry.values() if isinstance(value, str))


def test_the_adapters_train_and_nothing_else(world_dir, tmp_path):
    run = make_run(world_dir, tmp_path / "run", dtype="bfloat16")
    before = {name: p.detach().clone() for name, p in run.lm.named_parameters()}
    for step in (1, 2):  # the first one leaves lora_A, as lora_B begins at 0
        sgsd.train_step(run, step)
    for name, p in run.lm.named_parameters():
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
    with contextlib.ExitStack() as held:
        run = driver.with_fakes(sgsd.prepare(cfg, ALONE, False, held, first))
        records, _, _ = sgsd.train_step(run, 1)
    assert {tuple(map(tuple, row["pairs"])) for row in records} == {(("gen_001", "err_001"),)}
    assert [row["alpha"] for row in records] == [[1.0]] * 4


# ------------------------------------------------------------------------------------ the prompts


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


def test_a_special_token_without_a_role_and_every_stop_id_are_masked(world_dir, tmp_path):
    """S2: Gemma's <end_of_turn> is special, and only its generation_config names it as a stop."""
    shutil.copytree(world_dir / "model", tmp_path / "model")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken("<end_of_turn>", special=True)])
    tokenizer.save_pretrained(tmp_path / "model")
    generation = GenerationConfig.from_pretrained(tmp_path / "model")
    generation.eos_token_id = [265, 5]
    generation.save_pretrained(tmp_path / "model")
    run = make_run(world_dir, tmp_path / "run", model=str(tmp_path / "model"))
    turn = run.tokenizer.convert_tokens_to_ids("<end_of_turn>")
    assert turn not in run.tokenizer.all_special_ids
    assert {turn, 5} <= run.masked_ids


def test_a_batch_that_is_larger_than_the_data_says_how_often_it_takes_each_problem(
    world_dir, tmp_path, capsys
):
    for size, words in (
        (12, ""),
        (18, "data: --batch-size 18 takes each of the problems 1.5 times"),
    ):
        make_run(world_dir, tmp_path / "run", batch_size=size)
        printed = capsys.readouterr().out
        assert words in printed and ("takes each" in printed) == bool(words)


def test_every_rank_needs_a_problem(world_dir, tmp_path):
    cfg = config.Config(**settings(world_dir, tmp_path / "run"))
    rule = "--batch-size 4: must be >= 8, since every process needs a problem"
    with contextlib.ExitStack() as held, pytest.raises(ValueError, match=rule):
        sgsd.prepare(cfg, World(0, 8, torch.device("cpu")), False, held)


# ------------------------------------------------------------------------- how a run is continued


@pytest.fixture(scope="module")
def one_step(world_dir, tmp_path_factory):
    """The directory of a run with one step, by the command."""
    out = tmp_path_factory.mktemp("one") / "run"
    completes(sgsd.main, driver.flags(world_dir, out, steps=1, max_new_tokens=4))
    return out


def test_a_run_records_the_code_and_each_continuation(one_step, tmp_path, capsys):
    out = shutil.copytree(one_step, tmp_path / "run")
    file = out / "config.json"
    first = json.loads(file.read_text())
    assert first["continuations"] == [] and {"commit", "changes", "command"} <= first.keys()
    file.write_text(json.dumps(first | {"commit": "another"}))
    for steps, rates in ((2, "0.005 instead of 0"), (3, "0.0033 instead of 0")):
        completes(sgsd.main, ["--resume", out, f"--steps={steps}"])
        printed = capsys.readouterr()
        rate = f"the learning rate of step {steps} is {rates}\n"
        assert f"--steps {steps} instead of {steps - 1}: {rate}" in printed.out
        assert f"resumed from step {steps - 1}\n" in printed.out
        assert "the code has changed since the run began (commit: another, now" in printed.err
    stored = json.loads(file.read_text())
    assert stored["settings"] == first["settings"] | {"steps": 3, "out": str(out)}
    for name in ("command", "changes", "versions"):
        assert stored[name] == first[name]
    steps = [(c["step"], c["changed"]) for c in stored["continuations"]]
    assert steps == [(1, {"steps": [1, 2]}), (2, {"steps": [2, 3]})]
    for continuation in stored["continuations"]:
        assert {"when", "command", "commit", "changes"} <= continuation.keys()


def test_what_changes_only_rounding_may_be_given_again(one_step, tmp_path):
    out = shutil.copytree(one_step, tmp_path / "run")
    given = ["--checkpoint-every=1", "--rollout-rows=2", "--score-tokens=500", "--audit-every=0"]
    completes(sgsd.main, ["--resume", out, "--steps=2", *given])
    (continuation,) = json.loads((out / "config.json").read_text())["continuations"]
    names = ["audit_every", "checkpoint_every", "rollout_rows", "score_tokens", "steps"]
    assert sorted(continuation["changed"]) == names
    assert len(rows(out / "tokens.jsonl")) == 0 and len(rows(out / "metrics.jsonl")) == 2


def test_a_run_cannot_have_fewer_steps_than_it_has_made(one_step, tmp_path, capsys):
    out = shutil.copytree(one_step, tmp_path / "run")
    shutil.move(out / "checkpoints/step_000001", out / "checkpoints/step_000005")
    words = ("--steps 3", "is at step 5 already; give a larger number")
    refused(capsys, sgsd.main, ["--resume", out, "--steps=3"], *words)


def test_steps_before_the_first_checkpoint_are_made_again(whole, world_dir, tmp_path):
    """The bank of the cold start is used again. With more steps its checkpoints must have gone."""
    out = shutil.copytree(whole.out, tmp_path / "run")
    shutil.rmtree(out / "checkpoints")
    rule = "has made 4 steps, but checkpoints/ is empty; bring them back, or start a new run"
    with pytest.raises(ValueError, match=re.escape(f"--resume {out}: {rule}")):
        train(world_dir, out, resume=True, **BANK)
    for name in runlog.LOGS:  # as a kill leaves them before the checkpoint of step 2
        files.trim_jsonl(out / f"{name}.jsonl", 2)
    run = train(world_dir, out, resume=True, **BANK)
    assert run.code == 0 and run.bank == whole.bank
    for name in ("rollouts.jsonl", "tokens.jsonl", "bank/memories.jsonl", "bank/replies.jsonl"):
        assert (out / name).read_bytes() == (whole.out / name).read_bytes(), name


def test_the_first_and_the_last_n_checkpoints_stay_and_one_under_evaluation(world_dir, tmp_path):
    changes = {"keep_checkpoints": 2, "checkpoint_every": 1, "batch_size": 1, "max_new_tokens": 2}
    out = tmp_path / "run"

    def saved():
        return [int(path.name[5:]) for path in sorted((out / "checkpoints").iterdir())]

    with contextlib.ExitStack() as evaluation:

        def step_fn(run, step):
            if step == 4:
                evaluation.enter_context(files.locked(out / "eval/step_000003"))
            return sgsd.train_step(run, step)

        assert train(world_dir, out, step_fn=step_fn, steps=6, **changes).code == 0
        assert saved() == [1, 3, 5, 6]
    assert train(world_dir, out, resume=True, steps=7, **changes).code == 0
    assert saved() == [1, 6, 7]


def test_a_complete_run_says_which_commands_fit_it(world_dir, tmp_path):
    changes = {"attn": "eager", "dtype": "bfloat16"}
    text = sgsd.what_next(config.Config(**settings(world_dir, tmp_path / "run", **changes)))
    assert f"python -m extras.report {tmp_path}/run" in text
    assert f"python eval.py {world_dir}/model {tmp_path}/run --data YOUR" in text
    assert "--dtype bfloat16 --attn eager" in text


def test_a_set_of_other_columns_whose_answers_follow_a_mark_is_trained_and_evaluated_on(
    world_dir, tmp_path, capsys
):
    """As GSM8K: from a directory as the hub lays it out, and from JSONL; the samples are shared."""
    rows_of_set = []
    for x in PROBLEMS:
        solution = f"One adds.\n#### {x['answer']}"
        rows_of_set.append({"question": x["problem"], "solution": solution})
    hub, test, out = tmp_path / "hub", tmp_path / "test.jsonl", tmp_path / "run"
    (hub / "data").mkdir(parents=True)
    (hub / "README.md").write_text("---\nlicense: mit\n---\n")
    part = datasets.Dataset.from_list(rows_of_set[:8])
    part.to_parquet(str(hub / "data/train-00000-of-00001.parquet"))
    files.write_jsonl(test, rows_of_set[8:])
    fields = ["--problem-field=question", "--answer-field=solution"]
    changes = {"steps": 1, "max_new_tokens": 4, "eval_tokens": 4, "eval_samples": 1}
    changes["verifier"] = config.Config.verifier
    given = driver.flags(world_dir, out, data=hub, eval_data=test, **changes)
    hint = "name the mark before the answer by --answer-after"
    refused(capsys, sgsd.main, [*given, *fields], f"--data {hub}: the reference of problem 0", hint)
    completes(sgsd.main, [*given, *fields, "--answer-after=####"])
    golds = {x["problem"]: x["answer"] for x in PROBLEMS}
    trained = {row["problem"]: row["gold"] for row in rows(out / "rollouts.jsonl")}
    assert len(trained) == 4 and trained.items() < golds.items()
    for log in out.glob("eval/*/samples.jsonl"):
        assert [row["gold"] for row in rows(log)] == [x["answer"] for x in PROBLEMS[8:]]
    cfg = config.Config(**config.saved(out))
    line = shlex.split(sgsd.what_next(cfg).partition("all checkpoints: python eval.py ")[2])
    before = [log.read_bytes() for log in out.glob("eval/*/samples.jsonl")]
    completes(eval.main, line)
    assert before == [log.read_bytes() for log in out.glob("eval/*/samples.jsonl")]
    given = [world_dir / "model", "--data", hub, "--samples=1", "--max-new-tokens=4", *fields]
    given += [f"--out={tmp_path / 'eval'}"]
    refused(capsys, eval.main, given, 'Unknown split "test"', "check")
    given.append("--split=train")
    refused(capsys, eval.main, given, f"--data {hub}: the reference of problem 0", hint)
    completes(eval.main, [*given, "--answer-after=####"])
    assert [row["gold"] for row in driver.samples(tmp_path / "eval")] == [
        x["answer"] for x in PROBLEMS[:8]
    ]


# ------------------------------------------------------------------------ the life of a run's bank


def dynamic(bank):
    entries = bank.general_skills + bank.common_mistakes
    return [e for e in entries if e.get("skill_id", e.get("mistake_id")).startswith("dyn_")]


def test_a_run_makes_its_bank_and_evolves_it(whole):
    """Without --bank: cold start (Alg. 2), and every second step evolution (Alg. 4)."""
    versions = sgsd.bank_versions(whole.out)
    assert list(versions) == [0, 2, 4]
    banks = [skills.SkillBank.load(path) for path in versions.values()]
    memories = rows(whole.out / "bank/memories.jsonl")
    assert len(memories) == 8
    assert {m["problem_id"] for m in memories} == set(banks[0].metadata["seed_problems"])
    assert not any("reference_answer" in m for m in memories)  # D3
    for old, new in itertools.pairwise(banks):
        assert 0 < len(dynamic(new)) <= len(dynamic(old)) + 2
    assert whole.bank == banks[2] == skills.SkillBank.load(whole.out / "bank/bank.json")
    replies = rows(whole.out / "bank/replies.jsonl")
    assert {row["outcome"] for row in replies} == {"read"}
    assert {row["step"] for row in replies} == {0, 2, 4}


def test_a_row_has_the_bank_that_its_step_used_and_the_replies_since_the_row_before(whole):
    """So the evolution after step 2 is counted in row 3, and the cold start in the bank."""
    metrics = rows(whole.out / "metrics.jsonl")
    counts = [m["replies_read"] for m in metrics]
    assert counts[0] == counts[1] == counts[3] == 0 < counts[2]
    assert counts[2] == sum(row["step"] == 2 for row in rows(whole.out / "bank/replies.jsonl"))
    versions = sgsd.bank_versions(whole.out)
    for m, since in zip(metrics, (0, 0, 2, 2)):
        bank = skills.SkillBank.load(versions[since])
        sizes = len(bank.general_skills), len(bank.common_mistakes)
        assert (m["bank_skills"], m["bank_mistakes"]) == sizes


def test_an_evolution_says_what_it_did_or_why_it_did_nothing(world_dir, tmp_path, capsys):
    """Three of eight are right: below the first gate, and not below the second."""
    changes = {"steps": 2, "evolve_every": 2, "batch_size": 4}
    train(world_dir, tmp_path / "a", **changes)
    printed = capsys.readouterr().out
    assert "bank: 4 skills and 4 mistakes\n" in printed
    copies = "0 copies of static entries dropped"
    line = f"bank: success 0.38; 3 candidate skills, 2 after merging, {copies}, net new 1"
    line += f"; 5 candidate mistakes, 4 after merging, {copies}, net new 3; 0 replies lost\n"
    assert line in printed
    changes["bank"] = f"{tmp_path}/a/bank/bank.json"  # whose own last step was of this step, too
    train(world_dir, tmp_path / "b", success_gate=0.375, **changes)
    assert "success 0.38 is not below the gate: kept as it is" in capsys.readouterr().out


def test_a_bank_evolves_under_a_retrieval_that_has_no_encoder(world_dir, tmp_path):
    changes = {"steps": 2, "evolve_every": 2, "retrieval": "random", "encoder": "/no/such"}
    kind, step_fn = baselines.BaselineConfig, baselines.method_step
    run = train(world_dir, tmp_path / "run", step_fn=step_fn, kind=kind, **changes)
    assert run.code == 0
    assert list(sgsd.bank_versions(run.out)) == [0, 2] and dynamic(run.bank)


# ------------------------------------------------------------------- what teaches nothing, and why


def test_a_completion_without_a_reasoning_token_teaches_nothing(world_dir, tmp_path):
    """It is the stop id alone, or nothing but newlines: r = -1, rho = 0, and a gradient of 0."""
    run = make_run(world_dir, tmp_path / "run", max_new_tokens=3)
    run.verifier = verify.Verifier()
    causal = scoring.causal_lm(run.lm)
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
    few = {**BANK, "cold_start": 4, "max_new_tokens": 8, "steps": 2, **changes}
    run = make_run(world_dir, out, **few)
    cfg = dataclasses.replace(run.cfg, reply_tokens=8)
    policy = run.lm, run.tokenizer, run.stream
    run.writer = sgsd.writer_of(cfg, run.world, policy, run.out / "bank")
    return run


def test_a_run_whose_bank_has_no_pair_ends_before_its_first_step_and_says_why(world_dir, tmp_path):
    run = run_without_pairs(world_dir, tmp_path / "run")
    with pytest.raises(ValueError) as refusal:
        sgsd.begin(run, resume=False)
    line = str(refusal.value)
    assert "bank: 0 skills and 0 mistakes: no pair, no teacher, nothing to learn (S8)" in line
    assert "from 4 solutions, 1 correct and 4 cut at --cold-start-tokens" in line
    assert "4 replies lost (4 cut off)" in line and "--allow-empty-bank" in line
    assert not (run.out / "metrics.jsonl").exists() and not sgsd.bank_versions(run.out)
    (reply, *_) = rows(run.out / "bank/replies.jsonl")
    assert (reply["outcome"], reply["cause"]) == ("retried", "cut off")


def test_a_bank_that_stays_empty_is_said_and_counted(world_dir, tmp_path, capsys):
    """A random model's own replies cannot be read: no teachers, no loss, and the run ends well."""
    run = run_without_pairs(world_dir, tmp_path / "run", allow_empty_bank=True)
    with driver.signals_restored():
        assert sgsd.train(run, sgsd.begin(run, resume=False)) == 0
    printed = capsys.readouterr().out
    assert "no pair, no teacher, no loss (S8)" in printed
    assert "4 replies lost (4 cut off)" in printed and "| 100% cut at --max-new-tokens" in printed
    metrics, replies = rows(run.out / "metrics.jsonl"), rows(run.out / "bank/replies.jsonl")
    assert sum(row["step"] == 2 and row["outcome"] == "lost" for row in replies) > 0
    for m in metrics:
        assert (m["no_teachers"], m["bank_skills"], m["skipped"]) == (4, 0, 0)
        assert m["loss"] == m["grad_norm"] == 0
    params = model.trained(run.lm).items()
    assert not any(p.any() for name, p in params if "lora_B" in name)
