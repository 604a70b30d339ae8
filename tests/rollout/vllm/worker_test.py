"""What runs inside vLLM's workers, against modules with the attributes of vLLM's layers, and
against those layers.
"""

import ast
import contextlib
import importlib
import json
import os
import pathlib
import subprocess
import threading
import time
import types

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from paths import ROOT

from jaxrl_llm.rollout.vllm import publication
from jaxrl_llm.rollout.vllm.transfer import slice_of
from jaxrl_llm.weights import checksums
from jaxrl_llm.weights.checksums import Slice
from jaxrl_llm.weights.deltas import Image
from jaxrl_llm.weights.tensor_files import FileLayout

PATH = ROOT / 'jaxrl_llm' / 'rollout' / 'vllm' / 'worker.py'
PYTHON = (
  pathlib.Path(os.environ.get('JAXRL_LLM_VLLM_ENVIRONMENT', ROOT / '.venv-vllm')) / 'bin' / 'python'
)


@pytest.fixture(scope='module', autouse=True)
def _pytorch():
  """Imported for this file's tests only: collecting them needs neither it nor the worker."""
  global layers, save_file, torch, worker
  torch = pytest.importorskip('torch')
  layers = importlib.import_module('vllm_layers')
  worker = layers.load_worker()
  save_file = importlib.import_module('safetensors.torch').save_file


HIDDEN, HEAD, HEADS, MLP, VOCAB = 8, 2, 4, 12, 100
LAYERS = 2


def model_of(number=0, size=1, *, kv_heads=2, words=VOCAB, tied=False):
  """A decoder as vLLM builds it: fused projections, a padded vocabulary, and one plain
  column-parallel layer.
  """
  rank, layer_of, module_of = layers.Rank(number, size), layers.layer_of, layers.module_of

  def layer():
    attention = module_of(
      qkv_proj=layers.qkv(rank, HIDDEN, heads=HEADS, kv_heads=kv_heads, head=HEAD),
      o_proj=layers.row(rank, HEADS * HEAD, HIDDEN),
      q_norm=layer_of((HEAD,)),
    )
    merged = layers.column(rank, HIDDEN, 2 * MLP, output_sizes=[MLP, MLP])
    mlp = module_of(gate_up_proj=merged, down_proj=layers.row(rank, MLP, HIDDEN))
    return module_of(self_attn=attention, mlp=mlp, input_layernorm=layer_of((HIDDEN,)))

  embedding = layers.vocabulary(rank, words, HIDDEN)
  body = module_of(
    embed_tokens=embedding,
    layers=torch.nn.ModuleList(layer() for _ in range(LAYERS)),
    norm=layer_of((HIDDEN,)),
  )
  model = module_of(
    model=body,
    lm_head=embedding if tied else layers.vocabulary(rank, words, HIDDEN),
    score=layers.column(rank, HIDDEN, 16),
  )
  model.packed_modules_mapping = layers.FUSED
  return model


def whole_of(*, kv_heads=2, words=VOCAB, tied=False):
  """The tensors of such a model as a checkpoint has them."""
  shapes = {'model.embed_tokens.weight': (words, HIDDEN)}
  for i in range(LAYERS):
    attention, mlp = f'model.layers.{i}.self_attn', f'model.layers.{i}.mlp'
    shapes[f'model.layers.{i}.input_layernorm.weight'] = (HIDDEN,)
    shapes[f'{attention}.q_norm.weight'] = (HEAD,)
    for part, (outputs, inputs) in {
      f'{attention}.q_proj': (HEADS * HEAD, HIDDEN),
      f'{attention}.k_proj': (kv_heads * HEAD, HIDDEN),
      f'{attention}.v_proj': (kv_heads * HEAD, HIDDEN),
      f'{attention}.o_proj': (HIDDEN, HEADS * HEAD),
      f'{mlp}.gate_proj': (MLP, HIDDEN),
      f'{mlp}.up_proj': (MLP, HIDDEN),
      f'{mlp}.down_proj': (HIDDEN, MLP),
    }.items():
      shapes |= {f'{part}.weight': (outputs, inputs), f'{part}.bias': (outputs,)}
  shapes |= {'model.norm.weight': (HIDDEN,), 'score.weight': (16, HIDDEN), 'score.bias': (16,)}
  if not tied:
    shapes['lm_head.weight'] = (words, HIDDEN)
  generator = torch.Generator().manual_seed(3)
  return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def snapshot(model):
  return {name: parameter.clone() for name, parameter in model.named_parameters()}


def assert_same(found, wanted):
  assert found.keys() == wanted.keys()
  for name, tensor in wanted.items():
    assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize('tied', [True, False])
def test_a_whole_model_goes_by_its_checkpoints_names_and_shapes(tied):
  model, whole = model_of(tied=tied), whole_of(tied=tied)
  views = worker.hf_views(model)
  assert {name: tuple(view.tensor.shape) for name, view in views.items()} == {
    name: tuple(tensor.shape) for name, tensor in whole.items()
  }
  assert ('lm_head.weight' in views) is not tied
  assert all(view.dim is None for view in views.values())


def wrapped(model):
  """As vLLM wraps what can have an adapter, where a server takes adapters."""
  for module in list(model.modules()):
    for name, child in list(module.named_children()):
      if name.endswith('_proj') or name == 'embed_tokens':
        module.add_module(name, layers.module_of(base_layer=child))
  return model


@pytest.mark.parametrize('size', [1, 2])
def test_what_adapters_stand_on_goes_by_its_own_name(size):
  for rank in range(size):
    plain, model = worker.hf_views(model_of(rank, size)), wrapped(model_of(rank, size))
    views = worker.hf_views(model)
    assert {name: view._replace(tensor=None) for name, view in views.items()} == {
      name: view._replace(tensor=None) for name, view in plain.items()
    }
    worker.load(views, whole_of())
    worker.load(plain, whole_of())
    assert_same(
      {n: v.tensor for n, v in worker.hf_views(model).items()},
      {n: v.tensor for n, v in plain.items()},
    )


@pytest.mark.parametrize(
  ('config', 'allowed', 'rank'),
  [(None, '1', 0), (8, None, 0), (8, '0', 0), (8, 'True', 8), (8, '1', 8)],
)
def test_a_worker_tells_which_adapters_it_takes(monkeypatch, config, allowed, rank):
  monkeypatch.delenv('VLLM_ALLOW_RUNTIME_LORA_UPDATING', raising=False)
  if allowed is not None:
    monkeypatch.setenv('VLLM_ALLOW_RUNTIME_LORA_UPDATING', allowed)
  self = told(model_of())
  self.vllm_config.lora_config = config and types.SimpleNamespace(max_lora_rank=config)
  assert self.jaxrl_weights()['adapter_rank'] == rank


def test_fused_projections_hold_their_parts_one_after_the_other():
  model, whole = model_of(), whole_of()
  worker.load(worker.hf_views(model), whole)
  for leaf in ('weight', 'bias'):
    fused = model.get_parameter(f'model.layers.1.self_attn.qkv_proj.{leaf}')
    parts = [whole[f'model.layers.1.self_attn.{part}_proj.{leaf}'] for part in 'qkv']
    assert torch.equal(fused, torch.cat(parts))
    fused = model.get_parameter(f'model.layers.1.mlp.gate_up_proj.{leaf}')
    assert torch.equal(
      fused, torch.cat([whole[f'model.layers.1.mlp.{part}_proj.{leaf}'] for part in ('gate', 'up')])
    )


def test_rows_that_pad_the_vocabulary_are_not_the_checkpoints():
  model, whole = model_of(), whole_of()
  worker.load(worker.hf_views(model), whole)
  for name in ('model.embed_tokens.weight', 'lm_head.weight'):
    table = model.get_parameter(name)
    assert (
      table.shape[0] == 128
      and torch.equal(table[:VOCAB], whole[name])
      and (table[VOCAB:] == layers.UNTOUCHED).all()
    )


def own_heads(tensor, heads):
  """These heads' rows of a projection."""
  return torch.cat([tensor[head * HEAD : (head + 1) * HEAD] for head in heads])


def cut(whole, rank, size, kv_heads, words):
  """What a rank holds, by vLLM's own names: its heads, their keys and values, its share of
  everything else.
  """
  queries = range(rank * HEADS // size, (rank + 1) * HEADS // size)
  keys = sorted({query // (HEADS // kv_heads) for query in queries})

  def share(tensor, axis=0):
    return tensor.chunk(size, axis)[rank]

  def table(tensor):
    padded = torch.full((-(-words // layers.PADDING) * layers.PADDING, HIDDEN), layers.UNTOUCHED)
    padded[:words] = tensor
    return share(padded)

  held = {name: table(whole[name]) for name in ('model.embed_tokens.weight', 'lm_head.weight')}
  for name in ('model.norm.weight', 'score.weight', 'score.bias'):
    held[name] = share(whole[name]) if name.startswith('score') else whole[name]
  for i in range(LAYERS):
    attention, mlp = f'model.layers.{i}.self_attn', f'model.layers.{i}.mlp'
    for name in (f'model.layers.{i}.input_layernorm.weight', f'{attention}.q_norm.weight'):
      held[name] = whole[name]
    for leaf in ('weight', 'bias'):
      q, k, v = (whole[f'{attention}.{part}_proj.{leaf}'] for part in 'qkv')
      parts = own_heads(q, queries), own_heads(k, keys), own_heads(v, keys)
      held[f'{attention}.qkv_proj.{leaf}'] = torch.cat(parts)
      held[f'{mlp}.gate_up_proj.{leaf}'] = torch.cat(
        [share(whole[f'{mlp}.{p}_proj.{leaf}']) for p in ('gate', 'up')]
      )
    for name in (f'{attention}.o_proj', f'{mlp}.down_proj'):
      held |= {
        f'{name}.weight': share(whole[f'{name}.weight'], 1),
        f'{name}.bias': whole[f'{name}.bias'],
      }
  return held


# 30: ranks whose share of the vocabulary is all padding.
@pytest.mark.parametrize('words', [VOCAB, 30, 128])
@pytest.mark.parametrize(('size', 'kv_heads'), [(2, 4), (2, 2), (4, 4), (4, 2), (4, 1), (2, 1)])
def test_each_rank_holds_its_slice_of_every_layer(size, kv_heads, words):
  whole = whole_of(kv_heads=kv_heads, words=words)
  for rank in range(size):
    model = model_of(rank, size, kv_heads=kv_heads, words=words)
    views = worker.hf_views(model)
    assert views.keys() == whole.keys()
    assert {name: view.whole for name, view in views.items()} == {
      n: tuple(t.shape) for n, t in whole.items()
    }
    worker.load(views, whole)
    assert_same(snapshot(model), cut(whole, rank, size, kv_heads, words))


def told(model):
  """The extension's commands, on a worker that has the model."""
  self = worker.Worker()
  self.model_runner = types.SimpleNamespace(model=model)
  self.vllm_config = types.SimpleNamespace(
    model_config=types.SimpleNamespace(logprobs_mode='processed_logprobs'), speculative_config=None
  )
  return self


def test_a_worker_whose_model_has_no_torch_parameters_says_so():
  assert told(object()).jaxrl_weights() == {'device': 'jax', 'tensors': {}}


def test_what_a_rank_tells_of_its_slices_is_where_its_digests_come_from():
  whole = whole_of(kv_heads=1)
  for rank in range(4):
    model = model_of(rank, 4, kv_heads=1)
    worker.load(worker.hf_views(model), whole)
    answer = json.loads(json.dumps(told(model).jaxrl_weights()))
    assert (answer['device'], answer['speculative'], answer['logprobs_mode']) == (
      'cpu',
      False,
      'processed_logprobs',
    )
    wanted, proof = {}, {}
    for name, held in answer['tensors'].items():
      part = whole[name].numpy()
      if held['slice'] is not None:
        axis, start = held['slice']
        part = part.take(range(start, start + held['shape'][axis]), axis)
      assert (list(part.shape), part.dtype.name) == (held['shape'], held['dtype'])
      wanted[name] = publication.digest(part)
      cut = slice_of(held)
      proof[name] = checksums.checksums(whole[name].numpy(), [cut] if cut else ())[cut]
    assert told(model).jaxrl_digests() == wanted
    assert told(model).jaxrl_checksums() == proof
  assert answer['tensors']['model.layers.0.self_attn.k_proj.weight']['slice'] == [0, 0]
  assert answer['tensors']['model.layers.0.self_attn.q_proj.weight']['slice'] == [0, 6]
  assert answer['tensors']['model.layers.0.mlp.down_proj.weight']['slice'] == [1, 9]


@pytest.fixture
def published(tmp_path):
  """(whole tensors, announced files, digests of the slices that two ranks hold)."""
  whole = whole_of()
  save_file({name: tensor.contiguous() for name, tensor in whole.items()}, tmp_path / 'w')
  slices = {}
  for rank in range(2):
    for name, held in told(model_of(rank, 2)).jaxrl_weights()['tensors'].items():
      if held['slice'] is not None:
        axis, start = held['slice']
        length = held['shape'][axis]
        part = whole[name].narrow(axis, start, length)
        slices.setdefault(name, []).append([axis, start, length, worker.digest(part)])
  return whole, {'w': {name: worker.digest(tensor) for name, tensor in whole.items()}}, slices


@pytest.mark.parametrize('rank', [0, 1])
def test_a_rank_reads_its_slices_and_no_more(tmp_path, monkeypatch, published, rank):
  whole, files, slices = published
  model, plain = model_of(rank, 2), model_of(rank, 2)
  worker.load(worker.hf_views(plain), whole)
  views, digested = worker.hf_views(model), []
  count = worker.digest
  monkeypatch.setattr(worker, 'digest', lambda t: digested.append(t.numel()) or count(t))
  cuts = worker.known_slices(views, json.loads(json.dumps(slices)))
  assert cuts.keys() == {name for name, view in views.items() if view.dim is not None}
  worker.load(views, worker.read_checked(files, str(tmp_path), cuts), cuts)
  assert_same(snapshot(model), snapshot(plain))
  assert sum(digested) == sum(view.tensor.numel() for view in views.values())
  # Of a rank with other slices, only those of keys and values are the same.
  others = worker.known_slices(worker.hf_views(model_of(1, 4)), slices)
  assert {name.split('.')[-2] for name in others} == {'k_proj', 'v_proj'}


def test_a_byte_of_a_slice_that_differs_is_refused_by_the_rank_that_holds_it(tmp_path, published):
  whole, files, slices = published
  name = 'model.layers.1.mlp.down_proj.weight'
  changed = {n: tensor.contiguous() for n, tensor in whole.items()}
  changed[name] = changed[name].clone()
  changed[name][3, -1] += 1  # In the last column, which rank 1 holds.
  save_file(changed, tmp_path / 'w')
  for rank in (0, 1):
    model = model_of(rank, 2)
    views, before = worker.hf_views(model), snapshot(model)
    cuts = worker.known_slices(views, slices)
    if rank == 0:
      worker.load(views, worker.read_checked(files, str(tmp_path), cuts), cuts)
      continue
    with pytest.raises(ValueError, match=f'{name} has digest .* as read, announced was'):
      worker.read_checked(files, str(tmp_path), cuts)
    assert_same(snapshot(model), before)


def whole_update(directory, files, slices):
  return types.SimpleNamespace(
    directory=str(directory), files=files, slices=slices, label='0.1', deltas=[]
  )


def wait_for(receiver):
  state = receiver.verified(wait_s=60.0)
  assert state['done']
  return state['error']


@pytest.mark.parametrize(('wait_s', 'done'), [(60.0, True), (0.0, False)])
def test_a_verification_that_ends_soon_takes_one_call(
  tmp_path, published, monkeypatch, wait_s, done
):
  """A second call would come only after the trainer has slept."""
  whole, files, _ = published
  save_file({n: tensor.contiguous() for n, tensor in whole.items()}, tmp_path / 'w')
  read_checked, may_read = worker.read_checked, threading.Event()

  def read_slowly(*arguments):
    may_read.wait(0.1 if done else 60)
    return read_checked(*arguments)

  monkeypatch.setattr(worker, 'read_checked', read_slowly)
  monkeypatch.setattr(worker, '_SOON_S', wait_s)
  self = worker.Worker()
  self.model_runner = types.SimpleNamespace(model=model_of())
  self.weight_transfer_engine = types.SimpleNamespace(
    receiver=worker.Receiver(), parse_update_info=lambda info: whole_update(tmp_path, files, {})
  )
  assert self.jaxrl_verify({}) == {'done': done, 'error': ''}
  may_read.set()
  assert wait_for(self.weight_transfer_engine.receiver) == ''


@pytest.mark.parametrize('rank', [0, 1])
def test_files_that_were_verified_are_loaded_without_reading_them_again(tmp_path, published, rank):
  whole, files, slices = published
  save_file({n: tensor.contiguous() for n, tensor in whole.items()}, tmp_path / 'w')
  update, expected, loaded = (
    whole_update(tmp_path, files, slices),
    model_of(rank, 2),
    model_of(rank, 2),
  )
  worker.Receiver().receive(worker.hf_views(expected), update)
  receiver, views = worker.Receiver(), worker.hf_views(loaded)
  receiver.verify(views, update)
  assert wait_for(receiver) == ''
  (tmp_path / 'w').unlink()
  receiver.receive(views, update)
  assert receiver.holds == '0.1'
  assert_same(snapshot(loaded), snapshot(expected))
  with pytest.raises(ValueError, match='cannot be read'):  # Verified tensors are used once.
    receiver.receive(views, update)


def open_maps(directory):
  """Number of maps and descriptors of this process on files that are or were in a directory."""
  maps = pathlib.Path('/proc/self/maps').read_text().splitlines()
  descriptors = pathlib.Path('/proc/self/fd')
  links = []
  for name in os.listdir(descriptors):
    with contextlib.suppress(OSError):
      links.append(os.readlink(descriptors / name))
  return sum(f'{directory}/' in line for line in [*maps, *links])


@pytest.mark.parametrize(
  'change', ['removed', 'overwritten', 'another update', 'refused', 'refused delta']
)
def test_maps_of_verified_files_are_closed_when_no_update_can_use_them(
  tmp_path, published, monkeypatch, change
):
  """An attached server that its trainer has left would keep a whole model in shared memory."""
  monkeypatch.setattr(worker, '_LOOK_S', 0.01)
  whole, files, _ = published
  path, receiver, model = tmp_path / 'w', worker.Receiver(), model_of(0, 1)
  save_file({n: tensor.contiguous() for n, tensor in whole.items()}, path)
  views = worker.hf_views(model)
  receiver.verify(views, whole_update(tmp_path, files, {}))
  assert wait_for(receiver) == ''
  time.sleep(0.05)
  assert open_maps(tmp_path) > 1, 'they are kept while the file is there'
  if change == 'removed':
    path.unlink()
  elif change == 'overwritten':
    with path.open('r+b') as file:
      file.write(bytes(8))
  elif change == 'another update':
    (tmp_path / 'empty').mkdir()
    receiver.verify(views, whole_update(tmp_path / 'empty', files, {}))
  elif change == 'refused':
    del views[next(iter(views))]
    with pytest.raises(ValueError, match='publication and model differ'):
      receiver.receive(views, whole_update(tmp_path, files, {}))
  else:
    update = whole_update(tmp_path, {}, {})
    update.deltas = [{'before': '0.1'}]
    with pytest.raises(ValueError, match='holds no known version'):
      receiver.receive(views, update)
  deadline = time.monotonic() + 60
  while open_maps(tmp_path):
    assert time.monotonic() < deadline
    time.sleep(0.01)
  if change == 'removed':
    with pytest.raises(ValueError, match='cannot be read'):
      receiver.receive(views, whole_update(tmp_path, files, {}))


@pytest.mark.parametrize('renamed', [False, True])
def test_verified_files_that_are_overwritten_before_they_are_loaded_are_refused(
  tmp_path, published, renamed
):
  """The trainer writes a new version into the file of one that it has released."""
  whole, files, _ = published
  save_file({n: tensor.contiguous() for n, tensor in whole.items()}, tmp_path / 'w')
  receiver, model = worker.Receiver(), model_of(0, 1)
  views, before = worker.hf_views(model), snapshot(model)
  receiver.verify(views, whole_update(tmp_path, files, {}))
  assert wait_for(receiver) == ''
  path = (tmp_path / 'w').rename(tmp_path / 'unfinished') if renamed else tmp_path / 'w'
  content = path.read_bytes()
  with path.open('r+b') as file:
    file.seek(len(content) // 2)
    file.write(bytes(byte ^ 1 for byte in content[len(content) // 2 :]))
  with pytest.raises(ValueError, match=r'cannot be read|as read, announced was'):
    receiver.receive(views, whole_update(tmp_path, files, {}))
  assert_same(snapshot(model), before)


def test_tensors_of_another_update_are_not_taken_from_a_verification(tmp_path, published):
  whole, files, slices = published
  save_file({n: tensor.contiguous() for n, tensor in whole.items()}, tmp_path / 'w')
  model = model_of(0, 2)
  receiver, views = worker.Receiver(), worker.hf_views(model)
  for changed in (
    {'directory': str(tmp_path / 'none')},
    {'files': {'w': dict.fromkeys(files['w'], '00')}},
  ):
    receiver.verify(views, whole_update(tmp_path, files, slices))
    assert wait_for(receiver) == ''
    before, other = snapshot(model), whole_update(tmp_path, files, slices)
    vars(other).update(changed)
    with pytest.raises(ValueError, match=r'cannot be read|as read, announced was'):
      receiver.receive(views, other)
    assert_same(snapshot(model), before)


def test_a_failed_verification_names_the_tensor_and_loads_nothing(tmp_path, published):
  whole, files, slices = published
  name = 'model.layers.1.mlp.down_proj.weight'
  changed = {n: tensor.contiguous().clone() for n, tensor in whole.items()}
  changed[name][3, -1] += 1
  save_file(changed, tmp_path / 'w')
  receiver, model = worker.Receiver(), model_of(1, 2)
  assert receiver.verified()['error'] == 'nothing was verified'
  views, before = worker.hf_views(model), snapshot(model)
  receiver.verify(views, whole_update(tmp_path, files, slices))
  assert f'{name} has digest' in wait_for(receiver)
  with pytest.raises(ValueError, match=f'{name} has digest .* as read, announced was'):
    receiver.receive(views, whole_update(tmp_path, files, slices))
  assert_same(snapshot(model), before)


def test_slices_of_another_shape_or_dtype_are_not_loaded(published):
  whole, _, slices = published
  name = 'model.layers.0.mlp.down_proj.weight'
  for spoil in (lambda t: t[:, 1:], lambda t: t.double(), lambda t: t[1:]):
    model = model_of(0, 2)
    views, before = worker.hf_views(model), snapshot(model)
    cuts = worker.known_slices(views, slices)
    tensors = {n: views[n].of(t) if n in cuts else t for n, t in whole.items()}
    with pytest.raises(ValueError, match=f'{name}: published as'):
      worker.load(views, {**tensors, name: spoil(tensors[name])}, cuts)
    assert_same(snapshot(model), before)


def test_digests_are_of_what_is_live():
  model, whole = model_of(), whole_of()
  worker.load(worker.hf_views(model), whole)
  before, proof = told(model).jaxrl_digests(), told(model).jaxrl_checksums()
  model.get_parameter('model.layers.0.self_attn.qkv_proj.weight')[-1, -1] += 1
  after = told(model).jaxrl_digests()
  proven = told(model).jaxrl_checksums()
  assert {name for name in proof if proof[name] != proven[name]} == {
    name for name in before if before[name] != after[name]
  }
  assert {name for name in before if before[name] != after[name]} == {
    'model.layers.0.self_attn.v_proj.weight'
  }


def test_a_parameter_that_was_packed_away_is_refused():
  model = model_of()
  model.model.layers[1].mlp.down_proj.weight = torch.nn.Parameter(
    torch.empty(0), requires_grad=False
  )
  with pytest.raises(RuntimeError, match=r'model\.layers\.1\.mlp\.down_proj\.weight is empty'):
    worker.hf_views(model)


def test_parts_that_do_not_make_up_their_parameter_are_refused():
  model = model_of()
  model.model.layers[0].mlp.gate_up_proj.output_sizes = [MLP, MLP + 2]
  with pytest.raises(
    RuntimeError, match=r"24 rows, its parts \['gate_proj', 'up_proj'\] have \[12, 14\]"
  ):
    worker.hf_views(model)


MISFITS = {
  'one more row': lambda tensor: torch.cat([tensor, tensor[:1]]),
  'one row less': lambda tensor: tensor[:-1],
  'one more axis': lambda tensor: tensor[None],
  'another dtype': lambda tensor: tensor.bfloat16(),
  'twice as long': lambda tensor: torch.cat([tensor, tensor]),
}


@pytest.mark.parametrize('kind', MISFITS)
@pytest.mark.parametrize(('rank', 'size'), [(0, 1), (0, 4), (3, 4)])
def test_nothing_is_written_when_one_tensor_does_not_fit(rank, size, kind):
  model, whole = model_of(rank, size), whole_of()
  views, before = worker.hf_views(model), snapshot(model)
  for name in whole:
    bad = {**whole, name: MISFITS[kind](whole[name])}
    with pytest.raises(
      ValueError, match=rf'{name}: published as .*, the model has .*torch\.float32'
    ):
      worker.load(views, bad)
  assert_same(snapshot(model), before)
  worker.load(views, whole)
  assert_same(snapshot(model), cut(whole, rank, size, 2, VOCAB))


def test_other_columns_of_a_row_parallel_layer_do_not_fit():
  views, whole = worker.hf_views(model_of(1, 2)), whole_of()
  name = 'model.layers.0.mlp.down_proj.weight'
  for columns in (MLP - 1, MLP + 1, 2 * MLP, MLP // 2):
    with pytest.raises(
      ValueError, match=rf'{name}: published as \(8, {columns}\) .* the model has \(8, 12\)'
    ):
      worker.load(views, {**whole, name: torch.zeros(HIDDEN, columns)})


def test_a_slice_of_unknown_length_fits_what_reaches_its_end():
  view = worker.View(torch.zeros(3, 2), 1, 4)
  assert [columns for columns in range(9) if view.fits(torch.zeros(3, columns))] == [6, 7, 8]
  assert not view.fits(torch.zeros(2, 6)) and view.whole == (3, None)


def test_nothing_is_written_when_names_differ():
  model, whole = model_of(), whole_of()
  views, before = worker.hf_views(model), snapshot(model)
  for name in whole:
    with pytest.raises(ValueError, match=rf"tensors missing \['{name}'\], unknown \[\]"):
      worker.load(views, {other: tensor for other, tensor in whole.items() if other != name})
  with pytest.raises(ValueError, match=r"tensors missing \[\], unknown \['model.more'\]"):
    worker.load(views, {**whole, 'model.more': torch.zeros(1)})
  with pytest.raises(ValueError, match='tensors missing'):
    worker.load(views, {})
  assert_same(snapshot(model), before)


def as_numpy(tensor):
  if tensor.dtype == torch.bfloat16:
    return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
  return tensor.numpy()


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_digests_are_the_trainers(dtype):
  tensor = torch.randn(6, 10, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
  tensor[0, :4] = torch.tensor([float('nan'), float('inf'), -0.0, 1e-40])
  parts = [tensor, tensor.T, tensor[:, 2:5], tensor[2:4], tensor[:0], tensor[0], tensor[:, 0]]
  found = [worker.digest(part) for part in parts]
  assert found == [publication.digest(np.array(as_numpy(part))) for part in parts]
  assert len(set(found)) == len(parts)
  assert worker.digest(torch.nn.Parameter(tensor)) == found[0]


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16', 'float64'])
@pytest.mark.parametrize('checked', [1, 7, 1 << 20])
def test_checksums_are_the_trainers_wherever_a_slice_lies(monkeypatch, dtype, checked):
  """Of whole tensors and slices, in blocks, and of parts of a fused parameter's memory."""
  monkeypatch.setattr(worker, '_CHECKED', checked)
  generator = torch.Generator().manual_seed(1)
  for shape in ((), (5,), (6, 10), (3, 4, 5)):
    tensor = torch.randn(shape, generator=generator).to(getattr(torch, dtype))
    array = np.array(as_numpy(tensor))
    cuts = [Slice(axis, 1, n - 2) for axis, n in enumerate(shape)]
    wanted = checksums.checksums(array, cuts)
    assert worker.checksum(worker.View(tensor)) == wanted[None]
    for cut in cuts:
      part = tensor.narrow(*cut)
      view = worker.View(part, cut.axis, cut.start, shape[cut.axis])
      assert worker.checksum(view) == wanted[cut] != wanted[None]
      empty = worker.View(part.narrow(cut.axis, 0, 0), cut.axis, cut.start, shape[cut.axis])
      assert worker.checksum(empty) == '0' * 16
    assert len(set(wanted.values())) == len(wanted)


def announce(folder, tensors, file='weights.safetensors'):
  """Writes a file; what is announced of it."""
  from safetensors.torch import save_file

  save_file(tensors, folder / file)
  return {file: {name: worker.digest(tensor) for name, tensor in tensors.items()}}


def small(dtype='float32'):
  dtype = getattr(torch, dtype)
  return {
    'a': torch.arange(6).reshape(2, 3).to(dtype),
    'b': torch.ones(4, dtype=dtype),
    'c': torch.zeros(1),
  }


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_what_was_announced_is_read(tmp_path, dtype):
  tensors = small(dtype)
  files = announce(tmp_path, {'a': tensors['a']}, 'one') | announce(
    tmp_path, {n: tensors[n] for n in 'bc'}, 'two'
  )
  assert_same(worker.read_checked(files, str(tmp_path)), tensors)
  assert worker.read_checked({}, str(tmp_path)) == {}


def test_what_was_not_announced_is_refused(tmp_path):
  path = tmp_path / 'weights.safetensors'
  files = announce(tmp_path, small())
  whole = path.read_bytes()
  for size in (len(whole) - 1, len(whole) // 2, 9, 7, 0):
    path.write_bytes(whole[:size])
    with pytest.raises(ValueError, match=r'weights\.safetensors: cannot be read: '):
      worker.read_checked(files, str(tmp_path))
  data = 8 + int.from_bytes(whole[:8], 'little')
  for place in range(data, len(whole)):
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(
      ValueError, match=r': [abc] has digest [0-9a-f]{32} as read, announced was '
    ):
      worker.read_checked(files, str(tmp_path))
  announce(tmp_path, {name: tensor for name, tensor in small().items() if name != 'b'})
  with pytest.raises(ValueError, match=r"tensors missing \['b'\], unknown \[\]"):
    worker.read_checked(files, str(tmp_path))
  announce(tmp_path, {**small(), 'd': torch.ones(1)})
  with pytest.raises(ValueError, match=r"tensors missing \[\], unknown \['d'\]"):
    worker.read_checked(files, str(tmp_path))
  path.unlink()
  with pytest.raises(ValueError, match='cannot be read: No such file'):
    worker.read_checked(files, str(tmp_path))
  path.write_bytes(whole)
  assert_same(worker.read_checked(files, str(tmp_path)), small())


def test_it_imports_nothing_of_ours():
  imported = set()
  for node in ast.walk(ast.parse(PATH.read_text())):
    if isinstance(node, ast.Import):
      imported |= {alias.name.split('.')[0] for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0
      imported.add(node.module.split('.')[0])
  assert 'vllm' in imported and 'jaxrl_llm' not in imported


REAL_LAYERS = """
import importlib.util, sys

import torch
import vllm.model_executor.parameter as parameters
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import linear, vocab_parallel_embedding as vocabulary

spec = importlib.util.spec_from_file_location('jaxrl_llm_worker', sys.argv[1])
worker = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)

HIDDEN, HEAD, HEADS, MLP = 8, 2, 4, 12


def at(rank, size):
  # Layers ask for their place when they are made: no group of processes is needed to make those \
of any rank.
  for module in (linear, vocabulary, parameters):
    module.get_tensor_model_parallel_rank = lambda: rank
    module.get_tensor_model_parallel_world_size = lambda: size


def model_of(kv_heads, words):
  model = torch.nn.Module()
  model.packed_modules_mapping = {'qkv_proj': ['q_proj', 'k_proj', 'v_proj'], \
'gate_up_proj': ['gate_proj', 'up_proj']}
  model.embed_tokens = vocabulary.VocabParallelEmbedding(words, HIDDEN)
  model.lm_head = vocabulary.ParallelLMHead(words, HIDDEN)
  model.tied = vocabulary.ParallelLMHead(words, HIDDEN).tie_weights(model.embed_tokens)
  model.qkv_proj = linear.QKVParallelLinear(HIDDEN, HEAD, HEADS, kv_heads, bias=True)
  model.gate_up_proj = linear.MergedColumnParallelLinear(HIDDEN, [MLP, MLP], bias=True)
  model.down_proj = linear.RowParallelLinear(MLP, HIDDEN, bias=True)
  model.column = linear.ColumnParallelLinear(HIDDEN, 16, bias=True)
  model.replicated = linear.ReplicatedLinear(HIDDEN, 4, bias=True)
  for parameter in model.parameters():
    parameter.data.fill_(7.0)
  for table in (model.embed_tokens, model.lm_head):  # Their loaders zero what pads the \
vocabulary; ours leaves it.
    table.weight.data.zero_()
  return model


def shapes(kv_heads, words):
  rows = {'q_proj': HEADS * HEAD, 'k_proj': kv_heads * HEAD, 'v_proj': kv_heads * HEAD}
  rows |= {'gate_proj': MLP, 'up_proj': MLP, 'column': 16, 'replicated': 4}
  found = {f'{name}.weight': (n, HIDDEN) for name, n in rows.items()}
  found |= {f'{name}.bias': (n,) for name, n in rows.items()}
  found |= {'down_proj.weight': (HIDDEN, MLP), 'down_proj.bias': (HIDDEN,)}
  return found | {'embed_tokens.weight': (words, HIDDEN), 'lm_head.weight': (words, HIDDEN)}


SHARDS = {'q_proj': ('qkv_proj', 'q'), 'k_proj': ('qkv_proj', 'k'), 'v_proj': ('qkv_proj', 'v')}
SHARDS |= {'gate_proj': ('gate_up_proj', 0), 'up_proj': ('gate_up_proj', 1)}

compared = 0
with set_current_vllm_config(VllmConfig()):
  for size, kv_heads in ((1, 2), (2, 4), (2, 2), (2, 1), (4, 2), (4, 1)):
    for words in (30, 100):
      whole = {name: torch.randn(shape) for name, shape in shapes(kv_heads, words).items()}
      for rank in range(size):
        at(rank, size)
        theirs, ours = model_of(kv_heads, words), model_of(kv_heads, words)
        for name, tensor in whole.items():
          layer, leaf = name.split('.')
          fused = SHARDS.get(layer)
          parameter = theirs.get_parameter(f'{fused[0] if fused else layer}.{leaf}')
          parameter.weight_loader(parameter, tensor, *(fused[1:] if fused else ()))
        worker.load(worker.hf_views(ours), whole)
        for (name, wanted), (same, found) in zip(theirs.named_parameters(), \
ours.named_parameters(), strict=True):
          assert name == same and torch.equal(found, wanted), (size, kv_heads, words, rank, name)
          compared += 1
print('compared', compared)
"""


@pytest.mark.full
@pytest.mark.skipif(not PYTHON.exists(), reason='vLLM is not installed in its environment')
def test_what_is_loaded_is_what_vllms_own_loaders_load():
  ran = subprocess.run(
    [PYTHON, '-c', REAL_LAYERS, PATH], capture_output=True, text=True, timeout=600
  )
  assert ran.returncode == 0, ran.stderr[-3000:]
  # 12 parameters, 2 vocabularies, 15 ranks of six sizes.
  assert ran.stdout.split()[-2:] == ['compared', str(12 * 2 * 15)], ran.stdout


# Deltas.


@pytest.fixture
def chain(tmp_path):
  """(whole tensors of three versions, update with the first and two deltas), as the trainer's own
  code writes them.
  """
  layout = FileLayout({name: tuple(t.shape) for name, t in whole_of().items()}, 'float32')
  image, random, versions, deltas = Image(layout, 4), np.random.default_rng(0), [], []
  for step in range(3):
    tensors = {name: tensor.numpy().copy() for name, tensor in whole_of().items()}
    if step:
      tensors = {name: tensor.copy() for name, tensor in versions[-1].items()}
      for tensor in tensors.values():
        flat = tensor.reshape(-1)
        flat[random.random(flat.size) < 0.1] *= -1
        flat[-1] += 1  # The last element, too.
    image.begin(compare=step > 0, collect=step > 0)
    for name, tensor in tensors.items():
      image.put(name, tensor.reshape(-1).view(np.uint8), layout.offsets[name])
    if step:
      arrays, directory = dict(image.arrays()), tmp_path / f'{step}'
      directory.mkdir()
      safetensors.numpy.save_file(arrays, directory / 'd')
      deltas.append(
        {
          'before': str(step - 1),
          'label': str(step),
          'directory': str(directory),
          'files': {'d': {name: publication.digest(array) for name, array in arrays.items()}},
        }
      )
    versions.append(tensors)
  safetensors.numpy.save_file(versions[0], tmp_path / 'w')
  files = {'w': {name: publication.digest(tensor) for name, tensor in versions[0].items()}}
  whole = types.SimpleNamespace(
    directory=str(tmp_path), files=files, slices={}, label='0', deltas=[]
  )
  return versions, whole, deltas


def parts_of(model):
  return {name: view.tensor.clone() for name, view in worker.hf_views(model).items()}


def wanted_parts(model, tensors):
  views = worker.hf_views(model)
  return {name: view.of(torch.from_numpy(tensors[name])) for name, view in views.items()}


def update_of(whole=None, *deltas):
  empty = types.SimpleNamespace(directory='', files={}, slices={}, label='', deltas=[])
  return types.SimpleNamespace(**{**vars(whole or empty), 'deltas': list(deltas)})


@pytest.mark.parametrize(('rank', 'size'), [(0, 1), (0, 2), (1, 2), (3, 4)])
def test_deltas_lead_every_rank_to_the_same_bits_as_whole_weights(chain, rank, size):
  versions, whole, deltas = chain
  for updates in (
    [update_of(whole), update_of(None, deltas[0]), update_of(None, deltas[1])],
    [update_of(whole), update_of(None, *deltas)],
    [update_of(whole, *deltas)],
    [update_of(whole, deltas[0]), update_of(None, deltas[1])],
  ):
    model, receiver = model_of(rank, size), worker.Receiver()
    for update in updates:
      receiver.receive(worker.hf_views(model), update)
    assert receiver.holds == '2'
    assert_same(parts_of(model), wanted_parts(model, versions[2]))
    if size == 1:
      padding = model.get_parameter('model.embed_tokens.weight')[VOCAB:]
      assert len(padding) and (padding == layers.UNTOUCHED).all()


def test_a_delta_needs_the_version_that_it_changes(chain):
  versions, whole, deltas = chain
  model, receiver = model_of(), worker.Receiver()
  views = worker.hf_views(model)
  before = parts_of(model)
  with pytest.raises(ValueError, match='applies to 0, this worker holds no known version'):
    receiver.receive(views, update_of(None, *deltas))
  assert_same(parts_of(model), before)
  receiver.receive(views, update_of(whole))
  for update, words in (
    (update_of(None, deltas[1]), 'delta refused: it applies to 1, this worker holds 0'),
    (update_of(None, deltas[0], deltas[0]), 'it applies to 0, this worker holds 1'),
    (update_of(whole, deltas[1]), 'it applies to 1, this worker holds 0'),
  ):
    with pytest.raises(ValueError, match=words):
      receiver.receive(views, update)
    assert receiver.holds == '0'
    assert_same(parts_of(model), wanted_parts(model, versions[0]))


def spoil_arrays(kind, arrays):
  """Arrays of a delta that do not fit the model."""
  gaps, bits = (next(name for name in arrays if name.endswith(end)) for end in ('/gaps', '/bits'))
  changed = {
    'after the end': {gaps: np.r_[np.full(99_999, 255, np.uint8), arrays[gaps]]},
    'no end': {gaps: np.r_[arrays[gaps], np.uint8(255)]},
    'no gaps': {gaps: arrays[gaps][:0]},
    'a value too few': {bits: arrays[bits][:-1]},
    'a value too many': {bits: np.r_[arrays[bits], np.int32(1)]},
    'another size': {bits: arrays[bits].astype(np.int16)},
    'two rows': {gaps: arrays[gaps][None]},
    'another tensor': {'other/gaps': arrays[gaps], 'other/bits': arrays[bits]},
    'something else': {'more': arrays[bits]},
    'bits alone': {gaps: None},
  }[kind]
  return {name: array for name, array in {**arrays, **changed}.items() if array is not None}


@pytest.mark.parametrize('size', [1, 2])
@pytest.mark.parametrize(
  'kind',
  [
    *('after the end', 'no end', 'no gaps', 'a value too few', 'a value too many'),
    *('another size', 'two rows', 'another tensor', 'something else', 'bits alone'),
  ],
)
def test_a_delta_that_does_not_fit_is_refused_before_anything_is_written(
  chain, tmp_path, kind, size
):
  versions, whole, deltas = chain
  path = tmp_path / '2' / 'd'
  arrays = spoil_arrays(kind, safetensors.numpy.load_file(path))
  safetensors.numpy.save_file(arrays, path)
  files = {'d': {name: publication.digest(array) for name, array in arrays.items()}}
  model, receiver = model_of(size - 1, size), worker.Receiver()
  views = worker.hf_views(model)
  receiver.receive(views, update_of(whole))
  for update in (
    update_of(None, deltas[0], {**deltas[1], 'files': files}),
    update_of(whole, deltas[0], {**deltas[1], 'files': files}),
  ):
    with pytest.raises(ValueError, match=r'^delta refused: [^\n]*$'):
      receiver.receive(views, update)
    assert receiver.holds == '0'
    assert_same(parts_of(model), wanted_parts(model, versions[0]))
  receiver.receive(views, update_of(None, deltas[0]))  # It goes on.
  assert_same(parts_of(model), wanted_parts(model, versions[1]))


def test_an_error_in_the_middle_of_writing_leaves_the_version_unknown(chain, monkeypatch):
  _, whole, deltas = chain
  receiver, views = worker.Receiver(), worker.hf_views(model_of())
  receiver.receive(views, update_of(whole))

  def broken(changes):
    raise RuntimeError('out of memory')

  monkeypatch.setattr(worker, 'apply', broken)
  with pytest.raises(RuntimeError):
    receiver.receive(views, update_of(None, deltas[0]))
  assert receiver.holds is None
