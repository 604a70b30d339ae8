"""What may change when a run is resumed, and what may not, with the reason."""

import dataclasses
import json
import re

import judged
import pytest
from paths import ROOT

from jaxrl_llm.app.composition.branch import RESETS, Branch, find_origin
from jaxrl_llm.app.composition.changes import changes, is_below, misfits, refused
from jaxrl_llm.app.composition.workdir import Unchangeable, Workdir
from jaxrl_llm.app.schema import Config
from jaxrl_llm.app.sources import Examples
from jaxrl_llm.config.load import apply_overrides, load_file
from jaxrl_llm.config.values import to_json
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.runtime import history
from jaxrl_llm.tasks.taskset import TaskProcessorConfig

SFT, GRPO = 20, 30
"""Steps of the two stages."""


@pytest.fixture(scope='module')
def config():
  loaded = load_file(str(ROOT / 'configs' / 'quickstart.py'), Config)
  return apply_overrides(
    loaded,
    {'stages.sft.steps': str(SFT), 'stages.grpo.steps': str(GRPO), 'learner.optimizer': 'null'}
    | {f'stages.{stage}.optimizer': '{"peak_lr": 0.001}' for stage in ('sft', 'grpo')},
  )


def run_of(path, config, *commits):
  """A run directory with commits at these steps."""
  workdir = Workdir(path)
  workdir.adopt(config)
  for step in commits:
    (path / 'checkpoints' / str(step)).mkdir(parents=True)
    (path / 'checkpoints' / str(step) / 'COMMIT').touch()
  return workdir


SUITE = '[{"name": "other", "taskset": "eval", "tasks": 8}]'


@pytest.mark.parametrize(
  ('step', 'overrides'),
  [
    (30, {'stages.grpo.optimizer.peak_lr': '3e-4', 'stages.grpo.steps': '60'}),
    (30, {'stages.grpo.optimizer.schedule': 'cosine', 'stages.grpo.optimizer.warmup_steps': '5'}),
    (30, {'stages.grpo.steps': '10'}),  # Exactly those that are done: the stage ends here.
    (20, {'stages.sft.steps': '25'}),  # At its end, the stage is not left yet.
    (50, {'stages.grpo.steps': '60'}),  # A finished run.
    (5, {'stages.grpo.steps': '99', 'stages.grpo.evaluate_every': '7'}),  # A stage yet to come.
    (30, {'evaluation': SUITE, 'checkpoint.every_steps': '2'}),
    (30, {'stages.grpo.evaluate_every': '5', 'stages.grpo.overlap_evaluation': 'true'}),
    (30, {'rewards.workers': '3', 'compilation_cache': '/tmp/cache', 'registry': '{}'}),
    (30, {'rollout.vllm.addresses': '["unix:/a"]', 'coordination.grace_s': '5'}),
    (30, {'learner.mesh.data': '2', 'learner.mesh.tensor': '4'}),
    (30, {'learner.optimizer': '{"peak_lr": 0.5}'}),  # No stage inherits it.
    (30, {'learner.optimizer': '{"peak_lr": 0.5}', 'stages.grpo.optimizer': 'null'}),
  ],
)
def test_what_may_change(config, step, overrides):
  changed = apply_overrides(config, overrides)
  assert changes(to_json(config), changed)
  assert refused(to_json(config), changed, step) == []


@pytest.mark.parametrize(
  ('step', 'key', 'value', 'why', 'newest'),
  [
    (30, 'seed', '5', 'random draws', None),
    (30, 'name', 'other', 'it names the run', None),
    (30, 'policy.model.hidden_size', '8', 'weights', None),
    (30, 'tasksets.train.size', '77', 'position in this data', None),
    (30, 'rewards.scorers.verifier.weight', '0.5', 'scored', None),
    (30, 'rollout.max_response_length', '8', 'sampled', None),
    (30, 'learner.chunks_per_rank', '3', 'packed', None),
    (30, 'stages.grpo.minibatches', '2', 'batches', None),
    (30, 'stages.grpo.optimizer.offload', 'true', 'batches', None),
    (30, 'stages.grpo.steps', '9', '10 steps of the stage are completed', 29),
    (30, 'stages.sft.steps', '25', 'completed this stage at step 20', 20),
    (21, 'stages.sft.optimizer.peak_lr', '0.5', 'completed this stage at step 20', 20),
  ],
)
def test_what_may_not_change_and_why(config, step, key, value, why, newest):
  changed = apply_overrides(config, {key: value})
  (found,) = refused(to_json(config), changed, step)
  assert found.change.key.startswith(key) and why in found.why and found.newest == newest


@pytest.mark.parametrize(
  ('before', 'after', 'may_change'),
  [
    ('runs/a', 'runs/b', True),
    ('stage:preferred', 'runs/a', False),
    ('runs/a', 'stage:preferred', False),
    ('stage:preferred', 'stage:sft', False),
  ],
)
def test_a_run_keeps_the_stage_that_trains_its_reward_model(before, after, may_change):
  old, new = (
    apply_overrides(judged.get_config(), {'reward_model.init_from': source})
    for source in (before, after)
  )
  step = old.stages[0].steps + 5
  found = refused(to_json(old), new, step)
  assert [refusal.change.key for refusal in found] == ['reward_model.init_from'] * (not may_change)
  problems = misfits(to_json(old), new, step)
  assert [reset for _, reset in problems] == [None] * (not may_change)


def test_a_policy_that_begins_after_a_reward_model_keeps_the_weights_of_the_run(tmp_path):
  """Its first stage begins with those with which the run began, although it does not say so."""
  config = judged.get_config()
  old = dataclasses.replace(config, stages=config.stages[1:])
  new = dataclasses.replace(
    old, policy=dataclasses.replace(old.policy, init_from=str(tmp_path / 'model'))
  )
  begun = old.stages[0].steps
  for step, words in (
    (5, 'stage grpo begins with the initial'),
    (begun + 5, ''),
  ):
    found = [str(problem) for problem, _ in misfits(to_json(old), new, step)]
    assert [words in problem for problem in found] == [True] * bool(words)


def test_stages_stay_and_so_does_the_data_that_trains_while_that_of_evaluations_may_change(config):
  without = dataclasses.replace(config, stages=config.stages[1:])
  assert [one.change.key for one in refused(to_json(config), without, 30)] == ['stages.sft']
  swapped = dataclasses.replace(config, stages=config.stages[::-1])
  assert [one.change.key for one in refused(to_json(config), swapped, 30)] == ['stages']
  evaluated = apply_overrides(config, {'tasksets.eval.size': '99'})
  assert refused(to_json(config), evaluated, 30) == []
  extra = dataclasses.replace(config.tasksets[-1], name='extra')
  more = dataclasses.replace(config, tasksets=(*config.tasksets, extra))
  assert refused(to_json(config), more, 30) == []


def test_a_star_stands_for_one_name():
  assert is_below('a.b.c', ('a.*.c',)) and is_below('a.b.c.d', ('a.*.c',))
  assert not is_below('a.c', ('a.*.c',)) and not is_below('a.b.x.c', ('a.*.c',))


def test_the_message_names_keys_reasons_and_a_commit_from_which_the_change_can_be_made(
  config, tmp_path
):
  workdir = run_of(tmp_path / 'a run', config, 10, 30)
  longer = apply_overrides(config, {'stages.sft.steps': '25', 'seed': '5'})
  with pytest.raises(Unchangeable) as caught:
    workdir.adopt(longer)
  message = str(caught.value)
  assert '\n' not in message
  refusal = 'stages.sft.steps: 20 in the run, 25 now (the run completed this stage at step 20)'
  assert refusal in message
  assert 'seed: 0 in the run, 5 now (it determines all random draws)' in message
  assert f"--branch_from='{tmp_path}/a run:10' --workdir='{tmp_path}/a run-branch'" in message


def test_without_a_commit_to_branch_from_the_message_offers_none(config, tmp_path):
  workdir = run_of(tmp_path, config, 30)
  message = r'keeps no commit up to step 20 .*only those at \[30\]'
  with pytest.raises(Unchangeable, match=message) as caught:
    workdir.adopt(apply_overrides(config, {'stages.sft.steps': '25'}))
  assert 'branch_from' not in str(caught.value)


@pytest.mark.parametrize(
  ('overrides', 'said'),
  [
    ({'seed': '5'}, r'--branch_from=\S+:30 --workdir=\S+-branch --reset_data$'),
    ({'rewards.scorers.verifier.weight': '2'}, r'--workdir=\S+-branch --reset_store$'),
    (
      {'seed': '5', 'rewards.scorers.verifier.weight': '2'},
      r'--workdir=\S+-branch --reset_data --reset_store$',
    ),
    ({'stages.grpo.algorithm.name': 'dapo'}, r'--workdir=\S+-branch$'),
    ({'stages.grpo.steps': '9'}, r'--branch_from=\S+:25 --workdir=\S+-branch$'),
    ({'policy.model.hidden_size': '8'}, r'no branch can make them \(--init_from'),
    ({'policy.model.hidden_size': '8', 'seed': '5'}, r'no branch can make them \(--init_from'),
  ],
)
def test_the_branch_that_is_offered_can_be_made(config, tmp_path, overrides, said):
  workdir = run_of(tmp_path / 'run', config, 25, 30)
  changed = apply_overrides(config, overrides)
  with pytest.raises(Unchangeable, match=said) as caught:
    workdir.adopt(changed)
  offered = dict(re.findall(r'--(\w+)=?(\S*)', str(caught.value).partition('the same command')[2]))
  if 'branch_from' in offered:
    reset = [name for name in RESETS if f'reset_{name}' in offered]
    assert find_origin(Branch.parse(offered['branch_from'], reset), changed).changes


def comparing(config, processor='dedup'):
  """A configuration with a third taskset, whose training tasks a processor filters."""
  train, *others = config.tasksets
  extra = dataclasses.replace(config.tasksets[-1], name='extra')
  tasksets = (
    dataclasses.replace(train, processors=(TaskProcessorConfig(name=processor),)),
    *others,
    extra,
  )
  return dataclasses.replace(config, tasksets=tasksets)


@pytest.mark.parametrize(
  ('overrides', 'keys'),
  [
    ({'tasksets.eval.size': '99'}, ['tasksets.eval.size']),
    ({'evaluation': SUITE.replace('eval', 'extra')}, ['evaluation.other', 'evaluation.held_out']),
    ({'evaluation': '[]'}, ['evaluation']),
    ({'evaluation': SUITE}, []),  # The same tasks, measured otherwise.
    ({'tasksets.extra.size': '9'}, []),  # It is processed after the others.
  ],
)
def test_what_a_processor_compares_training_tasks_with_stays(config, overrides, keys):
  deduplicated = comparing(config)
  changed = apply_overrides(deduplicated, overrides)
  found = refused(to_json(deduplicated), changed, 30)
  assert sorted(one.change.key for one in found) == sorted(keys)
  assert all('processor dedup compares train, which is trained on' in one.why for one in found)
  resets = [reset for _, reset in misfits(to_json(deduplicated), changed, 30)]
  assert resets == ['data'] * len(keys)
  alone = comparing(config, 'length')
  assert refused(to_json(alone), apply_overrides(alone, overrides), 30) == []


def test_a_branch_before_the_stage_whose_tasks_are_compared_may_change_what_they_are_compared_with(
  config,
):
  deduplicated = comparing(config)
  sft = dataclasses.replace(config.stages[0], source=Examples(train='rows'))
  deduplicated = dataclasses.replace(deduplicated, stages=(sft, config.stages[1]))
  changed = apply_overrides(deduplicated, {'tasksets.eval.size': '99'})
  assert refused(to_json(deduplicated), changed, 10)
  assert misfits(to_json(deduplicated), changed, 10) == []
  assert misfits(to_json(deduplicated), changed, 30)


@pytest.mark.parametrize(('key', 'text'), [('seed', '5'), ('policy.init_from', 'other')])
def test_the_first_weights_stay_as_long_as_a_later_stage_begins_with_them(config, key, text):
  sft, grpo = config.stages
  again = dataclasses.replace(grpo, name='again', init_from=('base',))
  returning = dataclasses.replace(config, stages=(sft, grpo, again))
  (problem,) = misfits(to_json(returning), apply_overrides(returning, {key: text}), 30)
  assert 'stage again begins with the initial weights of the run' in str(problem[0])
  assert problem[1] is None
  without = dataclasses.replace(config, stages=(sft, grpo))
  assert all(
    'with which the run began' not in str(refusal)
    for refusal, _ in misfits(to_json(without), apply_overrides(without, {key: text}), 30)
  )


def entries(path):
  return [(e.step, e.attempt, [tuple(change) for change in e.changes]) for e in history.read(path)]


PEAK = 'stages.grpo.optimizer.peak_lr'


def test_each_change_is_recorded_with_its_first_step_and_changing_back_is_one_too(config, tmp_path):
  workdir = run_of(tmp_path, config)
  workdir.record(config, commit=0, attempt=0)
  assert entries(tmp_path) == [(1, 0, [])]
  (tmp_path / 'checkpoints' / '30').mkdir(parents=True)
  (tmp_path / 'checkpoints' / '30' / 'COMMIT').touch()
  lower = apply_overrides(config, {PEAK: '3e-4'})
  assert [tuple(change) for change in workdir.adopt(lower)] == [(PEAK, 0.001, 0.0003)]
  assert entries(tmp_path) == [(1, 0, [])], 'nothing is recorded before the run goes on'
  workdir.record(lower, commit=30, attempt=1)
  assert json.loads((tmp_path / 'config.json').read_text()) == to_json(lower)
  # Killed before the next commit: the same command finds nothing to change, the former one does.
  assert workdir.adopt(lower) == ()
  workdir.record(lower, commit=30, attempt=2)
  assert [tuple(change) for change in workdir.adopt(config)] == [(PEAK, 0.0003, 0.001)]
  workdir.record(config, commit=30, attempt=3)
  assert entries(tmp_path) == [
    (1, 0, []),
    (31, 1, [(PEAK, 0.001, 0.0003)]),
    (31, 3, [(PEAK, 0.0003, 0.001)]),
  ]
  assert history.in_force(history.read(tmp_path), 31).config == to_json(config)


def test_another_number_of_devices_is_recorded_like_a_change_and_lasts_until_the_next(
  config, tmp_path
):
  workdir = run_of(tmp_path, config, 30)
  eight, four = {'devices': 8, 'processes': 2}, {'devices': 4, 'processes': 2}
  # The history is of a version that did not record machines; the commit says what made it.
  workdir.record(config, commit=30, attempt=0)
  assert entries(tmp_path) == [(1, 0, [])]
  for attempt in (1, 2):  # Killed before the next commit.
    workdir.record(config, commit=30, attempt=attempt, machine=four, committed_by=eight)
    assert entries(tmp_path) == [(1, 0, []), (31, 1, [('devices', 8, 4)])]
  workdir.record(config, commit=30, attempt=3, machine=eight, committed_by=eight)
  assert entries(tmp_path)[-1] == (31, 3, [('devices', 4, 8)])
  assert history.in_force(history.read(tmp_path), 31).machine == eight
  lower = apply_overrides(config, {PEAK: '3e-4'})
  workdir.record(lower, commit=30, attempt=4, machine={'devices': 8, 'processes': 1})
  assert entries(tmp_path)[-1] == (31, 4, [(PEAK, 0.001, 0.0003), ('processes', 2, 1)])


def test_a_branch_on_other_devices_has_one_entry(config, tmp_path):
  workdir = run_of(tmp_path, config, 30)
  parent = history.Parent(run='/parent', step=30)
  made = history.Entry(step=31, attempt=0, time=1.0, config=to_json(config), parent=parent)
  history.write(tmp_path, [made])
  four = {'devices': 4, 'processes': 1}
  for attempt in (1, 2):
    workdir.record(
      config, commit=30, attempt=attempt, machine=four, committed_by={'devices': 8, 'processes': 1}
    )
    (entry,) = history.read(tmp_path)
    assert entry.parent == parent and entry.machine == four
    assert [tuple(change) for change in entry.changes] == [('devices', 8, 4)]


def test_a_kill_between_history_and_configuration_is_repaired(config, tmp_path):
  workdir = run_of(tmp_path, config, 30)
  workdir.record(config, commit=30, attempt=0)
  lower = apply_overrides(config, {PEAK: '3e-4'})
  workdir.record(lower, commit=30, attempt=1)
  (tmp_path / 'config.json').write_text(json.dumps(to_json(config)))
  assert workdir.adopt(lower) == ()
  workdir.record(lower, commit=30, attempt=2)
  assert json.loads((tmp_path / 'config.json').read_text()) == to_json(lower)
  assert len(entries(tmp_path)) == 2


def test_a_resume_from_an_earlier_commit_undoes_later_changes(config, tmp_path):
  """As where the newest commit was damaged and removed: its steps are made again."""
  workdir = run_of(tmp_path, config, 25, 30)
  workdir.record(config, commit=25, attempt=0)
  lower = apply_overrides(config, {PEAK: '3e-4'})
  workdir.record(lower, commit=30, attempt=1)
  (tmp_path / 'checkpoints' / '30' / 'COMMIT').unlink()
  assert workdir.adopt(config) == (), 'the commit at step 25 was followed by the first'
  assert [change.key for change in workdir.adopt(lower)] == [PEAK]
  workdir.record(lower, commit=25, attempt=2)
  assert entries(tmp_path) == [(1, 0, []), (26, 2, [(PEAK, 0.001, 0.0003)])]


@pytest.mark.parametrize(
  'content',
  [b'{', b'[]\n', b'{"step": 1}\n', b'\xff\xfe\n', b'3\n', b'[' * 9999 + b'\n', b'null\n'],
)
def test_a_damaged_history_is_one_line_and_stays(config, tmp_path, content):
  workdir = run_of(tmp_path, config, 30)
  (tmp_path / 'history.jsonl').write_bytes(content)
  with pytest.raises(UserError, match=r'^[^\n]*history\.jsonl: [^\n]*restore'):
    workdir.adopt(config)
  assert (tmp_path / 'history.jsonl').read_bytes() == content
