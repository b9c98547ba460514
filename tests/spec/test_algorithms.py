"""Algorithms 2-4 line by line with a fake `complete`, and what a model's JSON may do to them."""

import copy
import json
import random
import re
from types import SimpleNamespace

import pytest
from conftest import make_bank

import skills

G, E = KEYS = list(skills.FIELDS)
ROOT_GROUP, PATIENCE = "root_group_reached", "stagnation_patience_reached"
both_kinds = pytest.mark.parametrize("key", KEYS)


def item(name, key=G):
    return {field: f"{name} {field}" for field in skills.FIELDS[key]}


def items(names, key=G):
    return [item(name, key) for name in names]


def names(entries, key=G):
    """The names that `item` was given."""
    return "".join(e[skills.FIELDS[key][0]].split()[0] for e in entries)


def bare(entries, key=G):
    return [{field: e[field] for field in skills.FIELDS[key]} for e in entries]


def answer(entries, key=G):
    return json.dumps({key: entries})


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
    """A fake `complete`: reply(name, body) answers a prompt; `calls` and `pairs` keep them."""

    def __init__(self, reply):
        self.reply, self.calls, self.pairs = reply, [], []

    def __call__(self, prompts):
        assert prompts, "the model was asked nothing"
        self.calls.append([read_prompt(p) for p in prompts])
        replies = [self.reply(*read) for read in self.calls[-1]]
        self.pairs += zip(prompts, replies)
        return replies

    @property
    def prompts(self):
        return [read for call in self.calls for read in call]

    @property
    def groups(self):
        """The names in each group of each call."""
        return [[names(body, key_of(name)) for name, body in call] for call in self.calls]


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


class Writer:
    """Stands in for a `skills.Writer`: keeps the `stages`, and what was `logged` of each reply."""

    def __init__(self, model, cut=False):
        self.model, self.cut, self.stages, self.logged = model, cut, [], []

    def answer(self, questions, stage):
        self.stages.append((stage, questions[0].shown > 0))
        return [(reply, self.cut) for reply in self.model([q.prompt for q in questions])]

    def record(self, question, row):
        self.logged.append({**row, "prompt": question.prompt})


PAIR = items("ab")


def read(text, key):
    return skills.read_items(text, key, skills.FIELDS[key])


def test_each_kind_reads_its_own_items_alone():
    mixed = json.dumps({G: items("ab", G), E: items("cd", E)})
    assert skills.parse_json_items(mixed, G) == items("ab", G)
    assert skills.parse_json_items(mixed, E) == items("cd", E)
    assert skills.parse_json_items(answer(items("ab", E), G), G) == []


# ----------------------------------------------------------- extraction (Alg. 2, lines 8-14)


def solved(i, r=1, **changes):
    fields = {"problem_id": f"id-{i}-xyz", "problem": f"What is {i} plus 1?", "gold": "GOLD"}
    fields |= {"text": f"We add {i} and 1.\nSo \\boxed{{{i + 1}}}.", "r": r, "pred": str(i + 1)}
    return SimpleNamespace(**fields | changes)


def memory(i, r=1):
    return skills.memory_of(solved(i, r))


def extracting(n=1, merged=keep):
    """A model that finds n items in a memory, named after its problem, and merges by `merged`."""

    def reply(name, body):
        key = key_of(name)
        if name.startswith("merge"):
            return answer(merged(body), key)
        number = re.search(r"\d+", body["problem"])[0]
        return answer(items([f"{number}.{j}" for j in range(n)], key), key)

    return Model(reply)


def test_a_memory_record():
    """Line 5: problem, completion, reward, answer, trajectory summary, feedback."""
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
    assert with_answer == record | {"reference_answer": "GOLD"}  # D3


@pytest.mark.parametrize("pred,feedback", [("3", "rejected the"), (None, "gave no")])
def test_a_failures_feedback_says_what_failed(pred, feedback):
    assert feedback in skills.memory_of(solved(1, -1, pred=pred))["feedback"]


def test_a_long_completion_is_an_excerpt_of_its_two_ends():
    lines = [f"line {i} " + "x" * 300 for i in range(100)]
    text = "\n".join(lines)
    record = skills.memory_of(solved(1, text=text))
    assert record["completion"] == f"{text[:1000]}\n[...]\n{text[-1000:]}"
    ends = lines[:4] + lines[-4:]
    assert record["trajectory_summary"] == [line[:200] for line in ends]


def test_success_gives_skills_and_failure_gives_mistakes():
    """Lines 8-13: every memory in its own prompt, in order, up to three items of each."""
    model = extracting(5)
    candidates = skills.extract([memory(1, 1), memory(2, -1), memory(3, 1), memory(4, -1)], model)
    prompts = [(name, body["problem"][8]) for name, body in model.prompts]
    successes, failures = [("extract_skills", n) for n in "13"], ["2", "4"]
    assert prompts == successes + [("extract_mistakes", n) for n in failures]
    assert bare(candidates[G]) == items(["1.0", "1.1", "1.2", "3.0", "3.1", "3.2"])
    assert bare(candidates[E], E) == items(["2.0", "2.1", "2.2", "4.0", "4.1", "4.2"], E)
    assert [e["sources"] for e in candidates[G]] == [["id-1-xyz"]] * 3 + [["id-3-xyz"]] * 3


def test_an_unreadable_reply_is_asked_once_more_and_then_lost():
    """D4: and only that one."""
    cut = answer(items("c"))[:-40]
    model = script(answer(items("a")), "no", answer([]), cut, answer(items("b")), "no", "no")
    writer = Writer(model)
    candidates = skills.extract([memory(i) for i in range(4)], writer)
    assert names(candidates[G]) == "ab"
    assert [[body["problem"][8] for _, body in call] for call in model.calls] == [
        ["0", "1", "2", "3"],
        ["1", "2", "3"],
    ]
    outcomes = ["read", "retried", "retried", "retried", "read", "lost", "lost"]
    assert [row["outcome"] for row in writer.logged] == outcomes
    assert [(row["prompt"], row["reply"]) for row in writer.logged] == model.pairs


def test_what_is_wrong_with_a_lost_reply_is_logged():
    """The length limit comes first, as only the writer knows of it."""
    invalid, many = answer([{"title": "t"}]), answer(items("wxyz"))
    causes = {"They are all unique.": "no JSON", invalid: "no valid item", "{}": "no valid item"}
    causes |= {many: "more items than it was shown", answer(PAIR)[:-2]: "not whole"}
    for reply, cause in causes.items():
        for cut in (False, True):
            writer = Writer(script(reply, reply), cut)
            skills.merge(items("abc"), G, writer)
            outcomes = [(row["outcome"], row["cause"]) for row in writer.logged]
            assert outcomes == [(way, "cut off" if cut else cause) for way in ("retried", "lost")]


def test_the_complete_items_of_a_cut_extraction_are_used():
    writer = Writer(script(answer(items("abc"))[:-20]))
    assert names(skills.extract([memory(1)], writer)[G]) == "ab"
    assert [row["outcome"] for row in writer.logged] == ["repaired"]


# --------------------------------------------------------------------------- merging (Alg. 3)


LAYER = "layer_index input_items num_groups output_items stagnant_layers stopped_reason".split()


def layer(i, before, groups, after, stagnant, reason=None):
    return dict(zip(LAYER, (i, before, groups, after, stagnant, reason)))


@both_kinds
def test_one_group_by_hand(key):
    """Lines 3-12: three items, one prompt without ids, two items back, new ids."""
    model = merging(lambda group: [item("x", key), group[2]], key)
    old = [{skills.IDS[key]: "old", **e} for e in items("abc", key)]
    merged, layers = skills.merge(old, key, model)
    prefix = "gen_" if key == G else "err_"
    assert merged == [
        {skills.IDS[key]: f"{prefix}001", **item("x", key)},
        {skills.IDS[key]: f"{prefix}002", **item("c", key)},
    ]
    assert [body for _, body in model.prompts] == [items("abc", key)]
    assert layers == [layer(0, 3, 1, 2, 0, ROOT_GROUP)]


def test_layers_up_to_the_root_group():
    """Eight items by threes: (abc)(def)(gh) -> adg -> (adg) -> a."""
    model = merging(first)
    merged, layers = skills.merge(items("abcdefgh"), G, model, group_size=3)
    assert names(merged) == "a" and model.groups == [["abc", "def", "gh"], ["adg"]]
    assert layers == [layer(0, 8, 3, 3, 0), layer(1, 3, 1, 1, 0, ROOT_GROUP)]


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_merging_stops_after_as_many_stagnant_layers_as_there_is_patience(patience):
    """Lines 9 and 11."""
    merged, layers = skills.merge(items("abcde"), G, merging(keep), 2, patience)
    before = [layer(i, 5, 3, 5, i + 1) for i in range(patience - 1)]
    assert layers == [*before, layer(patience - 1, 5, 3, 5, patience, PATIENCE)]
    assert names(merged) == "abcde"


def test_a_decrease_resets_the_count_of_stagnant_layers():
    """Line 9: the third layer drops one of nine items, the others none."""
    model = Model(lambda name, group: answer(group[shrinks(group) :]))

    def shrinks(group):
        return len(model.calls) == 3 and group[0] == item("a")

    merged, layers = skills.merge(items("abcdefghi"), G, model, group_size=2)
    assert [x["stagnant_layers"] for x in layers] == [1, 2, 0, 1, 2, 3]
    assert layers[-1]["stopped_reason"] == PATIENCE and names(merged) == "bcdefghi"


def test_the_papers_group_size_and_patience_are_the_defaults():
    """H = 32, P = 3."""
    model = merging(keep)
    _, layers = skills.merge(items(map(str, range(65))), G, model)
    assert [len(group) for _, group in model.calls[0]] == [32, 32] and len(layers) == 3


BAD_REPLIES = {
    "prose": "They are all unique.",
    "nothing": "",
    "no items (S11)": answer([]),
    "cut in an item": answer(PAIR)[:-20],
    "cut after an item": answer(PAIR)[:-2],
    "its last brace missing": answer(PAIR)[:-1],
    "one item invalid": answer([item("x"), {"title": "t"}]),
    "more items than the group": answer(items("wxyz")),
    "items of the other kind": answer(items("x", E), E),
}


@pytest.mark.parametrize("name", BAD_REPLIES)
def test_a_bad_reply_is_asked_once_more_and_then_the_group_stays(name):
    """Line 6."""
    model = Model(lambda *_: BAD_REPLIES[name])
    writer = Writer(model)
    merged, layers = skills.merge(items("abc"), G, writer)
    assert names(merged) == "abc" and layers == [layer(0, 3, 1, 3, 1, ROOT_GROUP)]
    assert model.groups == [["abc"], ["abc"]]
    assert [row["outcome"] for row in writer.logged] == ["retried", "lost"]


def test_only_the_bad_groups_are_asked_again():
    """(ab)(cd)(ef): the second is unreadable twice, the third once."""
    first_layer = [answer(items("x")), "no", "no", "no", answer(items("y"))]
    model = script(*first_layer, answer(items("xc")), answer(items("dy")))
    merged, layers = skills.merge(items("abcdef"), G, model, group_size=2, patience=1)
    assert model.groups == [["ab", "cd", "ef"], ["cd", "ef"], ["xc", "dy"]]
    assert layers == [layer(0, 6, 3, 4, 0), layer(1, 4, 2, 4, 1, PATIENCE)]
    assert names(merged) == "xcdy"


def test_both_lists_merge_layer_by_layer_in_common_calls():
    """Two skills and five mistakes by twos: the skills are through after one layer."""
    model = extracting(merged=first)
    writer = Writer(model)
    lists = {G: items("ab"), E: items("vwxyz", E)}
    merged, layers = skills.merge_lists(lists, writer, 2, 3)
    assert names(merged[G]) == "a" and names(merged[E], E) == "v"
    assert model.groups == [["ab", "vw", "xy"], ["vx"], ["vz"]]
    assert [len(layers[key]) for key in KEYS] == [1, 3]
    assert writer.stages == [(f"merging, layer {i}", True) for i in (1, 2, 3)]


@both_kinds
def test_exact_duplicates_are_removed_and_the_rest_keeps_its_order(key):
    """Line 12: wherever they stand; one that differs in a field stays."""
    a, b = items("ab", key)
    near = {**a, skills.FIELDS[key][2]: "something else"}
    old = [a, near, b, {skills.IDS[key]: "old", **a}, b]
    merged, _ = skills.merge(old, key, Model(refuse), group_size=2)
    assert bare(merged, key) == [a, near, b]
    assert [e[skills.IDS[key]][4:] for e in merged] == ["001", "002", "003"]


@pytest.mark.parametrize("sizes", [{"group_size": 1}, {"group_size": -3}, {"patience": 0}])
def test_sizes_that_cannot_be(sizes):
    with pytest.raises(ValueError, match=r"Alg\. 3.*group_size >= 2 and patience >= 1"):
        skills.merge(PAIR, G, Model(refuse), **sizes)


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


# ------------------------------------------------------------------------ cold start (Alg. 2)


def test_cold_start_by_hand():
    """Two successes and a failure with two items each: two skills of four, a mistake of two."""
    model = extracting(2, merged=lambda group: group[::2])
    bank = skills.cold_start([memory(1, 1), memory(2, -1), memory(3, 1)], model)
    assert bank.general_skills == [
        {"skill_id": "gen_001", **item("1.0"), "sources": ["id-1-xyz"]},
        {"skill_id": "gen_002", **item("3.0"), "sources": ["id-3-xyz"]},
    ]
    mistake = {"mistake_id": "err_001", **item("2.0", E), "sources": ["id-2-xyz"]}
    assert bank.common_mistakes == [mistake]
    assert bank.metadata == {
        "source": "cold start from 3 seed solutions",
        "seed_solutions": 3,
        "right_seed_solutions": 2,
        "merge_group_size": 32,
        "merge_stagnation_patience": 3,
        "input_general_skills": 4,
        "output_general_skills": 2,
        "input_common_mistakes": 2,
        "output_common_mistakes": 1,
        "general_merge_layers": [layer(0, 4, 1, 2, 0, ROOT_GROUP)],
        "common_mistake_merge_layers": [layer(0, 2, 1, 1, 0, ROOT_GROUP)],
    }


@pytest.mark.parametrize("memories", [[], [memory(1), memory(2, -1)]])
def test_cold_start_without_a_single_item_gives_an_empty_bank(memories):
    bank = skills.cold_start(memories, Model(refuse))
    assert bank.general_skills == bank.common_mistakes == []


def test_a_bank_made_of_half_a_surrogate_pair_can_be_written(tmp_path):
    reply = r'{"title": "half \ud83d", "principle": "p", "when_to_apply": "w"}'
    bank = skills.cold_start([memory(1)], Model(lambda *_: reply))
    bank.save(tmp_path / "bank.json")
    assert skills.SkillBank.load(tmp_path / "bank.json") == bank


# ------------------------------------------------------------------------- evolution (Alg. 4)


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


DUE = [([], 25, {}, False), (window(3), 24, {}, False), (window(3), 30, {}, False)]
DUE += [(window(0, 3), 25, {}, False), (window(1, 4), 25, {}, False)]
DUE += [(window(1), 7, {"evolve_every": 7}, True), (window(1), 25, {"evolve_every": 0}, False)]
for gate, due in ((0.5, False), (0.51, True)):
    DUE.append((window(1, 1), 25, {"success_gate": gate}, due))


@pytest.mark.parametrize("records,step,changes,due", DUE)
def test_an_evolution_is_due_every_f_steps_and_below_the_gate(records, step, changes, due):
    """Lines 1 and 5, F = 25 and gamma = 0.8 by default; else it is the same bank."""
    bank, model = with_dynamic(1, 1), extracting()
    new = skills.evolve(bank, records, step, model, **changes)
    assert (new is not bank) == bool(model.calls) == due


def test_an_evolution_by_hand():
    """Lines 8-14: extract, merge the candidates, merge them with the dynamic entries, replace."""
    model, bank = extracting(2), with_dynamic(1, 0)
    records = [solved(1, 1), solved(2, -1), solved(3, -1)]
    new = skills.evolve(bank, records, 50, model)
    prompts = []
    for name, body in model.prompts:
        extraction = name.startswith("extract")
        prompts.append((name, body["problem"][8] if extraction else names(body, key_of(name))))
    assert prompts == [
        ("extract_skills", "1"),
        ("extract_mistakes", "2"),
        ("extract_mistakes", "3"),  # lines 8-10
        ("merge_skills", "1.01.1"),  # line 11
        ("merge_mistakes", "2.02.13.03.1"),
        ("merge_skills", "old01.01.1"),  # line 12
        ("merge_mistakes", "2.02.13.03.1"),
    ]
    assert bare(dynamic(new, G)) == items(["old0", "1.0", "1.1"])
    assert bare(dynamic(new, E), E) == items(["2.0", "2.1", "3.0"], E)
    assert [e["skill_id"] for e in dynamic(new, G)] == [f"dyn_gen_{i:03d}" for i in (1, 2, 3)]
    assert [e.get("sources") for e in dynamic(new, G)] == [None, ["id-1-xyz"], ["id-1-xyz"]]


def test_static_entries_and_the_old_bank_are_left_alone():
    bank = with_dynamic(2, 1)
    before = copy.deepcopy(bank)
    new = skills.evolve(bank, window(2, 2), 25, extracting(1))
    assert bank == before and new.extra == bank.extra
    for key in KEYS:
        assert all(a is b for a, b in zip(new.collection(key), static(bank, key), strict=False))
        assert len(static(new, key)) == 4


def record(step, success, **numbers):
    """What an evolution leaves in the metadata; numbers: of the skills and of the mistakes."""
    row = {"step": step, "success": success}
    for name, both in numbers.items():
        row |= {f"{name}_{key}": n for key, n in zip(KEYS, both)}
    return row


def test_an_evolution_leaves_its_record():
    once = skills.evolve(with_dynamic(2, 1), window(2, 2), 25, extracting(1))
    twice = skills.evolve(once, window(3, 1), 50, Model(refuse))
    none = {"candidate": (0, 0), "copied": (0, 0), "merged": (0, 0), "net_new": (0, 0)}
    some = {"candidate": (2, 2), "copied": (0, 0), "merged": (2, 2), "net_new": (2, 2)}
    updates = [record(25, 0.5, dynamic=(4, 3), **some), record(50, 0.25, dynamic=(4, 3), **none)]
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
    merges = [names(body) for name, body in model.prompts if name == "merge_skills"]
    assert merges == ["ab", "aUse"]  # which gives a and the copy once more
    assert names(dynamic(new, G)) == "a" and names(dynamic(new, E), E) == "c"
    expected = {"candidate": (3, 2), "copied": (2, 1), "merged": (2, 1)}
    expected |= {"dynamic": (1, 1), "net_new": (1, 1)}
    assert new.metadata["updates"] == [record(25, 0.5, **expected)]


def test_without_a_readable_reply_every_entry_stays_and_nothing_is_merged():
    bank, model = with_dynamic(2, 2), Model(refuse)
    new = skills.evolve(bank, window(2, 2), 25, model)
    assert {name for name, _ in model.prompts} == {"extract_skills", "extract_mistakes"}
    for key in KEYS:
        assert dynamic(new, key) == dynamic(bank, key)


def test_existing_dynamic_entries_merge_with_the_new():
    """Line 12: two old ones and a new one become one; the bank may shrink."""
    model = extracting(1, merged=lambda group: items(["all"], E))
    new = skills.evolve(with_dynamic(0, 2), window(1), 25, model)
    assert dynamic(new, E) == [
        {"mistake_id": "dyn_err_001", **item("all", E), "sources": ["id-0-xyz"]}
    ]


LIMITS = [(9, 9, 5, 5), (9, 0, 5, 5), (0, 9, 5, 5), (9, 9, 1, 1), (9, 9, 0, 0), (3, 3, 7, 6)]


@pytest.mark.parametrize("found_skills,found_mistakes,limit,net", LIMITS)
def test_at_most_n_net_new_entries_in_total(found_skills, found_mistakes, limit, net):
    """Line 13, S12: both collections together; what was there before stays."""
    records = window(found_mistakes // 3, found_skills // 3)
    settings = {"max_new_items": limit, "success_gate": 2}
    new = skills.evolve(with_dynamic(2, 1), records, 25, extracting(3), **settings)
    assert len(dynamic(new, G)) + len(dynamic(new, E)) == 3 + net
    assert names(dynamic(new, G)).startswith("old0old1")
    assert names(dynamic(new, E), E).startswith("old0")


@pytest.mark.parametrize("old,capacity,left", [(0, 2, 2), (2, 3, 3), (4, 3, 3), (2, 0, 0)])
def test_at_most_c_dynamic_entries_in_each_collection(old, capacity, left):
    """Line 13."""
    settings = {"max_new_items": 99, "dynamic_capacity": capacity}
    new = skills.evolve(with_dynamic(old, old), window(2, 2), 25, extracting(3), **settings)
    assert [len(dynamic(new, key)) for key in KEYS] == [left, left]
    assert [len(static(new, key)) for key in KEYS] == [4, 4]


def test_a_full_collection_leaves_its_share_of_n_to_the_other():
    """C = 4 skills are there, so all of N = 3 goes to the nine new mistakes."""
    settings = {"max_new_items": 3, "dynamic_capacity": 4, "success_gate": 2}
    new = skills.evolve(with_dynamic(4, 0), window(3, 3), 25, extracting(3), **settings)
    assert [len(dynamic(new, key)) for key in KEYS] == [4, 3]


def test_the_papers_limits_are_the_defaults():
    """N = 5 a time, C = 30 a collection: failures only, so one collection fills up."""
    bank = make_bank()
    sizes = []
    for k in range(1, 9):
        records = [solved(100 * k + i, -1) for i in range(3)]
        bank = skills.evolve(bank, records, 25 * k, extracting(3))
        sizes.append(len(dynamic(bank, E)))
    assert sizes == [5, 10, 15, 20, 25, 30, 30, 30]
    ids = [e["mistake_id"] for e in bank.common_mistakes]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("shown", [False, True])
def test_an_evolution_shows_the_reference_answer_only_when_asked_to(shown):
    """D3. And never an id."""
    model = extracting()
    skills.evolve(with_dynamic(2, 2), window(3, 2), 25, model, memory_answer=shown)
    extractions = [p for p, _ in model.pairs if "to merge:" not in p]
    assert extractions and all(("GOLD" in p) == shown for p in extractions)
    assert not any(re.search("xyz|problem_id|dyn_|sources", p) for p, _ in model.pairs)


def test_a_window_needs_four_attributes_and_no_source_is_made_up():
    record = SimpleNamespace(problem="What is 1 plus 1?", text="\\boxed{3}", r=-1, pred="3")
    new = skills.evolve(make_bank(), [record], 25, extracting())
    assert dynamic(new, E) == [{"mistake_id": "dyn_err_001", **item("1.0", E)}]


# --------------------------------------------------------------------------- mangled replies

ODD = '{ } [ ] " \\ , : \n \0 \ud800 \u2028 \\u \\ud83d \\n </think> <think> ``` 1e999 {"a":'.split(
    " "
)


def mangle(rng, text):
    """Insert something odd, once or often, cut the end or the beginning, delete or repeat."""
    a, b = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
    odd = rng.choice(ODD) * rng.choice([1, 60])
    return rng.choice([text[:a] + odd + text[a:], text[:a], text[a:], text[:b] + text[a:]])


def mangled(rng, key):
    """A valid reply of one to three items, then up to three manglings, cut to be read quickly."""
    entries = items([f"{rng.randint(0, 9)} \\frac{{1}}{{2}} \\nu [0, 1]\né" for _ in "abc"], key)
    layout = rng.choice([answer, lambda entries, _: json.dumps(entries)])
    text = layout(entries[rng.randint(0, 2) :], key)
    for _ in range(rng.randint(0, 3)):
        text = mangle(rng, text)
    return text[:4000]


def well_formed(entries, key):
    """Exactly the three fields, each a non-empty string that a file and a tokenizer can take."""
    json.dumps(entries, ensure_ascii=False).encode()
    for entry in entries:
        if list(entry) != list(skills.FIELDS[key]) or not all(x.strip() for x in entry.values()):
            return False
    return True


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
            reading, whole = read(reply, key)
            assert well_formed(reading, key)
            if whole and 0 < len(reading) <= len(group):
                used += group
                written += reading
        assert well_formed(merged, key) and 0 < len(merged) <= 5
        assert all(e in merged or e in used for e in old)
        assert all(e in old or e in written for e in merged)
        changed += merged != old
    assert 50 < changed < 300


def test_no_mangled_reply_breaks_an_evolution():
    rng, bank = random.Random(2), with_dynamic(2, 2)
    settings = {"max_new_items": 3, "dynamic_capacity": 4}
    for _ in range(100):
        model = Model(lambda name, _: mangled(rng, key_of(name)))
        new = skills.evolve(bank, window(3, 3), 25, model, **settings)
        for key in KEYS:
            assert static(new, key) == static(bank, key)
            assert well_formed(bare(dynamic(new, key), key), key)
            assert 0 < len(dynamic(new, key)) <= 4
        assert len(dynamic(new, G)) + len(dynamic(new, E)) <= 4 + 3
