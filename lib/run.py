"""A run on disk: opened or continued, sampled, logged, saved and stopped.

    RUN/config.json       settings, digests of code and problems, versions; each continuation
    RUN/checkpoints/      all that a run needs to go on, per saved step: a PEFT adapter, the state
                          of the optimizer, the bank in use with its window
    RUN/bank/             a version per evolution, memories and replies; a run that has no
                          checkpoint yet goes on with step_000000.json
    RUN/metrics.jsonl     a line per step; rollouts.jsonl per rollout, tokens.jsonl per audited one
    RUN/problems.json     fingerprints of the training problems, for eval.py

The same command continues a run. Nothing here knows what a bank is made of.
"""

import contextlib
import functools
import json
import math
import os
import pathlib
import shlex
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import distributed
import rollout
import scoring
from distributed import World
from lib import command, config, files, model, problems, runlog, served, verify
from lib.config import Config
from lib.problems import Problem
from rollout import Job, Rollout, Sampling

ROOT = pathlib.Path(__file__).parent.parent
Stream = Callable[..., Iterator[list[Job]]]  # (jobs, sampling, rows), as `rollout.stream`


@dataclass
class Start:
    """What a run begins with, or goes on with; read before anything is loaded."""

    record: dict[str, Any]  # config.json, as this command writes it
    problems: list[Problem]
    notes: list[str]  # lines to print
    is_new: bool = True  # nothing of the directory is used
    step: int = 0  # of the last checkpoint
    bank: Any = None  # in use after that step, with its window; None: to be made, or not used


@dataclass
class Run:
    """A training run: what a step needs, and the run's files. Made by `Run.open`."""

    cfg: Config
    out: pathlib.Path  # the directory
    world: World
    problems: list[Problem]
    verifier: verify.Judge
    lm: Any  # the policy: a causal language model with adapters
    tokenizer: Any
    stops: list[int]  # ids that end a completion
    masked_ids: set[int]
    start: Start  # what it goes on with
    stream: Stream  # decodes completions of the policy, by `generate`
    server: served.Server | None = None  # samples the first bank in the place of `generate`
    bank: Any = None  # with its window
    step: int = 0  # the last complete one
    optimizer: Any = None  # AdamW; None where there are no steps
    embed: Callable[[Sequence[str]], Any] | None = None  # texts -> [n, d]
    extra_tensors: dict[str, Tensor] = field(default_factory=dict)  # saved with a checkpoint
    clock: runlog.Stopwatch = field(default_factory=runlog.Stopwatch)  # of the present step
    audits: list[dict] = field(default_factory=list)  # this rank's lines of tokens.jsonl, likewise
    track: Callable[[dict], object] = lambda metrics: None  # the tracker's, on rank 0
    watch: runlog.Watch = field(default_factory=runlog.Watch)  # of a run that learns nothing
    signals: command.Signals = field(default_factory=command.Signals)  # that came during a step
    skipped: int = 0  # steps in a row whose gradient was not finite

    @classmethod
    @contextlib.contextmanager
    def open(cls, cfg: Config, load_bank: Callable[[pathlib.Path], Any]) -> Iterator["Run"]:
        """Load the run of --out, a new one or one to continue. `begin` is the first to write.

        load_bank: reads the file of a bank. Exits with 0 where the run is complete, and with 2 and
        one line for a mistake in the input, a full disk or a lost server.
        """
        out = pathlib.Path(cfg.out)
        with contextlib.ExitStack() as held:
            with command.one_line_errors(cfg.program, reading=True):
                world = distributed.init(cfg.device)
                with distributed.checked_on_all_ranks(world, *command.GIVEN):
                    if world.main:
                        claim(out, held)
                with distributed.checked_on_all_ranks(world, *command.GIVEN):
                    start = inspect(cfg, world, load_bank)
                places = distributed.all_gather(
                    (start.step, start.is_new, start.bank is None), world
                )
                commands = distributed.all_gather(shared_settings(start.record), world)
                with distributed.checked_on_all_ranks(world, ValueError):
                    distributed.refuse_other_commands(commands)
                    if len({*places}) > 1:
                        rule = "processes see different folders; give one on a disk that all share"
                        raise ValueError(f"--out {out}: {rule}")
                if is_complete(cfg, start):
                    if world.main:
                        print(f"{out}: complete, all of its {cfg.steps} steps are done")
                    raise SystemExit(0)
                with distributed.checked_on_all_ranks(world, *command.GIVEN):
                    run = prepare(cfg, world, start, held)
            with command.one_line_errors(cfg.program):
                yield run
                if world.main:
                    print(what_next(run))

    @property
    def device(self) -> torch.device:
        return self.world.device

    def begin(self) -> None:
        """Cut the files back to the last checkpoint, and write config.json."""
        cfg, out, world, record = self.cfg, self.out, self.world, self.start.record
        params = model.trained(self.lm).values() if cfg.steps else []
        distributed.broadcast_parameters(params, world)
        kinds = OSError, command.UserError
        with distributed.checked_on_all_ranks(world, *kinds), command.user_errors():
            if world.main:
                cut(self)
                files.write_json(out / "config.json", record)
                fingerprints = [problems.fingerprint(x.problem) for x in self.problems]
                files.write_json(out / "problems.json", fingerprints)
                settings, name = record["settings"], record["id"]
                self.track = runlog.open_tracker(out, settings, self.step, cfg.report_to, name)
                announce(self)

    # ------------------------------------------------------------------------------ the run's files

    def log(self, rows: list[dict], norm: float) -> None:
        """Append the last step's lines to the logs, and print its line. rows: of all ranks."""
        audits = distributed.gathered(self.audits, self.world)
        rate, peak = self.optimizer.param_groups[0]["lr"], runlog.memory_gb(self.device)
        metrics = runlog.summarize(self.step, rows, norm, rate, self.clock.seconds, peak)
        metrics |= self.bank.counts if self.bank else {}
        for name, lines in zip(runlog.LOGS, ([metrics], rows, audits)):
            self.log_rows(name, lines)
        late = sum(distributed.all_gather(self.verifier.timeouts, self.world))
        if self.world.main:
            self.track(metrics)
            tqdm.write(runlog.log_line(metrics, self.cfg.steps, late))
            if warning := self.watch.line_after(metrics):
                tqdm.write(warning)

    def save_is_due(self) -> bool:
        """Whether a checkpoint of the last step is to be saved, as before an evolution."""
        is_last = self.step == self.cfg.steps
        is_due = self.step % self.cfg.checkpoint_every == 0 or is_last
        return is_due or evolution_is_due(self.cfg, self.step, self.bank)

    def save(self) -> None:
        """Rank 0 saves a checkpoint of the last step, unless it is there already. On every rank."""
        path = files.of_step(self.out / "checkpoints", self.step)
        with distributed.checked_on_all_ranks(self.world, OSError):
            if self.world.main and not files.by_step(path.parent).get(self.step):
                with files.whole(path) as folder:
                    model.save(folder, self.lm, self.tokenizer, self.optimizer, self.extra_tensors)
                    if self.bank is not None:
                        self.bank.save(folder / "bank.json")
                tqdm.write(f"saved {path}")

    def save_bank(self) -> None:
        """Rank 0 saves the bank that was made or evolved after the last step, changed or not.

        The checkpoint's copy comes last: as long as it has a window, the evolution is still due.
        """
        with distributed.checked_on_all_ranks(self.world, OSError):
            if self.world.main:
                self.bank.save(files.of_step(self.out / "bank", self.step, ".json"))
                self.bank.save(self.out / "bank/bank.json")
            if self.world.main and self.step:
                self.bank.save(files.of_step(self.out / "checkpoints", self.step) / "bank.json")

    def log_rows(self, name: str, rows: list[dict]) -> None:
        """Rank 0 appends rows to the log of this name, such as "bank/replies".

        On every rank, with the same rows: without any there is nothing to do.
        """
        if not rows:
            return
        with distributed.checked_on_all_ranks(self.world, OSError):
            if self.world.main:
                files.append_jsonl(self.out / f"{name}.jsonl", rows)

    def saved_memories(self) -> dict[str, dict]:
        """The memories that a killed cold start has left, by the problem's id; on every rank."""
        with command.user_errors():
            rows = [*files.read_jsonl(self.out / "bank/memories.jsonl")]
        return {row["problem_id"]: row for row in rows}


# ------------------------------------------------------------------------ prompts that must fit


Prompt = tuple[str, list[int], int]  # what it is, its ids, and the number of tokens that follow
Longest = Callable[[Run], list[Prompt]]  # the longest prompts of a run; a method has its own


def longest_problem(run: Run, shown: Callable[[Problem], str] = lambda x: x.problem) -> Problem:
    """The problem with the most tokens. shown: what a prompt shows of a problem."""
    return max(run.problems, key=lambda x: rollout.token_count(run.tokenizer, shown(x)))


def too_long(run: Run, longest: Longest) -> str:
    """The first of the longest prompts that does not fit, in words; "" where all fit."""
    most, context = run.cfg.max_prompt_tokens, model.context_limit(run.lm)
    for where, ids, tokens in longest(run):
        if len(ids) > most:
            fix = f"--max-prompt-tokens is {most}; raise it, or drop the problem"
            return f"{where}: a prompt has {len(ids)} tokens, {fix}"
        if len(ids) + tokens > context:
            rule = f"exceed the model's context of {int(context)} (max_position_embeddings)"
            fix = "lower --max-new-tokens, or in the cold start --cold-start-tokens"
            return f"{where}: a prompt of {len(ids)} tokens and {tokens} more {rule}; {fix}"
    return ""


# ---------------------------------------------------------------------------- between two steps


def steps_to_come(run: Run) -> Iterable[int]:
    """The numbers of the steps that are left, with a bar on a terminal."""
    left = range(run.step + 1, run.cfg.steps + 1)
    hidden = not (run.world.main and sys.stderr.isatty())  # a log file has the steps' lines
    return tqdm(left, "train", run.cfg.steps, initial=run.step, disable=hidden, unit="step")


def stop_code(run: Run) -> int:
    """The exit code of a run that stops here, the same on all ranks; 0: it goes on.

    130 after a signal on any rank, 1 after three steps in a row that were not finite.
    """
    signalled = any(distributed.all_gather(bool(run.signals.first), run.world))
    code = 130 if signalled else int(run.skipped == 3)
    if code and run.world.main:
        tqdm.write("stopped by a signal" if signalled else "three steps were not finite")
    return code


# ------------------------------------------------------------------------------- decoding


def solve(run: Run, jobs: list[Job]) -> list[Rollout]:
    """Line 7: a rollout y ~ p_S(. | x) of each job, in order, with its outcome r (Eq. 1).

    Logits are divided by --temperature. The --top-k likeliest tokens stay, and after renormalising
    the nucleus of --top-p. r is +1 if the answer in the last \\boxed{} is right, else -1; so a
    rollout that the length limit cuts before its answer has -1. completion_ids end on a stop id, or
    are cut.
    """
    cfg = run.cfg
    sampling = Sampling(temperature=cfg.temperature, top_p=cfg.top_p, top_k=cfg.top_k)
    turns = run.stream(jobs, sampling, cfg.rollout_rows or max(1, len(jobs)))
    roll_of: dict[int, Rollout] = {}
    for judged in rollout.rollouts(run.tokenizer, run.stops, run.verifier, turns):
        roll_of |= {job.index: roll for job, roll in judged}
    run.clock.lap("gen")
    return [roll_of[job.index] for job in jobs]


def bank_stream(run: Run) -> Stream:
    """What decodes for the bank: a server, if there is one, until the first bank is made (S27)."""
    return run.server.stream if run.server and run.bank is None else run.stream


def shared_rollouts(
    run: Run, jobs: list[Job], sampling: Sampling
) -> Iterator[list[tuple[Job, Rollout]]]:
    """Judged solutions of jobs that every rank has, turn by turn; every rank gets all of them.

    The rank that decodes a solution judges it.
    """
    stream = bank_stream(run)

    def work(jobs_of_rank: list[Job]) -> Iterator[list[tuple[Job, Rollout]]]:
        turns = stream(jobs_of_rank, sampling, run.cfg.bank_rows)
        return rollout.rollouts(run.tokenizer, run.stops, run.verifier, turns)

    return distributed.share_jobs(run.world, jobs, work, "solving")


def shared_replies(
    run: Run,
    bar: tqdm,
    prompts: list[list[int]],
    names: list[str],
    repeats: list[int],
    limits: list[int],
) -> list[str]:
    """Replies to prompts that every rank has: greedy where repeat is 0, else sampled (D4).

    A sampled reply's draws depend on the seed, the prompt's name and its repeat alone. bar: counts
    the replies.
    """
    bar.total += len(prompts)
    replies: dict[int, list[int]] = {}
    greedy, second = Sampling(temperature=0.0), Sampling(temperature=1.1, top_p=0.95, top_k=20)
    for repeated, sampling in ((False, greedy), (True, second)):
        jobs = []
        for i, prompt in enumerate(prompts):
            if (repeats[i] > 0) == repeated:
                key = rollout.sample_key(run.cfg.seed, 0, names[i], repeats[i])
                jobs.append(Job(i, prompt, key=key, left=limits[i]))
        work = functools.partial(bank_stream(run), sampling=sampling, rows=run.cfg.bank_rows)
        for turn in distributed.share_jobs(run.world, jobs, work):
            bar.update(len(turn))
            replies |= {job.index: job.ids for job in turn}
    return [rollout.text_of(run.tokenizer, replies[i]) for i in range(len(prompts))]


# ----------------------------------------------------------------------- before anything is loaded


def claim(out: pathlib.Path, held: contextlib.ExitStack) -> None:
    """Lock the directory; ValueError where its files are no run's."""
    names = {path.name for path in out.glob("*") if path.suffix != ".tmp"} - {files.LOCK}
    is_run = "config.json" in names and "program" in files.read_json(out / "config.json")
    if names and not is_run:
        listed = ", ".join(sorted(names)[:5])
        raise ValueError(f"--out {out}: holds {listed}, and no run; give another directory")
    held.enter_context(files.locked(out))


def shared_settings(record: dict[str, Any]) -> dict[str, Any]:
    """What all processes must have alike, by flag: settings, and what those that name files hold.

    record: config.json. Files may lie elsewhere on another machine.
    """
    settings, digests = record["settings"], record["digests"]
    alike = {**settings, **digests}
    return {config.flag(name): alike[name] for name in settings if name not in ("out", "device")}


def inspect(cfg: Config, world: World, load_bank: Callable[[pathlib.Path], Any]) -> Start:
    """Read the data and the directory, and decide whether this command may go on with its run."""
    out = pathlib.Path(cfg.out)
    if cfg.batch_size < world.size:
        raise ValueError(f"--batch-size {cfg.batch_size}: must be >= {world.size}, one a process")
    if cfg.server and cfg.adapter:
        rule = "it samples the base, and --adapter begins with other weights"
        raise ValueError(f"--server {' '.join(cfg.server)}: {rule}; leave one of them out")
    data, counts = load_training(cfg)
    described = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in counts.items())
    start = Start(record_of(cfg, data, world), data, [f"data {cfg.data}: {described}"])
    if len(data) < cfg.batch_size:
        line = f"fewer problems than --batch-size {cfg.batch_size}: a step takes some twice"
        start.notes.append(line)
    if (out / "config.json").exists():
        go_on(cfg, start, files.read_json(out / "config.json"))
    checkpoint = files.of_step(out / "checkpoints", start.step)
    first = files.of_step(out / "bank", 0, ".json")
    if cfg.uses_skill_bank and start.step:
        with reading_last(checkpoints_of(out)):
            start.bank = load_bank(checkpoint / "bank.json")
    elif cfg.uses_skill_bank and first.exists() and not start.is_new:
        start.bank = load_bank(first)
    elif cfg.bank:
        start.bank = load_bank(pathlib.Path(cfg.bank))
        start.bank.window = []
    if cfg.server and not makes_bank(cfg, start):
        line = "--server is not asked: it samples only a first bank, and none is to be made"
        start.notes.append(line)
    if evolution_is_due(cfg, start.step, start.bank):
        start.notes.append(f"the bank's evolution after step {start.step} is made first")
    return start


@contextlib.contextmanager
def reading_last(checkpoints: Sequence[pathlib.Path]) -> Iterator[None]:
    """A block that reads a run's last checkpoint: a ValueError says how to go on without it.

    checkpoints: the run's, in order.
    """
    try:
        yield
    except ValueError as e:
        if not checkpoints:
            raise
        fix = "if a file is torn: there is no checkpoint before, so give another directory"
        if len(checkpoints) > 1:
            before, last = checkpoints[-2:]
            fix = f"if a file is torn, remove {last}: the same command goes on after {before.name}"
        raise ValueError(f"{e}; {fix}") from None


def checkpoints_of(out: pathlib.Path) -> list[pathlib.Path]:
    """The checkpoints of a run, in order."""
    return [*files.by_step(out / "checkpoints").values()]


def load_training(cfg: Config) -> tuple[list[Problem], dict[str, int]]:
    """The training problems and their counts; ValueError where one is in an evaluation set."""
    is_ours = cfg.verifier == Config.verifier
    data, counts = problems.load_problems(
        cfg.data,
        split=cfg.split,
        problem_field=cfg.problem_field,
        answer_field=cfg.answer_field,
        answer_after=cfg.answer_after,
        extract=verify.extract_answer if is_ours else None,
    )
    problems.refuse_overlap(data, f"--data {cfg.data}")
    return data, counts


def record_of(cfg: Config, data: list[Problem], world: World) -> dict[str, Any]:
    """A new run's config.json: where it comes from, and what a command must share to go on.

    `digests` are of what settings name. A problem's other fields count where a verifier of the
    user's own may read them.
    """
    is_ours = cfg.verifier == Config.verifier
    asked = [(x.id, x.problem, x.answer, {} if is_ours else x.extra) for x in data]
    named = [name for name, rule in cfg.rules().items() if rule.on_continue == "contents"]
    digests = {name: files.contents(getattr(cfg, name)) for name in named}
    return {
        "id": uuid.uuid4().hex[:12],
        **runlog.provenance(),
        "continuations": [],
        "program": cfg.program,
        "settings": json.loads(json.dumps(asdict(cfg))),  # tuples become lists
        "digests": digests | {"data": files.digest(asked)},
        "code": code_of(cfg),
        "processes": world.size,
    }


def code_of(cfg: Config) -> dict[str, str]:
    """Digests of the project's code and prompts, the file that was started and the verifier's.

    By names that do not depend on where the project lies. Other files of the user's are not seen.
    """
    paths = [pathlib.Path(verify.file_of(cfg.verifier))]
    started = getattr(sys.modules["__main__"], "__file__", None)
    if started:  # not in an interactive session
        paths.append(pathlib.Path(started))
    for pattern in ("*.py", "lib/*.py", "methods/*.py", "prompts/*.txt"):
        paths += ROOT.glob(pattern)
    code = {}
    for path in sorted(paths):
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
        code[name] = files.file_digest(path)
    return code


def go_on(cfg: Config, start: Start, saved: dict[str, Any]) -> None:
    """Set the start to where the directory's run is. saved: its config.json.

    ValueError if this command may not go on with it. Where it may not, a run that has no step, bank
    or checkpoint yet is begun anew.
    """
    out = pathlib.Path(cfg.out)
    if saved.get("program") != cfg.program or "digests" not in saved:
        maker = saved.get("program", "no program of ours")
        line = f"--out {out}: the run was made by {maker}, perhaps an older one, and this is "
        line += f"{cfg.program}; give another directory; --adapter CHECKPOINT takes a run's weights"
        raise ValueError(line)
    start.step = max(files.by_step(out / "checkpoints"), default=0)
    old, metrics = saved["settings"], files.read_jsonl(out / "metrics.jsonl")
    made = max((row["step"] for row in metrics), default=0)
    evolves = cfg.uses_skill_bank and old["evolve_every"]
    first = min(old["checkpoint_every"], old["evolve_every"] if evolves else math.inf)
    if made > first and not start.step:
        line = f"--out {out}: it has made {made} steps, but checkpoints/ has none"
        raise ValueError(f"{line}; bring them back, or give another directory")
    refused, changes = differences(saved, start.record, cfg)
    bank = files.of_step(out / "bank", 0, ".json")
    if refused and (made or start.step or bank.exists()):
        line = f"--out {out}: {refused}; give the run's value, or a new --out; there --adapter "
        line += "CHECKPOINT begins with its weights"
        raise ValueError(line + f", --bank {bank} with its bank" * bank.exists())
    if refused:
        start.notes.append(f"begins anew: {refused}")
        return
    if cfg.steps < start.step:
        raise ValueError(f"--steps {cfg.steps}: {out} is at step {start.step} already")
    if start.step and old["steps"] != cfg.steps:
        rate = cfg.learning_rate * (1 - start.step / cfg.steps)
        changes.append(f"so the learning rate of step {start.step + 1} is {rate:.2g}")
    again = {**runlog.provenance(), "step": start.step, "changed": changes}
    now = {name: start.record[name] for name in ("settings", "digests", "code", "processes")}
    start.record = {**saved, **now, "continuations": [*saved["continuations"], again]}
    start.is_new = False
    after = f"continues after step {start.step}" if start.step else "starts with step 1"
    start.notes += [*[f"changed: {line}" for line in changes], after]
    if start.step and saved["settings"].get("server"):
        line = f"steps from {start.step + 1} on are sampled by `generate`"
        start.notes.append(f"{line}: a server samples only the first bank (S27)")


def differences(saved: dict, now: dict, cfg: Config) -> tuple[str, list[str]]:
    """What a run may not change, "" for nothing, and a line for each of the changes that it may.

    saved, now: config.json, of the run and of this command. What the run's lacks, as that of an
    older version may, is no difference.
    """
    refused, changes = "", []
    default_of = {f.name: f.default for f in fields(cfg)}
    for name, rule in cfg.rules().items():
        old, new = saved["settings"].get(name, default_of[name]), now["settings"][name]
        before, after = old, new
        if name in saved["digests"]:
            before, after = saved["digests"][name], now["digests"].get(name, new)
        is_gone = old == new == after  # since, such as the folder of --adapter: not missed here
        if before == after or is_gone or name in cfg.void():
            continue
        line = f"{config.flag(name)} {new!r}, where the run has {old!r}"
        if rule.on_continue == "free":
            changes.append(line)
        else:
            refused = refused or line + ", and its files have changed" * (old == new)
    ours, theirs = now["code"], saved["code"]
    edited = [name for name in sorted({*theirs} & {*ours}) if theirs[name] != ours[name]]
    edited += [f"{name} no longer there" for name in sorted({*theirs} - {*ours})]
    if edited:
        kept = ": the bank stays as it was made" if cfg.uses_skill_bank else ""
        changes.append(f"the code ({', '.join(edited)}){kept}")
    if saved["processes"] != now["processes"]:
        changes.append(f"{now['processes']} processes, before {saved['processes']}")
    return refused, changes


def evolution_is_due(cfg: Config, step: int, bank: Any) -> bool:
    """Whether the bank evolves after this step, or has yet to: its window goes with it (D9)."""
    return cfg.evolves and bank is not None and bool(bank.window) and step % cfg.evolve_every == 0


def makes_bank(cfg: Config, start: Start) -> bool:
    """Whether the run has yet to make its first bank."""
    return cfg.uses_skill_bank and start.bank is None


def is_complete(cfg: Config, start: Start) -> bool:
    """Whether nothing is left to do, the last evolution included."""
    done = start.step == cfg.steps and not start.is_new and not makes_bank(cfg, start)
    return done and not evolution_is_due(cfg, start.step, start.bank)


# --------------------------------------------------------------------------- loading, and the start


def prepare(cfg: Config, world: World, start: Start, held: contextlib.ExitStack) -> Run:
    """Load everything that a user's mistake can break. No collective, no file written.

    held: closes what a run holds open.
    """
    verifier = held.enter_context(verify.load_judge(cfg.verifier)(cfg.verify_timeout))
    server, embed = None, None
    check_weights(cfg, start)
    if cfg.steps or not cfg.server:  # else the weights may not be here
        model.check_model(cfg.model)
    if cfg.uses_skill_bank and cfg.steps:  # before the policy, which takes minutes
        embed = model.load_encoder(cfg.encoder, world.device)
    if cfg.server and makes_bank(cfg, start):
        lm, tokenizer = model.load_outline(cfg.model)  # enough where a bank alone is made
        url = cfg.server[world.rank % len(cfg.server)]
        server = served.Server(url, cfg.model, rollout.stop_ids(lm, tokenizer))
        server.check()
    if cfg.steps or not server:
        lm, tokenizer = model.load_model(cfg.model, world.device, cfg.dtype, cfg.attn)
    stops = rollout.stop_ids(lm, tokenizer)
    run = Run(
        cfg=cfg,
        out=pathlib.Path(cfg.out),
        world=world,
        problems=start.problems,
        verifier=verifier,
        lm=lm,
        tokenizer=tokenizer,
        stops=stops,
        masked_ids=model.masked_token_ids(tokenizer) | {*stops},
        start=start,
        stream=functools.partial(rollout.stream, lm, tokenizer),
        server=server,
        bank=start.bank,
        embed=embed,
    )
    if cfg.steps or cfg.adapter:
        prepare_training(run)
    return run


def prepare_training(run: Run) -> None:
    """The adapters, the optimizer, the last checkpoint."""
    cfg, last = run.cfg, run.start.step
    checkpoint = files.of_step(run.out / "checkpoints", last) if last else None
    rank, alpha = cfg.lora_rank, cfg.lora_alpha
    if checkpoint or cfg.adapter:
        _, rank, alpha = model.lora_of(checkpoint or cfg.adapter)
    torch.manual_seed(cfg.seed)
    run.lm = model.with_adapters(run.lm, rank, alpha, cfg.checkpoint_above)
    run.stream = functools.partial(rollout.stream, run.lm, run.tokenizer)
    params = model.trained(run.lm).values()
    run.optimizer = torch.optim.AdamW(
        params, lr=cfg.learning_rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
    )
    if checkpoint:
        run.step = last  # which stands in the folder's name alone
        with reading_last(checkpoints_of(run.out)):
            run.extra_tensors = model.restore(checkpoint, run.lm, run.optimizer)
    elif cfg.adapter:
        model.restore(cfg.adapter, run.lm)


def check_weights(cfg: Config, start: Start) -> None:
    """ValueError for a torn checkpoint, or an --adapter that is none or not of --model."""
    if start.step:
        checkpoints = checkpoints_of(pathlib.Path(cfg.out))
        with reading_last(checkpoints):
            model.lora_of(checkpoints[-1])
            model.check_tensors("checkpoint", checkpoints[-1], model.ADAPTER_FILE)
    elif cfg.adapter:
        base, _, _ = model.lora_of(cfg.adapter)
        has_moved = os.path.isabs(base) and not os.path.exists(base)
        if not has_moved and files.contents(base) != files.contents(cfg.model):
            raise ValueError(f"--adapter {cfg.adapter}: its base is {base}; give that as --model")
        model.check_tensors("adapter", cfg.adapter, model.ADAPTER_FILE)


def cut(run: Run) -> None:
    """Remove what came after the last checkpoint, and what a kill has left unfinished."""
    out, start = run.out, run.start
    for name in runlog.LOGS:
        if files.trim_jsonl(out / f"{name}.jsonl", start.step):
            print(f"{name}.jsonl is cut after step {start.step}")
    for unfinished in (out / "checkpoints").glob(".*.tmp"):
        shutil.rmtree(unfinished, ignore_errors=True)
    if start.is_new:
        shutil.rmtree(out / "bank", ignore_errors=True)
    last = start.step
    if evolution_is_due(run.cfg, start.step, start.bank):
        last -= 1  # it is made again
    for step, path in files.by_step(out / "bank").items():
        if step > last:
            path.unlink()
    # Without a first bank the whole cold start asks again.
    files.trim_jsonl(out / "bank/replies.jsonl", -1 if start.bank is None else last)


def announce(run: Run) -> None:
    """Print what a run starts from."""
    cfg, tokenizer = run.cfg, run.tokenizer
    data, *others = run.start.notes
    print(data)
    if cfg.steps:
        learning = sum(p.numel() for p in model.trained(run.lm).values())
        learn = f"{learning:,} of {run.lm.num_parameters():,} parameters learn"
        print(f"model {cfg.model}: {learn}, {run.world.size} x {run.device.type}")
        if not scoring.head_is_sliced(run.lm):
            print("head: caps or scales the logits: they are scored whole, in its dtype (S22)")
    texts = " ".join(repr(tokenizer.decode([i])) for i in sorted(run.masked_ids)[:40])
    print(f"token mask: {len(run.masked_ids)} formatting and special ids (S2): {texts}")
    closed, bare = (rollout.chat_ids(tokenizer, "x", thinking=x) for x in ("closed", "bare"))
    if closed == bare:
        print("thinking: no switch in the chat template, so closed and bare are one prompt (S3)")
    print("\n".join(others), end="\n" * bool(others))


def what_next(run: Run) -> str:
    """What is still to do; or the commands that evaluate a complete run and look inside it."""
    cfg = run.cfg
    if not cfg.steps:
        return f"done; the bank: {run.out / 'bank/bank.json'}" if cfg.uses_skill_bank else "done"
    if run.step < cfg.steps or evolution_is_due(cfg, run.step, run.bank):
        return f"stopped after step {run.step} of {cfg.steps}; run the same command to continue"
    flags = [] if cfg.data == Config.data else ["--data", "YOUR_TEST_PROBLEMS.jsonl"]
    if not cfg.cold_start_thinking:
        flags.append("--no-thinking")
    if cfg.cold_start_tokens != Config.cold_start_tokens:
        flags += ["--max-new-tokens", str(cfg.cold_start_tokens)]
    for f in fields(config.Common):
        value = getattr(cfg, f.name)
        if value != f.default:  # which is eval.py's, too
            flags += [config.flag(f.name), str(value)]
    evaluate = shlex.join(["python", "eval.py", cfg.model, cfg.out, *flags])
    look = shlex.join(["python", "-m", "extras.report", cfg.out])
    return f"done; evaluate: {evaluate}\nlook inside: {look}"
