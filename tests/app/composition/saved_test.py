"""Runs that began before a stage had a source are read, resumed and refused like any other.

`fixtures/config_before_sources.json` is the config.json of such a run, with the last stage of a
second one.
"""

import dataclasses
import json
import shutil

import pytest
from paths import FIXTURES

from jaxrl_llm.app.composition.saved import read_saved
from jaxrl_llm.app.composition.workdir import Workdir
from jaxrl_llm.app.offline.reopen import config_of_run
from jaxrl_llm.app.sources import (
  Demonstrations,
  ExpertsConfig,
  Pairs,
  PastConfig,
  Recorded,
  Rollouts,
)
from jaxrl_llm.config.values import to_json
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.registry import RegistryConfig
from jaxrl_llm.master.exploring.processors import ProcessorConfig
from jaxrl_llm.parallel.coordination import CoordinationConfig

BEFORE = FIXTURES / 'config_before_sources.json'
SHOWN = dict(tasksets=('train',), templates=('{answer}', '{word}'), weights=(0.4, 0.6), count=400)
GROUPS = dict(tasksets=('train',), groups_per_batch=6, group_size=4)
SOURCES = {
  'sft': Demonstrations(**SHOWN, sequences_per_batch=64),
  'dpo': Pairs(train='train_pairs', held_out='eval_pairs', sequences_per_batch=64),
  'grpo': Rollouts(**GROUPS),
  'mix': Rollouts(**GROUPS, experts=ExpertsConfig(**SHOWN, ratio=0.2)),
  'past': Rollouts(
    **GROUPS,
    past=PastConfig(groups=3, max_uses=3),
    processors=(ProcessorConfig(name='mask_truncated'),),
    bound=2,
    publish_every=2,
  ),
  'offline': Recorded(
    tasksets=('train',), groups_per_batch=3, group_size=4, run='runs/before_all', stage='grpo'
  ),
}


@pytest.fixture
def run(tmp_path):
  """A run with a commit."""
  shutil.copy(BEFORE, tmp_path / 'config.json')
  (tmp_path / 'checkpoints' / '3').mkdir(parents=True)
  (tmp_path / 'checkpoints' / '3' / 'COMMIT').touch()
  return tmp_path


def test_a_stage_of_each_kind_gets_its_source(run):
  config = config_of_run(run)
  assert {stage.name: stage.source for stage in config.stages} == SOURCES
  mix, past = config.stages[3:5]
  assert (mix.steps, mix.keep_optimizer, mix.evaluate_every, mix.algorithm.name) == (
    3,
    True,
    2,
    'mix',
  )
  assert (past.epochs, past.optimizer.peak_lr) == (2, 5e-4)


def test_a_run_from_before_registries_goes_on_with_and_without_one(run):
  config = config_of_run(run)
  assert config.registry is None and config.rollout.vllm.discover is None
  assert 'registry' not in json.loads((run / 'config.json').read_text())
  Workdir(run).adopt(dataclasses.replace(config, registry=RegistryConfig(directory='/shared')))


def test_todays_configuration_goes_on_with_it_and_a_changed_one_is_refused_by_todays_place(run):
  config, written = config_of_run(run), (run / 'config.json').read_text()
  workdir = Workdir(run)
  workdir.adopt(config)
  assert (run / 'config.json').read_text() == written
  grpo = config.stages[2]
  larger = dataclasses.replace(grpo, source=dataclasses.replace(grpo.source, group_size=5))
  changed = dataclasses.replace(config, stages=(*config.stages[:2], larger, *config.stages[3:]))
  with pytest.raises(
    UserError, match=r': stages\.grpo\.source\.group_size: 4 in the run, 5 now \(.*\); resume'
  ):
    workdir.adopt(changed)


def test_a_run_from_before_slices_and_coordination_goes_on_with_other_deadlines(run):
  config = config_of_run(run)
  assert config.learner.mesh.slices is None and config.coordination == CoordinationConfig()
  Workdir(run).adopt(
    dataclasses.replace(config, coordination=CoordinationConfig(heartbeat_s=60, grace_s=30.0))
  )


def test_what_is_saved_today_is_read_as_it_is(run):
  config = config_of_run(run)
  (run / 'config.json').write_text(json.dumps(to_json(config)))
  assert read_saved(run / 'config.json') == to_json(config)


@pytest.mark.parametrize(
  ('field', 'value', 'words'),
  [
    ('demonstrations', 3, r'stages\.2\.tasksets: moved to '),
    ('demonstrations', {'templates': 3}, r'stages\.2\.source\.templates: got 3'),
    ('experts', {'demonstrations': 3}, r'stages\.2\.source\.experts\.demonstrations: moved to '),
    ('group_size', 'many', r"stages\.2\.source\.group_size: got 'many'"),
    ('unheard_of', 1, r"StageConfig has no field 'unheard_of'"),
  ],
)
def test_a_former_stage_that_means_nothing_is_one_line(run, field, value, words):
  saved = json.loads(BEFORE.read_text())
  saved['stages'][2][field] = value
  (run / 'config.json').write_text(json.dumps(saved))
  with pytest.raises(UserError, match=rf'^[^\n]*config\.json: [^\n]*{words}[^\n]*$'):
    config_of_run(run)


@pytest.mark.parametrize('stages', [3, [3], [{}], {'a': 1}])
def test_stages_that_are_none_are_one_line(run, stages):
  (run / 'config.json').write_text(json.dumps({**json.loads(BEFORE.read_text()), 'stages': stages}))
  with pytest.raises(UserError, match=r'^[^\n]*config\.json: [^\n]*$'):
    config_of_run(run)
