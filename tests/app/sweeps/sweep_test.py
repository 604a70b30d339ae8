"""A sweep file gives the trials that it means; anything else is one line."""

import pytest
from paths import ROOT
from sweeping import RATE, sweep_file

from jaxrl_llm.app.sweeps.plan import load_plan
from jaxrl_llm.app.sweeps.trials import describe, trial_id
from jaxrl_llm.core.errors import UserError

ONE = f"axes={{'{RATE}': (1.0,)}}"


def overrides_of(file):
  return [dict(trial.overrides) for trial in load_plan(str(file), {}).trials]


def test_a_grid_is_every_combination_times_the_seeds(tmp_path):
  axes = f"axes={{'{RATE}': (1e-4, 1e-3), 'stages.grpo.minibatches': [1, 2]}}, seeds=(3, 4)"
  found = overrides_of(sweep_file(tmp_path, axes))
  assert len(found) == 8 and len({str(trial) for trial in found}) == 8
  assert found[0] == {RATE: 1e-4, 'stages.grpo.minibatches': 1, 'seed': 3}
  assert found[-1] == {RATE: 1e-3, 'stages.grpo.minibatches': 2, 'seed': 4}


def test_trials_come_from_a_list_or_a_generator(tmp_path):
  fields = f"trials=({{'{RATE}': rate / 10}} for rate in range(1, 4))"
  assert overrides_of(sweep_file(tmp_path, fields)) == [{RATE: rate / 10} for rate in range(1, 4)]


def test_a_random_search_draws_the_same_points_and_extends_them(tmp_path):
  pytest.importorskip('optuna')
  axes = (
    f"search='random', axes={{'{RATE}': Uniform(low=1e-5, high=1e-3, log=True), "
    "'stages.grpo.minibatches': Uniform(low=1, high=4), 'policy.dtype': ('float32', 'bfloat16')}"
  )
  few, many = (
    overrides_of(sweep_file(tmp_path, f'{axes}, count={count}', f's{count}.py')) for count in (3, 8)
  )
  assert many[:3] == few and len({str(point) for point in many}) == 8
  for point in many:
    assert 1e-5 <= point[RATE] <= 1e-3 and point['stages.grpo.minibatches'] in (1, 2, 3, 4)


def test_the_shipped_sweeps_are_valid():
  names = sorted(path.stem for path in (ROOT / 'configs' / 'sweeps').glob('*.py'))
  assert 'quickstart_lr' in names
  plans = {name: load_plan(name, {}) for name in names}
  trials = plans['quickstart_lr'].trials
  assert len(trials) == 6 and {trial.seed for trial in trials} == {1, 2}


def test_ids_are_names_of_directories_that_say_what_differs(tmp_path):
  fields = f"trials=[{{'{RATE}': 5e-4, 'seed': 2}}, {{'name': '../../x y/{'z' * 90}'}}]"
  plain, hostile = load_plan(str(sweep_file(tmp_path, fields)), {}).trials
  assert trial_id(7, plain) == '007-peak_lr-0.0005-seed-2'
  assert trial_id(8, hostile).startswith('008-name-..') and '/' not in trial_id(8, hostile)
  assert len(trial_id(8, hostile)) < 60
  assert describe(plain.overrides) == 'peak_lr 0.0005, seed 2'


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ("axes={'stages.grpo.optimizer.peek_lr': (1,)}", "axis .*peek_lr.*did you mean 'peak_lr'"),
    (f"axes={{'{RATE}': ('fast',)}}", "peak_lr: got 'fast', wanted a number"),
    (f"axes={{'{RATE}': 1e-3}}", 'wanted values such as'),
    (f"axes={{'{RATE}': ()}}", 'wanted values such as'),
    (f"axes={{'{RATE}': (1e-3, 1e-3)}}", 'repeats a value'),
    (f"axes={{'{RATE}': (float('nan'),)}}", 'wanted text, a finite number'),
    (f"axes={{'{RATE}': Uniform(low=0.1, high=1)}}", "is Uniform; wanted values"),
    (f"axes={{'{RATE}': Uniform(low=2, high=1)}}", 'wanted low at most high'),
    (f"axes={{'{RATE}': Uniform(low=0, high=1, log=True)}}", 'wanted low above 0'),
    ("axes={'seed': (1, 2)}, seeds=(1, 2)", 'seeds is set'),
    (f"{ONE}, seeds=(1, 1)", 'repeats a seed'),
    ('', 'wanted either axes or trials'),
    ('trials=[]', 'trials is empty'),
    ("trials=[{'seed': 1}, {'seed': 1}]", r'trials\[1\] repeats trials\[0\]'),
    ('trials=({"seed": 1 // i} for i in (1, 0))', 'the generator raised ZeroDivisionError'),
    ('trials=[3]', r'trials\[0\]: 3, wanted a mapping'),
    ("trials=({'seed': i} for i in __import__('itertools').count())", 'at most 10,000'),
    (f"{ONE}, search='rando'", "wanted one of grid, random, tpe"),
    (f"{ONE}, count=3", "wanted a count for 'random' and 'tpe'"),
    (f"{ONE}, direction='up'", 'wanted one of maximize, minimize'),
    (f"{ONE}, early_stopping='median'", 'wanted MedianRule'),
    (f"{ONE}, early_stopping=SuccessiveHalving(first_step=0)", 'at least 1'),
    (f"{ONE}, overrides={{'stages.gpro.steps': 1}}", "override 'stages.gpro.steps'"),
    (f"{ONE}, start=BaseRun(base='quickstart', overrides={{'sed': 1}})", "did you mean 'seed'"),
    (f"{ONE}, overrides={{'archive.location': '/tmp/archive'}}", 'belongs to one run'),
  ],
)  # fmt: skip
def test_a_bad_sweep_is_one_line_with_the_place(tmp_path, fields, message):
  file = sweep_file(tmp_path, fields)
  with pytest.raises(UserError, match=message) as error:
    load_plan(str(file), {})
  assert str(file) in str(error.value) and '\n' not in str(error.value)
  assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('import nothing_at_all', 'sweep.py:1: ModuleNotFoundError'),
    ('get_sweep = 3', 'defines no function get_sweep'),
    ('def get_sweep():\n  return {}', 'returned a dict, wanted a Sweep'),
    ('def get_sweep(:', r'sweep\.py:1'),
  ],
)
def test_a_file_without_a_sweep_is_one_line(tmp_path, text, message):
  (tmp_path / 'sweep.py').write_text(text)
  with pytest.raises(UserError, match=message):
    load_plan(str(tmp_path / 'sweep.py'), {})


def test_a_missing_file_or_name_gets_a_hint(tmp_path):
  with pytest.raises(
    UserError, match=r"--sweep=quickstart_lrr: no such shipped sweep; did you mean 'quick"
  ):
    load_plan('quickstart_lrr', {})
  with pytest.raises(UserError, match='no such sweep file'):
    load_plan(str(tmp_path / 'nothing.py'), {})


def test_an_override_of_an_axis_is_refused(tmp_path):
  file = sweep_file(tmp_path, f"axes={{'{RATE}': (1.0,)}}")
  with pytest.raises(UserError, match=f'--config.{RATE}: is an axis of'):
    load_plan(str(file), {RATE: '3'})
  assert load_plan(str(file), {'name': 'x'}).base.name == 'x'
