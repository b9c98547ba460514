"""The report against the logs, by arithmetic that is not the report's own; what it escapes, leaves out and survives; a browser."""

import collections
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import types

import pytest
import test_train as T
from conftest import ROOT, make_tokenizer

import banklife
import report
import rollout as R
import runlog
import sgsd
import skills as S
from distributed import UserError

SCRIPT = '<script>window.hacked = 1</script><img src=x onerror="window.hacked=1">'
CHROMIUM = next(
    (
        p
        for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
        if (p := shutil.which(name))
    ),
    None,
)


def page(path):
    html = path.read_text()
    return html, json.loads(
        re.search(r'<script id="data" type="application/json">(.*?)</script>', html, re.S)[1]
    )


@pytest.fixture(scope="module")
def out(world_dir, tmp_path_factory):
    """A run that made its bank, evolved it and audited every second update."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(R, "make_complete", T.FakeReplies)
        path = tmp_path_factory.mktemp("runs") / "run"
        T.train(
            world_dir,
            path,
            bank="",
            cold_start=8,
            update_every=2,
            updates=6,
            max_new_items=2,
            eps_a=0.4,
        )
    return path


def ids_and_texts(bank):
    return {
        e[S.IDS[key]]: " / ".join(e[f] for f in S.FIELDS[key])
        for key in S.FIELDS
        for e in getattr(bank, key)
    }


def test_numbers_equal_those_of_the_logs(out, tmp_path):
    assert report.main([str(out), "--out", str(tmp_path / "r.html")]) == 0
    _, (run,) = page(tmp_path / "r.html")
    metrics, rolls, tokens = (
        T.rows(out / f"{name}.jsonl") for name in ("metrics", "rollouts", "tokens")
    )
    for i, m in enumerate(metrics):
        mine = [r for r in rolls if r["step"] == m["step"]]
        rho = [(x, r["r"]) for r in mine for x in r["rho"]]
        shown = {name: column[i] for name, column in run["metrics"].items()}
        assert shown["step"] == m["step"] and shown["success"] == sum(
            r["r"] == 1 for r in mine
        ) / len(mine)
        assert shown["loss"] == pytest.approx(sum(r["loss"] for r in mine) / len(mine), rel=1e-5)
        for name, value in (("distilled", 1), ("reversed", -1), ("ignored", 0)):
            assert shown[f"rho_{name}"] == sum(x == value for x, _ in rho)
            assert shown[f"rho_{name}_failure"] == sum((x, r) == (value, -1) for x, r in rho)
        assert shown["seconds.gen"] == m["seconds"]["gen"] and shown["completion_tokens"] == sum(
            len(r["completion_ids"]) for r in mine
        ) / len(mine)
    assert [(r["step"], r["problem_id"]) for r in run["rollouts"]] == [
        (t["step"], t["problem_id"]) for t in tokens
    ] and len(tokens) == 12
    for shown, t in zip(run["rollouts"], tokens):
        row = next(r for r in rolls if (r["step"], r["problem_id"]) == (t["step"], t["problem_id"]))
        assert (
            [x["rho"] for x in shown["teachers"]] == row["rho"]
            and shown["mask"] == t["mask"]
            and shown["r"] == row["r"]
        )
        assert [x["a"] for x in shown["teachers"]] == pytest.approx(row["a"], rel=1e-5)
        bank = ids_and_texts(
            S.SkillBank.load(out / f"bank/step_{(t['step'] - 1) // 2 * 2:06d}.json")
        )
        for teacher, (skill, mistake), rho, a in zip(
            shown["teachers"], row["pairs"], row["rho"], row["a"]
        ):
            assert (
                " / ".join(teacher["skill"][1:]) == bank[skill]
                and " / ".join(teacher["mistake"][1:]) == bank[mistake]
            )
            clipped = [
                max(-3, min(3, d)) for d, m in zip(t["delta"][row["a"].index(a)], t["mask"]) if m
            ]
            assert a == pytest.approx(sum(clipped) / len(clipped), abs=1e-5) and (rho == 0) == (
                abs(a) <= 0.4
            )
        for have, want, unit in (
            ("delta", t["delta"], 0.001),
            ("credit", t["credit"], shown["unit"]),
        ):
            for mine, logged in zip(shown[have], want, strict=True):
                assert all(
                    abs(x * unit - y) <= unit * 0.51 for x, y in zip(mine, logged, strict=True)
                )


def test_the_ledger_equals_a_count_by_hand(out):
    counted = collections.Counter()
    for r in T.rows(out / "rollouts.jsonl"):
        bank = ids_and_texts(
            S.SkillBank.load(out / f"bank/step_{(r['step'] - 1) // 2 * 2:06d}.json")
        )
        for pair, rho in zip(r["pairs"], r["rho"]):
            for i in pair:
                key = bank[i] if i.startswith("dyn_") else i
                counted[key, "retrieved"] += 1
                counted[
                    key,
                    {1: "distilled", -1: "reversed", 0: "ignored"}[rho],
                    "success" if r["r"] > 0 else "failure",
                ] += 1
    rows = json.loads((out / "ledger.json").read_text())["entries"]
    listed = collections.Counter()
    for row in rows:
        key = " / ".join(row["entry"].values()) if row["id"].startswith("dyn_") else row["id"]
        listed[key, "retrieved"] += row["retrieved"]
        for fate in ("distilled", "reversed", "ignored"):
            for outcome, n in row[fate].items():
                listed[key, fate, outcome] += n
    assert +listed == counted and any(
        k[0].startswith("title of") for k in counted
    )  # dynamic ones among them
    memories = {m["problem_id"]: m for m in T.rows(out / "bank/memories.jsonl")}
    data = report.load(out)
    for row in data["ledger"]:
        assert row["sources"]
        for source, i in row["sources"]:
            memory = data["memories"][source][i]
            assert (
                memory["problem"] in memories[source]["problem"]
                if not memory["step"]
                else memory["step"] <= row["first"]
            )
            assert (memory["step"] > 0) == row["id"].startswith("dyn_")


def test_the_ledger_is_right_after_a_resume(world_dir, tmp_path, monkeypatch):
    """Killed after its last checkpoint: neither the rollouts nor the bank that come again may count twice or wrongly."""
    monkeypatch.setattr(R, "make_complete", T.FakeReplies)
    settings = dict(bank="", cold_start=8, update_every=2, updates=4, max_new_items=2)
    T.train(world_dir, tmp_path / "whole", **settings)
    keep = sgsd.update
    monkeypatch.setattr(sgsd, "update", lambda run, s: setattr(run, "stop", s == 2) or keep(run, s))
    T.train(world_dir, tmp_path / "parts", **settings)
    monkeypatch.setattr(sgsd, "update", keep)
    with open(tmp_path / "parts/rollouts.jsonl", "a") as f:
        f.write(json.dumps({**T.rows(tmp_path / "parts/rollouts.jsonl")[0], "step": 3}) + "\n")
    stale = S.SkillBank([{"skill_id": "s", "title": "", "principle": "", "when_to_apply": ""}], [])
    stale.save(
        tmp_path / "parts/bank/step_000003.json"
    )  # of a schedule that the resumed run no longer has
    T.train(world_dir, tmp_path / "parts", resume=True, **settings)
    assert (tmp_path / "parts/ledger.json").read_text() == (
        tmp_path / "whole/ledger.json"
    ).read_text()
    assert not (tmp_path / "parts/bank/step_000003.json").exists()


def test_a_run_that_drops_its_older_rollouts_counts_them_all(
    world_dir, tmp_path, monkeypatch, capsys
):
    """--keep-rollouts: the same ledger and the same weights, the last lines alone; an --update-every of 2 still has its window."""
    monkeypatch.setattr(R, "make_complete", T.FakeReplies)
    settings = dict(bank="", cold_start=8, update_every=2, updates=6, max_new_items=2)
    T.train(world_dir, tmp_path / "whole", **settings)
    T.train(world_dir, tmp_path / "kept", keep_rollouts=3, **settings)
    for name in (
        "ledger.json",
        "checkpoints/step_000004/ledger.json",
        "checkpoints/step_000006/adapter_model.safetensors",
        "bank/bank.json",
    ):
        assert (tmp_path / "kept" / name).read_bytes() == (
            tmp_path / "whole" / name
        ).read_bytes(), name
    for name in ("rollouts.jsonl", "tokens.jsonl"):
        lines = (tmp_path / "whole" / name).read_text().splitlines()
        assert (tmp_path / "kept" / name).read_text().splitlines() == [
            x for x in lines if json.loads(x)["step"] > 3
        ], name
    assert T.timeless(T.rows(tmp_path / "kept/metrics.jsonl")) == T.timeless(
        T.rows(tmp_path / "whole/metrics.jsonl")
    )
    shown = [
        [
            {k: v for k, v in row.items() if k != "sources"}
            for row in report.load(tmp_path / name)["ledger"]
        ]
        for name in ("whole", "kept")
    ]
    assert shown[0] == shown[1] and report.main([str(tmp_path / "kept")]) == 0
    T.train(
        world_dir, tmp_path / "kept", resume=True, **{**settings, "updates": 7, "update_every": 10}
    )
    T.train(
        world_dir, tmp_path / "whole", resume=True, **{**settings, "updates": 7, "update_every": 10}
    )
    out, err = capsys.readouterr()
    assert out.count("rollouts.jsonl no longer holds all since update 0") == 1
    assert set(re.findall(r"saved (.*)", out + err)) == {
        str(p) for p in tmp_path.glob("*/checkpoints/*")
    }


def test_the_ledger_of_a_run_still_going(out, tmp_path):
    """That of its last checkpoint, counted on with the rollouts since: the same as from the first."""
    shutil.copytree(out, tmp_path / "run")
    shutil.copy(tmp_path / "run/checkpoints/step_000004/ledger.json", tmp_path / "run/ledger.json")
    assert json.loads((tmp_path / "run/ledger.json").read_text())["step"] == 4
    assert report.load(tmp_path / "run")["ledger"] == report.load(out)["ledger"]
    assert banklife.make_ledger(tmp_path / "run") == json.loads((out / "ledger.json").read_text())


@pytest.mark.parametrize("keep, most", [(0, 0), (2, 3 * 4)])
def test_what_a_run_reads_of_its_logs_does_not_grow_with_it(
    keep, most, world_dir, tmp_path, monkeypatch
):
    """Not a line of them, or with --keep-rollouts 2 those of three updates at a checkpoint after each: 4 rollouts an update."""
    monkeypatch.setattr(R, "make_complete", T.FakeReplies)
    read, seen = sgsd.D.read_jsonl, [0]
    monkeypatch.setattr(
        sgsd.D, "read_jsonl", lambda path: (rows := read(path), seen.append(len(rows)))[0]
    )
    T.train(
        world_dir,
        tmp_path / "run",
        updates=8,
        update_every=2,
        checkpoint_every=1,
        keep_rollouts=keep,
    )
    assert max(seen) == most


def test_the_ledger_knows_an_entry_by_its_text(tmp_path):
    """Online updates give dynamic ids anew; update 5 still used the version before its own."""

    def save(step, *titles):
        entries = [
            {"skill_id": f"dyn_gen_{i}", "title": t, "principle": "p", "when_to_apply": "w"}
            for i, t in enumerate(titles)
        ]
        mistake = {
            "mistake_id": "err",
            "description": "d",
            "why_it_happens": "w",
            "how_to_avoid": "h",
        }
        S.SkillBank(entries, [mistake], {}).save(tmp_path / f"bank/step_{step:06d}.json")

    save(0, "a", "b")
    save(5, "b", "a", "c")
    rolls = [
        (5, 1, 0, 1),
        (6, 1, 0, -1),
        (5, -1, 1, 0),
        (6, -1, 1, -1),
    ]  # update, r, which skill, rho
    (tmp_path / "rollouts.jsonl").write_text(
        "".join(
            json.dumps({"step": step, "r": r, "pairs": [[f"dyn_gen_{i}", "err"]], "rho": [rho]})
            + "\n"
            for step, r, i, rho in rolls
        )
    )
    a, b, err, c = banklife.make_ledger(tmp_path)["entries"]
    assert (a["entry"]["title"], a["id"], a["first"], a["last"], a["retrieved"]) == (
        "a",
        "dyn_gen_1",
        0,
        5,
        2,
    )
    assert a["distilled"] == {"success": 1, "failure": 0} and a["reversed"] == {
        "success": 0,
        "failure": 1,
    }
    assert b["ignored"] == {"success": 0, "failure": 1} and b["reversed"] == {
        "success": 1,
        "failure": 0,
    }
    assert err["retrieved"] == 4 and c["retrieved"] == 0 and c["first"] == 5


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
def test_sentences_of_the_decisions(a, rho, r, words):
    assert report.sentence(a, rho, r) == words


def write_run(path, text="5", steps=(1,), per_step=1, tokens=4):
    """A run's files by hand, all of its texts `text`."""
    bank = S.SkillBank(
        [{"skill_id": "g", "title": text, "principle": text, "when_to_apply": text}],
        [{"mistake_id": "e", "description": text, "why_it_happens": text, "how_to_avoid": text}],
        {"source": text},
    )
    bank.save(path / "bank/step_000000.json")
    row = {
        "problem": text,
        "gold": text,
        "pred": text,
        "text": text,
        "r": 1,
        "truncated": False,
        "loss": 0.1,
        "pairs": [["g", "e"]],
        "rho": [1],
        "completion_ids": [1] * tokens,
    } | {k: [0.5] for k in ("s_g", "s_e", "alpha", "a_plain", "a", "losses")}
    gaps = {
        "mask": [1] * tokens,
        "delta": [[0.1234] * tokens],
        "credit": [[0.01] * tokens],
        "text": [text] * tokens,
    }
    named = [{"step": step, "problem_id": f"p{i}"} for step in steps for i in range(per_step)]
    (path / "config.json").write_text(json.dumps({"settings": {"model": text, "updates": 9}}))
    for name, lines in (
        ("rollouts", [n | row for n in named]),
        ("tokens", [n | gaps for n in named]),
        (
            "metrics",
            [
                {"step": s, "loss": 0.1, "grad_norm": float("inf"), "seconds": {"gen": 1.0}}
                for s in steps
            ],
        ),
    ):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return path


def test_text_is_text(tmp_path):
    html, data = page(
        report.write([write_run(tmp_path, SCRIPT + "</script><!-- \ud800")], tmp_path / "r.html")
    )
    template = (ROOT / "report_template.html").read_text()
    assert (
        html.count("<script") == template.count("<script")
        and "<img" not in html
        and "<!-- " not in html
    )
    assert data[0]["rollouts"][0]["text"][0].startswith(SCRIPT) and data[0]["metrics"][
        "grad_norm"
    ] == [None]
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|https?://(?!www\.w3\.org/2000/svg)",
        template,
    )


def test_the_page_stays_small_and_says_what_it_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MAX_BYTES", 100_000)
    html, (run,) = page(
        report.write(
            [write_run(tmp_path, steps=(1, 2, 3), per_step=8, tokens=500)], tmp_path / "r.html"
        )
    )
    assert len(html) < 100_000 and 3 <= len(run["rollouts"]) < 24 == run["audited"]
    assert len(run["left_out"].split(", ")) == 24 - len(run["rollouts"]) and {
        r["step"] for r in run["rollouts"]
    } == {1, 2, 3}
    monkeypatch.setattr(report, "MAX_POINTS", 10)
    thinned = page(report.write([write_run(tmp_path, steps=range(1, 96))], tmp_path / "r.html"))[1][
        0
    ]
    assert (
        thinned["every"] == 10
        and len(thinned["metrics"]["step"]) == 10
        and thinned["metrics"]["step"][-1] == 95
    )


def test_a_run_that_is_still_going(tmp_path, capsys):
    write_run(tmp_path / "a", steps=(1, 2))
    for name in ("rollouts", "tokens", "metrics"):  # torn by the moment
        with open(tmp_path / f"a/{name}.jsonl", "a") as f:
            f.write('{"step": 3, "probl')
    (tmp_path / "a/tokens.jsonl").unlink()
    assert report.main([str(tmp_path / "a")]) == 0 and page(tmp_path / "a/report.html")[1][0][
        "metrics"
    ]["step"] == [1, 2]
    capsys.readouterr()
    for wrong in (tmp_path, tmp_path / "nowhere"):
        assert report.main([str(wrong)]) == 2
        assert re.fullmatch(
            r"report: .*no metrics.jsonl or rollouts.jsonl of a run there.*\n",
            capsys.readouterr().err,
        )


def test_a_timeline_of_added_merged_and_pruned(tmp_path):
    def save(step, *titles):
        entries = [
            {
                "skill_id": f"dyn_gen_{i}",
                "title": t,
                "principle": "p",
                "when_to_apply": "w",
                "sources": s,
            }
            for i, (t, s) in enumerate(titles)
        ]
        S.SkillBank(entries, [], {"updates": [{"step": step}]}).save(
            tmp_path / f"bank/step_{step:06d}.json"
        )

    save(0, ("a", ["1"]), ("b", ["2"]), ("c", ["3"]), ("d", ["4"]))
    save(
        5, ("d", ["4"]), ("ab", ["1", "2"]), ("new", ["9"])
    )  # under other ids: an entry is its text
    first, event = report.timeline(report.versions(tmp_path))
    assert first["sizes"] == [4, 0] and not first["added"] and event["step"] == 5
    assert [e[1] for e in event["added"]] == ["new"] and [e[1] for e in event["pruned"]] == ["c"]
    assert [(e[1], [p[1] for p in e[2]]) for e in event["merged"]] == [("ab", ["a", "b"])]


def test_evaluations_of_checkpoints(tmp_path):
    row = {"avg": 0.5, "avg_low": 0.4, "avg_high": 0.6, "samples": 2}
    one, several, base = (
        tmp_path / "run" / name / "results.json"
        for name in ("checkpoints/step_000025/eval", "eval", "eval/base")
    )
    for path, settings, results in (
        (one, {"path": "runs/run/checkpoints/step_000025"}, {"aime": row}),
        (base, {"path": "Qwen/Qwen3-1.7B"}, {"aime": row}),
        (
            several,
            {},
            {
                "x/run/checkpoints/step_000050": {"aime": {**row, "avg": 0.7}},
                "x/other/checkpoints/step_000075": {"aime": row},
            },
        ),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"settings": settings, "results": results}))
    assert [(p["step"], p["avg"]) for p in report.evaluations(tmp_path / "run")] == [
        (0, 0.5),
        (25, 0.5),
        (50, 0.7),
    ]


def test_texts_of_tokens():
    tok = make_tokenizer()
    ids = tok.encode("é→🙂 \\boxed{5}\n\nx", add_special_tokens=False)
    texts = runlog.token_texts(tok, ids)
    assert (
        len(texts) == len(ids)
        and "".join(texts) == "é→🙂 \\boxed{5}\n\nx"
        and texts[:2] == ["", "é"]
        and "\\boxed" in texts
    )
    broken = tok.encode("🙂", add_special_tokens=False)[:2] * 3
    assert len(runlog.token_texts(tok, broken)) == 6


# ------------------------------------------------------------------------------------------------ explain, mirrors


def explained(world_dir, *more):
    flags = (
        {"model": "model", "encoder": "encoder", "bank": "bank.json"}
        if "--resume" not in more
        else {}
    )
    return sgsd.main(
        [*(x for k, v in flags.items() for x in (f"--{k}", str(world_dir / v))), *map(str, more)]
    )


def test_explain_takes_one_problem_through_the_method(world_dir, tmp_path, capsys):
    flags = (
        "--explain",
        "What is 2 plus 5?",
        "--answer",
        "7",
        "--num-teachers",
        3,
        "--max-new-tokens",
        20,
        "--lora-rank",
        4,
        "--out",
        tmp_path / "x",
    )
    assert explained(world_dir, *flags) == 0
    told = capsys.readouterr().out
    (path,) = tmp_path.glob("x-explain-*/report.html")
    _, (run,) = page(path)
    (roll,) = run["rollouts"]
    assert (
        roll["problem"] == "What is 2 plus 5?"
        and len(roll["teachers"]) == 3
        and "7: wrong, r = -1" in told
    )
    assert (
        all(t["says"] in told and t["skill"][1] in told for t in roll["teachers"])
        and not (tmp_path / "x").exists()
    )
    for wrong, word in (
        (flags[:2], "--answer"),
        (flags[:4], "--explain needs a skill bank"),
        (("--answer", "5"), "--explain"),
    ):
        model = ("--model", str(world_dir / "model"), "--encoder", str(world_dir / "encoder"))
        assert sgsd.main([*map(str, wrong), *model]) == 2
        err = capsys.readouterr().err
        assert err.startswith("sgsd: ") and err.count("\n") == 1 and word in err


def test_explain_leaves_a_run_as_it_was(world_dir, out, tmp_path, capsys):
    """--resume RUN: its settings, its bank, its last adapter."""
    shutil.copytree(out, tmp_path / "run")
    digest = lambda: {
        p: hashlib.sha256(p.read_bytes()).hexdigest()
        for p in (tmp_path / "run").rglob("*")
        if p.is_file()
    }  # noqa: E731
    before = digest()
    assert (
        explained(
            world_dir,
            "--resume",
            tmp_path / "run",
            "--explain",
            "What is 2 plus 5?",
            "--answer",
            "7",
        )
        == 0
    )
    assert before == digest() and "What is 2 plus 5?" in capsys.readouterr().out
    (path,) = tmp_path.glob("run-explain-*/rollouts.jsonl")
    (row,) = T.rows(path)
    known = ids_and_texts(S.SkillBank.load(out / "bank/bank.json"))
    assert len(row["rho"]) == 3 and all(i in known for pair in row["pairs"] for i in pair)
    run = T.make_run(world_dir, tmp_path / "run", resume=True, bank="", eps_a=0.4, batch_size=1)
    assert sgsd.load_checkpoint(run) == 6
    logps = R.token_logprobs(run.model, [row["prompt_ids"]], [row["completion_ids"]])[0]
    ctx = [
        sgsd.prompt_ids(run, S.render_teacher(p, row["problem"]), "t", teacher=True)
        for p in run.bank.retrieve(row["problem"], 3, run.embed)
    ]
    gaps = sgsd.score_teachers(run.model, ctx, row["completion_ids"]) - logps
    assert gaps.mean(1).tolist() == pytest.approx(row["a_plain"], abs=1e-5)


def test_mirrors_carry_the_same_names(world_dir, tmp_path, monkeypatch, capsys):
    sent, added = [], collections.defaultdict(dict)
    wandb = types.SimpleNamespace(
        init=lambda **_: None, log=lambda m, step: sent.append(m | {"step": step})
    )

    class Writer:
        def __init__(self, path, **_):
            assert path == str(tmp_path / "run" / "tensorboard")

        def add_scalar(self, name, value, step):
            added[step][name] = value

    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(
        sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer)
    )
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *_: (
            types.SimpleNamespace(origin="x") if name in ("wandb", "tensorboard") else find(name)
        ),
    )
    T.train(world_dir, tmp_path / "run", wandb=True, tensorboard=True, updates=2)
    logged = [
        {
            **{k: v for k, v in m.items() if k != "seconds"},
            **{f"seconds.{k}": v for k, v in m["seconds"].items()},
        }
        for m in T.rows(tmp_path / "run/metrics.jsonl")
    ]
    assert sent == logged == list(added.values())
    wandb.init = lambda **_: {}["not logged in"]
    with pytest.raises(UserError, match="--wandb: not started .*log in"):
        T.train(world_dir, tmp_path / "refused", wandb=True)
    assert not list((tmp_path / "refused").iterdir())  # so that the same command can be given again
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *_: None if name in ("wandb", "tensorboard") else find(name),
    )
    for flag in ("wandb", "tensorboard"):
        assert (
            explained(world_dir, "--" + flag, "--num-teachers", 3, "--out", tmp_path / "new") == 2
        )
        assert (
            f"--{flag}: the package is not installed" in capsys.readouterr().err
            and not (tmp_path / "new").exists()
        )


def test_every_metric_is_explained(out):
    readme = (ROOT / "README.md").read_text()
    rows = set(re.findall(r"`([\w.]+)`", " ".join(re.findall(r"^\| (`[^|]*) \|", readme, re.M))))
    for name in runlog.flat(T.rows(out / "metrics.jsonl")[-1]):
        assert name in rows or re.sub(r"_(success|failure|truncated)$", "", name) in rows, name


# ------------------------------------------------------------------------------------------------ a browser

PROBE = """<script>
const found = { errors: [] };
addEventListener("error", e => found.errors.push(e.message));
const visit = address => { history.replaceState(null, "", address); Object.assign(state, { run: "0", roll: "0", k: "sum", by: "delta" }); render(); };
const text = q => [...document.querySelectorAll(q)].map(e => e.textContent);
const fits = () => document.documentElement.scrollWidth <= innerWidth && !/NaN|undefined/.test(document.getElementById("main").innerHTML);
try {
  for (const view of Object.keys(VIEWS)) { visit("#view=" + view); found[view] = { fits: fits(), current: text("[aria-current]").join(), length: text("main").join().length }; }
  visit("#view=curves"); found.curves.paths = document.querySelectorAll("svg path").length;
  visit("#view=gate"); found.tokens = text("#text span"); found.says = text(".says"); found.masked = document.querySelectorAll("#text .masked").length;
  document.getElementById("text").dispatchEvent(new KeyboardEvent("keydown", { key: "End" })); found.last = text("#token")[0];
  visit("#view=gate&by=credit&k=1"); found.checked = document.querySelector("input[name=k]:checked").id;
  visit("#view=ledger"); found.ledger.rows = [...document.querySelectorAll("tbody tr")].map(r => [...r.cells].map(c => c.textContent));
  document.querySelector("td button").click(); found.memory = text(".memory"); found.opened = fits();
  found.focusable = [...document.querySelectorAll("main a, main button, main select, main input, main [tabindex]")].every(e => { e.focus(); return e.disabled || document.activeElement === e; });
  found.hacked = window.hacked || 0;
} catch (e) { found.errors.push(String(e.stack)); }
parent.postMessage(JSON.stringify([innerWidth, found]), "*");
</script></body>"""
FRAMES = """<body><iframe src="probe.html" style="width:390px;height:800px;border:0"></iframe><iframe src="probe.html" style="width:1280px;height:800px;border:0"></iframe>
<pre id="result"></pre><script>addEventListener("message", e => { document.getElementById("result").textContent += e.data + "\\n"; });</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("kind", ["run", "hostile"])
def test_in_a_browser(kind, out, tmp_path):
    """Every view at 390 and 1280 pixels: nothing is wider than the window, no script error, the logs' numbers, text as text."""
    run = out if kind == "run" else write_run(tmp_path / "run", SCRIPT)
    html = report.write([run], tmp_path / "r.html").read_text()
    (tmp_path / "probe.html").write_text(html.replace("</body>", PROBE))
    (tmp_path / "frames.html").write_text(FRAMES)
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1700,900",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=10000",
        "--dump-dom",
        (tmp_path / "frames.html").as_uri(),
    ]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    import html as markup

    results = [
        json.loads(markup.unescape(line))
        for line in re.search(r'<pre id="result">(.*?)</pre>', dom, re.S)[1].splitlines()
    ]
    assert sorted(width for width, _ in results) == [390, 1280]
    (data,) = page(tmp_path / "r.html")[1]
    first = data["rollouts"][0]
    for _, found in results:
        assert (
            not found["errors"] and found["hacked"] == 0 and found["focusable"] and found["opened"]
        )
        for view in ("curves", "gate", "ledger", "bank"):
            assert (
                found[view]["fits"]
                and found[view]["current"] == view.title()
                and found[view]["length"] > 50
            )
        assert found["tokens"] == [t.replace("\n", "↵\n") or "·" for t in first["text"]] and found[
            "masked"
        ] == first["mask"].count(0)
        assert found["says"] == [t["says"] for t in first["teachers"]] and found["last"].startswith(
            f"token {len(first['text'])} of"
        )
        rows = {row["id"]: row for row in data["ledger"]}
        assert len(found["ledger"]["rows"]) == len(data["ledger"])
        for cells in found["ledger"]["rows"]:
            row = rows[cells[0].split(" ")[0]]
            fates = [
                n
                for fate in ("distilled", "reversed", "ignored")
                for n in (sum(row[fate].values()), row[fate]["success"], row[fate]["failure"])
            ]
            assert [int(c) for c in cells[2:]] == [row["retrieved"], *fates]
        if kind == "run":
            assert (
                found["checked"] == "k1"
                and found["curves"]["paths"] > 20
                and found["memory"][0].startswith("problem p")
            )


def test_a_run_of_opsd_is_reported(world_dir, tmp_path):
    """A divergence has no credit (Eq. 20 is the gate's)."""
    flags = {"model": "model", "data": "data.jsonl"}
    more = [
        "--method",
        "opsd",
        "--updates",
        "1",
        "--batch-size",
        "2",
        "--audit-every",
        "1",
        "--max-new-tokens",
        "6",
        "--lora-rank",
        "4",
        "--out",
        tmp_path / "run",
    ]
    assert (
        sgsd.main(
            [
                *(x for k, v in flags.items() for x in (f"--{k}", str(world_dir / v))),
                *map(str, more),
            ]
        )
        == 0
    )
    assert report.main([str(tmp_path / "run")]) == 0 and (tmp_path / "run" / "report.html").exists()
