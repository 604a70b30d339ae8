"""Two network namespaces with a cable between them, for tests that call from another address."""

from __future__ import annotations

import os
import pathlib
import shutil
import socket
import subprocess
import sys

import pytest
from paths import ROOT, SUPPORT, TOOLS

SERVING, CALLING = '10.203.77.1', '10.203.77.2'
"""Addresses of the two ends. They are used only on the test's own cable."""

_HOSTS = pathlib.Path('/etc/netns')
"""Directory with one folder per namespace. `ip netns exec` shows its files in place of those in
/etc.
"""


class Cabled:
  def __init__(self, names: list[str]):
    self._names = names

  def run(self, end: int, module: str, function: str, *args) -> list[str]:
    """Returns the command that calls a function of a test module in one of the namespaces. The
    command needs the variables of `environment()`.
    """
    return self.command(end, sys.executable, '-c', f'import {module} as t; t.{function}(*{args!r})')

  def command(self, end: int, *words: str) -> list[str]:
    """Returns the command that runs a program in one of the namespaces."""
    return ['ip', 'netns', 'exec', self._names[end], *words]

  @staticmethod
  def environment() -> dict[str, str]:
    return {**os.environ, 'PYTHONPATH': os.pathsep.join(map(str, (ROOT, SUPPORT, TOOLS)))}


def cabled():
  """Body of a fixture: yields a serving and a calling end. Skips the test if they cannot be
  created.
  """
  if os.geteuid() != 0:
    pytest.skip('network namespaces need root')
  if shutil.which('ip') is None:
    pytest.skip('the ip command (iproute2) is missing')
  names = [f'test-{os.getpid()}-{end}' for end in ('serve', 'call')]
  try:
    try:
      for name in names:
        _ip('netns', 'add', name)
      _ip(
        '-n',
        names[0],
        'link',
        'add',
        'cable',
        'type',
        'veth',
        'peer',
        'name',
        'cable',
        'netns',
        names[1],
      )
    except subprocess.CalledProcessError as error:
      pytest.skip(f'this machine lets root make no network namespace: {error.stderr.strip()}')
    for name, address in zip(names, (SERVING, CALLING), strict=True):
      _ip('-n', name, 'addr', 'add', f'{address}/30', 'dev', 'cable')
      _ip('-n', name, 'link', 'set', 'cable', 'up')
      _ip('-n', name, 'link', 'set', 'lo', 'up')
      # Gloo listens at the address that the host's own name resolves to.
      hosts = _HOSTS / name / 'hosts'
      hosts.parent.mkdir(parents=True)
      hosts.write_text(f'127.0.0.1 localhost\n{address} {socket.gethostname()}\n')
    yield Cabled(names)
  finally:
    for name in names:
      subprocess.run(['ip', 'netns', 'delete', name], capture_output=True, timeout=30)
      shutil.rmtree(_HOSTS / name, ignore_errors=True)


def _ip(*args: str) -> None:
  subprocess.run(['ip', *args], check=True, capture_output=True, text=True, timeout=30)
