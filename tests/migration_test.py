"""Names on the page of migration and in the importers' tables exist: paths in the configuration,
and options of algorithms. The page's example is what the importer writes.
"""

import pathlib
import re

import pytest
from importing import from_trl
from pages import blocks

from jaxrl_llm.app.composition.scorers import SCORERS
from jaxrl_llm.app.importers.table import Mapped, final_rows
from jaxrl_llm.app.importers.trl_table import TABLES
from jaxrl_llm.app.importers.verl_table import TABLE
from jaxrl_llm.app.schema import Config
from jaxrl_llm.config.annotations import field_types, is_mapping, is_record, is_tuple, members
from jaxrl_llm.learner.catalogue import ALGORITHMS

PAGE = pathlib.Path(__file__).resolve().parents[1] / 'docs' / 'start' / 'migration.md'
ROWS = re.findall(r'^\| .* \| (.*) \|$', PAGE.read_text(), re.MULTILINE)
IMPORTED = {
  name
  for table in (TABLE, *TABLES.values())
  for row in table.values()
  for end in final_rows(row)
  if isinstance(end, Mapped)
  for name in end.to.split(', ')
}
NAMES = sorted({name for row in ROWS for name in re.findall(r'`([a-z][\w.]*)`', row)} | IMPORTED)
OPTIONS = {name for options, _ in ALGORITHMS.values() for name in field_types(options)}
VALUES = {'k3', 'weight', 'function', 'arguments', 'every', 'ema', 'report.html', *SCORERS}
"""What the page names besides: values, and fields of parts that the same cell names."""


def is_field(path: str) -> bool:
  """Whether a dotted path leads to a field of the configuration, or to an entry of a mapping;
  elements of tuples have names of their own.
  """
  kind = Config
  for name in path.split('.'):
    if is_tuple(kind):
      kind = kind.__args__[0]
      continue
    if any(is_mapping(member) for member in members(kind)):
      return True
    kinds = [field_types(member).get(name) for member in members(kind) if is_record(member)]
    kind = next(filter(None, kinds), None)
    if kind is None:
      return False
  return True


@pytest.mark.parametrize('name', NAMES)
def test_a_name_of_ours_exists(name):
  assert name in OPTIONS or name in VALUES or is_field(name)


def test_the_page_is_read():
  assert {'stages.NAME.source.group_size', 'rollout_is', 'policy.lora.rank'} <= set(NAMES)
  assert not is_field('stages.NAME.source.group_sizes') and not is_field('seed.value')


def test_the_example_is_what_the_importer_writes(tmp_path):
  theirs, ours = blocks('docs/start/migration.md', 'python')
  path = tmp_path / 'arguments.py'
  path.write_text(theirs)
  source = from_trl(path).source(path, tmp_path / 'x.py')
  indented = re.sub(r'^', '      ', ours.strip(), flags=re.MULTILINE)
  assert f'{indented},' in source
