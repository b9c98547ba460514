"""A folder for `tests/compare.py --world real`: a real model and problems that it sometimes solves.

    python tests/real_world.py MODELS DATA BANK

MODELS: a folder with a causal model in qwen05/ and a sentence-transformers model in encoder/. DATA:
one with svamp.jsonl, gsm8k_train.jsonl and gsm8k_test.jsonl (`problem`, `answer` on each line).
BANK: a bank that another model made. All of it is copied to runs/real_world. SVAMP's file has no
parts, so every fifth problem is for the test, and the one after it for the choice of rates.
"""

import argparse
import json
import pathlib
import shutil

ROOT = pathlib.Path(__file__).resolve().parent.parent


def read(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in open(path)]


def parts(svamp: list[dict], train: list[dict], test: list[dict]) -> dict[str, list[dict]]:
    """Problems to learn from, to choose rates with, and to test on: none stands in two parts."""
    return {
        "train": [x for i, x in enumerate(svamp) if i % 5 > 1] + train[:2400],
        "valid": svamp[1::5][:80] + train[-80:],
        "test": svamp[::5] + test[:200],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", type=pathlib.Path)
    parser.add_argument("data", type=pathlib.Path)
    parser.add_argument("bank", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "runs" / "real_world")
    args = parser.parse_args()
    for name, source in (("model", "qwen05"), ("encoder", "encoder")):
        shutil.copytree(args.models / source, args.out / name, dirs_exist_ok=True)
    shutil.copy(args.bank, args.out / "released.json")
    files = [read(args.data / f"{n}.jsonl") for n in ("svamp", "gsm8k_train", "gsm8k_test")]
    for name, rows in parts(*files).items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (args.out / f"{name}.jsonl").write_text(text)
        print(f"{args.out / name}.jsonl: {len(rows)} problems")


if __name__ == "__main__":
    main()
