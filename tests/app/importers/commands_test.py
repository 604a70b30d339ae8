"""`jaxrl import-verl` and `jaxrl import-trl`: the report, the file, and their one-line errors."""

import json

import pytest
from importing import FILES

from jaxrl_llm.app.commands import cli, import_trl, import_verl
from jaxrl_llm.app.schema import Config
from jaxrl_llm.config.load import load_file


@pytest.fixture(autouse=True)
def fresh_flags():
  for flags in (import_trl.FLAGS, import_verl.FLAGS):
    for name in flags:
      flags[name].unparse()


def run(*arguments: str) -> int:
  return cli.launch(arguments[0], [f'jaxrl {arguments[0]}', *arguments[1:]])


def test_the_report_and_the_file(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  assert run('import-verl', str(FILES / 'verl_grpo.sh'), '--define=MODEL=models/mine') == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[0] == 'mapped (22)'
  assert '  data.train_batch_size=12: stages.NAME.source.groups_per_batch = 12' in lines
  assert lines[-1] == 'wrote verl_grpo.py: jaxrl train --config=verl_grpo.py --check'
  config = load_file('verl_grpo.py', Config)
  assert config.policy.init_from == 'models/mine'
  assert 'jaxrl train --config=verl_grpo.py' in (tmp_path / 'verl_grpo.py').read_text()


def test_a_name_is_quoted_in_the_command_that_is_shown(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  source = tmp_path / '"""\nimport os; os.abort()\n#.sh'
  source.write_bytes((FILES / 'verl_grpo.sh').read_bytes())
  target = 'a b; touch made é.py'
  assert run('import-verl', str(source), f'--output={target}') == 0
  assert f"--config='{target}' --check" in capsys.readouterr().out.splitlines()[-1]
  assert load_file(target, Config).tasksets
  assert "--config='a b; touch made ?.py'" in (tmp_path / target).read_text()


def test_a_file_is_never_overwritten_unasked(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'trl_dpo.py').write_text('mine')
  command = ('import-trl', str(FILES / 'trl_dpo.py'))
  assert run(*command) == 2
  assert capsys.readouterr().err.startswith('error: trl_dpo.py: exists; ')
  assert (tmp_path / 'trl_dpo.py').read_text() == 'mine'
  assert run(*command, '--overwrite', '--json') == 0
  report = json.loads(capsys.readouterr().out)
  assert report['file'] == 'trl_dpo.py' and sum(report['counts'].values()) == len(report['keys'])
  source = tmp_path / 'copy.py'
  source.write_bytes((FILES / 'trl_dpo.py').read_bytes())
  assert run('import-trl', 'copy.py', '--overwrite') == 2
  assert 'copy.py: is the file to import' in capsys.readouterr().err
  assert source.read_bytes() == (FILES / 'trl_dpo.py').read_bytes()


@pytest.mark.parametrize(
  ('arguments', 'words'),
  [
    (['import-verl'], 'FILE: missing'),
    (['import-verl', 'nowhere.sh'], 'nowhere.sh: cannot be read'),
    (['import-verl', '.'], 'cannot be read'),
    (['import-verl', str(FILES / 'verl_grpo.sh'), '--define=X'], '--define=X: wanted NAME=VALUE'),
    (
      ['import-verl', str(FILES / 'verl_grpo.sh'), '--output=x.txt'],
      'wanted a file name that ends in .py',
    ),
    (['import-verl', str(FILES / 'verl_grpo.sh'), '--output=no/x.py'], 'cannot be written'),
    (['import-trl', str(FILES / 'verl_grpo.sh')], 'no command starts a trainer'),
    (['import-trl', str(FILES / 'trl_dpo.py'), '--trainer=ppo'], 'flag --trainer=ppo'),
  ],
)
def test_errors_are_one_line(arguments, words, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  assert run(*arguments) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith('error: ') and words in line
  assert not list(tmp_path.iterdir())
