"""What experiments/credit.py and polarity_tables.py compute, by hand."""

import json

import credit
import polarity_tables
import pytest

import cli

ROLLS = [  # of one window: a success and a failure, one teacher each
    {"step": 1, "problem_id": "a", "r": 1, "pred": "5"},
    {"step": 2, "problem_id": "b", "r": -1, "pred": None},
]
TOKENS = [
    {"text": ["1", "x"], "mask": [1, 1], "delta": [[-0.4, 0.2]], "credit": [[0.03, -0.01]]},
    {"text": ["1", "y"], "mask": [1, 1], "delta": [[-0.8, 0.6]], "credit": [[-0.05, 0.02]]},
]


@pytest.fixture
def run(tmp_path):
    audited = []
    for roll, tokens in zip(ROLLS, TOKENS):
        audited.append({"step": roll["step"], "problem_id": roll["problem_id"], **tokens})
    for name, rows in (("rollouts", ROLLS), ("tokens", audited)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    settings = {"settings": {"c_delta": 3.0, "eps_a": 0.05}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    return tmp_path


def test_credit_is_told_apart_by_outcome_liking_and_token(run):
    # Means over two rollouts, times 1,000: .03 / 2 is 15, -.01 / 2 is -5, and so on.
    *_, row = credit.table(run, 16)
    assert row == (
        "| 1 to 2 | 0.50 | 0.50 | -5.00 | +15.00 | +10.00 | -25.00 | -10.00 "
        "| `y` +10.00, `x` -5.00 |"
    )


def test_what_the_first_token_holds_and_decides(run):
    # |credit|: .03 + .05 of .11. Supports: (-.4 + .2) / 2 = -.1 on a success, so reversed, and
    # without the first token .2, so distilled; on the failure -.1 (distilled) and .6 (reversed).
    assert credit.first_token(run, 2) == (
        "steps 1 to 2: the first token has a mean gap of -0.60 and holds 73% of the credit; "
        "without it 100% of the polarities would be others"
    )
    assert "mean gap of -0.40 and holds 75%" in credit.first_token(run, 1)


def test_a_run_that_is_not_audited_at_every_step_is_refused(run):
    (run / "tokens.jsonl").write_text((run / "tokens.jsonl").read_text().split("\n", 1)[1])
    with pytest.raises(cli.UserError, match="not every step is audited"):
        credit.table(run, 16)


def test_how_a_word_spreads(tmp_path):
    rolls = [  # windows of 2 steps: 1 and 2, then 3
        {"step": 1, "r": 1, "text": "Well, one. Well, two."},
        {"step": 2, "r": -1, "text": "one"},
        {"step": 2, "r": -1, "text": "Well, one"},
        {"step": 3, "r": 1, "text": "two"},
    ]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(roll) + "\n" for roll in rolls))
    _, _, first, second = credit.words(tmp_path, 2, "Well")
    assert first == "| 1 to 2 | 33% | 67% | 1.00 | 2 | 50% | 0% |"
    assert second == "| 3 to 3 | 100% | 0% | 0.00 | 0 |  | 100% |"


def test_differences_are_paired_by_the_seeds_that_both_have():
    ends = {"a": {0: 0.5, 1: 0.7, 2: 0.1}, "b": {0: 0.3, 1: 0.4}}
    runs = {}
    for method, by_seed in ends.items():
        runs[method] = {seed: {"accuracy": {"9": end}} for seed, end in by_seed.items()}
    # .2 and .3: the mean is .25, and 12.71 * .0707 / sqrt(2) = .635
    assert polarity_tables.difference(runs, "a", "b", "9") == "+25.0% ± 63.5%"


def test_accuracy_at_equal_tokens_lies_between_two_evaluations():
    run = {"generated_at": {"20": 40_000, "60": 120_000}, "accuracy": {"20": 0.5, "60": 0.9}}
    assert polarity_tables.at_tokens(run, 60_000) == pytest.approx(0.6)  # a quarter of the way
    with pytest.raises(ValueError, match="outside 40000..120000"):
        polarity_tables.at_tokens(run, 20_000)


def test_the_page_has_the_tables_that_the_command_prints(capsys):
    polarity_tables.main([])
    page = (polarity_tables.ROOT / "results" / "polarity.md").read_text()
    for line in capsys.readouterr().out.splitlines():
        assert line in page
