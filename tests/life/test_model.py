"""Models, encoders, adapters and checkpoints from files; which ids the token mask removes."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from conftest import make_adapter, make_encoder, make_model, make_tokenizer, one_line, save_model
from huggingface_hub import HfApi, constants
from safetensors.torch import load_file, save_file
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_5 import modeling_qwen3_5

import scoring
from lib import model
from lib.model import load_encoder, load_model, lora_of, masked_token_ids, trained, with_adapters

PROMPTS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16]]
COMPLETIONS = [[20, 21, 22], [23, 24, 25, 26, 27, 28], [29]]


def load(folder, **settings):
    return load_model(str(folder), "cpu", **settings)


def look(folder):
    return load_model(str(folder), "meta")


def outline(folder):
    return model.load_outline(str(folder))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("base") / "model")


# ---------------------------------------------------------------------------------------- loading


DROPPING = [
    ("persimmon", {"attention_dropout": 0.1, "hidden_dropout": 0.0}),  # read from its config
    ("opt", {"layerdrop": 0.5, "ffn_dim": 48, "word_embed_proj_dim": 32}),  # whole layers
]


@pytest.mark.parametrize("kind, changes", DROPPING)
def test_two_passes_in_train_mode_are_equal_without_dropout(kind, changes, tmp_path):
    lm, ids = make_model(kind, **changes).train(), torch.tensor([PROMPTS[0]])
    assert not torch.equal(lm(input_ids=ids).logits, lm(input_ids=ids).logits)
    lm = load(save_model(tmp_path, kind, **changes), attn="eager")[0].train()
    assert torch.equal(lm(input_ids=ids).logits, lm(input_ids=ids).logits)


def test_an_outline_and_a_look_have_the_shapes_and_stop_ids_and_no_weights(base, tmp_path):
    """Qwen3 stops on either of two ids, which generation_config.json alone names."""
    folder = shutil.copytree(base, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [265, 263]}')
    whole, _ = load(folder)
    for glance in (outline, look):
        lm, tokenizer = glance(folder)
        assert {p.device.type for p in lm.parameters()} == {"meta"}
        assert [p.shape for p in lm.parameters()] == [p.shape for p in whole.parameters()]
        assert lm.generation_config.eos_token_id == [265, 263]
        assert tokenizer.chat_template == make_tokenizer().chat_template


@pytest.fixture
def copy(base, tmp_path):
    """A copy of the model, to be damaged."""
    return shutil.copytree(base, tmp_path / "model")


def refused_by(call, folder, words=""):
    one_line(lambda: call(folder), f"model {folder}: ", words)


DEAF = "User: {% for part in messages[0].content %}x{% endfor %}"
WRITTEN = {  # words of the line: a file, and what is written to it
    "model_type": ("config.json", '{"program": "sgsd.py"}'),  # it is a run
    "adapter": ("adapter_config.json", "{}"),  # else it would be loaded with its base
    "chat template": ("chat_template.jinja", DEAF),
    "JSONDecodeError": ("tokenizer.json", "torn"),
}


@pytest.mark.parametrize("words", WRITTEN)
def test_what_is_wrong_beside_the_weights_shows_without_them(words, copy):
    name, text = WRITTEN[words]
    (copy / name).write_text(text)
    for call in (load, look, outline):
        refused_by(call, copy, words)


def edit(file, part, change):
    """Of a file's tensors change(name, x) stands in the place of the first with this name."""
    tensors = load_file(file)
    name = next((name for name in tensors if part in name), next(iter(tensors)))
    tensors |= change(name, tensors.pop(name))
    save_file(tensors, file, metadata={"format": "pt"})


def missing(name, x):
    return {}


def shorter(name, x):
    return {name: x[:1].clone()}


def infinite(name, x):
    return {name: torch.full_like(x, torch.inf)}


def test_weights_that_lack_are_torn_or_do_not_fit_the_vocabulary_are_one_line(copy):
    """Without their numbers, too, which show what is not finite."""
    edit(copy / "model.safetensors", "model.norm.weight", missing)
    refused_by(load, copy, "model.norm.weight")
    refused_by(look, copy, "model.norm.weight")
    save_model(copy)
    edit(copy / "model.safetensors", "model.norm.weight", infinite)
    refused_by(load, copy, "not finite")
    look(copy)
    (copy / "model.safetensors").write_text("torn")
    refused_by(load, copy)
    refused_by(look, copy)
    outline(copy)
    save_model(copy, vocab=260, pad_token_id=0)
    refused_by(load, copy, "no rows")
    refused_by(look, copy, "no rows")
    outline(copy)


class ReadTimeout(Exception):
    """By this name, whichever library asks."""


def test_a_late_answer_of_the_hub_does_not_make_the_process_offline(monkeypatch):
    """It may be for a policy, and then the encoder is not in the cache."""

    def fail(*args, **settings):
        raise ReadTimeout

    monkeypatch.setattr(HfApi, "model_info", fail)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", fail)  # which would try again
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    one_line(lambda: load("no/such"), "no/such", "ReadTimeout")
    assert not constants.HF_HUB_OFFLINE


LONG_ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
UNSUPPORTED = [  # a kind of model, settings of it, and words of the line; without weights, too
    ("deepseek_v32", {}, "DynamicIndexedLayer"),  # its cache holds more than keys and values
    ("mamba", {"state_size": 8}, "LinearAttentionLayer"),  # states alone
    ("llama", {"rope_parameters": LONG_ROPE}, "longest row"),  # positions depend on it
]


@pytest.mark.parametrize("kind, changes, words", UNSUPPORTED)
def test_a_model_that_cannot_be_batched_is_one_line(kind, changes, words, tmp_path):
    save_model(tmp_path, kind, **changes)
    for device in ("cpu", "meta"):
        call = lambda device=device: load_model(str(tmp_path), device, attn="eager")  # noqa: E731
        one_line(call, f"model {tmp_path}: ", words)


IGNORING = [  # a hybrid, its layers, and the module whose states then take in the padding
    ("qwen3_5_text", {}, modeling_qwen3_5),
    ("lfm2", {"layer_types": ["conv", "full_attention"]}, modeling_lfm2),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind, changes, module", IGNORING)
def test_states_that_take_in_a_rows_padding_are_refused(
    kind, changes, module, dtype, tmp_path, monkeypatch
):
    """A row would decode otherwise beside a longer one. RWKV does so as it is."""
    save_model(tmp_path, kind, **changes)
    load(tmp_path, dtype=dtype)
    monkeypatch.setattr(module, "apply_mask_to_padding_states", lambda x, _: x)
    one_line(lambda: load(tmp_path, dtype=dtype), f"model {tmp_path}: ", "left padding")
    save_model(tmp_path, "rwkv")
    one_line(lambda: load(tmp_path, dtype=dtype, attn="eager"), f"model {tmp_path}: ", "padding")


# ---------------------------------------------------------------------------------------- encoder


def test_the_encoder_gives_the_same_unit_vector_for_the_same_text(tmp_path):
    make_encoder(tmp_path)
    embed = load_encoder(str(tmp_path), "cpu")
    x = embed(["a b", "a b", "c"])
    assert x.shape == (3, 16) and x.dtype == np.float32 and np.array_equal(x[0], x[1])
    np.testing.assert_allclose(np.linalg.norm(x, axis=1), 1, atol=1e-5)
    assert np.array_equal(embed(["\ud800"]), embed(["?"]))  # half of a surrogate pair


# --------------------------------------------------------------------------------------- adapters


def test_adapters_are_fp32_beside_a_bf16_base_and_without_them_it_is_the_base():
    lm = make_model().bfloat16()
    want = scoring.token_logprobs(lm, PROMPTS, COMPLETIONS)
    lm = with_adapters(lm, 4, 8)
    params = trained(lm)
    assert lm.training and len(params) == 2 * 7 * 2  # A, B of seven projections in two layers
    assert {p.dtype for p in params.values()} == {torch.float32}
    # B is 0 at the start.
    assert torch.equal(scoring.token_logprobs(lm, PROMPTS, COMPLETIONS), want)
    for p in params.values():
        torch.nn.init.normal_(p, std=0.2)
    assert not torch.equal(scoring.token_logprobs(lm, PROMPTS, COMPLETIONS), want)
    with lm.disable_adapter():
        assert torch.equal(scoring.token_logprobs(lm, PROMPTS, COMPLETIONS), want)
    loss = scoring.token_logprobs(lm, PROMPTS, COMPLETIONS, grad=True).sum()
    for grad in torch.autograd.grad(loss, list(params.values())):
        assert grad.dtype == torch.float32 and grad.any() and grad.isfinite().all()


def test_long_passes_recompute_activations_short_ones_keep_them_and_the_gradient_is_the_same():
    """A layer that is recomputed runs again in the backward pass."""
    ids, gradients = torch.arange(30)[None], []
    for checkpoint_above, passes in ((29, 2), (30, 1)):
        lm = with_adapters(make_model(), 4, 8, checkpoint_above)
        params, seen = [*trained(lm).values()], []
        torch.manual_seed(0)
        for p in params:
            torch.nn.init.normal_(p, std=0.2)
        layer = lm.get_base_model().model.layers[0].self_attn
        layer.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        lm(input_ids=ids).logits.log_softmax(-1)[0, :, 5].sum().backward()
        gradients.append([p.grad for p in params])
        assert len(seen) == passes
    for recomputed, kept in zip(*gradients):
        assert torch.equal(recomputed, kept) and kept.any()


def test_an_adapter_names_its_base_rank_and_alpha(base, tmp_path):
    make_adapter(tmp_path, base, rank=4)
    assert lora_of(tmp_path) == (str(base), 4, 8)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_rslora": True}))
    assert lora_of(tmp_path) == (str(base), 4, 16)  # 8 / sqrt(4) is 16 / 4
    (tmp_path / "adapter_config.json").write_text("[]")
    one_line(lambda: lora_of(tmp_path), f"adapter {tmp_path}: ")
    one_line(lambda: lora_of(base), f"adapter {base}: ", "adapter_config.json")


# ------------------------------------------------------------------------------------- masked ids


def test_newlines_are_masked_where_the_tokenizer_puts_a_blank_first():
    """As SentencePiece's do: a text of newlines alone has one more id than newlines in a text."""
    from tokenizers import normalizers

    prepending = make_tokenizer()
    prepending.backend_tokenizer.normalizer = normalizers.Prepend("_")
    assert len(prepending.encode("\n")) == 2
    newline = prepending.encode("a\n")[-1]
    assert newline in masked_token_ids(prepending) and prepending.decode([newline]) == "\n"


# ------------------------------------------------------------------------------------ checkpoints


def trainee(base, rank=4, steps=0):
    """Model with adapters, tokenizer and optimizer, after some steps of training."""
    torch.manual_seed(0)
    lm, tokenizer = load(base)
    lm = with_adapters(lm, rank, 8)
    optimizer = torch.optim.AdamW(trained(lm).values(), lr=1e-2, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        scoring.token_logprobs(lm, PROMPTS, COMPLETIONS, grad=True).sum().backward()
        optimizer.step()
    return lm, tokenizer, optimizer


def checkpoint(folder, base, rank=4, steps=2):
    folder.mkdir()
    lm, tokenizer, optimizer = trainee(base, rank, steps)
    model.save(folder, lm, tokenizer, optimizer, {"of a copy": torch.tensor([1.0, 2.0])})
    return lm, tokenizer, optimizer


@pytest.mark.parametrize("steps", [2, 0])
def test_a_checkpoint_brings_back_adapter_moments_and_extra_tensors(steps, base, tmp_path):
    """Without a finite step there are no moments."""
    lm, _, optimizer = checkpoint(tmp_path / "saved", base, steps=steps)
    new_lm, _, new_optimizer = trainee(base)
    extra_tensors = model.restore(tmp_path / "saved", new_lm, new_optimizer)
    assert {name: x.tolist() for name, x in extra_tensors.items()} == {"of a copy": [1.0, 2.0]}
    assert len(new_optimizer.state) == (28 if steps else 0)
    for p, q in zip(trained(lm).values(), trained(new_lm).values()):
        assert torch.equal(p, q)
        for part in ("step", "exp_avg", "exp_avg_sq") if steps else ():
            assert torch.equal(optimizer.state[p][part], new_optimizer.state[q][part])


def test_a_checkpoint_loads_by_transformers_and_peft_alone(base, tmp_path, monkeypatch):
    """Though the model was given as a relative path."""
    monkeypatch.chdir(base.parent)
    lm, tokenizer, _ = checkpoint(tmp_path / "saved", "model")
    modes = {path.stat().st_mode for path in (tmp_path / "saved").iterdir()}
    assert len(modes) == 1  # a server of another user reads the weights, too
    monkeypatch.chdir(tmp_path / "saved")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(".")
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(loaded(input_ids=ids).logits, lm.eval()(input_ids=ids).logits)
    assert transformers.AutoTokenizer.from_pretrained(".").get_vocab() == tokenizer.get_vocab()


def test_a_checkpoint_whose_tensors_do_not_fit_is_one_line(base, tmp_path):
    """Also where PEFT would load a part of an adapter, or leave random weights in a layer."""
    checkpoint(tmp_path / "saved", base)
    lm, _, optimizer = trainee(base)

    def refused_with(file, tensor, change):
        folder = shutil.copytree(tmp_path / "saved", tmp_path / "damaged", dirs_exist_ok=True)
        edit(folder / file, tensor, change)
        one_line(lambda: model.restore(folder, lm, optimizer), f"{folder}: ", tensor)

    def foreign(name, x):
        return {name: x, "base.layers.2.mlp.lora_A.weight": x + 1}

    adapter, trainer = "adapter_model.safetensors", "trainer.safetensors"
    refused_with(adapter, "layers.1.mlp.up_proj.lora_A", infinite)
    refused_with(adapter, "layers.1.mlp.up_proj.lora_B", shorter)
    refused_with(adapter, "layers.1.mlp.up_proj.lora_B", missing)
    refused_with(adapter, "layers.2.mlp", foreign)
    refused_with(trainer, ".exp_avg", infinite)
    refused_with(trainer, ".step", missing)
