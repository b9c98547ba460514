"""A run: its files, its data, what templates and tokens change, its bank, and --adapter.

`flags` is a command line of sgsd.py on a random model, `completes` calls it in this process. With
`opened` a test looks at a run before its first step; `train` takes one through its steps.
`uninterrupted` is the folder of a run that made its bank, and evolved after steps 3 and 6.
"""

import json
import shlex
import shutil
import types

import datasets
import pytest
import torch
from conftest import PROBLEMS, make_tokenizer, save_model
from driver import completes, contents, refused, rows
from safetensors.torch import load_file
from small_run import flags, opened, parsed, train
from tokenizers import AddedToken

import eval
import sgsd
import skills
from lib import files, model, problems, runlog
from lib.run import evaluation
from methods import ablations


def test_what_a_run_leaves_on_disk(uninterrupted):
    """Its bank's sizes stand beside each step as the step used it."""
    out = uninterrupted
    stored = files.read_json(out / "config.json")
    assert stored["settings"]["num_teachers"] == 2 and stored["versions"]["torch"]
    fingerprints = [problems.fingerprint(x["problem"]) for x in PROBLEMS]
    assert files.read_json(out / "problems.json") == fingerprints
    metrics, rolls, tokens = (rows(out / f"{name}.jsonl") for name in runlog.LOGS)
    assert [(row["step"], row["index"]) for row in rolls[:4]] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert len(metrics) == 6 and len(rolls) == 12 and {x["step"] for x in tokens} == {1, 2, 4, 6}
    assert list(files.by_step(out / "checkpoints")) == [2, 3, 4, 6]
    assert not {path.suffix for path in out.rglob("*")} & {".tmp", ".pt", ".bin"}
    versions = files.by_step(out / "bank")
    sizes = {step: skills.SkillBank.load(path).counts for step, path in versions.items()}
    assert [*sizes] == [0, 3, 6] and sizes[0] != sizes[3]
    assert all(sizes[m["step"] > 3 and 3].items() <= m.items() for m in metrics)
    assert {row["step"] for row in rows(out / "bank/replies.jsonl")} == {0, 3, 6}


def test_the_last_line_of_a_run_evaluates_it_as_it_trained(world_dir, tmp_path):
    """On other columns, with answers behind a mark as in GSM8K, from a directory as the hub lays it
    out. The command is pasted, with test problems of one's own."""
    given = []
    for x in PROBLEMS[:8]:
        solution = f"One adds.\n#### {x['answer']}"
        given.append({"question": x["problem"], "solution": solution})
    hub, out = tmp_path / "hub", tmp_path / "run"
    (hub / "data").mkdir(parents=True)
    part = datasets.Dataset.from_list(given)
    part.to_parquet(str(hub / "data/train-00000-of-00001.parquet"))
    columns = ["--problem-field=question", "--answer-field=solution", "--answer-after=#### "]
    changes = {"steps": 1, "max_new_tokens": 4, "data": hub, "verifier": "small_run:UnevenVerifier"}
    printed = completes(sgsd.main, [*flags(world_dir, out, **changes), *columns])
    golds = {x["problem"]: x["answer"] for x in PROBLEMS[:8]}
    trained = {row["problem"]: row["gold"] for row in rows(out / "rollouts.jsonl")}
    assert len(trained) == 4 and trained.items() < golds.items()
    (line,) = [line for line in printed.splitlines() if line.startswith("done; evaluate: ")]
    words = shlex.split(line.removeprefix("done; evaluate: "))
    assert words[:2] == ["python", "eval.py"] and words[-1] == "YOUR_TEST_PROBLEMS.jsonl"
    printed = completes(eval.main, [*words[2:-1], hub, "--split=train", "--samples=1"])
    assert "trained with" not in printed
    samples = rows(out / "eval/step_000001/samples.jsonl")
    assert sorted(row["gold"] for row in samples) == sorted(golds.values())
    settings = files.read_json(out / "eval/step_000001/results.json")["hub"]["settings"]
    same = {"device": "cpu", "max_new_tokens": 4, "temperature": 1.1, "top_k": 20}
    same |= {"thinking": False, "verify_timeout": 5}
    assert same.items() <= settings.items() and "UnevenVerifier" in settings["verifier"]


SHARED = {  # flags of a method, and what its last line has for eval.py
    "sgsd": "--temperature=1.1 --top-k=20 --max-new-tokens=1024 --no-thinking",
    "grpo": "--temperature=1.2 --top-p=1.0 --max-new-tokens=16000",
    "sgsd --preset tiny": (
        "--temperature=1.1 --top-k=20 --max-new-tokens=96 --device=cpu --no-thinking "
        "--data YOUR_TEST_PROBLEMS.jsonl"
    ),
    "sgsd --student-prefix open --dtype float32 --verify-timeout 2 --seed 1 --encoder e": (
        "--temperature=1.1 --top-k=20 --max-new-tokens=1024 --dtype=float32 --verify-timeout=2.0"
    ),
}


@pytest.mark.parametrize("line", SHARED)
def test_an_evaluation_gets_the_flags_of_both_programs_where_its_defaults_differ(line):
    """Flags of the same name that mean something else, such as --seed, are no part of it."""
    method, *argv = line.split()
    cfg = parsed(argv, method)
    assert evaluation(cfg) == [cfg.model, cfg.out, *SHARED[line].split()]
    parsed(evaluation(cfg), "eval")


@pytest.mark.parametrize("token_mask", [True, False])
def test_a_run_without_the_token_mask_prints_none(token_mask, world_dir, tmp_path, capsys):
    with opened(world_dir, tmp_path / "run", ablations.AblationConfig, token_mask=token_mask):
        assert ("token mask:" in capsys.readouterr().out) == token_mask


def test_the_think_block_of_a_role_is_that_of_its_flag(world_dir, tmp_path):
    """S3."""
    changes = {"student_prefix": "bare", "teacher_prefix": "open"}
    with opened(world_dir, tmp_path / "run", **changes) as run:
        x = run.problems[0]
        prompts = [sgsd.student_prompt(run, x.problem)]
        pairs_K = run.bank.retrieve(x.problem, 2, run.embed)
        roll = types.SimpleNamespace(completion_ids=[7])
        prompts += sgsd.teacher_prompts(run, pairs_K, x.problem, roll)[1]
    shown = [run.tokenizer.decode(ids).rpartition("assistant\n")[2] for ids in prompts]
    assert shown == ["", "<think>\n", "<think>\n"]


def test_a_special_token_without_a_role_and_every_stop_id_are_masked(world_dir, tmp_path):
    """S2: Gemma's <end_of_turn> is special, and only its generation_config names it as a stop."""
    base, tokenizer = save_model(tmp_path / "model"), make_tokenizer()
    tokenizer.add_tokens([AddedToken("<end_of_turn>", special=True)])
    tokenizer.save_pretrained(base)
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [265, 5]}))
    with opened(world_dir, tmp_path / "run", model=str(base)) as run:
        assert {run.tokenizer.convert_tokens_to_ids("<end_of_turn>"), 5} <= run.masked_ids


def test_a_run_whose_bank_has_no_pair_ends_and_says_why(world_dir, tmp_path, monkeypatch):
    """S8. None of the writer's replies can be read. The bank is kept."""
    refusing = lambda run, step: lambda prompts: ["no"] * len(prompts)  # noqa: E731
    monkeypatch.setattr(sgsd, "bank_writer", refusing)
    out, words = tmp_path / "run", ("0 skills and 0 mistakes", "4 solutions", "4 replies lost")
    argv = flags(world_dir, out, bank="", cold_start=4)
    refused(sgsd.main, argv, *words, "--cold-start", "new --out")
    assert [*files.by_step(out / "bank")] == [0] and not (out / "metrics.jsonl").exists()


def test_a_run_begins_with_a_checkpoints_weights_alone(world_dir, tmp_path, uninterrupted):
    """A run that goes on needs it no more."""
    adapter = shutil.copytree(uninterrupted / "checkpoints/step_000006", tmp_path / "adapter")
    changes = {"adapter": str(adapter), "lora_rank": 4, "bank": "", "cold_start": 4}
    with opened(world_dir, tmp_path / "run", **changes) as run:
        given = load_file(adapter / "adapter_model.safetensors")
        assert {n.replace(".default", "") for n in model.trained(run.lm)} == given.keys()
        for name, p in model.trained(run.lm).items():
            assert torch.equal(p, given[name.replace(".default", "")])
        assert not run.optimizer.state and run.step == 0 and run.bank is None
        sgsd.train(run)
    saved = files.read_json(run.out / "checkpoints/step_000004/adapter_config.json")
    assert (saved["r"], saved["lora_alpha"]) == (32, 8)  # the checkpoint's
    shutil.rmtree(adapter)
    train(world_dir, tmp_path / "run", steps=5, **changes)
    assert [m["step"] for m in rows(run.out / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_an_adapter_needs_its_base_and_a_folder(world_dir, tmp_path, uninterrupted):
    last, other = uninterrupted / "checkpoints/step_000006", save_model(tmp_path / "other", seed=1)
    argv = flags(world_dir, tmp_path / "run", adapter=last, model=other)
    refused(sgsd.main, argv, last, world_dir / "model")
    refused(sgsd.main, flags(world_dir, tmp_path / "run", adapter=last.parent), last.parent)
    assert not contents(tmp_path / "run")
