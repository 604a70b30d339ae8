"""The order of a mesh over slices: data across them, everything else within."""

import dataclasses

import pytest

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.parallel.mesh import MeshConfig
from jaxrl_llm.parallel.slices import arrange


@dataclasses.dataclass(frozen=True)
class Device:
  id: int
  process_index: int = 0
  slice_index: int = 0
  platform: str = 'cpu'
  device_kind: str = 'fake'
  core_on_chip: int = 0

  @property
  def coords(self):
    """Place in a TPU slice of 2 × 2 chips."""
    return (self.id // 2 % 2, self.id // 4 % 2, 0)


def rows(devices, *sizes, count=None):
  """Ids of the devices at each place of the data axis."""
  return [[device.id for device in row.flat] for row in arrange(devices, sizes, count)]


@pytest.mark.parametrize('within', [(4, 1, 1), (2, 1, 2), (1, 4, 1)])
def test_only_data_crosses_slices_of_processes(within):
  # Four processes of two devices, in an order that is not that of the processes.
  devices = [Device(i, process_index=i % 4) for i in range(8)]
  assert rows(devices, 2, *within, count=2) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_data_may_stay_within_a_slice_too():
  devices = [Device(i, process_index=i % 4) for i in range(8)]
  assert rows(devices, 4, 2, 1, 1, count=2) == [[0, 1], [4, 5], [2, 3], [6, 7]]


def test_without_slices_the_order_of_the_devices_stays():
  assert rows([Device(i, process_index=i % 4) for i in range(8)], 2, 4, 1, 1) == [
    [0, 1, 2, 3],
    [4, 5, 6, 7],
  ]


def test_devices_of_one_process_are_slices_in_their_order():
  assert rows([Device(i) for i in range(6)], 3, 2, 1, 1, count=3) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize('count', [None, 2])
def test_tpus_know_their_slice(count):
  devices = [Device(i, slice_index=1 - i % 2, platform='tpu') for i in range(8)]
  found = rows(devices, 2, 4, 1, 1, count=count)
  assert [sorted(row) for row in found] == [[1, 3, 5, 7], [0, 2, 4, 6]]


@pytest.mark.parametrize(
  ('devices', 'platform', 'sizes', 'count', 'words'),
  [
    (12, 'cpu', (3, 4, 1, 1), 2, 'data=3 is not a multiple of the number of slices, 2, and only'),
    (8, 'cpu', (1, 8, 1, 1), 2, 'data=1 is not a multiple of the number of slices, 2, and only'),
    (8, 'tpu', (1, 8, 1, 1), None, 'data=1 is not a multiple of the number of slices, 2, and'),
    (8, 'cpu', (8, 1, 1, 1), 3, 'slices=3 does not divide the 4 processes'),
    (7, 'cpu', (7, 1, 1, 1), 2, 'slices of 4, 3 devices; wanted equal sizes'),
    (7, 'tpu', (7, 1, 1, 1), None, 'slices of 4, 3 devices; wanted equal sizes'),
    (8, 'tpu', (4, 2, 1, 1), 4, 'slices=4, but the TPU devices are in 2 slices'),
  ],
)
def test_slices_that_do_not_fit_are_one_line(devices, platform, sizes, count, words):
  fakes = [Device(i, i % 4, i % 2, platform) for i in range(devices)]
  with pytest.raises(UserError, match=words) as raised:
    arrange(fakes, sizes, count)
  assert '\n' not in str(raised.value)


def test_no_slices_are_refused():
  with pytest.raises(UserError, match=r'mesh\.slices: 0, wanted at least 1'):
    MeshConfig(slices=0)
