"""The same command continues a run: after a kill at any place, and with each kind of change.

`small_flags` is a command line of a run that makes its bank, saves after steps 2, 3, 4 and 6, and
evolves after 3 and 6; `uninterrupted` is such a run. `run(argv)` is a command in a process of its
own, which must end with 0; `killed_at` kills it before it writes a file. `killed` is a run that was
killed in step 6: five steps are in its logs, and the last checkpoint is that of step 4.
"""

import dataclasses
import itertools
import json
import shutil
import signal

import driver
import pytest
import small_run
from conftest import make_bank
from driver import contents, equal, killed_at, refused, rows, run, run_two
from small_run import main, small_flags

import sgsd
from lib import config, files, model
from lib.run import Run
from skills import SkillBank


@pytest.fixture(scope="module")
def killed_once(world_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("killed") / "run"
    killed_at("metrics.jsonl", small_flags(world_dir, out), nth=6)
    return out


@pytest.fixture
def killed(killed_once, tmp_path):
    """A copy of the run that was killed in step 6."""
    return shutil.copytree(killed_once, tmp_path / "run")


# ------------------------------------------------------------------------------------------ kills


def assert_is_a_part(out, whole):
    """What a kill has left is a part of the whole run."""
    for name, content in contents(out).items():
        if name.endswith(".jsonl") and name != "metrics.jsonl":  # which has times
            assert (whole / name).read_bytes().startswith(content), name
        elif ".tmp" not in name and ("bank/step" in name or name.endswith(".safetensors")):
            assert (whole / name).read_bytes() == content, name


def stored(out):
    return json.loads((out / "config.json").read_text())


@pytest.mark.parametrize("first, stride", [(6, 23), pytest.param(1, 4, marks=pytest.mark.long)])
def test_a_run_killed_everywhere_is_a_whole_one(first, stride, world_dir, tmp_path, uninterrupted):
    """Before every nth touch of a file. The command that continues it is killed twice, too.

    It goes on after the last checkpoint that is there; without one it starts with step 1.
    """
    for n in itertools.count(first, stride):
        out = tmp_path / str(n)
        argv = small_flags(world_dir, out)
        code, text = driver.ended(argv, driver.stopped_at(out, n))
        if code == 0:
            break
        assert code == -signal.SIGKILL, text[-3000:]
        assert_is_a_part(out, uninterrupted)
        for file in out.glob("*.jsonl"):  # as a kill within a write leaves it
            with open(file, "ab") as f:
                f.write(b'{"step": 1, "kind": "torn \xc3')
        for most in (30, 7):
            code, text = driver.ended(argv, driver.stopped_at(out, 1 + n % most))
            assert code in (0, -signal.SIGKILL), text[-3000:]
        last = max(files.by_step(out / "checkpoints"), default=0)
        run(argv)
        assert [0, *[x["step"] for x in stored(out)["continuations"]]][-1] == last
        equal(out, uninterrupted)
    assert n > 90


def assert_goes_on(world_dir, tmp_path, *kills, method="sgsd", **settings):
    """A run that is killed before it writes each of these files ends as one that was not."""
    whole, out = tmp_path / "whole", tmp_path / "run"
    run([method, *small_flags(world_dir, whole, **settings)])
    argv = [method, *small_flags(world_dir, out, **settings)]
    for file in kills:
        killed_at(file, argv)
    run(argv)
    equal(out, whole)


def test_a_run_whose_evolution_leaves_the_bank_as_it_was_goes_on(world_dir, tmp_path):
    kills = "bank/.step_000003", "step_000003/.bank.json"
    assert_goes_on(world_dir, tmp_path, *kills, success_gate=0.0)


def test_a_run_with_a_given_bank_goes_on(world_dir, tmp_path):
    kills = "metrics.jsonl", "bank/.step_000003"
    assert_goes_on(world_dir, tmp_path, *kills, bank=world_dir / "bank.json")


def test_a_run_without_a_bank_goes_on(world_dir, tmp_path):
    kills, settings = (".step_000002", ".step_000004"), {"generations": 2, "evolve_every": 1}
    assert_goes_on(world_dir, tmp_path, *kills, method="grpo", **settings)


def test_a_window_is_kept_between_evolutions_alone(world_dir, killed, tmp_path, uninterrupted):
    """Two solutions in each step since step 3. A run that is given such a bank drops it."""
    given = killed / "checkpoints/step_000004/bank.json"
    bank = SkillBank.load(given)
    assert len(bank.window) == 2
    for path in [*uninterrupted.glob("bank/*.json"), *uninterrupted.glob("*/step_000006/*.json")]:
        assert "window" not in json.loads(path.read_text())
    with small_run.opened(world_dir, tmp_path / "new", bank=str(given), num_teachers=1) as new:
        assert new.bank.window == [] and new.bank.general_skills == bank.general_skills


def test_a_bank_alone_stays_and_later_steps_use_it(world_dir, tmp_path, uninterrupted):
    out = tmp_path / "run"
    assert "%|" not in run(small_flags(world_dir, out, steps=0))  # a log has no bars
    before = contents(out / "bank")
    run(small_flags(world_dir, out, steps=0))
    assert contents(out / "bank") == before
    run(small_flags(world_dir, out))
    equal(out, uninterrupted)


def test_a_run_without_more_steps_has_the_weights_of_its_checkpoint(world_dir, killed):
    """As an evolution is still due, which the policy writes."""
    cfg = small_run.parsed(small_flags(world_dir, killed, steps=4))
    with Run.open(cfg, SkillBank.load, sgsd.student_prompt) as opened_run:
        weights = model.trained(opened_run.lm)
        assert any("lora_B" in name and p.any() for name, p in weights.items())


def test_memories_and_a_bank_are_used_again(world_dir, tmp_path, uninterrupted):
    """Also before the first step. Torn memories are named. A server may not make the rest of a bank
    that `generate` has begun (S27)."""
    out, memories = tmp_path / "run", tmp_path / "run/bank/memories.jsonl"
    argv, server = small_flags(world_dir, out), "--server=http://localhost:9/v1"
    killed_at("memories.jsonl", argv)
    refused(main, [*argv, server], "no reply")  # it was asked
    killed_at("replies.jsonl", argv, nth=2)
    assert not (out / "bank/step_000000.json").exists() and rows(memories)
    text = memories.read_text()
    memories.write_text(text + "{broken\n")
    refused(main, argv, "memories.jsonl:", "not JSON")
    memories.write_text(text + '{"reward": 1}\n')
    refused(main, argv, "memories.jsonl:", "problem_id")
    memories.write_text(text)
    refused(main, [*argv, "--cold-start=5"], "--cold-start", "new --out")
    refused(main, [*argv, server], "--server", "new --out")
    killed_at("metrics.jsonl", argv)
    refused(main, [*argv, "--cold-start=5"], "--cold-start 5", "new --out")
    assert "changed:" not in run(argv)
    equal(out, uninterrupted)


# ---------------------------------------------------------------------------------------- changes

MAY_CHANGE = """device rollout_rows score_tokens checkpoint_above checkpoint_every audit_every
    report_to steps server out problem_field answer_field answer_after""".split()


def other(rule, value):
    """Another value of a setting."""
    if rule.choices:
        return next(x for x in rule.choices if x != value)
    if isinstance(value, bool):
        return not value
    return f"another_{value}" if isinstance(value, str) else value + 1


def test_what_is_not_free_is_refused_and_so_are_fewer_steps(world_dir, killed, tmp_path):
    """In one line: all that differ, each with its new and the run's own value, a way out. Nothing
    is written."""
    cfg, before = small_run.parsed(small_flags(world_dir, killed)), contents(killed)

    def refused_with(words, **changes):
        def open_run(argv):
            with Run.open(dataclasses.replace(cfg, **changes), SkillBank.load, sgsd.student_prompt):
                pass

        refused(open_run, [], *words, "new --out")

    data = (world_dir / "data.jsonl").read_text()
    (tmp_path / "data.jsonl").write_text(data.replace('"answer": "3"', '"answer": "4"'))
    make_bank(tmp_path / "bank.json")
    values = {"data": str(tmp_path / "data.jsonl"), "bank": str(tmp_path / "bank.json")}
    values |= {"verifier": "small_run:Exact", "top_p": 0.5}
    rules = cfg.rules()
    assert {name for name, rule in rules.items() if rule.free} == {*MAY_CHANGE}
    for name in rules.keys() - MAY_CHANGE:
        value = getattr(cfg, name)
        new = values.get(name) or other(rules[name], value)
        refused_with([config.flag(name), new, value], **{name: new})
    refused_with(["--steps 2", "has made 4", "--tau-g 2"], steps=2, tau_g=2)
    assert contents(killed) == before


def test_what_is_free_is_recorded_and_changes_no_draw(world_dir, killed, uninterrupted):
    first = stored(killed)
    changes = {"checkpoint_every": 5, "rollout_rows": 1, "score_tokens": 500, "audit_every": 0}
    text = run(small_flags(world_dir, killed, steps=8, **changes))
    run(small_flags(world_dir, killed, steps=9, **changes))
    last = stored(killed)
    changes |= {"out": str(killed), "steps": 8}
    recorded = last["continuations"][0]["changed"]
    assert len(recorded) == len(changes)
    assert all(f"changed: {line}\n" in text for line in recorded)
    assert last["settings"] == first["settings"] | changes | {"steps": 9}
    assert [x["step"] for x in last["continuations"]] == [4, 8] and last["id"] == first["id"]
    rates = [m["learning_rate"] for m in rows(killed / "metrics.jsonl")]  # 1e-2 (1 - 4/8) at 5
    assert rates[4:] == pytest.approx([5e-3, 3.75e-3, 2.5e-3, 1.25e-3, 1e-2 / 9])
    ours, theirs = (rows(out / "rollouts.jsonl")[:10] for out in (killed, uninterrupted))
    assert [x["completion_ids"] for x in ours] == [x["completion_ids"] for x in theirs]


def test_two_processes_continue_the_run_of_one(world_dir, killed, uninterrupted):
    """That is recorded: the bank and the samples are the same, numbers up to rounding."""
    run_two(small_flags(world_dir, killed))
    assert "processes 2, where the run has 1" in stored(killed)["continuations"][0]["changed"][-1]
    equal(killed, uninterrupted, "bank/")
    for a, b in zip(rows(killed / "rollouts.jsonl"), rows(uninterrupted / "rollouts.jsonl")):
        assert (a["completion_ids"], a["rho"]) == (b["completion_ids"], b["rho"])


OWN_JUDGE = "import small_run\n\n\nclass Judge(small_run.CoinVerifier):\n    pass\n"


def test_a_run_goes_on_with_other_code_alone(world_dir, tmp_path, monkeypatch):
    """That is said. Not with other problems: a verifier may read other fields of them, too."""
    monkeypatch.syspath_prepend(tmp_path)
    judge, data, out = tmp_path / "own_judge.py", tmp_path / "data.jsonl", tmp_path / "run"
    judge.write_text(OWN_JUDGE)
    shutil.copy(world_dir / "data.jsonl", data)
    argv = small_flags(world_dir, out, steps=3, data=data, verifier="own_judge:Judge")
    killed_at("metrics.jsonl", argv, nth=3)
    problems, bank = data.read_text(), contents(out / "bank")
    data.write_text(problems.replace('"answer": "3"', '"answer": "3", "unit": "apples"'))
    refused(main, argv, out, "--data")
    data.write_text(problems)
    judge.write_text(OWN_JUDGE + "# edited\n")
    killed_at("metrics.jsonl", argv)
    (line,) = stored(out)["continuations"][0]["changed"]
    assert line == "the code or a prompt" and contents(out / "bank") == bank
    assert "changed:" not in run(argv)


def test_a_setting_that_an_edit_has_added_has_its_default(world_dir, killed):
    about, argv = stored(killed), small_flags(world_dir, killed)
    (killed / "config.json").write_text('{"program": "sgsd.py"}')
    refused(main, argv, killed, "older version", "another directory")
    for damaged in (5, None, about | {"settings": []}, about | {"continuations": {}}):
        (killed / "config.json").write_text(json.dumps(damaged))
        refused(main, argv, killed / "config.json")
    for name in ("report_to", "tau_g", "server"):  # the last one is a list
        del about["settings"][name]
    (killed / "config.json").write_text(json.dumps(about))
    refused(main, [*argv, "--tau-g=2"], "--tau-g 2.0, where the run has 1.0")
    (changed,) = [line for line in run(argv).splitlines() if line.startswith("changed:")]
    assert "--out" in changed  # the copy's


def test_a_run_that_goes_back_has_the_bank_of_then(world_dir, uninterrupted, tmp_path):
    """In bank/, too, and without the window that its checkpoint holds."""
    out = shutil.copytree(uninterrupted, tmp_path / "run")
    banks = files.by_step(out / "bank")
    of_step_3, of_step_6 = banks[3].read_bytes(), banks[6].read_bytes()
    assert (out / "bank/bank.json").read_bytes() == of_step_6 != of_step_3
    shutil.rmtree(out / "checkpoints/step_000006")
    cfg = small_run.parsed(small_flags(world_dir, out))
    with Run.open(cfg, SkillBank.load, sgsd.student_prompt) as back:
        assert back.step == 4 and len(back.bank.window) == 2
    assert (out / "bank/bank.json").read_bytes() == of_step_3 and not banks[6].exists()


def remove_logs(out):
    for name in ("rollouts", "tokens"):
        (out / f"{name}.jsonl").unlink()
    shutil.rmtree(out / "bank")


def halve_logs(out):
    """Each keeps its second half, from within a row on, and the bank's versions are others."""
    for path in [*out.glob("*.jsonl"), out / "bank/replies.jsonl"]:
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[len(lines) // 2 :]))
    for path in out.glob("bank/*.json"):
        make_bank(path)


@pytest.mark.parametrize("edit", [remove_logs, halve_logs])
@pytest.mark.parametrize("step", [0, 5, 6])
def test_a_log_is_no_state(edit, step, world_dir, killed, uninterrupted):
    """While a run is stopped or in a step, its logs and the bank's versions are removed or edited:
    weights and the bank are what they would have been. What is cut is said."""

    def step_fn(run, number):
        if number == step:
            edit(killed)
        return sgsd.train_step(run, number)

    if not step:
        edit(killed)
    text = run(small_flags(world_dir, killed), small_run.with_steps(step_fn))
    assert "metrics.jsonl is cut after step 4" in text
    equal(killed, uninterrupted, "checkpoints", "bank/bank.json")


def test_a_folder_that_is_no_run_of_this_program_is_refused(world_dir, killed):
    argv = small_flags(world_dir, killed)
    refused(main, ["ablations", *argv], "sgsd.py", "methods.ablations")
    shutil.rmtree(killed / "checkpoints")
    refused(main, argv, killed, "checkpoints")
    (killed / "config.json").unlink()
    before = contents(killed)
    refused(main, argv, killed, "holds bank, and no run")
    assert contents(killed) == before
