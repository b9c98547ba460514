"""Algorithms 2, 3 and 4, line by line.

The model is a table of exchanges: what a prompt shows, and what is replied.

    "+1 > abc, -2 > D"    the success in problem 1 and the failure in problem 2 are shown;
                          the replies have the items a, b and c, and the item D
    "abc > xc, DE > ?"    a group a, b, c is shown, and x and c come back; of D and E nothing does

A letter is an item. In tables of both lists small letters are skills and capitals mistakes. "?" is
a reply that cannot be used, and "ab~" one that breaks off within b.

How replies are read is in test_replies.py, a run's cold start (Alg. 2, lines 1-7) in
test_cold_start.py.
"""

import itertools
import json
import re

import pytest
from conftest import answer, item, items, make_bank

import skills

G, E = KEYS = list(skills.KINDS)
ROOT_GROUP, PATIENCE = "root_group_reached", "stagnation_patience_reached"
both_kinds = pytest.mark.parametrize("key", KEYS)


def names(entries, key=G):
    """The letters that stand for entries."""
    return "".join(e[skills.KINDS[key].fields[0]].split()[0] for e in entries)


def bare(entries, key=G):
    return [skills.item_of(e, key) for e in entries]


def read_prompt(prompt):
    """A prompt's list, and the JSON that it shows; S13's sentence is cut off."""
    prompt = re.sub(r"\nEach item is an object with the string fields .*\.\Z", "", prompt)
    for key, verb in itertools.product(KEYS, ("extract", "merge")):
        template = skills.template(f"{verb}_{skills.KINDS[key].name}s")
        start, end = re.split(r"\{\w+_json\}", template)
        if prompt.startswith(start) and prompt.endswith(end):
            return key, json.loads(prompt[len(start) : len(prompt) - len(end)])
    raise AssertionError(f"no template of the paper: {prompt}")


def what_is_shown(prompt):
    """A merge's letters; "+1" or "-1" of an extraction, for a success or failure in problem 1."""
    key, body = read_prompt(prompt)
    if isinstance(body, list):
        return names(body, key)
    return "+-"[key == E] + re.search(r"\d+", body["problem"])[0]


class Table:
    """A fake `complete`: a prompt takes the first exchange of the lines that shows what it shows.

    A line has what the algorithm does in one of its lines; it does not matter which prompts share a
    call. `left`: exchanges not taken so far. `calls`: the number of prompts in each call.
    unusable: the reply that "?" stands for.
    """

    def __init__(self, *lines, unusable="I cannot do that."):
        self.left = [x.split(" > ") for line in lines for x in line.split(", ")]
        self.unusable, self.prompts, self.calls = unusable, [], []

    def __call__(self, prompts):
        self.prompts += prompts
        self.calls.append(len(prompts))
        return [self.reply_to(prompt) for prompt in prompts]

    def reply_to(self, prompt):
        shown = what_is_shown(prompt)
        exchange = next((x for x in self.left if x[0] == shown), None)
        assert exchange, f"{shown} is shown; the table has {self.left}"
        self.left.remove(exchange)
        return self.reply(exchange[1], read_prompt(prompt)[0])

    def reply(self, letters, key):
        if letters == "?":
            return self.unusable
        whole = answer(items(letters.rstrip("~"), key), key)
        return whole[:-40] if letters.endswith("~") else whole


LAYER = "input_items num_groups output_items stagnant_layers stopped_reason lost_replies".split()


def layers_of(*rows):
    """Records of layers: their first four numbers, and perhaps why it ended, and replies lost."""
    filled = [[*row, *(None, 0)[len(row) - 4 :]] for row in rows]
    return [{"layer_index": i, **dict(zip(LAYER, row))} for i, row in enumerate(filled)]


def check_merge(letters, *lines, size=32, patience=3, left, layers, **reply):
    """Algorithm 3 by a table; left: the letters of its result. layers: see `layers_of`."""
    table = Table(*lines, **reply)
    merged, records = skills.merge(items(letters), G, table, size, patience)
    assert not table.left and names(merged) == left and records == layers_of(*layers)


def entry(id_, letter, key=G, **more):
    """An entry of a bank."""
    return {skills.KINDS[key].id_field: id_, **item(letter, key), **more}


class Model:
    """A fake `complete`: n new items from each memory, named 1.0, 1.1, ...; a group stays."""

    def __init__(self, n=1):
        self.n, self.prompts = n, []

    def __call__(self, prompts):
        self.prompts += prompts
        replies = []
        for prompt in prompts:
            key, body = read_prompt(prompt)
            if isinstance(body, dict):
                number = re.search(r"\d+", body["problem"])[0]
                body = items([f"{number}.{i}" for i in range(self.n)], key)
            replies.append(answer(body, key))
        return replies


# ------------------------------------------------------- Algorithm 2, lines 5-14: the candidates


def solved(i, r=1, **changes):
    """A rollout's row."""
    row = {"problem_id": f"id-{i}-xyz", "problem": f"What is {i} plus 1?", "gold": "GOLD"}
    row |= {"text": f"We add {i} and 1.\nSo \\boxed{{{i + 1}}}.", "r": r, "pred": str(i + 1)}
    return row | changes


def memory(i, r=1):
    return skills.memory_of(solved(i, r))


def test_alg2_line_5_a_memory_record():
    """Problem, completion, reward, answer, trajectory summary, feedback; no reference (D3)."""
    text = "<think>hm [</think>\nAdd.\n\n  So \\boxed{2}. \n"
    record = {"problem_id": "id-1-xyz", "problem": "What is 1 plus 1?", "reward": 1}
    record |= {"completion": "Add.\n\n  So \\boxed{2}.", "predicted_answer": "2"}
    record |= {"trajectory_summary": ["Add.", "So \\boxed{2}."]}
    record |= {"feedback": "The verifier accepted the final answer."}
    assert skills.memory_of(solved(1, text=text)) == record
    with_answer = skills.memory_of(solved(1, text=text), with_answer=True)
    assert with_answer == record | {"reference_answer": "GOLD"}
    for pred, feedback in (("3", "rejected the"), (None, "gave no")):
        assert feedback in skills.memory_of(solved(1, -1, pred=pred))["feedback"]


def test_alg2_line_5_a_long_completion_is_an_excerpt_of_its_two_ends():
    """S21."""
    lines = [f"line {i} " + "x" * 300 for i in range(100)]
    text = "\n".join(lines)
    record = skills.memory_of(solved(1, text=text))
    assert record["completion"] == f"{text[:1000]}\n[...]\n{text[-1000:]}"
    ends = lines[:4] + lines[-4:]
    assert record["trajectory_summary"] == [line[:200] for line in ends]


def test_alg2_lines_8_to_14_successes_give_skills_and_failures_mistakes():
    """Every memory in a prompt of its own, in order, and up to three items of each."""
    table = Table("+1 > abcde, +3 > fgh, -2 > ABCDE, -4 > F")
    memories = [memory(1, 1), memory(2, -1), memory(3, 1), memory(4, -1)]
    candidates, lost = skills.extract(memories, table)
    good, bad = candidates.values()
    assert bare(good) == items("abcfgh") and bare(bad, E) == items("ABCF", E) and not lost
    assert [e["sources"] for e in good] == [["id-1-xyz"]] * 3 + [["id-3-xyz"]] * 3


def test_alg2_line_10_an_extraction_without_an_item_is_asked_once_more_and_then_lost():
    """D4. Of a reply that was cut off, the complete items count."""
    table = Table("+0 > ab~, +1 > ?, +2 > c~, +3 > ?", "+1 > d, +2 > ?, +3 > ?")
    candidates, lost = skills.extract([memory(i) for i in range(4)], table)
    assert names(candidates[G]) == "ad" and lost == 2 and not table.left


# -------------------------------------------------------------------------- Algorithm 3: merging


@both_kinds
def test_alg3_lines_3_to_12_one_group_by_hand(key):
    """Three items, one prompt without ids, two items back, new ids."""
    table = Table("abc > xc")
    merged, layers = skills.merge([entry("old", x, key) for x in "abc"], key, table)
    prefix = "gen_" if key == G else "err_"
    assert merged == [entry(f"{prefix}001", "x", key), entry(f"{prefix}002", "c", key)]
    assert table.prompts == [skills.render_merge(items("abc", key), key)]
    assert layers == layers_of((3, 1, 2, 0, ROOT_GROUP))


def test_alg3_lines_2_to_11_layer_by_layer_down_to_the_root_group():
    lines, layers = (
        ("abc > a, def > d, gh > g", "adg > a"),
        [(8, 3, 3, 0), (3, 1, 1, 0, ROOT_GROUP)],
    )
    check_merge("abcdefgh", *lines, size=3, left="a", layers=layers)


def test_alg3_line_4_a_group_of_one_is_not_asked():
    last = (3, 2, 3, 1, PATIENCE)
    check_merge("abc", "ab > ab", size=2, patience=1, left="abc", layers=[last])
    for few in ("", "a"):
        check_merge(few, left=few, layers=[(len(few), len(few), len(few), 1, ROOT_GROUP)])


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_alg3_line_11_merging_stops_after_p_layers_without_progress(patience):
    lines = ["ab > ab, cd > cd"] * patience
    layers = [(5, 3, 5, i) for i in range(1, patience)] + [(5, 3, 5, patience, PATIENCE)]
    check_merge("abcde", *lines, size=2, patience=patience, left="abcde", layers=layers)


def test_alg3_line_9_a_decrease_resets_the_count_of_stagnant_layers():
    same, one_less = "ab > ab, cd > cd, ef > ef, gh > gh", "ab > b, cd > cd, ef > ef, gh > gh"
    lines = [same, same, one_less, *["bc > bc, de > de, fg > fg, hi > hi"] * 3]
    layers = [(9, 5, 9, 1), (9, 5, 9, 2), (9, 5, 8, 0)]
    layers += [(8, 4, 8, 1), (8, 4, 8, 2), (8, 4, 8, 3, PATIENCE)]
    check_merge("abcdefghi", *lines, size=2, left="bcdefghi", layers=layers)


PAIR = items("ab")
BAD_REPLIES = {
    "prose": "They are all unique.",
    "no items (S11)": answer([]),
    "cut after an item": answer(PAIR)[:-2],
    "one item invalid": answer([item("x"), {"title": "t"}]),
    "more items than the group": answer(items("wxyz")),
    "items of the other kind": answer(items("x", E), E),
}


@pytest.mark.parametrize("name", BAD_REPLIES)
def test_alg3_line_6_a_bad_reply_is_asked_once_more_and_then_the_group_stays(name):
    unusable, layers = BAD_REPLIES[name], [(3, 1, 3, 1, ROOT_GROUP, 1)]
    check_merge("abc", "abc > ?", "abc > ?", unusable=unusable, left="abc", layers=layers)


def test_alg3_line_6_only_the_bad_groups_are_asked_again():
    lines = "ab > x, cd > ?, ef > ?", "cd > ?, ef > y", "xc > xc, dy > dy"
    layers = [(6, 3, 4, 0, None, 1), (4, 2, 4, 1, PATIENCE)]
    check_merge("abcdef", *lines, size=2, patience=1, left="xcdy", layers=layers)


@both_kinds
def test_alg3_line_12_exact_duplicates_are_removed_and_the_rest_keeps_its_order(key):
    """Wherever they stand; one that differs in a field stays."""
    a, b = items("ab", key)
    near = {**a, skills.KINDS[key].fields[2]: "something else"}
    old = [a, near, b, entry("old", "a", key), b]
    table = Table(*["aa > ?, ba > ?"] * 6)  # "near" begins with a, too
    merged, _ = skills.merge(old, key, table, group_size=2)
    assert bare(merged, key) == [a, near, b]
    assert [e[skills.KINDS[key].id_field][4:] for e in merged] == ["001", "002", "003"]


def test_sources_follow_their_entries():
    """An entry that stays keeps its own; a rewritten one gets its group's; twins join theirs."""
    a, b, c = [{**item(n), "sources": [f"p{n}"]} for n in "abc"]
    merged, _ = skills.merge([a, b, c], G, Table("abc > xb"))
    assert [e["sources"] for e in merged] == [["pa", "pb", "pc"], ["pb"]]
    twins = [{**a, "sources": ["p2"]}, item("a"), {**a, "sources": ["p1"]}]
    merged, _ = skills.merge(twins, G, Table("aaa > ?", "aaa > ?"))
    assert merged == [entry("gen_001", "a", sources=["p1", "p2"])]


# ------------------------------------------------------ Algorithm 2, lines 15-16: the first bank


def test_alg2_lines_15_and_16_the_first_bank_by_hand():
    """Two successes and a failure with two items each: two skills of four, and the mistakes stay.

    The reply to a merge is lost, too (D4).
    """
    table = Table("+1 > ab, +3 > cd, -2 > EF", "abcd > ac, EF > ?", "EF > ?")
    memories = [memory(1, 1), memory(2, -1) | {"truncated": True}, memory(3, 1)]
    bank = skills.cold_start(memories, table)
    one, two, three = ({"sources": [f"id-{i}-xyz"]} for i in (1, 2, 3))
    assert bank.general_skills == [entry("gen_001", "a", **one), entry("gen_002", "c", **three)]
    mistakes = [entry("err_001", "E", E, **two), entry("err_002", "F", E, **two)]
    assert bank.common_mistakes == mistakes
    wanted = {"source": "cold start from 3 seed solutions", "seed_solutions": 3}  # Tab. 5
    wanted |= {"right_seed_solutions": 2, "truncated_seed_solutions": 1, "lost_replies": 1}
    wanted |= {"merge_group_size": 32, "merge_stagnation_patience": 3}
    wanted |= {"input_general_skills": 4, "output_general_skills": 2}
    wanted |= {"input_common_mistakes": 2, "output_common_mistakes": 2}
    wanted |= {"general_merge_layers": layers_of((4, 1, 2, 0, ROOT_GROUP))}
    wanted |= {"common_mistake_merge_layers": layers_of((2, 1, 2, 1, ROOT_GROUP, 1))}
    assert bank.metadata == wanted
    assert all(number in skills.describe(bank) for number in ("2 skills", "2 mistakes", "4", "1"))
    assert "71 s" in skills.describe(bank, 71.4)


def test_a_list_that_needs_more_layers_than_the_other_goes_on_alone():
    """Three layers of skills and one of mistakes, whose group is asked once more (D4).

    A reply may take minutes: the prompts of both lists that are due at a time share a call.
    """
    table = Table(
        "+1 > abc, +2 > def, -3 > GH",
        "ab > a, cd > c, ef > e",
        "ac > c",
        "ce > c",
        "GH > ?, GH > G",
    )
    bank = skills.cold_start([memory(1), memory(2), memory(3, -1)], table, group_size=2)
    assert names(bank.general_skills) == "c" and names(bank.common_mistakes, E) == "G"
    layers = layers_of((6, 3, 3, 0), (3, 2, 2, 0), (2, 1, 1, 0, ROOT_GROUP))
    assert bank.metadata["general_merge_layers"] == layers and not table.left
    assert bank.metadata["common_mistake_merge_layers"] == layers_of((2, 1, 1, 0, ROOT_GROUP))
    assert table.calls == [3, 4, 1, 1, 1]


# ------------------------------------------------------------------------ Algorithm 4: evolution


def window(failures, successes=0):
    total = failures + successes
    return [solved(i, -1 if i < failures else 1) for i in range(total)]


def with_dynamic(skills_="", mistakes=""):
    """A bank of four static entries a list, with dynamic ones of these letters between them."""
    bank = make_bank()
    for key, letters in ((G, skills_), (E, mistakes)):
        for i, letter in enumerate(letters):
            id_ = f"dyn_{skills.KINDS[key].prefix}{i + 1:03d}"
            bank.collection(key).insert(1 + 2 * i, entry(id_, letter, key))
    bank.extra["task_specific_skills"] = {"x": [1]}
    return bank


def static(bank, key):
    return [e for e in bank.collection(key) if not e[skills.KINDS[key].id_field].startswith("dyn_")]


def dynamic(bank, key):
    return [e for e in bank.collection(key) if e[skills.KINDS[key].id_field].startswith("dyn_")]


def ids(entries, key=G):
    return [e[skills.KINDS[key].id_field] for e in entries]


DUE = [
    ([], 25, {}, False),
    (window(3), 24, {}, False),
    (window(3), 30, {}, False),
    (window(1), 7, {"evolve_every": 7}, True),
    (window(1), 25, {"evolve_every": 0}, False),
    (window(0, 3), 25, {}, False),
    (window(1, 4), 25, {}, False),  # a success of .8 is not below the gate
    (window(1, 1), 25, {"success_gate": 0.5}, False),
    (window(1, 1), 25, {"success_gate": 0.51}, True),
]


@pytest.mark.parametrize("rows, step, changes, due", DUE)
def test_alg4_lines_1_to_7_it_is_due_every_f_steps_and_below_the_gate(rows, step, changes, due):
    """F = 25 and gamma = 0.8 by default; where none is due, it is the same bank."""
    bank, model = with_dynamic("o", "O"), Model()
    new = skills.evolve(bank, rows, step, model, **changes)
    assert (new is not bank) == bool(model.prompts) == due


def test_alg4_lines_8_to_14_an_evolution_by_hand():
    """Extract, merge the candidates, merge them with the dynamic entries, replace those."""
    table = Table(
        "+1 > ab, -2 > CD, -3 > EF",  # lines 9 and 10
        "ab > xb, CDEF > CDE",  # line 11
        "oxb > ob, CDE > CDE",  # line 12
    )
    rows = [solved(1, 1), solved(2, -1), solved(3, -1)]
    bank = with_dynamic("o")
    new = skills.evolve(bank, rows, 50, table)
    assert bank == with_dynamic("o") and new.extra == bank.extra  # the old bank is left alone
    for key in KEYS:
        assert static(new, key) == static(bank, key) == new.collection(key)[:4]
    assert bare(dynamic(new, G)) == items("ob") and bare(dynamic(new, E), E) == items("CDE", E)
    assert ids(dynamic(new, G)) == ["dyn_gen_001", "dyn_gen_050_001"] and not table.left
    assert [e.get("sources") for e in dynamic(new, G)] == [None, ["id-1-xyz"]]


def test_alg4_line_12_begins_when_both_lists_have_merged_their_candidates():
    """Of the skills that takes two layers; of the mistakes there is a single one."""
    table = Table("+1 > abc, +2 > d, -3 > E", "ab > a, cd > c", "ac > a", "oa > oa, QE > Q")
    rows = [solved(1), solved(2), solved(3, -1)]
    new = skills.evolve(with_dynamic("o", "Q"), rows, 25, table, group_size=2)
    assert names(dynamic(new, G)) == "oa" and names(dynamic(new, E), E) == "Q" and not table.left


def test_alg4_line_12_existing_dynamic_entries_merge_with_the_new():
    """Two old ones and a new one become one: the bank may shrink."""
    table = Table("-0 > A", "OPA > X")
    new = skills.evolve(with_dynamic("", "OP"), window(1), 25, table)
    assert dynamic(new, E) == [entry("dyn_err_025_001", "X", E, sources=["id-0-xyz"])]


LIMITS = [  # dynamic skills and mistakes, failures and successes, (N, C), entries that are left
    (("op", "Q"), (3, 3), (5, 30), [4, 4]),
    (("op", "Q"), (0, 3), (5, 30), [7, 1]),
    (("op", "Q"), (3, 3), (0, 30), [2, 1]),
    (("op", "Q"), (1, 1), (7, 30), [5, 4]),
    (("", ""), (2, 2), (99, 2), [2, 2]),
    (("op", "OP"), (2, 2), (99, 3), [3, 3]),
    (("opqr", "OPQR"), (2, 2), (99, 3), [3, 3]),
    (("op", "OP"), (2, 2), (99, 0), [0, 0]),
    (("opqr", ""), (3, 3), (3, 4), [4, 3]),
]


@pytest.mark.parametrize("old, memories, limits, left", LIMITS)
def test_alg4_line_13_at_most_n_net_new_entries_and_c_in_each_list(old, memories, limits, left):
    """S12; what was there before stays. A full list leaves its share of N to the other."""
    N, C = limits
    settings = {"max_new_items": N, "dynamic_capacity": C, "success_gate": 2}
    new = skills.evolve(with_dynamic(*old), window(*memories), 25, Model(3), **settings)
    assert [len(dynamic(new, key)) for key in KEYS] == left
    assert [len(static(new, key)) for key in KEYS] == [4, 4]
    for letters, key in zip(old, KEYS):
        assert names(dynamic(new, key), key)[:C].startswith(letters[:C])


def record(step, success, lost=0, **numbers):
    """What an evolution leaves in the metadata; numbers: of the skills and of the mistakes."""
    row = {"step": step, "success": success, "lost_replies": lost}
    for name, both in numbers.items():
        row |= {f"{name}_{key}": n for key, n in zip(KEYS, both)}
    return row


def test_an_evolution_leaves_its_record_and_without_a_readable_reply_every_entry():
    table = Table("+2 > a, +3 > b, -0 > C, -1 > D", "ab > ab, CD > CD", "opab > opab, QCD > QCD")
    once = skills.evolve(with_dynamic("op", "Q"), window(2, 2), 25, table)
    refusing = Table(*["+3 > ?, -0 > ?, -1 > ?, -2 > ?"] * 2)  # so nothing is merged
    twice = skills.evolve(once, window(3, 1), 50, refusing)
    for key in KEYS:
        assert dynamic(twice, key) == dynamic(once, key)
    some = {"candidate": (2, 2), "merged": (2, 2), "net_new": (2, 2)}
    none = dict.fromkeys(some, (0, 0))
    updates = [record(25, 0.5, dynamic=(4, 3), **some)]
    updates.append(record(50, 0.25, lost=4, dynamic=(4, 3), **none))
    assert twice.metadata == {"source": "made in a test", "updates": updates}


def test_the_merges_of_an_evolution_that_cannot_be_read_count_as_lost():
    """Of the new skills a and b, and then with the dynamic one: two replies each (D4)."""
    table = Table("+1 > ab, -0 > C", "ab > ?", "ab > ?", "oab > ?, QC > QC", "oab > ?")
    bank = skills.evolve(with_dynamic("o", "Q"), window(1, 1), 25, table)
    (update,) = bank.metadata["updates"]
    assert update["lost_replies"] == 2 and "2 replies lost" in skills.describe(bank)


def test_no_copy_of_a_static_entry_becomes_a_dynamic_one():
    """D11: not as a candidate, in whatever case it is written, and not out of a merge."""
    mistakes = [entry("err_001", "M", E), entry("err_002", "i", E)]
    bank = skills.SkillBank([entry("gen_001", "s")], mistakes, {})
    table = Table("+1 > sab, -2 > MIC", "ab > as", "as > as")
    new = skills.evolve(bank, [solved(1, 1), solved(2, -1)], 25, table)
    assert names(dynamic(new, G)) == "a" and names(dynamic(new, E), E) == "C" and not table.left
    expected = {"candidate": (3, 3), "merged": (2, 1), "dynamic": (1, 1), "net_new": (1, 1)}
    assert new.metadata["updates"] == [record(25, 0.5, **expected)]


def test_dynamic_ids_of_entries_that_stay_that_are_new_and_that_return():
    """An entry keeps its id; a new one gets none of the bank's, and may get one that was dropped.

    Here always after step 25, as in runs that begin with an evolved bank.
    """
    a, b, c, d = (f"dyn_err_025_{i:03d}" for i in (1, 2, 3, 4))
    bank = make_bank()
    for lines, left in (
        (["-0 > ABC", "ABC > ABC", "ABC > ABC"], [a, b, c]),
        (["-0 > D", "ABCD > BXC"], [b, d, c]),  # a goes, and X must not be b, c
        (["-0 > A", "BXCA > CA"], [c, a]),
    ):
        bank = skills.evolve(bank, window(1), 25, Table(*lines))
        assert ids(dynamic(bank, E), E) == left


@pytest.mark.parametrize("shown", [False, True])
def test_an_evolution_shows_the_reference_answer_only_when_asked_to(shown):
    """D3. And never an id."""
    model = Model()
    skills.evolve(with_dynamic("op", "OP"), window(3, 2), 25, model, memory_answer=shown)
    extractions = [prompt for prompt in model.prompts if "to merge:" not in prompt]
    assert extractions and all(("GOLD" in prompt) == shown for prompt in extractions)
    assert not any(re.search("xyz|problem_id|dyn_|sources", prompt) for prompt in model.prompts)
