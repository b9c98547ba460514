"""What lowers the noise of a slope at the same number of rollouts?

    python research/slope/noise.py FILE.npz --collect    rollouts of the base and their gradients
    python research/slope/noise.py FILE.npz              the tables

In the harder world we draw 160 training problems x 8 rollouts of the base model and keep three
gradients of each: of its log-probability as it was drawn (for the covariance), of GRPO's loss at an
advantage of 1, and of SGSD's loss with the model's own bank. All estimates are then made offline,
from random parts of this pool. The mean of an estimate over its spread says what needs fewer
rollouts. It is not the probe's z, whose error holds the directions fixed.

Asked: directions from one half or from all other folds; more problems or more rollouts of each; and
a baseline for each token, the success of those other rollouts that begin alike.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import pathlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from research.markdown_table import head_of, row_of
from research.methods.compare import WORLDS, arguments, places

PROBLEMS, SAMPLES, BANK, SEED = 160, 8, "own-8", 70
W = WORLDS["lock"]
FOLDS = 2, 4, 8
SIZES = (10, 4), (20, 4), (40, 4), (40, 2), (10, 8), (20, 8)
CLIP = 0.1  # --grad-clip's default


def collect(path: str) -> None:
    """The pool, saved: right [N, G]; ascent, grpo and sgsd [N, G, P]; ids and slopes of tokens."""
    import torch

    import distributed
    import scoring
    import sgsd
    from extras import baselines, probe
    from lib import files

    def gradient(loss: torch.Tensor) -> np.ndarray:
        if loss.requires_grad:
            loss.backward()
        return probe.take_gradient(run).numpy()

    def logq_of(roll: Any) -> torch.Tensor:
        x_n, ids_n = scoring.predictors(run.lm, [roll.prompt_ids], [roll.completion_ids])
        drawn = functools.partial(probe.drawn_logprob, grpo.sampling)
        return scoring.over_slices(run.lm, [x_n], ids_n, drawn, grpo.sampling.temperature)

    with contextlib.ExitStack() as held:
        work = pathlib.Path(held.enter_context(tempfile.TemporaryDirectory()))
        for row in files.read_jsonl(pathlib.Path(__file__).with_name("lock.jsonl")):
            if row["kind"] == "bank" and row["bank"] == BANK:
                (work / "bank.json").write_text(json.dumps(row["content"]))
        flags = f"{W.flags} --batch-size {W.batch} --max-new-tokens {W.tokens} --seed {SEED}"
        flags += f" --problems {PROBLEMS} --samples {SAMPLES} --learning-rate 1e-3"
        bank = work / "bank.json"
        argv = arguments(flags, **places(W), encoder=W.encoder, bank=bank)
        options, settings = probe.parse(argv)
        cfg = dataclasses.replace(settings[0][1], out=str(work / "run"))
        run = sgsd.prepare(cfg, distributed.init(cfg.device), False, held, lambda *_: [])
        data = run.problems[:: len(run.problems) // PROBLEMS][:PROBLEMS]
        cache: dict = {}
        grpo, planned = (probe.make_row(run, *row, data, options, cache) for row in settings)
        rolls = [*itertools.chain.from_iterable(probe.draw(grpo, data, SAMPLES))]
        examples = itertools.chain.from_iterable(planned.examples)
        gradients: dict[str, list] = {"ascent": [], "grpo": [], "sgsd": []}
        for i, (roll, (pairs_K, contexts_K)) in enumerate(zip(rolls, examples)):
            gradients["ascent"].append(gradient(logq_of(roll).sum()))
            logp_1T = scoring.token_logprobs(
                run.lm,
                [roll.prompt_ids],
                [roll.completion_ids],
                grad=True,
                temperature=grpo.run.cfg.score_temperature,
            )
            gradients["grpo"].append(gradient(-logp_1T.mean()))  # of GRPO's loss, advantage 1
            example = sgsd.Example(i, roll, [roll], pairs_K, contexts_K)
            gradients["sgsd"].append(gradient(planned.loss_of(planned.run, example).loss))
            if i % 100 == 99:
                print(f"{i + 1} of {len(rolls)}", flush=True)
        right_NG = np.array([roll.r > 0 for roll in rolls]).reshape(PROBLEMS, SAMPLES)
        full = {name: np.array(x).reshape(PROBLEMS, SAMPLES, -1) for name, x in gradients.items()}

        # How much likelier each token gets along GRPO's direction from the even problems.
        advantages_NG = of_groups(baselines.grpo_advantages, right_NG[::2])
        learned_NGP = advantages_NG[..., None] * full["grpo"][::2]
        u_P = direction([learned_NGP.mean((0, 1))], "unit")
        params = list(probe.model.trained(run.lm).values())
        parts = torch.tensor(u_P).float().split([p.numel() for p in params])

        def logq_at(step: float) -> list[np.ndarray]:
            """Each rollout's log q of its tokens with the weights moved along u, and back."""
            for p, part in zip(params, parts):
                p.data += step * part.view_as(p)
            with torch.no_grad():
                logq = [logq_of(roll).numpy() for roll in rolls]
            for p, part in zip(params, parts):
                p.data -= step * part.view_as(p)
            return logq

        step = 1e-2
        tokens = [(a - b) / (2 * step) for a, b in zip(logq_at(step), logq_at(-step))]
        moved = np.abs(full["ascent"]).sum((0, 1)) > 0  # at the base B alone has a gradient
        np.savez(
            path,
            right=right_NG,
            lengths=[len(roll.completion_ids) for roll in rolls],
            ids=np.concatenate([roll.completion_ids for roll in rolls]),
            tokens=np.concatenate(tokens),
            **{name: x[..., moved] for name, x in full.items()},
        )


def of_groups(f: Callable[[Any], Any], right_NG: np.ndarray) -> np.ndarray:
    """f of each problem's outcomes, 1 where right, as the probe or GRPO has it. [N, G]."""
    import torch

    rows = [f(torch.tensor(right_G, dtype=torch.float64)) for right_G in right_NG]
    return torch.stack(rows).numpy()


def direction(batches: Sequence[np.ndarray], kind: str) -> np.ndarray:
    """The step from the minibatches' gradients, each [P], as in extras.probe. [P]."""
    g_BP = np.stack(batches).astype(float)
    if kind == "unit":
        mean_P = g_BP.mean(0)
        return -mean_P / max(float(np.linalg.norm(mean_P)), 1e-30)
    g_BP *= np.minimum(1, CLIP / (np.linalg.norm(g_BP, axis=1, keepdims=True) + 1e-6))
    return -g_BP.mean(0) / (np.sqrt(np.square(g_BP).mean(0)) + 1e-8)


def minibatches(loss_nGP: np.ndarray, cfg: Any) -> list[np.ndarray]:
    """The gradients of a fold's minibatches, put together as the probe does."""
    from extras import probe

    problems, samples = range(len(loss_nGP)), loss_nGP.shape[1]
    batches = probe.minibatches(problems, samples, cfg)
    return [np.mean([loss_nGP[i, j] for i, j in batch], 0) for batch in batches]


def estimates(
    loss_NGP: np.ndarray, ascent_NP: np.ndarray, folds: int, cfg: Any
) -> tuple[float, float]:
    """The slopes along Adam's and the unit direction: each fold's along that of all others."""
    parts = np.array_split(np.arange(len(loss_NGP)), folds)
    batches = [minibatches(loss_NGP[part], cfg) for part in parts]
    totals = {"adam": 0.0, "unit": 0.0}
    for fold, part in enumerate(parts):
        others = [*itertools.chain.from_iterable(batches[:fold] + batches[fold + 1 :])]
        for kind in totals:
            totals[kind] += float((ascent_NP[part] @ direction(others, kind)).sum())
    return totals["adam"] / len(loss_NGP), totals["unit"] / len(loss_NGP)


def strengths(pool: Any, draws: int) -> list[str]:
    """For each method, size and number of folds: the mean of the estimates over their spread."""
    from extras import baselines, probe

    lines = head_of(["method", "rollouts", "direction", *[f"{f} folds" for f in FOLDS]])
    for method in ("grpo", "sgsd"):
        for problems, samples in SIZES:
            cfg = SimpleNamespace(batch_size=W.batch, generations=1)
            if method == "grpo":
                cfg = SimpleNamespace(batch_size=max(1, W.batch // samples), generations=samples)
            rng, values = np.random.default_rng(0), []
            for _ in range(draws):
                problem_N = rng.permutation(PROBLEMS)[:problems]
                sample_NG = np.stack([rng.permutation(SAMPLES)[:samples] for _ in problem_N])
                at = problem_N[:, None], sample_NG
                right_NG, loss_NGP = pool["right"][at], pool[method][at]
                if method == "grpo":
                    loss_NGP = of_groups(baselines.grpo_advantages, right_NG)[..., None] * loss_NGP
                weight_NG = of_groups(probe.contrast, right_NG)
                ascent_NP = (weight_NG[..., None] * pool["ascent"][at]).sum(1)
                values.append([estimates(loss_NGP, ascent_NP, f, cfg) for f in FOLDS])
            ratios_F2 = np.mean(values, 0) / np.std(values, 0)
            for kind, ratios in zip(("adam", "unit"), ratios_F2.T):
                cells = [f"{ratio:.2f}" for ratio in ratios]
                lines.append(row_of([method, f"{problems} x {samples}", kind, *cells]))
    return lines


def with_token_baselines(pool: Any) -> list[str]:
    """The covariance along one direction, by one baseline a rollout and by one a token."""
    ends = np.cumsum(pool["lengths"])
    ids = np.split(pool["ids"], ends[:-1])
    slopes = np.split(pool["tokens"], ends[:-1])
    slopes_of: dict[str, list[float]] = {"one for a rollout": [], "one for a token": []}
    for i in range(1, PROBLEMS, 2):  # the even ones made the direction
        right_G = pool["right"][i].astype(float)
        ids_G = [ids[i * SAMPLES + j].tolist() for j in range(SAMPLES)]
        plain = token = 0.0
        for j in range(SAMPLES):
            alike = [k for k in range(SAMPLES) if k != j]
            s_T = slopes[i * SAMPLES + j]
            plain += (right_G[j] - right_G[alike].mean()) * s_T.sum()
            for t, s in enumerate(s_T):
                # others that begin with these t tokens; where none does, those before them
                alike = [k for k in alike if ids_G[k][:t] == ids_G[j][:t]] or alike
                token += (right_G[j] - right_G[alike].mean()) * s
        slopes_of["one for a rollout"].append(100 * plain / SAMPLES)
        slopes_of["one for a token"].append(100 * token / SAMPLES)
    lines = head_of(["baseline", "slope", "standard error", "ratio"])
    for name, x in slopes_of.items():
        mean, error = np.mean(x), np.std(x, ddof=1) / len(x) ** 0.5
        lines.append(row_of([name, f"{mean:.3g}", f"{error:.3g}", f"{mean / error:.2f}"]))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", help="the pool, some 1.5 GB")
    parser.add_argument("--collect", action="store_true", help="make the pool")
    parser.add_argument("--draws", type=int, default=200, help="random parts of it for each row")
    args = parser.parse_args()
    if args.collect:
        collect(args.file)
        return
    pool = dict(np.load(args.file))
    print(f"{pool['right'].mean():.1%} of the pool are right")
    print("\n".join([*strengths(pool, args.draws), "", *with_token_baselines(pool)]))


if __name__ == "__main__":
    main()
