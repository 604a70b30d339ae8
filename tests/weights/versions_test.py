"""Exported versions: the newest complete one wins, and none that differs from its manifest is
taken.
"""

import json
import os

import pytest

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.types import Version
from jaxrl_llm.weights import versions


def add(folder, attempt, step, *, keep=3, content=b'weights', files=('model.safetensors',)):
  """Each file has an equal part of the content, and each byte stands for a tensor."""
  version = Version(attempt, step)
  unfinished = versions.begin(folder, version)
  for number, name in enumerate(files):
    (unfinished / name).write_bytes(content[number :: len(files)])
  weights = versions.ExportedWeights(
    tensors={f'tensor {i}': str(byte) for i, byte in enumerate(content)},
    files={name: versions.digest_of_file(unfinished / name) for name in files},
  )
  (unfinished / 'config.json').write_text('{}')
  return versions.complete(unfinished, version, weights, run='a run', keep=keep)


def test_the_newest_is_of_the_last_start_and_only_some_are_kept(tmp_path):
  assert versions.newer(tmp_path / 'none', None) == []
  for step in (0, 1, 2, 3):
    add(tmp_path, 1, step)
  assert [path.name for path in versions.newer(tmp_path, None)] == [
    f'{step:08d}-001' for step in (3, 2, 1)
  ]
  # A restarted run resumes from a commit at step 1.
  versions.withdraw_later(tmp_path, 1)
  assert [path.name for path in versions.newer(tmp_path, None)] == ['00000001-001']
  newest = add(tmp_path, 2, 1)
  assert versions.newer(tmp_path, Version(1, 3)) == [newest]
  assert versions.newer(tmp_path, Version(2, 1)) == []


def test_digests_tell_whether_the_same_weights_were_exported_again(tmp_path):
  first = versions.verified(add(tmp_path, 1, 4))
  assert versions.exported_digest(tmp_path, 4) == first.digest
  versions.withdraw_later(tmp_path, 3)
  assert versions.exported_digest(tmp_path, 4) is None
  assert versions.verified(add(tmp_path, 2, 4)).digest == first.digest
  versions.withdraw_later(tmp_path, 3)
  add(tmp_path, 3, 4, content=b'others')
  assert versions.exported_digest(tmp_path, 4) not in (None, first.digest)


def test_the_digest_of_weights_does_not_depend_on_the_files(tmp_path):
  alone = versions.verified(add(tmp_path, 1, 4))
  together = versions.verified(add(tmp_path, 2, 4, files=('a.safetensors', 'b.safetensors')))
  assert together.files != alone.files and together.digest == alone.digest
  assert versions.verified(add(tmp_path, 3, 4, content=b'wegihts')).digest != alone.digest


def test_a_manifest_without_a_digest_of_tensors_is_read(tmp_path):
  """As versions before this digest wrote it."""
  directory = add(tmp_path, 1, 4)
  _manifest(lambda manifest: manifest.pop('tensors'))(directory)
  old = versions.verified(directory)
  _manifest(lambda manifest: manifest['files'].pop('config.json'))(directory)
  (directory / 'config.json').unlink()
  assert versions.verified(directory).digest == old.digest


def test_unfinished_versions_are_no_versions(tmp_path):
  unfinished = versions.begin(tmp_path, Version(1, 0))
  (unfinished / 'model.safetensors').write_bytes(b'half')
  (tmp_path / 'notes').mkdir()
  assert versions.newer(tmp_path, None) == []
  versions.withdraw_later(tmp_path, 0)
  assert not unfinished.exists()


def _manifest(change):
  def apply(path):
    manifest = json.loads((path / versions.MANIFEST).read_text())
    change(manifest)
    (path / versions.MANIFEST).write_text(json.dumps(manifest))

  return apply


def _link(path):
  (path / 'config.json').unlink()
  os.symlink('/etc/hostname', path / 'config.json')


def _fifo(path):
  (path / 'config.json').unlink()
  os.mkfifo(path / 'config.json')


DAMAGE = {
  'manifest missing': lambda path: (path / versions.MANIFEST).unlink(),
  'manifest cut': lambda path: (path / versions.MANIFEST).write_text('{"schema": 1'),
  'manifest deep': lambda path: (path / versions.MANIFEST).write_text('[' * 100_000),
  'manifest of another version': _manifest(lambda m: m.update(step=7)),
  'manifest of another schema': _manifest(lambda m: m.update(schema=2)),
  'manifest of another type': _manifest(lambda m: m.update(files=[])),
  'file outside': _manifest(lambda m: m['files'].update({'../x': m['files']['config.json']})),
  'weights cut': lambda path: (path / 'model.safetensors').write_bytes(b'weight'),
  'weights changed': lambda path: (path / 'model.safetensors').write_bytes(b'Weights'),
  'weights missing': lambda path: (path / 'model.safetensors').unlink(),
  'file added': lambda path: (path / 'model-2.safetensors').write_bytes(b'x'),
  'link': _link,
  'pipe': _fifo,
}


@pytest.mark.parametrize('name', DAMAGE)
def test_a_version_unlike_its_manifest_is_refused_in_one_line(tmp_path, name):
  path = add(tmp_path, 1, 2)
  assert versions.verified(path).version == Version(1, 2)
  DAMAGE[name](path)
  with pytest.raises(UserError) as refused:
    versions.verified(path)
  line = str(refused.value)
  assert '\n' not in line and str(path) in line and len(line) < 1000
