"""A run on disk: opened or continued, sampled, logged, saved and stopped.

    RUN/config.json       settings, digests of code and problems, versions; each continuation
    RUN/checkpoints/      all that a run needs to continue, per saved step: a PEFT adapter, the
                          optimizer's state, the bank in use with its window; digests of the files
    RUN/bank/             bank.json, in use now; step_000025.json and so on, a version per
                          evolution; memories and replies. A run without a checkpoint continues
                          from step_000000.json
    RUN/metrics.jsonl     a row per step; rollouts.jsonl per rollout, tokens.jsonl per audited one
    RUN/problems.json     fingerprints of the training problems, for eval.py

The same command continues a run: its settings must equal the run's, except for the free ones
(`lib.config.setting`). Only rank 0 reads the data, and only rank 0 writes. The other ranks read
nothing in the folder but the last checkpoint. This module does not know what a bank is made of.
"""

import contextlib
import functools
import json
import os
import pathlib
import shlex
import shutil
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor
from tqdm import tqdm

import distributed
import rollout
from distributed import World
from lib import command, config, files, model, problems, runlog, served, verify
from lib.config import Config, EvalConfig
from lib.problems import Problem
from rollout import Job, Rollout, Sampling

ROOT = pathlib.Path(__file__).parent.parent
BAD_STEPS = 3  # a command ends after this many steps in a row whose gradient is not finite
Stream = Callable[..., Iterator[list[Job]]]  # (jobs, sampling, rows) -> lists of finished jobs


@dataclass(kw_only=True)
class Run:
    """A training run: its progress, what a step needs, and its files. `Run.open` makes it.

    `step` is the last complete step; `skipped` and `bank` are as they were after it.
    """

    cfg: Any  # a Config; a method's own class has more settings
    world: World
    # What rank 0 reads of the data and the folder, and sends to the other ranks: `read_state`.
    manifest: dict[str, Any]  # config.json, as this command writes it
    problems: list[Problem]
    step: int = 0
    checkpoint: pathlib.Path | None = None  # folder of the last checkpoint when the command began
    digests: dict[str, str] = field(default_factory=dict)  # of the files of `checkpoint`
    # The bank in use after `step`; None: not made yet, or the method uses none. A dataclass with
    # save, remember, evolution_is_due, retrieve, counts and window.
    bank: Any = None
    skipped: int = 0  # steps in a row, up to `step`, whose gradient was not finite
    memories: dict[str, dict] = field(default_factory=dict)  # from a killed cold start, by problem
    # What each rank loads.
    verifier: verify.Judge
    lm: Any = None  # the policy: a causal language model with adapters
    tokenizer: Any = None
    stream: Any = None  # a `Stream`: `rollout.stream` of this policy
    server: served.Server | None = None  # samples the first bank in the place of `generate`
    embed: Callable[[Sequence[str]], Any] | None = None  # texts -> [n, d]
    optimizer: Any = None  # AdamW; None without adapters
    extra_tensors: dict[str, Tensor] = field(default_factory=dict)  # saved with a checkpoint
    # What changes from step to step.
    signals: command.Signals = field(default_factory=command.Signals)
    clock: runlog.Stopwatch = field(default_factory=runlog.Stopwatch)  # times the present step
    metrics: list[dict] = field(default_factory=list)  # rows of this command's steps
    printed: set[str] = field(default_factory=set)  # lines of `print_once`
    track: Callable[[dict], object] | None = None  # sends a row to rank 0's tracker

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        cfg: Config,
        load_bank: Callable[..., Any],
        student_prompt: Callable[[Any, str], list[int]],
        load: Callable[[Any], None] | None = None,
    ) -> Iterator[Self]:
        """Open the run of --out, new or to be continued, with its logs cut to the last checkpoint.

        load_bank: reads the file of a bank, and refuses lists with fewer entries than its second
        argument. student_prompt: see `leave_out_long`. load: a function to call instead of
        `load_run`.
        Until all ranks have loaded, we write nothing but the folder and its lock. Bad input, a full
        disk, a lost server or the third bad step in a row ends the command with one line and exit
        code 2.
        """
        signals = command.Signals()
        signals.install()  # from here on Ctrl-C ends the command at once, except in a step
        with contextlib.ExitStack() as at_exit:  # closes the verifier and unlocks the folder
            with command.one_line_errors(cfg.program, *command.GIVEN):
                world = distributed.init(cfg.device)
                state: dict[str, Any] = {}
                if world.main:
                    stored_manifest(cfg)  # refuses a folder that is no run, before we lock it
                    at_exit.enter_context(files.locked(pathlib.Path(cfg.out)))
                    state = read_state(cfg, world, load_bank)
                state = distributed.broadcast(state, world)
                verifier = verify.load_judge(cfg.verifier)(cfg.verify_timeout)
                at_exit.enter_context(verifier)
                run = cls(cfg=cfg, world=world, verifier=verifier, signals=signals, **state)
                if world.size > 1:  # each machine may have its own copy of the model
                    distributed.refuse_other_files(files.tree_digest(cfg.model), world)
                if run.checkpoint:
                    with reading(run.checkpoint):
                        files.refuse_damaged(run.checkpoint, run.digests)
                (load or load_run)(run)
                leave_out_long(run, student_prompt)
                distributed.barrier(world)
                if world.main:
                    run.begin()
            with command.one_line_errors(cfg.program, *command.LATER):
                yield run
            if world.main:
                print(what_next(run))

    @property
    def device(self) -> torch.device:
        return self.world.device

    @property
    def out(self) -> pathlib.Path:
        return pathlib.Path(self.cfg.out)

    @functools.cached_property
    def stops(self) -> list[int]:
        """The ids that end a completion."""
        return rollout.stop_ids(self.lm, self.tokenizer)

    @functools.cached_property
    def masked_ids(self) -> set[int]:
        """The ids that the token mask leaves out (S2): formatting, special and stop ids."""
        return model.masked_token_ids(self.tokenizer) | {*self.stops}

    def begin(self) -> None:
        """Cut the logs back to the last checkpoint, write config.json, and describe the run.

        We also write bank/bank.json again: a kill in an evolution may leave a newer bank there.
        """
        cut(self)
        files.write_json(self.out / "config.json", self.manifest)
        fingerprints = [problems.fingerprint(x.problem) for x in self.problems]
        files.write_json(self.out / "problems.json", fingerprints)
        if self.bank is not None:
            # (Only a checkpoint keeps the window.)
            replace(self.bank, window=[]).save(self.out / "bank" / files.BANK)
        self.track = runlog.open_tracker(self.out, self.manifest)  # may fail, so before we print
        learn = sum(p.numel() for p in model.trained(self.lm).values()) if self.cfg.steps else 0
        print(f"model {self.cfg.model}: {learn:,} of {self.lm.num_parameters():,} parameters learn")
        if self.cfg.masks_tokens:
            masked = sorted(self.masked_ids)
            texts = " ".join(repr(self.tokenizer.decode([i])) for i in masked[:40])
            print(f"token mask: {len(masked)} formatting and special ids (S2): {texts}")
        if self.manifest["continuations"]:
            for line in self.manifest["continuations"][-1]["changed"]:
                print(f"changed: {line}")
            print(f"continues after step {self.step}" if self.step else "starts with step 1")

    # ------------------------------------------------------------------------------ the run's files

    def log(self, rows: list[dict], norm: float) -> None:
        """Rank 0 logs the last step and prints the step's line. Every rank must call this.

        rows: the step's rows of rollouts.jsonl from all ranks. If a row has an "audit", that is the
        rollout's row of tokens.jsonl.
        """
        audits = [row.pop("audit") for row in rows if "audit" in row]
        rate = self.optimizer.param_groups[0]["lr"]
        peak = runlog.memory_gb(self.device)
        metrics = runlog.summarize(self.step, rows, norm, rate, self.clock.seconds, peak)
        self.metrics.append(metrics | (self.bank.counts if self.bank else {}))
        for name, lines in zip(runlog.LOGS, (self.metrics[-1:], rows, audits)):
            self.log_rows(name, lines)
        late = sum(distributed.all_gather(self.verifier.timeouts, self.world))
        if self.world.main:
            if self.track:
                self.track(self.metrics[-1])
            warnings = runlog.warnings_after(self.metrics, self.cfg)
            for line in [runlog.log_line(metrics, self.cfg.steps, late), *warnings]:
                tqdm.write(line)

    def log_rows(self, name: str, rows: list[dict]) -> None:
        """Rank 0 appends rows to the log of this name, such as "bank/replies"."""
        if self.world.main and rows:
            files.append_jsonl(self.out / f"{name}.jsonl", rows)

    def save_is_due(self) -> bool:
        """Whether to save a checkpoint now, after the step that was just made.

        We save every --checkpoint-every steps, after step --steps, and before each evolution.
        """
        is_due = self.step % self.cfg.checkpoint_every == 0 or self.step == self.cfg.steps
        return is_due or evolution_is_due(self)

    def save(self) -> None:
        """Rank 0 saves a checkpoint of `step` unless it exists; the other ranks wait."""
        path = files.of_step(self.out / "checkpoints", self.step)
        if self.world.main and not path.exists():
            with files.whole(path) as folder:
                self.save_weights(folder)
                if self.bank is not None:
                    self.bank.save(folder / files.BANK)
                files.write_digests(folder)
            tqdm.write(f"saved {path}")
        distributed.barrier(self.world)

    def save_weights(self, folder: pathlib.Path) -> None:
        """Write weights and optimizer to a checkpoint's folder, which does not exist yet."""
        model.save(folder, self.lm, self.tokenizer, self.optimizer, self.extra_tensors)

    def save_bank(self) -> None:
        """Rank 0 saves the bank that was made or evolved after the last step, changed or not.

        We replace the checkpoint's file last. Until then this file has the old bank and its window,
        so a run that is killed during the evolution repeats the evolution.
        """
        if self.world.main:
            self.bank.save(files.of_step(self.out / "bank", self.step, ".json"))
            self.bank.save(self.out / "bank" / files.BANK)
            if self.step:  # the first bank, of step 0, has no checkpoint
                checkpoint = files.of_step(self.out / "checkpoints", self.step)
                self.bank.save(checkpoint / files.BANK)


# ---------------------------------------------------------------------------- between two steps


def evolution_is_due(run: Run) -> bool:
    """Whether the bank must evolve now, after the last step; see the bank's own method."""
    return run.bank is not None and run.bank.evolution_is_due(run.step, run.cfg.evolve_every)


def should_stop(run: Run) -> bool:
    """Whether to save and stop: after a signal on any rank, or the third bad step in a row (S34).

    Every rank must call this.
    """
    is_asked = any(distributed.all_gather(bool(run.signals.first), run.world))
    return is_asked or run.skipped >= BAD_STEPS


def is_complete(run: Run) -> bool:
    """Whether all steps are made, and the evolution after the last one, if it was due."""
    return run.step >= run.cfg.steps and not evolution_is_due(run)


def exit_code(run: Run) -> int:
    """0 if the run is complete, else 130. UserError after three bad steps in a row (S34).

    The run has saved these steps. A command that continues the run also continues their count, so a
    run whose last three steps are bad never exits with 0.
    """
    if run.skipped >= BAD_STEPS:
        raise command.UserError(
            f"the gradient of the last {run.skipped} steps was not finite: no weight has moved; "
            "the same command tries the next step, if any is left; or lower --learning-rate in a "
            "new --out"
        )
    return 0 if is_complete(run) else 130


# -------------------------------------------------------------------------------------- lengths


def leave_out_long(
    run: Run, student_prompt: Callable[[Any, str], list[int]], reply: int = 1
) -> None:
    """Leave out problems whose prompts exceed --max-prompt-tokens or the model's context (S35).

    student_prompt(run, problem): the ids of a problem's plain prompt. reply: tokens that the
    context must leave for a solution. ValueError if no problem is left.
    """
    context = rollout.context_limit(run.lm)
    most = min(run.cfg.max_prompt_tokens, context - reply)  # a longer prompt is left out
    limit = f"the model's context of {context:.0f}"
    if reply > 1:
        limit += f", less {reply} for a solution, which a smaller --max-new-tokens lowers"
    roomy = context - run.cfg.max_new_tokens  # a longer prompt leaves less than --max-new-tokens
    lengths = [len(student_prompt(run, x.problem)) for x in run.problems]
    kept = [x for x, tokens in zip(run.problems, lengths) if tokens <= most]
    dropped = len(run.problems) - len(kept)
    cramped = sum(roomy < tokens <= most for tokens in lengths)  # kept, with less for a solution
    line = (
        f"{dropped} of {len(run.problems)} problems are left out, as their prompts have more than "
        f"{most:.0f} tokens (--max-prompt-tokens, or {limit}); in {cramped} of the others, that "
        "context leaves a solution less than --max-new-tokens"
    )
    if not kept:
        raise ValueError(line)
    if run.world.main and (dropped or cramped):
        print(line)
    run.problems = kept


def teacher_ids(run: Run, text: str, roll: Rollout) -> list[int] | None:
    """A teacher's prompt as ids; None if the context does not hold it with the solution (S35).

    Such a teacher is left out for this solution. The first time, the process prints a line.
    """
    ids = rollout.chat_ids(run.tokenizer, text, thinking=run.cfg.teacher_prefix)
    context = rollout.context_limit(run.lm)
    if len(ids) + len(roll.completion_ids) <= context:
        return ids
    print_once(
        run,
        f"teachers are left out where the model's context of {context:.0f} tokens does not hold "
        "their prompt with the solution (S35)",
    )
    return None


def print_once(run: Run, line: str) -> None:
    """Print a line, unless this process has printed it before in this run."""
    if line not in run.printed:
        run.printed.add(line)
        tqdm.write(f"{line}; this line comes once from each process")


# ------------------------------------------------------------------------------- decoding


def bank_stream(run: Run) -> Stream:
    """What decodes for the bank: until the first bank is made, the server if there is one (S27)."""
    stream = run.server.stream if run.server and run.bank is None else run.stream
    return functools.partial(stream, rows=run.cfg.rollout_rows or 64)


def shared_rollouts(
    run: Run, jobs: list[Job], sampling: Sampling
) -> Iterator[list[tuple[Job, Rollout]]]:
    """Divide jobs among the ranks. Every rank yields the rollouts of all jobs, turn by turn.

    jobs: the same on every rank. The rank that decodes a solution judges it.
    """
    stream = bank_stream(run)

    def work(jobs_of_rank: list[Job]) -> Iterator[list[tuple[Job, Rollout]]]:
        turns = stream(jobs_of_rank, sampling)
        return rollout.rollouts(run.tokenizer, run.stops, run.verifier, turns)

    return distributed.share_jobs(run.world, jobs, work, "solving")


def bank_writer(run: Run, step: int) -> Callable[[list[str]], list[str]]:
    """The present policy as the writer of the bank's entries: prompts -> replies, on every rank.

    The writer does not think. Its reply to a new prompt is greedy. If a prompt comes again, we
    sample its reply, anew each time (D4). A prompt comes again if `skills.ask` could not use the
    first reply, or if a later layer of merging shows the same group. A writer remembers its
    prompts: make a new one for each cold start and each evolution.
    step: the training step that the replies belong to, in bank/replies.jsonl.
    """
    requests: Counter[str] = Counter()  # number of earlier calls with a prompt

    def complete(prompts: list[str]) -> list[str]:
        repeats = [requests[prompt] for prompt in prompts]
        requests.update({*prompts})  # a prompt that is twice in one call counts once
        replies = shared_replies(run, prompts, repeats)
        exchanges = zip(prompts, repeats, replies, strict=True)
        rows = [{"step": step, "repeat": n, "prompt": p, "reply": text} for p, n, text in exchanges]
        run.log_rows("bank/replies", rows)
        return replies

    return complete


def shared_replies(run: Run, prompts: list[str], repeats: list[int]) -> list[str]:
    """The replies to prompts, greedy where repeat is 0, else sampled. The ranks share the work.

    A sampled reply's draws depend on the seed, the prompt and its repeat alone. A reply has at most
    --reply-tokens tokens, or 5/4 of its prompt's tokens if that is more: enough for a merge to
    repeat its items in more words. If a prompt fills the model's context, the reply is "". We print
    how many replies the context has cut.
    """
    context = rollout.context_limit(run.lm)
    greedy = Sampling(temperature=0.0)
    sampled = Sampling(temperature=1.1, top_p=0.95, top_k=20)
    jobs: dict[Sampling, list[Job]] = {greedy: [], sampled: []}
    for i, (prompt, repeat) in enumerate(zip(prompts, repeats, strict=True)):
        prompt_ids = rollout.chat_ids(run.tokenizer, prompt, thinking="closed")
        limit = max(run.cfg.reply_tokens, len(prompt_ids) * 5 // 4)
        key = rollout.sample_key(run.cfg.seed, 0, prompt, repeat)
        if len(prompt_ids) < context:
            jobs[sampled if repeat else greedy].append(Job(i, prompt_ids, key=key, limit=limit))
    cut_replies = len(prompts) - sum(map(len, jobs.values()))  # so far the prompts that do not fit
    replies = [""] * len(prompts)
    for sampling in jobs:
        work = functools.partial(bank_stream(run), sampling=sampling)
        for turn in distributed.share_jobs(run.world, jobs[sampling], work, "writing"):
            for job in turn:
                replies[job.index] = rollout.text_of(run.tokenizer, job.ids)
                cut_replies += len(job.prompt) + len(job.ids) >= context
    if cut_replies and run.world.main:
        tqdm.write(
            f"bank: the model's context of {context:.0f} tokens cut {cut_replies} of "
            f"{len(prompts)} replies; a model with a longer one helps, and for merges a smaller "
            "--merge-group-size"
        )
    return replies


# ------------------------------------------------- what rank 0 reads, before anything is loaded


def stored_manifest(cfg: Config) -> dict[str, Any]:
    """The config.json of the run in --out; {} if that is empty, ValueError if it holds no run."""
    out = pathlib.Path(cfg.out)
    names = sorted(path.name for path in out.glob("[!.]*"))
    stored = {}
    if "config.json" in names:
        parts = {"settings": dict, "continuations": list}
        stored = files.read_json(out / "config.json", parts)
    if names and "program" not in stored:
        raise ValueError(f"--out {out}: holds {names[0]}, and no run; give another directory")
    return stored


def load_training(cfg: Config) -> list[Problem]:
    """The training problems; prints their counts.

    ValueError if one is in an evaluation set, or has no text in the field of a --teacher-field.
    """
    data, counts = problems.load_problems(
        cfg.data,
        split=cfg.split,
        problem_field=cfg.problem_field,
        answer_field=cfg.answer_field,
        answer_after=cfg.answer_after,
        boxed=cfg.verifier == Config.verifier,  # mathematics
    )
    print(f"data {cfg.data}:", ", ".join(f"{n} {name}" for name, n in counts.items()))
    problems.refuse_overlap(data, f"--data {cfg.data}")
    name = getattr(cfg, "teacher_field", "")  # some of methods/ have this setting
    for x in data if name else []:
        text = x.extra.get(name)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"--teacher-field {name}: must be a text, got {text!r:.40} in {x}")
    return data


def new_manifest(cfg: Config, data: list[Problem], world: World) -> dict[str, Any]:
    """A new run's config.json: its provenance, and what a command must share to continue it."""
    settings = {name: getattr(cfg, name) for name in cfg.rules()}
    return {
        "id": uuid.uuid4().hex[:12],
        **runlog.provenance(),
        "continuations": [],
        "program": cfg.program,
        "settings": json.loads(json.dumps(settings)),  # tuples become lists
        # With all fields of a problem, because a verifier or a teacher may read them.
        "problems": files.digest([(x.id, x.problem, x.answer, x.extra) for x in data]),
        "code": digest_of_code(cfg),
        "processes": world.size,
    }


def digest_of_code(cfg: Config) -> str:
    """A digest of the code and the prompts that a run may depend on.

    We include prompts/, the imported modules of the project, the file that was started, and the
    verifier's file. Other files in the project's folder do not change the digest.
    """
    started = getattr(sys.modules["__main__"], "__file__", __file__)  # none in a shell
    paths = [pathlib.Path(verify.file_of(cfg.verifier)), pathlib.Path(started)]
    paths += ROOT.glob("prompts/*.txt")
    for module in [*sys.modules.values()]:
        path = pathlib.Path(getattr(module, "__file__", None) or "")
        if ROOT in path.parents and "site-packages" not in path.parts:
            paths.append(path)
    return files.digest(sorted({files.file_digest(path) for path in paths}))


def read_state(cfg: Config, world: World, load_bank: Callable[..., Any]) -> dict[str, Any]:
    """The fields of a `Run` that rank 0 reads, for a new run or for one that continues.

    ValueError if this command may not continue the folder's run.
    """
    runlog.load_tracker(cfg.report_to)  # if it is missing, we say so before we read data
    data = load_training(cfg)
    manifest = new_manifest(cfg, data, world)
    checkpoints = files.by_step(pathlib.Path(cfg.out, "checkpoints"))
    step = max(checkpoints, default=0)
    checkpoint = checkpoints.get(step)
    skipped = 0
    memories: dict[str, dict] = {}
    if stored := stored_manifest(cfg):
        manifest = continued(cfg, step, manifest, stored)
        skipped = skipped_so_far(cfg, step, stored)
        if not (checkpoint or first_bank(cfg).exists()):
            memories = memories_so_far(cfg, stored)
    digests: dict[str, str] = {}
    with reading(checkpoint):
        if checkpoint:
            digests = files.digests_of(checkpoint, needed=True)
        bank = bank_so_far(cfg, checkpoint, load_bank)
    if cfg.server and bank is not None:
        print("--server: nothing asks it, as there is a bank: steps and evolutions use `generate`")
    return {
        "manifest": manifest,
        "problems": data,
        "step": step,
        "checkpoint": checkpoint,
        "digests": digests,
        "bank": bank,
        "skipped": skipped,
        "memories": memories,
    }


def first_bank(cfg: Config) -> pathlib.Path:
    """The file of a run's first bank, from which the run continues until it has a checkpoint."""
    return files.of_step(pathlib.Path(cfg.out, "bank"), 0, ".json")


def bank_so_far(cfg: Config, checkpoint: pathlib.Path | None, load_bank: Callable[..., Any]) -> Any:
    """The run's own bank or, in a new run, the bank of --bank; None if there is no bank (yet)."""
    file = checkpoint / files.BANK if checkpoint else first_bank(cfg)
    if cfg.uses_skill_bank and (checkpoint or file.exists()):
        return load_bank(file, 1)  # one entry a list is enough: merges join entries (S8)
    if not cfg.bank:
        return None
    bank = load_bank(pathlib.Path(cfg.bank), cfg.num_teachers)
    bank.window = []  # --bank may be a checkpoint's bank, with rollouts of another run
    return bank


def memories_so_far(cfg: Config, stored: dict[str, Any]) -> dict[str, dict]:
    """The memories of a cold start that was killed, by problem. stored: the run's config.json."""
    out = pathlib.Path(cfg.out)
    memories = {}
    for row, _ in files.rows_with(out / "bank/memories.jsonl", "problem_id", str):
        memories[row["problem_id"]] = row
    if memories and bool(cfg.server) != bool(stored["settings"].get("server")):
        raise ValueError(
            f"--out {out}: --server: a server and `generate` would both sample the first bank "
            "(S27); give the run's value, or a new --out"
        )
    return memories


def skipped_so_far(cfg: Config, step: int, stored: dict[str, Any]) -> int:
    """How many bad steps in a row end with this step, by metrics.jsonl (S34).

    ValueError if the run has passed its first checkpoint, but no checkpoint is there.
    """
    out = pathlib.Path(cfg.out)
    made = skipped = 0
    for row, _ in files.rows_with(out / "metrics.jsonl", "step", int):
        made = row["step"]
        if made <= step:
            skipped = skipped + 1 if row.get("skipped") else 0
    first_saved = stored["settings"].get("checkpoint_every")  # the step of the first checkpoint
    if type(first_saved) is not int:
        first_saved = cfg.checkpoint_every
    if cfg.evolves:
        first_saved = min(first_saved, cfg.evolve_every)
    if made > first_saved and not step:
        raise ValueError(
            f"--out {out}: it has made {made} steps, but checkpoints/ has none; bring them back, "
            "or give another directory"
        )
    return skipped


def continued(
    cfg: Config, step: int, manifest: dict[str, Any], stored: dict[str, Any]
) -> dict[str, Any]:
    """The config.json of a run that continues; ValueError for differences that are not free.

    step: the last saved step. manifest: what this command would write for a new run. stored: the
    run's config.json so far. For a setting that an edit of the code has added since, we take the
    default as the run's value.
    """
    out = pathlib.Path(cfg.out)
    if not manifest.keys() <= stored.keys():
        raise ValueError(f"--out {out}: an older version made it; give another directory")
    before = {config.flag(f.name): json.loads(json.dumps(f.default)) for f in fields(cfg)}
    before |= comparable(stored)
    changed: dict[str, str] = {}
    for name, new in comparable(manifest).items():
        if new != before[name]:
            changed[name] = f"{name} {new!r}, where the run has {before[name]!r}"
    may_differ = {"the number of processes"}
    for name, rule in cfg.rules().items():
        if rule.free:
            may_differ.add(config.flag(name))
    refused = [line for name, line in changed.items() if name not in may_differ]
    if cfg.steps < step:
        refused.append(f"--steps {cfg.steps}, where the run has made {step}")
    if refused:
        raise ValueError(f"--out {out}: {'; '.join(refused)}; give the run's value, or a new --out")
    if manifest["code"] != stored["code"]:
        changed["the code"] = "the code or a prompt"
    continuation = {**runlog.provenance(), "step": step, "changed": [*changed.values()]}
    updated = {name: manifest[name] for name in ("settings", "code", "processes")}
    return {**stored, **updated, "continuations": [*stored["continuations"], continuation]}


def comparable(manifest: dict[str, Any]) -> dict[str, Any]:
    """What we compare before a command continues a run, by the names that we print."""
    return {
        "the program": manifest["program"],
        **{config.flag(name): value for name, value in manifest["settings"].items()},
        "the problems of --data": manifest["problems"],
        "the number of processes": manifest["processes"],
    }


@contextlib.contextmanager
def reading(checkpoint: pathlib.Path | None) -> Iterator[None]:
    """A block that reads a run's last checkpoint, if any. Its ValueErrors also say how to go on."""
    try:
        yield
    except ValueError as e:
        if checkpoint:
            e.add_note(f"remove {checkpoint} to go on after the one before, or give a new --out")
        raise


# ----------------------------------------------------------------------- loading, and the start


def load_run(run: Run) -> None:
    """Load encoder, policy, adapters and optimizer, without writing a file."""
    cfg = run.cfg
    if cfg.server and cfg.adapter:
        raise ValueError(
            f"--server {' '.join(cfg.server)}: it samples the base, and --adapter begins with "
            "other weights; leave one of them out"
        )
    rank, alpha = lora_settings(run)
    if cfg.uses_skill_bank and cfg.steps:  # first, as loading the policy takes minutes
        run.embed = model.load_encoder(cfg.encoder, run.device)
    if cfg.server and cfg.uses_skill_bank and run.bank is None:
        run.lm, run.tokenizer = model.load_outline(cfg.model)  # enough to ask a server
        url = cfg.server[run.world.rank % len(cfg.server)]
        stops = rollout.stop_ids(run.lm, run.tokenizer)
        run.server = served.Server(url, cfg.model, stops, rollout.context_limit(run.lm))
        run.server.check()
    if cfg.steps or not run.server:
        run.lm, run.tokenizer = model.load_model(cfg.model, run.device, cfg.dtype, cfg.attn)
    if cfg.steps or cfg.adapter:
        add_adapters(run, rank, alpha)
    run.stream = functools.partial(rollout.stream, run.lm, run.tokenizer)


def lora_settings(run: Run) -> tuple[int, Any]:
    """Rank and alpha of the adapters: the last checkpoint's, --adapter's, or the settings'.

    ValueError if --adapter is damaged, or is no plain LoRA adapter, or not one of --model.
    """
    cfg = run.cfg
    if run.checkpoint:
        return model.lora_of(run.checkpoint)[1:]
    if not cfg.adapter:
        return cfg.lora_rank, cfg.lora_alpha
    folder = pathlib.Path(cfg.adapter)
    files.refuse_damaged(folder, files.digests_of(folder))
    base, rank, alpha = model.lora_of(folder, to_train=True)
    has_moved = os.path.isabs(base) and not os.path.exists(base)
    if not has_moved and files.tree_digest(base) != files.tree_digest(cfg.model):
        raise ValueError(f"--adapter {cfg.adapter}: its base is {base}; give that as --model")
    return rank, alpha


def add_adapters(run: Run, rank: int, alpha: Any) -> None:
    """Add adapters (the last checkpoint's, --adapter's, or new ones) and their optimizer."""
    cfg = run.cfg
    torch.manual_seed(cfg.seed)  # PEFT draws new adapters by it
    run.lm = model.with_adapters(run.lm, rank, alpha, cfg.checkpoint_above)
    params = [*model.trained(run.lm).values()]
    run.optimizer = torch.optim.AdamW(
        params, lr=cfg.learning_rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
    )
    if run.checkpoint:
        run.extra_tensors = model.restore(run.checkpoint, run.lm, run.optimizer)
    elif cfg.adapter:
        model.restore(cfg.adapter, run.lm)
    distributed.broadcast_parameters(params, run.world)


def cut(run: Run) -> None:
    """Remove all that came after the last checkpoint, and what a kill has left unfinished."""
    evolved = -1  # last step whose bank and replies stay; the cold start's is 0; -1: none stays
    if run.bank is not None:
        evolved = run.step
        if evolution_is_due(run):
            evolved -= 1  # this step's evolution is made again
    logs = {run.out / f"{name}.jsonl": run.step for name in runlog.LOGS}
    logs[run.out / "bank/replies.jsonl"] = evolved
    # A damaged log raises here, before we remove anything.
    new_size = {path: files.end_of_step(path, step) for path, step in logs.items() if path.exists()}
    for version, path in files.by_step(run.out / "bank").items():
        if version > evolved:
            path.unlink()
    for path, size in new_size.items():
        if size < path.stat().st_size:
            os.truncate(path, size)
            print(f"{path.name} is {f'cut after step {logs[path]}' if size else 'emptied'}")
    for unfinished in (run.out / "checkpoints").glob(".*.tmp"):
        shutil.rmtree(unfinished, ignore_errors=True)


def what_next(run: Run) -> str:
    """How to continue the run or, if it is complete, the commands that evaluate and inspect it."""
    cfg = run.cfg
    if cfg.uses_skill_bank and not cfg.steps:
        return f"done; the bank: {run.out / 'bank' / files.BANK}"
    if not is_complete(run):
        return f"stopped after step {run.step} of {cfg.steps}; run the same command to continue"
    return (
        f"done; evaluate: {shlex.join(['python', 'eval.py', *evaluation(cfg)])}\n"
        f"look inside: {shlex.join(['python', '-m', 'extras.report', cfg.out])}"
    )


def evaluation(cfg: Config) -> list[str]:
    """eval.py's arguments for an evaluation that reads, samples and judges as the run trained."""
    shared = {}
    defaults = asdict(EvalConfig())
    for name, rule in cfg.rules().items():
        is_shared = hasattr(config.Common, name) or rule.group == "the sampling"
        is_taken_over = defaults.get(name) == ""  # which means: as the run has it
        if is_shared and not is_taken_over:
            shared[name] = getattr(cfg, name)
    words = [cfg.model, cfg.out, *config.flags_that_differ(shared, defaults)]
    if cfg.student_prefix == "closed":
        words.append("--no-thinking")
    if cfg.data != Config.data:
        words += ["--data", "YOUR_TEST_PROBLEMS.jsonl"]
    return words
