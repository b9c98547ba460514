"""A run on disk: opened or continued, sampled, logged, saved and stopped.

    RUN/config.json       settings, digests of code and problems, versions; each continuation
    RUN/problems.json     fingerprints of the training problems, for eval.py
    RUN/metrics.jsonl     a line per step; rollouts.jsonl per rollout, tokens.jsonl per audited one
    RUN/bank/             a version per evolution, its memories and replies
    RUN/checkpoints/      a PEFT adapter per saved step, with the state of the optimizer

The same command continues a run. Nothing here knows what a bank is made of.
"""

import contextlib
import functools
import itertools
import math
import os
import pathlib
import shlex
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import distributed
import rollout
import scoring
from distributed import World
from lib import config, files, model, problems, runlog, served, verify
from lib.config import Config
from lib.problems import Problem
from rollout import Job, Rollout, Sampling

ROOT = pathlib.Path(__file__).parent.parent
CODE = "sgsd", "skills", "rollout", "scoring", "distributed"  # beside lib/ and prompts/
Stream = Callable[..., Iterator[list[Job]]]  # (jobs, sampling, rows), as `rollout.stream`
# A bank is made again if one of these has changed before the first step.
MAKES_BANK = "model dtype attn data split problem_field answer_field answer_after seed bank".split()
MAKES_BANK += "server verifier verify_timeout cold_start cold_start_temperature".split()
MAKES_BANK += "cold_start_tokens cold_start_thinking memory_answer reply_tokens".split()
MAKES_BANK += "merge_group_size merge_patience".split()


@dataclass
class State:
    """What a directory holds of a run, before anything is loaded."""

    identity: dict[str, Any]  # what the present command's run would be
    data: list[Problem]
    counts: dict[str, int]  # of the data that were read and dropped
    saved: dict[str, Any] | None = None  # config.json; None: no run is there
    step: int = 0  # of the last checkpoint
    evolved: int = 0  # the step whose evolution made the bank in use
    evolution_is_due: bool = False  # after the step of the checkpoint
    is_complete: bool = False
    keeps_bank: bool = True
    announced: list[str] = field(default_factory=list)  # what has changed, a line each


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
    optimizer: Any  # AdamW; None where there are no steps
    stream: Stream  # decodes completions of the policy
    step_stream: Stream  # the same for a step's rollouts: with --server it compares numbers
    engine: served.TrainedPolicy | None = None  # where --server decodes
    embed: Callable[[Sequence[str]], Any] | None = None  # texts -> [n, d]
    bank: Any = None
    step: int = 0  # the last complete one
    evolution_is_due: bool = False  # after that step
    window: list[dict] = field(default_factory=list)  # rollouts since the bank last evolved
    extra_tensors: dict[str, Tensor] = field(default_factory=dict)  # saved with a checkpoint
    clock: runlog.Stopwatch = field(default_factory=runlog.Stopwatch)  # of the present step
    track: Callable[[dict], object] = lambda metrics: None  # the tracker's, on rank 0
    signalled: float = 0.0  # when the first signal came, on a monotonic clock; 0: never
    skipped: int = 0  # steps in a row whose gradient was not finite
    is_training: bool = False

    @classmethod
    @contextlib.contextmanager
    def open(cls, cfg: Config, load_bank: Callable[[pathlib.Path], Any]) -> Iterator["Run"]:
        """Start the run of --out, or continue it. Nothing is written before every rank has passed.

        load_bank: reads the file of a bank. A user's mistake, before the first step, and a disk or
        server that fails, at any time, become one line and exit code 2. Exits with 0 where the run
        is complete.
        """
        out = pathlib.Path(cfg.out)
        with contextlib.ExitStack() as held:
            with config.one_line_errors(cfg.program):
                world = distributed.init(cfg.device)
                needed = [cfg.model, cfg.data]
                model.ask_hub_once(needed + ([cfg.encoder] if cfg.uses_skill_bank else []))
                together = functools.partial(distributed.together, world=world)
                together(lambda: claim(out, held) if world.main else None)
                state = together(lambda: inspect(cfg, world))
                if state.is_complete:
                    if world.main:
                        print(f"{out}: complete, all of its {cfg.steps} steps are done")
                    raise SystemExit(0)
                run = together(lambda: prepare(cfg, world, state, load_bank, held))
                begin(run, state)
            try:
                yield run
            except ValueError:
                if run.is_training:
                    raise  # a bug
                with config.one_line_errors(cfg.program):
                    raise
            except OSError as e:
                with config.one_line_errors(cfg.program):
                    raise OSError(f"{e}; run the same command to continue") from None
            if world.main and run.step == cfg.steps:
                print(what_next(cfg))

    @property
    def device(self) -> torch.device:
        return self.world.device

    # ----------------------------------------------------------------------------------- a step

    def steps_left(self) -> Iterator[int]:
        """The steps to come. From here on a first signal waits for the end of its step."""
        left = range(self.step + 1, self.cfg.steps + 1)
        hidden = not (self.world.main and sys.stderr.isatty())  # a log file has the steps' lines
        bar = tqdm(left, "train", self.cfg.steps, initial=self.step, disable=hidden, unit="step")
        for step in bar:
            self.is_training = True
            finish_at_signals(self)
            self.clock = runlog.Stopwatch()
            yield step

    def log(self, step: int, rows: list[dict], norm: float) -> None:
        """Append a step's lines to the logs, and print its line. rows: of all ranks."""
        tokens = [row.pop("tokens") for row in rows if "tokens" in row]
        gaps = distributed.gather(self.engine.gaps if self.engine else [], self.world)
        self.step = step
        if self.engine:
            self.engine.changed, self.engine.gaps = True, []
        if not self.world.main:
            return
        rate, peak = self.optimizer.param_groups[0]["lr"], runlog.memory_gb(self.device)
        metrics = runlog.summarize(step, rows, norm, rate, self.clock.seconds, peak)
        if self.bank is not None:
            metrics["bank_skills"] = len(self.bank.general_skills)
            metrics["bank_mistakes"] = len(self.bank.common_mistakes)
        metrics |= runlog.engine_gap(list(itertools.chain.from_iterable(gaps)))
        for name, lines in zip(runlog.LOGS, ([metrics], rows, tokens)):
            files.append_jsonl(self.out / f"{name}.jsonl", lines)
        self.track(metrics)
        tqdm.write(runlog.log_line(metrics, self.cfg.steps))

    def end_step(self, norm: float) -> int:
        """Save a checkpoint where it is due; from here on a signal ends the process at once.

        Returns the exit code that ends training: 130 after a signal, 1 after three steps in a row
        whose gradient was not finite; 0 goes on.
        """
        cfg, code = self.cfg, 0
        self.skipped = 0 if math.isfinite(norm) else self.skipped + 1
        if any(distributed.gather(bool(self.signalled), self.world)):  # some ranks may have none
            code, why = 130, "stopped by a signal"
        elif self.skipped == 3:
            code, why = 1, "three steps in a row were not finite"
        evolves = cfg.uses_skill_bank and is_evolution_due(cfg, self.step)
        if code or evolves or self.step % cfg.checkpoint_every == 0 or self.step == cfg.steps:
            self.save()
        if code and self.world.main:
            tqdm.write(f"{why}; run the same command to continue")
        config.end_at_signals()
        return code

    # ------------------------------------------------------------------------------ the run's files

    def save(self) -> None:
        """Rank 0 saves a checkpoint of the last step, unless it is there already."""
        path = files.of_step(self.out / "checkpoints", self.step)
        if self.world.main and self.step and not path.exists():
            with files.whole(path) as folder:
                state = self.optimizer, self.step, self.extra_tensors
                model.save(folder, self.lm, self.tokenizer, *state)
            tqdm.write(f"saved {path}")

    def save_bank(self, step: int, bank: Any) -> None:
        """Rank 0 saves a bank as the version of a step, changed or not, and as the latest."""
        if self.world.main:
            bank.save(self.out / "bank/bank.json")
            bank.save(files.of_step(self.out / "bank", step, ".json"))

    def saved_memories(self) -> dict[str, dict]:
        """The memories that a killed cold start has left, by the problem's id; on every rank."""
        path = self.out / "bank/memories.jsonl"
        rows = list(files.read_jsonl(path)) if self.world.main else []
        rows = distributed.gather(rows, self.world)[0]
        return {row["problem_id"]: row for row in rows}

    def log_memories(self, rows: list[dict]) -> None:
        """Rank 0 appends memories of seed solutions to bank/memories.jsonl."""
        if self.world.main:
            files.append_jsonl(self.out / "bank/memories.jsonl", rows)

    def log_reply(self, row: dict) -> None:
        """Rank 0 appends a reply of the bank's writer to bank/replies.jsonl."""
        if self.world.main:
            files.append_jsonl(self.out / "bank/replies.jsonl", [row])


# ------------------------------------------------------------------ decoding shared over the ranks


def shared_rollouts(
    run: Run, jobs: list[Job], sampling: Sampling
) -> Iterator[list[tuple[Job, Rollout]]]:
    """Judged solutions of jobs that every rank has, turn by turn; every rank gets all of them.

    The rank that decodes a solution judges it.
    """

    def work(jobs_of_rank: list[Job]) -> Iterator[list[tuple[Job, Rollout]]]:
        turns = run.stream(jobs_of_rank, sampling, run.cfg.bank_rows)
        return rollout.rollouts(run.tokenizer, run.stops, run.verifier, turns)

    return distributed.share(run.world, jobs, work, "solving")


def shared_replies(
    run: Run, prompts: list[list[int]], names: list[str], repeats: list[int], limits: list[int]
) -> list[str]:
    """Replies to prompts that every rank has: greedy where repeat is 0, else sampled (D4).

    A sampled reply's draws depend on the seed, the prompt's name and its repeat alone.
    """
    replies: dict[int, list[int]] = {}
    for repeated, sampling in ((False, Sampling(temperature=0.0)), (True, Sampling())):
        jobs = []
        for i, prompt in enumerate(prompts):
            if (repeats[i] > 0) == repeated:
                key = rollout.sample_key(run.cfg.seed, 0, names[i], repeats[i])
                jobs.append(Job(i, prompt, key, limits[i]))
        work = functools.partial(run.stream, sampling=sampling, rows=run.cfg.bank_rows)
        for turn in distributed.share(run.world, jobs, work, "writing"):
            replies |= {job.index: job.ids for job in turn}
    return [rollout.text_of(run.tokenizer, replies[i]) for i in range(len(prompts))]


# ----------------------------------------------------------------------- before anything is loaded


def claim(out: pathlib.Path, held: contextlib.ExitStack) -> None:
    """Lock the directory; ValueError where its files are no run's."""
    names = {path.name for path in out.glob("*") if path.suffix != ".tmp"}
    others = names - {"wandb", "tensorboard", "served", files.LOCK}
    if others and "config.json" not in names:
        listed = ", ".join(sorted(others)[:5])
        raise ValueError(f"--out {out}: holds {listed}, and no run; give another directory")
    held.enter_context(files.locked(out))


def inspect(cfg: Config, world: World) -> State:
    """Read the directory and the data, and decide whether this command may go on with the run."""
    out = pathlib.Path(cfg.out)
    if cfg.batch_size < world.size:
        rule = f"must be >= {world.size}, since every process needs a problem"
        raise ValueError(f"--batch-size {cfg.batch_size}: {rule}")
    data, counts = load_training(cfg)
    state = State(identity(cfg, data, world), data, counts)
    if not (out / "config.json").exists():
        return state
    state.saved = files.read_json(out / "config.json")
    state.step = max(files.by_step(out / "checkpoints"), default=0)
    if state.saved.get("program") != cfg.program:
        program = state.saved.get("program", "no program of ours")
        rule = f"the run was made by {program}, and this is {cfg.program}"
        raise ValueError(f"--out {out}: {rule}; give another directory")
    made = max((row["step"] for row in files.read_jsonl(out / "metrics.jsonl")), default=0)
    if made or state.step:
        compare(cfg, state)
        refuse_lost_files(cfg, state, made)
        find_bank(cfg, state)
    else:
        compare_before_first_step(state)
    done = state.step == cfg.steps and made == cfg.steps
    state.is_complete = done and bool(made or 0 in bank_versions(cfg))
    state.is_complete &= state.keeps_bank and not state.evolution_is_due
    return state


def load_training(cfg: Config) -> tuple[list[Problem], dict[str, int]]:
    """The training problems and their counts; ValueError where one is in an evaluation set."""
    columns = problems.Fields(cfg.problem_field, cfg.answer_field, cfg.answer_after)
    data, counts = problems.load_problems(cfg.data, split=cfg.split, fields=columns)
    if cfg.verifier == Config.verifier:
        problems.refuse_unanswerable(data, f"--data {cfg.data}")
    problems.refuse_overlap(data, f"--data {cfg.data}")
    return data, counts


def identity(cfg: Config, data: list[Problem], world: World) -> dict[str, Any]:
    """What must be equal for a command to continue a run: settings, code, problems, processes."""
    paths = [ROOT / f"{name}.py" for name in CODE]
    paths += [*sorted((ROOT / "lib").glob("*.py")), *sorted((ROOT / "prompts").glob("*.txt"))]
    program = str(sys.modules[type(cfg).__module__].__file__)  # perhaps a script of the user's
    paths += [pathlib.Path(program), pathlib.Path(verify.file_of(cfg.verifier))]
    code = {}
    for path in paths:  # by names that do not depend on where the project lies
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
        code[name] = files.file_digest(path)
    return {
        "program": cfg.program,
        "settings": config.comparable(cfg),
        "code": code,
        "problems": files.digest([(x.id, x.problem, x.answer) for x in data]),
        "processes": world.size,
    }


def compare(cfg: Config, state: State) -> None:
    """ValueError, in one line, for what a continued run may not change; notes what it may."""
    before, now = state.saved or {}, state.identity
    where = f"--out {cfg.out}"
    # A --method sets other defaults, so it is the one to name.
    for f in sorted(fields(cfg), key=lambda f: f.name != "method"):
        old, new = before["settings"].get(f.name, f.default), now["settings"][f.name]
        if old == new or f.name == "out" or f.metadata["again"] == "quiet":
            continue
        line = f"{config.flag(f.name)} {shown(new)}, where the run has {shown(old)}"
        if f.metadata["again"] == "refused":
            raise ValueError(f"{where}: {line}; give the run's value, or another directory")
        state.announced.append(line)
    if before["problems"] != now["problems"]:
        rule = "the problems, answers or ids of --data have changed since the run began"
        raise ValueError(f"{where}: {rule}; bring them back, or give another directory")
    edited = [name for name, digest in now["code"].items() if before["code"].get(name) != digest]
    if edited:
        line = f"the code has changed since the run began ({', '.join(edited)})"
        if not cfg.changed_code:
            raise ValueError(f"{where}: {line}; to go on with the new code pass --changed-code")
        state.announced.append(line)
    if before["processes"] != now["processes"]:
        state.announced.append(f"{now['processes']} processes, before {before['processes']}")
    if cfg.steps < state.step:
        raise ValueError(f"--steps {cfg.steps}: {cfg.out} is at step {state.step} already")
    if before["settings"]["steps"] != cfg.steps:
        rate = cfg.learning_rate * (1 - state.step / cfg.steps)
        state.announced.append(f"so the learning rate of step {state.step + 1} is {rate:.2g}")


def shown(value: Any) -> str:
    """A setting's value as a person would type it."""
    return shlex.join(value) if isinstance(value, list) else repr(value)


def compare_before_first_step(state: State) -> None:
    """Take any settings; note where those have changed that the bank is made with."""
    before, now = state.saved or {}, state.identity
    changed = [name for name in ("code", "problems") if before.get(name) != now[name]]
    for name in MAKES_BANK:
        if before["settings"].get(name) != now["settings"][name]:
            changed.append(config.flag(name))
    if changed:
        state.keeps_bank = False
        state.announced.append(f"the bank is made again: {', '.join(changed)} changed")


def refuse_lost_files(cfg: Config, state: State, made: int) -> None:
    """ValueError where a file is gone that the run's last checkpoint needs. made: its last step."""
    out, lost = pathlib.Path(cfg.out), ""
    settings = state.saved["settings"] if state.saved else {}
    first = settings["checkpoint_every"]
    if cfg.uses_skill_bank and settings["evolve_every"]:
        first = min(first, settings["evolve_every"])
    if not state.step and made > first:
        lost = f"it has made {made} steps, but checkpoints/ is empty"
    for name in ("metrics", "rollouts"):
        steps = (row["step"] for row in files.read_jsonl(out / f"{name}.jsonl"))
        if max(steps, default=0) < state.step:
            lost = f"{name}.jsonl lacks step {state.step}, from which its checkpoint is"
    if lost:
        raise ValueError(f"--out {out}: {lost}; bring the files back, or give another directory")


def bank_versions(cfg: Config) -> dict[int, pathlib.Path]:
    """The run's banks by the step after which each came into use."""
    return files.by_step(pathlib.Path(cfg.out, "bank"))


def find_bank(cfg: Config, state: State) -> None:
    """Which version of the bank is in use after the checkpoint's step (D9); ValueError if gone.

    A checkpoint precedes the evolution that is due after its step: without a version of that step
    the evolution is made again.
    """
    if not cfg.uses_skill_bank:
        return
    versions, every = bank_versions(cfg), cfg.evolve_every
    state.evolved = state.step - state.step % every if every else 0
    if is_evolution_due(cfg, state.step) and state.step not in versions:
        state.evolution_is_due = True
        state.evolved -= every
    if state.step and state.evolved not in versions:
        name = files.of_step(pathlib.Path("bank"), state.evolved, ".json")
        raise ValueError(f"--out {cfg.out}: {name} is gone; bring it back, or start a new run")


def is_evolution_due(cfg: Config, step: int) -> bool:
    return bool(cfg.evolve_every and step and step % cfg.evolve_every == 0)


# --------------------------------------------------------------------------- loading, and the start


def prepare(
    cfg: Config,
    world: World,
    state: State,
    load_bank: Callable[[pathlib.Path], Any],
    held: contextlib.ExitStack,
) -> Run:
    """Load everything that a user's mistake can break. No collective, no file written.

    held: closes what a run holds open.
    """
    bank = None
    version = bank_versions(cfg).get(state.evolved) if state.keeps_bank else None
    if cfg.uses_skill_bank and (version or cfg.bank):
        bank = load_bank(version or pathlib.Path(cfg.bank))
    verifier = held.enter_context(verify.load_judge(cfg.verifier)(cfg.verify_timeout))
    verifier.same("1/2", "2/4")  # a verifier that does not start shows now
    server = None
    if cfg.server:
        url = cfg.server[world.rank % len(cfg.server)]
        server = served.Server(url, cfg.model, rows=cfg.bank_rows)
        server.check()
    if server and not cfg.steps:  # the base alone, which the server has
        lm, tokenizer = model.load_outline(cfg.model)
    else:
        lm, tokenizer = model.load_model(cfg.model, world.device, cfg.dtype, cfg.attn)
    stops = rollout.stop_ids(lm, tokenizer)
    masked_ids = model.masked_token_ids(tokenizer) | {*stops}
    stream: Stream = functools.partial(rollout.stream, lm, tokenizer)
    if server:
        server.tokenizer, server.stops = tokenizer, stops
        stream = server.stream
    run = Run(
        cfg=cfg,
        out=pathlib.Path(cfg.out),
        world=world,
        problems=state.data,
        verifier=verifier,
        lm=lm,
        tokenizer=tokenizer,
        stops=stops,
        masked_ids=masked_ids,
        optimizer=None,
        stream=stream,
        step_stream=stream,
        bank=bank,
        evolution_is_due=state.evolution_is_due,
    )
    if cfg.steps:
        prepare_training(run, state, server, held)
    return run


def prepare_training(
    run: Run, state: State, server: served.Server | None, held: contextlib.ExitStack
) -> None:
    """The adapters, the optimizer, the last checkpoint, the encoder; the server's adapter."""
    cfg = run.cfg
    longest = max((x.problem for x in run.problems), key=len)
    prompt = rollout.chat_ids(run.tokenizer, longest, thinking="closed")
    model.refuse_beyond_context(run.lm, len(prompt), cfg.max_new_tokens, "--max-new-tokens")
    torch.manual_seed(cfg.seed)
    run.lm = model.with_adapters(run.lm, cfg.lora_rank, cfg.lora_alpha, cfg.checkpoint_above)
    run.stream = run.step_stream = functools.partial(rollout.stream, run.lm, run.tokenizer)
    params = model.trained(run.lm).values()
    run.optimizer = torch.optim.AdamW(params, lr=cfg.learning_rate, weight_decay=0.0)
    if state.step:
        checkpoint = files.of_step(run.out / "checkpoints", state.step)
        run.step, run.extra_tensors = model.restore(checkpoint, run.lm, run.optimizer)
    if server:
        name, folder = f"{run.out.name}-rank{run.world.rank}", run.out / "served"
        run.engine = served.TrainedPolicy(server, run.lm, folder, name, scoring.token_logprobs)
        run.stream, run.step_stream = run.engine.stream, run.engine.compared_stream
        held.callback(run.engine.close)
    if cfg.uses_skill_bank:
        run.embed = model.load_encoder(cfg.encoder, run.device)


def begin(run: Run, state: State) -> None:
    """Cut the files back to the last checkpoint, and write config.json. Every rank has passed."""
    cfg, out, world = run.cfg, run.out, run.world
    distributed.broadcast_parameters(model.trained(run.lm).values() if cfg.steps else [], world)
    if world.main:
        for name in runlog.LOGS:
            files.trim_jsonl(out / f"{name}.jsonl", state.step)
        shutil.rmtree(out / "served", ignore_errors=True)  # adapters that a kill has left
        if not state.keeps_bank:
            shutil.rmtree(out / "bank", ignore_errors=True)
        versions = bank_versions(cfg)
        for step, path in versions.items():
            if step > state.evolved:
                path.unlink()
        # Without a first version the cold start asks all of its prompts again.
        files.trim_jsonl(out / "bank/replies.jsonl", state.evolved if versions else -1)
        about = {"id": uuid.uuid4().hex[:12], **runlog.provenance(), "continuations": []}
        if state.saved and state.step:
            again = {**runlog.provenance(), "step": state.step, "changed": state.announced}
            about = {**state.saved}
            about["continuations"] = [*about["continuations"], again]
        files.write_json(out / "config.json", {**about, **state.identity})
        files.write_json(
            out / "problems.json", [problems.fingerprint(x.problem) for x in run.problems]
        )
        settings = state.identity["settings"]
        run.track = runlog.open_tracker(out, settings, run.step, cfg.report_to, about["id"])
        announce(run, state)
    if cfg.uses_skill_bank:
        since = state.evolved
        rows = files.read_jsonl(out / "rollouts.jsonl") if world.main else ()
        window = [row for row in rows if row["step"] > since]
        run.window = distributed.gather(window, world)[0]  # rank 0's, given to all
    distributed.barrier(world)


def announce(run: Run, state: State) -> None:
    """Print what a run starts from."""
    cfg, tokenizer = run.cfg, run.tokenizer
    counts = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in state.counts.items())
    print(f"data {cfg.data}: {counts}")
    if len(run.problems) < cfg.batch_size:
        print(f"fewer problems than --batch-size {cfg.batch_size}: a step takes some twice")
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
    for line in state.announced:
        print(f"changed: {line}")
    if run.step:
        print(f"continues after step {run.step}")
    elif state.saved and cfg.steps:
        print("no step was saved: starts with step 1")


def finish_at_signals(run: Run) -> None:
    """From here on the first Ctrl-C or SIGTERM stops the run after its step, a later one at once.

    Within a second a signal counts as the same one: torchrun passes on what the terminal has sent.
    """

    def stop(*_: object) -> None:
        now = time.monotonic()
        at_once = run.signalled and now - run.signalled > 1
        if run.world.main and (at_once or not run.signalled):
            line = f"finishing step {run.step + 1}, then stopping; once more stops at once"
            if at_once:
                line = "stopped; checkpoints are kept; run the same command to continue"
            os.write(2, f"\n{line}\n".encode())  # print may be what the signal interrupts
        if at_once:
            os._exit(130)
        run.signalled = run.signalled or now

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def what_next(cfg: Config) -> str:
    """The commands that evaluate a complete run and look inside it, without defaults."""
    flags = [] if cfg.data == Config.data else ["--data", "YOUR_TEST_PROBLEMS.jsonl"]
    if not cfg.cold_start_thinking:
        flags.append("--no-thinking")
    if cfg.cold_start_tokens != Config.cold_start_tokens:
        flags += ["--max-new-tokens", str(cfg.cold_start_tokens)]
    for name in ("verifier", "problem_field", "answer_field", "answer_after", "device", "dtype"):
        if getattr(cfg, name) != getattr(Config, name):
            flags += [config.flag(name), getattr(cfg, name)]
    evaluate = shlex.join(["python", "eval.py", cfg.model, cfg.out, *flags])
    look = shlex.join(["python", "-m", "extras.report", cfg.out])
    return f"done; evaluate: {evaluate}\nlook inside: {look}"
