"""Speed and memory, as ratios in one run. Random weights: speed needs no trained ones.

    python tests/bench.py score      K teachers and the student, forward and backward, against the replicated full-logits layout
    python tests/bench.py adapters   lean_adapters against PEFT's own forward beside a bf16 model
    python tests/bench.py rollout    rollout.generate against transformers' generate, in static batches of as many rows
    python tests/bench.py step       sgsd.main on a saved model: what of an update's wall time is work, and its limit
    python tests/bench.py eval       12 samples of 30 problems, static batches against a stream; how often the rows change an id
    python tests/bench.py verify     verdicts per second, and what math-verify alone gets wrong on the golden table
    python tests/bench.py memory     peak memory of scoring against T and --score-tokens; Qwen3-8B on one card, by arithmetic
    python tests/bench.py scaling    cost against K, T, the bank's size and the number of ranks
    python tests/bench.py cost       FLOPs, bytes and the least seconds of the paper's run, by arithmetic from this machine's two rates
    python tests/bench.py all        all of it, whatever fails; with --cuda on one GPU, at Qwen3-1.7B's shape

Tables are markdown. Peaks are above what the loaded model holds, each in a process of its own. "limit" is what the machine
must take: bytes of weights and cache over its copy rate, FLOPs over its matmul rate, both measured in the same run. On CPU
with one thread (OMP_NUM_THREADS=1) seconds are this process's processor seconds, so that a busy machine matters less; a step's
are wall time. The best of --repeats counts; rollout and eval run once.
"""

import argparse
import contextlib
import gc
import importlib.util
import io
import json
import math
import os
import pathlib
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers import AutoModelForCausalLM, LogitsProcessor, Qwen3Config  # noqa: E402
from transformers.utils import logging  # noqa: E402

import rollout as R  # noqa: E402
import runlog  # noqa: E402
import sgsd  # noqa: E402
import skills as S  # noqa: E402
import verify as V  # noqa: E402

logging.disable_progress_bar()
STUDENT, TEACHER, K, VOCAB = 64, 192, 8, 151_936  # prompt tokens; teachers; Qwen3's vocabulary


@dataclass(frozen=True)
class Shape:
    width: int
    layers: int
    mlp: int
    heads: int  # of queries; half as many of keys and values
    size: int  # of a head
    T: int  # of score and step
    new: int = 96  # the longest completion of rollout and eval
    mean: int = 16  # about what is sampled until one of the stop ids comes
    rows: tuple[int, ...] = (32,)  # that decode together
    eval_rows: int = 16  # eval.py's default
    problems: int = 30  # of eval
    batch: int = 4  # problems of an update
    vocab: int = VOCAB
    decode_vocab: int = (
        8192  # of rollout, eval and step: a small model would spend its time on the head
    )

    def layer_bytes(self, kind: int) -> int:
        """Activations of one layer per token, at most: hidden states and projections, three of the MLP's width."""
        return kind * (6 * self.width + 2 * self.heads * self.size + 3 * self.mlp)


SHAPES = {
    "tiny": Shape(
        32,
        2,
        48,
        2,
        16,
        T=8,
        new=12,
        mean=4,
        rows=(4,),
        eval_rows=4,
        problems=2,
        batch=2,
        vocab=512,
        decode_vocab=512,
    ),
    "few": Shape(256, 8, 768, 4, 64, T=32, batch=2),  # what two ranks share out
    "small": Shape(256, 8, 768, 4, 64, T=128),
    "qwen3-1.7b": Shape(
        2048,
        28,
        6144,
        16,
        128,
        T=1024,
        new=512,
        mean=128,
        rows=(32, 128),
        eval_rows=64,
        batch=32,
        decode_vocab=VOCAB,
    ),
}  # 512: at 30 ms a step, which is what launching 28 layers takes, rollout has some 10,000 steps
ENCODERS = {
    "qwen3-1.7b": Shape(1024, 28, 3072, 16, 128, T=0)
}  # Qwen3-Embedding-0.6B; elsewhere the smallest shape


def random_model(s: Shape, device: torch.device, vocab: int = 0):
    """A Qwen3 of this shape that never stops."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab or s.vocab,
        hidden_size=s.width,
        intermediate_size=s.mlp,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.heads // 2,
        head_dim=s.size,
        tie_word_embeddings=True,
        max_position_embeddings=40960,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.backends.cuda.enable_cudnn_sdp(False)  # as load_model has it
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    for name, p in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            p.data *= 30  # else a tied head repeats the last token for ever
    return model


def stop_after(model, mean: int):
    """The model with each `mean`-th id as a stop id, so that lengths are long-tailed; with none for 0."""
    stops = list(range(0, model.config.vocab_size, mean)) if mean else None
    model.config.eos_token_id = model.generation_config.eos_token_id = stops
    return model.eval()


def synchronized(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds_of(f: Callable, device: torch.device, repeats: int) -> float:
    """The best of `repeats`; processor time where that is wall time on a quiet machine."""
    times, clock = (
        [],
        time.process_time
        if device.type == "cpu" and torch.get_num_threads() == 1
        else lambda: synchronized(device),
    )
    for _ in range(repeats):
        began = clock()
        f()
        times.append(clock() - began)
    return min(times)


def rates(device: torch.device) -> tuple[float, float]:
    """Bytes per second of a copy (read and written) and FLOPs per second of a matrix product, bf16 on CUDA and fp32 elsewhere."""
    n, mib, dtype = (
        (8192, 1024, torch.bfloat16) if device.type == "cuda" else (1024, 128, torch.float32)
    )
    a, b, c, d = (
        torch.randn(shape, dtype=dtype, device=device)
        for shape in ((n, n), (n, n), (mib << 18,), (mib << 18,))
    )  # of ones is faster
    return 2 * c.nbytes / seconds_of(lambda: d.copy_(c), device, 5), 2 * n**3 / seconds_of(
        lambda: a @ b, device, 5
    )


def table(title: str, device: torch.device, columns: str, rows: Iterable[Sequence[object]]) -> None:
    """Printed row by row as they come: what was measured stays when the rest is killed or fails."""
    print(
        f"\n{title}; {machine(device)}\n\n| {columns} |\n"
        + "|---" * (columns.count("|") + 1)
        + "|",
        flush=True,
    )
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


def own_process(*argv: object, ranks: int = 1) -> str:
    """stdout of this program run anew, by torchrun where there are several ranks."""
    launch = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        if ranks > 1
        else []
    )
    env = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "262144"
    }  # what is freed goes back at once: a peak is what was alive
    done = subprocess.run(
        [sys.executable, *launch, __file__, *map(str, argv)],
        capture_output=True,
        text=True,
        env=env,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


# ------------------------------------------------------------------------------------------------ cost


@dataclass(frozen=True)
class Counts:
    """FLOPs and bytes of a Qwen3 with adapters, by arithmetic; a multiply-add is 2 FLOPs, attention looks back only."""

    width: int
    layers: int
    mlp: int
    queries: int  # width of all query heads together
    kv: int
    vocab: int = VOCAB
    kind: int = 2  # bytes of a weight
    rank: int = 64

    @property
    def projections(self) -> int:
        return self.layers * (2 * self.width * (self.queries + self.kv) + 3 * self.width * self.mlp)

    @property
    def adapters(self) -> int:
        return (
            self.layers
            * self.rank
            * (
                2 * (self.width + self.queries)
                + 2 * (self.width + self.kv)
                + 3 * (self.width + self.mlp)
            )
        )

    @property
    def weights(self) -> int:
        """Bytes that a forward reads; adapters are fp32."""
        return self.kind * (self.projections + self.vocab * self.width) + 4 * self.adapters

    def forward(self, n: int, predicted: int) -> int:
        """FLOPs of n tokens of a row, and the head on those that predict: 2 (P + A) n + 2 L Q n^2 + 2 V D predicted."""
        return (
            2 * (self.projections + self.adapters) * n
            + 2 * self.layers * self.queries * n * n
            + 2 * self.vocab * self.width * predicted
        )

    def backward(self, n: int, predicted: int) -> int:
        """FLOPs: layers and head once more, a gradient to every input (attention's costs twice), and to the adapters: no other weight learns."""
        return (
            2 * self.forward(n, predicted)
            + 2 * self.layers * self.queries * n * n
            + 2 * self.adapters * n
        )

    def decoding(self, prompt: int, new: int, rows: float, steps: float) -> tuple[float, float]:
        """FLOPs and bytes of `rows` completions of `new` tokens in `steps` steps: each reads all weights, each token its row's cache."""
        flops = self.forward(prompt + new, new) - self.forward(prompt, 0)
        return rows * flops, steps * self.weights + rows * 2 * self.kind * self.layers * self.kv * (
            prompt * new + new * new / 2
        )


QWEN3 = {
    "Qwen3-1.7B": Counts(2048, 28, 6144, 2048, 1024),
    "Qwen3-4B": Counts(2560, 36, 9728, 4096, 1024),
    "Qwen3-8B": Counts(4096, 36, 12288, 4096, 1024),
}
PLAIN, GUIDED = (
    200,
    400,
)  # tokens of a student's and a teacher's prompt: assumed, the paper doesn't say
GPUS, CARD = 8, 80e9  # §4.1; bytes of a GPU


def counts(s: Shape, vocab: int, device: torch.device, rank: int = 64) -> Counts:
    return Counts(
        s.width,
        s.layers,
        s.mlp,
        s.heads * s.size,
        s.heads // 2 * s.size,
        vocab,
        2 if device.type == "cuda" else 4,
        rank,
    )


def paper_costs(c: Counts) -> dict[str, tuple[float, float]]:
    """FLOPs and bytes on one of 8 GPUs: an update by parts, and one evaluation; all completions as long as they may be."""
    cfg = sgsd.Config()
    x, T, rows, samples = (
        PLAIN,
        cfg.max_new_tokens,
        cfg.batch_size / GPUS,
        12 * 90 / GPUS,
    )  # three sets of 30
    together = eval_rows(c, cfg.eval_tokens)
    return {
        "prefill": (rows * c.forward(x, 1), c.weights),
        "decoding": c.decoding(x, T, rows, T),
        "teachers": (rows * cfg.num_teachers * c.forward(GUIDED + T, T), rows * c.weights),
        "student, forward": (rows * c.forward(x + T, T), c.weights),
        "student, backward": (rows * c.backward(x + T, T), 2 * c.weights),
        "an evaluation": c.decoding(
            x, cfg.eval_tokens, samples, math.ceil(samples / together) * cfg.eval_tokens
        ),
    }


def eval_rows(c: Counts, tokens: int) -> int:
    """How many samples decode together: eval.py's default of 16, or half as many where their cache doesn't fit the card."""
    return 16 if c.weights + 16 * 2 * c.kind * c.layers * c.kv * (PLAIN + tokens) < CARD else 8


def cost(args: argparse.Namespace, s: Shape, device: torch.device) -> None:
    (copied, multiplied), cfg = rates(device), sgsd.Config()
    lines, sums = [], []
    for name, c in QWEN3.items():
        parts = {
            part: (flops, moved, max(flops / multiplied, moved / copied))
            for part, (flops, moved) in paper_costs(c).items()
        }
        evaluation = parts.pop("an evaluation")
        sums.append(
            (name, *(sum(part[i] for part in parts.values()) for i in range(3)), evaluation[2])
        )
        lines += [
            (name, part, f"{flops / 1e12:,.1f}", f"{moved / 1e12:,.3f}", f"{least:,.2f}")
            for part, (flops, moved, least) in [
                *parts.items(),
                ("an update", sums[-1][1:4]),
                ("an evaluation", evaluation),
            ]
        ]
    table(
        f"cost: lower limits, NOT a measured run: the paper's run on one of {GPUS} GPUs of this kind, {multiplied / 1e12:.2f} TFLOP/s and {copied / 1e9:,.0f} GB/s "
        "measured here",
        device,
        "model | part | TFLOP | TB | seconds at least",
        lines,
    )
    evaluations = cfg.updates // cfg.checkpoint_every
    for name, _, _, update, evaluation in sums:
        hours = [n * x / 3600 for n, x in ((cfg.updates, update), (evaluations, evaluation))]
        print(
            f"\n{name}: {cfg.updates} updates {hours[0]:,.1f} h and {evaluations} evaluations {hours[1]:,.1f} h at least",
            end="",
        )
    print(
        f"""

Of {cfg.batch_size} problems a GPU has B = {cfg.batch_size / GPUS:g}; K = {cfg.num_teachers}, T = {cfg.max_new_tokens}, prompts of {PLAIN} and {GUIDED} tokens (assumed), all completions as long as
they may be (shorter ones cost less); 12 samples of 90 problems up to {cfg.eval_tokens:,} tokens, {", ".join(f"{eval_rows(c, cfg.eval_tokens)} ({name})" for name, c in QWEN3.items())} at a time, as an 80 GB card holds their cache. P, A, V D: weights of the layers, adapters, head; Q: width of the queries.
n tokens of a row, forward: 2 (P + A) n + 2 L Q n^2, and 2 V D for each that predicts; backward: twice that, 2 L Q n^2 and 2 A n more (checkpointed).
Decoding: as many FLOPs as one forward; bytes: 2 (P + V D) + 4 A per step, and 4 L kv (prompt + t) for a row's t-th token.
Seconds: FLOPs over the matmul rate or bytes over the copy rate, whichever is more. Left out: sampling, embedding, cold start, the bank's updates.""",
        flush=True,
    )


# ------------------------------------------------------------------------------------------------ score


def ours(model, student, contexts, ids, score_tokens=16384):
    logpT_KT = sgsd.score_teachers(model, contexts, ids, score_tokens)
    return logpT_KT, R.token_logprobs(model, [student], [ids], grad=True)[0]


def replicated(model, student, contexts, ids, _=0, keep=0):
    def rows(prompts):
        x = torch.tensor([p + ids for p in prompts], device=model.device)
        logits = model(input_ids=x, use_cache=False, logits_to_keep=keep).logits[
            :, -len(ids) - 1 : -1
        ]
        return logits.float().log_softmax(-1).gather(-1, x[:, -len(ids) :, None])[..., 0]

    with torch.no_grad():
        logpT_KT = rows(contexts)
    return logpT_KT, rows([student] * len(contexts))


def replicated_short(model, student, contexts, ids, _=0):
    """A kinder baseline: no logits over prompt positions."""
    return replicated(model, student, contexts, ids, keep=len(ids) + 1)


LAYOUTS = {"replicated": replicated, "replicated, no prompt logits": replicated_short, "ours": ours}


def rank_of(s: Shape) -> int:
    return s.width // 32  # 64 of Qwen3-1.7B's 2048


def scoring_model(s: Shape, device: torch.device, dtype: torch.dtype | None = None):
    """With adapters as a run has them, which do something."""
    model = sgsd.with_adapters(
        random_model(s, device).to(dtype), rank_of(s), 2 * rank_of(s)
    ).train()
    R.head_is_sliced(model)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.01)
    return model


def scoring_ids(
    vocab: int, T: int, teachers: int = K
) -> tuple[list[int], list[list[int]], list[int]]:
    """Student's prompt, teachers' prompts, completion."""
    gen = torch.Generator().manual_seed(1)
    student, ids, *contexts = (
        torch.randint(0, vocab, (n,), generator=gen).tolist()
        for n in (STUDENT, T, *[TEACHER] * teachers)
    )
    return student, contexts, ids


def score_once(model, layout: str, T: int, teachers: int = K, score_tokens: int = 16384) -> float:
    """One rollout's loss, forward and backward."""
    if layout == "teachers":
        sgsd.score_teachers(
            model, *scoring_ids(model.config.vocab_size, T, teachers)[1:], score_tokens
        )
        return 0.0
    device, alpha_K, rho_K = (
        model.device,
        torch.full((teachers,), 1 / teachers),
        torch.ones(teachers),
    )
    logpT_KT, logpS = LAYOUTS[layout](
        model, *scoring_ids(model.config.vocab_size, T, teachers), score_tokens
    )
    loss = sgsd.sgsd_loss(
        logpT_KT.detach() - logpS,
        torch.ones(T, device=device),
        alpha_K.to(device),
        rho_K.to(device),
        1.0,
    )
    loss.backward()
    model.zero_grad(set_to_none=True)
    return float(loss.detach())


def one_layout(
    layout: str,
    s: Shape,
    device: torch.device,
    repeats: int,
    T: int,
    score_tokens: int,
    checkpointed: bool,
) -> dict:
    """Seconds, peak extra MiB and the loss of one layout; of ours also the teachers' seconds. layout "teachers": theirs alone."""
    model = scoring_model(s, device)
    if checkpointed:  # as in training
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    if device.type == "cuda":
        score_once(model, layout, T, K, score_tokens)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        pathlib.Path("/proc/self/clear_refs").write_text(
            "5"
        )  # the high-water mark starts anew from here
        before = resident("VmRSS")
    losses: list[float] = []
    seconds = seconds_of(
        lambda: losses.append(score_once(model, layout, T, K, score_tokens)), device, repeats
    )
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else resident("VmHWM")
    found = {"seconds": seconds, "mib": (peak - before) / 2**20, "loss": losses[-1]}
    if layout == "ours" and not checkpointed:
        _, contexts, ids = scoring_ids(s.vocab, T)
        found["teachers"] = seconds_of(
            lambda: sgsd.score_teachers(model, contexts, ids), device, repeats
        )
    return found


def measured_layout(layout: str, args: argparse.Namespace, **options: object) -> dict:
    """`one_layout` in a process of its own: one run's memory must not lie in the next one's way."""
    flags = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in {
            "layout": layout,
            "shape": args.shape,
            "repeats": args.repeats,
            **options,
        }.items()
    ]
    return json.loads(
        own_process("score", *flags, *(["--cuda"] if args.cuda else [])).splitlines()[-1]
    )


def resident(field: str, process: int | str = "self") -> int:
    """Bytes of a process's memory: VmRSS now, VmHWM at its highest, VmPeak its address space (Linux)."""
    return next(
        int(line.split()[1]) * 1024
        for line in open(f"/proc/{process}/status")
        if line.startswith(field)
    )


def processor_seconds(process: int) -> float:
    """User and system time of a process so far (Linux)."""
    return sum(
        map(int, open(f"/proc/{process}/stat").read().rsplit(")")[-1].split()[11:13])
    ) / os.sysconf("SC_CLK_TCK")


def machine(device: torch.device) -> str:
    git = ["git", "rev-parse", "--short", "HEAD"] if shutil.which("git") else ["true"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    name = (
        torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    )
    return f"{name}, torch {torch.__version__}, commit {commit or 'none'}"


def times(a: float, b: float) -> str:
    """a as a multiple of b, where b was large enough to be seen."""
    return f"{a / b:.1f}x" if b > 0 else "-"


def score(args: argparse.Namespace, s: Shape, device: torch.device) -> None:
    results = {layout: measured_layout(layout, args) for layout in LAYOUTS}
    own = results["ours"]
    rows = [
        (
            name,
            f"{r['seconds']:.2f}",
            times(r["seconds"], own["seconds"]),
            f"{r['mib']:.0f}",
            times(r["mib"], own["mib"]),
            f"{r['loss']:.6f}",
        )
        for name, r in results.items()
    ]
    table(
        f"score: K={K}, T={s.T}, vocabulary {s.vocab:,}, shape {args.shape}",
        device,
        "layout | seconds | of ours | peak extra MiB | of ours | loss",
        rows,
    )
    flops = K * counts(s, s.vocab, device, rank_of(s)).forward(TEACHER + s.T, s.T)
    share = flops / own["teachers"] / rates(device)[1]
    print(
        f"\nteacher forwards alone: {own['teachers']:.3f} s, {flops / 1e12:.2f} TFLOP, {share:.0%} of the measured matmul rate (bar on CUDA: 45%)"
    )


def adapters(args: argparse.Namespace, s: Shape, device: torch.device) -> None:
    """`lean_adapters` against PEFT's own forward beside a bf16 model (S22): seconds, and how far both are from fp32."""
    model, (student, contexts, ids) = (
        scoring_model(s, device, torch.bfloat16),
        scoring_ids(s.vocab, s.T),
    )
    keys, sampling = range(8), R.Sampling(max_new_tokens=16)

    def learn() -> list[torch.Tensor]:
        logp = R.token_logprobs(model, [student], [ids], grad=True)
        return torch.autograd.grad(logp.sum(), [p for p in model.parameters() if p.requires_grad])

    def measured() -> tuple[list[float], torch.Tensor, torch.Tensor]:
        work = (
            lambda: sgsd.score_teachers(model, contexts, ids),
            learn,
            lambda: R.generate(model, NoStops, contexts, sampling, keys),
        )
        seconds = [seconds_of(f, device, args.repeats) for f in work]
        return (
            seconds,
            sgsd.score_teachers(model, contexts, ids).double(),
            torch.cat([g.flatten() for g in learn()]).double(),
        )

    found = {"lean_adapters": measured()}
    for layer in model.modules():
        vars(layer).pop("forward", None)
    found["PEFT's own"] = measured()
    model.float()
    _, logp_KT, grad_P = found["fp32"] = measured()
    lines = [
        (
            name,
            *(f"{x:.2f}" for x in seconds),
            f"{float((logp - logp_KT).abs().mean()):.4f}",
            f"{float((grad - grad_P).norm() / grad_P.norm()):.1%}",
        )
        for name, (seconds, logp, grad) in found.items()
    ]
    table(
        f"adapters: bf16, K={K}, T={s.T}, rank {rank_of(s)}, shape {args.shape}",
        device,
        "products | teachers, seconds | student, forward and backward | decoding | log-probabilities off by, nats | gradient off by",
        lines,
    )


# ------------------------------------------------------------------------------------------------ rollout, eval


class NoStops:
    """In a tokenizer's place: the stop ids are the model's alone."""

    eos_token_id = None


class OurDraws(LogitsProcessor):
    """Makes transformers' greedy search take the token that `select_tokens` draws."""

    def __init__(self, keys: Sequence[int], width: int, sampling: R.Sampling):
        self.keys_B, self.width, self.sampling = np.array(keys, dtype=np.uint64), width, sampling

    def __call__(self, ids_BL, logits_BV):
        u_B = torch.from_numpy(R.uniforms(self.keys_B, ids_BL.shape[1] - self.width)).to(
            logits_BV.device
        )
        chosen_B = R.select_tokens(logits_BV, u_B, self.sampling)
        return torch.full_like(logits_BV, -torch.inf).scatter_(1, chosen_B[:, None], 0.0)


def static(
    model,
    prompts: list[list[int]],
    keys: list[int],
    rows: int,
    sampling: R.Sampling,
    same_draws: bool,
) -> list[list[int]]:
    """transformers' generate, `rows` prompts at a time, each batch until its longest row is through."""
    stops, out = R.stop_ids(model, NoStops), []
    for at in range(0, len(prompts), rows):
        batch = prompts[at : at + rows]
        width = max(map(len, batch))
        how = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
        }
        if same_draws:
            how = {
                "do_sample": False,
                "logits_processor": [OurDraws(keys[at : at + rows], width, sampling)],
            }
        ids, mask = (
            torch.tensor(
                [[0] * (width - len(p)) + x for p, x in zip(batch, rows_)], device=model.device
            )
            for rows_ in (batch, [[1] * len(p) for p in batch])
        )
        found = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=stops or None,
            pad_token_id=0,
            **how,
        )
        for row in found[:, width:].tolist():
            end = next((t + 1 for t, token in enumerate(row) if token in set(stops)), len(row))
            out.append(row[:end])
    return out


def decode_limit(
    s: Shape,
    model,
    prompts: list[list[int]],
    completions: list[list[int]],
    rows: int,
    bandwidth: float,
) -> float:
    """Seconds in which the machine could read the weights once per step and each row's cache once per token."""
    lengths = list(map(len, completions))
    steps = max(*lengths, math.ceil(sum(lengths) / rows))
    kind = next(model.parameters()).element_size()
    cache = (
        sum(n * len(p) + n * n // 2 for n, p in zip(lengths, prompts))
        * 2
        * s.layers
        * (s.heads // 2)
        * s.size
        * kind
    )
    return (sum(p.nbytes for p in model.parameters()) * steps + cache) / bandwidth


def decode(
    s: Shape, model, samples: int, rows: int, ways: Sequence[str], bandwidth: float
) -> tuple[list[list[str]], dict]:
    """A table's row per way of sampling the same prompts, and what each way sampled."""
    gen = torch.Generator().manual_seed(2)
    prompts = [
        torch.randint(
            0, s.decode_vocab, (STUDENT // 2 + i % (STUDENT // 2),), generator=gen
        ).tolist()
        for i in range(samples)
    ]
    keys, sampling, device = (
        [R.sample_key(0, 0, str(i)) for i in range(samples)],
        R.Sampling(max_new_tokens=s.new),
        model.device,
    )
    run = {
        "generate": lambda: static(model, prompts, keys, rows, sampling, False),
        "generate, same draws": lambda: static(model, prompts, keys, rows, sampling, True),
        "ours": lambda: R.generate(model, NoStops, prompts, sampling, keys, rows),
        "ours, half the rows": lambda: R.generate(
            model, NoStops, prompts, sampling, keys, rows // 2
        ),
    }
    found, out, lines = {}, {}, []
    for way in ways:
        found[way] = seconds_of(lambda way=way: out.update({way: run[way]()}), device, 1)
    rate = {way: sum(map(len, out[way])) / found[way] for way in ways}
    for way in ways:
        tokens, same = sum(map(len, out[way])), sum(a == b for a, b in zip(out[way], out["ours"]))
        limit = decode_limit(
            s, model, prompts, out[way], rows // 2 if "half" in way else rows, bandwidth
        )
        lines.append(
            [
                way,
                f"{found[way]:.1f}",
                tokens,
                f"{rate[way]:.0f}",
                f"{rate['ours'] / rate[way]:.2f}x",
                f"{found[way] / limit:.1f}x",
                "own draws" if way == "generate" else f"{same} of {samples}",
            ]
        )
    return lines, out


DECODED = "way | seconds | tokens | tokens/s | ours is | seconds of limit | same ids as ours"


def rollout(args: argparse.Namespace, s: Shape, device: torch.device) -> None:
    bandwidth, model = rates(device)[0], random_model(s, device, s.decode_vocab)
    R.generate(
        model, NoStops, [[1] * 8] * 2, R.Sampling(max_new_tokens=4), [1, 2]
    )  # the first call pays for kernels

    def lines() -> Iterator[list[str]]:
        for name, samples, rows, mean in (
            *((f"all to {s.new} tokens", rows, rows, 0) for rows in s.rows),
            *((f"long-tailed, up to {s.new}", rows, rows, s.mean) for rows in s.rows),
            ("long-tailed, more samples than rows", 3 * s.rows[0], s.rows[0], s.mean),
        ):
            found, _ = decode(
                s,
                stop_after(model, mean),
                samples,
                rows,
                ["generate", "generate, same draws", "ours"],
                bandwidth,
            )
            yield from ([f"{name}: {samples} samples, {rows} rows", *line] for line in found)

    table(
        f"rollout: shape {args.shape}, vocabulary {s.decode_vocab:,}, copies at {bandwidth / 1e9:.1f} GB/s",
        device,
        f"case | {DECODED}",
        lines(),
    )
    print(
        "\nbars: 5x generate and 3x of the limit on CUDA; 1.5x generate on long-tailed lengths with the same ids on CPU"
    )


def evaluation(args: argparse.Namespace, s: Shape, device: torch.device) -> None:
    samples, bandwidth, model = (
        12 * s.problems,
        rates(device)[0],
        stop_after(random_model(s, device, s.decode_vocab), s.mean),
    )
    ways = ["generate, same draws", "ours", "ours, half the rows"]
    lines, out = decode(s, model, samples, s.eval_rows, ways, bandwidth)
    table(
        f"eval: 12 samples of {s.problems} problems, long-tailed up to {s.new}, {s.eval_rows} rows, shape {args.shape}",
        device,
        DECODED,
        lines,
    )
    differ = [(a, b) for a, b in zip(out["ours"], out["ours, half the rows"]) if a != b]
    print(
        f"\nties: {len(differ)} of {samples} samples, {sum(map(len, out['ours']))} tokens, differ between {s.eval_rows} and {s.eval_rows // 2} rows"
    )
    print("bars: 3x static batches on CUDA, 1.5x on CPU")


# ------------------------------------------------------------------------------------------------ step


def run_folder(folder: pathlib.Path, s: Shape, device: torch.device) -> None:
    """All that a run needs: a random model, a byte-level tokenizer, a bank and problems whose answers are LaTeX."""
    threads, missing = (
        torch.get_num_threads(),
        {} if importlib.util.find_spec("pytest") else {"pytest": mock.MagicMock()},
    )
    with mock.patch.dict(sys.modules, missing):  # conftest imports it, but nothing here needs it
        from conftest import make_bank, make_tokenizer
    torch.set_num_threads(threads)
    stop_after(random_model(s, device, s.decode_vocab), s.T).save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    make_bank(folder / "bank.json", 10, 10)
    problems = [
        {"problem": f"What is {i} plus {i + 3}?", "answer": gold}
        for i, (gold, _) in enumerate(latex_pairs(64))
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(p) + "\n" for p in problems))


def train_in(
    folder: pathlib.Path, s: Shape, device: torch.device, batch: int, encoder: Shape, answers: bool
) -> dict[str, float]:
    """Seconds of a run's second and third update by part, "all" among them. A random encoder of the real one's shape embeds.

    answers: a random model boxes nothing; the verifier gets LaTeX all the same, where math-verify is installed.
    """
    model, cache = random_model(encoder, device, 4096).base_model.eval(), {}
    preds, stamps, seconds = [pred for _, pred in latex_pairs(64)], [], defaultdict(float)

    @torch.inference_mode()
    def embed(texts):
        for t in texts:
            if t not in cache:
                ids = torch.tensor([list(t.encode())], device=device)
                cache[t] = (
                    model(input_ids=ids, use_cache=False)
                    .last_hidden_state[0, -1]
                    .float()
                    .cpu()
                    .numpy()
                )
        return np.stack([cache[t] for t in texts])

    def timed(owner, name, part):
        plain = getattr(owner, name)

        def wrapped(*args, **kwargs):
            began = synchronized(device)
            result = plain(*args, **kwargs)
            seconds[part] += (synchronized(device) - began) * (
                name != "token_logprobs" or kwargs.get("grad", False)
            )
            return result

        return mock.patch.object(owner, name, wrapped)

    def stamp(*args):
        stamps.append(synchronized(device))
        if len(stamps) == 1:  # the first update warms up
            seconds.clear()
        return summarize(*args)

    summarize, out = runlog.summarize, folder / f"run{batch}"
    flags = {
        "model": folder / "model",
        "encoder": "random",
        "data": folder / "data.jsonl",
        "bank": folder / "bank.json",
        "out": out,
        "updates": 3,
        "batch-size": batch,
        "max-new-tokens": s.T,
        "num-teachers": K,
        "audit-every": 0,
        "update-every": 0,
        "device": device.type,
    }
    patches = [
        timed(R, "generate", "rollout"),
        timed(sgsd, "score_teachers", "scoring"),
        timed(R, "token_logprobs", "backward"),
        timed(torch.Tensor, "backward", "backward"),
        timed(sgsd, "update", "optimizer"),
        timed(R, "judge", "verification"),
        timed(sgsd, "retrieve", "retrieval"),
        mock.patch.object(runlog, "summarize", stamp),
        mock.patch.object(S, "load_encoder", lambda *_: embed),
    ]
    if answers and importlib.util.find_spec("math_verify"):
        patches.append(mock.patch.object(R, "extract_answer", lambda text: preds[len(text) % 64]))
    log = io.StringIO()
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(contextlib.redirect_stdout(log))
        stack.enter_context(contextlib.redirect_stderr(log))
        code = sgsd.main([f"--{name}={value}" for name, value in flags.items()])
    if code:
        raise RuntimeError(log.getvalue())
    return {"all": stamps[-1] - stamps[0], **seconds} if stamps else {}


def step(args: argparse.Namespace, s: Shape, device: torch.device) -> None:
    copied, multiplied = rates(device)
    c, plain, teachers = counts(s, s.decode_vocab, device), sgsd.score_teachers, []

    def scored(model, contexts, ids, *rest):
        teachers.append(sum(c.forward(len(x) + len(ids), len(ids)) for x in contexts))
        return plain(model, contexts, ids, *rest)

    with tempfile.TemporaryDirectory() as name, mock.patch.object(sgsd, "score_teachers", scored):
        folder = pathlib.Path(name)
        run_folder(folder, s, device)
        seconds = train_in(
            folder, s, device, s.batch, ENCODERS.get(args.shape, SHAPES["tiny"]), True
        )
        rows = [json.loads(line) for line in (folder / f"run{s.batch}/rollouts.jsonl").open()]
    lengths = [(len(r["prompt_ids"]), len(r["completion_ids"])) for r in rows if r["step"] > 1]
    steps = sum(max(new for _, new in lengths[i : i + s.batch]) for i in (0, s.batch))
    limits = {
        "rollout": (steps * c.weights + sum(c.decoding(x, new, 1, 0)[1] for x, new in lengths))
        / copied,
        "scoring": sum(teachers[s.batch :]) / multiplied,
        "backward": sum(c.forward(x + new, new) + c.backward(x + new, new) for x, new in lengths)
        / multiplied,
    }
    everything = seconds.pop("all")
    seconds["the rest: prompts, records, gather, logs"] = everything - sum(seconds.values())
    work = sum(seconds[part] for part in ("rollout", "scoring", "backward")) / everything
    tokens = sum(len(r["completion_ids"]) for r in rows) / len(rows)
    judged = (
        "LaTeX answers"
        if importlib.util.find_spec("math_verify")
        else "no answers: math-verify is not installed"
    )
    lines = [
        (
            part,
            f"{x / 2:.3f}",
            f"{x / everything:.1%}",
            f"{limits[part] / 2:.3f}" if part in limits else "",
            times(x, limits[part]) if part in limits else "",
        )
        for part, x in [*seconds.items(), ("an update", everything)]
    ]
    table(
        f"step: {s.batch} problems, K={K}, up to {s.T} tokens (mean {tokens:.0f}), {judged}, shape {args.shape}",
        device,
        "part | seconds | share | least seconds | of these",
        lines,
    )
    print(
        f"\nrollout, scoring and backward: {work:.1%} (bar: 60%); all else: {1 - work:.1%} (bar: under 10%)"
    )


# ------------------------------------------------------------------------------------------------ memory


def memory(args: argparse.Namespace, s: Shape, device: torch.device) -> None:
    kind, Ts = (
        (2 if args.cuda else 4),
        [s.T * n // 8 for n in (1, 2, 4, 8)]
        if args.cuda or args.shape == "tiny"
        else [128, 256, 512, 1024],
    )

    def accounted(T: int, score_tokens: int = 16384) -> float:
        """MiB that grow with T: the student's checkpointed states and one layer, or the teachers' one layer, whichever is more."""
        pack = min(K, max(1, score_tokens // (TEACHER + T))) * (TEACHER + T)
        student = (STUDENT + T) * (
            s.layers * s.width * kind + 3 * s.layer_bytes(kind)
        )  # backward: inputs, outputs, gradients
        return max(pack * s.layer_bytes(kind), student) / 2**20

    found: dict[int, float] = {}

    def line(T: int) -> tuple[object, ...]:
        found[T] = measured_layout("ours", args, T=T, checkpointed=1, repeats=1)["mib"]
        grown = (
            (f"{found[T] - found[T // 2]:+.0f}", f"{accounted(T) - accounted(T // 2):+.0f}")
            if T // 2 in found
            else ("", "")
        )
        return T, f"{found[T]:.0f}", *grown, f"{K * T * s.vocab * 4 / 2**20:.0f}"

    table(
        f"memory: K={K}, shape {args.shape}, layers checkpointed",
        device,
        "T | peak extra MiB | more than at T/2 | hidden states and one layer account for | logits of the teachers would take",
        map(line, Ts),
    )
    packed = (
        (n, measured_layout("teachers", args, T=Ts[-1], score_tokens=n, repeats=1))
        for n in (16384, 4096, 1024)
    )
    table(
        f"memory: the teachers alone, T={Ts[-1]}, the head in slices of 16 MiB",
        device,
        "--score-tokens | peak extra MiB | rows together | one layer | seconds",
        (
            (
                n,
                f"{r['mib']:.0f}",
                rows := min(K, max(1, n // (TEACHER + Ts[-1]))),
                f"{rows * (TEACHER + Ts[-1]) * s.layer_bytes(kind) / 2**20:.0f}",
                f"{r['seconds']:.2f}",
            )
            for n, r in packed
        ),
    )
    parts = qwen3_8b()
    table(
        "memory: Qwen3-8B, bf16, on one card, default flags, 32 problems",
        device,
        "what | GB",
        [(name, f"{x / 1e9:.1f}") for name, x in parts.items()],
    )
    total = sum(parts.values()) / 1e9
    print(
        f"\nall at once: {total:.1f} GB, which {'fits' if total < 76 else 'does NOT fit'} one 80 GB card with 4 GB left to the driver and fragments"
    )


def qwen3_8b() -> dict[str, float]:
    """Bytes, by arithmetic. Width 4096, 36 layers, MLP 12288, 32 query and 8 key-value heads of 128, head not tied."""
    cfg, D, L, M, kv, rows = sgsd.Config(), 4096, 36, 12288, 1024, 32
    r, tokens = cfg.lora_rank, cfg.score_tokens
    layer = 2 * D * D + 2 * D * kv + 3 * D * M
    adapters = L * r * (2 * 2 * D + 2 * (D + kv) + 3 * (D + M))
    # one layer of a training pack, per token: inputs, norms, heads and MLP in bf16; the MLP's sums and gradients while they last
    saved, passing = 2 * (14 * D + 5 * M), 3 * 4 * M
    return {
        "weights, bf16": 2 * (L * layer + 2 * VOCAB * D),
        "adapters, their gradients, AdamW's two moments, fp32": 4 * 4 * adapters,
        f"checkpointed hidden states of {tokens} tokens": 2 * L * D * tokens,
        f"one layer's activations, {tokens} tokens": (saved + passing) * tokens,
        "head: slices of logits, and their gradients": 2 * 4 * R.SLICE_LOGITS["cuda"],
        "encoder, 0.6 billion weights, fp32": 4 * 0.6e9,
        f"cache of {rows} rows, 512 + {cfg.max_new_tokens} tokens": 2
        * 2
        * L
        * kv
        * rows
        * (512 + cfg.max_new_tokens),
        "sampling: logits of the rows, fp64 and temporaries": 5 * 8 * rows * VOCAB,
    }


# ------------------------------------------------------------------------------------------------ scaling


def bank_of(n: int) -> tuple[S.SkillBank, S.Embed]:
    """n entries, half of them mistakes, and 1024 random numbers for each text."""
    kinds = {
        key: [{S.IDS[key]: str(i), **dict.fromkeys(fields, "text")} for i in range(n // 2)]
        for key, fields in S.FIELDS.items()
    }
    rng = np.random.default_rng(0)
    return S.SkillBank(**kinds), lambda texts: rng.standard_normal(
        (len(texts), 1024), dtype=np.float32
    )


def scaling(args: argparse.Namespace, s: Shape, device: torch.device) -> None:
    model, Ts = (
        scoring_model(s, device),
        [4, 8, 16] if args.shape == "tiny" else [256, 512, 1024, 2048],
    )

    def costs() -> Iterator[tuple[str, dict[int, float]]]:
        yield (
            "K",
            {
                k: seconds_of(
                    lambda k=k: score_once(model, "ours", s.T // 2, k), device, args.repeats
                )
                for k in (1, 2, 4, 8, 16)
            },
        )
        yield (
            "T",
            {
                T: seconds_of(lambda T=T: score_once(model, "ours", T), device, args.repeats)
                for T in Ts
            },
        )
        banks = {
            n: bank_of(n) for n in (100, 1000, 10_000, 100_000)[: 2 if args.shape == "tiny" else 4]
        }
        for bank, embed in banks.values():
            bank.retrieve("a problem", K, embed)  # embeds the entries
        for many in (1, 4, 32):  # an update's, on one of eight GPUs and on one alone
            problems = [str(i) for i in range(many)]
            yield (
                f"bank entries, {many} problem{'s' * (many > 1)} at a time",
                {
                    n: seconds_of(
                        lambda b=b, e=e, p=problems: b.retrieve_all(p, K, e),
                        device,
                        4 * args.repeats,
                    )
                    / many
                    for n, (b, e) in banks.items()
                },
            )
        seconds = {}
        with (
            tempfile.TemporaryDirectory() as name,
            mock.patch.dict(os.environ, OMP_NUM_THREADS="1"),
        ):  # else one rank has all cores
            run_folder(
                pathlib.Path(name),
                few := SHAPES[shape := "tiny" if args.shape == "tiny" else "few"],
                torch.device("cpu"),
            )
            for ranks in (1, 2):
                batch = ranks * few.batch
                own_process(
                    "step", "--train", name, "--batch", batch, "--shape", shape, ranks=ranks
                )
                rows = [
                    json.loads(line)
                    for line in (pathlib.Path(name) / f"run{batch}/metrics.jsonl").open()
                ]
                seconds[ranks] = ranks * min(sum(row["seconds"].values()) for row in rows)
        yield "ranks (rank-seconds, work per rank the same)", seconds

    def line(what: str, cost: dict[int, float]) -> tuple[str, ...]:
        slope = np.polyfit(np.log(list(cost)), np.log(list(cost.values())), 1)[0]
        return (
            what,
            ", ".join(f"{n:,}: {1000 * x:,.3g} ms" for n, x in cost.items()),
            f"{slope:.2f}",
            "yes" if slope < 1.1 else "NO",
        )

    table(
        f"scaling: shape {args.shape}",
        device,
        "against | cost | log-log slope | linear or better",
        (line(*cost) for cost in costs()),
    )
    print(
        "\nbar: retrieval from 100,000 entries in 20 ms per problem, embedding the problem apart; a step retrieves for all its problems at once"
    )


# ------------------------------------------------------------------------------------------------ verify


def latex_pairs(n: int) -> list[tuple[str, str]]:
    """Answers as competition problems have them, each with another spelling; every second one is changed."""
    rng = random.Random(0)
    shapes = [
        (r"\frac{{{a}}}{{{b}}}", r"{a}/{b}"),
        (r"{a}\sqrt{{{b}}}", r"{a} \cdot \sqrt{{{b}}}"),
        (r"\left({a}, \frac{{{b}}}{{7}}\right)", r"({a},{b}/7)"),
        (r"({a},\infty)", r"x>{a}"),
        ("x^2+{a}x-{b}", "-{b}+{a}x+x^2"),
        (r"\frac{{{a}\pi}}{{{b}}}", r"\dfrac{{{a}}}{{{b}}}\pi"),
        (r"{a}+{b}i", "{b}i+{a}"),
        (r"\{{{a}, -{b}\}}", r"\{{-{b}, {a}\}}"),
        (r"{a}\pm\sqrt{{{b}}}", r"{a}-\sqrt{{{b}}}, {a}+\sqrt{{{b}}}"),
        ("{a}.{b}", r"x = {a}.{b}0"),
        (r"{a}^\circ", "{a}"),
        (
            r"\begin{{pmatrix}}{a}\\{b}\end{{pmatrix}}",
            r"\begin{{pmatrix}} {a} \\ {b} \end{{pmatrix}}",
        ),
        (r"{a}\text{{ cm}}^2", "{a}"),
        ("y={a}x+{b}", "{b}+{a}x"),
    ]
    pairs = []
    for i in range(n):
        a, b = rng.sample(range(11, 5000), 2)
        gold, pred = shapes[i % len(shapes)]
        pairs.append((gold.format(a=a, b=b), pred.format(a=a + (i // len(shapes)) % 2, b=b)))
    return pairs


def judge(*_: object) -> None:
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
        for what, pairs in [("integers", integers)] + [
            ("latex", latex[i : i + 364]) for i in range(0, len(latex), 364)
        ]:
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
    print(
        f"| start to first verdict, best of 3 | {min(starts):.2f} s |\n| plain integers | {rates['integers'][0]:,.0f} per second |"
    )
    print(f"| ordinary LaTeX, best of 4 times 364 | {max(rates['latex']):,.0f} per second |")
    print(
        f"| all of them, in the worker's processor time | {len(latex) / busy:,.0f} per second |\n| worker's memory: resident, address space | {memory[0]:.0f} MiB, {memory[1]:.0f} MiB |"
    )
    print(
        f"| golden table: wrong | {len(ours)} of {len(GOLDEN)} |\n| golden table: wrong with math-verify alone | {len(theirs)} of {len(GOLDEN)} |"
    )
    print(
        f"| of these called right, called wrong | {sum(not r for *_, r in theirs)}, {sum(r for *_, r in theirs)} |"
    )
    print(
        f"| math-verify's verdict changes when the two are exchanged | {turned} of {len(GOLDEN)} |"
    )
    print("\n| gold | prediction | is | math-verify alone |\n|---|---|---|---|")
    for gold, pred, is_right in theirs:
        print(
            "| "
            + " | ".join(f"`{x}`".replace("|", "\\|") for x in (gold, pred))
            + f" | {'right | wrong' if is_right else 'wrong | right'} |"
        )


MODES = {
    "cost": cost,
    "score": score,
    "adapters": adapters,
    "rollout": rollout,
    "step": step,
    "eval": evaluation,
    "verify": judge,
    "memory": memory,
    "scaling": scaling,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=[*MODES, "all"])
    parser.add_argument(
        "--cuda", action="store_true", help="on one CUDA GPU, at Qwen3-1.7B's shape"
    )
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--repeats", type=int, default=3, help="the best of so many counts")
    for name, kind in (
        ("layout", str),
        ("T", int),
        ("score-tokens", int),
        ("checkpointed", int),
        ("train", pathlib.Path),
        ("batch", int),
    ):
        parser.add_argument("--" + name, type=kind, help=argparse.SUPPRESS)  # how it calls itself
    args = parser.parse_args(argv)
    device = torch.device("cuda" if args.cuda else "cpu")
    args.shape = args.shape or ("qwen3-1.7b" if args.cuda else "small")
    s = SHAPES[args.shape]
    if args.layout:
        R.SLICE_LOGITS |= (
            {device.type: 1 << 22} if args.layout == "teachers" else {}
        )  # so that what the layers take is seen
        print(
            json.dumps(
                one_layout(
                    args.layout,
                    s,
                    device,
                    args.repeats,
                    args.T or s.T,
                    args.score_tokens or 16384,
                    bool(args.checkpointed),
                )
            )
        )
    elif args.train:
        train_in(args.train, s, device, args.batch, SHAPES["tiny"], False)
    failed = 0
    for name in () if args.layout or args.train else MODES if args.what == "all" else [args.what]:
        try:
            MODES[name](args, s, device)
        except Exception as e:
            if (
                isinstance(e, ModuleNotFoundError) and e.name
            ):  # transformers raises one without a name
                print(f"\n{name}: skipped, {e.name} is not installed", flush=True)
            elif args.what != "all":
                raise
            else:
                failed += 1
                print(f"\n{name}: failed\n\n{traceback.format_exc()}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()  # the next mode may measure in processes of its own
    if failed:
        sys.exit(f"{failed} of {len(MODES)} modes failed")


if __name__ == "__main__":
    main()
