"""Which servers explorers may fetch completions from, and with which tokens."""

import pytest

from jaxrl_llm.app.composition.rollouts import _check_tokens, _with_ca_file
from jaxrl_llm.app.rollout_config import RolloutConfig
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.token_server import FrontConfig
from jaxrl_llm.rollout.explorers.crew import ExplorersConfig
from jaxrl_llm.rollout.vllm.config import VllmConfig

FRONT = 'http://127.0.0.1:1'


def config(explorers=None, **vllm):
  return RolloutConfig(
    engine='vllm',
    max_prompt_length=4,
    max_response_length=4,
    vllm=VllmConfig(**vllm),
    explorers=ExplorersConfig(direct=True, **explorers or {}),
  )


@pytest.mark.parametrize(
  ('vllm', 'explorers', 'words'),
  [
    ({}, {}, 'no servers whose fronts sign'),
    ({'addresses': ('unix:/a',), 'key_file': 'k'}, {}, 'unix:/a'),
    ({'addresses': (FRONT,)}, {}, 'servers without a token'),
    ({'discover': 1}, {'listen': FrontConfig()}, 'key of the registry'),
    ({'discover': 1, 'key_file': 'k'}, {'listen': FrontConfig()}, 'key of the registry'),
  ],
)
def test_explorers_fetch_only_what_they_cannot_sign(vllm, explorers, words):
  with pytest.raises(UserError, match=words) as caught:
    config(explorers, **vllm)
  assert '\n' not in str(caught.value) and 'rollout.explorers.direct: True' in str(caught.value)


@pytest.mark.parametrize('limits', [{'tickets': 0}, {'ticket_s': 14.0}, {'ticket_s': 61.0}])
def test_limits_of_tickets_have_bounds(limits):
  """A front signs every 5 s that it is at work, and keeps an answer for two minutes."""
  with pytest.raises(UserError, match=r'^rollout.explorers: tickets [^\n]*15 to 60'):
    ExplorersConfig(**limits)
  ExplorersConfig(tickets=1, ticket_s=15.0)


def test_the_tokens_of_explorers_and_servers_differ(tmp_path):
  for name, text in (
    ('a', 'token-0123456789'),
    ('b', 'token-0123456789'),
    ('c', 'other-0123456789'),
  ):
    (tmp_path / name).write_text(f'{text}\n')
  listen = {'listen': FrontConfig(token_file=str(tmp_path / 'a'))}
  for name in ('a', 'b'):
    rollout = config(listen, addresses=(FRONT,), key_file=str(tmp_path / name))
    with pytest.raises(UserError, match='give explorers another token'):
      _check_tokens(rollout.explorers, rollout.vllm, None)
  rollout = config(listen, addresses=(FRONT,), key_file=str(tmp_path / 'c'))
  _check_tokens(rollout.explorers, rollout.vllm, None)
  rollout = config(addresses=(FRONT,), key_file=str(tmp_path / 'a'))
  _check_tokens(rollout.explorers, rollout.vllm, None)


def test_local_explorers_verify_fronts_with_the_certificates_of_the_run():
  def command(master, name):
    return [master, name]

  https = {'addresses': ('https://127.0.0.1:1',), 'key_file': 'k'}
  assert _with_ca_file(command, config(**https))('m', 'n') == ['m', 'n']
  with_file = _with_ca_file(command, config(**https, ca_file='ca.pem'))
  assert with_file('m', 'n') == ['m', 'n', '--ca_file=ca.pem']
