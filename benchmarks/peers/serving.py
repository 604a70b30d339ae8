"""One side of a comparison, in its own process: runs the works named on standard input and reports
their cost.

Standard library and NumPy only: it runs in this project's environment and in the peers'.
"""

import json
import os
import pathlib
import sys
import time

import numpy as np


def serve(works):
  """Runs works by name until standard input ends.

  Args:
    works: functions by name; each completes its work before it returns, and its first call returns
      a number on which all sides agree.
  """
  answers = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)  # Keeps what libraries print out of the answers.
  print(json.dumps(sorted(works)), file=answers, flush=True)
  for line in sys.stdin:
    pathlib.Path('/proc/self/clear_refs').write_text('5')  # Resets VmHWM, the peak of VmRSS.
    before = memory('VmRSS')
    wall, cpu = time.perf_counter(), time.process_time()
    value = works[line.strip()]()
    cost = {
      'wall': time.perf_counter() - wall,
      'cpu': time.process_time() - cpu,
      'memory': memory('VmHWM') - before,
      'value': float(value),
    }
    print(json.dumps(cost), file=answers, flush=True)


def memory(kind):
  """Returns a figure of this process's memory in bytes."""
  lines = pathlib.Path('/proc/self/status').read_text().splitlines()
  (line,) = [line for line in lines if line.startswith(f'{kind}:')]
  return int(line.split()[1]) * 1024


def padded(path):
  """Reads a file's rows in the layout of RL libraries: prompts padded on the left, completions on
  the right.

  Returns:
    A dict of prompt_ids, prompt_mask, completion_ids, completion_mask `[rows, time]` and advantages
      `[rows]`.
  """
  rows = np.load(path)
  tokens = np.split(rows['tokens'], np.cumsum(rows['lengths'])[:-1])
  prompts = [row[:n] for row, n in zip(tokens, rows['prompt_lens'])]
  completions = [row[n:] for row, n in zip(tokens, rows['prompt_lens'])]
  found = {'advantages': rows['advantages'].astype(np.float32)}
  for name, parts, left in (('prompt', prompts, True), ('completion', completions, False)):
    width = max(map(len, parts))
    found[f'{name}_ids'] = np.zeros((len(parts), width), np.int32)
    found[f'{name}_mask'] = np.zeros((len(parts), width), np.int32)
    for i, part in enumerate(parts):
      at = slice(width - len(part), width) if left else slice(0, len(part))
      found[f'{name}_ids'][i, at] = part
      found[f'{name}_mask'][i, at] = 1
  return found
