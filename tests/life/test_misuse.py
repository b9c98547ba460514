"""Whole commands that are refused: exit code 2, one line that names the fault, nothing written.

All that can be wrong is listed beside its reader, such as problems in test_problems.py. Here are,
besides, lengths, foreign adapters and damaged checkpoints. `flags` and `small_flags` are command
lines of sgsd.py on a random model; `refused` calls a program, and gives its one line.
"""

import pathlib
import shutil
import sys

import peft
import pytest
import torch
from conftest import save_model
from driver import completes, contents, refused, rows, write_rows
from small_run import flags, main, opened, small_flags

import sgsd
from lib import files, model


def test_a_wrong_input_is_one_line(world_dir, tmp_path, monkeypatch):
    """What can be known without the model is said before it is loaded."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("no_answer.jsonl").write_text('{"problem": "p"}\n')
    pathlib.Path("torn.json").write_text("{")
    pathlib.Path("deep.json").write_text("[" * 100_000)
    before = contents(world_dir)

    def refused_with(words, **changes):
        refused(sgsd.main, flags(world_dir, "run", **changes), words)
        assert not contents(tmp_path / "run")

    refused_with("none.jsonl: No such file", data="none.jsonl")
    refused_with("no_answer.jsonl:1", data="no_answer.jsonl", model="no/such")
    refused_with("bank torn.json", bank="torn.json", model="no/such")
    refused_with("bank deep.json", bank="deep.json", model="no/such")
    refused_with(f"encoder {world_dir}/model", encoder=world_dir / "model", model="no/such")
    refused_with("http://127.0.0.1:9/v1", server="http://127.0.0.1:9/v1", bank="")
    refused_with("and --adapter begins with other weights", server="http://a/v1", adapter="x")
    monkeypatch.setitem(sys.modules, "wandb", None)
    refused_with("wandb", report_to="wandb")
    assert contents(world_dir) == before and not [*world_dir.rglob(files.LOCK)]


# ------------------------------------------------------------------- what is too long (S35)


GREEK = {"id": "greek", "problem": "πόσα " * 60, "answer": "5"}  # 300 characters, 540 tokens
LATIN = {"id": "latin", "problem": "how many " * 40, "answer": "5"}  # 360 of each


def test_long_problems_are_left_out_and_counted(world_dir, tmp_path, capsys):
    """By tokens of the plain prompt, not by characters; by the setting, and by the context."""
    data, short = tmp_path / "data.jsonl", str(tmp_path / "short")
    write_rows(data, [GREEK, LATIN])
    save_model(short, max_position_embeddings=500)
    changes = {"data": str(data), "bank": "", "cold_start": 1, "num_teachers": 1}

    def kept(name, **more):
        """The lengths of the problems that a run keeps, by their ids; its line on the others."""
        with opened(world_dir, tmp_path / name, **changes, **more) as run:
            lengths = {x.id: len(sgsd.student_prompt(run, x.problem)) for x in run.problems}
        assert len(files.read_json(run.out / "problems.json")) == len(lengths)
        lines = [x for x in capsys.readouterr().out.splitlines() if "left out" in x]
        return lengths, "\n".join(lines)

    lengths, line = kept("all")
    latin = {"latin": lengths["latin"]}
    left = 500 - lengths["latin"]
    assert [*lengths] == ["greek", "latin"] and not line
    got, line = kept("a", max_prompt_tokens=lengths["greek"] - 1)
    assert got == latin and "1 of 2 problems" in line and "in 0 of the others" in line
    got, line = kept("b", model=short, max_new_tokens=left)
    assert got == latin and "1 of 2 problems" in line and "in 0 of the others" in line
    got, line = kept("c", model=short, max_new_tokens=left + 1)
    assert got == latin and "1 of 2 problems" in line and "in 1 of the others" in line
    got, line = kept("d", max_new_tokens=4096 - lengths["latin"])
    assert got == lengths and "0 of 2 problems" in line and "in 1 of the others" in line
    changes["max_prompt_tokens"] = lengths["latin"] - 1
    words = "2 of 2 problems", f"more than {lengths['latin'] - 1} tokens", "--max-prompt-tokens"
    refused(main, flags(world_dir, tmp_path / "run", **changes), *words)
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
def test_teachers_that_do_not_fit_the_context_are_left_out(command, world_dir, tmp_path):
    """None of them fits beside the solution: the step is made all the same, and a line says why."""
    data, short, out = tmp_path / "data.jsonl", tmp_path / "short", tmp_path / "run"
    write_rows(data, [LATIN | {"hint": "count " * 100}])
    save_model(short, max_position_embeddings=600)
    argv = command.format(w=world_dir).split()
    argv += [f"--data={data}", f"--out={out}", "--steps=2", "--batch-size=1", "--audit-every=1"]
    argv += [f"--model={short}", "--device=cpu", "--verifier=small_run:UnevenVerifier"]
    argv += [f"--encoder={world_dir}/encoder", "--num-teachers=3", "--max-new-tokens=200"]
    assert completes(main, argv).count("teachers are left out") == 1
    logged = rows(out / "rollouts.jsonl")
    assert logged and not any(row.get("rho") or row.get("first_gap") for row in logged)
    assert not any(row["pairs"] for row in logged if row.get("advantage", 1))
    assert [m["no_teachers"] for m in rows(out / "metrics.jsonl")] == [len(logged) / 2] * 2
    assert all(m["grad_norm"] == 0 or "rlsd" in command for m in rows(out / "metrics.jsonl"))


# ---------------------------------------------------------------------------- foreign adapters

IDS = torch.arange(9)[None]
FOREIGN = {  # settings of PEFT that training does not read
    "alpha_pattern": {"q_proj": 64},
    "init_lora_weights": "pissa",  # it changes the base, too
    "modules_to_save": ["lm_head"],
}


def foreign_adapter(folder, base, **settings):
    """An adapter of PEFT with these settings, which evaluation reads whole; its logits of IDS."""
    lm, _ = model.load_model(base, "cpu")
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", **settings)
    adapted = peft.get_peft_model(lm, lora)
    for p in model.trained(adapted).values():
        p.data += 0.1 * torch.randn(p.shape)
    adapted.save_pretrained(folder)
    loaded = model.load_adapter(model.load_model(base, "cpu")[0], folder)
    torch.testing.assert_close(loaded(input_ids=IDS).logits, adapted(input_ids=IDS).logits)
    return adapted(input_ids=IDS).logits


@pytest.mark.parametrize("name", FOREIGN)
def test_training_refuses_an_adapter_with_a_setting_that_it_does_not_read(
    name, world_dir, tmp_path
):
    folder = str(tmp_path / "adapter")
    foreign_adapter(folder, str(world_dir / "model"), **{name: FOREIGN[name]})
    argv = flags(world_dir, tmp_path / "run", adapter=folder)
    refused(sgsd.main, argv, f"adapter {folder}: {name}", "merge")


def test_training_begins_with_what_an_adapter_computes(world_dir, tmp_path):
    """It reads rank, alpha and rsLoRA."""
    folder, settings = str(tmp_path / "adapter"), {"init_lora_weights": "gaussian"}
    want = foreign_adapter(folder, str(world_dir / "model"), use_rslora=True, **settings)
    with opened(world_dir, tmp_path / "run", adapter=folder, steps=1) as run:
        torch.testing.assert_close(run.lm(input_ids=IDS).logits, want)


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
def test_a_damaged_checkpoint_is_named(name, world_dir, tmp_path, uninterrupted):
    """Nothing is written. Without one before, the way out is a new --out."""
    run = shutil.copytree(uninterrupted, tmp_path / "run")
    *older, last = files.by_step(run / "checkpoints").values()
    DAMAGES[name](last / name)
    argv, before = small_flags(world_dir, run, steps=7), contents(run)
    refused(main, argv, last / name, f"remove {last}")
    assert contents(run) == before
    saved = shutil.copytree(older[-1], tmp_path / "saved")
    for folder in older:
        shutil.rmtree(folder)
    refused(main, argv, last / name, "or give a new --out")
    saved.rename(older[-1])
    shutil.rmtree(last)
    completes(main, argv)
    assert [row["step"] for row in rows(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6, 7]
