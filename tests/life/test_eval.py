"""Metrics and intervals by hand, policies and their samples, Base+Skill, servers, going on.

`completes` calls a program in this process, `refused` one that ends in a line.
"""

import itertools
import shutil
import sys

import datasets
import fake_engine
import numpy as np
import pytest
import small_run
from conftest import PROBLEMS, ROOT, make_adapter, make_tokenizer, save_model
from driver import completes, killed_at, refused, rows, run_two, write_rows

import distributed
import eval
import rollout
import skills
from extras import compare
from lib import config, files, model, problems

# ---------------------------------------------------------------------------------------- metrics


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_pass_is_the_mean_over_all_subsets_and_of_one_the_average(k):
    right_PK = [[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]]
    hits = []
    for right_K in right_PK:
        hits += [any(subset) for subset in itertools.combinations(right_K, k)]
    assert eval.pass_at_k(np.array(right_PK, dtype=bool), k) == pytest.approx(np.mean(hits))
    assert eval.avg_at_k(np.array(right_PK, dtype=bool)) == 8 / 20


def test_maj_counts_equal_answers_together_and_the_first_of_several():
    def same(gold, pred):
        return float(gold) == float(pred)

    preds = [["1", "2.0", "2"], [None, None, "3"], ["5", "6", None], [None, None, None]]
    # 2 has two votes, 3 has one, 5 came before 6, and nobody voted on the last
    right_PK = [[False, True, True], [False, False, True], [True, False, False], [False] * 3]
    assert eval.maj_at_k(preds, right_PK, same) == 3 / 4
    assert eval.maj_at_k([["1", "2", "2"]], [[True, False, False]], same) == 0


def test_the_majoritys_answer_has_the_verdict_of_its_samples():
    """A formula that was copied from its problem is wrong, though it equals the reference."""
    row = {"gold": "5", "truncated": False, "tokens": 1}
    copied, right = row | {"pred": "2+3", "r": -1}, row | {"pred": "5", "r": 1}
    figures = eval.figures(["p"], [copied, copied, right], 3, lambda one, other: True)
    assert figures["maj"] == 0 and figures["avg"] == pytest.approx(1 / 3)
    assert figures["right"] == {"p": 1}
    figures = eval.figures(["p"], [copied, right, right], 3, lambda one, other: True)
    assert figures["maj"] == 1 and figures["avg"] == pytest.approx(2 / 3)


def test_an_interval_of_many_problems_is_the_normal_one_and_sets_weigh_alike():
    scores = np.random.default_rng(1).random(200)
    low, high = eval.bootstrap_interval([scores])
    assert low < scores.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * scores.std() / 200**0.5, rel=0.1)
    # of 1,000 sure problems and 10 coin flips it is half as wide as the coins'
    low, high = eval.bootstrap_interval([np.ones(1000), np.array([0.0, 1.0] * 5)])
    assert (low + high) / 2 == pytest.approx(0.75, abs=0.02)
    assert high - low == pytest.approx(2 * 1.96 * 0.5 / 10**0.5 / 2, rel=0.15)


def test_of_equal_scores_or_of_nine_problems_there_is_no_interval():
    """A bootstrap of 40 wrong answers would say 0 to 0, as if nothing could be otherwise. Where all
    are wrong or right it is the rule of three: 50 that are all failed leave up to 6%."""
    ten = np.array([0.0, 1.0] * 5)
    for sets in ([np.zeros(40)], [ten[:9]], [ten, ten[:9]]):
        assert eval.bootstrap_interval(sets) == (None, None)
    low, high = eval.bootstrap_interval([ten])
    assert low < 0.5 < high
    row = {"avg": 0.0, "avg_low": None, "avg_high": None, "problems": 50}
    assert eval.interval(row, "avg") == "at most 6.0%"
    assert eval.interval(row | {"avg": 1.0}, "avg") == "at least 94.0%"
    assert eval.interval(row | {"avg": 0.5}, "avg") == "none"  # each problem half right


# ------------------------------------------------------------------- samples, and going on later


def place(out):
    """The folder of the one policy in a folder given as --out."""
    (log,) = out.glob("*/samples.jsonl")
    return log.parent


def samples(out):
    """Its samples in order."""
    drawn = rows(place(out) / "samples.jsonl")
    return sorted(drawn, key=lambda row: (row["set"], row["id"], row["sample"]))


def read(folder):
    return files.read_json(folder / "results.json")


def evaluation(world_dir, out, more=""):
    """The command line of three samples of each of twelve problems by the tests' model."""
    flags = f"--data {world_dir}/data.jsonl --samples 3 --max-new-tokens 8 --rows 5 --device cpu"
    return f"{world_dir}/model {flags} --verifier small_run:Exact --out {out} {more}".split()


def evaluate(world_dir, out, more=""):
    """The samples in order of an evaluation that succeeds."""
    completes(eval.main, evaluation(world_dir, out, more))
    return samples(out)


def test_the_papers_three_sets_are_the_default(world_dir, tmp_path, monkeypatch):
    def load(hub_id, name=None, *, split):
        return datasets.Dataset.from_list([{"problem": hub_id, "answer": "1"}] * 2)

    monkeypatch.setattr(datasets, "load_dataset", load)
    flags = f"--limit 1 --samples 1 --max-new-tokens 4 --out {tmp_path} --verifier small_run:Exact"
    first, *_ = completes(eval.main, [f"{world_dir}/model", *flags.split()]).splitlines()
    assert [row["set"] for row in samples(tmp_path)] == ["aime24", "aime25", "hmmt25"]
    assert f"{world_dir.name}--model, aime24: avg@1 0.0%" in first
    assert "--no-thinking" in first  # since most were cut


def test_a_killed_evaluation_goes_on_to_the_same_samples(world_dir, tmp_path):
    """One row at a time, so that it is exact: a batch's other rows can move a draw by rounding."""
    more = "--max-new-tokens 30 --samples 3 --rows 1 --limit 2"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    uninterrupted = evaluate(world_dir, whole, more)
    killed_at("samples.jsonl", evaluation(world_dir, killed, more), nth=3, program=eval.main)
    log = place(killed) / "samples.jsonl"
    before = log.read_text()
    log.write_text(before + '{"set": "da')  # a torn line
    refused(compare.main, [killed], "no results.json")
    assert evaluate(world_dir, killed, more) == uninterrupted
    assert log.read_text().startswith(before)
    assert read(place(whole)) == read(place(killed))


def test_a_sample_is_a_function_of_seed_problem_and_number(world_dir, tmp_path):
    """Other problems, a problem's id and set, the rows and the number of samples have no part."""
    whole = {row["id"]: [] for row in PROBLEMS}
    for row in evaluate(world_dir, tmp_path / "a"):
        assert row["engine"] == "generate"
        whole[row["id"]].append((row["digest"], row["text"]))
    part = [{**row, "id": f"new {row['id']}"} for row in reversed(PROBLEMS[3:7])]
    write_rows(tmp_path / "part.jsonl", part)
    more = f"--data {tmp_path}/part.jsonl --rows 2 --samples 2 --limit 3"
    drawn = evaluate(world_dir, tmp_path / "b", more)
    assert len(drawn) == 6
    for row in drawn:
        same = whole[row["id"].removeprefix("new ")][row["sample"]]
        assert (row["digest"], row["text"]) == same


class LateVerifier(small_run.Exact):
    """Each verdict takes too long."""

    def judge(self, cases):
        self.timeouts += len(cases)
        return super().judge(cases)


def evaluate_together(lines):
    """Evaluations of one rank, whose command lines these are."""
    world = distributed.init("cpu")
    for line in lines:
        eval.evaluate(small_run.parsed(line.split(), "eval"), world)
    return 0


def test_two_processes_give_the_samples_of_one_and_share_servers(world_dir, tmp_path):
    """Answers that took too long are counted on both."""
    one, shared, both, first = (tmp_path / name for name in ("one", "shared", "both", "first"))
    late = "--verifier test_eval:LateVerifier"
    whole = evaluate(world_dir, one, late)
    assert len(whole) == 36 and len({row["text"] for row in whole}) > 30
    with fake_engine.serving() as engine, fake_engine.serving() as other:
        lines = [" ".join(evaluation(world_dir, shared, late))]
        for out, servers in ((both, [engine, other]), (first, [engine])):
            urls = " ".join(server.url for server in servers)
            lines.append(" ".join(evaluation(world_dir, out, f"--server {urls}")))
        text, _ = run_two(lines, program=evaluate_together)
        assert len(engine.bodies()) == 18 + 36 and len(other.bodies()) == 18
    assert samples(shared) == whole and read(place(one)) == read(place(shared))
    assert len(samples(both)) == len(samples(first)) == 36
    (told,) = [line for line in text.splitlines() if "--verify-timeout" in line]
    assert told.split()[0] == "36"


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


FLAGS = "--samples 2 --limit 4 --max-new-tokens 8 --device cpu".split()


def command(*paths, data, more=""):
    more = f"--data {data} --verifier small_run:Exact {more}"
    return [*map(str, paths), *FLAGS, *more.split()]


def call(*paths, data, more=""):
    return completes(eval.main, command(*paths, data=data, more=more))


def test_each_policy_has_a_folder_and_each_set_is_added(world_dir, here, base):
    """A base, a run, another one that trains all weights, and a foreign adapter.

    results.json has a row per set over all calls, with each problem's count of right samples.
    """
    top, data = here.parent, world_dir / "data.jsonl"
    run, full, foreign = top / "run", top / "full", top / "foreign"
    steps = [run / "checkpoints/step_000001", run / "checkpoints/step_000002"]
    for seed, path in enumerate([*steps, foreign]):
        make_adapter(path, base, seed)
    save_model(full / "checkpoints/step_000001", seed=1)
    before = {path: path.read_bytes() for path in top.rglob("*") if path.is_file()}
    call(base, run, full, foreign, data=data)
    names = [f"{top.name}--model", "step_000001", "step_000002", f"{top.name}--foreign"]
    folders = [*(run / "eval" / name for name in names), full / "eval/step_000001"]
    texts = {tuple(row["text"] for row in rows(x / "samples.jsonl")) for x in folders}
    assert len(texts) == 5  # each policy has sampled, in a folder of its own
    assert read(folders[1])["data"]["right"] == {f"p{i}": 0 for i in range(4)}
    bases = [read(folder)["data"]["settings"]["the base's files"] for folder in folders]
    assert len({*bases[:4]}) == 1 and bases[4] != bases[0]
    assert all(path.read_bytes() == text for path, text in before.items())

    new = shutil.copy(data, top / "new.jsonl")
    call(base, run, data=new)
    assert [[*read(x)] for x in folders] == [["data", "new"]] * 3 + [["data"]] * 2
    written = {path for path in top.rglob("*") if path.is_file()} - {*before, new}
    assert all("eval" in path.parts for path in written)


def test_the_problems_that_a_run_was_trained_on_are_counted(world_dir, here, base):
    texts = [PROBLEMS[2]["problem"], PROBLEMS[1]["problem"].upper(), "another"]
    make_adapter(here / "run/checkpoints/step_000001", base)
    files.write_json(here / "run/problems.json", [problems.fingerprint(text) for text in texts])
    files.write_json(here / "run/config.json", {"settings": {}})
    printed = call(here / "run", data=world_dir / "data.jsonl")
    assert f"{here / 'run'} was trained on 2 of these 4" in printed


def write_run(run, base, **settings):
    """A run with a checkpoint, that trained with these settings."""
    make_adapter(run / "checkpoints/step_000001", base)
    files.write_json(run / "config.json", {"settings": settings})
    return run


def test_a_runs_verifier_and_fields_are_taken_over(here, base, monkeypatch):
    """For the plain model beside it, too. A mark goes with its field; sets that have a name keep
    mathematics. The samples are those of a command that names all."""
    run = write_run(
        here / "run", base, verifier="small_run:Exact", answer_field="target", answer_after="#"
    )
    lines = [{"problem": x["problem"], "target": f"so # {x['answer']}"} for x in PROBLEMS]
    write_rows(here / "data.jsonl", [x | {"answer": "# 5"} for x in lines])
    argv = [base, run, *FLAGS, "--data", "data.jsonl"]
    (line,) = [x for x in completes(eval.main, argv).splitlines() if "--verifier" in x]
    assert "--verifier=small_run:Exact --answer-field=target --answer-after=#" in line
    for folder in (run / "eval").iterdir():
        assert [x["gold"] for x in rows(folder / "samples.jsonl")[::2]] == ["3", "5", "7", "9"]
        assert "small_run:Exact" in read(folder)["data"]["settings"]["verifier"]
    given = "--verifier small_run:Exact --answer-field target".split()  # and the run's mark
    before = read(run / "eval/step_000001")
    completes(eval.main, [*argv, *given])
    assert len(rows(run / "eval/step_000001/samples.jsonl")) == 8
    assert read(run / "eval/step_000001") == before

    load = lambda *_, **__: datasets.Dataset.from_list([{"problem": "2 + 3?", "answer": 5}])  # noqa: E731
    monkeypatch.setattr(datasets, "load_dataset", load)
    flags = [run, *FLAGS, "--answer-field=answer", "--data", "aime24"]
    refused(eval.main, [*flags, "data.jsonl"], "aime24", "small_run:Exact", "--verifier")
    completes(eval.main, flags)
    settings = read(run / "eval/step_000001")["aime24"]["settings"]
    assert settings["verifier"] == "lib.verify:Verifier"
    completes(eval.main, [*flags[:-1], "data.jsonl"])
    log = rows(run / "eval/step_000001/samples.jsonl")
    assert [x["gold"] for x in log[8:]] == ["5"] * 2 + ["# 5"] * 8


def test_runs_that_trained_otherwise_are_one_line(here, base, world_dir):
    """An older run may lack a setting: it trained with the default."""
    one = write_run(here / "one", base, verifier="small_run:Exact")
    two = write_run(here / "two", base)
    argv = [one, two, *FLAGS, "--data", world_dir / "data.jsonl"]
    refused(eval.main, argv, "--verifier", "small_run:Exact", "lib.verify:Verifier")
    completes(eval.main, [*argv, "--verifier", "small_run:Exact"])


def test_a_sets_repeated_problems_are_counted(here, base):
    write_rows(here / "data.jsonl", [PROBLEMS[i] for i in (0, 1, 0, 0)])
    printed = call(base, data="data.jsonl")
    assert "data.jsonl: 2 of 4 problems" in printed and " tokens, 4 problems" in printed


@pytest.mark.parametrize("content", ["{", "[]", '{"data": 5}'])
def test_damaged_results_are_one_line_before_a_sample_is_drawn(content, here, base, world_dir):
    folder = here / "eval" / f"{here.parent.name}--model"
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(content)
    refused(eval.main, command(base, data=world_dir / "data.jsonl"), "results.json")
    assert not (folder / "samples.jsonl").exists()


def test_what_trls_trainer_leaves_beside_a_model_is_not_needed(here, base, world_dir):
    place = shutil.copytree(base, here / "run/checkpoints/step_000001")
    for name in ("trainer_state.json", "training_args.bin"):
        (place / name).write_text("{}")
    files.write_digests(place)
    for name in ("trainer_state.json", "training_args.bin"):
        (place / name).unlink()
    call(place, data=world_dir / "data.jsonl")


TINY = ROOT / "tiny"


def test_a_merged_checkpoint_decoded_by_plain_generate_gives_the_same_texts(here):
    """Greedily, one problem at a time, with nothing of ours but the words of the prompt's file."""
    import peft
    import torch
    import transformers

    place = here / "run/checkpoints/step_000001"
    make_adapter(place, TINY / "model")
    argv = f"{place} --data {TINY}/valid.jsonl --limit 20 --samples 1 --temperature 0 --rows 7"
    more = "--no-thinking --max-new-tokens 60 --device cpu --verifier small_run:Exact"
    completes(eval.main, [*argv.split(), *more.split()])
    drawn = {row["id"]: row for row in rows(here / "run/eval/step_000001/samples.jsonl")}
    lm = transformers.AutoModelForCausalLM.from_pretrained(TINY / "model", dtype=torch.float32)
    lm = peft.PeftModel.from_pretrained(lm, str(place)).merge_and_unload()
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY / "model")
    words, texts = (ROOT / "prompts/student.txt").read_text(), set()
    for x in rows(TINY / "valid.jsonl")[:20]:
        turn = [{"role": "user", "content": words.replace("{problem}", x["problem"])}]
        ids = tokenizer.apply_chat_template(
            turn, add_generation_prompt=True, enable_thinking=False, return_tensors="pt"
        )["input_ids"]
        reply = lm.generate(ids, do_sample=False, max_new_tokens=60)[0, ids.shape[1] :]
        text = tokenizer.decode(reply, skip_special_tokens=True)
        assert drawn[x["id"]]["text"] == text, x["id"]
        texts.add(text)
    assert len(texts) > 15


ORDER = "device dtype attn verifier verify_timeout skills temperature top_p top_k max_new_tokens"
ORDER += " thinking seed"


def test_samples_of_older_evaluations_are_found_again():
    """A sample's digest depends on which settings it has, and in which order."""
    settings = eval.sample_settings(eval.filled(config.EvalConfig(), []), small_run.ALONE)
    assert [*settings][:-2] == ORDER.split()
    del settings["the plain prompt"]
    assert files.digest(settings) == "2d33dc3afb0001ae"


WRONG = [  # paths and flags, where {w} has a bank, and words of the line
    ("../model begun", "begun: no model"),  # a run without a checkpoint
    ("../model data.jsonl", "problems with --data"),
    ("../model damaged", "damaged/adapter_model.safetensors"),
    ("../model moved", "give it as --model"),
    ("../model lacking", "model.safetensors"),
    ("../model --data {w}/data.jsonl {w}/data.jsonl", "two sets are data"),
    ("../model --skills {w}/bank.json", "--num-skills 8"),
    ("../model lacking --server http://127.0.0.1:9/v1", "one base model"),
]


@pytest.mark.parametrize("given, words", WRONG)
def test_a_wrong_evaluation_is_one_line(given, words, world_dir, here, base):
    """Each path is looked at, without the numbers of its weights."""
    for name in ("data.jsonl", "begun/problems.json", "begun/config.json"):
        files.write_json(here / name, {})
    for name in ("damaged", "moved"):
        make_adapter(here / name, base)
    files.write_digests(here / "damaged")
    (here / "damaged/adapter_model.safetensors").write_text("x")
    config = here / "moved/adapter_config.json"
    config.write_text(config.read_text().replace(str(base), "/no/such"))
    shutil.copytree(base, here / "lacking", ignore=shutil.ignore_patterns("*.safetensors"))
    argv = command(data=world_dir / "data.jsonl", more=given.format(w=world_dir))
    refused(eval.main, argv, words)
    assert not [*here.parent.rglob("samples.jsonl")]


# ------------------------------------------------------------------------ what a sample depends on

JUDGE = "import small_run\n\n\nclass Judge(small_run.Exact):\n    pass\n"


@pytest.fixture
def evaluated(here, base, monkeypatch):
    """Two samples of each of three problems: all that were ever drawn, and the figures."""
    monkeypatch.syspath_prepend(here)
    monkeypatch.delitem(sys.modules, "judge_of_samples", raising=False)
    (here / "judge_of_samples.py").write_text(JUDGE)
    write_rows(here / "data.jsonl", [x | {"level": y} for x, y in zip(PROBLEMS, (1, 3, 3))])

    def evaluate_again(more=""):
        call("../model", data="data.jsonl", more=f"--verifier judge_of_samples:Judge {more}")
        (log,) = here.glob("eval/*/samples.jsonl")
        return rows(log), read(log.parent)["data"]

    return evaluate_again


def test_other_flags_draw_what_is_missing_and_nothing_is_drawn_twice(
    evaluated, engine, monkeypatch
):
    drawn, first = evaluated()
    fewer, figures = evaluated("--samples 1")
    assert len(drawn) == 6 and fewer == drawn and figures["samples"] == 3
    assert "samples" in compare.differences(first, figures)
    colder, figures = evaluated("--temperature 0.6")
    assert len(colder) == 12 and colder[:6] == drawn
    assert "temperature" in compare.differences(first, figures)
    served, figures = evaluated(f"--server {engine.url}")
    assert len(served) == 18 and served[:12] == colder
    assert "engine" in compare.differences(first, figures)
    monkeypatch.setattr(model, "refuse_not_finite", None)  # no weights are loaded
    assert evaluated() == (served, first)


EDITS = {  # what is another in the figures: the edit of a file
    "verifier": ("judge_of_samples.py", "pass", "pass  # another"),
    "problems": ("data.jsonl", '"answer": "3"', '"answer": "4"'),
    "problems, of which a judge may read all": ("data.jsonl", '"level": 1', '"level": 2'),
    "the policy's files": ("../model/config.json", "0.25", "0.26"),
}


@pytest.mark.parametrize("what", EDITS)
def test_an_edit_draws_the_samples_that_it_concerns(what, here, evaluated):
    """Of one problem its two samples, else all six. Undone, it finds the first ones again."""
    file, old, new = EDITS[what]
    text = (here / file).read_text()
    drawn, first = evaluated()
    (here / file).write_text(text.replace(old, new))
    more_drawn, figures = evaluated()
    assert more_drawn[:6] == drawn and len(more_drawn) == (8 if "problems" in what else 12)
    assert what.partition(",")[0] in compare.differences(first, figures)
    (here / file).write_text(text)
    assert evaluated() == (more_drawn, first)


# ----------------------------------------------------------------------------------- Base + Skill


def test_base_skill_has_a_folder_of_its_own(world_dir, here):
    """Its samples are those of prompts with the retrieved pairs."""
    lm, tokenizer = model.load_model(f"{world_dir}/model", "cpu")
    bank = skills.SkillBank.load(world_dir / "bank.json")
    embed = model.load_encoder(f"{world_dir}/encoder", "cpu")
    data, name = world_dir / "data.jsonl", f"{world_dir.name}--model"
    flags = f"--skills {world_dir}/bank.json --encoder {world_dir}/encoder"
    call(world_dir / "model", data=data)
    printed = call(world_dir / "model", data=data, more=f"{flags} --num-skills 2")
    assert f"{name}--skills, data: " in printed
    for folder, count in {here / "eval" / name: 0, here / "eval" / f"{name}--skills": 2}.items():
        prompts, keys, drawn = [], [], rows(folder / "samples.jsonl")
        for row in drawn:
            problem = PROBLEMS[int(row["id"][1:])]["problem"]
            pairs = bank.retrieve(problem, count, embed) if count else []
            text = skills.render_skills(pairs, problem)
            prompts.append(rollout.chat_ids(tokenizer, text, thinking="bare"))
            keys.append(rollout.sample_key(0, 0, problem, row["sample"]))
        want = rollout.generate(lm, tokenizer, prompts, rollout.Sampling(1.0, 0.95, 0, 8), keys)
        assert [row["text"] for row in drawn] == [rollout.text_of(tokenizer, ids) for ids in want]


# -------------------------------------------------------------------------------------- a server


def test_no_skill_text_reaches_an_evaluation(world_dir, tmp_path, engine):
    """Without --skills every prompt is the student's, and no encoder is loaded; nor are weights
    where a server samples."""
    no_weights = shutil.ignore_patterns("*.safetensors")
    outline = shutil.copytree(world_dir / "model", tmp_path / "outline", ignore=no_weights)
    data = tmp_path / "d.jsonl"
    write_rows(data, [{"problem": "What is {skills}?", "answer": "5"}])
    more = f"--server {engine.url} --data {world_dir}/data.jsonl {data} --encoder no-such-encoder"
    completes(eval.main, [outline, *evaluation(world_dir, tmp_path / "out", more)[1:]])
    assert {row["engine"] for row in samples(tmp_path / "out")} == {"vllm"}
    tokenizer, wanted = make_tokenizer(), set()
    for problem in [*(x["problem"] for x in PROBLEMS), "What is {skills}?"]:
        text = skills.render_student(problem)
        wanted.add(tuple(rollout.chat_ids(tokenizer, text, thinking="bare")))
    assert {tuple(body["prompt"]) for body in engine.bodies()} == wanted


def test_a_servers_adapter_is_loaded_sampled_and_unloaded(world_dir, here, base, engine):
    """Also where the server refuses a request; the samples that came are kept. The base may be
    named by another path to it."""
    run, data = here.parent / "run", world_dir / "data.jsonl"
    steps = [run / "checkpoints/step_000001", run / "checkpoints/step_000002"]
    for seed, path in enumerate(steps):
        make_adapter(path, base, seed)
    argv = command("../model", run, data=data, more=f"--server {engine.url} --model ../model")
    engine.answer = lambda body: (400, "no") if len(engine.bodies()) > 21 else engine.sampled(body)
    refused(eval.main, argv, engine.url, "no")
    assert not engine.adapters
    engine.answer = engine.sampled
    completes(eval.main, argv)
    loads = engine.bodies("/v1/load_lora_adapter")
    assert [load["lora_path"] for load in loads] == [str(steps[i]) for i in (0, 1, 1)]
    assert not engine.adapters
    names = [load["lora_name"] for load in loads]
    used = [body["model"] for body in engine.bodies()]
    assert used[:21] == ["base"] * 8 + [names[0]] * 8 + [names[1]] * 5
    assert used[-3:] == [names[2]] * 3 and {*used[21:-3]} <= {names[1]}
