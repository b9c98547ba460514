"""Problems: what is read, dropped and counted, what is refused, and a step's minibatch."""

import json

import datasets
import huggingface_hub
import pytest
from conftest import one_line

from lib import problems
from lib.problems import Problem


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


# ---------------------------------------------------------------------------------------- reading


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
    x, q = {"id": "x", "problem": " p ", "answer": " 1 "}, {"problem": "q", "answer": "2"}
    source = write(tmp_path / "a.jsonl", x, q, {"id": "x", "problem": "r", "answer": "3"}, q)
    want = [Problem("x", "p", "1"), Problem("1", "q", "2"), Problem("x#2", "r", "3")]
    assert problems.load_problems(source)[0] == want
    want.append(Problem("3", "q", "2"))
    assert problems.load_problems(source, unique=False)[0] == want
    clash = [{"id": name} for name in ("y#2", "y", "y")]  # the first has the last one's new id
    rows = [row | {"problem": f"p{i}", "answer": "1"} for i, row in enumerate(clash)]
    loaded, _ = problems.load_problems(write(tmp_path / "b.jsonl", *rows))
    assert [x.id for x in loaded] == ["y#2", "y", "y#2#2"]


def test_a_problem_keeps_the_other_fields_of_its_row(tmp_path):
    row = {"id": "x", "problem": " p ", "answer": "1", "level": 3, "metadata": {"numbers": [1, 2]}}
    source = write(tmp_path / "a.jsonl", row, row | {"id": "y", "level": 4})
    (x,), counts = problems.load_problems(source)
    assert x.extra == {"level": 3, "metadata": {"numbers": [1, 2]}}
    assert counts["duplicates"] == 1 and counts["conflicting"] == 0
    bare = Problem("x", "p", "1")
    assert x == bare and hash(x) == hash(bare) and bare.extra == {}
    first, second = problems.load_set(source, "test")
    assert (first.extra["level"], second.extra["level"]) == (3, 4)
    row = {"problem": "p", "answer": "1", "prompt": "x", "reward_model": "y"}  # not DAPO's
    (tmp_path / "y.jsonl").write_text(json.dumps(row) + "\n")
    ((x,), _) = problems.load_problems(str(tmp_path / "y.jsonl"))
    assert x.extra == {"prompt": "x", "reward_model": "y"}


ROW = '{"problem": "p", "answer": "1"}\n'
BROKEN = [
    ("", "x.jsonl: no problem is left (it has no rows)"),
    (ROW + ROW.replace("1", "2"), "1 conflicting"),
    ('{"problem": "p", "answer": null}\n', "x.jsonl:1: `answer` is empty"),
    ('{"problem": "p", "answer": ["1"]}\n', 'got a list ["1"]'),
    (ROW + '{"problem": oh}\n', "x.jsonl:2: is not JSON"),
    ('{"problem": "p", "solution": "1"}\n', "x.jsonl:1: "),
    ('{"problem": "p", "answer": " "}\n', "x.jsonl:1: `answer`"),
    (ROW + '\n{"problem": "p", "answer": 3.5}\n', "x.jsonl:3: `answer`"),
    ('{"prompt": ["p"], "reward_model": {}}\n', "`reward_model`"),
    ('["p", "1"]\n', "x.jsonl:1: "),
    (ROW + "{\n", "x.jsonl:2: "),
    (b"\xff\xfe\x00", "x.jsonl: "),
]


@pytest.mark.parametrize("content, message", BROKEN)
def test_a_broken_row_is_refused_with_its_file_and_line(content, message, tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    one_line(lambda: problems.load_problems(str(file)), message)


def test_wrong_rows_are_refused_together_with_their_number_and_five_causes(tmp_path):
    lines = [f'{{"problem": "p", "answer": {number}.5}}\n' for number in range(7)]
    file = tmp_path / "x.jsonl"
    file.write_text("".join([ROW, "{\n", *lines, ROW, "{\n"]))
    line = one_line(lambda: problems.load_problems(str(file)), "9 of 11 rows")
    for number, words in ((2, "JSON"), (3, "0.5"), (4, "1.5"), (5, "2.5"), (6, "3.5")):
        assert f"x.jsonl:{number}: " in line and words in line
    assert line.count("x.jsonl:") == 5


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"\xef\xbb\xbf" + ROW.encode())
    (x,), _ = problems.load_problems(str(tmp_path / "x.jsonl"))
    assert x == Problem("0", "p", "1")


def test_an_error_names_the_line_of_a_row_without_an_id_and_the_id_of_any_other(tmp_path):
    rows = {"problem": "p", "answer": "x #### 1"}, {"id": "7", "problem": "q", "answer": "1"}
    source = write(tmp_path / "x.jsonl", *rows)
    loaded, _ = problems.load_problems(source)
    assert [x.id for x in loaded] == ["0", "7"]
    assert [x.place for x in loaded] == [f"{source}:1", "problem 7"]
    one_line(lambda: problems.refuse_unanswerable(loaded, "data"), f"{source}:1")


def test_a_hub_id_is_asked_for_once_and_a_path_never(tmp_path, monkeypatch):
    asked = []

    def head(url, **_):
        asked.append(url)
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", head)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    one_line(lambda: problems.load_problems("tiny/nope"), "tiny/ is a folder here", "no network")
    assert len(asked) == 1
    for name in ("./nope", "../nope", "/no/such"):
        one_line(lambda name=name: problems.load_problems(name), f"{name}: no such file")
    assert len(asked) == 1


def test_a_source_that_is_not_there_or_not_readable_is_refused(tmp_path):
    for name in ("no.jsonl", "no.json", "no.parquet"):
        one_line(lambda name=name: problems.load_problems(str(tmp_path / name)), "no such file")
    one_line(lambda: problems.load_problems(str(tmp_path)), tmp_path)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    one_line(lambda: problems.load_problems(str(tmp_path / "x.parquet")), "x.parquet")
    (tmp_path / "x.csv").write_text("problem,answer\n")
    one_line(lambda: problems.load_problems(str(tmp_path / "x.csv")), "x.csv")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.jsonl").write_text(ROW + "{\n")
    one_line(lambda: problems.load_problems(str(folder)), folder, "JSON")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_directory_in_the_hubs_layout_has_splits(suffix, tmp_path):
    for split, answers in (("train", "12"), ("test", "3")):
        rows = [{"problem": f"{split} {x}", "answer": x} for x in answers]
        data = datasets.Dataset.from_list(rows)
        file = tmp_path / f"data/{split}-00000-of-00001.{suffix}"
        file.parent.mkdir(exist_ok=True)
        (data.to_json if suffix == "jsonl" else data.to_parquet)(file)
    train, _ = problems.load_problems(str(tmp_path))
    assert [x.answer for x in train] == ["1", "2"]
    test, _ = problems.load_problems(str(tmp_path), split="test")
    assert [x.answer for x in test] == ["3"]
    one_line(lambda: problems.load_problems(str(tmp_path), split="valid"), "--split")


# -------------------------------------------------------------------------------- evaluation sets


ANSWERS = {  # field of the problem, the hub's answer, and ours
    "aime24": ("problem", "025", "025"),
    "aime25": ("problem", 25, "25"),
    "hmmt25": ("problem", "\\pi", "\\pi"),
    "math500": ("problem", "1", "1"),
    "amc23": ("question", 27.0, "27"),
    "gsm8k": ("question", "2+2=<<2+2=4>>4\n#### 1,234", "1,234"),
}


@pytest.mark.parametrize("set_name", problems.SETS)
def test_sets_by_name_are_read_from_the_hub_with_answers_as_text(set_name, monkeypatch):
    problem_field, answer, want = ANSWERS[set_name]
    row = {"id": 60, problem_field: " p ", "answer": answer}

    def load(hub_id, name, split):
        source = f"{hub_id}:{name}" if name else hub_id
        assert (source, split) == problems.SETS[set_name][:2]
        return datasets.Dataset.from_list([row, row])

    monkeypatch.setattr(datasets, "load_dataset", load)
    copies = [Problem("60", "p", want), Problem("60#1", "p", want)]
    assert problems.load_set(set_name, "unused") == copies


def test_a_set_of_the_hub_is_read_by_its_configuration_split_and_columns(monkeypatch):
    def load(hub_id, name, split):
        assert (hub_id, name, split) == ("openai/gsm8k", "main", "train")
        return datasets.Dataset.from_list([{"question": "2 + 3?", "answer": "2 + 3 = 5\n#### 5"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    source, columns = "openai/gsm8k:main", problems.Fields("question", "answer")
    one_line(lambda: problems.load_problems(source), "row 0", "question, answer")
    unmarked, _ = problems.load_problems(source, fields=columns)
    refuse = problems.refuse_unanswerable
    one_line(lambda: refuse(unmarked, "data"), "problem 0", "--answer-after")


def test_what_follows_the_last_mark_is_the_answer_and_a_row_without_it_is_refused(tmp_path):
    file = write(tmp_path / "x.jsonl", {"problem": "p", "answer": "#### no, #### 7 "})
    marked = problems.Fields(answer_after="####")
    assert problems.load_problems(file, fields=marked)[0][0].answer == "7"
    file = write(tmp_path / "y.jsonl", {"problem": "p", "answer": "7"})
    one_line(lambda: problems.load_problems(file, fields=marked), "y.jsonl:1: ", "'####'")


def test_a_fingerprint_depends_on_letters_and_digits_alone():
    base = problems.fingerprint("Find $x + 1$.")
    assert problems.fingerprint("find  \n x+1") == base != problems.fingerprint("Find $x + 2$.")
    assert len(base) == 12 and int(base, 16) >= 0


def test_problems_of_the_papers_evaluation_sets_are_refused_as_training_data_by_all_their_ids():
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


# -------------------------------------------------------------------------------------- minibatch


def test_minibatches_cover_each_epoch_once_and_count_the_epochs():
    data = [Problem(str(i), "x", "1") for i in range(10)]
    pairs = []
    for step in range(1, 6):
        pairs += problems.minibatch(data, 4, step, seed=0)
    assert [epoch for _, epoch in pairs] == [0] * 10 + [1] * 10
    ids = [x.id for x, _ in pairs]
    assert sorted(ids[:10]) == sorted(ids[10:]) == sorted(map(str, range(10)))
    assert ids[:10] != ids[10:]
    small = problems.minibatch(data[:2], 5, 1, seed=0)  # a step of two epochs and a half
    assert [epoch for _, epoch in small] == [0, 0, 1, 1, 2]


def test_the_order_of_minibatches_is_fixed_by_the_seed():
    """Golden: another order would be another run for every seed."""
    data = [Problem(str(i), "x", "1") for i in range(10)]
    for seed, orders in {3: ["4 5 0 1 2", "8 3 6 9 7", "1 9 5 6 4"], 0: ["4 1 7 5 3"]}.items():
        for step, order in enumerate(orders, 1):
            assert " ".join(x.id for x, _ in problems.minibatch(data, 5, step, seed)) == order
