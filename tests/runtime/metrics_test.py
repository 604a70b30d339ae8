"""Metrics merge before they divide, and every key of the table says how to read it."""

import math

import pytest
from paths import ROOT

from jaxrl_llm.runtime import metric_descriptions, metric_names, metrics


def test_means_divide_once_whatever_the_split():
  # (1 + 2 + 6) / 3 = 3. A mean of the two shares' means would be (1.5 + 6) / 2 = 3.75.
  shares = [metrics.mean_of([1, 2]), metrics.mean_of([6])]
  assert shares[0].merge(shares[1]).value() == 3.0


def test_merging_keeps_each_kind():
  left = {**metrics.spread('length', [3, 5]), 'tokens': metrics.Sum(8)}
  right = {
    **metrics.spread('length', [10]),
    'tokens': metrics.Sum(10),
    'only/right': metrics.Mean(1.0, 4.0),
  }
  # lengths 3, 5, 10: mean 18 / 3; tokens 8 + 10; 1 / 4.
  assert metrics.resolve(metrics.merge(left, right)) == {
    'length/mean': 6.0,
    'length/max': 10.0,
    'length/min': 3.0,
    'tokens': 18.0,
    'only/right': 0.25,
  }


def test_a_mean_over_nothing_is_absent_and_not_zero():
  assert metrics.resolve({'a': metrics.Mean(0.0, 0), 'b': 2, 'c': metrics.Mean(0.0, 3)}) == {
    'b': 2.0,
    'c': 0.0,
  }
  assert metrics.spread('x', []) == {}


def test_nan_survives_extremes():
  for values in ([math.nan, 1.0], [1.0, math.nan]):
    resolved = metrics.resolve(metrics.spread('x', values))
    assert all(math.isnan(v) for v in resolved.values()), resolved
  assert math.isnan(metrics.Max(1.0).merge(metrics.Max(math.nan)).value())
  assert math.isnan(metrics.Min(math.nan).merge(metrics.Min(1.0)).value())


def test_kinds_do_not_mix():
  with pytest.raises(TypeError, match=r"'a'.*Mean.*Max"):
    metrics.merge({'a': metrics.Mean(1, 1)}, {'a': metrics.Max(1)})


@pytest.mark.parametrize(
  ('key', 'entry'),
  [
    ('actor/pg_loss', 'actor/pg_loss'),
    ('val-core/gsm8k/acc/mean@8', 'val-core/<taskset>/acc/mean@<k>'),
    ('val-core/rg/spell/acc/greedy', 'val-core/<taskset>/acc/greedy'),
    ('val-core/gsm8k/acc/mean@8/stderr', 'val-core/<taskset>/acc/mean@<k>/stderr'),
    ('val-aux/gsm8k/truncated', 'val-aux/<taskset>/truncated'),
    ('rewards/answer/mean', 'rewards/<scorer>/mean'),
    ('timing_s/gen', 'timing_s/gen'),
    ('timing_s/plan', 'timing_s/<phase>'),
    ('actor/grad_norm/nonfinite', '<key>/nonfinite'),
  ],
)
def test_a_key_is_described_by_its_own_entry(key, entry):
  assert metric_descriptions.describe(key) == metric_descriptions.METRICS[entry]


def test_an_unknown_key_has_no_description():
  assert metric_descriptions.describe('actor/made_up') is None
  assert metric_descriptions.describe('val-core/x/accuracy') is None


def test_the_document_is_the_table():
  document = ROOT / 'docs' / 'reference' / 'metrics.md'
  assert document.read_text() == metric_names.document()
  rows = [line for line in document.read_text().splitlines() if line.startswith('| `')]
  assert len(rows) == len(metric_descriptions.METRICS) and all(
    row.count(' | ') == 2 for row in rows
  )
