"""The baseline of preference pairs: its fit, its standard error, and that no fold sees its own
answers.
"""

import importlib.util
import json
import random
import subprocess
import sys

import numpy as np
import pytest
from paths import ROOT

from jaxrl_llm.core.errors import UserError

SCRIPT = ROOT / 'benchmarks' / 'preference_baseline.py'


@pytest.fixture(scope='module')
def baseline():
  # As Python has it for a script: what lies beside it can be imported.
  sys.path.append(str(SCRIPT.parent))
  spec = importlib.util.spec_from_file_location('preference_baseline', SCRIPT)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def write(path, rows):
  path.write_text('\n'.join(json.dumps(row) for row in rows))
  return str(path)


def noise(rng, words=8):
  return [rng.choice(['red', 'green', 'blue', '1', '2', '+']) for _ in range(words)]


def marked_pairs(prompts, rng):
  """Two pairs a prompt; the chosen answer has 'so', the rejected one 'but', and both have the same
  length.
  """
  for number in range(prompts):
    for _ in range(2):
      chosen, rejected = ([*noise(rng), mark] for mark in ('so ', 'but'))
      rng.shuffle(chosen)
      rng.shuffle(rejected)
      length = 60
      yield {
        'prompt': f'q{number}',
        'chosen': ' '.join(chosen).ljust(length, '.'),
        'rejected': ' '.join(rejected).ljust(length, '.'),
      }


def judged(baseline, source):
  pairs, fold = baseline.load_folds(source, 5)
  groups = [pair.group for pair in pairs]
  words, _ = baseline.word_margins(baseline.word_differences(pairs), fold)
  longer = np.array([float(len(pair.chosen) - len(pair.rejected)) for pair in pairs])
  return [baseline.accuracy(m, groups) for m in (words, baseline.length_margins(longer, fold))]


def test_words_that_mark_the_better_answer_are_found_and_equal_lengths_are_ties(baseline, tmp_path):
  source = write(tmp_path / 'pairs.jsonl', marked_pairs(40, random.Random(0)))
  words, length = judged(baseline, source)
  assert words == (1.0, 0.0) and length == (0.5, 0.0)


def test_words_that_only_one_prompt_has_say_nothing(baseline, tmp_path):
  # Were pairs of one prompt in several folds, its word would mark the chosen answer and the
  # accuracy would be 1.
  rows = [
    {'prompt': f'q{number}', 'chosen': f'a{number} {i}', 'rejected': f'b{number} {i}'}
    for number in range(25)
    for i in range(3)
  ]
  words, _ = judged(baseline, write(tmp_path / 'pairs.jsonl', rows))
  assert words == (0.5, 0.0)


def test_shorter_is_learned_from_the_other_folds(baseline, tmp_path):
  rng = random.Random(2)
  rows = [
    {'prompt': f'q{i}', 'chosen': ' '.join(noise(rng, 3)), 'rejected': ' '.join(noise(rng, 30))}
    for i in range(30)
  ]
  _, length = judged(baseline, write(tmp_path / 'pairs.jsonl', rows))
  assert length == (1.0, 0.0)


def test_length_is_judged_by_the_other_folds_alone(baseline):
  # Without the first fold the mean is -1.5, without the second (18 - 4)/4, without the third (18 -
  # 2)/4.
  margins = baseline.length_margins(
    np.array([9.0, 9.0, -1.0, -1.0, -2.0, -2.0]), np.array([0, 0, 1, 1, 2, 2])
  )
  assert margins.tolist() == [-9, -9, -1, -1, -2, -2]


def test_counts_are_of_words_numbers_and_marks_whatever_their_case(baseline, tmp_path):
  rows = [
    {'prompt': f'q{i}', 'chosen': 'The the <<1+12=13>>', 'rejected': 'the 12 cats+'}
    for i in range(40)
  ]
  pairs, _ = baseline.load_folds(write(tmp_path / 'pairs.jsonl', rows), 3)
  matrix = baseline.word_differences(pairs)
  # the 2-1, < 2, 1 1, + 1-1, 12 1-1, = 1, 13 1, > 2, cats -1
  assert matrix.shape == (40, 9) and (matrix == matrix[0]).all()
  assert sorted(matrix[0].tolist()) == [-1, 0, 0, 1, 1, 1, 1, 2, 2]


@pytest.mark.parametrize('scale', [0.1, 1.0, 100.0])
@pytest.mark.parametrize('strength', [0.1, 1000.0])
def test_fit_has_no_gradient_left(baseline, scale, strength):
  x = np.random.default_rng(3).normal(0.2, 1.0, (30, 50)) * scale
  w = baseline.fit(x, strength)
  # d/dw of Σ log(1 + exp(-x·w)) + strength/2 |w|²
  gradient = -x.T @ (1 / (1 + np.exp(x @ w))) + strength * w
  assert np.abs(gradient).max() < 1e-6 * np.abs(x).sum()
  assert np.abs(w).max() > 0


def test_fit_of_one_number_is_the_root_of_its_equation(baseline):
  # One pair, one word, strength 1: w = 1 / (1 + exp(w)), so w = 0.401058...
  w = baseline.fit(np.ones((1, 1)), 1.0)
  assert w[0] == pytest.approx(0.4010581, abs=1e-7)


def test_standard_error_is_clustered(baseline):
  # Groups a, a, b, c with hits 1, 1, 0, 1/2: accuracy 5/8, sums of residuals 6/8, -5/8, -1/8;
  # variance = 3/2 (36 + 25 + 1)/64 / 16
  found = baseline.accuracy(np.array([2.0, 0.1, -3.0, 0.0]), ['a', 'a', 'b', 'c'])
  assert found == pytest.approx((5 / 8, (3 / 2 * 62 / 64 / 16) ** 0.5))


def test_repeating_every_pair_within_its_prompt_adds_no_certainty(baseline):
  margins, groups = np.array([1.0, -1.0, 1.0, 1.0, -1.0]), list('abcde')
  once = baseline.accuracy(margins, groups)
  assert baseline.accuracy(np.tile(margins, 7), groups * 7) == pytest.approx(once)
  assert baseline.accuracy(np.tile(margins, 7), [f'{i}' for i in range(35)])[1] < once[1] / 2


def test_strength_is_least_for_a_sure_sign_and_greatest_for_a_misleading_one(baseline):
  fold = np.repeat(np.arange(4), 25)
  assert baseline.chosen_strength(np.ones((100, 1)), fold) == min(baseline.STRENGTHS)
  # Of the three folds left, two always have the sign that the fourth has not.
  assert baseline.chosen_strength(np.where(fold % 2, 1.0, -1.0)[:, None], fold) == max(
    baseline.STRENGTHS
  )


def test_a_fold_without_prompts_is_refused(baseline, tmp_path):
  with pytest.raises(UserError, match=r'no pair of .* is left'):
    baseline.load_folds(
      write(tmp_path / 'pairs.jsonl', [{'prompt': 'q', 'chosen': 'a', 'rejected': 'b'}]), 3
    )


@pytest.mark.full
def test_command_prints_both_accuracies_and_one_line_for_a_missing_file(tmp_path):
  source = write(tmp_path / 'pairs.jsonl', marked_pairs(40, random.Random(0)))
  done = subprocess.run(
    [sys.executable, SCRIPT, f'--pairs={source}'], cwd=ROOT, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  first, words, length, _ = done.stdout.splitlines()
  assert first.startswith('80 pairs of 40 prompts in 5 folds')
  assert words == 'words: accuracy 1.000, standard error 0.000 (clustered by prompt)'
  assert length == 'length: accuracy 0.500, standard error 0.000 (clustered by prompt)'
  done = subprocess.run(
    [sys.executable, SCRIPT, f'--pairs={tmp_path / "pair.jsonl"}'],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert (
    done.returncode == 2 and 'did you mean' in done.stderr and len(done.stderr.splitlines()) == 1
  )
