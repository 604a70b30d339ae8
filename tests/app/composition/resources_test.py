"""A store that a run opens has no sample that no batch will train on."""

import dataclasses

import pytest
from stored import issues, make_sample, states, store_group

from jaxrl_llm.app.composition.resources import recover
from jaxrl_llm.core.records.span import Span
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.index import open_store

ENDS = {'sft': 2, 'grpo': 5}


@pytest.fixture
def store(tmp_path):
  """As after a kill: at the commit at step 5, a group is trained, and an admitted one and a partial
  one are in flight; another was issued since.
  """
  written = open_store(tmp_path)
  for group in ('trained', 'admitted'):
    store_group(written, [f'grpo/{group}/0'], 3)
  written.at(3).seal(['grpo/trained/0'])
  written.at(3).trained(['grpo/trained/0'])
  written.at(4).issue(issues(['grpo/partial/0']))
  sample = make_sample('grpo/partial/0')
  (segment,) = sample.segments
  span = Span(
    tokens=sample.tokens[4:],
    logprobs=sample.behaviour_logprobs[4:],
    segments=(dataclasses.replace(segment, start=0, end=8),),
    finish=None,
  )
  written.at(4).extend({'grpo/partial/0': span})
  written.at(5).issue(issues(['grpo/later/0']))
  written.close()
  opened = open_store(tmp_path)
  yield opened
  opened.close()


UIDS = ['grpo/trained/0', 'grpo/admitted/0', 'grpo/partial/0', 'grpo/later/0']


@pytest.mark.parametrize(
  ('committed', 'ends'),
  [
    ({'stage': 'grpo', 'batches': {}}, ENDS),  # The stage was shortened to its commit.
    ({'stage': 'grpo', 'batches': None}, ENDS | {'grpo': 9}),  # A branch with fresh data.
  ],
)
def test_samples_in_flight_end_where_no_batch_takes_them(store, committed, ends):
  recover(store, {'step': 5, **committed}, ends=ends)
  assert states(store, UIDS) == ['trained', 'dropped', 'dropped', 'void']
  report = audit(store)
  assert report.ok and report.live == (), report.lines
  assert report.reasons['dropped(left behind)'] == 2
  store.recover(5)  # As a start with more steps again does.
  assert states(store, UIDS) == ['trained', 'admitted', 'partial', 'void']


def test_samples_of_batches_that_were_only_stored_are_kept(store):
  """A later stage may learn from them."""
  store.recover(5)
  store.at(4).seal(['grpo/admitted/0'])
  recover(store, {'step': 5, 'stage': 'grpo', 'batches': {}}, ends=ENDS)
  assert states(store, UIDS) == ['trained', 'admitted', 'dropped', 'void']


def test_samples_in_flight_stay_where_a_batch_may_take_them(store):
  recover(store, {'step': 5, 'stage': 'grpo', 'batches': {}}, ends=ENDS | {'grpo': 6})
  assert states(store, UIDS) == ['trained', 'admitted', 'partial', 'void']


def test_without_a_commit_nothing_stays(store):
  recover(store, None, ends=ENDS)
  assert set(states(store, UIDS)) == {'void'}
