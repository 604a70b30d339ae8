"""Flat and nested names, the order of versions, exit codes, bounded waits."""

import asyncio
import pickle
import signal
import subprocess
import sys

import pytest
from clocks import simulated
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.core import script
from jaxrl_llm.core.errors import RunError, UserError, first_cause
from jaxrl_llm.core.trees import flatten, unflatten
from jaxrl_llm.core.types import Version
from jaxrl_llm.core.waits import WaitExpired, bounded, ended, gathered

NAMES = st.text('abc', min_size=1, max_size=3)
TREES = st.dictionaries(
  NAMES,
  st.recursive(
    st.integers(), lambda t: st.dictionaries(NAMES, t, min_size=1, max_size=3), max_leaves=8
  ),
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
  assert sorted([Version(1, 0), Version(0, 9), Version(0, 10)]) == [
    Version(0, 9),
    Version(0, 10),
    Version(1, 0),
  ]
  assert Version(1, 7) != Version(0, 7)
  assert str(Version(1, 7)) == '1.7'


def test_exit_codes_tell_bad_input_from_a_run_that_cannot_go_on():
  assert (UserError.exit_code, RunError.exit_code, WaitExpired.exit_code) == (2, 1, 1)
  assert issubclass(WaitExpired, UserError)


@pytest.mark.parametrize(
  'quoted', ['a\r\nb: c', '\x1b[2J', 'a\ud800', '\u2028', 'x' * 100_000, '\n' * 100_000]
)
def test_an_error_is_one_short_printable_line_whatever_it_quotes(quoted):
  for kind in (UserError, RunError, WaitExpired):
    text = str(kind(f'rows.jsonl:3: got {quoted}, wanted text'))
    assert text.isprintable() and len(text) <= 4000, text[:200]
    assert text.startswith('rows.jsonl:3: got ') and text.endswith(', wanted text')
    assert str(pickle.loads(pickle.dumps(kind(text)))) == str(kind(text))
  assert str(UserError('é, 日本 and  two spaces')) == 'é, 日本 and  two spaces'


def wait(awaitable, deadline_s):
  return bounded(
    awaitable, name='batch', owner='the loop', waits_for='the engine', deadline_s=deadline_s
  )


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


def together(work, deadline_s):
  names = {'name': 'suite', 'owner': 'the evaluation', 'waits_for': 'another task'}
  return gathered(work, deadline_s=deadline_s, **names)


def test_work_of_which_some_ends_in_time_again_and_again_is_waited_for():
  async def task(number):
    await asyncio.sleep(number)
    return number

  assert simulated(together([task(3), task(1), task(2)], 1.5)) == [3, 1, 2]


def test_work_of_which_none_ends_any_more_ends_the_wait_and_is_cancelled():
  over = []

  async def task(number):
    try:
      await asyncio.sleep(number)
    finally:
      over.append(number)

  with pytest.raises(
    WaitExpired, match=r'^wait suite: the evaluation waited 2 s for another task;'
  ):
    simulated(together([task(1), task(2), task(3600)], 2.0))
  assert over == [1, 2, 3600]


def test_an_error_of_one_piece_of_work_is_its_own():
  async def fails():
    raise RunError('no engine left')

  with pytest.raises(ExceptionGroup) as caught:
    simulated(together([asyncio.sleep(3600), fails()], 60.0))
  assert isinstance(first_cause(caught.value), RunError) and not isinstance(
    first_cause(caught.value), WaitExpired
  )


def test_a_process_that_does_not_end_is_killed_and_named():
  names = {'name': 'stop', 'owner': 'the fleet', 'waits_for': 'its server to end'}
  with subprocess.Popen(['sleep', '600']) as process:
    with pytest.raises(
      WaitExpired,
      match=r'^wait stop: the fleet waited 0\.1 s for its server to end, and has killed',
    ):
      asyncio.run(ended(process, deadline_s=0.1, **names))
    assert asyncio.run(ended(process, deadline_s=60.0, **names)) == -signal.SIGKILL


STUCK = """
import asyncio, threading
from jaxrl_llm.core import script
from jaxrl_llm.core.waits import bounded

async def main():
  try:
    stuck = asyncio.to_thread(threading.Event().wait)
    await bounded(stuck, name='batch', owner='the loop', waits_for='the engine', deadline_s=0.01)
  finally:
    print('cleaned up')

script.run_async(main())
"""


def test_a_thread_that_is_stuck_does_not_hold_up_the_end_of_a_command():
  ran = subprocess.run([sys.executable, '-c', STUCK], capture_output=True, text=True, timeout=60)
  assert (ran.returncode, ran.stdout) == (1, 'cleaned up\n')
  assert ran.stderr.splitlines()[-1].startswith(
    'run stopped: wait batch: the loop waited 0.01 s for the engine;'
  )


LATER = """
import asyncio
from jaxrl_llm.core import script
from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.waits import bounded

async def main():
  try:
    raise ExceptionGroup('of a task group', [RunError('no engine left')])
  finally:
    await bounded(asyncio.Event().wait(), name='stop', owner='the run', waits_for='the scorers', \
deadline_s=0.01)

script.run_async(main())
"""


def test_a_wait_that_expires_in_the_clean_up_does_not_hide_what_led_to_it():
  ran = subprocess.run([sys.executable, '-c', LATER], capture_output=True, text=True, timeout=60)
  assert ran.returncode == 1 and ran.stderr.splitlines()[-1] == 'run stopped: no engine left'


def test_a_wait_that_expires_in_the_clean_up_does_not_hide_a_programming_error():
  faulty = LATER.replace("RunError('no engine left')", "KeyError('bug')")
  ran = subprocess.run([sys.executable, '-c', faulty], capture_output=True, text=True, timeout=60)
  assert ran.returncode == 1 and "KeyError: 'bug'" in ran.stderr
  assert ran.stderr.splitlines()[-1].startswith(
    'run stopped: wait stop: the run waited 0.01 s for the scorers;'
  )


WATCHED = """
import threading
from jaxrl_llm.core.waits import watched

names = {'name': 'join', 'owner': 'process 1', 'waits_for': 'others'}
with watched(**names, deadline_s=60.0):
  pass
with watched(**names, deadline_s=0.01):
  threading.Event().wait()
"""


GROUPED = """
import asyncio
from jaxrl_llm.core import script
from jaxrl_llm.core.errors import first_cause
from jaxrl_llm.core.waits import bounded

async def main():
  try:
    async with asyncio.TaskGroup() as tasks:
      stuck = asyncio.Event().wait()
      tasks.create_task(bounded(stuck, name='score', owner='a', waits_for='b', deadline_s=0.01))
  except BaseExceptionGroup as group:
    raise first_cause(group) from None

script.run_async(main())
"""


def test_a_wait_that_expires_in_a_group_and_is_raised_by_itself_ends_the_command():
  ran = subprocess.run([sys.executable, '-c', GROUPED], capture_output=True, text=True, timeout=60)
  assert ran.returncode == 1 and ran.stderr.splitlines()[-1].startswith(
    'run stopped: wait score: a waited'
  )


def test_what_cannot_be_interrupted_ends_the_process_at_the_deadline():
  ran = subprocess.run([sys.executable, '-c', WATCHED], capture_output=True, text=True, timeout=60)
  assert ran.returncode == 1
  assert (
    ran.stderr.splitlines()[-1]
    == 'run stopped: wait join: process 1 waited 0.01 s for others; stacks are above'
  )
  assert 'most recent call first' in ran.stderr


def test_a_command_that_ends_well_gives_its_value_and_one_that_fails_its_error():
  async def fails():
    raise UserError('no such taskset')

  assert script.run_async(asyncio.sleep(0, 'value')) == 'value'
  with pytest.raises(UserError, match='no such taskset'):
    script.run_async(fails())


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
