"""Lease files, changed in every way, unsigned and signed: each counts as what it says, or is
skipped with one line; the good one beside it counts.
"""

import dataclasses
import json

import pytest
from fuzzing import COUNTS, bounded, changed, check_line, encoded, fuzz, quiet
from hypothesis import strategies as st

from jaxrl_llm.core.net.registry import Kind, Lease, Registry, Watch

ID = '0' * 32
LEASE = dataclasses.asdict(
  Lease(
    id=ID,
    kind=Kind.VLLM,
    name='one',
    address='http://127.0.0.1:8400',
    fingerprint={'model': 'ab', 'tokenizer': 'cd'},
    started=1.0,
    renewed=2.0,
  )
)


@pytest.fixture
def registry(tmp_path):
  opened = Registry(tmp_path / 'registry', 'registry')
  opened.put(Lease(kind=Kind.VLLM, name='good', address='unix:/tmp/good.sock'))
  return opened


def look(registry, data):
  """The leases that a reader accepts beside the good one."""
  file = registry.directory / f'vllm.{ID}.lease'
  file.write_bytes(data)
  file.chmod(0o600)
  with bounded(), quiet() as said:
    reader = Watch(registry, Kind.VLLM)
    found = {lease.name: lease for lease in (*reader.look(0.0), *reader.look(1.0))}
  assert found.pop('good')
  lines = [*said.lines]
  said.check()
  assert len(lines) <= 1
  for line in lines:
    check_line(line)
  return [*found.values()]


@COUNTS
def test_an_unsigned_file_never_counts(registry, count):
  signed = {'schema': 1, 'lease': LEASE, 'signature': registry._sign(LEASE)}
  assert look(registry, json.dumps(signed).encode())

  def check(data):
    for lease in look(registry, data):
      # The change was one that JSON does not show, such as a space.
      assert dataclasses.asdict(lease) == LEASE

  fuzz(check, count, data=encoded(signed))


@COUNTS
def test_a_signed_file_counts_only_if_every_field_has_its_meaning(registry, count):
  def check(body):
    try:
      row = {'schema': 1, 'lease': body, 'signature': registry._sign(body)}
      data = json.dumps(row).encode()
    except (TypeError, ValueError):  # No JSON.
      return
    for lease in look(registry, data):
      assert lease.id == ID and lease.kind == Kind.VLLM and '/' not in lease.name
      assert lease.address.startswith(('http://', 'https://', 'unix:/'))
      assert lease.unreachable() is None and lease.name.isprintable()
      assert all(isinstance(text, str) for text in lease.fingerprint.values())

  fuzz(check, count, body=st.just(LEASE).flatmap(changed))
