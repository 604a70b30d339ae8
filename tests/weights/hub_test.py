"""`jaxrl convert --push_to_hub` uploads the whole directory in one commit, to a server that speaks
the hub's HTTP API; what hinders it is one line.
"""

import base64
import http.server
import json
import os
import re
import subprocess
import sys
import threading

import pytest
from parameters import random_params
from paths import ROOT

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.models.families import tiny
from jaxrl_llm.weights import hf
from jaxrl_llm.weights.hub import check_repository


class Hub(http.server.BaseHTTPRequestHandler):
  """As much of the hub's API as an upload calls; large files go to its LFS endpoint."""

  protocol_version = 'HTTP/1.1'

  def do_POST(self):
    body = self.rfile.read(int(self.headers['Content-Length']))
    token = self.headers.get('Authorization')
    self.server.seen.append((self.path, token))
    if refused := re.fullmatch(r'Bearer hf_(\d+)', token):
      self.answer({'error': 'refused'}, int(refused[1]))
    elif self.path == '/api/repos/create':
      self.server.created = json.loads(body)
      self.answer({'url': f'{self.server.address}/someone/spelling'})
    elif self.path == '/api/validate-yaml':
      self.answer({'errors': [], 'warnings': []})
    elif '/preupload/' in self.path:
      self.answer({'files': [self.mode(file) for file in json.loads(body)['files']]})
    elif self.path.endswith('/info/lfs/objects/batch'):
      objects = [self.action(entry) for entry in json.loads(body)['objects']]
      self.answer({'transfer': 'basic', 'objects': objects})
    elif '/commit/' in self.path:
      self.server.commits.append([json.loads(line) for line in body.splitlines()])
      address = f'{self.server.address}/someone/spelling/commit/{"a" * 40}'
      self.answer({'success': True, 'commitOid': 'a' * 40, 'commitUrl': address})
    else:
      self.answer({'error': 'unknown'}, 404)

  def do_PUT(self):
    data = self.rfile.read(int(self.headers['Content-Length']))
    self.server.large[self.path.rpartition('/')[2]] = data
    self.answer({})

  def mode(self, file):
    large = file['path'].endswith('.safetensors')
    return {**file, 'uploadMode': 'lfs' if large else 'regular', 'shouldIgnore': False}

  def action(self, entry):
    href = f'{self.server.address}/large/{entry["oid"]}'
    return {**entry, 'actions': {'upload': {'href': href}}}

  def answer(self, value, status=200):
    data = json.dumps(value).encode()
    self.send_response(status)
    self.send_header('Content-Type', 'application/json')
    self.send_header('Content-Length', str(len(data)))
    self.end_headers()
    self.wfile.write(data)

  def log_message(self, *_):
    pass


@pytest.fixture
def hub():
  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Hub)
  server.address = f'http://127.0.0.1:{server.server_port}'
  server.seen, server.commits, server.large = [], [], {}
  threading.Thread(target=server.serve_forever, daemon=True).start()
  yield server
  server.shutdown()


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  """A model without a tokenizer."""
  directory, spec = tmp_path_factory.mktemp('hub') / 'model', tiny('llama', 50)
  params = random_params(spec)
  hf.export(directory, params, spec, tokenizer_dir=None, eos_ids=(1,), pad_id=0)
  return directory


def run(*arguments, folder, **environment):
  clean = {k: v for k, v in os.environ.items() if not k.startswith(('HF_', 'HUGGING'))}
  own = {'HF_HOME': str(folder / 'cache'), 'HF_HUB_DISABLE_XET': '1', 'JAX_PLATFORMS': 'cpu'}
  return subprocess.run(
    [sys.executable, *arguments],
    cwd=ROOT,
    env=clean | own | environment,
    capture_output=True,
    text=True,
    timeout=240,
  )


@pytest.mark.full
def test_the_whole_directory_is_uploaded_in_one_commit(hub, model, tmp_path):
  target = tmp_path / 'target'
  flags = ('--push_to_hub=someone/spelling', '--hub_private')
  done = run(
    *('launch/convert.py', f'--source={model}', f'--target={target}', *flags),
    folder=tmp_path,
    HF_ENDPOINT=hub.address,
    HF_TOKEN='hf_mine',
  )
  assert done.returncode == 0, done.stderr
  assert f'uploaded: {hub.address}/someone/spelling' in done.stdout
  assert hub.created['name'] == 'spelling' and hub.created['organization'] == 'someone'
  assert hub.created.get('private') is True or hub.created.get('visibility') == 'private'
  (commit,) = hub.commits
  files = {entry['value']['path']: entry['value'] for entry in commit if entry['key'] == 'file'}
  large = {entry['value']['path']: entry['value'] for entry in commit if entry['key'] == 'lfsFile'}
  assert {*files, *large} == {path.name for path in target.iterdir()}
  for name, value in files.items():
    assert base64.b64decode(value['content']) == (target / name).read_bytes()
  for name, value in large.items():
    assert hub.large[value['oid']] == (target / name).read_bytes()
  assert 'model.safetensors' in large and 'README.md' in files
  assert {token for _, token in hub.seen} == {'Bearer hf_mine'}


PUSH = """
import os, pathlib, sys
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.weights import hub
for token in sys.argv[2:]:
  os.environ['HF_TOKEN'] = token
  try:
    hub.check_repository('someone/spelling')
    hub.push(pathlib.Path(sys.argv[1]), 'someone/spelling', private=False)
  except UserError as error:
    print(error)
"""


@pytest.mark.full
@pytest.mark.parametrize(
  ('environment', 'messages'),
  [
    ({'HF_ENDPOINT': 'http://127.0.0.1:9'}, {'hf_mine': 'the hub cannot be reached .*complete'}),
    ({'HF_HUB_OFFLINE': '1'}, {'hf_mine': 'the hub cannot be reached'}),
    (
      {},
      {
        '': r'no token; run `hf auth login`, or set HF_TOKEN',
        'hf_401': 'the hub does not know the token',
        'hf_403': 'the token has no right to write to this repository',
        'hf_413': 'the hub answered 413',
      },
    ),
  ],
  ids=['unreachable', 'offline', 'refused'],
)
def test_what_hinders_an_upload_is_one_line(hub, model, tmp_path, environment, messages):
  environment = {'HF_ENDPOINT': hub.address, **environment}
  done = run('-c', PUSH, str(model), *messages, folder=tmp_path, **environment)
  for line, message in zip(done.stdout.splitlines(), messages.values(), strict=True):
    assert re.match(f'--push_to_hub=someone/spelling: .*{message}', line)
  assert not any(token and token in done.stdout + done.stderr for token in messages)
  assert not hub.commits


@pytest.mark.parametrize('name', ['no id', 'a/b/c', '-x/y', 'a/b..c'])
def test_a_name_that_is_no_repository_is_refused_before_anything_is_read(name):
  with pytest.raises(UserError, match=r'not a repository id .*; wanted USER/NAME'):
    check_repository(name)
