"""The house: imports only go down, each module works when it is copied alone, so does each fence.

A copied module stands in an empty folder. A forked process uses it there, with nothing else of ours
on the path or loaded, and those that need no torch with torch out of reach.
"""

import ast
import importlib
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, fake_embed, make_bank, t
from driver import run

# ---------------------------------------------------------------------------------------- imports

# A reader's own modules, which git does not know, may stand beside ours.
LIST_OWN = ["git", "-C", str(ROOT), "ls-files", "--others", "--exclude-standard", "*.py"]
OWN = subprocess.run(LIST_OWN, capture_output=True, text=True).stdout.split()
SOURCES = {}  # {module: its tree}
for folder in ("", "lib/", "methods/", "extras/"):
    for path in sorted((ROOT / folder).glob("*.py")):
        if path.stem != "__init__" and folder + path.name not in OWN:
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


def render_a_prompt(skills):
    make_bank("bank.json")
    pairs = skills.SkillBank.load("bank.json").retrieve("Add with care.", 2, fake_embed)
    assert "Problem: What?" in skills.render_teacher(pairs[0], "What?")


def judge_an_answer(verify):
    with verify.Verifier() as verifier:
        assert verifier.outcome("1/2", r"so \boxed{0.5}") == 1


WITHOUT_TORCH = "skills lib/config lib/command lib/verify lib/files lib/served".split()
WITH_TORCH = "rollout scoring distributed lib/problems lib/model lib/runlog".split()
USES = {"skills": render_a_prompt, "lib/verify": judge_an_answer}


@pytest.mark.parametrize("path", WITHOUT_TORCH + WITH_TORCH)
def test_a_module_works_alone(path, tmp_path):
    name, folder = path.removeprefix("lib/"), tmp_path / "alone"
    folder.mkdir()
    shutil.copy(ROOT / f"{path}.py", folder)
    if path == "skills":
        shutil.copytree(ROOT / "prompts", folder / "prompts")

    def program(argv):
        for module in [*sys.modules]:
            if module.split(".")[0] in OURS:
                del sys.modules[module]
        ours = {str(path) for path in (ROOT, ROOT / "tiny", *(ROOT / "tests").glob("**/"))}
        sys.path[:] = [str(folder), *(x for x in sys.path if x and x not in ours)]
        os.chdir(folder)
        if path in WITHOUT_TORCH:
            sys.modules["torch"] = sys.modules["transformers"] = None
        module = importlib.import_module(name)
        if path in USES:
            USES[path](module)
        loaded = {module.split(".")[0] for module in sys.modules} & OURS
        assert loaded <= {name}, loaded
        return 0

    run([], program)


def fence(module, first, last, **given):
    """What stands from one definition of a module to another, run with these names alone."""
    body = SOURCES[module].body
    names = [getattr(node, "name", None) or ast.unparse(node).split(" = ")[0] for node in body]
    part = ast.Module(body[names.index(first) : names.index(last) + 1], [])
    for node in ast.walk(part):
        assert not isinstance(node, ast.Import | ast.ImportFrom), ast.unparse(node)
    exec(compile(part, module, "exec"), given)
    return SimpleNamespace(**given)


def test_the_objective_needs_torch_alone():
    types = {"Collection": Collection, "Sequence": Sequence}
    f = fence("sgsd", "EPS", "token_credit", math=math, torch=torch, Tensor=torch.Tensor, **types)
    cfg, alpha_K = SimpleNamespace(c_delta=3.0, eps_a=0.05, tau_g=1.0), t([0.5, 0.5])
    logpT_KT, logpS_T = t([[-0.5, -1.5], [1.0, -0.4]]), t([-1.0, -0.5]).requires_grad_()
    mask_T = f.token_mask([5, 6], {7})
    loss, numbers = f.loss_of(cfg, logpT_KT, logpS_T, mask_T, alpha_K, -1)
    loss.backward()
    assert numbers["rho"].tolist() == [1, -1] and logpS_T.grad.any()


def test_the_metrics_need_numpy_alone():
    types = {"Any": Any, "Callable": Callable, "Hashable": Hashable, "Sequence": Sequence}
    f = fence("eval", "avg_at_k", "bootstrap_interval", np=np, math=math, Counter=Counter, **types)
    correct_PK = np.array([[1, 0], [1, 1]], dtype=bool)
    assert f.avg_at_k(correct_PK) == 0.75 and f.pass_at_k(correct_PK, 2) == 1.0
    right_PK = [[False, True, True]]
    assert f.maj_at_k([["1", "2", "2"]], right_PK, lambda one, other: False) == 1.0
    low, high = f.bootstrap_interval([np.arange(10.0)])
    assert low < 4.5 < high
