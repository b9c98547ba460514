"""What the tests on TRL share: the random model with given rollouts, and processes.

of_trl, gradient = one_step(folder, lora)        a step on six given rollouts, by TRL
of_trl = trainer(settings(folder), lm, rows)     a trainer; rollouts_of(of_trl.run, rows)
main(small_flags(world_dir, out))                a whole command, if `main` is the program's
torchrun("test_edges:sharded_infinite", folder)  a test file's function in two processes;
                                                 if "sharded", FSDP2 shards all parameters
"""

import copy
import importlib
import os
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import conftest
import fsdp_on_gloo
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

if __name__ == "__main__" and ":sharded" in sys.argv[1]:
    fsdp_on_gloo.install()  # before accelerate makes its state

import small_run

import distributed
import rollout
import sgsd
from extras import on_trl
from lib import config
from lib.problems import Problem

END = 265  # the stop id of the tests' model
PLAIN = ("--gradient_checkpointing", "False")


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
    """Keeps the gradient of each step, after accumulation and the sum over processes, and what it
    is the gradient of: the weights before the step."""

    def __init__(self):
        self.steps, self.weights = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        gradients, weights = {}, {}
        for name, p in model.named_parameters():
            if p.grad is not None:
                name = name.removeprefix("module.")
                gradients[name], weights[name] = whole(p.grad), whole(p)
        self.steps.append(gradients)
        self.weights.append(weights)


def whole(x):
    """A copy of a tensor, of all its shards."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def distance(one, other):
    """||one - other|| / ||other|| over all parameters, whose names must agree."""
    assert one.keys() == other.keys()
    difference = sum(float((one[name] - other[name]).square().sum()) for name in one)
    return (difference / sum(float(x.square().sum()) for x in other.values())) ** 0.5


# ------------------------------------------------------------------------------ the random model


def settings(out, **changes):
    """Of a run on the random model."""
    given = {"out": str(out), "steps": 1, "batch_size": 6, "backward_rows": 3, "device": "cpu"}
    given |= {"num_teachers": 4, "grad_clip": 1e9, "evolve_every": 0, "max_new_tokens": 20}
    return on_trl.TRLConfig(**(given | {"score_rows": 5, "audit_every": 0} | changes))


def policy(lora, dtype=torch.float32, context=4096):
    """The random model, with adapters that already change something or without any."""
    lm = conftest.make_model(max_position_embeddings=context).to(dtype)
    if lora:
        torch.manual_seed(3)
        shape = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        lm = get_peft_model(lm, shape)
    return lm


def given_rollouts(rows):
    """TRL's seam for rollouts of one's own: problem i gets rows[i], wherever it is asked."""
    row_of = {x.problem: row for x, row in zip(PROBLEMS, rows)}

    def rollouts(prompts, trainer):
        ids = [sgsd.student_prompt(trainer.run, problem) for problem in prompts]
        completions = [row_of[problem] for problem in prompts]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}

    return rollouts


def trainer(cfg, lm, rows=None, callbacks=None, words=PLAIN):
    """A trainer on the tests' problems, as many as rows, with given rollouts or its own."""
    world = distributed.init(cfg.device)
    with small_run.signals_restored():
        run = on_trl.RunOnTRL(
            cfg=cfg,
            world=world,
            manifest={},
            problems=PROBLEMS[: len(rows)] if rows else PROBLEMS,
            verifier=small_run.CoinVerifier(),
            lm=lm,
            tokenizer=conftest.make_tokenizer(),
            bank=conftest.make_bank(),
            embed=conftest.fake_embed,
            track=lambda row: None,
        )
    given = given_rollouts(rows) if rows else None
    args = on_trl.settings_of(cfg, words, world)
    run.trainer = on_trl.SGSDTrainer(run, args, lm, rollout_func=given, callbacks=callbacks)
    return run.trainer


def rollouts_of(run, rows):
    """The given rollouts, judged."""
    jobs = []
    for i, (x, ids) in enumerate(zip(PROBLEMS, rows)):
        jobs.append(rollout.Job(i, sgsd.student_prompt(run, x.problem), 0, 0, x, ids))
    (judged,) = rollout.rollouts(run.tokenizer, run.stops, run.verifier, [jobs])
    return [roll for _, roll in judged]


def step_of_sgsd(lm, run, rolls):
    """The gradient of sgsd.py's loss on these rollouts, and what came of each."""
    own, results = copy.copy(run), []
    own.lm = lm
    for roll in rolls:
        pairs_K = run.bank.retrieve(roll.problem, run.cfg.num_teachers, run.embed)
        results.append(sgsd.rollout_loss(own, roll, pairs_K))
        if results[-1].loss.requires_grad:
            (results[-1].loss / len(rolls)).backward()
    return {n: p.grad for n, p in lm.named_parameters() if p.grad is not None}, results


def one_step(folder, lora=True, ids=None, words=PLAIN, context=4096, **changes):
    """The gradient of a step on six given rollouts; rank 0 saves it."""
    gradients, ids = Gradients(), ids or completions(6)
    lm = policy(lora, context=context)
    of_trl = trainer(settings(folder, **changes), lm, ids, [gradients], words)
    of_trl.train()
    if of_trl.accelerator.is_main_process:
        torch.save(gradients.steps[0], pathlib.Path(folder, "gradient.pt"))
    return of_trl, gradients.steps[0]


def run(command):
    """A process with the tests' environment; what it printed is kept."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    options = {"capture_output": True, "text": True, "cwd": conftest.ROOT}
    return subprocess.run(command, env=environment, **options)


def torchrun(function, folder):
    """Call MODULE:FUNCTION with the folder in two processes, which must succeed; their output."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = run([*command, __file__, function, str(folder)])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


# ----------------------------------------------------------------------------- command lines


def small_flags(world_dir, out, **changes):
    """A command line on the random model of `conftest.world_dir`."""
    given = {"steps": 2, "checkpoint_every": 1, "num_teachers": 2, "evolve_every": 2}
    given |= {"max_new_tokens": 8, "eps_a": 0.0, "success_gate": 1.1, "audit_every": 1}
    given = small_run.settings(world_dir, out, **(given | {"score_rows": 16} | changes))
    del given["cold_start_tokens"]
    return [*words_of(given), "--", *PLAIN]


def small_grpo_flags(world_dir, out, **changes):
    """The same for GRPO, in whose groups both outcomes are."""
    given = {"short": True, "out": out, "device": "cpu", "lora_rank": 4, "learning_rate": 1e-2}
    given |= {"model": world_dir / "model", "data": world_dir / "data.jsonl"}
    given |= {"verifier": "small_run:UnevenVerifier", "batch_size": 2, "generations": 2}
    given |= {"max_new_tokens": 8, "checkpoint_every": 1, "audit_every": 1}
    return [*words_of(given | changes), "--", *PLAIN]


def words_of(given):
    words = []
    for name, value in given.items():
        if value is not False:
            words += [config.flag(name)] if value is True else [config.flag(name), str(value)]
    return words


if __name__ == "__main__":
    torch.set_num_threads(1)
    module, _, function = sys.argv[1].partition(":")
    getattr(importlib.import_module(module), function)(sys.argv[2])
    sys.stdout.flush()
    os._exit(0)  # gloo may abort as a process ends
