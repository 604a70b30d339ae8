"""The flags by which a service of `launch/serve.py` is told where to listen."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

from absl import flags

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.front import FrontConfig


def define_listening(values: flags.FlagValues) -> None:
  """Defines them."""
  flags.DEFINE_string('host', None, 'Address to listen on; none: a unix socket of this user.', flag_values=values)
  flags.DEFINE_integer('port', 0, 'Port of it; 0 = a free one.', flag_values=values)
  flags.DEFINE_string('token_file', None, 'File with the bearer token (mode 600), with --host.', flag_values=values)
  flags.DEFINE_string('tls_cert', None, 'Certificate, PEM.', flag_values=values)
  flags.DEFINE_string('tls_key', None, "The certificate's key, PEM.", flag_values=values)
  flags.DEFINE_bool('allow_plaintext', False, 'No TLS on addresses other than loopback.', flag_values=values)
  flags.DEFINE_string('addresses_file', None, 'Written once it serves: a JSON list of its address.', flag_values=values)


def read_front(values: flags.FlagValues) -> FrontConfig | None:
  """What they say; None: only this user's processes may come."""
  check_addresses_file(values.addresses_file)
  if not values.host:
    return None
  if not values.token_file:
    raise UserError('--token_file is missing: with --host a front asks everybody for its token')
  names = ('host', 'port', 'token_file', 'tls_cert', 'tls_key', 'allow_plaintext')
  return FrontConfig(**{name: values[name].value for name in names})


def check_addresses_file(file: str | None) -> None:
  """Raises UserError where it could not be written."""
  if file and not pathlib.Path(file).absolute().parent.is_dir():
    raise UserError(f'{file}: --addresses_file lies in no directory; make it, or name another place')


def write_addresses(file: str | None, addresses: Sequence[str]) -> None:
  """Whole, or not at all."""
  if file:
    unfinished = pathlib.Path(f'{file}.tmp')
    unfinished.write_text(json.dumps([*addresses]))
    unfinished.rename(file)
