"""Seconds of processes by activity, worked by hand."""

from jaxrl_llm.core.process_clock import ProcessClock, seconds_metrics


class Clock:
  now = 0.0

  def __call__(self):
    return self.now


def test_seconds_are_those_of_each_process_in_each_activity():
  now = Clock()
  clock = ProcessClock(now)
  now.now = 5.0  # Nothing exists yet.
  clock.exist(3)
  clock.set({'idle': 3})
  now.now = 7.0
  clock.set({'work': 2, 'idle': 1})
  now.now = 8.0
  assert clock.take() == ({'idle': 7.0, 'work': 2.0}, 9.0)
  now.now = 10.0
  clock.exist(0)
  clock.set({})
  now.now = 20.0
  assert clock.take() == ({'work': 4.0, 'idle': 2.0}, 6.0)
  assert clock.take() == ({}, 0.0)


def test_a_process_that_no_activity_claims_shows_in_the_sum():
  now = Clock()
  clock, other = ProcessClock(now), ProcessClock(now)
  clock.exist(2)
  other.exist(1)
  clock.set({'work': 1})
  other.set({'work': 1})
  now.now = 4.0
  assert seconds_metrics('servers', [clock, other]) == {
    'goodput/seconds/servers/work': 8.0,
    'goodput/wall_s/servers': 12.0,
  }
