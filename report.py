"""Looking inside a run: a page of its curves, gates, ledger and bank; and one problem explained.

    python report.py runs/sgsd                          writes runs/sgsd/report.html
    python report.py runs/a runs/b --out both.html      the same, with the curves over one another
    python report.py runs/sgsd --explain "What is 2 + 3?" --answer 5

A run may be finished or still going. The page is report_template.html with the data in it as JSON;
its script draws plain SVG and needs neither a network nor a build. Each time that a run is shown,
its ledger.json is counted anew. --explain takes one problem through Algorithm 1 under the run's
settings, last bank and last adapter, leaves the run as it was, and says what each teacher did.
"""

import dataclasses
import json
import math
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import torch

import config
import distributed
import rollout
import runlog
import sgsd
import skills
from distributed import UserError

MAX_BYTES = 4_900_000  # of the page
MAX_POINTS = 1000  # of a curve, over all runs
MAX_SOURCES = 8  # memories of one entry that are shown

Banks = dict[int, skills.SkillBank]  # by the update after which each came into use, oldest first
Entries = dict[tuple[str, str], dict]  # by kind and id


def number(x: Any) -> Any:
    """A number for the page: six significant digits, None for nan and inf; others unchanged."""
    if isinstance(x, float):
        return float(f"{x:.6g}") if math.isfinite(x) else None
    return x


def excerpt(text: str, size: int = 500) -> str:
    """A text, or its beginning and end where it is longer than so many characters."""
    return text if len(text) <= size else f"{text[: size // 2]} […] {text[-size // 2 :]}"


def load_banks(run: pathlib.Path) -> Banks:
    return {step: skills.SkillBank.load(path) for step, path in runlog.bank_versions(run).items()}


def entries(bank: skills.SkillBank) -> Entries:
    found = {}
    for kind, id_field in skills.IDS.items():
        for entry in bank.collection(kind):
            found[kind, entry[id_field]] = entry
    return found


def entries_in_use(banks: Banks, step: int) -> Entries:
    """What an update could retrieve: the entries of the last version before it."""
    earlier = [made for made in banks if made < step]
    return entries(banks[max(earlier)]) if earlier else {}


def identity(kind: str, id_: str, entry: dict) -> tuple[str, str]:
    """What an entry is known by in all versions of a bank.

    Each version gives the dynamic ids anew (Alg. 4), so a dynamic entry is known by its text.
    """
    return kind, skills.entry_text(entry, kind) if id_.startswith("dyn_") else id_


def ledger(run: pathlib.Path) -> dict:
    """What ledger.json holds: {"step": the last update, "entries": a row per skill and mistake}.

    A row says which versions of the bank held the entry first and last, how often it was retrieved,
    and how often it was distilled, reversed or ignored, on successes and on failures.
    """
    banks, rollouts = load_banks(run), distributed.read_jsonl(run / "rollouts.jsonl")
    rows: dict[tuple[str, str], dict] = {}
    for step, bank in banks.items():
        for (kind, id_), entry in entries(bank).items():
            row: dict[str, Any] = {"kind": kind, "id": id_, "first": step, "last": step}
            row["entry"] = {name: entry[name] for name in skills.FIELDS[kind]}
            row |= {"sources": entry.get("sources", []), "retrieved": 0}
            for fate in runlog.FATE.values():
                row[fate] = {"success": 0, "failure": 0}
            known = rows.setdefault(identity(kind, id_, entry), row)
            known |= {"id": id_, "last": step}
    for roll in rollouts:
        used = entries_in_use(banks, roll["step"])
        outcome = "success" if roll["r"] > 0 else "failure"
        has_teachers = len(roll["rho"]) == len(roll["pairs"])  # a baseline's pairs need not teach
        for k, pair in enumerate(roll["pairs"]):
            for kind, id_ in zip(skills.IDS, pair):
                if (kind, id_) not in used:
                    raise UserError(
                        f"{run}: update {roll['step']} used {id_}, which is not in the version of "
                        "the bank before it; are files of bank/ missing?"
                    )
                row = rows[identity(kind, id_, used[kind, id_])]
                row["retrieved"] += 1
                if has_teachers:
                    row[runlog.FATE[roll["rho"][k]]][outcome] += 1
    return {"step": rollouts[-1]["step"] if rollouts else 0, "entries": list(rows.values())}


def memories(run: pathlib.Path, bank: str, rollouts: list[dict]) -> dict[str, dict[int, dict]]:
    """What was written of each problem, by problem id and update.

    Update 0 is the cold start: of the run itself, or of `python skills.py --out bank`.
    """
    found: dict[str, dict[int, dict]] = {}

    def add(step: int, r: int, row: dict, pred: str, text: str) -> None:
        memory = {"step": step, "r": r, "pred": row[pred]}
        memory |= {"problem": excerpt(row["problem"]), "text": excerpt(row[text])}
        found.setdefault(row["problem_id"], {})[step] = memory

    for folder in (run / "bank", pathlib.Path(f"{bank}.work")):
        for row in distributed.read_jsonl(folder / "memories.jsonl"):
            add(0, row["reward"], row, "predicted_answer", "completion")
    for row in rollouts:
        add(row["step"], row["r"], row, "pred", "text")
    return found


def source_steps(row: dict, known: dict[str, dict[int, dict]]) -> list[tuple[str, int | None]]:
    """The first sources of a ledger's row: problem id, and the update of its memory, if known.

    A dynamic entry came from the newest rollout before it; what was merged into it may be older.
    """
    dynamic = row["id"].startswith("dyn_")
    found = []
    for source in row["sources"][:MAX_SOURCES]:
        steps = [step for step in known.get(source, {}) if step <= row["first"]]
        steps = [step for step in steps if (step > 0) == dynamic]
        found.append((source, max(steps, default=None)))
    return found


def timeline(banks: Banks) -> list[dict]:
    """What each version changed: the entries that were added, merged from others, and pruned.

    A new entry that carries the sources of entries that are gone was merged from them.
    """
    events: list[dict] = []
    before: dict[tuple[str, str], tuple[list[str], set]] = {}
    for step, bank in banks.items():
        now = {}
        for (kind, id_), entry in entries(bank).items():
            name = [id_, entry[skills.FIELDS[kind][0]]]
            now[identity(kind, id_, entry)] = name, set(entry.get("sources", []))
        event: dict[str, Any] = {"step": step, "added": [], "merged": [], "pruned": []}
        event["sizes"] = [len(bank.general_skills), len(bank.common_mistakes)]
        about = bank.metadata.items()
        event["note"] = {k: number(v) for k, v in about if isinstance(v, str | int | float)}
        for update in bank.metadata.get("updates", []):
            if update.get("step") == step:
                event["note"] = update
        gone = {key: old for key, old in before.items() if key not in now}
        for key, (name, sources) in now.items():
            if key in before or not events:  # the entries of the first version are not listed
                continue
            parents = []
            for old_key, (old_name, old_sources) in gone.items():
                if old_key[0] == key[0] and old_sources and old_sources <= sources:
                    parents.append(old_name)
            event["merged" if parents else "added"].append([*name, parents])
        absorbed = [parent for merged in event["merged"] for parent in merged[2]]
        for name, _ in gone.values():
            if name not in absorbed:
                event["pruned"].append([*name, []])
        events.append(event)
        before = now
    return events


def sentence(a: float, rho: int, r: int) -> str:
    """What a teacher's polarity amounts to (Tab. 2), as in "supports a failure: reversed"."""
    stance = "supports" if a > 0 else "suppresses"
    if rho == 0:
        stance = "is unsure of"
    return f"{stance} a {'success' if r > 0 else 'failure'}: {runlog.FATE[rho]}"


def teachers(row: dict, used: Entries) -> list[dict]:
    """The teachers of a rollout with their decisions, for the page."""
    found = []
    for k, rho in enumerate(row["rho"]):
        teacher = {"rho": rho, "says": sentence(row["a"][k], rho, row["r"]), "s_g": None}
        teacher |= {name: number(row[name][k]) for name in ("alpha", "a_plain", "a", "losses")}
        if len(row["pairs"]) == len(row["rho"]):
            teacher |= {name: number(row[name][k]) for name in ("s_g", "s_e")}
            for name, kind, id_ in zip(("skill", "mistake"), skills.IDS, row["pairs"][k]):
                entry = used[kind, id_]
                teacher[name] = [id_, *[entry[field] for field in skills.FIELDS[kind]]]
        found.append(teacher)
    return found


def gate_view(row: dict, tokens: dict, used: Entries) -> dict:
    """One audited rollout for the page: its teachers' decisions, its tokens' gaps and credits.

    row, tokens: its lines in rollouts.jsonl and tokens.jsonl. Gaps are in thousandths of a nat;
    credits are in `unit`, a ten-thousandth of the largest.
    """
    credit_KT = tokens.get("credit")
    if credit_KT is None:  # Eq. 20 is the gate's: a divergence has none
        credit_KT = [[0.0] * len(row_T) for row_T in tokens["delta"]]
    sizes = [0.0]
    for row_T in credit_KT:
        sizes += [abs(w) for w in row_T if math.isfinite(w)]
    unit = max(sizes) / 10_000 or 1.0
    view = {"loss": number(row["loss"]), "teachers": teachers(row, used)}
    for name in ("step", "problem_id", "problem", "gold", "pred", "r", "truncated"):
        view[name] = row[name]
    view |= {"text": tokens["text"], "mask": tokens["mask"], "unit": unit}
    return view | {"delta": whole(tokens["delta"], 0.001), "credit": whole(credit_KT, unit)}


def whole(x_KT: list[list[float]], unit: float) -> list[list[int | None]]:
    """Numbers as whole multiples of a unit; None for nan and inf."""
    found = []
    for x_T in x_KT:
        found.append([round(x / unit) if math.isfinite(x) else None for x in x_T])
    return found


def in_words(view: dict, eps_a: float) -> str:
    """A rollout's decisions for a terminal; no escape sequence in a model's text reaches it."""
    verdict = "right" if view["r"] > 0 else "wrong"
    cut = ", cut at the length limit" if view["truncated"] else ""
    lines = [
        f"problem: {view['problem']}",
        f"completion: {''.join(view['text'])}",
        f"answer {view['pred']}, reference {view['gold']}: {verdict}, r = {view['r']:+d}{cut}",
        f"{len(view['mask'])} tokens, {view['mask'].count(0)} of them masked; "
        f"loss {view['loss']:+.6f}; threshold |a~| > {eps_a}",
        "  k    s_g    s_e  alpha        a       a~  rho",
    ]
    numbers = "{s_g:5.3f}  {s_e:5.3f}  {alpha:5.3f}  {a_plain:+7.4f}  {a:+7.4f}  {rho:+3d}  {says}"
    for k, teacher in enumerate(view["teachers"], 1):
        lines.append(f"{k:3d}  {numbers.format(**teacher)}")
        lines.append("     {} {} | {} {}".format(*teacher["skill"][:2], *teacher["mistake"][:2]))
    text = "\n".join(lines)
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def saved_settings(run: pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads((run / "config.json").read_text(encoding="utf-8"))["settings"]
    except (OSError, ValueError, KeyError) as e:
        raise UserError(
            f"{run}: no readable config.json of a run there ({distributed.brief(e)}); "
            "give a run's directory such as runs/sgsd"
        ) from None


def curves(metrics: list[dict], points: int) -> tuple[dict[str, list], int]:
    """The numbers of metrics.jsonl by name, of every n-th update up to the last one; and n."""
    every = max(1, math.ceil(len(metrics) / points))
    kept = [runlog.flat(row) for row in metrics[(len(metrics) - 1) % every :: every]]
    columns: dict[str, list] = {}
    for row in kept:
        columns.update((name, []) for name in row)
    for name, column in columns.items():
        column += [number(row.get(name)) for row in kept]
    return columns, every


def evaluations(run: pathlib.Path) -> list[dict]:
    """Points of the evaluation curves, from every results.json below the run.

    What is no checkpoint is the plain model, at update 0; checkpoints of other runs are left out.
    """
    points: dict[tuple[str, int], dict] = {}
    for path in sorted(run.rglob("results.json")):
        results = json.loads(path.read_text(encoding="utf-8"))["results"]
        for policy, sets in results.items():
            at = re.search(r"step_(\d+)", policy)
            if at and run.resolve().name not in pathlib.Path(policy).parts:
                continue
            for name, row in sets.items():
                point = {"set": name, "step": int(at[1]) if at else 0}
                point |= {k: number(row.get(k)) for k in ("avg", "avg_low", "avg_high", "samples")}
                points[name, point["step"]] = point
    return [points[key] for key in sorted(points)]


def collect(run: pathlib.Path, points: int = MAX_POINTS) -> dict:
    """All that the page shows of a run. Writes its ledger.json. UserError where there is no run."""
    settings, banks, counted = saved_settings(run), load_banks(run), ledger(run)
    distributed.write_json(run / "ledger.json", counted)
    logs = [distributed.read_jsonl(run / f"{name}.jsonl") for name in runlog.LOGS]
    metrics, rollouts, tokens = logs
    columns, every = curves(metrics, points)
    audited = {line["step"] for line in tokens}
    rows = [row for row in rollouts if row["step"] in audited]  # in the order of their tokens
    views = [gate_view(*both, entries_in_use(banks, both[0]["step"])) for both in zip(rows, tokens)]
    known = memories(run, settings.get("bank", ""), rollouts)
    shown: dict[str, dict[int, dict]] = {}
    for row in counted["entries"]:
        row["all_sources"] = len(row["sources"])
        row["sources"] = source_steps(row, known)
        for source, step in row["sources"]:
            if step is not None:
                shown.setdefault(source, {})[step] = known[source][step]
    x = torch.linspace(-6, 6, 121)
    gate = [x, sgsd.gated_loss(x, settings["tau_g"]), sgsd.gate_grad(x, settings["tau_g"])]
    return {
        "name": run.resolve().name,
        "settings": settings,
        "metrics": columns,
        "every": every,
        "evals": evaluations(run),
        "rollouts": views,
        "ledger": counted["entries"],
        "memories": shown,
        "timeline": timeline(banks),
        "gate": [[number(y) for y in curve.tolist()] for curve in gate],
    }


def dump(obj: object) -> str:
    """ASCII JSON that can stand in a <script>: no "<" of a text can open or close a tag."""
    return json.dumps(obj, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def fit(views: list[dict], budget: int) -> tuple[list[dict], list[str]]:
    """As many gate views as so many bytes hold, from all updates, and the names of the others."""
    seen: dict[int, int] = {}
    order = []  # the first of each update, then the second of each, and so on
    for i, view in enumerate(views):
        seen[view["step"]] = seen.get(view["step"], 0) + 1
        order.append((seen[view["step"]], i))
    fitting = set()
    for _, i in sorted(order):
        budget -= len(dump(views[i])) + 1
        if budget < 0:
            break
        fitting.add(i)
    kept = [view for i, view in enumerate(views) if i in fitting]
    others = [f"{x['step']}: {x['problem_id']}" for i, x in enumerate(views) if i not in fitting]
    return kept, others


def write(runs: list[pathlib.Path], out: pathlib.Path, max_bytes: int = MAX_BYTES) -> None:
    """Write the page of these runs, whole or not at all.

    Where the audited rollouts do not all fit, the page says which were left out.
    """
    template = pathlib.Path(__file__).with_name("report_template.html").read_text(encoding="utf-8")
    data = [collect(run, max(1, MAX_POINTS // len(runs))) for run in runs]
    if len({run["name"] for run in data}) < len(runs):
        for run, path in zip(data, runs):
            run["name"] = str(path)
    views = [run.pop("rollouts") for run in data]
    budget = (max_bytes - len(template) - len(dump(data))) // len(runs)
    for run, own in zip(data, views):
        run["audited"] = len(own)
        run["rollouts"], others = fit(own, budget)
        run["left_out"] = excerpt(", ".join(others), 2000)
    distributed.write_text(out, template.replace("{{data}}", dump(data)))


def explain(run: pathlib.Path, problem: str, answer: str) -> pathlib.Path:
    """Make one update on one problem, in memory only, and print what each teacher did to it.

    Its logs go to a folder beside the run, which is returned; the run itself stays as it was.
    """
    if "method" in saved_settings(run):
        raise UserError(f"--explain: {run} is a run of baselines.py; give one of sgsd.py")
    cfg, resume = config.parse(["--resume", str(run)], "report.py", "")
    if not (cfg.bank or runlog.bank_versions(run)):
        raise UserError(f"--explain: {run} has no bank yet; wait until its cold start is through")
    key = rollout.sample_key(cfg.seed, 0, problem + answer) % 2**32
    folder = run.resolve().with_name(f"{run.resolve().name}-explain-{key:08x}")
    data = folder / "problem.jsonl"
    distributed.write_jsonl(data, [{"id": "explained", "problem": problem, "answer": answer}])
    cfg = dataclasses.replace(
        cfg, data=str(data), batch_size=1, audit_every=1, eval_data="", allow_eval_overlap=True
    )
    prepared = sgsd.prepare(cfg, distributed.init(cfg.device), resume)
    assert prepared.bank is not None
    with prepared.verifier:
        (row,), _, _ = sgsd.train_step(prepared, 1)
    distributed.write_json(folder / "config.json", runlog.provenance(cfg))
    prepared.bank.save(folder / "bank" / "step_000000.json")
    distributed.write_jsonl(folder / "tokens.jsonl", [row.pop("tokens")])
    distributed.write_jsonl(folder / "rollouts.jsonl", [row])
    print(in_words(collect(folder)["rollouts"][0], cfg.eps_a))
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    about = "A page of a run's curves, gates, ledger and bank; or one problem explained."
    parser = distributed.Parser("report.py", description=about, allow_abbrev=False)
    add = parser.add_argument
    add("runs", nargs="+", type=pathlib.Path, metavar="RUN", help="a run's directory")
    add("--out", type=pathlib.Path, help="the page (default: report.html in the first run)")
    add("--explain", metavar="PROBLEM", help="take this problem through one update of the run")
    add("--answer", help="the reference answer of the problem in --explain")

    def body() -> None:
        args = parser.parse_args(argv)
        runs = args.runs
        if (args.explain is None) != (args.answer is None):
            raise UserError("--explain and --answer: one is no use without the other; give both")
        if args.explain is not None:
            if len(runs) > 1:
                raise UserError(f"--explain: give one run, got {len(runs)}")
            runs = [explain(runs[0], args.explain, args.answer)]
        out = args.out or runs[0] / "report.html"
        write(runs, out)
        print(f"written: {out}")

    return distributed.command("report", body)


if __name__ == "__main__":
    distributed.leave(main())
