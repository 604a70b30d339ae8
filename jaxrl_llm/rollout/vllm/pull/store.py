"""Store of published weights on a host that serves models. On the trainer's order, the store
fetches bundles over HTTP from the trainer and from the stores of other hosts, and passes them on to
these.

Invariant: a byte is passed on, and a bundle is reported as complete, only after its digest was
verified. A bundle that is not complete has a directory that no server is told to load.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import pathlib
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Mapping

import xxhash
from aiohttp import web

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.client import Client, Lost, Malformed, RemoteError
from jaxrl_llm.core.net.front import Handler
from jaxrl_llm.core.net.server import SERVER, Refusal, begin_upload, parse_object
from jaxrl_llm.rollout.vllm.pull.bundle import Bundle, FilePiece
from jaxrl_llm.rollout.vllm.pull.orders import PULL_PATH, FetchOrder, Provider
from jaxrl_llm.rollout.vllm.pull.ranges import (
  WEIGHTS_PATH,
  FileRange,
  read_range,
  send_nothing,
  send_range,
)
from jaxrl_llm.weights.tensor_files import write_at

_MAX_ORDER_BYTES = 64 << 20
_AT_ONCE = 4
"""Number of pieces that a store fetches from the trainer at the same time."""
_PATIENCE_S = 60.0
"""Seconds after which a piece is given up if none of its providers sends it."""
_PAUSE_S = 1.0
"""Seconds between two rounds, in each of which every provider of a piece is asked."""
_WAIT_S = 5.0
"""Seconds after which a store tells another store, which waits for a piece, to ask again. The other
store thus knows that this store works.
"""
_UNKNOWN_S = 10.0
"""Maximum seconds for which a store lets another store wait until the trainer orders the bundle."""
_SILENCE_S = 30.0
"""Seconds without a byte after which a fetch from a provider is given up."""
_LATER = 503
"""HTTP status of the answer to ask again."""
_REACH_S = 10.0
"""Deadline in seconds of the check whether the trainer can be reached."""
_MAX_ANSWER_BYTES = 1 << 16
_log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Holding:
  """A bundle that this host has, or is fetching."""

  bundle: Bundle
  directory: pathlib.Path
  """Directory of the files, under its final name once the bundle is complete."""
  verified: dict[str, bytearray]
  """For each atom of each file, keyed by file name, whether it is on this host and verified."""
  changed: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
  """Set, and replaced by another event, when a piece arrives."""
  fetching: asyncio.Task[None] | None = None
  is_complete: bool = False

  def has(self, asked: FileRange) -> bool:
    """Returns whether a range is verified. Raises Refusal if it is not within a file."""
    file = self.bundle.file(asked.file)
    if file is None or asked.stop > file.size:
      raise Refusal(404, f'bundle {self.bundle.id} has no such range of {asked.file}')
    verified = self.verified[asked.file]
    return all(verified[i] for i in file.covering(asked.start, asked.stop))

  @property
  def missing_bytes(self) -> int:
    """Number of bytes that are not verified yet."""
    return sum(
      file.stop(i) - atom.start
      for file in self.bundle.files
      for i, atom in enumerate(file.atoms)
      if not self.verified[file.name][i]
    )

  @property
  def is_present(self) -> bool:
    """Whether all files still exist."""
    return all((self.directory / file.name).is_file() for file in self.bundle.files)

  def notify(self) -> None:
    self.changed.set()
    self.changed = asyncio.Event()


@dataclasses.dataclass
class _Arrival:
  """Progress of a piece that is being fetched."""

  position: int
  """Position in the file of the next byte to arrive."""


class _Fault(Exception):
  """Raised when a provider sent bytes that do not have the announced digest."""


class Store:
  """Store of one `jaxrl serve` process. The fronts of its servers pass the store's requests to
  `handlers`.
  """

  def __init__(
    self,
    root: pathlib.Path,
    *,
    key: str | None,
    ca_file: str | None = None,
    allow_plaintext: bool = False,
  ):
    """
    Args:
      root: directory in memory that all servers of this user on this host can read. It is created.
      key: bearer token of the trainer and of the other stores.
      ca_file: CA certificates for their https addresses; see `connections.certificates`.
      allow_plaintext: whether the token may cross a network unencrypted.

    Raises:
      UserError: the directory cannot be created, or another user could write to it.
    """
    self.root = root
    _create_private(root)
    self.directory = root / secrets.token_hex(8)
    """Directory of this store's bundles."""
    self.directory.mkdir(mode=0o700)
    self._key, self._ca_file, self._allow_plaintext = key, ca_file, allow_plaintext
    self._clients: dict[str, Client] = {}
    self._holdings: dict[str, _Holding] = {}
    self._trainer, self._number = '', 0
    """Trainer of the last order, and the largest number of its orders so far."""
    self._ordered = asyncio.Event()
    """Set, and replaced by another event, when an order arrives."""

  @property
  def handlers(self) -> Mapping[tuple[str, str], Handler]:
    """Handlers of the store's requests, keyed by (method, path)."""
    return {
      ('GET', PULL_PATH): self._describe,
      ('POST', PULL_PATH): self._pull,
      ('GET', WEIGHTS_PATH): self._send,
    }

  async def close(self) -> None:
    """Aborts what is being fetched, and removes all bundles."""
    tasks = [holding.fetching for holding in self._holdings.values() if holding.fetching]
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    self._holdings.clear()
    await asyncio.gather(*(client.close() for client in self._clients.values()))
    await asyncio.to_thread(shutil.rmtree, self.directory, True)

  async def _describe(self, request: web.BaseRequest) -> web.StreamResponse:
    """Responds with the name of the memory that the servers of this host share, and the id of this
    store.
    """
    boot = pathlib.Path('/proc/sys/kernel/random/boot_id').read_text().strip()
    status = self.root.stat()  # Containers of one host have different file systems.
    host = f'{boot}-{status.st_dev}-{status.st_ino}'
    return web.json_response({'host': host, 'store': self.directory.name}, headers=SERVER)

  async def _pull(self, request: web.BaseRequest) -> web.StreamResponse:
    """Fetches the bundles of an order, and responds with their directories once all are there."""
    body = parse_object(await (await begin_upload(request, _MAX_ORDER_BYTES)).read())
    try:
      order = FetchOrder.from_json(body, allow_plaintext=self._allow_plaintext)
    except ValueError as error:
      raise Refusal(400, f'order refused: {error}') from None
    if not order.bundles:
      await self._check_reachable(order.sources)
    began = time.monotonic()
    if order.trainer != self._trainer or order.number >= self._number:
      self._trainer, self._number = order.trainer, order.number
      await self._release(order.keep.union(bundle.id for bundle in order.bundles))
    holdings = [self._holding(bundle) for bundle in order.bundles]
    self._ordered.set()
    self._ordered = asyncio.Event()
    self._check_space(holdings)
    for holding in holdings:
      if not holding.is_complete and holding.fetching is None:
        holding.fetching = asyncio.create_task(self._fetch(holding, order))
    if fetching := [holding.fetching for holding in holdings if holding.fetching]:
      # A client that disconnects does not end what other clients may be waiting for.
      # Wait 'weights': bounded by the client, which hangs up at its deadline.
      await asyncio.wait(fetching)
    for task in fetching:
      if task.cancelled():
        raise Refusal(502, 'weights were not fetched: a later order has released them')
      if error := task.exception():
        raise Refusal(502, f'weights were not fetched: {error}') from None
    return web.json_response(
      {
        'directories': {holding.bundle.id: str(holding.directory) for holding in holdings},
        'seconds': time.monotonic() - began,
      },
      headers=SERVER,
    )

  async def _send(self, request: web.BaseRequest) -> web.StreamResponse:
    """Sends a range of a bundle to another store. If it has not arrived yet, the client waits."""
    asked = read_range(request)
    if asked is None:
      return send_nothing()
    try:
      async with asyncio.timeout(_UNKNOWN_S):
        while (holding := self._holdings.get(asked.bundle)) is None:
          await self._ordered.wait()
    except TimeoutError:
      raise Refusal(404, f'this host does not fetch bundle {asked.bundle}') from None
    try:
      async with asyncio.timeout(_WAIT_S):
        while not holding.has(asked):
          if holding.fetching is None or holding.fetching.done():
            raise Refusal(404, f'this host has only a part of bundle {asked.bundle}')
          await holding.changed.wait()
    except TimeoutError:
      raise Refusal(_LATER, 'this part has not arrived yet') from None
    return await send_range(request, holding.directory / asked.file, asked)

  async def _check_reachable(self, sources: Iterable[str]) -> None:
    for address in sources:
      try:
        client, label = self._client(address), f'{address}{WEIGHTS_PATH}'
        async with client.request('GET', WEIGHTS_PATH, label=label, deadline_s=_REACH_S):
          pass
      except (RemoteError, UserError) as error:
        raise Refusal(424, f'the trainer cannot be reached from this host: {error}') from None

  def _client(self, address: str) -> Client:
    if address not in self._clients:
      self._clients[address] = Client(
        address,
        key=self._key,
        ca_file=self._ca_file,
        where=f'order: {address}',
        max_bytes=_MAX_ANSWER_BYTES,
      )
    return self._clients[address]

  def _holding(self, bundle: Bundle) -> _Holding:
    """Returns the state of a bundle on this host. The state is new and empty if the host does not
    have the bundle, or if files of the complete bundle were removed.
    """
    holding = self._holdings.get(bundle.id)
    if holding is not None and holding.is_complete and not holding.is_present:
      holding = None  # Something else has removed files of this host's memory.
    if holding is None:
      directory = self.directory / f'unfinished-{bundle.id}'
      verified = {file.name: bytearray(len(file.atoms)) for file in bundle.files}
      holding = self._holdings[bundle.id] = _Holding(bundle, directory, verified)
    elif holding.fetching is not None and holding.fetching.done() and not holding.is_complete:
      holding.fetching = None  # An earlier order failed. Pieces that it fetched are kept.
    return holding

  def _check_space(self, holdings: Iterable[_Holding]) -> None:
    needed = sum(holding.missing_bytes for holding in holdings if holding.fetching is None)
    free = shutil.disk_usage(self.directory).free
    if needed > free:
      raise Refusal(
        413,
        f'{self.directory} has {free:,} bytes free, the weights need {needed:,}; free memory '
        'there, or name another directory with --pull_root',
      )

  async def _release(self, keep: frozenset[str]) -> None:
    """Removes all bundles except those with the given ids."""
    for released in [name for name in self._holdings if name not in keep]:
      holding = self._holdings.pop(released, None)
      if holding is None:  # Another order has released the bundle meanwhile.
        continue
      if holding.fetching is not None:
        holding.fetching.cancel()
        await asyncio.gather(holding.fetching, return_exceptions=True)
      await asyncio.to_thread(shutil.rmtree, holding.directory, True)

  async def _fetch(self, holding: _Holding, order: FetchOrder) -> None:
    """Fetches what is missing of a bundle. Raises Lost if a piece cannot be had anywhere."""
    holding.directory.mkdir(exist_ok=True)
    for file in holding.bundle.files:
      with (holding.directory / file.name).open('ab') as opened:
        opened.truncate(file.size)
    lanes: dict[tuple[int, int], list[tuple[int, FilePiece]]] = {}
    for number, piece in enumerate(holding.bundle.pieces(len(order.stores))):
      if all(holding.verified[piece.file][piece.first : piece.last]):
        continue
      home = order.home(number)
      # The pieces whose home is this host come from the trainer, several at once. Other pieces
      # come from the host that is their home, one at a time.
      lane = number // max(1, len(order.stores)) % _AT_ONCE if home == order.place else 0
      lanes.setdefault((home, lane), []).append((number, piece))
    failed: set[str] = set()
    try:
      async with asyncio.TaskGroup() as group:
        for lane in lanes.values():
          group.create_task(self._fetch_all(holding, order, lane, failed))
    except BaseExceptionGroup as errors:
      raise errors.exceptions[0] from None
    final = self.directory / holding.bundle.id
    # The directory exists if something else has removed files of a complete bundle.
    await asyncio.to_thread(shutil.rmtree, final, True)
    holding.directory.rename(final)
    holding.directory, holding.is_complete = final, True
    holding.notify()

  async def _fetch_all(
    self,
    holding: _Holding,
    order: FetchOrder,
    pieces: list[tuple[int, FilePiece]],
    failed: set[str],
  ) -> None:
    for number, piece in pieces:
      providers = order.providers(number, holding.bundle, piece.file)
      await self._fetch_piece(holding, piece, providers, failed)
      holding.verified[piece.file][piece.first : piece.last] = b'\1' * (piece.last - piece.first)
      holding.notify()

  async def _fetch_piece(
    self, holding: _Holding, piece: FilePiece, providers: tuple[Provider, ...], failed: set[str]
  ) -> None:
    """Fetches one piece and verifies it. A provider that breaks off is followed by the next, which
    continues at the same byte.

    Args:
      failed: addresses that are tried last, because they failed before. The method adds to them.
    """
    arrival = _Arrival(piece.start)
    error: Exception = Lost('the order names no address to fetch from')
    deadline = time.monotonic() + _PATIENCE_S
    while True:
      for provider in sorted(providers, key=lambda provider: provider.address in failed):
        address, asked = provider.address, time.monotonic()
        try:
          while arrival.position < piece.stop:
            try:
              await self._receive(holding, piece, provider, arrival)
            except Lost as later:
              # The limit ends waits of hosts for each other, if their orders named other hosts.
              if later.status != _LATER or time.monotonic() - asked > _PATIENCE_S:
                raise
          path = holding.directory / piece.file
          await asyncio.to_thread(_verify, holding.bundle, piece, path)
          return
        except _Fault as fault:
          error, arrival.position = fault, piece.start
          _log.warning('%s: %s; another host is asked', address, fault)
        except (RemoteError, UserError) as lost:
          error = lost
          if address not in failed:
            _log.warning('%s; another host is asked', lost)
        failed.add(address)
      if time.monotonic() > deadline:
        raise Lost(str(error))
      await asyncio.sleep(_PAUSE_S)

  async def _receive(
    self, holding: _Holding, piece: FilePiece, provider: Provider, arrival: _Arrival
  ) -> None:
    """Writes the rest of a piece as it arrives."""
    label = f'{provider.address}: {piece.file}, bytes {arrival.position} to {piece.stop}'
    path = f'{WEIGHTS_PATH}?bundle={provider.bundle}&file={piece.file}'
    headers = {'Range': f'bytes={arrival.position}-{piece.stop - 1}'}
    descriptor = os.open(holding.directory / piece.file, os.O_WRONLY)
    try:
      # Wait 'weights': bounded: a provider that sends nothing for `_SILENCE_S` is given up.
      async with self._client(provider.address).request(
        'GET', path, label=label, deadline_s=None, silence_s=_SILENCE_S, headers=headers
      ) as response:
        async for chunk in response.chunks():
          if arrival.position + len(chunk) > piece.stop:
            raise Malformed(f'{label}: more bytes than the range has')
          write_at(descriptor, memoryview(chunk), arrival.position)
          arrival.position += len(chunk)
      if arrival.position < piece.stop:
        raise Malformed(f'{label}: ended at {arrival.position}')
    finally:
      os.close(descriptor)


def _verify(bundle: Bundle, piece: FilePiece, path: pathlib.Path) -> None:
  """Raises _Fault if an atom of a piece differs from its digest."""
  file = bundle.file(piece.file)
  with path.open('rb', buffering=0) as opened:
    for index in range(piece.first, piece.last):
      start, wanted = file.atoms[index]
      hasher = xxhash.xxh3_128()
      for at in itertools.count(start, 1 << 20):
        size = min(1 << 20, file.stop(index) - at)
        if size <= 0:
          break
        hasher.update(os.pread(opened.fileno(), size, at))
      if hasher.hexdigest() != wanted:
        raise _Fault(
          f'bytes from {start} of {piece.file} have digest {hasher.hexdigest()}, wanted {wanted}'
        )


def _create_private(root: pathlib.Path) -> None:
  """Creates a directory that only this user can enter. Raises UserError if that is impossible, or
  if another user owns the directory.
  """
  try:
    with contextlib.suppress(FileExistsError):
      root.mkdir(mode=0o700, parents=True)
    status = root.lstat()
  except OSError as error:
    raise UserError(f'{root}: cannot be created ({error.strerror}); set --pull_root') from None
  if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
    raise UserError(
      f'{root}: is not a directory that only this user can enter; remove it, or set --pull_root'
    )
