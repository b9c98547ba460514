"""The embedded default: small files, sets apart, a preset that lives the whole life of a run."""

import json

from conftest import ROOT

HELD_OUT = {"train": 2400, "valid": 240, "test": 240}  # problems


def test_the_files_are_small_and_the_sets_apart():
    files = [path for path in (ROOT / "tiny").rglob("*") if "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) < 10e6
    seen = set()
    for name, n in HELD_OUT.items():
        lines = (ROOT / "tiny" / f"{name}.jsonl").read_text().splitlines()
        texts = {json.loads(line)["problem"] for line in lines}
        assert len(texts) == n and not texts & seen
        seen |= texts
