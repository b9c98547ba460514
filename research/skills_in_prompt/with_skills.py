"""Does a prompt with skills help a real model? Pairs of several banks, and shuffled words.

    python research/skills_in_prompt/with_skills.py FOLDER --banks NAME=BANK ...
    python research/skills_in_prompt/with_skills.py

FOLDER was made by real_world.py --cpu --make: we take its model, encoder and test problems. The
first command evaluates the model under the plain prompt and with each bank's nearest pairs in it
(Base+Skill), two evaluations at a time, and keeps the scores in with_skills.json. The same command
continues a killed one, and an evaluation keeps samples beyond --samples. The second command prints
the table of what is kept. "shuffled" is the first bank with all its words in another order: every
field keeps its number of words, and says nothing.
"""

import argparse
import pathlib
import random
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

import eval as evaluation
import rollout
from distributed import World
from lib import files, model
from lib.problems import load_set
from research.markdown_table import head_of, row_of
from research.real_model import real_tables, real_world
from skills import FIELDS, SkillBank

KEPT = ROOT / "research/skills_in_prompt/with_skills.json"
PAIRS = 2  # in a prompt, as many as the teachers of a training there
SETTINGS = f"{real_world.CPU.evaluation} --num-skills {PAIRS}"


def shuffled(bank: SkillBank, seed: int) -> SkillBank:
    """The bank with its words in another order; every field keeps their number."""
    words: list[str] = []
    places: list[tuple[dict, str, int]] = []
    entries = {"general_skills": [], "common_mistakes": []}
    for key, fields in FIELDS.items():
        for entry in getattr(bank, key):
            entries[key].append(dict(entry))
            for name in fields:
                found = entry[name].split()
                places.append((entries[key][-1], name, len(found)))
                words += found
    random.Random(seed).shuffle(words)
    for entry, name, count in places:
        entry[name] = " ".join(words[:count])
        del words[:count]
    return SkillBank(**entries, metadata={"shuffled": "words in another order"})


def command(folder: pathlib.Path, name: str, dtype: str, samples: int) -> list[str]:
    """The flags of an evaluation: "plain", or with the bank of this name."""
    here = folder / "with_skills"
    words = [str(folder / "model"), "--data", str(folder / "test.jsonl"), "--dtype", dtype]
    # Of a flag that is given twice, the last one counts.
    words += ["--out", str(here / name), *SETTINGS.split(), "--samples", str(samples)]
    if name != "plain":
        words += ["--skills", str(here / f"{name}.json"), "--encoder", str(folder / "encoder")]
    return words


def prompt_tokens(argv: Sequence[str]) -> float:
    """The mean length of an evaluation's prompts."""
    args = evaluation.arguments(argv)
    prompt = evaluation.prompt_maker(args, World(0, 1, torch.device("cpu")))
    _, tokenizer = model.load_outline(args.paths[0])
    lengths = []
    for x in load_set(args.data[0], args.split):
        lengths.append(len(rollout.chat_ids(tokenizer, prompt(x), thinking=args.thinking)))
    return statistics.mean(lengths)


def measure(folder: pathlib.Path, banks: dict[str, pathlib.Path], dtype: str, samples: int) -> None:
    """Make all evaluations that are missing, and keep their scores."""
    here = folder / "with_skills"
    here.mkdir(exist_ok=True)
    for name, bank in banks.items():
        shutil.copy(bank, here / f"{name}.json")
    shuffled(SkillBank.load(next(iter(banks.values()))), 0).save(here / "shuffled.json")
    names = ["plain", *banks, "shuffled"]
    commands = {}
    for name in names:
        commands[name] = shlex.join(["eval.py", *command(folder, name, dtype, samples)])
    plain = {"plain": commands.pop("plain")}
    real_world.side_by_side(plain, folder, time.time() + 1e9, 1)
    (made,) = (here / "plain").glob("*--model")
    for name in commands:  # which then sample the plain prompt no second time
        shutil.copytree(made, here / name / made.name, dirs_exist_ok=True)
    real_world.side_by_side(commands, folder, time.time() + 1e9, 2)
    kept = {}
    for name in names:
        place = here / name / (made.name if name == "plain" else f"{made.name}--skills")
        score = real_tables.score(list(files.read_jsonl(place / "samples.jsonl")))
        kept[name] = score | {"prompt": prompt_tokens(command(folder, name, dtype, samples))}
    files.write_json(KEPT, kept)


def table(kept: dict) -> Iterator[str]:
    """A row per prompt: its score, and its difference to the plain one."""
    head = ["prompt", "samples", "right", "to the plain prompt", "to shuffled", "boxed", "cut"]
    head += ["tokens", "tokens of the prompt"]
    yield from head_of(head)
    for name, test in kept.items():
        gaps = []
        for other in ("plain", "shuffled"):
            gap = real_tables.share(test) - real_tables.share(kept[other])
            shown = name not in ("plain", other)
            gaps.append(real_tables.with_interval(gap, "+") if shown else "")
        right = real_tables.with_interval(real_tables.share(test))
        cells = [name, str(test["samples"]), right, *gaps]
        cells += [f"{test['boxed']:.1%}", f"{test['cut']:.1%}", f"{test['tokens']:.0f}"]
        yield row_of([*cells, f"{test['prompt']:.0f}"])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=pathlib.Path, nargs="?", help="of real_world.py --cpu")
    parser.add_argument(
        "--banks", nargs="+", metavar="NAME=FILE", help="the first is shuffled, too"
    )
    parser.add_argument("--dtype", default="float32", help="bfloat16 is faster where a CPU has it")
    parser.add_argument("--samples", type=int, default=2, help="of each problem (default: 2)")
    args = parser.parse_args(argv)
    if args.folder:
        if not args.banks:
            parser.error("--banks is wanted, such as hand=banks/word_problems.json")
        banks = {}
        for pair in args.banks:
            name, _, file = pair.partition("=")
            banks[name] = pathlib.Path(file)
        measure(args.folder.resolve(), banks, args.dtype, args.samples)
    elif not KEPT.exists():
        parser.error("nothing is kept yet: give FOLDER and --banks")
    print("\n".join(table(files.read_json(KEPT))))


if __name__ == "__main__":
    main()
