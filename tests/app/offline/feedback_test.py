"""Human feedback: what is exported, how comparisons become verdicts and pairs, and agreement."""

import dataclasses
import json
import time

import numpy as np
import pytest
from stored import issues, make_sample

from jaxrl_llm.app.offline import feedback
from jaxrl_llm.app.offline.agreement import krippendorff_alpha
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import Role
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.replay.awaited import Awaited
from jaxrl_llm.replay.inbox import given
from jaxrl_llm.replay.index import open_store
from jaxrl_llm.tasks.preferences import PreferencesConfig, load_preferences

UIDS = ('g/0', 'g/1', 'g/2')


@pytest.fixture
def directory(tmp_path):
  """The store of a run in which a group of three samples waits."""
  store = open_store(tmp_path / 'run' / 'replay')
  task = Task(
    taskset='t', domain='d', prompt=({'role': 'user', 'content': 'Why?'},), truth=None, fields={}
  )
  store.at(0).offer([task])
  rows = [row.__class__(**{**vars(row), 'task_id': task.uid}) for row in issues(UIDS)]
  store.at(0).issue(rows)
  samples = [make_sample(uid) for uid in UIDS]
  store.at(0).append([s.__class__(**{**vars(s), 'task_id': task.uid}) for s in samples])
  awaited = Awaited(
    scorers={'human': 2}, since=time.time(), until=time.time() + 3600, newest_version=0
  )
  store.at(0).wait_for_rewards({uid: f'Because {uid}.' for uid in UIDS}, awaited)
  store.close()
  return tmp_path / 'run' / 'replay'


def imported(directory, *rows):
  file = directory.parent / 'verdicts.jsonl'
  file.write_text('\n'.join(map(json.dumps, rows)))
  return feedback.import_file(directory, file)


def compared(chosen, rejected, who='ann', **fields):
  return {'chosen': f'g/{chosen}', 'rejected': f'g/{rejected}', 'who': who, **fields}


def test_groups_are_exported_with_prompt_and_answers(directory, tmp_path):
  assert feedback.export_groups(directory, tmp_path / 'groups.jsonl', None) == 1
  (row,) = map(json.loads, (tmp_path / 'groups.jsonl').read_text().splitlines())
  assert row['prompt'] == [{'role': 'user', 'content': 'Why?'}]
  assert row['samples'] == [{'uid': uid, 'text': f'Because {uid}.'} for uid in UIDS]
  assert (row['name'], row['scorers'], row['attempt']) == ('g', {'human': 2}, 1)


def test_an_episode_is_exported_with_all_its_turns(directory, tmp_path, tokenizer):
  """Two turns of h/1, with an observation between them; the prompt is not the task's. h/0 has one
  turn.
  """
  tokenizer.save(directory.parent / 'tokenizer')
  store = open_store(directory)
  store.recover(1)
  uids = ('h/0', 'h/1')
  role = np.array([Role.PROMPT] * 4 + [Role.POLICY] * 3 + [Role.TOOL] * 2 + [Role.POLICY] * 3)
  drawn = role == Role.POLICY
  single, several = (make_sample(uid) for uid in uids)
  text = 'abbadabcedab'
  several = dataclasses.replace(
    several,
    tokens=np.array(tokenizer.encode(text), np.int32),
    role=role.astype(np.uint8),
    loss_mask=drawn,
    sampled=drawn,
    behaviour_logprobs=np.zeros(12, np.float32),
  )
  store.at(1).issue(issues(uids))
  store.at(1).append([single, several])
  awaited = Awaited(scorers={'human': 1}, since=0.0, until=4e9, newest_version=0)
  store.at(1).wait_for_rewards({'h/0': 'answer', 'h/1': 'dab'}, awaited)
  store.close()
  assert feedback.export_groups(directory, tmp_path / 'groups.jsonl', None) == 2
  _, row = map(json.loads, (tmp_path / 'groups.jsonl').read_text().splitlines())
  assert row['samples'] == [
    {'uid': 'h/0', 'text': 'answer'},
    {
      'uid': 'h/1',
      'text': 'dab',
      'turns': [
        {'role': 'prompt', 'content': 'abba'},
        {'role': 'assistant', 'content': 'dab'},
        {'role': 'tool', 'content': 'ce'},
        {'role': 'assistant', 'content': 'dab'},
      ],
    },
  ]


def test_lines_that_cannot_be_used_leave_the_verdicts_of_others(directory):
  """A line that is too long, and a correction for a run that trains on no expert rows."""
  long = {'uid': 'g/0', 'value': 1, 'who': 'a' * feedback.MAX_LINE}
  correction = {'uid': 'g/0', 'correction': 'Since.', 'who': 'ann'}
  verdicts = [{'uid': uid, 'value': 1, 'who': 'ann'} for uid in UIDS[:2]]
  result = imported(directory, verdicts[0], long, correction, verdicts[1])
  assert (result.attached, result.corrections, len(result.refused)) == (2, 0, 2)
  assert 'verdicts.jsonl:2: the line is longer than' in result.refused[0]
  assert 'verdicts.jsonl:3: ' in result.refused[1]
  assert [verdict.uid for verdict in given(directory)] == [*UIDS[:2]]


def test_a_comparison_becomes_the_share_of_comparisons_won(directory):
  """g/0 wins both of its comparisons, g/1 loses one and ties one, g/2 loses one and ties one."""
  result = imported(directory, compared(0, 1), compared(1, 2, tie=True), compared(0, 2))
  assert (result.attached, result.pairs, result.refused) == (3, 3, [])
  assert {v.uid: v.value for v in given(directory)} == {'g/0': 1.0, 'g/1': 0.25, 'g/2': 0.25}


@pytest.mark.parametrize(
  ('row', 'message'),
  [
    (compared(0, 0), 'chosen and rejected are both g/0'),
    ({**compared(0, 1), 'rejected': 'h/1'}, 'samples of different groups'),
    (compared(0, 1, tie=1), 'tie is 1, wanted true or false'),
    (compared(0, 1, who=''), "who is ''"),
    (compared(0, 1, comment='x'), "unknown field 'comment'"),
    ({'chosen': 'g/0', 'who': 'ann'}, 'rejected is missing'),
    ({**compared(0, 1), 'chosen': 5}, 'uid: got 5'),
  ],
)
def test_malformed_comparisons_are_refused_and_others_are_attached(directory, row, message):
  result = imported(directory, row, compared(1, 2))
  (line,) = result.refused
  assert message in line and line.startswith(f'{result.file}:1: ') and result.attached == 2


def test_verdicts_become_preference_pairs_that_a_stage_can_read(directory, tmp_path):
  imported(
    directory,
    *({'uid': uid, 'value': value, 'who': who} for uid, value, who in (
      ('g/0', 1, 'ann'), ('g/0', 0, 'bob'), ('g/1', 0, 'ann'), ('g/2', 0, 'ann'),
    )),
  )  # fmt: skip
  file = tmp_path / 'pairs.jsonl'
  assert feedback.export_pairs(directory, file) == (2, 0)
  preferences = load_preferences(PreferencesConfig(name='people', source=str(file)))
  assert [(pair.chosen, pair.rejected) for pair in preferences.pairs] == [
    ('Because g/0.', 'Because g/1.'),
    ('Because g/0.', 'Because g/2.'),
  ]
  assert preferences.pairs[0].task.prompt == ({'role': 'user', 'content': 'Why?'},)


def test_groups_with_a_sample_of_several_turns_become_no_pairs(directory, tmp_path):
  """The second of two samples has a second turn, and so its text is that of this turn."""
  store = open_store(directory)
  store.recover(1)
  uids = ('h/0', 'h/1')
  samples = [make_sample(uid) for uid in uids]
  samples[1] = dataclasses.replace(samples[1], loss_mask=np.arange(12) % 6 >= 4)
  store.at(1).issue(issues(uids))
  store.at(1).append(samples)
  awaited = Awaited(scorers={'human': 1}, since=0.0, until=4e9, newest_version=0)
  store.at(1).wait_for_rewards(dict.fromkeys(uids, 'last turn'), awaited)
  store.close()
  imported(directory, compared(0, 1), {'chosen': 'h/0', 'rejected': 'h/1', 'who': 'ann'})
  made = feedback.export_pairs(directory, tmp_path / 'pairs.jsonl')
  assert made == (1, 1) and made.lines[0].startswith('1 groups left out')
  (row,) = map(json.loads, (tmp_path / 'pairs.jsonl').read_text().splitlines())
  assert row['group'] == 'g'


def test_a_page_for_groups_that_wait_for_several_scorers_is_one_line(directory, tmp_path):
  store = open_store(directory)
  store.recover(1)
  store.at(1).issue(issues(['h/0']))
  store.at(1).append([make_sample('h/0')])
  awaited = Awaited(scorers={'ann': 1, 'bob': 1}, since=0.0, until=4e9, newest_version=0)
  store.at(1).wait_for_rewards({'h/0': 'answer'}, awaited)
  store.close()
  assert feedback.export_groups(directory, tmp_path / 'groups.jsonl', None) == 2
  with pytest.raises(UserError, match=r'1 groups wait for several scorers, .*: h; use --export'):
    feedback.export_groups(directory, None, tmp_path / 'page.html')


def test_the_agreement_of_all_people_is_reported_at_import(directory):
  result = imported(
    directory,
    *({'uid': uid, 'value': value, 'who': who} for who, values in (
      ('ann', (1, 0, 1)), ('bob', (1, 0, 0)),
    ) for uid, value in zip(UIDS, values)),
  )  # fmt: skip
  # Values 1 1 | 0 0 | 1 0. D_o: the third sample has 2 ordered pairs of difference 1: 2 / 6. D_e:
  # 3 ones and 3 zeros have 18 such pairs of 30. Alpha = 1 - (1/3) / (18/30) = 4/9.
  agreement = result.agreement['human']
  assert agreement.alpha == pytest.approx(4 / 9)
  assert (agreement.samples, agreement.people) == (3, 2)
  assert result.lines[-1] == (
    "human: Krippendorff's alpha 0.444, over 3 samples judged by two or more of 2 people"
  )


def test_alpha_equals_krippendorffs_published_example():
  """The example of "Computing Krippendorff's Alpha-Reliability" (2011), section C: four observers,
  twelve units, interval alpha 0.849.
  """
  nothing = None
  observers = [
    [1, 2, 3, 3, 2, 1, 4, 1, 2, nothing, nothing, nothing],
    [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, nothing, 3],
    [nothing, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, nothing],
    [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, nothing],
  ]
  units = [[v for v in unit if v is not nothing] for unit in zip(*observers)]
  assert krippendorff_alpha(units) == pytest.approx(0.849, abs=5e-4)


def test_alpha_of_perfect_agreement_is_1_and_undefined_without_differences_or_pairs():
  assert krippendorff_alpha([[1, 1], [0, 0, 0]]) == 1.0
  assert krippendorff_alpha([[1, 1], [1, 1]]) is None
  assert krippendorff_alpha([[1], [0]]) is None
  assert krippendorff_alpha([[1, 0], [0, 1]]) < 0
