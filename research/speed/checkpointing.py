"""The student's pass with and without recomputed activations: seconds, memory, gradients.

    python research/speed/checkpointing.py

A random Qwen3 of two sizes with LoRA of rank 64, one rollout of 100 prompt and 400 or 800
completion tokens, fp32, one thread. Each case runs in a process of its own, for its peak memory.
"""

import argparse
import json
import pathlib
import resource
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
SIZES = {"10 layers of 512": (10, 512), "16 layers of 768": (16, 768)}


def case(layers: int, width: int, tokens: int, on: bool) -> dict:
    """Seconds of forward and backward, peak memory above the model's, the gradient's norm."""
    import torch
    import transformers

    sys.path.insert(0, str(ROOT))
    import scoring
    from lib import model

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=32_000,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        head_dim=64,
    )
    lm = model.with_adapters(transformers.Qwen3ForCausalLM(config), 64, 128)
    for p in model.trained(lm).values():
        torch.nn.init.normal_(p, std=0.02)
    ids = torch.randint(0, 32_000, (100 + tokens,)).tolist()
    model.checkpoint_activations(lm, on)
    before, seconds = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(4):
        started = time.perf_counter()
        scoring.token_logprobs(lm, [ids[:100]], [ids[100:]], grad=True).mean().backward()
        seconds.append(time.perf_counter() - started)
        gradient = torch.cat([p.grad.flatten() for p in model.trained(lm).values()])
        lm.zero_grad(set_to_none=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "seconds": statistics.median(seconds[1:]),
        "MB": (peak - before) / 1024,
        "gradient": [float(gradient.norm()), float(gradient.sum())],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    one = ("LAYERS", "WIDTH", "TOKENS", "ON")
    parser.add_argument("--case", type=int, nargs=4, metavar=one, help="measure this case alone")
    given = parser.parse_args().case
    if given:
        layers, width, tokens, on = given
        print(json.dumps(case(layers, width, tokens, bool(on))))
        return
    print(
        "| model | tokens | recomputed, s | kept, s | ratio | recomputed, MB | kept, MB "
        "| MB a token | gradient |"
    )
    print("|---" * 9 + "|")
    for name, (layers, width) in SIZES.items():
        for tokens in (400, 800):
            results = []
            for on in (1, 0):
                numbers = map(str, (layers, width, tokens, on))
                command = [sys.executable, __file__, "--case", *numbers]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                results.append(json.loads(done.stdout))
            recomputed, kept = results
            same = "equal" if recomputed["gradient"] == kept["gradient"] else "differs"
            ratio = recomputed["seconds"] / kept["seconds"]
            extra = (kept["MB"] - recomputed["MB"]) / (100 + tokens)
            print(
                f"| {name} | 100 + {tokens} | {recomputed['seconds']:.2f} | {kept['seconds']:.2f} "
                f"| {ratio:.2f} | {recomputed['MB']:.0f} | {kept['MB']:.0f} | {extra:.2f} "
                f"| {same} |"
            )


if __name__ == "__main__":
    main()
