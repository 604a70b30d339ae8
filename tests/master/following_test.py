"""Batches that another run shares: copied as they are, counted in this run's versions, dropped when
they become void, and alike after a kill.
"""

import asyncio
import contextlib
import dataclasses
import json

import job
import logs
import pytest
import sharing

from jaxrl_llm.batching.plan import StepPlan
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import encode
from jaxrl_llm.core.waits import WaitExpired
from jaxrl_llm.master.following import FOLLOWED
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.index import open_store
from jaxrl_llm.replay.segments import open_segment_reader, write_segment
from jaxrl_llm.replay.shared import digest


@pytest.fixture
def store_name(tmp_path):
  """Name of the follower's store, which the other run records with each version."""
  with contextlib.closing(open_store(tmp_path / 'own', synchronous='normal')) as store:
    return store.name


def run(work):
  return asyncio.run(asyncio.wait_for(work, 60))


def check(directory):
  report = audit(directory)
  assert report.ok, report.lines
  return report


def groups_of(plan):
  return [*dict.fromkeys(row.group for row in plan.rows)]


def test_copies_are_what_was_sampled_and_count_this_runs_versions(tokenizer, tmp_path, store_name):
  async def work():
    _, shared = await sharing.explore(tokenizer, tmp_path / 'other', [0, 1, 1], run=store_name)
    before = job.files(tmp_path / 'other')
    own = sharing.Follower(tokenizer, tmp_path / 'own', tmp_path / 'other')
    async with own.batches.running():
      plans = await own.train(3)
    own.store.close()
    assert job.files(tmp_path / 'other') == before, 'the other run is only read'
    return shared, own, plans

  shared, own, plans = run(work())
  assert [len(plan.rows) for plan in plans] == [4, 4, 4]
  for theirs, ours, plan in zip(shared, own.taken, plans, strict=True):
    for given, copy in zip(theirs.values(), ours.values(), strict=True):
      for field in ('tokens', 'role', 'loss_mask', 'sampled', 'behaviour_logprobs'):
        assert (getattr(given.sample, field) == getattr(copy.sample, field)).all()
      assert copy.reward == given.reward and copy.completion == given.completion
      assert [dataclasses.replace(s, uid='') for s in copy.scores] == [
        dataclasses.replace(s, uid='') for s in given.scores
      ]
      assert copy.sample.temperature == given.sample.temperature
      assert copy.sample.uid.startswith('learn/') and copy.sample.uid != given.sample.uid
    assert {row.reward for row in plan.rows} == {0.0, 1.0}
  # The first versions of the other run's groups are older, since its bound is one.
  assert {row.version_step for plan in plans for row in plan.rows} <= {0, 1}
  assert check(tmp_path / 'own').states['trained'] == 12


async def killed(tokenizer, tmp_path, others, *, step):
  """Trains on four batches of three groups. Then, as if the run had been killed after `step` of
  them, trains on the rest again. Returns the follower before and the one after.
  """
  fields = {'groups_per_batch': 3, 'bound': 9}
  own = sharing.Follower(tokenizer, tmp_path / 'own', *others, **fields)
  whole = await own.train(4)  # Killed: nothing is dropped.
  own.store.close()
  again = sharing.Follower(
    tokenizer, tmp_path / 'own', *others, start=step, state=own.states[step], **fields
  )
  async with again.batches.running():
    repeated = await again.train(4 - step)
  again.store.close()

  def content(plan):
    return [dataclasses.replace(row, source='', index=0) for row in plan.rows]

  assert [content(plan) for plan in repeated] == [content(plan) for plan in whole[step:]]
  assert again.states[4] == own.states[4]
  report = check(tmp_path / 'own')
  assert report.states['trained'] == 4 * 3 * 2 and report.live == ()
  return own, again


@pytest.mark.parametrize('step', [1, 2, 3])
def test_a_killed_run_takes_the_same_groups_again(tokenizer, tmp_path, store_name, step):
  """Batches of three groups, while two are shared at a time: some wait when the run is killed."""

  async def work():
    await sharing.explore(tokenizer, tmp_path / 'other', [0] * 6, run=store_name)
    return await killed(tokenizer, tmp_path, [tmp_path / 'other'], step=step)

  own, again = run(work())
  for before, after in zip(own.taken[step:], again.taken, strict=True):
    assert [m.reward for m in before.values()] == [m.reward for m in after.values()]
    assert [m.scores for m in before.values()] == [m.scores for m in after.values()]


def test_what_the_other_run_makes_void_is_dropped_and_counted(tokenizer, tmp_path, store_name):
  """The other run shares batches 0 to 3, and is killed with a commit after batch 1. Of its six
  groups up to batch 2, five are trained on then; one waits.
  """

  async def work():
    states, _ = await sharing.explore(tokenizer, tmp_path / 'other', [0] * 4, run=store_name)
    own = sharing.Follower(
      tokenizer, tmp_path / 'own', tmp_path / 'other', groups_per_batch=5, bound=9
    )
    async with own.batches.running():
      await own.train(1)
      await sharing.explore(
        tokenizer, tmp_path / 'other', [1] * 5, run=store_name, start=1, state=states[1]
      )
      await own.train(1)
    own.store.close()
    return own

  own = run(work())
  first, second = own.counts
  assert first['explore/voided'] == 0
  assert second['explore/voided'] == 1 and second['explore/voided_trained'] == 3
  report = check(tmp_path / 'own')
  assert report.reasons['dropped(voided)'] == 2
  assert report.states['trained'] == 2 * 5 * 2
  # Groups that were stored before that commit are shared again as they were, and not trained on
  # twice. Groups that were generated again are of newer weights.
  trained = [
    (m.task.uid, m.sample.sample_index, m.sample.segments[0].version.step)
    for taken in own.taken
    for m in taken.values()
  ]
  assert len(set(trained)) == len(trained)
  check(tmp_path / 'other')


def test_groups_expire_at_the_bound_and_no_sooner(tokenizer, tmp_path, store_name):
  async def work():
    await sharing.explore(tokenizer, tmp_path / 'other', [0, 0, 0, 1, 2], run=store_name)
    own = sharing.Follower(tokenizer, tmp_path / 'own', tmp_path / 'other', bound=1)
    async with own.batches.running():
      plans = await own.train(3)
    own.store.close()
    return own, plans

  own, plans = run(work())
  # A batch starts with the weights of the one before it: 0, 0, 0, 0, 1.
  assert [{row.version_step for row in plan.rows} for plan in plans] == [{0}, {0}, {1}]
  assert [counts['explore/expired'] for counts in own.counts] == [0, 0, 4]
  check(tmp_path / 'own')


def test_groups_of_weights_that_were_not_trained_again_are_left_out(
  tokenizer, tmp_path, store_name
):
  def exported(step):
    return 'other weights' if step == 1 else f'weights {step}'

  async def work():
    await sharing.explore(tokenizer, tmp_path / 'other', [0, 1, 1, 2, 2, 2], run=store_name)
    own = sharing.Follower(
      tokenizer, tmp_path / 'own', tmp_path / 'other', bound=9, exported=exported
    )
    async with own.batches.running():
      plans = await own.train(3)
    own.store.close()
    return own, plans

  own, plans = run(work())
  assert {row.version_step for plan in plans for row in plan.rows} == {0, 2}
  assert sum(counts['explore/left_out'] for counts in own.counts) > 0
  check(tmp_path / 'own')


def _cut(path):
  content = path.read_bytes()
  path.write_bytes(content[: len(content) // 2])
  return content


def _flip(path):
  content = path.read_bytes()
  middle = len(content) // 2
  path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
  return content


def _remove(path):
  content = path.read_bytes()
  path.unlink()
  return content


def _rewritten(change):
  """Damage that changes the shared batch as JSON."""

  def damage(path):
    content = path.read_bytes()
    batch = json.loads(content)
    change(batch['groups'][0]['trajectories'])
    path.write_text(json.dumps(batch))
    return content

  return damage


def _forged(**fields):
  """Damage that changes fields of a sample, and its digest in the shared batch with it."""

  def damage(path):
    content = path.read_bytes()
    batch = json.loads(content)
    row = batch['groups'][0]['trajectories'][0]['rows'][0]
    segments = path.parent.parent / 'segments'
    reader = open_segment_reader(segments)
    (sample,) = reader.read([(row['segment'], row['row'])])
    reader.close()
    changed = {name: change(getattr(sample, name)) for name, change in fields.items()}
    payload = encode(dataclasses.replace(sample, **changed))
    write_segment(segments, 'forged.arrayrecord', [payload])
    row |= {'segment': 'forged.arrayrecord', 'row': 0, 'digest': digest(payload)}
    path.write_text(json.dumps(batch))
    return content

  return damage


BATCH = 'shared/00000001-001.json'
FORGERIES = {
  'a huge reward': _rewritten(lambda trajectories: trajectories[0].update(value=1e300)),
  'a reward that is no number': _rewritten(
    lambda trajectories: trajectories[0].update(turn_values=[float('nan')])
  ),
  'an unknown status': _rewritten(lambda t: t[0]['scores'][0].update(status='splendid')),
  'no rows': _rewritten(lambda trajectories: trajectories[0].update(rows=[])),
  'no trajectories': _rewritten(lambda trajectories: trajectories.clear()),
  'a row twice': _rewritten(lambda t: t[0].update(rows=t[1]['rows'])),
  'a segment elsewhere': _rewritten(lambda t: t[0]['rows'][0].update(segment='../other')),
  'a negative row': _rewritten(lambda t: t[0]['rows'][0].update(row=-1)),
  'tokens beyond the vocabulary': _forged(tokens=lambda tokens: tokens + 10_000),
  'logprobs above 0': _forged(behaviour_logprobs=lambda logprobs: -logprobs),
  'no segments': _forged(segments=lambda segments: ()),
  'an unknown role': _forged(role=lambda role: role * 0 + 99),
}


@pytest.mark.parametrize('damage', FORGERIES.values(), ids=FORGERIES)
def test_what_a_correct_run_cannot_share_is_not_trained_on(tokenizer, tmp_path, store_name, damage):
  test_damage_is_reported_in_one_line_and_loses_nothing(
    tokenizer, tmp_path, store_name, BATCH, damage
  )


@pytest.mark.parametrize(
  ('part', 'damage'),
  [
    (BATCH, _cut),
    (BATCH, _remove),
    ('segments', _cut),
    ('segments', _flip),
    ('segments', _remove),
  ],
)
def test_damage_is_reported_in_one_line_and_loses_nothing(
  tokenizer, tmp_path, store_name, part, damage
):
  """The run waits, and goes on when the file is restored."""

  async def work():
    await sharing.explore(tokenizer, tmp_path / 'other', [0, 0], run=store_name)
    path = tmp_path / 'other' / part
    if path.is_dir():
      path = sorted(path.iterdir())[-1]
    content, looks = damage(path), []

    async def sleep(seconds):
      looks.append(seconds)
      if len(looks) == 3:
        path.write_bytes(content)

    own = sharing.Follower(tokenizer, tmp_path / 'own', tmp_path / 'other', sleep=sleep)
    async with own.batches.running():
      with logs.absl_lines() as lines:
        plans = await own.train(2)
    own.store.close()
    return plans, looks, lines

  plans, looks, lines = run(work())
  assert [len(plan.rows) for plan in plans] == [4, 4] and len(looks) >= 3
  if 'shared' not in part or damage is not _remove:
    (line,) = [line for line in lines if 'stages.learn.source: waiting' in line]
    assert '\n' not in line
  assert check(tmp_path / 'own').states['trained'] == 8


@pytest.mark.parametrize(
  ('fields', 'words'),
  [
    ({'vocabulary': 'another'}, ('another vocabulary', 'same checkpoint')),
    ({'group_size': 1}, ('group_size: 1', 'groups of 2', 'raise group_size')),
  ],
)
def test_a_run_that_does_not_fit_is_refused_in_one_line(
  tokenizer, tmp_path, store_name, fields, words
):
  async def work():
    await sharing.explore(tokenizer, tmp_path / 'other', [0], run=store_name)
    own = sharing.Follower(tokenizer, tmp_path / 'own', tmp_path / 'other', **fields)
    async with own.batches.running():
      await own.train(1)

  with pytest.raises(UserError) as refused:
    run(work())
  line = str(refused.value)
  assert '\n' not in line and all(word in line for word in words), line


def test_rollouts_of_another_runs_weights_are_refused(tokenizer, tmp_path, store_name):
  async def work():
    await sharing.explore(tokenizer, tmp_path / 'other', [0], run='somebody')
    own = sharing.Follower(tokenizer, tmp_path / 'own', tmp_path / 'other')
    async with own.batches.running():
      await own.train(1)

  with pytest.raises(UserError, match='follows the weights of another run'):
    run(work())


def test_a_wait_for_a_run_that_shares_nothing_ends(tokenizer, tmp_path, store_name):
  async def work():
    own = sharing.Follower(
      tokenizer, tmp_path / 'own', tmp_path / 'none', deadline_s=0.05, sleep=asyncio.sleep
    )
    async with own.batches.running():
      await own.train(1)

  with pytest.raises(WaitExpired, match=r'groups of the run that stages\.learn\.source\.run names'):
    run(work())


def shares(tmp_path, taken):
  """Returns for each batch the other runs whose groups it contains, in order of its groups."""
  origins = {}
  for directory in ('first', 'second'):
    with contextlib.closing(open_store(tmp_path / directory, synchronous='normal')) as store:
      origins[store.name] = directory
  with contextlib.closing(open_store(tmp_path / 'own', synchronous='normal')) as store:
    return [
      [
        origins[store.derived([uid], FOLLOWED)[uid]['store']]
        for uid, member in batch.items()
        if member.sample.sample_index == 0
      ]
      for batch in taken
    ]


@pytest.mark.parametrize('step', [1, 2, 3])
def test_batches_of_several_runs_are_read_in_turns_and_again_after_a_kill(
  tokenizer, tmp_path, store_name, step
):
  """Batches of three groups, while each of two runs shares two groups at a time."""
  others = tmp_path / 'first', tmp_path / 'second'

  async def work():
    for i, other in enumerate(others):
      await sharing.explore(tokenizer, other, [0] * 3, run=store_name, share=(i, 2))
    return await killed(tokenizer, tmp_path, others, step=step)

  own, _ = run(work())
  assert shares(tmp_path, own.taken) == [
    ['first', 'first', 'second'],
    ['second', 'first', 'first'],
    ['second', 'second', 'first'],
    ['first', 'second', 'second'],
  ]
  tasks = [member.task.uid for batch in own.taken for member in batch.values()]
  assert len(set(tasks)) == 12, 'the two runs divide the tasks'
  assert own.counts[0]['perf/unread_batches'] == 4 and own.counts[3]['perf/unread_batches'] == 0
  assert own.batches.clock_decisions == 0


def test_what_one_of_several_runs_makes_void_leaves_the_others_alone(
  tokenizer, tmp_path, store_name
):
  """The second run shares batches 0 to 2, and is killed with a commit after batch 1."""
  others = tmp_path / 'first', tmp_path / 'second'

  async def work():
    for i, other in enumerate(others):
      states, _ = await sharing.explore(
        tokenizer, other, [0] * (4, 3)[i], run=store_name, share=(i, 2)
      )
    own = sharing.Follower(tokenizer, tmp_path / 'own', *others, groups_per_batch=7, bound=9)
    async with own.batches.running():
      # Reads two batches of each run. The last group, of the second run's batch 1, waits.
      await own.train(1)
      await sharing.explore(
        tokenizer, others[1], [1] * 4, run=store_name, start=1, state=states[1], share=(1, 2)
      )
      await own.train(1)
    own.store.close()
    return own

  own = run(work())
  first, second = own.counts
  assert first['explore/voided'] == 0
  assert second['explore/voided'] == 1 and second['explore/voided_trained'] == 1
  assert [batch.count('first') for batch in shares(tmp_path, own.taken)] == [4, 4]
  check(tmp_path / 'own')
  for other in others:
    check(other)


@pytest.mark.parametrize('order', ['turns', 'arrival'])
def test_a_run_that_shares_nothing_delays_the_others_only_in_turns(
  tokenizer, tmp_path, store_name, order
):
  """A batch consists of the groups of two shared batches."""

  async def work():
    await sharing.explore(tokenizer, tmp_path / 'first', [0] * 2, run=store_name, share=(0, 2))
    own = sharing.Follower(
      tokenizer,
      tmp_path / 'own',
      tmp_path / 'first',
      tmp_path / 'second',
      groups_per_batch=4,
      order=order,
      bound=9,
      deadline_s=0.2,
      sleep=asyncio.sleep,
    )
    async with own.batches.running():
      with contextlib.ExitStack() as refused:
        if order == 'turns':
          refused.enter_context(pytest.raises(WaitExpired, match=str(tmp_path / 'second')))
        await own.train(1)
    own.store.close()
    return own

  own = run(work())
  assert own.batches.clock_decisions == len(own.taken) == (order == 'arrival')


def test_a_run_that_shares_again_after_a_pause_does_not_displace_the_others(
  tokenizer, tmp_path, store_name
):
  others = tmp_path / 'first', tmp_path / 'second'

  async def work():
    await sharing.explore(tokenizer, others[0], [0] * 6, run=store_name, share=(0, 2))
    damaged = next(others[0].rglob('00000001-*.json'))
    content, looks = damaged.read_bytes(), []
    damaged.write_bytes(b'')

    async def sleep(seconds):
      looks.append(seconds)
      if len(looks) == 3:
        damaged.write_bytes(content)

    own = sharing.Follower(
      tokenizer, tmp_path / 'own', *others, order='arrival', bound=9, sleep=sleep
    )
    async with own.batches.running():
      await own.train(3)
      assert len(looks) == 3 and own.batches.clock_decisions == 2  # Not the batch of its turn.
      await sharing.explore(tokenizer, others[1], [0] * 3, run=store_name, share=(1, 2))
      await own.train(6)
    own.store.close()
    return own

  own = run(work())
  assert [groups[0] for groups in shares(tmp_path, own.taken)] == [
    *['first'] * 3,
    *['second', 'first'] * 3,
  ]


@pytest.mark.parametrize('share', [(0, 1), (0, 2), (1, 3), (2, 4)])
def test_runs_that_draw_the_same_tasks_are_refused(tokenizer, tmp_path, store_name, share):
  others = tmp_path / 'first', tmp_path / 'second'

  async def work():
    for other, part in zip(others, ((0, 2), share)):
      await sharing.explore(tokenizer, other, [0], run=store_name, seed=1, share=part)
    own = sharing.Follower(tokenizer, tmp_path / 'own', *others)
    async with own.batches.running():
      await own.train(1)

  with pytest.raises(UserError, match=r'draws the same tasks as .*first.*source\.follow\.share'):
    run(work())


@pytest.mark.parametrize(
  'fields',
  [
    {'share': (0, 2), 'seed': 2},
    {'share': (0, 2), 'seed': None},
    {'share': (0, 2), 'seed': 1, 'tasks': 'others'},
    {'share': (1, 2), 'seed': 1},
    {'share': (1, 4), 'seed': 1},
  ],
)
def test_runs_with_other_tasks_or_another_seed_are_followed(
  tokenizer, tmp_path, store_name, fields
):
  others = tmp_path / 'first', tmp_path / 'second'

  async def work():
    await sharing.explore(tokenizer, others[0], [0], run=store_name, seed=1, share=(0, 2))
    await sharing.explore(tokenizer, others[1], [0], run=store_name, **fields)
    own = sharing.Follower(tokenizer, tmp_path / 'own', *others)
    await own.train(1)
    own.store.close()

  run(work())


def test_an_opening_without_a_valid_share_is_damaged(tokenizer, tmp_path, store_name):
  async def work():
    await sharing.explore(tokenizer, tmp_path / 'other', [0], run=store_name, seed=1)
    (path,) = tmp_path.glob('other/**/attempt-*.json')
    path.write_text(json.dumps(json.loads(path.read_text()) | {'share': [0, 0]}))

    async def sleep(seconds):
      await asyncio.sleep(0.01)

    own = sharing.Follower(
      tokenizer, tmp_path / 'own', tmp_path / 'other', sleep=sleep, deadline_s=0.2
    )
    async with own.batches.running():
      with logs.absl_lines() as lines, pytest.raises(WaitExpired):
        await own.train(1)
    own.store.close()
    return lines

  (line,) = [line for line in run(work()) if 'stages.learn.source: waiting' in line]
  assert 'has share (0, 0)' in line


def test_a_run_may_end_between_the_record_of_a_batch_and_its_completion(
  tokenizer, tmp_path, store_name
):
  async def work():
    await sharing.explore(tokenizer, tmp_path / 'other', [0], run=store_name)
    own = sharing.Follower(
      tokenizer, tmp_path / 'own', tmp_path / 'other', groups_per_batch=1, bound=9
    )
    with pytest.raises(asyncio.CancelledError):
      async with own.batches.running():
        own.batches.advance(0, 0)
        rows, _ = await own.batches.next()
        own.batches.record(StepPlan(step=0, stage='learn', rows=tuple(rows)))
        raise asyncio.CancelledError
    own.store.close()

  run(work())
  states = check(tmp_path / 'own').states
  assert states['trained'] == 2 and states['dropped'] == 2


def test_a_resumed_run_follows_one_more_run_but_not_fewer(tokenizer, tmp_path, store_name):
  others = tmp_path / 'first', tmp_path / 'second'

  async def work():
    for i, other in enumerate(others):
      await sharing.explore(tokenizer, other, [0] * 3, run=store_name, share=(i, 2))
    own = sharing.Follower(tokenizer, tmp_path / 'own', others[0], bound=9)
    await own.train(1)
    own.store.close()
    # As written when only one run could be followed.
    state = json.loads(own.states[1])
    (cursor,) = state.pop('cursors')
    state |= {
      'cursor': cursor[:3],
      'recent': {key: place[:2] for key, place in state['recent'].items()},
    }
    more = sharing.Follower(
      tokenizer, tmp_path / 'own', *others, start=1, state=json.dumps(state), bound=9
    )
    await more.train(2)
    more.store.close()
    with pytest.raises(UserError, match='names 1 runs, but this run has followed 2'):
      sharing.Follower(
        tokenizer, tmp_path / 'own', others[0], start=3, state=more.states[3], bound=9
      )
    return more

  more = run(work())
  assert shares(tmp_path, more.taken) == [['first', 'first'], ['second', 'second']]
