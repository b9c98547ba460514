"""Every recipe of docs/changing.md does what the page says, without an edit of the project."""

import json
import pathlib
import re
import types

import conftest
import driver
import pytest
import torch

import baselines
import eval
import policy
import rollout
import sgsd
import skills

PAGE = (conftest.ROOT / "docs" / "changing.md").read_text()
RECIPES = {code[0]: code[1] for code in re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.S)}
OF_A_DOMAIN = {"my_domain", "gym_data", "gym_domain"}  # test_changing_verdict.py has these
LINES = 15


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    """What a recipe puts in the place of the project's own goes back afterwards."""
    for module in (baselines, eval, policy, rollout, sgsd, skills):
        for name, value in list(vars(module).items()):
            if not name.startswith("__"):
                monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(policy, "PROJECTIONS", [*policy.PROJECTIONS])


def recipe(name):
    """A recipe's script, run as an import is: all but its last lines."""
    module = types.ModuleType(name)
    exec(compile(RECIPES[name], f"{name}.py", "exec"), vars(module))
    return module


def trained(world_dir, out, main=None, **changes):
    """Two steps by a command: the rollouts."""
    settings = {"updates": 2, "update_every": 0, "num_teachers": 2, "eps_a": 0.01, **changes}
    assert (main or sgsd.main)(driver.flags(world_dir, out, **settings)) == 0
    return driver.rows(out / "rollouts.jsonl")


def test_each_recipe_has_a_test_and_at_most_fifteen_lines():
    text = pathlib.Path(__file__).read_text()
    for name in RECIPES.keys() - OF_A_DOMAIN:
        assert f'recipe("{name}")' in text
    for name in RECIPES.keys() - {"gym_data"}:  # which makes files, and changes no part
        lines = [line for line in RECIPES[name].splitlines() if line.strip()]
        assert len(lines) <= LINES, f"{name}.py has {len(lines)} lines"


def test_another_function_of_the_gap_is_the_loss_and_the_logged_credit(world_dir, tmp_path):
    mine = recipe("my_gate")
    delta = torch.linspace(-4, 4, 9, dtype=torch.float64, requires_grad=True)
    slope = torch.autograd.grad(mine.gated_loss(delta, 0.5).sum(), delta)[0]
    assert torch.allclose(slope, mine.gate_grad(delta, 0.5))
    rows = trained(world_dir, tmp_path / "run", audit_every=1)
    for row, tokens in zip(rows, driver.rows(tmp_path / "run" / "tokens.jsonl")):
        gaps_KT = torch.tensor(tokens["delta"], dtype=torch.float64)
        mask_T = torch.tensor(tokens["mask"], dtype=torch.float64)
        mean_K = (mine.gated_loss(gaps_KT, 1.0) * mask_T).sum(1) / mask_T.sum()
        assert row["losses"] == pytest.approx(mean_K.tolist(), rel=1e-4)
    assert len(rows) == 8


def test_another_divergence_is_taken_by_the_distilling_methods(world_dir, tmp_path):
    recipe("total_variation")
    rows = trained(world_dir, tmp_path / "run", baselines.main, objective="jsd")
    losses = [loss for row in rows for loss in row["losses"]]
    assert losses and all(0 < loss <= 1 for loss in losses)
    plain = trained(world_dir, tmp_path / "jsd", sgsd.main)
    assert plain[0]["completion_ids"] == rows[0]["completion_ids"]


def test_another_reward_changes_the_polarity_and_no_verdict(world_dir, tmp_path):
    before = trained(world_dir, tmp_path / "plain", updates=1)
    mine = recipe("short_reward")
    sgsd.reward = lambda roll: -mine.reward(roll)  # so that it differs here: no solution is long
    after = trained(world_dir, tmp_path / "run", updates=1)
    for old, new in zip(before, after):
        assert new["r"] == old["r"] == old["reward"] == -new["reward"]
        assert new["rho"] == [-rho for rho in old["rho"]]
    assert any(any(row["rho"]) for row in before)


def test_another_retrieval_needs_no_encoder_and_serves_evaluation_too(
    world_dir, tmp_path, monkeypatch, capsys
):
    recipe("by_words")
    rows = trained(world_dir, tmp_path / "run", encoder=str(world_dir / "model"))
    bank = json.loads((world_dir / "bank.json").read_text())
    for row in rows:
        words = set(row["problem"].lower().split())
        for name, key, id_field in (
            ("s_g", "general_skills", "skill_id"),
            ("s_e", "common_mistakes", "mistake_id"),
        ):
            scores = []
            for entry in bank[key]:
                text = set(skills.entry_text(entry, key).lower().split())
                scores.append((-len(text & words) / len(text), entry[id_field]))
            best = sorted(scores, key=lambda score: score[0])[:2]
            assert row[name] == pytest.approx([-score for score, _ in best])
            kind = 0 if name == "s_g" else 1
            assert [pair[kind] for pair in row["pairs"]] == [id_ for _, id_ in best]
    flags = f"--data {world_dir}/data.jsonl --limit 1 --samples 1 --max-new-tokens 4 --num-skills 2"
    flags += f" --skills {world_dir}/bank.json --encoder no/encoder --out {tmp_path}/eval"
    assert eval.main([f"{world_dir}/model", *flags.split()]) == 0
    # Its samples are not taken for those of another retrieval.
    monkeypatch.setattr(skills, "nearest", lambda *_: skills.SkillBank.retrieve)
    assert eval.main([f"{world_dir}/model", *flags.split()]) == 2
    assert "made with retrieval unknown, now" in capsys.readouterr().err


def test_another_method_is_two_functions(world_dir, tmp_path):
    recipe("rejection")
    settings = {"method": "grpo", "generations": 4, "bank": "", "batch_size": 2}
    rows = trained(world_dir, tmp_path / "run", baselines.main, **settings)
    assert len(rows) == 2 * 2 * 4 and not any(row["pairs"] for row in rows)
    assert all(row["loss"] > 0 for row in rows if row["r"] > 0)
    assert all(row["loss"] == 0 for row in rows if row["r"] < 0)
    assert not (tmp_path / "run" / "bank").exists()


def test_another_model_family_needs_the_names_of_its_projections(world_dir, tmp_path):
    conftest.make_model("gpt_neox").save_pretrained(tmp_path / "neox")
    conftest.make_tokenizer().save_pretrained(tmp_path / "neox")
    settings = {"model": str(tmp_path / "neox"), "max_new_tokens": 8}
    refused = driver.flags(world_dir, tmp_path / "no", **settings)
    assert sgsd.main(refused) == 2
    recipe("neox")
    assert len(trained(world_dir, tmp_path / "run", **settings)) == 8
    adapter = json.loads(next(tmp_path.glob("run/checkpoints/*/adapter_config.json")).read_text())
    assert set(adapter["target_modules"]) == set(policy.PROJECTIONS)
