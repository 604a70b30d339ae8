"""Spans, steps and idle shares by hand; the trace that is made of them."""

import itertools
import json
import random

import pytest

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.runtime import events, perfetto, report, timeline
from jaxrl_llm.runtime.events import EDGES, Edge, EventLog


class Clock:
  """Seconds, set by hand."""

  def __init__(self):
    self.now = 0.0

  def __call__(self):
    return self.now


class Written:
  """A log whose times are given by hand, in seconds from the start of the attempt."""

  def __init__(self, workdir, *, attempt=0, step=0):
    self.clock = Clock()
    self.log = EventLog(workdir, attempt=attempt, step=step, clock=self.clock)

  def at(self, t):
    self.clock.now = float(t)
    return self.log

  def step(self, number, start, *, rollout, train, source='rollouts'):
    """A batch: weights at `start`, one group in flight during `rollout`, trained on during
    `train`.
    """
    weights = self.at(start).request(Edge.WEIGHTS, version=f'0.{number - 1}')
    self.at(start + 1).reply(weights)
    if source == 'rollouts':
      group = self.at(rollout[0]).request(Edge.ROLLOUT, group=f'g/{number}', count=2)
      self.at(rollout[1]).reply(group)
    self.log.reply(self.log.request(Edge.FETCH, source=source), count=2)
    data = self.at(train[0]).request(Edge.TRAINING_DATA, batch=number, count=2)
    self.at(train[1]).reply(data)
    self.log.advance(number)


@pytest.fixture
def two_steps(tmp_path):
  """Step 1 from 0 to 10: rollout 2 to 5, training 6 to 10. Step 2 from 10 to 20: commit 10 to 12,
  rollout 12 to 17, training 18 to 20. A commit to 23 follows.
  """
  written = Written(tmp_path)
  written.step(1, 0, rollout=(2, 5), train=(6, 10))
  commit = written.log.request(Edge.COMMIT, commit=1)
  written.at(12).reply(commit)
  written.step(2, 12, rollout=(12, 17), train=(18, 20))
  commit = written.log.request(Edge.COMMIT, commit=2)
  written.at(23).reply(commit)
  written.log.close()
  return tmp_path


def test_idle_shares_of_two_steps_by_hand(two_steps):
  found = timeline.load(two_steps / events.FILE)
  first, second = found.steps
  assert (first.number, second.number) == (1, 2)
  assert first.end - first.start == pytest.approx(10) and second.start == first.end
  # Step 1: trainer busy 4 of 10 s, rollout 3. Step 2: trainer 2, beside a commit, rollout 5.
  assert first.idle == {'trainer': pytest.approx(0.6), 'rollout': pytest.approx(0.7)}
  assert second.idle == {'trainer': pytest.approx(0.8), 'rollout': pytest.approx(0.5)}
  assert found.unreadable == 0 and not any(span.unanswered for span in found.spans)


def test_a_batch_of_static_rows_has_no_rollout_idle_share(tmp_path):
  written = Written(tmp_path)
  written.step(1, 0, rollout=(), train=(5, 10), source='static')
  written.log.close()
  (step,) = timeline.load(tmp_path / events.FILE).steps
  assert step.idle == {'trainer': pytest.approx(0.5)}


def test_steps_that_a_crash_undid_are_those_of_the_attempt_that_made_them_again(tmp_path):
  written = Written(tmp_path)
  for number in (1, 2, 3):
    written.step(
      number,
      10 * number,
      rollout=(10 * number + 1, 10 * number + 2),
      train=(10 * number + 3, 10 * number + 9),
    )
  written.at(40).request(Edge.ROLLOUT, group='lost', count=2)
  written.log.close()
  written = Written(tmp_path, attempt=1, step=1)
  written.step(2, 0, rollout=(1, 2), train=(3, 4))
  written.log.close()
  found = timeline.load(tmp_path / events.FILE)
  assert [(step.number, step.attempt) for step in found.steps] == [(1, 0), (2, 1)]
  (lost,) = [span for span in found.spans if span.unanswered]
  assert lost.fields['group'] == 'lost' and lost.attempt == 0


def test_shares_and_rows_against_a_naive_count():
  draw = random.Random(0)
  for _ in range(50):
    spans = sorted(
      (draw.randrange(100), draw.randrange(1, 30)) for _ in range(draw.randrange(1, 25))
    )
    intervals = [(float(start), float(start + length)) for start, length in spans]
    start, end = sorted(draw.sample(range(140), 2))
    covered = sum(any(a <= second < b for a, b in intervals) for second in range(start, end))
    share = timeline._share(timeline._union(intervals), float(start), float(end))
    assert share == pytest.approx(covered / (end - start))
    made = [timeline.Span(Edge.ROLLOUT, 0, 0, i, i, a, b, {}) for i, (a, b) in enumerate(intervals)]
    rows = timeline.rows(made)
    for (one, row), (other, same) in itertools.combinations(zip(made, rows), 2):
      assert row != same or other.start >= one.end
    most = max(sum(a <= second < b for a, b in intervals) for second in range(140))
    assert max(rows) + 1 == most  # no more rows than it takes


def test_the_report_shows_the_last_steps_and_later_spans(two_steps, monkeypatch):
  data = timeline.payload(timeline.load(two_steps / events.FILE))
  assert [step['n'] for step in data['steps']] == [1, 2] and data['end'] == pytest.approx(23)
  assert (
    data['lanes'] == ['trainer', 'rollout', 'replay buffer', 'weights', 'checkpoints']
    and data['hidden'] == 0
  )
  assert json.loads(json.dumps(data, allow_nan=False)) == data
  monkeypatch.setattr(timeline, 'MAX_STEPS', 1)
  data = timeline.payload(timeline.load(two_steps / events.FILE))
  assert [(step['n'], step['t']) for step in data['steps']] == [(2, 0.0)]
  monkeypatch.setattr(timeline, 'MAX_STEPS', 12)
  # of step 2 alone there are 7, with those that end at its start
  monkeypatch.setattr(timeline, 'MAX_SPANS', 7)
  data = timeline.payload(timeline.load(two_steps / events.FILE))
  assert [step['n'] for step in data['steps']] == [2] and (len(data['spans']), data['hidden']) == (
    7,
    0,
  )
  monkeypatch.setattr(timeline, 'MAX_SPANS', 4)
  data = timeline.payload(timeline.load(two_steps / events.FILE))
  assert (len(data['spans']), data['hidden']) == (4, 3)


@pytest.mark.parametrize('earlier', [False, True])
def test_a_log_that_begins_within_a_step_shows_the_steps_after_it(two_steps, earlier):
  """The second line answers a request that is missing, whether messages precede it or not."""
  path = two_steps / events.FILE
  whole = timeline.load(path)
  lines = path.read_bytes().splitlines(keepends=True)
  (two_steps / events.EARLIER_FILE).write_bytes(b''.join(lines[1:6] if earlier else []))
  path.write_bytes(b''.join(lines[6:] if earlier else lines[1:]))
  found = timeline.load(path)
  assert found.cut and not whole.cut
  assert found.steps == whole.steps[1:] and found.unreadable == 0
  size = sum(len(line) for line in lines[1:])
  assert timeline.load(path, size) == found


@pytest.mark.parametrize('gone', [range(3, 5), range(5, 12)])
def test_messages_that_are_missing_in_the_middle_are_counted_in_one_line(two_steps, gone):
  """An unreadable line in the gap stands for one of them."""
  file = two_steps / events.FILE
  lines = file.read_text().splitlines()
  whole = timeline.load(file)
  kept = [*lines[: gone.start], '{"half', *lines[gone.stop + 1 :]]
  file.write_text('\n'.join(kept) + '\n')
  found = timeline.load(file)
  assert (whole.missing, whole.gap) == (0, '')
  assert (found.missing, found.unreadable) == (len(gone), 1)
  assert found.gap == f'attempt 0, after message {gone.start - 1}'
  (two_steps / 'metrics.jsonl').write_text('{"stage": "grpo", "training/global_step": 1}\n')
  warnings = report.payload(two_steps)['warnings']
  assert warnings[-1].startswith(f'{len(gone)} messages are missing in events.jsonl, first in ')


def test_a_run_without_events_or_steps_has_no_timeline(tmp_path):
  assert timeline.payload(timeline.load(tmp_path / events.FILE)) is None
  (tmp_path / events.FILE).write_text('{"half')
  found = timeline.load(tmp_path / events.FILE)
  assert timeline.payload(found) is None and found.unreadable == 1


def assert_valid_trace(rows):
  """What a viewer asks for: spans that go forward, arrows from span to span, names for all
  processes and threads.
  """
  named = {'process_name': set(), 'thread_name': set()}
  for row in rows:
    if row['ph'] == 'M':
      named[row['name']].add((row['pid'], row['tid']))
  assert {row['ph'] for row in rows} <= set('MXstf')
  spans, arrows = {}, {}
  for row in rows:
    assert (row['pid'], row['tid']) in named['process_name'] & named['thread_name']
    if row['ph'] == 'X':
      assert row['ts'] >= 0 and row['dur'] >= 0
      spans.setdefault((row['pid'], row['tid']), []).append(
        (row['ts'], row['ts'] + row['dur'], row['name'])
      )
    elif row['ph'] != 'M':
      arrows.setdefault((row['pid'], row['id']), []).append(row)
  for parts in arrows.values():
    assert [part['ph'] for part in parts] == ['s', 't', 'f'], parts
    start, middle, end = parts
    assert start['ts'] == middle['ts'] <= end['ts'] and len({part['name'] for part in parts}) == 1
    for part in parts:
      around = [name for a, b, name in spans[part['pid'], part['tid']] if a <= part['ts'] <= b]
      assert part['name'] in around
  return arrows


def test_the_trace_binds_each_request_to_its_reply(two_steps):
  path = perfetto.write(two_steps)
  assert path == two_steps / 'perfetto.json'
  arrows = assert_valid_trace(json.loads(path.read_text())['traceEvents'])
  found = timeline.load(two_steps / events.FILE)
  assert len(arrows) == len([span for span in found.spans if EDGES[span.edge].answered]) == 10


def test_the_trace_keeps_overlapping_groups_attempts_and_what_was_never_answered_apart(tmp_path):
  written = Written(tmp_path)
  groups = [written.at(i).request(Edge.ROLLOUT, group=f'g/{i}', count=2) for i in range(3)]
  written.at(5).message(Edge.DROP, group='g/2', reason='given up')
  for group in groups[:2]:
    written.at(6).reply(group)
  written.log.close()
  again = Written(tmp_path, attempt=1)
  again.log.reply(again.log.request(Edge.COMMIT, commit=0))
  again.log.close()
  rows = json.loads(perfetto.write(tmp_path, tmp_path / 'trace.json').read_text())['traceEvents']
  assert len(assert_valid_trace(rows)) == 3
  names = {(row['pid'], row['args']['name']) for row in rows if row['ph'] == 'M'}
  assert names == {
    (1, 'attempt 0'),
    *((1, name) for name in ('master: messages', 'rollout', 'rollout 2', 'rollout 3')),
    (2, 'attempt 1'),
    *((2, name) for name in ('trainer: messages', 'checkpoints')),
  }
  (lost,) = {
    row['args']['group'] for row in rows if row['ph'] == 'X' and row['args'].get('unanswered')
  }
  assert lost == 'g/2'


def test_a_directory_without_events_and_a_file_that_cannot_be_written_are_one_line(
  two_steps, tmp_path
):
  with pytest.raises(UserError, match=r'has no events\.jsonl'):
    perfetto.write(tmp_path / 'nowhere')
  with pytest.raises(UserError, match='--perfetto='):
    perfetto.write(two_steps, tmp_path / 'nowhere' / 'x.json')
