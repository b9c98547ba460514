"""Speed and memory, as ratios in one run. Random weights: speed needs no trained ones.

    python research/speed/bench.py MODE    one of these, or all, which goes on where one fails

    score      K teachers and the student, against one student row per teacher
    rollout    rollout.generate against static batches of `generate`
    step       a step by part, and the least that the machine must take
    memory     peak memory of scoring

With --cuda on one GPU, at Qwen3-1.7B's shape. Tables are markdown. Peaks are above what the loaded
model holds, each in a process of its own. "limit" and "least seconds" are what the machine must
take: bytes of weights and cache over its copy rate, FLOPs over its matmul rate, both measured in
the same run. On a CPU with one thread (OMP_NUM_THREADS=1) seconds are this process's processor
seconds, so that a busy machine matters less; a step's are wall time. The best of --repeats counts;
rollout runs once.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import gc
import math
import multiprocessing
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config
from transformers.utils import logging

import distributed
import rollout
import scoring
import sgsd
import skills
from lib import config, files
from lib import model as models
from lib.run import Run
from lib.verify import Verifier
from research.cost.counts import VOCAB, Counts
from research.markdown_table import head_of, row_of

logging.disable_progress_bar()
STUDENT, TEACHER, K = 64, 192, 8  # prompt tokens; teachers
Args = argparse.Namespace


@dataclass(frozen=True)
class Shape:
    """A model, and how much is made of everything. Small models decode with a small vocabulary,
    they would spend their time on the head."""

    width: int
    layers: int
    mlp: int
    heads: int  # of queries; half as many of keys and values
    size: int  # of a head
    T: int  # completion tokens of score and step
    batch: int = 4  # problems of a step
    new: int = 96  # the longest completion of rollout
    mean: int = 16  # about what is sampled until one of the stop ids comes
    rows: tuple[int, ...] = (32,)  # that decode together
    vocab: int = VOCAB
    decode_vocab: int = 8192  # of rollout and step

    @property
    def rank(self) -> int:
        return self.width // 32  # 64 of Qwen3-1.7B's 2048

    def counts(self, device: torch.device, vocab: int, rank: int) -> Counts:
        queries, kind = self.heads * self.size, 2 if device.type == "cuda" else 4
        args = (self.width, self.layers, self.mlp, queries, queries // 2, vocab, kind, rank)
        return Counts(*args)


TINY: dict[str, Any] = {"batch": 2, "new": 12, "mean": 4, "rows": (4,), "vocab": 512}
LARGE: dict[str, Any] = {"batch": 32, "new": 512, "mean": 128, "rows": (32, 128)}
SHAPES = {
    "tiny": Shape(32, 2, 48, 2, 16, T=8, decode_vocab=1024, **TINY),
    "small": Shape(256, 8, 768, 4, 64, T=128),
    "qwen3-1.7b": Shape(2048, 28, 6144, 16, 128, T=1024, decode_vocab=VOCAB, **LARGE),
}


def random_model(s: Shape, device: torch.device, vocab: int = 0) -> Any:
    """A Qwen3 of this shape."""
    torch.manual_seed(0)
    shape = Qwen3Config(
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
    with device:
        model = AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation="sdpa")
    for name, p in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            p.data *= 30  # else a tied head repeats the last token for ever
    return model


def stop_after(model: Any, mean: int) -> Any:
    """The model with each `mean`-th id as a stop id, for long-tailed lengths; 0: it never stops."""
    vocab = model.config.vocab_size
    stops = list(range(0, vocab, mean)) if mean else [vocab]  # an id that is never sampled
    model.config.eos_token_id = model.generation_config.eos_token_id = stops
    return model.eval()


def clock(device: torch.device) -> float:
    """Seconds; processor time where that is wall time on a quiet machine."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()


def seconds_of(f: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The best of `repeats`."""
    best = math.inf
    for _ in range(repeats):
        began = clock(device)
        f()
        best = min(best, clock(device) - began)
    return best


def rates(device: torch.device) -> tuple[float, float]:
    """Bytes per second of a copy, read and written, and FLOPs per second of a matrix product.

    In bf16 on CUDA, elsewhere in fp32.
    """
    n, numbers, dtype = 1024, 1 << 25, torch.float32
    if device.type == "cuda":
        n, numbers, dtype = 8192, 1 << 28, torch.bfloat16
    a, b = torch.randn(2, n, n, dtype=dtype, device=device)  # of ones it is faster
    c, d = torch.randn(2, numbers, dtype=dtype, device=device)
    copying = seconds_of(lambda: d.copy_(c), device, 5)
    multiplying = seconds_of(lambda: a @ b, device, 5)
    return 2 * c.nbytes / copying, 2 * n**3 / multiplying


def machine(device: torch.device) -> str:
    git = ["git", "rev-parse", "--short", "HEAD"] if shutil.which("git") else ["true"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    name = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        name = torch.cuda.get_device_name()
    return f"{name}, torch {torch.__version__}, commit {commit or 'none'}"


def table(title: str, device: torch.device, columns: str, rows: Iterable[Sequence[object]]) -> None:
    """Print rows as they come: what was measured stays when the rest is killed or fails."""
    print(f"\n{title}; {machine(device)}\n")
    print("\n".join(head_of(columns.split(" | "))), flush=True)
    for row in rows:
        print(row_of(row), flush=True)


def times(a: float, b: float) -> str:
    """a as a multiple of b, where b was large enough to be seen."""
    return f"{a / b:.1f}x" if b > 0 else "-"


def resident(field: str) -> int:
    """Bytes of this process's memory: VmRSS now, VmHWM at its highest (Linux)."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status[status.index(field) :].split()[1]) * 1024


def in_own_process(args: Args, f: Callable[..., Any], *rest: object, peak: bool = True) -> Any:
    """f(args, *rest) where no other run's memory lies in the way.

    peak: what is freed goes back to the system at once, so that a peak is what was alive. That
    costs time, so seconds are measured without it, as a user has them.
    """
    if args.one_process:
        return f(args, *rest)
    with mock.patch.dict(os.environ, {"MALLOC_MMAP_THRESHOLD_": "262144"} if peak else {}):
        spawn = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:
            return pool.submit(f, args, *rest).result()


# ------------------------------------------------------------------------------------------ score


LAYOUTS = ["replicated", "replicated, no prompt logits", "ours"]  # the second is kinder


def replicated(model, prompts, ids, keep):
    """From full logits of all rows at once, or of the last `keep` places."""
    x = torch.tensor([p + ids for p in prompts], device=model.device)
    logits = model(input_ids=x, use_cache=False, logits_to_keep=keep).logits
    logp = logits[:, -len(ids) - 1 : -1].float().log_softmax(-1)
    return logp.gather(-1, x[:, -len(ids) :, None])[..., 0]


def scoring_model(s: Shape, device: torch.device, checkpointed: bool = False) -> Any:
    """With adapters as a run has them, which do something."""
    above = 0 if checkpointed else 1 << 30  # tokens of a pass
    model = models.with_adapters(random_model(s, device), s.rank, 2 * s.rank, above)
    scoring.has_plain_head(model)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.01)
    return model


def score_once(model, layout: str, T: int, teachers: int = K, score_tokens: int = 16384) -> float:
    """One rollout's loss, forward and backward; of layout "teachers" their scores alone."""
    gen = torch.Generator().manual_seed(1)
    lengths = [STUDENT, T, *[TEACHER] * teachers]
    vocab = model.config.vocab_size
    drawn = [torch.randint(0, vocab, (n,), generator=gen).tolist() for n in lengths]
    student, ids, *contexts = drawn
    if layout in ("ours", "teachers"):
        logpT_KT = scoring.score_teachers(model, contexts, ids, score_tokens)
        if layout == "teachers":
            return 0.0
        logpS = scoring.token_logprobs(model, [student], [ids], grad=True)
    else:  # the student's row once per teacher
        keep = 0 if layout == "replicated" else T + 1  # 0 is all
        with torch.no_grad():
            logpT_KT = replicated(model, contexts, ids, keep)
        logpS = replicated(model, [student] * teachers, ids, keep)
    mask_T, rho_K = torch.ones(T, device=model.device), torch.ones(teachers, device=model.device)
    lbar_K = sgsd.teacher_losses(logpT_KT - logpS, mask_T, 1.0)
    loss = sgsd.sgsd_loss(lbar_K, rho_K / teachers, rho_K)
    loss.backward()
    model.zero_grad(set_to_none=True)
    return float(loss.detach())


def measure(
    args: Args, layout: str, T: int, checkpointed: bool = False, score_tokens: int = 16384
) -> dict[str, float]:
    """Seconds, peak extra MiB and the loss of a layout; of ours also the teachers' seconds."""
    device, found = args.device, {}
    model = scoring_model(SHAPES[args.shape], device, checkpointed)

    def once() -> None:
        found["loss"] = score_once(model, layout, T, K, score_tokens)

    # The teachers alone get logits in slices of 16 MiB, so that what the layers take is seen.
    slices = {device.type: 1 << 24} if layout == "teachers" else {}
    with mock.patch.dict(scoring.SLICE_LOGITS, slices):
        if device.type == "cuda":
            once()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        else:
            pathlib.Path("/proc/self/clear_refs").write_text("5")  # the high mark starts anew
            before = resident("VmRSS")
        found["seconds"] = seconds_of(once, device, args.repeats)
        peak = torch.cuda.max_memory_allocated() if args.cuda else resident("VmHWM")
    found["mib"] = (peak - before) / 2**20
    if layout == "ours" and not checkpointed:
        alone = functools.partial(score_once, model, "teachers", T)
        found["teachers"] = seconds_of(alone, device, args.repeats)
    return found


def score(args: Args, s: Shape, device: torch.device) -> None:
    results = {}
    for layout in LAYOUTS:
        results[layout] = in_own_process(args, measure, layout, s.T, peak=False)
        results[layout]["mib"] = in_own_process(args, measure, layout, s.T)["mib"]
    own, rows = results["ours"], []
    for name, r in results.items():
        seconds = f"{r['seconds']:.2f}", times(r["seconds"], own["seconds"])
        peak = f"{r['mib']:.0f}", times(r["mib"], own["mib"])
        rows.append((name, *seconds, *peak, f"{r['loss']:.6f}"))
    title = f"score: K={K}, T={s.T}, vocabulary {s.vocab:,}, shape {args.shape}"
    table(title, device, "layout | seconds | of ours | peak extra MiB | of ours | loss", rows)
    flops = K * s.counts(device, s.vocab, s.rank).forward(TEACHER + s.T, s.T)
    share = flops / own["teachers"] / rates(device)[1]
    print(
        f"\nteacher forwards alone: {own['teachers']:.3f} s, {flops / 1e12:.2f} TFLOP, "
        f"{share:.0%} of the measured matmul rate (bar on CUDA: 45%)"
    )


# ---------------------------------------------------------------------------------------- rollout


NO_STOPS = types.SimpleNamespace(eos_token_id=None)  # as a tokenizer: the stops are the model's


def static(
    model, prompts, keys, rows: int, sampling: rollout.Sampling, same_draws: bool, cache: Any = None
) -> list:
    """`generate`, `rows` prompts at a time, each batch until its longest row is through."""
    stops, out = rollout.stop_ids(model, NO_STOPS), []
    how: dict[str, Any] = {"max_new_tokens": sampling.max_new_tokens, "eos_token_id": stops}
    how |= {"pad_token_id": 0, "do_sample": not same_draws}
    if cache is not None:
        how["past_key_values"] = cache
    if not same_draws:
        how |= {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
    for at in range(0, len(prompts), rows):
        batch = prompts[at : at + rows]
        width = max(map(len, batch))
        if same_draws:
            draw = rollout.KeyedDraw(keys[at : at + rows], [width] * len(batch), sampling)
            how["logits_processor"] = [draw]
        ids = torch.tensor([[0] * (width - len(p)) + p for p in batch], device=model.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
        sampled = model.generate(input_ids=ids, attention_mask=mask.to(model.device), **how)
        for row in sampled[:, width:].tolist():
            ends = [t + 1 for t, token in enumerate(row) if token in stops]
            out.append(row[: min(ends, default=len(row))])
    return out


WAYS = ("generate", "generate, same draws", "ours")


def decode(s: Shape, model, samples: int, rows: int, bandwidth: float) -> Iterator[list[str]]:
    """The cells of each way of sampling the same prompts: seconds, tokens, tokens/s and so on."""
    gen, prompts = torch.Generator().manual_seed(2), []
    for i in range(samples):
        length = STUDENT // 2 + i % (STUDENT // 2)
        prompts.append(torch.randint(0, s.decode_vocab, (length,), generator=gen).tolist())
    keys = [rollout.sample_key(0, 0, str(i)) for i in range(samples)]
    sampling = rollout.Sampling(max_new_tokens=s.new)
    c = s.counts(model.device, s.decode_vocab, rank=0)
    seconds, out = {}, {}
    for way in WAYS:
        began = clock(model.device)
        if way == "ours":
            out[way] = rollout.generate(model, NO_STOPS, prompts, sampling, keys, rows)
        else:
            out[way] = static(model, prompts, keys, rows, sampling, way != "generate")
        seconds[way] = clock(model.device) - began
    rate = {way: sum(map(len, out[way])) / seconds[way] for way in WAYS}
    for way in WAYS:
        tokens = sum(map(len, out[way]))
        same = sum(a == b for a, b in zip(out[way], out["ours"]))
        steps = max(*map(len, out[way]), math.ceil(tokens / rows))
        moved = float(steps * c.weights)
        for prompt, ids in zip(prompts, out[way]):
            moved += c.decoding(len(prompt), len(ids), 1, 0)[1]
        cells = [way, f"{seconds[way]:.1f}", str(tokens), f"{rate[way]:.0f}"]
        cells += [f"{rate['ours'] / rate[way]:.2f}x", times(seconds[way], moved / bandwidth)]
        yield [*cells, "own draws" if way == "generate" else f"{same} of {samples}"]


def rollouts(args: Args, s: Shape, device: torch.device) -> None:
    bandwidth, model = rates(device)[0], random_model(s, device, s.decode_vocab)
    warm = rollout.Sampling(max_new_tokens=4)
    rollout.generate(stop_after(model, 0), NO_STOPS, [[1] * 8] * 2, warm, [1, 2])  # for kernels
    cases = [(f"all to {s.new} tokens", rows, rows, 0) for rows in s.rows]
    cases += [(f"long-tailed, up to {s.new}", rows, rows, s.mean) for rows in s.rows]
    cases += [("long-tailed, more samples than rows", 3 * s.rows[0], s.rows[0], s.mean)]

    def lines() -> Iterator[list[str]]:
        for name, samples, rows, mean in cases:
            for cells in decode(s, stop_after(model, mean), samples, rows, bandwidth):
                yield [f"{name}: {samples} samples, {rows} rows", *cells]

    title = f"rollout: shape {args.shape}, vocabulary {s.decode_vocab:,}"
    title += f", copies at {bandwidth / 1e9:.1f} GB/s"
    columns = "case | way | seconds | tokens | tokens/s | ours is | of the limit | same ids as ours"
    table(title, device, columns, lines())


# ------------------------------------------------------------------------------------------- step


ANSWERS = (  # as competition problems have them, each in another spelling
    (r"\frac{3}{11}", "3/11"),
    (r"\left(4, \frac{5}{7}\right)", "(4,5/7)"),
    ("x^2+3x-8", "-8+3x+x^2"),
    (r"\{4, -9\}", r"\{-9, 4\}"),
    (r"17\text{ cm}^2", "18"),
)


class LatexVerifier(Verifier):
    """Judges LaTeX in the place of what a random model writes, and keeps the time."""

    seconds = 0.0

    def judge(self, cases):
        began = time.perf_counter()
        spellings = dict(ANSWERS)
        verdicts = super().judge([(x, rf"\boxed{{{spellings[x.answer]}}}") for x, _ in cases])
        self.seconds += time.perf_counter() - began
        return verdicts


def write_inputs(folder: pathlib.Path, s: Shape, device: torch.device) -> dict[str, Any]:
    """The settings of a run of three steps, and what it needs: a random model with the tokenizer
    of tiny/, and problems with these answers."""
    stop_after(random_model(s, device, s.decode_vocab), s.T).save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(ROOT / "tiny" / "model").save_pretrained(folder / "model")
    rows = []
    for i in range(64):
        gold, _ = ANSWERS[i % len(ANSWERS)]
        rows.append({"problem": f"What is {i} plus {i + 3}?", "answer": gold})
    files.append_jsonl(folder / "data.jsonl", rows)
    where = {"model": folder / "model", "data": folder / "data.jsonl", "out": folder / "run"}
    where["encoder"] = ROOT / "tiny" / "encoder"
    where["bank"] = ROOT / "banks" / "word_problems.json"
    settings: dict[str, Any] = {name: str(path) for name, path in where.items()}
    settings |= {"steps": 3, "batch_size": s.batch, "max_new_tokens": s.T, "num_teachers": K}
    return settings | {"audit_every": 0, "evolve_every": 0, "device": device.type}


def least_seconds(run: Run, rows: list[dict], s: Shape, device: torch.device) -> dict[str, float]:
    """What the steps of these rollouts take at least, by part."""
    (copied, multiplied), c = rates(device), s.counts(device, s.decode_vocab, rank=64)
    least = {"rollout": 0.0, "scoring": 0.0, "backward": 0.0}
    longest: dict[int, int] = {}
    for row in rows:
        x, new = len(row["prompt_ids"]), len(row["completion_ids"])
        longest[row["step"]] = max(new, longest.get(row["step"], 0))
        least["rollout"] += c.decoding(x, new, 1, 0)[1] / copied
        back = c.backward(x + new, new) if any(row.get("rho", [])) else 0
        least["backward"] += (c.forward(x + new, new) + back) / multiplied
        pairs_K = run.bank.retrieve(row["problem"], run.cfg.num_teachers, run.embed)
        roll: Any = types.SimpleNamespace(**row)
        for context in sgsd.teacher_prompts(run, pairs_K, roll.problem, roll)[1]:
            least["scoring"] += c.forward(len(context) + new, new) / multiplied
    least["rollout"] += sum(longest.values()) * c.weights / copied
    return least


def step(args: Args, s: Shape, device: torch.device) -> None:
    """Steps 2 and 3 of a run; the first one warms up."""
    ends, laps, verifier = [], [], LatexVerifier()

    def timed(run: Run, step: int) -> tuple[list[dict], float]:
        result = sgsd.train_step(run, step)
        ends.append(time.perf_counter())
        laps.append({**run.clock.seconds, "verification": verifier.seconds})
        verifier.seconds = 0.0
        return result

    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(sys.stderr):
        cfg = config.Config(**write_inputs(pathlib.Path(name), s, device))
        with Run.open(cfg, skills.SkillBank.load, sgsd.student_prompt) as run, verifier:
            run.verifier = verifier
            sgsd.train(run, timed)
        rows = list(files.read_jsonl(run.out / "rollouts.jsonl"))
        least = least_seconds(run, [row for row in rows if row["step"] > 1], s, device)
    seconds = {part: laps[1][part] + laps[2][part] for part in laps[0]}
    verification = seconds.pop("verification")
    everything = ends[2] - ends[0]
    parts = {
        "rollout": seconds["gen"] - verification,
        "verification": verification,
        "scoring": seconds["score"],
        "backward": seconds["bwd"],
        "optimizer": seconds["opt"],
        "the rest: records, gather, logs": everything - sum(seconds.values()),
        "a step": everything,
    }
    lines = []
    for part, x in parts.items():
        line = [part, f"{x / 2:.3f}", f"{x / everything:.1%}", "", ""]
        if part in least:
            line[3:] = f"{least[part] / 2:.3f}", times(x, least[part])
        lines.append(line)
    tokens = sum(len(row["completion_ids"]) for row in rows) / len(rows)
    title = f"step: {s.batch} problems, K={K}, up to {s.T} tokens (mean {tokens:.0f})"
    title += f", LaTeX answers, shape {args.shape}"
    table(title, device, "part | seconds | share | least seconds | of these", lines)
    work = sum(parts[part] for part in least) / everything
    print(
        f"\nrollout (prompts and retrieval with it), scoring and backward: {work:.1%} (bar: 60%); "
        f"all else: {1 - work:.1%} (bar: under 10%)"
    )


# ----------------------------------------------------------------------------------------- memory


def memory(args: Args, s: Shape, device: torch.device) -> None:
    args = Args(**{**vars(args), "repeats": 1})  # of its seconds, little hangs
    Ts = [128, 256, 512, 1024]
    if args.cuda or args.shape == "tiny":
        Ts = [s.T // 8, s.T // 4, s.T // 2, s.T]

    def by_length() -> Iterator[list[object]]:
        for T in Ts:
            peak = in_own_process(args, measure, "ours", T, True)["mib"]
            yield [T, f"{peak:.0f}", f"{K * T * s.vocab * 4 / 2**20:.0f}"]

    def by_budget() -> Iterator[list[object]]:
        for n in (16384, 4096, 1024):
            r = in_own_process(args, measure, "teachers", Ts[-1], False, n)
            yield [n, f"{r['mib']:.0f}", f"{r['seconds']:.2f}"]

    columns = "T | peak extra MiB | logits of the teachers would take"
    table(f"memory: K={K}, shape {args.shape}, checkpointed", device, columns, by_length())
    title = f"memory: the teachers alone, T={Ts[-1]}, logits in slices of 16 MiB"
    table(title, device, "--score-tokens | peak extra MiB | seconds", by_budget())


MODES: dict[str, Callable[[Args, Shape, torch.device], None]] = {
    "score": score,
    "rollout": rollouts,
    "step": step,
    "memory": memory,
}


def main(argv: Sequence[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("what", choices=[*MODES, "all"])
    add("--cuda", action="store_true", help="on one CUDA GPU, at Qwen3-1.7B's shape")
    add("--shape", choices=SHAPES)
    add("--repeats", type=int, default=3, help="the best of so many counts")
    add("--one-process", action="store_true", help="quick, but then peaks say nothing")
    args = parser.parse_args(argv)
    args.device = distributed.init("cuda" if args.cuda else "cpu").device
    args.shape = args.shape or ("qwen3-1.7b" if args.cuda else "small")
    failed = []
    for name in MODES if args.what == "all" else [args.what]:
        try:
            MODES[name](args, SHAPES[args.shape], args.device)
        except Exception:
            failed.append(name)
            print(f"\n{name}: failed\n\n{traceback.format_exc()}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()  # the next mode may measure in processes of its own
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
