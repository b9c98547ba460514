"""Algorithms 2-4 line by line with a fake `complete`: extraction, merging, online evolution; and what a model's JSON may do to them."""

import copy
import json
import random
import re
import time
from types import SimpleNamespace

import pytest
from conftest import make_bank

import skills as S

G, E = KEYS = list(S.FIELDS)
ROOT_GROUP, PATIENCE = "root_group_reached", "stagnation_patience_reached"
both_kinds = pytest.mark.parametrize("key", KEYS)


def item(name, key=G):
    return {f: f"{name} {f}" for f in S.FIELDS[key]}


def items(names, key=G):
    return [item(name, key) for name in names]


def names(entries, key=G):
    """The names that `item` was given."""
    return "".join(e[S.FIELDS[key][0]].split()[0] for e in entries)


def bare(entries, key=G):
    return [{f: e[f] for f in S.FIELDS[key]} for e in entries]


def answer(found, key=G):
    return json.dumps({key: found})


def read_prompt(prompt):
    """A prompt's template, and the JSON that stands in its place; extraction's sentence on the fields (S13) is cut off."""
    prompt = re.sub(r"\nEach item is an object with the string fields .*\.\Z", "", prompt)
    for name in ("extract_skills", "extract_mistakes", "merge_skills", "merge_mistakes"):
        head, tail = re.split(r"\{\w+_json\}", S.template(name))
        if prompt.startswith(head) and prompt.endswith(tail):
            return name, json.loads(prompt[len(head) : len(prompt) - len(tail)])
    raise AssertionError(f"no template of the paper: {prompt}")


class Model:
    """A fake `complete`. reply(name, body) answers a prompt; `calls` keeps each call's (name, body), `pairs` each (prompt, reply)."""

    def __init__(self, reply):
        self.reply, self.calls, self.pairs = reply, [], []

    def __call__(self, prompts):
        assert prompts, "the model was asked nothing"
        self.calls.append([read_prompt(p) for p in prompts])
        replies = [self.reply(*read) for read in self.calls[-1]]
        self.pairs += zip(prompts, replies)
        return replies

    @property
    def asked(self):
        return [read for call in self.calls for read in call]


def script(*replies):
    """A model that gives these replies in turn."""
    left = iter(replies)
    return Model(lambda name, body: next(left))


def key_of(name):
    return G if name.endswith("skills") else E


def merging(rule, key=G):
    """A model that merges a group into rule(group)."""
    return Model(lambda name, group: answer(rule(group), key))


def keep(group):
    return group


def first(group):
    return group[:1]


def refuse(name, body):
    return "I cannot do that."


# ------------------------------------------------------------------------------------------------ JSON from a model

PAIR = items("ab")
SHAPES = {
    "plain": answer(PAIR),
    "indented": json.dumps({G: PAIR}, indent=2),
    "bare list": json.dumps(PAIR),
    "fence": f"```json\n{answer(PAIR)}\n```",
    "fence without a language": f"```\n{json.dumps(PAIR)}\n```\n",
    "prose": f"Here are the skills:\n{answer(PAIR)}\nI hope that they help.",
    "brackets in the prose": f"From [x] and {{y}} (see f[i], {{1, 2}}):\n{answer(PAIR)}\nSo {{a}} and [b]; also \\boxed{{3}} :-[",
    "a list in the prose": f"On [0, 1], as [1] says:\n{answer(PAIR)}",
    "trailing commas": answer(PAIR).replace("}", ",}").replace("]", ", ]"),
    "closed thinking": f"<think>First [I {{think.</think>\n\n{answer(PAIR)}",
    "a draft in the thinking": f"<think>{answer(items('xyz'))}</think>{answer(PAIR)}",
    "thinking without its opening": f"hm, {answer(items('x'))}\n</think>{answer(PAIR)}",
    "other keys": json.dumps({"note": "two", G: PAIR}),
    "fields too many": answer([{**e, "skill_id": "gen_009", "confidence": 0.9} for e in PAIR]),
    "spaces around the text": answer([{f: f" {x}\n" for f, x in e.items()} for e in PAIR]),
    "an item twice": answer([*PAIR, PAIR[0]]),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_whole_reply_is_read_in_any_dress(shape):
    assert S.parse_json_items(SHAPES[shape], G) == PAIR
    assert S.read_items(SHAPES[shape], G) == (PAIR, True)


@both_kinds
def test_a_single_object_counts_as_a_list(key):
    one = item("a", key)
    for text in (json.dumps(one), json.dumps({key: one}), f"It is ```{json.dumps(one)}```."):
        assert S.read_items(text, key) == ([one], True)


@pytest.mark.parametrize(
    "value",
    [
        r"\frac{a}{b}",
        r"\boxed{7}",
        r"\theta",
        r"\nu",
        r"\rho",
        r"\tau",
        r"\times",
        r"\(x\)",
        r"\{1\}",
        r"\[x\]",
        r"\beta",
        r"\forall",
        r"\binom{n}{k}",
        r"\underline{x}",
        r"\nabla f",
        r"\neq 0",
        r"\notin",
        r"\tan\theta",
        r"\text{if}",
        r"\to",
        r"\right)",
        r"\rangle",
        r"\triangle ABC",
        r"\,",
        r"\$5",
        r"50\%",
        r"\left(\frac{\nu}{\tau}\right)^2 \times \boxed{\theta}",
    ],
)
def test_latex_survives_as_written(value):
    """Whether the model escaped its backslashes or not, for every field."""
    text = f"so {value} follows"
    wanted = dict.fromkeys(S.FIELDS[G], text)
    raw = "{" + ", ".join(f'"{f}": "{text}"' for f in S.FIELDS[G]) + "}"
    assert S.read_items(json.dumps(wanted), G) == ([wanted], True)
    assert S.read_items(raw, G) == ([wanted], True)


def test_latex_that_begins_like_an_escape():
    r"""amsmath's and amssymb's commands in \n, \r and \t."""
    commands = (
        r"\natural \nearrow \ngeq \ngtr \nleq \nleqslant \nless \nmid \nolimits \nonumber \nparallel \nprec \nsim \nsubseteq \nsucceq \nwarrow \rVert \rceil "
        r"\restriction \rfloor \rightharpoonup \rightleftharpoons \rtimes \texttt \textstyle \tfrac \therefore \thickapprox \trianglelefteq \twoheadrightarrow"
    ).split()
    text = '{"title": "COMMAND x", "principle": "p", "when_to_apply": "w"}'
    assert [
        c
        for c in commands
        if S.parse_json_items(text.replace("COMMAND", c), G)[0]["title"] != f"{c} x"
    ] == []


def test_escapes_of_json_keep_their_meaning():
    value = 'Steps:\n1. Use it.\nThen check\n\n- so\nuse\t2 "quotes" and a/b, é, ∑, 😀, \\'
    wanted = {**item("a"), "principle": value}
    assert S.parse_json_items(json.dumps(wanted), G) == [wanted]
    assert S.parse_json_items(json.dumps(wanted, ensure_ascii=False), G) == [wanted]
    escaped = (
        r'{"title": "caf\u00e9 \u2211 \ud83d\ude00 a\/b", "principle": "p", "when_to_apply": "w"}'
    )
    assert S.parse_json_items(escaped, G)[0]["title"] == "café ∑ 😀 a/b"


def test_raw_control_characters_are_kept():
    assert (
        S.parse_json_items('{"title": "a\nb\tc\x01d", "principle": "p", "when_to_apply": "w"}', G)[
            0
        ]["title"]
        == "a\nb\tc\x01d"
    )


def test_a_reply_cut_off_anywhere_keeps_its_complete_items_and_is_not_whole():
    found = [{f: f'{n} {{{f}}} [0, 1] \\frac{{1}}{{2}} "q" é' for f in S.FIELDS[G]} for n in "abc"]
    for text in (
        answer(found),
        json.dumps(found),
        f"```json\n{answer(found)}",
        f"As [x] says: {answer(found)}",
    ):
        ends = [text.index(json.dumps(e)) + len(json.dumps(e)) for e in found]
        for cut in range(len(text)):
            complete = found[: sum(end <= cut for end in ends)]
            assert S.read_items(text[:cut], G) == (complete, False), text[:cut]


def test_thinking_that_never_ends_is_not_a_whole_reply():
    assert not S.read_items(f"<think>Perhaps {answer(PAIR)}, but then", G)[1]


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"title": "t"},
        {**item("a"), "principle": ""},
        {**item("a"), "principle": " \n"},
        {**item("a"), "principle": None},
        {**item("a"), "principle": 3},
        {**item("a"), "principle": ["p"]},
        {**item("a"), "principle": {"p": 1}},
        {**item("a"), "principle": True},
        None,
        3,
        "title",
        [],
        item("a", E),
    ],
)
def test_an_item_of_the_wrong_type_is_left_out(bad):
    assert S.parse_json_items(answer([bad]), G) == []
    assert S.read_items(answer([PAIR[0], bad, PAIR[1]]), G) == (PAIR, False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "no",
        "null",
        "3",
        '"a"',
        "[]",
        "{}",
        answer([]),
        answer(None),
        answer("a"),
        answer(3),
        answer({}),
        "```json\n```",
        "{[}]",
        "<think>",
    ],
)
def test_nothing_to_read(text):
    assert S.read_items(text, G) == ([], False)


def test_the_other_kinds_key_gives_nothing():
    assert S.parse_json_items(answer(items("ab", E), E), G) == []
    assert S.parse_json_items(answer(items("ab", G), G), E) == []
    assert S.parse_json_items(answer(items("ab", E), G), G) == []
    mixed = json.dumps({G: items("ab", G), E: items("cd", E)})
    assert S.parse_json_items(mixed, G) == items("ab", G) and S.parse_json_items(mixed, E) == items(
        "cd", E
    )


HOSTILE = {
    "1 MB of prose": "so it is. " * 100_000,
    "1 MB of prose and a reply": answer(PAIR) + "so it is. " * 100_000,
    "1 MB in one string": '{"title": "' + "x" * 1_000_000,
    "1 MB of backslashes": "\\" * 1_000_000,
    "1 MB of thinking": "<think>" * 140_000,
    "100k {": "{" * 100_000,
    "100k [": "[" * 100_000,
    "100k quotes": '"' * 100_000,
    "100k commas": "[" + "," * 100_000 + "]",
    "[ and ] nested": "[" * 50_000 + "]" * 50_000,
    "objects nested": '{"a":' * 15_000 + "1" + "}" * 15_000,
    "objects in lists": '[{"a":' * 15_000,
    "lists that never end": "[1," * 30_000,
    "long lists that never end": ("[" + "0," * 500) * 100,
    "numbers deep in lists": "[" * 900 + "0," * 45_000 + "0" + "]" * 900,
    "empty lists deep in lists": "[" * 900 + "[]," * 30_000 + "0" + "]" * 900,
    "a string deep in lists that never end": "[" * 900 + '"' + "x" * 99_000,
    "answers in answers": f'{{"{G}": [' * 5_000,
    "a number of 90,000 digits": "[" + "9" * 90_000 + "]",
    "1,500 items": answer(items(map(str, range(1_500)))),
}


@both_kinds
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_sizes_take_no_time(name, key):
    start = time.process_time()
    S.read_items(HOSTILE[name], key)
    assert time.process_time() - start < 2


# ------------------------------------------------------------------------------------------------ extraction (Alg. 2, lines 8-14)


def memory(i, r=1, **kw):
    return S.make_memory(
        f"id-{i}-xyz",
        f"What is {i} plus 1?",
        f"We add {i} and 1.\nSo \\boxed{{{i + 1}}}.",
        r,
        str(i + 1),
        **kw,
    )


def extracting(n=1):
    """A model that finds n items in every memory, named after the memory's problem, and leaves groups as they are."""

    def reply(name, body):
        key = key_of(name)
        if name.startswith("merge"):
            return answer(body, key)
        number = re.search(r"\d+", body["problem"])[0]
        return answer(items([f"{number}.{j}" for j in range(n)], key), key)

    return Model(reply)


def test_a_memory_record():
    """Line 5: problem, completion, reward, answer, trajectory summary, feedback."""
    record = S.make_memory("p1", "1+1?", "<think>hm [</think>\nAdd.\n\n  So \\boxed{2}. \n", 1, "2")
    assert record == {
        "problem_id": "p1",
        "problem": "1+1?",
        "completion": "Add.\n\n  So \\boxed{2}.",
        "reward": 1,
        "predicted_answer": "2",
        "trajectory_summary": ["Add.", "So \\boxed{2}."],
        "feedback": "The verifier accepted the final answer.",
    }
    assert (
        S.make_memory("p1", "1+1?", "3", -1, "3")["feedback"]
        == "The verifier rejected the final answer."
    )
    assert (
        S.make_memory("p1", "1+1?", "eh", -1, None)["feedback"]
        == "The attempt gave no final answer in a box."
    )


def test_a_long_completion_is_an_excerpt_of_its_two_ends():
    lines = [f"line {i} " + "x" * 300 for i in range(100)]
    record = S.make_memory("p", "q", "\n".join(lines), 1, "1")
    assert (
        len(record["completion"]) < 2100
        and record["completion"].startswith("line 0 ")
        and record["completion"].endswith("x" * 300)
    )
    assert [x.split()[1] for x in record["trajectory_summary"]] == [
        "0",
        "1",
        "2",
        "3",
        "96",
        "97",
        "98",
        "99",
    ]
    assert max(map(len, record["trajectory_summary"])) <= 200


def test_success_gives_skills_and_failure_gives_mistakes():
    """Line 8, and the loops of lines 9 and 12: every memory in its own prompt, in order."""
    model = extracting()
    found = S.extract(
        [memory(1, 1), memory(2, -1), memory(3, 1), memory(4, -1), memory(5, -1)], model
    )
    assert [(name, body["problem"]) for name, body in model.asked] == [
        ("extract_skills", "What is 1 plus 1?"),
        ("extract_skills", "What is 3 plus 1?"),
        ("extract_mistakes", "What is 2 plus 1?"),
        ("extract_mistakes", "What is 4 plus 1?"),
        ("extract_mistakes", "What is 5 plus 1?"),
    ]
    assert {key: bare(found[key], key) for key in KEYS} == {
        G: items(["1.0", "3.0"], G),
        E: items(["2.0", "4.0", "5.0"], E),
    }
    assert [e["sources"] for key in KEYS for e in found[key]] == [
        [f"id-{i}-xyz"] for i in (1, 3, 2, 4, 5)
    ]


def test_without_a_memory_of_a_kind_nothing_is_asked():
    assert S.extract([], extracting()) == {G: [], E: []}
    model = extracting()
    assert S.extract([memory(1, -1)], model)[G] == [] and [name for name, _ in model.asked] == [
        "extract_mistakes"
    ]


def test_at_most_three_items_of_a_memory():
    """Lines 10 and 13."""
    found = S.extract([memory(1, 1), memory(2, -1)], extracting(5))
    assert {key: bare(found[key], key) for key in KEYS} == {
        G: items(["1.0", "1.1", "1.2"], G),
        E: items(["2.0", "2.1", "2.2"], E),
    }


def test_neither_the_id_nor_the_reference_answer_stands_in_a_prompt():
    model = extracting()
    S.extract([memory(1, 1), memory(2, -1)], model)
    assert not any("xyz" in p or "problem_id" in p or "reference" in p for p, _ in model.pairs)
    S.extract([memory(1, 1, answer="GOLD")], model)  # D3, when it is wanted
    assert model.asked[-1][1]["reference_answer"] == "GOLD"


def test_an_unreadable_reply_is_asked_once_more_and_then_lost():
    """D4: and only that one."""
    model = script(
        answer(items("a")),
        "no",
        answer([]),
        answer(items("c"))[:-40],
        answer(items("b")),
        "no",
        "no",
    )
    rows = []
    found = S.extract([memory(i) for i in range(4)], model, log=rows.append)
    assert names(found[G]) == "ab"
    assert [[body["problem"][8] for _, body in call] for call in model.calls] == [
        ["0", "1", "2", "3"],
        ["1", "2", "3"],
    ]
    assert [row["outcome"] for row in rows] == [
        "read",
        "retried",
        "retried",
        "retried",
        "read",
        "lost",
        "lost",
    ]
    assert [(row["prompt"], row["reply"]) for row in rows] == model.pairs


def test_the_complete_items_of_a_cut_extraction_are_used():
    rows = []
    found = S.extract([memory(1)], script(answer(items("abc"))[:-20]), log=rows.append)
    assert names(found[G]) == "ab" and [row["outcome"] for row in rows] == ["repaired"]


# ------------------------------------------------------------------------------------------------ merging (Alg. 3)


def layer(i, before, groups, after, stagnant, reason=None):
    return {
        "layer_index": i,
        "input_items": before,
        "num_groups": groups,
        "output_items": after,
        "stagnant_layers": stagnant,
        "stopped_reason": reason,
    }


@both_kinds
def test_one_group_by_hand(key):
    """Lines 3-12: three items, one prompt, two items back, new ids."""
    model = merging(lambda group: [item("x", key), group[2]], key)
    old = [{S.IDS[key]: "old", **e} for e in items("abc", key)]
    merged, layers = S.merge(old, key, model)
    assert merged == [
        {S.IDS[key]: S.PREFIX[key] + "001", **item("x", key)},
        {S.IDS[key]: S.PREFIX[key] + "002", **item("c", key)},
    ]
    assert model.asked == [
        ("merge_skills" if key == G else "merge_mistakes", items("abc", key))
    ]  # no ids in the prompt
    assert layers == [layer(0, 3, 1, 2, 0, ROOT_GROUP)]


def test_ids_count_from_one_with_three_digits_and_the_prefix_that_is_wanted():
    merged, _ = S.merge(items(map(str, range(12)), E), E, merging(keep, E), group_size=12)
    assert [e["mistake_id"] for e in merged] == [f"err_{i:03d}" for i in range(1, 13)]
    assert [e["skill_id"] for e in S.merge(PAIR, G, merging(keep), prefix="dyn_gen_")[0]] == [
        "dyn_gen_001",
        "dyn_gen_002",
    ]


def test_groups_of_at_most_h_in_order_and_a_single_item_is_never_asked():
    """Lines 3-4: seven items in groups of three are 3 + 3 + 1, and one call per layer."""
    model = merging(keep)
    merged, _ = S.merge(items("abcdefg"), G, model, group_size=3, patience=1)
    assert [[names(group) for _, group in call] for call in model.calls] == [["abc", "def"]]
    assert names(merged) == "abcdefg"
    assert (
        S.merge(items("a"), G, model)[0] == [{"skill_id": "gen_001", **item("a")}]
        and len(model.calls) == 1
    )


def test_layers_up_to_the_root_group():
    """Eight items by threes: (abc)(def)(gh) -> adg -> (adg) -> a."""
    model = merging(first)
    merged, layers = S.merge(items("abcdefgh"), G, model, group_size=3)
    assert names(merged) == "a" and [[names(g) for _, g in call] for call in model.calls] == [
        ["abc", "def", "gh"],
        ["adg"],
    ]
    assert layers == [layer(0, 8, 3, 3, 0), layer(1, 3, 1, 1, 0, ROOT_GROUP)]


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_stagnation(patience):
    """Lines 9 and 11: as many layers without a decrease as there is patience."""
    model = merging(keep)
    merged, layers = S.merge(items("abcde"), G, model, group_size=2, patience=patience)
    assert layers == [
        layer(i, 5, 3, 5, i + 1, PATIENCE if i + 1 == patience else None) for i in range(patience)
    ]
    assert names(merged) == "abcde" and len(model.calls) == patience


def test_a_decrease_resets_the_count_of_stagnant_layers():
    """Line 9: the third layer drops one of nine items, the others none."""
    model = Model(
        lambda name, group: answer(
            first(group) if len(model.calls) == 3 and group[0] == item("a") else group
        )
    )
    merged, layers = S.merge(items("abcdefghi"), G, model, group_size=2)
    assert [x["stagnant_layers"] for x in layers] == [1, 2, 0, 1, 2, 3] and [
        x["output_items"] for x in layers
    ] == [9, 9, 8, 8, 8, 8]
    assert layers[-1]["stopped_reason"] == PATIENCE and names(merged) == "acdefghi"


def test_the_papers_group_size_and_patience_are_the_defaults():
    """H = 32, P = 3."""
    model = merging(keep)
    _, layers = S.merge(items(map(str, range(65))), G, model)
    assert [len(group) for _, group in model.calls[0]] == [32, 32] and len(layers) == 3


def test_one_group_needs_no_patience():
    assert S.merge(PAIR, G, merging(keep), patience=5)[1] == [layer(0, 2, 1, 2, 1, ROOT_GROUP)]


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
    model, rows = Model(lambda *_: BAD_REPLIES[name]), []
    merged, layers = S.merge(items("abc"), G, model, log=rows.append)
    assert names(merged) == "abc" and layers == [layer(0, 3, 1, 3, 1, ROOT_GROUP)]
    assert model.calls == [[("merge_skills", items("abc"))]] * 2 and [
        row["outcome"] for row in rows
    ] == ["retried", "lost"]


@pytest.mark.parametrize("name", BAD_REPLIES)
def test_a_good_second_reply_counts(name):
    merged, _ = S.merge(items("abc"), G, script(BAD_REPLIES[name], answer(items("x"))))
    assert names(merged) == "x"


def test_only_the_bad_groups_are_asked_again():
    """(ab)(cd)(ef): the second is unreadable twice, the third once."""
    model = script(
        *[answer(items("x")), "no", "no", "no", answer(items("y"))],
        *[answer(items("xc")), answer(items("dy"))],
    )
    merged, layers = S.merge(items("abcdef"), G, model, group_size=2, patience=1)
    assert [[names(g) for _, g in call] for call in model.calls] == [
        ["ab", "cd", "ef"],
        ["cd", "ef"],
        ["xc", "dy"],
    ]
    assert (
        layers == [layer(0, 6, 3, 4, 0), layer(1, 4, 2, 4, 1, PATIENCE)] and names(merged) == "xcdy"
    )


@both_kinds
def test_exact_duplicates_are_removed_and_the_rest_keeps_its_order(key):
    """Line 12: wherever they stand; one that differs in a field stays."""
    a, b = items("ab", key)
    near = {**a, S.FIELDS[key][2]: "something else"}
    merged, _ = S.merge([a, near, b, {S.IDS[key]: "old", **a}, b], key, Model(refuse), group_size=2)
    assert bare(merged, key) == [a, near, b] and [e[S.IDS[key]][4:] for e in merged] == [
        "001",
        "002",
        "003",
    ]


def test_an_empty_collection():
    merged, layers = S.merge([], G, Model(refuse))
    assert merged == [] and layers[-1]["stopped_reason"] == ROOT_GROUP


@pytest.mark.parametrize(
    "kw",
    [{"group_size": 1}, {"group_size": 0}, {"group_size": -3}, {"patience": 0}, {"patience": -1}],
)
def test_sizes_that_cannot_be(kw):
    with pytest.raises(ValueError, match=r"Alg\. 3.*group_size >= 2 and patience >= 1"):
        S.merge(PAIR, G, Model(refuse), **kw)


def test_sources_follow_their_entries():
    """An entry that stays keeps its own; a rewritten one gets its group's; one without any gains none."""
    a, b, c = [{**item(n), "sources": [f"p{n}"]} for n in "abc"]
    merged, _ = S.merge([a, b, c], G, merging(lambda group: [item("x"), item("b")]))
    assert [e.get("sources") for e in merged] == [["pa", "pb", "pc"], ["pb"]]
    assert [e.get("sources") for e in S.merge([a, b], G, Model(refuse))[0]] == [["pa"], ["pb"]]
    assert "sources" not in S.merge(PAIR, G, merging(first))[0][0]
    two = [a, {**a, "sources": ["p2"]}, b]
    assert S.merge(two, G, merging(lambda group: [group[0], group[2]]))[0][0]["sources"] == [
        "p2",
        "pa",
    ]


def test_no_field_is_invented_and_none_is_lost():
    model = merging(
        lambda group: [
            {**e, "skill_id": "gen_777", "confidence": 1, "sources": ["x"]} for e in group
        ]
    )
    assert S.merge(PAIR, G, model)[0] == [
        {"skill_id": f"gen_{i:03d}", **e} for i, e in enumerate(PAIR, 1)
    ]
    noted = [{**e, "note": 1} for e in PAIR]
    assert S.merge(noted, G, Model(refuse))[0] == [
        {"skill_id": f"gen_{i:03d}", **e} for i, e in enumerate(noted, 1)
    ]


def test_different_entries_with_an_empty_field_are_not_duplicates():
    old = [{**e, "principle": ""} for e in PAIR]
    assert bare(S.merge(old, G, Model(refuse))[0]) == old


def test_merging_edits_nothing_that_it_was_given():
    old = [{"skill_id": "old", **e, "sources": ["p"]} for e in items("abcd")]
    before = copy.deepcopy(old)
    S.merge(old, G, merging(first), group_size=2)
    assert old == before


# ------------------------------------------------------------------------------------------------ cold start (Alg. 2)


def test_cold_start_by_hand():
    """Two successes and a failure with two items each: four skills merged into two, two mistakes into one."""
    model = extracting(2)
    find = model.reply
    model.reply = lambda name, body: (
        answer(body[::2], key_of(name)) if name.startswith("merge") else find(name, body)
    )
    bank = S.cold_start([memory(1, 1), memory(2, -1), memory(3, 1)], model)
    assert bank.general_skills == [
        {"skill_id": "gen_001", **item("1.0"), "sources": ["id-1-xyz"]},
        {"skill_id": "gen_002", **item("3.0"), "sources": ["id-3-xyz"]},
    ]
    assert bank.common_mistakes == [
        {"mistake_id": "err_001", **item("2.0", E), "sources": ["id-2-xyz"]}
    ]
    assert [name for name, _ in model.asked] == ["extract_skills"] * 2 + [
        "extract_mistakes",
        "merge_skills",
        "merge_mistakes",
    ]
    assert bank.metadata == {
        "source": "cold start from 3 memories, 2 of them successes",
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
def test_cold_start_without_a_single_item(memories):
    bank = S.cold_start(memories, Model(refuse))
    assert bank.general_skills == bank.common_mistakes == []


def test_a_bank_made_of_replies_can_be_written(tmp_path):
    """Half of a surrogate pair is no character that a file can hold."""
    reply = r'{"title": "half \ud83d", "principle": "p", "when_to_apply": "w"}'
    bank = S.cold_start([memory(1)], Model(lambda *_: reply))
    bank.save(tmp_path / "bank.json")
    assert S.SkillBank.load(tmp_path / "bank.json") == bank


# ------------------------------------------------------------------------------------------------ evolution (Alg. 4)


def rollout(i, r=-1):
    return SimpleNamespace(
        problem_id=f"id-{i}-xyz",
        problem=f"What is {i} plus 1?",
        text=f"So \\boxed{{{i}}}.",
        r=r,
        pred=str(i),
        gold="GOLD",
    )


def window(failures, successes=0):
    return [rollout(i, -1) for i in range(failures)] + [
        rollout(i, 1) for i in range(failures, failures + successes)
    ]


def with_dynamic(skills=0, mistakes=0):
    """A bank of four static entries a list, with dynamic ones between them."""
    bank = make_bank()
    for key, n in ((G, skills), (E, mistakes)):
        for i in range(n):
            getattr(bank, key).insert(
                1 + 2 * i, {S.IDS[key]: f"dyn_{S.PREFIX[key]}{i + 1:03d}", **item(f"old{i}", key)}
            )
    bank.extra["task_specific_skills"] = {"x": [1]}
    return bank


def static(bank, key):
    return [e for e in getattr(bank, key) if not e[S.IDS[key]].startswith("dyn_")]


def dynamic(bank, key):
    return [e for e in getattr(bank, key) if e[S.IDS[key]].startswith("dyn_")]


@pytest.mark.parametrize(
    "records,step",
    [
        ([], 25),
        (window(3), 1),
        (window(3), 24),
        (window(3), 26),
        (window(3), 30),
        (window(0, 3), 25),
        (window(1, 4), 25),
        (window(1, 9), 50),
    ],
)
def test_the_same_bank_when_nothing_is_due(records, step):
    """Lines 1 and 5: an empty window, a step that F = 25 does not divide, a success rate of at least gamma = 0.8."""
    bank, model = with_dynamic(1, 1), Model(refuse)
    assert S.evolve(bank, records, step, model) is bank and not model.calls


def test_frequency_and_gate_are_settings():
    bank = make_bank()
    assert S.evolve(bank, window(1, 1), 7, extracting(), update_every=7) is not bank
    assert S.evolve(bank, window(1, 1), 25, extracting(), update_every=0) is bank  # never
    assert S.evolve(bank, window(1, 1), 25, extracting(), success_gate=0.5) is bank
    assert S.evolve(bank, window(2, 7), 25, extracting()) is not bank  # 7 of 9 is below 0.8


def test_an_update_by_hand():
    """Lines 8-14: each record asked for its kind, candidates merged, merged with the dynamic entries, the dynamic subset replaced."""
    model, bank = extracting(2), with_dynamic(1, 0)
    new = S.evolve(bank, [rollout(1, 1), rollout(2, -1), rollout(3, -1)], 50, model)
    assert [
        (name, body["problem"][8] if name.startswith("extract") else names(body, key_of(name)))
        for name, body in model.asked
    ] == [
        ("extract_skills", "1"),
        ("extract_mistakes", "2"),
        ("extract_mistakes", "3"),  # lines 8-10
        ("merge_skills", "1.01.1"),
        ("merge_skills", "old01.01.1"),  # lines 11 and 12
        ("merge_mistakes", "2.02.13.03.1"),
        ("merge_mistakes", "2.02.13.03.1"),
    ]
    for key in KEYS:
        assert getattr(new, key)[:4] == static(bank, key) and len(static(new, key)) == 4
        assert all(a is b for a, b in zip(getattr(new, key), static(bank, key)))
    assert bare(dynamic(new, G)) == items(["old0", "1.0", "1.1"]) and [
        e["skill_id"] for e in dynamic(new, G)
    ] == [f"dyn_gen_{i:03d}" for i in (1, 2, 3)]
    assert [e.get("sources") for e in dynamic(new, G)] == [None, ["id-1-xyz"], ["id-1-xyz"]]
    assert bare(dynamic(new, E), E) == items(["2.0", "2.1", "3.0"], E) and [
        e["mistake_id"] for e in dynamic(new, E)
    ] == [f"dyn_err_{i:03d}" for i in (1, 2, 3)]


def test_an_update_leaves_its_record_and_the_old_bank_alone():
    bank = with_dynamic(2, 1)
    before, entries = copy.deepcopy(bank), [e for key in KEYS for e in getattr(bank, key)]
    once = S.evolve(bank, window(2, 2), 25, extracting(1))
    twice = S.evolve(once, window(3, 1), 50, Model(refuse))
    assert bank == before and all(
        a is b for a, b in zip(entries, [e for key in KEYS for e in getattr(bank, key)])
    )
    assert once.extra == twice.extra == bank.extra
    assert {k: v for k, v in twice.metadata.items() if k != "updates"} == bank.metadata and len(
        once.metadata["updates"]
    ) == 1
    assert twice.metadata["updates"] == [
        {
            "step": 25,
            "success": 0.5,
            "candidate_general_skills": 2,
            "candidate_common_mistakes": 2,
            "dynamic_general_skills": 4,
            "dynamic_common_mistakes": 3,
        },
        {
            "step": 50,
            "success": 0.25,
            "candidate_general_skills": 0,
            "candidate_common_mistakes": 0,
            "dynamic_general_skills": 4,
            "dynamic_common_mistakes": 3,
        },
    ]


def test_without_a_readable_reply_every_entry_stays():
    """And without a candidate nothing is merged."""
    bank, model = with_dynamic(2, 2), Model(refuse)
    new = S.evolve(bank, window(2, 2), 25, model)
    assert {name for name, _ in model.asked} == {"extract_skills", "extract_mistakes"}
    assert all(
        dynamic(new, key) == dynamic(bank, key) and static(new, key) == static(bank, key)
        for key in KEYS
    )


def test_existing_dynamic_entries_merge_with_the_new():
    """Line 12: two old ones and a new one become one; the bank may shrink."""
    model = extracting(1)
    find = model.reply
    model.reply = lambda name, body: (
        answer(items(["all"], key_of(name)), key_of(name))
        if name == "merge_mistakes"
        else find(name, body)
    )
    new = S.evolve(with_dynamic(0, 2), window(1), 25, model)
    assert (
        bare(dynamic(new, E), E) == items(["all"], E)
        and dynamic(new, E)[0]["mistake_id"] == "dyn_err_001"
    )


@pytest.mark.parametrize(
    "skills,mistakes,limit,net",
    [
        (9, 9, 5, 5),
        (9, 0, 5, 5),
        (0, 9, 5, 5),
        (9, 9, 1, 1),
        (9, 9, 0, 0),
        (3, 3, 7, 6),
        (3, 3, 5, 5),
    ],
)
def test_at_most_n_net_new_entries_in_total(skills, mistakes, limit, net):
    """Line 13, S12: both collections together; what was there before stays."""
    bank = with_dynamic(2, 1)
    new = S.evolve(
        bank,
        window(mistakes // 3, skills // 3),
        25,
        extracting(3),
        max_new_items=limit,
        success_gate=2,
    )
    assert sum(len(dynamic(new, key)) for key in KEYS) == 3 + net
    assert names(dynamic(new, G)).startswith("old0old1") and names(dynamic(new, E), E).startswith(
        "old0"
    )


@pytest.mark.parametrize(
    "old,capacity,left", [(0, 2, 2), (2, 3, 3), (3, 3, 3), (4, 3, 3), (2, 0, 0)]
)
def test_at_most_c_dynamic_entries_in_each_collection(old, capacity, left):
    """Line 13."""
    new = S.evolve(
        with_dynamic(old, old),
        window(2, 2),
        25,
        extracting(3),
        max_new_items=99,
        dynamic_capacity=capacity,
    )
    assert [len(dynamic(new, key)) for key in KEYS] == [left, left] and [
        len(static(new, key)) for key in KEYS
    ] == [4, 4]


def test_the_papers_limits_are_the_defaults():
    """N = 5 a time, C = 30 a collection: failures only, so one collection fills up."""
    bank = make_bank()
    sizes = []
    for k in range(1, 9):
        bank = S.evolve(bank, [rollout(100 * k + i) for i in range(3)], 25 * k, extracting(3))
        sizes.append(len(dynamic(bank, E)))
    assert sizes == [5, 10, 15, 20, 25, 30, 30, 30] and dynamic(bank, G) == []
    ids = [e[S.IDS[key]] for key in KEYS for e in getattr(bank, key)]
    assert len(set(ids)) == len(ids)


def test_no_prompt_of_an_update_holds_an_id_or_the_reference_answer():
    model = extracting()
    S.evolve(with_dynamic(2, 2), window(3, 2), 25, model)
    assert not any(word in p for p, _ in model.pairs for word in ("GOLD", "xyz", "dyn_", "sources"))


def test_a_window_needs_four_attributes_and_no_source_is_made_up():
    records = [SimpleNamespace(problem="What is 1 plus 1?", text="\\boxed{3}", r=-1, pred="3")]
    new = S.evolve(make_bank(), records, 25, extracting())
    assert dynamic(new, E) == [{"mistake_id": "dyn_err_001", **item("1.0", E)}]


# ------------------------------------------------------------------------------------------------ fuzz

ODD = [
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    ",",
    ":",
    "\n",
    "\t",
    "\0",
    "\x1b",
    "\x7f",
    "\ud800",
    "\udfff",
    "\u2028",
    "\\u",
    "\\ud83d",
    "\\n",
    "</think>",
    "<think>",
    "```",
    "null",
    "1e999",
]
SWAP = str.maketrans("{}[]", "[]{}")


def insert(rng, text):
    for _ in range(rng.randint(1, 6)):
        at = rng.randint(0, len(text))
        text = text[:at] + rng.choice(ODD) + text[at:]
    return text


def span(rng, text):
    return sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))


def cut(rng, text):
    return text[: rng.randint(0, len(text))]


def behead(rng, text):
    return text[rng.randint(0, len(text)) :]


def delete(rng, text):
    a, b = span(rng, text)
    return text[:a] + text[b:]


def duplicate(rng, text):
    a, b = span(rng, text)
    return text[:b] + text[a:]


def swap_brackets(rng, text):
    a, b = span(rng, text)
    return text[:a] + text[a:b].translate(SWAP) + text[b:]


def dress(rng, text):
    return rng.choice(
        [
            "```json\n{}\n```",
            "On [0, 1] {{x}}:\n{}\nSo [it] is.",
            "<think>[{{</think>{}",
            "<think>{}",
            '{{"a": {}}}',
            "[{}, 1]",
        ]
    ).format(text)


def nest(rng, text):
    at, depth = rng.randint(0, len(text)), rng.randint(1, 60)
    opening, closing = rng.choice([("[", "]"), ('{"a":', "}"), ("[1,", "]"), ("{", "}")])
    return text[:at] + opening * depth + text[at:] + closing * rng.choice([0, depth])


def mangled(rng, key):
    """A valid reply of one to three items, then up to four manglings; cut to a length that keeps the test quick."""
    found = [
        {f: f"{rng.randint(0, 9)} {f} \\frac{{1}}{{2}} \\nu [0, 1]\né" for f in S.FIELDS[key]}
        for _ in range(rng.randint(1, 3))
    ]
    text = rng.choice(
        [
            answer(found, key),
            json.dumps(found),
            json.dumps({key: found}, indent=2, ensure_ascii=False),
        ]
    )
    for _ in range(rng.randint(0, 4)):
        text = rng.choice([insert, cut, behead, delete, duplicate, swap_brackets, dress, nest])(
            rng, text
        )
    return text[:4000]


def well_formed(found, key):
    """Exactly the three fields, each a non-empty string that a file and a tokenizer can take."""
    json.dumps(found, ensure_ascii=False).encode()
    return all(
        list(e) == list(S.FIELDS[key]) and all(isinstance(x, str) and x.strip() for x in e.values())
        for e in found
    )


@both_kinds
def test_any_mangled_reply_is_read_without_a_word(key):
    rng, start, readable, whole = random.Random(0), time.process_time(), 0, 0
    for _ in range(6000):
        text = mangled(rng, key)
        found = S.parse_json_items(text, key)
        assert well_formed(found, key), text
        readable += bool(found)
        whole += S.read_items(text, key)[1]
    assert 1000 < whole < readable < 5800  # the manglings are neither too mild nor too hard
    assert time.process_time() - start < 8


@both_kinds
def test_no_mangled_reply_loses_or_invents_an_entry_in_a_merge(key):
    """What is gone was in a group with a whole reply of no more items; what is new stands in such a reply."""
    rng, start, changed = random.Random(1), time.process_time(), 0
    for _ in range(300):
        old = items("abcde", key)
        model = Model(lambda *_: mangled(rng, key))
        merged = bare(S.merge(old, key, model, group_size=3, patience=2)[0], key)
        used, written = [], []
        for prompt, reply in model.pairs:
            group, (found, whole) = read_prompt(prompt)[1], S.read_items(reply, key)
            if whole and 0 < len(found) <= len(group):
                used, written = used + group, written + found
        assert well_formed(merged, key) and 0 < len(merged) <= 5
        assert all(e in merged or e in used for e in old) and all(
            e in old or e in written for e in merged
        )
        changed += merged != old
    assert 50 < changed < 300 and time.process_time() - start < 5


def test_no_mangled_reply_breaks_an_update():
    rng = random.Random(2)
    bank = with_dynamic(2, 2)
    for _ in range(100):
        new = S.evolve(
            bank,
            window(3, 3),
            25,
            Model(lambda name, _: mangled(rng, key_of(name))),
            max_new_items=3,
            dynamic_capacity=4,
        )
        for key in KEYS:
            assert static(new, key) == static(bank, key) and well_formed(
                bare(dynamic(new, key), key), key
            )
            assert 0 < len(dynamic(new, key)) <= 4
        assert sum(len(dynamic(new, key)) for key in KEYS) <= 4 + 3


def test_duplicates_join_their_sources():
    a = {"title": "A", "principle": "P", "when_to_apply": "W"}
    merged, _ = S.merge(
        [{**a, "sources": ["p2"]}, a, {**a, "sources": ["p1"]}],
        G,
        lambda prompts: [""] * len(prompts),
    )
    assert merged == [{"skill_id": "gen_001", **a, "sources": ["p1", "p2"]}]


@pytest.mark.parametrize("shown", [False, True])
def test_an_update_shows_the_reference_answer_only_when_asked_to(shown):
    prompts = []
    window = [SimpleNamespace(problem="What?", text="so", r=-1, pred=None, gold="the gold answer")]
    S.evolve(
        make_bank(),
        window,
        25,
        lambda ps: prompts.extend(ps) or [""] * len(ps),
        memory_answer=shown,
    )
    assert prompts and all(("the gold answer" in p) == shown for p in prompts)


@both_kinds
def test_the_extraction_prompt_names_the_fields_behind_the_template(key):
    """S13."""
    asked = []
    memory = S.make_memory("p", "What?", "so", 1 if key == G else -1, None)
    S.extract([memory], lambda ps: asked.extend(ps) or [""] * len(ps))
    template, _, form = asked[0].partition(f"Return ONLY valid JSON with key {key}.")
    assert (
        template
        and form
        == '\nEach item is an object with the string fields "{}", "{}" and "{}".'.format(
            *S.FIELDS[key]
        )
    )
