"""The slope of a real model's rows, beside what training did.

    python research/slope/real.py FOLDER --problems 64 --dtype bfloat16    all rows, in one probe
    python research/slope/real.py FOLDER --rows consistent                 this one and GRPO's
    python research/slope/real.py --table                                  of what is there

FOLDER is one of `research/real_model/real_world.py --make`, with --cpu for two cores, and so are
the settings. GRPO's row is sampled as SGSD's, which the GRPO trained there was not. All rows see
the same problems and, where a machine rounds alike, the same rollouts, so rows of separate commands
may stand side by side. Each command is a line of real.jsonl. One process; on a CPU give it one
thread (OMP_NUM_THREADS=1).
"""

import argparse
import json
import pathlib
import shlex
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from lib import files
from research.markdown_table import head_of, row_of
from research.methods.compare import arguments
from research.real_model.real_world import CPU, GPU

KEPT = pathlib.Path(__file__).with_name("real.jsonl")
ROWS = {  # a bank, and the flags that a row adds to SGSD's
    "sgsd": ("bank.json", ""),
    "shuffled words": ("shuffled.json", ""),
    "consistent": ("bank.json", "--token-polarity consistent"),
    "answer in the prompt": ("bank.json", "--answer-pi"),
}
PLAIN = [name for name, (_, flags) in ROWS.items() if not flags]
CHOSEN = "gpu", "dtype", "problems", "samples", "seed"


def measure(folder: pathlib.Path, args: argparse.Namespace) -> dict:
    """One probe of these rows: a line of what is kept."""
    import skills
    from extras import probe
    from research.slope.measure import shuffled

    shuffled(skills.SkillBank.load(folder / "bank.json"), 0).save(folder / "shuffled.json")
    flags = [f"--bank {shlex.quote(str(folder / ROWS[x][0]))} {ROWS[x][1]}" for x in args.rows]
    size = GPU if args.gpu else CPU
    of_method = size.methods["sgsd"].removeprefix("sgsd.py ").partition("--bank")[0]
    settings = f"{of_method} {size.settings} --rollout-rows 64 --learning-rate {size.rates[-1]}"
    settings += f" --dtype {args.dtype} --seed {args.seed}"
    settings += f" --problems {args.problems} --samples {args.samples}"
    paths = {"model": folder / "model", "data": folder / "train.jsonl"}
    argv = arguments(settings, **paths, encoder=folder / "encoder") + shlex.split(flags[0])
    for row in flags[1:]:
        argv += ["--try", row]
    with tempfile.TemporaryDirectory() as place:
        out = pathlib.Path(place, "probe.json")
        if probe.main([*argv, "--out", str(out)]):
            raise RuntimeError("the probe did not end")
        return kept_of(json.loads(out.read_text()), args)


def kept_of(numbers: dict, args: argparse.Namespace) -> dict:
    """A probe's numbers by row, without its flags, which have this machine's paths."""
    rows = dict(zip(["grpo", *args.rows], numbers.pop("rows")))
    for row in rows.values():
        del row["flags"]
    chosen = {name: getattr(args, name) for name in CHOSEN}
    return chosen | numbers | {"rows": rows}


def with_ends(row: dict, name: str, low: str, high: str) -> str:
    return f"{row[name]:+.2f} ({row[low]:+.2f} to {row[high]:+.2f})"


def table(lines: list[dict]) -> list[str]:
    """A row for each one measured; of GRPO's the first on the same rollouts."""
    shown = ["rollouts", "row", "slope, points a step", "less GRPO's", "smallest told"]
    shown += ["support on right, on wrong", "decided"]
    table_lines, seen = head_of(shown), set()
    for line in lines:
        for name, row in line["rows"].items():
            key = (name, *[line[x] for x in CHOSEN])
            if key in seen:
                continue
            seen.add(key)
            cells = [f"{line['problems']} x {line['samples']}", name]
            cells.append(with_ends(row, "slope", "low", "high"))
            less = with_ends(row, "less_grpo", "less_grpo_low", "less_grpo_high")
            cells += ["" if name == "grpo" else less, f"{row['smallest']:.2f}"]
            if row["decided"] is None:  # it has no teachers
                cells += ["", ""]
            else:
                supports = f"{row['support_success']:+.3f}, {row['support_failure']:+.3f}"
                cells += [supports, f"{row['decided']:.0%}"]
            table_lines.append(row_of(cells))
    return table_lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", nargs="?", type=pathlib.Path, help="with model and problems")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="auto", help="of the base; bfloat16 where a CPU has it")
    parser.add_argument("--gpu", action="store_true", help="the settings of a GPU's runs")
    parser.add_argument("--table", action="store_true", help="only print the table")
    args = parser.parse_args()
    if not args.table:
        if args.folder is None:
            parser.error("FOLDER is missing; real_world.py --make makes it")
        if len(args.rows) > 1 and args.rows[0] not in PLAIN:
            parser.error(f"--rows: of several, the first must be {' or '.join(PLAIN)}")
        files.append_jsonl(KEPT, [measure(args.folder.resolve(), args)])
    print("\n".join(table(list(files.read_jsonl(KEPT)))))


if __name__ == "__main__":
    main()
