"""A vocabulary and models small enough to build in a test: no downloads, no files of others.

    same(loss, 0.25, 1e-6)                            equal up to a tolerance
    one_line(lambda: load(path), "bank x", path)      an error of one line that has these words
    make_tokenizer(), make_model("gemma2", seed=1)    bytes as tokens; a random model of 40 KB
    save_model(path), make_encoder(path)              folders as a command line takes them
    make_adapter(path, base)                          an adapter with random weights
    fake_embed(["a text"])                            an encoder: counts of letters
    item("x"), items("xyz"), answer(items("xy"))      candidates of a bank, and a writer's reply
    make_bank(path, n_skills=2)                       a bank with an entry for each of WORDS
    write_evaluation(folder, k=4, test=[2, 4])        a results.json: right samples by problem
    with watched(model) as passes: ...                shapes of the ids that a model is passed
    decoded(model, [(9, 20)], rows=2)                 completions of prompts of so many tokens
    world_dir                                         a fixture: model, encoder, bank.json, data
    uninterrupted                                     a fixture: a run that nothing has interrupted

driver.py calls commands, small_run.py has the tests' run, plain.py the equations as loops.
"""

import contextlib
import importlib.util
import itertools
import json
import os
import pathlib
import sys
import types

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may reach for a hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fake_engine
import numpy as np
import pytest
import torch

import rollout
import skills
from lib import files, model

# Tests of extras/on_trl.py; .ci/run has them in an environment with extras/requirements.txt.
collect_ignore = [] if importlib.util.find_spec("trl") else ["on_trl"]
pytest.register_assert_rewrite("driver", "method_steps")  # their assertions explain themselves
torch.set_num_threads(1)

TEMPLATE = (  # Qwen3's shape: enable_thinking=False ends on a closed think block
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
MERGES = ["Ċ Ċ", "ĊĊ ĊĊ", "b o", "x e", "xe d", "bo xed", "\\ boxed"]


def t(x):
    return torch.tensor(x, dtype=torch.float64)


def same(got, want, tol=1e-12):
    """want: a tensor, or numbers."""
    want = want if torch.is_tensor(want) else torch.tensor(want, dtype=got.dtype)
    torch.testing.assert_close(got, want, rtol=tol, atol=tol)


def one_line(call, *words, kind=ValueError):
    """A call raises an error of one line that has these words; the line."""
    with pytest.raises(kind) as caught:
        call()
    line = str(caught.value)
    assert "\n" not in line
    for word in words:
        assert str(word) in line, line
    return line


def make_tokenizer():
    """Bytes, runs of newlines, \\boxed and Qwen3's control tokens: 268 ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    merges = [tuple(merge.split()) for merge in MERGES]
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(merge) for merge in merges]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = TEMPLATE
    return fast


SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
HYBRID |= {"linear_num_key_heads": 2, "linear_key_head_dim": 8}
HYBRID |= {"linear_num_value_heads": 4, "linear_value_head_dim": 8}
SHAPES = {"gemma2": SLIDING, "gemma3_text": SLIDING, "qwen3_5_text": HYBRID}


def make_model(kind="qwen3", vocab=272, seed=0, **changes):
    """A random model of a few thousand parameters, sharp enough for its samples to differ."""
    import transformers

    shape = {"vocab_size": vocab, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape |= {"max_position_embeddings": 4096, "tie_word_embeddings": False}
    shape |= {"initializer_range": 0.25, "eos_token_id": 265, "bos_token_id": None}
    shape |= {"pad_token_id": 263, **SHAPES.get(kind, {}), **changes}
    config = transformers.AutoConfig.for_model(kind, **shape)
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def save_model(folder, *kind, **changes):
    """A folder with a random model and its tokenizer."""
    make_model(*kind, **changes).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_encoder(path):
    """A sentence-transformers directory: a static embedding per byte, averaged."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    torch.manual_seed(0)
    bytewise = StaticEmbedding(make_tokenizer().backend_tokenizer, embedding_dim=16)
    SentenceTransformer(modules=[bytewise], device="cpu").save(str(path))


def make_adapter(path, base, seed=0, rank=4):
    """An adapter with weights of its own, saved as PEFT saves it."""
    import peft

    lm, _ = model.load_model(str(base), "cpu")
    torch.manual_seed(seed)
    lora = peft.LoraConfig(r=rank, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(lm, lora).save_pretrained(path)


def fake_embed(texts):
    """Letter counts: deterministic, and different for different texts."""
    rows = []
    for text in texts:
        rows.append([text.lower().count(c) + 0.1 for c in "abcdefghijklmnopqrstuvwxyz"])
    return np.array(rows, dtype=np.float32)


def item(name, key="general_skills"):
    """A candidate whose fields begin with a name."""
    return {field: f"{name} {field}" for field in skills.KINDS[key].fields}


def items(names, key="general_skills"):
    return [item(name, key) for name in names]


def answer(entries, key="general_skills"):
    """The reply of a writer that gives these candidates."""
    return json.dumps({key: entries})


WORDS = "add carry divide perimeter mean order count remainder unit check".split()


def make_bank(path=None, n_skills=4, n_mistakes=4):
    bank = skills.SkillBank([], [], {"source": "made in a test"})
    for i, word in enumerate(WORDS, 1):
        skill = {"skill_id": f"gen_{i:03d}", "title": f"Use {word}"}
        skill |= {"principle": f"Always {word} with care.", "when_to_apply": f"When you {word}."}
        bank.general_skills.append(skill)
        mistake = {"mistake_id": f"err_{i:03d}", "description": f"Forgetting to {word}."}
        mistake |= {"why_it_happens": "Haste.", "how_to_avoid": f"Remember {word}."}
        bank.common_mistakes.append(mistake)
    del bank.general_skills[n_skills:], bank.common_mistakes[n_mistakes:]
    if path is not None:
        bank.save(path)
    return bank


def write_evaluation(folder, settings=(), digest="1", k=4, **sets):
    """A results.json of k samples a problem. sets: counts of right ones, problem by problem."""
    is_step, table = folder.name.startswith("step_"), {}
    about = {"the policy's files": folder.name if is_step else "w", "the base's files": "w"}
    about |= {"device": "cpu", "seed": 0, "skills": "", **dict(settings)}
    for name, right_P in sets.items():
        row = dict.fromkeys(("maj", "boxed", "truncated", "tokens"), 0.5)
        row["pass"] = sum(count > 0 for count in right_P) / len(right_P)
        row |= {"digest": digest, "problems": len(right_P), "samples": k * len(right_P)}
        row |= {"avg": sum(right_P) / len(right_P) / k, "avg_low": None, "avg_high": None}
        right = {f"p{i}": count for i, count in enumerate(right_P)}
        table[name] = row | {"settings": about, "right": right}
    files.write_json(folder / "results.json", table)
    return folder


@contextlib.contextmanager
def watched(lm):
    """The shapes of the ids that `generate` passes to a model in a block."""
    passes = []
    note = lambda _, args, given: passes.append(tuple(given["input_ids"].shape))  # noqa: E731
    hook = lm.register_forward_pre_hook(note, with_kwargs=True)
    yield passes
    hook.remove()


def decoded(lm, jobs, rows, places=0):
    """{job: ids}, as a stream finishes jobs, at their limits. jobs: tokens of prompt, limit."""
    made, no_stops = [], types.SimpleNamespace(eos_token_id=lm.config.vocab_size)
    for i, (length, limit) in enumerate(jobs):
        prompt = [(17 * i + 31 * place) % 260 for place in range(length)]
        made.append(rollout.Job(i, prompt, key=i, limit=limit))
    turns = rollout.stream(lm, no_stops, made, rollout.Sampling(), rows, places)
    return {job.index: job.ids for job in itertools.chain.from_iterable(turns)}


PROBLEMS = []
for i in range(12):
    PROBLEMS.append(
        {"id": f"p{i}", "problem": f"What is {i} plus {i + 3}?", "answer": str(2 * i + 3)}
    )


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def engine():
    """A small inference server."""
    with fake_engine.serving() as engine:
        yield engine


@pytest.fixture(scope="session")
def world_dir(tmp_path_factory):
    """A directory with all that a command line needs: model, tokenizer, encoder, bank, data."""
    path = tmp_path_factory.mktemp("world")
    save_model(path / "model")
    make_encoder(path / "encoder")
    make_bank(path / "bank.json")
    (path / "data.jsonl").write_text("".join(json.dumps(x) + "\n" for x in PROBLEMS))
    return path


@pytest.fixture(scope="session")
def uninterrupted(world_dir, tmp_path_factory):
    """The directory of a run of `small_run.small_flags` that nothing has interrupted."""
    import driver
    import small_run

    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    driver.run(small_run.small_flags(world_dir, out))
    return out
