"""Progress display of a run: a bar over all stages on a terminal, and plain lines elsewhere.

On a terminal, every step is shown. Elsewhere, a line is printed for the first reported step and the
last step of each stage, and for a step that ends at least `interval_s` seconds after the previous
line. The content of a line depends only on the rows of metrics reported so far.
"""

from __future__ import annotations

import collections
import math
import statistics
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

PHASES = {
  'gen': 'gen',
  'reward': 'score',
  'old_log_prob': 'proximal',
  'ref': 'ref',
  'values': 'values',
  'update_critic': 'critic',
  'update_actor': 'train',
  'update_weights': 'sync',
  'save_checkpoint': 'save',
  'testing': 'eval',
}
"""Displayed names of the phases of a step, keyed by <phase> of `timing_s/<phase>`, in order."""

_QUANTITIES = [
  ('reward', ('critic/score/mean', 'critic/rewards/mean')),
  ('loss', ('actor/sft_loss', 'actor/loss')),
  ('pairs won', ('rewards/accuracies',)),
  ('len', ('response_length/mean',)),
  ('KL', ('actor/kl_loss', 'actor/ppo_kl')),
]
"""Displayed quantities, each with the metrics from which it is read. The first of these metrics
that a row contains is shown. The loss is shown only if the row has no reward.
"""

_WINDOW = 20
"""Number of recent steps from which the reward trend and the median step time are computed."""


class ProgressDisplay:
  """Displays the steps of a run.

  It is a context manager; call `step` and `note` inside its block.
  """

  def __init__(
    self,
    stages: Mapping[str, int],
    *,
    console: Console | None = None,
    interval_s: float = 5.0,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Creates the display. Nothing is shown before the block is entered.

    Args:
      stages: number of steps of each stage, keyed by name, in the order in which the stages run.
      console: console to write to. If None, it is standard output.
      interval_s: minimum number of seconds between plain lines inside a stage.
      clock: monotonic clock in seconds.
    """
    self._stages = dict(stages)
    self._console = console or Console()
    self._interval_s = interval_s
    self._clock = clock
    self._seen: set[str] = set()
    self._last_line = -math.inf
    self._rewards: dict[str, collections.deque[float]] = {}
    self._times: collections.deque[float] = collections.deque(maxlen=_WINDOW)
    self._timed_stage: str | None = None
    """Stage to which `_times` belong; None before the first step."""
    self._text = Text('starting')
    self._bar = Progress(
      TextColumn('[bold]{task.fields[stage]}'),
      BarColumn(bar_width=None),
      TaskProgressColumn(),
      TextColumn('{task.completed:.0f}/{task.total:.0f} steps  ETA {task.fields[eta]}'),
      console=self._console,
      expand=True,
    )
    self._task = self._bar.add_task('', total=sum(self._stages.values()), stage='', eta='?')
    self._live: Live | None = None
    if self._console.is_terminal:
      self._live = Live(Group(self._bar, self._text), console=self._console, refresh_per_second=4)

  def __enter__(self) -> ProgressDisplay:
    if self._live is not None:
      self._live.start()
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ):
    if self._live is not None:
      self._live.stop()

  def step(self, stage: str, step: int, row: Mapping[str, Any]) -> None:
    """Shows the progress of a stage.

    Args:
      step: number of completed steps of the stage.
      row: metrics of the last completed step.
    """
    took = row.get('timing_s/step')
    if stage != self._timed_stage:
      # The first step of a stage compiles programs, so its duration is not typical of the stage.
      self._timed_stage = stage
      self._times.clear()
    elif took is not None:
      self._times.append(took)
    eta = self._eta(stage, step)
    line = ' | '.join([f'{stage} step {step}/{self._stages[stage]}', *self._fields(stage, row)])
    if self._live is None:
      self._plain(stage, step, f'{line} | ETA {eta}')
    else:
      self._bar.update(self._task, completed=self._done(stage) + step, stage=stage, eta=eta)
      self._text.plain = line

  def note(self, text: str) -> None:
    """Prints a permanent line, such as an evaluation result, a checkpoint or a skipped update."""
    self._console.print(text, highlight=False, markup=False, soft_wrap=True)

  def _done(self, stage: str) -> int:
    """Returns the total number of steps of all stages before the given one."""
    names = list(self._stages)
    return sum(self._stages[name] for name in names[: names.index(stage)])

  def _eta(self, stage: str, step: int) -> str:
    """Returns the estimated remaining time of the run as text.

    It is the number of remaining steps times the median duration of a step of this stage, or '?'
    after the first step of a stage. The text begins with '~' if further stages follow, since their
    steps may be faster or slower.
    """
    if not self._times:
      return '?'
    remaining = sum(self._stages.values()) - self._done(stage) - step
    guess = '' if stage == list(self._stages)[-1] else '~'
    return guess + duration(remaining * statistics.median(self._times))

  def _fields(self, stage: str, row: Mapping[str, Any]) -> list[str]:
    fields = []
    for name, keys in _QUANTITIES:
      key = next((k for k in keys if k in row), None)
      if key is None or (name == 'loss' and fields):
        continue
      trend = self._trend(stage, row[key]) if name == 'reward' else ''
      fields.append(f'{name} {number(row[key])}{trend}')
    phases = [
      f'{PHASES[p]} {row[f"timing_s/{p}"]:.2f} s' for p in PHASES if row.get(f'timing_s/{p}')
    ]
    return [*fields, ' '.join(phases)] if phases else fields

  def _trend(self, stage: str, reward: float | int | None) -> str:
    """Returns an arrow if the reward differs by more than 1 % from its recent mean.

    The arrow is ▲ if the reward is above the mean, and ▼ if it is below. Otherwise returns ''.
    """
    if reward is None:
      return ''
    window = self._rewards.setdefault(stage, collections.deque(maxlen=_WINDOW))
    before = statistics.fmean(window) if window else reward
    window.append(reward)
    margin = 0.01 * abs(before)
    return ' ▲' if reward > before + margin else ' ▼' if reward < before - margin else ''

  def _plain(self, stage: str, step: int, line: str) -> None:
    now = self._clock()
    edge = stage not in self._seen or step == self._stages[stage]
    if edge or now - self._last_line >= self._interval_s:
      self._seen.add(stage)
      self._last_line = now
      self.note(line)


def number(value: float | int | None) -> str:
  """Formats a number with three significant digits. None and non-finite values become 'nan'."""
  return 'nan' if value is None or not math.isfinite(value) else f'{value:.3g}'


def duration(seconds: float | int) -> str:
  """Formats a duration, such as 41 s, 3 m 05 s or 2 h 07 m."""
  whole = round(seconds)
  if whole < 60:
    return f'{whole} s'
  if whole < 3600:
    return f'{whole // 60} m {whole % 60:02d} s'
  return f'{whole // 3600} h {whole % 3600 // 60:02d} m'
