"""An answer scores 1 if it is the completion's one answer and agrees with the truth; every hedge
scores 0.
"""

import typing
from fractions import Fraction

import pytest
from fixtures.rewards_scorers import attempt
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxrl_llm.rewards.scorers.answer.extraction import (
  MAX_LENGTH,
  Method,
  candidates,
  extract,
  reference,
)
from jaxrl_llm.rewards.scorers.answer.numbers import numbers_agree, parse_number
from jaxrl_llm.rewards.scorers.answer.scorer import answer_scorer


def value(completion, truth='42', prompt='What is it?', **options):
  return answer_scorer(**options)(attempt(completion, truth=truth, prompt=prompt)).value


@pytest.mark.parametrize(
  ('text', 'number'),
  [
    ('42', 42), ('-42', -42), ('+42', 42), ('\u221242', -42), ('42.', 42), (' 42\n', 42),
    ('042', 42), ('1,000', 1000), ('1,234,567.5', Fraction('1234567.5')), ('1{,}000', 1000),
    (r'1\,000', 1000), ('.5', Fraction(1, 2)), ('0.1', Fraction(1, 10)), ('5.', 5), ('1e3', 1000),
    ('2.5E-2', Fraction(1, 40)), ('1/3', Fraction(1, 3)), ('-1/3', Fraction(-1, 3)),
    ('1 1/2', Fraction(3, 2)), ('-1 1/2', Fraction(-3, 2)), (r'\frac{1}{3}', Fraction(1, 3)),
    (r'-\dfrac{7}{2}', Fraction(-7, 2)), (r'1\frac{1}{2}', Fraction(3, 2)), ('$5', 5), ('$-5', -5),
    ('-$5', -5), ('5€', 5), (r'\$1,000.00', 1000), ('$42$', 42), ('$42.$', 42), ('**42**', 42),
  ],
)  # fmt: skip
def test_numbers_are_read_exactly(text, number):
  assert parse_number(text) == (number, False)


@pytest.mark.parametrize(
  'text',
  ['', '.', '-', '--5', 'nan', 'inf', '1,00', '1,0000', '12,34', '1,000,00', '42 43', '42, 43',
   '42 or 43', 'x', '4x', '1/0', r'\frac{1}{0}', '1/2/3', '1e9999', '9' * 201, '1e999999999',
   '\uff14\uff12', '0x10', '1_000', '4 2', '42%%'],
)  # fmt: skip
def test_what_is_not_one_number_is_none(text):
  assert parse_number(text) is None


def test_percent_and_tolerance():
  def agree(truth, answer, **tolerance):
    return numbers_agree(parse_number(truth), parse_number(answer), **tolerance)

  assert (
    agree('42%', '42 %') and agree('42%', r'42\%') and agree('0.42', '42%') and agree('42%', '0.42')
  )
  assert agree('42', '42%')  # The reference to "what percentage" often has no sign.
  assert not agree('42', '0.42') and not agree('42%', '4200%')
  assert not agree('1000000', '1000001') and not agree('1/3', '0.3333333333')
  assert agree('1/3', '0.3333', absolute=1e-4) and not agree('1/3', '0.333', absolute=1e-4)
  # |98.5 − 100| = 1.5: within 0.02 · 100 and not within 0.01 · 100; the tolerance is the truth's,
  # not the answer's.
  assert agree('100', '98.5', relative=0.02) and not agree('100', '98.5', relative=0.01)
  assert agree('-100', '-98.5', relative=0.02)


@pytest.mark.parametrize(
  ('method', 'text', 'found'),
  [
    ('whole', ' a b \n', ['a b']),
    ('boxed', r'\boxed{1} then \boxed{\frac{1}{2}}', ['1', r'\frac{1}{2}']),
    ('boxed', r'\boxed{x \} y} \fbox{2}', [r'x \} y', '2']),
    ('boxed', r'\boxed{1', []),
    ('boxed', r'\boxed{ { \boxed{3}', ['3']),
    ('boxed', r'} \boxed {4} \boxed{}', ['4']),
    ('boxed', r'\boxed{1\boxed{2\boxed{3}\boxed{4}}}', ['1 2 3 4']),
    ('boxed', r'\boxed{1\boxed{2}} \boxed{3}', ['1 2', '3']),
    ('boxed', r'\boxed{1 { \boxed{\boxed{2}\boxed{3}} \boxed{4}', ['2 3', '4']),
    ('boxed', r'\boxed{1} Final answer: \boxed{2} \boxed{3}', ['2', '3']),
    ('boxed', r'\boxed{1} is my final answer', ['1']),
    ('hashes', 'a\n#### 1\nb\n####2', ['1', '2']),
    ('tags', '<answer> 1\n2 </answer> <answer>3</answer><answer>4', ['1\n2', '3']),
    ('phrase', 'The answer is 3.5. So the final answer is: 4!', ['3.5', '4']),
    ('phrase', 'THE ANSWER IS\n7 apples\nok', ['7 apples']),
    ('number', 'from 3 to 1,234.50, then x2 costs $-7.25.', ['$-7.25']),
    ('number', '5-3', ['3']),
    ('number', '2024', ['2024']),
    ('number', 'about 3/4 of it', ['3/4']),
    ('number', 'none', []),
  ],
)
def test_candidates(method, text, found):
  assert candidates(text, method) == found


@pytest.mark.parametrize(
  ('truth', 'answer'),
  [
    ('42', '42'),
    (' 42 \n', '42'),
    ('It is 7.\n#### 42', '42'),
    (r'7 is not it: \boxed{7}. So \boxed{\frac{1}{2}}', r'\frac{1}{2}'),
    (r'\boxed{7} #### 42', '42'),
    ('New York', 'New York'),
  ],
)
def test_the_truths_own_form_is_recognised(truth, answer):
  assert reference(truth) == answer


GSM8K = [
  ('She has 5 + 3 = <<5+3=8>>8 eggs.\n#### 8', '#### 8', 1.0),
  ('…\n#### 1,200', 'so 1200 dollars\n#### $1200', 1.0),
  ('…\n#### -3', '#### 3', 0.0),
  ('…\n#### 42', '#### 42\n#### 42.0', 1.0),
  ('…\n#### 42', '#### 41\n#### 42', 0.0),
  ('…\n#### 42', '#### 41, 42', 0.0),
  ('…\n#### 42', '#### 41 42', 0.0),
  ('…\n#### 42', '#### 24', 0.0),
  ('…\n#### 42', '42', 0.0),
  ('…\n#### 42', '####', 0.0),
]


@pytest.mark.parametrize(('truth', 'completion', 'wanted'), GSM8K)
def test_gsm8k(truth, completion, wanted):
  assert value(completion, truth, mode='numeric', extraction='hashes') == wanted


@pytest.mark.parametrize(
  ('completion', 'options', 'wanted'),
  [
    ('42', {'mode': 'exact'}, 1.0),
    (' 42\n', {'mode': 'exact'}, 1.0),
    ('42.0', {'mode': 'exact'}, 0.0),
    ('42.0', {}, 1.0),
    (r'So it is $\boxed{x = 42}$.', {}, 1.0),
    ('So it is 42.', {}, 0.0),
    ('42.0', {'mode': 'numeric'}, 1.0),
    ('42 apples', {'mode': 'numeric'}, 0.0),
    ('42 apples', {'mode': 'numeric', 'units': 'ignored'}, 1.0),
    (r'42 \text{ square feet}', {'mode': 'numeric', 'units': 'ignored'}, 1.0),
    ('42 or 43', {'mode': 'numeric', 'units': 'ignored'}, 0.0),
    ('42.1', {'mode': 'numeric', 'absolute_tolerance': 0.125}, 1.0),
    ('42.2', {'mode': 'numeric', 'absolute_tolerance': 0.125}, 0.0),
    ('42.2', {'mode': 'numeric', 'relative_tolerance': 0.005}, 1.0),
    ('42.3', {'mode': 'numeric', 'relative_tolerance': 0.005}, 0.0),
    ('42 or forty', {'mode': 'numeric', 'units': 'refused'}, 0.0),
    ('<answer>42</answer>', {'extraction': 'tags'}, 1.0),
    (r'<answer>$\boxed{42}$</answer>', {'extraction': 'tags', 'mode': 'numeric'}, 1.0),
    (r'<answer>\boxed{41} \boxed{42}</answer>', {'extraction': 'tags', 'mode': 'numeric'}, 0.0),
    ('<result>42</result>', {'extraction': 'tags', 'tag': 'result'}, 1.0),
    ('<answer>41</answer><answer>42</answer>', {'extraction': 'tags'}, 0.0),
    ('<answer>42<answer>42</answer></answer>', {'extraction': 'tags'}, 0.0),
    (r'\boxed{42} \boxed{42}', {'extraction': 'boxed'}, 1.0),
    (r'\boxed{42} \boxed{42.0}', {'extraction': 'boxed', 'mode': 'numeric'}, 1.0),
    (r'\boxed{41} \boxed{42}', {'extraction': 'boxed', 'mode': 'numeric'}, 0.0),
    (r'\boxed{42} \boxed{41}', {'extraction': 'boxed', 'mode': 'numeric'}, 0.0),
    (r'\boxed{41\boxed{42}}', {'extraction': 'boxed', 'mode': 'numeric'}, 0.0),
    ('The answer is 42.', {'extraction': 'phrase'}, 1.0),
    ('The answer is 41. No, the answer is 42.', {'extraction': 'phrase'}, 0.0),
    ('I get 40, 41, then 42', {'extraction': 'number', 'mode': 'numeric'}, 1.0),
    ('42 or maybe 41', {'extraction': 'number', 'mode': 'numeric'}, 0.0),
    ('', {'extraction': 'number', 'mode': 'numeric'}, 0.0),
  ],
)
def test_answers_to_42(completion, options, wanted):
  assert value(completion, **options) == wanted


def test_exact_mode_compares_text_with_white_space_collapsed():
  assert value('New\n  York', truth='New York', mode='exact') == 1.0
  assert value('new york', truth='New York', mode='exact') == 0.0
  assert value('new york', truth='New York', mode='exact', ignore_case=True) == 1.0
  assert value('NewYork', truth='New York', mode='exact') == 0.0


@pytest.mark.parametrize(
  ('truth', 'answer', 'wanted'),
  [
    (r'\frac{1}{2}', '0.5', 1.0),
    (r'\frac{\sqrt{2}}{2}', r'\frac{1}{\sqrt{2}}', 1.0),
    ('x^2 + 2x + 1', '(x+1)^2', 1.0),
    ('x^2 + 2x + 1', '(x-1)^2', 0.0),
    (r'\{1, 2\}', '2, 1', 1.0),
    (r'\{1, 2\}', '1, 2, 3', 0.0),
    ('(1, 2)', '(2, 1)', 0.0),
    ('42', 'x = 42', 1.0),
    ('42', '40 + 2 = 42', 1.0),
    ('42', r'42 \text{ apples}', 1.0),
    ('42', r'\text{forty-two}', 0.0),
    ('42', '41, 42', 0.0),
    ('42', '41 or 42', 0.0),
    ('42', r'41 \text{ or } 42', 0.0),
    ('42', '41 = 42', 0.0),
    ('42', 'x = 41 = 42', 0.0),
    ('42', r'41 \vee 42', 0.0),
    ('42', r'41 \cup 42', 0.0),
    ('42', r'41 \to 42', 0.0),
    ('42', r'41 \Rightarrow 42', 0.0),
    ('42', r'41 \\ 42', 0.0),
    ('42', '41. 42', 0.0),
    ('42', '41; 42', 0.0),
    ('42', r'42 \pm 1', 0.0),
    ('42', '41 42', 0.0),
    ('42', '$41$ $42$', 0.0),
    ('42', '24', 0.0),
    ('42', r'\frac{42', 0.0),
    ('42', r'\infty', 0.0),
    ('42', 'x + 1 = 42', 0.0),
    ('42', '41x = 42', 0.0),
    ('42', 'x^2 = 42', 0.0),
    ('42', r'\sqrt{x} = 42', 0.0),
    ('42', 'f(41) = 42', 1.0),
    ('42', 'x_{2} = 42', 1.0),
    ('42', r'a + b = 42', 1.0),
    ('42', r'A = \frac{1}{2} b h = 42', 1.0),
    ('101_2', '101_3', 0.0),
    ('101_{2}', '101_2', 1.0),
    ('101_2', '101', 1.0),
    ('42', '42_7', 0.0),
    ('42', '42_{10}', 1.0),
    ('5', r'5 \text{ million}', 0.0),
    ('5000000', r'5 \text{ million}', 1.0),
    ('0.333333', r'\frac{1}{3}', 1.0),
    ('0.000142857', r'\frac{1}{7000}', 1.0),
    (r'6.67 \times 10^{-11}', '0.0', 0.0),
    (r'1.6 \times 10^{-19}', r'3.2 \times 10^{-19}', 0.0),
    (r'1.6 \times 10^{-19} \text{ C}', r'3.2 \times 10^{-19} \text{ C}', 0.0),
    ('42', r'2^{\infty} e', 0.0),
    (r'\sqrt{2}', r'\max(1, \infty)', 0.0),
    (r'\{1, 2\}', r'\{1, 2^{\infty} e\}', 0.0),
    (r'(-\infty, 3]', r'(-\infty, 3.0]', 1.0),
    ('1', r'\int_0^{\infty} e^{-x} dx', 1.0),
    (r'\max(\sqrt{-1}, 1)', r'\max(\sqrt{-1},1)', 1.0),
    (r'\begin{pmatrix}1&2\end{pmatrix}^{2}', r'\begin{pmatrix}1 & 2\end{pmatrix}^2', 1.0),
    ('42', r'41 \oplus 42', 0.0),
    ('42', r'41 \colon 42', 0.0),
    ('42', '41 ? 42', 0.0),
    ('42', r'41 \hspace{1em} 42', 0.0),
    (r'42\%', r'41 ? 42\%', 0.0),
    ('41', r'41 \approxeq 42', 0.0),
    ('42', '41≡42', 0.0),
    ('42', r'41 \fbox{42}', 0.0),
    ('42', r'\gg 42', 0.0),
    ('42', '⩾ 42', 0.0),
    ('6 : 1', '6:1', 1.0),
    ('3', r'x \equiv 3 \pmod{7}', 0.0),
    (r'x = 3 \pmod{7}', r'3 \pmod 7', 1.0),
    ('42', r'42 \text{ m}^2', 1.0),
    ('10', r'\binom{5}{2}', 1.0),
    ('50', r'50\% \text{ of them}', 1.0),
    ('60', r'50\% \text{ of them}', 0.0),
  ],
)
def test_latex(truth, answer, wanted):
  assert value(rf'So \boxed{{{answer}}}.', truth, mode='latex', extraction='boxed') == wanted


def test_a_task_without_a_readable_truth_is_unscorable_whatever_the_completion():
  for completion in ('42', '', '#### 42'):
    assert value(completion, truth=None) is None
    assert value(completion, truth='  ') is None
    assert value(completion, truth='forty-two', mode='numeric', extraction='hashes') is None
    assert value(completion, truth='$', mode='latex', extraction='hashes') is None


PROMPT = (
  r'Example: 6 x 7 gives \boxed{42}, <answer>42</answer>, #### 42'
  '\nThe answer is 42. Now 84 / 2, and not 42'
)


@pytest.mark.parametrize('method', ['boxed', 'hashes', 'tags', 'phrase', 'number'])
def test_an_echo_of_the_prompt_is_no_answer(method):
  def echoed(text):
    return extract(text, method=method, prompts=[PROMPT]).answer

  assert candidates(PROMPT, method)
  assert echoed(PROMPT) is None
  assert echoed(f'You say: {PROMPT} \n {PROMPT}') is None
  assert value(PROMPT, prompt=PROMPT, extraction=method) == 0.0
  after = {
    'boxed': r'\boxed{43}',
    'hashes': '#### 43',
    'tags': '<answer>43</answer>',
    'phrase': 'The answer is 43',
  }
  assert echoed(f'{PROMPT}\n{after.get(method, "43")}') == '43'


def test_a_short_prompt_is_not_cut_out_of_the_answer():
  for answer in ('13', '31'):
    assert value(answer, truth=answer, prompt='3', mode='numeric', extraction='number') == 1.0
  assert value('the answer is 13', truth='13', prompt='the', extraction='phrase') == 1.0


def test_boxes_in_boxes_take_no_more_memory_than_their_text():
  text = r'\boxed{' * 20_000 + '}' * 20_000
  assert sum(map(len, candidates(text, 'boxed'))) <= 2 * len(text)


def test_a_very_long_answer_is_none():
  assert extract('9' * (MAX_LENGTH + 1), method='whole').reason.startswith('answer longer than')
  many = ', '.join(rf'\boxed{{{number}}}' for number in range(9999))
  assert extract(many, method='boxed').reason.startswith('answer longer than')


FORMS = {
  'whole': '{}',
  'boxed': r'thus \boxed{{{}}} as wanted',
  'hashes': 'some work\n#### {}',
  'tags': '<think>hm</think><answer>{}</answer>',
  'phrase': 'Therefore the answer is {}.',
  'number': 'All in all {}.',
}
forms = st.sampled_from(sorted(FORMS))
numbers = st.integers(-(10**12), 10**12)


@given(number=numbers, method=forms, mode=st.sampled_from(['exact', 'numeric', 'latex']))
@settings(deadline=None, max_examples=50)
def test_the_truth_in_the_right_form_scores_one(number, method, mode):
  assert value(FORMS[method].format(number), truth=str(number), mode=mode, extraction=method) == 1.0


@given(number=numbers, method=forms)
@settings(deadline=None, max_examples=50)
def test_thousands_separators_and_decimals_do_not_matter(number, method):
  for text in (f'{number:,}', f'{number}.00', f'{number:,}.0'):
    assert (
      value(FORMS[method].format(text), truth=str(number), mode='numeric', extraction=method) == 1.0
    )
    assert value(FORMS[method].format(number), truth=text, mode='numeric', extraction=method) == 1.0


@given(
  digits=st.lists(st.sampled_from('0123456789'), min_size=2, max_size=9),
  data=st.data(),
  method=forms,
)
@settings(deadline=None, max_examples=50)
def test_permuted_digits_score_zero(digits, data, method):
  truth, other = ''.join(digits), ''.join(data.draw(st.permutations(digits)))
  assume(int(truth) != int(other))
  for mode in ('exact', 'numeric', 'latex'):
    assert value(FORMS[method].format(other), truth=truth, mode=mode, extraction=method) == 0.0


@given(first=numbers, second=numbers, method=st.sampled_from(['boxed', 'hashes', 'tags', 'phrase']))
@settings(deadline=None, max_examples=50)
def test_two_different_answers_score_zero_in_either_order(first, second, method):
  assume(first != second)
  text = f'{FORMS[method].format(first)}\n{FORMS[method].format(second)}'
  for truth in (first, second):
    for mode in ('exact', 'numeric'):
      assert value(text, truth=str(truth), mode=mode, extraction=method) == 0.0


@given(
  text=st.text(alphabet='\\boxed{}<answer>/# \n.,0123456789-%$the is', max_size=60), method=forms
)
@settings(deadline=None, max_examples=50)
def test_any_text_gets_a_value(text, method):
  for mode in ('exact', 'numeric'):
    assert value(text, truth='42', mode=mode, extraction=method) in (0.0, 1.0)


@pytest.mark.parametrize(
  'text',
  ['#', '####', '* ', 'ab', 'a ', ' ', '\t', '.', '$', '$$', r'\(', r'\[ ', '**', '**a', r'\boxed{',
   r'\boxed{1} ', '}', '# *', '1',
   ', ', 'the answer is ', 'the answer is the ', 'final answer', '\n# ', 'answer: ', '<answer>',
   '</think>', ' because ', '{', '\\'],
)  # fmt: skip
def test_a_long_text_is_searched_to_its_end_whatever_it_repeats(text):
  """Hours where a search goes back over what it has seen."""
  for method in typing.get_args(Method):
    found = extract(text * 10_000 + '\n', method=method)
    assert found.answer is None or len(found.answer) <= MAX_LENGTH
