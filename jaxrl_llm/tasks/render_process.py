"""Program that `tasks.rendering` runs to render chat templates. It reads requests from stdin and
writes replies to stdout, one JSON line each.

It is run and not imported, so that the process has no data except the conversation that it renders.
A rendering that exceeds its CPU time limit ends the process.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys


def main() -> None:
  # Ctrl-C reaches the whole process group. Only the parent handles it.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  orders, answers = os.fdopen(0, 'rb', closefd=False), os.fdopen(os.dup(1), 'wb')
  os.dup2(2, 1)  # Keeps other output off the reply stream.
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

  from transformers.utils.chat_template_utils import render_jinja_template

  # Wait 'order': unbounded: it lasts until the owner of this process sends a line or ends.
  limits = json.loads(orders.readline())
  _limit_memory(limits['memory_bytes'])
  _write(answers, {})
  for line in orders:
    order = json.loads(line)
    # When the CPU time is used up, SIGPROF ends the process, even within one long operation.
    signal.setitimer(signal.ITIMER_PROF, limits['cpu_s'])
    try:
      (text,), marks = render_jinja_template(
        conversations=[order['messages']],
        tools=order['tools'],
        return_assistant_tokens_mask=True,
        chat_template=limits['template'],
        add_generation_prompt=order['add_generation_prompt'],
        **order['variables'],
      )
      if len(text) > limits['characters']:
        raise ValueError(f'gives {len(text):,} characters, wanted at most {limits["characters"]:,}')
      # A template can also mark text that it renders into a variable, so a mark may lie beyond the
      # end of the rendered text.
      inside = [[start, min(end, len(text))] for start, end in marks[0]]
      answer = {'text': text, 'marks': [[start, end] for start, end in inside if start < end]}
    except Exception as error:
      answer = {'error': ': '.join(filter(None, [type(error).__name__, str(error)[:2000]]))}
    signal.setitimer(signal.ITIMER_PROF, 0)
    _write(answers, answer)


def _write(file, answer: dict) -> None:
  file.write(json.dumps(answer).encode() + b'\n')
  file.flush()


def _limit_memory(room_bytes: int) -> None:
  """Limits the address space to its current size plus `room_bytes`."""
  try:
    with open('/proc/self/statm') as file:
      pages = int(file.read().split()[0])
  except OSError:  # /proc is Linux only. Elsewhere the CPU time limit bounds memory indirectly.
    return
  limit = pages * os.sysconf('SC_PAGE_SIZE') + room_bytes
  granted = resource.getrlimit(resource.RLIMIT_AS)[1]
  if granted != resource.RLIM_INFINITY:
    limit = min(limit, granted)
  resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == '__main__':
  try:
    main()
  except BrokenPipeError:  # The parent has exited.
    sys.exit(0)
