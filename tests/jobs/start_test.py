"""Scripts of docs/start, as newcomers run them: DPO and LoRA with few steps in full, all whole in
acceptance. (chat_sft.py: chat_sft_test.py.)
"""

import json
import re

import job
import pytest
from paths import ROOT

from jaxrl_llm.runtime import history

pytestmark = pytest.mark.full


def answers(printed: str) -> list[tuple[str, str, str]]:
  """The two letters of each question at the end of a script's output, and the answer."""
  return re.findall(r'^First: (\w) or (\w)\? (\S*)$', printed, re.MULTILINE)


def right(printed: str) -> int:
  found = answers(printed)
  assert len(found) == 4, printed
  return sum(answer == min(letters) for *letters, answer in found)


def random_checkpoint(folder):
  """A folder with a checkpoint, which scripts then do not make: a qwen2 of random weights."""
  job.copy(job.chat_sft_run() / 'checkpoint', folder / 'checkpoint')
  return folder


def test_dpo_is_the_same_on_all_three_forms_of_rows(tmp_path):
  changes = ('stages.dpo.steps=4', 'stages.dpo.evaluate_every=2')
  job.start_script('dpo', random_checkpoint(tmp_path), *changes)
  texts, *others = (tmp_path / name for name in ('texts', 'explicit_prompt', 'implicit_prompt'))
  for other in others:
    job.assert_equal_runs(other, texts)
  assert 'rewards/margins' in job.rows(texts)[-1]


def test_adapters_are_exported_both_ways(tmp_path):
  changes = ('stages.sft.steps=4', 'stages.sft.evaluate_every=2')
  printed = job.start_script('lora', random_checkpoint(tmp_path), *changes)
  assert len(answers(printed)) == 4
  assert {file.name for file in (tmp_path / 'run' / 'adapter').iterdir()} >= {
    'adapter_config.json',
    'adapter_model.safetensors',
  }
  assert f'{tmp_path}/run/adapter: ' in printed


@pytest.mark.acceptance
def test_grpo_is_rewarded_by_the_function_in_the_script(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(ROOT / 'docs' / 'start')
  from grpo import compute_score

  changes = ('stages.grpo.steps=4', 'stages.grpo.evaluate_every=2', 'checkpoint.every_steps=2')
  printed = job.start_script('grpo', tmp_path, *changes)
  assert len(answers(printed)) == 4
  assert re.findall(r'^step (\d), test: .*pass@2', printed, re.MULTILINE) == ['2', '4']
  lines = [
    json.loads(line)
    for file in sorted((tmp_path / 'run' / 'rollouts' / 'grpo').glob('*.jsonl'))
    for line in file.read_text().splitlines()
  ]
  assert len(lines) == 4 * 16 * 8 and len({line['reward'] for line in lines}) == 3
  for line in lines:
    letters = re.findall(r'\b[a-z]\b', line['prompt'])
    wanted = compute_score('', line['completion'], min(letters), {'letters': letters})
    assert line['reward'] == wanted


@pytest.mark.acceptance
@pytest.mark.parametrize(('script', 'suite'), [('grpo', 'test'), ('ppo', 'eval')])
def test_the_policy_learns_from_rewards(tmp_path, script, suite):
  job.start_script(script, tmp_path)
  measured = [accuracy for *_, accuracy in job.accuracies(tmp_path / 'run', suite)]
  assert measured[-1] > measured[0] + 0.15, measured
  assert (tmp_path / 'run' / 'critic').exists() == (script == 'ppo')


@pytest.mark.acceptance
def test_dpo_prefers_chosen_answers(tmp_path):
  printed = job.start_script('dpo', tmp_path)
  won = re.findall(r'^\w+: share of .*: ([\d.]+)$', printed, re.MULTILINE)
  assert len(won) == 3 and len(set(won)) == 1 and float(won[0]) > 0.8
  assert right(printed) >= 3


@pytest.mark.acceptance
def test_adapters_learn(tmp_path):
  assert right(job.start_script('lora', tmp_path)) >= 3


@pytest.mark.acceptance
def test_an_interrupted_run_is_branched_and_resumed_with_other_values(tmp_path):
  job.start_script('resume_and_branch', tmp_path)
  resumed, branch = (history.read(tmp_path / name) for name in ('run', 'branch'))
  rates = 'stages.sft.optimizer.peak_lr'
  assert {change.key for change in resumed[-1].changes} == {rates, 'stages.sft.steps'}
  assert {change.key for change in branch[-1].changes} == {rates}
  assert resumed[-1].step >= 11 and branch[-1].step == 11
  assert branch[-1].parent.reset == ('optimizer',)
  assert [job.commits(tmp_path / name)[-1] for name in ('run', 'branch')] == [60, 40]


@pytest.mark.acceptance
def test_answers_of_two_turns_get_better(tmp_path):
  printed = job.start_script('two_turns', tmp_path)
  first, last = re.findall(
    r'^step \d+: ([\d.]+) turns, mean reward ([\d.]+)$', printed, re.MULTILINE
  )
  assert float(first[0]) > float(last[0]) > 1 and float(last[1]) > float(first[1]) + 0.2
