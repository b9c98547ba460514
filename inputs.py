"""What a command is given: its directories, models and banks, looked at without torch.

torch takes seconds to import, and a mistake that a file shows is answered before. Everything here
is looked at once more when it is used.
"""

import importlib
import importlib.util
import inspect
import itertools
import json
import os
import pathlib
import re
import sys
from argparse import Namespace

from safetensors import SafetensorError, safe_open

import cli
import config
import files
import problems
from cli import UserError
from config import Config
from verify import Judge

FIELDS = {  # Tab. 5; an entry is embedded in this order (S10)
    "general_skills": ("title", "principle", "when_to_apply"),
    "common_mistakes": ("description", "why_it_happens", "how_to_avoid"),
}
IDS = {"general_skills": "skill_id", "common_mistakes": "mistake_id"}
PROMPTS = pathlib.Path(__file__).parent / "prompts"  # the paper's templates


def look(cfg: Config, resume: bool) -> None:
    """UserError for a mistake in a run's directory, data, models or bank."""
    check_directory(cfg, resume)
    if resume:
        check_script(cfg)
    files.refuse_busy(pathlib.Path(cfg.out))
    look_at_data_and_models(cfg)
    if cfg.bank and not resume:  # a resumed run has its own (D9)
        check_bank(cfg)


def look_at_cold_start(cfg: Config, resume: bool) -> None:
    """UserError for a mistake in what skills.py is given."""
    files.refuse_busy(bank_folder(cfg, resume))
    look_at_data_and_models(cfg)


def look_at_evaluation(args: Namespace) -> None:
    """UserError for a mistake in what eval.py is given."""
    look_at_domain(args)
    for place in itertools.chain(*map(places_of, args.paths)):
        base = base_of(place, args.model)
        if base:
            check_adapter(place, base)
    if args.skills:
        check_skills(args.skills, args.num_skills)
        check_encoder(args.encoder)
    for name in filter(problems.read_quickly, args.data):
        problems.load_set(name, args.split)


def look_at_data_and_models(cfg: Config) -> None:
    """UserError for models that are not there and wrong problems; slow sources are left out."""
    look_at_domain(cfg)
    sources = [name for name in (cfg.data, cfg.eval_data) if name]
    quick = [name for name in sources if problems.read_quickly(name)]
    if quick == sources:
        problems.load_training(cfg)
    else:
        for name in quick:
            problems.load_set(name, "test")
    check_model(cfg.model, "--model")
    if cfg.sees_skills:
        check_encoder(cfg.encoder)
        if cfg.update_model:
            check_model(cfg.update_model, "--update-model")


def look_at_domain(settings: Config | Namespace) -> None:
    """UserError for a wrong --verifier or --prompts."""
    verifier_class(settings.verifier)
    if settings.prompts:
        check_prompts(settings.prompts)


def verifier_version(name: str) -> str:
    """--verifier's name and, of a class of the user's own, a digest of the file that it is in."""
    if name == Config.verifier:
        return name
    return f"{name} ({files.file_digest(inspect.getsourcefile(verifier_class(name)))})"


def make_verifier(settings: Config | Namespace) -> Judge:
    """The judge that --verifier names, with the limits of --verify-timeout and --verify-workers."""
    kind = verifier_class(settings.verifier)
    return kind(timeout_s=settings.verify_timeout, workers=settings.verify_workers)


def verifier_class(name: str) -> type[Judge]:
    """The class MODULE:CLASS. UserError where there is none, or one that cannot judge.

    The module may lie in the current directory, which is looked through last: no file there may
    take the place of one of ours.
    """
    where = f"--verifier {name}"
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        raise UserError(f"{where}: MODULE:CLASS is wanted, such as my_domain:MyJudge")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as e:  # of any kind: it runs the module
        rule = "it must be installed, or lie in the current directory"
        raise UserError(f"{where}: not imported ({cli.brief(e)}); {rule}") from None
    kind, place = getattr(module, class_name, None), getattr(module, "__file__", module_name)
    if not isinstance(kind, type):
        raise UserError(f"{where}: {place} has no class {class_name}")
    if not issubclass(kind, Judge):
        raise UserError(f"{where}: {class_name} must be a subclass of verify.Judge")
    if kind.is_right is Judge.is_right and kind.judge is Judge.judge:
        raise UserError(f"{where}: {class_name} must have the method is_right, or judge")
    order = [owner for owner in kind.__mro__ if {"is_right", "judge"} & vars(owner).keys()]
    if kind.judge is not Judge.judge and "judge" not in vars(order[0]):
        rule = f"judge, of {kind.judge.__qualname__.partition('.')[0]}, never asks its is_right"
        raise UserError(f"{where}: {class_name}'s {rule}; write judge, too, or derive from Judge")
    try:
        inspect.signature(kind).bind(timeout_s=5.0, workers=1)
    except TypeError as e:
        rule = "must take timeout_s and workers, as verify.Judge does"
        raise UserError(f"{where}: {class_name} {rule} ({e})") from None
    return kind


def check_prompts(folder: str) -> None:
    """UserError unless a directory has the templates of prompts/, with the same placeholders."""
    texts = {}
    for ours in sorted(PROMPTS.glob("*.txt")):
        file = pathlib.Path(folder) / ours.name
        try:
            texts[ours.stem] = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as e:
            why = f"{ours.name} not read ({cli.brief(e)})"
            rule = "the directory must have all files that prompts/ has"
            raise UserError(f"--prompts {folder}: {why}; {rule}") from None
        wanted = dict.fromkeys(re.findall(r"\{[a-z_.]+\}", ours.read_text(encoding="utf-8")))
        missing = [placeholder for placeholder in wanted if placeholder not in texts[ours.stem]]
        if missing:
            raise UserError(f"--prompts {folder}: {ours.name} lacks {', '.join(missing)}")
    parts = texts["teacher"].split("\n\n", 3)
    shaped = len(parts) == 4 and parts[3].strip() == texts["student"].strip()
    for part, field in zip(parts[1:3], ("{skill.", "{mistake.")):
        heading, _, line = part.partition("\n")
        shaped = shaped and "{" not in heading and field in line
    if not shaped:
        rule = "an opening, a heading and a line of the skill, a heading and a line of the mistake"
        rule += ", each followed by an empty line, and then student.txt"
        raise UserError(f"--prompts {folder}: teacher.txt must be: {rule}")


def bank_folder(cfg: Config, resume: bool) -> pathlib.Path:
    """Where skills.py works while it makes the bank --out. UserError where it must not write."""
    out, folder = pathlib.Path(cfg.out), pathlib.Path(f"{cfg.out}.work")
    if resume or out.suffix != ".json" or out.is_dir():
        raise UserError(f"--out {cfg.out}: a file for the bank is wanted, such as bank.json")
    if out.exists() and not folder.exists():
        raise UserError(f"--out {cfg.out}: exists, but skills.py did not make it; give another")
    return folder


def check_directory(cfg: Config, resume: bool) -> None:
    """UserError unless --out can take this run and its loggers are installed."""
    out = pathlib.Path(cfg.out)
    for path in (out, *out.parents):
        if path.is_file():
            raise UserError(f"--out {out}: {path} is a file; a directory is wanted")
    begun = {path.name for path in out.glob("*") if path.suffix != ".tmp"}
    if not resume and begun - {"wandb", "tensorboard", files.LOCK}:
        rule = "the directory is not empty; choose another, or continue its run"
        raise UserError(f"--out {out}: {rule} with --resume {out}")
    for name, wanted in (("wandb", cfg.wandb), ("tensorboard", cfg.tensorboard)):
        spec = importlib.util.find_spec(name) if wanted else None
        if wanted and (spec is None or spec.origin is None):  # a mere folder has no origin
            fix = f"pip install {name}, or leave the flag out"
            raise UserError(f"--{name}: the package is not installed; {fix}")


def check_script(cfg: Config) -> None:
    """UserError unless the script that goes on with a run is the one that began it.

    A script of the user's own has changed a part of the method, of which no setting tells.
    """
    command = files.read_json(pathlib.Path(cfg.out) / "config.json").get("command")
    begun_by = str(command[0]) if isinstance(command, list) and command else ""
    started = pathlib.Path(cli.program(cfg.program)).name
    if begun_by.endswith(".py") and begun_by not in (started, *cli.LAUNCHERS):
        rule = f"was begun by {begun_by}; python {begun_by} continues it"
        raise UserError(f"--resume {cfg.out}: {rule}")


def check_model(name: str, flag: str) -> None:
    """UserError for a path that is not there, or a directory that no model was saved in."""
    path = pathlib.Path(name)
    if config.missing_path(name):
        raise UserError(f"{flag} {name}: no such directory; give a saved model's, or a hub id")
    if path.is_dir() and not any(path.glob("*.json")):
        raise UserError(f"{flag} {name}: not loaded: no model there, {files.listed(path)}")


def check_encoder(name: str) -> None:
    """UserError for a path that is not there, and for a causal model, such as the policy.

    sentence-transformers would take the mean of its last states, by which nothing is found.
    """
    check_model(name, "--encoder")
    path = pathlib.Path(name)
    plain = (path / "config.json").is_file() and not (path / "modules.json").exists()
    if plain and "ForCausalLM" in (path / "config.json").read_text(encoding="utf-8"):
        rule = "is a causal model and no encoder; give a sentence-transformers model"
        raise UserError(f"--encoder {name}: {rule}")


def read_bank(path: str | pathlib.Path) -> dict:
    """A bank's JSON, with `metadata`. UserError names the file, the entry and the wrong field."""
    try:
        data = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"bank {path}: cannot be read as JSON ({e}); is it a bank?") from None
    if not isinstance(data, dict):
        raise UserError(f"bank {path}: a JSON object is wanted, got {type(data).__name__}")
    for key in FIELDS:
        if not isinstance(data.get(key), list):
            raise UserError(f"bank {path}: `{key}` must be a list; found: {', '.join(data)}")
        names, ids = (IDS[key], *FIELDS[key]), set[str]()
        for i, entry in enumerate(data[key]):
            where, values = f"bank {path}: {key}[{i}]", entry if isinstance(entry, dict) else {}
            bad = ", ".join(n for n in names if not isinstance(values.get(n), str))
            if bad:
                raise UserError(f"{where} lacks the strings {bad} (App. C)")
            if values[IDS[key]] in ids or not isinstance(values.get("sources", []), list):
                raise UserError(f"{where} needs its own id, and a list for any `sources`")
            ids.add(values[IDS[key]])
    metadata = data.setdefault("metadata", {})
    if not isinstance(metadata, dict) or not isinstance(metadata.get("updates", []), list):
        raise UserError(f"bank {path}: `metadata` must be an object, `updates` in it a list")
    return data


def check_bank(cfg: Config) -> None:
    """UserError unless --bank can be read and has as many pairs as --num-teachers asks for."""
    data = read_bank(cfg.bank)
    for key in FIELDS:
        n, rule = len(data[key]), f"--num-teachers {cfg.num_teachers} needs as many"
        if n < cfg.num_teachers:
            raise UserError(f"--bank {cfg.bank}: {key} has {n} entries, {rule}; lower it")


def check_skills(path: str, count: int) -> None:
    """UserError unless an evaluation's --skills can be read and has --num-skills pairs."""
    data = read_bank(path)
    most = min(len(data[key]) for key in FIELDS)
    if not most:
        sizes = f"{len(data['general_skills'])} skills and {len(data['common_mistakes'])} mistakes"
        raise UserError(f"--skills {path}: no pair can be made of {sizes}; give another bank")
    if not 1 <= count <= most:
        raise UserError(f"--num-skills {count}: must be in 1..{most}, the bank's shorter list")


def places_of(path: str) -> list[pathlib.Path]:
    """The checkpoints of a run in order; or else the model, adapter or hub id itself."""
    place = pathlib.Path(path)
    if not place.is_dir():
        if place.exists() or config.missing_path(path):
            raise UserError(f"{path}: no such directory; give a model, adapter, run or hub id")
        return [place]
    place = place.resolve()
    steps = sorted(place.glob("checkpoints/step_*"))
    there = {file.name for file in place.iterdir()}
    if not steps and ("checkpoints" in there or "rollouts.jsonl" in there):
        raise UserError(f"{path}: a run without a checkpoint")
    if not steps and "config.json" not in there and "adapter_config.json" not in there:
        wanted = "it has neither config.json nor adapter_config.json nor checkpoints/"
        raise UserError(f"{path}: no policy: {wanted}, {files.listed(place)}")
    return steps or [place]


def run_of(place: pathlib.Path) -> pathlib.Path | None:
    """The run that a checkpoint belongs to; None for all else."""
    belongs = place.parent.name == "checkpoints" and place.name.startswith("step_")
    return place.parent.parent if belongs else None


def base_of(place: pathlib.Path, base: str) -> str:
    """The model under an adapter, which `base` replaces; "" where there is no adapter.

    A relative path that is not here is looked for in the directories above the adapter.
    """
    file = place / "adapter_config.json"
    if base or not file.exists():
        return base if file.exists() else ""
    try:
        name = json.loads(file.read_text())["base_model_name_or_path"]
        models = [folder / name for folder in (pathlib.Path(), *place.parents)]
    except (ValueError, KeyError, TypeError) as e:
        raise UserError(f"{file}: names no base model ({e!r}); give it as --model") from None
    here = [str(model) for model in models if (model / "config.json").exists()]
    if not here and config.missing_path(name):
        raise UserError(f"{file}: its base model {name} is not there; give it as --model")
    return here[0] if here else name


def check_adapter(place: pathlib.Path, base: str) -> None:
    """UserError where an adapter's tensors have other sizes than those of its base, if it is here.

    An adapted weight [out, in] has lora_A [rank, in] and lora_B [out, rank].
    """
    sizes = shapes(pathlib.Path(base))
    for name, shape in shapes(place).items() if sizes else ():
        weight, _, part = name.removeprefix("base_model.model.").partition(".lora_")
        if part not in ("A.weight", "B.weight"):
            continue
        side = 1 if part == "A.weight" else 0
        ours, theirs = shape[side], sizes.get(f"{weight}.weight")
        if theirs is None or ours != theirs[side]:
            rule = f"has size {theirs[side]} there" if theirs else "is not there"
            why = f"does not fit {base}: {weight}, of size {ours} in the adapter, {rule}"
            raise UserError(f"{place}: the adapter {why}; give its own base as --model")


def shapes(place: pathlib.Path) -> dict[str, list[int]]:
    """The shapes of the tensors in a directory's safetensors, but for a trainer's state."""
    by_name: dict[str, list[int]] = {}
    for file in sorted(place.glob("*.safetensors")):
        try:
            if file.stem != "trainer":
                with safe_open(file, framework="np") as tensors:
                    names = tensors.keys()
                    by_name |= {name: tensors.get_slice(name).get_shape() for name in names}
        except SafetensorError as e:
            raise UserError(f"{file}: not read ({cli.brief(e)}); is it torn?") from None
    return by_name
