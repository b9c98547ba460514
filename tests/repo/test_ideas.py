"""The two ideas of experiments/ideas.py, by hand."""

from types import SimpleNamespace

import ideas
import pytest
import torch
from driver import make_run

import sgsd


def test_centred_losses_weigh_both_outcomes_the_same(monkeypatch):
    """2 (1 - p) for a success and 2 p for a failure, with p within .05 to .95."""

    def published(run, example):
        return sgsd.RolloutLoss.without_teachers(torch.tensor(3.0), torch.zeros(2))

    monkeypatch.setattr(sgsd, "rollout_loss", published)
    ideas.outcomes.clear()
    run = SimpleNamespace(cfg=SimpleNamespace(batch_size=8))
    losses = []
    for r in (1, 1, -1, -1):  # p is .5 at first, then 1 (so .95), 1, 2/3
        example = SimpleNamespace(rollout=SimpleNamespace(r=r))
        losses.append(float(ideas.centred(run, example).loss))
    ideas.outcomes.clear()
    assert losses == pytest.approx([3.0, 0.3, 5.7, 4.0])


def test_without_its_first_token_a_step_has_no_credit_there(monkeypatch, world_dir, tmp_path):
    assert ideas.without_first([5, 7, 9], {7}).tolist() == [0, 0, 1]
    monkeypatch.setattr(sgsd, "token_mask", ideas.without_first)
    records, _, _ = sgsd.train_step(make_run(world_dir, tmp_path / "run", audit_every=1), 1)
    for row in records:
        assert row["tokens"]["mask"][0] == 0
        assert all(credit_T[0] == 0 for credit_T in row["tokens"]["credit"])
