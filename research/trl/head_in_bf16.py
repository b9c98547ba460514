"""Supports and polarities in bf16: TRL's own head, and extras/on_trl.py's, against scoring.py.

    python research/trl/head_in_bf16.py                                    the tiny world
    python research/trl/head_in_bf16.py --model DIR --encoder DIR --problems 4

Rollouts of the base model in bf16, with draws of ours; K teachers of a bank score them three ways.
Errors are to scoring.py's log-probabilities, whose head is in fp32. Needs extras/requirements.txt.
"""

import argparse
import pathlib
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
from trl.trainer.utils import add_fused_lm_head

import rollout
import scoring
import sgsd
from extras import on_trl
from research.markdown_table import head_of, row_of


def trainer_of(args, folder):
    """A trainer whose model is in bf16; it never trains."""
    given = {"model": args.model, "encoder": args.encoder, "data": args.data, "bank": args.bank}
    given |= {"num_teachers": args.teachers, "max_new_tokens": args.tokens, "batch_size": 2}
    given |= {"per_device_train_batch_size": 2, "dtype": "bfloat16", "full": True}
    given |= {"use_cpu": True, "bf16": False, "report_to": "none", "output_dir": folder}
    return on_trl.prepare(on_trl.SGSDConfig(**given))


def rollouts_of(trainer, args):
    """Judged rollouts of the first problems."""
    jobs = []
    for i, x in enumerate(trainer.problems[: args.problems]):
        key = rollout.sample_key(0, 0, x.id)
        prompt = sgsd.student_prompt(trainer.parts, x.problem)
        jobs.append(rollout.Job(i, prompt, key, args.tokens, x))
    cfg, tokenizer = trainer.cfg, trainer.processing_class
    sampling = rollout.Sampling(cfg.temperature, cfg.top_p, cfg.top_k, args.tokens)
    turns = rollout.stream(trainer.model, tokenizer, jobs, sampling, len(jobs))
    rolls = []
    for judged in rollout.rollouts(tokenizer, trainer.stops, trainer.judge, turns):
        rolls += [roll for _, roll in judged]
    return rolls


def gaps_of(score, trainer, rolls):
    """The gaps [K, T] of each rollout. score(contexts, completions) -> log-probabilities [T]."""
    gaps = []
    for roll in rolls:
        pairs_K = trainer.bank.retrieve(roll.problem, trainer.cfg.num_teachers, trainer.embed)
        teachers_K = sgsd.teacher_prompts(trainer.parts, pairs_K, roll.problem)
        completions = [roll.completion_ids] * (1 + len(teachers_K))
        logpS_T, *logpT_KT = score([roll.prompt_ids, *teachers_K], completions)
        gaps.append(sgsd.log_prob_gap(torch.stack(logpT_KT), logpS_T))
    return gaps


def polarities(gaps, trainer, rolls, eps_a):
    """rho of all teachers, joined."""
    rhos = []
    for delta_KT, roll in zip(gaps, rolls):
        mask_T = sgsd.token_mask(roll.completion_ids, trainer.masked_ids)
        a_K = sgsd.robust_support(delta_KT, mask_T, trainer.cfg.c_delta)
        rhos.append(sgsd.polarity(a_K, roll.r, eps_a))
    return torch.cat(rhos)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tiny = ROOT / "tiny"
    parser.add_argument("--model", default=str(tiny / "model"), help="directory of the policy")
    parser.add_argument("--encoder", default=str(tiny / "encoder"), help="of the encoder")
    parser.add_argument("--data", default=str(tiny / "train.jsonl"), help="problems")
    parser.add_argument("--bank", default=str(ROOT / "banks/word_problems.json"), help="a bank")
    parser.add_argument("--problems", type=int, default=64, help="rollouts, one a problem")
    parser.add_argument("--teachers", type=int, default=8, help="K")
    parser.add_argument("--tokens", type=int, default=96, help="longest completion")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(args, folder)
        rolls = rollouts_of(trainer, args)

        def by_scoring(contexts, completions):
            return list(scoring.token_logprobs(trainer.model, contexts, completions))

        reference = gaps_of(by_scoring, trainer, rolls)
        results = {"on_trl.py, head in fp32": gaps_of(trainer.score, trainer, rolls)}
        add_fused_lm_head(trainer.model)  # as TRL has it
        results["TRL's own head"] = gaps_of(trainer.score, trainer, rolls)
        trainer.judge.close()
    columns = ("log-probabilities by", "mean error of a gap, nats", "largest")
    columns += ("other polarities at .05", "at .005", "teachers")
    print(*head_of(columns), sep="\n")
    for name, gaps in results.items():
        errors = torch.cat([(x - y).abs().flatten() for x, y in zip(gaps, reference)])
        cells = [name, f"{errors.mean():.1e}", f"{errors.max():.1e}"]
        for eps_a in (0.05, 0.005):
            ours = polarities(gaps, trainer, rolls, eps_a)
            cells.append(int((ours != polarities(reference, trainer, rolls, eps_a)).sum()))
        print(row_of([*cells, len(ours)]))


if __name__ == "__main__":
    main()
