"""Runs for the tests: a random model, with a verifier and a writer that do not need a good one.

A random model never gets a problem right and never writes JSON, so the reference answer alone
decides the outcome, and the writer is a function.

    python driver.py ...flags...      torchrun --nproc_per_node 2 driver.py ...flags...
"""

import json
import math
import os
import subprocess
import sys

import conftest  # noqa: F401  (one thread, and the project on the path)
import peft
import torch
from conftest import ROOT

import baselines
import cli
import config
import distributed
import eval
import policy
import rollout
import sgsd
import skills

ALONE = distributed.World(0, 1, torch.device("cpu"))


class CoinVerifier(rollout.Verifier):
    """An answer is right when the reference leaves 1 divided by 4."""

    def verify_many(self, pairs):
        return [int(gold) % 4 == 1 for gold, _ in pairs]


class FakeWriter(skills.Writer):
    """Extracts one item from each memory, named after its problem; a merge drops the last item."""

    def replies(self, questions, times, stage):
        return [(self.reply(question.prompt), False) for question in questions]

    def reply(self, prompt):
        key = "general_skills" if "key general_skills" in prompt else "common_mistakes"
        if "to merge:" in prompt:
            listed = prompt.partition("to merge:\n")[2].partition("\n\nReturn ONLY")[0]
            items = json.loads(listed)
            return json.dumps({key: items[: max(1, len(items) - 1)]})
        name = prompt[prompt.index("What is") :][:20].strip()
        return json.dumps({key: [{field: f"{field} of {name}" for field in skills.FIELDS[key]}]})


def settings(world_dir, out, **changes):
    base = {name: str(world_dir / name) for name in ("model", "encoder")}
    base |= {"data": str(world_dir / "data.jsonl"), "bank": str(world_dir / "bank.json")}
    base |= {"out": str(out), "device": "cpu", "updates": 4, "batch_size": 4, "num_teachers": 3}
    base |= {"max_new_tokens": 20, "checkpoint_every": 2, "audit_every": 2, "lora_rank": 4}
    base |= {"lora_alpha": 8, "learning_rate": 1e-2, "eps_a": 0.2, "cold_start_tokens": 20}
    return base | changes


def flags(world_dir, out, **changes):
    """The same settings as a command line."""
    given = settings(world_dir, out, **changes)
    return [f"{config.flag(name)}={value}" for name, value in given.items()]


def make_run(world_dir, out, resume=False, kind=config.Config, **changes):
    cfg = kind(**settings(world_dir, out, **changes))
    retriever = baselines.retriever_of(cfg) if kind is baselines.BaselineConfig else None
    return with_fakes(sgsd.prepare(cfg, ALONE, resume, retriever))


def with_fakes(run):
    run.verifier = CoinVerifier()
    if run.writer is not None:
        run.writer = FakeWriter(**vars(run.writer))
    return run


def train(world_dir, out, resume=False, step_fn=sgsd.train_step, **changes):
    run = make_run(world_dir, out, resume, **changes)
    sgsd.train(run, step_fn)
    return run


def stopping_at(last):
    """A step function that asks the run to stop after step `last`, as a signal does."""

    def step_fn(run, step):
        run.stop = step == last
        return sgsd.train_step(run, step)

    return step_fn


def breaking(updates, what="gradient", rank=0):
    """A step function in which something is not finite, on one rank, in these steps."""

    def step_fn(run, step):
        bad = math.nan if step in updates and run.world.rank == rank else 1.0

        def forward(module, args, x):
            if torch.is_inference_mode_enabled():  # the sampling of the rollouts
                return x
            scored = "student" if torch.is_grad_enabled() else "teacher"
            return x * bad if scored == what else x

        def backward(gradient):
            return gradient * bad if what == "gradient" else gradient

        p = next(iter(policy.trained(run.model).values()))
        norm = policy.causal_lm(run.model).base_model.norm
        hooks = [norm.register_forward_hook(forward), p.register_hook(backward)]
        update = sgsd.train_step(run, step)
        for hook in hooks:
            hook.remove()
        return update

    return step_fn


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def timeless(metrics):
    """Lines of metrics.jsonl without the numbers that differ from run to run."""
    kept = []
    for row in metrics:
        kept.append({k: v for k, v in row.items() if not k.startswith(("seconds.", "memory_gb"))})
    return kept


def refused(capsys, program, argv, *words):
    """The program ends with 2 and one line that has these words in it."""
    capsys.readouterr()
    assert program([str(arg) for arg in argv]) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said and "Traceback" not in said, said
    for word in words:
        assert word in said, said


def two_processes(*command):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    done = subprocess.run([*torchrun, *command], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def evaluation(world_dir, out, more=""):
    """The command line of an evaluation of the tests' model."""
    flags = f"--data {world_dir}/data.jsonl --samples 3 --max-new-tokens 8 --rows 5 --device cpu"
    return f"{world_dir}/model {flags} --out {out} {more}".split()


def evaluate(world_dir, out, more=""):
    """The samples in order of an evaluation that succeeds."""
    assert eval.main(evaluation(world_dir, out, more)) == 0
    return samples(out)


def samples(out):
    """The samples in order of the one policy in a folder given as --out."""
    (log,) = out.glob("*/samples.jsonl")
    rows = [json.loads(line) for line in open(log)]
    return sorted(rows, key=lambda row: (row["set"], row["id"], row["sample"]))


def make_adapter(path, base, seed=0, rank=4):
    """An adapter with weights of its own, saved as PEFT saves it."""
    model, _ = policy.load_model(str(base), torch.device("cpu"))
    torch.manual_seed(seed)
    lora = peft.LoraConfig(r=rank, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(model, lora).save_pretrained(path)


COMMANDS = """
import json, runpy, sys
for program, *given in json.load(sys.stdin):
    sys.argv = [program, *given]
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        print("code", end.code, file=sys.stderr)
"""


def refused_without_torch(commands, folder):
    """The line with which each command ends, where torch cannot be imported; all end with 2."""
    fakes = folder / "fakes"
    fakes.mkdir(exist_ok=True)
    (fakes / "torch.py").write_text("raise RuntimeError('torch is imported')")
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS],
        input=json.dumps(commands),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{fakes}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    lines = done.stderr.splitlines()
    assert lines[1::2] == ["code 2"] * len(commands), done.stderr
    return lines[::2]


def main(argv=None, step_fn=None):
    """A command; returns its exit code."""

    def body():
        kind = baselines.BaselineConfig
        cfg, resume = config.parse(argv, "driver.py", "", kind, baselines.DEFAULTS)
        world = distributed.init(cfg.device)
        run = with_fakes(sgsd.prepare(cfg, world, resume))
        own = sgsd.train_step if cfg.method == "sgsd" else baselines.method_step
        return sgsd.train(run, step_fn or own)

    return cli.command("driver", body)


if __name__ == "__main__":
    distributed.leave(main())
