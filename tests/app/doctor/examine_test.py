"""The doctor on a small run with planted faults; tests/jobs/doctor_test.py has the healthy run."""

import asyncio
import pathlib

import faults
import pytest

from jaxrl_llm.app.doctor.examine import examine
from jaxrl_llm.app.doctor.findings import Finding, Findings, FindingStatus
from jaxrl_llm.config.load import apply_overrides

pytestmark = pytest.mark.full


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('doctor')


def found(config, workdir: pathlib.Path) -> list[Finding]:
  findings = Findings(lambda finding: None)
  asyncio.run(examine(config, workdir, findings))
  assert not workdir.exists(), 'the run directory is only read'
  return list(findings)


def failed_checks(findings: list[Finding]) -> set[str]:
  failed = [finding for finding in findings if finding.status == FindingStatus.FAILURE]
  assert all(finding.remedy for finding in failed)
  return {finding.check.partition(' ')[0] for finding in failed}


@pytest.mark.parametrize(
  ('key', 'value', 'words'),
  [
    ('stages.grpo.source.tasksets', '["nothing"]', "no taskset 'nothing'"),
    ('learner.mesh.data', '7', 'does not match the number of devices'),
    ('rewards.scorers.0.kind', 'nothing', 'no scorer'),
  ],
)
def test_what_the_run_refuses_is_a_failure_of_the_configuration(
  key, value, words, folder, tmp_path
):
  place = folder / key
  place.mkdir()
  findings = found(apply_overrides(faults.healthy(place), {key: value}), tmp_path / 'run')
  (failed,) = [finding for finding in findings if finding.status == FindingStatus.FAILURE]
  assert failed.check == 'configuration' and words in failed.result


def test_faults_planted_together_have_a_line_each(folder, tmp_path):
  place = folder / 'several'
  place.mkdir()
  findings = found(faults.plant(place, *faults.IN_BATCHES), tmp_path / 'run')
  assert failed_checks(findings) == {faults.FAULTS[fault] for fault in faults.IN_BATCHES}, [
    finding.line for finding in findings
  ]


@pytest.mark.parametrize(
  'fault',
  [
    pytest.param(fault, marks=pytest.mark.acceptance if fault in faults.IN_BATCHES else ())
    for fault in faults.FAULTS
  ],
)
def test_a_planted_fault_is_a_failure_of_its_check_alone(fault, folder, tmp_path):
  place = folder / fault.replace(' ', '_')
  place.mkdir()
  findings = found(faults.plant(place, fault), tmp_path / 'run')
  assert failed_checks(findings) == {faults.FAULTS[fault]}, [finding.line for finding in findings]
