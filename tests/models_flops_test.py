"""Operations of a spec, by hand."""

from jaxrl_llm.models.api import count_params
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.flops import forward_flops, matmul_params, training_flops

SPEC = tiny(
  'llama', 10, hidden_size=4, intermediate_size=6, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
  head_dim=2, tie_word_embeddings=False,
)  # fmt: skip


def test_every_kernel_counts_once_and_the_look_up_does_not():
  # A layer: queries 4·4, keys 4·2, values 4·2, output 4·4, and three of 4·6: 48 + 72 = 120; two of them, and the head.
  assert matmul_params(SPEC) == 2 * 120 + 10 * 4
  # What count_params has besides: the embedding, and 5 norms of 4.
  assert count_params(SPEC) == matmul_params(SPEC) + 10 * 4 + 5 * 4


def test_a_tied_head_multiplies_too():
  tied = tiny('llama', 10, hidden_size=4, intermediate_size=6, tie_word_embeddings=True)
  untied = tiny('llama', 10, hidden_size=4, intermediate_size=6, tie_word_embeddings=False)
  assert matmul_params(tied) == matmul_params(untied)


def test_forward_and_training_by_hand():
  # Attention of one token over 3 keys: scores 2·2·3 and values 2·2·3 a head, 2 heads, 2 layers: 96.
  assert forward_flops(SPEC, tokens=7, visible=3.0) == 7 * (2 * 280 + 96)
  assert training_flops(SPEC, tokens=7, visible=3.0) == 3 * 7 * (2 * 280 + 96)
