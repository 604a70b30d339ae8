import concurrent.futures
import pickle

import pytest
from stored import make_sample

from jaxrl_llm.core.records.sample import encode
from jaxrl_llm.replay.segments import (
  SegmentError,
  open_segment_reader,
  write_segment,
)

UIDS = [f'g/{i}' for i in range(6)]


@pytest.fixture
def sealed(tmp_path):
  write_segment(tmp_path, 'a.arrayrecord', [encode(make_sample(uid)) for uid in UIDS[:4]])
  write_segment(tmp_path, 'b.arrayrecord', [encode(make_sample(uid)) for uid in UIDS[4:]])
  return tmp_path


def test_rows_come_back_bit_for_bit_in_the_order_asked(sealed):
  reader = open_segment_reader(sealed)
  refs = [
    ('b.arrayrecord', 1),
    ('a.arrayrecord', 3),
    ('b.arrayrecord', 0),
    ('a.arrayrecord', 0),
    ('b.arrayrecord', 1),
  ]
  wanted = [encode(make_sample(uid)) for uid in ('g/5', 'g/3', 'g/4', 'g/0', 'g/5')]
  assert [encode(sample) for sample in reader.read(refs)] == wanted
  assert [encode(sample) for sample in pickle.loads(pickle.dumps(reader)).read(refs)] == wanted
  assert reader.read([]) == []
  reader.close()
  assert [encode(sample) for sample in reader.read(refs)] == wanted


def test_many_threads_read_many_files_within_the_open_limit(tmp_path):
  for n in range(12):
    write_segment(
      tmp_path, f'{n}.arrayrecord', [encode(make_sample(f'g/{n}/{i}')) for i in range(20)]
    )
  reader = open_segment_reader(tmp_path)
  reader._max_open = 3
  refs = [(f'{n}.arrayrecord', i) for i in range(20) for n in range(12)] * 3
  with concurrent.futures.ThreadPoolExecutor(16) as threads:
    uids = [sample.uid for (sample,) in threads.map(lambda ref: reader.read([ref]), refs)]
  assert uids == [f'g/{name.partition(".")[0]}/{i}' for name, i in refs]
  assert len(reader._open) <= 3


def test_writing_replaces_a_leftover_and_leaves_no_temporary(tmp_path):
  (tmp_path / 'a.arrayrecord').write_bytes(b'leftover')
  (tmp_path / 'a.arrayrecord.tmp').write_bytes(b'half')
  write_segment(tmp_path, 'a.arrayrecord', [encode(make_sample('g/0'))])
  assert [path.name for path in tmp_path.iterdir()] == ['a.arrayrecord']
  assert open_segment_reader(tmp_path).read([('a.arrayrecord', 0)])[0].uid == 'g/0'


def test_many_files_stay_within_the_open_limit(tmp_path):
  for n in range(10):
    write_segment(tmp_path, f'{n}.arrayrecord', [encode(make_sample(f'g/{n}'))])
  reader = open_segment_reader(tmp_path)
  reader._max_open = 3
  for _ in range(2):
    assert [s.uid for s in reader.read([(f'{n}.arrayrecord', 0) for n in range(10)])] == [
      f'g/{n}' for n in range(10)
    ]
  assert len(reader._open) == 3


def test_any_flipped_byte_is_an_error_or_harmless_never_another_row(sealed):
  """ArrayRecord hashes chunks; here every 5th byte of the used part of the file is flipped in
  turn.
  """
  path = sealed / 'a.arrayrecord'
  whole = path.read_bytes()
  wanted = [encode(make_sample(uid)) for uid in UIDS[:4]]
  used = [place for place, byte in enumerate(whole) if byte]
  errors = 0
  for place in used[::5]:
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1 :])
    reader = open_segment_reader(sealed)
    try:
      assert reader.read_bytes([('a.arrayrecord', row) for row in range(4)]) == wanted, place
    except SegmentError as error:
      errors += 1
      assert 'a.arrayrecord' in str(error) and '\n' not in str(error)
    finally:
      reader.close()
  assert errors > len(used[::5]) / 2


@pytest.mark.parametrize('damage', ['missing', 'cut', 'row'])
def test_damage_names_file_and_rows(sealed, damage):
  path, row = sealed / 'a.arrayrecord', 0
  if damage == 'missing':
    path.unlink()
  elif damage == 'cut':
    path.write_bytes(path.read_bytes()[:300])
  else:
    row = 4
  with pytest.raises(
    SegmentError, match=rf'a\.arrayrecord: rows \[{row}\] cannot be read: .*restore it'
  ):
    open_segment_reader(sealed).read([('a.arrayrecord', row)])


def test_a_row_that_is_no_sample_is_named(tmp_path):
  write_segment(tmp_path, 'a.arrayrecord', [encode(make_sample('g/0')), b'\x81\xa1x\x01'])
  with pytest.raises(SegmentError, match='row 1: not a sample: Sample record has schema None'):
    open_segment_reader(tmp_path).read([('a.arrayrecord', 1)])


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path):
  with pytest.raises(SegmentError, match='1 rows could not be written'):
    write_segment(tmp_path / 'nowhere', 'a.arrayrecord', [b'x'])
