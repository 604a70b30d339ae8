"""Bytes that a trainer and the tensor-parallel workers of four servers read and digest for each
version, counted in the real code of both (tests/support/counted_publish.py).
"""

import collections
import importlib.util
import json
import os
import subprocess
import sys

import pytest
from paths import ROOT, SUPPORT, TESTS

pytestmark = [
  pytest.mark.full,
  pytest.mark.skipif(importlib.util.find_spec('torch') is None, reason='torch is not installed'),
]


@pytest.fixture(scope='module')
def versions(tmp_path_factory):
  """Reports of two versions of whole weights, and of a whole one and two deltas."""
  paths = os.pathsep.join(map(str, (ROOT, SUPPORT, TESTS / 'tools')))
  ran = subprocess.run(
    [sys.executable, SUPPORT / 'counted_publish.py', tmp_path_factory.mktemp('counted')],
    env={**os.environ, 'PYTHONPATH': paths},
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert ran.returncode == 0, ran.stderr[-3000:]
  reports = [json.loads(line) for line in ran.stdout.splitlines()]
  assert [report['is_delta'] for report in reports] == [False, False, False, True, True]
  for report in reports:
    assert sum(report['tensors'].values()) == report['nbytes'], 'all tensors differ'
    assert len(report['ranks']) == 8
  return reports


def once(counts, *parts):
  """Returns whether each of the parts, which are sizes keyed by digest, was digested exactly once,
  and nothing else.
  """
  wanted = sum((collections.Counter(dict.fromkeys(each, 1)) for each in parts), start=NOTHING)
  return counts['digests'] == wanted and counts['digested'] == sum(
    sum(each.values()) for each in parts
  )


NOTHING = collections.Counter()


def test_the_trainer_digests_each_tensor_slice_and_change_once_and_reads_nothing_back(versions):
  for report in versions:
    assert once(report['trainer'], report['tensors'], report['slices'], report['changes'])
    assert report['trainer']['read'] == 0
    # What it writes besides is the manifest.
    assert 0 <= report['written'] - report['file_size'] < 0.01 * report['nbytes']


def test_a_rank_reads_and_digests_its_part_of_whole_weights_once(versions):
  for report in versions[:3]:
    for rank in report['ranks']:
      assert once(rank['files'], rank['holds'])
      assert rank['files']['read'] == sum(rank['holds'].values())
    # The two ranks of a server have one copy of all slices, and each has the replicated tensors.
    both = report['ranks'][0]['holds'], report['ranks'][1]['holds']
    replicated = {*both[0]} & {*both[1]}
    assert sum(map(sum, (held.values() for held in both))) == report['nbytes'] + sum(
      both[0][name] for name in replicated
    )
    assert replicated == report['tensors'].keys() & both[0].keys() and len(replicated) == 5


def test_a_rank_reads_and_digests_the_changes_of_a_delta_once(versions):
  for report in versions[3:]:
    assert sum(report['changes'].values()) < 0.1 * report['nbytes']
    for rank in report['ranks']:
      assert once(rank['files'], report['changes'])
      assert rank['files']['read'] == sum(report['changes'].values())


def test_the_loaded_weights_are_digested_once_on_cpus_and_elsewhere_not_at_all(versions):
  for report in versions:
    methods = [rank['live']['method'] for rank in report['ranks']]
    assert methods == ['jaxrl_digests', 'jaxrl_digests', 'jaxrl_checksums', 'jaxrl_checksums'] * 2
    for rank in report['ranks']:
      is_digested = rank['live']['method'] == 'jaxrl_digests'
      assert once(rank['live'], *([rank['holds']] if is_digested else []))
      assert rank['live']['read'] == 0
