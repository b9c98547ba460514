"""One step of a method in the tests' world, and what its definition needs."""

import plain
import small_run
import torch

import rollout
from lib import model, verify
from methods import teachers


class Recorder(torch.optim.SGD):
    """An optimizer that keeps the gradients and leaves the weights as they are."""

    def step(self, closure=None):
        self.gradients = [p.grad.clone() for p in self.param_groups[0]["params"]]


class TwoOfThree(verify.Judge):
    """Of a problem's solutions the one that is judged first is wrong."""

    def __init__(self, timeout_s=5.0):
        super().__init__(timeout_s)
        self.judged = set()

    def answer(self, text):
        return text

    def is_right(self, problem, answer):
        is_first = problem.id not in self.judged
        self.judged.add(problem.id)
        return not is_first


def perturb(run):
    """Give the adapters weights as after some training: at first B = 0, and teachers are alike."""
    for name, p in model.trained(run.lm).items():
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        torch.nn.init.normal_(p, std=0.1, generator=generator)


def one_step(world_dir, out, method="ablations", **changes):
    """Run, rows and gradients of one step of a method; only with +skill the others have a bank.

    A row has its line of tokens.jsonl as "audit", and here as "tokens".
    Clip and threshold bite on random gaps. A copied teacher is the base.
    """
    name, _, skilled = method.partition("+")
    program, kind = small_run.METHODS[name]
    given = {"c_delta": 0.3, "eps_a": 0.17, "audit_every": 1, "grad_clip": 1e9}
    if name != "ablations":
        brought = kind.rules()["bank"].brings if skilled else {"bank": ""}
        given |= {"max_new_tokens": 12, **brought}
    with small_run.opened(world_dir, out, kind, **(given | changes)) as run:
        teachers.begin(run)
        perturb(run)
        run.optimizer = Recorder(model.trained(run.lm).values())
        rows_of_step, _ = program.train_step(run, 1)
    for row in rows_of_step:
        row["tokens"] = row.pop("audit")
    return run, rows_of_step, run.optimizer.gradients


def assert_gradients(got, run, total):
    want = torch.autograd.grad(total, list(model.trained(run.lm).values()))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, atol=3e-5, rtol=2e-3)


def logprobs_of(run, text, thinking, ids):
    """[T, V] log-probabilities at the loss's temperature, from the model's whole logits."""
    prompt = rollout.chat_ids(run.tokenizer, text, thinking=thinking)
    temperature = getattr(run.cfg, "score_temperature", run.cfg.temperature)
    return plain.logprobs(run.lm, prompt, ids, temperature)
