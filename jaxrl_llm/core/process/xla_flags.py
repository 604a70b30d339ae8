"""Flags of XLA's compiler that let it overlap collectives with computation.

XLA reads its flags from environment variables when JAX starts, and aborts the process if it does
not know one. Flags are therefore set only with JAX versions whose compilers are known to accept
them. A flag that the user's own variable contains is left alone. On CPUs, no flags are set.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pathlib
import re
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Literal, NamedTuple

Platform = Literal['cpu', 'cuda', 'tpu']
VARIABLES = ('XLA_FLAGS', 'LIBTPU_INIT_ARGS')
"""Environment variables with flags of the compiler: XLA's, and libtpu's for TPUs."""
_ADDED = 'JAXRL_XLA_FLAGS'
"""Environment variable with the flags that this program has added to `VARIABLES`. With it, child
processes can distinguish these flags from the user's flags.
"""
_VERSIONS = ((0, 10), (0, 12))
"""First and last JAX version, as (major, minor), whose compilers are known to accept all flags in
`_FLAGS`. The names of the flags were looked up in jaxlib 0.10.2 and 0.12.0.1. With jaxlib 0.10.2,
GPU programs were also compiled ahead of time with these flags.
"""


class _Set(NamedTuple):
  variable: str
  flags: Mapping[str, str]
  """Values, keyed by the names of the flags."""


_FLAGS: Mapping[Platform, _Set] = {
  # With these flags, the collectives of one loop iteration, such as one layer of a scan, overlap
  # with the computation of the next iteration. XLA's latency-hiding scheduler needs no flag,
  # because it is on by default.
  'cuda': _Set(
    'XLA_FLAGS',
    {
      'xla_gpu_enable_pipelined_all_gather': 'true',
      'xla_gpu_enable_pipelined_reduce_scatter': 'true',
      'xla_gpu_enable_pipelined_all_reduce': 'true',
    },
  ),
}
_GPU_PLUGINS = ('jax_plugins.xla_cuda12', 'jax_plugins.xla_cuda13')
_GOOGLE = '0x1ae0'
"""PCI vendor id of TPU chips, and also of other devices in Google's machines."""
_CHIPS = ('0x0027', '0x0056', '0x005e', '0x0062', '0x0063', '0x006f', '0x0076')
"""PCI device ids of TPU chips, from v2 to 7x."""
_NAME = re.compile(r'--(\w+)(?:=\S*)?')


class Flags(NamedTuple):
  """Flags of the compiler for one platform."""

  platform: Platform
  added: tuple[str, ...] = ()
  """Flags that the program adds, in the form '--name=value'."""
  kept: tuple[str, ...] = ()
  """Names of flags that the program would add if the user had not set them already."""
  reason: str = ''
  """Reason why no flags are added; empty if flags are added."""

  def __str__(self) -> str:
    text = ' '.join(self.added) or f'none ({self.reason})'
    return f'{text}; set by you: {", ".join(self.kept)}' if self.kept else text


def platform_here(environment: Mapping[str, str]) -> Platform:
  """Returns the platform on which JAX will compute, without starting JAX."""
  asked = environment.get('JAX_PLATFORMS', '').lower().split(',')[0]
  if asked:
    return {'tpu': 'tpu', 'cuda': 'cuda', 'gpu': 'cuda'}.get(asked, 'cpu')
  if has_tpu(environment):
    return 'tpu'
  return 'cuda' if _has_gpu() else 'cpu'


def set_flags(
  platform: Platform,
  environment: MutableMapping[str, str] = os.environ,
  *,
  recorded: Sequence[str] | None = None,
  version: str = '',
) -> Flags:
  """Adds the flags for `platform` to the variables from which the compiler reads them. This must
  happen before JAX starts. A second call changes nothing.

  Args:
    recorded: flags that this function added when the run that is now resumed was started. They are
      added again, except flags that are not in `_FLAGS`. None for a new run.
    version: version of JAX; if empty, the version of the installed JAX.
  """
  theirs = without_added(environment)
  wanted = _FLAGS[platform].flags if platform in _FLAGS else {}
  if recorded is not None:
    given = dict(flag.removeprefix('--').partition('=')[::2] for flag in recorded)
    wanted = {name: given[name] for name in wanted if given.get(name) in ('true', 'false')}
  flags = _flags(platform, wanted, theirs, version or importlib.metadata.version('jax'))
  for name in (*VARIABLES, _ADDED):
    environment.pop(name, None)
    if name in theirs:
      environment[name] = theirs[name]
  if flags.added:
    variable = _FLAGS[platform].variable
    environment[variable] = ' '.join((*flags.added, theirs.get(variable, ''))).strip()
    environment[_ADDED] = ' '.join(flags.added)
  return flags


def without_added(environment: Mapping[str, str]) -> dict[str, str]:
  """Returns a copy of the environment without the flags that this program has added. The copy suits
  child processes, whose compilers may not know these flags.
  """
  added, kept = added_flags(environment), dict(environment)
  kept.pop(_ADDED, None)
  for variable in VARIABLES if added else ():
    flags = [flag for flag in kept.pop(variable, '').split() if flag not in added]
    if flags:
      kept[variable] = ' '.join(flags)
  return kept


def in_force(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
  """Returns all flags in `VARIABLES`, sorted: those of the user and those that this program has
  added.
  """
  flags = (flag for name in VARIABLES for flag in environment.get(name, '').split())
  return tuple(sorted(flags))


def automatic_flags(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
  """Returns the flags in `VARIABLES`, sorted, whose names are in `_FLAGS` for any platform. They
  are returned whether the user or this program has set them. They must be equal on all hosts of a
  job.
  """
  names = {name for of_platform in _FLAGS.values() for name in of_platform.flags}
  return tuple(
    flag for flag in in_force(environment) if (match := _NAME.match(flag)) and match[1] in names
  )


def added_flags(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
  """Returns the flags that this program has added."""
  return tuple(environment.get(_ADDED, '').split())


def _flags(
  platform: Platform, wanted: Mapping[str, str], environment: Mapping[str, str], version: str
) -> Flags:
  if not wanted:
    return Flags(platform, reason=f'the defaults of {platform} are kept')
  numbers = tuple(int(n) for n in re.findall(r'\d+', version)[:2])
  if not _VERSIONS[0] <= numbers <= _VERSIONS[1]:
    known = ' to '.join('.'.join(map(str, numbers)) for numbers in _VERSIONS)
    return Flags(
      platform,
      reason=f'JAX {version} may not know them, those of {known} do; set XLA_FLAGS yourself',
    )
  theirs = {match[1] for name in VARIABLES for match in _NAME.finditer(environment.get(name, ''))}
  return Flags(
    platform,
    added=tuple(f'--{name}={value}' for name, value in wanted.items() if name not in theirs),
    kept=tuple(name for name in wanted if name in theirs),
    reason='all are set by you' if theirs >= set(wanted) else '',
  )


def has_tpu(environment: Mapping[str, str]) -> bool:
  """Returns whether this machine has TPU chips that JAX will use."""
  platforms = environment.get('JAX_PLATFORMS', '')
  if (platforms and 'tpu' not in platforms) or importlib.util.find_spec('libtpu') is None:
    return False
  return any(
    vendor.read_text().strip() == _GOOGLE
    and (vendor.parent / 'device').read_text().strip() in _CHIPS
    for vendor in pathlib.Path('/sys/bus/pci/devices').glob('*/vendor')
  )


def _has_gpu() -> bool:
  """Returns whether this machine has an NVIDIA GPU that JAX will use."""
  if not pathlib.Path('/proc/driver/nvidia/version').exists():
    return False
  try:
    return any(importlib.util.find_spec(plugin) is not None for plugin in _GPU_PLUGINS)
  except ModuleNotFoundError:
    return False
