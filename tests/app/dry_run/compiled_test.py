"""The memory of compiled programs by the compiler's figures."""

from typing import NamedTuple

import pytest

from jaxrl_llm.app.dry_run.compiled import _used, used_memory


class Figures(NamedTuple):
  """Figures of libtpu 0.0.42.1 in bytes, named like those of `memory_analysis`."""

  argument_size_in_bytes: int
  output_size_in_bytes: int
  temp_size_in_bytes: int
  alias_size_in_bytes: int
  peak_memory_in_bytes: int
  host_argument_size_in_bytes: int = 0
  host_output_size_in_bytes: int = 0
  host_alias_size_in_bytes: int = 0


# What the compiler allocates is in its report `memory-usage-report` (option `xla_dump_to`).
PROGRAMS = {
  'products': (Figures(201_300_000, 0, 671_200_000, 0, 872_400_000), 872_459_264),
  'a loop': (Figures(201_300_000, 134_200_000, 705_000_000, 0, 906_000_000), 906_158_080),
  'a loop that updates its argument': (
    Figures(201_300_000, 134_200_000, 705_000_000, 134_200_000, 771_800_000),
    771_940_352,
  ),
  'a sum over devices': (
    Figures(151_000_000, 16_800_000, 1_745_300_000, 16_800_000, 1_359_000_000),
    1_359_227_392,
  ),
  'arguments in host memory': (
    Figures(
      134_220_000, 134_220_000, 201_460_000, 134_220_000, 469_760_000,
      134_220_000, 134_220_000, 134_220_000,
    ),
    335_610_368,
  ),
  'results in host memory': (
    Figures(134_220_000, 134_220_000, 67_170_000, 0, 469_760_000, 67_110_000, 67_110_000),
    335_577_600,
  ),
}  # fmt: skip


@pytest.mark.parametrize('name', PROGRAMS)
def test_on_tpus_memory_that_arrays_share_counts_once(name):
  figures, allocated = PROGRAMS[name]
  needed, temporaries = used_memory(figures, 'tpu')
  assert needed == pytest.approx(allocated, rel=1e-3)
  kept = figures.argument_size_in_bytes + figures.output_size_in_bytes - figures.alias_size_in_bytes
  assert temporaries == needed - kept


def test_elsewhere_the_parts_are_added():
  figures, _ = PROGRAMS['a loop']
  assert used_memory(figures, 'cuda') == (1_040_500_000, 705_000_000)


def test_the_size_of_a_refused_program_is_known():
  message = 'RESOURCE_EXHAUSTED: E1000: Used 20.50G of 15.75G hbm. Exceeded hbm capacity by 4.75G.'
  assert _used(message) == 20.5 * 2**30 and _used('RESOURCE_EXHAUSTED: no figure') == 0
