"""The house: no spoke imports ours, each works when it is copied alone, and so does each fence.

Each copy stands in a folder of its own. A fresh process tries those that need no torch, with torch
out of reach, and a forked one the others; between two copies nothing of ours stays on the path or
loaded.
"""

import ast
import importlib
import inspect
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, make_bank, make_model, make_tokenizer
from driver import start, wait

SPOKES = "rollout scoring verify distributed problems config files model runlog skills".split()
ROOT_FILES = sorted(path.stem for path in ROOT.glob("*.py"))
SOURCES = [*sorted(ROOT.glob("*.py")), *sorted((ROOT / "extras").glob("*.py"))]


# ---------------------------------------------------------------------------------------- imports


def imported(node):
    """The modules that a piece of source imports, in functions and for types, too."""
    names = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Import):
            names |= {alias.name.split(".")[0] for alias in part.names}
        elif isinstance(part, ast.ImportFrom):
            names.add((part.module or "").split(".")[0])
    return names


def imports_of(name):
    """What a root file imports of ours; a function `main` and a block of __main__ may start others.

    Those of skills.Writer are left out: it is the one part of a spoke that needs another.
    """
    names = set()
    for node in ast.parse((ROOT / f"{name}.py").read_text()).body:
        starts = isinstance(node, ast.FunctionDef) and node.name == "main"
        starts |= isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)
        writer = (name, getattr(node, "name", "")) == ("skills", "Writer")
        if not starts and not writer:
            names |= imported(node)
        elif writer:
            assert imported(node) & {*ROOT_FILES} == {"rollout"}
    return names & {*ROOT_FILES, "extras"}


@pytest.mark.parametrize("name", SPOKES)
def test_a_spoke_imports_nothing_of_ours(name):
    assert imports_of(name) == set()


def test_the_imports_of_the_root_files_have_no_circle():
    graph = {name: imports_of(name) - {"extras"} for name in ROOT_FILES}
    graph["skills"] |= {"rollout"}
    while graph:
        last = [name for name, others in graph.items() if not others & {*graph}]
        assert last, f"a circle among {sorted(graph)}"
        graph = {name: others for name, others in graph.items() if name not in last}


def test_no_line_is_wider_than_100_columns():
    for path in SOURCES:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert len(line) <= 100, f"{path.name}:{number}"


# ----------------------------------------------------------------------------------------- copies


COPY = """
import contextlib
import importlib
import json
import pathlib
import sys
from types import SimpleNamespace

HERE = pathlib.Path(sys.argv[1])
OURS = sys.argv[2].split()
sys.dont_write_bytecode = True


class Refusal:
    '''Of what an import may not reach.'''

    allowed = None

    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if self.allowed is not None and top not in self.allowed:
            raise ModuleNotFoundError(f"{name} is out of reach")


sys.meta_path.insert(0, refusal := Refusal())


@contextlib.contextmanager
def alone(name):
    '''The module `name`, from a folder that has nothing else of ours.'''
    before = set(sys.modules)
    sys.path.insert(0, str(HERE / name))
    try:
        yield importlib.import_module(name)
        loaded = set(sys.modules) - before
        assert not loaded & ({*OURS, "extras"} - {name}), loaded
    finally:
        sys.path.pop(0)
        for gone in OURS:
            sys.modules.pop(gone, None)
    print(name, "works")


def problem(number, text="What is 1 + 1?", answer="2"):
    return SimpleNamespace(id=f"p{number}", problem=text, answer=answer)
"""

WITHOUT_TORCH = """
STDLIB = {*sys.stdlib_module_names, "numpy"}


def embed(texts):
    rows = [[text.lower().count(c) + 0.1 for c in "abcdefghijklmnopqrstuvwxyz"] for text in texts]
    return np.array(rows)


def complete(prompts):
    item = dict.fromkeys(("title", "principle", "when_to_apply"), "a")
    item |= dict.fromkeys(("description", "why_it_happens", "how_to_avoid"), "b")
    return [json.dumps([item]) for prompt in prompts]


def use_bank(skills):
    bank = skills.SkillBank.load(HERE / "bank.json")
    pairs = bank.retrieve("Add with care.", 2, embed)
    assert len(pairs) == 2 and pairs[0].s_g >= pairs[1].s_g
    assert "Problem: What?" in skills.render_teacher(pairs[0], "What?")
    merged, layers = skills.merge(bank.general_skills, "general_skills", complete)
    assert [item["skill_id"] for item in merged] == ["gen_001"] and len(layers) == 1
    solved = SimpleNamespace(problem="What?", text="so", r=1, pred="2", problem_id="p")
    cold = skills.cold_start([skills.memory_of(solved)], complete)
    assert cold.sizes == "1 skills and 0 mistakes"
    window = [SimpleNamespace(problem="What?", text="so", r=-1, pred=None, problem_id="p")]
    new = skills.evolve(bank, window, 25, complete)
    assert new.common_mistakes[-1]["mistake_id"] == "dyn_err_001"
    new.save(HERE / "skills/saved.json")
    assert skills.SkillBank.load(HERE / "skills/saved.json") == new


refusal.allowed = {*STDLIB, "bank_half", "metrics"}
import numpy as np

with alone("bank_half") as bank_half:
    use_bank(bank_half)
with alone("metrics") as metrics:
    correct_PK = np.array([[1, 0], [1, 1]], dtype=bool)
    assert metrics.avg_at_k(correct_PK) == 0.75 and metrics.pass_at_k(correct_PK, 2) == 1.0
    assert metrics.maj_at_k([["1", "2", "2"]], ["2"], lambda gold, pred: gold == pred) == 1.0
    low, high = metrics.bootstrap_interval([correct_PK.mean(1)])
    assert low <= 0.75 <= high
refusal.allowed |= {"skills", "verify", "config"}
with alone("skills") as skills:
    use_bank(skills)
with alone("config") as config:
    cfg, resume = config.parse(["--preset", "tiny", "--tau-g", "2"], "about")
    assert (cfg.tau_g, cfg.batch_size, resume) == (2.0, 16, False)
refusal.allowed = None  # the worker of the verdict and the lock are of packages
sys.modules["torch"] = sys.modules["transformers"] = None
with alone("verify") as verify:
    assert verify.extract_answer(r"so \\boxed{2}") == "2"
    with verify.Verifier() as verifier:
        assert verifier.verify("1/2", "0.5") and not verifier.verify("1/2", "2")
        assert verifier.outcome("2", r"so \\boxed{x + 2}") == -1
with alone("files") as files:
    with files.locked(HERE / "files/run"):
        files.append_jsonl(HERE / "files/run/log.jsonl", [{"step": 1}, {"step": 2}])
        files.trim_jsonl(HERE / "files/run/log.jsonl", 1)
    assert list(files.read_jsonl(HERE / "files/run/log.jsonl")) == [{"step": 1}]
    files.write_json(HERE / "files/a.json", [1])
    assert files.read_json(HERE / "files/a.json") == [1]
"""

WITH_TORCH = """
import builtins
import torch
import transformers

torch.set_num_threads(1)
MODEL = str(HERE / "a_model")
lm = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)

# Here the imports of the fence alone are restricted: torch has many of its own.
def only_torch(name, *args, **kwargs):
    if name.split(".")[0] not in {"math", "torch", "collections"}:
        raise ModuleNotFoundError(f"{name} is out of reach")
    return __import__(name, *args, **kwargs)


space = {"__name__": "objective", "__builtins__": {**vars(builtins), "__import__": only_torch}}
exec((HERE / "objective/objective.py").read_text(), space)
delta_KT = torch.tensor([[0.5, -1.0], [2.0, 0.1]], requires_grad=True)
mask_T, alpha_K = space["token_mask"]([5, 6], {7}), torch.tensor([0.5, 0.5])
rho_K = space["polarity"](space["robust_support"](delta_KT, mask_T, 3.0), -1, 0.05)
assert rho_K.tolist() == [1, -1]
space["sgsd_loss"](delta_KT, mask_T, alpha_K, rho_K, 1.0).backward()
credit_KT = space["token_credit"](delta_KT, mask_T, alpha_K, rho_K, 1.0)
torch.testing.assert_close(delta_KT.grad, credit_KT)
print("objective works")

with alone("rollout") as rollout:
    stops = rollout.stop_ids(lm, tokenizer)
    prompts = [rollout.chat_ids(tokenizer, f"What is {i}?", thinking=False) for i in (1, 2)]
    keys = [rollout.sample_key(0, 1, f"p{i}") for i in (1, 2)]
    completions = rollout.generate(lm, tokenizer, prompts, rollout.Sampling(max_new_tokens=5), keys)
    assert all(0 < len(ids) <= 5 for ids in completions)
    wrong = SimpleNamespace(answer="3", right=False)
    judge = SimpleNamespace(judge=lambda cases: [wrong for case in cases])
    turn = list(enumerate(completions))
    rolls = rollout.judge(tokenizer, stops, [problem(1), problem(2)], prompts, turn, judge)
    assert [roll.r for roll in rolls] == [-1, -1] and rolls[0].pred == "3"
with alone("scoring") as scoring:
    logp_BT = scoring.token_logprobs(lm, prompts, completions)
    ids = torch.tensor([prompts[0] + completions[0]])
    logits_TV = lm(input_ids=ids).logits[0, len(prompts[0]) - 1 : -1].log_softmax(-1)
    want_T = logits_TV.gather(1, ids[0, len(prompts[0]) :, None])[:, 0]
    torch.testing.assert_close(logp_BT[0, : len(want_T)], want_T, atol=1e-4, rtol=1e-4)
    assert scoring.score_teachers(lm, prompts, completions[0]).shape == (2, len(completions[0]))
with alone("distributed") as distributed:
    world = distributed.init("cpu")
    assert (world.rank, world.size, world.main) == (0, 1, True)
    assert distributed.gather("x", world) == ["x"]
    p = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(1))]
    p[0].grad = torch.ones(2)
    distributed.sum_gradients(p, world)
    assert p[0].grad.tolist() == [1, 1] and p[1].grad.tolist() == [0]
    rows = [SimpleNamespace(prompt=[0] * n, index=n) for n in (1, 2)]
    stream = lambda mine: ([row.index] for row in mine)
    assert list(distributed.share(world, rows, stream, list)) == [[1], [2]]
with alone("problems") as problems:
    data, counts = problems.load_problems(str(HERE / "data.jsonl"))
    assert len(data) == counts["kept"] == 3
    batch = problems.minibatch(data, 3, 1, seed=0)
    assert {x.id for x, _ in batch} == {x.id for x in data}
    problems.refuse_overlap(data, "data", {"set": [problems.fingerprint("another")]})
with alone("model") as model:
    lm, tokenizer = model.load_model(MODEL, "cpu")
    assert tokenizer.eos_token_id in model.masked_token_ids(tokenizer)
    lm = model.with_adapters(lm, 2, 4)
    params = list(model.trained(lm).values())
    optimizer = torch.optim.AdamW(params, lr=0.1)
    lm(input_ids=torch.tensor([[5, 6]])).logits.sum().backward()
    optimizer.step()
    folder, want = HERE / "model/step", [p.detach().clone() for p in params]
    folder.mkdir()
    model.save(folder, lm, tokenizer, optimizer, 3, {"extra": torch.ones(1)})
    for p in params:
        p.data.zero_()
    step, extra = model.restore(folder, lm, optimizer)
    assert step == 3 and extra["extra"].tolist() == [1]
    assert all(torch.equal(p, w) for p, w in zip(params, want))
with alone("runlog") as runlog:
    pair = SimpleNamespace(skill={"skill_id": "g"}, mistake={"mistake_id": "e"}, s_g=0.5, s_e=0.5)
    numbers = {"rho": torch.tensor([1]), "a": torch.tensor([0.5]), "first_gap": torch.tensor([0.1])}
    numbers |= {"loss": torch.tensor(0.25), "clipped": torch.tensor(0), "unmasked": torch.tensor(2)}
    row = runlog.rollout_row(1, rolls[0], [pair], numbers)
    row |= runlog.credit_sums(torch.tensor([[0.5, -0.5]]), -1)
    metrics = runlog.summarize(1, [row], 1.0, 0.1, runlog.Stopwatch().seconds, 0.0)
    assert metrics["rho_distilled_failure"] == 1 and metrics["credit_with_verdict"] == 0.5
    assert runlog.log_line(metrics, 2).startswith("step 1/2 loss +0.2500 r+ .00 rho +1/-0/0:0")
"""


def until(name, ends):
    """The source of a file up to the first top-level node at which `ends`(node, those before)."""
    text = (ROOT / f"{name}.py").read_text()
    nodes = ast.parse(text).body
    for i, node in enumerate(nodes):
        if ends(node, nodes[:i]):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            return "".join(text.splitlines(keepends=True)[: first - 1])
    raise AssertionError(f"{name}.py has no such node")


def past_the_credit(node, before):
    """Behind the function token_credit."""
    return any(getattr(earlier, "name", "") == "token_credit" for earlier in before)


def at_the_next_imports(node, before):
    """At the first import behind a function: there the rest of a file begins."""
    has_function = any(isinstance(earlier, ast.FunctionDef) for earlier in before)
    return has_function and isinstance(node, ast.Import | ast.ImportFrom)


def at_the_writer(node, before):
    """At the class Writer."""
    return getattr(node, "name", "") == "Writer"


FENCES = {  # copy: the file, and where its fence ends
    "objective": ("sgsd", past_the_credit),
    "metrics": ("eval", at_the_next_imports),
    "bank_half": ("skills", at_the_writer),
}


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """A folder for each spoke and fence, and beside them what the uses read."""
    here = tmp_path_factory.mktemp("copies")
    for name in (*SPOKES, *FENCES):
        (here / name).mkdir()
    for name in SPOKES:
        shutil.copy(ROOT / f"{name}.py", here / name)
    for name, (file, ends) in FENCES.items():
        (here / name / f"{name}.py").write_text(until(file, ends))
    for name in ("skills", "bank_half"):
        shutil.copytree(ROOT / "prompts", here / name / "prompts")
    make_bank(here / "bank.json")
    for part in (make_model(), make_tokenizer()):
        part.save_pretrained(here / "a_model")
    lines = [f'{{"problem": "What is {i} + 1?", "answer": "{i + 1}"}}\n' for i in range(3)]
    (here / "data.jsonl").write_text("".join(lines))
    return here


def works(printed):
    return [line.split()[0] for line in printed.splitlines() if line.endswith(" works")]


def use(script, here):
    """What a fresh process prints that tries copies, far from the files here."""
    (here / "use.py").write_text(COPY + script)
    command = [sys.executable, "-I", "use.py", str(here), " ".join(ROOT_FILES)]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return works(done.stdout)


def use_in_fork(script, here):
    """The same with torch as the tests have imported it, and nothing of ours."""

    def forget_ours():
        for name in [*sys.modules]:
            if name.split(".")[0] in {*ROOT_FILES, "extras"}:
                del sys.modules[name]
        sys.path[:] = [path for path in sys.path if path and not is_ours(pathlib.Path(path))]
        os.chdir(here)
        sys.argv = ["use.py", str(here), " ".join(ROOT_FILES)]

    def is_ours(path):
        return path in (ROOT, ROOT / "tiny") or path.is_relative_to(ROOT / "tests")

    def program(argv):
        exec(compile(COPY + script, "use.py", "exec"), {"__name__": "__main__"})
        return 0

    log = here / "log"
    code = wait(start([], log, before=forget_ours, program=program))
    assert code == 0, log.read_text()[-3000:]
    return works(log.read_text())


def test_what_needs_no_torch_works_alone_without_it(copies):
    """The metrics and the bank's half of skills.py need NumPy and the standard library only."""
    wanted = ["bank_half", "metrics", "skills", "config", "verify", "files"]
    assert use(WITHOUT_TORCH, copies) == wanted


def test_the_objective_needs_math_and_torch_only_and_the_other_spokes_work_alone(copies):
    wanted = ["objective", "rollout", "scoring", "distributed", "problems", "model", "runlog"]
    assert use_in_fork(WITH_TORCH, copies) == wanted


# --------------------------------------------------------------------------------------- contract


CONTRACT = {  # {module: {name: its first parameters * keywords after them}}
    "sgsd": {
        "teacher_weights": "s_g_K s_e_K",
        "log_prob_gap": "logpT_KT logpS_T",
        "plain_support": "delta_KT",
        "outcome_sign": "r",
        "robust_support": "delta_KT mask_T c_delta eps",
        "polarity": "a_K r eps_a",
        "gated_loss": "delta tau_g",
        "gate_grad": "delta tau_g",
        "teacher_losses": "delta_KT mask_T tau_g eps",
        "sgsd_loss": "delta_KT mask_T alpha_K rho_K tau_g eps",
        "token_credit": "delta_KT mask_T alpha_K rho_K tau_g eps",
        "token_mask": "ids_T masked_ids",
    },
    "model": {"masked_token_ids": "tokenizer"},
    "verify": {
        "extract_answer": "text",
        "Verifier": "timeout_s workers",
        "Verifier.verify": "self gold pred problem",
        "Verifier.verify_many": "self pairs",
        "Verifier.outcome": "self gold text problem",
        "Verifier.close": "self",
    },
    "rollout": {
        "chat_ids": "tokenizer text thinking",
        "generate": "model tokenizer prompt_ids sampling keys",
        "Rollout": "problem_id problem gold prompt_ids completion_ids text pred r truncated",
    },
    "scoring": {"token_logprobs": "model prompt_ids completion_ids grad"},
    "problems": {"minibatch": "data batch_size step seed generations"},
    "skills": {
        "SkillBank": "general_skills common_mistakes metadata",
        "SkillBank.load": "path",
        "SkillBank.save": "self path",
        "SkillBank.retrieve": "self problem k embed",
        "SkillPair": "skill mistake s_g s_e",
        "render_student": "problem",
        "render_teacher": "pair problem",
        "parse_json_items": "text key",
        "merge": "items key complete group_size patience",
        "cold_start": "memories complete",
        "evolve": "bank window step complete * evolve_every success_gate max_new_items "
        "dynamic_capacity",
    },
    "eval": {
        "avg_at_k": "correct_PK",
        "pass_at_k": "correct_PK k",
        "maj_at_k": "preds golds verify",
    },
    "extras.baselines": {
        "grpo_advantages": "rewards_G",
        "grpo_loss": "",
        "generalized_jsd": "logits_s logits_t beta",
    },
}


@pytest.mark.parametrize("module", CONTRACT)
def test_each_name_of_the_contract_stands_in_its_module_and_takes_its_parameters(module):
    for name, wanted in CONTRACT[module].items():
        value = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
        parameters = list(inspect.signature(value).parameters)
        first, _, keywords = wanted.partition("*")
        assert parameters[: len(first.split())] == first.split(), f"{module}.{name}"
        assert {*keywords.split()} <= {*parameters}, f"{module}.{name}"
