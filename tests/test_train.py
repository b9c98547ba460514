"""One update against plain loops; same seed, same bits; stopped and resumed equals uninterrupted; what a run leaves on disk."""

import dataclasses
import itertools
import json
import math

import driver
import pytest
import torch
from conftest import make_bank
from safetensors.torch import load_file

import distributed as D
import rollout as R
import runlog
import sgsd
import skills as S

WORLD = D.World(0, 1, torch.device("cpu"))


def config(world_dir, out, **changes):
    base = dict(
        model=str(world_dir / "model"),
        data=str(world_dir / "data.jsonl"),
        bank=str(world_dir / "bank.json"),
        encoder=str(world_dir / "encoder"),
        out=str(out),
        num_teachers=3,
        batch_size=4,
        max_new_tokens=20,
        updates=4,
        checkpoint_every=2,
        audit_every=2,
        lora_rank=4,
        lora_alpha=8,
        learning_rate=1e-2,
        eps_a=0.2,
    )
    return sgsd.Config(**{**base, **changes})


def make_run(world_dir, out, resume=False, **changes):
    run = sgsd.prepare(config(world_dir, out, **changes), WORLD, resume)
    run.verifier = driver.CoinVerifier()
    return run


def train(world_dir, out, resume=False, **changes):
    run = make_run(world_dir, out, resume, **changes)
    sgsd.train(run, resume)
    return run


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def timeless(metrics):
    return [{k: v for k, v in m.items() if k not in ("seconds", "memory_gb")} for m in metrics]


def test_gradient_of_an_update_equals_plain_loops(world_dir, tmp_path):
    """Replicated students, full logits, the paper's formulas written out: the layout that nothing here uses."""
    run = make_run(world_dir, tmp_path / "run")
    for name, p in run.params.items():  # B = 0 at the start would leave A without a gradient
        torch.nn.init.normal_(
            p, std=0.1, generator=torch.Generator().manual_seed(sum(map(ord, name)))
        )
    records, _ = sgsd.accumulate(run, 1)
    got = {name: p.grad.clone() for name, p in run.params.items()}
    run.optimizer.zero_grad()

    def logps(prompt, completion):
        logits = run.model(input_ids=torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
        return logits[len(prompt) - 1 : -1].gather(1, torch.tensor(completion)[:, None])[:, 0]

    total = 0.0
    batch = [x for x, _ in sgsd.minibatch(run.problems, run.cfg, 1)]
    for x, rec in zip(batch, records):
        assert rec["problem_id"] == x.id and rec["r"] == (1 if int(x.answer) % 4 == 1 else -1)
        y, m = (
            rec["completion_ids"],
            torch.tensor([float(i not in run.masked_ids) for i in rec["completion_ids"]]),
        )
        pairs = run.bank.retrieve(x.problem, 3, run.embed)
        weights = [math.exp((p.s_g + p.s_e) / 2) for p in pairs]
        for k, pair in enumerate(pairs):
            with torch.no_grad():
                teacher = logps(
                    R.chat_ids(run.tokenizer, S.render_teacher(pair, x.problem), thinking=True), y
                )
            gap = teacher - logps(
                R.chat_ids(run.tokenizer, S.render_student(x.problem), thinking=False), y
            )
            a = float((m * gap.detach().clamp(-3, 3)).sum() / m.sum())
            rho = 0 if abs(a) <= 0.2 else rec["r"] * (1 if a > 0 else -1)
            assert rho == rec["rho"][k] and a == pytest.approx(rec["a"][k], abs=1e-4)
            gate = math.log(2) - torch.log(1 + torch.exp(-(gap**2) / 2))
            total = total + weights[k] / sum(weights) * rho * (m * gate).sum() / m.sum() / 4
    total.backward()
    assert {r for rec in records for r in rec["rho"]} >= {-1, 1} and {
        rec["r"] for rec in records
    } == {-1, 1}
    assert float(total.detach()) == pytest.approx(sum(rec["loss"] for rec in records) / 4, abs=1e-5)
    for name, p in run.params.items():
        torch.testing.assert_close(got[name], p.grad, atol=2e-5, rtol=1e-3)


def test_same_seed_same_bits_and_another_seed_differs(world_dir, tmp_path):
    runs = [train(world_dir, tmp_path / str(i), seed=seed) for i, seed in enumerate((0, 0, 1))]
    a, b, c = [
        (tmp_path / str(i) / "checkpoints/step_000004/adapter_model.safetensors").read_bytes()
        for i in range(3)
    ]
    assert a == b and a != c
    logs = [(tmp_path / str(i) / "rollouts.jsonl").read_text() for i in range(3)]
    assert logs[0] == logs[1] != logs[2]
    assert all(torch.isfinite(p).all() for run in runs for p in run.params.values())


def test_stopped_and_resumed_equals_uninterrupted(world_dir, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(world_dir, whole)
    run = make_run(world_dir, parts)
    step, original = [0], sgsd.update

    def update_then_signal(run, s):
        step[0] = s
        run.stop = s == 2
        return original(run, s)

    sgsd.update = update_then_signal
    try:
        sgsd.train(run, False)
    finally:
        sgsd.update = original
    assert (
        step[0] == 2
        and (parts / "checkpoints/step_000002").exists()
        and len(rows(parts / "metrics.jsonl")) == 2
    )
    with open(
        parts / "metrics.jsonl", "a"
    ) as f:  # what a kill in the third update may leave behind
        f.write(json.dumps({"step": 3, "loss": 9}) + "\n" + '{"step": 4, "lo')
    train(world_dir, parts, resume=True)
    for name in ("adapter_model.safetensors", "trainer.safetensors"):
        assert (whole / "checkpoints/step_000004" / name).read_bytes() == (
            parts / "checkpoints/step_000004" / name
        ).read_bytes()
    for name in ("rollouts.jsonl", "tokens.jsonl"):
        assert (whole / name).read_text() == (parts / name).read_text()
    assert timeless(rows(whole / "metrics.jsonl")) == timeless(rows(parts / "metrics.jsonl"))


def test_what_a_run_leaves_on_disk(world_dir, tmp_path):
    from peft import PeftModel

    run, out = train(world_dir, tmp_path / "run"), tmp_path / "run"
    saved = json.loads((out / "config.json").read_text())
    assert saved["settings"]["num_teachers"] == 3 and saved["versions"]["torch"]
    assert S.SkillBank.load(out / "bank/bank.json") == S.SkillBank.load(world_dir / "bank.json")
    metrics, rolls, tokens = (
        rows(out / f"{name}.jsonl") for name in ("metrics", "rollouts", "tokens")
    )
    assert (
        [m["step"] for m in metrics] == [1, 2, 3, 4]
        and len(rolls) == 16
        and {t["step"] for t in tokens} == {2, 4}
    )
    assert [m["learning_rate"] for m in metrics] == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])
    for m in metrics:
        mine = [r for r in rolls if r["step"] == m["step"]]
        assert (
            m["loss"] == pytest.approx(sum(r["loss"] for r in mine) / 4)
            and m["success"] == sum(r["r"] == 1 for r in mine) / 4
        )
        assert m["rho_distilled"] + m["rho_reversed"] + m["rho_ignored"] == 12
        assert m["rho_distilled"] == m["rho_distilled_success"] + m["rho_distilled_failure"]
    for t in tokens:  # credit is Eq. 20 of the logged gaps
        r = next(r for r in rolls if (r["step"], r["problem_id"]) == (t["step"], t["problem_id"]))
        want = sgsd.token_credit(
            torch.tensor(t["delta"]),
            torch.tensor(t["mask"]),
            torch.tensor(r["alpha"]),
            torch.tensor(r["rho"]).float(),
            1.0,
        )
        torch.testing.assert_close(torch.tensor(t["credit"]), want)
        assert run.tokenizer.decode(r["completion_ids"], skip_special_tokens=True) == r["text"]
    base, _ = R.load_model(str(world_dir / "model"), torch.device("cpu"))
    again = PeftModel.from_pretrained(base, out / "checkpoints/step_000004")
    ids = torch.tensor([[1, 2, 3, 4]])
    torch.testing.assert_close(again(input_ids=ids).logits, run.model.eval()(input_ids=ids).logits)
    assert (
        not list(out.rglob("*.tmp"))
        and not list(out.rglob("*.pt"))
        and not list(out.rglob("*.bin"))
    )


def test_only_adapters_train_and_in_fp32(world_dir, tmp_path):
    run = make_run(world_dir, tmp_path / "run", dtype="bfloat16")
    assert {p.dtype for p in run.params.values()} == {torch.float32}
    assert len(run.params) == 2 * 7 * 2 and all(
        "lora_" in n for n in run.params
    )  # A and B, seven projections, two layers
    frozen = {n: p.clone() for n, p in run.model.named_parameters() if n not in run.params}
    sgsd.train(run, False)
    assert all(torch.equal(p, frozen[n]) for n, p in run.model.named_parameters() if n in frozen)


def test_a_gradient_that_is_not_finite_skips_the_update(world_dir, tmp_path):
    run = make_run(world_dir, tmp_path / "run")
    sgsd.accumulate(run, 1)
    next(iter(run.params.values())).grad[0, 0] = float("nan")
    before = [p.clone() for p in run.params.values()]
    assert not math.isfinite(sgsd.update(run, 1))
    assert all(torch.equal(a, b) for a, b in zip(before, run.params.values())) and all(
        p.grad is None for p in run.params.values()
    )


def test_no_teachers_no_loss(world_dir, tmp_path):
    run = make_run(world_dir, tmp_path / "run")
    run.bank = S.SkillBank(make_bank().general_skills, [])  # S8
    records, _ = sgsd.accumulate(run, 1)
    assert all(r["rho"] == [] and r["loss"] == 0 for r in records)
    assert sgsd.update(run, 1) == 0.0
    m = runlog.summarize(1, records, 0.0, 0.0, {"gen": 0, "score": 0, "bwd": 0}, 0.0)
    assert m["no_teachers"] == 4 and "rho +0/-0/0:0" in runlog.log_line(m, 4)


def test_dropped_truncations_teach_nothing(world_dir, tmp_path):
    run = make_run(world_dir, tmp_path / "run", drop_truncated=True)
    records, _ = sgsd.accumulate(run, 1)
    assert all(r["truncated"] and r["loss"] == 0 for r in records) and sgsd.update(run, 1) == 0.0


def test_minibatches_cover_each_epoch_once():
    problems, cfg = [R.Problem(str(i), "x", "1") for i in range(10)], sgsd.Config(batch_size=4)
    seen = [x.id for step in range(1, 6) for x, _ in sgsd.minibatch(problems, cfg, step)]
    assert (
        sorted(seen[:10]) == sorted(seen[10:]) == sorted(map(str, range(10)))
        and seen[:10] != seen[10:]
    )
    two = sgsd.minibatch(
        problems[:2], cfg, 1
    )  # a problem that comes twice in an update is sampled twice
    assert len({key for _, key in two}) == 4


def test_prefixes_of_the_roles(world_dir, tmp_path):
    """S3: the student's think block is closed; a teacher's is left to the model, opened or closed."""
    text = {}
    for prefix in ("bare", "open", "closed"):
        run = make_run(world_dir, tmp_path / prefix, teacher_prefix=prefix)
        text[prefix] = run.tokenizer.decode(
            sgsd.prompt_ids(run, "x", "t", teacher=True)
        ).rpartition("assistant\n")[2]
        assert run.tokenizer.decode(sgsd.prompt_ids(run, "x", "s")).endswith(
            "assistant\n<think>\n\n</think>\n\n"
        )
    assert text == {"bare": "", "open": "<think>\n", "closed": "<think>\n\n</think>\n\n"}


def test_masked_ids(tokenizer):
    ids = sgsd.masked_token_ids(tokenizer)
    assert {tokenizer.decode([i]) for i in ids} == {
        "\n",
        "\n\n",
        "\n\n\n\n",
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        "</think>",
    }
    assert tokenizer.encode("#")[0] in sgsd.masked_token_ids(tokenizer, extra=True) - ids
    assert sgsd.token_mask([ids.copy().pop(), tokenizer.encode("5")[0]], ids).tolist() == [0, 1]


def test_adapter_state_round_trip(world_dir, tmp_path):
    out = tmp_path / "run"
    train(world_dir, out, updates=2)
    run = make_run(world_dir, out, resume=True, updates=2)
    assert sgsd.load_checkpoint(run) == 2
    saved = load_file(out / "checkpoints/step_000002/trainer.safetensors")
    for name, p in run.params.items():
        assert torch.equal(run.optimizer.state[p]["exp_avg"], saved[f"{name}.exp_avg"])


class FakeReplies:
    """A model that answers every extraction with one item named after its prompt, and merges by keeping all but the last."""

    def __init__(self, *_, **__):
        self.asked = 0

    def __call__(self, prompts):
        self.asked += len(prompts)
        return [self.answer(p) for p in prompts]

    def answer(self, prompt):
        key = "general_skills" if "key general_skills" in prompt else "common_mistakes"
        if "to merge:" in prompt:
            items = json.loads(
                prompt[prompt.index("to merge:\n") + 10 : prompt.index("\n\nReturn ONLY")]
            )
            return json.dumps({key: items[: max(1, len(items) - 1)]})
        name = prompt[prompt.index("What is") :][:20].strip()
        return json.dumps({key: [{f: f"{f} of {name}" for f in S.FIELDS[key]}]})


def test_a_run_makes_its_bank_and_evolves_it(world_dir, tmp_path, monkeypatch):
    """No --bank: cold start (Alg. 2); every second update: evolution (Alg. 4); stopped and resumed: the same banks (D9)."""
    monkeypatch.setattr(R, "make_complete", FakeReplies)
    settings = dict(bank="", cold_start=8, update_every=2, updates=4, max_new_items=2)
    run = train(world_dir, tmp_path / "whole", **settings)
    folder = tmp_path / "whole" / "bank"
    assert sorted(p.name for p in folder.glob("step_*")) == [
        "step_000000.json",
        "step_000002.json",
        "step_000004.json",
    ]
    banks = [S.SkillBank.load(folder / f"step_{i:06d}.json") for i in (0, 2, 4)]
    memories = rows(folder / "memories.jsonl")
    assert len(memories) == 8 and {m["problem_id"] for m in memories} == set(
        banks[0].metadata["seed_problems"]
    )
    assert not any("reference_answer" in m for m in memories)  # D3
    for a, b in itertools.pairwise(banks):
        for key in S.FIELDS:
            old, new = [
                [e for e in getattr(x, key) if not e[S.IDS[key]].startswith("dyn_")] for x in (a, b)
            ]
            assert old == new
        dynamic = [
            sum(e[S.IDS[key]].startswith("dyn_") for key in S.FIELDS for e in getattr(x, key))
            for x in (a, b)
        ]
        assert 0 < dynamic[1] <= dynamic[0] + 2
    assert run.bank == banks[2] == S.SkillBank.load(folder / "bank.json")
    metrics = rows(tmp_path / "whole/metrics.jsonl")
    assert metrics[0]["replies_read"] == 0 < metrics[1]["replies_read"] and metrics[3][
        "bank_skills"
    ] == len(run.bank.general_skills)
    assert {r["outcome"] for r in rows(folder / "replies.jsonl")} == {"read"}

    parts = make_run(world_dir, tmp_path / "parts", **settings)
    keep = sgsd.update
    monkeypatch.setattr(sgsd, "update", lambda run, s: setattr(run, "stop", s == 3) or keep(run, s))
    sgsd.train(parts, False)
    monkeypatch.setattr(sgsd, "update", keep)
    train(world_dir, tmp_path / "parts", resume=True, **settings)
    for name in (
        "bank/step_000004.json",
        "bank/memories.jsonl",
        "rollouts.jsonl",
        "checkpoints/step_000004/adapter_model.safetensors",
    ):
        assert (tmp_path / "whole" / name).read_bytes() == (
            tmp_path / "parts" / name
        ).read_bytes(), name


def test_no_memory_is_generated_twice(world_dir, tmp_path, monkeypatch):
    run = make_run(world_dir, tmp_path / "run", bank="", cold_start=6)
    made, keep = [], R.sample_rollouts
    monkeypatch.setattr(
        R,
        "sample_rollouts",
        lambda m, t, xs, *rest: made.extend(x.id for x in xs) or keep(m, t, xs, *rest),
    )
    args = (run.problems, run.model, run.tokenizer, run.verifier, FakeReplies(), WORLD)
    whole = S.make_bank(tmp_path / "a", *args, count=6, rows=2)
    lines = (tmp_path / "a/memories.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/memories.jsonl").write_text("".join(lines[:3]) + lines[3][:50])  # torn by a kill
    made.clear()
    assert S.make_bank(tmp_path / "b", *args, count=6, rows=2) == whole
    assert len(made) == 3 and (tmp_path / "b/memories.jsonl").read_text() == "".join(lines)


def test_three_broken_updates_end_the_run_and_it_can_go_on(world_dir, tmp_path, monkeypatch):
    run = make_run(world_dir, tmp_path / "run")
    keep = sgsd.D.sum_gradients
    monkeypatch.setattr(
        sgsd.D,
        "sum_gradients",
        lambda params, world: keep(params, world) or params[0].grad.fill_(float("inf")),
    )
    assert sgsd.train(run, False) == 1 and [
        m["skipped"] for m in rows(tmp_path / "run/metrics.jsonl")
    ] == [1, 1, 1]
    monkeypatch.setattr(sgsd.D, "sum_gradients", keep)
    again = make_run(world_dir, tmp_path / "run", resume=True)
    assert sgsd.train(again, True) == 0 and len(rows(tmp_path / "run/metrics.jsonl")) == 4


def test_an_error_in_an_update_is_one_clear_error(world_dir, tmp_path):
    run = make_run(world_dir, tmp_path / "run")
    run.cfg = dataclasses.replace(
        run.cfg, max_prompt_tokens=150
    )  # the student fits, a teacher does not
    with pytest.raises(
        D.UserError, match=r"teacher of p\d+: the prompt has .*in update 1; --resume"
    ):
        sgsd.train(run, False)
