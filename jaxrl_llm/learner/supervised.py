"""Supervised fine-tuning: imitation of given completions."""

from __future__ import annotations

import dataclasses

from jaxrl_llm.batching.chunks import Chunks
from jaxrl_llm.learner.algorithm import Algorithm, Constants, Setting, Stats, Terms, plain, term
from jaxrl_llm.objectives.supervised import negative_log_likelihood
from jaxrl_llm.ops.logprobs import TokenLogprobs
from jaxrl_llm.ops.reduce import Aggregation, masked_stat


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftConfig:
  """Supervised fine-tuning on demonstrations or examples."""

  loss_agg_mode: Aggregation = 'token-mean'


def sft(config: SftConfig, setting: Setting) -> Algorithm:
  """Builds SFT. The loss is the negative log-likelihood of the completion tokens."""

  def loss(outputs: TokenLogprobs, chunks: Chunks, constants: Constants) -> tuple[Terms, Stats]:
    mask = chunks.loss_mask
    nll = negative_log_likelihood(outputs.logprobs)
    terms = {
      'actor/sft_loss': term(
        nll, mask, chunks, config.loss_agg_mode, scale=float(setting.max_response_length)
      )
    }
    return terms, {'actor/entropy': masked_stat(outputs.entropy, mask)}

  return Algorithm(annotate=lambda closed: plain(closed.rows), loss=loss)
