"""Two ideas on why SGSD falls in long runs of the harder world; each changes one part.

    python research/polarity/ideas.py centred --preset tiny ...    both outcomes weigh the same
    python research/polarity/ideas.py no_first --preset tiny ...   the first token is masked, too

Flags of sgsd.py follow the name. Give the name again with --resume; centred then starts to count
anew.

centred: a rollout's loss is multiplied by 2 (1 - p) if it succeeded and by 2 p if it failed, where
p is the share of successes in the last 20 steps, within .05 to .95. So both outcomes move the
student equally, whatever their number, as a centred reward does in GRPO.
no_first: a solution's first token, on which the teachers differ most from the student, counts as
layout: neither the support nor the loss sees it.
"""

import collections
import dataclasses
import functools
import pathlib
import statistics
import sys
from collections.abc import Collection, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from torch import Tensor

import distributed
import sgsd
from lib import config
from sgsd import Example, RolloutLoss, Run

STEPS = 20  # of whose rollouts the share of successes is taken
published_mask = sgsd.token_mask
outcomes: collections.deque[float] = collections.deque()


def centred(run: Run, example: Example) -> RolloutLoss:
    """`sgsd.rollout_loss` with equal weight for both outcomes."""
    success = float(example.rollout.r > 0)
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


def main(argv: Sequence[str] | None = None) -> int:
    idea, *flags = (sys.argv[1:] if argv is None else argv) or [""]
    if idea not in ("centred", "no_first", "--help"):
        print("ideas.py: the first word must be centred or no_first", file=sys.stderr)
        return 2
    cfg, resume = config.parse(flags if idea != "--help" else [idea], __doc__, program="ideas.py")
    if idea == "no_first":
        sgsd.token_mask = without_first
        return sgsd.launch(cfg, resume)
    step_fn = functools.partial(sgsd.train_step, loss_of=centred)
    return sgsd.launch(cfg, resume, step_fn)


if __name__ == "__main__":
    distributed.leave(main)
