"""Each script of research/ runs with its smallest setting, and kept runs give the pages' tables."""

import dataclasses
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import driver
import pytest
from conftest import ROOT

from research.credit import measure as credit
from research.house import freeze
from research.methods import compare, field
from research.real_model import real_world
from research.slope import measure as slope
from research.speed import bench
from research.verdict import measure as verdict

TINY = ROOT / "tiny"
SMALL = compare.World(
    folder="",  # made in the test
    encoder=str(TINY / "encoder"),
    flags="--preset tiny --num-teachers 1",
    bank_flags="--cold-start 8",
    points=(1, 2),
    trial=1,
    rates=(1e-3,),
    tokens=64,
    batch=2,
    grpo_batch=1,
    samples=1,
    rows=16,
    evolve=0,
    other=1,
    skills=1,
)


def run(script, *argv):
    """What a script of research/ prints; it must succeed."""
    command = [sys.executable, str(ROOT / "research" / script), *map(str, argv)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def first_lines(source, target, count):
    lines = source.read_text().splitlines(keepends=True)[:count]
    target.write_text("".join(lines))


def small_world(folder):
    """The tiny world's model with few problems."""
    shutil.copytree(TINY / "model", folder / "model")
    for name, count in (("train", 40), ("valid", 4), ("test", 12)):
        first_lines(TINY / f"{name}.jsonl", folder / f"{name}.jsonl", count)
    return dataclasses.replace(SMALL, folder=str(folder))


def parsed(program, argv):
    """The settings of a training's command."""
    return driver.parsed(argv, program.removeprefix("methods.").removesuffix(".py"))


@pytest.mark.parametrize("name", compare.WORLDS)
def test_every_training_of_the_comparison_parses(name):
    w = compare.WORLDS[name]
    for method in compare.METHODS:
        job = compare.training(name, "a job", method, 1e-3, 0, points=True)
        cfg = parsed(compare.program_of(method), compare.settings_of(job, w).split())
        assert cfg.steps == w.points[-1] and cfg.max_new_tokens == w.tokens


@pytest.mark.parametrize("size", [real_world.GPU, real_world.CPU], ids=["gpu", "cpu"])
def test_every_training_of_the_real_model_parses(size, tmp_path):
    (tmp_path / "own.json").touch()
    for _, command in real_world.training(tmp_path, size).values():
        program, *words = shlex.split(command)
        if program == "-m":
            program, *words = words
        cfg = parsed(program, words)
        assert (cfg.steps, cfg.evolve_every) == (size.steps, 0)


@pytest.mark.long
def test_the_comparison_makes_its_curves_and_tables(tmp_path):
    (tmp_path / "world").mkdir()
    w = small_world(tmp_path / "world")
    out = tmp_path / "table"
    flags = f"--world small --methods grpo --seeds 2 --jobs 1 --work {tmp_path}/work --out {out}"
    for _ in range(2):  # the second time all jobs are there
        compare.main(flags.split(), {"small": w})
        made = json.loads(out.with_suffix(".json").read_text())
        for method in ("sgsd", "grpo"):
            for seed in (0, 1):
                job = made["results"][f"{method}-{seed}"]
                assert [*job["accuracy"]] == ["1", "2"] and len(job["last_scores"]) == 12
                assert job["generated_tokens"] > 0 and job["forward_tokens"] > 0
        assert made["rates"] == {"sgsd": 1e-3, "grpo": 1e-3}
        assert made["banks"]["bank-0"]["bank"]["general_skills"]
    assert "| grpo |" in out.with_suffix(".md").read_text() and out.with_suffix(".png").exists()


@pytest.mark.long
def test_the_field_is_measured_and_rows_that_are_there_are_kept(tmp_path):
    (tmp_path / "world").mkdir()
    w = small_world(tmp_path / "world")
    bank = json.loads((ROOT / "banks" / "word_problems.json").read_text())
    opsd = {"method": "opsd", "seed": 1, "accuracy": {"1": 0.0, "2": 0.5}}
    before = {
        "banks": {seed: {"seed": seed, "bank": bank} for seed in (0, 1, 100)},
        "rates": {"opsd": 1e-4},
        "results": {"opsd-1": opsd},
    }
    rows = ["opsd", *field.NEW]
    kept = field.measure(rows, range(2), 1, tmp_path / "work", w, before)
    assert kept["rates"] == {"opsd": 1e-4} | dict.fromkeys(field.NEW, 1e-3)
    assert kept["results"].pop("opsd-1") == opsd
    for name in ["opsd-0", *[f"{name}-{seed}" for name in field.NEW for seed in (0, 1)]]:
        run = kept["results"][name]
        assert [*run["accuracy"]] == [*run["figures"]] == ["1", "2"]
        assert run["processor_seconds"] > 0 and run["generated_tokens"] > 0


@pytest.mark.parametrize(
    "script, argv, page",
    [
        (field, [str(ROOT / "research/methods/field.json")], "methods/field.md"),
        (compare, [], "methods/table.md"),
        (credit, [], "credit/README.md"),
    ],
)
def test_the_tables_of_a_page_come_of_the_kept_runs(script, argv, page, capsys):
    script.main(["--show", *argv])
    text = (ROOT / "research" / page).read_text()
    for line in capsys.readouterr().out.splitlines():
        assert line in text


def test_kept_comparisons_can_be_shown(capsys):
    compare.main(["--show", *map(str, sorted((ROOT / "research/methods").glob("compare_*.json")))])
    assert "| grpo |" in capsys.readouterr().out


@pytest.mark.long
def test_weights_of_the_credit_are_measured(tmp_path):
    flags = "--seeds 0 --steps 1 --samples 1 --limit 2".split()
    printed = run("credit/measure.py", *flags, "--work", tmp_path)
    assert all(f"| {name} |" in printed for name in credit.ROWS)


@pytest.mark.long
def test_the_slopes_tables_come_of_the_kept_jobs(capsys):
    slope.main(["--world", "lock", "--table"])
    page = (ROOT / "research/slope/banks.md").read_text()
    banks, *_ = capsys.readouterr().out.split("\n\n")
    assert "| own-5 | 3 of 3 |" in banks and banks in page


@pytest.mark.long
def test_a_real_models_comparison_trains_and_tests(tmp_path):
    models, data, folder = tmp_path / "models", tmp_path / "data", tmp_path / "folder"
    for path in (models, data, folder):
        path.mkdir()
    (models / "qwen05").symlink_to(TINY / "model")
    (models / "encoder").symlink_to(TINY / "encoder")
    first_lines(TINY / "train.jsonl", data / "svamp.jsonl", 20)
    bank = ROOT / "banks" / "word_problems.json"
    run("real_model/real_world.py", folder, "--cpu", "--make", models, data, bank)
    printed = run("real_model/real_world.py", folder, "--cpu", "--steps", 2, "--methods", "sgsd")
    assert (folder / "runs/sgsd_1e-4/checkpoints/step_000002").is_dir()
    assert "sgsd_1e-4: 16 solutions" in printed and "folder--model | test |" in printed


@pytest.mark.long
def test_every_part_of_the_bench_measures(capsys):
    with driver.signals_restored():
        bench.main("all --shape tiny --repeats 1 --one-process".split())
    printed = capsys.readouterr().out
    for mode in bench.MODES:
        assert f"\n{mode}: " in printed, mode
    assert "| a step |" in printed and "| ours |" in printed and "failed" not in printed


@pytest.mark.long
def test_what_must_be_checked_on_a_gpu_runs_in_small_without_one(tmp_path):
    steps = ("bf16", "bf16_eval", "fp32", "fp32_again", "step", "large_masks", "large_step")
    printed = run("speed/gpu.py", tmp_path, "--cpu", "--steps", *steps)
    codes = dict(re.findall(r"^\| (\w+) \| (\w+) \| \d+ \|$", printed, re.M))
    assert codes == dict.fromkeys(steps, "0")
    assert "fp32 twice: 8 of 8 rollouts" in printed


@pytest.mark.long
def test_the_verdict_is_measured(tmp_path):
    for name in verdict.SETS:
        rows = []
        for i in range(700):
            row = {"problem": f"What is $x^2 + {i}$ at 0?", "answer": rf"\frac{{{i}}}{{1009}}"}
            rows.append(json.dumps(row) + "\n")
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    printed = run("verdict/measure.py", "--data", tmp_path, "--share", "0.005")
    assert "ordinary rewritings refused" in printed and "out of time: 0" in printed


@pytest.mark.long
def test_the_house_is_measured():
    printed = run("house/measure.py", ".", ".")
    assert "| files at the root |" in printed and "| floors" in printed


def test_every_run_of_the_freeze_is_listed_and_parses(tmp_path):
    printed = run("house/freeze.py", "--list", "--long")
    for command in itertools.chain.from_iterable(freeze.ALL.values()):
        assert command in printed
        words = command.replace("{out}", str(tmp_path)).split()
        words = words[5:] if "--standalone" in words else words  # torchrun
        program, *flags = words[1:] if words[0] == "-m" else words
        if program == "eval.py":
            driver.parsed(flags, "eval")
        else:
            parsed(program, flags)


def frozen(folder, loss, dynamic_id, replies, **columns):
    """A run's folder: a rollout of step 2, its bank with a dynamic entry, and replies."""
    (folder / "bank").mkdir(parents=True)
    bank = {"general_skills": [{"skill_id": dynamic_id, "title": "Add"}], "common_mistakes": []}
    (folder / "bank/step_000001.json").write_text(json.dumps(bank))
    row = {"step": 2, "pairs": [[dynamic_id, "err_001"]], "loss": loss, "rho": [], **columns}
    driver.write_rows(folder / "rollouts.jsonl", [row])
    lines = [{"step": 1, "prompt": x, "repeat": 0, "reply": x} for x in replies]
    driver.write_rows(folder / "bank/replies.jsonl", lines)
    return folder


def test_the_freeze_sees_a_number_and_overlooks_what_may_change(tmp_path):
    """Ids of dynamic entries, the order of replies, and columns of teachers where there is none."""
    old = frozen(tmp_path / "old", 0.5, "dyn_gen_001", "ab", alpha=[], advantage=1.0)
    new = frozen(tmp_path / "new", 0.5, "dyn_gen_001_002", "ba", advantage=1.0, index=0)
    found = freeze.Findings()
    freeze.compare_runs(old, new, found)
    assert found.cells() == ["1 rollouts, 1 banks, 2 replies", "0", ""]
    assert (found.may_go, found.added) == ({"rollouts.alpha"}, {"rollouts.index"})
    other = frozen(tmp_path / "other", 0.75, "gen_001", "aa", alpha=[])
    found = freeze.Findings()
    freeze.compare_runs(old, other, found)
    assert found.differences["rollouts.loss"] == 0.25 and found.lost == {"rollouts.advantage"}
    assert {"rollouts.pairs", "replies.reply"} <= {*found.differences}


@pytest.mark.long
@pytest.mark.parametrize("question", ("bound", "methods", "slope", "speed", "worlds"))
def test_a_question_with_tests_of_its_own_passes_them(question):
    command = [sys.executable, "-m", "pytest", "-m", "", str(ROOT / "research" / question)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
