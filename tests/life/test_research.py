"""Scripts of research/ start, pages name what exists, and tables are what the scripts make."""

import importlib
import json
import random
import re
import shlex
import sys

import harder as lock
import pytest
import world
from conftest import ROOT

from extras import baselines
from lib import config

RESEARCH = ROOT / "research"
PAGES = sorted(RESEARCH.rglob("*.md"))
SCRIPTS = sorted(path for path in RESEARCH.glob("*/*.py"))


def load(path):
    return importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def results(name):
    return json.loads((RESEARCH / "methods" / f"{name}.json").read_text())["results"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_starts_and_its_help_works(path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as end:
        load(path).main()
    assert not end.value.code and "usage: " in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(RESEARCH)))
def test_a_page_links_to_and_names_only_files_that_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        assert "://" in target or (page.parent / target).exists(), target
    for path in re.findall(r"\bresearch/\w+/[\w.]+\.\w+", text):
        if not path.endswith("compare_lock_long_sgsd"):
            assert (ROOT / path).exists(), path


def test_every_question_has_a_page_with_a_command_and_a_row_in_the_index():
    index = (RESEARCH / "README.md").read_text()
    for folder in {path.parent for path in RESEARCH.glob("*/*.md")}:
        page = (folder / "README.md").read_text()
        assert re.search(r"\b(python|pytest) \S", page), folder
        assert f"({folder.name}/README.md)" in index


@pytest.mark.parametrize(
    "script, page, flags",
    [
        ("methods/compare", "methods", "--show"),
        ("polarity/polarity_tables", "polarity", ""),
        ("real_model/real_tables", "real_model", ""),
        ("skills_in_prompt/with_skills", "skills_in_prompt", ""),
    ],
)
def test_the_tables_of_a_page_are_what_its_command_prints(script, page, flags, capsys):
    load(RESEARCH / f"{script}.py").main(flags.split())
    text = (RESEARCH / page / "README.md").read_text()
    for table in capsys.readouterr().out.strip().split("\n\n"):
        assert all(line in text for line in table.splitlines())


@pytest.mark.parametrize("name, seeds", [("tiny", 5), ("lock", 5), ("lock_long", 3)])
def test_a_kept_comparison_shows_all_its_tables(name, seeds, capsys):
    compare = load(RESEARCH / "methods/compare.py")
    w, jobs = compare.WORLDS[name], results(f"compare_{name}")
    made_by = (jobs, list(w.methods), range(seeds))
    lines = compare.table(w, *made_by) + compare.by_steps(*made_by)
    lines += compare.equal_cost(w, *made_by)
    compare.main(["--show", str(RESEARCH / "methods" / f"compare_{name}.json")])
    assert capsys.readouterr().out == "\n".join(lines) + "\n"


def test_an_interval_of_a_claim_is_one_that_the_kept_jobs_give(capsys):
    compare = load(RESEARCH / "methods/compare.py")
    kept = [str(RESEARCH / f"methods/compare_{name}.json") for name in ("tiny", "lock")]
    compare.main(["--show", *kept])
    printed = capsys.readouterr().out.replace("%", "")
    page = (RESEARCH / "methods/claims.md").read_text()
    rows = "\n".join(re.findall(r"^\| \d+\. .*", page, re.M))
    intervals = set(re.findall(r"\d+\.\d ± \d+\.\d", rows))
    assert len(intervals) > 40
    assert {x for x in intervals if x not in printed} == {"14.0 ± 5.7"}  # base+skill less base


@pytest.mark.parametrize("file", ["compare_tiny", "compare_lock"])
def test_a_kept_job_is_of_todays_flags(file):
    """Else --have would not take it, and the comparison would make it anew."""
    compare = load(RESEARCH / "methods/compare.py")
    for name, job in results(file).items():
        assert job["flags"] == compare.METHODS.get(job["method"], ""), name


def test_every_training_of_the_real_model_parses(tmp_path):
    real_world = load(RESEARCH / "real_model/real_world.py")
    (tmp_path / "own.json").touch()
    for name in ("model", "encoder"):
        (tmp_path / name).mkdir()
    for name in ("bank.json", "train.jsonl"):
        (tmp_path / name).touch()
    for size in (real_world.GPU, real_world.CPU):
        for _, command in real_world.training(tmp_path, size).values():
            program, *words = shlex.split(command)
            if program == "sgsd.py":
                cfg, _ = config.parse(words, "")
            else:
                assert words[0] == "extras.baselines"
                cfg, _ = baselines.parse(words[1:])
            assert (cfg.steps, cfg.evolve_every) == (size.steps, 0)


def test_intervals_areas_and_equal_costs_by_hand():
    compare = load(RESEARCH / "methods/compare.py")
    # Mean .5, standard deviation .1, three seeds: 4.30 * .1 / sqrt(3) = .248
    assert compare.with_interval([0.4, 0.5, 0.6], "+") == "+50.0% ± 24.8%"
    # (0 + .5) / 2 * 5 = 1.25 and (.5 + 1) / 2 * 15 = 11.25, over 20 steps
    assert compare.area({0: 0.0, 5: 0.5, 20: 1.0}) == pytest.approx(12.5 / 20)
    assert compare.value_at([0, 5, 20], [0.0, 0.5, 1.0], 8) == pytest.approx(0.6)
    with pytest.raises(ValueError, match=r"21 is outside 0..20"):
        compare.value_at([0, 5, 20], [0.0, 0.5, 1.0], 21)


def test_the_aim_of_credit_by_hand():
    """Two steps of three are written. 'Right:' parts from 'So' behind the same ' a=b.'."""
    steps = load(RESEARCH / "polarity/steps.py")
    forms = ((" a=b. Right: c So 1", " a=b. So 2"), (" d So 3", " e So 4"), (" f So 5", " g So 6"))
    parts = []
    for right, wrong in forms:
        both = [(text[: text.index(" So")], int(text[-1])) for text in (right, wrong)]
        parts.append(world.Drawn("fence", "?", *both))
    tokens = ["1.", " a=", "b.", " Right", ": c", " So", " 1", "\n", "2.", " e", " So", " 4", "\n"]
    credit = [[0.0] * 13, [0.0] * 13]
    credit[0][3], credit[1][3], credit[0][9], credit[1][5] = 1.0, 2.0, 3.0, -4.0
    row = {"problem_id": "p", "text": "".join(tokens)}
    # (1 + 2) for the right step, -3 for the wrong one; squares 9 + 9 + 16 = 34, 18 where it counts
    measured = steps.aim(
        [row], [{"text": tokens, "credit": credit}], {"p": lock.Lock(tuple(parts))}
    )
    assert measured == (1, 1, 0.0, 0.0, pytest.approx(18 / 34))


def test_the_cost_sheet_by_hand():
    """Qwen3-1.7B. A layer has 2*2048*2048 (q, o) + 2*2048*1024 (k, v) + 3*2048*6144 (MLP) =
    50,331,648 weights, 28 layers have 1,409,286,144. Adapters of rank 64:
    28 * 64 * (2*4096 + 2*3072 + 3*8192) = 69,730,304. Head: 151,936 * 2048 = 311,164,928.
    Read per step: 2 * (1,409,286,144 + 311,164,928) + 4 * 69,730,304 = 3,719,823,360 bytes.
    Cache: 4 * 28 * 1024 = 114,688 bytes per token."""
    bench = load(RESEARCH / "speed/bench.py")
    c = bench.QWEN3["Qwen3-1.7B"]
    assert (c.projections, c.adapters, c.weights) == (1_409_286_144, 69_730_304, 3_719_823_360)
    parts = bench.paper_costs(c)
    layers, head = 1_479_016_448, 311_164_928  # weights, the layers with their adapters
    looking_back = 2 * 28 * 2048  # FLOPs of attention, times the tokens squared
    seen = 200 * 1024 + 1024 * 1024 / 2  # by a row of 1,024 tokens behind a prompt of 200
    decoding = 2 * (layers + head) * 1024 + looking_back * (1224**2 - 200**2)
    assert parts["decoding"] == (4 * decoding, 1024 * 3_719_823_360 + 4 * 114_688 * seen)
    teacher = 2 * layers * 1424 + looking_back * 1424**2 + 2 * head * 1024
    assert parts["teachers"][0] == 4 * 8 * teacher
    forward = 2 * layers * 1224 + looking_back * 1224**2 + 2 * head * 1024
    assert parts["student, forward"][0] == 4 * forward
    backward = 2 * forward + looking_back * 1224**2 + 2 * 69_730_304 * 1224
    assert parts["student, backward"][0] == 4 * backward
    sampling, learning = bench.grpo_parts(c, 8, 1024)  # 32 * 8 / 8 rollouts, 16 at a time
    assert (sampling.flops, sampling.steps) == (32 * decoding, 2 * 1024)
    assert learning.flops == 32 * (forward + backward)


def test_a_simulated_step_has_the_chance_of_its_curve():
    falls = load(RESEARCH / "polarity/falls.py")
    assert falls.straight({0: 0.0, 2: 0.4, 4: 0.2}) == pytest.approx([0.2, 0.4, 0.3, 0.2])
    draw = random.Random(0)
    for generations in (1, 8):
        mean = sum(falls.drawn(0.3, 8, generations, draw) for _ in range(2000)) / 2000
        assert mean == pytest.approx(0.3, abs=0.02)
