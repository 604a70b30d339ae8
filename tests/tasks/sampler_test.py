import collections
import dataclasses
import json

import numpy as np
import pytest

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.tasks.sampler import LaterWeights, SamplerConfig, TaskSampler, order_digest
from jaxrl_llm.tasks.taskset import Taskset


def taskset(name, *texts):
  tasks = tuple(
    Task(
      taskset=name,
      domain='general',
      prompt=({'role': 'user', 'content': text},),
      truth=None,
      fields={},
    )
    for text in texts
  )
  return Taskset(name=name, tasks=tasks, counts={})


SETS = [taskset('a', *'pqrs'), taskset('b', *'pxy')]


def draw(sampler, count):
  return [
    (task.taskset + task.prompt[0]['content'], visit)
    for task, visit in (sampler.next() for _ in range(count))
  ]


def sampler(order='shuffled', seed=5, sets=SETS, share=(0, 1), **fields):
  return TaskSampler(sets, SamplerConfig(order=order, **fields), seed=seed, share=share)


def test_sequential_is_the_tasksets_in_order_again_and_again():
  names = ['ap', 'aq', 'ar', 'as', 'bp', 'bx', 'by']
  assert [name for name, _ in draw(sampler('sequential'), 16)] == [*names, *names, 'ap', 'aq']


def test_every_pass_draws_each_task_once_in_a_new_order():
  drawn = draw(sampler(), 70)
  passes = [[name for name, _ in drawn[i : i + 7]] for i in range(0, 70, 7)]
  assert all(sorted(names) == sorted(passes[0]) and len(set(names)) == 7 for names in passes)
  assert len({tuple(names) for names in passes}) > 5
  assert [name for name, _ in draw(sampler(seed=6), 70)] != [name for name, _ in drawn]


@pytest.mark.parametrize('fields', [{}, {'weights': {'a': 1.0, 'b': 2.0}}])
def test_samplers_divide_one_sequence_of_tasks_by_shares(fields):
  whole = draw(sampler(**fields), 60)
  shares = [sampler(share=(i, 3), **fields) for i in range(3)]
  assert [draw(part, 20) for part in shares] == [whole[0::3], whole[1::3], whole[2::3]]
  again = sampler(share=(1, 3), **fields)
  again.restore(json.loads(json.dumps(shares[1].state())))
  assert draw(again, 5) == draw(shares[1], 5)
  with pytest.raises(UserError, match='share'):
    sampler(share=(2, 3), **fields).restore(shares[1].state())


def test_the_digest_of_an_order_is_that_of_its_tasks_and_configuration():
  shuffled, sequential = SamplerConfig(), SamplerConfig(order='sequential')
  digests = [
    order_digest(sets, config)
    for sets in (SETS, SETS[:1], [taskset('a', *'pqrt'), SETS[1]])
    for config in (shuffled, sequential)
  ]
  assert len(set(digests)) == 6 and order_digest(SETS, SamplerConfig()) == digests[0]


def test_a_state_from_before_shares_is_that_of_the_whole_sequence():
  state = {key: value for key, value in sampler().state().items() if key != 'share'}
  sampler().restore(state)
  with pytest.raises(UserError, match='share'):
    sampler(share=(0, 2)).restore(state)


def test_visit_counts_earlier_draws_of_the_task():
  """The prompt 'p' is in both tasksets, which take its visits by turns."""
  seen = collections.Counter()
  for name, visit in draw(sampler(), 40):
    assert visit == {'ap': 2 * seen[name], 'bp': 2 * seen[name] + 1}.get(name, seen[name])
    seen[name] += 1


@pytest.mark.parametrize('order', ['sequential', 'shuffled'])
@pytest.mark.parametrize('before', [0, 1, 7, 17])
def test_restored_sampler_continues_exactly(order, before):
  original = sampler(order)
  draw(original, before)
  state = json.loads(json.dumps(original.state()))
  rest = draw(original, 30)
  restored = sampler(order)
  draw(restored, 3)
  restored.restore(state)
  assert draw(restored, 30) == rest and restored.state() == original.state()


@pytest.mark.parametrize(
  'other, named',
  [
    (sampler('sequential'), 'config'),
    (sampler(seed=4), 'seed 5 in the checkpoint, 4 now'),
    (sampler(sets=SETS[:1]), 'tasks'),
    (sampler(sets=SETS[::-1]), 'tasks'),
    (sampler(sets=[taskset('c', *'pqrs'), SETS[1]]), 'tasks'),
  ],
)
def test_state_of_other_tasksets_is_refused(other, named):
  before = other.state()
  with pytest.raises(UserError, match=named):
    other.restore(sampler().state())
  assert other.state() == before


def test_tasksets_need_distinct_names_and_tasks():
  with pytest.raises(UserError, match='its own name'):
    sampler(sets=[SETS[0], SETS[0]])
  with pytest.raises(UserError, match='no task'):
    sampler(sets=[])


BIG = taskset('a', *(f'{i}' for i in range(6)))


def drawn_shares(made, count):
  """Of each task of BIG in `count` draws."""
  numbers = [int(made.next()[0].prompt[0]['content']) for _ in range(count)]
  return np.bincount(numbers, minlength=6)


def assert_drawn_by(counts, weights):
  """χ² against the weights: beyond the 1 in 10,000 quantile with five degrees of freedom it would
  not be chance.
  """
  expected = counts.sum() * np.asarray(weights) / np.sum(weights)
  assert ((counts - expected) ** 2 / expected).sum() < 25.7


def test_prioritised_draws_by_one_minus_the_success_rate():
  made = sampler('prioritised', sets=[BIG], prior=0.5, newest=0.25, floor=0.1)
  uids = [task.uid for task in BIG.tasks]
  made.feedback(uids[0], 8, 8)  # s = 1: the floor.
  made.feedback(uids[1], 2, 8)  # s = 1/4.
  made.feedback(uids[2], 0, 8)
  made.feedback(uids[2], 4, 8)  # 0, then 3/4 · 0 + 1/4 · 1/2 = 1/8.
  assert_drawn_by(drawn_shares(made, 20_000), [0.1, 0.75, 0.875, 0.5, 0.5, 0.5])


def test_difficulty_draws_by_the_distance_of_the_posterior_mean_from_the_target():
  made = sampler('difficulty', sets=[BIG], target=0.5, temperature=0.25, discount=0.2)
  uids = [task.uid for task in BIG.tasks]
  made.feedback(uids[0], 8, 8)  # α = 0.8 + 0.2 + 8 = 9, β = 1: p = 0.9.
  made.feedback(uids[1], 0, 3)  # α = 1, β = 4: p = 0.2.
  made.feedback(uids[2], 8, 8)
  made.feedback(uids[2], 0, 7)  # α = 0.8 · 9 + 0.2 = 7.4, β = 0.8 + 0.2 + 7 = 8: p = 7.4 / 15.4.
  far = [0.4, 0.3, abs(7.4 / 15.4 - 0.5), 0, 0, 0]
  assert_drawn_by(drawn_shares(made, 20_000), np.exp(-np.array(far) / 0.25))


def test_easy_to_hard_goes_by_the_named_field():
  tasks = tuple(
    dataclasses.replace(task, fields={'level': level})
    for task, level in zip(BIG.tasks, (3, 1, 2, 1, 9, 0))
  )
  made = sampler('easy_to_hard', sets=[dataclasses.replace(BIG, tasks=tasks)], hardness='level')
  assert [made.next()[0].prompt[0]['content'] for _ in range(8)] == [
    '5',
    '1',
    '3',
    '2',
    '0',
    '4',
    '5',
    '1',
  ]
  with pytest.raises(
    UserError, match=r"sampler\.hardness: 'size' of task a:\w+ is None, wanted a number"
  ):
    sampler('easy_to_hard', sets=[BIG], hardness='size')


@pytest.mark.parametrize(
  'weights', [{'a': 3.0, 'b': 1.0}, {'a': 1.0, 'b': 0.0}, {'a': 1.5, 'b': 2.5}]
)
def test_tasksets_are_mixed_in_their_shares_by_counting(weights):
  made = sampler(weights=weights)
  share = weights['a'] / sum(weights.values())
  from_a = np.cumsum([made.next()[0].taskset == 'a' for _ in range(80)])
  assert np.abs(from_a - share * np.arange(1, 81)).max() < 1
  # Each in passes of its own: four tasks are in 'a'.
  again = sampler(weights=weights)
  first = [task for task, _ in (again.next() for _ in range(40)) if task.taskset == 'a'][:4]
  assert len({task.uid for task in first}) == 4


def test_later_weights_begin_with_their_batch():
  made = sampler(
    weights={'a': 1.0, 'b': 0.0},
    schedule=(LaterWeights(from_batch=2, weights={'a': 0.0, 'b': 1.0}),),
  )
  found = []
  for batch in range(4):
    made.advance(batch)
    found.append({made.next()[0].taskset for _ in range(5)})
  assert found == [{'a'}, {'a'}, {'b'}, {'b'}]


@pytest.mark.parametrize(
  'fields', [{'order': 'prioritised'}, {'order': 'difficulty'}, {'weights': {'a': 2.0, 'b': 1.0}}]
)
def test_what_a_sampler_has_learnt_is_restored(fields):
  def go_on(made, count):
    """Draws, and tells after each three what became of them."""
    found = []
    for batch in range(count):
      made.advance(batch)
      drawn = [made.next() for _ in range(3)]
      found += [(task.uid, visit) for task, visit in drawn]
      for task, visit in drawn:
        made.feedback(task.uid, ((len(task.uid) + visit + ord(task.uid[-1])) % 5), 5)
    return found

  original = sampler(**fields)
  go_on(original, 7)
  state = json.loads(json.dumps(original.state()))
  rest = go_on(original, 20)
  restored = sampler(**fields)
  go_on(restored, 2)
  restored.restore(state)
  assert go_on(restored, 20) == rest and restored.state() == original.state()


def test_what_became_of_a_task_is_told_to_its_own_taskset():
  made = sampler('prioritised', weights={'a': 1.0, 'b': 1.0})
  made.feedback(SETS[1].tasks[1].uid, 3, 4)
  assert [pool['known'] for pool in made.state()['pools']] == [{}, {'1': [0.75]}]


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'floor': 0.0}, 'floor: 0'),
    ({'prior': 1.5}, 'prior: 1.5'),
    ({'temperature': 0.0}, 'temperature'),
    ({'order': 'easy_to_hard'}, 'hardness is None'),
    ({'weights': {'a': -1.0, 'b': 2.0}}, 'none negative'),
    ({'weights': {'a': 1.0}}, r"names \['a'\], but the tasksets are \['a', 'b'\]"),
    (
      {'schedule': (LaterWeights(from_batch=1, weights={'a': 1.0, 'b': 1.0}),)},
      'need initial ones',
    ),
    (
      {
        'weights': {'a': 1.0, 'b': 1.0},
        'schedule': (LaterWeights(from_batch=0, weights={'a': 1.0, 'b': 1.0}),),
      },
      'increasing integers of at least 1',
    ),
  ],
)
def test_settings_that_make_no_sense_are_refused(fields, message):
  with pytest.raises(UserError, match=message):
    sampler(**{'order': 'shuffled', **fields})
