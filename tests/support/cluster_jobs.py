"""Jobs that tests of several launchers turn into text."""

from jaxrl_llm.app.cluster.job import Job, ProcessGroup, ProcessResources

HOSTILE = (
  "it's",
  '"quoted"',
  'a b',
  '',
  '$(HOME) $$(HOME) $$$ ${HOME} `id` $',
  '$\u00e9\u4e2d',
  '; rm -rf x && echo | tee',
  'line\nbreak\n',
  'back\\slash \\n \\',
  '*',
  '~',
  '-n',
  '--',
  '#comment',
  '%j %%',
  '! & | > { [ : - ? @ ,',
  'END',
  'END_\nEND\n',
  'y',
  'null',
  '1e3',
  '0o17',
  '0x1',
  '1_000',
  '2026-11-24',
  '\ttab',
  'bell\a\x7f\x85\u2028',
  '{"a": 1}',
)
"""Arguments that a shell, a template or a YAML parser could take for something else."""


def job(name: str = 'quickstart', *, trainer: ProcessGroup | None = None, **fields) -> Job:
  """Returns a job with its run directory and key on a shared file system."""
  if trainer is None:
    trainer = ProcessGroup(
      name='trainer', command=('/venv/bin/python', '-m', 'train', '--config=x')
    )
  workdir = fields.pop('workdir', f'/data/runs/{name}')
  groups = (trainer, *fields.pop('services', ()))
  files = {f'{workdir}/registry/key': 'secret'}
  return Job(name=name, groups=groups, workdir=workdir, **{'files': files, **fields})


def cpu_job() -> Job:
  """Returns a job with two trainer processes on CPUs."""
  command = ('jaxrl', 'train', '--config=quickstart', '--workdir=/data/runs/cpu')
  trainer = ProcessGroup(
    name='trainer', command=command, nodes=2, resources=ProcessResources(cpus=4, memory_gib=16)
  )
  return job('cpu', trainer=trainer, time_limit_s=7200, restarts=1)


def gpu_job() -> Job:
  """Returns a job with four trainer nodes of 8 GPUs each, and four nodes with vLLM servers."""
  command = ('jaxrl', 'train', '--config=quickstart', '--workdir=/data/runs/gpus')
  serve = ('jaxrl', 'serve', '--role=vllm', '--registry=/data/runs/gpus/registry')
  eight = ProcessResources(cpus=96, memory_gib=800, gpus=8)
  return job(
    'gpus',
    trainer=ProcessGroup(name='trainer', command=command, nodes=4, resources=eight),
    services=[ProcessGroup(name='rollout', command=serve, nodes=4, resources=eight)],
    env={'JAXRL_GRACE_S': '30'},
  )


def tpu_job(*, nodes: int = 16, slices: int = 1, **fields) -> Job:
  """Returns a job with a v5e slice of 64 chips for the trainer, and hosts of 8 chips for vLLM."""
  command = ('jaxrl', 'train', '--config=quickstart', '--workdir=/data/runs/v5e-64')
  serve = ('jaxrl', 'serve', '--role=vllm', '--registry=/data/runs/v5e-64/registry')
  kind = 'tpu-v5-lite-podslice'
  trainer = ProcessGroup(
    name='trainer',
    command=command,
    nodes=nodes * slices,
    slices=slices,
    resources=ProcessResources(tpu=kind, topology=fields.pop('topology', '8x8')),
  )
  rollout = ProcessGroup(
    name='rollout',
    command=serve,
    nodes=2,
    resources=ProcessResources(tpu=kind, topology=fields.pop('rollout', '2x4')),
  )
  return job('v5e-64', trainer=trainer, services=[rollout], grace_s=120, **fields)
