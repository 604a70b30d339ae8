"""Environments of Gymnasium and TextWorld, played by scripted policies."""

import asyncio
import dataclasses
import functools

import pytest
from scripted import TASK, Scripted

from jaxrl_llm.app.composition.workflows import build_workflow
from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.records.sample import Role
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.contract import checked_run
from jaxrl_llm.rollout.workflow import WorkflowConfig
from jaxrl_llm.tasks.tokenizer import build_character_tokenizer

FOUND = 'gymnasium:FrozenLake-v1'
LAKE = {
  'actions': ['left', 'down', 'right', 'up'],
  'make': {'render_mode': 'ansi', 'is_slippery': False, 'desc': ['SF', 'FG']},
  'invalid_reward': -0.5,
}


@pytest.fixture(scope='module')
def ascii_tokenizer(tmp_path_factory):
  letters = [''.join(map(chr, range(32, 127))) + '\n']
  return build_character_tokenizer(
    letters, tmp_path_factory.mktemp('ascii') / 'tokenizer', template='plain'
  )


def played(tokenizer, environment, *texts, task=TASK, **options):
  config = WorkflowConfig(
    kind='environment',
    options={'environment': environment, 'options': options, 'max_turns': 4},
  )
  workflow = build_workflow(config, Scripted(tokenizer, *texts), tokenizer, 9000)

  async def play():
    runs = checked_run(workflow, task, 0, stage='grpo', samples=1, sampling=Sampling())
    (rollout,) = [each async for each in runs]
    return rollout

  return asyncio.run(play())


def read(tokenizer, sample):
  """Messages that the policy read before and between its turns."""
  return tokenizer.decode(sample.tokens[sample.role != Role.POLICY].tolist())


def test_a_policy_crosses_the_frozen_lake_by_the_names_of_directions(ascii_tokenizer):
  pytest.importorskip('gymnasium')
  sample, _, verdict, *_ = played(ascii_tokenizer, FOUND, 'jump$', ' down$', 'right$', **LAKE)
  assert (verdict.value, verdict.turn_values) == (1.0, (-0.5, 0.0))
  texts = read(ascii_tokenizer, sample)
  assert texts.startswith(f'{TASK.prompt[-1]["content"]}\n\nSF\nFG\n')
  assert 'error: the actions are left, down, right, up' in texts and '(Down)\nSF\nFG' in texts


def test_without_names_the_actions_are_numbers(ascii_tokenizer):
  pytest.importorskip('gymnasium')
  options = {'make': LAKE['make']}
  sample, _, verdict, *_ = played(ascii_tokenizer, FOUND, '7$', '1$', '2$', **options)
  assert verdict.value == 1.0
  assert 'error: the actions are 0 to 3' in read(ascii_tokenizer, sample)


def test_the_samples_of_a_group_begin_in_the_same_state(ascii_tokenizer):
  pytest.importorskip('gymnasium')
  play = functools.partial(played, ascii_tokenizer, 'gymnasium:Blackjack-v1', '0$', actions=())
  hands = [read(ascii_tokenizer, play().sample) for _ in range(3)]
  assert len(set(hands)) == 1
  fields = [dataclasses.replace(TASK, fields={'seed': seed}) for seed in range(8)]
  assert len({read(ascii_tokenizer, play(task=task).sample) for task in fields}) > 1


@pytest.mark.parametrize(
  ('environment', 'options', 'line'),
  [
    ('gymnasium:NoSuch-v0', {}, "reset: NameNotFound: Environment `NoSuch` doesn't exist"),
    ('gymnasium:Pendulum-v1', {}, 'wanted a space Text or Discrete'),
    (FOUND, {'actions': ['a']}, r'got 1 names of actions, but its actions are Discrete\(4\)'),
  ],
)
def test_a_game_that_the_policy_cannot_play_ends_the_run_with_one_line(
  ascii_tokenizer, environment, options, line
):
  pytest.importorskip('gymnasium')
  with pytest.raises(RunError, match=line) as caught:
    played(ascii_tokenizer, environment, 'a$', **options)
  assert '\n' not in str(caught.value)


def test_a_missing_library_is_one_line(ascii_tokenizer, monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  with pytest.raises(UserError, match=r"needs textworld, which .* 'jaxrl_llm\[textworld\]'"):
    played(ascii_tokenizer, 'textworld:', 'look$')


@pytest.fixture(scope='module')
def apple(tmp_path_factory):
  """A game of two rooms: take the apple and go east."""
  textworld = pytest.importorskip('textworld')
  maker = textworld.GameMaker()
  kitchen, hall = maker.new_room('kitchen'), maker.new_room('hall')
  maker.connect(kitchen.east, hall.west)
  maker.set_player(kitchen)
  kitchen.add(maker.new(type='f', name='apple'))
  maker.quests = [maker.new_quest_using_commands(['take apple', 'go east'])]
  return maker.compile(str(tmp_path_factory.mktemp('game') / 'apple.z8'))


@pytest.mark.full
def test_a_policy_wins_a_game_of_textworld(ascii_tokenizer, apple):
  turns = ('dance$', 'take  apple$', 'go east$')
  task = dataclasses.replace(TASK, fields={'game': apple})
  for named in ({'environment': f'textworld:{apple}'}, {'environment': 'textworld:', 'task': task}):
    sample, _, verdict, *_ = played(ascii_tokenizer, named.pop('environment'), *turns, **named)
    assert (verdict.value, sum(verdict.turn_values)) == (1.0, 0.0)
    assert verdict.evidence == {'score': 1, 'won': True}
    texts = read(ascii_tokenizer, sample)
    assert '-= Kitchen =-' in texts and 'You pick up the apple' in texts and '\n>' not in texts
  looks = ['look$'] * 4
  sample, *_ = played(ascii_tokenizer, f'textworld:{apple}', *looks, commands=True)
  assert 'Commands: examine apple, go east' in read(ascii_tokenizer, sample)
