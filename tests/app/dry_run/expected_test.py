"""Expected times by hand-worked examples."""

import types

import numpy as np
import pytest

from jaxrl_llm.app.dry_run.expected import PRODUCTS, expected_seconds, link_rate
from jaxrl_llm.parallel.collectives import Traffic
from jaxrl_llm.parallel.topology import CHIPS

H100, V5E = CHIPS['h100'], CHIPS['v5e']


def mesh(hosts, per_host):
  """What the model reads of a mesh: its devices, and the process that each belongs to."""
  devices = [types.SimpleNamespace(process_index=i // per_host) for i in range(hosts * per_host)]
  return types.SimpleNamespace(devices=np.array(devices))


def sent(**kinds):
  """Collectives of given (bytes, overlapped bytes), by kind with underscores for hyphens."""
  return {
    kind.replace('_', '-'): Traffic(1, size, '', overlapped)
    for kind, (size, overlapped) in kinds.items()
  }


@pytest.mark.parametrize(
  ('chip', 'hosts', 'per_host', 'rate'),
  [
    (H100, 1, 8, 450e9),
    (H100, 2, 8, 400e9),  # Eight network cards of 50 GB/s.
    (H100, 4, 2, 100e9),
    (V5E, 4, 4, 200e9),
  ],
)
def test_gpu_hosts_exchange_through_one_network_card_per_gpu(chip, hosts, per_host, rate):
  assert link_rate(mesh(hosts, per_host), chip) == rate


@pytest.mark.parametrize(
  ('collectives', 'seconds'),
  [
    ({}, 1.0),
    # Of four devices, each receives three quarters of a gathered array.
    (sent(all_gather=(200e9, 0)), 1.0 + 0.75),
    (sent(reduce_scatter=(200e9, 200e9)), 1.0),
    (sent(all_reduce=(200e9, 0)), 1.0 + 1.5),
    (sent(collective_permute=(200e9, 0)), 1.0 + 1.0),
    # Longer than the products.
    (sent(all_gather=(800e9, 400e9)), 1.5 + 1.5),
    (sent(all_gather=(100e9, 60e9), all_reduce=(80e9, 40e9)), 1.0 + 0.15 + 0.3),
  ],
)
def test_only_collectives_beside_products_cost_nothing(collectives, seconds):
  operations = round(4 * V5E.peak_flops * PRODUCTS)
  found = expected_seconds(operations, collectives, mesh(1, 4), V5E)
  assert found == pytest.approx(seconds)
