"""Whole commands that are refused: exit code 2, one line that names the fault, nothing written.

All that can be wrong is listed beside its reader, such as problems in test_problems.py. Here are,
besides, prompts that are too long, foreign adapters and damaged checkpoints.
"""

import pathlib
import re
import shutil

import driver
import peft
import pytest
import torch
from driver import completes, contents, flags, refused, rows, small_flags, write_rows

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


# ------------------------------------------------------------------- prompts that are too long

TOO_LONG = [  # settings, and words of the line
    ({"max_prompt_tokens": 200}, ["gen_00", "err_00", "--max-prompt-tokens is 200"]),
    ({"max_new_tokens": 3900}, ["gen_00", "--max-new-tokens 3900", "context of 4096"]),
    ({"bank": "", "cold_start_tokens": 4090}, ["--cold-start-tokens 4090", "drop the problem p"]),
]


@pytest.mark.parametrize("changes, words", TOO_LONG)
def test_a_prompt_that_does_not_fit_is_one_line(changes, words, world_dir, tmp_path, capsys):
    """Measured are the longest problem alone, and with the longest pair of --bank."""
    refused(capsys, sgsd.main, flags(world_dir, tmp_path / "run", **changes), *words)
    assert not contents(tmp_path / "run")


def test_a_long_context_is_written_with_all_digits(world_dir, tmp_path, capsys):
    folder = shutil.copytree(world_dir / "model", tmp_path / "model")
    settings = files.read_json(folder / "config.json") | {"max_position_embeddings": 2**20}
    files.write_json(folder / "config.json", settings)
    argv = flags(world_dir, tmp_path / "run", model=folder, max_new_tokens=2**20)
    refused(capsys, sgsd.main, argv, "context of 1048576 ")


GREEK = {"id": "greek", "problem": "πόσα " * 60, "answer": "5"}  # 300 characters, 540 tokens
LATIN = {"id": "latin", "problem": "how many " * 40, "answer": "5"}  # 360 of each
WITH_BANK = "--bank {w}/bank.json --num-teachers 4"
SHOWN = [  # a method and its flags
    f"grpo --short {WITH_BANK}",
    f"opsd {WITH_BANK}",
    "opsd --teacher-field hint",
    "rlsd --teacher-field hint",
    f"ablations {WITH_BANK} --answer-pi --teacher-field hint",
]


def tokens_of_refused(capsys, argv, room, *words):
    """How many tokens the prompt has that is longer than this room."""
    line = refused(capsys, driver.main, [*argv, f"--max-prompt-tokens={room}"], *words)
    return int(re.search(r"has (\d+) tokens", line)[1])


@pytest.mark.parametrize("command", SHOWN)
def test_the_longest_prompt_of_a_method_is_known_at_the_start(command, world_dir, tmp_path, capsys):
    """In tokens, not in characters: the student's and the teacher's. Else nothing is written."""
    data, out = tmp_path / "data.jsonl", tmp_path / "run"
    write_rows(data, [GREEK | {"hint": "count " * 100}, LATIN | {"hint": "none"}])
    argv = command.format(w=world_dir).split()
    argv += [f"--data={data}", f"--out={out}", "--steps=1", "--batch-size=2", "--device=cpu"]
    argv += [f"--model={world_dir}/model", "--max-new-tokens=4", "--verifier=driver:UnevenVerifier"]
    argv += [f"--encoder={world_dir}/encoder"]
    longest = tokens_of_refused(capsys, argv, 100, "problem greek")
    if "grpo" not in command:  # whose roles have one prompt
        longest = tokens_of_refused(capsys, argv, longest, "problem greek")
    tokens_of_refused(capsys, argv, longest - 1, "problem greek")
    assert not contents(out)
    completes(driver.main, [*argv, f"--max-prompt-tokens={longest}"])


def test_a_sibling_that_is_too_long_ends_in_its_step_with_a_way_out(world_dir, tmp_path, capsys):
    """SDPO's teacher shows a solution, which is not known before."""
    out, changes = tmp_path / "run", {"bank": "", "verifier": "driver:UnevenVerifier"}
    changes |= {"batch_size": 12, "checkpoint_every": 1}
    argv = ["sdpo", *flags(world_dir, out, **changes)]
    room = tokens_of_refused(capsys, argv, 10) + 5
    tokens_of_refused(capsys, argv, room, "problem p", "in a new --out")


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
