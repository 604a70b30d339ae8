"""How clients reach services: addresses, tokens, certificates, sessions. What cannot be used is one line."""

from __future__ import annotations

import pathlib
import ssl

import aiohttp

from jaxrl_llm.core.errors import UserError

_KEEP_ALIVE_S = 2.0
"""Idle connections are closed from here, before a server closes them under the next request's feet."""


def check_address(address: str, where: str) -> None:
  """Raises UserError for what no client can reach.

  Args:
    address: `unix:/path`, `http://…` or `https://…`.
    where: the field or flag that has it, for the error.
  """
  if not address.startswith(('http://', 'https://', 'unix:/')):
    wanted = 'http://HOST:PORT, https://HOST:PORT or unix:/path/to.sock'
    raise UserError(f'{where}: address {address!r}, wanted {wanted}')


def read_key(file: str | None, where: str) -> str | None:
  """The bearer token in the first line of a file; None for none.

  Args:
    file: its path.
    where: the field or flag that names it, for the error.
  """
  if file is None:
    return None
  try:
    lines = pathlib.Path(file).read_text().split()
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f'{where}: {file}: cannot be read ({error})') from None
  if not lines:
    raise UserError(f'{where}: {file} is empty; it holds the token in its first line')
  return lines[0]


def certificates(ca_file: str | None, where: str) -> ssl.SSLContext:
  """Those that an https server may show: of the file, or, without one, the system's."""
  try:
    return ssl.create_default_context(cafile=ca_file)
  except OSError as error:
    raise UserError(f'{where}: ca_file {ca_file}: no certificates that can be read ({error})') from None


def open_session(address: str, *, key: str | None, ca_file: str | None, where: str) -> aiohttp.ClientSession:
  """A session with any number of connections to that address; it belongs to the event loop that runs.

  Args:
    address: as `check_address` has it.
    key: bearer token; None: none is sent.
    ca_file: as `certificates` has it.
    where: whose it is, for the errors.
  """
  check_address(address, where)
  pool = {'limit': 0, 'keepalive_timeout': _KEEP_ALIVE_S}
  if address.startswith('unix:'):
    connector: aiohttp.BaseConnector = aiohttp.UnixConnector(address.removeprefix('unix:'), **pool)
  else:
    context = certificates(ca_file, where) if address.startswith('https:') else True
    connector = aiohttp.TCPConnector(ssl=context, **pool)
  headers = {'Authorization': f'Bearer {key}'} if key else {}
  return aiohttp.ClientSession(connector=connector, headers=headers)


def base_url(address: str) -> str:
  """What URLs begin with; a unix socket has no host, and gets a name."""
  return 'http://service' if address.startswith('unix:') else address.rstrip('/')
