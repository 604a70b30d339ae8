"""Interfaces through which a fleet (the engine over several servers) uses its servers. `VllmClient`
and `OwnedServer` implement them for vLLM.

Invariant: a call raises `Lost` if the state of the server is unknown, and `Refused` if the server
works but rejects the call. After `Lost`, the fleet restarts the server or waits until it works
again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int32

from jaxrl_llm.rollout.api import Completion, Request
from jaxrl_llm.rollout.vllm.publication import Publication
from jaxrl_llm.rollout.vllm.stream import Arrivals


@runtime_checkable
class EngineServer(Protocol):
  """Client of one server: its status, sampling and version labels. Weights are loaded by a
  `Transfer` instead.
  """

  name: str
  """Name in segments and messages."""
  address: str
  """Address of the server, such as `unix:/path` or `https://host:port`. Error messages quote it. It
  also identifies the lease of a server that was found through `discover`.
  """
  adapter: Publication | None
  """Adapter that new completions use; None for the base model. The server's `Replica` resets it to
  None when the server's weights become unknown.
  """

  async def is_healthy(self) -> bool:
    """Returns whether the server answers a health check."""
    ...

  async def max_model_len(self) -> int:
    """Returns the length of the longest sequence that the server accepts, in tokens.

    Raises:
      UserError: there is no usable server at the address.
      Lost: the server cannot be reached, or fails.
    """
    ...

  async def weights(self) -> list[dict[str, Any]]:
    """Describes the weights in each worker process of the server.

    Returns:
      One mapping per worker: `tensors` (Hugging Face name to shape, dtype and slice), `device`,
      and, if applicable, `logprobs_mode`, `speculative` and `adapter_rank`.
    """
    ...

  async def warm_up(self, *, sampled: bool, deadline_s: float) -> None:
    """Sends requests that make the server compile its programs. If `sampled`, one request has a
    temperature above 0.
    """
    ...

  async def generate(
    self, request: Request, index: int, *, seed: int, deadline_s: float
  ) -> Completion:
    """Samples completion `index` of a request. The completion is aborted after `deadline_s`
    seconds, or when this call is cancelled.

    The random numbers depend only on `seed`, the request's `key` and `begun`, `index` and the
    position of each token. Each segment names the published version that sampled its tokens.
    """
    ...

  async def prompt_logprobs(
    self, tokens: Sequence[int], *, deadline_s: float
  ) -> Float32[np.ndarray, 'time']:
    """Returns the logprob of each token given its prefix, at temperature 1; the first is 0."""
    ...

  async def pause(self) -> None:
    """Suspends sampling. Running requests are kept and continue after `resume`."""
    ...

  async def resume(self) -> None: ...

  async def digests(self, *, deadline_s: float) -> list[dict[str, str]]:
    """Returns one mapping per worker, from tensor name to the xxh3-128 digest of the loaded part of
    this tensor. On servers on CPUs, digests are compared to verify that the right weights were
    loaded; on other servers, `checksums` are.
    """
    ...

  async def checksums(self, *, deadline_s: float) -> list[dict[str, str]]:
    """Returns one mapping per worker, from tensor name to the checksum of the loaded part of this
    tensor, as 16 hexadecimal digits. `weights.checksums` defines the checksum.
    """
    ...

  async def set_version(self, publication: Publication) -> None:
    """Makes the server attach the label of this publication to the tokens that it samples from now
    on.
    """
    ...

  async def served_label(self) -> str:
    """Returns the label that the server gives to newly sampled tokens. If the server was restarted
    from outside the run, the label is not one of this run.
    """
    ...

  async def reset_cache(self) -> None:
    """Clears the KV cache, whose keys and values were computed with the earlier weights."""
    ...

  async def tokenize(self, text: str) -> list[int] | None:
    """Returns the tokens of the text without special tokens, or None if the server has no
    tokenizer.
    """
    ...

  async def close(self) -> None:
    """Closes the client; the server keeps running."""
    ...


@runtime_checkable
class StreamingServer(EngineServer, Protocol):
  """Client of a server that can send a completion while it is sampling it."""

  async def stream(
    self, request: Request, index: int, *, seed: int, deadline_s: float, arrivals: Arrivals
  ) -> Completion:
    """Samples completion `index` of a request, like `generate`, and receives it in parts, which are
    added to `arrivals`.

    Raises:
      Broken: the completion broke off. The exception contains the tokens that arrived while the
        weights were known (`Arrivals.known`). It contains no tokens if the server may be a new
        process with other weights.
    """
    ...


@runtime_checkable
class DirectServer(EngineServer, Protocol):
  """Client of a server whose front signs its answers, so that somebody else can fetch them."""

  async def check_front(self) -> None:
    """Raises Refused if no front signs the server's answers, and Lost if it does not respond."""
    ...

  async def fetch(
    self,
    request: Request,
    index: int,
    *,
    seed: int,
    deadline_s: float,
    stream: int | None,
    is_known: Callable[[], bool],
  ) -> Completion:
    """Samples completion `index` of a request, like `generate`, and has `request.courier` fetch it.

    Args:
      stream: number of tokens in each part of the answer; None if the answer has a single part.
      is_known: returns whether the server's weights were known when this method was called, and no
        update of the server has begun since.

    Raises:
      Undelivered: the courier has not delivered the completion, and has not requested it.
      Broken: as in `StreamingServer.stream`.
    """
    ...


@runtime_checkable
class SpeculativeServer(EngineServer, Protocol):
  """Client of a server that decodes speculatively. Adds the calls that the self-test needs."""

  async def ranked_logprobs(
    self, tokens: Sequence[int], *, count: int, deadline_s: float
  ) -> tuple[
    Float32[np.ndarray, 'time'], Int32[np.ndarray, 'time'], Float32[np.ndarray, 'time count']
  ]:
    """Returns, for each token given its prefix at temperature 1: its logprob, its rank among all
    tokens (from 1), and the `count` largest logprobs in falling order. The values of the first
    token are arbitrary.
    """
    ...

  async def drafted_tokens(self) -> float:
    """Returns the number of tokens that the server's speculative decoding has drafted so far."""
    ...


@runtime_checkable
class CacheKeepingServer(EngineServer, Protocol):
  """Client of a server that can keep the KV cache of running requests across weight updates."""

  async def pause_with_cache(self) -> None:
    """Suspends sampling. Running requests are kept with their keys and values, and continue after
    `resume`.
    """
    ...

  def separate_cache(self, publication: Publication) -> None:
    """Separates cached keys and values: requests that start later do not reuse entries from before
    this call. Running requests keep their entries.
    """
    ...


@runtime_checkable
class SleepingServer(EngineServer, Protocol):
  """Client of a server that can free its device memory while its process keeps running."""

  async def sleep(self, *, deadline_s: float) -> None:
    """Makes the server drop its weights and its KV cache, and free their memory. Raises Refused if
    the server cannot do this.
    """
    ...

  async def wake_up(self, *, deadline_s: float) -> None:
    """Makes a sleeping server allocate its memory again. The contents of its weights are then
    undefined.
    """
    ...


@runtime_checkable
class ServerProcess(Protocol):
  """Process of an owned server, which the run starts and stops. It can be started again after
  `stop`. Attached servers are started by others and have no `ServerProcess`.
  """

  def start(self) -> None:
    """Starts the process without waiting for it."""
    ...

  async def ready(self, *, deadline_s: float) -> None:
    """Waits until the server answers. Raises RunError with the reason if the process ends or does
    not answer within `deadline_s` seconds.
    """
    ...

  def is_running(self) -> bool: ...

  async def stop(self) -> None:
    """Stops the process and waits for its end."""
    ...

  async def close(self) -> None:
    """Stops the process and removes its files."""
    ...
