"""Episodes of hand-made turns: what the policy writes, reads and is rewarded for, by token."""

import asyncio

import exploring
import numpy as np
import pytest
from paths import ROOT
from scripted import GROUP, TASK, Scripted

from jaxrl_llm.advantages.tokens import masked_gae, place_rewards
from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.records.sample import Finish, Role, encode
from jaxrl_llm.rewards.api import MAX_EVIDENCE, Verdict
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.contract import checked_run
from jaxrl_llm.rollout.episodes.episode import Episode, OutOfTokens
from jaxrl_llm.rollout.episodes.workflow import Episodes
from jaxrl_llm.rollout.explorers import wire
from jaxrl_llm.rollout.explorers.arrivals import read_verdict
from jaxrl_llm.rollout.recording import Place
from jaxrl_llm.rollout.workflow import SingleTurn
from jaxrl_llm.tasks.tokenizer import Tokenizer, build_bpe_tokenizer, build_character_tokenizer


@pytest.fixture(scope='module')
def chat(tmp_path_factory):
  return build_character_tokenizer(
    ['abcdefgh'], tmp_path_factory.mktemp('chat') / 'tokenizer', template='chatml'
  )


@pytest.fixture(scope='module')
def reasoning(tmp_path_factory):
  folder = tmp_path_factory.mktemp('reasoning')
  (folder / 'chat.jinja').write_text(REASONING)
  texts = ['abcdefgh<think></think>']
  built = build_character_tokenizer(texts, folder / 'tokenizer', template='chatml')
  return built.with_template(folder / 'chat.jinja')


def begun(tokenizer, *texts, max_tokens=64):
  hub = Scripted(tokenizer, *texts)
  place = Place(task=TASK, visit=0, group=GROUP, index=1)
  return hub, Episode(hub, tokenizer, place, sampling=Sampling(), max_tokens=max_tokens)


def three_turns(tokenizer):
  """Rollout of the turns 'ab', 'c' and 'de', with rewards after the first and the last."""
  hub, episode = begun(tokenizer, 'ab$', 'c', 'de$')

  async def play():
    episode.observe('gh')
    await episode.act()
    episode.reward(0.5)
    episode.observe('f')
    await episode.act(1)
    episode.observe('f')
    episode.observe('g')
    turn = await episode.act()
    episode.reward(1.0, {'why': 'right'})
    assert turn[:2] == ('de', Finish.STOP)
    return episode.end()

  return hub, asyncio.run(play())


def test_advantages_of_three_turns_pass_over_what_the_policy_only_read(tokenizer):
  """γ = 0.5 per token of the policy, λ = 1 and a critic of zeros; by hand."""
  _, (sample, _, verdict, *_) = three_turns(tokenizer)
  rewards = place_rewards(sample.loss_mask, verdict.value, verdict.turn_values)
  zeros = np.zeros(len(sample.tokens))
  found, _ = masked_gae(rewards, zeros, sample.loss_mask, gamma=0.5, lam=1.0)
  wanted = {2: 0.140625, 3: 0.28125, 4: 0.5 + 0.0625, 6: 0.125, 9: 0.25, 10: 0.5, 11: 1.0}
  assert {i: value for i, value in enumerate(found) if value} == wanted


def test_three_turns_are_one_sample_whose_parts_are_those_written_by_hand(tokenizer):
  hub, (sample, text, verdict, *_) = three_turns(tokenizer)
  eos = tokenizer.eos_id
  a, b, c, d, e, f, g, h = (tokenizer.encode(letter)[0] for letter in 'abcdefgh')
  assert sample.tokens.tolist() == [g, h, a, b, eos, f, c, f, g, d, e, eos]
  tool, policy = int(Role.TOOL), int(Role.POLICY)
  assert sample.role.tolist() == [0, 0, *[policy] * 3, tool, policy, tool, tool, *[policy] * 3]
  drawn = np.isin(np.arange(12), [2, 3, 4, 6, 9, 10, 11])
  np.testing.assert_array_equal(sample.sampled, drawn)
  np.testing.assert_array_equal(sample.loss_mask, drawn)
  assert sample.behaviour_logprobs.tolist() == [0, 0, -1, -2, -3, 0, -1, 0, 0, -1, -2, -3]
  spans = [(one.start, one.end, one.version.step) for one in sample.segments]
  assert spans == [(2, 5, 1), (6, 7, 2), (9, 12, 3)]
  assert (sample.uid, sample.prompt_len, sample.finish_reason) == (f'{GROUP}/1', 2, 'stop')
  assert text == 'de'
  assert verdict == Verdict(value=1.0, turn_values=(0.5, 0.0), evidence={'why': 'right'})
  assert [len(request.prompt) for request in hub.requests] == [2, 6, 9]
  assert [request.max_tokens for request in hub.requests] == [64, 1, 64 - 7]
  assert len({request.key for request in hub.requests}) == 3


def test_an_episode_of_one_turn_is_the_sample_of_the_built_in_workflow_bit_for_bit(tokenizer):
  class OneTurn(Episodes):
    async def play(self, episode):
      episode.observe(episode.task.prompt)
      await episode.act()

  async def samples(workflow):
    how = {'stage': 'grpo', 'samples': 3, 'sampling': Sampling(temperature=0.7)}
    return {one[0].uid: (encode(one[0]), one[1]) async for one in workflow.run(TASK, 2, **how)}

  async def check():
    engine = exploring.FakeEngine(tokenizer)
    built_in = await samples(SingleTurn(engine, tokenizer, max_tokens=4))
    assert await samples(OneTurn(engine, tokenizer, max_tokens=4)) == built_in
    assert len(built_in) == 3

  asyncio.run(check())


def test_messages_extend_the_tokens_by_what_the_chat_template_renders(chat):
  _, episode = begun(chat, 'ab$', 'c$')

  async def play():
    episode.observe([{'role': 'user', 'content': 'h'}])
    await episode.act()
    episode.observe([{'role': 'tool', 'content': 'g'}])
    await episode.act()
    return episode.end().sample

  sample = asyncio.run(play())
  said = [('user', 'h'), ('assistant', 'ab'), ('tool', 'g'), ('assistant', 'c')]
  messages = [{'role': role, 'content': content} for role, content in said]
  whole = chat.encode(chat.render_chat(messages, add_generation_prompt=False).text)
  # The template ends the last message with a line break, which nobody has read yet.
  assert sample.tokens.tolist() == whole[:-1]
  read = chat.decode(sample.tokens[sample.role == Role.TOOL].tolist(), skip_special=False)
  assert read == '\n<|im_start|>tool\ng<|im_end|>\n<|im_start|>assistant\n'


def test_a_turn_cut_by_its_limit_is_ended_as_the_template_ends_it(chat):
  _, episode = begun(chat, 'abc', 'd$')

  async def play():
    episode.observe([{'role': 'user', 'content': 'h'}])
    await episode.act(2)
    episode.observe([{'role': 'user', 'content': 'g'}])
    await episode.act()
    return episode.end().sample

  sample = asyncio.run(play())
  read = chat.decode(sample.tokens[sample.role == Role.TOOL].tolist(), skip_special=False)
  assert read.startswith('<|im_end|>\n<|im_start|>user\n')


REASONING = """
{%- set last = namespace(user=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\\n' -}}
  {%- if message.role == 'assistant' and loop.index0 > last.user -%}
    {{- '<think>\\n\\n</think>\\n\\n' -}}
  {%- endif -%}
  {{- message.content.split('</think>')[-1] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""Chat template that removes the reasoning of answers, and adds an empty one to those after the
last user, as Qwen3's does.
"""


@pytest.mark.parametrize(
  ('role', 'said', 'stop', 'end'),
  [
    ('user', '<think>b</think>a$', (), ''),
    ('tool', 'ab$', (), ''),
    ('user', '</think>a<', '<', '<|im_end|>'),
  ],
)
def test_a_template_that_treats_the_last_turn_otherwise_adds_only_what_was_observed(
  reasoning, role, said, stop, end
):
  _, episode = begun(reasoning, said, 'c$', max_tokens=128)

  async def play():
    episode.observe([{'role': 'user', 'content': 'h'}])
    await episode.act(stop=stop)
    episode.observe([{'role': role, 'content': 'g'}])
    await episode.act()
    return episode.end().sample

  sample = asyncio.run(play())
  read = reasoning.decode(sample.tokens[sample.role == Role.TOOL].tolist(), skip_special=False)
  assert read == f'{end}\n<|im_start|>{role}\ng<|im_end|>\n<|im_start|>assistant\n'


SMOLLM2 = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
"""Chat template of SmolLM2-135M-Instruct (Apache-2.0), which adds a system message."""


@pytest.fixture(
  scope='module', params=['template', pytest.param('model', marks=pytest.mark.acceptance)]
)
def smollm2(request, tmp_path_factory):
  """Tokenizer with SmolLM2's chat template: one of this test, or the model's."""
  if request.param == 'template':
    folder = tmp_path_factory.mktemp('smollm2')
    (folder / 'chat.jinja').write_text(SMOLLM2)
    built = build_bpe_tokenizer(['abc'], folder / 'tokenizer', vocab_size=300, template='chatml')
    return built.with_template(folder / 'chat.jinja')
  folder = ROOT / 'runs/models/smollm2'
  if not folder.exists():
    pytest.skip(f'{folder} is missing: docs/start/smollm2.md says how to prepare it')
  tokenizer = Tokenizer.from_directory(folder)
  assert tokenizer.template == SMOLLM2
  return tokenizer


@pytest.mark.parametrize('system', [[], [{'role': 'system', 'content': 'Be brief.'}]])
def test_the_turns_of_a_conversation_are_those_of_smollm2s_template(smollm2, system):
  # The third turn has a special token, which its message lacks, so the fourth extends the tokens
  # without rendering the third again.
  said = ['Fine, 12 + 3', 'ok$', 'a<|im_start|>b$', 'c$']
  user, tool = ({'role': role, 'content': f'I am {role}.'} for role in ('user', 'tool'))
  _, episode = begun(smollm2, *said, max_tokens=400)

  async def play():
    for observed in ([*system, user], [user], [tool], [tool]):
      episode.observe(observed)
      await episode.act()
    return episode.end().sample

  sample = asyncio.run(play())
  messages = [*system]
  for text, observed in zip(said, (user, user, tool, tool), strict=True):
    messages += [observed, {'role': 'assistant', 'content': text.removesuffix('$')}]
  whole = smollm2.render_chat(messages, add_generation_prompt=False).text.removesuffix('\n')
  assert smollm2.decode(sample.tokens.tolist(), skip_special=False) == whole
  assert sample.tokens.tolist() == smollm2.encode(whole)
  assert whole.count('<|im_start|>system') == 1 and ('SmolLM' in whole) == (not system)


def test_a_template_that_omits_earlier_turns_is_one_line(chat, tmp_path):
  (tmp_path / 'last.jinja').write_text('{{ messages[-1].content }}')
  _, episode = begun(chat.with_template(tmp_path / 'last.jinja'), 'ab$', 'c$')

  async def play():
    for _ in range(2):
      episode.observe([{'role': 'user', 'content': 'h'}])
      await episode.act()

  with pytest.raises(RunError, match='turn 2: the chat template omits the turn before') as caught:
    asyncio.run(play())
  assert '\n' not in str(caught.value)


def test_a_custom_stop_is_part_of_the_text_that_environments_and_scorers_see(tokenizer):
  _, episode = begun(tokenizer, 'abf')

  async def play():
    episode.observe('h')
    turn = await episode.act(stop=['f'])
    return turn, episode.end()

  turn, rollout = asyncio.run(play())
  assert turn[:2] == ('abf', Finish.STOP) and rollout.text == 'abf'
  assert rollout.turns == ({'role': 'assistant', 'content': 'abf'},)


def test_a_turn_that_found_no_room_has_observed_nothing(chat):
  """`act` with a budget of 0 tokens raises OutOfTokens; the next one reads each message once."""
  _, episode = begun(chat, 'ab$', 'c$')

  async def play():
    for content in ('h', 'g'):
      episode.observe([{'role': 'user', 'content': content}])
      with pytest.raises(OutOfTokens):
        await episode.act(0)
      await episode.act()
    return episode.end().sample

  sample = asyncio.run(play())
  whole = chat.decode(sample.tokens.tolist(), skip_special=False)
  assert [whole.count(f'user\n{content}<') for content in 'hg'] == [1, 1]


def test_an_episode_without_room_for_another_turn_ends_with_length(tokenizer):
  class TwoTurns(Episodes):
    async def play(self, episode):
      episode.observe('h')
      await episode.act()
      episode.reward(0.25)
      episode.observe('gg')
      await episode.act()
      episode.reward(1.0)

  async def check():
    workflow = TwoTurns(Scripted(tokenizer, 'ab$'), tokenizer, max_tokens=5)
    how = {'stage': 'grpo', 'samples': 1, 'sampling': Sampling()}
    ((sample, text, verdict, *_),) = [one async for one in workflow.run(TASK, 0, **how)]
    assert (sample.finish_reason, text) == ('length', 'ab')
    assert len(sample.tokens) == 4 and verdict == Verdict(value=0.25)

  asyncio.run(check())


def nested(levels):
  return [nested(levels - 1)] if levels else 0


def test_a_reward_at_the_limits_of_an_episode_is_one_that_the_master_takes_from_explorers(
  tokenizer,
):
  _, episode = begun(tokenizer, 'ab$')

  async def play():
    episode.observe('h')
    await episode.act()
    for i in range(256):
      episode.count(f'{i:01024}')
    episode.reward(1e6, {'log': 'x' * 64_000, 'at': nested(99)})
    return episode.end()

  sample, _, verdict, *_ = asyncio.run(play())
  assert read_verdict({'verdict': wire.verdict_row(verdict)}, [sample]) == verdict


def _twice(episode):
  episode.end()
  episode.end()


@pytest.mark.parametrize(
  ('wrong', 'line'),
  [
    (lambda e: e.act(), 'act() follows no observation; call observe() first'),
    (lambda e: e.reward(float('nan')), 'reward is nan, wanted a number from -1e+06 to 1e+06'),
    (
      lambda e: e.reward(1.0, {'at': {1}}),
      'the evidence of a reward is not JSON: Object of type set',
    ),
    (lambda e: e.reward(None), 'reward is None, wanted a number from -1e+06 to 1e+06'),
    (lambda e: [e.reward(1e6), e.reward(1.0)], 'has reward 1000001.0, wanted a number within'),
    (lambda e: e.reward(1.0, [1]), 'the evidence of a reward is a list, wanted a mapping'),
    (
      lambda e: e.reward(1.0, {'log': 'x' * 65536}),
      'the evidence of a reward has 65547 characters as JSON, wanted at most 65536',
    ),
    (lambda e: e.reward(1.0, {'at': nested(100)}), 'nested more than 100 levels'),
    (lambda e: [e.count(str(i)) for i in range(257)], 'a reward of 257 counts, wanted at most 256'),
    (lambda e: e.count('a\nb'), "has a count 'a\\nb', wanted a name of at most 1024 characters"),
    (lambda e: e.count('a', 'b'), "count 'a' is 'b', wanted a number from"),
    (lambda e: [e.observe(''), e.act()][1], 'the observation has no tokens, wanted at least one'),
    (_twice, 'end() follows end(); an episode ends once'),
    (lambda e: [e.observe('a'), e.act(stop=['ab'])][1], "stop 'ab' has 2 tokens, wanted one"),
    (
      lambda e: [e.observe('a'), e.observe(TASK.prompt), e.act()][2],
      'turn 2: observes messages together with or after raw text',
    ),
  ],
)
def test_a_mistake_in_a_workflow_is_one_line_that_names_the_episode(tokenizer, wrong, line):
  _, episode = begun(tokenizer, 'ab$', 'c$')

  async def play():
    episode.observe('h')
    await episode.act()
    result = wrong(episode)
    if asyncio.iscoroutine(result):
      await result

  with pytest.raises(RunError) as caught:
    asyncio.run(play())
  assert str(caught.value).startswith(f'rollout.workflow: episode {GROUP}/1: ')
  assert line in str(caught.value) and '\n' not in str(caught.value)


@pytest.mark.parametrize(
  ('wrong', 'line'),
  [
    (lambda e: e.end(), 'has no turn of the policy'),
    (lambda e: e.reward(1.0), 'reward() precedes the first act()'),
  ],
)
def test_an_episode_in_which_the_policy_did_not_act_is_one_line(tokenizer, wrong, line):
  _, episode = begun(tokenizer)
  with pytest.raises(RunError) as caught:
    wrong(episode)
  assert line in str(caught.value) and '\n' not in str(caught.value)


def split(tokenizer, *texts, **options):
  hub = Scripted(tokenizer, *texts)
  place = Place(task=TASK, visit=0, group=GROUP, index=1)
  how = {'max_tokens': 64, 'max_steps': 3, **options}
  return hub, Episode(hub, tokenizer, place, sampling=Sampling(), **how)


def test_a_restart_begins_a_step_whose_prompt_is_the_new_one_alone(tokenizer):
  hub, episode = split(tokenizer, 'ab$', 'c$', 'd', 'e$')

  async def play():
    episode.observe('gh')
    await episode.act()
    episode.reward(0.5)
    episode.restart('fgh')
    await episode.act()
    episode.observe('g')
    await episode.act(1)
    episode.reward(0.25)
    episode.restart('h')
    await episode.act()
    episode.reward(1.0)
    return episode.end()

  rollout = asyncio.run(play())
  eos = tokenizer.eos_id
  a, b, c, d, e, f, g, h = (tokenizer.encode(letter)[0] for letter in 'abcdefgh')
  assert [step.tokens.tolist() for step in rollout.steps] == [
    [g, h, a, b, eos],
    [f, g, h, c, eos, g, d],
    [h, e, eos],
  ]
  assert [step.uid for step in rollout.steps] == [f'{GROUP}/1', f'{GROUP}/1/1', f'{GROUP}/1/2']
  assert {step.trajectory_id for step in rollout.steps} == {f'{GROUP}/1'}
  assert [step.step_index for step in rollout.steps] == [0, 1, 2]
  assert [step.prompt_len for step in rollout.steps] == [2, 3, 1]
  assert [np.flatnonzero(step.loss_mask).tolist() for step in rollout.steps] == [
    [2, 3, 4],
    [3, 4, 6],
    [1, 2],
  ]
  assert [step.finish_reason for step in rollout.steps] == ['stop', 'length', 'stop']
  versions = [[one.version.step for one in step.segments] for step in rollout.steps]
  assert versions == [[1], [2, 3], [4]]
  # The turns of all steps are counted together, and each turn's reward is in its place.
  assert rollout.verdict == Verdict(value=1.0, turn_values=(0.5, 0.0, 0.25))
  assert rollout.text == 'e' and len({request.key for request in hub.requests}) == 4
  attempt = rollout.attempt(TASK)
  assert (attempt.uid, attempt.response_len) == (f'{GROUP}/1', 3 + 4 + 2)
  said = [(m['role'], m['content']) for m in attempt.transcript[len(TASK.prompt) :]]
  assert [(role, content.strip()) for role, content in said] == [
    ('assistant', 'ab'),
    ('tool', 'fgh'),
    ('assistant', 'c'),
    ('tool', 'g'),
    ('assistant', 'd'),
    ('tool', 'h'),
    ('assistant', 'e'),
  ]


@pytest.mark.parametrize('most', [1, 2])
def test_a_trajectory_ends_at_its_maximum_number_of_steps(tokenizer, most):
  class Restarting(Episodes):
    async def play(self, episode):
      for _ in range(5):
        episode.restart('gh')
        await episode.act()
        episode.reward(0.5)

  workflow = Restarting(Scripted(tokenizer, 'ab$', 'c$'), tokenizer, max_tokens=9)
  workflow.max_steps = most

  async def run():
    how = {'stage': 'grpo', 'samples': 1, 'sampling': Sampling(), 'max_steps': most}
    return [rollout async for rollout in checked_run(workflow, TASK, 0, **how)]

  (rollout,) = asyncio.run(run())
  assert len(rollout.steps) == most and rollout.text == ['ab', 'c'][most - 1]
  assert rollout.steps[-1].finish_reason == 'steps' and rollout.verdict.value == 0.5
  assert all(step.finish_reason == 'stop' for step in rollout.steps[:-1])


def test_no_step_is_longer_than_the_first_prompt_and_the_response_length_allow(tokenizer):
  _, episode = split(tokenizer, 'ab', 'cdefgh', 'a', max_tokens=4)

  async def play():
    episode.observe('gh')
    await episode.act(2)
    assert episode.room == 2
    episode.restart('abc')  # 3 + 3 tokens are the 2 + 4 of the first step.
    await episode.act()
    assert episode.room == 0
    episode.restart('abcdef')
    with pytest.raises(OutOfTokens):
      await episode.act()
    return episode.end(finish=Finish.LENGTH)

  assert [len(step.tokens) for step in asyncio.run(play()).steps] == [4, 6]


def conversation(*said):
  return [{'role': role, 'content': content} for role, content in said]


def test_a_conversation_that_extends_the_one_before_stays_in_its_step(chat):
  hub, episode = split(chat, 'ab$', 'c$', 'd$', 'e$')
  first = conversation(('user', 'h'))
  second = [*first, *conversation(('assistant', 'ab'), ('user', 'g'))]
  compacted = conversation(('user', 'f'), ('assistant', 'c'), ('user', 'g'))

  async def play():
    for messages in (first, second, compacted, compacted):
      episode.converse(messages)
      await episode.act()
    return episode.end()

  steps = asyncio.run(play()).steps
  # The third conversation is another one, and the fourth repeats the third instead of going on.
  assert [len(step.segments) for step in steps] == [2, 1, 1]
  assert hub.requests[1].prompt[: len(hub.requests[0].prompt)] == hub.requests[0].prompt
  whole = chat.encode(chat.render_chat(compacted, add_generation_prompt=True).text)
  assert list(hub.requests[2].prompt) == list(hub.requests[3].prompt) == whole
  assert steps[1].tokens[: steps[1].prompt_len].tolist() == whole


def test_other_tools_begin_a_step(chat):
  _, episode = split(chat, 'ab$', 'c$', 'd$')
  first = conversation(('user', 'h'))
  second = [*first, *conversation(('assistant', 'ab'), ('user', 'g'))]
  third = [*second, *conversation(('assistant', 'c'), ('user', 'g'))]
  tool = {'type': 'function', 'function': {'name': 'a', 'parameters': {}}}

  async def play():
    episode.converse(first, tools=[])
    await episode.act()
    episode.converse(second, tools=[tool])
    await episode.act()
    episode.converse(third, tools=[tool])
    await episode.act()
    return episode.end()

  assert [len(step.segments) for step in asyncio.run(play()).steps] == [1, 2]


@pytest.mark.parametrize(('history', 'steps'), [('keep', 1), ('template', 2)])
def test_a_template_that_rewrites_earlier_turns_begins_a_step_if_it_is_followed(
  reasoning, history, steps
):
  hub, episode = split(reasoning, '<think>a</think>b$', 'c$', history=history)

  async def play():
    episode.observe(conversation(('user', 'h')))
    await episode.act()
    episode.observe(conversation(('user', 'g')))
    await episode.act()
    return episode.end()

  rollout = asyncio.run(play())
  assert len(rollout.steps) == steps
  said = conversation(('user', 'h'), ('assistant', '<think>a</think>b'), ('user', 'g'))
  whole = reasoning.encode(reasoning.render_chat(said, add_generation_prompt=True).text)
  assert (list(hub.requests[1].prompt) == whole) == (history == 'template')


def test_a_failure_replaces_evidence_that_leaves_no_room_for_it(tokenizer):
  _, episode = begun(tokenizer, 'ab$')
  episode.observe('gh')
  asyncio.run(episode.act())
  episode.reward(1.0, {'log': 'a' * (MAX_EVIDENCE - 20)})
  episode.fail('the database is down')
  assert episode.end().verdict == Verdict(value=None, evidence={'error': 'the database is down'})
