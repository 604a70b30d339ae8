"""Rows, models and layouts for tests of the learner. A Subject is what is computed, and a Case is
its layout on devices.

Rows are read from a file with the real loader. Random numbers depend only on fixed seeds, so two
tests that use the same Subject compute the same numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.batching.plan import Row, StepPlan, plan_shape, with_prefixes
from jaxrl_llm.core.records.sample import Role, Sample, Source, encode
from jaxrl_llm.core.trees import flatten
from jaxrl_llm.data.load import RowLoader
from jaxrl_llm.learner.algorithm import Algorithm, Annotation, Closed, Loss, Setting
from jaxrl_llm.learner.forward import split_ranks
from jaxrl_llm.learner.state import place_params
from jaxrl_llm.learner.update import gradients
from jaxrl_llm.models.api import Model, build_model, stack_layers, unstack_layers
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.spec import ModelOptions
from jaxrl_llm.parallel.mesh import AXES, MeshConfig, build_mesh, data_parallel_ranks
from jaxrl_llm.replay.segments import write_segment

VOCAB, CHUNK, WIDTH = 40, 24, 32
SETTING = Setting(max_response_length=16)
SPECS = {
  head: tiny(
    'qwen3',
    VOCAB,
    num_hidden_layers=2,
    hidden_size=WIDTH,
    intermediate_size=48,
    num_attention_heads=2,
    num_key_value_heads=1,
    head=head,
  )
  for head in ('lm', 'value', 'scalar')
}
ROLLOUTS, EXPERTS, PAIRED = range(12), range(12, 17), range(17, 29)
"""Samples of the file: three groups of four rollouts, five demonstrations, and six pairs. The first
sample of a pair is the chosen one.
"""
LIMITS = {'float32': (1e-5, 1e-6), 'float64': (1e-12, 1e-12)}
"""Maximum differences between two layouts, keyed by dtype: (relative norm of the difference of a
tensor, relative difference of losses).
"""


def sample(i: int, rng: np.random.Generator) -> Sample:
  """Returns a sample with a prompt and an answer. In an answer of at least 6 tokens, the second
  third is a tool's.
  """
  prompt, answer = int(rng.integers(1, 8)), int(rng.integers(1, 17))
  sampled = np.arange(prompt + answer) >= prompt
  role = np.where(sampled, Role.POLICY, Role.PROMPT).astype(np.uint8)
  if answer >= 6:
    hole = slice(prompt + answer // 3, prompt + 2 * (answer // 3))
    sampled[hole], role[hole] = False, Role.TOOL
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
    role=role,
    loss_mask=sampled,
    sampled=sampled,
    behaviour_logprobs=np.where(sampled, -rng.uniform(1, 4, prompt + answer), 0).astype(np.float32),
    temperature=float(rng.choice([0.7, 1.0, 1.3])),
  )


def samples(count: int) -> list[Sample]:
  rng = np.random.default_rng(0)
  return [sample(i, rng) for i in range(count)]


def tree_samples() -> list[Sample]:
  """Returns samples that begin with the same tokens.

  They are: four answers to one prompt, two of which also begin with the same tokens; two
  trajectories from one prompt, whose steps are separate rows, and of which the second diverges
  after the first turn; a group of one sample; two answers whose prompts differ only in the last
  token; and the same answer twice, to a prompt of one token.
  """
  rng = np.random.default_rng(4)

  def drawn(count):
    return rng.integers(0, VOCAB, count).tolist()

  prompt, start, history, other = drawn(7), drawn(2), drawn(5), drawn(6)
  turn, tool, second = drawn(4), drawn(2), drawn(4)
  heads = [(prompt, start + drawn(9)), (prompt, drawn(3)), (prompt, drawn(16)), (prompt, start)]
  step = history + turn + tool
  heads += [(history, turn), (step, second), (step + second + drawn(3), drawn(4))]
  heads += [(history + turn + drawn(1), drawn(3)), (drawn(4), drawn(8))]
  heads += [(other, drawn(7)), ([*other[:-1], VOCAB - 1 - other[-1]], drawn(5))]
  heads += [(other[:1], [3, 4]), (other[:1], [3, 4])]
  groups = 'aaaabbbbcddee'
  return [
    of_tokens(i, head, answer, rng, group_id=groups[i]) for i, (head, answer) in enumerate(heads)
  ]


def of_tokens(
  i: int, prompt: list[int], answer: list[int], rng: np.random.Generator, **fields
) -> Sample:
  """Returns a sample with these tokens. In an answer of at least nine tokens, the second third is a
  tool's.
  """
  tokens = np.array(prompt + answer, np.int32)
  like, third = sample(i, rng), len(answer) // 3
  sampled = np.arange(len(tokens)) >= len(prompt)
  if third >= 3:
    sampled[len(prompt) + third : len(prompt) + 2 * third] = False
  return dataclasses.replace(
    like,
    uid=f's/{PAIRED.stop + i}',
    tokens=tokens,
    prompt_len=len(prompt),
    role=np.where(sampled, Role.POLICY, Role.PROMPT).astype(np.uint8),
    loss_mask=sampled,
    sampled=sampled,
    behaviour_logprobs=np.where(sampled, -rng.uniform(1, 4, len(tokens)), 0).astype(np.float32),
    **fields,
  )


SAMPLES = [*samples(PAIRED.stop), *tree_samples()]
TREES = range(PAIRED.stop, len(SAMPLES))
"""Samples with shared prefixes, see `tree_samples`."""
REWARDS = tuple(float(i % 3 == 0) for i in ROLLOUTS)


def write_samples(path) -> None:
  write_segment(path, 'rows.arrayrecord', [encode(s) for s in SAMPLES])


def planned(i: int, reward: float | None, **changes: Any) -> Row:
  row = Row(
    uid=f's/{i}',
    source='rows.arrayrecord',
    index=i,
    length=len(SAMPLES[i].tokens),
    prompt_len=SAMPLES[i].prompt_len,
    group=SAMPLES[i].group_id,
    reward=reward,
    is_expert=False,
    truncated=False,
    version_step=0,
  )
  return dataclasses.replace(row, **changes)


def rollouts(rewards=REWARDS) -> tuple[Row, ...]:
  return tuple(planned(i, reward) for i, reward in enumerate(rewards))


def experts() -> tuple[Row, ...]:
  return tuple(planned(i, None, is_expert=True, version_step=None) for i in EXPERTS)


def trees(*, experts: tuple[int, ...] = ()) -> tuple[Row, ...]:
  """Returns the rows of `TREES`. `experts`: indices within `TREES` of samples that are
  demonstrations.
  """
  return tuple(
    planned(
      i,
      None if i - TREES[0] in experts else float((i - TREES[0]) % 3 == 0),
      is_expert=i - TREES[0] in experts,
    )
    for i in TREES
  )


def tree_pairs() -> tuple[Row, ...]:
  """Returns pairs of samples of `TREES`. Some share the prompt, some consist of a row and its
  continuation, and some have no common token.
  """
  numbers = ((1, 2), (0, 3), (5, 4), (6, 5), (7, 8), (11, 12))
  return tuple(
    planned(TREES[i], None, pair=f'p{pair}', label=label)
    for pair, both in enumerate(numbers)
    for i, label in zip(both, (1, -1))
  )


def pairs() -> tuple[Row, ...]:
  """Returns the rows of all pairs. The rejected answers come first, so that tests fail if code
  relies on the order.
  """
  rows = [
    planned(i, None, pair=f'p{(i - PAIRED[0]) // 2}', label=1 - 2 * ((i - PAIRED[0]) % 2))
    for i in PAIRED
  ]
  return tuple(sorted(rows, key=lambda row: row.label))


def bigram(options: ModelOptions, head: str = 'lm', mesh: Mesh | None = None) -> Model:
  """Returns the smallest possible model: its output at a position depends only on the token
  there.
  """
  matrix, outputs = {'kernel': ('vocab', 'embed')}, VOCAB if head == 'lm' else 1

  def init(key):
    table, output = jax.random.split(key)

    def draw(key, rows):
      return 0.5 * jax.random.normal(key, (rows, WIDTH), jnp.float32)

    return {
      'embed': {'kernel': draw(table, VOCAB)},
      'norm': {'scale': jnp.ones(WIDTH, jnp.float32)},
      'head': {'kernel': draw(output, outputs)},
    }

  return Model(
    spec=SPECS[head],
    options=options,
    init=init,
    apply=lambda params, tokens, *places: (
      params['embed']['kernel'][tokens] * params['norm']['scale']
    ),
    head_kernel=lambda params: params['head']['kernel'],
    init_cache=lambda batch, length: (),
    decode=lambda params, tokens, positions, cache: (params['embed']['kernel'][tokens], cache),
    axes=lambda: {'embed': matrix, 'norm': {'scale': ('norm',)}, 'head': matrix},
    mesh=mesh,
  )


MODELS = {
  'decoder': lambda options, head='lm', mesh=None: build_model(SPECS[head], options, mesh),
  'bigram': bigram,
}


@functools.cache
def host_params(model: str, head: str = 'lm'):
  """Returns random parameters in float32. They differ from the initial values of a model, which are
  1 in norms and 0 in biases.
  """
  drawn = jax.device_get(jax.jit(MODELS[model](ModelOptions(), head).init)(jax.random.key(1)))
  rng = np.random.default_rng(2)
  return jax.tree.map(lambda x: x + 0.05 * rng.normal(size=x.shape).astype(np.float32), drawn)


def log_probabilities(model: Model, tree, tokens, temperature):
  """Returns the logprobs of all tokens after each position of one sequence. Entry t predicts token
  t + 1. Attention is causal, so padding at the end has no effect.
  """
  ids = tokens[None]
  hidden = model.apply(tree, ids, jnp.arange(ids.shape[1])[None], jnp.ones_like(ids))
  return jax.nn.log_softmax((hidden @ model.head_kernel(tree).T)[0, :-1] / temperature)


def chosen(table, tokens):
  return table[jnp.arange(len(tokens) - 1), tokens[1:]]


def padded(values: np.ndarray) -> np.ndarray:
  return np.pad(values, (0, CHUNK - len(values)))


@functools.cache
def columns_of(model: str) -> tuple[dict[str, np.ndarray], ...]:
  """Returns, for each sample, the logprobs and values that forward passes and the sampler would
  have recorded. Each policy differs slightly from the policy in training.
  """
  policy = MODELS[model](ModelOptions())

  def own(params, tokens, temperature):
    return chosen(log_probabilities(policy, params, tokens, temperature), tokens)

  tokens, temperatures = (
    np.stack([padded(s.tokens) for s in SAMPLES]),
    np.float32([s.temperature for s in SAMPLES]),
  )
  logprobs = np.asarray(
    jax.jit(jax.vmap(own, (None, 0, 0)))(host_params(model), tokens, temperatures), np.float64
  )
  rng = np.random.default_rng(3)
  found = []
  for row, s in zip(logprobs, SAMPLES, strict=True):
    row, noise = np.r_[0.0, row][: len(s.tokens)], rng.normal(size=(4, len(s.tokens)))
    proximal = row + 0.3 * noise[0]
    columns = {
      'proximal_logprobs': proximal,
      'behaviour_logprobs': proximal + 0.4 * noise[1],
      'reference_logprobs': row + 0.5 * noise[2],
      'values': noise[3],
    }
    found.append(
      {name: np.where(s.loss_mask, x, 0.0).astype(np.float32) for name, x in columns.items()}
    )
  return tuple(found)


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
  """A loss, and rows for it. If `off_policy`, four different policies are involved: the sampler's,
  the proximal policy, the reference, and the policy in training.
  """

  algorithm: Algorithm
  rows: tuple[Row, ...]
  of_critic: bool = False
  off_policy: bool = True

  @property
  def loss(self) -> Loss:
    return self.algorithm.critic_loss if self.of_critic else self.algorithm.loss

  @property
  def head(self) -> str:
    return 'value' if self.of_critic else self.algorithm.head


def closed(
  algorithm: Algorithm, rows, *, model: str = 'bigram', step: int = 0, state=None
) -> Closed:
  """Returns the rows in the form that `annotate` takes."""

  def column(name):
    if name == 'loss_mask':
      return [SAMPLES[row.index].loss_mask for row in rows]
    return [columns_of(model)[row.index][name] for row in rows]

  return Closed(rows, step, {name: column(name) for name in algorithm.on_host}, state)


class Case:
  """Rows in one layout on a mesh, with one model and one precision."""

  def __init__(self, folder, *, rows, head='lm', model='decoder', dtype='float64', chunks=4,
               chunk_len=CHUNK, scan=False, remat='none', order=None, axes=(), step=0, room=0,
               lora=None, share=False, attention='auto', split=False):  # fmt: skip
    """`room`: number of rows that shapes are planned for, if it is greater than the number of rows.
    `share`: whether rows share prefixes. `split`: whether the remainder is split.
    """
    sizes = dict.fromkeys(AXES, 1) | dict(axes)
    self.mesh = build_mesh(MeshConfig(**sizes), jax.devices()[: math.prod(sizes.values())])
    self.model_name, self.head, self.dtype = model, head, dtype
    options = ModelOptions(
      scan_layers=scan, remat=remat, dtype=dtype, lora=lora, attention=attention
    )
    self.model = MODELS[model](options, head, self.mesh if self.mesh.size > 1 else None)
    order = order or (tuple(range(len(rows))),)
    self.shape = plan_shape(
      rows=max(room, *map(len, order)),
      ranks=data_parallel_ranks(self.mesh),
      chunks=chunks,
      chunk_len=chunk_len,
      unit=2 if any(row.pair for row in rows) else 1,
      shares_prefixes=share,
      splits_remainder=split,
    )
    rows = tuple(with_prefixes(rows, [SAMPLES[row.index] for row in rows]))
    self.plan = StepPlan(step=step, stage='x', rows=rows, optimizer_steps=order)
    self.loader = RowLoader(folder, self.mesh)

  def annotation(self, algorithm: Algorithm) -> Annotation:
    return algorithm.annotate(
      closed(algorithm, self.plan.rows, model=self.model_name, step=self.plan.step)
    )

  def packed(self, algorithm: Algorithm, number: int = 0, *, off_policy: bool = False):
    """Returns the optimizer step on the devices, and the constants of its loss."""
    found = self.annotation(algorithm)
    columns: dict[str, Any] = {'advantages': found.advantages}
    if found.returns is not None:
      columns['returns'] = found.returns
    if off_policy:
      known = [columns_of(self.model_name)[row.index] for row in self.plan.rows]
      columns |= {name: [row[name] for row in known] for name in known[0]}
    step = [*self.loader.steps(self.plan, self.shape)][number]
    return self.loader.fill(step, columns, found.in_loss), dict(found.constants)

  def params(self):
    tree = jax.tree.map(lambda x: x.astype(self.dtype), host_params(self.model_name, self.head))
    return place_params(
      self.model, self.mesh, stack_layers(tree) if self.model.options.scan_layers else tree
    )


@functools.cache
def program(
  model: str,
  options: ModelOptions,
  subject: Subject,
  token_chunk: int,
  mesh: Mesh | None,
  ranks: int | None,
):
  function = functools.partial(
    gradients,
    MODELS[model](options, subject.head, mesh),
    subject.loss,
    token_chunk=token_chunk,
    on_policy=() if subject.off_policy else ('proximal_logprobs',),
    ranks=ranks,
  )
  return jax.jit(function)


@functools.cache
def compute(folder, subject: Subject, *, token_chunk=None, rows=None, **cut):
  """Returns the gradients of one optimizer step in the layout `cut`. Stacked layers are unstacked.

  Args:
    rows: rows of the step. If None, they are the subject's rows.
  """
  with jax.enable_x64(cut.get('dtype', 'float64') == 'float64'):
    case = Case(folder, rows=rows or subject.rows, head=subject.head, **cut)
    packed, constants = case.packed(subject.algorithm, off_policy=subject.off_policy)
    token_chunk = token_chunk or case.shape.chunk_len
    ranks = split_ranks(case.mesh, case.shape.splits_remainder)
    function = program(
      case.model_name, case.model.options, subject, token_chunk, case.model.mesh, ranks
    )
    found = jax.device_get(function(case.params(), packed.chunks, packed.used, constants))
  return (
    found._replace(grads=unstack_layers(found.grads)) if case.model.options.scan_layers else found
  )


def assert_same(found, wanted, precision='float64'):
  """Asserts that losses and gradients are equal within `LIMITS`, and that no gradient is zero."""
  per_tensor, of_loss = LIMITS[precision]
  assert abs(found.loss - wanted.loss) <= of_loss * max(1.0, abs(wanted.loss))
  grads, wanted_grads = flatten(found.grads), flatten(wanted.grads)
  assert grads.keys() == wanted_grads.keys()
  for name, tensor in wanted_grads.items():
    scale = np.linalg.norm(tensor)
    assert scale > 1e-7, name
    assert np.linalg.norm(grads[name] - tensor) <= per_tensor * scale, name


SCORES = (1.0, 0.0, 0.5, 1.0, 0.0, None, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
"""Rewards of three groups: two groups with different rewards, one of which has an unscorable
sample, and a group that gives no learning signal.
"""
USUAL = tuple(
  planned(
    i,
    score,
    correct=None if score is None else score > 0.5,
    truncated=i == 3,
    # If a tool's tokens separate two turns, the first turn may get a reward.
    turn_rewards=(0.3,) if np.diff(SAMPLES[i].loss_mask).sum() > 1 and i % 2 else (),
  )
  for i, score in enumerate(SCORES)
)
