"""The display: which lines appear, and what they say."""

import io

import pytest
from rich.console import Console

from jaxrl_llm.runtime import progress

GRPO = {
  'critic/score/mean': 0.5,
  'response_length/mean': 5.125,
  'actor/ppo_kl': 0.0003,
  'actor/pg_loss': 0.01,
  'timing_s/gen': 0.1,
  'timing_s/update_actor': 0.25,
  'timing_s/step': 2.0,
}
SFT = {'actor/sft_loss': 1.5, 'timing_s/update_actor': 0.02, 'timing_s/step': 0.5}


class Clock:
  def __init__(self):
    self.now = 100.0

  def __call__(self):
    return self.now


def shown(terminal=False, width=200):
  out, clock = io.StringIO(), Clock()
  console = Console(
    file=out, force_terminal=terminal, width=width, legacy_windows=False, color_system=None
  )
  return (
    out,
    clock,
    progress.ProgressDisplay({'sft': 4, 'grpo': 10}, console=console, interval_s=5.0, clock=clock),
  )


def test_a_progress_line_is_complete():
  out, _, display = shown()
  with display:
    display.step('grpo', 1, GRPO | {'timing_s/step': 90.0})
    display.step('grpo', 10, GRPO)
  # No loss beside a reward; no trend yet. The first step compiles, so that it tells nothing.
  first, last = out.getvalue().splitlines()
  assert first == (
    'grpo step 1/10 | reward 0.5 | len 5.12 | KL 0.0003 | gen 0.10 s train 0.25 s | ETA ?'
  )
  assert last.endswith('| ETA 0 s')


def test_supervised_steps_show_the_loss_and_guess_the_end():
  out, _, display = shown()
  display.step('sft', 2, SFT)
  display.step('sft', 4, SFT)
  # 10 steps left at 0.5 s; the next stage may differ, hence '~'.
  assert out.getvalue().splitlines()[-1] == 'sft step 4/4 | loss 1.5 | train 0.02 s | ETA ~5 s'


def test_plain_lines_at_edges_and_every_interval():
  out, clock, display = shown()
  for stage, steps in (('sft', 4), ('grpo', 10)):
    for step in range(1, steps + 1):
      display.step(stage, step, {})
      clock.now += 2.0
  # First and last of each stage; else 5 s after the line before: with 2 s a step, every third one.
  lines = [line.split(' |')[0] for line in out.getvalue().splitlines()]
  assert lines == ['sft step 1/4', 'sft step 4/4'] + [f'grpo step {s}/10' for s in (1, 4, 7, 10)]


def test_reward_trend_points_where_the_reward_goes():
  out, clock, display = shown()
  for step, reward in enumerate([0.5, 0.6, 0.55, 0.2, None], 1):
    clock.now += 10
    display.step('grpo', step, {'critic/score/mean': reward})
  # Means before: -, 0.5, 0.55, 0.55: up, equal, down; a reward that was not finite has no trend.
  fields = [line.split(' | ')[1] for line in out.getvalue().splitlines()]
  assert fields == ['reward 0.5', 'reward 0.6 ▲', 'reward 0.55', 'reward 0.2 ▼', 'reward nan']


def test_notes_are_text_and_not_markup():
  out, _, display = shown()
  display.note('[bold]x[/nothing] accuracy 0.9')
  assert out.getvalue() == '[bold]x[/nothing] accuracy 0.9\n'


def test_a_terminal_shows_one_bar_over_all_stages():
  out, _, display = shown(terminal=True, width=120)
  with display:
    for step in (3, 4):  # Steps of another stage say nothing about these.
      display.step('sft', step, SFT | {'timing_s/step': 90.0})
    display.step('grpo', 1, GRPO)
    display.step('grpo', 2, GRPO | {'timing_s/step': 0.5})
    display.step('grpo', 3, GRPO)
    display.note('evaluated')
  text = out.getvalue()
  # 7 left; the median of 0.5 s and 2 s is 1.25 s.
  assert '7/14 steps' in text and ' 50%' in text and 'ETA 9 s' in text
  assert 'grpo step 3/10 | reward 0.5' in text and 'evaluated' in text


@pytest.mark.parametrize(
  ('seconds', 'text'), [(41.4, '41 s'), (59.6, '1 m 00 s'), (185, '3 m 05 s'), (7625, '2 h 07 m')]
)
def test_durations(seconds, text):
  assert progress.duration(seconds) == text
