"""Fetches the completions of the engine's errands from the fronts of servers, in an explorer."""

from __future__ import annotations

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.client import Client, RemoteError
from jaxrl_llm.core.net.tickets import SIGNATURE_BYTES
from jaxrl_llm.rollout.explorers.wire import Delivery, Row

_MAX_BYTES = 1 << 28
"""Maximum size in bytes of a server's answer."""


class Fetcher:
  """Runs errands: sends their requests to the servers' fronts."""

  def __init__(self, ca_file: str | None):
    """
    Args:
      ca_file: PEM file of the authority that signed the certificates of the fronts. If None, the
        system's authorities are used.
    """
    self._ca_file = ca_file
    self._clients: dict[str, Client] = {}
    """Clients of the fronts, keyed by address."""

  async def close(self) -> None:
    for client in self._clients.values():
      await client.close()

  async def fetch(self, errand: Row) -> Delivery:
    """Returns the signed answer for an errand (`wire.errand_row`), or the reason why there is
    none.
    """
    nonce, address = errand['nonce'], errand['address']
    try:
      if address not in self._clients:
        self._clients[address] = Client(
          address, key=None, ca_file=self._ca_file, where='server', max_bytes=_MAX_BYTES
        )
      async with self._clients[address].request(
        'POST',
        errand['path'],
        errand['body'],
        label=address,
        deadline_s=errand['deadline_s'],
        headers={'Authorization': errand['authorization']},
      ) as response:
        data = await response.read()
    except (RemoteError, UserError) as error:
      return Delivery(nonce, problem=str(error))
    return Delivery(nonce, answer=data[SIGNATURE_BYTES:], signature=data[:SIGNATURE_BYTES])
