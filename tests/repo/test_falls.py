"""The arithmetic of experiments/falls.py, on curves made by hand."""

import json

import falls
import pytest

import runlog


def test_a_curve_is_straight_between_its_points():
    assert falls.straight({0: 0.0, 2: 0.4, 4: 0.2}) == pytest.approx([0.2, 0.4, 0.3, 0.2])


@pytest.mark.parametrize("loss, kind", [(0.3, "falling"), (0.2, "unclear"), (0.05, "healthy")])
def test_a_curve_is_told_by_its_greatest_loss_wherever_it_ends(loss, kind):
    row = falls.tried("x", [0.2, 0.8, 0.8 - loss, 0.9], [])
    assert (row.kind, row.named) == (kind, None) and row.loss == pytest.approx(loss)


@pytest.mark.parametrize("step, early, share", [(3, True, 0.25), (4, False, 0.5), (6, False, 1.0)])
def test_what_was_lost_when_the_rule_named_it(step, early, share):
    levels = [0.6, 0.8, 0.6, 0.4, 0.2, 0.0]
    fall = runlog.Fall("success", step, 0.0, 0.8, 2, 1)
    row = falls.tried("x", levels, [fall])
    assert row.before_half == early and row.share == pytest.approx(share)


def test_a_run_is_read_from_its_own_log(tmp_path, capsys):
    """25 problems per step: windows of 4. It falls from .8 to .2 after step 10."""
    (tmp_path / "config.json").write_text(json.dumps({"settings": {"batch_size": 25}}))
    rows = []
    for step in range(1, 21):
        success = 0.8 if step <= 10 else 0.2
        rows.append(json.dumps({"step": step, "success": success, "no_answer": 0.0}) + "\n")
    (tmp_path / "metrics.jsonl").write_text("".join(rows))
    assert falls.main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert f"| {tmp_path} | falling | 0.60 | 12 | " in printed
    assert "| falling | 1 | 1 (100.0%) |" in printed
    assert falls.main([]) == 2
