"""verl's scripts and YAML files: every key is reported, and the configuration means the same."""

import pytest
from importing import FILES, fates, from_verl, texts, written

from jaxrl_llm.app.importers.table import final_rows
from jaxrl_llm.app.importers.verl_table import DEFAULTS, TABLE
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.models.spec import LoraConfig

SCRIPT = FILES / 'verl_grpo.sh'


@pytest.fixture(scope='module')
def script():
  return from_verl(SCRIPT, DATA_DIR='words')


@pytest.fixture(scope='module')
def yaml():
  return from_verl(FILES / 'verl_ppo.yaml', rows=1000)


def test_a_script_becomes_the_configuration_that_it_means(script):
  config, stage = script.config, script.config.stages[0]
  assert [(t.name, t.source) for t in config.tasksets] == [
    ('train', 'words/train.parquet'),
    ('test', 'words/test.parquet'),
  ]
  assert config.policy.init_from == 'models/tiny' and config.policy.dtype == 'float32'
  assert (config.rollout.max_prompt_length, config.rollout.max_response_length) == (6, 7)
  assert config.rollout.engine == 'embedded' and config.rollout.vllm.args == {}
  assert stage.algorithm.name == 'grpo'
  assert stage.algorithm.options == {
    'clip_ratio_high': 0.28,
    'kl_loss_coef': 0.01,
    'kl_unbiased_gradient': False,
    'rollout_is': 'none',
  }
  assert (stage.source.groups_per_batch, stage.source.group_size) == (12, 4)
  assert (stage.minibatches, stage.epochs, stage.steps, stage.evaluate_every) == (2, 1, 3, 2)
  assert stage.optimizer.peak_lr == 2e-4 and stage.optimizer.warmup_steps == round(0.25 * 6)
  assert (stage.optimizer.weight_decay, stage.optimizer.b2) == (0.01, 0.999)
  assert config.rewards.scorers[0].options == {'function': 'reward.py:compute_score'}
  assert config.learner.chunks_per_rank == 8


def test_every_key_of_a_script_is_reported_once(script):
  given = [key for key in fates(script) if key]
  text = SCRIPT.read_text()
  assert len(given) == len(script.outcomes) == 30
  assert all(f'{key}=' in text for key in given)
  assert sum(script.counts().values()) == 30
  assert fates(script)['trainer.experiment_name'] == 'not supported'
  assert '$(date +%s)' in texts(script)['trainer.experiment_name']
  assert fates(script)['trainer.total_epochs'] == 'not needed'
  lines = script.lines()
  assert lines[-1] == f'30 keys: {", ".join(f"{n} {fate}" for fate, n in script.counts().items())}'
  assert all('\n' not in line for line in lines)


def test_the_written_file_returns_the_same_configuration(script, yaml):
  assert written(script) == script.config and written(yaml) == yaml.config


def test_only_values_that_differ_are_written(script, tmp_path):
  text = script.source(SCRIPT, tmp_path / 'x.py')
  assert 'from jaxrl_llm.api import' in text
  lines = [line for line in text.splitlines() if not line.startswith('Command:')]  # Has a path.
  assert max(map(len, lines)) <= 100
  for default in ('group_size=8', 'epochs=1', 'clip_ratio_low', 'temperature', 'end_lr_fraction'):
    assert default not in text


def test_yaml_becomes_the_configuration_that_it_means(yaml):
  config, stage = yaml.config, yaml.config.stages[0]
  assert stage.algorithm.name == 'ppo'
  assert {k: stage.algorithm.options[k] for k in ('lam', 'kl_target', 'kl_horizon')} == {
    'lam': 0.95,
    'kl_target': 0.05,
    'kl_horizon': 500.0,
  }
  assert stage.algorithm.options['critic_warmup'] == 4
  assert config.policy.lora == LoraConfig(rank=8, alpha=32, targets=('query', 'value'))
  assert stage.critic.optimizer.peak_lr == 2e-5 and stage.critic.init_from is None
  assert stage.optimizer.warmup_steps == 7
  assert (stage.minibatches, stage.epochs, stage.steps) == (4, 2, 2 * (1000 // 64))
  assert config.rollout.vllm.args == {
    'gpu_memory_utilization': 0.5,
    'tensor_parallel_size': 2,
    'swap_space': 4,
  }
  assert config.learner.chunks_per_rank == 1024 // 128
  suites = [(s.taskset, s.samples, s.temperature, s.top_p) for s in config.evaluation]
  assert suites == [('data_test', 4, 0.6, 0.95), ('other_test', 4, 0.6, 0.95)]


def test_yaml_references_and_open_values(yaml):
  assert fates(yaml)['actor_rollout_ref.rollout.prompt_length'] == 'not needed'
  assert fates(yaml)['critic.model.path'] == 'not needed'
  assert fates(yaml)['trainer.default_local_dir'] == 'not supported'
  assert fates(yaml)['data.prompt_key'] == 'not supported'
  assert fates(yaml)['actor_rollout_ref.rollout.multi_turn.enable'] == 'not needed'


def script_of(tmp_path, *pairs, main='python3 -m verl.trainer.main_ppo'):
  path = tmp_path / 'run.sh'
  path.write_text(f'{main} {" ".join(pairs)}\n')
  return path


@pytest.mark.parametrize(
  ('pairs', 'name', 'options'),
  [
    (['algorithm.adv_estimator=rloo'], 'rloo', {'loss_agg_mode': 'token-mean'}),
    (['algorithm.adv_estimator=reinforce_plus_plus'], 'reinforce_plus_plus', {}),
    (
      [
        'algorithm.adv_estimator=grpo',
        'actor_rollout_ref.actor.policy_loss.loss_mode=gspo',
        'actor_rollout_ref.actor.clip_ratio_low=3e-4',
        'actor_rollout_ref.actor.clip_ratio_high=4e-4',
        'actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean',
      ],
      'gspo',
      {},
    ),
    (
      [
        'algorithm.adv_estimator=grpo',
        'actor_rollout_ref.actor.policy_loss.loss_mode=cispo',
        'actor_rollout_ref.actor.clip_ratio_low=10',
        'actor_rollout_ref.actor.clip_ratio_high=0.2',
      ],
      'cispo',
      {'clip_ratio_high': 0.2},
    ),
    (
      [
        'algorithm.adv_estimator=grpo',
        'algorithm.norm_adv_by_std_in_grpo=False',
        'actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm',
      ],
      'dr_grpo',
      {},
    ),
    (
      [
        'algorithm.adv_estimator=grpo',
        'algorithm.rollout_correction.rollout_is=token',
        'algorithm.rollout_correction.rollout_is_threshold=0.5_5.0',
      ],
      'grpo',
      {'rollout_is': 'icepop', 'rollout_is_threshold': 5.0, 'rollout_is_lower': 0.5},
    ),
  ],
)
def test_algorithms_have_the_options_that_verl_means(pairs, name, options, tmp_path):
  algorithm = from_verl(script_of(tmp_path, *pairs)).config.stages[0].algorithm
  assert algorithm.name == name
  if 'rollout_is' not in options:
    options = {**options, 'rollout_is': 'none'}
  assert dict(algorithm.options) == options


def test_what_is_not_here_is_said_and_replaced(tmp_path):
  result = from_verl(
    script_of(
      tmp_path,
      'algorithm.adv_estimator=remax',
      'actor_rollout_ref.rollout.name=sglang',
      'actor_rollout_ref.actor.ppo_mini_batch_size=300',
      'data.train_files=rows.csv',
      'trainer.total_epochs=three',
      'data.train_batch_size=64.5',
      'no.such.key=1',
      'trainer.nnodes=1',
      'trainer.nnodes=2',
      '~trainer.logger=x',
      'loose',
    )
  )
  assert result.config.stages[0].algorithm.name == 'grpo'
  assert result.config.rollout.engine == 'vllm'
  refused = {item.key: item.text for item in result.outcomes if item.fate == 'not supported'}
  assert set(refused) == {
    *('algorithm.adv_estimator', 'actor_rollout_ref.rollout.name', 'data.train_files'),
    *('actor_rollout_ref.actor.ppo_mini_batch_size', 'trainer.total_epochs', 'no.such.key'),
    *('data.train_batch_size', '~trainer.logger=x', 'loose'),
  }
  assert 'grpo is written' in refused['algorithm.adv_estimator']
  assert 'wanted a whole number' in refused['data.train_batch_size']
  first = next(item for item in result.outcomes if item.key == 'trainer.nnodes')
  assert first.text.startswith('overridden by a later value')
  assert len(result.outcomes) == 11


@pytest.mark.parametrize(
  ('name', 'content', 'words'),
  [
    ('a.sh', 'python train.py --x 1\n', 'no command starts verl.trainer.main_ppo'),
    ('a.sh', 'python3 -m verl.trainer.main_ppo "a=1\n', 'the closing " is missing'),
    ('a.yaml', 'a: &x [1]\nb: *x\n', 'aliases (*name) are not supported'),
    ('a.yaml', '[' * 5000, 'not plain YAML'),
    ('a.yaml', 'a: 1\na: 2\n', 'given twice'),
    ('a.yaml', '- 1\n', 'wanted keys and values'),
    ('a.yaml', 'a: !!python/object/apply:os.system ["touch made"]\n', None),
    ('a.sh', 'x' * (1 << 20) + 'y', 'wanted at most 1,048,576'),
    ('a.sh', 'a\0b\xff', 'no command starts'),
  ],
)
def test_hostile_files_are_one_line(name, content, words, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / name).write_text(content)
  if words is None:
    assert fates(from_verl(tmp_path / name)) == {'a': 'not supported'}
  else:
    with pytest.raises(UserError) as caught:
      from_verl(tmp_path / name)
    assert words in str(caught.value) and len(str(caught.value).splitlines()) == 1
  assert {path.name for path in tmp_path.iterdir()} == {name}


def test_infinite_numbers_are_refused(tmp_path):
  path = tmp_path / 'a.sh'
  keys = ('trainer.total_training_steps', 'trainer.total_epochs', 'data.train_batch_size')
  path.write_text(f'python3 -m verl.trainer.main_ppo {" ".join(f"{key}=1e999" for key in keys)}')
  result = from_verl(path, rows=100)
  assert fates(result) == dict.fromkeys(keys, 'not supported')
  assert all('wanted a' in text for text in texts(result).values())


@pytest.mark.full
def test_much_in_a_file_takes_time_in_proportion(tmp_path):
  path = tmp_path / 'a.yaml'
  files = ','.join(['a.parquet'] * 5000)
  blanks = ' ' * 100_000
  path.write_text(f'data:\n  train_files: [{files}]\n  prompt_key: "${{a, {blanks}"\n')
  result = from_verl(path)
  names = [taskset.name for taskset in result.config.tasksets]
  assert len(set(names)) == 5000 and names[1:3] == ['a_2', 'a_3']
  assert fates(result)['data.prompt_key'] == 'not supported'


def test_defaults_are_those_of_keys_in_the_table():
  assert set(DEFAULTS) <= set(TABLE)


@pytest.mark.parametrize('key', [key for key, row in TABLE.items() if len(final_rows(row)) > 1])
def test_a_choice_names_a_key_of_the_table(key):
  of = TABLE[key].of
  assert of is None or of in TABLE
