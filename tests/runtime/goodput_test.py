"""Every second belongs to one class, and a second that no class claims shows, worked by hand."""

import pytest

from jaxrl_llm.runtime import goodput
from jaxrl_llm.runtime.stopwatch import OwnSeconds, Stopwatch


class Process:
  """A process with a clock, in whose seconds an engine may sample."""

  def __init__(self):
    self.now = self.sampled = 0.0
    self.stopwatch = Stopwatch(lambda: self.now)
    self.stopwatch.sampled_s = lambda: self.sampled

  def spend(self, alone, beside=0.0):
    self.now += alone + beside
    self.sampled += beside


def step(process):
  """A step of 20 seconds, of which one is in no part."""
  timed, spend = process.stopwatch.timed, process.spend
  with timed('step'):
    with timed('gen'):
      with timed('update_weights'):
        spend(1.0)
      spend(2.0, 3.0)
    with timed('annotate'):
      with timed('load'):
        spend(0.5)
      spend(1.0, 0.25)
      with timed('adv'):
        spend(0.25)
    spend(1.0)
    with timed('train'), timed('update_actor'):
      spend(2.0)
  with timed('testing'):
    spend(1.0, 3.0)
  with timed('save_checkpoint'):
    spend(3.0)
  with timed('record'):
    spend(2.0)


def test_a_part_has_neither_the_seconds_of_those_inside_it_nor_those_of_the_engine():
  process = Process()
  step(process)
  own = process.stopwatch.take_own()
  assert own['gen'] == OwnSeconds(2.0, 3.0) and own['update_weights'] == OwnSeconds(1.0, 0.0)
  assert own['annotate'] == OwnSeconds(1.0, 0.25) and own['step'] == OwnSeconds(1.0, 0.0)
  assert process.stopwatch.take()['gen'] == 6.0 and process.stopwatch.take_own() == {}


@pytest.mark.parametrize('is_repeated', [False, True])
def test_the_trainers_seconds_by_hand(is_repeated):
  process = Process()
  step(process)
  own = process.stopwatch.take_own()
  row = goodput.trainer_seconds(own, process.now, is_repeated=is_repeated)
  assert row.pop('goodput/wall_s/trainer') == 20.0
  found = {name.removeprefix('goodput/seconds/trainer/'): value for name, value in row.items()}
  rest = {'publish': 1.0, 'evaluate': 4.0, 'commit': 3.0, 'record': 2.0}
  of_step = {'generate': 3.25, 'wait': 2.0, 'load': 0.5, 'train': 3.25, 'loop': 1.0}
  assert found == {'recompute': sum(of_step.values())} | rest if is_repeated else of_step | rest
  assert sum(found.values()) == 20.0


def test_shares_are_of_the_time_for_which_processes_existed_and_the_largest_is_first():
  rows = [
    {'goodput/seconds/trainer/train': 1.0, 'goodput/seconds/trainer/wait': 5.0, 'x': 9.0},
    {'goodput/seconds/trainer/train': 2.0, 'goodput/seconds/trainer/wait': None},
    {'goodput/seconds/trainer/commit': 0.0},
  ]
  assert goodput.shares(rows, 'trainer') == {'wait': 5 / 8, 'train': 3 / 8}
  rows[0]['goodput/wall_s/trainer'] = 10.0
  assert goodput.shares(rows, 'trainer') == {'wait': 0.5, 'train': 0.3}
  assert [*goodput.shares(rows, 'trainer')] == ['wait', 'train']
  assert goodput.shares(rows, 'servers') == {}


def test_a_resume_leaves_whole_rows_up_to_its_commit(tmp_path):
  file = goodput.file_of(tmp_path, 1)
  for step in (1, 2, 3):
    goodput.append(file, step, {'goodput/wall_s/trainer': float(step)})
  whole = file.read_bytes()
  goodput.discard_later(tmp_path, 3)
  assert file.read_bytes() == whole
  with file.open('a') as torn:
    torn.write('{"training/global_step": 1, "goo')
  goodput.append(file, 4, {'goodput/wall_s/trainer': 4.0})
  assert [row['training/global_step'] for row in goodput.rows_of_others(tmp_path)] == [1, 2, 3, 4]
  goodput.discard_later(tmp_path, 2)
  assert file.read_bytes() == b''.join(whole.splitlines(keepends=True)[:2])


def test_rows_of_other_processes_are_the_newest_of_each_step(tmp_path):
  for process in (1, 2):
    for value in (1.0, 2.0):
      goodput.append(goodput.file_of(tmp_path, process), 7, {'goodput/wall_s/trainer': value})
  with goodput.file_of(tmp_path, 2).open('a') as file:
    file.write('{"training/global_step": 8, "goo\n[]\n')
  assert [row['goodput/wall_s/trainer'] for row in goodput.rows_of_others(tmp_path)] == [2.0, 2.0]
