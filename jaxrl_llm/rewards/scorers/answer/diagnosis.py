"""Finds the likely reason why no completion gets a score of 1 from scorer `answer`, and a
remedy.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.rewards.api import Attempt, read_options
from jaxrl_llm.rewards.scorers.answer.choosing import choose
from jaxrl_llm.rewards.scorers.answer.extraction import NO_ANSWER, Method, candidates, said
from jaxrl_llm.rewards.scorers.answer.scorer import NO_TRUTH, AnswerOptions

_SAMPLE = 200
"""Maximum number of completions that are examined."""


def diagnose(
  attempts: Sequence[Attempt], evidence: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> str:
  """Returns the likely reason why none of the attempts passed, with the remedy.

  Args:
    evidence: evidence of each attempt's score.
    options: options of the scorer.
  """
  read = read_options(AnswerOptions, options, 'answer')
  reasons = [str(each.get('reason', '')) for each in evidence]
  reason = max(sorted(set(reasons)), key=reasons.count)
  share = f'{reasons.count(reason):,} of {len(reasons):,} rows'
  place = reasons.index(reason)
  truth = json.dumps(str(evidence[place].get('truth'))[:60], ensure_ascii=False)
  if reason == NO_TRUTH:
    return f'{share} have no truth; it is read from reward_model.ground_truth or answer'
  if reason.startswith('the truth is not'):
    return (
      f'{reason} in {share}, such as {truth}; without --options.mode, one is chosen from the truths'
    )
  if reason == NO_ANSWER:
    return (
      f'{share} have no answer where the scorer looks ({_described(read)}); '
      f'{_elsewhere(attempts, read)}'
    )
  if reason:
    return f'{reason} in {share}; a completion must give one answer'
  got = json.dumps(str(evidence[place].get('answer'))[:60], ensure_ascii=False)
  mode = choose(attempt.task.truth for attempt in attempts).options['mode']
  other = (
    ''
    if read.mode in (None, mode)
    else f'; for these truths, --options.mode={mode} would be chosen'
  )
  return f'{share} have an answer that is not the truth, such as {got} for {truth}{other}'


def _described(options: AnswerOptions) -> str:
  methods = options.extraction
  return (
    'chosen by row'
    if methods is None
    else methods
    if isinstance(methods, str)
    else ', '.join(methods)
  )


def _elsewhere(attempts: Sequence[Attempt], options: AnswerOptions) -> str:
  """Returns advice: the extraction method that finds an answer in the most completions. If no
  method finds one, the advice is how to change the prompt.
  """
  step = -(-len(attempts) // _SAMPLE)
  texts = [said(attempt.completion) for attempt in attempts[::step]]
  hits = {
    method: sum(bool(candidates(text, method, options.tag)) for text in texts)
    for method in typing.get_args(Method)
    if method not in ('whole', 'number')
  }
  best = max(hits, key=hits.get)
  if hits[best]:
    return f'{hits[best]} of {len(texts)} have one with --options.extraction={best}'
  return (
    'ask for \\boxed{…} in the prompt, or take the last number with --options.extraction=number'
  )
