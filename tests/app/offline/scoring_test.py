"""Rows of a file become attempts, or one line that says which row is none and why."""

import asyncio
import dataclasses
import json
import os

import pytest
from clocks import simulated

from jaxrl_llm.app.commands.option_flags import read_options
from jaxrl_llm.app.composition.scorers import SCORERS, build_scorer, choose
from jaxrl_llm.app.dry_run.preflight import print_list
from jaxrl_llm.app.offline.scoring import read_attempts, score_file
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rewards.api import Awaited, AwaitedGroup, RewardsConfig, ScorerConfig, Verdict
from jaxrl_llm.rewards.scorers.adapters import data_source, ground_truth

VERL_ROW = {
  'data_source': 'gsm8k',
  'prompt': [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '1 + 1?'}],
  'ability': 'math',
  'reward_model': {'style': 'rule', 'ground_truth': 2},
  'extra_info': {'index': 7},
  'completion': 'It is 2',
}
CODE_ROW = {'completion': 'def f(): return 1', 'tests': ['assert f() == 1'], 'entry_point': 'f'}


def written(tmp_path, *rows):
  path = tmp_path / 'rows.jsonl'
  path.write_text(
    ''.join((row if isinstance(row, str) else json.dumps(row)) + '\n' for row in rows)
  )
  return path


def test_a_row_as_verl_has_it(tmp_path):
  (attempt,) = read_attempts(written(tmp_path, VERL_ROW))
  task = attempt.task
  assert (attempt.uid, attempt.completion, attempt.response_len) == ('rows.jsonl:1', 'It is 2', 3)
  assert (task.taskset, task.domain, task.truth, task.fields) == ('rows', 'math', '2', VERL_ROW)
  assert task.prompt == tuple(VERL_ROW['prompt'])
  assert (ground_truth(task), data_source(task)) == (2, 'gsm8k')


def test_a_row_of_code_needs_no_prompt(tmp_path):
  first, second = read_attempts(
    written(tmp_path, CODE_ROW, '', {**CODE_ROW, 'prompt': 'def f():\n', 'tests': 'x'})
  )
  assert (first.task.domain, first.task.prompt[0]['content'], first.task.truth) == (
    'code',
    '',
    None,
  )
  assert first.task.fields == CODE_ROW and second.uid == 'rows.jsonl:3'  # The second line is blank.
  assert second.task.prompt == ({'role': 'user', 'content': 'def f():\n'},)


def test_what_a_row_says_itself_comes_first(tmp_path):
  row = {'uid': 'own', 'prompt': 'x', 'completion': 'a b', 'response_len': 9, 'answer': '3'}
  (attempt,) = read_attempts(written(tmp_path, row))
  assert (attempt.uid, attempt.response_len, attempt.task.truth, attempt.task.domain) == (
    'own',
    9,
    '3',
    'general',
  )


@pytest.mark.parametrize(
  ('row', 'told'),
  [
    ('{"prompt": ', 'Expecting value'),
    ('[1]', 'holds a JSON list, wanted an object'),
    ({'prompt': 'x'}, "completion is missing among ['prompt'], wanted text"),
    ({'prompt': 'x', 'completion': 1}, 'completion is 1, wanted text'),
    ({'completion': 'x'}, "no 'prompt' or 'question'"),
    ({'prompt': 5, 'completion': 'x'}, "no 'prompt' or 'question' of text or messages"),
    ({'prompt': [{'role': 'user'}], 'completion': 'x'}, 'prompt message {"role": "user"} is not'),
    (
      {'prompt': 'x', 'completion': 'x', 'reward_model': 'rule'},
      'reward_model is "rule", wanted an object',
    ),
    (
      {'prompt': 'x', 'completion': 'x', 'reward_model': {'style': 'rule'}},
      "has ['style'], wanted ground_truth",
    ),
    ({**CODE_ROW, 'tests': 1}, 'tests is 1, wanted a string or a list'),
    ({**CODE_ROW, 'entry_point': 1}, 'entry_point is 1, wanted text'),
    (
      f'{{"prompt": "x", "completion": {"[" * 9_999}{"]" * 9_999}}}',
      'nested more than 100 levels',
    ),
    ('{"prompt": "x\\ud800", "completion": "x"}', 'surrogates not allowed'),
    ({'reasoning_gym': 'x', 'completion': 'x'}, "'reasoning_gym' without an entry"),
  ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, row, told):
  with pytest.raises(UserError) as raised:
    read_attempts(written(tmp_path, VERL_ROW, row))
  assert str(raised.value).startswith(f'{tmp_path}/rows.jsonl:2: ')
  assert told in str(raised.value) and '\n' not in str(raised.value)


def test_a_file_that_is_not_there_or_empty_is_one_line(tmp_path):
  written(tmp_path, VERL_ROW)
  with pytest.raises(UserError, match=r'row\.jsonl: no such file; did you mean .*rows\.jsonl'):
    read_attempts(tmp_path / 'row.jsonl')
  with pytest.raises(UserError, match='has no rows'):
    read_attempts(written(tmp_path))


def score_of(name, act, group=False):
  """A scorer that waits, called `name`."""

  class Scorer:
    async def __aenter__(self):
      return act

    async def __aexit__(self, *raised):
      pass

  return (AwaitedGroup if group else Awaited)(Scorer), RewardsConfig(
    scorers=(ScorerConfig(name=name),)
  )


def scores_in(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_scores_are_in_the_order_of_the_rows_whatever_ends_first(tmp_path):
  rows = [
    {'prompt': str(i), 'completion': str(i), 'answer': '1' if i % 2 else None} for i in range(600)
  ]

  async def act(attempt):
    await asyncio.sleep(0 if int(attempt.completion) % 7 else 0.01)
    value = None if attempt.task.truth is None else float(attempt.completion)
    return Verdict(value=value, evidence={'nan': float('nan'), 'text': 'é\ud800'})

  scorer, rewards = score_of('s', act)
  told = []
  attempts = read_attempts(written(tmp_path, *rows))
  summary = simulated(score_file(scorer, rewards, attempts, tmp_path / 'out.jsonl', told.append))
  lines = scores_in(tmp_path / 'out.jsonl')
  assert [line['value'] for line in lines] == [float(i) if i % 2 else None for i in range(600)]
  assert [line['uid'] for line in lines] == [f'rows.jsonl:{i + 1}' for i in range(600)]
  assert list(lines[0]) == [
    'uid',
    'scorer',
    'value',
    'parts',
    'turn_values',
    'status',
    'evidence',
    'time',
  ]
  assert lines[0]['evidence'] == {'nan': None, 'text': 'é\ud800'}
  assert told == list(range(1, 601))
  assert summary.line('s') == 'scorer s: 600 rows: ok 600; mean value 300 of 300, 300 unscorable'
  assert summary.warning(rewards.scorers[0], attempts) == ''


def test_rows_with_the_same_prompt_are_a_group(tmp_path):
  async def act(attempts, scores):
    return tuple(
      Verdict(value=float(place), parts={'of': float(len(attempts))})
      for place in range(len(attempts))
    )

  scorer, rewards = score_of('g', act, group=True)
  rows = [{'prompt': prompt, 'completion': 'x'} for prompt in 'abacab']
  asyncio.run(
    score_file(
      scorer, rewards, read_attempts(written(tmp_path, *rows)), tmp_path / 'o', lambda n: None
    )
  )
  said = [(line['value'], line['parts']['of']) for line in scores_in(tmp_path / 'o')]
  assert said == [(0.0, 3.0), (0.0, 2.0), (1.0, 3.0), (0.0, 1.0), (2.0, 3.0), (1.0, 2.0)]


def test_what_fails_half_way_leaves_the_old_file_and_no_other(tmp_path):
  async def act(attempt):
    return Verdict(value=1.0)

  def done(count):
    if count == 2:
      raise KeyboardInterrupt

  scorer, rewards = score_of('s', act)
  path, out = written(tmp_path, *[VERL_ROW] * 300), tmp_path / 'out.jsonl'
  out.write_text('old')
  with pytest.raises(KeyboardInterrupt):
    asyncio.run(score_file(scorer, rewards, read_attempts(path), out, done))
  assert out.read_text() == 'old' and sorted(tmp_path.iterdir()) == [out, path]


def test_as_many_rows_are_under_way_as_the_scorer_permits(tmp_path):
  under_way, most = 0, 0

  async def act(attempt):
    nonlocal under_way, most
    under_way += 1
    most = max(most, under_way)
    await asyncio.sleep(0.001)
    under_way -= 1
    return Verdict(value=1.0)

  scorer, rewards = score_of('s', act)
  path = written(tmp_path, *[VERL_ROW] * 40)
  simulated(score_file(scorer, rewards, read_attempts(path), tmp_path / 'out', lambda count: None))
  assert most == scorer.concurrency


def test_what_fails_does_not_wait_for_rows_that_are_under_way(tmp_path):
  async def act(attempt):
    await asyncio.sleep(0 if attempt.uid.endswith(':1') else 3600)
    return Verdict(value=1.0)

  def done(count):
    raise KeyError(count)

  scorer, rewards = score_of('s', act)
  rewards = dataclasses.replace(
    rewards, scorers=(dataclasses.replace(rewards.scorers[0], deadline_s=3600.0),)
  )
  path = written(tmp_path, *[VERL_ROW] * 3)
  with pytest.raises(KeyError):
    simulated(score_file(scorer, rewards, read_attempts(path), tmp_path / 'out', done))


def test_only_the_file_of_scores_is_said_to_be_one_that_cannot_be_written(tmp_path):
  async def act(attempt):
    return Verdict(value=1.0)

  def done(count):
    raise BrokenPipeError(32, 'Broken pipe')

  scorer, rewards = score_of('s', act)
  attempts, out = read_attempts(written(tmp_path, VERL_ROW)), tmp_path / 'out'
  with pytest.raises(BrokenPipeError):
    asyncio.run(score_file(scorer, rewards, attempts, out, done))
  (tmp_path / f'out.{os.getpid()}.tmp').symlink_to('/dev/full')
  with pytest.raises(UserError, match=f'--out={out}: cannot be written .No space left on device'):
    asyncio.run(score_file(scorer, rewards, attempts, out, lambda count: None))
  assert not out.exists()


def test_options_are_json_or_dotted():
  overrides = {
    'mode': 'numeric',
    'units': 'true',
    'tag': '"7"',
    'arguments.a.b': '[1]',
    'absolute_tolerance': '1e-3',
  }
  assert read_options('{"tag": "x", "arguments": {"c": 1}}', overrides) == {
    'mode': 'numeric',
    'units': True,
    'tag': '7',
    'arguments': {'a': {'b': [1]}, 'c': 1},
    'absolute_tolerance': 1e-3,
  }
  with pytest.raises(UserError, match='not JSON'):
    read_options('{', {})
  with pytest.raises(UserError, match='nested more than 100 levels'):
    read_options(f'{{"a": {"[" * 9_999}{"]" * 9_999}}}', {})
  with pytest.raises(UserError, match=r"--options\.tag\.x: tag is \"y\", which has no 'x'"):
    read_options('{"tag": "y"}', {'tag.x': '1'})


def test_the_list_has_each_scorer_with_a_line_of_its_own(capsys):
  print_list()
  lines = [
    line.split(maxsplit=2)
    for line in capsys.readouterr().out.splitlines()
    if line.startswith('scorer ')
  ]
  assert [name for _, name, _ in lines] == list(SCORERS)
  assert len({told for *_, told in lines}) == len(SCORERS)


def answers_of(tmp_path, completions, truths, **options):
  """The line and the warning of `answer` on rows with these completions and truths."""
  rows = [
    {'prompt': 'x', 'completion': c, 'answer': t} for c, t in zip(completions, truths, strict=True)
  ]
  attempts = read_attempts(written(tmp_path, *rows))
  config = choose(
    ScorerConfig(name='answer', options=options), lambda: [a.task.truth for a in attempts]
  ).scorer
  judge = build_scorer(config).scorer  # Without its deadline, which takes a worker.

  async def act(attempt):
    return judge(attempt)

  scorer, _ = score_of('answer', act)
  rewards = RewardsConfig(scorers=(config,))
  summary = simulated(score_file(scorer, rewards, attempts, tmp_path / 'out', lambda count: None))
  return summary.line('answer'), summary.warning(config, attempts)


@pytest.mark.parametrize(
  ('completions', 'truths', 'options', 'line', 'warning'),
  [
    (['so 7', '#### 5'], ['7', '5'], {}, 'mean value 0.5 of 2, 0 unscorable', ''),
    (
      ['so #### 7', 'so #### 5'],
      ['7', '5'],
      {'extraction': 'boxed'},
      'mean value 0 of 2, 0 unscorable; no answer: 2',
      '2 of 2 rows have no answer where the scorer looks (boxed); 2 of 2 have one with '
      '--options.extraction=hashes',
    ),
    (
      ['I say 7.', 'I say 5.'],
      ['7', '5'],
      {'extraction': 'boxed'},
      '; no answer: 2',
      'or take the last number with --options.extraction=number',
    ),
    (
      ['7', '5'],
      [None, None],
      {},
      'no value, 2 unscorable; the task has no truth: 2',
      '2 of 2 rows have no truth',
    ),
    (
      ['7', '5'],
      ['seven', 'five'],
      {'mode': 'numeric'},
      '; the truth is not numeric: 2',
      'in 2 of 2 rows, such as "seven"; without --options.mode',
    ),
    (
      ['7.0', '5.0'],
      ['7', '5'],
      {'mode': 'exact'},
      'mean value 0 of 2',
      'such as "7.0" for "7"; for these truths, --options.mode=latex would be chosen',
    ),
  ],
)
def test_a_summary_says_what_was_done_and_warns_where_nothing_passes(
  tmp_path, completions, truths, options, line, warning
):
  said, warned = answers_of(tmp_path, completions, truths, **options)
  assert line in said and '\n' not in said + warned
  assert warning in warned and bool(warning) == bool(warned)
  assert not warned or warned.startswith('warning: no row passes: ')


def test_another_scorer_without_a_pass_is_warned_of_too(tmp_path):
  async def act(attempt):
    return Verdict(value=0.0, evidence={'reason': 'too short'})

  scorer, rewards = score_of('s', act)
  attempts = read_attempts(written(tmp_path, VERL_ROW))
  summary = simulated(score_file(scorer, rewards, attempts, tmp_path / 'out', lambda count: None))
  assert summary.line('s').endswith('0 unscorable; too short: 1')
  assert 'evidence of each score' in summary.warning(rewards.scorers[0], attempts)
