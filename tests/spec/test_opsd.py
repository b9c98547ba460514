"""OPSD (§4.1, Tab. 11): a step by its definition, on whole logits."""

import pytest
import torch
from method_steps import assert_gradients, logprobs_of, one_step
from small_run import parsed

import skills


@pytest.mark.parametrize("method", ["opsd", "opsd+skill"])
@pytest.mark.parametrize("field", ["", "answer"])
def test_a_step_of_opsd_is_its_definition(field, method, world_dir, tmp_path):
    """KL(T || S) of the base that sees the answer, at most .05 of each entry; the verdict plays no
    part, and every token counts. With skills both roles see them (S17). A field of the problem may
    stand in the place of the answer's sentence."""
    run, rows_of_step, got = one_step(world_dir, tmp_path / "run", method, teacher_field=field)
    total = 0.0
    for row in rows_of_step:
        problem, ids, pairs = row["problem"], row["completion_ids"], []
        if method == "opsd+skill":
            pairs = run.bank.retrieve(problem, 3, run.embed)
        hint = row["gold"] if field else f"The reference answer is {row['gold']}."
        shown = f"{problem}\n\n{hint}"
        s_TV = logprobs_of(run, skills.render_skills(pairs, problem), "closed", ids)
        with torch.no_grad(), run.lm.disable_adapter():
            t_TV = logprobs_of(run, skills.render_skills(pairs, shown), "bare", ids)
        loss = (t_TV.exp() * (t_TV - s_TV)).clamp(max=0.05).sum(-1).mean()
        assert row["loss"] == pytest.approx(loss.item(), abs=1e-5)
        gaps = (t_TV - s_TV)[range(len(ids)), ids].tolist()
        assert row["tokens"]["delta"] == [pytest.approx(gaps, abs=2e-5)]
        total = total + loss / 4
    assert_gradients(got, run, total)


def test_tab11_its_own_defaults_are_the_released_ones_with_skills_or_without():
    for argv in ([], ["--bank", "b.json"]):
        cfg = parsed(argv, "opsd")
        assert (cfg.max_new_tokens, cfg.max_prompt_tokens) == (1024, 20000)
        assert cfg.objective_clip == 0.05
        assert (cfg.temperature, cfg.top_p, cfg.top_k) == (1.1, 0.95, 20)
        assert cfg.uses_skill_bank == bool(argv)
    assert (cfg.num_teachers, cfg.evolve_every) == (3, 0)  # S17
