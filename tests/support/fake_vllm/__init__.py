"""A server with the HTTP interface of vLLM 0.32, as the project starts it, but without vLLM. It is
meant for tests, and it can simulate slow servers.

Invariant: everything that the project's clients and fleets rely on is as recorded from a real
server: paths, bodies, statuses, errors, connections, and the effect of a pause or an update on
requests in progress. Anything that is not implemented is refused.

Differences from vLLM: the `rank` of sampled tokens is null. Alternatives (`logprobs` and
`prompt_logprobs` above 0) and sampling parameters other than those of `Params` are refused. There
is no text, only token ids.
"""

from fake_vllm.backends import Backend, Drawn, Sampled, Scripted
from fake_vllm.faults import Fault, Faults, Latency
from fake_vllm.requests import Params
from fake_vllm.server import FakeServer

__all__ = [
  'Backend',
  'Drawn',
  'FakeServer',
  'Fault',
  'Faults',
  'Latency',
  'Params',
  'Sampled',
  'Scripted',
]
