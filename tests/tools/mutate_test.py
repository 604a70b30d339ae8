"""The mutations that `mutate.py` makes apply to this tree, and their tests exist."""

import mutate
from paths import ROOT


def test_each_mutation_applies_once_and_names_tests_that_exist():
  mutations = mutate.read_mutations([])
  assert len(mutations) == 30
  for mutation in mutations:
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1, mutation.name
    for test in mutation.caught_by:
      file, _, name = test.partition('::')
      assert f'def {name.partition("[")[0]}(' in (ROOT / file).read_text(), test
