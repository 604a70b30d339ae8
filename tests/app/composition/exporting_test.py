"""Exports that one process writes alone. Several processes: `tests/jobs/together_test.py`."""

import asyncio

import jax
import pytest
from parameters import random_params

from jaxrl_llm.app.composition.exporting import ModelExport, export_together
from jaxrl_llm.core.errors import RunError
from jaxrl_llm.learner.state import place_params
from jaxrl_llm.master.process import Process
from jaxrl_llm.models.api import build_model
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.spec import ModelOptions
from jaxrl_llm.parallel.coordinator import Coordinator
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh
from jaxrl_llm.rollout.gatherer import Gatherer

SPEC = tiny('llama', 40)


@pytest.mark.parametrize('blocked', [True, False])
def test_an_export_leaves_only_its_files(tmp_path, blocked):
  mesh = build_mesh(MeshConfig(), jax.devices()[:1])
  device = DeviceThread()
  coordinator = Coordinator(device, on_signal=lambda signum: None)
  process = Process(coordinator=coordinator, device=device, mesh=mesh)
  params = place_params(build_model(SPEC, ModelOptions(), mesh), mesh, random_params(SPEC))
  model = ModelExport(
    directory=tmp_path, gatherer=Gatherer(mesh), params=params, spec=SPEC, dtype='float32'
  )
  unfinished = tmp_path / 'model.safetensors.unfinished'
  if blocked:
    unfinished.mkdir()
  export = export_together(process, model, lambda: None, digests=False)
  if blocked:
    with pytest.raises(RunError, match='Is a directory'):
      asyncio.run(export)
  else:
    assert asyncio.run(export).tensors
  device.close()
  left = [unfinished.name] if blocked else ['model.safetensors']
  assert [path.name for path in tmp_path.iterdir()] == left
