"""A causal language model: loading, LoRA adapters, the token ids to mask, a checkpoint's files.

A checkpoint is a folder with a PEFT adapter that anyone can load, the tokenizer, and the trainer's
state (safetensors, no pickle). Models are loaded without `trust_remote_code`.
"""

import contextlib
import json
import math
import re
import shutil
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.utils import logging as hub_logging
from safetensors import safe_open
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

# Kinds of layers whose part of a `DynamicCache` has rows first, so that rows can leave and join.
LAYERS_WITH_KEYS = {"full_attention", "sliding_attention", "chunked_attention", "hybrid"}
ADAPTER_FILE = "adapter_model.safetensors"
CHAT = [{"role": "user", "content": "xyzzy"}]  # which every template must show
LAYERS_WITH_STATES = {"linear_attention", "conv", "hybrid"}


# ---------------------------------------------------------------------------------------- loading


FIRST_FILE = {"model": "config.json", "encoder": "modules.json"}  # which every one has


@contextlib.contextmanager
def _loading(kind: str, name: str) -> Iterator[str]:
    """Where to load from: a hub id, or a directory's whole path, so that adapters find their base.

    Whatever the block raises becomes a ValueError of one line: the libraries raise many kinds.
    """
    logging.disable_progress_bar()
    hub_logging.set_verbosity_error()  # offline it reports every retry
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it prints a table of missing weights
    is_directory = Path(name).is_dir()
    place = name if is_directory else f"{name} (no directory here{_other_reading(name)})"
    try:
        if not is_directory:
            _ask_once(name, FIRST_FILE.get(kind, ""))
        yield str(Path(name).absolute()) if is_directory else name
    except Exception as e:
        cause = textwrap.shorten(str(e), 500, placeholder=" ...")
        kind_of_error = "" if type(e) is ValueError else f"{type(e).__name__}: "
        raise ValueError(f"{kind} {place}: {kind_of_error}{cause}") from None
    finally:
        logging.set_verbosity(verbosity)


def _is_path(name: str) -> bool:
    return name.startswith((".", "/", "~"))


def _other_reading(name: str) -> str:
    """What the name of no directory may be, in words."""
    if _is_path(name):
        return ""
    parent = Path(name).parts[0]
    hint = f"; {parent}/ is a folder here: check what follows" if Path(parent).is_dir() else ""
    return f", so a hub id{hint}"


def _ask_once(name: str, file: str) -> None:
    """Raise an error unless a hub id has the file, in the local cache or on the hub.

    Asked once: for each of a model's files the libraries would try six times, for a minute in all.
    """
    if _is_path(name) or not file:
        raise ValueError("check the path")
    if not isinstance(try_to_load_from_cache(name, file), str):
        get_hf_file_metadata(hf_hub_url(name, file), timeout=10)


def load_model(
    name: str, device: str | torch.device, dtype: str = "auto", attn: str = "sdpa"
) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer; the model is in eval mode, without dropout.

    name: a hub id or a directory. dtype: of the weights; "auto" is bfloat16 on CUDA and float32
    on CPU. attn: transformers' name of the attention kernels (S25).
    Raises ValueError if either does not load, or if rows of one batch would influence each other.
    """
    # PEFT asks the model by a name that transformers 5.20 deprecated.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    device = torch.device(device)
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attn}
    if device.type == "cuda":  # else each of eight processes fills host memory first
        options["device_map"] = {"": device}
    with _loading("model", name) as source:
        tokenizer = _load_tokenizer(source)
        model = _read(source, **options)
        if model.config.get_text_config() is not model.config:
            raise ValueError(f"{type(model).__name__} takes more than text; give a text model")
        chat = tokenizer.apply_chat_template(CHAT, return_dict=False)
        if max(chat) >= model.get_input_embeddings().weight.shape[0]:
            raise ValueError("its tokenizer has ids that the model has no rows for")
        check_batching(model)
        remove_dropout(model)
        model = model.to(device).eval()
        refuse_not_finite(model)
    return model, tokenizer


def check_model(name: str) -> None:
    """Read all of a model but the numbers of its weights: a mistake shows before they are loaded.

    Raises ValueError as `load_model` does for the tokenizer, a torn file and a weight that lacks.
    """
    with _loading("model", name) as source:
        _load_tokenizer(source)
        _read(source, device_map={"": "meta"})


def _read(source: str, **options: Any) -> Any:
    """The model of some files. ValueError where they lack a weight: transformers makes one up."""
    # Without trust_remote_code=False a model may ask to run its own code.
    options |= {"trust_remote_code": False, "output_loading_info": True}
    loaded: Any = AutoModelForCausalLM.from_pretrained(source, **options)
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        named = ", ".join(missing[:5]) + ", ..." * (len(missing) > 5)
        raise ValueError(f"its files lack {len(missing)} weights of the model: {named}")
    return model


def load_outline(name: str) -> tuple[Any, Any]:
    """Load a model's shapes and settings without its weights, and its tokenizer.

    That is enough if a server does the sampling: the outline names the stop ids and computes
    nothing. Raises ValueError as `load_model` does, and for a vision-language checkpoint, of which
    `load_model` takes the text model: engines load all of it, with other names of modules.
    """
    with _loading("model", name) as source:
        tokenizer = _load_tokenizer(source)
        settings = AutoConfig.from_pretrained(source, trust_remote_code=False)
        if settings.get_text_config() is not settings:
            rule = "engines and TRL load a vision-language checkpoint whole, under other names"
            raise ValueError(f"{rule}; save its text model alone (docs/guide.md)")
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(settings, trust_remote_code=False)
        with contextlib.suppress(OSError):  # not every model has a generation_config.json
            model.generation_config = GenerationConfig.from_pretrained(source)
    return model, tokenizer


def _load_tokenizer(source: str) -> Any:
    """ValueError if a file is missing or broken, or the chat template drops what a user says."""
    if Path(source).is_dir():
        _refuse_incomplete(Path(source))
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if CHAT[0]["content"] not in tokenizer.apply_chat_template(CHAT, tokenize=False):
        raise ValueError("its chat template drops what a user says")
    return tokenizer


def _refuse_incomplete(folder: Path) -> None:
    """ValueError for a folder without a model's settings or tokenizer, or whose JSON is broken."""
    settings: dict[str, Any] = {}
    for file in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        if (folder / file).exists():
            try:
                settings[file] = json.loads((folder / file).read_text(encoding="utf-8"))
            except ValueError as e:
                raise ValueError(f"{file} is no JSON ({e}); copy it again") from None
    if (folder / "adapter_config.json").exists():
        raise ValueError("it is an adapter; give its base")
    if "config.json" not in settings:
        raise ValueError("no config.json, which every model has")
    if "program" in settings["config.json"]:
        raise ValueError("it is a run, and no model; give the model that it trains")
    if not any(file.name.startswith(("token", "vocab")) for file in folder.iterdir()):
        raise ValueError("no tokenizer: tokenizer.json is missing; copy it from the model's source")


def load_encoder(name: str, device: str | torch.device) -> Callable[[Sequence[str]], np.ndarray]:
    """Load a sentence-transformers model as embed(texts) -> unit vectors, float32 [n, d].

    name: a hub id or a directory. Raises ValueError if it does not load, or is no such model. Of
    the policy, for example, sentence-transformers would average the last hidden states, and
    retrieval by those finds nothing.
    """
    with _loading("encoder", name) as source:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.util import is_sentence_transformer_model

        if not is_sentence_transformer_model(source):
            rule = "no modules.json, which every sentence-transformers model has"
            raise ValueError(f"{rule}; offline, give a local directory")
        # Whatever precision the files are in, the vectors are float32.
        encoder = SentenceTransformer(source, device=str(device)).float()

    def embed(texts: Sequence[str]) -> np.ndarray:
        vectors = []
        for text in texts:  # one by one: in a batch, padding would change the last bits
            text = text.encode("utf-8", "replace").decode()
            encoded = encoder.encode(text, normalize_embeddings=True, show_progress_bar=False)
            vectors.append(encoded)
        return np.stack(vectors)

    return embed


@torch.no_grad()
def refuse_not_finite(model) -> None:
    """ValueError for a weight that is NaN or infinite, and unless eight ids have finite logits.

    The logits alone do not tell: attention may take a row of NaN for one that is masked.
    """
    causal = causal_lm(model)
    for name, p in causal.named_parameters():
        if not p.sum().isfinite():
            raise ValueError(f"{name} is not finite: it has NaN or infinite numbers")
    rows = causal.get_input_embeddings().weight.shape[0]
    ids_1L = (torch.arange(1, 9, device=causal.device) * 7919 % rows)[None]
    if not causal(input_ids=ids_1L, use_cache=False).logits.isfinite().all():
        raise ValueError("its logits are not finite, though all of its weights are")


def check_batching(model) -> None:
    """ValueError for a model whose rows cannot join and leave a batch, or influence each other."""
    layer_types = {*(getattr(model.config.get_text_config(), "layer_types", None) or [])}
    unsupported = layer_types - LAYERS_WITH_KEYS - LAYERS_WITH_STATES - {"mlp", "moe"}
    if getattr(model, "_is_stateful", False) and not layer_types & LAYERS_WITH_KEYS:
        unsupported.add("recurrent states alone")
    if unsupported:  # decoding joins keys, values and states of rows, and can join nothing else
        raise ValueError(f"{', '.join(sorted(unsupported))}: not supported")
    if {"dynamic", "longrope"} & {str(vars(x).get("rope_type")) for x in model.modules()}:
        raise ValueError("its positions depend on the longest row of a batch")
    if layer_types & LAYERS_WITH_STATES and not ignores_left_padding(model):
        raise ValueError("its states take in a row's left padding")


@torch.no_grad()
def ignores_left_padding(model) -> bool:
    """Whether a row has the same logits alone and padded on the left, except for rounding.

    With random Qwen3.5 models of 4 and 24 layers rounding makes up to 5% of the norm in bf16, and
    padding that is taken in at least 11%. Raises anything for a model with a cache of its own.
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


def remove_dropout(model) -> None:
    """Make teacher and student the same function of their input, in train mode too.

    Families keep its probability in modules of Dropout, in floats of their own (Seed-OSS), and in
    the config that a pass reads (Persimmon); OPT's layerdrop leaves out whole layers.
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


def context_limit(lm) -> float:
    """The model's longest context in tokens; infinite where its config names no limit."""
    text_config = lm.config.get_text_config()
    limit = getattr(text_config, "max_position_embeddings", None)
    rope = getattr(text_config, "rope_parameters", None) or {}
    stretched = rope.get("original_max_position_embeddings", 0) * rope.get("factor", 1)  # YaRN
    return max(limit, stretched) if limit else math.inf


def refuse_beyond_context(lm, prompt_tokens: int, new_tokens: int, flag: str) -> None:
    """ValueError unless a prompt and its longest reply fit the model's context together.

    flag: the one that sets new_tokens.
    """
    limit = context_limit(lm)
    if prompt_tokens + new_tokens > limit:
        rule = f"with a prompt of {prompt_tokens} tokens it exceeds the model's context of"
        fix = "(max_position_embeddings); lower it"
        raise ValueError(f"{flag} {new_tokens}: {rule} {limit:g} {fix}")


def lora_of(folder: str | Path) -> tuple[str, int, int]:
    """Base, rank and alpha of the adapter in a folder; ValueError where there is none."""
    file = Path(folder) / "adapter_config.json"
    try:
        config = json.loads(file.read_text())
        return config["base_model_name_or_path"], int(config["r"]), int(config["lora_alpha"])
    except (OSError, ValueError, LookupError, TypeError) as e:
        fix = "give a checkpoint, such as runs/sgsd/checkpoints/step_000200"
        raise ValueError(f"adapter {folder}: no adapter_config.json ({e!r}); {fix}") from None


def base_of(folder: str | Path, base: str = "") -> str:
    """The model under the adapter in a folder, or `base` in its place; "" without an adapter.

    ValueError for a path that is not there, such as that of another machine.
    """
    if not (Path(folder) / "adapter_config.json").exists():
        return ""
    base = base or lora_of(folder)[0]
    if Path(base).is_absolute() and not Path(base).exists():
        raise ValueError(f"adapter {folder}: its base {base} is not there; give it as --model")
    return base


def check_tensors(kind: str, folder: str | Path, needed: str = "") -> None:
    """ValueError for a torn .safetensors file of a folder, or without the needed one.

    kind: what the folder is, for the error.
    """
    with _loading(kind, str(folder)) as source:
        paths = {*Path(source).glob("*.safetensors")}
        paths |= {Path(source) / needed} if needed else set()
        for path in sorted(paths):
            try:
                with safe_open(path, "pt"):  # reads the header, and the size
                    pass
            except Exception as e:  # it has kinds of its own
                raise ValueError(f"{path.name}: {e}") from None


def load_adapter(model, folder: str | Path):
    """The model with a saved LoRA adapter of any program, in eval mode.

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
    letter = tokenizer.encode("a", add_special_tokens=False)  # with what a tokenizer puts first
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

    Its step stands in the folder's name alone. extra_tensors: more tensors to save by name. PEFT
    adds a model card that names the base.
    A kill leaves a part of the files: the caller renames the folder once it is whole.
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
        for file in folder.glob("*.safetensors"):  # they are written for their owner alone
            shutil.copymode(folder / "adapter_config.json", file)
    except Exception as e:  # for a full disk safetensors and tokenizers have kinds of their own
        raise OSError(f"{folder}: {e}") from None


def restore(folder: str | Path, model, optimizer: Optimizer | None = None) -> dict[str, Tensor]:
    """Put a folder's adapter in place, and a checkpoint's AdamW moments; its extra tensors.

    Without an optimizer the adapter alone, of any program.
    Raises ValueError for a file that is missing, torn or a pickle, and unless each tensor of the
    adapter has its place in the model, and each place its tensor.
    """
    from peft import set_peft_model_state_dict

    with _loading("adapter", str(folder)) as source:
        tensors = load_file(Path(source) / ADAPTER_FILE)
        result: Any = set_peft_model_state_dict(model, tensors)
        missing = [name for name in result.missing_keys if ".lora_" in name]
        if result.unexpected_keys or missing:
            name = [*result.unexpected_keys, *missing][0]
            raise ValueError(f"it does not fit {model.name_or_path}: {name} is in one alone")
        refuse_not_finite(model)
    if optimizer is None:
        return {}
    with _loading("checkpoint", str(folder)) as source:
        state = load_file(Path(source) / "trainer.safetensors")
        for name, p in trained(model).items():
            if f"{name}.step" in state:  # absent if no step has been finite yet
                optimizer.state[p]["step"] = state.pop(f"{name}.step")  # AdamW has it on the CPU
                for part in ("exp_avg", "exp_avg_sq"):
                    optimizer.state[p][part] = state.pop(f"{name}.{part}").to(p.device)
    device = causal_lm(model).device
    return {name: x.to(device) for name, x in state.items()}
