"""events.jsonl: what one start writes, what the next one finds, and what a reader makes of
damage.
"""

import errno
import json
import re
import time

import pytest
from paths import ROOT

from jaxrl_llm.core.errors import RunError
from jaxrl_llm.runtime import events
from jaxrl_llm.runtime.events import EDGES, SILENT, Edge, EventLog

DOCUMENT = ROOT / 'docs' / 'reference' / 'events.md'


def lines(workdir):
  return [json.loads(line) for line in (workdir / events.FILE).read_text().splitlines()]


def test_a_reply_names_its_request_goes_the_other_way_and_says_how_long_it_took(tmp_path):
  # At 13 and 20 more than a second has passed since lines were last written: the clock is read once
  # more.
  clock = iter([10.0, 10.5, 10.75, 13.0, 13.0, 20.0, 20.0, 20.0]).__next__
  log = EventLog(tmp_path, attempt=2, step=7, clock=clock)
  first = log.request(Edge.ROLLOUT, group='g/0', count=4)
  second = log.request(Edge.STORE, group='g/1')
  log.reply(first, count=4)
  assert len(lines(tmp_path)) == 3
  log.reply(second)
  log.close()
  asked, other, answer, last = lines(tmp_path)
  assert (asked['id'], other['id'], answer['id'], answer['of'], last['of']) == (0, 1, 2, 0, 1)
  assert (asked['from'], asked['to'], answer['from'], answer['to']) == (
    'master',
    'rollout',
    'rollout',
    'master',
  )
  assert [row['kind'] for row in lines(tmp_path)] == ['request', 'request', 'reply', 'reply']
  assert answer['s'] == 2.5 and answer['t'] - asked['t'] == pytest.approx(2.5, abs=2e-6)
  assert {(row['attempt'], row['step']) for row in lines(tmp_path)} == {(2, 7)}
  assert asked['group'] == 'g/0' and asked['count'] == 4


def test_times_are_the_time_of_day_and_never_go_back(tmp_path):
  before = time.time()
  log = EventLog(tmp_path, attempt=0)
  for _ in range(100):
    log.message(Edge.TASK, group='g')
  log.close()
  times = [row['t'] for row in lines(tmp_path)]
  assert times == sorted(times) and before - 1e-3 <= times[0] <= times[-1] <= time.time() + 1e-3


def test_a_step_writes_out_what_came_before_it_under_the_old_number(tmp_path):
  log = EventLog(tmp_path, attempt=0, step=3, clock=lambda: 0.0)
  log.message(Edge.TASK, group='a')
  assert not (tmp_path / events.FILE).read_bytes()
  log.advance(4)
  assert [row['step'] for row in lines(tmp_path)] == [3]
  log.message(Edge.TASK, group='b')
  log.close()
  assert [row['step'] for row in lines(tmp_path)] == [3, 4]


@pytest.mark.parametrize('cut', [1, 5, 60])
def test_a_line_that_a_kill_tore_spoils_no_later_one(tmp_path, cut):
  log = EventLog(tmp_path, attempt=0)
  for group in 'ab':
    log.message(Edge.TASK, group=group)
  log.close()
  file = tmp_path / events.FILE
  file.write_bytes(file.read_bytes()[:-cut])
  log = EventLog(tmp_path, attempt=1, step=5)
  log.message(Edge.TASK, group='c')
  log.close()
  found = list(events.read(file))
  whole = [(e.attempt, e.step, e.id, e.fields['group']) for e in found if e is not None]
  kept = (
    [(0, 0, 0, 'a'), (0, 0, 1, 'b'), (1, 5, 0, 'c')]
    if cut == 1
    else [(0, 0, 0, 'a'), (1, 5, 0, 'c')]
  )
  assert whole == kept and found.count(None) == (cut > 1)


def test_another_start_does_not_change_a_complete_log(tmp_path):
  log = EventLog(tmp_path, attempt=0)
  log.message(Edge.TASK, group='a')
  log.close()
  before = (tmp_path / events.FILE).read_bytes()
  EventLog(tmp_path, attempt=1).close()
  assert (tmp_path / events.FILE).read_bytes() == before


@pytest.mark.parametrize(
  'line',
  [
    b'not json',
    b'[]',
    b'{"t": 1.0}',
    b'\xff\xfe',
    b'{"t":"x","attempt":0,"step":0,"edge":"task","kind":"message","id":0}',
    b'{"t":1e999,"attempt":0,"step":0,"edge":"task","kind":"message","id":0}',
    b'{"t":1.0,"attempt":0,"step":0,"edge":"tusk","kind":"message","id":0}',
    b'{"t":1.0,"attempt":0,"step":0,"edge":["task"],"kind":"message","id":0}',
    b'{"t":1.0,"attempt":0,"step":0,"edge":"store","kind":"answer","id":0}',
    b'{"t":1.0,"attempt":0,"step":0,"edge":"store","kind":"reply","id":0}',
    b'{"t":1.0,"attempt":0,"step":0,"edge":"store","kind":"request","id":1,"of":0}',
  ],
)
def test_a_line_without_an_event_reads_as_none(tmp_path, line):
  (tmp_path / 'x').write_bytes(line + b'\n\n')
  assert list(events.read(tmp_path / 'x')) == [None]


class Full:
  """A file on a disk with room for `room` more bytes."""

  def __init__(self, room):
    self.room = room

  def write(self, data):
    if not self.room:
      raise OSError(errno.ENOSPC, 'No space left on device')
    written = min(self.room, len(data))
    self.room -= written
    return written

  def close(self):
    pass


def test_a_full_disk_is_one_clear_line_and_unwritten_lines_are_dropped(tmp_path):
  log = EventLog(tmp_path, attempt=0)
  log._file.close()
  log._file = Full(room=50)
  log.message(Edge.TASK, group='a')
  with pytest.raises(
    RunError, match=r'events\.jsonl: cannot be written \(No space left on device\); free disk space'
  ):
    log.advance(1)
  log.close()


def test_a_log_that_cannot_be_opened_is_one_clear_line(tmp_path):
  with pytest.raises(
    RunError, match=r'nowhere/events\.jsonl: cannot be written \(No such file or directory\)'
  ):
    EventLog(tmp_path / 'nowhere', attempt=0)


def test_a_log_may_be_deleted_while_it_is_written(tmp_path):
  log = EventLog(tmp_path, attempt=0, max_bytes=4000)
  for number in range(60):
    log.message(Edge.TASK, group=f'g/{number}')
    log.advance(number)
    if number == 3:
      (tmp_path / events.FILE).unlink()
  log.close()
  last = [event.fields['group'] for event in events.read(tmp_path / events.FILE)]
  assert len(last) > 10 and last == [f'g/{n}' for n in range(60 - len(last), 60)]


def test_the_null_object_takes_everything():
  asked = SILENT.request(Edge.FETCH, source='rollouts')
  SILENT.reply(asked, count=3)
  SILENT.message(Edge.DROP, group='g', reason='x')
  SILENT.advance(1)
  SILENT.close()


def test_every_edge_has_ends_and_is_documented_with_them():
  assert set(EDGES) == set(Edge)
  table = re.findall(
    r'^\| `(\w+)` \| (.+?) → (.+?) \| (.+?) \| (.+?) \| (.+?) \|',
    DOCUMENT.read_text(),
    re.MULTILINE,
  )
  kinds = {True: 'request, reply', False: 'message'}
  assert [row[:5] for row in table] == [
    (edge, ends.source, ends.target, kinds[ends.answered], ends.diagram)
    for edge, ends in EDGES.items()
  ]


def test_the_log_keeps_within_its_budget_and_loses_the_oldest_messages(tmp_path):
  log = EventLog(tmp_path, attempt=0, max_bytes=4000)
  for number in range(200):
    log.message(Edge.TASK, group=f'g/{number}')
    log.advance(number)
    files = [tmp_path / events.FILE, tmp_path / events.EARLIER_FILE]
    assert sum(file.stat().st_size for file in files if file.exists()) < 4000 + 200
  log.close()
  log = EventLog(tmp_path, attempt=1, max_bytes=4000)
  log.message(Edge.TASK, group='g/200')
  log.close()
  groups = [event.fields['group'] for event in events.read(tmp_path / events.FILE)]
  assert len(groups) > 10 and groups == [f'g/{n}' for n in range(201 - len(groups), 201)]
  size = (tmp_path / events.FILE).stat().st_size
  for limit in (100, size, size + 300):
    last = [e.fields['group'] for e in events.read(tmp_path / events.FILE, limit) if e is not None]
    assert last == groups[len(groups) - len(last) :]
  assert len(last) > len((tmp_path / events.FILE).read_bytes().splitlines())
