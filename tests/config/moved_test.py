"""A field that has moved within a configuration is answered with its new place, in Python and on
the command line.
"""

import copy
import dataclasses
import pickle

import pytest

from jaxrl_llm.config.load import apply_overrides, load_file
from jaxrl_llm.config.moved import moved
from jaxrl_llm.config.values import from_json, to_json
from jaxrl_llm.core.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
  size: int = 1


@moved({'size': 'inner.size', 'length': 'inner.size, in tokens'})
@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
  inner: Inner = Inner()
  name: str = 'a'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Root:
  outers: tuple[Outer, ...] = (Outer(),)


@pytest.mark.parametrize(
  ('call', 'error', 'line'),
  [
    (lambda: Outer(size=3), UserError, 'Outer.size: moved to Outer.inner.size'),
    (lambda: Outer(length=3), UserError, 'Outer.length: moved to Outer.inner.size, in tokens'),
    (
      lambda: dataclasses.replace(Outer(), size=3),
      UserError,
      'Outer.size: moved to Outer.inner.size',
    ),
    (lambda: Outer().size, AttributeError, 'Outer.size: moved to Outer.inner.size'),
    (lambda: Outer().other, AttributeError, "'Outer' object has no attribute 'other'"),
    (
      lambda: apply_overrides(Root(), {'outers.a.size': '3'}),
      UserError,
      '--config.outers.a.size: moved to --config.outers.a.inner.size',
    ),
    (
      lambda: apply_overrides(Root(), {'outers': '[{"size": 3}]'}),
      UserError,
      '--config.outers.0.size: moved to --config.outers.0.inner.size',
    ),
    (
      lambda: from_json({'outers': [{'size': 3}]}, Root),
      UserError,
      'config.outers.0.size: moved to config.outers.0.inner.size',
    ),
  ],
)
def test_a_former_name_is_answered_with_the_new_place(call, error, line):
  with pytest.raises(error) as caught:
    call()
  assert str(caught.value) == line


def test_a_file_that_uses_a_former_name_is_told_so_by_its_line(tmp_path):
  file = tmp_path / 'x.py'
  file.write_text(f'from {__name__} import Outer\n\ndef get_config():\n  return Outer(size=3)\n')
  with pytest.raises(UserError, match=r'x\.py:4: Outer\.size: moved to Outer\.inner\.size$'):
    load_file(str(file), Root)


def test_everything_else_is_as_without():
  made = Outer(inner=Inner(size=3))
  assert (
    copy.deepcopy(made) == pickle.loads(pickle.dumps(made)) == dataclasses.replace(made) == made
  )
  assert from_json(to_json(Root(outers=(made,))), Root) == Root(outers=(made,))
  assert not hasattr(made, 'size') and made.inner.size == 3
  with pytest.raises(TypeError, match='wrong'):
    Outer(wrong=3)
