"""Shared prefixes change nothing: loss, gradient, statistics and outputs of every algorithm are
those of rows that share nothing, however the trees are cut.

The decoder is compared, since only attention sees that a prefix is shared.
"""

import dataclasses

import jax
import numpy as np
import pytest
from learning import (
  SAMPLES,
  Case,
  Subject,
  assert_same,
  compute,
  tree_pairs,
  trees,
  write_samples,
)

from jaxrl_llm.batching.plan import StepPlan, pack_step, plan_shape, with_prefixes
from jaxrl_llm.batching.trees import seen_until
from jaxrl_llm.core.errors import RunError
from jaxrl_llm.data.load import unpack
from jaxrl_llm.learner.forward import build_score, build_value
from tests.learner.losses_test import INVARIANT, MU_STEP, SUBJECTS

ROWS = {
  'sft': trees(experts=tuple(range(13))),
  'mix': trees(experts=(2, 5, 10)),
  'dpo': tree_pairs(),
  'reward_model': tree_pairs(),
}
TREES = {
  name: Subject(SUBJECTS[name].algorithm, ROWS.get(name, trees()), SUBJECTS[name].of_critic)
  for name in INVARIANT
}
SHARED = {'share': True, 'chunk_len': 64, 'chunks': 2}
"""A chunk fits the largest tree."""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('rows')
  write_samples(path)
  return path


def found_of(folder, name, **cut):
  return compute(folder, TREES[name], step=MU_STEP, **cut)


def assert_shared_as_apart(folder, name, **cut):
  found, wanted = found_of(folder, name, **SHARED | cut), found_of(folder, name)
  assert wanted.loss != 0.0
  assert_same(found, wanted)
  assert found.stats.keys() == wanted.stats.keys()
  for key, stat in wanted.stats.items():
    np.testing.assert_allclose(found.stats[key], stat, rtol=1e-5, atol=1e-6, err_msg=key)


@pytest.mark.parametrize(
  'name',
  [
    name
    if name == 'grpo'
    else pytest.param(
      name,
      marks=pytest.mark.full if name in ('dpo', 'ppo critic') else pytest.mark.acceptance,
    )
    for name in INVARIANT
  ],
)
def test_every_algorithm_learns_the_same(folder, name):
  assert_shared_as_apart(folder, name)


CUTS = {
  'one chunk holds all': {'chunk_len': 160, 'chunks': 1},
  'blockwise': {'attention': 'blockwise', 'chunk_len': 160, 'chunks': 1},
  'trees are cut': {'chunk_len': 32, 'chunks': 4},
  'a chunk holds one row': {'chunk_len': 24},
  'logits of a few tokens': {'token_chunk': 8},
  'scan and remat': {'scan': True, 'remat': 'full'},
  'fsdp': {'axes': (('fsdp', 8),), 'chunk_len': 32},
  'sequence': {'axes': (('fsdp', 2), ('sequence', 4))},
  'tensor': {'axes': (('data', 2), ('fsdp', 2), ('tensor', 2)), 'chunks': 1},
  'blockwise, on a mesh': {
    'axes': (('fsdp', 2), ('sequence', 2), ('tensor', 2)),
    'attention': 'blockwise',
  },
}


@pytest.mark.parametrize(
  'cut',
  [
    pytest.param(
      cut,
      marks={'blockwise': (), 'trees are cut': pytest.mark.full, 'fsdp': pytest.mark.full}.get(
        cut, pytest.mark.acceptance
      ),
    )
    for cut in CUTS
  ],
)
def test_no_cut_changes_anything(folder, cut):
  assert_shared_as_apart(folder, 'grpo', **CUTS[cut])


def test_rows_of_any_minibatch_see_their_own_tokens():
  """A minibatch may lack the rows between two that share a prefix."""
  rng = np.random.default_rng(0)
  rows = tuple(with_prefixes(trees(), [SAMPLES[row.index] for row in trees()]))
  shape = plan_shape(rows=13, ranks=1, chunks=1, chunk_len=160, shares_prefixes=True)
  shared = 0
  for _ in range(30):
    step = tuple(rng.permutation(13)[: rng.integers(1, 14)].tolist())
    packing = pack_step(StepPlan(step=0, stage='x', rows=rows, optimizer_steps=(step,)), 0, shape)
    last, shared = seen_until(packing), shared + packing.shared_tokens
    for i, number in enumerate(step):
      seen = {
        int(packing.first[j]) + k: int(SAMPLES[rows[other].index].tokens[packing.first[j] + k])
        for j, other in enumerate(step)
        for k, until in enumerate(last[j])
        if packing.segment[j] <= packing.segment[i] <= until
      }
      tokens = SAMPLES[rows[number].index].tokens
      assert seen == dict(enumerate(tokens.tolist()))
      assert not SAMPLES[rows[number].index].loss_mask[: packing.first[i] + 1].any()
  assert shared > 0


@pytest.mark.full
def test_passes_find_the_same_for_each_row(folder):
  """Logprobs, and the values before and after each token, row by row."""
  with jax.enable_x64(True):
    for head, build in (('lm', build_score), ('value', build_value)):
      found = []
      for cut in (SHARED, {}):
        case = Case(folder, rows=trees(), head=head, **cut)
        (packed,) = case.loader.steps(case.plan, case.shape)
        more = {'token_chunk': case.shape.chunk_len} if head == 'lm' else {}
        outputs = build(case.model, case.mesh, **more)(case.params(), packed.chunks, packed.used)
        found.append([unpack(np.asarray(x), packed) for x in jax.tree.leaves(outputs)])
      for shared, apart in zip(*found, strict=True):
        for i, row in enumerate(trees()):
          trained = SAMPLES[row.index].loss_mask
          assert np.abs(apart[i][trained]).max() > 1e-3
          np.testing.assert_allclose(shared[i][trained], apart[i][trained], rtol=0, atol=1e-12)


def test_a_plan_that_shares_what_differs_is_refused(folder):
  case = Case(folder, rows=trees(), **SHARED)
  (first, second) = [row for row in case.plan.rows if row.group == 'd']
  assert (first.place, first.common, second.place) == (1, 5, 0)
  damaged = tuple(
    dataclasses.replace(row, common=6, prompt_len=9) if row is first else row
    for row in case.plan.rows
  )
  plan = dataclasses.replace(case.plan, rows=damaged)
  with pytest.raises(
    RunError, match='s/38: does not begin with the 6 tokens that it shares with s/39'
  ):
    next(case.loader.steps(plan, case.shape))
