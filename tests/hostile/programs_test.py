"""Hostile programs by the dozen: the host, its canaries and the verdicts on others stay as they
were.
"""

import contextlib
import os
import random
from concurrent.futures import ThreadPoolExecutor

import hostile
import pytest
from composing import hostile_programs, plant_canaries
from fixtures.worker_canaries import code_digests
from fuzzing import state_of

from jaxrl_llm.rewards.sandbox.isolation import NoIsolation
from jaxrl_llm.rewards.sandbox.sandbox import Case, Limits, Sandboxes

LIMITS = Limits(wall_s=15.0, cpu_s=2, memory_mib=512)
COUNTS = [
  pytest.param(40, marks=pytest.mark.full),
  pytest.param(1000, marks=pytest.mark.acceptance),
]


def opened(waiting=1):
  try:
    return Sandboxes(LIMITS, waiting=waiting)
  except NoIsolation as error:
    hostile.skip_where_this_machine_forbids(error)


def outcome_of(sandboxes, program):
  if program.tests:
    return sandboxes.run_tests(program.text, program.tests, 'f')
  return sandboxes.run_cases(
    program.text, [Case(stdin=stdin, stdout=stdout) for stdin, stdout in program.cases]
  )


def outcome_of_a_fresh(program):
  with contextlib.closing(opened()) as fresh:
    return outcome_of(fresh, program)


def verdict(outcome):
  return outcome.ended, outcome.passed, outcome.total


@pytest.mark.parametrize('count', COUNTS)
def test_no_hostile_program_touches_anything_or_changes_a_verdict(tmp_path, monkeypatch, count):
  folder, secret = tmp_path, plant_canaries(tmp_path, monkeypatch)
  programs = hostile_programs(count, seed=15, canary=str(folder / 'canary'))
  reference = hostile_programs(20, seed=16, canary=str(folder / 'canary'))
  place, code = state_of(folder), code_digests()
  with contextlib.closing(opened(waiting=2)) as used, ThreadPoolExecutor(2) as threads:
    before = [*threads.map(lambda program: verdict(outcome_of(used, program)), reference)]
    host = hostile.Host(str(folder))
    found = [*threads.map(lambda program: outcome_of(used, program), programs)]
    assert hostile.until(host.is_as_before), (host.before, host.state())
    assert (
      state_of(folder) == place and os.environ['JAXRL_CANARY'] == secret and code_digests() == code
    )
    assert secret not in repr(found)
    wrong = [
      (program.attacks, outcome) for program, outcome in zip(programs, found) if not program.right
    ]
    assert [one for one in wrong if one[1].fraction == 1.0] == []
    # Again, after all of the others, and in a sandbox of a process that has seen none.
    again = random.Random(0).sample(range(count), count // 4)
    assert [verdict(outcome_of(used, programs[i])) for i in again] == [
      verdict(found[i]) for i in again
    ]
    fresh = [*threads.map(outcome_of_a_fresh, programs)]
    differing = [
      (program, verdict(one), verdict(other))
      for program, one, other in zip(programs, found, fresh)
      if verdict(one) != verdict(other)
    ]
    assert differing == []
    assert [verdict(outcome_of(used, program)) for program in reference] == before
    assert sum(outcome.fraction == 1.0 for outcome in found) > count // 8
