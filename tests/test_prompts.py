"""Templates word for word, one pass of substitution, and no skill text in a student's or an evaluation prompt."""

import json

import pytest
from conftest import ROOT, make_bank
from test_train import make_run

import eval as E
import sgsd
import skills as S

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


def test_student_and_teacher_templates():
    assert S.template("student") == STUDENT
    assert S.template("teacher") == TEACHER + STUDENT


@pytest.mark.skipif(not PAPER.exists(), reason="the paper's source is not here")
@pytest.mark.parametrize(
    "name", ["memory", "extract_skills", "extract_mistakes", "merge_skills", "merge_mistakes"]
)
def test_templates_are_the_papers(name):
    """Every line of the template stands in the paper, and every line of the paper's card in the template, in order."""
    tex = PAPER.read_text()
    plain = (
        tex.replace("\\textbackslash ", "\\")
        .replace("\\_", "_")
        .replace("\\{", "{")
        .replace("\\}", "}")
        .replace("\\texttt{general_skills}", "general_skills")
    )
    cards = [
        c.split("\\end{promptcard}")[0]
        for c in plain.replace("\\texttt{common_mistakes}", "common_mistakes").split(
            "\\begin{promptcard}{Prompt: "
        )[1:]
    ]
    lines = [
        [x.removesuffix("\\par") for x in c.split("\n")[2:] if x and not x.startswith("\\vspace")]
        for c in cards
    ]
    assert [x for x in S.template(name).split("\n") if x] in lines


def test_rendering_is_one_pass_and_leaves_braces_alone():
    pair = S.SkillPair(make_bank().general_skills[0], make_bank().common_mistakes[0], 1.0, 1.0)
    pair.skill["title"] = "{problem} {mistake.description}"
    text = S.render_teacher(pair, "What is {skill.title} \\boxed{} {{}} {0}?")
    assert (
        "- **{problem} {mistake.description}**" in text
        and "What is {skill.title} \\boxed{} {{}} {0}?" in text
    )
    assert text.endswith("\\boxed{}.")
    assert S.render_student("a{problem}b").startswith("Problem: a{problem}b\n")
    assert S.render("memory", {"problem": "{{}}"}).count("\\boxed{}.") == 1  # S9
    assert S.render("memory", {"problem": "{{}}"}).endswith("{{}}")


def test_no_skill_text_reaches_a_student(world_dir, tmp_path):
    run = make_run(world_dir, tmp_path / "run")
    records, _ = sgsd.accumulate(run, 1)
    words = [str(v) for key in S.FIELDS for e in getattr(run.bank, key) for v in e.values()]
    for r in records:
        text = run.tokenizer.decode(r["prompt_ids"])
        assert (
            f"Problem: {r['problem']}\n" in text
            and not any(w in text for w in words)
            and "guidance" not in text
        )


def test_no_skill_text_reaches_an_evaluation(world_dir, tmp_path, monkeypatch):
    """Without --skills no bank is read and no encoder loaded; and every prompt is the student's (with it: `test_eval.py`)."""
    monkeypatch.setattr(S.SkillBank, "load", lambda *_: pytest.fail("a bank was read"))
    monkeypatch.setattr(S, "load_encoder", lambda *_: pytest.fail("an encoder was loaded"))
    seen = []
    keep = E.R.chat_ids
    monkeypatch.setattr(
        E.R, "chat_ids", lambda tok, text, **kw: seen.append(text) or keep(tok, text, **kw)
    )
    assert (
        E.main(
            [
                str(world_dir / "model"),
                "--data",
                str(world_dir / "data.jsonl"),
                "--samples",
                "2",
                "--max-new-tokens",
                "4",
                "--out",
                str(tmp_path),
            ]
        )
        == 0
    )
    problems = [json.loads(x)["problem"] for x in open(world_dir / "data.jsonl")]
    assert {*seen} == {S.render_student(p) for p in problems}
