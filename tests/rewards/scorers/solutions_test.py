"""Mode `latex`: an answer is right in whatever form it is written, and wrong in any form that means
something else.
"""

import pytest
from fixtures.rewards_scorers import attempt
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.rewards.scorers.answer.latex import canonical
from jaxrl_llm.rewards.scorers.answer.scorer import answer_scorer
from jaxrl_llm.rewards.scorers.answer.solutions import solutions_agree

SAME = [
  ('2^{2023}', r'2^{2023} \approx 9.6 \times 10^{608}'),
  ('3', r'x=\frac{9}{3}'), ('(3,-2)', r'x=3,\ y=-2'), ('x=3, y=-2', '(x,y)=(3,-2)'),
  ('-3, 7', r'-3 \text{ and } 7'), ('42', r'\boxed{42}'), (r'2\sqrt{3}', '2√3'),
  (r'\sqrt[3]{2}', r'\sqrt[3]2'), (r'\sqrt[3]{2}', r'2^{\frac13}'), ('3-4i', r'3-4\mathrm{i}'),
  ('3-4i', '3+(-4)i'), (r'\ln 2', r'\log_e 2'), ('18', r'18~\mathrm{cm^2}'),
  (r'(\frac{1}{2},\frac{\pi}{3},4)', r'\left(\dfrac12,\dfrac\pi3,4\right)'),
  ('1234567', '1 234 567'), ('1234567', r'1\,234\,567'), ('12000', '12~000'),
  ('12000', r'12,\!000'), ('12000',
  '12{,}000'),
  (r'60^\circ', '60°'), (r'60^\circ', r'60\text{ degrees}'), ('60', r'60^{\circ}'), (r'60^\circ',
  r'\angle ABC = 60\degree'),
  (r'\frac{\pi}{3}', r'60^\circ'),
  (r'e^{i\pi/3}', r'e^{\frac{\pi i}{3}}'), (r'e^{i\pi/3}', r'\exp\left(\frac{i\pi}{3}\right)'),
  (r'e^{i\pi/3}', r'\mathrm{e}^{\mathrm{i}\pi/3}'),
  (r'e^{i\pi/3}', r'\cos 60^\circ+i\sin 60^\circ'),
  (r'e^{i\pi/3}', r'\operatorname{cis}\frac{\pi}{3}'), (r'e^{i\pi/3}', r'\frac{1+i\sqrt3}{2}'),
  (r'0.\overline{36}', r'\frac{4}{11}'), (r'\frac13', '0.333...'), ('3.5', r'3\frac12'),
  ('3.5', '3 1/2'), (r'\frac{3\pm\sqrt{5}}{2}', r'\frac{3+\sqrt5}2,\frac{3-\sqrt5}2'),
  ('5, -5', r'\pm 5'), ('1,2', r'x_1=1, x_2=2'), ('1,2', r'x=1\text{ or }x=2'),
  (r'\{1,2\}', r'x \in \{2, 1\}'), ('1,2,3', r'1\text{, }2\text{, and }3'),
  ('(5, 8), (8, 5)', r'(x, y) = (5, 8) \text{ and } (8, 5)'), ('p=5,q=2;p=7,q=2', '(5,2),(7,2)'),
  ('AB=4,CD=5', '4, 5'), ('a=2, b=7', r'b = 7 \text{ and } a = 2'),
  (r'[2,\infty)', r'\{x \mid x \geq 2\}'), ('(2,3)', '2<x<3'), ('x > 3', r'x \in (3,\infty)'),
  ('x<1', '-x>-1'), (r'\mathbb{R}\setminus\{2\}', r'x \neq 2'),
  (r'\mathbb{R}', r'\text{all real numbers}'), (r'(0,\infty)',
  r'\mathbb{R}^+'),
  (r'\begin{pmatrix}1\\2\end{pmatrix}', r'\left[\begin{array}{c}1\\2\end{array}\right]'),
  (r'\begin{pmatrix}1\\2\end{pmatrix}', '(1,2)'),
  ('y=2x+3', '2x-y+3=0'), ('y=2x+3', '2x+3'), ('x^2/4 + y^2/3 = 1', 'x^2/16 + y^2/12 = 1/4'),
  ('x+3=0', 'x=-3'), (r'1011_2', r'1011_{\text{two}}'), ('3:45', r'3\!:\!45'),
  ('4:30 PM', '4:30 p.m.'), (r'11:05 \text{ a.m.}',
  '11:05 AM'),
  ('3:4', r'3\text{ to }4'), ('B', r'\textbf{(B)}\ 12'), ('12', r'\textbf{(B)}\ 12'),
  (r'\textbf{(B)}\ 12', 'B'), (r'\text{(D)}', 'D'), (r'\text{Yes}', 'yes'),
  (r'\text{no solution}', r'\emptyset'), ('Tuesday', r'\text{Tuesday}'), (r'\binom{5}{2}', '10'),
  ('10', r'{5 \choose 2}'), ('120', '5!'), ('144', r'3!\cdot 4! = 144'), ('11',
  'x = 5+5+1 = 11'),
  (r'50 \text{ square inches}', r'50\ \mathrm{in}^2'), ('7.2', r'7.2 \frac{\text{km}}{\text{h}}'),
  (r'150\pi', r'150\pi \text{ cm}^3'), (r'\$18', '18 dollars'),
  ('9', r'9\text{ square units}'), ('14',
  r'\textcolor{blue}{14}'),
  (r'28\%', '28 percent'), (r'66\frac{2}{3}\%', r'\frac{200}{3}\%'),
  (r'9 \times 10^6', r'9{\times}10^{6}'), (r'\log_2 5', r'\frac{\ln 5}{\ln 2}'),
  (r'\tan^2(y)+1', r'\sec^2(y)'), (r'\sin 2x', r'2\sin x\cos x'),
  (r'\frac{1}{3\sqrt[3]{x}^2}', r'\frac{1}{3x^{2/3}}'), (r'\arctan 2', r'\tan^{-1} 2'),
  ('3^{2n}', '9^n'), (r'\frac{1}{3}', r'\frac{1}{3} \approx 0.333'), (r'\infty', r'+\infty'),
  ('f(x)=2x+1', 'y=2x+1'), ('1000.99',
  '1000,99'),
]  # fmt: skip
OTHER = [
  ('y=x', 'y=|x|'), ('y=2x+3', 'y=|2x+3|'), ('x<3', '|x|<3'), ('1011_2', '11_{10}'),
  ('1,2', '1.2'), ('1:2:3', r'\frac16'),
  (r'\text{no solution}', '-'), (r'\emptyset', '()'), ('x+5', '|x+5|'), ('4-x', '|x-4|'),
  ('3', '-3'), ('2,3', '(3,2)'), ('x=3', 'y=3'), ('(2,5)', '[2,5]'), ('1/3', '0.33'),
  (r'\pi', '3.14159'), ('14',
  '13.99999999'),
  ('3/4', '0.7500001'), ('2', '2,3'), ('2', r'2\text{ or }3'),
  ('2', r'\pm2'), ('5', '5i'), (r'5 \text{ cm}',
  r'5\text{ m}'),
  (r'\{1,2\}', '(1,2)'), ('3,3,5', '3,5,5'), (r'3 \text{ and } 11', r'7 \text{ and } 7'),
  ('1011_2', '1011_3'), ('14', '14_6'),
  ('0.35', r'0.35\%'), ('75 cents', r'\$75'), (r'\textbf{(B)}\ 12', '13'), ('E', r'\text{A or E}'),
  ('3:45', '3:54'), ('3:4', '4:3'),
  ('y=2x+3', 'y=3x+2'), ('x^2+y^2=4', 'x^2+y^2=2'), ('|x|', 'x'),
  ('x', r'\sqrt{x^2}'), ('f(2x)', '2f(x)'), ('f(x)',
  'f(y)'),
  ('2^{2023}', '2^{2023}-1'), ('e^{-200}', 'e^{-201}'),
  (r'\sum_{k=1}^{n} k', r'\sum_{k=1}^{n} k^2'), ('x>3', r'x\ge3'), ('11', 'x = 5+5+1 = 7 = 11'),
  (r'\frac13', r'\frac13 \approx 1.3'), ('11', r'x\approx11'), ('41', r'41 \approx 42'),
  (r'\text{no solution}', '0'), ('0', r'\emptyset'), ('a=1,b=2', '(2,1)'), ('[0,1)', '(0,1]'),
  ('15', '1.5'), ('5',
  '5!'),
  (r'\begin{pmatrix}1&2\\3&4\end{pmatrix}', r'\begin{pmatrix}1&3\\2&4\end{pmatrix}'),
  ('42', r'\boxed{41\boxed{42}}'), ('2x+z=1', '1'), ('7=11a+c', '11a+c'),
  (r'262537412640768744', r'e^{\pi\sqrt{163}}'), (r'1-\frac1e', r'1+\frac1e'),
]  # fmt: skip


@pytest.mark.parametrize(('truth', 'answer'), SAME)
def test_another_form_of_the_truth_is_right(truth, answer):
  assert solutions_agree(truth, answer) is True


@pytest.mark.parametrize(('truth', 'answer'), OTHER)
def test_another_answer_is_wrong(truth, answer):
  assert solutions_agree(truth, answer) is False


@pytest.mark.parametrize(('truth', 'answer'), SAME[::4] + OTHER[::4])
def test_one_spelling_has_one_spelling(truth, answer):
  for text in (truth, answer):
    assert canonical(canonical(text)) == canonical(text)


HOSTILE = [
  r'\begin{pmatrix}\end{pmatrix}', r'41 \approx 1e999', '+'.join(['997^{-2000}'] * 160),
  r'2^{9999}\cdot2^{9000}+(\frac13)!',
  '9^{9^{9^9}}', 'e^{e^{e^{e^{e^e}}}}', '(x+1)^{9999}', 'x^{9999}', r'\sin(10^{4000})',
  r'\binom{9999}{4999}', '9999!', '1e999',
  '(' * 300, r'\frac{' * 200, '{' * 1_900, '$' * 1_500, r'\sin ' * 40, '!' * 1_000,
  'x=' * 600 + '42', r'\text{' * 300, '|' * 999,
  '+' * 1_900, '1/' * 900 + '1', ','.join('1' * 900), '**' * 900, r'\boxed{' * 250, '0^{0}',
  r'\frac{1}{0}', r'\log_1 2', '_{' * 500,
]  # fmt: skip


@pytest.mark.parametrize('text', HOSTILE, ids=lambda text: text[:12])
def test_hostile_answers_are_wrong(text):
  for truth in ('41', 'x', '(1,2)', r'\{1,2\}', '[1,2)'):
    assert solutions_agree(truth, text) is False


@given(text=st.text(alphabet='\\{}()[]|^_,;:=<>+-*/!.%$ 0123xyei√°πfracsqrtpmindoev', max_size=40))
@settings(deadline=None, max_examples=150)
def test_any_text_gets_a_verdict_and_is_its_own_equal(text):
  assert solutions_agree('41', text) in (True, False)
  assert solutions_agree(text, text) in (True, None)


@pytest.mark.parametrize(
  ('completion', 'truth', 'wanted'),
  [
    (r'The roots are $x=\boxed{4}$ and $x=\boxed{-1}$.', '-1, 4', 1.0),
    (r'\boxed{2}, \boxed{3}, \boxed{5}', '2, 3, 5', 1.0),
    (r'\boxed{k = 45} \quad \text{and} \quad \boxed{n = 2}', 'k = 45, n = 2', 1.0),
    (r'\boxed{1} no no no no no \boxed{2}', '1, 2', 0.0),
    (r'Either \boxed{41} or \boxed{42}.', '42', 0.0),
    (r'First \boxed{41}. Then, on a closer look, \boxed{42}.', '42', 0.0),
    ('Let $s = \\boxed{4}$.\n\n**Final Answer**\n$$\\boxed{16}$$', '16', 1.0),
    ('Let $s = \\boxed{4}$.\n\n**Final Answer**\n$$\\boxed{16}$$', '4', 0.0),
    (r'<think>Is it \boxed{41}?</think> It is \boxed{42}.', '42', 1.0),
    (r'Thus $$\boxed{\,p = \boxed{\frac{5}{6}}\,}$$', '5/6', 1.0),
    (r'It is $\boxed{\frac12}$, that is $\boxed{0.5}$.', '0.5', 1.0),
    ('**Final Answer:**\n\\[\n42\n\\]', '42', 1.0),
    ('**Final Answer**\n\n42', '42', 1.0),
    ('No root but one. **Answer:** $(2,3)$', 'x \\in (2, 3)', 1.0),
    ('He paid in all **$120**.', '120 dollars', 1.0),
    ('The answer is **19** marbles.', '19', 1.0),
    ('The answer is 42, because 6 * 7 = 42.', '42', 1.0),
    ('The answer is 41, not 42.', '42', 0.0),
    ('Answer: the largest $n$ is 34.', '34', 1.0),
    ('The right choice is **B) the median**.\n\nFinal Answer: B', '(B)', 1.0),
    ('It is 42, I think.', '42', 0.0),
  ],
)
def test_the_answer_of_a_completion(completion, truth, wanted):
  assert answer_scorer(mode='latex')(attempt(completion, truth=truth)).value == wanted


@pytest.mark.parametrize(
  ('completion', 'wanted'),
  [
    ('So $n = 7$. Thus $x = 3$ or $x = 4$.', '3, 4'),
    ('We find \\[ x = 3. \\]', '3'),
    ('It is $7$, and I do not know why $8$ is wrong.', None),
  ],
)
def test_the_formulas_of_the_last_sentence(completion, wanted):
  scored = answer_scorer(mode='latex', extraction='formula')
  assert scored(attempt(completion, truth=wanted or '8')).value == (wanted is not None)


@pytest.mark.parametrize(
  ('truth', 'answer'), [('12', '(A) ' * 490), ('(A) ' * 490, '12'), ('B', r'\text{(A)} ' * 170)]
)
def test_many_letters_are_no_answer_and_no_recursion(truth, answer):
  assert solutions_agree(truth, answer) is False


def test_a_root_sign_covers_the_whole_number():
  assert solutions_agree('√50', r'5\sqrt{2}') and solutions_agree('√2.25', '1.5')
  assert not solutions_agree('√50', '0')


def test_a_choice_with_another_value_than_the_truths_is_another_answer():
  truth = r'\textbf{(C) } 15'
  assert solutions_agree(truth, 'C') and solutions_agree(truth, '15')
  assert solutions_agree(truth, r'\textbf{(C)}\ \frac{30}{2}')
  assert not solutions_agree(truth, r'\textbf{(C)}\ 20') and not solutions_agree(
    truth, r'\textbf{(D)}\ 15'
  )
