"""GRPO of a 7B model on several accelerators: one machine of 8 GPUs, two Slurm nodes, a TPU slice.

Papers:    Qwen2.5 (arXiv:2412.15115): the model has the architecture of Qwen2.5-7B.
Command:   jaxrl launch … --config=recipes:VARIANT --config.policy.init_from=DIR, where DIR is a
           Hugging Face directory. The launch flags are in the comment on each variant below.
Hardware:  one_host: 8 H100 of 80 GB, 4 for the trainer and 4 for vLLM servers.
           two_nodes: 2 nodes of 8 H100, the trainer on one and 8 vLLM servers on the other.
           v5e_64: a v5e-64 slice for the trainer, GPU hosts for vLLM servers.
Memory and time: docs/guides/clusters.md#recipes, from compiled programs.
Result:    not run: the training programs were compiled for these devices and never executed there;
           vLLM on GPUs, the NCCL transfer and TPU pods were not tried.
"""

import dataclasses

import sizes

from jaxrl_llm.api import Config, MeshConfig, VllmConfig

RECIPES = {
  # jaxrl launch local --gpus=4 --rollout_nodes=1 --rollout_servers=4 --rollout_gpus=1
  'one_host': 4,
  # jaxrl launch slurm --nodes=1 --gpus=8 --rollout_nodes=1 --rollout_servers=8 --rollout_gpus=1
  'two_nodes': 8,
  # jaxrl launch jobset --nodes=16 --tpu=tpu-v5-lite-podslice --topology=8x8 --rollout_nodes=2
  #   --rollout_servers=8 --rollout_gpus=1
  'v5e_64': 64,
}
"""Number of trainer devices, keyed by variant. The parameters are sharded over all of them."""


def get_config(variant: str = 'one_host') -> Config:
  if variant not in RECIPES:
    raise ValueError(f'variant {variant!r}: wanted one of {", ".join(RECIPES)}')
  base = sizes.get_config('7b')
  return dataclasses.replace(
    base,
    name=f'recipe-{variant}'.replace('_', '-'),
    rollout=dataclasses.replace(
      base.rollout, vllm=VllmConfig(dtype='bfloat16', args={'gpu_memory_utilization': 0.9})
    ),
    learner=dataclasses.replace(base.learner, mesh=MeshConfig(data=1, fsdp=RECIPES[variant])),
  )
