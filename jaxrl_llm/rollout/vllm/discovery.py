"""Discovery of servers that register themselves in a registry, and a check that they serve the
policy's model. A registration is called a lease, because it expires unless the server renews it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence

from jaxrl_llm.core.net.registry import Lease, Watch
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.vllm.replica import Replica

_UNCOMPARED = ('max_position_embeddings', 'initializer_range', 'head')
"""Fields of a model spec that may differ between the policy and a server. The maximum length is
checked separately, and the other fields do not affect sampling.
"""


def fingerprint(spec: ModelSpec, tokenizer: bytes | None) -> dict[str, str]:
  """Returns digests that are equal for a policy and a server with the same model and tokenizer.

  Args:
    spec: spec of the model.
    tokenizer: content of tokenizer.json; None if there is no such file.
  """
  fields = dataclasses.asdict(spec)
  for name in _UNCOMPARED:
    del fields[name]
  digests = {'model': _digest(fields)}
  if tokenizer is not None:
    content = json.loads(tokenizer)
    # Other fields, such as truncation and padding, may change when a library saves the tokenizer.
    digests['tokenizer'] = _digest([content.get('model'), content.get('added_tokens')])
  return digests


def _digest(value: object) -> str:
  text = json.dumps(value, sort_keys=True, separators=(',', ':'))
  return hashlib.sha256(text.encode()).hexdigest()[:16]


class Discovery:
  """Finds a fleet's servers in a registry.

  Attributes:
    wanted: number of servers that must be available before the run starts.
  """

  def __init__(
    self,
    watch: Watch,
    *,
    wanted: int,
    fingerprint: Mapping[str, str],
    build: Callable[[str, str, int], Replica],
    tell: Callable[[str, str], None],
  ):
    """
    Args:
      watch: reads the servers' leases from the registry.
      wanted: number of servers that must be available before the run starts.
      fingerprint: digests of the policy's model and tokenizer (see `fingerprint`).
      build: returns the replica of a server (the fleet's state of that server), given the server's
        name, address and number.
      tell: called with the name of a server and what happened: 'joined', 'left', 'expired',
        'refused' or 'given up'.
    """
    self.wanted, self.tell = wanted, tell
    self._watch, self._fingerprint, self._build = watch, fingerprint, build
    self._numbers = itertools.count()

  @property
  def directory(self) -> pathlib.Path:
    return self._watch.registry.directory

  @property
  def expired(self) -> frozenset[str]:
    """Addresses of servers whose leases have expired."""
    return self._watch.expired

  async def look(self) -> Sequence[Lease]:
    """Reads the registry and returns the leases that have not expired."""
    return await self._watch.look_async()

  def mismatch(self, lease: Lease) -> str | None:
    """Returns the reason why a server cannot serve the policy, or None if it can. Digests that only
    one of the two has are not compared.
    """
    for name in sorted(self._fingerprint.keys() & lease.fingerprint.keys()):
      if lease.fingerprint[name] != (wanted := self._fingerprint[name]):
        return (
          f'{lease.name} ({lease.address}) serves another {name} than the policy: its digest is '
          f'{lease.fingerprint[name]:.16}, wanted {wanted}'
        )
    return None

  def replica(self, lease: Lease, taken: Collection[str]) -> Replica:
    """Builds the replica of a server, which is the fleet's state of it. The replica has the
    server's name, with a number appended if that name is in `taken`.
    """
    names = itertools.chain([lease.name], (f'{lease.name}-{i}' for i in itertools.count(2)))
    name = next(name for name in names if name not in taken)
    return self._build(name, lease.address, next(self._numbers))
