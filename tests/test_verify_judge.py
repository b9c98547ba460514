"""The seam of the verdict: a judge of one's own, how it is named, what sees it; and --prompts."""

import dataclasses
import json
import shlex
import shutil
import sys
import types

import pytest
import torch
from conftest import PROBLEMS, ROOT, make_model
from driver import flags, refused, refused_without_torch, rows, settings

import config
import eval
import files
import inputs
import problems
import rollout
import sgsd
import skills
import verify
from cli import UserError
from problems import Problem

MINE = '''
import verify

class Even(verify.Judge):
    """Right is an even number."""

    def answer(self, text):
        return text.rpartition("=")[2].strip() or None

    def is_right(self, problem, answer):
        return answer.isdigit() and int(answer) % 2 == 0

class Missing(verify.Judge):
    """It decides nothing."""

class Unasked(verify.Verifier):
    def is_right(self, problem, answer):
        return True

class Stubborn(Even):
    def __init__(self):
        super().__init__()

class Other:
    """It is of another family."""
'''


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory, with a module of a domain in it that no other test has imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "mine.py").write_text(MINE)
    yield tmp_path
    sys.modules.pop("mine", None)
    skills.use_prompts("")


def test_a_judge_decides_by_the_answer_that_it_takes_from_the_text(here):
    x = Problem("0", "p", "no reference")
    with inputs.verifier_class("mine:Even")() as judge:
        verdicts = judge.judge([(x, "so = 4"), (x, "= 3"), (x, "nothing ="), (x, "= four")])
    assert verdicts == [("4", True), ("3", False), (None, False), ("four", False)]
    assert judge.judge([]) == [] and judge.timeouts == 0
    assert judge.same("4", "4") and not judge.same("4", "4.0")


def test_a_judge_by_default_takes_the_last_box_and_is_asked_nothing_without_one():
    asked = []

    class Recorder(verify.Judge):
        def is_right(self, problem, answer):
            return not asked.append((problem.extra, answer))

    x = Problem("0", "p", "1", {"level": 3})
    texts = [r"\boxed{1} and \boxed{2}", r"<think>\boxed{3}", "none"]
    verdicts = Recorder().judge([(x, text) for text in texts])
    assert verdicts == [("2", True), (None, False), (None, False)]
    assert asked == [({"level": 3}, "2")]


def test_the_mathematical_judge_knows_the_problem():
    """A copied formula is shown as the answer, and is wrong; in a batch as one by one."""
    asked, other = Problem("0", "What is 2 + 3?", "5"), Problem("1", "What is 4 + 1?", "5")
    with verify.Verifier() as judge:
        verdicts = judge.judge([(x, r"\boxed{2+3}") for x in (asked, other)] + [(asked, "5")])
        assert verdicts == [("2+3", False), ("2+3", True), (None, False)]
        assert [judge.is_right(x, "2+3") for x in (asked, other)] == [False, True]
        assert judge.same(r"\frac{1}{2}", "0.5") and not judge.same("1", "2")


def test_limits_that_make_no_sense_are_refused_for_every_judge():
    for wrong in ({"timeout_s": 0.0}, {"timeout_s": 1e7}, {"workers": 0}):
        with pytest.raises(ValueError, match="need timeout_s in 0..1e6 and workers >= 1"):
            verify.Judge(**wrong)


def test_a_success_is_an_outcome_above_zero():
    assert [verify.is_success(r) for r in (1, -1, 1.0, -1.0)] == [True, False, True, False]


def test_a_rollout_has_the_judges_answer_and_verdict(here, tokenizer):
    """A prompt that ends inside the thinking is told to the judge, and not kept as text."""
    seen = []

    class Recorder(verify.Judge):
        def judge(self, cases):
            seen.extend(text for _, text in cases)
            return [verify.Verdict("mine", True) for _ in cases]

    prompts = [tokenizer.encode(text) for text in ("x", "x<think>\n")]
    turn = [(1, tokenizer.encode("b")), (0, tokenizer.encode("a"))]
    data = [Problem("p", "x", "1"), Problem("q", "y", "2")]
    rolls = rollout.judge(make_model(), tokenizer, data, prompts, turn, Recorder())
    assert seen == ["<think>b", "a"]
    assert [(roll.problem_id, roll.gold, roll.text) for roll in rolls] == [
        ("q", "2", "b"),
        ("p", "1", "a"),
    ]
    assert {(roll.pred, roll.r) for roll in rolls} == {("mine", 1)}


def sample(problem, pred, r):
    row = {"digest": problem, "gold": "-", "truncated": False, "tokens": 1}
    return row | {"pred": pred, "r": r}


def test_a_majority_is_of_one_problem_and_never_of_right_and_wrong_answers_together():
    """The reference is no text that could be compared: the same answer is right in one problem."""
    policy = eval.Policy("x")
    data = [sample("p", "a", 1), sample("p", "A", 1), sample("p", "b", -1)]
    data += [sample("q", "b", 1), sample("q", "a", -1), sample("q", "A", -1)]
    for same in (lambda one, other: one.lower() == other.lower(), lambda one, other: True):
        eval.measure(policy, "d", data, 3, same)
        assert policy.table["d"]["maj"] == 0.5
    eval.measure(policy, "d", data, 3, lambda one, other: False)  # the first of three
    assert policy.table["d"]["maj"] == 1


NAMES = {  # a --verifier, and what is said of it
    "mine": "MODULE:CLASS is wanted",
    ":Even": "MODULE:CLASS is wanted",
    "nowhere:Even": "not imported (ModuleNotFoundError: No module named 'nowhere')",
    "broken:Even": "not imported (SyntaxError",
    "failing:Even": "not imported (ZeroDivisionError: division by zero)",
    "mine:Nope": "mine.py has no class Nope",
    "mine:verify": "mine.py has no class verify",
    "mine:Other": "Other must be a subclass of verify.Judge",
    "mine:Missing": "Missing must have the method is_right, or judge",
    "mine:Unasked": "Unasked's judge, of Verifier, never asks its is_right; write judge, too",
    "mine:Stubborn": "Stubborn must take timeout_s and workers",
}


def test_a_wrong_verifier_is_one_line_before_torch_is_imported(here):
    (here / "broken.py").write_text("def")
    (here / "failing.py").write_text("1 / 0")
    programs = ("sgsd.py", "baselines.py", "skills.py")
    commands = [[str(ROOT / "eval.py"), str(here), f"--verifier={name}"] for name in NAMES]
    wrong = ["--verifier=mine", "--out=new.json"]
    commands += [[str(ROOT / program), *wrong] for program in programs]
    lines = refused_without_torch(commands, here)
    for line, (name, words) in zip(lines, NAMES.items()):
        assert line.startswith(f"eval: --verifier {name}: ") and words in line
    for line, program in zip(lines[len(NAMES) :], programs):
        assert line.startswith(f"{program[:-3]}: --verifier mine: ")


def test_a_file_here_takes_no_place_of_one_of_ours(here):
    (here / "verify.py").write_text("class Verifier: pass")
    (here / "replies.py").write_text("1 / 0")
    assert inputs.verifier_class(config.Config.verifier) is verify.Verifier
    with pytest.raises(UserError, match=r"--verifier replies:X: .*/replies\.py has no class X"):
        inputs.verifier_class("replies:X")


def test_a_run_is_judged_recorded_and_evaluated_by_its_verifier(here, world_dir, capsys):
    """The judge accepts all; the evaluation at the end does so, too, and is told its prompts."""
    (here / "mine.py").write_text(
        "import verify\n\nclass Kind(verify.Judge):\n"
        "    def judge(self, cases):\n        return [verify.Verdict('x', True) for _ in cases]\n"
    )
    folder = shutil.copytree(ROOT / "prompts", here / "my prompts")
    student = (folder / "student.txt").read_text()
    teacher = (folder / "teacher.txt").read_text()
    asked = "Puzzle: {problem}"
    (folder / "student.txt").write_text(asked)
    (folder / "teacher.txt").write_text(teacher.replace(student, asked))
    out = here / "run"
    changes = {"updates": 1, "max_new_tokens": 8, "eval_samples": 1, "eval_tokens": 8}
    changes |= {"verifier": "mine:Kind", "prompts": folder, "eval_data": world_dir / "data.jsonl"}
    given = flags(world_dir, out, **changes)
    assert sgsd.main([*given, "--allow-eval-overlap"]) == 0
    assert {(row["pred"], row["r"]) for row in rows(out / "rollouts.jsonl")} == {("x", 1)}
    recorded = json.loads((out / "config.json").read_text())["settings"]
    assert (recorded["verifier"], recorded["prompts"]) == ("mine:Kind", str(folder))
    table = json.loads((out / "eval/step_000001/results.json").read_text())
    assert table["data"]["avg"] == 1
    output = capsys.readouterr().out
    again = output.partition("all checkpoints: python eval.py ")[2].partition("\n")[0]
    assert eval.main(shlex.split(again)) == 0
    text = skills.render_student("P")
    assert text == "Puzzle: P"
    for flag, name in (("--verifier=mine:Kind", "verifier"), (f"--prompts={folder}", "prompts")):
        words = [word for word in shlex.split(again) if word not in (flag, *flag.split("="))]
        assert len(words) == len(shlex.split(again)) - 2
        wanted = {"verifier": "verifier mine:Kind (", "prompts": ", now the pap"}
        refused(capsys, eval.main, words, "made with ", wanted[name], "give another --out")
    with open(here / "mine.py", "a") as file:  # the same name, and another verdict
        file.write("\n# other\n")
    refused(capsys, eval.main, shlex.split(again), "made with verifier mine:Kind (", "), now mine")


def test_samples_from_before_there_was_a_choice_are_those_of_the_default(here, world_dir):
    words = f"{world_dir}/model --data {world_dir}/data.jsonl --samples 1 --max-new-tokens 4"
    words += f" --device cpu --limit 2 --out {here}/out"
    assert eval.main(words.split()) == 0
    (file,) = here.glob("out/*/settings.json")
    saved = json.loads(file.read_text())
    assert saved.pop("verifier") == "verify:Verifier" and saved.pop("prompts") == "the paper's"
    file.write_text(json.dumps(saved))
    assert eval.main(words.split()) == 0


def test_a_problem_keeps_the_other_fields_of_its_row(here):
    row = {"id": "x", "problem": " p ", "answer": "1", "level": 3, "metadata": {"numbers": [1, 2]}}
    copy = row | {"id": "y", "level": 4}
    (here / "d.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(copy) + "\n")
    (x,), counts = problems.load_problems("d.jsonl")
    assert x.extra == {"level": 3, "metadata": {"numbers": [1, 2]}}
    assert counts["duplicates"] == 1 and counts["conflicting"] == 0
    bare = Problem("x", "p", "1")
    assert x == bare and hash(x) == hash(bare) and bare.extra == {}
    first, second = problems.load_set("d.jsonl", "test")
    assert (first.extra["level"], second.extra["level"]) == (3, 4)


def test_a_problem_whose_further_fields_changed_is_sampled_anew_for_a_judge_that_may_ask_them(
    here, world_dir
):
    """The judge of mathematics knows a row by problem and answer alone."""
    words = f"{world_dir}/model --data d.jsonl --samples 1 --max-new-tokens 4 --device cpu --out m"
    for fields in ({}, {"level": 3}):
        (here / "d.jsonl").write_text(json.dumps(PROBLEMS[0] | fields) + "\n")
        assert eval.main(words.split()) == 0
        (log,) = here.glob("m/*/samples.jsonl")
        assert len(rows(log)) == 1
    words = words.removesuffix("m") + "o --verifier mine:Even"
    digests = []
    for fields in ({}, {"level": 3}, {"level": 4}, {"level": 3}):
        (here / "d.jsonl").write_text(json.dumps(PROBLEMS[0] | fields) + "\n")
        assert eval.main(words.split()) == 0
        (log,) = here.glob("o/*/samples.jsonl")
        digests.append([row["digest"] for row in rows(log)])
    x = PROBLEMS[0]
    assert digests[0] == [files.digest(x["problem"], x["answer"])]
    assert [len(seen) for seen in digests] == [1, 2, 3, 3]


def spoilt(folder, name, old, new):
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "prompts", folder)
    file = folder / f"{name}.txt"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


PROMPTS = [  # a file, what stands in it, what takes its place, and what is said
    ("student", "{problem}", "{question}", "student.txt lacks {problem}"),
    ("memory", "{problem}", "", "memory.txt lacks {problem}"),
    ("extract_skills", "{memory_json}", "", "extract_skills.txt lacks {memory_json}"),
    ("merge_mistakes", "{items_json}", "", "merge_mistakes.txt lacks {items_json}"),
    (
        "teacher",
        "{skill.principle}",
        "{skill.title}",
        "teacher.txt lacks {skill.principle}",
    ),
    ("teacher", "### Mistakes to Avoid\n", "", "teacher.txt must be: an opening"),
    ("teacher", "\n\n", "\n", "teacher.txt must be: an opening"),
    ("teacher", "step by step", "at once", "and then student.txt"),
]


def test_wrong_prompts_are_one_line_before_torch_is_imported(here):
    commands = [[str(ROOT / "sgsd.py"), "--prompts=no-such"]]
    for number, (name, old, new, _) in enumerate(PROMPTS):
        spoilt(here / str(number), name, old, new)
        commands.append([str(ROOT / "eval.py"), str(here), f"--prompts={number}"])
    lines = refused_without_torch(commands, here)
    assert lines[0].startswith("sgsd: --prompts no-such: extract_mistakes.txt not read (FileNotF")
    for number, (line, (_, _, _, words)) in enumerate(zip(lines[1:], PROMPTS)):
        assert line.startswith(f"eval: --prompts {number}: ") and words in line


def test_templates_of_another_domain_take_the_place_of_all_of_the_papers(here):
    folder = shutil.copytree(ROOT / "prompts", here / "mine")
    for file in folder.glob("*.txt"):
        file.write_text(file.read_text().replace("math", "puzzle"))
    memory = skills.memory_of(types.SimpleNamespace(problem="?", text="so", r=1, pred=None))
    pair = skills.SkillPair({"title": "T"}, {"description": "D"}, 1.0, 1.0)

    def prompts():
        texts = [skills.render("memory", {"problem": "?"}), skills.render_teacher(pair, "?")]
        for key in skills.FIELDS:
            texts += [skills.render_extraction(memory, key), skills.render_merge([], key)]
        return texts

    papers = prompts()
    skills.use_prompts(str(folder))
    assert prompts() == [text.replace("math", "puzzle") for text in papers] != papers
    skills.use_prompts("")
    assert prompts() == papers


def test_seed_solutions_of_another_verdict_or_another_prompt_are_made_anew(here, world_dir):
    out = here / "bank.json"
    changes = {"cold_start": 2, "cold_start_tokens": 4, "reply_tokens": 4}
    given = settings(world_dir, out, **changes)
    del given["bank"]
    words = [f"{config.flag(name)}={value}" for name, value in given.items()]
    words.append("--allow-empty-bank")
    for verifier, lines in (("verify:Verifier", 2), ("verify:Verifier", 2), ("mine:Even", 4)):
        assert skills.main([*words, f"--verifier={verifier}"]) == 0
        assert len(rows(here / "bank.json.work/memories.jsonl")) == lines
    with open(here / "mine.py", "a") as file:  # a verdict that was mended is another one
        file.write("\n# mended\n")
    assert skills.main([*words, "--verifier=mine:Even"]) == 0
    assert len(rows(here / "bank.json.work/memories.jsonl")) == 6


def test_the_flags_of_a_runs_own_evaluation_name_its_domain():
    cfg = config.Config(out="x")
    assert "--verifier" not in eval.flags_of(cfg) and "--prompts" not in eval.flags_of(cfg)
    other = dataclasses.replace(cfg, verifier="mine:Even", prompts="my prompts")
    args = eval.arguments(["x", *shlex.split(eval.flags_of(other))])
    assert (args.verifier, args.prompts) == ("mine:Even", "my prompts")
    assert torch.get_num_threads() == 1
