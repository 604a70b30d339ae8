"""Files in shared memory that are overwritten through maps of their pages."""

import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from mappings import maps_of

from jaxrl_llm.core.disk import is_in_memory
from jaxrl_llm.weights import mapped_files
from jaxrl_llm.weights.mapped_files import MappedFiles

SIZE = 3 * 4096 + 1000


@pytest.fixture
def file(memory):
  """An open file in shared memory, all of whose pages exist."""
  path = memory / 'file'
  path.write_bytes(bytes(SIZE))
  with path.open('r+b', buffering=0) as opened:
    yield opened


def test_files_on_disks_are_not_in_memory(tmp_path, file):
  (tmp_path / 'file').write_bytes(bytes(SIZE))
  with (tmp_path / 'file').open('r+b') as on_disk:
    if os.fstat(on_disk.fileno()).st_dev == os.fstat(file.fileno()).st_dev:
      pytest.skip('temporary files are in memory here')
    assert not is_in_memory(on_disk.fileno())
    assert MappedFiles().map(on_disk, SIZE) is None
  assert is_in_memory(file.fileno())


@pytest.mark.parametrize('populates', [True, False])
def test_blocks_of_any_place_and_size_are_stored(monkeypatch, file, populates):
  if not populates:  # A kernel that does not know the advice refuses it.
    monkeypatch.setattr(mapped_files, '_POPULATE_WRITE', 9999)
  maps, random = MappedFiles(), np.random.default_rng(0)
  for _ in range(5):
    wanted = random.integers(0, 256, SIZE, np.uint8)
    wanted[:7] = 0  # The header is not stored.
    cuts = [7, *sorted(random.choice(np.arange(8, SIZE), 30, replace=False).tolist()), SIZE]
    mapped = maps.map(file, SIZE)
    with ThreadPoolExecutor(4) as threads:
      blocks = [wanted[start:end] for start, end in itertools.pairwise(cuts)]
      list(threads.map(mapped.put, ['t'] * len(blocks), blocks, cuts))
    assert os.pread(file.fileno(), SIZE, 0) == wanted.tobytes()
  assert maps_of(file.name) == 1, 'one map is used again'


def test_a_file_whose_pages_do_not_all_exist_is_not_mapped(file):
  maps = MappedFiles()
  file.truncate(SIZE + 3 * 4096)
  assert maps.map(file, SIZE + 3 * 4096) is None, 'it has a hole'
  assert maps.map(file, SIZE) is None, 'it has another size'
  file.truncate(0)
  file.truncate(SIZE)
  assert maps.map(file, SIZE) is None
  file.write(bytes(SIZE))
  assert maps.map(file, SIZE) is not None


def test_readers_notice_each_store_by_the_time_of_change(file):
  mapped = MappedFiles().map(file, SIZE)
  # Only the first store to a page is noticed by the kernel.
  for offset in (100, 100, 5000, 100):
    os.utime(file.fileno(), ns=(0, 0))
    before = time.time_ns()
    mapped.put('t', np.ones(10, np.uint8), offset)
    # The kernel's clock for files has steps of up to 10 ms.
    assert os.fstat(file.fileno()).st_mtime_ns >= before - 20_000_000


def test_the_map_of_a_removed_file_is_closed(file):
  maps = MappedFiles()
  mapped = maps.map(file, SIZE)
  maps.prune()
  assert not mapped.is_removed and maps_of(file.name) == 1
  os.unlink(file.name)
  assert mapped.is_removed and maps_of(file.name) == 1
  maps.prune()
  assert maps_of(file.name) == 0
