"""Verdicts: a golden table, answers that hack, hostile answers, fuzz, processes that end."""

import json
import os
import pathlib
import random
import re
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest
from conftest import ROOT

from lib.verify import MEMORY_BYTES, Verifier, drop_if_copied, extract_answer

# `kind`: a policy could live on an exploitable answer; ordinary ones are counted.
REFUSED, ACCEPTED = 18, 21  # of these ordinary pairs, by this verdict
PAIRS = [json.loads(line) for line in (ROOT / "tests/data/verdicts.jsonl").open()]


# reference, completion and r
TEXTS = r"""
5  \boxed{5}  1 | 5  \boxed{6}  -1 | 5  5  -1 | 5  so $\boxed{5}$.  1 | 5  \boxed {5}  1
2  \boxed{1} and \boxed{2}  1 | 1  \boxed{1} and \boxed{2}  -1 | 1,2  \boxed{1} and \boxed{2}  -1
\frac{1}{\sqrt{2}}  \boxed{\frac{1}{\sqrt{2}}}  1 | 5  \boxed{\boxed{5}}  1
\{1\}  \boxed{\{1\}}  1 | 5  \boxed{5  -1 | 5  \boxed{5} no: \boxed{6  -1 | 5  \boxed{}  -1
5  \boxed{ }  -1 | 5  \boxed 5  -1 | 5  \fbox{5}  -1 | 5  <think>\boxed{5}</think> so 6  -1
6  <think>\boxed{5}</think> \boxed{6}  1 | 5  <think>\boxed{5}  -1 | 5  \boxed{5}</think>  -1
5  </think>\boxed{6}<think>\boxed{5}  -1 | 5  <think>a</think><think>b</think>\boxed{5}  1
5  \boxed{x=5}  1 | \left\{1,2\right.  \boxed{\left\{1,2\right.}  1
"""


@pytest.fixture(scope="module")
def verifier():
    with Verifier(timeout_s=20.0) as v:
        yield v
        assert v.timeouts == 0, "an honest answer ran out of time"


def disagreements(verifier, kind, right):
    """The (reference, answer) of a kind whose verdict is not the one of the data."""
    cases = [x for x in PAIRS if x["kind"] == kind and x["right"] is right]
    assert len(cases) > 30
    pairs = []
    for x in cases:
        problem = x.get("problem", "")
        pairs.append((x["reference"], drop_if_copied(x["reference"], x["answer"], problem)))
    verdicts = verifier.verify_many(pairs)
    return [pair for pair, verdict in zip(pairs, verdicts) if verdict is not right]


def test_no_policy_lives_on_an_answer_that_solves_nothing(verifier):
    assert disagreements(verifier, "exploitable", False) == []


def test_right_answers_that_are_refused_are_counted(verifier):
    refused = disagreements(verifier, "ordinary", True)
    assert len(refused) <= REFUSED, refused


def test_wrong_answers_that_are_accepted_are_counted(verifier):
    """Each needs the right digits: another unit or base, a tuple as a set, tiny numbers."""
    accepted = disagreements(verifier, "ordinary", False)
    assert len(accepted) <= ACCEPTED, accepted


def test_nothing_is_no_answer_and_equal_text_always_is(verifier):
    pairs = [("5", None), ("5", "  "), ("", ""), ("$", "$$"), ("z" * 3000, "z" * 2999)]
    assert mistakes(verifier, pairs, False) == []
    pairs = [("z" * 3000, "z" * 3000), (r"\undefined{", r" \undefined{"), ("Noon", "Noon")]
    assert mistakes(verifier, pairs, True) == []


# problem, reference, answers that count, answers that are copied; two blanks between answers
COPIES = [
    (
        r"Compute $\sqrt{36+64}-\sqrt{25-16}.$",
        "7",
        r"7  10-3  \sqrt{49}  \sqrt{100}-\sqrt{9}",
        r"\sqrt{36+64}-\sqrt{25-16}  \sqrt{36 + 64} - \sqrt{25 - 16}  $\sqrt{36+64}-\sqrt{25-16}$"
        r"  \sqrt{36+64}-\sqrt{25-16}\text{ units}"
        r"  x=(\sqrt{36+64}-\sqrt{25-16})  \left(\sqrt{36+64}-\sqrt{25-16}\right)",
    ),
    ("Factor $ab+5b+2a+10$.", "(a+5)(b+2)", "(b+2)(a+5)  ab+2a+5b+10", "ab+5b+2a+10"),
    (
        "Reduce $\\frac{84}{144}.$",
        r"\frac{7}{12}",
        r"\frac{7}{12}  7/12",
        r"\dfrac{84}{144}  \frac{84}{144}",
    ),
    # as the reference's text, with a name or without
    (
        r"If $\lceil x\rceil-\lfloor x\rfloor=0$, what is it?",
        "0",
        "0  x=0",
        r"\lceil x\rceil-\lfloor x\rfloor=0",
    ),
    ("Is it (A) $y=2x+3$ or (B) $y=3x$?", "y = 2x + 3", "y=2x+3  2x+3  y = 3+2x", ""),
    ("Is it (A) $\\frac12$ or (B) $\\frac{1}{3}$?", r"\frac{1}{2}", r"\frac12  \dfrac{1}{2}", ""),
    ("Does $[0,1]$ or $(0, 1)$ hold it?", r"\left[0,1\right]", "[0,1]  [0, 1]", ""),
    # plain numbers, names, letters and words
    ("At $x=5$ he eats 5 apples of 1,234.", "5", r"5  x=5  5 apples  5\text{ apples}", ""),
    ("Is 50\\% of 1,234 more than -5?", "0.5", r"50\%  \frac12", ""),
    ("Is $-5.0$ one?", "-5", "-5  -5.0", ""),
    ("Choose. (A) two lines (B) a circle (C) none", r"\text{(C)}", "C  (C)", ""),
    (
        "Choose. (A) two lines (B) a circle (C) none",
        r"\text{two lines}",
        r"two lines  \text{two lines}",
        "",
    ),
]


@pytest.mark.parametrize("problem,gold,counted,copies", COPIES)
def test_an_expression_of_the_problem_counts_only_as_the_references_text(
    verifier, problem, gold, counted, copies
):
    for answer in counted.split("  "):
        assert verifier.verify(gold, answer, problem), answer
    for answer in filter(None, copies.split("  ")):
        assert verifier.verify(gold, answer) and not verifier.verify(gold, answer, problem), answer
        assert drop_if_copied(gold, answer, problem) is None
        assert verifier.outcome(gold, rf"so \boxed{{{answer}}}", problem) == -1
    assert verifier.outcome(gold, rf"so \boxed{{{gold}}}", problem) == 1
    assert drop_if_copied(gold, None, problem) is None and drop_if_copied(gold, "", problem) == ""


def test_a_box_without_braces_ends_at_a_dollar_sign():
    boxes = {
        r"$\boxed 5$": "5",
        r"$\boxed 12 $.": "12",
        r"\boxed 5": None,
        r"\boxed{6} $\boxed 5$": "5",
    }
    assert {text: extract_answer(text) for text in boxes} == boxes


@pytest.mark.parametrize("case", re.split(r" \| |\n", TEXTS.strip()))
def test_a_completion_counts_by_its_last_box(verifier, case):
    gold, text, r = case.split("  ")
    assert verifier.outcome(gold, text) == int(r)
    assert verifier.outcome(gold, text.replace("{5}", "{\n5\n}")) == int(r)
    assert verifier.outcome(gold, "") == -1


DATA = ["aime24", "aime25", "hmmt25", "amc23", "gsm8k_test", "svamp"]
LONG_DATA = ["math500", "gsm8k_train", "math_train", "dapo_math_en"]


@pytest.mark.parametrize(
    "name", DATA + [pytest.param(name, marks=pytest.mark.long) for name in LONG_DATA]
)
def test_every_reference_equals_itself_in_another_spelling(verifier, name):
    path = ROOT.parent / "shared" / "data" / f"{name}.jsonl"
    if not path.exists():
        pytest.skip("the data sets are not beside this project")
    golds = sorted({str(json.loads(line)["answer"]) for line in path.open()})
    pairs = [(gold, gold) for gold in golds]
    for gold in golds:
        if "text" not in gold:
            respelled = gold.replace(r"\frac", r"\dfrac").replace("(", " (")
            pairs.append((gold, f"${respelled}$"))
    assert mistakes(verifier, pairs, True) == []


def mistakes(verifier, pairs, wanted):
    """The pairs whose verdict is another."""
    return [pair for pair, right in zip(pairs, verifier.verify_many(pairs)) if right is not wanted]


# ------------------------------------------  answers that are right without knowing the reference

REFERENCES = r"""
0   1   -1   2   5   10   42   100   1234   -17   2024   \frac{1}{2}   \frac{3}{7}   -\frac{2}{3}
1\frac{1}{2}   0.08   3.14   \sqrt{2}   2\sqrt{3}   \frac{1+\sqrt{5}}{2}   -1-\sqrt{7}   \pi
\frac{\pi}{6}   4\pi-2   e^2   \ln 2   \log_2 3   \binom{10}{3}   20!   3+4i   i   50\%   90^\circ
15\text{ cm}^2   52_8   1:2   8:34\text{ p.m.}   (1,2)   (0,3,-1)   [0,1)   (-\infty,3]
(-\infty,0)\cup(0,\infty)   [-2,7]   1,2   \{1,2,3\}   \{0\}   \pm 5   3\pm2\sqrt{2}   x^2+1   2k+2
\sin x   \frac{x}{y}   ab   n(n+1)   y=2x+3   x^2+y^2=25   5x-7y+4=0   x\ge 3   -3<x<5
\begin{pmatrix}1\\2\end{pmatrix}   \text{Evelyn}   \text{even}   \text{(C)}   Yes   AB   f(x)=x^2
"""
# Not finite; problems for answers; nothing and everything; symbols; relations that hold always or
# for many; listings of guesses; signs, units and bases; programs; odd forms
TRICKS = r"""
+\infty-\infty   \infty-\infty   \infty+1   2^\infty   2^{-\infty}   0^\infty   1^\infty
\infty^0   0\cdot\infty   \frac{\infty}{\infty}   \frac{1}{\infty}   \frac{0}{0}   \frac{1}{0}
0^{-1}   0^0\cdot\infty   0/0   1/0   \frac{x}{0}   \infty x   x+\infty   \infty i   \tilde\infty
\sin(\infty)   \sin \infty   \cos\infty   \tan(90^\circ)   \tan\frac{\pi}{2}   \ln 0   \log(0)
\ln(-\infty)   e^{\infty}   e^{-\infty}   (-1)!   \infty!   \binom{\infty}{2}   |\infty|
\sqrt{\infty}   \lfloor\infty\rfloor   \log_1 1   \log_0 0   \arcsin 2   \infty\%   x=\infty
x=\frac{0}{0}   x=\infty-\infty   \pm\infty   ∞-∞   nan   NaN   inf   -inf   Infinity   zoo   oo
inf-inf   \text{nan}   \text{inf}   \infty=\infty   \sqrt[0]{1}   1^{\frac{1}{0}}   \{\infty\}
(\infty,-\infty)   \infty,\infty   \frac{d}{dx}\infty   \max(\infty,1)   \min(-\infty,1)
\max(1,\infty)   \max\{\}   \min(\emptyset)   \max\{0,1,2,3\}   \max(0,1,2,5)   \min(5,10,42)
\operatorname{max}(\infty,1)   \text{max}(\infty,1)   \sup\{1,2\}   \gcd(10,20)
\operatorname{lcm}(2,5)   \gcd(0,\infty)   \text{gcd}(10,20)   \mathrm{lcm}(2,5)   max(2,5)
gcd(10,20)   \sum_{k=1}^{\infty} k   \sum_{k=1}^{4} k   \sum_{n} n   \prod_{k=1}^{2} k
\int_0^1 2x\,dx   \int_{-\infty}^{\infty} f(x)\,dx   \int x dx   \iint dx   \oint f
\lim_{x\to\infty} x   \lim_{x\to0}\frac{\sin x}{x}   \frac{d}{dx}x   \frac{d}{dx} x^2   10 \mod 5
12\bmod 10   7\pmod 5   \det\begin{pmatrix}1&0\\0&1\end{pmatrix}   \arg i
\operatorname{argmax} x   \lim_{n\to 5} n   \lim x   \text{}   \text{ }   {}   ()   []   \{\}\{\}
\{\{\}\}   \{\emptyset\}   \emptyset\cup\emptyset   \mathbb{C}   \mathbb{Z}   \mathbb{N}
\mathbb{Q}   (-\infty,\infty)   [-\infty,\infty]   x\in\mathbb{Z}
(-\infty,\infty)\setminus\emptyset   \mathbb{R}\cup\mathbb{C}   \mathbb{C}\cap\mathbb{C}
\text{all real numbers}   all real numbers   \text{any number}   everything   the reference
correct   true   True   False   None   \text{True}   \top   *   ?   _   ...   \ldots   \cdots   .*
%s   -   +   =   ,   ;   ~   ^   \\   \,   ''   \boxed{}   I don't know   \text{see above}
answer   \text{undefined}   DNE   \blacksquare   Q.E.D.   \forall x   \exists x   z   y   t   a
X   x_1   x_{0}   ?x   \alpha   \theta   \square   \_\_   gold   pred   abc   xyz   x\cdot 0+x_2
x-x+y   \star   \hat{x}   \vec{v}   f(x)   g(5)   |x|   x!   x'   \emptyset x   \Re(z)
x^0\cdot y   \frac{z}{z}w   z=z   0=0   1=1   5=6   x=y   a=b=c   1=0   1\ne 2   x\ne 0   x>=0
x\ge 0   x\le x   x\in x   x<y   0<1   1<2<3   -\infty<x<\infty   x>-\infty   x<\infty   x^2\ge0
x=0\cdot x   x+0=x   (x-1)(x-2)(x-5)(x-10)(x-42)=0   0x=0   y\le 100   0\le x\le 100
-1000<x<1000   z\approx z   x\approx 0\approx 1\approx 2\approx 5   1\approx 2\approx5   x\equiv 0
x\mid 10   1\to 2   \neg 0   x\subset y   \emptyset\subset\{1\}   1\lor 2\lor 5   x=1\land x=2
a\iff a   0=1=2=3=4=5   1=2=3=4=5   x=0=1=2=5=10   5=1=2   5=10=42=100   x=1,y=2,z=3,w=5
x=0,x=1,x=2,x=5   x=5,y=10   1=1,2=2,5=5   x=y=z   \{-3,-2,-1,0,1,2,3,4,5,6,7,8,9,10,11,12\}
(-3,-2,-1,0,1,2,3,4,5,6,7,8,9,10,11,12)   -3 -2 -1 0 1 2 3 4 5 6 7 8 9 10 11 12
-3 or -2 or -1 or 0 or 1 or 2 or 3 or 4 or 5 or 6 or 7 or 8 or 9 or 10 or 11 or 12
-3;-2;-1;0;1;2;3;4;5;6;7;8;9;10;11;12   -3\\-2\\-1\\0\\1\\2\\3\\4\\5\\6\\7\\8\\9\\10\\11\\12
-3/-2/-1/0/1/2/3/4/5/6/7/8/9/10/11/12   -3|-2|-1|0|1|2|3|4|5|6|7|8|9|10|11|12
\begin{pmatrix}-3\\-2\\-1\\0\\1\\2\\3\\4\\5\\6\\7\\8\\9\\10\\11\\12\end{pmatrix}   1,2,3,4,5
0,1,-1,2,5   1 or 2 or 5   5 or 10   5\text{ or }10   5,5,10   10,10,5   5/10/42   5 10   5;10
5|10   \{5\}\cup\{10\}   \{1\}\cup\{2\}\cup\{5\}\cup\{10\}   \{5,10\}\setminus\emptyset   [5,10]
[0,100]   (0,100)   [1,2]\cup[5,10]   \mathbb{Z}\cap[0,100]   1-100   1..100   1, 2, ..., 100
1,2,\ldots,100   1,2,\dots,100   \{1,\dots,100\}   5\text{ (or }10)   \boxed{5}\boxed{10}
\boxed{5},\boxed{10}   \boxed{5} \text{ or } \boxed{10}   (5)(10)   (5,10)   ((5,10))
\begin{cases}5\\10\end{cases}   \begin{cases}5&x>0\\10&x\le0\end{cases}
\begin{array}{c}5\\10\end{array}   \text{5 or 10}   \text{5, 10}   \frac{1}{2}\frac{3}{7}
\frac{1}{2},\frac{3}{7}   $\frac{1}{2}$ or $\frac{3}{7}$   ? \frac{1}{2} ? \frac{3}{7}
5 is right, or 10   Yes or no   Yes/No   \text{yes and no}   A,B,C,D   \text{A, B, C or D}   ABCD
Evelyn or even   \pm1\pm2\pm3\pm5   \pm 1\pm\sqrt2   \pm\pm 5   5\pm 5   \pm x   \mp\mp   1\pm 0
\pm   5\pm   1\pm1\pm1   \%   x\%   %   5\%\%   100\%\%   \infty\text{ apples}   apples
\text{ cm}   x\text{ cm}   5 million   5\text{ thousand}   10\text{ dozen}   1\text{ hundred}
2\text{ squared}   5\text{ factorial}   half   5 and a half   5\text{ or }6\text{ apples}
5 to 10 apples   0\text{ or so}   5_2   5_10_42   x_8   1e2   1e9999   0x10   0b101   1_000   5j
1+1j   5L   5.0.0   5,0   1,00   10,0,0   --5   -+1   5-   5+   5^   5_   5!!   5%%   $5$10$
5$10   __import__('os')   lambda: 5   [1,2,3][0]   range(100)   x if x else y   S.Reals
Symbol('x')   Integer(5)   oo-oo   I   E   N   S   Q   O(1)   O(x)   O(\infty)   𝟓𝟎   ５０   ٥٠   ½½
①   一   五   五十   ∅∅   ∀x   ℝ∪ℂ   ⊤   ≡   ∑   ∫   √   √x   ∞∞   \frac{\pi}{10^{20}}
10^{-100}\sqrt2   10^{-1000}   0.0000001   10^{-7}   \frac{x}{10^{50}}   10^{-50}x
\sin(10^{10^{10}})   (-1)^{1/2}\cdot 0\cdot\infty   0\cdot x+z   \Gamma(0)   \zeta(1)   \delta(0)
\theta(x)   \text{sgn}(x)   \operatorname{sgn}(x)   \lceil x\rceil   \lfloor x\rfloor   x\bmod 1
\begin{pmatrix}\end{pmatrix}   \begin{pmatrix}x\end{pmatrix}
\begin{pmatrix}\infty\\\infty\end{pmatrix}   \begin{pmatrix}x\\y\end{pmatrix}
\begin{vmatrix}1&0\\0&1\end{vmatrix}   \vec{0}   \langle 1,2,5\rangle   \nabla f   \partial x
x^{x^x}   \sqrt{-1}^4\cdot x   0.333   3.1415   1.41   1.618   2.718   0.1+0.2
"""
COUNT = [str(i) for i in range(-3, 13)]
JOINTS = [",", ", ", " ", " or ", ";", "/", "|", "=", "<", r"\ne ", r"\le ", r"\approx ", r"\\"]


def tricks():
    """Answers that say no value, or several."""
    listed = re.split(r" {3,}|\n", TRICKS.strip())
    listed += [joint.join(COUNT) for joint in JOINTS]
    listed += [f"x={'='.join(COUNT)}", rf"\{{{','.join(COUNT)}\}}", f"({','.join(COUNT)})"]
    return listed + ['""', "\u200b", "\u202e", "\ud800", "\x00", r"\,", r"\ ", r"\text{ }"]


ZEROS = {"0", r"\{0\}"}  # one value to the verdict: "0" itself is right for both


def test_sympys_infinity_is_right_for_no_finite_reference(verifier):
    answers = ["oo-oo", "oo - oo", "x=oo-oo", r"0\cdot oo", "oo"]
    pairs = [(gold, answer) for gold in (*ZEROS, "1", "5") for answer in answers]
    assert mistakes(verifier, pairs, False) == []


@pytest.mark.parametrize("n", [2, pytest.param(80, marks=pytest.mark.long)])
def test_no_trick_is_right_for_two_references(n):
    """A sample of the tricks against all references; one that says a value is right for that."""
    golds = re.split(r" {3,}|\n", REFERENCES.strip())
    chosen = random.Random(n).sample(tricks(), n)
    assert len(tricks()) > 400 and len(golds) > 60
    with Verifier(timeout_s=5.0, workers=2) as v:
        for trick in chosen:
            right_for = {gold for gold, _ in mistakes(v, [(gold, trick) for gold in golds], False)}
            assert len(right_for) <= 1 or right_for == ZEROS, (trick, right_for)


# ------------------------------------------------------------------------- hostile answers and fuzz

HOSTILE = [
    *("9^{9^{9^9}}", "9^9^9^9", "7+" * 450 + "x", "(" * 900, "{" * 5000, r"\frac{" * 300),
    *("1" * 100_000, "x" * 100_000, r"\left(", "}{", "$" * 999, r"\text{" * 150),
    *(",".join(["x"] * 450), r"\pm" * 200, "1:" * 400, "\\" * 999, r"\begin{pmatrix}" * 60),
    *("\x00", "7\x00", "\ud800", "\udfff7", "∞", "‮7", "7" + "‮", "٧"),
    *("__import__('os').system('touch pwned')", "().__class__.__bases__[0]", "eval(input())"),
    *(r"\input{/etc/passwd}", "1e999999999", "nan", "None", "True"),
    *(r"\int_0^\infty e^{-x^2}dx", r"\sum_{i=1}^{10^9} i", r"\lim_{x\to0}\frac{\sin x}{x}"),
]
SLOW = [  # each takes all of its time, as some above do
    *("10000000000!", "((10!)!)!", r"\binom{10^{12}}{10^{11}}", "(" * 450 + ")" * 450, "[(" * 400),
    *(r"\frac{1}{1+" * 60 + "1" + "}" * 60, r"\sqrt{" * 90 + "2" + "}" * 90, "x=" * 400),
    *("x^{" * 200 + "2" + "}" * 200, "2^{10^{10}}", r"\prod_{i=1}^{10^7} i"),
    *(r"\sin(10^{10^{10}})", "x^" * 400, "(x+1)^{100000}(x+2)"),
]


@pytest.fixture(scope="module")
def impatient():
    with Verifier(timeout_s=1.0) as v:
        yield v


@pytest.mark.parametrize(
    "pred", HOSTILE + [pytest.param(pred, marks=pytest.mark.long) for pred in SLOW]
)
def test_a_hostile_answer_is_wrong_and_the_next_one_is_judged(
    impatient, pred, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert impatient.outcome("7", rf"so \boxed{{{pred}}}") == -1
    assert impatient.verify("1/2", "2/4")
    assert not os.listdir(tmp_path), "it ran code"


TOKENS = (
    r"""\frac { } ( ) [ ] + - ^ _ ! , ; : = < / * . $ % & ~ ' " # | \ \\ \{ \} \sqrt \pm \cup \in
    \le \infty \pi \text{ \text{and} \circ \% \cdot \binom \boxed{ \begin{pmatrix} \end{pmatrix}
    \sin \log x y i e AB and apples cm é ² √ ½ ٣ 0 1 2 3 4 5 6""".split()
    + [" ", "\n", "\x00", "\ud83d"]
)


@pytest.mark.parametrize("n", [300, pytest.param(2500, marks=pytest.mark.long)])
def test_random_tokens_are_never_a_large_prime(impatient, n):
    rng = random.Random(0)
    preds = ["".join(rng.choices(TOKENS, k=rng.randint(1, 30))) for _ in range(n)]
    assert mistakes(impatient, [("1000000007", pred) for pred in preds], False) == []


def spelled(rng: random.Random, v: Fraction, grouped: bool) -> str:
    """One of the ways to write a rational number; with thousands separators where it is no list."""
    p, q, sign = abs(v.numerator), v.denominator, "-" if v < 0 else ""
    k = rng.randint(1, 4)
    ways = [f"{sign}\\frac{{{k * p}}}{{{k * q}}}", f"{sign}\\dfrac{{{p}}}{{{q}}}", f"{sign}{p}/{q}"]
    ways += [f"\\frac{{{sign}{p}}}{{{q}}}", f"{sign}{p} / {q}", f"{sign}({p})/({q})"]
    if q == 1:
        ways += [f"{sign}{p}", f"{sign}{p}.0", f"{sign}0{p}", f"{sign}\\sqrt{{{p * p}}}"]
        ways += [f"{int(v):,}" if grouped else f"{v}", f"{sign}{p}\\cdot 1", f"{v - k}+{k}"]
    elif 10**6 % q == 0:
        decimal = f"{sign}{p * (10**6 // q) / 10**6:.6f}"
        ways += [decimal, decimal.rstrip("0")]
    if p > q > 1:
        ways += [f"{sign}{p // q}\\frac{{{p % q}}}{{{q}}}", f"{sign}{p // q} {p % q}/{q}"]
    return rng.choice(ways)


# How an answer of so many numbers is written, and what makes two of them equal
KINDS = [
    ("{}", 1, list),
    (r"$x={}$", 1, list),
    (r"{}\text{{ apples}}", 1, list),
    ("{}, {}, {}", 3, sorted),
    (r"{}, {}, \text{{ and }} {}", 3, sorted),
    (r"\{{{}, {}, {}\}}", 3, sorted),
    (r"\left({}, {}, {}\right)", 3, list),
]


@pytest.mark.parametrize("n", [50, pytest.param(150, marks=pytest.mark.long)])
def test_random_numbers_and_structures_get_their_known_verdict(verifier, n):
    rng = random.Random(1)
    pairs = {True: [], False: []}
    for _ in range(n):
        form, size, key = rng.choice(KINDS)
        denominators = rng.choices([1, 1, 1, 2, 3, 5, 8, 12, 100], k=size)
        values = [Fraction(rng.randint(-2000, 2000), q) for q in denominators]
        first, *rest = values
        orders = [values, values[::-1], [*rest, first]]
        others = [-first, first + Fraction(1, 1000), 10 * first, values[-1] + 1, values[-1]]
        other = rng.choice(orders * 2 + [[one, *rest] for one in others])
        gold = form.format(*[spelled(rng, v, size == 1) for v in values])
        pred = form.format(*[spelled(rng, v, size == 1) for v in other])
        pairs[key(values) == key(other)].append((gold, pred))
    assert min(map(len, pairs.values())) > 0.3 * n
    for wanted in pairs:
        assert mistakes(verifier, pairs[wanted], wanted) == []


# ---------------------------------------------------------------------------------------- processes


def workers(parent: int | None = None) -> set[int]:
    """The live worker processes, or those that a process has started."""
    found = set()
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            state, its_parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            command = (entry / "cmdline").read_text()
        except OSError:
            continue
        if state != "Z" and "verify.py" in command and parent in (None, int(its_parent)):
            found.add(int(entry.name))
    return found


def new_worker(v: Verifier) -> int:
    """The process id of the one worker that a fresh verifier starts."""
    before = workers(os.getpid())
    assert v.verify("1/2", "2/4")
    (pid,) = workers(os.getpid()) - before
    return pid


def test_verdicts_from_many_threads_come_in_order():
    pairs = [(f"{i}/2", f"{2 * i if i % 3 else 2 * i + 1}/4") for i in range(1, 19)]
    want = [i % 3 != 0 for i in range(1, 19)]
    with Verifier(timeout_s=5.0, workers=2) as v, ThreadPoolExecutor(3) as threads:
        assert list(threads.map(v.verify_many, [pairs] * 3)) == [want] * 3


def test_a_killed_worker_is_replaced_and_close_leaves_none():
    v = Verifier(timeout_s=5.0)
    first = new_worker(v)
    os.kill(first, signal.SIGKILL)
    second = new_worker(v)
    v.close()
    v.close()
    assert not {first, second} & workers()
    with v:
        assert v.verify("1/2", "2/4"), "a closed verifier starts again"


PARENT = """
import os, sys, threading, time
from lib.verify import Verifier
v = Verifier(timeout_s=2.0)
v.verify("1/2", "2/4")
if sys.argv[1] == "fork" and os.fork() == 0:  # holds the pipe to the worker open
    time.sleep(20)
    os._exit(0)
if sys.argv[1] == "busy":
    threading.Thread(target=v.verify, args=("7", "9^{9^{9^9}}+x")).start()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("state", ["idle", "busy", "fork"])
def test_the_worker_ends_when_its_parent_is_killed(state):
    command = [sys.executable, "-c", PARENT, state]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "ready\n"
        (worker,) = workers(parent.pid)
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 20
        while worker in workers() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert worker not in workers()


CTRL_C = """
import os, signal, threading
from lib.verify import Verifier
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
with Verifier(timeout_s=2.0) as v:
    v.verify("1/2", "2/4")
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        v.verify("7", "((10!)!)!")
    except KeyboardInterrupt:
        print(v.verify("1/2", "3/6"), v.verify("1/2", "3/7"), v.verify("1/3", "3/9"))
"""


@pytest.mark.long
def test_after_ctrl_c_a_late_reply_is_nobodys_verdict():
    command = [sys.executable, "-c", CTRL_C]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "True False True\n"


def test_timeouts_are_counted(impatient):
    before = impatient.timeouts
    assert not impatient.verify("7", "((10!)!)!") and not impatient.verify("7", "8/3")
    assert impatient.timeouts == before + 1


def test_a_workers_memory_is_bounded_and_hunger_is_wrong():
    with Verifier(timeout_s=1.0) as v:
        limits = resource.prlimit(new_worker(v), resource.RLIMIT_AS)
        assert limits == (MEMORY_BYTES, MEMORY_BYTES) and MEMORY_BYTES <= 1 << 30
        assert not v.verify("7", "2^{10^{10}}") and v.verify("1/2", "2/4")


def test_integers_are_decided_without_a_worker():
    before = workers(os.getpid())
    with Verifier() as v:
        assert all(v.verify_many([(str(i), f"0{i}") for i in range(2000)]))
        assert workers(os.getpid()) == before


def test_without_math_verify_a_verdict_is_an_import_error(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Verifier() as verifier:
        assert verifier.verify("5", "5")
        with pytest.raises(ImportError, match="does `import math_verify` work"):
            verifier.verify("1/2", "2/4")
