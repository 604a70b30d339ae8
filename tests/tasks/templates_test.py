import pytest

from jaxrl_llm.tasks.templates import names, render

GYM = {
  'reasoning_gym': 'x',
  'entry': {'question': 'q', 'answer': 'a', 'metadata': {'word': 'w', 'question': 'inner'}},
}
VERL = {
  'data_source': 'gsm8k',
  'reward_model': {'style': 'rule', 'ground_truth': '72'},
  'extra_info': {'index': 3, 'data_source': 'inner'},
}


def test_fields_of_each_format_are_flat_and_the_outer_name_wins():
  assert render('{word}|{question}|{answer}|{metadata[question]}', GYM) == 'w|q|a|inner'
  assert (
    render('{ground_truth}|{index}|{data_source}|{reward_model[style]}', VERL) == '72|3|gsm8k|rule'
  )
  assert names({'question': 'q'}) == {'question': 'q'}


def test_csv_joins_and_drops_only_the_empty_fraction():
  fields = {'n': ['61.0', 33.0, '-8.00', 100, '2.50', '10', 'x.0']}
  assert render('[{n:csv}]>', fields) == '[61,33,-8,100,2.50,10,x.0]>'
  assert render('{n[0]}', fields) == '61.0'


def test_after_takes_what_follows_the_last_marker():
  assert render('{answer:after ####}', {'answer': 'so #### 5 or\n#### 70,000 '}) == '70,000'


def test_pythons_own_formats_still_work():
  assert render('{direction:.1}{{{n:03d}}}', {'direction': 'ascending', 'n': 7}) == 'a{007}'


@pytest.mark.parametrize(
  'template, message',
  [
    ('{wrd}', "names 'wrd'.*did you mean 'word'"),
    ('{zzz}', 'available: answer, metadata, question, word'),
    ('{}', 'template'),
    ('{word:csv}', 'joins a list'),
    ('{answer:after ####}', "no '####' in 'a'"),
    ('{word', "expected '}'"),
    ('{word.nothing}', 'nothing'),
    ('{word:d}', 'format code'),
  ],
)
def test_template_that_does_not_fit_says_why(template, message):
  with pytest.raises(ValueError, match=message):
    render(template, GYM)
