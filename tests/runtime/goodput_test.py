"""Every second belongs to one class, and the classes add up, worked by hand."""

import pytest

from jaxrl_llm.runtime.goodput import server_seconds, shares, trainer_seconds

PARTS = {
  'gen': 6.0, 'update_weights': 1.0, 'reward': 2.0, 'annotate': 2.0, 'load': 0.5, 'adv': 0.25,
  'train': 3.0, 'update_actor': 2.5, 'testing': 4.0, 'save_checkpoint': 1.0, 'step': 11.5,
}  # fmt: skip


def test_the_trainers_seconds_by_hand():
  def spent(**how):
    ledger = trainer_seconds(PARTS, 18.0, **{'samples_itself': True, 'is_repeated': False} | how)
    assert sum(ledger.values()) == 18.0
    return ledger

  rest = {'publish': 1.0, 'evaluate': 4.0, 'commit': 1.0, 'other': 2.0}
  assert spent() == {'generate': 3.0, 'wait': 2.0, 'load': 0.5, 'train': 4.5, **rest}
  assert spent(samples_itself=False) == {
    'generate': 0.0, 'wait': 5.0, 'load': 0.5, 'train': 4.5, **rest
  }  # fmt: skip
  assert spent(is_repeated=True) == {'recompute': 10.0, **rest}
  # At a bound above 0, the last scores may have arrived before the trainer waited for the batch.
  assert trainer_seconds(
    {'gen': 1.0, 'reward': 5.0}, 2.0, samples_itself=True, is_repeated=False
  ) == {'generate': 0.0, 'wait': 1.0, 'load': 0.0, 'train': 0.0} | dict.fromkeys(
    ('publish', 'evaluate', 'commit'), 0.0
  ) | {'other': 1.0}


@pytest.mark.parametrize(
  'idle_s, pause_s, evaluate_s, wanted',
  [
    (6.0, 1.0, 2.0, {'generate': 8.0, 'publish': 2.0, 'evaluate': 4.0, 'idle': 6.0}),
    (0.0, 0.0, 0.0, {'generate': 20.0, 'publish': 0.0, 'evaluate': 0.0, 'idle': 0.0}),
    (99.0, 4.0, 9.0, {'generate': 0.0, 'publish': 8.0, 'evaluate': 12.0, 'idle': 0.0}),
  ],
)
def test_the_seconds_of_two_servers_by_hand(idle_s, pause_s, evaluate_s, wanted):
  assert server_seconds(2, 10.0, idle_s=idle_s, pause_s=pause_s, evaluate_s=evaluate_s) == wanted


def test_shares_are_of_all_rows_and_the_largest_is_first():
  rows = [
    {'goodput/seconds/trainer/train': 1.0, 'goodput/seconds/trainer/wait': 5.0, 'x': 9.0},
    {'goodput/seconds/trainer/train': 2.0, 'goodput/seconds/trainer/wait': None},
    {'goodput/seconds/trainer/commit': 0.0},
  ]
  assert shares(rows, 'trainer') == {'wait': 5 / 8, 'train': 3 / 8}
  assert [*shares(rows, 'trainer')] == ['wait', 'train']
  assert shares(rows, 'servers') == {}
