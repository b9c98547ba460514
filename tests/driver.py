"""sgsd.py or baselines.py with a verifier that rewards by the reference answer alone.

A random model never gets a problem right, so its rewards are drawn by the problem.

    python driver.py ...flags...      torchrun --nproc_per_node 2 driver.py ...flags...
"""

import conftest  # noqa: F401  (one thread, and the project on the path)

import baselines
import config
import distributed
import rollout
import sgsd


class CoinVerifier(rollout.Verifier):
    """An answer is right when the reference leaves 1 divided by 4."""

    def verify_many(self, pairs):
        return [int(gold) % 4 == 1 for gold, _ in pairs]


def main():
    cfg, resume = config.parse(
        None, "driver.py", "", baselines.BaselineConfig, baselines.DEFAULTS
    )
    run = sgsd.prepare(cfg, distributed.init(cfg.device), resume, cfg.sees_skills)
    run.verifier = CoinVerifier()
    step_fn = sgsd.train_step if cfg.method == "sgsd" else baselines.STEPS[cfg.method]
    return sgsd.train(run, step_fn)


if __name__ == "__main__":
    distributed.leave(distributed.command("driver", main))
