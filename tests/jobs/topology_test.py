"""The real training programs, compiled for devices that are not here, by the command that a user
types.
"""

import json
import math
import re
import subprocess
from typing import NamedTuple

import job
import pytest
import warm

from jaxrl_llm.app.commands.train import AOT_ENVIRONMENT

pytestmark = [
  pytest.mark.full,
  pytest.mark.skipif(
    not (job.ROOT / AOT_ENVIRONMENT).exists(),
    reason='wants the compilers: jaxrl install --environment=aot',
  ),
]
# A small model and short rows: compile time grows with both.
MODEL = dict(
  hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
  num_key_value_heads=2, head_dim=128, vocab_size=4096, tie_word_embeddings=False,
)  # fmt: skip
LARGER = MODEL | dict(hidden_size=256, intermediate_size=512, vocab_size=32_768)
WIDE = MODEL | dict(hidden_size=512, intermediate_size=4096)
"""Most of its parameters are in many kernels of equal size."""

LAYERS = 4
"""Layers of the model that is compiled for GPUs: between the first and the last, those of one are
gathered beside the products of another.
"""
CUT = ('--config.learner.mesh.fsdp=4', '--config.learner.mesh.tensor=2')


def rows_of(prompt, response):
  """Flags for rows of so many tokens."""
  return (
    f'--config.rollout.max_prompt_length={prompt}',
    f'--config.rollout.max_response_length={response}',
    f'--config.rollout.embedded.prefill_buckets=({prompt},)',
  )


def dry_run(
  topology, *flags, config='sizes.py:0.5b', model=MODEL, rows=(64, 192), expect=0, xla_flags=''
):
  """Standard output, or the error where one is expected."""
  model_flag = f'--config.policy.model={json.dumps(model)}'
  command = ['launch/train.py', f'--config=configs/{config}', '--dry_run', f'--topology={topology}']
  command += [model_flag, *rows_of(*rows), *flags]
  env = job.environment(XLA_FLAGS=xla_flags)
  # The command executes the Python that has the compilers.
  process = warm.start(command, cwd=job.ROOT, env=env)
  out, err = process.communicate(timeout=900)
  assert process.returncode == expect, err[-3000:]
  return err if expect else out


def line_of(program, text):
  (found,) = [line for line in text.splitlines() if line.startswith(f'{program} of grpo: ')]
  return found


def megabytes(what, line):
  return float(re.search(rf'{what} ([\d.,]+)', line)[1].replace(',', ''))


def held_by(role, text):
  """Memory that a role keeps, in MB: in all, on each device and in host memory."""
  row = re.search(rf'{role} +│ +([\d.,]+) │ +([\d.,]+) │ +([\d.,]+) │', text)
  return tuple(float(n.replace(',', '')) for n in row.groups())


def on_gpu_devices(*flags, **options):
  budget = f'--config.learner.logits_budget_bytes={1 << 18}'
  return dry_run('h100:4', budget, *flags, model=MODEL | dict(num_hidden_layers=LAYERS), **options)


@pytest.fixture(scope='module')
def on_gpus():
  return on_gpu_devices()


class Sharded(NamedTuple):
  text: str
  """Standard output of the command."""
  vocabulary: int
  """Tokens."""
  logits: str
  """Positions whose logits are there at a time, of those of a row: '128 of 256'."""


@pytest.fixture(
  scope='module', params=['small', pytest.param('larger', marks=pytest.mark.acceptance)]
)
def sharded(request):
  model, rows, budget, logits = {
    'small': (MODEL, (64, 192), 1 << 20, '128 of 256'),
    'larger': (LARGER, (512, 1536), 32 << 20, '512 of 2048'),
  }[request.param]
  text = dry_run(
    'v5e:2x4', *CUT, f'--config.learner.logits_budget_bytes={budget}', model=model, rows=rows
  )
  return Sharded(text, model['vocab_size'], logits)


def test_the_training_step_compiles_for_a_tpu_slice_with_its_fused_attention(sharded):
  assert '8 × TPU v5 lite: data=1 fsdp=4 sequence=1 tensor=2' in sharded.text
  assert 'attention in training: splash (the kernel of tpu)' in sharded.text
  update = line_of('update', sharded.text)
  assert 'does not fit' not in update
  assert re.search(r'all-gather \d+ \(', update) and re.search(r'reduce-scatter \d+ \(', update)
  assert re.search(r'[\d.]+ TFLOP per full micro-batch, expected in [\d.]+ s, \d+% of peak', update)
  assert 'does not fit' not in line_of('logprobs', sharded.text)


def test_publishing_gathers_one_layer_in_the_servers_data_type(sharded):
  (line,) = [line for line in sharded.text.splitlines() if line.startswith('largest program')]
  name, dtype, shape = re.match(
    r'largest program of publishing \((.*?)\): .* largest (\w+)\[([\d,]+)\]\)', line
  ).groups()
  assert name in ('embed/kernel', 'head/kernel') and 'does not fit' not in line
  hidden = 128 if sharded.vocabulary == 4096 else 256
  # The bits of bfloat16, in whatever shape the compiler gives them for the way.
  assert dtype == 'u16' and math.prod(map(int, shape.split(','))) == sharded.vocabulary * hidden


def compiled_by(script, *flags):
  """Standard output of a benchmark that compiles for devices that are not here."""
  libtpu = {
    'TPU_SKIP_MDS_QUERY': '1', 'TPU_WORKER_HOSTNAMES': 'localhost',
    'ALLOW_MULTIPLE_LIBTPU_LOAD': 'true',
  }  # fmt: skip
  done = subprocess.run(
    [job.ROOT / AOT_ENVIRONMENT / 'bin/python', f'benchmarks/{script}', *flags],
    cwd=job.ROOT,
    env=job.environment(XLA_FLAGS='', **libtpu),
    capture_output=True,
    text=True,
    timeout=900,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return done.stdout


@pytest.mark.parametrize(
  ('topology', 'chunks'), [('h100:2', 1), pytest.param('v5e:2x4', 2, marks=pytest.mark.acceptance)]
)
def test_the_gradient_of_the_head_is_read_and_written_a_few_times(topology, chunks):
  def accesses(*flags):
    out = compiled_by('head_compiled.py', f'--topology={topology}', *flags)
    return tuple(
      map(int, re.search(r'(\d+) chunks .* read (\d+) and written (\d+) times', out).groups())
    )

  found, reads, writes = accesses()
  assert found == chunks
  # Each chunk reads and writes the sum once. Before and after, it is set to 0, changes its layout
  # and is summed over the devices.
  assert chunks <= reads <= chunks + 2 and chunks <= writes <= chunks + 2
  # With the budget of CPUs, there are 256 tokens at a time.
  assert min(accesses(f'--budget={256 << 20}')) >= 8


@pytest.mark.acceptance
@pytest.mark.parametrize(
  ('topology', 'size'), [('v5e:4x8', '7b'), ('v5e:8x8', '14b'), ('h100:8x8', '70b')]
)
def test_at_size_publishing_holds_less_than_a_layers_largest_matrix(topology, size):
  out = compiled_by('publish_compiled.py', f'--topology={topology}', f'--size={size}')
  shares = [float(share) for share in re.findall(r' ([\d.]+) of a layer', out)]
  assert len(shares) >= 6 and max(shares) <= 1
  assert set(re.findall(r'largest (\w+)\[', out)) <= {'u16', 'u32'}
  # If each process gets only the parts of its share, a device needs less memory and traffic.
  gathered, exchanged = re.split(r'^gathered: .*$', out, flags=re.MULTILINE)
  shares = [re.findall(r' ([\d.]+) of a layer', each) for each in (gathered, exchanged)]
  before, after = (max(map(float, each)) for each in shares)
  assert after < before / 3
  assert 'all-to-all' in exchanged and 'all-gather' not in exchanged
  received = [float(each.replace(',', '')) for each in re.findall(r'receives ([\d,]+) MB', out)]
  assert len(received) == 2 and received[1] < received[0] / 10


@pytest.mark.acceptance
def test_between_slices_goes_little_but_the_sums_of_gradients():
  cut = ('--config.learner.mesh.data=2', *CUT)
  text = dry_run('2*v5e:2x4', *cut, f'--config.learner.logits_budget_bytes={1 << 20}')
  assert '16 × TPU v5 lite: data=2 fsdp=4 sequence=1 tensor=2' in text
  sizes = re.findall(r'([\w-]+)( between slices)? \d+ \(([\d.,]+) MB', line_of('update', text))
  between = {kind: float(size) for kind, crosses, size in sizes if crosses}
  within = {kind: float(size) for kind, crosses, size in sizes if not crosses}
  # The compiler also gathers parts of the embedding's gradient that it has reduced.
  assert between['all-reduce'] > between.get('all-gather', 0.0)
  assert set(between) <= {'all-reduce', 'all-gather'}
  assert sum(between.values()) < 0.2 * sum(within.values())


def test_a_cut_vocabulary_is_never_gathered(sharded):
  """The largest gathers are of kernels, of the vocabulary's half: neither logits nor a whole
  kernel.
  """
  assert f'logits for {sharded.logits} tokens at a time' in sharded.text
  for program in ('update', 'logprobs'):
    line = line_of(program, sharded.text)
    largest = re.search(r'all-gather \d+ \([\d.,]+ MB, largest (\w+\[[\d,]*\])\)', line)[1]
    assert str(sharded.vocabulary // 2) in largest and str(sharded.vocabulary) not in largest


def test_each_device_holds_its_part_of_what_a_role_keeps(sharded):
  for role in ('policy', 'optimizer'):
    whole, part, in_host = held_by(role, sharded.text)
    # Printed are tenths of a megabyte.
    assert part == pytest.approx(whole / 8, rel=0.02, abs=0.06), role
    assert in_host == 0, role


@pytest.mark.acceptance
def test_moments_in_host_memory_leave_the_devices():
  text = dry_run(
    'v5e:2x4', *CUT, '--config.policy.scan_layers=false',
    '--config.stages.0.optimizer.offload=true', model=WIDE | dict(vocab_size=1024), rows=(32, 96),
  )  # fmt: skip
  update = line_of('update', text)
  parameters, gradients = (held_by(role, text)[1] for role in ('policy', 'gradients'))
  _, kept, moments = held_by('optimizer', text)
  assert kept < 0.1  # Its scalars.
  assert megabytes('in host memory', update) == pytest.approx(moments, rel=0.01) and moments > 10
  # An argument is a parameter or a part of the batch, as in the pass that knows no optimizer.
  assert megabytes('arguments', update) == pytest.approx(
    megabytes('arguments', line_of('logprobs', text)), rel=0.05
  )
  # Not only between updates: those of one parameter at a time are there while an update is applied.
  assert megabytes('update of grpo:', update) < parameters + gradients + moments


@pytest.mark.acceptance
def test_without_their_moments_devices_hold_less_by_just_so_much():
  def compiled(*flags):
    return line_of(
      'update',
      dry_run(
        'v5e:2x4', *CUT, '--config.policy.scan_layers=false', *flags, model=WIDE, rows=(512, 1536)
      ),
    )

  own, offloaded = compiled(), compiled('--config.stages.0.optimizer.offload=true')
  moments = megabytes('in host memory', offloaded)
  assert 'in host memory' not in own and moments > 10
  assert megabytes('arguments', own) - megabytes('arguments', offloaded) == pytest.approx(
    moments, rel=0.01
  )
  # Not only between updates: those of one parameter at a time are there while an update is applied.
  assert (
    megabytes('update of grpo:', own) - megabytes('update of grpo:', offloaded) >= 0.5 * moments
  )


def test_the_training_step_compiles_for_a_gpu(on_gpus):
  text = on_gpus
  assert 'attention in training: blockwise' in text
  assert '4 × NVIDIA H100 80GB HBM3: data=1 fsdp=4 sequence=1 tensor=1' in text
  update = line_of('update', text)
  assert 'does not fit' not in update
  # In bfloat16, layers are gathered once forward and once backward, and the head once.
  heads, layer = MODEL['num_attention_heads'] * MODEL['head_dim'], MODEL['hidden_size']
  kernels = layer * (4 * heads + 3 * MODEL['intermediate_size']) * LAYERS
  head = MODEL['vocab_size'] * layer
  size, largest = re.search(r'all-gather \d+ \(([\d.]+) MB, largest (\w+)\[', update).groups()
  assert float(size) == pytest.approx(2 * (2 * kernels + head) / 1e6, abs=0.2)
  assert largest == 'bf16'


@pytest.mark.acceptance
def test_the_triton_kernel_of_gpus_compiles_on_request():
  text = on_gpu_devices('--config.policy.attention=pallas_gpu')
  assert 'attention in training: pallas_gpu (as configured)' in text
  assert 'does not fit' not in line_of('update', text)


def overlapped(text):
  """Share of the bytes of the update's collectives that travel beside matrix products, in %."""
  return int(re.search(r'(\d+)% of the bytes beside matrix products', line_of('update', text))[1])


@pytest.fixture(scope='module')
def changed_on_gpus(on_gpus):
  """The same with gradients in bfloat16, and without the compiler flags."""
  flags = re.search(r'^compiler flags: (.+)$', on_gpus, re.M)[1]
  return on_gpu_devices(
    '--config.policy.reduce_dtype=bfloat16', xla_flags=flags.replace('=true', '=false')
  )


def test_on_gpus_most_of_what_is_sent_travels_beside_products_by_the_flags_that_are_set(
  on_gpus, changed_on_gpus
):
  flags = re.search(r'^compiler flags: (.+)$', on_gpus, re.M)[1].split()
  assert len(flags) == 3 and all(flag.endswith('=true') for flag in flags)
  share = overlapped(on_gpus)
  assert share >= 50
  assert re.search(r'^compiler flags: (.+)$', changed_on_gpus, re.M)[1].count('=false') == 3
  assert overlapped(changed_on_gpus) < share - 20


@pytest.mark.acceptance
def test_on_gpus_with_balanced_shards_the_gradient_of_the_head_is_summed_beside_a_product():
  text = dry_run(
    'h100:4', '--config.learner.mesh.sequence=2', '--config.policy.attention=blockwise',
    f'--config.learner.logits_budget_bytes={1 << 28}',
    model=LARGER | dict(num_hidden_layers=LAYERS), rows=(512, 1536),
  )  # fmt: skip
  assert 'balanced shards' in text
  for program in ('update', 'logprobs'):
    # The hidden states of a device have 0.5 MB. None of them is sent to another device.
    permuted = re.search(r'collective-permute \d+ \(([\d.]+) MB', line_of(program, text))
    assert permuted is None or float(permuted[1]) < 0.1
  # The gradient of the head has 32 % of the bytes.
  assert overlapped(text) >= 45


def test_gradients_of_kernels_travel_in_bfloat16_on_request(on_gpus, changed_on_gpus):
  before, after = (
    float(re.search(r'reduce-scatter \d+ \(([\d.]+) MB', line_of('update', text))[1])
    for text in (on_gpus, changed_on_gpus)
  )
  heads, layer = MODEL['num_attention_heads'] * MODEL['head_dim'], MODEL['hidden_size']
  kernels = layer * (4 * heads + 3 * MODEL['intermediate_size']) * LAYERS
  assert before - after == pytest.approx(2 * kernels / 1e6, abs=0.2)


def test_excess_memory_is_refused_with_its_size():
  huge = MODEL | dict(hidden_size=8192, intermediate_size=131_072, num_hidden_layers=1)
  settled = (
    '--config.stages.0.optimizer.offload=false',
    f'--config.learner.logits_budget_bytes={1 << 26}',
  )
  error = dry_run('v5e:1x1', *settled, model=huge, expect=2)
  assert re.search(
    r'^error: topology v5e:1x1: update of grpo[^\n]*more memory than a device has', error, re.M
  )


@pytest.mark.acceptance
def test_if_no_memory_plan_fits_the_smallest_one_is_named():
  huge = MODEL | dict(hidden_size=8192, intermediate_size=131_072, num_hidden_layers=1)
  error = dry_run('v5e:1x1', model=huge, expect=2)
  assert re.search(
    r'^error: no memory plan fits a device: [^\n]* \(moments in host memory, [^\n]* of logits\): '
    r'does not fit, update of grpo: [^\n]*; use more devices',
    error,
    re.M,
  )


@pytest.mark.acceptance
def test_the_update_of_a_7b_model_fits_16_chips_of_16_gib():
  seven_b = dict(
    hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28, num_attention_heads=28,
    num_key_value_heads=4, head_dim=128, vocab_size=152_064, tie_word_embeddings=False,
  )  # fmt: skip
  text = dry_run('v5e:4x4', config='sizes.py:7b', model=seven_b, rows=(512, 1536))
  assert 'moments on the devices, at most 1,057.0 MB of logits: chosen' in text
  update = line_of('update', text)
  assert 'does not fit' not in update
  # If the head's gradient is summed whole, it needs 14,428 MB, and after the layers' backward pass
  # 15,649 MB.
  assert megabytes('update of grpo:', update) < 13_000


def test_a_shape_that_the_compiler_does_not_know_is_one_line():
  error = dry_run('v5e:3x5', expect=2)
  assert re.search(r"^error: topology 'v5e:3x5': the compiler does not know it: .+", error, re.M)


def test_training_for_devices_that_are_not_here_is_refused():
  done = job.call(
    'launch/train.py', '--config=configs/quickstart.py', '--topology=v5e:2x4', expect=2
  )
  assert done.stderr.splitlines()[-1].startswith('error: --topology: needs --dry_run')
