"""Logprobs of a completion whose tokens were sampled under several versions, with a cache that is
kept across versions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def stepwise_logprobs(model, params_of_each, prompt, tokens) -> np.ndarray:
  """Returns the logprob of each token, computed token by token with a cache, under the weights that
  sampled the token. Cached entries are never recomputed.
  """
  cache, logprobs = model.init_cache(1, len(prompt) + len(tokens)), []
  step = jax.jit(model.decode)
  for at, token in enumerate([*prompt, *tokens[:-1].tolist()]):
    params = params_of_each[max(0, at - len(prompt) + 1)]
    hidden, cache = step(params, jnp.array([[token]]), jnp.array([[at]]), cache)
    if at >= len(prompt) - 1:
      logits = np.asarray(hidden[0, 0] @ model.head_kernel(params).T, np.float64)
      logits -= logits.max()
      logprobs.append(logits[tokens[len(logprobs)]] - np.log(np.exp(logits).sum()))
  return np.array(logprobs)
