"""A causal language model: loading, LoRA adapters, the token ids to mask, a checkpoint's files.

A checkpoint is a folder with a PEFT adapter that anyone can load, the tokenizer, and the trainer's
state (safetensors, no pickle). Models are loaded without `trust_remote_code`.
"""

import contextlib
import re
import shutil
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import logging as hub_logging
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
)
from transformers.utils import logging

# Layers of a `DynamicCache` whose tensors have the rows first, so that rows can leave and join.
CACHE_LAYERS = {
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "DummyLayer",
}
# PEFT settings that are safe in --adapter. Each is read by training, or does not change the output,
# or has an effect that `restore` checks.
READ_OR_HARMLESS = """
    r lora_alpha use_rslora base_model_name_or_path revision task_type auto_mapping peft_version
    inference_mode fan_in_fan_out lora_dropout target_modules exclude_modules layers_to_transform
    layers_pattern
""".split()
CHAT = [{"role": "user", "content": "xyzzy"}]  # every chat template must keep this text


# ---------------------------------------------------------------------------------------- loading


@contextlib.contextmanager
def _loading(kind: str, name: str) -> Iterator[str]:
    """Where to load from: a folder's absolute path, so that adapters find their base; or a hub id.

    Any error in the block becomes a ValueError of one line, because the libraries raise many kinds.
    """
    logging.disable_progress_bar()
    hub_logging.set_verbosity_error()  # else, offline, the hub's client reports every retry
    logging.set_verbosity_error()  # else transformers prints a table of missing weights
    is_directory = Path(name).is_dir()
    place = name if is_directory else f"{name} (no directory here)"
    try:
        if not is_directory:
            _check_hub_id(name)
        yield str(Path(name).absolute()) if is_directory else name
    except Exception as e:
        kind_of_error = "" if type(e) is ValueError else f"{type(e).__name__}: "
        cause = textwrap.shorten(f"{kind_of_error}{e}", 500, placeholder=" ...")
        raise ValueError(f"{kind} {place}: {cause}") from None


def _check_hub_id(name: str) -> None:
    """ValueError for a mistyped path. Without a connection we set the libraries to offline mode.

    We ask the hub once, because the libraries would ask it six times for each file, with growing
    pauses. If we are connected, but the answer is late or an error, the libraries ask again.
    """
    path = Path(name)
    is_path = path.exists() or name.startswith((".", "/", "~"))
    if is_path or (len(path.parts) > 1 and path.parent.is_dir()):
        raise ValueError("check the path")
    try:
        with ThreadPool(1) as pool:  # in a thread, because a DNS lookup has no time limit
            pool.apply_async(HfApi().model_info, [name], {"timeout": 5}).get(timeout=30)
    except Exception as e:  # its kind depends on the HTTP library that the hub's client uses
        is_connected = isinstance(e, HfHubHTTPError) or type(e).__name__ == "ReadTimeout"
        constants.HF_HUB_OFFLINE |= not is_connected


def load_model(
    name: str, device: str | torch.device, dtype: str = "auto", attn: str = "sdpa"
) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer; the model is in eval mode, without dropout.

    name: a hub id or a folder. device: "meta" reads all but the numbers of the weights, so that bad
    input shows early. dtype: of the weights; "auto" is bfloat16 on CUDA and float32 elsewhere.
    attn: transformers' name of the attention kernels (S25). Of the model's own settings of
    generation we keep only the stop ids.
    Raises ValueError if either does not load, for a weight that is missing or not finite, and if
    rows of one batch would influence each other.
    """
    # PEFT uses this name, which transformers deprecates.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    device = torch.device(device)
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    with _loading("model", name) as source:
        tokenizer, ids = _load_tokenizer(source)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            attn_implementation=attn,
            device_map={"": device},  # else each of eight processes fills host memory first
            output_loading_info=True,
            trust_remote_code=False,  # else a model may ask to run its own code
        )
        model, info = loaded
        missing = sorted(info["missing_keys"])
        if missing:  # transformers has made them up
            raise ValueError(f"missing weights: {len(missing)}, such as {missing[0]}")
        if model.config.get_text_config() is not model.config:
            raise ValueError(f"{type(model).__name__} takes more than text; give a text model")
        if max(ids) >= model.get_input_embeddings().weight.shape[0]:
            raise ValueError("its tokenizer has ids that the model has no rows for")
        model.generation_config = GenerationConfig(
            eos_token_id=model.generation_config.eos_token_id
        )
        remove_dropout(model)
        check_batching(model.eval(), ids)
    return model, tokenizer


def load_outline(name: str) -> tuple[Any, Any]:
    """Load a model's shapes and settings without its weights, and its tokenizer.

    That is enough if a server samples: the outline gives the stop ids and computes nothing. Raises
    ValueError as `load_model` does, and for a vision-language checkpoint: `load_model` takes only
    its text model, but engines load all of it, under other module names.
    """
    with _loading("model", name) as source:
        tokenizer, _ = _load_tokenizer(source)
        settings = AutoConfig.from_pretrained(source, trust_remote_code=False)
        if settings.get_text_config() is not settings:
            raise ValueError(
                "engines and TRL load a vision-language checkpoint whole, under other names; "
                "save its text model alone (docs/guide.md)"
            )
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(settings, trust_remote_code=False)
        with contextlib.suppress(OSError):  # not every model has a generation_config.json
            model.generation_config = GenerationConfig.from_pretrained(source)
    return model, tokenizer


def _load_tokenizer(source: str) -> tuple[Any, list[int]]:
    """A model's tokenizer and CHAT's ids. ValueError for an adapter, and if the ids lack the text.

    Some chat templates drop the text, as does an empty tokenizer that transformers may make up.
    """
    if (Path(source) / "adapter_config.json").exists():  # transformers would also load its base
        raise ValueError(
            "it is an adapter; give its base as --model, and in training this folder as --adapter"
        )
    AutoConfig.from_pretrained(source, trust_remote_code=False)  # raises for what is no model
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    ids: Any = tokenizer.apply_chat_template(CHAT, return_dict=False)
    if CHAT[0]["content"] not in tokenizer.decode(ids):
        raise ValueError("its chat template drops what a user says, or its tokenizer is missing")
    return tokenizer, ids


def load_encoder(name: str, device: str | torch.device) -> Callable[[Sequence[str]], np.ndarray]:
    """Load a sentence-transformers model as embed(texts) -> unit vectors, float32 [n, d].

    name: a hub id or a folder. Raises ValueError if it does not load, or is no such model. From any
    other model, such as the policy, sentence-transformers would make an encoder that averages the
    last hidden states, and retrieval by such averages finds nothing.
    """
    with _loading("encoder", name) as source:
        from sentence_transformers import SentenceTransformer, util

        if not util.is_sentence_transformer_model(source):
            raise ValueError(
                "no modules.json, which every sentence-transformers model has; "
                "offline, give a local directory by --encoder"
            )
        # Whatever precision the files are in, the vectors are float32.
        encoder = SentenceTransformer(source, device=str(device)).float()

    def embed(texts: Sequence[str]) -> np.ndarray:
        texts = [text.encode("utf-8", "replace").decode() for text in texts]
        # One by one: in a batch, padding would change the last bits.
        return encoder.encode(
            texts, batch_size=1, normalize_embeddings=True, show_progress_bar=False
        )

    return embed


def refuse_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """ValueError that names the first tensor with a NaN or an infinite number."""
    for name, x in tensors:
        if not x.detach().sum().isfinite():
            raise ValueError(f"{name} is not finite: it has NaN or infinite numbers")


@torch.no_grad()
def check_batching(model, ids: list[int]) -> None:
    """ValueError if decoding cannot batch the model. Rows join, leave, and are padded on the left.

    ids: those of any text. We decode two rows that end on the same id and differ only in their
    padding, which the mask leaves out: zeros in one row, all of `ids` in the other. If the logits
    of the next two tokens differ between the rows, padding leaks. (We compare two rows of one batch
    because their rounding is the same, also in a mixture of experts.) On "meta" we look only at the
    kinds of layers in the cache.
    """
    cache = DynamicCache(config=model.config)
    kinds = {type(layer).__name__ for layer in cache.layers}
    # Without any keys and values `rollout.stream` could not count the cache's size in tokens.
    if kinds - CACHE_LAYERS or kinds == {"LinearAttentionLayer"}:
        raise ValueError(f"decoding cannot join rows of a cache of {', '.join(sorted(kinds))}")
    if {"dynamic", "longrope"} & {str(vars(x).get("rope_type")) for x in model.modules()}:
        raise ValueError("its positions depend on the longest row of a batch")
    if model.device.type == "meta":
        return
    refuse_not_finite(model.named_parameters())
    ids_2L = torch.tensor([[0] * len(ids) + ids[-1:], ids + ids[-1:]], device=model.device)
    mask_2L = torch.tensor([[0] * len(ids) + [1]] * 2, device=model.device)
    settings = GenerationConfig(
        min_new_tokens=2, max_new_tokens=2, output_logits=True, return_dict_in_generate=True
    )
    # `cache` was `past_key_values` before transformers 5.24.
    out = model.generate(ids_2L, settings, attention_mask=mask_2L, cache=cache)
    logits_2nV = torch.stack(out.logits, 1)  # row, token, vocabulary
    share = difference(logits_2nV[0], logits_2nV[1])
    if not share <= 1e-3:  # also true for a NaN
        raise ValueError(f"its logits take in a row's left padding ({share:.1%} of their norm)")


def difference(logits: Tensor, others: Tensor) -> float:
    """The norm of the difference of logits [..., V], as a share of the norm of `others`.

    Both are centred, because adding a number to all logits changes no probability.
    """
    x, y = (z.float() - z.float().mean(-1, keepdim=True) for z in (logits, others))
    return ((x - y).norm() / y.norm()).item()


def remove_dropout(model) -> None:
    """Turn dropout off: teacher and student must be the same function of their input when training.

    Models keep its probability in Dropout modules, in floats of their own (Seed-OSS), and in the
    config that a forward pass reads (Persimmon). OPT's layerdrop skips whole layers.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for holder in (module, getattr(module, "config", None)):
            for name, value in getattr(holder, "__dict__", {}).items():
                if "drop" in name and isinstance(value, float):
                    setattr(holder, name, 0.0)


# --------------------------------------------------------------------------------------- adapters


def causal_lm(model):
    """The transformers model inside a PEFT wrapper, adapters included; or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def with_adapters(model, rank: int, alpha: Any, checkpoint_above: int = 2048):
    """The model with LoRA on all linear modules but the head (S7), in train mode. No dropout.

    PEFT makes adapters fp32: bf16 would lose a step of 5e-6 (S22). If a pass with a gradient has
    more than `checkpoint_above` tokens, its backward pass recomputes the activations; else we keep
    them (S36). The gradient is equal. Keeping them is about 1.3 times faster, and needs some 5 MB
    a token for Qwen3-1.7B in bf16 (28 layers, per layer some 50,000 numbers in bf16, and in fp32
    the adapters' 18,000 inputs), so 10 GB for 2,048 tokens.
    Raises ValueError for a mixture of experts, of which adapters would reach only a part, for Mamba
    layers, whose kernels read weights past an adapter, and if PEFT refuses the model.
    """
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=rank, lora_alpha=alpha, task_type="CAUSAL_LM", target_modules="all-linear")
    if {path.rpartition(".")[2] for path, _ in model.named_modules()} & {"experts", "mamba"}:
        raise ValueError(
            f"model {model.name_or_path}: no adapters for a mixture of experts and for Mamba "
            "layers (S7); extras/on_trl.py --full trains all weights"
        )
    model = get_peft_model(model, lora)
    causal = causal_lm(model)
    causal.activation_checkpointing_enable({"use_reentrant": False})
    layers = [module for module in causal.modules() if hasattr(module, "gradient_checkpointing")]

    def checkpoint_long_passes(backbone, args, kwargs) -> None:
        ids_BL = args[0] if args else kwargs["input_ids"]  # GPT-2 passes ids by position
        if torch.is_grad_enabled():
            for layer in layers:
                layer.gradient_checkpointing = ids_BL.numel() > checkpoint_above

    causal.base_model.register_forward_pre_hook(checkpoint_long_passes, with_kwargs=True)
    return model.train()


def trained(model) -> dict[str, torch.nn.Parameter]:
    """The parameters that learn, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def lora_of(folder: str | Path, to_train: bool = False) -> tuple[str, int, Any]:
    """Base, rank and alpha of the adapter in a folder; ValueError where there is none.

    rsLoRA scales by alpha / sqrt(rank), LoRA by alpha / rank. For rsLoRA we return the alpha by
    which LoRA scales alike. to_train: ValueError also for a setting that training would ignore.
    """
    from peft import LoraConfig, PeftConfig

    with _loading("adapter", str(folder)) as source:
        config: Any = PeftConfig.from_pretrained(source)
        for name, value in config.to_dict().items() if to_train else []:
            if name not in READ_OR_HARMLESS and value not in (
                getattr(LoraConfig(), name, None),
                False,
                "gaussian",  # how init_lora_weights drew the first weights
            ):
                raise ValueError(
                    f"{name} is {value!r}, and training reads only r, lora_alpha and use_rslora; "
                    "merge it into its base, and give that as --model"
                )
        return (
            str(config.base_model_name_or_path),
            config.r,
            config.lora_alpha * (config.r**0.5 if config.use_rslora else 1),
        )


def load_adapter(model, folder: str | Path):
    """The model with a LoRA adapter that any program may have saved, in eval mode.

    Raises ValueError as `restore` does.
    """
    from peft import PeftConfig, get_peft_model

    with _loading("adapter", str(folder)) as source:
        adapted = get_peft_model(model, PeftConfig.from_pretrained(source))
    restore(folder, adapted)
    return adapted.eval()


# ------------------------------------------------------------------------------------- masked ids


def masked_token_ids(tokenizer) -> set[int]:
    """Ids that the token mask removes (§2.4, S2): special, <|...|>, think tags, 1-8 newlines."""
    ids = {i for i in tokenizer.all_special_ids if i is not None}
    ids |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    control = re.compile(r"<\|.*\|>|</?think>")
    ids |= {i for token, i in tokenizer.get_vocab().items() if control.fullmatch(token)}
    # Some tokenizers still put a special id in front: `letter` has this id and the a, to cut off.
    letter = tokenizer.encode("a", add_special_tokens=False)
    for n in range(1, 9):
        newlines = tokenizer.encode("a" + "\n" * n, add_special_tokens=False)[len(letter) :]
        if len(newlines) == 1:
            ids.update(newlines)
    return ids


# ------------------------------------------------------------------------------------ checkpoints


def save(
    folder: str | Path,
    model,
    tokenizer,
    optimizer: Optimizer,
    extra_tensors: dict[str, Tensor],
) -> None:
    """Fill a folder with a checkpoint: adapter, tokenizer, the trainer's state.

    The step is in the folder's name alone. extra_tensors: more tensors to save, by name. PEFT
    adds a model card that names the base.
    A kill may leave only some of the files, so the caller renames the folder once it is whole.
    Raises OSError if the disk is full.
    """
    folder = Path(folder)
    state = {name: x.cpu() for name, x in extra_tensors.items()}
    for name, p in trained(model).items():
        for part, value in optimizer.state[p].items():
            state[f"{name}.{part}"] = value.cpu()
    try:
        # By default PEFT asks the hub whether the embeddings have grown; ours never do.
        model.save_pretrained(folder, save_embedding_layers=False)
        tokenizer.save_pretrained(folder)
        save_file(state, folder / "trainer.safetensors")
        for file in folder.glob("*.safetensors"):  # so far only the owner may read them
            shutil.copymode(folder / "adapter_config.json", file)
    except Exception as e:  # safetensors and tokenizers raise other kinds for a full disk
        raise OSError(f"{folder}: {e}") from None


def restore(folder: str | Path, model, optimizer: Optimizer | None = None) -> dict[str, Tensor]:
    """Load a checkpoint's adapter and AdamW moments into place, and return its extra tensors.

    Without an optimizer we load only an adapter, which any program may have saved, and return {}.
    Raises ValueError for a file that is missing, torn or a pickle, for a number that is not finite,
    and unless the file and the model have the same tensors.
    """
    from peft import set_peft_model_state_dict

    with _loading("adapter", str(folder)) as source:
        tensors = load_file(Path(source) / "adapter_model.safetensors")
        result: Any = set_peft_model_state_dict(model, tensors)
        missing = [name for name in result.missing_keys if ".lora_" in name]
        misplaced = result.unexpected_keys + missing
        if misplaced:
            raise ValueError(f"only it or its base {model.name_or_path} has {misplaced[0]}")
        refuse_not_finite(model.named_parameters())
    if optimizer is None:
        return {}
    with _loading("checkpoint", str(folder)) as source:
        state = load_file(Path(source) / "trainer.safetensors")
        refuse_not_finite(state.items())
        has_moments = any(name.endswith(".exp_avg") for name in state)  # else AdamW made no step
        for name, p in trained(model).items() if has_moments else []:
            optimizer.state[p]["step"] = state.pop(f"{name}.step")  # AdamW keeps it on the CPU
            for part in ("exp_avg", "exp_avg_sq"):
                optimizer.state[p][part] = state.pop(f"{name}.{part}").to(p.device)
    return {name: x.to(causal_lm(model).device) for name, x in state.items()}
