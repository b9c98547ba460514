"""A bank of the paper's size: replies to merges of the authors' candidates fit (Alg. 3, D4).

The candidates are those that single replies gave Qwen3-1.7B, 4B and 8B; they lie in
../shared/banks, and Qwen3's tokenizer in ../models or where QWEN3_TOKENIZER says.

    python tests/test_bank_scale.py        layers, replies and tokens as a table
"""

import json
import os
import pathlib
from collections import Counter

import conftest
import pytest
import transformers

import policy
import skills

SHARED = conftest.ROOT.parent / "shared" / "banks"
TOKENIZER = os.environ.get("QWEN3_TOKENIZER", conftest.ROOT.parent / "models" / "qwen3_tokenizer")
SIZES = {"1b": (350, 110), "4b": (505, 41), "8b": (575, 34)}  # skills, mistakes
PARTS = {"every item": 1, "half of the items": 2}

absent = not (SHARED.exists() and pathlib.Path(TOKENIZER).exists())
needs_files = pytest.mark.skipif(absent, reason="the authors' candidates or the tokenizer absent")


class Merger(skills.Writer):
    """A writer whose model keeps the first of every `part` items, and is cut where it has to be."""

    def __init__(self, tokenizer, part):
        super().__init__(None, tokenizer, None, None, 4096, 0)
        self.part, self.said, self.calls, self.lengths = part, [], [], []

    def log(self, question, row):
        self.said.append(row)

    def answer(self, questions, stage):
        answers = []
        for question in questions:
            ids = policy.chat_ids(self.tokenizer, question.prompt, thinking=False)
            listed = question.prompt.partition("to merge:\n")[2].partition("\n\nReturn ONLY")[0]
            text = skills.as_json({question.key: json.loads(listed)[:: self.part]})
            reply = self.tokenizer.encode(text)
            limit = self.limit(ids, merging=True)
            answers.append((self.tokenizer.decode(reply[:limit]), len(reply) > limit))
            self.lengths.append((len(ids), min(limit, len(reply))))
        self.calls.append(len(questions))
        return answers


def candidates(name):
    bank = json.loads((SHARED / f"candidates_{name}.json").read_text())
    return {key: bank[key] for key in skills.FIELDS}


def merged(name, part):
    """The merged lists, the records of their layers, and the writer that merged them."""
    writer = Merger(transformers.AutoTokenizer.from_pretrained(TOKENIZER), part)
    lists, layers = skills.merge_lists(candidates(name), writer, 32, 3)
    return lists, layers, writer


@needs_files
@pytest.mark.parametrize("name", SIZES)
def test_a_model_that_keeps_every_item_loses_none_and_every_reply_is_whole(name):
    lists, layers, writer = merged(name, 1)
    assert {row["outcome"] for row in writer.said} == {"read"}
    for key, size in zip(skills.FIELDS, SIZES[name]):
        assert layers[key][0]["input_items"] == size
        assert [layer["output_items"] for layer in layers[key]] == [size] * len(layers[key])
        texts = {skills.entry_text(entry, key) for entry in candidates(name)[key]}
        assert {skills.entry_text(entry, key) for entry in lists[key]} == texts


@needs_files
def test_a_model_that_merges_half_comes_to_its_root_group_without_losing_a_reply():
    _, layers, writer = merged("1b", 2)
    assert {row["outcome"] for row in writer.said} == {"read"}
    assert [layer["output_items"] for layer in layers["general_skills"]] == [175, 88, 44, 22, 11]
    assert {layers[key][-1]["stopped_reason"] for key in layers} == {"root_group_reached"}


def main():
    columns = "candidates | the model keeps | list | layers | items | replies | lost"
    print(f"| {columns} | prompt tokens | reply tokens | longest reply |")
    print("|---" * 10 + "|")
    for name in SIZES:
        for kept, part in PARTS.items():
            lists, layers, writer = merged(name, part)
            kinds = [row["kind"] for row in writer.said]
            lost = Counter(row["kind"] for row in writer.said if row["outcome"] == "lost")
            for key in skills.FIELDS:
                kind = f"merge_{skills.SHORT[key]}"
                own = [x for x, found in zip(writer.lengths, kinds) if found == kind]
                prompts, replies = ([length[i] for length in own] for i in (0, 1))
                row = [f"qwen3_{name}", kept, skills.SHORT[key], len(layers[key])]
                row += [f"{layers[key][0]['input_items']} to {len(lists[key])}", len(own)]
                row += [lost[kind], f"{sum(prompts):,}", f"{sum(replies):,}", f"{max(replies):,}"]
                print("| " + " | ".join(map(str, row)) + " |")
            steps = 0
            lengths = iter(writer.lengths)
            for call in writer.calls:
                steps += max(next(lengths)[1] for _ in range(call))
            print(f"qwen3_{name}, {kept}: {len(writer.calls)} calls, {steps:,} decoding steps")


if __name__ == "__main__":
    main()
