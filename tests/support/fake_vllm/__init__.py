"""A server with vLLM's HTTP interface (0.32, as ours are started) and without vLLM: for tests, and
for slow servers.

Invariant: whatever a client or a fleet of ours relies on (paths, bodies, statuses, errors,
connections, what a pause or an update does to requests under way) is as recorded from a real
server; what is not implemented is refused.

What it does not copy: `rank` of sampled tokens is null; alternatives (`logprobs` and
`prompt_logprobs` above 0) and sampling parameters other than those of `Params` are refused; text is
unknown to it.
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
