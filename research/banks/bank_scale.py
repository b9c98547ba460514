"""Do replies to merges of a bank of the paper's size fit their limit (Alg. 3, D4)?

    python research/banks/bank_scale.py    layers, replies and tokens as a table

The candidates are those that single replies gave the authors' Qwen3-1.7B, 4B and 8B, in
../shared/banks. Qwen3's tokenizer is in ../models, or where QWEN3_TOKENIZER says.
"""

import argparse
import json
import os
import pathlib
import sys
from collections import Counter

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import transformers

import rollout
import skills
from research.markdown_table import head_of, row_of

SHARED = ROOT.parent / "shared" / "banks"
TOKENIZER = pathlib.Path(
    os.environ.get("QWEN3_TOKENIZER", ROOT.parent / "models" / "qwen3_tokenizer")
)
SIZES = {"1b": (350, 110), "4b": (505, 41), "8b": (575, 34)}  # skills, mistakes
PARTS = {"every item": 1, "half of the items": 2}


class Merger(skills.Writer):
    """A writer whose model keeps the first of every `part` items, and is cut where it has to be."""

    def __init__(self, tokenizer, part):
        self.part, self.replies, self.calls, self.lengths = part, [], [], []
        super().__init__(tokenizer, [], None, self.replies.append, reply_tokens=4096, seed=0)

    def answer(self, questions, stage):
        answers = []
        for question in questions:
            ids = rollout.chat_ids(self.tokenizer, question.prompt, thinking=False)
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


def main(argv=None):
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args(argv)
    head = ["candidates", "the model keeps", "list", "layers", "items", "replies", "lost"]
    head += ["prompt tokens", "reply tokens", "longest reply"]
    print("\n".join(head_of(head)))
    for name in SIZES:
        for kept, part in PARTS.items():
            lists, layers, writer = merged(name, part)
            kinds = [row["kind"] for row in writer.replies]
            lost = Counter(row["kind"] for row in writer.replies if row["outcome"] == "lost")
            for key in skills.FIELDS:
                kind = f"merge_{skills.SHORT[key]}"
                own = [x for x, found in zip(writer.lengths, kinds) if found == kind]
                prompts, replies = ([length[i] for length in own] for i in (0, 1))
                row = [f"qwen3_{name}", kept, skills.SHORT[key], len(layers[key])]
                row += [f"{layers[key][0]['input_items']} to {len(lists[key])}", len(own)]
                row += [lost[kind], f"{sum(prompts):,}", f"{sum(replies):,}", f"{max(replies):,}"]
                print(row_of(row))
            steps = 0
            lengths = iter(writer.lengths)
            for call in writer.calls:
                steps += max(next(lengths)[1] for _ in range(call))
            print(f"qwen3_{name}, {kept}: {len(writer.calls)} calls, {steps:,} decoding steps")


if __name__ == "__main__":
    main()
