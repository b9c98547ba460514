"""The report against the logs, by other arithmetic; evaluations."""

import json
import math
import re

import pytest
from conftest import ROOT, one_line, write_evaluation
from driver import completes, refused, rows, write_rows

import skills
from extras import report
from lib import files

SCRIPT = '<script>window.hacked = 1</script><img src=x onerror="window.hacked=1">'


def page(runs, path):
    """The page's text and the data in it."""
    report.write(runs, path)
    text = path.read_text()
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)
    return text, json.loads(data[1])


def test_the_curves_equal_the_logs(uninterrupted, tmp_path):
    """And each chart draws a number that steps log."""
    text, (run,) = page([uninterrupted], tmp_path / "r.html")
    for name in run["metrics"]:
        logged = [line.get(name) for line in rows(uninterrupted / "metrics.jsonl")]
        assert run["metrics"][name] == [x and pytest.approx(x, rel=1e-5) for x in logged]
    drawn = {*re.findall(r'(?:key|ofTeachers)\("([\w.]+)"\)', text)}
    assert "success" in drawn and drawn <= {*run["metrics"], "mixed"}  # which GRPO logs


def version(*ids, **update):
    """A bank with skills of these ids and one mistake; update: what its last evolution noted."""
    entries = []
    for id_ in ids:
        skill = {"skill_id": id_, "title": f"title of {id_}", "principle": "", "when_to_apply": ""}
        entries.append({**skill, "sources": []})
    mistake = {"mistake_id": "err", "description": "", "why_it_happens": "", "how_to_avoid": ""}
    updates = [{"step": step, **update} for step in range(5, update.get("step", 0) + 1, 5)]
    return skills.SkillBank(entries, [mistake], {"seed_solutions": 12, "updates": updates})


def evolutions():
    """A first bank, an evolution, one that the success gate stopped, and one more."""
    first, second = version("S", "dyn_a", "dyn_b"), version("S", "dyn_a", "dyn_c", step=5)
    return {0: first, 5: second, 10: second, 15: version("S", step=15)}


def used(step, r, skill, rho):
    return {"step": step, "r": r, "pairs": [[skill, "err"]], "rho": [rho]}


def test_the_ledger_counts_an_entry_under_its_id_in_all_versions_and_the_history_changes():
    rollouts = [used(5, 1, "dyn_a", 1), used(5, -1, "dyn_b", 0), used(6, 1, "dyn_c", -1)]
    rollouts += [used(12, -1, "dyn_a", -1), used(12, -1, "S", 1)]
    s, a, b, err, c = report.ledger(evolutions(), rollouts).values()
    assert [row["id"] for row in (s, a, b, err, c)] == ["S", "dyn_a", "dyn_b", "err", "dyn_c"]
    spans = [(row["first"], row["last"]) for row in (s, a, b, c)]
    assert spans == [(0, 15), (0, 10), (0, 0), (5, 10)]
    assert [row["retrieved"] for row in (s, a, b, err, c)] == [1, 2, 1, 5, 1]
    assert a["distilled"] == {"success": 1, "failure": 0} == c["reversed"]
    assert a["reversed"] == {"success": 0, "failure": 1} == b["ignored"]
    one_line(lambda: report.ledger(evolutions(), [used(6, 1, "dyn_d", 1)]), "step 6 used dyn_d")
    changes = []
    for event in report.history(evolutions(), report.ledger(evolutions(), [])):
        changes.append([(mark, id_) for mark, _, (id_, *_) in event["changes"]])
    assert changes[1:3] == [[("new", "dyn_c"), ("dropped", "dyn_b")], []]
    assert changes[3] == [("dropped", "dyn_a"), ("dropped", "dyn_c")]


def test_the_contrast_of_an_entry_is_a_difference_of_differences_by_hand():
    """c is a support less the mean of the rollout's supports. Of g it is .02, .04 on successes and
    -.01, .01 on failures: .03 - 0, with variances of .0002 over 2 each: .03 ± 1.96 sqrt(.0002)."""
    rollouts, pairs = [], [["S", "err"], ["dyn_a", "err"]]
    successes, failures = [[0.02, -0.02], [-0.02, -0.1]], [[-0.11, -0.09], [0.5, 0.48]]
    for r, supports in {1: successes, -1: failures}.items():
        for a in supports:
            rollouts.append({"step": 1, "r": r, "rho": [0, 0], "a": a, "pairs": pairs})
    rollouts.append({**rollouts[0], "a": [math.nan, math.nan]})  # of a step that was skipped
    bank = {0: version("S", "dyn_a", "dyn_b")}
    s, a, b, err = report.ledger(bank, rollouts).values()
    half = 1.96 * 0.0002**0.5
    assert s["contrast"] == pytest.approx([0.03, 0.03 - half, 0.03 + half])
    assert a["contrast"] == pytest.approx([-0.03, -0.03 - half, -0.03 + half])
    assert err["contrast"][0] == pytest.approx(0, abs=1e-12)  # it was in all pairs
    assert b["contrast"] is None  # never used


def write_run(path, text="5", steps=(1,)):
    """The files of a run, all of its texts `text`."""
    skill = {"skill_id": "g", "title": text, "principle": text, "when_to_apply": text}
    mistake = {"mistake_id": "e", "description": text, "why_it_happens": text, "how_to_avoid": text}
    skills.SkillBank([skill], [mistake], {"source": text}).save(path / "bank/step_000000.json")
    settings = {"model": text, "steps": len(steps), "audit_every": 1, "batch_size": 50}
    settings |= {"data": "my/train.jsonl", "tau_g": 1.0, "c_delta": 3.0, "eps_a": 0.05}
    files.write_json(path / "config.json", {"program": "sgsd.py", "settings": settings})
    row = dict.fromkeys(("problem", "gold", "pred", "text"), text)
    row |= {"r": 1, "truncated": False, "loss": 0.1, "pairs": [["g", "e"]], "rho": [1]}
    row |= {name: [0.5] for name in ("s_g", "s_e", "alpha", "a_plain", "a", "losses")}
    gaps = {"text": [text] * 4, "mask": [1] * 4}
    gaps |= {"delta": [[0.1234] * 4], "credit": [[0.01, math.nan, 0.0, 0.0]]}
    metrics = {"success": 1.0, "truncated": 0.0, "grad_norm": math.inf, "completion_tokens": 4.0}
    metrics |= {"rho_distilled": 1, "rho_reversed": 1, "rho_ignored": 1, "seconds.gen": 1.0}
    write_rows(path / "metrics.jsonl", [{"step": step} | metrics for step in steps])
    for name, line in (("rollouts", row), ("tokens", gaps)):
        first = {"index": 0, "problem_id": "p0"} | line
        write_rows(path / f"{name}.jsonl", [{"step": step} | first for step in steps])
    return path


def test_text_is_text(tmp_path):
    run = write_run(tmp_path, SCRIPT + "</script><!-- \ud800")
    text, (data,) = page([run], tmp_path / "r.html")
    template = (ROOT / "extras/report_template.html").read_text()
    assert text.count("<script") == template.count("<script")
    assert "<img" not in text and "<!-- " not in text
    assert data["rollouts"][0]["text"][0].startswith(SCRIPT)
    assert data["metrics"]["grad_norm"] == [None] and data["rollouts"][0]["credit"][0][1] is None
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", template)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", template)


def test_the_solutions_of_a_group_are_numbered(tmp_path):
    run = write_run(tmp_path / "run")
    (row,), (tokens,) = rows(run / "rollouts.jsonl"), rows(run / "tokens.jsonl")
    by_id = report.ledger({0: skills.SkillBank.load(run / "bank/step_000000.json")}, [row])
    for generations, shown in ((4, "3 of 4"), (1, "")):  # SGSD has one of each problem
        view = report.gate_view(row | {"index": 6}, tokens, by_id, generations)
        assert view["solution"] == shown


def test_a_run_that_is_still_going_is_shown_and_no_run_refused(tmp_path, monkeypatch):
    """The page of two runs lies in neither."""
    run, alone = write_run(tmp_path / "a", steps=(1, 2)), write_run(tmp_path / "b", steps=())
    for name in ("rollouts", "metrics"):  # torn by the moment
        with open(run / f"{name}.jsonl", "a") as f:
            f.write('{"step": 3, "probl')
    (run / "tokens.jsonl").unlink()
    assert report.collect(run)["metrics"]["step"] == [1, 2]
    refused(report.main, [tmp_path], tmp_path, "config.json")
    for text in ("5", '{"settings": [], "program": "sgsd.py"}'):
        (tmp_path / "config.json").write_text(text)
        refused(report.main, [tmp_path], tmp_path / "config.json")
    (tmp_path / "config.json").unlink()
    monkeypatch.chdir(tmp_path)
    completes(report.main, [run, alone])
    assert [path.parent for path in tmp_path.rglob("report.html")] == [tmp_path]


def test_evaluations_of_the_runs_checkpoints_and_its_base_model(tmp_path):
    """The base model begins the curves, and the prompt with skills has its own. Left out are other
    models, other runs' checkpoints and, where two files have one stem, other problems."""
    run = write_run(tmp_path / "run", "Qwen/Qwen3-1.7B")
    of_run = run / "eval"
    write_evaluation(of_run / "Qwen--Qwen3-1.7B", k=10, test=[5])
    write_evaluation(of_run / "step_000025", k=10, test=[6])
    write_evaluation(of_run / "step_000050", k=10, test=[7], mine=[3])
    write_evaluation(of_run / "step_000050--skills", {"skills": "a bank"}, k=10, test=[8])
    write_evaluation(of_run / "other--step_000075", {"the policy's files": "x"}, k=10, test=[9])
    write_evaluation(of_run / "step_000010", digest="other problems", k=10, mine=[4])
    curves = {}
    for point in report.collect(run)["evals"]:
        curves.setdefault(point["set"], []).append((point["step"], point["avg"]))
    of_test = [(0, 0.5), (25, 0.6), (50, 0.7)]
    assert curves == {"test": of_test, "test + skills": [(50, 0.8)], "mine": [(50, 0.3)]}
