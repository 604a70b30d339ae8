"""Logs survive a kill at any byte: what is committed stays, what is later goes, nothing appears
twice.
"""

import asyncio
import base64
import json
import math
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.runtime import writers
from jaxrl_llm.runtime.log.config import LoggingConfig
from jaxrl_llm.runtime.log.writers import open_writers


class Log:
  """metrics.jsonl with the copy that TensorBoard gets, as a run writes both."""

  def __init__(self, workdir, *, committed):
    self._metrics = writers.MetricsWriter(workdir, committed=committed)
    self._copies = open_writers(LoggingConfig(), workdir, name='test')
    self.sync = self._metrics.sync

  def write(self, stage, step, values):
    assert self._copies.write(self._metrics.write(stage, step, values)) == []

  def close(self):
    self._metrics.close()
    asyncio.run(self._copies.close())


def events(path):
  """The events of a TensorBoard file, framing and checksums checked, as tensorboardX understands
  them.
  """
  from tensorboardX.proto import event_pb2

  data, found, at = path.read_bytes(), [], 0
  while at < len(data):
    length, crc = struct.unpack_from('<QI', data, at)
    assert crc == masked_crc32c(data[at : at + 8])
    event = data[at + 12 : at + 12 + length]
    assert struct.unpack_from('<I', data, at + 12 + length) == (masked_crc32c(event),)
    found.append(event_pb2.Event.FromString(event))
    at += 16 + length
  return found


def masked_crc32c(data):
  from tensorboardX import crc32c

  crc = crc32c.crc32c(data)
  return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def board(workdir, stage='grpo'):
  """(step, {tag: value}) of every row event of a stage, over all its files."""
  found = [e for f in sorted((workdir / 'tensorboard' / stage).iterdir()) for e in events(f)]
  return [
    (e.step, {v.tag: v.simple_value for v in e.summary.value})
    for e in found
    if e.HasField('summary')
  ]


def run(workdir, steps, *, committed=0):
  log = Log(workdir, committed=committed)
  offsets = {}
  for step in steps:
    log.write('grpo', step, {'b': step * 0.5, 'a': np.float32(step)})
    offsets[step] = log.sync()
  log.close()
  return offsets


def test_rows_follow_the_contract(tmp_path):
  log = writers.MetricsWriter(tmp_path, committed=0)
  log.write(
    'sft', 3, {'z/loss': np.float32(0.5), 'a/count': np.int32(7), 'training/global_step': 99}
  )
  # A reader sees the row before the writer is closed.
  line = (tmp_path / 'metrics.jsonl').read_text()
  assert line == '{"stage": "sft", "training/global_step": 3, "a/count": 7, "z/loss": 0.5}\n'
  assert log.offset == len(line)
  log.close()


def test_nonfinite_metrics_are_valid_json_with_their_kind(tmp_path):
  log = Log(tmp_path, committed=0)
  log.write('grpo', 1, {'n': math.nan, 'p': np.float32('inf'), 'm': -math.inf, 'ok': 1.5})
  log.close()
  row = json.loads((tmp_path / 'metrics.jsonl').read_text(), parse_constant=pytest.fail)
  assert (row['n'], row['p'], row['m'], row['ok']) == (None, None, None, 1.5)
  assert (row['n/nonfinite'], row['p/nonfinite'], row['m/nonfinite']) == ('nan', 'inf', '-inf')
  assert board(tmp_path) == [(1, {'ok': 1.5})]


@pytest.mark.parametrize('cut', [0, 1, 7, 30])
def test_resumed_logs_equal_uninterrupted_ones(tmp_path, cut):
  """Commit at step 4, go on to 6 and die `cut` bytes before the end of the line; resume to 8."""
  run(tmp_path / 'whole', range(1, 9))
  killed = tmp_path / 'killed'
  offset = run(killed, range(1, 7))[4]
  path = killed / 'metrics.jsonl'
  path.write_bytes(path.read_bytes()[: path.stat().st_size - cut])
  event_file = next((killed / 'tensorboard' / 'grpo').iterdir())
  event_file.write_bytes(event_file.read_bytes()[: event_file.stat().st_size - cut])
  run(killed, range(5, 9), committed=offset)
  assert path.read_bytes() == (tmp_path / 'whole' / 'metrics.jsonl').read_bytes()
  assert board(killed) == board(tmp_path / 'whole') and [s for s, _ in board(killed)] == list(
    range(1, 9)
  )


def test_kept_rows_keep_their_wall_time(tmp_path):
  def times():
    (path,) = (tmp_path / 'tensorboard' / 'grpo').iterdir()
    return [event.wall_time for event in events(path) if event.HasField('summary')]

  offset = run(tmp_path, range(3))[1]
  before = times()
  Log(tmp_path, committed=offset).close()
  assert len(before) == 3 and times() == before[:2]


def test_event_files_are_as_tensorboard_reads_them(tmp_path):
  from tensorboardX.proto import event_pb2

  log = Log(tmp_path, committed=0)
  log.write('grpo', 2**40, {'größe': -0.1, 'large': 1e300, 'zero': 0})
  log.close()
  (path,) = (tmp_path / 'tensorboard' / 'grpo').iterdir()
  version, start, row = events(path)
  assert path.name.startswith('events.out.tfevents.') and version.file_version == 'brain.Event:2'
  assert start.session_log.status == event_pb2.SessionLog.START
  values = {v.tag: v.simple_value for v in row.summary.value}
  # A value beyond float32 is infinite there, and exact in metrics.jsonl.
  assert row.step == 2**40 and values == {'größe': np.float32(-0.1), 'large': math.inf, 'zero': 0.0}
  assert row.wall_time > 1e9


def test_the_writers_import_neither_torch_nor_jax():
  program = (
    'import jaxrl_llm.runtime.log.writers, jaxrl_llm.runtime.log.follow, sys; '
    'sys.exit(bool({"torch", "jax"} & set(sys.modules)))'
  )
  assert subprocess.run([sys.executable, '-c', program]).returncode == 0


def test_without_a_commit_only_a_half_line_is_cut(tmp_path):
  run(tmp_path, range(3))
  path = tmp_path / 'metrics.jsonl'
  whole = path.read_bytes()
  path.write_bytes(whole + b'{"stage": "gr')
  log = writers.MetricsWriter(tmp_path, committed=None)
  assert log.offset == len(whole)
  log.write('grpo', 3, {})
  log.close()
  rows, corrupt = writers.read_jsonl(path)
  assert [r['training/global_step'] for r in rows] == [0, 1, 2, 3] and corrupt == 0


def test_a_log_that_lost_committed_bytes_is_refused(tmp_path):
  offset = run(tmp_path, range(3))[2]
  path = tmp_path / 'metrics.jsonl'
  with pytest.raises(RunError, match=r'metrics\.jsonl.*no line end there'):
    writers.MetricsWriter(tmp_path, committed=offset - 3)
  path.write_bytes(path.read_bytes()[:-5])
  with pytest.raises(RunError, match=rf'first {offset} bytes, but it has {offset - 5} bytes'):
    writers.MetricsWriter(tmp_path, committed=offset)
  assert path.stat().st_size == offset - 5


def test_corrupt_lines_are_counted_and_the_rest_is_read(tmp_path):
  path = tmp_path / 'x.jsonl'
  path.write_bytes(b'{"a": 1}\n[1]\n\xff\xfe\n\n{"a": 2}\n{"a":')
  assert writers.read_jsonl(path) == ([{'a': 1}, {'a': 2}], 3)


def test_rollouts_of_later_steps_go_on_resume(tmp_path):
  rollouts, evals = writers.RolloutsWriter(tmp_path), writers.EvalsWriter(tmp_path)
  for step in (1, 2, 3):
    rollouts.write('sft', step, [{'uid': f'sft/{step}'}])
    rollouts.write('grpo', step, [{'uid': f'grpo/{step}'}])
  evals.write('grpo', 2, 'held out', [{'uid': 'x'}])
  evals.write('grpo', 3, 'held out', [{'uid': 'x'}])
  (tmp_path / 'rollouts' / 'grpo' / '000001.jsonl.tmp').write_text('{"uid": "half')
  # grpo's third step and the half-written file
  assert rollouts.discard_later({'sft': 3, 'grpo': 2}) == 2
  assert sorted(p.name for p in (tmp_path / 'rollouts').glob('*/*')) == sorted(
    ['000001.jsonl', '000002.jsonl', '000003.jsonl', '000001.jsonl', '000002.jsonl']
  )
  assert rollouts.discard_later({'sft': 3}) == 2  # nothing of grpo is committed
  assert evals.discard_later({'grpo': 2}) == 1
  assert [p.name for p in (tmp_path / 'evals').glob('*/*')] == ['000002-held out.jsonl']


def test_a_step_file_is_replaced_whole_or_not_at_all(tmp_path):
  rollouts = writers.RolloutsWriter(tmp_path)
  path = rollouts.write('grpo', 7, [{'uid': 'first'}])

  def dying():
    yield {'uid': 'second'}
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    rollouts.write('grpo', 7, dying())
  assert path.name == '000007.jsonl' and json.loads(path.read_text()) == {'uid': 'first'}


def test_rows_of_arrays_round_trip_within_a_float32(tmp_path):
  logprobs = -np.random.default_rng(0).exponential(2.0, 100).astype(np.float32)
  row = {
    'completion': 'é\u2028</script>',
    'logprobs': logprobs,
    'ids': np.arange(3),
    'bad': [np.nan, np.float32(1)],
  }
  row['deep'] = {'array': np.array([1.0, np.inf]), 'reward': None}
  path = writers.RolloutsWriter(tmp_path).write('grpo', 1, [row])
  (read,), corrupt = writers.read_jsonl(path)
  assert corrupt == 0 and read['completion'] == row['completion'] and read['ids'] == [0, 1, 2]
  assert np.abs(np.array(read['logprobs']) - logprobs).max() <= 5e-9 + 1e-12
  assert read['bad'] == [None, 1.0] and read['deep'] == {'array': [1.0, None], 'reward': None}


def test_names_cannot_leave_the_run_directory(tmp_path):
  with pytest.raises(UserError, match=r'\.\./up'):
    writers.EvalsWriter(tmp_path).write('grpo', 1, '../up', [])


def long_row(tokens=4096):
  draws = np.random.default_rng(0)
  ids = draws.integers(0, 50, tokens)
  return {
    'uid': 'g/0',
    'tokens': [f'<{i}>' for i in ids],
    'token_ids': ids.astype(np.int32),
    'behaviour_logprobs': np.where(ids < 5, np.nan, -draws.exponential(size=tokens)),
    'advantages': np.full(tokens, 0.1),
    'scores': {'judge': {'value': 0.5}},
  }


def test_long_rollouts_are_compact_and_read_as_short_ones_are(tmp_path):
  row = long_row()
  path = writers.RolloutsWriter(tmp_path).write('grpo', 1, [row])
  (written,), _ = writers.read_jsonl(path)
  assert not any(isinstance(value, list) for value in written.values()), 'no list per token'
  assert path.stat().st_size < 12 * len(row['token_ids'])
  read = writers.unpacked(written)
  assert (read['uid'], read['scores'], read['tokens']) == ('g/0', row['scores'], row['tokens'])
  assert read['token_ids'] == row['token_ids'].tolist() and set(read['advantages']) == {
    float(np.float32(0.1))
  }
  for value, was in zip(read['behaviour_logprobs'], row['behaviour_logprobs'], strict=True):
    assert value is None if np.isnan(was) else value == float(np.float32(was))


def test_short_rollouts_and_those_of_earlier_versions_are_lists(tmp_path):
  path = writers.RolloutsWriter(tmp_path).write('grpo', 1, [long_row(20)])
  (written,), _ = writers.read_jsonl(path)
  assert len(written['tokens']) == len(written['token_ids']) == len(written['advantages']) == 20
  assert writers.unpacked(written) == written


@pytest.mark.parametrize(
  'wrong',
  [
    {'dtype': '<f8'},
    {'dtype': ['<i4']},
    {'zlib': 'é'},
    {'zlib': None},
    {'zlib': 'AAAA'},
    {'zlib': base64.b64encode(zlib.compress(bytes(40))[:-6]).decode()},
    {'zlib': base64.b64encode(zlib.compress(bytes(41))).decode()},
    {'zlib': base64.b64encode(zlib.compress(bytes(1 << 28))).decode()},
  ],
)
def test_a_damaged_array_is_one_line(wrong):
  row = json.loads(json.dumps(writers.packed(long_row())))
  row['token_ids'] |= wrong
  with pytest.raises(ValueError, match='array'):
    writers.unpacked(row)
