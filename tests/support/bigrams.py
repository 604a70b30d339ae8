"""A stage of a bigram model, with samples whose logprobs are known."""

import dataclasses

import exploring
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.batching.plan import plan_shape
from jaxrl_llm.core.records.sample import Sample, Segment, Source
from jaxrl_llm.core.types import Version
from jaxrl_llm.learner.algorithm import Setting
from jaxrl_llm.learner.optimizer import OptimizerConfig, build_optimizer
from jaxrl_llm.learner.policy_gradient import policy_gradient
from jaxrl_llm.learner.policy_options import GrpoConfig
from jaxrl_llm.master.batches import step_rows
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.master.trainer import Optimization, Stage
from jaxrl_llm.models.api import Model
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.heads import with_head
from jaxrl_llm.models.spec import ModelOptions
from jaxrl_llm.rewards.api import Reward

VOCAB = 12


def sample(i: int, rng: np.random.Generator) -> Sample:
  prompt, answer = int(rng.integers(1, 4)), int(rng.integers(2, 7))
  sampled = np.arange(prompt + answer) >= prompt
  return Sample(
    uid=f's/{i}',
    task_id='t',
    visit=0,
    sample_index=i,
    group_id=f'g{i // 4}',
    trajectory_id=f's/{i}',
    taskset='x',
    domain='general',
    source=Source.ROLLOUT,
    tokens=rng.integers(0, VOCAB, prompt + answer).astype(np.int32),
    prompt_len=prompt,
    role=sampled.astype(np.uint8),
    loss_mask=sampled,
    sampled=sampled,
    behaviour_logprobs=np.where(sampled, -1.0, 0).astype(np.float32),
    segments=(
      Segment(
        start=prompt, end=prompt + answer, version=Version(0, 0), engine='fake', finish='stop'
      ),
    ),
    temperature=float(rng.choice([0.7, 1.3])),
  )


SAMPLES = [sample(i, np.random.default_rng(i)) for i in range(8)]
TASK = exploring.make_tasks(1)[0]
TAKEN = {
  s.uid: Experience(
    sample=s, task=TASK, completion='', scores=(), reward=Reward(value=float(i % 2), parts={})
  )
  for i, s in enumerate(SAMPLES)
}
ROWS = tuple(
  dataclasses.replace(
    step_rows(experience, {experience.sample.uid: ('rows.arrayrecord', i)})[0],
    source='rows.arrayrecord',
  )
  for i, experience in enumerate(TAKEN.values())
)


def make_stage(**fields) -> Stage:
  config = OptimizerConfig(peak_lr=0.3)
  defaults = dict(
    name='grpo',
    start=0,
    end=100,
    algorithm=policy_gradient(GrpoConfig(), Setting(max_response_length=8)),
    policy=Optimization(build_optimizer(config, 100), config),
    keep_optimizer=False,
    shape=plan_shape(rows=4, ranks=2, chunks=2, chunk_len=16),
    token_chunk=16,
    minibatches=2,
    epochs=2,
    evaluate_every=None,
    explores=True,
  )
  return Stage(**{**defaults, **fields})


def bigram(head: str = 'lm') -> Model:
  """Returns the smallest possible model: its output at a position (logits of the next token, or a
  value) depends only on the token there.
  """
  matrix, outputs = {'kernel': ('vocab', 'embed')}, VOCAB if head == 'lm' else 1
  return Model(
    spec=with_head(tiny('qwen3', VOCAB, num_hidden_layers=1), head),
    options=ModelOptions(),
    init=lambda key: {
      name: {'kernel': jax.random.normal(k, (rows, 8), jnp.float32)}
      for (name, rows), k in zip({'embed': VOCAB, 'head': outputs}.items(), jax.random.split(key))
    },
    apply=lambda params, tokens, *places: params['embed']['kernel'][tokens],
    head_kernel=lambda params: params['head']['kernel'],
    init_cache=lambda batch, length: (),
    decode=lambda params, tokens, positions, cache: (params['embed']['kernel'][tokens], cache),
    axes=lambda: {'embed': matrix, 'head': matrix},
  )


def forward(params, s: Sample):
  """Returns the logprobs of all tokens of a sample except the first. They are computed for this
  sequence alone, in float64 on the host.
  """
  embed, head = (np.asarray(params[name]['kernel'], np.float64) for name in ('embed', 'head'))
  logits = embed[s.tokens[:-1]] @ head.T / s.temperature
  table = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  return table[np.arange(len(s.tokens) - 1), s.tokens[1:]]


def asked_for(params, s: Sample):
  """Returns the logprobs that an update should report: 0 for tokens that are not trained on."""
  return np.where(s.loss_mask[1:], forward(params, s), 0.0)
