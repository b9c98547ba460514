"""Two ideas on why published SGSD falls in long runs, each a loss of its own in the same loop.

    python experiments/ideas.py attract --preset tiny ...      teachers only attract
    python experiments/ideas.py centred --preset tiny ...      successes and failures weigh the same

What follows the name are the flags of sgsd.py. The idea has to be given again with --resume.

attract: polarity -1 becomes 0. A reversed teacher repels the student from all that it prefers, and
nothing bounds how far; without it a loss is only ever made smaller.
centred: a rollout's loss is multiplied by 2 (1 - p) if it succeeded and by 2 p if it failed, where
p is the share of successes of the last 20 steps, within .05 to .95. So both outcomes move the
student equally, whatever their number, as a centred reward does in GRPO.
"""

import collections
import dataclasses
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import cli
import config
import distributed
import sgsd
import verify
from sgsd import Example, RolloutLoss, Run

STEPS = 20  # of whose rollouts the share of successes is taken
outcomes: collections.deque[float] = collections.deque()


def attract(run: Run, example: Example) -> RolloutLoss:
    """`sgsd.rollout_loss` without repulsion."""
    published, cfg = sgsd.rollout_loss(run, example), run.cfg
    delta_KT, mask_T, alpha_K = published.delta_KT, published.mask_T, published.alpha_K
    rho_K = published.rho_K.clamp(min=0)
    loss = sgsd.sgsd_loss(delta_KT, mask_T, alpha_K, rho_K, cfg.tau_g)
    credit_KT = sgsd.token_credit(delta_KT, mask_T, alpha_K, rho_K, cfg.tau_g)
    return dataclasses.replace(published, loss=loss, rho_K=rho_K, credit_KT=credit_KT)


def centred(run: Run, example: Example) -> RolloutLoss:
    """`sgsd.rollout_loss` with equal weight for both outcomes."""
    success = float(verify.is_success(example.rollout.r))
    share = statistics.mean(outcomes) if outcomes else 0.5
    share = min(0.95, max(0.05, share))
    outcomes.append(success)
    while len(outcomes) > STEPS * run.cfg.batch_size:
        outcomes.popleft()
    weight = 2 * (1 - share) if success else 2 * share
    published = sgsd.rollout_loss(run, example)
    credit_KT = published.credit_KT
    if credit_KT is not None:
        credit_KT = weight * credit_KT
    return dataclasses.replace(published, loss=weight * published.loss, credit_KT=credit_KT)


IDEAS = {"attract": attract, "centred": centred}


def main(argv: list[str]) -> int:
    def body() -> int:
        if not argv or argv[0] not in IDEAS:
            raise cli.UserError(f"the first word must be one of {', '.join(IDEAS)}")
        cfg, resume = config.parse(argv[1:], "ideas.py", __doc__)

        def step_fn(run: Run, step: int) -> sgsd.StepResult:
            return sgsd.train_step(run, step, loss_of=IDEAS[argv[0]])

        return sgsd.launch(cfg, resume, step_fn)

    return cli.command("ideas", body)


if __name__ == "__main__":
    distributed.leave(main(sys.argv[1:]))
