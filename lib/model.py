"""A causal language model: loading, LoRA adapters, the token ids to mask, a checkpoint's files.

A checkpoint is a folder with a PEFT adapter that anyone can load, the tokenizer, and the trainer's
state (safetensors and JSON, no pickle). Models are loaded without `trust_remote_code`.
"""

import contextlib
import json
import os
import re
import shutil
import textwrap
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import ModelCard, constants
from huggingface_hub.utils import get_session
from huggingface_hub.utils import logging as hub_logging
from safetensors import SafetensorError
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
from transformers.utils import is_flash_attn_2_available, logging

# Layers whose part of a `DynamicCache` has rows first, so that rows can leave and be joined.
LAYERS_WITH_KEYS = {"full_attention", "sliding_attention", "chunked_attention", "hybrid"}
LAYERS_WITH_STATES = {"linear_attention", "conv", "hybrid"}
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # AdamW's state of one parameter


# ---------------------------------------------------------------------------------------- loading


def load_model(
    name: str, device: str | torch.device, dtype: str = "auto", attn: str = "sdpa"
) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer; the model is in eval mode, without dropout.

    name: a hub id or a directory. dtype: of the weights; "auto" is bfloat16 on CUDA and float32
    on CPU. attn: transformers' name of the attention kernels (S25).
    Raises ValueError if either does not load, if they do not fit together, or if rows of one batch
    would influence each other.
    """
    logging.disable_progress_bar()  # one bar is enough
    hub_logging.set_verbosity_error()  # offline it reports every retry, for a minute
    # PEFT asks the model by a name that transformers 5.20 deprecated.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    device = torch.device(device)
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    if attn == "flash_attention_2" and not is_flash_attn_2_available():
        raise ValueError(f"attention {attn}: flash-attn is not installed, or torch finds no GPU")
    source = _located("model", name)
    try:  # without trust_remote_code=False a model may ask to run its own code
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attn}
        options["trust_remote_code"] = False
        if device.type == "cuda":  # else each of eight processes fills host memory first
            options["device_map"] = {"": device}
        model: Any = AutoModelForCausalLM.from_pretrained(source, **options)
    except Exception as e:  # transformers raises many kinds: no such id, offline, no config
        hint = "; --attn eager suits every model" if "attention" in str(e) else ""
        raise ValueError(f"model {name}: not loaded ({_brief(e)}){hint}") from None
    if model.config.get_text_config() is not model.config:
        why = "takes more than text, and transformers has no text model for its checkpoint"
        raise ValueError(f"model {name}: {type(model).__name__} {why}; take a text model")
    _check_tokenizer(name, model, tokenizer)
    _check_batching(name, model)
    _remove_dropout(model)
    model.get_output_embeddings().register_forward_pre_hook(_contiguous)
    return model.to(device).eval(), tokenizer


def ask_hub_once(names: Sequence[str]) -> None:
    """Without an answer from the hub within 10 s, look for hub ids in this machine's caches alone.

    Else each id would cost up to a minute of retries. names: ids, paths of files and directories.
    """
    if all(Path(name).exists() for name in names):
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception:  # of the HTTP library, which differs between versions
        import datasets  # it takes a second

        constants.HF_HUB_OFFLINE = True
        datasets.config.HF_HUB_OFFLINE = True


def load_outline(name: str) -> tuple[Any, Any]:
    """Load a model's shapes and settings without its weights, and its tokenizer.

    That is enough if a server does the sampling: the outline names the stop ids and computes
    nothing. Raises ValueError as `load_model` does, and for a vision-language checkpoint, of which
    `load_model` takes the text model: engines load all of it, with other names of modules.
    """
    source = _located("model", name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        settings = AutoConfig.from_pretrained(source, trust_remote_code=False)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(settings, trust_remote_code=False)
        with contextlib.suppress(OSError):  # not every model has a generation_config.json
            model.generation_config = GenerationConfig.from_pretrained(source)
    except Exception as e:  # as in `load_model`
        why = f"could not read the tokenizer or config ({_brief(e)})"
        raise ValueError(f"model {name}: {why}") from None
    if settings.get_text_config() is not settings:
        rule = "engines and TRL load a vision-language checkpoint whole, under other names"
        raise ValueError(f"model {name}: {rule}; save its text model alone (docs/guide.md)")
    _check_tokenizer(name, model, tokenizer)
    return model, tokenizer


def load_encoder(name: str, device: str | torch.device) -> Callable[[Sequence[str]], np.ndarray]:
    """Load a sentence-transformers model as embed(texts) -> unit vectors, float32 [n, d].

    name: a hub id or a directory. Raises ValueError if it does not load, or if it is a causal
    language model, such as the policy: sentence-transformers would average its last hidden
    states, and retrieval by those finds nothing.
    """
    source = _located("encoder", name)
    hub_logging.set_verbosity_error()  # offline it reports every retry, for a minute
    try:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.util import is_sentence_transformer_model

        if not is_sentence_transformer_model(source):
            kinds = AutoConfig.from_pretrained(source, trust_remote_code=False).architectures
            if "ForCausalLM" in "".join(kinds or []):
                rule = "it is a causal model and no encoder; give a sentence-transformers model"
                raise ValueError(rule)
        # Whatever precision the files are in, the vectors are float32.
        encoder = SentenceTransformer(source, device=str(device)).float()
    except Exception as e:  # many kinds: no such id, offline, not an encoder
        fix = "" if Path(name).exists() else "; offline, give a local directory as --encoder"
        raise ValueError(f"encoder {name}: not loaded ({_brief(e)}){fix}") from None

    def embed(texts: Sequence[str]) -> np.ndarray:
        vectors = []
        for text in texts:  # one by one: in a batch, padding would change the last bits
            text = text.encode("utf-8", "replace").decode()
            encoded = encoder.encode(text, normalize_embeddings=True, show_progress_bar=False)
            vectors.append(encoded)
        return np.stack(vectors)

    return embed


def _located(kind: str, name: str) -> str:
    """A hub id as it is, a directory as its absolute path: adapters then find their base anywhere.

    ValueError for a path that is not there, before the hub is asked for it.
    """
    path = Path(name)
    is_beside = str(path.parent) != "." and path.parent.is_dir()  # tiny/modle
    looks_like_path = is_beside or name.startswith((".", "/", "~", "runs/")) or name.count("/") > 1
    fix = "give the directory of a saved model, or a hub id"
    if looks_like_path and not path.is_dir():
        raise ValueError(f"{kind} {name}: no such directory; {fix}")
    if path.is_dir() and not {"config.json", "modules.json"} & {*os.listdir(path)}:
        raise ValueError(f"{kind} {name}: holds no config.json, so no model; {fix}")
    if (path / "problems.json").exists():
        raise ValueError(f"{kind} {name}: is a run, and no model; give the model it trains")
    return str(path.absolute()) if path.exists() else name


def _check_tokenizer(name: str, model, tokenizer) -> None:
    """ValueError unless the chat template shows what a user says, and every id has a row."""
    where = f"model {name}: its tokenizer"
    chat = [{"role": "user", "content": "xyzzy"}]
    settings = {"add_generation_prompt": True, "return_dict": False, "enable_thinking": True}
    try:
        ids = tokenizer.apply_chat_template(chat, **settings)
        if "xyzzy" not in tokenizer.decode(ids):
            raise ValueError("it drops what a user says")
    except Exception as e:  # no template, or one that raises anything
        fix = "use an instruct model, or mend the template"
        raise ValueError(f"{where}'s chat template does not work ({_brief(e)}); {fix}") from None
    token_of_id = {i: token for token, i in tokenizer.get_vocab().items()}
    # Small Gemma 3 models have an image placeholder without a row; no text tokenizes to it.
    token_of_id.pop(getattr(tokenizer, "image_token_id", None), None)
    last, rows = max(token_of_id), model.get_input_embeddings().weight.shape[0]
    if last >= rows:
        sizes = f"knows {last + 1} ids, the model has rows for {rows}"
        fix = "use the model's own tokenizer"
        raise ValueError(f"{where} {sizes} (the last is {token_of_id[last]!r}); {fix}")


def _check_batching(name: str, model) -> None:
    """ValueError for a model whose rows cannot join and leave a batch, or influence each other."""
    layer_types = {*(getattr(model.config.get_text_config(), "layer_types", None) or [])}
    unsupported = layer_types - LAYERS_WITH_KEYS - LAYERS_WITH_STATES - {"mlp", "moe"}
    if getattr(model, "_is_stateful", False) and not layer_types & LAYERS_WITH_KEYS:
        unsupported.add("a recurrent state without attention")
    if unsupported:  # decoding joins keys, values and states of rows, and can join nothing else
        raise ValueError(f"model {name}: {', '.join(sorted(unsupported))}: not supported")
    if {"dynamic", "longrope"} & {str(vars(x).get("rope_type")) for x in model.modules()}:
        raise ValueError(f"model {name}: its positions depend on the longest row of a batch")
    kinds = ", ".join(sorted(layer_types & LAYERS_WITH_STATES))
    try:
        takes_in_padding = kinds and not _ignores_left_padding(model)
    except Exception as e:  # a cache of its own
        raise ValueError(f"model {name}: {kinds}: not supported ({_brief(e)})") from None
    if takes_in_padding:
        why = "their states take in a row's left padding"
        raise ValueError(f"model {name}: {kinds}: not supported ({why})")


@torch.no_grad()
def _ignores_left_padding(model) -> bool:
    """Whether a row has the same logits alone and padded on the left, except for rounding.

    With random Qwen3.5 models of 4 and 24 layers rounding makes up to 5% of the norm in bf16, and
    padding that is taken in at least 11%.
    """
    rows = []
    for padding in (0, 8):
        ids_1L = torch.tensor([[0] * padding + [*range(1, 9)]], device=model.device)
        cache = DynamicCache(config=model.config)
        with warnings.catch_warnings():  # the new name, `cache`, is unknown before 5.24
            warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
            out = model(input_ids=ids_1L, attention_mask=ids_1L.sign(), past_key_values=cache)
        rows.append(out.logits[0, padding:].float())
    tolerance = torch.finfo(model.dtype).eps ** 0.5  # 9% in bf16, 0.03% in fp32
    return bool((rows[1] - rows[0]).norm() <= tolerance * rows[0].norm())


def _remove_dropout(model) -> None:
    """Make teacher and student the same function of their input, in train mode too."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if name.endswith("dropout") and isinstance(value, float):
                setattr(module, name, 0.0)


def _contiguous(head: torch.nn.Module, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Copy the head's input into one piece; after a prompt, `generate` passes a slice.

    PyTorch copies the head's matrix once per row of such a slice. In bf16 on a CPU, eight rows of
    a 0.5B model took 12.6 s that way, and take 0.04 s.
    """
    return tuple(x.contiguous() for x in states)


# --------------------------------------------------------------------------------------- adapters


def causal_lm(model):
    """The transformers model inside a PEFT wrapper, adapters included; or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def linear_modules(model) -> list[str]:
    """Names of the modules that adapters change: all linear ones but the head (S7).

    They are Llama's and Qwen3's seven projections of attention and MLP, and what other families
    have in their places. Raises ValueError for a model without any, with Mamba layers, whose
    kernels read weights past an adapter, and with experts, of which adapters would reach a part.
    """
    names, linear = set(), set()
    for path, module in model.base_model.named_modules():
        name = path.rpartition(".")[2]
        names.add(name)
        if isinstance(module, torch.nn.Linear):
            linear.add(name)
    why = "" if linear else "has no linear modules"
    if "mamba" in names:
        why = "has Mamba layers"
    if "experts" in names:
        why = "is a mixture of experts, which extras/on_trl.py --full trains whole"
    if why:
        raise ValueError(f"model {model.name_or_path}: {why}: no adapters (S7); take another")
    return sorted(linear)


def with_adapters(model, rank: int, alpha: int, checkpoint_above: int = 2048):
    """The model with LoRA on all `linear_modules`, in train mode. No dropout, no biases.

    The adapters are fp32: bf16 would lose a step of 5e-6 (S22). A pass with a gradient over more
    than `checkpoint_above` tokens recomputes activations when it goes back, and keeps them
    otherwise, which is about 1.3 times faster; memory then grows with the tokens: about 5 MB each
    for Qwen3-1.7B in bf16 (28 layers, per layer some 50,000 bf16 numbers and 18,000 in fp32 before
    the adapters), so 10 GB for 2,048. The gradient is the same.
    Raises ValueError as `linear_modules` does.
    """
    from peft import LoraConfig, get_peft_model

    linear = linear_modules(model)
    lora = LoraConfig(r=rank, lora_alpha=alpha, task_type="CAUSAL_LM", target_modules=linear)
    model = get_peft_model(model, lora)
    causal = causal_lm(model)
    causal.activation_checkpointing_enable({"use_reentrant": False})
    causal.enable_input_require_grads()
    layers = [module for module in causal.modules() if hasattr(module, "gradient_checkpointing")]

    def checkpoint_long_passes(backbone, args, kwargs) -> None:
        if torch.is_grad_enabled():
            for layer in layers:
                layer.gradient_checkpointing = kwargs["input_ids"].numel() > checkpoint_above

    causal.base_model.register_forward_pre_hook(checkpoint_long_passes, with_kwargs=True)
    return model.train()


def trained(model) -> dict[str, torch.nn.Parameter]:
    """The parameters that learn, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _brief(error: BaseException) -> str:
    """An exception in one line of at most some 300 characters."""
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 300, placeholder=' ...')}"


def refuse_beyond_context(lm, prompt_tokens: int, new_tokens: int, flag: str) -> None:
    """ValueError unless a prompt and its longest reply fit the model's context together.

    flag: the one that sets new_tokens. A config that names no limit sets none.
    """
    text_config = lm.config.get_text_config()
    limit = getattr(text_config, "max_position_embeddings", None)
    rope = getattr(text_config, "rope_parameters", None) or {}
    stretched = rope.get("original_max_position_embeddings", 0) * rope.get("factor", 1)  # YaRN
    if limit and prompt_tokens + new_tokens > max(limit, stretched):
        rule = f"with a prompt of {prompt_tokens} tokens it exceeds the model's context of {limit}"
        alone = prompt_tokens >= max(limit, stretched)
        fix = "shorten or drop that problem" if alone else "lower it"
        raise ValueError(f"{flag} {new_tokens}: {rule} (max_position_embeddings); {fix}")


def base_of(folder: str | Path, base: str = "") -> str:
    """The model under the adapter in a folder; "" if the folder holds no adapter.

    base: replaces the model that the adapter names. A relative path in the adapter's config is
    looked for here, and then in each folder above the adapter.
    Raises ValueError if the config names no base, or an absolute path that does not exist.
    """
    file = Path(folder) / "adapter_config.json"
    if base or not file.exists():
        return base if file.exists() else ""
    try:
        name = json.loads(file.read_text())["base_model_name_or_path"]
        candidates = [parent / name for parent in (Path(), *file.parents)]
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{file}: names no base model ({e!r}); give it as --model") from None
    models = [str(path) for path in candidates if (path / "config.json").exists()]
    if not models and Path(name).is_absolute():
        raise ValueError(f"{file}: its base model {name} is not there; give it as --model")
    return models[0] if models else name


def load_adapter(model, folder: str | Path, device: str | torch.device):
    """The model with a saved PEFT adapter, in eval mode.

    device: where the adapter goes; PEFT alone would put every rank's on the first GPU.
    Raises ValueError unless each tensor of the adapter has its place in the model, and each place
    its tensor.
    """
    from peft import PeftModel

    where, place = f"adapter {folder}", str(device)
    try:
        adapted = PeftModel.from_pretrained(model, str(folder), torch_device=place)
        # PEFT says what did not fit only if an adapter is loaded into its place once more.
        fit = adapted.load_adapter(str(folder), "default", torch_device=place)
        misfits = [*fit.unexpected_keys, *fit.missing_keys]
        if misfits:
            raise ValueError(f"{misfits[0]} is in only one of the two")
    except Exception as e:  # many kinds: other shapes, a torn file, a pickle
        why = f"does not fit {model.name_or_path} ({_brief(e)})"
        fix = "give its own base as --model, or another adapter if the file is torn"
        raise ValueError(f"{where}: {why}; {fix}") from None
    return adapted.eval()


# ------------------------------------------------------------------------------------- masked ids


def masked_token_ids(tokenizer) -> set[int]:
    """Ids that the token mask removes (§2.4, S2): special, <|...|>, think tags, 1-8 newlines."""
    ids = special_ids(tokenizer)
    control = re.compile(r"<\|.*\|>|</?think>")
    ids |= {i for token, i in tokenizer.get_vocab().items() if control.fullmatch(token)}
    letter = tokenizer.encode("a", add_special_tokens=False)  # with what a tokenizer puts first
    for n in range(1, 9):
        newlines = tokenizer.encode("a" + "\n" * n, add_special_tokens=False)[len(letter) :]
        if len(newlines) == 1:
            ids.update(newlines)
    return ids


def special_ids(tokenizer) -> set[int]:
    """Ids that the tokenizer calls special, with a role or without one."""
    ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return ids | {i for i in tokenizer.all_special_ids if i is not None}


# ------------------------------------------------------------------------------------ checkpoints


def save(
    folder: str | Path,
    model,
    tokenizer,
    optimizer: Optimizer,
    step: int,
    extra_tensors: dict[str, Tensor],
) -> None:
    """Fill a folder with a checkpoint: adapter, tokenizer, the trainer's state.

    extra_tensors: more tensors to save by name. PEFT adds a model card that names the base.
    A kill leaves a part of the files: the caller renames the folder once it is whole.
    Raises OSError if the disk is full.
    """
    folder = Path(folder)
    try:
        # By default PEFT asks the hub whether the embeddings have grown; ours never do.
        model.save_pretrained(folder, save_embedding_layers=False)
        _without_local_base(folder / "README.md")
        _save_tokenizer(tokenizer, folder)
        state = {name: x.cpu() for name, x in extra_tensors.items()}
        for name, p in trained(model).items():
            for part, value in optimizer.state[p].items():
                state[f"{name}.{part}"] = value.cpu()
        save_file(state, folder / "trainer.safetensors")
        (folder / "trainer.json").write_text(json.dumps({"step": step}, indent=2) + "\n")
        for file in folder.glob("*.safetensors"):  # they are written for their owner alone
            shutil.copymode(folder / "trainer.json", file)
    except SafetensorError as e:  # a full disk
        raise OSError(f"{folder}: {e}") from None


def _save_tokenizer(tokenizer, folder: Path) -> None:
    """OSError if the disk is full, where the tokenizers library raises a bare Exception."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as e:
        raise OSError(f"{folder}: {e}") from None


def _without_local_base(card_file: Path) -> None:
    """Leave `base_model` out of a model card where it is a path of this machine.

    The hub refuses such a card. PEFT itself reads the base from adapter_config.json.
    """
    card = ModelCard.load(card_file)
    if Path(str(card.data.base_model)).is_absolute():
        card.data.base_model = None
        tags = card.data.tags or []
        card.data.tags = [tag for tag in tags if not tag.startswith("base_model:adapter:/")]
        card.save(card_file)


def lora_of(folder: str | Path) -> tuple[str, int, int]:
    """Base, rank and alpha of the adapter in a folder; ValueError where there is none."""
    file = Path(folder) / "adapter_config.json"
    try:
        config = json.loads(file.read_text())
        return config["base_model_name_or_path"], int(config["r"]), int(config["lora_alpha"])
    except (OSError, ValueError, LookupError, TypeError) as e:
        fix = "give a checkpoint, such as runs/sgsd/checkpoints/step_000200"
        raise ValueError(f"adapter {folder}: could not read its config ({e!r}); {fix}") from None


def restore(
    folder: str | Path, model, optimizer: Optimizer | None = None
) -> tuple[int, dict[str, Tensor]]:
    """Put a checkpoint's adapter and AdamW moments in place; its step and its extra tensors.

    Without an optimizer the adapter alone, as at step 0.
    Raises ValueError if a file is missing or torn, or is from another model or rank.
    """
    from peft import set_peft_model_state_dict

    folder, step = Path(folder), 0
    state: dict[str, Tensor] = {}
    try:
        adapter = load_file(folder / "adapter_model.safetensors")
        result: Any = set_peft_model_state_dict(model, adapter)
        misfits = [*result.unexpected_keys]
        misfits += [name for name in result.missing_keys if ".lora_" in name]
        if misfits:
            raise KeyError(f"{misfits[0]} is in only one of the two")
        if optimizer:
            state = load_file(folder / "trainer.safetensors")
            step = int(json.loads((folder / "trainer.json").read_text())["step"])
            _restore_moments(state, model, optimizer)
    except Exception as e:  # a missing or torn file, other shapes, other names
        cause = "is a file torn, or was it made with another model or --lora-rank?"
        fix = "The checkpoint before it may be whole"
        why = f"does not fit the model ({_brief(e)}); {cause} {fix}"
        raise ValueError(f"checkpoint {folder}: {why}") from None
    device = causal_lm(model).device
    return step, {name: x.to(device) for name, x in state.items()}


def _restore_moments(state: dict[str, Tensor], model, optimizer: Optimizer) -> None:
    """Move AdamW's moments from a checkpoint's tensors to the optimizer."""
    index_of: dict[torch.nn.Parameter, int] = {}  # the optimizer counts over all its groups
    for group in optimizer.param_groups:
        for p in group["params"]:
            index_of[p] = len(index_of)
    moments = {}
    for name, p in trained(model).items():
        if f"{name}.step" in state:  # absent if no step has been finite yet
            moments[index_of[p]] = {part: state.pop(f"{name}.{part}") for part in MOMENTS}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
