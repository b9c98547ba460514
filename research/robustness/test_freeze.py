"""The freeze sees a number that differs, and overlooks what may change."""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from research.robustness import freeze


def write_rows(path, lines):
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))


def frozen(folder, loss, dynamic_id, replies, **columns):
    """A run's folder: a rollout of step 2, its bank with a dynamic entry, and replies."""
    (folder / "bank").mkdir(parents=True)
    bank = {"general_skills": [{"skill_id": dynamic_id, "title": "Add"}], "common_mistakes": []}
    (folder / "bank/step_000001.json").write_text(json.dumps(bank))
    row = {"step": 2, "pairs": [[dynamic_id, "err_001"]], "loss": loss, "rho": [], **columns}
    write_rows(folder / "rollouts.jsonl", [row])
    lines = [{"step": 1, "prompt": x, "repeat": 0, "reply": x} for x in replies]
    write_rows(folder / "bank/replies.jsonl", lines)
    return folder


def test_the_freeze_sees_a_number_and_overlooks_what_may_change(tmp_path):
    """Ids of dynamic entries, the order of replies, and columns of teachers where there is none."""
    old = frozen(tmp_path / "old", 0.5, "dyn_gen_001", "ab", alpha=[], advantage=1.0)
    new = frozen(tmp_path / "new", 0.5, "dyn_gen_001_002", "ba", advantage=1.0, index=0)
    found = freeze.Findings()
    freeze.compare_runs(old, new, found)
    assert found.cells() == ["1 rollouts, 1 banks, 2 replies", "0", ""]
    assert (found.may_go, found.added) == ({"rollouts.alpha"}, {"rollouts.index"})
    other = frozen(tmp_path / "other", 0.75, "gen_001", "aa", alpha=[])
    found = freeze.Findings()
    freeze.compare_runs(old, other, found)
    assert found.differences["rollouts.loss"] == 0.25 and found.lost == {"rollouts.advantage"}
    assert {"rollouts.pairs", "replies.reply"} <= {*found.differences}
