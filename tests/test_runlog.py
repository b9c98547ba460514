"""What a run says of itself: supports and credit, an echo, a fall, a checkpoint's card."""

import math
import textwrap

import driver
import pytest
import torch
from conftest import t
from driver import make_run, rows

import config
import policy
import runlog
import sgsd

SECONDS = {"gen": 0.0, "score": 0.0, "bwd": 0.0, "opt": 0.0}


def row(r, a, rho, credit_KT=((0.0,),), **changes):
    """A rollout's record with these supports, polarities and credits."""
    record = {"index": 0, "r": r, "a": a, "rho": rho, "first_gap": a, "loss": 0.0, "pred": "5"}
    record |= {"truncated": False, "completion_ids": [1], "unmasked": 1, "clipped": 0}
    return record | runlog.credit_sums(t(credit_KT), r) | changes


def summary(records):
    return runlog.summarize(1, records, 0.1, 1e-3, dict(SECONDS), 0.0)


# ------------------------------------------------------------------------- supports and credit


def test_supports_are_logged_with_their_sign_by_outcome():
    """(-.2 + .1 - .3) / 3 = -.1333 and one of three on successes; (.4 - .2) / 2 on failures."""
    records = [row(1, [-0.2, 0.1], [-1, 1]), row(1, [-0.3], [-1]), row(-1, [0.4, -0.2], [-1, 1])]
    m = summary(records)
    assert m["a_mean_success"] == pytest.approx(-0.4 / 3)
    assert m["a_positive_success"] == pytest.approx(1 / 3)
    assert m["a_mean_failure"] == pytest.approx(0.1)
    assert m["a_positive_failure"] == 0.5


def test_what_no_teacher_said_is_left_out_and_not_0():
    m = summary([row(1, [-0.2], [0]), row(-1, [], [], [[]])])
    assert "a_mean_success" in m
    assert not {"a_mean_failure", "a_positive_failure", "credit_with_verdict"} & set(m)


def test_the_share_of_squared_credit_that_has_the_verdicts_sign():
    """On the success .3^2 of .3^2 + .1^2, on the failure .2^2 of .2^2 + .4^2: .13 of .30."""
    right, wrong = row(1, [-1.0], [-1], [[0.3, -0.1]]), row(-1, [-1.0], [1], [[-0.2], [0.4]])
    assert right["credit_sq"] == pytest.approx(0.10)
    assert summary([right, wrong])["credit_with_verdict"] == pytest.approx(0.13 / 0.30)


def test_a_run_logs_the_credit_of_equation_20_by_its_sign(world_dir, tmp_path):
    """Against the audited tokens, token by token; a method without this credit has none."""
    driver.train(world_dir, tmp_path / "run", eps_a=0.0, updates=2)
    logged = [x for x in rows(tmp_path / "run/rollouts.jsonl") if x["step"] == 2]
    audited = rows(tmp_path / "run/tokens.jsonl")
    of_all = with_verdict = 0.0
    for rollout, tokens in zip(logged, audited, strict=True):
        squares = [w * abs(w) * rollout["r"] for of_k in tokens["credit"] for w in of_k]
        assert rollout["credit_sq"] == pytest.approx(sum(map(abs, squares)), rel=1e-4)
        of_all += sum(map(abs, squares))
        with_verdict += sum(x for x in squares if x > 0)
    m = rows(tmp_path / "run/metrics.jsonl")[1]
    assert m["credit_with_verdict"] == pytest.approx(with_verdict / of_all, rel=1e-4)
    for outcome, r in (("success", 1), ("failure", -1)):
        signed = [a for rollout in logged if rollout["r"] == r for a in rollout["a"]]
        if signed:
            assert m[f"a_mean_{outcome}"] == pytest.approx(sum(signed) / len(signed))


def test_where_polarity_is_minus_the_verdict_the_share_is_that_of_gaps_below_zero():
    delta_KT, mask_T = torch.tensor([[-1.0, 0.5, -0.25]]), torch.ones(3)
    alpha_K = torch.ones(1)
    for r in (1, -1):
        rho_K = sgsd.polarity(sgsd.robust_support(delta_KT, mask_T, 3.0), r, 0.05)
        w_KT = sgsd.token_credit(delta_KT, mask_T, alpha_K, rho_K, 1.0)
        sums = runlog.credit_sums(w_KT, r)
        w_T = w_KT[0].abs().tolist()
        assert sums["credit_sq_with_verdict"] == pytest.approx(w_T[0] ** 2 + w_T[2] ** 2)
        assert sums["credit_sq"] == pytest.approx(sum(w**2 for w in w_T))


def test_a_share_of_credit_is_at_most_one_in_fp32():
    """Where all credit has the verdict's sign, masked tokens change nothing of the sum."""
    generator = torch.Generator().manual_seed(1)
    w_KT = torch.rand(2, 187, generator=generator)
    w_KT[:, ::3] = 0
    sums = runlog.credit_sums(w_KT, 1)
    assert sums["credit_sq_with_verdict"] == sums["credit_sq"] > 0


# ------------------------------------------------------------------- polarity as an echo


def decided(n=25, reversed_success=8, distilled_failure=8, distilled_success=0, reversed_failure=0):
    """n lines of metrics.jsonl with so many decided teachers in each."""
    line = {"rho_reversed_success": reversed_success, "rho_distilled_failure": distilled_failure}
    line |= {"rho_distilled_success": distilled_success, "rho_reversed_failure": reversed_failure}
    return [{"step": step, "success": 0.5, "no_answer": 0.0, **line} for step in range(1, n + 1)]


def test_a_polarity_that_only_echoes_the_verdict_is_named_once_after_the_first_such_block():
    lines = [runlog.echo_line(decided(n)) for n in range(1, 80)]
    assert [n for n, line in enumerate(lines, 1) if line] == [25]
    assert "in steps 1 to 25 the supports that count were below zero" in lines[24]
    above = decided(
        distilled_success=8, reversed_failure=8, reversed_success=0, distilled_failure=0
    )
    assert "above zero" in runlog.echo_line(above)


def test_a_later_block_is_named_where_the_first_does_not_echo():
    mixed = decided(distilled_success=1)
    later = [{**line, "step": line["step"] + 25} for line in decided(50)]
    assert runlog.echo_line(mixed) == ""
    assert "steps 26 to 50" in runlog.echo_line(mixed + later[:25])
    assert runlog.echo_line(mixed + later) == ""


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"reversed_success": 3}, "75 decided teachers of successes are too few"),
        ({"distilled_success": 1}, "one in nine supports a success"),
        ({"reversed_failure": 1}, "one in nine supports a failure"),
        ({"distilled_success": 20, "reversed_success": 0}, "without polarity all are distilled"),
    ],
)
def test_what_is_no_echo(changes, why):
    assert runlog.echo_line(decided(**changes)) == "", why


def test_one_exception_in_fifty_is_still_an_echo():
    lines = decided()
    lines[3]["rho_distilled_success"] = 4  # of 204
    assert runlog.echo_line(lines)
    lines[4]["rho_distilled_success"] = 1
    assert not runlog.echo_line(lines)


# ------------------------------------------------------------------------------------ a fall


def curve(*shares, boxed=None):
    """Lines of metrics.jsonl with these successes; boxed: the shares with a boxed answer."""
    boxed = boxed or [1.0] * len(shares)
    lines = []
    for step, (success, box) in enumerate(zip(shares, boxed), 1):
        lines.append({"step": step, "success": success, "no_answer": 1 - box})
    return lines


def test_a_fall_of_four_standard_deviations_is_noticed_once_with_its_numbers():
    """Windows of 100 problems: 4 steps of 25. With best .8 and now .5 the mean is .65, and
    sqrt(2 x .65 x .35 / 100) = .0675, of which .3 is 4.4; at .525 it would be 4.1, at .55 3.8."""
    (fall,) = runlog.fallen(curve(*[0.8] * 6, *[0.5] * 8), batch_size=25)
    assert (fall.what, fall.step, fall.best, fall.best_step) == ("success", 10, 0.8, 6)
    assert fall.now == pytest.approx(0.5) and fall.window == 4
    assert runlog.fallen(curve(*[0.8] * 6, *[0.55] * 8), batch_size=25) == []


def test_the_best_updates_are_the_last_ones_where_success_still_rises():
    rising = [0.1 * i for i in range(1, 10)]
    (fall,) = runlog.fallen(curve(*rising, *[0.1] * 8), batch_size=25)
    assert fall.best == pytest.approx(0.75) and fall.best_step == 9


def test_a_fall_of_boxed_answers_is_noticed_where_success_was_never_high():
    """1 and (3 + .4) / 4 = .85: of the mean .925 four deviations are .149."""
    line = curve(*[0.05] * 20, boxed=[1.0] * 10 + [0.4] * 10)
    (fall,) = runlog.fallen(line, batch_size=25)
    assert (fall.what, fall.best, fall.best_step, fall.step) == ("boxed answers", 1.0, 10, 11)


def test_a_fall_comes_again_only_after_the_run_was_near_its_best_again():
    """From .8 two deviations reach to about .66; .6 has made up two thirds of the fall."""
    high, low = [0.8] * 4, [0.2] * 4
    far, most = [0.6] * 4, [0.75] * 4
    once = runlog.fallen(curve(*high, *low, *far, *low), batch_size=25)
    twice = runlog.fallen(curve(*high, *low, *most, *low), batch_size=25)
    assert (len(once), len(twice)) == (1, 2)
    assert {fall.best for fall in twice} == {0.8}


@pytest.mark.parametrize("shares", [[0.0] * 30, [1.0] * 30, [0.5, 0.4, 0.6] * 10, [0.9]])
def test_what_is_no_fall(shares):
    assert runlog.fallen(curve(*shares), batch_size=8) == []


def test_falls_do_not_depend_on_where_a_run_was_resumed():
    """A fall that is known after a step is the same, whatever comes later: no state is kept."""
    lines = curve(*[0.8] * 30, *[0.2] * 30, *[0.8] * 30, *[0.1] * 30)
    whole = runlog.fallen(lines, batch_size=8)
    assert len(whole) == 2
    for n in range(1, len(lines)):
        assert runlog.fallen(lines[:n], 8) == [fall for fall in whole if fall.step <= n]


def test_the_line_of_a_fall_names_the_checkpoint_to_go_back_to(tmp_path):
    fall = runlog.Fall("success", 40, 0.25, 0.75, 27, 13)
    assert runlog.fall_line(fall, tmp_path) == (
        "fall: success 0.25 in steps 28 to 40, 0.75 in 15 to 27; no checkpoint was saved by then"
    )
    for step in (10, 20, 30, 40):
        (tmp_path / f"step_{step:06d}").mkdir()
    line = runlog.fall_line(fall, tmp_path)
    assert line.endswith(f"; the checkpoint to go back to: {tmp_path / 'step_000020'}")


def test_a_run_says_an_echo_and_a_fall_once_and_so_does_one_that_was_stopped(
    world_dir, tmp_path, capsys
):
    def stopping_at(last):
        def step_fn(run, step):
            """100 rollouts: .9 right up to step 20, then none; all supports are below zero."""
            run.stop = step == last
            records = []
            for i in range(100):
                r = 1 if step <= 20 and i < 90 else -1
                record = row(r, [-0.2], [-r], step=step)
                records.append(record | {"index": i, "problem_id": "p1"})
            return records, 0.1, dict(SECONDS)

        return step_fn

    settings = {"updates": 30, "update_every": 0, "batch_size": 100, "checkpoint_every": 15}
    for folder, stops in (("whole", [0]), ("stopped", [23, 0])):
        capsys.readouterr()
        for last in stops:
            again = (tmp_path / folder).exists()
            driver.train(world_dir, tmp_path / folder, again, stopping_at(last), **settings)
        output = capsys.readouterr()
        lines = (output.out + output.err).splitlines()
        fall, echo = [x for x in lines if x.startswith(("polarity:", "fall:"))]
        at = tmp_path / folder / "checkpoints/step_000015"
        assert fall == (
            "fall: success 0.00 in steps 21 to 21, 0.90 in 20 to 20; "
            f"the checkpoint to go back to: {at}"
        )
        assert echo.startswith("polarity: in steps 1 to 25 ")
    assert math.isfinite(rows(tmp_path / "whole/metrics.jsonl")[-1]["a_mean_failure"])


def test_a_checkpoint_loads_by_its_own_card_from_any_directory(world_dir, tmp_path, monkeypatch):
    """By transformers and PEFT alone, though the run was given its model as a relative path."""
    monkeypatch.chdir(world_dir)
    run, path = make_run(world_dir, tmp_path / "run", model="model"), tmp_path / "checkpoint"
    for p in policy.trained(run.model).values():
        torch.nn.init.normal_(p, std=0.1)
    runlog.save_checkpoint(path, run.model, run.tokenizer, run.optimizer, 3, {}, run.cfg)
    card = (path / "README.md").read_text()
    for said in ("sgsd.py, method sgsd", "step 3 of 4", "data.jsonl", "licence", "world_dir"):
        assert said.replace("world_dir", str(world_dir / "model")) in card
    lines = [line for line in card.splitlines() if line.startswith("    ")]
    assert "[More" not in card and len(lines) < 7
    monkeypatch.chdir(path)
    made = {}
    exec(textwrap.dedent("\n".join(lines)), made)
    ids = torch.tensor([[1, 2, 3]])
    logits = [model(input_ids=ids).logits for model in (made["model"], run.model)]
    torch.testing.assert_close(*logits)
    assert made["tokenizer"].get_vocab() == run.tokenizer.get_vocab()


def test_the_last_line_of_a_run_without_test_problems_asks_for_some(world_dir, tmp_path):
    cfg = config.Config(**driver.settings(world_dir, tmp_path / "run"))
    said = runlog.what_next(cfg)
    assert "--data YOUR_TEST_PROBLEMS.jsonl" in said
    assert "without --data" in said and "AIME24" in said and "38,912 tokens" in said
