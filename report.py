"""Looking inside: one self-contained report.html from the files of one or several runs, finished or still going.

    python report.py runs/sgsd                          writes runs/sgsd/report.html
    python report.py runs/a runs/b --out a_and_b.html   the same, their curves laid over one another

The page (report_template.html) holds the data as JSON and draws plain SVG with its own script: its few kinds of chart take
some eighty lines, less than any library worth inlining, and need neither a network nor a build. It stays under 5 MB: where
the gaps of all audited rollouts don't fit, it says which were left out.
"""

import json
import math
import pathlib
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

import banklife
import distributed as D
import rollout as R
import runlog
import sgsd
import skills as S
from distributed import UserError

MAX_BYTES = 4_900_000  # of the page
MAX_POINTS = 1000  # of a curve, over all runs
MAX_SOURCES = 8  # memories shown of one entry


def number(x: Any) -> Any:
    """For the page: six significant digits, None for what JSON can't hold (nan, inf)."""
    if isinstance(x, float):
        return float(f"{x:.6g}") if math.isfinite(x) else None
    return x


def excerpt(text: str, size: int = 500) -> str:
    return text if len(text) <= size else f"{text[: size // 2]} […] {text[-size // 2 :]}"


# ============================================================================================================ one rollout


def sentence(a: float, rho: int, r: int) -> str:
    """What a teacher's polarity amounts to (Tab. 2): "supports a failure: reversed"."""
    stance = "is unsure of" if rho == 0 else "supports" if a > 0 else "suppresses"
    return f"{stance} a {'success' if r > 0 else 'failure'}: {runlog.FATE[rho]}"


def rollout(row: dict, tokens: dict, bank: dict[tuple, dict]) -> dict:
    """One audited rollout for the page: its teachers with their decisions, its tokens with gaps and credits.

    row, tokens: its lines in rollouts.jsonl and tokens.jsonl. bank: the entries of its update. Gaps are whole thousandths
    of a nat; credits are whole multiples of `unit`, a ten-thousandth of the largest.
    """
    teachers = []
    for k, rho in enumerate(row["rho"]):
        pair = row["pairs"][k] if len(row["pairs"]) == len(row["rho"]) else []
        teacher = {name: number(row[name][k]) for name in ("alpha", "a_plain", "a", "losses")} | {
            "rho": rho
        }
        teacher |= {name: number(row[name][k]) if pair else None for name in ("s_g", "s_e")}
        teacher["says"] = sentence(row["a"][k], rho, row["r"])
        for name, kind, id_ in zip(("skill", "mistake"), S.FIELDS, pair):
            entry = bank.get((kind, id_), {})
            teacher[name] = [id_, *(entry.get(f, "") for f in S.FIELDS[kind])]
        teachers.append(teacher)
    credit_KT = tokens.get("credit") or [
        [0.0] * len(row_T) for row_T in tokens["delta"]
    ]  # Eq. 20 is the gate's: a divergence has none
    unit = max((abs(w) for row_T in credit_KT for w in row_T), default=0) / 10_000 or 1.0
    return {
        **{
            name: row[name]
            for name in ("step", "problem_id", "problem", "gold", "pred", "r", "truncated")
        },
        "loss": number(row["loss"]),
        "teachers": teachers,
        "text": tokens.get("text") or [f"⟨{i}⟩" for i in row["completion_ids"]],
        "mask": tokens["mask"],
        "unit": unit,
        "delta": [
            [round(1000 * number(x)) if math.isfinite(x) else None for x in row_T]
            for row_T in tokens["delta"]
        ],
        "credit": [
            [round(w / unit) if math.isfinite(w) else None for w in row_T] for row_T in credit_KT
        ],
    }


def in_words(roll: dict, settings: dict) -> str:
    """A rollout's decisions for a terminal."""
    verdict = "right" if roll["r"] > 0 else "wrong"
    lines = [
        f"problem: {roll['problem']}",
        f"completion: {''.join(roll['text'])}",
        f"answer {roll['pred']}, reference {roll['gold']}: {verdict}, r = {roll['r']:+d}{', cut at the length limit' if roll['truncated'] else ''}",
        f"{len(roll['mask'])} tokens, {len(roll['mask']) - sum(roll['mask'])} of them masked; loss {roll['loss']:+.6f}; "
        f"threshold |a~| > {settings['eps_a']}",
        "  k    s_g    s_e  alpha        a       a~  rho",
    ]
    for k, t in enumerate(roll["teachers"], 1):
        lines.append(
            f"{k:3d}  {t['s_g']:5.3f}  {t['s_e']:5.3f}  {t['alpha']:5.3f}  {t['a_plain']:+7.4f}  {t['a']:+7.4f}  {t['rho']:+3d}  {t['says']}"
        )
        lines.append(f"     {t['skill'][0]} {t['skill'][1]} | {t['mistake'][0]} {t['mistake'][1]}")
    return "".join(
        c if c.isprintable() or c == "\n" else "\ufffd" for c in "\n".join(lines)
    )  # no escape sequences


# =============================================================================================================== the bank


def versions(run: pathlib.Path) -> dict[int, S.SkillBank]:
    """The bank's versions by the update after which they were in use, oldest first."""
    return {
        int(path.stem[5:]): S.SkillBank.load(path)
        for path in sorted((run / "bank").glob("step_*.json"))
    }


def entries(bank: S.SkillBank) -> dict[tuple, dict]:
    """(kind, id) -> entry."""
    return {(kind, e[id_]): e for kind, id_ in S.IDS.items() for e in getattr(bank, kind)}


def timeline(banks: dict[int, S.SkillBank]) -> list[dict]:
    """What each version changed: entries added, merged from which, and pruned.

    An entry is its text. A new one that carries the sources of entries that are gone was merged from them.
    """
    events: list[dict] = []
    before: dict[tuple, tuple] = {}
    for step, bank in banks.items():
        now = {
            (kind, id_.startswith("dyn_"), S.entry_text(e, kind)): (id_, e)
            for (kind, id_), e in entries(bank).items()
        }
        gone = {key: kept for key, kept in before.items() if key not in now}
        event: dict[str, Any] = {
            "step": step,
            "sizes": [len(bank.general_skills), len(bank.common_mistakes)],
            "added": [],
            "merged": [],
        }
        updates = [u for u in bank.metadata.get("updates", []) if u.get("step") == step]
        event["note"] = (
            updates[-1]
            if updates
            else {
                k: number(v) for k, v in bank.metadata.items() if isinstance(v, str | int | float)
            }
        )
        absorbed = set()
        for key, (id_, e) in now.items() if events else ():
            if key not in before:
                own = set(e.get("sources", []))
                parents = [
                    k
                    for k, (_, old) in gone.items()
                    if k[0] == key[0] and old.get("sources") and set(old["sources"]) <= own
                ]
                absorbed.update(parents)
                event["merged" if parents else "added"].append(
                    [id_, label(e), [[gone[p][0], label(gone[p][1])] for p in parents]]
                )
        event["pruned"] = [
            [id_, label(e), []] for key, (id_, e) in gone.items() if key not in absorbed
        ]
        events.append(event)
        before = now
    return events


def label(entry: dict) -> str:
    """An entry's first field: a skill's title, a mistake's description."""
    return str(entry["title"] if "title" in entry else entry["description"])


def provenance(
    run: pathlib.Path, ledger: list[dict], rollouts: list[dict], bank_file: str
) -> dict[str, list[dict]]:
    """Problem id -> the memories of it that entries of the ledger name as sources: of the cold start, and of updates."""
    wanted = {s for row in ledger for s in row["sources"]}
    cold = [
        m
        for path in (
            run / "bank" / "memories.jsonl",
            pathlib.Path(f"{bank_file}.work/memories.jsonl"),
        )
        for m in D.read_jsonl(path)
    ]
    found: dict[str, list[dict]] = {}
    for m in cold:
        if m["problem_id"] in wanted:
            found.setdefault(m["problem_id"], []).append(
                {
                    "step": 0,
                    "r": m["reward"],
                    "pred": m["predicted_answer"],
                    "problem": excerpt(m["problem"]),
                    "text": excerpt(m["completion"]),
                }
            )
    for row in rollouts:
        if row["problem_id"] in wanted:
            found.setdefault(row["problem_id"], []).append(
                {
                    "step": row["step"],
                    "r": row["r"],
                    "pred": row["pred"],
                    "problem": excerpt(row["problem"]),
                    "text": excerpt(row["text"]),
                }
            )
    return found


def with_sources(row: dict, memories: dict[str, list[dict]]) -> dict:
    """A row of the ledger with its sources resolved: [problem id, memory's place in the list] of the first few, and how many."""
    dynamic, found = row["id"].startswith("dyn_"), []
    for source in row["sources"]:
        places = [
            i
            for i, m in enumerate(memories.get(source, []))
            if (m["step"] > 0) == dynamic and m["step"] <= row["first"]
        ]
        # a dynamic entry came from the newest such rollout before it; what was merged into it may be older
        found.append([source, places[-1] if places else None])
    return {**row, "sources": found[:MAX_SOURCES], "all_sources": len(found)}


# ================================================================================================================ one run


def evaluations(run: pathlib.Path) -> list[dict]:
    """Points of the evaluation curves: every results.json below the run that is about its checkpoints or a plain model."""
    points: dict[tuple, dict] = {}
    for path in sorted(run.rglob("results.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        tables = data["results"]
        if any("avg" in row for row in tables.values()):  # of one policy
            tables = {data["settings"]["path"]: tables}
        for policy, sets in tables.items():
            at = re.search(r"step_(\d+)", policy)
            if at and run.resolve().name not in pathlib.Path(policy).parts:
                continue  # of another run
            for name, row in sets.items():
                step = int(at[1]) if at else 0
                points[name, step] = {
                    "set": name,
                    "step": step,
                    **{k: number(row.get(k)) for k in ("avg", "avg_low", "avg_high", "samples")},
                }
    return sorted(points.values(), key=lambda p: (p["set"], p["step"]))


def load(run: pathlib.Path, points: int = MAX_POINTS) -> dict:
    """All that the page shows of a run. UserError where there is none."""
    metrics, rows, tokens = (
        D.read_jsonl(run / f"{name}.jsonl") for name in ("metrics", "rollouts", "tokens")
    )
    if not metrics and not rows:
        raise UserError(
            f"{run}: no metrics.jsonl or rollouts.jsonl of a run there; give a run's directory such as runs/sgsd"
        )
    try:
        settings = json.loads((run / "config.json").read_text(encoding="utf-8"))["settings"]
    except (OSError, ValueError, KeyError) as e:
        raise UserError(
            f"{run}: no readable config.json ({D.brief(e)}); give a run's directory such as runs/sgsd"
        ) from None
    settings = {"tau_g": 1.0, "c_delta": 3.0, "eps_a": 0.05, **settings}
    flat = [runlog.flat(m) for m in metrics]
    every = math.ceil(len(flat) / max(1, points))
    flat = [m for i, m in enumerate(flat) if (len(flat) - 1 - i) % every == 0] if flat else []
    columns = {
        name: [number(m.get(name)) for m in flat]
        for name in dict.fromkeys(name for m in flat for name in m)
    }

    banks = versions(run)
    in_use = {step: entries(bank) for step, bank in banks.items()}
    ledger = banklife.make_ledger(run)["entries"]
    memories = provenance(run, ledger, rows, settings.get("bank", ""))
    ledger = [with_sources(row, memories) for row in ledger]
    shown = {(source, i) for row in ledger for source, i in row["sources"]}
    waiting: dict[tuple, list[dict]] = {}
    for t in tokens:
        waiting.setdefault((t["step"], t["problem_id"]), []).append(t)
    audited = []
    for row in rows:
        if own := waiting.get(
            (row["step"], row["problem_id"])
        ):  # a problem that comes twice in an update: in order
            bank = in_use[max((s for s in in_use if s < row["step"]), default=0)] if in_use else {}
            audited.append(rollout(row, own.pop(0), bank))
    x = torch.linspace(-6, 6, 121)
    gate = [x, sgsd.gated_loss(x, settings["tau_g"]), sgsd.gate_grad(x, settings["tau_g"])]
    return {
        "name": run.resolve().name,
        "settings": settings,
        "metrics": columns,
        "every": every,
        "evals": evaluations(run),
        "rollouts": audited,
        "ledger": ledger,
        "memories": {
            s: {i: m for i, m in enumerate(ms) if (s, i) in shown} for s, ms in memories.items()
        },
        "timeline": timeline(banks),
        "gate": [[number(float(v)) for v in curve] for curve in gate],
    }


# =============================================================================================================== the page


def dump(obj: object) -> str:
    r"""JSON that can stand in a <script>: no "<" in it is text of the page's own."""
    return json.dumps(obj, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace(
        "<", "\\u003c"
    )


def fit(rollouts: list[dict], budget: int) -> tuple[list[dict], list[str]]:
    """As many rollouts as the budget of bytes holds, spread over the updates, and the names of those left out."""
    seen: dict[int, int] = {}
    order = []
    for i, roll in enumerate(rollouts):
        seen[roll["step"]] = seen.get(roll["step"], 0) + 1
        order.append((seen[roll["step"]], i))
    kept = set()
    for _, i in sorted(order):
        budget -= len(dump(rollouts[i]).encode("utf-8", "backslashreplace")) + 1
        if budget < 0:
            break
        kept.add(i)
    return [r for i, r in enumerate(rollouts) if i in kept], [
        f"{r['step']}: {r['problem_id']}" for i, r in enumerate(rollouts) if i not in kept
    ]


def write(runs: Sequence[pathlib.Path], out: pathlib.Path) -> pathlib.Path:
    """The page of these runs, whole or not at all."""
    template = (pathlib.Path(__file__).parent / "report_template.html").read_text(encoding="utf-8")
    data = [load(run, MAX_POINTS // len(runs)) for run in runs]
    if len({d["name"] for d in data}) < len(data):
        for d, run in zip(data, runs):
            d["name"] = str(run)
    fixed = len(
        (template + dump([{**d, "rollouts": []} for d in data])).encode("utf-8", "backslashreplace")
    )
    for d in data:
        d["audited"] = len(d["rollouts"])
        d["rollouts"], left_out = fit(d["rollouts"], (MAX_BYTES - fixed) // len(data))
        d["left_out"] = excerpt(", ".join(left_out), 2000)
    before, after = template.split("{{data}}")
    D.write_text(out, before + dump(data) + after)
    return out


def explain(run: sgsd.Run, resume: bool) -> int:
    """--explain: one problem through Algorithm 1, lines 2-14, no update; printed, and written as a report beside --out."""
    cfg = run.cfg
    out = pathlib.Path(
        f"{pathlib.Path(cfg.out)}-explain-{R.sample_key(cfg.seed, 0, cfg.explain + cfg.answer) % 2**32:08x}"
    )
    if run.bank is None:
        raise UserError(
            "--explain needs a skill bank: give one with --bank, or a run that has one with --resume"
        )
    if resume:
        sgsd.load_checkpoint(run)
    (row,), _ = sgsd.accumulate(run, 1)
    D.write_json(out / "config.json", runlog.provenance(cfg))
    run.bank.save(out / "bank" / "step_000000.json")
    for name, made in (("tokens", row.pop("tokens")), ("rollouts", row)):
        D.write_text(out / f"{name}.jsonl", json.dumps(made) + "\n")
    print(in_words(load(out)["rollouts"][0], asdict(cfg)))
    print(f"written: {write([out], out / 'report.html')}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = D.Parser("report.py", description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument(
        "runs", nargs="+", type=pathlib.Path, metavar="RUN", help="a run's directory"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, help="the page (default: report.html in the first run)"
    )

    def body() -> None:
        args = parser.parse_args(argv)
        print(f"written: {write(args.runs, args.out or args.runs[0] / 'report.html')}")

    return D.command("report", body)


if __name__ == "__main__":
    D.leave(main())
