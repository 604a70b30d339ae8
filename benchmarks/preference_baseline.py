"""Accuracy of a bag of words in telling chosen from rejected answers: a baseline for reward models
on the same pairs.

  .venv/bin/python benchmarks/preference_baseline.py --pairs=FILE [--folds=5]

Every pair is judged by a model fitted on the other folds, which share no prompt with it; the folds
are those of `PreferencesConfig(fold=..., folds=...)`, so a reward model can be measured on the same
ones. The script prints accuracies over all pairs (a tie counts half), with standard errors
clustered by prompt:

- words: L2-regularised logistic regression on the differences of word counts, its strength chosen
  within each training part by cross-validated log loss over that part's folds;
- length: longer or shorter in characters, whichever is chosen more often on average in the training
  part.

Meant for a few thousand pairs: memory grows with the square of their number.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence

import numpy as np
from absl import flags
from jaxtyping import Float, Int
from pairs import accuracy, load_folds

from jaxrl_llm.core import script
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.tasks.preferences import Pair

_PAIRS = flags.DEFINE_string(
  'pairs', None, 'File of pairs, as in PreferencesConfig.source.', required=True
)
_FOLDS = flags.DEFINE_integer('folds', 5, 'Parts that the prompts are split into.', lower_bound=3)
STRENGTHS = (0.1, 1.0, 10.0, 100.0, 1000.0)
_WORD = re.compile(r'\w+|[^\w\s]')


def word_differences(pairs: Sequence[Pair]) -> Float[np.ndarray, 'pairs words']:
  """Returns how much more often each word, number or mark is in the chosen answer than in the
  rejected one.
  """
  column: dict[str, int] = {}
  differences = []
  for pair in pairs:
    count = collections.Counter(_WORD.findall(pair.chosen.lower()))
    count.subtract(_WORD.findall(pair.rejected.lower()))
    differences.append(
      {column.setdefault(word, len(column)): number for word, number in count.items()}
    )
  matrix = np.zeros((len(pairs), len(column)))
  for row, difference in zip(matrix, differences, strict=True):
    row[list(difference)] = list(difference.values())
  return matrix


def fit(x: Float[np.ndarray, 'pairs words'], strength: float) -> Float[np.ndarray, 'words']:
  """Returns the weights w that minimise Σᵢ log(1 + exp(-xᵢ·w)) + strength/2 |w|².

  No intercept: swapping the two answers of a pair must swap the verdict. Uses Newton's method on
  w = xᵀa, whose systems have as many unknowns as there are pairs, however many words.
  """
  gram = x @ x.T
  a = np.zeros(len(x))
  value = _objective(gram, a, strength)
  for _ in range(100):
    f = gram @ a
    p = np.exp(-np.logaddexp(0, -f))
    s = np.sqrt(p * (1 - p))
    step = (
      s * np.linalg.solve(s[:, None] * gram * s + strength * np.eye(len(x)), s * f + np.exp(-f / 2))
      - a
    )
    if np.abs(gram @ step).max() < 1e-6:  # the step taken leaves about the square of it
      return x.T @ (a + step)
    while (after := _objective(gram, a + step, strength)) > value * (1 + 1e-12):
      step /= 2
    a, value = a + step, after
  raise UserError(
    f'logistic regression of strength {strength} on {len(x)} pairs has not converged in 100 steps'
  )


def _objective(
  gram: Float[np.ndarray, 'pairs pairs'], a: Float[np.ndarray, 'pairs'], strength: float
) -> float:
  f = gram @ a
  return float(np.logaddexp(0, -f).sum() + strength / 2 * a @ f)


def chosen_strength(x: Float[np.ndarray, 'pairs words'], fold: Int[np.ndarray, 'pairs']) -> float:
  """Returns the member of `STRENGTHS` with the least log loss on the folds, each left out in
  turn.
  """
  losses = dict.fromkeys(STRENGTHS, 0.0)
  for strength in STRENGTHS:
    for k in np.unique(fold):
      losses[strength] += np.logaddexp(0, -x[fold == k] @ fit(x[fold != k], strength)).sum()
  return min(losses, key=losses.__getitem__)


def word_margins(
  x: Float[np.ndarray, 'pairs words'], fold: Int[np.ndarray, 'pairs']
) -> tuple[Float[np.ndarray, 'pairs'], list[float]]:
  """Returns each pair's margin under the model of the other folds, and each fold's strength."""
  margins, strengths = np.zeros(len(x)), []
  for k in np.unique(fold):
    train = fold != k
    strengths.append(chosen_strength(x[train], fold[train]))
    margins[~train] = x[~train] @ fit(x[train], strengths[-1])
  return margins, strengths


def length_margins(
  longer: Float[np.ndarray, 'pairs'], fold: Int[np.ndarray, 'pairs']
) -> Float[np.ndarray, 'pairs']:
  """Returns margins from lengths alone: `longer` is the chosen answer's length less the rejected
  one's.

  The best weight of a logistic regression on one number has the sign of its mean.
  """
  margins = np.zeros(len(longer))
  for k in np.unique(fold):
    margins[fold == k] = longer[fold == k] * np.sign(longer[fold != k].mean())
  return margins


def main(argv: list[str]) -> None:
  if argv[1:]:
    raise UserError(f'unexpected argument {argv[1]!r}; every value has a flag, see --help')
  pairs, fold = load_folds(_PAIRS.value, _FOLDS.value)
  groups = [pair.group for pair in pairs]
  words, strengths = word_margins(word_differences(pairs), fold)
  length = length_margins(
    np.array([float(len(pair.chosen) - len(pair.rejected)) for pair in pairs]), fold
  )
  print(
    f'{len(pairs)} pairs of {len(set(groups))} prompts in {_FOLDS.value} folds of '
    f'{np.bincount(fold).tolist()} pairs'
  )
  for name, margins in {'words': words, 'length': length}.items():
    print(
      '{}: accuracy {:.3f}, standard error {:.3f} (clustered by prompt)'.format(
        name, *accuracy(margins, groups)
      )
    )
  print(f'strength of L2 chosen per fold: {strengths}')


if __name__ == '__main__':
  script.run(main)
