"""Does vLLM in the trainer's process have the weights that learn? On a CPU.

    python research/trl/vllm_weights.py              a table: five runs of the tiny world
    python research/trl/vllm_weights.py --steps 30   longer ones

The engine's log-probabilities of the sampled tokens less ours, which are `score`'s, in fp32.
Sampling is at temperature 1 without top-p and top-k: otherwise the engine returns log-probabilities
of what the filters leave. One run's engine never gets a step's weights.

TRL merges adapters into their base, hands the sum to the engine, and subtracts them again: does the
base stay? The last two columns compare the policy that has learnt with its adapters on the base as
it was, which is what a checkpoint gives. extras/on_trl.py refuses the run that shows a difference.
Each run has a process of its own.
"""

import argparse
import functools
import pathlib
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
import vllm_run
from trl.generation import vllm_generation

import sgsd
from extras import on_trl
from lib import config
from research.markdown_table import head_of, row_of
from skills import load_bank

ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclass
class Case:
    full: bool = False
    engine: str = "float32"  # its dtype; TRL has no setting for it, and vLLM takes bfloat16
    base_in_bf16: bool = False
    is_synchronised: bool = True


RUNS = {
    "adapters": Case(),
    "adapters, engine in bf16": Case(engine="bfloat16"),
    "all weights": Case(full=True),
    "not synchronised": Case(is_synchronised=False),
    "adapters, engine and base in bf16": Case(engine="bfloat16", base_in_bf16=True),
}


class ComparedTrainer(on_trl.SGSDTrainer):
    """Keeps |log p of the engine - log p of ours| of each batch's tokens."""

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        distances = []
        for b, logp_T in enumerate(self.score_rollouts()):
            logp_of_engine_T = output["sampling_per_token_logps"][b, : len(logp_T)]
            distances.append((logp_of_engine_T - logp_T).abs())
        self.distances = [*getattr(self, "distances", []), torch.cat(distances)]
        return output

    def score_rollouts(self) -> list[torch.Tensor]:
        """Our log-probabilities of the latest batch, [T] for each rollout."""
        contexts = [row["prompt_ids"] for row in self.rows]
        return self.score(contexts, [row["completion_ids"] for row in self.rows])


def distances_of(name: str, steps: int, folder: str) -> list[torch.Tensor]:
    """A run. Distances of log-probabilities, in nats, by token: the engine's from ours at each
    step; then, of the last batch, those of the base as it was from those of the base as it is."""
    case = RUNS[name]
    given = config.PRESETS["tiny"] | {"bank": str(ROOT / "banks/word_problems.json")}
    given |= {"steps": steps, "evolve_every": 0, "full": case.full, "out": folder}
    given |= {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "backward_rows": 16}
    words = ["--gradient_checkpointing", "False", "--use_vllm", "--vllm_mode", "colocate"]
    words += ["--vllm_max_model_length", "2048"]
    vllm_run.keep_unpacked()
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype=case.engine)
    on_trl.SGSDTrainer = ComparedTrainer
    cfg, load = on_trl.TRLConfig(**given), functools.partial(on_trl.load, words)
    with on_trl.RunOnTRL.open(cfg, load_bank, sgsd.shown, load) as run:
        trainer = run.trainer
        if not case.is_synchronised:
            trainer.vllm_generation.sync_weights = lambda: None
        frozen = [p for p in trainer.model.parameters() if not p.requires_grad]
        if case.base_in_bf16:
            for p in frozen:
                p.data = p.data.bfloat16()
        before = [p.data.clone() for p in frozen]
        on_trl.train(run)
        logps = torch.cat(trainer.score_rollouts())
        for p, weight in zip(frozen, before):
            p.data.copy_(weight)
        return [*trainer.distances, (torch.cat(trainer.score_rollouts()) - logps).abs()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10, help="of each run")
    parser.add_argument("--run", choices=RUNS, help="this run alone, in this process")
    args = parser.parse_args()
    if args.run:
        with tempfile.TemporaryDirectory() as folder:
            distances = distances_of(args.run, args.steps, folder)
        cells = [args.run]
        for x in (distances[0], distances[-2], distances[-1]):
            cells += [f"{x.mean():.1e}", f"{x.max():.1e}"]
        print(row_of(cells))
        return
    columns = ("run", "first step: mean, nats", "largest", "last step: mean, nats", "largest")
    columns += ("saved less trained: mean, nats", "largest")
    print(*head_of(columns), sep="\n")
    for name in RUNS:
        command = [sys.executable, __file__, "--run", name, "--steps", str(args.steps)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr[-3000:])
        print(*[line for line in done.stdout.splitlines() if line.startswith(f"| {name} |")])


if __name__ == "__main__":
    main()
