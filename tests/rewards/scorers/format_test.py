"""A completion has the template's form, from its first character to its last, or it scores 0."""

import pytest
from fixtures.rewards_scorers import attempt
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rewards.scorers.format import format_scorer

R1 = '<think>{think}</think><answer>{answer}</answer>'


@pytest.mark.parametrize(
  ('completion', 'value', 'reason'),
  [
    ('<think>a</think><answer>b</answer>', 1.0, None),
    ('  <think>\na\n\nb\n</think>\n\n<answer> b </answer>\n', 1.0, None),
    ('<think>2 < 3 and </b></think><answer>{}</answer>', 1.0, None),
    ('', 0.0, "'<think>' occurs 0 times, wanted 1"),
    ('<think>a</think><answer>b', 0.0, "'</answer>' occurs 0 times, wanted 1"),
    ('So: <think>a</think><answer>b</answer>', 0.0, "'So:' stands outside the template"),
    ('<think>a</think><answer>b</answer> Done.', 0.0, "'Done.' stands outside the template"),
    ('<think>a</think> hence <answer>b</answer>', 0.0, "'hence' stands outside the template"),
    ('<think> </think><answer>b</answer>', 0.0, "field 'think' is blank"),
    ('<think>a</think><answer>\n</answer>', 0.0, "field 'answer' is blank"),
    (
      '<think>a</think><answer>b</answer><answer>c</answer>',
      0.0,
      "'<answer>' occurs 2 times, wanted 1",
    ),
    (
      '<think>a<think>b</think></think><answer>c</answer>',
      0.0,
      "'<think>' occurs 2 times, wanted 1",
    ),
    ('<think>a<answer>b</answer></think>', 0.0, "'<answer>' is out of order"),
    ('<answer>b</answer><think>a</think>', 0.0, "'<answer>b</answer>' stands outside the template"),
    ('<Think>a</Think><answer>b</answer>', 0.0, "'<think>' occurs 0 times, wanted 1"),
  ],
)
def test_r1_template(completion, value, reason):
  verdict = format_scorer(template=R1)(attempt(completion))
  assert (verdict.value, verdict.evidence.get('reason')) == (value, reason)


@pytest.mark.parametrize(
  ('template', 'right', 'wrong'),
  [
    (
      '{work}\n#### {answer}',
      '1 + 1 = 2\n#### 2',
      ['#### 2', '1 + 1 = 2\n####', 'a #### 2 #### 2', '2'],
    ),
    (
      '{think}</think>{answer}',
      'so\n</think>\n42',
      ['so 42', '</think>42', 'so</think>', '<think></think></think>4'],
    ),
    (
      'Reason: {r} Answer: {a}.',
      'Reason: x Answer: y.',
      ['Reason: x', 'Answer: y. Reason: x', 'Reason: x Answer: y'],
    ),
    (
      '{{"answer": {value}}}',
      '{"answer": 3}',
      ['{"answer": }', '{"answer": 3} {"answer": 4}', '"answer": 3'],
    ),
    ('-- {a} -- {b} --', '-- x -- y --', ['-- x --', '-- x -- -- y', '-- x -- y -- z --']),
  ],
)
def test_templates(template, right, wrong):
  scorer = format_scorer(template=template)
  assert scorer(attempt(right)).value == 1.0
  assert [scorer(attempt(text)).value for text in wrong] == [0.0] * len(wrong)


@pytest.mark.parametrize(
  'template',
  ['', 'no field', '{only}', '{a}{b}<x>', '<a>{}</a>', '<a>{x!r}</a>', '<a>{x:3}</a>', '<a>{x',
   '{x}<a>{x}</a>', '<a>{x}</a> a {y}'],
)  # fmt: skip
def test_a_template_that_tells_nothing_apart_is_refused(template):
  with pytest.raises(UserError, match="scorer 'format': template"):
    format_scorer(template=template)


field = st.text(min_size=1).filter(lambda text: text.strip() and '<' not in text)


@given(think=field, answer=field, junk=field)
@settings(deadline=None)
def test_any_content_passes_and_any_text_outside_fails(think, answer, junk):
  scorer = format_scorer(template=R1)
  text = f'<think>{think}</think><answer>{answer}</answer>'
  assert scorer(attempt(text)).value == 1.0
  between = text.replace('><', f'>{junk}<')
  assert [
    scorer(attempt(t)).value for t in (junk + text, text + junk, between, text + text, text[:-1])
  ] == [0.0] * 5
