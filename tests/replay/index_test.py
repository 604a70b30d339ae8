import concurrent.futures
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading

import pytest
from paths import SUPPORT
from stored import issues, make_sample, score_of, states, store_group, tables

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.records.sample import encode
from jaxrl_llm.core.records.score import Status
from jaxrl_llm.replay import segments
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.index import open_store
from jaxrl_llm.replay.tables import Issue


def test_a_step_from_issue_to_trained(tmp_path):
  store = open_store(tmp_path)
  uids = ['g/0', 'g/1', 'g/2', 'g/3']
  store.at(0).issue(issues(uids))
  assert store.at(0).append([make_sample(uid) for uid in uids[:3]]) == uids[:3]
  store.at(0).score([score_of('g/0'), score_of('g/1', None), score_of('g/0', 0.75)])
  store.at(0).admit(['g/0', 'g/2'])
  store.at(0).drop(['g/1'], 'unscorable')
  store.at(0).record_plan({'uids': ['g/2', 'g/0']})
  refs = store.at(0).seal(['g/2', 'g/0'])
  assert refs == {
    'g/2': ('00000000-001-000.arrayrecord', 0),
    'g/0': ('00000000-001-000.arrayrecord', 1),
  }
  store.at(0).trained(['g/0', 'g/2'])
  assert states(store, uids) == ['trained', 'dropped', 'trained', 'issued']
  assert [s.value for s in store.scores(['g/0'])['g/0']] == [0.75]
  (unscorable,) = store.scores(['g/1'])['g/1']
  assert unscorable == score_of('g/1', None)
  assert unscorable.status is Status.OK
  for uid, sample in zip(uids[:3], store.read(uids[:3])):
    assert encode(sample) == encode(make_sample(uid))
  assert [e.uid for e in store.live()] == ['g/3']
  assert store.plans() == {0: {'uids': ['g/2', 'g/0']}}
  # 4 issued = 2 trained + 1 dropped + 1 live
  assert store.counts() == {
    'issued': 1, 'partial': 0, 'stored': 0, 'awaiting': 0, 'admitted': 0, 'trained': 2,
    'dropped': 1, 'expired': 0, 'void': 0, 'duplicates': 0
  }  # fmt: skip
  report = audit(store)
  assert report.problems == ('g/3 (attempt 1): is issued, but its group g has ended without it',)
  assert report.live == ('g/3',)
  assert report.reasons == {'dropped(unscorable)': 1}


def test_second_and_late_results_are_counted_not_accepted(tmp_path):
  store = open_store(tmp_path)
  store.at(0).issue(issues(['g/0', 'g/1', 'g/2']))
  first, other = make_sample('g/0'), make_sample('g/0', length=7)
  assert store.at(0).append([first, other, make_sample('g/1')]) == ['g/0', 'g/1']
  assert store.at(1).append([other]) == []
  store.at(1).drop(['g/2'], 'timeout')
  assert store.at(2).append([make_sample('g/2')]) == []
  assert encode(store.read(['g/0'])[0]) == encode(first)
  assert store.counts()['duplicates'] == 3
  assert audit(store).ok
  assert audit(store).duplicates == 3


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (lambda s: s.at(0).admit(['g/0']), 'is issued, cannot become admitted'),
    (lambda s: s.at(0).admit(['g/9']), 'unknown uid g/9'),
    (lambda s: s.at(0).admit(['g/1', 'g/1']), 'given twice'),
    (lambda s: s.at(0).admit(['g/1']), 'became stored at step 1, cannot become admitted at 0'),
    (lambda s: s.at(0).issue(issues(['g/0'])), 'already issued'),
    (lambda s: s.at(1).score([score_of('g/1', float('nan'))]), 'gave nan'),
    (lambda s: s.at(1).score([score_of('g/0')]), 'is not finished yet'),
    (lambda s: s.at(1).seal(['g/1']), 'wanted admitted or trained'),
    (lambda s: s.at(2).trained(['g/2']), 'not sealed'),
    (lambda s: s.at(1).drop(['g/0'], ''), 'no reason given'),
    (lambda s: s.recover(0), 'already issued samples'),
    (lambda s: s.at(1).append([make_sample('other/0')]), 'unknown uid other/0'),
  ],
)
def test_a_refused_change_leaves_nothing(tmp_path, change, message):
  store = open_store(tmp_path)
  store.at(0).issue(issues(['g/0', 'g/1', 'g/2']))
  store.at(1).append([make_sample('g/1'), make_sample('g/2')])
  store.at(1).admit(['g/2'])
  before = list(store._db.iterdump())
  with pytest.raises(ValueError, match=message):
    change(store)
  assert list(store._db.iterdump()) == before


def test_a_joined_transaction_is_all_or_nothing(tmp_path):
  store = open_store(tmp_path)
  store.at(0).issue(issues(['g/0', 'g/1']))
  with pytest.raises(ValueError, match='is issued'), store.transaction():
    store.at(0).append([make_sample('g/0')])
    store.at(0).admit(['g/0'])
    store.at(0).admit(['g/1'])
  assert states(store, ['g/0', 'g/1']) == ['issued', 'issued']
  with store.transaction():
    store.at(0).append([make_sample('g/0')])
    store.at(0).admit(['g/0'])
  assert states(store, ['g/0', 'g/1']) == ['admitted', 'issued']


def test_max_uses_bounds_training(tmp_path):
  store = open_store(tmp_path, max_uses=2)
  store_group(store, ['g/0'], 0)
  ref = store.at(0).seal(['g/0'])
  store.at(0).trained(['g/0'])
  assert store.at(1).seal(['g/0']) == ref
  store.at(1).trained(['g/0'])
  with pytest.raises(ValueError, match='already used 2 times, max_uses is 2'):
    store.at(2).trained(['g/0'])
  assert audit(store).ok


def test_undo_hand_worked(tmp_path):
  """Commit 2 holds what is stamped 0 and 1.

  trained0  issued 0, stored 0, admitted 0, sealed 1, trained 1  stays trained
  sealed    issued 0, stored 1, admitted 1, sealed 2, trained 2  again admitted, in the open segment
  stored    issued 1, stored 1, admitted 2                       stored again
  dropped   issued 1, stored 1, dropped 3                        stored again, with its bytes
  gone      issued 0, dropped 1                                  stays dropped
  late      issued 1, stored 2                                   void: its bytes are past the commit
  flying    issued 1                                             void
  new       issued 2, stored 2, admitted 2, sealed 3, trained 3  void, its segment removed
  """
  store = open_store(tmp_path)
  name = ['trained0', 'sealed', 'stored', 'dropped', 'gone', 'late', 'flying', 'new']
  sample = {n: make_sample(n) for n in name}
  store.at(0).issue(issues(['trained0', 'sealed', 'gone']))
  store.at(0).append([sample['trained0']])
  store.at(0).admit(['trained0'])
  store.at(1).issue(issues(['stored', 'dropped', 'late', 'flying']))
  store.at(1).append([sample['sealed'], sample['stored'], sample['dropped']])
  store.at(1).append([sample['stored']])
  store.at(1).score([score_of('sealed', 0.25)])
  store.at(1).derive([('sealed', 'shape', {'reward': [0.25, 0.5]})])
  store.at(1).admit(['sealed'])
  store.at(1).drop(['gone'], 'timeout')
  store.at(1).record_plan({'n': 1})
  kept = store.at(1).seal(['trained0'])
  store.at(1).trained(['trained0'])
  # the commit named 2 is written here
  store.at(2).issue(issues(['new']))
  store.at(2).append([sample['new'], sample['late'], sample['stored']])
  store.at(2).admit(['stored', 'new'])
  store.at(2).score([score_of('sealed', 1.0), score_of('late')])
  store.at(2).derive([('sealed', 'shape', {'reward': [1.0, 2.0]})])
  store.at(2).record_plan({'n': 2})
  store.at(2).seal(['sealed'])
  store.at(2).trained(['sealed'])
  store.at(3).drop(['dropped'], 'filtered')
  assert store.prune(2) == 0
  store.at(3).seal(['new'])
  store.at(3).trained(['new'])
  assert len(list((tmp_path / 'segments').iterdir())) == 3
  (tmp_path / 'segments' / '00000003-001-001.arrayrecord.tmp').write_bytes(b'half')
  store.close()

  store = open_store(tmp_path)
  assert store.attempt == 2
  with pytest.raises(ValueError, match='call recover first'):
    store.at(2).issue(issues(['x']))
  # transitions: late stored; new stored, admitted, trained; stored admitted; sealed trained;
  # dropped dropped
  assert store.recover(2) == {
    'restored': 1, 'transitions': 7, 'scores': 2, 'derived': 1, 'plans': 1, 'duplicates': 1,
    'open_segment': 1, 'partials': 0, 'void': 3, 'kept': 0, 'files': 3,
  }  # fmt: skip
  wanted = ['trained', 'admitted', 'stored', 'stored', 'dropped', 'void', 'void', 'void']
  assert states(store, name) == wanted
  assert [s.value for s in store.scores(['sealed'])['sealed']] == [0.25]
  assert store.derived(['late', 'sealed'], 'shape') == {'sealed': {'reward': [0.25, 0.5]}}
  for uid, found in zip(name[:4], store.read(name[:4])):
    assert encode(found) == encode(sample[uid])
  assert store.plans() == {1: {'n': 1}}
  assert store.at(2).seal(['trained0']) == kept
  report = audit(store)
  assert report.ok, report.lines
  assert report.issued == 8
  assert report.reasons == {'void(crash)': 3, 'dropped(timeout)': 1}
  assert report.duplicates == 1
  dump = {name: rows for name, rows in tables(tmp_path).items() if name != 'attempts'}
  store.close()

  # A crash before anything happened, and the same commit again: the same store.
  store = open_store(tmp_path)
  assert store.recover(2)['void'] == 0
  assert {name: rows for name, rows in tables(tmp_path).items() if name != 'attempts'} == dump

  # The lost ones are issued again under the new attempt; what is not void is not.
  store.at(2).issue(issues(['late', 'flying', 'new']))
  with pytest.raises(ValueError, match='already trained'):
    store.at(2).issue(issues(['trained0']))
  store.at(2).append([sample['new']])
  store.at(2).admit(['new', 'dropped'])
  assert store.at(2).seal(['new', 'sealed', 'dropped'])['sealed'] == (
    '00000002-003-000.arrayrecord',
    1,
  )
  store.at(2).trained(['new', 'sealed', 'dropped'])
  assert audit(store).ok
  assert audit(store).issued == 11


def test_the_batches_that_crashes_undid_are_known(tmp_path):
  """The first attempt completes three batches and commits one; the second redoes one of them."""
  store = open_store(tmp_path)
  assert store.undone_until() == 0
  for step in range(3):
    store.at(step).record_plan([])
  for _ in range(2):
    store.close()
    store = open_store(tmp_path)
    store.recover(1)
    assert store.undone_until() == 3
    store.at(1).record_plan([])
  store.close()


def test_prune_forgets_bytes_only_of_what_the_commit_ended(tmp_path):
  store = open_store(tmp_path)
  store_group(store, ['a', 'b', 'c'], 0)
  store.at(0).drop(['a'], 'filtered')
  store.at(1).expire(['b'])
  assert store.prune(1) == 1
  with pytest.raises(ValueError, match='a: the store has no bytes of this sample'):
    store.read(['a'])
  assert [s.uid for s in store.read(['b', 'c'])] == ['b', 'c']
  assert audit(store).ok


def test_visits_are_those_of_the_named_stages_that_no_crash_made_void(tmp_path):
  def row(stage, task, visit):
    return Issue(
      uid=f'{stage}/{task}/{visit}/0', group_id=f'{stage}/{task}/{visit}', task_id=task, visit=visit
    )

  store = open_store(tmp_path)
  store.at(0).issue(
    [row('one', 's:a', 0), row('one', 's:a', 1), row('one', 's:b', 0), row('ones', 's:b', 7)]
  )
  store.at(0).drop(['one/s:a/0/0', 'one/s:a/1/0', 'one/s:b/0/0'], 'timeout')
  store.at(1).issue([row('one', 's:a', 2)])
  assert store.visits(['one']) == {'s:a': 3, 's:b': 1} and store.visits([]) == {}
  store.close()
  store = open_store(tmp_path)
  store.recover(1)
  assert store.visits(['one']) == {'s:a': 2, 's:b': 1}
  assert store.visits(['one', 'ones'])['s:b'] == 1  # The other row was in flight, and is void.


def test_attempts_never_repeat(tmp_path):
  store = open_store(tmp_path, attempt=4)
  store.close()
  with pytest.raises(UserError, match='attempt 4 was given, but 4 has already run; wanted 5'):
    open_store(tmp_path, attempt=4)
  with pytest.raises(UserError, match='max_uses 1, wanted 3'):
    open_store(tmp_path, max_uses=3)
  assert open_store(tmp_path).attempt == 5


def test_a_file_that_is_no_store_is_one_clear_line(tmp_path):
  (tmp_path / 'index.sqlite').write_bytes(b'not a database ' * 100)
  for open_it in (open_store, audit):
    with pytest.raises(UserError, match=r'index.sqlite: file is not a database') as caught:
      open_it(tmp_path)
    assert '\n' not in str(caught.value)
  with pytest.raises(UserError, match='no such file'):
    audit(tmp_path / 'nothing')


def test_meta_and_flush_with_normal_synchronous(tmp_path):
  store = open_store(tmp_path, synchronous='normal')
  assert store.meta('mark') is None
  store.set_meta('mark', {'step': 3})
  store.flush()
  assert store._db.execute('PRAGMA synchronous').fetchone() == (1,)
  assert store.meta('mark') == {'step': 3}
  assert store.meta('flushed') == {'attempt': 1}


def test_threads_share_one_store(tmp_path):
  store = open_store(tmp_path, synchronous='normal')

  def work(name):
    for n in range(10):
      store_group(store, [f'{name}{n}/{i}' for i in range(4)], n)
      store.at(n).seal([f'{name}{n}/{i}' for i in range(4)])

  threads = [threading.Thread(target=work, args=(name,)) for name in 'abcd']
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  report = audit(store)
  assert report.ok, report.lines
  assert report.states['admitted'] == 160


def fill_until_full(directory: str) -> None:
  """Runs in a process whose files may not grow beyond a limit, which is how a full disk looks to a
  writer.
  """
  resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, 2**19))
  signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
  store = open_store(directory)
  step = 0
  while True:
    try:
      store_group(store, [f'{step}/{i}' for i in range(32)], step)
    except RunError as error:
      assert 'free disk space' in str(error) and '\n' not in str(error), error
      os._exit(70)
    step += 1


def test_full_disk_is_one_line_and_loses_nothing(tmp_path):
  child = multiprocessing.get_context('spawn').Process(
    target=fill_until_full, args=(str(tmp_path),)
  )
  child.start()
  child.join(60)
  assert child.exitcode == 70
  store = open_store(tmp_path)
  store.recover(1000)
  report = audit(store)
  assert report.ok, report.lines
  assert report.issued >= 32
  assert (
    report.issued == report.states['admitted'] + report.states['stored'] + report.states['void']
  )


def test_a_reader_sees_whole_transactions_while_a_process_writes(tmp_path):
  script = (
    'import sys; sys.path[:0] = [sys.argv[2]]\n'
    'from jaxrl_llm.replay.index import open_store\n'
    'from stored import store_group\n'
    'store = open_store(sys.argv[1])\n'
    'store.recover(0)\n'
    'for step in range(40):\n'
    '  uids = [f"{step}/{i}" for i in range(8)]\n'
    '  store_group(store, uids, step); store.at(step).seal(uids); store.at(step).trained(uids)\n'
  )
  open_store(tmp_path).close()
  writer = subprocess.Popen([sys.executable, '-c', script, str(tmp_path), str(SUPPORT)])
  seen = []
  try:
    while writer.poll() is None:
      report = audit(tmp_path)
      assert report.ok, report.lines
      assert report.issued % 8 == 0
      seen.append(report.issued)
  finally:
    writer.wait(60)
  assert writer.returncode == 0 and seen == sorted(seen)
  assert audit(tmp_path).states['trained'] == 320


class RottenWriter(segments.ArrayRecordWriter):
  """A disk that returns other bytes than were written."""

  def __init__(self, path, options):
    super().__init__(path, options)
    self.path = path

  def close(self):
    super().close()
    with open(self.path, 'r+b') as file:
      content = file.read()
      used = [place for place, byte in enumerate(content) if byte]
      place = used[len(used) // 3]
      file.seek(place)
      file.write(bytes([content[place] ^ 0xFF]))


def test_bytes_leave_sqlite_only_when_the_segment_reads_back(tmp_path, monkeypatch):
  store = open_store(tmp_path)
  store_group(store, ['g/0', 'g/1'], 0)
  with monkeypatch.context() as patch:
    patch.setattr(segments, 'ArrayRecordWriter', RottenWriter)
    with pytest.raises(RunError, match='2 rows could not be written'):
      store.at(0).seal(['g/0', 'g/1'])
  assert list((tmp_path / 'segments').iterdir()) == []
  assert audit(store).ok
  assert encode(store.read(['g/1'])[0]) == encode(make_sample('g/1'))
  store.at(0).seal(['g/0', 'g/1'])
  assert audit(store).ok


def while_sealing(store, uids, monkeypatch, act):
  """Seals samples in a thread, and calls `act` while the segment file is being written. Returns the
  places of the samples.
  """
  writing, go_on, write = threading.Event(), threading.Event(), segments.write_segment

  def write_late(*args):
    writing.set()
    assert go_on.wait(60), 'the other thread waits for the seal'
    return write(*args)

  monkeypatch.setattr(segments, 'write_segment', write_late)
  with concurrent.futures.ThreadPoolExecutor() as threads:
    sealing = threads.submit(store.at(0).seal, uids)
    assert writing.wait(60)
    try:
      act()
    finally:
      go_on.set()
    return sealing.result()


def test_groups_are_admitted_while_others_are_sealed(tmp_path, monkeypatch):
  store = open_store(tmp_path)
  store_group(store, ['g/0', 'g/1'], 0)

  def admit():
    store_group(store, ['h/0'], 0)
    assert states(store, ['h/0']) == ['admitted']

  refs = while_sealing(store, ['g/1', 'g/0'], monkeypatch, admit)
  assert [sample.uid for sample in store.reader.read([*refs.values()])] == ['g/1', 'g/0']
  assert [sample.uid for sample in store.read(['h/0', 'g/0'])] == ['h/0', 'g/0']
  store.close()
  assert not audit(tmp_path).problems


def test_what_was_dropped_while_it_was_sealed_stays_dropped(tmp_path, monkeypatch):
  store = open_store(tmp_path)
  store_group(store, ['g/0', 'g/1'], 0)
  with pytest.raises(ValueError, match='g/0: it is dropped'):
    while_sealing(store, ['g/0', 'g/1'], monkeypatch, lambda: store.at(0).drop(['g/0'], 'given up'))
  monkeypatch.undo()
  assert not store.at(0).seal([]) and not store.sealed()
  ((name, row),) = store.at(0).seal(['g/1']).values()
  assert row == 0 and [s.uid for s in store.reader.read([(name, 0)])] == ['g/1']
