"""Families of models, with random weights: what adapters change, caches, vision towers.

That rows decode and score as each alone is in spec/test_rollout.py and spec/test_scoring.py.
"""

import conftest
import pytest
import torch
import transformers
from conftest import decoded, make_model, make_tokenizer, one_line, save_model, watched

import rollout
import scoring
from lib import model

SEVEN = "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"
FAMILIES = {
    "qwen3": SEVEN,
    "llama": SEVEN,
    "qwen3_5_text": f"in_proj_a in_proj_b in_proj_qkv in_proj_z out_proj {SEVEN}",
    "gemma3_text": SEVEN,
    "phi3": "down_proj gate_up_proj o_proj qkv_proj",
    "lfm2": "in_proj k_proj out_proj q_proj v_proj w1 w2 w3",
    "gpt2": "c_attn c_fc c_proj",  # not of torch's class Linear
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
EXPERTS = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4}
SETTINGS = {  # what a kind of model needs besides
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "falcon_h1": {"mamba_d_ssm": 64, **MAMBA},
    "bamba": {"attn_layer_indices": [1], "bos_token_id": 1, **MAMBA},
    "qwen2_moe": EXPERTS,
}

# --------------------------------------------------------------------------------------- adapters


@pytest.mark.parametrize("kind", FAMILIES)
def test_s7_all_linear_modules_have_adapters_and_each_learns(kind):
    """Not the head, and not a convolution."""
    lm = model.with_adapters(make_model(kind, **SETTINGS.get(kind, {})), 4, 8)
    params = model.trained(lm)
    for p in params.values():
        torch.nn.init.normal_(p, std=0.02)
    assert {name.split(".")[-4] for name in params} == {*FAMILIES[kind].split()}
    scoring.token_logprobs(lm, [[1, 2, 3]], [[4, 5, 6]], grad=True).sum().backward()
    for name, p in params.items():
        assert p.grad is not None and p.grad.any(), name


PASSED_OVER = {"qwen2_moe": "extras/on_trl.py", "bamba": "Mamba"}  # and a word of the line


@pytest.mark.parametrize("kind", PASSED_OVER)
def test_a_model_of_which_adapters_would_reach_a_part_is_one_line(kind):
    """Of the experts the shared one, and nothing that Mamba's kernels read."""
    lm = make_model(kind, **SETTINGS[kind])
    one_line(lambda: model.with_adapters(lm, 4, 8), PASSED_OVER[kind], "S7")


# ----------------------------------------------------------------------------------------- caches

OF_TOKEN = {  # bytes of a token's keys and values: 4 of a number, heads of 16
    "qwen3": 4 * 2 * 2 * 16,  # two layers
    "gemma3_text": 4 * 2 * 2 * 16,
    "qwen3_5_text": 4 * 2 * 16,  # one layer has keys
    "lfm2": 4 * 2 * 16,
    "falcon_h1": 4 * 2 * 2 * 16,
}
OF_ROW = {  # bytes of a row's states
    "qwen3_5_text": 4 * (4 * 64 + 4 * 8 * 8),  # 64 channels are convoluted, 4 states of 8 x 8
    "lfm2": 4 * 3 * 32,
    "falcon_h1": 4 * 2 * (4 * 80 + 4 * 16 * 8),  # two layers: 64 + 2 * 8 channels, 4 of 16 x 8
}


@pytest.mark.parametrize("kind", OF_TOKEN)
def test_a_cache_has_these_bytes_and_rows_that_wait_have_the_samples_of_rows_alone(kind):
    """Prompts of 60, 65, 70, 75 and 80 tokens. A row has 128 places more, and its states count as
    places. Three rows fit, and with a place less two."""
    lm = make_model(kind, eos_token_id=None, **SETTINGS.get(kind, {}))
    of_token, of_row = OF_TOKEN[kind], OF_ROW.get(kind, 0)
    assert rollout.cache_bytes(lm) == (of_token, of_row)
    jobs = [(60 + 5 * i, 40 - 7 * i) for i in range(5)]  # tokens of the prompt, and to be drawn
    alone = decoded(lm, jobs, 1)
    assert [len(alone[i]) for i in range(5)] == [40, 33, 26, 19, 12]
    of_three = 3 * (70 + 128 + of_row / of_token)
    for places, first_read in {of_three: (3, 70), of_three - 1: (2, 65)}.items():
        with watched(lm) as passes:
            assert decoded(lm, jobs, 5, places) == alone
        reads = [shape for shape in passes[1:] if shape[1] > 1]  # the first pass measures
        assert reads[0] == first_read


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", {**FAMILIES, **SETTINGS})
def test_each_of_these_families_is_loaded(kind, dtype, tmp_path):
    """Left padding changes no logits, and rows of its cache can leave and join."""
    save_model(tmp_path, kind, **SETTINGS.get(kind, {}))
    model.load_model(str(tmp_path), "cpu", dtype)


# -------------------------------------------------------------------- vision-language checkpoints

TEXT = {"vocab_size": 272, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "eos_token_id": 265}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
VISION |= {"out_hidden_size": 32, "num_position_embeddings": 16}


def save_with_vision(folder, kind, text, vision):
    """A random vision-language checkpoint; the model."""
    config = transformers.AutoConfig.for_model(kind, text_config=text, vision_config=vision)
    torch.manual_seed(0)
    lm = transformers.AutoModelForImageTextToText.from_config(config).eval()
    lm.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return lm


def test_a_vision_language_checkpoint_is_loaded_as_its_text_model(tmp_path):
    """Its adapters are those of the text model, and a server, which loads it whole, is refused."""
    whole = save_with_vision(tmp_path, "qwen3_5", {**TEXT, **conftest.HYBRID}, VISION)
    lm, _ = model.load_model(str(tmp_path), "cpu")
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(lm(input_ids=ids).logits, whole(input_ids=ids).logits)
    adapted = {name.split(".")[-4] for name in model.trained(model.with_adapters(lm, 4, 8))}
    assert adapted == {*FAMILIES["qwen3_5_text"].split()}
    one_line(lambda: model.load_outline(str(tmp_path)), f"model {tmp_path}", "text model")
