"""What Algorithms 2-4 read from a reply (Alg. 3, line 5: "parse the returned JSON").

The items are found in any dress; where the JSON breaks, those before stay, and the reply counts as
not whole.
"""

import json

import pytest
from conftest import answer, item, items

import skills

KEY, OTHER = skills.KINDS
FIELDS = skills.KINDS[KEY].fields


def read(text, key=KEY):
    """The items in a reply, and whether it is whole."""
    return skills.read_items(text, key)


PAIR = items("ab")
SHAPES = {
    "plain": answer(PAIR),
    "indented": json.dumps({KEY: PAIR}, indent=2),
    "bare list": json.dumps(PAIR),
    "fence": f"```json\n{answer(PAIR)}\n```",
    "brackets in the prose": f"From [x] and {{y}} (f[i], {{1, 2}}):\n{answer(PAIR)}\nSo {{a}} :-[",
    "a list in the prose": f"On [0, 1], as [1] says:\n{answer(PAIR)}\nI hope that they help.",
    "trailing commas": answer(PAIR).replace("}", ",}").replace("]", ", ]"),
    "a draft in the thinking": f"<think>{answer(items('xyz'))}</think>{answer(PAIR)}",
    "thinking without its opening": f"hm, {answer(items('x'))}\n</think>{answer(PAIR)}",
    "other keys": json.dumps({"note": "two", KEY: PAIR}),
    "fields too many": answer([{**e, "skill_id": "gen_009", "confidence": 0.9} for e in PAIR]),
    "spaces around the text": answer([{f: f" {x}\n" for f, x in e.items()} for e in PAIR]),
    "an item twice": answer([*PAIR, PAIR[0]]),
    "another key": json.dumps({"result": {"skills": PAIR, "note": []}}),
    "items one by one": "\n".join(map(json.dumps, PAIR)),
    "beside the other kind": json.dumps({KEY: PAIR, OTHER: items("cd", OTHER)}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_whole_reply_is_read_in_any_dress(shape):
    assert read(SHAPES[shape]) == (PAIR, True)


def test_each_kind_reads_its_own_items_alone():
    mistakes = items("cd", OTHER)
    mixed = json.dumps({KEY: PAIR, OTHER: mistakes})
    assert skills.parse_json_items(mixed, KEY) == PAIR
    assert skills.parse_json_items(mixed, OTHER) == mistakes
    assert skills.parse_json_items(answer(mistakes), KEY) == []


def test_a_single_object_counts_as_a_list():
    one = item("a")
    for text in (json.dumps(one), json.dumps({KEY: one}), f"It is ```{json.dumps(one)}```."):
        assert read(text) == ([one], True)


LATEX = r"""\frac{a}{b} \boxed{7} \theta \nu \rho \tau \times \(x\) \{1\} \[x\] \beta \forall \neq
\underline{x} \nabla \notin \tan\theta \text{if} \to \right) \rangle \triangle \, \$5 50\% \natural
\nearrow \ngeq \ngtr \nleq \nleqslant \nless \nmid \nolimits \nonumber \nparallel \nprec \nsim
\nsubseteq \nsucceq \nwarrow \rVert \rceil \restriction \rfloor \rightharpoonup \rtimes \texttt
\rightleftharpoons \textstyle \tfrac \therefore \thickapprox \trianglelefteq \twoheadrightarrow
\left(\frac{\nu}{\tau}\right)^2 \binom{n}{k}""".split()


@pytest.mark.parametrize("value", LATEX)
def test_latex_survives_whether_or_not_the_model_escaped_it(value):
    wanted = dict.fromkeys(FIELDS, f"so {value} follows")
    escaped = json.dumps(wanted)
    assert read(escaped) == ([wanted], True)
    assert read(escaped.replace("\\\\", "\\")) == ([wanted], True)


def test_escapes_of_json_keep_their_meaning():
    value = 'Steps:\n1. Use it.\nThen check\n\n- so\nuse\t2 "quotes" and a/b, é, ∑, 😀, \\'
    wanted = {**item("a"), "principle": value}
    assert read(json.dumps(wanted))[0] == [wanted]
    assert read(json.dumps(wanted, ensure_ascii=False))[0] == [wanted]
    raw = '{"title": "a\nb\tc\x01d", "principle": "p", "when_to_apply": "w"}'
    assert read(raw)[0][0]["title"] == "a\nb\tc\x01d"


COMMAS = ["[0, 1, 2,]", "{1, 2, }", '"[1, 2,]"', 'a "b, [c,] d', "x \\", "\\,]", ", ]", "a:,}"]


@pytest.mark.parametrize("value", COMMAS)
def test_a_comma_inside_a_string_stays_and_one_behind_it_goes(value):
    wanted = dict.fromkeys(FIELDS, f"{value} and {value}")
    one = json.dumps(wanted)[:-1] + ",\n}"
    for reply in (one, f"[{one}, ]", f'They say, "a, b: [{one},]'):
        assert read(reply) == ([wanted], True)


def test_a_reply_cut_off_anywhere_keeps_its_complete_items_and_is_not_whole():
    entries = []
    for name in "abc":
        text = f'{name} {{x}} [0, 1] \\frac{{1}}{{2}} "q" é'
        entries.append(dict.fromkeys(FIELDS, text))
    for text in (answer(entries), json.dumps(entries), f"As [x] says: ```json\n{answer(entries)}"):
        ends = [text.index(json.dumps(e)) + len(json.dumps(e)) for e in entries]
        for cut in range(len(text)):
            complete = entries[: sum(end <= cut for end in ends)]
            assert read(text[:cut]) == (complete, False), text[:cut]


WRONG = [{**item("a"), "principle": x} for x in ("", " \n", None, 3, ["p"], {"p": 1}, True)]


@pytest.mark.parametrize(
    "bad", [*WRONG, {}, {"title": "t"}, None, 3, "title", [], {"description": "of another kind"}]
)
def test_an_item_of_the_wrong_type_is_left_out_and_the_reply_not_whole(bad):
    assert read(answer([bad]))[0] == []
    assert read(answer([PAIR[0], bad, PAIR[1]])) == (PAIR, False)


NOTHING = ["", "no", "null", "3", '"a"', "[]", "{}", "{[}]", "<think>", "```json\n```"]


@pytest.mark.parametrize("text", [*NOTHING, answer([]), answer(None), answer("a"), answer({})])
def test_nothing_to_read(text):
    assert read(text) == ([], False)
    assert not read(f"<think>Perhaps {answer(PAIR)}, but then {text}")[1]


HOSTILE = {  # as long as replies get
    "one string": '{"title": "' + "x" * 20_000,
    "[": "[" * 5_000,
    "objects nested": '{"a":' * 5_000 + "1" + "}" * 5_000,
    "lists that never end": ("[" + "0," * 50) * 100,
    "answers in answers": f'{{"{KEY}": [' * 500,
    "a number of 9,000 digits": "[" + "9" * 9_000 + "]",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_reply_has_no_items(name):
    assert read(HOSTILE[name])[0] == []
