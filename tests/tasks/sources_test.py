import json
import os
import random

import pyarrow
import pyarrow.parquet
import pytest

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.tasks import sources
from jaxrl_llm.tasks.sources import Corrupt, SourceRow, read_rows


def read(source, *, options=None, size=None, seed=0):
  return list(read_rows(str(source), options=options or {}, size=size, seed=seed))


ROWS = [
  {'prompt': 'a', 'answer': '1'},
  {'prompt': 'ü', 'answer': None},
  {'prompt': 'c', 'answer': '3'},
]


def test_jsonl_names_each_corrupt_line_by_its_number(tmp_path):
  path = tmp_path / 'rows.jsonl'
  path.write_bytes(b'{"prompt": "a"}\n\n{"prompt": \n[1]\n\xff\xfe\n{"x": NaN}\n{"prompt": "b"}')
  rows = read(path)
  # line 2 is blank: no row and no error
  assert [row.where.removeprefix(f'{path}:') for row in rows] == ['1', '3', '4', '5', '6', '7']
  assert [type(row) for row in rows] == [SourceRow, Corrupt, Corrupt, Corrupt, Corrupt, SourceRow]
  assert rows[0].fields == {'prompt': 'a'} and rows[-1].fields == {'prompt': 'b'}
  assert 'list' in rows[2].reason and 'utf-8' in rows[3].reason and 'NaN' in rows[4].reason


def test_files_and_datasets_give_the_same_rows(tmp_path):
  import datasets

  (tmp_path / 'rows.jsonl').write_text(
    '\n'.join(json.dumps(row, ensure_ascii=False) for row in ROWS)
  )
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / 'rows.parquet')
  datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / 'saved'))
  datasets.DatasetDict({'test': datasets.Dataset.from_list(ROWS)}).save_to_disk(
    str(tmp_path / 'splits')
  )
  for source in ('rows.jsonl', 'rows.parquet'):
    assert [row.fields for row in read(tmp_path / source)] == ROWS
    assert [row.fields for row in read(tmp_path / source, size=2)] == ROWS[:2]
  for target in ('saved', 'splits', 'splits#test'):
    assert [row.fields for row in read(f'datasets:{tmp_path / target}')] == ROWS
  options = {'data_files': str(tmp_path / 'rows.jsonl'), 'cache_dir': str(tmp_path / 'cache')}
  assert [row.fields for row in read('datasets:json#train', options=options)] == ROWS


@pytest.mark.parametrize('named', ['file', 'directory'])
@pytest.mark.parametrize('depth', [101, 20_000])
def test_json_that_would_crash_the_datasets_library_is_refused(tmp_path, depth, named):
  path = tmp_path / 'data' / 'rows.jsonl'
  path.parent.mkdir()
  path.write_text(f'{{"prompt": "[[{{", "answer": {"[" * depth}{"]" * depth}}}\n')
  options = {'cache_dir': str(tmp_path / 'cache')}
  with pytest.raises(UserError, match=r'rows.jsonl, byte 1\d+: nested more than 100 levels'):
    if named == 'file':
      read('datasets:json#train', options={'data_files': str(path), **options})
    else:
      read(f'datasets:{path.parent}', options=options)


def test_brackets_in_texts_are_no_nesting(tmp_path):
  rows = [{'prompt': '[' * 200 + '"\\' + '{' * 200}] * 200
  path = tmp_path / 'rows.jsonl'
  path.write_text('\n'.join(map(json.dumps, rows)))
  options = {'data_files': str(path), 'cache_dir': str(tmp_path / 'cache')}
  assert [row.fields for row in read('datasets:json#train', options=options)] == rows


def test_parquet_value_that_is_not_json_is_corrupt(tmp_path):
  pyarrow.parquet.write_table(
    pyarrow.Table.from_pylist([{'prompt': 'a', 'image': b'x'}]), tmp_path / 'r.parquet'
  )
  (row,) = read(tmp_path / 'r.parquet')
  assert (
    isinstance(row, Corrupt) and row.where.endswith('r.parquet row 1') and 'bytes' in row.reason
  )


def test_a_line_without_end_is_corrupt_and_the_next_is_read(tmp_path, monkeypatch):
  monkeypatch.setattr(sources, 'MAX_ROW_BYTES', 64)
  path = tmp_path / 'rows.jsonl'
  path.write_text(f'{{"prompt": "{"a" * 300}"}}\n{{"prompt": "b"}}\n{"c" * 64}')
  rows = read(path)
  assert [(type(row), row.where) for row in rows] == [
    (Corrupt, f'{path}:1'),
    (SourceRow, f'{path}:2'),
    (Corrupt, f'{path}:3'),
  ]
  assert '64 bytes or more; wanted a shorter row' in rows[0].reason


def test_procedural_item_draws_from_seed_plus_index():
  options = {'min_word_len': 3, 'max_word_len': 5}
  first = read('reasoning_gym:spell_backward', options=options, size=8, seed=100)
  later = read('reasoning_gym:spell_backward', options=options, size=5, seed=103)
  words = [row.fields['entry']['metadata']['word'] for row in first]
  assert words[3:] == [row.fields['entry']['metadata']['word'] for row in later]
  assert all(
    row.fields['entry']['answer'] == word[::-1] and 3 <= len(word) <= 5
    for row, word in zip(first, words)
  )
  # an independent draw by the same rule
  from reasoning_gym import create_dataset

  assert words[4] == random.Random(104).choice(create_dataset('spell_backward', **options).words)


def test_verifier_that_needs_tuples_is_refused():
  with pytest.raises(UserError, match=r'arc_agi.*stored as JSON'):
    read('reasoning_gym:arc_agi', size=2)


@pytest.mark.parametrize(
  'source, kwargs, message',
  [
    ('reasoning_gym:spell_backwrd', {'size': 1}, "did you mean 'spell_backward'"),
    ('reasoning_gym:spell_backward', {}, 'set size'),
    ('reasoning_gym:spell_backward', {'size': 0}, 'at least 1'),
    (
      'reasoning_gym:spell_backward',
      {'size': 1, 'options': {'min_word_length': 3}},
      "did you mean 'min_word_len'",
    ),
    ('reasoning_gym:spell_backward', {'size': 1, 'options': {'seed': 3}}, "the taskset's own seed"),
    (
      'reasoning_gym:spell_backward',
      {'size': 1, 'options': {'min_word_len': 5, 'max_word_len': 4}},
      'must be >=',
    ),
    ('rows.csv', {}, 'unknown form'),
    ('{dir}/trian.jsonl', {}, 'did you mean .*train.jsonl'),
    ('{dir}/none/train.jsonl', {}, 'directory .*none does not exist'),
    ('{dir}/train.jsonl', {'options': {'a': 1}}, 'takes no options'),
    ('{dir}/bad.parquet', {}, 'not a readable Parquet'),
    ('{dir}/bytes.parquet', {}, "not a readable Parquet file: 'utf-8' codec"),
    ('{dir}/fifo.jsonl', {}, 'is a FIFO, wanted a regular file'),
    ('datasets:{dir}/nothing', {}, 'cannot be loaded'),
    (
      'datasets:json',
      {'options': {'data_files': '{dir}/broken.jsonl', 'cache_dir': '{dir}/c'}},
      'cannot be loaded',
    ),
    ('datasets:{dir}/splits', {}, r"splits \['a', 'b'\]"),
    ('datasets:{dir}/splits#c', {}, 'cannot be loaded'),
  ],
)
def test_bad_source_is_one_line_that_says_what_to_do(tmp_path, source, kwargs, message):
  (tmp_path / 'train.jsonl').write_text('{}')
  (tmp_path / 'bad.parquet').write_text('PAR1 cut short')
  texts = pyarrow.array([b'\xff'], pyarrow.binary()).view(pyarrow.string())
  pyarrow.parquet.write_table(pyarrow.table({'prompt': texts}), tmp_path / 'bytes.parquet')
  os.mkfifo(tmp_path / 'fifo.jsonl')
  (tmp_path / 'broken.jsonl').write_text('{"a": 1}\n{"a": ')
  if 'splits' in source:
    import datasets

    part = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({'a': part, 'b': part}).save_to_disk(str(tmp_path / 'splits'))
  with pytest.raises(UserError, match=message) as error:
    options = {
      key: str(value).format(dir=tmp_path) for key, value in kwargs.get('options', {}).items()
    }
    read(
      source.format(dir=tmp_path),
      **kwargs | ({'options': options} if source == 'datasets:json' else {}),
    )
  assert '\n' not in str(error.value)


@pytest.fixture
def saved(tmp_path):
  import datasets

  datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / 'saved'))
  return tmp_path / 'saved'


@pytest.mark.parametrize(
  ('state', 'message'),
  [
    ('""', 'has no list _data_files'),
    ('{"_data_files": [{"filename": "../outside.arrow"}]}', 'leads out of'),
    ('{"_data_files": [{"filename": "/dev/zero"}]}', 'is absolute'),
    ('{"_data_files": [{"filename": "fifo"}]}', 'is a FIFO, wanted a regular file'),
    ('{"_data_files": [7]}', '_data_files has 7, wanted'),
    ('[' * 9999, 'nested more than 100 levels'),
  ],
)
def test_a_saved_dataset_names_only_files_of_its_own(saved, state, message):
  (saved.parent / 'outside.arrow').write_bytes((saved / 'data-00000-of-00001.arrow').read_bytes())
  os.mkfifo(saved / 'fifo')
  (saved / 'state.json').write_text(state)
  with pytest.raises(
    UserError, match=rf'^datasets:[^\n]*: cannot be loaded: [^\n]*{message}[^\n]*$'
  ):
    read(f'datasets:{saved}')


@pytest.mark.parametrize('split', ['..', '/etc', 7])
def test_a_saved_dataset_has_its_splits_inside(saved, split):
  (saved.parent / 'dict').mkdir()
  (saved.parent / 'dict' / 'dataset_dict.json').write_text(json.dumps({'splits': [split]}))
  with pytest.raises(UserError, match=r'leads out of|is absolute|has no list splits'):
    read(f'datasets:{saved.parent / "dict"}')


def test_a_saved_dataset_whose_texts_end_before_they_begin_is_refused(saved):
  """The offsets of a column are 32-bit numbers; a negative length would be read as it is."""
  path = saved / 'data-00000-of-00001.arrow'
  data = bytearray(path.read_bytes())
  # Texts 'a', 'ü', 'c' begin at 0, 1, 3 and end at 4.
  offsets = data.index(b''.join(number.to_bytes(4, 'little') for number in (0, 1, 3, 4)))
  data[offsets + 4 : offsets + 8] = (1 << 30).to_bytes(4, 'little')
  path.write_bytes(data)
  with pytest.raises(UserError, match='cannot be loaded: ArrowInvalid'):
    read(f'datasets:{saved}')
