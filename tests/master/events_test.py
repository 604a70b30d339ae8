"""What the explorer says of its groups: every request is answered, or its group is dropped with a
reason.
"""

import asyncio
import collections
import contextlib
import sqlite3

import exploring
import pytest

from jaxrl_llm.master.exploring.selection import SelectionConfig
from jaxrl_llm.replay.tables import INDEX
from jaxrl_llm.runtime import events
from jaxrl_llm.runtime.events import EDGES, Edge, EventLog


@pytest.fixture
def explored(tmp_path):
  """Two batches of two groups of two; of the third task nothing can be learned, of the last ones
  samples never end.
  """
  tasks = exploring.make_tasks(24)
  log = EventLog(tmp_path, attempt=0)
  store = exploring.new_store(tmp_path / 'replay')
  exploration = exploring.Exploration(
    exploring.make_tokenizer(tmp_path / 'tokenizer'),
    store,
    lambda attempt: 0.5 if attempt.task == tasks[2] else float(attempt.uid.endswith('/1')),
    tasks=tasks,
    bound=1,
    selection=SelectionConfig(kind='mixed'),
    events=log,
  )
  held = [f'grpo/{task.uid}/0' for task in tasks[5:]]
  exploration.engine.hold = lambda request: request.uid in held
  asyncio.run(asyncio.wait_for(exploration.batches(2), 30))
  log.close()
  store.close()
  with contextlib.closing(sqlite3.connect(store.directory / INDEX)) as index:
    issued = {group for (group,) in index.execute('SELECT group_id FROM samples')}
  found = list(events.read(tmp_path / events.FILE))
  assert None not in found
  return tasks, found, issued


def test_every_group_is_asked_for_scored_and_stored_once_or_dropped(explored):
  tasks, found, issued = explored

  def name(i):
    return f'grpo/{tasks[i].uid}/0'

  asked = collections.defaultdict(dict)
  answered = {event.of: event for event in found if event.kind == 'reply'}
  for event in found:
    if event.kind == 'request':
      assert event.edge not in asked[event.fields['group']]
      asked[event.fields['group']][event.edge] = answered.get(event.id)
  for i in (0, 1, 2, 3, 4):
    replies = asked[name(i)]
    assert list(replies) == [Edge.ROLLOUT, Edge.EVAL, Edge.STORE]
    assert [replies[edge].fields['count'] for edge in (Edge.ROLLOUT, Edge.EVAL)] == [2, 2]
    assert replies[Edge.STORE].fields['admitted'] == (0 if i == 2 else 2)
    assert replies[Edge.ROLLOUT].t <= replies[Edge.EVAL].t <= replies[Edge.STORE].t
  drops = {
    event.fields['group']: event.fields['reason'] for event in found if event.edge == Edge.DROP
  }
  given_up = {group for group, reason in drops.items() if reason == 'given up'}
  assert drops.pop(name(2)) == 'nothing to learn from' and given_up == set(drops)
  assert all(reply is not None for replies in asked.values() for reply in replies.values())
  ended_early = {
    group
    for group, replies in asked.items()
    if any('given_up' in r.fields for r in replies.values())
  }
  assert ended_early and ended_early <= given_up
  # A task is drawn for each group, before anything is asked for it.
  drawn = [event.fields['group'] for event in found if event.edge == Edge.TASK]
  assert len(drawn) == len(set(drawn)) and set(asked) <= set(drawn) == issued
  first = {group: min(e.id for e in found if e.fields.get('group') == group) for group in drawn}
  assert {event.id for event in found if event.edge == Edge.TASK} == set(first.values())


def test_each_reply_names_one_earlier_request_of_its_edge(explored):
  _, found, _ = explored
  requests = {event.id: event for event in found if event.kind == 'request'}
  replies = [event for event in found if event.kind == 'reply']
  assert len({reply.of for reply in replies}) == len(replies) > 10
  for reply in replies:
    request = requests[reply.of]
    assert (
      request.edge == reply.edge
      and request.id < reply.id
      and request.t <= reply.t
      and EDGES[reply.edge].answered
    )
