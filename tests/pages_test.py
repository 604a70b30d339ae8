"""Code on pages works: the reward of the README, and the workflow of its recipe."""

import ast
import asyncio
import types

import numpy as np
from pages import code

from jaxrl_llm.api import Attempt, Completion, Finish, Role, Sampling, Segment, Task, load_config
from jaxrl_llm.app.composition.scorers import build_scorers
from jaxrl_llm.core.types import Version
from jaxrl_llm.rollout.contract import checked_run

TASK = Task(
  taskset='t', domain='d', prompt=({'role': 'user', 'content': 'abc'},), truth='cba', fields={}
)


def test_the_reward_of_the_readme_scores_the_quickstart(tmp_path, monkeypatch):
  source = code('README.md', 'letters.py')
  (tmp_path / 'letters.py').write_text(source)
  monkeypatch.chdir(tmp_path)
  (scorer,) = [
    ast.literal_eval(node.value)
    for node in ast.walk(ast.parse(source))
    if isinstance(node, ast.Assign) and node.targets[0].id == 'scorer'
  ]
  config = load_config('quickstart', {'rewards.scorers': [scorer]})
  score = build_scorers(config.rewards)['letters']
  for completion, value in (('cba', 1.0), ('cbd', 2 / 3), ('', 0.0), ('cbacba', 0.5)):
    attempt = Attempt(
      uid='u', task=TASK, completion=completion, finish_reason='stop', response_len=3
    )
    assert score(attempt).value == value


class Hub:
  """Answers each request with the next of `answers`; the reward is 1 for 'cba'."""

  def __init__(self, *answers):
    self.answers, self.requests = list(answers), []

  async def generate(self, request):
    self.requests.append(request)
    for index in range(request.first, request.first + request.samples):
      tokens = np.array(self.answers.pop(0), np.int32)
      segment = Segment(start=0, end=len(tokens), version=Version(0, 0), engine='e', finish='stop')
      logprobs = np.full(len(tokens), -0.5, np.float32)
      yield (
        index,
        Completion(tokens=tokens, logprobs=logprobs, finish=Finish.STOP, segments=(segment,)),
      )

  async def score(self, attempt):
    return types.SimpleNamespace(value=float(attempt.completion == 'cba'))


def test_the_workflow_of_the_recipe_records_two_turns(tokenizer):
  names, (stop, *_) = {}, tokenizer.stop_ids
  exec(code('docs/develop/add_workflow.md', 'two_turns.py'), names)

  def said(text):
    return [*tokenizer.encode(text), stop]

  # One sample is right at once, the other one in its second turn.
  hub = Hub(said('cba'), said('ab'), said('cba'))
  workflow = names['TwoTurns'](hub, tokenizer, max_tokens=9, hint='d')

  async def collect():
    runs = checked_run(workflow, TASK, 0, stage='grpo', samples=2, sampling=Sampling())
    return [pair async for pair in runs]

  (right, said_first, *_), (wrong, said_last, *_) = sorted(
    asyncio.run(collect()), key=lambda rollout: rollout.sample.sample_index
  )
  assert (said_first, said_last, workflow.text(wrong)) == ('cba', 'cba', 'cba')
  prompt = tokenizer.render_prompt(TASK.prompt)
  assert right.tokens.tolist() == [*prompt, *said('cba')] and len(right.segments) == 1
  assert wrong.tokens.tolist() == [*prompt, *said('ab'), *tokenizer.encode('d'), *said('cba')]
  n = len(prompt)
  roles = [Role.PROMPT] * n + [Role.POLICY] * 3 + [Role.TOOL] + [Role.POLICY] * 4
  assert wrong.role.tolist() == roles
  sampled = [role == Role.POLICY for role in roles]
  assert wrong.sampled.tolist() == wrong.loss_mask.tolist() == sampled
  assert wrong.behaviour_logprobs.tolist() == [-0.5 if drawn else 0.0 for drawn in sampled]
  assert [(segment.start, segment.end) for segment in wrong.segments] == [
    (n, n + 3),
    (n + 4, n + 8),
  ]
  assert (
    hub.requests[-1].prompt == tuple(wrong.tokens[: n + 4])
    and hub.requests[-1].max_tokens == 9 - 3 - 1
  )
  draws = {(request.key, request.first) for request in hub.requests}
  assert len(draws) == len(hub.requests) == 3
