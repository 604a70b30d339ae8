import gc

import pytest

from jaxrl_llm.core import garbage


@pytest.fixture
def collections():
  """Generations of the collections since the fixture was set up."""
  before, generations = gc.get_threshold(), []

  def note(phase, info):
    if phase == 'start':
      generations.append(info['generation'])

  gc.callbacks.append(note)
  yield generations
  gc.callbacks.remove(note)
  gc.set_threshold(*before)
  gc.unfreeze()


def churn(count):
  """Makes Python collect younger objects about `count` times. The objects survive."""
  youngest, younger, _ = gc.get_threshold()
  return [[] for _ in range(count * (youngest + 1) * (younger + 2))]


def test_full_collections_take_place_only_where_they_are_asked_for(collections):
  garbage.freeze()
  collections.clear()
  kept = churn(30)  # Far more objects than a quarter of those that are not frozen.
  assert 1 in collections and 2 not in collections
  garbage.collect_if_due()
  assert collections.pop() == 2
  garbage.collect_if_due()
  assert 2 not in collections
  del kept


def test_present_objects_are_left_out_of_later_collections(collections):
  garbage.freeze()
  assert gc.get_freeze_count() > 1000 and len(gc.get_objects()) < 1000
