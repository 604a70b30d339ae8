"""Reads and checks the addresses, tokens and certificates that clients use. Invalid input raises a
one-line UserError.
"""

from __future__ import annotations

import ipaddress
import pathlib
import ssl

from jaxrl_llm.core.errors import UserError


def check_address(address: str, where: str) -> None:
  """Raises UserError for a malformed address.

  Args:
    address: `unix:/path`, `http://…` or `https://…`.
    where: field or flag that gives the address, for the error message.
  """
  if not address.startswith(('http://', 'https://', 'unix:/')):
    wanted = 'http://HOST:PORT, https://HOST:PORT or unix:/path/to.sock'
    raise UserError(f'{where}: address {address!r}, wanted {wanted}')


def is_loopback(host: str) -> bool:
  """Returns whether a host name or address is a loopback address, which only this machine can
  reach.
  """
  if host == 'localhost':
    return True
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return False


def read_key(file: str | None, where: str) -> str | None:
  """Returns the bearer token, which is the first word in a file; None if `file` is None.

  Args:
    file: path of the file.
    where: field or flag that names the file, for the error message.
  """
  if file is None:
    return None
  try:
    lines = pathlib.Path(file).read_text().split()
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f'{where}: {file}: cannot be read ({error})') from None
  if not lines:
    raise UserError(f'{where}: {file} is empty, wanted the token in its first line')
  return lines[0]


def certificates(ca_file: str | None, where: str) -> ssl.SSLContext:
  """Returns a TLS context that verifies servers with the CA certificates in `ca_file`.

  If `ca_file` is None, the system's certificates are used.
  """
  try:
    return ssl.create_default_context(cafile=ca_file)
  except OSError as error:
    raise UserError(
      f'{where}: ca_file {ca_file}: the certificates cannot be read ({error})'
    ) from None
