"""Deadlines of a job: their relations, and the grace period that a launcher announces."""

import math

import pytest

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.parallel.coordination import GRACE, CoordinationConfig, grace_of


@pytest.mark.parametrize(
  ('values', 'words'),
  [
    ({'beat_s': 0.0}, 'coordination.beat_s: 0.0, wanted a number of seconds above 0'),
    ({'join_s': math.nan}, 'coordination.join_s: nan'),
    ({'leave_s': math.inf}, 'coordination.leave_s: inf'),
    ({'grace_s': -1.0}, 'coordination.grace_s: -1.0'),
    ({'heartbeat_s': 0}, 'coordination.heartbeat_s: 0'),
    ({'beat_s': 60.0, 'silence_s': 60.0}, 'beat_s: 60 s, wanted less than silence_s=60 s'),
    ({'device_s': 1800.0}, 'silence_s: 1800 s, wanted less than device_s=1800 s; lower it, or'),
  ],
)
def test_a_deadline_that_means_nothing_is_one_line(values, words):
  with pytest.raises(UserError) as raised:
    CoordinationConfig(**values)
  assert words in str(raised.value) and '\n' not in str(raised.value)


def test_the_configuration_goes_before_the_launchers_grace_period():
  assert grace_of(CoordinationConfig(), {}) is None
  assert grace_of(CoordinationConfig(), {GRACE: ''}) is None
  assert grace_of(CoordinationConfig(), {GRACE: '30'}) == 30.0
  assert grace_of(CoordinationConfig(grace_s=5.0), {GRACE: '30'}) == 5.0


@pytest.mark.parametrize('value', ['soon', '0', '-3', 'nan', '1e999', '9' * 5000])
def test_a_grace_period_that_is_no_time_is_one_line(value):
  with pytest.raises(
    UserError, match=r'^JAXRL_GRACE_S=[^\n]*wanted a number of seconds above 0[^\n]*$'
  ):
    grace_of(CoordinationConfig(), {GRACE: value})
