"""A vocabulary and models small enough to build in a test: no downloads, no files of others."""

import json
import os
import pathlib
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may reach for a hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)

TEMPLATE = (  # Qwen3's shape: enable_thinking=False ends on a closed think block, anything else on the bare header
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def make_tokenizer():
    """Byte-level BPE without merges but for newline runs and \\boxed, with Qwen3's control tokens: about 300 ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    merges = []
    for pair in (
        ("Ċ", "Ċ"),
        ("ĊĊ", "ĊĊ"),
        ("b", "o"),
        ("x", "e"),
        ("xe", "d"),
        ("bo", "xed"),
        ("\\", "boxed"),
    ):
        merges.append(pair)
        vocab["".join(pair)] = len(vocab)
    tok = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens(
        [AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    tok.add_tokens(
        [AddedToken(t, special=False, normalized=False) for t in ("<think>", "</think>")]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tok, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = TEMPLATE
    return fast


def make_model(kind="qwen3", vocab=272, seed=0, **changes):
    """A random model of a few thousand parameters, sharp enough that its samples are not uniform."""
    import transformers as tf

    shape = dict(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.25,
        eos_token_id=265,
        bos_token_id=None,
        pad_token_id=263,
    )
    config = {"qwen3": tf.Qwen3Config, "llama": tf.LlamaConfig, "gemma2": tf.Gemma2Config}[kind](
        **{**shape, **changes}
    )
    torch.manual_seed(seed)
    return tf.AutoModelForCausalLM.from_config(config).eval()


def make_encoder(path):
    """A sentence-transformers directory: a static embedding per byte, averaged."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    torch.manual_seed(0)
    SentenceTransformer(
        modules=[StaticEmbedding(make_tokenizer().backend_tokenizer, embedding_dim=16)],
        device="cpu",
    ).save(str(path))


def fake_embed(texts):
    """Letter counts: deterministic, and different for different texts."""
    import numpy as np

    return np.array(
        [[t.lower().count(c) + 0.1 for c in "abcdefghijklmnopqrstuvwxyz"] for t in texts],
        dtype=np.float32,
    )


def make_bank(path=None, n_skills=4, n_mistakes=4):
    import skills

    words = [
        "add",
        "carry",
        "divide",
        "perimeter",
        "mean",
        "order",
        "count",
        "remainder",
        "unit",
        "check",
    ]
    bank = skills.SkillBank(
        [
            {
                "skill_id": f"gen_{i + 1:03d}",
                "title": f"Use {w}",
                "principle": f"Always {w} with care.",
                "when_to_apply": f"When you {w}.",
            }
            for i, w in enumerate(words[:n_skills])
        ],
        [
            {
                "mistake_id": f"err_{i + 1:03d}",
                "description": f"Forgetting to {w}.",
                "why_it_happens": "Haste.",
                "how_to_avoid": f"Remember {w}.",
            }
            for i, w in enumerate(words[:n_mistakes])
        ],
        {"source": "made in a test"},
    )
    if path is not None:
        bank.save(path)
    return bank


PROBLEMS = [
    {"id": f"p{i}", "problem": f"What is {i} plus {i + 3}?", "answer": str(2 * i + 3)}
    for i in range(12)
]


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def world_dir(tmp_path_factory):
    """A directory with all that a command line needs: model, tokenizer, encoder, bank, data."""
    path = tmp_path_factory.mktemp("world")
    make_model().save_pretrained(path / "model")
    make_tokenizer().save_pretrained(path / "model")
    make_encoder(path / "encoder")
    make_bank(path / "bank.json")
    (path / "data.jsonl").write_text("".join(json.dumps(p) + "\n" for p in PROBLEMS))
    return path
