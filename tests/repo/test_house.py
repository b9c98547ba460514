"""The house is in order, the names that others import are there, and faults are seen."""

import importlib
import inspect

import conftest  # noqa: F401  (the project on the path)
import house
import pytest

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
        "masked_token_ids": "tokenizer",
    },
    "rollout": {
        "extract_answer": "text",
        "Verifier": "timeout_s workers",
        "Verifier.verify": "self gold pred",
        "Verifier.verify_many": "self pairs",
        "Verifier.outcome": "self gold text",
        "Verifier.close": "self",
        "chat_ids": "tokenizer text thinking",
        "generate": "model tokenizer prompt_ids sampling keys",
        "token_logprobs": "model prompt_ids completion_ids grad",
        "Rollout": "problem_id problem gold prompt_ids completion_ids text pred r truncated",
    },
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
        "evolve": "bank window step complete * update_every success_gate max_new_items "
        "dynamic_capacity",
    },
    "eval": {
        "avg_at_k": "correct_PK",
        "pass_at_k": "correct_PK k",
        "maj_at_k": "preds golds verify",
    },
    "baselines": {
        "grpo_advantages": "rewards_G",
        "grpo_loss": "",
        "generalized_jsd": "logits_s logits_t beta",
    },
}


def test_the_imports_and_columns_of_the_top_level_files_keep_the_rules(capsys):
    assert house.check() == []
    assert "sgsd.py" in capsys.readouterr().out


def test_each_name_of_the_contract_stands_in_its_module_and_takes_its_parameters():
    for module, names in CONTRACT.items():
        for name, wanted in names.items():
            found = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
            parameters = list(inspect.signature(found).parameters)
            first, _, keywords = wanted.partition("*")
            assert parameters[: len(first.split())] == first.split(), f"{module}.{name}"
            assert set(keywords.split()) <= set(parameters), f"{module}.{name}"


BROKEN = {
    "a cycle": ({"rollout": "import skills", "skills": "import rollout"}, "rollout.py imports"),
    "an import from below, in a function": (
        {"eval": "def f():\n    from sgsd import train", "sgsd": ""},
        "eval.py imports sgsd",
    ),
    "a file without a place": ({"helpers": ""}, "helpers.py has no place"),
    "a wide line": ({"sgsd": "#" * 101}, "sgsd.py:1 has 101 columns"),
    "a packed line": ({"sgsd": "x = 1  # fmt: skip"}, "sgsd.py:1 is kept from the formatter"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_rule_is_named(what, tmp_path):
    texts, fault = BROKEN[what]
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert fault in "\n".join(house.check(tmp_path))
