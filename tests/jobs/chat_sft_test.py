"""The newcomer's script for chat SFT: every row is trained on, and its model calls the tools that
its rows call.
"""

import json

import pytest
from job import chat_sft_run, plans, rows, start_script

pytestmark = pytest.mark.full


@pytest.mark.acceptance
def test_the_trained_model_calls_the_tool_with_what_it_was_asked_for(tmp_path):
  said = [line for line in start_script('chat_sft', tmp_path).splitlines() if '<tool_call>' in line]
  asked = {line.split()[2].rstrip('?') for line in said}
  right = [line for line in said if f'"city": "{line.split()[2].rstrip("?")}"' in line]
  assert len(asked) == 6 and len(right) >= 5, said
  assert rows(tmp_path / 'run')[-1]['actor/sft_loss'] < 0.2


def test_the_loss_on_held_out_conversations_falls():
  run = chat_sft_run() / 'run'
  measured = [row['val-core/held_out/sft_loss'] for row in rows(run) if 'timing_s/testing' in row]
  assert len(measured) == 3
  assert measured[-1] < measured[0] < rows(run)[0]['actor/sft_loss']


def test_every_row_of_the_training_side_is_trained_on_once_an_epoch():
  """Rows with equal prompts among them: three of a question, with different answers."""
  run = chat_sft_run()
  lines = (run / 'chat.jsonl').read_text().splitlines()
  order = [row['uid'] for plan in plans(run / 'run', 'sft') for row in plan['rows']]
  epoch = len(set(order))
  assert sorted(order[:epoch]) == sorted(set(order)) and epoch < len(lines)
  trained = [json.loads(lines[int(uid.split(':')[1])])['messages'] for uid in set(order)]
  asked = [
    json.dumps([m for m in messages if m['role'] != 'assistant'][:1]) for messages in trained
  ]
  assert len(set(asked)) < len(asked)
