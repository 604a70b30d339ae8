"""Each published kind of instruction by hand, and rows that cannot be read."""

import pytest
from fixtures.rewards_scorers import attempt
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rewards.scorers.instructions import (
  INSTRUCTIONS,
  count_sentences,
  instructions_scorer,
  loosened,
  read_instructions,
)

AT_LEAST, LESS = 'at least', 'less than'
BY_HAND = {
  'change_case:capital_word_frequency': (
    {'capital_frequency': 2, 'capital_relation': AT_LEAST},
    ['I say NO', 'NASA-ESA and A'],
    ['NO', 'No Yes 12 34', ''],
  ),
  'change_case:english_capital': ({}, ['THE DOG IS IN THE HOUSE.'], ['The dog', '12', 'ДА И НЕТ']),
  'change_case:english_lowercase': (
    {},
    ['the dog is in the house, 12 times.'],
    ['The dog is in it', 'der hund ist nicht das und die'],
  ),
  'combination:repeat_prompt': (
    {'prompt_to_repeat': 'Say it. '},
    ['say it. Yes.', ' Say it.'],
    ['Yes. Say it.', 'Say'],
  ),
  'combination:two_responses': (
    {},
    ['a\n******\nb', '******a******b******'],
    ['a', 'a******a', 'a******b******c', 'a****** ******b'],
  ),
  'detectable_content:number_placeholders': (
    {'num_placeholders': 2},
    ['[a] and [b c]', '[[x] [y]]'],
    ['[a]', '[a\n] [b\n]', ']['],
  ),
  'detectable_content:postscript': (
    {'postscript_marker': 'P.P.S'},
    ['x\nP.P.S bye', 'p. p. s'],
    ['P.S. bye', 'pps'],
  ),
  'detectable_format:constrained_response': (
    {},
    ['My answer is maybe.', 'So: My answer is no.'],
    ['my answer is no.', 'No.'],
  ),
  'detectable_format:json_format': (
    {},
    ['{"a": [1]}', '```json\n[1]\n```', '3'],
    ['{"a": 1', 'So: {}', '[' * 100_000],
  ),
  'detectable_format:multiple_sections': (
    {'section_spliter': 'Section', 'num_sections': 2},
    ['Section 1 a Section2 b', 'Section 1\nx\nSection 2\ny\nSection 3'],
    ['Section 1', 'SECTION 1 SECTION 2'],
  ),
  'detectable_format:number_bullet_lists': (
    {'num_bullets': 2},
    ['* a\n - b', 'x\n- a\n\n* b'],
    ['* a', '* a\n* b\n* c', '** a\n- b', '*\n- b'],
  ),
  'detectable_format:number_highlighted_sections': (
    {'num_highlights': 2},
    ['*a* and *b c*', '**a**\n*b*'],
    ['*a*', '** **', '*a\nb* *'],
  ),
  'detectable_format:title': ({}, ['<<Title>>\ntext', 'x <<a b>> y'], ['<<>>', '<a>', '<<a\n>>']),
  'keywords:existence': (
    {'keywords': ['wind', 'C++']},
    ['Windmills in c++'],
    ['wind', 'C++', 'C plus wind'],
  ),
  'keywords:forbidden_words': (
    {'forbidden_words': ['wind', 'a.b']},
    ['windmills', 'axb'],
    ['The Wind.', 'x a.b y'],
  ),
  'keywords:frequency': (
    {'keyword': 'is', 'frequency': 2, 'relation': AT_LEAST},
    ['this is', 'IS is is'],
    ['is', 'no'],
  ),
  'keywords:letter_frequency': (
    {'letter': 'E', 'let_frequency': 3, 'let_relation': LESS},
    ['even', 'x'],
    ['Even eel'],
  ),
  'language:response_language': (
    {'language': 'de'},
    ['Der Hund ist nicht im Haus und die Katze auch nicht.'],
    ['The dog is not in the house.', 'Это дом', '12'],
  ),
  'length_constraints:nth_paragraph_first_word': (
    {'num_paragraphs': 2, 'nth_paragraph': 2, 'first_word': 'Then'},
    ['a\n\n"then, b', 'a\n\nThen. b\n\n '],
    ['then\n\na', 'then', 'a\n\nthen\n\nb', 'a\n\nThens'],
  ),
  'length_constraints:number_paragraphs': (
    {'num_paragraphs': 2},
    ['a\n***\nb', '***\na\n***\nb\n***'],
    ['a', 'a***b***c', 'a******b'],
  ),
  'length_constraints:number_sentences': (
    {'num_sentences': 3, 'relation': LESS},
    ['Dr. No has 3.5 apples. He eats.', 'a', 'J. K. Ray wrote it!'],
    ['A is. B is? C is!', 'One is. "Two is." Three'],
  ),
  'length_constraints:number_words': (
    {'num_words': 3, 'relation': AT_LEAST},
    ["it's one", 'a b c'],
    ['a b', '- - -'],
  ),
  'punctuation:no_comma': ({}, ['a; b'], ['a, b', '']),
  'startend:end_checker': (
    {'end_phrase': 'Is that all? '},
    ['x is that ALL?"\n'],
    ['x. That is all'],
  ),
  'startend:quotation': ({}, [' "a" ', '""'], ['"', 'a', '"a', "'a'"]),
}


def scored(text, *instructions, **options):
  row = {
    'instruction_id_list': [name for name, _ in instructions],
    'kwargs': [arguments for _, arguments in instructions],
  }
  return instructions_scorer(**options)(attempt(text, fields=row))


@pytest.mark.parametrize('name', sorted(INSTRUCTIONS))
def test_each_kind_by_hand(name):
  arguments, right, wrong = BY_HAND[name]
  unused = {'unused': None} | arguments  # As the rows of IFEval have them.
  assert [scored(text, (name, unused)).value for text in right] == [1.0] * len(right)
  assert [scored(text, (name, unused)).value for text in wrong] == [0.0] * len(wrong)


@pytest.mark.parametrize(
  ('text', 'count'),
  [
    ('', 0),
    ('One', 1),
    ('One. Two', 2),
    ('Wait... what? Yes!', 3),
    ('Version 1.2.3 is out, e.g. today. See www.x.org.', 2),
    ('Am I? I am I. So.', 3),
    ('He said "No." Then he left.', 2),
    ('今日は晴れ。明日は雨。', 2),
  ],
)
def test_sentences_by_hand(text, count):
  assert count_sentences(text) == count


def test_credit_is_for_all_or_for_the_share():
  instructions = [('punctuation:no_comma', {}), by_hand('length_constraints:number_words')]
  said = scored('a, b c', *instructions)
  assert (said.value, said.evidence) == (0.0, {'missed': ['punctuation:no_comma']})
  assert said.parts == {
    'followed': 0.5,
    'punctuation:no_comma': 0.0,
    'length_constraints:number_words': 1.0,
  }
  assert scored('a, b c', *instructions, credit='fraction').value == 0.5
  assert scored('a b c', *instructions).value == 1.0


def by_hand(name):
  return name, BY_HAND[name][0]


def test_thoughts_do_not_count_and_a_blank_answer_follows_nothing():
  assert scored('<think>a, b</think>c', ('punctuation:no_comma', {})).value == 1.0
  for blank in ('', ' \n', '<think>c</think>'):
    assert scored(blank, ('punctuation:no_comma', {}), loose=True).value == 0.0


def test_the_loose_criterion_accepts_variants():
  text = 'Sure, here it is:\n"*quoted*"\nAnything else?'
  assert loosened('a\n*b*\nc') == [
    'a\n*b*\nc',
    '*b*\nc',
    'a\n*b*',
    '*b*',
    'a\nb\nc',
    'b\nc',
    'a\nb',
    'b',
  ]
  assert scored(text, ('startend:quotation', {})).value == 0.0
  assert scored(text, ('startend:quotation', {}), loose=True).value == 1.0


@pytest.mark.parametrize('language', ['en', 'th', 'fa'])
def test_languages_are_told_by_words_or_by_script(language):
  texts = {'en': 'The dog is in the house.', 'th': 'ที่นี่คือบ้าน', 'fa': 'این خانه است'}
  for other, text in texts.items():
    verdict = scored(text, ('language:response_language', {'language': language}))
    assert verdict.value == float(other == language)


@pytest.mark.parametrize(
  ('row', 'reason'),
  [
    ({}, 'instruction_id_list is None'),
    ({'instruction_id_list': 'punctuation:no_comma'}, 'instruction_id_list is'),
    ({'instruction_id_list': []}, 'instruction_id_list is'),
    ({'instruction_id_list': ['punctuation:no_colon']}, "no instruction 'punctuation:no_colon'"),
    ({'instruction_id_list': ['punctuation:no_comma'], 'kwargs': []}, 'kwargs is'),
    ({'instruction_id_list': ['punctuation:no_comma'], 'kwargs': [3]}, 'kwargs of punctuation'),
    ({'instruction_id_list': ['keywords:existence']}, 'keywords of keywords:existence is None'),
    (
      {'instruction_id_list': ['keywords:existence'], 'kwargs': [{'keywords': ['a', 3]}]},
      'keywords of',
    ),
    (
      {
        'instruction_id_list': ['length_constraints:number_words'],
        'kwargs': [{'num_words': 2.5, 'relation': AT_LEAST}],
      },
      'num_words of length_constraints:number_words is 2.5',
    ),
    (
      {
        'instruction_id_list': ['length_constraints:number_words'],
        'kwargs': [{'num_words': 2, 'relation': 'over'}],
      },
      "relation of length_constraints:number_words is 'over'",
    ),
    (
      {'instruction_id_list': ['language:response_language'], 'kwargs': [{'language': 'sw'}]},
      "language of language:response_language is 'sw'",
    ),
  ],
)
def test_a_row_that_cannot_be_read_is_unscorable_with_one_line(row, reason):
  verdict = instructions_scorer()(attempt('x', fields=row))
  assert verdict.value is None and verdict.evidence['reason'].startswith(reason)
  assert '\n' not in verdict.evidence['reason']


def test_an_unknown_option_is_refused():
  with pytest.raises(UserError, match='strict'):
    instructions_scorer(strict=True)


@given(st.text(), st.sampled_from(sorted(INSTRUCTIONS)))
def test_every_text_has_a_verdict(text, name):
  verdict = scored(text, by_hand(name), loose=True)
  assert verdict.value in (0.0, 1.0)


@pytest.mark.parametrize('piece', ['[', '<<', '***', 'Section '])
def test_long_texts_are_checked(piece):
  """In steps that grow with the square of the length most of these would take minutes."""
  text = piece * (100_000 // len(piece))
  for name in INSTRUCTIONS:
    row = {'instruction_id_list': [name], 'kwargs': [BY_HAND[name][0]]}
    ((_, check),) = read_instructions(row)
    assert check(text) in (True, False)
