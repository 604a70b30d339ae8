"""TRL's command lines, YAML files and Python files: every argument is reported, nothing is run."""

import pytest
from importing import FILES, fates, from_trl, texts, written

from jaxrl_llm.app.importers.table import final_rows
from jaxrl_llm.app.importers.trl_table import DEFAULTS, TABLES
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.models.spec import PROJECTIONS


@pytest.fixture(scope='module')
def grpo():
  return from_trl(FILES / 'trl_grpo.sh')


@pytest.fixture(scope='module')
def dpo():
  return from_trl(FILES / 'trl_dpo.py')


def test_a_command_line_becomes_the_configuration_that_it_means(grpo):
  config, stage = grpo.config, grpo.config.stages[0]
  assert config.policy.init_from == 'models/tiny' and config.policy.dtype == 'bfloat16'
  assert config.policy.remat == 'none'
  assert (config.policy.lora.rank, config.policy.lora.targets) == (8, ('query', 'value'))
  assert [(t.source, t.truth) for t in config.tasksets] == [('words.jsonl', '{solution}')]
  assert (stage.algorithm.name, stage.name) == ('dr_grpo', 'dr_grpo')
  assert stage.algorithm.options == {
    'clip_ratio_high': 0.28,
    'clip_ratio_c': None,
    'kl_loss_coef': 0.04,
    'rollout_is': 'none',
  }
  # 2 processes of 8 completions, 4 times a generation, in groups of 8.
  assert (stage.source.groups_per_batch, stage.source.group_size, stage.minibatches) == (8, 8, 2)
  assert stage.steps == 4 and stage.optimizer.warmup_steps == 2
  assert (stage.optimizer.peak_lr, stage.optimizer.schedule) == (3e-6, 'cosine')
  names = [(s.name, s.implementation, s.weight) for s in config.rewards.scorers]
  assert names == [('answer', 'answer', 1.0), ('brevity', 'trl', 0.5)]
  assert config.rewards.scorers[1].options == {'function': 'my_rewards:brevity'}


def test_every_argument_of_a_command_line_is_reported(grpo):
  assert set(fates(grpo).values()) == {'mapped', 'not needed', 'not supported'}
  refused = {item.key for item in grpo.outcomes if item.fate == 'not supported'}
  assert refused == {'run_name', 'top_p', 'shiny_new_option'}
  assert '$RANDOM' in texts(grpo)['run_name']
  assert {'config_file', 'output_dir', 'log_completions', 'eval_strategy'} == {
    item.key for item in grpo.outcomes if item.fate == 'not needed'
  }
  assert sum(grpo.counts().values()) == len(grpo.outcomes) == 30


def test_calls_in_a_python_file_are_read_and_never_run(dpo):
  config, stage = dpo.config, dpo.config.stages[0]
  assert stage.algorithm.name == 'dpo'
  assert stage.algorithm.options == {'beta': 0.2, 'loss_type': 'ipo'}
  assert [(p.name, p.source) for p in config.preferences] == [
    ('train', 'datasets:org/preferences#train[:5%]'),
    ('test', 'datasets:org/preferences#test'),
  ]
  assert (stage.source.train, stage.source.held_out) == ('train', 'test')
  assert stage.source.sequences_per_batch == 2 * 4 * 2 and stage.steps == 50
  assert stage.evaluate_every == 10 and stage.optimizer.peak_lr == 5e-7
  assert config.policy.lora.targets == PROJECTIONS and config.policy.dtype == 'float32'
  assert config.rollout.max_length == 128
  assert fates(dpo)['run_name'] == fates(dpo)['lora_dropout'] == 'not supported'
  assert 'str(torch.rand(1))' in texts(dpo)['run_name']
  assert any('changed after loading' in note for note in dpo.notes)


def test_yaml_of_sft_becomes_a_stage_of_examples():
  result = from_trl(FILES / 'sft_config.yaml', rows=100)
  config, stage = result.config, result.config.stages[0]
  assert (stage.algorithm.name, stage.source.train) == ('sft', 'train')
  assert [(e.source, e.loss_on) for e in config.examples] == [('conversations.jsonl', 'answers')]
  assert stage.source.sequences_per_batch == 8 and stage.steps == 2 * 100 // 8
  assert config.rollout.max_length == 512 and stage.optimizer.peak_lr == 2e-5
  assert set(fates(result).values()) == {'mapped', 'not needed'}
  assert written(result) == config


@pytest.mark.parametrize(
  ('given', 'loss_on'),
  [
    ('', 'completions'),
    ('completion_only_loss: true', 'completions'),
    ('completion_only_loss: false', 'all'),
    ('assistant_only_loss: true', 'answers'),
  ],
)
def test_the_loss_of_sft_covers_what_trls_does(tmp_path, given, loss_on):
  (tmp_path / 'c.yaml').write_text(
    f'model_name_or_path: org/a\nmax_steps: 5\ndataset_name: d.jsonl\n{given}\n'
  )
  (examples,) = from_trl(tmp_path / 'c.yaml', trainer='sft').config.examples
  assert examples.loss_on == loss_on


def test_the_written_file_returns_the_same_configuration(grpo, dpo):
  assert written(grpo) == grpo.config and written(dpo) == dpo.config


def test_functions_of_the_file_become_scorers(tmp_path):
  path = tmp_path / 'train.py'
  path.write_text(
    'from rewards import polite\nfrom trl import GRPOConfig, GRPOTrainer\n'
    'from trl.rewards import think_format_reward\n'
    'def short(completions, **kwargs):\n  return [0.0]\n'
    "GRPOTrainer(model='m', args=GRPOConfig(max_steps=3, **more),\n"
    '            reward_funcs=[short, polite, think_format_reward], callbacks=[print])\n'
  )
  result = from_trl(path)
  options = [scorer.options for scorer in result.config.rewards.scorers]
  assert options[0] == {'function': f'{path}:short'}
  assert options[1] == {'function': 'rewards:polite'}
  assert result.config.rewards.scorers[2].implementation == 'format'
  assert fates(result)['**'] == fates(result)['callbacks'] == 'not supported'
  assert any('no dataset is named' in note for note in result.notes)


def test_a_docstring_shows_the_command_of_a_script(tmp_path):
  path = tmp_path / 'gspo.py'
  path.write_text(
    '"""Usage:\n\n```bash\npython gspo.py \\\\\n  --model_name_or_path org/m --max_steps 4 \\\\\n'
    '  --importance_sampling_level sequence\n```\n\nand more `here`\n"""\n'
    'args, = TrlParser(()).parse_args_and_config()\n'
    "rows = load_dataset('org/rows', split='train')\n"
    'GRPOTrainer(model=args.model, args=args, train_dataset=rows, reward_funcs=accuracy_reward)\n'
    'from trl.rewards import accuracy_reward\n'
  )
  result = from_trl(path)
  assert result.config.stages[0].algorithm.name == 'gspo'
  assert result.config.tasksets[0].source == 'datasets:org/rows#train'
  assert set(fates(result).values()) == {'mapped'}


def test_a_command_reads_the_yaml_file_beside_it(tmp_path):
  (tmp_path / 'c.yaml').write_text('model_name_or_path: org/a\nmax_steps: 5\nbeta: 0.1\n')
  (tmp_path / 'run.sh').write_text('trl dpo --config c.yaml --dataset_name d.jsonl --beta=0.3\n')
  result = from_trl(tmp_path / 'run.sh')
  assert result.config.policy.init_from == 'org/a'
  assert result.config.stages[0].algorithm.options == {'beta': 0.3}
  (tmp_path / 'run.sh').write_text('trl dpo --config ../../etc/passwd\n')
  with pytest.raises(UserError, match='leads out of'):
    from_trl(tmp_path / 'run.sh')


@pytest.mark.parametrize(
  ('loss', 'name', 'options'),
  [
    ('dapo', 'grpo', {}),
    ('grpo', 'grpo', {'loss_agg_mode': 'seq-mean-token-mean'}),
    ('cispo', 'cispo', {'clip_ratio_high': 2.0}),
    ('sapo', 'sapo', {}),
    ('vespo', 'grpo', {}),
  ],
)
def test_losses_have_the_options_that_trl_means(loss, name, options, tmp_path):
  (tmp_path / 'grpo.yaml').write_text(
    f'loss_type: {loss}\nmax_steps: 1\nepsilon_high: {3.0 if loss == "cispo" else 0.2}\n'
  )
  result = from_trl(tmp_path / 'grpo.yaml')
  algorithm = result.config.stages[0].algorithm
  expected = {'clip_ratio_c': None, 'rollout_is': 'none', 'adv_eps': 1e-4, **options}
  if name in ('cispo', 'sapo'):  # Their losses have no dual clip.
    del expected['clip_ratio_c']
  assert (algorithm.name, dict(algorithm.options)) == (name, expected)
  assert (fates(result)['loss_type'] == 'not supported') == (loss == 'vespo')


def test_lists_of_names_are_not_followed_without_end(tmp_path):
  path = tmp_path / 'a.py'
  lists = ''.join(f'a{i} = [{", ".join([f"a{i - 1}"] * 12)}]\n' for i in range(1, 19))
  path.write_text(f'a0 = [1]\n{lists}GRPOConfig(num_generations=8, stop=a18)\n')
  assert texts(from_trl(path))['stop'].startswith('its value depends on a18')


def test_a_value_that_was_refused_stays_refused(tmp_path):
  path = tmp_path / 'a.sh'
  path.write_text('trl grpo --max_steps many --num_train_epochs 2\n')
  assert texts(from_trl(path, rows=640))['max_steps'] == 'wanted a number'


def test_the_last_of_several_yaml_files_counts(tmp_path):
  (tmp_path / 'a.yaml').write_text('learning_rate: 1e-5\n')
  (tmp_path / 'b.yaml').write_text('beta: 0.5\n')
  path = tmp_path / 'a.sh'
  path.write_text('trl grpo --config a.yaml --config b.yaml --num_generations 8\n')
  assert set(fates(from_trl(path))) == {'beta', 'num_generations'}


@pytest.mark.parametrize(
  ('name', 'content', 'words'),
  [
    ('a.yaml', 'model_name_or_path: m\n', 'pass --trainer='),
    ('a.sh', 'echo hi\n', 'no command starts a trainer'),
    ('a.py', 'def f(:\n', 'not Python'),
    ('a.py', '(' * 3000, 'not Python'),
    ('a.py', 'x = 1\n', 'gives no arguments'),
    ('a.py', 'x = ' + '-' * 50_000 + '1\n', 'not Python|gives no arguments'),
    ('a.py', '\0', 'not Python'),
  ],
)
def test_hostile_files_are_one_line(name, content, words, tmp_path):
  (tmp_path / name).write_text(content)
  with pytest.raises(UserError) as caught:
    from_trl(tmp_path / name)
  assert any(word in str(caught.value) for word in words.split('|'))
  assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize('trainer', TABLES)
def test_defaults_and_choices_name_arguments_of_the_table(trainer):
  table = TABLES[trainer]
  assert set(DEFAULTS[trainer]) <= set(table)
  assert all(final_rows(row) for row in table.values())
