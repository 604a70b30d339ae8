"""A crew of explorers on a deterministic engine."""

import asyncio
import contextlib
import functools

from exploring import LETTERS, FakeEngine, make_tokenizer

from jaxrl_llm.app.serve.explorer import command as explorer_command
from jaxrl_llm.core.net.token_server import FrontConfig
from jaxrl_llm.core.records.sample import encode
from jaxrl_llm.rewards.api import Attempt, Reward
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.explorers import explorer as exploring
from jaxrl_llm.rollout.explorers import wire
from jaxrl_llm.rollout.explorers.crew import Crew, ExplorersConfig
from jaxrl_llm.rollout.explorers.explorer import Link, Welcome, explore
from jaxrl_llm.rollout.untrusted import Bounds
from jaxrl_llm.rollout.workflow import SingleTurn, WorkflowConfig, turns_of

TOKEN = 'token-of-this-test-0123456789'
PATIENCE_S = 60


class FakeHub:
  """Replaces `MasterHub`: requests go to the fake engine."""

  def __init__(self, engine):
    self._engine, self.scored, self.asked = engine, [], []

  def generate(self, request):
    return self._engine.generate(request)

  async def score(self, attempt: Attempt) -> Reward:
    self.scored.append(attempt)
    return Reward(value=0.5, parts={'judge': 0.5}, correct=False, turn_values=(1.0, 2.0))

  async def ask(self, model, messages, *, max_tokens, temperature=0.0):
    self.asked.append((model, [*messages], max_tokens, temperature))
    return 'an answer'


class Setting:
  """A crew whose explorers are tasks of this event loop and connect over the crew's real socket."""

  def __init__(
    self,
    directory,
    build=None,
    workflow=None,
    announce=None,
    max_tokens=4,
    engine=None,
    letters=LETTERS,
    **config,
  ):
    """
    Args:
      engine: engine in place of the deterministic one.
      letters: vocabulary of the tokenizer, besides its special tokens.
    """
    self.tokenizer = make_tokenizer(directory / 'tokenizer', letters)
    self.engine = engine or FakeEngine(self.tokenizer)
    self.hub = FakeHub(self.engine)
    self.build = build or (
      lambda config, hub, tokenizer, most, *_: SingleTurn(hub, tokenizer, max_tokens=most)
    )
    welcome = Welcome(
      workflow=workflow or WorkflowConfig(),
      max_tokens=max_tokens,
      max_steps=1,
      max_prompt=12,
      tokenizer=self.tokenizer.files,
    )
    self.crew = Crew(
      self.hub,
      ExplorersConfig(**{'processes': 0, 'listen': listen(directory), 'silent_s': 3.0, **config}),
      welcome=welcome.row(),
      text=SingleTurn(self.engine, self.tokenizer, max_tokens=4).text,
      turns=functools.partial(turns_of, self.tokenizer),
      bounds=Bounds(vocab_size=self.tokenizer.vocab_size, max_length=12 + max_tokens),
      logs=directory / 'logs',
      command=explorer_command,
      announce=announce,
    )
    self.explorers = {}

  def come(self, name, address=None, key=None):
    link = Link(address or self.crew.address, key=key, ca_file=None, name=name)
    self.explorers[name] = asyncio.create_task(explore(link, self.build))

  async def dismiss(self, name):
    """Stops the last explorer, and waits until the crew has noticed that it left."""
    self.explorers.pop(name).cancel()
    while self.crew.explorers:
      await asyncio.sleep(0.01)

  @contextlib.asynccontextmanager
  async def running(self, *names):
    try:
      async with asyncio.timeout(PATIENCE_S):
        started = asyncio.create_task(self.crew.start())
        while not (self.crew.address or started.done()):
          await asyncio.sleep(0.01)
        for name in names:
          self.come(name)
        await started
        yield self
    finally:
      for task in self.explorers.values():
        task.cancel()
      await asyncio.gather(*self.explorers.values(), return_exceptions=True)
      await self.crew.close()

  def link(self, name):
    return Link(self.crew.address, key=None, ca_file=None, name=name)

  async def made(self, link, order):
    """Returns the samples that an honest explorer makes: their tokens were drawn for this lease."""
    workflow = SingleTurn(exploring._LeasedHub(link, order['lease']), self.tokenizer, max_tokens=4)
    how = {
      'stage': order['stage'],
      'samples': order['samples'],
      'sampling': wire.read_sampling(order['sampling']),
    }
    return [
      sample
      async for sample, _ in workflow.run(wire.read_task(order['task']), order['visit'], **how)
    ]

  async def samples(self, workflow, task, visit=0, samples=3):
    runs = workflow.run(
      task, visit, stage='grpo', samples=samples, sampling=Sampling(temperature=1.0)
    )
    return {sample.uid: (encode(sample), text) async for sample, text, *_ in runs}


def listen(directory):
  file = directory / 'token'
  file.write_text(TOKEN)
  file.chmod(0o600)
  return FrontConfig(token_file=str(file))
