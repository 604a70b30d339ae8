"""The doctor's checks of texts that need neither devices nor a run."""

import dataclasses
import json

import faults
import pytest

from jaxrl_llm.app.doctor import data as texts
from jaxrl_llm.app.doctor.data import Data
from jaxrl_llm.app.doctor.findings import FindingStatus
from jaxrl_llm.tasks.examples import ExamplesConfig, load_examples
from jaxrl_llm.tasks.taskset import load_taskset
from jaxrl_llm.tasks.tokenizer import Tokenizer, TokenizerConfig, build_tokenizer


@pytest.fixture
def data(tmp_path):
  return of(faults.healthy(tmp_path), tmp_path)


def of(config, folder, *, template='plain', **fields):
  """The data of a configuration with a tokenizer whose configuration has these values."""
  path = folder / 'made'
  build_tokenizer(TokenizerConfig(kind='bpe', vocab_size=260, template=template), (), path)
  file = path / 'tokenizer_config.json'
  file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
  tasksets = {taskset.name: load_taskset(taskset) for taskset in config.tasksets}
  return Data(
    config=config,
    tasksets=tasksets,
    preferences={},
    examples={},
    tokenizer=Tokenizer.from_directory(path),
  )


CHECKS = (texts.ends, texts.template, texts.lengths, texts.duplicates, texts.leakage)


def test_healthy_data_has_no_fault(data):
  findings = [finding for check in CHECKS for finding in check(data)]
  assert [finding.status for finding in findings] == [FindingStatus.OK] * 5, findings


def test_a_template_whose_end_is_no_stop_token_is_a_failure(data, tmp_path):
  unended = of(data.config, tmp_path, template='chatml', eos_token='<pad>')
  (finding,) = texts.ends(unended)
  assert finding.status == FindingStatus.FAILURE and '<|im_end|>' in finding.result
  ended = of(data.config, tmp_path, template='chatml')
  (finding,) = texts.ends(ended)
  assert finding.status == FindingStatus.OK


@pytest.mark.parametrize(
  ('change', 'status'),
  [
    (lambda i, text: text.upper() if i == 0 else text, FindingStatus.FAILURE),
    (lambda i, text: text.replace('and', 'plus'), FindingStatus.OK),
  ],
)
def test_an_evaluation_task_in_other_letters_is_leakage(change, status, tmp_path):
  faults.write_tasks(tmp_path)
  train = [json.loads(line) for line in (tmp_path / 'train.jsonl').read_text().splitlines()]
  rows = [
    {**row, 'question': change(i, f'{row["question"]} {"!" * (i > 0)}')}
    for i, row in enumerate(train)
  ]
  rows[0]['question'] = change(0, train[0]['question'])
  faults.write_rows(tmp_path / 'eval.jsonl', rows[:16])
  (finding,) = texts.leakage(of(faults.healthy(tmp_path), tmp_path))
  assert finding.status == status


def test_near_duplicates_are_a_warning(tmp_path):
  faults.write_tasks(tmp_path)
  train = [json.loads(line) for line in (tmp_path / 'train.jsonl').read_text().splitlines()]
  again = [{**row, 'question': row['question'].title()} for row in train[:8]]
  faults.write_rows(tmp_path / 'train.jsonl', train + again)
  (finding,) = texts.duplicates(of(faults.healthy(tmp_path), tmp_path))
  assert finding.status == FindingStatus.WARNING
  assert finding.detail['near_duplicates']['train'] == pytest.approx(8 / 72)


@pytest.mark.parametrize(
  ('limits', 'status'),
  [
    ({'max_prompt_length': 13}, FindingStatus.FAILURE),
    ({'max_response_length': 2}, FindingStatus.FAILURE),
    ({}, FindingStatus.OK),
  ],
)
def test_texts_over_the_limits_are_reported_with_their_share(data, limits, status):
  embedded = dataclasses.replace(data.config.rollout.embedded, prefill_buckets=())
  rollout = dataclasses.replace(data.config.rollout, embedded=embedded, **limits)
  (finding,) = texts.lengths(
    dataclasses.replace(data, config=dataclasses.replace(data.config, rollout=rollout))
  )
  assert finding.status == status
  if limits:
    assert max(finding.detail['over_limit'].values()) == 1.0


def test_examples_are_measured_and_what_they_lose_is_told(data, tmp_path):
  file = tmp_path / 'chat.jsonl'
  turns = [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]
  file.write_text('\n'.join(json.dumps({'messages': turns}) for _ in range(9)))
  found = load_examples(ExamplesConfig(name='chat', source=str(file)))
  (finding,) = texts.examples(dataclasses.replace(data, examples={'chat': found}))
  assert finding.status == FindingStatus.OK and finding.check == 'examples chat'
  assert '9 rows have 27 tokens, 18 of them in the loss' in finding.result
  long = [*turns, {'role': 'user', 'content': 'c' * 999}]
  file.write_text(file.read_text() + '\n' + json.dumps({'messages': long}))
  found = load_examples(ExamplesConfig(name='chat', source=str(file)))
  (finding,) = texts.examples(dataclasses.replace(data, examples={'chat': found}))
  assert finding.status == FindingStatus.WARNING and '1 truncated at' in finding.result
  file.write_text('\n'.join(json.dumps({'messages': long}) for _ in range(9)))
  found = load_examples(ExamplesConfig(name='chat', source=str(file)))
  (finding,) = texts.examples(dataclasses.replace(data, examples={'chat': found}))
  assert finding.status == FindingStatus.FAILURE and '9 truncated at' in finding.result
