"""Trajectories of several steps from the workflow to the rows of a batch, with a real store."""

import asyncio
import dataclasses
import re

import exploring
import pytest
from clocks import simulated

from jaxrl_llm.app.composition.stored_groups import StoredGroups
from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.records.sample import encode
from jaxrl_llm.master.batches import RolloutBatches
from jaxrl_llm.master.exploring.recall import recall
from jaxrl_llm.master.recorded import RecordedGroups, write_recorded
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.index import open_store
from jaxrl_llm.rollout.episodes.workflow import Episodes

MOST = 3
GROUPS = 2  # In a batch.


class Turns(Episodes):
  """The trajectory of index i has i + 1 steps of one turn."""

  def __init__(self, *args, change=lambda rollout: rollout, **options):
    super().__init__(*args, **options)
    self.max_steps, self._change = MOST, change

  async def play(self, episode):
    episode.observe(episode.task.prompt)
    await episode.act()
    for step in range(1, episode._place.index + 1):
      episode.restart(exploring.LETTERS[step])
      await episode.act()

  async def run(self, *args, **how):
    async for rollout in super().run(*args, **how):
      yield self._change(rollout)


def exploration(tokenizer, store, judge=lambda attempt: 1.0, **options):
  return exploring.Exploration(
    tokenizer, store, judge, max_tokens=6, group_size=MOST, max_steps=MOST, **options
  )


def test_every_step_is_issued_stored_and_trained_once(tokenizer, store):
  batches = simulated(exploration(tokenizer, store, make=Turns).batches(2))
  for batch, counts in batches:
    assert [len(member.steps) for member in batch] == [1, 2, 3] * GROUPS
    assert counts['split_trajectories'] == 2 * GROUPS
  report = audit(store)
  assert report.ok and report.live == () and report.duplicates == 0
  count = 2 * GROUPS * (1 + 2 + 3)
  assert report.issued == report.states['trained'] == count and report.uses == {1: count}
  (group,) = {member.sample.group_id for member in batches[0][0][:MOST]}
  trajectories = [f'{group}/0', f'{group}/1', f'{group}/2']
  later = [f'{group}/1/1', f'{group}/2/1', f'{group}/2/2']
  assert sorted(store.members(group)) == sorted([*trajectories, *later])


def test_scores_and_records_are_of_the_trajectory(tokenizer, store):
  attempts = []

  def judge(attempt):
    attempts.append(attempt)
    return float(attempt.uid.endswith('/2'))

  run = exploration(tokenizer, store, judge, make=Turns)
  ((batch, _),) = simulated(run.batches(1))
  assert len(attempts) == MOST * GROUPS
  by_uid = {attempt.uid: attempt for attempt in attempts}
  for member in batch:
    attempt = by_uid[member.sample.uid]
    assert attempt.response_len == sum(step.response_len for step in member.steps)
    assert attempt.completion == run.runner.workflow.text(member.steps[-1])
    turns = [message['role'] for message in attempt.transcript[1:]]
    assert turns == ['assistant', *['tool', 'assistant'] * (len(member.steps) - 1)]
  uids = [step.uid for member in batch for step in member.steps]
  recalled = recall(
    store,
    uids,
    tasks={task.uid: task for task in run.tasks}.get,
    text=run.runner.workflow.text,
    rewards=exploring.REWARDS,
  )
  for got, wanted in zip(recalled, batch, strict=True):
    assert [encode(step) for step in got.steps] == [encode(step) for step in wanted.steps]
    assert (got.reward, got.completion) == (wanted.reward, wanted.completion)


def test_a_trajectory_is_dropped_with_all_its_steps(tokenizer, store):
  def judge(attempt):
    return None if attempt.uid.endswith('/2') else 1.0

  ((batch, counts),) = simulated(exploration(tokenizer, store, judge, make=Turns).batches(1))
  assert [len(member.steps) for member in batch] == [1, 2] * GROUPS
  report = audit(store)
  assert report.ok and report.live == ()
  assert report.reasons == {'dropped(unscorable)': 3 * GROUPS}
  assert counts['dropped/unscorable'] == GROUPS  # Trajectories.


def test_each_step_is_a_row_and_their_rewards_add_up_to_the_trajectorys(tokenizer, store):
  run = exploration(tokenizer, store, make=Turns)

  async def check():
    async with run.explorer.running():
      run.explorer.advance(0, 0)
      rows, _ = await (batches := RolloutBatches(run.explorer)).next()
      return rows, batches.taken()

  rows, taken = simulated(check())
  assert [row.step_index for row in rows] == [0, 0, 1, 0, 1, 2] * GROUPS
  group = rows[0].group
  assert [row.trajectory for row in rows[:6]] == [None, *[f'{group}/1'] * 2, *[f'{group}/2'] * 3]
  assert [row.reward for row in rows[:6]] == [1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
  assert [taken[row.uid].step(row.uid).uid for row in rows] == [row.uid for row in rows]
  # The first steps of a group start from the same state, and so do its second ones.
  assert [rows[i].prompt_digest == rows[0].prompt_digest for i in range(6)] == [
    *(True, True, False, True, False, False)
  ]
  assert rows[2].prompt_digest == rows[4].prompt_digest != rows[5].prompt_digest != ''


def test_recorded_steps_name_the_state_from_which_they_start(tokenizer, store, tmp_path):
  ((batch, _),) = simulated(exploration(tokenizer, store, make=Turns).batches(1))
  groups, file = [batch[:MOST], batch[MOST:]], 'data/offline.arrayrecord'
  write_recorded(tmp_path, file, groups)
  recorded = RecordedGroups(tmp_path, file, tasks={}, text=str)
  assert len(recorded) == len(groups) == GROUPS
  for number, group in enumerate(groups):
    rows = recorded.rows(number)
    assert [row.uid for row in rows] == [step.uid for member in group for step in member.steps]
    a, b, c = (rows[i].prompt_digest for i in (0, 2, 5))
    assert len({'', a, b, c}) == 4
    assert [row.prompt_digest for row in rows] == [a, a, b, a, b, c]


def test_rewards_of_turns_go_to_the_rows_of_their_steps(tokenizer, store):
  ((batch, _),) = simulated(exploration(tokenizer, store, make=Turns).batches(1))
  member = batch[2]
  reward = dataclasses.replace(member.reward, value=2.0, turn_values=(0.25, 0.5))
  member = dataclasses.replace(member, reward=reward)
  assert member.step_rewards() == [(0.0, (0.25,)), (0.0, (0.5,)), (2.0, ())]


def test_a_crash_voids_late_steps_and_they_can_be_issued_again(tokenizer, tmp_path):
  store = exploring.new_store(tmp_path / 'replay')
  simulated(exploration(tokenizer, store, make=Turns).batches(1))
  store.close()
  store = open_store(tmp_path / 'replay', synchronous='normal')
  store.recover(0)
  simulated(exploration(tokenizer, store, make=Turns).batches(1))
  report = audit(store)
  assert report.ok and report.live == ()
  assert (report.states['void'], report.states['trained']) == (6 * GROUPS, 6 * GROUPS)
  store.close()


def replaced(k, **fields):
  """Changes step k of the trajectories that have one."""

  def change(rollout):
    steps = [*rollout.steps]
    if k < len(steps):
      steps[k] = dataclasses.replace(steps[k], **fields)
    return rollout._replace(sample=steps[0], later=tuple(steps[1:]))

  return change


def longer(rollout):
  """Has more steps than the run permits."""
  more = [
    dataclasses.replace(
      rollout.sample,
      uid=f'{rollout.sample.uid}/{k}',
      step_index=k,
      trajectory_id=rollout.sample.uid,
    )
    for k in range(1, MOST + 1)
  ]
  return rollout._replace(later=tuple(more))


VIOLATIONS = {
  'a step twice': (
    lambda rollout: rollout._replace(later=rollout.later[:1] * 2),
    r'sample grpo/\S+/1/1 of group \S+, wanted sample grpo/\S+/1/2 of group',
  ),
  'a step left out': (
    lambda rollout: rollout._replace(later=rollout.later[1:]),
    r'sample grpo/\S+/2/2 of group \S+, wanted sample grpo/\S+/2/1 of group',
  ),
  'too many': (longer, rf'sample grpo/\S+ has {MOST + 1} steps, wanted at most {MOST} \(rollout'),
  'another index': (replaced(1, sample_index=0), r'has \(trajectory, index, step\) \(\S+, 0, 1\)'),
  'another number': (replaced(1, step_index=2), r'wanted \(\S+, \d, 1\)'),
  'another trajectory': (replaced(1, trajectory_id='x'), r"has \(trajectory, index, step\) \('x'"),
  'another group': (replaced(1, group_id='x'), r'of group x, wanted sample'),
  'another task': (replaced(1, task_id='train:x'), r'has task train:x, visit 0, wanted those of'),
  'another visit': (replaced(1, visit=7), r'visit 7, wanted those of its group'),
  'no span': (replaced(1, segments=()), r'token \d+ was sampled, but no segment covers it'),
}


@pytest.mark.parametrize(('change', 'line'), VIOLATIONS.values(), ids=VIOLATIONS)
def test_a_violation_is_one_line_and_leaves_nothing_issued(tokenizer, store, change, line):
  def make(*args, **options):
    return Turns(*args, change=change, **options)

  with pytest.raises(RunError, match=r'rollout\.workflow: ') as caught:
    simulated(exploration(tokenizer, store, make=make).batches(1))
  assert '\n' not in str(caught.value) and re.search(line, str(caught.value))
  report = audit(store)
  assert report.ok and report.live == ()
  assert report.reasons == {'dropped(given up)': report.issued}


def test_the_audit_fails_on_a_step_whose_trajectory_became_something_else(tokenizer, store):
  run = exploration(tokenizer, store, make=Turns)

  async def check():
    async with run.explorer.running():
      run.explorer.advance(0, 0)
      batch, _ = await run.explorer.collect()
      whole = [step.uid for member in batch for step in member.steps]
      store.at(0).seal(whole)
      store.at(0).trained(whole[:-1])
      store.at(0).drop(whole[-1:], 'by hand')

  simulated(check())
  report = audit(store)
  assert not report.ok and len(report.problems) == 1
  assert re.search(r'/2/2: is dropped, but the step before it, \S+/2/1, is', report.problems[0])


def test_a_resumed_explorer_reads_all_steps_of_the_groups_that_had_finished(tokenizer, tmp_path):
  def opened(commit):
    store = open_store(tmp_path / 'replay', synchronous='normal')
    store.recover(commit)
    return store, exploration(tokenizer, store, make=Turns, bound=1)

  async def first(run):
    async with run.explorer.running():
      run.explorer.advance(0, 0)
      batch = (await run.explorer.next()).chosen
      await asyncio.sleep(10)  # The groups of the next batch finish.
      run.explorer.record([step.uid for member in batch for step in member.steps])
      run.explorer.complete()
      return run.explorer.state()

  async def second(run, state):
    run.explorer.restore(state)
    async with run.explorer.running():
      run.explorer.advance(1, 0)
      batch = (await run.explorer.next()).chosen
      run.explorer.record([step.uid for member in batch for step in member.steps])
      run.explorer.complete()
      return batch

  store, run = opened(0)
  state = simulated(first(run))
  assert [group['ended'] for group in state['explorer']['groups']] == [True] * GROUPS
  store.close()
  store, run = opened(1)
  batch = simulated(second(run, state))
  assert [len(member.steps) for member in batch] == [1, 2, 3] * GROUPS
  assert not run.engine.requests
  report = audit(store)
  assert report.ok and report.states['trained'] == 2 * GROUPS * (1 + 2 + 3)
  store.close()


def test_stored_groups_are_read_with_their_steps_if_so_many_are_permitted(tokenizer, tmp_path):
  store = exploring.new_store(tmp_path / 'replay')
  run = exploration(tokenizer, store, make=Turns)
  simulated(run.batches(1))
  store.close()
  groups = StoredGroups(
    run=tmp_path,
    tasks={task.uid: task for task in run.tasks},
    rewards_of=lambda stage: exploring.REWARDS,
    tokenizer=tokenizer,
    longest=64,
    max_steps=MOST,
    where='stages.x.source',
  )
  assert [[len(m.steps) for m in group] for group in groups.read(())] == [[1, 2, 3]] * GROUPS
  with pytest.raises(UserError, match='stored trajectories of 3 steps, wanted at most 1') as caught:
    [*dataclasses.replace(groups, max_steps=1).read(())]
  assert '\n' not in str(caught.value)
