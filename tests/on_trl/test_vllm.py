"""The writer of the bank on TRL, by `generate` and by vLLM; a vLLM in the trainer's process."""

import functools

import conftest
import pytest
import trl_worlds
from trl.trainer import grpo_trainer
from trl_worlds import PROBLEMS, settings

import distributed
import rollout
from lib import command
from rollout import Job, Sampling

GREEDY, SECOND = Sampling(temperature=0.0), Sampling(temperature=1.1, top_p=0.95, top_k=20)


def jobs_of(lefts):
    """Prompts of different lengths with these limits."""
    prompts = [conftest.make_tokenizer().encode(x.problem) for x in PROBLEMS]
    return [Job(i, prompts[i], key=i, limit=left) for i, left in enumerate(lefts)]


def replies_of(stream, jobs, sampling, rows=2):
    """{index: ids}; each job is done once."""
    done = [job for turn in stream(jobs, sampling, rows) for job in turn]
    assert sorted(job.index for job in done) == [job.index for job in jobs]
    return {job.index: job.ids for job in done}


class Engine:
    """In the place of TRL's vLLM: replies as long as the limit; it keeps what it is asked."""

    def __init__(self, generation_kwargs, **_):
        self.generation_kwargs, self.asked, self.synced = generation_kwargs, [], 0

    def sync_weights(self):
        self.synced += 1

    def generate(self, prompts, images, num_generations, profiler):
        given = self.generation_kwargs
        self.asked.append((len(prompts), given))
        rows = [[*range(given.get("max_tokens", 5))] for _ in prompts]
        return None, rows, [[[0.0]] * len(row) for row in rows], None


@pytest.fixture
def on_vllm(tmp_path, monkeypatch):
    """A trainer with that engine; call it with settings."""
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", Engine)

    def make(*words, **changes):
        lm = trl_worlds.policy(lora=False)
        lm.config.eos_token_id = [trl_worlds.END, 77]
        words = ("--use_vllm", *words, *trl_worlds.PLAIN)
        return trl_worlds.trainer(settings(tmp_path, **changes), lm, words=words)

    return make


# ------------------------------------------------------------------------------ by `generate`


@pytest.mark.parametrize("lora", [True, False])
def test_greedy_replies_are_those_of_sgsd_py_up_to_each_ones_limit(tmp_path, lora):
    of_trl = trl_worlds.trainer(settings(tmp_path), trl_worlds.policy(lora))
    own = functools.partial(rollout.stream, trl_worlds.policy(lora), of_trl.run.tokenizer)
    for rows in (1, 2, 12):
        replies = replies_of(of_trl.stream, jobs_of([3, 40, 9, 25, 1]), GREEDY, rows)
        assert replies == replies_of(own, jobs_of([3, 40, 9, 25, 1]), GREEDY, rows)
        assert [len(replies[i]) for i in (0, 4)] == [3, 1]


def test_sampled_replies_differ_and_end_on_stop_ids(tmp_path):
    of_trl = trl_worlds.trainer(settings(tmp_path), trl_worlds.policy(lora=True))
    jobs = [job for _ in range(6) for job in jobs_of([40])]
    replies = [tuple(job.ids) for turn in of_trl.stream(jobs, SECOND, 6) for job in turn]
    assert len({*replies}) == 6
    assert all(trl_worlds.END not in ids[:-1] for ids in replies)
    assert all(ids[-1] == trl_worlds.END or len(ids) == 40 for ids in replies)
    likeliest = replies_of(of_trl.stream, jobs_of([9]), Sampling(temperature=1.1, top_k=1))
    assert likeliest == replies_of(of_trl.stream, jobs_of([9]), GREEDY)


# ------------------------------------------------------------------------------------ by vLLM


def test_the_engine_samples_a_step_as_sgsd_py_and_ends_on_every_stop_id(on_vllm):
    """Of itself it knows those of the tokenizer and of generation_config.json."""
    of_trl = on_vllm()
    of_trl._tokenize_prompts([x.problem for x in PROBLEMS])
    wanted = {"temperature": 1.1, "top_p": 0.95, "top_k": 20, "max_tokens": 20}
    wanted["stop_token_ids"] = [77, trl_worlds.END]
    assert of_trl.vllm_generation.generation_kwargs == wanted


@pytest.mark.parametrize(
    "sampling, drawn",
    [(GREEDY, {"temperature": 0.0}), (SECOND, {"temperature": 1.1, "top_p": 0.95, "top_k": 20})],
)
def test_the_engine_writes_replies_with_settings_of_their_own(on_vllm, sampling, drawn):
    """All at once, by the present weights; each is cut at its own limit."""
    of_trl = on_vllm()
    engine, jobs = of_trl.vllm_generation, jobs_of([3, 40, 9])
    replies = replies_of(of_trl.stream, jobs, sampling, rows=1)
    ((count, given),) = engine.asked
    assert count == 3 and engine.synced == 1
    assert given.items() >= {**drawn, "max_tokens": 40}.items()
    assert given["stop_token_ids"] == [77, trl_worlds.END]
    assert [len(replies[i]) for i in range(3)] == [3, 40, 9]
    of_trl.state.global_step += 1
    replies_of(of_trl.stream, jobs_of([2]), sampling)
    assert engine.synced == 2


@pytest.mark.parametrize("lefts, count", [([3], 2), ([], 2), ([9, 9], 2)])
def test_each_process_asks_for_as_many_replies_of_one_limit(on_vllm, monkeypatch, lefts, count):
    """TRL gathers the prompts of processes, and takes their numbers for equal. The limit is the
    longest job's, or less: what the context leaves the longest prompt."""
    of_trl = on_vllm()
    context = rollout.context_limit(of_trl.run.lm)
    for longest, limit in ((30, 50), (context - 20, 20)):
        theirs = [(longest, 50), (30, 2)]  # tokens of the other process's prompts and replies
        monkeypatch.setattr(distributed, "all_gather", lambda ours, world, x=theirs: [ours, x])
        replies = replies_of(of_trl.stream, jobs_of(lefts), GREEDY)
        asked, given = of_trl.vllm_generation.asked[-1]
        assert (asked, given["max_tokens"]) == (count, limit)
        assert [len(ids) for ids in replies.values()] == lefts


def test_a_context_of_the_engine_that_is_too_short_is_an_error_of_one_line(on_vllm):
    of_trl = on_vllm("--vllm_max_model_length", "120")
    flag = "--vllm_max_model_length 120"
    conftest.one_line(of_trl.train, flag, kind=command.UserError)
    long = Job(0, [1] * 119, key=0, limit=50)
    replies_of(of_trl.stream, [long], GREEDY)  # a reply is cut there, as at its limit
    long.prompt.append(1)
    call = functools.partial(replies_of, of_trl.stream, [long], GREEDY)
    conftest.one_line(call, flag, kind=command.UserError)
