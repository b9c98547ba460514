"""The house: imports only go down, each module works when it is copied alone, so does each fence.

A copied module stands in an empty folder. A forked process uses it there, with nothing else of ours
on the path or loaded, and those that need no torch with torch out of reach.
"""

import ast
import importlib
import inspect
import math
import os
import pathlib
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, fake_embed, make_bank, make_model, make_tokenizer, same, t
from driver import start, wait
from fake_engine import STOPS, serving

# ---------------------------------------------------------------------------------------- imports

SOURCES = {}  # {module: its tree}
for folder in ("", "lib/", "methods/", "extras/"):
    for path in sorted((ROOT / folder).glob("*.py")):
        if path.stem != "__init__":
            SOURCES[(folder + path.stem).replace("/", ".")] = ast.parse(path.read_text())
LIB = {name for name in SOURCES if name.startswith("lib.")}
METHODS = {name for name in SOURCES if name.startswith("methods.")}
EXTRAS = {name for name in SOURCES if name.startswith("extras.")}
LOW = {"rollout", "scoring", "distributed"}
MAY_IMPORT = {"lib.run": LIB | LOW}  # the others below sgsd and eval import nothing of ours
MAY_IMPORT |= {name: LIB | LOW | {"skills"} for name in ("sgsd", "eval")}
MAY_IMPORT |= {name: {*SOURCES} - EXTRAS - {"eval"} for name in METHODS}
MAY_IMPORT |= {name: {*SOURCES} for name in EXTRAS}
OURS = {name.split(".")[0] for name in SOURCES}


def imports_of(tree):
    """The modules of ours that a piece of source imports, in functions and for types, too."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import: {ast.unparse(node)}"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names & {*SOURCES}


@pytest.mark.parametrize("name", SOURCES)
def test_imports_only_go_down_and_stand_at_the_top_of_a_file(name):
    tree = SOURCES[name]
    assert imports_of(tree) - {name} <= MAY_IMPORT.get(name, set())
    for node in tree.body:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            assert not imports_of(node), ast.unparse(node)[:80]
    if name != "lib.verify":  # which loads --verifier
        assert "import_module(" not in ast.unparse(tree)


# ---------------------------------------------------------------------------- a module copied alone


def use_skills(skills):
    bank = skills.SkillBank.load("bank.json")
    pairs = bank.retrieve("Add with care.", 2, fake_embed)
    assert "Problem: What?" in skills.render_teacher(pairs[0], "What?")
    bank.save("saved.json")
    assert skills.SkillBank.load("saved.json") == bank


def use_config(config):
    cfg = config.Config(**config.PRESETS["tiny"], tau_g=2.0)
    assert (cfg.tau_g, cfg.batch_size) == (2.0, 16)


def use_command(command):
    with pytest.raises(SystemExit), command.one_line_errors("program.py", *command.GIVEN):
        raise ValueError("a mistake")


def use_verify(verify):
    with verify.Verifier() as verifier:
        assert verifier.outcome("1/2", r"so \boxed{0.5}") == 1


def use_files(files):
    with files.locked(pathlib.Path("run")):
        files.append_jsonl(pathlib.Path("run/log.jsonl"), [{"step": 1}])
    assert list(files.read_jsonl(pathlib.Path("run/log.jsonl"))) == [{"step": 1}]


def use_served(served):
    job = SimpleNamespace(index=0, prompt=[1, 2], key=5, left=9, ids=[])
    sampling = SimpleNamespace(temperature=1.0, top_p=1.0, top_k=0)
    with serving() as engine:
        server = served.Server(engine.url, "base", STOPS)
        server.check()
        assert list(server.stream([job], sampling, 1)) == [[job]] and job.ids == [3, 7, STOPS[0]]


def use_rollout(rollout):
    lm, tokenizer = make_model(), make_tokenizer()
    prompt = rollout.chat_ids(tokenizer, "1 + 1?", thinking="closed")
    sampling, key = rollout.Sampling(max_new_tokens=5), rollout.sample_key(0, 1, "a")
    (ids,) = rollout.generate(lm, tokenizer, [prompt], sampling, [key])
    assert 0 < len(ids) <= 5


def use_scoring(scoring):
    assert scoring.score_teachers(make_model(), [[5, 6, 7], [8]], [20, 21]).shape == (2, 2)


def use_distributed(distributed):
    world = distributed.init("cpu")
    assert (world.rank, world.size, world.main) == (0, 1, True)
    assert distributed.all_gather("x", world) == ["x"]


def use_problems(problems):
    pathlib.Path("data.jsonl").write_text('{"problem": "What is 1 + 1?", "answer": "2"}\n')
    data, counts = problems.load_problems("data.jsonl")
    problems.refuse_overlap(data, "data.jsonl")  # its evaluation sets lie beside it
    assert counts["kept"] == 1 == len(problems.minibatch(data, 1, 1, seed=0))


def use_model(model):
    for part in (make_model(), make_tokenizer()):
        part.save_pretrained("a_model")
    lm, tokenizer = model.load_model("a_model", "cpu")
    assert tokenizer.eos_token_id in model.masked_token_ids(tokenizer)
    assert model.trained(model.with_adapters(lm, 2, 4))


def use_runlog(runlog):
    assert "torch" in runlog.provenance()["versions"]


WITHOUT_TORCH = "skills lib/config lib/command lib/verify lib/files lib/served".split()
WITH_TORCH = "rollout scoring distributed lib/problems lib/model lib/runlog".split()
USES = {name.removeprefix("use_"): value for name, value in globals().items() if "use_" in name}


@pytest.mark.parametrize("path", WITHOUT_TORCH + WITH_TORCH)
def test_a_module_works_alone(path, tmp_path):
    name = path.removeprefix("lib/")
    folder = tmp_path / "alone"
    folder.mkdir()
    shutil.copy(ROOT / f"{path}.py", folder)
    if name == "problems":
        shutil.copy(ROOT / "lib/eval_sets.json", folder)
    if name == "skills":
        shutil.copytree(ROOT / "prompts", folder / "prompts")
        make_bank(folder / "bank.json")

    def program(argv):
        for module in [*sys.modules]:
            if module.split(".")[0] in OURS:
                del sys.modules[module]
        elsewhere = [x for x in sys.path if x and not is_ours(pathlib.Path(x))]
        sys.path[:] = [str(folder), *elsewhere]
        os.chdir(folder)
        if path in WITHOUT_TORCH:
            sys.modules["torch"] = sys.modules["transformers"] = None
        USES[name](importlib.import_module(name))
        loaded = {module.split(".")[0] for module in sys.modules} & OURS
        assert loaded <= {name}, loaded
        return 0

    assert wait(start([], tmp_path / "log", program=program)) == 0, (tmp_path / "log").read_text()


def is_ours(path):
    return path in (ROOT, ROOT / "tiny") or path.is_relative_to(ROOT / "tests")


# ----------------------------------------------------------------------------- a fence copied alone


def fence(file, **given):
    """What stands from the first rule to the second of a file, run with these names alone."""
    _, part, *_ = re.split(r"^# -{20,} .*\n", (ROOT / file).read_text(), flags=re.M)
    for node in ast.walk(ast.parse(part)):
        assert not isinstance(node, ast.Import | ast.ImportFrom), ast.unparse(node)
    exec(part, given)
    return SimpleNamespace(**given)


def test_the_objective_needs_torch_alone():
    types = {"Collection": Collection, "Sequence": Sequence}
    f = fence("sgsd.py", torch=torch, Tensor=torch.Tensor, **types)
    logpS_T = t([-1.0, -0.5]).requires_grad_()
    delta_KT = f.log_prob_gap(t([[-0.5, -1.5], [1.0, -0.4]]), logpS_T)  # [[.5, -1], [2, .1]]
    mask_T, alpha_K = f.token_mask([5, 6], {7}), f.teacher_weights(t([0.3, 0.1]), t([0.1, 0.3]))
    same(alpha_K, [0.5, 0.5])
    same(f.plain_support(delta_KT), [-0.25, 1.05])
    rho_K = f.polarity(f.robust_support(delta_KT, mask_T, 3.0), -1, 0.05)
    assert rho_K.tolist() == [1, -1]
    f.sgsd_loss(f.teacher_losses(delta_KT, mask_T, 1.0), alpha_K, rho_K).backward()
    same(-logpS_T.grad, f.token_credit(delta_KT, mask_T, alpha_K, rho_K, 1.0).sum(0))
    cfg = SimpleNamespace(c_delta=3.0, eps_a=0.05, tau_g=1.0)
    logpT_KT = t([[-0.5, -1.5], [1.0, -0.4]])
    _, numbers = f.loss_of(cfg, logpT_KT, logpS_T, mask_T, alpha_K, -1)
    assert numbers["rho"].tolist() == [1, -1]


def test_the_metrics_need_numpy_alone():
    types = {"Callable": Callable, "Sequence": Sequence}
    f = fence("eval.py", np=np, math=math, Counter=Counter, **types)
    correct_PK = np.array([[1, 0], [1, 1]], dtype=bool)
    assert f.avg_at_k(correct_PK) == 0.75 and f.pass_at_k(correct_PK, 2) == 1.0
    assert f.maj_at_k([["1", "2", "2"]], ["2"], lambda gold, pred: gold == pred) == 1.0
    low, high = f.bootstrap_interval([np.arange(10.0)])
    assert low < 4.5 < high


# --------------------------------------------------------------------------------------- contract


CONTRACT = """
sgsd: teacher_weights(s_g_K, s_e_K)
sgsd: log_prob_gap(logpT_KT, logpS_T)
sgsd: plain_support(delta_KT)
sgsd: token_mask(ids_T, masked_ids)
sgsd: robust_support(delta_KT, mask_T, c_delta)
sgsd: polarity(a_K, r, eps_a)
sgsd: gated_loss(delta, tau_g)
sgsd: gate_grad(delta, tau_g)
sgsd: teacher_losses(delta_KT, mask_T, tau_g)
sgsd: sgsd_loss(lbar_K, alpha_K, rho_K)
sgsd: token_credit(delta_KT, mask_T, alpha_K, rho_K, tau_g)
sgsd: loss_of(cfg, logpT_KT, logpS_T, mask_T, alpha_K, r)
lib.model: masked_token_ids(tokenizer)
lib.verify: extract_answer(text)
lib.verify: Judge.answer(self, text)
lib.verify: Judge.is_right(self, problem, answer)
lib.verify: Judge.same(self, one, other)
lib.verify: Judge.judge(self, cases)
lib.verify: Verifier(timeout_s)
lib.verify: Verifier.verify(self, gold, pred, problem)
lib.verify: Verifier.outcome(self, gold, text, problem)
lib.verify: Verifier.close(self)
rollout: chat_ids(tokenizer, text, *, thinking)
rollout: generate(model, tokenizer, prompt_ids, sampling, keys)
rollout: Rollout(problem_id, problem, gold, prompt_ids, completion_ids, text, pred, r, truncated)
scoring: token_logprobs(model, prompt_ids, completion_ids, *, grad)
skills: SkillBank(general_skills, common_mistakes, metadata)
skills: SkillBank.load(path)
skills: SkillBank.save(self, path)
skills: SkillBank.retrieve(self, problem, k, embed)
skills: SkillPair(skill, mistake, s_g, s_e)
skills: render_student(problem)
skills: render_teacher(pair, problem)
skills: parse_json_items(text, key)
skills: merge(items, key, complete, group_size, patience)
skills: cold_start(memories, complete)
skills: evolve(bank, window, step, complete, *, evolve_every, success_gate, max_new_items)
eval: avg_at_k(correct_PK)
eval: pass_at_k(correct_PK, k)
eval: maj_at_k(preds, golds, verify)
methods.grpo: grpo_advantages(rewards_G)
methods.divergences: generalized_jsd(logits_s, logits_t, beta)
"""


@pytest.mark.parametrize("line", CONTRACT.strip().splitlines())
def test_each_name_of_the_contract_stands_in_its_module_and_takes_its_parameters(line):
    """In this order; after a star, those that are named. More may follow."""
    module, name, wanted = re.fullmatch(r"(\S+): ([\w.]+)\((.*)\)", line).groups()
    value = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    parameters = inspect.signature(value).parameters
    first, _, named = wanted.partition("*, ")
    in_order = [word for word in first.split(", ") if word]
    assert list(parameters)[: len(in_order)] == in_order
    for keyword in filter(None, named.split(", ")):
        assert parameters[keyword].kind is inspect.Parameter.KEYWORD_ONLY
