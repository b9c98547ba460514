"""Problems: what is read, dropped and counted, what is refused, and a step's minibatch."""

import functools
import json

import datasets
import pytest
from conftest import one_line

from lib import problems
from lib.problems import Problem
from lib.run import load_training
from methods import opsd


def chat(problem, answer, index=0):
    """A row of DAPO-Math, whose problem is in a chat between boilerplate."""
    content = f"{problems.DAPO_PREFIX}\n\n{problem}\n\n{problems.DAPO_SUFFIX}"
    return {
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": index},
    }


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_dapo_is_stripped_filtered_and_deduplicated(tmp_path):
    """100 copies of five problems, one in Chinese, one whose copies disagree, one in LaTeX."""
    data = [chat(f"What is {i} + {i}?", str(2 * i), f"id{i}") for i in range(5)] * 100
    data += [chat("求 1 + 1 的值", "2", "zh"), chat("What is 3 + 3?", "7", "id3b")]
    data += [chat(r"$x$ is \boxed{?}", "34", "q")]
    datasets.Dataset.from_list(data).to_parquet(str(tmp_path / "dapo.parquet"))
    want = {"rows": 503, "not_english": 1, "duplicates": 496, "conflicting": 1, "kept": 5}
    for source in (tmp_path / "dapo.parquet", tmp_path):
        loaded, counts = problems.load_problems(str(source))
        assert counts == want
        assert [x.id for x in loaded] == ["id0", "id1", "id2", "id4", "q"]
        assert loaded[1] == Problem("id1", "What is 1 + 1?", "2")
        assert loaded[4].problem == r"$x$ is \boxed{?}"


def test_jsonl_keeps_its_order_and_gets_ids_that_differ(tmp_path):
    """A byte order mark is no part of the first row."""
    x, q = {"id": "x", "problem": " p ", "answer": " 1 "}, {"problem": "q", "answer": 2.0}
    source = tmp_path / "a.jsonl"
    write(source, x, q, {"id": "x", "problem": "r", "answer": 3}, q)
    source.write_bytes(b"\xef\xbb\xbf" + source.read_bytes())
    want = [Problem("x", "p", "1"), Problem("1", "q", "2"), Problem("x#2", "r", "3")]
    assert problems.load_problems(str(source))[0] == want
    want.append(Problem("3", "q", "2"))
    assert problems.load_problems(str(source), unique=False)[0] == want


def test_a_problem_keeps_the_other_fields_of_its_row(tmp_path):
    row = {"id": "x", "problem": "p", "answer": "1", "level": 3, "prompt": "not DAPO's"}
    source = write(tmp_path / "a.jsonl", row, row | {"id": "y", "level": 4, "reward_model": "y"})
    ((x,), _) = problems.load_problems(source)
    assert x.extra == {name: row[name] for name in ("problem", "answer", "level", "prompt")}
    assert x == Problem("x", "p", "1")


def test_what_teachers_see_is_a_text_of_each_row_word_for_word(tmp_path):
    row = {"problem": "p", "answer": " 6 is 2 * 3\n#### 6", "hint": " Halve it,\nthen add. "}
    source, load = write(tmp_path / "a.jsonl", row), problems.load_problems
    ((x,), _) = load(source, answer_after="####")
    assert opsd.with_answer(x, "hint") == f"p\n\n{row['hint']}"
    assert (x.answer, opsd.with_answer(x, "answer")) == ("6", f"p\n\n{row['answer']}")
    one_line(lambda: load(source, answer_after="="), "--answer-after", "'='")
    for value in (" \n", 7, ["h"], None):
        data = write(tmp_path / "b.jsonl", row, {"id": "q", "problem": "2", "hint": value})
        cfg = opsd.OPSDConfig(data=data, answer_field="problem", teacher_field="hint")
        one_line(lambda cfg=cfg: load_training(cfg), "--teacher-field hint", "problem q")


def test_a_float_is_taken_in_its_shortest_digits_without_an_exponent(tmp_path):
    """As mathematics 1e-05 would be read as e - 5."""
    values = {0.1: "0.1", -2.50: "-2.5", 1e-05: "0.00001", 1.5e-7: "0.00000015"}
    values[1e20] = f"1{'0' * 20}"
    data = [{"problem": str(value), "answer": value} for value in values]
    loaded, _ = problems.load_problems(write(tmp_path / "a.jsonl", *data))
    assert [x.answer for x in loaded] == [*values.values()]


def test_a_set_keeps_its_copies_and_refuses_two_answers_to_a_problem(tmp_path):
    copies = [{"problem": "p", "answer": "1"}, {"problem": "q", "answer": "2"}]
    source = write(tmp_path / "a.jsonl", *copies, copies[0])
    assert [x.problem for x in problems.load_set(source, "test")] == ["p", "q", "p"]
    write(tmp_path / "a.jsonl", *copies, {"problem": "p", "answer": "3"})
    words = f"{source}:3 ", "'3'", "'1'"
    one_line(lambda: problems.load_set(source, "test"), *words)


ROW = '{"problem": "p", "answer": "1"}\n'
BROKEN = {  # a file, and words of the line that refuses it
    "no rows": ("", "x.jsonl: ", "'rows': 0"),
    "no JSON": (ROW + '\n{"problem": oh}\n{', "x.jsonl:3: ", "column 13"),
    "a field of another name": ('{"problem": "p", "a": "1"}\n', "x.jsonl:1: ", "problem, a;"),
    "an empty field": (ROW + '{"problem": " ", "answer": "1"}\n', "x.jsonl:2: `problem`"),
    "an answer that nobody sees": (ROW + '{"problem": "q", "answer": "\\u200b"}\n', "x.jsonl:2: "),
    "a number that is none": (ROW + '{"problem": "q", "answer": NaN}\n', "x.jsonl:2: ", "nan"),
    "not UTF-8": (b"\xff\xfe\x00", "x.jsonl: ", "UTF-8"),
    "a worked solution": ('{"problem": "p", "answer": "x #### 1"}\n', "1: ", "--answer-after"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_the_first_broken_row_is_refused_with_file_line_and_cause(what, tmp_path):
    content, *words = BROKEN[what]
    file = tmp_path / "x.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    load = functools.partial(problems.load_problems, str(file), boxed=True)
    one_line(load, *words)


@pytest.mark.parametrize("name", ["no.jsonl", "no.parquet", "here/no", "./no", "x.csv", "here"])
def test_a_source_that_is_not_there_or_not_readable_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here/train.jsonl").write_text(ROW + "{\n")
    (tmp_path / "x.csv").write_text("problem,answer\n")
    cause = "No such file" if name == "no.jsonl" else "not read"
    one_line(lambda: problems.load_problems(name), f"{name}: {cause}")


ON_THE_HUB = {  # the answer of each set, as it is stored and as it is read
    "aime24": ("025", "025"),
    "aime25": (25, "25"),
    "aime26": (70, "70"),
    "hmmt25": ("\\pi", "\\pi"),
    "math500": ("1", "1"),
    "amc23": (27.0, "27"),
    "gsm8k": ("2+2=<<2+2=4>>4\n#### 1,234", "1,234"),
}


@pytest.mark.parametrize("set_name", problems.SETS)
def test_sets_by_name_are_read_from_the_hub_with_answers_as_text(set_name, monkeypatch):
    stored, answer = ON_THE_HUB[set_name]

    def load(hub_id, name, split):
        source = f"{hub_id}:{name}" if name else hub_id
        assert (source, split) == problems.SETS[set_name][:2]
        field = "question" if set_name in ("amc23", "gsm8k") else "problem"
        return datasets.Dataset.from_list([{"id": 60, field: " p ", "answer": stored}] * 2)

    monkeypatch.setattr(datasets, "load_dataset", load)
    copies = [Problem("60", "p", answer), Problem("60#1", "p", answer)]
    assert problems.load_set(set_name, "unused") == copies


def test_problems_of_the_papers_evaluation_sets_are_refused_as_training_data_by_all_their_ids():
    """Letters and digits decide."""
    problems.refuse_overlap([Problem("a", "Find  x.", "1")], "train.jsonl")
    texts = [
        "Find x.",
        "FIND the largest possible real part of (75+117i)z + \\frac{96+144i}{z} where z is a "
        "complex number with |z| = 4",
        "Find the sum of all integer bases b > 9 for which 17_b is a divisor of 97_b",
        "Let $r$ be the remainder when $2017^{2025!}-1$ is divided by $2025!$. Compute "
        "$\\frac{r}{2025!}$. (Note that 2017 is prime)",
    ]
    train = [Problem(str(i), text, "1") for i, text in enumerate(texts)]
    words = "train.jsonl: 3 ", "1 (aime24), 2 (aime25), 3 (hmmt25)"
    one_line(lambda: problems.refuse_overlap(train, "train.jsonl"), *words)


def test_the_order_of_minibatches_is_fixed_by_the_seed():
    """Golden: another order would be another run for every seed. Each epoch has all once."""
    data = [Problem(str(i), "x", "1") for i in range(10)]

    def order(step, seed, data=data):
        """Ids of a step's five problems, each with its epoch."""
        return " ".join(f"{x.id}:{epoch}" for x, epoch in problems.minibatch(data, 5, step, seed))

    assert order(1, seed=3) == "4:0 5:0 0:0 1:0 2:0"
    assert order(2, seed=3) == "8:0 3:0 6:0 9:0 7:0"
    assert order(3, seed=3) == "1:1 9:1 5:1 6:1 4:1"
    assert order(1, seed=0) == "4:0 1:0 7:0 5:0 3:0"
    epochs = order(1, seed=0, data=data[:2]).replace("0:", ":").replace("1:", ":")
    assert epochs == ":0 :0 :1 :1 :2"  # two epochs and a half
