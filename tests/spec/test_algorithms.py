"""Algorithms 2, 3 and 4, line by line, with a fake `complete`; then the policy as `complete`.

How replies are read is in test_replies.py, a run's cold start (Alg. 2, lines 1-7) in
test_cold_start.py.
"""

import copy
import json
import random
import re

import pytest
from conftest import answer, item, items, make_bank

import rollout
import skills

G, E = KEYS = list(skills.FIELDS)
ROOT_GROUP, PATIENCE = "root_group_reached", "stagnation_patience_reached"
both_kinds = pytest.mark.parametrize("key", KEYS)


def names(entries, key=G):
    """The names that `item` was given."""
    return "".join(e[skills.FIELDS[key][0]].split()[0] for e in entries)


def bare(entries, key=G):
    return [skills.item_of(e, skills.FIELDS[key]) for e in entries]


def key_of(name):
    return G if name.endswith("skills") else E


def read_prompt(prompt):
    """A prompt's template, and the JSON that stands in its place; S13's sentence is cut off."""
    prompt = re.sub(r"\nEach item is an object with the string fields .*\.\Z", "", prompt)
    for name in ("extract_skills", "extract_mistakes", "merge_skills", "merge_mistakes"):
        head, tail = re.split(r"\{\w+_json\}", skills.template(name))
        if prompt.startswith(head) and prompt.endswith(tail):
            return name, json.loads(prompt[len(head) : len(prompt) - len(tail)])
    raise AssertionError(f"no template of the paper: {prompt}")


class Model:
    """A fake `complete`: reply(name, body) answers a prompt; `calls` and `pairs` keep them.

    In `calls` an extraction is "+1" or "-1", of the success or the failure in problem 1, and a
    merge has the names of its group.
    """

    def __init__(self, reply):
        self.reply, self.calls, self.pairs = reply, [], []

    def __call__(self, prompts):
        assert prompts, "the model was asked nothing"
        assert len(self.calls) < 50, "merging does not end"
        self.calls.append([])
        for prompt in prompts:
            name, body = read_prompt(prompt)
            if name.startswith("merge"):
                self.calls[-1].append(names(body, key_of(name)))
            else:
                self.calls[-1].append("+-"[name == "extract_mistakes"] + body["problem"][8])
            self.pairs.append((prompt, self.reply(name, body)))
        return [reply for _, reply in self.pairs[-len(prompts) :]]


def script(*replies):
    """A model that gives these replies in turn."""
    left = iter(replies)
    return Model(lambda name, body: next(left))


def merging(rule, key=G):
    """A model that merges a group into rule(group)."""
    return Model(lambda name, group: answer(rule(group), key))


def keep(group):
    return group


def first(group):
    return group[:1]


def refuse(name, body):
    return "I cannot do that."


def extracting(n=1, merged=keep):
    """A model that finds n items in a memory, named after its problem, and merges by `merged`."""

    def reply(name, body):
        key = key_of(name)
        if name.startswith("merge"):
            return answer(merged(body), key)
        number = re.search(r"\d+", body["problem"])[0]
        return answer(items([f"{number}.{j}" for j in range(n)], key), key)

    return Model(reply)


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
    record = {
        "problem_id": "id-1-xyz",
        "problem": "What is 1 plus 1?",
        "completion": "Add.\n\n  So \\boxed{2}.",
        "reward": 1,
        "predicted_answer": "2",
        "trajectory_summary": ["Add.", "So \\boxed{2}."],
        "feedback": "The verifier accepted the final answer.",
    }
    assert skills.memory_of(solved(1, text=text)) == record
    with_answer = skills.memory_of(solved(1, text=text), with_answer=True)
    assert with_answer == record | {"reference_answer": "GOLD"}


@pytest.mark.parametrize("pred, feedback", [("3", "rejected the"), (None, "gave no")])
def test_alg2_line_5_a_failures_feedback_says_what_failed(pred, feedback):
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
    model = extracting(5)
    memories = [memory(1, 1), memory(2, -1), memory(3, 1), memory(4, -1)]
    candidates, lost = skills.extract(memories, model)
    assert model.calls == [["+1", "+3"], ["-2", "-4"]]
    assert bare(candidates[G]) == items(["1.0", "1.1", "1.2", "3.0", "3.1", "3.2"])
    assert bare(candidates[E], E) == items(["2.0", "2.1", "2.2", "4.0", "4.1", "4.2"], E)
    assert [e["sources"] for e in candidates[G]] == [["id-1-xyz"]] * 3 + [["id-3-xyz"]] * 3
    assert lost == 0


def test_alg2_line_10_an_extraction_without_an_item_is_asked_once_more_and_then_lost():
    """D4. Of a reply that was cut off, the complete items count."""
    cut, cut_early = answer(items("cd"))[:-40], answer(items("d"))[:-40]
    model = script(cut, "no", answer([]), cut_early, answer(items("b")), "no", "no")
    candidates, lost = skills.extract([memory(i) for i in range(4)], model)
    assert names(candidates[G]) == "cb" and lost == 2
    assert model.calls == [["+0", "+1", "+2", "+3"], ["+1", "+2", "+3"]]


# -------------------------------------------------------------------------- Algorithm 3: merging

LAYER = "layer_index input_items num_groups output_items stagnant_layers".split()


def layer(*numbers, reason=None, lost=0):
    return dict(zip(LAYER, numbers)) | {"stopped_reason": reason, "lost_replies": lost}


@both_kinds
def test_alg3_lines_3_to_12_one_group_by_hand(key):
    """Three items, one prompt without ids, two items back, new ids."""
    model = merging(lambda group: [item("x", key), group[2]], key)
    old = [{skills.IDS[key]: "old", **e} for e in items("abc", key)]
    merged, layers = skills.merge(old, key, model)
    prefix = "gen_" if key == G else "err_"
    assert merged == [
        {skills.IDS[key]: f"{prefix}001", **item("x", key)},
        {skills.IDS[key]: f"{prefix}002", **item("c", key)},
    ]
    assert [prompt for prompt, _ in model.pairs] == [skills.render_merge(items("abc", key), key)]
    assert layers == [layer(0, 3, 1, 2, 0, reason=ROOT_GROUP)]


def test_alg3_lines_2_to_11_layer_by_layer_down_to_the_root_group():
    """Eight items by threes: (abc)(def)(gh) -> adg -> (adg) -> a."""
    model = merging(first)
    merged, layers = skills.merge(items("abcdefgh"), G, model, group_size=3)
    assert names(merged) == "a" and model.calls == [["abc", "def", "gh"], ["adg"]]
    assert layers == [layer(0, 8, 3, 3, 0), layer(1, 3, 1, 1, 0, reason=ROOT_GROUP)]


def test_alg3_line_4_a_group_of_one_is_not_asked():
    model = merging(keep)
    assert names(skills.merge(items("abc"), G, model, group_size=2, patience=1)[0]) == "abc"
    assert model.calls == [["ab"]]
    for few in ("", "a"):
        assert names(skills.merge(items(few), G, Model(refuse))[0]) == few


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_alg3_line_11_merging_stops_after_p_layers_without_progress(patience):
    merged, layers = skills.merge(items("abcde"), G, merging(keep), 2, patience)
    before = [layer(i, 5, 3, 5, i + 1) for i in range(patience - 1)]
    assert layers == [*before, layer(patience - 1, 5, 3, 5, patience, reason=PATIENCE)]
    assert names(merged) == "abcde"


def test_alg3_line_9_a_decrease_resets_the_count_of_stagnant_layers():
    """The third layer drops one of nine items, the others none."""
    model = Model(lambda name, group: answer(group[shrinks(group) :]))

    def shrinks(group):
        return len(model.calls) == 3 and group[0] == item("a")

    merged, layers = skills.merge(items("abcdefghi"), G, model, group_size=2)
    assert [x["stagnant_layers"] for x in layers] == [1, 2, 0, 1, 2, 3]
    assert layers[-1]["stopped_reason"] == PATIENCE and names(merged) == "bcdefghi"


def test_alg3_h_is_32_and_p_is_3_by_default():
    model = merging(keep)
    _, layers = skills.merge(items(map(chr, range(200, 265))), G, model)
    assert [len(group) for group in model.calls[0]] == [32, 32] and len(layers) == 3


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
    model = Model(lambda *_: BAD_REPLIES[name])
    merged, layers = skills.merge(items("abc"), G, model)
    assert names(merged) == "abc" and model.calls == [["abc"], ["abc"]]
    assert layers == [layer(0, 3, 1, 3, 1, reason=ROOT_GROUP, lost=1)]


def test_alg3_line_6_only_the_bad_groups_are_asked_again():
    """(ab)(cd)(ef): the second is unreadable twice, the third once."""
    first_layer = [answer(items("x")), "no", "no", "no", answer(items("y"))]
    model = script(*first_layer, answer(items("xc")), answer(items("dy")))
    merged, layers = skills.merge(items("abcdef"), G, model, group_size=2, patience=1)
    assert model.calls == [["ab", "cd", "ef"], ["cd", "ef"], ["xc", "dy"]]
    assert layers == [layer(0, 6, 3, 4, 0, lost=1), layer(1, 4, 2, 4, 1, reason=PATIENCE)]
    assert names(merged) == "xcdy"


@both_kinds
def test_alg3_line_12_exact_duplicates_are_removed_and_the_rest_keeps_its_order(key):
    """Wherever they stand; one that differs in a field stays."""
    a, b = items("ab", key)
    near = {**a, skills.FIELDS[key][2]: "something else"}
    old = [a, near, b, {skills.IDS[key]: "old", **a}, b]
    merged, _ = skills.merge(old, key, Model(refuse), group_size=2)
    assert bare(merged, key) == [a, near, b]
    assert [e[skills.IDS[key]][4:] for e in merged] == ["001", "002", "003"]


def test_sources_follow_their_entries():
    """An entry that stays keeps its own; a rewritten one gets its group's; twins join theirs."""
    a, b, c = [{**item(n), "sources": [f"p{n}"]} for n in "abc"]
    merged, _ = skills.merge([a, b, c], G, merging(lambda group: items("xb")))
    assert [e["sources"] for e in merged] == [["pa", "pb", "pc"], ["pb"]]
    twins = [{**a, "sources": ["p2"]}, item("a"), {**a, "sources": ["p1"]}]
    merged, _ = skills.merge(twins, G, Model(refuse))
    assert merged == [{"skill_id": "gen_001", **item("a"), "sources": ["p1", "p2"]}]


def test_no_field_is_invented_and_none_is_lost():
    extra = {"skill_id": "gen_777", "confidence": 1, "sources": ["x"]}
    model = merging(lambda group: [{**e, **extra} for e in group])
    numbered = [{"skill_id": f"gen_{i:03d}", **e} for i, e in enumerate(PAIR, 1)]
    assert skills.merge(PAIR, G, model)[0] == numbered
    noted = [{**e, "note": 1} for e in numbered]
    assert skills.merge(noted, G, Model(refuse))[0] == noted


# ------------------------------------------------------ Algorithm 2, lines 15-16: the first bank


def test_alg2_lines_15_and_16_the_first_bank_by_hand():
    """Two successes and a failure with two items each: two skills of four, a mistake of two."""
    model = extracting(2, merged=lambda group: group[::2])
    memories = [memory(1, 1), memory(2, -1) | {"truncated": True}, memory(3, 1)]
    bank = skills.cold_start(memories, model)
    assert bank.general_skills == [
        {"skill_id": "gen_001", **item("1.0"), "sources": ["id-1-xyz"]},
        {"skill_id": "gen_002", **item("3.0"), "sources": ["id-3-xyz"]},
    ]
    mistake = {"mistake_id": "err_001", **item("2.0", E), "sources": ["id-2-xyz"]}
    assert bank.common_mistakes == [mistake]
    assert bank.metadata == {  # Tab. 5
        "source": "cold start from 3 seed solutions",
        "seed_solutions": 3,
        "right_seed_solutions": 2,
        "truncated_seed_solutions": 1,
        "lost_replies": 0,
        "merge_group_size": 32,
        "merge_stagnation_patience": 3,
        "input_general_skills": 4,
        "output_general_skills": 2,
        "input_common_mistakes": 2,
        "output_common_mistakes": 1,
        "general_merge_layers": [layer(0, 4, 1, 2, 0, reason=ROOT_GROUP)],
        "common_mistake_merge_layers": [layer(0, 2, 1, 1, 0, reason=ROOT_GROUP)],
    }
    assert all(number in skills.describe(bank) for number in ("2 skills", "1 mistakes", "4", "3"))


def test_no_memory_and_no_readable_reply_give_an_empty_bank():
    for memories, lost in ([], 0), ([memory(1), memory(2, -1)], 2):
        bank = skills.cold_start(memories, Model(refuse))
        assert bank.general_skills == bank.common_mistakes == []
        assert bank.metadata["lost_replies"] == lost


# ------------------------------------------------------------------------ Algorithm 4: evolution


def window(failures, successes=0):
    total = failures + successes
    return [solved(i, -1 if i < failures else 1) for i in range(total)]


def with_dynamic(skill_count=0, mistake_count=0):
    """A bank of four static entries a list, with dynamic ones between them."""
    bank = make_bank()
    for key, n in ((G, skill_count), (E, mistake_count)):
        for i in range(n):
            id_ = f"dyn_{skills.PREFIX[key]}{i + 1:03d}"
            entry = {skills.IDS[key]: id_, **item(f"old{i}", key)}
            bank.collection(key).insert(1 + 2 * i, entry)
    bank.extra["task_specific_skills"] = {"x": [1]}
    return bank


def static(bank, key):
    return [e for e in bank.collection(key) if not e[skills.IDS[key]].startswith("dyn_")]


def dynamic(bank, key):
    return [e for e in bank.collection(key) if e[skills.IDS[key]].startswith("dyn_")]


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
def test_alg4_lines_1_to_7_an_evolution_is_due_every_f_steps_and_below_the_gate(
    rows, step, changes, due
):
    """F = 25 and gamma = 0.8 by default; where none is due, it is the same bank."""
    bank, model = with_dynamic(1, 1), extracting()
    new = skills.evolve(bank, rows, step, model, **changes)
    assert (new is not bank) == bool(model.calls) == due


def test_alg4_lines_8_to_14_an_evolution_by_hand():
    """Extract, merge the candidates, merge them with the dynamic entries, replace those."""
    model, bank = extracting(2), with_dynamic(1, 0)
    new = skills.evolve(bank, [solved(1, 1), solved(2, -1), solved(3, -1)], 50, model)
    assert model.calls == [
        ["+1"],  # line 9
        ["-2", "-3"],  # line 10
        ["1.01.1"],  # line 11, of the skills
        ["old01.01.1"],  # line 12
        ["2.02.13.03.1"],  # line 11, of the mistakes
        ["2.02.13.03.1"],  # line 12
    ]
    assert bare(dynamic(new, G)) == items(["old0", "1.0", "1.1"])
    assert bare(dynamic(new, E), E) == items(["2.0", "2.1", "3.0"], E)
    assert [e["skill_id"] for e in dynamic(new, G)] == [f"dyn_gen_{i:03d}" for i in (1, 2, 3)]
    assert [e.get("sources") for e in dynamic(new, G)] == [None, ["id-1-xyz"], ["id-1-xyz"]]


def test_alg4_line_12_existing_dynamic_entries_merge_with_the_new():
    """Two old ones and a new one become one: the bank may shrink."""
    model = extracting(1, merged=lambda group: items(["all"], E))
    new = skills.evolve(with_dynamic(0, 2), window(1), 25, model)
    merged = {"mistake_id": "dyn_err_001", **item("all", E), "sources": ["id-0-xyz"]}
    assert dynamic(new, E) == [merged]


LIMITS = [(9, 9, 5, 5), (9, 0, 5, 5), (9, 9, 0, 0), (3, 3, 7, 6)]


@pytest.mark.parametrize("new_skills, new_mistakes, limit, net", LIMITS)
def test_alg4_line_13_at_most_n_net_new_entries_in_both_lists_together(
    new_skills, new_mistakes, limit, net
):
    """S12; what was there before stays."""
    rows = window(new_mistakes // 3, new_skills // 3)
    settings = {"max_new_items": limit, "success_gate": 2}
    new = skills.evolve(with_dynamic(2, 1), rows, 25, extracting(3), **settings)
    assert len(dynamic(new, G)) + len(dynamic(new, E)) == 3 + net
    assert names(dynamic(new, G)).startswith("old0old1")
    assert names(dynamic(new, E), E).startswith("old0")


@pytest.mark.parametrize("old, capacity, left", [(0, 2, 2), (2, 3, 3), (4, 3, 3), (2, 0, 0)])
def test_alg4_line_13_at_most_c_dynamic_entries_in_each_list(old, capacity, left):
    settings = {"max_new_items": 99, "dynamic_capacity": capacity}
    new = skills.evolve(with_dynamic(old, old), window(2, 2), 25, extracting(3), **settings)
    assert [len(dynamic(new, key)) for key in KEYS] == [left, left]
    assert [len(static(new, key)) for key in KEYS] == [4, 4]


def test_alg4_line_13_a_full_list_leaves_its_share_of_n_to_the_other():
    """C = 4 skills are there, so all of N = 3 goes to the nine new mistakes."""
    settings = {"max_new_items": 3, "dynamic_capacity": 4, "success_gate": 2}
    new = skills.evolve(with_dynamic(4, 0), window(3, 3), 25, extracting(3), **settings)
    assert [len(dynamic(new, key)) for key in KEYS] == [4, 3]


def test_alg4_n_is_5_and_c_is_30_by_default():
    """Failures only, so one list fills up."""
    bank, sizes = make_bank(), []
    for k in range(1, 9):
        rows = [solved(100 * k + i, -1) for i in range(3)]
        bank = skills.evolve(bank, rows, 25 * k, extracting(3))
        sizes.append(len(dynamic(bank, E)))
    assert sizes == [5, 10, 15, 20, 25, 30, 30, 30]
    ids = [e["mistake_id"] for e in bank.common_mistakes]
    assert len(set(ids)) == len(ids)


def test_alg4_line_14_static_entries_and_the_old_bank_are_left_alone():
    bank = with_dynamic(2, 1)
    before = copy.deepcopy(bank)
    new = skills.evolve(bank, window(2, 2), 25, extracting(1))
    assert bank == before and new.extra == bank.extra
    for key in KEYS:
        assert all(a is b for a, b in zip(new.collection(key), static(bank, key), strict=False))
        assert len(static(new, key)) == 4


def record(step, success, lost=0, **numbers):
    """What an evolution leaves in the metadata; numbers: of the skills and of the mistakes."""
    row = {"step": step, "success": success, "lost_replies": lost}
    for name, both in numbers.items():
        row |= {f"{name}_{key}": n for key, n in zip(KEYS, both)}
    return row


def test_an_evolution_leaves_its_record_and_without_a_readable_reply_every_entry():
    once = skills.evolve(with_dynamic(2, 1), window(2, 2), 25, extracting(1))
    model = Model(refuse)
    twice = skills.evolve(once, window(3, 1), 50, model)
    failures = ["-0", "-1", "-2"]
    assert model.calls == [["+3"], ["+3"], failures, failures]  # and nothing is merged
    for key in KEYS:
        assert dynamic(twice, key) == dynamic(once, key)
    some = {"candidate": (2, 2), "copied": (0, 0), "merged": (2, 2), "net_new": (2, 2)}
    none = dict.fromkeys(some, (0, 0))
    updates = [record(25, 0.5, dynamic=(4, 3), **some)]
    updates.append(record(50, 0.25, lost=4, dynamic=(4, 3), **none))
    assert twice.metadata == {"source": "made in a test", "updates": updates}


def test_no_copy_of_a_static_entry_becomes_a_dynamic_one():
    """D11: not as a candidate, in whatever case it is written, and not out of a merge."""
    bank = make_bank()
    skill, mistake = bank.general_skills[0], bank.common_mistakes[0]
    texts = {name: mistake[name].upper() for name in skills.FIELDS[E]}

    def reply(name, body):
        if name == "extract_skills":
            return answer(bare([skill, *items("ab")]))
        if name == "extract_mistakes":
            return answer([texts, item("c", E)], E)
        return answer(bare([body[0], skill]) if name == "merge_skills" else body, key_of(name))

    model = Model(reply)
    new = skills.evolve(bank, [solved(1, 1), solved(2, -1)], 25, model)
    assert model.calls[2:4] == [["ab"], ["aUse"]]  # which gives a and the copy once more
    assert names(dynamic(new, G)) == "a" and names(dynamic(new, E), E) == "c"
    expected = {"candidate": (3, 2), "copied": (2, 1), "merged": (2, 1)}
    expected |= {"dynamic": (1, 1), "net_new": (1, 1)}
    assert new.metadata["updates"] == [record(25, 0.5, **expected)]


@pytest.mark.parametrize("shown", [False, True])
def test_an_evolution_shows_the_reference_answer_only_when_asked_to(shown):
    """D3. And never an id."""
    model = extracting()
    skills.evolve(with_dynamic(2, 2), window(3, 2), 25, model, memory_answer=shown)
    extractions = [p for p, _ in model.pairs if "to merge:" not in p]
    assert extractions and all(("GOLD" in p) == shown for p in extractions)
    assert not any(re.search("xyz|problem_id|dyn_|sources", p) for p, _ in model.pairs)


def test_a_windows_rows_need_four_fields_and_no_source_is_made_up():
    row = {"problem": "What is 1 plus 1?", "text": "\\boxed{3}", "r": -1, "pred": "3"}
    new = skills.evolve(make_bank(), [row], 25, extracting())
    assert dynamic(new, E) == [{"mistake_id": "dyn_err_001", **item("1.0", E)}]


# ------------------------------------------------------------------------------- mangled replies

ODD = '{ } [ ] " \\ , : \n \0 \ud800 \u2028 \\u \\ud83d \\n </think> <think> ``` 1e999 {"a":'
ODD = ODD.split(" ")


def mangled(rng, key):
    """A valid reply of one to three items in which up to three things went wrong."""
    entries = items([f"{rng.randint(0, 9)} \\frac{{1}}{{2}} \\nu [0, 1]\né" for _ in "abc"], key)
    text = answer(entries[rng.randint(0, 2) :], key)
    for _ in range(rng.randint(0, 3)):
        a, b = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
        odd = rng.choice(ODD) * rng.choice([1, 60])
        text = rng.choice([text[:a] + odd + text[a:], text[:a], text[a:], text[:b] + text[a:]])
    return text[:4000]


@both_kinds
def test_no_mangled_reply_loses_or_invents_an_entry_in_a_merge(key):
    """What is gone was in a group with a whole, small enough reply; what is new stands in one."""
    rng, changed = random.Random(1), 0
    for _ in range(300):
        old = items("abcde", key)
        model = Model(lambda *_: mangled(rng, key))
        merged = bare(skills.merge(old, key, model, group_size=3, patience=2)[0], key)
        used, written = [], []
        for prompt, reply in model.pairs:
            group = read_prompt(prompt)[1]
            reading, whole = skills.read_items(reply, key, skills.FIELDS[key])
            if whole and 0 < len(reading) <= len(group):
                used += group
                written += reading
        json.dumps(merged, ensure_ascii=False).encode()  # a file can take it
        assert None not in merged and 0 < len(merged) <= 5
        assert all(e in merged or e in used for e in old)
        assert all(e in old or e in written for e in merged)
        changed += merged != old
    assert 50 < changed < 300


# ----------------------------------------------------------------- the policy as `complete` (D4)


class Sampler:
    """A writer's `sample`: gives these replies in turn, and keeps what was asked of it."""

    def __init__(self, *replies):
        self.replies, self.ids, self.requests, self.limits = iter(replies), [], [], []

    def __call__(self, ids, prompts, repeats, limits):
        self.ids += ids
        self.limits += limits
        self.requests.append([*zip(prompts, repeats)])
        return [next(self.replies) for _ in prompts]


def make_writer(tokenizer, sampler, log):
    return skills.Writer(tokenizer, rollout.chat_ids, sampler, log.extend, 400, step=25)


def test_a_writer_counts_how_often_a_prompt_came_before_and_logs_every_reply(tokenizer):
    """The first reply is greedy, so a prompt that comes again needs another draw."""
    sampler, log = Sampler("A", "B", "another A", "C"), []
    writer = make_writer(tokenizer, sampler, log)
    assert writer(["a", "b"]) == ["A", "B"]
    assert writer(["a", "c"]) == ["another A", "C"]
    assert sampler.requests == [[("a", 0), ("b", 0)], [("a", 1), ("c", 0)]]
    assert log[2] == {"step": 25, "repeat": 1, "prompt": "a", "reply": "another A"}
    assert [row["prompt"] for row in log] == [*"abac"]


def test_a_writer_does_not_think_and_has_room_to_repeat_a_long_prompt(tokenizer):
    """The longer of the reply's limit and the prompt's tokens with a quarter more."""
    sampler = Sampler("A", "B")
    make_writer(tokenizer, sampler, [])(["a", "b" * 1000])
    assert sampler.ids[0] == rollout.chat_ids(tokenizer, "a", thinking="closed")
    assert sampler.limits == [400, len(sampler.ids[1]) * 5 // 4]
