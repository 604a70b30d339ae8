"""Runs launch/train.py, and kills it within a commit.

JAXRL_TEST_KILL is 'FUNCTION STEP': the name of a function of `runtime.checkpoint`, and the step of
the commit. The process is killed when that function is called with a path of that commit.
"""

import os
import pathlib
import runpy
import signal

from jaxrl_llm.runtime import checkpoint

_NAME, _STEP = os.environ['JAXRL_TEST_KILL'].split()
_FUNCTION = getattr(checkpoint, _NAME)


def _killing(path: pathlib.Path, *args, **kwargs):
  place = pathlib.PurePath('checkpoints', _STEP)
  if str(place) in str(path):
    os.kill(os.getpid(), signal.SIGKILL)
  return _FUNCTION(path, *args, **kwargs)


if __name__ == '__main__':
  setattr(checkpoint, _NAME, _killing)
  runpy.run_path('launch/train.py', run_name='__main__')
