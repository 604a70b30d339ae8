"""The share of the wanted language's words: by script, by function words, without code and LaTeX, 0
for no words.
"""

import pytest
from fixtures.rewards_scorers import attempt
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rewards.scorers.language import language_scorer, prose, share, words


def value(text, language='en', **options):
  return language_scorer(language=language, field='', **options)(attempt(text)).value


@pytest.mark.parametrize(
  ('text', 'language', 'wanted'),
  [
    ('Let us think about this. The answer is 5.', 'en', 1.0),
    # us think about: none of any; the, is, that: English
    ('Let us think about this. The answer is 5.', 'de', 0.0),
    ('Wir denken nach, und das ist die Antwort.', 'de', 1.0),
    ('Wir denken nach, und das ist die Antwort.', 'en', 0.0),
    ('La respuesta es la suma de los números.', 'es', 1.0),
    ('La réponse est la somme des nombres.', 'fr', 1.0),
    ('Wir addieren die Zahlen. The sum is the answer.', 'de', 4 / 9),  # 4 German words of 9
    ('我们先想一想。', 'zh', 1.0),
    ('我们先想一想 because the answer is', 'zh', 6 / 10),  # 6 characters and 4 words
    ('这是中文的句子', 'ja', 0.0),
    ('これは日本語の文章です。', 'ja', 1.0),
    ('これは日本語の文章です。', 'zh', 0.0),
    ('計算。', 'ja', 1.0),  # two characters: either
    ('한국어 문장 but', 'ko', 2 / 3),
    ('Привет, мир and all', 'ru', 0.5),
    ('هذا نص', 'ar', 1.0),
    ('नमस्ते दुनिया', 'hi', 1.0),
    ('Καλημέρα κόσμε', 'el', 1.0),
    ('x = 5, y = 7', 'en', 0.0),  # single letters are no words
    ('我设 x 为 5', 'zh', 1.0),
    ('', 'en', 0.0),
    ('12 + 3 = 15', 'en', 0.0),
  ],
)
def test_shares(text, language, wanted):
  assert value(text, language) == pytest.approx(wanted)


@pytest.mark.parametrize(
  'hidden',
  ['```python\nprint("hello world")\n```', '`hello world`',
   r'$\text{hello world}$', r'$$hello + world$$', r'\(hello\)',
   r'\[hello '
   r'world\]', r'\begin{align}hello &= world\end{align}', '<b>', 'https://hello.world/again',
               r'\hello', '~~~\nhello\n~~~'],
)  # fmt: skip
def test_code_and_latex_do_not_count(hidden):
  assert words(prose(hidden)) == []
  assert share(f'我们想 {hidden} 一想', 'zh') == (1.0, 5)


def test_a_fence_that_is_never_closed_runs_to_the_end_and_money_does_not():
  assert prose('so ```python\nhello').split() == ['so']
  assert share('我们 $ hello', 'zh') == (2 / 3, 3)
  assert share('costs $5\nhello there', 'en') == (1.0, 3)


def test_only_the_field_of_the_template_counts():
  scorer = language_scorer(language='zh')
  said = scorer(attempt('<think>我们想一想</think><answer>the final answer</answer>'))
  assert (said.value, said.evidence) == (1.0, {'words': 5})
  broken = scorer(attempt('我们想一想'))
  assert broken.value == 0.0 and 'occurs 0 times' in broken.evidence['reason']
  assert scorer(attempt('<think>5</think><answer>五</answer>')).evidence['reason'] == 'no words'
  other = language_scorer(language='en', template='<a>{a}</a><b>{b}</b>', field='b')
  assert other(attempt('<a>我们</a><b>hello</b>')).value == 1.0


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'language': 'xx'}, "scorer 'language'.language: got 'xx'"),
    ({'field': 'thought'}, "has no field 'thought'; it has ['think', 'answer']"),
    ({'template': 'x'}, "scorer 'language': template 'x'"),
  ],
)
def test_options_that_cannot_be_are_refused(options, message):
  with pytest.raises(UserError) as raised:
    language_scorer(**options)
  assert message in str(raised.value)


@given(
  text=st.text(max_size=80),
  language=st.sampled_from(['en', 'de', 'zh', 'ja', 'ko', 'ru', 'ar', 'hi']),
)
@settings(deadline=None, max_examples=100)
def test_a_share_is_between_0_and_1_and_the_same_again(text, language):
  first = share(text, language)
  assert 0.0 <= first[0] <= 1.0 and first == share(text, language)
  assert (
    share(f'{text}\n\n{text}', language)[0] == pytest.approx(first[0])
    or '`' in text
    or '$' in text
    or '~' in text
  )


def test_hostile_marks_take_linear_time():
  for mark in (r'\[', '$', '`', '$$', r'\(', r'\begin{a}', '<a', '```\n', '$a\n'):
    share(mark * 5_000, 'en')
