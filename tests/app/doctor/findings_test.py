"""What a finding looks like, in text and as JSON."""

import pytest

from jaxrl_llm.app.doctor.findings import Findings, failure, ok
from jaxrl_llm.core.errors import UserError


def test_a_finding_is_one_line_and_one_object():
  finding = failure('eos', 'no end\ntoken', 'name one', tokens=3)
  assert finding.line == 'failure  eos: no end token; name one'
  assert finding.to_json() == {
    'check': 'eos',
    'status': 'failure',
    'remedy': 'name one',
    'result': 'no end\ntoken',
    'tokens': 3,
  }
  assert ok('eos', 'there').line == 'ok       eos: there'


def test_findings_are_told_as_they_come_and_know_what_failed():
  told = []
  findings = Findings(told.append)
  findings.add(ok('eos', 'there'), failure('signal grpo', 'none', 'more'))
  assert told == list(findings)
  assert findings.failed() and findings.failed('signal') and not findings.failed('eos')


def test_an_error_of_the_run_is_a_failure_with_the_errors_remedy():
  findings = Findings(lambda finding: None)
  with findings.guarding('weights'):
    raise UserError('x: not finite; fetch it again')
  (finding,) = findings
  assert (finding.result, finding.remedy) == ('x: not finite', 'fetch it again')
  with pytest.raises(ZeroDivisionError), findings.guarding('weights'):
    raise ZeroDivisionError
