"""Two ideas on why published SGSD falls in long runs of the harder world, as changes of one part.

    python experiments/ideas.py centred --preset tiny ...      successes and failures weigh the same
    python experiments/ideas.py no_first --preset tiny ...     the first token is masked, too

What follows the name are the flags of sgsd.py. The idea has to be given again with --resume, and
centred then begins to count anew.

centred: a rollout's loss is multiplied by 2 (1 - p) if it succeeded and by 2 p if it failed, where
p is the share of successes of the last 20 steps, within .05 to .95. So both outcomes move the
student equally, whatever their number, as a centred reward does in GRPO.
no_first: a solution's first token, on which the teachers differ from the student most, counts as
layout: neither the support nor the loss sees it.
"""

import collections
import dataclasses
import functools
import pathlib
import statistics
import sys
from collections.abc import Collection, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from torch import Tensor

import cli
import config
import distributed
import sgsd
import verify
from sgsd import Example, RolloutLoss, Run

STEPS = 20  # of whose rollouts the share of successes is taken
published_mask = sgsd.token_mask
outcomes: collections.deque[float] = collections.deque()


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


def without_first(ids_T: Sequence[int] | Tensor, masked_ids: Collection[int]) -> Tensor:
    """`sgsd.token_mask` that leaves the first token out."""
    mask_T = published_mask(ids_T, masked_ids)
    mask_T[:1] = 0
    return mask_T


def main(argv: list[str]) -> int:
    def body() -> int:
        idea, *flags = argv or [""]
        if idea not in ("centred", "no_first"):
            raise cli.UserError("the first word must be centred or no_first")
        cfg, resume = config.parse(flags, "ideas.py", __doc__)
        if idea == "no_first":
            sgsd.token_mask = without_first
            return sgsd.launch(cfg, resume)
        step_fn = functools.partial(sgsd.train_step, loss_of=centred)
        return sgsd.launch(cfg, resume, step_fn)

    return cli.command("ideas", body)


if __name__ == "__main__":
    distributed.leave(main(sys.argv[1:]))
