"""Speed and memory, as ratios in one run.

    python tests/bench.py score [--cuda]      K teachers and the student, forward and backward, for one rollout
    python tests/bench.py verify              verdicts per second, and what math-verify alone gets wrong on the golden table

`score` holds this project's layout (student once, head on slices of positions) against the replicated one (the student's
row repeated K times, log_softmax over [rows, T, V]) on the same random model, ids and loss. Each layout runs in a process
of its own; extra memory is the peak above what the loaded model holds. Prints a markdown table.

`verify` times one worker on pairs that it has not seen before, half of them right.
"""

import argparse
import json
import os
import pathlib
import platform
import random
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, Qwen3Config  # noqa: E402

import rollout as R  # noqa: E402
import sgsd  # noqa: E402
import verify as V  # noqa: E402

SHAPES = {  # width, layers, MLP, query heads, head size, T
    "small": (256, 8, 768, 4, 64, 128),
    "qwen3-1.7b": (2048, 28, 6144, 16, 128, 1024),
}
STUDENT, TEACHER, K, VOCAB = 64, 192, 8, 151_936  # prompt tokens; teachers; Qwen3's vocabulary


def random_model(shape: str, device: torch.device):
    width, layers, mlp, heads, size, _ = SHAPES[shape]
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=VOCAB, hidden_size=width, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads,
                         num_key_value_heads=heads // 2, head_dim=size, tie_word_embeddings=True)  # fmt: skip
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").to(device)


def ours(model, student, contexts, ids):
    logpT_KT = sgsd.score_teachers(model, contexts, ids)
    return logpT_KT, R.token_logprobs(model, [student], [ids], grad=True)[0]


def replicated(model, student, contexts, ids, keep=0):
    def rows(prompts):
        x = torch.tensor([p + ids for p in prompts], device=model.device)
        logits = model(input_ids=x, use_cache=False, logits_to_keep=keep).logits[:, -len(ids) - 1 : -1]
        return logits.float().log_softmax(-1).gather(-1, x[:, -len(ids) :, None])[..., 0]

    with torch.no_grad():
        logpT_KT = rows(contexts)
    return logpT_KT, rows([student] * len(contexts))


def replicated_short(model, student, contexts, ids):
    """A kinder baseline: no logits over prompt positions."""
    return replicated(model, student, contexts, ids, keep=len(ids) + 1)


LAYOUTS = {"replicated": replicated, "replicated, no prompt logits": replicated_short, "ours": ours}


def one_layout(layout: str, shape: str, device: torch.device, repeats: int) -> dict:
    """Seconds (best of `repeats`), peak extra MiB and the loss of one layout."""
    model, T = random_model(shape, device), SHAPES[shape][-1]
    model.train()
    R.head_is_sliced(model)
    gen = torch.Generator().manual_seed(1)
    student, ids, *contexts = (torch.randint(0, VOCAB, (n,), generator=gen).tolist() for n in (STUDENT, T, *[TEACHER] * K))
    mask_T, alpha_K, rho_K = torch.ones(T, device=device), torch.full((K,), 1 / K, device=device), torch.ones(K, device=device)
    for p in model.parameters():  # an adapter's gradient is small: only the last layer norms train here
        p.requires_grad_(p.ndim == 1)

    def run() -> float:
        logpT_KT, logpS = LAYOUTS[layout](model, student, contexts, ids)
        delta_KT = logpT_KT.detach() - logpS
        loss = sgsd.sgsd_loss(delta_KT, mask_T, alpha_K, rho_K, 1.0)
        loss.backward()
        model.zero_grad(set_to_none=True)
        return float(loss.detach())

    def synchronize() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    if device.type == "cuda":
        run()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew from here
        before = resident("VmRSS")
    times, loss = [], 0.0
    for _ in range(repeats):
        began = synchronize()
        loss = run()
        times.append(synchronize() - began)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else resident("VmHWM")
    return {"seconds": min(times), "mib": (peak - before) / 2**20, "loss": loss}


def resident(field: str, process: int | str = "self") -> int:
    """Bytes of a process's memory: VmRSS now, VmHWM at its highest, VmPeak its address space (Linux)."""
    return next(int(line.split()[1]) * 1024 for line in open(f"/proc/{process}/status") if line.startswith(field))


def processor_seconds(process: int) -> float:
    """User and system time of a process so far (Linux)."""
    return sum(map(int, open(f"/proc/{process}/stat").read().rsplit(")")[-1].split()[11:13])) / os.sysconf("SC_CLK_TCK")


def machine(device: torch.device) -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}, commit {commit or 'none'}"


def score(device: torch.device, shape: str, repeats: int) -> None:
    results = {}
    for layout in LAYOUTS:
        command = [sys.executable, __file__, "score", "--layout", layout, "--shape", shape, "--repeats", str(repeats)]
        out = subprocess.run([*command, *(["--cuda"] if device.type == "cuda" else [])], check=True, capture_output=True, text=True).stdout
        results[layout] = json.loads(out.splitlines()[-1])
    print(f"score: K={K}, T={SHAPES[shape][-1]}, vocabulary {VOCAB:,}, shape {shape}; {machine(device)}\n")
    print("| layout | seconds | of ours | peak extra MiB | of ours | loss |\n|---|---|---|---|---|---|")
    for name, r in results.items():
        ratios = [f"{r[key] / results['ours'][key]:.1f}x" for key in ("seconds", "mib")]
        print(f"| {name} | {r['seconds']:.2f} | {ratios[0]} | {r['mib']:.0f} | {ratios[1]} | {r['loss']:.6f} |")


def latex_pairs(n: int) -> list[tuple[str, str]]:
    """Answers as competition problems have them, each with another spelling; every second one is changed."""
    rng = random.Random(0)
    shapes = [
        (r"\frac{{{a}}}{{{b}}}", r"{a}/{b}"), (r"{a}\sqrt{{{b}}}", r"{a} \cdot \sqrt{{{b}}}"), (r"\left({a}, \frac{{{b}}}{{7}}\right)", r"({a},{b}/7)"),
        (r"({a},\infty)", r"x>{a}"), ("x^2+{a}x-{b}", "-{b}+{a}x+x^2"), (r"\frac{{{a}\pi}}{{{b}}}", r"\dfrac{{{a}}}{{{b}}}\pi"), (r"{a}+{b}i", "{b}i+{a}"),
        (r"\{{{a}, -{b}\}}", r"\{{-{b}, {a}\}}"), (r"{a}\pm\sqrt{{{b}}}", r"{a}-\sqrt{{{b}}}, {a}+\sqrt{{{b}}}"), ("{a}.{b}", r"x = {a}.{b}0"), (r"{a}^\circ", "{a}"),
        (r"\begin{{pmatrix}}{a}\\{b}\end{{pmatrix}}", r"\begin{{pmatrix}} {a} \\ {b} \end{{pmatrix}}"), (r"{a}\text{{ cm}}^2", "{a}"), ("y={a}x+{b}", "{b}+{a}x"),
    ]  # fmt: skip
    pairs = []
    for i in range(n):
        a, b = rng.sample(range(11, 5000), 2)
        gold, pred = shapes[i % len(shapes)]
        pairs.append((gold.format(a=a, b=b), pred.format(a=a + (i // len(shapes)) % 2, b=b)))
    return pairs


def judge() -> None:
    from math_verify import parse, verify
    from test_verify import GOLDEN

    def alone(gold: str, pred: str) -> bool:  # as its own documentation uses it
        return bool(verify(parse(f"${gold.strip('$')}$"), parse(f"${pred.strip('$')}$")))

    starts = []
    for _ in range(3):
        began = time.perf_counter()
        with V.Verifier() as v:
            v.verify("1/2", "2/4")
            starts.append(time.perf_counter() - began)
    integers, latex = [(str(i), str(i + i % 2)) for i in range(100_000)], latex_pairs(1456)
    rates: dict[str, list[float]] = {"integers": [], "latex": []}
    with V.Verifier() as v:
        v.verify("1/2", "2/4")
        process = v._workers[0].process.pid
        before = processor_seconds(process)
        for what, pairs in [("integers", integers)] + [("latex", latex[i : i + 364]) for i in range(0, len(latex), 364)]:
            began = time.perf_counter()
            right = v.verify_many(pairs)
            rates[what].append(len(pairs) / (time.perf_counter() - began))
            assert sum(right) == len(pairs) // 2, "half of the pairs are right"
        busy = processor_seconds(process) - before
        memory = [resident(field, process) / 2**20 for field in ("VmHWM", "VmPeak")]
        ours = [row for row in GOLDEN if v.verify(*row[:2]) != row[2]]
    theirs = [row for row in GOLDEN if alone(*row[:2]) != row[2]]
    turned = sum(alone(gold, pred) != alone(pred, gold) for gold, pred, _ in GOLDEN)
    print(f"verify: one worker, pairs not seen before; {machine(torch.device('cpu'))}\n")
    print("| what | measured |\n|---|---|")
    print(f"| start to first verdict, best of 3 | {min(starts):.2f} s |\n| plain integers | {rates['integers'][0]:,.0f} per second |")
    print(f"| ordinary LaTeX, best of 4 times 364 | {max(rates['latex']):,.0f} per second |")
    print(f"| all of them, in the worker's processor time | {len(latex) / busy:,.0f} per second |\n| worker's memory: resident, address space | {memory[0]:.0f} MiB, {memory[1]:.0f} MiB |")
    print(f"| golden table: wrong | {len(ours)} of {len(GOLDEN)} |\n| golden table: wrong with math-verify alone | {len(theirs)} of {len(GOLDEN)} |")
    print(f"| of these called right, called wrong | {sum(not r for *_, r in theirs)}, {sum(r for *_, r in theirs)} |")
    print(f"| math-verify's verdict changes when the two are exchanged | {turned} of {len(GOLDEN)} |")
    print("\n| gold | prediction | is | math-verify alone |\n|---|---|---|---|")
    for gold, pred, is_right in theirs:
        print("| " + " | ".join(f"`{x}`".replace("|", "\\|") for x in (gold, pred)) + f" | {'right | wrong' if is_right else 'wrong | right'} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["score", "verify", "all"])
    parser.add_argument("--cuda", action="store_true", help="on one CUDA GPU, at Qwen3-1.7B's shape")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layout", choices=LAYOUTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    device = torch.device("cuda" if args.cuda else "cpu")
    shape = args.shape or ("qwen3-1.7b" if args.cuda else "small")
    if args.layout:
        print(json.dumps(one_layout(args.layout, shape, device, args.repeats)))
        return
    if args.what != "verify":
        score(device, shape, args.repeats)
    if args.what != "score":
        judge()


if __name__ == "__main__":
    main()
