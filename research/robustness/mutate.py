"""Does a test fall when a line of the method is wrong?

    python research/robustness/mutate.py                 all changes
    python research/robustness/mutate.py --only eq13     those with this word in them
    python research/robustness/mutate.py --list          print them, and run nothing

Each change below replaces a part of one line in a copy of the working tree; there the tests that
are named with it are run, and one must fall. Before that all of these tests must pass in the copy.
The table has what survives: changes that no test sees, and those that change no number, with the
reason. The exit code is 1 if a change survives without a reason, or if its text is not in its file
exactly once. Changes of the files on TRL need extras/requirements.txt.

It takes some three minutes on an idle core: run it after a change of the method or of its tests.
"""

import argparse
import collections
import importlib
import importlib.util
import itertools
import multiprocessing
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from research.markdown_table import head_of, row_of


class Change(NamedTuple):
    before: str  # a part of one line, which is in the file once
    after: str
    tests: str  # "spec/step two" is tests/spec/test_step.py -k two
    same_numbers_because: str = ""  # where the change is equivalent


CHANGES = {
    "sgsd.py": [
        Change("softmax((s_g_K + s_e_K) / 2", "softmax((s_g_K + s_e_K)", "spec/objective eq6"),
        Change("logpT_KT.detach() - logpS_T", "logpT_KT - logpS_T", "spec/gradient eq18"),
        Change("delta_KT.detach().mean(1)", "delta_KT.detach().sum(1)", "spec/objective eq8"),
        Change("1.0 - torch.isin(ids", "0.0 + torch.isin(ids", "spec/objective mask_leaves"),
        Change("torch.where(mask_T.bool(), x_KT, 0)", "x_KT", "spec/objective inert"),
        Change("sum(1) / (m_T.sum() + EPS)", "sum(1) / len(m_T)", "spec/objective eq11"),
        Change("EPS = 1e-8", "EPS = 0.0", "spec/gradient all_is_masked"),
        Change("clamp(-c_delta, c_delta)", "clamp(max=c_delta)", "spec/objective eq11"),
        Change("a_K.abs() > eps_a", "a_K.abs() >= eps_a", "spec/objective eq13"),
        Change("int(r) * torch.sign(a_K)", "torch.sign(a_K)", "spec/objective eq10"),
        Change("type(number) is bool or number", "number", "spec/objective eq9"),
        Change(
            "softplus(-(delta**2) / (2 * tau_g))",
            "softplus(-(delta**2) / tau_g)",
            "spec/objective eq14",
        ),
        Change("sigmoid(-(delta**2) / (2 * tau_g))", "sigmoid(-(delta**2))", "spec/gradient eq17"),
        Change("rho_K.detach() * lbar_K).sum()", "lbar_K).sum()", "spec/objective eq16"),
        Change("/ (m_T.sum() + EPS) * g_KT", "/ len(m_T) * g_KT", "spec/gradient eq20"),
        Change("step, x.id, epoch)", "step, x.id)", "spec/step comes_twice"),
        Change("rho_K.any() or not loss.isfinite()", "rho_K.any()", "spec/step no_number"),
        Change("(result.loss / cfg.batch_size)", "result.loss", "spec/step lines_2_to_16"),
        Change("(params, cfg.grad_clip)", "(params, math.inf)", "spec/step lines_2_to_16"),
        Change("1 - (step - 1) / cfg.steps", "1 - step / cfg.steps", "spec/step lines_2_to_16"),
        Change(
            "zero_grad(set_to_none=True)",
            "zero_grad(set_to_none=False)",
            "spec/step lines_2_to_16",
            "a gradient that is missing counts as 0",
        ),
    ],
    "scoring.py": [
        Change(
            "[len(prompt) - 1 : len(row) - 1]", "[len(prompt) : len(row)]", "spec/scoring shift"
        ),
        Change("logits_nV if temperature == 1 else", "logits_nV if True else", "spec/scoring eq5"),
        Change("x.float() @ weight_VD.T", "(x @ head_VD.T).float()", "spec/scoring bf16_head"),
        Change(
            "(len(groups[-1]) + 1) <= budget", "len(groups[-1]) <= budget", "spec/scoring packs"
        ),
    ],
    "rollout.py": [
        Change("x_BV < least_B1", "x_BV <= least_B1", "spec/rollout by_hand"),
        Change("(before_BM < sampling", "(before_BM <= sampling", "spec/rollout by_hand"),
        Change("u_B1, right=True)", "u_B1, right=False)", "spec/rollout by_hand"),
        Change("{seed}|{step}|{sample}|{name}", "{seed}|{step}|{name}", "spec/rollout draws_are"),
        Change(
            "token in stops or job.tokens_left == 0",
            "job.tokens_left == 0",
            "spec/rollout either_stop",
        ),
        Change("staying, width)", "staying, width + 1)", "spec/rollout qwen3"),
        Change("= thinking != ", "= thinking == ", "spec/prompts closed_bare"),
        Change("r=1 if verdict.right else -1", "r=1", "spec/rollout no_bool"),
        Change(
            "not job.ids or job.ids[-1] not in stops", "not job.ids", "spec/rollout either_stop"
        ),
        Change("for job in jobs), left))", "for job in jobs)))", "spec/rollout past_the_context"),
    ],
    "distributed.py": [
        Change("dist.all_reduce(flat)", "pass", "spec/distributed collectives"),
        Change("dist.broadcast(p.data, src=0)", "pass", "spec/distributed collectives"),
        Change(
            "sorted(jobs, key=lambda job: len(job.prompt))",
            "list(jobs)",
            "spec/distributed collectives",
        ),
    ],
    "skills.py": [
        Change('(-scores_n, kind="stable")', "(-scores_n)", "spec/bank equal_scores"),
        Change('". ".join(entry[name]', '" ".join(entry[name]', "spec/bank three_fields"),
        Change('("problem_id", "truncated")', '("problem_id",)', "spec/prompts extraction"),
        Change("whole and len(items) <= requests[i].shown", "whole", "spec/algorithms alg3_line_6"),
        Change("stagnant >= patience", "stagnant > patience", "spec/algorithms alg3_line_11"),
        Change(
            "for item in items[:3]",
            "for item in items",
            "spec/algorithms alg2",
        ),
        Change(
            "if success >= success_gate",
            "if success > success_gate",
            "spec/algorithms alg4_lines_1",
        ),
        Change("return bool(self.window) and e", "return e", "life/continue killed_everywhere"),
        Change("limited[larger].pop()", "limited[larger].pop(0)", "spec/algorithms alg4_line_13"),
        Change(
            '"lost_replies": lost + lost_in(layers),',
            '"lost_replies": lost,',
            "spec/algorithms first_bank",
        ),
    ],
    "lib/run.py": [
        Change("thinking=run.cfg.teacher_prefix", 'thinking="closed"', "spec/step lines_2_to_16"),
        Change("skipped + 1 if row.get", "skipped if row.get", "life/faults third_in_a_row"),
        Change("len(roll.completion_ids) <= context", "1 <= context", "spec/step left_out"),
        Change("sum(roomy < tokens", "sum(roomy <= tokens", "life/misuse long_problems"),
        Change("replace(self.bank, window=[]).save(", "self.bank.save(", "life/continue goes_back"),
        Change("if rule.free:", "if rule:", "life/continue not_free"),
    ],
    "lib/command.py": [
        Change(
            "values |= preset",
            "values = preset | values",
            "life/config preset",
        ),
    ],
    "lib/runlog.py": [
        Change(
            'if "mixed" in steps[0] and',
            'if "mixed" not in steps[0] or',
            "life/runlog decided_teacher",
        ),
        Change("ALIKE.get(success, ", "ALIKE.get(1 - success, ", "life/runlog both_verdicts"),
    ],
    "lib/model.py": [
        Change('or type(e).__name__ == "ReadTimeout"', "", "life/model late_answer"),
    ],
    "methods/groups.py": [
        Change(
            "/ (run.cfg.batch_size * G))", "/ run.cfg.batch_size)", "spec/grpo gradient_of_grpo"
        ),
        Change("epoch * G + i)", "epoch + i)", "spec/grpo comes_twice"),
    ],
    "methods/grpo.py": [
        Change("rewards_G.std()", "rewards_G.std(correction=0)", "spec/grpo grpo_advantages"),
        Change("torch.minimum(", "torch.maximum(", "spec/grpo grpo_loss"),
    ],
    "methods/divergences.py": [
        Change("terms = beta * of_teacher", "terms = of_teacher", "spec/ablations generalized_jsd"),
        Change("twice[:, 0] = False", "pass", "spec/ablations local_support"),
    ],
    "methods/teachers.py": [
        Change(".lerp_(p.detach(), moved)", "", "spec/rlsd renewed"),
    ],
    "methods/opsd.py": [
        Change(
            "run.lm.disable_adapter()",
            "divergences.contextlib.nullcontext()",
            "spec/opsd step_of_opsd",
        ),
    ],
    "methods/sdpo.py": [
        Change("if j != i and r >= 0.5", "if r >= 0.5", "spec/sdpo first_other"),
        Change("1 - cfg.teacher_decay", "cfg.teacher_decay", "spec/sdpo two_processes"),
    ],
    "methods/rlsd.py": [
        Change("exp(sign * gap_T.detach())", "exp(gap_T.detach())", "spec/rlsd by_hand"),
    ],
    "methods/ablations.py": [
        Change(
            "cfg.drop_truncated and roll.truncated",
            "cfg.drop_truncated",
            "spec/ablations solution_that_was_cut",
        ),
        Change("if cfg.clip else math.inf", "if True else math.inf", "spec/ablations changed_step"),
        Change("if other.id != x.id", "if True", "spec/ablations donor"),
        Change('"title": 1, "none": 0', '"title": 2, "none": 0', "spec/ablations what_is_left"),
    ],
    "extras/on_trl.py": [
        Change("cfg.loss_temperature or cfg.temperature", "1.0", "on_trl/grpo that_of and not two"),
        Change("-len(slope_T) * slope_T", "-slope_T", "on_trl/gradient that_of_sgsd_py and lora"),
        Change("[len(context) - 1 :]", "[len(context) :]", "on_trl/gradient in_bf16"),
        Change(
            "cast_lm_head_to_fp32=True", "cast_lm_head_to_fp32=False", "on_trl/gradient in_bf16"
        ),
        Change("model.remove_dropout(self.model)", "pass", "on_trl/edges dropout"),
        Change("((run.cfg.steps - run.step) / run.cfg.steps)", "1", "on_trl/run own_schedule"),
        Change(
            "dtype=torch.float32, output", "dtype=torch.bfloat16, output", "on_trl/gradient shards"
        ),
        Change("job.ids = ids[: job.limit]", "job.ids = ids", "on_trl/vllm greedy"),
        Change("job.prompt for job in turn] or", "[1] for job in turn] or", "on_trl/vllm greedy"),
    ],
}

NO_COPY = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache")
LOADED = ["torch", "transformers", "peft", "sentence_transformers", "hypothesis", "pytest"]
HAS_TRL = importlib.util.find_spec("trl") is not None
SECONDS = 600  # for the tests of a change; whatever takes longer counts as fallen
FELL, SURVIVED, EQUIVALENT = "a test fell", "survived", "the same numbers"
STALE = "its text is not in the file exactly once"

Outcomes = dict[str, list[tuple[Change, str]]]  # by file


def chosen(word: str) -> dict[str, list[Change]]:
    """The changes by file: those that have the word in them, and whose tests can be run here."""
    changes: dict[str, list[Change]] = {}
    for file, changes_of_file in CHANGES.items():
        if HAS_TRL or not file.endswith("on_trl.py"):
            changes[file] = [x for x in changes_of_file if word in f"{file} {x.before} {x.tests}"]
    return {file: changes_of_file for file, changes_of_file in changes.items() if changes_of_file}


def run_tests(tree: pathlib.Path, tests: Sequence[str]) -> None:
    """In a process of its own: run tests in a tree; the exit code is pytest's."""
    import pytest

    os.chdir(tree)
    sys.path[:] = [str(tree), *(path for path in sys.path if path != str(ROOT))]
    with open(tree / "log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os._exit(pytest.main(["-x", "-q", *tests]))


def exit_code(tree: pathlib.Path, tests: str) -> int:
    """Pytest's, for tests as `Change` names them: 0 all passed, 1 one fell, or took too long."""
    place, _, words = tests.partition(" ")
    folder, _, name = place.partition("/")
    argv = [f"tests/{folder}/test_{name}.py", "-k", words]
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(tree, argv))
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
        return 1
    return process.exitcode


def outcome(tree: pathlib.Path, file: str, change: Change) -> str:
    """What becomes of a change in a copy of the tree, which is afterwards as before."""
    text = (tree / file).read_text()
    if text.count(change.before) != 1:
        return STALE
    (tree / file).write_text(text.replace(change.before, change.after))
    code = exit_code(tree, change.tests)
    (tree / file).write_text(text)
    if code not in (0, 1):
        raise SystemExit(f"{change.tests}: pytest ended with {code}\n{(tree / 'log').read_text()}")
    if code:
        return FELL
    return EQUIVALENT if change.same_numbers_because else SURVIVED


def refuse_failing(tree: pathlib.Path, changes: dict[str, list[Change]]) -> None:
    """End the command if one of the tests fails without a change."""
    words_of: dict[str, set[str]] = {}
    for change in itertools.chain.from_iterable(changes.values()):
        place, _, words = change.tests.partition(" ")
        words_of.setdefault(place, set()).add(f"({words})")
    for place, all_words in words_of.items():
        if exit_code(tree, f"{place} {' or '.join(sorted(all_words))}"):
            raise SystemExit(f"{place}: fails without a change\n{(tree / 'log').read_text()}")


def outcomes_of(changes: dict[str, list[Change]]) -> Outcomes:
    """What becomes of each change, in a copy of the working tree."""
    outcomes: Outcomes = {file: [] for file in changes}
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder, "tree")
        shutil.copytree(ROOT, tree, ignore=NO_COPY)
        refuse_failing(tree, changes)
        for file, changes_of_file in changes.items():
            for change in changes_of_file:
                kind = outcome(tree, file, change)
                outcomes[file].append((change, kind))
                print(f"{file}: {change.before}: {kind}", file=sys.stderr)
    return outcomes


def tables(outcomes: Outcomes) -> list[str]:
    """How many changes of each file came to what, and those that no test sees."""
    kinds = (FELL, EQUIVALENT, SURVIVED)
    lines = head_of(["file", "changes", *kinds])
    for file, changes in outcomes.items():
        counts = collections.Counter(kind for _, kind in changes)
        lines.append(row_of([f"`{file}`", len(changes), *(counts[kind] for kind in kinds)]))
    lines += ["", *head_of(["no test falls for", "in its place", "why"])]
    for file, changes in outcomes.items():
        for change, kind in changes:
            if kind != FELL:
                why = change.same_numbers_because if kind == EQUIVALENT else kind
                lines.append(row_of([f"`{file}`: `{change.before}`", f"`{change.after}`", why]))
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Change lines of the method, and run their tests.")
    parser.add_argument("--only", default="", help="a word in the change, its file or its tests")
    parser.add_argument("--list", action="store_true", help="print the changes, and run nothing")
    args = parser.parse_args(argv)
    changes = chosen(args.only)
    if args.list:
        for file, changes_of_file in changes.items():
            for change in changes_of_file:
                print(f"{file}: {change.before} -> {change.after} ({change.tests})")
        return 0
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True  # a changed file may have the size and second of the one before
    for name in [*LOADED, *(["trl"] if HAS_TRL else [])]:
        importlib.import_module(name)  # once, for all processes
    outcomes = outcomes_of(changes)
    print("\n".join(tables(outcomes)))
    left = {kind for _, kind in itertools.chain.from_iterable(outcomes.values())}
    return int(bool(left & {SURVIVED, STALE}))


if __name__ == "__main__":
    sys.exit(main())
