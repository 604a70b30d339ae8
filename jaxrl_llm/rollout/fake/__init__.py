"""A server with vLLM's HTTP interface (0.32, as ours are started) and without vLLM: for tests, and for slow servers.

Invariant: whatever a client or a fleet of ours relies on (paths, bodies, statuses, errors, connections, what a pause
or an update does to requests under way) is as recorded from a real server; what is not implemented is refused.

What it does not copy: `rank` of sampled tokens is null; alternatives (`logprobs` and `prompt_logprobs` above 0) and
sampling parameters other than those of `Params` are refused; text is unknown to it.
"""

from jaxrl_llm.rollout.fake.backends import Backend, Drawn, Sampled, Scripted
from jaxrl_llm.rollout.fake.faults import Fault, Faults, Latency
from jaxrl_llm.rollout.fake.requests import Params
from jaxrl_llm.rollout.fake.server import FakeServer

__all__ = ['Backend', 'Drawn', 'FakeServer', 'Fault', 'Faults', 'Latency', 'Params', 'Sampled', 'Scripted']
