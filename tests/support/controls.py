"""Training with a learning signal that is broken on purpose: `tests/support/controls.py CONTROL
FLAGS_OF_TRAIN`.

Also the shortest example of a custom algorithm and a custom scorer: each is a function, and its
name in a dictionary.
"""

import numpy as np
import xxhash

from jaxrl_llm.rewards.api import Attempt, Verdict
from jaxrl_llm.rewards.scorers.verifier.scorer import verifier_scorer

HONEST = verifier_scorer()


def zero(attempt: Attempt) -> Verdict:
  return Verdict(value=0.0)


def coin(attempt: Attempt) -> Verdict:
  """Scores 0 or 1 as a function of the sample's name, whatever the answer is. Evaluations are
  scored honestly.
  """
  if attempt.uid.startswith('evaluation-'):
    return HONEST(attempt)
  return Verdict(value=float(xxhash.xxh3_64_intdigest(attempt.uid.encode()) & 1))


def shuffled_grpo(config, setting):
  """Returns GRPO with the advantages of each group permuted among its members."""
  from jaxrl_llm.learner.policy_gradient import policy_gradient

  honest = policy_gradient(config, setting)

  def annotate(closed):
    annotation = honest.annotate(closed)
    advantages = np.array(annotation.advantages)
    groups = np.array([row.group for row in closed.rows])
    for group in sorted(set(groups)):
      members = np.flatnonzero(groups == group)
      rng = np.random.default_rng([int(b) for b in group.encode()])
      advantages[members] = rng.permutation(advantages[members])
    return annotation._replace(advantages=advantages)

  return honest._replace(annotate=annotate)


if __name__ == '__main__':
  import sys

  from jaxrl_llm.app.commands import train
  from jaxrl_llm.app.composition import scorers, stages
  from jaxrl_llm.learner.policy_options import GrpoConfig

  control = sys.argv.pop(1)
  if control == 'shuffled':
    stages.ALGORITHMS['grpo'] = (GrpoConfig, shuffled_grpo)
  else:
    scorers.SCORERS['verifier'] = lambda **options: {'zero': zero, 'coin': coin}[control]
  sys.exit(train.main(sys.argv))
