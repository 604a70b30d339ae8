import collections
import json

import pytest

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.experience.task import Task
from jaxrl_llm.tasks.sampler import TaskSampler
from jaxrl_llm.tasks.taskset import Taskset


def taskset(name, *texts):
  tasks = tuple(
    Task(taskset=name, domain='general', prompt=({'role': 'user', 'content': text},), truth=None, fields={})
    for text in texts
  )
  return Taskset(name=name, tasks=tasks, counts={})


SETS = [taskset('a', *'pqrs'), taskset('b', *'pxy')]


def draw(sampler, count):
  return [(task.taskset + task.prompt[0]['content'], visit) for task, visit in (sampler.next() for _ in range(count))]


def sampler(order='shuffled', seed=5, sets=SETS):
  return TaskSampler(sets, order=order, seed=seed)


def test_sequential_is_the_tasksets_in_order_again_and_again():
  names = ['ap', 'aq', 'ar', 'as', 'bp', 'bx', 'by']
  assert draw(sampler('sequential'), 16) == [(n, 0) for n in names] + [(n, 1) for n in names] + [('ap', 2), ('aq', 2)]


def test_every_pass_draws_each_task_once_in_a_new_order():
  drawn = draw(sampler(), 70)
  passes = [[name for name, _ in drawn[i : i + 7]] for i in range(0, 70, 7)]
  assert all(sorted(names) == sorted(passes[0]) and len(set(names)) == 7 for names in passes)
  assert len({tuple(names) for names in passes}) > 5
  assert [name for name, _ in draw(sampler(seed=6), 70)] != [name for name, _ in drawn]


def test_visit_counts_earlier_draws_of_the_task():
  seen = collections.Counter()
  for name, visit in draw(sampler(), 40):
    assert visit == seen[name]
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
    (sampler('sequential'), 'order'),
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
