"""Metrics and intervals by hand; the sets' table; checkpoints against a base; Base+Skill; killed and resumed; two processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import combinations

import numpy as np
import pytest
from conftest import ROOT, make_bank, make_model

import eval as E
import skills as S


def test_avg_by_hand():
    assert E.avg_at_k(np.array([[1, 0, 0, 1], [0, 0, 0, 1]], dtype=bool)) == 3 / 8


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_pass_is_the_mean_over_all_subsets(k):
    correct = np.array(
        [[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]], dtype=bool
    )
    want = np.mean(
        [np.mean([any(row[list(s)]) for s in combinations(range(5), k)]) for row in correct]
    )
    assert E.pass_at_k(correct, k) == pytest.approx(want)


def test_maj_by_hand():
    def same(gold, pred):
        return pred is not None and float(gold) == float(pred)

    preds = [["1", "2.0", "2"], [None, None, "3"], ["5", "6", None], [None, None, None]]
    assert (
        E.maj_at_k(preds, ["2", "3", "5", "7"], same) == 3 / 4
    )  # 2 by two votes, 3 by one, 5 came first, nobody voted
    assert E.maj_at_k([["1", "2", "2"]], ["1"], same) == 0


def test_bad_metric_input():
    for bad in (np.zeros((0, 3)), np.zeros(3), np.zeros((2, 0))):
        with pytest.raises(ValueError, match="correct_PK must be"):
            E.avg_at_k(bad)
    with pytest.raises(ValueError, match=r"pass_at_k: got k = 4, must be in 1..3"):
        E.pass_at_k(np.ones((2, 3)), 4)
    with pytest.raises(ValueError, match="maj_at_k: got 1 rows"):
        E.maj_at_k([["1"]], ["1", "2"], lambda g, p: True)


def test_interval_covers_its_mean_and_narrows():
    rng = np.random.default_rng(1)
    scores = rng.random(200)
    low, high = E.bootstrap_interval(scores)
    assert low < scores.mean() < high
    assert high - low == pytest.approx(
        2 * 1.96 * scores.std() / 200**0.5, rel=0.1
    )  # the normal interval


def test_interval_of_several_sets_weighs_them_alike():
    """A set of 1,000 sure problems and one of 10 coin flips: the mean's spread is half of the coin's, (1/4 / 10)^.5 / 2 = .079."""
    low, high = E.bootstrap_interval(np.ones(1000), np.array([0.0, 1.0] * 5))
    assert (low + high) / 2 == pytest.approx(0.75, abs=0.02) and high - low == pytest.approx(
        2 * 1.96 * 0.079, rel=0.15
    )


def test_pairing_removes_what_policies_share():
    """Hard and easy problems alike for both, one policy better by .1 everywhere: the difference is certain, neither mean is."""
    base = np.linspace(0, 0.9, 30)
    table = {"base": {"d": {"avg": 0.45}}, "new": {"d": {"avg": 0.55}}}
    E.tabulate(table, {"base": {"d": base}, "new": {"d": base + 0.1}})
    assert "diff" not in table["base"]["d"] and table["new"]["d"]["avg_low"] < 0.48
    assert [table["new"]["d"][k] for k in ("diff", "diff_low", "diff_high")] == pytest.approx(
        [0.1] * 3
    )


def test_best_beside_last():
    avg = {
        "base": 0.9,
        "r/checkpoints/1": 0.3,
        "r/checkpoints/2": 0.5,
        "r/checkpoints/3": 0.4,
        "q/only": 0.8,
    }
    scores = {p: {"d": np.full(4, a), "e": np.full(4, a)} for p, a in avg.items()}
    tables = {p: {n: {"avg": a} for n in ("d", "e")} for p, a in avg.items()}
    E.tabulate(tables, scores)
    (choice,) = E.selections(tables, scores, list(avg)[1:])
    assert (choice["of"], choice["best"][-1], choice["last"][-1], choice["checkpoints"]) == (
        "r/checkpoints",
        "2",
        "3",
        3,
    )
    assert (choice["best_avg"], choice["last_avg"], choice["diff"]) == pytest.approx(
        (0.5, 0.4, 0.1)
    )


ROWS = {  # what each hub set holds, in its own field names and types
    "HuggingFaceH4/aime_2024": {
        "id": 60,
        "problem": " p ",
        "solution": "s",
        "answer": "025",
        "url": "u",
        "year": "2024",
    },
    "yentinglin/aime_2025": {"id": "0", "problem": " p ", "answer": 25},
    "MathArena/hmmt_feb_2025": {"problem_idx": 1, "problem": "p", "answer": "\\frac{1}{2}"},
    "HuggingFaceH4/MATH-500": {
        "problem": "p",
        "solution": "s",
        "answer": "\\pi",
        "unique_id": "test/1",
    },
    "math-ai/amc23": {"id": 0, "question": "p", "answer": 27.0, "url": "u"},
    "openai/gsm8k": {"question": "p", "answer": "2+2=<<2+2=4>>4\n#### 1,234"},
}


@pytest.mark.parametrize(
    "name,gold",
    [
        ("aime24", "025"),
        ("aime25", "25"),
        ("hmmt25", "\\frac{1}{2}"),
        ("math500", "\\pi"),
        ("amc23", "27"),
        ("gsm8k", "1,234"),
    ],
)
def test_sets_by_name(name, gold, monkeypatch):
    import datasets

    splits = {"HuggingFaceH4/MATH-500": "test", "math-ai/amc23": "test", "openai/gsm8k": "test"}

    def load(hub, config=None, *, split):
        assert split == splits.get(hub, "train") and config == ("main" if "gsm8k" in hub else None)
        return [ROWS[hub]] * 2

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert E.load_set(name, "unused") == [E.R.Problem(str(i), "p", gold) for i in range(2)]
    monkeypatch.setitem(ROWS, E.SETS[name][0], {"text": "p"})
    with pytest.raises(E.UserError, match=f"{name}: .* not read .KeyError.*a JSONL"):
        E.load_set(name, "unused")


def test_the_papers_three_are_the_default(world_dir, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(
        E,
        "load_set",
        lambda name, split: (
            asked.append(name) or E.R.load_problems(str(world_dir / "data.jsonl"))[0]
        ),
    )
    assert (
        E.main(
            [
                str(world_dir / "model"),
                "--limit",
                "1",
                "--samples",
                "1",
                "--max-new-tokens",
                "4",
                "--out",
                str(world_dir / "three"),
            ]
        )
        == 0
    )
    assert (
        asked == ["aime24", "aime25", "hmmt25"]
        and "| model | (mean) | 3 | 0.0% | 0.0%-0.0% |" in capsys.readouterr().out
    )


def args(world_dir, out, *more):
    return [
        str(world_dir / "model"),
        "--data",
        str(world_dir / "data.jsonl"),
        "--samples",
        "3",
        "--max-new-tokens",
        "8",
        "--rows",
        "5",
        "--out",
        str(out),
        "--device",
        "cpu",
        *more,
    ]


def samples(out):
    return sorted(
        (json.loads(x) for x in open(out / "samples.jsonl")), key=lambda s: (s["id"], s["sample"])
    )


def test_a_killed_evaluation_goes_on(world_dir, tmp_path, capsys):
    assert E.main(args(world_dir, tmp_path / "a")) == 0
    assert "| model | data | 12 | 0.0% |" in capsys.readouterr().out
    whole = samples(tmp_path / "a")
    assert len(whole) == 36 and len({tuple(s["text"]) for s in whole}) > 30
    (tmp_path / "b").mkdir()
    lines = (tmp_path / "a/samples.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "b/samples.jsonl").write_text(
        "".join(lines[:13]) + lines[13][:40]
    )  # torn by a kill
    (tmp_path / "b/settings.json").write_text((tmp_path / "a/settings.json").read_text())
    assert E.main(args(world_dir, tmp_path / "b")) == 0
    assert samples(tmp_path / "b") == whole
    assert (tmp_path / "a/results.json").read_bytes() == (tmp_path / "b/results.json").read_bytes()
    assert E.main(args(world_dir, tmp_path / "b", "--temperature", "0.5")) == 2
    assert "other settings" in capsys.readouterr().err


def test_two_processes_give_the_samples_of_one(world_dir, tmp_path):
    assert E.main(args(world_dir, tmp_path / "1")) == 0
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=2",
            ROOT / "eval.py",
            *args(world_dir, tmp_path / "2"),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=150,
    )
    assert run.returncode == 0, run.stderr[:2000] + run.stderr[-2000:]
    assert samples(tmp_path / "1") == samples(tmp_path / "2")
    assert (tmp_path / "1/results.json").read_bytes() == (tmp_path / "2/results.json").read_bytes()


def test_only_some_problems(world_dir, tmp_path):
    assert E.main(args(world_dir, tmp_path, "--limit", "2")) == 0
    assert (
        len(samples(tmp_path)) == 6
        and json.loads((tmp_path / "results.json").read_text())["results"][
            str(world_dir / "model")
        ]["data"]["problems"]
        == 2
    )


def test_a_problem_that_changed_is_sampled_anew(world_dir, tmp_path):
    data = tmp_path / "d.jsonl"
    for answer in ("3", "4"):
        data.write_text(json.dumps({"problem": "What is 1 plus 2?", "answer": answer}) + "\n")
        assert (
            E.main(
                [
                    str(world_dir / "model"),
                    "--data",
                    str(data),
                    "--samples",
                    "1",
                    "--max-new-tokens",
                    "4",
                    "--out",
                    str(tmp_path / "o"),
                ]
            )
            == 0
        )
        assert [s["gold"] for s in samples(tmp_path / "o")] == [answer]


def adapter(world_dir, path, seed):
    import torch
    from peft import LoraConfig, get_peft_model

    model = E.R.load_model(str(world_dir / "model"), torch.device("cpu"))[0]
    torch.manual_seed(seed)
    get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    ).save_pretrained(path)


def test_a_base_against_all_checkpoints_of_a_run(world_dir, tmp_path, capsys, monkeypatch):
    for step in (1, 2):
        adapter(world_dir, tmp_path / f"run/checkpoints/step_00000{step}", step)
    adapter(world_dir, tmp_path / "foreign", 3)
    base, more = args(world_dir, tmp_path / "base")[0], args(world_dir, tmp_path / "base")[1:-4]
    paths = [base, str(tmp_path / "run"), str(tmp_path / "foreign")]
    try:
        assert E.main([*paths, *more]) == 0
        out = capsys.readouterr().out
        table = json.loads((tmp_path / "run/eval/results.json").read_text())
        steps = [str(tmp_path / f"run/checkpoints/step_00000{i}") for i in (1, 2)]
        assert list(table["results"]) == [base, *steps, paths[2]]
        assert (
            [x["best"] for x in table["selection"]] == [steps[0]]
            and "of 2 checkpoints" in out
            and "best was picked on these problems" in out
        )
        texts = [
            [x["text"] for x in samples(p)]
            for p in (
                world_dir / "model/eval",
                *(tmp_path / f"run/checkpoints/step_00000{i}/eval" for i in (1, 2)),
                tmp_path / "foreign/eval",
            )
        ]
        assert (
            all(len(t) == 36 for t in texts) and len({tuple(t) for t in texts}) == 4
        )  # each policy sampled, in a folder of its own
        assert (
            table["results"][paths[2]]["data"]["diff"] == 0.0 and out.count("+0.0% to +0.0%") == 4
        )
        monkeypatch.setattr(
            E.R, "load_model", lambda *_, **__: pytest.fail("nothing is left to sample")
        )
        assert (
            E.main([steps[1], *more]) == 0
        )  # the same samples again, in the checkpoint's own table
        assert (tmp_path / "run/checkpoints/step_000002/eval/results.json").exists()
        adapter_file = tmp_path / "foreign/adapter_model.safetensors"
        shutil.copy(f"{steps[0]}/adapter_model.safetensors", adapter_file)
        capsys.readouterr()
        assert (
            E.main([*paths, *more]) == 2
            and "foreign/eval: holds an evaluation with other settings" in capsys.readouterr().err
        )
    finally:
        shutil.rmtree(f"{base}/eval")


def test_base_skill_is_the_teachers_block_with_all_pairs():
    bank = make_bank()
    pairs = [S.SkillPair(g, e, 1.0, 1.0) for g, e in zip(bank.general_skills, bank.common_mistakes)]
    assert S.render_skills(pairs[:1], "What is {skills} \\boxed{}?") == S.render_teacher(
        pairs[0], "What is {skills} \\boxed{}?"
    )
    text = S.render_skills(pairs, "P")
    head, mistakes = text.split("### Mistakes to Avoid\n")
    assert [
        head.count("- **"),
        head.count("_Apply when"),
        mistakes.count("- **Don't**"),
        mistakes.count("**Instead**"),
    ] == [4] * 4
    assert head.index("Use add") < head.index("Use carry") and text.endswith(
        "\n\nProblem: P\n\n" + S.template("student").split("\n\n")[1]
    )


def test_skills_reach_a_prompt_only_when_asked_for(world_dir, tmp_path, monkeypatch, capsys):
    """With --skills every prompt holds the pairs retrieved for its problem; without, no bank is read and every prompt is the student's."""
    seen, keep = [], E.R.chat_ids
    monkeypatch.setattr(
        E.R, "chat_ids", lambda tok, text, **kw: seen.append(text) or keep(tok, text, **kw)
    )
    skilled = ["--skills", str(world_dir / "bank.json"), "--encoder", str(world_dir / "encoder")]
    assert E.main(args(world_dir, tmp_path / "a", *skilled, "--num-skills", "2")) == 0
    bank, embed = (
        S.SkillBank.load(world_dir / "bank.json"),
        S.load_encoder(str(world_dir / "encoder"), "cpu"),
    )
    problems = [json.loads(x)["problem"] for x in open(world_dir / "data.jsonl")]
    assert {*seen} == {S.render_skills(bank.retrieve(p, 2, embed), p) for p in problems}
    settings = json.loads((tmp_path / "a/settings.json").read_text())
    assert settings["num_skills"] == 2 and settings["bank"]
    assert (
        E.main(args(world_dir, tmp_path / "a")) == 2 and "other settings" in capsys.readouterr().err
    )
    assert (
        E.main(args(world_dir, tmp_path / "b", *skilled)) == 2
        and "--num-skills 8: must be in 1..4" in capsys.readouterr().err
    )
    monkeypatch.setattr(S.SkillBank, "load", lambda *_: pytest.fail("a bank was read"))
    seen.clear()
    assert E.main(args(world_dir, tmp_path / "c")) == 0
    assert {*seen} == {S.render_student(p) for p in problems}
    words = [str(v) for key in S.FIELDS for e in getattr(bank, key) for v in e.values()]
    assert not any(w in text for text in seen for w in [*words, "guidance"])


def test_a_sample_is_a_function_of_seed_problem_and_number(world_dir, tmp_path):
    """Neither the other problems, nor a problem's id or set, nor how many samples there are, has a part in a sample."""
    rows = [json.loads(x) for x in open(world_dir / "data.jsonl")]
    (tmp_path / "some.jsonl").write_text(
        "".join(
            json.dumps({"problem": r["problem"], "answer": r["answer"]}) + "\n"
            for r in reversed(rows[3:7])
        )
    )
    assert E.main(args(world_dir, tmp_path / "a")) == 0
    assert (
        E.main(
            [
                *args(world_dir, tmp_path / "b", "--rows", "2", "--samples", "2"),
                "--data",
                str(tmp_path / "some.jsonl"),
            ]
        )
        == 0
    )
    texts = {(s["id"], s["sample"]): s["text"] for s in samples(tmp_path / "a")}
    assert (
        all(
            s["text"] == texts[f"p{6 - int(s['id'])}", s["sample"]] for s in samples(tmp_path / "b")
        )
        and len(samples(tmp_path / "b")) == 8
    )


def test_kill_9_and_go_on(world_dir, tmp_path):
    """A real process, killed while it samples: what it had finished is kept, and the table is that of a run never killed. One row at a
    time, so that this is exact: who else is in a batch can move a draw by rounding, once in tens of thousands of tokens."""
    long = ["--max-new-tokens", "40", "--samples", "5", "--rows", "1"]
    assert E.main(args(world_dir, tmp_path / "whole", *long)) == 0
    command = [sys.executable, str(ROOT / "eval.py"), *args(world_dir, tmp_path / "killed", *long)]
    log = tmp_path / "killed/samples.jsonl"
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 100
    while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    before = log.read_text()
    assert 0 < before.count("\n") < 60 and not (tmp_path / "killed/results.json").exists()
    assert E.main(args(world_dir, tmp_path / "killed", *long)) == 0
    assert log.read_text().startswith(before[: before.rfind("\n") + 1])
    assert samples(tmp_path / "killed") == samples(tmp_path / "whole")
    assert (tmp_path / "killed/results.json").read_bytes() == (
        tmp_path / "whole/results.json"
    ).read_bytes()


def test_other_weights_at_the_same_place_are_not_the_same_policy(world_dir, tmp_path, capsys):
    """Local weights count by content: a model that was made anew is refused, one that was moved goes on."""
    model = tmp_path / "model"
    shutil.copytree(world_dir / "model", model)
    flags = [
        "--data",
        str(world_dir / "data.jsonl"),
        "--limit",
        "2",
        "--samples",
        "1",
        "--max-new-tokens",
        "4",
        "--out",
        str(tmp_path / "out"),
    ]
    assert E.main([str(model), *flags]) == 0
    before = (tmp_path / "out" / "samples.jsonl").read_bytes()
    assert (
        E.main([str(model.rename(tmp_path / "moved")), *flags]) == 0
        and (tmp_path / "out" / "samples.jsonl").read_bytes() == before
    )
    make_model(seed=1).save_pretrained(tmp_path / "moved")
    capsys.readouterr()
    assert (
        E.main([str(tmp_path / "moved"), *flags]) == 2
        and "other settings" in capsys.readouterr().err
    )


def test_two_policies_never_share_a_folder(world_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir("/")
    model = str(world_dir / "model")
    assert (
        E.main(
            [
                model,
                model.lstrip("/"),
                "--data",
                str(world_dir / "data.jsonl"),
                "--out",
                str(tmp_path),
            ]
        )
        == 2
    )
    assert "would keep their samples in one folder" in capsys.readouterr().err
