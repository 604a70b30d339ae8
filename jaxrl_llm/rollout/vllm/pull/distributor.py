"""Trainer's side of pulled weights: serves published files to serving hosts, and orders each host
to fetch them while its servers still sample.

Invariant: only files of described publications are served, and only with the token.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pathlib
import secrets
import threading
import time
from collections.abc import Collection, Iterator, Mapping

from jaxrl_llm.core.net.client import Lost, Malformed, Refused, RemoteError
from jaxrl_llm.core.net.token_server import FrontConfig
from jaxrl_llm.rollout.vllm.client import VllmClient
from jaxrl_llm.rollout.vllm.publication import MANIFEST, Publication
from jaxrl_llm.rollout.vllm.pull.bundle import Bundle, describe
from jaxrl_llm.rollout.vllm.pull.orders import PULL_PATH, FetchOrder
from jaxrl_llm.rollout.vllm.pull.server import WeightServer
from jaxrl_llm.rollout.vllm.transfer import FileTransfer

_RELEASE_S = 10.0
"""Deadline for a host to remove its files."""


@dataclasses.dataclass
class _Host:
  """A serving host, as its servers share memory."""

  clients: dict[VllmClient, str] = dataclasses.field(default_factory=dict)
  """Id of the store that each of its servers passes orders to, keyed by the server's client. The
  first one that answers gives the host its orders.
  """
  pulled: dict[str, str] = dataclasses.field(default_factory=dict)
  """Directories of bundles on the host, keyed by the bundle's id."""
  pulling: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)


class Distributor:
  """Serves published files, and orders serving hosts to fetch them."""

  def __init__(self, config: FrontConfig):
    """
    Args:
      config: address at which to listen, and the token of the servers' fronts.
    """
    self._server = WeightServer(config)
    self._trainer = secrets.token_hex(8)
    self._hosts: dict[str, _Host] = {}
    self._described: dict[pathlib.Path, tuple[tuple[int, int], Bundle]] = {}
    """Inode and modification time of each published directory, and its description."""
    self._describing = threading.Lock()
    self._origins: dict[str, Mapping[str, str]] = {}
    """For each bundle, keyed by its id, the addresses of files that other processes serve, keyed by
    file name.
    """
    self._opening = asyncio.Lock()

  async def join(self, host: str, store: str, client: VllmClient) -> None:
    """Adds a server of a host. Starts listening if it is the first.

    Args:
      host: name of the memory that the servers of a host share.
      store: id of the store to which the server passes orders.

    Raises:
      UserError: the source cannot listen.
    """
    async with self._opening:
      await asyncio.to_thread(self._server.open)
    self._remove(client)  # After a reboot, the host has another name.
    self._hosts.setdefault(host, _Host()).clients[client] = store

  def _remove(self, client: VllmClient) -> bool:
    """Removes a client from its host. Returns whether no other server uses the client's store."""
    for name, host in list(self._hosts.items()):
      if client in host.clients:
        store = host.clients.pop(client)
        host.pulled.clear()  # The host's files may be in the removed client's store.
        if not host.clients:
          del self._hosts[name]
        return store not in host.clients.values()
    return False

  async def leave(self, client: VllmClient) -> None:
    """Removes a server. Has its store remove all files if no other server uses the store. Stops
    listening if it was the last server of all.
    """
    if self._remove(client):
      with contextlib.suppress(RemoteError):  # The host may be gone.
        nothing = dataclasses.replace(self._order((), 0, ()), sources=(), keep=frozenset())
        await client.call('POST', PULL_PATH, nothing.to_json(), deadline_s=_RELEASE_S)
    async with self._opening:
      if not self._hosts:
        # Wait 'source': bounded: the thread only closes its connections.
        await asyncio.to_thread(self._server.close)

  async def check(self, client: VllmClient, *, deadline_s: float) -> None:
    """Raises Refused or Lost unless the server's host can fetch from this source."""
    await client.call('POST', PULL_PATH, self._order((), 0, ()).to_json(), deadline_s=deadline_s)

  async def pull(
    self, name: str, publication: Publication, *, deadline_s: float
  ) -> dict[pathlib.Path, str]:
    """Has a host fetch the files of a publication.

    Returns:
      The host's directory for each directory of the publication.

    Raises:
      Refused, Lost: the host cannot fetch the files; the message has the reason.
    """
    bundles = await asyncio.to_thread(self._described_of, publication)
    if (host := self._hosts.get(name)) is None:
      raise Lost('the server has left')
    async with host.pulling:  # Servers of one host need the same files.
      known = dict(host.pulled)
      missing = tuple(bundle for bundle in bundles.values() if bundle.id not in known)
      if missing:
        fetched = await self._command(name, missing, deadline_s)
        known |= fetched
        host.pulled |= fetched
      served = self._server.served
      host.pulled = {key: path for key, path in host.pulled.items() if key in served}
      return {directory: known[bundle.id] for directory, bundle in bundles.items()}

  @property
  def directories(self) -> Collection[pathlib.Path]:
    """Published directories that hosts can fetch."""
    return self._described.keys()

  def forget(self, name: str) -> None:
    """Discards the records of a host's files, because a server could not read them."""
    if name in self._hosts:
      self._hosts[name].pulled.clear()

  async def _command(
    self, name: str, bundles: tuple[Bundle, ...], deadline_s: float
  ) -> dict[str, str]:
    if name not in self._hosts:  # While this call waited for another one.
      raise Lost('the server has left')
    names = sorted(self._hosts)
    stores = tuple(next(iter(self._hosts[each].clients)).address for each in names)
    error: RemoteError = Lost('the server has left')
    for client in list(self._hosts[name].clients):
      order = self._order(bundles, names.index(name), stores)
      try:
        answer = await client.call('POST', PULL_PATH, order.to_json(), deadline_s=deadline_s)
        directories = answer['directories']
        return {bundle.id: str(directories[bundle.id]) for bundle in bundles}
      except RemoteError as failure:
        error = failure
      except (TypeError, KeyError):
        error = Lost(f'{client.name}: {PULL_PATH}: answered without the directories')
    raise error

  def _order(self, bundles: tuple[Bundle, ...], place: int, stores: tuple[str, ...]) -> FetchOrder:
    address = self._server.address
    if address is None:
      raise Lost('the last server has left')
    origins = {
      file: address
      for bundle in bundles
      for file, address in self._origins.get(bundle.id, {}).items()
    }
    sources = (address, *sorted(set(origins.values())))
    return FetchOrder(
      trainer=self._trainer,
      number=time.time_ns(),
      bundles=bundles,
      sources=sources,
      origins={file: sources.index(address) for file, address in origins.items()},
      stores=stores,
      place=place,
      keep=frozenset(self._server.served),
    )

  def _described_of(self, publication: Publication) -> dict[pathlib.Path, Bundle]:
    with self._describing:  # Several hosts may be about to get the same publication.
      return self._describe(publication)

  def _describe(self, publication: Publication) -> dict[pathlib.Path, Bundle]:
    """Returns the bundle of each directory of a publication, and forgets directories that are no
    longer published. Raises Lost if the publication itself was released.
    """
    parts = [(delta.directory, delta.files, {}) for delta in publication.deltas]
    if publication.files:
      parts.insert(0, (publication.directory, publication.files, publication.slices))
    described = dict(self._described)
    try:
      for directory, files, slices in parts:
        stamp = _stamp(directory)
        if described.get(directory, (None,))[0] != stamp:
          bundle = describe(directory, files, slices, without=MANIFEST)
          if directory == publication.directory and publication.remote:
            remote = publication.remote
            bundle = Bundle((*bundle.files, *(each.file for each in remote.values())))
            self._origins[bundle.id] = {name: each.address for name, each in remote.items()}
          described[directory] = stamp, bundle
    except (OSError, ValueError) as error:
      raise Lost(f'version {publication.version} is no longer published: {error}') from None
    for directory in list(described):
      try:
        is_published = _stamp(directory) == described[directory][0]
      except OSError:
        is_published = False
      if not is_published:
        del described[directory]
    self._described = described
    served = {bundle.id: (folder, bundle) for folder, (_, bundle) in described.items()}
    self._server.served = served
    self._origins = {key: origins for key, origins in self._origins.items() if key in served}
    try:
      return {directory: described[directory][1] for directory, _, _ in parts}
    except KeyError:
      raise Lost(f'version {publication.version} is no longer published') from None


def _stamp(directory: pathlib.Path) -> tuple[int, int]:
  status = directory.stat()
  return status.st_ino, status.st_mtime_ns


class PullTransfer(FileTransfer):
  """Transfer to a server on a host that has no file system in common with the trainer. The host
  fetches the files into its memory, and the server's workers read them there.
  """

  backend = 'pull'

  def __init__(self, distributor: Distributor):
    self._distributor = distributor
    self._client: VllmClient | None = None
    self._host = ''
    self._local: dict[pathlib.Path, str] = {}
    """Directory on the server's host for each published directory."""

  async def connect(self, client: VllmClient) -> None:
    await super().connect(client)
    answer = await client.call('GET', PULL_PATH)
    names = (answer.get('host'), answer.get('store')) if isinstance(answer, dict) else ()
    if len(names) != 2 or not all(isinstance(name, str) for name in names):
      raise Malformed(
        f'{client.name}: {PULL_PATH}: answered {answer!r:.80}, wanted a host and a store'
      )
    host, store = names
    self._client, self._host = client, host
    self._local.clear()
    self._distributor.forget(host)
    await self._distributor.join(host, store, client)
    await self._distributor.check(client, deadline_s=60.0)

  async def prepare(
    self, client: VllmClient, publication: Publication, *, deadline_s: float
  ) -> None:
    local = await self._distributor.pull(self._host, publication, deadline_s=deadline_s)
    kept = self._distributor.directories
    self._local = {d: path for d, path in (self._local | local).items() if d in kept}
    with self._fetching_again_after_errors():
      await super().prepare(client, self._moved(publication), deadline_s=deadline_s)

  async def send(self, client: VllmClient, publication: Publication, *, deadline_s: float) -> None:
    with self._fetching_again_after_errors():
      await super().send(client, self._moved(publication), deadline_s=deadline_s)

  @contextlib.contextmanager
  def _fetching_again_after_errors(self) -> Iterator[None]:
    """If the block raises an error of the server, makes the server's host fetch the files again
    later. Raises Lost instead of Refused if the files have vanished.
    """
    try:
      yield
    except RemoteError as error:
      self._distributor.forget(self._host)
      if isinstance(error, Refused) and 'cannot be read' in str(error):
        # The host verified the files, but they have vanished. They can be fetched again.
        raise Lost(str(error)) from None
      raise

  def _moved(self, publication: Publication) -> Publication:
    """Returns the publication with the directories on the server's host."""
    deltas = tuple(
      dataclasses.replace(delta, directory=self._at(delta.directory))
      for delta in publication.deltas
    )
    # Without files, the directory is not read, but the server's front still checks it.
    directory = self._at(publication.directory) if publication.files else deltas[0].directory
    return dataclasses.replace(publication, directory=directory, deltas=deltas)

  def _at(self, directory: pathlib.Path) -> pathlib.Path:
    if directory not in self._local:
      raise Lost(f'{directory} was not fetched by the host')
    return pathlib.Path(self._local[directory])

  async def close(self) -> None:
    if self._client is not None:
      await self._distributor.leave(self._client)
