"""sgsd.py with a verifier that rewards by the reference answer alone: a random model never gets a problem right.

python driver.py ...flags of sgsd.py...      torchrun --nproc_per_node 2 driver.py ...
"""

import conftest  # noqa: F401  (one thread, the project on the path)

import distributed as D
import rollout
import sgsd


class CoinVerifier(rollout.Verifier):
    def verify_many(self, pairs):
        return [int(gold) % 4 == 1 for gold, _ in pairs]


if __name__ == "__main__":
    rollout.Verifier = CoinVerifier
    D.leave(sgsd.main())
