"""Names of devices that are not here; what compilers make of them is in
tests/jobs/topology_test.py.
"""

import pytest

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.parallel.topology import CHIPS, parse_topology, topology_devices


@pytest.mark.parametrize(
  ('name', 'wanted'),
  [
    ('v5e:2x4', ('v5e', (2, 4), 1)),
    ('v5p:2x2x4', ('v5p', (2, 2, 4), 1)),
    ('2*v5e:4x4', ('v5e', (4, 4), 2)),
    ('h100:8', ('h100', (8,), 1)),
    ('h200:2x8', ('h200', (2, 8), 1)),
  ],
)
def test_a_topology_is_a_chip_a_shape_and_slices(name, wanted):
  assert parse_topology(name) == wanted


@pytest.mark.parametrize(
  ('name', 'words'),
  [
    ('v5e', 'wanted CHIP:SHAPE'),
    ('v5e-8', 'wanted CHIP:SHAPE'),
    ('b300:8', 'h100'),
    ('v5e:2x2x2', 'such as 4x4'),
    ('v5p:4x4', 'such as 2x2x4'),
    ('h100:1x2x8', 'two hosts'),
    ('h100:0', 'such as 8'),
    ('', 'wanted CHIP:SHAPE'),
    ('0*v5e:4x4', '0 slices; wanted at least 1'),
    ('2*h100:8', 'for GPUs hosts × GPUs instead'),
    ('-2*v5e:4x4', 'wanted CHIP:SHAPE'),
    ('2*', 'wanted CHIP:SHAPE'),
    ('v5e:' + '9' * 5000 + 'x1', 'wanted CHIP:SHAPE'),
  ],
)
def test_another_name_is_one_line(name, words):
  with pytest.raises(UserError, match=words) as caught:
    topology_devices(name)
  assert '\n' not in str(caught.value)


def test_every_chip_has_a_maker_s_figures():
  assert all(chip.memory_bytes > 10**10 and chip.peak_flops > 10**14 for chip in CHIPS.values())
