"""Eq. 3, Fig. 6 and App. D: the paper's prompts word for word, and how they become ids.

Tabs. 6-10 are the prompts of Algorithms 2-4; where the paper's source lies beside the project, they
are compared with it line by line.
"""

import pytest
from conftest import ROOT, make_bank, make_tokenizer, one_line

import rollout
import skills
from skills import SkillPair

STUDENT = """Problem: {problem}

Please reason step by step, and put your final answer within \\boxed{}."""
OPENING = """You may use the following retrieved math-reasoning guidance as soft guidance.
Solve the current problem independently and do not quote it verbatim.

"""
TEACHER = """### General Principles
- **{skill.title}**: {skill.principle}
  _Apply when: {skill.when_to_apply}_

### Mistakes to Avoid
- **Don't**: {mistake.description}
  **Instead**: {mistake.how_to_avoid}

"""
PAPER = ROOT.parent / "shared" / "paper.tex"
needs_the_paper = pytest.mark.skipif(not PAPER.exists(), reason="the paper's source is not here")


def test_the_student_sees_the_problem_and_nothing_else():
    assert skills.render_student("What is 1+2?") == STUDENT.replace("{problem}", "What is 1+2?")
    assert skills.render_skills([], "What is 1+2?") == skills.render_student("What is 1+2?")


def test_eq3_a_teachers_prompt_is_its_skill_its_mistake_and_the_students():
    """Entries whose texts are the figure's placeholders give the figure."""
    skill = {name: f"{{skill.{name}}}" for name in skills.KINDS["general_skills"].fields}
    mistake = {name: f"{{mistake.{name}}}" for name in skills.KINDS["common_mistakes"].fields}
    text = skills.render_teacher(SkillPair(skill, mistake, 1.0, 1.0), "{problem}")
    assert text == OPENING + TEACHER + STUDENT


@needs_the_paper
def test_figure_6_above_is_the_papers():
    figures = PAPER.read_text().split("\\begin{verbatim}\n")[1:3]
    student, teacher = (figure.split("\n\\end{verbatim}")[0] for figure in figures)
    assert (student, teacher) == (STUDENT, OPENING + TEACHER + STUDENT)


def pairs(n):
    bank = make_bank()
    entries = zip(bank.general_skills[:n], bank.common_mistakes[:n])
    return [SkillPair(skill, mistake, 1.0, 1.0) for skill, mistake in entries]


def test_all_pairs_stand_in_one_prompt_best_first_above_the_students():
    """S14: a heading, then one bullet per entry; with one pair it is the teacher's prompt."""
    assert skills.render_skills(pairs(1), "P") == skills.render_teacher(pairs(1)[0], "P")
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
    assert skills.render_skills(pairs(2), "P") == OPENING + bullets + skills.render_student("P")


def test_what_is_put_into_a_prompt_is_not_expanded_again():
    (pair,) = pairs(1)
    pair.skill["title"] = "{problem} {description}"
    text = skills.render_teacher(pair, "What is {title} {skills} \\boxed{} {{}} {0}?")
    assert "- **{problem} {description}**" in text
    assert "Problem: What is {title} {skills} \\boxed{} {{}} {0}?\n" in text


def papers_cards():
    """The lines of each prompt card in the paper's source, its TeX taken off."""
    text = PAPER.read_text()
    text = text.replace("\\textbackslash ", "\\").replace("\\_", "_")
    text = text.replace("\\{", "{").replace("\\}", "}")
    for key in skills.KINDS:
        text = text.replace(f"\\texttt{{{key}}}", key)
    cards = []
    for card in text.split("\\begin{promptcard}{Prompt: ")[1:]:
        lines = card.split("\\end{promptcard}")[0].split("\n")[2:]
        lines = [line.removesuffix("\\par") for line in lines]
        cards.append([line for line in lines if line and not line.startswith("\\vspace")])
    return cards


CARDS = ["seed_problem", "extract_skills", "extract_mistakes", "merge_skills", "merge_mistakes"]


@needs_the_paper
@pytest.mark.parametrize("table, name", list(enumerate(CARDS, 6)))
def test_a_template_has_the_lines_of_the_papers_card(table, name):
    lines = [line for line in skills.template(name).split("\n") if line]
    assert lines == papers_cards()[table - 6]


def test_double_braces_become_single_ones_in_the_template_alone():
    """S9."""
    text = skills.render("seed_problem", {"problem": "{{}}"})
    assert text.count("\\boxed{}.") == 1 and text.endswith("Problem:\n{{}}")


@pytest.mark.parametrize("key", skills.KINDS)
def test_the_extraction_prompt_shows_the_memory_and_names_the_fields_of_alg_2(key):
    """S13. What only we need to know of a memory is not shown."""
    memory = {"problem_id": "p1", "problem": "What?", "reward": 1, "truncated": False}
    shown = skills.as_json({"problem": "What?", "reward": 1})
    text, _, form = skills.render_extraction(memory, key).partition(f"JSON with key {key}.")
    assert f"memory:\n{shown}\n\nReturn" in text
    names = '"{}", "{}" and "{}"'.format(*skills.KINDS[key].fields)
    assert form == f"\nEach item is an object with the string fields {names}."


def test_a_merge_shows_three_fields_and_nothing_else():
    entry = make_bank().general_skills[0]
    fields = {name: entry[name] for name in skills.KINDS["general_skills"].fields}
    text = skills.render_merge([{**entry, "sources": ["p1"]}] * 2, "general_skills")
    assert f"to merge:\n{skills.as_json([fields] * 2)}\n\nReturn ONLY" in text


def test_a_prompt_is_one_user_turn_whose_think_block_is_closed_bare_or_open(tokenizer):
    """S3."""
    turn = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    ends = {"closed": "<think>\n\n</think>\n\n", "bare": "", "open": "<think>\n"}
    for thinking, end in ends.items():
        ids = rollout.chat_ids(tokenizer, "x", thinking=thinking)
        assert tokenizer.decode(ids) == turn + end
    one_line(lambda: rollout.chat_ids(tokenizer, "x", thinking=False), "got False")


def test_control_tokens_in_a_text_are_broken_up(tokenizer):
    ids = rollout.chat_ids(tokenizer, "a<|im_end|>b</think>\ud800", thinking="bare")
    text = "<|im_start|>user\na< |im_end|>b< /think>?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids) == text


def test_a_template_that_shows_the_date_shows_the_same_one_every_day():
    """S24."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% if date_string is not defined %}"
        "{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
        "{{ date_string }} {{ messages[0].content }}"
    )
    ids = rollout.chat_ids(tokenizer, "x", thinking="bare")
    assert tokenizer.decode(ids) == "26 Jul 2024 x"
