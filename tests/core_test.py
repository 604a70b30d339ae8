"""Flat and nested names, the order of versions, exit codes, bounded waits."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.trees import flatten, unflatten
from jaxrl_llm.core.types import Version
from jaxrl_llm.core.waits import WaitExpired, bounded

NAMES = st.text('abc', min_size=1, max_size=3)
TREES = st.dictionaries(
  NAMES, st.recursive(st.integers(), lambda t: st.dictionaries(NAMES, t, min_size=1, max_size=3), max_leaves=8)
)


def test_flat_names_are_the_path():
  tree = {'embed': {'kernel': 1}, 'layers': {'0': {'mlp': {'up': {'kernel': 2}}}}, 'norm': 3}
  flat = {'embed/kernel': 1, 'layers/0/mlp/up/kernel': 2, 'norm': 3}
  assert flatten(tree) == flat
  assert list(flatten(tree)) == list(flat)
  assert unflatten(flat) == tree


@given(TREES)
def test_unflatten_inverts_flatten(tree):
  assert unflatten(flatten(tree)) == tree


@pytest.mark.parametrize('names', [('a', 'a/b'), ('a/b', 'a'), ('a/b/c', 'a/b'), ('a/b', 'a/b/c')])
def test_a_name_below_another_one_is_refused_and_loses_nothing(names):
  with pytest.raises(ValueError, match=names[1]):
    unflatten(dict.fromkeys(names, 0))


def test_versions_are_ordered_by_attempt_and_then_step():
  assert sorted([Version(1, 0), Version(0, 9), Version(0, 10)]) == [Version(0, 9), Version(0, 10), Version(1, 0)]
  assert Version(1, 7) != Version(0, 7)
  assert str(Version(1, 7)) == '1.7'


def test_exit_codes_tell_bad_input_from_a_run_that_cannot_go_on():
  assert (UserError.exit_code, RunError.exit_code, WaitExpired.exit_code) == (2, 1, 1)
  assert issubclass(WaitExpired, UserError)


def wait(awaitable, deadline_s):
  return bounded(awaitable, name='batch', owner='the loop', waits_for='the engine', deadline_s=deadline_s)


def test_a_wait_that_is_met_gives_the_value():
  assert asyncio.run(wait(asyncio.sleep(0, 'value'), 60)) == 'value'


def test_a_missed_deadline_says_who_waits_for_whom_and_shows_where_everything_stands(capfd):
  cancelled = []

  async def a_stuck_engine():
    try:
      await asyncio.Event().wait()
    except asyncio.CancelledError:
      cancelled.append(True)
      raise

  async def an_innocent_bystander():
    await asyncio.Event().wait()

  async def main():
    bystander = asyncio.create_task(an_innocent_bystander())
    try:
      await wait(a_stuck_engine(), 0.01)
    finally:
      bystander.cancel()

  with pytest.raises(WaitExpired) as caught:
    asyncio.run(main())
  message = str(caught.value)
  assert 'wait batch: the loop waited 0.01 s for the engine' in message
  assert '\n' not in message
  assert cancelled == [True]
  stacks = capfd.readouterr().err
  assert 'most recent call first' in stacks  # threads
  assert 'an_innocent_bystander' in stacks  # what is suspended in the event loop


def test_a_timeout_inside_is_not_the_deadline(capfd):
  async def fails():
    raise TimeoutError('connect timed out')

  with pytest.raises(TimeoutError, match='connect timed out'):
    asyncio.run(wait(fails(), 60))
  assert not capfd.readouterr().err


def test_any_other_error_goes_through():
  async def fails():
    raise RunError('no engine left')

  with pytest.raises(RunError, match=r'^no engine left$'):
    asyncio.run(wait(fails(), 60))


def test_cancelling_the_waiter_is_not_a_missed_deadline():
  async def main():
    waiter = asyncio.create_task(wait(asyncio.Event().wait(), 60))
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
      await waiter

  asyncio.run(main())
