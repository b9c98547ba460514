"""Templates word for word, one pass of substitution, no skill text in a student's prompt."""

import types

import pytest
import torch
from conftest import ROOT, make_bank
from driver import rows, train

import eval
import skills
from distributed import World
from problems import Problem

STUDENT = (
    "Problem: {problem}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
)
TEACHER = """You may use the following retrieved math-reasoning guidance as soft guidance.
Solve the current problem independently and do not quote it verbatim.

### General Principles
- **{skill.title}**: {skill.principle}
  _Apply when: {skill.when_to_apply}_

### Mistakes to Avoid
- **Don't**: {mistake.description}
  **Instead**: {mistake.how_to_avoid}

"""
PAPER = ROOT.parent / "shared" / "paper.tex"
CARDS = ["memory", "extract_skills", "extract_mistakes", "merge_skills", "merge_mistakes"]


def papers_cards():
    """The lines of each prompt card in the paper's source, its TeX taken off."""
    text = PAPER.read_text()
    text = text.replace("\\textbackslash ", "\\").replace("\\_", "_")
    text = text.replace("\\{", "{").replace("\\}", "}")
    for key in skills.FIELDS:
        text = text.replace(f"\\texttt{{{key}}}", key)
    cards = []
    for card in text.split("\\begin{promptcard}{Prompt: ")[1:]:
        lines = card.split("\\end{promptcard}")[0].split("\n")[2:]
        lines = [line.removesuffix("\\par") for line in lines]
        cards.append([line for line in lines if line and not line.startswith("\\vspace")])
    return cards


def test_the_student_and_teacher_templates_are_those_of_figure_6():
    assert skills.template("student") == STUDENT
    assert skills.template("teacher") == TEACHER + STUDENT


@pytest.mark.skipif(not PAPER.exists(), reason="the paper's source is not here")
@pytest.mark.parametrize("name", CARDS)
def test_a_template_has_the_lines_of_the_papers_card(name):
    lines = [line for line in skills.template(name).split("\n") if line]
    assert lines in papers_cards()


def test_what_is_put_into_a_prompt_is_not_expanded_again():
    bank = make_bank()
    pair = skills.SkillPair(bank.general_skills[0], bank.common_mistakes[0], 1.0, 1.0)
    pair.skill["title"] = "{problem} {mistake.description}"
    text = skills.render_teacher(pair, "What is {skill.title} \\boxed{} {{}} {0}?")
    assert "- **{problem} {mistake.description}**" in text
    assert "Problem: What is {skill.title} \\boxed{} {{}} {0}?\n" in text


def test_double_braces_become_single_ones_in_the_template_alone():
    """S9."""
    text = skills.render("memory", {"problem": "{{}}"})
    assert text.count("\\boxed{}.") == 1 and text.endswith("Problem:\n{{}}")


@pytest.mark.parametrize("key", skills.FIELDS)
def test_the_extraction_prompt_names_the_fields_behind_the_template(key):
    """S13."""
    solved = types.SimpleNamespace(problem="What?", text="so", r=1, pred=None)
    memory = skills.memory_of(solved)
    _, _, form = skills.render_extraction(memory, key).partition(f"valid JSON with key {key}.")
    names = '"{}", "{}" and "{}"'.format(*skills.FIELDS[key])
    assert form == f"\nEach item is an object with the string fields {names}."


def test_no_skill_text_reaches_a_student(world_dir, tmp_path):
    run = train(world_dir, tmp_path / "run", updates=1)
    for row in rows(tmp_path / "run/rollouts.jsonl"):
        text = run.tokenizer.decode(row["prompt_ids"])
        assert skills.render_student(row["problem"]) in text and "guidance" not in text
        for entry in run.bank.general_skills + run.bank.common_mistakes:
            assert not any(value in text for value in entry.values())


def test_no_skill_text_reaches_an_evaluation(world_dir):
    """Without --skills every prompt is the student's, and no encoder is loaded."""
    args = eval.arguments([str(world_dir / "model"), "--data", "x", "--encoder", "/no/such"])
    prompt = eval.prompt_maker(args, World(0, 1, torch.device("cpu")))
    x = Problem("0", "What is {skills}?", "5")
    assert prompt(x) == skills.render_student(x.problem)
