"""Operations of packed rows and their share of the peak, by hand."""

import numpy as np
import pytest

from jaxrl_llm.batching.packing import Packing
from jaxrl_llm.master.utilisation import Work, packed_flops, utilisation
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.flops import model_flops

SPEC = tiny(
  'qwen2',
  10,
  hidden_size=4,
  intermediate_size=6,
  num_hidden_layers=2,
  num_attention_heads=2,
  num_key_value_heads=1,
  head_dim=8,
)


def packing(lengths, firsts):
  """Rows of which `firsts` tokens each are stored with another row."""
  zeros = np.zeros(len(lengths), np.int32)
  return Packing(
    ranks=1,
    chunks=1,
    chunk_len=16,
    micro_batches=1,
    filled=1,
    length=np.array(lengths, np.int32),
    micro_batch=zeros,
    chunk=zeros,
    offset=zeros,
    segment=zeros + 1,
    first=np.array(firsts, np.int32),
  )


def test_tokens_and_pairs_of_a_shared_prefix_count_once():
  # Two rows of 5 tokens share 3: the second stores its tokens 4 and 5, which see 4 and 5 tokens.
  shared = [packing([5, 2], [0, 3])]
  for options in ({'backward': False}, {'backward': True}, {'backward': True, 'frozen': True}):
    assert packed_flops(SPEC, shared, **options) == model_flops(SPEC, 7, pairs=15 + 9, **options)
  whole = [packing([5], [0]), packing([5], [0])]
  assert packed_flops(SPEC, whole, backward=False) == model_flops(
    SPEC, 10, pairs=30, backward=False
  )


def test_frozen_weights_need_no_gradients_of_theirs():
  forward = model_flops(SPEC, 5, pairs=9, backward=False)
  assert model_flops(SPEC, 5, pairs=9, frozen=True) == 2 * forward
  assert model_flops(SPEC, 5, pairs=9) == 3 * forward


def test_a_role_reaches_the_share_of_the_peak_that_its_seconds_leave():
  work = [
    Work('update_actor', 'actor', 300),
    Work('ref', 'ref', 100),
    Work('values', 'critic_infer', 100),
    Work('update_critic', 'critic', 0),
  ]
  seconds = {'update_actor': 2.0, 'ref': 0.5, 'update_critic': 1.0}
  assert utilisation(work, seconds, peak_flops=1000.0) == pytest.approx(
    {'perf/mfu/actor': 0.15, 'perf/mfu/ref': 0.2}
  )
