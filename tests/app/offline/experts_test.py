"""Expert rows from files and corrections: what is added, and one line for each row that is not."""

import dataclasses
import json

import pytest
from exploring import make_tasks, make_tokenizer
from paths import ROOT
from stored import issues, make_sample

from jaxrl_llm.app.commands import experts as command
from jaxrl_llm.app.commands import feedback
from jaxrl_llm.app.offline import experts
from jaxrl_llm.app.schema import Config
from jaxrl_llm.config.load import load_file
from jaxrl_llm.config.values import to_json
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import decode
from jaxrl_llm.replay.experts import arrived
from jaxrl_llm.replay.index import open_store

TASK = make_tasks(2)[1]
WHO = '--who=ann'


def new_run(directory, config='configs/mix.py:mix'):
  """The directory of a run whose store has two samples of the task 'ab'. The policy read another
  prompt for the second, h/0.
  """
  directory.mkdir(exist_ok=True)
  tokenizer = make_tokenizer(directory / 'tokenizer')
  (directory / 'config.json').write_text(json.dumps(to_json(load_file(f'{ROOT}/{config}', Config))))
  store = open_store(directory / 'replay')
  store.at(0).offer([TASK])
  prompt = tokenizer.render_prompt(TASK.prompt)
  for uid, asked in (('g/0', prompt), ('h/0', prompt[::-1])):
    sample, (issue,) = make_sample(uid, len(prompt) + 9), issues([uid])
    sample.tokens[: len(prompt)] = asked
    store.at(0).issue([dataclasses.replace(issue, task_id=TASK.uid)])
    store.at(0).append([dataclasses.replace(sample, task_id=TASK.uid, prompt_len=len(prompt))])
  store.close()
  return directory


@pytest.fixture
def run(tmp_path):
  return new_run(tmp_path / 'run')


def call(main, flags_of, *flags) -> int:
  """Runs a command in this process, with no flags of earlier calls."""
  for name in flags_of:
    flags_of[name].unparse()
  return main(['command', *flags])


def add(run, *flags) -> int:
  return call(command.main, command.FLAGS, f'--workdir={run}', *flags)


def correct(run, *flags) -> int:
  return call(feedback.main, feedback.FLAGS, f'--workdir={run}', *flags)


def written(tmp_path, *lines) -> str:
  file = tmp_path / 'rows.jsonl'
  file.write_bytes(b'\n'.join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines))
  return str(file)


def test_rows_of_a_file_are_rendered_as_rollouts_are_and_keep_their_lineage(run, tmp_path):
  tokenizer = experts.Run(run).tokenizer
  prompt, answer = tokenizer.render_answer(({'role': 'user', 'content': 'ab'},), 'ba')
  file = written(
    tmp_path,
    {'prompt': 'ab', 'answer': 'ba', 'rewards': 0.5},
    {'prompt': [{'role': 'user', 'content': 'cd'}], 'answer': 'dc', 'who': 'bob', 'task': 't:1'},
    {'tokens': [*prompt, *answer[::-1]], 'prompt_len': len(prompt), 'origin': {'page': 7}},
  )
  assert add(run, f'--add={file}', WHO) == 0
  first, second, third = arrived(run / 'replay', after=0)
  samples = [decode(row.payload) for row in (first, second, third)]
  assert samples[0].tokens.tolist() == [*prompt, *answer] and samples[0].source == 'expert'
  assert samples[0].loss_mask.tolist() == [False] * len(prompt) + [True] * len(answer)
  assert samples[2].tokens.tolist() == [*prompt, *answer[::-1]]
  assert samples[1].task_id == 't:1' and samples[0].task_id.startswith('experts:')
  assert [row.who for row in (first, second, third)] == ['ann', 'bob', 'ann']
  assert first.scores == {'reward': 0.5} and second.scores == {}
  assert first.origin == {'kind': 'file', 'file': 'rows.jsonl', 'line': 1}
  assert third.origin == {'kind': 'file', 'file': 'rows.jsonl', 'line': 3, 'of': {'page': 7}}


def test_each_row_that_cannot_be_added_is_one_line_and_loses_nothing(run, tmp_path, capsys):
  good, other = {'prompt': 'ab', 'answer': 'ba'}, {'prompt': 'gh', 'answer': 'hg'}
  hostile = [
    (b'not json', 'not JSON'),
    (b'[' * 100_000, 'not JSON'),
    (b'\xff\xfe', 'not JSON'),
    ([1], 'wanted an object with prompt and answer'),
    ({'prompt': 'ab'}, 'answer is missing'),
    ({**good, 'answer': 7}, 'answer is 7, wanted a non-empty text'),
    ({**good, 'answer': ''}, "answer is '', wanted a non-empty text"),
    (b'{"prompt": "ab", "answer": "\\ud800"}', 'wanted a non-empty text'),
    ({**good, 'prompt': [{'role': 'root', 'content': 'a'}]}, 'wanted a text, or messages'),
    ({**good, 'extra': 1}, "unknown field 'extra'"),
    ({**good, 'answer': 'Ω'}, 'Ω'),
    ({**good, 'answer': 'ab' * 5000}, 'tokens, wanted at most'),
    ({'tokens': [0, 1, 2, 10**6], 'prompt_len': 2}, 'tokens has token 1000000, wanted 0 …'),
    ({'tokens': [0, 1, -1], 'prompt_len': 1}, 'tokens has token -1, wanted 0 …'),
    ({'tokens': [0, 10**30], 'prompt_len': 1}, 'tokens has a number of more than 32 bits'),
    ({'tokens': [0, 1], 'prompt_len': 2}, 'prompt_len is 2'),
    ({'tokens': [0, '1'], 'prompt_len': 1}, 'tokens is not a list of whole numbers'),
    (b'{"prompt": "ab", "answer": "b", "rewards": NaN}', 'reward: nan, wanted a number'),
    (b'{"prompt": "ab", "answer": "b", "rewards": {"x": 1e999}}', 'x: inf, wanted a number'),
    ({**good, 'who': 'a\nb'}, 'wanted a name'),
    (b'{"prompt": "' + b'a' * (experts.MAX_LINE + 1) + b'"}', 'the line is longer than'),
  ]
  file = written(tmp_path, good, *(line for line, _ in hostile), good, other)
  last = len(hostile) + 2
  for known, added in (([last], 2), ([1, last, last + 1], 0)):
    assert add(run, f'--add={file}', WHO) == 1
    *lines, total = capsys.readouterr().out.splitlines()
    before, refused = lines[: len(known)], lines[len(known) :]
    assert [line.partition(': ')[0] for line in before] == [f'{file}:{number}' for number in known]
    assert all(line.endswith('was added before, by ann') for line in before)
    assert len(refused) == len(hostile)
    for number, (line, (_, message)) in enumerate(zip(refused, hostile), start=2):
      assert line.startswith(f'{file}:{number}: ') and message in line and len(line) < 600, line
    assert total == (
      f'{added} expert rows added, {len(known)} added before, {len(hostile)} refused'
    )
  assert len(arrived(run / 'replay', after=0)) == 2


def test_a_correction_of_a_sample_becomes_an_expert_row(run, tmp_path, capsys):
  assert correct(run, '--uid=g/0', '--correction=ba', WHO) == 0
  file = written(
    tmp_path,
    {'uid': 'g/0', 'correction': 'bb', 'who': 'bob'},
    {'uid': 'g/0', 'correction': 'ba', 'who': 'bob'},
    {'uid': 'nobody/0', 'correction': 'b', 'who': 'bob'},
    {'uid': 'h/0', 'correction': 'b', 'who': 'bob'},
    {'uid': 'g/0', 'correction': 7, 'who': 'bob'},
    {'uid': 'g/0', 'correction': 'b', 'value': 1, 'who': 'bob'},
  )
  capsys.readouterr()
  assert correct(run, f'--import={file}') == 1
  out = capsys.readouterr().out.splitlines()
  assert sorted(line.partition(': ')[0] for line in out[:4]) == [
    f'{file}:{n}' for n in (3, 4, 5, 6)
  ]
  text = '\n'.join(out)
  for message in (
    'no such sample',
    'the policy another prompt',
    'correction is 7',
    'wanted uid, corr',
  ):
    assert message in text
  assert out[-1] == f'{file}: 0 verdicts attached, 2 corrections added, 4 refused'
  rows = arrived(run / 'replay', after=0)
  assert [(row.who, row.origin) for row in rows] == [
    (who, {'kind': 'correction', 'uid': 'g/0', 'attempt': 1}) for who in ('ann', 'bob')
  ]
  tokenizer, sample = experts.Run(run).tokenizer, decode(rows[0].payload)
  prompt, answer = tokenizer.render_answer(TASK.prompt, 'ba')
  assert sample.tokens.tolist() == [*prompt, *answer] and sample.source == 'human'
  assert (sample.task_id, sample.taskset) == (TASK.uid, 'words')
  for flags in (
    ['--uid=g/0', '--correction=b'],
    ['--correction=b', WHO],
    ['--uid=x', '--correction=b', WHO],
  ):
    assert correct(run, *flags) == 2
    assert capsys.readouterr().err.count('\n') == 1


def test_a_run_that_would_not_train_on_them_takes_no_rows(tmp_path, capsys):
  run = new_run(tmp_path / 'other', 'configs/quickstart.py')
  file = written(tmp_path, {'prompt': 'ab', 'answer': 'ba'})
  assert add(run, f'--add={file}', WHO) == 2
  assert 'no stage has source.experts' in capsys.readouterr().err
  for flags in ([f'--add={file}', f'--from_run={run}'], ['--add=none.jsonl', WHO]):
    assert add(new_run(tmp_path / 'run') if flags[-1] == WHO else run, *flags) == 2
    assert capsys.readouterr().err.count('\n') == 1
  assert add(tmp_path / 'nowhere', f'--add={file}') == 2
  with pytest.raises(UserError, match='not the directory of a run'):
    experts.Run(tmp_path / 'nowhere')


def test_the_command_says_how_many_rows_there_are(run, tmp_path, capsys):
  assert add(run) == 0
  assert capsys.readouterr().out == 'no expert rows have been added\n'
  assert add(run, f'--add={written(tmp_path, {"prompt": "ab", "answer": "ba"})}', WHO) == 0
  capsys.readouterr()
  assert add(run) == 0
  assert capsys.readouterr().out == (
    'expert rows 1 = trained 0 + waiting 0 + arriving 1 + refused 0\n'
  )
  assert add(run, '--json') == 0
  assert json.loads(capsys.readouterr().out)['arriving'] == 1
