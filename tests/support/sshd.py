"""A real sshd on loopback with its own keys, for tests of programs that use ssh."""

from __future__ import annotations

import contextlib
import getpass
import os
import pathlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest

SSHD = shutil.which('sshd', path=f'{os.environ.get("PATH", "")}:/usr/sbin')
HOSTS = ('127.0.0.1', 'localhost')
"""Two names of this machine."""


@contextlib.contextmanager
def serving(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """Serves this account on a free port of loopback. Yields the path of the configuration file for
  ssh. Skips the test if sshd is missing.
  """
  if SSHD is None or shutil.which('ssh') is None:
    pytest.skip('sshd is missing (Debian: apt-get install openssh-server)')
  folder.mkdir(mode=0o700)
  for name in ('host_key', 'user_key'):
    command = ['ssh-keygen', '-q', '-t', 'ed25519', '-N', '', '-f', str(folder / name)]
    subprocess.run(command, check=True, timeout=30)
  (folder / 'authorized').write_text((folder / 'user_key.pub').read_text())
  (folder / 'authorized').chmod(0o600)
  with socket.socket() as listener:
    listener.bind(('127.0.0.1', 0))
    port = listener.getsockname()[1]
  server = folder / 'sshd_config'
  server.write_text(
    f'Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\n'
    f'AuthorizedKeysFile {folder}/authorized\nPidFile none\nUsePAM no\nStrictModes no\n'
    'PasswordAuthentication no\nPermitRootLogin prohibit-password\n'
  )
  key = (folder / 'host_key.pub').read_text().split()[:2]
  names = ','.join(f'[{host}]:{port}' for host in HOSTS)
  (folder / 'known_hosts').write_text(f'{names} {" ".join(key)}\n')
  client = folder / 'ssh_config'
  client.write_text(
    f'Port {port}\nUser {getpass.getuser()}\nIdentityFile {folder}/user_key\nIdentitiesOnly yes\n'
    f'UserKnownHostsFile {folder}/known_hosts\nGlobalKnownHostsFile none\nAddressFamily inet\n'
  )
  if os.geteuid() == 0:
    pathlib.Path('/run/sshd').mkdir(mode=0o755, exist_ok=True)
  with (folder / 'sshd.log').open('wb') as log:
    process = subprocess.Popen([SSHD, '-D', '-e', '-f', str(server)], stdout=log, stderr=log)
  try:
    _await(port, process, folder / 'sshd.log')
    yield client
  finally:
    process.terminate()
    process.wait(30)


def _await(port: int, process: subprocess.Popen, log: pathlib.Path) -> None:
  deadline = time.monotonic() + 30
  while time.monotonic() < deadline:
    assert process.poll() is None, log.read_text()
    with contextlib.suppress(OSError), socket.create_connection(('127.0.0.1', port), timeout=1):
      return
    time.sleep(0.05)
  raise AssertionError(f'sshd does not listen on {port}: {log.read_text()}')
