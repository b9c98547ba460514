"""Merging a bank of the paper's size: no item and no reply is lost on the way (Alg. 3, D4)."""

import pytest

import skills
from research.banks import bank_scale

FILES = bank_scale.SHARED.exists() and bank_scale.TOKENIZER.exists()
pytestmark = pytest.mark.skipif(not FILES, reason="no candidates of the authors or no tokenizer")


@pytest.mark.parametrize("name", bank_scale.SIZES)
def test_a_model_that_keeps_every_item_loses_none_and_every_reply_is_whole(name):
    lists, layers, writer = bank_scale.merged(name, 1)
    assert {row["outcome"] for row in writer.replies} == {"read"}
    for key, size in zip(skills.FIELDS, bank_scale.SIZES[name]):
        assert layers[key][0]["input_items"] == size
        assert [layer["output_items"] for layer in layers[key]] == [size] * len(layers[key])
        texts = {skills.entry_text(entry, key) for entry in bank_scale.candidates(name)[key]}
        assert {skills.entry_text(entry, key) for entry in lists[key]} == texts


def test_a_model_that_merges_half_comes_to_its_root_group_without_losing_a_reply():
    _, layers, writer = bank_scale.merged("1b", 2)
    assert {row["outcome"] for row in writer.replies} == {"read"}
    assert [layer["output_items"] for layer in layers["general_skills"]] == [175, 88, 44, 22, 11]
    assert {layers[key][-1]["stopped_reason"] for key in layers} == {"root_group_reached"}
