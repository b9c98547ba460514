"""A run's skill bank over time: made or loaded at the start (Alg. 2), evolved on its schedule (Alg. 4), kept by step, with a ledger."""

import copy
import json
import pathlib
from types import SimpleNamespace
from typing import TYPE_CHECKING

import distributed as D
import rollout as R
import skills as S
from distributed import UserError
from runlog import FATE

if TYPE_CHECKING:
    import sgsd


class BankLife:
    """The run's bank over time: made or loaded at the start (Alg. 2), evolved on its schedule (Alg. 4), kept by step."""

    def __init__(self, run: "sgsd.Run", start: int):
        """start: the last update made, whose ledger is read here. Writes nothing."""
        cfg, self.run, self.start = run.cfg, run, start
        self.folder = pathlib.Path(cfg.out) / "bank"
        self.window: list[dict] = []
        # rank 0's, of the last checkpoint, and what its rollouts since add to it
        self.ledger = (
            load_ledger(self.folder.parent / "checkpoints" / f"step_{start:06d}" / "ledger.json")
            if run.world.main
            else {}
        )
        self.uncounted: list[dict] = []
        self.log = S.ReplyLog(self.folder, run.world)
        model, tokenizer = run.model, run.tokenizer
        if cfg.update_model:
            model, tokenizer = R.load_model(
                cfg.update_model,
                run.world.device,
                dtype=cfg.dtype,
                attn=cfg.attn,
                flag="--update-model",
            )
        self.complete = R.make_complete(
            model,
            tokenizer,
            run.world,
            max_new_tokens=cfg.reply_tokens,
            seed=cfg.seed,
            rows=cfg.rollout_rows or 32,
        )

    def begin(self) -> None:
        """The bank, window and ledger of update `start` (D9)."""
        run, cfg, out, start = self.run, self.run.cfg, self.folder.parent, self.start
        versions = sorted(self.folder.glob("step_*.json"))
        kept = [p for p in versions if int(p.stem[5:]) <= start]
        for p in versions if run.world.main else ():
            if p not in kept:  # of updates that will be made again, perhaps on another schedule
                p.unlink()
        if kept:
            run.bank = S.SkillBank.load(kept[-1])
        elif run.bank is None:
            run.bank = S.make_bank(
                self.folder,
                run.problems,
                run.model,
                run.tokenizer,
                run.verifier,
                self.complete,
                run.world,
                count=cfg.cold_start,
                seed=cfg.seed,
                max_new_tokens=min(cfg.max_new_tokens, 1024),
                memory_answer=cfg.memory_answer,
                group_size=cfg.merge_group_size,
                patience=cfg.merge_patience,
                rows=cfg.rollout_rows or 32,
            )
        self.save(int(kept[-1].stem[5:]) if kept else 0)
        if run.world.main:
            D.trim_jsonl(self.log.path, start)
            self.ledger = make_ledger(out, self.ledger)
            D.write_json(out / "ledger.json", self.ledger)
        if cfg.update_every:
            rows = D.read_jsonl(out / "rollouts.jsonl") if run.world.main else []
            last = start // cfg.update_every * cfg.update_every
            rows = [row for row in rows if last < row["step"] <= start]
            if run.world.main and last < start and (not rows or rows[0]["step"] > last + 1):
                print(
                    f"bank: rollouts.jsonl no longer holds all since update {last}; the next online update learns from what is left of them"
                )
            self.window = D.gather(
                [row for row in rows if cfg.counts(row["truncated"])], run.world
            )[0]
        if run.world.main and not (run.bank.general_skills and run.bank.common_mistakes):
            print(
                "bank: one of its lists is empty, so there are no teachers and no loss until an online update fills it (S8)"
            )

    def after_update(self, step: int, records: list[dict]) -> dict:
        """Alg. 4 on all rollouts since the last update (D2); the same call, and the same bank, on every rank."""
        cfg, bank = self.run.cfg, self.run.bank
        assert bank is not None
        self.log.step = step
        if self.run.world.main:
            self.uncounted += [
                {name: row[name] for name in ("step", "r", "pairs", "rho")} for row in records
            ]
        if cfg.update_every:
            self.window += [row for row in records if cfg.counts(row["truncated"])]
        if cfg.update_every and step % cfg.update_every == 0:
            window = [SimpleNamespace(**r) for r in self.window]
            self.run.bank = S.evolve(
                bank,
                window,
                step,
                self.complete,
                update_every=cfg.update_every,
                success_gate=cfg.success_gate,
                max_new_items=cfg.max_new_items,
                dynamic_capacity=cfg.dynamic_capacity,
                group_size=cfg.merge_group_size,
                patience=cfg.merge_patience,
                memory_answer=cfg.memory_answer,
                log=self.log,
            )
            self.window = []
            if self.run.bank is not bank:
                self.save(step)
        assert self.run.bank is not None
        sizes = {
            "bank_skills": len(self.run.bank.general_skills),
            "bank_mistakes": len(self.run.bank.common_mistakes),
        }
        return sizes | {f"replies_{outcome}": n for outcome, n in self.log.take().items()}

    def save(self, step: int) -> None:
        if self.run.world.main and self.run.bank is not None:
            self.run.bank.save(self.folder / f"step_{step:06d}.json")
            self.run.bank.save(self.folder / "bank.json")
            if warning := S.lint(self.run.bank):
                print(warning)

    def save_ledger(self) -> None:
        """Before a checkpoint, which takes a copy: a run killed after it has nothing left to write."""
        self.ledger = make_ledger(self.folder.parent, self.ledger, self.uncounted)
        self.uncounted = []
        D.write_json(self.folder.parent / "ledger.json", self.ledger)


def load_ledger(path: pathlib.Path) -> dict:
    """A ledger that was written; one without counts where there is none."""
    try:
        ledger = (
            json.loads(path.read_text(encoding="utf-8"))
            if path.exists()
            else {"step": 0, "entries": []}
        )
        return {"step": ledger["step"], "entries": ledger["entries"]}
    except (OSError, ValueError, LookupError, TypeError) as e:
        raise UserError(
            f"{path}: cannot be read ({D.brief(e)}); without it what rollouts.jsonl holds is counted"
        ) from None


def make_ledger(
    out: pathlib.Path, base: dict | None = None, rollouts: list[dict] | None = None
) -> dict:
    """ledger.json: per skill and mistake of all versions of a run's bank, how often it was retrieved and what came of it.

    Counted on from `base`, a ledger of the same run (by default its ledger.json), with `rollouts`, all lines since (by default
    those of rollouts.jsonl), so no line is needed twice. Entries are those of bank/step_*.json; an update used the last version
    before it. Dynamic ids are given anew with each version (Alg. 4), so a dynamic entry is known by its text.
    """
    base = copy.deepcopy(base) if base else load_ledger(out / "ledger.json")
    if rollouts is None:
        rollouts = [r for r in D.read_jsonl(out / "rollouts.jsonl") if r["step"] > base["step"]]

    def name(kind: str, id_: str, entry: dict) -> tuple[str, str]:
        return kind, S.entry_text(entry, kind) if id_.startswith("dyn_") else id_

    entries = {name(row["kind"], row["id"], row["entry"]): row for row in base["entries"]}
    versions: dict[int, dict[tuple, dict]] = {}
    files = {int(path.stem[5:]): path for path in sorted((out / "bank").glob("step_*.json"))}
    in_use = max((step for step in files if step <= base["step"]), default=0)
    for step, path in files.items():
        if step < in_use:  # counted through
            continue
        bank, versions[step] = S.SkillBank.load(path), {}
        for kind, field_ in S.IDS.items():
            for e in getattr(bank, kind):
                row = entries.setdefault(
                    name(kind, e[field_], e),
                    {
                        "kind": kind,
                        "id": e[field_],
                        "first": step,
                        "entry": {f: e[f] for f in S.FIELDS[kind]},
                        "sources": e.get("sources", []),
                        "retrieved": 0,
                        **{fate: {"success": 0, "failure": 0} for fate in FATE.values()},
                    },
                )
                row.update(id=e[field_], last=step)
                versions[step][kind, e[field_]] = row
    for r in rollouts:
        fates = (
            r["rho"] if len(r["rho"]) == len(r["pairs"]) else [None] * len(r["pairs"])
        )  # a pair need not be a teacher
        for pair, rho in zip(r["pairs"], fates):
            for kind, id_ in zip(S.IDS, pair):
                row = versions[max(step for step in versions if step < r["step"])][kind, id_]
                row["retrieved"] += 1
                if rho is not None:
                    row[FATE[rho]]["success" if r["r"] > 0 else "failure"] += 1
    return {
        "step": rollouts[-1]["step"] if rollouts else base["step"],
        "entries": list(entries.values()),
    }
