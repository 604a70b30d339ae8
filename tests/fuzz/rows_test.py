"""Rows from outside, changed in every way: each is taken, or refused in one line, and the file
stays as it is.
"""

import base64
import copy
import json
import pathlib

import pyarrow
import pyarrow.parquet
import pytest
from fuzzing import (
  COUNTS,
  LONG,
  TEXTS,
  bounded,
  changed,
  check_line,
  damaged,
  encoded,
  fuzz,
  json_bytes,
  quiet,
)
from hypothesis import strategies as st

from jaxrl_llm.app.offline.scoring import read_attempts
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.files import parse_msgpack
from jaxrl_llm.core.records.sample import decode, encode
from jaxrl_llm.rollout.explorers import wire
from jaxrl_llm.tasks.example_tokens import example_samples
from jaxrl_llm.tasks.examples import ExamplesConfig, load_examples
from jaxrl_llm.tasks.preferences import PreferencesConfig, load_preferences, pairs_of_tasks
from jaxrl_llm.tasks.processors import PROCESSORS, ProcessorContext, TaskProcessorConfig, process
from jaxrl_llm.tasks.taskset import (
  DemonstrationsConfig,
  TasksetConfig,
  demonstrations,
  load_taskset,
)
from jaxrl_llm.tasks.tokenizer import Tokenizer, build_bpe_tokenizer

PIXEL = base64.b64decode(
  'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=='
)
USER, ASSISTANT = (
  {'role': 'user', 'content': 'What is 2 + 3?'},
  {'role': 'assistant', 'content': '5'},
)
SYSTEM = {'role': 'system', 'content': 'Be brief.'}
TASKS = (
  {'prompt': 'a', 'answer': '1'},
  {'question': 'b', 'answer': 3, 'ability': 'math'},
  {
    'prompt': [SYSTEM, USER],
    'reward_model': {'style': 'rule', 'ground_truth': '5'},
    'extra_info': {'index': 7},
  },
  {
    'data_source': 'openai/gsm8k',
    'prompt': [USER],
    'ability': 'math',
    'reward_model': {'ground_truth': ['5', 5.0]},
  },
  {
    'reasoning_gym': 'x',
    'entry': {'question': 'c', 'answer': 'd', 'metadata': {'word': 'e', 'numbers': [1.0, 2]}},
  },
  {'prompt': 'f', 'media': [{'kind': 'image', 'path': 'red.png'}]},
  {'prompt': 'g', 'images': ['red.png', {'bytes': base64.b64encode(PIXEL).decode()}]},
  {'prompt': 'h', 'answer': 'i', 'pass_rate': 0.5, 'hardness': 0.5, 'guessed': 0},
)
"""One row of each form, curated ones among them."""
PAIRS = (
  {'prompt': 'q', 'chosen': 'good', 'rejected': 'bad'},
  {'prompt': [SYSTEM, USER], 'chosen': [ASSISTANT], 'rejected': [{**ASSISTANT, 'content': '6'}]},
  {
    'chosen': [USER, ASSISTANT],
    'rejected': [USER, {**ASSISTANT, 'content': '6'}],
    'question_id': 3,
  },
)
SCORED = (
  {'prompt': 'a', 'answer': '1', 'completion': '1', 'uid': 'u', 'response_len': 3},
  {'prompt': [USER], 'completion': '5', 'reward_model': {'ground_truth': '5'}, 'ability': 'math'},
  {'tests': ['assert f() == 1'], 'entry_point': 'f', 'completion': 'def f(): return 1'},
)
CALL = {'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 2, 'b': [3]}}}
ADD = {'type': 'function', 'function': {'name': 'add', 'parameters': {'type': 'object'}}}
EXAMPLES = (
  {'messages': [SYSTEM, USER, ASSISTANT, USER, ASSISTANT]},
  {
    'messages': [
      USER,
      {'role': 'assistant', 'content': None, 'tool_calls': [CALL]},
      {'role': 'tool', 'content': '5', 'tool_call_id': 'x'},
      {**ASSISTANT, 'reasoning_content': 'easy'},
    ],
    'tools': [ADD],
  },
  {'messages': [USER, ASSISTANT], 'tools': json.dumps([ADD]), 'chat_template_kwargs': {'a': 1}},
  {'messages': [{'role': 'user', 'content': [{'type': 'text', 'text': 'a'}]}, ASSISTANT]},
  {'conversations': [{'from': 'human', 'value': 'a'}, {'from': 'gpt', 'value': 'b'}]},
  {'prompt': [SYSTEM, USER], 'completion': [ASSISTANT]},
  {'prompt': 'a b', 'completion': ' c d', 'ability': 'math'},
  {'text': 'a b c'},
)
CHAT = (
  "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}{{ '<|im_start|>' + "
  "message.role + '\n' + (message.content or '') }}{% for call in message.tool_calls or [] %}"
  "{{ call | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GOOD_PAIR = {'prompt': 'a good prompt', 'chosen': 'yes', 'rejected': 'no'}
GOOD_EXAMPLE = {'text': 'a good text'}
GOOD_SCORED = {'prompt': 'a good prompt', 'completion': 'yes'}
GOOD = {'prompt': 'a good prompt', 'answer': 'good'}


def rows(forms):
  """Some rows, of which any may be changed."""
  return st.lists(
    st.sampled_from(forms).flatmap(lambda row: st.one_of(st.just(row), changed(row))), max_size=4
  )


def lines(forms, good):
  """A file whose first line is good."""
  line = st.sampled_from(forms).flatmap(encoded)
  return st.lists(line, min_size=1, max_size=3).map(
    lambda some: b'\n'.join([json_bytes(good), *some])
  )


@pytest.fixture
def folder(tmp_path):
  inside = tmp_path / 'inside'
  inside.mkdir()
  (inside / 'red.png').write_bytes(PIXEL)
  (tmp_path / 'outside.png').write_bytes(PIXEL)
  return inside


def taken(path: pathlib.Path, load):
  """The result of `load`, or None where the file is refused."""
  before = path.read_bytes()
  try:
    with quiet() as log, bounded():
      return load(str(path))
  except UserError as error:
    check_line(str(error))
    return None
  finally:
    log.check()
    assert path.read_bytes() == before


def check_tasks(tasks):
  """Every task can be told, stored and sent."""
  for task in tasks:
    assert wire.read_task(parse_msgpack(wire.pack(wire.task_row(task)))) == task
    json.dumps([task.uid, task.truth, dict(task.fields), *task.prompt], ensure_ascii=False).encode()
    assert all('outside' not in shown.reference for shown in task.media)


def check_taskset(taskset):
  counts = dict(taskset.counts)
  assert counts.pop('read') == sum(counts.values()) and counts['kept'] == len(taskset.tasks)
  check_tasks(taskset.tasks)


@COUNTS
def test_lines_are_tasks_or_refused(folder, count):
  file = folder / 'rows.jsonl'

  def check(data):
    file.write_bytes(data)
    strict = taken(file, lambda path: load_taskset(TasksetConfig(name='t', source=path)))
    # The first row is good, so without the others it loads.
    lenient = taken(
      file, lambda path: load_taskset(TasksetConfig(name='t', source=path, on_corrupt='skip'))
    )
    assert lenient is not None and lenient.tasks[0].fields == GOOD
    check_taskset(lenient)
    assert (strict is None) == bool(lenient.counts['corrupt'])

  fuzz(check, count, data=lines(TASKS, GOOD))


def _parquet(some):
  """Columns have one type each: one that Parquet does not have becomes text."""
  columns = {
    key: [row.get(key) if isinstance(row, dict) else row for row in some]
    for row in some
    for key in row
  }
  arrays = {}
  for name, values in columns.items():
    try:
      arrays[name] = pyarrow.array(values)
      _written({name: arrays[name]})
    except (pyarrow.ArrowException, OverflowError, UnicodeEncodeError, TypeError, ValueError):
      arrays[name] = pyarrow.array([repr(value) for value in values])
  return _written(arrays)


def _written(arrays):
  sink = pyarrow.BufferOutputStream()
  pyarrow.parquet.write_table(pyarrow.table(arrays), sink)
  return sink.getvalue().to_pybytes()


@COUNTS
def test_parquet_rows_are_tasks_or_refused(folder, count):
  file = folder / 'rows.parquet'
  dictionaries = rows(TASKS).map(lambda some: [row for row in some if isinstance(row, dict)])

  @st.composite
  def files(draw):
    some = [GOOD, *(_named(row) for row in draw(dictionaries))]
    data = _parquet(some)
    return draw(damaged(data)) if draw(st.integers(0, 2)) == 0 else data

  def check(data):
    file.write_bytes(data)
    for fate in ('fail', 'skip'):
      taskset = taken(
        file,
        lambda path, fate=fate: load_taskset(TasksetConfig(name='t', source=path, on_corrupt=fate)),
      )
      if taskset is not None:
        check_taskset(taskset)

  fuzz(check, count, data=files())


def _named(row):
  """Arrow's columns have names that UTF-8 can write."""
  return {
    key.encode('utf-8', 'replace').decode(): value for key, value in copy.deepcopy(row).items()
  }


@COUNTS
def test_a_saved_dataset_is_tasks_or_refused(folder, count):
  """Its files, which the library would map into memory as they are."""
  import datasets

  place = folder / 'saved'
  datasets.disable_progress_bars()
  datasets.Dataset.from_list([GOOD, {'prompt': 'b', 'answer': None}]).save_to_disk(str(place))
  files = {file.name: file.read_bytes() for file in place.iterdir()}

  def check(name, data):
    for file, content in files.items():
      (place / file).write_bytes(content)
    content = files[name]
    if name.endswith('.json') and data.draw(st.booleans()):
      (place / name).write_bytes(data.draw(encoded(json.loads(content))))
    else:
      (place / name).write_bytes(data.draw(damaged(content)))
    taskset = taken(
      place / name, lambda _: load_taskset(TasksetConfig(name='t', source=f'datasets:{place}'))
    )
    if taskset is not None:
      check_taskset(taskset)

  fuzz(check, count, name=st.sampled_from(sorted(files)), data=st.data())


@COUNTS
def test_lines_are_pairs_or_refused(folder, count):
  file = folder / 'pairs.jsonl'

  def check(data):
    file.write_bytes(data)
    strict = taken(file, lambda path: load_preferences(PreferencesConfig(name='p', source=path)))
    found = taken(
      file,
      lambda path: load_preferences(PreferencesConfig(name='p', source=path, on_corrupt='skip')),
    )
    assert found is not None and found.pairs[0].task.fields == GOOD_PAIR
    counts = dict(found.counts)
    assert counts.pop('read') == sum(counts.values()) and counts['kept'] == len(found.pairs)
    assert (strict is None) == bool(counts['corrupt'])
    check_tasks([pair.task for pair in found.pairs])
    json.dumps(
      [[p.uid, p.chosen, p.rejected, p.group] for p in found.pairs], ensure_ascii=False
    ).encode()

  fuzz(check, count, data=lines(PAIRS, GOOD_PAIR))


@COUNTS
def test_lines_are_attempts_or_refused(folder, count):
  file = folder / 'attempts.jsonl'

  def check(data):
    file.write_bytes(data)
    for attempt in taken(file, lambda path: read_attempts(pathlib.Path(path))) or ():
      assert json.dumps(wire.task_row(attempt.task))
      assert isinstance(attempt.completion, str) and isinstance(attempt.response_len, int)

  fuzz(check, count, data=lines(SCORED, GOOD_SCORED))


@COUNTS
def test_lines_are_examples_or_refused(folder, count):
  """Through to their tokens, by a chat template with a process of its own."""
  file, made = folder / 'chat.jsonl', folder / 'tokenizer'
  build_bpe_tokenizer(['a b c'], made, vocab_size=300, template='chatml')
  (made / 'chat_template.jinja').write_text(CHAT)
  tokenizer = Tokenizer.from_directory(made)

  def check(data, longest, too_long):
    file.write_bytes(data)

    def load(path, on_corrupt):
      config = ExamplesConfig(name='e', source=path, on_corrupt=on_corrupt, too_long=too_long)
      found = load_examples(config)
      return found, *example_samples(found, tokenizer, longest)

    strict = taken(file, lambda path: load(path, 'fail'))
    found, samples, counts = taken(file, lambda path: load(path, 'skip'))
    read = dict(found.counts)
    assert read.pop('read') == sum(read.values()) and read['kept'] == len(found.examples)
    assert (strict is None) == bool(read['corrupt'] + counts['corrupt'])
    rows = {sample.uid.partition('/')[0] for sample in samples}
    lost = counts['corrupt'] + counts['too_long'] + counts['without_loss']
    assert len(rows) + lost == len(found.examples) and 'e:0' in rows
    for sample in samples:
      again = decode(encode(sample))
      assert again.uid == sample.uid and (again.tokens == sample.tokens).all()
      assert len(sample.tokens) <= longest and sample.loss_mask.any() and not sample.loss_mask[0]

  fuzz(
    check,
    count,
    data=lines(EXAMPLES, GOOD_EXAMPLE),
    longest=st.sampled_from([20, 50, 9999]),
    too_long=st.sampled_from(['truncate', 'split', 'skip']),
  )


TEMPLATES = (
  '{prompt}',
  '{numbers:csv}',
  '{answer:after ####}',
  '{extra_info[index]}',
  '{word!r:>10}',
  *TEXTS,
)


@COUNTS
def test_templates_and_processors_take_any_row(folder, count):
  """A template is the configuration's and may be wrong for a row, or altogether."""
  file = folder / 'rows.jsonl'
  templates = st.one_of(st.sampled_from([t for t in TEMPLATES if t != LONG]), st.text(max_size=12))
  options = st.one_of(*(changed({name: value}) for name, value in (
    ('near', True), ('min_tokens', 1), ('max_tokens', 20), ('drop', ['choice'])
  )))  # fmt: skip

  def check(data, template, name, chosen):
    file.write_bytes(data)

    def load(path):
      config = TasksetConfig(
        name='t', source=path, prompt=template, truth=template, system=template, on_corrupt='skip'
      )
      taskset = load_taskset(config)
      demonstrations(taskset, DemonstrationsConfig(templates=(template,)))
      pairs_of_tasks(taskset, chosen='{prompt}', rejected=(template,))
      configs = [TaskProcessorConfig(name=name, options=chosen)] if isinstance(chosen, dict) else []
      return process(
        taskset,
        configs,
        ProcessorContext(others=taskset.tasks[:1], length_of=lambda task: len(task.prompt)),
      )

    taskset = taken(file, load)
    if taskset is not None:
      check_taskset(taskset)

  names = st.sampled_from([*PROCESSORS, 'nothing'])
  fuzz(check, count, data=lines(TASKS, GOOD), template=templates, name=names, chosen=options)
