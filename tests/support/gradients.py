"""Computes the gradients of a run's recorded plans, in one process or in every process of a job.

  python tests/support/gradients.py RUN PLANS OUT MESH

RUN is a finished run, PLANS is a JSON file with some of its plans, and MESH is a `MeshConfig` as
JSON.
The process detects its job as `jaxrl train` does. Process 0 writes losses and gradients to OUT
(.npz).
"""

import functools
import json
import pathlib
import sys

import jax
import numpy as np

from jaxrl_llm.batching.plan import StepPlan, plan_shape
from jaxrl_llm.core.trees import flatten
from jaxrl_llm.data.load import RowLoader
from jaxrl_llm.learner.algorithm import Closed, Setting
from jaxrl_llm.learner.policy_gradient import policy_gradient
from jaxrl_llm.learner.policy_options import GrpoConfig
from jaxrl_llm.learner.state import place_params
from jaxrl_llm.learner.supervised import SftConfig, sft
from jaxrl_llm.learner.update import gradients
from jaxrl_llm.models.api import build_model
from jaxrl_llm.parallel.coordination import CoordinationConfig
from jaxrl_llm.parallel.job import join, this_job
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh, data_parallel_ranks
from jaxrl_llm.rollout.gatherer import Gatherer
from jaxrl_llm.weights.hf import load_params, read_spec


def main(run: pathlib.Path, recorded: pathlib.Path, out: pathlib.Path, config: MeshConfig) -> None:
  job = this_job()
  membership = join(job, CoordinationConfig()) if job is not None else None
  mesh = build_mesh(config)
  spec = read_spec(run / 'hf')
  model = build_model(spec)
  params = place_params(model, mesh, load_params(run / 'hf', spec))
  loader, found = RowLoader(run, mesh), {}
  setting = Setting(max_response_length=8)
  algorithms = {'sft': sft(SftConfig(), setting), 'grpo': policy_gradient(GrpoConfig(), setting)}
  # Each function is compiled once for all plans of its stage that have the same shape.
  computes = {
    stage: jax.jit(
      functools.partial(
        gradients, model, algorithm.loss, token_chunk=16, on_policy=('proximal_logprobs',)
      )
    )
    for stage, algorithm in algorithms.items()
  }
  for value in json.loads(recorded.read_text()):
    plan = StepPlan.from_json(value)
    algorithm, compute = algorithms[plan.stage], computes[plan.stage]
    annotation = algorithm.annotate(Closed(plan.rows, plan.step, {}, None))
    ranks = data_parallel_ranks(mesh)
    shape = plan_shape(rows=len(plan.rows), ranks=ranks, chunks=4, chunk_len=16)
    columns = {'advantages': annotation.advantages}
    packed = loader.fill(next(loader.steps(plan, shape)), columns, annotation.in_loss)
    result = compute(params, packed.chunks, packed.used, {})
    grads = Gatherer(mesh).gather(result.grads)
    if jax.process_index() == 0:
      found[f'{plan.step}/loss'] = np.asarray(result.loss.addressable_data(0))
      found |= {f'{plan.step}/grads/{k}': v for k, v in flatten(grads).items()}
  if jax.process_index() == 0:
    print(f'{job}: {dict(mesh.shape)}')
    np.savez(out, **found)
  if membership is not None:
    membership.leave(out.parent)


if __name__ == '__main__':
  main(*map(pathlib.Path, sys.argv[1:4]), MeshConfig(**json.loads(sys.argv[4])))
