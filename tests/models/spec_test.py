"""Specs and families: what is refused, in one line that names the remedy."""

import dataclasses
import pathlib
import re

import pytest

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.models import families
from jaxrl_llm.models.families import FAMILIES, tiny
from jaxrl_llm.models.spec import ModelOptions, RopeScaling


@pytest.mark.parametrize(
  ('overrides', 'words'),
  [
    ({'hiden_size': 8}, ['hiden_size', 'did you mean hidden_size']),
    ({'num_attention_heads': 3}, ['num_attention_heads', '3 heads', '2 key-value heads']),
    ({'head_dim': 33}, ['head_dim', '33', 'even']),
    ({'num_hidden_layers': 0}, ['num_hidden_layers', 'got 0']),
    ({'head': 'reward'}, ['model.head', 'reward', 'lm, value, scalar']),
    ({'rope_scaling': {'kind': 'yarn', 'factor': 2.0}}, ['yarn', 'linear, llama3']),
    ({'rope_scaling': {'kind': 'linear'}}, ['rope_scaling', 'factor']),
    ({'rope_scaling': {'kind': 'llama3', 'factor': 8.0}}, ['original_max_position_embeddings']),
  ],
)
def test_a_bad_field_is_one_clear_line(overrides, words):
  with pytest.raises(UserError) as error:
    tiny('qwen2', 10, **overrides)
  assert '\n' not in str(error.value)
  for word in words:
    assert word in str(error.value)


def test_unknown_family_lists_those_there_are():
  with pytest.raises(UserError, match=r"'mamba', wanted one of qwen2, qwen3, llama"):
    tiny('mamba', 10)


def test_unknown_option_is_refused():
  with pytest.raises(UserError, match='float8'):
    ModelOptions(dtype='float8')


def test_families_differ_where_transformers_says():
  assert {name: (tiny(name, 9).qkv_bias, tiny(name, 9).qk_norm) for name in FAMILIES} == {
    'qwen2': (True, False),
    'qwen3': (False, True),
    'llama': (False, False),
    'mistral': (False, False),
  }


def test_no_other_module_compares_or_tabulates_the_names_of_families():
  names = rf'[\'"]({"|".join(FAMILIES)})[\'"]'
  special_case = re.compile(rf'{names}\s*:|(==|!=|\bin)\s*[({{\[]*{names}')
  assert special_case.search("if spec.family == 'llama':") and special_case.search("  'qwen2': 1,")
  package = pathlib.Path(families.__file__).parents[1]
  found = {path.name for path in package.rglob('*.py') if special_case.search(path.read_text())}
  # The parser of tool calls 'qwen3' is chosen by the chat template, for any family.
  assert found == {'tool_calls.py'}


def test_rope_scaling_may_be_a_mapping():
  spec = tiny('llama', 9, rope_scaling={'kind': 'linear', 'factor': 2.0})
  assert spec.rope_scaling == RopeScaling(kind='linear', factor=2.0)
  assert dataclasses.replace(spec, rope_scaling=None) == tiny('llama', 9)
