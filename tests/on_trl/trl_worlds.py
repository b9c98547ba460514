"""Worlds for the tests of extras/on_trl.py: a random model with given rollouts, and the tiny one.

python trl_worlds.py FUNCTION FOLDER        (or by torchrun) runs a function of this file
"""

import json
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import conftest
import fsdp_on_gloo
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, training_args

if __name__ == "__main__" and sys.argv[1].startswith("sharded"):
    fsdp_on_gloo.install()  # before accelerate makes its state

import driver

import rollout
import sgsd
import skills
from extras import on_trl
from lib import config, runlog
from lib.problems import Problem

END = 265  # the stop id of the tests' model


PROBLEMS = []  # of different lengths, so that TRL pads their prompts
for i, x in enumerate(conftest.PROBLEMS):
    PROBLEMS.append(Problem(x["id"], x["problem"] + "?" * i, x["answer"]))


def completions(count, step=3):
    """Uneven lengths, `step` apart; the second is but its stop id, the third is cut."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for i in range(count):
        ids = torch.randint(0, 200, (5 + step * i,), generator=generator).tolist()
        rows.append(ids if i == 2 else [*ids, END])
    rows[1] = [END]
    return rows


class Gradients(TrainerCallback):
    """Keeps the gradient of each step, after accumulation and the sum over processes."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        kept = {}
        for name, p in model.named_parameters():
            if p.grad is not None:
                grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                kept[name.removeprefix("module.")] = grad.detach().clone()
        self.steps.append(kept)


def settings(out, **changes):
    """Of a run on the random model."""
    given = {"output_dir": str(out), "steps": 1, "batch_size": 6, "per_device_train_batch_size": 3}
    given |= {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}
    given |= {"num_teachers": 4, "grad_clip": 1e9, "evolve_every": 0, "max_new_tokens": 20}
    given |= {"disable_tqdm": True, "gradient_checkpointing": False, "score_rows": 5}
    return on_trl.SGSDConfig(**(given | changes))


def policy(lora, dtype=torch.float32):
    """The random model, with adapters that already change something or without any."""
    lm = conftest.make_model().to(dtype)
    if lora:
        torch.manual_seed(3)
        shape = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        lm = get_peft_model(lm, shape)
    return lm


def student_ids(tokenizer, problem):
    return rollout.chat_ids(tokenizer, skills.render_student(problem), thinking="closed")


def given_rollouts(rows):
    """TRL's seam for rollouts of one's own: problem i gets rows[i], wherever it is asked."""
    tokenizer = conftest.make_tokenizer()
    row_of = {x.problem: row for x, row in zip(PROBLEMS, rows)}

    def rollouts(prompts, trainer):
        given = {"prompt_ids": [], "completion_ids": [], "logprobs": None}
        for prompt in prompts:
            problem = prompt[0]["content"]
            given["prompt_ids"].append(student_ids(tokenizer, problem))
            given["completion_ids"].append(row_of[problem])
        return given

    return rollouts


def trainer(args, lm, rows=None, callbacks=None):
    """A trainer on the tests' problems, as many as rows, with given rollouts or its own."""
    problems = PROBLEMS[: len(rows)] if rows else PROBLEMS
    return on_trl.SGSDTrainer(
        lm,
        args,
        problems,
        conftest.make_bank(),
        conftest.fake_embed,
        driver.CoinVerifier(),
        processing_class=conftest.make_tokenizer(),
        rollout_func=given_rollouts(rows) if rows else None,
        callbacks=callbacks,
    )


def rollouts_of(run, rows):
    """The given rollouts, judged."""
    tokenizer = conftest.make_tokenizer()
    jobs = []
    for i, (x, ids) in enumerate(zip(PROBLEMS, rows)):
        prompt = student_ids(tokenizer, x.problem)
        jobs.append(rollout.Job(i, prompt, 0, 0, x, ids))
    (judged,) = rollout.rollouts(tokenizer, run.stops, driver.CoinVerifier(), [jobs])
    return [roll for _, roll in judged]


def step_of_sgsd(lm, run, rolls, num_teachers):
    """The gradient of sgsd.py's loss on these rollouts, and what came of each."""
    cfg = config.Config(num_teachers=num_teachers)
    bank, tokenizer = conftest.make_bank(), conftest.make_tokenizer()
    space = SimpleNamespace(cfg=cfg, lm=lm, tokenizer=tokenizer, masked_ids=run.masked_ids)
    space.device, space.clock = torch.device("cpu"), runlog.Stopwatch()
    results = []
    for roll in rolls:
        pairs_K = bank.retrieve(roll.problem, num_teachers, conftest.fake_embed)
        results.append(sgsd.rollout_loss(space, roll, pairs_K))
        if results[-1].loss.requires_grad:
            (results[-1].loss / len(rolls)).backward()
    gradient = {n: p.grad for n, p in lm.named_parameters() if p.grad is not None}
    return gradient, results


def both_loops(folder):
    """The gradients of a step of sgsd.py and of one on TRL, on the same rollouts."""
    rows = completions(6, step=9)  # of up to 51 tokens
    run, on_trl = one_step(folder, rows=rows)
    of_sgsd, _ = step_of_sgsd(policy(lora=True), run, rollouts_of(run, rows), 4)
    torch.save({"sgsd.py": of_sgsd, "TRL": on_trl}, pathlib.Path(folder, "gradients.pt"))


def one_step(folder, lora=True, rows=None, **changes):
    """The gradient of a step on six given rollouts; rank 0 saves it."""
    gradients, rows = Gradients(), rows or completions(6)
    run = trainer(settings(folder, **changes), policy(lora), rows, callbacks=[gradients])
    run.train()
    if run.accelerator.is_main_process:
        torch.save(gradients.steps[0], pathlib.Path(folder, "gradient.pt"))
    return run, gradients.steps[0]


def sharded_step(folder):
    """`one_step` of all weights, in shards."""
    run, _ = one_step(folder, lora=False, use_cpu=False, gradient_checkpointing=True)
    assert all(isinstance(p, DTensor) for p in run.model.parameters())


def sharded_bf16(folder):
    """A step of all weights in shards, multiplied in bf16; rank 0 saves what it scored, too."""
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    training_args.is_torch_bf16_gpu_available = lambda: True  # asked unless use_cpu is set
    scored = []

    class Recorded(on_trl.SGSDTrainer):
        def score(self, contexts, completions):
            scored.extend(super().score(contexts, completions))
            return scored

    on_trl.SGSDTrainer = Recorded
    run, _ = one_step(folder, lora=False, use_cpu=False, bf16=True)
    if run.accelerator.is_main_process:
        torch.save(torch.cat(scored), pathlib.Path(folder, "scored.pt"))


def sharded_run(folder):
    """Two steps of the tiny world, all weights, FSDP2, an evolution, a save; what a rank has."""
    changes = {"steps": 2, "evolve_every": 2, "batch_size": 4, "gradient_checkpointing": True}
    argv = ["--full", *tiny_flags(folder, **changes)]
    argv = [word for word in argv if word != "--use_cpu"]
    (args,) = on_trl.TrlParser(on_trl.SGSDConfig).parse_args_and_config(argv)
    run = on_trl.prepare(args)
    run.train()
    run.save_model(folder)
    has = {"lengths": [len(roll.completion_ids) for roll in run.rollouts]}
    has["bank"] = on_trl.files.digest(run.bank.general_skills)
    rank = run.accelerator.process_index
    pathlib.Path(folder, f"rank{rank}.json").write_text(json.dumps(has))
    run.judge.close()


def torchrun(function, folder):
    """Run a function of this file in two processes, which must succeed; what they print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    folder.mkdir()
    done = subprocess.run(
        [*command, __file__, function, str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=conftest.ROOT,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def tiny_flags(out, **changes):
    """A command line on the tiny world, as `--preset tiny` of sgsd.py has it."""
    root, tiny = conftest.ROOT, conftest.ROOT / "tiny"
    given = {"model": tiny / "model", "encoder": tiny / "encoder", "data": tiny / "train.jsonl"}
    given |= {"bank": root / "banks/word_problems.json", "output_dir": out, "steps": 30}
    given |= {"batch_size": 16, "per_device_train_batch_size": 2, "num_teachers": 4}
    given |= {"eps_a": 0.005, "learning_rate": 1e-3, "lora_rank": 16, "lora_alpha": 32}
    given |= {"max_new_tokens": 96, "evolve_every": 10, "reply_tokens": 640}
    given |= {"merge_group_size": 8, "bf16": False, "gradient_checkpointing": False}
    given |= {"report_to": "none", "disable_tqdm": True, "score_rows": 16}
    words = ["--use_cpu"]
    for name, value in (given | changes).items():
        words += [f"--{name}", str(value)]
    return words


def small_flags(world_dir, out, **changes):
    """A command line on the random model of `conftest.world_dir`."""
    given = {"model": world_dir / "model", "encoder": world_dir / "encoder"}
    given |= {"data": world_dir / "data.jsonl", "bank": world_dir / "bank.json"}
    given |= {"verifier": "driver:CoinVerifier", "output_dir": out, "steps": 2, "save_steps": 1}
    given |= {"batch_size": 4, "per_device_train_batch_size": 4, "num_teachers": 2}
    given |= {"max_new_tokens": 8, "evolve_every": 2, "lora_rank": 4, "lora_alpha": 8}
    given |= {"learning_rate": 1e-2, "eps_a": 0.0, "success_gate": 1.1, "score_rows": 16}
    given |= {"bf16": False, "gradient_checkpointing": False, "report_to": "none"}
    words = ["--use_cpu", "--disable_tqdm", "True"]
    for name, value in (given | changes).items():
        words += [f"--{name}", str(value)]
    return words


def sharded_infinite(folder):
    """A step of all weights in shards, in which one process has an infinite gradient."""

    class Overflowing(on_trl.SGSDTrainer):
        def _clip_grad_norm(self, model):
            p = next(p for p in model.parameters() if p.grad.to_local().numel())
            if self.accelerator.process_index == 1:
                p.grad.to_local().fill_(float("inf"))
            return super()._clip_grad_norm(model)

    on_trl.SGSDTrainer = Overflowing
    args = settings(folder, use_cpu=False, gradient_checkpointing=True)
    run = trainer(args, policy(lora=False), completions(6))
    run.train()
    has_moved = []
    for (name, p), start in zip(run.model.named_parameters(), policy(lora=False).parameters()):
        if not torch.equal(p.full_tensor(), start):
            has_moved.append(name)
    says = {"skipped": run.skipped, "moved": has_moved}
    pathlib.Path(folder, f"rank{run.accelerator.process_index}.json").write_text(json.dumps(says))


def sharded_by_version_1(folder):
    """What is said of FSDP version 1, under which no parameter is a DTensor."""
    sharded_with(folder, FSDP_VERSION="1")


def sharded_in_parts(folder):
    """What is said of checkpoints in which each process has a part of the weights."""
    sharded_with(folder, FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT")


def sharded_with(folder, **environment):
    """Print what is refused."""
    os.environ.update(environment)
    try:
        trainer(settings(folder, use_cpu=False), policy(lora=False), completions(6))
    except ValueError as e:
        print(f"refused: {e}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](sys.argv[2])
    sys.stdout.flush()
    os._exit(0)  # gloo may abort as a process ends
