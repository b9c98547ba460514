"""What experiments/steps.py reads from a run, by hand."""

import json

import lock
import pytest
import steps
import world


def test_the_credit_is_held_against_the_tokens_that_decide():
    """Two steps of three are written. 'Right:' parts from 'So' behind the same ' a=b.'."""
    forms = ((" a=b. Right: c So 1", " a=b. So 2"), (" d So 3", " e So 4"), (" f So 5", " g So 6"))
    parts = []
    for right, wrong in forms:
        both = [(text[: text.index(" So")], int(text[-1])) for text in (right, wrong)]
        parts.append(world.Drawn("fence", "?", *both))
    locks = {"p": lock.Lock(tuple(parts))}
    tokens = ["1.", " a=", "b.", " Right", ": c", " So", " 1", "\n", "2.", " e", " So", " 4", "\n"]
    assert [steps.deciding(tokens, s, x) for s, x in zip(steps.spans(tokens), parts)] == [3, 9]
    assert steps.deciding(tokens, range(8, 12), parts[0]) is None
    credit = [[0.0] * 13, [0.0] * 13]
    credit[0][3], credit[1][3], credit[0][9], credit[1][5] = 1.0, 2.0, 3.0, -4.0
    row = {"problem_id": "p", "text": "".join(tokens)}
    # (1 + 2) for the right step, -3 for the wrong one; squares 9 + 9 + 16 = 34, 18 where it counts
    found = steps.aim([row], [{"text": tokens, "credit": credit}], locks)
    assert found == (1, 1, 0.0, 0.0, pytest.approx(18 / 34))
    credit[0][9] = -3.0  # (3 + 3) / sqrt(34 * 2)
    found = steps.aim([row], [{"text": tokens, "credit": credit}], locks)
    assert found[2] == pytest.approx(6 / 68**0.5)
    assert found[3] == pytest.approx(2 * 6 / 68**0.5)  # one solution: its sign alone is random
    grpo = row | {"advantage": -2.0}  # -2/13 everywhere: the two cancel, 2 of 13 tokens count
    found = steps.aim([grpo], [{"text": tokens, "credit": []}], locks)
    assert found[2:] == (pytest.approx(0), pytest.approx(0), pytest.approx(2 / 13))


def test_a_teacher_is_counted_by_outcome_and_by_its_own_step(tmp_path):
    """Step 1 is right and step 2 is wrong; the credit of each step's tokens, by hand."""
    fence, count = world.FAMILIES[2], world.FAMILIES[1]
    entries = [{"skill_id": "a", **world.item(None, fence, "skill")}]
    entries.append({"skill_id": "b", **world.item(None, count, "misleading")})
    entries.append({"skill_id": "c", **world.item(None, world.FAMILIES[0], "skill")})
    (tmp_path / "bank.json").write_text(
        json.dumps({"general_skills": entries, "common_mistakes": []})
    )
    tokens = ["1.", " x", " So", " ", "8", "\n", "2.", " y", " So", " ", "5", "\n", "z"]
    row = {"problem_id": "p", "r": -1, "text": "".join(tokens), "rho": [-1, 1, 0]}
    row["pairs"] = [["a", "m"], ["b", "m"], ["c", "m"]]
    credit = [[-0.25] * 5 + [9.0] * 8, [9.0] * 5 + [0.5] * 6 + [9.0] * 2, [9.0] * 13]
    wanted = {"fence": 8, "count": 6, "sale": 1}
    parts = [world.Drawn(name, "?", ("", n), ("", 0)) for name, n in wanted.items()]
    audited, locks = [{"text": tokens, "credit": credit}], {"p": lock.Lock(tuple(parts))}
    found = steps.count(tmp_path / "bank.json", [row], audited, locks)
    assert found == {
        ("failure", "skill", "right"): {"reversed": 1, "credit": -1.25, "size": 73.25},
        ("failure", "misleading", "wrong"): {"distilled": 1, "credit": 3.0, "size": 66.0},
        ("failure", "of no step", ""): {"ignored": 1, "credit": 117.0, "size": 117.0},
    }
    assert "| failure | skill | right | 1 | 0% | 0% | 100% | -1250.00 | -1.25 |" in "\n".join(
        steps.table(found)
    )
    row["a"] = [-0.1, -0.2, 0.1]
    rows = [{**row, "step": step} for step in (1, 50)]
    assert steps.families("run", tmp_path / "bank.json", rows, locks) == [
        "| run | fence | 100% | 100% | 100% |",
        "| run | count | 0% | 0% | 0% |",
        "| run | sale | 0% | 0% | 0% |",
    ]
    rows = [{**row, "pairs": []} for row in rows]
    unguided = steps.families("grpo", tmp_path / "no.json", rows, locks)
    assert unguided[0] == "| grpo | fence |  | 100% | 100% |"
    assert steps.summary([row], found) == [
        "",
        "2 of 3 supports are below 0",
        "teachers of successes: {}",
        "teachers of failures: {'reversed': 1, 'distilled': 1, 'ignored': 1}",
        "46% of all credit, by size, is of teachers of no step",
    ]
