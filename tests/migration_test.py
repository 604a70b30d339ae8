"""Our names on the page of migration exist: paths in the configuration, and options of
algorithms.
"""

import pathlib
import re

import pytest

from jaxrl_llm.app.composition.scorers import SCORERS
from jaxrl_llm.app.schema import Config
from jaxrl_llm.config.annotations import field_types, is_record, is_tuple, members
from jaxrl_llm.learner.catalogue import ALGORITHMS

PAGE = pathlib.Path(__file__).resolve().parents[1] / 'docs' / 'start' / 'migration.md'
ROWS = re.findall(r'^\| .* \| (.*) \|$', PAGE.read_text(), re.MULTILINE)
NAMES = sorted({name for row in ROWS for name in re.findall(r'`([a-z][\w.]*)`', row)})
OPTIONS = {name for options, _ in ALGORITHMS.values() for name in field_types(options)}
VALUES = {'k3', 'weight', 'function', 'arguments', 'every', 'ema', 'report.html', *SCORERS}
"""What the page names besides: values, and fields of parts that the same cell names."""


def is_field(path: str) -> bool:
  """Whether a dotted path leads to a field of the configuration; elements of tuples have names of
  their own.
  """
  kind = Config
  for name in path.split('.'):
    if is_tuple(kind):
      kind = kind.__args__[0]
      continue
    kinds = [field_types(member).get(name) for member in members(kind) if is_record(member)]
    kind = next(filter(None, kinds), None)
    if kind is None:
      return False
  return True


@pytest.mark.parametrize('name', NAMES)
def test_a_name_of_ours_exists(name):
  assert name in OPTIONS or name in VALUES or is_field(name)


def test_the_page_is_read():
  assert {'stages.NAME.source.group_size', 'rollout_is', 'policy.lora'} <= set(NAMES)
  assert not is_field('stages.NAME.source.group_sizes') and not is_field('seed.value')
