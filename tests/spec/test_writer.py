"""The model as the bank's writer: greedy and sampled replies, limits, outcomes, the log."""

import itertools
import json

import pytest
from conftest import make_bank, make_model

import rollout
import skills
from rollout import Sampling

G, E = KEYS = list(skills.FIELDS)
STOP = 265  # the tests' tokenizer ends a turn with it
REPLY_TOKENS = 400


def item(name, key=G):
    return {field: f"{name} {field}" for field in skills.FIELDS[key]}


def reply_of(names, key=G):
    return json.dumps({key: [item(name, key) for name in names]})


class Sampler:
    """A fake `sample`: gives these replies in turn, and keeps the calls that asked for them."""

    def __init__(self, tokenizer, replies=()):
        self.tokenizer, self.replies, self.calls = tokenizer, iter(replies), []

    def __call__(self, rows, sampling, stage):
        assert rows, "nothing to sample"
        self.calls.append((rows, sampling, stage))
        ids_of_rows = {}
        for row in rows:
            ids = self.tokenizer.encode(next(self.replies), add_special_tokens=False)
            ids_of_rows[row.index] = [*ids, STOP][: row.left]
        return ids_of_rows

    @property
    def keys(self):
        """The temperature of each call, and the keys of its rows."""
        temperatures_and_keys = []
        for rows, sampling, _ in self.calls:
            temperatures_and_keys.append((sampling.temperature, [row.key for row in rows]))
        return temperatures_and_keys


@pytest.fixture
def make_writer(tokenizer):
    """A writer that gives these replies in turn, its sampler, and the rows that it logs."""

    def make(*replies, step=0):
        sampler, logged = Sampler(tokenizer, replies), []
        writer = skills.Writer(tokenizer, [STOP], sampler, logged.append, REPLY_TOKENS, 7, step)
        return writer, sampler, logged

    return make


def ask(writer, *prompts, shown=0):
    questions = [skills.Question(prompt, G, shown) for prompt in prompts]
    return writer.answer(questions, "asking")


def keys_of(*prompts, times=0):
    return [rollout.sample_key(7, 0, prompt, times) for prompt in prompts]


def test_a_new_prompt_is_answered_greedily_and_one_that_comes_again_by_sampling(make_writer):
    """D4. Replies come back in the order of the prompts, whichever way they were decoded."""
    writer, sampler, _ = make_writer("A", "B", "C", "another A")
    assert ask(writer, "a", "b") == [("A", False), ("B", False)]
    assert ask(writer, "a", "c") == [("another A", False), ("C", False)]
    greedy, sampled = Sampling(temperature=0.0), Sampling()
    assert [sampling for _, sampling, _ in sampler.calls] == [greedy, greedy, sampled]


def test_the_draws_are_named_by_the_prompt_and_how_often_it_came_before(make_writer):
    writer, sampler, _ = make_writer(*"ABCDEF")
    ask(writer, "a", "b")
    ask(writer, "b")
    ask(writer, "b", "a")
    again = [*keys_of("b", times=2), *keys_of("a", times=1)]
    calls = [(0.0, keys_of("a", "b")), (1.1, keys_of("b", times=1)), (1.1, again)]
    assert sampler.keys == calls


def test_thinking_is_off_and_no_special_token_stands_in_a_reply(make_writer, tokenizer):
    writer, sampler, _ = make_writer("A<|im_start|>B")
    assert ask(writer, "a") == [("AB", False)]
    (row,) = sampler.calls[0][0]
    assert row.prompt == rollout.chat_ids(tokenizer, "a", thinking=False)
    assert tokenizer.decode(row.prompt).endswith("<think>\n\n</think>\n\n")


def test_a_merge_has_room_for_all_of_its_prompt_and_an_extraction_for_the_reply_limit(make_writer):
    """D4: a quarter more than the prompt's tokens."""
    writer, sampler, _ = make_writer("A", "B")
    ask(writer, "a" * 100)
    ask(writer, "b" * 100, shown=2)
    (extraction,), (merging,) = (rows for rows, _, _ in sampler.calls)
    assert extraction.left == REPLY_TOKENS
    assert merging.left == len(merging.prompt) * 5 // 4 > 125


def test_a_reply_without_a_stop_id_was_cut_off(make_writer):
    writer, _, _ = make_writer("x" * REPLY_TOKENS, "")
    assert ask(writer, "a", "b") == [("x" * REPLY_TOKENS, True), ("", False)]
    writer, _, logged = make_writer("x" * REPLY_TOKENS, reply_of("a"))
    candidates = skills.extract([memory(1)], writer)
    assert [entry["title"] for entry in candidates[G]] == ["a title"]
    outcomes = [(row["outcome"], row.get("cause")) for row in logged]
    assert outcomes == [("retried", "cut off"), ("read", None)]


def memory(i, reward=1):
    return {"problem_id": f"p{i}", "problem": f"What is {i} plus 1?", "reward": reward}


def test_every_reply_is_logged_with_its_prompt_step_and_outcome(make_writer):
    writer, _, logged = make_writer("no", reply_of("a"), step=25)
    skills.extract([memory(1)], writer)
    prompt = skills.render_extraction(memory(1), G)
    row = {"step": 25, "kind": "extract_skills", "prompt": prompt}
    assert logged == [
        {**row, "attempt": 1, "items": 0, "outcome": "retried", "cause": "no JSON", "reply": "no"},
        {**row, "attempt": 2, "items": 1, "outcome": "read", "reply": reply_of("a")},
    ]


def test_taking_the_outcomes_makes_every_prompt_new_again(make_writer):
    first = ["no", reply_of("abcd")[:-30], "no"]
    writer, sampler, _ = make_writer(*first, reply_of("a"), reply_of("b"))
    memories = [memory(1), memory(2)]
    skills.extract(memories, writer)
    assert writer.lost == {"no JSON": 1}
    assert writer.take() == {"read": 0, "repaired": 1, "retried": 1, "lost": 1}
    assert writer.take() == dict.fromkeys(("read", "repaired", "retried", "lost"), 0)
    assert not writer.lost
    skills.extract(memories, writer)
    assert sampler.keys[2] == sampler.keys[0]  # greedy, with the same names
    assert writer.take()["read"] == 2


def test_a_merge_of_a_later_layer_samples_where_a_prompt_comes_again(make_writer):
    """(ab)(cd)(e): the second reply is unreadable, then both groups come back as they were."""
    replies = [reply_of("ab"), "no", reply_of("cd"), reply_of("ab"), reply_of("cd")]
    writer, sampler, _ = make_writer(*replies)
    items = [item(name) for name in "abcde"]
    merged, _ = skills.merge(items, G, writer, 2, 2)
    assert [entry["title"][0] for entry in merged] == [*"abcde"]
    ab, cd = (skills.render_merge(group, G) for group in (items[:2], items[2:4]))
    last = [*keys_of(ab, times=1), *keys_of(cd, times=2)]
    assert sampler.keys == [(0.0, keys_of(ab, cd)), (1.1, keys_of(cd, times=1)), (1.1, last)]
    stages = [stage for _, _, stage in sampler.calls]
    assert stages == ["merging, layer 1", "merging, layer 1", "merging, layer 2"]


def test_the_second_merge_of_an_evolution_samples_what_the_first_one_asked(make_writer):
    """Two failures with a mistake each, no dynamic entries: lines 11 and 12 show the same group."""
    both = reply_of("ab", E)
    writer, sampler, _ = make_writer(reply_of("a", E), reply_of("b", E), both, both)
    window = [rolled(1), rolled(2)]
    skills.evolve(make_bank(), window, 25, writer)
    group = skills.render_merge([item("a", E), item("b", E)], E)
    assert sampler.keys[1:] == [(0.0, keys_of(group)), (1.1, keys_of(group, times=1))]


def rolled(i):
    return rollout.Rollout(f"p{i}", f"What is {i} plus 1?", "9", [1], [2], "so", "3", -1, False)


def test_replies_of_a_model_depend_on_the_prompt_and_its_repetitions_alone(tokenizer):
    """So that a resumed run gets the same replies, whatever stood beside a prompt."""
    model = make_model()

    def sample(rows, sampling, stage):
        turns = rollout.stream(model, tokenizer, rows, sampling, 16)
        return dict(itertools.chain.from_iterable(turns))

    stops = rollout.stop_ids(model, tokenizer)
    writer = skills.Writer(tokenizer, stops, sample, lambda row: None, 8, 0)

    def replies(*prompts):
        return [reply for reply, _ in ask(writer, *prompts)]

    a, b = replies("a", "b b b")
    first, other = replies("a", "b b b")
    (second,) = replies("a")
    assert len({a, first, second}) == 3 and other != b
    writer.take()
    assert replies("b b b", "a", "c")[:2] == [b, a] and replies() == []
    assert replies("b b b") == [other] and replies("a") == [first] and replies("a") == [second]
    prompt = rollout.chat_ids(tokenizer, "a", thinking=False)
    ids = rollout.generate(model, tokenizer, [prompt], Sampling(0.0, 1.0, 0, 8), [0])[0]
    assert a == tokenizer.decode(ids, skip_special_tokens=True)
