"""Eq. 1: y ~ p_S(. | x), sampled from the student's prompt, and the verifier's outcome r (§2).

A sample is a pure function of its key and place. The reference for decoding is a plain loop: no
cache, no padding, one row alone. Ids travel unchanged, and the outcome comes from their text.
"""

import functools
import itertools
import math
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import small_run
import torch
from conftest import decoded, make_model, make_tokenizer, one_line, watched
from tokenizers import AddedToken
from transformers import Gemma3Config, GenerationConfig

import rollout
from lib.problems import Problem
from lib.verify import Verdict
from rollout import Sampling

SAMPLING = Sampling(1.1, 0.95, 20, 24)  # Tab. 11, but for the length
KINDS = ["qwen3", "gemma2", "qwen3_5_text"]
KINDS += [pytest.param(kind, marks=pytest.mark.long) for kind in ("llama", "gemma3_text")]


def prompts(tokenizer, n):
    """Prompts of many lengths."""
    texts = [f"Problem {i}: " + "x" * (3 * i % 17) for i in range(n)]
    return [rollout.chat_ids(tokenizer, text, thinking="closed") for text in texts]


def keys_of(n):
    return [rollout.sample_key(0, 1, str(i)) for i in range(n)]


@pytest.mark.parametrize("kind", KINDS)
def test_eq1_completions_equal_a_plain_loop_whatever_the_batch_and_the_order(kind, tokenizer):
    """Each token is the draw of (key, place) from the logits of prompt and prefix alone.

    Rows of unequal length leave and join all the time: completions run from 1 token to the limit.
    Any share of the prompts, in any order, as a rank may have it, gets what it gets among all.
    Prompts are longer than the window of a sliding layer; layers of linear attention keep states.
    """
    model = make_model(kind)
    ids, keys, sampling = prompts(tokenizer, 12), keys_of(12), Sampling(1.1, 0.95, 20, 30)
    free = rollout.generate(model, tokenizer, ids, sampling, keys)
    model.generation_config.eos_token_id = free[0][20]  # a second stop id
    completions = rollout.generate(model, tokenizer, ids, sampling, keys, 3)
    assert len({len(x) for x in completions}) > 3 and max(map(len, completions)) == 30
    for part, rows in ((range(12), 1), (range(12), 12), ([7, 2, 11, 0, 5], 2)):
        some_ids, some_keys = [ids[i] for i in part], [keys[i] for i in part]
        some = rollout.generate(model, tokenizer, some_ids, sampling, some_keys, rows)
        assert some == [completions[i] for i in part]
    for prompt, key, completion in zip(ids, keys, completions):
        row = torch.tensor([prompt + completion])
        with torch.no_grad():
            logits_LV = model(input_ids=row, use_cache=False).logits[0]
        for t, token in enumerate(completion):
            u = rollout.uniforms(np.array([key], dtype=np.uint64), np.array([t]))
            logits_1V = logits_LV[None, len(prompt) - 1 + t]
            assert rollout.select_tokens(logits_1V, torch.from_numpy(u), sampling) == token


def test_draws_are_uniform_independent_and_differ_by_seed_step_problem_and_sample():
    names = itertools.product(range(3), range(3), ("a", "b", "1"), range(3))
    assert len({rollout.sample_key(*name) for name in names}) == 81
    keys = np.array(keys_of(2000), dtype=np.uint64)
    u = np.stack([rollout.uniforms(keys, t) for t in range(50)])
    assert 0 <= u.min() and u.max() < 1
    # 100,000 draws: standard errors .0009 and .0002
    assert abs(u.mean() - 0.5) < 0.005 and abs(u.var() - 1 / 12) < 0.002
    assert abs(np.corrcoef(u[0], u[1])[0, 1]) < 0.1


@pytest.mark.parametrize(
    ("p", "sampling", "want"),
    [  # in the order of the vocabulary: the CDF is .1, .3, .6, 1
        ([0.1, 0.2, 0.3, 0.4], Sampling(1.0, 1.0, 0), [0, 0, 1, 2, 3]),
        ([0.1, 0.2, 0.3, 0.4], Sampling(1.0, 1.0, 2), [2, 2, 2, 3, 3]),  # .3 / .7 = .43
        ([0.1, 0.2, 0.3, 0.4], Sampling(1.0, 0.65, 0), [2, 2, 2, 3, 3]),  # .4 + .3 reach .65
        ([0.1, 0.2, 0.3, 0.4], Sampling(1.0, 0.75, 0), [1, 1, 1, 3, 3]),  # .2 as well: .22, .56, 1
        ([0.1, 0.2, 0.3, 0.4], Sampling(0.0, 1.0, 0), [3, 3, 3, 3, 3]),
        ([0.1, 0.2, 0.3, 0.4], Sampling(0.5, 1.0, 0), [0, 1, 1, 3, 3]),  # squares: .03 .17 .47 1
        ([0.5, 0.25, 0.125, 0.125], Sampling(1.0, 0.75, 0), [0, 0, 0, 0, 1]),  # .5 + .25 are .75
        # equal logits stay or go together, also in a nucleus that is wider than a short list
        ([1 / 3000] * 3000, Sampling(1.0, 0.9, 0), [0, 270, 330, 1770, 2970]),
        ([1 / 3000] * 3000, Sampling(1.0, 1.0, 5), [0, 270, 330, 1770, 2970]),
    ],
)
def test_temperature_top_p_and_top_k_by_hand(p, sampling, want):
    logits_BV = torch.tensor([p]).log().expand(5, len(p))
    u_B = torch.tensor([0.0, 0.09, 0.11, 0.59, 0.99], dtype=torch.float64)
    assert rollout.select_tokens(logits_BV, u_B, sampling).tolist() == want


def test_the_models_own_generation_config_has_no_say_and_nothing_warns(tokenizer):
    model, ids = make_model(), prompts(tokenizer, 3)
    want = rollout.generate(model, tokenizer, ids, SAMPLING, [1, 2, 3])
    settings = {"temperature": 0.01, "top_k": 1, "do_sample": True, "repetition_penalty": 9.0}
    model.generation_config.update(**settings, max_new_tokens=3, min_new_tokens=2)
    config = model.generation_config
    with warnings.catch_warnings():  # the cache has another name in newer transformers
        warnings.simplefilter("error")
        assert rollout.generate(model, tokenizer, ids, SAMPLING, [1, 2, 3]) == want
    assert model.generation_config is config


def test_a_stream_yields_turn_by_turn_and_puts_the_mode_back(tokenizer):
    model, ids = make_model().train(), prompts(tokenizer, 6)

    def stream(ids):
        jobs = [rollout.Job(i, prompt, i, 24) for i, prompt in enumerate(ids)]
        return rollout.stream(model, tokenizer, jobs, SAMPLING, 2)

    turns = list(stream(ids))
    finished = [job.index for turn in turns for job in turn]
    assert sorted(finished) == list(range(6)) and max(map(len, turns)) <= 2 and [] in turns
    left_early = stream(ids)
    next(left_early)
    assert not model.training and not torch.is_inference_mode_enabled()
    left_early.close()
    assert model.training
    one_line(lambda: next(stream([*ids[:5], []])), "prompts that are not empty")


def test_the_youngest_rows_leave_where_memory_is_full_and_are_read_again():
    """Prompts of 50, 40 tokens each, turns of 16. A row has 128 places more than the longest has
    tokens. Three have room for 186 each: the third leaves when they have 67 tokens, and two have
    room for 279. Those end, the third is read again with the fourth, and so on: never three."""
    model, jobs = make_model(eos_token_id=None), [(50, 40)] * 6
    whole = decoded(model, jobs, 6)
    with watched(model) as passes:
        in_turn = decoded(model, jobs, 6, places=3 * 186)
    reads = [shape for shape in passes[1:] if shape[1] > 1]  # the first pass measures
    assert reads == [(3, 50), (2, 67), (1, 50), (1, 50)] and [*in_turn] == [*range(6)]
    assert in_turn == whole and {*map(len, whole.values())} == {40}
    assert decoded(model, jobs, 2, places=3 * 186) == whole
    assert decoded(model, jobs, 6, places=1) == whole  # one row is decoded in any memory


def test_rows_are_read_together_up_to_16384_tokens_and_a_longer_one_alone():
    """Padding included: their mask has rows x longest^2 numbers."""
    one_head = {"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8}
    model = make_model(eos_token_id=None, max_position_embeddings=20000, **one_head)
    with watched(model) as passes:
        decoded(model, [(n, 1) for n in (9, 4000, 4096, 20, 8, 16400, 7)], 7)
    shapes = passes[1:]
    assert shapes == [(4, 4096), (1, 8), (1, 16400), (1, 7)]


def test_a_context_that_rope_stretches_is_as_long_as_that():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}
    llama3 = {**yarn, "rope_type": "llama3"}
    cases = (1000, None, 1000), (1000, yarn, 4000), (3000, llama3, 3000), (None, None, math.inf)
    for most, rope, longest in cases:
        limits = SimpleNamespace(max_position_embeddings=most, rope_parameters=rope)
        settings = SimpleNamespace(get_text_config=lambda limits=limits: limits)
        assert rollout.context_limit(SimpleNamespace(config=settings)) == longest


def test_a_reply_ends_with_the_context_as_at_its_limit():
    """S35. There is none to a prompt that fills the context; its job is done all the same."""
    model = make_model("gpt2", max_position_embeddings=64, eos_token_id=None)
    long = decoded(model, [(50, 99), (64, 9), (10, 20), (63, 9), (70, 9)], 3)
    assert [len(long[i]) for i in range(5)] == [14, 0, 20, 1, 0]
    assert long == decoded(model, [(50, 14), (64, 9), (10, 20), (63, 1), (70, 9)], 3)


def test_no_row_is_fed_past_the_context_while_it_waits_for_others():
    """GPT-2 has no vector for a place behind its context. A row may end there while it is read."""
    model = make_model("gpt2", max_position_embeddings=64, eos_token_id=None)
    three = [(10, 54), (20, 40), (30, 34)]  # at 560 places the third leaves with a token to go
    for jobs, places in (([(50, 14), (10, 54)], 0), ([(63, 1), (10, 54)], 0), (three, 560)):
        together = decoded(model, jobs, 3, places)
        assert together == decoded(model, jobs, 1)
        assert [len(together[i]) for i in range(len(jobs))] == [limit for _, limit in jobs]


def test_a_completion_ends_on_either_stop_id_or_is_marked_as_truncated(tokenizer):
    """S4."""
    model, ids = make_model(), prompts(tokenizer, 6)
    free = rollout.generate(model, tokenizer, ids, SAMPLING, range(6))
    stop = free[0][7]  # some id that does come up
    model.generation_config.eos_token_id = [265, stop]
    cut = rollout.generate(model, tokenizer, ids, SAMPLING, range(6))
    for a, b in zip(free, cut):
        assert b == (a[: a.index(stop) + 1] if stop in a else a)
    x = SimpleNamespace(id="x", problem="x", answer="1")
    jobs = [rollout.Job(i, ids[i], i, 0, x, cut[i]) for i in range(6)]
    stops = rollout.stop_ids(model, tokenizer)
    (turn,) = rollout.rollouts(tokenizer, stops, small_run.Exact(), [jobs])
    assert [job for job, _ in turn] == jobs
    rolls = [roll for _, roll in turn]
    assert [roll.completion_ids for roll in rolls] == cut
    assert [roll.truncated for roll in rolls] == [x[-1] not in (265, stop) for x in cut]
    assert {(roll.r, roll.pred) for roll in rolls} == {(-1, None)}


def test_stop_ids_are_the_tokenizers_and_all_of_the_models_and_none_is_refused():
    """Gemma 3 with images names them in its text config alone."""
    config = Gemma3Config(text_config={"eos_token_id": [1, 106], "num_hidden_layers": 1})
    gemma = SimpleNamespace(config=config, generation_config=GenerationConfig())
    model, tokenizer = make_model(eos_token_id=None), make_tokenizer()
    assert rollout.stop_ids(gemma, tokenizer) == [1, 106, 265]
    assert rollout.stop_ids(model, tokenizer) == [265]
    tokenizer.eos_token = None
    one_line(lambda: rollout.generate(model, tokenizer, [[1]], SAMPLING, [1]), "`eos_token_id`")


def judged(tokenizer, prompt, completion, verifier=None):
    x = Problem("p7", "p", "5")
    job, verifier = rollout.Job(0, prompt, 0, 0, x, completion), verifier or small_run.Exact()
    (((_, roll),),) = rollout.rollouts(tokenizer, [265], verifier, [[job]])
    return roll


@pytest.mark.parametrize("verdict", [True, False, np.True_, np.False_, 0.7, 1, -1, None])
def test_a_verdict_that_is_no_bool_is_refused_with_its_problem(verdict, tokenizer):
    """numpy's are bools."""
    verifier = SimpleNamespace(judge=lambda cases: [Verdict("5", verdict)])
    if isinstance(verdict, bool | np.bool_):
        assert judged(tokenizer, [1], [2], verifier).r == (1 if verdict else -1)
    else:
        call = functools.partial(judged, tokenizer, [1], [2], verifier)
        one_line(call, f"got {verdict} for problem p7")


def test_an_outcome_comes_from_the_text_which_never_becomes_ids_again(tokenizer):
    r"""The sampled ids of "\boxed{5}", spelt letter by letter, stay as they are."""
    spelt = [tokenizer.encode(letter)[0] for letter in "so " * 99 + r"\boxed{5}"] + [265]
    roll = judged(tokenizer, [1], spelt)
    assert (roll.completion_ids, roll.text[-9:]) == (spelt, r"\boxed{5}")
    assert (roll.pred, roll.r, roll.gold, roll.truncated) == ("5", 1, "5", False)
    assert tokenizer.encode(roll.text) != spelt


@pytest.mark.parametrize("is_special", [False, True])
def test_a_think_block_that_the_prompt_left_open_holds_no_answer(is_special):
    """Also where its tags are special tokens: else a cut thought would be right."""
    tokenizer = make_tokenizer()
    for tag in ("<think>", "</think>") if is_special else ():
        tokenizer.add_tokens([AddedToken(tag, special=True)], special_tokens=True)
        assert tokenizer.decode(tokenizer.encode(tag), skip_special_tokens=True) == ""
    for prompt, text, pred in (
        ("Problem<think>\n", r"maybe \boxed{5}? wait", None),
        ("Problem<think>\n", r"\boxed{4}</think> so \boxed{5}", "5"),
        ("<think></think>", r"\boxed{5}", "5"),
        ("Problem", r"<think>maybe \boxed{5}, or", None),
    ):
        ids = tokenizer.encode(f"{text}<|im_end|>")
        roll = judged(tokenizer, tokenizer.encode(prompt), ids)
        assert (roll.pred, roll.r, roll.text) == (pred, 1 if pred else -1, text)
