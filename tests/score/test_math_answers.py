"""The scorer `math` against a table of answers whose truth was set by hand."""

import pytest

from rollmill.tasks.score.scorer import Candidate
from rollmill.tasks.score.scorers.built_in import MathScorer

# A line: reference | the policy's last message, where <n> is a line break | 1 if it is right, else 0.
TABLE = {
    "the last box": r"""
6|\boxed{5} no wait \boxed{6}|1
6|so \boxed{5}.<n><n>Wait, that is wrong.<n><n>\boxed{6}|1
6|First \boxed{2}, second \boxed{3}, so \boxed{6}|1
6|\boxed{6} no wait \boxed{5}|0
6|\boxed{6}, hmm, no: \boxed{7}|0
5|I get $\boxed{4}$, and then $\boxed{5}$|1
4|I get $\boxed{4}$, and then $\boxed{5}$|0
5|\boxed{4}, \boxed{5}|1
4|\boxed{4}, \boxed{5}|0
5|\boxed{4} or \boxed{5}|1
5|\boxed{4} and \boxed{5}|1
12|The parts are \(\boxed{3}\) and \(\boxed{4}\). The product is \(\boxed{12}\).|1
12|The parts are \(\boxed{3}\) and \(\boxed{4}\). The product is \(\boxed{7}\).|0
7|\[\boxed{8}\] A check shows 8 fails. \[\boxed{7}\]|1
8|\[\boxed{8}\] A check shows 8 fails. \[\boxed{7}\]|0
3|\boxed{3} is my answer, since 1 + 2 = 3 and not 4.|1
3|\boxed{3}. I checked 5 cases.|1
5|\boxed{3}. I checked 5 cases.|0
\frac{1}{2}|\boxed{\frac{1}{3}} is wrong; \boxed{\frac{1}{2}}|1
\frac{1}{3}|\boxed{\frac{1}{3}} is wrong; \boxed{\frac{1}{2}}|0
10|**Answer:** \boxed{9}<n>**Corrected:** \boxed{10}|1
10|\boxed{10}<n>\boxed{10}|1
2|$x=\boxed{1}$, hence $y=\boxed{2}$|1
-4|\boxed{4}? The sign is wrong: \boxed{-4}|1
4|\boxed{4}? The sign is wrong: \boxed{-4}|0
5|\boxed{5} but then \boxed{6|0
6|\boxed{5} but then \boxed{6|0
5|\boxed{5} but then \boxed{|0
5|It is \boxed {5}.|1
5|\boxed<n>{5}|1
5|\boxed {4} no wait \boxed {5}|1
4|\boxed {4} no wait \boxed {5}|0
5|\boxed{5}. The answer is in the \boxed{}.|1
4|\boxed{5}. The answer is in the \boxed{}.|0
5|\boxed{4}, no, \boxed{5}, so $\boxed{ }$|1
5|\boxed{5} \boxed{\text{}} \boxed{\,}|1
5|\boxed{}|0
5|I found 5, \boxed{}|0
5|\boxed5|1
5|\boxed 5 since I checked 7 cases|1
7|\boxed 5 since I checked 7 cases|0
5|\boxed 4, no, \boxed 5.|1
-5|\boxed -5|1
\frac{1}{2}|\boxed \frac{1}{2}|1
5|\fbox{5}|1
10 000|\boxed{10 000}|1
1 234 567|it is \boxed{1 234 567}|1
1 234 567|\boxed{1\,234\,567}|1
x^2 100|\boxed{x^2 100}|1
800|\boxed{2^3 100}|1
5|\boxed{~5~}|1
5|\boxed{5}. I put it in \boxed{...}|1
5|\boxed{5} \boxed{\textbf{}}|1
5|\fbox{5}, I checked 7 cases|1
5|\fbox{4}, no, \fbox{5}|1
4|\fbox{4}, no, \fbox{5}|0
5|\boxed{5} \fbox{Q.E.D.}|1
5|\boxed{4} \fbox{5}|0
5|\boxedness{4}, \boxed{5}|1
""",
    "units and money": r"""
5|\boxed{5\text{ cm}}|1
5|\boxed{5 \text{ cm}^2}|1
5|\boxed{5}\text{ cm}|1
5|\boxed{6\text{ cm}}|0
72|\boxed{72^\circ}|1
72|\boxed{72} degrees|1
1200|\boxed{\$1200}|1
1200|\boxed{\$1,200}|1
1200|\boxed{1{,}200}|1
1200|\boxed{1,200}|1
1200|\boxed{120}|0
50|\boxed{50\%}|1
50\%|\boxed{50\%}|1
50\%|\boxed{0.5}|1
50|\boxed{60\%}|0
42|It takes 42 minutes|1
42|It takes 41 minutes|0
3.5|\boxed{3.5\text{ hours}}|1
""",
    "full stops and spacing": r"""
5|\boxed{5.}|1
5|\boxed{5. }|1
5|$\boxed{5.}$|1
5|$\boxed{5}$.|1
5|\[\boxed{5}.\]|1
5|\boxed{\text{5.}}|1
5|\boxed{$5.$}|1
5|\boxed{6.}|0
0.5|\boxed{0.5.}|1
\frac{1}{2}|\boxed{1/2.}|1
5.|\boxed{5}|1
\boxed{5.}|\boxed{5}|1
5|\boxed{\left. 5 \right.}|1
5|\boxed{\left\{ 5 \right.}|1
1000|\boxed{1\,000}|1
1000|\boxed{1\!000}|1
1000|\boxed{1\;000}|1
1000|\boxed{1\:000}|1
1000|\boxed{1\ 000}|1
1000|\boxed{1~000}|1
1000|\boxed{1 000}|1
1000|\boxed{1{,}\!000}|1
1000|\boxed{1\,001}|0
1000|It is $1\,000$|1
1000000|\boxed{1\,000\,000}|1
1000.5|\boxed{1\,000.5}|1
\frac{1}{1000}|\boxed{\frac{1}{1\,000}}|1
1\,000|\boxed{1000}|1
(1,200)|\boxed{(1,\,200)}|1
2x|\boxed{2\,x}|1
5|\boxed{\,5\;}|1
5|\boxed{5\,\text{cm}}|1
\int_0^1 x\,dx|\boxed{1/2}|1
""",
    "sets, tuples and intervals": r"""
\{1,2,3\}|\boxed{\{1,2,3\}}|1
\{1,2,3\}|\boxed{\{3,2,1\}}|1
\{1,2,3\}|\boxed{\{1,2\}}|0
\{1,2,3\}|\boxed{\{1,2,4\}}|0
\{1,2\}|\boxed{1,2}|1
\{1,2\}|$x \in \boxed{\{1, 2\}}$|1
\{1,2\}|First \boxed{\{1\}}, and in full \boxed{\{1,2\}}|1
\{1,2\}|First \boxed{\{1,2\}}, or rather \boxed{\{1\}}|0
1,2|\boxed{2,1}|1
1,2|\boxed{1, 3}|0
1 \text{ and } 2|\boxed{1 \text{ and } 2}|1
\{-2,2\}|\boxed{\pm 2}|1
\pm 2|\boxed{-2, 2}|1
\emptyset|\boxed{\emptyset}|1
(0,1)|\boxed{(0,1)}|1
(0,1)|\boxed{(1,0)}|0
[0,1)|\boxed{[0,1)}|1
[0,1)|\boxed{(0,1)}|0
[0,1)|\boxed{[0,1]}|0
[0,1]|\boxed{[0,1]}|1
(-\infty, 2]|\boxed{(-\infty,2]}|1
(-\infty, 2]|\boxed{(-\infty,2)}|0
(-\infty,-1)\cup(1,\infty)|\boxed{(-\infty,-1) \cup (1,\infty)}|1
(-\infty,-1)\cup(1,\infty)|\boxed{(1,\infty) \cup (-\infty,-1)}|1
(-\infty,-1)\cup(1,\infty)|\boxed{(-\infty,1)\cup(1,\infty)}|0
(1,2,3)|\boxed{(1, 2, 3)}|1
(1,2,3)|\boxed{(3, 2, 1)}|0
[0,1)|\boxed{[0,2)}, then with the bound \boxed{[0,1)}|1
""",
    "LaTeX": r"""
\frac{1}{2}|\boxed{\frac12}|1
\frac{1}{2}|\boxed{\dfrac{1}{2}}|1
\frac{1}{2}|\boxed{\tfrac{2}{4}}|1
\frac{1}{2}|\boxed{1/2}|1
\frac{1}{2}|\boxed{.5}|1
\frac{1}{2}|\boxed{0.50}|1
\frac{1}{2}|\boxed{\frac{1}{3}}|0
\frac{3}{2}|\boxed{1\frac{1}{2}}|1
\sqrt{8}|\boxed{2\sqrt{2}}|1
\sqrt{8}|\boxed{2\sqrt{3}}|0
\sqrt2|\boxed{\sqrt{2}}|1
\frac{\sqrt{3}}{3}|\boxed{\frac{1}{\sqrt{3}}}|1
2^{10}|\boxed{1024}|1
1024|\boxed{2^{10}}|1
\pi|\boxed{\pi}|1
2\pi|\boxed{2\pi}|1
2\pi|\boxed{\pi}|0
x^2+2x+1|\boxed{(x+1)^2}|1
x^2+2x+1|\boxed{(x+2)^2}|0
x+y|\boxed{y + x}|1
\log 8|\boxed{3\log 2}|1
e^2|\boxed{e^{2}}|1
3+4i|\boxed{4i+3}|1
3+4i|\boxed{3-4i}|0
5|\boxed{x = 5}|1
5|\boxed{x=6}|0
y=2x+1|\boxed{y = 2x + 1}|1
\begin{pmatrix}1\\2\end{pmatrix}|\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}|1
\begin{pmatrix}1\\2\end{pmatrix}|\boxed{\begin{pmatrix} 2 \\ 1 \end{pmatrix}}|0
3|\boxed{\left(3\right)}|1
3|\boxed{\text{3}}|1
3|\boxed{\boxed{3}}|1
6|\boxed 6|1
\text{B}|\boxed{\text{B}}|1
\text{B}|\boxed{\text{C}}|0
""",
}


@pytest.mark.parametrize("kind", TABLE)
def test_math_agrees_with_the_truth_of_each_answer(kind: str) -> None:
    cases = [line.split("|") for line in TABLE[kind].strip().splitlines()]
    wrong = [
        case
        for case in cases
        if MathScorer().score(_candidate(case[1].replace("<n>", "\n"), case[0])).value != float(case[2])
    ]
    assert wrong == []


def test_the_table_has_a_hundred_answers() -> None:
    assert sum(len(text.strip().splitlines()) for text in TABLE.values()) >= 100


def _candidate(answer: str, reference: str) -> Candidate:
    return Candidate("id", {"answer": reference}, [{"role": "assistant", "content": answer}], True)
