"""Metrics and intervals by hand, policies and their samples, Base+Skill, servers, going on."""

import contextlib
import http.server
import itertools
import json
import os
import shutil
import signal
import threading
import time

import datasets
import numpy as np
import pytest
from conftest import PROBLEMS, make_model, make_tokenizer
from driver import (
    ALONE,
    evaluate,
    evaluation,
    make_adapter,
    refused,
    samples,
    start,
    two,
    wait,
)

import distributed
import eval
import rollout
import sgsd
import skills
from lib import config, files, model

# ---------------------------------------------------------------------------------------- metrics


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
    low, high = eval.bootstrap_interval([scores])
    assert low < scores.mean() < high
    # for many problems it is the normal interval
    assert high - low == pytest.approx(2 * 1.96 * scores.std() / 200**0.5, rel=0.1)
    # sets weigh alike: of 1,000 sure problems and 10 coin flips it is half as wide as the coins'
    low, high = eval.bootstrap_interval([np.ones(1000), np.array([0.0, 1.0] * 5)])
    assert (low + high) / 2 == pytest.approx(0.75, abs=0.02)
    assert high - low == pytest.approx(2 * 1.96 * 0.5 / 10**0.5 / 2, rel=0.15)


def measured(path, base="", **sets):
    """A policy with these scores per problem, by set."""
    policy = eval.Policy(path, base)
    for name, scores_P in sets.items():
        policy.scores[name] = np.asarray(scores_P, dtype=float)
        policy.table[name] = {"avg": float(np.mean(scores_P)), "problems": len(scores_P)}
        policy.table[name] |= {"digest": "1", **eval.score_interval([policy.scores[name]])}
    return policy


def test_pairing_removes_what_policies_share():
    """One policy is better by some .1 everywhere: the difference is sure, and neither mean is."""
    shared, better = np.linspace(0, 0.9, 30), np.array([0.08, 0.12] * 15)
    found = eval.compare([measured("base", d=shared), measured("new", d=shared + better)], ["d"])
    base, row = found["results"].values()
    assert "diff" not in base and row["avg_low"] < 0.48 and row["to"] == "base"
    wanted = [0.1, 0.1 - 0.04 / 30**0.5, 0.1 + 0.04 / 30**0.5]  # 1.96 standard errors
    got = [row["diff"], row["diff_low"], row["diff_high"]]
    assert got == pytest.approx(wanted, abs=1.5e-3)


def test_where_a_bootstrap_says_nothing_there_is_wilsons_interval_and_none_of_a_difference():
    """Of 40 problems without a right answer the share may still be 8.8%: z²/n / (1 + z²/n)."""
    none = eval.score_interval([np.zeros(40)])
    z2 = 1.96**2 / 40
    assert none == {"avg_low": 0.0, "avg_high": pytest.approx(z2 / (1 + z2)), "interval": "Wilson"}
    every = eval.score_interval([np.ones(40)])
    assert (every["avg_low"], every["avg_high"]) == (pytest.approx(1 - z2 / (1 + z2)), 1.0)
    few = eval.score_interval([np.array([0.0, 1.0] * 4)])  # .5 ± z/(1+z²/8) sqrt(1/32 + z²/256)
    half = 1.96 / (1 + 1.96**2 / 8) * (1 / 32 + 1.96**2 / 256) ** 0.5
    assert [few["avg_low"], few["avg_high"]] == pytest.approx([0.5 - half, 0.5 + half])
    enough = eval.score_interval([np.array([0.0, 1.0] * 5)])
    assert enough["interval"] == "bootstrap"
    shared = np.linspace(0, 0.9, 30)
    for gap in (0.0, 0.1):  # equal gaps, the second ones up to rounding
        policies = [measured("base", d=shared), measured("new", d=shared + gap)]
        _, row = eval.compare(policies, ["d"])["results"].values()
        assert [row["diff"], row["diff_low"]] == [pytest.approx(gap), None]
        assert row["interval"] == "bootstrap"


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


# ------------------------------------------------------------------- samples, and going on later


@pytest.fixture
def hub(monkeypatch):
    """A hub that holds two rows of each of the paper's sets."""

    def load(hub_id, name=None, *, split):
        return datasets.Dataset.from_list([{"problem": hub_id, "answer": "1"}] * 2)

    monkeypatch.setattr(datasets, "load_dataset", load)


def results(out):
    """The figures of the one policy in a folder given as --out, as they stand in the file."""
    (file,) = out.glob("*/results.json")
    return file.read_text()


def test_the_papers_three_sets_are_the_default(world_dir, tmp_path, hub, capsys):
    flags = f"--limit 1 --samples 1 --max-new-tokens 4 --out {tmp_path}"
    assert eval.main([f"{world_dir}/model", *flags.split()]) == 0
    assert [row["set"] for row in samples(tmp_path)] == ["aime24", "aime25", "hmmt25"]
    mean = f"| {world_dir.name}/model | mean of aime24, aime25, hmmt25 | 3 | 0.0% | 0.0%-56.2%* |"
    assert mean in capsys.readouterr().out


def test_kill_9_and_go_on(world_dir, tmp_path):
    """One row at a time, so that it is exact: a batch's other rows can move a draw by rounding."""
    long = "--max-new-tokens 40 --samples 3 --rows 1 --limit 4"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    rows = evaluate(world_dir, whole, long)
    assert {row["engine"] for row in rows} == {"generate"}
    pid = start(evaluation(world_dir, killed, long), tmp_path / "log", program=eval.main)
    logs = []
    while os.waitpid(pid, os.WNOHANG) == (0, 0) and not (logs and logs[0].stat().st_size):
        time.sleep(0.01)
        logs = list(killed.glob("*/samples.jsonl"))
    os.kill(pid, signal.SIGKILL)
    assert wait(pid) == -signal.SIGKILL
    (log,) = logs
    before = log.read_text()
    before = before[: before.rfind("\n") + 1]
    assert 0 < before.count("\n") < 12 and not list(killed.glob("*/results.json"))
    log.write_text(before + '{"set": "da')  # a torn line
    assert evaluate(world_dir, killed, long) == rows
    assert log.read_text().startswith(before)
    assert results(whole) == results(killed)


def evaluate_together(lines):
    """Evaluations of one rank, whose command lines these are."""
    world = distributed.init("cpu")
    for line in lines:
        eval.evaluate(eval.arguments(line.split()), world)
    return 0


def test_two_processes_give_the_samples_of_one_and_rank_i_asks_server_i_modulo_n(
    world_dir, tmp_path, engines
):
    one, shared, both, first = (tmp_path / name for name in ("one", "shared", "both", "first"))
    whole = evaluate(world_dir, one)
    assert len(whole) == 36 and len({row["text"] for row in whole}) > 30
    lines = [" ".join(evaluation(world_dir, shared))]
    for out, servers in ((both, engines), (first, engines[:1])):
        urls = " ".join(server.url for server in servers)
        lines.append(" ".join(evaluation(world_dir, out, f"--server {urls}")))
    assert two(lines, tmp_path, program=evaluate_together) == [0, 0]
    assert samples(shared) == whole and results(one) == results(shared)
    assert [len(samples(out)) for out in (both, first)] == [36, 36]
    assert [len(engine.bodies) for engine in engines] == [18 + 36, 18]


def test_a_problem_that_changed_is_sampled_anew_and_no_sample_is_ever_lost(world_dir, tmp_path):
    data = tmp_path / "d.jsonl"
    for answer, golds in (("3", ["3"]), ("4", ["3", "4"]), ("3", ["3", "4"])):
        data.write_text(json.dumps({"problem": "What is 1 plus 2?", "answer": answer}) + "\n")
        rows = evaluate(world_dir, tmp_path, f"--data {data} --samples 1")
        assert [row["gold"] for row in rows] == golds


def test_a_mean_over_sets_weighs_them_alike_and_is_not_in_the_table_of_a_policy():
    """1 of 1 problem and 0 of 3: a half, of 4 problems; of one set it is the set's own row."""
    policy = measured("base", d=[1.0], e=[0.0, 0.0, 0.0])
    mean = eval.figures(policy, ["d", "e"])
    low, high = eval.wilson_interval(0.5, 4)
    ends = {"avg_low": low, "avg_high": high, "interval": "Wilson"}
    assert mean == {"avg": 0.5, "problems": 4, **ends}
    assert eval.figures(policy, ["e"]) == policy.table["e"] and list(policy.table) == ["d", "e"]


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


# ----------------------------------------------------------------------- policies and their place


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory, beside a model."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def base(world_dir, tmp_path):
    return shutil.copytree(world_dir / "model", tmp_path / "model")


def command(*paths, data, more=""):
    flags = "--samples 2 --limit 4 --max-new-tokens 8 --device cpu --verifier driver:Exact"
    return [*map(str, paths), "--data", str(data), *flags.split(), *more.split()]


def called(*paths, data, more=""):
    return eval.main(command(*paths, data=data, more=more))


def read(folder, name="results"):
    return json.loads((folder / f"{name}.json").read_text())


def test_each_policy_has_a_folder_outside_of_models_and_each_set_is_added(
    world_dir, here, base, capsys
):
    """A base against two runs and a foreign adapter; then against one run on another set.

    results.json has a row per set over all calls, comparison.json is of the last call alone.
    """
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
    assert out.count("| +0.0% | no interval |") == 4  # of four problems
    assert "best - last +0.0% (no interval); the best was picked" in out

    shutil.copy(data, top / "new.jsonl")
    assert called(base, run, data=top / "new.jsonl") == 0
    assert all(list(read(folder)) == ["data", "new"] for folder in folders[:3])
    assert [list(read(folder)) for folder in folders[3:]] == [["data"]] * 2
    whole = read(run / "eval", "comparison")
    assert {name: len(found["results"]) for name, found in whole.items()} == {"new": 3}
    after = {path for path in top.rglob("*") if path.is_file()}
    for path in after - set(before):
        assert "eval" in path.parts or path.name == "new.jsonl"
    assert all(path.read_bytes() == text for path, text in before.items())

    settings = (base / "config.json").rename(top / "away")  # now the model cannot be loaded
    assert called(steps[1], data=data, more=f"--model {base}") == 0  # and need not be
    settings.rename(base / "config.json")
    os.chdir(base)
    for place, more in ((base, f"--out {base}/eval"), (".", ""), (foreign, "")):
        words = f"lies in a model's directory, {base}; give another --out"
        refused(capsys, eval.main, command(place, data=data, more=more), words)


def test_the_end_of_a_training_and_a_later_comparison_share_samples(world_dir, here, base, capsys):
    run = here.parent / "run"
    make_adapter(run / "checkpoints/step_000002", base)
    settings = {"model": str(base), "out": str(run), "steps": 2, "device": "cpu"}
    settings |= {"eval_data": f"{world_dir}/data.jsonl", "eval_tokens": 8, "dtype": "float32"}
    settings |= {"eval_samples": 2, "verifier": "driver:Exact"}
    cfg = config.Config(**settings)
    for changes in ({"eval_data": ""}, {"steps": 3}):  # not asked for, or not complete
        eval.before_and_after(config.Config(**settings | changes), ALONE)
    assert not (run / "eval").exists()
    eval.before_and_after(cfg, ALONE)
    printed = capsys.readouterr().out
    assert printed.count("| +0.0% | no interval |") == 1
    assert f"| {here.parent.name}/model | data |" in printed and "| step_000002 | data |" in printed
    first, second = read(run / "eval", "comparison")["data"]["results"].values()
    assert "diff" not in first and second["to"] == str(base)
    logs = sorted(run.glob("eval/*/samples.jsonl"))
    assert [log.parent.name for log in logs] == ["step_000002", f"{here.parent.name}--model"]
    before = [log.read_bytes() for log in logs]
    make_adapter(run / "checkpoints/step_000001", base, 1)
    line = sgsd.what_next(cfg).partition("all checkpoints: python eval.py ")[2]
    assert eval.main(line.split()) == 0
    assert before == [log.read_bytes() for log in logs] and not (here / "eval").exists()
    assert (run / "eval/step_000001/samples.jsonl").exists()


def test_a_folder_in_which_another_evaluation_is_at_work_is_refused(world_dir, here, base, capsys):
    place = here / "eval" / f"{here.parent.name}--model"
    with files.locked(place):
        line = command(base, data=world_dir / "data.jsonl")
        refused(capsys, eval.main, line, f"{place}: another command is using this directory")
        assert [path.name for path in place.iterdir()] == [files.LOCK]


def test_samples_of_other_settings_are_refused_by_name_and_settings_alone_block_nothing(
    world_dir, here, base, capsys
):
    """Local weights count by content: made anew they are refused, moved they are known again."""
    top, data = here.parent, world_dir / "data.jsonl"
    out, moved = here / "out", top / "moved" / top.name
    (out / f"{top.name}--model").mkdir(parents=True)
    (out / f"{top.name}--model/settings.json").write_text('{"temperature": 9}')
    assert called(base, data=data, more=f"--out {out}") == 0
    before = samples(out)
    moved.mkdir(parents=True)
    base.rename(moved / "model")
    base = moved / "model"
    assert called(base, data=data, more=f"--out {out}") == 0 and samples(out) == before
    others = f"--out {out} --temperature 0.6 --no-thinking --verify-timeout 3"
    changes = "thinking True, now False; temperature 1.0, now 0.6; verify_timeout 5.0, now 3.0"
    words = f"--model/settings.json: made with {changes}; give another --out"
    refused(capsys, eval.main, command(base, data=data, more=others), words)
    make_model(seed=1).save_pretrained(base)
    words = ("made with the policy's weights ", ", now ", "; give another --out")
    refused(capsys, eval.main, command(base, data=data, more=f"--out {out}"), *words)
    assert samples(out) == before


def test_a_damaged_file_of_ours_is_named(base, here, world_dir, capsys):
    data = world_dir / "data.jsonl"
    assert called(base, data=data, more="--out out") == 0
    (file,) = here.glob("out/*/results.json")
    file.write_text("{")
    words = "results.json: not readable as JSON"
    refused(capsys, eval.main, command(base, data=data, more="--out out"), words)


def test_an_adapter_whose_base_is_named_otherwise_is_the_same_policy(world_dir, here, base):
    adapter = here.parent / "runs/run/checkpoints/step_000001"
    make_adapter(adapter, base)
    file, data = adapter / "adapter_config.json", world_dir / "data.jsonl"
    settings = json.loads(file.read_text())
    assert called(adapter, data=data) == 0
    (log,) = here.parent.rglob("samples.jsonl")
    before = log.read_bytes()
    for name in ("model", "../model"):  # the last from the working directory
        file.write_text(json.dumps(settings | {"base_model_name_or_path": name}))
        assert called(adapter, data=data) == 0 and log.read_bytes() == before
    file.write_text(json.dumps(settings | {"base_model_name_or_path": "Qwen/Qwen3-1.7B"}))
    assert called(adapter, data=data, more=f"--model {base}") == 0
    assert log.read_bytes() == before and len(list(here.parent.rglob("samples.jsonl"))) == 1


# ----------------------------------------------------------------------------------- Base + Skill


def test_base_skill_stands_against_base_in_one_call(world_dir, here, capsys):
    """The samples are those of prompts with the retrieved pairs, beside those of plain ones.

    The encoder reads --query-prompt before each problem; the model does not.
    """
    lm, tokenizer = model.load_model(f"{world_dir}/model", "cpu")
    bank = skills.SkillBank.load(world_dir / "bank.json")
    embed = model.load_encoder(f"{world_dir}/encoder", "cpu")
    sampling = rollout.Sampling(1.0, 0.95, 0, 8)
    plain, data = here / "eval" / f"{world_dir.name}--model", world_dir / "data.jsonl"
    assert called(world_dir / "model", data=data) == 0
    before = (plain / "samples.jsonl").read_bytes()
    flags = f"--skills {world_dir}/bank.json --encoder {world_dir}/encoder --query-prompt jjjjjj"
    assert called(world_dir / "model", data=data, more=f"{flags} --num-skills 2") == 0
    assert (plain / "samples.jsonl").read_bytes() == before
    skilled = plain.with_name(f"{plain.name}--skills")
    for folder, count in ((plain, 0), (skilled, 2)):
        rows = [json.loads(line) for line in open(folder / "samples.jsonl")]
        assert len(rows) == 8 and len(read(folder)) == 1
        prompts, keys = [], []
        for row in rows:
            problem = PROBLEMS[int(row["id"][1:])]["problem"]
            pairs = bank.retrieve("jjjjjj" + problem, count, embed) if count else []
            assert not count or pairs != bank.retrieve(problem, count, embed)
            text = skills.render_skills(pairs, problem)
            prompts.append(rollout.chat_ids(tokenizer, text, thinking=True))
            keys.append(rollout.sample_key(0, 0, problem, row["sample"]))
        drawn = rollout.generate(lm, tokenizer, prompts, sampling, keys, 1)
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in drawn]
        assert [row["text"] for row in rows] == texts
    name = str(world_dir / "model")
    both = read(here / "eval", "comparison")["data"]["results"]
    assert list(both) == [name, f"{name} + skills"]
    assert both[f"{name} + skills"]["to"] == name
    assert "/model + skills | data | 4 |" in capsys.readouterr().out
    settings = read(skilled, "settings")
    assert settings["num_skills"] == 2 and settings["the bank's text"]
    for others, words in (
        (f"{flags} --num-skills 3", "made with num_skills 2, now 3;"),
        (f"{flags} --num-skills 2 --query-prompt k", "made with query_prompt jjjjjj, now k;"),
    ):
        line = command(world_dir / "model", data=data, more=others)
        refused(capsys, eval.main, line, words)


# -------------------------------------------------------------------------------------- a server


class Engine(http.server.ThreadingHTTPServer):
    """An inference server of the tests' model; it refuses what comes after `limit` completions."""

    daemon_threads = True

    def __init__(self, root):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.base = {"id": "base", "owned_by": "vllm", "root": str(root), "max_model_len": 4096}
        self.limit, self.bodies, self.adapters, self.loads = 10**9, [], {}, []

    def post(self, path, body):
        name = body.get("lora_name")
        if path == "/v1/load_lora_adapter":
            self.adapters[name] = body["lora_path"]
            self.loads.append((name, body["lora_path"]))
            return 200, "Success"
        if path == "/v1/unload_lora_adapter":
            return 200, self.adapters.pop(name)
        self.bodies.append(body)
        if len(self.bodies) > self.limit or body["model"] not in ("base", *self.adapters):
            return 400, "refused"
        ids = [sum(body["prompt"]) % 200, len(self.bodies) % 200, 265]  # the last one ends it
        return 200, {"choices": [{"finish_reason": "stop", "token_ids": ids}]}


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.send(200, {"data": [self.server.base]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send(*self.server.post(self.path, body))

    def send(self, status, value):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())


@pytest.fixture
def engines(world_dir):
    """Two servers."""
    with contextlib.ExitStack() as closing:
        servers = []
        for _ in range(2):
            server = closing.enter_context(Engine(world_dir / "model"))
            threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
            closing.callback(server.shutdown)
            servers.append(server)
        yield servers


def test_a_servers_samples_are_kept_marked_and_asked_for_once(world_dir, tmp_path, engines, capsys):
    engine = engines[0]
    engine.limit = 7
    line = evaluation(world_dir, tmp_path, f"--server {engine.url} --samples 1")
    refused(capsys, eval.main, line, f"{engine.url}: HTTP 400: ", "refused")
    before = samples(tmp_path)
    assert len(before) == 7
    engine.limit, engine.bodies = 10**9, []
    assert eval.main(line) == 0 and len(engine.bodies) == 5
    rows = samples(tmp_path)
    assert len(rows) == 12 and {row["engine"] for row in rows} == {"vllm"}
    assert [row for row in rows if row in before] == before
    assert eval.main(line) == 0 and len(engine.bodies) == 5  # nothing is missing
    table = json.loads(results(tmp_path))["data"]
    assert (table["problems"], table["tokens"], table["truncated"]) == (12, 3.0, 0.0)


def test_no_skill_text_reaches_an_evaluation(world_dir, tmp_path, engines):
    """Without --skills every prompt is the student's, and no encoder is loaded."""
    engine, tokenizer = engines[0], make_tokenizer()
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"problem": "What is {skills}?", "answer": "5"}) + "\n")
    more = f"--server {engine.url} --data {world_dir}/data.jsonl {data} --encoder no-such-encoder"
    assert eval.main(evaluation(world_dir, tmp_path / "out", more)) == 0
    wanted = set()
    for problem in [*(x["problem"] for x in PROBLEMS), "What is {skills}?"]:
        text = skills.render_student(problem)
        wanted.add(tuple(rollout.chat_ids(tokenizer, text, thinking=True)))
    assert {tuple(body["prompt"]) for body in engine.bodies} == wanted


def test_generates_samples_and_a_servers_are_never_mixed(world_dir, tmp_path, engines, capsys):
    engine = engines[0]
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    few = "--limit 1 --samples 1"
    evaluate(world_dir, ours, few)
    evaluate(world_dir, theirs, f"{few} --server {engine.url}")
    before = [samples(ours), samples(theirs)]
    engine.bodies = []
    line = evaluation(world_dir, ours, f"{few} --samples 2 --server {engine.url}")
    refused(capsys, eval.main, line, "engine generate, now a server's;", "give another --out")
    line = evaluation(world_dir, theirs, f"{few} --samples 2")
    refused(capsys, eval.main, line, "engine a server's, now generate;", "give another --out")
    assert [samples(ours), samples(theirs)] == before and not engine.bodies


def test_a_servers_adapter_is_loaded_under_a_name_of_its_weights_and_unloaded(
    world_dir, here, base, engines
):
    """An engine's cache goes by the name. The base may be named by another path to it."""
    engine, run = engines[0], here.parent / "run"
    steps = [run / "checkpoints/step_000001", run / "checkpoints/step_000002"]
    for seed, path in enumerate(steps):
        make_adapter(path, base, seed)
    engine.base["root"] = str(base)
    more = f"--server {engine.url} --model ../model"
    assert called("../model", run, data=world_dir / "data.jsonl", more=more) == 0
    names = [name for name, _ in engine.loads]
    assert [place for _, place in engine.loads] == [str(path) for path in steps]
    assert len({*names}) == 2 and not engine.adapters
    used = [body["model"] for body in engine.bodies]
    assert used == ["base"] * 8 + names[:1] * 8 + names[1:] * 8
    make_adapter(steps[1], base, 3)
    shutil.rmtree(run / "eval")
    assert called(steps[1], data=world_dir / "data.jsonl", more=more) == 0
    assert engine.loads[-1][0] not in names


def test_a_server_that_does_not_suit_is_one_line_before_the_first_sample(
    world_dir, tmp_path, engines, capsys
):
    engine, out = engines[0], tmp_path / "out"
    engine.base |= {"root": "another", "max_model_len": 20}
    given = f"--server {engine.url}"
    words = f"{engine.url}: serves base, not {world_dir}/model"
    refused(capsys, eval.main, evaluation(world_dir, out, given), words)
    words = ("prompt and reply need a context of ", " tokens, the server has 20")
    line = evaluation(world_dir, out, f"{given} --server-model base")
    refused(capsys, eval.main, line, *words)
    for part in (make_model(seed=1), make_tokenizer()):
        part.save_pretrained(tmp_path / "other")
    line = [str(tmp_path / "other"), *evaluation(world_dir, out, given)]
    refused(capsys, eval.main, line, "--server: serves one base model, got ", f"{tmp_path}/other")
    assert not engine.bodies and not out.exists()


def test_a_seed_is_sent_where_it_is_asked_for_alone(world_dir, tmp_path, engines):
    engine = engines[0]
    for name, more in (("without", ""), ("with", "--server-seeds")):
        few = f"--server {engine.url} --limit 2 --samples 1 {more}"
        evaluate(world_dir, tmp_path / name, few)
    assert ["seed" in body for body in engine.bodies] == [False, False, True, True]
    assert engine.bodies[2]["seed"] != engine.bodies[3]["seed"]
