"""Sessions of agents for tests. The policy is scripted, and the calls use real sockets."""

import contextlib

import aiohttp
from scripted import GROUP, TASK, Scripted

from jaxrl_llm.rollout.agents.proxy import Proxy
from jaxrl_llm.rollout.agents.session import Session, SessionOptions
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.episodes.episode import Episode
from jaxrl_llm.rollout.episodes.tool_calls import hermes_calls
from jaxrl_llm.rollout.recording import Place


class Caller:
  """Calls a session as an agent does, with the session's key."""

  def __init__(self, url, key, session, episode, hub):
    self.url, self.session, self.episode, self.hub = url, session, episode, hub
    self.headers = {'Authorization': f'Bearer {key}'}

  async def post(self, path='chat/completions', *, headers=None, data=None, **body):
    """Returns the status and the JSON of a response. Returns text instead of JSON if it is a
    stream.
    """
    content = {'json': body} if data is None else {'data': data}
    headers = self.headers if headers is None else headers
    async with (
      aiohttp.ClientSession() as http,
      http.post(f'{self.url}/{path}', headers=headers, **content) as response,
    ):
      is_json = response.content_type == 'application/json'
      return response.status, await (response.json() if is_json else response.text())

  async def say(self, *messages, **body):
    """Returns the policy's message and its finish reason."""
    status, answer = await self.post(messages=list(messages), **body)
    assert status == 200, answer
    (choice,) = answer['choices']
    return choice['message'], choice['finish_reason']


@contextlib.asynccontextmanager
async def calling(proxy, tokenizer, *texts, hub=None, max_tokens=500, max_steps=1, **options):
  """Yields a caller of a new session whose policy answers with `texts`, in order."""
  hub = hub or Scripted(tokenizer, *texts)
  place = Place(task=TASK, visit=0, group=GROUP, index=1)
  limits = {'max_tokens': max_tokens, 'max_steps': max_steps}
  episode = Episode(hub, tokenizer, place, sampling=Sampling(), **limits)
  options = {'parser': hermes_calls, **options}
  session = Session(episode, SessionOptions(sampling=Sampling(), **options))
  async with proxy.open(session) as key:
    yield Caller(proxy.base_url, key, session, episode, hub)


@contextlib.asynccontextmanager
async def opened(tokenizer, *texts, **options):
  """Starts a proxy with one session, and yields a caller of that session."""
  async with Proxy() as proxy, calling(proxy, tokenizer, *texts, **options) as caller:
    yield caller
