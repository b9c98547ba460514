"""A bank's life: retrieval and prompts, cold start, merging, online evolution (Algs. 2-4).

    python skills.py --model Qwen/Qwen3-1.7B --data mine.jsonl --out bank.json       a cold start
    python skills.py --out bank.json --server http://localhost:8000/v1               by a server

But for `nearest`, nothing down to the algorithms holds a model: they are passed in as functions.
embed(texts) gives a float array [n, d], and complete(prompts) a reply to each prompt. A `Writer`
may stand for `complete`: it samples anew when it is asked again, and logs what came of each reply
(D4).
"""

if __name__ == "__main__":  # --help and mistakes are answered before torch is imported
    import functools

    import cli
    import config
    import inputs

    look = inputs.look_at_cold_start
    parse = functools.partial(config.parse, None, "skills.py", __doc__, config.BankConfig)
    cli.answer("skills", lambda: look(*parse()))

import collections
import functools
import itertools
import pathlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any, TypeAlias

import cli
import config
import distributed
import files
import inputs
import policy
import replies
import rollout
from bank import SHORT, Items, SkillBank, SkillPair, as_json, entry_text, refuse_without_pairs
from config import BankConfig, Config
from distributed import World
from inputs import FIELDS, IDS
from policy import Ids, Model, Tokenizer
from problems import Problem, load_training
from served import Servers
from verify import Judge, is_success

PREFIX = {"general_skills": "gen_", "common_mistakes": "err_"}


# bank, problem, K, step -> at most K pairs, best first. This is the one place for another way to
# retrieve. The weights of Eq. 6 are a softmax over (s_g + s_e) / 2 with no temperature, so scores
# are on the scale of cosines: in [-1, 1], where a lead of 0.1 makes a teacher weigh 11% more.
Retriever = Callable[[SkillBank, Problem, int, int], list[SkillPair]]


def nearest(encoder: str, query_prompt: str, device: str) -> Retriever:
    """The pairs nearest to a problem by an encoder's embeddings (Eq. 2, S10)."""
    embed = policy.load_encoder(encoder, device)
    return lambda bank, x, k, step: bank.retrieve(query_prompt + x.problem, k, embed)


# ---------------------------------------------------------------------------------- prompts
_folder = inputs.PROMPTS


def use_prompts(folder: str) -> None:
    """Take the templates of this directory from here on; "" stands for the paper's, in prompts/.

    UserError unless it has them all. A command has one set of templates, as it has one domain.
    """
    global _folder
    if folder:
        inputs.check_prompts(folder)
    _folder = pathlib.Path(folder) if folder else inputs.PROMPTS
    template.cache_clear()


@functools.cache
def template(name: str) -> str:
    """A template of prompts/, word for word the paper's, or of --prompts."""
    return (_folder / f"{name}.txt").read_text(encoding="utf-8")


def render(name: str, values: dict[str, str]) -> str:
    """A template with each {name} replaced by its value."""
    return _fill(template(name), values)


def _fill(text: str, values: dict[str, str]) -> str:
    r"""One pass: a value is never expanded itself, \boxed{} is left alone, {{}} is {} (S9)."""
    replaced = {"{{}}": "{}"} | {f"{{{name}}}": value for name, value in values.items()}
    pattern = "|".join(map(re.escape, replaced))
    return re.sub(pattern, lambda match: replaced[match[0]], text)


def render_student(problem: str) -> str:
    """The plain prompt x (Fig. 6): the problem and nothing else."""
    return render("student", {"problem": problem})


def render_teacher(pair: SkillPair, problem: str) -> str:
    """The k-th teacher's prompt c_k(x) = g_k + e_k + x (Eq. 3, Fig. 6; D1)."""
    return render_skills([pair], problem)


def render_skills(pairs: Sequence[SkillPair], problem: str) -> str:
    """All pairs in one prompt, best first (S14): the teacher's with a bullet for each entry."""
    if not pairs:
        return render_student(problem)
    guidance = []
    for pair in pairs:
        values = {f"skill.{name}": text for name, text in pair.skill.items()}
        values |= {f"mistake.{name}": text for name, text in pair.mistake.items()}
        guidance.append(values)
    opening, skills, mistakes = template("teacher").split("\n\n")[:3]  # the rest: the student's
    blocks = [opening]
    for block in (skills, mistakes):
        heading, bullet = block.split("\n", 1)
        bullets = [_fill(bullet, values) for values in guidance]
        blocks.append("\n".join([heading, *bullets]))
    return "\n\n".join([*blocks, render_student(problem)])


def render_extraction(memory: dict, key: str) -> str:
    """Ask for a success's general skills or a failure's common mistakes (Alg. 2, App. D.2)."""
    hidden = ("problem_id", "made_with", "truncated")
    shown = {name: memory[name] for name in memory if name not in hidden}
    form = '\nEach item is an object with the string fields "{}", "{}" and "{}".'  # S13
    prompt = render(f"extract_{SHORT[key]}", {"memory_json": as_json(shown)})
    return prompt + form.format(*FIELDS[key])


def render_merge(items: Items, key: str) -> str:
    """Ask to merge a group of items (Alg. 3, line 5): their three fields and nothing else."""
    shown = [replies.item_of(entry, FIELDS[key]) or entry for entry in items]
    return render(f"merge_{SHORT[key]}", {"items_json": as_json(shown)})


# ---------------------------------------------------------------------------- Algorithms 2 to 4
def parse_json_items(text: str, key: str) -> Items:
    """The readable items of a reply, [] when there are none; see `replies.read_items`."""
    return replies.read_items(text, key, FIELDS[key])[0]


@dataclass(frozen=True)
class Question:
    """A prompt whose reply is to hold items."""

    prompt: str
    key: str  # of the list for which items are wanted
    shown: int = 0  # items that a merge shows; 0 for an extraction

    @property
    def kind(self) -> str:
        return f"{'merge' if self.shown else 'extract'}_{SHORT[self.key]}"


Answer = tuple[str, bool]  # a reply, and whether a limit cut it off


@dataclass
class Unlogged:
    """A plain function in the place of a `Writer`: it has no limit, and nothing is logged."""

    complete: Callable[[list[str]], list[str]]

    def answer(self, questions: list[Question], stage: str) -> list[Answer]:
        texts = self.complete([question.prompt for question in questions])
        return [(text, False) for text in texts]

    def log(self, question: Question, row: dict) -> None:
        """Keep nothing."""


Complete: TypeAlias = "Callable[[list[str]], list[str]] | Writer"


def _ask(questions: list[Question], complete: Complete, stage: str) -> list[Items]:
    """The items of each question's reply, [] where two replies could not be used (D4).

    A reply can be used when it has an item in it; a merge's only when it is whole, too, and has no
    more items than the merge was shown.
    """
    writer = complete if isinstance(complete, Writer) else Unlogged(complete)
    items_of_each: list[Items] = [[] for _ in questions]
    # The first reply is greedy, so that to ask again is of use only because the second is sampled.
    # What fails twice falls back as the paper says: an extraction to nothing, a merge to its group.
    for attempt in (1, 2):
        left = [i for i, items in enumerate(items_of_each) if not items]
        if not left:
            break
        answers = writer.answer([questions[i] for i in left], stage)
        for i, (reply, cut) in zip(left, answers):
            question = questions[i]
            items, whole = replies.read_items(reply, question.key, FIELDS[question.key])
            row = {"kind": question.kind, "attempt": attempt, "items": len(items)}
            if items and (not question.shown or (whole and len(items) <= question.shown)):
                items_of_each[i] = items
                row["outcome"] = "read" if whole else "repaired"
            else:
                row["outcome"] = "retried" if attempt == 1 else "lost"
                row["cause"] = "cut off" if cut else _cause(reply, items, whole)
            writer.log(question, {**row, "reply": reply})
    return items_of_each


def _cause(reply: str, items: Items, whole: bool) -> str:
    """Why a reply that was not cut off cannot be used."""
    if items:
        return "more items than it was shown" if whole else "not whole"
    return "no valid item" if re.search(r"[{\[]\s*[\"{}\]]", reply) else "no JSON"


def merge(
    items: Items, key: str, complete: Complete, group_size: int = 32, patience: int = 3
) -> tuple[Items, list[dict]]:
    """Hierarchical merging (Alg. 3): the merged entries under new ids, and a record per layer."""
    merged, layers = merge_lists({key: items}, complete, group_size, patience)
    return merged[key], layers[key]


def merge_lists(
    lists: dict[str, Items], complete: Complete, group_size: int, patience: int
) -> tuple[dict[str, Items], dict[str, list[dict]]]:
    """Algorithm 3 on one list or on both, layer by layer, so that their replies come together.

    A group stays as it is unless its reply is whole and holds at least one item (S11) and no more
    than the group: a merge may merge, never lose or add. An entry's `sources` follow it.
    """
    if group_size < 2 or patience < 1:
        sizes = f"{group_size} and {patience}"
        raise ValueError(f"merge (Alg. 3) needs group_size >= 2 and patience >= 1, got {sizes}")
    current = dict(lists)
    layers: dict[str, list[dict]] = {key: [] for key in lists}
    stagnant = dict.fromkeys(lists, 0)  # line 1
    unfinished = list(lists)
    while unfinished:  # line 2
        groups: dict[str, list[Items]] = {}
        questions = []
        for key in unfinished:
            starts = range(0, len(current[key]), group_size)
            groups[key] = [current[key][i : i + group_size] for i in starts]  # line 3
            for group in groups[key]:
                if len(group) > 1:  # line 4: not a last single item
                    questions.append(Question(render_merge(group, key), key, len(group)))  # line 5
        stage = f"merging, layer {len(layers[unfinished[0]]) + 1}"
        items_of_groups = iter(_ask(questions, complete, stage))
        for key in unfinished:
            merged: Items = []
            for group in groups[key]:
                items = next(items_of_groups) if len(group) > 1 else []
                if not items:
                    merged += group  # line 6
                for entry in items:  # line 8
                    parents = [e for e in group if replies.item_of(e, FIELDS[key]) == entry]
                    merged.append(_with_sources(entry, parents or group))
            layer: dict[str, Any] = {"layer_index": len(layers[key])}
            layer |= {"input_items": len(current[key]), "num_groups": len(groups[key])}
            layer |= {"output_items": len(merged), "stopped_reason": None}
            stagnant[key] = 0 if len(merged) < len(current[key]) else stagnant[key] + 1  # line 9
            layer["stagnant_layers"] = stagnant[key]
            if len(groups[key]) <= 1:  # line 11
                layer["stopped_reason"] = "root_group_reached"
            elif stagnant[key] >= patience:
                layer["stopped_reason"] = "stagnation_patience_reached"
            layers[key].append(layer)
            current[key] = merged  # line 10
        unfinished = [key for key in unfinished if not layers[key][-1]["stopped_reason"]]
    return {key: _numbered(entries, key) for key, entries in current.items()}, layers  # line 13


def _numbered(entries: Items, key: str) -> Items:
    """Entries under new ids; exact duplicates become one, with all sources (Alg. 3, line 12)."""
    twins: dict[tuple, Items] = {}
    for entry in entries:
        texts = tuple(entry.get(name) for name in FIELDS[key])
        twins.setdefault(texts, []).append(entry)
    final = []
    for number, same in enumerate(twins.values(), 1):
        entry = _with_sources(same[0], same)
        entry.pop(IDS[key], None)
        final.append({IDS[key]: f"{PREFIX[key]}{number:03d}", **entry})
    return final


def _with_sources(entry: dict, parents: Items) -> dict:
    """A copy of an entry with the sources of its parents, where they have any."""
    sources = itertools.chain(*[parent.get("sources", []) for parent in parents])
    each_once = sorted(set(sources))
    return {**entry, "sources": each_once} if each_once else dict(entry)


def memory_of(x: Any, with_answer: bool = False) -> dict:
    """A memory record (Alg. 2, line 5); of a long text only the beginning and the end (S21).

    x: a rollout, or any object with .problem, .text, .r and .pred; for `with_answer` (D3) .gold.
    """
    text = x.text.rpartition("</think>")[2].strip()
    lines = [line.strip()[:200] for line in text.split("\n") if line.strip()]
    feedback = f"The verifier {'accepted' if is_success(x.r) else 'rejected'} the final answer."
    if x.pred is None:
        feedback = "The attempt gave no final answer in a box."
    memory = {
        "problem_id": getattr(x, "problem_id", ""),
        "problem": x.problem,
        "completion": text if len(text) <= 2000 else f"{text[:1000]}\n[...]\n{text[-1000:]}",
        "reward": x.r,
        "predicted_answer": x.pred,
        "trajectory_summary": lines if len(lines) <= 8 else lines[:4] + lines[-4:],
        "feedback": feedback,
    }
    return {**memory, "reference_answer": x.gold} if with_answer else memory


def extract(memories: Items, complete: Complete) -> dict[str, Items]:
    """Candidates (Alg. 2, lines 8-14): up to three skills per success and mistakes per failure."""
    chosen: Items = []
    questions: list[Question] = []
    for key, wanted in (("general_skills", True), ("common_mistakes", False)):
        of_kind = [m for m in memories if is_success(m["reward"]) == wanted]  # line 8
        chosen += of_kind
        questions += [Question(render_extraction(m, key), key) for m in of_kind]
    items_of_each = _ask(questions, complete, "extracting")
    candidates: dict[str, Items] = {key: [] for key in FIELDS}
    for memory, question, items in zip(chosen, questions, items_of_each):
        sources = {"sources": [memory["problem_id"]]} if memory.get("problem_id") else {}
        candidates[question.key] += [{**item, **sources} for item in items[:3]]  # lines 10, 13
    return candidates


def cold_start(
    memories: Items, complete: Complete, *, group_size: int = 32, patience: int = 3
) -> SkillBank:
    """The initial bank from memory records (Alg. 2, lines 8-16)."""
    candidates = extract(memories, complete)
    merged, layers = merge_lists(candidates, complete, group_size, patience)  # line 15
    metadata: dict[str, Any] = {
        "source": f"cold start from {len(memories)} seed solutions",
        "seed_solutions": len(memories),
        "right_seed_solutions": sum(is_success(m["reward"]) for m in memories),
        "merge_group_size": group_size,
        "merge_stagnation_patience": patience,
    }
    for key in FIELDS:
        metadata[f"input_{key}"] = len(candidates[key])
        metadata[f"output_{key}"] = len(merged[key])
    metadata["general_merge_layers"] = layers["general_skills"]
    metadata["common_mistake_merge_layers"] = layers["common_mistakes"]
    return SkillBank(merged["general_skills"], merged["common_mistakes"], metadata)  # line 16


def evolve(
    bank: SkillBank,
    window: Sequence[Any],
    step: int,
    complete: Complete,
    *,
    update_every: int = 25,
    success_gate: float = 0.8,
    max_new_items: int = 5,
    dynamic_capacity: int = 30,
    group_size: int = 32,
    patience: int = 3,
    memory_answer: bool = False,
) -> SkillBank:
    """The bank after online evolution (Alg. 4); the same object when nothing is due.

    Static entries are never touched, and what has the text of one is no candidate (D11).
    window: all rollouts since this was last due (D2), as in `memory_of`. update_every: 0 for
    never. One evolution adds at most `max_new_items` dynamic entries, both lists together (S12); a
    list holds at most `dynamic_capacity`: what a merge puts first stays.
    """
    if not window or not update_every or step % update_every:  # line 1
        return bank
    success = sum(is_success(w.r) for w in window) / len(window)  # line 4
    if success >= success_gate:  # line 5
        return bank
    memories = [memory_of(x, memory_answer) for x in window]
    candidates = extract(memories, complete)  # lines 8-10
    update: dict[str, Any] = {"step": step, "success": success}
    static, old, fresh = {}, {}, {}
    for key in FIELDS:
        entries = bank.collection(key)
        static[key] = [e for e in entries if not e[IDS[key]].startswith("dyn_")]
        old[key] = [e for e in entries if e[IDS[key]].startswith("dyn_")]
        fresh[key] = _without_copies(candidates[key], static[key], key)
        update[f"candidate_{key}"] = len(candidates[key])
        update[f"copied_{key}"] = len(candidates[key]) - len(fresh[key])
    new, _ = merge_lists(fresh, complete, group_size, patience)  # line 11
    update |= {f"merged_{key}": len(new[key]) for key in FIELDS}
    both = {key: old[key] + new[key] for key in FIELDS if new[key]}
    merged, _ = merge_lists(both, complete, group_size, patience)  # line 12
    dynamic = dict(old)
    for key, entries in merged.items():
        kept = _without_copies(entries, static[key], key)
        update[f"copied_{key}"] += len(entries) - len(kept)
        dynamic[key] = [{**e, IDS[key]: f"dyn_{e[IDS[key]]}"} for e in kept]
    dynamic = {key: dynamic[key][:dynamic_capacity] for key in FIELDS}  # line 13
    growth = {key: max(0, len(dynamic[key]) - len(old[key])) for key in FIELDS}
    while sum(growth.values()) > max_new_items:
        larger = max(growth, key=lambda key: growth[key])
        growth[larger] -= 1
    for key in FIELDS:
        dynamic[key] = dynamic[key][: len(old[key]) + growth[key]]
        update[f"dynamic_{key}"] = len(dynamic[key])
        update[f"net_new_{key}"] = len(dynamic[key]) - len(old[key])
    metadata = {**bank.metadata, "updates": [*bank.metadata.get("updates", []), update]}
    skills, mistakes = (static[key] + dynamic[key] for key in FIELDS)
    return SkillBank(skills, mistakes, metadata, bank.extra)  # line 14


def _without_copies(entries: Items, static: Items, key: str) -> Items:
    """The entries whose text, but for its case, no static entry has (D11)."""
    texts = {entry_text(e, key).casefold() for e in static}
    return [e for e in entries if entry_text(e, key).casefold() not in texts]


@dataclass
class Writer:
    """The model that writes the bank: it answers extraction and merge prompts, thinking off (D4).

    The prompts are shared out over the ranks. A call is a collective, with the same prompts on
    every rank and the same replies.
    """

    model: Model
    tokenizer: Tokenizer
    world: World
    folder: pathlib.Path  # of replies.jsonl, which rank 0 writes
    reply_tokens: int
    seed: int
    rows: int = 16  # that decode at a time
    step: int = 0  # the step that the replies belong to
    decode: rollout.Decode = rollout.stream
    counts: collections.Counter[str] = field(default_factory=collections.Counter)  # by outcome
    asked: collections.Counter[str] = field(default_factory=collections.Counter)  # by prompt
    lost: collections.Counter[str] = field(default_factory=collections.Counter)  # by cause

    def log(self, question: Question, row: dict) -> None:
        """Keep a reply with its outcome, and count the outcome."""
        self.counts[row["outcome"]] += 1
        if row["outcome"] == "lost":
            self.lost[row["cause"]] += 1
        if self.world.main:
            row = {"step": self.step, **row, "prompt": question.prompt}
            files.append_jsonl(self.folder / "replies.jsonl", [row])

    def take(self) -> dict[str, int]:
        """The outcomes since they were last taken; every prompt is new again."""
        counts = {name: self.counts[name] for name in ("read", "repaired", "retried", "lost")}
        self.counts.clear()
        self.asked.clear()
        self.lost.clear()
        return counts

    def limit(self, prompt_ids: Ids, merging: bool) -> int:
        """The most tokens of a reply (D4): for a merge its prompt's and a quarter more.

        That is enough to repeat every item of the prompt, even in a wordier layout.
        """
        return len(prompt_ids) * 5 // 4 if merging else self.reply_tokens

    def answer(self, questions: list[Question], stage: str) -> list[Answer]:
        """A reply to each question, another one whenever a question comes again."""
        times = [self.asked[question.prompt] for question in questions]
        self.asked.update({question.prompt for question in questions})
        return self.replies(questions, times, stage)

    def replies(self, questions: list[Question], times: list[int], stage: str) -> list[Answer]:
        """Greedy replies to new questions, and sampled ones to those asked before (D4).

        times: how often each question was asked before. stage: the name on the progress bar.
        """
        new: list[rollout.Row] = []
        asked_before: list[rollout.Row] = []
        for i, (question, n) in enumerate(zip(questions, times)):
            ids = policy.chat_ids(self.tokenizer, question.prompt, thinking=False)
            key = rollout.sample_key(self.seed, 0, question.prompt, n)
            row = rollout.Row(i, ids, key, self.limit(ids, question.shown > 0))
            (asked_before if n else new).append(row)
        stops = policy.stop_ids(self.model, self.tokenizer)

        def finish(turn: rollout.Turn) -> list:
            finished = []
            for i, ids in turn:
                cut = not ids or ids[-1] not in stops
                finished.append((i, policy.text_of(self.tokenizer, ids), cut))
            return finished

        answers: dict[int, Answer] = {}
        greedy, sampled = rollout.Sampling(temperature=0.0), rollout.Sampling()
        for rows, sampling in ((new, greedy), (asked_before, sampled)):
            turns = rollout.spread(
                self.world,
                self.model,
                self.tokenizer,
                rows,
                sampling,
                self.rows,
                finish,
                stage,
                self.decode,
            )
            for turn in turns:
                answers |= {i: (text, cut) for i, text, cut in turn}
        return [answers[i] for i in range(len(questions))]


def writer_of(
    cfg: Config, world: World, model, tokenizer, folder: pathlib.Path, decode=rollout.stream
) -> Writer:
    """The bank's writer: the policy, or --update-model in its place, here or on --update-server."""
    if cfg.update_server:
        servers = Servers(cfg.update_server.split(), cfg.update_model, flag="--update-server")
        model, tokenizer = policy.load_outline(cfg.update_model, "--update-model")
        shortest = memory_of(SimpleNamespace(problem="", text="", r=-1, pred=None))
        text = render_extraction(shortest, "common_mistakes")
        prompt = policy.chat_ids(tokenizer, text, thinking=False)
        servers.check(len(prompt) + cfg.reply_tokens)  # each prompt is checked when it is asked
        decode = servers.stream
    elif cfg.update_model:
        name, flag = cfg.update_model, "--update-model"
        model, tokenizer = policy.load_model(name, world.device, cfg.dtype, cfg.attn, flag)
        decode = rollout.stream
    return Writer(
        model,
        tokenizer,
        world,
        folder,
        cfg.reply_tokens,
        cfg.seed,
        rows=cfg.rollout_rows or 16,
        decode=decode,
    )


def make_bank(
    problems: list[Problem],
    model,
    tokenizer,
    verifier: Judge,
    writer: Writer,
    cfg: Config,
    servers: Servers | None = None,
) -> SkillBank:
    """Algorithm 2 from problems to bank, shared over the ranks.

    `model` solves seed problems under settings of their own (S21), here or on `servers`, and
    `writer` answers the prompts. Memories go to memories.jsonl in the writer's folder as they come,
    and what a killed run has made is used again.
    """
    world, path = writer.world, writer.folder / "memories.jsonl"
    chosen = random.Random(cfg.seed).sample(problems, min(cfg.cold_start, len(problems)))
    sampling = rollout.Sampling(
        cfg.cold_start_temperature,
        cfg.cold_start_top_p,
        cfg.cold_start_top_k,
        cfg.cold_start_tokens,
    )
    made_with = {"model": cfg.model, "seed": cfg.seed, **asdict(sampling)}
    made_with |= {"thinking": cfg.cold_start_thinking, "answer": cfg.memory_answer}
    if cfg.verifier != Config.verifier:
        made_with["verifier"] = inputs.verifier_version(cfg.verifier)
    if cfg.prompts:
        made_with["prompt"] = template("memory")
    made_with |= {"engine": servers.engine} if servers else {}  # S27
    rows = files.read_jsonl(path)
    memories = {m["problem_id"]: m for m in rows if m.get("made_with") == made_with}
    left = [x for x in chosen if memories.get(x.id, {}).get("problem") != x.problem]
    distributed.agree(len(left), world, "memories")  # and all have read before rank 0 writes
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name("replies.jsonl").unlink(missing_ok=True)  # all its replies are asked for again
    texts = [render("memory", {"problem": x.problem}) for x in left]
    think = cfg.cold_start_thinking
    prompts = [policy.chat_ids(tokenizer, text, thinking=think) for text in texts]
    keys = [rollout.sample_key(cfg.seed, 0, x.id) for x in left]

    def finish(turn: rollout.Turn) -> Items:
        fresh = []
        for roll in rollout.judge(model, tokenizer, left, prompts, turn, verifier):
            about = {"truncated": roll.truncated, "made_with": made_with}
            fresh.append({**memory_of(roll, cfg.memory_answer), **about})
        return fresh

    turns = rollout.spread(  # lines 2-7
        world,
        model,
        tokenizer,
        rollout.rows_of(prompts, keys, cfg.cold_start_tokens),
        sampling,
        writer.rows,
        finish,
        "solving",
        servers.stream if servers else rollout.stream,
    )
    for fresh in turns:
        if world.main:
            files.append_jsonl(path, fresh)
        memories |= {m["problem_id"]: m for m in fresh}
    seeds = [memories[x.id] for x in chosen]
    bank = cold_start(seeds, writer, **cfg.merging)
    bank.metadata["truncated_seed_solutions"] = sum(m.get("truncated", False) for m in seeds)
    bank.metadata["lost_replies"] = dict(writer.lost)
    outcomes = writer.take()
    bank.metadata.update(seed=cfg.seed, seed_problems=[x.id for x in chosen], replies=outcomes)
    bank.metadata.update({"engine": servers.engine} if servers else {})
    return bank


# ------------------------------------------------------------------------------------- the command
def main(argv: Sequence[str] | None = None) -> int:
    """python skills.py --out bank.json: a bank made by cold start, with the settings of sgsd.py."""

    def body() -> None:
        cfg, resume = config.parse(argv, "skills.py", __doc__, BankConfig)
        assert isinstance(cfg, BankConfig)
        folder = inputs.bank_folder(cfg, resume)
        world = distributed.init(cfg.device)
        use_prompts(cfg.prompts)
        with distributed.locked(folder, world):
            problems, _ = load_training(cfg)
            servers = None
            if cfg.server:
                servers = Servers(cfg.server.split(), cfg.model)
                model, tokenizer = policy.load_outline(cfg.model)
                longest = max((x.problem for x in problems), key=len, default="")
                prompt = policy.chat_ids(
                    tokenizer,
                    render("memory", {"problem": longest}),
                    thinking=cfg.cold_start_thinking,
                )
                servers.check(len(prompt) + cfg.cold_start_tokens)
            else:
                model, tokenizer = policy.load_model(cfg.model, world.device, cfg.dtype, cfg.attn)
            decode = servers.stream if servers else rollout.stream
            writer = writer_of(cfg, world, model, tokenizer, folder, decode)
            with inputs.make_verifier(cfg) as verifier:
                bank = make_bank(problems, model, tokenizer, verifier, writer, cfg, servers)
            refuse_without_pairs(bank, cfg, "the same command")
            if world.main:
                bank.save(cfg.out)
                print(f"{cfg.out}: {bank.sizes}")
            distributed.leave_together(world)

    return cli.command("skills", body)


if __name__ == "__main__":
    distributed.leave(main())
