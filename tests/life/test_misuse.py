"""Wrong files, settings and places: exit code 2, one line that names the fault, nothing written.

Each kind of mistake is refused once by a whole command here. All that can be wrong with a file
stands beside its reader, in test_problems.py, test_bank.py and test_model.py; flags in
test_config.py; a run that may not be continued in test_continue.py.
"""

import json
import os
import pathlib
import re
import shutil

import driver
import pytest
import torch
from conftest import save_model
from driver import completes, contents, flags, refused, rows
from safetensors.torch import load_file, save_file

import eval
import sgsd
from lib import files, model
from skills import SkillBank

EMPTY_BANK = json.dumps({"general_skills": [], "common_mistakes": []})


@pytest.fixture
def refusal(world_dir, tmp_path, capsys):
    """Checks that a program refuses these flags with these words in one line, writing nothing."""

    def check(*words, program=sgsd.main, **changes):
        out = changes.pop("out", tmp_path / "run")
        refused(capsys, program, flags(world_dir, out, **changes), *words)
        assert not contents(tmp_path / "run")
        assert not torch.distributed.is_initialized()

    return check


OF_AIME24 = (
    "Find the number of triples of nonnegative integers \\((a,b,c)\\) satisfying \\(a + b + c = "
    "300\\) and \\begin{equation*} a^2b + a^2c + b^2a + b^2c + c^2a + c^2b = 6,000,000. "
    "\\end{equation*}"
)
FILES = {
    "torn.json": "{",
    "empty.json": EMPTY_BANK,
    "no_answer.jsonl": '{"problem": "p"}\n',
    "of_a_set.jsonl": json.dumps({"id": "mine", "problem": OF_AIME24, "answer": "601"}),
}
SETTINGS = [  # settings ({w} has models, data and the bank of four pairs), and words of the line
    ({"bank": "torn.json"}, ["bank torn.json"]),
    ({"bank": "no.json"}, ["no.json"]),
    ({"bank": "empty.json"}, ["empty.json", "0 skills and 0 mistakes"]),
    ({"num_teachers": 8}, ["bank.json", "4 skills and 4 mistakes", "--num-teachers 8"]),
    ({"data": "no_answer.jsonl"}, ["no_answer.jsonl:1"]),
    ({"data": "of_a_set.jsonl"}, ["of_a_set.jsonl", "mine (aime24)"]),
    ({"data": "no/such-id"}, ["no/such-id", "--data"]),
    ({"encoder": "{w}/model"}, ["encoder {w}/model"]),
    ({"encoder": "./no"}, ["encoder ./no"]),
    ({"adapter": "{w}/model"}, ["{w}/model"]),
    ({"verifier": "no_such:Judge"}, ["no_such:Judge"]),
    ({"out": "{w}/data.jsonl/run"}, ["data.jsonl"]),
    ({"out": "{w}/model"}, ["--out {w}/model", "no run"]),
    ({"server": "http://127.0.0.1:9/v1", "bank": ""}, ["http://127.0.0.1:9/v1"]),
    ({"server": "localhost:8000/v1", "bank": ""}, ["http://localhost:8000/v1"]),
    ({"server": "http://a/v1", "adapter": "{w}/model"}, ["--server http://a/v1", "--adapter"]),
    # what only the model shows
    ({"model": "no/such-id"}, ["model no/such-id"]),
    ({"model": "{w}/encoder"}, ["model {w}/encoder"]),
    ({"attn": "flash_attention_2"}, ["FlashAttention"]),
    ({"device": "cuda"}, ["--device cuda"]),
]


@pytest.mark.parametrize("changes,words", SETTINGS)
def test_a_wrong_input_is_one_line(changes, words, world_dir, tmp_path, refusal, monkeypatch):
    """What can be known without the model is said before it is loaded."""
    if torch.cuda.is_available() and {"device", "attn"} & {*changes}:
        pytest.skip("there is a GPU")
    if not {"model", "device", "attn"} & {*changes}:
        monkeypatch.setattr(model, "load_model", None)
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    before = contents(world_dir)
    changes = {name: str(value).format(w=world_dir) for name, value in changes.items()}
    refusal(*[word.format(w=world_dir) for word in words], **changes)
    assert contents(world_dir) == before and not [*world_dir.rglob(files.LOCK)]


def test_a_wrong_place_in_the_world_is_one_line(refusal, monkeypatch):
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (place | {"MASTER_PORT": "99999999"}).items():
        monkeypatch.setenv(name, value)
    refusal("127.0.0.1:99999999")


TOO_LONG = [  # settings, and words of the line
    ({"max_prompt_tokens": 200}, ["gen_00", "err_00", "--max-prompt-tokens is 200"]),
    ({"max_new_tokens": 3900}, ["gen_00", "--max-new-tokens 3900", "context of 4096"]),
    ({"max_new_tokens": 4090}, ["--max-new-tokens 4090", "drop the problem p"]),
    (
        {"bank": "", "cold_start_tokens": 4090},
        ["--cold-start-tokens 4090", "context of 4096", "drop the problem p"],
    ),
]


GREEK = {"id": "greek", "problem": "πόσα " * 60, "answer": "5"}  # 300 characters, 540 tokens
LATIN = {"id": "latin", "problem": "how many " * 40, "answer": "5"}  # 360 of each
WITH_BANK = "--bank {w}/bank.json --num-teachers 4"
SHOWN = [  # a method and its flags
    "grpo --short",
    f"grpo --short {WITH_BANK}",
    f"opsd {WITH_BANK}",
    "opsd --teacher-field hint",
    "rlsd --teacher-field hint",
    f"rlsd {WITH_BANK}",
    f"ablations {WITH_BANK}",
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
    rows_of_data = [GREEK | {"hint": "count " * 100}, LATIN | {"hint": "none"}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows_of_data))
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
    completes(driver.main, [*argv, "--steps=1"])
    last = f"{out}/checkpoints/step_000001"
    tokens_of_refused(capsys, argv, room, "problem p", f"in a new --out with --adapter {last}")


def test_a_prompt_that_does_not_fit_is_one_line_before_the_start(world_dir, tmp_path, refusal):
    """Measured are the longest problem alone, and with the longest pair of --bank."""
    for changes, words in TOO_LONG:
        refusal(*words, **changes)
    completes(sgsd.main, flags(world_dir, tmp_path / "run", steps=1, max_new_tokens=4))
    assert len(rows(tmp_path / "run/metrics.jsonl")) == 1


def test_a_prompt_too_long_in_a_step_is_one_line_and_the_run_goes_on(world_dir, tmp_path, capsys):
    """No digest guards a checkpoint's bank: an evolved entry may be removed from it by hand."""
    out = tmp_path / "run"
    argv = flags(world_dir, out, steps=3, max_new_tokens=4, checkpoint_every=1, evolve_every=0)
    completes(sgsd.main, [*argv, "--steps=1"])
    file = out / "checkpoints/step_000001/bank.json"
    bank = SkillBank.load(file)
    long = {**bank.general_skills[0], "skill_id": "dyn_gen_001", "principle": "add " * 1500}
    bank.general_skills.insert(0, long)
    bank.save(file)
    refused(capsys, sgsd.main, argv, "dyn_gen_001", "bank.json", "context of 4096")
    bank.general_skills.remove(long)
    bank.save(file)
    completes(sgsd.main, argv)


FEW_TOKENS = {"max_new_tokens": 8, "checkpoint_every": 1}


@pytest.fixture(scope="module")
def finished(world_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    completes(sgsd.main, flags(world_dir, out, steps=2, **FEW_TOKENS))
    return out


LAST = "checkpoints/step_000002"


def flip_a_bit(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def nan_in_a_moment(path):
    tensors = load_file(path)
    next(x for name, x in tensors.items() if "exp_avg" in name)[0, 0] = torch.nan
    save_file(tensors, path)


def a_key_less(path):
    tensors = load_file(path)
    tensors.popitem()
    save_file(tensors, path)


def cut_in_half(path):
    os.truncate(path, path.stat().st_size // 2)


def another_alpha(path):
    path.write_text(path.read_text().replace('"lora_alpha": 8', '"lora_alpha": 80'))


ADAPTER, TRAINER = "adapter_model.safetensors", "trainer.safetensors"
DAMAGES = {  # of a checkpoint: the file, and what is done to it
    "a number that is not finite among AdamW's": (TRAINER, nan_in_a_moment),
    "a moment less": (TRAINER, a_key_less),
    "a tensor less": (ADAPTER, a_key_less),
    "a bit of a weight": (ADAPTER, lambda path: flip_a_bit(path, -1)),
    "another alpha": ("adapter_config.json", another_alpha),
    "a file less": (TRAINER, pathlib.Path.unlink),
    "a file that is cut": (ADAPTER, cut_in_half),
    "a tokenizer that was edited": ("tokenizer_config.json", lambda path: flip_a_bit(path, 3)),
    "a bank less": ("bank.json", pathlib.Path.unlink),
    "no digests": ("digests.json", pathlib.Path.unlink),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_with_the_fix(damage, finished, world_dir, tmp_path, capsys):
    """Nothing is written. Without one before, the way out is a new --out."""
    name, do = DAMAGES[damage]
    run = shutil.copytree(finished, tmp_path / "run")
    do(run / LAST / name)
    argv, before = flags(world_dir, run, steps=3, **FEW_TOKENS), contents(run)
    refused(capsys, sgsd.main, argv, str(run / LAST / name), f"remove {run / LAST}", "step_000001")
    assert contents(run) == before
    shutil.rmtree(run / "checkpoints/step_000001")
    refused(capsys, sgsd.main, argv, str(run / LAST / name), "only checkpoint", "new --out")
    shutil.copytree(finished / "checkpoints/step_000001", run / "checkpoints/step_000001")
    shutil.rmtree(run / LAST)
    completes(sgsd.main, argv)
    assert [row["step"] for row in rows(run / "metrics.jsonl")] == [1, 2, 3]


def evaluation(world_dir, tmp_path, *paths):
    """The command line of a small evaluation of these paths."""
    flags = f"--out={tmp_path}/out --data={world_dir}/data.jsonl --verifier=driver:Exact --limit=1"
    return [*paths, *flags.split(), "--samples=1", "--max-new-tokens=4"]


def test_each_path_is_looked_at_before_the_first_sample(finished, world_dir, tmp_path, capsys):
    """Without its weights: a foreign adapter that is torn shows at its turn."""
    base, out = world_dir / "model", tmp_path / "out"
    damaged, torn = (shutil.copytree(finished / LAST, tmp_path / name) for name in ("bit", "torn"))
    flip_a_bit(damaged / ADAPTER, -1)
    lacking = save_model(tmp_path / "lacking")
    tensors = load_file(lacking / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, lacking / "model.safetensors", metadata={"format": "pt"})
    paths = {"runs/aa": "runs/aa", damaged: str(damaged / ADAPTER), lacking: "model.norm.weight"}
    for path, words in paths.items():
        refused(capsys, eval.main, evaluation(world_dir, tmp_path, base, path), words)
    assert not out.exists()
    (torn / "digests.json").unlink()
    cut_in_half(torn / ADAPTER)
    refused(capsys, eval.main, evaluation(world_dir, tmp_path, base, torn), f"adapter {torn}")
    assert [path.parent.name for path in out.glob("*/results.json")] == [f"{world_dir.name}--model"]


def test_a_checkpoint_without_the_trainers_files_is_evaluated(finished, world_dir, tmp_path):
    """Nor with its bank and the card that names the base, as docs/guide.md has it."""
    adapter = shutil.copytree(finished / LAST, tmp_path / "adapter")
    for name in (TRAINER, "bank.json", "README.md"):
        (adapter / name).unlink()
    completes(eval.main, evaluation(world_dir, tmp_path, adapter))


WRONG = [  # a path, flags ({w} has models and data, {t} what is wrong), and words of the line
    ("{f}", "--model={t}/other", "size mismatch"),
    ("{f}", "--model={f}", "model {f}"),
    ("{t}/fresh", "", "{t}/fresh"),
    ("{t}/begun", "", "{t}/begun"),
    ("{t}/adapter", "", "adapter {t}/adapter"),
    ("{t}/moved", "", "--model"),
    ("sgsd/checkpoints/step_000200", "", "step_000200"),
    ("{w}/data.jsonl", "", "problems with --data"),
    ("{w}/bank.json", "--data aime24", "a bank goes with --skills"),  # no data set is asked for
    ("{w}/model", "--data aime24", "HuggingFaceH4/aime_2024"),
    ("{w}/model", "--data no.jsonl", "no.jsonl"),
    ("{w}/model", "--data x/one.jsonl y/one.parquet", "--data x/one.jsonl y/one.parquet"),
    ("{w}/model", "--skills={w}/bank.json", "--num-skills 8"),
    ("{w}/model", "--skills=no.json", "no.json"),
    ("{w}/model", "--skills={w}/bank.json --num-skills=2 --encoder=/no/such", "/no/such"),
    ("{w}/model", "--verifier=no_such:Judge", "no_such:Judge"),
    ("{w}/model", "--max-new-tokens=4090", "context of 4096"),
    ("{w}/model", "--out={w}/model/eval", "--out"),
    ("{w}/model", "{t}/other --server=http://127.0.0.1:9/v1", "{t}/other"),  # two bases
    ("{w}/model", "--server=http://127.0.0.1:9/v1", "http://127.0.0.1:9/v1"),
]


@pytest.mark.parametrize("path, given, words", WRONG)
def test_a_wrong_evaluation_is_one_line(path, given, words, finished, world_dir, tmp_path, capsys):
    save_model(tmp_path / "other", hidden_size=48)
    (tmp_path / "fresh/checkpoints").mkdir(parents=True)
    names = "adapter/adapter_config.json begun/config.json begun/problems.json"
    for file in map(tmp_path.joinpath, names.split()):
        file.parent.mkdir(exist_ok=True)
        file.write_text("{")
    moved = shutil.copytree(finished / LAST, tmp_path / "moved")
    (moved / "digests.json").unlink()
    text = (moved / "adapter_config.json").read_text()
    (moved / "adapter_config.json").write_text(text.replace(str(world_dir), "/no/such"))
    path, given, words = (
        text.format(w=world_dir, t=tmp_path, f=finished) for text in (path, given, words)
    )
    argv = evaluation(world_dir, tmp_path, path)
    refused(capsys, eval.main, [*argv, *given.split()], words)
    assert not (tmp_path / "out").exists() or not contents(tmp_path / "out")
