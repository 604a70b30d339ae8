"""What a fleet asks of its servers; `VllmClient` and `OwnedServer` provide it for vLLM.

Invariant: a call raises `Lost` when the server's state is unknown, and `Refused` when the server
works but rejects the call; a replica restarts or brings back a lost server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32

from jaxrl_llm.rollout.api import Completion, Request
from jaxrl_llm.rollout.vllm.publication import Publication


@runtime_checkable
class EngineServer(Protocol):
  """Client of one server: status, sampling and version labels. A `Transfer` loads weights into the
  server.
  """

  name: str
  """Name in segments and messages."""
  address: str
  """Server address for messages."""
  adapter: Publication | None
  """Adapter that completions use; None: the base model. The replica resets it when it loses the
  server.
  """

  async def is_healthy(self) -> bool:
    """Whether the server answers at all."""
    ...

  async def max_model_len(self) -> int:
    """Returns the server's longest sequence in tokens; raises UserError if the address has no
    usable server.
    """
    ...

  async def weights(self) -> list[dict[str, Any]]:
    """Describes what each worker of the server holds.

    Returns:
      One mapping per worker: `tensors` (Hugging Face name to shape, dtype and slice), `device`,
      and, where they apply, `logprobs_mode`, `speculative` and `adapter_rank`.
    """
    ...

  async def warm_up(self, *, sampled: bool, deadline_s: float) -> None:
    """Triggers lazy compilation; with `sampled`, also that for temperatures above 0."""
    ...

  async def generate(
    self, request: Request, index: int, *, seed: int, deadline_s: float
  ) -> Completion:
    """Samples completion `index` of a request. At the deadline, the server aborts it, or the
    cancellation of this call does.

    The tokens depend on `seed`, the request's key and `index` alone, and each segment names the
    published version that sampled it.
    """
    ...

  async def prompt_logprobs(
    self, tokens: Sequence[int], *, deadline_s: float
  ) -> Float32[np.ndarray, 'time']:
    """Returns the logprob of each token given its prefix, at temperature 1; 0 for the first."""
    ...

  async def pause(self) -> None:
    """Suspends sampling; running requests are kept until `resume`."""
    ...

  async def resume(self) -> None: ...

  async def digests(self, *, deadline_s: float) -> list[dict[str, str]]:
    """Returns one mapping per worker, from tensor name to a digest of the loaded tensor."""
    ...

  async def set_version(self, publication: Publication) -> None:
    """Labels the tokens sampled from now on with the publication."""
    ...

  async def served_label(self) -> str:
    """Returns the label of newly sampled tokens; a server restarted by somebody else has no label
    of this run.
    """
    ...

  async def reset_cache(self) -> None:
    """Clears the KV cache, which holds keys and values of the earlier weights."""
    ...

  async def tokenize(self, text: str) -> list[int] | None:
    """Tokenizes without special tokens; None if the server has no tokenizer."""
    ...

  async def close(self) -> None:
    """Closes the client; the server keeps running."""
    ...


@runtime_checkable
class ServerProcess(Protocol):
  """Process of an owned server, which can be started again after `stop`. An attached server has
  none.
  """

  def start(self) -> None:
    """Starts the process without waiting for it."""
    ...

  async def ready(self, *, deadline_s: float) -> None:
    """Waits until the server answers. Raises RunError with the reason if it does not."""
    ...

  def is_running(self) -> bool: ...

  async def stop(self) -> None:
    """Stops the process and waits for its end."""
    ...

  async def close(self) -> None:
    """Stops the process and removes its files."""
    ...
