"""Metrics and intervals by hand, the sets, Base+Skill, and evaluations that go on after a kill."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import datasets
import numpy as np
import pytest
import torch
from conftest import PROBLEMS, ROOT, fake_embed, make_bank, make_model
from driver import evaluate, evaluation, make_adapter, samples, two_processes

import config
import distributed
import eval
import files
import policy
import problems
import rollout
import runlog
import skills
from cli import SharedError, UserError
from distributed import World


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_pass_is_the_mean_over_all_subsets_and_of_one_the_average(k):
    rows = [[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]]
    hits = [any(subset) for row in rows for subset in itertools.combinations(row, k)]
    assert eval.pass_at_k(np.array(rows, dtype=bool), k) == pytest.approx(np.mean(hits))
    assert eval.avg_at_k(np.array(rows, dtype=bool)) == 8 / 20


def test_maj_by_hand():
    def same(gold, pred):
        return pred is not None and float(gold) == float(pred)

    preds = [["1", "2.0", "2"], [None, None, "3"], ["5", "6", None], [None, None, None]]
    # 2 has two votes, 3 has one, 5 came before 6, and nobody voted on the last
    assert eval.maj_at_k(preds, ["2", "3", "5", "7"], same) == 3 / 4
    assert eval.maj_at_k([["1", "2", "2"]], ["1"], same) == 0


def test_the_majoritys_answer_has_the_verdict_of_its_samples():
    """A formula that was copied from its problem is wrong, though it equals the reference."""
    row = {"digest": "0", "gold": "5", "truncated": False, "tokens": 1}
    rows = [row | {"pred": "2+3", "r": -1}] * 2 + [row | {"pred": "5", "r": 1}]
    policy = eval.Policy("x")
    eval.measure(policy, "d", rows, 3, lambda gold, pred: gold == pred)
    assert policy.table["d"]["maj"] == 0 and policy.table["d"]["avg"] == pytest.approx(1 / 3)
    eval.measure(policy, "d", rows[::-2] + rows[2:], 3, lambda gold, pred: gold == pred)
    assert policy.table["d"]["maj"] == 1


def test_bad_metric_input():
    for shape in ((0, 3), (3,), (2, 0)):
        with pytest.raises(ValueError, match="correct_PK must be"):
            eval.avg_at_k(np.zeros(shape))
    with pytest.raises(ValueError, match=r"pass_at_k: got k = 4, must be in 1..3"):
        eval.pass_at_k(np.ones((2, 3)), 4)
    with pytest.raises(ValueError, match="maj_at_k: got 1 rows"):
        eval.maj_at_k([["1"]], ["1", "2"], lambda gold, pred: True)


def test_intervals():
    scores = np.random.default_rng(1).random(200)
    low, high = eval.bootstrap_interval(scores)
    assert low < scores.mean() < high
    # for many problems it is the normal interval
    assert high - low == pytest.approx(2 * 1.96 * scores.std() / 200**0.5, rel=0.1)
    # sets weigh alike: of 1,000 sure problems and 10 coin flips it is half as wide as the coins'
    low, high = eval.bootstrap_interval(np.ones(1000), np.array([0.0, 1.0] * 5))
    assert (low + high) / 2 == pytest.approx(0.75, abs=0.02)
    assert high - low == pytest.approx(2 * 1.96 * 0.5 / 10**0.5 / 2, rel=0.15)


def measured(path, base="", **sets):
    """A policy with these scores per problem, by set."""
    policy = eval.Policy(path, base)
    for name, scores_P in sets.items():
        low, high = eval.bootstrap_interval(np.asarray(scores_P))
        policy.scores[name] = np.asarray(scores_P)
        policy.table[name] = {"avg": float(np.mean(scores_P)), "avg_low": low, "avg_high": high}
        policy.table[name] |= {"problems": len(scores_P), "digest": 1}
    return policy


def test_pairing_removes_what_policies_share():
    """One policy is better by .1 everywhere: the difference is certain, and neither mean is."""
    shared = np.linspace(0, 0.9, 30)
    found = eval.compare([measured("base", d=shared), measured("new", d=shared + 0.1)], ["d"])
    base, row = found["results"].values()
    assert "diff" not in base and row["avg_low"] < 0.48 and row["to"] == "base"
    assert [row["diff"], row["diff_low"], row["diff_high"]] == pytest.approx([0.1] * 3)


def test_the_best_checkpoint_by_set_and_by_mean_stands_beside_the_last():
    averages = {"base": (0.9, 0.9), "r/checkpoints/1": (0.3, 0.6), "r/checkpoints/2": (0.5, 0.5)}
    averages |= {"r/checkpoints/3": (0.4, 0.4), "q/a": (0.8, 0.8)}
    policies = []
    for path, (d, e) in averages.items():
        base = "" if path == "base" else "base"
        policies.append(measured(path, base, d=[d] * 4, e=[e] * 4))
    for names, best in {("d",): 2, ("e",): 1, ("d", "e"): 2}.items():
        ((run, choice),) = eval.compare(policies, names)["selections"].items()
        assert (run, choice["checkpoints"]) == ("r/checkpoints", 3)
        assert (choice["best"], choice["last"]) == (f"{run}/{best}", f"{run}/3")
    found = [choice["best_avg"], choice["last_avg"], choice["diff"]]
    assert found == pytest.approx([0.5, 0.4, 0.1])


ANSWERS = {  # what the hub holds and what is read; some sets call the problem a question
    "aime24": ("problem", "025", "025"),
    "aime25": ("problem", 25, "25"),
    "hmmt25": ("problem", "\\pi", "\\pi"),
    "math500": ("problem", "1", "1"),
    "amc23": ("question", 27.0, "27"),
    "gsm8k": ("question", "2+2=<<2+2=4>>4\n#### 1,234", "1,234"),
}


@pytest.fixture
def hub(monkeypatch):
    """A hub that holds two rows of each set."""
    names = {entry[:3]: name for name, entry in problems.SETS.items()}

    def load(hub_id, name=None, *, split):
        key, answer, _ = ANSWERS[names[hub_id, name, split]]
        return datasets.Dataset.from_list([{"id": 60, key: " p ", "answer": answer}] * 2)

    monkeypatch.setattr(datasets, "load_dataset", load)


@pytest.mark.parametrize("name", problems.SETS)
def test_sets_by_name(name, hub, monkeypatch):
    found = problems.load_set(name, "unused")
    assert found == [problems.Problem(str(i), "p", ANSWERS[name][2]) for i in range(2)]
    other = datasets.Dataset.from_list([{"text": "p"}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: other)
    with pytest.raises(UserError, match=f"{name}: .* row 0: `problem` must be a string"):
        problems.load_set(name, "unused")


def results(out):
    """The figures of the one policy in a folder given as --out, as they stand in the file."""
    (file,) = out.glob("*/results.json")
    return file.read_text()


def test_the_papers_three_sets_are_the_default(world_dir, tmp_path, hub, capsys):
    flags = f"--limit 1 --samples 1 --max-new-tokens 4 --out {tmp_path}"
    assert eval.main([f"{world_dir}/model", *flags.split()]) == 0
    assert [row["set"] for row in samples(tmp_path)] == ["aime24", "aime25", "hmmt25"]
    assert (
        "| model | mean of aime24, aime25, hmmt25 | 3 | 0.0% | 0.0%-0.0% |"
        in capsys.readouterr().out
    )


def test_kill_9_and_go_on(world_dir, tmp_path):
    """One row at a time, so that it is exact: a batch's other rows can move a draw by rounding."""
    long = "--max-new-tokens 40 --samples 5 --rows 1 --limit 6"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    rows = evaluate(world_dir, whole, long)
    program = [sys.executable, ROOT / "eval.py", *evaluation(world_dir, killed, long)]
    process = subprocess.Popen(program, env={**os.environ, "OMP_NUM_THREADS": "1"})
    logs = []
    while process.poll() is None and not (logs and logs[0].stat().st_size):
        time.sleep(0.01)
        logs = list(killed.glob("*/samples.jsonl"))
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    (log,) = logs
    before = log.read_text()
    before = before[: before.rfind("\n") + 1]
    assert 0 < before.count("\n") < 30 and not list(killed.glob("*/results.json"))
    log.write_text(before + '{"set": "da')  # a torn line
    assert evaluate(world_dir, killed, long) == rows
    assert log.read_text().startswith(before)
    assert results(whole) == results(killed)


def test_two_processes_give_the_samples_of_one(world_dir, tmp_path):
    one, two = tmp_path / "1", tmp_path / "2"
    whole = evaluate(world_dir, one)
    assert len(whole) == 36 and len({row["text"] for row in whole}) > 30
    two_processes(ROOT / "eval.py", *evaluation(world_dir, two))
    assert samples(two) == whole
    assert results(one) == results(two)


def test_a_problem_that_changed_is_sampled_anew_and_no_sample_is_ever_lost(world_dir, tmp_path):
    data = tmp_path / "d.jsonl"
    for answer, golds in (("3", ["3"]), ("4", ["3", "4"]), ("3", ["3", "4"])):
        data.write_text(json.dumps({"problem": "What is 1 plus 2?", "answer": answer}) + "\n")
        rows = evaluate(world_dir, tmp_path, f"--data {data} --samples 1")
        assert [row["gold"] for row in rows] == golds


def figures(avg, digest=1):
    return {"avg": avg, "digest": digest}


def test_a_mean_over_sets_weighs_them_alike_and_is_not_in_the_table_of_a_policy():
    """1 of 1 problem and 0 of 3: a half, of 4 problems; of one set it is the set's own row."""
    policy = measured("base", d=[1.0], e=[0.0, 0.0, 0.0])
    mean = eval.figures(policy, ["d", "e"])
    assert mean == {"avg": 0.5, "problems": 4, "avg_low": 0.5, "avg_high": 0.5}
    assert eval.figures(policy, ["e"]) == policy.table["e"] and list(policy.table) == ["d", "e"]


def test_a_set_is_added_to_a_file_of_others_or_takes_its_place(tmp_path):
    file = tmp_path / "results.json"
    for sets in ({"a": figures(1.0), "b": figures(0.0)}, {"a": figures(0.5), "c": figures(1.0)}):
        eval.merge_into(file, sets)
    wanted = {"a": figures(0.5), "b": figures(0.0), "c": figures(1.0)}
    assert json.loads(file.read_text()) == wanted


def test_a_sample_is_a_function_of_seed_problem_and_number(world_dir, tmp_path):
    """Other problems, a problem's id and set, the rows and the number of samples have no part."""
    whole = {row["id"]: [] for row in PROBLEMS}
    for row in evaluate(world_dir, tmp_path / "a"):
        whole[row["id"]].append(row["text"])
    part = [{**row, "id": f"new {row['id']}"} for row in reversed(PROBLEMS[3:7])]
    data = tmp_path / "part.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in part))
    more = f"--data {data} --rows 2 --samples 2 --limit 3"
    rows = evaluate(world_dir, tmp_path / "b", more)
    assert len(rows) == 6
    for row in rows:
        assert row["text"] == whole[row["id"].removeprefix("new ")][row["sample"]]
    table = json.loads(results(tmp_path / "b"))
    assert (table["part"]["problems"], table["part"]["samples"]) == (3, 6)


def test_an_adapter_is_loaded_onto_the_ranks_own_device(base, tmp_path, monkeypatch):
    """PEFT would put all ranks' adapters onto the first GPU."""
    make_adapter(tmp_path / "adapter", base)
    asked = []
    monkeypatch.setattr("peft.peft_model.infer_device", lambda: asked.append("any") or "cpu")
    chosen = eval.Policy(str(tmp_path / "adapter"), str(base))
    args = eval.arguments(["x"])
    eval.load_policy(chosen, args, World(0, 1, torch.device("cpu")))
    assert not asked


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory, beside a model."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def base(world_dir, tmp_path):
    return shutil.copytree(world_dir / "model", tmp_path / "model")


def called(*paths, data, more=""):
    flags = "--samples 2 --limit 4 --max-new-tokens 8 --device cpu"
    return eval.main([*map(str, paths), "--data", str(data), *flags.split(), *more.split()])


def read(folder, name="results"):
    return json.loads((folder / f"{name}.json").read_text())


def test_each_policy_has_a_folder_outside_of_models_and_each_set_is_added(
    world_dir, here, base, capsys
):
    """A base against two runs and a foreign adapter; then against one run on another set."""
    top, data = here.parent, world_dir / "data.jsonl"
    run, other, foreign = top / "run", top / "other", top / "foreign"
    steps = [run / "checkpoints/step_000001", run / "checkpoints/step_000002"]
    adapters = [*steps, other / "checkpoints/step_000001", foreign]
    for seed, path in enumerate(adapters):
        make_adapter(path, base, seed)
    before = {path: path.read_bytes() for path in top.rglob("*") if path.is_file()}
    assert called(base, run, other, foreign, data=data) == 0
    out = capsys.readouterr().out
    names = [f"{top.name}--model", f"{top.name}--foreign"]
    plain = [run / "eval" / name for name in names]
    folders = [plain[0], run / "eval/step_000001", run / "eval/step_000002"]
    folders += [other / "eval/step_000001", plain[1]]
    texts = {(folder / "samples.jsonl").read_text() for folder in folders}
    assert len(texts) == 5  # each policy has sampled, in a folder of its own
    assert all(list(read(folder)) == ["data"] for folder in folders)
    assert "diff" not in read(folders[1])["data"]
    whole = read(run / "eval", "comparison")["data"]
    assert list(whole["results"]) == [str(path) for path in (base, *adapters)]
    row = whole["results"][str(foreign)]
    assert (row["to"], row["diff"]) == (str(base), 0.0)
    assert [choice["best"] for choice in whole["selections"].values()] == [str(steps[0])]
    assert "of 2 checkpoints" in out and "best was picked on these problems" in out
    assert out.count("+0.0% to +0.0%") == 5

    shutil.copy(data, top / "new.jsonl")
    assert called(base, run, data=top / "new.jsonl") == 0
    assert all(list(read(folder)) == ["data", "new"] for folder in folders[:3])
    whole = read(run / "eval", "comparison")
    assert {name: len(found["results"]) for name, found in whole.items()} == {"data": 5, "new": 3}
    after = {path for path in top.rglob("*") if path.is_file()}
    for path in after - set(before):
        assert "eval" in path.parts or path.name == "new.jsonl"
    assert all(path.read_bytes() == text for path, text in before.items())

    config = (base / "config.json").rename(top / "away")  # now the model cannot be loaded
    assert called(steps[1], data=data, more=f"--model {base}") == 0  # and need not be
    config.rename(base / "config.json")
    os.chdir(base)
    for place, more in ((base, f"--out {base}/eval"), (".", ""), (foreign, "")):
        assert called(place, data=data, more=more) == 2
        assert f"lies in a model's directory, {base}; give another --out" in capsys.readouterr().err


def test_the_end_of_a_training_and_a_later_comparison_share_samples(
    world_dir, here, base, capsys, monkeypatch
):
    run = here.parent / "run"
    make_adapter(run / "checkpoints/step_000002", base)
    settings = {"model": str(base), "out": str(run), "updates": 2, "device": "cpu"}
    settings |= {"eval_data": f"{world_dir}/data.jsonl", "eval_tokens": 8, "dtype": "float32"}
    cfg = config.Config(**settings)
    eval.before_and_after(cfg, World(0, 1, torch.device("cpu")))
    with monkeypatch.context() as patch:  # the other node has a disk of its own: no one may wait
        patch.setattr(distributed, "gather", lambda value, world: [value, value and None])
        with pytest.raises(SharedError, match="the ranks see different checkpoints"):
            eval.before_and_after(cfg, World(0, 2, torch.device("cpu")))
        unasked = config.Config(**settings | {"eval_data": ""})  # nothing is compared then
        eval.before_and_after(unasked, World(0, 2, torch.device("cpu")))
    assert capsys.readouterr().out.count("+0.0% to +0.0%") == 1
    first, second = read(run / "eval", "comparison")["data"]["results"].values()
    assert "diff" not in first and second["to"] == str(base)
    logs = sorted(run.glob("eval/*/samples.jsonl"))
    assert [log.parent.name for log in logs] == ["step_000002", f"{here.parent.name}--model"]
    before = [log.read_bytes() for log in logs]
    make_adapter(run / "checkpoints/step_000001", base, 1)
    said = runlog.what_next(cfg).partition("all checkpoints: python eval.py ")[2]
    assert eval.main(said.split()) == 0
    assert before == [log.read_bytes() for log in logs] and not (here / "eval").exists()
    assert (run / "eval/step_000001/samples.jsonl").exists()


def test_a_comparison_of_fewer_policies_keeps_those_that_still_stand_beside_them(tmp_path):
    """As a finished run's --resume compares its base and its last checkpoint alone."""
    file = tmp_path / "comparison.json"
    rows = {"base": figures(0.5)}
    rows |= {f"r/{i}": figures(0.6) | {"to": "base"} for i in (1, 2, 3)}
    choice = {"r": {"best": "r/1", "last": "r/3"}}
    eval.merge_into(file, {"a": {"results": rows, "selections": choice}})
    later = {"base": figures(0.5), "r/3": figures(0.7) | {"to": "base"}}
    eval.merge_into(file, {"a": {"results": later, "selections": {}}})
    kept = json.loads(file.read_text())["a"]
    assert kept == {"results": rows | later, "selections": choice}
    for other in ({"base": figures(0.5, 2)}, {"else": figures(0.5)}):  # other problems, other base
        eval.merge_into(file, {"a": {"results": other, "selections": {}}})
        assert list(json.loads(file.read_text())["a"]["results"]) == list(other)


def test_a_folder_in_which_another_evaluation_is_at_work_is_refused(world_dir, here, base, capsys):
    place = here / "eval" / f"{here.parent.name}--model"
    with distributed.locked(place, World(0, 1, torch.device("cpu"))):
        assert called(base, data=world_dir / "data.jsonl") == 2
        assert f"{place}: process {os.getpid()} on " in capsys.readouterr().err
        assert [path.name for path in place.iterdir()] == [files.LOCK]


def test_samples_of_other_settings_are_refused_by_name_and_settings_alone_block_nothing(
    world_dir, here, base, capsys
):
    """Local weights count by content: made anew they are refused, moved they are known again."""
    out, moved, data = (
        here / "out",
        here.parent / "moved" / here.parent.name,
        world_dir / "data.jsonl",
    )
    (out / f"{here.parent.name}--model").mkdir(parents=True)
    (out / f"{here.parent.name}--model/settings.json").write_text('{"temperature": 9}')
    assert called(base, data=data, more=f"--out {out}") == 0
    before = samples(out)
    moved.mkdir(parents=True)
    base.rename(moved / "model")
    base = moved / "model"
    assert called(base, data=data, more=f"--out {out}") == 0 and samples(out) == before
    capsys.readouterr()
    others = "--temperature 0.6 --no-thinking --verify-timeout 3"
    assert called(base, data=data, more=f"--out {out} {others}") == 2
    made = "thinking True, now False; temperature 1.0, now 0.6; verify_timeout 5.0, now 3.0"
    wanted = f"--model/settings.json: made with {made}; give another --out"
    assert wanted in capsys.readouterr().err
    make_model(seed=1).save_pretrained(base)
    assert called(base, data=data, more=f"--out {out}") == 2
    error = capsys.readouterr().err
    assert re.search(r"made with the policy's weights \w+, now \w+; give another", error)
    assert samples(out) == before


def test_a_damaged_file_of_ours_is_named(base, here, world_dir, capsys):
    data = world_dir / "data.jsonl"
    assert called(base, data=data, more="--out out") == 0
    (file,) = here.glob("out/*/results.json")
    file.write_text("{")
    assert called(base, data=data, more="--out out") == 2
    assert "results.json: not read (JSONDecodeError" in capsys.readouterr().err


def test_an_adapters_relative_base_is_found_from_anywhere(world_dir, here, base, capsys):
    adapter = here.parent / "runs/run/checkpoints/step_000001"
    make_adapter(adapter, base)
    file, data = adapter / "adapter_config.json", world_dir / "data.jsonl"
    saved = json.loads(file.read_text())
    for name in (str(base), "model", "../model"):  # the last from the working directory
        file.write_text(json.dumps(saved | {"base_model_name_or_path": name}))
        assert eval.base_of(adapter, "") and called(adapter, data=data) == 0
    assert len(list(here.parent.rglob("samples.jsonl"))) == 1
    capsys.readouterr()
    for name in ("/gone/model", "./gone", "my/own/model", None):
        file.write_text(json.dumps(saved | {"base_model_name_or_path": name}))
        assert called(adapter, data=data) == 2
        assert re.search("adapter_config.json: .*; give it as --model", capsys.readouterr().err)
    file.write_text(json.dumps(saved | {"base_model_name_or_path": "Qwen/Qwen3-1.7B"}))
    assert eval.base_of(adapter, "") == "Qwen/Qwen3-1.7B"
    assert called(adapter, data=data, more=f"--model {base}") == 0


def test_base_skill_is_the_teachers_block_with_all_pairs():
    bank = make_bank()
    pairs = []
    for skill, mistake in zip(bank.general_skills, bank.common_mistakes):
        pairs.append(skills.SkillPair(skill, mistake, 1.0, 1.0))
    one = skills.render_teacher(pairs[0], "{skills}")
    assert skills.render_skills(pairs[:1], "{skills}") == one
    text = skills.render_skills(pairs, "P")
    assert [text.count("_Apply when"), text.count("**Instead**")] == [4, 4]
    assert text.index("Use add") < text.index("Use carry") < text.index("### Mistakes to Avoid")
    assert text.endswith("\n\n" + skills.render_student("P"))


def test_base_skill_stands_against_base_in_one_call(world_dir, here, capsys):
    """The samples are those of prompts with the retrieved pairs, beside those of plain ones."""
    model, tokenizer = policy.load_model(f"{world_dir}/model", torch.device("cpu"))
    bank = skills.SkillBank.load(world_dir / "bank.json")
    embed = policy.load_encoder(f"{world_dir}/encoder", "cpu")
    sampling = rollout.Sampling(1.0, 0.95, 0, 8)
    plain, data = here / "eval" / f"{world_dir.name}--model", world_dir / "data.jsonl"
    assert called(world_dir / "model", data=data) == 0
    before = (plain / "samples.jsonl").read_bytes()
    flags = f"--skills {world_dir}/bank.json --encoder {world_dir}/encoder"
    assert called(world_dir / "model", data=data, more=f"{flags} --num-skills 2") == 0
    assert (plain / "samples.jsonl").read_bytes() == before
    skilled = plain.with_name(f"{plain.name}--skills")
    for folder, count in ((plain, 0), (skilled, 2)):
        rows = [json.loads(line) for line in open(folder / "samples.jsonl")]
        assert len(rows) == 8 and len(read(folder)) == 1
        for row in rows:
            problem = PROBLEMS[int(row["id"][1:])]["problem"]
            pairs = bank.retrieve(problem, count, embed) if count else []
            text = skills.render_skills(pairs, problem)
            prompt = rollout.chat_ids(tokenizer, text, thinking=True)
            key = rollout.sample_key(0, 0, problem, row["sample"])
            (drawn,) = rollout.generate(model, tokenizer, [prompt], sampling, [key])
            assert row["text"] == tokenizer.decode(drawn, skip_special_tokens=True)
    name = str(world_dir / "model")
    both = read(here / "eval", "comparison")["data"]["results"]
    assert list(both) == [name, f"{name} + skills"]
    assert both[f"{name} + skills"]["to"] == name
    assert "| model + skills | data | 4 |" in capsys.readouterr().out
    settings = json.loads((skilled / "settings.json").read_text())
    assert settings["num_skills"] == 2 and settings["the bank's text"]
    assert called(world_dir / "model", data=data, more=flags + " --num-skills 3") == 2
    assert "made with num_skills 2, now 3;" in capsys.readouterr().err


def test_the_encoder_of_an_evaluation_reads_the_query_prompt_before_each_problem(
    world_dir, tmp_path, monkeypatch, capsys
):
    read = []

    def load(name, device):
        return lambda texts: read.extend(texts) or fake_embed(texts)

    monkeypatch.setattr(policy, "load_encoder", load)
    flags = f"--skills {world_dir}/bank.json --num-skills 2 --limit 1 --samples 1"
    prompted = f"{flags} --query-prompt Query:"
    assert eval.main(evaluation(world_dir, tmp_path, prompted)) == 0
    assert f"Query:{PROBLEMS[0]['problem']}" in read
    assert eval.main(evaluation(world_dir, tmp_path, flags)) == 2
    assert "query_prompt Query:, now None" in capsys.readouterr().err
