"""Verdicts: a golden table, fuzz with known verdicts, hostile answers within their limit, processes that end."""

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction

import pytest
from conftest import ROOT

import verify as V

# gold  ==  a prediction that is right, gold  !=  one that is wrong; every row holds with gold and prediction exchanged
TABLE = r"""
# integers, signs, leading zeros, thousands separators
5  ==  5
5  ==  05
5  ==  5.0
5  ==  5.
5  ==  +5
-5  ==  - 5
-5  ==  −5
5  !=  -5
5  !=  6
5  !=  55
007  ==  7
0  ==  -0
5  ==  5e0
1234  ==  1,234
1234  ==  1{,}234
1234  ==  1\,234
32348  ==  32,\!348
1234  !=  1,235
1234  ==  x=1,234
1234  ==  1,234 \text{ apples}
1234  !=  1,23
1234  !=  12,34
12345  !=  12,345.5
1234567  ==  1,234,567
12345678901234567890123  !=  12345678901234567890124
12345678901234567890123  ==  12345678901234567890123.0
12  !=  1 2
1  !=  1,000
# lists of numbers that look like thousands
100,200  ==  200,100
100,200  ==  \{200,100\}
100200  ==  100,200
(100,200)  !=  100200
# fractions, decimals, mixed numbers, powers of ten
1/2  ==  0.5
1/2  ==  .5
\frac{1}{2}  ==  \dfrac{2}{4}
\frac12  ==  1/2
\frac{1}{2}  ==  \frac 1 2
\frac{1}{2}  ==  \tfrac12
-\frac{1}{2}  ==  \frac{-1}{2}
-\frac{1}{2}  ==  \frac{1}{-2}
\frac{1}{2}  !=  \frac{1}{3}
\frac{1}{2}  !=  \frac{2}{1}
\frac{\sqrt6}2  ==  \frac{\sqrt{6}}{2}
1/3  !=  0.3333
1/3  !=  0.333333
1/3  !=  0.333334
1/3  ==  0.\overline{3}
0.125  ==  1/8
0.1250001  !=  1/8
1\frac{4}{5}  ==  \frac{9}{5}
3/2  ==  1 1/2
11/2  !=  1 1/2
1 1/2  ==  1 1/2
137\frac{1}{2}  ==  137.5
-1\frac{1}{2}  ==  -1.5
1.5\times 10^3  ==  1500
1.5e3  ==  1500
2.5x  ==  \frac{5x}{2}
\dfrac{1}{29,\!322,\!216}  ==  1/29322216
# percent
50\%  ==  50\%
50\%  ==  0.5
50\%  ==  \frac{1}{2}
20\%  ==  20
5  ==  5\%
5\%  ==  0.05
5  ==  5 percent
5\%  ==  5 \text{ percent}
0.5  !=  0.5\%
5\%  !=  6\%
5\%  !=  0.5
12.5\%  ==  12.5
5\%  !=  500
# degrees
12  ==  12^{\circ}
90^\circ  ==  90
90^\circ  ==  90 \text{ degrees}
90^\circ  ==  90°
90^\circ  ==  \frac{\pi}{2}
90^\circ  !=  91^\circ
90  !=  \frac{\pi}{2}
\frac{270}7\text{ degrees}  ==  270/7
\frac{1}{2}  ==  \sin 30^\circ
# units and money
5  ==  5 \text{ apples}
5  ==  5 apples
5  ==  5\text{ cm}
5  ==  5 \mathrm{cm}
5  ==  5 cm
5  ==  5cm
15\mbox{ cm}^2  ==  15
15\mbox{ cm}^2  ==  15 \text{ square cm}
15\text{ cm}^2  !=  15\text{ cm}^3
5\text{ cm}  !=  5\text{ m}
5\text{ feet}  ==  5\text{ ft}
5\text{ inches}  ==  5 inches
4 \text{ feet}  !=  5 \text{ feet}
5  !=  6 \text{ apples}
480 + 480\sqrt{3}\text{ feet}  ==  480(1+\sqrt3)
36  ==  \$36
36  ==  $36$
\$18.90  ==  18.9
\$18.90  ==  18.90 \text{ dollars}
\$5  !=  5 \text{ cents}
5  !=  5 \text{ million}
5000000  ==  5 \text{ million}
5  !=  5x
5  !=  5m
5  !=  5 is wrong
5  !=  not 5
# \text, sizes, dollars, full stops
5  ==  \text{5}
5  ==  \mathbf{5}
5  ==  $5$
5  ==  $$5$$
\left(1,2\right)  ==  (1,2)
\displaystyle\frac{1}{2}  ==  0.5
# sets and lists: no order, all of it
\{1,2\}  ==  \{2,1\}
\{1,2\}  !=  \{1\}
\{1\}  !=  \{1,2\}
\{1,2\}  ==  1,2
\{1,2\}  !=  \{1,3\}
\{1,2\}  !=  \{1,2,3\}
\{1,1,2\}  ==  \{1,2\}
1,1,2  !=  1,2
1,1,2  !=  1,2,2
1,2  !=  1
1,2  ==  2,1
1,2  ==  \{2,1\}
1728  !=  1331 and 1728
1331 and 1728  !=  1728
1331 and 1728  ==  1728, 1331
2, 3, \text{ and } 4  ==  4, 3, 2
-2 \text{ or } -12  ==  -12, -2
\{5\}  ==  5
\{\frac12, \sqrt{8}\}  ==  \{2\sqrt2, 0.5\}
\{(1,2),(3,4)\}  ==  \{(3,4),(1,2)\}
\{(1,2),(3,4)\}  !=  \{(2,1),(3,4)\}
\emptyset  ==  \varnothing
\emptyset  ==  \{\}
\emptyset  !=  0
\emptyset  !=  \{0\}
# tuples: in order
(1,2)  ==  (1, 2)
(1,2)  !=  (2,1)
(1,2)  !=  \{1,2\}
(1,2)  ==  1,2
(1,2)  !=  2,1
(1,2)  !=  (1,2,3)
(1,2,3)  !=  (1,2)
(\frac12,\sqrt{8})  ==  (0.5, 2\sqrt{2})
(1,2)  !=  1
(1,2)  ==  x=1,y=2
(5)  ==  5
((1,2),3)  !=  (1,(2,3))
# intervals
(0,1)  !=  [0,1]
[0,1)  !=  (0,1]
[0,1]  ==  [0, 1]
[0,1]  !=  \{0,1\}
(-\infty,3]  ==  (-\infty, 3]
(-\infty,3]  ==  x \le 3
(3,\infty)  ==  x>3
(3,\infty)  ==  3<x
(3,\infty)  !=  x\ge 3
(3,\infty)  !=  x<3
(3,\infty)  ==  (3,+\infty)
(3,\infty)  !=  (3,-\infty)
(-3,5]  ==  -3 < x \leq 5
x\in[-2,7]  ==  [-2,7]
x\in[-2,7]  ==  -2\le x\le 7
(0,9) \cup (9,36)  ==  (9,36)\cup(0,9)
(0,9) \cup (9,36)  !=  (0,9)
(0,9) \cup (9,36)  !=  (0,36)
(-\infty,1)\cup(2,\infty)  ==  x<1 \text{ or } x>2
x>3  !=  y>3
x>3  ==  2x>6
x+y<1  ==  2x+2y<2
x+y<1  !=  x+y>1
# plus-minus pairs
\pm 5  ==  5, -5
\pm 5  !=  5
5  !=  \pm 5
\pm 5  ==  -5, 5
\pm 5  !=  \pm 6
3\pm2\sqrt{2}  ==  3-2\sqrt2, 3+2\sqrt2
3\pm2\sqrt{2}  !=  3+2\sqrt{2}
\{1\pm\sqrt{5},-2\}  ==  \{-2,1+\sqrt5,1-\sqrt5\}
x=\pm 2  ==  \{2,-2\}
1\pm\sqrt{19}  ==  1\mp\sqrt{19}
# equations
5  ==  x=5
x=5  ==  5
5  ==  x = 5
5  ==  = 5
5  ==  (x=5)
5  ==  5=x
x=5  !=  y=5
5  !=  x=6
5  !=  6=5
0.5  ==  1/2=0.5
0.5  ==  x=\frac12=0.5
5  !=  x=6=5
33  ==  m+n=33
9  ==  f(3)=9
0  !=  5x-7y+4=0
5x-7y+4=0  ==  10x-14y+8=0
5x-7y+4=0  !=  5x+7y+4=0
y=2x+3  ==  2x+3
y=2x+3  ==  2x-y+3=0
y=2x+3  !=  y=3x+2
x=1,y=2  ==  y=2,x=1
x=1,y=2  !=  x=2,y=1
(x,y)=(1,2)  ==  (1,2)
25  !=  x^2+y^2=25
\approx 8.24 \text{ mph}  ==  8.24
# radicals, pi, i, algebra
2\sqrt{2}  ==  \sqrt{8}
2\sqrt{2}  ==  \sqrt8
2\sqrt{2}  !=  2\sqrt{3}
2\sqrt{2}  !=  2.828
2\sqrt{2}  !=  -2\sqrt{2}
\frac{1}{\sqrt{2}}  ==  \frac{\sqrt{2}}{2}
\sqrt{5+2\sqrt6}  ==  \sqrt2+\sqrt3
\sqrt[3]{8}  ==  2
\sqrt[3]{4}  ==  4^{1/3}
\pi  !=  3.14
\pi  !=  3.141593
\pi  !=  22/7
\pi  ==  π
6\pi  ==  6 \cdot \pi
6\pi  !=  6
\frac{\pi}{6}  ==  30^\circ
6-5i  ==  -5i+6
6-5i  !=  6+5i
i  !=  1
x^2+1  ==  1+x^2
x^2+1  !=  x^2-1
(x+1)(x+2)  ==  x^2+3x+2
(a+5)(b+2)  ==  ab+2a+5b+10
x^2  !=  y^2
2k+2  ==  2(k+1)
\sqrt{x^2}  ==  |x|
\sqrt{x^2}  !=  x
\sin^2 x+\cos^2 x  ==  1
2^{10}  ==  1024
2^10  ==  1024
2**10  ==  1024
2*3  ==  6
A  !=  a
A  ==  A
AB  ==  BA
x_1  !=  x_2
# factorials and binomials
120  ==  5!
1/2004!  ==  \frac{1}{2004!}
1/2004!  !=  1/2006!
2004!  !=  2005!
\frac{1}{10^{30}}  !=  \frac{1}{10^{31}}
2^{-200}  !=  2^{-201}
\binom{5}{2}  ==  10
\dbinom{5}{2}  ==  {5 \choose 2}
\binom{5}{2}  !=  \frac52
2^{4950}  !=  2^{4951}
10^{60}  !=  10^{60}+1
# matrices
\begin{pmatrix}1\\2\end{pmatrix}  ==  \begin{pmatrix} 1 \\ 2 \end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix}  ==  \begin{bmatrix}1\\2\end{bmatrix}
\begin{pmatrix}1\\2\end{pmatrix}  !=  \begin{pmatrix}2\\1\end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix}  !=  \begin{pmatrix}1&2\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix}  !=  \begin{pmatrix}1&3\\2&4\end{pmatrix}
\begin{pmatrix}-1/3\\2/3\end{pmatrix}  ==  \begin{pmatrix}-\frac13\\\frac23\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix}  ==  \left(\begin{array}{cc}1&2\\3&4\end{array}\right)
\begin{pmatrix}1&2\\3&4\end{pmatrix}  !=  1,2,3,4
# ratios and times
1:2  ==  2:4
1:2  !=  2:1
1:2  ==  1/2
1 : 2  ==  1 \text{ to } 2
1:2:3  ==  2:4:6
1:2:3  !=  1:2:4
1:2:3  !=  1:2
8:34 \text{ p.m.}  ==  8:34 p.m.
8:34 \text{ p.m.}  !=  8:34 a.m.
8:34 \text{ p.m.}  !=  4:17 \text{ p.m.}
# words
blue  ==  \text{blue}
blue  !=  red
\text{Evelyn}  ==  evelyn
\text{even}  !=  \text{odd}
\text{two lines}  ==  two lines
\text{two lines}  !=  two circles
red  !=  der
CBAD  !=  ABCD
\text{October 30}  ==  October 30
\text{October 30}  !=  October 31
No  ==  no
yes  !=  no
\text{(C)}  ==  C
\text{(C)}  ==  (C)
\text{(C)}  !=  D
\text{(C)}  ==  c
\text{A, D, F}  ==  D, A, F
\text{A, D, F}  !=  A, D
blue  !=  5
\text{!}  !=  \text{?}
1,2  !=  3,'\text{
5  !=  the answer is 5
# number bases
52_8  ==  52_{8}
52_8  ==  52
52_8  !=  42
10_8  !=  10_2
4210_{5}  !=  4211_5
# nothing, and what cannot be read
5  !=
112  !=  1\quad12
17  !=  17\\18
2  !=  2..5
5  !=  5 5
5  !=  \frac{5}{
5  !=  ?
5  !=  \frac{5}{0}
\infty  !=  -\infty
\infty  !=  5
1,2  !=  ,,
\{1,2\}  !=  ;
x=\pm 2  ==  x=2, x=-2
x=1 \text{ or } x=2  ==  1,2
x\in\{1,2\}  ==  1,2
\text{odd}  !=  -\text{odd}
\log_2 8  ==  3
3!  ==  6
5!!  !=  120
"""
GOLDEN = [(m[1], m[3], m[2] == "==") for m in re.finditer(r"^(?!# )(.+?)  (==|!=)(?:  )?(.*)$", TABLE, re.M)]

TEXTS = [  # gold, completion, r
    ("5", r"\boxed{5}", 1), ("5", r"\boxed{6}", -1), ("5", "5", -1), ("5", "", -1), ("5", r"so $\boxed{5}$.", 1), ("5", r"\boxed {5}", 1),
    ("2", r"\boxed{1} and \boxed{2}", 1), ("1", r"\boxed{1} and \boxed{2}", -1), ("1,2", r"\boxed{1} and \boxed{2}", -1),
    (r"\frac{1}{\sqrt{2}}", r"\boxed{\frac{1}{\sqrt{2}}}", 1), ("5", r"\boxed{\boxed{5}}", 1), (r"\{1\}", r"\boxed{\{1\}}", 1),
    ("5", r"\boxed{5", -1), ("5", r"\boxed{5} no: \boxed{6", -1), ("5", r"\boxed{}", -1), ("5", r"\boxed{ }", -1), ("5", r"\boxed 5", -1), ("5", r"\fbox{5}", -1),
    ("5", r"<think>\boxed{5}</think> so 6", -1), ("6", r"<think>\boxed{5}</think> \boxed{6}", 1), ("5", r"<think>\boxed{5}", -1), ("5", r"\boxed{5}</think>", -1),
    ("5", r"</think>\boxed{6}<think>\boxed{5}", -1), ("5", r"<think>a</think><think>b</think>\boxed{5}", 1), ("5", r"\boxed{x=5}", 1), ("5", "\\boxed{\n5\n}", 1),
]  # fmt: skip
HOSTILE = [
    "9^{9^{9^9}}", "9^9^9^9", "10000000000!", "((10!)!)!", r"\binom{10^{12}}{10^{11}}", "7+" * 450 + "x", "(" * 900, "(" * 450 + ")" * 450, "[(" * 400, "{" * 5000,
    r"\frac{" * 300, r"\frac{1}{1+" * 60 + "1" + "}" * 60, "1" * 100_000, "x" * 100_000, r"\sqrt{" * 90 + "2" + "}" * 90, "x^" * 400, "x^{" * 200 + "2" + "}" * 200,
    r"\left(", "}{", "$" * 999, r"\text{" * 150, ",".join(["x"] * 450), r"\pm" * 200, "1:" * 400, "x=" * 400, r"\begin{pmatrix}" * 60, "\\" * 999, "\x00", "7\x00", "\ud800", "\udfff7",
    "__import__('os').system('touch pwned')", "().__class__.__bases__[0]", "eval(input())", r"\input{/etc/passwd}", "1e999999999", "∞", "‮7", "7" + "‮", "٧", "nan", "None", "True",
    r"\int_0^\infty e^{-x^2}dx", r"\sum_{i=1}^{10^9} i", r"\prod_{i=1}^{10^7} i", r"\lim_{x\to0}\frac{\sin x}{x}", "(x+1)^{100000}(x+2)", "2^{10^{10}}", r"\sin(10^{10^{10}})",
]  # fmt: skip


@pytest.fixture(scope="module")
def verifier():
    with V.Verifier(timeout_s=5.0) as v:
        v.verify("1/2", "2/4")
        process = v._workers[0].process
        yield v
        assert v.timeouts == 0 and v._workers[0].process is process, "an honest answer ran out of time or killed its worker"


def test_the_golden_table_is_large_and_has_no_doubt():
    assert len(GOLDEN) >= 300 and len({row[:2] for row in GOLDEN}) == len(GOLDEN)


@pytest.mark.parametrize("gold,pred,right", GOLDEN)
def test_golden_both_ways(verifier, gold, pred, right):
    assert verifier.verify(gold, pred) is right
    assert not pred or verifier.verify(pred, gold) is right


def test_no_answer_is_wrong(verifier):
    assert not verifier.verify("5", None) and not verifier.verify("5", "  ") and not verifier.verify("", "") and not verifier.verify("$", "$$")


@pytest.mark.parametrize("gold,text,r", TEXTS)
def test_outcome_of_a_completion(verifier, gold, text, r):
    assert verifier.outcome(gold, text) == r


@pytest.mark.parametrize("name", ["aime24", "aime25", "hmmt25", "math500", "amc23", "gsm8k_test", "gsm8k_train", "svamp", "math_train", "dapo_math_en"])
def test_every_reference_equals_itself(verifier, name):
    path = ROOT.parent / "shared" / "data" / f"{name}.jsonl"
    if not path.exists():
        pytest.skip("the data sets are not beside this project")
    golds = {str(json.loads(line)["answer"]) for line in path.open()}
    assert [g for g in golds if not verifier.verify(g, g)] == []
    respelled = [(g, "$" + g.replace(r"\frac", r"\dfrac").replace("(", " (") + "$") for g in golds if "text" not in g]
    assert [pair for pair, right in zip(respelled, verifier.verify_many(respelled)) if not right] == []


# ---------------------------------------------------------------------------------------- hostile answers and fuzz


@pytest.fixture(scope="module")
def impatient():
    with V.Verifier(timeout_s=1.0) as v:
        yield v


@pytest.mark.parametrize("pred", HOSTILE)
def test_hostile_answers_are_wrong_and_in_time(impatient, pred, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    impatient.verify("1/2", "2/4")  # a killed worker's restart is not the answer's fault
    began = time.perf_counter()
    assert impatient.outcome("7", rf"so \boxed{{{pred}}}") == -1
    assert time.perf_counter() - began < 1.0 + 1.0
    assert impatient.verify("1/2", "2/4") and not os.listdir(tmp_path)  # it goes on working, and ran no code


def test_equal_strings_need_no_reading(verifier):
    """The fallback is reached: what the parser can't read may still be the same string."""
    assert verifier.verify("Tuesday, noon", "Tuesday,  noon.")
    assert verifier.verify("z" * 3000, "z" * 3000) and not verifier.verify("z" * 3000, "z" * 2999)


TOKENS = [r"\frac", "{", "}", "(", ")", "[", "]", "+", "-", "^", "_", "!", ",", ";", ":", "=", "<", "/", "*", ".", " ", "\n", "$", "%", "&", "~", "'", '"', "#", "|",
          "\\", r"\\", r"\{", r"\}", r"\sqrt", r"\pm", r"\cup", r"\in", r"\le", r"\infty", r"\pi", r"\text{", r"\text{and}", r"\circ", r"\%", r"\cdot", r"\binom", r"\boxed{",
          r"\begin{pmatrix}", r"\end{pmatrix}", r"\sin", r"\log", "x", "y", "i", "e", "AB", "and", "apples", "cm", "\x00", "\ud83d", "é", "²", "√", "½", "٣", *"0123456"]  # fmt: skip


def test_fuzz_garbage_is_never_a_large_prime(impatient):
    """3,500 random token strings: no crash, no hang, and none equals a number that they can't spell."""
    rng = random.Random(0)
    preds = ["".join(rng.choices(TOKENS, k=rng.randint(1, 30))) for _ in range(3500)]
    before = impatient.timeouts
    assert [p for p in preds if impatient.verify("1000000007", p)] == []
    assert impatient.timeouts - before <= 35


def spelled(rng: random.Random, v: Fraction, grouped: bool) -> str:
    """One of the ways to write a rational number in an answer; thousands separators where no list can be meant."""
    p, q, sign = abs(v.numerator), v.denominator, "-" if v < 0 else ""
    k = rng.randint(1, 4)
    ways = [f"{sign}\\frac{{{k * p}}}{{{k * q}}}", f"{sign}\\dfrac{{{p}}}{{{q}}}", f"{sign}{p}/{q}", f"\\frac{{{sign}{p}}}{{{q}}}", f"{sign}{p} / {q}", f"{sign}({p})/({q})"]
    if q == 1:
        ways += [f"{sign}{p}", f"{sign}{p}.0", f"{int(v):,}" if grouped else f"{v}", f"{sign}0{p}", f"{sign}\\sqrt{{{p * p}}}", f"{sign}{p}\\cdot 1", f"{v - k}+{k}"]
    elif 10**6 % q == 0:
        ways += [f"{sign}{p * (10**6 // q) / 10**6:.6f}", f"{sign}{p * (10**6 // q) / 10**6:.6f}".rstrip("0")]
    if p > q > 1:
        ways += [f"{sign}{p // q}\\frac{{{p % q}}}{{{q}}}", f"{sign}{p // q} {p % q}/{q}"]
    return rng.choice(ways)


def test_fuzz_spellings_and_structures(verifier):
    """1,600 pairs whose verdict is known: numbers, lists, sets and tuples, spelled at random, equal, mutated or reordered."""
    rng = random.Random(1)
    kinds = {"one": "{}", "dressed": r"$x={}$", "unit": r"{}\text{{ apples}}", "list": "{}, {}, {}", "and": r"{}, {}, \text{{ and }} {}",
             "set": r"\{{{}, {}, {}\}}", "tuple": r"\left({}, {}, {}\right)"}  # fmt: skip
    pairs, wants = [], []
    while len(pairs) < 1600:
        kind = rng.choice(list(kinds))
        n = kinds[kind].replace("{{", "").count("{}")
        values = [Fraction(rng.randint(-2000, 2000), rng.choice([1, 1, 1, 2, 3, 5, 8, 12, 100])) for _ in range(n)]
        other = list(values)
        change = rng.choice(["none", "mutate", "shuffle", "drop"])
        if change == "mutate":
            i = rng.randrange(n)
            other[i] = rng.choice([-other[i], other[i] + 1, other[i] * 10, other[i] + Fraction(1, 1000), 1 / (other[i] or 2)])
        elif change == "shuffle":
            rng.shuffle(other)
        elif change == "drop" and n > 1:
            other[0] = other[1]
        compare = (list, sorted, set)[(kind in ("list", "and")) + 2 * (kind == "set")]
        wants.append(compare(values) == compare(other))
        pairs.append(tuple(kinds[kind].format(*(spelled(rng, v, n == 1) for v in side)) for side in (values, other)))
    got = verifier.verify_many(pairs)
    assert [(*pair, want) for pair, want, right in zip(pairs, wants, got) if right is not want] == []
    assert 0.3 < sum(wants) / len(wants) < 0.7 and verifier.timeouts == 0


# ---------------------------------------------------------------------------------------- workers


def test_from_threads_and_in_order():
    pairs = [(f"{i}/2", f"{2 * i if i % 3 else 2 * i + 1}/4") for i in range(1, 19)]
    want = [i % 3 != 0 for i in range(1, 19)]
    results = {}
    with V.Verifier(timeout_s=5.0, workers=2) as v:
        threads = [threading.Thread(target=lambda n=n: results.update({n: v.verify_many(pairs)})) for n in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert results == {0: want, 1: want, 2: want}


def alive(pid: int) -> bool:
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")")[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_worker_is_replaced_and_none_is_left():
    v = V.Verifier(timeout_s=5.0)
    assert v.verify("1/2", "2/4")
    pid = v._workers[0].process.pid
    os.kill(pid, 9)
    assert v.verify("1/2", "2/4") and v._workers[0].process.pid != pid
    last = v._workers[0].process.pid
    v.close()
    v.close()
    assert not alive(pid) and not alive(last)
    with v:
        assert v.verify("1/2", "2/4")  # a closed one starts again


PARENT = """
import os, sys, threading, time
import verify as V
v = V.Verifier(timeout_s=2.0)
v.verify("1/2", "2/4")
print(v._workers[0].process.pid, flush=True)
if sys.argv[1] == "fork" and os.fork() == 0:  # holds the pipe to the worker open
    print(os.getpid(), flush=True)
    time.sleep(60)
if sys.argv[1] == "busy":
    threading.Thread(target=v.verify, args=("7", "9^{9^{9^9}}+x")).start()
time.sleep(60)
"""


@pytest.mark.parametrize("state", ["idle", "busy", "fork"])
def test_workers_end_when_their_parent_is_killed(state):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, state], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    pids = [int(parent.stdout.readline()) for _ in range(1 + (state == "fork"))]
    time.sleep(0.5)
    assert alive(pids[0])
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 5
    while alive(pids[0]) and time.monotonic() < deadline:
        time.sleep(0.05)
    try:
        assert not alive(pids[0])
    finally:
        parent.stdout.close()
        for pid in filter(alive, pids):
            os.kill(pid, 9)


def test_timeouts_are_counted(impatient):
    before = impatient.timeouts
    assert not impatient.verify("7", "((10!)!)!") and not impatient.verify("7", "8/3")
    assert impatient.timeouts == before + 1


def test_a_late_reply_is_nobodys_verdict(monkeypatch):
    """Ctrl-C between question and reply: the reply must not answer the next question."""
    with V.Verifier() as v:
        assert v.verify("1/2", "2/4")
        with monkeypatch.context() as m:
            m.setattr(V._Worker, "_read", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                v.verify("1/2", "3/6")
        assert not v.verify("1/2", "3/7")


def test_memory_is_bounded_and_hunger_is_wrong(impatient):
    impatient.verify("1/2", "2/4")
    pid = impatient._workers[0].process.pid
    assert resource.prlimit(pid, resource.RLIMIT_AS) == (V.MEMORY_BYTES, V.MEMORY_BYTES) and V.MEMORY_BYTES <= 1 << 30
    assert not impatient.verify("7", "2^{10^{10}}") and impatient.verify("1/2", "2/4")


def test_descriptors_beyond_1024():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("no more than 1024 descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with V.Verifier() as v:
            assert v.verify("1/2", "2/4")
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_starts_in_under_two_seconds():
    def start() -> float:
        began = time.perf_counter()
        with V.Verifier() as v:
            assert v.verify("1/2", "2/4")
        return time.perf_counter() - began

    assert min(start() for _ in range(3)) < 2


def test_numbers_are_decided_without_a_worker():
    v = V.Verifier()
    began = time.perf_counter()
    assert all(v.verify_many([(str(i), f"{i}.0") for i in range(2000)]))
    assert v._workers[0].process is None and time.perf_counter() - began < 1


def test_bad_settings():
    for bad in ({"timeout_s": 0}, {"workers": 0}):
        with pytest.raises(ValueError, match="timeout_s > 0 and workers >= 1"):
            V.Verifier(**bad)
