"""Does the contrast find the skills that mislead, and does leaving them out gain anything?

    python research/skill_choice/experiment.py WORK --world lock       five seeds; continues
    python research/skill_choice/experiment.py WORK --world lock --table
    python research/skill_choice/experiment.py WORK --world lock --leaving    two columns alone

For each seed: a probe of 120 steps with the whole bank, random retrieval and a rate at which
nothing is learnt; from its first 60 steps a bank by each rule; from the base 60 steps of SGSD under
each bank, with random retrieval and with its own; each run's last checkpoint on the test problems.
In the harder world also a bank that the model writes itself, and 30 steps of SGSD under it. What
WORK has is not made again. --leaving makes the runs under the whole bank, and beside them those of
leaving.py, in which entries leave it while it learns.

The whole bank has a true and a misleading skill for each of the eight families, two skills that say
nothing, the eight true mistakes and two that say nothing.
"""

import argparse
import json
import os
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "research/worlds"), str(HERE)]

import choose
import world

import skills
from research.markdown_table import head_of, row_of

SEEDS = range(5)
PLACES = {"lock": ("research/worlds/harder", 160), "tiny": ("tiny", 96)}  # and a solution's tokens
PROBE, CHOSEN_AFTER, STEPS = 120, 60, 60
RULES = ("contrast", "contrast without control", "sguid", "rho = +1", "mean support")
BANKS = ("whole", "contrast", "sguid", "true")
RETRIEVALS = ("random", "embedding")
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # Student's t, by seeds


def whole_bank() -> skills.SkillBank:
    right, wrong = [], []
    for kind in ("skill", "misleading"):
        for family in world.FAMILIES:
            right.append({"skill_id": f"{kind}_{family.name}", **world.item(None, family, kind)})
    for family in world.FAMILIES:
        item = world.item(None, family, "mistake")
        wrong.append({"mistake_id": f"mistake_{family.name}", **item})
    for which in range(2):
        item = world.item(None, None, "skill", which)
        right.append({"skill_id": f"nothing_{which}", **item})
        item = world.item(None, None, "mistake", which)
        wrong.append({"mistake_id": f"nothing_{which}", **item})
    return skills.SkillBank(right, wrong, {"source": "by hand"})


def true_bank(bank: skills.SkillBank) -> skills.SkillBank:
    right = [x for x in bank.general_skills if x["skill_id"].startswith("skill_")]
    wrong = [x for x in bank.common_mistakes if x["mistake_id"].startswith("mistake_")]
    return skills.SkillBank(right, wrong, {"source": "by hand"})


class Work:
    """One world's runs in a folder."""

    def __init__(self, folder: pathlib.Path, name: str):
        place, self.tokens = PLACES[name]
        self.place, self.folder, self.name = ROOT / place, folder / name, name

    def call(self, line: str, **paths: object) -> None:
        """Run a command; a failure ends this program."""
        argv = shlex.split(line)
        for flag, value in paths.items():
            argv += [f"--{flag}", str(value)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with open(self.folder / "log.txt", "a") as log:
            print("$", shlex.join(argv), file=log, flush=True)
            command = [sys.executable, *argv]
            subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=log, check=True)

    def train(self, program: str, out: pathlib.Path, **paths: object) -> None:
        """A run of the world's problems, 8 in a step, without evolutions."""
        flags = f"--preset tiny --batch-size 8 --audit-every 0 --max-new-tokens {self.tokens}"
        paths |= {"model": self.place / "model", "encoder": self.place / "encoder", "out": out}
        self.call(f"{program} {flags}", data=self.place / "train.jsonl", **paths)

    def bank(self, name: str, seed: int) -> pathlib.Path:
        name = "whole" if name == "leaving" else name  # what it begins with
        one_for_all = name in ("whole", "true")
        return self.folder / "banks" / (f"{name}.json" if one_for_all else f"{name}_{seed}.json")

    def run(self, name: str, retrieval: str, seed: int) -> pathlib.Path:
        return self.folder / f"{name}_{retrieval}_{seed}"

    def make(self, seed: int) -> None:
        (self.folder / "banks").mkdir(parents=True, exist_ok=True)
        bank = whole_bank()
        bank.save(self.bank("whole", seed))
        true_bank(bank).save(self.bank("true", seed))
        probe = self.folder / f"probe_{seed}"
        self.train(
            f"-m methods.ablations --retrieval random --evolve-every 0 --seed {seed}"
            f" --steps {PROBE} --learning-rate 1e-9 --checkpoint-every {PROBE}",
            probe,
            bank=self.bank("whole", seed),
        )
        for rule in ("contrast", "sguid"):
            rows = choose.read(probe, CHOSEN_AFTER)
            choose.choose(bank, rows, rule, 8).save(self.bank(rule, seed))
        for name in BANKS:
            for retrieval in RETRIEVALS:
                self.make_run(name, retrieval, seed)
        if self.name == "lock":
            self.make_own(seed)

    def make_leaving(self, seed: int) -> None:
        (self.folder / "banks").mkdir(parents=True, exist_ok=True)
        whole_bank().save(self.bank("whole", seed))
        for retrieval in RETRIEVALS:
            self.make_run("whole", retrieval, seed)
            self.make_run("leaving", retrieval, seed)

    def make_run(self, name: str, retrieval: str, seed: int) -> None:
        """60 steps of SGSD under a bank, and its accuracy on the test problems."""
        path, out = self.bank(name, seed), self.run(name, retrieval, seed)
        bank = skills.SkillBank.load(path)
        teachers = min(4, len(bank.general_skills), len(bank.common_mistakes))
        if not teachers or accuracy(out) is not None:
            return
        program = (
            "research/skill_choice/leaving.py" if name == "leaving" else "-m methods.ablations"
        )
        self.train(
            f"{program} --retrieval {retrieval} --evolve-every 0 --seed {seed}"
            f" --steps {STEPS} --checkpoint-every {STEPS} --num-teachers {teachers}",
            out,
            bank=path,
        )
        flags = f"--max-new-tokens {self.tokens} --samples 2 --rows 160 --seed {seed}"
        last = out / f"checkpoints/step_{STEPS:06d}"
        self.call(f"eval.py {last} --device cpu {flags}", data=self.place / "test.jsonl")

    def make_own(self, seed: int) -> None:
        """A bank that the model writes, and 30 steps of SGSD under it."""
        flags = "--cold-start 320 --cold-start-tokens 160 --steps 30 --checkpoint-every 30"
        self.train(f"sgsd.py {flags} --evolve-every 0 --seed {seed}", self.folder / f"own_{seed}")


# ------------------------------------------------------------------------------------- the tables


def kind_of(id_: str) -> str:
    return id_.partition("_")[0]


def auc(true: Sequence[float], false: Sequence[float]) -> float:
    gaps = np.array(true)[:, None] - np.array(false)[None]
    return float((gaps > 0).mean() + (gaps == 0).mean() / 2)


def of_choice(scores: choose.Scores) -> tuple[float, int, int]:
    """AUC of true over misleading skills, true ones among the first eight, and how many these are.

    A skill without a score counts as the worst.
    """
    values: dict[str, list[float]] = {"skill": [], "misleading": [], "nothing": []}
    for entry in whole_bank().general_skills:
        values[kind_of(entry["skill_id"])].append(scores.get(entry["skill_id"], -1e9))
    eight = choose.first(scores, 8)
    right = sum(kind_of(id_) == "skill" for id_ in eight)
    return auc(values["skill"], values["misleading"]), right, len(eight)


def interval(values: Sequence[float], scale: float = 1.0) -> str:
    """Mean and 95% interval over seeds, Student's."""
    if len(values) < 2:
        return ", ".join(f"{scale * x:.2f}" for x in values) or "none"
    n, mean = len(values), scale * float(np.mean(values))
    half = scale * T_95[n] * float(np.std(values, ddof=1)) / n**0.5
    return f"{mean:.2f} ± {half:.2f}" if scale == 1 else f"{mean:.1f} ± {half:.1f}"


def choices(work: Work, seeds: Sequence[int]) -> Iterator[str]:
    """First outcome."""
    heads = ["steps", "rule", "AUC", "by seed", "true among the eight", "kept"]
    yield from head_of(heads)
    for steps in (15, 30, 60, 120):
        for rule in RULES:
            found = []
            for seed in seeds:
                rows = choose.read(work.folder / f"probe_{seed}", steps)
                found.append(of_choice(choose.scores_of(rows, 0, rule)))
            aucs, right, kept = zip(*found)
            by_seed = ", ".join(f"{x:.2f}" for x in aucs)
            counts = [", ".join(map(str, x)) for x in (right, kept)]
            yield row_of([steps, rule, interval(aucs), by_seed, *counts])


def accuracy(run: pathlib.Path) -> float | None:
    files = [*run.glob("eval/*/results.json")]
    return json.loads(files[0].read_text())["test"]["avg"] if files else None


def accuracies(work: Work, seeds: Sequence[int], banks: Sequence[str] = BANKS) -> Iterator[str]:
    """Second outcome."""
    heads = ["retrieval", "bank", "success on the test problems, %", "by seed", "less the whole"]
    yield from head_of(heads)
    for retrieval in RETRIEVALS:
        by_bank = {}
        for name in banks:
            by_bank[name] = [accuracy(work.run(name, retrieval, seed)) for seed in seeds]
        for name, found in by_bank.items():
            pairs = [(x, y) for x, y in zip(found, by_bank["whole"]) if x is not None and y]
            less = interval([x - y for x, y in pairs], 100) if name != "whole" else ""
            values = [x for x in found if x is not None]
            by_seed = ", ".join("none" if x is None else f"{100 * x:.1f}" for x in found)
            yield row_of([retrieval, name, interval(values, 100), by_seed, less])


def own_banks(work: Work, seeds: Sequence[int]) -> Iterator[str]:
    """Third outcome."""
    yield from head_of(["seed", "skill", "what it is", "contrast", "95%", "uses"])
    for seed in seeds:
        run = work.folder / f"own_{seed}"
        bank, uses = skills.SkillBank.load(run / "bank/step_000000.json"), {}
        uses = choose.uses_of(choose.read(run, 30), 0)
        rows = []
        for entry in bank.general_skills:
            of_entry = uses.get(entry["skill_id"], [])
            sides = [[use.centred for use in of_entry if (use.r > 0) == x] for x in (True, False)]
            found = choose.contrast(*sides) or [-1e9] * 3
            meaning = world.meaning(entry) or (None, "unknown")
            what = f"{meaning[1]} ({meaning[0] or 'says nothing'})"
            rows.append((found, entry["skill_id"], what, [*map(len, sides)]))
        for (value, low, high), id_, what, counts in sorted(rows, reverse=True):
            cells = ["", ""] if low == high else [f"{value:+.4f}", f"{low:+.4f} to {high:+.4f}"]
            yield row_of([seed, id_, what, *cells, " + ".join(map(str, counts))])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("work", type=pathlib.Path)
    parser.add_argument("--world", choices=PLACES, default="lock")
    parser.add_argument("--table", action="store_true", help="print the tables; run nothing")
    parser.add_argument("--leaving", action="store_true", help="entries leave while it learns")
    parser.add_argument("--seeds", type=int, nargs="+", default=[*SEEDS])
    args = parser.parse_args(argv)
    work = Work(args.work.resolve(), args.world)
    for seed in [] if args.table else args.seeds:
        (work.make_leaving if args.leaving else work.make)(seed)
        print("seed", seed, "is done", flush=True)
    if args.leaving:
        print("\n".join(accuracies(work, args.seeds, ("whole", "leaving"))))
        return
    parts = [choices, accuracies] + [own_banks] * (args.world == "lock")
    print("\n\n".join("\n".join(part(work, args.seeds)) for part in parts))


if __name__ == "__main__":
    main()
