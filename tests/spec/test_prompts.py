"""Prompts: templates word for word, one pass of substitution, templates of another domain."""

import shutil
import types

import pytest
from conftest import ROOT, make_bank

import skills

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


def test_no_skill_text_stands_in_the_students_prompt():
    problem = "What is 1 plus 2?"
    assert skills.render_student(problem) == STUDENT.replace("{problem}", problem)
    assert skills.render_skills([], problem) == skills.render_student(problem)


def test_all_pairs_stand_in_one_prompt_best_first_above_the_students():
    """S14: a heading, then one bullet per entry; with one pair it is the teacher's prompt."""
    bank = make_bank()
    pairs = []
    for skill, mistake in zip(bank.general_skills[:2], bank.common_mistakes[:2]):
        pairs.append(skills.SkillPair(skill, mistake, 1.0, 1.0))
    assert skills.render_skills(pairs[:1], "P") == skills.render_teacher(pairs[0], "P")
    bullets = """### General Principles
- **Use add**: Always add with care.
  _Apply when: When you add._
- **Use carry**: Always carry with care.
  _Apply when: When you carry._

### Mistakes to Avoid
- **Don't**: Forgetting to add.
  **Instead**: Remember add.
- **Don't**: Forgetting to carry.
  **Instead**: Remember carry.

"""
    opening = TEACHER.partition("###")[0]
    assert skills.render_skills(pairs, "P") == opening + bullets + skills.render_student("P")


def test_a_merge_shows_three_fields_and_nothing_else():
    entry = make_bank().general_skills[0]
    fields = {name: entry[name] for name in skills.FIELDS["general_skills"]}
    text = skills.render_merge([{**entry, "sources": ["p1"]}] * 2, "general_skills")
    assert f"to merge:\n{skills.as_json([fields] * 2)}\n\nReturn ONLY" in text


# ----------------------------------------------------------------- templates of another domain


@pytest.fixture
def templates(tmp_path):
    """A copy of the paper's templates; its own come back after the test."""
    yield shutil.copytree(ROOT / "prompts", tmp_path / "templates")
    skills.use_prompts("")


def test_templates_of_another_domain_take_the_place_of_all_of_the_papers(templates):
    for file in templates.glob("*.txt"):
        file.write_text(file.read_text().replace("math", "puzzle"))
    memory = skills.memory_of(types.SimpleNamespace(problem="?", text="so", r=1, pred=None))
    pair = skills.SkillPair({"title": "T"}, {"description": "D"}, 1.0, 1.0)

    def prompts():
        texts = [skills.render("memory", {"problem": "?"}), skills.render_teacher(pair, "?")]
        for key in skills.FIELDS:
            texts += [skills.render_extraction(memory, key), skills.render_merge([], key)]
        return texts

    papers = prompts()
    skills.use_prompts(str(templates))
    assert prompts() == [text.replace("math", "puzzle") for text in papers] != papers
    skills.use_prompts("")
    assert prompts() == papers


SPOILT = [  # a template, what stands in it, what takes its place, and what the error says
    ("student", "{problem}", "{question}", "student.txt lacks {problem}"),
    ("memory", "{problem}", "", "memory.txt lacks {problem}"),
    ("extract_skills", "{memory_json}", "", "extract_skills.txt lacks {memory_json}"),
    ("merge_mistakes", "{items_json}", "", "merge_mistakes.txt lacks {items_json}"),
    ("teacher", "{skill.principle}", "{skill.title}", "teacher.txt lacks {skill.principle}"),
    ("teacher", "### Mistakes to Avoid\n", "", "teacher.txt must be: an opening"),
    ("teacher", "\n\n", "\n", "teacher.txt must be: an opening"),
    ("teacher", "step by step", "at once", "and then student.txt"),
]


@pytest.mark.parametrize("name,old,new,words", SPOILT)
def test_wrong_templates_are_one_line_and_those_in_use_stay(name, old, new, words, templates):
    file = templates / f"{name}.txt"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(ValueError) as error:
        skills.use_prompts(str(templates))
    line = str(error.value)
    assert line.startswith(f"prompts {templates}: ") and words in line and "\n" not in line
    assert skills.template("student") == STUDENT


def test_a_missing_template_is_one_line():
    words = (
        r"prompts no-such: extract_mistakes\.txt not read .*must have all files that prompts/ has"
    )
    with pytest.raises(ValueError, match=words):
        skills.use_prompts("no-such")
