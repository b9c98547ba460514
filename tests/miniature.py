"""The paper's main table, its ablations and a sweep of misleading skills, measured on the embedded default with several seeds.

    python tests/miniature.py                     all of it: results/miniature.json and results/miniature.md
    python tests/miniature.py --quick             one seed, four methods, no choice of rates

Every method takes the preset tiny for 40 updates, a bank that the tiny model made (one per seed, the same for all methods) and
the best of three learning rates on the validation problems; then five seeds on the test problems. GRPO draws 8 rollouts for each
of 4 problems, twice the samples of the others' 16; one row has it at their 16 problems, 8 times the samples. What is done is kept
in --work, so that a killed run goes on. The bank stays as it was made but for "sgsd, bank evolving". Accuracy is avg@4 under the
plain prompt, thinking on, but for base+skill. Only runs on the test problems are evaluated before their last update.
"""

import argparse
import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import pathlib
import random
import shutil
import statistics
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tiny")]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per process
os.environ.setdefault("HF_HUB_OFFLINE", "1")

METHODS: dict[str, str] = {
    "grpo": "--method grpo --batch-size 4",
    "grpo+skill": "--method grpo+skill --num-teachers 3 --batch-size 4",
    "grpo, 16 problems": "--method grpo",
    "opsd": "--method opsd",
    "opsd, no clip": "--method opsd --objective-clip 0",
    "opsd+skill": "--method opsd+skill --num-teachers 3",
    "opsd+skill, no clip": "--method opsd+skill --num-teachers 3 --objective-clip 0",
    "sgsd": "",
    "sgsd, bank evolving": "--update-every 10",
    "no token mask": "--no-token-mask",
    "no clip": "--no-clip",
    "no threshold": "--eps-a 0",
    "none of the three": "--no-token-mask --no-clip --eps-a 0",
    "no polarity": "--no-polarity",
    "one teacher": "--num-teachers 1",
    "frozen teacher": "--teacher frozen",
    "periodic teacher": "--teacher periodic --teacher-period 10",
    "ema teacher": "--teacher ema --teacher-decay 0.97",
    "reverse KL": "--objective reverse_kl",
    "forward KL": "--objective forward_kl",
    "JSD": "--objective jsd",
    "top-100 support": "--support-top-k 100",
    "answer in the prompt": "--answer-pi",
    "random retrieval": "--retrieval random",
}
RATES = (1e-4, 3e-4, 1e-3)
RATE_OF = {
    "grpo, 16 problems": "grpo"
}  # takes that method's rate: its own trials would cost 4 times as much
UPDATES, EVERY = 40, 20  # updates of a run, and between two evaluations
SHARES = (0, 25, 50, 75, 100)  # percent of families whose skill in the bank misleads
SWEPT = ("sgsd", "no polarity", "one teacher")
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # of Student's t, by number of seeds


def misleading_bank(share: int, seed: int, path: pathlib.Path) -> None:
    """A bank by hand: every family's true mistake, and its skill, misleading for `share` percent of the families."""
    import world as W

    import skills as S

    bad = set(
        random.Random(seed).sample(
            [f.name for f in W.FAMILIES], round(share * len(W.FAMILIES) / 100)
        )
    )
    skills = [
        {"skill_id": f"gen_{f.name}", **W.item(None, f, "misleading" if f.name in bad else "skill")}
        for f in W.FAMILIES
    ]
    mistakes = [{"mistake_id": f"err_{f.name}", **W.item(None, f, "mistake")} for f in W.FAMILIES]
    S.SkillBank(skills, mistakes, {"misleading": sorted(bad)}).save(path)


def run(job: dict, work: str) -> dict:
    """One job in a process of its own: a bank, or a training run with the evaluation of its checkpoints."""
    import eval as E
    import rollout as R
    import sgsd
    import skills as S

    folder = pathlib.Path(work) / "now" / job["name"].replace(" ", "-").replace(",", "")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tiny, seed = ROOT / "tiny", str(job["seed"])
    bank = pathlib.Path(work) / f"bank_{job.get('share', 'made')}_{seed}.json"
    result: dict = dict(job)
    with (
        open(folder / "log.txt", "w") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        if job["kind"] == "bank":
            asked = f"--model {tiny}/model --data {tiny}/train.jsonl --problems 64 --max-new-tokens 96 --reply-tokens 640 --merge-group-size 8"
            assert S.main([*asked.split(), "--seed", seed, "--out", str(bank)]) == 0, (
                f"see {folder}/log.txt"
            )
            shutil.rmtree(folder)
            return result
        if "share" in job and not bank.exists():
            misleading_bank(job["share"], job["seed"], bank)
        measured = [
            "--data",
            str(tiny / f"{job['split']}.jsonl"),
            "--samples",
            "4",
            "--max-new-tokens",
            "96",
            "--rows",
            "160",
            "--seed",
            seed,
        ]
        out = folder / "run"
        if job["kind"] == "base":
            skills = (
                ["--skills", str(bank), "--num-skills", "3", "--encoder", str(tiny / "encoder")]
                if job["method"] == "base+skill"
                else []
            )
            assert E.main([str(tiny / "model"), *measured, *skills, "--out", str(out)]) == 0, (
                f"see {folder}/log.txt"
            )
            folders = {0: out}
        else:
            flags = METHODS[job["method"]].split()
            skilled = (
                [] if job["method"].split(",")[0] in ("grpo", "opsd") else ["--bank", str(bank)]
            )
            evolving = ["--update-every", "0"] if skilled and "--update-every" not in flags else []
            forward = 0
            count = R.predictors

            def counting(model, prompts, completions, grad):
                nonlocal forward
                forward += sum(map(len, prompts)) + sum(map(len, completions))
                return count(model, prompts, completions, grad)

            R.predictors = counting
            began = time.perf_counter()
            settings = [
                "--preset",
                "tiny",
                "--eval-data",
                "",
                "--audit-every",
                "0",
                "--seed",
                seed,
                "--learning-rate",
                str(job["rate"]),
            ]
            settings += [
                "--updates",
                str(UPDATES),
                "--checkpoint-every",
                str(EVERY if job["points"] else UPDATES),
                "--out",
                str(out),
            ]
            try:
                assert sgsd.main([*settings, *flags, *skilled, *evolving]) == 0, (
                    f"see {folder}/log.txt"
                )
            finally:
                R.predictors = count
            rows = [json.loads(line) for line in open(out / "rollouts.jsonl")]
            result |= {
                "seconds": time.perf_counter() - began,
                "forward_tokens": forward,
                "generated_tokens": sum(len(r["completion_ids"]) for r in rows),
            }
            assert E.main([str(out), *measured]) == 0, f"see {folder}/log.txt"
            folders = {
                int(p.name[5:]): p / "eval" for p in sorted((out / "checkpoints").glob("step_*"))
            }
        points = {}
        for step, samples in folders.items():
            right: dict[str, list[bool]] = {}
            for s in map(json.loads, open(samples / "samples.jsonl")):
                right.setdefault(s["id"], []).append(s["r"] > 0)
            points[step] = statistics.mean(statistics.mean(v) for v in right.values())
        result["accuracy"] = points
    shutil.rmtree(folder)
    return result


def do(jobs: list[dict[str, Any]], work: pathlib.Path, workers: int, what: str) -> dict[str, dict]:
    """All jobs' results, those that are kept and those that are made now."""
    from tqdm import tqdm

    kept, results = work / "done", {}
    kept.mkdir(parents=True, exist_ok=True)
    for job in jobs:
        job["flags"] = METHODS.get(job.get("method", ""), "")
        if (file := kept / f"{job['name']}.json").exists() and job.items() <= (
            old := json.loads(file.read_text())
        ).items():
            results[job["name"]] = old  # made with the same settings
    left = [job for job in jobs if job["name"] not in results]
    with concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn")
    ) as pool:
        futures = [pool.submit(run, job, str(work)) for job in left]
        for future in tqdm(
            concurrent.futures.as_completed(futures), total=len(left), desc=what, unit="job"
        ):
            result = json.loads(json.dumps(future.result()))
            results[result["name"]] = result
            (kept / f"{result['name']}.json").write_text(json.dumps(result))
    return results


def final(result: dict) -> float:
    return list(result["accuracy"].values())[-1]


def with_interval(values: list[float], sign: str = "") -> str:
    """Mean of the seeds' values with Student's 95% interval."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{mean:{sign}.1%}"
    half = T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:{sign}.1%} ± {half:.1%}"


def table(
    results: dict[str, dict], names: list[str], seeds: range, rates: dict[str, float]
) -> list[str]:
    """One row a method: accuracy over updates, difference to SGSD paired by seed, and what it cost."""
    steps = list(range(EVERY, UPDATES + 1, EVERY))
    head = [
        "method",
        "rate",
        *map(str, steps[:-1]),
        f"{UPDATES} updates",
        "- sgsd",
        "generated tokens",
        "forward tokens",
        "seconds",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name in names:
        runs = [results[f"{name}-{seed}"] for seed in seeds]
        points = [
            with_interval([list(r["accuracy"].values())[i] for r in runs])
            for i in range(len(runs[0]["accuracy"]))
        ]
        gaps = [final(r) - final(results[f"sgsd-{seed}"]) for r, seed in zip(runs, seeds)]
        cost = ["", "", ""]
        if "seconds" in runs[0]:
            cost = [
                f"{statistics.mean(r[k] for r in runs):,.0f}"
                for k in ("generated_tokens", "forward_tokens", "seconds")
            ]
        cells = [""] * (len(steps) - len(points)) + points
        gap = "" if name == "sgsd" else with_interval(gaps, "+")
        lines.append(
            f"| {name} | {rates.get(name, '')} | {' | '.join(cells)} | {gap} | {' | '.join(cost)} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one seed; base, grpo, opsd and sgsd at the preset's rate",
    )
    parser.add_argument("--seeds", type=int, default=5, choices=range(1, 6))
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--work", default="runs/miniature")
    parser.add_argument(
        "--out", default="", help="where the table goes (default: results/miniature, or WORK/quick)"
    )
    args = parser.parse_args()
    work, seeds = pathlib.Path(args.work), range(1 if args.quick else args.seeds)
    began = time.perf_counter()
    names = ["grpo", "opsd", "sgsd"] if args.quick else list(METHODS)
    do(
        [{"name": f"bank-{s}", "kind": "bank", "seed": s} for s in (*seeds, 100)],
        work,
        args.jobs,
        "banks",
    )
    rates = dict.fromkeys(names, 3e-4)
    chosen: dict[str, dict] = {}
    if not args.quick:
        trials = [
            {
                "name": f"valid-{n}-{rate}",
                "kind": "train",
                "method": n,
                "rate": rate,
                "seed": 100,
                "split": "valid",
                "points": False,
            }
            for n in names
            if n not in RATE_OF
            for rate in RATES
        ]
        chosen = do(trials, work, args.jobs, "rates")
        rates = {
            n: max(RATES, key=lambda rate, n=n: final(chosen[f"valid-{RATE_OF.get(n, n)}-{rate}"]))
            for n in names
        }
    bases = ["base"] if args.quick else ["base", "base+skill"]
    jobs = [
        {"name": f"{n}-{s}", "kind": "base", "method": n, "seed": s, "split": "test"}
        for n in bases
        for s in seeds
    ]
    jobs += [
        {
            "name": f"{n}-{s}",
            "kind": "train",
            "method": n,
            "rate": rates[n],
            "seed": s,
            "split": "test",
            "points": True,
        }
        for n in names
        for s in seeds
    ]
    results = do(jobs, work, args.jobs, "methods")
    lines = table(results, bases + names, seeds, rates)
    sweep: dict[str, dict] = {}
    if not args.quick:
        swept = [
            {
                "name": f"misleading-{share}-{n}-{s}",
                "kind": "train",
                "method": n,
                "rate": rates[n],
                "seed": s,
                "share": share,
                "split": "test",
                "points": False,
            }
            for share in SHARES
            for n in SWEPT
            for s in seeds
        ]
        sweep = do(swept, work, args.jobs, "misleading skills")
        lines += [
            "",
            "| misleading skills | " + " | ".join(SWEPT) + " |",
            "|---|" + "---|" * len(SWEPT),
        ]
        for share in SHARES:
            cells = [
                with_interval([final(sweep[f"misleading-{share}-{n}-{s}"]) for s in seeds])
                for n in SWEPT
            ]
            lines.append(f"| {share}% | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"{len(seeds)} seeds, {args.jobs} processes of one thread, {(time.perf_counter() - began) / 60:.0f} minutes in this call.",
    ]
    out = pathlib.Path(
        args.out or (work / "quick" if args.quick else ROOT / "results" / "miniature")
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    out.with_suffix(".json").write_text(
        json.dumps(
            {"rates": rates, "validation": chosen, "results": results, "sweep": sweep}, indent=1
        )
        + "\n"
    )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
