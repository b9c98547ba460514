"""A run's records: rows, supports and credit, the log line, notices, trackers, provenance."""

import collections
import importlib.util
import math
import os
import pathlib
import shutil
import subprocess
import sys
import types
from dataclasses import dataclass

import pytest
import torch
from conftest import ROOT, t

from lib import runlog

SECONDS = {"gen": 0.0, "score": 0.0, "bwd": 0.0, "opt": 0.0}


def row(r, a, rho, credit_KT=((0.0,),), **changes):
    """A rollout's record with these supports, polarities and credits."""
    record = {"index": 0, "r": r, "a": a, "rho": rho, "first_gap": a, "loss": 0.0, "pred": "5"}
    record |= {"truncated": False, "completion_ids": [1], "unmasked": 1, "clipped": 0}
    return record | runlog.credit_sums(t(credit_KT), r) | changes


def summary(records, norm=0.1):
    return runlog.summarize(1, records, norm, 1e-3, dict(SECONDS), 0.0)


# --------------------------------------------------------------------------- rollouts and tokens


@dataclass(frozen=True)
class Roll:
    problem_id: str
    completion_ids: list
    r: int


def test_a_rollouts_row_has_its_fields_the_ids_of_its_pairs_and_the_numbers():
    skill, mistake = {"skill_id": "gen_001"}, {"mistake_id": "err_002"}
    pair = types.SimpleNamespace(skill=skill, mistake=mistake, s_g=0.5, s_e=-0.25)
    numbers = {"rho": torch.tensor([1, -1]), "loss": t(0.5)}
    assert runlog.rollout_row(7, Roll("p", [1, 2], -1), [pair, pair], numbers) == {
        "step": 7,
        "problem_id": "p",
        "completion_ids": [1, 2],
        "r": -1,
        "pairs": [["gen_001", "err_002"]] * 2,
        "s_g": [0.5, 0.5],
        "s_e": [-0.25, -0.25],
        "rho": [1, -1],
        "loss": 0.5,
    }


def test_a_token_row_has_a_text_for_each_token(tokenizer):
    ids = tokenizer.encode("\\boxed{5}", add_special_tokens=False)
    delta_KT = torch.zeros(2, len(ids))
    line = runlog.token_row(7, Roll("p", ids, 1), tokenizer, {"delta": delta_KT})
    assert line == {
        "step": 7,
        "problem_id": "p",
        "text": ["\\boxed", "{", "5", "}"],
        "delta": [[0.0] * 4] * 2,
    }


def test_tokens_that_share_a_character_leave_its_text_to_the_last_of_them(tokenizer):
    text = "é→🙂 \\boxed{5}\n\nx"
    ids = tokenizer.encode(text, add_special_tokens=False)
    texts = runlog.token_texts(tokenizer, ids)
    assert len(texts) == len(ids) and "".join(texts) == text
    assert texts[:2] == ["", "é"] and "\\boxed" in texts
    broken = tokenizer.encode("🙂", add_special_tokens=False)[:2] * 3
    assert len(runlog.token_texts(tokenizer, broken)) == 6


def test_a_share_of_credit_is_at_most_one_in_fp32():
    """Where all credit has the verdict's sign, masked tokens change nothing in the sum."""
    generator = torch.Generator().manual_seed(1)
    w_KT = torch.rand(2, 187, generator=generator)
    w_KT[:, ::3] = 0
    sums = runlog.credit_sums(w_KT, 1)
    assert sums["credit_sq_with_verdict"] == sums["credit_sq"] > 0


def test_a_rollout_without_teachers_has_no_credit():
    assert set(runlog.credit_sums(torch.zeros(0), -1).values()) == {0.0}


# ------------------------------------------------------------------------------------------ steps


def test_teachers_are_counted_by_fate_and_by_outcome():
    records = [row(1, [0.0] * 4, [1, 1, -1, 0]), row(-1, [0.0] * 2, [-1, 0], truncated=True)]
    m = summary([*records, row(-1, [], [], [[]], pred=None)])
    counts = {"distilled": (2, 2, 0, 0), "reversed": (2, 1, 1, 1), "ignored": (2, 1, 1, 1)}
    for fate, by_case in counts.items():
        for case, n in zip(("", "_success", "_failure", "_truncated"), by_case):
            assert m[f"rho_{fate}{case}"] == n, (fate, case)
    assert m["no_teachers"] == 1
    for name in ("success", "truncated", "no_answer"):
        assert m[name] == pytest.approx(1 / 3), name


def test_shares_of_gaps_and_tokens_are_over_all_rollouts_of_the_step():
    """8 unmasked of 10 tokens; 6 x 2 + 2 x 1 = 14 gaps, 7 of them clipped; first gaps .1 .3 .2."""
    one = row(1, [0.1, 0.3], [0, 0], completion_ids=[1] * 7, unmasked=6, clipped=6, loss=0.5)
    other = row(-1, [0.2], [0], completion_ids=[1] * 3, unmasked=2, clipped=1, loss=-0.25)
    m = summary([one, other])
    assert (m["mask_share"], m["clip_share"], m["completion_tokens"]) == (0.8, 0.5, 5)
    assert m["first_gap"] == pytest.approx(0.2) and m["loss"] == 0.125
    assert [m[f"abs_a_p{p}"] for p in (10, 50, 90)] == pytest.approx([0.12, 0.2, 0.28])


def test_a_step_whose_gradient_is_not_finite_counts_as_skipped():
    skipped = [summary([row(1, [0.1], [1])], norm)["skipped"] for norm in (0.1, math.inf, math.nan)]
    assert skipped == [0, 1, 1]


def test_supports_are_logged_with_their_sign_by_outcome():
    """(-.2 + .1 - .3) / 3 = -.1333 and one of three on successes; (.4 - .2) / 2 on failures."""
    records = [row(1, [-0.2, 0.1], [-1, 1]), row(1, [-0.3], [-1]), row(-1, [0.4, -0.2], [-1, 1])]
    m = summary(records)
    assert m["a_mean_success"] == pytest.approx(-0.4 / 3)
    assert m["a_positive_success"] == pytest.approx(1 / 3)
    assert m["a_mean_failure"] == pytest.approx(0.1)
    assert m["a_positive_failure"] == 0.5


def test_a_mean_over_no_teacher_is_left_out_and_not_0():
    m = summary([row(1, [-0.2], [0]), row(-1, [], [], [[]])])
    assert "a_mean_success" in m
    assert not {"a_mean_failure", "a_positive_failure", "credit_with_verdict"} & set(m)


def test_the_share_of_squared_credit_that_has_the_verdicts_sign():
    """On the success .3^2 of .3^2 + .1^2, on the failure .2^2 of .2^2 + .4^2: .13 of .30."""
    right, wrong = row(1, [-1.0], [-1], [[0.3, -0.1]]), row(-1, [-1.0], [1], [[-0.2], [0.4]])
    assert right["credit_sq"] == pytest.approx(0.10)
    assert summary([right, wrong])["credit_with_verdict"] == pytest.approx(0.13 / 0.30)


def test_a_log_line_has_a_fixed_order():
    metrics = {"step": 25, "loss": -0.00312, "success": 0.62, "truncated": 0.5, "clip_share": 0.021}
    metrics |= {"rho_distilled": 41, "rho_reversed": 18, "rho_ignored": 5, "mask_share": 0.94}
    metrics |= {"seconds.gen": 21.4, "seconds.score": 9.96, "seconds.bwd": 0.04}
    metrics |= {"grad_norm": 0.0801, "memory_gb": 61.25}
    line = (
        "step 25/200 loss -0.0031 r+ .62 rho +41/-18/0:5 clip 2.1% mask .94 gnorm 0.08 "
        "| gen 21s score 10.0s bwd 0.0s | 61.2GB"
    )
    assert runlog.log_line(metrics, 200) == line
    cut = runlog.log_line(metrics | {"truncated": 0.75}, 200)
    assert cut == f"{line} | 75% cut at --max-new-tokens"


def test_a_lap_is_added_to_the_part_that_it_names():
    clock = runlog.Stopwatch()
    start = clock.last
    for part in ("gen", "score", "gen"):
        clock.lap(part)
    assert sum(clock.seconds.values()) == pytest.approx(clock.last - start)
    assert set(clock.seconds) == set(SECONDS) and clock.seconds["bwd"] == 0


def test_memory_is_in_gib():
    """A process that has torch loaded takes more than a MiB and less than a TiB."""
    assert 2**-10 < runlog.memory_gb(torch.device("cpu")) < 2**10


# -------------------------------------------------------- polarity that only repeats the verdict


def decided(n=25, reversed_success=8, distilled_failure=8, distilled_success=0, reversed_failure=0):
    """n lines of metrics.jsonl, each with these numbers of decided teachers."""
    line = {"rho_reversed_success": reversed_success, "rho_distilled_failure": distilled_failure}
    line |= {"rho_distilled_success": distilled_success, "rho_reversed_failure": reversed_failure}
    return [{"step": step, "success": 0.5, "no_answer": 0.0, **line} for step in range(1, n + 1)]


def test_a_polarity_that_only_repeats_the_verdict_is_reported_once_after_the_first_such_block():
    lines = [runlog.echo_line(decided(n)) for n in range(1, 80)]
    assert [n for n, line in enumerate(lines, 1) if line] == [25]
    assert lines[24].startswith("polarity: in steps 1 to 25 nearly all decided supports were below")
    above = decided(
        distilled_success=8, reversed_failure=8, reversed_success=0, distilled_failure=0
    )
    assert "above zero" in runlog.echo_line(above)


def test_a_later_block_is_reported_where_the_first_is_no_echo():
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


# ------------------------------------------------------------------------------------------ falls


def curve(*shares, boxed=None):
    """Lines of metrics.jsonl with these successes; boxed: the shares with a boxed answer."""
    boxed = boxed or [1.0] * len(shares)
    lines = []
    for step, (success, box) in enumerate(zip(shares, boxed), 1):
        lines.append({"step": step, "success": success, "no_answer": 1 - box})
    return lines


def test_a_fall_of_four_standard_deviations_is_reported_once_with_its_numbers():
    """Windows of 100 problems: 4 steps of 25. With best .8 and now .5 the mean is .65, and
    sqrt(2 x .65 x .35 / 100) = .0675, of which .3 is 4.4; at .525 it would be 4.1, at .55 3.8."""
    (fall,) = runlog.fallen(curve(*[0.8] * 6, *[0.5] * 8), batch_size=25)
    assert (fall.what, fall.step, fall.best, fall.best_step) == ("success", 10, 0.8, 6)
    assert fall.now == pytest.approx(0.5) and fall.window == 4
    assert runlog.fallen(curve(*[0.8] * 6, *[0.55] * 8), batch_size=25) == []


def test_the_best_window_is_the_last_one_where_success_still_rises():
    rising = [0.1 * i for i in range(1, 10)]
    (fall,) = runlog.fallen(curve(*rising, *[0.1] * 8), batch_size=25)
    assert fall.best == pytest.approx(0.75) and fall.best_step == 9


def test_a_fall_of_boxed_answers_is_reported_where_success_was_never_high():
    """1 and (3 + .4) / 4 = .85: of the mean .925 four deviations are .149."""
    line = curve(*[0.05] * 20, boxed=[1.0] * 10 + [0.4] * 10)
    (fall,) = runlog.fallen(line, batch_size=25)
    assert (fall.what, fall.best, fall.best_step, fall.step) == ("boxed answers", 1.0, 10, 11)


def test_a_fall_comes_again_only_after_the_run_was_near_its_best_again():
    """From .8 two deviations reach to about .66; .6 has made up two thirds of the fall."""
    high, low = [0.8] * 4, [0.2] * 4
    far, near = [0.6] * 4, [0.75] * 4
    once = runlog.fallen(curve(*high, *low, *far, *low), batch_size=25)
    twice = runlog.fallen(curve(*high, *low, *near, *low), batch_size=25)
    assert (len(once), len(twice)) == (1, 2)
    assert {fall.best for fall in twice} == {0.8}


@pytest.mark.parametrize("shares", [[0.0] * 30, [1.0] * 30, [0.5, 0.4, 0.6] * 10, [0.9]])
def test_what_is_no_fall(shares):
    assert runlog.fallen(curve(*shares), batch_size=8) == []


def test_falls_do_not_depend_on_where_a_run_was_resumed():
    """A fall found after a step is the same, whatever comes later: no state is kept."""
    lines = curve(*[0.8] * 30, *[0.2] * 30, *[0.8] * 30, *[0.1] * 30)
    whole = runlog.fallen(lines, batch_size=8)
    assert len(whole) == 2
    for n in range(1, len(lines)):
        assert runlog.fallen(lines[:n], 8) == [fall for fall in whole if fall.step <= n]


def test_the_line_of_a_fall_names_the_checkpoint_to_go_back_to(tmp_path):
    fall = runlog.Fall("success", 40, 0.25, 0.75, 27, 13)
    shares = "fall: success 0.25 in steps 28 to 40, down from 0.75 in steps 15 to 27"
    assert runlog.fall_line(fall, tmp_path) == f"{shares}; no checkpoint was saved by step 27"
    for step in (10, 20, 30, 40):
        (tmp_path / f"step_{step:06d}").mkdir()
    at = tmp_path / "step_000020"
    assert runlog.fall_line(fall, tmp_path) == f"{shares}; last checkpoint by step 27: {at}"


def test_an_echo_and_a_fall_are_each_noticed_after_one_step(tmp_path):
    """Steps of 100 problems: .9 right up to step 20, then none; all supports are below zero."""
    (tmp_path / "step_000015").mkdir()
    lines = []
    for step in range(1, 31):
        n = 90 if step <= 20 else 0
        records = [row(1, [-0.2], [-1])] * n + [row(-1, [-0.2], [1])] * (100 - n)
        lines.append(summary(records) | {"step": step})
    after = {n: runlog.notices(lines[:n], 100, tmp_path) for n in range(1, 31)}
    assert [n for n in after if after[n]] == [21, 25]
    assert after[21] == [
        "fall: success 0.00 in steps 21 to 21, down from 0.90 in steps 20 to 20; "
        f"last checkpoint by step 20: {tmp_path / 'step_000015'}"
    ]
    assert after[25][0].startswith("polarity: in steps 1 to 25 ") and len(after[25]) == 1


# ------------------------------------------------------------------------ trackers and provenance


@pytest.fixture
def clients(monkeypatch):
    """Stand-ins for wandb, trackio and TensorBoard, which record what they get."""
    seen = types.SimpleNamespace(
        wandb=[], trackio=[], board=collections.defaultdict(dict), started={}
    )

    class Writer:
        def __init__(self, path, **options):
            seen.started["board"] = {"path": path, **options}

        def add_scalar(self, name, value, step):
            seen.board[step][name] = value

    wandb, board = types.ModuleType("wandb"), types.ModuleType("torch.utils.tensorboard")
    wandb.init = lambda **options: seen.started.update(wandb=options)
    wandb.log = lambda metrics, step: seen.wandb.append(metrics | {"step": step})
    board.SummaryWriter = Writer
    trackio = types.ModuleType("trackio")
    trackio.init = lambda **options: seen.started.update(trackio=options)
    trackio.log = lambda metrics, step: seen.trackio.append(metrics | {"step": step})
    for module in (wandb, trackio, board):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return seen


def test_trackers_get_every_metric_by_its_name(clients, tmp_path):
    out = tmp_path / "run"
    lines = [summary([row(1, [-0.2], [0])]) | {"step": step} for step in (4, 5)]
    for name in ("wandb", "trackio", "tensorboard"):
        (tracker,) = runlog.open_trackers(out, {"seed": 3}, 3, name, "0a1b")
        for line in lines:
            tracker(line)
    assert clients.wandb == clients.trackio == lines == list(clients.board.values())
    assert {"seconds.gen", "loss"} <= set(lines[0])
    assert clients.started["wandb"]["dir"] == str(out) and out.is_dir()
    for name in ("wandb", "trackio"):
        started = clients.started[name]
        assert started["config"] == {"seed": 3} and started["name"] == "run"
        assert started["resume"] == "allow"  # a resumed run goes on there
    assert clients.started["wandb"]["id"] == "0a1b"
    assert clients.started["board"]["path"] == str(out / "tensorboard")
    assert clients.started["board"]["purge_step"] == 4  # a resumed run makes this step again
    assert runlog.open_trackers(out, {}, 0, "none", "0a1b") == []


def test_a_tracker_that_does_not_start_is_one_line(clients, tmp_path, monkeypatch):
    def no_network(**_):
        raise OSError("no\nnetwork")

    sys.modules["wandb"].init = no_network
    with pytest.raises(ValueError, match=r"wandb did not start \(OSError: no network\); .*log in"):
        runlog.open_trackers(tmp_path, {}, 0, "wandb", "0a1b")


@pytest.mark.parametrize(
    "name, module",
    [("wandb", "wandb"), ("trackio", "trackio"), ("tensorboard", "torch.utils.tensorboard")],
)
def test_a_tracker_that_is_not_installed_is_refused(name, module, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)  # its import fails
    with pytest.raises(ValueError, match=f"{name} did not start .*pip install {name}.*--report-to"):
        runlog.open_trackers(tmp_path, {}, 0, name, "0a1b")


def test_provenance_has_settings_command_and_versions(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/some/where/sgsd.py", "--steps", "3"])
    origin = runlog.provenance({"seed": 0}, "0.2.0")
    assert list(origin) == ["id", "settings", "command", "commit", "changes", "versions"]
    assert origin["settings"] == {"seed": 0} and origin["command"] == ["sgsd.py", "--steps", "3"]
    assert origin["versions"]["sgsd"] == "0.2.0"
    assert {"python", "torch", "transformers", "peft", "numpy"} <= set(origin["versions"])


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """runlog.py alone in a folder that is no repository yet, and git for that folder."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    shutil.copy(ROOT / "runlog.py", tmp_path)
    spec = importlib.util.spec_from_file_location("runlog_copy", tmp_path / "runlog.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def git(*words):
        who = ("-c", "user.name=test", "-c", "user.email=test@localhost")
        command = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    return types.SimpleNamespace(folder=pathlib.Path(tmp_path), runlog=module, git=git)


def test_provenance_outside_a_repository_has_no_commit_and_no_changes(copy):
    origin = copy.runlog.provenance({}, "0")
    assert origin["commit"] is None and origin["changes"] is None


def test_the_digest_of_changes_follows_the_diff_and_untracked_python_files(copy):
    (copy.folder / ".gitignore").write_text("ignored.py\n__pycache__/\n")
    for words in (("init",), ("add", "."), ("commit", "-m", "first")):
        copy.git(*words)

    def changes():
        origin = copy.runlog.provenance({}, "0")
        assert origin["commit"] == copy.git("rev-parse", "HEAD")
        return origin["changes"]

    source = copy.folder / "runlog.py"
    (copy.folder / "ignored.py").write_text("1\n")
    (copy.folder / "notes.txt").write_text("1\n")
    assert changes() == ""
    digests = []
    with source.open("a") as file:
        file.write("# a change\n")
    digests.append(changes())
    copy.git("add", "runlog.py")
    assert changes() == digests[0]  # staged or not, it is one change
    (copy.folder / "gate.py").write_text("1\n")
    digests.append(changes())
    (copy.folder / "gate.py").write_text("2\n")
    digests.append(changes())
    (copy.folder / "gate.py").rename(copy.folder / "mask.py")
    digests.append(changes())
    assert len(set(digests)) == 4 and {len(digest) for digest in digests} == {12}
    (copy.folder / "mask.py").unlink()
    copy.git("commit", "-am", "second")
    assert changes() == ""
