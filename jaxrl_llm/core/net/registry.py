"""Registry: a directory through which the services of a job find each other.

Each service has a lease: a file in the directory that describes the service. The service renews the
lease every few seconds and removes it when the service ends. The directory also contains the job's
key, which all services share: leases are signed with the key, and fronts require it as their bearer
token.

Invariants: a directory or file that other users can access is rejected (the modes must be 700 and
600). A lease is valid only if it was signed with the job's key for its own file name; an invalid
lease is skipped and logged. Expiry does not depend on the clocks of other hosts: a lease expires by
the clock of its reader, `lease_s` after the reader last saw the lease change. The key is not sent
to an address to which it would cross a network unencrypted, unless `allow_plaintext` is set.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import errno
import hashlib
import hmac
import json
import math
import os
import pathlib
import platform
import re
import secrets
import stat
import threading
import time
import urllib.parse
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from absl import logging

from jaxrl_llm.core.errors import RunError, UserError, one_line
from jaxrl_llm.core.files import parse_json
from jaxrl_llm.core.net.connections import check_address, is_loopback

KEY = 'key'
"""Name of the file with the key, in the registry's directory."""
RENEW_S = 5.0
"""Seconds between renewals of a lease."""
LEASE_S = 90.0
"""Default number of seconds without a renewal after which a lease expires. An NFS client may show
an outdated directory for 60 s, so the number must be larger than that.
"""
LOOK_S = 1.0
"""Seconds between two scans of the directory by a reader."""
_SCHEMA = 1
_SUFFIX = '.lease'
_MAX_FILE_BYTES, _MAX_KEY_BYTES = 16 << 10, 4096
_MAX_FILES = 4096
"""Maximum number of leases of one kind of service that a reader considers."""
_MAX_ADDRESS, _MAX_ENTRIES, _MAX_VALUE = 512, 16, 256
"""Maximum number of characters in an address, of entries in a fingerprint, and of characters in the
key or value of an entry.
"""
_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]{0,99}')
_FILE = re.compile(r'([a-z]+)\.([0-9a-f]{32})\.lease')
_KEY = re.compile(r'[\x21-\x7e]{16,4096}')
_MOST_AT_ONCE = 0.25
"""Maximum age that a lease can gain between two scans, as a fraction of `lease_s`. Without this
limit, a reader that was suspended for a while would consider every service dead.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegistryConfig:
  """Configuration of the directory through which the services of a job find each other."""

  directory: str | None = None
  """Directory (mode 700) on a file system that all hosts of the job share; if None, `registry` in
  the run directory. If the directory does not exist, it is created, together with the job's key.
  """
  lease_s: float = LEASE_S
  """Seconds without a renewal after which a service is considered dead. Services renew their leases
  every 5 s. On NFS, the value should exceed 60 s, because a client may show an outdated directory
  for that long.
  """
  allow_plaintext: bool = False
  """Whether the key may be sent unencrypted to http addresses of other hosts. Set this only if the
  network is trusted.
  """

  def __post_init__(self):
    if not self.lease_s >= 3 * RENEW_S:
      raise UserError(
        f'registry.lease_s: {self.lease_s:g}, wanted at least {3 * RENEW_S:g}, since services '
        f'renew every {RENEW_S:g} s'
      )

  def open(self, workdir: pathlib.Path) -> Registry:
    """Opens the registry of the run in `workdir`. Raises UserError if it cannot be used."""
    return Registry(
      workdir / 'registry' if self.directory is None else self.directory,
      'registry.directory',
      lease_s=self.lease_s,
      allow_plaintext=self.allow_plaintext,
    )


class Kind(enum.StrEnum):
  """Role of a service in its job."""

  VLLM = 'vllm'
  """A vLLM server that samples from the policy."""
  REWARD = 'reward'
  """A reward model, for scorers of kind `http`."""
  SANDBOX = 'sandbox'
  """A sandbox host, for scorers of kind `code`."""
  JUDGE = 'judge'
  """A vLLM server that serves a model other than the policy, for scorers of kind `judge`."""
  EXPLORER = 'explorer'
  """An explorer process, to which no other process connects."""
  MASTER = 'master'
  """A run that hands out groups of samples to explorers, which generate them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lease:
  """Description of a service, which the service itself publishes."""

  id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(16))
  """Identifier in the name of the lease's file. A restarted service gets a new identifier."""
  kind: Kind
  name: str
  """Human-readable name of letters, digits, '.', '_' and '-'."""
  address: str = ''
  """Address `unix:/path`, `http://host:port` or `https://host:port`; empty for explorers."""
  fingerprint: Mapping[str, str] = dataclasses.field(default_factory=dict)
  """Digests that identify the served content, keyed by part, such as 'model' and 'tokenizer'."""
  host: str = dataclasses.field(default_factory=platform.node)
  pid: int = dataclasses.field(default_factory=os.getpid)
  started: float = dataclasses.field(default_factory=time.time)
  """Time of registration in seconds since 1970, by the clock of the service's host."""
  renewed: float = 0.0
  """Time of the last renewal in seconds since 1970, by the clock of the service's host."""

  def __post_init__(self):
    where = f'lease {self.name!r:.120}'
    if not is_name(self.name):
      raise UserError(
        f"{where}: wanted a name of at most 100 letters, digits, '.', '_' and '-', beginning with "
        'a letter or digit'
      )
    if self.address or self.kind != Kind.EXPLORER:
      _check_service_address(self.address, where)

  @property
  def file(self) -> str:
    return f'{self.kind}.{self.id}{_SUFFIX}'

  def unreachable(self, *, allow_plaintext: bool = False) -> str | None:
    """Returns the reason why this process must not connect to the address; None if it may
    connect.
    """
    host = _host_of(self.address)
    if (host is None or is_loopback(host)) and self.host != platform.node():
      return f'{self.address} can be reached only from {self.host}; serve it with --host'
    if host is not None and not (
      self.address.startswith('https:') or is_loopback(host) or allow_plaintext
    ):
      return (
        f'{self.address} would get the key in plain text; serve it with --tls_cert, or set '
        'allow_plaintext if the network is trusted'
      )
    return None


def is_name(name: str) -> bool:
  """Returns whether a lease can have this name."""
  return _NAME.fullmatch(name) is not None


def service_name(name: str) -> str:
  """Returns a name for a lease, made of this host's name and `name`.

  Characters that are not allowed in the names of leases become hyphens.
  """
  words = f'{platform.node().partition(".")[0]}-{name}'
  return re.sub(r'[^A-Za-z0-9._-]+', '-', words).strip('.-_')[:100] or 'service'


def public_address(address: str) -> str:
  """Returns the address at which other hosts reach a front.

  If the front listens on all interfaces, the host in the address becomes this host's name.
  """
  parts = urllib.parse.urlsplit(address)
  if parts.hostname not in ('0.0.0.0', '::'):
    return address
  return parts._replace(netloc=f'{platform.node()}:{parts.port}').geturl()


def _check_service_address(address: str, where: str) -> None:
  if len(address) > _MAX_ADDRESS or not address.isprintable() or ' ' in address:
    raise UserError(
      f'{where}: address {address!r:.80}, wanted at most {_MAX_ADDRESS} printable characters'
    )
  check_address(address, where)
  if address.startswith('unix:'):
    return
  wanted = 'wanted http(s)://HOST:PORT without user, query or fragment'
  try:
    parts = urllib.parse.urlsplit(address)
    complete = parts.hostname and parts.port
  except ValueError:
    complete = False
  if not complete or parts.query or parts.fragment or '@' in parts.netloc or '\\' in address:
    raise UserError(f'{where}: address {address!r}, {wanted}')


def _host_of(address: str) -> str | None:
  """Returns the host of an http(s) address; None for a unix socket."""
  return None if address.startswith('unix:') else urllib.parse.urlsplit(address).hostname


class Registry:
  """Registry of one job. Its methods may block, since they access a file system."""

  def __init__(
    self,
    directory: str | os.PathLike,
    where: str,
    *,
    lease_s: float = LEASE_S,
    allow_plaintext: bool = False,
  ):
    """Opens the directory. Creates the directory and the job's key if they do not exist yet.

    Args:
      directory: path on a file system that all hosts of the job share.
      where: flag or field that names the directory, for error messages.
      lease_s: seconds without a renewal after which a lease expires.
      allow_plaintext: whether the key may be sent to http addresses of other hosts.

    Raises:
      UserError: the directory or key cannot be used, or other users can access it.
    """
    self.directory, self._where = pathlib.Path(directory).expanduser().absolute(), where
    self.key_file = create_key(self.directory, where)
    self.key = read_job_key(self.directory, where)
    self.lease_s, self.allow_plaintext = lease_s, allow_plaintext

  def put(self, lease: Lease) -> None:
    """Writes or renews a lease.

    Raises UserError if the directory cannot be used, and OSError if the file cannot be written.
    """
    body = dataclasses.asdict(dataclasses.replace(lease, renewed=time.time()))
    text = json.dumps({'schema': _SCHEMA, 'lease': body, 'signature': self._sign(body)})
    with _opened(self.directory, self._where) as folder:
      _replace(folder, lease.file, text.encode())

  def remove(self, lease: Lease) -> None:
    """Removes a lease if its file still exists. Raises the same errors as `put`."""
    with _opened(self.directory, self._where) as folder, contextlib.suppress(FileNotFoundError):
      os.unlink(lease.file, dir_fd=folder)

  def remove_dead(self, lease: Lease) -> None:
    """Removes leases that earlier, killed processes of the same service left behind: leases with
    the kind, name and host of `lease` whose process no longer runs. Leases that cannot be read or
    removed stay.

    Raises the same errors as `put` if the registry's directory cannot be opened.
    """
    with _opened(self.directory, self._where) as folder:
      for file in _files(folder, lease.kind):
        with contextlib.suppress(OSError, ValueError, UserError):
          other = self.read(folder, file)
          same = (other.name, other.host) == (lease.name, lease.host)
          if same and not _is_running(other.pid):
            os.unlink(file, dir_fd=folder)

  def _sign(self, body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(',', ':'))
    return hmac.new(self.key.encode(), text.encode(), hashlib.sha256).hexdigest()

  def read(self, folder: int, file: str) -> Lease:
    """Reads a lease from the directory whose open descriptor is `folder`.

    Raises ValueError, UserError or OSError unless the file contains a lease that was signed with
    the job's key.
    """
    said = parse_json(_read_own(folder, file, _MAX_FILE_BYTES).decode())
    if not isinstance(said, dict) or said.get('schema') != _SCHEMA:
      raise ValueError(f'no lease of schema {_SCHEMA}; another version may have written it')
    body, signature = said.get('lease'), said.get('signature')
    if not isinstance(body, dict) or not isinstance(signature, str):
      raise ValueError('no lease with a signature')
    if not hmac.compare_digest(signature.encode('utf-8', 'replace'), self._sign(body).encode()):
      raise ValueError("not signed with the job's key")
    lease = _lease(body)
    if lease.file != file:
      raise ValueError(f'signed as {lease.file}')
    return lease


def create_key(directory: str | os.PathLike, where: str = 'registry') -> pathlib.Path:
  """Creates the registry's directory and the job's key if they do not exist; returns the key's
  path.

  If several processes call this function at the same time, one of them creates the key, and all use
  that key.

  Raises:
    UserError: the directory cannot be created, or other users can access it.
  """
  path = pathlib.Path(directory).expanduser().absolute()
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
      path.mkdir(mode=0o700)
    with _opened(path, where) as folder:
      if not _exists(folder, KEY):
        # The file gets its name once it is complete, so no process reads a half-written key.
        unfinished = f'.{KEY}.{secrets.token_hex(8)}'
        _write(folder, unfinished, f'{secrets.token_urlsafe(32)}\n'.encode())
        try:
          with contextlib.suppress(FileExistsError):
            os.link(unfinished, KEY, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        finally:
          os.unlink(unfinished, dir_fd=folder)
  except OSError as error:
    raise UserError(
      f'{where}: {path}: cannot be used as a registry ({error.strerror}); name a directory that '
      'this user can write'
    ) from None
  return path / KEY


def read_job_key(directory: pathlib.Path, where: str) -> str:
  """Returns the job's key.

  Raises UserError if the key's file is missing or malformed, or other users can access it.
  """
  path = directory / KEY
  remedy = f'remove {directory}, and the job will create a new one'
  with _opened(directory, where) as folder:
    try:
      text = _read_own(folder, KEY, _MAX_KEY_BYTES).decode('ascii')
    except (OSError, ValueError) as error:
      raise UserError(f'{where}: {path}: {_reason(error)}; chmod 600 it, or {remedy}') from None
  key = text.strip()
  if not _KEY.fullmatch(key):
    raise UserError(
      f'{where}: {path}: {len(key)} characters, wanted 16 to 4096 of visible ASCII without '
      f'spaces; {remedy}'
    )
  return key


@contextlib.contextmanager
def _opened(directory: pathlib.Path, where: str) -> Iterator[int]:
  """Opens and checks the directory; yields its descriptor.

  Callers open files relative to the descriptor, so replacing the directory after the check has no
  effect. Raises UserError if the directory cannot be opened or other users can access it.
  """
  try:
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
  except OSError as error:
    raise UserError(
      f'{where}: {directory}: cannot be opened ({error.strerror}); wanted a directory of mode 700, '
      'not a link'
    ) from None
  try:
    status = os.fstat(folder)
    if status.st_uid != os.getuid():
      raise UserError(
        f'{where}: {directory}: belongs to user {status.st_uid}, not to this user '
        f'({os.getuid()}); name a directory of your own'
      )
    if status.st_mode & 0o077:
      raise UserError(
        f'{where}: {directory} has mode {status.st_mode & 0o777:o}, and others can enter it; '
        'chmod 700 it'
      )
    yield folder
  finally:
    os.close(folder)


def _files(folder: int, kind: Kind) -> list[str]:
  """Returns the sorted file names of at most `_MAX_FILES` leases of services of the given kind."""
  names = []
  with os.scandir(folder) as entries:
    for entry in entries:
      match = _FILE.fullmatch(entry.name)
      if match and match[1] == kind:
        names.append(entry.name)
        if len(names) == _MAX_FILES:
          break
  return sorted(names)


def _check_own(status: os.stat_result, limit_bytes: int) -> None:
  """Raises ValueError unless `status` describes a regular file of at most `limit_bytes` that only
  this user can access.
  """
  if not stat.S_ISREG(status.st_mode):
    raise ValueError('is not a regular file')
  if status.st_uid != os.getuid():
    raise ValueError(f'belongs to user {status.st_uid}, not to this user ({os.getuid()})')
  if status.st_mode & 0o077:
    raise ValueError(f'has mode {status.st_mode & 0o777:o}, and others can use it')
  if status.st_size > limit_bytes:
    raise ValueError(f'has {status.st_size:,} bytes, wanted at most {limit_bytes:,}')


def _read_own(folder: int, file: str, limit_bytes: int) -> bytes:
  """Reads a file in the directory whose open descriptor is `folder`.

  Raises ValueError if `_check_own` rejects the file, and OSError if the file cannot be read.
  """
  # Open the file without blocking, in case it is a FIFO.
  flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
  with open(os.open(file, flags, dir_fd=folder), 'rb') as opened:
    _check_own(os.fstat(opened.fileno()), limit_bytes)
    return opened.read(limit_bytes)


def _write(folder: int, file: str, data: bytes) -> None:
  flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
  with open(os.open(file, flags, 0o600, dir_fd=folder), 'wb') as opened:
    os.fchmod(opened.fileno(), 0o600)
    opened.write(data)
    opened.flush()
    os.fsync(opened.fileno())


def _replace(folder: int, file: str, data: bytes) -> None:
  unfinished = f'.{file}.{secrets.token_hex(4)}'
  try:
    _write(folder, unfinished, data)
    os.rename(unfinished, file, src_dir_fd=folder, dst_dir_fd=folder)
  except BaseException:
    with contextlib.suppress(OSError):
      os.unlink(unfinished, dir_fd=folder)
    raise


def _exists(folder: int, file: str) -> bool:
  try:
    os.stat(file, dir_fd=folder, follow_symlinks=False)
  except FileNotFoundError:
    return False
  return True


def _is_running(pid: int) -> bool:
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  except OSError:
    pass
  return True


def _reason(error: Exception) -> str:
  if isinstance(error, OSError):
    return 'is a link' if error.errno == errno.ELOOP else error.strerror or str(error)
  return one_line(error)


_FIELDS = {field.name for field in dataclasses.fields(Lease)}


def _lease(body: Mapping[str, Any]) -> Lease:
  """Builds a lease from JSON. Raises ValueError or UserError if it is malformed."""
  if set(body) != _FIELDS:
    raise ValueError(f'fields {one_line(sorted(body), 100)}, wanted {sorted(_FIELDS)}')
  texts = {name: body[name] for name in ('id', 'kind', 'name', 'address', 'host')}
  if not all(isinstance(text, str) and len(text) <= _MAX_ADDRESS for text in texts.values()):
    raise ValueError('id, kind, name, address and host are not all short texts')
  fingerprint, pid = body['fingerprint'], body['pid']
  if (
    not isinstance(fingerprint, dict)
    or len(fingerprint) > _MAX_ENTRIES
    or not all(isinstance(of, str) and len(of) <= _MAX_VALUE for of in fingerprint.values())
    or not all(len(name) <= _MAX_VALUE for name in fingerprint)
  ):
    raise ValueError(f'fingerprint is not an object of at most {_MAX_ENTRIES} short texts')
  times = (body['started'], body['renewed'])
  if type(pid) is not int or not 0 < pid < 1 << 31:
    raise ValueError('pid is not a process id')
  if not all(type(t) in (int, float) and abs(t) < 1e12 and math.isfinite(t) for t in times):
    raise ValueError('started and renewed are not times in seconds')
  return Lease(**{**body, 'kind': Kind(body['kind'])})


@contextlib.asynccontextmanager
async def registered(registry: Registry, *leases: Lease) -> AsyncIterator[None]:
  """Registers services during the block.

  Writes their leases, renews them every `RENEW_S` seconds, and removes them after the block.

  Raises:
    UserError: the registry's directory cannot be used.
    RunError: a lease cannot be written at the start. Later failures are logged, and the next
      renewal tries again.
  """
  try:
    for lease in leases:
      await asyncio.to_thread(registry.remove_dead, lease)
      await asyncio.to_thread(registry.put, lease)
  except OSError as error:
    raise RunError(
      f'{registry.directory}: a lease cannot be written ({error.strerror}); free disk space, or '
      'make the directory writable'
    ) from None
  for lease in leases:
    logging.info('registry %s: registered %s %s', registry.directory, lease.kind, lease.name)
  renewing = asyncio.create_task(_renew(registry, leases))
  try:
    yield
  finally:
    renewing.cancel()
    # Wait for the last renewal, which may still run in its thread. If it ended after the removal of
    # its lease, it would write the lease again.
    await asyncio.gather(renewing, return_exceptions=True)
    for lease in leases:
      with contextlib.suppress(OSError, UserError):
        registry.remove(lease)


async def _renew(registry: Registry, leases: tuple[Lease, ...]) -> None:
  failures = 0
  while True:
    await asyncio.sleep(RENEW_S)
    for lease in leases:
      writing = asyncio.ensure_future(asyncio.to_thread(registry.put, lease))
      try:
        await asyncio.shield(writing)
        failures = 0
      except asyncio.CancelledError:
        await asyncio.gather(writing, return_exceptions=True)
        raise
      except (OSError, UserError) as error:
        failures += 1
        if failures & (failures - 1) == 0:  # True for the 1st, 2nd, 4th, 8th, … failure in a row.
          logging.warning(
            'registry %s: lease %s was not renewed (%d times so far): %s',
            *(registry.directory, lease.name, failures, _reason(error)),
          )


@dataclasses.dataclass
class _Seen:
  """A reader's knowledge of one lease file."""

  state: tuple[int, ...]
  """Times, inode and size of the file. Each renewal changes at least one of them."""
  lease: Lease | None
  """Lease in the file; None if the file contains no lease that this reader accepts."""
  order: tuple[int, float]
  """Number of the scan in which the reader first saw the file, and the start time in the lease.
  Leases are sorted by this pair.
  """
  age_s: float = 0.0
  """Seconds since the reader last saw the lease change. An interval between two scans adds at most
  `_MOST_AT_ONCE` × `lease_s`.
  """


class Watch:
  """One reader's view of the services of one kind.

  Attributes:
    expired: addresses of services whose leases have expired, although the files of the leases still
      exist.
  """

  def __init__(self, registry: Registry, kind: Kind):
    self.registry = registry
    self.expired: frozenset[str] = frozenset()
    self._kind, self._lease_s = kind, registry.lease_s
    self._lock = threading.Lock()
    self._seen: dict[str, _Seen] = {}
    self._looks = 0
    self._last: float | None = None
    self._leases: tuple[Lease, ...] = ()
    self._failures = 0

  def look(self, now: float) -> tuple[Lease, ...]:
    """Scans the directory and returns the valid leases that have not expired, oldest first.

    Of several leases for one address, only the newest is returned. This method never raises: errors
    are logged. While the directory cannot be read, the last successful scan's result is returned.

    Args:
      now: time of the reader's clock in seconds; it must not decrease from call to call.
    """
    # The lock is necessary because a scan continues in its thread if the caller of `look_async` is
    # cancelled, and may overlap the next scan.
    with self._lock:
      return self._look(now)

  def _look(self, now: float) -> tuple[Lease, ...]:
    gap = 0.0 if self._last is None else min(now - self._last, _MOST_AT_ONCE * self._lease_s)
    self._last = now
    try:
      with _opened(self.registry.directory, 'registry') as folder:
        self._scan(folder, gap)
      self._failures = 0
    except (OSError, UserError) as error:
      self._failures += 1
      if self._failures & (self._failures - 1) == 0:
        logging.warning(
          'registry %s: cannot be read (%d times so far): %s',
          *(self.registry.directory, self._failures, _reason(error)),
        )
      return self._leases
    known = sorted(self._seen.values(), key=lambda seen: seen.order)
    live = [seen.lease for seen in known if seen.lease and seen.age_s <= self._lease_s]
    newest = {lease.address or lease.id: lease for lease in live}
    self._leases = tuple(newest.values())
    old = {seen.lease.address for seen in known if seen.lease}
    self.expired = frozenset(address for address in old if address and address not in newest)
    return self._leases

  async def look_async(self) -> tuple[Lease, ...]:
    """Calls `look` in a thread, with the time of the event loop's clock."""
    return await asyncio.to_thread(self.look, asyncio.get_running_loop().time())

  def _scan(self, folder: int, gap: float) -> None:
    files, refused = _files(folder, self._kind), []
    self._looks += 1
    self._seen = {file: seen for file, seen in self._seen.items() if file in set(files)}
    for file in files:
      try:
        status = os.stat(file, dir_fd=folder, follow_symlinks=False)
      except FileNotFoundError:  # The file was removed after the scan began.
        self._seen.pop(file, None)
        continue
      state = (status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size)
      seen = self._seen.get(file)
      if seen is not None and seen.state == state:
        seen.age_s += gap
        continue
      lease, reason = self._accepted(folder, file)
      if reason and (seen is None or seen.lease is not None):
        refused.append(f'{file}: {reason}')
      if seen is None:
        order = (self._looks, lease.started if lease else 0.0)
        seen = self._seen[file] = _Seen(state, lease, order)
      # If the file has changed but its lease has not, for example because only the file's times
      # changed, the lease was not renewed and its age increases.
      seen.age_s = 0.0 if lease != seen.lease else seen.age_s + gap
      seen.state, seen.lease = state, lease
    if refused:
      more = f' (and {len(refused) - 1} other files)' if len(refused) > 1 else ''
      logging.warning(
        'registry %s: skipped %s%s', self.registry.directory, one_line(refused[0], 600), more
      )

  def _accepted(self, folder: int, file: str) -> tuple[Lease | None, str]:
    """Returns (lease, '') if the reader accepts the file, otherwise (None, reason).

    The reason is empty if the file no longer exists.
    """
    try:
      lease = self.registry.read(folder, file)
    except FileNotFoundError:
      return None, ''
    except (OSError, ValueError, UserError) as error:
      return None, _reason(error)
    if not lease.address:
      return lease, ''
    reason = lease.unreachable(allow_plaintext=self.registry.allow_plaintext)
    return (None, f'{lease.name}: {reason}') if reason else (lease, '')
