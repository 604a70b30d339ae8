"""The gate against its formula: started - dropped < (served + bound + 1) * groups."""

import asyncio
import itertools

import pytest

from jaxrl_llm.master.exploring.gate import Gate

SETTINGS = list(itertools.product((0, 1, 2, 5), (1, 3, 16)))


async def settle():
  for _ in range(5):
    await asyncio.sleep(0)


@pytest.mark.parametrize(('bound', 'groups'), SETTINGS)
def test_groups_in_flight_and_done_never_pass_the_formula_and_always_reach_it(bound, groups):
  """Walks versions and drops in every order; a plain model of the formula tells what must have been
  admitted.
  """

  async def main():
    gate = Gate(bound=bound, groups_per_batch=groups)
    started = dropped = served = 0

    async def explore():
      nonlocal started
      while True:
        started += await gate.admit()

    explorer = asyncio.create_task(explore())
    await settle()
    assert started == 0  # nothing is served
    for served in range(6):
      gate.advance(served)
      await settle()
      assert started - dropped == (served + bound + 1) * groups
      assert gate.capacity == 0
      for _ in range(served % 3):
        gate.drop()
        dropped += 1
        await settle()
        assert started - dropped == (served + bound + 1) * groups
    explorer.cancel()

  asyncio.run(main())


@pytest.mark.parametrize(('bound', 'groups'), SETTINGS)
def test_the_oldest_trained_token_is_at_most_bound_versions_old(bound, groups):
  """Batches take groups in the order of issue: the version at issue is at most `bound` behind the
  batch's own.
  """

  async def main():
    gate = Gate(bound=bound, groups_per_batch=groups)
    issued, oldest = [], []
    for served in range(8):
      gate.advance(served)
      issued += [served] * await gate.admit()
      batch = issued[served * groups : (served + 1) * groups]
      assert len(batch) == groups
      oldest.append(served - min(batch))
    assert max(oldest) == bound  # reached, and not passed

  asyncio.run(main())


def test_admission_waits_for_the_first_version_and_for_the_next_one():
  async def main():
    gate = Gate(bound=0, groups_per_batch=4)
    waiting = asyncio.create_task(gate.admit())
    await settle()
    assert not waiting.done()
    gate.advance(0)
    assert await waiting == 4
    waiting = asyncio.create_task(gate.admit())
    await settle()
    assert not waiting.done()
    gate.advance(0)  # the same version again admits nothing
    await settle()
    assert not waiting.done()
    gate.advance(1)
    assert await waiting == 4

  asyncio.run(main())


def test_dropped_groups_are_replaced_one_for_one():
  async def main():
    gate = Gate(bound=0, groups_per_batch=4)
    gate.advance(0)
    assert await gate.admit() == 4
    waiting = asyncio.create_task(gate.admit())
    await settle()
    gate.drop()
    assert await waiting == 1
    gate.drop()
    gate.drop()
    assert await gate.admit() == 2
    assert gate.capacity == 0

  asyncio.run(main())


def test_a_restored_gate_continues_at_its_saved_position():
  async def main():
    gate = Gate(bound=1, groups_per_batch=3)
    gate.advance(0)
    assert await gate.admit() == 6
    gate.drop()
    other = Gate(bound=1, groups_per_batch=3)
    other.restore(gate.state())
    assert other.capacity == 0  # no version is served yet
    gate.advance(1)
    other.advance(1)
    # (1 + 1 + 1) * 3 - (6 - 1) = 4
    assert await gate.admit() == await other.admit() == 4
    assert gate.state() == other.state() == {'started': 10, 'dropped': 1, 'parked': 0}

  asyncio.run(main())
