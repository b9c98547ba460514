"""Problem files: JSONL, parquet, directories, DAPO's chats; what is dropped is counted; what is wrong is named."""

import json

import pytest
from conftest import ROOT

import rollout as R
from distributed import UserError

SHARED = ROOT.parent / "shared" / "data"


def chat(problem, answer, index=0):
    return {
        "prompt": [{"role": "user", "content": f"{R.DAPO_PREFIX}\n\n{problem}\n\n{R.DAPO_SUFFIX}"}],
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": index},
    }


def dapo_rows():
    rows = [chat(f"What is {i} + {i}?", str(2 * i), f"id{i}") for i in range(5)] * 100
    return [
        *rows,
        chat("求 1 + 1 的值", "2", "zh"),
        chat("What is 3 + 3?", "7", "id3b"),
        chat("$x$ is \\boxed{?}", "34", "q"),
    ]


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def test_dapo_parquet_is_stripped_filtered_and_deduplicated(tmp_path):
    import datasets

    datasets.Dataset.from_list(dapo_rows()).to_parquet(str(tmp_path / "dapo.parquet"))
    for source in (tmp_path / "dapo.parquet", tmp_path):
        problems, counts = R.load_problems(str(source))
        assert counts == {
            "rows": 503,
            "not_english": 1,
            "duplicates": 496,
            "conflicting": 1,
            "kept": 5,
        }
        assert problems[0] == R.Problem("id0", "What is 0 + 0?", "0")
        assert [p.problem for p in problems] == [f"What is {i} + {i}?" for i in (0, 1, 2, 4)] + [
            "$x$ is \\boxed{?}"
        ]


def test_jsonl_ids_and_order(tmp_path):
    source = write(
        tmp_path / "a.jsonl",
        [
            {"id": "x", "problem": " p ", "answer": " 1 "},
            {"problem": "q", "answer": "2"},
            {"id": "x", "problem": "r", "answer": "3"},
        ],
    )
    problems, counts = R.load_problems(source)
    assert (
        problems == [R.Problem("x", "p", "1"), R.Problem("1", "q", "2"), R.Problem("x#2", "r", "3")]
        and counts["kept"] == 3
    )
    twice = write(tmp_path / "b.jsonl", [{"problem": "p", "answer": "1"}] * 2)
    assert len(R.load_problems(twice)[0]) == 1 and len(R.load_problems(twice, unique=False)[0]) == 2


@pytest.mark.parametrize(
    "rows,message",
    [
        ([{"problem": "p"}], r"a.jsonl:1: needs `problem` and `answer`.*fields found: problem"),
        ([{"question": "p", "solution": "1"}], "fields found: question, solution"),
        (
            [{"problem": "p", "answer": 5}],
            r"a.jsonl:1: `answer` must be a string, got int '5'; quote it",
        ),
        (
            [{"problem": "p", "answer": "1"}, {"problem": "q", "answer": None}],
            "a.jsonl:2: `answer` must be a string",
        ),
        ([{"problem": "p", "answer": " "}], "`answer` is empty"),
        ([{"problem": "", "answer": "1"}], "`problem` is empty"),
        ([chat("p", None)], "`answer` must be a string"),
        ([["p", "1"]], "a JSON object is wanted, got list"),
        ([], "no problem is left of 0 rows"),
        (
            [{"problem": "p", "answer": "1"}, {"problem": "p", "answer": "2"}],
            "no problem is left of 2 rows",
        ),
    ],
)
def test_bad_rows_are_named(tmp_path, rows, message):
    with pytest.raises(UserError, match=message):
        R.load_problems(write(tmp_path / "a.jsonl", rows))


def test_bad_paths_are_named(tmp_path):
    (tmp_path / "bad.jsonl").write_text("{oops")
    (tmp_path / "bin.jsonl").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    (tmp_path / "empty").mkdir()
    for name, message in {
        "none.jsonl": "no such file",
        "empty": "holds no .parquet and no .jsonl",
        "bad.jsonl": "bad.jsonl:1: not a JSON line",
        "bin.jsonl": "cannot be read as UTF-8",
        "bad.parquet": "not read",
    }.items():
        with pytest.raises(UserError, match=message):
            R.load_problems(str(tmp_path / name))
    with pytest.raises(UserError, match="no/such-hub-id: not read .*a local JSONL works offline"):
        R.load_problems("no/such-hub-id")


def test_problems_of_an_evaluation_set_are_refused(tmp_path):
    """Known by fingerprint (letters and digits), whatever the layout; the paper's three come with the code."""
    aime = r"Every morning Aya goes for a $9$-kilometer-long walk"
    assert (
        R.fingerprint("Find $x + 1$.")
        == R.fingerprint("find  \n x+1")
        != R.fingerprint("Find $x + 2$.")
    )
    mine = write(
        tmp_path / "mine.jsonl",
        [
            {"id": "a", "problem": "Find  x.", "answer": "1"},
            {"id": "b", "problem": aime, "answer": "204"},
        ],
    )
    held = write(tmp_path / "held.jsonl", [{"problem": "find $x$", "answer": "1"}])
    problems, _ = R.load_problems(mine)
    R.refuse_overlap(problems, mine, {})
    with pytest.raises(
        UserError,
        match=r"mine.jsonl: 1 of its problems stand in an evaluation set: a \(.*held.jsonl\); .*--allow-eval-overlap",
    ):
        R.refuse_overlap(problems, mine, {held: R.load_problems(held)[0]})


@pytest.mark.skipif(not SHARED.is_dir(), reason="the data sets are not part of the project")
@pytest.mark.parametrize("name", ["aime24", "aime25", "hmmt25"])
def test_the_papers_sets_are_known(name):
    problems, _ = R.load_problems(str(SHARED / f"{name}.jsonl"), unique=False)
    with pytest.raises(UserError, match=f"30 of its problems stand in an evaluation set: .*{name}"):
        R.refuse_overlap(problems, name, {})
