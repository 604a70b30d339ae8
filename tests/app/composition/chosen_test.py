"""Options left open are chosen once, from the tasks that a scorer judges, and a run that goes on
keeps them.
"""

import dataclasses
import json

import pytest
from paths import ROOT

from jaxrl_llm.app.composition import chosen
from jaxrl_llm.app.composition.workdir import Workdir
from jaxrl_llm.app.schema import Config
from jaxrl_llm.config.load import load_file
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rewards.api import RewardsConfig, ScorerConfig
from jaxrl_llm.rewards.scorers.answer.choosing import ANYWHERE, HASHES_FIRST
from jaxrl_llm.tasks.taskset import TasksetConfig, taskset_loader


def write(path, truths, ability='math'):
  rows = [
    {'prompt': f'{path.stem} {i}?', 'answer': truth, 'ability': ability}
    for i, truth in enumerate(truths)
  ]
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return TasksetConfig(name=path.stem, source=str(path))


def configured(tasksets, *scorers):
  config = load_file(str(ROOT / 'configs' / 'quickstart.py'), Config)
  names = tuple(taskset.name for taskset in tasksets)
  sft, grpo = config.stages
  stages = (sft, dataclasses.replace(grpo, source=dataclasses.replace(grpo.source, tasksets=names)))
  rewards = RewardsConfig(scorers=scorers)
  return dataclasses.replace(
    config, tasksets=tuple(tasksets), stages=stages, evaluation=(), rewards=rewards
  )


def settle(config, run, tell):
  return chosen.settle(config, run, tell, taskset_loader(config.tasksets))


def options(config):
  return {scorer.name: scorer.options for scorer in config.rewards.scorers}


def test_each_scorer_chooses_from_its_own_tasks(tmp_path):
  letters, sums = (
    write(tmp_path / 'letters.jsonl', 'ABC'),
    write(tmp_path / 'sums.jsonl', ['1\n#### 2', '#### 3']),
  )
  told = []
  config = configured(
    (letters, sums),
    ScorerConfig(name='a', kind='answer', tasksets=('letters',)),
    ScorerConfig(name='b', kind='answer', tasksets=('sums',), options={'units': 'refused'}),
    ScorerConfig(name='c', kind='answer', options={'mode': 'exact', 'extraction': 'whole'}),
    ScorerConfig(name='format'),
  )
  settled = settle(config, None, told.append)
  assert options(settled) == {
    'a': {'mode': 'choice', 'extraction': ANYWHERE},
    'b': {'mode': 'numeric', 'units': 'refused', 'extraction': HASHES_FIRST},
    'c': {'mode': 'exact', 'extraction': 'whole'},
    'format': {},
  }
  assert [line.partition(':')[0] for line in told] == ['scorer a', 'scorer b']
  assert settle(settled, None, told.append) == settled and len(told) == 2


def test_a_run_that_goes_on_keeps_its_choice_though_the_data_changed(tmp_path):
  taskset, run = write(tmp_path / 'tasks.jsonl', 'ABC'), tmp_path / 'run'
  config = configured((taskset,), ScorerConfig(name='answer'))
  first = settle(config, None, lambda line: None)
  Workdir(run).adopt(first)
  assert json.loads((run / 'config.json').read_text())['rewards']['scorers'][0]['options'] == {
    'mode': 'choice',
    'extraction': list(ANYWHERE),
  }
  (run / 'checkpoints' / '3').mkdir(parents=True)
  (run / 'checkpoints' / '3' / 'COMMIT').touch()
  write(tmp_path / 'tasks.jsonl', ['#### 1', '#### 2'])
  told = []
  again = settle(config, run, told.append)
  assert told == [] and again.rewards.scorers[0].options['mode'] == 'choice'
  workdir = Workdir.__new__(Workdir)  # Of the same directory, whose lock this process holds.
  workdir.path = run
  workdir.adopt(again)
  given = configured((taskset,), ScorerConfig(name='answer', options={'mode': 'latex'}))
  with pytest.raises(UserError, match=r"options\.mode: 'choice' in the run, 'latex' now"):
    workdir.adopt(settle(given, run, told.append))
  assert options(settle(config, None, told.append))['answer']['mode'] == 'numeric'


def test_a_run_without_a_readable_configuration_is_left_to_the_one_who_reports_it(tmp_path):
  config = configured((write(tmp_path / 'tasks.jsonl', 'ABC'),), ScorerConfig(name='answer'))
  for content in ('', '[]', '[' * 100_000, '{"rewards": {"scorers": [{"name": "answer"}]}}'):
    (tmp_path / 'config.json').write_text(content)
    assert options(settle(config, tmp_path, lambda line: None))['answer']['mode'] == 'choice'


def test_tasks_that_no_stage_or_suite_scores_decide_nothing(tmp_path):
  letters, prose = (
    write(tmp_path / 'letters.jsonl', 'ABC'),
    write(tmp_path / 'prose.jsonl', ['$x^2$', 'y']),
  )
  config = configured((letters,), ScorerConfig(name='answer'))
  config = dataclasses.replace(config, tasksets=(letters, prose))
  assert options(settle(config, None, lambda line: None))['answer']['mode'] == 'choice'


def test_a_null_is_chosen_and_kept(tmp_path):
  config = configured(
    (write(tmp_path / 'tasks.jsonl', 'ABC'),),
    ScorerConfig(name='answer', options={'mode': None, 'extraction': None}),
  )
  first = settle(config, None, lambda line: None)
  assert options(first)['answer'] == {'mode': 'choice', 'extraction': ANYWHERE}
  Workdir(tmp_path / 'run').adopt(first)
  again = settle(config, tmp_path / 'run', lambda line: None)
  assert options(again)['answer'] == {'mode': 'choice', 'extraction': list(ANYWHERE)}


def test_a_run_begun_before_options_were_chosen_is_not_resumed_with_other_rewards(tmp_path):
  config = configured((write(tmp_path / 'tasks.jsonl', 'ABC'),), ScorerConfig(name='answer'))
  Workdir(tmp_path / 'run').adopt(config)
  with pytest.raises(
    UserError, match=r'scorers\.answer\.options: extraction and mode of the run are unknown'
  ):
    settle(config, tmp_path / 'run', lambda line: None)


def test_tasks_that_decided_an_option_are_not_loaded_again(tmp_path):
  taskset = write(tmp_path / 'tasks.jsonl', 'ABC')
  load = taskset_loader([taskset])
  chosen.settle(configured((taskset,), ScorerConfig(name='answer')), None, lambda line: None, load)
  (tmp_path / 'tasks.jsonl').unlink()
  assert len(load('tasks').tasks) == 3
