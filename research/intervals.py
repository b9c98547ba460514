"""The intervals of the pages on the real model, made again from the kept samples.

    python research/intervals.py

95%, a bootstrap over problems; differences are paired by problem. A row for each test, beside the
base model and, for a trained one, beside SGSD after as many steps. The last lines count each run's
teachers.
"""

import json
import pathlib
import sys
from collections.abc import Iterator

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import eval as evaluation
from research.markdown_table import head_of, row_of

LEARNING = ROOT / "research/real_model/real_learning.json"
PROMPTS = ROOT / "research/real_model/with_skills.json"
RATES = [f"grpo, {rate}, step 20" for rate in ("1e-4, fp32", "2e-5", "5e-6, fp32")]


def scores_of(test: dict) -> np.ndarray:
    """Each problem's share of right samples. [P]."""
    right = np.array([int(digit) for digit in test["right"]], dtype=float)
    return right.reshape(-1, test["samples"]).mean(1)


def shown(scores_P: np.ndarray, sign: str = "") -> str:
    low, high = evaluation.bootstrap_interval([scores_P])
    return f"{100 * scores_P.mean():{sign}.1f} ({100 * low:{sign}.1f} to {100 * high:{sign}.1f})"


def gap(ours: dict, theirs: dict) -> str:
    return shown(scores_of(ours) - scores_of(theirs), "+")


def table(tests: dict[str, dict], base: str) -> Iterator[str]:
    yield from head_of(["test", "accuracy", "minus the base", "minus SGSD"])
    for name, test in tests.items():
        cells = [name, shown(scores_of(test))]
        cells.append("" if name == base else gap(test, tests[base]))
        method, _, rest = name.partition(", ")
        sgsd = tests.get(f"sgsd, {rest}")
        cells.append(gap(test, sgsd) if sgsd and method != "sgsd" else "")
        yield row_of(cells)


def first_samples(test: dict) -> dict:
    return {"right": test["right"][:: test["samples"]], "samples": 1}


def teachers_of(blocks: list[dict]) -> str:
    """How many of a run's teachers were decided, and how many supports were above 0."""
    teachers, decided, above = 0, 0, 0
    for block in blocks:
        teachers += block["success"]["teachers"] + block["failure"]["teachers"]
        decided += block["distilled"] + block["reversed"]
        above += block["success"]["above"] + block["failure"]["above"]
    return f"{decided} of {teachers} teachers decided, {above} supports above 0"


def main() -> None:
    learning, prompts = (json.loads(path.read_text()) for path in (LEARNING, PROMPTS))
    print("\n".join([*table(learning["tests"], "base"), "", *table(prompts, "plain")]))
    first = {name: first_samples(test) for name, test in learning["tests"].items()}
    high, middle, low = RATES
    print("\nfirst samples of GRPO's rates")
    print("\n".join(table({name: first[name] for name in ("base", *RATES)}, "base")))
    for one, other in ((high, low), (high, middle), (middle, low)):
        print(f"{one} minus {other}: {gap(first[one], first[other])}")
    print("\nteachers in training")
    for name, run in learning["runs"].items():
        if run["blocks"][0]["success"]["teachers"]:
            print(f"{name}: {teachers_of(run['blocks'])}")


if __name__ == "__main__":
    main()
