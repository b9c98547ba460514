"""Divergences of two distributions (Fig. 3, OPSD) by hand: KL both ways, JSD, a local support."""

import math

import pytest
import torch
from conftest import one_line, same, t

from methods import divergences


def test_generalized_jsd():
    """Forward is KL(T || S), reverse KL(S || T) (D10); jsd is symmetric; equal sides have none."""
    jsd, beta = divergences.generalized_jsd, divergences.JSD_BETA
    s_V, t_V = t([0.5, 0.5]).log(), t([0.75, 0.25]).log()
    forward = [0.75 * math.log(1.5), 0.25 * math.log(0.5)]  # entry by entry
    same(jsd(s_V, t_V, beta["forward_kl"]), sum(forward))
    same(jsd(s_V, t_V, beta["forward_kl"], clip=0.1), 0.1 + forward[1])  # S16: 0.304 is cut
    same(jsd(s_V, t_V, beta["reverse_kl"]), 0.5 * math.log(2 / 3) + 0.5 * math.log(2))
    # temperature 1/2 squares and renormalises: the teacher is (9/10, 1/10)
    same(jsd(s_V, t_V, 1.0, temperature=0.5), 0.5 * math.log(5 / 9) + 0.5 * math.log(5))
    # beta 1/4: M = (9/16, 7/16)
    of_teacher = 0.75 * math.log(12 / 9) + 0.25 * math.log(4 / 7)
    of_student = 0.5 * math.log(8 / 9) + 0.5 * math.log(8 / 7)
    same(jsd(s_V, t_V, 0.25), of_teacher / 4 + 3 * of_student / 4)
    same(jsd(s_V, t_V, beta["jsd"]), jsd(t_V, s_V, beta["jsd"]).item())
    for name in beta:
        same(jsd(s_V, s_V + 3, beta[name]), 0.0)
    one_line(lambda: jsd(s_V, t_V, 2), "got 2")


@pytest.mark.parametrize(
    ("top_k", "sampled", "student", "teacher"),
    [  # student (.4 .3 .2 .1), teacher (.1 .2 .3 .4): what is left, the sampled token first
        (1, 3, [1.0], [1.0]),  # the teacher's best is the sampled one, and counts once
        (1, 0, [0.8, 0.2], [0.2, 0.8]),  # tokens 0 and 3: .4 .1 and .1 .4
        (2, 2, [2 / 3, 1 / 3], [3 / 7, 4 / 7]),  # tokens 2 and 3: .2 .1 and .3 .4
        (2, 1, [3 / 6, 2 / 6, 1 / 6], [2 / 9, 3 / 9, 4 / 9]),
        (99, 0, [0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]),
    ],
)
def test_local_support(top_k, sampled, student, teacher):
    """KL(T || S) and the sampled gap on the teacher's top k and the sampled token (S19)."""
    ids_1 = torch.tensor([sampled])
    s_1V, t_1V = t([[0.4, 0.3, 0.2, 0.1]]).log(), t([[0.1, 0.2, 0.3, 0.4]]).log()
    kl_1, gap_1 = divergences.local_support(ids_1, s_1V, t_1V, top_k)
    same(kl_1, [sum(q * math.log(q / p) for p, q in zip(student, teacher))])
    same(gap_1, [math.log(teacher[0] / student[0])])
