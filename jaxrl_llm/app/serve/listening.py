"""Listener flags shared by the services of `jaxrl serve`."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

from absl import flags

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.front import FrontConfig


def define_listening(values: flags.FlagValues) -> None:
  """Registers the listener flags."""
  flags.DEFINE_string(
    'host', None, 'Address to listen on; default: a unix socket of this user.', flag_values=values
  )
  flags.DEFINE_integer('port', 0, 'Port to listen on; 0 = a free port.', flag_values=values)
  flags.DEFINE_string(
    'token_file', None, 'Bearer token file (mode 600), required with --host.', flag_values=values
  )
  flags.DEFINE_string('tls_cert', None, 'TLS certificate, PEM.', flag_values=values)
  flags.DEFINE_string('tls_key', None, 'Private key of the certificate, PEM.', flag_values=values)
  flags.DEFINE_bool(
    'allow_plaintext', False, 'Allow non-loopback addresses without TLS.', flag_values=values
  )
  flags.DEFINE_string(
    'addresses_file', None, 'JSON list of the address, written once ready.', flag_values=values
  )


def read_front(values: flags.FlagValues) -> FrontConfig | None:
  """Returns the configuration of the front that the flags describe; None without --host, where only
  this user's processes can connect.
  """
  check_addresses_file(values.addresses_file)
  if not values.host:
    return None
  if not values.token_file:
    raise UserError('--token_file is missing: with --host a front requires a token of every client')
  names = ('host', 'port', 'token_file', 'tls_cert', 'tls_key', 'allow_plaintext')
  return FrontConfig(**{name: values[name].value for name in names})


def check_addresses_file(file: str | None) -> None:
  """Raises UserError if the directory of `file` does not exist."""
  if file and not pathlib.Path(file).absolute().parent.is_dir():
    raise UserError(
      f'{file}: the directory of --addresses_file does not exist; create it, or name another'
    )


def write_addresses(file: str | None, addresses: Sequence[str]) -> None:
  """Writes `addresses` to `file` atomically as a JSON list; does nothing without a file."""
  if file:
    unfinished = pathlib.Path(f'{file}.tmp')
    unfinished.write_text(json.dumps([*addresses]))
    unfinished.rename(file)
