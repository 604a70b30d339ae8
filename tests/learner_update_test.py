"""The update: what may not change a gradient does not, what should stop an update does.

Gradients are compared in float64, where the contract is 1e-12, and against an independent computation that packs
nothing. What is said of the update alone is said on a bigram model, which compiles in no time.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.batching.packing import pack
from jaxrl_llm.batching.plan import Row, StepPlan, plan_shape
from jaxrl_llm.core.trees import flatten
from jaxrl_llm.data.load import RowLoader
from jaxrl_llm.experience.sample import Sample, Source, encode
from jaxrl_llm.learner.algorithm import GrpoConfig, SftConfig, grpo, sft
from jaxrl_llm.learner.forward import build_score
from jaxrl_llm.learner.optimizer import OptimizerConfig, build_optimizer
from jaxrl_llm.learner.state import init_state, place_params
from jaxrl_llm.learner.update import build_update, gradients
from jaxrl_llm.models.api import Model, build_model, stack_layers, unstack_layers
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.spec import ModelOptions
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh, data_parallel_ranks
from jaxrl_llm.replay.segments import write_segment

VOCAB, CHUNK, WIDTH = 40, 24, 32
SPEC = tiny(
  'qwen3',
  VOCAB,
  num_hidden_layers=2,
  hidden_size=WIDTH,
  intermediate_size=48,
  num_attention_heads=2,
  num_key_value_heads=1,
)
MODES = ('token-mean', 'seq-mean-token-sum', 'seq-mean-token-mean', 'seq-mean-token-sum-norm')
ALGORITHMS = {
  'sft': sft(SftConfig()),
  **{mode: grpo(GrpoConfig(loss_agg_mode=mode, loss_scale_factor=9.0, entropy_coeff=0.01)) for mode in MODES},
  'rare': grpo(GrpoConfig(loss_agg_mode='seq-mean-token-sum-norm', loss_scale_factor=1e-3)),
}
LIMITS = {'float32': (1e-5, 1e-6), 'float64': (1e-12, 1e-12)}
"""The contract: relative norm of a tensor's difference, and difference of losses."""


def sample(i: int, rng: np.random.Generator) -> Sample:
  prompt, answer = int(rng.integers(1, 8)), int(rng.integers(1, 16))
  sampled = np.r_[np.zeros(prompt, bool), np.ones(answer, bool)]
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
    behaviour_logprobs=np.where(sampled, -rng.uniform(1, 4, prompt + answer), 0).astype(np.float32),
    temperature=float(rng.choice([0.7, 1.0, 1.3])),
  )


def samples(count: int) -> list[Sample]:
  rng = np.random.default_rng(0)
  return [sample(i, rng) for i in range(count)]


SAMPLES = samples(12)
REWARDS = tuple(float(i % 3 == 0) for i in range(12))


def bigram(options: ModelOptions) -> Model:
  """The least model there is: what comes next depends on the token alone."""
  normal = lambda key: 0.5 * jax.random.normal(key, (VOCAB, WIDTH), jnp.float32)
  matrix = {'kernel': ('vocab', 'embed')}
  return Model(
    spec=SPEC,
    options=options,
    init=lambda key: {
      'embed': {'kernel': normal(key)},
      'norm': {'scale': jnp.ones(WIDTH, jnp.float32)},
      'head': {'kernel': normal(jax.random.fold_in(key, 1))},
    },
    apply=lambda params, tokens, positions, segment_ids: params['embed']['kernel'][tokens] * params['norm']['scale'],
    head_kernel=lambda params: params['head']['kernel'],
    init_cache=lambda batch, length: (),
    decode=lambda params, tokens, positions, cache: (params['embed']['kernel'][tokens], cache),
    axes=lambda: {'embed': matrix, 'norm': {'scale': ('norm',)}, 'head': matrix},
  )


MODELS = {'decoder': lambda options: build_model(SPEC, options), 'bigram': bigram}


@functools.cache
def host_params(model: str):
  noise = lambda x: np.asarray(x) + 0.05 * np.random.default_rng(x.size).normal(size=x.shape).astype(np.float32)
  return jax.tree.map(noise, MODELS[model](ModelOptions()).init(jax.random.key(1)))


class Case:
  """The rows on a mesh, however they are cut: one model, shape, and precision."""

  def __init__(self, folder, *, model='decoder', dtype='float64', chunks=4, chunk_len=CHUNK, scan=False, remat='none',
               rewards=REWARDS, order=None, axes=()):  # fmt: skip
    config = MeshConfig(**{'data': 1, 'fsdp': 1, 'tensor': 1, **dict(axes)})
    self.mesh = build_mesh(config, jax.devices()[: config.data * config.fsdp * config.tensor])
    self.model_name, self.dtype = model, dtype
    self.model = MODELS[model](ModelOptions(scan_layers=scan, remat=remat, dtype=dtype))
    ranks, order = data_parallel_ranks(self.mesh), order or (tuple(range(len(rewards))),)
    self.shape = plan_shape(rows=max(map(len, order)), ranks=ranks, chunks=chunks, chunk_len=chunk_len)
    rows = tuple(planned(i, reward) for i, reward in enumerate(rewards))
    self.plan = StepPlan(step=0, stage='x', rows=rows, optimizer_steps=order)
    self.loader = RowLoader(folder, self.mesh)

  def packed(self, algorithm, number=0):
    annotation = algorithm.annotate(self.plan.rows)
    return self.loader.load(
      self.plan, number, self.shape, advantages=annotation.advantages, in_loss=annotation.in_loss
    )

  def params(self):
    tree = jax.tree.map(lambda x: x.astype(self.dtype), host_params(self.model_name))
    return place_params(self.model, self.mesh, stack_layers(tree) if self.model.options.scan_layers else tree)


def planned(i: int, reward: float | None) -> Row:
  return Row(
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


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('rows')
  write_segment(path, 'rows.arrayrecord', [encode(s) for s in SAMPLES])
  return path


@functools.cache
def compute(folder, name, *, token_chunk=None, **cut):
  """Gradients of one optimizer step of the rows, cut in some way; layers unrolled again."""
  with jax.enable_x64(cut.get('dtype', 'float64') == 'float64'):
    case = Case(folder, **cut)
    packed = case.packed(ALGORITHMS[name])
    function = functools.partial(
      gradients, case.model, ALGORITHMS[name], token_chunk=token_chunk or case.shape.chunk_len, on_policy=True
    )
    found = jax.device_get(jax.jit(function)(case.params(), packed.chunks, packed.used))
  return found._replace(grads=unstack_layers(found.grads)) if case.model.options.scan_layers else found


def sequence_logprobs(model: Model, tree, tokens):
  """Of one sequence alone, by a plain log-softmax; entry t speaks of token t + 1. Padding at the end is not looked at."""
  ids = tokens[None]
  hidden = model.apply(tree, ids, jnp.arange(ids.shape[1])[None], jnp.ones_like(ids))
  logits = (hidden @ model.head_kernel(tree).T)[0, :-1]
  return lambda temperature: jax.nn.log_softmax(logits / temperature)[jnp.arange(len(tokens) - 1), tokens[1:]]


def padded(values):
  return np.pad(np.asarray(values), (0, CHUNK - len(values)))


@functools.cache
def unpacked(model_name: str):
  """Loss and gradient of token-mean GRPO in float64, one sequence at a time, summed on the host."""
  model, tokens = MODELS[model_name](ModelOptions(dtype='float64')), sum(int(s.loss_mask.sum()) for s in SAMPLES)

  def loss(tree, ids, mask, temperature, advantage):
    logprobs = sequence_logprobs(model, tree, ids)(temperature)
    entropies = all_entropies(model, tree, ids, temperature)
    ratio = jnp.exp(logprobs - jax.lax.stop_gradient(logprobs))
    return -((ratio * advantage + 0.01 * entropies) * mask[1:]).sum() / tokens

  with jax.enable_x64(True):
    tree = jax.tree.map(lambda x: x.astype(np.float64), host_params(model_name))
    advantages = ALGORITHMS['token-mean'].annotate([planned(i, r) for i, r in enumerate(REWARDS)]).advantages
    parts, function = [], jax.jit(jax.value_and_grad(loss))
    for s, advantage in zip(SAMPLES, advantages, strict=True):
      # The batch holds temperatures and advantages in float32.
      parts.append(
        function(tree, padded(s.tokens), padded(s.loss_mask), float(np.float32(s.temperature)),
                 float(np.float32(advantage)))
      )  # fmt: skip
    return jax.device_get(jax.tree.map(lambda *leaves: sum(leaves), *parts))


def all_entropies(model: Model, tree, tokens, temperature):
  ids = tokens[None]
  hidden = model.apply(tree, ids, jnp.arange(ids.shape[1])[None], jnp.ones_like(ids))
  logp = jax.nn.log_softmax((hidden @ model.head_kernel(tree).T)[0, :-1] / temperature)
  return -(jnp.exp(logp) * logp).sum(-1)


def assert_same(found, loss, grads, precision='float64'):
  per_tensor, of_loss = LIMITS[precision]
  assert abs(found.loss - loss) <= of_loss * max(1.0, abs(loss))
  found, wanted = flatten(found.grads), flatten(grads)
  assert found.keys() == wanted.keys()
  for name in wanted:
    scale = np.linalg.norm(wanted[name])
    assert scale > 1e-7, name
    assert np.linalg.norm(found[name] - wanted[name]) <= per_tensor * scale, name
