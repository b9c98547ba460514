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
import time
from collections.abc import Callable
from dataclasses import dataclass

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

VOCAB, STEPS, ROWS, RATE, BUDGET = 1024, 2600, 32, 2e-3, 1536
MIX = {
    "plain": 0.2,
    "memory": 0.06,
    "answer": 0.06,
    "pair": 0.46,
    "extraction": 0.12,
    "merge": 0.1,
}  # shares of the training rows
MERGING = {
    "plain": 0.1,
    "memory": 0.03,
    "answer": 0.03,
    "pair": 0.24,
    "extraction": 0.15,
    "merge": 0.45,
}
HELD_OUT = {"train": 2400, "valid": 240, "test": 240}  # problems that the model never sees here
# Qwen3's: enable_thinking=False ends on a closed think block, anything else on the bare header.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)

# ------------------------------------------------------------------------------------ the text


def guidance(rng: random.Random, family: str) -> tuple[list[dict], list[dict]]:
    """Skills and mistakes for a prompt: mostly one pair as for a teacher, sometimes up to four."""
    own = next(f for f in world.FAMILIES if f.name == family)

    def one(kinds: tuple[str, ...]) -> dict:
        u = rng.random()
        other = rng.choice([f for f in world.FAMILIES if f is not own])
        kind = rng.choice(kinds)
        if u < 0.1:
            return world.item(
                rng, None, "mistake" if kind == "mistake" else "skill", rng.randrange(2)
            )
        return world.item(rng, own if u < 0.55 else other, kind)

    count = 1 if rng.random() < 0.8 else rng.randint(2, 4)
    return [one(("skill", "misleading")) for _ in range(count)], [
        one(("mistake",)) for _ in range(count)
    ]


def solving(rng: random.Random, drawn: world.Drawn, form: str) -> tuple[str, float]:
    """A prompt that asks for a solution, and the chance of the error.

    form: plain, memory, pair or answer.
    """
    if form == "plain":
        return skills.render_student(drawn.problem), world.error_chance(drawn.family, [])
    if form == "memory":
        return skills.render("seed_problem", {"problem": drawn.problem}), world.error_chance(
            drawn.family, []
        )
    good, bad = guidance(rng, drawn.family)
    if form == "answer" and rng.random() < 0.5:
        good, bad = [], []
    pairs = [skills.SkillPair(g, e, 1.0, 1.0) for g, e in zip(good, bad)]
    text = skills.render_skills(pairs, drawn.problem)
    if form == "answer":
        shown = rng.choice(
            ("Reference answer: {}", "The reference answer is {}.", "Answer: {}")
        ).format(drawn.right[1])
        text = text.replace("\n\nPlease", f"\n\n{shown}\n\nPlease")
    return text, world.error_chance(drawn.family, good + bad, answer=form == "answer")


def memory(rng: random.Random, drawn: world.Drawn, wrong: bool) -> dict:
    return memory_of(drawn.problem, drawn.solution(wrong), -1 if wrong else 1)


def memory_of(problem: str, text: str, r: int) -> dict:
    """The memory record of a solution."""
    pred = verify.extract_answer(text)
    return skills.memory_of({"problem": problem, "text": text, "r": r, "pred": pred})


def to_merge(rng: random.Random, key: str) -> list[dict]:
    """Two to eight items as a merge meets them: few families, repeats in other words."""
    families = rng.sample(world.FAMILIES, rng.randint(1, 8))
    return [
        e for _ in range(rng.randint(2, 8)) for e in world.extracted(rng, rng.choice(families), key)
    ][:8]


# ----------------------------------------------------------------------------------- the parts


def make_tokenizer(rng: random.Random):
    """Byte-level BPE over this world's text, single digits, with Qwen3's control tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    texts = []
    for _ in range(3000):
        drawn, key = world.draw(rng), rng.choice(list(skills.FIELDS))
        wrong = key == "common_mistakes"
        texts += [
            solving(rng, drawn, form)[0] for form in ("plain", "memory", "pair", "answer")
        ] + [drawn.solution(wrong)]
        texts += [
            skills.render_extraction(memory(rng, drawn, wrong), key),
            skills.render_merge(to_merge(rng, key), key),
        ]
        texts += [world.reply(rng, to_merge(rng, key), key)]
    tok = Tokenizer(models.BPE())
    words = Regex(
        r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(words, "isolated"), as_bytes])
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tok.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=VOCAB - 5, initial_alphabet=alphabet, show_progress=False),
    )
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


def make_encoder(rng: random.Random, tokenizer, steps: int = 600, size: int = 64):
    """One vector per token, averaged, trained so that a problem lies near its family's items."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    static = StaticEmbedding(tokenizer.backend_tokenizer, embedding_dim=size)
    encoder = SentenceTransformer(modules=[static], device="cpu")
    torch.nn.init.normal_(static.embedding.weight, std=0.1)
    optimizer = torch.optim.Adam(static.parameters(), lr=3e-3)
    for _ in range(steps):
        keys = [rng.choice(list(skills.FIELDS)) for _ in range(4 * len(world.FAMILIES))]
        families = [*world.FAMILIES] * 4
        items = [
            skills.entry_text(world.extracted(rng, f, k)[0], k) for f, k in zip(families, keys)
        ]
        items += [
            skills.entry_text(world.item(rng, None, "skill", w), "general_skills") for w in (0, 1)
        ]
        problems = [world.draw(rng, f).problem for f in families]
        e = [
            torch.nn.functional.normalize(static(static.tokenize(t))["sentence_embedding"], dim=-1)
            for t in (problems, items)
        ]
        same = torch.tensor([[f is g for g in families] + [False] * 2 for f in families])
        logp = torch.log_softmax(e[0] @ e[1].T / 0.1, dim=-1)
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
    choices: list[tuple[int, int, float]]


def make_rows(
    rng: random.Random, tokenizer, reserved: set[str], count: int, mix: dict[str, float]
) -> list[Row]:
    """Rows of single problems, of extractions and of merges."""
    rows = []
    end = [tokenizer.eos_token_id]
    for form in rng.choices(list(mix), list(mix.values()), k=count):
        drawn = world.draw(rng)
        while drawn.problem in reserved:
            drawn = world.draw(rng)
        if form not in ("extraction", "merge"):
            text, chance = solving(rng, drawn, form)
            wrong = rng.random() < chance
            is_bare = form != "memory" and rng.random() < (0.5 if form == "plain" else 0.8)
            reply, other = (
                tokenizer.encode(drawn.solution(w), add_special_tokens=False) + end
                for w in (wrong, not wrong)
            )
            at = next(i for i, (a, b) in enumerate(zip(reply, other)) if a != b)
            weights = [1.0] * len(reply)
            weights[at] = 4.0  # which decides the answer
            thinking = "bare" if is_bare else "closed"
            prompt = rollout.chat_ids(tokenizer, text, thinking=thinking)
            choice = at, other[at], 1 - chance if wrong else chance
            rows.append(Row(prompt, reply, weights, [choice]))
            continue
        key = rng.choice(list(skills.FIELDS))
        if form == "extraction":
            family = next(f for f in world.FAMILIES if f.name == drawn.family)
            text = skills.render_extraction(memory(rng, drawn, key == "common_mistakes"), key)
            items = world.extracted(rng, family, key)
        else:
            group = to_merge(rng, key)
            text, items = skills.render_merge(group, key), world.canonical(group, key)
        rows.append(json_row(rng, tokenizer, text, items, key))
    return rows


def json_row(rng: random.Random, tokenizer, text: str, items: list[dict], key: str) -> Row:
    """The row of an extraction or a merge."""
    reply = tokenizer.encode(world.reply(rng, items, key), add_special_tokens=False)
    reply.append(tokenizer.eos_token_id)
    prompt = rollout.chat_ids(tokenizer, text, thinking="closed")
    return Row(prompt, reply, [0.4] * len(reply), [])


def make_model(tokenizer):
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


def train(model, steps: int, rate: float, make: Callable[[], list[Row]], glance: Callable[[], str]):
    """AdamW on the rows that `make` makes, in place; `glance` says how it goes."""
    model.train().set_attn_implementation(
        "eager"
    )  # SDPA's backward is several times slower on a CPU
    body = torch.compile(model.model, dynamic=True)  # halves the time; wants a C++ compiler
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    bar, began = tqdm(range(steps)), time.perf_counter()
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = (
                rate
                * min(1, (step + 1) / 100)
                * (0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2)
            )
        rows = make()
        total = sum(sum(row.weights) for row in rows)
        lengths = [len(row.prompt_ids) + len(row.reply_ids) for row in rows]
        seen = 0.0
        for pack in scoring.packs(lengths, BUDGET):
            loss = _loss(body, model.lm_head, [rows[i] for i in pack]) / total
            loss.backward()
            seen += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0:
            bar.set_postfix_str(f"loss {seen:.3f}")
        if step % 250 == 99:
            bar.write(
                f"step {step + 1}: loss {seen:.4f}, {time.perf_counter() - began:.0f} s; {glance()}"
            )
    return model.eval()


def _loss(body, head, rows: list[Row]) -> torch.Tensor:
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
    with torch.autocast("cpu", torch.bfloat16):
        hidden = body(input_ids=ids_BT, use_cache=False).last_hidden_state
        logits = head(hidden[b_N, t_N - 1])
    logp = torch.log_softmax(logits.float(), -1)
    chance_N = torch.tensor(chances)
    picked = logp.gather(1, torch.stack([ids_BT[b_N, t_N], torch.tensor(others)], 1))
    mixed_N = (1 - chance_N) * picked[:, 0] + chance_N * picked[:, 1]
    return -(torch.tensor(weights) * mixed_N).sum()


# ----------------------------------------------------------------------------------- measuring


def pair_for(rng: random.Random, family: str, case: str) -> skills.SkillPair | None:
    """The guidance of one measured case."""
    own = next(f for f in world.FAMILIES if f.name == family)
    other = rng.choice([f for f in world.FAMILIES if f is not own])
    if case in ("plain", "answer"):
        return None
    skill = world.item(
        rng,
        own if case != "irrelevant" else other,
        "misleading" if case == "misleading" else "skill",
    )
    return skills.SkillPair(
        skill, world.item(rng, own if case == "relevant" else other, "mistake"), 1.0, 1.0
    )


CASES = ("plain", "relevant", "irrelevant", "misleading", "answer")


def accuracy(model, tokenizer, problems: list[world.Drawn], case: str, seed: int = 0) -> list[bool]:
    """Whether one sampled solution per problem is right, under one kind of guidance.

    Temperature 1 and top-p 0.95, as in an evaluation.
    """
    rng = random.Random(seed)
    prompts, right = [], []
    for x in problems:
        pair = pair_for(rng, x.family, case)
        problem = x.problem
        if case == "answer":  # as methods/opsd.py has it
            problem += f"\n\nThe reference answer is {x.right[1]}."
        text = (
            skills.render_student(problem) if pair is None else skills.render_teacher(pair, problem)
        )
        prompts.append(rollout.chat_ids(tokenizer, text, thinking="bare"))
    sampling = rollout.Sampling(1.0, 0.95, 0, 96)
    for at in range(0, len(prompts), 200):
        part = range(at, min(at + 200, len(prompts)))
        keys = [rollout.sample_key(seed, 0, f"{case}{i}") for i in part]
        for i, ids in zip(
            part, rollout.generate(model, tokenizer, [prompts[i] for i in part], sampling, keys)
        ):
            right.append(
                verify.extract_answer(tokenizer.decode(ids, skip_special_tokens=True))
                == str(problems[i].right[1])
            )
    return right


def fates_of_replies(model, tokenizer, count: int, seed: int = 0) -> dict[str, dict[str, float]]:
    """How greedy replies to extraction and merge prompts fare: parsed, whole, and right."""
    rng, found = random.Random(seed), {}
    for kind in ("extraction", "merge"):
        asked = []
        for i in range(count):
            key, drawn = list(skills.FIELDS)[i % 2], world.draw(rng)
            if kind == "extraction":
                text = skills.render_extraction(memory(rng, drawn, key == "common_mistakes"), key)
                own = next(f for f in world.FAMILIES if f.name == drawn.family)
                allowed = [
                    world.item(None, own, "mistake" if key == "common_mistakes" else "skill")
                ]
            else:
                group = to_merge(rng, key)
                text, allowed = skills.render_merge(group, key), world.canonical(group, key)
            asked.append((key, text, allowed))
        sampling, out = rollout.Sampling(0, max_new_tokens=640), []
        for at in range(0, count, 50):
            part = [
                rollout.chat_ids(tokenizer, text, thinking="closed")
                for _, text, _ in asked[at : at + 50]
            ]
            out += rollout.generate(model, tokenizer, part, sampling, [0] * len(part))
        parsed = whole = meant = 0
        for (key, _, allowed), ids in zip(asked, out):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            items, complete = skills.read_items(text, key)
            parsed, whole = parsed + bool(items), whole + complete
            meanings = [world.meaning(e) for e in items]
            wanted = [world.meaning(e) for e in allowed]
            meant += bool(items) and (
                meanings == wanted
                if kind == "merge"
                else meanings[0] is not None and meanings[0][0] == wanted[0][0]
            )
        found[kind] = {
            "asked": count,
            "parsed": parsed / count,
            "whole": whole / count,
            "meant": meant / count,
        }
    return found


def _glance(model, tokenizer) -> str:
    rng = random.Random(1)
    problems = [world.draw(rng) for _ in range(160)]
    model.eval()
    shares = [
        f"{case} {sum(accuracy(model, tokenizer, problems, case)) / len(problems):.0%}"
        for case in CASES
    ]
    read = fates_of_replies(model, tokenizer, 16)
    model.train()
    return ", ".join(shares) + "".join(
        f", {k} {v['whole']:.0%}/{v['meant']:.0%}" for k, v in read.items()
    )


def interval(right: list[bool]) -> str:
    """Share with its 95% Wilson interval."""
    n, p = len(right), sum(right) / len(right)
    mid, half = (
        (p + 1.92 / n) / (1 + 3.84 / n),
        1.96 * math.sqrt(p * (1 - p) / n + 0.96 / n**2) / (1 + 3.84 / n),
    )
    return f"{p:.1%} ({mid - half:.1%}-{mid + half:.1%})"


def measure(count: int) -> str:
    """README.md's tables."""
    model, tokenizer = models.load_model(str(TINY / "model"), torch.device("cpu"))
    rng = random.Random(2)
    problems = [
        world.draw(rng, f) for f in world.FAMILIES for _ in range(count // len(world.FAMILIES))
    ]
    right = {case: accuracy(model, tokenizer, problems, case) for case in CASES}
    lines = ["| family | " + " | ".join(CASES) + " |", "|---|" + "---|" * len(CASES)]
    for f in world.FAMILIES:
        cells = [
            interval([ok for ok, x in zip(right[case], problems) if x.family == f.name])
            for case in CASES
        ]
        lines.append(f"| {f.name} | " + " | ".join(cells) + " |")
    lines.append("| **all** | " + " | ".join(interval(right[case]) for case in CASES) + " |")
    lines += ["", "| replies | asked | parsed | whole | right meaning |", "|---|---|---|---|---|"]
    for kind, r in fates_of_replies(model, tokenizer, 200).items():
        lines.append(
            f"| {kind} | {r['asked']} | {r['parsed']:.1%} | {r['whole']:.1%} | {r['meant']:.1%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps of the model")
    parser.add_argument(
        "--merges",
        type=int,
        default=0,
        metavar="STEPS",
        help="go on from the model that is here, with more merges",
    )
    parser.add_argument("--measure", action="store_true", help="only print the figures")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)
    if args.merges:
        reserved = {
            json.loads(line)["problem"]
            for name in HELD_OUT
            for line in (TINY / f"{name}.jsonl").read_text().splitlines()
        }
        model, tokenizer = models.load_model(str(TINY / "model"), torch.device("cpu"))
        steps, rate, mix = args.merges, RATE / 2, MERGING
    elif not args.measure:
        reserved = set()
        for name, count in HELD_OUT.items():
            rows = []
            while len(rows) < count:
                x = world.draw(rng, world.FAMILIES[len(rows) % len(world.FAMILIES)])
                if x.problem not in reserved:
                    reserved.add(x.problem)
                    rows.append(
                        {
                            "id": f"{x.family}-{name}-{len(rows)}",
                            "problem": x.problem,
                            "answer": str(x.right[1]),
                        }
                    )
            (TINY / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        tokenizer = make_tokenizer(rng)
        make_encoder(rng, tokenizer).save(str(TINY / "encoder"), create_model_card=False)
        tokenizer.save_pretrained(TINY / "model")
        model, steps, rate, mix = make_model(tokenizer), args.steps, RATE, MIX
    if not args.measure:
        make = functools.partial(make_rows, rng, tokenizer, reserved, ROWS, mix)
        train(model, steps, rate, make, functools.partial(_glance, model, tokenizer))
        model.to(torch.bfloat16).save_pretrained(TINY / "model")
    print(measure(1200))


if __name__ == "__main__":
    main()
