"""Hosts that are network namespaces around one switch. Each link has a given rate."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
from paths import ROOT, SUPPORT, TOOLS

_NETWORK = '10.203.78'
"""First part of the addresses. They are used only between the namespaces of one test."""


class Links:
  """Namespaces that are connected by links of the same rate."""

  def __init__(self, names: list[str]):
    self._names = names

  def address(self, host: int) -> str:
    return f'{_NETWORK}.{host + 1}'

  def start(self, host: int, module: str, function: str, *args) -> subprocess.Popen:
    """Calls a function of a test module in one of the namespaces. Its stdin and stdout are
    pipes.
    """
    source = f'import {module} as t; t.{function}(*{args!r})'
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(map(str, (ROOT, SUPPORT, TOOLS)))}
    return subprocess.Popen(
      ['ip', 'netns', 'exec', self._names[host], sys.executable, '-c', source],
      env=environment,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )

  def counters(self, host: int) -> tuple[int, int]:
    """Returns the number of bytes that a host has sent and received over its link."""
    (link,) = json.loads(_ip('-n', self._names[host], '-s', '-j', 'link', 'show', 'dev', 'eth'))
    return link['stats64']['tx']['bytes'], link['stats64']['rx']['bytes']

  def cut(self, host: int, *, off: bool) -> None:
    """Takes a host's link down if `off`, otherwise up."""
    _ip('-n', self._names[host], 'link', 'set', 'dev', 'eth', 'down' if off else 'up')


@contextlib.contextmanager
def star(count: int, rate: str) -> Iterator[Links]:
  """Yields namespaces around a switch. Skips the test if they cannot be created.

  Args:
    rate: rate of each link in each direction, in the format of `tc`.
  """
  if os.geteuid() != 0:
    pytest.skip('network namespaces need root')
  if shutil.which('tc') is None:
    pytest.skip('the tc command (iproute2) is missing')
  switch = f'test-{os.getpid()}-switch'
  names = [f'test-{os.getpid()}-{i}' for i in range(count)]
  shape = ('root', 'tbf', 'rate', rate, 'burst', '128kb', 'latency', '100ms')
  try:
    try:
      for name in (switch, *names):
        _ip('netns', 'add', name)
      _ip('-n', switch, 'link', 'add', 'switch', 'type', 'bridge')
      _ip('-n', switch, 'link', 'set', 'dev', 'switch', 'up')
      for i, name in enumerate(names):
        end = ('type', 'veth', 'peer', 'name', 'eth', 'netns', name)
        _ip('-n', switch, 'link', 'add', f'port{i}', *end)
        _ip('-n', switch, 'link', 'set', 'dev', f'port{i}', 'master', 'switch', 'up')
        _ip('-n', name, 'addr', 'add', f'{_NETWORK}.{i + 1}/24', 'dev', 'eth')
        for device in ('lo', 'eth'):
          _ip('-n', name, 'link', 'set', 'dev', device, 'up')
        _run('tc', '-n', name, 'qdisc', 'add', 'dev', 'eth', *shape)
        _run('tc', '-n', switch, 'qdisc', 'add', 'dev', f'port{i}', *shape)
    except subprocess.CalledProcessError as error:
      pytest.skip(f'this machine lets root make no such network: {error.stderr.strip()}')
    yield Links(names)
  finally:
    for name in (switch, *names):
      subprocess.run(['ip', 'netns', 'delete', name], capture_output=True, timeout=30)


def _ip(*args: str) -> str:
  return _run('ip', *args)


def _run(*command: str) -> str:
  done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
  return done.stdout
