"""Weights files that several processes write: together they have the tensors of one file."""

import pytest
from parameters import assert_same_bits, random_params

from jaxrl_llm.core.trees import flatten
from jaxrl_llm.models import heads
from jaxrl_llm.models.families import tiny
from jaxrl_llm.weights.hf import load_params, save_params
from jaxrl_llm.weights.safetensors_files import plan_files, reveal_files, write_files
from jaxrl_llm.weights.shares import parameters_of
from jaxrl_llm.weights.tables import entries

SPEC = tiny('llama', 40, num_hidden_layers=2, tie_word_embeddings=False)


def write(directory, spec, writers, *, shard_bytes=10**9, only=None):
  plan = plan_files(spec, dtype='float32', writers=writers, shard_bytes=shard_bytes)
  digests = {}
  for number in range(writers) if only is None else only:
    names = parameters_of(spec, number, writers)
    tree = flatten(random_params(spec))
    leaves = [(name, tree[name]) for name in sorted(tree) if writers == 1 or name in names]
    digests |= write_files(directory, plan, leaves, number)
  return plan, digests


@pytest.mark.parametrize('head', ['lm', 'value'])
@pytest.mark.parametrize('shard_bytes', [10**9, 60_000])
@pytest.mark.parametrize('writers', [2, 3, 50])
def test_the_files_of_several_writers_are_the_model_of_one(tmp_path, head, shard_bytes, writers):
  spec = heads.with_head(SPEC, head)
  # What an export of one process has left is replaced.
  save_params(tmp_path, random_params(spec, seed=9), spec)
  plan, digests = write(tmp_path, spec, writers, shard_bytes=shard_bytes)
  assert (tmp_path / 'model.safetensors').exists(), 'nothing is revealed before all have written'
  paths = reveal_files(tmp_path, plan)
  weights = {path for path in tmp_path.iterdir() if path.suffix != '.json'}
  assert set(paths) == weights and len(weights) >= min(writers, len(entries(spec)))
  assert_same_bits(load_params(tmp_path, spec), random_params(spec))
  assert digests == write(tmp_path / 'alone', spec, 1)[1]


def test_files_that_a_killed_process_has_left_are_removed_with_the_next_export(tmp_path):
  write(tmp_path, SPEC, 3, only=(1,))
  assert [path.suffix for path in tmp_path.iterdir()] == ['.unfinished']
  reveal_files(tmp_path, write(tmp_path, SPEC, 2)[0])
  assert sorted(path.name for path in tmp_path.iterdir()) == [
    'model-00001-of-00002.safetensors',
    'model-00002-of-00002.safetensors',
    'model.safetensors.index.json',
  ]
