"""Whole commands that are refused: exit code 2, one line that names the fault, nothing written.

All that can be wrong is listed beside its reader, such as problems in test_problems.py. Here are,
besides, lengths, foreign adapters and damaged checkpoints.
"""

import pathlib
import shutil

import driver
import peft
import pytest
import torch
from conftest import save_model
from driver import completes, contents, flags, opened, refused, rows, small_flags, write_rows

import sgsd
from lib import files, model

COMMANDS = [  # settings of a run ({w} has models), and words of the line
    ({"data": "no_answer.jsonl", "model": "no/such"}, "no_answer.jsonl:1"),
    ({"bank": "torn.json", "model": "no/such"}, "bank torn.json"),
    ({"encoder": "{w}/model", "model": "no/such"}, "encoder {w}/model"),
    ({"server": "http://127.0.0.1:9/v1", "bank": ""}, "http://127.0.0.1:9/v1"),
    ({"server": "http://a/v1", "adapter": "x"}, "and --adapter begins with other weights"),
]


@pytest.mark.parametrize("changes, words", COMMANDS)
def test_a_wrong_input_is_one_line(changes, words, world_dir, tmp_path, capsys, monkeypatch):
    """What can be known without the model is said before it is loaded."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("no_answer.jsonl").write_text('{"problem": "p"}\n')
    pathlib.Path("torn.json").write_text("{")
    before = contents(world_dir)
    changes = {name: value.format(w=world_dir) for name, value in changes.items()}
    refused(capsys, sgsd.main, flags(world_dir, "run", **changes), words.format(w=world_dir))
    assert not contents(tmp_path / "run")
    assert contents(world_dir) == before and not [*world_dir.rglob(files.LOCK)]


# ------------------------------------------------------------------- what is too long (S35)


def test_a_long_context_is_written_with_all_digits(world_dir, tmp_path, capsys):
    place = str(save_model(tmp_path / "model", max_position_embeddings=2**20))
    with opened(world_dir, tmp_path / "run", model=place, max_new_tokens=2**20):
        assert "context of 1048576)" in capsys.readouterr().out


GREEK = {"id": "greek", "problem": "πόσα " * 60, "answer": "5"}  # 300 characters, 540 tokens
LATIN = {"id": "latin", "problem": "how many " * 40, "answer": "5"}  # 360 of each


def test_long_problems_are_left_out_and_counted(world_dir, tmp_path, capsys):
    """By tokens of the plain prompt, not by characters; by the setting, and by the context."""
    data, short = tmp_path / "data.jsonl", str(tmp_path / "short")
    write_rows(data, [GREEK, LATIN])
    save_model(short, max_position_embeddings=500)
    changes = {"data": str(data), "bank": "", "cold_start": 1, "num_teachers": 1}
    with opened(world_dir, tmp_path / "all", **changes) as run:
        greek, latin = (len(sgsd.student_prompt(run, x.problem)) for x in run.problems)
    assert "left out" not in capsys.readouterr().out
    left = 500 - latin
    cases = [(0, {"max_prompt_tokens": greek - 1})]
    cases += [(0, {"model": short, "max_new_tokens": left})]
    cases += [(1, {"model": short, "max_new_tokens": left + 1})]
    for i, (count, more) in enumerate(cases):
        with opened(world_dir, tmp_path / f"{i}", **changes, **more) as run:
            assert [x.id for x in run.problems] == ["latin"]
        (line,) = [x for x in capsys.readouterr().out.splitlines() if "left out" in x]
        assert "1 of 2 problems" in line and f"leaves {count} fewer" in line
        assert len(files.read_json(run.out / "problems.json")) == 1
    with opened(world_dir, tmp_path / "both", **changes, max_new_tokens=4096 - latin) as run:
        assert len(run.problems) == 2
    printed = capsys.readouterr().out
    assert "0 of 2 problems are left out" in printed and "leaves 1 fewer" in printed
    changes["max_prompt_tokens"] = latin - 1
    words = "2 of 2 problems", f"more than {latin - 1} tokens", "--max-prompt-tokens"
    refused(capsys, driver.main, flags(world_dir, tmp_path / "run", **changes), *words)
    assert not contents(tmp_path / "run")


TEACHERS = [  # a method and its flags
    "sgsd --bank {w}/bank.json",
    "opsd --teacher-field hint",
    "rlsd --teacher-field hint",
    "rlsd --bank {w}/bank.json",
    "sdpo",
    "ablations --bank {w}/bank.json --answer-pi --teacher-field hint",
    "ablations --bank {w}/bank.json --objective jsd",
]


@pytest.mark.parametrize("command", TEACHERS)
def test_teachers_that_do_not_fit_the_context_are_left_out(command, world_dir, tmp_path, capsys):
    """None of them fits beside the solution: the step is made all the same, and a line says why."""
    data, short, out = tmp_path / "data.jsonl", tmp_path / "short", tmp_path / "run"
    write_rows(data, [LATIN | {"hint": "count " * 100}])
    save_model(short, max_position_embeddings=600)
    argv = command.format(w=world_dir).split()
    argv += [f"--data={data}", f"--out={out}", "--steps=2", "--batch-size=1", "--audit-every=1"]
    argv += [f"--model={short}", "--device=cpu", "--verifier=driver:UnevenVerifier"]
    argv += [f"--encoder={world_dir}/encoder", "--num-teachers=3", "--max-new-tokens=200"]
    completes(driver.main, argv)
    assert capsys.readouterr().out.count("teachers are left out") == 1
    logged = rows(out / "rollouts.jsonl")
    assert logged and not any(row.get("rho") or row.get("first_gap") for row in logged)
    assert [m["no_teachers"] for m in rows(out / "metrics.jsonl")] == [len(logged) / 2] * 2
    assert all(m["grad_norm"] == 0 or "rlsd" in command for m in rows(out / "metrics.jsonl"))


def test_a_solution_without_room_is_empty_and_a_run_goes_on(world_dir, tmp_path, capsys):
    """The plain prompt fits; the seed problem's has more words, and fills the context."""
    data, short = tmp_path / "data.jsonl", str(tmp_path / "short")
    write_rows(data, [LATIN | {"problem": "What is 1 plus 4? " * 20}])
    changes = {"data": str(data), "bank": "", "cold_start": 1, "num_teachers": 1, "steps": 1}
    with opened(world_dir, tmp_path / "all", **changes) as run:
        length = len(sgsd.student_prompt(run, run.problems[0].problem))
    save_model(short, max_position_embeddings=length + 1)
    with opened(world_dir, tmp_path / "run", **changes, model=short) as run:
        bank = sgsd.make_bank(run)
    (memory,) = rows(run.out / "bank/memories.jsonl")
    assert memory["truncated"] and memory["reward"] and bank.general_skills


# ---------------------------------------------------------------------------- foreign adapters

FOREIGN = [  # more of PEFT's settings; the one that the line names
    ({"alpha_pattern": {"q_proj": 64}}, "alpha_pattern"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights"),  # changes the base, too
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"use_rslora": True, "init_lora_weights": "gaussian"}, ""),
]


@pytest.mark.parametrize("more, name", FOREIGN)
def test_a_run_begins_with_what_an_adapter_computes_or_refuses_it(
    more, name, world_dir, tmp_path, capsys
):
    """Training reads only rank, alpha and rsLoRA of its settings. Evaluation reads all."""
    base, folder = str(world_dir / "model"), str(tmp_path / "adapter")
    lm, _ = model.load_model(base, "cpu")
    torch.manual_seed(0)
    adapted = peft.get_peft_model(lm, peft.LoraConfig(r=4, target_modules="all-linear", **more))
    for p in model.trained(adapted).values():
        p.data += 0.1 * torch.randn(p.shape)
    adapted.save_pretrained(folder)
    ids = torch.arange(9)[None]
    want = adapted(input_ids=ids).logits
    loaded = model.load_adapter(model.load_model(base, "cpu")[0], folder)
    torch.testing.assert_close(loaded(input_ids=ids).logits, want)
    changes = {"adapter": folder, "steps": 1}
    if name:
        argv = flags(world_dir, tmp_path / "run", **changes)
        refused(capsys, sgsd.main, argv, f"adapter {folder}: {name}", "merge")
    else:
        with driver.opened(world_dir, tmp_path / "run", **changes) as run:
            torch.testing.assert_close(run.lm(input_ids=ids).logits, want)


# ---------------------------------------------------------------------- a damaged checkpoint


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGES = {  # of a checkpoint's file
    "adapter_model.safetensors": flip_a_bit,
    "bank.json": pathlib.Path.unlink,  # which the digests leave out
    "digests.json": pathlib.Path.unlink,
    "tokenizer_config.json": pathlib.Path.unlink,
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_named(name, world_dir, tmp_path, uninterrupted, capsys):
    """Nothing is written. Without one before, the way out is a new --out."""
    run = shutil.copytree(uninterrupted, tmp_path / "run")
    *older, last = files.by_step(run / "checkpoints").values()
    DAMAGES[name](last / name)
    argv, before = small_flags(world_dir, run, steps=7), contents(run)
    refused(capsys, driver.main, argv, str(last / name), f"remove {last}")
    assert contents(run) == before
    saved = shutil.copytree(older[-1], tmp_path / "saved")
    for folder in older:
        shutil.rmtree(folder)
    refused(capsys, driver.main, argv, str(last / name), "or give a new --out")
    saved.rename(older[-1])
    shutil.rmtree(last)
    completes(driver.main, argv)
    assert [row["step"] for row in rows(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6, 7]
