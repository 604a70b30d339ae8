"""Flags shared by the services of `jaxrl serve`: where they listen, and where they register."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import AsyncIterator, Mapping, Sequence

from absl import flags

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.registry import (
  Kind,
  Lease,
  Registry,
  is_name,
  public_address,
  registered,
  service_name,
)
from jaxrl_llm.core.net.token_server import FrontConfig


def define_listening(values: flags.FlagValues) -> None:
  """Defines the flags that determine where a service listens and whom it admits, and the flags of
  `define_registering`.
  """
  flags.DEFINE_string(
    'host', None, 'Address to listen on; default: a unix socket of this user.', flag_values=values
  )
  flags.DEFINE_integer('port', 0, 'Port to listen on; 0 = a free port.', flag_values=values)
  flags.DEFINE_string(
    'token_file',
    None,
    "Bearer token file (mode 600), required with --host; default: the registry's key.",
    flag_values=values,
  )
  flags.DEFINE_string('tls_cert', None, 'TLS certificate, PEM.', flag_values=values)
  flags.DEFINE_string('tls_key', None, 'Private key of the certificate, PEM.', flag_values=values)
  flags.DEFINE_bool(
    'allow_plaintext', False, 'Allow non-loopback addresses without TLS.', flag_values=values
  )
  flags.DEFINE_string(
    'addresses_file',
    None,
    'File for a JSON list with the address, written once ready.',
    flag_values=values,
  )
  define_registering(values)


def define_registering(values: flags.FlagValues) -> None:
  """Defines the flags with which a service registers in a registry."""
  flags.DEFINE_string(
    'registry',
    None,
    "Directory in which the job's services find each other; created, with the job's key, if it "
    'does not exist.',
    flag_values=values,
  )
  flags.DEFINE_string(
    'name', None, 'Name in the registry; default: the host name.', flag_values=values
  )


def open_registry(
  directory: str | None, name: str | None, *, allow_plaintext: bool = False
) -> Registry | None:
  """Opens the registry that --registry names; returns None without the flag.

  Raises:
    UserError: the directory or --name cannot be used.
  """
  if directory is None:
    return None
  if name is not None and not is_name(name):
    raise UserError(
      f"--name={name}: wanted at most 100 letters, digits, '.', '_' and '-', beginning with a "
      'letter or digit'
    )
  return Registry(directory, '--registry', allow_plaintext=allow_plaintext)


def lease_of(
  kind: Kind, address: str, name: str | None, fingerprint: Mapping[str, str] | None = None
) -> Lease:
  """Returns the lease of a service: the description with which it registers in a registry.

  Args:
    address: address at which the service listens.
    name: value of --name. If None, the name is made from the kind and the host.
  """
  return Lease(
    kind=kind,
    name=name or service_name(kind),
    address=public_address(address),
    fingerprint=fingerprint or {},
  )


@contextlib.asynccontextmanager
async def registering(registry: Registry | None, *leases: Lease) -> AsyncIterator[None]:
  """Registers services during the block. Each lease describes one service.

  Does nothing if there is no registry.
  """
  if registry is None:
    yield
    return
  async with registered(registry, *leases):
    yield


def read_front(values: flags.FlagValues, registry: Registry | None) -> FrontConfig | None:
  """Returns the configuration of the front, the HTTP server through which other hosts reach a
  service, as described by the flags.

  Returns None without --host; then only processes of this user can connect to the service.
  """
  check_addresses_file(values.addresses_file)
  if not values.host:
    return None
  names = ('host', 'port', 'tls_cert', 'tls_key', 'allow_plaintext')
  token_file = token_of(values.token_file, registry)
  return FrontConfig(token_file=token_file, **{name: values[name].value for name in names})


def token_of(token_file: str | None, registry: Registry | None) -> str:
  """Returns the path of the file with the token that a front requires of its clients: `token_file`,
  or else the file with the registry's key.
  """
  if token_file:
    return token_file
  if registry is None:
    raise UserError(
      '--token_file is missing: with --host, a front requires a token from every client; name a '
      'file with the token, or a --registry, whose key is the token'
    )
  return str(registry.key_file)


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
