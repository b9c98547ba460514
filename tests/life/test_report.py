"""The report against the logs, by other arithmetic; what it escapes and leaves out; a browser."""

import collections
import html
import json
import math
import re
import shutil
import subprocess

import driver
import pytest
from conftest import ROOT
from driver import refused, rows

import eval
import scoring
import sgsd
import skills
from extras import report
from lib import config, files
from lib.problems import Problem

SCRIPT = '<script>window.hacked = 1</script><img src=x onerror="window.hacked=1">'
BANK = {"bank": "", "cold_start": 8, "evolve_every": 2, "steps": 6, "max_new_items": 2}
FATES = {1: "distilled", -1: "reversed", 0: "ignored"}
QUESTION = ["--explain", "What is 2 plus 5?", "--answer", "7"]


@pytest.fixture(scope="module")
def out(world_dir, tmp_path_factory):
    """A run that made its bank, evolved it and audited every second step."""
    path = tmp_path_factory.mktemp("runs") / "run"
    driver.train(world_dir, path, eps_a=0.4, **BANK)
    return path


def page(runs, path, **limits):
    """The page's text and the data in it."""
    report.write(runs, path, **limits)
    text = path.read_text()
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)
    return text, json.loads(data[1])


def write_jsonl(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def texts_in_use(out, step):
    """{id: all fields of the entry} of the bank before a step of a run that evolves every 2."""
    bank = skills.SkillBank.load(out / f"bank/step_{(step - 1) // 2 * 2:06d}.json")
    texts = {}
    for key, names in skills.FIELDS.items():
        for entry in getattr(bank, key):
            texts[entry[skills.IDS[key]]] = " / ".join(entry[name] for name in names)
    return texts


def test_the_curves_equal_the_logs(out, tmp_path):
    _, (run,) = page([out], tmp_path / "r.html")
    logged = rows(out / "rollouts.jsonl")
    for i, line in enumerate(rows(out / "metrics.jsonl")):
        mine = [row for row in logged if row["step"] == line["step"]]
        shown = {name: column[i] for name, column in run["metrics"].items()}
        assert shown["step"] == line["step"] and shown["seconds.gen"] == line["seconds.gen"]
        assert shown["success"] == sum(row["r"] == 1 for row in mine) / len(mine)
        mean = sum(row["loss"] for row in mine) / len(mine)
        assert shown["loss"] == pytest.approx(mean, rel=1e-5)
        decisions = collections.Counter((rho, row["r"]) for row in mine for rho in row["rho"])
        for rho, fate in FATES.items():
            assert shown[f"rho_{fate}"] == decisions[rho, 1] + decisions[rho, -1]
            assert shown[f"rho_{fate}_failure"] == decisions[rho, -1]
            assert shown[f"rho_{fate}_success"] == decisions[rho, 1]


def test_the_gate_views_equal_the_logs(out, tmp_path):
    _, (run,) = page([out], tmp_path / "r.html")
    logged = {(row["step"], row["problem_id"]): row for row in rows(out / "rollouts.jsonl")}
    audited = rows(out / "tokens.jsonl")
    assert len(audited) == 12
    for shown, tokens in zip(run["rollouts"], audited, strict=True):
        row = logged[tokens["step"], tokens["problem_id"]]
        assert all(shown[name] == row[name] for name in ("step", "problem_id", "r", "pred"))
        assert shown["mask"] == tokens["mask"] and shown["text"] == tokens["text"]
        texts = texts_in_use(out, row["step"])
        for k, teacher in enumerate(shown["teachers"]):
            assert teacher["rho"] == row["rho"][k]
            for name, id_ in zip(("skill", "mistake"), row["pairs"][k]):
                assert teacher[name][0] == id_ and " / ".join(teacher[name][1:]) == texts[id_]
            gaps = [d for d, m in zip(tokens["delta"][k], tokens["mask"]) if m]
            a = sum(max(-3, min(3, d)) for d in gaps) / len(gaps)
            assert teacher["a"] == pytest.approx(a, abs=1e-5)
            assert (teacher["rho"] == 0) == (abs(a) <= 0.4)
            for name, unit in (("delta", 10 ** -shown["digits"]), ("credit", shown["unit"])):
                for whole, x in zip(shown[name][k], tokens[name][k], strict=True):
                    assert abs(whole * unit - x) <= 0.51 * unit


def test_the_ledger_equals_a_count_by_hand(out, tmp_path):
    counted = collections.Counter()
    for row in rows(out / "rollouts.jsonl"):
        texts = texts_in_use(out, row["step"])
        for pair, rho in zip(row["pairs"], row["rho"]):
            for id_ in pair:
                key = texts[id_] if id_.startswith("dyn_") else id_
                counted[key, "retrieved"] += 1
                counted[key, FATES[rho], "success" if row["r"] > 0 else "failure"] += 1
    page([out], tmp_path / "r.html")
    ledger = json.loads((out / "ledger.json").read_text())
    assert ledger["step"] == 6 and ledger == report.ledger(out)
    listed = collections.Counter()
    for row in ledger["entries"]:
        dynamic = row["id"].startswith("dyn_")
        key = " / ".join(row["entry"].values()) if dynamic else row["id"]
        listed[key, "retrieved"] += row["retrieved"]
        for fate in FATES.values():
            for outcome, n in row[fate].items():
                listed[key, fate, outcome] += n
    assert +listed == counted
    assert any(key[0].startswith("title of") for key in counted)  # a dynamic entry is among them


def test_every_entry_leads_to_the_memories_it_came_from(out):
    cold = {memory["problem_id"]: memory for memory in rows(out / "bank/memories.jsonl")}
    data = report.collect(out)
    for row in data["ledger"]:
        assert len(row["sources"]) == row["all_sources"] > 0
        for source, step in row["sources"]:
            memory = data["memories"][source][step]
            assert memory["step"] == step <= row["first"]
            assert (step > 0) == row["id"].startswith("dyn_")
            assert step or memory["text"] == report.excerpt(cold[source]["completion"])


def test_the_ledger_of_a_continued_run_is_that_of_a_run_never_stopped(out, world_dir, tmp_path):
    """Neither rollouts nor versions of the bank that come again may count twice or wrongly."""
    run = tmp_path / "run"
    stopped = driver.train(world_dir, run, step_fn=driver.stopping_at(4), eps_a=0.4, **BANK)
    assert stopped.code == 130
    report.write([run], run / "report.html")  # its ledger is counted before the run is through
    late = {**rows(run / "rollouts.jsonl")[0], "step": 5}
    with open(run / "rollouts.jsonl", "a") as f:  # what a kill in the fifth step may leave
        f.write(json.dumps(late) + "\n")
    skills.SkillBank([], []).save(run / "bank/step_000005.json")  # of another schedule
    driver.train(world_dir, run, eps_a=0.4, **BANK)
    assert report.ledger(run) == report.ledger(out)


def save_bank(out, step, *titles, sources=None):
    """A version of a bank with skills of these titles and one mistake; all but "S..." dynamic."""
    entries = []
    for i, title in enumerate(titles):
        id_ = title if title.startswith("S") else f"dyn_gen_{i}"
        skill = {"skill_id": id_, "title": title, "principle": "", "when_to_apply": ""}
        entries.append({**skill, "sources": (sources or {}).get(title, [])})
    mistake = {"mistake_id": "err", "description": "", "why_it_happens": "", "how_to_avoid": ""}
    bank = skills.SkillBank(entries, [mistake], {"updates": [{"step": step, "added": 1}]})
    bank.save(out / f"bank/step_{step:06d}.json")


def test_the_ledger_knows_a_dynamic_entry_by_its_text(tmp_path):
    """Evolutions give dynamic ids anew; step 5 still used the version before its own."""
    save_bank(tmp_path, 0, "a", "b")
    save_bank(tmp_path, 5, "b", "a", "c")
    rollouts = []
    for step, r, i, rho in ((5, 1, 0, 1), (5, -1, 1, 0), (6, 1, 0, -1), (6, -1, 1, -1)):
        rollouts.append({"step": step, "r": r, "pairs": [[f"dyn_gen_{i}", "err"]], "rho": [rho]})
    write_jsonl(tmp_path / "rollouts.jsonl", rollouts)
    a, b, err, c = report.ledger(tmp_path)["entries"]
    assert (a["entry"]["title"], a["id"], a["first"], a["last"]) == ("a", "dyn_gen_1", 0, 5)
    assert (a["retrieved"], b["retrieved"], c["retrieved"], err["retrieved"]) == (2, 2, 0, 4)
    assert a["distilled"] == {"success": 1, "failure": 0}
    assert a["reversed"] == {"success": 0, "failure": 1}
    assert b["reversed"] == {"success": 1, "failure": 0}
    assert b["ignored"] == {"success": 0, "failure": 1}
    assert c["first"] == 5
    (tmp_path / "bank/step_000000.json").unlink()
    with pytest.raises(ValueError, match=r"step 5 used dyn_gen_0.*are files of bank/ missing"):
        report.ledger(tmp_path)


def test_the_timeline_of_start_new_merged_copied_and_pruned(tmp_path):
    sources = {"a": ["1"], "b": ["2"], "c": ["3"], "d": ["4"], "ab": ["1", "2"], "new": ["9"]}
    save_bank(tmp_path, 0, "S1", "a", "b", "c", "d", sources=sources)
    save_bank(tmp_path, 5, "S1", "d", "ab", "new", "s1", sources=sources)
    first, event = report.timeline(report.load_banks(tmp_path))
    assert first["sizes"] == [5, 1, 4, 0] and event["sizes"] == [5, 1, 4, 1]
    assert [mark for mark, _, _ in first["changes"]] == ["start"] * 6
    assert first["changes"][-1] == ["start", ["err", "", "", ""], []]
    assert event["step"] == 5 and event["note"] == {"step": 5, "added": 1}
    changes = []
    for mark, (_, title, *_), parents in event["changes"]:
        changes.append((mark, title, [id_ for id_, *_ in parents]))
    assert changes == [
        ("merged", "ab", ["dyn_gen_1", "dyn_gen_2"]),
        ("new", "new", []),
        ("copied", "s1", []),  # in another case, as a static entry has it (D11)
        ("pruned", "c", []),
    ]


@pytest.mark.parametrize(
    "a, rho, r, words",
    [
        (0.2, 1, 1, "supports a success: distilled"),
        (-0.2, 1, -1, "suppresses a failure: distilled"),
        (0.2, -1, -1, "supports a failure: reversed"),
        (-0.2, -1, 1, "suppresses a success: reversed"),
        (0.01, 0, 1, "is unsure of a success: ignored"),
    ],
)
def test_the_sentence_of_a_decision(a, rho, r, words):
    assert report.sentence(a, rho, r) == words


def write_run(path, text="5", steps=(1,), per_step=1, tokens=4, length=9, **changes):
    """The files of a run of `length` steps, all of its texts `text`; changes: of its settings."""
    skill = {"skill_id": "g", "title": text, "principle": text, "when_to_apply": text}
    mistake = {"mistake_id": "e", "description": text, "why_it_happens": text, "how_to_avoid": text}
    skills.SkillBank([skill], [mistake], {"source": text}).save(path / "bank/step_000000.json")
    settings = {"model": text, "bank": "", "steps": length, "audit_every": 1}
    settings |= {"data": "my/train.jsonl", "batch_size": per_step}
    settings |= {"tau_g": 1.0, "c_delta": 3.0, "eps_a": 0.05, **changes}
    (path / "config.json").write_text(json.dumps({"settings": settings}))
    row = dict.fromkeys(("problem", "gold", "pred", "text"), text)
    row |= {"index": 0, "r": 1, "truncated": False, "loss": 0.1, "pairs": [["g", "e"]], "rho": [1]}
    row |= {name: [0.5] for name in ("s_g", "s_e", "alpha", "a_plain", "a", "losses")}
    gaps = {"text": [text] * tokens, "mask": [1] * tokens}
    gaps |= {"delta": [[0.1234] * tokens], "credit": [[0.01, math.nan] + [0.0] * (tokens - 2)]}
    logs = {"metrics": [], "rollouts": [], "tokens": []}
    for step in steps:
        metrics = {"step": step, "success": 1.0, "grad_norm": math.inf, "seconds.gen": 1.0}
        metrics["no_answer"] = 0.0
        logs["metrics"].append(metrics)
        for i in range(per_step):
            name = {"step": step, "problem_id": f"p{i}"}
            logs["rollouts"].append(name | row)
            logs["tokens"].append(name | gaps)
    for name, lines in logs.items():
        write_jsonl(path / f"{name}.jsonl", lines)
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


def test_the_page_stays_small_and_says_what_it_left_out(tmp_path):
    run = write_run(tmp_path, steps=(1, 2, 3), per_step=8, tokens=500)
    text, (data,) = page([run], tmp_path / "r.html", max_bytes=100_000)
    count = len(data["rollouts"])
    assert len(text.encode()) < 101_000 and 3 <= count < 24 == data["audited"]
    assert len(data["left_out"].split(", ")) == 24 - count
    assert {view["step"] for view in data["rollouts"]} == {1, 2, 3}


def test_the_printed_numbers_stand_below_their_headings(tmp_path):
    """Also for a similarity below zero."""
    (view,) = report.collect(write_run(tmp_path))["rollouts"]
    for s_g in (0.844, -0.082):
        view["teachers"][0]["s_g"] = s_g
        heading, numbers = report.in_words(view, 0.05).splitlines()[3:5]
        ends = [match.end() for match in re.finditer(r"\S+", numbers)]
        assert [match.end() for match in re.finditer(r"\S+", heading)] == ends[:7]


@pytest.mark.parametrize("eps_a, digits", [(0.4, 3), (0.05, 3), (0.005, 4), (0.0125, 5), (1e-5, 6)])
def test_supports_have_the_decimals_that_the_threshold_needs(eps_a, digits, tmp_path):
    (view,) = report.collect(write_run(tmp_path, eps_a=eps_a))["rollouts"]
    assert view["digits"] == digits
    assert view["delta"][0][0] == round(0.1234 * 10**digits)
    assert f" +{0.5:.{digits}f}   +1  supports" in report.in_words(view, eps_a)


@pytest.mark.parametrize(
    "polarities, opens",
    [
        (([0, 0, 0], [0, 0, 0], [0, 0, -1], [0, 0, 1]), 2),
        (([0, 0, 1], [1, 1, 1], [1, 1, 0], [0, 1, 1]), 2),
        (([1, 1, 1], [1, -1, 1], [1, 0, -1], [0, 0, 0]), 2),
    ],
)
def test_the_page_opens_where_teachers_differ_most_and_then_where_most_count(
    polarities, opens, tmp_path
):
    """A rollout whose teachers are distilled, reversed and ignored shows all that may happen."""
    run = write_run(tmp_path, steps=(1, 2), per_step=2)
    rollouts = rows(run / "rollouts.jsonl")
    for row, rho in zip(rollouts, polarities):
        for name in ("pairs", "s_g", "s_e", "alpha", "a_plain", "a", "losses"):
            row[name] *= 3
        row["rho"] = rho
    write_jsonl(run / "rollouts.jsonl", rollouts)
    _, (data,) = page([run], tmp_path / "r.html")
    assert data["opens"] == opens and not data["explained"]
    (run / "tokens.jsonl").unlink()
    assert page([run], tmp_path / "r.html")[1][0]["opens"] == 0


def test_long_curves_are_thinned_up_to_the_last_step():
    columns, every = report.curves([{"step": step} for step in range(1, 96)], points=10)
    assert every == 10 and columns == {"step": list(range(5, 96, 10))}


def learning_run(path, successes=(), norm=0.1, rho=1, **changes):
    """A run that logged such successes, one for each step, and gradients of this norm."""
    run = write_run(path, "Qwen/Qwen3-1.7B", range(1, len(successes) + 1), **changes)
    for name, values in {
        "metrics": [{"success": x, "grad_norm": norm} for x in successes],
        "rollouts": [{"rho": [rho]}] * len(successes),
    }.items():
        lines = rows(run / f"{name}.jsonl")
        write_jsonl(run / f"{name}.jsonl", [a | b for a, b in zip(lines, values)])
    return run


def sentence_of(run, tmp_path):
    """What stands on top of the page."""
    return page([run], tmp_path / "r.html")[1][0]["sentence"]


def write_evaluation(run, steps, diff=None, low=None, high=None):
    """Results of these {step: avg}, and the comparison of the last one with step 0, the base."""
    base, results = "/models/Qwen/Qwen3-1.7B", {}
    for step, avg in steps.items():
        row = {"avg": avg, "avg_low": avg - 0.03, "avg_high": avg + 0.03}
        row |= {"samples": 24, "problems": 2, "digest": "0f"}
        folder = f"step_{step:06d}" if step else "Qwen--Qwen3-1.7B"
        files.write_json(run / "eval" / folder / "results.json", {"test": row})
        results[f"/then/{run.name}/checkpoints/{folder}" if step else base] = row
    if diff is not None:
        results[[*results][-1]] |= {"to": base, "diff": diff, "diff_low": low, "diff_high": high}
    files.write_json(run / "eval/comparison.json", {"test": {"results": results}})


def test_one_sentence_says_what_happened(tmp_path):
    """Success in windows of 100 problems, evaluation paired by problem, and what the bank has."""
    successes = [0.3, 0.5, 0.6, 0.8, 0.9, 1.0]
    run = learning_run(tmp_path / "run", successes, length=6, batch_size=50)
    write_evaluation(run, {0: 0.475, 3: 0.8, 6: 0.992}, 0.517, 0.486, 0.547)
    shutil.copy(run / "bank/step_000000.json", run / "bank/step_000003.json")
    bank = skills.SkillBank.load(run / "bank/step_000003.json")
    for i, title in enumerate(("new", bank.general_skills[0]["title"])):  # and a copy (D11)
        skill = {**bank.general_skills[0], "skill_id": f"dyn_gen_{i}", "title": title}
        bank.general_skills.append(skill)
    bank.save(run / "bank/step_000003.json")
    assert sentence_of(run, tmp_path) == (
        "6 steps on my/train.jsonl: success rose from 40% (steps 1 to 2) to 95% (steps 5 to 6); "
        "evaluation 47.5% to 99.2% (+51.7 points, 95%: +48.6 to +54.7); "
        "bank 3 skills and 1 mistake, 1 of them added in training."
    )


@pytest.mark.parametrize(
    "successes, words",
    [
        ([0.5, 0.5, 0.2, 0.2], "success fell from 50% (steps 1 to 2) to 20% (steps 3 to 4);"),
        # Two windows of 100 problems: the deviation of their difference is 7%.
        ([0.5, 0.5, 0.6, 0.6], "success 50% (steps 1 to 2) and 60% (steps 3 to 4), within chance;"),
        ([0.4], "success 40%;"),
        ([0.0, 0.0], "success 0% (step 1) and 0% (step 2), within chance;"),
    ],
)
def test_success_rose_or_fell_only_where_it_is_more_than_chance(successes, words, tmp_path):
    run = learning_run(tmp_path / "run", successes, length=len(successes), batch_size=50)
    assert words in sentence_of(run, tmp_path)


def test_a_sentence_on_a_run_that_is_not_finished_or_not_evaluated_says_so(tmp_path):
    run = learning_run(tmp_path / "a", [0.4, 0.4], length=30, batch_size=50)
    assert sentence_of(run, tmp_path).startswith("2 of 30 steps on my/train.jsonl: ")
    assert (
        "; no evaluation so far; bank 1 skill and 1 mistake, none of them added in training."
        in (sentence_of(run, tmp_path))
    )
    write_evaluation(run, {1: 0.5})
    assert "; evaluation of step 1: 50.0% (95%: 47.0% to 53.0%);" in sentence_of(run, tmp_path)
    none = write_run(tmp_path / "none", steps=(), length=30)
    assert sentence_of(none, tmp_path) == "No step of 30 on my/train.jsonl so far."
    done = learning_run(tmp_path / "b", [0.4], length=1)
    assert "; no evaluation; " in sentence_of(done, tmp_path)


@pytest.mark.parametrize(
    "gap, words",
    [
        ((0.005, -0.02, 0.03), " (+0.5 points, 95%: -2.0 to +3.0, within chance);"),
        ((-0.04, -0.06, -0.02), " (-4.0 points, 95%: -6.0 to -2.0);"),
        ((0.04, None, None), " (+4.0 points, no interval);"),
        ((None,), " 47.5% to 52.0%;"),  # comparison.json is another call's
    ],
)
def test_a_difference_has_its_interval_or_says_that_it_has_none(gap, words, tmp_path):
    run = learning_run(tmp_path / "run", [0.5], length=1)
    write_evaluation(run, {0: 0.475, 1: 0.52}, *gap)
    assert words in sentence_of(run, tmp_path)


@pytest.mark.parametrize(
    "norm, rho, words",
    [
        (0.0, 0, "every teacher was ignored, so nothing was learnt"),
        (0.0, 1, "no step had a gradient, so nothing was learnt"),
        (math.nan, 1, "no step had a finite gradient, so nothing was learnt"),
        (0.0, None, "no rollout had a teacher, so nothing was learnt"),
    ],
)
def test_a_run_that_learnt_nothing_says_so(norm, rho, words, tmp_path):
    run = learning_run(tmp_path / "run", [0.2, 0.9], norm, rho, length=2, batch_size=50)
    if rho is None:
        lines = [row | {"rho": [], "pairs": []} for row in rows(run / "rollouts.jsonl")]
        write_jsonl(run / "rollouts.jsonl", lines)
        (run / "tokens.jsonl").unlink()
    assert f"; {words};" in sentence_of(run, tmp_path)
    learnt = learning_run(tmp_path / "learnt", [0.2, 0.9], length=2)
    assert "nothing was learnt" not in sentence_of(learnt, tmp_path)


def test_the_sentence_stands_on_top_of_the_page_and_on_the_terminal(tmp_path, capsys):
    runs = [learning_run(tmp_path / name, [0.4], length=1) for name in "ab"]
    assert report.main([*map(str, runs), "--out", str(tmp_path / "r.html")]) == 0
    printed, text = capsys.readouterr().out, (tmp_path / "r.html").read_text()
    for seen in probe(text, tmp_path):
        assert not seen["errors"] and len(seen["sentences"]) == 2
        for name, sentence in zip("ab", seen["sentences"]):
            assert sentence.startswith(f"{name}: 1 step on my/train.jsonl: success 40%; ")
            assert sentence in printed


def test_a_run_that_is_still_going(tmp_path, capsys):
    run = write_run(tmp_path / "a", steps=(1, 2))
    for name in ("rollouts", "metrics"):  # torn by the moment
        with open(run / f"{name}.jsonl", "a") as f:
            f.write('{"step": 3, "probl')
    (run / "tokens.jsonl").unlink()
    assert report.main([str(run)]) == 0
    assert report.collect(run)["metrics"]["step"] == [1, 2]
    for wrong in (tmp_path, tmp_path / "nowhere"):
        refused(capsys, report.main, [wrong], "report: ", "no readable config.json of a run there")
    assert not (tmp_path / "nowhere").exists()


def test_evaluations_of_the_runs_checkpoints_and_of_plain_models(tmp_path):
    """The base model begins the curves; other models and the prompt with skills have their own."""
    run = write_run(tmp_path / "run", "Qwen/Qwen3-1.7B")
    averages = {
        "Qwen--Qwen3-1.7B": {"aime": 0.5, "hmmt": 0.1},
        "Qwen--Qwen3-1.7B--skills": {"aime": 0.6},
        "my--model": {"aime": 0.3},
        "step_000025": {"aime": 0.55},
        "step_000050": {"aime": 0.7},
        "step_000050--skills": {"aime": 0.8},
        "other--step_000075": {"aime": 0.9},
        "other--Qwen3-1.7B": {"aime": 0.2},  # of the same name, elsewhere
    }
    for folder, sets in averages.items():
        table = {}
        for name, avg in sets.items():
            table[name] = {"avg": avg, "avg_low": 0.0, "avg_high": 1.0}
            table[name] |= {"samples": 24, "problems": 2, "digest": "0f"}
        files.write_json(run / "eval" / folder / "results.json", table)
    curves = {}
    for point in report.evaluations(run):
        assert point["samples"] == 12
        curves.setdefault(point["set"], []).append((point["step"], point["avg"]))
    assert curves == {
        "aime": [(0, 0.5), (25, 0.55), (50, 0.7)],
        "aime + skills": [(0, 0.6), (50, 0.8)],
        "aime, my--model": [(0, 0.3)],
        "aime, other--Qwen3-1.7B": [(0, 0.2)],
        "hmmt": [(0, 0.1)],
    }


def test_the_page_rounds_an_accuracy_as_the_table_of_eval_does(tmp_path, capsys):
    """One rounding, from one number: 0.9125 is 91.2% in both, and not 91.3% on the page."""
    run = write_run(tmp_path / "run", "Qwen/Qwen3-1.7B")
    row = dict.fromkeys(("avg", "pass", "maj", "boxed", "truncated", "tokens"), 0.93125)
    row |= {"avg_low": 0.9125, "avg_high": 0.94449999}
    row |= {"samples": 24, "problems": 2, "digest": "0f"}
    files.write_json(run / "eval/step_000025/results.json", {"aime": row})
    (point,) = report.evaluations(run)
    eval.print_table({"aime": {"results": {"step_000025": row}, "selections": {}}}, 12)
    table = capsys.readouterr().out
    assert point["shown"]["avg_low"] == "91.2%"
    assert "| {avg} | {avg_low}-{avg_high} |".format(**point["shown"]) in table
    for seen in probe(page([run], tmp_path / "r.html")[0], tmp_path):
        assert "{avg} {avg_low} to {avg_high}".format(**point["shown"]) in seen["texts"]["curves"]


def test_the_page_says_where_there_is_no_interval(tmp_path):
    run = learning_run(tmp_path / "run", [0.4], length=1)
    write_evaluation(run, {0: 0.5, 1: 0.5})
    path = run / "eval/step_000001/results.json"
    results = files.read_json(path)
    results["test"] |= {"avg_low": None, "avg_high": None}
    files.write_json(path, results)
    assert "evaluation 50.0% to 50.0%" in sentence_of(run, tmp_path)
    for seen in probe(page([run], tmp_path / "r.html")[0], tmp_path):
        shown = seen["texts"]["curves"]
        assert not seen["errors"]
        assert "50.0% no interval" in shown and "50.0% 47.0% to 53.0%" in shown  # the base's


def test_evaluations_on_other_problems_under_one_name_are_no_curve(tmp_path):
    """Two files may have one stem; the last checkpoint's problems count."""
    run = write_run(tmp_path / "run", "Qwen/Qwen3-1.7B")
    figures = {"avg": 0.5, "avg_low": 0.0, "avg_high": 1.0, "samples": 24, "problems": 2}
    for step, problems in ((25, "a"), (50, "b"), (75, "b")):
        table = {"test": {**figures, "digest": problems}}
        files.write_json(run / f"eval/step_{step:06d}/results.json", table)
    assert [point["step"] for point in report.evaluations(run)] == [50, 75]


@pytest.mark.parametrize("method", ["opsd", "grpo+skill"])
def test_a_run_of_a_baseline_is_shown_but_not_explained(method, world_dir, tmp_path, capsys):
    """OPSD's one teacher has no pair, and GRPO's pairs are retrieved but teach nothing."""
    run = tmp_path / "run"
    bank = str(world_dir / "bank.json") if "skill" in method else ""
    changes = {"method": method, "bank": bank, "generations": 2 if "grpo" in method else 1}
    flags = driver.flags(world_dir, run, steps=1, batch_size=2, audit_every=1, **changes)
    with driver.signals_restored():
        assert driver.main(flags) == 0
    assert report.main([str(run)]) == 0
    entries = report.ledger(run)["entries"]
    assert sum(row["retrieved"] for row in entries) == (2 * 3 * 4 if bank else 0)
    assert not any(row[fate]["failure"] for row in entries for fate in FATES.values())
    rule = "is a run of extras.baselines; give one of sgsd.py"
    refused(capsys, report.main, [run, *QUESTION], rule)


def contents(path):
    return {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_explain_takes_draws_of_one_problem_through_the_method(world_dir, out, tmp_path, capsys):
    """Under the run's settings, its last bank and its last adapter; the run stays as it was."""
    run = tmp_path / "run"
    shutil.copytree(out, run)
    before = contents(run)
    assert report.main([str(run), *QUESTION, "--draws", "2"]) == 0
    assert contents(run) == before
    printed = capsys.readouterr().out
    (folder,) = tmp_path.glob("run-explain-*")
    assert f"writes {folder}, a folder beside the run" in printed.splitlines()[0]
    sentence = "2 draws of one problem under the adapter of step 6: 0 right, 2 wrong."
    assert sentence in printed and "the first wrong one, draw 1:" in printed
    assert printed.count("problem: What is 2 plus 5?") == 1 == printed.count("7: wrong, r = -1")
    data = report.collect(folder)
    assert data["sentence"] == sentence and len(data["rollouts"]) == 2
    view = data["rollouts"][0]
    assert data["explained"] and not report.collect(run)["explained"]
    assert (folder / "report.html").exists() and len(view["teachers"]) == 3
    for teacher in view["teachers"]:
        assert teacher["says"] in printed and teacher["skill"][1] in printed
    row, other = rows(folder / "rollouts.jsonl")
    assert row["completion_ids"] != other["completion_ids"]
    with driver.opened(world_dir, run, eps_a=0.4, **BANK | {"steps": 7}) as last:
        assert last.step == 6
        bank = skills.SkillBank.load(run / "bank/step_000006.json")  # step 6 used that of step 4
        ids = row["completion_ids"]
        student_T = scoring.token_logprobs(last.lm, [row["prompt_ids"]], [ids])[0]
        x = Problem("explained", row["problem"], "7")
        pairs_K = bank.retrieve(x.problem, last.cfg.num_teachers, last.embed)
        contexts_K = sgsd.prompts(last, x, pairs_K)[1]
        for k, (pair, context) in enumerate(zip(pairs_K, contexts_K, strict=True)):
            assert row["pairs"][k] == [pair.skill["skill_id"], pair.mistake["mistake_id"]]
            teacher_T = scoring.token_logprobs(last.lm, [context], [ids])[0]
            gap = float((teacher_T - student_T).mean())
            assert row["a_plain"][k] == pytest.approx(gap, abs=1e-5)


def explained(path, outcomes):
    """What --explain leaves of draws with these outcomes under the adapter of step 30."""
    run = write_run(path, steps=(31,), per_step=len(outcomes), length=30)
    (run / "metrics.jsonl").unlink()  # --explain logs no step
    lines = []
    for i, (row, r) in enumerate(zip(rows(run / "rollouts.jsonl"), outcomes)):
        lines.append(row | {"r": r, "index": i, "text": f"draw {i + 1}"})
    write_jsonl(run / "rollouts.jsonl", lines)
    return run


@pytest.mark.parametrize(
    "outcomes, words",
    [
        ([-1, 1, 1, -1], ["the first right one, draw 2:", "the first wrong one, draw 1:"]),
        ([1, 1], ["the first right one, draw 1:"]),
        ([-1], ["the first wrong one, draw 1:"]),
    ],
)
def test_one_draw_of_each_outcome_is_explained(outcomes, words, tmp_path):
    data = report.collect(explained(tmp_path / "run", outcomes))
    right = outcomes.count(1)
    draws = "1 draw" if len(outcomes) == 1 else f"{len(outcomes)} draws"
    counts = f"{right} right, {len(outcomes) - right} wrong."
    assert data["sentence"] == f"{draws} of one problem under the adapter of step 30: {counts}"
    printed = report.explanation(data)
    assert re.findall(r"^the first.*", printed, re.M) == words
    assert printed.startswith(f"{data['sentence']}\nproblem: 5\n")


def test_the_page_of_a_problem_names_its_draws(tmp_path):
    """It opens on the rollouts, all of the draws, and no step of the run is said to be one."""
    run = explained(tmp_path / "run", [-1, 1])
    for seen in probe(page([run], tmp_path / "r.html")[0], tmp_path):
        assert not seen["errors"] and seen["start"] == "Gate"
        assert "draw 1 · failure · " in seen["texts"]["gate"]
        assert "draw 2 · success · " in seen["texts"]["gate"]
        assert "step 31" not in seen["texts"]["gate"]
        assert seen["sentences"] == [report.collect(run)["sentence"]]


def test_what_explain_refuses(out, tmp_path, capsys):
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(out / "config.json", bare)
    for flags, word in (
        ([out, *QUESTION[:2]], "--explain and --answer"),
        ([out, *QUESTION[2:]], "--explain and --answer"),
        ([out, bare, *QUESTION], "give one run, got 2"),
        ([bare, *QUESTION], "has no bank yet"),
        ([out, *QUESTION, "--draws", "0"], "--draws 0: must be >= 1"),
    ):
        refused(capsys, report.main, flags, "report: ", word)
    assert [path.name for path in tmp_path.iterdir()] == ["bare"]


def test_the_page_on_metrics_explains_each_of_them(out):
    text = (ROOT / "docs" / "metrics.md").read_text()
    first_cells = " ".join(re.findall(r"^\| (`[^|]*) \|", text, re.M))
    explained = set(re.findall(r"`([\w.]+)`", first_cells))
    for name in rows(out / "metrics.jsonl")[-1]:
        plain = re.sub(r"_(success|failure|truncated)$", "", name)
        assert name in explained or plain in explained, name


PROBE = """<script>
const seen = { errors: [], width: innerWidth };
addEventListener("error", e => seen.errors.push(e.message));
const all = q => [...document.querySelectorAll(q)];
const text = q => all(q).map(e => e.textContent);
const fits = () => document.documentElement.scrollWidth <= innerWidth
  && !/NaN|undefined/.test(document.getElementById("main").innerHTML);
function visit(address) {
  history.replaceState(null, "", address);
  Object.assign(state, { run: "0", roll: "", k: "all", by: "delta" });
  render();
}
const focusable = e => (e.focus(), e.disabled || document.activeElement === e);
try {
  seen.start = text("[aria-current]").join();
  seen.texts = {};
  for (const view of Object.keys(VIEWS)) {
    visit("#view=" + view);
    seen[view] = [fits(), text("[aria-current]").join(), text("main").join().length > 50];
    seen.texts[view] = text("main")[0];
  }
  visit("#view=curves");
  seen.paths = all("svg path").length;
  seen.charts = text("#main h3");
  seen.folded = text("#main details h3");
  seen.open = all("#main details[open]").length;
  for (const e of all("#main details")) e.open = true;
  seen.unfolded = fits();
  seen.sentences = text(".sentence");
  seen.colours = [];
  for (let roll = 0; roll < RUNS[0].rollouts.length; roll++) {
    visit("#view=gate&k=0&roll=" + roll);
    seen.colours.push(all("#text span").map(e => e.style.background));
  }
  seen.key = text(".key > div");
  visit("#view=gate");
  seen.tokens = text("#text span");
  seen.says = text(".says");
  seen.polarities = all(".says").map(e => getComputedStyle(e, "::before").color);
  seen.supports = all(".teacher circle:last-child").map(e => getComputedStyle(e).fill);
  seen.masked = all("#text .masked").length;
  const last = new KeyboardEvent("keydown", { key: "End" });
  for (const e of all("#text")) e.dispatchEvent(last);
  seen.last = text("#token")[0];
  visit("#view=gate&by=credit&k=0");
  seen.checked = all("input[name=k]:checked").map(e => e.id).join();
  visit("#view=ledger");
  seen.rows = all("tbody tr").map(r => [...r.cells].map(c => c.textContent));
  seen.fates = all(".stack span").map(e => getComputedStyle(e).backgroundColor);
  seen.cut = all(".scroll.cut").length;
  seen.cue = all("p").filter(e => /scroll it sideways/.test(e.textContent) && !e.hidden).length;
  for (const e of all("td button").slice(0, 1)) e.click();
  seen.memory = text(".memory");
  seen.opened = fits();
  seen.focusable = all("main :is(a, button, select, input, [tabindex])").every(focusable);
  seen.hacked = window.hacked || 0;
} catch (e) { seen.errors.push(String(e.stack)); }
parent.postMessage(JSON.stringify([innerWidth, seen]), "*");
</script></body>"""
FRAMES = """<body>
<iframe src="probe.html" style="width:390px;height:800px;border:0"></iframe>
<iframe src="probe.html" style="width:1280px;height:800px;border:0"></iframe>
<pre id="result"></pre>
<script>
const result = document.getElementById("result");
addEventListener("message", e => { result.textContent += e.data + "\\n"; });
</script></body>"""


def probe(text, folder):
    """What the probe saw at 390 and at 1280 pixels, by Chromium without a window."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    browsers = [path for path in map(shutil.which, names) if path]
    if not browsers:
        pytest.skip("no Chromium here")
    (folder / "probe.html").write_text(text.replace("</body>", PROBE))
    (folder / "frames.html").write_text(FRAMES)
    command = [browsers[0], "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--window-size=1700,900", "--virtual-time-budget=10000"]
    command += [f"--user-data-dir={folder / 'profile'}", (folder / "frames.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    lines = re.search(r'<pre id="result">(.*?)</pre>', dom, re.S)[1].splitlines()
    results = [json.loads(html.unescape(line)) for line in lines]
    assert sorted(width for width, _ in results) == [390, 1280]
    return [result for _, result in results]


@pytest.mark.parametrize("kind", ["run", "hostile"])
def test_in_a_browser(kind, out, tmp_path):
    """Every view: no wider than the window, no script error, the logs' numbers, text as text."""
    run = out if kind == "run" else write_run(tmp_path / "run", SCRIPT)
    text, (data,) = page([run], tmp_path / "r.html")
    first, ledger = data["rollouts"][data["opens"]], {row["id"]: row for row in data["ledger"]}
    for seen in probe(text, tmp_path):
        assert not seen["errors"] and seen["hacked"] == 0
        assert seen["focusable"] and seen["opened"]
        for view in ("curves", "gate", "ledger", "bank"):
            assert seen[view] == [True, view.title(), True]
        assert seen["start"] == "Curves"
        assert seen["tokens"] == [t.replace("\n", "↵\n") or "·" for t in first["text"]]
        assert seen["masked"] == first["mask"].count(0) and seen["checked"] == "k0"
        assert seen["says"] == [teacher["says"] for teacher in first["teachers"]]
        assert seen["last"].startswith(f"token {len(first['text'])} of")
        assert len(seen["rows"]) == len(ledger)
        for cells in seen["rows"]:
            row = ledger[cells[0].split(" ")[0]]
            numbers = [row["retrieved"]]
            for fate in FATES.values():
                right, wrong = row[fate]["success"], row[fate]["failure"]
                numbers += [right + wrong, right, wrong]
            assert [int(cell) for cell in cells[2:]] == numbers
        if kind == "run":
            assert seen["memory"][0].startswith("problem p") and seen["paths"] > 20
            start, *evolutions = data["timeline"]
            assert f"The {len(start['changes'])} starting entries" in seen["texts"]["bank"]
            assert seen["texts"]["bank"].count("candidates") == len(evolutions) > 0


def test_four_curves_come_first_and_the_others_are_folded(out, tmp_path):
    """The evaluation stands between: it is no curve of a step."""
    first = ["Success", "Supports by outcome", "Completion length", "Loss", "Accuracy"]
    for seen in probe(page([out], tmp_path / "r.html")[0], tmp_path):
        assert seen["charts"] == first + seen["folded"] and len(seen["folded"]) > 12
        assert seen["open"] == 0 and seen["unfolded"]
        assert {"|ã|", "Gradient norm", "Bank", "learning_rate"} <= {*seen["folded"]}


def test_the_colours_of_gaps_are_on_one_scale_from_the_threshold_to_the_bound(tmp_path):
    """Whatever else a rollout holds: noise is palest, and a large gap differs from a small one."""
    run = write_run(tmp_path, per_step=2, eps_a=0.005)
    gaps = ([-8.7, -0.01, -0.004, 0.004], [0.0, -0.01, -0.2, 3.1])
    tokens = rows(run / "tokens.jsonl")
    for row, delta in zip(tokens, gaps):
        row["delta"] = [delta]
    write_jsonl(run / "tokens.jsonl", tokens)
    for seen in probe(page([run], tmp_path / "r.html")[0], tmp_path):
        assert not seen["errors"]
        first, second = seen["colours"]
        shares = [[int(share) for share in re.findall(r"(\d+)%", colour)] for colour in first]
        assert [share[0] for share in shares] == [64, 15, 5, 5]
        assert first[1] == second[1] and not second[0] and first[2] != first[3]
        assert re.findall(r"(\d+)%", second[2]) == ["38"] and "--pos) 64%" in second[3]
        assert [re.sub("[+−]", "", label, count=2) for label in seen["key"]] == (
            ["≤ 0.005", "0.025", "0.12", "0.61", "3", "> 3"]
        )


def test_the_tiny_preset_audits_while_something_is_learnt():
    """After step 10 or so nearly all is learnt there, and nearly all teachers are ignored."""
    tiny = config.PRESETS["tiny"]
    audited = range(tiny["audit_every"], tiny["steps"] + 1, tiny["audit_every"])
    assert len([step for step in audited if step <= 10]) >= 3


def test_a_finished_run_says_what_it_does_not_hold_and_why(tmp_path):
    run = write_run(tmp_path / "run", length=1, audit_every=0)
    (run / "tokens.jsonl").unlink()
    for seen in probe(page([run], tmp_path / "r.html")[0], tmp_path):
        assert not seen["errors"]
        assert "--audit-every 0, so no token's gap was kept" in seen["texts"]["gate"]
        assert "eval.py RUN" in seen["texts"]["curves"]
        assert (
            "No rollout that a teacher scored was cut at the length limit."
            in (seen["texts"]["curves"])
        )
        assert not re.search(r"\byet\b|so far", " ".join(seen["texts"].values()))


def test_a_run_without_teachers_says_so_wherever_a_teacher_would_be_shown(tmp_path):
    """A step without teachers logs 0 where it has no number: no panel may draw or explain it."""
    run = write_run(tmp_path / "run", length=1)
    skills.SkillBank([], [], {"source": "nothing"}).save(run / "bank/step_000000.json")
    gaps = rows(run / "tokens.jsonl")[0] | {"delta": [], "credit": []}
    write_jsonl(run / "tokens.jsonl", [gaps])
    row = rows(run / "rollouts.jsonl")[0]
    row |= {name: [] for name in ("pairs", "rho", "s_g", "s_e", "alpha", "a_plain", "a", "losses")}
    write_jsonl(run / "rollouts.jsonl", [row])
    metrics = rows(run / "metrics.jsonl")[0]
    metrics |= {f"rho_{fate}": 0 for fate in FATES.values()}
    metrics |= dict.fromkeys(("abs_a_p50", "clip_share", "first_gap", "loss"), 0.0)
    write_jsonl(run / "metrics.jsonl", [metrics | {"mask_share": 0.9}])
    for seen in probe(page([run], tmp_path / "r.html")[0], tmp_path):
        assert not seen["errors"] and all(seen[view][0] for view in seen["texts"])
        assert seen["texts"]["curves"].count("No rollout had a teacher.") == 10
        assert "The bank had no pair of a skill and a mistake" in seen["texts"]["curves"]
        assert "No rollout that a teacher scored" not in seen["texts"]["curves"]
        assert "The bank had no pair of a skill and a mistake" in seen["texts"]["gate"]
        assert not re.search("false|unmasked gaps|colour by", seen["texts"]["gate"])
        assert "This run's bank is empty" in seen["texts"]["ledger"]
        assert "It starts without an entry." in seen["texts"]["bank"]


def test_polarity_and_support_are_in_other_colours(tmp_path):
    """A teacher that suppresses a failure is distilled: in the same two colours both would jar."""
    run = write_run(tmp_path / "run")
    (row,) = rows(run / "rollouts.jsonl")
    (gaps,) = rows(run / "tokens.jsonl")
    for name in ("pairs", "s_g", "s_e", "alpha", "a_plain", "losses"):
        row[name] *= 3
    gaps["delta"] *= 3
    gaps["credit"] *= 3
    row |= {"r": -1, "a": [-0.5, 0.5, 0.01], "rho": [1, -1, 0]}
    write_jsonl(run / "rollouts.jsonl", [row])
    write_jsonl(run / "tokens.jsonl", [gaps])
    for seen in probe(page([run], tmp_path / "r.html")[0], tmp_path):
        assert not seen["errors"] and len(set(seen["polarities"])) == 3
        assert len(set(seen["supports"])) == 2
        assert not set(seen["polarities"]) & set(seen["supports"])
        assert seen["fates"][:3] == seen["polarities"]


def test_a_table_that_is_cut_on_a_narrow_screen_says_that_it_scrolls(tmp_path):
    for seen in probe(page([write_run(tmp_path / "run")], tmp_path / "r.html")[0], tmp_path):
        assert not seen["errors"]
        assert (seen["cut"], seen["cue"]) == ((1, 1) if seen["width"] == 390 else (0, 0))


def test_the_bounds_of_the_colours_come_from_the_objective(tmp_path):
    """Of gaps from eps_a to c_delta; of credits what the gate makes of eps_a, and at most."""
    bounds = report.collect(write_run(tmp_path))["bounds"]  # eps_a 0.05, c_delta 3, tau_g 1
    assert bounds["delta"][0] == 0.05 and bounds["delta"][4] == 3.0
    assert bounds["delta"][1] ** 2 == pytest.approx(
        bounds["delta"][0] * bounds["delta"][2], rel=1e-4
    )
    assert bounds["credit"][0] == pytest.approx(0.05 / (1 + math.exp(0.05**2 / 2)), rel=1e-4)
    peak = max(x / (1 + math.exp(x * x / 2)) for x in (1.1, 1.15, 1.2, 1.25))  # at 1.2 or so
    assert bounds["credit"][4] == pytest.approx(peak, rel=1e-2)
    template = (ROOT / "extras/report_template.html").read_text()
    assert not re.search(r"Math\.(exp|log)\b", template)  # no second copy of an equation
