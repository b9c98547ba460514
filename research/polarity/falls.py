"""Does a run notice a fall in time, and leave a healthy run alone? We try `runlog.fallen`.

    python research/polarity/falls.py RUN ...       runs: their config.json and metrics.jsonl
    python research/polarity/falls.py --simulate    curves around the accuracies kept in research/

A run is falling if its success loses .25 or more from its best, healthy if it never loses .1, and
unclear between them. The table says how many of each kind the rule names, how many of them before
half of the loss, and what share of the loss had come by then.

For a run, we read the loss from a mean over as many steps as the rule's window has, but centred,
which is known only afterwards; the rule looks at boxed answers, too. --simulate is for comparisons
that kept accuracies after a few steps but no success by step: the curve is straight between these
points (and the base's accuracy before the first), and every step draws the verdicts of its problems
anew. GRPO's 8 rollouts of a problem share a chance of their own (Beta, with an intraclass
correlation of 1/3). Such draws have no boxed answers, not the training's own prompt and sampling,
and nothing of what makes real curves uneven.
"""

import itertools
import json
import pathlib
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from lib import config, files, runlog
from research.markdown_table import head_of, row_of
from research.methods import compare
from research.polarity import polarity_tables

FALLING, HEALTHY = 0.25, 0.1  # lost at least, and lost less than
GENERATIONS = 8
STORED = [file for world in ("lock", "lock_long", "tiny") for file in polarity_tables.FILES[world]]


@dataclass(frozen=True)
class Tried:
    """A curve that the rule was tried on."""

    name: str
    loss: float  # the most that it lies below its best so far
    named: int | None  # the step after which the rule named it
    before_half: bool
    share: float  # of the loss that had come about by then; 1 where it was not named

    @property
    def kind(self) -> str:
        if self.loss >= FALLING:
            return "falling"
        return "healthy" if self.loss < HEALTHY else "unclear"


def losses_of(levels: Sequence[float]) -> list[float]:
    """How far each step lies below the best so far."""
    return [best - x for best, x in zip(itertools.accumulate(levels, max), levels)]


def tried(name: str, levels: Sequence[float], falls: Sequence[runlog.Fall]) -> Tried:
    """levels: the success of each step without noise, or nearly. falls: what the rule says."""
    losses = losses_of(levels)
    loss = max(losses)
    if not falls:
        return Tried(name, loss, None, False, 1.0)
    named = falls[0].step
    lost = max(losses[:named])
    return Tried(name, loss, named, lost < loss / 2, lost / loss if loss else 0.0)


def centred(shares: Sequence[float], window: int) -> list[float]:
    """The mean around each step; at the ends over what there is."""
    half = window // 2
    levels = []
    for i in range(len(shares)):
        near = shares[max(0, i - half) : i + half + 1]
        levels.append(sum(near) / len(near))
    return levels


def of_run(run: pathlib.Path) -> Tried:
    """The rule on a run's own log."""
    batch_size = config.saved(run)["batch_size"]
    metrics = list(files.read_jsonl(run / "metrics.jsonl"))
    window = -(-runlog.FALL_PROBLEMS // batch_size)
    levels = centred([row["success"] for row in metrics], window)
    return tried(str(run), levels, runlog.fallen(metrics, batch_size))


def straight(points: dict[int, float]) -> list[float]:
    """A curve through these points, with a value for every step but 0."""
    steps = sorted(points)
    levels = []
    for start, end in itertools.pairwise(steps):
        for step in range(start + 1, end + 1):
            part = (step - start) / (end - start)
            levels.append(points[start] + part * (points[end] - points[start]))
    return levels


def drawn(level: float, problems: int, generations: int, draw: random.Random) -> float:
    """The success of one step: of each problem one rollout, or GRPO's group."""
    right = 0
    for _ in range(problems):
        chance = level
        if generations > 1 and 0 < level < 1:
            chance = draw.betavariate(2 * level, 2 * (1 - level))
        right += sum(draw.random() < chance for _ in range(generations))
    return right / problems / generations


def stored_curves() -> dict[str, tuple[dict[int, float], str, bool]]:
    """By name: accuracy after steps, the base's at 0; the world; whether it is GRPO's."""
    runs, bases = [], {}
    for name in STORED:
        results = json.loads((ROOT / "research" / f"{name}.json").read_text())["results"]
        for row in results.values():
            if row["kind"] == "train":
                runs.append(row)
            elif row["method"] == "base":
                bases[row["world"], row["seed"]] = row["accuracy"]["0"]
    curves = {}
    for row in runs:
        points = {int(step): x for step, x in row["accuracy"].items()}
        points[0] = bases[row["world"], row["seed"]]
        grpo = row["method"].startswith("grpo")
        curves[f"{row['world']}, {row['name']}"] = points, row["world"], grpo
    return curves


def simulated(draws: int, times: int) -> list[Tried]:
    """Every stored curve, so many times over, with `times` the problems of its own steps."""
    rows = []
    for name, (points, world, grpo) in stored_curves().items():
        levels = straight(points)
        w = compare.WORLDS[world]
        problems = times * (w.grpo_batch if grpo else w.batch)
        draw = random.Random(f"{name}, {times}")
        for _ in range(draws):
            metrics = []
            for step, level in enumerate(levels, 1):
                success = drawn(level, problems, GENERATIONS if grpo else 1, draw)
                metrics.append({"step": step, "success": success, "no_answer": 0.0})
            rows.append(tried(name, levels, runlog.fallen(metrics, problems)))
    return rows


def table(rows: list[Tried]) -> str:
    """How the rule did on each kind of curve."""
    head = ["curves", "number", "named", "before half of the loss", "median share lost by then"]
    lines = head_of(head)
    for kind in ("falling", "unclear", "healthy"):
        mine = [row for row in rows if row.kind == kind]
        if mine:
            named = sum(row.named is not None for row in mine)
            early = sum(row.before_half for row in mine)
            share = statistics.median(row.share for row in mine)
            cells = [kind, f"{len(mine):,}", f"{named:,} ({named / len(mine):.1%})"]
            cells.append(f"{early:,} ({early / len(mine):.1%})" if kind == "falling" else "")
            cells.append(f"{share:.0%}" if kind == "falling" else "")
            lines.append(row_of(cells))
    return "\n".join(lines)


def each(rows: list[Tried]) -> str:
    """A line for each run."""
    lines = head_of(["run", "kind", "lost at most", "named after step", "share lost by then"])
    for row in rows:
        cells = [row.name, row.kind, f"{row.loss:.2f}", str(row.named or "never")]
        cells.append(f"{row.share:.0%}" if row.named and row.kind != "healthy" else "")
        lines.append(row_of(cells))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = config.Parser("python research/polarity/falls.py", "RUN ... or --simulate", __doc__)
    parser.add_argument("runs", nargs="*", type=pathlib.Path, metavar="RUN", help="directories")
    parser.add_argument("--simulate", action="store_true", help="draw curves around research/")
    parser.add_argument("--draws", type=int, default=20, help="of each stored curve")

    args = parser.parse_args(argv)
    if bool(args.runs) == args.simulate:
        parser.error("give runs, or --simulate")
    if args.runs:
        with config.mistakes_as_one_line("falls"):
            rows = [of_run(run) for run in args.runs]
        print(f"{each(rows)}\n\n{table(rows)}")
        return
    for times in (1, 4):
        print(f"Simulated, {times} times the problems of the stored runs' steps:\n")
        print(f"{table(simulated(args.draws, times))}\n")


if __name__ == "__main__":
    main()
