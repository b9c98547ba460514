"""Which families of models decode and learn here? Random weights, one small model of each.

python research/robustness/families.py [KIND ...]

Prints a row of Markdown for each kind of transformers: its layers, whether each of 9 rows alone has
the tokens that it has in batches of 9, 4 and 2, where rows leave and join; the largest difference
between a token's log-probability in a padded batch and alone; and the modules with adapters, each
of which must get a gradient. A refusal is quoted.
"""

import pathlib
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch
from conftest import HYBRID, make_model, make_tokenizer
from transformers import logging

import rollout
import scoring
from lib import model as models

MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
GRANITE = {"num_local_experts": 0, "shared_intermediate_size": 48}
GRANITE |= {"layer_types": ["mamba", "attention"], **MAMBA}
JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "mamba_dt_rank": 4}
JAMBA |= {"use_mamba_kernels": False}
NEMOTRON = {"num_hidden_layers": 4, "mamba_num_heads": 4, "mamba_head_dim": 16}
NEMOTRON |= {"ssm_state_size": 8, "n_groups": 1}
NEMOTRON |= {"layer_types": ["linear_attention", "mlp", "full_attention", "mlp"]}
PLAIN = """qwen3 qwen2 llama mistral ministral gemma2 gemma3_text phi3 smollm3 olmo2 olmo3 granite
glm4 exaone4 cohere2 seed_oss ernie4_5 hunyuan_v1_dense starcoder2 stablelm helium nemotron
internlm3 gpt_neox gpt_oss gpt2"""
SETTINGS = {kind: {} for kind in PLAIN.split()}
SETTINGS |= {
    "qwen3_5_text": {},
    "olmo_hybrid": HYBRID,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "bamba": {"attn_layer_indices": [1], "bos_token_id": 1, **MAMBA},
    "falcon_h1": {"mamba_d_ssm": 64, **MAMBA},
    "granitemoehybrid": GRANITE,
    "jamba": JAMBA,
    "nemotron_h": NEMOTRON,
    "minimax": {"num_local_experts": 2},
    "deepseek_v32": {},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "xlstm": {"num_blocks": 1},
}


def decodes(lm, tokenizer) -> str:
    """How many of 9 rows alone equal themselves in batches, and the largest gap of scores."""
    prompts, keys = [], range(9)
    for i in keys:
        text = f"Problem {i}: " + "x" * (3 * i % 17)
        prompts.append(rollout.chat_ids(tokenizer, text, thinking="closed"))
    sampling = rollout.Sampling(max_new_tokens=30)
    first = rollout.generate(lm, tokenizer, prompts[:1], sampling, [0])[0]
    lm.generation_config.eos_token_id = [265, first[-1]]  # some rows end early
    alone = rollout.generate(lm, tokenizer, prompts, sampling, keys, 1)
    equal = []
    for rows in (9, 4, 2):
        together = rollout.generate(lm, tokenizer, prompts, sampling, keys, rows)
        equal.append(str(sum(a == b for a, b in zip(alone, together))))
    padded = scoring.token_logprobs(lm, prompts, alone)
    gap = 0.0
    for prompt, ids, padded_T in zip(prompts, alone, padded):
        alone_T = scoring.token_logprobs(lm, [prompt], [ids])[0]
        gap = max(gap, float((alone_T - padded_T[: len(ids)]).abs().max()))
    lengths = [len(ids) for ids in alone]
    return f"{', '.join(equal)} | {min(lengths)} to {max(lengths)} | {gap:.0e}"


def learns(lm) -> str:
    """The modules with adapters. Each gets a gradient."""
    lm = models.with_adapters(lm, 4, 8)
    params = models.trained(lm)
    for p in params.values():
        torch.nn.init.normal_(p, std=0.02)
    scoring.token_logprobs(lm, [[1, 2, 3]], [[4, 5, 6]], grad=True).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in params.values())
    return " ".join(sorted({name.split(".")[-4] for name in params}))


def row_of(kind: str, folder: str) -> str:
    """A row of the table. folder: for the model, which is loaded as any other."""
    lm, tokenizer = make_model(kind, **SETTINGS[kind]), make_tokenizer()
    types = getattr(lm.config, "layer_types", None) or ["full_attention"]
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    cells = [kind, ", ".join(sorted({*types}))]
    try:
        lm, tokenizer = models.load_model(folder, "cpu", attn="eager")
        cells.append(decodes(lm, tokenizer))
        cells.append(learns(lm))
    except ValueError as e:
        reason = str(e).partition(": ")[2]
        cells += [f"refused: {reason}"] if len(cells) == 3 else [f"refused: {reason} | | |"]
    return f"| {' | '.join(cells)} |"


def main(kinds: list[str]) -> None:
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    print("| kind | layers | equal of 9, batches of 9, 4, 2 | tokens | gap, nats | adapters |")
    print("|---|---|---|---|---|---|")
    for kind in kinds or SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            print(row_of(kind, folder), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
