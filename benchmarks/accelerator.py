"""Measurements on one GPU, in at most 8 minutes: attention against a reference, training steps
compared with PyTorch, and offload.

  PYTHONPATH=. python3 benchmarks/accelerator.py [--models=0.5B,1.5B] \\
    [--parts=product,attention,steps,offload] [--tiny]

Needs JAX, Flax and optax with GPU support. The comparison also needs PyTorch; transformers is
optional. vLLM, grain and a network are not needed. Each part runs in a separate process, so that
its peak memory can be measured. A part that lacks time or a dependency is skipped, and the reason
is printed.

product: bf16 products of large matrices, the measured peak. attention: values and gradients of each
implementation in bf16 against the reference in float32. steps: GRPO updates of Qwen2.5's shapes
with random weights (bf16 computation, float32 parameters and AdamW, layers recomputed in the
backward pass) here and in PyTorch (SDPA under autocast, gradient checkpointing, fused AdamW, the
head recomputed in chunks), on the same rows of equal length. offload: a gigabyte between device and
pinned host memory. `--tiny` checks on any machine that the script works.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from updates import Learner, Row, pack_rows, random_rows

from jaxrl_llm.core import script
from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.models.attention import platform_of, proven
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.flops import causal_pairs, model_flops
from jaxrl_llm.models.spec import ModelOptions, ModelSpec
from jaxrl_llm.ops.attention import KERNELS, attention
from jaxrl_llm.ops.logprobs import plan_token_chunk
from jaxrl_llm.ops.places import Places
from jaxrl_llm.ops.self_check import Trial

_PARTS = flags.DEFINE_list(
  'parts', ['product', 'attention', 'steps', 'offload'], 'What is measured.'
)
_MODELS = flags.DEFINE_list('models', ['0.5B', '1.5B'], 'Whose steps are measured.')
_CHUNK_LEN = flags.DEFINE_integer('chunk_len', 2048, 'Tokens of a row.', lower_bound=16)
_CHUNKS = flags.DEFINE_integer('chunks', 8, 'Rows of a micro-batch.', lower_bound=1)
_MICRO_BATCHES = flags.DEFINE_integer('micro_batches', 4, 'Of a step.', lower_bound=1)
_STEPS = flags.DEFINE_integer('steps', 6, 'Timed steps.', lower_bound=1)
_SCAN = flags.DEFINE_bool('scan_layers', True, 'One compiled layer for all.')
_REMAT = flags.DEFINE_string('remat', 'full', 'Of ModelOptions.')
_NOMINAL = flags.DEFINE_float(
  'nominal_tflops', 989.0, 'What the maker says of dense bf16 products.'
)
_MINUTES = flags.DEFINE_float('minutes', 7.5, 'After so long nothing more is begun.')
_TINY = flags.DEFINE_bool(
  'tiny', False, 'Shapes that show on a CPU that this script works, and nothing else.'
)
_ONLY = flags.DEFINE_string(
  'only', None, 'One part in this process, which prints its result as JSON; internal.'
)

QWEN = dict(rope_theta=1e6, max_position_embeddings=32768)
MODELS = {
  '0.5B': dict(
    QWEN,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    head_dim=64,
  ),
  '1.5B': dict(
    QWEN,
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    head_dim=128,
  ),
}
"""Shapes of Qwen2.5, with a vocabulary of 151,936 and tied embeddings."""


class Missing(Exception):
  """Raised when a part cannot be measured on this machine."""


def spec_of(model: str) -> ModelSpec:
  return tiny('qwen2', 512) if _TINY.value else tiny('qwen2', 151_936, **MODELS[model])


def rows_of(spec: ModelSpec) -> list[Row]:
  """Returns rows that are as long as a chunk. A quarter of each row is the prompt."""
  length = 32 if _TINY.value else _CHUNK_LEN.value
  count = _CHUNKS.value * _MICRO_BATCHES.value
  return random_rows([length] * count, prompt_len=length // 4, vocab=spec.vocab_size)


def seconds(work: Callable[[], object], *, warm_up: int = 2) -> float:
  """Returns the median duration in seconds of `--steps` calls."""
  found = []
  for number in range(warm_up + _STEPS.value):
    before = time.perf_counter()
    work()
    if number >= warm_up:
      found.append(time.perf_counter() - before)
  return statistics.median(found)


def product() -> dict[str, float]:
  size = 256 if _TINY.value else 8192
  a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
  repeats = 10
  # Each product depends on the previous product. Values stay near 1.
  chain = jax.jit(
    lambda a, b: jax.lax.fori_loop(0, repeats, lambda _, x: (x @ b) * jnp.bfloat16(size**-0.5), a)
  )
  took = seconds(lambda: chain(a, b).block_until_ready())
  return {'tflops': 2 * size**3 * repeats / took / 1e12}


IMPLEMENTATIONS = ('masked', 'blockwise', *KERNELS['gpu'])
"""Values of `ModelOptions.attention` on a GPU."""


def computed_by(name: str) -> Callable:
  """Returns the function (query, key, value, places) -> attention output."""
  if name in KERNELS['gpu'] and jax.default_backend() != 'gpu':
    raise Missing(f'it runs on GPUs only, and this is a {jax.default_backend()}')
  return lambda q, k, v, places: attention(q, k, v, places, places, implementation=name)


def distance(found, wanted) -> float:
  """Returns ‖found - wanted‖ / ‖wanted‖."""
  found, wanted = (np.asarray(x, np.float64) for x in (found, wanted))
  return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def attention_part(model: str) -> dict[str, object]:
  """Returns, for each implementation, the distances of its output and of its gradients (with
  respect to query, key and value) from the reference.
  """
  spec = spec_of(model)
  rows, length = (2, 64) if _TINY.value else (4, _CHUNK_LEN.value)
  heads = (spec.num_attention_heads, spec.num_key_value_heads, spec.num_key_value_heads)
  keys = jax.random.split(jax.random.key(0), 4)

  def shape(n):
    return (rows, length, n, spec.head_dim)

  arrays = [jax.random.normal(key, shape(n), jnp.bfloat16) for key, n in zip(keys, heads)]
  weight = jax.random.normal(keys[3], shape(heads[0]), jnp.float32)
  # Segments of unequal lengths, and padding at the end of every row.
  ids = (
    np.searchsorted(
      [length // 8, length // 2, length - length // 16], np.arange(length), side='right'
    )
    + 1
  )
  positions = np.arange(length) - np.searchsorted(ids, ids)

  def tiled(row):
    return jnp.asarray(np.tile(row, (rows, 1)), jnp.int32)

  places = Places(tiled(np.where(ids == 4, 0, ids)), tiled(positions))

  def values_and_gradients(name, dtype):
    compute = computed_by(name)

    def function(q, k, v):
      out = compute(q, k, v, places)
      return (
        out.astype(jnp.float32) * weight * (places.segment_ids > 0)[..., None, None]
      ).sum(), out

    both = jax.jit(jax.value_and_grad(function, argnums=(0, 1, 2), has_aux=True))
    given = [x.astype(dtype) for x in arrays]

    def run():
      return jax.block_until_ready(both(*given))

    (_, out), grads = run()
    real = np.asarray(places.segment_ids > 0)[..., None, None]
    return [np.asarray(x, np.float32) * real for x in (out, *grads)], run

  with jax.default_matmul_precision('highest'):
    wanted, _ = values_and_gradients('masked', jnp.float32)
  found: dict[str, object] = {}
  for name in IMPLEMENTATIONS:
    try:
      parts, run = values_and_gradients(name, jnp.bfloat16)
      found[name] = [distance(*pair) for pair in zip(parts, wanted)] + [1e3 * seconds(run)]
    except Exception as reason:  # Libraries and compilers raise errors of any type.
      found[name] = str(reason).splitlines()[0]
  return found


def own_step(model: str) -> dict[str, float]:
  spec = spec_of(model)
  rows = rows_of(spec)
  length = len(rows[0].tokens)
  # As a run does when it starts.
  trial = Trial(spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim, 'bfloat16')
  checked = proven('auto', trial, platform=platform_of(None), time=length, shards=1)
  options = ModelOptions(
    scan_layers=_SCAN.value,
    remat=_REMAT.value,
    dtype='bfloat16',
    param_dtype='float32',
    attention=checked.implementation if checked else 'auto',
  )
  token_chunk = plan_token_chunk(
    chunks=_CHUNKS.value, time=length, vocab=spec.vocab_size, budget_bytes=2 << 30
  )
  learner = Learner(spec, options, token_chunk=token_chunk)
  batch = pack_rows(rows, chunks=_CHUNKS.value, chunk_len=length)
  before = time.perf_counter()
  norm = float(learner.step(batch).stats['actor/grad_norm'].total)
  compiling = time.perf_counter() - before
  took = seconds(lambda: learner.step(batch), warm_up=1)
  memory = jax.devices()[0].memory_stats() or {}
  return {
    'seconds': took,
    'peak': memory.get('peak_bytes_in_use', 0),
    'norm': norm,
    'compiling': compiling,
  }


def torch_step(model: str) -> dict[str, float]:
  """Measures the same update in PyTorch, written as PyTorch's users usually write it."""
  try:
    import torch
  except ModuleNotFoundError:
    raise Missing('PyTorch is not installed') from None
  if jax.default_backend() == 'gpu' and not torch.cuda.is_available():
    raise Missing('PyTorch does not see the card')
  device = 'cuda' if torch.cuda.is_available() else 'cpu'
  spec, torch.backends.cuda.matmul.allow_tf32 = spec_of(model), True
  torch.manual_seed(0)
  decoder, kind = torch_decoder(spec)
  decoder.to(device).train()
  optimizer = torch.optim.AdamW(
    decoder.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True
  )
  rows = rows_of(spec)
  tokens = torch.tensor(np.stack([row.tokens for row in rows])).long().to(device)
  advantages = torch.tensor([row.advantage for row in rows], dtype=torch.float32, device=device)
  prompt_len, size, count = rows[0].prompt_len, _CHUNKS.value, len(rows)

  def logprobs(hidden, kernel, targets):
    logits = torch.nn.functional.linear(hidden, kernel).float()
    return logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(-1)

  def loss(ids, advantage):
    with torch.autocast(device, torch.bfloat16):
      hidden, kernel = decoder(ids)

      def head(row):
        return torch.utils.checkpoint.checkpoint(
          logprobs,
          hidden[row, prompt_len - 1 : -1],
          kernel,
          ids[row, prompt_len:],
          use_reentrant=False,
        )

      found = torch.stack([head(row) for row in range(len(ids))])
    ratio = torch.exp(found - found.detach())
    clipped = ratio.clamp(0.8, 1.2)
    return (
      -torch.minimum(ratio * advantage[:, None], clipped * advantage[:, None]).mean(1).sum() / count
    )

  def step():
    for start in range(0, count, size):
      loss(tokens[start : start + size], advantages[start : start + size]).backward()
    norm = torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()  # Waits for the device.

  norm = step()
  took = seconds(step, warm_up=1)
  peak = torch.cuda.max_memory_allocated() if device == 'cuda' else 0
  return {'seconds': took, 'peak': peak, 'norm': norm, 'kind': kind}


def torch_decoder(spec: ModelSpec):
  """Returns a module from ids to (hidden states, the head's kernel), and whether it is
  transformers' or ours.
  """
  import torch
  import torch.utils.checkpoint

  try:
    from transformers import Qwen2Config, Qwen2Model
  except ImportError:
    Qwen2Model = None

  class FromTransformers(torch.nn.Module):
    def __init__(self):
      super().__init__()
      names = (
        'vocab_size',
        'hidden_size',
        'intermediate_size',
        'num_hidden_layers',
        'num_attention_heads',
      )
      names += ('num_key_value_heads', 'head_dim', 'rms_norm_eps', 'max_position_embeddings')
      self.body = Qwen2Model(
        Qwen2Config(**{name: getattr(spec, name) for name in names}, use_cache=False)
      )
      self.body.set_attn_implementation('sdpa')
      self.body.gradient_checkpointing_enable()

    def forward(self, ids):
      return self.body(input_ids=ids).last_hidden_state, self.body.embed_tokens.weight

  class Layer(torch.nn.Module):
    def __init__(self):
      super().__init__()
      d, ff, linear = spec.hidden_size, spec.intermediate_size, torch.nn.Linear
      self.sizes = [
        n * spec.head_dim for n in (spec.num_attention_heads, *(spec.num_key_value_heads,) * 2)
      ]
      self.first, self.second = (torch.nn.RMSNorm(d, spec.rms_norm_eps) for _ in range(2))
      self.qkv, self.output = linear(d, sum(self.sizes)), linear(self.sizes[0], d, bias=False)
      self.gate_up, self.down = linear(d, 2 * ff, bias=False), linear(ff, d, bias=False)

    def forward(self, x, cos, sin):
      def heads(y):
        return y.unflatten(-1, (-1, spec.head_dim)).transpose(1, 2)

      q, k, v = map(heads, self.qkv(self.first(x)).split(self.sizes, -1))

      def turn(y):
        return y * cos + torch.cat([-y.chunk(2, -1)[1], y.chunk(2, -1)[0]], -1) * sin

      q, k = turn(q).to(v.dtype), turn(k).to(v.dtype)
      mixed = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
      )
      x = x + self.output(mixed.transpose(1, 2).flatten(2))
      gate, up = self.gate_up(self.second(x)).chunk(2, -1)
      return x + self.down(torch.nn.functional.silu(gate) * up)

  class Plain(torch.nn.Module):
    def __init__(self):
      super().__init__()
      self.embed = torch.nn.Embedding(spec.vocab_size, spec.hidden_size)
      torch.nn.init.normal_(self.embed.weight, std=spec.initializer_range)
      self.layers = torch.nn.ModuleList(Layer() for _ in range(spec.num_hidden_layers))
      self.norm = torch.nn.RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(self, ids):
      pairs = torch.arange(0, spec.head_dim, 2, device=ids.device) / spec.head_dim
      angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * spec.rope_theta**-pairs
      cos, sin = (f(angles).repeat(1, 2) for f in (torch.cos, torch.sin))
      x = self.embed(ids)
      for layer in self.layers:
        x = torch.utils.checkpoint.checkpoint(layer, x, cos, sin, use_reentrant=False)
      return self.norm(x), self.embed.weight

  return (
    (FromTransformers(), 'transformers') if Qwen2Model is not None else (Plain(), 'written here')
  )


def offload() -> dict[str, float]:
  """Returns the rates in GB/s at which a gigabyte is transferred to pinned host memory and back."""
  device = jax.devices()[0]
  there = jax.sharding.SingleDeviceSharding(device, memory_kind='pinned_host')
  here = jax.sharding.SingleDeviceSharding(device, memory_kind='device')
  count = 1 << (16 if _TINY.value else 28)
  on_device = jax.device_put(jnp.ones(count, jnp.float32), here)
  on_host = jax.block_until_ready(jax.device_put(on_device, there))

  def move(x, to):
    return seconds(lambda: jax.block_until_ready(jax.device_put(x, to)))

  return {
    name: 4e-9 * count / move(x, to)
    for name, x, to in (('out', on_device, there), ('in', on_host, here))
  }


WORKS = {
  'product': lambda _: product(),
  'attention': attention_part,
  'here': own_step,
  'torch': torch_step,
  'offload': lambda _: offload(),
}


class Runs:
  """Runs each part in a separate process, until the time limit is reached."""

  def __init__(self):
    self._end = time.monotonic() + 60 * _MINUTES.value
    self.failed = False

  def part(self, name: str, model: str = '') -> dict | None:
    """Runs a part and returns its result; prints the reason and returns None if there is none."""
    what, left = f'{name} {model}'.strip(), self._end - time.monotonic()
    if left <= 0:
      print(f'{what}: skipped, no time is left', flush=True)
      return None
    command = [sys.executable, *sys.argv, f'--only={name}:{model}']
    try:
      done = subprocess.run(command, capture_output=True, text=True, timeout=left)
    except subprocess.TimeoutExpired:
      print(f'{what}: ended, the time is over', flush=True)
      return None
    lines = [line for line in done.stdout.splitlines() if line.startswith('{')]
    if done.returncode or not lines:
      self.failed = True
      print(
        f'{what}: failed with status {done.returncode}: '
        f'{" | ".join(done.stderr.splitlines()[-3:])}',
        flush=True,
      )
      return None
    found = json.loads(lines[-1])
    if 'missing' in found:
      print(f'{what}: skipped, {found["missing"]}', flush=True)
      return None
    return found


def report_steps(runs: Runs, model: str, peak_tflops: float | None) -> None:
  spec = spec_of(model)
  rows = rows_of(spec)
  tokens = sum(len(row.tokens) for row in rows)
  flops = model_flops(spec, tokens, pairs=causal_pairs(len(row.tokens) for row in rows))
  took = {}
  for side in ('here', 'torch'):
    found = runs.part(side, model)
    if found is None:
      continue
    took[side], rate = found['seconds'], flops / found['seconds'] / 1e12
    of_peak = f'{rate / peak_tflops:.3f} of the measured product, ' if peak_tflops else ''
    memory = f'peak {found["peak"] / 2**30:.1f} GiB' if found['peak'] else 'peak of memory not told'
    more = (
      f', first step {found["compiling"]:.0f} s' if side == 'here' else f', decoder {found["kind"]}'
    )
    print(
      f'{model} {side}: {found["seconds"]:.3f} s a step of {tokens} tokens, '
      f'{tokens / found["seconds"]:.0f} tokens/s, {rate:.4g} TFLOP/s of the model: '
      f'{of_peak}{rate / _NOMINAL.value:.3f} of {_NOMINAL.value:g}; {memory}{more}, gradient norm '
      f'{found["norm"]:.4g}',
      flush=True,
    )
  if len(took) == 2:
    print(f'{model}: PyTorch takes {took["torch"] / took["here"]:.2f} times as long', flush=True)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise UserError(f'argument {argv[1]!r} is not a flag')
  if _ONLY.value:
    name, _, model = _ONLY.value.partition(':')
    try:
      print(json.dumps(WORKS[name](model)))
    except Missing as reason:
      print(json.dumps({'missing': str(reason)}))
    return
  for kind, asked, known in (
    ('parts', _PARTS.value, ('product', 'attention', 'steps', 'offload')),
    ('models', _MODELS.value, tuple(MODELS)),
  ):
    for name in asked:
      if name not in known:
        raise UserError(f'--{kind}: {name!r} is unknown; wanted some of {", ".join(known)}')
  runs, peak = Runs(), None
  print(f'jax {jax.__version__}, {time.strftime("%Y-%m-%d")}', flush=True)
  if 'product' in _PARTS.value and (found := runs.part('product')):
    peak = found['tflops']
    print(f'product: {peak:.4g} TFLOP/s in bf16', flush=True)
  for model in _MODELS.value if 'attention' in _PARTS.value else ():
    for name, result in (runs.part('attention', model) or {}).items():
      if isinstance(result, str):
        print(f'attention {model} {name}: skipped, {result}', flush=True)
        continue
      *distances, milliseconds = result
      of = ', '.join(
        f'{what} {x:.2g}'
        for what, x in zip(('values', 'by query', 'by key', 'by value'), distances)
      )
      print(
        f'attention {model} {name}: {of} from the reference; {milliseconds:.2f} ms both ways',
        flush=True,
      )
  for model in _MODELS.value if 'steps' in _PARTS.value else ():
    report_steps(runs, model, peak)
  if 'offload' in _PARTS.value and (found := runs.part('offload')):
    print(
      f'offload: {found["out"]:.3g} GB/s to pinned host memory, {found["in"]:.3g} GB/s back',
      flush=True,
    )
  if runs.failed:
    raise RunError('accelerator: a part failed, see above')


if __name__ == '__main__':
  script.run(main)
