"""RL post-training of language models on JAX."""
