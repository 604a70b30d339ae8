"""Reads model directories onto a mesh. `read_params` is not in `state`, so that `state` does not
import the library for weight files.
"""

from __future__ import annotations

from pathlib import Path

from jax.sharding import Mesh
from jaxtyping import Array

from jaxrl_llm.core.trees import flatten, unflatten
from jaxrl_llm.core.types import Params
from jaxrl_llm.learner.state import param_shardings, place_array
from jaxrl_llm.models.api import Model
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.weights.layout import StoredArray
from jaxrl_llm.weights.safetensors_files import load_params


def read_params(
  model: Model, mesh: Mesh, directory: str | Path, spec: ModelSpec, *, with_head: bool = True
) -> Params:
  """Reads the parameters of a model directory onto the mesh, in the data type of the model's
  parameters. Each process reads only the shards that its devices hold.

  Args:
    spec: spec of the model in the directory, which may have another kind of head than `model`.
    with_head: whether to read the output head if it is separate from the embedding. If False, the
      result has no such head; `with_output` adds one.

  Raises:
    UserError: see `weights.safetensors_files.load_params`.
  """
  shardings = flatten(param_shardings(model, mesh))
  skipped = set() if with_head else {'head/kernel'}

  def place(name: str, stored: StoredArray) -> Array | None:
    return None if name in skipped else place_array(stored, shardings[name])

  options = model.options
  params = load_params(
    directory, spec, scan_layers=options.scan_layers, dtype=options.param_dtype, place=place
  )
  flat = flatten(params).items()
  return unflatten({name: array for name, array in flat if name not in skipped})
