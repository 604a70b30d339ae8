"""DPO and a reward model on real preference pairs: held-out accuracy over question-disjoint folds,
pooled.

  .venv/bin/python benchmarks/preferences.py --directory=DIR --workdir=runs/preferences \\
    [--folds=5] [-- OVERRIDE ...]

DIR holds train.jsonl and preference_pairs.jsonl (see configs/gsm8k_pairs.py). The script starts
that configuration's runs one after the other: an SFT run, then for each fold a DPO run and a reward
model that start from it and never see the fold's questions. Finished runs are not repeated. Every
pair is then judged by the exported model of the run that held it out: by the implicit reward log
π(y) - log π_ref(y), whose reference is the SFT run's export, or by the score. The script prints
accuracies with standard errors clustered by question; benchmarks/preference_baseline.py measures a
bag of words on the same folds.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jaxtyping import Float
from pairs import accuracy, load_folds

from jaxrl_llm.core import script
from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.records.sample import Sample
from jaxrl_llm.models.api import build_model
from jaxrl_llm.ops.logprobs import sequence_scores, token_logprobs
from jaxrl_llm.tasks.preferences import Pair, preference_samples
from jaxrl_llm.tasks.tokenizer import Tokenizer
from jaxrl_llm.weights.hf import load_params, read_spec

_DIRECTORY = flags.DEFINE_string(
  'directory', None, 'Holds train.jsonl and preference_pairs.jsonl.', required=True
)
_WORKDIR = flags.DEFINE_string('workdir', 'runs/preferences', 'Where the runs go.')
_FOLDS = flags.DEFINE_integer('folds', 5, 'Parts that the questions are split into.', lower_bound=3)
_KINDS = flags.DEFINE_list('kinds', ['dpo', 'reward_model'], 'What is trained.')
_LENGTH = 512
"""Maximum sequence length of the configuration in tokens."""
ROOT = pathlib.Path(__file__).parents[1]


def train(kind: str, workdir: pathlib.Path, overrides: Sequence[str]) -> pathlib.Path:
  """Returns the export of a run. Trains the run first if the export does not exist."""
  if not (workdir / 'report.html').exists():
    command = [
      *(
        sys.executable,
        'launch/train.py',
        f'--config=configs/gsm8k_pairs.py:{kind},{_DIRECTORY.value}',
      ),
      *(f'--workdir={workdir}', *overrides),
    ]
    if subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode:
      raise RunError(f'{workdir}: the run failed, see above')
  return workdir / 'hf'


def sequence_values(
  directory: pathlib.Path, samples: Sequence[Sample]
) -> Float[np.ndarray, 'samples']:
  """Returns the log-likelihood of each sample's answer, or its score, by the exported model, one
  sample at a time.
  """
  spec = read_spec(directory)
  model, params = build_model(spec), jax.tree.map(jnp.asarray, load_params(directory, spec))

  @jax.jit
  def one(tokens, ids, mask):
    hidden = model.apply(params, tokens, jnp.arange(tokens.shape[1])[None] * ids, ids)
    kernel = model.head_kernel(params)
    if spec.head == 'scalar':
      return sequence_scores(hidden, kernel, ids, segments=1).scores[0, 0]
    found = token_logprobs(
      hidden, kernel, tokens, ids, jnp.ones(tokens.shape), token_chunk=tokens.shape[1]
    )
    return jnp.where(mask, found.logprobs, 0.0).sum()

  def padded(values):
    return np.pad(values, (0, _LENGTH - len(values)))[None]

  return np.array(
    [
      float(one(padded(s.tokens), padded(np.ones(len(s.tokens), np.int32)), padded(s.loss_mask)))
      for s in samples
      if len(s.tokens) <= _LENGTH
    ]
  )


def margins(
  values: Callable[[Sequence[Sample]], Float[np.ndarray, 'samples']],
  pairs: Sequence[Pair],
  tokenizer: Tokenizer,
) -> Float[np.ndarray, 'pairs']:
  """Returns each pair's margin: the value of the chosen answer minus the value of the rejected
  answer.
  """
  both = [preference_samples(pair, tokenizer) for pair in pairs]
  return values([chosen for chosen, _ in both]) - values([rejected for _, rejected in both])


def main(argv: list[str]) -> None:
  overrides, workdir = argv[1:], pathlib.Path(_WORKDIR.value).absolute()
  if bad := [text for text in overrides if not text.startswith('--config.')]:
    raise UserError(
      f'unexpected argument {bad[0]!r}; after -- come overrides, as in --config.stages.0.steps=10'
    )
  pairs, fold = load_folds(f'{_DIRECTORY.value}/preference_pairs.jsonl', _FOLDS.value)
  start = train('sft', workdir / 'sft', ())
  tokenizer = Tokenizer.from_directory(start)
  lengths = [max(len(s.tokens) for s in preference_samples(pair, tokenizer)) for pair in pairs]
  for kind in _KINDS.value:
    found = np.zeros(len(pairs))
    for k in range(_FOLDS.value):
      folds = [
        f'--config.preferences.{name}.{field}={value}'
        for name in ('train', 'held_out')
        for field, value in (('fold', k), ('folds', _FOLDS.value))
      ]
      flags_of_fold = (f'--init_from={workdir / "sft"}', *folds, *overrides)
      directory = train(kind, workdir / f'{kind}-{k}', flags_of_fold)
      own = [i for i in np.flatnonzero(fold == k) if lengths[i] <= _LENGTH]
      held_out = [pairs[i] for i in own]
      found[own] = margins(
        lambda samples, at=directory: sequence_values(at, samples), held_out, tokenizer
      )
      if kind == 'dpo':
        found[own] -= margins(lambda samples: sequence_values(start, samples), held_out, tokenizer)
    judged = [i for i, length in enumerate(lengths) if length <= _LENGTH]
    share, error = accuracy(found[judged], [pairs[i].group for i in judged])
    print(
      f'{kind}: accuracy {share:.3f}, standard error {error:.3f} (clustered by question), '
      f'{len(judged)} pairs'
    )


if __name__ == '__main__':
  script.run(main)
