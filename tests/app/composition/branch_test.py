"""A branch takes over what it needs of a commit, changes nothing of its parent, and is whole or
absent.
"""

import dataclasses
import errno
import json
import os
import pathlib
import shutil

import jax.numpy as jnp
import pytest
from paths import ROOT
from stored import make_sample, states, store_group

from jaxrl_llm.app.composition import branch as branches
from jaxrl_llm.app.composition.branch import Branch, find_origin
from jaxrl_llm.app.composition.chosen import settle
from jaxrl_llm.app.composition.workdir import Workdir
from jaxrl_llm.app.schema import Config
from jaxrl_llm.config.load import apply_overrides, load_file
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.master.exploring.partial import PartialConfig
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.committed import missing
from jaxrl_llm.replay.index import open_store
from jaxrl_llm.rollout.embedded.engine import EmbeddedConfig
from jaxrl_llm.runtime import history
from jaxrl_llm.runtime.checkpoint import CheckpointConfig, Checkpoints
from jaxrl_llm.tasks.taskset import taskset_loader

ROW = b'{"training/global_step": 1}\n'


@pytest.fixture(scope='module')
def config():
  loaded = load_file(str(ROOT / 'configs' / 'quickstart.py'), Config)
  steps = {'stages.sft.steps': '1', 'stages.grpo.steps': '9'}
  sizes = {f'tasksets.{name}.size': '400' for name in ('train', 'eval')}
  return apply_overrides(loaded, steps | sizes)


@pytest.fixture(scope='module')
def template(tmp_path_factory, config):
  """A run of four steps with commits at 2 and 3, as it is after a kill in its fourth step."""
  path = tmp_path_factory.mktemp('runs') / 'parent'
  workdir = Workdir(path)
  workdir.adopt(config)
  attempt = workdir.next_attempt()
  workdir.record(config, commit=0, attempt=attempt)
  for name in ('tokenizer/tokenizer.json', 'data/sft.arrayrecord', 'rollouts/grpo/000002.jsonl'):
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    (path / name).write_text(name)
  (path / 'metrics.jsonl').write_bytes(ROW * 4)
  store = open_store(path / 'replay')
  checkpoints = Checkpoints(path / 'checkpoints', CheckpointConfig(), leads=True)
  for step in range(4):
    uids = [f'g{step}/{i}' for i in range(2)]
    store_group(store, uids, step)
    store.at(step).seal(uids)
    store.at(step).trained(uids)
    store.at(step).record_plan({'step': step})
    if step in (1, 2):
      host = {
        'step': step + 1,
        'stage': 'grpo',
        'evaluated': True,
        'best': [0.5, 2],
        'metrics_offset': len(ROW) * (step + 1),
        'algorithm_state': {'kl_coef': 0.1},
        'batches': {'explorer': {'groups': [{'number': 1, 'ended': True}]}},
        'attempt': attempt,
        'store': store.name,
        'reference_step': 0,
        'files': {},
      }
      state = {'train': {'params': {'kernel': jnp.arange(4.0) * step}}}
      checkpoints.save(step + 1, state, host)
  store.close()
  workdir.close()
  return path


@pytest.fixture
def parent(template, tmp_path):
  return pathlib.Path(shutil.copytree(template, tmp_path / 'parent'))


def make(text, config, target, reset=()):
  """Makes a branch, but for tokens and shapes, which need a whole run; returns its directory."""
  branch = Branch.parse(str(text), reset)
  assert not branch.made(target)
  workdir = Workdir(target, branching=True)
  try:
    origin = find_origin(branch, config)
    taken = branches.take_over(origin, config, workdir)
    assert not (target / 'config.json').exists()
    branches.complete(origin, config, workdir, taken)
  finally:
    workdir.close()
  return target


def content(path):
  return {
    str(file.relative_to(path)): file.read_bytes() for file in path.rglob('*') if file.is_file()
  }


def host_of(path, step):
  return Checkpoints(path / 'checkpoints', CheckpointConfig(), leads=True).host(step)


def recovered(path, step):
  store = open_store(path / 'replay')
  store.recover(step)
  return store


@pytest.mark.parametrize('step', [2, 3])
def test_a_branch_has_the_run_as_of_its_commit_and_the_parent_stays_as_it_is(
  parent, config, tmp_path, step
):
  before = content(parent)
  path = make(f'{parent}:{step}', config, tmp_path / 'branch')
  assert content(parent) == before
  assert os.stat(path / 'tokenizer/tokenizer.json').st_nlink == 2
  shutil.rmtree(parent)
  assert (path / 'metrics.jsonl').read_bytes() == ROW * step
  host = host_of(path, step)
  assert host['best'] == ([0.5, 2] if step == 2 else None), 'its commit stays with the parent'
  assert host['attempt'] == 0 and host['algorithm_state'] == {'kl_coef': 0.1}
  assert missing(path / 'replay', step=step, store=host['store']) == []
  Workdir(path).check(host)
  store = recovered(path, step)
  assert states(store, ['g1/0']) == ['trained'] and len(store.plans()) == step
  store.close()
  report = audit(path / 'replay')
  assert report.ok and report.lost == () and report.unclaimed == (), report.lines
  first, last = history.read(path)
  assert first.parent is None and last.step == step + 1
  assert last.parent == history.Parent(run=str(parent), step=step)


def test_the_newest_commit_is_the_one_that_is_meant_without_a_step(parent, config, tmp_path):
  assert host_of(make(parent, config, tmp_path / 'branch'), 3)['step'] == 3


def test_without_hard_links_files_are_copied(parent, config, tmp_path, monkeypatch):
  def link(source, target):
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), source, None, target)

  monkeypatch.setattr('os.link', link)
  path = make(parent, config, tmp_path / 'branch')
  assert os.stat(path / 'tokenizer/tokenizer.json').st_nlink == 1
  assert host_of(path, 3)['step'] == 3


def test_what_is_reset_begins_afresh(parent, config, tmp_path):
  path = make(parent, config, tmp_path / 'branch', ('store', 'optimizer', 'data'))
  host = host_of(path, 3)
  assert host['batches'] is None and host['reset_optimizer']
  assert missing(path / 'replay', step=3, store=host['store']) == []
  store = recovered(path, 3)
  assert store.counts()['trained'] == 0 and store.meta('began') == 3
  for step in (3, 4):
    store.at(step).record_plan({})
  store.close()
  assert missing(path / 'replay', step=5, store=host['store']) == []
  assert missing(path / 'replay', step=6, store=host['store'])[0].startswith('1 of the plans of 3')
  assert history.read(path)[-1].parent.reset == ('optimizer', 'data', 'store')


def test_a_new_store_has_no_groups_in_flight_that_ended(parent, config, tmp_path):
  host = host_of(make(parent, config, tmp_path / 'branch', ('store',)), 3)
  assert host['batches']['explorer']['groups'] == [{'number': 1, 'ended': False}]


def test_a_branch_without_its_parents_scores_chooses_scorer_options_anew(parent, config):
  """The parent chose for another kind of scorer, and has none of the options now left open."""
  (scorer,) = config.rewards.scorers
  answer = dataclasses.replace(scorer, kind='answer', options={})
  rewards = dataclasses.replace(config.rewards, scorers=(answer,))
  changed = dataclasses.replace(config, rewards=rewards)
  load = taskset_loader(config.tasksets)
  kept = Branch.parse(str(parent))
  with pytest.raises(UserError, match='of the run are unknown'):
    settle(changed, kept.scored_as, print, load)
  fresh = Branch.parse(str(parent), ['store'])
  told = []
  settled = settle(changed, fresh.scored_as, told.append, load)
  assert {'mode', 'extraction'} <= settled.rewards.scorers[0].options.keys() and len(told) == 1
  assert find_origin(fresh, settled).changes


def test_a_branch_of_a_branch_knows_both_parents(parent, config, tmp_path):
  first = make(f'{parent}:2', config, tmp_path / 'first')
  second = make(first, config, tmp_path / 'second')
  assert [entry.parent and entry.parent.run for entry in history.read(second)] == [
    None,
    str(parent),
    str(first),
  ]


def test_a_branch_of_a_branch_leaves_behind_what_both_leave_behind(parent, config, tmp_path):
  first = make(f'{parent}:3', config, tmp_path / 'first', reset=('optimizer', 'data'))
  second = make(first, config, tmp_path / 'second', reset=('store',))
  host = host_of(second, 3)
  assert host['reset_optimizer'] and host['batches'] is None


def test_parked_groups_wait_for_their_turn_in_a_new_store_too():
  groups = [{'number': 1, 'ended': False, 'parked': True}, {'number': 2, 'ended': True}]
  batches = {'explorer': {'groups': groups}, 'gate': {'started': 2, 'parked': 1}}
  branches._forget_ended(batches)
  assert batches['gate']['parked'] == 1
  assert groups == [{'number': 1, 'ended': False, 'parked': True}, {'number': 2, 'ended': False}]


def test_a_branch_that_would_leave_parked_groups_behind_is_refused_in_one_line(parent, config):
  groups = [{'number': 1, 'ended': False, 'parked': True}, {'number': 2, 'ended': True}]
  batches = {'explorer': {'groups': groups}}
  branch = Branch(run=parent)
  fork = branches.Fork(branch=branch, step=2, config={}, changes=())
  for found in (batches, {'rollouts': batches, 'experts': {}}):
    with pytest.raises(UserError, match=r':2: 1 groups of this commit wait .* --reset_data$'):
      branches._check_parked(fork, config, {'batches': found})
  anew = dataclasses.replace(fork, branch=dataclasses.replace(branch, reset=('data',)))
  partial = PartialConfig(budget=4)
  rollout = dataclasses.replace(config.rollout, partial=partial, embedded=EmbeddedConfig())
  continues = dataclasses.replace(config, rollout=rollout)
  branches._check_parked(anew, config, {'batches': batches})
  branches._check_parked(fork, continues, {'batches': batches})
  for nothing in (None, {'stream': 3}, {'explorer': {'groups': groups[1:]}}):
    branches._check_parked(fork, config, {'batches': nothing})


def test_a_parent_writes_nothing_outside_of_its_branch(parent, config, tmp_path):
  outside = tmp_path / 'outside'
  outside.write_text('mine')
  commit = parent / 'checkpoints' / '3' / 'COMMIT'
  files = json.loads(commit.read_text())
  commit.write_text(json.dumps(files | {'../../../outside': [4, 'x']}))
  message = refused(f'{parent}:3', config, tmp_path / 'branch')
  assert 'outside of the commit' in message and outside.read_text() == 'mine'
  store = open_store(parent / 'replay')
  with store.transaction():
    store._db.execute("UPDATE segments SET name = '../../../outside' WHERE step = 0")
  store.close()
  message = refused(f'{parent}:2', config, tmp_path / 'other')
  assert 'outside of the store' in message and outside.read_text() == 'mine'


def test_a_run_whose_name_ends_like_a_half_made_branch_is_kept(parent, config, tmp_path):
  run = tmp_path / 'branch.branching'
  run.mkdir()
  (run / 'events.jsonl').write_text('{}')
  assert 'holds a run or is a link' in refused(parent, config, tmp_path / 'branch')
  assert (run / 'events.jsonl').read_text() == '{}'


def test_only_what_a_crash_undid_in_the_branch_itself_is_repeated_work(parent, config, tmp_path):
  """The parent completed four batches, resumed from its commit at 3 and did the fourth again."""
  store = recovered(parent, 3)
  assert store.undone_until() == 4
  store.at(3).record_plan({'step': 3})
  store.close()
  path = make(f'{parent}:2', config, tmp_path / 'branch')
  for undone_until, more in ((0, 1), (3, 0)):
    store = recovered(path, 2)
    assert store.undone_until() == undone_until
    for step in range(2, 2 + more):
      store.at(step).record_plan({'step': step})
    store.close()


def test_a_running_parent_can_be_branched_from(parent, config, tmp_path):
  held, store = Workdir(parent), recovered(parent, 3)
  store_group(store, ['g9/0'], 3)
  path = make(parent, config, tmp_path / 'branch')
  store.at(3).append([make_sample('g9/0')])  # It goes on.
  held.close()
  store.close()
  branched = recovered(path, 3)
  assert states(branched, ['g9/0']) == ['void']
  branched.close()


def refused(text, config, target, reset=()):
  with pytest.raises(UserError) as caught:
    make(text, config, target, reset)
  message = str(caught.value)
  assert '\n' not in message
  assert not target.exists() or not (target / 'checkpoints').exists()
  return message


def test_what_cannot_be_branched_from_is_one_line(parent, config, tmp_path):
  target = tmp_path / 'branch'
  assert 'not the directory of a run' in refused(tmp_path / 'nowhere', config, target)
  assert 'no commit at this step; the run keeps those at 2, 3' in refused(
    f'{parent}:5', config, target
  )
  host = parent / 'checkpoints' / '3' / 'host.json'
  host.write_text(host.read_text().replace('grpo', 'dpo_'))
  assert 'host.json: differs from the committed file' in refused(parent, config, target)
  (parent / 'checkpoints' / '3' / 'COMMIT').write_text('[')
  assert 'COMMIT: damaged' in refused(parent, config, target)
  arrays = next(
    file
    for file in sorted((parent / 'checkpoints' / '2' / 'arrays').rglob('*'))
    if file.is_file() and file.stat().st_size
  )
  arrays.write_bytes(arrays.read_bytes()[::-1] + b'x')
  assert 'differs from the file that was committed' in refused(f'{parent}:2', config, target)
  shutil.rmtree(parent / 'checkpoints')
  assert 'has no commit yet' in refused(parent, config, target)


def test_a_parent_that_lacks_a_part_is_one_line(parent, config, tmp_path):
  target = tmp_path / 'branch'
  (parent / 'metrics.jsonl').write_bytes(ROW)
  assert 'metrics.jsonl: has' in refused(parent, config, target)
  segment = sorted((parent / 'replay' / 'segments').iterdir())[0]
  segment.unlink()
  assert f'its segment {segment.name} is missing' in refused(parent, config, target)
  (parent / 'replay' / 'index.sqlite').write_bytes(b'no database')
  assert 'index.sqlite' in refused(parent, config, target)


@pytest.mark.parametrize('text', ['', ':3', 'x:' + '9' * 30])
def test_a_text_that_names_no_run_is_one_line(text):
  with pytest.raises(UserError, match=r'^--branch_from=[^\n]*: wanted RUN or RUN:STEP'):
    Branch.parse(text)


def test_a_directory_that_exists_is_resumed_if_it_is_this_branch_and_else_refused(
  parent, config, tmp_path
):
  empty = tmp_path / 'empty'
  empty.mkdir()
  path = make(f'{parent}:2', config, empty)
  shutil.rmtree(parent)
  for text in (f'{parent}:2', parent):
    assert Branch.parse(str(text)).made(path), 'also without its parent'
  for text, reset in ((f'{parent}:3', ()), (f'{path}:2', ()), (f'{parent}:2', ('data',))):
    with pytest.raises(UserError, match=r'^--workdir=[^\n]*holds a run that branched[^\n]*$'):
      Branch.parse(str(text), reset).made(path)
  (tmp_path / 'full').mkdir()
  (tmp_path / 'full' / 'notes').touch()
  with pytest.raises(UserError, match=r'exists, and a branch starts a new run'):
    Branch.parse(str(parent)).made(tmp_path / 'full')


def test_a_half_made_branch_is_replaced_and_one_that_fails_leaves_nothing(parent, config, tmp_path):
  target = tmp_path / 'branch'
  half = tmp_path / 'branch.branching'
  (half / 'replay' / 'segments').mkdir(parents=True)
  (half / 'config.json').write_text('half')
  assert host_of(make(parent, config, target), 3)['step'] == 3
  assert not half.exists()
  (tmp_path / 'other').mkdir()
  (tmp_path / 'other' / 'late').touch()
  workdir = Workdir(tmp_path / 'other', branching=True)
  with pytest.raises(UserError, match='cannot be made from'):
    workdir.place()
  workdir.discard()
  workdir.close()
  assert sorted(file.name for file in tmp_path.iterdir()) == ['branch', 'other', 'parent']


@pytest.mark.parametrize(
  ('overrides', 'reset', 'said'),
  [
    ({'seed': '3'}, (), 'seed: 0 in the run, 3 now .*add --reset_data'),
    ({'tasksets.train.size': '9'}, ('store',), r'tasksets\.train\.size.*add --reset_data'),
    ({'rewards.scorers.verifier.weight': '2'}, ('data',), r'weight.*add --reset_store'),
    ({'stages.grpo.source.group_size': '4'}, (), r'position in these batches\).*add --reset_data'),
    ({'rollout.max_response_length': '9'}, (), r'add --reset_data'),
    ({'policy.model.hidden_size': '8'}, ('data', 'store'), r'of this model\).*--init_from'),
    ({'policy.scan_layers': 'true'}, (), r'of this model\)'),
    ({'stages.sft.steps': '2'}, ('data',), r'comes after 1 steps of'),
    ({'stages.grpo.steps': '1'}, ('data',), r'comes after 2 steps of'),
    ({'seed': '3', 'stages.grpo.steps': '1'}, (), r'--init_from'),
  ],
)
def test_a_configuration_that_does_not_fit_is_refused_with_what_would_help(
  parent, config, tmp_path, overrides, reset, said
):
  branch = Branch.parse(str(parent), reset)
  with pytest.raises(UserError, match=said) as caught:
    find_origin(branch, apply_overrides(config, overrides))
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
  ('overrides', 'reset'),
  [
    ({'name': 'b', 'stages.grpo.optimizer.offload': 'true', 'learner.chunks_per_rank': '3'}, ()),
    ({'stages.grpo.algorithm.name': 'dapo', 'stages.grpo.algorithm.options': '{}'}, ()),
    ({'stages.grpo.source.temperature': '0.7', 'rollout.embedded.slots': '4'}, ()),
    ({'stages.sft.source.count': '9', 'stages.grpo.steps': '2'}, ()),  # What is over.
    ({'seed': '3', 'tasksets.train.size': '9'}, ('data',)),
    ({'rewards.scorers.verifier.weight': '2'}, ('store',)),
    ({'policy.remat': 'full', 'policy.dtype': 'bfloat16'}, ()),
  ],
)
def test_a_branch_may_change_steps_to_come(parent, config, overrides, reset):
  branch = Branch.parse(str(parent), reset)
  assert find_origin(branch, apply_overrides(config, overrides)).changes


def test_a_branch_may_go_on_with_other_stages_but_not_without_those_of_its_commit(parent, config):
  saved = json.loads((parent / 'config.json').read_text())
  sft, grpo = saved['stages']
  more = [sft, {**grpo, 'steps': 2}, {**grpo, 'name': 'further'}]
  branch = Branch.parse(str(parent))
  stages = {'stages': json.dumps(more)}
  assert find_origin(branch, apply_overrides(config, stages)).step == 3
  for left in ([grpo], [grpo, sft]):
    with pytest.raises(UserError, match='the run began these stages'):
      find_origin(branch, apply_overrides(config, {'stages': json.dumps(left)}))
