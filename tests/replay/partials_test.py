"""Unfinished samples in the store: their spans survive a kill, and are undone with their commit."""

import dataclasses
import sqlite3

import numpy as np
import pytest
from stored import issues, make_sample, score_of, states

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import Finish, Segment
from jaxrl_llm.core.records.span import Span, decode_span, encode_span, joined
from jaxrl_llm.core.types import Version
from jaxrl_llm.replay import browse
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.index import open_store
from jaxrl_llm.replay.segments import SegmentError

A, B = 'g/0', 'g/1'


def span(*tokens, step=0, finish=None):
  segment = Segment(
    start=0, end=len(tokens), version=Version(1, step), engine='embedded', finish='budget'
  )
  return Span(
    tokens=np.array(tokens, np.int32),
    logprobs=-np.array(tokens, np.float32) / 3,
    segments=(segment,),
    finish=finish,
  )


def tokens(store, *uids):
  return {uid: [s.tokens.tolist() for s in spans] for uid, spans in store.spans(uids).items()}


@pytest.fixture
def stored(tmp_path):
  """Two batches have cut the group; the commit after the first is named 1."""
  store = open_store(tmp_path)
  store.at(0).issue(issues([A, B]))
  store.at(0).extend({A: span(1, 2), B: span(3, finish=Finish.STOP)})
  store.at(1).extend({A: span(4, 5, step=1)})
  yield store
  store.close()


def test_a_span_comes_back_bit_for_bit():
  made = joined([span(1, 2), span(3, step=1, finish=Finish.REPETITION)])
  read = decode_span(encode_span(made))
  assert read.tokens.tobytes() == made.tokens.tobytes()
  assert read.logprobs.tobytes() == made.logprobs.tobytes()
  assert (read.segments, read.finish) == (made.segments, Finish.REPETITION)
  assert [(s.start, s.end, s.version.step) for s in read.segments] == [(0, 2, 0), (2, 3, 1)]


@pytest.mark.parametrize('data', [b'', b'\x81', encode_span(span(1))[:-9], b'\x80'])
def test_what_is_no_span_is_refused(data):
  with pytest.raises(ValueError, match=r'Span record: '):
    decode_span(data)


def test_a_segment_of_a_span_has_tokens():
  one = span(1, 2)
  with pytest.raises(ValueError, match='has no tokens'):
    Span(
      tokens=one.tokens,
      logprobs=one.logprobs,
      segments=(dataclasses.replace(one.segments[0], end=0), *one.segments),
      finish=None,
    )


def test_a_damaged_span_is_one_line_with_its_sample_and_a_remedy(stored):
  stored._db.execute('UPDATE partials SET payload = substr(payload, 1, 9) WHERE uid = ?', (A,))
  line = rf'^replay store {stored.directory}, spans of {A}: Span record: .*; rebuild the index'
  with pytest.raises(SegmentError, match=line):
    stored.spans([A, B])
  with pytest.raises(SegmentError, match=line):
    browse.history(stored.directory, A)
  assert tokens(stored, B) == {B: [[3]]}


@pytest.mark.parametrize(('which', 'kept'), [('= 1', 2), ('= 2', 2), ('= 3', 2), ('> 0', 0)])
def test_a_missing_span_is_noticed(stored, which, kept):
  stored.at(2).extend({A: span(6, step=2)})
  stored._db.execute(
    'DELETE FROM partials WHERE seq IN (SELECT seq FROM (SELECT seq, row_number() OVER (ORDER BY '
    f'seq) AS n FROM partials WHERE uid = ?) WHERE n {which})',
    (A,),
  )
  with pytest.raises(
    SegmentError, match=rf'spans of {A}: got {kept} spans, but its transitions say 3; rebuild'
  ):
    stored.spans([A, B])


def test_a_damaged_row_of_the_open_segment_is_one_line(stored):
  stored.at(2).append([make_sample(B)])
  stored._db.execute('UPDATE open_segment SET payload = substr(payload, 1, 9)')
  with pytest.raises(SegmentError, match=rf'open segment, {B}: not a sample: .*; restore'):
    stored.read([B])


def test_spans_are_kept_in_order_until_the_sample_ends(stored):
  assert states(stored, [A, B]) == ['partial', 'partial']
  assert tokens(stored, A, B) == {A: [[1, 2], [4, 5]], B: [[3]]}
  with pytest.raises(ValueError, match='is not finished yet'):
    stored.at(1).score([score_of(A)])
  report = audit(stored)
  assert report.ok and report.live == (A, B), report.lines
  assert [entry.uid for entry in stored.live()] == [A, B]
  assert stored.at(2).append([make_sample(A), make_sample(B)]) == [A, B]
  assert tokens(stored, A) == {A: []}
  with pytest.raises(ValueError, match='is stored, cannot become partial'):
    stored.at(2).extend({A: span(6)})
  assert stored.at(2).append([make_sample(A)]) == [], 'it came twice'
  assert audit(stored).ok


def test_recovery_cuts_a_partial_back_to_the_commit(stored):
  directory = stored.directory
  stored.at(1).append([make_sample(B)])
  stored.close()
  again = open_store(directory)
  counts = again.recover(1)
  assert (counts['partials'], counts['open_segment'], counts['void']) == (1, 1, 0)
  assert states(again, [A, B]) == ['partial', 'partial']
  assert tokens(again, A, B) == {A: [[1, 2]], B: [[3]]}
  assert audit(again).ok
  again.at(1).extend({A: span(4, 5, step=1)})
  assert tokens(again, A) == {A: [[1, 2], [4, 5]]}
  again.close()
  last = open_store(directory)
  assert last.recover(0)['void'] == 2, 'without a commit, they were never cut'
  assert tokens(last, A, B) == {A: [], B: []}
  assert audit(last).ok
  last.close()


def test_spans_are_pruned_once_no_commit_can_need_them(stored):
  stored.at(2).append([make_sample(A)])
  stored.at(2).drop([B], 'given up')

  def kept():
    return stored._db.execute('SELECT count(*) FROM partials').fetchone()[0]

  stored.prune(2)
  assert kept() == 3
  stored.prune(3)
  assert kept() == 0 and audit(stored).ok


def test_the_audit_misses_a_lost_span_and_one_that_cannot_be_read(stored):
  stored._db.execute('DELETE FROM partials WHERE step = 1')
  stored._db.execute("UPDATE partials SET payload = x'00' WHERE uid = ?", (B,))
  report = audit(stored)
  assert set(report.lost) == {A, B}
  assert f'{A} (attempt 1): has 1 spans, but its transitions say 2' in report.problems


def test_a_store_from_before_partials_can_be_read_and_continued(tmp_path):
  store = open_store(tmp_path)
  store.at(0).issue(issues([A]))
  store.close()
  with sqlite3.connect(tmp_path / 'index.sqlite') as db:
    db.execute('DROP TABLE partials')
    db.execute("UPDATE meta SET json = '3' WHERE key = 'schema'")
  db.close()
  assert audit(tmp_path).ok and browse.summary(tmp_path).partial_spans == 0
  assert browse.history(tmp_path, A) == ['attempt 1, step 0: issued']
  again = open_store(tmp_path)
  again.recover(0)
  again.at(0).issue(issues([A]))
  again.at(0).extend({A: span(1)})
  assert tokens(again, A) == {A: [[1]]} and audit(again).ok
  again.close()


def test_a_sample_that_is_partial_is_no_reason_to_draw_its_group(stored):
  assert stored.candidates(3) == []
  with pytest.raises(UserError, match='unknown; wanted one of issued, partial, stored'):
    browse.find(stored.directory, state='half')
  assert [entry.uid for entry in browse.find(stored.directory, state='partial')] == [A, B]
