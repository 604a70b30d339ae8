"""A policy whose answers are given texts, turn by turn."""

import numpy as np
from exploring import make_tasks

from jaxrl_llm.core.records.sample import Finish, Segment
from jaxrl_llm.core.types import Version
from jaxrl_llm.rollout.api import Completion

TASK = make_tasks(1)[0]
GROUP = f'grpo/{TASK.uid}/0'


class Scripted:
  """A hub whose policy answers with given texts, each under the next weights version. A text that
  ends with '$' ends with a stop token.
  """

  def __init__(self, tokenizer, *texts):
    self._tokenizer, self._texts, self.requests = tokenizer, [*texts], []

  async def generate(self, request):
    text = self._texts[len(self.requests)]
    self.requests.append(request)
    tokens = self._tokenizer.encode(text.rstrip('$'))
    if text.endswith('$'):
      tokens.append(self._tokenizer.eos_id)
    tokens = tokens[: request.max_tokens]
    finish = Finish.STOP if tokens[-1] in request.stop_ids else Finish.LENGTH
    segment = Segment(
      start=0,
      end=len(tokens),
      version=Version(0, len(self.requests)),
      engine='scripted',
      finish=str(finish),
    )
    yield (
      request.first,
      Completion(
        tokens=np.array(tokens, np.int32),
        logprobs=-np.arange(1, len(tokens) + 1, dtype=np.float32),
        finish=finish,
        segments=(segment,),
      ),
    )
