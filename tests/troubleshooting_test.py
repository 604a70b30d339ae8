"""Lines on the page of troubleshooting are lines of the code; its metrics exist."""

import re

import pytest
from paths import ROOT

PAGE = (ROOT / 'docs' / 'start' / 'troubleshooting.md').read_text()
TABLE, _, SYMPTOMS = PAGE.partition('## It runs, but')
LINES = re.findall(r'^\| `([^`]+)` \|', TABLE, re.MULTILINE)
METRICS = re.findall(r'`([a-z_]+/[a-z0-9_]+)`', SYMPTOMS)
# Implicit concatenation and placeholders may break a line anywhere.
CODE = ' '.join(
  re.sub(r"""['"]\s*\n\s*f?['"]""", '', path.read_text())
  for path in sorted((ROOT / 'jaxrl_llm').rglob('*.py'))
)


@pytest.mark.parametrize('line', LINES)
def test_a_line_is_in_the_code(line):
  for part in line.split('…'):
    assert part.strip() in CODE


@pytest.mark.parametrize('metric', METRICS)
def test_a_metric_is_documented(metric):
  assert f'`{metric}`' in (ROOT / 'docs' / 'reference' / 'metrics.md').read_text()


def test_the_page_is_read():
  assert len(LINES) > 8 and len(METRICS) > 1
