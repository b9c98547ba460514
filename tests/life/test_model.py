"""Models, encoders, adapters and checkpoints from files; which ids the token mask removes."""

import functools
import json
import resource
import shutil
import types

import numpy as np
import peft
import pytest
import torch
import transformers
from conftest import make_encoder, make_model, make_tokenizer, one_line
from driver import make_adapter
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_5 import modeling_qwen3_5

import scoring
from lib import model
from lib.model import (
    base_of,
    load_adapter,
    load_encoder,
    load_model,
    load_outline,
    masked_token_ids,
    restore,
    save,
    trained,
    with_adapters,
)

PROMPTS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16]]
COMPLETIONS = [[20, 21, 22], [23, 24, 25, 26, 27, 28], [29]]


def save_model(folder, *kind, **changes):
    """A folder with a random model and its tokenizer."""
    make_model(*kind, **changes).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def load(folder, **settings):
    return load_model(str(folder), "cpu", **settings)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("base") / "model")


# ---------------------------------------------------------------------------------------- loading


def test_a_model_is_loaded_in_eval_mode_without_dropout(base, tmp_path):
    folder = save_model(tmp_path / "dropping", attention_dropout=0.5)
    model, tokenizer = load(folder)
    assert not model.training and model.dtype == torch.float32
    assert json.loads((folder / "config.json").read_text())["attention_dropout"] == 0.5
    model.train()
    ids = torch.tensor([PROMPTS[0]])
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    assert tokenizer.get_vocab() == make_tokenizer().get_vocab()
    assert load(base, dtype="bfloat16")[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "kind, changes",
    {
        "seed_oss": {"attention_dropout": 0.1, "residual_dropout": 0.1},  # floats of its modules
        "persimmon": {"attention_dropout": 0.1, "hidden_dropout": 0.0},  # read from its config
        "opt": {"layerdrop": 0.5, "ffn_dim": 48, "word_embed_proj_dim": 32},  # whole layers
    }.items(),
)
def test_two_passes_in_train_mode_are_equal_without_dropout(kind, changes):
    lm = make_model(kind, **changes).train()
    ids = torch.tensor([PROMPTS[0]])
    one, other = (lm(input_ids=ids).logits for _ in range(2))
    assert not torch.equal(one, other)
    model.remove_dropout(lm)
    assert torch.equal(lm(input_ids=ids).logits, lm(input_ids=ids).logits)


def test_an_outline_has_the_shapes_and_stop_ids_and_no_weights(base, tmp_path):
    """Qwen3 stops on either of two ids, which generation_config.json alone names."""
    folder = shutil.copytree(base, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [265, 263]}')
    outline, tokenizer = load_outline(str(folder))
    model, _ = load(folder)
    assert {p.device.type for p in outline.parameters()} == {"meta"}
    shapes = [{name: p.shape for name, p in x.named_parameters()} for x in (outline, model)]
    assert shapes[0] == shapes[1]
    assert outline.generation_config.eos_token_id == [265, 263]
    assert tokenizer.chat_template == make_tokenizer().chat_template


@pytest.mark.parametrize("name", ["/no/such", "runs/no"])
def test_a_path_that_is_not_there_is_one_line_that_says_so(name):
    one_line(lambda: load(name), f"model {name} (no directory")
    one_line(lambda: load_outline(name), f"model {name} (no directory")
    one_line(lambda: load_encoder(name, "cpu"), f"encoder {name} (no directory")


BROKEN = {  # a file of the model, and what is left of it
    "chat_template.jinja": "{% for m in %}",
    "model.safetensors": "torn",
    "config.json": "{",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_is_one_line(name, base, tmp_path):
    folder = shutil.copytree(base, tmp_path / "model")
    (folder / name).write_text(BROKEN[name])
    one_line(lambda: load(folder), f"model {folder}: ")
    if name != "model.safetensors":  # an outline has no use for it
        one_line(lambda: load_outline(str(folder)), f"model {folder}: ")


INCOMPLETE = [  # files that are removed, a file that is written with its content, and words
    (["config.json"], {}, "config.json"),
    (["tokenizer*"], {}, "tokenizer.json"),
    ([], {"tokenizer.json": "{"}, "tokenizer.json"),
    ([], {"config.json": '{"program": "sgsd.py"}'}, "run"),
    ([], {"adapter_config.json": "{}"}, "adapter"),
]


@pytest.mark.parametrize("removed, written, words", INCOMPLETE)
def test_a_folder_that_is_no_whole_model_says_what_is_missing(
    removed, written, words, base, tmp_path
):
    folder = shutil.copytree(base, tmp_path / "model")
    for pattern in removed:
        for file in folder.glob(pattern):
            file.unlink()
    for name, content in written.items():
        (folder / name).write_text(content)
    one_line(lambda: load(folder), f"model {folder}: ", words)
    one_line(lambda: load_outline(str(folder)), f"model {folder}: ", words)


def change_weights(folder, change):
    """Save a model's weights again after a change."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_that_lacks_a_weight_is_refused_by_its_name_and_a_tied_head_is_no_lack(
    tied, tmp_path
):
    folder = save_model(tmp_path / "model", tie_word_embeddings=tied)
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) != tied
    load(folder)
    model.check_model(str(folder))
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(folder, lambda tensors: tensors.pop(name))
    one_line(lambda: load(folder), f"model {folder}: ", name)
    one_line(lambda: model.check_model(str(folder)), f"model {folder}: ", name)


def test_a_weight_that_is_not_finite_is_refused_in_a_model_and_in_an_adapter(base, tmp_path):
    folder = save_model(tmp_path / "model")
    change_weights(folder, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))
    one_line(lambda: load(folder), f"model {folder}: ", "not finite")
    adapter = tmp_path / "adapter"
    make_adapter(adapter, base)
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    for x in tensors.values():
        x.fill_(float("inf"))
    save_file(tensors, file)
    one_line(lambda: load_adapter(load(base)[0], adapter), f"adapter {adapter}: ", "not finite")


def test_a_hub_id_is_asked_for_once_and_a_path_never(monkeypatch):
    asked = []

    def head(url, **_):
        asked.append(url)
        raise ConnectionError("no network")

    monkeypatch.setattr(model, "get_hf_file_metadata", head)
    one_line(lambda: load("lib/nope"), "model lib/nope", "lib/ is a folder here")
    one_line(lambda: load_encoder("no/such", "cpu"), "encoder no/such", "no network")
    assert len(asked) == 2
    for name in ("./nope", "../nope", "/no/such"):
        one_line(lambda name=name: load(name), f"model {name} (no directory")
    assert len(asked) == 2


def test_a_chat_template_that_drops_the_problem_is_one_line(base, tmp_path):
    folder = shutil.copytree(base, tmp_path / "model")
    template = "User: {% for part in messages[0].content %}x{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    one_line(lambda: load(folder), f"model {folder}: ", "chat template")


def test_a_chat_template_with_an_id_that_the_model_lacks_is_one_line(tmp_path):
    one_line(
        lambda: load(save_model(tmp_path, vocab=260, pad_token_id=0)),
        f"model {tmp_path}: ",
        "no rows",
    )


LONG_ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
UNSUPPORTED = [  # a kind of model, settings of it, attention kernels, and words of the line
    ("gemma2", {}, "sdpa", "eager"),  # transformers says that it has no such kernels
    ("deepseek_v32", {}, "sdpa", "indexed_attention"),  # its cache holds more than keys and values
    ("mamba", {"state_size": 8}, "eager", "recurrent"),
    ("minimax", {"num_local_experts": 2}, "sdpa", "Cache"),  # it has a cache of its own
    ("llama", {"rope_parameters": LONG_ROPE}, "sdpa", "longest row"),  # positions depend on it
]


@pytest.mark.parametrize("kind, changes, attn, words", UNSUPPORTED)
def test_a_model_that_cannot_be_used_is_one_line(kind, changes, attn, words, tmp_path):
    save_model(tmp_path, kind, **changes)
    one_line(lambda: load(tmp_path, attn=attn), f"model {tmp_path}: ", words)


def test_states_that_take_in_a_rows_padding_are_refused(tmp_path, monkeypatch):
    """A row would decode otherwise beside a longer one."""
    save_model(tmp_path, "qwen3_5_text")
    load(tmp_path)
    monkeypatch.setattr(modeling_qwen3_5, "apply_mask_to_padding_states", lambda x, _: x)
    one_line(lambda: load(tmp_path), f"model {tmp_path}: ", "left padding")


# ---------------------------------------------------------------------------------------- encoder


def test_the_encoder_gives_the_same_unit_vector_for_the_same_text(tmp_path):
    make_encoder(tmp_path)
    embed = load_encoder(str(tmp_path), "cpu")
    x = embed(["a b", "a b", "c"])
    assert x.shape == (3, 16) and x.dtype == np.float32 and np.array_equal(x[0], x[1])
    np.testing.assert_allclose(np.linalg.norm(x, axis=1), 1, atol=1e-5)
    assert np.array_equal(embed(["a b"])[0], x[0])
    assert np.array_equal(embed(["\ud800"]), embed(["?"]))  # half of a surrogate pair


# --------------------------------------------------------------------------------------- adapters


def test_adapters_are_fp32_beside_a_bf16_base_and_without_them_it_is_the_base():
    model = make_model().bfloat16()
    want = scoring.token_logprobs(model, PROMPTS, COMPLETIONS)
    model = with_adapters(model, 4, 8)
    params = trained(model)
    assert model.training and len(params) == 2 * 7 * 2  # A, B of seven projections in two layers
    assert {p.dtype for p in params.values()} == {torch.float32}
    # B is 0 at the start.
    assert torch.equal(scoring.token_logprobs(model, PROMPTS, COMPLETIONS), want)
    for p in params.values():
        torch.nn.init.normal_(p, std=0.2)
    assert not torch.equal(scoring.token_logprobs(model, PROMPTS, COMPLETIONS), want)
    with model.disable_adapter():
        assert torch.equal(scoring.token_logprobs(model, PROMPTS, COMPLETIONS), want)
    loss = scoring.token_logprobs(model, PROMPTS, COMPLETIONS, grad=True).sum()
    for grad in torch.autograd.grad(loss, list(params.values())):
        assert grad.dtype == torch.float32 and grad.any() and grad.isfinite().all()


def test_long_passes_recompute_activations_short_ones_keep_them_and_the_gradient_is_the_same():
    """A layer that is recomputed runs again in the backward pass."""
    ids, gradients, runs = torch.arange(30)[None], [], []
    for checkpoint_above in (29, 30):
        model = with_adapters(make_model(), 4, 8, checkpoint_above)
        params = [*trained(model).values()]
        torch.manual_seed(0)
        for p in params:
            torch.nn.init.normal_(p, std=0.2)
        layer = model.get_base_model().model.layers[0].self_attn
        runs.append(0)

        def count(*_):
            runs[-1] += 1

        layer.register_forward_hook(count)
        model(input_ids=ids).logits.log_softmax(-1)[0, :, 5].sum().backward()
        gradients.append([p.grad for p in params])
    assert runs == [2, 1]
    for recomputed, kept in zip(*gradients):
        assert torch.equal(recomputed, kept) and kept.any()


def test_an_adapter_is_loaded_in_eval_mode(base, tmp_path):
    make_adapter(tmp_path / "adapter", base)
    want = peft.PeftModel.from_pretrained(load(base)[0], tmp_path / "adapter").eval()
    model = load_adapter(load(base)[0], tmp_path / "adapter")
    assert not model.training and not trained(model)
    ids = torch.tensor([PROMPTS[0]])
    assert torch.equal(model(input_ids=ids).logits, want(input_ids=ids).logits)


def test_an_adapter_in_the_place_of_a_model_is_one_line(base, tmp_path):
    """transformers would load it with its base, and a second adapter would replace it."""
    checkpoint(tmp_path / "saved", base)
    one_line(lambda: load(tmp_path / "saved"), f"model {tmp_path}/saved: ", "adapter")


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"hidden_size": 48}, "size mismatch"),
        ({"num_hidden_layers": 1}, "layers.1.self_attn.q_proj"),
        ({"num_hidden_layers": 3}, "layers.2.self_attn.q_proj"),
    ],
)
def test_an_adapter_of_another_base_is_one_line(changes, word, base, tmp_path):
    """Also where PEFT would load a part of it, or leave random weights in a layer."""
    make_adapter(tmp_path / "adapter", base)
    other, _ = load(save_model(tmp_path / "other", **changes))
    one_line(lambda: load_adapter(other, tmp_path / "adapter"), f"{tmp_path}/adapter: ", word)


def test_the_base_of_an_adapter_is_the_one_that_it_names_or_that_is_given(tmp_path):
    file = tmp_path / "adapter_config.json"
    assert base_of(tmp_path) == base_of(tmp_path, "mine") == ""  # no adapter
    file.write_text(json.dumps({"base_model_name_or_path": "org/model", "r": 4, "lora_alpha": 8}))
    assert base_of(tmp_path) == "org/model" and base_of(tmp_path, "mine") == "mine"
    for content in ("{", "{}", "[]"):
        file.write_text(content)
        one_line(lambda: base_of(tmp_path), f"adapter {tmp_path}: ")
    about = {"base_model_name_or_path": "/no/such", "r": 4, "lora_alpha": 8}
    file.write_text(json.dumps(about))
    one_line(lambda: base_of(tmp_path), "/no/such", "--model")


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
    model, tokenizer = load(base)
    model = with_adapters(model, rank, 8)
    optimizer = torch.optim.AdamW(trained(model).values(), lr=1e-2, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        scoring.token_logprobs(model, PROMPTS, COMPLETIONS, grad=True).sum().backward()
        optimizer.step()
    return model, tokenizer, optimizer


def checkpoint(folder, base, rank=4, steps=2):
    folder.mkdir()
    model, tokenizer, optimizer = trainee(base, rank, steps)
    save(folder, model, tokenizer, optimizer, {"of a copy": torch.tensor([1.0, 2.0])})
    return model, tokenizer, optimizer


def test_a_checkpoint_brings_back_adapter_moments_and_extra_tensors(base, tmp_path):
    model, _, optimizer = checkpoint(tmp_path / "saved", base)
    new_model, _, new_optimizer = trainee(base)
    extra_tensors = restore(tmp_path / "saved", new_model, new_optimizer)
    assert list(extra_tensors) == ["of a copy"]
    assert extra_tensors["of a copy"].tolist() == [1.0, 2.0]
    for name, p in trained(model).items():
        q = trained(new_model)[name]
        assert torch.equal(p, q)
        for part in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[p][part], new_optimizer.state[q][part])


def test_a_checkpoint_without_a_finite_step_has_no_moments(base, tmp_path):
    checkpoint(tmp_path / "saved", base, steps=0)
    model, _, optimizer = trainee(base)
    extra_tensors = restore(tmp_path / "saved", model, optimizer)
    assert [*extra_tensors] == ["of a copy"] and not optimizer.state


def test_a_checkpoint_loads_by_transformers_and_peft_alone_from_any_directory(
    base, tmp_path, monkeypatch
):
    """Though the model was given as a relative path; no file of it is a pickle."""
    monkeypatch.chdir(base.parent)
    model, tokenizer, _ = checkpoint(tmp_path / "saved", "model")
    assert not list((tmp_path / "saved").glob("*.bin"))
    modes = {path.stat().st_mode for path in (tmp_path / "saved").iterdir()}
    assert len(modes) == 1  # a server of another user reads the weights, too
    monkeypatch.chdir(tmp_path / "saved")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(".")
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(loaded(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    vocabulary = transformers.AutoTokenizer.from_pretrained(".").get_vocab()
    assert vocabulary == tokenizer.get_vocab()


def test_a_checkpoint_of_another_model_is_one_line(base, tmp_path):
    checkpoint(tmp_path / "saved", base)
    other, _, optimizer = trainee(save_model(tmp_path / "other", num_hidden_layers=3))
    one_line(lambda: restore(tmp_path / "saved", other, optimizer), "saved: ", "layers.2")


def test_a_full_disk_is_an_os_error_that_names_the_folder(base, tmp_path):
    """As full as one process can make it: no file may grow beyond 10,000 bytes."""
    model, tokenizer, optimizer = trainee(base)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError, match=f"{tmp_path}: .*too large"):
            save(tmp_path, model, tokenizer, optimizer, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_context_that_rope_stretches_is_as_long_as_that():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}
    for rope, longest in ((None, 1000), ({"rope_type": "default"}, 1000), (yarn, 4000)):
        limits = types.SimpleNamespace(max_position_embeddings=1000, rope_parameters=rope)
        settings = types.SimpleNamespace(get_text_config=lambda limits=limits: limits)
        lm = types.SimpleNamespace(config=settings)
        model.refuse_beyond_context(lm, 100, longest - 100, "--flag")
        most = longest - 99
        beyond = functools.partial(model.refuse_beyond_context, lm, 100, most, "--flag")
        one_line(beyond, f"--flag {most}", "prompt of 100")
