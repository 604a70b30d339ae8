"""Addresses, tokens, certificates and sessions of service clients; unusable ones raise one-line UserErrors."""

from __future__ import annotations

import pathlib
import ssl

import aiohttp

from jaxrl_llm.core.errors import UserError

_KEEP_ALIVE_S = 2.0
"""Idle seconds before the client closes a connection: earlier than a server would, perhaps during the next request."""


def check_address(address: str, where: str) -> None:
  """Raises UserError for a malformed address.

  Args:
    address: `unix:/path`, `http://…` or `https://…`.
    where: field or flag that holds it, for the error.
  """
  if not address.startswith(('http://', 'https://', 'unix:/')):
    wanted = 'http://HOST:PORT, https://HOST:PORT or unix:/path/to.sock'
    raise UserError(f'{where}: address {address!r}, wanted {wanted}')


def read_key(file: str | None, where: str) -> str | None:
  """Returns the bearer token in the first line of a file; None if `file` is None.

  Args:
    file: path of the file.
    where: field or flag that names it, for the error.
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
  """Returns a TLS context that verifies https servers with the CA file, or with the system's authorities if None."""
  try:
    return ssl.create_default_context(cafile=ca_file)
  except OSError as error:
    raise UserError(f'{where}: ca_file {ca_file}: no certificates that can be read ({error})') from None


def open_session(address: str, *, key: str | None, ca_file: str | None, where: str) -> aiohttp.ClientSession:
  """Opens a session with unlimited connections to one address, bound to the running event loop.

  Args:
    address: see `check_address`.
    key: bearer token; None: none is sent.
    ca_file: see `certificates`.
    where: owner of the session, for errors.
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
  """Returns the URL prefix of an address; a Unix socket has no host and gets a placeholder."""
  return 'http://service' if address.startswith('unix:') else address.rstrip('/')
