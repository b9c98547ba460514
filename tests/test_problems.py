"""Problems: what is read, dropped and counted, refused and how it is named; the minibatch."""

import json

import pytest
from conftest import ROOT

import config
import problems
from cli import UserError
from problems import Problem

SHARED = ROOT.parent / "shared" / "data"


def chat(problem, answer, index=0):
    """A row of DAPO-Math, where the problem stands in a chat between boilerplate."""
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
    import datasets

    data = [chat(f"What is {i} + {i}?", str(2 * i), f"id{i}") for i in range(5)] * 100
    data += [chat("求 1 + 1 的值", "2", "zh"), chat("What is 3 + 3?", "7", "id3b")]
    data += [chat(r"$x$ is \boxed{?}", "34", "q")]
    datasets.Dataset.from_list(data).to_parquet(str(tmp_path / "dapo.parquet"))
    want = {"rows": 503, "not_english": 1, "duplicates": 496, "conflicting": 1, "kept": 5}
    for source in (tmp_path / "dapo.parquet", tmp_path):
        found, counts = problems.load_problems(str(source))
        assert counts == want
        assert [x.id for x in found] == ["id0", "id1", "id2", "id4", "q"]
        assert found[1] == Problem("id1", "What is 1 + 1?", "2")
        assert found[4].problem == r"$x$ is \boxed{?}"


def test_jsonl_keeps_its_order_and_gets_ids_that_differ(tmp_path):
    x, q = {"id": "x", "problem": " p ", "answer": " 1 "}, {"problem": "q", "answer": "2"}
    source = write(tmp_path / "a.jsonl", x, q, {"id": "x", "problem": "r", "answer": "3"}, q)
    want = [Problem("x", "p", "1"), Problem("1", "q", "2"), Problem("x#2", "r", "3")]
    assert problems.load_problems(source)[0] == want
    want.append(Problem("3", "q", "2"))
    assert problems.load_problems(source, unique=False)[0] == want
    twins = [{"id": name, "problem": name * i, "answer": "1"} for i, name in enumerate("xyyy", 1)]
    twins[0]["id"] = "y#2"  # the name that the second y would get
    found, _ = problems.load_problems(write(tmp_path / "b.jsonl", *twins))
    assert [x.id for x in found] == ["y#2", "y", "y#2#2", "y#3"]


def test_problems_of_an_evaluation_set_are_refused_as_training_data(tmp_path):
    """They are known by their letters and digits, whatever the layout."""
    found, other = problems.fingerprint("Find $x + 1$."), problems.fingerprint("Find $x + 2$.")
    assert problems.fingerprint("find  \n x+1") == found != other
    mine = [Problem("a", "Find  x.", "1"), Problem("b", "Every morning Aya walks", "204")]
    problems.refuse_overlap(mine, "mine", {})
    where = r"--data mine: 1 of its problems stand in an evaluation set: a \(held\); drop them"
    with pytest.raises(UserError, match=where + ", or say --allow-eval-overlap"):
        problems.refuse_overlap(mine, "mine", {"held": [Problem("0", "find $x$", "1")]})


@pytest.mark.skipif(not SHARED.is_dir(), reason="the data sets are not part of the project")
@pytest.mark.parametrize("name", ["aime24", "aime25", "hmmt25"])
def test_the_papers_three_sets_are_known_and_refused(name):
    data, _ = problems.load_problems(str(SHARED / f"{name}.jsonl"), unique=False)
    with pytest.raises(UserError, match=f"30 of its problems stand in an evaluation set: .*{name}"):
        problems.refuse_overlap(data, name, {})


def test_minibatches_cover_each_epoch_once():
    data = [Problem(str(i), "x", "1") for i in range(10)]
    cfg, seen = config.Config(batch_size=4), []
    for step in range(1, 6):
        seen += [x.id for x, _ in problems.minibatch(data, cfg, step)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == sorted(map(str, range(10)))
    assert seen[:10] != seen[10:]
    twice = problems.minibatch(data[:2], cfg, 1)  # a problem that comes twice is sampled twice
    assert len(set(twice)) == 4
    assert problems.minibatch(data, config.Config(batch_size=4, seed=1), 1) != twice
