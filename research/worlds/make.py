"""Make the embedded default from a seed: tokenizer, encoder, model and problems.

    python research/worlds/make.py                 everything, 40 minutes on one core
    python research/worlds/make.py --merges 700    train tiny/model on more merges: 20 minutes
    python research/worlds/make.py --measure       only the figures of tiny/README.md

All files go into tiny/. The model learns to write what world.py writes: solutions whose
error depends on the guidance in the prompt, and JSON for the extraction and merge prompts. Nothing
of the method (no outcome, no teacher) goes into it.
"""

import argparse
import functools
import json
import math
import pathlib
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
TINY = HERE.parents[1] / "tiny"
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

import torch
import world
from tqdm import tqdm

import rollout
import scoring
import skills
from lib import model as models
from lib import verify
from research.markdown_table import head_of, row_of

VOCAB, STEPS, ROWS, RATE, BUDGET = 1024, 2600, 32, 2e-3, 1536
BF16 = True  # of training; ten times as slow as fp32 on a CPU without such instructions
FORMS = ("plain", "memory", "answer", "pair", "extraction", "merge")  # of a training row
MIX = dict(zip(FORMS, (0.2, 0.06, 0.06, 0.46, 0.12, 0.1)))  # their shares
MERGING = dict(zip(FORMS, (0.1, 0.03, 0.03, 0.24, 0.15, 0.45)))
HELD_OUT = {"train": 2400, "valid": 240, "test": 240}  # problems that the model never sees here
# Qwen3's: enable_thinking=False ends on a closed think block, anything else on the bare header.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# ------------------------------------------------------------------------------------ the text


def says_nothing(rng: random.Random, kind: str) -> dict:
    """A mistake, or else a skill, that is true of anything."""
    return world.item(rng, None, "mistake" if kind == "mistake" else "skill", rng.randrange(2))


def guidance(rng: random.Random, family: str) -> tuple[list[dict], list[dict]]:
    """Skills and mistakes for a prompt: mostly one pair as for a teacher, sometimes up to four."""
    own = world.family_of(family)
    others = [f for f in world.FAMILIES if f is not own]

    def one(kinds: tuple[str, ...]) -> dict:
        u, other, kind = rng.random(), rng.choice(others), rng.choice(kinds)
        if u < 0.1:
            return says_nothing(rng, kind)
        return world.item(rng, own if u < 0.55 else other, kind)

    count = 1 if rng.random() < 0.8 else rng.randint(2, 4)
    good = [one(("skill", "misleading")) for _ in range(count)]
    return good, [one(("mistake",)) for _ in range(count)]


def solving(rng: random.Random, drawn: world.Drawn, form: str) -> tuple[str, float]:
    """A prompt that asks for a solution, and the chance of the error.

    form: plain, memory, pair or answer.
    """
    if form == "plain":
        return skills.render_student(drawn.problem), world.error_chance(drawn.family, [])
    if form == "memory":
        text = skills.render("seed_problem", {"problem": drawn.problem})
        return text, world.error_chance(drawn.family, [])
    good, bad = guidance(rng, drawn.family)
    if form == "answer" and rng.random() < 0.5:
        good, bad = [], []
    pairs = [skills.SkillPair(g, e, 1.0, 1.0) for g, e in zip(good, bad)]
    text = skills.render_skills(pairs, drawn.problem)
    if form == "answer":
        ways = ("Reference answer: {}", "The reference answer is {}.", "Answer: {}")
        shown = rng.choice(ways).format(drawn.right[1])
        text = text.replace("\n\nPlease", f"\n\n{shown}\n\nPlease")
    return text, world.error_chance(drawn.family, good + bad, answer=form == "answer")


def memory_of(problem: str, text: str, r: int) -> dict:
    """The memory record of a solution."""
    pred = verify.extract_answer(text)
    return skills.memory_of({"problem": problem, "text": text, "r": r, "pred": pred})


def extraction_prompt(drawn: world.Drawn, key: str) -> str:
    """Asks for skills of a right solution, or for mistakes of a wrong one."""
    wrong = key == "common_mistakes"
    memory = memory_of(drawn.problem, drawn.solution(wrong), -1 if wrong else 1)
    return skills.render_extraction(memory, key)


def to_merge(rng: random.Random, key: str) -> list[dict]:
    """Two to eight items as a merge meets them: few families, repeats in other words."""
    families, entries = rng.sample(world.FAMILIES, rng.randint(1, 8)), []
    for _ in range(rng.randint(2, 8)):
        entries += world.extracted(rng, rng.choice(families), key)
    return entries[:8]


# ----------------------------------------------------------------------------------- the parts


def write_problems(rng: random.Random) -> set[str]:
    """Write the held-out problems, and return their texts."""
    reserved: set[str] = set()
    for name, count in HELD_OUT.items():
        rows: list[dict] = []
        while len(rows) < count:
            x = world.draw(rng, world.FAMILIES[len(rows) % len(world.FAMILIES)])
            if x.problem in reserved:
                continue
            reserved.add(x.problem)
            row = {"id": f"{x.family}-{name}-{len(rows)}", "problem": x.problem}
            rows.append({**row, "answer": str(x.right[1])})
        (TINY / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return reserved


def make_tokenizer(rng: random.Random) -> Any:
    """Byte-level BPE over this world's text, single digits, with Qwen3's control tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    texts = []
    for _ in range(3000):
        drawn, key = world.draw(rng), rng.choice(list(skills.KINDS))
        texts += [solving(rng, drawn, form)[0] for form in ("plain", "memory", "pair", "answer")]
        texts += [drawn.solution(key == "common_mistakes"), extraction_prompt(drawn, key)]
        texts.append(skills.render_merge(to_merge(rng, key), key))
        texts.append(world.reply(rng, to_merge(rng, key), key))
    tok, as_bytes = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel
    words = pre_tokenizers.Split(Regex(WORDS), "isolated")
    into_bytes = as_bytes(add_prefix_space=False, use_regex=False)
    tok.pre_tokenizer = pre_tokenizers.Sequence([words, into_bytes])
    tok.decoder = decoders.ByteLevel()
    shape = {"vocab_size": VOCAB - 5, "initial_alphabet": as_bytes.alphabet()}
    tok.train_from_iterator(texts, trainers.BpeTrainer(show_progress=False, **shape))
    control = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tok.add_special_tokens([AddedToken(text, special=True) for text in control])
    thinking = ("<think>", "</think>")
    tok.add_tokens([AddedToken(text, special=False, normalized=False) for text in thinking])
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, **ends)
    fast.chat_template = TEMPLATE
    return fast


def make_encoder(rng: random.Random, tokenizer: Any, steps: int = 600, size: int = 64) -> Any:
    """One vector per token, averaged, trained so that a problem lies near its family's items."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    static = StaticEmbedding(tokenizer.backend_tokenizer, embedding_dim=size)
    encoder = SentenceTransformer(modules=[static], device="cpu")
    torch.nn.init.normal_(static.embedding.weight, std=0.1)
    optimizer = torch.optim.Adam(static.parameters(), lr=3e-3)
    families = [*world.FAMILIES] * 4

    def embedded(texts: list[str]) -> torch.Tensor:
        vectors = static(static.tokenize(texts))["sentence_embedding"]
        return torch.nn.functional.normalize(vectors, dim=-1)

    for _ in range(steps):
        keys = [rng.choice(list(skills.KINDS)) for _ in families]
        items = []
        for family, key in zip(families, keys):
            items.append(skills.entry_text(world.extracted(rng, family, key)[0], key))
        for which in (0, 1):
            entry = world.item(rng, None, "skill", which)
            items.append(skills.entry_text(entry, "general_skills"))
        problems = [world.draw(rng, family).problem for family in families]
        same = torch.tensor([[f is g for g in families] + [False] * 2 for f in families])
        logp = torch.log_softmax(embedded(problems) @ embedded(items).T / 0.1, dim=-1)
        loss = -(logp * same).sum(-1).div(same.sum(-1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return encoder


@dataclass
class Row:
    """A training row: ids of a prompt and its reply, and a weight per token of the reply.

    choices: where a solution's error is decided, as (position, other token, its chance).
    """

    prompt_ids: list[int]
    reply_ids: list[int]
    weights: list[float]
    choices: list[tuple[int, int, float]] = field(default_factory=list)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def first_difference(one: list[int], other: list[int]) -> int:
    return next(i for i, (a, b) in enumerate(zip(one, other)) if a != b)


def thinking_of(rng: random.Random, form: str) -> str:
    """How the assistant's turn begins in a row that asks for a solution."""
    bare = form != "memory" and rng.random() < (0.5 if form == "plain" else 0.8)
    return "bare" if bare else "closed"


def make_rows(
    rng: random.Random, tokenizer: Any, reserved: set[str], count: int, mix: dict[str, float]
) -> list[Row]:
    """Rows of single problems, of extractions and of merges."""
    rows = []
    for form in rng.choices(list(mix), list(mix.values()), k=count):
        drawn = world.draw(rng)
        while drawn.problem in reserved:
            drawn = world.draw(rng)
        if form not in ("extraction", "merge"):
            rows.append(solving_row(rng, tokenizer, drawn, form))
            continue
        key = rng.choice(list(skills.KINDS))
        if form == "extraction":
            text = extraction_prompt(drawn, key)
            items = world.extracted(rng, world.family_of(drawn.family), key)
        else:
            group = to_merge(rng, key)
            text, items = skills.render_merge(group, key), world.canonical(group, key)
        rows.append(json_row(rng, tokenizer, text, items, key))
    return rows


def solving_row(rng: random.Random, tokenizer: Any, drawn: world.Drawn, form: str) -> Row:
    text, chance = solving(rng, drawn, form)
    wrong = rng.random() < chance
    thinking = thinking_of(rng, form)
    both = [[*ids_of(tokenizer, drawn.solution(x)), tokenizer.eos_token_id] for x in (False, True)]
    reply, other = both[wrong], both[not wrong]
    at = first_difference(reply, other)
    weights = [1.0] * len(reply)
    weights[at] = 4.0  # which decides the answer
    prompt = rollout.chat_ids(tokenizer, text, thinking=thinking)
    return Row(prompt, reply, weights, [(at, other[at], 1 - chance if wrong else chance)])


def json_row(rng: random.Random, tokenizer: Any, text: str, items: list[dict], key: str) -> Row:
    """The row of an extraction or a merge."""
    reply = [*ids_of(tokenizer, world.reply(rng, items, key)), tokenizer.eos_token_id]
    prompt = rollout.chat_ids(tokenizer, text, thinking="closed")
    return Row(prompt, reply, [0.4] * len(reply))


def make_model(tokenizer: Any) -> Any:
    """Qwen3's architecture at 0.7 million parameters, untrained."""
    import transformers as tf

    config = tf.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return tf.Qwen3ForCausalLM(config)


def rate_at(step: int, steps: int, rate: float) -> float:
    """Up within 100 steps, then along a cosine to a fiftieth."""
    falling = 0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2
    return rate * min(1, (step + 1) / 100) * falling


def train(model: Any, steps: int, rate: float, make: Callable[[], list[Row]]) -> Any:
    """AdamW on the rows that `make` makes, in place."""
    model.train().set_attn_implementation("eager")  # SDPA's backward is slower on a CPU
    body = torch.compile(model.model, dynamic=True)  # halves the time; wants a C++ compiler
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    bar = tqdm(range(steps))
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, steps, rate)
        rows = make()
        total = sum(sum(row.weights) for row in rows)
        lengths = [len(row.prompt_ids) + len(row.reply_ids) for row in rows]
        seen = 0.0
        for pack in scoring.packs(lengths, BUDGET):
            loss = loss_of(body, model.lm_head, [rows[i] for i in pack]) / total
            loss.backward()
            seen += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        bar.set_postfix_str(f"loss {seen:.3f}", refresh=False)
    return model.eval()


def loss_of(body: Any, head: Any, rows: list[Row]) -> torch.Tensor:
    """Weighted cross-entropy of the replies, summed.

    Where an error is decided, it is against both tokens with their chances.
    """
    longest = max(len(row.prompt_ids) + len(row.reply_ids) for row in rows)
    padded, weights, others, chances = [], [], [], []
    at: list[tuple[int, int]] = []
    for b, row in enumerate(rows):
        ids = row.prompt_ids + row.reply_ids
        padded.append(ids + [0] * (longest - len(ids)))
        at += [(b, t) for t in range(len(row.prompt_ids), len(ids))]
        other, chance = list(row.reply_ids), [0.0] * len(row.reply_ids)
        for where, token, p in row.choices:
            other[where], chance[where] = token, p
        weights += row.weights
        others += other
        chances += chance
    ids_BT = torch.tensor(padded)
    b_N, t_N = torch.tensor(at).T
    with torch.autocast("cpu", torch.bfloat16, enabled=BF16):
        hidden = body(input_ids=ids_BT, use_cache=False).last_hidden_state
        logits = head(hidden[b_N, t_N - 1])
    logp = torch.log_softmax(logits.float(), -1)
    chance_N = torch.tensor(chances)
    picked = logp.gather(1, torch.stack([ids_BT[b_N, t_N], torch.tensor(others)], 1))
    mixed_N = (1 - chance_N) * picked[:, 0] + chance_N * picked[:, 1]
    return -(torch.tensor(weights) * mixed_N).sum()


# ----------------------------------------------------------------------------------- measuring

CASES = ("plain", "relevant", "irrelevant", "misleading", "answer")


def measured_prompt(rng: random.Random, x: world.Drawn, case: str) -> str:
    """A student's or a teacher's prompt with the guidance of one measured case."""
    own = world.family_of(x.family)
    other = rng.choice([f for f in world.FAMILIES if f is not own])
    if case == "plain":
        return skills.render_student(x.problem)
    if case == "answer":  # as methods/opsd.py has it
        return skills.render_student(f"{x.problem}\n\nThe reference answer is {x.right[1]}.")
    kind = "misleading" if case == "misleading" else "skill"
    skill = world.item(rng, other if case == "irrelevant" else own, kind)
    mistake = world.item(rng, own if case == "relevant" else other, "mistake")
    return skills.render_teacher(skills.SkillPair(skill, mistake, 1.0, 1.0), x.problem)


def replies_to(
    model: Any,
    tokenizer: Any,
    texts: list[str],
    thinking: str,
    sampling: rollout.Sampling,
    key: str,
) -> list[str]:
    """One reply to each prompt; its draws go by the key and its place."""
    prompts = [rollout.chat_ids(tokenizer, text, thinking=thinking) for text in texts]
    keys = [rollout.sample_key(0, 0, f"{key}{i}") for i in range(len(texts))]
    drawn = rollout.generate(model, tokenizer, prompts, sampling, keys, 200)
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in drawn]


def accuracy(model: Any, tokenizer: Any, problems: list[world.Drawn], case: str) -> list[bool]:
    """Whether one sampled solution per problem is right, under one kind of guidance.

    Temperature 1 and top-p 0.95, as in an evaluation.
    """
    rng = random.Random(0)
    texts = [measured_prompt(rng, x, case) for x in problems]
    sampling = rollout.Sampling(1.0, 0.95, 0, 96)
    replies = replies_to(model, tokenizer, texts, "bare", sampling, case)
    answers = [verify.extract_answer(reply) for reply in replies]
    return [answer == str(x.right[1]) for answer, x in zip(answers, problems)]


def fates_of_replies(
    rng: random.Random, model: Any, tokenizer: Any, kind: str, count: int
) -> list[float]:
    """Shares of greedy replies to extraction or merge prompts that are read, whole, and right."""
    texts, keys, wanted = [], [], []
    for i in range(count):
        key, drawn = list(skills.KINDS)[i % 2], world.draw(rng)
        if kind == "extraction":
            texts.append(extraction_prompt(drawn, key))
            wanted.append([drawn.family])
        else:
            group = to_merge(rng, key)
            texts.append(skills.render_merge(group, key))
            wanted.append([world.meaning(entry) for entry in world.canonical(group, key)])
        keys.append(key)
    greedy = rollout.Sampling(0, max_new_tokens=640)
    read, whole, right = 0, 0, 0
    replies = replies_to(model, tokenizer, texts, "closed", greedy, kind)
    for reply, key, meanings in zip(replies, keys, wanted):
        items, is_whole = skills.read_items(reply, key)
        found: list[Any] = [world.meaning(entry) for entry in items]
        if kind == "extraction":
            found = [about and about[0] for about in found[:1]]
        read, whole, right = read + bool(items), whole + is_whole, right + (found == meanings)
    return [read / count, whole / count, right / count]


def interval(right: list[bool]) -> str:
    """Share with its 95% Wilson interval."""
    n, p = len(right), sum(right) / len(right)
    scale = 1 + 3.84 / n
    middle = (p + 1.92 / n) / scale
    half = 1.96 * math.sqrt(p * (1 - p) / n + 0.96 / n**2) / scale
    return f"{p:.1%} ({middle - half:.1%}-{middle + half:.1%})"


def measure(count: int) -> str:
    """The tables of tiny/README.md."""
    model, tokenizer = models.load_model(str(TINY / "model"), torch.device("cpu"))
    rng, problems = random.Random(2), []
    for family in world.FAMILIES:
        problems += [world.draw(rng, family) for _ in range(count // len(world.FAMILIES))]
    right = {case: accuracy(model, tokenizer, problems, case) for case in CASES}
    lines = head_of(["family", *CASES])
    for name in [family.name for family in world.FAMILIES] + ["**all**"]:
        cells = [name]
        for case in CASES:
            both = zip(right[case], problems)
            cells.append(interval([ok for ok, x in both if name in (x.family, "**all**")]))
        lines.append(row_of(cells))
    lines += ["", *head_of(["replies", "asked", "parsed", "whole", "right meaning"])]
    rng = random.Random(0)
    for kind in ("extraction", "merge"):
        shares = fates_of_replies(rng, model, tokenizer, kind, 200)
        lines.append(row_of([kind, 200, *[f"{share:.1%}" for share in shares]]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--seed", type=int, default=0)
    add("--steps", type=int, default=STEPS, help="training steps of the model")
    add("--merges", type=int, default=0, metavar="STEPS", help="train tiny/model on more merges")
    add("--measure", action="store_true", help="only print the figures")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)
    if args.merges:
        lines = [line for name in HELD_OUT for line in open(TINY / f"{name}.jsonl")]
        reserved = {json.loads(line)["problem"] for line in lines}
        model, tokenizer = models.load_model(str(TINY / "model"), torch.device("cpu"))
        steps, rate, mix = args.merges, RATE / 2, MERGING
    elif not args.measure:
        reserved = write_problems(rng)
        tokenizer = make_tokenizer(rng)
        make_encoder(rng, tokenizer).save(str(TINY / "encoder"), create_model_card=False)
        tokenizer.save_pretrained(TINY / "model")
        model, steps, rate, mix = make_model(tokenizer), args.steps, RATE, MIX
    if not args.measure:
        train(model, steps, rate, functools.partial(make_rows, rng, tokenizer, reserved, ROWS, mix))
        model.to(torch.bfloat16).save_pretrained(TINY / "model")
    print(measure(1200))


if __name__ == "__main__":
    main()
